"""What the driver keeps for each group it is a member of, beside the Raft core: who waits, what is not durable, who leads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from wheelsched.core.clock import Rng
from wheelsched.core.errors import NotLeader, OutcomeUnknown, WheelschedError
from wheelsched.model.commands import Entry
from wheelsched.model.rows import GroupState
from wheelsched.raft import Configuration, InstallSnapshot, Raft, Ready
from wheelsched.replica.applying import Member
from wheelsched.replica.proposals import Answered, Proposal, ProposalRun
from wheelsched.replica.snapshots import Copying, IncomingSnapshot


class BandedTimeouts:
    """Election timeouts that keep out of each other's way: a band for each voter that may follow the last leader, with a gap of two ticks
    between them, and none at the shortest possible (RAFT.md 6). Survivors that draw alike would refuse each other and split votes."""

    _GAP = 2

    def __init__(self, node_id: int, group: int, rng: Rng) -> None:
        self._node_id = node_id
        self._group = group
        self._rng = rng
        self.raft: Raft | None = None  # set once it is there: its first draw comes before
        self.last_leader = 0

    def randrange(self, stop: int, /) -> int:
        if self.raft is not None:
            leader = self.raft.leader or self.last_leader
            # Another order in each group, so that the leaderships of a node that dies do not all go to the same one.
            voters = [voter for voter in self.raft.configuration.voters if voter != leader]
            free = stop - 1 - self._GAP * (len(voters) - 1)
            if self._node_id in voters and free >= len(voters):
                rank = (voters.index(self._node_id) + self._group) % len(voters)
                first, last = free * rank // len(voters), free * (rank + 1) // len(voters)
                return 1 + self._GAP * rank + first + int(self._rng.random() * (last - first))
        return int(self._rng.random() * stop)


@dataclass(slots=True)
class InLog:
    """An entry that this node put into the log as leader, and who waits for it."""

    entry: Entry
    proposals: Sequence[Answered]


@dataclass(slots=True, eq=False)
class ReadRound:
    """One question to the core. `at_ms`: monotonic, before anything was sent because of it, so that it can carry a lease."""

    term: int
    at_ms: int
    waiting: list[asyncio.Future[None]] = field(default_factory=list)


@dataclass(slots=True)
class Installation:
    """A snapshot on its way into the store, and the Readies that wait behind it."""

    ready: Ready
    copying: Copying
    held: list[Ready] = field(default_factory=list)


@dataclass(slots=True)
class ConfigurationChange:
    """A change that somebody waits for: until it and the joint configuration it led to are behind."""

    index: int
    future: asyncio.Future[Configuration]


class Left(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Of a group that a node left: everything up to `index` is committed, and of `configuration`, applied by then, it is no member.

    The row `L`: fields are only ever appended."""

    index: int
    term: int
    configuration: Configuration

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


def decode_left(row: bytes) -> Left:
    return msgspec.msgpack.decode(row, type=Left)


