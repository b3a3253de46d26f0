"""The meta group: members of the cluster, and who holds which group.

Whoever proposes a change has seen all rows, of the version it names; here is only kept what must hold whatever is proposed: a raft id
means one data directory for ever, and nobody is removed while a group counts on it. There is no effect: every node has these rows, and
followers are given no effects, so all of them look at the version.
"""

from __future__ import annotations

from collections.abc import Sequence

from wheelsched.engine.context import Context
from wheelsched.model import keys, members
from wheelsched.model.commands import ChangeMembers, Reply
from wheelsched.model.members import ClusterRow, GroupRow, MemberRow, MemberState

_GROUPS_MAX = 256  # 128 data groups, and the meta group


def change_members(context: Context, command: ChangeMembers) -> Reply:
    txn = context.txn
    data = txn.get(keys.META, members.CLUSTER_KEY)
    before = None if data is None else members.decode_cluster(data)
    if before is None:
        if command.if_version != 0:
            return Reply(refusal="version-mismatch", detail="the cluster has no members on record yet; try again in a moment")
        after = ClusterRow(1, command.cluster_id, command.replication_factor)
    elif command.if_version == 0:
        return Reply(replayed=True)  # each leader of a new cluster proposes the first rows
    elif command.if_version != before.version:
        detail = f"members are at version {before.version}, the change was decided on {command.if_version}; look again"
        return Reply(refusal="version-mismatch", detail=detail)
    else:
        after = ClusterRow(before.version + 1, before.cluster_id, before.replication_factor)
    if fault := _find_fault(context, command.members, command.groups):
        return Reply(refusal="invalid-request", detail=fault)
    txn.put(keys.META, members.CLUSTER_KEY, members.encode(after))
    for member in command.members:
        txn.put(keys.META, members.member_key(member.raft_id), members.encode(member))
    for group in command.groups:
        txn.put(keys.META, members.group_key(group.group), members.encode(group))
    return Reply(count=after.version)


def _find_fault(context: Context, changed: Sequence[MemberRow], groups: Sequence[GroupRow]) -> str:
    for after in changed:
        data = context.txn.get(keys.META, members.member_key(after.raft_id))
        before = None if data is None else members.decode_member(data)
        if before is None:
            continue
        if after.name != before.name or (before.incarnation and after.incarnation != before.incarnation):
            return f"raft id {after.raft_id} is that of {before.name} and its data directory; another one needs another id"
        if after.state != before.state and MemberState(after.state) not in members.MOVES[MemberState(before.state)]:
            return f"{before.name} is {MemberState(before.state).name} and cannot become {MemberState(after.state).name}"
    removed = {member.raft_id: member.name for member in changed if member.state == MemberState.REMOVED}
    if removed:
        rows = context.txn.scan(keys.META, members.GROUPS_PREFIX, members.GROUPS_END, _GROUPS_MAX)
        held = {row.group: row for row in (members.decode_group_row(data) for _, data in rows)}
        held.update((row.group, row) for row in groups)
        for row in held.values():
            counted = {*row.voters, *row.learners, row.change.enter if row.change is not None else 0}
            for raft_id, name in removed.items():
                if raft_id in counted:
                    return f"{name} cannot be removed while it is a member of group {row.group}"
    return ""
