"""A slow sweep that compares the rows at or under the watermark with memory, and repairs what is missing. Its count must stay zero.

Ready queues hand out in order of (fire_at, id), so a QUEUED row that sorts before the head of its ready queue, and is neither
reserved nor on disk alone, can only have been forgotten. Leases, retries and held jobs are in tables that can be asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from wheelsched.core.clock import Clock
from wheelsched.core.ids import format_job_id, id_low
from wheelsched.model import keys
from wheelsched.model.rows import JobState, decode_state
from wheelsched.model.schedules import Phase
from wheelsched.model.states import LEASED, Lane, Status, due_at_ms, status_of
from wheelsched.replica import ReplicaSet
from wheelsched.store import Store
from wheelsched.store.heads import RangeHeads

if TYPE_CHECKING:
    from wheelsched.dispatch.dispatcher import Dispatcher

SLICE_ROWS = 200
# The sweep pauses between slices so that it takes a few percent of a core at most.
PAUSE_S = 0.05
# What became due this recently may still be on its way from the wheel through the log.
GRACE_MS = 5_000

log = structlog.get_logger()


class Audit:
    def __init__(
        self, dispatcher: Dispatcher, store: Store, heads: RangeHeads, replicas: ReplicaSet, clock: Clock, *,
        interval_s: float,
    ) -> None:  # fmt: skip
        self._dispatcher = dispatcher
        self._store = store
        self._heads = heads
        self._replicas = replicas
        self._clock = clock
        self._interval_s = interval_s
        self.sweep_count = 0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            if self._dispatcher.is_loaded:
                await self.sweep(pause_s=PAUSE_S)

    async def sweep(self, *, pause_s: float = 0.0) -> int:
        """One pass over all groups and lanes; returns how many repairs it made."""
        repairs = 0
        for lane in (Lane.PRECISE, Lane.FLEXIBLE):
            for group in list(self._dispatcher.led):
                repairs += await self._sweep_group(group, lane, pause_s)
        self.sweep_count += 1
        return repairs

    async def _sweep_group(self, group: int, lane: int, pause_s: float) -> int:
        prefix = keys.job_range(group, lane, 0)[:3]
        start = self._heads.lower_bound(keys.JOBS, prefix)
        repairs = 0
        # A group that was lost and won again during the sweep is not in memory before it has been read anew.
        while group in self._dispatcher.led and self._dispatcher.is_loaded:
            end = keys.job_range(group, lane, max(self._settled_ms(group), 0))
            rows = self._store.scan(keys.JOBS, start, end, SLICE_ROWS)
            repairs += self._check(group, lane, [keys.parse_job_key(key)[3] for key, _ in rows])
            if len(rows) < SLICE_ROWS:
                return repairs
            start = rows[-1][0] + b"\0"
            await asyncio.sleep(pause_s)
        return repairs  # led no more, or being read

    def _settled_ms(self, group: int) -> int:
        # The grace is counted from the hand: the watermark of a group that has nothing to fire stands still.
        return min(self._replicas.watermark_ms(group) + 1, self._dispatcher.timers.hand_ms - GRACE_MS)

    def _check(self, group: int, lane: int, job_ids: Sequence[bytes]) -> int:
        """Compare and repair in one turn, so that nothing moves in between."""
        rows = self._store.multiget(keys.STATE, [keys.state_key(group, job_id) for job_id in job_ids])
        missing = [state for row in rows if row is not None and self._is_missing(group, state := decode_state(row))]
        for state in missing:
            log.error("audit_repair", job_id=format_job_id(state.job_id), status=Status(state.status).name, queue=state.queue)
            self._dispatcher.repair(group, state)
        return len(missing)

    def _is_missing(self, group: int, state: JobState) -> bool:
        dispatcher = self._dispatcher
        if state.status in LEASED:
            return dispatcher.leases.get(state.job_id) is None
        watermark_ms = self._replicas.watermark_ms(group)
        if status_of(state, watermark_ms) == Status.QUEUED:
            if dispatcher.caps.has_parked(state):
                return False  # put aside behind its definition's cap
            return due_at_ms(state) < self._settled_ms(group) and self._was_passed_over(state)
        if state.held and state.run is not None and (state.run.phase == Phase.BUFFERED or state.job_id in dispatcher.occurrences):
            return False  # no instant is waited for, or its turn comes
        if self._settled_ms(group) <= due_at_ms(state) <= dispatcher.timers.hand_ms:
            return False  # swept, and on its way through the log
        return dispatcher.timers.special(group, id_low(state.job_id)) is None

    def _was_passed_over(self, state: JobState) -> bool:
        queue = self._dispatcher.queues.ensure(state.tenant, state.queue)
        ready = queue.ready_queue(state.lane, state.priority)
        place = (state.fire_at_ms, id_low(state.job_id))
        if queue.reserved or (ready.spilled_from is not None and place >= ready.spilled_from):
            return False
        head = ready.head()
        return head is None or place < head
