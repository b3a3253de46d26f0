"""The state machine of one group: entries in, replies and effects out, rows into a transaction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from wheelsched.core.invariants import invariant
from wheelsched.engine import attempts, creating, jobs, meta, meta_members, purge, schedules
from wheelsched.engine.context import CANCEL_REQUESTED, RETRYING, RUNNING, SCHEDULED, Context
from wheelsched.engine.transaction import Transaction
from wheelsched.model import commands as c
from wheelsched.model import keys
from wheelsched.model.commands import COMMAND_VERSION, Entry, Reply
from wheelsched.model.effects import Effect
from wheelsched.model.rows import GroupState, JobState
from wheelsched.model.states import Outcome

_HANDLERS: Final[dict[type[c.Command], Callable[[Context, Any], Reply]]] = {
    c.Create: jobs.create,
    c.Update: jobs.update,
    c.Cancel: jobs.cancel,
    c.Fire: jobs.fire,
    c.Claim: attempts.claim,
    c.Complete: attempts.complete,
    c.Extend: attempts.extend,
    c.Expire: attempts.expire,
    c.Release: attempts.release,
    c.Redrive: jobs.redrive,
    c.Discard: jobs.discard,
    c.RunNow: jobs.run_now,
    c.Purge: purge.purge,
    c.PutQueue: meta.put_queue,
    c.PauseQueue: meta.pause_queue,
    c.PutSchedule: schedules.put_schedule,
    c.DropSchedule: schedules.drop_schedule,
    c.PauseSchedule: schedules.pause_schedule,
    c.Occur: schedules.occur,
    c.Rezone: schedules.rezone,
    c.StartRun: schedules.start_run,
    c.Backfill: schedules.backfill,
    c.ChangeMembers: meta_members.change_members,
    c.ReleaseHold: meta.release_hold,
}
# Commands with one job id whose state row they read; Create only where a key may have made the job before.
_OF_ONE_JOB: Final = (c.Complete, c.Cancel, c.Update, c.Extend, c.Expire, c.Release, c.Redrive, c.Discard, c.RunNow)
_FAILED: Final = (int(Outcome.RETRYABLE_FAILURE), int(Outcome.LEASE_EXPIRED), int(Outcome.TIMED_OUT))


class GroupMachine:
    """Applies a group's entries. It keeps nothing between them: what it knows is in `GroupState` and the rows."""

    __slots__ = ("_group",)

    def __init__(self, group: int) -> None:
        self._group = group

    def apply(self, state: GroupState, txn: Transaction, entry: Entry) -> tuple[list[Reply], list[Effect]]:
        """Apply all commands of an entry in order: one reply for each, and what the leader has to do because of them.

        `state` (time, watermark, fencing) and `txn` are changed in place; the caller sets the applied index, calls `txn.finish()`
        and writes both in one batch. A refusal is a reply; raises only for what no release ever proposed.
        """
        invariant(entry.version == COMMAND_VERSION, "entry_version_known", version=entry.version)
        context = Context(self._group, state, txn, entry.stamp_ms, schedules.run_ended)
        commands = entry.commands
        replies: list[Reply] = []
        while len(replies) < len(commands):
            start = len(replies)
            command = commands[start]
            if creating.is_run(commands, start):
                replies += creating.create_run(context, commands, start)
            elif type(command) is c.Complete and (ended := attempts.succeed_run(context, commands, start)):
                replies += ended
            else:
                replies.append(_HANDLERS[type(command)](context, command))
        return replies, context.effects


def prefetch_state_keys(entry: Entry) -> list[bytes]:
    """Ids of the jobs whose state rows `apply` will read, each once: for one multiget, then `Transaction.preload`."""
    ids: dict[bytes, None] = {}
    command: Any
    for command in entry.commands:
        kind = type(command)
        if kind is c.Create:
            if command.fingerprint:
                ids[command.job_id] = None
        elif kind is c.Claim:
            for job_id, _ in command.jobs:
                ids[job_id] = None
        elif kind is c.Fire:
            for job_id, _ in command.held:
                ids[job_id] = None
        elif kind in _OF_ONE_JOB:
            ids[command.job_id] = None
    return list(ids)


def prefetch_job_keys(entry: Entry, txn: Transaction) -> list[bytes]:
    """Keys in JOBS whose rows `apply` will most likely read: for `Transaction.preload_row`, after the state rows were preloaded.

    A guess: what it misses is read singly, what it names too much is read in vain.
    """
    wanted: dict[bytes, None] = {}
    group = txn.group
    command: Any
    for command in entry.commands:
        kind = type(command)
        if kind is c.Fire:
            for job_id, _ in command.held:
                _want(wanted, group, txn.state(job_id))
        elif kind in _OF_ONE_JOB:
            state = txn.state(command.job_id)
            if state is not None and _reads_job(command, state):
                _want(wanted, group, state)
    return list(wanted)


def _want(wanted: dict[bytes, None], group: int, state: JobState | None) -> None:
    if state is not None and state.status <= CANCEL_REQUESTED:
        wanted[keys.job_key(group, state.lane, state.fire_at_ms, state.job_id)] = None


def _reads_job(command: Any, state: JobState) -> bool:
    """Whether this command, on a job in this state, ends it or moves its row."""
    kind, status = type(command), state.status
    if kind is c.Complete or (kind is c.Expire and command.attempt > 0):
        if status == RUNNING:
            return command.outcome not in _FAILED or state.attempt - state.attempt_base >= state.max_attempts
        return status == CANCEL_REQUESTED
    if kind is c.Expire or kind is c.Update:
        return status == SCHEDULED
    if kind is c.Release:
        return status == CANCEL_REQUESTED
    if kind is c.Cancel:
        return status in (SCHEDULED, RETRYING)
    return kind is c.RunNow and status == SCHEDULED
