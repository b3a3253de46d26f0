"""One connection between two nodes: frames out, all of a loop turn in one write; frames in, each checked before anybody sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final, cast

from wheelsched.cluster.frames import HELLO_BYTES_MAX, FrameError, FrameReader, Kind, encode_frame

# Above this a queue behind the connection is not drawn from: what waits there can still be replaced or dropped.
HIGH_WATER_BYTES: Final = 1024 * 1024
# Answers and acknowledgements are not queued elsewhere; a peer that takes none of them for so long does not read.
WAITING_BYTES_MAX: Final = 64 * 1024 * 1024
_GREETING_FRAMES_MAX: Final = 4

OnFrame = Callable[["Wire", int, memoryview], None]


class ConnectionEnded(Exception):
    """The connection ended; the message says why."""


class Wire(asyncio.Protocol):
    """A connection. Until `talk` is called its frames are awaited one by one with `next_frame`; from then on they go to `on_frame`.

    `on_fault` is called with what a callback raised and nobody handles: the node is broken and must stop. `on_end` is called once, with
    the wire; then `ended_because` says why."""

    def __init__(
        self, *, mono_ms: Callable[[], int], on_fault: Callable[[BaseException], None], on_end: Callable[[Wire], None],
        on_made: Callable[[Wire], None] | None = None,
    ) -> None:  # fmt: skip
        self._mono_ms = mono_ms
        self._on_made = on_made
        self._on_fault = on_fault
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(HELLO_BYTES_MAX)
        self._inbox: deque[tuple[int, bytes]] = deque()
        self._inbox_filled: asyncio.Future[None] | None = None
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._flush_due = False
        self._on_frame: OnFrame | None = None
        self._on_writable: Callable[[Wire], None] | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_closing = False
        self.is_paused = False
        self.is_talking = False
        self.version = 0
        self.ended_because = ""
        self.is_refused = False  # ended by what the peer sent: a frame that cannot be read
        self.made_mono_ms = self.heard_mono_ms = mono_ms()
        self.sent_bytes = self.received_bytes = 0

    # ---- state

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._is_closing

    @property
    def is_made(self) -> bool:
        """Whether there is something that will end."""
        return self._transport is not None

    @property
    def waiting_bytes(self) -> int:
        """Written and not yet taken by the system."""
        return self._out_bytes + (self._transport.get_write_buffer_size() if self._transport is not None else 0)

    def extra(self, name: str) -> Any:
        """What the connection knows of itself, like its certificate or addresses."""
        return self._transport.get_extra_info(name) if self._transport is not None else None

    async def wait_ended(self) -> None:
        """At once for one that was never made."""
        if self._transport is None:
            return
        await asyncio.shield(self._ended)

    # ---- greeting

    async def next_frame(self) -> tuple[int, bytes]:
        """(kind, body). Raises `ConnectionEnded`."""
        assert not self.is_talking
        while not self._inbox:
            if not self.is_open:
                raise ConnectionEnded(self.ended_because or "it was closed")
            self._inbox_filled = asyncio.get_running_loop().create_future()
            await self._inbox_filled
        return self._inbox.popleft()

    def talk(self, version: int, bytes_max: int, on_frame: OnFrame, on_writable: Callable[[Wire], None]) -> None:
        """The greeting is over: frames of `version` go to `on_frame` from here on, those that already came among them.
        `on_writable` is asked for more each time the wire writes."""
        self.version, self._reader.bytes_max = version, bytes_max
        self._on_frame, self._on_writable = on_frame, on_writable
        self.is_talking = True
        try:
            while self._inbox and self.is_open:
                kind, body = self._inbox.popleft()
                self._hand_on(kind, version, memoryview(body))
        except FrameError as error:
            self.is_refused = True
            self.abort(str(error))

    # ---- out

    def write(self, kind: Kind, body: bytes) -> None:
        """Write a frame with what else this turn of the loop writes. Nothing happens on a connection that ended."""
        if not self.is_open:
            return
        self._put(encode_frame(kind, body, self.version))
        if self.waiting_bytes > WAITING_BYTES_MAX:
            self.abort(f"{self.waiting_bytes:,} bytes wait for it to read")

    def wake(self) -> None:
        """Ask `on_writable` for frames at the end of this turn."""
        if not self._flush_due and self._transport is not None:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _put(self, frame: bytes) -> None:
        self._out.append(frame)
        self._out_bytes += len(frame)
        self.wake()

    def _flush(self) -> None:
        """Write what is there, and what `on_writable` adds, until nothing is left or the system takes no more."""
        while self._transport is not None:
            if self.is_talking and self._on_writable is not None and not (self.is_paused or self._is_closing):
                try:
                    self._on_writable(self)
                except Exception as error:
                    self._on_fault(error)
            if not self._out:
                break
            data = b"".join(self._out) if len(self._out) > 1 else self._out[0]
            self._out.clear()
            self._out_bytes = 0
            self.sent_bytes += len(data)
            self._transport.write(data)
        # Only now: what was put meanwhile needs no turn of its own.
        self._flush_due = False

    # ---- the end

    def close(self, because: str) -> None:
        """Let what is written go out, then end."""
        if self.is_open:
            assert self._transport is not None
            self._flush()
            self._is_closing = True
            self.ended_because = self.ended_because or because
            self._transport.close()

    def abort(self, because: str) -> None:
        """End at once."""
        if self._transport is not None:
            self._is_closing = True
            self.ended_because = self.ended_because or because
            self._transport.abort()

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        # With TLS this is when it is agreed; before, there is nobody to greet.
        if self._on_made is not None:
            self._on_made(self)

    def data_received(self, data: bytes) -> None:
        self.received_bytes += len(data)
        self.heard_mono_ms = self._mono_ms()
        try:
            for kind, version, body in self._reader.feed(data):
                if not self.is_open:
                    return
                self._hand_on(kind, version, body)
        except FrameError as error:
            self.is_refused = True
            self.abort(str(error))

    def _hand_on(self, kind: int, version: int, body: memoryview) -> None:
        if not self.is_talking:
            if len(self._inbox) >= _GREETING_FRAMES_MAX:
                raise FrameError("too many frames in the greeting")
            self._inbox.append((kind, bytes(body)))
            self._wake_reader()
            return
        if version != self.version:
            raise FrameError(f"a frame of protocol {version} where {self.version} was agreed")
        assert self._on_frame is not None
        try:
            self._on_frame(self, kind, body)
        except FrameError:
            raise
        except Exception as error:
            self.abort("this node stops")
            self._on_fault(error)

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        self.wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._is_closing = True
        self.ended_because = self.ended_because or (str(error) if error else "the other side closed it")
        self._wake_reader()
        if not self._ended.done():
            self._ended.set_result(None)
        self._on_end(self)

    def _wake_reader(self) -> None:
        if self._inbox_filled is not None and not self._inbox_filled.done():
            self._inbox_filled.set_result(None)
