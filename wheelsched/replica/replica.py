"""One loop for all groups of the node: cut entries, write, sync, apply, answer.

A turn lasts as long as its fsync: what arrives meanwhile is the next turn, so load makes entries larger, not turns more frequent
(group commit). While the disk works, the loop applies the turn before, one deep.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from wheelsched.core.clock import Clock
from wheelsched.core.errors import OutcomeUnknown, Unavailable
from wheelsched.core.invariants import invariant
from wheelsched.core.limits import ENTRY_BYTES_MAX, ENTRY_COMMANDS_MAX, INBOX_BYTES_MAX, INBOX_COMMANDS_MAX
from wheelsched.engine import GroupMachine, Transaction, prefetch_job_keys, prefetch_state_keys
from wheelsched.model import keys
from wheelsched.model.commands import COMMAND_VERSION, AnyCommand, Entry, Fire, decode_entry, encode_entry
from wheelsched.model.effects import Effect, JobChanged
from wheelsched.model.rows import GroupState, JobState, QueueCounts
from wheelsched.model.states import LEASED
from wheelsched.replica.proposals import Batch, Proposal, bounded_by, command_bytes, may_be_due
from wheelsched.store import Store
from wheelsched.store.raftlog import LogEntry, RaftLog

EffectSink = Callable[[int, Sequence[Effect]], None]

# Entry kinds in the log; configuration changes come with the Raft core.
KIND_COMMANDS = 0
TERM_ALONE = 1  # the only term of a group with one member
# Applied rows go to the store in batches near this many: `write` holds the GIL, about 1.5 µs a row.
WRITE_ROWS_MAX = 400
LEASED_ROWS_BYTES_MAX = 64 * 1024 * 1024
# Decoded counts kept for each group; a busy queue's are asked for in every entry.
COUNTS_KEPT_MAX = 1_000
# Applying pauses after this long so that sockets and timers get their turn.
APPLY_BUDGET_MS = 5


class Replica:
    """This node's member of one group: its state, its inbox and the entry it is about to write."""

    __slots__ = ("counts", "group", "inbox", "machine", "state")

    def __init__(self, group: int, state: GroupState) -> None:
        self.group = group
        self.state = state
        self.machine = GroupMachine(group)
        self.inbox: deque[Proposal] = deque()
        self.counts: dict[tuple[str, str], QueueCounts] = {}  # of the queues that changed lately, as applied


@dataclass(slots=True)
class _Written:
    """An entry in the log that waits to be durable and then applied."""

    replica: Replica
    index: int
    entry: Entry
    proposals: list[Proposal] = field(default_factory=list)


