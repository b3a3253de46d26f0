"""How far the clocks of the other nodes are from ours, as NTP measures it (RFC 5905, sections 8 and 10).

A round trip bounds the offset: whatever the way there and the way back took, the other clock is within half the round trip of the
middle. So the quickest of the last rounds says most, and slow ones say nothing. Kept is not the offset but the other wall clock against
our *monotonic* one: a step of our own wall clock is then seen at once, in every peer's offset, and not eight rounds later.

Pure: all times come in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

# NTP's clock filter holds eight. A round a second or two, so a peer's step shows when it is beyond doubt, below, not after eight.
SAMPLES_MAX: Final = 8
# Half of this is the error; above it a sample could not tell an offset of `OFF_MS` from none.
ROUND_TRIP_MS_MAX: Final = 250
# Crystals part by 20 to 100 us a second: 6 ms in this time.
AGE_MS_MAX: Final = 60_000
OFF_MS: Final = 250


@dataclass(frozen=True, slots=True)
class _Sample:
    ahead_ms: int  # the peer's wall clock minus our monotonic one
    round_trip_ms: int
    at_mono_ms: int

    def agrees(self, other: _Sample) -> bool:
        """Whether one position of the peer's clock explains both. A millisecond for rounding on each side."""
        return abs(self.ahead_ms - other.ahead_ms) <= (self.round_trip_ms + other.round_trip_ms) // 2 + 2


class ClockOffsets:
    """Offsets of the peers of one node, of a cluster of `node_count`, itself included."""

    __slots__ = ("_samples", "node_count")

    def __init__(self, node_count: int) -> None:
        assert node_count >= 1
        self.node_count = node_count
        self._samples: dict[int, deque[_Sample]] = {}

    def add(self, peer: int, *, sent_mono_ms: int, received_at_ms: int, answered_at_ms: int, back_mono_ms: int) -> None:
        """One round: sent and back by our monotonic clock, received and answered by the peer's wall clock."""
        round_trip_ms = (back_mono_ms - sent_mono_ms) - (answered_at_ms - received_at_ms)
        # Below zero: the peer's clock stepped between receipt and answer.
        if not 0 <= round_trip_ms <= ROUND_TRIP_MS_MAX or answered_at_ms < received_at_ms:
            return
        ahead_ms = (received_at_ms + answered_at_ms - sent_mono_ms - back_mono_ms) // 2
        sample = _Sample(ahead_ms, round_trip_ms, back_mono_ms)
        samples = self._samples.setdefault(peer, deque(maxlen=SAMPLES_MAX))
        if any(not sample.agrees(other) for other in samples):
            # No clock that ran evenly can have given both: it stepped in between, and the older ones speak of before.
            samples.clear()
        samples.append(sample)

    def forget(self, peer: int) -> None:
        """The peer left, or was restarted."""
        self._samples.pop(peer, None)

    def round_trip_ms(self, peer: int) -> int | None:
        """Of the last round that was quick enough; None where there is none."""
        samples = self._samples.get(peer)
        return samples[-1].round_trip_ms if samples else None

    def offset_ms(self, peer: int, *, wall_ms: int, mono_ms: int) -> int | None:
        """How far the peer's wall clock is ahead of ours; None where nothing recent is known."""
        recent = [sample for sample in self._samples.get(peer, ()) if mono_ms - sample.at_mono_ms <= AGE_MS_MAX]
        if not recent:
            return None
        best = min(recent, key=lambda sample: (sample.round_trip_ms, -sample.at_mono_ms))
        return best.ahead_ms + mono_ms - wall_ms

    def offsets_ms(self, *, wall_ms: int, mono_ms: int) -> dict[int, int]:
        """Of every peer of which something recent is known, in order of raft ids."""
        found = {peer: self.offset_ms(peer, wall_ms=wall_ms, mono_ms=mono_ms) for peer in sorted(self._samples)}
        return {peer: offset for peer, offset in found.items() if offset is not None}

    def majority_offset_ms(self, *, wall_ms: int, mono_ms: int) -> int | None:
        """How far the median clock of the cluster, ours among them, is ahead of ours; None unless more than half are known.

        More than half of the clocks known are at it or beyond it, so it is confirmed by most of them. With an even number the one
        nearer to ours counts."""
        known = sorted([0, *self.offsets_ms(wall_ms=wall_ms, mono_ms=mono_ms).values()])
        if 2 * len(known) <= self.node_count:
            return None
        return min(known[(len(known) - 1) // 2], known[len(known) // 2], key=abs)

    def is_off(self, *, wall_ms: int, mono_ms: int) -> bool:
        """Whether ours differs by more than 250 ms from more than half of the cluster: then it is we who should stop dispatching.

        Of two nodes neither can be told to be wrong."""
        offsets = self.offsets_ms(wall_ms=wall_ms, mono_ms=mono_ms).values()
        return 2 * sum(abs(offset) > OFF_MS for offset in offsets) > self.node_count
