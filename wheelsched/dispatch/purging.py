"""The end of history: finds finished jobs over their queue's retention and proposes `Purge` in slices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from wheelsched.core.clock import Clock
from wheelsched.core.limits import DEAD_RETENTION_MS
from wheelsched.dispatch.queues import QueueMemory, Queues
from wheelsched.dispatch.waking import Waking
from wheelsched.model import keys
from wheelsched.model.commands import Purge
from wheelsched.model.rows import decode_done
from wheelsched.model.states import FINAL, Status
from wheelsched.replica import ReplicaSet, propose_each
from wheelsched.store import Rows, Store

SLICE_JOBS = 100
# Nobody counts the tombstones of discarded jobs, so every queue has to be looked at for them; they are kept for a day anyway.
TOMBSTONES_INTERVAL_MS = 3_600_000
EARLY_SLICES = 4
_PURGED = sorted((*FINAL, Status.DISCARDED))


class Purging:
    """One sweep looks at the head of each (group, queue, status) range; rows lie in order of fire_at, which is never after the end.

    But for jobs cancelled before their time: what is left of those beyond the head is gone through a few slices a sweep, from where
    the last sweep came to."""

    def __init__(self, queues: Queues, store: Store, replicas: ReplicaSet, clock: Clock, *, led: Sequence[int], interval_s: float) -> None:
        self._queues = queues
        self._store = store
        self._replicas = replicas
        self._clock = clock
        self._led = led
        self._interval_ms = int(interval_s * 1000)
        self.is_held = False
        self._next_ms = 0
        self._next_tombstones_ms = 0
        self._waking = Waking(clock)
        self._early: dict[bytes, bytes] = {}  # by range: position up to which jobs cancelled before their time were looked at

    async def turn(self) -> int:
        """A whole sweep if it is time; returns how many jobs were removed."""
        now_ms = self._clock.wall_ms()
        if now_ms < self._next_ms or self.is_held:
            return 0
        self._next_ms = now_ms + self._interval_ms
        removed = 0
        with_tombstones = now_ms >= self._next_tombstones_ms
        if with_tombstones:
            self._next_tombstones_ms = now_ms + TOMBSTONES_INTERVAL_MS
        for queue in list(self._queues):
            await asyncio.sleep(0)  # some hundred seeks a queue: let others have their turn
            for status in _PURGED:
                if (status == Status.DISCARDED and with_tombstones) or any(queue.cells[status * 3 : status * 3 + 3]):
                    for group in list(self._led):
                        removed += await self._purge(group, queue, status, now_ms)
        return removed

    async def _purge(self, group: int, queue: QueueMemory, status: Status, now_ms: int) -> int:
        before_ms = now_ms - self._retention_ms(queue, status)
        removed = 0
        for after, found in self._expired(group, queue, status, before_ms):
            if found:
                command = Purge(queue.tenant, queue.name, status, before_ms, SLICE_JOBS, after)
                (reply,) = await propose_each(self._replicas, ((group, command),))
                if isinstance(reply, Exception):
                    break  # led elsewhere by now
                removed += reply.count
            else:
                # Jobs that are kept for their Idempotency-Key beyond a short retention may be millions, all looked at in vain.
                await asyncio.sleep(0)
        return removed

    @staticmethod
    def _retention_ms(queue: QueueMemory, status: Status) -> int:
        if status == Status.DEAD:
            return max(DEAD_RETENTION_MS, queue.settings.retention_ms)
        # A discarded job's key is refused until its row's own `keep_until`.
        return 0 if status == Status.DISCARDED else queue.settings.retention_ms

    def _expired(self, group: int, queue: QueueMemory, status: Status, before_ms: int) -> Iterator[tuple[bytes, bool]]:
        """Slices of the range that may hold something: (position before the slice, whether it does)."""
        prefix = keys.done_prefix(group, queue.tenant, queue.name, status)
        # A job ends at or after its fire_at: nothing from `before_ms` on can be over, unless it was cancelled.
        end = prefix + keys.time_prefix(max(before_ms, 0))
        after = b""
        while rows := self._store.scan(keys.DONE, prefix + after + b"\0" if after else prefix, end, SLICE_JOBS):
            yield after, self._any_over(rows, before_ms)
            after = rows[-1][0][len(prefix) :]
            if len(rows) < SLICE_JOBS:
                break
        if status == Status.CANCELLED:
            yield from self._expired_early(prefix, keys.time_prefix(max(before_ms, 0)), before_ms)

    def _expired_early(self, prefix: bytes, start: bytes, before_ms: int) -> Iterator[tuple[bytes, bool]]:
        """The same for what ended before its fire_at: everything from `start` on, in turns."""
        after = max(self._early.pop(prefix, b""), start)
        for _ in range(EARLY_SLICES):
            rows = self._store.scan(keys.DONE, prefix + after + b"\0", keys.prefix_end(prefix), SLICE_JOBS)
            if rows:
                yield after, self._any_over(rows, before_ms)
            if len(rows) < SLICE_JOBS:
                return  # from the beginning next time
            after = rows[-1][0][len(prefix) :]
        self._early[prefix] = after

    def _any_over(self, rows: Rows, before_ms: int) -> bool:
        states = [decode_done(row).state for _, row in rows]
        return any(state.finished_at_ms < before_ms and state.keep_until_ms <= self._clock.wall_ms() for state in states)

    async def run(self) -> None:
        while True:
            await self.turn()
            await self._waking.wait_until(self._clock.mono_ms() + self._interval_ms)
