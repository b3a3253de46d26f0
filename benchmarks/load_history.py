"""What a long history costs: `python -m benchmarks.load_history [--jobs 1000000] [--check]`.

Jobs are created, claimed and completed; then the first listing of the queue and the first claim are made, while /status is asked for the
loop's lag. What finished jobs leave behind in RocksDB must not be scanned: no turn may stall for more than 5 ms because of it. The
lag of the same node before there was anything in it is the machine's own share.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from typing import Final

from benchmarks.client import (
    Connection,
    Watch,
    a_job,
    claim_request,
    completion_request,
    connections,
    decode_claims,
    drain,
    get,
    post,
    pump,
    repeated,
    run_loop,
    same_batch,
    status_of,
    watched,
)
from benchmarks.common import BenchmarkFailed, Figure, Node, report, running_node

BATCH = 1_000
LINES = 8
QUIET_S = 3.0
STALL_MS_MAX: Final = 5.0
# A slice of so many at a time, so that the wheel and the ready queue never hold the whole history.
PART = 100_000


async def history(node: Node, jobs: int) -> None:
    size = min(BATCH, jobs)
    async with connections(node.port, LINES) as lines:
        for start in range(0, jobs, PART):
            part = min(PART, jobs - start) // size
            await pump(lines, repeated([same_batch("past", size=size, delay_s=0)], part), seconds_max=1_200)
            await drain(lines, "past", part * size, seconds_max=1_200)
            print(f"{start + part * size:,} finished", file=sys.stderr)


async def quiet(node: Node) -> Watch:
    """The loop's lag while nobody asks for anything but that."""
    async with watched(node.port, node.rss_bytes, interval_s=0.1) as watch:
        await asyncio.sleep(QUIET_S)
    return watch


async def first_calls(node: Node, *, name: str, lag_ms: float) -> list[Figure]:
    """Each call once, on a connection of its own, with a second after it in which its stall shows."""
    figures = []
    async with connections(node.port, 2) as (line, looking):
        for what, request in (
            ("listing", get("/v1/jobs?queue=past&limit=100")),
            ("listing of SUCCEEDED", get("/v1/jobs?queue=past&status=SUCCEEDED&limit=100")),
            ("listing of QUEUED", get("/v1/jobs?queue=past&status=QUEUED&limit=100")),
            ("queues", get("/v1/queues/past")),
            ("claim of nothing", claim_request("past", jobs_max=1)),
            ("create", post("/v1/jobs", a_job("past", 1))),
        ):
            figures += await _timed(line, looking, f"{name} {what}", request, lag_ms)
        began = time.perf_counter()
        jobs = decode_claims(await line.ask(claim_request("past", jobs_max=1, wait_s=10)))
        took_ms = (time.perf_counter() - began) * 1000
        if len(jobs) != 1:
            raise BenchmarkFailed("the new job did not come")
        figures.append(Figure(f"{name} claim of a new job", took_ms, "ms"))
        await line.ask(completion_request(jobs))
    return figures


async def _timed(line: Connection, looking: Connection, name: str, request: bytes, lag_ms: float) -> list[Figure]:
    await asyncio.sleep(1.2)  # the lag of what was before is forgotten
    began = time.perf_counter()
    await line.ask(request)
    took_ms = (time.perf_counter() - began) * 1000
    await asyncio.sleep(0.1)  # a stall shows at the next sample
    stall_ms = (await status_of(looking))["loop_lag_ms"]
    return [Figure(name, took_ms, "ms"), Figure(f"{name}, loop lag", stall_ms, "ms", STALL_MS_MAX + lag_ms)]


def measure(node: Node, jobs: int, *, restart: bool) -> list[Figure]:
    before = run_loop(quiet(node))
    run_loop(history(node, jobs))
    figures = [
        Figure("finished", jobs, "jobs"),
        Figure("loop lag of an empty node, max", before.loop_lag_ms_max, "ms", None, "added to the bound of 5 ms"),
        Figure("disk per finished job", node.disk_bytes() / jobs, "bytes"),
        Figure("RSS", node.rss_bytes() / 2**20, "MiB"),
    ]
    figures += run_loop(first_calls(node, name="first", lag_ms=before.loop_lag_ms_max))
    if restart:
        code, exit_s = node.terminate()
        figures += [Figure("exit code of SIGTERM", abs(code), "", 0), Figure("SIGTERM to the end", exit_s, "s", 5.0)]
        figures.append(Figure("start to /readyz", node.start(), "s", 5.0))
        figures += run_loop(first_calls(node, name="after a restart,", lag_ms=before.loop_lag_ms_max))
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description="First listing and first claim after a million finished jobs.")
    parser.add_argument("--jobs", type=int, default=1_000_000, help="a multiple of 1,000 (1,000,000)")
    parser.add_argument("--restart", action="store_true", help="do it once more after a restart")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bound is broken")
    arguments = parser.parse_args()
    jobs = arguments.jobs - arguments.jobs % min(BATCH, arguments.jobs)
    with running_node() as node:
        figures = measure(node, jobs, restart=arguments.restart)
    return report(f"history of {jobs:,} finished jobs", figures, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
