"""What nodes write to each other: framed msgpack arrays (RAFT.md 11).

    length (4)  kind (1)  flags (1)  version (2)  crc (4)  body

`length` counts the body; `crc` (zlib's CRC-32) covers the eight bytes before it and the body, so that no part of a frame is trusted
unchecked. All big-endian. Bodies are arrays whose fields are only ever added at the end, with a default: what a later release adds is
passed over, what an earlier one lacks has its default. Nothing is ever unpickled, and no length is believed beyond `BODY_BYTES_MAX`.

Pure: bytes in, frames out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Final, TypeVar
from zlib import crc32

import msgspec

from wheelsched.raft import AnyMessage

# A batch of API calls may be 32 MiB; it is split by group before it is forwarded. The largest message is 1 MiB, or one entry.
BODY_BYTES_MAX: Final = 8 * 1024 * 1024
CHUNK_BYTES_MAX: Final = 1024 * 1024
# Before a peer has shown who it is, it is believed less.
HELLO_BYTES_MAX: Final = 256 * 1024

# Frames of the versions in between are understood; each side names its own and the highest common one is spoken.
PROTOCOL_MIN, PROTOCOL_MAX = 1, 1
MAGIC: Final = "wheelsched"

_HEAD = struct.Struct(">IBBH")
_CRC = struct.Struct(">I")
HEADER_BYTES: Final = _HEAD.size + _CRC.size

assert CHUNK_BYTES_MAX < BODY_BYTES_MAX


class Kind(IntEnum):
    """Numbers are never used again for something else."""

    HELLO = 1
    WELCOME = 2
    CONFIRM = 3
    REFUSAL = 4
    RAFT = 5
    REQUEST = 6
    RESPONSE = 7
    CANCEL = 8
    PING = 9
    PONG = 10
    CHUNK = 11
    CHUNK_ACK = 12
    ABANDON = 13


class FrameError(Exception):
    """These bytes are not what a node of this cluster sends; the connection they came by has to end."""


class Body(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all bodies but the batch of Raft messages, which is a plain list of (group, message)."""


class Hello(Body, frozen=True, array_like=True, gc=False):
    """Who speaks, to whom, and what has to agree. The first frame in both directions (`WELCOME` answers `HELLO`).

    `cluster_id`: empty while the node belongs to none yet. `expects`: raft id of the node that is meant to listen. `incarnation`: drawn
    when the data directory was made; another one under the same name means that the data was lost. `settings`: (key, value) of what
    all nodes share, in the order of the tree. `proof`: of the shared secret, in `WELCOME`."""

    magic: str
    protocol_min: int
    protocol_max: int
    cluster_name: str
    cluster_id: bytes
    name: str
    raft_id: int
    expects: int
    incarnation: bytes
    release: str
    nonce: bytes
    group_count: int
    partition_count: int
    settings_hash: bytes
    settings: tuple[tuple[str, str], ...]
    bulk: bool = False
    proof: bytes = b""


class Confirm(Body, frozen=True, array_like=True, gc=False):
    """The caller accepts the answer to its hello and proves the secret in turn."""

    proof: bytes = b""


class Refusal(Body, frozen=True, array_like=True, gc=False):
    """Why the sender will not talk; the connection ends. `raft_id`: with "other-raft-id", the one that the receiver's name stands for."""

    code: str
    reason: str
    raft_id: int = 0


class Request(Body, frozen=True, array_like=True, gc=False):
    """`timeout_ms`: what is left of the caller's patience; an instant would need equal clocks."""

    number: int
    method: str
    timeout_ms: int
    body: bytes


class Status(IntEnum):
    OK = 0
    ERROR = 1  # the handler refused or failed; `body` is an encoded `Problem`
    REFUSED = 2  # nothing was done; `body` is a `Problem`, too


class Response(Body, frozen=True, array_like=True, gc=False):
    number: int
    status: Status
    body: bytes


class Problem(Body, frozen=True, array_like=True, gc=False):
    """A `WheelschedError` on its way to the caller."""

    code: str
    detail: str
    retry_after_s: float | None = None
    errors: tuple[dict[str, str], ...] = ()


class Cancel(Body, frozen=True, array_like=True, gc=False):
    """Nobody waits for the answer to this request any more."""

    number: int


class Ping(Body, frozen=True, array_like=True, gc=False):
    """`sent_at_ms`: wall time of the sender (NTP's t0)."""

    number: int
    sent_at_ms: int


class Pong(Body, frozen=True, array_like=True, gc=False):
    """The ping's own number and time, and the wall time of the answering node at its receipt and at the answer (t1, t2)."""

    number: int
    sent_at_ms: int
    received_at_ms: int
    answered_at_ms: int


class Chunk(Body, frozen=True, array_like=True, gc=False):
    """A piece of a snapshot, opaque here. `sequence` counts from 0; the last one is empty and marked.

    `stream` is drawn for each time that a snapshot is sent: a sender that was restarted may use its snapshot ids again. `crc` is made
    where the piece is made, and checked before it is handed on: it outlives the frame when a piece is sent again."""

    group: int
    snapshot_id: int
    stream: int
    sequence: int
    last: bool
    crc: int
    data: bytes


