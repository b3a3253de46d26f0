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
_JOB, _ATTEMPT = "job_", "att_"


def new_job_id(now_ms: int, rng: Rng) -> bytes:
    """A time-ordered random id: 48 bits of Unix milliseconds, 80 random bits (the layout of RFC 9562 UUIDv7, without its marks)."""
    return ((now_ms & 0xFFFF_FFFF_FFFF) << 80 | rng.getrandbits(80)).to_bytes(ID_BYTES, "big")


def keyed_job_id(tenant: str, key: str) -> bytes:
    """The id that an idempotency key stands for: the duplicate meets the first in its own partition and row."""
    # NUL cannot occur in a tenant's name, so (tenant, key) -> bytes is injective.
    return hashlib.blake2b(tenant.encode() + b"\0" + key.encode(), digest_size=ID_BYTES, person=b"ws-idem-key").digest()


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
