"""What a node does over HTTP, durable: `python -m benchmarks.bench_http [small|large|scaling]`.

A real `wheelsched dev` on a temporary directory in a process of its own; this process is the client, and pays for about a fifth to a
third of the two cores while it loads them. Figures that end in `_cpu` are the node's alone, all threads.

Sketch: 64 clients with one create each are one turn: 64 requests of some 20 us and one fsync. A batch of 100 is one request and about
8 us of rows a job. A fire writes one row for each group and turn, so it costs what the wheel and the ready queue cost, well under a
microsecond. A claim is one row and one read a job, a completion three rows.

Baselines, in the same run: RocksDB alone with the rows of as many jobs a commit as are under way here; a PostgreSQL table with SKIP
LOCKED driven by pgbench, where a server is installed; `heapq` for firing. Every figure's work is checked against what the node counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from benchmarks import plain
from benchmarks.client import (
    Claimed,
    Connection,
    Worked,
    a_job,
    batch_request,
    claim_request,
    completion_request,
    connections,
    decode_claims,
    drain,
    instant_ms,
    metric,
    now_ms,
    numbers_sum,
    post,
    pump,
    repeated,
    run_loop,
    same_batch,
    spread_batches,
    status_of,
    until,
    work,
)
from benchmarks.common import BenchmarkFailed, Node, Row, main_of, percentile, row, running_node
from benchmarks.postgres import MISSING, Postgres, postgres

DAY_S: Final = 86_400.0
NEAR_S: Final = 240.0  # within the horizon of 300 s: its timers are in memory
SINGLE_LINES: Final = 64
BATCH_LINES: Final = 16
WORK_LINES: Final = 8
BATCH: Final = 100
BATCH_MAX: Final = 1_000
WAKES_PER_S: Final = 100
LEAD_MS: Final = 100.0
WARM_UP: Final = 200
HEAP_SAMPLE: Final = 1_000_000
# A rate is sustained where what is left at the end would be worked off in this long, and creates kept their pace.
BACKLOG_S: Final = 0.5
PACE_SHARE: Final = 0.97
RATES_MAX: Final = 40
BUSY_RATE_S: Final = 600.0  # the longest a phase may take


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of one pass. `first_rate` and `step_s`: where the search for the sustained rate begins and how long it tries each."""

    single: int
    batch: int
    fire: int
    waiters: int
    wakes: int
    first_rate: int
    step_s: float
    search: bool = True
    single_lines: tuple[int, ...] = (SINGLE_LINES,)
    postgres_s: int = 5


SIZES: Final[dict[str, tuple[Plan, ...]]] = {
    "small": (Plan(300, 1_000, 1_000, 20, 20, 1_000, 0.5, search=False, postgres_s=1),),
    "large": (Plan(100_000, 1_000_000, 500_000, 1_000, 1_000, 4_000, 8.0),),
    "scaling": (
        Plan(10_000, 20_000, 20_000, 100, 200, 4_000, 4.0, single_lines=(16, 64, 512)),
        Plan(30_000, 100_000, 100_000, 300, 300, 4_000, 4.0),
        Plan(100_000, 500_000, 300_000, 1_000, 500, 4_000, 4.0, single_lines=(64, 512)),
    ),
}


def run(size: str = "small") -> list[Row]:
    """Rows for a size; KeyError for another."""
    rows: list[Row] = []
    with postgres() as server:
        for plan in SIZES[size]:
            baselines = Baselines(server, plan)
            with running_node() as node:
                rows += run_loop(_http_rows(node, plan, baselines))
    return rows


# --- baselines ------------------------------------------------------------------------------------------------------------------


class Baselines:
    """Each measured when it is first asked for, before the node's own figure: never at the same time."""

    def __init__(self, server: Postgres | None, plan: Plan) -> None:
        self._server, self._plan = server, plan

    def rows(self, figure: Callable[..., Row], rocks: float | None, batch: int, of_server: Callable[[Postgres], float]) -> list[Row]:
        """The figure against RocksDB and against PostgreSQL."""
        rows = [] if rocks is None else [figure(baseline=f"RocksDB, {batch:,} a sync", baseline_value=rocks)]
        if self._server is None:
            return [*rows, figure(baseline=MISSING)]
        return [*rows, figure(baseline=f"{self._server.name}, SKIP LOCKED", baseline_value=of_server(self._server))]


