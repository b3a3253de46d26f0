"""Time zones by IANA name, from one pinned copy of the data.

`ZoneData.of_package()` reads the tzdata package and nothing else: `PYTHONTZPATH` and the operating system's copy, often years
old, would let two nodes of a cluster disagree. The object is one version. Watching for an update is asking it `is_current()` now and
then; after one make another, wait until `fingerprint()` stays as it is (an installer writes file by file), and `changed_zones`
names what has to be computed anew.
"""

from __future__ import annotations

import hashlib
import importlib.resources
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from difflib import get_close_matches
from importlib.resources.abc import Traversable
from itertools import accumulate
from pathlib import Path
from typing import Final

from wheelsched.core.errors import InvalidSchedule
from wheelsched.cron.calendar import CYCLE_DAYS, CYCLE_YEARS, YEARS_MAX, days_before_year
from wheelsched.cron.tzif import changes_until, read_tzif, year_of

CYCLE_S: Final = CYCLE_DAYS * 86_400
_LONG_AGO_S: Final = -(1 << 62)
_FOR_EVER_S: Final = 1 << 62
# The longest name has 32 characters; what is longer is not looked at closely.
_NAME_LENGTH_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Transition:
    """At `at_ms` the clock, which was about to show `reading_before`, shows `reading_after` (minutes, see `calendar.py`)."""

    at_ms: int
    reading_before: int
    reading_after: int

    @property
    def is_gap(self) -> bool:
        return self.reading_after > self.reading_before


