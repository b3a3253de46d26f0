"""Time-zone files: TZif (RFC 9636) and the rule in its footer, as a sorted list of changes of offset.

The standard library reads the same files but does not tell when the next change is, and without that a search has to feel its
way. Offsets are seconds east of UTC; instants are UTC Unix seconds.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from wheelsched.cron.calendar import days_before_month, days_before_year, month_length, weekday

_HEADER: Final = struct.Struct(">4sc15x6I")
_DAY_S: Final = 86_400

Change = tuple[int, int]  # (instant, offset from then on)


@dataclass(frozen=True, slots=True)
class ZoneFile:
    """`first_offset_s` holds before the first of `changes`; `rule` after the last of them, for ever."""

    first_offset_s: int
    changes: tuple[Change, ...]
    rule: FooterRule | None


@dataclass(frozen=True, slots=True)
class RuleDate:
    """A date of every year and a time of day. `form`: M (week, weekday of a month), J (1-365, never 29 February) or N (0-365)."""

    form: str
    month: int
    week: int
    day: int
    time_s: int

    def local_s(self, year: int) -> int:
        """Seconds from 1970-01-01 00:00 to that reading, both of the same clock."""
        return (days_before_year(year) + self._day_of_year(year)) * _DAY_S + self.time_s

    def _day_of_year(self, year: int) -> int:
        leap = month_length(year, 2) == 29
        if self.form == "N":
            return self.day
        if self.form == "J":
            return self.day if leap and self.day >= 60 else self.day - 1
        before = days_before_month(year, self.month)
        first = (self.day - weekday(days_before_year(year) + before)) % 7
        last = month_length(year, self.month) - 1
        return before + min(first + (self.week - 1) * 7, first + (last - first) // 7 * 7)


@dataclass(frozen=True, slots=True)
class FooterRule:
    """The two changes of every year. A rule without daylight saving time is None and needs no object."""

    standard_s: int
    daylight_s: int
    starts: RuleDate
    ends: RuleDate

    def changes(self, year: int) -> tuple[Change, Change]:
        """In order of time: south of the equator daylight saving time ends first."""
        start = (self.starts.local_s(year) - self.standard_s, self.daylight_s)
        end = (self.ends.local_s(year) - self.daylight_s, self.standard_s)
        return (start, end) if start < end else (end, start)


def read_tzif(data: bytes) -> ZoneFile:
    """Raises ValueError for what is not a TZif file of version 2 or later."""
    if data[:4] != b"TZif" or data[4:5] < b"2":
        raise ValueError("not a TZif file of version 2 or later")
    # The first block repeats the second with 32-bit instants, for readers of before 2005.
    skipped = _HEADER.size + _block_bytes(data, 0, instant_bytes=4)
    _, _, _, _, _, time_count, type_count, _ = _HEADER.unpack_from(data, skipped)
    at = skipped + _HEADER.size
    instants = struct.unpack_from(f">{time_count}q", data, at)
    indices = data[at + 8 * time_count : at + 9 * time_count]
    types = list(struct.iter_unpack(">iBB", data[at + 9 * time_count : at + 9 * time_count + 6 * type_count]))
    footer = data[skipped + _HEADER.size + _block_bytes(data, skipped, instant_bytes=8) :].decode("ascii").strip("\n")
    changes = tuple(zip(instants, (types[index][0] for index in indices), strict=True))
    return ZoneFile(types[0][0], changes, parse_footer(footer))


def _block_bytes(data: bytes, at: int, *, instant_bytes: int) -> int:
    counts: tuple[int, ...] = _HEADER.unpack_from(data, at)[2:]
    is_ut, is_std, leap, times, types, chars = counts
    return times * (instant_bytes + 1) + types * 6 + chars + leap * (instant_bytes + 4) + is_std + is_ut


_NAME = r"(?:[A-Za-z]{3,}|<[A-Za-z0-9+-]+>)"
_TIME = r"[+-]?\d{1,3}(?::\d{2}(?::\d{2})?)?"
_FOOTER = re.compile(rf"{_NAME}({_TIME})(?:{_NAME}({_TIME})?,([^,/]+)(?:/({_TIME}))?,([^,/]+)(?:/({_TIME}))?)?", re.ASCII)


def parse_footer(footer: str) -> FooterRule | None:
    """The rule for after the last listed change; None when the offset stays as it is. ValueError if it is not understood."""
    if not footer:
        return None
    found = _FOOTER.fullmatch(footer)
    if found is None:
        raise ValueError(f"time-zone rule {footer!r} is not understood")
    standard, daylight, starts, starts_at, ends, ends_at = found.groups()
    if starts is None:
        return None
    # POSIX counts west of Greenwich as positive.
    standard_s = -_seconds(standard)
    daylight_s = -_seconds(daylight) if daylight else standard_s + 3_600
    return FooterRule(standard_s, daylight_s, _rule_date(starts, starts_at), _rule_date(ends, ends_at))


def _rule_date(text: str, time: str | None) -> RuleDate:
    time_s = _seconds(time) if time else 2 * 3_600
    if text.startswith("M"):
        month, week, day = map(int, text[1:].split("."))
        return RuleDate("M", month, week, day, time_s)
    if text.startswith("J"):
        return RuleDate("J", 0, 0, int(text[1:]), time_s)
    return RuleDate("N", 0, 0, int(text), time_s)


def _seconds(text: str) -> int:
    sign = -1 if text.startswith("-") else 1
    parts = [int(part) for part in text.lstrip("+-").split(":")]
    return sign * sum(part * unit for part, unit in zip(parts, (3_600, 60, 1), strict=False))


def changes_until(file: ZoneFile, year_end: int) -> Iterator[Change]:
    """Every change of offset before the end of `year_end`, in order of time; entries that change only the name are left out."""
    offset_s = file.first_offset_s
    for at_s, to_s in _all_changes(file, year_end):
        if to_s != offset_s:
            yield at_s, to_s
            offset_s = to_s


def _all_changes(file: ZoneFile, year_end: int) -> Iterator[Change]:
    yield from file.changes
    if file.rule is None:
        return
    last_s = file.changes[-1][0] if file.changes else -(1 << 62)
    for year in range(max(1970, year_of(last_s)), year_end + 1):
        for change in file.rule.changes(year):
            if change[0] > last_s:
                yield change


def year_of(at_s: int) -> int:
    """A year no later than that of the instant, and at most one earlier."""
    return 1970 + at_s // 31_622_400 if at_s >= 0 else 1969
