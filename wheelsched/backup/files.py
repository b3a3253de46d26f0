"""The files of a backup, byte by byte. All of it blocks: not for the loop.

    manifest.json           what there is, and a checksum of every file and of itself; written last
    group-000.rows          8 bytes that tell what it is; then for each chunk: length and CRC-32 of it (big-endian), and the chunk
    group-meta.rows         the same of the meta group

The chunks are those of a snapshot: a header with the group's state, rows sorted by family and key, and an end that counts them.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final
from zlib import crc32

import msgspec

from wheelsched.model.keys import META_GROUP
from wheelsched.model.rows import GroupState
from wheelsched.replica.snapshots import ChunkReader, RowsChunk, SnapshotRefused

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
_MANIFEST_PART: Final = "manifest.json.part"
_MAGIC: Final = b"wsback\x00\x01"
_FRAME: Final = struct.Struct(">II")  # length, crc of the chunk
# A chunk is 256 KiB and a row more, and no row is larger than a payload and a result.
_CHUNK_BYTES_MAX: Final = 4 * 1024 * 1024
_READ_BYTES: Final = 1024 * 1024
_DIGEST_BYTES: Final = 32


class BackupUnusable(Exception):
    """This is no backup, or not one that can be restored here; the message names file, fault and way out."""


class GroupEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A group as its file has it. `index`, `term`: of the last entry it holds; `checksum`: BLAKE2b of the whole file, hexadecimal."""

    group: int
    file: str
    index: int
    term: int
    watermark_ms: int
    fencing: int
    rows: int
    bytes: int
    checksum: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`id`: 32 hexadecimal digits, drawn for this backup. `cluster_id`: of the cluster it was taken of, empty of a node that was alone.
    `checksum`: BLAKE2b of this very document with an empty one in its place."""

    format: int = FORMAT
    id: str
    release: str
    cluster: str
    cluster_id: str
    node: str
    began_at: str
    ended_at: str
    group_count: int
    partition_count: int
    groups: tuple[GroupEntry, ...]
    checksum: str = ""

    @property
    def row_count(self) -> int:
        return sum(entry.rows for entry in self.groups)

    @property
    def byte_count(self) -> int:
        return sum(entry.bytes for entry in self.groups)


def file_name(group: int) -> str:
    return "group-meta.rows" if group == META_GROUP else f"group-{group:03}.rows"


def group_name(group: int) -> str:
    return "meta" if group == META_GROUP else str(group)


# ---- the manifest


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Make the directory a backup, durably; the manifest with its checksum."""
    manifest = _sealed(manifest)
    part = folder / _MANIFEST_PART
    with part.open("xb") as file:
        file.write(_encoded(manifest))
        file.flush()
        os.fsync(file.fileno())
    part.rename(folder / MANIFEST)
    sync_directory(folder)
    sync_directory(folder.parent)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Raises `BackupUnusable` where there is none, or not as it was written."""
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise BackupUnusable(
            f"{folder} holds no {MANIFEST}: it is no backup, or one that was cut short and cannot be used; take another"
        ) from None
    except OSError as error:
        raise BackupUnusable(f"{path} cannot be read: {error.strerror}") from error
    try:
        version = msgspec.json.decode(data, type=_Version).format
    except msgspec.MsgspecError as error:
        raise BackupUnusable(f"{path} cannot be read: {error}; take another copy of the backup") from error
    if version > FORMAT:
        raise BackupUnusable(f"{path} has format {version}, this release reads format {FORMAT}; use the release that wrote it")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise BackupUnusable(f"{path} cannot be read: {error}; take another copy of the backup") from error
    # Byte by byte, so that no change of it goes unnoticed, be it a blank.
    if data != _encoded(_sealed(manifest)):
        raise BackupUnusable(f"{path} is not as it was written: its checksum does not match; take another copy of the backup")
    named = [entry.group for entry in manifest.groups]
    if sorted(named) != [*range(manifest.group_count), META_GROUP]:
        raise BackupUnusable(f"{path} does not name each of {manifest.group_count} groups and the meta group once")
    return manifest


class _Version(msgspec.Struct):
    format: int


def _sealed(manifest: Manifest) -> Manifest:
    blank = msgspec.structs.replace(manifest, checksum="")
    return msgspec.structs.replace(manifest, checksum=_digest(_encoded(blank)).hexdigest())


def _encoded(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def _digest(data: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES)


def sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- a group


class GroupWriter:
    """A group's file as its chunks come; each is checked before it is written. `close` it where `finish` was not reached."""

    def __init__(self, folder: Path, group: int) -> None:
        self._group = group
        self._path = folder / file_name(group)
        # Anew, where an attempt before this one came to nothing.
        self._file = self._path.open("wb")
        self._digest = _digest()
        self._reader = ChunkReader(group)
        self.byte_count = 0
        self._write(_MAGIC)

    @property
    def row_count(self) -> int:
        return self._reader.row_count

    def add(self, chunks: Sequence[bytes]) -> None:
        """Raises `SnapshotRefused` for what is not the next chunk, `OSError`."""
        for chunk in chunks:
            self._reader.take(chunk)
            self._write(_FRAME.pack(len(chunk), crc32(chunk)))
            self._write(chunk)
            time.sleep(0)  # checking holds the GIL, a millisecond a chunk: the loop is let in after each, not every 5 ms

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.byte_count += len(data)

    def finish(self) -> GroupEntry:
        """Make it durable; what the manifest is to say of it. Raises `SnapshotRefused` where its end is missing."""
        if not self._reader.is_complete:
            raise SnapshotRefused("its end is missing")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()
        state = self._reader.state
        return GroupEntry(
            group=self._group, file=self._path.name, index=state.applied_index, term=state.applied_term,
            watermark_ms=state.watermark_ms, fencing=state.fencing, rows=self.row_count, bytes=self.byte_count,
            checksum=self._digest.hexdigest(),
        )  # fmt: skip

    def close(self) -> None:
        self._file.close()


