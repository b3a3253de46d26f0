"""Job ids, partitions, groups and lease tokens.

A job id is 16 bytes. Its low 10 bits are the partition, always hashed or random, so that load spreads whatever clients do.
A group is a run of neighbouring partitions and the unit of ownership. Text form: a prefix and lower-case hexadecimal, URL-safe and of
fixed length (base32 would be six letters shorter and, written in Python, fifteen times as slow: every answer writes several).
"""

from __future__ import annotations

import hashlib
import struct

from wheelsched.core.clock import Rng

ID_BYTES = 16
PARTITION_COUNT = 1024
GROUP_COUNT_DEFAULT = 32

_TOKEN = struct.Struct(">16sIQ")
_JOB, _ATTEMPT, _SCHEDULE = "job_", "att_", "sch_"
_PARTITION_MASK = PARTITION_COUNT - 1


def new_job_id(now_ms: int, rng: Rng) -> bytes:
    """A time-ordered random id: 48 bits of Unix milliseconds, 80 random bits (the layout of RFC 9562 UUIDv7, without its marks)."""
    return ((now_ms & 0xFFFF_FFFF_FFFF) << 80 | rng.getrandbits(80)).to_bytes(ID_BYTES, "big")


def new_job_ids(count: int, now_ms: int, rng: Rng) -> bytes:
    """`count` of those, one after the other, with one draw."""
    moment = (now_ms & 0xFFFF_FFFF_FFFF).to_bytes(6, "big")
    chance = rng.getrandbits(80 * count).to_bytes(10 * count, "big") if count else b""
    return b"".join([moment + chance[start : start + 10] for start in range(0, 10 * count, 10)])


def keyed_job_id(tenant: str, key: str) -> bytes:
    """The id that an idempotency key stands for: the duplicate meets the first in its own partition and row."""
    # NUL cannot occur in a tenant's name, so (tenant, key) -> bytes is injective.
    return hashlib.blake2b(tenant.encode() + b"\0" + key.encode(), digest_size=ID_BYTES, person=b"ws-idem-key").digest()


def schedule_partition(tenant: str, name: str) -> int:
    """Where a schedule lives: its name alone leads to its group."""
    digest = hashlib.blake2b(tenant.encode() + b"\0" + name.encode(), digest_size=2, person=b"ws-schedule").digest()
    return int.from_bytes(digest, "big") & _PARTITION_MASK


def new_schedule_id(tenant: str, name: str, rng: Rng) -> bytes:
    """Random, in the partition of the name: a schedule made anew under an old name has other occurrences."""
    return _in_partition(rng.getrandbits(128), schedule_partition(tenant, name))


def occurrence_id(schedule_id: bytes, at_ms: int) -> bytes:
    """The job of a schedule's occurrence: computing it twice names the same job, in the schedule's own partition."""
    digest = hashlib.blake2b(schedule_id + at_ms.to_bytes(8, "big"), digest_size=ID_BYTES, person=b"ws-occurrence").digest()
    return _in_partition(int.from_bytes(digest, "big"), partition_of(schedule_id))


def new_run_id(tenant: str, name: str, now_ms: int, rng: Rng) -> bytes:
    """A run by hand: time-ordered and random as any job, in its schedule's partition."""
    return _in_partition(int.from_bytes(new_job_id(now_ms, rng), "big"), schedule_partition(tenant, name))


def keyed_run_id(tenant: str, name: str, key: str) -> bytes:
    """A run by hand with an idempotency key, which counts within its schedule."""
    text = b"\0".join((tenant.encode(), name.encode(), key.encode()))
    digest = hashlib.blake2b(text, digest_size=ID_BYTES, person=b"ws-run-key").digest()
    return _in_partition(int.from_bytes(digest, "big"), schedule_partition(tenant, name))


def _in_partition(number: int, partition: int) -> bytes:
    return (number & ~_PARTITION_MASK | partition).to_bytes(ID_BYTES, "big")


def spread_hash(job_id: bytes) -> int:
    """A stable 64-bit hash of an id, independent of its partition: where in its window a flexible job falls."""
    return int.from_bytes(hashlib.blake2b(job_id, digest_size=8, person=b"ws-spread").digest(), "big")


def partition_of(job_id: bytes) -> int:
    """0 to 1,023."""
    return (job_id[14] << 8 | job_id[15]) & (PARTITION_COUNT - 1)


def group_of(job_id: bytes, group_count: int) -> int:
    """0 to `group_count` - 1; `group_count` is a power of two of at most 1,024."""
    # `partition_of`, written out: every command passes here.
    return ((job_id[14] << 8 | job_id[15]) & (PARTITION_COUNT - 1)) * group_count // PARTITION_COUNT


def group_of_low(id_low: int, group_count: int) -> int:
    """The group, from the random half of an id alone: the partition lies in it."""
    return (id_low & (PARTITION_COUNT - 1)) * group_count // PARTITION_COUNT


def id_low(job_id: bytes) -> int:
    """The random half: with `fire_at` it leads to the job's row (model/keys.py), and it is what a timer record carries."""
    return int.from_bytes(job_id[8:], "big")


def format_job_id(job_id: bytes) -> str:
    """`job_` and 32 letters."""
    return _JOB + job_id.hex()


def parse_job_id(text: str) -> bytes | None:
    """The id, or None where the text is none; only the one canonical spelling counts."""
    return _parse(text, _JOB, ID_BYTES)


def format_schedule_id(schedule_id: bytes) -> str:
    """`sch_` and 32 letters."""
    return _SCHEDULE + schedule_id.hex()


def format_token(job_id: bytes, attempt: int, fencing: int) -> str:
    """A lease token: any node can route it, and only the attempt it names accepts it."""
    return _ATTEMPT + _TOKEN.pack(job_id, attempt, fencing).hex()


def parse_token(text: str) -> tuple[bytes, int, int] | None:
    """(job id, attempt, fencing token), or None where the text is no token."""
    packed = _parse(text, _ATTEMPT, _TOKEN.size)
    if packed is None:
        return None
    job_id, attempt, fencing = _TOKEN.unpack(packed)
    return job_id, attempt, fencing


def _parse(text: str, prefix: str, size: int) -> bytes | None:
    if len(text) != len(prefix) + 2 * size or not text.startswith(prefix):
        return None
    try:
        raw = bytes.fromhex(text[len(prefix) :])
    except ValueError:
        return None
    # `fromhex` takes capitals and blanks too.
    return raw if raw.hex() == text[len(prefix) :] else None
