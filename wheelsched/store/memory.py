"""The memory twin of `RocksStore`: same semantics, no disk, and a `crash` that loses what was not synced.

For tests, the simulator and `store.kind: memory`. Rows of a family live in sorted chunks that are copied before a change when
a cursor or the synced image still refers to them; so a snapshot costs one short list, whatever the size of the family.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn

from wheelsched.model.keys import FAMILIES
from wheelsched.store import Rows, StoreStatistics
from wheelsched.store.errors import StoreFailed
from wheelsched.store.failure import Failure, Faults, NoFaults, exit_now

CHUNK_ROWS = 512

_Batch = tuple[dict[str, dict[bytes, bytes | None]], tuple[tuple[str, bytes, bytes], ...]]


class MemoryStore:
    """Implements `Store`. Tests may set `disk_free_bytes`, `writable` and `must_stop`; `check_disk` leaves them alone."""

    def __init__(self, *, fatal: Callable[[str], NoReturn] = exit_now, faults: Faults | None = None) -> None:
        self._failure = Failure(fatal)
        self._faults = faults or NoFaults()
        self._families = {family: SortedRows() for family in FAMILIES}
        self._synced = self._image()
        self._unsynced: list[_Batch] = []  # what was written since, in order
        self._sync_pending: asyncio.Future[None] | None = None
        self._closed = False
        self._sync_count = 0
        self.disk_free_bytes = 1 << 40
        self.writable = True
        self.must_stop = False

    # ---- reads

    def get(self, family: str, key: bytes) -> bytes | None:
        return self._rows(family).get(key)

    def multiget(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        rows = self._rows(family)
        return [rows.get(key) for key in keys]

    def scan(self, family: str, start: bytes, end: bytes, limit: int) -> Rows:
        return self._rows(family).scan(start, end, limit)

    def scan_back(self, family: str, start: bytes, end: bytes, limit: int) -> Rows:
        return self._rows(family).scan_back(start, end, limit)

    def cursor(self, family: str) -> MemoryCursor:
        return MemoryCursor(self, self._rows(family).snapshot())

    # ---- writes

    def write(self, puts: Mapping[str, Mapping[bytes, bytes | None]], ranges: Sequence[tuple[str, bytes, bytes]] = ()) -> None:
        """Delete ranges, then put or delete rows. O(log n) a row."""
        self.check_open()
        self._failure.check()
        # Copied: the caller may fill the same dicts anew while this batch still waits for its sync.
        batch = ({family: dict(rows) for family, rows in puts.items()}, tuple(ranges))
        for family in (*batch[0], *(family for family, _, _ in batch[1])):
            self._rows(family)  # an unknown family is found before anything has changed
        try:
            self._faults.on_write()
        except Exception as error:
            raise self._failure.fail("write to the store failed", error) from error
        _apply(self._families, batch)
        self._unsynced.append(batch)

    async def sync(self) -> None:
        """Return when everything written before the call is durable. Calls of one turn of the loop share one sync."""
        self.check_open()
        self._failure.check()
        if self._sync_pending is None:
            loop = asyncio.get_running_loop()
            self._sync_pending = loop.create_future()
            loop.call_soon(self._sync_now)
        # Shielded: one caller that gives up must not take the sync of the others with it.
        await asyncio.shield(self._sync_pending)

    def sync_pending_ms(self) -> float:
        return 0.0

    # ---- disk, statistics, end

    def check_disk(self) -> None:
        pass

    def statistics(self) -> StoreStatistics:
        return StoreStatistics(
            writable=self.writable,
            disk_free_bytes=self.disk_free_bytes,
            disk_bytes=0,
            memory_bytes=0,
            sync_count=self._sync_count,
            sync_ms_recent=(),
        )

    def close(self) -> None:
        """Forget nothing, refuse everything from now on."""
        self._closed = True
        self._answer_sync(StoreFailed("the store is closed"))

    def crash(self, keep_bytes_fraction: float = 0.0) -> MemoryStore:
        """What a restart finds after power was lost now: the synced rows, and of the batches written since the longest prefix
        within `keep_bytes_fraction` (0 to 1) of their bytes. This store is dead; syncs it had not answered never are."""
        assert 0.0 <= keep_bytes_fraction <= 1.0
        after = MemoryStore(fatal=self._failure.fatal, faults=self._faults)
        after._families = {family: rows.snapshot() for family, rows in self._synced.items()}
        sizes = [_batch_bytes(batch) for batch in self._unsynced]
        budget_bytes = sum(sizes) * keep_bytes_fraction
        for batch, size_bytes in zip(self._unsynced, sizes, strict=True):
            budget_bytes -= size_bytes
            if budget_bytes < 0:
                break
            _apply(after._families, batch)
        after._synced = after._image()
        self.close()
        return after

    # ---- inside

    def check_open(self) -> None:
        if self._closed:
            raise StoreFailed("the store is closed")

    def _rows(self, family: str) -> SortedRows:
        self.check_open()
        return self._families[family]

    def _image(self) -> dict[str, SortedRows]:
        return {family: rows.snapshot() for family, rows in self._families.items()}

    def _sync_now(self) -> None:
        if self._closed:
            return
        try:
            self._failure.check()
            self._faults.on_sync()
        except StoreFailed as error:
            self._answer_sync(error)
            return
        except Exception as error:
            try:
                failed = self._failure.fail("sync of the store failed", error)
            except BaseException:  # a test's `fatal` that raises
                failed = StoreFailed(self._failure.message)
            self._answer_sync(failed)
            return
        self._synced = self._image()
        self._unsynced.clear()
        self._sync_count += 1
        self._answer_sync(None)

    def _answer_sync(self, error: StoreFailed | None) -> None:
        waiter, self._sync_pending = self._sync_pending, None
        if waiter is None or waiter.done():
            return
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)
            waiter.exception()  # all who waited may be gone: then nobody has to hear of it


class MemoryCursor:
    """Implements `Cursor` over a snapshot."""

    __slots__ = ("_chunk", "_row", "_rows", "_store")

    def __init__(self, store: MemoryStore, rows: SortedRows) -> None:
        self._store, self._rows = store, rows
        self._chunk, self._row = -1, 0  # -1: nowhere

    def seek(self, key: bytes) -> tuple[bytes, bytes] | None:
        self._store.check_open()
        self._chunk, self._row = self._rows.position(key)
        return self._at()

    def seek_each(self, keys: Sequence[bytes]) -> list[tuple[bytes, bytes] | None]:
        return [self.seek(key) for key in keys]

    def next(self) -> tuple[bytes, bytes] | None:
        self._store.check_open()
        if self._chunk < 0:
            return None
        self._row += 1
        return self._at()

    def _at(self) -> tuple[bytes, bytes] | None:
        chunks = self._rows.chunks
        if self._chunk < len(chunks) and self._row == len(chunks[self._chunk].keys):
            self._chunk, self._row = self._chunk + 1, 0
        if self._chunk >= len(chunks):
            self._chunk = -1
            return None
        chunk = chunks[self._chunk]
        return chunk.keys[self._row], chunk.values[self._row]


class _Chunk:
    """Neighbouring rows, never empty. `owner`: the only `SortedRows` that may change it, if any still may."""

    __slots__ = ("keys", "owner", "values")

    def __init__(self, keys: list[bytes], values: list[bytes], owner: object) -> None:
        self.keys, self.values, self.owner = keys, values, owner


class SortedRows:
    """A sorted map of bytes to bytes. get, put, delete: O(log n) and one memmove of a chunk; snapshot: O(n / 512)."""

    __slots__ = ("_lasts", "_owner", "chunks")

    def __init__(self) -> None:
        self.chunks: list[_Chunk] = []
        self._lasts: list[bytes] = []  # the last key of each chunk
        self._owner = object()

    def snapshot(self) -> SortedRows:
        """The rows as they are now. Either side copies a chunk before it changes it."""
        other = SortedRows()
        other.chunks, other._lasts = self.chunks.copy(), self._lasts.copy()
        self._owner = object()  # no chunk is this map's own any more
        return other

    def position(self, key: bytes) -> tuple[int, int]:
        """(chunk, row in it) of the first row at or after `key`; chunk len(chunks): none."""
        chunk_index = bisect_left(self._lasts, key)
        if chunk_index == len(self.chunks):
            return chunk_index, 0
        return chunk_index, bisect_left(self.chunks[chunk_index].keys, key)

    def get(self, key: bytes) -> bytes | None:
        chunk_index, row = self.position(key)
        if chunk_index == len(self.chunks):
            return None
        chunk = self.chunks[chunk_index]
        return chunk.values[row] if chunk.keys[row] == key else None

    def put(self, key: bytes, value: bytes) -> None:
        if not self.chunks:
            self.chunks.append(_Chunk([key], [value], self._owner))
            self._lasts.append(key)
            return
        chunk_index = min(bisect_left(self._lasts, key), len(self.chunks) - 1)
        chunk = self._own(chunk_index)
        row = bisect_left(chunk.keys, key)
        if row < len(chunk.keys) and chunk.keys[row] == key:
            chunk.values[row] = value
            return
        chunk.keys.insert(row, key)
        chunk.values.insert(row, value)
        self._lasts[chunk_index] = chunk.keys[-1]
        if len(chunk.keys) > CHUNK_ROWS:
            self._split(chunk_index)

    def delete(self, key: bytes) -> None:
        chunk_index, row = self.position(key)
        if chunk_index == len(self.chunks) or self.chunks[chunk_index].keys[row] != key:
            return
        chunk = self._own(chunk_index)
        del chunk.keys[row], chunk.values[row]
        if chunk.keys:
            self._lasts[chunk_index] = chunk.keys[-1]
        else:
            del self.chunks[chunk_index], self._lasts[chunk_index]

    def delete_range(self, start: bytes, end: bytes) -> None:
        """Rows start <= key < end (end empty: to the end). Whole chunks go at once."""
        if end and start >= end:
            return
        first, row = self.position(start)
        if first < len(self.chunks) and row > 0:
            first = self._cut(first, row)
        last = len(self.chunks)
        if end:
            last, row = self.position(end)
            if last < len(self.chunks) and row > 0:
                last = self._cut(last, row)
        del self.chunks[first:last], self._lasts[first:last]

    def scan(self, start: bytes, end: bytes, limit: int) -> Rows:
        rows: Rows = []
        chunk_index, row = self.position(start)
        while chunk_index < len(self.chunks) and len(rows) < limit:
            chunk = self.chunks[chunk_index]
            stop = bisect_left(chunk.keys, end) if end else len(chunk.keys)
            upto = min(stop, row + limit - len(rows))
            rows.extend(zip(chunk.keys[row:upto], chunk.values[row:upto], strict=True))
            if stop < len(chunk.keys):
                break
            chunk_index, row = chunk_index + 1, 0
        return rows

    def scan_back(self, start: bytes, end: bytes, limit: int) -> Rows:
        rows: Rows = []
        for chunk in self._chunks_back(end):
            if len(rows) >= limit or chunk.keys[-1] < start:
                break
            first = bisect_left(chunk.keys, start)
            stop = bisect_left(chunk.keys, end) if end else len(chunk.keys)
            first = max(first, stop - (limit - len(rows)))
            rows.extend(zip(reversed(chunk.keys[first:stop]), reversed(chunk.values[first:stop]), strict=True))
        return rows

    def check(self) -> None:
        """Slow and obvious: sorted, no chunk empty or too long, `_lasts` right."""
        everything = [key for chunk in self.chunks for key in chunk.keys]
        assert everything == sorted(set(everything))
        assert all(0 < len(chunk.keys) <= CHUNK_ROWS and len(chunk.keys) == len(chunk.values) for chunk in self.chunks)
        assert self._lasts == [chunk.keys[-1] for chunk in self.chunks]

    def _chunks_back(self, end: bytes) -> Iterator[_Chunk]:
        last = bisect_right(self._lasts, end) if end else len(self.chunks) - 1
        for chunk_index in range(min(last, len(self.chunks) - 1), -1, -1):
            yield self.chunks[chunk_index]

    def _own(self, chunk_index: int) -> _Chunk:
        chunk = self.chunks[chunk_index]
        if chunk.owner is not self._owner:
            chunk = _Chunk(chunk.keys.copy(), chunk.values.copy(), self._owner)
            self.chunks[chunk_index] = chunk
        return chunk

    def _split(self, chunk_index: int) -> None:
        # Keys that only grow fill the chunks: what comes after the last one would else leave every chunk half empty.
        at_end = chunk_index == len(self.chunks) - 1
        self._cut(chunk_index, CHUNK_ROWS if at_end else CHUNK_ROWS // 2)

    def _cut(self, chunk_index: int, row: int) -> int:
        """Cut a chunk in two before `row`; the index of the second part."""
        chunk = self.chunks[chunk_index]
        parts = [
            _Chunk(chunk.keys[:row], chunk.values[:row], self._owner),
            _Chunk(chunk.keys[row:], chunk.values[row:], self._owner),
        ]
        self.chunks[chunk_index : chunk_index + 1] = parts
        self._lasts[chunk_index : chunk_index + 1] = [part.keys[-1] for part in parts]
        return chunk_index + 1


def _apply(families: Mapping[str, SortedRows], batch: _Batch) -> None:
    puts, ranges = batch
    for family, start, end in ranges:
        families[family].delete_range(start, end)
    for family, rows in puts.items():
        target = families[family]
        for key, value in rows.items():
            if value is None:
                target.delete(key)
            else:
                target.put(key, value)


def _batch_bytes(batch: _Batch) -> int:
    puts, ranges = batch
    rows = sum(len(key) + len(value or b"") for family in puts.values() for key, value in family.items())
    return rows + sum(len(start) + len(end) for _, start, end in ranges)
