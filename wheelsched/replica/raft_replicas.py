"""One loop for all groups of the node, each replicated by Raft: step messages, cut entries, write, send, sync, apply, answer.

A turn is synchronous; what it does, in this order, is `_turn`. All groups share one batch and one fsync, and everything for one peer
leaves in one `send`. Turns go on while an fsync is under way (pipelining); new entries are cut only when the ones before them are
durable, so load makes entries larger, not fsyncs more frequent (group commit).

`leads(group)`: this node may act for the group. It holds from the moment that everything committed before its term is applied, while a
majority is known to have heard of it so lately that nobody else can be elected (thesis 6.4.1). The lease makes nothing true: it only
lets effects out. Where it ends `on_follow` is called before anything else happens, where it begins `on_lead`; in between every applied
entry's effects are given to `on_effects`. So whoever builds its memory from the rows in `on_lead` misses nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Final

import msgspec
import structlog

from wheelsched.core.clock import Clock, Rng
from wheelsched.core.errors import InvalidRequest, OutcomeUnknown, Unavailable
from wheelsched.core.invariants import invariant
from wheelsched.core.limits import ENTRY_BYTES_MAX, ENTRY_COMMANDS_MAX, INBOX_BYTES_MAX, INBOX_COMMANDS_MAX
from wheelsched.model.commands import COMMAND_VERSION, AnyCommand, Claim, Entry, Expire, Fire, decode_entry, encode_entry
from wheelsched.model.effects import Effect
from wheelsched.model.keys import META_GROUP, RAFT_LOG, RAFT_META
from wheelsched.model.rows import JobState
from wheelsched.raft import (
    Answer,
    AnyMessage,
    Append,
    Change,
    ChangeKind,
    Configuration,
    EntryKind,
    InstallSnapshot,
    PeerState,
    Raft,
    RaftConfig,
    Ready,
    RestoredState,
    TimeoutNow,
    decode_change,
    decode_configuration,
    is_sound,
    make_entry,
)
from wheelsched.raft import Entry as RaftEntry
from wheelsched.replica.applying import Applier, EffectSink, ToApply
from wheelsched.replica.membership import check_change
from wheelsched.replica.peers import Peers
from wheelsched.replica.proposals import Batch, Proposal, bounded_by, command_bytes, may_be_due
from wheelsched.replica.raft_member import (
    BandedTimeouts,
    ConfigurationChange,
    InLog,
    Installation,
    RaftMember,
    ReadRound,
    matches,
)
from wheelsched.replica.snapshots import (
    SMALL_ROWS_MAX,
    Copying,
    IncomingSnapshot,
    SnapshotRefused,
    SnapshotView,
    described,
    merge,
    staged_range,
    state_ranges,
)
from wheelsched.store import Store
from wheelsched.store.raftlog import HardState, Puts, RaftLog, Ranges

log = structlog.get_logger()

# The loop never starves sockets and timers: what is left is first in the next turn.
MESSAGES_A_TURN_MAX, DRAIN_BUDGET_MS = 1_000, 5
APPLY_BUDGET_MS = 5
APPLY_AHEAD = 32  # entries looked at for one batch
# Turns written and not durable. Behind a disk that slow nothing is taken any more, heartbeats included.
TURNS_UNSYNCED_MAX = 8
INBOUND_MESSAGES_MAX = 20_000
# No proposals for a group that is so far behind in applying.
APPLY_BACKLOG_MAX = 20_000
TRANSFERS_MAX = 2  # snapshots on their way, in each direction
# A pass takes what the one before made possible without an fsync: an election without rivals takes three.
PASSES_MAX = 8
STOP_WAIT_MS = 2_000
_COMMANDS, _CONFIGURATION = EntryKind.COMMANDS, EntryKind.CONFIGURATION
# What is proposed because of time and memory that only the one leader has (RAFT.md 9).
_BY_LEASE: Final = (Fire, Claim, Expire)


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """`lease_reads`: a read barrier trusts the lease instead of asking a majority; off, for a lease makes nothing true.

    `compact_*`: past these the older half of the applied log goes; `keep_*`: how much stays for a peer that answers and lags."""

    tick_ms: int = 50
    raft: RaftConfig = field(default_factory=RaftConfig)
    lease_reads: bool = False
    voters_min: int = 3
    compact_entries: int = 20_000
    compact_bytes: int = 64 * 1024 * 1024
    keep_entries: int = 100_000
    keep_bytes: int = 128 * 1024 * 1024
    small_snapshot_rows: int = SMALL_ROWS_MAX

    @property
    def election_ms(self) -> int:
        """The shortest election timeout."""
        return self.raft.election_tick * self.tick_ms

    @property
    def lease_ms(self) -> int:
        """How long after it asked a leader may trust that nobody else was elected: clocks may part by 10 %, and a voter counts ticks, so
        its timeout may be one short."""
        return self.election_ms - self.election_ms // 10 - self.tick_ms


@dataclass(frozen=True, slots=True)
class PeerProgress:
    state: PeerState
    match: int
    is_heard: bool


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """A frozen look at one group. `leader`: None where nobody is known; `peers`: of a leader only."""

    group: int
    role: str
    term: int
    leader: int | None
    leads: bool
    commit: int
    applied: int
    first_index: int
    last_index: int
    log_bytes: int
    configuration: Configuration
    transferee: int
    is_installing: bool
    peers: dict[int, PeerProgress]


def _ignore_group(_group: int) -> None:
    pass


class RaftReplicas:
    """All groups of this node. `on_effects(group, effects)` is called once for each applied entry while this node leads the group, before
    the entry's replies; `on_lead(group)` and `on_follow(group)` where that begins and ends; `on_replaced(group)` where a snapshot took the
    place of all rows of a group. All are plain functions and must not raise."""

    def __init__(
        self,
        store: Store,
        raft_log: RaftLog,
        clock: Clock,
        rng: Rng,
        peers: Peers,
        node_id: int,
        groups: Sequence[int],
        *,
        first_configuration: Callable[[int], Configuration],
        on_effects: EffectSink,
        on_lead: Callable[[int], None] = _ignore_group,
        on_follow: Callable[[int], None] = _ignore_group,
        on_replaced: Callable[[int], None] = _ignore_group,
        settings: ReplicaSettings | None = None,
    ) -> None:
        """`first_configuration(group)`: its members when the cluster was made; asked for a group that has none on record. One without
        voters: this node waits for a snapshot. Finishes what a crash left of an installation."""
        self.node_id = node_id
        self.settings = settings or ReplicaSettings()
        self._store = store
        self._log = raft_log
        self._clock = clock
        self._rng = rng
        self._peers = peers
        self._on_effects = on_effects
        self._on_lead = on_lead
        self._on_follow = on_follow
        self._on_replaced = on_replaced
        self._applier = Applier(store, raft_log, clock, on_effects=self._give_effects)
        for group in groups:
            self._finish_installing(group)
        self._members = {group: self._load(group, first_configuration) for group in groups}
        self._inbound: deque[tuple[RaftMember, AnyMessage]] = deque()
        self._outbox: dict[int, list[tuple[int, AnyMessage]]] = {}
        self._dirty: dict[int, None] = {}  # groups whose core may have work
        self._to_apply: deque[ToApply] = deque()
        self._busy: dict[int, None] = {}  # groups with something in their inbox, the first to be served first
        self._installing: dict[int, None] = {}
        self._sending: dict[tuple[int, int], int] = {}  # (group, node) -> index of the snapshot on its way
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._sync_wanted = asyncio.Event()
        self._tick_due = False
        self._written_turn = self._synced_turn = 0  # turns that need an fsync
        self._cut_turn = 0  # the last of them that holds entries cut here
        self._sync_started_ms: int | None = None
        self._inbox_count = self._inbox_bytes = 0
        self._in_log_count = 0
        self._incoming_count = 0
        self._stopping = False
        self._stop_at_ms = 0
        self.turn_count = 0
        self.entry_count = 0
        self.dropped_count = 0  # messages of others that were not fit to be stepped
        self.on_commit_ms: Callable[[float], None] = lambda _ms: None

    # ---- the start

    def _load(self, group: int, first_configuration: Callable[[int], Configuration]) -> RaftMember:
        raft_log, settings = self._log, self.settings
        row = raft_log.configuration(group)
        configuration = first_configuration(group) if row is None else decode_configuration(row)
        state = raft_log.group_state(group)
        first, last, hard = raft_log.first_index(group), raft_log.last_index(group), raft_log.hard_state(group)
        # At least one entry, where there is one: by it the core knows where the log ends.
        from_index = min(state.applied_index + 1, last)
        entries: Sequence[RaftEntry] = ()
        if from_index >= first:
            entries = self._read_entries(group, from_index, last)
        restored = RestoredState(
            configuration, first - 1, raft_log.term(group, first - 1), entries,
            raft_log.term_runs(group, first, from_index - 1) if entries else (), hard.term, hard.vote, hard.commit, state.applied_index,
        )  # fmt: skip
        timeouts = BandedTimeouts(self.node_id, group, self._rng)
        # Where nobody else votes there is no leader that anything was promised to.
        alone = configuration.voters == (self.node_id,) and not configuration.is_joint
        config = replace(settings.raft, group=group, restart_grace=settings.raft.restart_grace and not alone)
        raft = Raft(self.node_id, config, restored, timeouts, reader=partial(self._read_entries, group))
        timeouts.raft = raft
        return RaftMember(group, state, raft, timeouts)

    def _read_entries(self, group: int, first: int, last: int) -> Sequence[RaftEntry]:
        stored = self._log.read(group, first, last)
        return [make_entry(group, entry.index, entry.term, EntryKind(entry.kind), entry.payload) for entry in stored]

    def _finish_installing(self, group: int) -> None:
        """Go on where a crash interrupted the installation of a snapshot, from the clearing on."""
        row = self._log.installing(group)
        if row is None:
            self._store.write({}, [staged_range(group)])  # what had arrived of one that was not complete
            return
        message, state = described(row)
        log.warning("snapshot_installed_again", group=group, index=message.index)
        copying = Copying(self._store, group)
        while not copying.step():
            pass
        hard = self._log.hard_state(group)
        puts: Puts = {}
        ranges: Ranges = [staged_range(group)]
        self._log.install(
            puts, ranges, group, state, HardState(hard.term, hard.vote, max(hard.commit, message.index)), message.conf.encode()
        )
        self._store.write(puts, ranges)

    def recover(self) -> int:
        """Apply what the log holds beyond the applied index and is known to be committed; call once, before `run`, which applies what
        turns out to be. Returns the number of entries."""
        for group in self._members:
            self._dirty[group] = None
        self._collect()
        count = 0
        while self._to_apply:
            count += self._apply_batch()
        for member in self._members.values():
            if member.is_alone():
                member.raft.campaign()  # there is nobody to wait for
                self._touch(member)
        return count

    # ---- what others ask

    def watermark_ms(self, group: int) -> int:
        return self._members[group].state.watermark_ms

    @property
    def inbox_count(self) -> int:
        return self._inbox_count

    def keep_row(self, state: JobState, row: bytes) -> None:
        """See `Applier.keep_row`."""
        self._applier.keep_row(state, row)

    def leads(self, group: int) -> bool:
        """Whether this node may act for the group at this instant."""
        member = self._members[group]
        return member.leading and self._may_lead(member)

    def leader_of(self, group: int) -> int | None:
        """The id of the node that leads the group, as far as this one knows."""
        return self._members[group].leader

    def term_of(self, group: int) -> int:
        """The latest term this node knows of."""
        return self._members[group].raft.term

    def configuration(self, group: int) -> Configuration:
        """The group's members, as applied here."""
        return self._members[group].raft.configuration

    def status(self, group: int) -> GroupStatus:
        member = self._members[group]
        status = member.raft.status()
        peers = {node: PeerProgress(peer.state, peer.match, peer.recent_active) for node, peer in status.progress.items()}
        return GroupStatus(
            group, status.role.value, status.term, member.leader, self.leads(group), status.commit, member.state.applied_index,
            self._log.first_index(group), status.last_index, self._log.bytes_held(group), status.configuration, status.transferee,
            member.installation is not None or status.is_installing, peers,
        )  # fmt: skip

    # ---- the way in. Plain functions: nothing can slip between the check and the act.

    def propose_many(self, commands: Sequence[tuple[int, AnyCommand]], *, urgent: bool = False, own: bool = False) -> Batch:
        """Queue (group, command) pairs; the batch settles when all are applied. `urgent`: ends of attempts, which are taken beyond
        the bound for new work, since refusing them would make the load worse. `own`: what this node's timers bring; it is taken
        however full the inbox is, for nobody would repeat it, and it is bounded by the jobs that run and the groups that fire.

        Raises `NotLeader` where one of the groups is not led here, `Unavailable` when full: nothing was proposed. The batch fails with
        `NotLeader` where a command lost for certain, with `OutcomeUnknown` where it may still come to be."""
        for group, command in commands:
            member = self._members[group]
            if member.raft.leadership is None:
                raise member.not_leader()
            if type(command) in _BY_LEASE and not self.leads(group):
                self._review(member)  # so that who acts for the group hears of it first
                raise member.not_leader()
        batch = Batch(len(commands), asyncio.get_running_loop())
        size = sum(command_bytes(command) for _, command in commands)
        self._check_room(len(commands), size, urgent, own)
        for position, (group, command) in enumerate(commands):
            self._queue(group, Proposal(command, batch, position))
        self._inbox_bytes += size
        return batch

    def propose(self, group: int, command: AnyCommand, *, urgent: bool = False) -> Batch:
        return self.propose_many(((group, command),), urgent=urgent)

    def _check_room(self, count: int, size: int, urgent: bool, own: bool) -> None:
        if self._stopping:
            raise Unavailable("the node is shutting down; send the request to another node or again in a moment", retry_after_s=1)
        factor = 4 if urgent else 1
        full = self._inbox_count + count > INBOX_COMMANDS_MAX * factor or self._inbox_bytes + size > INBOX_BYTES_MAX * factor
        if full and not own:
            raise Unavailable("too many changes wait for the disk; try again in a second", retry_after_s=1)

    def _queue(self, group: int, proposal: Proposal) -> None:
        inbox = self._members[group].inbox
        if type(proposal.command) is Fire:
            # All groups wait for the slowest Fire of a sweep: one behind 10,000 commands of a flooded group came 78 turns late.
            inbox.appendleft(proposal)
        else:
            inbox.append(proposal)
        self._inbox_count += 1
        self._busy[group] = None
        self._idle.clear()
        self._wake.set()

    def on_messages(self, node: int, batch: Sequence[tuple[int, AnyMessage]]) -> None:
        """What a peer sent. Taken in the next turn; what does not fit is dropped and counted, as a network may drop anything."""
        for group, message in batch:
            member = self._members.get(group)
            if member is None or not self._is_fit(node, group, message) or len(self._inbound) >= INBOUND_MESSAGES_MAX:
                self.dropped_count += 1
                continue
            self._inbound.append((member, message))
        self._wake.set()

    def _is_fit(self, node: int, group: int, message: AnyMessage) -> bool:
        if (message.group, message.sender, message.to) != (group, node, self.node_id):
            return False
        if type(message) is Append:
            # An entry that was damaged on its way, or on the sender's disk, must not reach another one.
            return all(is_sound(group, entry) for entry in message.entries)
        return type(message) is not InstallSnapshot  # comes with its rows, through `take_snapshot`

    def report_unreachable(self, node: int) -> None:
        """Messages to a node were probably lost: what was sent to it is found out anew."""
        for member in self._members.values():
            if member.raft.leadership is not None:
                member.raft.report_unreachable(node)
                self._touch(member)

    async def read_barrier(self, group: int) -> None:
        """Return once the rows here hold everything that was acknowledged before the call (ReadIndex, thesis 6.4): all reads of a turn
        share one round of heartbeats. Raises `NotLeader` where this node does not lead, or stops to."""
        member = self._members[group]
        if member.raft.leadership is None or self._stopping:
            raise member.not_leader()
        if self.settings.lease_reads and self.leads(group):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        member.reads.append(future)
        self._touch(member)
        await future

    # ---- members and office

    def transfer(self, group: int, to: int) -> None:
        """Hand the group's leadership to another voter; `on_follow` tells when it is gone, and it may fail silently. No effects leave from
        when the other is told to stand until it is elected, or this node again."""
        member = self._members[group]
        answer = member.raft.transfer(to)
        if answer is Answer.NOT_LEADER:
            raise member.not_leader()
        if answer is Answer.REFUSED:
            raise InvalidRequest(f"node {to} cannot take over group {group}: it is no voter of it, or is taking over already")
        member.transferring = to
        self._touch(member)

    async def hand_over(self, *, within_ms: int = STOP_WAIT_MS) -> int:
        """Transfer every led group to its most level voter; returns how many are still led after `within_ms`. For a node about to stop."""
        until_ms = self._clock.mono_ms() + within_ms
        while (led := [member for member in self._members.values() if member.office and not member.is_alone()]) and (
            self._clock.mono_ms() < until_ms
        ):
            for member in led:
                to = self._successor(member)
                if to and not member.transferring:
                    with suppress(Unavailable, InvalidRequest):
                        self.transfer(member.group, to)
            await self._clock.sleep_until(min(self._clock.mono_ms() + self.settings.tick_ms, until_ms))
        return len(led)

    def _successor(self, member: RaftMember) -> int:
        leadership = member.raft.leadership
        if leadership is None:
            return 0
        heard = [
            (-peer.match, node)
            for node, peer in leadership.peers.items()
            if node in member.raft.configuration.voters and node != self.node_id and peer.recent_active
        ]
        return min(heard)[1] if heard else 0

    def add_learner(self, group: int, node: int) -> asyncio.Future[Configuration]:
        """Let a node have the log without a vote; a blank one is sent a snapshot."""
        return self.change_members(group, [Change(ChangeKind.ADD_LEARNER, node)])

    def promote(self, group: int, node: int, *, in_place_of: int | None = None) -> asyncio.Future[Configuration]:
        """Give a learner that is nearly level a vote, and take that of another voter where one is named: it leaves the group."""
        changes = [Change(ChangeKind.ADD_VOTER, node)]
        if in_place_of is not None:
            changes.append(Change(ChangeKind.REMOVE, in_place_of))
        return self.change_members(group, changes)

    def remove(self, group: int, node: int, *, force: bool = False) -> asyncio.Future[Configuration]:
        return self.change_members(group, [Change(ChangeKind.REMOVE, node)], force=force)

    def change_members(self, group: int, changes: Sequence[Change], *, force: bool = False) -> asyncio.Future[Configuration]:
        """Change a group's members (`membership.py` says what is let in). The future has the configuration once the change is behind, the
        joint one it may need included; it fails with `OutcomeUnknown` where the leader changes on the way.

        Raises `NotLeader`, `InvalidRequest`, `Unavailable`: nothing was proposed."""
        member = self._members[group]
        raft, leadership = member.raft, member.raft.leadership
        if leadership is None:
            raise member.not_leader()
        known = {node: peer.match for node, peer in leadership.peers.items()}
        check_change(
            raft.configuration, changes, matches=known, last_index=raft.log.last_index, voters_min=self.settings.voters_min, force=force
        )
        if member.change is not None or raft.propose_conf(changes) is not Answer.ACCEPTED:
            raise Unavailable(f"group {group} has another change or a transfer under way; try again in a second", retry_after_s=1)
        future: asyncio.Future[Configuration] = asyncio.get_running_loop().create_future()
        member.change = ConfigurationChange(raft.log.last_index, future)
        self._touch(member)
        return future

    # ---- the loop

    async def run(self) -> None:
        """The loop; ends after `stop` when what was proposed has been answered, or could not be for two seconds."""
        async with asyncio.TaskGroup() as tasks:
            helpers = [tasks.create_task(self._sync_turns(), name="replicas sync"), tasks.create_task(self._tick(), name="replicas tick")]
            try:
                await self._run_turns()
            finally:
                for task in helpers:
                    task.cancel()
        self.abort()

    async def _run_turns(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._turn()
            if self._stopping and (self._is_idle() or self._clock.mono_ms() >= self._stop_at_ms):
                return
            await asyncio.sleep(0)

    def _is_idle(self) -> bool:
        return not (self._inbox_count or self._in_log_count or self._to_apply)

    def _turn(self) -> None:
        """Everything that can be done without waiting for the disk."""
        self.turn_count += 1
        is_open = self._written_turn - self._synced_turn < TURNS_UNSYNCED_MAX
        if is_open:
            self._step_messages()
            if self._tick_due:
                self._tick_due = False
                self._tick_groups()
            self._ask_reads()
            self._cut_entries()
            self._collect()
            self._copy_snapshots()
        self._apply()
        # Behind a slow disk the end of its fsync wakes the loop, not what waits for that.
        if self._to_apply or (is_open and (self._dirty or self._installing or self._inbound)):
            self._wake.set()
        if self._is_idle():
            self._idle.set()

    async def _tick(self) -> None:
        tick_ms = self.settings.tick_ms
        next_ms = self._clock.mono_ms() + tick_ms
        while True:
            await self._clock.sleep_until(next_ms)
            late_ms = self._clock.mono_ms() - next_ms
            if late_ms >= tick_ms:
                # The process stood still. What piled up in its sockets is read before the silence is judged.
                for _ in range(3):
                    await asyncio.sleep(0)
            self._tick_due = True
            self._wake.set()
            next_ms += tick_ms * (1 + late_ms // tick_ms)  # missed ticks are dropped, the rhythm is kept

    async def _sync_turns(self) -> None:
        while True:
            await self._sync_wanted.wait()
            self._sync_wanted.clear()
            turn = self._written_turn
            started_ms = self._sync_started_ms = self._clock.mono_ms()
            await self._store.sync()
            self._sync_started_ms = None
            self._on_synced(turn)
            self.on_commit_ms(self._clock.mono_ms() - started_ms)

    async def wait_idle(self) -> None:
        """Return when everything proposed so far has been applied, or lost."""
        await self._idle.wait()

    def stop(self) -> None:
        """Take nothing more; `run` ends when what is there has been answered."""
        self._stopping = True
        self._stop_at_ms = self._clock.mono_ms() + STOP_WAIT_MS
        self._wake.set()

    def abort(self) -> None:
        """Take nothing more, and tell everybody who still waits that the outcome is unknown."""
        self._stopping = True
        unknown = OutcomeUnknown("the node stopped before the change was durable; repeat it with the same key")
        for item in self._to_apply:
            _fail_all(item.proposals, unknown)
        for member in self._members.values():
            _fail_all(member.drop_inbox(), unknown)
            for waiting in member.take_all_waiting():
                _fail_all(waiting.proposals, unknown)
            member.fail_reads(unknown)
            member.fail_change()
            if member.installed is not None and not member.installed.done():
                member.installed.set_result(False)
        self._inbox_count = self._inbox_bytes = self._in_log_count = 0
        self._idle.set()

    def _touch(self, member: RaftMember) -> None:
        """Its core may have work."""
        self._dirty[member.group] = None
        self._wake.set()

    # ---- input to the cores

    def _step_messages(self) -> None:
        until_ms = self._clock.mono_ms() + DRAIN_BUDGET_MS
        inbound = self._inbound
        for _ in range(min(len(inbound), MESSAGES_A_TURN_MAX)):
            member, message = inbound.popleft()
            member.raft.step(message)
            self._dirty[member.group] = None
            if type(message) is InstallSnapshot:
                self._settle_offer(member)
            if self._clock.mono_ms() >= until_ms:
                break
        for group in self._dirty:
            self._review(self._members[group])

    def _tick_groups(self) -> None:
        now_ms, heartbeat_tick = self._clock.mono_ms(), self.settings.raft.heartbeat_tick
        for member in self._members.values():
            raft = member.raft
            if raft.leadership is not None:
                member.beat_in -= 1
                if member.beat_in <= 0:
                    # The round that renews the lease is the heartbeat that is due anyway: asked before the tick, it travels in it.
                    member.beat_in = heartbeat_tick
                    self._ask(member, ReadRound(raft.term, now_ms))
            raft.tick()
            self._dirty[member.group] = None
            self._review(member)
            self._count_lost(member)

    def _count_lost(self, member: RaftMember) -> None:
        """A former leader waits for what became of its entries, but not for ever: it may be cut off."""
        if not member.in_log or member.office:
            member.lost_ticks = 0
            return
        member.lost_ticks += 1
        if member.lost_ticks >= 2 * self.settings.raft.election_tick:
            error = OutcomeUnknown(
                f"the leader of group {member.group} changed while the change was on its way; repeat it with the same key"
            )
            self._fail_in_log(member.take_all_waiting(), error)

    def _ask_reads(self) -> None:
        now_ms = self._clock.mono_ms()
        for group in self._dirty:
            member = self._members[group]
            if member.reads and member.raft.leadership is not None:
                waiting, member.reads = member.reads, []
                self._ask(member, ReadRound(member.raft.term, now_ms, waiting))

    def _ask(self, member: RaftMember, read: ReadRound) -> None:
        member.rounds[read] = None
        member.raft.read_index(read)

    def _cut_entries(self) -> None:
        """One entry for each group with commands waiting, once those cut before are durable or a whole one is full."""
        if not self._busy:
            return
        stamp_ms = self._clock.wall_ms()
        groups, self._busy = self._busy, {}
        for group in groups:
            member = self._members[group]
            if member.raft.leadership is None:
                self._fail_inbox(member)
                continue
            is_time = self._cut_turn <= self._synced_turn or len(member.inbox) >= ENTRY_COMMANDS_MAX
            is_level = member.raft.commit - member.state.applied_index < APPLY_BACKLOG_MAX
            if is_time and is_level:
                self._cut(member, stamp_ms)
            if member.inbox:
                self._busy[group] = None

    def _cut(self, member: RaftMember, stamp_ms: int) -> None:
        """One entry of what waits in the inbox, within the bounds of an entry."""
        proposals: list[Proposal] = []
        commands: list[AnyCommand] = []
        size = 0
        fire = False
        inbox = member.inbox
        while inbox and len(commands) < ENTRY_COMMANDS_MAX:
            command = inbox[0].command
            added = command_bytes(command)
            if commands and size + added > ENTRY_BYTES_MAX:
                break
            size += added
            proposals.append(inbox.popleft())
            if type(command) is Fire:
                command = bounded_by(command, stamp_ms)
            commands.append(command)
            fire = fire or may_be_due(command, stamp_ms)
        if fire and self.leads(member.group):
            commands.append(Fire(stamp_ms))
        entry = Entry(COMMAND_VERSION, stamp_ms, commands)
        raft = member.raft
        if raft.propose([encode_entry(entry)]) is not Answer.ACCEPTED:
            # A transfer is under way, or too much is not committed: for as long as that lasts it waits here.
            inbox.extendleft(reversed(proposals))
            return
        member.in_log[raft.log.last_index, raft.term] = InLog(entry, proposals)
        self._in_log_count += 1
        self._inbox_count -= len(proposals)
        self._inbox_bytes -= size
        self.entry_count += 1
        self._cut_turn = self._written_turn + 1
        self._dirty[member.group] = None

    # ---- office

    def _may_lead(self, member: RaftMember) -> bool:
        leadership = member.raft.leadership
        if leadership is None or leadership.lease_void or member.state.applied_index < leadership.first_own_index:
            return False
        return member.is_alone() or self._clock.mono_ms() < member.lease_until_ms

    def _review(self, member: RaftMember) -> None:
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
                self._leave_office(member)
            member.lease_until_ms = member.beat_in = 0
            if office:
                # The first heartbeats carry the first round: what was committed before is applied about when it is confirmed.
                self._ask(member, ReadRound(office, self._clock.mono_ms()))
                self._touch(member)
        leading = self._may_lead(member)
        if leading != member.leading:
            member.leading = leading
            log.info("leads" if leading else "follows", group=member.group, term=raft.term, leader=member.leader)
            (self._on_lead if leading else self._on_follow)(member.group)

    def _leave_office(self, member: RaftMember) -> None:
        if member.leading:
            member.leading = False
            log.info("follows", group=member.group, term=member.raft.term, leader=member.leader)
            self._on_follow(member.group)
        error = member.not_leader()
        self._fail_inbox(member)
        member.fail_reads(error)
        member.fail_change()

    def _end_transfer(self, member: RaftMember) -> None:
        """A transfer ended. Where this node stayed in office after telling the other to stand, its lease is void for as long as the term
        lasts: it has itself elected anew, which takes a round, and its voters' promise to it does not stand in the way."""
        member.transferring = 0
        raft = member.raft
        if raft.leadership is not None and raft.leadership.lease_void:
            log.warning("transfer_failed", group=member.group, term=raft.term)
            raft.step_down()
            raft.step(TimeoutNow(member.group, self.node_id, self.node_id, raft.term))
            self._touch(member)

    def _fail_inbox(self, member: RaftMember) -> None:
        dropped = member.drop_inbox()
        self._inbox_count -= len(dropped)
        self._inbox_bytes -= sum(command_bytes(proposal.command) for proposal in dropped)
        if dropped:
            _fail_all(dropped, member.not_leader())

    def _fail_in_log(self, lost: Sequence[InLog], error: Exception) -> None:
        self._in_log_count -= len(lost)
        for item in lost:
            _fail_all(item.proposals, error)

    # ---- from the cores to disk and peers

    def _collect(self) -> None:
        """Take what the cores have, write it as one batch, and send what need not wait; again for what that made possible."""
        for _ in range(PASSES_MAX):
            if not self._dirty:
                return
            groups, self._dirty = self._dirty, {}
            taken = [
                (member, ready) for member in map(self._members.__getitem__, groups) if (ready := member.raft.take_ready()) is not None
            ]
            if taken:
                self._handle(taken)

    def _handle(self, taken: Sequence[tuple[RaftMember, Ready]]) -> None:
        puts: Puts = {RAFT_LOG: {}, RAFT_META: {}}
        ranges: Ranges = []
        written = []
        for member, ready in taken:
            if ready.snapshot is not None and self._begin_installing(member, ready, puts):
                continue
            if member.installation is not None:
                member.installation.held.append(ready)
                continue
            self._put(member, ready, puts, ranges)
            written.append((member, ready))
        if puts[RAFT_LOG] or puts[RAFT_META] or ranges:
            self._store.write(puts, ranges)
        for member, ready in taken:
            self._send_now(member, ready)
        self._await_durable(written)
        self._flush()

    def _put(self, member: RaftMember, ready: Ready, puts: Puts, ranges: Ranges) -> None:
        """The rows of one Ready."""
        group = member.group
        if ready.snapshot is not None:
            self._put_snapshot(member, ready, puts, ranges)
        if ready.entries:
            self._log.append(puts, group, ready.entries)
        if ready.hard_state is not None:
            self._log.add_hard_state(puts, group, HardState(*ready.hard_state))
        elif ready.entries:
            self._log.add_hard_state(puts, group, self._log.hard_state(group))

    def _await_durable(self, written: Sequence[tuple[RaftMember, Ready]]) -> None:
        """What needs no fsync, and has none to wait for, takes effect at once; the rest when its turn is synced."""
        if any(ready.must_sync for _, ready in written):
            self._written_turn += 1
            self._sync_wanted.set()
        for member, ready in written:
            if ready.must_sync or member.pending:
                member.pending.append((self._written_turn, ready))
            else:
                self._persist(member, ready)

    def _on_synced(self, turn: int) -> None:
        self._synced_turn = turn
        for member in self._members.values():
            pending = member.pending
            # What needs no sync of its own waited only for those before it.
            while pending and (pending[0][0] <= turn or not pending[0][1].must_sync):
                self._persist(member, pending.popleft()[1])
        self._flush()
        self._wake.set()

    def _persist(self, member: RaftMember, ready: Ready) -> None:
        """A Ready is durable: what waited for that leaves now."""
        member.raft.persisted(ready)
        self._dirty[member.group] = None
        for message in ready.after:
            self._outbox.setdefault(message.to, []).append((member.group, message))
        if ready.snapshot is not None:
            self._end_incoming(member, installed=True)
            self._on_replaced(member.group)
        self._review(member)

    def _send_now(self, member: RaftMember, ready: Ready) -> None:
        # A leader that can speak and not write would keep its office for ever (hashicorp/raft #503, etcd #13527).
        is_mute = member.raft.leadership is not None and self._is_stalled()
        for message in ready.now:
            if type(message) is InstallSnapshot:
                self._send_snapshot(member, message)
            elif not is_mute:
                self._outbox.setdefault(message.to, []).append((member.group, message))
        for result in ready.reads:
            assert isinstance(result.ctx, ReadRound)
            self._on_read(member, result.ctx, result.index)
        for entry in ready.committed:
            self._queue_committed(member, entry)

    def _is_stalled(self) -> bool:
        started_ms = self._sync_started_ms
        return started_ms is not None and self._clock.mono_ms() - started_ms >= self.settings.election_ms

    def _flush(self) -> None:
        if self._outbox:
            outbox, self._outbox = self._outbox, {}
            for node, messages in outbox.items():
                self._peers.send(node, messages)

    def _on_read(self, member: RaftMember, read: ReadRound, index: int) -> None:
        """A majority confirmed the office after the round began."""
        member.rounds.pop(read, None)
        if read.term == member.raft.term and member.raft.leadership is not None:
            member.lease_until_ms = max(member.lease_until_ms, read.at_ms + self.settings.lease_ms)
        if read.waiting:
            member.awaiting_apply.append((index, read.waiting))
            member.settle_reads()
        self._review(member)

    # ---- applying

    def _queue_committed(self, member: RaftMember, entry: RaftEntry) -> None:
        own, lost = member.take_waiting(entry.index, entry.term)
        if lost:
            self._fail_in_log(lost, member.not_leader())
        if own is not None:
            self._in_log_count -= 1
            item = ToApply(member, entry.index, entry.term, own.entry, own.proposals)
        elif entry.kind == _COMMANDS:
            item = ToApply(member, entry.index, entry.term, decode_entry(entry.payload))
        elif entry.kind == _CONFIGURATION:
            item = ToApply(member, entry.index, entry.term, None, configure=partial(self._configure, member, entry))
        else:
            item = ToApply(member, entry.index, entry.term, None)
        self._to_apply.append(item)

    def _configure(self, member: RaftMember, entry: RaftEntry, puts: Puts) -> None:
        configuration = member.raft.apply_conf(decode_change(entry.payload))
        self._log.add_configuration(puts, member.group, configuration.encode())
        log.info("members_changed", group=member.group, voters=configuration.voters, learners=configuration.learners)
        change = member.change
        if change is not None and entry.index >= change.index and not configuration.is_joint:
            member.change = None
            if not change.future.done():
                change.future.set_result(configuration)

    def _apply(self) -> None:
        until_ms = self._clock.mono_ms() + APPLY_BUDGET_MS
        while self._to_apply:
            self._apply_batch()
            if self._clock.mono_ms() >= until_ms:
                return

    def _apply_batch(self) -> int:
        """Apply some of what is committed, and tell the cores."""
        count = self._applier.apply(list(islice(self._to_apply, APPLY_AHEAD)))
        for _ in range(count):
            item = self._to_apply.popleft()
            member = item.member
            assert isinstance(member, RaftMember)
            member.raft.applied(item.index)
            self._dirty[member.group] = None
            if member.awaiting_apply:
                member.settle_reads()
            self._review(member)
            self._compact(member)
        return count

    def _give_effects(self, group: int, effects: Sequence[Effect]) -> None:
        member = self._members[group]
        if member.leading and not self._may_lead(member):
            self._review(member)
        # Settings are every node's business: they are applied from its own replica, whoever leads the meta group.
        if member.leading or group == META_GROUP:
            self._on_effects(group, effects)

    # ---- compaction

    def _compact(self, member: RaftMember) -> None:
        """Drop the older half of what is applied once it is much. Half stays for peers that lag a little, now or under the next leader."""
        group, settings, raft_log = member.group, self.settings, self._log
        applied, start = member.state.applied_index, raft_log.first_index(group) - 1
        held_bytes = raft_log.bytes_held(group)
        if applied - start <= settings.compact_entries and (held_bytes <= settings.compact_bytes or applied <= start + 1):
            return
        up_to = min(applied - (applied - start) // 2, member.raft.log.durable)
        lagging, receiving = self._slowest(member)
        if applied - start <= settings.keep_entries and held_bytes <= settings.keep_bytes:
            up_to = min(up_to, lagging)
        up_to = min(up_to, receiving)
        if up_to > start:
            ranges, puts = raft_log.compact(group, up_to)
            self._store.write(puts, ranges)
            member.raft.compacted(up_to)

    def _slowest(self, member: RaftMember) -> tuple[int, int]:
        """How far the slowest peers have come: of those that answer, and of those that are sent a snapshot, which the log has to meet when
        it has arrived (hashicorp/raft #212)."""
        far = member.state.applied_index
        leadership = member.raft.leadership
        if leadership is None:
            return far, far
        others = [(node, peer) for node, peer in leadership.peers.items() if node != self.node_id]
        lagging = [peer.match for _, peer in others if peer.recent_active and peer.state is not PeerState.SNAPSHOT]
        receiving = [index for (group, _), index in self._sending.items() if group == member.group]
        # One whose snapshot has arrived asks for what follows it with its next answer.
        receiving += [peer.snapshot_index for _, peer in others if peer.state is PeerState.SNAPSHOT]
        return min(lagging, default=far), min(receiving, default=far)

    # ---- snapshots out

    def _send_snapshot(self, member: RaftMember, message: InstallSnapshot) -> None:
        """Read the group as it is applied now, which may be further than when the core asked for it."""
        place = (member.group, message.to)
        if place in self._sending or len(self._sending) >= TRANSFERS_MAX or self._stopping:
            # Reported, or the core would wait for it for ever; it asks again at the peer's next sign of life.
            member.raft.report_snapshot(message.to, False)
            self._dirty[member.group] = None
            return
        state = member.state
        message = msgspec.structs.replace(message, index=state.applied_index, snap_term=state.applied_term, conf=member.raft.configuration)
        view = SnapshotView(self._store, message, state)
        log.info("snapshot_sent", group=member.group, to=message.to, index=message.index)
        self._sending[place] = message.index
        sent = self._peers.send_snapshot(message.to, member.group, message.snapshot_id, view.chunks())
        sent.add_done_callback(partial(self._on_snapshot_sent, member, message.to))

    def _on_snapshot_sent(self, member: RaftMember, node: int, sent: asyncio.Future[bool]) -> None:
        self._sending.pop((member.group, node), None)
        ok = not sent.cancelled() and sent.exception() is None and sent.result()
        member.raft.report_snapshot(node, ok)
        self._touch(member)

    # ---- snapshots in

    async def take_snapshot(self, node: int, group: int, snapshot_id: int, chunks: AsyncIterator[bytes]) -> bool:
        """What a peer's `send_snapshot` brings. Returns whether this replica holds it, durably; False for one that could not be taken: it
        may be sent again. The pace is set by asking for chunks, and no more than a few MiB of them are kept in memory."""
        member = self._members.get(group)
        if member is None or member.incoming is not None or self._incoming_count >= TRANSFERS_MAX or self._stopping:
            return False
        self._incoming_count += 1
        incoming = member.incoming = IncomingSnapshot(self._store, self.node_id, group, small_rows_max=self.settings.small_snapshot_rows)
        installed = member.installed = asyncio.get_running_loop().create_future()
        is_offered = False
        try:
            async for chunk in chunks:
                incoming.take(chunk)
            if not incoming.is_complete:
                raise SnapshotRefused("its end is missing")
            message = incoming.message
            if (message.sender, message.snapshot_id) != (node, snapshot_id):
                raise SnapshotRefused(f"it says it is number {message.snapshot_id} of node {message.sender}")
            is_offered = True
        except SnapshotRefused as refused:
            log.warning("snapshot_refused", group=group, sender=node, reason=str(refused))
        finally:
            if not is_offered:
                self._end_incoming(member, installed=False)
        if is_offered:
            self._inbound.append((member, incoming.message))
            self._wake.set()
        return await asyncio.shield(installed)

    def _settle_offer(self, member: RaftMember) -> None:
        """The core has seen the snapshot: it wants it, or it holds as much already, or its sender is deposed."""
        incoming = member.incoming
        assert incoming is not None, "a snapshot is stepped once, with its rows at hand"
        if not member.raft.is_installing:
            self._end_incoming(member, installed=member.raft.commit >= incoming.message.index)

    def _end_incoming(self, member: RaftMember, *, installed: bool) -> None:
        incoming, future = member.incoming, member.installed
        member.incoming = member.installed = None
        if incoming is not None:
            self._incoming_count -= 1
            incoming.discard()
        if future is not None and not future.done():
            future.set_result(installed)

    def _begin_installing(self, member: RaftMember, ready: Ready, puts: Puts) -> bool:
        """Make ready for the rows of a snapshot; whether they take more than this turn's batch."""
        incoming, message = member.incoming, ready.snapshot
        assert message is not None
        invariant(
            incoming is not None and incoming.is_complete and matches(incoming.message, message), "snapshot_is_at_hand",
            group=member.group, index=message.index,
        )  # fmt: skip
        assert incoming is not None
        # What was committed before and is not applied is in the snapshot; and the rows it would change are going.
        overtaken = [item for item in self._to_apply if item.member is member]
        if overtaken:
            self._to_apply = deque(item for item in self._to_apply if item.member is not member)
        unknown = OutcomeUnknown(f"group {member.group} was brought up to date at one stroke; repeat the change with the same key")
        for item in overtaken:
            _fail_all(item.proposals, unknown)
        self._fail_in_log(member.take_all_waiting(), unknown)
        if not incoming.is_staged:
            return False
        hard = self._log.hard_state(member.group)
        assert ready.hard_state is not None, "a snapshot moves the commit index"
        self._log.add_installing(puts, member.group, incoming.description())
        # The promise counts from now on; the commit index only once there is something behind it.
        self._log.add_hard_state(puts, member.group, HardState(ready.hard_state.term, ready.hard_state.vote, hard.commit))
        member.installation = Installation(incoming, ready, Copying(self._store, member.group))
        self._installing[member.group] = None
        return True

    def _copy_snapshots(self) -> None:
        """One slice for each group that takes a large snapshot; the last one makes it the state."""
        for group in list(self._installing):
            member = self._members[group]
            installation = member.installation
            assert installation is not None
            if not installation.copying.step():
                continue
            member.installation = None
            del self._installing[group]
            readies = [installation.ready, *installation.held]
            puts: Puts = {RAFT_LOG: {}, RAFT_META: {}}
            ranges: Ranges = []
            for ready in readies:
                self._put(member, ready, puts, ranges)
            self._store.write(puts, ranges)
            self._await_durable([(member, ready) for ready in readies])
            self._flush()

    def _put_snapshot(self, member: RaftMember, ready: Ready, puts: Puts, ranges: Ranges) -> None:
        """The rows that make a snapshot the group's state, its own included where they are not in place yet."""
        incoming = member.incoming
        assert incoming is not None and ready.snapshot is not None and ready.hard_state is not None
        if incoming.is_staged:
            ranges.append(staged_range(member.group))
            incoming.is_staged = False  # gone with this batch
        else:
            ranges += state_ranges(member.group)
            merge(puts, incoming.rows())
        state = incoming.state
        self._log.install(puts, ranges, member.group, state, HardState(*ready.hard_state), ready.snapshot.conf.encode())
        member.state = state
        member.counts.clear()
        self._applier.forget_leased()
        log.info("snapshot_installed", group=member.group, index=state.applied_index, sender=ready.snapshot.sender)


def _fail_all(proposals: Sequence[Proposal], error: Exception) -> None:
    for proposal in proposals:
        if proposal.batch is not None:
            proposal.batch.fail(error)
