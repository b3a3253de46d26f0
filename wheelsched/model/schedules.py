"""A recurring schedule as it is stored, and what ties a job to it.

Two rows each, so that a firing rewrites little: the *definition* (large, for it holds the payload; rarely changed) and the *course*
(small; changed by every occurrence). Both are msgpack arrays of a struct: fields are only ever appended, with a default.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import msgspec


class Overlap(IntEnum):
    ALLOW = 0
    FORBID = 1
    REPLACE = 2
    BUFFER_ONE = 3


class Missed(IntEnum):
    """What happens to occurrences that were due while nothing could fire."""

    RUN_LATEST = 0
    RUN_ALL = 1
    SKIP = 2


class Phase(IntEnum):
    """Where a run stands in the course of its schedule. The first three are held: the watermark passes over them."""

    NEXT = 1  # the schedule's one next occurrence; whatever takes it away carries its successor
    SET = 2  # waits for a time of its own: moved, or asked for by hand; overlap is decided then
    BUFFERED = 3  # due, and waits for an earlier run's end
    FREE = 4  # fired under `allow`: its end concerns nobody
    COUNTED = 5  # fired under another policy: in `Course.runs` until its end


class Cause(IntEnum):
    """Why there is a run."""

    ON_TIME = 0
    CATCH_UP = 1
    MANUAL = 2
    BACKFILL = 3


class Reason(IntEnum):
    """Why an occurrence did not run."""

    OVERLAP = 0
    BUFFER_FULL = 1
    REPLACED = 2
    MISSED = 3
    MISSED_DEADLINE = 4
    SUPERSEDED = 5
    CATCH_UP_CAP = 6
    PAUSED = 7
    SHADOW = 8


REASONS: Final = tuple(reason.name.lower() for reason in Reason)
# Catch-up runs of `run_all` at one recovery: the newest so many.
CATCH_UP_MAX: Final = 100
# An occurrence decided this late is still on time; above it the starting deadline counts.
LATE_ALLOWED_MS: Final = 1_000
# Records of what was left out, for each schedule; the oldest go first.
SKIP_ROWS_MAX: Final = 1_000


class Run(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What ties a job to its schedule; part of its state row."""

    schedule_id: bytes
    schedule: str
    scheduled_for_ms: int  # the occurrence's nominal instant; -1: a run by hand
    phase: int
    cause: int = Cause.ON_TIME
    from_ms: int = -1  # the interval the run covers is [from, scheduled_for); -1: none is known
    nominal: str = ""  # what the zone's clock was to show, where it jumped over that: `2026-03-08T02:30`
    capped: bool = False  # the definition had a max_concurrency when the run was made


class Definition(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What the client asked for. Neither cron nor interval: run by hand only. Instants are UTC Unix ms, -1 where there is none."""

    schedule_id: bytes
    tenant: str
    name: str
    queue: str
    version: int = 1
    created_at_ms: int = 0
    updated_at_ms: int = 0
    cron: str = ""
    zone: str = "UTC"
    every_ms: int = 0
    anchor_ms: int = -1
    jitter_ms: int = 0
    offset_ms: int = 0  # hash(name) mod jitter
    start_ms: int = -1  # inclusive
    end_ms: int = -1  # exclusive
    paused: bool = False
    missed: int = Missed.RUN_LATEST
    starting_deadline_ms: int = -1
    overlap: int = Overlap.ALLOW
    max_concurrency: int = -1
    shadow: bool = False  # record what would have fired, run nothing
    priority: int = 1
    window_ms: int = 0
    spec: bytes = b""  # JobSpec
    payload: bytes = b"null"
    key_digest: bytes = b""  # of the Idempotency-Key it was made with
    fingerprint: bytes = b""  # of that request's body


class Course(msgspec.Struct, array_like=True, gc=False):
    """How far a schedule has come. `decided_ms`: every occurrence up to here has run, was left out, or waits in a row of its own."""

    schedule_id: bytes
    version: int  # of the definition
    decided_ms: int
    zone: str = "UTC"
    zone_version: str = ""
    zone_digest: str = ""
    next_at_ms: int = -1
    next_fire_at_ms: int = -1
    next_job: bytes = b""
    runs: list[bytes] = []
    buffered: bytes = b""
    last_at_ms: int = -1  # scheduled_for of the last run, or when it was asked for by hand
    last_job: bytes = b""
    covered_ms: int = -1  # the interval given to the last run ended here
    skipped: list[int] = []  # by Reason
    skip_row_count: int = 0
    # The last record of what was left out, extended while nothing ran in between.
    skip_from_ms: int = -1
    skip_count: int = 0
    skip_reason: int = 0


class SkipRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Occurrences left out without a job: the first and the last of them."""

    from_ms: int
    to_ms: int
    count: int
    reason: int


class NextRun(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An occurrence as the leader computed it, with the zone data it used. `at_ms` -1: there is none any more."""

    at_ms: int = -1
    nominal: str = ""
    zone_version: str = ""
    zone_digest: str = ""


class Successor(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What follows the occurrence `at_ms` of a definition's version, for a command that takes that one away."""

    version: int
    at_ms: int
    next: NextRun


def same_definition(one: Definition, other: Definition) -> bool:
    """Whether a client asked for the same thing twice; what the server keeps beside it does not count."""
    return _asked(one) == _asked(other)


def same_timing(one: Definition, other: Definition) -> bool:
    """Whether both have the same occurrences."""
    return all(getattr(one, name) == getattr(other, name) for name in _TIMING)


_TIMING: Final = ("cron", "zone", "every_ms", "anchor_ms", "offset_ms", "start_ms", "end_ms")
_KEPT: Final = frozenset({"schedule_id", "version", "created_at_ms", "updated_at_ms", "paused", "key_digest", "fingerprint"})
_ASKED: Final = tuple(name for name in Definition.__struct_fields__ if name not in _KEPT)


def _asked(definition: Definition) -> tuple[object, ...]:
    return tuple(getattr(definition, name) for name in _ASKED)
