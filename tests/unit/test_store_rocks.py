"""RocksStore and its directory: who may open it, what a crash and a bad disk leave, and when it says so."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from wheelsched.core.settings import StoreSettings
from wheelsched.model.keys import INDEX, JOBS, RAFT_LOG, RAFT_META, STATE
from wheelsched.store import StoreCorrupt, StoreError, StoreFailed, StoreRefused
from wheelsched.store.directory import CREATING_NAME, DB_NAME, IDENTITY_KEY, PID_NAME, Identity
from wheelsched.store.failure import EXIT_STORAGE_FAILED
from wheelsched.store.mark import MARK_NAME
from wheelsched.store.rocks import RocksStore

SMALL = StoreSettings(block_cache_mib=8, write_buffer_mib=4, free_bytes_min=1_000, free_bytes_stop=500)
ROOT = Path(__file__).resolve().parents[2]
OpenStore = Callable[..., RocksStore]


@pytest.fixture
def open_store() -> Iterator[OpenStore]:
    """Opens stores without ballast; closes at the end what is still open."""
    opened: list[RocksStore] = []

    def open_(path: Path, **arguments: Any) -> RocksStore:
        opened.append(RocksStore(path, SMALL, **{"disk": lambda _: (1 << 40, 0), **arguments}))
        return opened[-1]

    yield open_
    for store in opened:
        store.close()


# ---- the directory and whose it is


def test_rows_are_there_after_a_close(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.write({JOBS: {b"a": b"1"}, RAFT_LOG: {b"b": b"2"}})
    store.close()
    again = open_store(tmp_path)
    assert again.get(JOBS, b"a") == b"1" and again.get(RAFT_LOG, b"b") == b"2"
    assert again.identity == store.identity and len(again.identity.incarnation) == 16


def test_cursors_left_open_do_not_keep_the_database_locked(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    cursor = store.cursor(JOBS)
    cursor.seek(b"")
    store.close()
    open_store(tmp_path)
    with pytest.raises(StoreFailed):
        cursor.next()


def test_a_second_process_is_told_directory_and_pid_file(open_store: OpenStore, tmp_path: Path) -> None:
    open_store(tmp_path)
    with pytest.raises(StoreRefused, match=f"{tmp_path} is in use by process {os.getpid()} .*{PID_NAME}"):
        open_store(tmp_path)
    result = run_child("RocksStore(sys.argv[1], SMALL)", tmp_path)
    assert result.returncode == 1 and f"in use by process {os.getpid()}" in result.stderr


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        (Identity(cluster_name="other"), "cluster.name wheelsched, the configuration says other"),
        (Identity(group_count=16), "cluster.group_count 32, the configuration says 16"),
        (Identity(node_id="n2"), "node.id n1, the configuration says n2"),
    ],
)
def test_a_foreign_directory_is_refused(open_store: OpenStore, tmp_path: Path, identity: Identity, message: str) -> None:
    open_store(tmp_path).close()
    with pytest.raises(StoreRefused, match=f"{message}; correct the configuration"):
        open_store(tmp_path, identity=identity)
    open_store(tmp_path)


def test_an_unknown_format_is_refused_even_if_its_row_is_another(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.write({RAFT_META: {IDENTITY_KEY: msgspec.msgpack.encode([2, {"new": "shape"}])}})
    store.close()
    with pytest.raises(StoreRefused, match="has format 2, this release reads format 1; start the release that wrote it"):
        open_store(tmp_path)


@pytest.mark.parametrize("row", [None, b"", b"\x90", b"\xff"])
def test_a_lost_identity_row_is_not_taken_for_a_new_directory(open_store: OpenStore, tmp_path: Path, row: bytes | None) -> None:
    store = open_store(tmp_path)
    store.write({RAFT_META: {IDENTITY_KEY: row}})
    store.close()
    with pytest.raises(StoreCorrupt, match="restore a backup"):
        open_store(tmp_path)


def test_a_directory_of_something_else_is_refused(open_store: OpenStore, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(StoreRefused, match=r"holds thesis\.tex but no wheelsched database"):
        open_store(tmp_path)


def test_a_creation_cut_short_is_begun_anew(open_store: OpenStore, tmp_path: Path) -> None:
    (tmp_path / CREATING_NAME).mkdir()
    (tmp_path / CREATING_NAME / "CURRENT").write_text("MANIFEST-000001\n")
    open_store(tmp_path)
    assert not (tmp_path / CREATING_NAME).exists()


# ---- crashes and bad disks

CHILD = f"""
import asyncio, sys
from wheelsched.core.settings import StoreSettings
from wheelsched.store.rocks import RocksStore
SMALL = StoreSettings(block_cache_mib=8, write_buffer_mib=4, free_bytes_min=0, free_bytes_stop=0)
JOBS, STATE = {JOBS!r}, {STATE!r}

async def number_batches(store, first):
    for number in range(first, 1 << 30):
        key = number.to_bytes(8, "big")
        store.write({{JOBS: {{key: bytes(3000)}}, STATE: {{key: key}}}})
        await store.sync()
        print(number, flush=True)
