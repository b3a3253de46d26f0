"""What the cron dialects share: fields of items, values with names, and sets of values written in our grammar."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from wheelsched.imports.plan import Refused

_MONTHS: Final = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
WEEKDAYS: Final = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
_ITEM: Final = re.compile(r"(?P<base>[^/]*)(?:/(?P<step>.*))?")
REWRITE: Final = "correct it at the source, or create the schedule by hand"


@dataclass(frozen=True, slots=True)
class FieldKind:
    """One of the five fields: `low` to `high` are its values in our numbering (Sunday is 0)."""

    name: str
    low: int
    high: int
    names: Mapping[str, int]

    @property
    def everything(self) -> frozenset[int]:
        return frozenset(range(self.low, self.high + 1))

    def text(self, value: int) -> str:
        """A value as we write it: weekdays by name, because numbers mean different days in different dialects."""
        return WEEKDAYS[value] if self is WEEKDAY else str(value)


MINUTE: Final = FieldKind("minute", 0, 59, {})
HOUR: Final = FieldKind("hour", 0, 23, {})
DAY: Final = FieldKind("day of month", 1, 31, {})
MONTH: Final = FieldKind("month", 1, 12, {name: number for number, name in enumerate(_MONTHS, 1)})
WEEKDAY: Final = FieldKind("day of week", 0, 6, {name: number for number, name in enumerate(WEEKDAYS)})
FIELDS: Final = (MINUTE, HOUR, DAY, MONTH, WEEKDAY)


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a field as it was written: `first` is `*`, `?` or a value's text; None where the part is not there."""

    text: str
    first: str
    last: str | None
    step: str | None


def items_of(kind: FieldKind, text: str, dialect: str) -> list[Item]:
    """The items between commas. Raises Refused for an empty one."""
    found = []
    for part in text.split(","):
        if not part:
            raise Refused(f"{kind.name} {text!r} has an empty item between commas", REWRITE)
        match = _ITEM.fullmatch(part)
        assert match is not None
        first, hyphen, last = match["base"].partition("-")
        if not first or (hyphen and not last) or match["step"] == "":
            raise Refused(f"{kind.name} {part!r} is not complete, {dialect} has *, a, a-b and each with /step", REWRITE)
        found.append(Item(part, first, last if hyphen else None, match["step"]))
    return found


def spread(kind: FieldKind, first: int, last: int, step: int = 1) -> list[int]:
    """`first` to `last` by `step`, past the end of the field and on from its beginning if `last` is below `first`."""
    if first <= last:
        return list(range(first, last + 1, step))
    return [*range(first, kind.high + 1), *range(kind.low, last + 1)][::step]


def written(kind: FieldKind, values: Iterable[int]) -> str:
    """A set of values as a field that does not begin with `*`, as short as ranges make it: `0,15,30`, `MON-FRI`."""
    parts: list[str] = []
    run: list[int] = []
    for value in [*sorted(set(values)), None]:
        if run and value != run[-1] + 1:
            parts += [f"{kind.text(run[0])}-{kind.text(run[-1])}"] if len(run) > 2 else [kind.text(one) for one in run]
            run = []
        if value is not None:
            run.append(value)
    return ",".join(parts)
