"""What the leader does because of an applied command. Two kinds are enough: a job changed, and the watermark moved.

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


class Fired(msgspec.Struct, frozen=True, gc=False):
    """The group's watermark now stands at `watermark_ms`."""

    watermark_ms: int


class QueueChanged(msgspec.Struct, frozen=True, gc=False):
    """A queue's settings, of the meta group."""

    tenant: str
    queue: str


Effect = JobChanged | Fired | QueueChanged
