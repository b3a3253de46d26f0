"""How the cap and the rate of a queue are shared out among the nodes of a cluster: what they tell each other, and the sums.

`max_concurrency` bounds what runs in all groups together, and each group is led by a node of its own. So one node, the *home*, hands out
*allowances*: so many jobs of the queue may a node have running in the groups it leads. `Home` is that node's book. It knows no clock and
no network; `shares.py` carries what is told.

`cap_holds`: at no instant do more jobs of a queue run than its cap, whatever is lost, dies, or leads. No time-out is needed for that:

- An allowance is good for the very groups, in the very terms, that the node led when it told of them (its *office*). With every group won
  or lost a node starts nothing of a capped queue until it has told the home again. So what a node may still start is known from its groups.
- A node tells, and waits for the answer or gives it up for good, before it tells again. So whatever it says it holds is all it holds.
- An allowance that was lowered counts as it was until the node says that it heard so; and what runs beyond it counts until it ends.
- Of a node that is silent everything counts that it may have started, until all groups of its office have been told of by leaders of later
  terms: those know what runs there, for their logs hold every claim that will ever count, and the silent one can add none.
- A home gives out nothing new until every group was told of by its leader, after that home's own office began; and only while nobody else
  can be home. Whatever an earlier home gave is among what is told then, or cannot be used any more. Meanwhile what nodes hold stays good.

Of a rate, whole tokens are handed out. They come from one bucket, which never holds more than a second's worth together with those that
are out; a second after it asked a node drops what it has left, and so the home that follows begins with an empty bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

Name = tuple[str, str]  # (tenant, queue)
Limits = Callable[[str, str], tuple[int, float]]  # max_concurrency and rate_per_s of a queue, below 0 for none

# Where a cap is too small for all, the places that cannot be divided go from node to node; each keeps them for so long.
TURN_MS: Final = 1_000
# A node is asked to tell again after this long at the soonest: the question may have been lost.
ASK_AGAIN_MS: Final = 200
# What a node with room enough told is believed for so long while others have jobs that wait for some: it may be done with its own.
FRESH_MS: Final = 50
# A node whose jobs wait for room or a rate tells of it more often than that.
WAITING_MS: Final = 1_500
# Tokens come in batches: a node that could use more asks no sooner.
TOKENS_AGAIN_MS: Final = 20
# How long a node may use the tokens that it was given, from when it asked.
TOKENS_MS: Final = 1_000
# The same by the clock of the home, which may part from the node's by 10 %.
TOKENS_GONE_MS: Final = TOKENS_MS * 12 // 10

DONE: Final = 0
TELL_ALL: Final = 1  # the home knows too little of the node, or is another one
LATE: Final = 2  # nobody waits for this answer any more


class Entry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One queue on one node: its allowance, the jobs that run in its groups, those that may be on their way there, and how many more it
    could start. `allowance` below 0: the node knows of no cap. `tokens`: of the rate, unused; `returned`: no longer wanted."""

    tenant: str
    queue: str
    allowance: int
    running: int
    reserved: int
    ready: int
    tokens: int = 0
    returned: int = 0


