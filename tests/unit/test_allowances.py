"""The book that shares a queue's cap and rate out among nodes: random days, with lost messages, dead nodes, groups and homes that move.

The nodes here are as simple as they can be and keep the rules that `allowances.py` asks of them. What runs is counted beside them, as the
logs of the groups would have it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wheelsched.node.allowances import (
    ASK_AGAIN_MS,
    DONE,
    LATE,
    TELL_ALL,
    TOKENS_GONE_MS,
    TOKENS_MS,
    TURN_MS,
    Answer,
    Entry,
    Home,
    Report,
    _Ledger,
    _Share,
)

GROUPS = 4
NODES = (1, 2, 3)


@dataclass
class Group:
    """As its log has it. `under_way`: claims in the log of a former leader that may still come to count, or not."""

    term: int = 1
    leader: int | None = None
    ready: int = 0
    running: int = 0
    under_way: int = 0


@dataclass
class Node:
    """`view`: the groups that it takes itself to lead, with their terms; of those it may have `lost` some without knowing, and goes on
    counting what ran there."""

    number: int
    life: int
    view: dict[int, int] = field(default_factory=dict)
    lost: dict[int, int] = field(default_factory=dict)
    office: int = 0
    told_office: int = -1
    token: int = 0
    count: int = 0
    allowance: int = 0
    asked: Report | None = None
    is_up: bool = True


class World:
    """`send` and `deliver` are apart, so that anything may come between; a report that is given up may arrive all the same."""

    def __init__(self, rng: random.Random, cap: int) -> None:
        self.rng = rng
        self.cap = cap
        self.now_ms = 0
        self.unrest = rng.choice((0.01, 0.05, 0.2))
        self.groups = [Group() for _ in range(GROUPS)]
        self.nodes = {number: Node(number, number) for number in NODES}
        self.lives = 10
        self.homes = 0
        self.reports: list[tuple[int, Report]] = []
        self.answers: list[tuple[int, Report, Answer]] = []
        self.asks: dict[int, bool] = dict.fromkeys(NODES, False)
        self.new_home()
        for group in range(GROUPS):
            self.elect(group, rng.choice(NODES))

    def new_home(self) -> None:
        self.homes += 1
        self.home = Home(self.homes, GROUPS, lambda _tenant, _queue: (self.cap, -1.0), self.now_ms)

    def elect(self, group: int, node: int) -> None:
        """Another leader, or the same one again; who led before may learn it later. What was under way is in the new log, or never."""
        found = self.groups[group]
        if found.leader is not None and group in self.nodes[found.leader].view:
            self.nodes[found.leader].lost[group] = found.running + found.under_way
        if found.under_way and self.rng.random() < 0.5:
            found.running += found.under_way
        found.under_way = 0
        found.term += 1
        found.leader = node
        member = self.nodes[node]
        member.view[group] = found.term
        member.lost.pop(group, None)
        self.change_office(member)

    def learn(self, node: Node) -> None:
        """It sees which groups it leads no more."""
        gone = [group for group, term in node.view.items() if self.groups[group].leader != node.number or self.groups[group].term != term]
        for group in gone:
            del node.view[group]
            node.lost.pop(group, None)
        if gone:
            self.change_office(node)

    @staticmethod
    def change_office(node: Node) -> None:
        node.office += 1
        node.allowance = 0

    def leads(self, node: Node, group: int) -> bool:
        return node.view.get(group) == self.groups[group].term and self.groups[group].leader == node.number

    def led(self, node: Node) -> list[Group]:
        return [self.groups[group] for group in node.view if self.leads(node, group)]

    def used(self, node: Node) -> tuple[int, int]:
        """(running, reserved) as the node sees it."""
        return sum(group.running for group in self.led(node)) + sum(node.lost.values()), sum(group.under_way for group in self.led(node))

    def ready(self, node: Node) -> int:
        return sum(group.ready for group in self.led(node))

    def total(self) -> int:
        return sum(group.running + group.under_way for group in self.groups)

    # What may happen.

    def start(self, node: Node) -> None:
        able = [group for group in self.led(node) if group.ready]
        if node.is_up and able and sum(self.used(node)) < node.allowance:
            group = self.rng.choice(able)
            group.ready -= 1
            group.under_way += 1

    def land(self, group: Group) -> None:
        group.running, group.under_way = group.running + group.under_way, 0

    def send(self, node: Node) -> None:
        """Tell; whatever was told before is given up."""
        if not node.is_up or not all(self.leads(node, group) for group in node.view):
            return  # leases are over, and the node knows
        self.asks[node.number] = False
        running, reserved = self.used(node)
        led = sorted(node.view.items()) if node.told_office != node.office else None
        node.count += 1
        entry = Entry("t", "q", node.allowance, running, reserved, self.ready(node))
        node.asked = Report(node.token, node.life, node.count, node.office, led, [entry])
        self.reports.append((node.number, node.asked))

    def deliver(self, place: int) -> None:
        number, report = self.reports.pop(place)
        answer = self.home.on_report(number, report, self.now_ms)
        self.answers.append((number, report, answer))
        for asked in self.home.take_asks():
            self.asks[asked] = True

    def hear(self, place: int) -> None:
        number, report, answer = self.answers.pop(place)
        node = self.nodes[number]
        if node.asked is not report:
            return  # given up, or of another life
        node.asked = None
        if answer.result != DONE:
            node.token, node.told_office = answer.token, -1
        elif report.office == node.office:
            node.told_office = node.office
            before, node.allowance = node.allowance, answer.given[0].allowance
            self.asks[number] = self.asks[number] or node.allowance < before

    def kill(self, node: Node) -> None:
        node.is_up = False
        self.nodes[node.number] = Node(node.number, self.lives, is_up=False)
        self.lives += 1

    def step(self) -> None:
        rng = self.rng
        node = self.nodes[rng.choice(NODES)]
        self.now_ms += rng.choice((0, 0, 1, 5, 50, 400))
        if rng.random() < self.unrest:
            self.change()
            return
        match rng.randrange(14):
            case 0:
                rng.choice(self.groups).ready += rng.choice((1, 1, 5))
            case 1 | 2 | 3:
                self.start(node)
            case 4:
                self.land(rng.choice(self.groups))
            case 5:
                group = rng.choice(self.groups)
                group.running -= group.running > 0
            case 6 | 7:
                self.send(node)
            case 8 if self.reports:
                self.deliver(rng.randrange(len(self.reports)))
            case 9 if self.answers:
                self.hear(rng.randrange(len(self.answers)))
            case 10 if rng.random() < 0.5:
                self.learn(node)
            case _:
                self.tell(node)

    def tell(self, node: Node) -> None:
        """A report that is answered."""
        self.send(node)
        if self.reports and self.reports[-1][1] is node.asked:
            self.deliver(len(self.reports) - 1)
            self.hear(len(self.answers) - 1)

    def change(self) -> None:
        rng = self.rng
        kind = rng.randrange(8)
        up = [number for number, node in self.nodes.items() if node.is_up]
        if kind == 0:
            self.new_home()
        elif kind == 1 and self.reports:
            self.reports.pop(rng.randrange(len(self.reports)))
        elif kind == 2 and self.answers:
            self.answers.pop(rng.randrange(len(self.answers)))
        elif kind == 3 and len(up) > 1:
            self.kill(self.nodes[rng.choice(up)])
        elif kind == 4:
            for node in self.nodes.values():
                node.is_up = True
        elif up:
            self.elect(rng.randrange(GROUPS), rng.choice(up))

    def heal(self) -> None:
        """Every node is up and knows what it leads; every group has a leader; messages arrive; jobs end."""
        for node in self.nodes.values():
            node.is_up = True
        for number, group in enumerate(self.groups):
            if group.leader is None or not self.leads(self.nodes[group.leader], number):
                self.elect(number, self.rng.choice(NODES))
        for node in self.nodes.values():
            self.learn(node)

    def calm_step(self) -> None:
        """About a second."""
        for number, node in self.nodes.items():
            if self.ready(node) or self.asks[number] or node.told_office != node.office or self.rng.random() < 0.5:
                self.round_trip(node)
        for _ in range(12):
            for number in [number for number, asked in self.asks.items() if asked]:
                self.round_trip(self.nodes[number])
            self.now_ms += ASK_AGAIN_MS // 10
        for node in self.nodes.values():
            for _ in range(self.ready(node)):
                self.start(node)
        for group in self.groups:
            self.land(group)
        self.now_ms += TURN_MS

    def round_trip(self, node: Node) -> None:
        for _ in range(3):
            self.tell(node)


@given(seed=st.integers(0, 1 << 40), cap=st.integers(1, 6), steps=st.integers(50, 400))
@settings(deadline=None, max_examples=60)
def test_never_do_more_run_than_the_cap_and_all_run_in_the_end(seed: int, cap: int, steps: int) -> None:
    world = World(random.Random(seed), cap)
    for _ in range(steps):
        world.step()
        assert world.total() <= cap, f"{world.total()} run or may, of {cap}"
    world.heal()
    for _ in range(400):
        world.calm_step()
        assert world.total() <= cap
        busy = [group for group in world.groups if group.running]
        for group in busy:
            group.running -= 1
        if not busy and not any(group.ready for group in world.groups):
            return
    raise AssertionError(f"they wait for ever: {world.nodes}, {world.groups}")


def forgets_what_was_lost(
    ledger: _Ledger, node: int, life: int, office: int, led: dict[int, int], entry: Entry, before: _Share | None
) -> _Share | None:
    ledger.shares.pop(node, None)
    return begin(ledger, node, life, office, led, entry, None)


begin = _Ledger._begin


def goes_on(node: Node) -> None:
    node.office += 1


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        pytest.param(World, "change_office", staticmethod(goes_on), id="a node goes on under its allowance when it won or lost a group"),
        pytest.param(_Ledger, "is_blind", False, id="a new home gives out room before every group was told of"),
        pytest.param(_Ledger, "_begin", forgets_what_was_lost, id="what ran in a group that moves is forgotten until it is told of"),
        pytest.param(_Share, "bound", property(lambda share: share.used), id="only what runs counts, and not what may start"),
    ],
)
def test_what_breaks_the_cap_is_seen(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: object) -> None:
    def most(seed: int) -> int:
        world, most = World(random.Random(seed), 3), 0
        for _ in range(600):
            world.step()
            most = max(most, world.total())
        return most

    assert max(most(seed) for seed in range(10)) == 3
    monkeypatch.setattr(owner, name, broken)
    assert any(most(seed) > 3 for seed in range(300))


# One by one.


def report(home: Home, number: int, *entries: Entry, led: list[tuple[int, int]] | None = None, office: int = 1, life: int = 1) -> Report:
    return Report(home.token, life, number, office, led, list(entries))


def entry(allowance: int = 0, running: int = 0, *, reserved: int = 0, ready: int = 0, tokens: int = 0, returned: int = 0) -> Entry:
    return Entry("t", "q", allowance, running, reserved, ready, tokens, returned)


def a_home(cap: int = 6, rate: float = -1.0, groups: int = 3) -> Home:
    return Home(7, groups, lambda _tenant, _queue: (cap, rate), 0)


def all_told(home: Home) -> None:
    for node in NODES:
        home.on_report(node, report(home, 1, entry(), led=[(node - 1, 1)]), 0)
    home.take_asks()


def given_to(answer: Answer) -> int:
    assert answer.result == DONE
    return answer.given[0].allowance


def test_nothing_is_given_before_every_group_was_told_of() -> None:
    home = a_home()
    for node in (1, 2):
        assert given_to(home.on_report(node, report(home, 1, entry(ready=9), led=[(node - 1, 1)]), 0)) == 0
    assert given_to(home.on_report(3, report(home, 1, entry(ready=9), led=[(2, 1)]), 0)) > 0
    assert set(home.take_asks()) == {1, 2}, "now there is room for those that waited"


def test_what_nodes_hold_outlives_a_home() -> None:
    home = a_home()
    answers = [home.on_report(node, report(home, 1, entry(2, 1), led=[(node - 1, 1)]), 0) for node in NODES]
    assert [given_to(answer) for answer in answers] == [2, 2, 2]


def test_a_home_believes_nobody_who_told_another_one() -> None:
    home = a_home()
    stale = Report(6, 1, 1, 1, [(0, 1)], [entry(5)])
    answer = home.on_report(1, stale, 0)
    assert (answer.token, answer.result, answer.given) == (7, TELL_ALL, [])
    assert home.on_report(1, report(home, 2, entry()), 0).result == TELL_ALL, "it told of no groups yet"
    assert home.on_report(1, report(home, 3, entry(), led=[(0, 1)]), 0).result == DONE
    assert home.on_report(1, report(home, 3, entry(5)), 0).result == LATE


def test_a_lowered_allowance_counts_until_the_node_has_heard_of_it() -> None:
    home = a_home(cap=2)
    all_told(home)
    assert given_to(home.on_report(1, report(home, 2, entry(ready=5)), 0)) == 2
    assert given_to(home.on_report(2, report(home, 2, entry(ready=5)), 10)) == 0
    assert set(home.take_asks()) == {1}
    assert given_to(home.on_report(1, report(home, 3, entry(2, 2, ready=5)), 20)) == 1
    assert given_to(home.on_report(2, report(home, 3, entry(ready=5)), 30)) == 0, "two run, as far as is known"
    home.take_asks()
    assert given_to(home.on_report(1, report(home, 4, entry(1, 1, ready=5)), 40)) == 1
    assert set(home.take_asks()) == {2}
    assert given_to(home.on_report(2, report(home, 4, entry(ready=5)), 50)) == 1


def test_a_dead_nodes_jobs_count_until_others_lead_all_its_groups() -> None:
    home = a_home(cap=2)
    all_told(home)
    assert given_to(home.on_report(1, report(home, 2, entry(ready=9)), 0)) == 2
    assert given_to(home.on_report(2, report(home, 2, entry(ready=9)), 1_000)) == 0
    # It had one running: that is node 2's now, and one place is free.
    assert given_to(home.on_report(2, report(home, 3, entry(0, 1, ready=9), led=[(0, 2), (1, 1)], office=2), 2_000)) == 2
    assert home.bound("t", "q") == 2


def test_of_a_group_that_moves_nothing_is_counted_twice_or_lost() -> None:
    home = a_home(cap=4, groups=2)
    home.on_report(1, report(home, 1, entry(), led=[(0, 1), (1, 1)]), 0)
    assert given_to(home.on_report(1, report(home, 2, entry(ready=9)), 0)) == 4
    # Three run, two of them in group 1, which somebody else leads by now and has not told of.
    assert given_to(home.on_report(1, report(home, 3, entry(0, 1, ready=9), led=[(0, 1)], office=2), 10)) == 1
    assert home.bound("t", "q") == 4
    home.on_report(2, report(home, 1, entry(0, 2), led=[(1, 2)]), 20)
    assert home.bound("t", "q") == 3


def test_a_node_that_starts_anew_leaves_what_its_last_life_may_have_begun() -> None:
    home = a_home(cap=2)
    all_told(home)
    assert given_to(home.on_report(1, report(home, 2, entry(ready=9)), 0)) == 2
    assert home.on_report(1, report(home, 1, entry(ready=9), life=2), 10).result == TELL_ALL
    home.on_report(1, report(home, 2, entry(ready=9), led=[], life=2), 10)
    assert home.bound("t", "q") == 2
    assert given_to(home.on_report(3, report(home, 2, entry(ready=9)), 20)) == 0
    home.on_report(2, report(home, 2, entry(0, 1), led=[(0, 2), (1, 1)], office=2), 30)
    assert home.bound("t", "q") == 1 and set(home.take_asks()) == {3}


def test_a_report_of_an_earlier_life_that_comes_late_takes_nothing_off() -> None:
    home = a_home(cap=2)
    all_told(home)
    home.on_report(1, report(home, 1, entry(), led=[(0, 5)], life=2), 0)
    assert given_to(home.on_report(1, report(home, 2, entry(ready=9), life=2), 0)) == 2
    home.on_report(1, report(home, 2, entry(), led=[(0, 2)]), 10)
    assert home.bound("t", "q") == 2
    home.on_report(1, report(home, 3, entry(2, 1), life=2), 20)
    home.on_report(1, report(home, 4, entry(2, 1), led=[(0, 5)], life=2), 30)
    assert home.bound("t", "q") == 2


def test_nodes_that_do_not_know_of_a_cap_keep_it_from_being_given_out() -> None:
    home = a_home()
    for node in (1, 2):
        home.on_report(node, report(home, 1, entry(), led=[(node - 1, 1)]), 0)
    assert not home.on_report(3, report(home, 1, entry(-1, 50), led=[(2, 1)]), 0).given[0].is_limited
    assert given_to(home.on_report(1, report(home, 2, entry(ready=9)), 0)) == 0
    assert set(home.take_asks()) == {3}
    assert given_to(home.on_report(3, report(home, 2, entry(0, 50)), 0)) == 0
    assert given_to(home.on_report(1, report(home, 3, entry(ready=9)), 0)) == 0, "fifty run"


def test_a_lower_cap_takes_back_what_is_over() -> None:
    cap = 9
    home = Home(7, 3, lambda _tenant, _queue: (cap, -1.0), 0)
    all_told(home)
    for number in range(2, 5):
        for node in NODES:
            home.on_report(node, report(home, number, entry(3 * (number > 2), ready=3)), 0)
    cap = 3
    held = dict.fromkeys(NODES, 3)
    for number in range(5, 9):
        for node in NODES:
            held[node] = given_to(home.on_report(node, report(home, number, entry(held[node], ready=3)), 1_000 * number))
    assert held == dict.fromkeys(NODES, 1)


@pytest.mark.parametrize("cap", [1, 2, 4, 100])
def test_nodes_with_endless_work_have_their_turns(cap: int) -> None:
    """Jobs of 10 s: each node starts about as many, however few may run."""
    home = a_home(cap=cap)
    all_told(home)
    ends: dict[int, list[int]] = {node: [] for node in NODES}
    held, started, number = dict.fromkeys(NODES, 0), dict.fromkeys(NODES, 0), 1
    for now_ms in range(0, 600_000, 250):
        number += 1
        for node in NODES:
            ends[node] = [end_ms for end_ms in ends[node] if end_ms > now_ms]
            held[node] = given_to(home.on_report(node, report(home, number, entry(held[node], len(ends[node]), ready=200)), now_ms))
            while len(ends[node]) < held[node]:
                ends[node].append(now_ms + 10_000)
                started[node] += 1
            assert sum(map(len, ends.values())) <= cap
    assert min(started.values()) >= 0.6 * max(started.values()), started
    assert sum(started.values()) >= 0.8 * cap * 60


def test_idle_nodes_hold_what_nobody_wants_and_give_it_to_who_does() -> None:
    home = a_home(cap=9)
    all_told(home)
    for node in NODES:
        assert given_to(home.on_report(node, report(home, 2, entry(3 * (node == 3))), 0)) == 3
    assert given_to(home.on_report(1, report(home, 3, entry(3, ready=20)), 10)) == 3
    assert set(home.take_asks()) == {2, 3}
    for node in (2, 3):
        assert given_to(home.on_report(node, report(home, 3, entry(3)), 20)) == 0
        home.on_report(node, report(home, 4, entry(0)), 20)
        assert 1 in home.take_asks() or node == 3, "asked once, and not again at once"
    assert given_to(home.on_report(1, report(home, 4, entry(3, 3, ready=17)), 30)) == 9


# Rates.


@given(
    seed=st.integers(0, 1 << 40),
    rate=st.sampled_from((0.5, 1.0, 3.0, 20.0, 1000.0)),
    moves=st.integers(100, 500),
)
@settings(deadline=None, max_examples=40)
def test_a_rate_holds_over_all_nodes_whatever_is_lost(seed: int, rate: float, moves: int) -> None:
    """In no stretch of time do more start than the rate allows in it and one second's worth."""
    rng = random.Random(seed)
    home = Home(1, 3, lambda _tenant, _queue: (-1, rate), 0)
    now_ms, tokens, until, numbers, started = 0, dict.fromkeys(NODES, 0), dict.fromkeys(NODES, 0), dict.fromkeys(NODES, 0), []
    told = False
    for _ in range(moves):
        now_ms += rng.choice((0, 1, 20, 100, 700))
        if rng.random() < 0.02:
            home, told = Home(home.token + 1, 3, lambda _tenant, _queue: (-1, rate), now_ms), False
        for node in NODES:
            if now_ms >= until[node]:
                tokens[node] = 0
            ready = rng.choice((0, 1, 50))
            returned = 0 if ready else tokens[node]
            tokens[node] -= returned
            numbers[node] += 1
            led = [(node - 1, 1)] if not told else None
            if rng.random() < 0.8:
                answer = home.on_report(
                    node, report(home, numbers[node], entry(-1, ready=ready, tokens=tokens[node], returned=returned), led=led), now_ms
                )
                if answer.result == DONE and rng.random() < 0.8:
                    tokens[node] += answer.given[0].tokens
                    until[node] = now_ms + TOKENS_MS
            while ready and tokens[node] and rng.random() < 0.9:
                tokens[node] -= 1
                ready -= 1
                started.append(now_ms)
        told = rng.random() < 0.9
    burst = max(rate, 1.0)
    for first in range(len(started)):
        for last in range(first, len(started), 7):
            assert last - first + 1 <= burst + rate * (started[last] - started[first]) / 1000 + 1e-6


@pytest.mark.parametrize("rate", [0.5, 5.0, 500.0])
def test_a_rate_is_used_to_the_full_and_by_all(rate: float) -> None:
    home = a_home(cap=-1, rate=rate)
    for node in NODES:
        home.on_report(node, report(home, 1, entry(-1), led=[(node - 1, 1)]), 0)
    started, number, again = dict.fromkeys(NODES, 0), 1, dict.fromkeys(NODES, 0)
    end_ms = 120_000
    for now_ms in range(TOKENS_GONE_MS, end_ms, 10):
        for node in NODES:
            if now_ms >= min(again[node], 1_000 * (now_ms // 1_000)):
                number += 1
                (answer,) = home.on_report(node, report(home, number, entry(-1, ready=1_000)), now_ms).given
                started[node] += answer.tokens
                again[node] = now_ms + answer.again_ms
    assert sum(started.values()) >= 0.9 * rate * (end_ms - TOKENS_GONE_MS) / 1000
    assert min(started.values()) >= 0.5 * max(started.values())
