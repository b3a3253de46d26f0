"""Pages of jobs: the rows of all groups merged in the order of (fire_at, id).

Each group holds its unfinished jobs in `index` and its finished ones in `done`, both in that order, so a page is a merge of short
stretches read by range. Nothing is read from the start of a range that lost rows there: `RangeHeads` says where to begin.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterator, Sequence

from wheelsched.model import keys
from wheelsched.model.rows import DoneRow, JobState, decode_done, decode_state
from wheelsched.model.states import FINAL, Status
from wheelsched.node.face import JobFilter, JobPage, JobRecord
from wheelsched.store import Store
from wheelsched.store.heads import RangeHeads

# Rows looked at for one page at most: what has no index (labels) is filtered on the way, and a page may then be short.
LOOKED_AT_MAX = 5_000
_STRETCH_MIN, _STRETCH_MAX = 4, 256
_WAITING_OR_LEASED = frozenset(Status) - FINAL - {Status.DISCARDED}


class _Source:
    """One range of one group, read in stretches."""

    __slots__ = ("_end", "_family", "_position", "_rows", "_store", "_stretch", "group", "is_done")

    def __init__(self, store: Store, group: int, family: str, start: bytes, end: bytes) -> None:
        self._store = store
        self._family = family
        self._position = start
        self._end = end
        self._rows: Iterator[tuple[bytes, bytes]] = iter(())
        self._stretch = _STRETCH_MIN
        self.group = group
        self.is_done = family == keys.DONE

    def next(self) -> tuple[bytes, bytes] | None:
        """(position of 24 bytes, row), ascending."""
        row = next(self._rows, None)
        if row is None and self._position:
            rows = self._store.scan(self._family, self._position, self._end, self._stretch)
            # Few rows from each of many ranges at first; more where a range turns out to matter.
            self._position = rows[-1][0] + b"\0" if len(rows) == self._stretch else b""
            self._stretch = min(self._stretch * 4, _STRETCH_MAX)
            self._rows = iter(rows)
            row = next(self._rows, None)
        return None if row is None else (row[0][-24:], row[1])


class Listing:
    """Reads pages for one node, which completes the records of unfinished and finished jobs."""

    def __init__(
        self, store: Store, heads: RangeHeads,
        complete: Callable[[JobState], JobRecord | None], finished: Callable[[DoneRow], JobRecord],
    ) -> None:  # fmt: skip
        self._store = store
        self._heads = heads
        self._complete = complete
        self._finished = finished

    async def page(self, wanted: JobFilter, groups: Sequence[int], queues: Sequence[str], *, cursor: bytes | None, limit: int) -> JobPage:
        """The next `limit` matching jobs after `cursor`. Yields to the loop while it reads."""
        heap: list[tuple[bytes, int, bytes, _Source]] = []
        for number, source in enumerate(self._sources(wanted, groups, queues, cursor)):
            if (row := source.next()) is not None:
                heap.append((row[0], number, row[1], source))
            if number % 64 == 63:
                await asyncio.sleep(0)
        heapq.heapify(heap)
        jobs: list[JobRecord] = []
        position: bytes | None = None
        looked_at = 0
        while heap and len(jobs) < limit and looked_at < LOOKED_AT_MAX:
            position, number, row_bytes, source = heap[0]
            record = self._record(source, position, row_bytes)
            if record is not None and self._matches(record, wanted):
                jobs.append(record)
            following = source.next()
            if following is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (following[0], number, following[1], source))
            looked_at += 1
            if looked_at % 100 == 0:
                await asyncio.sleep(0)
        return JobPage(jobs, position if heap else None)

    def _sources(self, wanted: JobFilter, groups: Sequence[int], queues: Sequence[str], cursor: bytes | None) -> Iterator[_Source]:
        statuses = wanted.statuses or frozenset(Status)
        start = max(keys.time_prefix(wanted.from_ms), cursor + b"\0" if cursor else b"")
        end = keys.time_prefix(wanted.to_ms)
        if end <= start:
            return
        for queue in queues:
            for group in groups:
                if statuses & _WAITING_OR_LEASED:
                    prefix = keys.queue_prefix(group, wanted.tenant, queue)
                    head = max(prefix + start, self._heads.lower_bound(keys.INDEX, prefix))
                    yield _Source(self._store, group, keys.INDEX, head, prefix + end)
                for status in sorted(statuses & FINAL):
                    prefix = keys.done_prefix(group, wanted.tenant, queue, status)
                    yield _Source(self._store, group, keys.DONE, prefix + start, prefix + end)

    def _record(self, source: _Source, position: bytes, row: bytes) -> JobRecord | None:
        if source.is_done:
            return self._finished(decode_done(row))
        _, job_id = keys.parse_time_id(position)
        state_row = self._store.get(keys.STATE, keys.state_key(source.group, job_id))
        if state_row is None:
            return None
        state = decode_state(state_row)
        # A job that ended while the page was read comes from `done`, or came already.
        return None if state.status in FINAL else self._complete(state)

    def _matches(self, record: JobRecord, wanted: JobFilter) -> bool:
        if wanted.statuses and record.status not in wanted.statuses:
            return False
        run = record.state.run
        if wanted.schedule and (run is None or run.schedule != wanted.schedule):
            return False
        labels = record.spec.labels
        return all(labels.get(key) == value for key, value in wanted.labels)
