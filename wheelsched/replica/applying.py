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
from wheelsched.model.effects import Effect
from wheelsched.model.rows import GroupState, QueueCounts
from wheelsched.replica.digests import end_window, fold
from wheelsched.replica.kept import Kept
from wheelsched.replica.proposals import Answered
from wheelsched.store import Store
from wheelsched.store.raftlog import Puts, RaftLog

EffectSink = Callable[[int, Sequence[Effect]], None]

# Applied rows go to the store in batches near this many: `write` holds the GIL, about 1.5 µs a row.
WRITE_ROWS_MAX = 400
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
        self.kept = Kept()

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
            self.kept.take(effects)
            self._on_effects(item.member.group, effects)
            start = 0
            for proposal in item.proposals:
                start = proposal.answer(replies, start)
        return count

    def _run(self, member: Member, entry: Entry) -> tuple[Transaction, list[Reply], list[Effect]]:
        if len(member.counts) > COUNTS_KEPT_MAX:
            member.counts.clear()
        txn = Transaction(member.group, self._store, member.counts, self.kept.states, self.kept.rows)
        self._preload(txn, entry)
        replies, effects = member.machine.apply(member.state, txn, entry)
        txn.finish()
        return txn, replies, effects

    def _preload(self, txn: Transaction, entry: Entry) -> None:
        """Read what the entry will ask for in two sorted multigets instead of row by row."""
        kept = self.kept
        unread = needs_reading(entry.commands, Create, Complete, kept.states, kept.rows)
        if not unread:
            return
        entry = Entry(entry.version, entry.stamp_ms, unread)
        job_ids = [job_id for job_id in prefetch_state_keys(entry) if job_id not in kept.states]
        if len(job_ids) > 1:
            state_keys = [keys.state_key(txn.group, job_id) for job_id in job_ids]
            for job_id, row in zip(job_ids, self._store.multiget(keys.STATE, state_keys), strict=True):
                txn.preload(job_id, row)
        job_keys = []
        for key in prefetch_job_keys(entry, txn):
            row = kept.rows.get(keys.parse_job_key(key)[3])
            if row is None:
                job_keys.append(key)
            else:
                txn.preload_row(keys.JOBS, key, row)
        if len(job_keys) > 1:
            for key, row in zip(job_keys, self._store.multiget(keys.JOBS, job_keys), strict=True):
                txn.preload_row(keys.JOBS, key, row)
