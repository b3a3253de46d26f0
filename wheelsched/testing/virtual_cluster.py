"""Whole nodes of a cluster on one `VirtualLoop`: the product's, with simulated disks, clocks and network.

`VirtualCluster` owns the nodes; each outlives its process as its disk and its machine's clock. A node is started as
`node/build_cluster.py` does it, without sockets: what the transport would hand in and out goes through `Network`, as the bytes that
would travel. Everything here is of one thread and one seed.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Final, Protocol, TypeVar
from zlib import crc32

from msgspec.structs import replace as with_fields

from wheelsched.cluster import ClockOffsets
from wheelsched.cluster.errors import NotConnected
from wheelsched.core.clock import Clock
from wheelsched.core.errors import OutcomeUnknown, WheelschedError, from_problem
from wheelsched.core.ids import group_of
from wheelsched.core.settings import Settings
from wheelsched.cron import ZoneData
from wheelsched.model import keys
from wheelsched.model.effects import Effect
from wheelsched.node.clock_guard import ClockGuard
from wheelsched.node.cluster import ClusterNode
from wheelsched.node.node import Node
from wheelsched.raft import AnyMessage, Configuration, decode_message, encode_message, make_configuration
from wheelsched.replica.applying import ToApply
from wheelsched.replica.raft_member import RaftMember
from wheelsched.replica.raft_replicas import RaftReplicas
from wheelsched.replica.raft_settings import ReplicaSettings
from wheelsched.runtime.clock import GuardedClock
from wheelsched.runtime.metrics import Metrics
from wheelsched.store import StoreFailed
from wheelsched.store.memory import MemoryStore, SortedRows, _apply
from wheelsched.store.raftlog import RaftLog
from wheelsched.testing.cluster_sim import ClusterBroken, ensure
from wheelsched.testing.virtual_loop import OWNER, VirtualLoop

START_MS: Final = 1_767_413_106_007
PING_S: Final = 1.0
# A link that is cut is noticed by whoever would use it after this long; until then what is sent waits for an answer.
NOTICED_MS: Final = 1_000
# What a replica keeps of rows is held against the store at every entry whose index this divides: it reads all that is kept.
CHECK_KEPT_EVERY: Final = 8

Result = TypeVar("Result")


class Down(Exception):
    """The node is not there: nothing was sent to it."""


class Gone(Exception):
    """The node died, or did not answer in time: the outcome is unknown."""


@lru_cache(maxsize=1)
def _zones() -> ZoneData:
    return ZoneData.of_package()


@dataclass(frozen=True, slots=True)
class Weather:
    """How nodes, links and disks are for as long as it is not calm. Chances are per batch of messages; `sync_ms` the slowest fsync by node,
    `clock_rates` of the monotonic clocks."""

    loss: float = 0.0
    delay_ms: int = 1
    holds_cut: bool = False  # a cut link keeps messages until it heals: only so do stale answers arrive late
    sync_ms: tuple[int, ...] = (1, 1, 1)
    clock_rates: tuple[float, ...] = (1.0, 1.0, 1.0)


class Watcher(Protocol):
    """Who looks at everything that the nodes do."""

    def note(self, event: str) -> None: ...
    def on_speaks_as_leader(self, node: int, group: int, term: int) -> None: ...
    def on_applied(self, node: VirtualNode, group: int, index: int) -> None: ...
    def on_effects(self, node: VirtualNode, group: int) -> None: ...
    def on_wall(self, node: int, ahead_ms: int) -> None: ...
    def on_office(self, node: int, group: int, begins: bool) -> None: ...


# ---- time and disk


class MachineClock:
    """The clock of a node's machine: its own rate, and a wall time that can be set. Real time is the loop's."""

    def __init__(self, loop: VirtualLoop, rate: float) -> None:
        self._loop = loop
        self._rate = rate
        self.stepped_ms = 0

    def wall_ms(self) -> int:
        return START_MS + self._loop.time_us() // 1_000 + self.stepped_ms

    def mono_ms(self) -> int:
        return int(self._loop.time_us() * self._rate) // 1_000

    async def sleep_until(self, mono_ms: int) -> None:
        while (left := mono_ms - self.mono_ms()) > 0:  # noqa: ASYNC110  # time passes, nobody signals it
            await asyncio.sleep(left / self._rate / 1_000)


class SeenClock(GuardedClock):
    """What a node believes, told to the watcher: the latest instant that anybody can have fired or stamped anything at."""

    def __init__(self, clock: Clock, on_wall: Callable[[int], None]) -> None:
        self._on_wall = on_wall
        super().__init__(clock)

    def wall_ms(self) -> int:
        wall_ms = super().wall_ms()
        self._on_wall(wall_ms)
        return wall_ms


class SlowStore(MemoryStore):
    """Syncs take time. One at a time; each covers what was written when it began, and no more."""

    def __init__(self, delay_ms: Callable[[], int]) -> None:
        super().__init__(fatal=_fatal)
        self._delay_ms = delay_ms
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
        asyncio.get_running_loop().call_later(self._delay_ms() / 1_000, self._finish, len(self._unsynced), waiters)

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

    def crash(self, keep_bytes_fraction: float = 0.0) -> SlowStore:
        left = super().crash(keep_bytes_fraction)
        after = SlowStore(self._delay_ms)
        after._families, after._synced = left._families, left._synced
        return after


def _fatal(message: str) -> Any:
    raise ClusterBroken("store_failed", message=message)


# ---- network


class Network:
    """Loses, delays, cuts one way or both. One connection keeps its order; each request and each snapshot is one of its own."""

    def __init__(self, cluster: VirtualCluster, rng: random.Random) -> None:
        self._cluster = cluster
        self._loop = cluster.loop
        self._rng = rng
        self._cut: dict[tuple[int, int], int] = {}  # since when, us
        self._held: list[tuple[int, int, list[bytes]]] = []
        self._last_us: dict[tuple[int, int], int] = {}
        self.is_calm = False
        self._transfers: dict[asyncio.Task[None], tuple[int, int]] = {}

    def is_open(self, sender: int, to: int) -> bool:
        return (sender, to) not in self._cut

    def cut(self, sender: int, to: int) -> None:
        self._cut.setdefault((sender, to), self._loop.time_us())

    def heal(self) -> None:
        self._cut.clear()
        held, self._held = self._held, []
        for sender, to, data in held:
            self._post(sender, to, data)

    def cuts(self) -> list[tuple[int, int]]:
        return sorted(self._cut)

    def _delay_us(self) -> int:
        most_us = 1_000 if self.is_calm else self._cluster.weather.delay_ms * 1_000
        return self._rng.randint(50, max(most_us, 100))

    def _is_lost(self) -> bool:
        return not self.is_calm and self._rng.random() < self._cluster.weather.loss

    def _at(self, when_us: int, to: int, call: Callable[[], object]) -> None:
        self._loop.call_at(when_us / 1_000_000, call, context=self._cluster.nodes[to].context)

    # Messages.

    def send(self, sender: int, to: int, messages: Sequence[tuple[int, AnyMessage]]) -> None:
        for group, message in messages:
            assert (message.group, message.sender, message.to) == (group, sender, to)
            if type(message).__name__ in ("Append", "Heartbeat", "InstallSnapshot"):
                self._cluster.watcher.on_speaks_as_leader(sender, group, message.term)
        data = [encode_message(message) for _, message in messages]
        if not self.is_open(sender, to):
            if self._cluster.weather.holds_cut:
                self._held.append((sender, to, data))
        elif not self._is_lost():
            self._post(sender, to, data)

    def _post(self, sender: int, to: int, data: list[bytes]) -> None:
        when_us = max(self._loop.time_us() + self._delay_us(), self._last_us.get((sender, to), 0))
        self._last_us[sender, to] = when_us
        self._at(when_us, to, partial(self._deliver, sender, to, data))

    def _deliver(self, sender: int, to: int, data: Sequence[bytes]) -> None:
        face = self._cluster.nodes[to].face
        if face is not None:
            messages = [decode_message(item) for item in data]
            face.replicas.on_messages(sender, [(message.group, message) for message in messages])

    # Requests.

    async def request(self, sender: int, to: int, method: str, body: bytes, timeout_ms: int) -> bytes:
        cluster, loop = self._cluster, self._loop
        cut_us = min((self._cut[link] for link in ((sender, to), (to, sender)) if link in self._cut), default=None)
        if not cluster.nodes[to].is_up or (cut_us is not None and loop.time_us() - cut_us > NOTICED_MS * 1_000):
            await asyncio.sleep(0.001)
            raise NotConnected(f"n{to} is not connected", retry_after_s=1)
        answer: asyncio.Future[bytes] = loop.create_future()
        handlers: list[asyncio.Task[bytes]] = []
        if self.is_open(sender, to) and not self._is_lost():
            self._at(loop.time_us() + self._delay_us(), to, partial(self._arrive, sender, to, method, body, answer, handlers))
        try:
            async with asyncio.timeout(timeout_ms / 1_000):
                return await answer
        except TimeoutError:
            raise OutcomeUnknown(f"n{to} has not answered") from None
        except asyncio.CancelledError:
            if self.is_open(sender, to):
                self._at(loop.time_us() + self._delay_us(), to, lambda: [handler.cancel() for handler in handlers])
            raise

    def _arrive(
        self, sender: int, to: int, method: str, body: bytes, answer: asyncio.Future[bytes], handlers: list[asyncio.Task[bytes]]
    ) -> None:
        node = self._cluster.nodes[to]
        if node.face is None or answer.done():
            if not answer.done():
                self._answer(sender, to, answer, OutcomeUnknown(f"the connection to n{to} was lost"))
            return
        task = asyncio.get_running_loop().create_task(node.face.answer(sender, method, body), name=f"n{to} {method}")
        handlers.append(task)
        node.tasks[task] = None
        task.add_done_callback(partial(self._answered, sender, node, node.life, answer))

    def _answered(self, sender: int, node: VirtualNode, life: int, answer: asyncio.Future[bytes], task: asyncio.Task[bytes]) -> None:
        node.tasks.pop(task, None)
        if task.cancelled() or node.life != life:
            self._answer(sender, node.node_id, answer, OutcomeUnknown(f"the connection to n{node.node_id} was lost"))
            return
        error = task.exception()
        if error is not None and not isinstance(error, WheelschedError):
            if not isinstance(error, StoreFailed):
                self._loop.failures.append(error)
            return
        # As over the wire: codes and words, no classes of Python.
        told = None if error is None else from_problem({"code": error.code, "detail": error.detail}, retry_after_s=error.retry_after_s)
        self._answer(sender, node.node_id, answer, task.result() if told is None else told)

    def _answer(self, sender: int, to: int, answer: asyncio.Future[bytes], result: bytes | WheelschedError) -> None:
        if self.is_open(to, sender) and not self._is_lost():
            self._at(self._loop.time_us() + self._delay_us(), sender, partial(_settle, answer, result))

    # Clocks.

    def ping(self, sender: VirtualNode, to: int) -> None:
        """One round of what NTP does, in the frames of the transport."""
        if self.is_open(sender.node_id, to) and sender.clock is not None:
            arrive = partial(self._ping_arrives, sender, sender.life, to, sender.clock.mono_ms())
            self._at(self._loop.time_us() + self._delay_us(), to, arrive)

    def _ping_arrives(self, sender: VirtualNode, life: int, to: int, sent_mono_ms: int) -> None:
        clock = self._cluster.nodes[to].clock
        if clock is not None and self.is_open(to, sender.node_id):
            pong = partial(self._pong_arrives, sender, life, to, sent_mono_ms, clock.machine_wall_ms())
            self._at(self._loop.time_us() + self._delay_us(), sender.node_id, pong)

    @staticmethod
    def _pong_arrives(sender: VirtualNode, life: int, to: int, sent_mono_ms: int, wall_ms: int) -> None:
        if sender.life == life and sender.clock is not None:
            sender.offsets.add(
                to, sent_mono_ms=sent_mono_ms, received_at_ms=wall_ms, answered_at_ms=wall_ms, back_mono_ms=sender.clock.mono_ms()
            )

    # Snapshots.

    def send_snapshot(self, sender: int, to: int, group: int, snapshot_id: int, chunks: AsyncIterator[bytes]) -> asyncio.Future[bool]:
        sent: asyncio.Future[bool] = self._loop.create_future()
        context = self._cluster.nodes[to].context
        task = self._loop.create_task(self._move(sender, to, group, snapshot_id, chunks, sent), context=context)
        self._transfers[task] = (sender, to)
        task.add_done_callback(lambda task: self._transfers.pop(task, None))
        return sent

    async def _move(
        self, sender: int, to: int, group: int, snapshot_id: int, chunks: AsyncIterator[bytes], sent: asyncio.Future[bool]
    ) -> None:
        installed = False
        try:
            face = self._cluster.nodes[to].face
            if face is not None:
                installed = await face.replicas.take_snapshot(sender, group, snapshot_id, self._arriving(sender, to, chunks))
                installed = installed and self.is_open(to, sender) and not self._is_lost()
        except StoreFailed:
            pass  # either end crashed
        finally:
            self._at(self._loop.time_us() + 1_000, sender, lambda: None if sent.done() else sent.set_result(installed))

    async def _arriving(self, sender: int, to: int, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for chunk in chunks:
            await asyncio.sleep(self._delay_us() / 1_000_000)
            if not self.is_open(sender, to) or self._is_lost():
                return
            yield chunk

    async def end_transfers(self, node: int) -> None:
        tasks = [task for task, ends in self._transfers.items() if node in ends]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _settle(answer: asyncio.Future[bytes], result: bytes | WheelschedError) -> None:
    if answer.done():
        return
    if isinstance(result, bytes):
        answer.set_result(result)
    else:
        answer.set_exception(result)


@dataclass(slots=True)
class _Peers:
    """`Peers` of one life of a node: a process that is dead says nothing more."""

    node: VirtualNode
    life: int

    def send(self, node: int, messages: Sequence[tuple[int, AnyMessage]]) -> None:
        if self.node.life == self.life:
            self.node.cluster.network.send(self.node.node_id, node, messages)

    def send_snapshot(self, node: int, group: int, snapshot_id: int, chunks: AsyncIterator[bytes]) -> asyncio.Future[bool]:
        return self.node.cluster.network.send_snapshot(self.node.node_id, node, group, snapshot_id, chunks)


# ---- nodes


class VirtualNode:
    """A node: its process while that runs, its disk and its machine's clock always."""

    def __init__(self, cluster: VirtualCluster, node_id: int) -> None:
        self.cluster = cluster
        self.node_id = node_id
        self.context = contextvars.copy_context()
        self.context.run(OWNER.set, node_id)
        self.machine = MachineClock(cluster.loop, cluster.weather.clock_rates[node_id - 1])
        self.store = SlowStore(self._sync_delay_ms)
        self.clock: SeenClock | None = None
        self.offsets = ClockOffsets(len(cluster.weather.sync_ms))
        self.face: ClusterNode | None = None
        self.running: asyncio.Task[None] | None = None
        self.tasks: dict[asyncio.Task[Any], None] = {}  # calls under way
        self.life = 0
        self.stalled_ms = 0  # added to the next fsync
        self._rng = random.Random(f"disk {cluster.seed} {node_id}")

    @property
    def is_up(self) -> bool:
        return self.face is not None

    def _sync_delay_ms(self) -> int:
        stalled_ms, self.stalled_ms = self.stalled_ms, 0
        slowest = 1 if self.cluster.network.is_calm else self.cluster.weather.sync_ms[self.node_id - 1]
        return stalled_ms + (self._rng.randint(0, slowest) if self._rng.random() < 0.3 else min(slowest, 1))

    async def start(self) -> None:
        self.running = self.cluster.loop.create_task(self._live(), name=f"node {self.node_id}", context=self.context)
        while self.face is None and not self.running.done():  # noqa: ASYNC110  # virtual time
            await asyncio.sleep(0.001)

    async def _live(self) -> None:
        cluster = self.cluster
        rng = random.Random(f"chance {cluster.seed} {self.node_id} {self.life}")
        clock = self.clock = SeenClock(self.machine, partial(self._on_wall, self.life))
        self.offsets = ClockOffsets(len(cluster.nodes))
        settings: Settings = with_fields(cluster.settings, node=with_fields(cluster.settings.node, id=f"n{self.node_id}"))
        made: list[RaftReplicas] = []
        local = Node(settings, self.store, clock, rng, Metrics(), _zones, partial(self._make_replicas, clock, rng, made))
        self._watch(made[0])
        await local.start()
        others = [node for node in cluster.nodes if node != self.node_id]
        face = ClusterNode(
            local, made[0], partial(cluster.network.request, self.node_id), lambda: others, clock_guard=ClockGuard(clock, self.offsets)
        )
        self.face = face
        async with asyncio.TaskGroup() as tasks:
            pinging = tasks.create_task(self._ping(others))
            await face.run()
            pinging.cancel()

    def _make_replicas(self, clock: SeenClock, rng: random.Random, made: list[RaftReplicas], node: Node) -> RaftReplicas:
        groups = self.cluster.groups
        made.append(
            self.cluster.replicas_type(
                self.store, RaftLog(self.store, groups), clock, rng, _Peers(self, self.life), self.node_id, groups,
                first_configuration=self._first_configuration, on_effects=partial(self._on_effects, node),
                on_lead=partial(self._on_lead, node), on_follow=partial(self._on_follow, node), on_replaced=node.on_replaced,
                settings=self.cluster.replica_settings,
            )
        )  # fmt: skip
        return made[0]

    def _first_configuration(self, _group: int) -> Configuration:
        return make_configuration(self.cluster.nodes)

    def _watch(self, replicas: RaftReplicas) -> None:
        applier, life = replicas._applier, self.life
        apply = applier.apply

        def watched(waiting: Sequence[ToApply]) -> int:
            applied = apply(waiting)
            if self.life == life:
                if any(not item.index % CHECK_KEPT_EVERY for item in waiting[:applied]):
                    applier.kept.check(self.store, lambda job_id: group_of(job_id, self.cluster.settings.cluster.group_count))
                for item in waiting[:applied]:
                    self.cluster.watcher.on_applied(self, item.member.group, item.index)
            return applied

        applier.apply = watched  # type: ignore[method-assign]

    def _on_wall(self, life: int, wall_ms: int) -> None:
        if self.life == life:
            self.cluster.watcher.on_wall(self.node_id, wall_ms - self.cluster.true_ms())

    def _on_effects(self, node: Node, group: int, effects: Sequence[Effect]) -> None:
        if group != keys.META_GROUP:
            self.cluster.watcher.on_effects(self, group)
        node.on_effects(group, effects)

    def _on_lead(self, node: Node, group: int) -> None:
        self.cluster.watcher.on_office(self.node_id, group, True)
        node.on_lead(group)

    def _on_follow(self, node: Node, group: int) -> None:
        self.cluster.watcher.on_office(self.node_id, group, False)
        node.on_follow(group)

    async def _ping(self, others: Sequence[int]) -> None:
        while True:
            for other in others:
                self.cluster.network.ping(self, other)
            await asyncio.sleep(PING_S)

    # Its end.

    async def crash(self, keep_bytes_fraction: float) -> None:
        """Lose power: of what was not synced a prefix is left."""
        assert self.running is not None
        self.life += 1
        self.store = self.store.crash(keep_bytes_fraction)
        face, self.face, self.clock = self.face, None, None
        self.cluster.loop.resume(self.node_id)
        tasks = [*self.tasks, self.running]
        self.tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if face is not None:
            face.replicas.abort()
        await self.cluster.network.end_transfers(self.node_id)
        self.running = None

    async def stop(self) -> None:
        """As on SIGTERM."""
        assert self.face is not None and self.running is not None
        running = self.running
        self.face.drain()
        self.face.stop()
        await asyncio.wait({running}, timeout=30)
        ensure(running.done(), "a_node_stops", node=self.node_id)
        self.life += 1
        self.face = self.clock = self.running = None
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks.clear()
        running.result()
        self.store = self.store.crash(1.0)

    # What is asked of it.

    async def call(self, what: Callable[[ClusterNode], Coroutine[Any, Any, Result]], *, within_s: float = 20.0) -> Result:
        """What the node answers. Raises what it raises, `Down`, or `Gone`; in the last case the caller hung up or the node died."""
        if self.face is None:
            raise Down(self.node_id)
        life = self.life
        task = self.cluster.loop.create_task(what(self.face), context=self.context)
        self.tasks[task] = None
        try:
            await asyncio.wait({task}, timeout=within_s)
        finally:
            self.tasks.pop(task, None)
            if not task.done():
                task.cancel()
        if not task.done() or task.cancelled() or self.life != life:
            if task.done() and not task.cancelled():
                task.exception()
            raise Gone(self.node_id)
        return task.result()

    # What it holds.

    def member(self, group: int) -> RaftMember:
        assert self.face is not None
        return self.face.replicas._members[group]

    def rows(self, family: str, group: int) -> list[tuple[bytes, bytes]]:
        prefix = keys.group_prefix(group)
        return self.store.scan(family, prefix, keys.prefix_end(prefix), 1 << 30)

    def digest(self, group: int) -> int:
        """Of everything that the group's members have to agree on."""
        digest = crc32(repr(self.member(group).state).encode())
        for family in keys.STATE_FAMILIES:
            for key, value in self.rows(family, group):
                digest = crc32(value, crc32(key, digest))
        return digest


@dataclass
class VirtualCluster:
    """`nodes` by number from 1; all are down until started."""

    seed: int
    loop: VirtualLoop
    settings: Settings
    replica_settings: ReplicaSettings
    weather: Weather
    watcher: Watcher
    replicas_type: type[RaftReplicas] = RaftReplicas
    nodes: dict[int, VirtualNode] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.groups = (*range(self.settings.cluster.group_count), keys.META_GROUP)
        self.network = Network(self, random.Random(f"network {self.seed}"))
        for node_id in range(1, len(self.weather.sync_ms) + 1):
            self.nodes[node_id] = VirtualNode(self, node_id)

    def true_ms(self) -> int:
        """What a right wall clock would show."""
        return START_MS + self.loop.time_us() // 1_000

    def up(self) -> list[VirtualNode]:
        return [node for node in self.nodes.values() if node.is_up]

    def acting(self, group: int) -> list[VirtualNode]:
        return [node for node in self.up() if node.face is not None and node.face.replicas.leads(group)]

    async def close(self) -> None:
        self.network.is_calm = True
        for node in self.nodes.values():
            if node.running is not None:
                with suppress(Exception):
                    await node.crash(0.0)
