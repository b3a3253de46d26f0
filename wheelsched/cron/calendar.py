"""Which readings of a wall clock match an expression, in plain integers.

A *reading* is what a clock on the wall shows, counted in minutes since it would have shown 1970-01-01 00:00. It is not an
instant: a clock may show one twice or never. Days are counted from 1970-01-01, weekdays from Sunday = 0.
"""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from wheelsched.cron.expression import CronExpression

EPOCH_ORDINAL: Final = date(1970, 1, 1).toordinal()
DAY_MINUTES: Final = 1_440
# The Gregorian calendar repeats after 400 years, weekdays included: 146,097 days are 20,871 weeks.
CYCLE_YEARS: Final = 400
CYCLE_DAYS: Final = 146_097
# No date test that can be met waits longer: a leap day on a given weekday comes after 40 years at most (2088 to 2128).
YEARS_MAX: Final = 41
LENGTHS: Final = (28, 29, 30, 31)

_LENGTHS: Final = ((31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31), (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31))
_BEFORE: Final = tuple(tuple(sum(lengths[:month]) for month in range(12)) for lengths in _LENGTHS)

assert CYCLE_DAYS % 7 == 0 and CYCLE_DAYS == CYCLE_YEARS * 365 + 97


def weekday(day: int) -> int:
    return (day + 4) % 7  # 1970-01-01 was a Thursday


def is_leap(year: int) -> bool:
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def month_length(year: int, month: int) -> int:
    return _LENGTHS[is_leap(year)][month - 1]


def days_before_month(year: int, month: int) -> int:
    """Days of the year before the first of the month."""
    return _BEFORE[is_leap(year)][month - 1]


def days_before_year(year: int) -> int:
    """Days from 1970-01-01 to the first of January."""
    past = year - 1
    return past * 365 + past // 4 - past // 100 + past // 400 + 1 - EPOCH_ORDINAL


def mask_index(length: int, first_weekday: int) -> int:
    """Place in `CronExpression.days` of the months with that many days whose first is that weekday."""
    return (length - 28) * 7 + first_weekday


def next_reading(expression: CronExpression, reading: int) -> int:
    """The first matching reading at or after `reading`. O(years until it matches): `YEARS_MAX` at most, 12 steps each."""
    day, minute_of_day = divmod(reading, DAY_MINUTES)
    today = date.fromordinal(day + EPOCH_ORDINAL)
    year, month, day_of_month = today.year, today.month, today.day
    left = 0
    if month in expression.months:
        first = day - day_of_month + 1
        left = expression.days[(_LENGTHS[is_leap(year)][month - 1] - 28) * 7 + (first + 4) % 7] >> day_of_month
        if left & 1:
            time = _next_time(expression, minute_of_day)
            if time >= 0:
                return day * DAY_MINUTES + time
        left &= ~1
    if left:
        day += _lowest(left)
    else:
        day = _first_day_after(expression, year, month)
    return day * DAY_MINUTES + expression.first_time


def previous_reading(expression: CronExpression, reading: int) -> int:
    """The last matching reading at or before `reading`. O(years since it matched), as `next_reading`."""
    day, minute_of_day = divmod(reading, DAY_MINUTES)
    today = date.fromordinal(day + EPOCH_ORDINAL)
    year, month, day_of_month = today.year, today.month, today.day
    past = 0
    if month in expression.months:
        first = day - day_of_month + 1
        past = expression.days[(_LENGTHS[is_leap(year)][month - 1] - 28) * 7 + (first + 4) % 7] & ((2 << day_of_month) - 1)
        if past >> day_of_month:
            time = _previous_time(expression, minute_of_day)
            if time >= 0:
                return day * DAY_MINUTES + time
            past &= ~(1 << day_of_month)
    if past:
        day -= day_of_month - _highest(past)
    else:
        day = _last_day_before(expression, year, month)
    return day * DAY_MINUTES + expression.last_time


def count_readings(expression: CronExpression, low: int, high: int) -> int:
    """How many matching readings there are from `low` to before `high`; minus as many if `high` is the lower one.

    So stretches add up whichever way the clock went: to c by way of b is what it is straight. O(years between).
    """
    low_day, low_minute = divmod(low, DAY_MINUTES)
    high_day, high_minute = divmod(high, DAY_MINUTES)
    low_year, low_days, low_matches = _place(expression, low_day)
    high_year, high_days, high_matches = (low_year, low_days, low_matches) if high_day == low_day else _place(expression, high_day)
    days = high_days - low_days
    if low_year < high_year:
        days += _days_in_years(expression, low_year, high_year)
    elif low_year > high_year:
        days -= _days_in_years(expression, high_year, low_year)
    count = days * expression.day_readings
    if low_matches:
        count -= _times_before(expression, low_minute)
    if high_matches:
        count += _times_before(expression, high_minute)
    return count