def heap_fires_per_s(n: int) -> float:
    """Pops of `n` timers that are all due."""
    n = min(n, HEAP_SAMPLE)
    rng = random.Random(1)
    heap = [(rng.random(), number) for number in range(n)]
    heapq.heapify(heap)
    began = time.perf_counter()
    due = []
    while heap:
        due.append(heapq.heappop(heap))
    return n / (time.perf_counter() - began)


# --- one pass -------------------------------------------------------------------------------------------------------------------


async def _http_rows(node: Node, plan: Plan, baselines: Baselines) -> list[Row]:
    rows: list[Row] = []
    await _warm_up(node)
    for lines in plan.single_lines:
        rows += await _single_creates(node, plan, baselines, lines)
    rows += await _batch_creates(node, plan, baselines)
    rows += await _fires_and_claims(node, plan, baselines)
    rows += await _lifecycle(node, plan, baselines)
    rows += await _wakes(node, plan)
    # Last, for these come due in four minutes.
    return rows + await _waiting(node, plan)


async def _warm_up(node: Node) -> None:
    """The first calls of a process pay for its imports and caches."""
    async with connections(node.port, BATCH_LINES) as lines:
        await pump(lines, repeated([post("/v1/jobs", a_job("warm", 0, delay_s=DAY_S))], WARM_UP), seconds_max=60)
        await pump(lines, repeated([same_batch("warm", size=BATCH, delay_s=0)], 1), seconds_max=60)
        await drain(lines[:1], "warm", BATCH, seconds_max=60)


@contextlib.contextmanager
def _node_cpu(node: Node, n: int, name: str, rows: list[Row]) -> Iterator[None]:
    """The node's CPU time over `n` jobs, as a row."""
    before = node.cpu_s()
    yield
    rows.append(row(name, n, (node.cpu_s() - before) / n * 1e6, "us CPU/job"))


async def _single_creates(node: Node, plan: Plan, baselines: Baselines, line_count: int) -> list[Row]:
    n = plan.single
    extra: list[Row] = []
    rocks = plain.creates_per_s(n, line_count)
    async with connections(node.port, line_count) as lines:
        before = await metric(lines[0], "wheelsched_jobs_created_total")
        requests = [post("/v1/jobs", a_job("single", number, delay_s=DAY_S)) for number in range(BATCH)]
        with _node_cpu(node, n, f"create_single_{line_count}_cpu", extra):
            pumped = await pump(lines, repeated(requests, n), seconds_max=BUSY_RATE_S)
        await _expect_created(lines[0], before, n)
    name = f"create_single_{line_count}"
    figure = partial(row, name, n, n / pumped.seconds, "jobs/s", checksum=numbers_sum(n, BATCH))
    extra.append(row(name + "_p99", n, percentile(pumped.latencies_ms, 0.99), "ms"))
    return baselines.rows(figure, rocks, line_count, lambda server: server.creates_per_s(n, clients=min(line_count, 64))) + extra