"""


def child(code: str, path: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD + code, str(path)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run_child(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    process = child(code, path)
    out, err = process.communicate(timeout=30)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_every_synced_batch_survives_kill_9(open_store: OpenStore, tmp_path: Path) -> None:
    """Ten rounds on one directory: a child numbers batches and says which are synced; it is killed wherever it is just then.
    4 MiB of write buffers make memtables flush and WAL files change within a few hundred batches."""
    rng, acknowledged = random.Random(20), -1
    for _ in range(10):
        code = f"asyncio.run(number_batches(RocksStore(sys.argv[1], SMALL), {acknowledged + 1}))"
        process = child(code, tmp_path)
        assert process.stdout and process.stderr
        for _ in range(rng.randrange(1, 120)):
            line = process.stdout.readline()
            assert line, process.stderr.read()
            acknowledged = int(line)
        process.send_signal(signal.SIGKILL)
        # Not communicate(): it does not see what readline() has buffered already.
        for line in process.stdout.read().splitlines(keepends=True):
            if line.endswith("\n"):
                acknowledged = int(line)
        process.communicate()
        store = open_store(tmp_path)
        states = [int.from_bytes(key, "big") for key, _ in store.scan(STATE, b"", b"", 1 << 30)]
        assert states == list(range(len(states)))
        assert len(states) - (acknowledged + 1) in (0, 1), "all that was acknowledged, and at most the batch under way"
        assert [key for key, _ in store.scan(JOBS, b"", b"", 1 << 30)] == [key for key, _ in store.scan(STATE, b"", b"", 1 << 30)]
        acknowledged = states[-1]
        store.close()


def test_a_failed_fsync_ends_the_process(tmp_path: Path) -> None:
    code = """
class Faults:
    def on_write(self): pass
    def on_sync(self): raise OSError(5, "Input/output error")
