"""Leaders that go: `python -m benchmarks.load_failover [--kills 50] [--groups 8] [--rolls 2] [--check]`.

Three nodes as processes of this machine. In every group a precise job comes due each 50 ms, created long before, and workers with long
polls on all nodes take them.

1. The node that leads most gets SIGKILL, again and again: from the kill to the first start in each group that it led.
2. Rolling restarts: one node after the other gets SIGTERM and starts again, under the same load and a stream of creates. No precise job
   may be late by more than a second, and no call may fail beyond what the client's own retries absorb.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from typing import Final

from benchmarks.client import run_loop
from benchmarks.common import BenchmarkFailed, Figure, percentile, report, temporary_directory
from wheelsched.client import AsyncClient, Completion, NewJob
from wheelsched.core.errors import OutcomeUnknown, WheelschedError
from wheelsched.testing.cluster_process import ClusterProcesses, key_in_group

NODES: Final = 3
BEAT_MS: Final = 50
# A beat is created so long before it is due that no fault keeps it from being there in time.
AHEAD_S: Final = 20.0
BATCH_S: Final = 0.5
FIRST_S: Final = 3.0
LEASE_S: Final = 5.0
WORKERS_PER_NODE: Final = 2
CREATES_PER_S: Final = 50.0
CREATES_A_CALL: Final = 5
CALM_S: Final = 2.0  # between two faults
PATIENCE_S: Final = 60.0
GAP_S_MAX, LATE_S_MAX, EXIT_S_MAX = 2.0, 1.0, 5.0


@dataclass(slots=True)
class Beat:
    group: int
    due_ms: int
    started_ms: int = 0


@dataclass(slots=True)
class Load:
    """The metronome and its workers. `errors`: what came of calls beyond the client's retries, by kind; claims whose answer was lost are
    counted apart, since the client must not repeat them."""

    cluster: ClusterProcesses
    queue: str
    beats: dict[str, Beat] = field(default_factory=dict)  # by key
    keys: dict[str, str] = field(default_factory=dict)  # job -> key
    started_ms: dict[str, int] = field(default_factory=dict)  # by job
    errors: Counter[str] = field(default_factory=Counter)
    lost_claims: int = 0
    calls: int = 0
    stopping: bool = False

    def client(self, first: str) -> AsyncClient:
        """Calls one node, and the others where that one does not answer."""
        names = self.cluster.names
        place = names.index(first)
        urls = [self.cluster.nodes[name].url for name in (*names[place:], *names[:place])]
        return AsyncClient(urls, timeout_s=10.0, retries=10, auto_idempotency=False)

    async def make_beats(self) -> None:
        async with self.client("n1") as client:
            due_ms = round((time.time() + FIRST_S) * 1000)
            while not self.stopping:
                batch = [
                    (group, due_ms + at) for at in range(0, round(BATCH_S * 1000), BEAT_MS) for group in range(self.cluster.group_count)
                ]
                due_ms += round(BATCH_S * 1000)
                await self._create(client, batch)
                await asyncio.sleep(max(0.0, due_ms / 1000 - AHEAD_S - time.time()))

    async def _create(self, client: AsyncClient, batch: Sequence[tuple[int, int]]) -> None:
        made = {}
        for group, at_ms in batch:
            made[key_in_group(f"{self.queue}-{group}-{at_ms}", group, self.cluster.group_count)] = Beat(group, at_ms)
        jobs = [
            NewJob(self.queue, run_at=datetime.fromtimestamp(beat.due_ms / 1000, UTC), idempotency_key=key) for key, beat in made.items()
        ]
        self.calls += 1
        answers = await client.create_many(jobs, return_errors=True)
        for (key, beat), answer in zip(made.items(), answers, strict=True):
            if isinstance(answer, WheelschedError):
                self.errors[f"create: {answer.code}"] += 1
            else:
                self.beats[key] = beat
                self.keys[answer.job_id] = key

    async def create_steadily(self) -> None:
        """Jobs that are due at once, in small calls."""
        async with self.client("n2") as client:
            for number in count():
                if self.stopping:
                    return
                self.calls += 1
                jobs = [NewJob(self.queue, idempotency_key=f"{self.queue}-steady-{number}-{place}") for place in range(CREATES_A_CALL)]
                for answer in await client.create_many(jobs, return_errors=True):
                    if isinstance(answer, WheelschedError):
                        self.errors[f"create: {answer.code}"] += 1
                await asyncio.sleep(CREATES_A_CALL / CREATES_PER_S)

    async def work(self, first: str) -> None:
        async with self.client(first) as client:
            while True:
                self.calls += 1
                try:
                    jobs = await client.claim(self.queue, jobs_max=50, lease_s=LEASE_S, wait_s=3)
                except OutcomeUnknown:
                    self.lost_claims += 1
                    continue
                except WheelschedError as error:
                    self.errors[f"claim: {error.code}"] += 1
                    continue
                now_ms = round(time.time() * 1000)
                for job in jobs:
                    self.started_ms.setdefault(job.job_id, now_ms)
                if jobs:
                    self.calls += 1
                    for answer in await client.complete_many([Completion(job.lease_token, "succeeded") for job in jobs]):
                        if isinstance(answer, WheelschedError):
                            self.errors[f"complete: {answer.code}"] += 1

    def settle(self) -> None:
        for job_id, key in self.keys.items():
            self.beats[key].started_ms = self.started_ms.get(job_id, 0)

    def first_start_ms(self, group: int, after_ms: int) -> int | None:
        """When the first of the group's beats that were due after an instant started."""
        self.settle()
        started = [beat.started_ms for beat in self.beats.values() if beat.group == group and beat.due_ms >= after_ms and beat.started_ms]
        return min(started, default=None)

    def unfinished(self, until_ms: float) -> int:
        self.settle()
        return sum(not beat.started_ms and beat.due_ms <= until_ms for beat in self.beats.values())


