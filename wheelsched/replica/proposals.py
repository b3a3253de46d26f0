"""The way into the log: a bounded inbox for each group, and the replies of commands that were proposed together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from wheelsched.core.errors import OutcomeUnknown, Unavailable
from wheelsched.core.limits import ENTRY_BYTES_MAX, ENTRY_COMMANDS_MAX
from wheelsched.model.commands import (
    AnyCommand,
    Backfill,
    Complete,
    Create,
    Fire,
    Occur,
    PutSchedule,
    Redrive,
    Reply,
    RunNow,
    StartRun,
    Update,
)
from wheelsched.replica.kept import Kept

# From so many commands on it pays to put those of one group into its inbox as one.
RUN_COMMANDS_MIN = 4


class Batch:
    """Replies to commands proposed together: one future however many there are, for futures cost more than commands."""

    __slots__ = ("future", "missing", "replies")

    def __init__(self, count: int, loop: asyncio.AbstractEventLoop) -> None:
        self.replies: list[Reply | None] = [None] * count
        self.missing = count
        self.future: asyncio.Future[list[Reply]] = loop.create_future()
        if not count:
            self.future.set_result([])

    def settle(self, position: int, reply: Reply) -> None:
        self.replies[position] = reply
        self.missing -= 1
        if not self.missing and not self.future.done():
            self.future.set_result(self.replies)  # type: ignore[arg-type]  # none is missing

    def settle_many(self, positions: Sequence[int], replies: Sequence[Reply]) -> None:
        """`settle` for each of these."""
        own = self.replies
        for position, reply in zip(positions, replies, strict=True):
            own[position] = reply
        self.missing -= len(positions)
        if not self.missing and not self.future.done():
            self.future.set_result(own)  # type: ignore[arg-type]  # none is missing

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # whoever awaited may have hung up; that is no lost error


class Proposer(Protocol):
    """The way into the log."""

    def propose_many(self, commands: Sequence[tuple[int, AnyCommand]], *, urgent: bool = False, own: bool = False) -> Batch: ...


class ReplicaSet(Proposer, Protocol):
    """All groups of a node, alone or replicated: what dispatch and node know of them."""

    # What is proposed together can only come to nothing together: one log, and nobody else to lead a group.
    groups_share_fate: bool
    # Whether a command that may leave something due brings the Fire for it along; not while the cluster is held.
    fires_along: bool
    turn_count: int
    entry_count: int
    on_commit_ms: Callable[[float], None]

    def watermark_ms(self, group: int) -> int: ...

    @property
    def inbox_count(self) -> int: ...

    def recover(self) -> int:
        """Apply what the log holds and is known to be committed; call once, before `run`. Returns the number of entries."""
        ...

    def propose(self, group: int, command: AnyCommand, *, urgent: bool = False) -> Batch: ...

    def leads(self, group: int) -> bool:
        """Whether this node may act for the group at this instant."""
        ...

    async def read_barrier(self, group: int) -> None:
        """Return once the rows here hold everything that was acknowledged before the call. Raises NotLeader."""
        ...

    @property
    def kept(self) -> Kept:
        """What is kept of leased jobs."""
        ...

    async def wait_idle(self) -> None: ...

    async def run(self) -> None: ...

    def stop(self) -> None: ...

    def abort(self) -> None: ...


async def propose_each(
    replicas: Proposer, commands: Sequence[tuple[int, AnyCommand]], *, urgent: bool = False, own: bool = True
) -> list[Reply | Exception]:
    """What became of each command, in order: its reply, or why there is none (its group is led elsewhere, there is no room, the outcome
    is unknown). Groups do not share their fate, as those of one batch would."""
    by_group: dict[int, list[int]] = {}
    for position, (group, _) in enumerate(commands):
        by_group.setdefault(group, []).append(position)
    answers: list[Reply | Exception] = [OutcomeUnknown("not answered")] * len(commands)
    waiting: list[tuple[list[int], Batch]] = []
    for positions in by_group.values():
        try:
            batch = replicas.propose_many([commands[position] for position in positions], urgent=urgent, own=own)
        except Unavailable as error:  # refused before the log
            for position in positions:
                answers[position] = error
        else:
            waiting.append((positions, batch))
    results = await asyncio.gather(*(batch.future for _, batch in waiting), return_exceptions=True)
    for (positions, _), result in zip(waiting, results, strict=True):
        if isinstance(result, BaseException) and not isinstance(result, Exception):
            raise result
        for place, position in enumerate(positions):
            answers[position] = result if isinstance(result, Exception) else result[place]
    return answers


class Answered(Protocol):
    """Commands in an entry, and who waits for what became of them; `batch` None: nobody."""

    @property
    def batch(self) -> Batch | None: ...

    def answer(self, replies: Sequence[Reply], start: int, /) -> int:
        """Take the own replies, which begin at `start`; where the next ones begin."""
        ...


class Proposal(msgspec.Struct, gc=False):
    """A command in the inbox; `batch` None: nobody waits for the reply."""

    command: AnyCommand
    batch: Batch | None
    position: int

    def answer(self, replies: Sequence[Reply], start: int) -> int:
        """Take the own reply, the one at `start`; where the next ones begin."""
        if self.batch is not None:
            self.batch.settle(self.position, replies[start])
        return start + 1


class ProposalRun(msgspec.Struct, gc=False):
    """Creates or ends of attempts of one batch and group, in the inbox as one; `positions` in the batch. `due_from_ms`: the first stamp
    at which one of them may leave a due job."""

    commands: list[AnyCommand]
    positions: list[int]
    batch: Batch
    size: int
    due_from_ms: int

    def answer(self, replies: Sequence[Reply], start: int) -> int:
        """Take the own replies, which begin at `start`; where the next ones begin."""
        end = start + len(self.commands)
        self.batch.settle_many(self.positions, replies[start:end])
        return end

    def split(self, count_max: int, bytes_max: int) -> ProposalRun | None:
        """Take away what fits from the front: at most so many commands and bytes; None where not even the first does."""
        count = size = 0
        for command in self.commands[:count_max]:
            added = command_bytes(command)
            if size + added > bytes_max:
                break
            count += 1
            size += added
        if not count:
            return None
        front = ProposalRun(self.commands[:count], self.positions[:count], self.batch, size, self.due_from_ms)
        self.commands, self.positions, self.size = self.commands[count:], self.positions[count:], self.size - size
        return front


def take_entry(
    inbox: deque[Proposal | ProposalRun], stamp_ms: int
) -> tuple[list[Proposal | ProposalRun], list[AnyCommand], int, bool]:  # fmt: skip
    """Take away what fits into one entry: (who waits, commands, their bytes, whether one of them may leave something due)."""
    proposals: list[Proposal | ProposalRun] = []
    commands: list[AnyCommand] = []
    size = 0
    fire = False
    while inbox and len(commands) < ENTRY_COMMANDS_MAX:
        first = inbox[0]
        if type(first) is ProposalRun:
            run = _take_run(inbox, first, ENTRY_COMMANDS_MAX - len(commands), ENTRY_BYTES_MAX - size, is_first=not commands)
            if run is None:
                break
            size += run.size
            proposals.append(run)
            commands += run.commands
            fire = fire or run.due_from_ms <= stamp_ms
            continue
        assert type(first) is Proposal
        command = first.command
        added = command_bytes(command)
        if commands and size + added > ENTRY_BYTES_MAX:
            break
        size += added
        inbox.popleft()
        proposals.append(first)
        if type(command) is Fire:
            command = bounded_by(command, stamp_ms)
        commands.append(command)
        fire = fire or may_be_due(command, stamp_ms)
    return proposals, commands, size, fire


def _take_run(
    inbox: deque[Proposal | ProposalRun], first: ProposalRun, count_max: int, bytes_max: int, *, is_first: bool
) -> ProposalRun | None:
    """What fits of the run that stands first in an inbox; None: nothing. The first command of an entry always fits."""
    if len(first.commands) <= count_max and first.size <= bytes_max:
        inbox.popleft()
        return first
    front = first.split(count_max, bytes_max)
    if front is None and is_first:
        front = first.split(1, first.size)
    if not first.commands:
        inbox.popleft()
    return front


def command_bytes(command: AnyCommand) -> int:
    """About how many bytes a command adds to its entry; only payloads matter, the rest is a constant."""
    # The kinds that come by the thousand first.
    if type(command) is Create:
        return 160 + len(command.payload) + len(command.spec)
    if type(command) is Complete:
        return 64 + len(command.error) + len(command.result)
    if isinstance(command, Update):
        return 128 + len(command.payload or b"")
    if isinstance(command, PutSchedule):
        return 128 + len(command.definition)
    if isinstance(command, StartRun):
        return 128 + len(command.payload or b"")
    return 96


def may_be_due(command: AnyCommand, stamp_ms: int) -> bool:
    """Whether applying it may leave a job that is due at the stamp, so that a Fire should follow in the same entry.

    Wrongly true costs a few bytes; wrongly false costs the job one more turn, since its timer fires at the next sweep anyway.
    """
    if type(command) is Complete:
        return False
    if isinstance(command, (Create, Update, StartRun)):
        return command.run_at_ms <= stamp_ms and command.delay_ms <= 0
    if isinstance(command, Redrive):
        return command.delay_ms <= 0
    return isinstance(command, (RunNow, Occur, Backfill))


def bounded_by(fire: Fire, stamp_ms: int) -> Fire:
    """The clock may have stepped back since the command was made: the watermark never passes its entry's stamp."""
    return fire if fire.up_to_ms <= stamp_ms else Fire(stamp_ms, fire.held)
