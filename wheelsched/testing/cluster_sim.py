"""Whole nodes of a cluster under faults: `python -m wheelsched.testing.cluster_sim --seed S --steps N`.

Real are the driver, the Raft cores, the state machine, the log and the wire format of messages; simulated are disks (`SimStore`: syncs
take time, cover what was written when they began, and a crash keeps a prefix of the rest), the network and the clocks. One seed fixes
everything. Each draws which faults it has and how hard (each is off in half of the seeds), walks, checks the invariants after every
event, then heals everything and demands progress within a bound. A failure prints the seed, the last events and the command that
replays it.

What must hold: `one_leader_per_term`; `applied_agrees`: equal applied index, equal rows, byte for byte; `never_lost`: whatever was
answered is in the rows of every later leader, and what was refused never comes to be; `acknowledged_is_durable`: no vote and no
acknowledgement leaves that the sender's disk does not hold; `one_live_lease`: at most one node acts for a group; `token_grows`;
`never_early`; the watermark never falls; memory that is built from the rows in `on_lead` and kept up by effects is what the rows say.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import math
import random
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Final, NoReturn
from zlib import crc32

from wheelsched.core.errors import InvalidRequest, NotLeader, OutcomeUnknown, Unavailable
from wheelsched.model import keys
from wheelsched.model.commands import AnyCommand, Claim, Complete, Create, Fire, Reply
from wheelsched.model.effects import Effect, JobChanged, JobsCreated, JobsMoved
from wheelsched.model.rows import JobSpec, decode_state, encode_spec
from wheelsched.model.states import FINAL, Outcome
from wheelsched.raft import (
    AnyMessage,
    AppendResponse,
    Configuration,
    RaftConfig,
    VoteRequest,
    VoteResponse,
    decode_message,
    encode_message,
    make_configuration,
)
from wheelsched.replica.proposals import Batch
from wheelsched.replica.raft_member import RaftMember
from wheelsched.replica.raft_replicas import RaftReplicas
from wheelsched.replica.raft_settings import ReplicaSettings
from wheelsched.store import StoreFailed
from wheelsched.store.memory import MemoryStore, SortedRows, _apply
from wheelsched.store.raftlog import RaftLog
from wheelsched.testing.simulate_node import quiet_logs

START_MS: Final = 1_767_413_106_007
GROUPS: Final = (0, 1)
STEPS_DEFAULT: Final = 120
TENANT, QUEUE = "t", "q"
TICK_MS: Final = 50
# Turns of the loop after which a node that never rests is a bug of its own.
SPINS_MAX: Final = 20_000
HEAL_MS_MAX: Final = 60_000
STALL_MS: Final = 3_000
QUIET_CHECKS: Final = 8  # half a second apart


class ClusterBroken(AssertionError):
    """An invariant of the cluster does not hold; `name` says which."""

    def __init__(self, name: str, **facts: object) -> None:
        super().__init__(f"{name}: " + ", ".join(f"{key}={value!r}" for key, value in facts.items()))
        self.name = name


def ensure(ok: object, name: str, **facts: object) -> None:
    if not ok:
        raise ClusterBroken(name, **facts)


@dataclass(frozen=True, slots=True)
class Profile:
    """What one seed does to its cluster. Chances are per batch of messages or per step."""

    nodes: int
    voters: int
    settings: ReplicaSettings
    loss: float
    duplication: float
    delay_ms: int
    in_order: bool
    partitions: float
    holds_cut: bool  # a cut link keeps messages until it heals: only so do stale answers arrive late
    crashes: float
    torn: bool  # a crash may keep a prefix of what was not synced
    pauses: float
    clock_steps: float
    clock_rates: tuple[float, ...]
    sync_ms: tuple[int, ...]  # the slowest fsync, by node
    transfers: float
    churn: float
    pace_ms: int

    @classmethod
    def draw(cls, rng: random.Random) -> Profile:
        def some(*values: float) -> float:
            return rng.choice(values) if rng.random() < 0.5 else 0.0

        voters = rng.choice((3, 3, 3, 3, 1, 5))
        churn = some(0.1, 0.3)
        nodes = voters + (rng.choice((1, 2)) if churn else 0)
        compacts = rng.random() < 0.5
        settings = ReplicaSettings(
            tick_ms=TICK_MS,
            raft=RaftConfig(
                max_inflight=rng.choice((1, 4, 64)), cache_bytes=rng.choice((200, 4 * 1024 * 1024)),
                max_msg_bytes=rng.choice((300, 1024 * 1024)),
            ),
            voters_min=min(voters, 3),
            lease_reads=rng.random() < 0.3,
            compact_entries=rng.choice((4, 16)) if compacts else 20_000,
            keep_entries=rng.choice((8, 64)),
            small_snapshot_rows=rng.choice((0, 20, 2_000)),
            copy_rows=rng.choice((1, 7, 400)),
        )  # fmt: skip
        profile = cls(
            nodes=nodes,
            voters=voters,
            settings=settings,
            loss=some(0.02, 0.1, 0.3),
            duplication=some(0.1),
            delay_ms=rng.choice((1, 5, 30, 120)),
            in_order=rng.random() < 0.6,
            partitions=some(0.05, 0.2),
            holds_cut=rng.random() < 0.5,
            crashes=some(0.05, 0.2),
            torn=rng.random() < 0.6,
            pauses=some(0.05, 0.2),
            clock_steps=some(0.05),
            clock_rates=tuple(rng.choice((1.0, 1.0, 0.96, 1.04)) for _ in range(nodes)),
            sync_ms=tuple(rng.choice((1, 1, 5, 40, 700)) for _ in range(nodes)) if rng.random() < 0.5 else (2,) * nodes,
            transfers=some(0.05, 0.2),
            churn=churn,
            pace_ms=rng.choice((5, 40, 200)),
        )
        settings = replace(settings, leave_ms=rng.choice((0, 500, 5_000)), digest_window=rng.choice((5, 20, 10_000)))
        return replace(profile, settings=settings)


# ---- time, disk, network


class World:
    """One instant for all, and what happens next. Events of a node that stands still wait until it goes on."""

    def __init__(self) -> None:
        self.now_ms = 1_000
        self._events: list[tuple[int, int, int, Callable[[], None]]] = []
        self._numbers = count()
        self.paused: dict[int, list[Callable[[], None]]] = {}

    def at(self, when_ms: int, node: int, event: Callable[[], None]) -> None:
        """`node` 0: nobody's."""
        heapq.heappush(self._events, (max(when_ms, self.now_ms), next(self._numbers), node, event))

    def take(self, until_ms: int) -> tuple[int, Callable[[], None]] | None:
        """The next event up to an instant, and whose it is; now is when it happens."""
        while self._events and self._events[0][0] <= until_ms:
            when_ms, _, node, event = heapq.heappop(self._events)
            self.now_ms = when_ms
            if node not in self.paused:
                return node, event
            self.paused[node].append(event)
        self.now_ms = until_ms
        return None

    def resume(self, node: int) -> None:
        for event in self.paused.pop(node, []):
            self.at(self.now_ms, node, event)

    async def sleep(self, ms: int, node: int) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.at(self.now_ms + ms, node, lambda: None if future.done() else future.set_result(None))
        await future


