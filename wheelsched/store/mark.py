"""How far the WAL is known to be durable, kept beside it: what tells lost rows from a torn tail.

RocksDB accepts a broken end of the last WAL file, for it cannot know what was synced. One flipped bit in the *length* of a record
in its last 32 KiB looks like such an end, and a deleted WAL file like none at all: both opened silently without synced rows. So
after each fsync the sequence number it covered is written to `db/SYNCED`, and a database that opens below it is refused.

The mark itself is never synced. It is written after the fsync it tells of, so it can be old (after a power
cut by some 30 s, the time the kernel takes to write back a page), never ahead; after a crash of the process it is exact.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from zlib import crc32

MARK_NAME = "SYNCED"  # RocksDB leaves files alone whose names it does not know

_MARK = struct.Struct(">QI")  # sequence number, crc of it


class SyncedMark:
    """The mark of the database in `db_path`. One pwrite of 12 bytes an fsync, 1 to 2 µs."""

    def __init__(self, db_path: Path) -> None:
        self._file = os.open(db_path / MARK_NAME, os.O_RDWR | os.O_CREAT, 0o644)

    def read(self) -> int:
        """The last sequence number told durable; 0 where the file is new or unreadable, which is no evidence of anything."""
        row = os.pread(self._file, _MARK.size, 0)
        if len(row) < _MARK.size:
            return 0
        sequence, crc = _MARK.unpack(row)
        return sequence if crc == crc32(row[:8]) else 0

    def write(self, sequence: int) -> None:
        """To be called after the fsync that covered `sequence`, never before."""
        os.pwrite(self._file, _MARK.pack(sequence, crc32(sequence.to_bytes(8, "big"))), 0)

    def close(self) -> None:
        os.close(self._file)
