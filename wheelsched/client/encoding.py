"""JSON that loses nothing, and instants: what goes into a request and comes out of an answer."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from urllib.parse import quote

import msgspec


def encode_json(value: Any) -> bytes:
    """`value` as JSON bytes; `bytes` are taken as JSON text and come back unchanged.

    Raises ValueError for NaN, Infinity, a circular or too deeply nested value and for bytes that are not one JSON value,
    TypeError for a type JSON does not have. The standard library writes it: msgspec and orjson turn NaN into null without a word.
    """
    try:
        if isinstance(value, bytes | bytearray | memoryview):
            return _checked(bytes(value))
        return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
    except RecursionError:
        raise ValueError("the value is nested too deeply; 128 levels are allowed") from None


def encode_object(members: Mapping[str, Any]) -> bytes:
    """A JSON object; members that are `msgspec.Raw` stand in it as they are. Raises as `encode_json` does."""
    plain = encode_json({name: value for name, value in members.items() if not isinstance(value, msgspec.Raw)})
    raws = [encode_json(name) + b":" + bytes(value) for name, value in members.items() if isinstance(value, msgspec.Raw)]
    if not raws:
        return plain
    return (plain[:-1] + b"," if len(plain) > 2 else b"{") + b",".join(raws) + b"}"


def _checked(raw: bytes) -> bytes:
    # A fragment goes into an envelope: `1, "queue": "other"` would change what stands around it.
    try:
        raw.decode()
        msgspec.json.decode(raw, type=msgspec.Raw)
    except msgspec.DecodeError as error:
        raise ValueError(f"the bytes are not one JSON value: {error}") from None
    return raw


def decode_json(raw: bytes | msgspec.Raw) -> Any:
    """The value of JSON bytes: integers of any size exact, a number beyond a float's range as `decimal.Decimal`."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        # Numbers like 1e400 and lone surrogates are JSON, but not to msgspec.
        return json.loads(bytes(raw), parse_float=_exact_float)


def _exact_float(text: str) -> float | Decimal:
    number = float(text)
    return number if math.isfinite(number) else Decimal(text)


def format_instant(at: datetime | str) -> str:
    """RFC 3339 in UTC, rounded up to the millisecond so that nothing is early; a string is passed on for the server to judge.

    Raises ValueError for a datetime without a time zone: whose midnight it is cannot be guessed.
    """
    if isinstance(at, str):
        return at
    if at.tzinfo is None or at.utcoffset() is None:
        raise ValueError(f"{at.isoformat()} has no time zone; use datetime(..., tzinfo=timezone.utc) or a ZoneInfo")
    at = at.astimezone(UTC)
    at += timedelta(microseconds=-at.microsecond % 1000)
    return at.strftime("%Y-%m-%dT%H:%M:%S") + (f".{at.microsecond // 1000:03}Z" if at.microsecond else "Z")


def path_segment(text: str) -> str:
    """`text` as one segment of a path, everything that has a meaning there escaped.

    Raises ValueError for "", "." and "..", which no escape protects (RFC 3986, 5.2.4: they change the path they stand in).
    """
    if text in ("", ".", ".."):
        raise ValueError(f"{text!r} cannot be a name or an id")
    return quote(text, safe="")


def header_value(name: str, text: str, *, length_max: int) -> str:
    """`text`, if it is 1 to `length_max` visible ASCII characters; raises ValueError naming the one that is not."""
    if not 1 <= len(text) <= length_max:
        raise ValueError(f"{name} has {len(text)} characters; 1 to {length_max} are allowed")
    for position, letter in enumerate(text):
        if not "!" <= letter <= "~":
            raise ValueError(f"{name} has {letter!r} at position {position}; visible ASCII characters are allowed")
    return text
