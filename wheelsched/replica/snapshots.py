"""Moving the state of a whole group: read at the leader as it stood at one instant, kept apart at the receiver, then made the state.

A snapshot is the group's key range of every state family, and the row `A` that was current with them: cursors made in one turn see one
state, for one thread writes. It travels as chunks, each sealed by a checksum over all before it, so that none can be missing.

At the receiver a small one waits in memory and becomes the state in one batch. A large one is staged, as rows of `raft_log` under a
group number that no group has. Installing it is one batch that names it (`P` in raft_meta), slices that clear the old rows and copy the
staged ones, and one batch with `A`, `T`, `H`, `C` that removes `P`. A start that finds `P` copies again from the beginning, before the
group runs. So a crash at any instant leaves the old state or the new one, and nothing is acknowledged before the last sync.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Final
from zlib import crc32

import msgspec

from wheelsched.model import keys
from wheelsched.model.rows import GroupState, decode_group, encode_row
from wheelsched.raft import InstallSnapshot, decode_message, encode_message
from wheelsched.store import Rows, Store
from wheelsched.store.raftlog import Puts, Ranges

CHUNK_BYTES: Final = 256 * 1024
CHUNK_ROWS: Final = 400  # `write` holds the GIL, about 1.5 µs a row
# 400 payloads of 60 KB are 24 MB: 150 ms of CPU, in which the loop of the node that installs stood still.
COPY_BYTES: Final = 1024 * 1024
# Up to here a snapshot is kept in memory and installed in one batch of some milliseconds.
SMALL_ROWS_MAX, SMALL_BYTES_MAX = 2_000, 4 * 1024 * 1024

# No group has this number (data groups end at 127, the meta group is 65,535).
_STAGING: Final = b"\xff\xfe"


class SnapshotRefused(Exception):
    """What arrived is not a snapshot that this replica can take; nothing was changed."""


class Header(msgspec.Struct, array_like=True, frozen=True, tag="h", gc=False):
    """The first chunk. `message`: the encoded `InstallSnapshot`; `state`: the row `A`."""

    message: bytes
    state: bytes


class RowsChunk(msgspec.Struct, array_like=True, frozen=True, tag="r", gc=False):
    """Rows of one family, sorted. `crc` covers these and, through the one before, all earlier chunks."""

    family: str
    rows: list[tuple[bytes, bytes]]
    crc: int


class End(msgspec.Struct, array_like=True, frozen=True, tag="e", gc=False):
    row_count: int
    crc: int


_decode_chunk = msgspec.msgpack.Decoder(Header | RowsChunk | End).decode
_encode_chunk = msgspec.msgpack.Encoder().encode


def _seal(crc: int, family: str, rows: Iterable[tuple[bytes, bytes]]) -> int:
    crc = crc32(family.encode(), crc)
    for key, value in rows:
        crc = crc32(value, crc32(key, crc32(b"%d %d " % (len(key), len(value)), crc)))
    return crc


class SnapshotView:
    """A group's rows as they are when this is made, at a constant cost however many they are."""

    def __init__(self, store: Store, message: InstallSnapshot, state: GroupState) -> None:
        self._header = Header(encode_message(message), encode_row(state))
        self._prefix = keys.group_prefix(message.group)
        # All made in one go: nothing is written in between.
        self._cursors = [(family, store.cursor(family)) for family in keys.STATE_FAMILIES]

    async def chunks(self) -> AsyncIterator[bytes]:
        """The whole, piece by piece; whoever asks for the next one sets the pace. A view is read once: it keeps old rows alive."""
        yield _encode_chunk(self._header)
        crc = count = 0
        while self._cursors:
            family, cursor = self._cursors[0]
            row = cursor.seek(self._prefix)
            while row is not None and row[0].startswith(self._prefix):
                rows: Rows = []
                size = 0
                while row is not None and row[0].startswith(self._prefix) and len(rows) < CHUNK_ROWS and size < CHUNK_BYTES:
                    rows.append(row)
                    size += len(row[0]) + len(row[1])
                    row = cursor.next()
                crc = _seal(crc, family, rows)
                count += len(rows)
                yield _encode_chunk(RowsChunk(family, rows, crc))
            del self._cursors[0]
        yield _encode_chunk(End(count, crc))


