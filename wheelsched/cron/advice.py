"""What a person may want to know about a schedule before it surprises them: sentences for the `warnings` of an answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from wheelsched.cron.calendar import next_reading, text_of
from wheelsched.cron.expression import CronExpression, Kind
from wheelsched.cron.instants import next_after
from wheelsched.cron.zones import Transition, Zone

AHEAD_MS: Final = 366 * 86_400_000
_HOURS_ALL: Final = (1 << 24) - 1


def warnings(expression: CronExpression, zone: Zone, now_ms: int) -> tuple[str, ...]:
    """A top-of-the-hour minute without need, no run at all, and each clock change of the coming year that skips or repeats a time."""
    found: list[str] = []
    if next_after(expression, zone, now_ms) is None:
        found.append(f"it never runs: the clock of {zone.name} skips every time it names (without * in minute and hour it would run)")
    if expression.minutes == 1 and not expression.hashed_minute:
        found.append("minute 0 is when most schedules run; if any minute will do, write H for one that is yours")
    for transition in zone.transitions(now_ms + 1, now_ms + AHEAD_MS + 1):
        found.extend(_on_change(expression, zone, transition))
    return tuple(found)


def _on_change(expression: CronExpression, zone: Zone, change: Transition) -> Iterator[str]:
    low, high = sorted((change.reading_before, change.reading_after))
    first = next_reading(expression, low)
    if first >= high or _goes_on_evenly(expression, high - low):
        return
    others = " (and others of that stretch)" if next_reading(expression, first + 1) < high else ""
    at = f"{text_of(first)}{others}"
    clock = f"the clock of {zone.name} goes from {_time(change.reading_before)} to {_time(change.reading_after)}"
    if change.is_gap and expression.kind is Kind.FIXED_TIME:
        yield f"{at} does not exist, {clock}; it runs at {text_of(change.reading_after)} instead"
    elif change.is_gap:
        yield f"{at} does not exist, {clock}; it does not run then (without * in minute and hour it would, right after)"
    elif expression.kind is Kind.FIXED_TIME:
        yield f"{at} comes twice, {clock}; it runs the first time only"
    else:
        yield f"{at} comes twice, {clock}; it runs both times (without * in minute and hour it would run once)"


def _goes_on_evenly(expression: CronExpression, shift_minutes: int) -> bool:
    """An interval through all hours keeps its rhythm over a change of whole hours: nothing anybody would notice."""
    return expression.kind is Kind.INTERVAL and expression.hours == _HOURS_ALL and shift_minutes % 60 == 0


def _time(reading: int) -> str:
    return text_of(reading)[11:]
