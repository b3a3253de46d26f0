"""The data directory: one process owns it, and its identity row says whose data it holds.

    wheelsched.pid   flock of the owner, and its pid for people
    db/              RocksDB; appears complete, with its identity row, by a rename
    db.creating/     a creation that a crash cut short; removed by the next start
    ballast          see `disk.py`

Because `db/` never exists without its identity row, a database in which the row is missing has lost something.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from wheelsched.store.disk import BALLAST_NAME
from wheelsched.store.errors import StoreCorrupt, StoreError, StoreRefused

DB_NAME = "db"
CREATING_NAME = "db.creating"
PID_NAME = "wheelsched.pid"
IDENTITY_KEY = b"I"  # in raft_meta
FORMAT_VERSION = 1

_OURS = frozenset((DB_NAME, CREATING_NAME, PID_NAME, BALLAST_NAME, "lost+found"))


class Identity(msgspec.Struct, array_like=True, frozen=True):
    """The identity row, a msgpack array. `incarnation`: 16 random bytes of this directory, drawn when it was created."""

    format_version: int = FORMAT_VERSION
    cluster_name: str = "wheelsched"
    group_count: int = 32
    node_id: str = "n1"
    incarnation: bytes = b""


class DataDirectory:
    """`path` exists and is locked for this process until `release`. Raises `StoreRefused` if another process holds it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / PID_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StoreError(f"data directory {path} cannot be used: {error}; make it a directory this user may write") from error
        try:
            # flock and not the pid decides: the kernel lets go of it when the owner dies, however it dies.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._lock)
            raise StoreRefused(
                f"data directory {path} is in use by process {owner} ({path / PID_NAME}); stop that node, or name another node.data_dir"
            ) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    @property
    def db_path(self) -> Path:
        return self.path / DB_NAME

    def release(self) -> None:
        """Let go of the lock; the file stays, for a removed one could be locked twice."""
        if self._lock >= 0:
            os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = -1

    def create_database(self, create: Callable[[Path], None]) -> None:
        """Where there is no database yet, let `create` make one, durable and closed, and move it to its place."""
        if self.db_path.exists():
            return
        strangers = sorted(entry for entry in os.listdir(self.path) if entry not in _OURS and not entry.startswith("."))
        if strangers:
            raise StoreRefused(
                f"data directory {self.path} holds {', '.join(strangers[:3])} but no wheelsched database;"
                " name an empty directory, or restore the backup this was to be"
            )
        creating = self.path / CREATING_NAME
        shutil.rmtree(creating, ignore_errors=True)
        create(creating)
        creating.rename(self.db_path)
        directory = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(directory)  # the rename itself
        finally:
            os.close(directory)

    def check_identity(self, row: bytes | None, expected: Identity) -> Identity:
        """The identity on record, if it is the expected one but for the incarnation; else raises, naming the remedy."""
        if row is None:
            raise StoreCorrupt(
                f"the database in {self.path} has lost its identity row; restore a backup, or remove the directory"
                " and let this node join anew"
            )
        try:
            format_version = msgspec.msgpack.decode(row)[0]
        except (msgspec.DecodeError, TypeError, IndexError, KeyError) as error:
            raise StoreCorrupt(f"the identity row of {self.path} cannot be read: {error}; restore a backup") from error
        if format_version != FORMAT_VERSION:
            raise StoreRefused(
                f"{self.path} has format {format_version}, this release reads format {FORMAT_VERSION}; start the release that wrote it"
            )
        found = msgspec.msgpack.decode(row, type=Identity)
        for name, ours, theirs in (
            ("cluster.name", expected.cluster_name, found.cluster_name),
            ("cluster.group_count", expected.group_count, found.group_count),
            ("node.id", expected.node_id, found.node_id),
        ):
            if ours != theirs:
                raise StoreRefused(
                    f"{self.path} was created with {name} {theirs}, the configuration says {ours};"
                    " correct the configuration, or name another node.data_dir"
                )
        return found
