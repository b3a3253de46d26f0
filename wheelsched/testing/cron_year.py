"""A year of recurring runs on a node, in a dozen zones, against the published rules taken at their word.

    python -m wheelsched.testing.cron_year                      # all of 2026; a section of docs/cron.md is written anew (`make cron-year`)
    python -m wheelsched.testing.cron_year --days 40 --no-docs  # the beginning of it, told and not written

A node on a virtual clock gets each schedule in each zone and lives through the year; every run it made is then compared with what a
reference says. That looks at every single minute, with the standard library's `zoneinfo` on the same zone data as the clock on the
wall, and shares nothing with `wheelsched.cron`. What is told: how many runs there were, and what ran in the nights in which a clock
was changed. Zones are spread over the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.resources
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Final
from zoneinfo import ZoneInfo

from wheelsched.cron import ZoneData
from wheelsched.testing.node import TestNode, open_test_node
from wheelsched.testing.simulate_node import quiet_logs

YEAR: Final = 2026
SCHEDULES: Final = ("0 9 * * *", "30 2 * * *", "30 1 * * *", "*/15 * * * *", "0 0 29 2 *")
# One hour forward and back at 01:00 UTC, or at 02:00 by their own clocks; at midnight; half an hour; two hours; none, or none any more.
ZONES: Final = (
    "UTC", "Europe/London", "Europe/Berlin", "America/New_York", "America/Los_Angeles", "America/Sao_Paulo", "Africa/Cairo",
    "Africa/Casablanca", "Asia/Kolkata", "Asia/Tehran", "Australia/Lord_Howe", "Antarctica/Troll",
)  # fmt: skip
MINUTE_MS, DAY_MS = 60_000, 86_400_000
DAY_MINUTES: Final = 1_440
# Readings that a run of the first days may stand for lie at most so far before.
MARGIN_MINUTES: Final = 2 * DAY_MINUTES
STEP_DAYS: Final = 10
MARKERS: Final = ("<!-- cron-year:begin -->", "<!-- cron-year:end -->")
DOCS: Final = Path(__file__).parents[2] / "docs" / "cron.md"


# --- the rules, minute by minute ------------------------------------------------------------------------------------------------


def zone_info(name: str) -> ZoneInfo:
    """From the tzdata package, whatever the machine has."""
    with importlib.resources.files("tzdata").joinpath("zoneinfo", *name.split("/")).open("rb") as file:
        return ZoneInfo.from_file(file, key=name)


@dataclass(frozen=True, slots=True)
class Wall:
    """A zone's clock: what it shows in each minute from `start` (minutes since 1970, UTC) on, as minutes since 1970 on the wall."""

    start: int
    readings: list[int]

    @classmethod
    def of(cls, zone: str, start: int, end: int) -> Wall:
        tz, readings = zone_info(zone), []
        for minute in range(start, end):
            offset = datetime.fromtimestamp(minute * 60, tz).utcoffset()
            assert offset is not None
            readings.append(minute + int(offset.total_seconds()) // 60)
        return cls(start, readings)

    def changes(self) -> Iterator[tuple[int, int, int]]:
        """(minute, reading that was to come, reading that came instead)."""
        for place in range(1, len(self.readings)):
            expected = self.readings[place - 1] + 1
            if self.readings[place] != expected:
                yield self.start + place, expected, self.readings[place]


def numbers(field: str, low: int, high: int) -> frozenset[int]:
    """Of a field that is `*`, `*/n` or a number: more is not needed here."""
    if field == "*":
        return frozenset(range(low, high + 1))
    if field.startswith("*/"):
        return frozenset(range(low, high + 1, int(field[2:])))
    return frozenset({int(field)})


def expected_runs(expression: str, wall: Wall, start: int, end: int) -> list[int]:
    """The minutes in [start, end) at which the rules have it run."""
    minutes_field, hours_field, days_field, months_field, weekdays_field = expression.split()
    assert weekdays_field == "*"
    minutes, hours = numbers(minutes_field, 0, 59), numbers(hours_field, 0, 23)
    days, months = numbers(days_field, 1, 31), numbers(months_field, 1, 12)

    def matches(reading: int) -> bool:
        day, minute = divmod(reading, DAY_MINUTES)
        if minute % 60 not in minutes or minute // 60 not in hours:
            return False
        on = date(1970, 1, 1) + timedelta(days=day)
        return on.day in days and on.month in months

    runs: set[int] = set()
    if minutes_field.startswith("*") or hours_field.startswith("*"):
        # An interval: whenever the clock shows it, twice where it shows it twice, never where it is jumped over.
        runs.update(minute for minute, reading in enumerate(wall.readings, wall.start) if matches(reading))
    else:
        # A fixed time: once for each reading of the calendar; the first time it is shown, or at the end of the jump over it.
        seen: set[int] = set()
        before = wall.readings[0] - 1
        for minute, reading in enumerate(wall.readings, wall.start):
            for shown in range(before + 1, reading + 1) if reading > before else (reading,):
                if shown not in seen:
                    seen.add(shown)
                    if matches(shown):
                        runs.add(minute)
            before = reading
    return sorted(minute for minute in runs if start <= minute < end)


# --- the node -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lived:
    """What a node did in one zone: instants (minutes since 1970) by expression, and what does not agree."""

    zone: str
    runs: Mapping[str, Sequence[int]]
    next_runs: Mapping[str, str]
    differences: Sequence[str]


async def live(zones: Sequence[str], days: int) -> list[Lived]:
    """The first `days` of the year on one node."""
    start_ms = round(datetime(YEAR, 1, 1, tzinfo=UTC).timestamp() * 1000)
    end_ms = start_ms + days * DAY_MS
    # Just before the year: what is due at its first instant belongs to it.
    async with open_test_node(start_ms=start_ms - 1) as node:
        for zone in zones:
            for number, expression in enumerate(SCHEDULES):
                await node.put_schedule(_name(zone, number), cron=expression, zone=zone)
        for day in range(0, days, STEP_DAYS):
            await node.advance(to=min(start_ms + (day + STEP_DAYS) * DAY_MS, end_ms) - 1)
        return [await _lived(node, zone, start_ms // MINUTE_MS, end_ms // MINUTE_MS) for zone in zones]


def _name(zone: str, number: int) -> str:
    return f"{zone.replace('/', '.')}-{number}"


async def _lived(node: TestNode, zone: str, start: int, end: int) -> Lived:
    wall = Wall.of(zone, start - MARGIN_MINUTES, end)
    runs: dict[str, list[int]] = {}
    next_runs: dict[str, str] = {}
    differences: list[str] = []
    for number, expression in enumerate(SCHEDULES):
        record = await node.schedule(_name(zone, number))
        next_runs[expression] = record.preview.local[0] if record.preview.local else "never"
        jobs, skipped = await node.runs(_name(zone, number))
        ran = [job for job in jobs if job.status.name == "QUEUED"]
        late = [job for job in ran if job.state.run is None or job.state.fire_at_ms != job.state.run.scheduled_for_ms]
        runs[expression] = [job.state.fire_at_ms // MINUTE_MS for job in ran]
        expected = expected_runs(expression, wall, start, end)
        if runs[expression] != expected:
            extra = sorted((Counter(runs[expression]) - Counter(expected)).elements())
            missing = sorted((Counter(expected) - Counter(runs[expression])).elements())
            differences.append(f"{expression} in {zone}: {len(extra)} too many {extra[:3]}, {len(missing)} missing {missing[:3]}")
        if late or skipped or any(job.state.fire_at_ms % MINUTE_MS for job in ran):
            differences.append(f"{expression} in {zone}: {len(late)} not at their instants, {len(skipped)} records of skipped ones")
    return Lived(zone, runs, next_runs, differences)


def _live(zones: Sequence[str], days: int) -> list[Lived]:
    quiet_logs()
    return asyncio.run(live(zones, days))


def live_spread(zones: Sequence[str], days: int, workers: int) -> list[Lived]:
    """The same with the zones spread over processes; in the order given."""
    if workers < 2:
        return _live(zones, days)
    parts = [zones[place::workers] for place in range(min(workers, len(zones)))]
    with ProcessPoolExecutor(len(parts)) as pool:
        found = {lived.zone: lived for part in pool.map(_live, parts, [days] * len(parts)) for lived in part}
    return [found[zone] for zone in zones]


# --- what is told ---------------------------------------------------------------------------------------------------------------


def table(lived: Sequence[Lived], days: int) -> Iterator[str]:
    """The section: runs by zone, then the nights of changed clocks."""
    total = sum(len(runs) for one in lived for runs in one.runs.values())
    wrong = sum(len(one.differences) for one in lived)
    of = f"the first {days} days of {YEAR}" if days < 365 else f"{YEAR}"
    found = "as many as the rules have, each at its minute" if not wrong else f"**{wrong} differences**"
    yield f"All of {of} on a node, {len(SCHEDULES)} schedules in {len(lived)} zones (zone data {ZoneData.of_package().version}):"
    yield f"{total:,} runs, {found}, compared minute by minute with the standard library's `zoneinfo`."
    yield ""
    yield "| zone | changes of its clock | " + " | ".join(f"`{expression}`" for expression in SCHEDULES) + " |"
    yield "| --- | ---: | " + " | ".join("---:" for _ in SCHEDULES) + " |"
    for one in lived:
        counts = [f"{len(one.runs[expression]):,}" if one.runs[expression] else _none(one, expression) for expression in SCHEDULES]
        yield f"| {one.zone} | {len(list(_wall(one, days).changes()))} | " + " | ".join(counts) + " |"
    yield ""
    yield "The nights and days in which a clock was changed, and what ran then (times of the zone; in brackets UTC):"
    yield ""
    yield "| zone | date | the clock | `30 1 * * *` | `30 2 * * *` | `*/15 * * * *` |"
    yield "| --- | --- | --- | --- | --- | ---: |"
    for one in lived:
        yield from _nights(one, days)


def _wall(one: Lived, days: int) -> Wall:
    start = round(datetime(YEAR, 1, 1, tzinfo=UTC).timestamp()) // 60
    return Wall.of(one.zone, start, start + days * DAY_MINUTES)


def _none(one: Lived, expression: str) -> str:
    return f"0 (next: {one.next_runs[expression][:10]})"


def _nights(one: Lived, days: int) -> Iterator[str]:
    wall = _wall(one, days)
    for _, expected, came in wall.changes():
        # The date that the change cut short or made longer: of midnight jumped over it is the new one.
        day = min(expected, came) // DAY_MINUTES if came < expected else expected // DAY_MINUTES
        on_that_day = {minute for minute, reading in enumerate(wall.readings, wall.start) if reading // DAY_MINUTES == day}
        moved = "forward" if came > expected else "back"
        cells = [_told(one, wall, expression, on_that_day) for expression in ("30 1 * * *", "30 2 * * *")]
        quarter_hours = sum(minute in on_that_day for minute in one.runs["*/15 * * * *"])
        shown = date(1970, 1, 1) + timedelta(days=day)
        yield (
            f"| {one.zone} | {shown} | {_time(expected)} {moved} to {_time(came)} | {cells[0]} | {cells[1]} |"
            f" {quarter_hours} in {len(on_that_day) / 60:g} h |"
        )


def _told(one: Lived, wall: Wall, expression: str, minutes: set[int]) -> str:
    ran = [minute for minute in one.runs[expression] if minute in minutes]
    return ", ".join(f"{_time(wall.readings[minute - wall.start])} ({_time(minute)})" for minute in ran) or "none"


def _time(reading: int) -> str:
    return f"{reading % DAY_MINUTES // 60:02}:{reading % 60:02}"


def with_section(page: str, section: str) -> str:
    """A page with its section between the markers replaced, or added at the end."""
    begin, end = MARKERS
    before, found, rest = page.partition(begin)
    if not found:
        before = page.rstrip("\n") + "\n\n" if page.strip() else "# Cron\n\n"
        after = "\n"
    else:
        after = rest.partition(end)[2]
    return f"{before}{begin}\n\n{section.rstrip()}\n\n{end}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m wheelsched.testing.cron_year", description="Live through a year of schedules.")
    parser.add_argument("--days", type=int, default=365, help="of the year, from its beginning")
    parser.add_argument("--zone", action="append", choices=ZONES, help="this zone alone; may be given more than once")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 4), help="processes the zones are spread over")
    parser.add_argument("--no-docs", action="store_true", help="tell it, and leave docs/cron.md alone")
    given = parser.parse_args(arguments)
    began = time.monotonic()
    lived = live_spread(given.zone or ZONES, given.days, given.workers)
    section = "\n".join(table(lived, given.days))
    print(section)
    for one in lived:
        for difference in one.differences:
            print(f"DIFFERS: {difference}")
    print(f"\n{time.monotonic() - began:.0f} s")
    if any(one.differences for one in lived):
        return 1
    if not given.no_docs:
        DOCS.write_text(with_section(DOCS.read_text(encoding="utf-8") if DOCS.exists() else "", section), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
