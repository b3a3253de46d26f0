"""A million schedules, a tenth of them due in one minute: `python -m benchmarks.load_schedules [--schedules N] [--due N] [--kill]`.

Created by batches through the API, the greater part due at some minute of the coming year. Memory and disk for each; then the minute
comes: how late the last occurrence is decided, and what plain precise jobs of the same groups feel of it. With `--kill` as many more
are due in a later minute, in the middle of which the node dies and starts again. Of either minute every schedule then has exactly one
run, none has two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime

from benchmarks.client import (
    Claimed,
    Connection,
    Worked,
    claim_request,
    completion_request,
    connections,
    decode_claims,
    instant_ms,
    metric,
    now_ms,
    post,
    pump,
    run_loop,
    stop_when,
    until,
    work,
)
from benchmarks.common import BenchmarkFailed, Figure, Node, percentile, report, running_node
from benchmarks.load_lateness import create_ahead

BATCH = 200
LINES = 2
MINUTE_MS = 60_000
PLAIN_RATE, PLAIN_WORKERS = 100.0, 16
# The promise to jobs that have nothing to do with schedules.
DELAY_MS_MAX = 100.0


def batches(count: int, first: int, queue: str, cron: str | None, seed: int = 1) -> Iterator[bytes]:
    """Requests for `count` schedules; without `cron` each gets a minute of the coming year, two days from now at the earliest."""
    rng = random.Random(seed)
    start = now_ms() + 2 * 86_400_000
    for begin in range(0, count, BATCH):
        specs = []
        for number in range(first + begin, first + min(begin + BATCH, count)):
            at = datetime.fromtimestamp((start + rng.random() * 360 * 86_400_000) / 1000, UTC)
            timing = cron or f"{at.minute} {at.hour} {at.day} {at.month} *"
            template = {"queue": queue, "payload": {"number": number, "text": "x" * 200}}
            specs.append(json.dumps({"name": f"s{number}", "cron": timing, "job_template": template}))
        yield post("/v1/schedules:batch", f'{{"schedules":[{",".join(specs)}]}}'.encode())


async def fill(node: Node, count: int, first: int, queue: str, cron: str | None) -> float:
    async with connections(node.port, LINES) as lines:
        pumped = await pump(
            lines, batches(count, first, queue, cron), seconds_max=7_200, progress=f"creating schedules by {BATCH}"
        )  # fmt: skip
    return pumped.seconds


def minute_after(wait_s: float) -> tuple[float, str]:
    """(start ms, cron expression) of the first minute that begins at least `wait_s` from now."""
    at_ms = ((now_ms() + wait_s * 1000) // MINUTE_MS + 1) * MINUTE_MS
    at = datetime.fromtimestamp(at_ms / 1000, UTC)
    return at_ms, f"{at.minute} {at.hour} {at.day} {at.month} *"


async def plain_lateness(node: Node, from_ms: float, seconds: float) -> list[float]:
    """Lateness of plain precise jobs, of all groups, with idle workers."""
    late_ms: list[float] = []
    worked = Worked()

    def on_jobs(jobs: list[Claimed]) -> None:
        late_ms.extend(now_ms() - instant_ms(job.fire_at) for job in jobs)

    await asyncio.sleep(max(from_ms - 2_000 - now_ms(), 0) / 1000)
    async with connections(node.port, PLAIN_WORKERS + 1) as lines:
        creating = lines.pop()
        async with asyncio.timeout(seconds + 120), asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(work(line, "plain", worked, jobs_max=1, wait_s=20.0, on_jobs=on_jobs)) for line in lines]
            created = await create_ahead(creating, "plain", rate=PLAIN_RATE, seconds=seconds)
            await stop_when(working, lambda: worked.jobs >= created)
    return late_ms


async def until_decided(node: Node, at_ms: float) -> float:
    """Seconds from the minute's start until no occurrence waits to be decided."""
    await asyncio.sleep(max(at_ms + 200 - now_ms(), 0) / 1000)
    async with connections(node.port, 1) as (line,):

        async def is_empty() -> bool:
            return await metric(line, "wheelsched_occurrences_due_backlog") == 0

        await until(is_empty, every_s=0.05)
    return (now_ms() - at_ms) / 1000


async def the_minute(node: Node, at_ms: float) -> tuple[list[float], list[float], float]:
    """(plain lateness before, during, seconds until all are decided)."""
    before = await plain_lateness(node, now_ms() + 2_000, 8)
    during, decided_s = await asyncio.gather(plain_lateness(node, at_ms - 1_000, 15), until_decided(node, at_ms))
    return before, during, decided_s


