"""The thread that keeps leases: its own connection, its own pace, nothing shared with the event loop but a lock."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import msgspec
import structlog

from wheelsched.core.limits import BATCH_ITEMS_MAX
from wheelsched.worker.job import mono_ms
from wheelsched.worker.leases import LeaseBook

log = structlog.get_logger("wheelsched.worker")

# News are worth a heartbeat of their own, but not one for every line a handler writes.
PROGRESS_INTERVAL_MS: Final = 500
_TIMEOUT_S_MIN: Final = 0.2


class HeartbeatOwner(Protocol):
    """Who hears what became of a lease; called on the heartbeat thread, without its lock."""

    def on_lease_lost(self, token: str, why: str) -> None: ...

    def on_cancel_requested(self, token: str) -> None: ...


class _Beat(msgspec.Struct):
    status: int
    cancel_requested: bool = False


class _Beats(msgspec.Struct):
    results: list[_Beat]


class Heartbeats:
    """Extends every lease of the worker in one call each `lease_ms` / 3, until it is removed or lost."""

    def __init__(self, base_urls: Sequence[str], *, lease_ms: int, owner: HeartbeatOwner, auth_token: str | None = None) -> None:
        assert base_urls and lease_ms > 0
        self._line = _Line(base_urls, auth_token)
        self._lease_ms = lease_ms
        self._interval_ms = max(1, lease_ms // 3)
        self._owner = owner
        self._book = LeaseBook()
        self._wake = threading.Condition()
        self._beat_at_ms = 0
        self._beaten_at_ms = 0
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="wheelsched heartbeats", daemon=True)
        self.sent = 0
        self.missed = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; leases still held are left to run out. Returns at once: a call under way may take its timeout."""
        with self._wake:
            self._stopped = True
            self._wake.notify()

    def add(self, token: str, *, expires_at_ms: int, soon: bool = False) -> None:
        """Keep this lease. `soon`: extend it at once, because nobody knows how much of it is gone."""
        now_ms = mono_ms()
        with self._wake:
            if not len(self._book):
                self._beat_at_ms = now_ms + self._interval_ms
            self._book.add(token, lease_ms=self._lease_ms, expires_at_ms=expires_at_ms)
            if soon:
                self._beat_at_ms = now_ms
            self._wake.notify()

    def remove(self, token: str) -> None:
        with self._wake:
            self._book.remove(token)

    def is_held(self, token: str) -> bool:
        with self._wake:
            return self._book.is_held(token, mono_ms())

    def report_progress(self, token: str, progress: bytes) -> None:
        with self._wake:
            if self._book.set_progress(token, progress):
                self._beat_at_ms = min(self._beat_at_ms, self._beaten_at_ms + PROGRESS_INTERVAL_MS)
                self._wake.notify()

    def _run(self) -> None:
        while (beats := self._wait_beats()) is not None:
            for first in range(0, len(beats), BATCH_ITEMS_MAX):
                self._beat(beats[first : first + BATCH_ITEMS_MAX])
        self._line.close()

    def _wait_beats(self) -> list[tuple[str, bytes | None]] | None:
        """What to say when the next heartbeat is due; None when the thread is to end. Reports leases that run out."""
        while True:
            with self._wake:
                if self._stopped:
                    return None
                now_ms = mono_ms()
                expired = self._book.take_expired(now_ms)
                if not expired:
                    if len(self._book) and self._beat_at_ms <= now_ms:
                        self._beaten_at_ms, self._beat_at_ms = now_ms, now_ms + self._interval_ms
                        return self._book.beats()
                    self._wake.wait(self._wait_s(now_ms))
            for token in expired:
                self._owner.on_lease_lost(token, "expired")

    def _wait_s(self, now_ms: int) -> float | None:
        expiry_ms = self._book.next_expiry_ms()
        return None if expiry_ms is None else max(0, min(self._beat_at_ms, expiry_ms) - now_ms) / 1000

    def _beat(self, beats: Sequence[tuple[str, bytes | None]]) -> None:
        sent_at_ms = mono_ms()
        tokens = [token for token, _progress in beats]
        try:
            results = self._line.post("/v1/attempts:heartbeat", _body(beats), timeout_s=self._timeout_s(sent_at_ms))
            if len(results) != len(beats):
                raise ValueError(f"{len(results)} results for {len(beats)} heartbeats")
        except (OSError, http.client.HTTPException, ValueError, msgspec.DecodeError) as error:
            log.warning("heartbeat_failed", leases=len(beats), error=str(error) or type(error).__name__)
            self._on_missed(tokens)
            return
        self.sent += 1
        self._on_missed(token for token, result in zip(tokens, results, strict=True) if result.status != 200 and not _is_refused(result))
        for (token, progress), result in zip(beats, results, strict=True):
            if result.status == 200:
                self._on_extended(token, sent_at_ms, progress, result)
            elif _is_refused(result):
                self._on_stale(token)

    def _on_extended(self, token: str, sent_at_ms: int, progress: bytes | None, result: _Beat) -> None:
        with self._wake:
            news = self._book.on_extended(token, sent_at_ms=sent_at_ms, progress=progress, cancel_requested=result.cancel_requested)
        if news:
            self._owner.on_cancel_requested(token)

    def _on_stale(self, token: str) -> None:
        with self._wake:
            was_held = self._book.on_stale(token)
        if was_held:
            self._owner.on_lease_lost(token, "stale")

    def _on_missed(self, tokens: Iterable[str]) -> None:
        missed = list(tokens)
        if not missed:
            return
        self.missed += 1
        with self._wake:
            lost = self._book.on_missed(missed)
        for token in lost:
            self._owner.on_lease_lost(token, "unreachable")

    def _timeout_s(self, now_ms: int) -> float:
        # The next heartbeat has to find its turn, and a lease that runs out while one is under way has to be noticed.
        with self._wake:
            expiry_ms = self._book.next_expiry_ms()
        bound_ms = self._interval_ms if expiry_ms is None else min(self._interval_ms, expiry_ms - now_ms)
        return max(_TIMEOUT_S_MIN, bound_ms / 1000)


