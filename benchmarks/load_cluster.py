"""Three nodes against one on the same machine: `python -m benchmarks.load_cluster [--jobs 20000] [--wakes 300] [--groups 8] [--check]`.

1. Creates in batches, then claims and completions of them, calls spread over all nodes: jobs a second, and what replication costs a job in
   messages, bytes between nodes, fsyncs, log entries and CPU time. All three nodes share the cores that one has for itself.
2. A job of a group that n1 leads comes due while a worker waits at n3 alone: from the due instant to the answer in its hands.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.client import (
    Connection,
    a_job,
    batch_request,
    claim_request,
    completion_request,
    connections,
    decode_claims,
    drain,
    instant_ms,
    now_ms,
    numbers_sum,
    pump,
    repeated,
    run_loop,
    same_batch,
    until,
)
from benchmarks.common import BenchmarkFailed, Figure, percentile, process_cpu_s, report, temporary_directory
from wheelsched.testing.cluster_process import ClusterProcesses, key_in_group

BATCH: Final = 100
LINES: Final = 6
SECONDS_MAX: Final = 900.0
WAKE_AHEAD_MS: Final = 400.0
WAKE_EVERY_S: Final = 0.04
WAITERS: Final = 4
WAKE_MS_P50_MAX, WAKE_MS_P99_MAX = 100.0, 500.0
_COUNTS: Final = ("messages", "bytes", "fsyncs", "entries", "turns")


@dataclass(frozen=True, slots=True)
class Cost:
    """What all nodes together did, as they tell it; `cpu_s` as the kernel does."""

    counts: dict[str, float]
    cpu_s: float

    def since(self, before: Cost) -> Cost:
        return Cost({name: count - before.counts[name] for name, count in self.counts.items()}, self.cpu_s - before.cpu_s)


@asynccontextmanager
async def lines_to(cluster: ClusterProcesses, count: int) -> AsyncIterator[list[Connection]]:
    """So many connections, to all nodes in turn."""
    async with AsyncExitStack() as stack:
        lines = []
        for number in range(count):
            name = cluster.names[number % len(cluster.names)]
            lines += await stack.enter_async_context(connections(cluster.http_ports[name], 1))
        yield lines


def cost_of(cluster: ClusterProcesses) -> Cost:
    found: list[Any] = [cluster.ask(name, "/status", 60.0) for name in cluster.names]
    if None in found:
        raise BenchmarkFailed("a node does not tell its /status")
    peers = [peer for status in found for peer in status.get("peers", ())]
    counts = (
        sum(peer["sent_messages"] for peer in peers), sum(peer["sent_bytes"] for peer in peers),
        sum(status["store"]["syncs"] for status in found), sum(status["log"]["entries"] for status in found),
        sum(status["log"]["turns"] for status in found),
    )  # fmt: skip
    return Cost(dict(zip(_COUNTS, counts, strict=True)), sum(process_cpu_s(node.pid) for node in cluster.nodes.values()))


async def idle_cost(cluster: ClusterProcesses, seconds: float) -> Cost:
    """A second of doing nothing."""
    before = cost_of(cluster)
    await asyncio.sleep(seconds)
    spent = cost_of(cluster).since(before)
    return Cost({name: count / seconds for name, count in spent.counts.items()}, spent.cpu_s / seconds)


@dataclass(frozen=True, slots=True)
class Throughput:
    creates_per_s: float
    ends_per_s: float
    creating: Cost
    working: Cost
    idle: Cost
    creating_s: float
    working_s: float


async def throughput(cluster: ClusterProcesses, jobs: int) -> Throughput:
    idle = await idle_cost(cluster, 3.0)
    async with lines_to(cluster, LINES) as lines:
        before = cost_of(cluster)
        created = await pump(lines, repeated([same_batch("load", size=BATCH, delay_s=0)], jobs // BATCH), seconds_max=SECONDS_MAX)
        between = cost_of(cluster)
        worked = await drain(lines, "load", jobs, seconds_max=SECONDS_MAX)
        after = cost_of(cluster)
    if worked.numbers != numbers_sum(jobs, BATCH):
        raise BenchmarkFailed("the jobs that came are not those that were created")
    seconds = worked.last_at - worked.first_at
    return Throughput(
        jobs / created.seconds, jobs / seconds, between.since(before), after.since(between), idle, created.seconds, seconds
    )  # fmt: skip


def cost_figures(what: str, jobs: int, spent: Cost, idle: Cost, seconds: float) -> list[Figure]:
    """Per job, without what the nodes would have done in that time anyway."""
    per_job = {name: (count - idle.counts[name] * seconds) / jobs for name, count in spent.counts.items()}
    units = {"messages": "messages", "bytes": "bytes", "fsyncs": "fsyncs", "entries": "entries"}
    figures = [Figure(f"{what}: {name} a job", per_job[name], unit) for name, unit in units.items()]
    return [*figures, Figure(f"{what}: CPU a job, all nodes", (spent.cpu_s - idle.cpu_s * seconds) / jobs * 1e6, "us")]


async def wakes(cluster: ClusterProcesses, leader: str, waiter: str, count: int) -> list[float]:
    """Milliseconds from due to answered of jobs that one node leads and a worker at another one waits for."""
    groups = await asyncio.to_thread(cluster.led_by, leader)
    if not groups:
        raise BenchmarkFailed(f"{leader} leads nothing")
    took_ms: list[float] = []
    async with connections(cluster.http_ports[leader], 1) as (creating,), connections(cluster.http_ports[waiter], WAITERS) as lines:

        async def wait(line: Connection) -> None:
            claim = claim_request("wake", jobs_max=1, wait_s=30)
            while True:
                for job in decode_claims(await line.ask(claim)):
                    took_ms.append(now_ms() - instant_ms(job.fire_at))
                    await line.ask(completion_request([job]))

        async def all_came() -> bool:
            return len(took_ms) >= count

        tasks = [asyncio.create_task(wait(line)) for line in lines]
        try:
            await asyncio.sleep(2.5)  # the waiting node's demand has been told, and renewed
            async with asyncio.timeout(SECONDS_MAX):
                for number in range(count):
                    key = key_in_group(f"wake-{leader}-{waiter}-{number}", groups[number % len(groups)], cluster.group_count)
                    job = a_job("wake", number, run_at_ms=now_ms() + WAKE_AHEAD_MS)
                    await creating.ask(batch_request([job[:-1] + b',"idempotency_key":"%b"}' % key.encode()]))
                    await asyncio.sleep(WAKE_EVERY_S)
                await until(all_came, every_s=0.05)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return took_ms


def measure(size: int, groups: int, jobs: int, wake_count: int) -> tuple[Throughput, list[float], list[float]]:
    """(throughput, wakes at the leader itself, wakes at another node)."""
    with temporary_directory() as directory:
        cluster = ClusterProcesses(directory, size, group_count=groups, settings={"logging.level": "warning"})
        try:
            cluster.start()
            leader = max(cluster.names, key=lambda name: len(cluster.led_by(name)))
            other = next((name for name in cluster.names if name != leader), leader)
            near = run_loop(wakes(cluster, leader, leader, wake_count))
            far = run_loop(wakes(cluster, leader, other, wake_count)) if other != leader else []
            return run_loop(throughput(cluster, jobs)), near, far
        except BaseException:
            print(cluster.log_tails(), file=sys.stderr)
            raise
        finally:
            cluster.kill()


def figures_of(size: int, found: Throughput, jobs: int) -> list[Figure]:
    name = "one node" if size == 1 else f"{size} nodes"
    return [
        Figure(f"{name}: creates in batches of {BATCH}", found.creates_per_s, "jobs/s"),
        Figure(f"{name}: claims and completions", found.ends_per_s, "jobs/s"),
        *cost_figures(f"{name}, create", jobs, found.creating, found.idle, found.creating_s),
        *cost_figures(f"{name}, claim and end", jobs, found.working, found.idle, found.working_s),
        Figure(f"{name}: CPU when idle, all nodes", found.idle.cpu_s * 100, "% of a core"),
    ]


def wake_figures(name: str, took_ms: Sequence[float], *, bounded: bool) -> list[Figure]:
    p50, p99 = (WAKE_MS_P50_MAX, WAKE_MS_P99_MAX) if bounded else (None, None)
    return [
        Figure(f"{name}, p50", percentile(took_ms, 0.5), "ms", p50, f"{len(took_ms)} jobs"),
        Figure(f"{name}, p99", percentile(took_ms, 0.99), "ms", p99),
        Figure(f"{name}, max", max(took_ms), "ms"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Three nodes against one, and what replication costs.")
    parser.add_argument("--jobs", type=int, default=20_000, help=f"a multiple of {BATCH} (20,000)")
    parser.add_argument("--wakes", type=int, default=300, help="single jobs for the latency from node to node (300)")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--check", action="store_true", help="exit 1 where a bound is broken")
    arguments = parser.parse_args()
    jobs = max(BATCH, arguments.jobs - arguments.jobs % BATCH)
    figures: list[Figure] = []
    for size in (1, 3):
        found, near, far = measure(size, arguments.groups, jobs, arguments.wakes)
        figures += figures_of(size, found, jobs)
        name = "one node" if size == 1 else f"{size} nodes"
        figures += wake_figures(f"{name}: due to a worker at the leader", near, bounded=False)
        if far:
            figures += wake_figures(f"{name}: due to a worker at another node", far, bounded=True)
    return report(f"a cluster of three against one node, {jobs:,} jobs, {arguments.groups} groups", figures, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