async def count_runs(node: Node, queue: str, due: int, first: int = 0) -> int:
    """Take all runs of the minute; raises where a schedule has none or two."""
    seen = [0] * due
    taken = 0
    async with connections(node.port, 8) as lines:

        async def take(line: Connection) -> None:
            nonlocal taken
            idle = 0
            while idle < 10 and taken < due:
                jobs = decode_claims(await line.ask(claim_request(queue, jobs_max=100, wait_s=0.5)))
                idle = 0 if jobs else idle + 1
                for job in jobs:
                    seen[job.payload.number - first] += 1
                taken += len(jobs)
                if jobs:
                    await line.ask(completion_request(jobs))

        await asyncio.gather(*(take(line) for line in lines))
    twice, missing = sum(count > 1 for count in seen), seen.count(0)
    if twice or missing:
        raise BenchmarkFailed(f"{twice} schedules ran twice, {missing} not at all")
    return taken


def fill_minute(node: Node, due: int, first: int, queue: str) -> tuple[float, float]:
    """(start ms of the minute, seconds that creating took)."""
    at_ms, cron = minute_after(30 + due / 1_000)
    seconds = run_loop(fill(node, due, first, queue, cron))
    if now_ms() > at_ms - 20_000:
        raise BenchmarkFailed("creating the schedules took longer than the time until their minute")
    return at_ms, seconds


def measure(node: Node, *, schedules: int, due: int, kill: bool) -> list[Figure]:
    rss_empty, disk_empty = node.rss_bytes(), node.disk_bytes()
    seconds = run_loop(fill(node, schedules - due, due, "far", None))
    at_ms, more_s = fill_minute(node, due, 0, "due")
    seconds += more_s
    figures = [
        Figure("schedules", schedules, ""),
        Figure("created", schedules / seconds, "/s"),
        Figure("memory for each", (node.rss_bytes() - rss_empty) / schedules, "bytes"),
        Figure("disk for each", (node.disk_bytes() - disk_empty) / schedules, "bytes"),
        Figure("due in one minute", due, ""),
    ]
    before, during, decided_s = run_loop(the_minute(node, at_ms))
    figures += [
        Figure("all occurrences decided after", decided_s, "s"),
        Figure("plain precise lateness before, p99", percentile(before, 0.99), "ms"),
        Figure("plain precise lateness during, p99", percentile(during, 0.99), "ms"),
        Figure("delay of plain precise jobs, p99", percentile(during, 0.99) - percentile(before, 0.99), "ms", DELAY_MS_MAX),
        Figure("runs of the minute, one each", run_loop(count_runs(node, "due", due)), "jobs"),
        Figure("audit repairs", node.status()["audit"]["repairs"], "", 0),
    ]
    if kill:
        at_ms, _ = fill_minute(node, due, schedules, "killed")
        time.sleep(max(at_ms + 1_500 - now_ms(), 0) / 1000)
        left = run_loop(_backlog(node))
        node.kill()
        node.start()
        figures += [
            Figure("undecided when the node was killed", left, "", None, "" if left else "too late: all were decided"),
            Figure("runs of that minute, one each", run_loop(count_runs(node, "killed", due, schedules)), "jobs"),
            Figure("audit repairs after it", node.status()["audit"]["repairs"], "", 0),
        ]
    return figures


async def _backlog(node: Node) -> float:
    async with connections(node.port, 1) as (line,):
        return await metric(line, "wheelsched_occurrences_due_backlog")


def main() -> int:
    parser = argparse.ArgumentParser(description="Many schedules, and many of them due at once.")
    parser.add_argument("--schedules", type=int, default=1_000_000, help="in all (1,000,000)")
    parser.add_argument("--due", type=int, default=100_000, help="of them due in one minute (100,000)")
    parser.add_argument("--kill", action="store_true", help="then kill -9 in the middle of another such minute, and start again")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bound is broken")
    arguments = parser.parse_args()
    with running_node() as node:
        figures = measure(node, schedules=arguments.schedules, due=min(arguments.due, arguments.schedules), kill=arguments.kill)
    title = f"{arguments.schedules:,} schedules, {arguments.due:,} due in one minute" + (
        ", then killed in another" if arguments.kill else ""
    )
    return report(title, figures, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
