"""One loop for all groups of the node, each replicated by Raft: step messages, cut entries, write, send, sync, apply, answer.

A turn is synchronous; what it does, and in which order, is `_turn`. All groups share one batch and one fsync, and everything for one
peer leaves in one `send`. Turns go on while an fsync is under way (pipelining); new entries are cut only when the ones before them are
durable, so load makes entries larger, not fsyncs more frequent (group commit).

`leads(group)`: this node may act for the group. It holds from the moment that everything committed before its term is applied, while a
majority is known to have heard of it so lately that nobody else can be elected. The lease makes nothing true: it only lets effects out.
Where it ends `on_follow` is called before anything else happens, where it begins `on_lead`; in between every applied entry's effects are
given to `on_effects`. So whoever builds its memory from the rows in `on_lead` misses nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Final

import structlog

from wheelsched.core.clock import Clock, Rng
from wheelsched.core.errors import InvalidRequest, OutcomeUnknown, Unavailable
from wheelsched.core.limits import ENTRY_COMMANDS_MAX
from wheelsched.model.commands import AnyCommand, Claim, Complete, Create, Expire, Fire, Occur, decode_entry
from wheelsched.model.effects import Effect
from wheelsched.model.keys import META_GROUP, RAFT_LOG, RAFT_META
from wheelsched.raft import (
    Answer,
    AnyMessage,
    Append,
    Change,
    ChangeKind,
    Configuration,
    Entry,
    EntryKind,
    InstallSnapshot,
    PreVoteRequest,
    Ready,
    Role,
    decode_change,
    is_sound,
)
from wheelsched.replica.applying import Applier, EffectSink, ToApply
from wheelsched.replica.batches import by_group
from wheelsched.replica.compaction import compacted_to
from wheelsched.replica.digests import Note, compare, note_of, read_note
from wheelsched.replica.inboxes import Inboxes, fail_all
from wheelsched.replica.kept import Kept
from wheelsched.replica.leaving import LOOK_MS, Leaving, is_farewell
from wheelsched.replica.loading import load_member
from wheelsched.replica.membership import check_change
from wheelsched.replica.offices import Offices
from wheelsched.replica.peers import Peers
from wheelsched.replica.proposals import RUN_COMMANDS_MIN, Batch, Proposal, ProposalRun, command_bytes
from wheelsched.replica.raft_member import ConfigurationChange, RaftMember, ReadRound
from wheelsched.replica.raft_settings import GroupStatus, PeerProgress, ReplicaSettings
from wheelsched.replica.transfers import Transfers
from wheelsched.store import Store
from wheelsched.store.raftlog import HardState, Puts, RaftLog, Ranges

__all__ = ["RaftReplicas", "ReplicaSettings"]

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
# A pass takes what the one before made possible without an fsync: an election without rivals takes three.
PASSES_MAX = 8
STOP_WAIT_MS = 2_000
# What is proposed because of time and memory that only the one leader has (RAFT.md 9).
_BY_LEASE: Final = (Fire, Claim, Expire, Occur)


def _ignore(_group: int) -> None:
    pass


class RaftReplicas:
    """All groups of this node. `on_effects(group, effects)` is called once for each applied entry while this node leads the group, before
    the entry's replies; `on_lead(group)` and `on_follow(group)` where that begins and ends; `on_replaced(group)` where a snapshot took the
    place of all rows of a group, or they were dropped because this node left it. All are plain functions and must not raise."""

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
        on_lead: Callable[[int], None] = _ignore,
        on_follow: Callable[[int], None] = _ignore,
        on_replaced: Callable[[int], None] = _ignore,
        settings: ReplicaSettings | None = None,
    ) -> None:
        """`first_configuration(group)`: its members when the cluster was made; asked for a group that has none on record. One without
        voters: this node waits for a snapshot. Finishes what a crash left of an installation."""
        self.node_id = node_id
        self.settings = settings or ReplicaSettings()
        self._store = store
        self._log = raft_log
        self._clock = clock
        self._peers = peers
        self._on_effects = on_effects
        self._on_replaced = on_replaced
        self._members = {group: load_member(store, raft_log, group, node_id, self.settings, rng, first_configuration) for group in groups}
        self._applier = Applier(
            store, raft_log, clock, on_effects=self._give_effects, digest_window=self.settings.digest_window
        )  # fmt: skip
        self._inboxes = Inboxes()
        self._offices = Offices(clock, self.settings, self._inboxes, self._touch, on_lead, on_follow)
        self._transfers = Transfers(store, raft_log, peers, self.settings, self._touch, self._take_in)
        self._leaving = Leaving(store, raft_log, self.settings, rng, self._send, self._on_left)
        self._look_ticks = max(LOOK_MS // self.settings.tick_ms, 1)
        self._inbound: deque[tuple[RaftMember, AnyMessage]] = deque()
        self._outbox: dict[int, list[tuple[int, AnyMessage]]] = {}
        self._dirty: dict[RaftMember, None] = {}  # whose core may have work
        self._to_apply: deque[ToApply] = deque()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._sync_wanted = asyncio.Event()
        self._tick_due = False
        self._tick_count = 0
        self._written_turn = self._synced_turn = 0  # turns that need an fsync
        self._cut_turn = 0  # the last of them that holds entries cut here
        self._sync_started_ms: int | None = None
        self._stopping = False
        self._stop_at_ms = 0
        self.groups_share_fate = False
        self.fires_along = True
        self.turn_count = 0
        self.entry_count = 0
        self.dropped_count = 0  # messages of others that were not fit to be stepped
        self.on_commit_ms: Callable[[float], None] = lambda _ms: None

    def recover(self) -> int:
        """Apply what the log holds beyond the applied index and is known to be committed; call once, before `run`, which applies what
        turns out to be. Returns the number of entries."""
        for member in self._members.values():
            self._dirty[member] = None
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
        return self._inboxes.count

    @property
    def kept(self) -> Kept:
        return self._applier.kept

    def leads(self, group: int) -> bool:
        """Whether this node may act for the group at this instant."""
        return self._offices.leads(self._members[group])

    def leader_of(self, group: int) -> int | None:
        """The id of the node that leads the group, as far as this one knows."""
        return self._members[group].leader

    def term_of(self, group: int) -> int:
        """The latest term this node has heard of. Used by node/cluster.py to tell which news of a leader is newer."""
        return self._members[group].raft.term

    def configuration(self, group: int) -> Configuration:
        """The group's members, as applied here."""
        return self._members[group].raft.configuration

    def status(self, group: int) -> GroupStatus:
        member = self._members[group]
        status = member.raft.status()
        peers = {node: PeerProgress(peer.state, peer.match, peer.recent_active) for node, peer in status.progress.items()}
        return GroupStatus(
            group=group,
            role=status.role.value,
            term=status.term,
            leader=member.leader,
            leads=self.leads(group),
            commit=status.commit,
            applied=member.state.applied_index,
            first_index=self._log.first_index(group),
            last_index=status.last_index,
            log_bytes=self._log.bytes_held(group),
            configuration=status.configuration,
            transferee=status.transferee,
            is_installing=member.installation is not None or status.is_installing,
            peers=peers,
        )

    # ---- the way in. Plain functions: nothing can slip between the check and the act.

    def propose_many(self, commands: Sequence[tuple[int, AnyCommand]], *, urgent: bool = False, own: bool = False) -> Batch:
        """Queue (group, command) pairs; the batch settles when all are applied. `urgent`: ends of attempts, which are taken beyond
        the bound for new work, since refusing them would make the load worse. `own`: what this node's timers bring; it is taken
        however full the inbox is, for nobody would repeat it, and it is bounded by the jobs that run and the groups that fire.

        Raises `NotLeader` where one of the groups is not led here, `Unavailable` when full: nothing was proposed. The batch fails with
        `NotLeader` where a command lost for certain, with `OutcomeUnknown` where it may still come to be."""
        grouped = by_group(commands, Create, Complete) if len(commands) >= RUN_COMMANDS_MIN else None
        if grouped is None:
            for group, command in commands:
                self._check_office(self._members[group], by_lease=type(command) in _BY_LEASE)
        else:
            for group in grouped:
                self._check_office(self._members[group], by_lease=False)
        if self._stopping:
            raise Unavailable("the node is shutting down; send the request to another node or again in a moment", retry_after_s=1)
        batch = Batch(len(commands), asyncio.get_running_loop())
        inboxes = self._inboxes
        if grouped is None:
            sizes = [command_bytes(command) for _, command in commands]
            inboxes.check_room(len(commands), sum(sizes), urgent=urgent, own=own)
            for position, (group, command) in enumerate(commands):
                inboxes.add(self._members[group], Proposal(command, batch, position), 1, sizes[position])
        else:
            inboxes.check_room(len(commands), sum([of_group[2] for of_group in grouped.values()]), urgent=urgent, own=own)
            for group, (of_group, positions, size, due_from_ms) in grouped.items():
                run = ProposalRun(of_group, positions, batch, size, due_from_ms)
                inboxes.add(self._members[group], run, len(of_group), size)
        if commands:
            self._idle.clear()
            self._wake.set()
        return batch

    def _check_office(self, member: RaftMember, *, by_lease: bool) -> None:
        if member.raft.leadership is None:
            raise member.not_leader()
        if by_lease and not self._offices.leads(member):
            self._offices.review(member)  # so that who acts for the group hears of it first
            raise member.not_leader()

    def propose(self, group: int, command: AnyCommand, *, urgent: bool = False) -> Batch:
        return self.propose_many(((group, command),), urgent=urgent)

    def on_messages(self, node: int, batch: Sequence[tuple[int, AnyMessage]]) -> None:
        """What a peer sent. Taken in the next turn; what does not fit is dropped and counted, as a network may drop anything."""
        for group, message in batch:
            member = self._members.get(group)
            if member is None or not self._is_fit(node, group, message) or len(self._inbound) >= INBOUND_MESSAGES_MAX:
                self.dropped_count += 1
            elif type(message) is InstallSnapshot:
                self._leaving.hear(member, message)
                self._touch(member)
            else:
                self._take_in(member, message)

    def _take_in(self, member: RaftMember, message: AnyMessage) -> None:
        self._inbound.append((member, message))
        self._wake.set()

    def _is_fit(self, node: int, group: int, message: AnyMessage) -> bool:
        if (message.group, message.sender, message.to) != (group, node, self.node_id):
            return False
        if type(message) is Append:
            # An entry that was damaged on its way, or on the sender's disk, must not reach another one.
            return all(is_sound(group, entry) for entry in message.entries)
        # A snapshot comes with its rows, through `take_snapshot`.
        return type(message) is not InstallSnapshot or is_farewell(message)

    async def take_snapshot(self, node: int, group: int, snapshot_id: int, chunks: AsyncIterator[bytes]) -> bool:
        """What a peer's `send_snapshot` brings. Returns whether this replica holds it, durably; False for one that could not be taken: it
        may be sent again. The pace is set by asking for chunks, and no more than a few MiB of them are kept in memory."""
        member = self._members.get(group)
        return member is not None and await self._transfers.take(member, node, snapshot_id, chunks)

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
        if self.settings.lease_reads and self._offices.leads(member):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        member.reads.append(future)
        self._touch(member)
        await future

    # ---- office and members

    def transfer(self, group: int, to: int) -> None:
        """Hand the group's leadership to another voter; it may fail silently. No effects leave from when the other is told to stand until
        it is elected, or this node anew. Raises `NotLeader`, `InvalidRequest`."""
        self._offices.transfer(self._members[group], to)

    async def hand_over(self, *, within_ms: int = STOP_WAIT_MS) -> int:
        """Transfer every led group to its most level voter; returns how many are still led after `within_ms`. For a node about to stop."""
        until_ms = self._clock.mono_ms() + within_ms
        while True:
            led = [member for member in self._members.values() if member.office and not member.is_alone()]
            if not led or self._clock.mono_ms() >= until_ms:
                return len(led)
            for member in led:
                to = self._offices.successor(member)
                if to and not member.transferring:
                    with suppress(Unavailable, InvalidRequest):
                        self.transfer(member.group, to)
            await self._clock.sleep_until(min(self._clock.mono_ms() + self.settings.tick_ms, until_ms))

    def add_learner(self, group: int, node: int) -> asyncio.Future[Configuration]:
        """Let a node have the log without a vote; a blank one is sent a snapshot. As `change_members`."""
        return self.change_members(group, [Change(ChangeKind.ADD_LEARNER, node)])

    def promote(self, group: int, node: int, *, in_place_of: int | None = None) -> asyncio.Future[Configuration]:
        """Give a learner that is nearly level a vote, and take that of another voter where one is named: it leaves the group."""
        changes = [Change(ChangeKind.ADD_VOTER, node)]
        if in_place_of is not None:
            changes.append(Change(ChangeKind.REMOVE, in_place_of))
        return self.change_members(group, changes)

    def remove(self, group: int, node: int, *, force: bool = False) -> asyncio.Future[Configuration]:
        """Take a node out of the group. `force`: also where fewer voters than wanted are left."""
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
        # What the start wrote, a snapshot that was installed again above all, the cores take for durable: peers will hear of it.
        await self._store.sync()
        async with asyncio.TaskGroup() as tasks:
            helpers = [tasks.create_task(self._sync(), name="replicas sync"), tasks.create_task(self._tick(), name="replicas tick")]
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

    def _turn(self) -> None:
        """Everything that can be done without waiting for the disk."""
        self.turn_count += 1
        is_open = self._written_turn - self._synced_turn < TURNS_UNSYNCED_MAX
        if is_open:
            self._step_messages()
            if self._tick_due:
                self._tick_due = False
                self._tick_groups()
            for member in self._dirty:
                self._offices.ask_reads(member)
            self._cut_entries()
            self._collect()
            self._copy_snapshots()
        self._apply()
        self._flush()
        # Behind a slow disk the end of its fsync wakes the loop, not what waits for that.
        if self._to_apply or (is_open and (self._dirty or self._transfers.installing or self._inbound)):
            self._wake.set()
        if self._is_idle():
            self._idle.set()

    def _is_idle(self) -> bool:
        return self._inboxes.is_empty and not self._to_apply

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

    async def _sync(self) -> None:
        """One fsync after the other, each for all that was written before it began."""
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
        self._stopping = self._transfers.is_closed = True
        self._stop_at_ms = self._clock.mono_ms() + STOP_WAIT_MS
        self._wake.set()

    def abort(self) -> None:
        """Take nothing more, and tell everybody who still waits that the outcome is unknown."""
        self._stopping = self._transfers.is_closed = True
        unknown = OutcomeUnknown("the node stopped before the change was durable; repeat it with the same key")
        for item in self._to_apply:
            fail_all(item.proposals, unknown)
        for member in self._members.values():
            self._inboxes.clear(member, unknown)
            member.fail_reads(unknown)
            member.fail_change()
            if member.installed is not None and not member.installed.done():
                member.installed.set_result(False)
        self._idle.set()

    def _touch(self, member: RaftMember) -> None:
        """Its core may have work."""
        self._dirty[member] = None
        self._wake.set()

    # ---- input to the cores

    def _step_messages(self) -> None:
        until_ms = self._clock.mono_ms() + DRAIN_BUDGET_MS
        inbound = self._inbound
        for _ in range(min(len(inbound), MESSAGES_A_TURN_MAX)):
            member, message = inbound.popleft()
            if member.left is None and type(message) is not PreVoteRequest:
                member.raft.step(message)
            elif (admitted := self._leaving.admit(member, message)) is not None:
                member.raft.step(admitted)
            self._dirty[member] = None
            if type(message) is InstallSnapshot:
                self._transfers.settle_offer(member)
            if self._clock.mono_ms() >= until_ms:
                break
        for member in list(self._dirty):
            self._offices.review(member)

    def _tick_groups(self) -> None:
        now_ms = self._clock.mono_ms()
        self._tick_count += 1
        # The same ticks for all groups, so that their heartbeats to a peer travel together.
        is_beat = self._tick_count % self.settings.raft.heartbeat_tick == 0
        for member in self._members.values():
            if is_beat:
                self._offices.renew(member, now_ms)
            member.raft.tick()
            self._dirty[member] = None
            self._offices.review(member)
            self._offices.count_lost(member)
        if self._tick_count % self._look_ticks == 0:
            self._leaving.look(self._members.values(), now_ms, self._is_at_work)

    def _is_at_work(self, member: RaftMember) -> bool:
        """Whether its rows are read or written by what is under way."""
        return bool(self._transfers.sending_from(member.group)) or any(item.member is member for item in self._to_apply)

    def _on_left(self, member: RaftMember) -> None:
        self._applier.kept.forget()
        self._written_turn += 1
        self._sync_wanted.set()
        self._offices.review(member)
        self._on_replaced(member.group)

    def _cut_entries(self) -> None:
        """One entry for each group with commands waiting, once those cut before are durable or a whole one is full."""
        busy = self._inboxes.busy
        if not busy:
            return
        stamp_ms = self._clock.wall_ms()
        self._inboxes.busy = {}
        for group in busy:
            member = self._members[group]
            if member.raft.leadership is None:
                self._inboxes.fail(member)
                continue
            is_time = self._cut_turn <= self._synced_turn or member.waiting_count >= ENTRY_COMMANDS_MAX
            is_level = member.raft.commit - member.state.applied_index < APPLY_BACKLOG_MAX
            if is_time and is_level and self._inboxes.cut(member, stamp_ms, leads=self.fires_along and self._offices.leads(member)):
                self.entry_count += 1
                self._dirty[member] = None
            if member.inbox:
                self._inboxes.busy[group] = None

    # ---- from the cores to disk and peers

    def _collect(self) -> None:
        """Take what the cores have, write it as one batch, and send what need not wait; again for what that made possible."""
        for _ in range(PASSES_MAX):
            if not self._dirty:
                return
            members, self._dirty = self._dirty, {}
            taken = [(member, ready) for member in members if (ready := member.raft.take_ready()) is not None]
            if taken:
                self._handle(taken)

    def _handle(self, taken: Sequence[tuple[RaftMember, Ready]]) -> None:
        puts: Puts = {RAFT_LOG: {}, RAFT_META: {}}
        ranges: Ranges = []
        written = []
        for member, ready in taken:
            if ready.snapshot is not None:
                self._overtake(member)
                if self._transfers.begin(member, ready, puts):
                    continue
            if member.installation is not None:
                member.installation.held.append(ready)
                continue
            self._put(member, ready, puts, ranges)
            written.append((member, ready))
        if puts[RAFT_LOG] or puts[RAFT_META] or ranges:
            self._store.write(puts, ranges)
        for member, ready in taken:
            self._let_go(member, ready)
        self._await_durable(written)
        self._flush()

    def _put(self, member: RaftMember, ready: Ready, puts: Puts, ranges: Ranges) -> None:
        """The rows of one Ready."""
        group = member.group
        if ready.snapshot is not None:
            self._transfers.put(member, ready, puts, ranges)
            self._applier.kept.forget()
        if ready.entries:
            self._log.append(puts, group, ready.entries)
        if ready.hard_state is not None and not ready.must_sync:
            self._log.note_commit(group, ready.hard_state.commit)
        elif ready.hard_state is not None:
            self._log.add_hard_state(puts, group, HardState(*ready.hard_state))
        elif ready.entries:
            self._log.add_hard_state(puts, group, self._log.hard_state(group))

    def _let_go(self, member: RaftMember, ready: Ready) -> None:
        """What need not wait for the disk."""
        # A leader that can speak and not write would keep its office for ever (hashicorp/raft #503, etcd #13527).
        is_mute = member.raft.leadership is not None and self._is_stalled()
        for message in ready.now:
            if type(message) is InstallSnapshot:
                self._transfers.send(member, message)
            elif not is_mute:
                self._outbox.setdefault(message.to, []).append((member.group, message))
        for result in ready.reads:
            assert isinstance(result.ctx, ReadRound)
            self._offices.on_read(member, result.ctx, result.index)
        for entry in ready.committed:
            self._queue_committed(member, entry)

    def _is_stalled(self) -> bool:
        started_ms = self._sync_started_ms
        return started_ms is not None and self._clock.mono_ms() - started_ms >= self.settings.election_ms

    def _await_durable(self, written: Sequence[tuple[RaftMember, Ready]]) -> None:
        """What needs no fsync, and has none to wait for, takes effect at once; the rest when its turn is synced."""
        if any(ready.must_sync for _, ready in written):
            self._written_turn += 1
            self._sync_wanted.set()
        for member, ready in written:
            if ready.must_sync or member.pending:
                member.pending.append((self._written_turn, ready))
                if ready.entries and member.office:
                    self._cut_turn = self._written_turn
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
        raft = member.raft
        # Most Readies hold nothing that durability changes: heartbeats and their answers, 640 a second for 32 groups. A ballot may.
        is_news = ready.must_sync or raft.role not in (Role.FOLLOWER, Role.LEADER)
        raft.persisted(ready)
        for message in ready.after:
            self._outbox.setdefault(message.to, []).append((member.group, message))
        if ready.snapshot is not None:
            self._transfers.end(member, installed=True)
            self._on_replaced(member.group)
        if is_news:
            self._dirty[member] = None
            self._offices.review(member)

    def _send(self, node: int, group: int, message: AnyMessage) -> None:
        """What waits for nothing."""
        self._outbox.setdefault(node, []).append((group, message))

    def _flush(self) -> None:
        if self._outbox:
            outbox, self._outbox = self._outbox, {}
            for node, messages in outbox.items():
                self._peers.send(node, messages)

    # ---- snapshots

    def _overtake(self, member: RaftMember) -> None:
        """What was committed before and is not applied is in the snapshot, and the rows it would change are going."""
        unknown = OutcomeUnknown(f"group {member.group} was brought up to date at one stroke; repeat the change with the same key")
        overtaken = [item for item in self._to_apply if item.member is member]
        if overtaken:
            self._to_apply = deque(item for item in self._to_apply if item.member is not member)
        for item in overtaken:
            fail_all(item.proposals, unknown)
        self._inboxes.fail_in_log(member.take_all_waiting(), unknown)

    def _copy_snapshots(self) -> None:
        """One slice for each group that takes a large snapshot; the last one makes it the state."""
        for member in list(self._transfers.installing):
            readies = self._transfers.copy(member)
            if not readies:
                continue
            puts: Puts = {RAFT_LOG: {}, RAFT_META: {}}
            ranges: Ranges = []
            for ready in readies:
                self._put(member, ready, puts, ranges)
            self._store.write(puts, ranges)
            self._await_durable([(member, ready) for ready in readies])
            self._flush()

    # ---- applying

    def _queue_committed(self, member: RaftMember, entry: Entry) -> None:
        own, lost = member.take_waiting(entry.index, entry.term)
        if lost:
            self._inboxes.fail_in_log(lost, member.not_leader())
        if own is not None:
            self._inboxes.in_log_count -= 1
            item = ToApply(member, entry.index, entry.term, own.entry, own.proposals)
        elif entry.kind == EntryKind.COMMANDS:
            item = ToApply(member, entry.index, entry.term, decode_entry(entry.payload))
        elif entry.kind == EntryKind.CONFIGURATION:
            item = ToApply(member, entry.index, entry.term, None, configure=partial(self._configure, member, entry))
        elif (note := read_note(entry.payload)) is not None:
            item = ToApply(member, entry.index, entry.term, None, check=partial(self._compare, member, note))
        else:
            item = ToApply(member, entry.index, entry.term, None)
        self._to_apply.append(item)

    def _configure(self, member: RaftMember, entry: Entry, puts: Puts) -> None:
        before, is_leader = member.raft.configuration, member.raft.leadership is not None
        configuration = member.raft.apply_conf(decode_change(entry.payload))
        if is_leader:
            self._leaving.tell_removed(member, before, entry.index, entry.term)
        self._log.add_configuration(puts, member.group, configuration.encode())
        log.info("members_changed", group=member.group, voters=configuration.voters, learners=configuration.learners)
        change = member.change
        if change is not None and entry.index >= change.index and not configuration.is_joint:
            member.change = None
            if not change.future.done():
                change.future.set_result(configuration)

    def _compare(self, member: RaftMember, note: Note) -> None:
        compare(member.group, member.state, note, self.settings.digest_window)
        member.told_digest = max(member.told_digest, note.index)

    def _note_digest(self, member: RaftMember) -> None:
        """A leader tells the checksum of the window that ended last, once; where that cannot be now, after the next entry."""
        raft, index = member.raft, member.state.checked_index
        if raft.leadership is not None and raft.propose_note(note_of(member.state, self.settings.digest_window)) is Answer.ACCEPTED:
            member.told_digest = index
            self._touch(member)

    def _apply(self) -> None:
        until_ms = self._clock.mono_ms() + APPLY_BUDGET_MS
        while self._to_apply:
            self._apply_batch()
            if self._clock.mono_ms() >= until_ms:
                return

    def _apply_batch(self) -> int:
        """Apply some of what is committed, and tell the cores."""
        batch = list(islice(self._to_apply, APPLY_AHEAD))
        # An office or lease that ended is let go of before rows change: whoever drops its memory of a group counts by the rows, and one
        # entry's effects are told after all rows of the batch are written.
        for member in {item.member.group: item.member for item in batch}.values():
            assert isinstance(member, RaftMember)
            if member.leading and not self._offices.may_lead(member):
                self._offices.review(member)
        count = self._applier.apply(batch)
        for _ in range(count):
            item = self._to_apply.popleft()
            member = item.member
            assert isinstance(member, RaftMember)
            member.raft.applied(item.index)
            if item.configure is not None or member.raft.configuration.is_joint:
                self._dirty[member] = None  # the way out of a joint configuration is proposed once it is applied
            if member.awaiting_apply:
                member.settle_reads()
            if member.state.checked_index > member.told_digest:
                self._note_digest(member)
            self._offices.review(member)
            self._compact(member)
        return count

    def _give_effects(self, group: int, effects: Sequence[Effect]) -> None:
        # Settings are every node's business: each learns them from its own replica, whoever leads the meta group.
        if self._members[group].leading or group == META_GROUP:
            self._on_effects(group, effects)

    def _compact(self, member: RaftMember) -> None:
        group = member.group
        start = self._log.first_index(group) - 1
        up_to = compacted_to(
            member, self.settings, start=start, held_bytes=self._log.bytes_held(group), sending=self._transfers.wanted_from(member)
        )
        if up_to > start:
            ranges, puts = self._log.compact(group, up_to)
            self._store.write(puts, ranges)
            member.raft.compacted(up_to)
