"""A whole cluster under faults, from one seed: `python -m wheelsched.testing.simulate --seed S --steps N`.

Real are engine, dispatch, replicas, Raft and forwarding of three nodes, on one `VirtualLoop`; simulated are time, disks, clocks and the
network (`virtual_cluster.py`). Clients and workers call any node; nodes crash, lose the tail of what was not synced, stand still, are cut
off one way or both, have slow disks and clocks that are set, hand over and start again. Each seed draws which of this it has and how hard
("swarm testing", Groce 2012). Then everything is healed and progress is demanded within a bound.

What must hold, each by its name:

    one_leader_per_term     by everything that is sent in a leader's name
    one_acting_leader       at most one node acts for a group
    applied_agrees          equal applied index, equal rows, byte for byte
    watermark_never_falls   nor is it ahead of every clock
    never_lost              what was answered is in the rows in the end, as it was answered
    refused_never_happens   what was refused for certain is not there
    linearizable            per job: an answer is never older than one that was there before the question; a version is one state
    one_job_per_key         and each job is the one that was asked for
    token_grows             fencing tokens grow with the versions of a job and are given once
    one_live_lease          no attempt begins while another one's lease runs
    never_early             no attempt begins before the clock of a node that acted for its group has read its time
    stale_is_refused        the end of an attempt is taken from the attempt's holder only
    one_job_per_occurrence  every instant of a schedule has one job or one record of why not; chains_never_break: and a successor
    waiter_is_served        nobody waits beside a job that is ready and may run, on whichever node
    cap_holds               no more jobs of a queue are leased than its cap, in all groups together, as entries are first applied
    clocks_are_believed     once the clocks of all machines show the same
    progress                after healing every due job runs within a bound
    audit_finds_nothing     and memory_is_what_the_rows_say: timers, leases and ready jobs, after settling
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

import wheelsched.dispatch.loader as loader_module
from wheelsched.core.errors import InvalidRequest, NotFound, OutcomeUnknown, Unavailable, WheelschedError
from wheelsched.core.ids import group_of, id_low, keyed_job_id
from wheelsched.model import keys
from wheelsched.model.commands import Cancel, Create, Redrive, Release, Reply, RunNow
from wheelsched.model.rows import TIMER, JobSpec, JobState, QueueSettings, decode_counts, decode_done, decode_state, encode_spec, split_job
from wheelsched.model.schedules import Definition, Missed, Overlap, Phase
from wheelsched.model.states import FINAL, LEASED, Lane, Outcome, Status, due_at_ms, status_of
from wheelsched.node.cluster import ClusterNode
from wheelsched.node.face import ClaimedJob
from wheelsched.raft import RaftConfig
from wheelsched.replica.raft_replicas import RaftReplicas
from wheelsched.replica.raft_settings import ReplicaSettings
from wheelsched.testing.cluster_sim import ClusterBroken, _cause, ensure
from wheelsched.testing.node import make_settings
from wheelsched.testing.simulate_node import quiet_logs
from wheelsched.testing.virtual_cluster import START_MS, Down, Gone, VirtualCluster, VirtualNode, Weather
from wheelsched.testing.virtual_loop import VirtualLoop

STEPS_DEFAULT: Final = 100
NODES: Final = (1, 2, 3)
TENANT: Final = "default"
QUEUES: Final = ("a", "b")
CAPPED_QUEUE: Final = "a"
SCHEDULED_QUEUE: Final = "s"
JOBS_MAX: Final = 250
WORKERS: Final = 5
# An attempt's job runs again at once, and lease after lease: so that workers who come late meet the next holder.
SPEC: Final = JobSpec(0, max_attempts=6, initial_backoff_ms=0, max_backoff_ms=0, timeout_ms=86_400_000)
# The slowest monotonic clock runs 4 % ahead of real time; a few ms are lost to rounding.
CLOCK_RATE_MAX: Final = 1.04
ROUNDING_MS: Final = 5
# After healing: an election, leases that have to end, and the slowest retry, many times over.
PROGRESS_MS: Final = 90_000
# Of a job that is due in 200 ms, to a worker that waits at another node.
WAKE_S: Final = 1.5
NEVER_US: Final = 1 << 62
# At equal applied indexes that are multiples of this, rows are compared at once; in the end at the last one.
DIGEST_EVERY: Final = 8

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Profile:
    """What one seed does to its cluster. Weights are those of one step."""

    weather: Weather
    replica_settings: ReplicaSettings
    group_count: int
    horizon_s: float
    ready_queue_max: int
    slice_rows: int
    turn_us: int
    cuts: float
    crashes: float
    torn: bool
    stops: float
    pauses: float
    clock_steps: tuple[int, ...]
    stalls: float
    transfers: float
    schedules: float
    pace_ms: int
    cap: int  # of the queue "a", -1 for none

    @classmethod
    def draw(cls, rng: random.Random) -> Profile:
        def some(*values: float) -> float:
            return rng.choice(values) if rng.random() < 0.5 else 0.0

        steps: list[int] = []
        if rng.random() < 0.3:
            steps += [-200, 200, -80]
        if rng.random() < 0.3:
            steps += [-2_000, 2_000]
        if rng.random() < 0.15:
            steps += [-3_600_000, 3_600_000]
        compacts = rng.random() < 0.4
        weather = Weather(
            loss=some(0.02, 0.1),
            delay_ms=rng.choice((1, 5, 20, 60)),
            holds_cut=rng.random() < 0.5,
            sync_ms=tuple(rng.choice((1, 1, 5, 40, 400)) for _ in NODES) if rng.random() < 0.5 else (2, 2, 2),
            clock_rates=tuple(rng.choice((1.0, 1.0, 0.97, CLOCK_RATE_MAX)) for _ in NODES),
        )
        return cls(
            weather=weather,
            replica_settings=ReplicaSettings(
                raft=RaftConfig(max_inflight=rng.choice((4, 64))),
                compact_entries=rng.choice((8, 30)) if compacts else 20_000,
                keep_entries=rng.choice((8, 60)),
                small_snapshot_rows=rng.choice((0, 20, 2_000)),
                copy_rows=rng.choice((7, 400)),
            ),
            group_count=rng.choice((1, 2, 4)),
            horizon_s=rng.choice((2.0, 300.0)),
            ready_queue_max=rng.choice((6, 262_144, 262_144)),
            slice_rows=rng.choice((8, 500)),
            turn_us=rng.choice((20, 100, 400)),
            cuts=some(0.5, 1.5),
            crashes=some(0.4, 1.2),
            torn=rng.random() < 0.6,
            stops=some(0.3),
            pauses=some(0.5, 1.2),
            clock_steps=tuple(steps),
            stalls=some(0.4),
            transfers=some(0.5, 1.5),
            schedules=rng.choice((0.0, 1.0, 3.0)),
            pace_ms=rng.choice((10, 60, 250)),
            cap=rng.choice((-1, -1, 1, 2, 5)),
        )


# ---- what is known


@dataclass(slots=True)
class Held:
    """An attempt in a worker's hands. `until_us`: until then nobody else may have the job, unless this attempt `may_have_ended`."""

    fencing: int
    until_us: int
    may_have_ended: bool = False


