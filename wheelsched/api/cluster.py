"""The cluster over HTTP: members, groups, and their changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from wheelsched.api import bodies, schemas
from wheelsched.api.problem import invalid
from wheelsched.api.request import Request, Response, ok
from wheelsched.cluster.admin import ClusterAdmin, GroupView, MemberView
from wheelsched.core.errors import NotFound

if TYPE_CHECKING:
    from wheelsched.api.app import Api

_ADDRESS = r"^([A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.%]+\]):[0-9]{1,5}$"
Address = Annotated[str, Meta(pattern=_ADDRESS, description="Name or address, IPv6 in brackets, and port.")]


class NodeAdd(schemas.Model, kw_only=True):
    """A node that is to join. `replace`: the node of this id lost its data and never comes back; `http` and `peer` may be left out then."""

    id: schemas.Name
    http: Address | msgspec.UnsetType = msgspec.UNSET
    peer: Address | msgspec.UnsetType = msgspec.UNSET
    replace: bool = False


class GroupTransfer(schemas.Model, kw_only=True):
    to: schemas.Name


class ClusterMember(msgspec.Struct, kw_only=True):
    """`leaves`: it is removed once it holds nothing. `lost`: it never comes back. `leads`, `holds`: groups, the meta group not counted.
    `clock_offset_s`: how far its clock is ahead of the node that answers."""

    id: str
    state: Literal["joining", "active", "draining", "removed"]
    http: str
    peer: str
    up: bool
    leads: int
    holds: int
    leaves: bool
    lost: bool
    release: str | None
    uptime_s: float | None
    clock_offset_s: float | None
    clock_off: bool


class GroupReplica(msgspec.Struct, kw_only=True):
    """`lag`: entries it does not hold yet, as the leader knows."""

    node: str
    role: Literal["voter", "learner"]
    state: str
    up: bool
    lag: int | None


class GroupChange(msgspec.Struct, kw_only=True):
    """A change of members under way. `fault`: what keeps it from going on."""

    enter: str | None
    leave: str | None
    fault: str | None


class ClusterGroup(msgspec.Struct, kw_only=True):
    group: str
    leader: str | None
    preferred: str | None
    term: int
    commit: int
    log_bytes: int
    replicas: list[GroupReplica]
    change: GroupChange | None
    transfer_to: str | None


class ClusterInfo(msgspec.Struct, kw_only=True):
    """`version` counts the changes of members and groups."""

    name: str
    id: str
    version: int
    replication_factor: int
    nodes: list[ClusterMember]
    groups: list[ClusterGroup]


class Transferring(msgspec.Struct, kw_only=True):
    group: str
    to: str


_decode_add = msgspec.json.Decoder(NodeAdd)
_decode_transfer = msgspec.json.Decoder(GroupTransfer)
_decode_nothing = msgspec.json.Decoder(schemas.Nothing)


def _cluster(api: Api) -> ClusterAdmin:
    found = api.node.cluster
    if found is None:
        raise NotFound("this node is alone: cluster.nodes is empty in its settings")
    return found


async def get(api: Api, request: Request) -> Response:
    view = await _cluster(api).view()
    info = ClusterInfo(
        name=api.node.settings.cluster.name, id=view.cluster_id.hex(), version=view.version,
        replication_factor=view.replication_factor, nodes=[_member(member) for member in view.members],
        groups=[_group(group) for group in view.groups],
    )  # fmt: skip
    return ok(msgspec.json.encode(info))


async def add_node(api: Api, request: Request) -> Response:
    cluster = _cluster(api)
    model = bodies.decode(_decode_add, request.body)
    schemas.check_name(model.id, "/id", "node")
    http = "" if isinstance(model.http, msgspec.UnsetType) else model.http
    peer = "" if isinstance(model.peer, msgspec.UnsetType) else model.peer
    if model.replace:
        return _accepted(await cluster.replace(model.id, http, peer, actor=request.actor))
    for name, value in (("http", http), ("peer", peer)):
        if not value:
            raise invalid(f"/{name}", f"{name} is missing: where {model.id} listens, host:port")
    return _accepted(await cluster.add(model.id, http, peer, actor=request.actor))


async def remove_node(api: Api, request: Request) -> Response:
    force = _flag(request, "force")
    return _accepted(await _cluster(api).remove(_node(request), force=force, actor=request.actor))


async def drain_node(api: Api, request: Request) -> Response:
    if request.body:
        bodies.decode(_decode_nothing, request.body)
    return _accepted(await _cluster(api).drain(_node(request), actor=request.actor))


async def transfer(api: Api, request: Request) -> Response:
    model = bodies.decode(_decode_transfer, request.body)
    schemas.check_name(model.to, "/to", "node")
    await _cluster(api).transfer(request.name, model.to)
    return Response(202, msgspec.json.encode(Transferring(group=request.name, to=model.to)))


def _node(request: Request) -> str:
    schemas.check_name(request.name, "", "node")
    return request.name


def _flag(request: Request, name: str) -> bool:
    values = request.query.get(name, [])
    if len(values) > 1 or (values and values[0] not in ("true", "false")):
        raise invalid("", f"{name} must be given once, as true or false")
    return values == ["true"]


def _accepted(member: MemberView) -> Response:
    return Response(202, msgspec.json.encode(_member(member)))


def _member(view: MemberView) -> ClusterMember:
    return ClusterMember(
        id=view.name, state=view.state, http=view.http, peer=view.peer, up=view.is_up, leads=view.leads,  # type: ignore[arg-type]
        holds=view.holds, leaves=view.leaves, lost=view.is_gone, release=view.release or None, uptime_s=_seconds(view.uptime_ms),
        clock_offset_s=_seconds(view.clock_offset_ms), clock_off=view.is_clock_off,
    )  # fmt: skip


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1_000


def _group(view: GroupView) -> ClusterGroup:
    change = view.change
    return ClusterGroup(
        group=view.name, leader=view.leader, preferred=view.preferred, term=view.term, commit=view.commit, log_bytes=view.log_bytes,
        replicas=[
            GroupReplica(node=replica.name, role=replica.role, state=replica.state, up=replica.is_up, lag=replica.lag)  # type: ignore[arg-type]
            for replica in view.replicas
        ],
        change=None if change is None else GroupChange(enter=change.enter, leave=change.leave, fault=change.fault or None),
        transfer_to=view.transfer_to,
    )  # fmt: skip
