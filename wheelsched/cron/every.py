"""Elapsed time: the instants `anchor_ms + k * every_ms`, k = 0, 1, 2, ..., whatever any clock on a wall does. All of it O(1)."""

from __future__ import annotations


def next_every(every_ms: int, anchor_ms: int, after_ms: int) -> int:
    """The first of them strictly later than `after_ms`."""
    assert every_ms > 0
    if after_ms < anchor_ms:
        return anchor_ms
    return after_ms + every_ms - (after_ms - anchor_ms) % every_ms


def last_every(every_ms: int, anchor_ms: int, before_ms: int) -> int | None:
    """The last of them strictly earlier than `before_ms`; None up to the anchor."""
    assert every_ms > 0
    if before_ms <= anchor_ms:
        return None
    return before_ms - 1 - (before_ms - 1 - anchor_ms) % every_ms


def count_every(every_ms: int, anchor_ms: int, from_ms: int, to_ms: int) -> int:
    """How many of them there are with `from_ms <= run < to_ms`."""
    assert every_ms > 0
    from_ms = max(from_ms, anchor_ms)
    if to_ms <= from_ms:
        return 0
    return (to_ms - 1 - anchor_ms) // every_ms - (from_ms - 1 - anchor_ms) // every_ms
