"""RocksDB through rocksdict: one database for rows and Raft log, so that one WAL and one fsync cover both.

Costs (LIMITS.md 4 and 5): `write` 1.2 to 2 µs a row operation, **holding the GIL**; `get` 2.6 to 5 µs; a new iterator 8 µs and
0.7 µs a row; `sync` an fdatasync, 0.2 to 1.3 ms at the median, 3 to 10 ms at p99.

What rocksdict 0.3.29 does that one would not expect (tests/unit/test_store_rocksdict.py holds it to that):
- `ReadOptions.set_iterate_lower_bound` sets the **upper** bound. Lower bounds are kept by seeking and comparing.
- A range delete whose end lies below its start is refused only after it has reached the WAL, and recovery then stops at it as
  at a damaged record: what was written behind it would be gone. Ranges are checked before they get near a batch.
- `close()` leaves the database open, and locked, while an iterator or column family lives. `close` below drops them all.
- `items()` has no way to tell a read error from the end; `RdictIter.status()` has. Only the latter is used.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import rocksdict

from wheelsched.core.settings import StoreSettings
from wheelsched.model.keys import ATTEMPTS, DONE, FAMILIES, INDEX, JOBS, RAFT_LOG, RAFT_META, STATE
from wheelsched.store import Rows, StoreStatistics
from wheelsched.store.directory import IDENTITY_KEY, DataDirectory, Identity
from wheelsched.store.disk import DiskSpace, measure_disk
from wheelsched.store.errors import StoreCorrupt, StoreError, StoreFailed, StoreRefused
from wheelsched.store.failure import Failure, Faults, NoFaults, exit_now
from wheelsched.store.mark import SyncedMark
from wheelsched.store.syncer import Syncer

MIB = 1024 * 1024
# RocksDB knows no range without an end. No key of ours is as long as this one and full of 0xff.
BEYOND_ALL_KEYS = b"\xff" * 64
DEFAULT_IDENTITY = Identity()
_REMEDY = "Restore a backup, or move {} away and let this node join anew"


class RocksStore:
    """Implements `Store`. One thread writes; any may read. `identity` is checked against what the directory says it is."""

    def __init__(
        self,
        data_dir: str | Path,
        settings: StoreSettings,
        *,
        identity: Identity = DEFAULT_IDENTITY,
        fatal: Callable[[str], NoReturn] = exit_now,
        faults: Faults | None = None,
        disk: Callable[[Path], tuple[int, int]] = measure_disk,
        on_sync_s: Callable[[float], None] | None = None,
    ) -> None:
        """Open the database in `data_dir`, creating it in an empty directory.

        Raises `StoreRefused` (in use, foreign, unknown format), `StoreCorrupt`, `StoreError`. Nothing is repaired silently."""
        self._failure = Failure(fatal)
        self._faults = faults or NoFaults()
        self._cache = rocksdict.Cache(settings.block_cache_mib * MIB)
        # Not allowed to stall: a stalled write would hold the GIL and with it the whole process.
        self._buffers = rocksdict.WriteBufferManager(settings.write_buffer_mib * MIB, False)
        self._cursors: weakref.WeakSet[RocksCursor] = weakref.WeakSet()
        self._columns: dict[str, Any] = _Closed()
        self._handles: dict[str, Any] = _Closed()
        self._closed = False
        self._directory = DataDirectory(Path(data_dir))
        try:
            self._directory.create_database(lambda path: self._create(path, settings, identity))
            self._db = self._open(self._directory.db_path, settings, create=False)
            self._mark = SyncedMark(self._directory.db_path)
            self._check_mark()
            self._columns = {family: self._db.get_column_family(family) for family in FAMILIES}
            self._handles = {family: self._db.get_column_family_handle(family) for family in FAMILIES}
            self.identity = self._directory.check_identity(self.get(RAFT_META, IDENTITY_KEY), identity)
        except BaseException:
            self._release()
            raise
        self._disk = DiskSpace(self._directory.path, self._directory.db_path, settings, disk)
        self._disk.ensure_ballast()
        self._disk.check()
        self._syncer = Syncer(self._flush_wal, self._failure, on_sync_s)

    # ---- reads

    def get(self, family: str, key: bytes) -> bytes | None:
        """The row, or None. 2.6 to 5 µs."""
        column = self._columns[family]
        try:
            row: bytes | None = column.get(key)
        except Exception as error:
            raise self._read_failed(family, error) from error
        return row

    def multiget(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """Rows in the order of `keys`, None where there is none. 2 to 3.6 µs a key; the GIL is free meanwhile."""
        column = self._columns[family]
        ordered = sorted(set(keys))  # sorted keys share blocks: 3.6 against 4.6 µs a key (LIMITS.md 4)
        try:
            found = dict(zip(ordered, column.get(ordered), strict=True))
        except Exception as error:
            raise self._read_failed(family, error) from error
        return [found[key] for key in keys]

    def scan(self, family: str, start: bytes, end: bytes, limit: int) -> Rows:
        """At most `limit` rows with start <= key < end (end empty: no bound), ascending. 8 µs and 0.7 µs a row.

        Deleted rows from `start` to the first live one cost 0.2 µs each: begin at `RangeHeads.lower_bound`."""
        column = self._columns[family]
        rows: Rows = []
        if limit <= 0:
            return rows
        try:
            iterator = column.iter(_below(end))
            iterator.seek(start)
            while iterator.valid():
                rows.append((iterator.key(), iterator.value()))
                if len(rows) == limit:
                    return rows
                iterator.next()
            iterator.status()  # raises on a block that cannot be read, which looks like the end otherwise
        except Exception as error:
            raise self._read_failed(family, error) from error
        return rows

    def scan_back(self, family: str, start: bytes, end: bytes, limit: int) -> Rows:
        """The rows of `scan` from the end, descending. Where fewer than `limit` are left it reads on below `start`, as far as
        the next live row of the family: RocksDB's own lower bound cannot be set."""
        column = self._columns[family]
        rows: Rows = []
        if limit <= 0:
            return rows
        try:
            iterator = column.iter(_below(end))
            iterator.seek_to_last()
            while iterator.valid():
                key = iterator.key()
                if key < start:
                    return rows
                rows.append((key, iterator.value()))
                if len(rows) == limit:
                    return rows
                iterator.prev()
            iterator.status()
        except Exception as error:
            raise self._read_failed(family, error) from error
        return rows

    def cursor(self, family: str) -> RocksCursor:
        """Sorted seeks (4 µs each) over the family as it is now. Drop it soon: it keeps old files and memtables alive."""
        column = self._columns[family]
        cursor = RocksCursor(column.iter(), lambda error: self._read_failed(family, error))
        self._cursors.add(cursor)
        return cursor

    # ---- writes

    def write(self, puts: Mapping[str, Mapping[bytes, bytes | None]], ranges: Sequence[tuple[str, bytes, bytes]] = ()) -> None:
        """Delete ranges [start, end) (end empty: to the end of the family), then put rows or, with None, delete them.

        All or nothing, visible at once, durable after `sync`. Holds the GIL for 1.2 to 2 µs a row operation: keep to some 500."""
        self._failure.check()
        batch = rocksdict.WriteBatch(raw_mode=True)
        for family, start, end in ranges:
            end = end or BEYOND_ALL_KEYS
            # Not only for tidiness: a range the wrong way round reaches the WAL and makes it unreadable (see above).
            if start < end:
                batch.delete_range(start, end, self._handles[family])
        for family, rows in puts.items():
            handle = self._handles[family]
            for key, value in rows.items():
                if value is None:
                    batch.delete(key, handle)
                else:
                    batch.put(key, value, handle)
        if batch.is_empty():
            return
        try:
            self._faults.on_write()
            self._db.write(batch)
        except Exception as error:
            raise self._failure.fail("write to the store failed", error) from error

    async def sync(self) -> None:
        """Return when everything written before the call is durable. Calls that arrive during an fsync share the next one.

        Raises `StoreFailed` only where `fatal` came back; a sync that failed is never reported as done."""
        self._failure.check()
        await self._syncer.sync()

    def sync_pending_ms(self) -> float:
        """How long the fsync under way has been running, 0 if there is none: a stalled disk shows here."""
        return self._syncer.pending_ms()

    # ---- disk, statistics, end

    @property
    def writable(self) -> bool:
        """New jobs may be taken. As of the last `check_disk`."""
        return self._disk.writable

    @property
    def must_stop(self) -> bool:
        """So little disk is left that the node has to stop while it can. As of the last `check_disk`."""
        return self._disk.must_stop

    def check_disk(self) -> None:
        """Look at the free space: a statvfs, every tenth time also the sizes of the files. The node calls it four times a second."""
        self._disk.check()

    def statistics(self) -> StoreStatistics:
        """Counters in memory; reads nothing from disk."""
        return StoreStatistics(
            writable=self._disk.writable,
            disk_free_bytes=self._disk.free_bytes,
            disk_bytes=self._disk.used_bytes,
            memory_bytes=self._buffers.get_usage() + self._cache.get_usage(),
            sync_count=self._syncer.count,
            sync_ms_recent=tuple(self._syncer.recent_ms),
        )

    def close(self) -> None:
        """Serve pending syncs, sync once more, close and release the lock. A second call does nothing; cursors die with it."""
        if self._closed:
            return
        self._closed = True
        self._syncer.stop()
        try:
            if not self._failure.message:
                self._flush_wal()
        except Exception as error:
            raise self._failure.fail("sync of the store failed", error) from error
        finally:
            self._release()

    # ---- inside

    def _flush_wal(self) -> None:
        # Read before: a write during the fsync is not covered by it.
        sequence = self._db.latest_sequence_number()
        self._faults.on_sync()
        self._db.flush_wal(True)
        self._mark.write(sequence)

    def _check_mark(self) -> None:
        found, synced = self._db.latest_sequence_number(), self._mark.read()
        if found < synced:
            path = self._directory.db_path
            raise StoreCorrupt(
                f"{path} ends at sequence number {found}, but {synced} was synced: the end of its WAL is lost."
                f" {_REMEDY.format(path.parent)}"
            )

    def _read_failed(self, family: str, error: Exception) -> StoreError:
        """A row that cannot be read may be any row: the node ends rather than go on without it."""
        return self._failure.fail(f"read of {family} failed", error)

    def _create(self, path: Path, settings: StoreSettings, identity: Identity) -> None:
        db = self._open(path, settings, create=True)
        row = msgspec.msgpack.encode(msgspec.structs.replace(identity, incarnation=os.urandom(16)))
        db.get_column_family(RAFT_META).put(IDENTITY_KEY, row)
        db.flush_wal(True)
        db.close()

    def _open(self, path: Path, settings: StoreSettings, *, create: bool) -> Any:
        options = _database_options(settings, self._buffers, create=create)
        families = {family: _family_options(family, settings, self._cache) for family in FAMILIES}
        try:
            return rocksdict.Rdict(str(path), options, families)
        except Exception as error:
            raise _open_error(path, str(error)) from error

    def _release(self) -> None:
        """Drop everything that keeps RocksDB open, then the lock."""
        for cursor in self._cursors:
            cursor.release()
        self._columns, self._handles = _Closed(), _Closed()
        try:
            if hasattr(self, "_mark"):
                self._mark.close()
            if hasattr(self, "_db"):
                self._db.close()
        finally:
            self._directory.release()