async def wait(what: str, holds: Callable[[], bool]) -> None:
    """What other processes do sets no event of ours."""
    give_up = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > give_up:
            raise BenchmarkFailed(f"not within {PATIENCE_S:g} s: {what}")
        await asyncio.sleep(0.05)


async def under_load(load: Load, act: Callable[[Load], Awaitable[None]], *, creates: bool) -> None:
    """Do something while beats come due and workers take them; then let all beats that are left come due."""
    async with asyncio.TaskGroup() as tasks:
        makers = [tasks.create_task(load.make_beats())]
        if creates:
            makers.append(tasks.create_task(load.create_steadily()))
        workers = [tasks.create_task(load.work(name)) for name in load.cluster.names for _ in range(WORKERS_PER_NODE)]
        await asyncio.sleep(FIRST_S + CALM_S)
        await act(load)
        load.stopping = True
        await asyncio.wait(makers)
        last_ms = max(beat.due_ms for beat in load.beats.values())
        await asyncio.sleep(max(0.0, last_ms / 1000 - time.time()))
        await wait("every beat has started", lambda: not load.unfinished(last_ms))
        for worker in workers:
            worker.cancel()


@dataclass(frozen=True, slots=True)
class Gap:
    """Seconds from a kill to the first start in each group that the node led."""

    by_group: dict[int, float]

    @property
    def longest_s(self) -> float:
        return max(self.by_group.values())


async def kill_leaders(load: Load, kills: int, gaps: list[Gap]) -> None:
    cluster = load.cluster
    for number in range(kills):
        led = await asyncio.to_thread(lambda: {name: cluster.led_by(name) for name in cluster.names})
        victim = max(cluster.names, key=lambda name: len(led[name]))
        killed_ms = round(time.time() * 1000)
        await asyncio.to_thread(cluster.nodes[victim].kill)
        first: dict[int, int] = {}

        def all_fire(groups: Sequence[int] = led[victim], after_ms: int = killed_ms, found: dict[int, int] = first) -> bool:
            for group in groups:
                if group not in found and (at_ms := load.first_start_ms(group, after_ms)) is not None:
                    found[group] = at_ms
            return len(found) == len(groups)

        await wait(f"the groups of {victim} fire again", all_fire)
        gaps.append(Gap({group: (at_ms - killed_ms) / 1000 for group, at_ms in first.items()}))
        print(f"kill {number + 1}: {victim}, {len(first)} groups, longest gap {gaps[-1].longest_s:.2f} s", file=sys.stderr)
        await asyncio.to_thread(cluster.nodes[victim].start)
        await asyncio.to_thread(cluster.wait_ready)
        await asyncio.sleep(CALM_S)
        _forget_old(load)


