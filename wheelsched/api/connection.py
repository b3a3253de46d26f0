"""One client connection: HTTP/1.1 by aiohttp's parser, requests answered in order, every wait bounded.

All that is known of aiohttp's internals stands here: `BaseProtocol` (flow control that its parser and `StreamReader` call),
`HttpRequestParser` (llhttp) and its protocol of `message_consumed` and `max_msg_queue_size`. What its `RequestHandler` would add (a
task, a request, a writer, a response and a multidict per call) is what costs most of its 100 us a request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from email.utils import formatdate
from http import HTTPStatus
from itertools import chain
from typing import TYPE_CHECKING, Final

import structlog
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.http_parser import HttpRequestParser, RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader

from wheelsched.api.hangup import JUDGE_AFTER_S, HandedOut, was_reset
from wheelsched.api.request import Response
from wheelsched.core import limits
from wheelsched.core.errors import InvalidRequest, PayloadTooLarge, Unavailable, WheelschedError

if TYPE_CHECKING:
    from wheelsched.api.routes import Route
    from wheelsched.api.server import Server

log = structlog.get_logger(__name__)

# A request has to arrive within this, its headers from their first byte on, its body from the end of the headers: a client that
# sends a byte a second holds a connection no longer. 32 MiB in it are 9 Mbit/s.
ARRIVE_S: Final = 30.0
# A connection without a request is closed after this. Longer than a load balancer's usual 60 s, so that it does not send into it.
IDLE_S: Final = 75.0
# How long a client may take to read an answer that did not fit into the socket's buffer.
READ_S: Final = 30.0
# After an answer that ends the connection: how long to wait for the client to close, so that the answer is not lost in a reset.
LINGER_S: Final = 2.0
# A connection beyond the bound is kept until its first request is answered 503.
REFUSED_S: Final = 2.0

_READ_BUFFER_BYTES: Final = 256 * 1024
_PIPELINED_MAX: Final = 32
_HEADERS_MAX: Final = 200
# Room for the request line and for one header that is all of the 16 KiB, and a little: what is over is counted exactly below.
_LINE_BYTES_MAX: Final = limits.HEADER_BYTES_MAX + 64

_STATUS_LINES: Final = {
    int(status): f"HTTP/1.1 {int(status)} {status.phrase}\r\n".encode() for status in HTTPStatus
}  # fmt: skip
# Answers are data: never sniffed, never cached.
_COMMON: Final = b"\r\nX-Content-Type-Options: nosniff\r\nCache-Control: no-store\r\nX-Request-Id: "
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class BodyError(Exception):
    """What the parser gives to a reader of a body that is malformed."""


class Connection(BaseProtocol):
    """`deadline_s` (the loop's time; 0: none) is when `expire` is due; the server's sweep looks at it."""

    __slots__ = (
        "_api", "_closing", "_discarding", "_ended", "_error_queued", "_gone", "_handed", "_is_poll", "_message", "_messages",
        "_payload", "_server", "_waiter", "deadline_s", "is_refused", "task",
    )  # fmt: skip

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        parser = HttpRequestParser(
            self, loop, _READ_BUFFER_BYTES,
            max_line_size=_LINE_BYTES_MAX, max_field_size=_LINE_BYTES_MAX, max_headers=_HEADERS_MAX,
            payload_exception=BodyError, auto_decompress=False, max_msg_queue_size=_PIPELINED_MAX,
        )  # fmt: skip
        super().__init__(loop, parser)
        self._server = server
        self._api = server.api
        self._messages: deque[tuple[RawRequestMessage, StreamReader] | WheelschedError] = deque()
        self._message: RawRequestMessage | None = None
        self._payload: StreamReader = EMPTY_PAYLOAD
        self._waiter: asyncio.Future[None] | None = None
        self._gone: asyncio.Future[None] | None = None
        self._handed = HandedOut(server)
        self._closing = False  # no request after the one being answered
        self._ended = False  # the client sends no more
        self._error_queued = False
        self._discarding = False
        self._is_poll = False
        self.is_refused = False
        self.deadline_s = 0.0
        self.task: asyncio.Task[None] | None = None

    # --- called by the transport ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.deadline_s = self._loop.time() + ARRIVE_S
        if self._server.on_made(self):
            self.task = self._loop.create_task(self._run(), name="http connection")

    def data_received(self, data: bytes) -> None:
        if self._discarding or self._error_queued or self._parser is None:
            return
        if data:
            self._handed.arrived()
        try:
            messages, upgraded, _ = self._parser.feed_data(data)
        except HttpProcessingError as error:
            self._on_unreadable(error)
            return
        if messages:
            self._messages.extend(messages)
            if upgraded:
                # To nothing we speak: answered as the plain request that it also is (RFC 9110, 7.8), then closed.
                self._closing = True
            self._wake()
            if not self._buffer_paused and len(self._messages) >= _PIPELINED_MAX:
                self._pause_reading_for_buffer()
        elif self._waiter is not None and data:
            # The first bytes of a request: from now on it has to arrive.
            self.deadline_s = min(self.deadline_s, self._loop.time() + ARRIVE_S)

    def eof_received(self) -> bool | None:
        """True keeps the writing half open."""
        self._ended = True
        self._fail_bodies("the connection ended before the body did")
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)
        if self._handed:
            # Read, or too late to be read? See hangup.py, 4.
            self._loop.call_later(JUDGE_AFTER_S, self._judge)
            return True
        if self._waiter is not None or self._is_poll:
            return None
        # Half closed: what was asked is answered.
        return not self._discarding

    def connection_lost(self, exc: BaseException | None) -> None:
        was_paused = self._paused
        super().connection_lost(exc)
        if exc is not None:
            self._handed.on_reset(self._loop.time())
        elif was_paused:
            self._handed.lost()
        else:
            self._handed.arrived()
        self._parser = None
        self.deadline_s = 0.0
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)
        self._fail_bodies("the connection was lost")
        if self.task is not None:
            self.task.cancel()
        self._server.on_lost(self)

    def resume_reading(self, resume_parser: bool = True) -> None:
        # The stream calls this after every read; only a pause leaves anything to do, and the parser need not be asked.
        if self._reading_paused:
            super().resume_reading(resume_parser)

    # --- called by the server ---------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return self._waiter is not None

    def expire(self) -> None:
        """The deadline passed: end it."""
        self.deadline_s = 0.0
        self.close_now()

    def close_now(self) -> None:
        """End the connection, whatever goes on; what was not sent is lost."""
        if self.transport is not None:
            if self._paused:
                self.transport.abort()
            else:
                self.transport.close()

    # --- the loop over requests -------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while await self._next():
                pass
        except Exception:
            log.exception("connection_failed")
        finally:
            if self.transport is not None and not self._handed:
                self.transport.close()

    async def _next(self) -> bool:
        """Answer one request; whether there may be another."""
        if not self._messages and not await self._wait():
            return False
        item = self._messages.popleft()
        if isinstance(item, WheelschedError):
            response, request_id = self._api.unreadable(item)
            await self._write(response, request_id, is_last=True)
            await self._linger(is_read=False)
            return False
        self._message, self._payload = message, payload = item
        if self._parser is not None:
            self._parser.message_consumed()
        if self._buffer_paused and len(self._messages) <= _PIPELINED_MAX // 2:
            # Parse what the parser kept back before it reads on.
            self.data_received(b"")
            if len(self._messages) < _PIPELINED_MAX:
                self._resume_reading_for_buffer()
        self.deadline_s = 0.0
        # A refused connection is answered and ended, as is one whose client asks for it.
        if message.should_close or self.is_refused:
            self._closing = True
        response, request_id = await self._answer(message)
        self._is_poll = False
        is_last = self._closing or self._server.draining or not payload.is_eof()
        await self._write(response, request_id, is_last=is_last)
        self._message, self._payload = None, EMPTY_PAYLOAD
        if is_last:
            # Asked of the request's own body: one still on its way has to be taken in, or its reset overtakes the answer.
            await self._linger(is_read=payload.is_eof() and not self._error_queued)
            return False
        self.deadline_s = self._loop.time() + IDLE_S
        return True

    async def _wait(self) -> bool:
        """Until a request is there; False where none will come."""
        if self._ended or self._error_queued or self._server.draining:
            return False
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        return bool(self._messages)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _answer(self, message: RawRequestMessage) -> tuple[Response, str]:
        # Each line as received: a name, a colon and a space, a value, CRLF.
        size = sum(map(len, chain.from_iterable(message.raw_headers))) + 4 * len(message.raw_headers)
        if size > limits.HEADER_BYTES_MAX:
            self._closing = True
            return self._api.unreadable(PayloadTooLarge(f"the headers have {size} bytes, above {limits.HEADER_BYTES_MAX}"))
        if self.is_refused:
            most = self._server.connections_max
            return self._api.unreadable(
                Unavailable(
                    f"{most} connections are open already (http.connections_max); share connections, or come back later", retry_after_s=1
                )
            )
        return await self._api.handle(message.method, message.path, message.headers, self)

    def _on_unreadable(self, error: HttpProcessingError) -> None:
        """Lines that are no request, or a body that is none: 400 and close, after what came before."""
        self._fail_bodies(error.message)
        self._error_queued = True
        if isinstance(error, LineTooLong):
            self._messages.append(PayloadTooLarge(f"a line of the headers is above {limits.HEADER_BYTES_MAX} bytes"))
        else:
            what = error.message.strip().splitlines()[0].rstrip(":") if error.message.strip() else "malformed"
            self._messages.append(InvalidRequest(f"this is no HTTP request: {what}"))
        self._wake()

    def _fail_bodies(self, why: str) -> None:
        """No more will arrive of the body that was on its way, if one was."""
        for payload in (self._payload, *(item[1] for item in self._messages if not isinstance(item, WheelschedError))):
            if not payload.is_eof():
                payload.set_exception(BodyError(why))

    # --- the body of a request (app.Body) ---------------------------------------------------------------------------------------

    def on_route(self, route: Route) -> None:
        self._is_poll = route.is_poll

    async def read(self, bytes_max: int) -> bytes:
        payload = self._payload
        if payload is EMPTY_PAYLOAD:
            return b""
        message = self._message
        assert message is not None
        if payload.is_eof() and payload.exception() is None:
            body: bytes = payload.read_nowait(-1)
        else:
            announced = message.headers.get("Content-Length")
            if announced is not None and int(announced) > bytes_max:
                raise _body_too_large(announced, bytes_max)
            if message.headers.get("Expect", "").lower() == "100-continue" and self.transport is not None:
                self.transport.write(_CONTINUE)
            body = await self._read_rest(payload, bytes_max)
        if len(body) > bytes_max:
            raise _body_too_large(str(len(body)), bytes_max)
        return body

    async def _read_rest(self, payload: StreamReader, bytes_max: int) -> bytes:
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(ARRIVE_S):
                while chunk := await payload.readany():
                    chunks.append(chunk)
                    size += len(chunk)
                    if size > bytes_max:
                        raise _body_too_large(f"more than {bytes_max}", bytes_max)
        except TimeoutError:
            self._closing = True
            raise InvalidRequest(f"the body did not arrive within {ARRIVE_S:.0f} s") from None
        except (BodyError, HttpProcessingError) as error:
            self._closing = True
            raise InvalidRequest(f"the body is malformed or incomplete: {error}") from None
        return b"".join(chunks)

    # --- answers ----------------------------------------------------------------------------------------------------------------

    async def _write(self, response: Response, request_id: str, *, is_last: bool) -> None:
        transport = self.transport
        jobs = response.hand_out
        if transport is None or transport.is_closing():
            if jobs:
                self._handed.written(jobs, self._loop.time())
                self._handed.lost()
            return
        message = self._message
        body = response.body
        if is_last:
            ending = b"Connection: close\r\n\r\n"
        else:
            is_old = message is not None and message.version.minor == 0
            ending = b"Connection: keep-alive\r\n\r\n" if is_old else b"\r\n"
        if response.status == HTTPStatus.NO_CONTENT:
            # Has neither (RFC 9110, 8.6), and so not their end of line either.
            content, common = b"", _COMMON.removeprefix(b"\r\n")
        else:
            content, common = b"Content-Type: %b\r\nContent-Length: %d" % (response.content_type, len(body)), _COMMON
        head = b"".join((
            _STATUS_LINES[response.status], content, common, request_id.encode(), b"\r\n", self._server.date_line(),
            *response.headers, ending,
        ))  # fmt: skip
        if message is not None and message.method == "HEAD":
            body = b""
        if jobs:
            self._handed.written(jobs, self._loop.time())
        transport.write(head + body)
        if self._paused:
            await self._drained()

    async def _drained(self) -> None:
        """Wait until the client has read most of the answer."""
        self.deadline_s = self._loop.time() + READ_S
        try:
            await self._drain_helper()
        except ConnectionError:
            self._handed.lost()
        except asyncio.CancelledError:
            self._handed.lost()
            raise
        finally:
            self.deadline_s = 0.0

    async def _linger(self, *, is_read: bool) -> None:
        """After the last answer: give the client time to read it, and to show by a reset that it did not. `is_read`: it has nothing
        more to send, so that a close is no reset."""
        transport = self.transport
        if transport is None or transport.is_closing() or self._ended:
            return
        if not self._handed:
            if is_read:
                return
            with contextlib.suppress(OSError, NotImplementedError):
                transport.write_eof()
        # Else no end of file from here: after one, the socket's state would not tell a reset from a clean close.
        self._discarding = True
        self._gone = self._loop.create_future()
        if self._reading_paused or self._buffer_paused:
            self._resume_transport_reading()
        try:
            async with asyncio.timeout(LINGER_S):
                await self._gone
        except TimeoutError:
            self._handed.arrived()

    def _judge(self) -> None:
        """Some time after the end of file on a connection that was handed jobs."""
        if self.transport is None:
            return
        if was_reset(self.transport):
            self._handed.lost()
        else:
            self._handed.arrived()
        if not self._messages and self._message is None:
            self.transport.close()


def _body_too_large(size: str, bytes_max: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body has {size} bytes, above {bytes_max}; send less at once")


def http_date(now_s: int) -> bytes:
    """The header line `Date` (RFC 9110, 6.6.1)."""
    return b"Date: %b\r\n" % formatdate(now_s, usegmt=True).encode()
