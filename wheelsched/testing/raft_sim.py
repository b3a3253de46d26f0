"""A random walk over one group of Raft cores: `python -m wheelsched.testing.raft_sim --seed S --steps N`.

One seed fixes everything. Each schedule draws which faults it has and how hard (swarm testing: each is off in half of the schedules),
walks, checks the invariants after every event, then heals everything and demands progress within a bound. A failure prints the seed,
the last events and the command that replays it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from rich.console import Console
from rich.progress import track

from wheelsched.raft import (
    Answer,
    AnyMessage,
    Change,
    ChangeKind,
    Entry,
    InstallSnapshot,
    Mode,
    PeerState,
    RaftConfig,
    ReadResult,
    make_configuration,
)
from wheelsched.testing.raft_world import Image, Invariants, Node, Timeouts, World, WorldBroken, ensure

NODE_ID_MAX = 7
REORDER_SPAN = 60
LOG_CHECK_EVERY = 4


@dataclass(frozen=True, slots=True)
class Profile:
    """What one schedule does to its group. Rates are weights among events, chances are per message or event."""

    voters: int
    config: RaftConfig
    loss: float
    duplication: float
    reordering: float
    partitions: float
    holds_cut: bool  # a cut link keeps messages until it heals: only so do stale answers arrive late
    crashes: float
    torn_crashes: bool  # a crash may keep a prefix of what was not synced
    pauses: float
    slow_sync: tuple[int, ...]
    slow_apply: tuple[int, ...]
    compaction: float
    churn: float
    transfers: float
    reads: float
    campaigns: float
    clock_rates: tuple[float, ...]

    @classmethod
    def draw(cls, rng: random.Random) -> Profile:
        def some(*values: float) -> float:
            return rng.choice(values) if rng.random() < 0.5 else 0.0

        voters = rng.choice((3, 3, 3, 4, 5))
        election_tick = rng.choice((2, 2, 3, 5, 10))  # small: more elections per event
        config = RaftConfig(
            election_tick=election_tick,
            heartbeat_tick=1,
            pre_vote=rng.random() < 0.6,
            check_quorum=rng.random() < 0.6,
            restart_grace=rng.random() < 0.5,
            max_inflight=rng.choice((1, 2, 4, 64)),
            max_inflight_bytes=rng.choice((0, 0, 30)),
            max_msg_bytes=rng.choice((0, 1, 20)),
            max_uncommitted=rng.choice((0, 60)),
            max_apply_batch=rng.choice((0, 0, 1, 3)),
        )
        ids = range(1, NODE_ID_MAX + 1)
        return cls(
            voters=voters,
            config=config,
            loss=some(0.05, 0.2),
            duplication=some(0.05),
            reordering=some(0.3, 0.8),
            partitions=some(0.3, 1.0),
            holds_cut=rng.random() < 0.5,
            crashes=some(0.2, 0.8),
            torn_crashes=rng.random() < 0.5,
            pauses=some(0.5),
            slow_sync=tuple(node_id for node_id in ids if rng.random() < 0.3) if rng.random() < 0.5 else (),
            slow_apply=tuple(node_id for node_id in ids if rng.random() < 0.3) if rng.random() < 0.5 else (),
            compaction=some(1.0, 4.0),
            churn=some(0.5, 2.0),
            transfers=some(0.3, 1.0),
            reads=some(1.0, 4.0),
            campaigns=some(0.5, 2.0),
            clock_rates=tuple(rng.choice((0.5, 1.0, 1.0, 2.0)) if rng.random() < 0.3 else 1.0 for _ in ids),
        )


class SimWorld(World):
    """A world whose network loses, doubles, reorders and holds back. A lost snapshot is noted, for its sender must be told."""

    def __init__(self, rng: random.Random, profile: Profile) -> None:
        super().__init__(keep_history=profile.torn_crashes)
        self.record_sent = False
        self._rng = rng
        self._profile = profile
        self.held_links: set[tuple[int, int]] = set()
        self.reports: list[tuple[InstallSnapshot, bool]] = []
        self.is_calm = False

    def send(self, node: Node, message: AnyMessage) -> None:
        before = len(self.messages)
        super().send(node, message)
        if type(message) is InstallSnapshot and len(self.messages) == before:
            self.reports.append((message, False))

    def post(self, message: AnyMessage) -> None:
        profile, rng = self._profile, self._rng
        if self.is_calm or not profile.loss or rng.random() >= profile.loss:
            self.messages.append(message)
            if profile.duplication and not self.is_calm and rng.random() < profile.duplication:
                self.messages.append(message)

    def take_message(self) -> AnyMessage | None:
        """One that may be delivered now, mostly the oldest."""
        rng, reordering = self._rng, self._profile.reordering
        for _ in range(4):
            if not self.messages:
                return None
            span = min(len(self.messages), REORDER_SPAN)
            # With links that hold, the oldest may be stuck: look further.
            position = rng.randrange(span) if self.held_links or (reordering and rng.random() < reordering) else 0
            message = self.messages[position]
            if (message.sender, message.to) not in self.held_links:
                del self.messages[position]
                return message
        return None

    def deliver(self, message: AnyMessage) -> bool:
        arrived = super().deliver(message)
        if type(message) is InstallSnapshot:
            self.reports.append((message, arrived))
        return arrived


class Simulation:
    """One schedule. `run` raises `WorldBroken` or `RaftFault` where a promise does not hold."""

    def __init__(self, seed: int, *, profile: Profile | None = None, trace: bool = False) -> None:
        self.seed = seed
        self.rng = random.Random(f"schedule {seed}")
        self.profile = profile or Profile.draw(random.Random(f"profile {seed}"))
        self.world = SimWorld(random.Random(f"network {seed}"), self.profile)
        self.world.on_reads = self._on_reads
        self.invariants = Invariants(self.world)
        self.recent: deque[str] = deque(maxlen=60)
        self.event_count = 0
        self._trace = trace
        self._proposed = 0
        self.acked: dict[bytes, int] = {}  # payload -> index, once applied where it was proposed in that term
        self._waiting: dict[tuple[int, bytes], int] = {}  # (node, payload) -> term it was proposed in
        self._highest_ack = 0
        self._paused_until: dict[int, int] = {}
        self.read_count = 0
        conf = make_configuration(range(1, self.profile.voters + 1))
        for node_id in conf.voters:
            self._add_node(node_id, Image(conf=conf, term=1, commit=10, start_index=10, start_term=1, applied=10, applied_term=1))
        if self.rng.random() < 0.8:  # else the walk is half over before anybody leads
            for node in self.world.nodes.values():
                for _ in range(self.profile.config.election_tick):  # the silence after a start is over
                    node.running.tick()
            self.world.nodes[self.rng.randint(1, self.profile.voters)].running.campaign()
        self._events = self._weigh()
        self._bounds = list(accumulate(weight for weight, _ in self._events))

    def _add_node(self, node_id: int, image: Image) -> None:
        self.world.nodes[node_id] = Node(node_id, self.profile.config, image, Timeouts(f"timeouts {self.seed} {node_id}"))

    def add_blank(self, node_id: int) -> None:
        """A node without anything, unless it is there already; it joins by snapshot only."""
        if node_id not in self.world.nodes:
            self._add_node(node_id, Image())

    def _weigh(self) -> list[tuple[float, Callable[[], str | None]]]:
        profile = self.profile
        events = [
            (34.0, self._deliver),
            (16.0, self._turn),
            # In a tick as many messages travel whatever the election timeout is, or a short one would mean elections only.
            (2.0 + 1.5 * profile.config.election_tick, self._tick),
            (8.0, self._write),
            (6.0, self._sync),
            (6.0, self._apply),
            (6.0, self._run),
            (5.0, self._propose),
            (profile.reads, self._read),
            (profile.partitions, self._partition),
            (profile.partitions * 0.6, self._heal),
            (profile.crashes, self._crash),
            (profile.crashes * 4, self._restart),
            (profile.pauses, self._pause),
            (profile.compaction, self._compact),
            (profile.churn, self._change),
            (profile.transfers, self._transfer),
            (profile.campaigns, self._campaign),
            (0.2, self._unreachable),
            (1.0, self._report),
        ]
        return [event for event in events if event[0]]

    # ---- the walk

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.heal_and_settle()

    def step(self) -> None:
        what = None
        for _ in range(8):  # an event that finds nothing to do is not one
            position = bisect_right(self._bounds, self.rng.random() * self._bounds[-1])
            what = self._events[min(position, len(self._events) - 1)][1]()
            if what is not None:
                break
        self._note(what or "nothing")

    def _turn(self) -> str | None:
        """A few messages to one node, then all its work: what a healthy driver does in one turn of its loop."""
        node = self._any()
        if node is None:
            return None
        held, waiting = self.world.held_links, []
        for message in self.world.messages:
            if message.to == node.node_id and (message.sender, message.to) not in held:
                waiting.append(message)
                if len(waiting) == 4:
                    break
        for message in waiting:
            self.world.messages.remove(message)
            self.world.deliver(message)
        if node.node_id in self.profile.slow_sync and self.rng.random() < 0.8:
            self.world.write(node)
            self._check(node)
        else:
            self._run_node(node)
        return f"turn {node.node_id}, {len(waiting)} messages"

    def _note(self, what: str) -> None:
        self.event_count += 1
        line = f"{self.event_count}: {what}"
        self.recent.append(line)
        if self._trace:
            print(line)

    def _check(self, node: Node) -> None:
        if node.core is not None:
            self.invariants.check(node, logs=self.event_count % LOG_CHECK_EVERY == 0)

    def _running(self) -> list[Node]:
        now = self.event_count
        return [
            node for node_id, node in self.world.nodes.items()
            if node.core is not None and self._paused_until.get(node_id, 0) <= now
        ]  # fmt: skip

    def _any(self) -> Node | None:
        nodes = self._running()
        return self.rng.choice(nodes) if nodes else None

    def _leader(self) -> Node | None:
        """A leader, perhaps one that is so in its own eyes only; sometimes anybody."""
        leaders = [node for node in self._running() if node.running.leadership is not None]
        return self.rng.choice(leaders) if leaders and self.rng.random() < 0.9 else self._any()

    def _deliver(self) -> str | None:
        message = self.world.take_message()
        if message is None:
            return None
        if self._paused_until.get(message.to, 0) > self.event_count:
            self.world.messages.append(message)
            return None
        self.world.deliver(message)
        target = self.world.nodes.get(message.to)
        if target is not None:
            self._check(target)
        return f"deliver {message}"

    def _tick(self) -> str | None:
        node = self._any()
        if node is None:
            return None
        rate = self.profile.clock_rates[node.node_id - 1]
        for _ in range(int(rate + self.rng.random())):
            node.running.tick()
        self._check(node)
        return f"tick {node.node_id}"

    def _write(self) -> str | None:
        node = self._any()
        if node is None or len(node.written) >= 8 or not self.world.write(node):
            return None
        self._check(node)
        return f"write {node.node_id}"

    def _sync(self) -> str | None:
        node = self._any()
        if node is None or (node.node_id in self.profile.slow_sync and self.rng.random() < 0.8):
            return None
        self.world.sync(node)
        self._check(node)
        return f"sync {node.node_id}"

    def _apply(self) -> str | None:
        node = self._any()
        if node is None or (node.node_id in self.profile.slow_apply and self.rng.random() < 0.8):
            return None
        self._apply_some(node, self.rng.choice((1, 2, None)))
        self._check(node)
        return f"apply {node.node_id} to {node.image.applied}"

    def _apply_some(self, node: Node, count: int | None = None) -> bool:
        """Apply one by one, acknowledging what this node proposed in the entry's term."""
        first = len(node.image.data)
        index = node.image.applied
        done = self.world.apply(node, count)
        if self._waiting:
            by_payload = {entry.payload: entry for entry in self._applied_entries(node, index)}
            for payload in node.image.data[first:]:
                entry = by_payload.get(payload)
                if entry is not None and self._waiting.get((node.node_id, payload)) == entry.term:
                    del self._waiting[node.node_id, payload]
                    self.acked[payload] = entry.index
                    self._highest_ack = max(self._highest_ack, entry.index)
        return done

    @staticmethod
    def _applied_entries(node: Node, after: int) -> Sequence[Entry]:
        log = node.running.log
        return log.slice(max(after, log.start_index) + 1, node.image.applied)

    def _run(self) -> str | None:
        node = self._any()
        if node is None or node.node_id in self.profile.slow_sync or node.node_id in self.profile.slow_apply:
            return None
        self._run_node(node)
        return f"run {node.node_id}"

    def _run_node(self, node: Node) -> bool:
        busy = False
        while True:
            wrote = self.world.write(node)
            synced = self.world.sync(node)
            applied = self._apply_some(node)
            self._check(node)
            if not (wrote or synced or applied):
                return busy
            busy = True

    def _propose(self) -> str | None:
        node = self._leader()
        if node is None:
            return None
        payloads = []
        for _ in range(self.rng.choice((1, 1, 1, 3))):
            self._proposed += 1
            payloads.append(b"p%d" % self._proposed)
        answer = node.running.propose(payloads)
        if answer is Answer.ACCEPTED:
            for payload in payloads:
                self._waiting[node.node_id, payload] = node.running.term
        self._check(node)
        return f"propose {node.node_id} {payloads} {answer}"

    def _read(self) -> str | None:
        node = self._leader()
        if node is None:
            return None
        answer = node.running.read_index(self._highest_ack)
        self._check(node)
        return f"read {node.node_id} at {self._highest_ack} {answer}"

    def _on_reads(self, node: Node, results: Iterable[ReadResult]) -> None:
        for result in results:
            self.read_count += 1
            assert isinstance(result.ctx, int)
            # Linearizable: what was acknowledged before the read began is in it.
            ensure(result.index >= result.ctx, "reads_are_linearizable", node=node.node_id, index=result.index, acked=result.ctx)

    # ---- faults

    def _partition(self) -> str:
        ids = sorted(self.world.nodes)
        leaders = [node.node_id for node in self._running() if node.running.leadership is not None]
        if leaders and self.rng.random() < 0.4:
            side = {self.rng.choice(leaders)}
        else:
            side = {node_id for node_id in ids if self.rng.random() < 0.5}
        one_way = self.rng.random() < 0.2
        links = {(a, b) for a in side for b in ids if b not in side}
        if not one_way:
            links |= {(b, a) for a, b in links}
        (self.world.held_links if self.profile.holds_cut else self.world.cut_links).update(links)
        return f"partition {sorted(side)} one_way={one_way}"

    def _heal(self) -> str:
        self.world.held_links.clear()
        self.world.cut_links.clear()
        return "heal"

    def _crash(self) -> str | None:
        node = self._any()
        if node is None:
            return None
        surviving = None
        if node.history and self.rng.random() < 0.7:
            surviving = self.rng.choice(node.history)
        self.world.crash(node, surviving)
        return f"crash {node.node_id} torn={surviving is not None}"

    def _restart(self) -> str | None:
        down = [node for node in self.world.nodes.values() if node.core is None]
        if not down:
            return None
        return self._start(self.rng.choice(down))

    def _start(self, node: Node) -> str:
        self.world.restart(node)
        self.invariants.on_restart(node)
        self._check(node)
        return f"restart {node.node_id}"

    def _pause(self) -> str | None:
        node = self._any()
        if node is None:
            return None
        self._paused_until[node.node_id] = self.event_count + self.rng.randrange(10, 120)
        return f"pause {node.node_id}"

    def _compact(self) -> str | None:
        node = self._any()
        if node is None or node.running.applied_index <= node.image.start_index or node.running.is_installing:
            return None
        # The stored log may only be cut where it is written, which all that was applied is.
        index = self.rng.randint(node.image.start_index + 1, min(node.running.applied_index, node.image.applied))
        self.world.compact(node, index)
        self._check(node)
        return f"compact {node.node_id} {index}"

    def _change(self) -> str | None:
        """One voter enters and one leaves at most (RAFT.md rule 14)."""
        node = self._leader()
        if node is None:
            return None
        rng, conf = self.rng, node.running.configuration
        changes: list[Change] = []
        if conf.is_joint and rng.random() < 0.7:
            answer = node.running.propose_conf([])
            self._check(node)
            return f"leave joint {node.node_id} {answer}"
        outsiders = [node_id for node_id in range(1, NODE_ID_MAX + 1) if node_id not in conf.voters]
        kind = rng.choice(("learner", "enter", "leave", "swap"))
        if kind == "learner" and outsiders:
            changes = [Change(rng.choice((ChangeKind.ADD_LEARNER, ChangeKind.REMOVE)), rng.choice(outsiders))]
        if kind in ("enter", "swap") and outsiders:
            learners = [node_id for node_id in outsiders if node_id in conf.learners]
            changes.append(Change(ChangeKind.ADD_VOTER, rng.choice(learners or outsiders)))
        if kind in ("leave", "swap") and len(conf.voters) > (1 if kind == "swap" else 2):
            changes.append(Change(rng.choice((ChangeKind.ADD_LEARNER, ChangeKind.REMOVE)), rng.choice(conf.voters)))
        if not changes:
            return None
        for change in changes:
            self.add_blank(change.node_id)
        answer = node.running.propose_conf(changes, rng.choice(list(Mode)))
        self._check(node)
        return f"change {node.node_id} {changes} {answer}"

    def _transfer(self) -> str | None:
        node = self._leader()
        if node is None:
            return None
        to = self.rng.choice(sorted(self.world.nodes))
        answer = node.running.transfer(to)
        self._check(node)
        return f"transfer {node.node_id} to {to} {answer}"

    def _campaign(self) -> str | None:
        node = self._any()
        if node is None:
            return None
        node.running.campaign()
        self._check(node)
        return f"campaign {node.node_id}"

    def _unreachable(self) -> str | None:
        node = self._leader()
        if node is None:
            return None
        peer = self.rng.choice(sorted(self.world.nodes))
        node.running.report_unreachable(peer)
        return f"unreachable {node.node_id} {peer}"

    def _report(self) -> str | None:
        """Tell senders of snapshots how the transfers ended."""
        reports, self.world.reports = self.world.reports, []
        for message, arrived in reports:
            sender = self.world.nodes[message.sender]
            if sender.core is not None and sender.core.term == message.term:
                sender.core.report_snapshot(message.to, arrived)
        return f"reports {len(reports)}" if reports else None

    # ---- after the faults

    def heal_and_settle(self) -> None:
        """Liveness (SIM.md section 6): everything works again, so the group must be level and whole within a bound."""
        self.world.is_calm = True
        self._heal()
        self._paused_until.clear()
        for node in self.world.nodes.values():
            if node.core is None:
                self._start(node)
        config = self.profile.config
        # Without pre-vote nodes with short logs push terms up, and others have to start again.
        rounds = (30 * config.election_tick + 60) * (1 if config.pre_vote else 4)
        used = next((number for number in range(rounds) if self._round()), None)
        ensure(used is not None, "progress_after_healing", rounds=rounds, state=self.describe())
        leader = self._settled_leader()
        assert leader is not None
        ensure(leader.running.propose([b"last"]) is Answer.ACCEPTED, "progress_after_healing", state=self.describe())
        for _ in range(6 + 2 * config.election_tick):
            self._round()
        for node in self._members():
            ensure(node.image.data[-1:] == [b"last"], "progress_after_healing", node=node.node_id, state=self.describe())
            held = set(node.image.data)
            ensure(len(held) == len(node.image.data), "applied_once", node=node.node_id)
            lost = [payload for payload in self.acked if payload not in held]
            ensure(not lost, "acknowledged_is_never_lost", node=node.node_id, lost=lost)

    def _round(self) -> bool:
        """Everybody ticks once and all messages arrive; whether the group is level and whole then."""
        for node in self._members():
            node.running.tick()
        for _ in range(4):
            for node in list(self.world.nodes.values()):
                self._run_node(node)
            self._report()
            messages, self.world.messages = self.world.messages, []
            for message in messages:
                self.world.deliver(message)
            self._note(f"round, {len(messages)} messages")
        for node in list(self.world.nodes.values()):
            self._run_node(node)
        return self._settled_leader() is not None

    def _members(self) -> list[Node]:
        """Of the newest configuration. Others may not know that they left; the product stops them with a tombstone."""
        newest = max(self.world.nodes.values(), key=lambda node: node.image.applied)
        return [self.world.nodes[node_id] for node_id in newest.image.conf.members() if node_id in self.world.nodes]

    def _settled_leader(self) -> Node | None:
        members = self._members()
        leaders = [node for node in members if node.running.leadership is not None]
        if len(leaders) != 1:
            return None
        core = leaders[0].running
        office = core.leadership
        assert office is not None
        is_level = all(node.image.applied == core.log.last_index for node in members)
        is_whole = not (core.configuration.is_joint and core.configuration.auto_leave) and not office.transferee
        streams = all(peer.state is PeerState.REPLICATE for node_id, peer in office.peers.items() if node_id != core.node_id)
        return leaders[0] if is_level and is_whole and streams and office.has_committed_own and not len(office.reads) else None

    def describe(self) -> list[str]:
        lines = []
        for node_id, node in sorted(self.world.nodes.items()):
            if node.core is not None:
                status = node.core.status()
                lines.append(
                    f"{node_id} {status.role} term {status.term} vote {status.vote} leader {status.leader} applied {status.applied}"
                    f" commit {status.commit} last {status.last_index}.{status.last_term} {status.configuration} {status.progress}"
                )
        return lines

    def fingerprint(self) -> str:
        """The same for the same seed and steps, whatever the process."""
        digests = [f"{node_id}:{node.image.applied}:{node.image.digest:08x}" for node_id, node in sorted(self.world.nodes.items())]
        return f"{self.event_count} events, {self.invariants.last_committed} committed, " + " ".join(digests)


