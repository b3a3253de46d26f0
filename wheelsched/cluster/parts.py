"""All that a node of several runs for its members, put together: table, driver, answers to other nodes, and the operator's side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from wheelsched.cluster.admin import ClusterAdmin
from wheelsched.cluster.bootstrap import BootstrapAnswers
from wheelsched.cluster.identity import LocalIdentity
from wheelsched.cluster.members import MemberChanges, MemberTable, Propose
from wheelsched.cluster.membership import Membership
from wheelsched.cluster.reports import LocalGroups
from wheelsched.cluster.transport import Transport
from wheelsched.core.clock import Clock
from wheelsched.core.settings import NodeAddress
from wheelsched.model.keys import META_GROUP
from wheelsched.replica.raft_replicas import RaftReplicas
from wheelsched.store import Store


class MembershipParts:
    """`admin` is for `api`; `answer` takes the calls of `METHODS`; `run` goes on for the life of the node and raises `Removed`."""

    METHODS: Final = LocalGroups.METHODS

    def __init__(
        self, store: Store, identity: LocalIdentity, transport: Transport, replicas: RaftReplicas, groups: Sequence[int], clock: Clock,
        propose: Propose, bootstrap: BootstrapAnswers, *, release: str, nodes: Sequence[NodeAddress],
    ) -> None:  # fmt: skip
        """`groups`: all, the meta group included. `propose(command)`: its reply, through the log of the meta group wherever that is led.
        `nodes`: as in the settings, this one among them. From here on nodes that were added may join through this one, and the transport
        has the peers of the table."""
        self._identity = identity
        self._transport = transport
        self.table = MemberTable(store)
        self._nodes = nodes
        own = next(node for node in nodes if node.id == identity.name)
        self.local = LocalGroups(replicas, groups, clock, release=release, statistics=transport.statistics, address=own)
        self.changes = MemberChanges(self.table, propose, clock, is_connected=transport.is_connected)
        self.driver = Membership(
            self.table, identity, self.local, transport.request, propose, clock, leads_meta=lambda: replicas.leads(META_GROUP),
            on_members=self._on_members, removed_because=lambda: transport.removed_because,
        )  # fmt: skip
        offsets = transport.offsets
        self.admin = ClusterAdmin(
            self.table, self.changes, self.driver, own_id=identity.raft_id,
            offset_ms=lambda node: offsets.offset_ms(node, wall_ms=clock.wall_ms(), mono_ms=clock.mono_ms()),
        )  # fmt: skip
        bootstrap.table = self.changes
        self._on_members(self.table)

    @property
    def cluster_id(self) -> bytes:
        return self._identity.cluster_id

    def _on_members(self, table: MemberTable) -> None:
        use_members(self._transport, table, self._identity, self._nodes)

    async def answer(self, method: str, body: bytes) -> bytes:
        return await self.local.answer(method, body)

    async def run(self) -> None:
        await self.driver.run()


def use_members(transport: Transport, table: MemberTable, identity: LocalIdentity, nodes: Sequence[NodeAddress]) -> None:
    """Let the transport have the peers of the table, where there is one; before, it has those of the settings, which know nothing of nodes
    that were replaced. `nodes`: as in the settings."""
    if table.cluster is not None:
        transport.tombstones = table.removed()
        transport.set_peers(table.peers(identity.raft_id, {node.id: node.peer for node in nodes}))
