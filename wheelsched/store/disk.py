"""Free space: below one bound new jobs are refused, below the next the node stops while it still can write.

The ballast file is space that an operator gives back by deleting `<data_dir>/ballast` when the disk is full: enough to start,
to finish and to purge jobs. A later start with room makes it anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import structlog

from wheelsched.core.settings import StoreSettings

log = structlog.get_logger()

BALLAST_NAME = "ballast"
BALLAST_BYTES = 64 * 1024 * 1024
# A walk over the files of a database of 100 GB is some 4 ms; nobody needs its size every second.
SIZE_EVERY_CHECKS = 10


def measure_disk(path: Path) -> tuple[int, int]:
    """(free for us, total) bytes of the file system that holds `path`. A statvfs: microseconds."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize


class DiskSpace:
    """What `check` saw last. `writable` comes back only at 1.1 times the bound that took it, so that it does not flap."""

    def __init__(self, path: Path, db_path: Path, settings: StoreSettings, measure: Callable[[Path], tuple[int, int]]) -> None:
        self._path, self._db_path, self._settings, self._measure = path, db_path, settings, measure
        self._checks = 0
        self.writable = True
        self.must_stop = False
        self.free_bytes = self.used_bytes = 0

    def check(self) -> None:
        self.free_bytes, total_bytes = self._measure(self._path)
        free_bytes_min = min(self._settings.free_bytes_min, total_bytes // 10)
        free_bytes_stop = min(self._settings.free_bytes_stop, total_bytes // 40)
        was_writable = self.writable
        if self.free_bytes < free_bytes_min:
            self.writable = False
        elif self.free_bytes * 10 >= free_bytes_min * 11:
            self.writable = True
        self.must_stop = self.free_bytes < free_bytes_stop
        if self.writable != was_writable:
            event = "disk_has_room" if self.writable else "disk_low"
            log.warning(event, free_bytes=self.free_bytes, free_bytes_min=free_bytes_min, directory=str(self._path))
        if self._checks % SIZE_EVERY_CHECKS == 0:
            self.used_bytes = _files_bytes(self._db_path)
        self._checks += 1

    def ensure_ballast(self) -> None:
        """Make the ballast file where there is none and room for it; without it the node runs all the same."""
        ballast = self._path / BALLAST_NAME
        free_bytes, total_bytes = self._measure(self._path)
        size_bytes = min(BALLAST_BYTES, total_bytes // 100)
        # An operator who just deleted it has a full disk: do not take the space away again.
        room_bytes = 2 * min(self._settings.free_bytes_min, total_bytes // 10) + size_bytes
        if ballast.exists() or size_bytes == 0 or free_bytes < room_bytes:
            return
        try:
            with ballast.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size_bytes)  # a sparse file would give nothing back
        except OSError as error:
            log.warning("ballast_not_made", file=str(ballast), error=str(error))
            ballast.unlink(missing_ok=True)


def _files_bytes(directory: Path) -> int:
    size_bytes = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                size_bytes += entry.stat().st_size
            except FileNotFoundError:  # a compaction removed it meanwhile
                continue
    return size_bytes
