"""The instants at which a schedule runs: UTC Unix milliseconds in, UTC Unix milliseconds out.

Two kinds (`tests/vectors/README.md`, "Which instants"), and for each one search:

* fixed-time: every reading of the calendar leads to one instant, the first at which the clock shows it or has jumped over it.
  That instant never falls as the reading grows. So: the lowest reading that leads beyond `after`, the next one that matches,
  and back to UTC. One search of the calendar, however many clock changes lie between. Backwards the same: the readings below
  that one are those that lead no further, and the last of them that matches is the last run.
* interval: between two clock changes the clock is UTC plus a constant, so a search of the calendar settles a whole segment;
  and what was found empty stays empty, so a segment that shows nothing new costs a comparison.

Runs are counted, not enumerated (`counting.py`). All of them, forwards, backwards and counted, are one set of instants: those
since 1970. It may be empty, or end: `*/15 2 * 3 SUN#2` in New York names nothing but times that its clock has skipped since 2007.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Final

from wheelsched.cron.calendar import YEARS_MAX, next_reading, previous_reading, text_of
from wheelsched.cron.expression import CronExpression, Kind
from wheelsched.cron.zones import CYCLE_S, Zone

# How many runs one call lists at most; 100 is what an answer of the API shows.
LIST_MAX: Final = 100
# A search backwards from a folded instant must not reach the years before the cycle, whose clock changes are others.
_LOOK_BACK_S: Final = (YEARS_MAX + 1) * 366 * 86_400


def next_after(expression: CronExpression, zone: Zone, after_ms: int) -> int | None:
    """The first run strictly later than `after_ms`, which is 1970 or later. Well under a millisecond.

    None if there is none and never will be: then every date that comes has been looked at, in a few milliseconds.
    """
    after_s = after_ms // 1000
    folded_s = zone.fold(after_s)
    if expression.kind is Kind.FIXED_TIME:
        found_s: int | None = instant_of(zone, next_reading(expression, reading_beyond(zone, after_s - folded_s)))
    else:
        found_s = _next_interval(expression, zone, after_s - folded_s)
    if found_s is None:
        return None
    at_ms = (found_s + folded_s) * 1000
    assert at_ms > after_ms
    return at_ms


def last_before(expression: CronExpression, zone: Zone, before_ms: int) -> int | None:
    """The last run strictly earlier than `before_ms`, None if there is none since 1970. Costs what `next_after` costs."""
    until_s = -(-before_ms // 1000) - 1
    if until_s < 0:
        return None
    if expression.kind is Kind.FIXED_TIME:
        folded_s = zone.fold(until_s - _LOOK_BACK_S)
        found_s: int | None = instant_of(zone, previous_reading(expression, reading_beyond(zone, until_s - folded_s) - 1)) + folded_s
    else:
        found_s = _last_interval(expression, zone, until_s)
    if found_s is None or found_s < 0:
        return None
    at_ms = found_s * 1000
    assert at_ms < before_ms
    return at_ms


def upcoming(expression: CronExpression, zone: Zone, after_ms: int, count: int) -> list[int]:
    """The next `count` runs after `after_ms`, ascending; fewer if there are no more."""
    runs: list[int] = []
    for _ in range(count):
        at_ms = next_after(expression, zone, after_ms)
        if at_ms is None:
            break
        runs.append(at_ms)
        after_ms = at_ms
    return runs


def last_few(expression: CronExpression, zone: Zone, before_ms: int, count: int) -> list[int]:
    """The last `count` runs before `before_ms`, at most `LIST_MAX`, ascending; fewer if there are no more since 1970."""
    assert 0 <= count <= LIST_MAX
    runs: list[int] = []
    for _ in range(count):
        at_ms = last_before(expression, zone, before_ms)
        if at_ms is None:
            break
        runs.append(at_ms)
        before_ms = at_ms
    runs.reverse()
    return runs


def between(expression: CronExpression, zone: Zone, from_ms: int, to_ms: int) -> Iterator[int]:
    """The runs with `from_ms <= run < to_ms`, one by one: the caller sets the limit."""
    at_ms = next_after(expression, zone, from_ms - 1)
    while at_ms is not None and at_ms < to_ms:
        yield at_ms
        at_ms = next_after(expression, zone, at_ms)


def nominal_reading(expression: CronExpression, zone: Zone, at_ms: int) -> str:
    """What the wall clock should show at the run `at_ms`: `2026-03-08 02:30`, also on the day it jumps from 02:00 to 03:00.

    Where several missing readings became one run it is the first of them, unless the clock then shows one that matches as well:
    `0 2,3 * * *` runs at 03:00 that day as on any other.
    """
    jumped = jumped_reading(expression, zone, at_ms)
    return text_of((at_ms // 1000 + zone.offset_s(at_ms // 1000)) // 60 if jumped is None else jumped)


def jumped_reading(expression: CronExpression, zone: Zone, at_ms: int) -> int | None:
    """The reading that the clock jumped over and that the run `at_ms` stands for; None if it shows a matching one."""
    at_s = at_ms // 1000
    reading = (at_s + zone.offset_s(at_s)) // 60
    if expression.kind is Kind.INTERVAL or next_reading(expression, reading) == reading:
        return None
    folded_s = zone.fold(at_s)
    nominal = next_reading(expression, reading_beyond(zone, at_s - folded_s - 1))
    return nominal + folded_s // 60 if instant_of(zone, nominal) == at_s - folded_s else None


def reading_beyond(zone: Zone, at_s: int) -> int:
    """The lowest reading that leads to a later instant than `at_s`, for a fixed-time schedule."""
    index = bisect_right(zone.starts_s, at_s) - 1
    # What the clock has shown or jumped over by now: in a repeated hour the readings up to its end.
    reading_s = at_s + zone.offsets_s[index] + 1
    if index and zone.shown_s[index - 1] > reading_s:
        reading_s = zone.shown_s[index - 1]
    return -(-reading_s // 60)


def instant_of(zone: Zone, reading: int) -> int:
    """The first instant at which the clock shows the reading, or the end of the jump that left it out."""
    reading_s = reading * 60
    index = bisect_right(zone.shown_s, reading_s)
    return max(reading_s - zone.offsets_s[index], zone.starts_s[index])


def _next_interval(expression: CronExpression, zone: Zone, after_s: int) -> int | None:
    """From where the clock repeats itself, one turn without a run means there is none."""
    end_s = zone.cycle_from_s + CYCLE_S
    found_s = _first_shown(expression, zone, after_s + 1, end_s)
    if found_s is None:
        found_s = _first_shown(expression, zone, zone.cycle_from_s, end_s)
        return None if found_s is None else found_s + CYCLE_S
    return found_s


def _first_shown(expression: CronExpression, zone: Zone, from_s: int, to_s: int) -> int | None:
    """The first instant in [from_s, to_s) at which the clock shows a matching reading."""
    index = bisect_right(zone.starts_s, from_s) - 1
    empty_from_s, found_s = 1, 0  # readings in [empty_from_s, found_s) do not match; none known yet
    while from_s < to_s:
        offset_s = zone.offsets_s[index]
        reading_s = from_s + offset_s
        if not empty_from_s <= reading_s <= found_s:
            empty_from_s, found_s = reading_s, next_reading(expression, -(-reading_s // 60)) * 60
        at_s = found_s - offset_s
        if at_s < zone.ends_s[index]:
            return at_s if at_s < to_s else None
        from_s = zone.ends_s[index]
        index += 1
    return None


def _last_interval(expression: CronExpression, zone: Zone, until_s: int) -> int | None:
    """Turn by turn, for the tuples hold one; so nearly always the first look finds it."""
    folded_s = zone.fold(until_s)
    while True:
        from_s = zone.cycle_from_s if folded_s else 0
        found_s = _last_shown(expression, zone, from_s, until_s - folded_s)
        if found_s is not None:
            return found_s + folded_s
        if not folded_s:
            return None
        until_s = folded_s + from_s - 1
        folded_s -= CYCLE_S


def _last_shown(expression: CronExpression, zone: Zone, from_s: int, until_s: int) -> int | None:
    """The last instant in [from_s, until_s] at which the clock shows a matching reading."""
    index = bisect_right(zone.starts_s, until_s) - 1
    found_s, empty_until_s = 1, 0  # readings in (found_s, empty_until_s] do not match; none known yet
    while until_s >= from_s:
        offset_s = zone.offsets_s[index]
        reading_s = until_s + offset_s
        if not found_s <= reading_s <= empty_until_s:
            empty_until_s, found_s = reading_s, previous_reading(expression, reading_s // 60) * 60
        at_s = found_s - offset_s
        if at_s >= zone.starts_s[index]:
            return at_s if at_s >= from_s else None
        until_s = zone.starts_s[index] - 1
        index -= 1
    return None
