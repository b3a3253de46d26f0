"""A queue that nobody works on: `python -m benchmarks.load_no_workers [--jobs 5000000] [--check]`.

Precise jobs of another queue have idle workers the whole time. Their lateness is measured before, while all jobs of the neglected
queue come due within one second, and after that; memory has to stay bounded, for what no worker takes lies on disk.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from benchmarks.client import (
    Claimed,
    Connection,
    Watch,
    Worked,
    connections,
    instant_ms,
    metric,
    now_ms,
    pump,
    repeated,
    run_loop,
    spread_batches,
    stop_when,
    watched,
    work,
)
from benchmarks.common import BenchmarkFailed, Figure, Node, percentile, report, running_node
from benchmarks.load_lateness import AHEAD_MS, create_ahead

BATCH = 1_000
LINES = 8
WORKERS = 16
CREATES_PER_S = 9_000  # what a busy machine manages; being early costs only waiting
# "Unchanged" on a machine with two cores: what one more fsync in its slowest per cent costs.
MORE_MS_MAX = 20.0


class Live:
    """The other queue: jobs at a steady rate and workers for them, for as long as a phase lasts."""

    def __init__(self, node: Node, rate: float) -> None:
        self._node, self._rate = node, rate

    async def phase(self, seconds: float) -> tuple[list[float], Watch]:
        """(lateness of each job in ms, what was seen of the node)."""
        late_ms: list[float] = []
        worked = Worked()

        def on_jobs(jobs: list[Claimed]) -> None:
            late_ms.extend(now_ms() - instant_ms(job.fire_at) for job in jobs)

        async with connections(self._node.port, WORKERS + 1) as lines, watched(self._node.port, self._node.rss_bytes) as watch:
            creating = lines.pop()
            async with asyncio.timeout(seconds * 4 + 120), asyncio.TaskGroup() as tasks:
                working = [tasks.create_task(work(line, "live", worked, jobs_max=1, wait_s=20.0, on_jobs=on_jobs)) for line in lines]
                created = await create_ahead(creating, "live", rate=self._rate, seconds=seconds)
                await stop_when(working, lambda: worked.jobs >= created)
        return late_ms, watch


async def measure(node: Node, *, jobs: int, rate: float, seconds: float, rss_mib_max: float) -> list[Figure]:
    live = Live(node, rate)
    before, _ = await live.phase(seconds)
    async with connections(node.port, LINES) as lines:
        fired = await metric(lines[0], "wheelsched_jobs_fired_total")
        due_ms = await _neglect(lines, jobs)
    await asyncio.sleep(max(due_ms - AHEAD_MS - 1_000 - now_ms(), 0) / 1000)
    rss_before = node.rss_bytes()
    during, watch = await live.phase(seconds)
    # A connection of its own: the node closes those that were idle while the jobs came due.
    async with connections(node.port, 1) as (line,):
        fired = await metric(line, "wheelsched_jobs_fired_total") - fired
    after, watch_after = await live.phase(seconds)
    if fired < jobs:
        raise BenchmarkFailed(f"{fired:g} of {jobs} jobs came due within the phase; make it longer with --seconds")
    p99 = percentile(before, 0.99)
    mib = 2**20
    return [
        Figure("due without a worker", jobs, "jobs"),
        Figure("lateness before, p50", percentile(before, 0.5), "ms"),
        Figure("lateness before, p99", p99, "ms"),
        Figure("lateness while they come due, p50", percentile(during, 0.5), "ms"),
        Figure("lateness while they come due, p99", percentile(during, 0.99), "ms", p99 + MORE_MS_MAX),
        Figure("lateness while they come due, max", max(during), "ms"),
        Figure("lateness after, p99", percentile(after, 0.99), "ms", p99 + MORE_MS_MAX),
        Figure("RSS before", rss_before / mib, "MiB"),
        Figure("RSS, max", max(watch.rss_bytes_max, watch_after.rss_bytes_max) / mib, "MiB", rss_mib_max),
        Figure("ready jobs in memory, max", max(watch.ready_max, watch_after.ready_max), "jobs"),
        Figure("loop lag, max", max(watch.loop_lag_ms_max, watch_after.loop_lag_ms_max), "ms"),
    ]


async def _neglect(lines: list[Connection], jobs: int) -> float:
    """Create them, all due in one second; when that second begins (ms)."""
    size = min(BATCH, jobs)
    due_ms = now_ms() + AHEAD_MS + 4_000 + jobs / CREATES_PER_S * 1000
    batches = spread_batches("neglected", start_ms=due_ms, spread_ms=1_000, size=size)
    await pump(lines, repeated(batches, jobs // size), seconds_max=2_400, progress=f"creating jobs by {size:,}")
    if now_ms() > due_ms - AHEAD_MS:
        raise BenchmarkFailed("creating took too long: jobs came due meanwhile; try fewer")
    return due_ms


def main() -> int:
    parser = argparse.ArgumentParser(description="Millions of jobs due in a queue without workers, beside a queue with some.")
    parser.add_argument("--jobs", type=int, default=5_000_000, help="a multiple of 1,000 (5,000,000)")
    parser.add_argument("--rate", type=float, default=100.0, help="precise jobs a second of the other queue (100)")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long each of the three phases takes (30)")
    parser.add_argument("--rss-mib-max", type=float, default=1_024.0, help="bound of the node's memory (1,024)")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bound is broken")
    arguments = parser.parse_args()
    jobs = arguments.jobs - arguments.jobs % min(BATCH, arguments.jobs)
    with running_node() as node:
        figures = run_loop(measure(node, jobs=jobs, rate=arguments.rate, seconds=arguments.seconds, rss_mib_max=arguments.rss_mib_max))
    return report(f"{jobs:,} jobs due without workers, {arguments.rate:g} precise jobs/s beside them", figures, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
