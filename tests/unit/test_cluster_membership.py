"""How a cluster changes its members: what an operator asks for comes to be, whoever drives it and whoever dies on the way."""

from __future__ import annotations

import contextlib

import pytest
from played_cluster import GROUPS, PlayedCluster

from wheelsched.cluster.identity import LocalIdentity
from wheelsched.cluster.members import raft_id_of_generation
from wheelsched.cluster.planning import YOUNG_MS
from wheelsched.core.errors import InvalidRequest, NameTaken, NotFound, Unavailable
from wheelsched.core.settings import raft_id_of
from wheelsched.model.keys import META_GROUP
from wheelsched.model.members import MemberState

TICKS_A_SECOND = 4


async def a_cluster(count: int = 3, *, factor: int = 3) -> PlayedCluster:
    return await PlayedCluster(count, factor=factor).found()


async def test_the_first_rows_say_who_was_there() -> None:
    cluster = await a_cluster(4)
    table = cluster.table()
    assert [row.name for row in table.live()] == ["n1", "n2", "n3", "n4"]
    for node in cluster.up.values():
        node.table.refresh()
        assert node.table.members == table.members and len(node.peers) == 3
    assert {row.incarnation for row in table.live()} == {node.identity.incarnation for node in cluster.up.values()}
    assert set(table.groups) == {*range(GROUPS), META_GROUP}
    assert table.groups[META_GROUP].learners == (raft_id_of("n4"),)
    await cluster.settle()
    assert not cluster.orders, "a new cluster is even"


async def test_a_node_that_was_added_takes_its_share() -> None:
    cluster = await a_cluster(3)
    row = await cluster.any_node().changes.add("n4", "n4:80", "n4:70")
    assert (row.raft_id, row.state) == (raft_id_of("n4"), MemberState.JOINING)
    await cluster.settle()
    assert not cluster.orders, "nothing moves before it came"
    await cluster.join("n4", row.raft_id)
    await cluster.settle()
    assert cluster.state_of(row.raft_id) is MemberState.ACTIVE
    assert sorted(cluster.held().values()) == [6, 6, 6, 6]
    assert row.raft_id in cluster.groups[META_GROUP].configuration.learners
    assert all(len(group.configuration.voters) == 3 and not group.configuration.learners
               for group in cluster.groups.values() if group.group != META_GROUP)  # fmt: skip
    table = cluster.table()
    for group in range(GROUPS):
        assert table.groups[group].voters == cluster.groups[group].configuration.voters
        assert table.groups[group].preferred in table.groups[group].voters


async def test_five_nodes_vote_in_the_meta_group() -> None:
    cluster = await a_cluster(3)
    for name in ("n4", "n5"):
        row = await cluster.any_node().changes.add(name, f"{name}:80", f"{name}:70")
        await cluster.join(name, row.raft_id)
    await cluster.settle()
    assert len(cluster.groups[META_GROUP].configuration.voters) == 5
    assert max(cluster.held().values()) - min(cluster.held().values()) <= 1


async def test_a_drained_node_leads_and_holds_nothing_and_may_come_back() -> None:
    cluster = await a_cluster(4)
    elections = cluster.elections
    await cluster.any_node().changes.drain("n2")
    await cluster.ticks(2)
    assert cluster.led()["n2"] == 0, "leaderships go first, and at once"
    await cluster.settle()
    assert "n2" not in cluster.held()
    assert cluster.elections == elections, "every leader handed over"
    assert raft_id_of("n2") in cluster.groups[META_GROUP].configuration.members(), "it still knows its cluster"
    await cluster.node("n1").changes.add("n2", "n2:80", "n2:70")
    await cluster.settle()
    assert sorted(cluster.held().values()) == [6, 6, 6, 6]


async def test_a_drained_node_keeps_its_replicas_where_nobody_else_can_hold_them() -> None:
    """A rolling restart of three nodes: only leaderships move."""
    cluster = await a_cluster(3)
    await cluster.any_node().changes.drain("n1")
    await cluster.settle()
    assert cluster.led()["n1"] == 0 and cluster.held()["n1"] == GROUPS
    assert cluster.meta_leader() != raft_id_of("n1")


