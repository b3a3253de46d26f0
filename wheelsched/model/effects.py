"""What the leader does because of an applied command: a job changed, the watermark moved, settings or a schedule changed.

Everything the leader keeps in memory (timers, ready queues, leases, counters, metrics) follows from these, so that it can be thrown
away and rebuilt from the rows.
"""

from __future__ import annotations

import msgspec

from wheelsched.model.rows import JobState


class JobChanged(msgspec.Struct, frozen=True, gc=False):
    """`before` None: created. `after` None: gone (purged, discarded). `spec` and `payload_bytes` are not carried: read the row."""

    cause: str  # as in states.MOVES, or "create", "purge"
    before: JobState | None
    after: JobState | None


class JobsCreated(msgspec.Struct, frozen=True, gc=False):
    """Many jobs were created, one behind the other: as so many `JobChanged("create", None, state)`."""

    states: list[JobState]


class JobsMoved(msgspec.Struct, frozen=True, gc=False):
    """Many jobs changed for one cause, "claim" or "succeeded": as so many `JobChanged(cause, before, after)`. `tallies`: how many moved
    alike, as (tenant, queue, status before, after, priority, lane, count)."""

    cause: str
    befores: list[JobState]
    afters: list[JobState]
    tallies: list[tuple[str, str, int, int, int, int, int]]


class Fired(msgspec.Struct, frozen=True, gc=False):
    """The group's watermark now stands at `watermark_ms`."""

    watermark_ms: int


class QueueChanged(msgspec.Struct, frozen=True, gc=False):
    """A queue's settings, of the meta group."""

    tenant: str
    queue: str


class ScheduleChanged(msgspec.Struct, frozen=True, gc=False):
    """A schedule's definition: made, replaced, paused, gone on with, deleted."""

    tenant: str
    name: str


class OccurrencesSkipped(msgspec.Struct, frozen=True, gc=False):
    """Occurrences that do not run, with the reason (schedules.Reason)."""

    tenant: str
    name: str
    reason: int
    count: int
    from_ms: int
    to_ms: int


class HoldReleased(msgspec.Struct, frozen=True, gc=False):
    """The cluster was held after a restore and dispatches from now on; of the meta group."""


Effect = JobChanged | JobsCreated | JobsMoved | Fired | QueueChanged | ScheduleChanged | OccurrencesSkipped | HoldReleased
