"""Logs of what the old scheduler ran: CSV and JSON Lines with a name and a time, and cron's own lines in syslog."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal

from wheelsched.core.errors import InvalidRequest
from wheelsched.cron import Zone
from wheelsched.imports.times import instants_of_reading, parse_instant

LogFormat = Literal["csv", "jsonl", "syslog"]

# `Nov  5 03:17:01 web1 CRON[812]: (root) CMD (run-parts /etc/cron.hourly)`, with the date of RFC 3164 or of RFC 3339.
_SYSLOG: Final = re.compile(
    r"(?:<\d+>)?(?P<time>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\S+) \S+ [^\s:\[]+(?:\[\d+\])?: "
    r"\((?P<user>[^()]*)\) CMD \((?P<command>.*)\)\s*"
)
_CMD: Final = re.compile(r"\) CMD \(")
_MONTHS: Final = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_DAY_MS: Final = 86_400_000
_EPOCH: Final = datetime(1970, 1, 1)


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One run: what the source calls it (cron: the command, and whose it is) and when."""

    name: str
    at_ms: int
    user: str | None = None


def read_log(text: str, *, zone: Zone, until_ms: int, form: LogFormat | None = None) -> list[LogEntry]:
    """The runs of a log, oldest first. `form` None: judged from the text.

    `zone` reads times without an offset. `until_ms` is when the log was taken: syslog's dates have no year, and get the latest that
    is not after it. InvalidRequest names the line that cannot be read.
    """
    text = text.removeprefix("\ufeff")
    form = form or _form_of(text)
    match form:
        case "jsonl":
            entries = list(_jsonl(text, zone))
        case "syslog":
            entries = list(_syslog(text, zone, until_ms))
        case "csv":
            entries = list(_csv(text, zone))
    return sorted(entries, key=lambda entry: entry.at_ms)


def _form_of(text: str) -> LogFormat:
    if text.lstrip()[:1] == "{":
        return "jsonl"
    return "syslog" if any(_SYSLOG.fullmatch(line) for line in text.split("\n")) else "csv"


def _instant(text: str, zone: Zone, place: str) -> int:
    """RFC 3339, or seconds since 1970."""
    stripped = text.strip()
    try:
        if re.fullmatch(r"\d+(?:\.\d+)?", stripped):
            return round(float(stripped) * 1000)
        return parse_instant(stripped, zone)
    except (ValueError, OverflowError):
        raise InvalidRequest(f"{place}: time {stripped!r} is not an instant; write 2026-11-05T03:17:01Z or seconds since 1970") from None


def _csv(text: str, zone: Zone) -> Iterator[LogEntry]:
    rows = csv.reader(text.split("\n"))
    columns = None
    try:
        for row in rows:
            place = f"line {rows.line_num}"
            if not row:
                continue
            if columns is None:
                lowered = [cell.strip().lower() for cell in row]
                if "name" not in lowered or "time" not in lowered:
                    raise InvalidRequest(f"{place}: the columns are {', '.join(lowered)}; the first line of a CSV names name and time")
                columns = lowered.index("name"), lowered.index("time")
                continue
            if len(row) <= max(columns):
                raise InvalidRequest(f"{place}: {len(row)} columns, name and time are the columns {columns[0] + 1} and {columns[1] + 1}")
            yield LogEntry(row[columns[0]].strip(), _instant(row[columns[1]], zone, place))
    except csv.Error as error:
        raise InvalidRequest(f"line {rows.line_num}: not CSV ({error}); quote names that have commas or quotes") from error


def _jsonl(text: str, zone: Zone) -> Iterator[LogEntry]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise InvalidRequest(f'line {number}: not JSON ({error}); write one {{"name": …, "time": …}} a line') from error
        name, time = (value.get("name"), value.get("time")) if isinstance(value, dict) else (None, None)
        if not isinstance(name, str) or isinstance(time, bool) or not isinstance(time, str | int | float):
            raise InvalidRequest(f'line {number}: name and time are missing; write one {{"name": …, "time": …}} a line')
        yield LogEntry(name, _instant(str(time), zone, f"line {number}"))


def _syslog(text: str, zone: Zone, until_ms: int) -> Iterator[LogEntry]:
    """Lines of other programs, and cron's other lines, are passed over; a CMD line that cannot be read is not."""
    last_ms = 0
    for number, line in enumerate(text.split("\n"), 1):
        match = _SYSLOG.fullmatch(line)
        if match is not None:
            last_ms = _syslog_time(match["time"], zone, until_ms, last_ms, f"line {number}")
            yield LogEntry(" ".join(match["command"].split()), last_ms, match["user"])
        elif _CMD.search(line) and re.search(r"\bcron", line, re.IGNORECASE):
            raise InvalidRequest(
                f"line {number}: not a line of cron's in syslog; it looks like `Nov  5 03:17:01 host CRON[812]: (root) CMD (command)`"
            )


def _syslog_time(text: str, zone: Zone, until_ms: int, last_ms: int, place: str) -> int:
    if text[0].isdigit():
        return _instant(text, zone, place)
    month = _MONTHS.index(text[:3]) + 1 if text[:3] in _MONTHS else 0
    until = _EPOCH + timedelta(milliseconds=until_ms)
    hour, minute, second = (int(part) for part in text[7:].split(":"))
    # A log may run a little ahead of the clock it is compared with: up to a day is no reason for another year. 29 February
    # is looked for as far back as there must be one.
    for year in range(until.year + 1, until.year - 9, -1):
        try:
            reading_s = (datetime(year, month, int(text[4:6]), hour, minute, second) - _EPOCH) // timedelta(seconds=1)
        except ValueError:
            continue
        instants = [at_s * 1000 for at_s in instants_of_reading(zone, reading_s)]
        if instants[0] <= until_ms + _DAY_MS:
            # An hour that came twice: the log goes on in time.
            return next((at_ms for at_ms in instants if at_ms >= last_ms), instants[-1])
    raise InvalidRequest(f"{place}: {text!r} is not a date")
