"""How late precise jobs start while nothing else happens: `python -m benchmarks.load_lateness [--rate 200] [--seconds 60] [--check]`.

Jobs at random milliseconds, created two seconds ahead in small batches; idle workers wait for them by long poll, one job a claim.
Lateness is the worker's wall clock when it has the answer, minus `fire_at` (the node is on the same machine), beside what the node
itself reports at /metrics. It holds two fsyncs, one for the fire and one for the claim.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys

from benchmarks.client import (
    Claimed,
    Connection,
    Worked,
    a_job,
    batch_request,
    connections,
    histogram,
    histogram_quantile,
    instant_ms,
    now_ms,
    run_loop,
    stop_when,
    watched,
    work,
)
from benchmarks.common import BenchmarkFailed, Figure, Node, percentile, report, running_node

AHEAD_MS = 2_000.0
STEP_MS = 100.0


async def create_ahead(line: Connection, queue: str, *, rate: float, seconds: float, kind: str = "", seed: int = 1) -> int:
    """Create `rate` jobs a second for so long, each due at a random ms of the 100 that begin two seconds later; how many."""
    rng = random.Random(seed)
    began, created, debt = now_ms(), 0, 0.0
    for step in range(int(seconds * 1000 / STEP_MS)):
        at_ms = began + step * STEP_MS
        await asyncio.sleep(max(at_ms - now_ms(), 0) / 1000)
        debt += rate * STEP_MS / 1000
        count, debt = int(debt), debt % 1
        if count:
            due = [at_ms + AHEAD_MS + rng.random() * STEP_MS for _ in range(count)]
            jobs = [a_job(queue, created + place, run_at_ms=run_at, kind=kind) for place, run_at in enumerate(due)]
            await line.ask(batch_request(jobs))
            created += count
    return created


async def measure(node: Node, *, rate: float, seconds: float, workers: int) -> list[Figure]:
    late_ms: list[float] = []
    worked = Worked()

    def on_jobs(jobs: list[Claimed]) -> None:
        late_ms.extend(now_ms() - instant_ms(job.fire_at) for job in jobs)

    async with connections(node.port, workers + 1) as lines, watched(node.port, node.rss_bytes) as watch:
        creating = lines.pop()
        before = await histogram(creating, "wheelsched_lateness_seconds", 'class="precise"')
        async with asyncio.timeout(seconds + 60), asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(work(line, "late", worked, jobs_max=1, wait_s=20.0, on_jobs=on_jobs)) for line in lines]
            created = await create_ahead(creating, "late", rate=rate, seconds=seconds)
            await stop_when(working, lambda: worked.jobs >= created)
        after = await histogram(creating, "wheelsched_lateness_seconds", 'class="precise"')
    if worked.numbers != created * (created - 1) // 2:
        raise BenchmarkFailed(f"{worked.jobs} jobs came, not one of each of {created}")
    reported = histogram_quantile(before, after, 0.99)
    assert reported is not None
    return [
        Figure("jobs", created, "jobs"),
        Figure("lateness at the worker, p50", percentile(late_ms, 0.5), "ms"),
        Figure("lateness at the worker, p99", percentile(late_ms, 0.99), "ms", 50.0),
        Figure("lateness at the worker, p99.9", percentile(late_ms, 0.999), "ms"),
        Figure("lateness at the worker, max", max(late_ms), "ms"),
        Figure("early by", max(0.0, -min(late_ms)), "ms", 0.0, "fire_at has whole ms: nothing may come before it"),
        Figure("lateness as the node reports it, p99 below", reported * 1000, "ms", 50.0, "bound of the histogram's bucket"),
        Figure("loop lag, max", watch.loop_lag_ms_max, "ms"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Lateness of precise jobs with idle workers.")
    parser.add_argument("--rate", type=float, default=200.0, help="jobs a second (200)")
    parser.add_argument("--seconds", type=float, default=60.0, help="for how long (60)")
    parser.add_argument("--workers", type=int, default=32, help="idle long polls (32)")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bound is broken")
    arguments = parser.parse_args()
    with running_node() as node:
        figures = run_loop(measure(node, rate=arguments.rate, seconds=arguments.seconds, workers=arguments.workers))
    title = f"precise lateness, {arguments.rate:g} jobs/s for {arguments.seconds:g} s, {arguments.workers} waiting workers"
    return report(title, figures, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
