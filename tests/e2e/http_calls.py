"""Plain HTTP from the standard library: what a client in any language would send."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit


class Answer(NamedTuple):
    status: int
    body: Any
    headers: Mapping[str, str]


class Http:
    """One kept connection to a node, one call at a time."""

    def __init__(self, url: str, *, timeout_s: float = 90.0) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def call(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        """`body` as JSON, or bytes as they are."""
        sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Content-Type": "application/json"} if sent is not None else {}
        self._connection.request(method, path, sent, {**given, **(headers or {})})
        answer = self._connection.getresponse()
        raw = answer.read()
        is_json = "json" in (answer.getheader("Content-Type") or "")
        return Answer(answer.status, json.loads(raw) if is_json and raw else raw.decode(), dict(answer.getheaders()))

    def get(self, path: str) -> Any:
        return self._expect((200,), "GET", path)

    def post(self, path: str, body: Any = None, **headers: str) -> Any:
        """The answer to a call that has to succeed; `headers` with _ for -."""
        return self._expect((200, 201), "POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()})

    def create(self, **fields: Any) -> Any:
        """A job; in the queue `mail` unless told otherwise."""
        return self.post("/v1/jobs", {"queue": "mail", **fields})

    def claim(self, queue: str = "mail", **fields: Any) -> list[Any]:
        jobs: list[Any] = self.post(f"/v1/queues/{queue}:claim", fields)["jobs"]
        return jobs

    def complete(self, job: Mapping[str, Any], outcome: str = "succeeded", **fields: Any) -> Any:
        return self.post(f"/v1/attempts/{job['lease_token']}:complete", {"outcome": outcome, **fields})

    def _expect(self, statuses: tuple[int, ...], method: str, path: str, body: Any = None, headers: Any = None) -> Any:
        answer = self.call(method, path, body, headers)
        assert answer.status in statuses, (method, path, answer)
        return answer.body


def wait_until(holds: Callable[[], Any], *, timeout_s: float = 30.0, every_s: float = 0.02) -> Any:
    """Ask until the answer is true; that answer. For what a process tells by no signal."""
    give_up = time.monotonic() + timeout_s
    while not (found := holds()):
        assert time.monotonic() < give_up, f"not within {timeout_s:g} s"
        time.sleep(every_s)
    return found