def _is_refused(result: _Beat) -> bool:
    # 409: another's; 404: the job is gone. Anything else (503, 504) leaves the lease as it is.
    return result.status in (404, 409)


def _body(beats: Iterable[tuple[str, bytes | None]]) -> bytes:
    heartbeats: list[dict[str, Any]] = [
        {"token": token} if progress is None else {"token": token, "progress": msgspec.Raw(progress)} for token, progress in beats
    ]
    return msgspec.json.encode({"heartbeats": heartbeats})


class _Line:
    """One connection to one node, kept open; the next node's after a failure. Standard library: it shares no loop and no pool."""

    def __init__(self, base_urls: Sequence[str], auth_token: str | None) -> None:
        self._base_urls = base_urls
        self._base_index = 0
        self._headers = {"Content-Type": "application/json", "Accept": "application/json, application/problem+json"}
        if auth_token is not None:
            self._headers["Authorization"] = f"Bearer {auth_token}"
        self._connection: http.client.HTTPConnection | None = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def post(self, path: str, body: bytes, *, timeout_s: float) -> list[_Beat]:
        """The results of a batch of heartbeats. Raises OSError, HTTPException or ValueError where there is no such answer."""
        started_ms = mono_ms()
        try:
            return self._post_once(path, body, timeout_s)
        except (OSError, http.client.HTTPException, ValueError):
            # A connection that was closed while idle, or a node that went: once more on a new one, if it failed quickly.
            left_s = timeout_s - (mono_ms() - started_ms) / 1000
            if left_s < timeout_s / 2:
                raise
            return self._post_once(path, body, left_s)

    def _post_once(self, path: str, body: bytes, timeout_s: float) -> list[_Beat]:
        base = urlsplit(self._base_urls[self._base_index])
        try:
            if self._connection is None:
                kind = http.client.HTTPSConnection if base.scheme == "https" else http.client.HTTPConnection
                self._connection = kind(base.hostname or "", base.port)
            self._connection.timeout = timeout_s
            if self._connection.sock is not None:
                self._connection.sock.settimeout(timeout_s)
            self._connection.request("POST", base.path.rstrip("/") + path, body=body, headers=self._headers)
            response = self._connection.getresponse()
            content = response.read()
            if response.status != 200:
                raise ValueError(f"answered {response.status}: {content[:200].decode(errors='replace')}")
            return msgspec.json.decode(content, type=_Beats).results
        except BaseException:
            self.close()
            self._base_index = (self._base_index + 1) % len(self._base_urls)
            raise
