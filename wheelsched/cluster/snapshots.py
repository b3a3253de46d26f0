"""Snapshots in pieces, each numbered and checked: a window of four under way, throttled, resumed where a broken connection left off.

The sender keeps what is not acknowledged, at most the window, and after a reconnect sends it again; the receiver passes over what it
has. So neither side needs to remember more than a number, and a receiver that lost its memory says so and gets the snapshot anew.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final

import structlog

from wheelsched.cluster.frames import (
    CHUNK_BYTES_MAX,
    Abandon,
    Chunk,
    ChunkAck,
    FrameError,
    Kind,
    Verdict,
    chunk_crc,
    decode_body,
    encode_body,
)
from wheelsched.cluster.wire import Wire
from wheelsched.core.clock import Clock

log = structlog.get_logger(__name__)

# Per transfer. At 1 MiB and a millisecond of round trip this is 4 GiB/s: the throttle decides, not the window.
WINDOW: Final = 4
# A sender keeps its RocksDB snapshot this long after the last acknowledgement (RAFT.md 7).
SENDER_PATIENCE_MS: Final = 600_000
# A receiver whose sender is gone keeps what it has this long: a reconnect takes seconds, and it may block another transfer.
RECEIVER_PATIENCE_MS: Final = 60_000

OnChunk = Callable[[int, int, int, int, bytes, bool], Awaitable[bool]]
Dial = Callable[[int], Awaitable[Wire | None]]


class Throttle:
    """Bytes a second for all that take from it, in the order they come. One piece may go ahead of its time."""

    def __init__(self, bytes_per_s: int, clock: Clock) -> None:
        assert bytes_per_s > 0
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_us = 0

    async def take(self, count: int) -> None:
        """Return when `count` bytes may be sent."""
        start_us = max(self._clock.mono_ms() * 1_000, self._free_us)
        self._free_us = start_us + count * 1_000_000 // self._bytes_per_s
        await self._clock.sleep_until(start_us // 1_000)


class OutgoingSnapshot:
    """One snapshot on its way to one node. `result`: whether the other side installed it; cancelling it gives up.

    `dial(attempt)` waits as the attempt demands, counted from 0, and connects: None where that failed."""

    def __init__(
        self, node: int, group: int, snapshot_id: int, chunks: AsyncIterator[bytes],
        *, stream: int, dial: Dial, throttle: Throttle, slots: asyncio.Semaphore, mono_ms: Callable[[], int], result: asyncio.Future[bool],
    ) -> None:  # fmt: skip
        self.node, self.group, self.snapshot_id = node, group, snapshot_id
        self.stream = stream
        self.result = result
        self._chunks = chunks
        self._dial = dial
        self._throttle = throttle
        self._slots = slots
        self._mono_ms = mono_ms
        self._unacked: deque[Chunk] = deque()
        self._sequence = 0
        self._attempt = 0  # since something was acknowledged
        self._is_read = False  # the last piece was taken from `chunks`
        self._verdict: bool | None = None
        self._progress_mono_ms = mono_ms()
        self._wake = asyncio.Event()
        self._wire: Wire | None = None
        result.add_done_callback(lambda _: self._wake.set())

    async def run(self) -> None:
        """Send until there is a verdict, then resolve `result`; what the iterator raises goes there, too."""
        try:
            async with self._slots:
                self._progress_mono_ms = self._mono_ms()
                while self._verdict is None and not self.result.done():
                    wire = await self._dial(self._attempt)
                    self._attempt += 1
                    if wire is not None:
                        await self._send_on(wire)
            self._resolve(bool(self._verdict))
        except Exception as error:
            self._abandon()
            if not self.result.done():
                self.result.set_exception(error)
        finally:
            self._abandon()
            self._resolve(False)
            if close := getattr(self._chunks, "aclose", None):
                await close()

    def on_ack(self, ack: ChunkAck) -> None:
        if ack.stream != self.stream:
            return
        self._progress_mono_ms = self._mono_ms()
        self._attempt = 0
        match ack.verdict:
            case Verdict.WRITTEN:
                while self._unacked and self._unacked[0].sequence <= ack.sequence:
                    self._unacked.popleft()
            case Verdict.INSTALLED:
                self._unacked.clear()
                self._verdict = True
            case Verdict.REFUSED:
                log.warning(
                    "snapshot_refused", node=self.node, group=self.group, snapshot_id=self.snapshot_id, sequence=ack.sequence,
                    reason=ack.reason,
                )  # fmt: skip
                self._verdict = False
        self._wake.set()

    def on_end(self) -> None:
        """The connection ended."""
        self._wake.set()

    def sweep(self, now_mono_ms: int) -> None:
        """Give up where nothing was acknowledged for too long."""
        if now_mono_ms - self._progress_mono_ms > SENDER_PATIENCE_MS and self._verdict is None and self._sequence:
            log.warning("snapshot_given_up", node=self.node, group=self.group, snapshot_id=self.snapshot_id)
            self._verdict = False
            self._wake.set()

    async def _send_on(self, wire: Wire) -> None:
        """Send on one connection until it ends or there is a verdict."""
        self._wire = wire
        sent = -1  # highest sequence sent on this connection
        while wire.is_open and self._verdict is None and not self.result.done():
            self._wake.clear()
            chunk = next((chunk for chunk in self._unacked if chunk.sequence > sent), None)
            if chunk is None and len(self._unacked) < WINDOW and not self._is_read:
                chunk = await self._read()
            if chunk is None:
                await self._wake.wait()
                continue
            await self._throttle.take(len(chunk.data))
            sent = chunk.sequence
            wire.write(Kind.CHUNK, encode_body(chunk))

    async def _read(self) -> Chunk:
        data = await anext(self._chunks, None)
        if data is not None and not 0 < len(data) <= CHUNK_BYTES_MAX:
            raise ValueError(f"a piece of a snapshot has {len(data):,} bytes; allowed: 1 to {CHUNK_BYTES_MAX:,}")
        self._is_read = data is None
        data = data or b""
        crc = chunk_crc(self.group, self.snapshot_id, self._sequence, data)
        chunk = Chunk(self.group, self.snapshot_id, self.stream, self._sequence, self._is_read, crc, data)
        self._sequence += 1
        self._unacked.append(chunk)
        return chunk

    def _abandon(self) -> None:
        """Tell the other side, unless it knows, and end the connection."""
        wire, self._wire = self._wire, None
        if wire is not None and wire.is_open:
            if self._verdict is None:
                wire.write(Kind.ABANDON, encode_body(Abandon(self.group, self.stream)))
            wire.close("the snapshot is done")

    def _resolve(self, installed: bool) -> None:
        if not self.result.done():
            self.result.set_result(installed)


class _Incoming:
    """A snapshot that comes in from one sender for one group."""

    __slots__ = ("expected", "group", "handled", "heard_mono_ms", "pieces", "sender", "snapshot_id", "stream", "task", "verdict", "wire")

    def __init__(self, sender: int, first: Chunk, wire: Wire) -> None:
        self.sender, self.group, self.snapshot_id, self.stream = sender, first.group, first.snapshot_id, first.stream
        self.wire = wire
        self.expected = 0  # sequence of the next piece
        self.handled = -1  # highest sequence that is written
        self.verdict = Verdict.WRITTEN
        self.heard_mono_ms = 0
        self.pieces: asyncio.Queue[Chunk] = asyncio.Queue(WINDOW)
        self.task: asyncio.Task[None] | None = None


class IncomingSnapshots:
    """All snapshots that come in; as many are written at once as there are slots, the others wait with their first pieces.

    `on_chunk(sender, group, snapshot_id, sequence, data, last)` writes a piece and returns whether it may go on; for the last one,
    which is empty, whether the whole is installed. It is never called twice for a piece. `on_lost(sender, group, snapshot_id)` says that
    no more will come."""

    def __init__(
        self, on_chunk: OnChunk, on_lost: Callable[[int, int, int], None],
        *, slots: int, mono_ms: Callable[[], int], start: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]],
    ) -> None:  # fmt: skip
        self._on_chunk = on_chunk
        self._on_lost = on_lost
        self._slots = asyncio.Semaphore(slots)
        self._mono_ms = mono_ms
        self._start = start
        self._transfers: dict[tuple[int, int], _Incoming] = {}

    @property
    def active_count(self) -> int:
        return sum(transfer.verdict is Verdict.WRITTEN for transfer in self._transfers.values())

    def on_frame(self, wire: Wire, sender: int, kind: int, body: memoryview) -> None:
        """Raises `FrameError`."""
        if kind == Kind.CHUNK:
            self._take(wire, sender, decode_body(Kind.CHUNK, body, Chunk))
        else:
            abandon = decode_body(Kind.ABANDON, body, Abandon)
            transfer = self._transfers.get((sender, abandon.group))
            if transfer is not None and transfer.stream == abandon.stream:
                self._forget(transfer, "the sender gave up")

    def sweep(self, now_mono_ms: int) -> None:
        """Forget what nobody will finish."""
        for transfer in list(self._transfers.values()):
            if transfer.wire.is_open:
                transfer.heard_mono_ms = now_mono_ms
            elif now_mono_ms - transfer.heard_mono_ms > RECEIVER_PATIENCE_MS:
                self._forget(transfer, "the sender does not come back")

    def _take(self, wire: Wire, sender: int, chunk: Chunk) -> None:
        key = (sender, chunk.group)
        transfer = self._transfers.get(key)
        if transfer is None or transfer.stream != chunk.stream:
            if chunk.sequence:
                # Of a life of this process before, or of a snapshot that was given up: the beginning is gone.
                self._answer(wire, chunk, Verdict.REFUSED, "the pieces before are not here; start anew")
                return
            if transfer is not None:
                self._forget(transfer, f"snapshot {chunk.snapshot_id} takes its place")
            transfer = self._transfers[key] = _Incoming(sender, chunk, wire)
            transfer.task = self._start(self._install(transfer), f"snapshot {chunk.snapshot_id} of group {chunk.group}")
        transfer.wire, transfer.heard_mono_ms = wire, self._mono_ms()
        if chunk.sequence < transfer.expected or transfer.verdict is not Verdict.WRITTEN:
            # Sent again after a reconnect; perhaps its acknowledgement was lost.
            if transfer.handled >= 0:
                self._acknowledge(transfer)
            return
        if chunk.sequence > transfer.expected:
            raise FrameError(f"piece {chunk.sequence} of a snapshot where {transfer.expected} was due")
        if chunk.crc != chunk_crc(chunk.group, chunk.snapshot_id, chunk.sequence, chunk.data):
            self._answer(wire, chunk, Verdict.REFUSED, f"piece {chunk.sequence} does not match its checksum; start anew")
            self._forget(transfer, "a piece does not match its checksum")
            return
        try:
            transfer.pieces.put_nowait(chunk)
        except asyncio.QueueFull:
            raise FrameError(f"more than {WINDOW} pieces of a snapshot without acknowledgement") from None
        transfer.expected += 1

    async def _install(self, transfer: _Incoming) -> None:
        async with self._slots:
            while transfer.verdict is Verdict.WRITTEN:
                chunk = await transfer.pieces.get()
                good = await self._on_chunk(transfer.sender, transfer.group, transfer.snapshot_id, chunk.sequence, chunk.data, chunk.last)
                transfer.handled = chunk.sequence
                if not good:
                    transfer.verdict = Verdict.REFUSED
                elif chunk.last:
                    transfer.verdict = Verdict.INSTALLED
                self._acknowledge(transfer)
        # What is remembered now is the verdict, for a sender that comes back to ask.
        transfer.task = None

    def _acknowledge(self, transfer: _Incoming) -> None:
        reason = "this node cannot take it" if transfer.verdict is Verdict.REFUSED else ""
        ack = ChunkAck(transfer.group, transfer.stream, transfer.handled, transfer.verdict, reason)
        transfer.wire.write(Kind.CHUNK_ACK, encode_body(ack))

    @staticmethod
    def _answer(wire: Wire, chunk: Chunk, verdict: Verdict, reason: str) -> None:
        wire.write(Kind.CHUNK_ACK, encode_body(ChunkAck(chunk.group, chunk.stream, chunk.sequence, verdict, reason)))

    def _forget(self, transfer: _Incoming, why: str) -> None:
        self._transfers.pop((transfer.sender, transfer.group), None)
        if transfer.task is not None and not transfer.task.done():
            transfer.task.cancel()
            log.info("snapshot_lost", node=transfer.sender, group=transfer.group, snapshot_id=transfer.snapshot_id, reason=why)
            self._on_lost(transfer.sender, transfer.group, transfer.snapshot_id)