class RocksCursor:
    """Implements `Cursor`."""

    __slots__ = ("__weakref__", "_iterator", "_on_error")

    def __init__(self, iterator: Any, on_error: Callable[[Exception], StoreError]) -> None:
        self._iterator, self._on_error = iterator, on_error

    def seek(self, key: bytes) -> tuple[bytes, bytes] | None:
        """The first row at or after `key`."""
        self._iterator.seek(key)
        return self._row()

    def seek_each(self, keys: Sequence[bytes]) -> list[tuple[bytes, bytes] | None]:
        """`seek` for each of them; sorted keys are cheapest: about 2 µs each."""
        rows: list[tuple[bytes, bytes] | None] = []
        iterator = self._iterator
        seek, valid, key_of, value_of = iterator.seek, iterator.valid, iterator.key, iterator.value
        for key in keys:
            seek(key)
            rows.append((key_of(), value_of()) if valid() else self._row())
        return rows

    def next(self) -> tuple[bytes, bytes] | None:
        """The row after the last one returned; None at the end, and before the first `seek`."""
        if not self._iterator.valid():
            return None
        self._iterator.next()
        return self._row()

    def release(self) -> None:
        """Let go of the snapshot; the cursor cannot be used any more."""
        self._iterator = _CLOSED_ITERATOR

    def _row(self) -> tuple[bytes, bytes] | None:
        iterator = self._iterator
        if iterator.valid():
            return iterator.key(), iterator.value()
        try:
            iterator.status()
        except Exception as error:
            raise self._on_error(error) from error
        return None


