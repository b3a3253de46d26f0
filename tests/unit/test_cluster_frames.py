"""The wire format: what goes in comes out, in whatever pieces; what was changed on the way never does."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wheelsched.cluster import frames
from wheelsched.cluster.frames import (
    BODY_BYTES_MAX,
    HEADER_BYTES,
    Chunk,
    ChunkAck,
    FrameError,
    FrameReader,
    Hello,
    Kind,
    Ping,
    Problem,
    Refusal,
    Request,
    Response,
    Status,
    Verdict,
    chunk_crc,
    decode_body,
    decode_problem,
    decode_raft_batch,
    encode,
    encode_body,
    encode_frame,
    encode_raft_batch,
)
from wheelsched.raft import (
    AnyMessage,
    Append,
    AppendResponse,
    EntryKind,
    Heartbeat,
    HeartbeatResponse,
    InstallSnapshot,
    PreVoteRequest,
    PreVoteResponse,
    TimeoutNow,
    VoteRequest,
    VoteResponse,
    make_configuration,
    make_entry,
)

NUMBER = st.integers(0, 2**64 - 1)
GROUP = st.integers(0, 65_535)
ENTRIES = st.lists(st.builds(make_entry, st.just(3), NUMBER, NUMBER, st.sampled_from(EntryKind), st.binary(max_size=40)), max_size=4).map(
    tuple
)
CONFIGURATION = make_configuration(voters=(1, 2, 3))
MESSAGE: st.SearchStrategy[AnyMessage] = st.one_of(
    st.builds(VoteRequest, GROUP, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, st.booleans(), NUMBER, NUMBER),
    st.builds(PreVoteRequest, GROUP, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER),
    st.builds(VoteResponse, GROUP, NUMBER, NUMBER, NUMBER, st.booleans(), NUMBER, NUMBER),
    st.builds(PreVoteResponse, GROUP, NUMBER, NUMBER, NUMBER, st.booleans()),
    st.builds(Append, GROUP, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, ENTRIES, NUMBER),
    st.builds(AppendResponse, GROUP, NUMBER, NUMBER, NUMBER, NUMBER, st.booleans(), NUMBER, NUMBER),
    st.builds(Heartbeat, GROUP, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER),
    st.builds(HeartbeatResponse, GROUP, NUMBER, NUMBER, NUMBER, NUMBER),
    st.builds(InstallSnapshot, GROUP, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, st.just(CONFIGURATION), NUMBER),
    st.builds(TimeoutNow, GROUP, NUMBER, NUMBER, NUMBER),
)
BATCH = st.lists(MESSAGE.map(lambda message: (message.group, message)), max_size=6)
TEXT = st.text(max_size=20)
BODY = st.one_of(
    st.tuples(st.just(Kind.REQUEST), st.builds(Request, NUMBER, TEXT, NUMBER, st.binary(max_size=50))),
    st.tuples(st.just(Kind.RESPONSE), st.builds(Response, NUMBER, st.sampled_from(Status), st.binary(max_size=50))),
    st.tuples(st.just(Kind.CHUNK), st.builds(Chunk, GROUP, NUMBER, NUMBER, NUMBER, st.booleans(), NUMBER, st.binary(max_size=50))),
    st.tuples(st.just(Kind.CHUNK_ACK), st.builds(ChunkAck, GROUP, NUMBER, NUMBER, st.sampled_from(Verdict), TEXT)),
    st.tuples(st.just(Kind.PING), st.builds(Ping, NUMBER, NUMBER)),
    st.tuples(st.just(Kind.REFUSAL), st.builds(Refusal, TEXT, TEXT)),
)


def read_all(reader: FrameReader, data: bytes) -> list[tuple[int, int, bytes]]:
    return [(kind, version, bytes(body)) for kind, version, body in reader.feed(data)]


@given(batch=BATCH)
def test_batch_of_messages_comes_out_as_it_went_in(batch: list[tuple[int, AnyMessage]]) -> None:
    assert decode_raft_batch(encode_raft_batch(batch)) == batch


@given(sent=BODY)
def test_bodies_come_out_as_they_went_in(sent: tuple[Kind, frames.Body]) -> None:
    kind, body = sent
    assert decode_body(kind, encode_body(body), type(body)) == body


@given(sent=st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=300)), max_size=6), cuts=st.lists(st.integers(1, 200)))
def test_frames_are_read_from_whatever_pieces_they_come_in(sent: list[tuple[int, bytes]], cuts: list[int]) -> None:
    stream = b"".join(encode_frame(kind, body, 1) for kind, body in sent)
    reader, found = FrameReader(), []
    for cut in [*cuts, len(stream)]:
        found += read_all(reader, stream[:cut])
        stream = stream[cut:]
    assert found == [(kind, 1, body) for kind, body in sent]


@given(body=st.binary(max_size=120), data=st.data())
def test_a_changed_byte_never_passes_the_checksum(body: bytes, data: st.DataObject) -> None:
    """Any change of up to four neighbouring bytes, at any place: CRC-32 sees every burst of 32 bits, and a changed length moves
    the checksum's end."""
    frame = bytearray(encode_frame(Kind.RAFT, body, 1))
    at = data.draw(st.integers(0, len(frame) - 1))
    burst = data.draw(st.binary(min_size=1, max_size=4).filter(any))
    for offset, bits in enumerate(burst[: len(frame) - at]):
        frame[at + offset] ^= bits
    if bytes(frame) == encode_frame(Kind.RAFT, body, 1):
        return
    reader = FrameReader(4_096)
    try:
        # What follows, so that a length that grew finds bytes to take.
        found = read_all(reader, bytes(frame) + bytes(4_096))
    except FrameError:
        return
    assert not found