class Replicas:
    """All groups of this node. `on_effects(group, effects)` is called once for each applied entry, before its replies."""

    def __init__(self, store: Store, log: RaftLog, clock: Clock, groups: Sequence[int], *, on_effects: EffectSink) -> None:
        self._store = store
        self._log = log
        self._clock = clock
        self._on_effects = on_effects
        self._replicas = {group: Replica(group, log.group_state(group)) for group in groups}
        # States and rows of leased jobs, as applied: each is asked for again when its attempt ends. As many as run; of the rows, as
        # many as fit.
        self._leased: dict[bytes, JobState] = {}
        self._leased_rows: dict[bytes, bytes] = {}
        self._leased_rows_bytes = 0
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._busy: set[int] = set()  # groups with something in their inbox, in order of arrival below
        self._busy_order: deque[int] = deque()
        self._under_way: list[_Written] = []  # of the last two turns: in the log, possibly not applied yet
        self._inbox_count = 0
        self._inbox_bytes = 0
        self._stopping = False
        self.turn_count = 0
        self.entry_count = 0
        self.on_commit_ms: Callable[[float], None] = lambda _ms: None

    def watermark_ms(self, group: int) -> int:
        return self._replicas[group].state.watermark_ms

    @property
    def inbox_count(self) -> int:
        return self._inbox_count

    def recover(self) -> int:
        """Apply what the log holds beyond the applied index; call once, before `run`. Returns the number of entries."""
        count = 0
        for replica in self._replicas.values():
            first = replica.state.applied_index + 1
            for stored in self._log.read(replica.group, first, self._log.last_index(replica.group)):
                self._apply([_Written(replica, stored.index, decode_entry(stored.payload))])
                count += 1
        return count

    # The way in. Plain functions: nothing can slip between the check and the act.

    def propose_many(self, commands: Sequence[tuple[int, AnyCommand]], *, urgent: bool = False, own: bool = False) -> Batch:
        """Queue (group, command) pairs; the batch settles when all are applied. `urgent`: ends of attempts, which are taken beyond
        the bound for new work, since refusing them would make the load worse. `own`: what this node's timers bring; it is taken
        however full the inbox is, for nobody would repeat it, and it is bounded by the jobs that run and the groups that fire.
        Raises Unavailable when full."""
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
        inbox = self._replicas[group].inbox
        if type(proposal.command) is Fire:
            # All groups wait for the slowest Fire of a sweep: one behind 10,000 commands of a flooded group came 78 turns late.
            inbox.appendleft(proposal)
        else:
            inbox.append(proposal)
        self._inbox_count += 1
        if group not in self._busy:
            self._busy.add(group)
            self._busy_order.append(group)
        self._idle.clear()
        self._wake.set()

    async def wait_idle(self) -> None:
        """Return when everything proposed so far has been applied."""
        await self._idle.wait()

    async def run(self) -> None:
        """The loop; ends after `stop` when the inboxes are empty."""
        synced: list[_Written] = []
        while True:
            if not self._inbox_count:
                if synced:
                    await self._apply_within_budget(synced)
                    synced = []
                    continue
                self._idle.set()
                if self._stopping:
                    return
                self._wake.clear()
                await self._wake.wait()
                continue
            started = self._clock.mono_ms()
            written = self._cut_and_write()
            self._under_way = synced + written
            syncing = asyncio.ensure_future(self._store.sync())
            try:
                await asyncio.sleep(0)  # the fsync begins in the task's first step; only then is there something to work beside
                if synced:
                    await self._apply_within_budget(synced)
                await syncing
            finally:
                if not syncing.done():
                    syncing.cancel()
            self.on_commit_ms(self._clock.mono_ms() - started)
            self.turn_count += 1
            synced = written

    def stop(self) -> None:
        """Take nothing more; `run` ends when what is there has been applied."""
        self._stopping = True
        self._wake.set()

    def abort(self) -> None:
        """Take nothing more, and tell everybody who still waits that the outcome is unknown: of what is in the log and not applied as
        of the inboxes."""
        self._stopping = True
        waiting = [item.proposals for item in self._under_way] + [replica.inbox for replica in self._replicas.values()]
        for proposals in waiting:
            for proposal in proposals:
                if proposal.batch is not None:
                    proposal.batch.fail(OutcomeUnknown("the node stopped before the change was durable; repeat it with the same key"))

    # Cut, write.

    def _cut_and_write(self) -> list[_Written]:
        stamp_ms = self._clock.wall_ms()
        puts: dict[str, dict[bytes, bytes | None]] = {keys.RAFT_LOG: {}, keys.RAFT_META: {}}
        ranges: list[tuple[str, bytes, bytes]] = []
        written = []
        for _ in range(len(self._busy_order)):
            group = self._busy_order.popleft()
            replica = self._replicas[group]
            written.append(self._cut(replica, stamp_ms, puts))
            if replica.inbox:
                self._busy_order.append(group)
            else:
                self._busy.discard(group)
            if self._log.due_for_compaction(group, replica.state.applied_index):
                compacted, head = self._log.compact(group, replica.state.applied_index)
                ranges += compacted
                for family, rows in head.items():
                    puts[family].update(rows)
        self._store.write(puts, ranges)
        self.entry_count += len(written)
        return written

    def _cut(self, replica: Replica, stamp_ms: int, puts: dict[str, dict[bytes, bytes | None]]) -> _Written:
        """One entry of what waits in the inbox, within the bounds of an entry."""
        proposals: list[Proposal] = []
        commands: list[AnyCommand] = []
        size = 0
        fire = False
        inbox = replica.inbox
        while inbox and len(commands) < ENTRY_COMMANDS_MAX:
            command = inbox[0].command
            size += command_bytes(command)
            if commands and size > ENTRY_BYTES_MAX:
                size -= command_bytes(command)
                break
            proposals.append(inbox.popleft())
            if type(command) is Fire:
                command = bounded_by(command, stamp_ms)
            commands.append(command)
            fire = fire or may_be_due(command, stamp_ms)
        if fire:
            commands.append(Fire(stamp_ms))
        self._inbox_count -= len(proposals)
        self._inbox_bytes -= size
        entry = Entry(COMMAND_VERSION, stamp_ms, commands)
        index = self._log.last_index(replica.group) + 1
        self._log.add(puts, replica.group, LogEntry(index, TERM_ALONE, KIND_COMMANDS, encode_entry(entry)))
        return _Written(replica, index, entry, proposals)

    # Apply, answer.

    async def _apply_within_budget(self, written: list[_Written]) -> None:
        """Apply a turn's entries in order, letting the loop breathe whenever the budget is spent."""
        position = 0
        while position < len(written):
            deadline = self._clock.mono_ms() + APPLY_BUDGET_MS
            while position < len(written) and self._clock.mono_ms() < deadline:
                position += self._apply(written[position:])
            if position < len(written):
                await asyncio.sleep(0)

    def _apply(self, written: Sequence[_Written]) -> int:
        """Apply entries from the first on until the batch is large enough; returns how many. One batch holds their rows and
        their groups' applied indexes; replies and effects leave only after it is written."""
        puts: dict[str, dict[bytes, bytes | None]] = {family: {} for family in keys.STATE_FAMILIES}
        puts[keys.RAFT_META] = {}
        ranges: list[tuple[str, bytes, bytes]] = []
        done = []
        row_count = 0
        for item in written:
            replica = item.replica
            if len(replica.counts) > COUNTS_KEPT_MAX:
                replica.counts.clear()
            txn = Transaction(replica.group, self._store, replica.counts)
            self._preload(txn, item.entry)
            replies, effects = replica.machine.apply(replica.state, txn, item.entry)
            txn.finish()
            invariant(item.index == replica.state.applied_index + 1, "applied_agrees", group=replica.group, index=item.index)
            replica.state.applied_index = item.index
            replica.state.applied_term = TERM_ALONE
            self._log.add_group_state(puts, replica.group, replica.state)
            for family, rows in txn.writes.items():
                if rows:
                    puts[family].update(rows)
                    row_count += len(rows)
            ranges += txn.ranges
            done.append((item, replies, effects))
            if row_count >= WRITE_ROWS_MAX:
                break
        self._store.write(puts, ranges)
        for item, replies, effects in done:
            self._keep_leased(effects)
            self._on_effects(item.replica.group, effects)
            for proposal, reply in zip(item.proposals, replies, strict=False):
                if proposal.batch is not None:
                    proposal.batch.settle(proposal.position, reply)
        return len(done)

    def _keep_leased(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if type(effect) is JobChanged:
                after = effect.after
                if after is not None and after.status in LEASED:
                    self._leased[after.job_id] = after
                elif effect.before is not None:
                    self._end_lease(effect.before.job_id)

    def keep_row(self, state: JobState, row: bytes) -> None:
        """The job row of a job that was just leased: unchanged for as long as the lease lasts, and wanted at its end."""
        leased = self._leased.get(state.job_id)
        # Between its claim and this call the attempt may have ended already.
        if leased is not None and leased.fencing == state.fencing and self._leased_rows_bytes < LEASED_ROWS_BYTES_MAX:
            self._leased_rows[state.job_id] = row
            self._leased_rows_bytes += len(row)

    def _end_lease(self, job_id: bytes) -> None:
        self._leased.pop(job_id, None)
        row = self._leased_rows.pop(job_id, None)
        if row is not None:
            self._leased_rows_bytes -= len(row)

    def _preload(self, txn: Transaction, entry: Entry) -> None:
        """Read what the entry will ask for in two sorted multigets instead of row by row."""
        job_ids = []
        for job_id in prefetch_state_keys(entry):
            state = self._leased.get(job_id)
            if state is None:
                job_ids.append(job_id)
            else:
                txn.preload_state(state)
        if len(job_ids) > 1:
            state_keys = [keys.state_key(txn.group, job_id) for job_id in job_ids]
            for job_id, row in zip(job_ids, self._store.multiget(keys.STATE, state_keys), strict=True):
                txn.preload(job_id, row)
        job_keys = []
        for key in prefetch_job_keys(entry, txn):
            row = self._leased_rows.get(keys.parse_job_key(key)[3])
            if row is None:
                job_keys.append(key)
            else:
                txn.preload_row(keys.JOBS, key, row)
        if len(job_keys) > 1:
            for key, row in zip(job_keys, self._store.multiget(keys.JOBS, job_keys), strict=True):
                txn.preload_row(keys.JOBS, key, row)
