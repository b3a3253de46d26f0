"""What should change next: who enters and leaves which group, and who should lead. Pure: rows and reports in, rows and orders out.

A change of a group is recorded before its first step and cleared after its last, and each step follows from what the group's leader
reports. So whoever leads the meta group goes on where another one stopped, without having been told.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from wheelsched.cluster.placement import meta_voter_count
from wheelsched.cluster.reports import GroupReport, NodeReport, Order, OrderKind
from wheelsched.model.keys import META_GROUP
from wheelsched.model.members import GroupChange, GroupRow, MemberRow, MemberState
from wheelsched.replica.membership import CAUGHT_UP_ENTRIES

CHANGES_MAX: Final = 4  # groups under way at a time: two snapshots may come in and two leave at any node
# Who takes over is to need a moment, not a minute: while it catches up the group takes nothing.
LEVEL_ENTRIES: Final = 100
YOUNG_MS: Final = 60_000  # one that just came may go again


@dataclass(slots=True)
class Picture:
    """Everything a plan is made from. `leaders`: by group, the report of the newest term."""

    members: Mapping[int, MemberRow]
    groups: Mapping[int, GroupRow]
    replication_factor: int
    reports: Mapping[int, NodeReport]
    leaders: dict[int, tuple[int, GroupReport]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node, report in sorted(self.reports.items()):
            for group in report.led:
                known = self.leaders.get(group.group)
                if known is None or known[1].term < group.term:
                    self.leaders[group.group] = (node, group)

    def is_active(self, node: int) -> bool:
        row = self.members.get(node)
        return row is not None and row.state == MemberState.ACTIVE and not row.leaves

    def has_to_go(self, node: int) -> bool:
        """Whether no group should count on the node."""
        row = self.members.get(node)
        return row is None or row.state in (MemberState.DRAINING, MemberState.REMOVED)

    def is_gone(self, node: int) -> bool:
        row = self.members.get(node)
        return row is None or row.is_gone

    def active(self) -> list[int]:
        return [node for node in sorted(self.members) if self.is_active(node)]

    def takers(self) -> list[int]:
        """Who may be given something: active, and heard just now."""
        return [node for node in self.active() if node in self.reports]

    def coming(self) -> int:
        """How many nodes there are to hold groups, with those that were added and have not come yet, and those that drain and may be taken
        back."""
        return sum(row.state != MemberState.REMOVED and not row.leaves for row in self.members.values())


def after(row: GroupRow) -> set[int]:
    """Voters once the change under way is behind."""
    voters = set(row.voters)
    if row.change is not None:
        voters.discard(row.change.leave)
        if row.change.enter and not row.change.as_learner:
            voters.add(row.change.enter)
    return voters


def loads(picture: Picture, rows: Iterable[GroupRow]) -> dict[int, int]:
    """Data groups that each node that may be given some holds, or will hold."""
    found = dict.fromkeys(picture.takers(), 0)
    for row in rows:
        if row.group != META_GROUP:
            for node in after(row):
                if node in found:
                    found[node] += 1
    return found


# ---- which groups change


def plan_changes(picture: Picture, *, slots: int) -> list[GroupRow]:
    """Rows with the changes to begin now, at most `slots`: what has to leave first, then what is short of replicas, then balance."""
    rows = dict(picture.groups)
    planned: list[GroupRow] = []

    def begin(change: GroupChange | None, row: GroupRow) -> None:
        if change is not None:
            rows[row.group] = replace(row, change=change)
            planned.append(rows[row.group])

    for row in sorted(picture.groups.values(), key=lambda row: (row.group != META_GROUP, row.group)):
        if len(planned) >= slots:
            return planned
        if row.change is None:
            begin(_meta_change(picture, row) if row.group == META_GROUP else _needed_change(picture, row, rows.values()), row)
    # Balance is a luxury: it waits until nothing else is under way.
    while len(planned) < slots and all(row.change is None or row in planned for row in rows.values()):
        better = _balancing_change(picture, rows)
        if better is None:
            break
        begin(*better)
    return planned


def _needed_change(picture: Picture, row: GroupRow, rows: Iterable[GroupRow]) -> GroupChange | None:
    wanted = min(picture.replication_factor, max(1, len(picture.active())))
    free = _least_loaded(picture, rows, but=row.voters)
    # Those that will never be heard again first: with each of them one less may fail.
    for node in sorted(row.voters, key=lambda node: (not picture.is_gone(node), node)):
        if not picture.has_to_go(node):
            continue
        if free:
            return GroupChange(free, node)
        is_last_resort = picture.is_gone(node) and picture.coming() < picture.replication_factor
        if len(row.voters) > 1 and (len(row.voters) > picture.replication_factor or is_last_resort):
            return GroupChange(0, node, force=is_last_resort)
    if len(row.voters) < wanted and free:
        return GroupChange(free)
    for node in row.learners:
        return GroupChange(0, node)  # left behind by a change that was given up
    return None


def _least_loaded(picture: Picture, rows: Iterable[GroupRow], *, but: Collection[int]) -> int:
    candidates = [(load, node) for node, load in loads(picture, rows).items() if node not in but]
    return min(candidates)[1] if candidates else 0


def _meta_change(picture: Picture, row: GroupRow) -> GroupChange | None:
    """All nodes hold the meta group; some of them vote."""
    takers = picture.takers()
    spare = [node for node in row.learners if node in takers]
    for node in sorted((*row.voters, *row.learners), key=lambda node: (not picture.is_gone(node), node)):
        member = picture.members.get(node)
        if member is not None and not member.leaves and not member.is_gone:
            continue
        if not picture.is_gone(node) and any(node in other.voters for other in picture.groups.values() if other.group != META_GROUP):
            continue  # it gives up its other groups first, and needs to know the members for that
        if node in row.learners:
            return GroupChange(0, node)
        if spare:
            return GroupChange(spare[0], node)
        if len(row.voters) > 1 and picture.coming() < len(row.voters):
            return GroupChange(0, node, force=True)
    for node, member in sorted(picture.members.items()):
        is_here = member.state in (MemberState.JOINING, MemberState.ACTIVE) and member.incarnation and node in picture.reports
        if is_here and not member.leaves and node not in row.voters and node not in row.learners:
            return GroupChange(node, as_learner=True)
    if len(row.voters) < meta_voter_count(len(picture.active())) and spare:
        return GroupChange(spare[0])
    if len(row.voters) > meta_voter_count(picture.coming()):
        # Four ask for one more answer than three and survive no more. It comes back as a learner.
        leader = _leader(picture, row.group)
        return GroupChange(0, max(node for node in row.voters if node != leader), force=True)
    return None


def _balancing_change(picture: Picture, rows: Mapping[int, GroupRow]) -> tuple[GroupChange, GroupRow] | None:
    held = loads(picture, rows.values())
    if len(held) < 2 or any(picture.is_active(node) and node not in held for node in picture.members):
        return None  # while one is away nobody knows for how long
    for much in sorted(held, key=lambda node: (-held[node], node)):
        for little in sorted(held, key=lambda node: (held[node], node)):
            if held[much] - held[little] < 2:
                break
            movable = [
                row for row in rows.values()
                if row.group != META_GROUP and row.change is None and much in row.voters and little not in row.voters
            ]  # fmt: skip
            if movable:
                # A group that it does not lead moves without anybody noticing.
                row = min(movable, key=lambda row: (_leader(picture, row.group) == much, row.preferred == much, row.group))
                return GroupChange(little, much), row
    return None


def _leader(picture: Picture, group: int) -> int:
    return picture.leaders[group][0] if group in picture.leaders else 0


# ---- how a change goes on


def next_step(picture: Picture, row: GroupRow) -> Order | GroupRow | None:
    """The order that brings a group's change on; its row, where the change is behind; None: wait."""
    change = row.change
    assert change is not None
    if row.group not in picture.leaders:
        return None
    leader, seen = picture.leaders[row.group]
    if seen.outgoing or seen.transferee:
        return None
    enter, leave = change.enter, change.leave
    if enter and enter not in seen.voters:
        if enter not in seen.learners:
            return Order(row.group, OrderKind.LEARN, enter)
        if not change.as_learner:
            if not seen.is_level(enter, CAUGHT_UP_ENTRIES):
                return None
            instead = leave if leave in seen.voters else 0
            return _leave_office(picture, row, leader, seen, instead) or Order(row.group, OrderKind.PROMOTE, enter, instead)
    if leave and leave in seen.voters:
        return _leave_office(picture, row, leader, seen, leave) or Order(row.group, OrderKind.REMOVE, leave, force=change.force)
    if leave and leave in seen.learners:
        return Order(row.group, OrderKind.REMOVE, leave)
    return settled(picture, row, seen)