@dataclass(slots=True)
class Known:
    """A job as clients know it. `answers`: when an answer came, and the latest version known then."""

    name: str
    created_us: int
    number: int = 0
    tries: int = 0
    refused: int = 0
    answers: list[tuple[int, int]] = field(default_factory=list)
    states: dict[int, tuple[Any, ...]] = field(default_factory=dict)  # by version
    holders: list[Held] = field(default_factory=list)
    is_due_changed: bool = False  # somebody asked for another time

    def floor(self, sent_us: int) -> int:
        """The latest version that was known before an instant."""
        place = bisect_left(self.answers, (sent_us, -1))
        return self.answers[place - 1][1] if place else 0

    @property
    def acked(self) -> int:
        return self.answers[-1][1] if self.answers else 0


def _seen(state: JobState) -> tuple[Any, ...]:
    """What a version fixes. Leases are lengthened and held jobs fired without a new one."""
    return (
        state.status, state.tenant, state.queue, state.lane, state.priority, state.attempt, state.fencing,
        state.next_attempt_at_ms, state.outcome, state.worker, state.finished_at_ms,
    )  # fmt: skip


class Walls:
    """What the clocks of the nodes have read: for each the offsets from right time and since when."""

    def __init__(self) -> None:
        self._ahead: dict[int, list[tuple[int, int]]] = {}  # (since us, ms)

    def note(self, node: int, now_us: int, ahead_ms: int) -> None:
        found = self._ahead.setdefault(node, [])
        if not found or abs(found[-1][1] - ahead_ms) > 1:
            found.append((now_us, ahead_ms))

    def most_ahead_ms(self, since_us: int, until_us: int, nodes: Collection[int] = NODES) -> int:
        """How far ahead of right time the furthest clock of these nodes was, at some time of that."""
        most = -(1 << 62)
        for found in [self._ahead[node] for node in nodes if node in self._ahead]:
            for (start_us, ahead_ms), end_us in zip(found, [start for start, _ in found[1:]] + [until_us], strict=True):
                if start_us <= until_us and end_us >= since_us:
                    most = max(most, ahead_ms)
        return most