class _Closed(dict[str, Any]):
    """Stands in for the column families of a closed store."""

    def __missing__(self, family: str) -> NoReturn:
        raise StoreFailed(f"the store is closed; {family} cannot be used")


class _ClosedIterator:
    def __getattr__(self, name: str) -> NoReturn:
        raise StoreFailed("the store is closed; its cursors cannot be used")


_CLOSED_ITERATOR = _ClosedIterator()


def _below(end: bytes) -> Any:
    """Read options that end a scan before `end`: without them it would run on over deleted rows behind it."""
    if not end:
        return None
    options = rocksdict.ReadOptions()
    options.set_iterate_upper_bound(end)
    return options


def _database_options(settings: StoreSettings, buffers: Any, *, create: bool) -> Any:
    """What holds for the whole database. LIMITS.md 5 has the measurements."""
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(create)
    # Families that a newer release adds come into being in an old database; a missing one is not a loss we could detect here.
    options.create_missing_column_families(True)
    # Recovery stops at the first damaged record, and `mark.py` then tells whether that cut what had been synced: the database is
    # refused if so. `tolerate_corrupted_tail_records` would refuse by itself, but after a torn end of one WAL file it goes on with
    # the next: a power cut could leave a hole, rows of an entry missing and its successor's applied index there
    # (tests/e2e/test_power_cut.py). Both hold only while log files are not recycled: leave recycling off.
    options.set_wal_recovery_mode(rocksdict.DBRecoveryMode.point_in_time())
    options.set_paranoid_checks(True)
    options.set_write_buffer_manager(buffers)
    # Families that are written seldom would keep old WAL files alive for ever, and a start after a crash reads all of them: about a
    # second for 128 MiB, and precise jobs wait for it.
    options.set_max_total_wal_size(settings.write_buffer_mib * MIB)
    options.set_max_background_jobs(2)
    options.set_bytes_per_sync(MIB)  # written back bit by bit, instead of one burst that our fsync has to wait behind
    options.set_allow_concurrent_memtable_write(False)  # one thread writes: 6 % cheaper
    options.set_avoid_unnecessary_blocking_io(True)
    options.set_keep_log_file_num(4)
    options.set_max_log_file_size(16 * MIB)
    options.set_stats_dump_period_sec(3_600)
    return options


