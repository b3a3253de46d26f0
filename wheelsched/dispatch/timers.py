"""What waits: one wheel per group and lane, and a table for the timers that need more than their record holds.

A job's record leads to its row by (fire_at, random half of the id). A retry is due at another time than its row's, and a held job
must be fired by name: both are few, and have an entry in `special` keyed by the random half. The next occurrences of schedules are
held too, but may be very many: theirs are swept as packed records and looked up when their turn comes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from wheelsched.core.ids import id_low
from wheelsched.dispatch.queues import QueueMemory
from wheelsched.model.rows import KIND_HELD, KIND_JOB, KIND_NEXT, KIND_RETRY, TIMER, JobState, timer_word
from wheelsched.model.schedules import Phase
from wheelsched.model.states import Status, due_at_ms
from wheelsched.wheel import WheelSet

# What one sweep may give at most; about 64 wheels share it, precise ones first.
SWEEP_RECORDS_MAX = 32_768
SWEEP_SPECIALS_MAX = 2_048
_NEXT, _BUFFERED = int(Phase.NEXT), int(Phase.BUFFERED)
# The kind is in the word's low byte.
_WORD_AT = 20
_KINDS = bytes(byte & 7 for byte in range(256))
_RUNS_OF_KIND = re.compile(rb"(?s)(.)\1*")


class Special(NamedTuple):
    """A timer that is not simply its job's `fire_at`."""

    job_id: bytes
    version: int
    fire_at_ms: int
    priority: int
    queue: QueueMemory
    retry: bool


class Due(NamedTuple):
    """What a sweep found for one group and lane: records to ready once the watermark covers them, held jobs to fire by name, and
    the packed records of occurrences, which need their successors to fire."""

    group: int
    lane: int
    records: bytes
    held: list[Special]
    occurrences: bytes


class Timers:
    """Timers of all groups of this node up to the loaded mark of each group and lane.

    `loaded_ms[lane][group]`: everything due before it, and above the watermark when loaded, is in the wheel; what comes in below
    it must be added here, what comes in at or above it is left to the loader."""

    def __init__(self, group_count: int, now_ms: int) -> None:
        self._group_count = group_count
        self._wheels = WheelSet(2 * group_count, now_ms)
        self._special: list[dict[int, Special]] = [{} for _ in range(group_count)]
        self._next: list[dict[int, Special]] = [{} for _ in range(group_count)]
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
        for waiting in self._next:
            waiting.clear()

    def clear_group(self, group: int) -> None:
        """The group is led no more."""
        for special in self._special[group].values():
            if special.retry:
                special.queue.retrying[special.priority] -= 1
        self._special[group].clear()
        self._next[group].clear()
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
            special = Special(state.job_id, state.version, state.fire_at_ms, state.priority, queue, retry)
            if run is not None and run.phase == _NEXT:
                self._next[group][low] = special
                kind = KIND_NEXT
            else:
                self._special[group][low] = special
                # A retry that is held too is fired by name, like any held job.
                kind = KIND_HELD if state.held else KIND_RETRY
            if retry:
                queue.retrying[state.priority] += 1
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
        self._next[group].pop(low, None)
        special = self._special[group].pop(low, None)
        if special is not None and special.retry:
            special.queue.retrying[special.priority] -= 1

    def special(self, group: int, low: int) -> Special | None:
        return self._special[group].get(low) or self._next[group].get(low)

    def take_next(self, group: int, records: bytes) -> list[Special]:
        """The occurrences that swept records are of, but for those that have moved on; their timers are gone."""
        table = self._next[group]
        taken = []
        for _, low, version, _ in TIMER.iter_unpack(records):
            special = table.get(low)
            if special is not None and special.version == version:
                taken.append(table.pop(low))
        return taken

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
        if not table and not self._next[group]:
            return Due(group, lane, records, [], b"")
        plain: list[bytes] = []
        held: list[Special] = []
        occurrences: list[bytes] = []
        # Record by record a full sweep took 33 ms; by runs of one kind it takes what the special ones cost.
        for run in _RUNS_OF_KIND.finditer(records[_WORD_AT :: TIMER.size].translate(_KINDS)):
            kind = run[1][0]
            part = records[run.start() * TIMER.size : run.end() * TIMER.size]
            if kind == KIND_JOB:
                plain.append(part)
            elif kind == KIND_NEXT:
                occurrences.append(part)
            else:
                self._look_up(group, part, plain, held)
        return Due(group, lane, b"".join(plain), held, b"".join(occurrences))

    def _look_up(self, group: int, records: bytes, plain: list[bytes], held: list[Special]) -> None:
        table = self._special[group]
        for _, low, version, word in TIMER.iter_unpack(records):
            special = table.get(low)
            if special is None or special.version != version:
                continue  # its job has moved on
            self._forget_special(group, low)
            if word & 7 == KIND_HELD:
                held.append(special)
            else:
                plain.append(TIMER.pack(special.fire_at_ms, low, version, word & ~7 | KIND_JOB))


def pack(states: Sequence[tuple[JobState, QueueMemory]]) -> bytes:
    """Ready records of QUEUED jobs."""
    return b"".join(
        TIMER.pack(state.fire_at_ms, id_low(state.job_id), state.version, timer_word(queue.number, state.priority, KIND_JOB))
        for state, queue in states
    )
