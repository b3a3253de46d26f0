"""Short plans around one hazard each: `python -m wheelsched.testing.raft_plans [--plan NAME] [--seed S] [--seeds N]`.

A random walk seldom meets the few schedules in which, say, an old entry reaches a majority one message before its leader dies. Each
plan here is a template for such a story with every step varied or skipped at random, run a few times in one group, then healed and
checked as a walk is. A plan that cannot find its own bug looks like success, so each has a mutant that it must catch.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from wheelsched.raft import (
    AnyMessage,
    Append,
    Change,
    ChangeKind,
    Configuration,
    InstallSnapshot,
    Mode,
    PreVoteRequest,
    PreVoteResponse,
    RaftConfig,
    VoteRequest,
    VoteResponse,
)
from wheelsched.testing.raft_sim import Profile, Simulation
from wheelsched.testing.raft_world import Node, WorldBroken

VOTES: tuple[type[AnyMessage], ...] = (VoteRequest, VoteResponse, PreVoteRequest, PreVoteResponse)
ROUNDS = 4  # stories in one group


class Stage(Simulation):
    """A group whose network delivers only what a plan asks for; the rest waits, and may come late."""

    def __init__(self, seed: int, plan: str) -> None:
        self.chance = random.Random(f"plan {plan} {seed}")
        chance = self.chance
        config = RaftConfig(
            election_tick=3, heartbeat_tick=1, pre_vote=chance.random() < 0.2, check_quorum=False, restart_grace=False,
            max_inflight=chance.choice((1, 2, 64)), max_inflight_bytes=0, max_msg_bytes=chance.choice((0, 1)), max_uncommitted=0,
        )  # fmt: skip
        calm = replace(
            Profile.draw(random.Random(0)), voters=chance.choice((3, 3, 5)), config=config, loss=0.0, duplication=0.0, reordering=0.0,
            torn_crashes=chance.random() < 0.5, slow_sync=(), slow_apply=(), clock_rates=(1.0,) * 7,
        )  # fmt: skip
        super().__init__(seed, profile=calm)

    def maybe(self, chance: float) -> bool:
        return self.chance.random() < chance

    def pick(self, nodes: Collection[Node]) -> Node:
        return self.chance.choice(sorted(nodes, key=lambda node: node.node_id))

    def some(self, nodes: Collection[Node]) -> list[Node]:
        return [node for node in nodes if self.maybe(0.5)]

    def up(self, *but: Node) -> list[Node]:
        return [node for node in self.world.nodes.values() if node.core is not None and node not in but]

    def work(self, node: Node, *, sync: bool = True, apply: bool = True) -> None:
        """All stages of one node, as far as they are not withheld."""
        if node.core is None:
            return
        for _ in range(4):
            self.world.write(node)
            if sync:
                self.world.sync(node)
            if apply:
                self._apply_some(node)
            self._check(node)

    def pass_on(self, nodes: Collection[Node], kinds: tuple[type[AnyMessage], ...] = (), chance: float = 1.0) -> int:
        """Deliver what waits between these nodes, of these kinds or all."""
        ids = {node.node_id for node in nodes}
        chosen: list[AnyMessage] = []
        kept: list[AnyMessage] = []
        for message in self.world.messages:
            fits = message.sender in ids and message.to in ids and (not kinds or isinstance(message, kinds))
            (chosen if fits and self.maybe(chance) else kept).append(message)
        self.world.messages = kept
        for message in chosen:
            self.world.deliver(message)
            self._check(self.world.nodes[message.to])
        return len(chosen)

    def converse(
        self,
        nodes: Collection[Node],
        rounds: int,
        kinds: tuple[type[AnyMessage], ...] = (),
        *,
        lazy: Collection[Node] = (),
        slow: Collection[Node] = (),
    ) -> None:
        """Some rounds of work and messages among these; those in `lazy` write but do not sync, those in `slow` do not apply."""
        for _ in range(rounds):
            for node in nodes:
                self.work(node, sync=node not in lazy, apply=node not in slow)
            self._note(f"round among {[node.node_id for node in nodes]}, {self.pass_on(nodes, kinds)} messages")

    def elect(self, node: Node, among: Collection[Node], *, slow: Collection[Node] = ()) -> bool:
        """Have `node` elected by votes alone, without letting it replicate anything."""
        if node.core is None:
            return False
        for _ in range(3):  # the first attempts may only teach it the term
            node.core.campaign()
            self.converse(among, 4, VOTES, slow=slow)
            self._note(f"campaign of {node.node_id}: {node.running.role}")
            if node.core.leadership is not None:
                return True
        return False

    def put(self, node: Node, count: int = 1) -> None:
        """Propose at a node that may be leader; acknowledged when applied there."""
        for _ in range(count):
            self._proposed += 1
            payload = b"p%d" % self._proposed
            if node.core is not None and node.core.propose([payload]) == "accepted":
                self._waiting[node.node_id, payload] = node.core.term
                self._note(f"propose {node.node_id} {payload!r}")

    def ask(self, node: Node) -> None:
        if node.core is not None:
            self._note(f"read {node.node_id} at {self._highest_ack} {node.core.read_index(self._highest_ack)}")

    def kill(self, node: Node) -> None:
        if node.core is not None:
            self.world.crash(node, self.chance.choice(node.history) if node.history and self.maybe(0.5) else None)
            self._note(f"crash {node.node_id}")

    def revive(self, *nodes: Node) -> None:
        for node in nodes:
            if node.core is None:
                self._note(self._start(node))

    def drop(self, chance: float, *, to: Node | None = None) -> None:
        """Lose some of what waits; who sent a snapshot hears of it in the end."""
        kept = []
        for message in self.world.messages:
            if (to is None or message.to == to.node_id) and self.maybe(chance):
                if isinstance(message, InstallSnapshot):
                    self.world.reports.append((message, False))
            else:
                kept.append(message)
        self.world.messages = kept

    def calm_down(self) -> Node | None:
        """Everybody up and level behind one leader, the starting point of a story."""
        self.revive(*self.world.nodes.values())
        for _ in range(60):
            self._round()
            leader = self._settled_leader()
            if leader is not None:
                return leader
        return None


def figure_8(stage: Stage, a: Node) -> None:
    """An entry of an old term on a majority is not committed by that (thesis figure 3.7)."""
    stage.put(a, stage.chance.randint(1, 2))
    stage.work(a)
    others = stage.up(a)
    b = stage.pick(others)
    if stage.maybe(0.5):
        stage.pass_on([a, b], (Append,))
        stage.work(b)
    stage.kill(a)
    stage.drop(0.9)
    e = stage.pick([node for node in others if node is not b] or others)
    if stage.elect(e, others if stage.maybe(0.3) else [node for node in others if node is not b or len(others) == 2]):
        stage.put(e)
        stage.work(e)
    stage.kill(e)
    stage.drop(1.0)
    stage.revive(a)
    # Entries one by one from here on: the old one may reach a majority while the new one does not.
    if stage.elect(a, stage.up()):
        for _ in range(stage.chance.randint(1, 5)):
            stage.converse(stage.up(), 1)
    stage.kill(a)
    stage.drop(stage.chance.choice((0.5, 1.0)))
    stage.revive(e)
    stage.elect(e, stage.up())
    stage.converse(stage.up(), 4)


def stale_reader(stage: Stage, a: Node) -> None:
    """A leader that was replaced without knowing answers no read, whatever answers come late."""
    others = stage.up(a)
    if stage.maybe(0.5):
        stage.ask(a)
        stage.work(a)
        stage.pass_on(stage.up())  # the answers stay on their way
        for node in others:
            stage.work(node)
    company = [stage.pick(others)] if len(others) > 2 and stage.maybe(0.5) else []
    rest = [node for node in others if node not in company]
    b = stage.pick(rest)
    if stage.elect(b, rest):
        before = stage._highest_ack
        if stage.maybe(0.7):
            stage.put(b)
            stage.converse(rest, 5)
        else:
            stage.converse(rest, 1, VOTES)
        stage._note(f"acknowledged {before} to {stage._highest_ack}")
    for node in (a, a, b):
        if stage.maybe(0.6):
            stage.ask(node)
            stage.work(node)
    if stage.maybe(0.5):
        stage.converse([a, *company], 2)
    for _ in range(3):
        stage.pass_on([a, *others], chance=0.4)
        stage.work(a)
    if stage.maybe(0.4) and stage.elect(a, stage.up()):  # lost and regained
        stage.ask(a)
        stage.converse([a, stage.pick(others)], 2)


def new_reader(stage: Stage, a: Node) -> None:
    """A new leader may not know yet how much its predecessor acknowledged (etcd #7331)."""
    others = stage.up(a)
    b = stage.pick(others)
    stage.put(a)
    stage.work(a)
    stage.pass_on(stage.up(), (Append,))
    for node in others:
        stage.work(node)
    stage.pass_on(stage.up())
    stage.work(a)  # committed, applied, acknowledged; the news of it is on its way
    if stage.maybe(0.5):
        stage.kill(a)
    if stage.elect(b, others):
        stage.ask(b)
        for _ in range(3):
            stage.work(b)
            stage.pass_on(others, tuple(kind for kind in AnyMessage.__args__ if kind is not Append or stage.maybe(0.2)))
            for node in others:
                stage.work(node)


def lazy_disk(stage: Stage, a: Node) -> None:
    """What is not synced counts for nothing, and what was overwritten meanwhile does not count later."""
    others = stage.up(a)
    b = stage.pick(others)
    majority = [b, *[node for node in others if node is not b][: len(others) // 2 - 1]]
    stage.put(a)
    lazy = [a, *[node for node in stage.up() if stage.maybe(0.4)]]
    for _ in range(stage.chance.randint(1, 3)):
        stage.converse([a, *majority], 1, lazy=lazy)
    stage.work(a, sync=False)
    rest = [node for node in others if node not in majority] or others
    if stage.maybe(0.7):
        stage.kill(a)
        stage.drop(0.5)
        stage.revive(a)
    c = stage.pick([a, *rest])
    voters = [node for node in stage.up() if node not in majority or len(rest) + 1 <= len(others) // 2 or stage.maybe(0.2)]
    if stage.elect(c, voters if c in voters else [c, *voters]):
        if stage.maybe(0.3):  # elected, and crashed before its own vote is on disk
            stage.kill(c)
            stage.revive(c)
        stage.put(c)
        stage.work(c)
        stage.pass_on(stage.up())
        for node in stage.some(lazy):
            if node.core is not None:
                stage.world.sync(node)  # of what was written before the new entries came in
                stage._check(node)
        stage.converse(stage.up(), 2, lazy=stage.some(others))
    for node in stage.some(stage.up()):
        stage.kill(node)


def overwritten(stage: Stage, a: Node) -> None:
    """An entry is replaced between its write and its sync (etcd append ABA race)."""
    others = stage.up(a)
    b = stage.pick(others)
    rest = [node for node in others if node is not b]
    stage.put(a, stage.chance.randint(1, 2))
    stage.work(a, sync=False)
    stage.pass_on([a, b], (Append,))
    stage.world.write(b)  # in flight
    if len(rest) < 3:
        # Of three, the entry may only be on one for another to win: the first leader loses it.
        stage.world.crash(a)
        stage.revive(a)
        rest.append(a)
    c = stage.pick(rest)
    if stage.elect(c, rest):
        stage.put(c, stage.chance.randint(0, 2))
        stage.work(c)
        for _ in range(stage.chance.randint(1, 3)):
            stage.pass_on([b, c], (Append,))
            stage.world.sync(b)
            stage._check(b)
            stage.pass_on([b, c])
            stage.work(c)
    if stage.maybe(0.5):
        stage.kill(b)


def early_vote(stage: Stage, a: Node) -> None:
    """A candidate wins, speaks and crashes before its own term is on disk: one term, two lives."""
    stage.kill(a)
    candidate = stage.pick(stage.up())
    candidate.running.campaign()
    for _ in range(2):
        stage.work(candidate, sync=False)
        stage.pass_on(stage.up())
        for node in stage.up(candidate):
            stage.work(node)
        stage.pass_on(stage.up())
    stage.put(candidate)
    stage.work(candidate, sync=False)
    if stage.maybe(0.6):
        stage.pass_on(stage.up(), (Append,), 0.5)
    stage.kill(candidate)
    stage.drop(0.5)
    stage.revive(candidate)
    stage.elect(candidate, stage.up())
    stage.put(candidate)
    stage.converse(stage.up(), 3)


def churn(stage: Stage, a: Node) -> None:
    """Changes that some have applied and some have not: two majorities that know nothing of each other may come about."""
    old = stage.up(a)
    slow = [node for node in old if stage.maybe(0.7)]
    new: list[Node] = []
    for _ in range(stage.chance.randint(1, 3)):
        if a.core is None or a.core.leadership is None:
            break
        changes = some_changes(stage, a.core.configuration)
        for change in changes:
            stage.add_blank(change.node_id)
            if change.kind is ChangeKind.ADD_VOTER and stage.world.nodes[change.node_id] not in [a, *old, *new]:
                new.append(stage.world.nodes[change.node_id])
        stage._note(f"change {changes} {a.core.propose_conf(changes, stage.chance.choice(list(Mode)))}")
        a.core.tick()
        stage.converse([a, *new, *stage.some(old)], stage.chance.randint(3, 9), slow=slow)
    stage.put(a)
    stage.converse([a, *new, *([stage.pick(old)] if stage.maybe(0.3) else [])], stage.chance.randint(2, 6), slow=slow)
    if stage.maybe(0.3):
        stage.kill(a)
    stage.drop(0.5)
    for _ in range(2):
        side = old if stage.maybe(0.6) else stage.some(stage.up())
        if not side:
            continue
        candidate = stage.pick(side)
        if stage.elect(candidate, side, slow=slow):
            stage.put(candidate)
            stage.converse(side, stage.chance.randint(1, 5), slow=slow)


def some_changes(stage: Stage, conf: Configuration) -> list[Change]:
    """At most one voter enters and one leaves, mostly one enters."""
    outsiders = [node_id for node_id in range(1, 8) if node_id not in conf.voters]
    if conf.is_joint:
        return []
    changes = []
    if outsiders and stage.maybe(0.8):
        changes.append(Change(ChangeKind.ADD_VOTER, stage.chance.choice(outsiders)))
    if len(conf.voters) > 2 and (not changes or stage.maybe(0.3)):
        changes.append(Change(stage.chance.choice((ChangeKind.REMOVE, ChangeKind.ADD_LEARNER)), stage.chance.choice(conf.voters)))
    return changes


def snapshot_race(stage: Stage, a: Node) -> None:
    """Snapshots late, twice, behind newer ones, cut short by crashes."""
    others = stage.up(a)
    b = stage.pick(others)
    for _ in range(stage.chance.randint(1, 3)):
        stage.put(a, 2)
        stage.converse(stage.up(b), 4)
        if a.core is not None and a.core.applied_index > a.image.start_index:
            stage.world.compact(a, a.core.applied_index)
        stage.drop(0.7, to=b)
        for node in stage.up():
            node.running.tick()
        for _ in range(3):
            copies = [message for message in stage.world.messages if message.to == b.node_id and stage.maybe(0.4)]
            stage.work(a)
            stage.pass_on([a, b], chance=0.7)
            stage.world.messages += copies
            if b.core is not None:
                stage.world.write(b)
                if stage.maybe(0.3):
                    stage.kill(b)
                    stage.revive(b)
                else:
                    stage.work(b)
        stage._report()


def power_loss(stage: Stage, a: Node) -> None:
    """All nodes stop at once, each in the middle of something."""
    stage.put(a, 2)
    for _ in range(stage.chance.randint(1, 6)):
        stage.converse(stage.some(stage.up()), 1, lazy=stage.some(stage.up()))
    for node in stage.up():
        stage.kill(node)
    stage.drop(stage.chance.choice((0.0, 1.0)))
    nodes = list(stage.world.nodes.values())
    stage.chance.shuffle(nodes)
    stage.revive(*nodes)
    candidate = stage.pick(nodes)
    stage.elect(candidate, [candidate, *stage.some(stage.up(candidate))])
    stage.put(candidate)
    stage.converse(stage.some(nodes), 3)


PLANS: dict[str, Callable[[Stage, Node], None]] = {
    plan.__name__: plan
    for plan in (figure_8, stale_reader, new_reader, lazy_disk, overwritten, early_vote, churn, snapshot_race, power_loss)
}


def run_plan(plan: str, seed: int) -> Stage:
    """One group, some stories; raises `WorldBroken` with what is needed to see a failure again."""
    stage = Stage(seed, plan)
    try:
        for _ in range(ROUNDS):
            leader = stage.calm_down()
            if leader is None:
                break  # the check after healing says whether that is a fault
            PLANS[plan](stage, leader)
        stage.heal_and_settle()
    except AssertionError as error:
        recent = "\n  ".join(stage.recent)
        raise WorldBroken(
            f"plan {plan}, seed {seed}, event {stage.event_count}: {type(error).__name__} {error}\n{stage.profile}\n"
            f"last events:\n  {recent}\nreplay: python -m wheelsched.testing.raft_plans --plan {plan} --seed {seed}\n"
        ) from error
    return stage


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m wheelsched.testing.raft_plans", description="Directed plans over a Raft group.")
    parser.add_argument("--plan", choices=sorted(PLANS), help="default: each of them")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args(arguments)
    failed = 0
    for plan in [options.plan] if options.plan else PLANS:
        started = time.perf_counter()
        wrong = 0
        for seed in range(options.seed, options.seed + options.seeds):
            try:
                run_plan(plan, seed)
            except WorldBroken as error:
                wrong += 1
                print(error)
        print(f"{plan}: {options.seeds} seeds, {wrong} failed, {time.perf_counter() - started:.1f} s", flush=True)
        failed += wrong
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
