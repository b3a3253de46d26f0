"""Rows of members and groups: what apply lets in, whoever proposes it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from builders import EngineGroup

from wheelsched.model import keys, members
from wheelsched.model.commands import ChangeMembers, Reply, decode_entry, encode_entry
from wheelsched.model.commands import Entry as CommandEntry
from wheelsched.model.members import ClusterRow, GroupChange, GroupRow, MemberRow, MemberState

CLUSTER_ID = b"c" * 16


def a_member(number: int, **fields: Any) -> MemberRow:
    row = MemberRow(number, f"n{number}", f"h{number}:80", f"h{number}:70", MemberState.ACTIVE, bytes([number]) * 16)
    return msgspec.structs.replace(row, **fields)


@pytest.fixture
def meta() -> EngineGroup:
    group = EngineGroup(group=keys.META_GROUP)
    groups = [GroupRow(0, (1, 2, 3), preferred=1), GroupRow(keys.META_GROUP, (1, 2, 3))]
    [reply] = group.apply(ChangeMembers(0, [a_member(number) for number in (1, 2, 3)], groups, CLUSTER_ID, 3))
    assert not reply.refusal
    return group


def change(meta: EngineGroup, *rows: MemberRow, groups: tuple[GroupRow, ...] = ()) -> Reply:
    [reply] = meta.apply(ChangeMembers(cluster_of(meta).version, list(rows), list(groups)))
    return reply


def cluster_of(meta: EngineGroup) -> ClusterRow:
    return members.decode_cluster(meta.reader.families[keys.META][members.CLUSTER_KEY])


def member_of(meta: EngineGroup, number: int) -> MemberRow:
    return members.decode_member(meta.reader.families[keys.META][members.member_key(number)])


def test_the_first_rows_are_written_once(meta: EngineGroup) -> None:
    """Each of the first leaders of a new cluster proposes them."""
    [reply] = meta.apply(ChangeMembers(0, [a_member(1, name="other")], [], CLUSTER_ID, 5))
    assert reply.replayed
    assert cluster_of(meta) == ClusterRow(1, CLUSTER_ID, 3)
    assert member_of(meta, 1) == a_member(1)


def test_a_change_that_was_decided_on_older_rows_changes_nothing(meta: EngineGroup) -> None:
    assert change(meta, a_member(4, state=MemberState.JOINING)).count == 2
    before = dict(meta.reader.families[keys.META])
    [reply] = meta.apply(ChangeMembers(1, [a_member(5)]))
    assert reply.refusal == "version-mismatch" and "version 2" in reply.detail
    assert meta.reader.families[keys.META] == before


def test_two_changes_of_one_entry_see_each_other(meta: EngineGroup) -> None:
    first, second = meta.apply(ChangeMembers(1, [a_member(4)]), ChangeMembers(1, [a_member(5)]))
    assert not first.refusal and second.refusal == "version-mismatch"


def test_nothing_is_changed_before_the_first_rows() -> None:
    meta = EngineGroup(group=keys.META_GROUP)
    [reply] = meta.apply(ChangeMembers(1, [a_member(4)]))
    assert reply.refusal == "version-mismatch" and not meta.reader.families[keys.META]


@pytest.mark.parametrize("fields", [{"incarnation": b"x" * 16}, {"name": "n9"}, {"incarnation": b""}])
def test_a_raft_id_means_one_data_directory(meta: EngineGroup, fields: dict[str, Any]) -> None:
    reply = change(meta, a_member(2, **fields))
    assert reply.refusal == "invalid-request" and "another one needs another id" in reply.detail
    assert member_of(meta, 2) == a_member(2)


def test_a_new_member_is_bound_to_its_directory_once(meta: EngineGroup) -> None:
    assert not change(meta, a_member(4, state=MemberState.JOINING, incarnation=b"")).refusal
    assert not change(meta, a_member(4, state=MemberState.JOINING, incarnation=b"a" * 16)).refusal
    assert change(meta, a_member(4, state=MemberState.JOINING, incarnation=b"b" * 16)).refusal == "invalid-request"


def test_a_removed_member_stays_removed(meta: EngineGroup) -> None:
    assert change(meta, a_member(3, state=MemberState.REMOVED)).refusal == "invalid-request"
    assert not change(meta, a_member(3, state=MemberState.DRAINING)).refusal
    groups = (GroupRow(0, (1, 2)), GroupRow(keys.META_GROUP, (1, 2)))
    assert not change(meta, a_member(3, state=MemberState.REMOVED), groups=groups).refusal
    for state in (MemberState.JOINING, MemberState.ACTIVE, MemberState.DRAINING):
        assert "is REMOVED" in change(meta, a_member(3, state=state)).detail


@pytest.mark.parametrize(
    "row",
    [GroupRow(0, (1, 2, 3)), GroupRow(0, (1, 2), learners=(3,)), GroupRow(0, (1, 2), change=GroupChange(enter=3))],
    ids=["voter", "learner", "on its way in"],
)
def test_nobody_is_removed_while_a_group_counts_on_it(meta: EngineGroup, row: GroupRow) -> None:
    assert not change(meta, a_member(3, state=MemberState.DRAINING), groups=(GroupRow(keys.META_GROUP, (1, 2)), row)).refusal
    reply = change(meta, a_member(3, state=MemberState.REMOVED))
    assert "n3 cannot be removed while it is a member of group 0" in reply.detail


def test_the_command_goes_through_the_log_unchanged() -> None:
    command = ChangeMembers(7, [a_member(1)], [GroupRow(3, (1, 2), (3,), 1, GroupChange(4, 1))], CLUSTER_ID, 3, "me")
    entry = CommandEntry(1, 5, [command])
    assert decode_entry(encode_entry(entry)) == entry
