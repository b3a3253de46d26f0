"""What rocksdict does against expectation, and `store/rocks.py` works around. A failure here may be good news after an update."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import rocksdict


def options() -> rocksdict.Options:
    options = rocksdict.Options(raw_mode=True)
    options.set_wal_recovery_mode(rocksdict.DBRecoveryMode.point_in_time())
    return options


def test_the_lower_bound_of_read_options_is_taken_for_the_upper(tmp_path: Path) -> None:
    db = rocksdict.Rdict(str(tmp_path / "db"), options())
    for number in range(10):
        db[b"%d" % number] = b""
    bounds = rocksdict.ReadOptions()
    bounds.set_iterate_lower_bound(b"3")
    iterator = db.iter(bounds)
    iterator.seek_to_first()
    first = iterator.key()
    iterator.seek_to_last()
    assert (first, iterator.key()) == (b"0", b"2")
    del iterator
    db.close()


def test_a_range_the_wrong_way_round_reaches_the_wal_and_ends_recovery_there(tmp_path: Path) -> None:
    db = rocksdict.Rdict(str(tmp_path / "db"), options())
    db[b"a"] = b""
    batch = rocksdict.WriteBatch(raw_mode=True)
    batch.delete_range(b"z", b"a")
    with pytest.raises(Exception, match="end key comes before start key"):
        db.write(batch)
    with pytest.raises(Exception, match="end key comes before start key"):
        db.close()
    del db
    gc.collect()
    refusing = rocksdict.Options(raw_mode=True)
    refusing.set_wal_recovery_mode(rocksdict.DBRecoveryMode.tolerate_corrupted_tail_records())
    with pytest.raises(Exception, match="end key comes before start key"):
        rocksdict.Rdict(str(tmp_path / "db"), refusing)
    gc.collect()
    db = rocksdict.Rdict(str(tmp_path / "db"), options())
    assert db.get(b"a") == b""
    db.close()


def test_a_living_iterator_keeps_a_closed_database_locked(tmp_path: Path) -> None:
    db = rocksdict.Rdict(str(tmp_path / "db"), options())
    iterator = db.iter()
    db.close()
    with pytest.raises(Exception, match="lock"):
        rocksdict.Rdict(str(tmp_path / "db"), options())
    del iterator
    rocksdict.Rdict(str(tmp_path / "db"), options()).close()
