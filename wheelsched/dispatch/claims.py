"""Ready jobs meet workers: reserve, claim through the log, hand over; and give back whatever reached nobody.

Records are reserved in the same turn in which they are looked at, so no two claims see one job; the log decides in the end, by
version. A long poll is a `Waiter` in the queues it names: new ready jobs go to waiters at once, new waiters to what is ready at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from wheelsched.core.errors import Unavailable
from wheelsched.core.ids import group_of, group_of_low
from wheelsched.dispatch.caps import Caps
from wheelsched.dispatch.queues import QueueMemory
from wheelsched.model import keys
from wheelsched.model.commands import AnyCommand, Claim, Release, Reply
from wheelsched.model.rows import TIMER, JobSpec, JobState, decode_spec, decode_state, is_capped, split_job
from wheelsched.replica import Batch, ReplicaSet
from wheelsched.store import Store

Taken = list[tuple[int, bytes]]  # (lane, packed records)


class ClaimedJob(NamedTuple):
    """A leased job on its way to a worker."""

    state: JobState
    spec: JobSpec
    payload: bytes


class _Found(NamedTuple):
    """A reserved record with its row."""

    job_id: bytes
    version: int
    lane: int
    record: bytes
    row: bytes
    schedule: str = ""  # whose cap it was reserved under


class Waiter:
    """A long poll: how many jobs it takes, from which queues, and where they are put for it."""

    __slots__ = ("future", "jobs_max", "queues")

    def __init__(self, queues: Sequence[QueueMemory], jobs_max: int) -> None:
        self.queues = queues
        self.jobs_max = jobs_max
        self.future: asyncio.Future[tuple[QueueMemory, Taken] | None] = asyncio.get_running_loop().create_future()
        for queue in queues:
            queue.waiters[self] = None

    def leave(self) -> None:
        for queue in self.queues:
            queue.waiters.pop(self, None)


class Claims:
    """Claims of one node; none before `open`."""

    def __init__(
        self, store: Store, replicas: ReplicaSet, group_count: int, caps: Caps, on_started: Callable[[QueueMemory, JobState], None]
    ) -> None:
        self._store = store
        self._replicas = replicas
        self._group_count = group_count
        self._caps = caps
        self._on_started = on_started
        self._open = False
        self._draining = False
        self.waiter_count = 0
        self._rate_timers: dict[QueueMemory, asyncio.TimerHandle] = {}

    def open(self) -> None:
        """Hand out jobs from now on."""
        self._open = True

    async def claim(
        self, queues: Sequence[QueueMemory], *, jobs_max: int, lease_ms: int | None, wait_ms: int, worker: str
    ) -> list[ClaimedJob]:
        """Up to `jobs_max` jobs, in order of preference of the queues; waits up to `wait_ms` for the first."""
        deadline = asyncio.get_running_loop().time() + wait_ms / 1000
        while True:
            reserved = self._reserve(queues, jobs_max)
            if not reserved:
                if self._draining:
                    return []
                offer = await self._wait(queues, jobs_max, deadline)
                if offer is None:
                    return []
                reserved = [offer]
            # Everything reserved may have been cancelled meanwhile: look again, also when the wait is over, for there may be jobs
            # behind it. Each turn uses up what it reserved.
            if handed := await self._claim(reserved, lease_ms=lease_ms, worker=worker):
                return handed

    def _reserve(self, queues: Sequence[QueueMemory], jobs_max: int) -> list[tuple[QueueMemory, Taken]]:
        if not self._open:
            return []
        reserved = []
        for queue in queues:
            if jobs_max <= 0:
                break
            taken = queue.take(jobs_max)
            if taken:
                reserved.append((queue, taken))
                jobs_max -= sum(len(records) for _, records in taken) // TIMER.size
        return reserved

    async def _wait(self, queues: Sequence[QueueMemory], jobs_max: int, deadline: float) -> tuple[QueueMemory, Taken] | None:
        loop = asyncio.get_running_loop()
        if deadline <= loop.time():
            return None
        waiter = Waiter(queues, jobs_max)
        self.waiter_count += 1
        for queue in queues:
            self._arm_rate(queue)
        handle = loop.call_at(deadline, self._time_out, waiter)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            # Hung up in the very turn in which jobs were put aside for it.
            if waiter.future.done() and not waiter.future.cancelled():
                offer = waiter.future.result()
                if offer is not None:
                    self._put_back(*offer)
            raise
        finally:
            handle.cancel()
            waiter.leave()
            self.waiter_count -= 1

    @staticmethod
    def _time_out(waiter: Waiter) -> None:
        if not waiter.future.done():
            waiter.future.set_result(None)

    def drain(self, queues: Sequence[QueueMemory]) -> None:
        """Answer every long poll with nothing and let none wait any more: the node is stopping."""
        self._draining = True
        for queue in queues:
            for waiter in list(queue.waiters):
                self._time_out(waiter)

    def serve(self, queue: QueueMemory) -> None:
        """New ready jobs, or room for more: give them to whoever waits, in order of arrival."""
        if not self._open:
            return
        while queue.waiters and queue.ready_count:
            waiter = next(iter(queue.waiters))
            if waiter.future.done():
                queue.waiters.pop(waiter, None)
                continue
            taken = queue.take(waiter.jobs_max)
            if not taken:
                self._arm_rate(queue)
                return
            waiter.leave()
            waiter.future.set_result((queue, taken))

    def on_settings(self, queue: QueueMemory) -> None:
        """The queue's settings changed: how long its old rate would have held it back says nothing any more."""
        if (timer := self._rate_timers.pop(queue, None)) is not None:
            timer.cancel()
        self.serve(queue)

    def _arm_rate(self, queue: QueueMemory) -> None:
        """Where a rate holds the queue back, look again when it allows the next job."""
        wait_ms = queue.rate_wait_ms()
        if wait_ms is None or queue in self._rate_timers or not queue.ready_count:
            return
        self._rate_timers[queue] = asyncio.get_running_loop().call_later(wait_ms / 1000, self._rate_allows, queue)

    def _rate_allows(self, queue: QueueMemory) -> None:
        self._rate_timers.pop(queue, None)
        self.serve(queue)

    def _put_back(self, queue: QueueMemory, taken: Taken) -> None:
        for lane, records in taken:
            # One `take` gives records of one priority.
            queue.put_back(lane, TIMER.unpack_from(records)[3] >> 3 & 3, records)
        self.serve(queue)

    async def _claim(self, reserved: list[tuple[QueueMemory, Taken]], *, lease_ms: int | None, worker: str) -> list[ClaimedJob]:
        commands: list[tuple[int, AnyCommand]] = []
        jobs: list[tuple[QueueMemory, list[_Found]]] = []
        for queue, taken in reserved:
            by_group: dict[int, list[_Found]] = {}
            for found in self._find(queue, taken):
                by_group.setdefault(self._group_of(found.job_id), []).append(found)
            for group, of_group in by_group.items():
                names = [(found.job_id, found.version) for found in of_group]
                commands.append((group, Claim(names, queue.settings.lease_ms if lease_ms is None else lease_ms, worker)))
                jobs.append((queue, of_group))
        try:
            batch = self._replicas.propose_many(commands, urgent=True)
        except Unavailable:  # refused before the log: nothing happened
            self._end_reservations(jobs)
            for queue, of_group in jobs:
                for found in of_group:
                    queue.put_back(found.lane, TIMER.unpack(found.record)[3] >> 3 & 3, found.record)
            self._serve_all(reserved)
            raise
        if not commands:
            await asyncio.sleep(0)  # all of it was stale or put aside: let others have their turn before the next look
        try:
            replies = await asyncio.shield(batch.future)
        except asyncio.CancelledError:  # it is in the log: undo through the log
            batch.future.add_done_callback(lambda future: self._undo(reserved, jobs, future))
            raise
        handed = self._hand_over(jobs, replies)
        self._serve_all(reserved)
        return handed

    def _undo(
        self, reserved: list[tuple[QueueMemory, Taken]], jobs: list[tuple[QueueMemory, list[_Found]]],
        future: asyncio.Future[list[Reply]],
    ) -> None:  # fmt: skip
        if not future.cancelled() and future.exception() is None:
            handed = self._hand_over(jobs, future.result())
            self._serve_all(reserved)
            self.release([job.state for job in handed])

    def _serve_all(self, reserved: list[tuple[QueueMemory, Taken]]) -> None:
        """What was reserved and is not leased left room under caps: somebody else may wait for it."""
        for queue, _ in reserved:
            self.serve(queue)

    def _hand_over(self, jobs: list[tuple[QueueMemory, list[_Found]]], replies: Sequence[Reply]) -> list[ClaimedJob]:
        """What was claimed: queues in order of preference, precise first, then by priority and fire_at."""
        self._end_reservations(jobs)
        handed: list[tuple[tuple[int, int, int, int], ClaimedJob]] = []
        preference: dict[QueueMemory, int] = {}
        for (queue, of_group), reply in zip(jobs, replies, strict=True):
            rank = preference.setdefault(queue, len(preference))
            for found, state in zip(of_group, reply.states, strict=True):
                if state is None:
                    queue.drop_reserved()  # the job moved on between becoming ready and its claim
                    continue
                spec, payload = split_job(found.row)
                self._replicas.keep_row(state, found.row)
                self._on_started(queue, state)
                order = (rank, state.lane, state.priority, state.fire_at_ms)
                handed.append((order, ClaimedJob(state, decode_spec(spec), payload)))
        handed.sort(key=lambda item: item[0])
        return [job for _, job in handed]

    def _find(self, queue: QueueMemory, taken: Taken) -> list[_Found]:
        """The rows of reserved records, by sorted seeks; a record whose row is gone is stale."""
        wanted = []
        for lane, records in taken:
            for position in range(0, len(records), TIMER.size):
                record = records[position : position + TIMER.size]
                fire_at_ms, low, version, _ = TIMER.unpack(record)
                group = group_of_low(low, self._group_count)
                wanted.append((keys.job_seek(group, lane, fire_at_ms, low), version, lane, record))
        wanted.sort()
        cursor = self._store.cursor(keys.JOBS)
        found = []
        for seek, version, lane, record in wanted:
            row = cursor.seek(seek)
            if row is None or not row[0].startswith(seek):
                queue.drop_reserved()
                continue
            job_id = keys.parse_job_key(row[0])[3]
            schedule = ""
            if is_capped(row[1]):
                schedule = self._schedule_of(job_id)
                if schedule and not self._caps.reserve(queue.tenant, schedule):
                    queue.drop_reserved()
                    self._caps.park(queue.tenant, schedule, queue, lane, TIMER.unpack(record)[3] >> 3 & 3, record)
                    continue
            found.append(_Found(job_id, version, lane, record, row[1], schedule))
        return found

    def _schedule_of(self, job_id: bytes) -> str:
        row = self._store.get(keys.STATE, keys.state_key(self._group_of(job_id), job_id))
        run = None if row is None else decode_state(row).run
        return "" if run is None else run.schedule

    def _end_reservations(self, jobs: Sequence[tuple[QueueMemory, list[_Found]]]) -> None:
        for queue, of_group in jobs:
            for found in of_group:
                if found.schedule:
                    for other in self._caps.unreserve(queue.tenant, found.schedule):
                        self.serve(other)

    def release(self, states: Sequence[JobState]) -> Batch | None:
        """Leases that reached nobody go back to their queues, the attempts not counted; where that cannot be proposed, when they
        run out."""
        if not states:
            return None
        commands: list[tuple[int, AnyCommand]] = [
            (self._group_of(state.job_id), Release(state.job_id, state.attempt, state.fencing)) for state in states
        ]
        try:
            return self._replicas.propose_many(commands, urgent=True)
        except Unavailable:  # the node is stopping, mostly
            return None

    def _group_of(self, job_id: bytes) -> int:
        return group_of(job_id, self._group_count)
