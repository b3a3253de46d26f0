"""What is stored of a job, byte by byte. Every row begins with a format byte, readable by the next release and the one before.

State, attempt and done rows are msgpack arrays of a struct: fields are only ever appended, with a default. The job row is a
fixed header, three variable parts and then the client's payload bytes, which are never parsed and written anew.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final

import msgspec

from wheelsched.core.invariants import invariant
from wheelsched.core.limits import LEASE_MS_DEFAULT, RETENTION_MS_DEFAULT
from wheelsched.model.schedules import Course, Definition, Run, SkipRow
from wheelsched.model.states import Outcome, Status

FORMAT: Final = b"\x01"

# Timer record: at_ms, the id's random half, version, word (wheelsched.wheel and wheelsched.fairness carry it opaquely).
TIMER: Final = struct.Struct("<qQII")
# Kinds of timer, in the low three bits of the word: fired by the watermark; fired by name; a retry.
KIND_JOB, KIND_HELD, KIND_RETRY, KIND_NEXT = 0, 1, 2, 3


def timer_word(queue_number: int, priority: int, kind: int) -> int:
    """`queue_number` (27 bits, this process's number of a queue) << 5 | `priority` << 3 | `kind`."""
    return queue_number << 5 | priority << 3 | kind


class JobState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The state row: everything that changes while the job lives. Instants are UTC Unix ms, 0 where they do not apply."""

    job_id: bytes
    status: int  # a stored Status, never QUEUED
    version: int
    tenant: str
    queue: str
    lane: int
    priority: int
    fire_at_ms: int
    created_at_ms: int
    updated_at_ms: int
    held: bool = False
    attempt: int = 0  # the current or last counted attempt
    attempt_base: int = 0  # attempts before the last redrive: max_attempts counts from here
    fencing: int = 0  # token of the current or last attempt
    lease_ms: int = 0
    lease_expires_at_ms: int = 0  # as granted at the claim; heartbeats move it in the leader's memory only
    next_attempt_at_ms: int = 0
    first_started_at_ms: int = 0
    started_at_ms: int = 0  # of the current or last attempt
    finished_at_ms: int = 0
    key_at_ms: int = 0  # instant in the idempotency key after a redrive; 0: fire_at_ms
    outcome: int = Outcome.NONE  # of the current or last attempt
    worker: str = ""
    fingerprint: bytes = b""  # of the request body, where it had an Idempotency-Key
    keep_until_ms: int = 0  # not purged before, whatever the queue's retention says
    # Copies from the spec, so that a claim, a retry and an expiry need not read the job row.
    max_attempts: int = 6
    initial_backoff_ms: int = 10_000
    max_backoff_ms: int = 600_000
    timeout_ms: int = 3_600_000
    start_deadline_ms: int = -1  # after fire_at; -1: none
    run_at_ms: int = 0  # as asked for; fire_at is where it was placed
    run: Run | None = None  # of a schedule


class JobSpec(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What the client asked for, apart from queue, priority, time and payload: the same for most jobs of a queue."""

    window_ms: int = 0  # 0: precise
    max_attempts: int = 6
    initial_backoff_ms: int = 10_000
    max_backoff_ms: int = 600_000
    timeout_ms: int = 3_600_000
    start_deadline_ms: int = -1  # -1: none
    labels: dict[str, str] = {}
    payload_ref: str = ""
    traceparent: str = ""
    target: bytes = b""  # JSON of an http target; empty: a task


class AttemptRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One transition that `state` and `done` do not tell: an attempt that failed or was released, an update, a cancel …"""

    at_ms: int
    cause: str  # as in states.MOVES
    before: int  # Status, as seen
    after: int
    attempt: int
    outcome: int = Outcome.NONE
    worker: str = ""
    started_at_ms: int = 0
    lease_expires_at_ms: int = 0
    fencing: int = 0
    error: bytes = b""  # JSON
    actor: str = ""
    detail: str = ""
    next_attempt_at_ms: int = 0  # of a retry


class DoneRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A finished job, whole. `job` is its job row as it was."""

    state: JobState
    job: bytes
    error: bytes = b""  # JSON, empty: none
    result: bytes = b""  # JSON, empty: none


class QueueCounts(msgspec.Struct, array_like=True, gc=False):
    """Jobs by stored status and priority of one queue in one group: `cells[status * 3 + priority]`."""

    cells: list[int] = msgspec.field(default_factory=lambda: [0] * 30)


class GroupState(msgspec.Struct, array_like=True, gc=False):
    """The row `A` of a group, written in the same batch as the rows it describes."""

    applied_index: int = 0
    applied_term: int = 0
    time_ms: int = 0  # max of all stamps: dates rows and events, decides nothing
    watermark_ms: int = 0  # up to here the group has fired
    fencing: int = 0  # the last token minted
    # Checksum of what the entries behind `digest_from` wrote (-1: of some of them, for a release that kept none applied the others). At
    # every window's end it is put aside, for the leader to tell and the others to compare (replica/digests.py).
    digest: int = 0
    digest_from: int = -1
    checked_index: int = 0  # 0: the last window was not whole
    checked_digest: int = 0


class QueueSettings(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Row of the meta group. -1: none."""

    max_concurrency: int = -1
    rate_per_s: float = -1.0
    lease_ms: int = LEASE_MS_DEFAULT
    retention_ms: int = RETENTION_MS_DEFAULT
    weights: tuple[int, int, int] = (70, 25, 5)
    paused: bool = False


_encode = msgspec.msgpack.Encoder().encode
_decode_state = msgspec.msgpack.Decoder(JobState).decode
_decode_spec = msgspec.msgpack.Decoder(JobSpec).decode
_decode_attempt = msgspec.msgpack.Decoder(AttemptRow).decode
_decode_done = msgspec.msgpack.Decoder(DoneRow).decode
_decode_counts = msgspec.msgpack.Decoder(QueueCounts).decode
_decode_group = msgspec.msgpack.Decoder(GroupState).decode
_decode_queue = msgspec.msgpack.Decoder(QueueSettings).decode
_decode_definition = msgspec.msgpack.Decoder(Definition).decode
_decode_course = msgspec.msgpack.Decoder(Course).decode
_decode_skip = msgspec.msgpack.Decoder(SkipRow).decode

AnyRow = JobState | AttemptRow | DoneRow | QueueCounts | GroupState | QueueSettings | Definition | Course | SkipRow


def encode_row(row: AnyRow) -> bytes:
    return FORMAT + _encode(row)


encode_body = _encode  # a row without its format byte, for those that put it there themselves


def _body(row: bytes) -> memoryview:
    if row[:1] != FORMAT:
        invariant(False, "row_format_known", first_byte=row[:1])
    return memoryview(row)[1:]


def decode_state(row: bytes) -> JobState:
    return _decode_state(_body(row))


def decode_attempt(row: bytes) -> AttemptRow:
    return _decode_attempt(_body(row))


def decode_done(row: bytes) -> DoneRow:
    return _decode_done(_body(row))


def decode_counts(row: bytes) -> QueueCounts:
    return _decode_counts(_body(row))


def decode_group(row: bytes) -> GroupState:
    return _decode_group(_body(row))


def decode_queue(row: bytes) -> QueueSettings:
    return _decode_queue(_body(row))


def decode_definition(row: bytes) -> Definition:
    return _decode_definition(_body(row))


def decode_course(row: bytes) -> Course:
    return _decode_course(_body(row))


def decode_skip(row: bytes) -> SkipRow:
    return _decode_skip(_body(row))


# format, version, priority, flags, lengths of tenant and queue, length of spec
_JOB_HEADER = struct.Struct(">BIBBBBI")
_JOB_HEADER_SIZE = _JOB_HEADER.size
_HELD, _START_DEADLINE, _CAPPED = 1, 2, 4
_FLAGS_AT = 6
_INDEX = struct.Struct(">BBBI")  # format, lane, priority, version


class JobHeader(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What the loader needs of a job row to make its timer."""

    version: int
    priority: int
    held: bool
    start_deadline: bool  # the spec has one
    tenant: str
    queue: str


def encode_spec(spec: JobSpec) -> bytes:
    return _encode(spec)


def encode_job(state: JobState, spec: bytes, payload: bytes) -> bytes:
    """A job row: header, tenant, queue, spec (msgpack), payload (the client's JSON bytes; empty: a payload_ref)."""
    tenant, queue = state.tenant.encode(), state.queue.encode()
    flags = _HELD * state.held | _START_DEADLINE * (state.start_deadline_ms >= 0)
    if state.run is not None and state.run.capped:
        flags |= _CAPPED
    header = _JOB_HEADER.pack(1, state.version, state.priority, flags, len(tenant), len(queue), len(spec))
    return b"".join((header, tenant, queue, spec, payload))


def decode_header(row: bytes) -> JobHeader:
    format_byte, version, priority, flags, tenant_size, queue_size, _ = _JOB_HEADER.unpack_from(row)
    invariant(format_byte == 1, "row_format_known", first_byte=format_byte)
    tenant_end = _JOB_HEADER_SIZE + tenant_size
    tenant = row[_JOB_HEADER_SIZE:tenant_end].decode()
    queue = row[tenant_end : tenant_end + queue_size].decode()
    return JobHeader(version, priority, bool(flags & _HELD), bool(flags & _START_DEADLINE), tenant, queue)


def is_capped(row: bytes) -> bool:
    """Whether a job row is of a run whose definition limits how many run at once."""
    return bool(row[_FLAGS_AT] & _CAPPED)


def split_job(row: bytes) -> tuple[bytes, bytes]:
    """(spec bytes, payload bytes) of a job row."""
    format_byte, _, _, _, tenant_size, queue_size, spec_size = _JOB_HEADER.unpack_from(row)
    invariant(format_byte == 1, "row_format_known", first_byte=format_byte)
    start = _JOB_HEADER_SIZE + tenant_size + queue_size
    return row[start : start + spec_size], row[start + spec_size :]


@lru_cache(maxsize=4_096)
def decode_spec(spec: bytes) -> JobSpec:
    """Kept by its bytes, for jobs that differ in their payload alone share them."""
    return _decode_spec(spec)


def encode_index(lane: int, priority: int, version: int) -> bytes:
    return _INDEX.pack(1, lane, priority, version)


def decode_index(row: bytes) -> tuple[int, int, int]:
    """(lane, priority, version)."""
    format_byte, lane, priority, version = _INDEX.unpack(row)
    invariant(format_byte == 1, "row_format_known", first_byte=format_byte)
    return lane, priority, version


def idempotency_instant_ms(state: JobState) -> int:
    """The instant in a run's idempotency key: of its first run, kept across retries and redrives."""
    return state.key_at_ms or state.fire_at_ms


def run_instant_ms(state: JobState) -> int:
    """Where a run stands among those of its schedule: its occurrence, or when it was asked for by hand."""
    assert state.run is not None
    return state.run.scheduled_for_ms if state.run.scheduled_for_ms >= 0 else state.created_at_ms


def is_final(state: JobState) -> bool:
    return Status.SUCCEEDED <= state.status <= Status.SKIPPED
