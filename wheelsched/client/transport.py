"""One HTTP call and its repetitions. Here and nowhere else is decided what is safe to send twice."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Mapping, Sequence
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

    Claims have connections of their own, which are reset and not closed: to the server that is a worker that hung up, even if its
    answer was on the way, and it gives the jobs back uncounted (API.md, "Claims").
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
        self._claim_session: aiohttp.ClientSession | None = None
        self._closed = False

    async def close(self) -> None:
        """Close the connections; calls after it raise RuntimeError."""
        self._closed = True
        for session in (self._session, self._claim_session):
            if session is not None:
                await session.close()
        self._session = self._claim_session = None

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
                status, content = await self._once(method, target, body, headers, timeout_s or self.timeout_s, claims)
                return Answer(status, content, after_unknown=unknown)
            except WheelschedError as error:
                if unknown and echo is not None and isinstance(error, echo):
                    return Answer(error.status, b"", after_unknown=True)
                unknown = unknown or isinstance(error, OutcomeUnknown)
                if tries > self.retries or not is_repeatable(error, repeat):
                    raise
                wait_s = self.backoff.wait_s(tries, self._rng, retry_after_s=error.retry_after_s)
            await asyncio.sleep(wait_s)

    async def _once(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str] | None, timeout_s: float, claims: bool
    ) -> tuple[int, bytes]:
        base_index = self._base_index
        url = self._base_urls[base_index] + target
        sent_headers = dict(headers or ())
        if body is not None:
            sent_headers["Content-Type"] = "application/json"
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, CONNECT_S_MAX))
        try:
            async with self._session_for(claims).request(
                method, URL(url, encoded=True), data=body, headers=sent_headers, timeout=timeout, allow_redirects=False
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

    def _turn_from(self, base_index: int) -> None:
        # Many calls fail together when a node goes; only the first of them turns to the next node.
        if self._base_index == base_index:
            self._base_index = (base_index + 1) % len(self._base_urls)

    def _session_for(self, claims: bool) -> aiohttp.ClientSession:
        if self._closed:
            raise RuntimeError("the client is closed")
        if claims:
            if self._claim_session is None:
                # Long polls wait on purpose: they neither share nor exhaust the other calls' connections.
                connector = aiohttp.TCPConnector(limit=0, socket_factory=_resetting_socket)
                self._claim_session = aiohttp.ClientSession(connector=connector, headers=self._headers)
            return self._claim_session
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._connections_max)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self._session


def _resetting_socket(address: tuple[Any, ...]) -> socket.socket:
    made = socket.socket(family=address[0], type=address[1], proto=address[2])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() sends RST
    return made


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
        return max(0.0, min(float(text), 1e9)) if text.strip()[:1].isdigit() or text.strip()[:1] == "-" else _until(text)
    except (ValueError, TypeError):
        return None


def _until(text: str) -> float:
    at = parsedate_to_datetime(text)
    return max(0.0, (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - datetime.now(UTC).timestamp())
