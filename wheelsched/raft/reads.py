"""Reads that wait for the leader to be confirmed in office (ReadIndex, thesis 6.4).

Each read gets a number that grows as long as the node lives; heartbeats carry the newest, and an answer with a number confirms
every read up to it. What the caller gave as context is never compared: two reads with one context and a late answer between them
would confirm each other (etcd #20418).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReadResult:
    """`ctx` may be answered once everything up to `index` is applied."""

    ctx: object
    index: int


class WaitingReads:
    """Reads of one leadership in order of arrival; they die with it."""

    __slots__ = ("_waiting", "newest")

    def __init__(self) -> None:
        # (number, ctx, index); index None until the leader has committed an entry of its own term.
        self._waiting: deque[tuple[int, object, int | None]] = deque()
        self.newest = 0  # number of the newest waiting read, 0 for none

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, number: int, ctx: object, index: int | None) -> None:
        self._waiting.append((number, ctx, index))
        self.newest = number

    def settle_index(self, index: int) -> None:
        """The first own entry is committed, and with it everything a former leader may have acknowledged."""
        self._waiting = deque((number, ctx, index if old is None else old) for number, ctx, old in self._waiting)

    def take_confirmed(self, number: int) -> list[ReadResult]:
        """Remove and return the reads up to `number`; call only once their indexes are settled."""
        results = []
        while self._waiting and self._waiting[0][0] <= number:
            _, ctx, index = self._waiting.popleft()
            assert index is not None
            results.append(ReadResult(ctx, index))
        if not self._waiting:
            self.newest = 0
        return results
