"""Who leads: noticing that offices and leases begin and end, reads that confirm them, and handing an office over.

A lease is renewed by the same rounds of heartbeats that confirm reads: the leader asks the core to confirm its office, notes when it
asked, and once a majority answered nobody else can be elected until an election timeout after that instant (thesis 6.4.1).
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from wheelsched.core.clock import Clock
from wheelsched.core.errors import InvalidRequest, OutcomeUnknown
from wheelsched.raft import Answer, TimeoutNow
from wheelsched.replica.inboxes import Inboxes
from wheelsched.replica.raft_member import RaftMember, ReadRound
from wheelsched.replica.raft_settings import ReplicaSettings

log = structlog.get_logger()


class Offices:
    """`touch(member)`: its core may have work."""

    def __init__(
        self, clock: Clock, settings: ReplicaSettings, inboxes: Inboxes, touch: Callable[[RaftMember], None],
        on_lead: Callable[[int], None], on_follow: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._clock = clock
        self._settings = settings
        self._inboxes = inboxes
        self._touch = touch
        self._on_lead = on_lead
        self._on_follow = on_follow

    def leads(self, member: RaftMember) -> bool:
        """Whether this node may act for the group at this instant, and whoever acts for it here knows."""
        return member.leading and self.may_lead(member)

    def may_lead(self, member: RaftMember) -> bool:
        leadership = member.raft.leadership
        if leadership is None or leadership.lease_void or member.state.applied_index < leadership.first_own_index:
            return False
        return member.is_alone() or self._clock.mono_ms() < member.lease_until_ms

    def review(self, member: RaftMember) -> None:
        """Notice that an office or a lease began or ended, and let go of what ended with it."""
        raft = member.raft
        if raft.leader:
            member.timeouts.last_leader = raft.leader
        if member.transferring and not (raft.leadership is not None and raft.leadership.transferee):
            self._end_transfer(member)
        office = raft.term if raft.leadership is not None else 0
        if office != member.office:
            had, member.office = member.office, office
            if had:
                self._leave(member)
            member.lease_until_ms = 0
            if office:
                # The first heartbeats carry the first round: what was committed before is applied about when it is confirmed.
                self.ask(member, ReadRound(office, self._clock.mono_ms()))
                self._touch(member)
        if self.may_lead(member) != member.leading:
            self._tell(member, not member.leading)

    def _tell(self, member: RaftMember, leading: bool) -> None:
        member.leading = leading
        log.info("leads" if leading else "follows", group=member.group, term=member.raft.term, leader=member.leader)
        (self._on_lead if leading else self._on_follow)(member.group)

    def _leave(self, member: RaftMember) -> None:
        if member.leading:
            self._tell(member, False)
        self._inboxes.fail(member)
        member.fail_reads(member.not_leader())
        member.fail_change()

    def renew(self, member: RaftMember, now_ms: int) -> None:
        """Ask for the round that renews the lease: the heartbeat that carries it is the one that is due now."""
        if member.raft.leadership is not None:
            self.ask(member, ReadRound(member.raft.term, now_ms))

    def count_lost(self, member: RaftMember) -> None:
        """A tick for a former leader that waits for what became of its entries: not for ever, for it may be cut off."""
        if not member.in_log or member.office:
            member.lost_ticks = 0
            return
        member.lost_ticks += 1
        if member.lost_ticks >= 2 * self._settings.raft.election_tick:
            detail = f"the leader of group {member.group} changed while the change was on its way; repeat it with the same key"
            self._inboxes.fail_in_log(member.take_all_waiting(), OutcomeUnknown(detail))

    # Reads.

    def ask(self, member: RaftMember, read: ReadRound) -> None:
        member.rounds[read] = None
        member.raft.read_index(read)

    def ask_reads(self, member: RaftMember) -> None:
        """All reads that came since the last turn share one round."""
        if member.reads and member.raft.leadership is not None:
            waiting, member.reads = member.reads, []
            self.ask(member, ReadRound(member.raft.term, self._clock.mono_ms(), waiting))

    def on_read(self, member: RaftMember, read: ReadRound, index: int) -> None:
        """A majority confirmed the office after the round began; its reads may be answered once `index` is applied."""
        member.rounds.pop(read, None)
        if read.term == member.raft.term and member.raft.leadership is not None:
            member.lease_until_ms = max(member.lease_until_ms, read.at_ms + self._settings.lease_ms)
        if read.waiting:
            member.awaiting_apply.append((index, read.waiting))
            member.settle_reads()
        self.review(member)

    # Handing over.

    def transfer(self, member: RaftMember, to: int) -> None:
        answer = member.raft.transfer(to)
        if answer is Answer.NOT_LEADER:
            raise member.not_leader()
        if answer is Answer.REFUSED:
            raise InvalidRequest(f"node {to} cannot take over group {member.group}: it is no voter of it, or is taking over already")
        member.transferring = to
        self.review(member)  # a level successor was told to stand at once, and with that the lease is gone
        self._touch(member)

    def _end_transfer(self, member: RaftMember) -> None:
        """A transfer ended. Where this node stayed in office after telling the other to stand, its lease is void for as long as the term
        lasts: it has itself elected anew, which takes a round, and its voters' promise to it does not stand in the way."""
        member.transferring = 0
        raft = member.raft
        if raft.leadership is not None and raft.leadership.lease_void:
            log.warning("transfer_failed", group=member.group, term=raft.term)
            raft.step_down()
            raft.step(TimeoutNow(member.group, raft.node_id, raft.node_id, raft.term))
            self._touch(member)

    def successor(self, member: RaftMember) -> int:
        """The most level of the other voters that answer, 0 for none."""
        leadership = member.raft.leadership
        if leadership is None:
            return 0
        voters = member.raft.configuration.voters
        heard = [
            (-peer.match, node)
            for node, peer in leadership.peers.items()
            if node in voters and node != member.raft.node_id and peer.recent_active
        ]
        return min(heard)[1] if heard else 0
