"""Ready jobs meet workers: reserve, claim through the log, hand over; and give back whatever reached nobody.

Records are reserved in the same turn in which they are looked at, so no two claims see one job; the log decides in the end, by
version. A long poll is a `Waiter` in the queues it names: new ready jobs go to waiters at once, new waiters to what is ready at once.
What is ready and has no waiter here is offered to the other nodes, where there are any (`Elsewhere`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Final, NamedTuple, Protocol

from wheelsched.core.errors import NotLeader, OutcomeUnknown, Unavailable
from wheelsched.core.ids import group_of
from wheelsched.dispatch.batches import hand_over, rows_found, seeks_of
from wheelsched.dispatch.caps import Caps
from wheelsched.dispatch.queues import QueueMemory, Taken
from wheelsched.model import keys
from wheelsched.model.commands import AnyCommand, Claim, Release, Reply
from wheelsched.model.rows import TIMER, JobSpec, JobState, decode_spec, decode_state
from wheelsched.replica import Batch, ReplicaSet
from wheelsched.store import Store

# One group without a quorum does not hold up the jobs that came out of the others: they are handed over this long after they were
# claimed at the latest, and what comes later goes back.
STRAGGLERS_S: Final = 1.0


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


class _Part(NamedTuple):
    """What one claim takes out of one queue and group."""

    queue: QueueMemory
    found: list[_Found]


_Flight = tuple["asyncio.Future[list[Reply]]", list[_Part]]  # what was proposed together, and what it is for


class Waiter:
    """A long poll: how many jobs it takes, from which queues, and where they are put for it: reserved ones, or leased ones that another
    node sent, or None when its time is over.

    It stands in its queues until jobs are promised to it. It leaves them in the very turn of the promise, be that of this node or of
    another one, so that it is never promised jobs twice.
    """

    __slots__ = ("future", "is_late", "is_promised", "is_standing", "jobs_max", "lease_ms", "number", "queues", "worker")

    _numbers = count()

    def __init__(self, queues: Sequence[QueueMemory], jobs_max: int, lease_ms: int | None, worker: str) -> None:
        self.queues = queues
        self.jobs_max = jobs_max
        self.lease_ms = lease_ms
        self.worker = worker
        self.number = next(self._numbers)
        self.is_promised = False  # another node claims for it
        self.is_late = False  # its time ended meanwhile
        self.is_standing = False
        self.future: asyncio.Future[tuple[QueueMemory, Taken] | list[ClaimedJob] | None] = asyncio.get_running_loop().create_future()
        self._stand()

    def _stand(self) -> None:
        self.is_standing = True
        for queue in self.queues:
            queue.waiters[self] = None
            queue.places += self.jobs_max

    def leave(self) -> None:
        if self.is_standing:
            self.is_standing = False
            for queue in self.queues:
                queue.waiters.pop(self, None)
                queue.places -= self.jobs_max

    def come_back(self) -> None:
        """Stand where it stood before it left. O(waiters), for a promise that came to nothing."""
        self._stand()
        for queue in self.queues:
            for later in [other for other in queue.waiters if other.number > self.number]:
                del queue.waiters[later]
                queue.waiters[later] = None


class Elsewhere(Protocol):
    """The other nodes of a cluster, as claims know them."""

    def on_wait(self, waiter: Waiter) -> None:
        """A long poll begins to wait."""
        ...

    def on_surplus(self, queue: QueueMemory) -> None:
        """Jobs are ready, nobody waits for them here, and another node wants some (`QueueMemory.wanted_elsewhere`)."""
        ...

    def serve_starved(self, queue: QueueMemory) -> None:
        """Jobs are ready and another node wants some: the one that has waited too long comes before the waiters here."""
        ...

    def give_back(self, jobs: Sequence[ClaimedJob]) -> None:
        """Release leased jobs, uncounted, whoever leads their groups by now."""
        ...


class Claims:
    """Claims of one node; none before `open`."""

    def __init__(
        self, store: Store, replicas: ReplicaSet, group_count: int, caps: Caps, on_started: Callable[[QueueMemory, list[JobState]], None]
    ) -> None:
        self._store = store
        self._replicas = replicas
        self._group_count = group_count
        self._caps = caps
        self._on_started = on_started
        self._open = False  # opened, and not withheld
        self._is_opened = self._is_withheld = False
        self._draining = False
        self.waiter_count = 0
        self._rate_timers: dict[QueueMemory, asyncio.TimerHandle] = {}
        self.elsewhere: Elsewhere | None = None  # None: this node is alone

    def open(self) -> None:
        """Hand out jobs from now on."""
        self._is_opened = True
        self._open = not self._is_withheld

    def close(self) -> None:
        """Hand out nothing until `open`; whoever asks may wait for that."""
        self._is_opened = self._open = False

    @property
    def is_open(self) -> bool:
        """Whether jobs are handed out."""
        return self._open

    def withhold(self) -> None:
        """Hand out nothing until `admit`, opened or not."""
        self._is_withheld, self._open = True, False

    def admit(self, queues: Iterable[QueueMemory]) -> None:
        """The end of `withhold`: hand out what is ready, where opened."""
        self._is_withheld, self._open = False, self._is_opened
        for queue in queues:
            if queue.ready_count:
                self.serve(queue)

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
                offer = await self._wait(queues, jobs_max, lease_ms, worker, deadline)
                if offer is None:
                    return []
                if isinstance(offer, list):
                    return offer
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

    async def _wait(
        self, queues: Sequence[QueueMemory], jobs_max: int, lease_ms: int | None, worker: str, deadline: float
    ) -> tuple[QueueMemory, Taken] | list[ClaimedJob] | None:
        loop = asyncio.get_running_loop()
        if deadline <= loop.time():
            return None
        waiter = Waiter(queues, jobs_max, lease_ms, worker)
        self.waiter_count += 1
        for queue in queues:
            self._arm_rate(queue)
        handle = loop.call_at(deadline, self._time_out, waiter)
        if self.elsewhere is not None:
            self.elsewhere.on_wait(waiter)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            # Hung up in the very turn in which jobs were put aside for it.
            if waiter.future.done() and not waiter.future.cancelled():
                offer = waiter.future.result()
                if isinstance(offer, list):
                    self.give_back(offer)
                elif offer is not None:
                    self.put_back(*offer)
            raise
        finally:
            handle.cancel()
            waiter.leave()
            self.waiter_count -= 1

    @staticmethod
    def _time_out(waiter: Waiter) -> None:
        if waiter.is_promised:
            # Jobs are claimed for it at this moment: sent away now, it would have them released again.
            waiter.is_late = True
        elif not waiter.future.done():
            waiter.future.set_result(None)

    def drain(self, queues: Sequence[QueueMemory]) -> None:
        """Answer every long poll with nothing and let none wait any more: the node is stopping."""
        self._draining = True
        for queue in queues:
            for waiter in list(queue.waiters):
                self._time_out(waiter)

    def serve(self, queue: QueueMemory) -> None:
        """New ready jobs, or room for more: give them to whoever waits, in order of arrival; then to the other nodes.

        Waiters here come first, for nothing has to travel; so a job never waits while a worker of any node does, but workers of other
        nodes may wait while those here are quicker. Not for ever: a node that has waited for a second gets the next job
        (`Elsewhere.serve_starved`), so each gets one a second at least while there are any.
        """
        if not self._open:
            return
        if queue.is_recalled and queue.sharing is not None:
            queue.sharing.on_freed(queue)
        if queue.wanted_elsewhere and queue.waiters and self.elsewhere is not None and queue.ready_count:
            self.elsewhere.serve_starved(queue)
        while queue.waiters and queue.ready_count:
            waiter = next(iter(queue.waiters))
            if waiter.future.done():
                waiter.leave()
                continue
            taken = queue.take(waiter.jobs_max)
            if not taken:
                self._arm_rate(queue)
                return
            waiter.leave()
            waiter.future.set_result((queue, taken))
        if queue.wanted_elsewhere and self.elsewhere is not None and queue.ready_count:
            self.elsewhere.on_surplus(queue)

    # For waiters of other nodes.

    def take_for_offer(self, queue: QueueMemory, jobs_max: int) -> Taken:
        """Reserve ready jobs to offer them to another node; ends with `claim_taken` or `put_back`."""
        if not self._open:
            return Taken.under(queue.office)
        taken = queue.take(jobs_max)
        if not taken:
            self._arm_rate(queue)
        return taken

    async def claim_taken(self, queue: QueueMemory, taken: Taken, *, lease_ms: int | None, worker: str) -> list[ClaimedJob]:
        """Claim what was reserved; fewer, or none, where jobs have moved on. Raises as `claim`."""
        return await self._claim([(queue, taken)], lease_ms=lease_ms, worker=worker)

    def end_promise(self, waiter: Waiter, jobs: list[ClaimedJob]) -> bool:
        """What another node promised a waiter has come, nothing perhaps: then it goes on waiting. Whether it took the jobs."""
        waiter.is_promised = False
        if waiter.future.done():
            return False
        if jobs or waiter.is_late or self._draining:
            waiter.future.set_result(jobs or None)
            return bool(jobs)
        waiter.come_back()
        for queue in waiter.queues:
            self.serve(queue)
        if self.elsewhere is not None and not waiter.future.done():
            self.elsewhere.on_wait(waiter)
        return False

    # What holds a queue back.

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

    def put_back(self, queue: QueueMemory, taken: Taken) -> None:
        """Records that were reserved and not claimed go back where they were, and to whoever waits for them."""
        self._put_back(queue, taken)
        self.serve(queue)

    @staticmethod
    def _put_back(queue: QueueMemory, taken: Taken) -> None:
        for lane, records in taken:
            # One `take` gives records of one priority.
            queue.put_back(lane, TIMER.unpack_from(records)[3] >> 3 & 3, records)

    # From reserved to leased.

    async def _claim(self, reserved: list[tuple[QueueMemory, Taken]], *, lease_ms: int | None, worker: str) -> list[ClaimedJob]:
        commands: list[tuple[int, AnyCommand]] = []
        parts: list[_Part] = []
        for queue, taken in reserved:
            if taken.office != queue.office:
                # Reserved under a share of the cap that is this node's no more. Served in the end, as all of these.
                self._put_back(queue, taken)
                continue
            for group, of_group in self._find(queue, taken).items():
                names = [(found[0], found[1]) for found in of_group]
                commands.append((group, Claim(names, queue.settings.lease_ms if lease_ms is None else lease_ms, worker)))
                parts.append(_Part(queue, of_group))
        flights, refused = self._propose(commands, parts)
        try:
            if flights:
                await self._land(flights)
            else:
                await asyncio.sleep(0)  # all of it was stale or put aside: let others have their turn before the next look
        except asyncio.CancelledError:  # it is in the log: undo through the log
            for future, of_flight in flights:
                future.add_done_callback(partial(self._undo, of_flight))
            self._serve_all(reserved)
            raise
        claimed: list[_Part] = []
        replies: list[Reply] = []
        for future, of_flight in flights:
            if not future.done():
                future.add_done_callback(partial(self._undo, of_flight))
            elif (error := future.exception()) is not None:
                self._end_unclaimed(of_flight, error)
                if self._replicas.groups_share_fate and isinstance(error, Exception):
                    refused = error  # the node ends
            else:
                claimed += of_flight
                replies += future.result()
        handed = self._hand_over(claimed, replies)
        self._serve_all(reserved)
        if refused is not None and not handed:
            raise refused
        return handed

    def _propose(self, commands: list[tuple[int, AnyCommand]], parts: list[_Part]) -> tuple[list[_Flight], Exception | None]:
        """What is on its way into the log, and why the rest is not, where that has to be told. What is refused is given up here."""
        if not parts:
            return [], None
        if self._replicas.groups_share_fate:
            try:
                return [(self._replicas.propose_many(commands, urgent=True).future, parts)], None
            except Unavailable as error:
                self._end_unclaimed(parts, error)
                return [], error
        flights: list[_Flight] = []
        refused: Exception | None = None
        for command, part in zip(commands, parts, strict=True):
            try:
                flights.append((self._replicas.propose_many((command,), urgent=True).future, [part]))
            except Unavailable as error:
                self._end_unclaimed([part], error)
                if not isinstance(error, NotLeader):
                    refused = error
        return flights, refused

    @staticmethod
    async def _land(flights: list[_Flight]) -> None:
        """Wait for what was proposed: for all of it, or for some and then `STRAGGLERS_S`."""
        futures = [future for future, _ in flights]
        if len(futures) == 1:
            with suppress(Exception):  # whoever called looks at it
                await asyncio.shield(futures[0])
            return
        done, _ = await asyncio.wait(futures, timeout=STRAGGLERS_S)
        if not done:
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)

    def _undo(self, parts: list[_Part], future: asyncio.Future[list[Reply]]) -> None:
        """Nobody waits for these any more."""
        if (error := future.exception()) is not None:
            self._end_unclaimed(parts, error)
        else:
            self.give_back(self._hand_over(parts, future.result()))
        for part in parts:
            self.serve(part.queue)

    def _end_unclaimed(self, parts: list[_Part], error: BaseException) -> None:
        """What was refused before the log goes back to its queue. Where another node leads, it has these jobs ready by its own rows; and
        where the outcome is unknown they are leased, or somebody else's."""
        self._end_reservations(parts)
        is_gone = isinstance(error, (NotLeader, OutcomeUnknown))
        for part in parts:
            for found in part.found:
                if is_gone:
                    part.queue.drop_reserved()
                else:
                    part.queue.put_back(found.lane, TIMER.unpack(found.record)[3] >> 3 & 3, found.record)

    def _serve_all(self, reserved: list[tuple[QueueMemory, Taken]]) -> None:
        """What was reserved and is not leased left room under caps: somebody else may wait for it."""
        for queue, _ in reserved:
            self.serve(queue)

    def _hand_over(self, parts: list[_Part], replies: Sequence[Reply]) -> list[ClaimedJob]:
        """What was claimed: queues in order of preference, precise first, then by priority and fire_at."""
        self._end_reservations(parts)
        handed: list[ClaimedJob] = []
        order: list[int] = []
        preference: dict[QueueMemory, int] = {}
        for part, reply in zip(parts, replies, strict=True):
            queue, of_group = part.queue, part.found
            rank = preference.setdefault(queue, len(preference))
            first = len(handed)
            dropped = hand_over(of_group, reply.states, rank, decode_spec, ClaimedJob, handed, order)
            for _ in range(dropped):
                queue.drop_reserved()  # the job moved on between becoming ready and its claim
            # Not with the effect of the claim: whoever leads no more at that instant, be it for a moment, hears of none. So for part of
            # a turn a job counts twice, as reserved and as running; whoever found no room then is served after this.
            queue.reserved -= len(of_group) - dropped
            leased = zip(reply.states, of_group, strict=True)
            self._replicas.kept.keep_rows((state, found[4]) for state, found in leased if state is not None)
            self._on_started(queue, [job[0] for job in handed[first:]])
        return [handed[place] for place in sorted(range(len(handed)), key=order.__getitem__)]

    def _find(self, queue: QueueMemory, taken: Taken) -> dict[int, list[_Found]]:
        """The rows of reserved records by group, by sorted seeks; a record whose row is gone is stale."""
        wanted = seeks_of([*taken], self._group_count)  # compiled, it takes a plain list alone
        rows = self._store.cursor(keys.JOBS).seek_each([seek for seek, _, _, _ in wanted])
        by_group, capped, stale = rows_found(wanted, rows, _Found)
        for _ in range(stale):
            queue.drop_reserved()
        if stale:
            # One that a cap had let back and that ended otherwise meanwhile leaves its place to the next, which nothing else would wake.
            for other in self._caps.unpark_all():
                self.serve(other)
        for found in capped:
            schedule = self._schedule_of(found.job_id)
            if schedule and not self._caps.reserve(queue.tenant, schedule):
                queue.drop_reserved()
                self._caps.park(queue.tenant, schedule, queue, found.lane, TIMER.unpack(found.record)[3] >> 3 & 3, found.record)
                continue
            by_group.setdefault(self._group_of(found.job_id), []).append(found._replace(schedule=schedule))
        return by_group

    def _schedule_of(self, job_id: bytes) -> str:
        row = self._store.get(keys.STATE, keys.state_key(self._group_of(job_id), job_id))
        run = None if row is None else decode_state(row).run
        return "" if run is None else run.schedule

    def _end_reservations(self, parts: Sequence[_Part]) -> None:
        for part in parts:
            for found in part.found:
                if found.schedule:
                    for other in self._caps.unreserve(part.queue.tenant, found.schedule):
                        self.serve(other)

    def give_back(self, jobs: Sequence[ClaimedJob]) -> None:
        """Leased jobs that reached nobody: release them, uncounted, in the background."""
        if self.elsewhere is not None:
            self.elsewhere.give_back(jobs)
        else:
            self.release([job.state for job in jobs])

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
