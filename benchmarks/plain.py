"""The baseline without a scheduler: RocksDB alone, the same bytes, one WriteBatch and one fsync a batch, in this process.

What it costs to make rows durable and nothing else: no HTTP, no JSON, no log beside the rows, no timers. A commit holds as many jobs
as there are under way in the load it is compared with, which is what group commit makes of them; so the ratio says what everything
above RocksDB costs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import rocksdict

from benchmarks.common import directory_bytes, temporary_directory

KEY_BYTES: Final = 35
JOB_BYTES: Final = 600  # a job row with 500 bytes of payload
STATE_BYTES: Final = 120
MIB: Final = 1024 * 1024
SAMPLE_MAX: Final = 200_000  # its rate does not depend on more


class PlainRocks:
    """One column family, WAL on."""

    def __init__(self, path: Path) -> None:
        options = rocksdict.Options(raw_mode=True)
        options.set_compression_type(rocksdict.DBCompressionType.lz4())
        options.set_write_buffer_size(64 * MIB)
        self._path = path
        self._db: Any = rocksdict.Rdict(str(path), options)

    def commit(self, puts: list[tuple[bytes, bytes]], deletes: list[bytes] = []) -> None:  # noqa: B006  # never changed
        """One batch and its fsync."""
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key, value in puts:
            batch.put(key, value)
        for key in deletes:
            batch.delete(key)
        self._db.write(batch)
        self._db.flush_wal(True)

    def close(self) -> None:
        self._db.close()

    def disk_bytes(self) -> int:
        return directory_bytes(self._path)


@contextmanager
def plain_rocks() -> Iterator[PlainRocks]:
    with temporary_directory() as directory:
        database = PlainRocks(directory / "plain")
        try:
            yield database
        finally:
            database.close()


def _key(kind: bytes, number: int) -> bytes:
    return kind + number.to_bytes(8, "big").rjust(KEY_BYTES - len(kind), b"k")


def creates_per_s(n: int, batch: int) -> float:
    """Job and state rows of `n` jobs, `batch` a commit."""
    n = min(n, SAMPLE_MAX)
    job, state = os.urandom(JOB_BYTES // 2) + bytes(JOB_BYTES - JOB_BYTES // 2), bytes(STATE_BYTES)
    with plain_rocks() as database:
        began = time.perf_counter()
        for start in range(0, n, batch):
            numbers = range(start, min(start + batch, n))
            database.commit([pair for at in numbers for pair in ((_key(b"j", at), job), (_key(b"s", at), state))])
        return n / (time.perf_counter() - began)


def lifecycles_per_s(n: int, batch: int) -> tuple[float, float]:
    """(whole lifecycles/s, claims with completions/s): a create puts two rows, a claim one, a completion two and deletes one."""
    n = min(n, SAMPLE_MAX)
    job, state = os.urandom(JOB_BYTES // 2) + bytes(JOB_BYTES - JOB_BYTES // 2), bytes(STATE_BYTES)
    create_s = work_s = 0.0
    with plain_rocks() as database:
        for start in range(0, n, batch):
            numbers = range(start, min(start + batch, n))
            began = time.perf_counter()
            database.commit([pair for at in numbers for pair in ((_key(b"j", at), job), (_key(b"s", at), state))])
            created = time.perf_counter()
            database.commit([(_key(b"s", at), state) for at in numbers])
            done = [pair for at in numbers for pair in ((_key(b"d", at), job), (_key(b"s", at), state))]
            database.commit(done, [_key(b"j", at) for at in numbers])
            create_s += created - began
            work_s += time.perf_counter() - created
    return n / (create_s + work_s), n / work_s
