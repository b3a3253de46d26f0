"""Keys of every column family. All begin with the group, big-endian: a group is one range for snapshots, one scan for the loader.

Times are unsigned 64-bit big-endian, so that bytes sort as instants do. Where a key holds a job id after a time, its random half
comes first: a timer carries only that half, and (group, lane, fire_at, random half) leads to the row by one seek.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final

JOBS: Final = "jobs"
STATE: Final = "state"
ATTEMPTS: Final = "attempts"
DONE: Final = "done"
INDEX: Final = "index"
COUNTS: Final = "counts"
SCHEDULES: Final = "schedules"
META: Final = "meta"  # the meta group's rows: queues and their settings
RAFT_LOG: Final = "raft_log"
RAFT_META: Final = "raft_meta"

STATE_FAMILIES: Final = (JOBS, STATE, ATTEMPTS, DONE, INDEX, COUNTS, SCHEDULES, META)
FAMILIES: Final = (*STATE_FAMILIES, RAFT_LOG, RAFT_META)
META_GROUP: Final = 65_535

_GROUP = struct.Struct(">H")
_JOBS = struct.Struct(">HBQ8s8s")
_JOBS_SEEK = struct.Struct(">HBQQ")
_JOBS_RANGE = struct.Struct(">HBQ")
_STATE = struct.Struct(">H16s")
_ATTEMPTS = struct.Struct(">H16sI")
_TIME_ID = struct.Struct(">Q8s8s")
_RUN = struct.Struct(">H1s16sQ16s")
_SKIP = struct.Struct(">H1s16sQ")
_OF_SCHEDULE = struct.Struct(">H1s16s")
_TIME = struct.Struct(">Q")


def group_prefix(group: int) -> bytes:
    return _GROUP.pack(group)


def job_key(group: int, lane: int, fire_at_ms: int, job_id: bytes) -> bytes:
    return _JOBS.pack(group, lane, fire_at_ms, job_id[8:], job_id[:8])


def job_seek(group: int, lane: int, fire_at_ms: int, id_low: int) -> bytes:
    """Where the row of a timer (fire_at, random half) begins; the row's key starts with it."""
    return _JOBS_SEEK.pack(group, lane, fire_at_ms, id_low)


def job_range(group: int, lane: int, from_ms: int) -> bytes:
    """The first key of a lane at or after an instant."""
    return _JOBS_RANGE.pack(group, lane, from_ms)


def parse_job_key(key: bytes) -> tuple[int, int, int, bytes]:
    """(group, lane, fire_at ms, job id)."""
    group, lane, fire_at_ms, low, high = _JOBS.unpack(key)
    return group, lane, fire_at_ms, high + low


def state_key(group: int, job_id: bytes) -> bytes:
    return _STATE.pack(group, job_id)


def attempt_key(group: int, job_id: bytes, version: int) -> bytes:
    return _ATTEMPTS.pack(group, job_id, version)


def attempt_version(key: bytes) -> int:
    return int.from_bytes(key[18:22], "big")


@lru_cache(maxsize=8_192)
def queue_prefix(group: int, tenant: str, queue: str) -> bytes:
    """Names hold no NUL, so the terminators keep `a` and `ab` apart."""
    return b"%b%b\0%b\0" % (_GROUP.pack(group), tenant.encode(), queue.encode())


counts_key = queue_prefix


def parse_counts_key(key: bytes) -> tuple[str, str]:
    """(tenant, queue)."""
    tenant, queue, _ = key[2:].split(b"\0")
    return tenant.decode(), queue.decode()


def time_id(at_ms: int, job_id: bytes) -> bytes:
    """The tail of index and done keys: 24 bytes that sort by (instant, id)."""
    return _TIME_ID.pack(at_ms, job_id[8:], job_id[:8])


def parse_time_id(tail: bytes) -> tuple[int, bytes]:
    """(instant ms, job id)."""
    at_ms, low, high = _TIME_ID.unpack(tail)
    return at_ms, high + low


def time_prefix(at_ms: int) -> bytes:
    return _TIME.pack(at_ms)


def index_key(group: int, tenant: str, queue: str, fire_at_ms: int, job_id: bytes) -> bytes:
    return queue_prefix(group, tenant, queue) + _TIME_ID.pack(fire_at_ms, job_id[8:], job_id[:8])


def done_prefix(group: int, tenant: str, queue: str, status: int) -> bytes:
    return queue_prefix(group, tenant, queue) + bytes((status,))


def done_key(group: int, tenant: str, queue: str, status: int, fire_at_ms: int, job_id: bytes) -> bytes:
    return done_prefix(group, tenant, queue, status) + _TIME_ID.pack(fire_at_ms, job_id[8:], job_id[:8])


def prefix_end(prefix: bytes) -> bytes:
    """The first key after every key that begins with `prefix`; empty where there is none."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes((stripped[-1] + 1,)) if stripped else b""


# META family: there as long as a restored cluster is held (nothing is dispatched); a format byte, and the backup's id.
HOLD_KEY: Final = _GROUP.pack(META_GROUP) + b"h"


def queue_row_key(tenant: str, queue: str) -> bytes:
    """META family: one row per known queue."""
    return b"%bq%b\0%b" % (_GROUP.pack(META_GROUP), tenant.encode(), queue.encode())


# SCHEDULES: after the group a letter tells the kind of row: `d` definition, `c` course, `r` run (empty), `k` left out.


def definition_key(group: int, tenant: str, name: str) -> bytes:
    return b"%bd%b\0%b" % (_GROUP.pack(group), tenant.encode(), name.encode())


def definitions_prefix(group: int, tenant: str) -> bytes:
    return b"%bd%b\0" % (_GROUP.pack(group), tenant.encode())


def course_key(group: int, tenant: str, name: str) -> bytes:
    return b"%bc%b\0%b" % (_GROUP.pack(group), tenant.encode(), name.encode())


def courses_prefix(group: int) -> bytes:
    return _GROUP.pack(group) + b"c"


def parse_schedule_key(key: bytes) -> tuple[str, str]:
    """(tenant, name) of a definition's or a course's key."""
    tenant, name = key[3:].split(b"\0")
    return tenant.decode(), name.decode()


def run_key(group: int, schedule_id: bytes, at_ms: int, job_id: bytes) -> bytes:
    """`at_ms`: scheduled_for, or fire_at of a run by hand."""
    return _RUN.pack(group, b"r", schedule_id, at_ms, job_id)


def runs_prefix(group: int, schedule_id: bytes) -> bytes:
    return _OF_SCHEDULE.pack(group, b"r", schedule_id)


def parse_run_key(key: bytes) -> tuple[int, bytes]:
    """(instant ms, job id)."""
    _, _, _, at_ms, job_id = _RUN.unpack(key)
    return at_ms, job_id


def skip_key(group: int, schedule_id: bytes, from_ms: int) -> bytes:
    return _SKIP.pack(group, b"k", schedule_id, from_ms)


def skips_prefix(group: int, schedule_id: bytes) -> bytes:
    return _OF_SCHEDULE.pack(group, b"k", schedule_id)


def log_key(group: int, index: int) -> bytes:
    return struct.pack(">HQ", group, index)