@given(junk=st.binary(max_size=400), cut=st.integers(1, 50))
def test_junk_is_refused_or_waits_for_more_and_never_crashes(junk: bytes, cut: int) -> None:
    reader = FrameReader(4_096)
    try:
        for start in range(0, len(junk), cut):
            assert not read_all(reader, junk[start : start + cut])
    except FrameError:
        pass


@given(body=st.binary(max_size=200), kind=st.sampled_from([kind for kind in Kind if kind is not Kind.RAFT]))
def test_a_body_that_is_none_is_refused_and_nothing_else_is_raised(body: bytes, kind: Kind) -> None:
    for read in (lambda: decode_body(kind, body, frames._BODIES[kind]), lambda: decode_raft_batch(body), lambda: decode_problem(body)):
        try:
            read()
        except FrameError as error:
            assert "cannot be read" in str(error)


@given(batch=BATCH.filter(bool), data=st.data())
def test_a_mutated_batch_is_refused_or_another_batch(batch: list[tuple[int, AnyMessage]], data: st.DataObject) -> None:
    body = bytearray(encode_raft_batch(batch))
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] ^= data.draw(st.integers(1, 255))
    try:
        read = decode_raft_batch(bytes(body))
    except FrameError:
        return
    assert all(isinstance(group, int) for group, _ in read)


def test_a_length_above_the_bound_is_refused_before_its_body_comes() -> None:
    frame = encode_frame(Kind.HELLO, bytes(5_000), 1)
    with pytest.raises(FrameError, match="a frame says 5,000 bytes, above 4,096"):
        read_all(FrameReader(4_096), frame[:HEADER_BYTES])
    with pytest.raises(ValueError, match="above 8,388,608"):
        encode_frame(Kind.RAFT, bytes(BODY_BYTES_MAX + 1), 1)


def test_the_largest_frame_is_read_in_pieces_without_being_copied_for_each() -> None:
    """A reader that looked at all it has for every piece of 64 KiB would copy half a gigabyte."""
    frame = encode_frame(Kind.CHUNK, bytes(BODY_BYTES_MAX), 1)
    reader, found = FrameReader(), []
    for start in range(0, len(frame), 65_536):
        found += read_all(reader, frame[start : start + 65_536])
    assert [len(body) for _, _, body in found] == [BODY_BYTES_MAX]


def test_unknown_flags_are_refused() -> None:
    """They change what a body means, so a release that does not know them must not guess."""
    body = b"x"
    head = frames._HEAD.pack(len(body), Kind.PING, 1, 1)
    frame = head + frames._CRC.pack(frames.crc32(body, frames.crc32(head))) + body
    with pytest.raises(FrameError, match="unknown flags 0x01"):
        read_all(FrameReader(), frame)


def test_the_layout_of_a_frame_is_pinned() -> None:
    """Other releases read it: a change of these bytes needs a new protocol version."""
    assert encode(Kind.PING, Ping(1, 2), 1).hex() == "00000003 09 00 0001 c1aea84a 920102".replace(" ", "")


def test_a_batch_is_pinned() -> None:
    batch = [(7, Heartbeat(7, 1, 2, 3, 4, 5)), (8, Append(8, 1, 2, 3, 4, 5, (make_entry(8, 5, 3, EntryKind.EMPTY),), 4))]
    assert encode_raft_batch(batch).hex() == "9292079707070102030405920899050801020304059195050302c400ceee539ec804"


class _NewHello(Hello, frozen=True, array_like=True):
    """What the next release may say: a field more."""

    shoe_size: int = 43


def test_fields_of_the_next_release_are_passed_over_and_those_of_an_earlier_one_have_their_defaults() -> None:
    new = _NewHello("m", 1, 2, "c", b"", "n1", 1, 2, b"i", "2.0", b"n", 32, 1024, b"h", (), True, b"p", 44)
    read = decode_body(Kind.HELLO, msgspec.msgpack.encode(new), Hello)
    assert (read.name, read.proof) == ("n1", b"p")
    old = msgspec.msgpack.encode(["m", 1, 1, "c", b"", "n1", 1, 2, b"i", "0.1", b"n", 32, 1024, b"h", []])
    assert decode_body(Kind.HELLO, old, Hello).proof == b""
    assert decode_problem(msgspec.msgpack.encode(["unavailable", "later"])) == Problem("unavailable", "later")


def test_a_piece_of_a_snapshot_belongs_where_it_was_made_for() -> None:
    right = chunk_crc(1, 2, 3, b"data")
    assert right not in {chunk_crc(0, 2, 3, b"data"), chunk_crc(1, 0, 3, b"data"), chunk_crc(1, 2, 0, b"data"), chunk_crc(1, 2, 3, b"date")}
