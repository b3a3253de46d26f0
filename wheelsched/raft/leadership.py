"""A leader's office: what it knows about its peers, and everything that ends when it steps down.

Made on election and thrown away on step-down, so that unanswered reads, a pending transfer and flow control cannot outlive it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from wheelsched.raft.config import ReadMode
from wheelsched.raft.configuration import LEAVE_JOINT, Change, ConfChange, Mode, Refused, encode_change, plan
from wheelsched.raft.faults import fault
from wheelsched.raft.messages import (
    Append,
    AppendResponse,
    Entry,
    EntryKind,
    Heartbeat,
    HeartbeatResponse,
    InstallSnapshot,
    TimeoutNow,
    make_entry,
)
from wheelsched.raft.progress import PeerState, Progress, Window
from wheelsched.raft.quorum import VoteResult, committed_index, vote_result
from wheelsched.raft.reads import ReadResult, WaitingReads
from wheelsched.raft.ready import Answer

if TYPE_CHECKING:
    from wheelsched.raft.raft import Raft


class Leadership:
    """One node's term as leader. `peers` holds every member in id order, the leader itself included while it is one."""

    __slots__ = (
        "_beat_due",
        "_config",
        "_heartbeat_elapsed",
        "_quorum_elapsed",
        "_raft",
        "_snapshots_sent",
        "_transfer_elapsed",
        "first_own_index",
        "lease_void",
        "peers",
        "pending_conf_index",
        "reads",
        "transferee",
        "uncommitted_bytes",
    )

    def __init__(self, raft: Raft) -> None:
        self._raft = raft
        self._config = raft.config
        self._heartbeat_elapsed = self._quorum_elapsed = self._transfer_elapsed = 0
        self._beat_due = False
        self._snapshots_sent = 0
        self.reads = WaitingReads()
        self.transferee = 0
        self.lease_void = False
        self.first_own_index = raft.log.last_index + 1
        # Unapplied entries of former terms may hold a change that is pending, so none is taken before the own empty entry is
        # applied: by then everything before it is. Where all is applied there is nothing to wait for: a configuration takes effect
        # when applied, so a change that another leader appended and lost was never anybody's configuration. (Where it takes
        # effect when appended, waiting would be needed here too: Ongaro's raft-dev post of 2015 on single-step changes.)
        self.pending_conf_index = self.first_own_index if raft.log.last_index > raft.applied_index else 0
        tail = raft.log.slice(raft.commit + 1, raft.log.last_index)
        self.uncommitted_bytes = sum(_weight(entry) for entry in tail)
        self.peers = {
            node_id: Progress(match=0, next=raft.log.last_index + 1, window=self._window()) for node_id in raft.configuration.members()
        }
        own = self.peers[raft.node_id]
        own.recent_active = True
        own.match = raft.log.durable

    def take_office(self) -> None:
        """Append an empty entry of the own term: only by it can earlier ones be committed (thesis 3.6.2)."""
        self._append([(EntryKind.EMPTY, b"")])

    def _window(self) -> Window:
        return Window(self._config.max_inflight, self._config.max_inflight_bytes)

    @property
    def has_committed_own(self) -> bool:
        """Whether an entry of this term is committed, so that the commit index is as high as any former leader's."""
        return self._raft.commit >= self.first_own_index

    # ---- requests

    def propose(self, payloads: Sequence[bytes]) -> Answer:
        if self.transferee or self._raft.node_id not in self.peers:
            return Answer.DROPPED
        size = sum(map(len, payloads))
        limit = self._config.max_uncommitted
        # An empty tail takes any size, else a large entry could never be proposed.
        if limit and self.uncommitted_bytes and self.uncommitted_bytes + size > limit:
            return Answer.DROPPED
        self.uncommitted_bytes += size
        self._append([(EntryKind.COMMANDS, payload) for payload in payloads])
        return Answer.ACCEPTED

    def propose_note(self, payload: bytes) -> Answer:
        if self.transferee or self._raft.node_id not in self.peers:
            return Answer.DROPPED
        self._append([(EntryKind.EMPTY, payload)])
        return Answer.ACCEPTED

    def propose_conf(self, changes: Sequence[Change], mode: Mode) -> Answer:
        if self.transferee:
            return Answer.DROPPED
        if self._raft.applied_index < self.pending_conf_index:
            return Answer.REFUSED
        try:
            change = plan(self._raft.configuration, changes, mode)
        except Refused:
            return Answer.REFUSED
        self._append_change(change)
        return Answer.ACCEPTED

    def _append_change(self, change: ConfChange) -> None:
        self.pending_conf_index = self._raft.log.last_index + 1
        self._append([(EntryKind.CONFIGURATION, encode_change(change))])

    def read(self, ctx: object) -> None:
        """Answer or queue a read; ReadIndex (thesis 6.4)."""
        raft, known = self._raft, self.has_committed_own
        if known and self._config.read_mode is ReadMode.LEASE and not self.lease_void:
            raft.answer_reads([ReadResult(ctx, raft.commit)])
            return
        self.reads.add(raft.next_read_number(), ctx, raft.commit if known else None)
        self._beat_due = True
        self._answer_reads()

    def transfer(self, to: int) -> Answer:
        """Hand the office to a voter: bring it level, then tell it to campaign (thesis 3.10). To itself: end a transfer."""
        if to == self._raft.node_id:
            self._end_transfer()
            return Answer.REFUSED
        if to == self.transferee or not self._raft.configuration.is_voter(to):
            return Answer.REFUSED
        self.transferee = to
        self._transfer_elapsed = 0
        peer = self.peers[to]
        if peer.match == self._raft.log.last_index:
            self._order_campaign(to)
        else:
            self._send_append(to, peer, allow_empty=True)
        return Answer.ACCEPTED

    def _order_campaign(self, to: int) -> None:
        # From now on somebody can be elected although every voter heard of this leader just now, and at any later time, for the
        # order may be delayed: leases of this term are worth nothing any more (tikv #1593).
        self.lease_void = True
        raft = self._raft
        raft.send_now(TimeoutNow(raft.config.group, raft.node_id, to, raft.term))

    def _end_transfer(self) -> None:
        if self.transferee:
            self.transferee = 0
            self._leave_joint_if_due()

    # ---- time

    def tick(self) -> None:
        if self.transferee:
            self._transfer_elapsed += 1
            if self._transfer_elapsed >= self._config.election_tick:
                self._end_transfer()
        self._quorum_elapsed += 1
        if self._quorum_elapsed >= self._config.election_tick:
            self._quorum_elapsed = 0
            if self._config.check_quorum and not self._heard_quorum():
                self._raft.step_down()
                return
        self._heartbeat_elapsed += 1
        if self._heartbeat_elapsed >= self._config.heartbeat_tick:
            self._beat()

    def _heard_quorum(self) -> bool:
        """Whether a majority of each half was heard since the last call (thesis 6.2)."""
        raft = self._raft
        active = {node_id: peer.recent_active for node_id, peer in self.peers.items()}
        for node_id, peer in self.peers.items():
            peer.recent_active = node_id == raft.node_id
        return vote_result(raft.configuration.voters, raft.configuration.outgoing, active) is VoteResult.WON

    def _beat(self) -> None:
        self._heartbeat_elapsed = 0
        self._beat_due = False
        raft = self._raft
        group, own_id, term, commit, newest = raft.config.group, raft.node_id, raft.term, raft.commit, self.reads.newest
        for node_id, peer in self.peers.items():
            if node_id != own_id:
                # Not the commit index itself: the peer's log may differ from ours behind `match`.
                told = min(commit, peer.match)
                peer.sent_commit = max(peer.sent_commit, told)
                raft.send_now(Heartbeat(group, own_id, node_id, term, told, newest))

    def flush(self) -> None:
        """Send what waited for the end of the turn: one round of heartbeats confirms all its reads."""
        if self._beat_due and len(self.reads):
            self._beat()

    # ---- answers

    def on_append_response(self, message: AppendResponse) -> None:
        peer = self.peers.get(message.sender)
        if peer is None:
            return
        peer.recent_active = True
        if message.reject:
            self._on_refusal(message, peer)
            return
        raft = self._raft
        if message.index > raft.log.last_index:
            fault("acknowledged_was_sent", peer=message.sender, index=message.index, last=raft.log.last_index)
        # An answer at `match` is no news but shows that a probed peer is there and level, so streaming can start.
        if not peer.acknowledged(message.index) and not (peer.state is PeerState.PROBE and message.index == peer.match):
            return
        if peer.state is PeerState.REPLICATE:
            peer.window.free_up_to(message.index)
        elif peer.state is PeerState.PROBE or peer.match >= raft.log.start_index:
            # Whatever snapshot it installed, the log goes on from there.
            peer.replicate()
        if self.advance_commit():
            self._broadcast()
        elif peer.wants_commit(raft.commit):
            self._send_append(message.sender, peer, allow_empty=True)
        while self._send_append(message.sender, peer, allow_empty=False):
            pass
        if message.sender == self.transferee and peer.match == raft.log.last_index:
            self._order_campaign(message.sender)

    def _on_refusal(self, message: AppendResponse, peer: Progress) -> None:
        hint = message.hint_index
        if not hint and not message.hint_term and self._raft.log.start_index and peer.match:
            # Where every log begins behind a snapshot, one that ends at 0 is blank: the peer had left the group, dropped everything,
            # and an acknowledgement of before that came late. Nothing above it is acknowledged before the next snapshot.
            peer.lost()
            self._send_append(message.sender, peer, allow_empty=True)
            return
        if message.hint_term:
            # Own entries of terms above the hint's cannot be in a log whose last candidate has that term: skip them too.
            hint, _ = self._raft.log.hint_by_term(hint, message.hint_term)
        if peer.refused(message.index, hint):
            if peer.state is PeerState.REPLICATE:
                peer.probe()
            self._send_append(message.sender, peer, allow_empty=True)

    def on_heartbeat_response(self, message: HeartbeatResponse) -> None:
        peer = self.peers.get(message.sender)
        if peer is None:
            return
        peer.recent_active = True
        peer.is_waiting = False
        # Behind, or probed: an append, empty where the window is full, finds out whether what was in flight is lost.
        if peer.match < self._raft.log.last_index or peer.state is PeerState.PROBE:
            self._send_append(message.sender, peer, allow_empty=True)
        if message.read_seq > peer.read_seq:
            peer.read_seq = message.read_seq
            self._answer_reads()

    def on_durable(self, index: int) -> None:
        """The own log is durable up to `index`: the leader counts itself only now."""
        own = self.peers.get(self._raft.node_id)
        if own is not None and own.acknowledged(index) and self.advance_commit():
            self._broadcast()

    def on_applied(self) -> None:
        self._leave_joint_if_due()

    def on_configuration(self) -> None:
        """A change was applied: another set of peers, perhaps a smaller quorum."""
        raft = self._raft
        members = raft.configuration.members()
        # A new peer counts as heard of, or the next quorum check could come before it had a chance to answer. It is probed from
        # the last entry on, so that the first append carries something and its answer is waited for.
        self.peers = {
            node_id: self.peers.get(node_id)
            or Progress(match=0, next=max(raft.log.last_index, 1), window=self._window(), recent_active=True)
            for node_id in members
        }
        if self.advance_commit():
            self._broadcast()
        else:
            for node_id, peer in self.peers.items():
                self._send_append(node_id, peer, allow_empty=False)
        self._answer_reads()
        if self.transferee and not raft.configuration.is_voter(self.transferee):
            self._end_transfer()

    def _leave_joint_if_due(self) -> None:
        """Propose the automatic exit from a joint configuration (thesis 4.3), once nothing stands in its way."""
        raft = self._raft
        if raft.configuration.auto_leave and not self.transferee and raft.applied_index >= self.pending_conf_index:
            self._append_change(LEAVE_JOINT)

    # ---- hints from the transport

    def report_unreachable(self, node_id: int) -> None:
        peer = self.peers.get(node_id)
        if peer is not None and peer.state is PeerState.REPLICATE:
            peer.probe()

    def report_snapshot(self, node_id: int, ok: bool) -> None:
        peer = self.peers.get(node_id)
        if peer is None or peer.state is not PeerState.SNAPSHOT:
            return
        if ok:
            peer.probe()
        else:
            peer.snapshot_failed()
        # Its acknowledgement may be on its way, or it may be as unreachable as before: the next sign of life says which.
        peer.is_waiting = True

    # ---- replication

    def _append(self, contents: Sequence[tuple[EntryKind, bytes]]) -> None:
        raft = self._raft
        group, term, index = raft.config.group, raft.term, raft.log.last_index
        entries: list[Entry] = []
        for kind, payload in contents:
            index += 1
            entries.append(make_entry(group, index, term, kind, payload))
        raft.log.append(entries)
        self._broadcast()

    def _broadcast(self) -> None:
        for node_id, peer in self.peers.items():
            self._send_append(node_id, peer, allow_empty=True)

    def _send_append(self, to: int, peer: Progress, *, allow_empty: bool) -> bool:
        """Send one append or snapshot if flow control lets it; whether something was sent."""
        raft = self._raft
        if to == raft.node_id or peer.is_waiting or peer.state is PeerState.SNAPSHOT:
            return False
        log, prev_index = raft.log, peer.next - 1
        prev_term = log.term(prev_index)
        if prev_term is None:
            return self._send_snapshot(to, peer)
        entries: tuple[Entry, ...] = ()
        if peer.state is PeerState.PROBE or not peer.window.is_full:
            entries = log.slice(peer.next, log.last_index, self._config.max_msg_bytes)
        if not entries and not allow_empty:
            return False
        raft.send_now(Append(raft.config.group, raft.node_id, to, raft.term, prev_index, prev_term, entries, raft.commit))
        peer.sent(len(entries), sum([len(entry.payload) for entry in entries]))
        peer.sent_commit = max(peer.sent_commit, raft.commit)
        return True

    def _send_snapshot(self, to: int, peer: Progress) -> bool:
        # A peer that is silent would hold a snapshot, and the log behind it, for nothing.
        if not peer.recent_active:
            return False
        raft = self._raft
        term = raft.log.term(raft.applied_index)
        if term is None:
            fault("applied_is_in_the_log", applied=raft.applied_index, start=raft.log.start_index)
        self._snapshots_sent += 1
        raft.send_now(
            InstallSnapshot(
                raft.config.group, raft.node_id, to, raft.term, raft.applied_index, term, raft.configuration, self._snapshots_sent
            )
        )
        peer.send_snapshot(raft.applied_index)
        return True

    def advance_commit(self) -> bool:
        """Commit what majorities of both halves hold, if the last of it is of the own term: an older entry that a majority holds
        can still be replaced (thesis 3.6.2, figure 3.7)."""
        raft = self._raft
        conf = raft.configuration
        index = committed_index(conf.voters, conf.outgoing, {node_id: peer.match for node_id, peer in self.peers.items()})
        if index is None or index <= raft.commit or raft.log.term(index) != raft.term:
            return False
        is_first = not self.has_committed_own
        for entry in raft.log.slice(raft.commit + 1, index):
            self.uncommitted_bytes -= _weight(entry)
        raft.commit_to(index)
        if is_first:
            self.reads.settle_index(index)
        self._answer_reads()
        return True

    def _answer_reads(self) -> None:
        if not len(self.reads) or not self.has_committed_own:
            return
        raft = self._raft
        acked = {node_id: peer.read_seq for node_id, peer in self.peers.items()}
        acked[raft.node_id] = self.reads.newest
        confirmed = committed_index(raft.configuration.voters, raft.configuration.outgoing, acked)
        if confirmed:
            raft.answer_reads(self.reads.take_confirmed(confirmed))


def _weight(entry: Entry) -> int:
    """Bytes that count against the uncommitted limit: changes and empty entries do not, so that a full tail cannot block them."""
    return len(entry.payload) if entry.kind == EntryKind.COMMANDS else 0
