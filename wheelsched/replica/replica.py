"""One loop for all groups of the node: cut entries, write, sync, apply, answer.

A turn lasts as long as its fsync: what arrives meanwhile is the next turn, so load makes entries larger, not turns more frequent
(group commit). While the disk works, the loop applies the turn before, one deep.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from wheelsched.core.clock import Clock
from wheelsched.core.errors import OutcomeUnknown, Unavailable
from wheelsched.core.limits import INBOX_BYTES_MAX, INBOX_COMMANDS_MAX
from wheelsched.model import keys
from wheelsched.model.commands import COMMAND_VERSION, AnyCommand, Complete, Create, Entry, Fire, decode_entry, encode_entry
from wheelsched.model.rows import GroupState
from wheelsched.replica.applying import Applier, EffectSink, Member, ToApply
from wheelsched.replica.batches import by_group
from wheelsched.replica.kept import Kept
from wheelsched.replica.proposals import RUN_COMMANDS_MIN, Batch, Proposal, ProposalRun, command_bytes, take_entry
from wheelsched.store import Store
from wheelsched.store.raftlog import LogEntry, RaftLog

# Entry kinds in the log; configuration changes come with the Raft core.
KIND_COMMANDS = 0
TERM_ALONE = 1  # the only term of a group with one member


class Replica(Member):
    """This node's member of one group: what it applied, and its inbox."""

    __slots__ = ("inbox",)

    def __init__(self, group: int, state: GroupState) -> None:
        super().__init__(group, state)
        self.inbox: deque[Proposal | ProposalRun] = deque()


class Replicas:
    """All groups of this node. `on_effects(group, effects)` is called once for each applied entry, before its replies."""

    def __init__(self, store: Store, log: RaftLog, clock: Clock, groups: Sequence[int], *, on_effects: EffectSink) -> None:
        self._store = store
        self._log = log
        self._clock = clock
        self._applier = Applier(store, log, clock, on_effects=on_effects)
        self._replicas = {group: Replica(group, log.group_state(group)) for group in groups}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._busy: set[int] = set()  # groups with something in their inbox, in order of arrival below
        self._busy_order: deque[int] = deque()
        self._under_way: list[ToApply] = []  # of the last two turns: in the log, possibly not applied yet
        self._inbox_count = 0
        self._inbox_bytes = 0
        self._stopping = False
        self.groups_share_fate = True
        self.fires_along = True
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
                self._applier.apply([ToApply(replica, stored.index, TERM_ALONE, decode_entry(stored.payload))])
                count += 1
        return count

    # The way in. Plain functions: nothing can slip between the check and the act.

    def propose_many(self, commands: Sequence[tuple[int, AnyCommand]], *, urgent: bool = False, own: bool = False) -> Batch:
        """Queue (group, command) pairs; the batch settles when all are applied. `urgent`: ends of attempts, which are taken beyond
        the bound for new work, since refusing them would make the load worse. `own`: what this node's timers bring; it is taken
        however full the inbox is, for nobody would repeat it, and it is bounded by the jobs that run and the groups that fire.
        Raises Unavailable when full."""
        batch = Batch(len(commands), asyncio.get_running_loop())
        grouped = by_group(commands, Create, Complete) if len(commands) >= RUN_COMMANDS_MIN else None
        if grouped is not None:
            size = sum([of_group[2] for of_group in grouped.values()])
            self._check_room(len(commands), size, urgent, own)
            for group, (of_group, positions, bytes_of_group, due_from_ms) in grouped.items():
                self._queue(group, ProposalRun(of_group, positions, batch, bytes_of_group, due_from_ms))
        else:
            size = sum([command_bytes(command) for _, command in commands])
            self._check_room(len(commands), size, urgent, own)
            for position, (group, command) in enumerate(commands):
                self._queue(group, Proposal(command, batch, position))
        self._inbox_bytes += size
        self._inbox_count += len(commands)
        return batch

    def propose(self, group: int, command: AnyCommand, *, urgent: bool = False) -> Batch:
        return self.propose_many(((group, command),), urgent=urgent)

    def _queue(self, group: int, proposal: Proposal | ProposalRun) -> None:
        inbox = self._replicas[group].inbox
        if type(proposal) is Proposal and type(proposal.command) is Fire:
            # All groups wait for the slowest Fire of a sweep: one behind 10,000 commands of a flooded group came 78 turns late.
            inbox.appendleft(proposal)
        else:
            inbox.append(proposal)
        if group not in self._busy:
            self._busy.add(group)
            self._busy_order.append(group)
        self._idle.clear()
        self._wake.set()

    def _check_room(self, count: int, size: int, urgent: bool, own: bool) -> None:
        if self._stopping:
            raise Unavailable("the node is shutting down; send the request to another node or again in a moment", retry_after_s=1)
        factor = 4 if urgent else 1
        full = self._inbox_count + count > INBOX_COMMANDS_MAX * factor or self._inbox_bytes + size > INBOX_BYTES_MAX * factor
        if full and not own:
            raise Unavailable("too many changes wait for the disk; try again in a second", retry_after_s=1)

    @property
    def kept(self) -> Kept:
        return self._applier.kept

    def leads(self, group: int) -> bool:
        """A group with one member is always led by it."""
        return True

    async def read_barrier(self, group: int) -> None:
        """The rows here hold everything that was acknowledged: nobody else acknowledges."""

    async def wait_idle(self) -> None:
        """Return when everything proposed so far has been applied."""
        await self._idle.wait()

    async def run(self) -> None:
        """The loop; ends after `stop` when the inboxes are empty."""
        synced: list[ToApply] = []
        while True:
            if not self._inbox_count:
                if synced:
                    await self._applier.apply_within_budget(synced)
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
                    await self._applier.apply_within_budget(synced)
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

    def _cut_and_write(self) -> list[ToApply]:
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

    def _cut(self, replica: Replica, stamp_ms: int, puts: dict[str, dict[bytes, bytes | None]]) -> ToApply:
        """One entry of what waits in the inbox, within the bounds of an entry."""
        proposals, commands, size, fire = take_entry(replica.inbox, stamp_ms)
        self._inbox_count -= len(commands)
        if fire and self.fires_along:
            commands.append(Fire(stamp_ms))
        self._inbox_bytes -= size
        entry = Entry(COMMAND_VERSION, stamp_ms, commands)
        index = self._log.last_index(replica.group) + 1
        self._log.add(puts, replica.group, LogEntry(index, TERM_ALONE, KIND_COMMANDS, encode_entry(entry)))
        return ToApply(replica, index, TERM_ALONE, entry, proposals)
