"""What changes state: commands, as they stand in the log, and the reply apply gives to each.

A command carries every choice made by the leader (time is the entry's stamp; jitter is drawn and sent along), so that apply is a
function of (state, entry). Tags and field order are the format: fields are only ever appended, with a default.
"""

from __future__ import annotations

from typing import Final

import msgspec

from wheelsched.model.members import GroupRow, MemberRow
from wheelsched.model.rows import JobState
from wheelsched.model.schedules import NextRun, Successor

COMMAND_VERSION: Final = 1


class Command(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of all; each has a tag of its own in the log."""


class Create(Command, frozen=True, tag="c"):
    """Insert a job. `run_at_ms` -1: `delay_ms` after the stamp. `fingerprint` not empty: the id came from an Idempotency-Key."""

    job_id: bytes
    tenant: str
    queue: str
    priority: int
    run_at_ms: int
    delay_ms: int
    window_ms: int  # 0: precise
    spread_ms: int  # a batch spread over a window; 0: not
    spec: bytes  # JobSpec, with the same window_ms
    payload: bytes
    fingerprint: bytes = b""


class Update(Command, frozen=True, tag="u"):
    """PATCH: `run_at_ms` -1 and `delay_ms` -1 leave the time; `priority` -1 leaves it; spec and payload None leave them."""

    job_id: bytes
    tenant: str
    run_at_ms: int = -1
    delay_ms: int = -1
    priority: int = -1
    window_ms: int = -1  # -1: timing as it is
    # Replacements of single fields of the spec, by name: max_attempts, initial_backoff_ms, max_backoff_ms, timeout_ms, labels.
    spec_changes: dict[str, int | dict[str, str]] = {}
    payload: bytes | None = None
    if_version: int = 0  # 0: any
    actor: str = ""
    successor: Successor | None = None  # of a schedule's next occurrence whose time this changes


class Cancel(Command, frozen=True, tag="x"):
    job_id: bytes
    tenant: str
    actor: str = ""
    successor: Successor | None = None  # of a schedule's next occurrence


class Fire(Command, frozen=True, tag="f"):
    """Move the watermark to `up_to_ms` (never above the stamp), and fire the named held jobs (at most 100)."""

    up_to_ms: int
    held: list[tuple[bytes, int]] = []  # (job id, version)


class Claim(Command, frozen=True, tag="l"):
    """Lease jobs to a worker; each names the version it was seen with, so that a job is claimed once."""

    jobs: list[tuple[bytes, int]]  # (job id, version); version 0: whatever it is
    lease_ms: int
    worker: str = ""


class Complete(Command, frozen=True, tag="d"):
    """An attempt's end. `jitter` is 32 random bits: the backoff is jitter / 2^32 of its bound."""

    job_id: bytes
    attempt: int
    fencing: int
    outcome: int  # SUCCEEDED, RETRYABLE_FAILURE, FATAL_FAILURE, CANCELLED
    jitter: int
    error: bytes = b""  # JSON
    result: bytes = b""  # JSON
    retry_after_ms: int = -1


class Extend(Command, frozen=True, tag="e"):
    """A heartbeat that asks for another lease length than the one on record."""

    job_id: bytes
    attempt: int
    fencing: int
    lease_ms: int


class Expire(Command, frozen=True, tag="o"):
    """An attempt whose lease or timeout ran out (`outcome` LEASE_EXPIRED or TIMED_OUT), or, with attempt 0, a job whose start
    deadline passed."""

    job_id: bytes
    attempt: int
    fencing: int
    outcome: int
    jitter: int


class Release(Command, frozen=True, tag="r"):
    """Back to the queue, the attempt not counted."""

    job_id: bytes
    attempt: int
    fencing: int


class Redrive(Command, frozen=True, tag="v"):
    """A DEAD job runs again, `delay_ms` from the stamp."""

    job_id: bytes
    tenant: str
    delay_ms: int = 0
    actor: str = ""


class Discard(Command, frozen=True, tag="w"):
    job_id: bytes
    tenant: str
    actor: str = ""


class RunNow(Command, frozen=True, tag="n"):
    job_id: bytes
    tenant: str
    actor: str = ""
    successor: Successor | None = None  # of a schedule's next occurrence


class Purge(Command, frozen=True, tag="p"):
    """Remove finished jobs of one status of a queue that ended before `before_ms`: at most `limit`, from `after` (a key's tail) on."""

    tenant: str
    queue: str
    status: int
    before_ms: int
    limit: int = 200
    after: bytes = b""


class PutQueue(Command, frozen=True, tag="q"):
    """Meta group: settings of a queue. `settings` is a QueueSettings row; empty: make the queue known, change nothing."""

    tenant: str
    queue: str
    settings: bytes = b""
    actor: str = ""


class PauseQueue(Command, frozen=True, tag="z"):
    tenant: str
    queue: str
    paused: bool
    actor: str = ""


# Schedules. Instants need time zones, so the leader computes them and they travel in the command; what a command was computed from
# (version of the definition, occurrence that waits) is named, and where that is no longer so the command changes nothing.


class PutSchedule(Command, frozen=True, tag="S"):
    """Create or replace a schedule; its waiting occurrence is withdrawn and `next` put in its place."""

    definition: bytes  # Definition row; id, version, times and `paused` are set by apply where the schedule exists
    next: NextRun
    create: bool = False  # refuse where the name is taken
    if_version: int = 0  # 0: any
    paused: int = -1  # -1: as it is, a new one is not
    actor: str = ""


class DropSchedule(Command, frozen=True, tag="D"):
    """Delete a schedule and withdraw what waits; its history stays."""

    tenant: str
    name: str
    actor: str = ""


class PauseSchedule(Command, frozen=True, tag="P"):
    """Stop or go on. To go on, `next` is the first occurrence from now on, and what the pause left out is recorded."""

    tenant: str
    name: str
    paused: bool
    version: int = 0  # the definition's, where going on: `next` was computed for it
    next: NextRun = NextRun()
    left_out: tuple[int, int, int] | None = None  # (first, last, count)
    actor: str = ""


class Occur(Command, frozen=True, tag="O"):
    """A schedule's waiting occurrence has come: offer `runs` (instants, oldest first), record what is left out, insert `next`.

    Where `at_ms` is none of `runs` it is skipped for `reason`. `missed`: it was due while nothing could fire.
    """

    tenant: str
    name: str
    version: int
    at_ms: int
    next: NextRun
    runs: list[tuple[int, str]]  # (instant, nominal reading or empty)
    missed: bool = False
    reason: int = 0
    left_out: list[tuple[int, int, int, int]] = []  # (first, last, count, reason), without rows
    decided_ms: int = 0  # the last instant this decides


class Rezone(Command, frozen=True, tag="Z"):
    """New time-zone data: the waiting occurrence `at_ms` moves to `next`, where that differs; the version is noted."""

    tenant: str
    name: str
    version: int
    at_ms: int
    next: NextRun


class StartRun(Command, frozen=True, tag="M"):
    """A run by hand, at `run_at_ms` or `delay_ms` from the stamp. `fingerprint` not empty: the id came from an Idempotency-Key."""

    job_id: bytes
    tenant: str
    name: str
    run_at_ms: int = -1
    delay_ms: int = 0
    payload: bytes | None = None
    fingerprint: bytes = b""
    actor: str = ""


class Backfill(Command, frozen=True, tag="B"):
    """A run for each instant that has no job yet, at most 100: (instant, start of its interval, nominal reading or empty)."""

    tenant: str
    name: str
    version: int
    instants: list[tuple[int, int, str]]
    actor: str = ""


class ChangeMembers(Command, frozen=True, tag="A"):
    """Meta group: write rows of members and groups, all or none, decided on `if_version` of them. 0: the first ones, of a new cluster."""

    if_version: int
    members: list[MemberRow] = []
    groups: list[GroupRow] = []
    cluster_id: bytes = b""  # the last two: with the first rows
    replication_factor: int = 0
    actor: str = ""


class ReleaseHold(Command, frozen=True, tag="H"):
    """Meta group: a cluster that was restored held dispatches from now on."""

    actor: str = ""


AnyCommand = (
    Create | Update | Cancel | Fire | Claim | Complete | Extend | Expire | Release | Redrive | Discard | RunNow | Purge
    | PutQueue | PauseQueue | PutSchedule | DropSchedule | PauseSchedule | Occur | Rezone | StartRun | Backfill
    | ChangeMembers | ReleaseHold
)  # fmt: skip


class Reply(msgspec.Struct, frozen=True, gc=False):
    """What apply answers. `refusal` is the code of an error in core/errors.py, empty where the command took effect (or had before)."""

    refusal: str = ""
    detail: str = ""
    state: JobState | None = None
    replayed: bool = False
    states: tuple[JobState | None, ...] = ()  # Claim: one per job, None where it could not be claimed
    count: int = 0  # Purge: jobs removed
    cursor: bytes = b""  # Purge: where to go on; empty: the end was reached
    counts: tuple[int, ...] = ()  # Backfill: runs made, occurrences left out, occurrences that had a job


class Entry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The payload of one log entry: all commands of one group and turn."""

    version: int
    stamp_ms: int
    commands: list[AnyCommand]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Entry).decode


def encode_entry(entry: Entry) -> bytes:
    return _encode(entry)


def decode_entry(payload: bytes) -> Entry:
    """Raises `msgspec.ValidationError` for a command this release does not know: the node must stop, never skip it."""
    return _decode(payload)
