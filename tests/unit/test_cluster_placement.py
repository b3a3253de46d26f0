"""Who holds what when a cluster is made."""

from __future__ import annotations

from collections import Counter

import pytest

from wheelsched.cluster.placement import Founding
from wheelsched.core.settings import ClusterSettings, NodeAddress, NodeSettings, Settings
from wheelsched.model.keys import META_GROUP


def founding_of(count: int, *, factor: int = 3, groups: int = 32, backwards: bool = False) -> Founding:
    nodes = [NodeAddress(id=f"n{i}", http=f"h{i}:80", peer=f"h{i}:70") for i in range(1, count + 1)]
    cluster = ClusterSettings(nodes=tuple(nodes[::-1] if backwards else nodes), group_count=groups, replication_factor=factor)
    return Founding.of(Settings(cluster=cluster, node=NodeSettings(id="n1")))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 16])
@pytest.mark.parametrize("factor", [1, 3, 5])
def test_groups_are_spread_evenly(count: int, factor: int) -> None:
    founding = founding_of(count, factor=factor)
    held: Counter[int] = Counter()
    led: Counter[int] = Counter()
    for group in range(founding.group_count):
        voters = founding.voters(group)
        assert len(set(voters)) == len(voters) == min(factor, count)
        held.update(voters)
        led[founding.preferred_leader(group)] += 1
        configuration = founding.configuration(group)
        assert configuration.voters == tuple(sorted(voters)) and not configuration.learners
    nodes = [node.raft_id for node in founding.nodes]
    assert max(held[node] for node in nodes) - min(held[node] for node in nodes) <= min(factor, count)
    assert max(led[node] for node in nodes) - min(led[node] for node in nodes) <= 1


@pytest.mark.parametrize(("count", "voters"), [(1, 1), (2, 2), (3, 3), (4, 3), (5, 5), (9, 5)])
def test_every_node_has_the_meta_group(count: int, voters: int) -> None:
    founding = founding_of(count)
    configuration = founding.configuration(META_GROUP)
    assert len(configuration.voters) == voters
    assert configuration.members() == tuple(sorted(node.raft_id for node in founding.nodes))


def test_the_order_of_the_list_means_nothing_and_all_else_does() -> None:
    assert founding_of(4) == founding_of(4, backwards=True)
    ids = {founding.cluster_id for founding in (founding_of(3), founding_of(4), founding_of(3, factor=1), founding_of(3, groups=16))}
    assert len(ids) == 4
    assert founding_of(3).differences(founding_of(4, factor=1)) == [
        "cluster.replication_factor 3 and 1", "cluster.nodes without n4 and n4 at h4:70 (http h4:80)",
    ]  # fmt: skip