def _forget_old(load: Load) -> None:
    """Beats of long ago are not looked at again."""
    load.settle()
    old = time.time() * 1000 - 30_000
    gone = [key for key, beat in load.beats.items() if beat.started_ms and beat.due_ms < old]
    for key in gone:
        del load.beats[key]
    load.keys = {job_id: key for job_id, key in load.keys.items() if key in load.beats}


async def restart_all(load: Load, rolls: int, exits: list[tuple[int, float]]) -> None:
    for _ in range(rolls):
        for name in load.cluster.names:
            exits.append(await asyncio.to_thread(load.cluster.nodes[name].terminate))
            await asyncio.to_thread(load.cluster.nodes[name].start)
            await asyncio.to_thread(load.cluster.wait_ready)
            await asyncio.sleep(CALM_S)


def killed(cluster: ClusterProcesses, kills: int) -> list[Figure]:
    load, gaps = Load(cluster, "beat"), list[Gap]()
    run_loop(under_load(load, lambda load: kill_leaders(load, kills, gaps), creates=False))
    by_kill = [gap.longest_s for gap in gaps]
    by_group = [gap_s for gap in gaps for gap_s in gap.by_group.values()]
    return [
        Figure("leaders killed", kills, "kills", None, f"{len(by_group)} groups of them lost their leader"),
        Figure("kill to a group's next start, p50", percentile(by_group, 0.5), "s"),
        Figure("kill to a group's next start, p99", percentile(by_group, 0.99), "s", GAP_S_MAX),
        Figure("kill to the last group's, p50", percentile(by_kill, 0.5), "s"),
        Figure("kill to the last group's, p99", percentile(by_kill, 0.99), "s", GAP_S_MAX),
        Figure("kill to the last group's, max", max(by_kill), "s"),
        Figure("creates and ends that failed", sum(load.errors.values()), "calls", 0, _shown(load.errors)),
    ]


def rolled(cluster: ClusterProcesses, rolls: int) -> list[Figure]:
    load, exits = Load(cluster, "roll"), list[tuple[int, float]]()
    run_loop(under_load(load, lambda load: restart_all(load, rolls, exits), creates=True))
    late_s = [(beat.started_ms - beat.due_ms) / 1000 for beat in load.beats.values()]
    return [
        Figure("rolling restarts", rolls, "rounds", None, f"{len(late_s):,} precise jobs, {load.calls:,} calls"),
        Figure("lateness in a rolling restart, p50", percentile(late_s, 0.5), "s"),
        Figure("lateness in a rolling restart, p99", percentile(late_s, 0.99), "s"),
        Figure("lateness in a rolling restart, max", max(late_s), "s", LATE_S_MAX, f"{sum(late > LATE_S_MAX for late in late_s)} above"),
        Figure("calls that failed beyond retries", sum(load.errors.values()), "calls", 0, _shown(load.errors)),
        Figure("claims without an answer", load.lost_claims, "calls", 0),
        Figure("exit codes that are not 0", sum(code != 0 for code, _ in exits), "nodes", 0),
        Figure("SIGTERM to the end, max", max(took_s for _, took_s in exits), "s", EXIT_S_MAX),
    ]


def _shown(errors: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(errors.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description="Leaders that are killed, and rolling restarts.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--groups", type=int, default=8, help="Raft groups; a precise job in each every 50 ms (8)")
    parser.add_argument("--rolls", type=int, default=2, help="rolling restarts (2)")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bound is broken")
    arguments = parser.parse_args()
    figures: list[Figure] = []
    with temporary_directory() as directory:
        cluster = ClusterProcesses(directory, NODES, group_count=arguments.groups, settings={"logging.level": "warning"})
        try:
            cluster.start()
            if arguments.kills:
                figures += killed(cluster, arguments.kills)
            if arguments.rolls:
                figures += rolled(cluster, arguments.rolls)
        finally:
            cluster.kill()
    return report(f"failover, {NODES} nodes, {arguments.groups} groups", figures, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
