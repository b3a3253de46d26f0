"""The composition root of a node of several: identity, transport, bootstrap, replicas, and the face over them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from typing import Any, Final

from wheelsched import __version__
from wheelsched.cluster import Handlers, Transport, make_transport
from wheelsched.cluster.bootstrap import BootstrapAnswers, bootstrap
from wheelsched.cluster.identity import LocalIdentity
from wheelsched.cluster.members import MemberTable
from wheelsched.cluster.parts import MembershipParts, use_members
from wheelsched.core.clock import Rng
from wheelsched.core.errors import Unavailable
from wheelsched.core.settings import Settings
from wheelsched.model import keys
from wheelsched.node.build import open_real_clock, open_store, read_zone_data
from wheelsched.node.clock_guard import ClockGuard
from wheelsched.node.cluster import ClusterNode
from wheelsched.node.node import Node
from wheelsched.raft import AnyMessage
from wheelsched.replica.raft_replicas import RaftReplicas
from wheelsched.replica.raft_settings import ReplicaSettings
from wheelsched.runtime.clock import GuardedClock
from wheelsched.runtime.metrics import Metrics
from wheelsched.store import Store
from wheelsched.store.raftlog import RaftLog

# Pieces of a snapshot that wait for the replica; the sender has four on their way.
PIECES_MAX: Final = 4


async def open_cluster_node(settings: Settings, *, without: Collection[str] = ()) -> ClusterNode:
    """A node of `cluster.nodes`, member of its cluster and ready for `run`. The very first start waits for all nodes.

    `without`: nodes that this first start does not wait for, an operator's word that they never took part. Raises `StoreError`s,
    `StartRefused` among them, ValueError for a file of `cluster.tls` that cannot be used, and OSError where the peer address is taken.
    """
    clock, rng = GuardedClock(open_real_clock(settings)), random.SystemRandom()
    metrics = Metrics(version=__version__)
    store = open_store(settings, metrics)
    running: asyncio.Task[None] | None = None
    try:
        gate = _Gate()
        identity = LocalIdentity.open(store, settings, rng)
        gate.bootstrap = BootstrapAnswers(identity, settings)
        handlers = Handlers(
            on_raft=gate.on_raft, on_request=gate.on_request, on_snapshot_chunk=gate.on_chunk, on_snapshot_lost=gate.on_snapshot_lost,
            on_unreachable=gate.on_unreachable, admit=identity.admit,
        )  # fmt: skip
        transport = make_transport(
            settings, handlers, incarnation=identity.incarnation, cluster_id=identity.cluster_id, clock=clock, rng=rng,
            raft_id=identity.raft_id,
        )  # fmt: skip
        if identity.cluster_id:
            # Before anybody is asked what time it is: nodes that were replaced have other ids than the settings stand for.
            use_members(transport, MemberTable(store), identity, settings.cluster.nodes)
        await transport.listen()
        running = asyncio.create_task(transport.run(), name="transport")
        await _unless_ended(running, bootstrap(identity, settings, transport, clock, without=without))
        guard = ClockGuard(clock, transport.offsets)
        await _unless_ended(running, guard.settle())
        return await _open(settings, store, clock, rng, metrics, identity, transport, running, gate, guard)
    except BaseException:
        if running is not None:
            running.cancel()
            await asyncio.wait({running})
        store.close()
        raise


async def _unless_ended(running: asyncio.Task[None], work: Coroutine[Any, Any, None]) -> None:
    """Do the work, or raise what ended the transport meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({running, task}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            running.result()
        await task
    finally:
        task.cancel()


async def _open(
    settings: Settings, store: Store, clock: GuardedClock, rng: Rng, metrics: Metrics, identity: LocalIdentity, transport: Transport,
    running: asyncio.Task[None], gate: _Gate, guard: ClockGuard,
) -> ClusterNode:  # fmt: skip
    groups = (*range(settings.cluster.group_count), keys.META_GROUP)
    made: list[RaftReplicas] = []

    def make_replicas(node: Node) -> RaftReplicas:
        made.append(
            RaftReplicas(
                store, RaftLog(store, groups, joining=identity.joining(groups)), clock, rng, transport, identity.raft_id, groups,
                first_configuration=identity.first_configuration, on_effects=node.on_effects, on_lead=node.on_lead,
                on_follow=node.on_follow, on_replaced=node.on_replaced,
                settings=ReplicaSettings(voters_min=settings.cluster.replication_factor),
            )
        )  # fmt: skip
        return made[0]

    local = Node(settings, store, clock, rng, metrics, lambda: read_zone_data(settings), make_replicas)
    await local.start()
    face = ClusterNode(
        local, made[0], transport.request, lambda: [peer.node for peer in transport.statistics().peers], beside=running,
        clock_guard=guard,
    )  # fmt: skip
    face.peer_statistics = lambda: transport.statistics().peers
    assert gate.bootstrap is not None
    face.membership = MembershipParts(
        store, identity, transport, made[0], groups, clock, face.propose, gate.bootstrap, release=__version__,
        nodes=settings.cluster.nodes,
    )  # fmt: skip
    gate.face = face
    return face


class _Gate:
    """What the transport hands in, from before there is anybody to take it."""

    def __init__(self) -> None:
        self.bootstrap: BootstrapAnswers | None = None
        self.face: ClusterNode | None = None
        self._incoming: dict[tuple[int, int, int], _Incoming] = {}

    def on_raft(self, sender: int, batch: Sequence[tuple[int, AnyMessage]]) -> None:
        if self.face is not None:
            self.face.replicas.on_messages(sender, batch)

    def on_unreachable(self, node: int) -> None:
        if self.face is not None:
            self.face.replicas.report_unreachable(node)

    async def on_request(self, sender: int, method: str, body: bytes) -> bytes:
        if method in BootstrapAnswers.METHODS:
            assert self.bootstrap is not None
            return await self.bootstrap.answer(method, body)
        if self.face is None:
            raise Unavailable("the node is starting; try again in a moment", retry_after_s=1)
        return await self.face.answer(sender, method, body)

    async def on_chunk(self, sender: int, group: int, snapshot_id: int, sequence: int, data: bytes, last: bool) -> bool:
        if self.face is None:
            return False
        place = (sender, group, snapshot_id)
        incoming = self._incoming.get(place)
        if incoming is None:
            if sequence:
                return False  # its beginning was refused
            incoming = self._incoming[place] = _Incoming()
            incoming.start(self.face.replicas, *place)
        try:
            return await incoming.take(data, last)
        finally:
            if last or incoming.is_over:
                self._incoming.pop(place, None)

    def on_snapshot_lost(self, sender: int, group: int, snapshot_id: int) -> None:
        incoming = self._incoming.pop((sender, group, snapshot_id), None)
        if incoming is not None:
            incoming.end()


class _Incoming:
    """One snapshot on its way from the transport's pieces to the replica that asks for them."""

    def __init__(self) -> None:
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue(PIECES_MAX)
        self._taking: asyncio.Task[bool] | None = None

    def start(self, replicas: RaftReplicas, sender: int, group: int, snapshot_id: int) -> None:
        self._taking = asyncio.create_task(
            replicas.take_snapshot(sender, group, snapshot_id, self._chunks()), name=f"snapshot of group {group}"
        )

    @property
    def is_over(self) -> bool:
        return self._taking is not None and self._taking.done()

    async def _chunks(self) -> AsyncIterator[bytes]:
        while (piece := await self._pieces.get()) is not None:
            yield piece

    async def take(self, data: bytes, last: bool) -> bool:
        """Hand a piece on; whether the sender may go on, or with the last one whether all of it is installed."""
        assert self._taking is not None
        putting = asyncio.ensure_future(self._pieces.put(None if last else data))
        await asyncio.wait({putting, self._taking}, return_when=asyncio.FIRST_COMPLETED)
        putting.cancel()
        if last or self._taking.done():
            return await self._taking
        return True

    def end(self) -> None:
        assert self._taking is not None
        self._taking.cancel()
