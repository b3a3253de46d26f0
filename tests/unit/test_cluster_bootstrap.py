"""How nodes become a cluster, over real sockets of the loopback; and that one which lost its data cannot slip in again."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest
import structlog

from wheelsched.cluster import Handlers, PeerAddress, Transport, TransportOptions
from wheelsched.cluster.bootstrap import Answer, BootstrapAnswers, Question, StartRefused, bootstrap
from wheelsched.cluster.handshake import Identity
from wheelsched.cluster.identity import LocalIdentity, check_alone
from wheelsched.cluster.placement import Founding
from wheelsched.core.errors import InvalidRequest, Unavailable
from wheelsched.core.settings import ClusterSettings, NodeAddress, NodeSettings, Settings, raft_ids
from wheelsched.model.keys import META_GROUP, RAFT_META
from wheelsched.model.members import MemberRow
from wheelsched.node import open_node
from wheelsched.raft import Configuration
from wheelsched.runtime.clock import RealClock
from wheelsched.store import StoreRefused
from wheelsched.store.memory import MemoryStore
from wheelsched.store.raftlog import RaftLog

QUICK = TransportOptions(backoff_ms_min=1, backoff_ms_max=4, sweep_ms=5, ping_ms=20)
NAMES = ("n1", "n2", "n3")


def settings_of(name: str, names: Sequence[str] = NAMES, **cluster: Any) -> Settings:
    nodes = tuple(NodeAddress(id=each, http=f"127.0.0.1:80{each[1:]}", peer=f"127.0.0.1:70{each[1:]}") for each in names)
    return Settings(cluster=ClusterSettings(nodes=nodes, group_count=4, **cluster), node=NodeSettings(id=name))


class FakeTable:
    """A table of members with one place to give."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bound = b""
        self.members: list[MemberRow] = []

    def awaits(self, name: str, _raft_id: int, incarnation: bytes) -> bool:
        return name == self.name and self.bound in (b"", incarnation)

    async def bind(self, name: str, raft_id: int, incarnation: bytes) -> str:
        if not self.awaits(name, raft_id, incarnation):
            return f"{name} was bound to another data directory"
        self.bound = incarnation
        return ""

    def rows(self) -> list[MemberRow]:
        return self.members


class Node:
    """A node from its identity to the end of its bootstrap; `store` survives it."""

    def __init__(self, name: str, store: MemoryStore | None = None, names: Sequence[str] = NAMES, *, life: int = 1, **cluster: Any) -> None:
        self.name = name
        self.settings = settings_of(name, names, **cluster)
        self.store = store or MemoryStore()
        self.identity = LocalIdentity.open(self.store, self.settings, random.Random(f"{name} {life}"))
        self.answers = BootstrapAnswers(self.identity, self.settings)
        self.transport = Transport(
            Identity(
                cluster_name="wheelsched", name=name, raft_id=self.identity.raft_id, incarnation=self.identity.incarnation,
                group_count=4, partition_count=1024, cluster_id=self.identity.cluster_id,
            ),
            ("127.0.0.1", 0), {},
            Handlers(on_raft=lambda *_: None, on_request=self._on_request, on_snapshot_chunk=self._no_chunks, admit=self.identity.admit),
            clock=RealClock(), rng=random.Random(f"transport {name} {life}"), options=QUICK,
        )  # fmt: skip

    async def _no_chunks(self, *_: object) -> bool:
        return False

    async def _on_request(self, _sender: int, method: str, body: bytes) -> bytes:
        return await self.answers.answer(method, body)

    def bootstrap(self, **arguments: Any) -> asyncio.Task[None]:
        arguments = {"patience_ms": 0, **arguments}
        return asyncio.create_task(bootstrap(self.identity, self.settings, self.transport, RealClock(), **arguments))

    def meets(self, nodes: Sequence[Node], ids: dict[str, int]) -> None:
        ports = {node.name: node.transport.port for node in nodes}
        # Nobody listens on port 1: a node that is not there.
        others = {raft_id: PeerAddress(name, "127.0.0.1", ports.get(name, 1)) for name, raft_id in ids.items() if name != self.name}
        self.transport.set_peers(others)


