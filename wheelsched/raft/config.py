"""Settings of one Raft core, and the chance it is handed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class TimeoutSource(Protocol):
    """Where election timeouts come from; `random.Random` fits. A driver may draw from bands by rank (thesis 9.5)."""

    def randrange(self, stop: int, /) -> int:
        """A number in [0, stop)."""
        ...


class ReadMode(StrEnum):
    """How `read_index` is confirmed: by a quorum, or by the leader's belief that nobody else can have been elected (thesis 6.4)."""

    SAFE = "safe"
    LEASE = "lease"


@dataclass(frozen=True, slots=True)
class RaftConfig:
    """Ticks, limits and switches; the defaults are the product's. A limit of 0 is no limit.

    `max_inflight`: appends in flight per peer. `max_inflight_bytes`, `max_msg_bytes`, `max_uncommitted` and `cache_bytes` count
    payload bytes. `max_apply_batch`: entries handed out for applying per Ready. `cache_bytes`: applied entries kept in memory,
    looked at only where the core was given a reader for the older ones.
    """

    group: int = 0
    election_tick: int = 10
    heartbeat_tick: int = 2
    pre_vote: bool = True
    check_quorum: bool = True
    restart_grace: bool = True
    read_mode: ReadMode = ReadMode.SAFE
    max_inflight: int = 64
    max_inflight_bytes: int = 4 * 1024 * 1024
    max_msg_bytes: int = 1024 * 1024
    max_uncommitted: int = 16 * 1024 * 1024
    max_apply_batch: int = 0
    cache_bytes: int = 4 * 1024 * 1024

    def __post_init__(self) -> None:
        if not 1 <= self.heartbeat_tick < self.election_tick:
            raise ValueError(f"heartbeat_tick {self.heartbeat_tick} must be from 1 to below election_tick {self.election_tick}")
        if self.max_inflight < 1:
            raise ValueError(f"max_inflight {self.max_inflight} is below 1; nothing could be sent")
        if self.read_mode is ReadMode.LEASE and not self.check_quorum:
            raise ValueError("read_mode 'lease' needs check_quorum: without it a deposed leader would answer for ever")