class Simulation:
    """One seed. `run` raises `ClusterBroken` where a promise does not hold, and whatever stopped a node."""

    def __init__(
        self, seed: int, loop: VirtualLoop, steps: int = STEPS_DEFAULT, *, profile: Profile | None = None,
        replicas_type: type[RaftReplicas] = RaftReplicas,
    ) -> None:  # fmt: skip
        self.seed = seed
        self.steps = steps
        self.loop = loop
        self.profile = profile or Profile.draw(random.Random(f"profile {seed}"))
        self.rng = random.Random(f"schedule {seed}")
        self.log: list[str] = []
        self._trace = blake2b(digest_size=16)
        settings = make_settings(
            {
                "cluster": {"group_count": self.profile.group_count},
                "scheduler": {"horizon_s": self.profile.horizon_s, "audit_interval_s": 4.0, "purge_interval_s": 5.0},
            },
            ready_queue_max=self.profile.ready_queue_max,
        )
        self.cluster = VirtualCluster(
            seed, loop, settings, self.profile.replica_settings, self.profile.weather, self, replicas_type=replicas_type
        )
        self.nodes = self.cluster.nodes
        self.jobs: dict[bytes, Known] = {}
        self.numbers: dict[int, bytes] = {}
        self.schedules: dict[str, int] = {}  # name -> first instant it may have decided
        self.given: dict[tuple[int, int], bytes] = {}  # (group, token) -> job
        self.leaders: dict[tuple[int, int], int] = {}
        self.digests: dict[tuple[int, int], int] = {}
        self.watermarks: dict[tuple[int, int], int] = {}
        self.leased: dict[int, tuple[int, int]] = {}  # group -> (latest index that was applied anywhere, leased jobs of the capped queue)
        self.walls = Walls()
        self.offices: dict[int, list[tuple[int, int, int]]] = {}  # by group: who acted for it, from when to when
        self.counts: Counter[str] = Counter()
        self.clients: dict[asyncio.Task[None], None] = {}
        self.is_healed = False
        self.is_closing = False
        self._broken: BaseException | None = None

    def note(self, event: str) -> None:
        line = f"{self.loop.time_us() / 1000:.3f} {event}"
        self._trace.update(line.encode())
        self.log.append(line)

    def trace_hash(self) -> str:
        """Of everything that happened, in its order."""
        return self._trace.hexdigest()

    # ---- the run

    async def run(self) -> str:
        """The hash of the trace."""
        before, loader_module.SLICE_ROWS = loader_module.SLICE_ROWS, self.profile.slice_rows
        try:
            for node in self.nodes.values():
                await node.start()
            await self.sleep(2_000)
            if self.profile.cap >= 0:
                cap = QueueSettings(max_concurrency=self.profile.cap)
                await self._until_done(lambda face: face.put_queue(TENANT, CAPPED_QUEUE, cap, actor="sim"))
                await self._until("progress", self._unaware, PROGRESS_MS)
            self._spawn([self._worker(number) for number in range(WORKERS)])
            moves = self._moves()
            for step in range(self.steps):
                _, move = self.rng.choices([(name, move) for name, move, _ in moves], [weight for _, _, weight in moves])[0]
                self.note(f"{step} {move.__name__}")
                await move()
                await self.sleep(self.rng.randint(0, self.profile.pace_ms))
                self.look()
            await self.heal()
            return self.trace_hash()
        finally:
            self.is_closing = True
            loader_module.SLICE_ROWS = before
            for task in list(self.clients):
                task.cancel()
            await asyncio.gather(*self.clients, return_exceptions=True)
            await self.cluster.close()

    def _moves(self) -> list[tuple[str, Callable[[], Coroutine[Any, Any, None]], float]]:
        profile = self.profile
        moves = [
            (self.create, 3.0), (self.create_many, 0.8), (self.create_keyed, 0.8), (self.create_soon, 1.0), (self.cancel, 0.8),
            (self.run_now, 0.4), (self.read, 1.5), (self.redrive, 0.4), (self.wait, 0.5),
            (self.put_schedule, profile.schedules), (self.pause_schedule, profile.schedules / 2),
            (self.cut, profile.cuts), (self.heal_links, profile.cuts), (self.crash, profile.crashes),
            (self.restart, 1.5 * (profile.crashes + profile.stops)), (self.stop, profile.stops), (self.pause, profile.pauses),
            (self.step_clock, 1.0 if profile.clock_steps else 0.0), (self.stall, profile.stalls), (self.transfer, profile.transfers),
        ]  # fmt: skip
        return [(move.__name__, move, weight) for move, weight in moves]

    async def sleep(self, ms: float) -> None:
        await asyncio.sleep(ms / 1_000)

    def _spawn(self, calls: Iterable[Coroutine[Any, Any, None]]) -> None:
        for call in calls:
            task = asyncio.ensure_future(call)
            self.clients[task] = None
            task.add_done_callback(self._client_ended)

    def _client_ended(self, task: asyncio.Task[None]) -> None:
        self.clients.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken = self._broken or error

    # ---- checks while it runs

    def look(self) -> None:
        """What can be seen of the cluster at an instant."""
        if self._broken is not None:
            raise self._broken
        for node in self.nodes.values():
            if node.running is not None and node.running.done():
                raise _cause(node.running.exception()) or ClusterBroken("node_ended", node=node.node_id)
            self._check_waiters(node)
        for failure in self.loop.failures:
            if isinstance(failure, AssertionError):
                raise failure
        for group in range(self.profile.group_count):
            self._check_acting(group)

    def _check_acting(self, group: int) -> None:
        acting = [node.node_id for node in self.cluster.acting(group)]
        ensure(len(acting) <= 1, "one_acting_leader", group=group, nodes=acting)

    def _check_waiters(self, node: VirtualNode) -> None:
        if node.face is None or self.loop.is_paused(node.node_id) or not node.face.local.dispatcher.claims.is_open:
            return
        for queue in node.face.local.dispatcher.queues:
            waits = [waiter for waiter in queue.waiters if not waiter.future.done()]
            idle = not waits or not queue.ready_count or not queue.may_take()
            ensure(idle, "waiter_is_served", node=node.node_id, queue=queue.name, ready=queue.ready_count)

    def on_speaks_as_leader(self, node: int, group: int, term: int) -> None:
        leader = self.leaders.setdefault((group, term), node)
        self._check(leader == node, "one_leader_per_term", group=group, term=term, nodes=(leader, node))

    def on_effects(self, node: VirtualNode, group: int) -> None:
        acting = [other.node_id for other in self.cluster.acting(group) if other is not node]
        self._check(not acting, "one_acting_leader", group=group, nodes=(node.node_id, *acting))

    def on_wall(self, node: int, ahead_ms: int) -> None:
        self.walls.note(node, self.loop.time_us(), ahead_ms)

    def on_office(self, node: int, group: int, begins: bool) -> None:
        now_us, offices = self.loop.time_us(), self.offices.setdefault(group, [])
        if begins:
            self.note(f"n{node} acts for group {group}")
            offices.append((node, now_us, NEVER_US))
        else:
            self.note(f"n{node} acts no more for group {group}")
            self.offices[group] = [(n, since, now_us if n == node and until == NEVER_US else until) for n, since, until in offices]

    def on_applied(self, node: VirtualNode, group: int, index: int) -> None:
        if node.face is None:
            return
        state = node.member(group).state
        if state.applied_index != index:
            return
        watermark_ms = state.watermark_ms
        known = self.watermarks.setdefault((group, index), watermark_ms)
        self._check(known == watermark_ms, "applied_agrees", group=group, index=index, node=node.node_id, what="watermark")
        before = self.watermarks.get((group, index - 1), 0)
        self._check(before <= watermark_ms, "watermark_never_falls", group=group, index=index, before=before, now=watermark_ms)
        latest_ms = self.cluster.true_ms() + self.walls.most_ahead_ms(0, self.loop.time_us())
        self._check(watermark_ms <= latest_ms + 1, "never_early", group=group, watermark_ms=watermark_ms, latest_ms=latest_ms)
        if index % DIGEST_EVERY == 0:
            self._compare(node, group, index)
        if self.profile.cap >= 0 and index > self.leased.get(group, (0, 0))[0]:
            row = node.store.get(keys.COUNTS, keys.counts_key(group, TENANT, CAPPED_QUEUE))
            cells = decode_counts(row).cells if row is not None else []
            self.leased[group] = (index, sum(sum(cells[3 * status : 3 * status + 3]) for status in LEASED))
            leased = sum(count for _, count in self.leased.values())
            self._check(leased <= self.profile.cap, "cap_holds", leased=self.leased, cap=self.profile.cap)

    def _compare(self, node: VirtualNode, group: int, index: int) -> None:
        digest = node.digest(group)
        known = self.digests.setdefault((group, index), digest)
        self._check(known == digest, "applied_agrees", group=group, index=index, node=node.node_id)

    def _check(self, ok: object, name: str, **facts: object) -> None:
        """As `ensure`, from inside a node: told to the run, which ends; the node is not to blame its own code."""
        if not ok:
            self._broken = self._broken or ClusterBroken(name, **facts)

    # ---- what clients learn

    def _learn(self, state: JobState, sent_us: int, what: str, *, stored: bool = True) -> Known:
        """A job's state in an answer to what was asked at `sent_us`. `stored` False: it shows the job at some version, no more."""
        job = self.jobs.get(state.job_id)
        if job is None:
            job = self.jobs[state.job_id] = Known(f"j{len(self.jobs) + 1}", self.loop.time_us() if state.run is None else 0)
        floor = job.floor(sent_us)
        ensure(state.version >= floor, "linearizable", job=job.name, what=what, answered=state.version, known_before=floor)
        if stored:
            seen = _seen(state)
            known = job.states.setdefault(state.version, seen)
            ensure(known == seen, "linearizable", job=job.name, what=what, version=state.version, one=known, other=seen)
        if state.version > job.acked or not job.answers:
            job.answers.append((self.loop.time_us(), state.version))
        return job

    async def _call(self, what: Callable[[ClusterNode], Coroutine[Any, Any, Result]], *, within_s: float = 20.0) -> Result:
        """Ask any node that is up. Raises as `VirtualNode.call`."""
        up = self.cluster.up()
        if not up:
            raise Down(0)
        return await self.rng.choice(up).call(what, within_s=within_s)

    def _group(self, job_id: bytes) -> int:
        return group_of(job_id, self.profile.group_count)

    # ---- clients

    def _new_create(self, *, key: str = "", delay_ms: int | None = None) -> Create:
        rng, number = self.rng, len(self.numbers) + 1
        job_id = keyed_job_id(TENANT, key) if key else ((START_MS + number) << 80 | rng.getrandbits(80)).to_bytes(16, "big")
        if delay_ms is None:
            delay_ms = rng.choice((0, 0, 0, 10, 100, 1_000, 3_000, 6_000))
        window_ms = rng.choice((0, 0, 0, 2_000))
        spec = SPEC if not window_ms else JobSpec(window_ms, 6, 0, 0, 86_400_000)
        self.numbers[number] = job_id
        self.jobs[job_id] = Known(f"j{len(self.jobs) + 1}", self.loop.time_us(), number)
        return Create(
            job_id, TENANT, rng.choice(QUEUES), rng.randrange(3), -1, delay_ms, window_ms, 0, encode_spec(spec), b"%d" % number,
            b"fingerprint %4d" % number if key else b"",
        )  # fmt: skip

    async def _create(self, commands: list[Create], tries: int) -> None:
        """Create jobs with one call; those with a key again until they are answered."""
        for _ in range(tries):
            sent_us = self.loop.time_us()
            jobs = [self.jobs[command.job_id] for command in commands]
            for job in jobs:
                job.tries += 1
            try:
                if len(commands) == 1:
                    replies = [await self._call(lambda face: face.propose(commands[0]))]
                else:
                    replies = await self._call(lambda face: face.propose_many(commands))
            except (Unavailable, Down):
                for job in jobs:
                    job.refused += 1
                await self.sleep(200)
                continue
            except (Gone, OutcomeUnknown):
                await self.sleep(200)
                continue
            for command, reply in zip(commands, replies, strict=True):
                job = self.jobs[command.job_id]
                if reply.refusal == Unavailable.code:
                    job.refused += 1
                elif reply.refusal != OutcomeUnknown.code:
                    assert reply.state is not None, reply
                    self._learn(reply.state, sent_us, "create")
                    self.counts["created"] += 1
                    self.note(f"{job.name} is there, v{reply.state.version}")
            return

    async def create(self) -> None:
        if len(self.numbers) < JOBS_MAX:
            self._spawn([self._create([self._new_create()], 1)])

    async def create_many(self) -> None:
        if len(self.numbers) < JOBS_MAX:
            self._spawn([self._create([self._new_create() for _ in range(self.rng.choice((3, 12, 30)))], 1)])

    async def create_keyed(self) -> None:
        """One key, sent again until there is an answer, also by two callers at once."""
        if len(self.numbers) < JOBS_MAX:
            command = self._new_create(key=f"key {len(self.numbers)}")
            self._spawn([self._create([command], 5) for _ in range(self.rng.choice((1, 2)))])

    async def create_soon(self) -> None:
        """Some that are due within moments, where a clock that was set back makes them held."""
        if len(self.numbers) < JOBS_MAX:
            self._spawn([self._create([self._new_create(delay_ms=self.rng.randint(1, 300))], 1) for _ in range(3)])

    def _pick(self) -> bytes | None:
        return self.rng.choice(list(self.jobs)) if self.jobs else None

    async def _change(self, command: Cancel | RunNow | Redrive | Release, what: str) -> None:
        job = self.jobs[command.job_id]
        if not isinstance(command, Release):
            job.is_due_changed = True
            for held in job.holders:
                held.may_have_ended = held.may_have_ended or isinstance(command, Cancel)
        sent_us = self.loop.time_us()
        try:
            reply = await self._call(lambda face: face.propose(command))
        except (Unavailable, Down, Gone, OutcomeUnknown):
            return
        if reply.state is not None and not reply.refusal:
            self._learn(reply.state, sent_us, what)
            self.counts[what] += 1
            self.note(f"{job.name} {what}, v{reply.state.version}")

    async def cancel(self) -> None:
        if (job_id := self._pick()) is not None:
            self._spawn([self._change(Cancel(job_id, TENANT), "cancel")])

    async def run_now(self) -> None:
        if (job_id := self._pick()) is not None:
            self._spawn([self._change(RunNow(job_id, TENANT), "run")])

    async def redrive(self) -> None:
        if (job_id := self._pick()) is not None:
            self._spawn([self._change(Redrive(job_id, TENANT), "redrive")])

    async def _read(self, job_id: bytes) -> None:
        sent_us = self.loop.time_us()
        job = self.jobs[job_id]
        floor = job.floor(sent_us)
        try:
            record = await self._call(lambda face: face.read_job(TENANT, job_id))
        except (Unavailable, Down, Gone, OutcomeUnknown):
            return
        self.counts["read"] += 1
        if record is None:
            ensure(floor == 0, "linearizable", job=job.name, what="read", answered="nothing", known_before=floor)
        else:
            self._learn(record.state, sent_us, "read")

    async def read(self) -> None:
        """Several at once, at any nodes: of what was just answered mostly."""
        ids = list(self.jobs)
        if ids:
            self._spawn([self._read(self.rng.choice(ids[-6:] if self.rng.random() < 0.7 else ids)) for _ in range(4)])

    async def wait(self) -> None:
        await self.sleep(self.rng.choice((200, 900, 2_500, 5_000)))

    # ---- schedules

    async def _put_schedule(self, name: str, definition: Definition) -> None:
        try:
            await self._call(lambda face: face.put_schedule(definition, actor="sim"))
        except (Unavailable, Down, Gone, OutcomeUnknown, WheelschedError):
            return
        self.counts["schedules"] += 1
        self.note(f"schedule {name} is there")

    async def put_schedule(self) -> None:
        if len(self.schedules) >= 3:
            return
        name = f"s{len(self.schedules) + 1}"
        anchor_ms = self.cluster.true_ms() // 1_000 * 1_000
        self.schedules[name] = anchor_ms
        definition = Definition(
            b"", TENANT, name, SCHEDULED_QUEUE, every_ms=self.rng.choice((1_000, 1_000, 3_000)), anchor_ms=anchor_ms,
            missed=int(self.rng.choice(list(Missed))), overlap=int(self.rng.choice(list(Overlap))), spec=encode_spec(SPEC),
            max_concurrency=self.rng.choice((-1, -1, 1)),
        )  # fmt: skip
        self._spawn([self._put_schedule(name, definition)])

    async def _pause_schedule(self, name: str, paused: bool) -> None:
        try:
            await self._call(lambda face: face.pause_schedule(TENANT, name, paused, actor="sim"))
        except (Unavailable, Down, Gone, OutcomeUnknown, NotFound):
            return
        self.note(f"schedule {name} paused={paused}")

    async def pause_schedule(self) -> None:
        if self.schedules:
            self._spawn([self._pause_schedule(self.rng.choice(list(self.schedules)), self.rng.random() < 0.4)])

    # ---- workers

    async def _worker(self, number: int) -> None:
        """Claims at any node, does what workers do, and comes late now and then."""
        rng = random.Random(f"worker {self.seed} {number}")
        while not self.is_closing:
            queues = rng.choice((("a", "b", "s"), ("b", "a", "s"), ("s",), ("a",)))
            wait_ms, jobs_max, lease_ms = rng.choice((0, 300, 2_000)), rng.choice((1, 1, 4)), rng.choice((500, 1_500, 3_000))
            sent_us = self.loop.time_us()
            try:
                jobs = await self._call(
                    lambda face, queues=queues, wait_ms=wait_ms, jobs_max=jobs_max, lease_ms=lease_ms: face.claim(  # type: ignore[misc]
                        TENANT, queues, jobs_max=jobs_max, lease_ms=lease_ms, wait_ms=wait_ms, worker=f"w{number}"
                    ),
                    within_s=rng.choice((30.0, 30.0, 0.25)),
                )
            except (Unavailable, Down, Gone, OutcomeUnknown):
                await self.sleep(rng.choice((20, 200)))
                continue
            answered_us = self.loop.time_us()
            for claimed in jobs:
                self._on_claimed(claimed, sent_us, number)
            for claimed in jobs:
                await self._work(claimed, answered_us, rng)
            await self.sleep(rng.choice((0, 5, 40)))

    def _on_claimed(self, claimed: ClaimedJob, sent_us: int, worker: int) -> None:
        state, now_us = claimed.state, self.loop.time_us()
        job = self._learn(state, sent_us, "claim")
        group = self._group(state.job_id)
        self.counts["claimed"] += 1
        self.note(f"{job.name} claimed by w{worker}, attempt {state.attempt}, token {state.fencing}, v{state.version}")
        ensure((group, state.fencing) not in self.given, "token_grows", job=job.name, token=state.fencing, what="given twice")
        self.given[group, state.fencing] = state.job_id
        for held in job.holders:
            ensure(
                held.fencing > state.fencing or held.may_have_ended or now_us >= held.until_us,
                "one_live_lease", job=job.name, holder=held.fencing, for_ms=(held.until_us - now_us) // 1_000, other=state.fencing,
            )  # fmt: skip
        job.holders.append(Held(state.fencing, self._lease_end_us(sent_us, state.lease_ms)))
        if state.attempt == 1 and state.run is None:
            acted = {node for node, since, until in self.offices[group] if since <= now_us and until >= job.created_us}
            could_ms = self.cluster.true_ms() + self.walls.most_ahead_ms(job.created_us, now_us, sorted(acted))
            ensure(state.fire_at_ms <= could_ms + 2, "never_early", job=job.name, by_ms=state.fire_at_ms - could_ms)

    @staticmethod
    def _lease_end_us(sent_us: int, lease_ms: int) -> int:
        return sent_us + int((lease_ms - ROUNDING_MS) * 1_000 / CLOCK_RATE_MAX)

    async def _work(self, claimed: ClaimedJob, answered_us: int, rng: random.Random) -> None:
        state = claimed.state
        lease_ms = state.lease_ms
        kind = rng.random()
        if self.is_healed or kind < 0.6:
            await self.sleep(rng.random() * min(lease_ms * 0.5, 150))
            await self._end(claimed, rng)
        elif kind < 0.7:
            for _ in range(rng.randrange(1, 4)):
                await self._linger(lease_ms * 0.4)
                await self._beat(claimed)
            await self._end(claimed, rng)
        elif kind < 0.8:  # beats when the lease is just over: perhaps its end is on its way through the log
            left_ms = lease_ms + rng.randint(-3, 8) - (self.loop.time_us() - answered_us) / 1_000
            await self._linger(max(left_ms, 0))
            for _ in range(5):
                self._spawn([self._beat(claimed)])
                await self.sleep(rng.randint(1, 4))
            if rng.random() < 0.5:
                await self._end(claimed, rng)
        elif kind < 0.88:
            held = self._held(state)
            held.may_have_ended = True
            await self._change(Release(state.job_id, state.attempt, state.fencing), "release")
        elif kind < 0.95:  # a zombie: wakes after its lease
            await self._linger(lease_ms * (1.2 + rng.random()))
            await self._end(claimed, rng)

    async def _linger(self, ms: float) -> None:
        """Sleep, but not beyond the time of faults."""
        until_us = self.loop.time_us() + int(ms * 1_000)
        while not self.is_healed and (left_us := until_us - self.loop.time_us()) > 0:  # noqa: ASYNC110  # virtual time
            await asyncio.sleep(min(left_us / 1_000_000, 0.25))

    def _held(self, state: JobState) -> Held:
        return next(held for held in self.jobs[state.job_id].holders if held.fencing == state.fencing)

    async def _beat(self, claimed: ClaimedJob) -> None:
        state, sent_us = claimed.state, self.loop.time_us()
        try:
            reply = await self._call(lambda face: face.heartbeat(state.job_id, state.attempt, state.fencing, lease_ms=None, progress=None))
        except (Unavailable, Down, Gone, OutcomeUnknown):
            return
        if not reply.refusal:
            self.counts["beats"] += 1
            held = self._held(state)
            held.until_us = max(held.until_us, self._lease_end_us(sent_us, state.lease_ms))
            self._check_beat(state, held)

    def _check_beat(self, state: JobState, held: Held) -> None:
        """Whoever is told that the lease is his must not learn that somebody else had the job already."""
        job, now_us = self.jobs[state.job_id], self.loop.time_us()
        if not held.may_have_ended and held.until_us > now_us:
            later = [other.fencing for other in job.holders if other.fencing > held.fencing]
            ensure(not later, "one_live_lease", job=job.name, holder=held.fencing, beat="answered", others=later)

    async def _end(self, claimed: ClaimedJob, rng: random.Random) -> None:
        state = claimed.state
        outcome = rng.choices((Outcome.SUCCEEDED, Outcome.RETRYABLE_FAILURE, Outcome.FATAL_FAILURE), (8, 2, 0.5))[0]
        job, held = self.jobs[state.job_id], self._held(state)
        held.may_have_ended = True
        for _ in range(4):
            sent_us = self.loop.time_us()
            try:
                reply: Reply = await self._call(
                    lambda face: face.complete(
                        state.job_id, state.attempt, state.fencing, outcome=int(outcome), error=b"", result=b"", retry_after_ms=-1
                    )
                )
            except (Unavailable, Down, Gone, OutcomeUnknown):
                await self.sleep(rng.choice((50, 500)))
                continue
            if not reply.refusal:
                assert reply.state is not None
                ensure(reply.state.fencing == state.fencing, "stale_is_refused", job=job.name, token=state.fencing, state=reply.state)
                self._learn(reply.state, sent_us, "complete")
                self.counts["completed"] += 1
                self.note(f"{job.name} {outcome.name}, v{reply.state.version}")
            else:
                self.counts["stale"] += 1
            return

    # ---- faults

    def _running(self) -> list[VirtualNode]:
        return [node for node in self.cluster.up() if not self.loop.is_paused(node.node_id)]

    def _leaders(self) -> list[int]:
        return [node.node_id for node in self.cluster.up() if node.face is not None and node.face.local.dispatcher.led]

    async def cut(self) -> None:
        kind = self.rng.random()
        network = self.cluster.network
        if kind < 0.6:
            alone = self.rng.choice(self._leaders() or list(NODES)) if kind < 0.4 else self.rng.choice(NODES)
            for other in NODES:
                if other != alone:
                    network.cut(alone, other)
                    network.cut(other, alone)
        else:
            for sender in NODES:
                for to in NODES:
                    if sender != to and self.rng.random() < 0.3:
                        network.cut(sender, to)
        self.note(f"cut {network.cuts()}")

    async def heal_links(self) -> None:
        self.cluster.network.heal()

    async def crash(self) -> None:
        """One node, or all at once as in a power cut."""
        up = self.cluster.up()
        if not up:
            return
        chosen = up if self.rng.random() < 0.15 else [self.rng.choice(up)]
        for node in chosen:
            keep = self.rng.choice((0.0, 0.3, 0.6, 1.0)) if self.profile.torn else 0.0
            self.counts["crashes"] += 1
            self.note(f"n{node.node_id} crashes and keeps {keep}")
            await node.crash(keep)
        if len(chosen) > 1 or self.rng.random() < 0.4:
            await self.restart()

    async def restart(self) -> None:
        for node in self.nodes.values():
            if not node.is_up:
                await node.start()

    async def stop(self) -> None:
        running = self._running()
        if running:
            node = self.rng.choice(running)
            await node.stop()
            self.counts["stops"] += 1
            self.note(f"n{node.node_id} has stopped")
            if self.rng.random() < 0.7:
                await node.start()

    async def pause(self) -> None:
        running = self._running()
        if running:
            node_id = self.rng.choice([n for n in self._leaders() if not self.loop.is_paused(n)] or [running[0].node_id])
            ms = self.rng.choice((150, 700, 1_500, 6_000))
            self.loop.pause(node_id)
            self.counts["pauses"] += 1
            self.note(f"n{node_id} stands still for {ms} ms")
            self.loop.call_later(ms / 1_000, self.loop.resume, node_id)

    async def step_clock(self) -> None:
        node = self.rng.choice(list(self.nodes.values()))
        by_ms = self.rng.choice(self.profile.clock_steps)
        node.machine.stepped_ms += by_ms
        self.note(f"the clock of n{node.node_id} is set by {by_ms} ms, to {node.machine.stepped_ms}")
        for _ in range(3):
            await self.sleep(self.rng.randint(1, 30))
            await self.create_soon()

    async def stall(self) -> None:
        self.rng.choice(list(self.nodes.values())).stalled_ms = self.rng.choice((800, 3_000))

    async def transfer(self) -> None:
        group = self.rng.choice(self.cluster.groups)
        for node in self.cluster.acting(group):
            assert node.face is not None
            to = self.rng.choice([other for other in NODES if other != node.node_id])
            try:
                node.face.replicas.transfer(group, to)
            except (Unavailable, InvalidRequest):
                continue
            self.counts["transfers"] += 1
            self.note(f"group {group} from n{node.node_id} to n{to}")

    # ---- the end

    async def heal(self) -> None:
        """No more faults: within a bound everything due runs, and memory, rows and what was answered agree."""
        self.note("heal")
        self.is_healed = True
        self.cluster.network.is_calm = True
        self.cluster.network.heal()
        for node in self.nodes.values():
            node.stalled_ms = 0
            self.loop.resume(node.node_id)
        await self._set_clocks_right()
        await self.restart()
        await self._until("progress", self._unrest, PROGRESS_MS)
        await self._until("chains_never_break", self._without_successor, PROGRESS_MS)
        for name in self.schedules:
            await self._until_done(lambda face, name=name: face.pause_schedule(TENANT, name, True, actor="sim"))  # type: ignore[misc]
        await self._until("progress", self._unfinished, PROGRESS_MS)
        await self._check_schedules()
        self.is_closing = True
        await self._until("progress", lambda: f"{len(self.clients)} clients wait" if self.clients else "", PROGRESS_MS)
        await asyncio.gather(*(self._check_wake(node, self.rng.randrange(self.profile.group_count)) for node in self.nodes.values()))
        await self._check_memory()
        for group in self.cluster.groups:
            self._check_rows(group)
        self.look()
        self.note(f"end {[self.nodes[1].digest(group) for group in self.cluster.groups]}")

    async def _set_clocks_right(self) -> None:
        """All clocks show one time, at which what was made by one that was ahead is about due. Nodes believe it as they start, or because
        the others confirm it."""
        if not any(node.machine.stepped_ms for node in self.nodes.values()):
            return
        by_ms = 0
        for node in self.nodes.values():
            for group in range(self.profile.group_count):
                for _, row in node.rows(keys.STATE, group):
                    state = decode_state(row)
                    if state.status not in FINAL:
                        by_ms = max(by_ms, due_at_ms(state) - self.cluster.true_ms() - 5_000)
        if self.rng.random() < 0.5:
            for node in self.cluster.up():
                await node.crash(0.0)
        for node in self.nodes.values():
            node.machine.stepped_ms = by_ms
        self.note(f"all clocks are right, by {by_ms} ms")
        await self.restart()
        await self._until("clocks_are_believed", self._doubt, PROGRESS_MS)

    async def _until(self, name: str, unrest: Callable[[], str], within_ms: int) -> None:
        until_us = self.loop.time_us() + within_ms * 1_000
        quiet = 0
        while quiet < 2:
            ensure(self.loop.time_us() < until_us, name, unrest=unrest())
            await self.sleep(300)
            self.look()
            quiet = 0 if unrest() else quiet + 1

    async def _until_done(self, what: Callable[[ClusterNode], Coroutine[Any, Any, object]]) -> None:
        for _ in range(20):
            try:
                await self._call(what)
            except NotFound:
                return
            except (Unavailable, Down, Gone, OutcomeUnknown):
                await self.sleep(500)
                continue
            return
        raise ClusterBroken("progress", unrest="a call is not answered after healing")

    def _unrest(self) -> str:
        for group in self.cluster.groups:
            acting = self.cluster.acting(group)
            if len(acting) != 1:
                return f"{len(acting)} nodes act for group {group}"
            applied = {node.node_id: node.member(group).state.applied_index for node in self.nodes.values()}
            if max(applied.values()) - min(applied.values()) > 20:
                return f"group {group} applied {applied}"
        return ""

    def _unaware(self) -> str:
        queues = {node.node_id: node.face.local.dispatcher.queues.get(TENANT, CAPPED_QUEUE) for node in self.cluster.up() if node.face}
        unaware = [node for node, queue in queues.items() if queue is None or queue.settings.max_concurrency < 0]
        return f"nodes {unaware} do not know of the cap" if unaware else ""

    def _doubt(self) -> str:
        doubted = [node.node_id for node in self.cluster.up() if node.clock is not None and node.clock.doubted_ms]
        return f"nodes {doubted} doubt their clocks" if doubted else ""

    def _without_successor(self) -> str:
        """Which schedule is not paused and has no occurrence to come, or one that is over; empty for none."""
        if unrest := self._unrest():
            return unrest
        for name in self.schedules:
            group = self._schedule_group(name)
            (leader,) = self.cluster.acting(group)
            assert leader.face is not None
            found = leader.face.local.dispatcher.timetable.read(group, TENANT, name)
            if found is not None and not found[0].paused and found[1].next_fire_at_ms < self._wall_ms() - 2 * found[0].every_ms:
                return f"schedule {name} waits for {found[1].next_fire_at_ms - self._wall_ms()} ms from now"
        return ""

    def _schedule_group(self, name: str) -> int:
        face = self.nodes[1].face
        assert face is not None
        return face.local.dispatcher.group_of_schedule(TENANT, name)

    def _wall_ms(self) -> int:
        """After healing: what every clock shows."""
        return self.nodes[1].machine.wall_ms()

    def _states(self, group: int) -> dict[bytes, JobState]:
        (node,) = self.cluster.acting(group)
        return {key[2:]: decode_state(row) for key, row in node.rows(keys.STATE, group)}

    def _unfinished(self) -> str:
        if unrest := self._unrest():
            return unrest
        for group in range(self.profile.group_count):
            open_ = [state for state in self._states(group).values() if state.status not in FINAL and state.status != Status.DISCARDED]
            if open_:
                names = [self.jobs[state.job_id].name if state.job_id in self.jobs else state.job_id.hex() for state in open_[:5]]
                return f"{len(open_)} jobs of group {group} have not ended: {names}, {open_[0]}"
        return ""

    def _check_rows(self, group: int) -> None:
        """The rows in the end against everything that was answered."""
        applied = {node.member(group).state.applied_index for node in self.nodes.values()}
        ensure(len(applied) == 1, "progress", unrest=f"group {group} applied {applied}")
        for node in self.nodes.values():
            self._compare(node, group, next(iter(applied)))
        self.look()
        if group == keys.META_GROUP:
            return
        (leader,) = self.cluster.acting(group)
        states = self._states(group)
        for job_id, job in self.jobs.items():
            if self._group(job_id) != group:
                continue
            state = states.get(job_id)
            if job.acked:
                found = None if state is None else state.version
                ensure(state is not None and state.version >= job.acked, "never_lost", job=job.name, answered=job.acked, found=found)
            if state is None:
                continue
            ensure(not job.tries or job.refused < job.tries, "refused_never_happens", job=job.name, state=state)
            self._check_states(job, state)
        self._check_payloads(leader, group)

    @staticmethod
    def _check_states(job: Known, final: JobState) -> None:
        known = job.states.setdefault(final.version, _seen(final))
        ensure(known == _seen(final), "never_lost", job=job.name, version=final.version, answered=known, found=_seen(final))
        for (version, one), (later, other) in pairwise(sorted(job.states.items())):
            grows = one[6] <= other[6] and one[5] <= other[5] + 1
            ensure(grows, "token_grows", job=job.name, versions=(version, later), states=(one, other))
            ends = one[0] in FINAL and not (one[0] == Status.DEAD and job.is_due_changed)
            ensure(not ends, "never_lost", job=job.name, ended_at=version, and_then=other)

    def _check_payloads(self, leader: VirtualNode, group: int) -> None:
        """Each job is the one that was asked for."""
        for _, row in leader.rows(keys.DONE, group):
            done = decode_done(row)
            if done.state.run is None:
                number = int(split_job(done.job)[1])
                ensure(self.numbers.get(number) == done.state.job_id, "one_job_per_key", number=number, job=done.state.job_id.hex())

    async def _check_schedules(self) -> None:
        """Every instant from the first on has one job or one record, up to where the schedule has come."""
        for name in self.schedules:
            group = self._schedule_group(name)
            (leader,) = self.cluster.acting(group)
            assert leader.face is not None
            record = await leader.face.local.read_schedule(TENANT, name)
            if record is None:
                continue
            jobs: list[JobState] = []
            records: list[tuple[int, int]] = []
            cursor: bytes | None = None
            while True:
                page = await leader.face.local.list_runs(TENANT, name, cursor=cursor, limit=500)
                assert page is not None
                jobs += [job.state for job in page.jobs]
                records += [(skip.from_ms, skip.to_ms) for skip in page.skipped]
                if (cursor := page.cursor) is None:
                    break
            self._check_chain(name, record.definition, record.course.decided_ms, jobs, sorted(records))

    def _check_chain(
        self, name: str, definition: Definition, decided_ms: int, jobs: list[JobState], records: list[tuple[int, int]]
    ) -> None:
        at = Counter(state.run.scheduled_for_ms for state in jobs if state.run is not None)
        if not at and not records:
            return
        double = [instant for instant, count in at.items() if count > 1]
        ensure(not double, "one_job_per_occurrence", schedule=name, double=double)
        first_ms = min([*at, *(start for start, _ in records)], default=decided_ms)
        missing = [
            instant
            for instant in range(first_ms, decided_ms + 1, definition.every_ms)
            if instant not in at and not any(start <= instant <= end for start, end in records)
        ]
        left_out = [instant - START_MS for instant in missing[:5]]
        ensure(not missing, "chains_never_break", schedule=name, missing=left_out, of=len(at), records=records[:5])
        self.counts["occurrences"] += len(at)

    async def _check_wake(self, node: VirtualNode, group: int) -> None:
        """A worker waits at a node, then a job comes up in a group that any node may lead: no wake-up is lost on the way."""
        queue, sent_us = f"wake {node.node_id}", self.loop.time_us()
        waiting = asyncio.ensure_future(
            node.call(lambda face: face.claim(TENANT, [queue], jobs_max=1, lease_ms=60_000, wait_ms=12_000, worker=queue))
        )
        await self.sleep(1_500)
        command = self._new_create(delay_ms=200)
        while self._group(command.job_id) != group:
            del self.jobs[command.job_id]
            self.numbers.popitem()
            command = self._new_create(delay_ms=200)
        await self._create([msgspec.structs.replace(command, queue=queue, window_ms=0, spec=encode_spec(SPEC))], 5)
        await asyncio.wait({waiting}, timeout=WAKE_S)
        ensure(waiting.done(), "waiter_is_served", node=node.node_id, group=group, leader=[n.node_id for n in self.cluster.acting(group)])
        for claimed in waiting.result():
            self._on_claimed(claimed, sent_us, 0)
            await self._end(claimed, self.rng)

    async def _check_memory(self) -> None:
        """Each group goes to another node and back, with jobs that wait; then what is in memory is compared with the rows."""
        await self._create([self._new_create(delay_ms=delay_ms) for delay_ms in (4_000_000, 4_000_000, 4_000_000, 30_000)], 5)
        for _ in range(2):
            for group in range(self.profile.group_count):
                (node,) = self.cluster.acting(group)
                assert node.face is not None
                # There and back: a third node would not meet what the first one left behind.
                to = next(other for other in NODES if other != node.node_id)
                node.face.replicas.transfer(group, to)
            await self._until("progress", self._unrest, PROGRESS_MS)
        await self._create([self._new_create(delay_ms=20_000) for _ in range(4)], 5)
        await self._until("progress", self._unrest, PROGRESS_MS)
        for node in self.nodes.values():
            assert node.face is not None
            dispatcher = node.face.local.dispatcher
            found = await dispatcher.audit.sweep()
            repairs = dispatcher.statistics().audit_repairs
            ensure(not found and not repairs, "audit_finds_nothing", node=node.node_id, found=found, repairs=repairs)
            self._check_timers(node)

    def _check_timers(self, node: VirtualNode) -> None:
        """Takes everything out of the wheels: the node is of no use afterwards."""
        assert node.face is not None
        dispatcher = node.face.local.dispatcher
        timers = dispatcher.timers
        for lane in Lane:
            for group in range(self.profile.group_count):
                loaded_ms = timers.loaded_ms[lane][group]
                wanted: Counter[tuple[int, int, int]] = Counter()
                leased = set()
                for _, row in node.rows(keys.STATE, group) if group in dispatcher.led else ():
                    state = decode_state(row)
                    if state.lane != lane or state.status in FINAL or state.status == Status.DISCARDED:
                        continue
                    if state.status in LEASED:
                        leased.add(state.job_id)
                    elif status_of(state, node.member(group).state.watermark_ms) is Status.QUEUED:
                        continue
                    elif due_at_ms(state) < loaded_ms and not (state.run is not None and state.run.phase == Phase.BUFFERED and state.held):
                        wanted[due_at_ms(state), id_low(state.job_id), state.version] += 1
                wheel = timers._wheels.wheel(lane * self.profile.group_count + group)
                records = wheel.advance(max(loaded_ms, wheel.hand_ms) + 100 * 86_400_000, 1 << 20)
                held = Counter(TIMER.unpack_from(records, at)[:3] for at in range(0, len(records), TIMER.size))
                ensure(held == wanted, "memory_is_what_the_rows_say", node=node.node_id, group=group, lane=lane,
                       too_many=list((held - wanted).items())[:3], missing=list((wanted - held).items())[:3])  # fmt: skip
                for job_id in leased:
                    ensure(dispatcher.leases.get(job_id) is not None, "memory_is_what_the_rows_say", node=node.node_id, lease=job_id.hex())


