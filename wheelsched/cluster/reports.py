"""What a node says of the groups it leads, and what it does for one of them when it is told to.

The driver of membership sits on one node and every group is led by another: so it asks all for a report, and sends each order to the node
that leads the group. An order starts something and is answered at once; the next report tells what came of it. So nothing depends on an
answer that may get lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final

import msgspec
import structlog

from wheelsched.cluster.transport import TransportStatistics
from wheelsched.core.clock import Clock
from wheelsched.core.errors import InvalidRequest
from wheelsched.core.settings import NodeAddress
from wheelsched.replica.raft_replicas import RaftReplicas

log = structlog.get_logger(__name__)


class Replica(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A member of a group as its leader sees it. `state`: probe, replicate or snapshot; `match`: the last entry it is known to hold."""

    node: int
    state: str
    match: int
    is_heard: bool


class GroupReport(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A group as its leader sees it. `outgoing` not empty: in the middle of a change."""

    group: int
    term: int
    commit: int
    applied: int
    last_index: int
    log_bytes: int
    voters: tuple[int, ...]
    outgoing: tuple[int, ...]
    learners: tuple[int, ...]
    transferee: int
    replicas: tuple[Replica, ...]

    def members(self) -> set[int]:
        return {*self.voters, *self.outgoing, *self.learners}

    def lag(self, node: int) -> int | None:
        """Entries that a member does not hold yet; None for one that is not heard."""
        for replica in self.replicas:
            if replica.node == node:
                return max(0, self.last_index - replica.match) if replica.is_heard else None
        return None

    def is_level(self, node: int, entries_max: int) -> bool:
        """Whether a member is heard and lacks so many entries at most. One that holds nothing is not level, however few entries there are:
        it waits for a snapshot, which may take long."""
        lag = self.lag(node)
        return lag is not None and lag <= entries_max and any(replica.node == node and replica.match for replica in self.replicas)


class NodeReport(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """`led`: the groups this node leads. `offsets`: (node, how far its clock is ahead, None where that is not known).

    `faults`: (group, what keeps its change from going on), of the node that drives. `http`, `peer`: where the node is by its own settings;
    empty of a release that does not tell."""

    node: int
    release: str
    uptime_ms: int
    led: tuple[GroupReport, ...]
    offsets: tuple[tuple[int, int | None], ...] = ()
    is_clock_off: bool = False
    snapshots_out: int = 0
    snapshots_in: int = 0
    faults: tuple[tuple[int, str], ...] = ()
    http: str = ""
    peer: str = ""


class OrderKind(StrEnum):
    LEARN = "learn"  # `node` becomes a learner
    PROMOTE = "promote"  # learner `node` becomes a voter, `instead` leaves
    REMOVE = "remove"
    TRANSFER = "transfer"  # `node` is to lead


class Order(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One step of a group, for the node that leads it."""

    group: int
    kind: OrderKind
    node: int
    instead: int = 0
    force: bool = False


REPORT: Final = "member-report"
ORDER: Final = "member-change"


class LocalGroups:
    """This node's side: reports of what it leads, and orders carried out."""

    METHODS: Final = frozenset((REPORT, ORDER))

    def __init__(
        self, replicas: RaftReplicas, groups: Sequence[int], clock: Clock, *, release: str, statistics: Callable[[], TransportStatistics],
        address: NodeAddress,
    ) -> None:  # fmt: skip
        self._replicas = replicas
        self._groups = groups
        self._clock = clock
        self._release = release
        self._address = address
        self._statistics = statistics
        self._started_mono_ms = clock.mono_ms()
        self.faults: dict[int, str] = {}  # written by the driver

    async def answer(self, method: str, body: bytes) -> bytes:
        """For `Handlers.on_request`. Raises what `order` raises."""
        if method == REPORT:
            return msgspec.msgpack.encode(self.report())
        try:
            order = msgspec.msgpack.decode(body, type=Order)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"the order cannot be read: {error}") from error
        self.order(order)
        return b""

    def report(self) -> NodeReport:
        replicas, network = self._replicas, self._statistics()
        led = tuple(self._report_of(group) for group in self._groups if replicas.leader_of(group) == replicas.node_id)
        return NodeReport(
            replicas.node_id, self._release, self._clock.mono_ms() - self._started_mono_ms, led,
            tuple((peer.node, peer.clock_offset_ms) for peer in network.peers), network.is_clock_off,
            network.snapshots_sending, network.snapshots_receiving, tuple(sorted(self.faults.items())),
            self._address.http, self._address.peer,
        )  # fmt: skip

    def _report_of(self, group: int) -> GroupReport:
        status = self._replicas.status(group)
        conf = status.configuration
        peers = tuple(
            Replica(node, peer.state.value, peer.match, peer.is_heard or node == self._replicas.node_id)
            for node, peer in sorted(status.peers.items())
        )
        return GroupReport(
            group, status.term, status.commit, status.applied, status.last_index, status.log_bytes,
            conf.voters, conf.outgoing, tuple(sorted({*conf.learners, *conf.learners_next})), status.transferee, peers,
        )  # fmt: skip

    def order(self, order: Order) -> None:
        """Start what was ordered. Raises `NotLeader`, `Unavailable`, `InvalidRequest`: nothing was started."""
        replicas = self._replicas
        if order.group not in self._groups:
            raise InvalidRequest(f"there is no group {order.group}")
        match order.kind:
            case OrderKind.LEARN:
                replicas.add_learner(order.group, order.node)
            case OrderKind.PROMOTE:
                replicas.promote(order.group, order.node, in_place_of=order.instead or None)
            case OrderKind.REMOVE:
                replicas.remove(order.group, order.node, force=order.force)
            case OrderKind.TRANSFER:
                replicas.transfer(order.group, order.node)
        log.info("group_ordered", group=order.group, order=order.kind.value, node=order.node, instead=order.instead)