def _family_options(family: str, settings: StoreSettings, cache: Any) -> Any:
    """Options by what is done with a family: clustered rows are scanned, state is looked up by id, queues shrink at the head.

    All keep the skip list as memtable. A hash memtable makes puts of `state` twice as fast, but snapshots, the audit and every
    other scan of it would first copy and sort the whole memtable.
    """
    table = rocksdict.BlockBasedOptions()
    table.set_block_cache(cache)
    # Index and filters live in the cache too: memory stays within it however large the database grows.
    table.set_cache_index_and_filter_blocks(True)
    table.set_pin_l0_filter_and_index_blocks_in_cache(True)
    table.set_format_version(5)
    options = rocksdict.Options(raw_mode=True)
    if family in (JOBS, DONE, ATTEMPTS, INDEX, RAFT_LOG):
        table.set_block_size(16 * 1024)  # scans: 1.2 against 1.6 µs a row with 4 KiB
    if family == STATE:
        table.set_bloom_filter(10, False)
        table.set_data_block_index_type(rocksdict.DataBlockIndexType.binary_and_hash())
        table.set_data_block_hash_ratio(0.75)
    options.set_block_based_table_factory(table)
    compressed = family in (JOBS, DONE, ATTEMPTS, RAFT_LOG)
    options.set_compression_type(rocksdict.DBCompressionType.lz4() if compressed else rocksdict.DBCompressionType.none())
    if family in (JOBS, INDEX, RAFT_LOG):
        # Files full of deleted rows are compacted without waiting for a level to fill: a seek over 1M of them took 200 ms.
        options.add_compact_on_deletion_collector_factory(1_000, 500, 0.5)
    # A quarter of the budget each: jobs, state, raft_log and one more can be full at once before the manager flushes the largest.
    options.set_write_buffer_size(max(settings.write_buffer_mib // 4, 1) * MIB)
    # A write that RocksDB slows down or stops holds the GIL meanwhile; let it come to that late.
    options.set_max_write_buffer_number(6)
    options.set_level_zero_slowdown_writes_trigger(40)
    options.set_level_zero_stop_writes_trigger(64)
    return options


def _open_error(path: Path, message: str) -> StoreError:
    if "Column families not opened" in message:
        return StoreRefused(f"{path} holds column families this release does not know ({message}); start the release that wrote it")
    if "Corruption" in message or "Invalid argument" in message:
        return StoreCorrupt(
            f"{path} cannot be read back: {message} (WAL files: {_wal_files(path)}); synced data may be lost. {_REMEDY.format(path.parent)}"
        )
    return StoreError(f"{path} cannot be opened: {message}")


def _wal_files(path: Path) -> str:
    return ", ".join(sorted(file.name for file in path.glob("*.log"))) or "none"
