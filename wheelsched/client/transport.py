"""One HTTP call and its repetitions. Here and nowhere else is decided what is safe to send twice."""

from __future__ import annotations

import asyncio
import io
import math
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum
from random import Random
from typing import Any, Final, Protocol
from urllib.parse import quote, urlencode

import aiohttp
import msgspec
from yarl import URL

from wheelsched.core.errors import BY_CODE, OutcomeUnknown, QuotaExceeded, Unavailable, WheelschedError, from_problem

# A wait the server asks for beyond this is the caller's to plan: the error says how long (`retry_after_s`).
RETRY_AFTER_S_MAX: Final = 30.0
CONNECT_S_MAX: Final = 5.0
_STREAMED_BYTES_MIN: Final = 256 * 1024

# What a proxy in front of a node answers without a problem document.
_CODE_BY_STATUS: Final = {429: QuotaExceeded.code, 502: OutcomeUnknown.code, 503: Unavailable.code, 504: OutcomeUnknown.code}


class Repeat(Enum):
    """When a call may be sent again."""

    ALWAYS = "always"  # a repetition changes nothing, or carries an idempotency key
    REFUSED = "refused"  # only when it is sure that the first one was not accepted
    NEVER = "never"


class _Random(Protocol):
    def random(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Backoff:
    """Full jitter: uniform between 0 and min(`cap_s`, `initial_s` * 2^n); a Retry-After is waited for in full, with that on top.

    Source: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """

    initial_s: float = 0.1
    cap_s: float = 5.0

    def wait_s(self, tries: int, rng: _Random, *, retry_after_s: float | None = None) -> float:
        """Seconds to wait after the given number of failed tries (1 or more)."""
        assert tries >= 1
        # 2^n of a large n overflows a float; beyond 2^30 every cap is long reached.
        return (retry_after_s or 0.0) + rng.random() * min(self.cap_s, self.initial_s * 2.0 ** min(tries - 1, 30))


@dataclass(frozen=True, slots=True)
class Answer:
    """A 2xx answer. `after_unknown`: an earlier try of the same call may have been accepted as well."""

    status: int
    body: bytes
    after_unknown: bool = False


class Transport:
    """Pooled keep-alive connections to one or several nodes of a cluster; any node answers any call.

    Claims have connections of their own (`_ClaimLine`): they wait on purpose, and breaking one off has to look like what it is.
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        *,
        timeout_s: float,
        retries: int,
        backoff: Backoff,
        token: str | None = None,
        connections_max: int = 100,
        rng: _Random | None = None,
    ) -> None:
        if not base_urls:
            raise ValueError("no base_url given; for example http://127.0.0.1:8080")
        for url in base_urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"base_url {url!r} does not start with http:// or https://")
        self._base_urls = [url.rstrip("/") for url in base_urls]
        self._base_index = 0
        self.timeout_s = timeout_s
        self.retries = retries
        self.backoff = backoff
        self._connections_max = connections_max
        self._rng: _Random = rng or Random()
        # Bodies are small and the node is near: compressing them costs more than sending them.
        self._headers = {"Accept": "application/json, application/problem+json", "Accept-Encoding": "identity"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._session: aiohttp.ClientSession | None = None
        # Those no claim waits on; there are as many lines as there were claims at once.
        self._idle_lines: list[_ClaimLine] = []
        self._closed = False

    async def close(self) -> None:
        """Close the connections; calls after it raise RuntimeError."""
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None
        while self._idle_lines:
            await self._idle_lines.pop().close()

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        repeat: Repeat = Repeat.ALWAYS,
        timeout_s: float | None = None,
        claims: bool = False,
        echo: type[WheelschedError] | None = None,
    ) -> Answer:
        """The 2xx answer to a call, repeated as `repeat` allows and `retries` bounds.

        `path` is escaped already. `echo` is how the server refuses what it has done already (a lease given back twice): after a
        try with unknown outcome that refusal is an answer, with an empty body. Raises the error of the last try.
        """
        target = path + ("?" + urlencode(query, quote_via=quote) if query else "")
        tries, unknown = 0, False
        while True:
            tries += 1
            try:
                status, content = await self._try(method, target, body, headers, timeout_s or self.timeout_s, claims)
                return Answer(status, content, after_unknown=unknown)
            except WheelschedError as error:
                if unknown and echo is not None and isinstance(error, echo):
                    return Answer(error.status, b"", after_unknown=True)
                unknown = unknown or isinstance(error, OutcomeUnknown)
                if tries > self.retries or not is_repeatable(error, repeat):
                    raise
                wait_s = self.backoff.wait_s(tries, self._rng, retry_after_s=error.retry_after_s)
            await asyncio.sleep(wait_s)

    async def _try(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str] | None, timeout_s: float, claims: bool
    ) -> tuple[int, bytes]:
        if self._is_closed():
            raise RuntimeError("the client is closed")
        if not claims:
            if self._session is None:
                self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=self._connections_max), headers=self._headers)
            return await self._once(self._session, method, target, body, headers, timeout_s)
        line = self._idle_lines.pop() if self._idle_lines else _ClaimLine(self._headers)
        line.arm()
        try:
            answer = await self._once(line.session, method, target, body, headers, timeout_s)
            line.disarm()
            return answer
        finally:
            if self._is_closed():
                await line.close()
            else:
                self._idle_lines.append(line)

    async def _once(
        self,
        session: aiohttp.ClientSession,
        method: str,
        target: str,
        body: bytes | None,
        headers: Mapping[str, str] | None,
        timeout_s: float,
    ) -> tuple[int, bytes]:
        base_index = self._base_index
        url = self._base_urls[base_index] + target
        sent_headers = dict(headers or ())
        if body is not None:
            sent_headers["Content-Type"] = "application/json"
        # aiohttp writes bytes in one piece, and streams a file: a batch of 32 MiB is not to hold up the loop.
        data = io.BytesIO(body) if body is not None and len(body) > _STREAMED_BYTES_MIN else body
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, CONNECT_S_MAX))
        try:
            async with session.request(
                method, URL(url, encoded=True), data=data, headers=sent_headers, timeout=timeout, allow_redirects=False
            ) as response:
                content = await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            self._turn_from(base_index)
            raise Unavailable(f"cannot connect to {self._base_urls[base_index]}: {error or type(error).__name__}") from error
        except aiohttp.InvalidURL as error:
            raise ValueError(f"{url} is not a URL") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._turn_from(base_index)
            raise OutcomeUnknown(
                f"{method} {target} got no answer from {self._base_urls[base_index]}: {error or type(error).__name__}"
            ) from error
        if 200 <= response.status < 300:
            return response.status, content
        if response.status == 503:
            self._turn_from(base_index)
        raise _error_of(method, target, response.status, response.headers, content)

    def _is_closed(self) -> bool:
        return self._closed

    def _turn_from(self, base_index: int) -> None:
        # Many calls fail together when a node goes; only the first of them turns to the next node.
        if self._base_index == base_index:
            self._base_index = (base_index + 1) % len(self._base_urls)


class _ClaimLine:
    """A connection that carries one claim at a time.

    While a claim waits it is armed: closing it, by us or by the kernel of a process that dies, sends a reset (SO_LINGER 0). That
    is how a server learns that an answer on its way was not read, and gives the jobs back uncounted at once (API.md, "Claims").
    Once the answer is read it is disarmed: a worker that dies at work has its jobs, and that attempt has to count.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._socket: socket.socket | None = None
        connector = aiohttp.TCPConnector(limit=1, socket_factory=self._made)
        self.session = aiohttp.ClientSession(connector=connector, headers=headers)

    def _made(self, address: tuple[Any, ...]) -> socket.socket:
        self._socket = socket.socket(family=address[0], type=address[1], proto=address[2])
        self.arm()
        return self._socket

    def arm(self) -> None:
        self._linger(on=True)

    def disarm(self) -> None:
        self._linger(on=False)

    def _linger(self, *, on: bool) -> None:
        if self._socket is not None:
            with suppress(OSError):  # closed meanwhile
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", on, 0))

    async def close(self) -> None:
        await self.session.close()


def is_repeatable(result: object, repeat: Repeat) -> bool:
    """Whether what came of a call is an error that a repetition may cure without harm."""
    error = result if isinstance(result, WheelschedError) else None
    if error is None or repeat is Repeat.NEVER or (error.retry_after_s or 0.0) > RETRY_AFTER_S_MAX:
        return False
    if isinstance(error, Unavailable | QuotaExceeded):
        return True
    return isinstance(error, OutcomeUnknown) and repeat is Repeat.ALWAYS


def _error_of(method: str, target: str, status: int, headers: Mapping[str, str], content: bytes) -> WheelschedError:
    try:
        problem = msgspec.json.decode(content, type=dict[str, Any])
    except msgspec.DecodeError:
        problem = {}
    if problem.get("code") not in BY_CODE and status in _CODE_BY_STATUS:
        problem = {**problem, "code": _CODE_BY_STATUS[status]}
    if not problem.get("detail") and not problem.get("title"):
        problem["detail"] = f"{method} {target} was answered {status}: {content[:200].decode(errors='replace')}"
    error = from_problem(problem, retry_after_s=parse_retry_after(headers.get("Retry-After")))
    if request_id := problem.get("request_id") or headers.get("X-Request-Id"):
        error.add_note(f"request id {request_id}")
    return error


def parse_retry_after(text: str | None) -> float | None:
    """Seconds to wait, never negative; None where there is none to read (RFC 9110, 10.2.3: seconds or a date)."""
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            at = parsedate_to_datetime(text)
        except (ValueError, TypeError):
            return None
        seconds = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - datetime.now(UTC).timestamp()
    return max(0.0, seconds) if math.isfinite(seconds) else None
