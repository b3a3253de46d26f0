"""One replica's view of its log: what it holds, what the disk has been given, and what the disk has confirmed.

    start | evicted entries | cached entries ... durable ... written ... last
            `reader` has them                    confirmed   in flight    not yet taken by a Ready

Terms of all entries after the start are kept as runs, a handful of numbers however long the log; entries themselves may be evicted
once applied and durable, where a reader can bring them back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence

from wheelsched.raft.faults import fault
from wheelsched.raft.messages import Entry

# (first index, last index) -> those entries, from the store.
LogReader = Callable[[int, int], Sequence[Entry]]


class Log:
    """Entries after a start (`start_index`, `start_term`): the last one dropped, or that came in a snapshot."""

    __slots__ = (
        "_cached_after",
        "_entries",
        "_flights",
        "_reader",
        "_run_firsts",
        "_run_terms",
        "cached_bytes",
        "durable",
        "last_index",
        "start_index",
        "start_term",
        "unwritten_from",
    )

    def __init__(
        self,
        start_index: int,
        start_term: int,
        entries: Sequence[Entry] = (),
        *,
        older_terms: Sequence[tuple[int, int]] = (),
        reader: LogReader | None = None,
    ) -> None:
        """All of `entries` are durable. They may begin behind the start; `older_terms` then holds (first index, term) of each run
        of the entries before them, which only the reader has."""
        self.start_index = start_index
        self.start_term = start_term
        self._run_firsts = [start_index]
        self._run_terms = [start_term]
        self._entries: list[Entry] = []
        self._cached_after = start_index  # index before the first entry in memory
        self._reader = reader
        self.last_index = start_index
        self.cached_bytes = 0
        self.durable = self.unwritten_from = 0  # set below
        # Last index of each Ready in flight, cut back where its entries were replaced meanwhile.
        self._flights: deque[int] = deque()
        for first, term in older_terms:
            if term != self._run_terms[-1]:
                self._begin_run(first, term)
        if entries:
            if older_terms and reader is None:
                fault("log_is_whole", start=start_index, first=entries[0].index)
            self._cached_after = self.last_index = (entries[0].index - 1) if older_terms else start_index
            self._extend(entries)
        self.durable = self.last_index
        self.unwritten_from = self.last_index + 1

    # ---- reading

    @property
    def first_index(self) -> int:
        return self.start_index + 1

    @property
    def last_term(self) -> int:
        return self._run_terms[-1]

    def term(self, index: int) -> int | None:
        """Term of the entry at `index`, None before the start and after the end. O(1) in the last run, O(log runs) before it."""
        if index > self.last_index or index < self.start_index:
            return None
        if index >= self._run_firsts[-1]:
            return self._run_terms[-1]
        return self._run_terms[bisect_right(self._run_firsts, index) - 1]

    def has(self, index: int, term: int) -> bool:
        return self.term(index) == term

    def entry(self, index: int) -> Entry:
        """The entry at an index in memory."""
        return self._entries[index - self._cached_after - 1]

    def is_cached(self, index: int) -> bool:
        return self._cached_after < index <= self.last_index

    def slice(self, first: int, last: int, max_bytes: int = 0) -> tuple[Entry, ...]:
        """Entries first to last, both included; cut after the first one or more whose payloads reach past `max_bytes` (0: never)."""
        if first > last:
            return ()
        if first <= self._cached_after:
            read = self._read(first, min(last, self._cached_after))
            return tuple(read[: _fitting(read, 0, len(read), max_bytes)] if max_bytes else read)
        start, stop = first - self._cached_after - 1, last - self._cached_after
        if max_bytes:
            stop = _fitting(self._entries, start, stop, max_bytes)
        return tuple(self._entries[start:stop])

    # A chunk that costs tens of µs from the store; the next append asks for the next one.
    _READ_MAX = 64

    def _read(self, first: int, last: int) -> Sequence[Entry]:
        last = min(last, first + self._READ_MAX - 1)
        if self._reader is None:
            fault("evicted_entries_can_be_read", first=first, cached_after=self._cached_after)
        entries = self._reader(first, last)
        if len(entries) != last + 1 - first or entries[0].index != first or entries[0].term != self.term(first):
            fault("reader_returns_the_log", first=first, last=last, got=len(entries))
        return entries

    def hint_by_term(self, index: int, term: int) -> tuple[int, int]:
        """Largest index not above `index` whose term is not above `term`, and its term (term 0: the log does not reach back).

        Everything above has a term that the other log cannot hold there; both sides skip it, so that finding the common point
        takes a refusal for each term at worst, one in practice (thesis 3.5)."""
        if index > self.last_index:
            index = self.last_index
        if index < self.start_index:
            return index, 0
        run = bisect_right(self._run_firsts, index) - 1
        while run >= 0 and self._run_terms[run] > term:
            run -= 1
        if run < 0:
            return max(self.start_index - 1, 0), 0
        if run + 1 < len(self._run_firsts):
            index = min(index, self._run_firsts[run + 1] - 1)
        return index, self._run_terms[run]

    def is_up_to_date(self, last_index: int, last_term: int) -> bool:
        """Whether a log ending so is not behind this one (thesis 3.6.1)."""
        own = self._run_terms[-1]
        return last_term > own or (last_term == own and last_index >= self.last_index)

    def find_conflict(self, entries: Sequence[Entry]) -> int:
        """Index of the first entry that is new or differs, 0 for none."""
        for entry in entries:
            if self.term(entry.index) != entry.term:
                return entry.index
        return 0

    # ---- writing

    def append(self, entries: Sequence[Entry]) -> None:
        """Add entries, replacing the tail from the first one's index on."""
        first = entries[0].index
        if not self.start_index < first <= self.last_index + 1:
            fault("log_grows_by_one", first=first, start=self.start_index, last=self.last_index)
        if first <= self.last_index:
            self._cut(first)
        self._extend(entries)

    def _extend(self, entries: Sequence[Entry]) -> None:
        index, term = self.last_index, self._run_terms[-1]
        for entry in entries:
            index += 1
            if entry.index != index or entry.term < term:
                fault("terms_and_indexes_grow", index=entry.index, expected=index, term=entry.term, last_term=term)
            if entry.term != term:
                term = entry.term
                self._begin_run(index, term)
            self.cached_bytes += len(entry.payload)
        self._entries.extend(entries)
        self.last_index = index

    def _begin_run(self, first: int, term: int) -> None:
        self._run_firsts.append(first)
        self._run_terms.append(term)

    def _cut(self, first: int) -> None:
        """Forget everything from `first` on, its durability too: when the disk confirms a write of an entry that was replaced
        meanwhile, that says nothing about its successor at the same index (etcd's append ABA race)."""
        if first <= self._cached_after:
            fault("cut_spares_applied_entries", first=first, cached_after=self._cached_after)
        offset = self._cached_after + 1
        self.cached_bytes -= sum(len(entry.payload) for entry in self._entries[first - offset :])
        del self._entries[first - offset :]
        while self._run_firsts[-1] >= first:
            self._run_firsts.pop()
            self._run_terms.pop()
        self.last_index = first - 1
        self.durable = min(self.durable, first - 1)
        self.unwritten_from = min(self.unwritten_from, first)
        self._cut_flights(first - 1)

    def _cut_flights(self, index: int) -> None:
        for position, mark in enumerate(self._flights):
            if mark > index:
                self._flights[position] = index

    def restore(self, index: int, term: int) -> None:
        """Start again behind a snapshot. Nothing of it is durable until the Ready that carries it is."""
        self.start_index = self.last_index = self._cached_after = index
        self.start_term = term
        self._run_firsts, self._run_terms = [index], [term]
        self._entries.clear()
        self.cached_bytes = 0
        self.durable = 0
        self.unwritten_from = index + 1
        self._cut_flights(0)

    def compact(self, index: int) -> None:
        """Drop everything up to `index`."""
        if index <= self.start_index:
            return
        term = self.term(index)
        if term is None or index > self.durable:
            fault("compacts_durable_entries", index=index, durable=self.durable, last=self.last_index)
        run = bisect_right(self._run_firsts, index) - 1
        self._run_firsts[: run + 1] = [index]
        self._run_terms[: run + 1] = [term]
        self.start_index, self.start_term = index, term
        if index > self._cached_after:
            self._drop_cached(index)

    def evict(self, up_to: int, max_bytes: int) -> None:
        """Drop entries up to `up_to` from memory, oldest first, down to half of `max_bytes`; only where a reader has them."""
        if self._reader is None or self.cached_bytes <= max_bytes:
            return
        index, excess = self._cached_after, self.cached_bytes - max_bytes // 2
        for entry in self._entries:
            if entry.index > up_to or excess <= 0:
                break
            index, excess = entry.index, excess - len(entry.payload)
        if index > self._cached_after:
            self._drop_cached(index)

    def _drop_cached(self, index: int) -> None:
        count = index - self._cached_after
        self.cached_bytes -= sum(len(entry.payload) for entry in self._entries[:count])
        del self._entries[:count]
        self._cached_after = index

    # ---- durability

    def take_unwritten(self, snapshot_index: int = 0) -> tuple[Entry, ...]:
        """Entries for the next Ready, which is in flight from now on. `snapshot_index`: of the snapshot it carries as well."""
        entries = self.slice(self.unwritten_from, self.last_index)
        self.unwritten_from = self.last_index + 1
        self._flights.append(self.last_index if entries else snapshot_index)
        return entries

    def persisted(self) -> None:
        """The oldest Ready in flight is durable."""
        self.durable = max(self.durable, self._flights.popleft())

    def check(self) -> None:
        """Slow and obvious: every claim of this class, for tests."""
        assert self.start_index <= self._cached_after <= self.last_index
        assert len(self._entries) == self.last_index - self._cached_after
        assert self.durable <= self.last_index and self.unwritten_from <= self.last_index + 1
        assert self._run_firsts[0] == self.start_index and self._run_terms[0] == self.start_term
        assert self._run_firsts == sorted(set(self._run_firsts)) and self._run_terms == sorted(set(self._run_terms))
        for position, entry in enumerate(self._entries):
            assert entry.index == self._cached_after + 1 + position
            assert entry.term == self.term(entry.index)
        assert self.cached_bytes == sum(len(entry.payload) for entry in self._entries)


def _fitting(entries: Sequence[Entry], start: int, stop: int, max_bytes: int) -> int:
    """Where to stop so that what lies between fits; at least one entry does. Looks no further than that."""
    size = len(entries[start].payload)
    for position in range(start + 1, stop):
        size += len(entries[position].payload)
        if size > max_bytes:
            return position
    return stop
