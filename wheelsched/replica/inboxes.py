"""The bounded way into the logs of groups that this node leads, and what became of what went in."""

from __future__ import annotations

from collections.abc import Sequence

from wheelsched.core.errors import Unavailable
from wheelsched.core.limits import INBOX_BYTES_MAX, INBOX_COMMANDS_MAX
from wheelsched.model.commands import COMMAND_VERSION, Entry, Fire, encode_entry
from wheelsched.raft import Answer
from wheelsched.replica.proposals import Answered, Proposal, ProposalRun, command_bytes, take_entry
from wheelsched.replica.raft_member import InLog, RaftMember


class Inboxes:
    """Counts what waits in all groups together. A command is in an inbox, then in the log of a leader, then applied or lost."""

    def __init__(self) -> None:
        self.count = 0  # commands in inboxes
        self.bytes = 0
        self.in_log_count = 0  # entries cut here and neither applied nor lost
        self.busy: dict[int, None] = {}  # groups with something in their inbox, the first to be served first

    @property
    def is_empty(self) -> bool:
        return not (self.count or self.in_log_count)

    def check_room(self, count: int, size: int, *, urgent: bool, own: bool) -> None:
        factor = 4 if urgent else 1
        full = self.count + count > INBOX_COMMANDS_MAX * factor or self.bytes + size > INBOX_BYTES_MAX * factor
        if full and not own:
            raise Unavailable("too many changes wait for the disk; try again in a second", retry_after_s=1)

    def add(self, member: RaftMember, proposal: Proposal | ProposalRun, count: int, size: int) -> None:
        if type(proposal) is Proposal and type(proposal.command) is Fire:
            # All groups wait for the slowest Fire of a sweep: one behind 10,000 commands of a flooded group came 78 turns late.
            member.inbox.appendleft(proposal)
        else:
            member.inbox.append(proposal)
        member.waiting_count += count
        self.count += count
        self.bytes += size
        self.busy[member.group] = None

    def cut(self, member: RaftMember, stamp_ms: int, *, leads: bool) -> bool:
        """Propose one entry of what waits in the group's inbox, within the bounds of an entry; whether the core took it. `leads` (and may
        fire): where a command may leave something due, the Fire for it comes along."""
        inbox = member.inbox
        proposals, commands, size, fire = take_entry(inbox, stamp_ms)
        count = len(commands)
        if fire and leads:
            commands.append(Fire(stamp_ms))
        entry = Entry(COMMAND_VERSION, stamp_ms, commands)
        raft = member.raft
        if raft.propose([encode_entry(entry)]) is not Answer.ACCEPTED:
            # A transfer is under way, or too much is not committed: for as long as that lasts it waits here.
            inbox.extendleft(reversed(proposals))
            return False
        member.in_log[raft.log.last_index, raft.term] = InLog(entry, proposals)
        self.in_log_count += 1
        member.waiting_count -= count
        self.count -= count
        self.bytes -= size
        return True

    def fail(self, member: RaftMember) -> None:
        """Nothing in the group's inbox will be proposed: this node does not lead it."""
        self._drop(member, member.not_leader())

    def _drop(self, member: RaftMember, error: Exception) -> None:
        dropped = member.drop_inbox()
        if dropped:
            self.count -= member.waiting_count
            member.waiting_count = 0
            self.bytes -= sum([item.size if isinstance(item, ProposalRun) else command_bytes(item.command) for item in dropped])
            fail_all(dropped, error)

    def fail_in_log(self, lost: Sequence[InLog], error: Exception) -> None:
        self.in_log_count -= len(lost)
        for item in lost:
            fail_all(item.proposals, error)

    def clear(self, member: RaftMember, error: Exception) -> None:
        """The node ends: everybody is told, wherever their command stands."""
        self._drop(member, error)
        self.fail_in_log(member.take_all_waiting(), error)


def fail_all(proposals: Sequence[Answered], error: Exception) -> None:
    for proposal in proposals:
        if proposal.batch is not None:
            proposal.batch.fail(error)