def _leave_office(picture: Picture, row: GroupRow, leader: int, seen: GroupReport, leave: int) -> Order | None:
    """A leader that is to leave hands over first: nobody has to wait for an election."""
    if leader != leave:
        return None
    others = [node for node in seen.voters if node != leave]
    to = most_level([node for node in others if not picture.has_to_go(node)], seen, first=row.preferred) or most_level(others, seen)
    return Order(row.group, OrderKind.TRANSFER, to) if to else None


def most_level(nodes: Sequence[int], seen: GroupReport, *, first: int = 0) -> int:
    """Of those that are heard and nearly level, `first` if it is one of them, else the one that holds most; 0: none."""
    lags = [(node != first, seen.lag(node) or 0, node) for node in nodes if seen.is_level(node, LEVEL_ENTRIES)]
    return min(lags)[2] if lags else 0


def settled(picture: Picture, row: GroupRow, seen: GroupReport) -> GroupRow:
    """The row of a group that is in the middle of nothing."""
    preferred = row.preferred
    if preferred not in seen.voters:
        led = dict.fromkeys(seen.voters, 0)
        for other in picture.groups.values():
            if other.preferred in led:
                led[other.preferred] += 1
        preferred = min(led, key=lambda node: (led[node], node))
    return replace(row, voters=seen.voters, learners=seen.learners, preferred=preferred, change=None)


