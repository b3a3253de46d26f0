"""Ready queues in plain Python: specification, fallback and the tests' reference for `native/ready.pyx`."""

from __future__ import annotations

import heapq
import struct

READY = struct.Struct("<qQII")  # fire_at, id_low, version, word: the timer's record, see `wheelsched.wheel`

Mark = tuple[int, int]  # at_ms, id_low


def checked(records: bytes) -> bytes:
    """`records`, or ValueError if they are not whole ones."""
    if len(records) % READY.size:
        raise ValueError(f"{len(records)} bytes of records are not a multiple of {READY.size}")
    return records


class ReadyQueue:
    """The QUEUED jobs of one lane, tenant, queue and priority; holds at most `bound` (>= 4, ValueError below)."""

    def __init__(self, bound: int) -> None:
        if bound < 4:
            raise ValueError(f"bound {bound} is below 4")
        self.bound = bound
        self.dropped = 0  # by spilling, or for lying at or after the mark
        self._heap: list[tuple[int, int, int, int]] = []
        self._mark: Mark | None = None

    @property
    def reserved_bytes(self) -> int:
        """Bytes held, estimated: 200 a record."""
        return 200 * len(self._heap)

    @property
    def spilled_from(self) -> Mark | None:
        """(at_ms, id_low) of the first job that is in the store alone, or None while all of them are here."""
        return self._mark

    def set_spilled_from(self, mark: Mark | None) -> None:
        """Move the mark, after a refill up to it; None: everything is here again."""
        self._mark = mark

    def __len__(self) -> int:
        return len(self._heap)

    def head(self) -> Mark | None:
        """(at_ms, id_low) of the next job, or None. O(1)."""
        return self._heap[0][:2] if self._heap else None

    def push_batch(self, records: bytes) -> None:
        """Add packed records. Those at or after `spilled_from` are dropped; past `bound` the latest quarter is.

        ValueError unless the length is a multiple of 24. O(log n) a record, a spill O(bound log bound).
        """
        for record in READY.iter_unpack(checked(records)):
            if self._mark is not None and record[:2] >= self._mark:
                self.dropped += 1
                continue
            heapq.heappush(self._heap, record)
            if len(self._heap) > self.bound:
                self._spill()

    def put_back(self, records: bytes) -> None:
        """Add records taken earlier and not claimed; the same as `push_batch`."""
        self.push_batch(records)

    def take(self, n: int) -> bytes:
        """Remove and return the first min(n, len) jobs in order, packed. ValueError for n < 0. O(n log len)."""
        if n < 0:
            raise ValueError(f"n {n} is below 0")
        count = min(n, len(self._heap))
        return b"".join(READY.pack(*heapq.heappop(self._heap)) for _ in range(count))

    def clear(self) -> None:
        """Forget all records and the mark; `dropped` keeps counting."""
        self._heap.clear()
        self._mark = None

    def check(self) -> None:
        """Raise AssertionError unless heap order, bound and mark hold. O(n)."""
        assert len(self._heap) <= self.bound
        for place, record in enumerate(self._heap):
            assert record >= self._heap[(place - 1) >> 1 if place else 0]
            assert self._mark is None or record[:2] < self._mark

    def _spill(self) -> None:
        """Keep the earliest three quarters of the bound; the mark becomes the first key dropped."""
        held = sorted(self._heap)
        # A record in memory lies before any mark there was, so this can only lower it.
        self._mark = held[self.bound - self.bound // 4][:2]
        # A twin of the first dropped record would otherwise sit at the mark, once here and once in the refill.
        self._heap = [record for record in held if record[:2] < self._mark]  # sorted, hence a heap
        self.dropped += len(held) - len(self._heap)


def without_partitions(records: bytes, first: int, last: int) -> bytes:
    """The records whose partition, the low 10 bits of `id_low`, is not in [first, last]; their order is kept. O(records)."""
    kept = [record for record in READY.iter_unpack(checked(records)) if not first <= record[1] & 1023 <= last]
    return b"".join(READY.pack(*record) for record in kept)


def split_by_queue(records: bytes) -> list[tuple[int, bytes]]:
    """Group packed records by `word >> 3` (queue number and priority): [(key, packed records)], sorted by key.

    Order inside a group is kept. ValueError unless the length is a multiple of 24. O(records + groups log groups).
    """
    parts: dict[int, bytearray] = {}
    for record in READY.iter_unpack(checked(records)):
        parts.setdefault(record[3] >> 3, bytearray()).extend(READY.pack(*record))
    return [(key, bytes(part)) for key, part in sorted(parts.items())]
