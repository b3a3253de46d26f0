"""What the layers below HTTP cost: `python -m benchmarks.bench_engine [small|large|scaling]`.

- `engine_*`: the state machine alone, entries of 100 commands over rows in memory; CPU time of this thread, per command, beside that of
  writing the resulting rows to RocksDB without an fsync.
- `ready_*`: the ready queue, packed records in batches of 1,000 against `heapq`.
- `node_*`: a whole node in this process on a temporary directory, durable: log, fsync, apply, dispatch; 16 callers with 100 jobs each.

Sketch: a create puts a log entry's share, a job row, a state row, an index row and a share of the counts, so about 4 row operations of
1.2 to 2 us beside some 4 us of Python. A claim is one state row, a completion a done row, a state row and two deletions. Baseline of
`node_*`: the very writes and fsyncs that the node made, recorded, made again by RocksDB alone.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.client import run_loop
from benchmarks.common import BenchmarkFailed, Row, main_of, row, temporary_directory
from wheelsched.core.ids import new_job_id
from wheelsched.core.settings import Settings, StoreSettings
from wheelsched.engine import GroupMachine, Transaction, needs_reading, prefetch_job_keys, prefetch_state_keys
from wheelsched.fairness import ReadyQueue
from wheelsched.model import keys
from wheelsched.model.commands import COMMAND_VERSION, AnyCommand, Claim, Complete, Create, Entry, Fire, Reply
from wheelsched.model.rows import TIMER, GroupState, JobSpec, JobState, QueueCounts, encode_spec
from wheelsched.model.states import Outcome, Priority
from wheelsched.node import Node, open_node
from wheelsched.runtime.logs import setup_logs
from wheelsched.store.rocks import RocksStore

SIZES: Final = {"small": (2_000,), "large": (200_000,), "scaling": (10_000, 50_000, 200_000)}
ENTRY_COMMANDS: Final = 100
BATCH: Final = 100
CALLERS: Final = 16
READY_BATCH: Final = 1_000
TAKE: Final = 100
RECORDED_JOBS_MAX: Final = 20_000  # a job's rows and log are some 2 KB: what is made again has to fit into memory
PAYLOAD: Final = b'{"text":"' + b"x" * 488 + b'"}'
START_MS: Final = 1_800_000_000_000
QUEUE: Final = "bench"
SECONDS_MAX: Final = 600.0

Writes = Mapping[str, Mapping[bytes, bytes | None]]
Ranges = Sequence[tuple[str, bytes, bytes]]


def run(size: str = "small") -> list[Row]:
    """Rows for a size; KeyError for another."""
    setup_logs(level="warning", format="text")
    rows: list[Row] = []
    for n in SIZES[size]:
        rows += engine_rows(n)
        rows += ready_rows(n)
        rows += run_loop(node_rows(n))
    return rows


def a_create(job_id: bytes, run_at_ms: int) -> Create:
    """-1 as `run_at_ms`: due at once."""
    return Create(job_id, "default", QUEUE, Priority.DEFAULT, run_at_ms, 0, 0, 0, encode_spec(JobSpec(0)), PAYLOAD)


# --- the state machine ----------------------------------------------------------------------------------------------------------


class Rows:
    """A `StateReader` over dictionaries. Nothing here scans."""

    def __init__(self) -> None:
        self.families: dict[str, dict[bytes, bytes]] = {family: {} for family in keys.STATE_FAMILIES}

    def get(self, family: str, key: bytes) -> bytes | None:
        return self.families[family].get(key)

    def scan(self, family: str, start: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        raise NotImplementedError

    def scan_back(self, family: str, start: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        raise NotImplementedError

    def take(self, writes: Writes) -> None:
        for family, changes in writes.items():
            rows = self.families[family]
            for key, value in changes.items():
                if value is None:
                    rows.pop(key, None)
                else:
                    rows[key] = value


class Group:
    """One group, driven as `replica/` drives it; `cpu_ns` counts preloading, applying and encoding the rows."""

    def __init__(self, store: RocksStore) -> None:
        self.rows = Rows()
        self.state = GroupState()
        self.machine = GroupMachine(0)
        self.cpu_ns = 0
        self.write_ns = 0
        self.counts: dict[tuple[str, str], QueueCounts] = {}
        # What the replica keeps of leased jobs from their claim to their end.
        self.kept_states: dict[bytes, JobState] = {}
        self.kept_rows: dict[bytes, bytes] = {}
        self._store = store

    def _keep_leased(self, replies: Sequence[Reply]) -> None:
        for state in [state for reply in replies for state in reply.states if state is not None]:
            row = self.rows.get(keys.JOBS, keys.job_key(0, state.lane, state.fire_at_ms, state.job_id))
            assert row is not None
            self.kept_states[state.job_id], self.kept_rows[state.job_id] = state, row

    def apply(self, stamp_ms: int, commands: Sequence[AnyCommand]) -> list[Reply]:
        entry = Entry(COMMAND_VERSION, stamp_ms, list(commands))
        began = time.thread_time_ns()
        txn = Transaction(0, self.rows, self.counts, self.kept_states, self.kept_rows)
        unread = needs_reading(entry.commands, Create, Complete, self.kept_states, self.kept_rows)
        if unread:
            reading = Entry(COMMAND_VERSION, stamp_ms, unread)
            for job_id in prefetch_state_keys(reading):
                txn.preload(job_id, self.rows.get(keys.STATE, keys.state_key(0, job_id)))
            for key in prefetch_job_keys(reading, txn):
                txn.preload_row(keys.JOBS, key, self.rows.get(keys.JOBS, key))
        replies, _ = self.machine.apply(self.state, txn, entry)
        txn.finish()
        self.cpu_ns += time.thread_time_ns() - began
        self._keep_leased(replies)
        self.rows.take(txn.writes)
        began = time.thread_time_ns()
        self._store.write(txn.writes, txn.ranges)
        self.write_ns += time.thread_time_ns() - began
        return replies

    def timed(self, entries: Sequence[tuple[int, list[AnyCommand]]]) -> tuple[float, float, list[Reply]]:
        """(us of CPU of the state machine, of writing its rows, replies)."""
        self.cpu_ns = self.write_ns = 0
        replies = [reply for stamp_ms, commands in entries for reply in self.apply(stamp_ms, commands)]
        return self.cpu_ns / 1_000, self.write_ns / 1_000, replies


def engine_rows(n: int) -> list[Row]:
    """One group sees `n` jobs from create to the end, one kind of command after the other."""
    with temporary_directory() as directory:
        store = RocksStore(directory, StoreSettings())
        try:
            return _engine_rows(n, Group(store))
        finally:
            store.close()


def _engine_rows(n: int, group: Group) -> list[Row]:
    rng = random.Random(1)
    ids = [new_job_id(START_MS, rng) for _ in range(n)]
    groups_of_100 = [ids[start : start + ENTRY_COMMANDS] for start in range(0, n, ENTRY_COMMANDS)]
    create_us, create_write_us, _ = group.timed([(START_MS, [a_create(job_id, START_MS + 1) for job_id in part]) for part in groups_of_100])
    fire_us, _, _ = group.timed([(START_MS + 1, [Fire(START_MS + 1)])])
    # As the dispatcher does it: one command for all the jobs that one claim gets of a group.
    claims: list[tuple[int, list[AnyCommand]]] = [
        (START_MS + 2, [Claim([(job_id, 1) for job_id in part], 45_000, "bench")]) for part in groups_of_100
    ]
    claim_us, claim_write_us, replies = group.timed(claims)
    states = [state for reply in replies for state in reply.states if state is not None]
    ends = [Complete(state.job_id, state.attempt, state.fencing, Outcome.SUCCEEDED, 0) for state in states]
    complete_us, complete_write_us, replies = group.timed(
        [(START_MS + 3, list(ends[start : start + ENTRY_COMMANDS])) for start in range(0, n, ENTRY_COMMANDS)]
    )
    refused = sum(bool(reply.refusal) for reply in replies)
    if len(states) != n or refused or len(group.rows.families[keys.DONE]) != n or group.rows.families[keys.JOBS]:
        raise BenchmarkFailed(f"of {n} jobs {len(states)} were claimed, {refused} completions refused")
    checksum, name = group.state.fencing, "writing its rows, RocksDB"
    return [
        row("engine_create", n, create_us / n, "us CPU/job", name, create_write_us / n, checksum=checksum),
        row("engine_fire", 1, fire_us, "us CPU/group", checksum=checksum),
        row("engine_claim", n, claim_us / n, "us CPU/job", name, claim_write_us / n, checksum=checksum),
        row("engine_complete", n, complete_us / n, "us CPU/job", name, complete_write_us / n, checksum=checksum),
    ]


# --- the ready queue ------------------------------------------------------------------------------------------------------------


def ready_rows(n: int) -> list[Row]:
    """`n` records in, in batches of 1,000 in random order of time, and out by hundreds."""
    rng = random.Random(1)
    records = [(START_MS + rng.randrange(3_600_000), rng.getrandbits(64), 1, 0) for _ in range(n)]
    batches = [b"".join(TIMER.pack(*record) for record in records[start : start + READY_BATCH]) for start in range(0, n, READY_BATCH)]
    queue = ReadyQueue(max(n, 4))
    push_ns = _cpu_ns(lambda: deque(map(queue.push_batch, batches), maxlen=0))
    held_bytes = queue.reserved_bytes
    taken: list[bytes] = []
    take_ns = _cpu_ns(lambda: taken.extend(iter(lambda: queue.take(TAKE), b"")))
    heap: list[tuple[int, int, int, int]] = []
    heap_push_ns = _cpu_ns(lambda: deque(map(partial(heapq.heappush, heap), records), maxlen=0))
    popped: list[tuple[int, int, int, int]] = []
    heap_pop_ns = _cpu_ns(lambda: popped.extend(heapq.heappop(heap) for _ in range(n)))
    order = [record[:2] for batch in taken for record in TIMER.iter_unpack(batch)]
    if order != [record[:2] for record in popped]:
        raise BenchmarkFailed("the ready queue and the heap disagree about the order")
    checksum = sum(low for _, low in order) & 0xFFFF_FFFF
    return [
        row("ready_push", n, push_ns / n, "ns CPU/job", "heapq", heap_push_ns / n, checksum=checksum),
        row("ready_take", n, take_ns / n, "ns CPU/job", "heapq", heap_pop_ns / n, checksum=checksum),
        row("ready_memory", n, held_bytes / n, "bytes/job", "heapq, computed", 8 + 72 + 32 + 36),
    ]


def _cpu_ns(call: Callable[[], Any]) -> int:
    began = time.thread_time_ns()
    call()
    return time.thread_time_ns() - began


# --- a node without HTTP --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Recorded:
    """What a store was told to do, in order; None: a sync."""

    calls: list[tuple[Writes, Ranges] | None] = field(default_factory=list)
    on: bool = False

    def puts(self, family: str) -> int:
        """Rows put into a family: jobs created are those of JOBS, jobs ended those of DONE."""
        changes = (call[0].get(family, {}) for call in self.calls if call is not None)
        return sum(value is not None for rows in changes for value in rows.values())


class RecordingStore(RocksStore):
    """A durable store that remembers its writes and syncs while `recorded.on`."""

    def __init__(self, data_dir: Path, settings: StoreSettings, recorded: Recorded) -> None:
        self.recorded = recorded
        super().__init__(data_dir, settings)

    def write(self, puts: Writes, ranges: Ranges = ()) -> None:
        if self.recorded.on:
            self.recorded.calls.append(({family: dict(rows) for family, rows in puts.items() if rows}, list(ranges)))
        super().write(puts, ranges)

    async def sync(self) -> None:
        if self.recorded.on:
            self.recorded.calls.append(None)
        await super().sync()


async def node_rows(n: int) -> list[Row]:
    """Creates, then claims with completions, of `n` jobs; the same writes again are the baseline, of as many jobs as were recorded."""
    rows: list[Row] = []
    with temporary_directory() as directory:
        recorded = Recorded()
        async with _running(directory / "node", recorded) as node:
            create_s, create_cpu = await _timed(recorded, lambda: _create(node, n))
            creates, created, recorded.calls = recorded.calls, recorded.puts(keys.JOBS), []
            work_s, work_cpu = await _timed(recorded, lambda: _work(node, n))
            ends, ended = recorded.calls, recorded.puts(keys.DONE)
        again = Replay(directory / "again")
        create_again_s, create_ops = await again.run(creates)
        work_again_s, work_ops = await again.run(ends)
        again.close()
    name = "the same writes, RocksDB"
    rows.append(row("node_create", n, n / create_s, "jobs/s", name, created / create_again_s, checksum=n))
    rows.append(row("node_create_cpu", n, create_cpu / n * 1e6, "us CPU/job"))
    rows.append(row("node_create_row_operations", n, create_ops / created, "rows/job"))
    rows.append(row("node_claim_complete", n, n / work_s, "jobs/s", name, ended / work_again_s, checksum=n))
    rows.append(row("node_claim_complete_cpu", n, work_cpu / n * 1e6, "us CPU/job"))
    rows.append(row("node_claim_complete_row_operations", n, work_ops / ended, "rows/job"))
    return rows


@asynccontextmanager
async def _running(directory: Path, recorded: Recorded) -> AsyncIterator[Node]:
    settings = msgspec.convert({"node": {"data_dir": str(directory)}}, Settings)
    node = await open_node(settings, store=RecordingStore(directory, settings.store, recorded))
    running = asyncio.create_task(node.run())
    try:
        yield node
    finally:
        node.stop()
        await running


async def _timed(recorded: Recorded, work: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """(seconds, seconds of CPU of the process). Recording ends with `RECORDED_JOBS_MAX` jobs."""
    recorded.on = True
    cpu, began = time.process_time(), time.perf_counter()
    async with asyncio.timeout(SECONDS_MAX):
        await work()
    took = time.perf_counter() - began, time.process_time() - cpu
    recorded.on = False
    return took


def _stop_recording(node: Node, jobs_done: int) -> None:
    store = node._store
    if jobs_done >= RECORDED_JOBS_MAX and isinstance(store, RecordingStore):
        store.recorded.on = False


async def _create(node: Node, n: int) -> None:
    """Jobs that are due at once, in batches, as many callers as there would be connections."""
    left, done = n, 0

    async def caller() -> None:
        nonlocal left, done
        while left > 0:
            count = min(left, BATCH)
            left -= count
            replies = await node.propose_many([a_create(node.new_job_id(), -1) for _ in range(count)])
            if any(reply.refusal for reply in replies):
                raise BenchmarkFailed("a create was refused")
            done += count
            _stop_recording(node, done)

    await asyncio.gather(*(caller() for _ in range(CALLERS)))


async def _work(node: Node, n: int) -> None:
    done = 0

    async def caller() -> None:
        nonlocal done
        while done < n:
            jobs = await node.claim("default", (QUEUE,), jobs_max=BATCH, lease_ms=120_000, wait_ms=100, worker="bench")
            if not jobs:
                continue
            ends = [(job.state.job_id, job.state.attempt, job.state.fencing, int(Outcome.SUCCEEDED), b"", b"", -1) for job in jobs]
            replies = await node.complete_many(ends)
            if any(reply.refusal for reply in replies):
                raise BenchmarkFailed("a completion was refused")
            done += len(jobs)
            _stop_recording(node, done)

    await asyncio.gather(*(caller() for _ in range(CALLERS // 2)))
    if done != n:
        raise BenchmarkFailed(f"{done} of {n} jobs were completed")


class Replay:
    """Recorded writes and syncs on a store of its own, one after the other."""

    def __init__(self, directory: Path) -> None:
        self._store = RocksStore(directory, StoreSettings())

    async def run(self, calls: Sequence[tuple[Writes, Ranges] | None]) -> tuple[float, int]:
        """(seconds, row operations)."""
        operations = 0
        began = time.perf_counter()
        for call in calls:
            if call is None:
                await self._store.sync()
            else:
                self._store.write(*call)
                operations += sum(len(rows) for rows in call[0].values())
        return time.perf_counter() - began, operations

    def close(self) -> None:
        self._store.close()


if __name__ == "__main__":
    main_of("engine", run)
