"""What becomes of a member that left its group: proof that it did, its end, and what it still says afterwards.

A node that is no member of a group any more may never hear so: once the change is applied its leader does not speak to it. So whoever
has applied a configuration without it says so where it asks for votes (a voter that hears nobody does, all the time; one without a vote
asks now and then). The answer is an `InstallSnapshot` without a snapshot, a *farewell*: as of this index, which is applied and so
committed, you are not one of us. An older release drops it.

It proves that nobody counts on the replica if nothing in its log that may come to be lies behind that index: the log ends before, or
has another entry there, so that what follows is lost. All it ever acknowledged to any purpose is then committed without it. Where its
log has that very entry, it learns that it is committed. What a replica applied itself proves the same where no change waits in its log.
Either way one batch then drops rows and log, and makes the group blank as for a node that never held it, but for term and vote, and a
row `L` that says when it left.

Until a snapshot from behind that index makes it a member again it gives no vote: with an empty log it would find everybody's good enough,
and a candidate that lags, and counts on it still, could win an office without what was committed. That much it tells such a candidate:
up to where everything is committed, which may be all that it has to know to do without this node's vote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec
import structlog

from wheelsched.core.clock import Rng
from wheelsched.model.keys import META_GROUP
from wheelsched.model.rows import GroupState
from wheelsched.raft import (
    AnyMessage,
    Configuration,
    EntryKind,
    Heartbeat,
    InstallSnapshot,
    PreVoteRequest,
    PreVoteResponse,
    VoteRequest,
)
from wheelsched.replica.loading import make_raft
from wheelsched.replica.raft_member import Left, RaftMember
from wheelsched.replica.raft_settings import ReplicaSettings
from wheelsched.replica.snapshots import state_ranges
from wheelsched.store import Store
from wheelsched.store.raftlog import HardState, Puts, RaftLog, Ranges

log = structlog.get_logger()

LOOK_MS: Final = 1_000
# A member without a vote that hears nothing for this long asks whether it is one.
ASK_MS: Final = 10_000
_NOBODY: Final = Configuration()

Send = Callable[[int, int, AnyMessage], None]


class Leaving:
    """`send(node, group, message)`; `on_left(member)`: its rows are gone. One group at a time, and one a second."""

    def __init__(
        self, store: Store, raft_log: RaftLog, settings: ReplicaSettings, rng: Rng, send: Send, on_left: Callable[[RaftMember], None]
    ) -> None:  # fmt: skip
        self._store = store
        self._log = raft_log
        self._settings = settings
        self._rng = rng
        self._send = send
        self._on_left = on_left

    # ---- what is said

    def admit(self, member: RaftMember, message: AnyMessage) -> AnyMessage | None:
        """What of a message is for the core; the rest is answered here."""
        if member.left is not None:
            return self._admit_of_left(member, member.left, message)
        if type(message) is PreVoteRequest:
            raft, state = member.raft, member.state
            # While a snapshot is being installed the core acts on the configuration of before, and the state is the one of after.
            is_one = state.applied_index == raft.applied_index and not raft.is_installing
            if is_one and not raft.configuration.is_joint:
                self._bid_farewell(member, Left(state.applied_index, state.applied_term, raft.configuration), message)
        return message

    def _admit_of_left(self, member: RaftMember, left: Left, message: AnyMessage) -> AnyMessage | None:
        kind = type(message)
        if kind is VoteRequest:
            return None
        if kind is PreVoteRequest:
            assert isinstance(message, PreVoteRequest)
            if not self._bid_farewell(member, left, message):
                # In the term it stands in, not in the one it asks for.
                own_id, to = member.raft.node_id, message.sender
                refusal = PreVoteResponse(member.group, own_id, to, message.term - 1, True, left.index, left.term)
                self._send(to, member.group, refusal)
            return None
        if kind is Heartbeat:
            # A leader that did not hear yet that everything is gone here would have it committed.
            return msgspec.structs.replace(message, commit=0)
        return message

    def _bid_farewell(self, member: RaftMember, left: Left, request: PreVoteRequest) -> bool:
        """Tell who asks for a vote that it was no member then; whether it was told."""
        voters = left.configuration.voters
        if not voters or request.sender in left.configuration.members():
            return False
        self._send(request.sender, member.group, farewell(member, left, request.sender))
        return True

    def tell_removed(self, member: RaftMember, before: Configuration, index: int, term: int) -> None:
        """A leader has applied a change: who is no member any more hears it from there, as far as it can be reached."""
        after = member.raft.configuration
        for node in before.members():
            if not after.is_joint and node not in after.members() and node != member.raft.node_id:
                self._send(node, member.group, farewell(member, Left(index, term, after), node))

    def hear(self, member: RaftMember, message: InstallSnapshot) -> None:
        """A farewell."""
        if member.left is None:
            member.farewell = Left(message.index, message.snap_term, message.conf)
            member.raft.learn_commit(message.index, message.snap_term)

    # ---- what is done

    def look(self, members: Iterable[RaftMember], now_ms: int, is_at_work: Callable[[RaftMember], bool]) -> None:
        """Drop one group that this node left, `leave_ms` after that was known; ask where it may have left. `is_at_work(member)`: its
        rows are read or written by what is under way. To be called once a second, before the cores are asked for work."""
        is_done = False
        for member in members:
            if member.group == META_GROUP or member.left is not None or not member.raft.log.last_index:
                # A node that is removed from the meta group is removed altogether, and stops.
                continue
            left = _left(member)
            if left is None:
                member.leaves_at_ms = 0
                self._ask(member, now_ms)
            elif not member.leaves_at_ms:
                member.leaves_at_ms = now_ms + self._settings.leave_ms
            elif not is_done and now_ms >= member.leaves_at_ms and _is_at_rest(member) and not is_at_work(member):
                self._leave(member, left)
                is_done = True

    def _ask(self, member: RaftMember, now_ms: int) -> None:
        raft = member.raft
        silent_ms = raft.election_elapsed * self._settings.tick_ms
        if raft.leadership is not None or raft.configuration.is_voter(raft.node_id) or silent_ms < ASK_MS or now_ms < member.asks_at_ms:
            return
        member.asks_at_ms = now_ms + ASK_MS
        commit_term = raft.log.term(raft.commit) or 0
        for voter in raft.configuration.all_voters():
            # Who grants it grants nothing: a pre-vote changes nobody, and this core, which does not stand, takes no notice.
            request = PreVoteRequest(
                member.group, raft.node_id, voter, raft.term + 1, raft.log.last_index, raft.log.last_term, False, raft.commit, commit_term
            )
            self._send(voter, member.group, request)

    def _leave(self, member: RaftMember, left: Left) -> None:
        group, raft = member.group, member.raft
        hard = HardState(raft.term, raft.vote, 0)
        puts: Puts = {}
        ranges: Ranges = state_ranges(group)
        self._log.leave(puts, ranges, group, hard, _NOBODY.encode(), left.encode())
        self._store.write(puts, ranges)
        log.info("group_left", group=group, index=left.index, voters=left.configuration.voters)
        member.state = GroupState()
        member.counts.clear()
        member.left, member.farewell, member.leaves_at_ms = left, None, 0
        member.raft, member.timeouts = make_raft(self._log, group, raft.node_id, self._settings, self._rng, _NOBODY, member.state)
        self._on_left(member)


def farewell(member: RaftMember, left: Left, to: int) -> InstallSnapshot:
    """What proves to a node that it is no member."""
    raft = member.raft
    return InstallSnapshot(member.group, raft.node_id, to, raft.term, left.index, left.term, left.configuration)


def is_farewell(message: InstallSnapshot) -> bool:
    conf = message.conf
    return bool(conf.voters) and not conf.is_joint and message.to not in conf.members()


def _left(member: RaftMember) -> Left | None:
    """How this node left the group, where that is proven and nobody can count on what it holds."""
    raft = member.raft
    if raft.leadership is not None or raft.is_installing:
        return None
    told = member.farewell
    if told is not None and (raft.log.last_index <= told.index or raft.log.term(told.index) not in (None, told.term)):
        return told
    own, state = raft.configuration, member.state
    if not own.voters or own.is_joint or raft.node_id in own.members() or state.applied_index != raft.applied_index:
        return None
    # What is not applied might make it a member again, which others would know before this node does.
    unapplied = raft.log.slice(state.applied_index + 1, raft.log.last_index)
    if any(entry.kind == EntryKind.CONFIGURATION for entry in unapplied):
        return None
    return Left(state.applied_index, state.applied_term, own)


def _is_at_rest(member: RaftMember) -> bool:
    """Nothing is on its way to the disk, into rows or to anybody who waits."""
    return not (
        member.leading or member.pending or member.in_log or member.inbox or member.incoming is not None
        or member.installation is not None or member.awaiting_apply or member.reads
    )  # fmt: skip
