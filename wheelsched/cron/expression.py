"""Cron expressions: strict text to a frozen `CronExpression` (`tests/vectors/README.md`, "Expressions that are accepted")."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Final, NoReturn

from wheelsched.cron.calendar import LENGTHS, mask_index
from wheelsched.cron.fields import DAY, FIELDS, MONTH, FieldSet, day_masks, fault, parse_field, shown

EXPRESSION_LENGTH_MAX: Final = 1_000
MACROS: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_TOKEN: Final = re.compile(r"[^ \t]+")
# Every one of them comes with each of the seven first weekdays, within 400 years.
_LENGTHS_OF: Final = {month: (28, 29) if month == 2 else (30,) if month in (4, 6, 9, 11) else (31,) for month in range(1, 13)}


class Kind(Enum):
    """Decided by the text: *interval* if the minute or the hour field begins with `*`."""

    INTERVAL = "interval"
    FIXED_TIME = "fixed-time"


@dataclass(frozen=True, slots=True)
class CronExpression:
    """What an expression allows. Made by `parse`.

    `minutes` and `hours` have bit n set for value n. `days[mask_index(length, first weekday)]` has bit n set if day n of such a
    month matches, both day fields taken together. `resolved` is the five fields with macros expanded and H replaced, for people.
    """

    text: str
    resolved: str
    kind: Kind
    minutes: int = field(repr=False)
    hours: int = field(repr=False)
    months: tuple[int, ...] = field(repr=False)
    days: tuple[int, ...] = field(repr=False)
    first_time: int = field(repr=False)  # minute of the day of a matching date's first reading
    last_time: int = field(repr=False)  # and of its last
    day_readings: int = field(repr=False)  # how many it has
    hashed_minute: bool = field(repr=False)


def parse(text: str, *, name: str | None = None) -> CronExpression:
    """The meaning of an expression; `name`, the schedule's, is needed only for H.

    Raises InvalidSchedule, which names field, value, range and column, and says what to write instead. O(length).
    """
    if len(text) > EXPRESSION_LENGTH_MAX:
        fault(f"the expression has {len(text)} characters, the maximum is {EXPRESSION_LENGTH_MAX}", EXPRESSION_LENGTH_MAX + 1)
    _check_characters(text)
    tokens = [(found.group(), found.start() + 1) for found in _TOKEN.finditer(text)]
    if not tokens:
        fault("the expression is empty; write five fields: minute hour day-of-month month day-of-week", 1)
    if tokens[0][0].startswith("@"):
        tokens = [(token, tokens[0][1]) for token in _expand_macro(tokens).split()]
    _check_count(tokens)
    sets = [parse_field(kind, token, at, name) for kind, (token, at) in zip(FIELDS, tokens, strict=True)]
    return _build(text, sets)


def _build(text: str, sets: list[FieldSet]) -> CronExpression:
    minutes, hours, days, months, weekdays = sets
    allowed = _months(months.mask)
    masks = day_masks(days, weekdays)
    if not any(masks[mask_index(length, first)] for month in allowed for length in _LENGTHS_OF[month] for first in range(7)):
        _impossible(days, months, weekdays)
    interval = minutes.begins_with_star or hours.begins_with_star
    return CronExpression(
        text=text,
        resolved=" ".join(part.resolved for part in sets),
        kind=Kind.INTERVAL if interval else Kind.FIXED_TIME,
        minutes=minutes.mask,
        hours=hours.mask,
        months=allowed,
        days=masks,
        first_time=_lowest(hours.mask) * 60 + _lowest(minutes.mask),
        last_time=(hours.mask.bit_length() - 1) * 60 + minutes.mask.bit_length() - 1,
        day_readings=hours.mask.bit_count() * minutes.mask.bit_count(),
        hashed_minute=minutes.written.startswith("H"),
    )


@lru_cache(maxsize=4_096)  # all there can be; the tuples are shared
def _months(mask: int) -> tuple[int, ...]:
    return tuple(month for month in range(1, 13) if mask >> month & 1)


def _lowest(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def _check_characters(text: str) -> None:
    for column, character in enumerate(text, 1):
        if not (" " <= character <= "~" or character == "\t"):
            fault(f"character U+{ord(character):04X} is not allowed; between fields write spaces or tabs, else ASCII", column)


def _expand_macro(tokens: list[tuple[str, int]]) -> str:
    macro, column = tokens[0]
    if macro.lower() == "@every":
        fault("@every is not supported; write every_s with the number of seconds, and anchor_at to say from when", column)
    if macro.lower() == "@reboot":
        fault("@reboot is not a time; run the job by hand or by API", column)
    expansion = MACROS.get(macro.lower())
    if expansion is None:
        fault(f"macro {shown(macro)} is unknown; there are {', '.join(MACROS)}", column)
    if len(tokens) > 1:
        fault(f"{shown(tokens[1][0])} follows {macro}; a macro stands alone, it means {expansion}", tokens[1][1])
    return expansion


def _check_count(tokens: list[tuple[str, int]]) -> None:
    """Exactly five fields; and what else is found in crontabs is recognised, so that the message says what to do with it."""
    first, column = tokens[0]
    if first[0] in "'\"`":
        fault("the expression begins with a quote; leave the quotes out", column)
    if "=" in first:
        fault(f"{shown(first)} is not a field; write the zone in time_zone", column)
    for token, at in tokens:
        if token.startswith("#") and (len(tokens) > 5 or at == column):
            fault("comments are not allowed; leave it out", at)
    if len(tokens) == 5:
        return
    if len(tokens) < 5:
        if len(tokens) == 1 and f"@{first.lower()}" in MACROS:
            fault(f"{shown(first)} is not an expression; write @{first.lower()}", column)
        fault(
            f"the expression has {len(tokens)} of five fields (minute hour day-of-month month day-of-week)",
            tokens[-1][1] + len(tokens[-1][0]),
        )
    if len(tokens) == 6 and re.fullmatch(r"(?:19|20)[0-9]{2}.*", tokens[5][0]):
        fault(f"the expression has six fields; drop the year {shown(tokens[5][0])}, use start_at and end_at", tokens[5][1])
    if len(tokens) == 6:
        fault("the expression has six fields; drop the seconds, the first, or use every_s for less than a minute", tokens[5][1])
    if len(tokens) == 7:
        fault("the expression has seven fields; drop the seconds, the first, and the year, the last", tokens[5][1])
    fault(f"the expression has {len(tokens)} fields; five are minute hour day-of-month month day-of-week", tokens[5][1])


def _impossible(days: FieldSet, months: FieldSet, weekdays: FieldSet) -> NoReturn:
    when = f"{DAY.name} {shown(days.written)} in {MONTH.name} {shown(months.written)}"
    if weekdays.written != "*":
        when += f" on day of week {shown(weekdays.written)}"
    longest = max(max(_LENGTHS_OF[month]) for month in _months(months.mask))
    fault(f"{when} never comes (days 1-{longest}); change the day or the month, the schedule would never run", days.column)


assert set(LENGTHS) == {length for lengths in _LENGTHS_OF.values() for length in lengths}
