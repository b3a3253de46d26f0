"""What a power cut may leave of more than one WAL file: a beginning of what was written, and never a later part without an earlier."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from wheelsched.core.settings import StoreSettings
from wheelsched.store.directory import DB_NAME
from wheelsched.store.rocks import RocksStore
from wheelsched.testing.process import wal_lengths

SMALL = StoreSettings(write_buffer_mib=4)
# Rows of 20 kB, none synced, until RocksDB begins another WAL file; one more, and the process is gone before a flush drops the first.
WRITE_AND_DIE = """
import os, signal, sys
from pathlib import Path
from wheelsched.core.settings import StoreSettings
from wheelsched.store.rocks import RocksStore
from wheelsched.testing.process import wal_lengths
store = RocksStore(sys.argv[1], StoreSettings(write_buffer_mib=4))
for number in range(1_000):
    store.write({"jobs": {number.to_bytes(4, "big"): os.urandom(20_000)}})
    if len(wal_lengths(Path(sys.argv[1]) / "db")) > 1:
        store.write({"jobs": {(number + 1).to_bytes(4, "big"): os.urandom(20_000)}})
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_rows_behind_a_torn_wal_file_are_not_read_without_those_before(tmp_path: Path) -> None:
    """The kernel may write the end of the newer file and not that of the older: neither was synced. State and applied index lie in
    one batch, so a batch that is missing in the middle would never be applied again (`applied_agrees`)."""
    run = subprocess.run([sys.executable, "-c", WRITE_AND_DIE, str(tmp_path / "data")], check=False)
    assert run.returncode == -signal.SIGKILL
    older, *newer = wal_lengths(tmp_path / "data" / DB_NAME)[-2:]
    if not newer:
        pytest.skip("RocksDB flushed before the process died: one WAL file is left")
    # At least half of it stays: how much RocksDB had put there when it began the next one is its own affair.
    os.truncate(tmp_path / "data" / DB_NAME / older[0], max(older[1] - 30_000, older[1] // 2))
    store = RocksStore(tmp_path / "data", SMALL)
    try:
        found = [int.from_bytes(key, "big") for key, _ in store.scan("jobs", b"", b"", 1_000)]
    finally:
        store.close()
    assert found == list(range(len(found)))
