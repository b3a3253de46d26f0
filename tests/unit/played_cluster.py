"""A cluster whose groups are played: nodes come and go, groups elect, catch up and change members by Raft's rules, a quarter of a second a
tick. Real are the drivers, the plans, the table of members and what apply makes of their commands."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
from builders import EngineGroup

from wheelsched.cluster import NotConnected
from wheelsched.cluster.identity import LocalIdentity
from wheelsched.cluster.members import MemberChanges, MemberTable
from wheelsched.cluster.membership import Membership, Removed
from wheelsched.cluster.planning import CHANGES_MAX
from wheelsched.cluster.reports import ORDER, REPORT, GroupReport, NodeReport, Order, OrderKind, Replica
from wheelsched.core.errors import NotLeader, Unavailable
from wheelsched.core.settings import ClusterSettings, NodeAddress, NodeSettings, Settings
from wheelsched.model.commands import ChangeMembers, Reply
from wheelsched.model.keys import META, META_GROUP
from wheelsched.model.members import MemberState
from wheelsched.raft import Change, ChangeKind, Configuration, Mode
from wheelsched.raft.configuration import leave_joint, plan
from wheelsched.replica.membership import check_change
from wheelsched.runtime.clock import VirtualClock
from wheelsched.store.memory import MemoryStore

GROUPS = 8
TICK_MS = 250


def settings_of(names: list[str], name: str, *, factor: int = 3) -> Settings:
    nodes = tuple(NodeAddress(id=each, http=f"{each}:80", peer=f"{each}:70") for each in names)
    cluster = ClusterSettings(nodes=nodes, group_count=GROUPS, replication_factor=factor)
    return Settings(cluster=cluster, node=NodeSettings(id=name))


class PlayedGroup:
    """One Raft group. `matches`: the last entry each member holds."""

    def __init__(self, world: PlayedCluster, group: int, configuration: Configuration, leader: int) -> None:
        self.world, self.group = world, group
        self.configuration = configuration
        self.leader, self.term = leader, 2
        self.last_index = 1_500
        self.matches = dict.fromkeys(configuration.members(), self.last_index)
        self.transferee = 0

    def is_led(self) -> bool:
        return self.leader in self.world.up and self.configuration.is_voter(self.leader) and self.has_quorum()

    def has_quorum(self) -> bool:
        conf = self.configuration
        halves = [half for half in (conf.voters, conf.outgoing) if half]
        return all(2 * sum(node in self.world.up for node in half) > len(half) for half in halves)

    def tick(self) -> None:
        if not self.has_quorum():
            self.leader = 0
            return
        conf = self.configuration
        if conf.is_joint:
            self.configuration = leave_joint(conf)
        if self.transferee in self.world.up and self.configuration.is_voter(self.transferee):
            self.leader, self.term = self.transferee, self.term + 1
            self.world.transfers.append((self.group, self.leader))
        self.transferee = 0
        if self.leader not in self.world.up or self.leader not in self.configuration.voters:
            self.leader, self.term = next(node for node in self.configuration.voters if node in self.world.up), self.term + 1
            self.world.elections += 1
        for node in self.configuration.members():
            if node in self.world.up:
                self.matches[node] = min(self.last_index, self.matches.get(node, 0) + self.world.pace)

    def report(self) -> GroupReport:
        conf = self.configuration
        replicas = tuple(Replica(node, "replicate", self.matches.get(node, 0), node in self.world.up) for node in conf.members())
        return GroupReport(
            self.group, self.term, self.last_index, self.last_index, self.last_index, 0, conf.voters, conf.outgoing,
            conf.learners, self.transferee, replicas,
        )  # fmt: skip

    def order(self, order: Order) -> None:
        if order.kind is OrderKind.TRANSFER:
            assert self.configuration.is_voter(order.node)
            self.transferee = order.node
            return
        changes = {
            OrderKind.LEARN: [Change(ChangeKind.ADD_LEARNER, order.node)],
            OrderKind.PROMOTE: [Change(ChangeKind.ADD_VOTER, order.node)],
            OrderKind.REMOVE: [Change(ChangeKind.REMOVE, order.node)],
        }[order.kind]
        if order.instead:
            changes.append(Change(ChangeKind.REMOVE, order.instead))
        matches = {node: self.matches.get(node, 0) for node in self.configuration.members()}
        check_change(self.configuration, changes, matches=matches, last_index=self.last_index, voters_min=3, force=order.force)
        self.configuration = self.configuration.apply(plan(self.configuration, changes, Mode.AUTO))


class PlayedLocal:
    """`LocalGroups` of a played node."""

    def __init__(self, world: PlayedCluster, node: int) -> None:
        self.world, self.node = world, node
        self.since_ms = world.clock.mono_ms()
        self.faults: dict[int, str] = {}

    def report(self) -> NodeReport:
        led = tuple(group.report() for group in self.world.groups.values() if group.is_led() and group.leader == self.node)
        return NodeReport(self.node, "test", self.world.clock.mono_ms() - self.since_ms, led, faults=tuple(self.faults.items()))

    def order(self, order: Order) -> None:
        group = self.world.groups[order.group]
        if not group.is_led() or group.leader != self.node:
            raise NotLeader("not the leader")
        group.order(order)
        self.world.orders.append(order)


class PlayedNode:
    def __init__(self, world: PlayedCluster, name: str, identity: LocalIdentity) -> None:
        self.world, self.name, self.identity = world, name, identity
        self.store = MemoryStore()
        self.local = PlayedLocal(world, identity.raft_id)
        self.table = MemberTable(self.store)
        self.peers: dict[int, Any] = {}
        self.is_removed = False
        self.changes = MemberChanges(self.table, world.propose, world.clock, is_connected=lambda node: node in world.up)
        self.driver = self.new_driver()

    def new_driver(self) -> Membership:
        return Membership(
            self.table, self.identity, self.local, self._ask, self.world.propose, self.world.clock,  # type: ignore[arg-type]
            leads_meta=lambda: self.world.meta_leader() == self.identity.raft_id, on_members=self._on_members,
        )  # fmt: skip

    def _on_members(self, table: MemberTable) -> None:
        self.peers = dict(table.peers(self.identity.raft_id))

    async def _ask(self, node: int, method: str, body: bytes, _timeout_ms: int) -> bytes:
        other = self.world.up.get(node)
        if other is None:
            raise NotConnected("it is down")
        if method == REPORT:
            return msgspec.msgpack.encode(other.local.report())
        assert method == ORDER
        other.local.order(msgspec.msgpack.decode(body, type=Order))
        return b""


class PlayedCluster:
    """`up`: running nodes by raft id. After each tick the rules hold: what a client could lose, or an operator would be angry about."""

    def __init__(self, count: int = 3, *, factor: int = 3, seed: int = 1) -> None:
        self.clock = VirtualClock(1_767_413_106_007)
        self.meta = EngineGroup(group=META_GROUP)
        self.up: dict[int, PlayedNode] = {}
        self.groups: dict[int, PlayedGroup] = {}
        self.pace = 500  # entries a tick that a member catches up
        self.orders: list[Order] = []
        self.transfers: list[tuple[int, int]] = []
        self.elections = 0
        self.factor = factor
        self.min_voters = min(factor, count)
        self.rng = random.Random(seed)
        self.names = [f"n{number}" for number in range(1, count + 1)]

    async def found(self) -> PlayedCluster:
        identities = [self._identity(name) for name in self.names]
        for identity in identities:
            for other in identities:
                if other is not identity:
                    await identity.note_peer(other.raft_id, other.name, other.incarnation)
        founding = self._founding()
        for identity in identities:
            await identity.found(founding)
            self.start(identity)
        for group in (*range(GROUPS), META_GROUP):
            self.groups[group] = PlayedGroup(self, group, founding.configuration(group), founding.preferred_leader(group))
        await self.ticks(4)
        assert self.table().version >= 1
        return self

    def _founding(self) -> Any:
        from wheelsched.cluster.placement import Founding

        return Founding.of(settings_of(self.names, self.names[0], factor=self.factor))

    def _identity(self, name: str) -> LocalIdentity:
        return LocalIdentity.open(MemoryStore(), settings_of(sorted({*self.names, name}), name), self.rng)

    def start(self, identity: LocalIdentity) -> PlayedNode:
        node = self.up[identity.raft_id] = PlayedNode(self, identity.name, identity)
        return node

    async def join(self, name: str, raft_id: int) -> PlayedNode:
        """A blank node comes to the place that was made for it."""
        identity = self._identity(name)
        identity.take_raft_id(raft_id)
        changes = self.any_node().changes
        assert changes.awaits(name, raft_id, identity.incarnation)
        assert await changes.bind(name, raft_id, identity.incarnation) == ""
        await identity.join(b"c" * 16)
        return self.start(identity)

    def kill(self, name: str) -> PlayedNode:
        return self.up.pop(self.node(name).identity.raft_id)

    def node(self, name: str) -> PlayedNode:
        return next(node for node in self.up.values() if node.name == name)

    def any_node(self) -> PlayedNode:
        """One that has the table."""
        members = self.groups[META_GROUP].configuration.members()
        return next(node for raft_id, node in self.up.items() if raft_id in members)

    def table(self) -> MemberTable:
        node = self.up[self.meta_leader()]
        node.table.refresh()
        return node.table

    def meta_leader(self) -> int:
        group = self.groups.get(META_GROUP)
        return group.leader if group is not None and group.is_led() else 0

    async def propose(self, command: ChangeMembers) -> Reply:
        if not self.meta_leader():
            raise Unavailable("the meta group has no leader")
        [reply] = self.meta.apply(command)
        self.replicate()
        return reply

    def replicate(self) -> None:
        rows: dict[bytes, bytes | None] = dict(self.meta.reader.families[META])
        members = self.groups[META_GROUP].configuration.members() if META_GROUP in self.groups else ()
        for raft_id, node in self.up.items():
            if raft_id in members:
                node.store.write({META: rows})

    async def ticks(self, count: int = 1) -> None:
        for _ in range(count):
            self.clock.advance(ms=TICK_MS)
            for group in self.groups.values():
                group.tick()
            self.replicate()
            for node in list(self.up.values()):
                try:
                    await node.driver.turn()
                except Unavailable:
                    pass
                except Removed:
                    node.is_removed = True
                    self.up.pop(node.identity.raft_id)
            self.check()

    async def settle(self, ticks_max: int = 4_000) -> int:
        """Tick until nothing changes any more; how many ticks it took."""
        quiet = 0
        for tick in range(ticks_max):
            before = (self.table().version, len(self.orders)) if self.meta_leader() else None
            await self.ticks()
            after = (self.table().version, len(self.orders)) if self.meta_leader() else ()
            quiet = quiet + 1 if before == after else 0
            if quiet >= 20:
                return tick - quiet
        raise AssertionError(f"still busy: {self.orders[-5:]}, {[row for row in self.table().groups.values() if row.change]}")

    def check(self) -> None:
        table = self.table() if self.meta_leader() else None
        if table is not None and table.groups:
            under_way = [row for row in table.groups.values() if row.change is not None]
            assert len(under_way) <= CHANGES_MAX
        for group in self.groups.values():
            # Of a joint configuration both halves hold the group, so no member counts that one of them lacks.
            conf = group.configuration
            if group.group != META_GROUP:
                assert len(conf.voters) >= self.min_voters, (group.group, conf)
            assert len(set(conf.voters) ^ set(conf.outgoing or conf.voters)) <= 2, "at most one voter leaves and one enters"

    def held(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for group in self.groups.values():
            if group.group != META_GROUP:
                found.update(self.name_of(node) for node in group.configuration.members())
        return found

    def led(self) -> Counter[str]:
        return Counter(self.name_of(group.leader) for group in self.groups.values() if group.group != META_GROUP and group.is_led())

    def name_of(self, raft_id: int) -> str:
        return self.up[raft_id].name if raft_id in self.up else self.table().name_of(raft_id)

    def state_of(self, raft_id: int) -> MemberState:
        return MemberState(self.table().members[raft_id].state)
