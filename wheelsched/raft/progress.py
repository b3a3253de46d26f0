"""What a leader knows about one peer, and how much it may send to it (thesis 10.2.1).

| state | sends |
| --- | --- |
| probe | one append, then waits for its answer or a heartbeat's |
| replicate | a stream; `next` moves on sending; a full window stops it, and a heartbeat answer lets one empty append through |
| snapshot | heartbeats only, until the transfer is reported or acknowledged |
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum


class PeerState(StrEnum):
    PROBE = "probe"
    REPLICATE = "replicate"
    SNAPSHOT = "snapshot"


class Window:
    """Appends in flight to one peer: last index and payload bytes of each, oldest first."""

    __slots__ = ("_flights", "bytes", "max_bytes", "max_count")

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._flights: deque[tuple[int, int]] = deque()
        self.bytes = 0
        self.max_count = max_count
        self.max_bytes = max_bytes  # 0: no limit

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def is_full(self) -> bool:
        """The byte limit may be passed by the last append; else one larger than the limit could never be sent."""
        return len(self._flights) >= self.max_count or (self.max_bytes > 0 and self.bytes >= self.max_bytes)

    def add(self, index: int, size: int) -> None:
        self._flights.append((index, size))
        self.bytes += size

    def free_up_to(self, index: int) -> None:
        """Everything up to `index` arrived; an acknowledgement covers the appends before it."""
        flights = self._flights
        while flights and flights[0][0] <= index:
            self.bytes -= flights.popleft()[1]

    def clear(self) -> None:
        self._flights.clear()
        self.bytes = 0


class Progress:
    """One peer. `match`: known to be held by it; `next`: first index of the next append; match < next always."""

    __slots__ = ("is_waiting", "match", "next", "read_seq", "recent_active", "sent_commit", "snapshot_index", "state", "window")

    def __init__(self, *, match: int, next: int, window: Window, recent_active: bool = False) -> None:
        self.state = PeerState.PROBE
        self.match = match
        self.next = next
        self.window = window
        self.is_waiting = False  # for an answer, before the next append
        self.recent_active = recent_active  # heard of since the last quorum check
        self.snapshot_index = 0  # in state snapshot: the one on its way
        self.sent_commit = 0  # highest commit index sent; a higher one is worth an empty append
        self.read_seq = 0  # highest number of a read that it confirmed

    @property
    def is_paused(self) -> bool:
        return self.is_waiting or self.state is PeerState.SNAPSHOT

    def probe(self) -> None:
        """Go back to one append at a time, from behind the snapshot if one was on its way."""
        self.next = max(self.match, self.snapshot_index if self.state is PeerState.SNAPSHOT else 0) + 1
        self._enter(PeerState.PROBE)

    def replicate(self) -> None:
        self.next = self.match + 1
        self._enter(PeerState.REPLICATE)

    def send_snapshot(self, index: int) -> None:
        self._enter(PeerState.SNAPSHOT)
        self.snapshot_index = index
        self.next = index + 1
        self.sent_commit = index

    def snapshot_failed(self) -> None:
        """Nothing of it arrived: probe from what was known before."""
        self.snapshot_index = 0
        self.probe()

    def _enter(self, state: PeerState) -> None:
        self.state = state
        self.is_waiting = False
        self.snapshot_index = 0
        self.window.clear()
        self.sent_commit = min(self.sent_commit, self.next - 1)

    def sent(self, count: int, size: int) -> None:
        """Note an append of `count` entries and `size` payload bytes, from `next` on."""
        if self.state is PeerState.REPLICATE:
            if count:
                self.next += count
                self.window.add(self.next - 1, size)
            self.is_waiting = self.window.is_full
        elif count:
            self.is_waiting = True

    def acknowledged(self, index: int) -> bool:
        """The peer holds everything up to `index`; False where that is no news."""
        self.next = max(self.next, index + 1)
        if index <= self.match:
            return False
        self.match = index
        self.is_waiting = False
        return True

    def refused(self, index: int, hint: int) -> bool:
        """The peer refused an append behind `index`; the logs agree at `hint` at most. False for one that is out of date.

        Never goes below `match`, whatever the order in which answers arrive."""
        if self.state is PeerState.SNAPSHOT:
            return False
        if self.state is PeerState.REPLICATE:
            if index <= self.match:
                return False
            self.next = self.match + 1
        elif self.next - 1 != index:
            # Probes go one at a time, so an answer to another index is an old one.
            return False
        else:
            self.next = max(min(index, hint + 1), self.match + 1)
            self.is_waiting = False
        self.sent_commit = min(self.sent_commit, self.next - 1)
        return True

    def lost(self) -> None:
        """The peer says that it holds nothing any more. Asked once more behind `match` first, for it may be an old answer."""
        if self.state is not PeerState.SNAPSHOT:
            self.next, self.match = self.match + 1, 0
            self._enter(PeerState.PROBE)

    def wants_commit(self, commit: int) -> bool:
        """Whether an empty append could move the peer's commit index, as far as it will hold what was sent."""
        return commit > self.sent_commit and self.sent_commit < self.next - 1