async def test_a_removed_node_stops_itself_and_never_comes_back() -> None:
    cluster = await a_cluster(4)
    n3 = cluster.node("n3")
    await cluster.any_node().changes.remove("n3")
    await cluster.settle()
    assert cluster.state_of(raft_id_of("n3")) is MemberState.REMOVED
    assert cluster.table().removed() == {raft_id_of("n3"): "n3"}
    assert sorted(cluster.held()) == ["n1", "n2", "n4"]
    assert raft_id_of("n3") not in cluster.groups[META_GROUP].configuration.members()
    assert all(raft_id_of("n3") not in node.peers for node in cluster.up.values() if node is not n3)
    row = await cluster.any_node().changes.add("n3", "n3:80", "n3:70")
    assert row.raft_id == raft_id_of_generation("n3", 2) != raft_id_of("n3")


async def test_the_leader_of_all_can_be_removed() -> None:
    cluster = await a_cluster(4)
    leader = cluster.name_of(cluster.meta_leader())
    await cluster.any_node().changes.remove(leader)
    await cluster.settle()
    assert cluster.state_of(raft_id_of(leader)) is MemberState.REMOVED
    assert len(cluster.groups[META_GROUP].configuration.voters) == 3


@pytest.mark.parametrize("ahead", [1, 2, 3, 5, 8, 13])
async def test_another_driver_goes_on_where_one_stopped(ahead: int) -> None:
    cluster = await a_cluster(4)
    row = await cluster.any_node().changes.add("n5", "n5:80", "n5:70")
    await cluster.join("n5", row.raft_id)
    await cluster.any_node().changes.remove("n2")
    for _ in range(60):
        await cluster.ticks(ahead)
        for node in cluster.up.values():
            node.driver = node.new_driver()
        meta = cluster.groups[META_GROUP]
        others = [node for node in meta.configuration.voters if node in cluster.up and node != meta.leader]
        meta.leader, meta.term = cluster.rng.choice(others), meta.term + 1
    await cluster.settle()
    assert cluster.state_of(raft_id_of("n2")) is MemberState.REMOVED
    assert sorted(cluster.held().values()) == [6, 6, 6, 6]


async def test_a_dead_node_is_replaced_under_a_new_raft_id() -> None:
    cluster = await a_cluster(3)
    changes = cluster.node("n1").changes
    with pytest.raises(InvalidRequest, match="n3 is up and has its data"):
        await changes.replace("n3")
    cluster.kill("n3")
    row = await changes.replace("n3")
    assert (row.raft_id, row.name, row.peer) == (raft_id_of_generation("n3", 2), "n3", "n3:70")
    await cluster.settle()
    assert all(len(group.configuration.voters) == 3 for group in cluster.groups.values()), "nothing shrinks while one is to come"
    assert [peer.name for peer in cluster.node("n1").peers.values()] == ["n2", "n3"]
    await cluster.join("n3", row.raft_id)
    await cluster.settle()
    assert cluster.state_of(raft_id_of("n3")) is MemberState.REMOVED
    assert cluster.state_of(row.raft_id) is MemberState.ACTIVE
    for group in cluster.groups.values():
        assert group.configuration.voters == tuple(sorted((raft_id_of("n1"), raft_id_of("n2"), row.raft_id)))
    with pytest.raises(InvalidRequest, match="no place for n3"):
        await bound(cluster, "n3", raft_id_of("n3"))


async def bound(cluster: PlayedCluster, name: str, raft_id: int) -> None:
    if refusal := await cluster.any_node().changes.bind(name, raft_id, b"x" * 16):
        raise InvalidRequest(refusal)


async def test_with_force_a_cluster_may_shrink_below_its_factor() -> None:
    cluster = await a_cluster(3)
    cluster.min_voters = 2
    changes = cluster.node("n1").changes
    with pytest.raises(InvalidRequest, match=r"2 nodes would be left and cluster\.replication_factor is 3"):
        await changes.remove("n3")
    cluster.kill("n3")
    await changes.remove("n3", force=True)
    await cluster.settle()
    assert cluster.state_of(raft_id_of("n3")) is MemberState.REMOVED
    assert all(len(group.configuration.voters) == 2 for group in cluster.groups.values())


