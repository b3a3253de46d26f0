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
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import structlog

from wheelsched.core.clock import Clock, Rng
from wheelsched.core.errors import OutcomeUnknown, Unavailable, WheelschedError
from wheelsched.dispatch.claims import Taken, Waiter
from wheelsched.dispatch.queues import RECORD_BYTES, QueueMemory
from wheelsched.node.calls import CLAIM_NOW, Call, split_to_fit
from wheelsched.node.face import ClaimedJob
from wheelsched.node.node import Node

TICK_MS: Final = 250
RENEW_MS: Final = 1_000
DEMAND_MS: Final = 3_000
# A queue somebody claimed from is asked about for this long, so that the next claim knows whose jobs are the oldest.
INTEREST_MS: Final = 5_000
OFFER_MS: Final = 250
# Jobs put aside for one node at a time; what it takes in a round trip, and little enough to be given back without harm.
OFFER_JOBS_MAX: Final = 1_000
# A node that left an offer unanswered is offered nothing for as long.
QUIET_MS: Final = 1_000
# Longer than an election: a promise outlives a change of leaders in one of the groups it is served from.
PROMISE_MS: Final = 2_000
DELIVER_MS: Final = 1_000
# A delivery is asked for again until its answer comes: the other side remembers what it answered, and for longer than that.
DELIVER_TRIES_MS: Final = 5_000
DELIVER_AGAIN_MS: Final = 50
ANSWERS_KEPT_MS: Final = 30_000
# A claim that asks another node waits for its log, not for jobs.
CLAIM_MS: Final = 2_000
# How long workers of another node may wait while those here are served.
STARVED_MS: Final = 1_000
HINT_MS: Final = 1_500
# Another node's jobs come first where they are older by this much; asking it costs a round trip.
AHEAD_MS: Final = 250

# A node that did not answer, refused, or answered what cannot be read, since it runs another release.
_NO_ANSWER: Final = (WheelschedError, msgspec.DecodeError)

log = structlog.get_logger()

Request = Callable[[int, str, bytes, int], Awaitable[bytes]]


