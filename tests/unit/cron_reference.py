"""What an expression means, the slow and obvious way: every minute is looked at, with `zoneinfo` and `datetime` as the clock.

Shares nothing with `wheelsched.cron` but the published rules. It takes correct expressions only and has no H. At the end, what
the tests draw at random: expressions, and zones that change their clock as none does.
"""

from __future__ import annotations

import calendar
import importlib.resources
import io
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import cache
from typing import Any
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

    tz: ZoneInfo
    start: int
    end: int

    def __post_init__(self) -> None:
        self.readings: list[int] = []
        self.first: dict[int, int] = {}
        self.jumped: dict[int, int] = {}
        for minute in range(self.start - MARGIN_MINUTES, self.end):
            # What it shows, not what it says its offset is: that it finds by the wall clock, and with two changes close by not at all.
            shown = datetime.fromtimestamp(minute * 60, self.tz)
            assert shown.second == 0
            reading = (shown.toordinal() - EPOCH_ORDINAL) * DAY_MINUTES + shown.hour * 60 + shown.minute
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


def tzif(footer: str, changes: list[tuple[int, int]] | None = None) -> bytes:
    """A zone file: UTC, then from each instant (seconds) an offset (seconds), then the rule."""
    changes = changes or []
    types = struct.pack(">iBB", 0, 0, 0) + b"".join(struct.pack(">iBB", offset_s, 0, 0) for _, offset_s in changes)
    first = struct.pack(">4sc15x6I", b"TZif", b"2", 0, 0, 0, 0, 1, 4) + struct.pack(">iBB", 0, 0, 0) + b"UTC\0"
    header = struct.pack(">4sc15x6I", b"TZif", b"2", 0, 0, 0, len(changes), len(changes) + 1, 4)
    instants = b"".join(struct.pack(">q", at_s) for at_s, _ in changes) + bytes(range(1, len(changes) + 1))
    return first + header + instants + types + b"UTC\0" + f"\n{footer}\n".encode()


def zone_info_of(data: bytes) -> ZoneInfo:
    return ZoneInfo.from_file(io.BytesIO(data))


class Draw:
    """Expressions that match something near a given moment of the wall clock more often than chance would have it."""

    def __init__(self, choose: Callable[[list[Any]], Any], near: datetime) -> None:
        self.choose = choose
        self.near = near

    def expression(self) -> str:
        minute = self._field(0, 59, [0, 15, 30, 45, 59, self.near.minute])
        hours = [(self.near.hour + shift) % 24 for shift in (-3, -2, -1, 0, 1, 2)]
        hour = self._field(0, 23, [*hours, *hours, 0, 23])
        day = self.choose(["*", "*", "*", "day", "rule", "day,rule"])
        if day != "*":
            day = ",".join(self._day(kind) for kind in day.split(","))
        month = self.choose(["*", "*", "month"])
        if month != "*":
            month = self._field(1, 12, [self.near.month, self.near.month, self.near.month % 12 + 1])
        weekday = self.choose(["*", "*", "*", "day", "rule", "day,rule"])
        if weekday != "*":
            weekday = ",".join(self._weekday(kind) for kind in weekday.split(","))
        return f"{minute} {hour} {day} {month} {weekday}"

    def _field(self, low: int, high: int, liked: list[int]) -> str:
        return ",".join(self._item(low, high, liked) for _ in range(self.choose([1, 1, 1, 2, 3])))

    def _item(self, low: int, high: int, liked: list[int]) -> str:
        first, second = sorted((self.choose(liked), self.choose(list(range(low, high + 1)))))
        step = self.choose([1, 2, 3, 5, 7, 15, 30, 99])
        return str(
            self.choose(
                [
                    "*",
                    f"*/{step}",
                    self.choose(liked),
                    self.choose(liked),
                    f"{first}-{second}",
                    f"{first}-{second}/{step}",
                    f"{first}/{step}",
                ]
            )
        )

    def _day(self, kind: str) -> str:
        day = self.near.day
        if kind == "day":
            return self._field(1, 31, [day, day, day % 28 + 1, 29, 30, 31, 1])
        return str(self.choose(["L", f"L-{self.choose([1, 2, 10, 30])}", f"{self.choose([day, 1, 15, 30, 31])}W", "LW"]))

    def _weekday(self, kind: str) -> str:
        weekday = self.near.isoweekday() % 7
        if kind == "day":
            return self._field(0, 6, [weekday, weekday, (weekday + 1) % 7]).replace("0-6", "SUN-7")
        return str(self.choose([f"{weekday}L", "FRIL", f"{weekday}#{(self.near.day - 1) // 7 + 1}", "MON#1", "7#5"]))
