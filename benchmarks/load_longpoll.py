"""Long polls: `python -m benchmarks.load_longpoll [--waiters 1000] [--wakes 500] [--rounds 1000] [--check]`.

1. Many idle workers wait on one queue; single jobs come due. From the due instant to the answer in a worker's hands.
2. Clients that hang up within 5 ms of a job becoming ready: half of them close before the answer can have been sent, half
   leave it unread and reset. The job has to reach the next worker at once, as its first attempt: none lost, none waiting for
   a lease to end.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import struct
import sys
import time

from benchmarks.client import (
    Claimed,
    Connection,
    a_job,
    claim_request,
    completion_request,
    connections,
    decode_claims,
    instant_ms,
    now_ms,
    post,
    run_loop,
    status_of,
    until,
    watched,
)
from benchmarks.common import BenchmarkFailed, Figure, Node, percentile, report, running_node

WAKES_PER_S = 50.0
LANES = 20  # rounds under way at once, each with a queue of its own
HANGUP_MS = 5.0
LEASE_S = 120.0  # a job that waits for it is seen at once
HANDED_ON_MS_MAX = 15_000.0


async def wakes(node: Node, waiters: int, count: int) -> list[Figure]:
    took_ms: list[float] = []
    seen: set[int] = set()
    rss_before = node.rss_bytes()
    async with connections(node.port, waiters + 1) as lines, watched(node.port, node.rss_bytes) as watch:
        creating = lines.pop()
        claim = claim_request("wake", jobs_max=1, wait_s=60)

        async def wait(line: Connection) -> None:
            while True:
                for job in decode_claims(await line.ask(claim)):
                    took_ms.append(now_ms() - instant_ms(job.fire_at))
                    seen.add(job.payload.number)
                    await line.ask(completion_request([job]))

        async def all_wait() -> bool:
            return bool((await status_of(creating))["waiters"] >= waiters)

        async def all_came() -> bool:
            return len(took_ms) >= count

        tasks = [asyncio.create_task(wait(line)) for line in lines]
        try:
            async with asyncio.timeout(count / WAKES_PER_S * 5 + 120):
                await until(all_wait, every_s=0.05)
                rss_waiting = node.rss_bytes()
                for number in range(count):
                    await creating.ask(post("/v1/jobs", a_job("wake", number, delay_s=0.1)))
                    await asyncio.sleep(1 / WAKES_PER_S)
                await until(all_came, every_s=0.05)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    if len(seen) != count or len(took_ms) != count:
        raise BenchmarkFailed(f"{len(took_ms)} answers with {len(seen)} of {count} jobs")
    return [
        Figure("waiters", waiters, "calls"),
        Figure("RSS per waiter", (rss_waiting - rss_before) / max(waiters, 1) / 1024, "KiB"),
        Figure("due to answered, p50", percentile(took_ms, 0.5), "ms", 50.0, f"{count} single wakes at {WAKES_PER_S:g}/s"),
        Figure("due to answered, p99", percentile(took_ms, 0.99), "ms", 200.0),
        Figure("due to answered, max", max(took_ms), "ms"),
        Figure("loop lag, max", watch.loop_lag_ms_max, "ms"),
    ]


async def hang_ups(node: Node, rounds: int, seed: int) -> list[Figure]:
    rng = random.Random(seed)
    left = iter(range(rounds))
    handed_on_ms: list[float] = []
    counted: list[int] = []  # attempts that the next worker saw

    async def lane(name: str, line: Connection) -> None:
        for number in left:
            job = await _one_round(node.port, line, name, number, unread=number % 2 == 1, rng=rng)
            handed_on_ms.append(now_ms() - instant_ms(job.fire_at))
            counted.append(job.attempt)

    async with connections(node.port, LANES) as lines:
        async with asyncio.timeout(rounds * 2 + 120), asyncio.TaskGroup() as tasks:
            for place, line in enumerate(lines):
                tasks.create_task(lane(f"lane-{place}", line))
        in_flight = (await status_of(lines[0]))["in_flight"]
    return [
        Figure("hang-ups", rounds, "rounds", None, "half before the answer, half with it unread"),
        Figure("attempts counted in vain", sum(attempt - 1 for attempt in counted), "attempts", 0.0),
        Figure("jobs lost", rounds - len(counted), "jobs", 0.0),
        Figure("still leased at the end", in_flight, "jobs", 0.0),
        Figure("due to handed on, p99", percentile(handed_on_ms, 0.99), "ms"),
        Figure("due to handed on, max", max(handed_on_ms), "ms", HANDED_ON_MS_MAX, f"the lease is {LEASE_S:g} s"),
    ]


async def _one_round(port: int, line: Connection, queue: str, number: int, *, unread: bool, rng: random.Random) -> Claimed:
    """A client waits and hangs up about when its job comes due; then the job is asked for by somebody who stays."""
    loop = asyncio.get_running_loop()
    deserter = socket.socket()
    deserter.setblocking(False)
    try:
        await loop.sock_connect(deserter, ("127.0.0.1", port))
        await loop.sock_sendall(deserter, claim_request(queue, jobs_max=1, wait_s=30, lease_s=LEASE_S))
        due_ms = round(now_ms() + 60 + rng.random() * 20)
        await line.ask(post("/v1/jobs", a_job(queue, number, run_at_ms=due_ms)))
        # Nothing is ever read from this socket, so that closing it after an answer resets it as well.
        offset_ms = rng.uniform(0, HANGUP_MS) if unread else rng.uniform(-HANGUP_MS, 0)
        await asyncio.sleep(max(due_ms + offset_ms - now_ms(), 0) / 1000)
        if unread:
            deserter.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    finally:
        deserter.close()
    give_up = time.monotonic() + LEASE_S * 2
    while time.monotonic() < give_up:
        jobs = decode_claims(await line.ask(claim_request(queue, jobs_max=1, wait_s=10, lease_s=LEASE_S)))
        if jobs:
            if jobs[0].payload.number != number:
                raise BenchmarkFailed(f"job {jobs[0].payload.number} came instead of {number}")
            await line.ask(completion_request(jobs))
            return jobs[0]
    raise BenchmarkFailed(f"job {number} of {queue} did not come back within {LEASE_S * 2:g} s")


def main() -> int:
    parser = argparse.ArgumentParser(description="A thousand idle long polls, and clients that hang up.")
    parser.add_argument("--waiters", type=int, default=1_000, help="idle calls on one queue (1,000)")
    parser.add_argument("--wakes", type=int, default=500, help="single jobs (500)")
    parser.add_argument("--rounds", type=int, default=1_000, help="hang-ups (1,000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="exit 1 where a bound is broken")
    arguments = parser.parse_args()
    with running_node() as node:
        figures = run_loop(wakes(node, arguments.waiters, arguments.wakes))
        figures += run_loop(hang_ups(node, arguments.rounds, arguments.seed))
    return report(f"long polls, seed {arguments.seed}", figures, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