class SeedFailed(AssertionError):
    """Says how to see it again. `name`: of the invariant, or of the error."""

    name = ""


def run_seed(
    seed: int, *, steps: int = STEPS_DEFAULT, profile: Profile | None = None, replicas_type: type[RaftReplicas] = RaftReplicas
) -> Simulation:
    """The run of one seed. Raises `SeedFailed` with the seed, the commit, the last events and the command that replays it."""
    drawn = profile or Profile.draw(random.Random(f"profile {seed}"))
    loop = VirtualLoop(random.Random(f"loop {seed}"), turn_us=drawn.turn_us)
    simulation = Simulation(seed, loop, steps, profile=drawn, replicas_type=replicas_type)
    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(simulation.run())
    except Exception as error:
        command = f"python -m wheelsched.testing.simulate --seed {seed} --steps {steps} --trace"
        events = "\n".join(simulation.log[-40:])
        text = f"seed {seed} at commit {commit()}: {type(error).__name__}: {error}\n{events}\nreplay: {command}"
        failed = SeedFailed(text)
        failed.name = error.name if isinstance(error, ClusterBroken) else type(error).__name__
        raise failed from error
    return simulation


def commit() -> str:
    """Of the tree this runs from, `+` where it has been changed since; `unknown` outside of one."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulate whole clusters under faults.")
    parser.add_argument("--seed", type=int, action="append", help="a seed to run; may be given more than once")
    parser.add_argument("--schedules", type=int, default=0, metavar="N", help="run N schedules: seeds 1 to N, or new ones with --fresh")
    parser.add_argument("--fresh", action="store_true", help="with --schedules: seeds that were never run")
    parser.add_argument("--steps", type=int, default=STEPS_DEFAULT)
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument("--failures", type=int, default=1, metavar="N", help="stop after N failures")
    arguments = parser.parse_args()
    quiet_logs()
    fresh = random.SystemRandom()
    seeds = [*(arguments.seed or []), *(fresh.getrandbits(32) if arguments.fresh else n + 1 for n in range(arguments.schedules))]
    started, used, failed, total = time.monotonic(), time.process_time(), 0, Counter[str]()
    virtual_s, done = 0.0, 0
    for seed in seeds:
        try:
            simulation = run_seed(seed, steps=arguments.steps)
            done += 1
        except KeyboardInterrupt:
            break
        except SeedFailed as failure:
            done += 1
            failed += 1
            print(failure, file=sys.stderr, flush=True)
            if arguments.trace:
                raise
            if failed >= arguments.failures:
                break
            continue
        total += simulation.counts
        virtual_s += simulation.loop.time()
        if arguments.trace:
            print("\n".join(simulation.log))
            print("trace", simulation.trace_hash())
    minutes, cpu_minutes = (time.monotonic() - started) / 60, (time.process_time() - used) / 60
    rate = f"{done / max(minutes, 1e-9):.0f} a minute, {done / max(cpu_minutes, 1e-9):.0f} a minute of CPU"
    print(f"{done} of {len(seeds)} schedules, {failed} failed; {rate}; {virtual_s:.0f} virtual seconds; {dict(total)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