class Hint(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a node has ready in a queue: how many may be taken, and lane and `fire_at` of the first of them, -1 for none."""

    ready: int
    lane: int = -1
    fire_at_ms: int = -1


class Offer(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Jobs that are put aside. `number`: the sender's, by which it withdraws the offer."""

    number: int
    tenant: str
    queue: str
    count: int


class Grant(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What one waiter takes of an offer."""

    promise: int
    jobs_max: int
    lease_ms: int | None
    worker: str


class Granted(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The answer to an offer. `epoch`: which life of the process promised it; `places`: what is still wanted beyond it."""

    epoch: int
    places: int
    grants: list[Grant]


class Delivery(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The leased jobs of one grant; none where all had moved on."""

    promise: int
    jobs: list[ClaimedJob]


DEMAND: Final[Call[list[Hint]]] = Call("demand", tuple[list[tuple[str, str, int]]], list[Hint], is_safe=True)
OFFER: Final[Call[Granted]] = Call("offer", tuple[Offer], Granted)
WITHDRAW: Final[Call[None]] = Call("withdraw", tuple[int], None, is_safe=True)
# The promises nobody holds any more; None: made by another life of the process, if at all.
DELIVER: Final[Call[list[int] | None]] = Call("deliver", tuple[int, list[Delivery]], list[int] | None, is_safe=True)

_encode = msgspec.msgpack.Encoder().encode


class _Demand:
    """What one node wants of one queue, as this one knows."""

    __slots__ = ("is_offered", "places", "quiet_until_ms", "since_ms", "stated", "until_ms")

    def __init__(self) -> None:
        self.places = 0
        self.until_ms = 0
        self.stated = 0  # times it was told
        self.is_offered = False  # an offer to it is not answered yet
        self.quiet_until_ms = 0
        self.since_ms = 0  # wanting, and offered nothing

    def is_open(self, now_ms: int) -> bool:
        return self.places > 0 and not self.is_offered and now_ms < self.until_ms and now_ms >= self.quiet_until_ms

    def want(self, places: int, now_ms: int) -> None:
        if self.places <= 0:
            self.since_ms = now_ms
        self.places = places


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
        # Of the jobs here.
        self._demand: dict[QueueMemory, dict[int, _Demand]] = {}  # the node that was offered something longest ago first
        self._offer_number = 0
        self._counts = {"offers": 0, "offers_unanswered": 0, "jobs_delivered": 0, "jobs_given_back": 0}
        self._claims.elsewhere = self

    # Life.

    async def run(self) -> None:
        """Tell, offer, deliver, and forget what is over, until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            try:
                renew_at_ms = 0
                while True:
                    now_ms = self._clock.mono_ms()
                    self._end_promises(now_ms)
                    if now_ms >= renew_at_ms:
                        renew_at_ms = now_ms + RENEW_MS
                        self._renew(now_ms)
                    await self._clock.sleep_until(now_ms + TICK_MS)
            finally:
                self._tasks = None

    def drain(self) -> None:
        """Promise and offer nothing more, and answer the waiters that were promised something: what comes for them goes back."""
        self._draining = True
        for promise in self._promises.values():
            if not promise.waiter.future.done():
                promise.waiter.future.set_result(None)

    def statistics(self) -> RemoteClaimStatistics:
        wanted = sum(queue.wanted_elsewhere > 0 for queue in self._demand)
        return RemoteClaimStatistics(**self._counts, promises=len(self._promises), queues_wanted=wanted)

    async def answer(self, sender: int, method: str, body: bytes) -> bytes:
        """A call of another node, one of `METHODS`."""
        match method:
            case DEMAND.name:
                return _encode(self.on_demand(sender, *DEMAND.decode(body)))
            case OFFER.name:
                return _encode(self.on_offer(sender, *OFFER.decode(body)))
            case WITHDRAW.name:
                return _encode(self.on_withdraw(sender, *WITHDRAW.decode(body)))
            case _:
                return _encode(self.on_deliver(*DELIVER.decode(body)))

    def _spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any] | None:
        if self._tasks is None:
            work.close()
            return None
        return self._tasks.create_task(work, name=name)

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
        nodes = sorted(self._peers())
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
            self._return(asking.result())

    async def _ask(
        self, node: int, tenant: str, queues: list[str], jobs_max: int, lease_ms: int | None, worker: str
    ) -> list[ClaimedJob]:
        memories = self._known(tenant, queues)
        hints = [of_node[node] for queue in memories if node in (of_node := self._hints.get(queue, {}))]
        for known in hints:
            known.ready -= jobs_max  # so that not all workers go for one job
        try:
            body = CLAIM_NOW.encode((tenant, queues, jobs_max, lease_ms, worker))
            jobs = CLAIM_NOW.decode_result(await self._request(node, CLAIM_NOW.name, body, CLAIM_MS))
        except _NO_ANSWER:
            jobs = []  # claimed for nobody, where it was: who asks and goes has the claim undone there
        if not jobs:
            for known in hints:
                known.ready = 0
        for job in jobs:
            for known in hints:
                known.fire_at_ms = max(known.fire_at_ms, job.state.fire_at_ms)
        return jobs

    # What the waiters here want.

    def on_wait(self, waiter: Waiter) -> None:
        for queue in waiter.queues:
            self._note_interest(queue)
            for node in self._peers():
                # One that knows of places offers what it has anyway, and hears of these in a second, or with its next offer.
                if self._told.get(node, {}).get(queue, 0) <= 0:
                    self._tell_soon(node, queue)

    def _note_interest(self, queue: QueueMemory) -> None:
        if queue not in self._interest:
            for node in self._peers():
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
                except _NO_ANSWER:
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
        peers = self._peers()
        for node in self._told.keys() - set(peers):
            del self._told[node]
            self._untold.pop(node, None)
            for known in self._hints.values():
                known.pop(node, None)
        for node in peers:
            for queue in self._interest:
                self._tell_soon(node, queue)
        for promise, (_, answered_at_ms) in list(self._answered.items()):
            if now_ms - answered_at_ms <= ANSWERS_KEPT_MS:
                break
            del self._answered[promise]
        self._forget_demand(now_ms)

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

    # What other nodes want.

    def on_demand(self, sender: int, wanted: list[tuple[str, str, int]]) -> list[Hint]:
        """Take down what a node wants, and offer it what is ready at once; what there is beyond that."""
        now_ms = self._clock.mono_ms()
        hints = []
        for tenant, name, places in wanted:
            # A queue is known by its first job, which may be still to come.
            queue = self._queues.get(tenant, name) if places <= 0 else self._queues.ensure(tenant, name)
            if queue is None:
                hints.append(Hint(0))
                continue
            demand = self._demand.setdefault(queue, {}).setdefault(sender, _Demand())
            demand.want(places, now_ms)
            demand.until_ms = now_ms + DEMAND_MS
            demand.stated += 1
            self._note_wanted(queue)
            if queue.ready_count:
                self._claims.serve(queue)
            hints.append(self._hint(queue))
        return hints

    @staticmethod
    def _hint(queue: QueueMemory) -> Hint:
        ready = min(queue.ready_count, queue.may_take()) if queue.ready_count else 0
        head = queue.head() if ready else None
        return Hint(0) if head is None else Hint(ready, *head)

    def _note_wanted(self, queue: QueueMemory) -> None:
        of_nodes = self._demand.get(queue, {})
        queue.wanted_elsewhere = sum(demand.places > 0 and not demand.is_offered for demand in of_nodes.values())

    def _forget_demand(self, now_ms: int) -> None:
        for queue, of_nodes in list(self._demand.items()):
            over = [node for node, demand in of_nodes.items() if now_ms >= demand.until_ms and not demand.is_offered]
            for node in over:
                del of_nodes[node]
            if not of_nodes:
                del self._demand[queue]
            if over:
                self._note_wanted(queue)

    # Offers.

    def on_surplus(self, queue: QueueMemory) -> None:
        """Offer what is ready to the nodes that want it, in turn, an even part to each."""
        now_ms = self._clock.mono_ms()
        while queue.ready_count:
            nodes = [node for node, demand in self._demand.get(queue, {}).items() if demand.is_open(now_ms)]
            if not nodes or not self._offer(nodes[0], queue, -(-queue.ready_count // len(nodes))):
                return

    def serve_starved(self, queue: QueueMemory) -> None:
        """One job for the node that has wanted some for longest, where that is too long."""
        now_ms = self._clock.mono_ms()
        starved = [
            (demand.since_ms, node)
            for node, demand in self._demand.get(queue, {}).items()
            if demand.is_open(now_ms) and now_ms - demand.since_ms >= STARVED_MS
        ]
        if starved:
            self._offer(min(starved)[1], queue, 1)

    def give_back(self, jobs: Sequence[ClaimedJob]) -> None:
        self._give_back(jobs)

    def _offer(self, node: int, queue: QueueMemory, count: int) -> bool:
        """Put jobs aside for a node and tell it; False where nothing may be taken now."""
        if self._tasks is None or self._draining:
            return False
        of_nodes = self._demand[queue]
        demand = of_nodes.pop(node)
        of_nodes[node] = demand  # behind the others
        taken = self._claims.take_for_offer(queue, min(count, demand.places, OFFER_JOBS_MAX))
        if not taken:
            return False
        demand.is_offered = True
        self._note_wanted(queue)
        self._counts["offers"] += 1
        self._spawn(self._carry_out(node, demand, queue, taken), "offer")
        return True

    async def _carry_out(self, node: int, demand: _Demand, queue: QueueMemory, taken: Taken) -> None:
        """From an offer to its delivery."""
        try:
            granted = await self._ask_to_take(node, demand, queue, _count(taken))
        except asyncio.CancelledError:
            self._claims.put_back(queue, taken)
            raise
        parts: list[tuple[Grant, Taken]] = []
        for grant in granted.grants:
            part, taken = _split(taken, grant.jobs_max)
            parts.append((grant, part))
        # Also where nothing is left: what was promised may have taken the place of other demand, and there may be new jobs.
        self._claims.put_back(queue, taken)
        if parts:
            await self._claim_and_deliver(node, granted.epoch, queue, parts)

    async def _ask_to_take(self, node: int, demand: _Demand, queue: QueueMemory, count: int) -> Granted:
        self._offer_number += 1
        number, stated = self._offer_number, demand.stated
        granted: Granted | None = None
        try:
            body = OFFER.encode((Offer(number, queue.tenant, queue.name, count),))
            granted = OFFER.decode_result(await self._request(node, OFFER.name, body, OFFER_MS))
        except _NO_ANSWER as error:
            if isinstance(error, OutcomeUnknown):
                self._counts["offers_unanswered"] += 1
                self._spawn(self._withdraw(node, number), "withdraw an offer")
            demand.quiet_until_ms = self._clock.mono_ms() + QUIET_MS
        finally:
            demand.is_offered = False
            places = 0 if granted is None else granted.places
            # What it told while the offer was under way may be newer than its answer, or older: believed is the larger one, for a
            # place too many costs a round trip, and one too few a second.
            demand.want(max(demand.places, places) if demand.stated != stated else places, self._clock.mono_ms())
            if granted is not None and granted.grants:
                demand.since_ms = self._clock.mono_ms()
            self._note_wanted(queue)
        return granted or Granted(0, 0, [])

    async def _withdraw(self, node: int, number: int) -> None:
        try:
            await self._request(node, WITHDRAW.name, WITHDRAW.encode((number,)), RENEW_MS)
        except _NO_ANSWER:
            pass  # what it promised ends by itself

    # Deliveries.

    async def _claim_and_deliver(self, node: int, epoch: int, queue: QueueMemory, parts: list[tuple[Grant, Taken]]) -> None:
        """Claim for all grants at once, and deliver together what is claimed in the same turn."""
        assert self._tasks is not None
        claims = [self._tasks.create_task(self._claim_for(queue, grant, part), name="claim for another node") for grant, part in parts]
        while claims:
            await asyncio.wait(claims, return_when=asyncio.FIRST_COMPLETED)
            deliveries = [task.result() for task in claims if task.done()]
            claims = [task for task in claims if not task.done()]
            for chunk in _in_messages(deliveries):
                if claims:
                    self._spawn(self._deliver(node, epoch, chunk), "deliver")
                else:
                    await self._deliver(node, epoch, chunk)

    async def _claim_for(self, queue: QueueMemory, grant: Grant, part: Taken) -> Delivery:
        try:
            jobs = await self._claims.claim_taken(queue, part, lease_ms=grant.lease_ms, worker=grant.worker)
        except (Unavailable, OutcomeUnknown):
            jobs = []
        fitting, rest = split_to_fit(jobs)
        if rest:
            self._return(rest)
        return Delivery(grant.promise, fitting)

    async def _deliver(self, node: int, epoch: int, deliveries: list[Delivery]) -> None:
        body = DELIVER.encode((epoch, deliveries))
        until_ms = self._clock.mono_ms() + DELIVER_TRIES_MS
        may_have_come = False
        refused: list[int] | None = None
        while True:
            try:
                refused = DELIVER.decode_result(await self._request(node, DELIVER.name, body, DELIVER_MS))
                break
            except Unavailable:
                if not may_have_come:
                    break  # nothing was sent
            except _NO_ANSWER:
                may_have_come = True
            if self._clock.mono_ms() >= until_ms or not any(delivery.jobs for delivery in deliveries):
                break
            await self._clock.sleep_until(self._clock.mono_ms() + DELIVER_AGAIN_MS)
        if refused is None and may_have_come:
            # A worker may be at it already: released, another one would begin beside it. If nobody is, the lease runs out.
            log.warning("delivery_unknown", node=node, jobs=sum(len(delivery.jobs) for delivery in deliveries))
            return
        for delivery in deliveries:
            if refused is None or delivery.promise in refused:
                self._return(delivery.jobs)
            else:
                self._counts["jobs_delivered"] += len(delivery.jobs)

    def _return(self, jobs: Sequence[ClaimedJob]) -> None:
        if jobs:
            self._counts["jobs_given_back"] += len(jobs)
            self._give_back(jobs)


def _count(taken: Taken) -> int:
    return sum(len(records) for _, records in taken) // RECORD_BYTES


def _split(taken: Taken, count: int) -> tuple[Taken, Taken]:
    """The first `count` records, and the rest. Each piece keeps one priority, as `QueueMemory.take` gave it."""
    first: Taken = []
    rest: Taken = []
    for lane, records in taken:
        size = min(count * RECORD_BYTES, len(records))
        count -= size // RECORD_BYTES
        if size:
            first.append((lane, records[:size]))
        if size < len(records):
            rest.append((lane, records[size:]))
    return first, rest


def _in_messages(deliveries: Sequence[Delivery]) -> list[list[Delivery]]:
    """Deliveries by calls that are not too large; each fits by itself."""
    messages: list[list[Delivery]] = []
    held: list[ClaimedJob] = []
    for delivery in deliveries:
        held += delivery.jobs
        if not messages or split_to_fit(held)[1]:
            messages.append([])
            held = list(delivery.jobs)
        messages[-1].append(delivery)
    return messages
