"""The cluster over HTTP, and the commands that show and change it."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from fake_node import Serving, serving
from played_cluster import GROUPS, PlayedCluster, PlayedNode
from test_cli import Call, FakeNode, call, fake  # noqa: F401  # fixtures

from wheelsched.api import cluster as api_cluster
from wheelsched.cluster.admin import ClusterAdmin
from wheelsched.core.settings import raft_id_of


def admin_of(node: PlayedNode) -> ClusterAdmin:
    return ClusterAdmin(node.table, node.changes, node.driver, own_id=node.identity.raft_id, offset_ms=lambda _: -3)


@asynccontextmanager
async def a_served_cluster(count: int = 3) -> AsyncIterator[tuple[Serving, PlayedCluster]]:
    cluster = await PlayedCluster(count).found()
    async with serving() as api:
        api.node.cluster = admin_of(cluster.node("n2"))
        yield api, cluster


async def view(api: Serving) -> api_cluster.ClusterInfo:
    answer = await api.call("GET", "/v1/cluster")
    assert answer.status == 200, answer.body
    return msgspec.json.decode(answer.body, type=api_cluster.ClusterInfo)


def node_of(info: api_cluster.ClusterInfo, name: str) -> api_cluster.ClusterMember:
    return next(node for node in info.nodes if node.id == name)


async def test_the_view_shows_nodes_groups_and_who_lags() -> None:
    async with a_served_cluster() as (api, cluster):
        group = cluster.groups[2]
        group.matches[raft_id_of("n1")] -= 40
        info = await view(api)
        assert [(node.id, node.state, node.up, node.holds) for node in info.nodes] == [
            ("n1", "active", True, GROUPS), ("n2", "active", True, GROUPS), ("n3", "active", True, GROUPS)
        ]  # fmt: skip
        assert sum(node.leads for node in info.nodes) == GROUPS
        assert (node_of(info, "n1").clock_offset_s, node_of(info, "n2").clock_offset_s) == (-0.003, 0.0)
        assert [found.group for found in info.groups] == [*map(str, range(GROUPS)), "meta"]
        assert [(replica.node, replica.role, replica.lag) for replica in info.groups[2].replicas] == [
            ("n1", "voter", 40), ("n2", "voter", 0), ("n3", "voter", 0)
        ]  # fmt: skip
        assert info.groups[2].leader == cluster.name_of(group.leader)

        cluster.kill("n3")
        await cluster.ticks(2)
        info = await view(api)
        assert node_of(info, "n3").up is False and node_of(info, "n3").uptime_s is None
        assert [(replica.up, replica.lag) for replica in info.groups[2].replicas if replica.node == "n3"] == [(False, None)]


async def test_nodes_are_added_drained_and_removed() -> None:
    async with a_served_cluster(4) as (api, cluster):
        answer = await api.call("POST", "/v1/cluster/nodes", {"id": "n5", "http": "n5:80", "peer": "n5:70"})
        assert answer.status == 202
        assert msgspec.json.decode(answer.body, type=api_cluster.ClusterMember).state == "joining"
        assert (await api.call("POST", "/v1/cluster/nodes", {"id": "n5", "http": "n5:80", "peer": "n5:70"})).status == 202
        assert (await api.call("POST", "/v1/cluster/nodes/n1:drain")).json["state"] == "draining"
        await cluster.ticks(2)
        assert node_of(await view(api), "n1").leads == 0
        await api.call("POST", "/v1/cluster/nodes", {"id": "n1", "http": "n1:80", "peer": "n1:70"})
        answer = await api.call("DELETE", "/v1/cluster/nodes/n3")
        assert answer.status == 202 and answer.json["leaves"] is True
        await cluster.ticks()
        info = await view(api)
        assert any(group.change is not None for group in info.groups)
        await cluster.settle()
        info = await view(api)
        assert [node.id for node in info.nodes] == ["n1", "n2", "n4", "n5"]


async def test_a_lost_node_is_replaced() -> None:
    async with a_served_cluster() as (api, cluster):
        assert (await api.call("POST", "/v1/cluster/nodes", {"id": "n3", "replace": True})).status == 400
        cluster.kill("n3")
        answer = await api.call("POST", "/v1/cluster/nodes", {"id": "n3", "replace": True})
        assert (answer.status, answer.json["peer"], answer.json["state"]) == (202, "n3:70", "joining")
        assert [(node.id, node.lost) for node in (await view(api)).nodes] == [("n1", False), ("n2", False), ("n3", True), ("n3", False)]


async def test_a_leadership_is_handed_over() -> None:
    async with a_served_cluster(4) as (api, cluster):
        group = cluster.groups[1]
        voters = [cluster.name_of(node) for node in group.configuration.voters]
        to = next(name for name in voters if name != cluster.name_of(group.leader))
        assert (await api.call("POST", "/v1/cluster/groups/1:transfer", {"to": to})).status == 202
        await cluster.ticks()
        assert cluster.name_of(group.leader) == to
        stranger = next(name for name in ("n1", "n2", "n3", "n4") if name not in voters)
        answer = await api.call("POST", "/v1/cluster/groups/1:transfer", {"to": stranger})
        assert answer.status == 400 and f"{stranger} has no vote in group 1" in answer.json["detail"]
        assert (await api.call("POST", "/v1/cluster/groups/99:transfer", {"to": to})).status == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/v1/cluster/nodes", {"id": "n4"}, 400, "invalid-request"),
        ("POST", "/v1/cluster/nodes", {"id": "n4", "http": "n4:80", "peer": "n4"}, 400, "invalid-request"),
        ("POST", "/v1/cluster/nodes", {"id": "n4", "http": "n4:80", "peer": "n4:99999"}, 400, "invalid-request"),
        ("POST", "/v1/cluster/nodes", {"id": "-", "http": "n4:80", "peer": "n4:70"}, 400, "invalid-request"),
        ("POST", "/v1/cluster/nodes", {"id": "n2", "http": "n4:80", "peer": "n4:70"}, 409, "name-taken"),
        ("DELETE", "/v1/cluster/nodes/n9", None, 404, "not-found"),
        ("DELETE", "/v1/cluster/nodes/n3", None, 400, "invalid-request"),
        ("DELETE", "/v1/cluster/nodes/n3?force=yes", None, 400, "invalid-request"),
        ("POST", "/v1/cluster/nodes/n9:drain", None, 404, "not-found"),
        ("POST", "/v1/cluster/nodes/n1:explode", None, 404, "not-found"),
        ("GET", "/v1/cluster/nodes/n1", None, 405, "method-not-allowed"),
    ],
)
async def test_what_cannot_be_is_refused(method: str, path: str, body: Any, status: int, code: str) -> None:
    async with a_served_cluster() as (api, cluster):
        before = cluster.table().version
        answer = await api.call(method, path, body)
        assert (answer.status, answer.json["code"]) == (status, code), answer.body
        assert cluster.table().version == before


async def test_a_node_that_is_alone_says_so() -> None:
    async with serving() as api:
        answer = await api.call("GET", "/v1/cluster")
        assert answer.status == 404 and "this node is alone" in answer.json["detail"]


# ---- the commands


def a_document(**states: tuple[str, int, int]) -> dict[str, Any]:
    """Nodes as (state, leads, holds)."""
    nodes = [
        api_cluster.ClusterMember(
            id=name, state=state, http=f"{name}:80", peer=f"{name}:70", up=True, leads=leads, holds=holds, leaves=False, lost=False,  # type: ignore[arg-type]
            release="1", uptime_s=5.0, clock_offset_s=0.004, clock_off=False,
        )
        for name, (state, leads, holds) in states.items()
    ]  # fmt: skip
    replicas = [api_cluster.GroupReplica(node="n1", role="voter", state="replicate", up=True, lag=1_234)]
    group = api_cluster.ClusterGroup(
        group="0", leader="n1", preferred="n1", term=3, commit=77, log_bytes=1, replicas=replicas, change=None, transfer_to=None
    )
    found = api_cluster.ClusterInfo(name="prod", id="00", version=1, replication_factor=3, nodes=nodes, groups=[group])
    document: dict[str, Any] = msgspec.to_builtins(found)
    return document


def test_status_is_two_tables_or_the_document(fake: FakeNode, call: Call) -> None:  # noqa: F811
    document = a_document(n1=("active", 1, 1))
    fake.answers["GET", "/v1/cluster"] = (200, document)
    code, out, _ = call("cluster", "status", "--url", fake.url)
    assert code == 0
    assert "cluster prod, 3 replicas a group" in out and "+4 ms" in out and "n1 -1,234" in out
    code, out, _ = call("cluster", "status", "--url", fake.url, "--json")
    assert code == 0 and json.loads(out) == document


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (("add", "n4", "--http", "h:1", "--peer", "h:2"), ("POST", "/v1/cluster/nodes", {"id": "n4", "http": "h:1", "peer": "h:2"})),
        (("replace", "n4"), ("POST", "/v1/cluster/nodes", {"id": "n4", "replace": True})),
        (("drain", "n4"), ("POST", "/v1/cluster/nodes/n4:drain", {})),
        (("remove", "n4"), ("DELETE", "/v1/cluster/nodes/n4", None)),
        (("remove", "n4", "--force"), ("DELETE", "/v1/cluster/nodes/n4?force=true", None)),
        (("transfer", "7", "n4"), ("POST", "/v1/cluster/groups/7:transfer", {"to": "n4"})),
    ],
)
def test_changes_send_what_was_asked(fake: FakeNode, call: Call, arguments: tuple[str, ...], asked: tuple[str, str, Any]) -> None:  # noqa: F811
    fake.answers[asked[0], asked[1].partition("?")[0]] = (202, {})
    code, _, _ = call("cluster", *arguments, "--url", fake.url)
    assert code == 0
    assert fake.asked[0][:3] == asked


def test_watching_tells_what_moves_and_ends_when_it_is_done(
    fake: FakeNode,  # noqa: F811
    call: Call,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    steps = iter([("draining", 2, 5), ("draining", 2, 5), ("draining", 0, 5)])

    def answer(_path: str) -> dict[str, Any]:
        return a_document(n2=next(steps))

    documents: Callable[[str], dict[str, Any]] = answer
    fake.answers["POST", "/v1/cluster/nodes/n2:drain"] = (202, {})
    fake.answers["GET", "/v1/cluster"] = (200, documents)
    code, out, _ = call("cluster", "drain", "n2", "--watch", "--url", fake.url)
    assert code == 0
    assert out.splitlines()[1:] == ["n2: draining, leads 2, holds 5 groups", "n2: draining, leads 0, holds 5 groups", "done"]


def test_a_node_is_drained_when_others_hold_what_it_held(
    fake: FakeNode,  # noqa: F811
    call: Call,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few groups change at a time, and between them nothing is under way."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    steps = iter([1, 0])

    def answer(_path: str) -> dict[str, Any]:
        others = dict.fromkeys(("n1", "n3", "n4"), ("active", 1, 5))
        return a_document(n2=("draining", 0, next(steps)), **others)

    documents: Callable[[str], dict[str, Any]] = answer
    fake.answers["POST", "/v1/cluster/nodes/n2:drain"] = (202, {})
    fake.answers["GET", "/v1/cluster"] = (200, documents)
    code, out, _ = call("cluster", "drain", "n2", "--watch", "--url", fake.url)
    assert code == 0
    assert out.splitlines()[1:] == ["n2: draining, leads 0, holds 1 groups", "n2: draining, leads 0, holds 0 groups", "done"]


def test_a_node_has_come_when_it_holds_its_share(
    fake: FakeNode,  # noqa: F811
    call: Call,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For a moment it is a member, and nothing has begun to move to it yet."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    steps = iter([(3, 0), (3, 1), (2, 2)])

    def answer(_path: str) -> dict[str, Any]:
        others, own = next(steps)
        return a_document(n1=("active", 1, others), n2=("active", 0, own))

    documents: Callable[[str], dict[str, Any]] = answer
    fake.answers["POST", "/v1/cluster/nodes"] = (202, {})
    fake.answers["GET", "/v1/cluster"] = (200, documents)
    code, out, _ = call("cluster", "add", "n2", "--http", "h:1", "--peer", "h:2", "--watch", "--url", fake.url)
    assert code == 0
    progress = [f"n2: active, leads 0, holds {held} groups" for held in (0, 1, 2)]
    assert out.splitlines()[1:] == [*progress, "done"]