class Report(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a node tells. `token`: the home's, as it was last heard of; `life`: which life of the process it is; `office`: counts up with
    every group won or lost, and those are in `led` with their terms; None: as told before. With `led` come all queues that have a cap or
    a rate."""

    token: int
    life: int
    number: int
    office: int
    led: list[tuple[int, int]] | None
    entries: list[Entry]


class Given(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The allowance from now on, and tokens to add. `again_ms`: when to ask for more of those, 0 for not. `is_wanted`: other nodes have
    jobs waiting for what this one may free. `is_limited` False: home and node do not know of the same limit, for settings reach one
    before the other; ask again."""

    allowance: int
    is_wanted: bool = False
    tokens: int = 0
    again_ms: int = 0
    is_limited: bool = True


class Answer(msgspec.Struct, array_like=True, frozen=True, gc=False):
    token: int
    result: int
    given: list[Given]


class _Share:
    """What one node may have running of a queue. `open`: the groups of its office that no later leader has told of."""

    __slots__ = (
        "asked_at_ms",
        "dealt_at_ms",
        "led",
        "life",
        "limit",
        "node",
        "office",
        "open",
        "raised_at_ms",
        "ready",
        "tokens",
        "told_at_ms",
        "used",
    )  # fmt: skip

    def __init__(self, node: int) -> None:
        self.node = node
        self.life = self.office = -1
        self.led: dict[int, int] = {}
        self.open: dict[int, int] = {}
        self.limit = 0  # the highest it may take its allowance to be
        self.used = 0  # running or under way, as told
        self.ready = 0
        self.tokens = 0  # the most it may have left
        self.told_at_ms = self.dealt_at_ms = self.raised_at_ms = -1
        self.asked_at_ms = -ASK_AGAIN_MS

    @property
    def bound(self) -> int:
        return max(self.limit, self.used)

    @property
    def wants(self) -> int:
        return self.used + self.ready

    @property
    def is_hungry(self) -> bool:
        """It has jobs that found no room, be it its turn or not."""
        return self.ready > 0 and self.limit < self.wants


class _Remains:
    """What may run in groups that a node led, and that nobody has told of since."""

    __slots__ = ("bound", "node", "open")

    def __init__(self, node: int, open_: dict[int, int], bound: int) -> None:
        self.node = node
        self.open = open_
        self.bound = bound


class _Ledger:
    """One queue."""

    def __init__(self, group_count: int, rate: float, began_at_ms: int, *, is_capped: bool) -> None:
        self._group_count = group_count
        self.is_capped = is_capped
        self.shares: dict[int, _Share] = {}
        self.remains: list[_Remains] = []
        self.heard: dict[int, int] = {}  # group -> the latest term that was told of
        self._rate = rate
        self._bucket = 0.0
        self._filled_at_ms = began_at_ms + TOKENS_GONE_MS  # when what an earlier home gave has run out

    @property
    def is_blind(self) -> bool:
        return len(self.heard) < self._group_count

    def total(self) -> int:
        """The most that may run now."""
        return sum(share.bound for share in self.shares.values()) + sum(remains.bound for remains in self.remains)

    # What is told.

    def leave(self, node: int) -> None:
        """The node tells nothing of the queue any more."""
        share = self.shares.pop(node, None)
        if share is not None and share.open and share.bound:
            self.remains.append(_Remains(node, share.open, share.bound))

    def take_down(self, node: int, life: int, office: int, led: dict[int, int], entry: Entry, now_ms: int) -> _Share | None:
        """What a node tells; None where it leads nothing that others have not taken over."""
        share = self.shares.get(node)
        if share is None or (share.life, share.office) != (life, office):
            share = self._begin(node, life, office, led, entry, share)
            if share is None:
                return None
        share.limit = max(entry.allowance, 0)
        share.used = entry.running + entry.reserved
        share.ready = entry.ready
        self._fill(now_ms)
        share.tokens = entry.tokens + entry.reserved
        self._bucket += entry.returned
        share.told_at_ms = now_ms
        share.asked_at_ms = -ASK_AGAIN_MS
        return share

    def _begin(self, node: int, life: int, office: int, led: dict[int, int], entry: Entry, before: _Share | None) -> _Share | None:
        """A share for another office."""
        if before is not None:
            # Of an earlier term where a report of an earlier life comes late.
            lost = {group: term for group, term in before.open.items() if led.get(group, 0) < term}
            gained = any(before.led.get(group) != term for group, term in led.items())
            # What it lost and what is left were under one bound, and what is left can only have become less since. Jobs under way are not
            # taken off: they may be on their way into what was lost. Nor is anything where it won groups: what runs there came with them.
            left = 0 if gained or before.life != life else entry.running
            if lost and before.bound > left:
                self.remains.append(_Remains(node, lost, before.bound - left))
            del self.shares[node]
        for group, term in led.items():
            if term >= self.heard.get(group, 0):
                self.heard[group] = term
                self._supersede(node, group, term)
        self._sweep()
        open_ = {group: term for group, term in led.items() if self.heard[group] == term}
        if not open_:
            return None
        share = self.shares[node] = _Share(node)
        share.life, share.office, share.led, share.open = life, office, led, open_
        if before is not None:
            share.dealt_at_ms, share.raised_at_ms = before.dealt_at_ms, before.raised_at_ms
        return share

    def _supersede(self, node: int, group: int, term: int) -> None:
        for share in self.shares.values():
            if share.open.get(group, term) < term:
                del share.open[group]
        for remains in self.remains:
            known = remains.open.get(group)
            # In the same term it is the same process that leads again, and tells of everything itself.
            if known is not None and (known < term or (known == term and remains.node == node)):
                del remains.open[group]

    def _sweep(self) -> None:
        for node in [node for node, share in self.shares.items() if not share.open]:
            del self.shares[node]
        self.remains = [remains for remains in self.remains if remains.open]

    # What is given.

    def targets(self, cap: int, now_ms: int) -> dict[int, int]:
        """What each node should have: as much as it wants where that is possible, else an even part; and an even part of what nobody wants,
        so that a job need not wait for an answer where there is room."""
        lowest = min(share.bound for share in self.shares.values())
        order = sorted(self.shares, key=lambda node: self._turn(self.shares[node], lowest, now_ms))
        targets = dict.fromkeys(order, 0)
        left = max(cap - sum(remains.bound for remains in self.remains), 0)
        left = _pour(targets, {node: min(self.shares[node].wants, cap) for node in order}, left)
        for node in order:
            targets[node] += left // len(order)
        return targets

    @staticmethod
    def _turn(share: _Share, lowest: int, now_ms: int) -> tuple[int, int, int]:
        """Whoever was given more than others just now keeps it for a while; then come those that have the least, by how long ago they were
        given any; last who has had more for longest. What was taken back and still runs counts: else it is given again meanwhile."""
        if share.bound <= lowest:
            return 1, share.raised_at_ms, share.node
        if now_ms - share.raised_at_ms < TURN_MS:
            return 0, share.raised_at_ms, share.node
        return 2, -share.raised_at_ms, share.node

    def give(self, share: _Share, cap: int, now_ms: int) -> tuple[int, bool]:
        """The allowance of a node that has just told, and whether others wait for what it may free."""
        held, free = share.limit, cap - self.total()
        if free < 0:
            # A cap became lower: nobody starts anything before as much has ended.
            held = min(held, cap, max(share.bound + free, 0))
        if self.is_blind:
            return held, False
        target = self.targets(cap, now_ms)
        wanted = target[share.node]
        others = [other for other in self.shares.values() if other is not share]
        is_wanted = any(other.is_hungry for other in others)
        if wanted < held and (free < 0 or any(self._is_short(other, target) for other in others)):
            return wanted, is_wanted
        if free < 0 or wanted <= held:
            return held, is_wanted
        share.limit = max(held, min(wanted, share.bound + max(free - self._ahead(share, target, now_ms), 0)))
        if share.limit > held:
            share.raised_at_ms = now_ms
        return share.limit, is_wanted

    def _ahead(self, share: _Share, targets: dict[int, int], now_ms: int) -> int:
        """What is free and kept for nodes whose turn is before this one's; they were asked, or tell by themselves."""
        ahead = 0
        for node, target in targets.items():  # in the order of turns
            other = self.shares[node]
            if other is share:
                break
            if self._is_short(other, targets) and now_ms - other.told_at_ms <= WAITING_MS:
                ahead += max(target - other.bound, 0)
        return ahead

    @staticmethod
    def _is_short(share: _Share, targets: dict[int, int]) -> bool:
        return share.ready > 0 and share.limit < targets[share.node]

    def to_ask(self, cap: int, now_ms: int) -> list[int]:
        """Nodes that should tell again: what they hold or use is wanted by others, or there is room for what they want."""
        if self.is_blind or not self.shares:
            return []
        targets, free = self.targets(cap, now_ms), cap - self.total()
        short = [node for node, share in self.shares.items() if self._is_short(share, targets)]
        hungry = [node for node, share in self.shares.items() if share.is_hungry]
        asked = []
        for node, share in self.shares.items():
            if now_ms - share.asked_at_ms < ASK_AGAIN_MS:
                continue
            is_over = share.limit > targets[node] and (free < 0 or any(other != node for other in short))
            # One that is hungry too uses what it has.
            is_old = share.bound > 0 and now_ms - share.told_at_ms >= FRESH_MS and hungry and node not in hungry
            if is_over or is_old or (free > 0 and node in short):
                share.asked_at_ms = now_ms
                asked.append(node)
        return asked

    # The rate.

    def set_rate(self, rate: float, now_ms: int) -> None:
        if rate != self._rate:
            self._rate = rate
            self._bucket, self._filled_at_ms = max(rate, 1.0), max(now_ms, self._filled_at_ms)

    def _fill(self, now_ms: int) -> None:
        out = 0
        for share in self.shares.values():
            if now_ms - share.told_at_ms > TOKENS_GONE_MS:
                share.tokens = 0
            out += share.tokens
        if now_ms > self._filled_at_ms:
            self._bucket += self._rate * (now_ms - self._filled_at_ms) / 1000
            self._filled_at_ms = now_ms
        self._bucket = max(min(self._bucket, max(self._rate, 1.0) - out), 0.0)

    def deal(self, share: _Share, unused: int, now_ms: int) -> tuple[int, int]:
        """(tokens, when to ask again in ms) for a node that has just told, and has some unused."""
        if self._rate <= 0:
            return 0, 0
        self._fill(now_ms)
        wanted = share.ready - unused
        if wanted <= 0:
            return 0, 0
        waiting = [other for other in self.shares.values() if other.ready > 0 and now_ms - other.told_at_ms <= WAITING_MS]
        tokens = int(self._bucket) // len(waiting)
        if not tokens and self._bucket >= 1 and share.dealt_at_ms <= min(other.dealt_at_ms for other in waiting):
            tokens = 1
        tokens = min(tokens, wanted)
        if tokens:
            self._bucket -= tokens
            share.tokens += tokens
            share.dealt_at_ms = now_ms
        if tokens == wanted:
            return tokens, 0
        missing = max(1 - self._bucket, 0.0)
        return tokens, max(TOKENS_AGAIN_MS, int(missing * 1000 / self._rate) + 1)


def _pour(targets: dict[int, int], wants: dict[int, int], left: int) -> int:
    """Give everybody as much as wanted, evenly where that is too much; those named first get what cannot be divided. What is left over."""
    thirsty = [node for node in targets if wants[node] > targets[node]]
    while thirsty and left:
        level = max(left // len(thirsty), 1)
        for node in thirsty:
            poured = min(level, wants[node] - targets[node], left)
            targets[node] += poured
            left -= poured
        thirsty = [node for node in thirsty if wants[node] > targets[node]]
    return left


class _Node:
    """What a node told of itself."""

    __slots__ = ("led", "life", "number", "office")

    def __init__(self, life: int, number: int, office: int, led: dict[int, int]) -> None:
        self.life = life
        self.number = number
        self.office = office
        self.led = led


class Home:
    """The book of one node for as long as it is home. `token` names that time, and nothing else may; `limits(tenant, queue)`."""

    def __init__(self, token: int, group_count: int, limits: Limits, now_ms: int) -> None:
        self.token = token
        self._group_count = group_count
        self._limits = limits
        self._began_at_ms = now_ms
        self._nodes: dict[int, _Node] = {}
        self._ledgers: dict[Name, _Ledger] = {}
        self._asks: dict[int, dict[Name, None]] = {}

    def take_asks(self) -> dict[int, list[Name]]:
        """Who is to be asked to tell again, of which queues."""
        asks, self._asks = self._asks, {}
        return {node: list(names) for node, names in asks.items()}

    def bound(self, tenant: str, queue: str) -> int:
        """The most jobs of a queue that may run by this book."""
        ledger = self._ledgers.get((tenant, queue))
        return 0 if ledger is None else ledger.total()

    def on_report(self, node: int, report: Report, now_ms: int) -> Answer:
        """Only while nobody else can be home."""
        if report.token != self.token:
            return Answer(self.token, TELL_ALL, [])
        known = self._nodes.get(node)
        if known is not None and known.life == report.life and report.number <= known.number:
            return Answer(self.token, LATE, [])
        if report.led is not None:
            self._leave_untold(node, report.entries)
            known = self._nodes[node] = _Node(report.life, report.number, report.office, dict(report.led))
        elif known is None or (known.life, known.office) != (report.life, report.office):
            return Answer(self.token, TELL_ALL, [])
        known.number = report.number
        return Answer(self.token, DONE, [self._settle(node, known, entry, now_ms) for entry in report.entries])

    def _leave_untold(self, node: int, entries: Iterable[Entry]) -> None:
        told = {(entry.tenant, entry.queue) for entry in entries}
        for name, ledger in self._ledgers.items():
            if name not in told:
                ledger.leave(node)

    def _settle(self, node: int, known: _Node, entry: Entry, now_ms: int) -> Given:
        name = (entry.tenant, entry.queue)
        cap, rate = self._limits(*name)
        if cap < 0 and rate < 0:
            self._ledgers.pop(name, None)
            return Given(0, is_limited=False)
        ledger = self._ledgers.get(name)
        is_unaware = cap >= 0 and entry.allowance < 0
        if ledger is None or ledger.is_capped != (cap >= 0) or (is_unaware and node in ledger.shares):
            # A cap that is new holds once all have told that they know of it, and what they have running.
            ledger = self._ledgers[name] = _Ledger(self._group_count, rate, self._began_at_ms, is_capped=cap >= 0)
        if is_unaware:
            return Given(0, is_limited=False)
        ledger.set_rate(rate, now_ms)
        share = ledger.take_down(node, known.life, known.office, known.led, entry, now_ms)
        given = Given(0)
        if share is not None:
            allowance, is_wanted = ledger.give(share, cap, now_ms) if cap >= 0 else (0, False)
            given = Given(allowance, is_wanted, *ledger.deal(share, entry.tokens, now_ms))
        self._ask(name, ledger, cap, now_ms)
        return given

    def _ask(self, name: Name, ledger: _Ledger, cap: int, now_ms: int) -> None:
        if ledger.is_blind:
            # They told of the queue before it had a limit here, or have not heard of its limit; or lead groups and were not heard yet.
            asked = [node for node, known in self._nodes.items() if known.led and node not in ledger.shares]
        else:
            asked = ledger.to_ask(cap, now_ms) if cap >= 0 else []
        for node in asked:
            self._asks.setdefault(node, {})[name] = None
