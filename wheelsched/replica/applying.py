"""From durable entries to rows: apply, write as one batch with the applied index, and only then tell and answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wheelsched.core.clock import Clock
from wheelsched.core.invariants import invariant
from wheelsched.engine import GroupMachine, Transaction, needs_reading, prefetch_job_keys, prefetch_state_keys
from wheelsched.model import keys
from wheelsched.model.commands import Complete, Create, Entry, Reply
from wheelsched.model.effects import Effect, JobChanged, JobsMoved
from wheelsched.model.rows import GroupState, JobState, QueueCounts
from wheelsched.model.states import LEASED
from wheelsched.replica.digests import end_window, fold
from wheelsched.replica.proposals import Answered
from wheelsched.store import Store
from wheelsched.store.raftlog import Puts, RaftLog

EffectSink = Callable[[int, Sequence[Effect]], None]

# Applied rows go to the store in batches near this many: `write` holds the GIL, about 1.5 µs a row.
WRITE_ROWS_MAX = 400
LEASED_ROWS_BYTES_MAX = 64 * 1024 * 1024
# Decoded counts kept for each group; a busy queue's are asked for in every entry.
COUNTS_KEPT_MAX = 1_000
# Applying pauses after this long so that sockets and timers get their turn.
APPLY_BUDGET_MS = 5


class Member:
    """This node's member of one group, as far as it has applied."""

    __slots__ = ("counts", "group", "machine", "state")

    def __init__(self, group: int, state: GroupState) -> None:
        self.group = group
        self.state = state
        self.machine = GroupMachine(group)
        self.counts: dict[tuple[str, str], QueueCounts] = {}  # of the queues that changed lately, as applied


@dataclass(slots=True)
class ToApply:
    """An entry in the log that waits to be durable and then applied. `entry` None: it holds no commands, only its index counts."""

    member: Member
    index: int
    term: int
    entry: Entry | None
    proposals: Sequence[Answered] = ()  # whose commands these are, in their order; empty where nobody here waits
    configure: Callable[[Puts], None] | None = None  # of a change of configuration: makes it, and adds the row that tells of it
    check: Callable[[], None] | None = None  # of a note: compares the state before it