def _place(expression: CronExpression, day: int) -> tuple[int, int, int]:
    """(its year, how many days of that year match before it, 1 if it does itself)."""
    today = date.fromordinal(day + EPOCH_ORDINAL)
    year, month, day_of_month = today.year, today.month, today.day
    leap = is_leap(year)
    lengths, before, january = _LENGTHS[leap], _BEFORE[leap], days_before_year(year)
    days, count = expression.days, 0
    for candidate in expression.months:
        if candidate > month:
            break
        mask = days[(lengths[candidate - 1] - 28) * 7 + (january + before[candidate - 1] + 4) % 7]
        if candidate == month:
            return year, count + (mask & ((1 << day_of_month) - 1)).bit_count(), mask >> day_of_month & 1
        count += mask.bit_count()
    return year, count, 0


def _days_in_years(expression: CronExpression, first: int, end: int) -> int:
    """How many dates of those whole years match. Years with as many days that begin alike are alike: there are 14 kinds."""
    known: dict[int, int] = {}
    total = 0
    for year in range(first, end):
        leap = is_leap(year)
        january = days_before_year(year)
        kind = january % 7 * 2 + leap
        count = known.get(kind)
        if count is None:
            lengths, before = _LENGTHS[leap], _BEFORE[leap]
            masks = (expression.days[mask_index(lengths[month - 1], weekday(january + before[month - 1]))] for month in expression.months)
            count = known[kind] = sum(mask.bit_count() for mask in masks)
        total += count
    return total


def _times_before(expression: CronExpression, minute_of_day: int) -> int:
    """How many matching minutes of a day come before the given one."""
    hour, minute = divmod(minute_of_day, 60)
    count = (expression.hours & ((1 << hour) - 1)).bit_count() * expression.minutes.bit_count()
    if expression.hours >> hour & 1:
        count += (expression.minutes & ((1 << minute) - 1)).bit_count()
    return count


def _next_time(expression: CronExpression, minute_of_day: int) -> int:
    """The first matching minute of the day at or after the given one; -1 if the day is over."""
    hour, minute = divmod(minute_of_day, 60)
    hours = expression.hours >> hour
    if hours & 1:
        minutes = expression.minutes >> minute
        if minutes:
            return minute_of_day + _lowest(minutes)
        hours &= ~1
    if not hours:
        return -1
    return (hour + _lowest(hours)) * 60 + expression.first_time % 60


def _previous_time(expression: CronExpression, minute_of_day: int) -> int:
    """The last matching minute of the day at or before the given one; -1 if none has come yet."""
    hour, minute = divmod(minute_of_day, 60)
    hours = expression.hours & ((2 << hour) - 1)
    if hours >> hour:
        minutes = expression.minutes & ((2 << minute) - 1)
        if minutes:
            return hour * 60 + _highest(minutes)
        hours &= ~(1 << hour)
    if not hours:
        return -1
    return _highest(hours) * 60 + expression.last_time % 60


def _first_day_after(expression: CronExpression, year: int, month: int) -> int:
    """The first matching day in a later month than the given one."""
    days, months = expression.days, expression.months
    for step in range(YEARS_MAX + 1):
        leap = is_leap(year)
        lengths, before = _LENGTHS[leap], _BEFORE[leap]
        january = days_before_year(year)
        for candidate in months:
            if step or candidate > month:
                first = january + before[candidate - 1]
                mask = days[(lengths[candidate - 1] - 28) * 7 + (first + 4) % 7]
                if mask:
                    return first + _lowest(mask) - 1
        year += 1
    raise AssertionError(f"{expression.text!r} has no date in {YEARS_MAX} years from {year - YEARS_MAX}")


def _last_day_before(expression: CronExpression, year: int, month: int) -> int:
    """The last matching day in an earlier month than the given one."""
    days, months = expression.days, expression.months
    for step in range(YEARS_MAX + 1):
        leap = is_leap(year)
        lengths, before = _LENGTHS[leap], _BEFORE[leap]
        january = days_before_year(year)
        for candidate in reversed(months):
            if step or candidate < month:
                first = january + before[candidate - 1]
                mask = days[(lengths[candidate - 1] - 28) * 7 + (first + 4) % 7]
                if mask:
                    return first + _highest(mask) - 1
        year -= 1
    raise AssertionError(f"{expression.text!r} has no date in {YEARS_MAX} years to {year + YEARS_MAX}")


def _lowest(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def _highest(mask: int) -> int:
    return mask.bit_length() - 1


def text_of(reading: int) -> str:
    """`2026-03-08 02:30`."""
    day, minute_of_day = divmod(reading, DAY_MINUTES)
    hour, minute = divmod(minute_of_day, 60)
    return f"{date.fromordinal(day + EPOCH_ORDINAL).isoformat()} {hour:02}:{minute:02}"
