"""What this worker may believe about its leases. Pure: the time comes in as an argument, in monotonic milliseconds.

A lease is believed until its end as counted from the sending of the last heartbeat that was answered, which is before the
server's own count starts, so the worker gives up before the server does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

MISSES_MAX: Final = 3


@dataclass(slots=True)
class HeldLease:
    token: str
    lease_ms: int
    expires_at_ms: int
    misses: int = 0
    progress: bytes | None = None
    cancel_told: bool = False


class LeaseBook:
    """The leases of the attempts that run or are being reported. Not for concurrent use: the driver holds a lock."""

    def __init__(self) -> None:
        self._leases: dict[str, HeldLease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, token: str, *, lease_ms: int, expires_at_ms: int) -> None:
        assert token not in self._leases, "a token names one attempt"
        assert lease_ms > 0
        self._leases[token] = HeldLease(token, lease_ms, expires_at_ms)

    def remove(self, token: str) -> None:
        """The attempt has ended; an unknown token is one that was lost."""
        self._leases.pop(token, None)

    def is_held(self, token: str, now_ms: int) -> bool:
        lease = self._leases.get(token)
        return lease is not None and now_ms < lease.expires_at_ms

    def set_progress(self, token: str, progress: bytes) -> bool:
        """Whether the lease is there to send it with."""
        lease = self._leases.get(token)
        if lease is not None:
            lease.progress = progress
        return lease is not None

    def beats(self) -> list[tuple[str, bytes | None]]:
        """Token and news of every lease: what the next heartbeat says. The news stay until they are known to have arrived."""
        return [(lease.token, lease.progress) for lease in self._leases.values()]

    def on_extended(self, token: str, *, sent_at_ms: int, progress: bytes | None, cancel_requested: bool) -> bool:
        """A heartbeat sent at `sent_at_ms` was answered; whether that brings the news of a cancel request."""
        lease = self._leases.get(token)
        if lease is None:
            return False
        lease.misses = 0
        lease.expires_at_ms = max(lease.expires_at_ms, sent_at_ms + lease.lease_ms)
        if lease.progress is progress:
            lease.progress = None
        news = cancel_requested and not lease.cancel_told
        lease.cancel_told = lease.cancel_told or cancel_requested
        return news

    def on_stale(self, token: str) -> bool:
        """The server says that the lease is another's; whether it was believed to be ours."""
        return self._leases.pop(token, None) is not None

    def on_missed(self, tokens: Iterable[str]) -> list[str]:
        """A heartbeat for these was not answered; the tokens whose third miss in a row it was, no longer held."""
        lost = []
        for token in tokens:
            if (lease := self._leases.get(token)) is None:
                continue
            lease.misses += 1
            if lease.misses >= MISSES_MAX:
                lost.append(token)
                del self._leases[token]
        return lost

    def take_expired(self, now_ms: int) -> list[str]:
        """The tokens past their end, no longer held."""
        expired = [lease.token for lease in self._leases.values() if lease.expires_at_ms <= now_ms]
        for token in expired:
            del self._leases[token]
        return expired

    def next_expiry_ms(self) -> int | None:
        return min((lease.expires_at_ms for lease in self._leases.values()), default=None)

    def check(self) -> None:
        for token, lease in self._leases.items():
            assert lease.token == token
            assert 0 <= lease.misses < MISSES_MAX