class ChunkReader:
    """Checks the chunks of one snapshot against each other, for whoever keeps the rows elsewhere than in a replica."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._prefix = keys.group_prefix(group)
        self._header: Header | None = None
        self._crc = 0
        self.row_count = 0
        self.is_complete = False

    @property
    def state(self) -> GroupState:
        """The row `A` that was current with the rows."""
        assert self._header is not None, "no chunk has arrived"
        return decode_group(self._header.state)

    def take(self, data: bytes) -> RowsChunk | None:
        """The next chunk; its rows, where it has some. Raises `SnapshotRefused`."""
        try:
            chunk = _decode_chunk(data)
            if isinstance(chunk, Header):
                message = decode_message(chunk.message)
                decode_group(chunk.state)
        except msgspec.MsgspecError as error:
            raise SnapshotRefused(f"a chunk cannot be read: {error}") from error
        if self.is_complete:
            raise SnapshotRefused("a chunk came behind the last one")
        match chunk:
            case Header():
                if self._header is not None:
                    raise SnapshotRefused("a second header came")
                if not isinstance(message, InstallSnapshot) or message.group != self._group:
                    raise SnapshotRefused(f"it is not of group {self._group}")
                self._header = chunk
            case RowsChunk() if self._header is not None:
                self._check_rows(chunk)
                return chunk
            case End() if self._header is not None:
                if (chunk.row_count, chunk.crc) != (self.row_count, self._crc):
                    raise SnapshotRefused(f"it ends after {self.row_count} rows, and {chunk.row_count} were read")
                self.is_complete = True
            case _:
                raise SnapshotRefused("its first chunk is missing")
        return None

    def _check_rows(self, chunk: RowsChunk) -> None:
        crc = _seal(self._crc, chunk.family, chunk.rows)
        if crc != chunk.crc:
            raise SnapshotRefused(f"rows of {chunk.family} do not match their checksum, or a chunk is missing")
        if chunk.family not in keys.STATE_FAMILIES:
            raise SnapshotRefused(f"this release does not know the family {chunk.family}; use the release that wrote it")
        if not all(key.startswith(self._prefix) for key, _ in chunk.rows):
            raise SnapshotRefused(f"rows of {chunk.family} belong to another group")
        self._crc = crc
        self.row_count += len(chunk.rows)


class IncomingSnapshot:
    """Chunks of one snapshot as they arrive, kept outside the state. `discard` unless it was installed."""

    def __init__(self, store: Store, node_id: int, group: int, *, small_rows_max: int = SMALL_ROWS_MAX) -> None:
        self._store = store
        self._node_id = node_id
        self.group = group
        self._small_rows_max = small_rows_max
        self._header: Header | None = None
        self._message: InstallSnapshot | None = None
        self._crc = self._count = self._bytes = 0
        self._rows: dict[str, dict[bytes, bytes | None]] = {}  # not staged yet
        self.is_staged = False
        self.is_complete = False

    @property
    def message(self) -> InstallSnapshot:
        assert self._message is not None, "no chunk has arrived"
        return self._message

    @property
    def state(self) -> GroupState:
        assert self._header is not None, "no chunk has arrived"
        return decode_group(self._header.state)

    def take(self, data: bytes) -> None:
        """The next chunk. Raises `SnapshotRefused`; what came before is to be discarded then."""
        try:
            chunk = _decode_chunk(data)
        except msgspec.MsgspecError as error:
            raise SnapshotRefused(f"a chunk cannot be read: {error}") from error
        if self.is_complete:
            raise SnapshotRefused("a chunk came behind the last one")
        match chunk:
            case Header():
                self._begin(chunk)
            case RowsChunk() if self._header is not None:
                self._add(chunk)
            case End() if self._header is not None:
                if (chunk.row_count, chunk.crc) != (self._count, self._crc):
                    raise SnapshotRefused(f"it ends after {self._count} rows, and {chunk.row_count} were sent")
                self.is_complete = True
            case _:
                raise SnapshotRefused("its first chunk is missing")

    def _begin(self, header: Header) -> None:
        if self._header is not None:
            raise SnapshotRefused("a second header came")
        try:
            message, state = decode_message(header.message), decode_group(header.state)
        except msgspec.MsgspecError as error:
            raise SnapshotRefused(f"its header cannot be read: {error}") from error
        if not isinstance(message, InstallSnapshot) or (message.group, message.to) != (self.group, self._node_id):
            raise SnapshotRefused(f"it is not meant for group {self.group} of node {self._node_id}")
        if (state.applied_index, state.applied_term) != (message.index, message.snap_term):
            raise SnapshotRefused(f"its state ends at index {state.applied_index}, its header says {message.index}")
        self._header, self._message = header, message

    def _add(self, chunk: RowsChunk) -> None:
        crc = _seal(self._crc, chunk.family, chunk.rows)
        if crc != chunk.crc:
            raise SnapshotRefused(f"rows of {chunk.family} do not match their checksum, or a chunk is missing")
        if chunk.family not in keys.STATE_FAMILIES:
            raise SnapshotRefused(f"this release does not know the family {chunk.family}; upgrade this node")
        prefix = keys.group_prefix(self.group)
        if not all(key.startswith(prefix) for key, _ in chunk.rows):
            raise SnapshotRefused(f"rows of {chunk.family} belong to another group")
        self._crc = crc
        self._count += len(chunk.rows)
        self._bytes += sum(len(key) + len(value) for key, value in chunk.rows)
        self._rows.setdefault(chunk.family, {}).update(chunk.rows)
        if self.is_staged or self._count > self._small_rows_max or self._bytes > SMALL_BYTES_MAX:
            self._stage()

    def _stage(self) -> None:
        puts: dict[bytes, bytes | None] = {}
        for family, rows in self._rows.items():
            prefix = _staging_prefix(self.group, family)
            puts.update((prefix + key, value) for key, value in rows.items())
        ranges = [] if self.is_staged else [staged_range(self.group)]
        self._store.write({keys.RAFT_LOG: puts}, ranges)
        self._rows = {}
        self.is_staged = True

    def rows(self) -> dict[str, dict[bytes, bytes | None]]:
        """All rows of one that is small."""
        assert self.is_complete and not self.is_staged
        return self._rows

    def description(self) -> bytes:
        """For the row `P`: what a start needs to install it again."""
        assert self._header is not None
        return _encode_chunk(self._header)

    def discard(self) -> None:
        """It is not wanted any more."""
        self._rows = {}
        if self.is_staged:
            self._store.write({}, [staged_range(self.group)])
            self.is_staged = False


def described(row: bytes) -> tuple[InstallSnapshot, GroupState]:
    """What a row `P` says."""
    header = _decode_chunk(row)
    assert isinstance(header, Header)
    message = decode_message(header.message)
    assert isinstance(message, InstallSnapshot)
    return message, decode_group(header.state)


class Copying:
    """Clears a group's rows and copies the staged ones in their place, a slice at a time; `P` is written before it begins."""

    def __init__(self, store: Store, group: int) -> None:
        self._store = store
        self._group = group
        self._families = list(keys.STATE_FAMILIES)
        self._position = b""
        self._cleared = False

    def step(self, rows_max: int = CHUNK_ROWS) -> bool:
        """Write one slice; whether all is in place."""
        if not self._cleared:
            self._store.write({}, state_ranges(self._group))
            self._cleared = True
            return False
        family = self._families[0]
        prefix = _staging_prefix(self._group, family)
        cursor = self._store.cursor(keys.RAFT_LOG)
        row = cursor.seek(max(prefix, self._position))
        rows: dict[bytes, bytes | None] = {}
        size, skip = 0, len(prefix)
        while row is not None and row[0].startswith(prefix) and len(rows) < rows_max and size < COPY_BYTES:
            self._position = row[0] + b"\0"
            rows[row[0][skip:]] = row[1]
            size += len(row[1])
            row = cursor.next()
        if rows:
            self._store.write({family: rows})
        if row is None or not row[0].startswith(prefix):
            del self._families[0]
            self._position = b""
        return not self._families


def state_ranges(group: int) -> Ranges:
    """All rows of the group's state."""
    prefix = keys.group_prefix(group)
    return [(family, prefix, keys.prefix_end(prefix)) for family in keys.STATE_FAMILIES]


def staged_range(group: int) -> tuple[str, bytes, bytes]:
    """All rows staged for the group."""
    prefix = _STAGING + keys.group_prefix(group)
    return keys.RAFT_LOG, prefix, keys.prefix_end(prefix)


def merge(puts: Puts, rows: dict[str, dict[bytes, bytes | None]]) -> None:
    for family, more in rows.items():
        puts.setdefault(family, {}).update(more)


def _staging_prefix(group: int, family: str) -> bytes:
    # By name: the order of families may be another one in the release that goes on with it.
    return b"%b%b%b\0" % (_STAGING, keys.group_prefix(group), family.encode())