class Applier:
    """Applies the entries of all groups of this node. `on_effects(group, effects)` is called once for each applied entry with
    commands, before its replies."""

    def __init__(self, store: Store, log: RaftLog, clock: Clock, *, on_effects: EffectSink, digest_window: int = 0) -> None:
        """`digest_window`: how many entries a checksum of what they write covers (`digests.py`); 0: there is none."""
        self._digest_window = digest_window
        self._store = store
        self._log = log
        self._clock = clock
        self._on_effects = on_effects
        # States and rows of leased jobs, as applied: each is asked for again when its attempt ends. As many as run; of the rows, as
        # many as fit.
        self._leased: dict[bytes, JobState] = {}
        self._leased_rows: dict[bytes, bytes] = {}
        self._leased_rows_bytes = 0

    async def apply_within_budget(self, waiting: Sequence[ToApply]) -> None:
        """Apply entries in order, letting the loop breathe whenever the budget is spent."""
        position = 0
        while position < len(waiting):
            deadline = self._clock.mono_ms() + APPLY_BUDGET_MS
            while position < len(waiting) and self._clock.mono_ms() < deadline:
                position += self.apply(waiting[position:])
            if position < len(waiting):
                await asyncio.sleep(0)

    def apply(self, waiting: Sequence[ToApply]) -> int:
        """Apply entries from the first on until the batch is large enough; returns how many. One batch holds their rows and
        their groups' applied indexes; replies and effects leave only after it is written."""
        puts: dict[str, dict[bytes, bytes | None]] = {family: {} for family in keys.STATE_FAMILIES}
        puts[keys.RAFT_META] = {}
        ranges: list[tuple[str, bytes, bytes]] = []
        done = []
        groups: set[int] = set()
        window = self._digest_window
        count = row_count = 0
        for item in waiting:
            member = item.member
            if member.group in groups:
                break  # the next entry of a group reads what the one before wrote
            groups.add(member.group)
            if item.entry is not None:
                txn, replies, effects = self._run(member, item.entry)
                for family, rows in txn.writes.items():
                    if rows:
                        puts[family].update(rows)
                        row_count += len(rows)
                ranges += txn.ranges
                done.append((item, replies, effects))
                if window:
                    member.state.digest = fold(member.state.digest, txn.writes, txn.ranges)
            elif item.configure is not None:
                item.configure(puts)
            elif item.check is not None:
                item.check()
            count += 1
            invariant(item.index == member.state.applied_index + 1, "applied_agrees", group=member.group, index=item.index)
            member.state.applied_index = item.index
            member.state.applied_term = item.term
            if window and not item.index % window:
                end_window(member.state, window)
            self._log.add_group_state(puts, member.group, member.state)
            if row_count >= WRITE_ROWS_MAX:
                break
        self._store.write(puts, ranges)
        for item, replies, effects in done:
            self._keep_leased(effects)
            self._on_effects(item.member.group, effects)
            start = 0
            for proposal in item.proposals:
                start = proposal.answer(replies, start)
        return count

    def _run(self, member: Member, entry: Entry) -> tuple[Transaction, list[Reply], list[Effect]]:
        if len(member.counts) > COUNTS_KEPT_MAX:
            member.counts.clear()
        txn = Transaction(member.group, self._store, member.counts, self._leased, self._leased_rows)
        self._preload(txn, entry)
        replies, effects = member.machine.apply(member.state, txn, entry)
        txn.finish()
        return txn, replies, effects

    def _preload(self, txn: Transaction, entry: Entry) -> None:
        """Read what the entry will ask for in two sorted multigets instead of row by row."""
        unread = needs_reading(entry.commands, Create, Complete, self._leased, self._leased_rows)
        if not unread:
            return
        entry = Entry(entry.version, entry.stamp_ms, unread)
        job_ids = [job_id for job_id in prefetch_state_keys(entry) if job_id not in self._leased]
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

    # What leased jobs will be asked for again.

    def _keep_leased(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if type(effect) is JobsMoved:
                if effect.cause == "claim":
                    self._leased.update({state.job_id: state for state in effect.afters})
                else:
                    self._end_leases(effect.befores)
            elif type(effect) is JobChanged:
                after = effect.after
                if after is not None and after.status in LEASED:
                    self._leased[after.job_id] = after
                elif effect.before is not None:
                    self._end_lease(effect.before.job_id)

    def keep_rows(self, rows: Sequence[tuple[JobState, bytes]]) -> None:
        """The job rows of jobs that were just leased: unchanged for as long as the lease lasts, and wanted at its end."""
        for state, row in rows:
            leased = self._leased.get(state.job_id)
            # Between its claim and this call the attempt may have ended already.
            if (leased is state or (leased is not None and leased.fencing == state.fencing)) and (
                self._leased_rows_bytes < LEASED_ROWS_BYTES_MAX
            ):
                self._leased_rows[state.job_id] = row
                self._leased_rows_bytes += len(row)

    def _end_leases(self, states: Sequence[JobState]) -> None:
        leased, rows = self._leased, self._leased_rows
        freed = 0
        for state in states:
            job_id = state.job_id
            leased.pop(job_id, None)
            row = rows.pop(job_id, None)
            if row is not None:
                freed += len(row)
        self._leased_rows_bytes -= freed

    def _end_lease(self, job_id: bytes) -> None:
        self._leased.pop(job_id, None)
        row = self._leased_rows.pop(job_id, None)
        if row is not None:
            self._leased_rows_bytes -= len(row)

    def forget_leased(self) -> None:
        """Rows were replaced behind the back of this object: what it kept may be of another history."""
        self._leased.clear()
        self._leased_rows.clear()
        self._leased_rows_bytes = 0