class Verdict(IntEnum):
    WRITTEN = 0  # this piece and all before it
    INSTALLED = 1  # the whole snapshot
    REFUSED = 2  # start anew, if at all


class ChunkAck(Body, frozen=True, array_like=True, gc=False):
    group: int
    stream: int
    sequence: int
    verdict: Verdict
    reason: str = ""


class Abandon(Body, frozen=True, array_like=True, gc=False):
    """The sender will not finish this snapshot."""

    group: int
    stream: int


_BODIES: Final[dict[Kind, type[Body]]] = {
    Kind.HELLO: Hello,
    Kind.WELCOME: Hello,
    Kind.CONFIRM: Confirm,
    Kind.REFUSAL: Refusal,
    Kind.REQUEST: Request,
    Kind.RESPONSE: Response,
    Kind.CANCEL: Cancel,
    Kind.PING: Ping,
    Kind.PONG: Pong,
    Kind.CHUNK: Chunk,
    Kind.CHUNK_ACK: ChunkAck,
    Kind.ABANDON: Abandon,
}
_DECODERS: Final = {kind: msgspec.msgpack.Decoder(body) for kind, body in _BODIES.items()}
_RAFT: Final = msgspec.msgpack.Decoder(list[tuple[int, AnyMessage]])
_PROBLEM: Final = msgspec.msgpack.Decoder(Problem)
_ENCODER: Final = msgspec.msgpack.Encoder()

B = TypeVar("B", bound=Body)


def chunk_crc(group: int, snapshot_id: int, sequence: int, data: bytes) -> int:
    return crc32(data, crc32(b"%d %d %d" % (group, snapshot_id, sequence)))


def encode_frame(kind: int, body: bytes, version: int) -> bytes:
    """One frame. Raises ValueError for a body above the bound: whoever makes bodies splits or refuses before it comes to this."""
    if len(body) > BODY_BYTES_MAX:
        raise ValueError(f"a frame of {len(body):,} bytes is above {BODY_BYTES_MAX:,}")
    head = _HEAD.pack(len(body), kind, 0, version)
    return b"".join((head, _CRC.pack(crc32(body, crc32(head))), body))


def encode_body(body: Body) -> bytes:
    return _ENCODER.encode(body)


def encode(kind: Kind, body: Body, version: int) -> bytes:
    return encode_frame(kind, _ENCODER.encode(body), version)


def encode_raft_batch(pairs: Sequence[tuple[int, AnyMessage]]) -> bytes:
    """The body of a frame of Raft messages."""
    return _ENCODER.encode(pairs)


def decode_raft_batch(body: bytes | memoryview) -> list[tuple[int, AnyMessage]]:
    """Raises `FrameError`."""
    try:
        return _RAFT.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise FrameError(f"a batch of messages cannot be read: {error}") from error


def decode_body(kind: Kind, body: bytes | memoryview, expected: type[B]) -> B:
    """Raises `FrameError`."""
    try:
        decoded = _DECODERS[kind].decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise FrameError(f"a {kind.name.lower()} cannot be read: {error}") from error
    assert isinstance(decoded, expected), (kind, expected)
    return decoded


def decode_problem(body: bytes) -> Problem:
    """Raises `FrameError`."""
    try:
        return _PROBLEM.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise FrameError(f"a problem cannot be read: {error}") from error


class FrameReader:
    """Cuts a stream of bytes into frames, whatever the pieces it comes in.

    `bytes_max` bounds a body; it starts low and is raised when the peer has shown who it is. After a `FrameError` the stream has lost
    its footing: nothing more can be read from it."""

    __slots__ = ("_buffer", "_needed", "bytes_max")

    def __init__(self, bytes_max: int = BODY_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self._buffer = bytearray()
        # Nothing is looked at before this many bytes are there: a frame of 8 MiB comes in a hundred pieces.
        self._needed = HEADER_BYTES

    def feed(self, data: bytes) -> Iterator[tuple[int, int, memoryview]]:
        """(kind, version, body) of each frame that is complete now. Take all that is yielded before feeding again. O(bytes)."""
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._needed:
                return
            data = bytes(self._buffer)
            self._buffer.clear()
        view, start, end = memoryview(data), 0, len(data)
        while end - start >= HEADER_BYTES:
            length, kind, flags, version = _HEAD.unpack_from(view, start)
            if length > self.bytes_max:
                raise FrameError(f"a frame says {length:,} bytes, above {self.bytes_max:,}")
            body_start = start + HEADER_BYTES
            if end - body_start < length:
                break
            body = view[body_start : body_start + length]
            (crc,) = _CRC.unpack_from(view, start + _HEAD.size)
            if crc != crc32(body, crc32(view[start : start + _HEAD.size])):
                raise FrameError(f"a frame of {length:,} bytes does not match its checksum")
            if flags:
                raise FrameError(f"a frame has unknown flags {flags:#04x}")
            start = body_start + length
            yield kind, version, body
        self._buffer += view[start:]
        self._needed = HEADER_BYTES
        if len(self._buffer) >= HEADER_BYTES:
            self._needed += _HEAD.unpack_from(self._buffer)[0]
