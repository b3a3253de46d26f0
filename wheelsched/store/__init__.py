"""RocksDB and its memory twin: where rows and log live, and the only place that knows how they get to disk.

Promises: `write` is atomic over all families; nothing is durable before `sync` returned; a write or sync that failed ends the
process (`fatal`), because what the disk holds is then unknown. Keys and values are bytes; families are named in `model/keys.py`.
Read `rocks.py` for the settings and why they are what they are; `raftlog.py` and `heads.py` are built on any `Store`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from wheelsched.store.errors import StoreCorrupt, StoreError, StoreFailed, StoreRefused

__all__ = [
    "Cursor",
    "Rows",
    "Store",
    "StoreCorrupt",
    "StoreError",
    "StoreFailed",
    "StoreRefused",
    "StoreStatistics",
]

Rows = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """`writable`: new jobs may be taken (enough disk). Sizes in bytes; `sync_ms_recent`: the last syncs, newest last."""

    writable: bool
    disk_free_bytes: int
    disk_bytes: int
    memory_bytes: int
    sync_count: int
    sync_ms_recent: tuple[float, ...]


class Cursor(Protocol):
    """Sorted seeks over one family as it was when the cursor was made."""

    def seek(self, key: bytes) -> tuple[bytes, bytes] | None:
        """The first row at or after `key`."""
        ...

    def seek_each(self, keys: Sequence[bytes]) -> list[tuple[bytes, bytes] | None]:
        """`seek` for each of them; sorted keys are cheapest."""
        ...

    def next(self) -> tuple[bytes, bytes] | None: ...


class Store(Protocol):
    """One suite of contract tests holds for every implementation (tests/contract/test_store.py)."""

    def get(self, family: str, key: bytes) -> bytes | None: ...

    def multiget(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]: ...

    def scan(self, family: str, start: bytes, end: bytes, limit: int) -> Rows:
        """At most `limit` rows with start <= key < end (end empty: no bound), ascending."""
        ...

    def scan_back(self, family: str, start: bytes, end: bytes, limit: int) -> Rows:
        """The same rows from the end, descending."""
        ...

    def cursor(self, family: str) -> Cursor: ...

    def write(self, puts: Mapping[str, Mapping[bytes, bytes | None]], ranges: Sequence[tuple[str, bytes, bytes]] = ()) -> None:
        """Delete ranges [start, end), then put (or with None delete) rows, all or nothing; visible at once, durable after `sync`.

        Range deletes are applied first, so that a batch may clear a range and fill it. End empty: to the end of the family."""
        ...

    async def sync(self) -> None:
        """Return when everything written before the call is durable. Concurrent calls share one fsync."""
        ...

    @property
    def writable(self) -> bool:
        """New jobs may be taken: the disk has room for them and for what they lead to."""
        ...

    @property
    def must_stop(self) -> bool:
        """So little disk is left that the node should stop cleanly while it can."""
        ...

    def sync_pending_ms(self) -> float:
        """How long the fsync under way has been running; 0 if there is none."""
        ...

    def check_disk(self) -> None:
        """Look at the free space again; cheap, to be called about once a second."""
        ...

    def statistics(self) -> StoreStatistics: ...

    def close(self) -> None: ...
