"""One field of a cron expression: text to values, and every way of getting it wrong (rules 5 to 11 and "Hashed fields").

Columns count from 1 in the text as it was sent.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Final, NoReturn

from wheelsched.core.errors import InvalidSchedule
from wheelsched.cron.calendar import LENGTHS, mask_index

_SHOWN_MAX: Final = 40  # characters of the caller's text repeated in a message
_VALUE: Final = re.compile(r"[0-9]{1,3}|[A-Za-z]{3}")
_STEP: Final = re.compile(r"[0-9]{1,3}")
_HASHED: Final = re.compile(r"H(?:\((?P<low>[0-9A-Za-z]*)-(?P<high>[0-9A-Za-z]*)\))?(?:/(?P<step>.*))?")
_NUMBER: Final = r"[0-9]{1,3}"
_DAY_RULES: Final = re.compile(rf"(?P<last_weekday>LW)|L(?:-(?P<before_last>{_NUMBER}))?|(?P<nearest>{_NUMBER})W", re.ASCII | re.IGNORECASE)
_WEEKDAY_RULES: Final = re.compile(rf"(?P<weekday>{_NUMBER}|[A-Z]{{3}})(?:L|#(?P<nth>{_NUMBER}))", re.ASCII | re.IGNORECASE)

_MONTHS: Final = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_WEEKDAYS: Final = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")


@dataclass(frozen=True, slots=True)
class Field:
    """`low` to `high` are the values; `*` and `N/S` end at `star_high`, `H` alone at `hash_high`."""

    name: str
    person: bytes  # makes the hash of each field its own; part of what is promised never to change
    low: int
    high: int
    star_high: int
    hash_high: int
    names: Mapping[str, int]


MINUTE: Final = Field("minute", b"ws-cron-minute", 0, 59, 59, 59, {})
HOUR: Final = Field("hour", b"ws-cron-hour", 0, 23, 23, 23, {})
DAY: Final = Field("day of month", b"ws-cron-day", 1, 31, 31, 28, {})
MONTH: Final = Field("month", b"ws-cron-month", 1, 12, 12, 12, {name: number for number, name in enumerate(_MONTHS, 1)})
WEEKDAY: Final = Field("day of week", b"ws-cron-weekday", 0, 7, 6, 6, {name: number for number, name in enumerate(_WEEKDAYS)})
FIELDS: Final = (MINUTE, HOUR, DAY, MONTH, WEEKDAY)


class Rule(Enum):
    BEFORE_LAST = "L-n"
    NEAREST_WEEKDAY = "nW"
    LAST_WEEKDAY = "LW"
    LAST = "wL"
    NTH = "w#k"


@dataclass(frozen=True, slots=True)
class DayRule:
    """A day that depends on the month. `number` is n or w, `nth` is k."""

    rule: Rule
    number: int = 0
    nth: int = 0

    def day(self, length: int, first_weekday: int) -> int:
        """The day of a month of that length whose first is that weekday; 0 if it has none."""

        def weekday(day: int) -> int:
            return (first_weekday + day - 1) % 7

        match self.rule:
            case Rule.BEFORE_LAST:
                return max(0, length - self.number)
            case Rule.NEAREST_WEEKDAY:
                day = self.number
                if day > length or weekday(day) not in (0, 6):
                    return day if day <= length else 0
                if weekday(day) == 6:
                    return day - 1 if day > 1 else 3
                return day + 1 if day < length else day - 2
            case Rule.LAST_WEEKDAY:
                return length - {6: 1, 0: 2}.get(weekday(length), 0)
            case Rule.LAST:
                return length - (weekday(length) - self.number) % 7
            case Rule.NTH:
                day = 1 + (self.number - first_weekday) % 7 + (self.nth - 1) * 7
                return day if day <= length else 0


@dataclass(frozen=True, slots=True)
class FieldSet:
    """What a field allows. Bit n of `mask` is value n (7 as a weekday is 0); `rules` add to it; `resolved` is the text without H."""

    written: str
    resolved: str
    column: int
    mask: int
    rules: tuple[DayRule, ...] = ()

    @property
    def begins_with_star(self) -> bool:
        return self.written.startswith("*")


def day_masks(days: FieldSet, weekdays: FieldSet) -> tuple[int, ...]:
    """Which days match, bit n for day n, of each of the 28 kinds of month (`calendar.mask_index`); empty masks included."""
    both = days.begins_with_star or weekdays.begins_with_star
    return _day_masks(days.mask, days.rules, weekdays.mask, weekdays.rules, both)


# A million schedules have a few hundred different pairs of day fields: they share the tuples, and parsing stays cheap.
@lru_cache(maxsize=4_096)
def _day_masks(days: int, day_rules: tuple[DayRule, ...], weekdays: int, weekday_rules: tuple[DayRule, ...], both: bool) -> tuple[int, ...]:
    masks = [0] * (len(LENGTHS) * 7)
    for length in LENGTHS:
        for first in range(7):
            by_day = days & ((2 << length) - 2)
            for rule in day_rules:
                by_day |= 1 << rule.day(length, first)
            by_weekday = sum(1 << day for day in range(1, length + 1) if weekdays >> (first + day - 1) % 7 & 1)
            for rule in weekday_rules:
                by_weekday |= 1 << rule.day(length, first)
            # Bit 0 is where rules without a day in this month have put theirs.
            masks[mask_index(length, first)] = (by_day & by_weekday if both else by_day | by_weekday) & ~1
    return tuple(masks)


def parse_field(field: Field, text: str, column: int, name: str | None) -> FieldSet:
    """The values of one field. `name` is what H is hashed from. InvalidSchedule naming field, value, range and column."""
    if text.startswith("H") and (hashed := _HASHED.fullmatch(text)):
        resolved, mask = _hashed(field, hashed, column, name)
        return FieldSet(text, resolved, column, mask)
    mask, rules = 0, []
    for item, at in _items(text, column):
        rule = _day_rule(field, item, at)
        if rule is not None:
            rules.append(rule)
        else:
            mask |= _mask(field, _item_values(field, item, at))
    return FieldSet(text, text, column, mask, tuple(rules))


def _items(text: str, column: int) -> Iterator[tuple[str, int]]:
    for item in text.split(","):
        yield item, column
        column += len(item) + 1


def _mask(field: Field, values: range) -> int:
    mask = 0
    for value in values:
        mask |= 1 << (value % 7 if field is WEEKDAY else value)
    return mask


def _item_values(field: Field, item: str, column: int) -> range:
    if not item:
        fault(f"{field.name} has an empty item between commas", column)
    base, slash, step_text = item.partition("/")
    step = _step(field, step_text, column + len(base) + 1) if slash else 1
    if base == "*":
        return range(field.low, field.star_high + 1, step)
    first_text, hyphen, last_text = base.partition("-")
    first = _value(field, first_text, column, item)
    if hyphen:
        last = _value(field, last_text, column + len(first_text) + 1, item)
        if first > last:
            _backwards(field, base, first, last, column)
    elif slash:
        last = field.star_high
        if first > last:  # 7/S
            fault(f"{field.name} {shown(item)} runs from {first} to {last}; write 0/{step_text} to count from Sunday", column)
    else:
        last = first
    return range(first, last + 1, step)


def _step(field: Field, text: str, column: int) -> int:
    if not _STEP.fullmatch(text):
        problem = f"step {shown(text)} is not a number of one to three digits" if text else "has no step after '/'"
        fault(f"{field.name} {problem}; write */15, 10-40/5 or 5/20", column)
    step = int(text)
    if step < 1:
        fault(f"{field.name} step {text} is below 1", column)
    return step


def _value(field: Field, text: str, column: int, item: str) -> int:
    if not _VALUE.fullmatch(text) or (text.isalpha() and text.upper() not in field.names):
        fault(f"{field.name} {_not_a_value(field, text, item)}", column)
    value = int(text) if text.isdigit() else field.names[text.upper()]
    if not field.low <= value <= field.high:
        fault(f"{field.name} {text} is out of range {field.low}-{field.high}", column)
    return value


def _backwards(field: Field, base: str, first: int, last: int, column: int) -> NoReturn:
    if field is WEEKDAY and last == 0:
        instead = f"{first}-7"
    else:
        head = f"{first}-{field.star_high}" if first != field.star_high else f"{first}"
        tail = f"{field.low}-{last}" if last != field.low else f"{last}"
        instead = f"{head},{tail}"
    fault(f"{field.name} range {shown(base)} runs backwards ({first} is above {last}); write {instead}", column)


def _not_a_value(field: Field, text: str, item: str) -> str:
    """What is wrong with `text` where a value was expected, and what to write."""
    what = f"{shown(text)} is not a value" if text == item else f"{shown(text)} in {shown(item)} is not a value"
    names = list(field.names)
    allowed = f"{field.low}-{field.high} or {names[0]}..{names[-1]}" if names else f"{field.low}-{field.high}"
    return f"{what}; {_advice(field, text.upper(), item.upper())} (allowed: {allowed})"


def _advice(field: Field, text: str, item: str) -> str:
    """What to write instead, by what the text seems to have meant. Both in upper case."""
    if "?" in item:
        return "'?' is Quartz's: write *"
    if "~" in item:
        low, _, high = item.partition("~")
        return f"there are no random ranges: write H({low or field.low}-{high or field.star_high}) for a value that stays the same"
    if item == "R" or item.startswith(("R/", "R(")):
        return f"there are no random values: write H{item[1:]} for a value that stays the same"
    if item == "H" or item.startswith(("H/", "H(")):
        return "H, in upper case, is a whole field and in no list: H, H/n, H(a-b) or H(a-b)/n"
    if not text:
        return "a value is missing"
    if text.isdigit():
        return "a value has one to three digits"
    if text.isalpha() and text[:3] in field.names:
        return f"names have three letters: write {text[:3]}"
    for other in (MONTH, WEEKDAY):
        if text in other.names and other is not field:
            return f"that is a name of the {other.name} field"
    if "#" in item or item.endswith("W") or re.search(r"[0-9A-Z]L$|^L", item):
        return _rule_advice(field, item)
    if "*" in text:
        return "* stands alone or before a step: * or */n"
    return "write *, a value, a-b, or one of these with a step, as in */15"


def _rule_advice(field: Field, item: str) -> str:
    if field is DAY:
        if "#" in item:
            return "w#k belongs in the day-of-week field"
        return "L, L-n, nW and LW stand alone, without range or step"
    if field is WEEKDAY:
        if item == "L":
            return "write SATL for the last Saturday, or L in the day-of-month field for the last day"
        return "wL and w#k (k 1-5) take one weekday, without range or step, as in FRIL or MON#2"
    return "L, W and # belong in the day fields"


def _day_rule(field: Field, item: str, column: int) -> DayRule | None:
    """The rule an item stands for; None if it is an ordinary one."""
    if field is DAY and (found := _DAY_RULES.fullmatch(item)):
        if found["last_weekday"]:
            return DayRule(Rule.LAST_WEEKDAY)
        if found["nearest"]:
            return DayRule(Rule.NEAREST_WEEKDAY, _within(field, item, int(found["nearest"]), 1, 31, column))
        if found["before_last"]:
            return DayRule(Rule.BEFORE_LAST, _within(field, item, int(found["before_last"]), 1, 30, column))
        return DayRule(Rule.BEFORE_LAST)
    if field is WEEKDAY and (found := _WEEKDAY_RULES.fullmatch(item)):
        weekday = _value(field, found["weekday"], column, item) % 7
        if found["nth"] is None:
            return DayRule(Rule.LAST, weekday)
        return DayRule(Rule.NTH, weekday, _within(field, item, int(found["nth"]), 1, 5, column))
    return None


def _within(field: Field, item: str, value: int, low: int, high: int, column: int) -> int:
    if not low <= value <= high:
        fault(f"{field.name} {shown(item)}: {value} is out of range {low}-{high}", column)
    return value


def _hashed(field: Field, found: re.Match[str], column: int, name: str | None) -> tuple[str, int]:
    """(the field without H, its mask). The digest is uniform over 2^128, so its remainder is as good as uniform."""
    item = found.group()
    if name is None:
        fault(f"{field.name} {shown(item)} is hashed from the schedule's name, and there is none; give it one", column)
    low, high, offset_max = field.low, field.hash_high, field.hash_high - field.low
    if found["low"] is not None:
        low = _value(field, found["low"], column + found.start("low"), item)
        high = _value(field, found["high"], column + found.start("high"), item)
        if low > high:
            _backwards(field, f"{found['low']}-{found['high']}", low, high, column + found.start("low"))
        offset_max = high - low
    digest = hashlib.blake2b(name.encode(), digest_size=16, person=field.person).digest()
    if found["step"] is None:
        value = low + int.from_bytes(digest, "big") % (offset_max + 1)
        return str(value), _mask(field, range(value, value + 1))
    step = _step(field, found["step"], column + found.start("step"))
    if found["low"] is None:
        # Every value counts, but the first lies where each month has it and the field is never left empty by a large step.
        high = field.star_high
    first = low + int.from_bytes(digest, "big") % min(step, offset_max + 1)
    resolved = f"{first}-{high}/{step}" if first + step <= high else str(first)
    return resolved, _mask(field, range(first, high + 1, step))


def shown(text: str) -> str:
    """The caller's text in quotes, ASCII, cut."""
    return ascii(text) if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]!a}..."


def fault(problem: str, column: int) -> NoReturn:
    detail = f"{problem}, column {column}"
    raise InvalidSchedule(detail, errors=[{"pointer": "/cron", "detail": detail}])