class SimClock:
    """A node's clock: its own rate, and a wall time that can be set."""

    def __init__(self, world: World, node: int, rate: float) -> None:
        self._world, self._node, self._rate = world, node, rate
        self.stepped_ms = 0

    def wall_ms(self) -> int:
        return START_MS + self._world.now_ms + self.stepped_ms

    def mono_ms(self) -> int:
        return int(self._world.now_ms * self._rate)

    async def sleep_until(self, mono_ms: int) -> None:
        while (left := mono_ms - self.mono_ms()) > 0:
            await self._world.sleep(math.ceil(left / self._rate), self._node)


class SimStore(MemoryStore):
    """Syncs take time. One at a time; each covers what was written when it began, and no more."""

    def __init__(self, world: World, node: int, delay_ms: Callable[[], int]) -> None:
        super().__init__(fatal=_fatal)
        self._world, self._node, self._delay_ms = world, node, delay_ms
        self._waiters: list[asyncio.Future[None]] = []
        self._is_syncing = False

    async def sync(self) -> None:
        self.check_open()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        if not self._is_syncing:
            self._begin()
        await future

    def _begin(self) -> None:
        self._is_syncing = True
        waiters, self._waiters = self._waiters, []
        covered = len(self._unsynced)
        self._world.at(self._world.now_ms + self._delay_ms(), self._node, lambda: self._finish(covered, waiters))

    def _finish(self, covered: int, waiters: Sequence[asyncio.Future[None]]) -> None:
        if self._closed:
            return
        for batch in self._unsynced[:covered]:
            _apply(self._synced, batch)
        del self._unsynced[:covered]
        self._is_syncing = False
        for future in waiters:
            if not future.done():
                future.set_result(None)
        if self._waiters:
            self._begin()

    def durable(self, family: str) -> SortedRows:
        """What would survive a crash."""
        return self._synced[family]

    def crash(self, keep_bytes_fraction: float = 0.0) -> SimStore:
        left = super().crash(keep_bytes_fraction)
        after = SimStore(self._world, self._node, self._delay_ms)
        after._families, after._synced = left._families, left._synced
        return after


def _fatal(message: str) -> NoReturn:
    raise ClusterBroken("store_failed", message=message)