class RaftMember(Member):
    """This node's member of one group. Plain bookkeeping; `RaftReplicas` decides."""

    __slots__ = (
        "asks_at_ms",
        "awaiting_apply",
        "change",
        "farewell",
        "in_log",
        "inbox",
        "incoming",
        "installation",
        "installed",
        "leading",
        "lease_until_ms",
        "leaves_at_ms",
        "left",
        "lost_ticks",
        "office",
        "pending",
        "raft",
        "reads",
        "rounds",
        "timeouts",
        "told_digest",
        "transferring",
        "waiting_count",
    )  # fmt: skip

    def __init__(self, group: int, state: GroupState, raft: Raft, timeouts: BandedTimeouts) -> None:
        super().__init__(group, state)
        self.raft = raft
        self.timeouts = timeouts
        self.inbox: deque[Proposal | ProposalRun] = deque()
        self.waiting_count = 0  # commands in it
        # By index and term: after a loss of office another entry may take the index, and both may still be open.
        self.in_log: dict[tuple[int, int], InLog] = {}
        self.lost_ticks = 0  # since the office was lost, while `in_log` is not empty
        self.pending: deque[tuple[int, Ready]] = deque()  # written in a turn of that number, not known to be durable
        self.office = 0  # the term in which this node leads, as last seen; 0: it does not
        self.leading = False  # whether `on_lead` was the last thing told
        self.lease_until_ms = 0
        self.transferring = 0  # to whom, as last seen
        self.reads: list[asyncio.Future[None]] = []  # to be asked this turn
        self.rounds: dict[ReadRound, None] = {}  # asked, not confirmed
        self.awaiting_apply: deque[tuple[int, list[asyncio.Future[None]]]] = deque()
        self.incoming: IncomingSnapshot | None = None
        self.installed: asyncio.Future[bool] | None = None
        self.installation: Installation | None = None
        self.change: ConfigurationChange | None = None
        self.left: Left | None = None  # it is no member, and blank: see `leaving.py`
        self.farewell: Left | None = None  # what others say of that
        self.leaves_at_ms = 0  # when it is to become so; 0: it is a member, or that is not known to be otherwise
        self.asks_at_ms = 0  # not before then, whether it is one
        self.told_digest = 0  # index of the last checksum in the log that was applied or proposed here

    @property
    def leader(self) -> int | None:
        return self.raft.leader or None

    def not_leader(self) -> NotLeader:
        leader = self.leader
        where = f"node {leader} does" if leader and leader != self.raft.node_id else "nobody is known to at the moment"
        return NotLeader(f"this node does not lead group {self.group}, {where}; nothing was changed", leader=leader)

    def is_alone(self) -> bool:
        """Whether nobody else could be elected."""
        configuration = self.raft.configuration
        return configuration.voters == (self.raft.node_id,) and not configuration.outgoing

    # What ends with the office.

    def drop_inbox(self) -> list[Proposal | ProposalRun]:
        dropped = list(self.inbox)
        self.inbox.clear()
        return dropped

    def fail_reads(self, error: WheelschedError) -> None:
        for futures in [self.reads, *(read.waiting for read in self.rounds), *(waiting for _, waiting in self.awaiting_apply)]:
            for future in futures:
                fail(future, error)
        self.reads = []
        self.rounds.clear()
        self.awaiting_apply.clear()

    def fail_change(self) -> None:
        change, self.change = self.change, None
        if change is not None:
            fail(change.future, OutcomeUnknown(f"group {self.group} changed its leader; look at its configuration before repeating"))

    # Entries.

    def take_waiting(self, index: int, term: int) -> tuple[InLog | None, list[InLog]]:
        """The entry committed at an index, if it was put there by this node; and those that lost, for certain, because it was not
        them: whatever is committed from here on comes behind it."""
        if not self.in_log:
            return None, []
        found = self.in_log.pop((index, term), None)
        lost: list[InLog] = []
        if self.in_log and next(iter(self.in_log))[0] <= index:
            lost = [self.in_log.pop(key) for key in [key for key in self.in_log if key[0] <= index]]
        return found, lost

    def take_all_waiting(self) -> list[InLog]:
        waiting = list(self.in_log.values())
        self.in_log.clear()
        return waiting

    def settle_reads(self) -> None:
        """Answer the reads whose index is applied."""
        awaiting, applied = self.awaiting_apply, self.state.applied_index
        while awaiting and awaiting[0][0] <= applied:
            for future in awaiting.popleft()[1]:
                if not future.done():
                    future.set_result(None)


def fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """End a future in an error that may go unread: whoever awaited it may have hung up."""
    if not future.done():
        future.set_exception(error)
        future.exception()


def matches(message: InstallSnapshot, other: InstallSnapshot) -> bool:
    """Whether both name one snapshot."""
    return (message.sender, message.term, message.snapshot_id) == (other.sender, other.term, other.snapshot_id)
