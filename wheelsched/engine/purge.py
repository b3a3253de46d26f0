"""The end of history: finished jobs whose time is over, in slices."""

from __future__ import annotations

from typing import Final

from wheelsched.engine.context import DISCARDED, SUCCEEDED, Context
from wheelsched.model import keys
from wheelsched.model.commands import Purge, Reply
from wheelsched.model.rows import JobState, decode_done

# Create, claim and success: a job that ended so has no row in `attempts`.
_VERSION_PLAIN: Final = 3
# A range deletion costs about three point deletions and slows later reads; one wide one for an emptied head pays (LIMITS.md 4).
_RANGE_ROWS_MIN: Final = 8


def purge(context: Context, command: Purge) -> Reply:
    """Remove those of the next `limit` finished jobs that ended before `before_ms` and need not be kept longer."""
    assert command.limit > 0
    prefix = keys.done_prefix(context.group, command.tenant, command.queue, command.status)
    start = prefix + command.after + b"\0" if command.after else prefix
    rows = context.txn.scan(keys.DONE, start, keys.prefix_end(prefix), command.limit)
    removed: list[bytes] = []
    head = 0  # how many rows from the start on were removed without a gap
    for looked_at, (key, row) in enumerate(rows):
        state = decode_done(row).state
        if state.finished_at_ms >= command.before_ms or state.keep_until_ms > context.stamp_ms:
            continue
        _forget(context, state)
        removed.append(key)
        if head == looked_at:
            head += 1
    _delete_done(context, removed, head, start)
    cursor = rows[-1][0][len(prefix) :] if len(rows) == command.limit else b""
    return Reply(count=len(removed), cursor=cursor)


def drop_attempts(context: Context, state: JobState) -> None:
    """Delete a finished job's attempt rows, reading none: there is at most one for each version after the first."""
    if state.status == SUCCEEDED and state.version <= _VERSION_PLAIN:
        return
    group, job_id = context.group, state.job_id
    if state.version <= _VERSION_PLAIN:
        for version in range(2, state.version + 1):
            context.txn.delete(keys.ATTEMPTS, keys.attempt_key(group, job_id, version))
        return
    context.txn.delete_range(keys.ATTEMPTS, keys.attempt_key(group, job_id, 0), keys.attempt_key(group, job_id, state.version) + b"\0")


def _forget(context: Context, state: JobState) -> None:
    if state.status == DISCARDED:
        # Its attempts, its count and the news of its end went when it was discarded.
        context.txn.put_state(state.job_id, None)
        return
    drop_attempts(context, state)
    context.forget("purge", state)


def _delete_done(context: Context, removed: list[bytes], head: int, start: bytes) -> None:
    if head >= _RANGE_ROWS_MIN:
        context.txn.delete_range(keys.DONE, start, removed[head - 1] + b"\0")
        removed = removed[head:]
    for key in removed:
        context.txn.delete(keys.DONE, key)