asyncio.run(number_batches(RocksStore(sys.argv[1], SMALL, faults=Faults()), 0))
"""
    result = run_child(code, tmp_path)
    assert result.returncode == EXIT_STORAGE_FAILED and result.stdout.strip().isdigit() is False, result
    assert "wheelsched: sync of the store failed: [Errno 5] Input/output error; the node stops" in result.stderr


SYNCED, UNSYNCED = 40, 20


@pytest.fixture
def crashed(open_store: OpenStore, tmp_path: Path) -> tuple[Path, Path, int]:
    """(directory as a crash left it, its WAL file, bytes of the WAL that were synced): 40 batches synced, 20 not."""
    store = open_store(tmp_path / "live")
    for number in range(SYNCED):
        store.write(numbered(number))
        if number % 10 == 9:
            asyncio.run(store.sync())
    wal = max((tmp_path / "live" / DB_NAME).glob("*.log"))
    synced_bytes = wal.stat().st_size
    for number in range(SYNCED, SYNCED + UNSYNCED):
        store.write(numbered(number))
    shutil.copytree(tmp_path / "live", tmp_path / "crashed")
    return tmp_path / "crashed", tmp_path / "crashed" / DB_NAME / wal.name, synced_bytes


def numbered(number: int) -> dict[str, dict[bytes, bytes | None]]:
    key = b"%06d" % number
    return {JOBS: {key: b"j" * 100}, INDEX: {key: b""}, STATE: {key: b"s" * 50}}


def copy_of(crashed: Path, number: int) -> Path:
    return Path(shutil.copytree(crashed, crashed.parent / str(number)))


def test_a_torn_tail_loses_only_what_was_not_synced(open_store: OpenStore, crashed: tuple[Path, Path, int]) -> None:
    directory, wal, synced_bytes = crashed
    rng, size_bytes = random.Random(3), wal.stat().st_size
    lengths = set[int]()
    for number in range(20):
        copy = copy_of(directory, number)
        cut = synced_bytes if number == 0 else rng.randrange(synced_bytes, size_bytes + 1)
        os.truncate(copy / DB_NAME / wal.name, cut)
        store = open_store(copy)
        rows = [[key for key, _ in store.scan(family, b"", b"", 1_000)] for family in (JOBS, INDEX, STATE)]
        assert rows[0] == rows[1] == rows[2] == [b"%06d" % row for row in range(len(rows[0]))]
        assert SYNCED <= len(rows[0]) <= SYNCED + UNSYNCED
        lengths.add(len(rows[0]))
        store.close()
    assert len(lengths) > 5 and min(lengths) == SYNCED


def test_a_flipped_bit_in_the_synced_wal_is_refused(open_store: OpenStore, crashed: tuple[Path, Path, int]) -> None:
    """Wherever it is. RocksDB alone takes a flipped length in the last 32 KiB for a torn tail: the mark tells."""
    directory, wal, synced_bytes = crashed
    rng, intact = random.Random(4), wal.read_bytes()
    length_of_first_record = 5  # crc (4), length (2), type (1); bit 15 of the length: far past the end of the file
    positions = [length_of_first_record * 8 + 7, *(rng.randrange(synced_bytes * 8) for _ in range(19))]
    for number, position in enumerate(positions):
        copy = copy_of(directory, number)
        flipped = bytearray(intact)
        flipped[position // 8] ^= 1 << position % 8
        (copy / DB_NAME / wal.name).write_bytes(flipped)
        with pytest.raises(StoreCorrupt, match=r"Restore a backup, or move .* away"):
            open_store(copy)
        with pytest.raises(StoreCorrupt):
            open_store(copy)  # and it stays refused
    assert len(intact) > synced_bytes


def test_a_removed_wal_is_refused(open_store: OpenStore, crashed: tuple[Path, Path, int]) -> None:
    """RocksDB itself would open without a word."""
    directory, wal, _ = crashed
    wal.unlink()
    with pytest.raises(StoreCorrupt, match="was synced"):
        open_store(directory)


def test_without_a_readable_mark_a_database_opens(open_store: OpenStore, crashed: tuple[Path, Path, int]) -> None:
    directory, _, _ = crashed
    (directory / DB_NAME / MARK_NAME).write_bytes(b"\xff" * 12)
    assert len(open_store(directory).scan(JOBS, b"", b"", 1_000)) == SYNCED + UNSYNCED


def test_a_row_that_cannot_be_read_ends_the_node_and_no_scan_stops_short(open_store: OpenStore, tmp_path: Path) -> None:
    """A scan that took a broken block for the end would forget jobs."""
    store = open_store(tmp_path)
    for number in range(0, 4_000, 500):
        store.write({JOBS: {b"%06d" % row: os.urandom(100) for row in range(number, number + 500)}})
    store.close()
    open_store(tmp_path).close()  # the reopening flushes the WAL into files
    largest = max((tmp_path / DB_NAME).glob("*.sst"), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    uses: list[Callable[[RocksStore], Any]] = [
        lambda store: store.scan(JOBS, b"", b"", 10_000),
        lambda store: store.scan_back(JOBS, b"", b"", 10_000),
        lambda store: store.multiget(JOBS, [b"%06d" % row for row in range(4_000)]),
        lambda store: [store.get(JOBS, b"%06d" % row) for row in range(4_000)],
        lambda store: walk(store),
    ]
    for use in uses:
        fatal = list[str]()
        store = open_store(tmp_path, fatal=fatal.append)
        with pytest.raises(StoreFailed, match="read of jobs failed: Corruption"):
            use(store)
        assert len(fatal) == 1
        store.close()


def walk(store: RocksStore) -> None:
    cursor = store.cursor(JOBS)
    row = cursor.seek(b"")
    while row:
        row = cursor.next()


# ---- disk space and statistics


def test_disk_bounds_take_and_give_back(open_store: OpenStore, tmp_path: Path) -> None:
    free = [10_000]
    store = open_store(tmp_path, disk=lambda _: (free[0], 1 << 30))
    seen = []
    for free[0] in (1_000, 999, 1_099, 1_100, 500, 499, 2_000):
        store.check_disk()
        seen.append((store.writable, store.must_stop))
    assert seen == [(True, False), (False, False), (False, False), (True, False), (False, False), (False, True), (True, False)]
    assert store.statistics().disk_free_bytes == 2_000 and store.statistics().writable


def test_disk_bounds_shrink_with_the_disk(open_store: OpenStore, tmp_path: Path) -> None:
    """10 % and 2.5 % of a disk of 4,000 bytes."""
    free = [400]
    store = open_store(tmp_path, disk=lambda _: (free[0], 4_000))
    assert store.writable
    for free[0], expected in ((399, (False, False)), (99, (False, True))):
        store.check_disk()
        assert (store.writable, store.must_stop) == expected


def test_the_ballast_is_made_where_there_is_room_and_not_taken_back_where_there_is_none(open_store: OpenStore, tmp_path: Path) -> None:
    ballast, total = tmp_path / "ballast", 100 << 20
    open_store(tmp_path, disk=lambda _: (total, total)).close()
    assert ballast.stat().st_size == total // 100 and ballast.stat().st_blocks * 512 >= total // 100
    ballast.unlink()
    open_store(tmp_path, disk=lambda _: (1_000, total)).close()
    assert not ballast.exists()


async def test_statistics_name_syncs_and_sizes(quiet_store: RocksStore) -> None:
    quiet_store.write({JOBS: {b"a": bytes(100_000)}})
    await quiet_store.sync()
    seen = quiet_store.statistics()
    assert seen.sync_count == 1 and len(seen.sync_ms_recent) == 1 and seen.sync_ms_recent[0] > 0
    assert seen.memory_bytes > 100_000 and seen.disk_bytes > 0
    assert quiet_store.sync_pending_ms() == 0


@pytest.fixture
def quiet_store(open_store: OpenStore, tmp_path: Path) -> RocksStore:
    return open_store(tmp_path)


def test_a_file_in_place_of_the_directory_is_named(open_store: OpenStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=f"data directory {tmp_path / 'file'} cannot be used"):
        open_store(tmp_path / "file")
