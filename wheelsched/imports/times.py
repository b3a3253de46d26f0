"""Instants as texts and as readings of a zone's clock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

from wheelsched.cron import Zone

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_NAIVE_EPOCH: Final = datetime(1970, 1, 1)
_MS: Final = timedelta(milliseconds=1)
_DAY_S: Final = 86_400


def instant_text(at_ms: int) -> str:
    """RFC 3339 in UTC, as the API writes it: milliseconds only where they are not zero."""
    text = (_EPOCH + timedelta(milliseconds=at_ms)).isoformat(timespec="milliseconds" if at_ms % 1000 else "seconds")
    return text.replace("+00:00", "Z")


def parse_instant(text: str, zone: Zone | None = None) -> int:
    """UTC milliseconds of an ISO 8601 text. One without an offset is a reading of `zone`; ValueError if there is none."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is not None:
        return (moment - _EPOCH) // _MS
    if zone is None:
        raise ValueError(f"{text!r} has no offset")
    reading_ms = (moment - _NAIVE_EPOCH) // _MS
    return instants_of_reading(zone, reading_ms // 1000)[0] * 1000 + reading_ms % 1000


def instants_of_reading(zone: Zone, reading_s: int) -> tuple[int, ...]:
    """UTC seconds at which the zone's clock shows the reading (seconds since it would have shown 1970-01-01 00:00), ascending.

    Two where the clock went back. A reading that it jumped over counts from the offset before the jump: one instant always.
    """
    # No zone has changed its offset twice within a day of one reading.
    before_s, after_s = zone.offset_s(reading_s - _DAY_S), zone.offset_s(reading_s + _DAY_S)
    found = sorted({reading_s - offset_s for offset_s in (before_s, after_s) if zone.offset_s(reading_s - offset_s) == offset_s})
    return tuple(found) or (reading_s - before_s,)


def year_start_ms(zone: Zone, year: int) -> int:
    """The instant from which the zone's clock shows the year."""
    reading_s = (datetime(year, 1, 1) - _NAIVE_EPOCH) // timedelta(seconds=1)
    return instants_of_reading(zone, reading_s)[0] * 1000
