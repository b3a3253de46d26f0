"""Stop and start with millions of jobs: `python -m benchmarks.load_restart [--mode waiting|due] [--jobs N] [--kill] [--check]`.

- `waiting`: jobs a year ahead (5,000,000 by default). They cost no memory and next to no time at a start.
- `due`: flexible jobs that are due, without workers (2,000,000). They are read again after the start; precise jobs go first.

Precise jobs come due while the node is down. A worker asks for them as soon as the new node listens; the time counts from the start of
the process. With `--kill` the node ends by SIGKILL and has its log to replay.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

from benchmarks.client import (
    a_job,
    batch_request,
    claim_request,
    completion_request,
    connections,
    decode_claims,
    get,
    now_ms,
    pump,
    repeated,
    run_loop,
    same_batch,
    spread_batches,
    status_of,
    until,
)
from benchmarks.common import BenchmarkFailed, Figure, Node, report, running_node

BATCH = 1_000
LINES = 8
YEAR_S = 360 * 86_400.0
PRECISE = 100
LOADED_S_MAX = 600.0
READY_S_MAX, EXIT_S_MAX, PRECISE_S_MAX, RSS_MIB_MAX = 5.0, 5.0, 2.0, 600.0


async def fill(node: Node, mode: str, jobs: int) -> None:
    """The jobs, and precise ones that come due shortly after."""
    size = min(BATCH, jobs)
    if mode == "waiting":
        batches = [same_batch("many", size=size, delay_s=YEAR_S)]
    else:
        batches = spread_batches("many", start_ms=now_ms(), spread_ms=0, size=size, window_s=1, distinct=1)
    async with connections(node.port, LINES) as lines:
        await pump(lines, repeated(batches, jobs // size), seconds_max=2_400, progress=f"creating jobs by {size:,}")
        await asyncio.sleep(1.0)  # the last window of a second
        await lines[0].ask(batch_request(a_job("first", number, run_at_ms=now_ms() + 1_000) for number in range(PRECISE)))


async def after_start(node: Node, began: float) -> dict[str, float]:
    """Seconds from `began` to a green /readyz, to the first and the last precise job in a worker's hands, to everything loaded."""
    found: dict[str, float] = {}

    async def ready() -> None:
        async with connections(node.port, 1) as (line,):

            async def is_green() -> bool:
                return (await line.call(get("/readyz")))[0] == 200

            await until(is_green, every_s=0.005)
            found["ready"] = time.monotonic() - began

    async def precise() -> None:
        claimed = 0
        async with connections(node.port, 1) as (line,):
            while claimed < PRECISE:
                jobs = decode_claims(await line.ask(claim_request("first", jobs_max=PRECISE, wait_s=1)))
                if jobs:
                    found.setdefault("first", time.monotonic() - began)
                    claimed += len(jobs)
                    found["last"] = time.monotonic() - began
                    await line.ask(completion_request(jobs))

    async def loaded() -> None:
        async with connections(node.port, 1) as (line,):

            async def is_loaded() -> bool:
                return bool((await status_of(line))["loaded"])

            await until(is_loaded, every_s=0.05)
            found["loaded"] = time.monotonic() - began

    async with asyncio.timeout(LOADED_S_MAX), asyncio.TaskGroup() as tasks:
        for part in (ready, precise, loaded):
            tasks.create_task(part())
    return found


def measure(node: Node, *, mode: str, jobs: int, kill: bool) -> list[Figure]:
    node.start()
    run_loop(fill(node, mode, jobs))
    rss_full = node.rss_bytes()
    figures = [Figure("jobs", jobs, "jobs"), Figure("RSS before the stop", rss_full / 2**20, "MiB")]
    if kill:
        node.kill()
    else:
        code, exit_s = node.terminate()
        figures += [Figure("exit code of SIGTERM", abs(code), "", 0), Figure("SIGTERM to the end", exit_s, "s", EXIT_S_MAX)]
    time.sleep(1.5)  # the precise jobs come due
    began = time.monotonic()
    node.spawn()
    node.wait_listening()
    listening_s = time.monotonic() - began
    found = run_loop(after_start(node, began))
    if found["last"] < found["first"]:
        raise BenchmarkFailed("no precise job came")
    # Only with jobs that wait is memory bounded by name; due ones are in ready queues.
    rss_bound = RSS_MIB_MAX if mode == "waiting" else None
    precise_bound = PRECISE_S_MAX if mode == "due" else None
    return [
        *figures,
        Figure("start to listening", listening_s, "s"),
        Figure("start to /readyz", found["ready"], "s", READY_S_MAX),
        Figure("start to the first precise job", found["first"], "s", precise_bound),
        Figure("start to the last precise job", found["last"], "s", precise_bound, f"of {PRECISE}"),
        Figure("start to everything loaded", found["loaded"], "s"),
        Figure("RSS when loaded", node.rss_bytes() / 2**20, "MiB", rss_bound),
        Figure("RSS, max since the start", node.rss_peak_bytes() / 2**20, "MiB", rss_bound),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Restart with millions of jobs waiting or due.")
    parser.add_argument("--mode", choices=("waiting", "due"), default="waiting")
    parser.add_argument("--jobs", type=int, help="a multiple of 1,000 (5,000,000 waiting, 2,000,000 due)")
    parser.add_argument("--kill", action="store_true", help="end the first node by SIGKILL")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bound is broken")
    arguments = parser.parse_args()
    jobs = arguments.jobs or {"waiting": 5_000_000, "due": 2_000_000}[arguments.mode]
    jobs -= jobs % min(BATCH, jobs)
    with running_node(start=False) as node:
        figures = measure(node, mode=arguments.mode, jobs=jobs, kill=arguments.kill)
    how = "SIGKILL" if arguments.kill else "SIGTERM"
    return report(f"restart after {how} with {jobs:,} jobs {arguments.mode}", figures, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
