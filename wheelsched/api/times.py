"""Instants and durations between the wire (RFC 3339, seconds) and the inside (integer milliseconds)."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from functools import lru_cache

_INSTANT = re.compile(r"(\d{4})-(\d\d)-(\d\d)[Tt ](\d\d):(\d\d):(\d\d)(?:\.(\d{1,18}))?(?:([Zz])|([+-])(\d\d):(\d\d))?", re.ASCII)
_EPOCH = datetime(1970, 1, 1)
_DAY_S = 86_400
# The end of year 9999, past which an instant cannot be written.
INSTANT_MS_MAX = 253_402_300_799_999
_MILLISECONDS = tuple(b"Z" if rest == 0 else b".%03dZ" % rest for rest in range(1_000))


def parse_instant(text: str) -> int:
    """UTC Unix milliseconds of an RFC 3339 instant (RFC 3339, 5.6), its offset or `Z` required.

    Fractions finer than a millisecond are rounded up: a job never starts before the instant that was asked for. A leap second is
    the second after it. Raises ValueError with what is wrong, in words that follow the text.
    """
    match = _INSTANT.fullmatch(text)
    if match is None:
        raise ValueError("is no RFC 3339 instant; write it like 2026-11-05T03:34:12Z")
    year, month, day, hour, minute, second, fraction, zulu, sign, offset_hour, offset_minute = match.groups()
    if zulu is None and sign is None:
        raise ValueError("has no offset; add Z or one like +01:00")
    leap = second == "60"
    try:
        wall = datetime(int(year), int(month), int(day), int(hour), int(minute), 59 if leap else int(second))
    except ValueError as error:
        raise ValueError(f"does not exist: {error}") from None
    since = wall - _EPOCH
    total_s = since.days * _DAY_S + since.seconds + leap
    if sign is not None:
        if int(offset_hour) > 23 or int(offset_minute) > 59:
            raise ValueError(f"has an offset out of range: {sign}{offset_hour}:{offset_minute}")
        offset_s = int(offset_hour) * 3600 + int(offset_minute) * 60
        total_s += offset_s if sign == "-" else -offset_s
    ms = total_s * 1000
    if fraction is not None:
        # Padded to 18 digits, so that integers compare: no float touches an instant.
        ms -= -int(fraction.ljust(18, "0")) // 10**15
    if not 0 <= ms <= INSTANT_MS_MAX:
        raise ValueError("lies outside the years 1970 to 9999")
    return ms


def format_instant(ms: int) -> str:
    """RFC 3339 in UTC, milliseconds only where they are not zero."""
    return instant_bytes(ms).decode()


def instant_bytes(ms: int) -> bytes:
    """The same as bytes, for answers: 0.2 us for a second seen lately."""
    return _second_bytes(ms // 1000) + _MILLISECONDS[ms % 1000]


@lru_cache(maxsize=8_192)
def _second_bytes(second: int) -> bytes:
    return (_EPOCH + timedelta(seconds=min(second, INSTANT_MS_MAX // 1000))).isoformat().encode()


def to_ms(seconds: float) -> int | None:
    """Integer milliseconds of a number of seconds; None where it is finer than 0.001.

    The tolerance is what arithmetic in doubles leaves behind (0.1 + 0.2), far below a tenth of a millisecond in this range.
    """
    exact = seconds * 1000
    ms = round(exact)
    return ms if abs(exact - ms) <= 1e-6 + abs(exact) * 1e-12 else None


def to_seconds(ms: int) -> int | float:
    """A whole number where it is one."""
    return ms // 1000 if ms % 1000 == 0 else ms / 1000


def format_seconds(ms: int) -> str:
    return str(ms // 1000) if ms % 1000 == 0 else repr(ms / 1000)