@dataclass(frozen=True, slots=True, eq=False)
class Zone:
    """The offsets of one zone. `starts_s[i]` is the instant from which `offsets_s[i]` holds; seconds, UTC and east of it.

    `shown_s[i]` is the highest reading (seconds of the wall clock, exclusive) shown before `ends_s[i]`. It never falls, although
    the clock does: so a reading is first shown, or jumped over, in the first segment where `shown_s` is above it.
    """

    name: str
    digest: str
    starts_s: tuple[int, ...] = field(repr=False)
    ends_s: tuple[int, ...] = field(repr=False)
    offsets_s: tuple[int, ...] = field(repr=False)
    shown_s: tuple[int, ...] = field(repr=False)
    # From here on the calendar and the zone repeat every `CYCLE_S`.
    cycle_from_s: int

    def fold(self, at_s: int) -> int:
        """Seconds to take off an instant to bring it into the years the tuples cover; a multiple of `CYCLE_S`."""
        return max(0, (at_s - self.cycle_from_s) // CYCLE_S) * CYCLE_S

    def offset_s(self, at_s: int) -> int:
        return self.offsets_s[bisect_right(self.starts_s, at_s - self.fold(at_s)) - 1]

    def transitions(self, from_ms: int, to_ms: int) -> Iterator[Transition]:
        """Those with `from_ms <= at_ms < to_ms`. O(log n) and their number."""
        folded_s = self.fold(from_ms // 1000)
        index = bisect_right(self.starts_s, -(-from_ms // 1000) - folded_s - 1)
        while index < len(self.starts_s) and (self.starts_s[index] + folded_s) * 1000 < to_ms:
            at_s = self.starts_s[index] + folded_s
            before_s, after_s = at_s + self.offsets_s[index - 1], at_s + self.offsets_s[index]
            yield Transition(at_s * 1000, before_s // 60, after_s // 60)
            index += 1

    def local_text(self, at_ms: int) -> str:
        """RFC 3339 with the zone's offset, to the second: `2026-03-08T03:00:00-07:00`. OverflowError past the year 9999."""
        at_s = at_ms // 1000
        offset = timezone(timedelta(seconds=self.offset_s(at_s)))
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=at_s)).astimezone(offset).isoformat()


class ZoneData:
    """One version of the zone database. Zones are read when first asked for, and kept."""

    def __init__(self, root: Traversable) -> None:
        """`root` holds TZif files by zone name and `tzdata.zi`, as the tzdata package and most systems have them."""
        self._root = root
        self._zones: dict[str, Zone] = {}
        index = self._read_index_bytes()
        self.version, self.names = _read_index(index.decode("utf-8"))
        self._fingerprint = _fingerprint(self.version, index)

    @classmethod
    def of_package(cls) -> ZoneData:
        """The copy in the installed tzdata package."""
        return cls(importlib.resources.files("tzdata").joinpath("zoneinfo"))

    @classmethod
    def of_folder(cls, folder: Path) -> ZoneData:
        """A copy elsewhere, to try a patched tree."""
        return cls(folder)

    def fingerprint(self) -> str:
        """Version and digest of all the rules: `2026b-` and 32 hexadecimal digits. A patched copy of a version differs."""
        return self._fingerprint

    def is_current(self) -> bool:
        """Whether the files are still those that this was made from. Reads 100 KB: 0.2 ms, to be asked off the loop."""
        try:
            index = self._read_index_bytes()
        except OSError:
            return False  # being replaced
        return _fingerprint(self.version, index) == self._fingerprint

    def _read_index_bytes(self) -> bytes:
        return self._root.joinpath("tzdata.zi").read_bytes()

    def zone(self, name: str) -> Zone:
        """The zone of exactly that name, aliases included. InvalidSchedule for all else: offsets, rules, paths, `localtime`."""
        known = self._zones.get(name)
        if known is None:
            # Only names of the index reach the disk, so no path can.
            if name not in self.names:
                raise _unknown_zone(name, self.names, self.version)
            data = self._root.joinpath(*name.split("/")).read_bytes()
            known = self._zones[name] = build_zone(name, data)
        return known


def build_zone(name: str, data: bytes) -> Zone:
    """A zone from the bytes of its TZif file. O(years covered), about a millisecond."""
    file = read_tzif(data)
    last_s = max(file.changes[-1][0] if file.changes else 0, 0)
    # A whole year of the rule alone, so that nothing of the listed changes is still felt.
    cycle_from_year = year_of(last_s) + 3
    changes = list(changes_until(file, cycle_from_year + CYCLE_YEARS + YEARS_MAX + 1))
    starts_s = (_LONG_AGO_S, *(at_s for at_s, _ in changes))
    ends_s = (*starts_s[1:], _FOR_EVER_S)
    offsets_s = (file.first_offset_s, *(offset_s for _, offset_s in changes))
    shown_s = tuple(accumulate((end_s + offset_s for end_s, offset_s in zip(ends_s, offsets_s, strict=True)), max))
    digest = hashlib.blake2b(data, digest_size=16, person=b"ws-zone").hexdigest()
    return Zone(name, digest, starts_s, ends_s, offsets_s, shown_s, days_before_year(cycle_from_year) * 86_400)


def changed_zones(old: ZoneData, new: ZoneData, names: Iterable[str]) -> list[str]:
    """Those of `names`, in their order, whose clock may be another in `new`: by digest of the zone's file.

    A name that only one of the two knows has changed. So has one that `old` has never read and whose file has been replaced
    since: what it was can no longer be told, and to compute an instant once more does no harm.
    """
    if old.fingerprint() == new.fingerprint():
        return []
    old_is_there = old.is_current()
    return [name for name in names if _has_changed(old, new, name, old_is_there=old_is_there)]


def _has_changed(old: ZoneData, new: ZoneData, name: str, *, old_is_there: bool) -> bool:
    if name not in old.names or name not in new.names:
        return (name in old.names) != (name in new.names)
    if not (old_is_there or name in old._zones):
        return True
    return old.zone(name).digest != new.zone(name).digest


def _fingerprint(version: str, index: bytes) -> str:
    return f"{version}-{hashlib.blake2b(index, digest_size=16, person=b'ws-zone-data').hexdigest()}"


def _read_index(text: str) -> tuple[str, frozenset[str]]:
    """(version, names of zones and links) of a `tzdata.zi`."""
    lines = text.splitlines()
    first = lines[0].split() if lines else []
    if first[:2] != ["#", "version"] or len(first) != 3:
        raise ValueError("tzdata.zi does not begin with its version")
    parts = [line.split() for line in lines if line[:2] in ("Z ", "L ")]
    return first[2], frozenset(part[1] if part[0] == "Z" else part[2] for part in parts)


def _unknown_zone(name: str, names: frozenset[str], version: str) -> InvalidSchedule:
    shown = ascii(name) if len(name) <= _NAME_LENGTH_MAX else f"{name[:_NAME_LENGTH_MAX]!a}..."
    detail = f"time zone {shown} is not a name of the IANA database ({version}); {_zone_advice(name, names)}"
    return InvalidSchedule(detail, errors=[{"pointer": "/time_zone", "detail": detail}])


def _zone_advice(name: str, names: frozenset[str]) -> str:
    if not name:
        return "write UTC or a name such as Europe/Berlin"
    if len(name) <= _NAME_LENGTH_MAX:
        folded = {known.lower(): known for known in sorted(names)}
        meant = folded.get(name.strip().lower()) or next(iter(get_close_matches(name, sorted(names), n=1, cutoff=0.85)), None)
        if meant is not None:
            return f"did you mean {meant}?"
    if name == "localtime":
        return "the machine's own zone may differ between nodes: name it"
    if any(character.isdigit() for character in name):
        return "offsets and rules are not zones: write a name such as Europe/Berlin, or Etc/GMT+5 for five hours behind UTC"
    return "write a name such as Europe/Berlin"
