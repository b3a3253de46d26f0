"""`open_test_cluster`: several nodes in one process and in memory, joined by a network that can be cut, on the real clock.

For tests of what nodes do together: forwarding, listings, failover. Consensus itself is tested by `cluster_sim`, a node by `node`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn

from msgspec.structs import replace as with_fields

from wheelsched.cluster.errors import NotConnected
from wheelsched.core.errors import OutcomeUnknown
from wheelsched.core.settings import Settings
from wheelsched.cron import ZoneData
from wheelsched.model import keys
from wheelsched.node.cluster import ClusterNode
from wheelsched.node.node import Node
from wheelsched.raft import AnyMessage, Configuration, RaftConfig, make_configuration
from wheelsched.replica.raft_replicas import RaftReplicas
from wheelsched.replica.raft_settings import ReplicaSettings
from wheelsched.runtime.clock import RealClock
from wheelsched.runtime.metrics import Metrics
from wheelsched.store.memory import MemoryStore
from wheelsched.store.raftlog import RaftLog
from wheelsched.testing.node import make_settings

# An election takes some 300 ms: long enough for a machine that is busy with other tests.
TICK_MS = 20
GROUP_COUNT = 4


class TestClusterNode:
    """One node of a `TestCluster`, and its store, which outlives it."""

    __test__ = False

    def __init__(self, cluster: TestCluster, node_id: int) -> None:
        self.cluster = cluster
        self.node_id = node_id
        self.store = MemoryStore(fatal=_fail)
        self.face: ClusterNode | None = None
        self._running: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        return self.face is not None

    async def start(self) -> None:
        settings, clock, rng = self.cluster.settings, RealClock(), random.Random(f"{self.cluster.seed} {self.node_id}")
        replicas: list[RaftReplicas] = []

        def make(node: Node) -> RaftReplicas:
            groups = (*range(settings.cluster.group_count), keys.META_GROUP)
            replicas.append(
                RaftReplicas(
                    self.store, RaftLog(self.store, groups), clock, rng, _Peers(self), self.node_id, groups,
                    first_configuration=self.cluster.first_configuration, on_effects=node.on_effects, on_lead=node.on_lead,
                    on_follow=node.on_follow, on_replaced=node.on_replaced,
                    settings=ReplicaSettings(tick_ms=TICK_MS, raft=RaftConfig()),
                )
            )  # fmt: skip
            return replicas[0]

        local = Node(
            with_fields(settings, node=with_fields(settings.node, id=f"n{self.node_id}")), self.store, clock, rng, Metrics(),
            ZoneData.of_package, make,
        )  # fmt: skip
        await local.start()
        self.face = ClusterNode(local, replicas[0], self._request, lambda: self.cluster.others(self.node_id))
        self._running = asyncio.create_task(self.face.run(), name=f"node {self.node_id}")

    async def _request(self, node: int, method: str, body: bytes, timeout_ms: int) -> bytes:
        other = self.cluster.nodes[node]
        await asyncio.sleep(0)
        if other.face is None or not self.cluster.is_open(self.node_id, node):
            raise NotConnected(f"n{node} is not connected", retry_after_s=1)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                answer = await other.face.answer(self.node_id, method, body)
        except TimeoutError:
            raise OutcomeUnknown(f"n{node} has not answered") from None
        if not self.cluster.is_open(node, self.node_id) or self.face is None:
            raise OutcomeUnknown(f"the answer of n{node} was lost")
        return answer

    async def stop(self) -> None:
        """As on SIGTERM."""
        assert self.face is not None and self._running is not None
        self.face.drain()
        self.face.stop()
        await self._running
        self._forget()
        self.store = self.store.crash(1.0)

    async def crash(self) -> None:
        """Lose power: what was not synced is gone."""
        running = self._running
        assert running is not None
        self.store = self.store.crash(0.0)
        self._forget()
        running.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await running

    def _forget(self) -> None:
        self.face = self._running = None


class _Peers:
    """Messages arrive in order, one turn of the loop later, where the network is not cut."""

    def __init__(self, node: TestClusterNode) -> None:
        self._node = node

    def send(self, node: int, messages: Sequence[tuple[int, AnyMessage]]) -> None:
        asyncio.get_running_loop().call_soon(self._deliver, node, list(messages))

    def _deliver(self, node: int, messages: list[tuple[int, AnyMessage]]) -> None:
        cluster, sender = self._node.cluster, self._node.node_id
        other = cluster.nodes[node].face
        if other is not None and self._node.is_up and cluster.is_open(sender, node):
            other.replicas.on_messages(sender, messages)

    def send_snapshot(self, node: int, group: int, snapshot_id: int, chunks: AsyncIterator[bytes]) -> asyncio.Future[bool]:
        return asyncio.ensure_future(self._move(node, group, snapshot_id, chunks))

    async def _move(self, node: int, group: int, snapshot_id: int, chunks: AsyncIterator[bytes]) -> bool:
        other = self._node.cluster.nodes[node].face
        if other is None or not self._node.cluster.is_open(self._node.node_id, node):
            return False
        return await other.replicas.take_snapshot(self._node.node_id, group, snapshot_id, chunks)


class TestCluster:
    """See `open_test_cluster`."""

    __test__ = False

    def __init__(self, count: int, *, seed: int, settings: dict[str, Any]) -> None:
        self.seed = seed
        self.settings: Settings = make_settings({"cluster": {"group_count": GROUP_COUNT}, **settings})
        self.nodes = {node_id: TestClusterNode(self, node_id) for node_id in range(1, count + 1)}
        self._cut: set[tuple[int, int]] = set()

    def first_configuration(self, group: int) -> Configuration:
        return make_configuration(self.nodes)

    def others(self, node_id: int) -> list[int]:
        return [other for other in self.nodes if other != node_id]

    def is_open(self, sender: int, receiver: int) -> bool:
        return (sender, receiver) not in self._cut

    def cut(self, sender: int, receiver: int) -> None:
        """Nothing gets from one node to the other any more; the way back is another one."""
        self._cut.add((sender, receiver))

    def isolate(self, node_id: int) -> None:
        for other in self.others(node_id):
            self._cut |= {(node_id, other), (other, node_id)}

    def heal(self) -> None:
        self._cut.clear()

    def face(self, node_id: int) -> ClusterNode:
        face = self.nodes[node_id].face
        assert face is not None, f"n{node_id} is down"
        return face

    def leader_of(self, group: int) -> int | None:
        """The node that may act for the group now; the later one where an earlier one has not noticed that its lease ended."""
        led = [
            (node.face.replicas.term_of(group), node_id)
            for node_id, node in self.nodes.items()
            if node.face is not None and group in node.face.local.dispatcher.led
        ]
        return max(led)[1] if led else None

    async def wait_led(self) -> None:
        """Every group is led, and every node that is up knows by whom."""
        async with asyncio.timeout(30):
            while not all(  # noqa: ASYNC110  # what is waited for is in several nodes
                node.face.readiness().ready for node in self.nodes.values() if node.face is not None
            ) or any(self.leader_of(group) is None for group in range(GROUP_COUNT)):
                await asyncio.sleep(TICK_MS / 1000)


@asynccontextmanager
async def open_test_cluster(count: int = 3, *, seed: int = 0, **settings: Any) -> AsyncIterator[TestCluster]:
    """A running cluster with every group led; closed at the end of the block."""
    cluster = TestCluster(count, seed=seed, settings=settings)
    for node in cluster.nodes.values():
        await node.start()
    try:
        await cluster.wait_led()
        yield cluster
    finally:
        for node in cluster.nodes.values():
            if node.is_up:
                await node.crash()


def _fail(message: str) -> NoReturn:
    raise RuntimeError(message)
