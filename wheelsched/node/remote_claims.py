"""Claims over all nodes: a worker that asks one of them is given the jobs of every leader, and a job goes to a worker of any.

A node tells the others its *demand*: how many jobs its long polls take, by queue. A leader that has jobs ready and nobody of its own for
them *offers* some, in memory, to one such node. That node *promises* them to waiters, which leave their queues in that turn, and answers
with its *grants*. Only what was granted is claimed through the log, and *delivered*. So no job is claimed for nobody, and no waiter is
promised jobs twice. Whatever is lost on the way ends by itself: demand after three seconds, an offer after 250 ms, a promise after two
seconds, an attempt whose delivery cannot be told from its loss with its lease.

No wake-up is lost: a leader that hears of demand looks at what it has ready in that turn, and jobs that become ready later look at the
demand. That a node was told something it could not hear shows within a second, when all demand is told again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import structlog

from wheelsched.core.clock import Clock, Rng
from wheelsched.dispatch.claims import Waiter
from wheelsched.dispatch.queues import QueueMemory
from wheelsched.node.calls import CLAIM_NOW
from wheelsched.node.face import ClaimedJob
from wheelsched.node.node import Node
from wheelsched.node.offers import (
    DELIVER,
    DEMAND,
    NO_ANSWER,
    OFFER,
    RENEW_MS,
    WITHDRAW,
    Delivery,
    Grant,
    Granted,
    Hint,
    Offer,
    Offers,
    Request,
)

TICK_MS: Final = 250
# A queue somebody claimed from is asked about for this long, so that the next claim knows whose jobs are the oldest.
INTEREST_MS: Final = 5_000
# Longer than an election: a promise outlives a change of leaders in one of the groups it is served from.
PROMISE_MS: Final = 2_000
# Longer than a delivery is asked for again.
ANSWERS_KEPT_MS: Final = 30_000
# A claim that asks another node waits for its log, not for jobs.
CLAIM_MS: Final = 2_000
HINT_MS: Final = 1_500
# Another node's jobs come first where they are older by this much; asking it costs a round trip.
AHEAD_MS: Final = 250

log = structlog.get_logger()

_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class _Promise:
    waiter: Waiter
    node: int
    offer: int
    until_ms: int


@dataclass(slots=True)
class _Known:
    """A hint, and how long it counts; brought forward by what is claimed from there."""

    ready: int
    lane: int
    fire_at_ms: int
    until_ms: int


@dataclass(frozen=True, slots=True)
class RemoteClaimStatistics:
    """Since the start: offers made, offers that nobody answered, jobs delivered to other nodes and taken by waiters there, leased jobs
    given back because nobody took them. Now: waiters that were promised jobs; queues that other nodes want jobs of."""

    offers: int
    offers_unanswered: int
    jobs_delivered: int
    jobs_given_back: int
    promises: int
    queues_wanted: int


class RemoteClaims:
    """The claims of a node that is one of several. `request(node, method, body, timeout_ms)` and `peers()` as of `ClusterNode`;
    `give_back(jobs)` releases leased jobs wherever their groups are led."""

    METHODS: Final = frozenset({DEMAND.name, OFFER.name, WITHDRAW.name, DELIVER.name})

    def __init__(
        self, local: Node, request: Request, peers: Callable[[], Sequence[int]], clock: Clock, rng: Rng,
        give_back: Callable[[Sequence[ClaimedJob]], None],
    ) -> None:  # fmt: skip
        self._local = local
        self._claims = local.dispatcher.claims
        self._queues = local.dispatcher.queues
        self._request = request
        self._peers = peers
        self._clock = clock
        self._give_back = give_back
        self._epoch = rng.getrandbits(62)
        self._tasks: asyncio.TaskGroup | None = None
        self._draining = False
        self._nodes: list[int] = []  # the others; looked up each tick, for a claim comes more often
        self._turn = 0
        # Of the waiters here.
        self._interest: dict[QueueMemory, int] = {}  # last claim, monotonic
        self._told: dict[int, dict[QueueMemory, int]] = {}  # node -> places it knows of
        self._untold: dict[int, dict[QueueMemory, None]] = {}
        self._telling: set[int] = set()
        self._flush_is_due = False
        self._hints: dict[QueueMemory, dict[int, _Known]] = {}
        self._promises: dict[int, _Promise] = {}  # in the order in which they end
        self._promise_number = 0
        self._answered: dict[int, tuple[bool, int]] = {}  # promise -> (jobs were taken, when), in order
        self._given_back = 0  # jobs
        self._under_way: set[asyncio.Task[Any]] = set()
        self.offers = Offers(self._claims, self._queues, request, clock, self._spawn, self.give_back)
        self._claims.elsewhere = self

    # Life.

    async def run(self) -> None:
        """Tell, offer, deliver, and forget what is over, until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            try:
                self.offers.is_closed = self._draining
                renew_at_ms = 0
                while True:
                    now_ms = self._clock.mono_ms()
                    self._nodes = sorted(self._peers())
                    self._end_promises(now_ms)
                    if now_ms >= renew_at_ms:
                        renew_at_ms = now_ms + RENEW_MS
                        self._renew(now_ms)
                    await self._clock.sleep_until(now_ms + TICK_MS)
            finally:
                self.offers.is_closed = True
                self._tasks = None

    def drain(self) -> None:
        """Promise and offer nothing more, and answer the waiters that were promised something: what comes for them goes back."""
        self._draining = self.offers.is_closed = True
        for promise in self._promises.values():
            if not promise.waiter.future.done():
                promise.waiter.future.set_result(None)

    def statistics(self) -> RemoteClaimStatistics:
        offers = self.offers
        return RemoteClaimStatistics(
            offers=offers.made, offers_unanswered=offers.unanswered, jobs_delivered=offers.delivered,
            jobs_given_back=self._given_back, promises=len(self._promises), queues_wanted=offers.wanted_count,
        )  # fmt: skip

    async def answer(self, sender: int, method: str, body: bytes) -> bytes:
        """A call of another node, one of `METHODS`."""
        match method:
            case DEMAND.name:
                return _encode(self.offers.on_demand(sender, *DEMAND.decode(body)))
            case OFFER.name:
                return _encode(self.on_offer(sender, *OFFER.decode(body)))
            case WITHDRAW.name:
                self.on_withdraw(sender, *WITHDRAW.decode(body))
                return _encode(None)
            case _:
                return _encode(self.on_deliver(*DELIVER.decode(body)))

    def _spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any] | None:
        if self._tasks is None:
            work.close()
            return None
        task = self._tasks.create_task(work, name=name)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def settle(self, timeout_s: float) -> None:
        """After `drain`: wait for what is under way between this node and others, so long at most."""
        if under_way := tuple(self._under_way):
            await asyncio.wait(under_way, timeout=timeout_s)

    # Claims.

    async def claim(
        self, tenant: str, queues: Sequence[str], *, jobs_max: int, lease_ms: int | None, wait_ms: int, worker: str
    ) -> list[ClaimedJob]:
        """See `face.NodeFace.claim`: of the jobs of all nodes, about the oldest first."""
        until_ms = self._clock.mono_ms() + wait_ms
        arguments = (tenant, list(queues), jobs_max, lease_ms, worker)
        asked: set[int] = set()
        while (node := self._ahead(self._known(tenant, queues), asked)) is not None:
            asked.add(node)
            if jobs := await self._claim_from(node, *arguments):
                return jobs
        left_ms = max(until_ms - self._clock.mono_ms(), 0) if wait_ms else 0
        jobs = await self._local.claim(tenant, queues, jobs_max=jobs_max, lease_ms=lease_ms, wait_ms=left_ms, worker=worker)
        memories = self._known(tenant, queues)
        for queue in memories:
            self._note_interest(queue)
        if jobs or wait_ms:
            return jobs
        for node in self._in_turn(memories):
            if node not in asked and (jobs := await self._claim_from(node, *arguments)):
                return jobs
        return []

    def _known(self, tenant: str, queues: Sequence[str]) -> list[QueueMemory]:
        return [queue for name in queues if (queue := self._queues.get(tenant, name)) is not None]

    def _ahead(self, queues: Sequence[QueueMemory], asked: set[int]) -> int | None:
        """A node whose jobs should be taken before those here, by what it said within a second or so: of the first queue that has any,
        in order of preference, the precise ones or those due earlier. Approximate, and enough that no node's jobs are left to age
        because workers ask another one."""
        now_ms = self._clock.mono_ms()
        for queue in queues:
            first = min(self._first_of(queue, now_ms, asked), default=None)
            here = queue.head() if queue.ready_count and queue.may_take() else None
            if first is None and here is None:
                continue
            if first is None or (here is not None and (here[0], here[1] - AHEAD_MS * (here[0] == first[0])) <= first[:2]):
                return None
            return first[2]
        return None

    def _first_of(self, queue: QueueMemory, now_ms: int, asked: set[int]) -> list[tuple[int, int, int]]:
        """(lane, fire_at, node) of those that have something ready."""
        return [
            (known.lane, known.fire_at_ms, node)
            for node, known in self._hints.get(queue, {}).items()
            if known.ready > 0 and now_ms < known.until_ms and node not in asked
        ]

    def _in_turn(self, queues: Sequence[QueueMemory]) -> list[int]:
        """All other nodes: those with jobs ready first, by their first job, then the others in turn."""
        nodes = self._nodes
        self._turn += 1
        start = self._turn % len(nodes) if nodes else 0
        now_ms = self._clock.mono_ms()
        by_age = [node for queue in queues for _, _, node in sorted(self._first_of(queue, now_ms, set()))]
        return list(dict.fromkeys([node for node in by_age if node in nodes] + nodes[start:] + nodes[:start]))

    async def _claim_from(
        self, node: int, tenant: str, queues: list[str], jobs_max: int, lease_ms: int | None, worker: str
    ) -> list[ClaimedJob]:
        """What another node gives at once. Whoever hangs up meanwhile has it given back: the question is out, and is answered."""
        asking = self._spawn(self._ask(node, tenant, queues, jobs_max, lease_ms, worker), "claim from another node")
        if asking is None:
            return []
        try:
            # Not awaited itself: at the end of this node it is cancelled, and its caller is not.
            await asyncio.wait({asking})
        except asyncio.CancelledError:
            asking.add_done_callback(self._give_back_asked)
            raise
        return [] if asking.cancelled() else asking.result()

    def _give_back_asked(self, asking: asyncio.Task[list[ClaimedJob]]) -> None:
        if not asking.cancelled() and asking.exception() is None:
            self.give_back(asking.result())

    async def _ask(self, node: int, tenant: str, queues: list[str], jobs_max: int, lease_ms: int | None, worker: str) -> list[ClaimedJob]:
        memories = self._known(tenant, queues)
        hints = [of_node[node] for queue in memories if node in (of_node := self._hints.get(queue, {}))]
        for known in hints:
            known.ready -= jobs_max  # so that not all workers go for one job
        try:
            body = CLAIM_NOW.encode((tenant, queues, jobs_max, lease_ms, worker))
            jobs = CLAIM_NOW.decode_result(await self._request(node, CLAIM_NOW.name, body, CLAIM_MS))
        except NO_ANSWER:
            jobs = []  # claimed for nobody, where it was: who asks and goes has the claim undone there
        if not jobs:
            for known in hints:
                known.ready = 0
        for job in jobs:
            for known in hints:
                known.fire_at_ms = max(known.fire_at_ms, job.state.fire_at_ms)
        return jobs

    # What `dispatch` tells of its waiters and queues.

    def on_wait(self, waiter: Waiter) -> None:
        for queue in waiter.queues:
            self._note_interest(queue)
            for node in self._nodes:
                # One that knows of places offers what it has anyway, and hears of these in a second, or with its next offer.
                if self._told.get(node, {}).get(queue, 0) <= 0:
                    self._tell_soon(node, queue)

    def on_surplus(self, queue: QueueMemory) -> None:
        self.offers.on_surplus(queue)

    def serve_starved(self, queue: QueueMemory) -> None:
        self.offers.serve_starved(queue)

    def give_back(self, jobs: Sequence[ClaimedJob]) -> None:
        """Leased jobs that nobody took are released, uncounted."""
        if jobs:
            self._given_back += len(jobs)
            self._give_back(jobs)

    # What the waiters here want.

    def _note_interest(self, queue: QueueMemory) -> None:
        if queue not in self._interest:
            for node in self._nodes:
                self._tell_soon(node, queue)
        self._interest[queue] = self._clock.mono_ms()

    def _tell_soon(self, node: int, queue: QueueMemory) -> None:
        """In this turn of the loop, with whatever else comes up in it, and when the call before is answered."""
        self._untold.setdefault(node, {})[queue] = None
        if not self._flush_is_due:
            self._flush_is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        for node in list(self._untold):
            if node not in self._telling and self._spawn(self._tell(node), "tell demand") is not None:
                self._telling.add(node)

    async def _tell(self, node: int) -> None:
        try:
            while queues := list(self._untold.pop(node, {})):
                told = self._told.setdefault(node, {})
                for queue in queues:
                    told[queue] = queue.places
                demand = [(queue.tenant, queue.name, queue.places) for queue in queues]
                try:
                    hints = DEMAND.decode_result(await self._request(node, DEMAND.name, DEMAND.encode((demand,)), RENEW_MS))
                except NO_ANSWER:
                    for queue in queues:
                        told.pop(queue, None)
                    return  # all is told again in a second
                self._take_hints(node, queues, hints)
        finally:
            self._telling.discard(node)

    def _take_hints(self, node: int, queues: list[QueueMemory], hints: list[Hint]) -> None:
        until_ms = self._clock.mono_ms() + HINT_MS
        for queue, hint in zip(queues, hints, strict=False):
            self._hints.setdefault(queue, {})[node] = _Known(hint.ready, hint.lane, hint.fire_at_ms, until_ms)

    def _renew(self, now_ms: int) -> None:
        for queue, claimed_at_ms in list(self._interest.items()):
            if not queue.places and now_ms - claimed_at_ms > INTEREST_MS:
                del self._interest[queue]
                self._hints.pop(queue, None)
                for told in self._told.values():
                    told.pop(queue, None)
        for node in self._told.keys() - set(self._nodes):
            del self._told[node]
            self._untold.pop(node, None)
            for known in self._hints.values():
                known.pop(node, None)
        for node in self._nodes:
            for queue in self._interest:
                self._tell_soon(node, queue)
        for promise, (_, answered_at_ms) in list(self._answered.items()):
            if now_ms - answered_at_ms <= ANSWERS_KEPT_MS:
                break
            del self._answered[promise]
        self.offers.forget(now_ms)

    # Promises to the waiters here.

    def on_offer(self, sender: int, offer: Offer) -> Granted:
        """Promise what another node put aside to who has waited longest. A plain function: a waiter is promised jobs by one node only."""
        queue = self._queues.get(offer.tenant, offer.queue)
        if queue is None or self._draining:
            return Granted(self._epoch, 0, [])
        until_ms = self._clock.mono_ms() + PROMISE_MS
        grants: list[Grant] = []
        left = offer.count
        while queue.waiters and left > 0:
            waiter = next(iter(queue.waiters))
            waiter.leave()
            if waiter.future.done():
                continue
            self._promise_number += 1
            waiter.is_promised = True
            self._promises[self._promise_number] = _Promise(waiter, sender, offer.number, until_ms)
            jobs_max = min(waiter.jobs_max, left)
            left -= jobs_max
            grants.append(Grant(self._promise_number, jobs_max, waiter.lease_ms, waiter.worker))
        self._told.setdefault(sender, {})[queue] = queue.places
        return Granted(self._epoch, queue.places, grants)

    def on_withdraw(self, sender: int, offer: int) -> None:
        """The answer to an offer came too late, or not at all: nothing will be delivered on it."""
        for number, promise in list(self._promises.items()):
            if (promise.node, promise.offer) == (sender, offer):
                self._end_promise(number, [])

    def on_deliver(self, epoch: int, deliveries: list[Delivery]) -> list[int] | None:
        """Hand leased jobs to who was promised them; the promises whose waiter has gone. Asked again, it answers the same."""
        if epoch != self._epoch:
            return None
        return [delivery.promise for delivery in deliveries if not self._end_promise(delivery.promise, delivery.jobs) and delivery.jobs]

    def _end_promise(self, number: int, jobs: list[ClaimedJob]) -> bool:
        """Whether the jobs were taken, now or when they came before."""
        promise = self._promises.pop(number, None)
        if promise is None:
            return self._answered.get(number, (False, 0))[0]
        is_taken = self._claims.end_promise(promise.waiter, jobs)
        self._answered[number] = (is_taken, self._clock.mono_ms())
        return is_taken

    def _end_promises(self, now_ms: int) -> None:
        for number, promise in list(self._promises.items()):
            if promise.until_ms > now_ms:
                return
            log.info("promise_not_kept", node=promise.node, queues=[queue.name for queue in promise.waiter.queues])
            self._end_promise(number, [])
