"""A steady load on a cluster while something else is done to it: precise jobs at random milliseconds, and what became of each.

Creators and workers are clients of the SDK with its own retries and nothing beside them, so what they raise is what a user would see.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from benchmarks.common import BenchmarkFailed, Figure, percentile
from wheelsched.client import AsyncClient, ClaimedJob, Completion, NewJob
from wheelsched.core.errors import OutcomeUnknown, Unavailable, WheelschedError
from wheelsched.core.ids import group_of, parse_job_id
from wheelsched.testing.cluster_process import ClusterProcesses

PER_S: Final = 50.0
CREATES_A_CALL: Final = 5
# A job is created so long before it is due that a create which is repeated does not make it late.
AHEAD_S, SPREAD_S = 4.0, 2.0
CLAIM_MAX: Final = 20
WAIT_S, LEASE_S = 3.0, 20.0
WORKERS_PER_NODE: Final = 2
REPEATS: Final = 4  # of one end among many, as the SDK's worker does
REPEAT_S: Final = 0.2
CALM_S: Final = 3.0
PATIENCE_S: Final = 120.0
LATE_S_MAX: Final = 1.0
LATE_TOLD: Final = 40  # lines about single jobs
LOGGED: Final = ("leads", "transfer_failed")


@dataclass(slots=True)
class Made:
    """A job that was acknowledged. `due_ms`: Unix milliseconds; `create_s`: how long the call took, repetitions included."""

    due_ms: int
    create_s: float


@dataclass(slots=True)
class Receipt:
    """When a worker was first given a job, the node it had asked first, and the numbers of all attempts that workers were given of it."""

    at_ms: int
    at: str
    attempts: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Step:
    """One thing that was done meanwhile. Unix milliseconds."""

    name: str
    begin_ms: int
    end_ms: int = 0

    @property
    def seconds(self) -> float:
        return (self.end_ms - self.begin_ms) / 1000


@dataclass(slots=True)
class Traffic:
    """`errors`: what came of calls beyond the SDK's retries, by kind; claims whose answer was lost are counted apart, since they must not
    be repeated. `again`: jobs given out once more for no attempt that had ended otherwise."""

    cluster: ClusterProcesses
    queue: str
    names: tuple[str, ...]
    per_s: float = PER_S
    made: dict[str, Made] = field(default_factory=dict)  # by job
    received: dict[str, Receipt] = field(default_factory=dict)  # by job
    ended: set[str] = field(default_factory=set)
    again: set[str] = field(default_factory=set)
    errors: Counter[str] = field(default_factory=Counter)
    lost_claims: list[str] = field(default_factory=list)
    calls: int = 0
    steps: list[Step] = field(default_factory=list)
    lost: int = 0
    unknown: int = 0
    logged: Counter[str] = field(default_factory=Counter)  # lines of the nodes' logs, by event
    _stopping: bool = False
    _tasks: asyncio.TaskGroup | None = None
    _workers: list[asyncio.Task[None]] = field(default_factory=list)
    _rng: random.Random = field(default_factory=lambda: random.Random(7))

    def client(self, first: str) -> AsyncClient:
        """Calls one node, and the others where that one does not answer."""
        place = self.names.index(first)
        order = (*self.names[place:], *self.names[:place])
        urls = [self.cluster.nodes[name].url for name in order if name in self.cluster.nodes]
        return AsyncClient(urls, timeout_s=10.0)

    def add_workers(self, name: str) -> None:
        """Let workers call this node first, from now on."""
        assert self._tasks is not None, "it does not run"
        if name not in self.names:
            self.names = (*self.names, name)
        self._workers += [self._tasks.create_task(self._work(name)) for _ in range(WORKERS_PER_NODE)]

    @asynccontextmanager
    async def step(self, name: str) -> AsyncIterator[Step]:
        """Note when something was done."""
        step = Step(name, _now_ms())
        self.steps.append(step)
        yield step
        step.end_ms = _now_ms()

    async def run(self, act: Callable[[Traffic], Awaitable[None]]) -> None:
        """Do something while jobs come due and workers take them; then let all that are left come due, and look what became of them."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            creators = [tasks.create_task(self._create(name, self.per_s / len(self.names))) for name in self.names]
            for name in self.names:
                self.add_workers(name)
            await asyncio.sleep(AHEAD_S + CALM_S)
            await act(self)
            await asyncio.sleep(CALM_S)
            self._stopping = True
            await asyncio.wait(creators)
            await asyncio.sleep(AHEAD_S + SPREAD_S)
            await _wait(lambda: self.made.keys() <= self.ended)
            for worker in self._workers:
                worker.cancel()
        await self._compare()

    async def _compare(self) -> None:
        """What the cluster tells of the queue, against what was acknowledged."""
        async with self.client(self.names[-1]) as client:
            told = {job.job_id: job.status async for job in client.iterate(queue=self.queue)}
        self.lost = sum(told.get(job_id) != "SUCCEEDED" for job_id in self.made)
        self.unknown = len(told.keys() - self.made.keys())
        for node in self.cluster.nodes.values():
            for event in LOGGED:
                self.logged[event] += node.log().count(f'"event":"{event}"')

    async def _create(self, first: str, per_s: float) -> None:
        async with self.client(first) as client:
            next_at = time.monotonic()
            while not self._stopping:
                now_ms = time.time() * 1000
                dues = [round(now_ms + (AHEAD_S + SPREAD_S * self._rng.random()) * 1000) for _ in range(CREATES_A_CALL)]
                jobs = [NewJob(self.queue, run_at=datetime.fromtimestamp(due_ms / 1000, UTC)) for due_ms in dues]
                self.calls += 1
                began = time.monotonic()
                for due_ms, answer in zip(dues, await client.create_many(jobs, return_errors=True), strict=True):
                    if isinstance(answer, WheelschedError):
                        self.errors[f"create: {answer.code}"] += 1
                    else:
                        self.made[answer.job_id] = Made(due_ms, time.monotonic() - began)
                next_at = max(next_at + CREATES_A_CALL / per_s, time.monotonic() - 1.0)
                await asyncio.sleep(max(0.0, next_at - time.monotonic()))

    async def _work(self, first: str) -> None:
        async with self.client(first) as client:
            while True:
                self.calls += 1
                try:
                    jobs = await client.claim(self.queue, jobs_max=CLAIM_MAX, lease_s=LEASE_S, wait_s=WAIT_S)
                except OutcomeUnknown as error:
                    self.lost_claims.append(error.detail)
                    continue
                except WheelschedError as error:
                    self.errors[f"claim: {error.code}"] += 1
                    continue
                now_ms = _now_ms()
                for job in jobs:
                    self._note(job, first, now_ms)
                if jobs:
                    await self._end(client, jobs)

    def _note(self, job: ClaimedJob, first: str, now_ms: int) -> None:
        attempts = self.received.setdefault(job.job_id, Receipt(now_ms, first)).attempts
        # A lease that ran out makes another attempt of the same trigger; the same attempt twice, or one after a success, is none of that.
        if job.attempt in attempts or job.job_id in self.ended:
            self.again.add(job.job_id)
        attempts.append(job.attempt)

    async def _end(self, client: AsyncClient, jobs: tuple[ClaimedJob, ...]) -> None:
        left = list(jobs)
        for repeat in range(REPEATS + 1):
            self.calls += 1
            answers = await client.complete_many([Completion(job.lease_token, "succeeded") for job in left])
            repeatable = []
            for job, answer in zip(left, answers, strict=True):
                if isinstance(answer, Unavailable | OutcomeUnknown) and repeat < REPEATS:
                    repeatable.append(job)
                elif isinstance(answer, WheelschedError):
                    self.errors[f"complete: {answer.code}"] += 1
                else:
                    self.ended.add(job.job_id)
            left = repeatable
            if not left:
                return
            await asyncio.sleep(REPEAT_S)

    def figures(self, name: str) -> list[Figure]:
        """What the load felt, beside what it may."""
        if not self.made:
            raise BenchmarkFailed("no job was acknowledged")
        late = {job_id: (self._started_ms(job_id) - job.due_ms) / 1000 for job_id, job in self.made.items()}
        late_s = list(late.values())
        latest = self._during(self.made[max(late, key=late.__getitem__)].due_ms)
        groups = {self._group(job_id) for job_id in self.made}
        above = [job_id for job_id, each in late.items() if each > LATE_S_MAX]
        late_groups = ", ".join(map(str, sorted({self._group(job_id) for job_id in above})))
        attempts = sum(len(receipt.attempts) > 1 for receipt in self.received.values())
        for job_id in above[:LATE_TOLD]:
            print(self._told(job_id, late[job_id]), file=sys.stderr)
        return [
            Figure(f"{name}: precise jobs", len(late), "jobs", None, f"of {len(groups)} groups, {self.calls:,} calls"),
            Figure(f"{name}: lateness, p50", percentile(late_s, 0.5) * 1000, "ms"),
            Figure(f"{name}: lateness, p99", percentile(late_s, 0.99) * 1000, "ms"),
            Figure(
                f"{name}: lateness, max", max(late_s), "s", LATE_S_MAX,
                f"{len(above)} above{f' of groups {late_groups}' if above else ''}; the latest was due {latest}",
            ),
            Figure(f"{name}: errors beyond retries", sum(self.errors.values()), "calls", 0, _shown(self.errors)),
            Figure(f"{name}: claims without an answer", len(self.lost_claims), "calls", 0, "; ".join(self.lost_claims[:2])),
            Figure(f"{name}: jobs lost", self.lost, "jobs", 0, f"{self.unknown} that nobody was told of"),
            Figure(f"{name}: jobs run twice by one trigger", len(self.again), "jobs", 0, f"{attempts} with more than one attempt"),
            Figure(
                f"{name}: times that a node began to lead a group", self.logged["leads"], "", None,
                f"the first ones included; {self.logged['transfer_failed']} transfers failed",
            ),
            Figure(f"{name}: slowest create", max(job.create_s for job in self.made.values()), "s"),
        ]  # fmt: skip

    def _told(self, job_id: str, late_s: float) -> str:
        """What there is to know of one that was late."""
        job, receipt = self.made[job_id], self.received.get(job_id)
        at = "nobody" if receipt is None else f"a worker that asked {receipt.at}"
        return (
            f"late by {late_s:.2f} s: group {self._group(job_id)}, due {job.due_ms % 1_000_000 / 1000:.3f} "
            f"({self._during(job.due_ms)}), its create took {job.create_s:.2f} s, came to {at}"
        )

    def _started_ms(self, job_id: str) -> int:
        """As long as nobody has it, it gets later."""
        receipt = self.received.get(job_id)
        return _now_ms() if receipt is None else receipt.at_ms

    def _group(self, job_id: str) -> int:
        raw = parse_job_id(job_id)
        assert raw is not None, job_id
        return group_of(raw, self.cluster.group_count)

    def _during(self, at_ms: int) -> str:
        """What was going on."""
        for step in self.steps:
            if step.begin_ms <= at_ms <= (step.end_ms or at_ms):
                return f"{(at_ms - step.begin_ms) / 1000:.1f} s into: {step.name}"
        return "between the steps"


async def _wait(holds: Callable[[], bool]) -> None:
    """Until it holds, or for so long that what is missing then is lost."""
    give_up = time.monotonic() + PATIENCE_S
    while not holds() and time.monotonic() < give_up:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


def _now_ms() -> int:
    return round(time.time() * 1000)


def _shown(errors: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(errors.items()))
