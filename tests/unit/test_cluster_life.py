"""The life of a cluster with everything real but the disks: nodes meet, are added, drained, removed and replaced under their sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from wheelsched.cluster.admin import ClusterView, MemberView
from wheelsched.core.errors import Unavailable
from wheelsched.core.settings import ClusterSettings, NodeAddress, NodeSettings, Settings, StoreSettings
from wheelsched.model.commands import Create
from wheelsched.model.rows import JobSpec, encode_spec
from wheelsched.node.build_cluster import open_cluster_node
from wheelsched.node.cluster import ClusterNode

GROUPS = 4


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class Cluster:
    def __init__(self, names: Sequence[str], on_disk: dict[str, Path] | None = None) -> None:
        self.on_disk = on_disk or {}
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        self.nodes: dict[str, ClusterNode] = {}
        self.running: dict[str, asyncio.Task[None]] = {}

    def settings(self, name: str, names: Sequence[str]) -> Settings:
        nodes = tuple(NodeAddress(id=each, http=f"127.0.0.1:{self.ports[each]}", peer=f"127.0.0.1:{self.ports[each]}") for each in names)
        cluster = ClusterSettings(nodes=nodes, group_count=GROUPS)
        if name in self.on_disk:
            return Settings(cluster=cluster, node=NodeSettings(id=name, data_dir=str(self.on_disk[name])))
        return Settings(cluster=cluster, node=NodeSettings(id=name), store=StoreSettings(kind="memory"))

    async def start(self, name: str, names: Sequence[str]) -> ClusterNode:
        node = self.nodes[name] = await open_cluster_node(self.settings(name, names))
        self.running[name] = asyncio.create_task(node.run(), name=name)
        return node

    async def stop(self, name: str) -> None:
        self.nodes.pop(name).stop()
        await self.running.pop(name)

    async def kill(self, name: str) -> None:
        beside = self.nodes.pop(name)._beside
        assert beside is not None
        tasks = (self.running.pop(name), beside)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def view(self, name: str = "n1") -> ClusterView:
        cluster = self.nodes[name].cluster
        assert cluster is not None
        return await cluster.view()

    async def wait(self, until: Callable[[ClusterView], bool], name: str = "n1") -> ClusterView:
        view: ClusterView | None = None
        try:
            async with asyncio.timeout(60):
                while True:
                    for task in self.running.values():
                        if task.done():
                            task.result()
                    with contextlib.suppress(Unavailable):
                        view = await self.view(name)
                        if until(view):
                            return view
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"never: {view}") from None


def member(view: ClusterView, name: str) -> MemberView:
    return next(member for member in view.members if member.name == name)


def is_settled(view: ClusterView) -> bool:
    return all(group.leader is not None and group.change is None and not group.transfer_to for group in view.groups)


@contextlib.asynccontextmanager
async def cluster_of(*names: str, spare: Sequence[str] = (), on_disk: dict[str, Path] | None = None) -> AsyncIterator[Cluster]:
    cluster = Cluster((*names, *spare), on_disk)
    try:
        await asyncio.gather(*(cluster.start(name, names) for name in names))
        await cluster.wait(lambda view: is_settled(view) and len(view.members) == len(names) and all(m.is_up for m in view.members))
        yield cluster
    finally:
        for name in list(cluster.running):
            await cluster.kill(name)


async def create(node: ClusterNode, count: int) -> list[Any]:
    spec = encode_spec(JobSpec())
    replies = await node.propose_many([Create(node.new_job_id(), "default", "q", 1, -1, 3_600_000, 0, 0, spec, b"1") for _ in range(count)])
    assert not any(reply.refusal for reply in replies)
    return [reply.state.job_id for reply in replies if reply.state is not None]


async def all_there(node: ClusterNode, jobs: Sequence[bytes]) -> bool:
    records = [await node.read_job("default", job) for job in jobs]
    return all(record is not None for record in records)


@pytest.mark.slow
async def test_a_cluster_is_made_and_takes_in_a_node_and_lets_one_go() -> None:
    names = ("n1", "n2", "n3")
    async with cluster_of(*names, spare=("n4",)) as cluster:
        n1 = cluster.nodes["n1"]
        jobs = await create(n1, 200)
        view = await cluster.view("n3")
        assert [group.name for group in view.groups] == ["0", "1", "2", "3", "meta"]
        assert all(len(group.replicas) == 3 for group in view.groups)

        assert n1.cluster is not None
        address = f"127.0.0.1:{cluster.ports['n4']}"
        assert (await n1.cluster.add("n4", address, address)).state == "joining"
        await cluster.start("n4", (*names, "n4"))
        view = await cluster.wait(lambda view: is_settled(view) and member(view, "n4").state == "active" and member(view, "n4").holds == 3)
        assert sorted(row.holds for row in view.members) == [3, 3, 3, 3]
        assert await all_there(cluster.nodes["n4"], jobs)

        assert cluster.nodes["n4"].cluster is not None
        await cluster.nodes["n4"].cluster.drain("n2")
        view = await cluster.wait(lambda view: is_settled(view) and member(view, "n2").holds == 0 and member(view, "n2").leads == 0)
        jobs += await create(cluster.nodes["n2"], 50)

        await n1.cluster.remove("n2")
        stopped = cluster.running.pop("n2")
        async with asyncio.timeout(30):
            await stopped
        view = await cluster.wait(lambda view: is_settled(view) and "n2" not in [row.name for row in view.members])
        assert {replica.name for group in view.groups for replica in group.replicas} == {"n1", "n3", "n4"}
        assert await all_there(cluster.nodes["n3"], jobs)


@pytest.mark.slow
async def test_a_node_that_lost_its_data_is_replaced_under_its_name() -> None:
    names = ("n1", "n2", "n3")
    async with cluster_of(*names) as cluster:
        jobs = await create(cluster.nodes["n1"], 100)
        n1 = cluster.nodes["n1"].cluster
        assert n1 is not None
        for _ in range(2):  # the second time the id of its settings is that of a node which was removed
            await cluster.kill("n3")
            await cluster.wait(lambda view: not member(view, "n3").is_up)
            new = await n1.replace("n3", "", "")
            await cluster.start("n3", names)
            view = await cluster.wait(
                lambda view: is_settled(view) and [(row.name, row.state, row.holds) for row in view.members] == [
                    ("n1", "active", 4), ("n2", "active", 4), ("n3", "active", 4)
                ]
            )  # fmt: skip
            assert member(view, "n3").raft_id == new.raft_id
        assert await all_there(cluster.nodes["n3"], jobs)
        # What it holds is not only on paper.
        await cluster.kill("n2")
        await cluster.wait(lambda view: all(group.leader in ("n1", "n3") for group in view.groups))
        assert await all_there(cluster.nodes["n3"], jobs)


@pytest.mark.slow
@pytest.mark.blocking_allowed
async def test_a_node_that_starts_again_knows_those_that_were_replaced(tmp_path: Path) -> None:
    """By the settings alone it would reach nobody, and wait ten seconds to hear what time it is."""
    names = ("n1", "n2", "n3")
    async with cluster_of(*names, on_disk={"n1": tmp_path}) as cluster:
        for name in ("n2", "n3"):
            await cluster.kill(name)
            await cluster.wait(lambda view, name=name: not member(view, name).is_up)  # type: ignore[misc]
            admin = cluster.nodes["n1"].cluster
            assert admin is not None
            new = await admin.replace(name, "", "")
            await cluster.start(name, names)
            await cluster.wait(
                lambda view, raft_id=new.raft_id: is_settled(view) and [(m.raft_id, m.holds) for m in view.members].count((raft_id, 4)) == 1  # type: ignore[misc]
            )
        await cluster.stop("n1")
        with capture_logs() as logs:
            await cluster.start("n1", names)
        assert "clocks_unknown" not in [entry["event"] for entry in logs]


@pytest.mark.slow
async def test_leaderships_can_be_handed_over_by_hand() -> None:
    async with cluster_of("n1", "n2", "n3") as cluster:
        n1 = cluster.nodes["n1"].cluster
        assert n1 is not None
        leader = next(group.leader for group in (await cluster.view()).groups if group.name == "2")
        to = next(name for name in ("n1", "n2", "n3") if name != leader)
        await n1.transfer("2", to)
        await cluster.wait(lambda view: next(group.leader for group in view.groups if group.name == "2") == to)
