"""What this node knows of one other: the connections to and from it, what waits to be sent, the calls under way.

Two classes of traffic share the connection to a peer, each with a bound of its own. Raft messages go first and may be lost: when too
many wait, the oldest appends fall, because their entries are sent again anyway. Requests are refused at the door when too many wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from wheelsched.cluster.frames import BODY_BYTES_MAX, Kind, encode_raft_batch
from wheelsched.cluster.wire import HIGH_WATER_BYTES, Wire
from wheelsched.raft import AnyMessage, Append

# RAFT.md 6: 32 MiB in flight per peer. The number bounds a flood of small ones: a quarter of a second of 1,000 groups.
RAFT_BYTES_MAX: Final = 32 * 1024 * 1024
RAFT_MESSAGES_MAX: Final = 20_000
# A frame of messages is cut near this, so that others get their turn; an append alone may be larger.
RAFT_FRAME_BYTES: Final = 1024 * 1024
REQUESTS_BYTES_MAX: Final = 32 * 1024 * 1024
# As many claims may wait at a leader as one node forwards long polls.
CALLS_MAX: Final = 10_000
# Of a message and of an entry, beside the payload: array heads and a few integers.
_MESSAGE_BYTES, _ENTRY_BYTES = 48, 32


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a node listens for its peers. `elsewhere`: where it may be instead, host and port, if its machine got another address; who
    answers there has to show that it is that node, so a wrong one does no harm."""

    name: str
    host: str
    port: int
    elsewhere: tuple[str, int] | None = None


@dataclass(slots=True)
class Call:
    """A request that waits for its answer. `frame` is there as long as nothing was sent."""

    number: int
    method: str
    deadline_mono_ms: int
    answer: asyncio.Future[bytes]
    frame: bytes = b""


class Peer:
    """One other node. Changed on the loop only."""

    def __init__(self, node: int, address: PeerAddress) -> None:
        self.node = node
        self.address = address
        self.told: tuple[str, int] | None = None  # where it is by its own settings, since it called us
        self._misses = 0
        self.wire: Wire | None = None  # ours to it, greeted
        self.accepted: Wire | None = None  # its to us, greeted
        self.has_cluster = False  # whether `wire` leads to a member, and not to a blank node
        self.connected = asyncio.Event()
        self.calls: dict[int, Call] = {}
        # Counted over all connections.
        self.connects = 0
        self.sent_messages = self.received_messages = self.dropped_messages = 0
        self.ended_sent_bytes = self.ended_received_bytes = 0
        self.last_refusal = ""
        self.refusals: dict[tuple[str, int], str] = {}  # by where it was called, each said once
        self.settings_differ: tuple[str, ...] = ()
        self._raft: deque[tuple[int, AnyMessage]] = deque()
        self._raft_bytes = 0
        self._requests: deque[Call] = deque()
        self._requests_bytes = 0

    # ---- where it is

    def where(self) -> tuple[str, int]:
        """Host and port to call: one after the other of those that it may have, until it is found."""
        address = self.address
        places = dict.fromkeys(place for place in ((address.host, address.port), address.elsewhere, self.told) if place is not None)
        return tuple(places)[self._misses % len(places)]

    def not_there(self) -> None:
        self._misses += 1

    # ---- what waits

    @property
    def queued_messages(self) -> int:
        return len(self._raft)

    @property
    def queued_bytes(self) -> int:
        return self._raft_bytes + self._requests_bytes

    def add_messages(self, messages: Sequence[tuple[int, AnyMessage]]) -> int:
        """Queue Raft messages; how many were dropped to make room."""
        for pair in messages:
            self._raft.append(pair)
            self._raft_bytes += message_bytes(pair[1])
        if self._raft_bytes <= RAFT_BYTES_MAX and len(self._raft) <= RAFT_MESSAGES_MAX:
            return 0
        return self._make_room()

    def _make_room(self) -> int:
        """Drop the oldest appends, and if that is not enough the oldest of all, down to three quarters: one pass for many."""
        before = len(self._raft)
        for only_appends in (True, False):
            kept: deque[tuple[int, AnyMessage]] = deque()
            while self._raft and not self._has_room(len(self._raft) + len(kept)):
                pair = self._raft.popleft()
                if only_appends and not isinstance(pair[1], Append):
                    kept.append(pair)
                else:
                    self._raft_bytes -= message_bytes(pair[1])
            self._raft.extendleft(reversed(kept))
            if self._has_room(len(self._raft)):
                break
        return before - len(self._raft)

    def _has_room(self, count: int) -> bool:
        return 4 * self._raft_bytes <= 3 * RAFT_BYTES_MAX and 4 * count <= 3 * RAFT_MESSAGES_MAX

    def add_request(self, call: Call) -> bool:
        """Queue a request; False where too many wait."""
        if len(self.calls) >= CALLS_MAX or (self._requests and self._requests_bytes + len(call.frame) > REQUESTS_BYTES_MAX):
            return False
        self.calls[call.number] = call
        self._requests.append(call)
        self._requests_bytes += len(call.frame)
        return True

    def drop_messages(self) -> int:
        """Forget the queued Raft messages: what waits for a connection is out of date when there is one."""
        dropped = len(self._raft)
        self._raft.clear()
        self._raft_bytes = 0
        return dropped

    def drop_requests(self) -> None:
        """Forget the queued requests; their callers are told by whoever ends their calls."""
        self._requests.clear()
        self._requests_bytes = 0

    # ---- to the connection

    def fill(self, wire: Wire) -> int:
        """Hand queued frames to the connection, up to what it should hold; how many messages were too large and dropped.

        Messages before requests: elections wait for nobody."""
        dropped = 0
        # Up to above the mark: only a connection that was told to pause is told to go on.
        while (self._raft or self._requests) and wire.waiting_bytes <= HIGH_WATER_BYTES:
            if self._raft:
                dropped += self._put_messages(wire)
                continue
            call = self._requests.popleft()
            self._requests_bytes -= len(call.frame)
            if not call.answer.done():
                frame, call.frame = call.frame, b""
                wire.write(Kind.REQUEST, frame)
        return dropped

    def _put_messages(self, wire: Wire) -> int:
        if self._raft_bytes <= RAFT_FRAME_BYTES:
            batch = list(self._raft)
            self._raft.clear()
            self._raft_bytes = 0
        else:
            batch, taken = [], 0
            while self._raft and (not batch or taken + message_bytes(self._raft[0][1]) <= RAFT_FRAME_BYTES):
                pair = self._raft.popleft()
                taken += message_bytes(pair[1])
                batch.append(pair)
            self._raft_bytes -= taken
        body = encode_raft_batch(batch)
        if len(body) > BODY_BYTES_MAX:
            return len(batch)
        self.sent_messages += len(batch)
        wire.write(Kind.RAFT, body)
        return 0


def message_bytes(message: AnyMessage) -> int:
    """About the size of a message on the wire; the same each time it is asked."""
    if isinstance(message, Append) and message.entries:
        return _MESSAGE_BYTES + sum([len(entry.payload) + _ENTRY_BYTES for entry in message.entries])
    return _MESSAGE_BYTES