@contextlib.asynccontextmanager
async def network(*nodes: Node, names: Sequence[str] = NAMES) -> AsyncIterator[None]:
    """The nodes run, and each knows where the others listen."""
    async with asyncio.timeout(30):
        ids = raft_ids(names)
        for node in nodes:
            await node.transport.listen()
        for node in nodes:
            node.meets(nodes, ids)
        tasks = [asyncio.create_task(node.transport.run()) for node in nodes]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def founded(*names: str) -> list[Node]:
    """Nodes of a cluster that was made, as their stores would be found after a stop."""
    nodes = [Node(name) for name in names or NAMES]
    async with network(*nodes):
        await asyncio.gather(*(node.bootstrap() for node in nodes))
    return nodes


# ---- founding


async def test_three_blank_nodes_make_the_same_cluster() -> None:
    nodes = await founded()
    founding = Founding.of(settings_of("n2"))
    for node in nodes:
        after = LocalIdentity.load(node.store.crash())  # so: durable
        assert after is not None
        assert (after.name, after.cluster_id, after.founding) == (node.name, founding.cluster_id, founding)
        assert after.incarnation == node.identity.incarnation
        for other in nodes:
            assert after.known(other.identity.raft_id) == other.identity.incarnation
        assert node.transport.identity.cluster_id == founding.cluster_id


async def test_a_node_waits_for_all_and_says_for_whom() -> None:
    n1, n2, n3 = (Node(name) for name in NAMES)
    with structlog.testing.capture_logs() as logs:
        async with network(n1, n2):
            tasks = [n1.bootstrap(report_ms=20), n2.bootstrap(report_ms=20)]
            while not any(entry["event"] == "bootstrap_waits" and list(entry["missing"]) == ["n3"] for entry in logs):
                await RealClock().sleep_until(RealClock().mono_ms() + 5)
            assert n1.identity.is_blank and n2.identity.is_blank
            for task in tasks:
                task.cancel()
    async with network(n1, n2, n3):
        await asyncio.gather(*(node.bootstrap() for node in (n1, n2, n3)))
    assert not n3.identity.is_blank


async def test_a_node_that_has_its_state_starts_without_the_others() -> None:
    [n1, *_] = await founded()
    again = Node("n1", n1.store.crash())
    await asyncio.wait_for(again.bootstrap(), 1)
    assert again.identity.incarnation == n1.identity.incarnation


async def test_a_node_that_died_before_it_wrote_its_first_state_is_let_in() -> None:
    nodes = [Node(name) for name in NAMES]
    async with network(*nodes):
        await asyncio.gather(*(node.bootstrap() for node in nodes[:2]), asyncio.wait_for(met_all(nodes[2]), 10))
    n3 = Node("n3", nodes[2].store.crash())
    assert n3.identity.is_blank and n3.identity.incarnation == nodes[2].identity.incarnation
    rest = [Node(name, node.store.crash()) for name, node in zip(NAMES, nodes[:2], strict=False)]
    async with network(*rest, n3):
        await n3.bootstrap()
    assert n3.identity.cluster_id == nodes[0].identity.cluster_id


async def met_all(node: Node) -> None:
    """As a node does that is cut off between its last question and its first state."""
    for other in raft_ids(NAMES).values():
        if other != node.identity.raft_id:
            await node.transport.wait_connected(other)


async def test_an_operator_may_leave_one_out_that_never_ran() -> None:
    n1, n2, n3 = (Node(name) for name in NAMES)
    async with network(n1, n2):
        await asyncio.gather(n1.bootstrap(without=["n3"]), n2.bootstrap(without=["n3"]))
    async with network(*(Node(node.name, node.store.crash()) for node in (n1, n2)), n3):
        await n3.bootstrap()
    assert n3.identity.cluster_id == n1.identity.cluster_id
    with pytest.raises(StartRefused, match="names n9"):
        await Node("n1").bootstrap(without=["n9"])


# ---- those who must not