def run_seed(seed: int, steps: int, *, trace: bool = False) -> Simulation:
    """One schedule; a failure is raised with everything needed to see it again."""
    simulation = Simulation(seed, trace=trace)
    try:
        simulation.run(steps)
    except AssertionError as error:
        recent = "\n  ".join(simulation.recent)
        raise WorldBroken(
            f"seed {seed}, event {simulation.event_count}: {type(error).__name__} {error}\n{simulation.profile}\n"
            f"last events:\n  {recent}\nreplay: python -m wheelsched.testing.raft_sim --seed {seed} --steps {steps} --trace\n"
        ) from error
    return simulation


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m wheelsched.testing.raft_sim", description="Random walks over a Raft group.")
    parser.add_argument("--seed", type=int, default=1, help="first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, one after the other")
    parser.add_argument("--steps", type=int, default=600, help="events before healing")
    parser.add_argument("--trace", action="store_true", help="print every event")
    options = parser.parse_args(arguments)
    failed = events = reads = commits = 0
    started = time.perf_counter()
    seeds = range(options.seed, options.seed + options.seeds)
    for seed in track(seeds, "schedules", console=Console(stderr=True), disable=len(seeds) == 1):
        try:
            simulation = run_seed(seed, options.steps, trace=options.trace)
        except WorldBroken as error:
            failed += 1
            print(error)
            continue
        events += simulation.event_count
        reads += simulation.read_count
        commits += max(simulation.invariants.last_committed - 10, 0)
        if options.seeds == 1:
            print(simulation.fingerprint())
    seconds = time.perf_counter() - started
    print(
        f"{options.seeds} schedules, {failed} failed; {events} events, {commits} commits, {reads} reads in {seconds:.1f} s"
        f" ({events / seconds:.0f} events/s, {options.seeds / seconds:.1f} schedules/s)"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