class Network:
    """Loses, doubles, delays, reorders, cuts one way or both."""

    def __init__(self, simulation: Simulation, rng: random.Random) -> None:
        self._simulation, self._world, self._rng = simulation, simulation.world, rng
        self.cut: set[tuple[int, int]] = set()
        self._held: list[tuple[int, int, bytes]] = []
        self._last_ms: dict[tuple[int, int], int] = {}
        self.is_calm = False
        self.transfers: dict[asyncio.Task[None], tuple[int, int]] = {}

    def send(self, sender: int, to: int, messages: Sequence[tuple[int, AnyMessage]]) -> None:
        profile, rng = self._simulation.profile, self._rng
        for group, message in messages:
            assert (message.group, message.sender, message.to) == (group, sender, to)
            self._simulation.check_promise(sender, group, message)
        data = [encode_message(message) for _, message in messages]
        copies = 1
        if not self.is_calm:
            if (sender, to) in self.cut:
                if profile.holds_cut:
                    self._held += [(sender, to, item) for item in data]
                return
            if rng.random() < profile.loss:
                return
            copies += rng.random() < profile.duplication
        for _ in range(copies):
            self._post(sender, to, data)

    def _post(self, sender: int, to: int, data: Sequence[bytes]) -> None:
        delay_ms = 1 if self.is_calm else self._rng.randint(0, self._simulation.profile.delay_ms)
        when_ms = self._world.now_ms + delay_ms
        if self._simulation.profile.in_order:
            when_ms = self._last_ms[sender, to] = max(when_ms, self._last_ms.get((sender, to), 0))
        self._world.at(when_ms, to, lambda: self._deliver(sender, to, data))

    def _deliver(self, sender: int, to: int, data: Sequence[bytes]) -> None:
        node = self._simulation.nodes[to]
        if node.replicas is not None:
            messages = [decode_message(item) for item in data]
            node.replicas.on_messages(sender, [(message.group, message) for message in messages])

    def heal(self) -> None:
        self.cut.clear()
        held, self._held = self._held, []
        for sender, to, item in held:
            self._post(sender, to, [item])

    # Snapshots.

    def send_snapshot(self, sender: int, to: int, group: int, snapshot_id: int, chunks: AsyncIterator[bytes]) -> asyncio.Future[bool]:
        sent: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(self._move(sender, to, group, snapshot_id, chunks, sent))
        self.transfers[task] = (sender, to)
        task.add_done_callback(lambda task: self.transfers.pop(task, None))
        return sent

    async def _move(
        self, sender: int, to: int, group: int, snapshot_id: int, chunks: AsyncIterator[bytes], sent: asyncio.Future[bool]
    ) -> None:
        installed = False
        try:
            replicas = self._simulation.nodes[to].replicas
            if replicas is not None:
                arriving = self._arriving(sender, to, chunks)
                installed = await replicas.take_snapshot(sender, group, snapshot_id, arriving)
                if not self.is_calm and self._rng.random() < self._simulation.profile.loss:
                    installed = False  # the answer was lost
                await self._world.sleep(1, sender)
        except StoreFailed:
            pass  # either end crashed
        finally:
            if not sent.done():
                sent.set_result(installed)

    async def _arriving(self, sender: int, to: int, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for chunk in chunks:
            await self._world.sleep(self._rng.randint(0, self._simulation.profile.delay_ms), to)
            if not self.is_calm and ((sender, to) in self.cut or self._rng.random() < self._simulation.profile.loss / 4):
                return
            yield chunk

    async def end_transfers(self, node: int) -> None:
        tasks = [task for task, ends in self.transfers.items() if node in ends]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class NodePeers:
    """`Peers` of one node."""

    network: Network
    node: int

    def send(self, node: int, messages: Sequence[tuple[int, AnyMessage]]) -> None:
        self.network.send(self.node, node, messages)

    def send_snapshot(self, node: int, group: int, snapshot_id: int, chunks: AsyncIterator[bytes]) -> asyncio.Future[bool]:
        return self.network.send_snapshot(self.node, node, group, snapshot_id, chunks)


# ---- nodes


class SimNode:
    """A node while it runs and its disk; what it was told by callbacks."""

    def __init__(self, simulation: Simulation, node_id: int, rate: float) -> None:
        self.simulation = simulation
        self.node_id = node_id
        self.clock = SimClock(simulation.world, node_id, rate)
        self.store = SimStore(simulation.world, node_id, self._sync_delay_ms)
        self.replicas: RaftReplicas | None = None
        self.running: asyncio.Task[None] | None = None
        self.memory: dict[int, dict[bytes, int]] = {}  # group -> job id -> version, while this node leads the group
        self.stalled_ms = 0  # added to the next fsync
        self._rng = random.Random(f"node {simulation.seed} {node_id}")
        self._starts = 0

    def _sync_delay_ms(self) -> int:
        stalled_ms, self.stalled_ms = self.stalled_ms, 0
        slowest = 1 if self.simulation.network.is_calm else self.simulation.profile.sync_ms[self.node_id - 1]
        return stalled_ms + (self._rng.randint(0, slowest) if self._rng.random() < 0.3 else min(slowest, 1))

    def first_configuration(self, _group: int) -> Configuration:
        voters = range(1, self.simulation.profile.voters + 1)
        return make_configuration(voters) if self.node_id in voters else make_configuration()

    def start(self) -> None:
        simulation = self.simulation
        is_founder = self.node_id <= simulation.profile.voters
        raft_log = RaftLog(self.store, GROUPS, joining=() if is_founder else GROUPS)
        for group in GROUPS:
            if raft_log.installing(group) is not None:
                simulation.counted("installed again")
        self._starts += 1
        self.memory.clear()
        self.replicas = simulation.replicas_type(
            self.store, raft_log, self.clock, random.Random(f"chance {simulation.seed} {self.node_id} {self._starts}"),
            NodePeers(simulation.network, self.node_id), self.node_id, GROUPS, first_configuration=self.first_configuration,
            on_effects=self._on_effects, on_lead=self._on_lead, on_follow=self._on_follow, on_replaced=self._on_replaced,
            settings=simulation.profile.settings,
        )  # fmt: skip
        self.replicas.recover()
        self.running = asyncio.create_task(self.replicas.run(), name=f"node {self.node_id}")

    async def crash(self, keep_bytes_fraction: float) -> None:
        assert self.running is not None and self.replicas is not None
        self.store = self.store.crash(keep_bytes_fraction)
        replicas, self.replicas = self.replicas, None
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.simulation.network.end_transfers(self.node_id)
        replicas.abort()
        self.running = None
        self.memory.clear()
        self.simulation.world.paused.pop(self.node_id, None)

    def member(self, group: int) -> RaftMember:
        assert self.replicas is not None
        return self.replicas._members[group]

    # What it is told.

    def _on_lead(self, group: int) -> None:
        self.simulation.note(f"  n{self.node_id} leads group {group} in term {self.member(group).raft.term}")
        ensure(group not in self.memory, "lead_and_follow_alternate", node=self.node_id, group=group)
        self.memory[group] = self.versions(group)
        self.simulation.counted("offices")
        self.simulation.check_leader_holds(self, group)

    def _on_follow(self, group: int) -> None:
        self.simulation.note(f"  n{self.node_id} follows in group {group}")
        ensure(self.memory.pop(group, None) is not None, "lead_and_follow_alternate", node=self.node_id, group=group)

    def _on_replaced(self, group: int) -> None:
        has_left = self.member(group).left is not None
        self.simulation.note(f"  n{self.node_id} {'dropped' if has_left else 'took over'} the rows of group {group}")
        self.simulation.counted("left" if has_left else "snapshots")
        if has_left:
            ensure(not self.rows(group), "left_is_dropped", node=self.node_id, group=group)

    def _on_effects(self, group: int, effects: Sequence[Effect]) -> None:
        ensure(group in self.memory, "effects_of_leaders_only", node=self.node_id, group=group)
        self.simulation.check_one_leads(group)
        memory = self.memory[group]
        for effect in effects:
            match effect:
                case JobChanged(after=None, before=before):
                    assert before is not None
                    memory.pop(before.job_id, None)
                case JobChanged(after=after):
                    assert after is not None
                    memory[after.job_id] = after.version
                case JobsCreated():
                    memory.update((state.job_id, state.version) for state in effect.states)
                case JobsMoved():
                    memory.update((state.job_id, state.version) for state in effect.afters)

    def versions(self, group: int) -> dict[bytes, int]:
        prefix = keys.group_prefix(group)
        rows = self.store.scan(keys.STATE, prefix, keys.prefix_end(prefix), 1 << 30)
        return {key[2:]: decode_state(row).version for key, row in rows}

    def rows(self, group: int) -> list[tuple[bytes, bytes]]:
        """All of the group's state."""
        prefix = keys.group_prefix(group)
        end = keys.prefix_end(prefix)
        return [row for family in keys.STATE_FAMILIES for row in self.store.scan(family, prefix, end, 1 << 30)]

    def digest(self, group: int) -> int:
        digest = crc32(repr(self.member(group).state).encode())
        for key, value in self.rows(group):
            digest = crc32(value, crc32(key, digest))
        return digest


# ---- what clients know


@dataclass(slots=True)
class Job:
    """`acked`: the highest version answered; `is_sure`: it was answered at all. `tries`, `refused`: proposals, and how many of them were
    answered that nothing happened."""

    group: int
    create: Create
    acked: int = 0
    tries: int = 0
    refused: int = 0
    held: tuple[int, int] | None = None  # attempt, token
    is_over: bool = False


@dataclass
class Simulation:
    """One seed. `run` raises `ClusterBroken` where a promise does not hold, and whatever stopped a node."""

    seed: int
    steps: int = STEPS_DEFAULT
    profile: Profile = field(init=False)
    replicas_type: type[RaftReplicas] = RaftReplicas

    def __post_init__(self) -> None:
        self.profile = Profile.draw(random.Random(f"profile {self.seed}"))
        self.rng = random.Random(f"schedule {self.seed}")
        self.world = World()
        self.network = Network(self, random.Random(f"network {self.seed}"))
        self.nodes: dict[int, SimNode] = {}
        self.log: deque[str] = deque(maxlen=100_000)
        self.jobs: dict[bytes, Job] = {}
        self.waiting: set[asyncio.Future[Any]] = set()
        self.tokens: dict[int, int] = {}
        self.given: set[tuple[int, int]] = set()
        self.wall_max_ms = 0
        self.leaders: dict[tuple[int, int], int] = {}
        self.digests: dict[tuple[int, int], int] = {}
        self.confs: dict[tuple[int, int], Configuration] = {}
        self._applied: dict[tuple[int, int], int] = {}
        self._watermarks: dict[tuple[int, int], int] = {}
        self.counts: dict[str, int] = {}
        self._failure: BaseException | None = None
        self._numbers = count(1)

    def note(self, event: str) -> None:
        self.log.append(event)

    def counted(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    # The run.

    async def run(self) -> list[str]:
        for node_id in range(1, self.profile.nodes + 1):
            node = self.nodes[node_id] = SimNode(self, node_id, self.profile.clock_rates[node_id - 1])
            node.start()
        try:
            await self.advance(2_000)
            moves = self._moves()
            for step in range(self.steps):
                name, move = self.rng.choices([(name, move) for name, move, _ in moves], [weight for _, _, weight in moves])[0]
                self.note(f"{step} {self.world.now_ms} {name}")
                await move()
                await self.advance(self.rng.randint(0, self.profile.pace_ms))
            await self.heal()
        finally:
            await self._close()
        return list(self.log)

    async def _close(self) -> None:
        tasks = [node.running for node in self.nodes.values() if node.running is not None]
        tasks += list(self.network.transfers)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _moves(self) -> list[tuple[str, Callable[[], Coroutine[Any, Any, None]], float]]:
        profile = self.profile
        return [
            ("create", self.create, 1.0), ("create_many", self.create_many, 0.3), ("fire", self.fire, 0.8), ("claim", self.claim, 0.8),
            ("complete", self.complete, 0.6), ("again", self.again, 0.3), ("read", self.read, 0.4), ("wait", self.wait, 0.4),
            ("partition", self.partition, profile.partitions), ("heal links", self.heal_links, profile.partitions),
            ("depose", self.depose, profile.partitions / 2), ("fall behind", self.fall_behind, self._snapshots_rate()),
            ("crash", self.crash, profile.crashes), ("restart", self.restart, 2 * profile.crashes), ("pause", self.pause, profile.pauses),
            ("resume", self.resume, profile.pauses), ("step clock", self.step_clock, profile.clock_steps),
            ("stall", self.stall, 0.05 if max(profile.sync_ms) > 40 else 0.0), ("transfer", self.transfer, profile.transfers),
            ("change", self.change, profile.churn),
        ]  # fmt: skip

    def _snapshots_rate(self) -> float:
        profile = self.profile
        return profile.crashes if profile.settings.compact_entries < 100 and profile.voters > 1 else 0.0

    async def advance(self, ms: int, *, until: Callable[[], object] | None = None) -> None:
        """Let everything happen that is due within `ms`, or up to the event that brings `until` about, checking after each."""
        until_ms = self.world.now_ms + ms
        await self.settle()
        while (found := self.world.take(until_ms)) is not None:
            owner, event = found
            event()
            await self.settle(owner)
            if until is not None and until():
                break
        self.check()

    async def settle(self, owner: int = 0) -> None:
        """Let everybody do what can be done now, then check the node whose event it was (0: all)."""
        await self._spin()
        for node in self.nodes.values():
            if node.running is not None and node.running.done():
                raise _cause(node.running.exception()) or ClusterBroken("node_ended", node=node.node_id)
        if self._failure is not None:
            raise self._failure
        self.check(owner)

    async def _spin(self) -> None:
        """Let all tasks run until none can: then only an event moves anything."""
        ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]  # the one place that knows whether anybody can run
        for _ in range(SPINS_MAX):
            await asyncio.sleep(0)
            if not ready:
                return
        raise ClusterBroken("a_node_rests", spins=SPINS_MAX)

    # ---- checks

    def check(self, owner: int = 0) -> None:
        for node in self.nodes.values():
            if node.replicas is None or owner not in (0, node.node_id):
                continue
            self.wall_max_ms = max(self.wall_max_ms, node.clock.wall_ms())
            for group in GROUPS:
                member = node.member(group)
                raft = member.raft
                if raft.leadership is not None:
                    leader = self.leaders.setdefault((group, raft.term), node.node_id)
                    ensure(leader == node.node_id, "one_leader_per_term", group=group, term=raft.term, nodes=(leader, node.node_id))
                self._check_state(node, group, member)
        for group in GROUPS:
            self.check_one_leads(group)

    def _check_state(self, node: SimNode, group: int, member: RaftMember) -> None:
        applied, place = member.state.applied_index, (node.node_id, group)
        ensure(member.installation is not None or applied == member.raft.applied_index or member.pending, "core_knows_applied",
               node=node.node_id, group=group, applied=applied, core=member.raft.applied_index)  # fmt: skip
        if self._applied.get(place) == applied or member.installation is not None or not member.raft.configuration.members():
            return
        self._applied[place] = applied
        digest = node.digest(group)
        known = self.digests.setdefault((group, applied), digest)
        ensure(known == digest, "applied_agrees", node=node.node_id, group=group, applied=applied)
        if not member.pending:
            conf = self.confs.setdefault((group, applied), member.raft.configuration)
            ensure(conf == member.raft.configuration, "configurations_agree", node=node.node_id, group=group, applied=applied)
        watermark_ms = member.state.watermark_ms
        ensure(watermark_ms <= self.wall_max_ms, "never_early", group=group, watermark_ms=watermark_ms, wall_ms=self.wall_max_ms)
        self._watermarks[group, applied] = watermark_ms
        before = self._watermarks.get((group, applied - 1), 0)
        ensure(before <= watermark_ms, "watermark_never_falls", group=group, applied=applied, before=before, now=watermark_ms)
        if group in node.memory:
            ensure(node.memory[group] == node.versions(group), "memory_is_what_the_rows_say", node=node.node_id, group=group)

    def check_one_leads(self, group: int) -> None:
        leading = [node.node_id for node in self.nodes.values() if node.replicas is not None and node.replicas.leads(group)]
        ensure(len(leading) <= 1, "one_live_lease", group=group, nodes=leading, now_ms=self.world.now_ms)

    def check_leader_holds(self, node: SimNode, group: int) -> None:
        """`never_lost`, at the moment a node begins to act for the group."""
        self._check_holds(node.versions(group), group, {job_id: job.acked for job_id, job in self.jobs.items()}, node.node_id)

    def _check_holds(self, versions: dict[bytes, int], group: int, acked: dict[bytes, int], node_id: int) -> None:
        for job_id, version in acked.items():
            if self.jobs[job_id].group == group and version:
                ensure(versions.get(job_id, 0) >= version, "never_lost", node=node_id, group=group, job=self._name(job_id),
                       acked=version, found=versions.get(job_id))  # fmt: skip

    def check_promise(self, sender: int, group: int, message: AnyMessage) -> None:
        """`acknowledged_is_durable`, against the disk of the sender."""
        if not isinstance(message, (VoteRequest, VoteResponse, AppendResponse)):
            return
        row = self.nodes[sender].store.durable(keys.RAFT_META).get(b"H" + keys.group_prefix(group))
        term, vote, _, last = (int.from_bytes(row[place : place + 8], "big") for place in (0, 8, 16, 24)) if row else (0, 0, 0, 0)
        ok = term >= message.term
        if ok and term == message.term:
            match message:
                case VoteRequest():
                    ok = vote == sender
                case VoteResponse(reject=False):
                    ok = vote == message.to
                case AppendResponse(reject=False):
                    ok = last >= message.index
        ensure(ok, "acknowledged_is_durable", message=message, term=term, vote=vote, last=last)

    def _name(self, job_id: bytes) -> str:
        return f"j{int.from_bytes(job_id[:14], 'big')}"

    # ---- clients

    def _running(self) -> list[SimNode]:
        return [node for node in self.nodes.values() if node.replicas is not None and node.node_id not in self.world.paused]

    def _leading(self, group: int) -> SimNode | None:
        nodes = self._running()
        in_office = [node for node in nodes if node.member(group).raft.leadership is not None]
        if in_office and self.rng.random() < 0.95:
            return self.rng.choice(in_office)
        return self.rng.choice(nodes) if nodes else None

    def _propose(self, group: int, command: AnyCommand, on_reply: Callable[[Reply], None], on_end: Callable[[str], None]) -> None:
        """`on_end` hears `refused` or `unknown`."""
        node = self._leading(group)
        if node is None:
            on_end("refused")
            return
        assert node.replicas is not None
        try:
            batch = node.replicas.propose(group, command)
        except Unavailable as error:
            self.note(f"  refused at once by n{node.node_id}: {type(error).__name__}")
            on_end("refused")
            return
        self._follow_up(batch, on_reply, on_end)

    def _follow_up(self, batch: Batch, on_reply: Callable[[Reply], None], on_end: Callable[[str], None]) -> None:
        def ended(future: asyncio.Future[list[Reply]]) -> None:
            self.waiting.discard(future)
            try:
                error = future.exception()
                if error is None:
                    self.counted("replies")
                    for reply in future.result():
                        on_reply(reply)
                elif isinstance(error, Unavailable):
                    self.counted("lost")
                    on_end("refused")
                elif isinstance(error, OutcomeUnknown):
                    self.counted("unknown")
                    on_end("unknown")
                else:
                    raise error
            except BaseException as broken:
                self._failure = self._failure or broken

        self.waiting.add(batch.future)
        batch.future.add_done_callback(ended)

    def _create(self) -> None:
        number = next(self._numbers)
        group = number % len(GROUPS)
        delay_ms = self.rng.choice((0, 0, 50, 2_000, 3_600_000))
        payload = b"%d" % number * self.rng.choice((1, 1, 100))
        job_id = number.to_bytes(14, "big") + b"\0\0"
        create = Create(job_id, TENANT, QUEUE, 1, -1, delay_ms, 0, 0, encode_spec(JobSpec(0)), payload, b"fingerprint %4d" % number)
        self.jobs[job_id] = Job(group, create)
        self._try_create(job_id)

    def _try_create(self, job_id: bytes) -> None:
        job = self.jobs[job_id]
        job.tries += 1

        def replied(reply: Reply) -> None:
            assert reply.state is not None, reply
            self.note(f"  {self._name(job_id)} is there, v{reply.state.version}")
            job.acked = max(job.acked, reply.state.version)

        def ended(how: str) -> None:
            job.refused += how == "refused"

        self._propose(job.group, job.create, replied, ended)

    async def create(self) -> None:
        self._create()

    async def create_many(self) -> None:
        for _ in range(self.rng.choice((3, 10, 30))):
            self._create()

    async def again(self) -> None:
        """What was not answered is asked again, as a client does; the id makes it one job."""
        for job_id in [job_id for job_id, job in self.jobs.items() if not job.acked][:3]:
            self._try_create(job_id)

    async def fire(self) -> None:
        """What a leader's timers do."""
        for node in self._running():
            for group in GROUPS:
                assert node.replicas is not None
                if node.replicas.leads(group):
                    batch = node.replicas.propose_many([(group, Fire(node.clock.wall_ms()))], own=True)
                    self._follow_up(batch, lambda _reply: None, lambda _how: None)
                else:
                    self._is_refused(node.replicas, group)

    def _is_refused(self, replicas: RaftReplicas, group: int) -> None:
        try:
            replicas.propose(group, Fire(0))
        except NotLeader as error:
            in_office = replicas._members[group].raft.leadership is not None  # without a lease
            ensure(error.leader != replicas.node_id or in_office, "hint_is_another", leader=error.leader)
        else:
            raise ClusterBroken("fires_by_lease_only", node=replicas.node_id, group=group)

    async def claim(self) -> None:
        choices = [job_id for job_id, job in self.jobs.items() if job.acked and job.held is None and not job.is_over]
        if not choices:
            return
        job_id = self.rng.choice(choices)
        job = self.jobs[job_id]

        def replied(reply: Reply) -> None:
            (state,) = reply.states
            if state is None:
                return
            self.note(f"  {self._name(job_id)} claimed, token {state.fencing}")
            self.counted("claims")
            ensure(state.fire_at_ms <= self.wall_max_ms, "never_early", job=self._name(job_id), fire_at_ms=state.fire_at_ms)
            ensure((job.group, state.fencing) not in self.given, "token_grows", group=job.group, token=state.fencing)
            self.given.add((job.group, state.fencing))
            job.acked = max(job.acked, state.version)
            job.held = (state.attempt, state.fencing)

        node = self._leading(job.group)
        if node is not None and node.replicas is not None:
            floor = max((token for group, token in self.given if group == job.group), default=0)
            try:
                batch = node.replicas.propose(job.group, Claim([(job_id, 0)], 60_000, "w"), urgent=True)
            except Unavailable:
                return

            def grows(reply: Reply) -> None:
                (state,) = reply.states
                ensure(state is None or state.fencing > floor, "token_grows", group=job.group, floor=floor, state=state)
                replied(reply)

            self._follow_up(batch, grows, lambda _how: None)

    async def complete(self) -> None:
        held = [job_id for job_id, job in self.jobs.items() if job.held is not None]
        if not held:
            return
        job_id = self.rng.choice(held)
        job = self.jobs[job_id]
        assert job.held is not None
        attempt, token = job.held
        outcome = self.rng.choice((Outcome.SUCCEEDED, Outcome.SUCCEEDED, Outcome.RETRYABLE_FAILURE))

        def replied(reply: Reply) -> None:
            if reply.state is not None:
                job.acked = max(job.acked, reply.state.version)
                job.is_over = job.is_over or reply.state.status in FINAL
            if job.held == (attempt, token):
                job.held = None

        self._propose(job.group, Complete(job_id, attempt, token, int(outcome), self.rng.getrandbits(32)), replied, lambda _how: None)

    async def read(self) -> None:
        group = self.rng.choice(GROUPS)
        node = self._leading(group)
        if node is not None:
            self._read_at(node, group)

    def _read_at(self, node: SimNode, group: int) -> None:
        if node.replicas is None:
            return
        acked = {job_id: job.acked for job_id, job in self.jobs.items()}
        task = asyncio.ensure_future(self._read(node, node.replicas, group, acked))
        self.waiting.add(task)
        task.add_done_callback(self.waiting.discard)

    async def _read(self, node: SimNode, replicas: RaftReplicas, group: int, acked: dict[bytes, int]) -> None:
        try:
            await replicas.read_barrier(group)
        except (NotLeader, OutcomeUnknown):
            return
        if node.replicas is replicas:
            self.counted("reads")
            try:
                self._check_holds(node.versions(group), group, acked, node.node_id)
            except ClusterBroken as broken:
                self._failure = self._failure or broken

    async def wait(self) -> None:
        await self.advance(self.rng.choice((100, 600, 1_500, 4_000)))

    # ---- faults

    async def partition(self) -> None:
        nodes = list(self.nodes)
        kind = self.rng.random()
        if kind < 0.4:
            leading = [node.node_id for node in self._running() if any(node.member(group).raft.leadership for group in GROUPS)]
            alone = self.rng.choice(leading or nodes)
            self.network.cut |= {pair for other in nodes if other != alone for pair in ((alone, other), (other, alone))}
        elif kind < 0.8:
            self.network.cut |= {(a, b) for a in nodes for b in nodes if a != b and self.rng.random() < 0.2}
        else:
            side = {node for node in nodes if self.rng.random() < 0.5}
            self.network.cut |= {(a, b) for a in nodes for b in nodes if (a in side) != (b in side)}
        self.note(f"  cut {sorted(self.network.cut)}")

    async def depose(self) -> None:
        """A leader is cut off and another one elected; what that one acknowledges, the old one must not be asked about in vain."""
        group = self.rng.choice(GROUPS)
        leading = [node for node in self._running() if node.replicas is not None and node.replicas.leads(group)]
        if not leading:
            return
        (old,) = leading
        self.network.cut |= {pair for other in self.nodes if other != old.node_id for pair in ((old.node_id, other), (other, old.node_id))}
        for _ in range(60):
            await self.advance(25)
            new = [node for node in self._running() if node is not old and node.replicas is not None and node.replicas.leads(group)]
            if new:
                self._create_at(new[0], group)
                await self.advance(3 * self.profile.delay_ms + 10)
                self._read_at(old, group)
                return

    async def heal_links(self) -> None:
        self.network.heal()

    async def crash(self) -> None:
        """One node, or all at once as in a power cut."""
        nodes = [node for node in self.nodes.values() if node.replicas is not None]
        if not nodes:
            return
        chosen = nodes if self.rng.random() < 0.15 else [self.rng.choice(nodes)]
        for node in chosen:
            keep = self.rng.choice((0.0, 0.3, 0.6, 1.0)) if self.profile.torn else 0.0
            self.note(f"  n{node.node_id} keeps {keep}")
            self.counted("crashes")
            await node.crash(keep)
        if len(chosen) > 1:
            await self.restart()

    async def restart(self) -> None:
        for node in self.nodes.values():
            if node.replicas is None:
                self._restart(node)

    def _restart(self, node: SimNode) -> None:
        for group in GROUPS:
            self._applied.pop((node.node_id, group), None)
        node.start()

    async def fall_behind(self) -> None:
        """A node is away for so long that the log does not reach back for it; it may be gone again while it takes the snapshot."""
        nodes = [node for node in self.nodes.values() if node.replicas is not None and not node.memory]
        if not nodes:
            return
        node = self.rng.choice(nodes)
        await node.crash(1.0)
        for _ in range(8):
            await self.create_many()
            await self.advance(60)
        self._restart(node)
        if self.rng.random() < 0.7:
            halfway = self._is_arriving if self.rng.random() < 0.3 else self._is_installing
            await self.advance(2_000, until=lambda: halfway(node))
            await node.crash(self.rng.random() if self.profile.torn else 0.0)
            self.counted("crashes")
            self._restart(node)

    def _is_arriving(self, node: SimNode) -> bool:
        return any(node.member(group).installed is not None for group in GROUPS)

    def _is_installing(self, node: SimNode) -> bool:
        """Everything is written, and nothing of it durable."""
        return any(ready.snapshot is not None for group in GROUPS for _, ready in node.member(group).pending)

    async def pause(self) -> None:
        node = self.rng.choice(list(self.nodes.values()))
        if node.replicas is not None:
            self.world.paused.setdefault(node.node_id, [])
            self.note(f"  n{node.node_id} stands still")
            self.world.at(self.world.now_ms + self.rng.choice((100, 400, 900, 5_000)), 0, lambda: self.world.resume(node.node_id))

    async def resume(self) -> None:
        for node_id in list(self.world.paused):
            self.world.resume(node_id)

    async def step_clock(self) -> None:
        node = self.rng.choice(list(self.nodes.values()))
        node.clock.stepped_ms += self.rng.choice((-3_600_000, -5_000, -10, 10, 5_000, 3_600_000))
        self.wall_max_ms = max(self.wall_max_ms, node.clock.wall_ms())

    async def stall(self) -> None:
        self.rng.choice(list(self.nodes.values())).stalled_ms = STALL_MS

    async def transfer(self) -> None:
        group = self.rng.choice(GROUPS)
        node = self._leading(group)
        if node is None or node.replicas is None:
            return
        to = self.rng.choice(list(self.nodes))
        try:
            node.replicas.transfer(group, to)
        except (Unavailable, InvalidRequest) as error:
            self.note(f"  {error}")
        else:
            self.counted("transfers")
            self.note(f"  group {group} from n{node.node_id} to n{to}")

    async def change(self) -> None:
        group = self.rng.choice(GROUPS)
        node = self._leading(group)
        if node is None or node.replicas is None:
            return
        replicas, configuration = node.replicas, node.replicas.configuration(group)
        other = self.rng.choice(list(self.nodes))
        try:
            if other in configuration.learners:
                leaving = self.rng.choice([None, *configuration.voters])
                promotes = self.rng.random() < 0.8
                future = replicas.promote(group, other, in_place_of=leaving) if promotes else replicas.remove(group, other)
            elif other in configuration.voters:
                future = replicas.remove(group, other)
            else:
                future = replicas.add_learner(group, other)
        except (Unavailable, InvalidRequest) as error:
            self.note(f"  {error}")
            return
        self.note(f"  change with n{other} in group {group}")
        future.add_done_callback(self._changed)

    def _changed(self, future: asyncio.Future[Configuration]) -> None:
        error = future.exception()
        if error is None:
            self.counted("changes")
            self.note(f"  members now {future.result()}")
        elif not isinstance(error, OutcomeUnknown):
            self._failure = self._failure or error

    # ---- the end

    async def heal(self) -> None:
        """No more faults: within a bound each group acts, its members agree, and everybody was answered."""
        self.note(f"heal at {self.world.now_ms}")
        self.network.is_calm = True
        self.network.heal()
        await self.resume()
        await self.restart()
        for node in self.nodes.values():
            node.stalled_ms = 0
        until_ms = self.world.now_ms + HEAL_MS_MAX
        quiet = 0  # an fsync that stalls may still be under way, and cost one more leader his office
        while quiet < QUIET_CHECKS:
            ensure(self.world.now_ms < until_ms, "progress_after_healing", unrest=self._unrest())
            await self.advance(500)
            quiet = 0 if self._unrest() else quiet + 1
        for group in GROUPS:
            await self._check_end(group)

    def _unrest(self) -> str:
        """What keeps the cluster from rest, empty for nothing."""
        if self.waiting:
            return f"{len(self.waiting)} callers were not answered"
        for group in GROUPS:
            leading = [node for node in self.nodes.values() if node.replicas is not None and node.replicas.leads(group)]
            if len(leading) != 1:
                return f"{len(leading)} nodes lead group {group}"
            assert leading[0].replicas is not None
            configuration = leading[0].replicas.configuration(group)
            applied = {node_id: self.nodes[node_id].member(group).state.applied_index for node_id in configuration.members()}
            if len(set(applied.values())) > 1 or configuration.is_joint:
                return f"group {group} applied {applied} of {leading[0].replicas.status(group)}"
            for node_id, node in self.nodes.items():
                if node_id not in applied and (node.member(group).raft.log.last_index or node.rows(group)):
                    return f"n{node_id} is no member of group {group} and keeps what it had of it"
        return ""

    async def _check_end(self, group: int) -> None:
        (leader,) = [node for node in self.nodes.values() if node.replicas is not None and node.replicas.leads(group)]
        assert leader.replicas is not None
        self._create_at(leader, group)
        await self.advance(2_000)
        ensure(not self.waiting, "progress_after_healing", unrest="a new job is not answered")
        versions = leader.versions(group)
        self._check_holds(versions, group, {job_id: job.acked for job_id, job in self.jobs.items()}, leader.node_id)
        for job_id, job in self.jobs.items():
            if job.group == group and job.tries == job.refused:
                ensure(job_id not in versions, "never_lost", what="refused for certain, and yet there", job=self._name(job_id))
        configuration = leader.replicas.configuration(group)
        wanted = leader.digest(group)
        for node_id in configuration.members():
            ensure(self.nodes[node_id].digest(group) == wanted, "applied_agrees", group=group, node=node_id)

    def _create_at(self, node: SimNode, group: int) -> None:
        number = next(self._numbers)
        job_id = number.to_bytes(14, "big") + b"\0\0"
        create = Create(job_id, TENANT, QUEUE, 1, -1, 0, 0, 0, encode_spec(JobSpec(0)), b"last")
        job = self.jobs[job_id] = Job(group, create, tries=1)
        assert node.replicas is not None

        def replied(reply: Reply) -> None:
            assert reply.state is not None
            job.acked = reply.state.version

        def ended(how: str) -> None:
            job.refused += how == "refused"

        self._follow_up(node.replicas.propose(group, create), replied, ended)


def _cause(error: BaseException | None) -> BaseException | None:
    """The first of a group of errors that were raised together."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class SeedFailed(AssertionError):
    """Says how to see it again."""


def run_seed(seed: int, *, steps: int = STEPS_DEFAULT, replicas_type: type[RaftReplicas] = RaftReplicas) -> Simulation:
    """The run of one seed. Raises `SeedFailed` with the seed, the last events and the command that replays it."""
    simulation = Simulation(seed, steps, replicas_type=replicas_type)
    try:
        asyncio.run(simulation.run())
    except Exception as error:
        command = f"python -m wheelsched.testing.cluster_sim --seed {seed} --steps {steps} --trace"
        events = "\n".join(list(simulation.log)[-40:])
        raise SeedFailed(f"seed {seed}: {type(error).__name__}: {error}\n{events}\nreplay: {command}") from error
    return simulation


def run_seeds(seeds: Iterable[int], *, steps: int = STEPS_DEFAULT) -> dict[str, int]:
    """Run seeds; what happened in all of them together, counted."""
    total: dict[str, int] = {}
    for seed in seeds:
        for what, number in run_seed(seed, steps=steps).counts.items():
            total[what] = total.get(what, 0) + number
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulate clusters under faults.")
    parser.add_argument("--seed", type=int, action="append", help="a seed to run; may be given more than once")
    parser.add_argument("--fresh", type=int, default=0, metavar="N", help="run N new seeds")
    parser.add_argument("--range", type=int, nargs=2, default=(0, 0), metavar=("FROM", "TO"), help="run seeds FROM to TO - 1")
    parser.add_argument("--steps", type=int, default=STEPS_DEFAULT)
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument("--failures", type=int, default=1, metavar="N", help="stop after N failures")
    arguments = parser.parse_args()
    quiet_logs()
    seeds = [*(arguments.seed or []), *range(*arguments.range), *(random.SystemRandom().getrandbits(32) for _ in range(arguments.fresh))]
    started, failed, total = time.monotonic(), 0, dict[str, int]()
    for done, seed in enumerate(seeds, 1):
        try:
            simulation = run_seed(seed, steps=arguments.steps)
        except SeedFailed as failure:
            failed += 1
            print(failure, file=sys.stderr)
            if arguments.trace:
                raise
            if failed >= arguments.failures:
                print(f"stopped after {done} of {len(seeds)} seeds")
                break
            continue
        for what, number in simulation.counts.items():
            total[what] = total.get(what, 0) + number
        if arguments.trace:
            print("\n".join(simulation.log))
    print(f"{len(seeds)} seeds, {failed} failed, {time.monotonic() - started:.1f} s; {total}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
