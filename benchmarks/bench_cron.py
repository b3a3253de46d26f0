"""Instants of cron expressions beside croniter and cronsim, in one run: `python -m benchmarks.bench_cron [small|large]`.

Sketch: a next instant, or the last one, is two binary searches in a zone's clock changes, a date from the standard library and some
shifts of bit masks, so a few microseconds; the rarest walk 40 years of months, some tens. The peers step a datetime field by field.
Counting is a date at either end and one at each clock change between: tens of microseconds a year, however many the runs; beside it
the same runs counted one by one. Each figure is the mean over a chain of instants, each computed from the one before, in this
thread's CPU time. The peers follow other rules in places (docs/decisions/0008-cron-of-our-own.md): `agrees` says whether the
answers are the same.
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
from cronsim import CronSim

import wheelsched.cron as cron

Row = dict[str, Any]

SIZES = {"small": 200, "large": 5_000}
START_MS = 1_767_225_600_000  # 2026-01-01
# Backwards from 2100, for nothing runs before 1970; 1,000 month ends fit in between.
BACK_FROM_MS = 4_102_444_800_000
BACK_COUNT_MAX = 1_000
DAY_MS = 86_400_000
COUNT_DAYS = {"small": 30, "large": 365}
COUNT_CALLS = 50
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
Make = Callable[[str, str], Step]


def ours(text: str, zone: str, data: cron.ZoneData, *, back: bool = False) -> Step:
    expression, of_zone, at_ms = cron.parse(text), data.zone(zone), BACK_FROM_MS if back else START_MS
    search = cron.last_before if back else cron.next_after

    def step() -> int:
        nonlocal at_ms
        found_ms = search(expression, of_zone, at_ms)
        assert found_ms is not None
        at_ms = found_ms
        return at_ms

    return step


def start_in(zone: str, at_ms: int = START_MS) -> datetime:
    """With the zone data we use, not the system's."""
    with importlib.resources.files("tzdata").joinpath("zoneinfo", *zone.split("/")).open("rb") as file:
        return datetime.fromtimestamp(at_ms / 1000, UTC).astimezone(ZoneInfo.from_file(file, key=zone))


def with_croniter(text: str, zone: str) -> Step:
    iterator = croniter(text, start_in(zone), ret_type=float)
    return lambda: int(iterator.get_next()) * 1000


def with_croniter_back(text: str, zone: str) -> Step:
    iterator = croniter(text, start_in(zone, BACK_FROM_MS), ret_type=float)
    return lambda: int(iterator.get_prev()) * 1000


def with_cronsim(text: str, zone: str) -> Step:
    iterator = CronSim(text, start_in(zone))
    return lambda: int(next(iterator).timestamp()) * 1000


def with_cronsim_back(text: str, zone: str) -> Step:
    iterator = CronSim(text, start_in(zone, BACK_FROM_MS), reverse=True)
    return lambda: int(next(iterator).timestamp()) * 1000


def chain(step: Step, count: int) -> tuple[float, list[int]]:
    """(ns a step, the instants)."""
    start_ns = time.thread_time_ns()
    instants = [step() for _ in range(count)]
    return (time.thread_time_ns() - start_ns) / count, instants


def peer(make: Make, text: str, zone: str, count: int) -> tuple[float | None, list[int]]:
    """A peer that refuses the expression or gives up looking has no figure."""
    try:
        return chain(make(text, zone), count)
    except (ValueError, StopIteration):
        return None, []


def peers(*, back: bool) -> Iterator[tuple[str, Make]]:
    yield "croniter", with_croniter_back if back else with_croniter
    yield "cronsim", with_cronsim_back if back else with_cronsim


def measure(name: str, text: str, zone: str, count: int, data: cron.ZoneData, *, back: bool = False) -> Iterator[Row]:
    our_ns, instants = chain(ours(text, zone, data, back=back), count)
    for baseline, make in peers(back=back):
        peer_ns, peer_instants = peer(make, text, zone, count)
        yield line(
            f"last {name}" if back else name, text, count, our_ns, baseline, peer_ns,
            unit="last/s" if back else "next/s", agrees=peer_instants == instants, work=instants,
        )  # fmt: skip


def measure_count(name: str, text: str, zone: str, days: int, data: cron.ZoneData) -> Row:
    """Counting the runs of so many days, beside asking for each of them."""
    expression, of_zone, to_ms = cron.parse(text), data.zone(zone), START_MS + days * DAY_MS
    our_ns, counts = chain(lambda: cron.count_between(expression, of_zone, START_MS, to_ms), COUNT_CALLS)
    each_ns, walked = chain(lambda: sum(1 for _ in cron.between(expression, of_zone, START_MS, to_ms)), 1)
    agrees = walked == counts[:1]
    return line(f"count {name}", text, days, our_ns, "one by one", each_ns, unit="counts/s", agrees=agrees, work=counts[:1])


def line(
    name: str, text: str, n: int, our_ns: float, baseline: str, baseline_ns: float | None, *, unit: str, agrees: bool, work: list[int]
) -> Row:  # fmt: skip
    return {
        "name": name,
        "expression": text,
        "n": n,
        "value": round(1e9 / our_ns),
        "unit": unit,
        "baseline": baseline,
        "baseline_value": None if baseline_ns is None else round(1e9 / baseline_ns, 1),
        "ratio": None if baseline_ns is None else round(baseline_ns / our_ns, 2),
        "agrees": agrees,
        "checksum": hashlib.blake2b(repr(work).encode(), digest_size=4).hexdigest(),
    }


def run(size: str = "small") -> list[Row]:
    """Rows for `small` (200 instants an expression, 30 days counted) or `large` (5,000, a year; `scaling` is the same).

    KeyError for another size. `n` is the instants of a chain, or the days counted.
    """
    size = "large" if size == "scaling" else size
    count, days = SIZES[size], COUNT_DAYS[size]
    data = cron.ZoneData.of_package()
    for _, _, zone in TYPICAL + WORST:
        cron.next_after(cron.parse("* * * * *"), data.zone(zone), START_MS)  # read the zone's file
    rows: list[Row] = []
    for back in (False, True):
        steps = min(count, BACK_COUNT_MAX) if back else count
        rows += [row for name, text, zone in TYPICAL for row in measure(name, text, zone, steps, data, back=back)]
        rows += [row for name, text, zone in WORST for row in measure(name, text, zone, RARE_COUNT, data, back=back)]
    return rows + [measure_count(name, text, zone, days, data) for name, text, zone in TYPICAL]


def main() -> None:
    size = sys.argv[1] if len(sys.argv) > 1 else "small"
    print(f"cron, Python {platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}")
    print(f"{'expression':<40} {'n':>6} {'ours':>10} {'':<8}  {'baseline':<10} {'':>10} {'ratio':>8}  {'agrees':<6} checksum")
    for row in run(size):
        base = "gave up" if row["baseline_value"] is None else f"{row['baseline_value']:,}"
        print(
            f"{row['name'] + ': ' + row['expression']:<40} {row['n']:>6,} {row['value']:>10,} {row['unit']:<8}  {row['baseline']:<10} "
            f"{base:>10} {row['ratio'] or '':>8}  {'yes' if row['agrees'] else 'no':<6} {row['checksum']}"
        )


if __name__ == "__main__":
    main()
