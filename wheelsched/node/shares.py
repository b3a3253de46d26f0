"""This node's part of the caps and rates that a cluster keeps together; `allowances.py` tells the whole story.

The home is whoever leads the meta group: every node knows who that is, and settings reach it first. Each node tells it what it has running,
ready and allowed of queues with a cap or rate: when a job finds no room, when it is asked, when something changed within a second, and all
of it when it wins or loses a group, or the home moves. A queue without either is nobody's concern here.

A node that starts does not know what was set while it was away: it hands out nothing before it has read that, for five seconds at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import structlog

from wheelsched.core.clock import Clock, Rng
from wheelsched.core.errors import NotLeader
from wheelsched.dispatch.queues import QueueMemory
from wheelsched.model.keys import META_GROUP
from wheelsched.node.allowances import DONE, TOKENS_MS, Answer, Entry, Given, Home, Name, Report
from wheelsched.node.calls import Call
from wheelsched.node.node import Node
from wheelsched.node.offers import NO_ANSWER, Request
from wheelsched.replica.raft_replicas import RaftReplicas

RENEW_MS: Final = 1_000
# An answer is a round trip away; one that was lost is asked for again.
ANSWER_MS: Final = 500
# After a report that came to nothing, and while there is no home or an office is in doubt.
AGAIN_MS: Final = 50
# Ends of jobs beyond the allowance are told of together.
FREED_MS: Final = 5
CATCH_UP_AGAIN_MS: Final = 20
READY_MAX: Final = 1 << 20
# An election, and some. Where the meta group has no majority for longer, jobs go by what is known of their queues.
CATCH_UP_MS: Final = 5_000
# Of queues with long names some 200 bytes each: what one message holds, several times over. The others are told of in the next.
ENTRIES_MAX: Final = 5_000

log = structlog.get_logger()

TELL_SHARES: Final[Call[Answer]] = Call("tell_shares", tuple[Report], Answer, is_safe=True)
META_POSITION: Final[Call[int]] = Call("meta_position", tuple[()], int, is_safe=True)
ASK_SHARES: Final[Call[None]] = Call("ask_shares", tuple[list[tuple[str, str]]], None, is_safe=True)

_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class _Held:
    """A queue with a cap or rate. `told_used`: in the last report that was answered, -1: in none; `unmet`: how many of the jobs that were
    ready then found no room."""

    told_used: int = -1
    unmet: int = 0
    is_starved: bool = False  # a job found no room since
    tokens_again_ms: int = 0  # monotonic: no use asking for tokens before


@dataclass(frozen=True, slots=True)
class ShareStatistics:
    """Queues with a cap or rate; reports since the start, and those that were not answered; whether this node is home."""

    queues: int
    reports: int
    unanswered: int
    is_home: bool


class Shares:
    """See `dispatch.queues.Sharing`. `request(node, method, body, timeout_ms)` and `peers()` as of `ClusterNode`."""

    METHODS: Final = frozenset({TELL_SHARES.name, ASK_SHARES.name, META_POSITION.name})

    def __init__(
        self, local: Node, replicas: RaftReplicas, request: Request, peers: Callable[[], Sequence[int]], clock: Clock, rng: Rng
    ) -> None:
        self._dispatcher = local.dispatcher
        self._replicas = replicas
        self._request = request
        self._peers = peers
        self._clock = clock
        self._rng = rng
        self._own_id = replicas.node_id
        self._group_count = local.settings.cluster.group_count
        self._life = rng.getrandbits(62)
        self._number = 0
        self._office = 0
        self._led: list[int] = []  # in this office
        self._told_office = -1  # of the last report that was answered with everything
        self._token = 0
        self._home_node = 0
        self._home: Home | None = None  # this node's, while it is home
        self._held: dict[QueueMemory, _Held] = {}
        self._due: dict[QueueMemory, int] = {}  # to be told, and when
        self._wake = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._reports = self._unanswered = 0
        self._dispatcher.queues.share(self)
        self._dispatcher.claims.withhold()

    def statistics(self) -> ShareStatistics:
        return ShareStatistics(len(self._held), self._reports, self._unanswered, self._home is not None)

    # What queues and groups tell.

    def on_settings(self, queue: QueueMemory) -> None:
        settings = queue.settings
        if settings.max_concurrency < 0 and settings.rate_per_s < 0:
            if self._held.pop(queue, None) is not None:
                self._due.pop(queue, None)
                queue.allowance, queue.is_recalled = 0, False
            return
        held = self._held.setdefault(queue, _Held())
        held.told_used = -1
        held.tokens_again_ms = 0
        if settings.max_concurrency < 0:
            queue.allowance, queue.is_recalled = 0, False
        self._tell(queue, 0)

    def on_starved(self, queue: QueueMemory) -> None:
        held = self._held.get(queue)
        if held is None:
            return
        held.is_starved = True
        # Once it knows, the home asks when there is room; tokens are asked for when there may be some.
        if not held.unmet or held.told_used < 0:
            self._tell(queue, 0)
        elif queue.settings.rate_per_s >= 0 and queue.tokens < 1:
            self._tell_at(queue, held.tokens_again_ms)

    def on_freed(self, queue: QueueMemory) -> None:
        held = self._held.get(queue)
        if held is None:
            return
        used = queue.running + queue.reserved
        if used < held.told_used and (used >= queue.allowance or not queue.ready_count):
            self._tell(queue, FREED_MS)

    def on_office(self) -> None:
        """This node leads another group, or one less: what it was allowed was for those it led before. The meta group is none of them."""
        if self._led != self._dispatcher.led:
            self._led = list(self._dispatcher.led)
            self._office += 1
            for queue in self._held:
                queue.office += 1
                queue.allowance = 0
                queue.is_recalled = False
        is_home = self._replicas.leads(META_GROUP)
        if is_home and self._home is None and self._held:
            self._begin_home()
            for node in self._peers():
                self._spawn(self._ask(node, ()))  # to tell everything
        elif not is_home:
            self._home = None
        self._wake.set()

    def _begin_home(self) -> Home:
        self._home = Home(self._rng.getrandbits(62) | 1, self._group_count, self._limits, self._clock.mono_ms())
        return self._home

    def _tell(self, queue: QueueMemory, in_ms: int) -> None:
        self._tell_at(queue, self._clock.mono_ms() + in_ms)

    def _tell_at(self, queue: QueueMemory, at_ms: int) -> None:
        if at_ms < self._due.get(queue, 1 << 62):
            self._due[queue] = at_ms
            self._wake.set()

    # What other nodes ask.

    async def answer(self, sender: int, method: str, body: bytes) -> bytes:
        """A call of another node, one of `METHODS`."""
        if method == TELL_SHARES.name:
            return _encode(self.on_report(sender, *TELL_SHARES.decode(body)))
        if method == META_POSITION.name:
            return _encode(await self._position())
        self.on_ask(*ASK_SHARES.decode(body))
        return _encode(None)

    def on_report(self, sender: int, report: Report) -> Answer:
        """Raises `NotLeader` where this node is not home at this instant."""
        if not self._replicas.leads(META_GROUP):
            self._home = None
            raise NotLeader("another node shares out the caps of queues", leader=self._replicas.leader_of(META_GROUP))
        home = self._home or self._begin_home()
        answer = home.on_report(sender, report, self._clock.mono_ms())
        for node, names in home.take_asks().items():
            if node == self._own_id:
                self.on_ask(names)
            else:
                self._spawn(self._ask(node, names))
        return answer

    def _limits(self, tenant: str, name: str) -> tuple[int, float]:
        queue = self._dispatcher.queues.get(tenant, name)
        return (-1, -1.0) if queue is None else (queue.settings.max_concurrency, queue.settings.rate_per_s)

    async def _ask(self, node: int, names: Sequence[Name]) -> None:
        with suppress(*NO_ANSWER):  # it tells by itself within a second, or is asked again
            await self._request(node, ASK_SHARES.name, ASK_SHARES.encode((list(names),)), ANSWER_MS)

    def on_ask(self, names: Sequence[Name]) -> None:
        for name in names:
            queue = self._dispatcher.queues.get(*name)
            if queue is not None and queue in self._held:
                self._tell(queue, 0)
        self._wake.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._tasks is None:
            work.close()
        else:
            self._tasks.create_task(work, name="ask for shares")

    # Settings that were changed while this node was away.

    async def _position(self) -> int:
        """How far the meta group has come, at its leader."""
        await self._replicas.read_barrier(META_GROUP)
        return self._replicas.status(META_GROUP).applied

    async def _catch_up(self) -> None:
        until_ms = self._clock.mono_ms() + CATCH_UP_MS
        position = 1 << 62
        while self._replicas.status(META_GROUP).applied < position:
            if self._clock.mono_ms() >= until_ms:
                log.warning("settings_may_be_old", waited_ms=CATCH_UP_MS, reason="the meta group's leader was not reached")
                break
            with suppress(*NO_ANSWER):
                leader = self._replicas.leader_of(META_GROUP)
                if leader and position == 1 << 62:
                    body = META_POSITION.encode(())
                    position = (
                        await self._position()
                        if leader == self._own_id
                        else META_POSITION.decode_result(await self._request(leader, META_POSITION.name, body, ANSWER_MS))
                    )
                    continue
            await self._clock.sleep_until(self._clock.mono_ms() + CATCH_UP_AGAIN_MS)
        self._dispatcher.claims.admit(self._dispatcher.queues)

    # Telling the home.

    async def run(self) -> None:
        """Tell the home what it has to know, until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._catch_up(), name="catch up with settings")
            try:
                renew_at_ms = 0
                while True:
                    now_ms = self._clock.mono_ms()
                    if now_ms >= renew_at_ms:
                        renew_at_ms = now_ms + RENEW_MS
                        self._renew(now_ms)
                    self._wake.clear()
                    pause_ms = await self._report_what_is_due()
                    await asyncio.sleep(0)  # where this node is home itself, nothing above waits
                    now_ms = self._clock.mono_ms()
                    if pause_ms:
                        await self._clock.sleep_until(now_ms + pause_ms)
                    elif not self._held:
                        await self._wake.wait()
                    elif (next_ms := min([renew_at_ms, *self._due.values()])) > now_ms:
                        with suppress(TimeoutError):
                            await asyncio.wait_for(self._wake.wait(), (next_ms - now_ms) / 1000)
            finally:
                self._tasks = None

    def _renew(self, now_ms: int) -> None:
        """Tell of queues that changed, or that have jobs waiting for room."""
        for queue, held in self._held.items():
            used = queue.running + queue.reserved
            if used != held.told_used or held.unmet or held.is_starved or queue.tokens:
                self._tell_at(queue, now_ms)

    async def _report_what_is_due(self) -> int:
        """One report, where there is something to tell; how long to wait before the next one."""
        now_ms = self._clock.mono_ms()
        home = self._replicas.leader_of(META_GROUP)
        is_new = self._told_office != self._office or home != self._home_node
        if is_new:
            self._due = dict.fromkeys(self._held, now_ms)
        due = [queue for queue, at_ms in self._due.items() if at_ms <= now_ms][:ENTRIES_MAX]
        if not due:
            return 0
        led = self._dispatcher.led
        if not home or not all(self._replicas.leads(group) for group in led):
            return AGAIN_MS
        office, self._number, self._reports = self._office, self._number + 1, self._reports + 1
        was_starved = [queue for queue in due if self._held[queue].is_starved]
        offices = [(group, self._replicas.term_of(group)) for group in led] if is_new else None
        entries = [self._entry(queue) for queue in due]
        report = Report(self._token, self._life, self._number, office, offices, entries)
        for queue in due:
            self._due.pop(queue, None)
            self._held[queue].is_starved = False
        try:
            answer = await self._put(home, report)
        except NO_ANSWER:
            self._unanswered += 1
            self._tell_again(due, was_starved)
            return AGAIN_MS
        if answer.result != DONE:
            is_known = answer.token == self._token and home == self._home_node
            self._token, self._home_node, self._told_office = answer.token, home, -1
            self._tell_again(due, was_starved)
            # Whoever is asked for everything, and has just told it, gains nothing by haste.
            return AGAIN_MS if is_known and is_new else 0
        self._home_node = home
        if office == self._office:
            self._told_office = office
            for queue, entry, given in zip(due, entries, answer.given, strict=True):
                if queue in self._held:
                    self._take(queue, entry, given, now_ms)
        return 0

    def _tell_again(self, due: Sequence[QueueMemory], was_starved: Sequence[QueueMemory]) -> None:
        for queue in due:
            if queue in self._held:
                self._tell(queue, 0)
        for queue in was_starved:
            if queue in self._held:
                self._held[queue].is_starved = True

    async def _put(self, home: int, report: Report) -> Answer:
        if home == self._own_id:
            return self.on_report(home, report)
        return TELL_SHARES.decode_result(await self._request(home, TELL_SHARES.name, TELL_SHARES.encode((report,)), ANSWER_MS))

    def _entry(self, queue: QueueMemory) -> Entry:
        settings, held = queue.settings, self._held[queue]
        is_wanted = held.is_starved or queue.waiters or queue.wanted_elsewhere
        ready = min(queue.ready_count, READY_MAX) if is_wanted and not settings.paused else 0
        returned = queue.drop_tokens() if settings.rate_per_s >= 0 and not ready else 0
        tokens = queue.tokens if settings.rate_per_s >= 0 else 0
        allowance = queue.allowance if settings.max_concurrency >= 0 else -1
        return Entry(queue.tenant, queue.name, allowance, queue.running, queue.reserved, ready, tokens, returned)

    def _take(self, queue: QueueMemory, entry: Entry, given: Given, sent_at_ms: int) -> None:
        """Go by an answer."""
        held = self._held[queue]
        if not given.is_limited:
            held.told_used = -1  # told again in a second
            return
        held.told_used, held.unmet = entry.running + entry.reserved, 0
        if queue.settings.max_concurrency >= 0:
            held.unmet = max(held.told_used + entry.ready - given.allowance, 0)
            queue.allowance = given.allowance
            queue.is_recalled = given.is_wanted or given.allowance < queue.running + queue.reserved
            if given.allowance < entry.allowance:
                self._tell(queue, 0)  # others may have it once the home knows that this node heard so
        if queue.settings.rate_per_s >= 0:
            held.unmet = max(held.unmet, entry.ready - entry.tokens - given.tokens)
            if given.tokens:
                queue.add_tokens(given.tokens, sent_at_ms + TOKENS_MS)
            held.tokens_again_ms = self._clock.mono_ms() + given.again_ms
            if given.again_ms:
                self._tell_at(queue, held.tokens_again_ms)
        if queue.ready_count:
            self._dispatcher.claims.serve(queue)
