"""The cluster as an operator sees and changes it, from whatever node is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wheelsched.cluster.members import MemberChanges, MemberTable, group_name, state_name
from wheelsched.cluster.membership import Membership
from wheelsched.cluster.planning import Picture
from wheelsched.cluster.reports import GroupReport, Order, OrderKind
from wheelsched.core.errors import InvalidRequest, NotFound, Unavailable
from wheelsched.model.members import GroupRow, MemberRow


@dataclass(frozen=True, slots=True)
class MemberView:
    """`is_up`: it answered just now. `leads`, `holds`: data groups. `clock_offset_ms`: ahead of the node that was asked; None where that is
    not known."""

    name: str
    raft_id: int
    state: str
    http: str
    peer: str
    leaves: bool
    is_gone: bool
    is_up: bool
    release: str
    uptime_ms: int | None
    leads: int
    holds: int
    clock_offset_ms: int | None
    is_clock_off: bool


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """`lag`: entries it does not hold yet, None where that is not known. `role`: voter or learner."""

    name: str
    role: str
    state: str
    is_up: bool
    lag: int | None


@dataclass(frozen=True, slots=True)
class ChangeView:
    """`fault`: what keeps it from going on."""

    enter: str | None
    leave: str | None
    fault: str


@dataclass(frozen=True, slots=True)
class GroupView:
    """`leader` None: nobody answers as one. What follows from a leader is 0 or empty then."""

    name: str
    leader: str | None
    preferred: str | None
    term: int
    commit: int
    log_bytes: int
    replicas: tuple[ReplicaView, ...]
    change: ChangeView | None
    transfer_to: str | None


@dataclass(frozen=True, slots=True)
class ClusterView:
    cluster_id: bytes
    version: int
    replication_factor: int
    members: tuple[MemberView, ...]
    groups: tuple[GroupView, ...]


class ClusterAdmin:
    """What `api` asks of a node of several. Changes return when they are recorded; what follows from them `view` shows."""

    def __init__(
        self, table: MemberTable, changes: MemberChanges, membership: Membership, *, own_id: int,
        offset_ms: Callable[[int], int | None],
    ) -> None:  # fmt: skip
        """`offset_ms(node)`: how far its clock is ahead of ours."""
        self._table = table
        self._changes = changes
        self._membership = membership
        self._own_id = own_id
        self._offset_ms = offset_ms

    # ---- changes. They raise `NotFound`, `NameTaken`, `InvalidRequest`; `Unavailable` and `OutcomeUnknown` as any change.

    async def add(self, name: str, http: str, peer: str, *, actor: str = "") -> MemberView:
        return self._member(await self._changes.add(name, http, peer, actor=actor), None)

    async def replace(self, name: str, http: str, peer: str, *, actor: str = "") -> MemberView:
        return self._member(await self._changes.replace(name, http, peer, actor=actor), None)

    async def drain(self, name: str, *, actor: str = "") -> MemberView:
        return self._member(await self._changes.drain(name, actor=actor), None)

    async def remove(self, name: str, *, force: bool = False, actor: str = "") -> MemberView:
        return self._member(await self._changes.remove(name, force=force, actor=actor), None)

    async def transfer(self, group: str, name: str) -> None:
        """Hand the leadership of a group to a node; begun on return, and it may fail silently."""
        picture = await self._picture()
        member = self._table.named(name)
        found = next((row for row in picture.groups.values() if group_name(row.group) == group), None)
        if found is None:
            raise NotFound(f"there is no group {group}; they are 0 to {len(picture.groups) - 2}, and meta")
        if found.group not in picture.leaders:
            raise Unavailable(f"group {group} has no leader at the moment; try again in a second", retry_after_s=1)
        leader, seen = picture.leaders[found.group]
        if member.raft_id not in seen.voters:
            voters = ", ".join(self._table.name_of(node) for node in seen.voters)
            raise InvalidRequest(f"{name} has no vote in group {group}; {voters} have")
        if leader != member.raft_id:
            await self._membership.send(leader, Order(found.group, OrderKind.TRANSFER, member.raft_id))

    # ---- the view

    async def view(self) -> ClusterView:
        """All nodes are asked, and waited for a second at most."""
        picture = await self._picture()
        cluster = self._table.cluster
        assert cluster is not None
        faults = {group: fault for report in picture.reports.values() for group, fault in report.faults}
        rows = sorted(picture.groups.values(), key=lambda row: row.group)
        return ClusterView(
            cluster.cluster_id, cluster.version, cluster.replication_factor,
            tuple(self._member(row, picture) for row in picture.members.values() if state_name(row) != "removed"),
            tuple(self._group(row, picture, faults.get(row.group, "")) for row in rows),
        )  # fmt: skip

    async def _picture(self) -> Picture:
        table = self._table
        table.refresh()
        if table.cluster is None:
            raise Unavailable("the cluster is being made; try again in a second", retry_after_s=1)
        reports = await self._membership.reports()
        return Picture(table.members, table.groups, table.replication_factor, reports)

    def _member(self, row: MemberRow, picture: Picture | None) -> MemberView:
        report = picture.reports.get(row.raft_id) if picture is not None else None
        leads = 0
        if picture is not None:
            leads = sum(leader == row.raft_id and group_name(group) != "meta" for group, (leader, _) in picture.leaders.items())
        return MemberView(
            row.name, row.raft_id, state_name(row), row.http, row.peer, row.leaves, row.is_gone, report is not None,
            report.release if report is not None else "", report.uptime_ms if report is not None else None, leads,
            sum(group_name(group) != "meta" for group in self._table.held(row.raft_id)),
            0 if row.raft_id == self._own_id else self._offset_ms(row.raft_id), report is not None and report.is_clock_off,
        )  # fmt: skip

    def _group(self, row: GroupRow, picture: Picture, fault: str) -> GroupView:
        name_of = self._table.name_of
        leader, seen = picture.leaders.get(row.group, (0, None))
        change = row.change
        return GroupView(
            group_name(row.group), name_of(leader) if leader else None, name_of(row.preferred) if row.preferred else None,
            seen.term if seen is not None else 0, seen.commit if seen is not None else 0, seen.log_bytes if seen is not None else 0,
            self._replicas(row, seen, picture),
            None if change is None else ChangeView(
                name_of(change.enter) if change.enter else None, name_of(change.leave) if change.leave else None, fault,
            ),
            name_of(seen.transferee) if seen is not None and seen.transferee else None,
        )  # fmt: skip

    def _replicas(self, row: GroupRow, seen: GroupReport | None, picture: Picture) -> tuple[ReplicaView, ...]:
        """As the leader sees them; as recorded, where there is none."""
        voters = {*seen.voters, *seen.outgoing} if seen is not None else set(row.voters)
        members = seen.members() if seen is not None else {*row.voters, *row.learners}
        states = {replica.node: replica.state for replica in seen.replicas} if seen is not None else {}
        views = [
            ReplicaView(
                self._table.name_of(node), "voter" if node in voters else "learner", states.get(node, "unknown"),
                node in picture.reports, seen.lag(node) if seen is not None else None,
            )
            for node in members
        ]  # fmt: skip
        return tuple(sorted(views, key=lambda view: (view.role != "voter", view.name)))