async def test_a_wiped_node_is_refused_with_the_remedy() -> None:
    n1, n2, _ = await founded()
    wiped = Node("n3", life=2)
    async with network(*(Node(node.name, node.store.crash()) for node in (n1, n2)), wiped):
        with pytest.raises(StartRefused, match=r"n[12] has met n3 with another data directory.*wheelsched cluster replace n3"):
            await wiped.bootstrap()
    assert wiped.identity.is_blank


async def test_a_wiped_node_is_refused_while_those_who_know_are_not_all_there() -> None:
    """n1 was blank when the cluster was made by the others, and never met n3: its word alone lets nobody in."""
    n1 = Node("n1", life=2)
    wiped = Node("n3", life=2)
    async with network(n1, wiped):
        task = wiped.bootstrap()
        await met_one(wiped, n1)
        done, _ = await asyncio.wait([task], timeout=0.2)
        assert not done and wiped.identity.is_blank
        task.cancel()


async def met_one(node: Node, other: Node) -> None:
    await node.transport.wait_connected(other.identity.raft_id)


async def test_a_node_of_the_cluster_refuses_another_incarnation_of_a_member() -> None:
    [n1, *_] = await founded()
    identity = n1.identity
    raft_id = raft_ids(NAMES)["n3"]
    hello = msgspec.structs.replace(n1.transport._hello(expects=identity.raft_id, bulk=False), name="n3", raft_id=raft_id)
    right = msgspec.structs.replace(hello, incarnation=identity.known(raft_id))
    assert await identity.admit(right) is None
    other = msgspec.structs.replace(right, incarnation=b"x" * 16)
    assert "cluster replace n3" in str(await identity.admit(other))
    # It may ask why, and is not put on record.
    assert await identity.admit(msgspec.structs.replace(other, cluster_id=b"")) is None
    assert identity.known(raft_id) == right.incarnation


async def test_two_lists_make_no_cluster() -> None:
    n1, n2 = Node("n1", names=("n1", "n2")), Node("n2", names=("n1", "n2"), replication_factor=1)
    async with network(n1, n2, names=("n1", "n2")):
        with pytest.raises(StartRefused, match=r"n1 and n2 are to make one cluster of two minds: cluster.replication_factor 3 and 1"):
            await n1.bootstrap()


async def test_the_data_of_a_node_that_was_alone_is_not_blank() -> None:
    store = MemoryStore()
    RaftLog(store, [0, META_GROUP])
    with pytest.raises(StoreRefused, match="by a node that is alone"):
        LocalIdentity.open(store, settings_of("n1"), random.Random(1))


async def test_the_data_of_a_node_of_several_is_not_run_alone() -> None:
    [n1, *_] = await founded()
    with pytest.raises(StoreRefused, match=r"the data of n1 belongs to cluster [0-9a-f]{32}, and cluster\.nodes is empty"):
        await open_node(Settings(), store=n1.store.crash())
    check_alone(Node("n1").store)


# ---- joining


async def test_a_node_that_was_added_joins_and_only_with_one_data_directory() -> None:
    nodes = await founded()
    names = (*NAMES, "n4")
    table = FakeTable("n4")
    running = [Node(node.name, node.store.crash()) for node in nodes]
    for node in running:
        node.answers.table = table
    n4 = Node("n4", names=names)
    async with network(*running, n4, names=names):
        await n4.bootstrap()
    after = LocalIdentity.load(n4.store.crash())
    assert after is not None and after.cluster_id == nodes[0].identity.cluster_id
    assert table.bound == after.incarnation
    assert after.joining([0, 1, META_GROUP]) == [0, 1, META_GROUP]
    assert after.first_configuration(0) == Configuration()

    wiped = Node("n4", names=names, life=2)
    async with network(*running, wiped, names=names):
        with pytest.raises(StartRefused, match="has met n4 with another data directory"):
            await wiped.bootstrap()