async def test_a_change_whose_newcomer_dies_is_given_up_after_a_while() -> None:
    cluster = await a_cluster(4)
    cluster.pace = 0  # nobody catches up
    row = await cluster.any_node().changes.add("n5", "n5:80", "n5:70")
    await cluster.join("n5", row.raft_id)
    while not any(change.change and change.group != META_GROUP for change in cluster.table().groups.values()):
        await cluster.ticks()
    await cluster.ticks(4)
    cluster.kill("n5")
    cluster.pace = 500
    await cluster.ticks(50 * TICKS_A_SECOND)
    assert any(change.change for change in cluster.table().groups.values()), "a restart would take less"
    await cluster.ticks(20 * TICKS_A_SECOND)
    await cluster.settle()
    assert "n5" not in cluster.held()
    assert not any(change.change for change in cluster.table().groups.values())


async def test_a_group_that_lost_a_node_for_a_while_is_left_alone() -> None:
    cluster = await a_cluster(4)
    cluster.kill("n2")
    await cluster.ticks(600)
    assert not [order for order in cluster.orders if order.kind.value != "transfer"]


async def test_a_node_is_not_given_up_where_a_group_needs_it_for_its_majority() -> None:
    cluster = await a_cluster(3)
    changes = cluster.node("n1").changes
    cluster.kill("n3")
    await changes.replace("n3")
    cluster.kill("n2")
    with pytest.raises(InvalidRequest, match="without n2 group 0 would have no majority: n3 was given up as well"):
        await changes.replace("n2")
    with pytest.raises(InvalidRequest, match="without n2 group 0 would have no majority"):
        await changes.remove("n2", force=True)


async def test_the_meta_group_has_an_odd_number_of_voters_again() -> None:
    cluster = await a_cluster(5)
    await cluster.any_node().changes.remove("n5")
    await cluster.settle()
    configuration = cluster.groups[META_GROUP].configuration
    assert (len(configuration.voters), len(configuration.learners)) == (3, 1)


# ---- leaders


