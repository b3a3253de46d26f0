"""Brings the cluster to where its table of members says it should be: one driver on each node, at work where the meta group is led.

Four times a second it reads the table and asks all nodes what they lead; it records in the log of the meta group what is to change, and
sends each group's leader its next step. Nothing is kept that the next driver would need: it sees the same table and the same groups.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

import msgspec
import structlog

from wheelsched.cluster.identity import LocalIdentity
from wheelsched.cluster.members import MemberTable, Propose
from wheelsched.cluster.placement import Founding
from wheelsched.cluster.planning import (
    CHANGES_MAX,
    Picture,
    give_up,
    is_uneven,
    next_step,
    plan_changes,
    plan_handovers,
    plan_members,
    plan_transfer,
)
from wheelsched.cluster.reports import ORDER, REPORT, LocalGroups, NodeReport, Order
from wheelsched.core.clock import Clock
from wheelsched.core.errors import OutcomeUnknown, Unavailable, WheelschedError
from wheelsched.model.commands import ChangeMembers
from wheelsched.model.keys import META_GROUP
from wheelsched.model.members import GroupChange, GroupRow, MemberRow, MemberState
from wheelsched.store import StoreError

log = structlog.get_logger(__name__)

TURN_MS: Final = 250
# With nothing under way the nodes are asked less often: a report of 32 groups is 3 KiB.
IDLE_MS: Final = 1_000
ASK_MS: Final = 1_000
UNEVEN_MS: Final = 30_000
# Longer than a restart takes: who comes back goes on catching up.
SILENT_MS: Final = 60_000
TRANSFER_PAUSE_MS: Final = 2_000  # until the reports show what a transfer led to

Ask = Callable[[int, str, bytes, int], Awaitable[bytes]]


class Removed(StoreError):
    """This node was removed from its cluster; it stops."""


class Membership:
    """The driver. `run` for the life of the node. What keeps a change from going on is in this node's reports."""

    def __init__(
        self, table: MemberTable, identity: LocalIdentity, local: LocalGroups, ask: Ask, propose: Propose, clock: Clock, *,
        leads_meta: Callable[[], bool], on_members: Callable[[MemberTable], None], removed_because: Callable[[], str] = str,
    ) -> None:  # fmt: skip
        """`ask` as `Transport.request`; `propose`: through the log of the meta group; `on_members`: told when the table changed, on every
        node, to set the transport's peers; `removed_because`: what a peer told this node, if it was removed while it was away."""
        self._table = table
        self._identity = identity
        self._local = local
        self._ask = ask
        self._propose = propose
        self._clock = clock
        self._leads_meta = leads_meta
        self._on_members = on_members
        self._removed_because = removed_because
        self._told_version = 0
        self._asked_mono_ms = -IDLE_MS
        self._uneven_since: int | None = None
        self._transferred_mono_ms = -TRANSFER_PAUSE_MS
        self._silent_since: dict[int, int] = {}  # group with a change -> since when its newcomer is not heard
        self._faults = local.faults

    async def run(self) -> None:
        """Raises `Removed` where this node learns that it was removed."""
        due_mono_ms = self._clock.mono_ms()
        while True:
            try:
                await self.turn()
            except (Unavailable, OutcomeUnknown) as error:
                log.info("membership_waits", reason=error.detail)  # the next turn looks at what came of it
            due_mono_ms = max(due_mono_ms + TURN_MS, self._clock.mono_ms())
            await self._clock.sleep_until(due_mono_ms)

    async def turn(self) -> None:
        """Look once, and do what is to be done next."""
        self._look()
        if not self._leads_meta():
            self._rest()
            return
        if self._table.cluster is None:
            await self._write_first_rows()
            return
        now_ms = self._clock.mono_ms()
        if not self._is_busy() and now_ms - self._asked_mono_ms < IDLE_MS:
            return
        self._asked_mono_ms = now_ms
        picture = self._picture(await self.reports())
        if await self._record(picture):
            picture = self._picture(picture.reports)
        if not self._leads_meta():
            return
        transfers = self._transfers(picture)
        handed_over = {order.group for order in transfers}
        steps = [step for step in self._steps(picture) if step.group not in handed_over]
        await self._order(picture, [*transfers, *steps])

    def _rest(self) -> None:
        """Another node drives; what is kept here gets old."""
        self._uneven_since = None
        self._silent_since.clear()
        self._faults.clear()

    def _look(self) -> None:
        if reason := self._removed_because():
            raise Removed(reason)
        # Others look, too, so it is not what they left unread that counts.
        self._table.refresh()
        if self._table.version == self._told_version:
            return
        self._told_version = self._table.version
        self._on_members(self._table)
        row = self._table.members.get(self._identity.raft_id)
        if row is not None and row.state == MemberState.REMOVED:
            raise Removed(f"{row.name} was removed from the cluster; its data directory can be deleted")

    def _is_busy(self) -> bool:
        table = self._table
        return any(row.change is not None for row in table.groups.values()) or any(
            row.state != MemberState.ACTIVE and not row.is_gone for row in table.live()
        )

    def _picture(self, reports: Mapping[int, NodeReport]) -> Picture:
        table = self._table
        return Picture(table.members, table.groups, table.replication_factor, reports)

    # ---- looking

    async def reports(self) -> dict[int, NodeReport]:
        """What every node that answers says of itself, by raft id."""
        own_id = self._identity.raft_id
        others = [row.raft_id for row in self._table.live() if row.raft_id != own_id and row.incarnation]
        founders = self._identity.founding
        if not self._table.members and founders is not None:
            others = [node.raft_id for node in founders.nodes if node.raft_id != own_id]
        answers = await asyncio.gather(*(self._ask_for_report(node) for node in others))
        found = {report.node: report for report in answers if report is not None}
        found[own_id] = self._local.report()
        return found

    async def _ask_for_report(self, node: int) -> NodeReport | None:
        try:
            report = msgspec.msgpack.decode(await self._ask(node, REPORT, b"", ASK_MS), type=NodeReport)
        except (WheelschedError, msgspec.DecodeError):
            return None
        return report if report.node == node else None

    # ---- recording

    async def _write_first_rows(self) -> None:
        """What the founders agreed on before they started. Each of the first leaders does it, until one of them was heard."""
        founding = self._identity.founding
        if founding is None:
            return  # it joined a cluster, so there are rows; they have not arrived
        members, groups = first_rows(founding, self._incarnations(node.raft_id for node in founding.nodes))
        command = ChangeMembers(0, members, groups, founding.cluster_id, founding.replication_factor, "bootstrap")
        await self._propose(command)
        log.info("members_recorded", members=[row.name for row in members], groups=len(groups))

    def _incarnations(self, nodes: Iterable[int]) -> dict[int, bytes]:
        return {node: self._identity.known(node) for node in nodes}

    async def _record(self, picture: Picture) -> bool:
        """Write what is to change now; whether the table is another one."""
        members = plan_members(picture, self._incarnations(picture.members))
        groups = [row for old in picture.groups.values() if (row := self._next_row(picture, old)) is not None]
        under_way = sum(row.change is not None for row in picture.groups.values())
        if not groups and not members and under_way < CHANGES_MAX:
            groups = plan_changes(picture, slots=CHANGES_MAX - under_way)
        if not members and not groups:
            return False
        reply = await self._propose(ChangeMembers(self._table.version, members, groups, actor="cluster"))
        if reply.refusal:
            # That an operator was first is nothing; a fault of the plan must be seen.
            tell = log.info if reply.refusal == "version-mismatch" else log.error
            tell("membership_refused", code=reply.refusal, detail=reply.detail)
        else:
            self._tell(members, groups)
        self._look()
        return True

    def _next_row(self, picture: Picture, row: GroupRow) -> GroupRow | None:
        """The row of a group whose change is behind, or was given up."""
        if row.change is None:
            self._silent_since.pop(row.group, None)
            self._faults.pop(row.group, None)
            return None
        given_up = give_up(picture, row, silent_too_long=self._is_silent(picture, row, row.change))
        if given_up is not None:
            log.warning("group_change_given_up", group=row.group, newcomer=self._table.name_of(row.change.enter))
            return given_up
        step = next_step(picture, row)
        return step if isinstance(step, GroupRow) else None

    def _is_silent(self, picture: Picture, row: GroupRow, change: GroupChange) -> bool:
        now_ms = self._clock.mono_ms()
        if not change.enter or change.enter in picture.reports:
            self._silent_since.pop(row.group, None)
            return False
        return now_ms - self._silent_since.setdefault(row.group, now_ms) >= SILENT_MS

    def _tell(self, members: Iterable[MemberRow], groups: Iterable[GroupRow]) -> None:
        name_of = self._table.name_of
        for row in members:
            log.info("member_changed", member=row.name, raft_id=row.raft_id, state=MemberState(row.state).name.lower())
        for group in groups:
            if (change := group.change) is not None:
                enter, leave = (name_of(node) if node else None for node in (change.enter, change.leave))
                log.info("group_change_begins", group=group.group, enter=enter, leave=leave, as_learner=change.as_learner)
            else:
                log.info("group_change_done", group=group.group, voters=[name_of(node) for node in group.voters])

    # ---- doing

    def _steps(self, picture: Picture) -> list[Order]:
        steps = (next_step(picture, row) for row in picture.groups.values() if row.change is not None)
        return [step for step in steps if isinstance(step, Order)]

    def _transfers(self, picture: Picture) -> list[Order]:
        """Away from who drains, at once; else one that makes led counts even, once they were uneven for long enough."""
        handovers = plan_handovers(picture)
        if handovers:
            self._uneven_since = None
            return handovers
        now_ms = self._clock.mono_ms()
        if now_ms - self._transferred_mono_ms < TRANSFER_PAUSE_MS:
            return []
        if not is_uneven(picture):
            self._uneven_since = None
            return []
        if self._uneven_since is None:
            self._uneven_since = now_ms
        if now_ms - self._uneven_since < UNEVEN_MS:
            return []
        order = plan_transfer(picture)
        self._transferred_mono_ms = now_ms
        return [] if order is None else [order]

    async def _order(self, picture: Picture, orders: Iterable[Order]) -> None:
        await asyncio.gather(*(self._send(picture.leaders[order.group][0], order) for order in orders))

    async def _send(self, leader: int, order: Order) -> None:
        try:
            await self.send(leader, order)
        except (Unavailable, OutcomeUnknown) as error:
            self._faults[order.group] = error.detail  # busy with another step, or led by another one now
        except WheelschedError as error:
            self._faults[order.group] = error.detail
            log.warning("group_order_refused", group=order.group, order=order.kind.value, reason=error.detail)
        else:
            self._faults.pop(order.group, None)

    async def send(self, leader: int, order: Order) -> None:
        """Give an order to the node that leads its group. Raises what that answers."""
        if leader == self._identity.raft_id:
            self._local.order(order)
        else:
            await self._ask(leader, ORDER, msgspec.msgpack.encode(order), ASK_MS)


def first_rows(founding: Founding, incarnations: Mapping[int, bytes]) -> tuple[list[MemberRow], list[GroupRow]]:
    """Members and groups of a new cluster."""
    members = [
        MemberRow(node.raft_id, node.name, node.http, node.peer, int(MemberState.ACTIVE), incarnations.get(node.raft_id, b""))
        for node in founding.nodes
    ]
    groups = []
    for group in (*range(founding.group_count), META_GROUP):
        configuration = founding.configuration(group)
        groups.append(GroupRow(group, configuration.voters, configuration.learners, founding.preferred_leader(group)))
    return members, groups
