"""What replicas of a group say to each other, and the entries they agree on.

Arrays on the wire (`encode`, `decode`), the first element telling the kind; frozen, so that a message may be kept and sent twice.
Fields are only ever added at the end, with a default: version n talks to n - 1.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from zlib import crc32

import msgspec

from wheelsched.raft.configuration import Configuration

# group, index, term, kind: what a checksum covers before the payload, the same as in the stored row.
_ENTRY_CRC = struct.Struct(">HQQB")


class EntryKind(IntEnum):
    COMMANDS = 0
    CONFIGURATION = 1
    EMPTY = 2  # a new leader's first entry (thesis 6.4); applying it changes nothing


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An entry of the log. `crc` travels from the proposer to every disk and is checked by transport, store and apply."""

    index: int
    term: int
    kind: EntryKind
    payload: bytes
    crc: int


def entry_crc(group: int, index: int, term: int, kind: int, payload: bytes) -> int:
    return crc32(payload, crc32(_ENTRY_CRC.pack(group, index, term, kind)))


def make_entry(group: int, index: int, term: int, kind: EntryKind, payload: bytes = b"") -> Entry:
    return Entry(index, term, kind, payload, entry_crc(group, index, term, kind, payload))


def is_sound(group: int, entry: Entry) -> bool:
    """Whether the entry is the one its proposer made for this group."""
    return entry.crc == entry_crc(group, entry.index, entry.term, entry.kind, entry.payload)


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`term` is the sender's, except in pre-vote requests and granted pre-votes, where it is the term asked for."""

    group: int
    sender: int
    to: int
    term: int


class VoteRequest(Message, tag=1, frozen=True, array_like=True, gc=False):
    """`force`: ordered by the leader itself, so promises to it do not count (thesis 6.4.1). `commit`, `commit_term`: rule 17."""

    last_index: int
    last_term: int
    force: bool = False
    commit: int = 0
    commit_term: int = 0


class PreVoteRequest(Message, tag=2, frozen=True, array_like=True, gc=False):
    """Would you vote for me in `term`? (thesis 9.6)"""

    last_index: int
    last_term: int
    force: bool = False
    commit: int = 0
    commit_term: int = 0


class VoteResponse(Message, tag=3, frozen=True, array_like=True, gc=False):
    reject: bool = False
    commit: int = 0
    commit_term: int = 0


class PreVoteResponse(Message, tag=4, frozen=True, array_like=True, gc=False):
    reject: bool = False
    commit: int = 0
    commit_term: int = 0


class Append(Message, tag=5, frozen=True, array_like=True, gc=False):
    prev_index: int
    prev_term: int
    entries: tuple[Entry, ...] = ()
    commit: int = 0


class AppendResponse(Message, tag=6, frozen=True, array_like=True, gc=False):
    """`index`: last index now known to match, or the refused prev_index; the hint bounds where the logs can still agree."""

    index: int = 0
    reject: bool = False
    hint_index: int = 0
    hint_term: int = 0


class Heartbeat(Message, tag=7, frozen=True, array_like=True, gc=False):
    """`commit` never exceeds what the peer is known to hold; `read_seq`: number of the newest waiting read, 0 for none."""

    commit: int = 0
    read_seq: int = 0


class HeartbeatResponse(Message, tag=8, frozen=True, array_like=True, gc=False):
    read_seq: int = 0


class InstallSnapshot(Message, tag=9, frozen=True, array_like=True, gc=False):
    """The state up to `index`; the driver moves the state itself under (sender, term, `snapshot_id`)."""

    index: int
    snap_term: int
    conf: Configuration
    snapshot_id: int = 0


class TimeoutNow(Message, tag=10, frozen=True, array_like=True, gc=False):
    """Campaign at once: the leader hands its office over (thesis 3.10)."""


AnyMessage = (
    VoteRequest | PreVoteRequest | VoteResponse | PreVoteResponse | Append | AppendResponse | Heartbeat | HeartbeatResponse
    | InstallSnapshot | TimeoutNow
)  # fmt: skip

_MESSAGE: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode_message(message: AnyMessage) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_message(data: bytes) -> AnyMessage:
    """Raises `msgspec.ValidationError` or `msgspec.DecodeError` for anything that is not a message."""
    return _MESSAGE.decode(data)
