"""The clock meets the wheels: what is due becomes one `Fire` for each group, and ready once that is applied."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from wheelsched.core.clock import Clock
from wheelsched.dispatch.occurrences import OUTAGE_MS, Occurrences
from wheelsched.dispatch.queues import RECORD_BYTES
from wheelsched.dispatch.timers import Special, Timers
from wheelsched.dispatch.waking import Waking
from wheelsched.model.commands import AnyCommand, Fire
from wheelsched.replica import ReplicaSet, propose_each

_RECORD_START = struct.Struct("<qQI")  # fire_at, random half of the id, version: a record but for its word
HELD_MAX = 100  # held jobs named by one command
IDLE_MS = 1_000


class _Pending(NamedTuple):
    """A swept batch that becomes ready when the watermark reaches `until_ms`."""

    until_ms: int
    lane: int
    records: bytes


class Firing:
    """Fires this node's groups. `on_ready(group, lane, packed records)` takes what has become QUEUED; `on_step_back()` is awaited when the
    wall clock was set back, and must load the wheels anew; `on_named(group, held)` is told which held jobs were named, and sets the
    timers again of those that are still held: a Fire whose stamp fell before their time does nothing. What schedules are to decide
    goes to `occurrences`."""

    def __init__(
        self, clock: Clock, timers: Timers, replicas: ReplicaSet, *, on_ready: Callable[[int, int, bytes], None],
        on_step_back: Callable[[], Awaitable[None]], on_named: Callable[[int, Sequence[Special]], None], occurrences: Occurrences,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._timers = timers
        self._replicas = replicas
        self._on_ready = on_ready
        self._on_step_back = on_step_back
        self._on_named = on_named
        self._occurrences = occurrences
        self._swept_ms = clock.wall_ms()
        self._pending: dict[int, deque[_Pending]] = {}
        self._lock = asyncio.Lock()
        self._next_ms = 0
        self.is_held = False
        self.waking = Waking(clock)
        self.swept_at_mono_ms = clock.mono_ms()

    def wake(self, due_ms: int) -> None:
        """A timer was set; look again if it comes before what the loop sleeps for."""
        if due_ms < self._next_ms:
            self.waking.wake()

    def on_watermark(self, group: int, watermark_ms: int) -> None:
        """A `Fire` was applied: what it covers is QUEUED now."""
        pending = self._pending.get(group)
        while pending and pending[0].until_ms <= watermark_ms:
            batch = pending.popleft()
            self._on_ready(group, batch.lane, batch.records)

    def forget(self) -> None:
        """Drop swept batches: the rows will be read again."""
        self._pending.clear()

    def forget_group(self, group: int) -> None:
        """The group is led no more."""
        self._pending.pop(group, None)

    def withdraw(self, group: int, lane: int, fire_at_ms: int, low: int, version: int) -> None:
        """A job moved on after it was swept and before the Fire: take its record out of the batch."""
        pending = self._pending.get(group)
        if not pending:
            return
        start = _RECORD_START.pack(fire_at_ms, low, version)
        for place, batch in enumerate(pending):
            position = batch.records.find(start) if batch.lane == lane else -1
            while position % RECORD_BYTES and position > 0:
                position = batch.records.find(start, position + 1)
            if position >= 0:
                left = batch.records[:position] + batch.records[position + RECORD_BYTES :]
                pending[place] = batch._replace(records=left)
                return

    def lag_ms(self) -> int:
        """How far firing is behind the clock: the age of the oldest timer that is due and still in the wheel."""
        deadline_ms = None if self.is_held else self._timers.next_deadline_ms()
        return 0 if deadline_ms is None else max(self._clock.wall_ms() - deadline_ms, 0)

    @property
    def pending_count(self) -> int:
        return sum(len(batch.records) // RECORD_BYTES for batches in self._pending.values() for batch in batches)

    async def turn(self) -> bool:
        """Fire everything due now; True if there is more than one sweep's worth."""
        async with self._lock:
            now_ms = self._clock.wall_ms()
            self.swept_at_mono_ms = self._clock.mono_ms()
            if self.is_held:
                self._swept_ms = now_ms
                return False
            # NTP slews the clock, which never makes it read less: a hand ahead of it means that it was set back, be it by 1 ms.
            # A sweep would then give timers up to the hand, which are not due.
            while now_ms < self._timers.hand_ms:
                await self._on_step_back()
                now_ms = self._clock.wall_ms()
            if now_ms - self._swept_ms > OUTAGE_MS:
                self._occurrences.begin_again()
            self._swept_ms = now_ms
            found, more = self._timers.sweep(now_ms)
            commands: list[tuple[int, AnyCommand]] = []
            held: list[tuple[int, list[Special]]] = []
            for due in found:
                if due.records:
                    self._put_aside(due.group, due.lane, due.records, now_ms)
                if due.occurrences:
                    self._occurrences.add(due.group, due.occurrences)
                held.append((due.group, due.held))
                commands += self._fire_held(due.group, due.held)
            # All groups with something put aside, not only those swept now: where the clock was set back before the last turn's
            # Fire got its stamp, that Fire fell short of its batch.
            commands += [(group, Fire(now_ms)) for group, pending in self._pending.items() if pending]
            if commands:
                # A group that is led elsewhere by now has lost its memory here with its office.
                await propose_each(self._replicas, commands)
                for group, named in held:
                    if named:
                        self._on_named(group, named)
            return more

    def _put_aside(self, group: int, lane: int, records: bytes, now_ms: int) -> None:
        if self._replicas.watermark_ms(group) >= now_ms:
            self._on_ready(group, lane, records)  # a create due at once has moved the watermark already
        else:
            self._pending.setdefault(group, deque()).append(_Pending(now_ms, lane, records))

    @staticmethod
    def _fire_held(group: int, held: list[Special]) -> list[tuple[int, AnyCommand]]:
        """Naming a held job clears its mark; the watermark is left alone."""
        return [
            (group, Fire(0, [(special.job_id, special.version) for special in held[start : start + HELD_MAX]]))
            for start in range(0, len(held), HELD_MAX)
        ]

    async def run(self) -> None:
        while True:
            more = await self.turn()
            if more:
                await asyncio.sleep(0)
                continue
            now_ms = self._clock.wall_ms()
            deadline_ms = None if self.is_held else self._timers.next_deadline_ms()
            self._next_ms = now_ms + IDLE_MS if deadline_ms is None else min(deadline_ms, now_ms + IDLE_MS)
            await self.waking.wait_until(self._clock.mono_ms() + self._next_ms - now_ms)
            self._next_ms = 0
