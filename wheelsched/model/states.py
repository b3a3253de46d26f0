"""What a job may be and become. Each legal move is one row of `MOVES`; the diagram in `docs/architecture.md` is drawn from it.

A status is *stored* or *seen*. QUEUED is never stored: a stored SCHEDULED or RETRYING job whose time is at or under its group's
watermark is seen as QUEUED, unless it is held. `status_of` is the one function that says so, for apply, rebuild, listings and GET.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from wheelsched.model.rows import JobState


class Status(IntEnum):
    SCHEDULED = 0
    QUEUED = 1
    RUNNING = 2
    RETRYING = 3
    CANCEL_REQUESTED = 4
    SUCCEEDED = 5
    DEAD = 6
    CANCELLED = 7
    SKIPPED = 8
    # Internal: what is left of a discarded job that had an idempotency key, so that the key is refused for 24 h. Seen as not found.
    DISCARDED = 9


class Lane(IntEnum):
    """Which due jobs are readied and claimed first."""

    PRECISE = 0
    FLEXIBLE = 1


class Priority(IntEnum):
    CRITICAL = 0
    DEFAULT = 1
    BULK = 2


class Outcome(IntEnum):
    """How an attempt ended; `NONE` where there was none yet, `RUNNING` while it goes on."""

    NONE = 0
    RUNNING = 1
    SUCCEEDED = 2
    RETRYABLE_FAILURE = 3
    FATAL_FAILURE = 4
    CANCELLED = 5
    LEASE_EXPIRED = 6
    TIMED_OUT = 7
    RELEASED = 8


LEASED: Final = frozenset({Status.RUNNING, Status.CANCEL_REQUESTED})
FINAL: Final = frozenset({Status.SUCCEEDED, Status.DEAD, Status.CANCELLED, Status.SKIPPED})

# (from, cause, to), of seen statuses.
MOVES: Final[tuple[tuple[Status, str, Status], ...]] = (
    (Status.SCHEDULED, "fire", Status.QUEUED),
    (Status.SCHEDULED, "run", Status.QUEUED),
    (Status.SCHEDULED, "update", Status.SCHEDULED),
    (Status.SCHEDULED, "update", Status.QUEUED),
    (Status.SCHEDULED, "cancel", Status.CANCELLED),
    (Status.SCHEDULED, "skip", Status.SKIPPED),
    (Status.QUEUED, "claim", Status.RUNNING),
    (Status.QUEUED, "cancel", Status.CANCELLED),
    (Status.QUEUED, "start_deadline", Status.SKIPPED),
    (Status.RUNNING, "succeeded", Status.SUCCEEDED),
    (Status.RUNNING, "retry", Status.RETRYING),
    (Status.RUNNING, "exhausted", Status.DEAD),
    (Status.RUNNING, "fatal", Status.DEAD),
    (Status.RUNNING, "release", Status.QUEUED),
    (Status.RUNNING, "cancel", Status.CANCEL_REQUESTED),
    (Status.RUNNING, "cancelled", Status.CANCELLED),
    (Status.RETRYING, "timer", Status.QUEUED),
    (Status.RETRYING, "run", Status.QUEUED),
    (Status.RETRYING, "cancel", Status.CANCELLED),
    (Status.CANCEL_REQUESTED, "succeeded", Status.SUCCEEDED),
    (Status.CANCEL_REQUESTED, "ended", Status.CANCELLED),
    (Status.DEAD, "redrive", Status.SCHEDULED),
    (Status.DEAD, "redrive", Status.QUEUED),
    (Status.DEAD, "discard", Status.DISCARDED),
)

# Looked up once: an enum member costs 0.1 us a time.
_STATUSES: Final = tuple(Status)
_QUEUED: Final = Status.QUEUED
_RETRYING: Final = int(Status.RETRYING)

LEGAL: Final = frozenset((before, after) for before, _cause, after in MOVES)


def due_at_ms(job: JobState) -> int:
    """The instant a waiting job is due: `next_attempt_at` of a retry, else `fire_at`."""
    return job.next_attempt_at_ms if job.status == _RETRYING else job.fire_at_ms


def status_of(job: JobState, watermark_ms: int) -> Status:
    """The status everybody sees (DESIGN 5). O(1)."""
    status = job.status
    # Hot: every claim asks. Plain integers (SCHEDULED 0, RETRYING 3) cost a tenth of enum members.
    if (status == 0 or status == 3) and not job.held and due_at_ms(job) <= watermark_ms:
        return _QUEUED
    return _STATUSES[status]