async def test_a_replacing_node_learns_its_new_raft_id_and_where_the_others_are() -> None:
    n1, n2, _ = await founded()
    new_id = raft_ids(NAMES)["n3"] + 1
    ids = {**raft_ids(NAMES), "n3": new_id}
    n3 = Node("n3", life=2)
    running = [Node(node.name, node.store.crash()) for node in (n1, n2)]
    table = FakeTable("n3")
    table.members = [MemberRow(ids[node.name], node.name, "", f"127.0.0.1:{node.transport.port}") for node in running]
    async with network(*running, n3):
        for node in running:
            node.answers.table = table
            node.meets([*running, n3], ids)
        table.members = [MemberRow(ids[node.name], node.name, "", f"127.0.0.1:{node.transport.port}") for node in running]
        await n3.bootstrap()
        assert n3.identity.raft_id == n3.transport.identity.raft_id == new_id
        after = LocalIdentity.load(n3.store.crash())
        assert after is not None and (after.raft_id, after.cluster_id) == (new_id, n1.identity.cluster_id)
        assert {peer.node for peer in n3.transport.statistics().peers} == {ids["n1"], ids["n2"]}
        for node in running:
            await node.transport.wait_connected(new_id)


async def test_a_removed_node_is_told_so() -> None:
    nodes = [Node(node.name, node.store.crash()) for node in await founded()]
    async with network(*nodes):
        n1, n2, n3 = nodes
        for node in (n1, n2):
            node.transport.tombstones = {n3.identity.raft_id: "n3"}
            node.meets([n1, n2], raft_ids(("n1", "n2")))
        while not n3.transport.removed_because:
            await RealClock().sleep_until(RealClock().mono_ms() + 5)
    assert n3.transport.removed_because.startswith("n3 was removed from the cluster; stop it")


async def test_a_node_that_nobody_added_is_told_so() -> None:
    nodes = await founded()
    names = (*NAMES, "n4")
    n4 = Node("n4", names=names)
    async with network(*(Node(node.name, node.store.crash()) for node in nodes), n4, names=names):
        with pytest.raises(StartRefused, match="wheelsched cluster add n4"):
            await n4.bootstrap()


# ---- the parts


async def test_who_was_met_first_is_durable_before_anybody_relies_on_it() -> None:
    node = Node("n1")
    other = raft_ids(NAMES)["n2"]
    # Two greetings at once, as both sides call: none of them may go on before the row is on disk.
    first, second = node.identity.note_peer(other, "n2", b"a" * 16), node.identity.note_peer(other, "n2", b"a" * 16)
    assert await asyncio.gather(first, second) == [None, None]
    after = LocalIdentity.load(node.store.crash())
    assert after is not None and after.known(other) == b"a" * 16
    count = node.store.statistics().sync_count
    assert await node.identity.note_peer(other, "n2", b"a" * 16) is None
    assert node.store.statistics().sync_count == count
    assert "remove its data directory as well" in str(await node.identity.note_peer(other, "n2", b"b" * 16))


async def test_the_answer_names_what_a_blank_node_would_make() -> None:
    node = Node("n1")
    question = msgspec.msgpack.encode(Question("n2", raft_ids(NAMES)["n2"], b"a" * 16))
    answer = msgspec.msgpack.decode(await node.answers.answer("bootstrap", question), type=Answer)
    assert answer == Answer("n1", b"", b"", Founding.of(node.settings))
    with pytest.raises(InvalidRequest, match="cannot be read"):
        await node.answers.answer("bootstrap", b"\x01")
    with pytest.raises(Unavailable):
        await node.answers.answer("join", question)


def test_the_identity_row_is_read_by_the_store_as_well() -> None:
    """RocksDB's directory reads the first fields of the same row."""
    from wheelsched.store.directory import Identity as Basic

    node = Node("n1")
    row = node.store.get(RAFT_META, b"I")
    assert row is not None
    basic = msgspec.msgpack.decode(row, type=Basic)
    assert (basic.node_id, basic.group_count, basic.incarnation) == ("n1", 4, node.identity.incarnation)
    bare = msgspec.msgpack.encode(basic)
    node.store.write({RAFT_META: {b"I": bare}})
    loaded = LocalIdentity.load(node.store)
    assert loaded is not None and loaded.is_blank and loaded.incarnation == basic.incarnation