class GroupFile:
    """A group's file, read and checked to its last byte. `state` is there once `chunks` gave the first rows, or ended."""

    def __init__(self, folder: Path, entry: GroupEntry) -> None:
        self._path = folder / entry.file
        self._entry = entry
        self._reader = ChunkReader(entry.group)

    @property
    def state(self) -> GroupState:
        return self._reader.state

    def chunks(self) -> Iterator[RowsChunk]:
        """Its rows, in order. Raises `BackupUnusable` at the first fault, at the end for what only the whole can show."""
        if self._entry.file != file_name(self._entry.group):
            raise BackupUnusable(f"{self._path} is not where the rows of group {group_name(self._entry.group)} belong")
        try:
            with self._path.open("rb") as file:
                yield from self._read(file)
        except FileNotFoundError:
            raise self._fault("is missing") from None
        except OSError as error:
            raise self._fault(f"cannot be read: {error.strerror}") from error
        except SnapshotRefused as refused:
            raise self._fault(f"is damaged: {refused}") from refused

    def _read(self, file: BinaryIO) -> Iterator[RowsChunk]:
        digest = _digest()
        size = 0

        def take(count: int) -> bytes:
            nonlocal size
            data = file.read(count)
            digest.update(data)
            size += len(data)
            return data

        if take(len(_MAGIC)) != _MAGIC:
            raise self._fault("does not begin as a group's file does")
        while frame := take(_FRAME.size):
            if len(frame) < _FRAME.size:
                raise self._fault("is cut short")
            length, crc = _FRAME.unpack(frame)
            place = size
            chunk = take(length) if length <= _CHUNK_BYTES_MAX else b""
            if len(chunk) < length or crc32(chunk) != crc:
                raise self._fault(f"is damaged: the chunk at byte {place:,} does not match its checksum, or is cut short")
            rows = self._reader.take(chunk)
            if rows is not None:
                yield rows
        if not self._reader.is_complete:
            raise self._fault("is cut short: its last chunk is missing")
        self._check_totals(size, digest.hexdigest())

    def _check_totals(self, size: int, checksum: str) -> None:
        entry, state = self._entry, self._reader.state
        if (size, checksum) != (entry.bytes, entry.checksum):
            raise self._fault(f"is not the one that {MANIFEST} names: size or checksum differ")
        found = (state.applied_index, state.applied_term, state.watermark_ms, state.fencing, self._reader.row_count)
        if found != (entry.index, entry.term, entry.watermark_ms, entry.fencing, entry.rows):
            raise self._fault(f"holds another state than {MANIFEST} says")

    def _fault(self, what: str) -> BackupUnusable:
        return BackupUnusable(f"{self._path} {what}; take another copy of the backup, or another backup")
