"""A backup of what runs: the leader of each group shows its state as of one instant, slice by slice, and one node writes it down.

The leader keeps a view of the group open between two slices, and no longer than a minute, for it keeps old rows on its disk. Where the
leadership moves on, or the view is gone, the group is read again from its beginning, under its next leader.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import structlog

from wheelsched.backup.files import GroupEntry, GroupWriter, Manifest, group_name, write_manifest
from wheelsched.core.errors import OutcomeUnknown, Unavailable
from wheelsched.model.keys import META_GROUP
from wheelsched.raft import Configuration, InstallSnapshot
from wheelsched.replica.snapshots import SnapshotRefused, SnapshotView
from wheelsched.store import Store
from wheelsched.store.raftlog import read_group_state

# One call of another node: half of what a message holds, since a chunk may be a large row longer than planned.
SLICE_BYTES: Final = 4 * 1024 * 1024
_CHUNK_BYTES_MAX: Final = 1024 * 1024
VIEW_S: Final = 60.0
VIEWS_MAX: Final = 8
TRIES_MAX: Final = 10
_AGAIN_S: Final = 0.5

log = structlog.get_logger()


class Slice(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The next chunks of a group. `is_last`: there are no more; `is_gone`: the view they come from is closed, begin anew."""

    chunks: list[bytes]
    is_last: bool = False
    is_gone: bool = False


Read = Callable[[int, bytes, int], Awaitable[Slice]]


@dataclass(slots=True)
class _View:
    chunks: AsyncIterator[bytes]
    timer: asyncio.TimerHandle
    next_sequence: int = 0
    is_busy: bool = False
    ahead: bytes = b""  # read, and too much for the slice before


class Views:
    """The groups of this node that are being read, each as it stood when its first slice was asked for."""

    def __init__(self, store: Store, *, view_s: float = VIEW_S) -> None:
        self._store = store
        self._view_s = view_s
        self._views: dict[tuple[bytes, int], _View] = {}

    def __len__(self) -> int:
        return len(self._views)

    async def read(self, group: int, reader: bytes, sequence: int) -> Slice:
        """Slice number `sequence` of a group, from 0 on and each once; 0 begins anew. The caller has seen to it that this node leads the
        group. `reader`: a number of the backup's own."""
        place = (reader, group)
        view = self._open(place) if sequence == 0 else self._views.get(place)
        if view is None or view.is_busy or view.next_sequence != sequence:
            return Slice([], is_gone=True)
        view.is_busy = True
        chunks: list[bytes] = []
        size = 0
        try:
            while (chunk := view.ahead or await anext(view.chunks, b"")) and size + len(chunk) <= SLICE_BYTES:
                view.ahead = b""
                chunks.append(chunk)
                size += len(chunk)
                await asyncio.sleep(0)  # a chunk is a millisecond of reading
            view.ahead = chunk
        finally:
            view.is_busy = False
        view.next_sequence += 1
        if self._views.get(place) is view:
            view.timer.cancel()
            if chunk:
                view.timer = asyncio.get_running_loop().call_later(self._view_s, self._forget, place)
            else:
                del self._views[place]
        return Slice(chunks, is_last=not chunk)

    def _open(self, place: tuple[bytes, int]) -> _View:
        self._forget(place)
        if len(self._views) >= VIEWS_MAX:
            raise Unavailable(f"{VIEWS_MAX} groups are being read for backups here; try again in a minute", retry_after_s=60)
        group = place[1]
        # The row `A` and the cursors in one turn: nothing is written in between. Nobody is sent this message.
        state = read_group_state(self._store, group)
        message = InstallSnapshot(group, 0, 0, 0, state.applied_index, state.applied_term, Configuration())
        timer = asyncio.get_running_loop().call_later(self._view_s, self._forget, place)
        view = self._views[place] = _View(SnapshotView(self._store, message, state).chunks(), timer)
        return view

    def _forget(self, place: tuple[bytes, int]) -> None:
        if (view := self._views.pop(place, None)) is not None:
            view.timer.cancel()


@dataclass(slots=True)
class Progress:
    """How far a backup is. Counts of the group that is being read are taken back where it has to be read again."""

    groups: int
    groups_done: int = 0
    rows: int = 0
    bytes: int = 0


async def take_backup(
    folder: Path, about: Manifest, read: Read, *, ended_at: Callable[[], str], bytes_per_s: int, progress: Progress,
    check: Callable[[], None] = lambda: None,
) -> Manifest:  # fmt: skip
    """Write a backup into an empty directory; its manifest. `about`: the manifest but for groups and end. `check()` is called now and
    then and may raise.

    Raises `OSError`, `Unavailable` where a group cannot be read, and what `check` raises. What was written then is no backup."""
    entries = []
    pace = _Pace(bytes_per_s)
    reader = bytes.fromhex(about.id)
    for group in (*range(about.group_count), META_GROUP):
        entries.append(await _take_group(folder, group, reader, read, pace, progress, check))
        progress.groups_done += 1
    done = msgspec.structs.replace(about, groups=tuple(entries), ended_at=ended_at())
    return await asyncio.to_thread(write_manifest, folder, done)


async def _take_group(
    folder: Path, group: int, reader: bytes, read: Read, pace: _Pace, progress: Progress, check: Callable[[], None]
) -> GroupEntry:  # fmt: skip
    reason = ""
    rows, size = progress.rows, progress.bytes
    for attempt in range(TRIES_MAX):
        if attempt:
            log.info("backup_group_again", group=group, reason=reason)
            await asyncio.sleep(_AGAIN_S)
        progress.rows, progress.bytes = rows, size
        check()
        writer = await asyncio.to_thread(GroupWriter, folder, group)
        try:
            if await _copy(writer, group, reader, read, pace, progress, check):
                return await asyncio.to_thread(writer.finish)
            reason = "its leader does not have the view any more"
        except (Unavailable, OutcomeUnknown) as error:
            check()
            reason = error.detail
        except SnapshotRefused as error:
            reason = str(error)
        finally:
            writer.close()
    raise Unavailable(f"group {group_name(group)} could not be read {TRIES_MAX} times, the last time: {reason}", retry_after_s=10)


async def _copy(
    writer: GroupWriter, group: int, reader: bytes, read: Read, pace: _Pace, progress: Progress, check: Callable[[], None]
) -> bool:  # fmt: skip
    """Whether all of the group was copied; False: begin anew."""
    rows, size = progress.rows, progress.bytes
    sequence = 0
    while True:
        check()
        found = await read(group, reader, sequence)
        if found.is_gone:
            return False
        await asyncio.to_thread(writer.add, found.chunks)
        progress.rows, progress.bytes = rows + writer.row_count, size + writer.byte_count
        if found.is_last:
            return True
        sequence += 1
        await pace.wait(found.chunks)


class _Pace:
    """So many bytes a second on the whole. Real time: a clock that stands still must not hold up a backup."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._due_s = asyncio.get_running_loop().time()

    async def wait(self, chunks: Sequence[bytes]) -> None:
        now_s = asyncio.get_running_loop().time()
        self._due_s = max(self._due_s, now_s - 1.0) + sum(map(len, chunks)) / self._bytes_per_s
        if self._due_s > now_s:
            await asyncio.sleep(self._due_s - now_s)


assert _CHUNK_BYTES_MAX < SLICE_BYTES