async def _batch_creates(node: Node, plan: Plan, baselines: Baselines) -> list[Row]:
    """Jobs a day ahead, beyond the horizon; what they take of disk and memory."""
    n = plan.batch
    disk_before, rss_before, store_before = node.disk_bytes(), node.rss_bytes(), _store_bytes(node)
    rows = await _creates(node, plan, baselines, size=BATCH, line_count=BATCH_LINES)
    grown = node.rss_bytes() - rss_before
    apart = grown - (_store_bytes(node) - store_before)
    rows.append(row("rss_per_waiting_job", n, grown / n, "bytes"))
    rows.append(row("rss_per_waiting_job_without_store_caches", n, apart / n, "bytes"))
    on_disk = partial(row, "disk_per_waiting_job", n, (node.disk_bytes() - disk_before) / n, "bytes")
    # The table is the one that was filled last.
    rows += baselines.rows(on_disk, None, 0, lambda server: server.bytes_per_job())
    # More connections would have more under way than the node takes (10,000 commands), and be told so.
    return rows + await _creates(node, plan, baselines, size=BATCH_MAX, line_count=BATCH_LINES // 2)


async def _creates(node: Node, plan: Plan, baselines: Baselines, *, size: int, line_count: int) -> list[Row]:
    n, name, under_way = plan.batch, f"create_batch_{size}", size * line_count
    extra: list[Row] = []
    rocks = plain.creates_per_s(n, under_way)
    async with connections(node.port, line_count) as lines:
        before = await metric(lines[0], "wheelsched_jobs_created_total")
        with _node_cpu(node, n, f"{name}_cpu", extra):
            pumped = await pump(lines, repeated([same_batch("batch", size=size, delay_s=DAY_S)], n // size), seconds_max=BUSY_RATE_S)
        await _expect_created(lines[0], before, n)
    figure = partial(row, name, n, n / pumped.seconds, "jobs/s", checksum=numbers_sum(n, size))
    extra.append(row(f"{name}_p99", n, percentile(pumped.latencies_ms, 0.99), "ms"))
    if size != BATCH:
        return [figure(baseline=f"RocksDB, {under_way:,} a sync", baseline_value=rocks), *extra]
    return baselines.rows(figure, rocks, under_way, lambda server: server.batch_creates_per_s(n, clients=line_count)[0]) + extra


async def _waiting(node: Node, plan: Plan) -> list[Row]:
    """Jobs due within the horizon: their timers are in the wheel."""
    n = plan.batch // 4
    before, rss_before, store_before = node.status()["timers"], node.rss_bytes(), _store_bytes(node)
    async with connections(node.port, BATCH_LINES) as lines:
        batches = spread_batches("near", start_ms=now_ms() + NEAR_S * 1000, spread_ms=30_000, size=BATCH)
        await pump(lines, repeated(batches, n // BATCH), seconds_max=NEAR_S / 2)
    after = node.status()["timers"]
    if after["count"] - before["count"] != n // BATCH * BATCH:
        raise BenchmarkFailed(f"{after['count'] - before['count']} timers were loaded for {n} jobs")
    apart = node.rss_bytes() - rss_before - (_store_bytes(node) - store_before)
    entry_bytes = 8 + 56 + 24 + 32  # a heap's slot, a tuple of two, a float, an int
    return [
        row("wheel_per_waiting_job", n, (after["bytes"] - before["bytes"]) / n, "bytes", "heapq, computed", entry_bytes),
        row("rss_per_loaded_job_without_store_caches", n, apart / n, "bytes"),
    ]


def _store_bytes(node: Node) -> int:
    found: int = node.status()["store"]["memory_bytes"]
    return found


async def _fires_and_claims(node: Node, plan: Plan, baselines: Baselines) -> list[Row]:
    n = plan.fire
    rows: list[Row] = []
    heap = heap_fires_per_s(n)
    under_way = BATCH * WORK_LINES
    _, rocks = plain.lifecycles_per_s(n, under_way)
    async with connections(node.port, BATCH_LINES) as lines:
        due_ms, spread_ms = await _create_burst(lines, n)
        fired_at = await _wait_fired(lines[0], n, due_ms)
        rows.append(row("fire_burst", n, n / (fired_at - due_ms) * 1000, "jobs/s", f"heapq, pops, {min(n, HEAP_SAMPLE):,}", heap))
        rows.append(row("fire_burst_last", n, fired_at - due_ms - spread_ms, "ms", higher_is_better=False))
        with _node_cpu(node, n, "claim_complete_100_cpu", rows):
            worked = await drain(lines[:WORK_LINES], "burst", n, seconds_max=BUSY_RATE_S)
    if worked.numbers != numbers_sum(n, BATCH):
        raise BenchmarkFailed(f"the jobs completed are others than those created: {worked.numbers}")
    rate = n / max(worked.last_at - worked.first_at, 1e-9)
    figure = partial(row, "claim_complete_100", n, rate, "jobs/s", checksum=worked.numbers)
    return rows + baselines.rows(figure, rocks, under_way, lambda server: server.work_per_s(n, clients=WORK_LINES))


async def _create_burst(lines: list[Connection], n: int) -> tuple[float, float]:
    """`n` jobs due within one second, none of it while they are still being created: (first instant, spread) in ms."""
    spread_ms = min(1_000.0, n / 1_000)  # a million a second: no more than what is to be found out
    ahead_s = 0.5 + n / 8_000
    while True:
        due_ms = now_ms() + ahead_s * 1000
        batches = spread_batches("burst", start_ms=due_ms, spread_ms=spread_ms, size=BATCH)
        before = await metric(lines[0], "wheelsched_jobs_fired_total")
        await pump(lines, repeated(batches, n // BATCH), seconds_max=BUSY_RATE_S)
        if now_ms() < due_ms - 200 and await metric(lines[0], "wheelsched_jobs_fired_total") == before:
            return due_ms, spread_ms
        # Slower than thought: away with them, and more time.
        await drain(lines, "burst", n, seconds_max=BUSY_RATE_S)
        ahead_s *= 3


async def _wait_fired(line: Connection, n: int, due_ms: float) -> float:
    """The instant (ms) at which /metrics said that all have fired."""
    name = "wheelsched_jobs_fired_total"
    before = await metric(line, name)
    await asyncio.sleep(max(due_ms - now_ms(), 0) / 1000)
    # A look costs the node about a millisecond.
    interval_s = min(max(n / 5e6, 0.002), 0.05)

    async def has_fired() -> bool:
        return await metric(line, name) - before >= n

    async with asyncio.timeout(120):
        await until(has_fired, every_s=interval_s)
    return now_ms()


async def _expect_created(line: Connection, before: float, n: int) -> None:
    found = await metric(line, "wheelsched_jobs_created_total") - before
    if found != n:
        raise BenchmarkFailed(f"the node counts {found:g} jobs created, not {n}")


# --- the whole lifecycle at a rate ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sustained:
    """How a rate went. `left`: jobs created and not completed when the time was up."""

    rate: int
    created: int
    completed: int
    left: int
    late_ms: list[float]
    cpu_us: float

    def holds(self, seconds: float) -> bool:
        return self.created >= self.rate * seconds * PACE_SHARE and self.left <= self.rate * BACKLOG_S


async def _lifecycle(node: Node, plan: Plan, baselines: Baselines) -> list[Row]:
    """The highest rate at which the backlog does not grow: up by halves until one does not hold, then two steps back."""
    under_way = BATCH * BATCH_LINES
    rocks, _ = plain.lifecycles_per_s(min(plan.fire, 50_000), under_way)
    held: Sustained | None = None
    low, high, rate = 0, 0, plan.first_rate
    for _ in range(RATES_MAX):
        tried = await _at_rate(node, rate, plan.step_s)
        if tried.holds(plan.step_s) or not plan.search:
            low, held = rate, tried
        else:
            high = rate
        if not plan.search or (high and high - low <= high // 12) or high == 1:
            break
        rate = rate * 3 // 2 if not high else max((low + high) // 2 // 100 * 100, 1)
        if rate == low:
            break
    if held is None:
        raise BenchmarkFailed(f"no rate down to {rate} jobs/s could be sustained")
    done_per_s = held.completed / plan.step_s
    figure = partial(row, "lifecycle_sustained", held.completed, done_per_s, "jobs/s")
    rows = baselines.rows(figure, rocks, under_way, lambda server: server.lifecycles_per_s(plan.postgres_s, clients=BATCH_LINES))
    if held.late_ms:
        rows += [row(f"lifecycle_lateness_{name}", held.completed, percentile(held.late_ms, q), "ms") for name, q in
                 (("p50", 0.5), ("p99", 0.99))]  # fmt: skip
    return [*rows, row("lifecycle_cpu", held.completed, held.cpu_us, "us CPU/job")]


async def _at_rate(node: Node, rate: int, seconds: float) -> Sustained:
    """Create at a steady pace, half due now and half 100 ms ahead, with workers at it; then work off the rest, uncounted."""
    late_ms: list[float] = []
    worked = Worked()
    created = 0
    ended = False
    loop = asyncio.get_running_loop()
    batches = [same_batch("life", size=BATCH, delay_s=0), same_batch("life", size=BATCH, delay_s=LEAD_MS / 1000)]
    queue_of_lines: asyncio.Queue[Connection] = asyncio.Queue()

    def on_jobs(jobs: list[Claimed]) -> None:
        # One of each claim: reading all their instants would cost the client more than the claim does.
        late_ms.append(now_ms() - instant_ms(jobs[-1].fire_at))

    async def send(line: Connection, request: bytes) -> None:
        nonlocal created
        await line.ask(request)
        created += BATCH
        queue_of_lines.put_nowait(line)

    async with connections(node.port, BATCH_LINES + WORK_LINES) as lines:
        for line in lines[:BATCH_LINES]:
            queue_of_lines.put_nowait(line)
        cpu_before, began = node.cpu_s(), loop.time()
        async with asyncio.timeout(seconds * 10 + 120), asyncio.TaskGroup() as tasks:
            for line in lines[BATCH_LINES:]:
                tasks.create_task(
                    work(line, "life", worked, jobs_max=BATCH, wait_s=0.2, on_jobs=on_jobs, until=lambda: ended and worked.jobs >= created)
                )
            async with asyncio.TaskGroup() as senders:
                for number in range(int(rate * seconds) // BATCH):
                    await asyncio.sleep(max(began + number * BATCH / rate - loop.time(), 0))
                    if loop.time() - began >= seconds:
                        break
                    line = await queue_of_lines.get()  # all under way: the node is behind, and so is the pace
                    senders.create_task(send(line, batches[number & 1]))
            await asyncio.sleep(max(began + seconds - loop.time(), 0))
            done, made, cpu = worked.jobs, created, node.cpu_s() - cpu_before
            ended = True
    if worked.numbers != numbers_sum(created, BATCH) or worked.jobs != created:
        raise BenchmarkFailed(f"{worked.jobs} of {created} jobs came through")
    # What is due 100 ms ahead is no backlog yet.
    left = max(made - done - int(rate * LEAD_MS / 2_000), 0)
    return Sustained(rate, made, done, left, late_ms, cpu / max(done, 1) * 1e6)


# --- long polls -----------------------------------------------------------------------------------------------------------------


async def _wakes(node: Node, plan: Plan) -> list[Row]:
    """Single jobs become due while many wait: from the due instant to the answer in a worker's hands."""
    took_ms: list[float] = []
    numbers = 0
    async with connections(node.port, plan.waiters + 2) as lines:
        *waiting, creating, looking = lines
        claim = claim_request("wake", jobs_max=1, wait_s=60)

        async def wait(line: Connection) -> None:
            nonlocal numbers
            while len(took_ms) < plan.wakes:
                jobs = decode_claims(await line.ask(claim))
                for job in jobs:
                    took_ms.append(now_ms() - instant_ms(job.fire_at))
                    numbers += job.payload.number
                if jobs:
                    await line.ask(completion_request(jobs))

        tasks = [asyncio.create_task(wait(line)) for line in waiting]
        try:
            async with asyncio.timeout(plan.wakes / WAKES_PER_S * 5 + 60):
                await _until_waiting(looking, plan.waiters)
                for number in range(plan.wakes):
                    await creating.ask(batch_request([a_job("wake", number, delay_s=0.05)]))
                    await asyncio.sleep(1 / WAKES_PER_S)
                while len(took_ms) < plan.wakes:
                    _raise_first(tasks)
                    await asyncio.sleep(0.02)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    if numbers != plan.wakes * (plan.wakes - 1) // 2:
        raise BenchmarkFailed(f"{len(took_ms)} jobs reached the waiters, not one of each of {plan.wakes}")
    name = f"long_poll_wake_{plan.waiters}"
    return [
        row(f"{name}_p50", plan.wakes, percentile(took_ms, 0.5), "ms", checksum=numbers),
        row(f"{name}_p99", plan.wakes, percentile(took_ms, 0.99), "ms", checksum=numbers),
    ]


async def _until_waiting(line: Connection, count: int) -> None:
    async def all_wait() -> bool:
        return bool((await status_of(line))["waiters"] >= count)

    await until(all_wait, every_s=0.02)


def _raise_first(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error


if __name__ == "__main__":
    main_of("http", run)
