"""Calls of one node over HTTP, for commands: blocking, JSON in and out as the contract has it.

Not the SDK, on purpose: a command shows what the node answered, unknown fields included, and starts in a tenth of a second
without an event loop.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

from wheelsched.cli.errors import UNREACHABLE, USAGE, CommandFailed
from wheelsched.core.errors import from_problem

TIMEOUT_S: Final = 30.0
DEFAULT_URL: Final = "http://127.0.0.1:8080"

Params = Mapping[str, str | int | None]


class Remote:
    """One connection to the node at `url`, opened when needed. Raises `WheelschedError` for refusals, `CommandFailed` where
    nobody answers."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CommandFailed(f"{url} is not an http URL; give one like {DEFAULT_URL}", exit_code=USAGE, code="usage")
        self.url = url.rstrip("/")
        self._base = parts.path.rstrip("/")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname, parts.port, timeout=timeout_s)

    def get(self, path: str, params: Params | None = None) -> Any:
        return self.call("GET", path, params=params)

    def post(self, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None) -> Any:
        return self.call("POST", path, body={} if body is None else body, headers=headers)

    def call(
        self, method: str, path: str, *, body: Any = None, params: Params | None = None, headers: Mapping[str, str] | None = None
    ) -> Any:
        """The answer's JSON; None where it has no body."""
        query = urlencode({key: value for key, value in (params or {}).items() if value is not None})
        target = self._base + path + (f"?{query}" if query else "")
        data = None if body is None else json.dumps(body, ensure_ascii=False).encode()
        sent = {"Accept": "application/json", **(headers or {})}
        if data is not None:
            sent["Content-Type"] = "application/json"
        status, answer_headers, answer = self._exchange(method, target, data, sent)
        parsed = _parse(answer)
        if status < 400:
            return parsed
        problem = parsed if isinstance(parsed, dict) else {"detail": f"{method} {path} was answered {status}"}
        error = from_problem(problem, retry_after_s=_seconds(answer_headers.get("Retry-After")))
        # A code of a later release: its class is unknown, its status and title are not.
        error.__dict__.setdefault("status", status)
        raise error

    def pages(self, path: str, params: Params, *, key: str, limit: int | None) -> Iterator[dict[str, Any]]:
        """The items of a listing, page after page, at most `limit`."""
        cursor: str | None = None
        left = limit
        while left is None or left > 0:
            page_limit = 1_000 if left is None else min(left, 1_000)
            page = self.get(path, {**params, "limit": page_limit, "cursor": cursor})
            yield from page[key]
            left = None if left is None else left - len(page[key])
            cursor = page.get("next_cursor")
            if cursor is None:
                return

    def _exchange(
        self, method: str, target: str, data: bytes | None, headers: dict[str, str]
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        try:
            self._connection.request(method, target, data, headers)
            response = self._connection.getresponse()
            return response.status, response.headers, response.read()
        except TimeoutError as error:
            self._connection.close()
            raise CommandFailed(
                f"{self.url} did not answer {method} {target} in time; the outcome is unknown: repeat it",
                exit_code=UNREACHABLE, code="timeout",
            ) from error  # fmt: skip
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise CommandFailed(
                f"no wheelsched node answers at {self.url} ({reason}); start one with `wheelsched dev`, "
                "or name another with --url or WHEELSCHED_URL",
                exit_code=UNREACHABLE, code="unreachable",
            ) from error  # fmt: skip


def segment(name: str) -> str:
    """A name as one segment of a path."""
    return quote(name, safe="")


def _parse(answer: bytes) -> Any:
    try:
        return json.loads(answer) if answer else None
    except ValueError:
        return None


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
