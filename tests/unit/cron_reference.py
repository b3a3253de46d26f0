"""What an expression means, the slow and obvious way: every minute is looked at, with `zoneinfo` and `datetime` as the clock.

Shares nothing with `wheelsched.cron` but the published rules. It takes correct expressions only and has no H.
"""

from __future__ import annotations

import calendar
import importlib.resources
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
EPOCH_ORDINAL = date(1970, 1, 1).toordinal()
DAY_MINUTES = 1_440
# Since 1970 no clock was put back by more than three hours (Casey); a day is plenty.
MARGIN_MINUTES = DAY_MINUTES
NAMES = {
    name: number
    for names, first in (("JAN FEB MAR APR MAY JUN JUL AUG SEP OCT NOV DEC", 1), ("SUN MON TUE WED THU FRI SAT", 0))
    for number, name in enumerate(names.split(), first)
}
ENDS = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 6))


@cache
def zone_info(name: str) -> ZoneInfo:
    """The package's copy, whatever TZPATH says."""
    with importlib.resources.files("tzdata").joinpath("zoneinfo", *name.split("/")).open("rb") as file:
        return ZoneInfo.from_file(file, key=name)


def value(text: str) -> int:
    return NAMES[text.upper()] if text.upper() in NAMES else int(text)


def values(item: str, low: int, high: int) -> set[int]:
    base, _, step = item.partition("/")
    if base == "*":
        first, last = low, high
    elif "-" in base:
        first, last = map(value, base.split("-"))
    else:
        first = value(base)
        last = high if step else first
    return set(range(first, last + 1, int(step or 1)))


@dataclass
class Reference:
    """One expression of five fields."""

    text: str

    def __post_init__(self) -> None:
        self.fields = self.text.upper().split()
        self.minutes, self.hours = (self._plain(index) for index in (0, 1))
        self.months = self._plain(3)
        self.interval = self.fields[0][0] == "*" or self.fields[1][0] == "*"
        self.date_matches = cache(self._date_matches)

    def _plain(self, index: int) -> set[int]:
        return set().union(*(values(item, *ENDS[index]) for item in self.fields[index].split(",")))

    def _date_matches(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        by_day = any(self._day_item(item, day) for item in self.fields[2].split(","))
        by_weekday = any(self._weekday_item(item, day) for item in self.fields[4].split(","))
        if self.fields[2][0] == "*" or self.fields[4][0] == "*":
            return by_day and by_weekday
        return by_day or by_weekday

    @staticmethod
    def _day_item(item: str, day: date) -> bool:
        length = calendar.monthrange(day.year, day.month)[1]
        if item == "LW":
            weekdays = [n for n in range(1, length + 1) if day.replace(day=n).isoweekday() < 6]
            return day.day == weekdays[-1]
        if item[0] == "L":
            return day.day == length - int(item[2:] or 0)
        if item[-1] == "W":
            wanted = int(item[:-1])
            if wanted > length or day.isoweekday() > 5:
                return False
            weekdays = [n for n in range(1, length + 1) if day.replace(day=n).isoweekday() < 6]
            return day.day == min(weekdays, key=lambda n: abs(n - wanted))
        return day.day in values(item, 1, 31)

    @staticmethod
    def _weekday_item(item: str, day: date) -> bool:
        length = calendar.monthrange(day.year, day.month)[1]
        if item[-1] == "L":
            return day.isoweekday() % 7 == value(item[:-1]) % 7 and day.day + 7 > length
        if "#" in item:
            weekday, nth = item.split("#")
            return day.isoweekday() % 7 == value(weekday) % 7 and (day.day - 1) // 7 + 1 == int(nth)
        return day.isoweekday() % 7 in {number % 7 for number in values(item, 0, 6)}

    def reading_matches(self, reading: int) -> bool:
        day, minute = divmod(reading, DAY_MINUTES)
        return minute % 60 in self.minutes and minute // 60 in self.hours and self.date_matches(date.fromordinal(day + EPOCH_ORDINAL))


@dataclass
class Wall:
    """The clock of a zone over the UTC minutes [start, end), read once for many expressions."""

    zone: str
    start: int
    end: int

    def __post_init__(self) -> None:
        tz = zone_info(self.zone)
        self.readings = []
        self.first: dict[int, int] = {}
        self.jumped: dict[int, int] = {}
        offset, offset_minutes = None, 0
        for minute in range(self.start - MARGIN_MINUTES, self.end):
            now_offset = datetime.fromtimestamp(minute * 60, tz).utcoffset()
            if now_offset != offset:
                assert now_offset is not None and now_offset % timedelta(minutes=1) == timedelta(0)
                offset, offset_minutes = now_offset, now_offset // timedelta(minutes=1)
            reading = minute + offset_minutes
            if self.readings:
                for missing in range(self.readings[-1] + 1, reading):
                    self.jumped.setdefault(missing, minute)
            self.first.setdefault(reading, minute)
            self.readings.append(reading)

    def runs(self, reference: Reference) -> list[int]:
        """All runs in [start, end), UTC minutes."""
        if reference.interval:
            shown = enumerate(self.readings[MARGIN_MINUTES:], self.start)
            return [minute for minute, reading in shown if reference.reading_matches(reading)]
        leads_to = {**self.jumped, **self.first}
        runs = {minute for reading, minute in leads_to.items() if reference.reading_matches(reading)}
        return sorted(minute for minute in runs if minute >= self.start)


def daily_runs(reference: Reference, zone: str, first: date, last: date) -> Iterator[int]:
    """All runs, UTC minutes, of a fixed-time expression with one time a day; not sorted, an instant may come twice."""
    (hour,), (minute,) = reference.hours, reference.minutes
    for ordinal in range(first.toordinal(), last.toordinal() + 1):
        day = date.fromordinal(ordinal)
        if reference.date_matches(day):
            yield instant_of(datetime(day.year, day.month, day.day, hour, minute), zone)


def instant_of(reading: datetime, zone: str) -> int:
    """The UTC minute at which the clock shows the reading for the first time, or the end of the jump over it."""
    tz = zone_info(zone)
    instant = reading.replace(tzinfo=tz).astimezone(UTC)
    if instant.astimezone(tz).replace(tzinfo=None) != reading:
        instant = reading.replace(tzinfo=UTC) - timedelta(hours=26)
        while instant.astimezone(tz).replace(tzinfo=None) < reading:
            instant += timedelta(minutes=1)
    return int((instant - EPOCH) // timedelta(minutes=1))
