"""Backups of what runs: the node that is asked writes down what the leaders of all groups show it, one backup at a time."""

from __future__ import annotations

import asyncio
import shutil
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

import structlog

from wheelsched import __version__
from wheelsched.backup import Manifest, take_backup
from wheelsched.backup.taking import Progress, Read
from wheelsched.core.clock import Clock, Rng
from wheelsched.core.errors import InvalidRequest, Unavailable, WheelschedError
from wheelsched.core.ids import PARTITION_COUNT
from wheelsched.core.settings import Settings

RECENT_MAX: Final = 20
MIB: Final = 1024 * 1024

log = structlog.get_logger()


@dataclass(slots=True)
class BackupRecord:
    """A backup that this node writes or wrote since it started. `error`: why it failed, empty otherwise."""

    id: str
    path: str
    began_at_ms: int
    progress: Progress
    state: Literal["running", "done", "failed"] = "running"
    ended_at_ms: int = 0
    error: str = ""
    manifest: Manifest | None = field(default=None, repr=False)


class Backups:
    """The backups of this node. `read`: a slice of a group, of whoever leads it; `cluster_id()`: empty of a node that is alone."""

    def __init__(
        self, settings: Settings, clock: Clock, rng: Rng, read: Read, *, cluster_id: Callable[[], bytes] = lambda: b""
    ) -> None:  # fmt: skip
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._read = read
        self._cluster_id = cluster_id
        self._recent: deque[BackupRecord] = deque(maxlen=RECENT_MAX)
        self._draining = False

    def recent(self) -> list[BackupRecord]:
        """The last ones, newest first; one may be running."""
        return list(reversed(self._recent))

    def drain(self) -> None:
        """Give up what is running: the node is about to stop."""
        self._draining = True

    async def take(self, path: str) -> BackupRecord:
        """Write a backup into the directory `path` of this machine, which is made, or is empty. Nothing is left where that fails.

        Raises `InvalidRequest` for a path that cannot be used, `Unavailable`."""
        self._check_running()
        if self._recent and self._recent[-1].state == "running":
            raise Unavailable(f"a backup is being written to {self._recent[-1].path}; wait for it", retry_after_s=10)
        cluster = self._settings.cluster
        record = BackupRecord(f"{self._rng.getrandbits(128):032x}", path, self._clock.wall_ms(), Progress(groups=cluster.group_count + 1))
        self._recent.append(record)
        try:
            await self._take(record, path)
        except BaseException as error:
            record.state, record.ended_at_ms = "failed", self._clock.wall_ms()
            record.error = error.detail if isinstance(error, WheelschedError) else str(error) or type(error).__name__
            log.warning("backup_failed", path=path, error=record.error)
            raise
        record.state, record.ended_at_ms = "done", self._clock.wall_ms()
        log.info("backup_done", path=path, id=record.id, rows=record.progress.rows, bytes=record.progress.bytes)
        return record

    async def _take(self, record: BackupRecord, path: str) -> None:
        folder, made = await asyncio.to_thread(_make_folder, path)
        cluster = self._settings.cluster
        about = Manifest(
            id=record.id, release=__version__, cluster=cluster.name, cluster_id=self._cluster_id().hex(), node=self._settings.node.id,
            began_at=_instant(record.began_at_ms), ended_at="", group_count=cluster.group_count, partition_count=PARTITION_COUNT, groups=(),
        )  # fmt: skip
        log.info("backup_begins", path=path, id=record.id)
        try:
            record.manifest = await take_backup(
                folder, about, self._read, ended_at=lambda: _instant(self._clock.wall_ms()),
                bytes_per_s=cluster.snapshot_mib_per_s * MIB, progress=record.progress, check=self._check_running,
            )  # fmt: skip
        except OSError as error:
            await asyncio.to_thread(_clear, folder, made)
            raise _bad_path(path, f"cannot be written: {error.strerror or error}; free space there, or name another directory") from error
        except BaseException:
            await asyncio.to_thread(_clear, folder, made)
            raise

    def _check_running(self) -> None:
        if self._draining:
            raise Unavailable("the node is shutting down; ask another node, or again in a moment", retry_after_s=1)


def _make_folder(path: str) -> tuple[Path, bool]:
    """(the directory, whether it was made here). Raises `InvalidRequest`."""
    folder = Path(path)
    if not folder.is_absolute() or "\0" in path:
        raise _bad_path(path, "is not absolute; give the whole path of a directory on the node that takes this call")
    try:
        if folder.exists():
            if not folder.is_dir() or any(folder.iterdir()):
                raise _bad_path(path, "is there already and is no empty directory; name another one")
            return folder, False
        folder.mkdir(parents=True)
    except OSError as error:
        raise _bad_path(path, f"cannot be made: {error.strerror or error}; name a directory that this node may write") from error
    return folder, True


def _bad_path(path: str, what: str) -> InvalidRequest:
    detail = f"path {path} {what}"
    return InvalidRequest(detail, errors=({"pointer": "/path", "detail": detail},))


def _clear(folder: Path, made: bool) -> None:
    """What was written is no backup, and would be in the way of the next one."""
    for file in folder.glob("*"):
        file.unlink(missing_ok=True)
    if made:
        shutil.rmtree(folder, ignore_errors=True)


def _instant(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
