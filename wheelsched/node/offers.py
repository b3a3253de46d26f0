"""What the other nodes want of the jobs that are ready here, and how they get it: offers, claims for what was granted, deliveries.

The other half, whose waiters these are, is `remote_claims.py`, which tells the whole story.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec
import structlog

from wheelsched.core.clock import Clock
from wheelsched.core.errors import OutcomeUnknown, Unavailable, WheelschedError
from wheelsched.dispatch.claims import Claims
from wheelsched.dispatch.queues import RECORD_BYTES, QueueMemory, Queues, Taken
from wheelsched.node.calls import Call, split_to_fit
from wheelsched.node.face import ClaimedJob

RENEW_MS: Final = 1_000
DEMAND_MS: Final = 3_000
OFFER_MS: Final = 250
# Jobs put aside for one node at a time; what it takes in a round trip, and little enough to be given back without harm.
OFFER_JOBS_MAX: Final = 1_000
# A node that left an offer unanswered is offered nothing for as long.
QUIET_MS: Final = 1_000
DELIVER_MS: Final = 1_000
# A delivery is asked for again until its answer comes: the other side remembers what it answered, and for longer than that.
DELIVER_TRIES_MS: Final = 5_000
DELIVER_AGAIN_MS: Final = 50
# How long workers of another node may wait while those here are served.
STARVED_MS: Final = 1_000

# A node that did not answer, refused, or answered what cannot be read, since it runs another release.
NO_ANSWER: Final = (WheelschedError, msgspec.DecodeError)

log = structlog.get_logger()

Request = Callable[[int, str, bytes, int], Awaitable[bytes]]
Spawn = Callable[[Coroutine[Any, Any, Any], str], "asyncio.Task[Any] | None"]


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

    def is_wanting(self, now_ms: int) -> bool:
        return self.places > 0 and self.quiet_until_ms <= now_ms < self.until_ms

    def want(self, places: int, now_ms: int) -> None:
        if self.places <= 0:
            self.since_ms = now_ms
        self.places = places


class Offers:
    """The jobs of this node for the waiters of others. `spawn(work, name)` starts a task of the owner's; None: not now."""

    def __init__(
        self,
        claims: Claims,
        queues: Queues,
        request: Request,
        clock: Clock,
        spawn: Spawn,
        give_back: Callable[[Sequence[ClaimedJob]], None],
    ) -> None:
        self._claims = claims
        self._queues = queues
        self._request = request
        self._clock = clock
        self._spawn = spawn
        self._give_back = give_back
        self._demand: dict[QueueMemory, dict[int, _Demand]] = {}  # the node that was offered something longest ago first
        self._number = 0
        self.is_closed = True
        self.made = 0
        self.unanswered = 0
        self.delivered = 0  # jobs

    @property
    def wanted_count(self) -> int:
        """Queues that other nodes want jobs of."""
        return sum(queue.wanted_elsewhere > 0 for queue in self._demand)

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

    def forget(self, now_ms: int) -> None:
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
            wanting = [(node, demand) for node, demand in self._demand.get(queue, {}).items() if demand.is_wanting(now_ms)]
            node = next((node for node, demand in wanting if not demand.is_offered), None)
            if node is None or not self._offer(node, queue, -(-queue.ready_count // len(wanting))):
                return

    def serve_starved(self, queue: QueueMemory) -> None:
        """One job for the node that has wanted some for longest, where that is too long."""
        now_ms = self._clock.mono_ms()
        starved = [
            (demand.since_ms, node)
            for node, demand in self._demand.get(queue, {}).items()
            if demand.is_wanting(now_ms) and not demand.is_offered and now_ms - demand.since_ms >= STARVED_MS
        ]
        if starved:
            self._offer(min(starved)[1], queue, 1)

    def _offer(self, node: int, queue: QueueMemory, count: int) -> bool:
        """Put jobs aside for a node and tell it; False where nothing may be taken now."""
        if self.is_closed:
            return False
        of_nodes = self._demand[queue]
        demand = of_nodes.pop(node)
        of_nodes[node] = demand  # behind the others
        taken = self._claims.take_for_offer(queue, min(count, demand.places, OFFER_JOBS_MAX))
        if not taken:
            return False
        demand.is_offered = True
        self._note_wanted(queue)
        self.made += 1
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
        # Even nothing at all: it serves the queue, and jobs that came meanwhile may have waited for this answer.
        self._claims.put_back(queue, taken)
        if parts:
            await self._claim_and_deliver(node, granted.epoch, queue, parts)

    async def _ask_to_take(self, node: int, demand: _Demand, queue: QueueMemory, count: int) -> Granted:
        self._number += 1
        number, stated = self._number, demand.stated
        granted: Granted | None = None
        try:
            body = OFFER.encode((Offer(number, queue.tenant, queue.name, count),))
            granted = OFFER.decode_result(await self._request(node, OFFER.name, body, OFFER_MS))
        except NO_ANSWER as error:
            if isinstance(error, OutcomeUnknown):
                self.unanswered += 1
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
        with suppress(*NO_ANSWER):  # what it promised ends by itself
            await self._request(node, WITHDRAW.name, WITHDRAW.encode((number,)), RENEW_MS)

    # Deliveries.

    async def _claim_and_deliver(self, node: int, epoch: int, queue: QueueMemory, parts: list[tuple[Grant, Taken]]) -> None:
        """Claim for all grants at once, and deliver together what is claimed in the same turn."""
        spawned = [self._spawn(self._claim_for(queue, grant, part), "claim for another node") for grant, part in parts]
        claims = [task for task in spawned if task is not None]
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
            self._give_back(rest)
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
            except NO_ANSWER:
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
                self._give_back(delivery.jobs)
            else:
                self.delivered += len(delivery.jobs)


def _count(taken: Taken) -> int:
    return sum(len(records) for _, records in taken) // RECORD_BYTES


def _split(taken: Taken, count: int) -> tuple[Taken, Taken]:
    """The first `count` records, and the rest. Each piece keeps one priority, as `QueueMemory.take` gave it."""
    first, rest = Taken.under(taken.office), Taken.under(taken.office)
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
