"""Who holds what when a cluster is made. Pure: the same list of nodes gives the same groups on each of them.

Kept in the identity of every founder, because "the first members of a group" is asked for at each start until they first change, and the
list in the settings may be another one by then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

import msgspec

from wheelsched.core.ids import PARTITION_COUNT
from wheelsched.core.settings import Settings, raft_ids
from wheelsched.model.keys import META_GROUP
from wheelsched.raft import Configuration, make_configuration

# Every change of the meta group waits for a majority of its voters: no more of them than outages to be survived need.
META_VOTERS, META_VOTERS_LARGE = 3, 5
LARGE_FROM_NODES: Final = 5


class Founder(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A node of the list that a cluster was made from."""

    name: str
    raft_id: int
    http: str
    peer: str


class Founding(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a cluster is made from; `nodes` by name. Part of the identity row: fields are only ever appended.

    `origin`: of a cluster that is restored the backup's id, and whether it is to start held; empty of one that is made anew."""

    cluster_name: str
    group_count: int
    partition_count: int
    replication_factor: int
    nodes: tuple[Founder, ...]
    origin: str = ""

    @classmethod
    def of(cls, settings: Settings, *, origin: str = "") -> Founding:
        cluster = settings.cluster
        ids = raft_ids(node.id for node in cluster.nodes)
        nodes = sorted((Founder(node.id, ids[node.id], node.http, node.peer) for node in cluster.nodes), key=lambda node: node.name)
        return cls(cluster.name, cluster.group_count, PARTITION_COUNT, cluster.replication_factor, tuple(nodes), origin)

    @property
    def cluster_id(self) -> bytes:
        """16 bytes that nodes which were told the same agree on without talking."""
        told = msgspec.structs.astuple(self)
        if not self.origin:
            told = told[:-1]  # as it was before there were restored clusters
        return hashlib.blake2b(msgspec.msgpack.encode(told), digest_size=16, person=b"ws-cluster-id").digest()

    def voters(self, group: int) -> tuple[int, ...]:
        """Raft ids of a group's first voters; the first of them is the one that should lead it."""
        nodes = self.nodes
        if group == META_GROUP:
            return tuple(node.raft_id for node in nodes[: meta_voter_count(len(nodes))])
        held = min(self.replication_factor, len(nodes))
        return tuple(nodes[(group + i) % len(nodes)].raft_id for i in range(held))

    def configuration(self, group: int) -> Configuration:
        """A group's first members. Every node has the meta group, so that it can read it at home."""
        voters = self.voters(group)
        learners: Iterable[int] = ()
        if group == META_GROUP:
            learners = (node.raft_id for node in self.nodes if node.raft_id not in voters)
        return make_configuration(voters, learners=learners)

    def preferred_leader(self, group: int) -> int:
        return self.voters(group)[0]

    def differences(self, other: Founding) -> list[str]:
        """What the two do not agree on, as `cluster.replication_factor 3 and 1`; mine first."""
        found = [
            f"cluster.{field} {mine} and {theirs}"
            for field in ("name", "group_count", "replication_factor")
            if (mine := getattr(self, _FIELD.get(field, field))) != (theirs := getattr(other, _FIELD.get(field, field)))
        ]
        here, there = ({node.name: node for node in founding.nodes} for founding in (self, other))
        for name in sorted({*here, *there}):
            if here.get(name) != there.get(name):
                found.append(f"cluster.nodes {_shown(name, here.get(name))} and {_shown(name, there.get(name))}")
        if self.origin != other.origin:
            found.append(f"data {_origin_shown(self.origin)} and {_origin_shown(other.origin)}")
        return found


_FIELD: Final = {"name": "cluster_name"}


def _shown(name: str, node: Founder | None) -> str:
    return f"without {name}" if node is None else f"{name} at {node.peer} (http {node.http})"


def _origin_shown(origin: str) -> str:
    return f"restored from {origin}" if origin else "not restored"


def meta_voter_count(node_count: int) -> int:
    wanted = META_VOTERS_LARGE if node_count >= LARGE_FROM_NODES else META_VOTERS
    return min(wanted, node_count)