def give_up(picture: Picture, row: GroupRow, *, silent_too_long: bool) -> GroupRow | None:
    """The row without a change whose newcomer will not come to be; it leaves again if it is a learner by now. None: go on."""
    change = row.change
    assert change is not None
    if not change.enter or row.group not in picture.leaders:
        return None
    seen = picture.leaders[row.group][1]
    if change.enter in seen.voters or seen.outgoing:
        return None
    member = picture.members.get(change.enter)
    if member is not None and not member.is_gone and not member.leaves and member.state != MemberState.DRAINING and not silent_too_long:
        return None
    if change.enter in seen.learners:
        return replace(row, change=GroupChange(0, change.enter))
    return settled(picture, row, seen)


# ---- which members become what


def plan_members(picture: Picture, incarnations: Mapping[int, bytes]) -> list[MemberRow]:
    """Rows of members whose state follows from what they hold, and of those that moved: a node knows best where it is itself.
    `incarnations`: of founders, which are bound by having been met."""
    changed: list[MemberRow] = []
    meta = picture.groups.get(META_GROUP)
    for node, row in sorted(picture.members.items()):
        now = row
        if not row.incarnation and row.state == MemberState.ACTIVE and incarnations.get(node):
            now = replace(now, incarnation=incarnations[node])
        if row.state == MemberState.JOINING and row.incarnation and meta is not None and node in (*meta.voters, *meta.learners):
            now = replace(now, state=int(MemberState.ACTIVE))
        if row.state == MemberState.DRAINING and row.leaves and not _is_held(picture, node):
            now = replace(now, state=int(MemberState.REMOVED))
        report = picture.reports.get(node)
        if report is not None and report.peer and not row.is_gone:
            now = replace(now, http=report.http, peer=report.peer)
        if now != row:
            changed.append(now)
    return changed


def _is_held(picture: Picture, node: int) -> bool:
    return any(
        node in row.voters or node in row.learners or (row.change is not None and node in (row.change.enter, row.change.leave))
        for row in picture.groups.values()
    )


# ---- who leads


def plan_handovers(picture: Picture) -> list[Order]:
    """Transfers away from nodes that drain, of all their groups at once; of the meta group last, for its leader is who plans."""
    orders: list[Order] = []
    for group, (leader, seen) in sorted(picture.leaders.items()):
        if picture.has_to_go(leader) and not seen.outgoing and not seen.transferee:
            row = picture.groups.get(group)
            # Not to one that leaves this very group: the two would hand it to each other for ever.
            leaves = row.change.leave if row is not None and row.change is not None else 0
            takers = [node for node in seen.voters if not picture.has_to_go(node) and node != leaves]
            to = most_level(takers, seen, first=_preferred(picture, group))
            if to:
                orders.append(Order(group, OrderKind.TRANSFER, to))
    others = [order for order in orders if order.group != META_GROUP]
    return others or orders


def is_uneven(picture: Picture) -> bool:
    """Whether led counts differ by more than one, among those that may lead more."""
    return plan_transfer(picture) is not None


def plan_transfer(picture: Picture) -> Order | None:
    """The transfer that evens the counts of led groups most; None where they are even, or somebody is not level."""
    led = {node: 0 for node in picture.takers() if picture.reports[node].uptime_ms >= YOUNG_MS}
    for group, (leader, seen) in picture.leaders.items():
        if seen.transferee or seen.outgoing:
            return None  # one at a time
        if group != META_GROUP and leader in led:
            led[leader] += 1
    best: tuple[int, bool, int, int] | None = None
    for group, (leader, seen) in sorted(picture.leaders.items()):
        row = picture.groups.get(group)
        if group == META_GROUP or leader not in led or (row is not None and row.change is not None):
            continue
        for node in seen.voters:
            if node not in led or led[leader] - led[node] < 2:
                continue
            if seen.is_level(node, LEVEL_ENTRIES):
                candidate = (led[node] - led[leader], node != _preferred(picture, group), group, node)
                best = candidate if best is None else min(best, candidate)
    return None if best is None else Order(best[2], OrderKind.TRANSFER, best[3])


def _preferred(picture: Picture, group: int) -> int:
    row = picture.groups.get(group)
    return row.preferred if row is not None else 0
