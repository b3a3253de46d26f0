"""Next instants of cron expressions beside croniter (and cronsim, if it is installed): `python -m benchmarks.bench_cron [small|large]`.

Sketch: a next instant is two binary searches in a zone's clock changes, a date from the standard library and some shifts of
bit masks, so a few microseconds; the rarest walk 40 years of months, some tens. croniter builds a datetime for each candidate and
steps field by field. Each figure is the mean over a chain of instants, each computed from the one before, in this thread's CPU
time. The peers follow other rules in places (docs/decisions/0008-cron-of-our-own.md): `agrees` says whether all gave the same chain.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

from croniter import croniter

import wheelsched.cron as cron

try:
    from cronsim import CronSim
except ImportError:
    CronSim = None

Row = dict[str, Any]

SIZES = {"small": 200, "large": 5_000}
START_MS = 1_767_225_600_000  # 2026-01-01
# The rarest reach 2100 after some 20 runs; croniter stops looking after 50 years.
RARE_COUNT = 5
# (name, expression, zone); the worst ones are those with the longest way to the next run.
TYPICAL = (
    ("every minute", "* * * * *", "UTC"),
    ("quarter hours", "*/15 * * * *", "America/New_York"),
    ("daily", "30 2 * * *", "Europe/Berlin"),
    ("weekdays", "0 9 * * MON-FRI", "America/New_York"),
    ("month end", "0 0 L * *", "Asia/Kolkata"),
)
WORST = (
    ("leap days", "0 0 29 2 *", "Europe/Berlin"),
    ("new year's Sundays", "0 0 1 1 */7", "America/New_York"),
    ("leap-day Sundays", "0 0 29 2 */7", "Africa/Casablanca"),
)

Step = Callable[[], int]


def ours(text: str, zone: str, data: cron.ZoneData) -> Step:
    expression, of_zone, at_ms = cron.parse(text), data.zone(zone), START_MS

    def step() -> int:
        nonlocal at_ms
        at_ms = cron.next_after(expression, of_zone, at_ms)
        return at_ms

    return step


def start_in(zone: str) -> datetime:
    """With the zone data we use, not the system's."""
    with importlib.resources.files("tzdata").joinpath("zoneinfo", *zone.split("/")).open("rb") as file:
        return datetime.fromtimestamp(START_MS / 1000, UTC).astimezone(ZoneInfo.from_file(file, key=zone))


def with_croniter(text: str, zone: str) -> Step:
    iterator = croniter(text, start_in(zone), ret_type=float)
    return lambda: int(iterator.get_next()) * 1000


def with_cronsim(text: str, zone: str) -> Step:
    iterator = CronSim(text, start_in(zone))
    return lambda: int(next(iterator).timestamp()) * 1000


def chain(step: Step, count: int) -> tuple[float, list[int]]:
    """(ns a step, the instants)."""
    start_ns = time.thread_time_ns()
    instants = [step() for _ in range(count)]
    return (time.thread_time_ns() - start_ns) / count, instants


def peer(make: Callable[[str, str], Step], text: str, zone: str, count: int) -> tuple[float | None, list[int]]:
    """A peer that refuses the expression or gives up looking has no figure."""
    try:
        return chain(make(text, zone), count)
    except (ValueError, StopIteration):
        return None, []


def peers() -> Iterator[tuple[str, Callable[[str, str], Step]]]:
    yield "croniter", with_croniter
    if CronSim is not None:
        yield "cronsim", with_cronsim


def measure(name: str, text: str, zone: str, count: int, data: cron.ZoneData) -> Iterator[Row]:
    our_ns, instants = chain(ours(text, zone, data), count)
    digest = hashlib.blake2b(repr(instants).encode(), digest_size=4).hexdigest()
    for baseline, make in peers():
        peer_ns, peer_instants = peer(make, text, zone, count)
        yield {
            "name": name,
            "expression": text,
            "n": count,
            "value": round(1e9 / our_ns),
            "unit": "next/s",
            "baseline": baseline,
            "baseline_value": None if peer_ns is None else round(1e9 / peer_ns),
            "ratio": None if peer_ns is None else round(peer_ns / our_ns, 2),
            "agrees": peer_instants == instants,
            "checksum": digest,
        }


def run(size: str = "small") -> list[Row]:
    """Rows for `small` (200 instants an expression) or `large` (5,000; `scaling` is the same). KeyError for another size."""
    count = SIZES["large" if size == "scaling" else size]
    data = cron.ZoneData.of_package()
    for _, _, zone in TYPICAL + WORST:
        cron.next_after(cron.parse("* * * * *"), data.zone(zone), START_MS)  # read the zone's file
    rows = [row for name, text, zone in TYPICAL for row in measure(name, text, zone, count, data)]
    return rows + [row for name, text, zone in WORST for row in measure(name, text, zone, RARE_COUNT, data)]


def main() -> None:
    size = sys.argv[1] if len(sys.argv) > 1 else "small"
    print(f"cron, Python {platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}")
    print(f"{'expression':<40} {'n':>6} {'next/s':>10}  {'baseline':<10} {'next/s':>10} {'ratio':>8}  {'agrees':<6} checksum")
    for row in run(size):
        base = "gave up" if row["baseline_value"] is None else f"{row['baseline_value']:,}"
        print(
            f"{row['name'] + ': ' + row['expression']:<40} {row['n']:>6,} {row['value']:>10,}  {row['baseline']:<10} "
            f"{base:>10} {row['ratio'] or '':>8}  {'yes' if row['agrees'] else 'no':<6} {row['checksum']}"
        )


if __name__ == "__main__":
    main()
