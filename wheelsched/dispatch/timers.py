"""What waits: one wheel per group and lane, and a table for the timers that need more than their record holds.

A job's record leads to its row by (fire_at, random half of the id). A retry is due at another time than its row's, and a held job
must be fired by name: both are few, and have an entry in `special` keyed by the random half.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from wheelsched.core.ids import id_low
from wheelsched.dispatch.queues import QueueMemory
from wheelsched.model.rows import KIND_HELD, KIND_JOB, KIND_RETRY, TIMER, JobState, timer_word
from wheelsched.model.schedules import Phase
from wheelsched.model.states import Status, due_at_ms
from wheelsched.wheel import WheelSet

# What one sweep may give at most; about 64 wheels share it, precise ones first.
SWEEP_RECORDS_MAX = 32_768
SWEEP_SPECIALS_MAX = 2_048
_NEXT, _BUFFERED = int(Phase.NEXT), int(Phase.BUFFERED)
# The word's low byte, by which the records of plain jobs are told from the few others: 0 for those, 1 for the others.
_WORD_AT = 20
_IS_SPECIAL = bytes(int(byte & 7 != KIND_JOB) for byte in range(256))


class Special(NamedTuple):
    """A timer that is not simply its job's `fire_at`."""

    job_id: bytes
    version: int
    fire_at_ms: int
    priority: int
    queue: QueueMemory
    retry: bool
    occurs: bool = False  # the next occurrence of a schedule, which needs its successor to fire


class Due(NamedTuple):
    """What a sweep found for one group and lane: records to ready once the watermark covers them, and held jobs to fire by name."""

    group: int
    lane: int
    records: bytes
    held: list[Special]


class Timers:
    """Timers of all groups of this node up to the loaded mark of each group and lane.

    `loaded_ms[lane][group]`: everything due before it, and above the watermark when loaded, is in the wheel; what comes in below
    it must be added here, what comes in at or above it is left to the loader."""

    def __init__(self, group_count: int, now_ms: int) -> None:
        self._group_count = group_count
        self._wheels = WheelSet(2 * group_count, now_ms)
        self._special: list[dict[int, Special]] = [{} for _ in range(group_count)]
        self.loaded_ms: list[list[int]] = [[0] * group_count, [0] * group_count]

    def __len__(self) -> int:
        return len(self._wheels)

    @property
    def reserved_bytes(self) -> int:
        return self._wheels.reserved_bytes

    def clear(self, now_ms: int) -> None:
        """Forget everything; the loader starts again from marks set by the caller."""
        self._wheels.clear(now_ms)
        for table in self._special:
            for special in table.values():
                if special.retry:
                    special.queue.retrying[special.priority] -= 1
            table.clear()

    def clear_group(self, group: int) -> None:
        """The group is led no more."""
        for special in self._special[group].values():
            if special.retry:
                special.queue.retrying[special.priority] -= 1
        self._special[group].clear()
        for lane in (0, 1):
            self.loaded_ms[lane][group] = 0
            wheel = self._wheels.wheel(lane * self._group_count + group)
            wheel.clear(wheel.hand_ms)

    @property
    def hand_ms(self) -> int:
        return self._wheels.hand_ms

    def add(self, group: int, state: JobState, queue: QueueMemory) -> None:
        """Set the timer of a waiting job if it falls before the loaded mark."""
        due_ms = due_at_ms(state)
        if due_ms >= self.loaded_ms[state.lane][group] and state.status != Status.RETRYING:
            return
        run = state.run
        if state.held and run is not None and run.phase == _BUFFERED:
            return  # what it waits for is no instant
        low = id_low(state.job_id)
        kind = KIND_RETRY if state.status == Status.RETRYING else KIND_HELD if state.held else KIND_JOB
        if kind != KIND_JOB:
            self._forget_special(group, low)
            retry = kind == KIND_RETRY
            occurs = run is not None and run.phase == _NEXT
            self._special[group][low] = Special(state.job_id, state.version, state.fire_at_ms, state.priority, queue, retry, occurs)
            if retry:
                queue.retrying[state.priority] += 1
            # A retry that is held too is fired by name, like any held job.
            kind = KIND_HELD if state.held else KIND_RETRY
        wheel = self._wheels.wheel(state.lane * self._group_count + group)
        wheel.add(due_ms, low, state.version, timer_word(queue.number, state.priority, kind))

    def add_records(self, group: int, lane: int, records: bytes) -> None:
        """Plain jobs' timers, packed, as the loader reads them."""
        self._wheels.wheel(lane * self._group_count + group).add_batch(records)

    def cancel(self, group: int, state: JobState) -> None:
        """Remove the timer that `add` set for this very state, if it did."""
        due_ms = due_at_ms(state)
        low = id_low(state.job_id)
        if due_ms >= self.loaded_ms[state.lane][group] and state.status != Status.RETRYING:
            return
        if state.status == Status.RETRYING or state.held:
            self._forget_special(group, low)
        self._wheels.wheel(state.lane * self._group_count + group).cancel(due_ms, low, state.version)

    def _forget_special(self, group: int, low: int) -> None:
        special = self._special[group].pop(low, None)
        if special is not None and special.retry:
            special.queue.retrying[special.priority] -= 1

    def special(self, group: int, low: int) -> Special | None:
        return self._special[group].get(low)

    def next_deadline_ms(self) -> int | None:
        deadline = self._wheels.next_deadline()
        return None if deadline < 0 else deadline

    def sweep(self, now_ms: int) -> tuple[list[Due], bool]:
        """Everything due by `now_ms` within the budget, and whether there is more."""
        # Special ones are looked up one by one, some 5 us each: a sweep of 32,768 of them held the loop for a third of a second.
        are_few = sum(map(len, self._special)) <= SWEEP_SPECIALS_MAX
        records_max = SWEEP_RECORDS_MAX if are_few else SWEEP_SPECIALS_MAX
        found = [self._resolve(index, records) for index, records in self._wheels.sweep(now_ms, records_max)]
        return found, self._wheels.hand_ms < now_ms

    def _resolve(self, index: int, records: bytes) -> Due:
        """Turn records of retries into records of their rows, and set held jobs apart."""
        lane, group = divmod(index, self._group_count)
        table = self._special[group]
        if not table:
            return Due(group, lane, records, [])
        plain: list[bytes] = []
        held: list[Special] = []
        # Record by record a full sweep took 33 ms; by searching for the special ones it takes what those cost.
        is_special = records[_WORD_AT :: TIMER.size].translate(_IS_SPECIAL)
        place, copied = is_special.find(1), 0
        while place >= 0:
            position = place * TIMER.size
            plain.append(records[copied:position])
            copied = position + TIMER.size
            _, low, version, word = TIMER.unpack_from(records, position)
            place = is_special.find(1, place + 1)
            special = table.get(low)
            if special is None or special.version != version:
                continue  # its job has moved on
            self._forget_special(group, low)
            if word & 7 == KIND_HELD:
                held.append(special)
            else:
                plain.append(TIMER.pack(special.fire_at_ms, low, version, word & ~7 | KIND_JOB))
        plain.append(records[copied:])
        return Due(group, lane, b"".join(plain), held)


def pack(states: Sequence[tuple[JobState, QueueMemory]]) -> bytes:
    """Ready records of QUEUED jobs."""
    return b"".join(
        TIMER.pack(state.fire_at_ms, id_low(state.job_id), state.version, timer_word(queue.number, state.priority, KIND_JOB))
        for state, queue in states
    )
