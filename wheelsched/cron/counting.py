"""How many runs there are between two instants, without looking at each.

What the calendar names between the readings at either end is a product: matching dates times matching minutes of a day. The
clock changes in between are what is wrong with it, and each is mended by itself:

* fixed-time: the readings that one jump left out, and the one shown at its end, are one run.
* interval: the readings that a jump left out are no runs; those of a repeated hour are runs once more.

So the cost grows with the years and clock changes between the two, never with the runs; and not beyond 400 years, for then
everything repeats.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from wheelsched.cron.calendar import count_readings
from wheelsched.cron.expression import CronExpression, Kind
from wheelsched.cron.instants import reading_beyond
from wheelsched.cron.zones import CYCLE_S, Zone


def count_between(expression: CronExpression, zone: Zone, from_ms: int, to_ms: int) -> int:
    """How many runs there are with `from_ms <= run < to_ms`, of those since 1970. A year takes some ten microseconds."""
    from_s, to_s = max(-(-from_ms // 1000), 0), -(-to_ms // 1000)
    if to_s <= from_s:
        return 0
    count = _fixed_count if expression.kind is Kind.FIXED_TIME else _interval_count
    folded_s = zone.fold(from_s)
    from_s, to_s = from_s - folded_s, to_s - folded_s
    turn_from_s, turn_to_s = zone.cycle_from_s, zone.cycle_from_s + CYCLE_S
    if to_s <= turn_to_s:
        return count(expression, zone, from_s, to_s)
    turns, rest_s = divmod(to_s - turn_to_s, CYCLE_S)
    total = count(expression, zone, from_s, turn_to_s) + count(expression, zone, turn_from_s, turn_from_s + rest_s)
    return total + turns * count(expression, zone, turn_from_s, turn_to_s) if turns else total


def _fixed_count(expression: CronExpression, zone: Zone, from_s: int, to_s: int) -> int:
    total = count_readings(expression, reading_beyond(zone, from_s - 1), reading_beyond(zone, to_s - 1))
    for index in range(max(bisect_left(zone.starts_s, from_s), 1), bisect_left(zone.starts_s, to_s)):
        low_s, high_s = zone.shown_s[index - 1], zone.starts_s[index] + zone.offsets_s[index]
        if low_s < high_s:
            total -= max(count_readings(expression, -(-low_s // 60), high_s // 60 + 1) - 1, 0)
    return total


def _interval_count(expression: CronExpression, zone: Zone, from_s: int, to_s: int) -> int:
    if from_s == to_s:
        return 0
    first, last = bisect_right(zone.starts_s, from_s) - 1, bisect_left(zone.starts_s, to_s) - 1
    total = count_readings(expression, -(-(from_s + zone.offsets_s[first]) // 60), -(-(to_s + zone.offsets_s[last]) // 60))
    for index in range(first + 1, last + 1):
        start_s = zone.starts_s[index]
        before, after = -(-(start_s + zone.offsets_s[index - 1]) // 60), -(-(start_s + zone.offsets_s[index]) // 60)
        total -= count_readings(expression, before, after)
    return total