async def test_leaders_are_evened_after_half_a_minute_one_by_one_and_not_onto_young_nodes() -> None:
    cluster = await a_cluster(3)
    await cluster.ticks(YOUNG_MS // 250 + 4)
    n1 = cluster.kill("n1")
    await cluster.ticks(4)
    assert cluster.led()["n1"] == 0
    cluster.start(n1.identity)
    own_id = n1.identity.raft_id
    await cluster.ticks(58 * TICKS_A_SECOND)
    assert own_id not in [to for _, to in cluster.transfers], "it is young"
    cluster.transfers.clear()
    await cluster.ticks(30 * TICKS_A_SECOND)
    assert not cluster.transfers, "it may pass"
    for _ in range(20 * TICKS_A_SECOND):
        before = len(cluster.transfers)
        await cluster.ticks()
        assert len(cluster.transfers) <= before + 1, "one at a time"
    counts = cluster.led()
    assert max(counts.values()) - min(counts[name] for name in ("n1", "n2", "n3")) <= 1


async def test_no_leadership_goes_to_one_that_lags() -> None:
    cluster = await a_cluster(3)
    await cluster.ticks(YOUNG_MS // 250 + 4)
    for group in cluster.groups.values():
        group.leader = raft_id_of("n1")
        group.matches[raft_id_of("n3")] = 0
    cluster.pace = 0
    await cluster.ticks(60 * TICKS_A_SECOND)
    assert cluster.led()["n3"] == 0 and cluster.led()["n2"] == GROUPS // 2


# ---- what is refused


async def test_names_and_addresses_are_given_once() -> None:
    cluster = await a_cluster(3)
    changes = cluster.any_node().changes
    with pytest.raises(NameTaken, match=r"n2 is a member at n2:70 \(http n2:80\), state active"):
        await changes.add("n2", "elsewhere:80", "elsewhere:70")
    with pytest.raises(InvalidRequest, match="n2 is at n2:70"):
        await changes.add("n4", "n4:80", "n2:70")
    with pytest.raises(NotFound, match="the cluster has no node n9; it has n1, n2, n3"):
        await changes.drain("n9")
    assert (await changes.add("n2", "n2:80", "n2:70")).state == MemberState.ACTIVE, "said twice is said once"


async def test_a_place_is_for_one_data_directory() -> None:
    cluster = await a_cluster(3)
    changes = cluster.any_node().changes
    row = await changes.add("n4", "n4:80", "n4:70")
    assert changes.awaits("n4", row.raft_id, b"a" * 16)
    assert await changes.bind("n4", row.raft_id, b"a" * 16) == ""
    assert await changes.bind("n4", row.raft_id, b"a" * 16) == ""
    assert not changes.awaits("n4", row.raft_id, b"b" * 16)
    assert "wheelsched cluster replace n4" in await changes.bind("n4", row.raft_id, b"b" * 16)
    assert "wheelsched cluster replace n1" in await changes.bind("n1", raft_id_of("n1"), b"b" * 16), "a founder that was wiped"


async def test_two_operators_at_once_both_get_what_they_asked_for() -> None:
    cluster = await a_cluster(3)
    first, second = cluster.node("n1").changes, cluster.node("n2").changes
    await first.add("n4", "n4:80", "n4:70")
    await second.add("n5", "n5:80", "n5:70")  # decided on what n1 wrote a moment ago
    assert [row.name for row in cluster.table().live()] == ["n1", "n2", "n3", "n4", "n5"]


# ---- whatever happens


@pytest.mark.parametrize("seed", range(10))
async def test_whatever_is_asked_for_and_whoever_dies_it_ends_in_order(seed: int) -> None:
    """Operators, crashes, elections and new drivers by chance, one node down at a time; then peace, and all has to be in its place."""
    cluster = await PlayedCluster(4, seed=seed).found()
    rng = cluster.rng
    down: list[LocalIdentity] = []
    gone: set[int] = set()
    number = 5
    for _ in range(60):
        members = cluster.groups[META_GROUP].configuration.members()
        nodes = [node for raft_id, node in cluster.up.items() if raft_id in members]  # the others know nothing yet
        node = rng.choice(nodes)
        move = rng.choice(["add", "drain", "back", "remove", "kill", "restart", "elect", "driver", "wait", "replace"])
        with contextlib.suppress(InvalidRequest, NameTaken, NotFound, Unavailable):
            if move == "add" and len(nodes) < 7:
                row = await node.changes.add(f"n{number}", f"n{number}:80", f"n{number}:70")
                number += 1
                await cluster.join(row.name, row.raft_id)
            elif move == "drain":
                await node.changes.drain(rng.choice(nodes).name)
            elif move == "back":
                name = rng.choice(nodes).name
                await node.changes.add(name, f"{name}:80", f"{name}:70")
            elif move == "remove" and len(nodes) > 4:
                await node.changes.remove(rng.choice(nodes).name)
            elif move == "kill" and not down and len(nodes) > 3:
                down.append(cluster.kill(node.name).identity)
            elif move == "restart" and down:
                cluster.start(down.pop())
            elif move == "replace" and down:
                row = await node.changes.replace(down[-1].name)
                gone.add(down.pop().raft_id)
                await cluster.join(row.name, row.raft_id)
            elif move == "elect":
                group = rng.choice(list(cluster.groups.values()))
                group.leader = rng.choice(group.configuration.voters)
                group.term += 1
            elif move == "driver":
                node.driver = node.new_driver()
        await cluster.ticks(rng.randint(1, 12))
    for identity in down:
        cluster.start(identity)
    for _ in range(3):
        # Those that are drained come back, and the ones that were given up for lost stay away.
        table = cluster.table()
        for row in list(table.live()):
            if row.state == MemberState.DRAINING and not row.leaves:
                await cluster.any_node().changes.add(row.name, row.http, row.peer)
        await cluster.settle()
    table = cluster.table()
    active = {row.raft_id for row in table.members.values() if row.state == MemberState.ACTIVE}
    # A place that nobody came to stays free.
    rows = [row for row in table.members.values() if row.state != MemberState.JOINING or row.raft_id in cluster.up]
    assert {row.state for row in rows} <= {MemberState.ACTIVE, MemberState.REMOVED}, rows
    assert not gone & active
    for group in cluster.groups.values():
        members = set(group.configuration.members())
        assert members <= active and table.groups[group.group].voters == group.configuration.voters
        if group.group == META_GROUP:
            assert members == active
        else:
            assert len(members) == 3 and not group.configuration.learners
    counts = cluster.held()
    assert max(counts.values()) - min(counts[cluster.name_of(node)] for node in active) <= 1
