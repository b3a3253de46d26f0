"""Everybody's jobs at the same second: `python -m benchmarks.load_top_of_hour [--flexible 1000000] [--precise 10000] [--check]`.

Flexible jobs with a window of one second and precise ones at random ms of the same second, in one queue, created beforehand. Workers claim
and complete batches of 100. Every precise job has to be started within a second of its time although a hundred times as many others
are due; the rest is worked off at the rate that the workers reach, and memory stays bounded.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from benchmarks.client import (
    Claimed,
    Connection,
    connections,
    drain,
    instant_ms,
    now_ms,
    pump,
    repeated,
    run_loop,
    spread_batches,
    watched,
)
from benchmarks.common import BenchmarkFailed, Figure, Node, percentile, report, running_node

BATCH = 1_000
LINES = 8
CREATES_PER_S = 9_000  # what a busy machine manages; being early costs only waiting
DRAIN_S_MAX = 1_800.0
SECOND_MS = 1_000.0
PRECISE, FLEXIBLE = "precise", "flexible"


async def measure(node: Node, *, flexible: int, precise: int, workers: int, rss_mib_max: float) -> list[Figure]:
    due_ms = now_ms() + 3_000 + (flexible + precise) / CREATES_PER_S * 1000
    async with connections(node.port, LINES) as lines:
        await _create(lines, FLEXIBLE, flexible, due_ms, window_s=1)
        await _create(lines, PRECISE, precise, due_ms)
    left_ms = due_ms - now_ms()
    if left_ms < 0:
        raise BenchmarkFailed(f"creating took {-left_ms / 1000:.1f} s too long; try fewer jobs")
    late_ms: dict[str, list[float]] = {PRECISE: [], FLEXIBLE: []}

    def on_jobs(jobs: list[Claimed]) -> None:
        seen_ms = now_ms()
        for job in jobs:
            late_ms[job.payload.kind].append(seen_ms - instant_ms(job.fire_at))

    await asyncio.sleep(max(left_ms - 1_000, 0) / 1000)
    rss_before = node.rss_bytes()
    # Not before: a node closes connections that are idle for long.
    async with connections(node.port, workers) as lines, watched(node.port, node.rss_bytes) as watch:
        worked = await drain(lines, "hour", flexible + precise, seconds_max=DRAIN_S_MAX, on_jobs=on_jobs)
        finished_ms = now_ms()
    if len(late_ms[PRECISE]) != precise or len(late_ms[FLEXIBLE]) != flexible:
        raise BenchmarkFailed(f"{len(late_ms[PRECISE])} precise and {len(late_ms[FLEXIBLE])} flexible jobs came")
    seconds = (finished_ms - due_ms) / 1000
    mib = 2**20
    return [
        Figure("jobs", worked.jobs, "jobs"),
        Figure("precise started late by, p50", percentile(late_ms[PRECISE], 0.5), "ms"),
        Figure("precise started late by, p99", percentile(late_ms[PRECISE], 0.99), "ms"),
        Figure("precise started late by, max", max(late_ms[PRECISE]), "ms", SECOND_MS),
        Figure("flexible started late by, max", max(late_ms[FLEXIBLE]), "ms"),
        Figure("worked off after", seconds, "s"),
        Figure("rate of work", worked.jobs / seconds, "jobs/s"),
        Figure("RSS before", rss_before / mib, "MiB"),
        Figure("RSS, max", watch.rss_bytes_max / mib, "MiB", rss_mib_max),
        Figure("ready jobs in memory, max", watch.ready_max, "jobs"),
        Figure("loop lag, max", watch.loop_lag_ms_max, "ms"),
    ]


async def _create(lines: list[Connection], kind: str, count: int, due_ms: float, *, window_s: int = 0) -> None:
    size = min(BATCH, count)
    if not size:
        return
    batches = spread_batches("hour", start_ms=due_ms, spread_ms=0 if window_s else SECOND_MS, size=size, window_s=window_s, kind=kind)
    await pump(lines, repeated(batches, count // size), seconds_max=1_200, progress=f"creating {kind} jobs by {size:,}")


def main() -> int:
    parser = argparse.ArgumentParser(description="A million flexible and ten thousand precise jobs due in one second.")
    parser.add_argument("--flexible", type=int, default=1_000_000, help="a multiple of 1,000 (1,000,000)")
    parser.add_argument("--precise", type=int, default=10_000, help="a multiple of 1,000 (10,000)")
    parser.add_argument("--workers", type=int, default=8, help="connections that claim batches of 100 (8)")
    parser.add_argument("--rss-mib-max", type=float, default=1_024.0, help="bound of the node's memory (1,024)")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bound is broken")
    arguments = parser.parse_args()
    flexible, precise = (count - count % min(BATCH, max(count, 1)) for count in (arguments.flexible, arguments.precise))
    with running_node() as node:
        figures = run_loop(measure(node, flexible=flexible, precise=precise, workers=arguments.workers, rss_mib_max=arguments.rss_mib_max))
    title = f"top of the hour, {flexible:,} flexible and {precise:,} precise jobs, {arguments.workers} workers"
    return report(title, figures, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
