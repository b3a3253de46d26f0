"""The instants at which a schedule runs: UTC Unix milliseconds in, UTC Unix milliseconds out.

Two kinds (`tests/vectors/README.md`, "Which instants"), and for each one search:

* fixed-time: every reading of the calendar leads to one instant, the first at which the clock shows it or has jumped over it.
  That instant never falls as the reading grows. So: the lowest reading that leads beyond `after`, the next one that matches,
  and back to UTC. One search of the calendar, however many clock changes lie between.
* interval: between two clock changes the clock is UTC plus a constant, so a search of the calendar settles a whole segment;
  and what was found empty stays empty, so a segment that shows nothing new costs a comparison.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from wheelsched.cron.calendar import next_reading, text_of
from wheelsched.cron.expression import CronExpression, Kind
from wheelsched.cron.zones import Zone


def next_after(expression: CronExpression, zone: Zone, after_ms: int) -> int:
    """The first run strictly later than `after_ms`, which is 1970 or later. Always exists; well under a millisecond."""
    after_s = after_ms // 1000
    folded_s = zone.fold(after_s)
    if expression.kind is Kind.FIXED_TIME:
        at_s = _instant_of(zone, _fixed_reading(expression, zone, after_s - folded_s))
    else:
        at_s = _next_interval(expression, zone, after_s - folded_s)
    at_ms = (at_s + folded_s) * 1000
    assert at_ms > after_ms
    return at_ms


def upcoming(expression: CronExpression, zone: Zone, after_ms: int, count: int) -> list[int]:
    """The next `count` runs after `after_ms`, ascending."""
    runs: list[int] = []
    for _ in range(count):
        after_ms = next_after(expression, zone, after_ms)
        runs.append(after_ms)
    return runs


def between(expression: CronExpression, zone: Zone, from_ms: int, to_ms: int) -> Iterator[int]:
    """The runs with `from_ms <= run < to_ms`, one by one: the caller sets the limit."""
    at_ms = next_after(expression, zone, from_ms - 1)
    while at_ms < to_ms:
        yield at_ms
        at_ms = next_after(expression, zone, at_ms)


def next_every(every_ms: int, anchor_ms: int, after_ms: int) -> int:
    """The first of `anchor_ms + k * every_ms`, k = 0, 1, 2, ..., strictly later than `after_ms`. Elapsed time, no zone."""
    assert every_ms > 0
    if after_ms < anchor_ms:
        return anchor_ms
    return after_ms + every_ms - (after_ms - anchor_ms) % every_ms


def nominal_reading(expression: CronExpression, zone: Zone, at_ms: int) -> str:
    """What the wall clock should show at the run `at_ms`: `2026-03-08 02:30`, also on the day it jumps from 02:00 to 03:00.

    Where several missing readings became one run it is the first of them.
    """
    at_s = at_ms // 1000
    folded_s = zone.fold(at_s)
    reading = (at_s + zone.offset_s(at_s)) // 60
    if expression.kind is Kind.FIXED_TIME:
        nominal = _fixed_reading(expression, zone, at_s - folded_s - 1)
        if _instant_of(zone, nominal) == at_s - folded_s:
            reading = nominal + folded_s // 60
    return text_of(reading)


def _fixed_reading(expression: CronExpression, zone: Zone, after_s: int) -> int:
    """The first matching reading that leads to an instant after `after_s`."""
    index = bisect_right(zone.starts_s, after_s) - 1
    # What the clock has shown or jumped over by now: in a repeated hour the readings up to its end.
    reading_s = after_s + zone.offsets_s[index] + 1
    if index and zone.shown_s[index - 1] > reading_s:
        reading_s = zone.shown_s[index - 1]
    return next_reading(expression, -(-reading_s // 60))


def _instant_of(zone: Zone, reading: int) -> int:
    """The first instant at which the clock shows the reading, or the end of the jump that left it out."""
    reading_s = reading * 60
    index = bisect_right(zone.shown_s, reading_s)
    return max(reading_s - zone.offsets_s[index], zone.starts_s[index])


def _next_interval(expression: CronExpression, zone: Zone, after_s: int) -> int:
    from_s = after_s + 1
    index = bisect_right(zone.starts_s, from_s) - 1
    empty_from_s, found_s = 1, 0  # readings in [empty_from_s, found_s) do not match; none known yet
    while True:
        offset_s = zone.offsets_s[index]
        reading_s = from_s + offset_s
        if not empty_from_s <= reading_s <= found_s:
            empty_from_s, found_s = reading_s, next_reading(expression, -(-reading_s // 60)) * 60
        at_s = found_s - offset_s
        if at_s < zone.ends_s[index]:
            return at_s
        from_s = zone.ends_s[index]
        index += 1
