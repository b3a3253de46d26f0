"""Plans of membership, one decision at a time."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from wheelsched.cluster.planning import Picture, next_step, plan_changes, plan_handovers
from wheelsched.cluster.reports import GroupReport, NodeReport, Order, OrderKind, Replica
from wheelsched.core.errors import Unavailable
from wheelsched.model.members import GroupChange, GroupRow, MemberRow, MemberState
from wheelsched.raft import Change, ChangeKind, Configuration
from wheelsched.replica.membership import check_change


def a_picture(groups: dict[int, GroupRow], leaders: dict[int, int], *, draining: tuple[int, ...] = (), nodes: int = 4) -> Picture:
    members = {
        node: MemberRow(node, f"n{node}", f"n{node}:80", f"n{node}:70", MemberState.DRAINING if node in draining else MemberState.ACTIVE)
        for node in range(1, nodes + 1)
    }
    led: dict[int, list[GroupReport]] = {node: [] for node in members}
    for group, leader in leaders.items():
        voters = groups[group].voters
        replicas = tuple(Replica(node, "replicate", 100, True) for node in voters)
        led[leader].append(GroupReport(group, 2, 100, 100, 100, 0, voters, (), groups[group].learners, 0, replicas))
    reports = {node: NodeReport(node, "", 100_000, tuple(found)) for node, found in led.items()}
    return Picture(members, groups, 3, reports)


def a_row(group: int, *voters: int, **fields: Any) -> GroupRow:
    return GroupRow(group, voters, **fields)


def test_who_drains_and_who_leaves_a_group_do_not_hand_it_to_each_other() -> None:
    row = a_row(0, 1, 2, 3, change=GroupChange(0, 1), preferred=2)
    picture = a_picture({0: row}, {0: 1}, draining=(2,))
    assert next_step(picture, row) == Order(0, OrderKind.TRANSFER, 3), "not to the preferred one, which drains"
    picture = a_picture({0: row}, {0: 2}, draining=(2,))
    assert plan_handovers(picture) == [Order(0, OrderKind.TRANSFER, 3)]
    picture = a_picture({0: row}, {0: 2}, draining=(2, 3))
    assert plan_handovers(picture) == [], "only the one that leaves is not draining"


def test_a_node_is_relieved_of_groups_that_it_does_not_lead() -> None:
    groups = {group: a_row(group, 1, 2, 3, preferred=2) for group in range(4)}
    picture = a_picture(groups, {0: 1, 1: 2, 2: 3, 3: 1}, nodes=4)
    planned = plan_changes(picture, slots=1)
    assert [(row.group, row.change) for row in planned] == [(1, GroupChange(4, 1))]


def test_who_is_gone_is_replaced_before_who_only_leaves() -> None:
    groups = {0: a_row(0, 1, 2, 3), 1: a_row(1, 1, 2, 3)}
    picture = a_picture(groups, {0: 1, 1: 1}, draining=(2, 3), nodes=5)
    members = dict(picture.members)
    members[3] = MemberRow(3, "n3", "", "", MemberState.DRAINING, leaves=True, is_gone=True)
    picture = Picture(members, groups, 3, picture.reports)
    assert [row.change and row.change.leave for row in plan_changes(picture, slots=4)] == [3, 3]


def test_a_newcomer_without_its_snapshot_gets_no_vote_however_short_the_log_is() -> None:
    """Ten thousand payloads of 64 KiB are a snapshot of minutes and few entries: the group would count on one that holds nothing."""
    row = a_row(0, 1, 2, 3, learners=(4,), change=GroupChange(4, 3))
    picture = a_picture({0: row}, {0: 1})
    (seen,) = picture.reports[1].led
    for match, state, step in ((0, "snapshot", None), (95, "replicate", Order(0, OrderKind.PROMOTE, 4, instead=3))):
        learner = Replica(4, state, match, True)
        picture.leaders[0] = (1, msgspec.structs.replace(seen, replicas=(*seen.replicas, learner)))
        assert next_step(picture, row) == step
    with pytest.raises(Unavailable, match="has its snapshot"):
        check_change(
            Configuration((1, 2, 3), learners=(4,)), [Change(ChangeKind.ADD_VOTER, 4)], matches={4: 0}, last_index=100, voters_min=3,
            force=False,
        )  # fmt: skip


def test_only_so_many_groups_change_at_a_time() -> None:
    groups = {group: a_row(group, 1, 2, 3) for group in range(8)}
    picture = a_picture(groups, dict.fromkeys(groups, 1), draining=(2,))
    assert len(plan_changes(picture, slots=4)) == 4
