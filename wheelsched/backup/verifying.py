"""Is a backup whole, and can each of its rows be read? Offline, and without changing anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from wheelsched.backup.files import BackupUnusable, GroupEntry, GroupFile, Manifest, read_manifest
from wheelsched.model import keys, members
from wheelsched.model.rows import (
    decode_attempt,
    decode_counts,
    decode_course,
    decode_definition,
    decode_done,
    decode_header,
    decode_index,
    decode_queue,
    decode_skip,
    decode_state,
)
from wheelsched.replica.snapshots import RowsChunk

_READ: Final[Mapping[str, Callable[[bytes], Any]]] = {
    keys.JOBS: decode_header,
    keys.STATE: decode_state,
    keys.ATTEMPTS: decode_attempt,
    keys.DONE: decode_done,
    keys.INDEX: decode_index,
    keys.COUNTS: decode_counts,
}
# By the letter behind the group; runs have no value.
_READ_BY_LETTER: Final[Mapping[str, Mapping[bytes, Callable[[bytes], Any]]]] = {
    keys.SCHEDULES: {b"d": decode_definition, b"c": decode_course, b"k": decode_skip},
    keys.META: {b"q": decode_queue, b"v": members.decode_cluster, b"m": members.decode_member, b"g": members.decode_group_row},
}


def verify(folder: Path, *, on_group: Callable[[GroupEntry], None] = lambda _: None) -> tuple[Manifest, list[str]]:
    """The manifest, and every fault there is, one for each file that has some. Raises `BackupUnusable` without a manifest to go by."""
    manifest = read_manifest(folder)
    faults = []
    for entry in manifest.groups:
        try:
            _verify_group(folder, entry)
        except BackupUnusable as error:
            faults.append(str(error))
        on_group(entry)
    return manifest, faults


def _verify_group(folder: Path, entry: GroupEntry) -> None:
    for chunk in GroupFile(folder, entry).chunks():
        try:
            _read_rows(chunk)
        except Exception as error:  # whatever a decoder makes of it
            raise BackupUnusable(
                f"{folder / entry.file} holds a row of {chunk.family} that this release cannot read: {error}; use the release that wrote it"
            ) from error


def _read_rows(chunk: RowsChunk) -> None:
    if (by_letter := _READ_BY_LETTER.get(chunk.family)) is None:
        read = _READ[chunk.family]
        for _, value in chunk.rows:
            read(value)
        return
    for key, value in chunk.rows:
        of_letter = by_letter.get(key[2:3])
        if of_letter is not None:
            of_letter(value)
