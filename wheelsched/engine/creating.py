"""Creates that follow one another in an entry, made together: what `jobs.create` does to each, in one pass over all of them.

Most entries under load are such a run, and what a create costs by itself is the calls around it. A keyed create ends a run, for
it has to look for the job that its key may have made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from wheelsched.engine.context import Context
from wheelsched.model.commands import AnyCommand, Create, Reply
from wheelsched.model.effects import JobsCreated

_PRIORITIES: Final = 3


def is_run(commands: Sequence[AnyCommand], start: int) -> bool:
    """Whether at least two creates without a key begin at `start`."""
    if start + 1 >= len(commands):
        return False
    first, second = commands[start], commands[start + 1]
    return type(first) is Create and not first.fingerprint and type(second) is Create and not second.fingerprint


def create_run(context: Context, commands: Sequence[AnyCommand], start: int) -> list[Reply]:
    """Make the jobs of the run that begins at `start`; a reply for each."""
    txn = context.txn
    states, tallies = txn.create_many(commands, start, (context.stamp_ms, context.time_ms, context.group_state.watermark_ms))
    for tenant, queue, priority, count in tallies:
        # SCHEDULED is status 0: its cells come first.
        assert priority < _PRIORITIES
        txn.counts(tenant, queue).cells[priority] += count
    context.effects.append(JobsCreated(states))
    return [Reply(state=state) for state in states]
