"""That all replicas of a group hold the same rows, checked while they run: a checksum of what entries write, compared window by window.

Each replica folds the rows of every entry into its `GroupState`, in one batch with them, so that a crash or a snapshot takes both along.
At every index that `DIGEST_WINDOW` divides it puts the checksum aside, with what else the row `A` holds, and begins anew. The leader
then notes its own in the log; a replica that put another one aside stops. A window that a replica did not see from its beginning
(it ran a release before that kept no checksum) is not compared.

The note is an entry that commands nothing. A release that does not know it passes over it, so it needs no version of the cluster.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final
from zlib import crc32

import msgspec

from wheelsched.core.invariants import InvariantBroken
from wheelsched.model import keys
from wheelsched.model.rows import GroupState

DIGEST_WINDOW: Final = 10_000

# A job's row and that of its end are what the log brought, payload and result under the entry's checksum, around what the row of its
# state says as well: half of the cost at 500 bytes of payload, and more with larger ones.
_KEYS_ALONE: Final = frozenset((keys.JOBS, keys.DONE))
_NAMES: Final = {family: family.encode() for family in keys.STATE_FAMILIES}
_REST = struct.Struct(">QQQQ")


class Note(msgspec.Struct, array_like=True, frozen=True, gc=False, tag="g"):
    """Payload of the leader's note: its checksum of the `window` entries up to `index`."""

    index: int
    window: int
    digest: int


class ReplicasDiffer(InvariantBroken):
    """This node's rows of a group are not those of its leader: `applied_agrees` does not hold. Going on would spread the difference."""


_encode_note = msgspec.msgpack.Encoder().encode
_decode_note = msgspec.msgpack.Decoder(Note).decode


def fold(digest: int, writes: Mapping[str, Mapping[bytes, bytes | None]], ranges: Sequence[tuple[str, bytes, bytes]]) -> int:
    """The checksum with one entry's writes. By family in a fixed order, within it in the order of the entry's commands, which is the
    same wherever they are applied."""
    for family, start, end in ranges:
        digest = crc32(b"%b %b %b" % (family.encode(), start, end), digest)
    for family in keys.STATE_FAMILIES:
        rows = writes[family]
        if rows:
            digest = crc32(b"".join(rows), crc32(_NAMES[family], digest))
            if family not in _KEYS_ALONE:
                try:
                    values = b"".join(rows.values())  # type: ignore[arg-type]  # what is deleted has none
                except TypeError:
                    values = b"".join([b"\0" if value is None else value for value in rows.values()])
                digest = crc32(values, digest)
    return digest


def end_window(state: GroupState, window: int) -> None:
    """Put the checksum aside, at an index that the window divides."""
    index = state.applied_index
    if state.digest_from == index - window:
        state.checked_index = index
        state.checked_digest = crc32(_REST.pack(state.applied_term, state.time_ms, state.watermark_ms, state.fencing), state.digest)
    else:
        state.checked_index = state.checked_digest = 0
    state.digest, state.digest_from = 0, index


def note_of(state: GroupState, window: int) -> bytes:
    """What the leader tells of the last window."""
    return _encode_note(Note(state.checked_index, window, state.checked_digest))


def read_note(payload: bytes) -> Note | None:
    """The note in an entry that commands nothing; None where it has none, or one of a later release."""
    try:
        return _decode_note(payload) if payload else None
    except msgspec.MsgspecError:
        return None


def compare(group: int, state: GroupState, note: Note, window: int) -> None:
    """Raise `ReplicasDiffer` where this replica put another checksum aside."""
    if (state.checked_index, window) == (note.index, note.window) and state.checked_digest != note.digest:
        raise ReplicasDiffer(
            f"applied_agrees: the rows of group {group} differ from its leader's after entries {note.index - window + 1} to {note.index} "
            f"(checksum {state.checked_digest:08x}, the leader's is {note.digest:08x}); this node stops. If it is the only one that does, "
            "give it a new place: `wheelsched cluster replace` its name, then start it with an empty node.data_dir. If others of the group "
            "stop as well, it is the leader that differs: stop it, replace it instead, and start these again"
        )
