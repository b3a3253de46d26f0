"""The state machine of one replica: inputs in, Readies out (Ongaro's thesis; RAFT.md sections 2 and 3).

No clock, no I/O, no threads; chance comes through the constructor. Every input is a plain call that changes memory only; what has to
be written, sent, applied or answered because of it is in the next `take_ready`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wheelsched.raft.config import RaftConfig, TimeoutSource
from wheelsched.raft.configuration import Change, ConfChange, Configuration, Mode, Refused
from wheelsched.raft.faults import fault
from wheelsched.raft.leadership import Leadership
from wheelsched.raft.log import Log, LogReader
from wheelsched.raft.messages import (
    AnyMessage,
    Append,
    AppendResponse,
    Entry,
    EntryKind,
    Heartbeat,
    HeartbeatResponse,
    InstallSnapshot,
    PreVoteRequest,
    PreVoteResponse,
    TimeoutNow,
    VoteRequest,
    VoteResponse,
)
from wheelsched.raft.quorum import VoteResult, vote_result
from wheelsched.raft.reads import ReadResult
from wheelsched.raft.ready import Answer, HardState, PeerStatus, Ready, RestoredState, Role, Status


@dataclass(slots=True)
class _Flight:
    """A Ready that is not durable yet, and what takes effect when it is."""

    number: int
    snapshot: InstallSnapshot | None
    ballot: tuple[int, Role] | None  # the own vote: (term, role it was cast in)


class Raft:
    """One member of one group. Raises `RaftFault` where an invariant of Raft is broken, and nothing else."""

    __slots__ = (
        "_after",
        "_ballot",
        "_emitted",
        "_flights",
        "_grace",
        "_handed",
        "_installing",
        "_now",
        "_read_number",
        "_reads",
        "_ready_number",
        "_rng",
        "_snapshot",
        "_votes",
        "applied_index",
        "commit",
        "config",
        "configuration",
        "election_elapsed",
        "election_timeout",
        "leader",
        "leadership",
        "log",
        "node_id",
        "role",
        "term",
        "vote",
    )

    def __init__(
        self,
        node_id: int,
        config: RaftConfig,
        restored: RestoredState,
        rng: TimeoutSource,
        *,
        reader: LogReader | None = None,
    ) -> None:
        self.node_id = node_id
        self.config = config
        self._rng = rng
        self.term, self.vote = restored.term, restored.vote
        self.commit = max(restored.commit, restored.snapshot_index)
        self.applied_index = max(restored.applied, restored.snapshot_index)
        self.configuration = restored.configuration
        self.log = Log(restored.snapshot_index, restored.snapshot_term, restored.entries, older_terms=restored.older_terms, reader=reader)
        if not self.applied_index <= self.commit <= self.log.last_index:
            fault("restored_state_fits", applied=self.applied_index, commit=self.commit, last=self.log.last_index)
        if self.applied_index < self.log.last_index and not self.log.is_cached(self.applied_index + 1):
            # What is not applied is searched for changes, so it must be at hand.
            fault("unapplied_entries_are_given", applied=self.applied_index, last=self.log.last_index)
        self.role = Role.FOLLOWER
        self.leader = 0
        self.leadership: Leadership | None = None
        self.election_elapsed = 0
        self.election_timeout = self._draw_timeout()
        # The promise that a voter gives to its leader, not to elect another within a timeout, is in memory only. After a restart
        # it is kept by saying nothing for as long (cockroach #7996).
        self._grace = config.election_tick if config.restart_grace and restored.term > 0 else 0
        self._votes: dict[int, bool] = {}
        self._ballot: tuple[int, Role] | None = None
        self._now: list[AnyMessage] = []
        self._after: list[AnyMessage] = []
        self._reads: list[ReadResult] = []
        self._read_number = 0
        self._snapshot: InstallSnapshot | None = None  # received, not yet taken by a Ready
        self._installing = 0  # index of the newest snapshot that is not durable yet, 0 for none
        self._handed = self.applied_index  # handed out for applying up to here
        self._emitted = HardState(self.term, self.vote, self.commit)
        self._ready_number = 0
        self._flights: deque[_Flight] = deque()

    # ---- inputs

    def tick(self) -> None:
        """One unit of time passed."""
        if self._grace:
            self._grace -= 1
        if self.leadership is not None:
            self.leadership.tick()
            return
        self.election_elapsed += 1
        # Where campaigning is not allowed the count goes on: starting it again would renew the promise to a leader that is silent.
        if self.election_elapsed >= self.election_timeout and self._may_campaign():
            self._campaign()

    def campaign(self) -> None:
        """Start an election now, if allowed."""
        if self._may_campaign():
            self._campaign()

    def propose(self, payloads: Sequence[bytes]) -> Answer:
        """Append one entry for each payload; all or none. The caller is told whether, not when, they commit."""
        assert payloads, "nothing proposed"
        return Answer.NOT_LEADER if self.leadership is None else self.leadership.propose(payloads)

    def propose_note(self, payload: bytes) -> Answer:
        """Append an entry that commands nothing: who does not know what it says passes over it."""
        return Answer.NOT_LEADER if self.leadership is None else self.leadership.propose_note(payload)

    def propose_conf(self, changes: Sequence[Change], mode: Mode = Mode.AUTO) -> Answer:
        """Propose a change of configuration; no changes: leave the joint one. Unless accepted, nothing is appended."""
        return Answer.NOT_LEADER if self.leadership is None else self.leadership.propose_conf(changes, mode)

    def read_index(self, ctx: object) -> Answer:
        """Ask for the index at which a linearizable read may be served; the result is in a Ready, or never comes."""
        if self.leadership is None:
            return Answer.NOT_LEADER
        self.leadership.read(ctx)
        return Answer.ACCEPTED

    def transfer(self, to: int) -> Answer:
        """Hand leadership to another voter; given up after one election timeout."""
        return Answer.NOT_LEADER if self.leadership is None else self.leadership.transfer(to)

    def forget_leader(self) -> None:
        """Take the leader for gone: votes may be given at once. Neither term nor timer change."""
        if self.role is Role.FOLLOWER:
            self.leader = 0

    def report_unreachable(self, peer: int) -> None:
        """Messages to the peer were probably lost."""
        if self.leadership is not None:
            self.leadership.report_unreachable(peer)

    def report_snapshot(self, peer: int, ok: bool) -> None:
        """The transfer of a snapshot to the peer ended. Due for every one, or the peer waits for it for ever."""
        if self.leadership is not None:
            self.leadership.report_snapshot(peer, ok)

    def learn_commit(self, index: int, term: int) -> None:
        """A peer has applied this entry: where this log holds that very one, it is committed here as well."""
        self._learn_commit(index, term)

    def apply_conf(self, change: ConfChange) -> Configuration:
        """The driver applies this committed change now; returns the configuration from here on."""
        try:
            self.configuration = self.configuration.apply(change)
        except Refused as error:
            fault("committed_changes_fit", change=change, configuration=self.configuration, code=error.code)
        if self.leadership is not None:
            if self.configuration.is_voter(self.node_id):
                self.leadership.on_configuration()
            else:
                self.step_down()
        return self.configuration

    def applied(self, index: int) -> None:
        """Everything up to `index` is applied."""
        if index > self._handed:
            fault("applies_what_was_handed_out", index=index, handed=self._handed)
        if index <= self.applied_index:
            return
        self.applied_index = index
        if self.leadership is not None:
            self.leadership.on_applied()
        self.log.evict(min(self.applied_index, self.log.durable), self.config.cache_bytes)

    def compacted(self, index: int) -> None:
        """The stored log was cut: it starts behind `index` now."""
        if index > self.applied_index:
            fault("compacts_applied_entries", index=index, applied=self.applied_index)
        self.log.compact(index)

    # ---- work for the driver

    def take_ready(self) -> Ready | None:
        """The next batch of work, None if there is none; it is in flight until `persisted`."""
        if self.leadership is not None:
            self.leadership.flush()
        log, emitted = self.log, self._emitted
        is_promise = self.term != emitted.term or self.vote != emitted.vote
        has_hard_state = is_promise or self.commit != emitted.commit
        can_apply = not self._installing and self._handed < self.commit and self._handed < log.durable
        if not (
            has_hard_state
            or can_apply
            or log.unwritten_from <= log.last_index
            or self._now
            or self._after
            or self._reads
            or self._snapshot is not None
            or self._ballot is not None
        ):
            return None
        committed = self._take_committed() if can_apply else ()
        snapshot, self._snapshot = self._snapshot, None
        entries = log.take_unwritten(snapshot.index if snapshot is not None else 0)
        if has_hard_state:
            self._emitted = HardState(self.term, self.vote, self.commit)
        self._ready_number += 1
        self._flights.append(_Flight(self._ready_number, snapshot, self._ballot))
        ready = Ready(
            number=self._ready_number,
            hard_state=self._emitted if has_hard_state else None,
            entries=entries,
            snapshot=snapshot,
            now=tuple(self._now),
            after=tuple(self._after),
            committed=committed,
            reads=tuple(self._reads),
            must_sync=is_promise or bool(entries) or snapshot is not None,
        )
        self._ballot = None
        self._now, self._after, self._reads = [], [], []
        return ready

    def _take_committed(self) -> tuple[Entry, ...]:
        # Up to what is durable here: applied state must not outlive its entries in a crash.
        last = min(self.commit, self.log.durable)
        if self.config.max_apply_batch:
            last = min(last, self._handed + self.config.max_apply_batch)
        entries = self.log.slice(self._handed + 1, last)
        self._handed = entries[-1].index
        return entries

    def persisted(self, ready: Ready) -> None:
        """Everything in `ready`, and in all before it, is durable. Own vote and own acknowledgement take effect here."""
        if not self._flights or self._flights[0].number != ready.number:
            fault("persisted_in_order", number=ready.number, expected=self._flights[0].number if self._flights else None)
        flight = self._flights.popleft()
        self.log.persisted()
        if flight.snapshot is not None:
            self._installed(flight.snapshot)
        if flight.ballot is not None and flight.ballot == (self.term, self.role):
            self._count_vote(self.node_id, True)
        if self.leadership is not None:
            self.leadership.on_durable(self.log.durable)

    def _installed(self, snapshot: InstallSnapshot) -> None:
        self.applied_index = max(self.applied_index, snapshot.index)
        self.configuration = snapshot.conf
        if self._installing == snapshot.index:
            self._installing = 0

    @property
    def is_installing(self) -> bool:
        """Whether a snapshot was received that is not durable yet."""
        return bool(self._installing)

    def status(self) -> Status:
        leadership = self.leadership
        progress = {}
        if leadership is not None:
            for node_id, peer in leadership.peers.items():
                progress[node_id] = PeerStatus(
                    state=peer.state, match=peer.match, next=peer.next, paused=peer.is_paused, inflight=len(peer.window),
                    pending_snapshot=peer.snapshot_index, recent_active=peer.recent_active,
                )  # fmt: skip
        return Status(
            node_id=self.node_id, role=self.role, term=self.term, vote=self.vote, leader=self.leader, commit=self.commit,
            applied=self.applied_index, durable=self.log.durable, first_index=self.log.first_index, last_index=self.log.last_index,
            last_term=self.log.last_term, configuration=self.configuration, progress=progress,
            transferee=leadership.transferee if leadership is not None else 0,
            waiting_reads=len(leadership.reads) if leadership is not None else 0,
            uncommitted_bytes=leadership.uncommitted_bytes if leadership is not None else 0,
            lease_void=leadership is None or leadership.lease_void, is_installing=self.is_installing,
        )  # fmt: skip

    # ---- for Leadership

    def send_now(self, message: AnyMessage) -> None:
        self._now.append(message)

    def answer_reads(self, results: Sequence[ReadResult]) -> None:
        self._reads.extend(results)

    def next_read_number(self) -> int:
        self._read_number += 1
        return self._read_number

    def commit_to(self, index: int) -> None:
        """Move the commit index up; never past the log, for that would mean that a committed entry is missing here."""
        if index > self.commit:
            if index > self.log.last_index:
                fault("committed_is_in_the_log", commit=index, last=self.log.last_index)
            self.commit = index

    def step_down(self) -> None:
        """Be a follower of nobody in the same term."""
        self._become_follower(self.term, leader=0)

    # ---- terms

    def step(self, message: AnyMessage) -> None:
        """Take a message of any kind from a peer."""
        if message.term != self.term and not self._settle_term(message):
            return
        _HANDLERS[type(message)](self, message)

    def _settle_term(self, message: AnyMessage) -> bool:
        """Act on a term that is not the own one; whether the message is to be handled at all (thesis 3.3)."""
        if message.term < self.term:
            self._answer_older(message)
            return False
        match message:
            case VoteRequest() | PreVoteRequest():
                if not message.force and self._keeps_promise():
                    return False
                if type(message) is VoteRequest:
                    # A request that is refused must not put off the own election, or a node with a short log could by asking
                    # again and again keep those with a longer one from being elected.
                    elapsed = self.election_elapsed if self.leadership is None else 0
                    self._become_follower(message.term, leader=0)
                    self.election_elapsed = elapsed
            case PreVoteResponse(reject=False):
                pass  # it carries the term asked for, in which nobody is yet
            case Append() | Heartbeat() | InstallSnapshot():
                self._become_follower(message.term, leader=message.sender)
            case _:
                self._become_follower(message.term, leader=0)
        return True

    def _keeps_promise(self) -> bool:
        """Whether a leader may still count on this node not electing another (thesis 4.2.3, 6.4.1)."""
        if self._grace:
            return True
        if not self.config.check_quorum or not self.leader:
            return False
        return self.leadership is not None or self.election_elapsed < self.config.election_tick

    def _answer_older(self, message: AnyMessage) -> None:
        match message:
            case Append() | Heartbeat() if (
                self.config.pre_vote or self.config.check_quorum or not self.configuration.is_voter(self.node_id)
            ):
                # Its sender believes to lead. With pre-vote or check-quorum this node, if its term is ahead, can neither follow nor
                # unseat it by asking for votes; told the newer term it steps down (etcd FreeStuckCandidateWithCheckQuorum). Nor can
                # one that is no voter by what it knows, a newcomer that voted for a node which was removed.
                self._after.append(AppendResponse(self.config.group, self.node_id, message.sender, self.term))
            case PreVoteRequest():
                # Else nodes of mixed settings could wait for each other (etcd PreVoteMigration).
                self._respond(message, granted=False)

    def _become_follower(self, term: int, *, leader: int) -> None:
        self._enter(Role.FOLLOWER, term, leader)

    def _enter(self, role: Role, term: int, leader: int) -> None:
        """Change role or term; what belonged to the old one is gone."""
        if term != self.term:
            if term < self.term:
                fault("term_never_falls", term=term, current=self.term)
            self.term = term
            self.vote = 0
        self.role = role
        self.leader = leader
        self.leadership = None
        self._votes = {}
        self.election_elapsed = 0
        self.election_timeout = self._draw_timeout()

    def _draw_timeout(self) -> int:
        return self.config.election_tick + self._rng.randrange(self.config.election_tick)

    # ---- elections

    def _may_campaign(self, *, ordered: bool = False) -> bool:
        if self.leadership is not None or self._installing or not self.configuration.is_voter(self.node_id):
            return False
        if self._grace and not ordered:
            return False
        return not self._has_unapplied_change()

    def _has_unapplied_change(self) -> bool:
        """Whether this node knows a change to be committed but still acts on the configuration before it: elected by a majority
        of that one it could meet a leader elected by the newer one (etcd #7280)."""
        entries = self.log.slice(self.applied_index + 1, self.commit)
        return any(entry.kind == EntryKind.CONFIGURATION for entry in entries)

    def _campaign(self, *, force: bool = False) -> None:
        """Ask for votes, or with pre-vote whether asking would help (thesis 3.4, 9.6). `force`: the leader ordered it."""
        if self.config.pre_vote and not force:
            self._enter(Role.PRECANDIDATE, self.term, leader=0)
            self._request_votes(PreVoteRequest, self.term + 1, force=False)
        else:
            self._stand(force=force)

    def _stand(self, *, force: bool) -> None:
        self._enter(Role.CANDIDATE, self.term + 1, leader=0)
        self.vote = self.node_id
        self._request_votes(VoteRequest, self.term, force=force)

    def _request_votes(self, kind: type[VoteRequest] | type[PreVoteRequest], term: int, *, force: bool) -> None:
        # Sent when term and own vote are durable: a candidate that others elect before that could crash, forget the term, win
        # it again and write a second log in it.
        log, group = self.log, self.config.group
        commit_term = log.term(self.commit) or 0
        for voter in self.configuration.all_voters():
            if voter != self.node_id:
                self._after.append(kind(group, self.node_id, voter, term, log.last_index, log.last_term, force, self.commit, commit_term))
        self._ballot = (self.term, self.role)

    def _on_vote_request(self, message: VoteRequest | PreVoteRequest) -> None:
        if self._grace and not message.force:
            return
        is_free = self.vote == message.sender or (not self.vote and not self.leader)
        if not is_free and type(message) is PreVoteRequest:
            is_free = message.term > self.term
        granted = is_free and self.log.is_up_to_date(message.last_index, message.last_term)
        if granted and type(message) is VoteRequest:
            self.vote = message.sender
            self.election_elapsed = 0
        self._respond(message, granted=granted)
        self._learn_commit(message.commit, message.commit_term)

    def _respond(self, request: VoteRequest | PreVoteRequest, *, granted: bool) -> None:
        kind = VoteResponse if type(request) is VoteRequest else PreVoteResponse
        group, to = self.config.group, request.sender
        if granted:
            self._after.append(kind(group, self.node_id, to, request.term))
        else:
            commit_term = self.log.term(self.commit) or 0
            self._after.append(kind(group, self.node_id, to, self.term, True, self.commit, commit_term))

    def _learn_commit(self, commit: int, commit_term: int) -> None:
        """Move the commit index to one that a peer knows, if this log holds that very entry.

        Cures a group in which nobody can be elected: a promoted learner with the longest log does not know yet that it votes, and
        the others may not vote for anybody with a shorter one (etcd #12359)."""
        if commit <= self.commit or self.leadership is not None or not self.log.has(commit, commit_term):
            return
        self.commit_to(commit)
        if self.role is not Role.FOLLOWER and self._has_unapplied_change():
            self.step_down()

    def _on_vote_response(self, message: VoteResponse) -> None:
        if self.role is Role.CANDIDATE:
            self._count_vote(message.sender, not message.reject)
            if message.reject:
                self._learn_commit(message.commit, message.commit_term)

    def _on_prevote_response(self, message: PreVoteResponse) -> None:
        if self.role is Role.PRECANDIDATE and (message.reject or message.term == self.term + 1):
            self._count_vote(message.sender, not message.reject)
            if message.reject:
                self._learn_commit(message.commit, message.commit_term)

    def _count_vote(self, voter: int, granted: bool) -> None:
        self._votes.setdefault(voter, granted)
        result = vote_result(self.configuration.voters, self.configuration.outgoing, self._votes)
        if result is VoteResult.LOST:
            self.step_down()
        elif result is VoteResult.WON:
            if self.role is Role.PRECANDIDATE:
                self._stand(force=False)
            else:
                self._lead()

    def _lead(self) -> None:
        self._enter(Role.LEADER, self.term, leader=self.node_id)
        self.leadership = Leadership(self)
        self.leadership.take_office()

    def _on_timeout_now(self, message: TimeoutNow) -> None:
        if self.role is Role.FOLLOWER and self._may_campaign(ordered=True):
            self._campaign(force=True)

    # ---- following

    def _follow(self, leader: int) -> None:
        """The leader of this term spoke."""
        if self.leadership is not None:
            fault("one_leader_per_term", term=self.term, own=self.node_id, other=leader)
        if self.role is not Role.FOLLOWER:
            self._become_follower(self.term, leader=leader)
        self.leader = leader
        self.election_elapsed = 0

    def _acknowledge(self, to: int, index: int) -> None:
        self._after.append(AppendResponse(self.config.group, self.node_id, to, self.term, index))

    def _on_append(self, message: Append) -> None:
        """Thesis 3.5: accept what fits behind an entry both hold, else say where the logs may still agree."""
        self._follow(message.sender)
        log, prev_index, entries = self.log, message.prev_index, message.entries
        if prev_index < self.commit:
            self._acknowledge(message.sender, self.commit)
            return
        if log.term(prev_index) != message.prev_term:
            hint_index, hint_term = log.hint_by_term(min(prev_index, log.last_index), message.prev_term)
            self._after.append(
                AppendResponse(self.config.group, self.node_id, message.sender, self.term, prev_index, True, hint_index, hint_term)
            )
            return
        if entries:
            # Only from the first entry that differs: a short old message must not cut off what a later one brought.
            first = prev_index + 1 if prev_index == log.last_index else log.find_conflict(entries)
            if first:
                if first <= self.commit:
                    fault("committed_is_never_cut", first=first, commit=self.commit)
                log.append(entries[first - prev_index - 1 :])
        # Of the message, not of the log: what lies behind may be a tail that the leader does not have.
        last_new = prev_index + len(entries)
        self.commit_to(min(message.commit, last_new))
        self._acknowledge(message.sender, last_new)

    def _on_heartbeat(self, message: Heartbeat) -> None:
        self._follow(message.sender)
        self.commit_to(message.commit)
        self._now.append(HeartbeatResponse(self.config.group, self.node_id, message.sender, self.term, message.read_seq))

    def _on_snapshot(self, message: InstallSnapshot) -> None:
        """Thesis 5: take over a whole state, unless the log leads there already."""
        self._follow(message.sender)
        if message.index <= self.commit or self.node_id not in message.conf.members():
            self._acknowledge(message.sender, self.commit)
        elif self.log.has(message.index, message.snap_term):
            self.commit_to(message.index)
            self._acknowledge(message.sender, self.commit)
        else:
            self.log.restore(message.index, message.snap_term)
            self.commit = self._handed = self._installing = message.index
            self._snapshot = message
            self._acknowledge(message.sender, message.index)

    def _on_append_response(self, message: AppendResponse) -> None:
        if self.leadership is not None:
            self.leadership.on_append_response(message)

    def _on_heartbeat_response(self, message: HeartbeatResponse) -> None:
        if self.leadership is not None:
            self.leadership.on_heartbeat_response(message)


# Each takes the one kind it is listed under.
_HANDLERS: dict[type[AnyMessage], Callable[..., None]] = {
    VoteRequest: Raft._on_vote_request,
    PreVoteRequest: Raft._on_vote_request,
    VoteResponse: Raft._on_vote_response,
    PreVoteResponse: Raft._on_prevote_response,
    Append: Raft._on_append,
    AppendResponse: Raft._on_append_response,
    Heartbeat: Raft._on_heartbeat,
    HeartbeatResponse: Raft._on_heartbeat_response,
    InstallSnapshot: Raft._on_snapshot,
    TimeoutNow: Raft._on_timeout_now,
}
