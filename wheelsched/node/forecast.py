"""How many jobs fall due in each minute to come, by tenant and queue: so that a spike is seen before it comes.

Waiting jobs are counted from their rows, which lie in order of time; of schedules the waiting occurrence has such a row, and those
after it are computed. What is not known yet (retries, jobs that clients will create) is not in it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from wheelsched.cron import Timing
from wheelsched.dispatch.timetable import Timetable
from wheelsched.model import keys
from wheelsched.model.rows import decode_course, decode_definition, decode_header
from wheelsched.model.states import Lane
from wheelsched.node.face import MinuteForecast
from wheelsched.store import Store

MINUTE_MS: Final = 60_000
_SLICE: Final = 500
# Occurrences of one schedule looked at one by one; of a schedule with more, minutes are counted instead.
_LISTED_MAX: Final = 2_000

Due = tuple[int, str, str]  # (start of the minute ms, tenant, queue)


async def forecast(store: Store, timetable: Timetable, groups: Sequence[int], *, from_ms: int, to_ms: int) -> Counter[Due]:
    """Jobs due by minute, tenant and queue, for minutes that begin in [from, to). Yields to the loop while it reads; O(jobs due and
    schedules)."""
    counts: Counter[Due] = Counter()
    for group in groups:
        for lane in (Lane.PRECISE, Lane.FLEXIBLE):
            await _count_rows(store, group, lane, from_ms, to_ms, counts)
        await _count_occurrences(store, timetable, group, from_ms, to_ms, counts)
    return counts


async def _count_rows(store: Store, group: int, lane: int, from_ms: int, to_ms: int, counts: Counter[Due]) -> None:
    start, end = keys.job_range(group, lane, from_ms), keys.job_range(group, lane, to_ms)
    while rows := store.scan(keys.JOBS, start, end, _SLICE):
        for key, row in rows:
            header = decode_header(row)
            counts[_minute(keys.parse_job_key(key)[2]), header.tenant, header.queue] += 1
        start = rows[-1][0] + b"\0"
        await asyncio.sleep(0)


async def _count_occurrences(store: Store, timetable: Timetable, group: int, from_ms: int, to_ms: int, counts: Counter[Due]) -> None:
    """Those after the waiting one, whose row is counted."""
    prefix = keys.courses_prefix(group)
    start = prefix
    while rows := store.scan(keys.SCHEDULES, start, keys.prefix_end(prefix), _SLICE):
        for key, row in rows:
            course = decode_course(row)
            if course.next_at_ms == -1 or course.next_at_ms >= to_ms:
                continue
            definition_row = store.get(keys.SCHEDULES, keys.definition_key(group, *keys.parse_schedule_key(key)))
            if definition_row is not None:
                definition = decode_definition(definition_row)
                timing, offset_ms = timetable.timing(definition), definition.offset_ms
                for at_ms, count in _spread(timing, max(course.next_at_ms + 1, from_ms - offset_ms), to_ms - offset_ms):
                    counts[_minute(at_ms + offset_ms), definition.tenant, definition.queue] += count
        start = rows[-1][0] + b"\0"
        await asyncio.sleep(0)


def _spread(timing: Timing, from_ms: int, to_ms: int) -> list[tuple[int, int]]:
    """(instant, runs) of a timing in [from, to)."""
    total = timing.count(from_ms, to_ms) if from_ms < to_ms else 0
    if total <= _LISTED_MAX:
        found = []
        at_ms = from_ms - 1
        while (at_ms := timing.next_after(at_ms)) != -1 and at_ms < to_ms:
            found.append((at_ms, 1))
        return found
    return [
        (at_ms, count)
        for at_ms in range(_minute(from_ms), to_ms, MINUTE_MS)
        if (count := timing.count(max(at_ms, from_ms), min(at_ms + MINUTE_MS, to_ms)))
    ]


def by_minute(counts: Iterable[tuple[int, str, int]]) -> list[MinuteForecast]:
    """(minute, queue, jobs), possibly several of one queue, as one entry for each minute, in order."""
    minutes: dict[int, Counter[str]] = {}
    for at_ms, queue, count in counts:
        minutes.setdefault(at_ms, Counter())[queue] += count
    return [
        MinuteForecast(at_ms, tuple(sorted(queues.items(), key=lambda item: (-item[1], item[0]))))
        for at_ms, queues in sorted(minutes.items())
    ]


def due_in_minute(store: Store, group: int, at_ms: int, *, most: int) -> int:
    """Jobs of one group that are due in the minute of an instant; at most about `most`."""
    start_ms = _minute(at_ms)
    count = 0
    for lane in (Lane.PRECISE, Lane.FLEXIBLE):
        start, end = keys.job_range(group, lane, start_ms), keys.job_range(group, lane, start_ms + MINUTE_MS)
        count += len(store.scan(keys.JOBS, start, end, most))
    return count


def _minute(at_ms: int) -> int:
    return at_ms - at_ms % MINUTE_MS
