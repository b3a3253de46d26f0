"""Random days in the life of a node, from one seed, against an obvious model.

    python -m wheelsched.testing.simulate_node --seed 7 --steps 60        # one day; the log of events with --trace
    python -m wheelsched.testing.simulate_node --fresh 100                # a hundred new seeds

Each step is one call, a burst of calls at once, a move or a step of the clock, a crash or a restart. The model keeps what was last
acknowledged of each job and knows what time makes of it: a waiting job is QUEUED once the wall clock has read its due time, a lease
ends when the monotonic clock reaches its end. After each step the node has to agree, and the invariants have to hold: `never_lost`,
`never_early`, `token_grows`, `one_live_lease`, caps, depths as counted, no orphan rows, nothing for the audit to repair. At the end the
queues are healed: every job is claimed, ends, and is purged without leaving a row.

Every seed leaves out some kinds of steps and chooses its own horizon, spill bound and number of groups ("swarm testing", Groce 2012).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from wheelsched.core.errors import OutcomeUnknown, StaleLease, Unavailable, WheelschedError
from wheelsched.core.ids import group_of
from wheelsched.model import keys
from wheelsched.model.rows import JobState
from wheelsched.model.states import FINAL, LEASED, Outcome, Status, due_at_ms
from wheelsched.node.face import ClaimedJob, JobRecord
from wheelsched.testing.checks import all_rows, check_audit, check_depth, check_rows
from wheelsched.testing.node import TestNode, make_settings

STEPS_DEFAULT: Final = 60
JOBS_MAX: Final = 80
QUEUES: Final = ("a", "b")
PRIORITIES: Final = ("critical", "default", "bulk")
WORKERS: Final = ("w1", "w2", "w3")
DELAYS_S: Final = (0.0, 0.0, 0.001, 1.0, 5.0, 59.0, 60.0, 600.0, 3_600.0, 90_000.0, 31_622_400.0)
ADVANCES_S: Final = (0.001, 0.25, 1.0, 5.0, 30.0, 45.0, 61.0, 300.0, 3_000.0, 3_500.0)  # below the shortest retention
STEPS_S: Final = (-3_600.0, -60.0, -1.0, -0.005, -0.001, 0.003, 1.0, 60.0, 3_600.0)
LEASES_S: Final = (1.0, 5.0, 45.0, 600.0)
# Whoever still waits after this many turns of a loop on which nothing else happens was forgotten.
QUIET_TURNS: Final = 60


@dataclass
class ModelJob:
    """What is known of a job: its state as last acknowledged or seen, and what time has done since."""

    state: JobState
    wall_max_ms: int  # the latest the wall clock has read since the job began to wait for its due time
    lease_end_ms: int = 0  # monotonic
    claim_ms: int = 0  # what a heartbeat gets that names no length
    timeout_ms: int = 0  # monotonic
    gone: bool = False

    @property
    def leased(self) -> bool:
        return self.state.status in LEASED

    def expected(self) -> Status:
        """The status everybody should see."""
        state = self.state
        if state.status not in (Status.SCHEDULED, Status.RETRYING):
            return Status(state.status)
        deadline_ms = state.start_deadline_ms
        if deadline_ms >= 0 and state.attempt == 0 and self.wall_max_ms > state.fire_at_ms + deadline_ms:
            return Status.SKIPPED
        return Status.QUEUED if due_at_ms(state) <= self.wall_max_ms else Status(state.status)


@dataclass
class ModelQueue:
    max_concurrency: int = -1
    rate_per_s: float = -1.0
    retention_ms: int = 30 * 86_400_000
    paused: bool = False
    starts: list[int] = field(default_factory=list)  # monotonic instants of claims since the rate was set
    rate_since_ms: int = 0


class Simulation:
    """One seed. `run` raises AssertionError where the node and the model part."""

    def __init__(self, seed: int, *, steps: int = STEPS_DEFAULT) -> None:
        self.rng = random.Random(f"simulation {seed}")
        self.steps = steps
        self.log: list[str] = []
        self.jobs: dict[bytes, ModelJob] = {}
        self.names: dict[bytes, str] = {}
        self.queues = {name: ModelQueue() for name in QUEUES}
        self.held: list[ClaimedJob] = []  # what the workers believe to hold, stale tokens included
        self.group_tokens: dict[int, int] = {}
        self.keys = 0
        choose = self.rng.choice
        self.horizon_s = choose((0.5, 10.0, 300.0, 86_400.0))
        self.ready_max = choose((4, 6, 12, 262_144))
        self.node = TestNode(
            seed=seed,
            settings=make_settings(
                {"cluster": {"group_count": choose((1, 2, 8))}, "scheduler": {"horizon_s": self.horizon_s}},
                ready_queue_max=self.ready_max,
            ),
        )
        self.moves = self._choose_moves()

    def _choose_moves(self) -> list[tuple[str, Callable[[], Coroutine[Any, Any, None]], int]]:
        every: list[tuple[str, Callable[[], Coroutine[Any, Any, None]], int]] = [
            ("create", self.create, 14), ("create_many", self.create_many, 4), ("create_keyed", self.create_keyed, 4),
            ("update", self.update, 5), ("cancel", self.cancel, 6), ("run_now", self.run_now, 4), ("claim", self.claim, 14),
            ("complete", self.complete, 12), ("heartbeat", self.heartbeat, 5), ("release", self.release, 4),
            ("redrive", self.redrive, 4), ("discard", self.discard, 2), ("put_queue", self.put_queue, 2),
            ("pause", self.pause, 2), ("advance", self.advance, 14), ("step_clock", self.step_clock, 4),
            ("restart", self.restart, 2), ("crash", self.crash, 3), ("burst", self.burst, 5),
            ("burst_and_crash", self.burst_and_crash, 2), ("wait", self.wait, 5), ("hang_up", self.hang_up, 3),
        ]  # fmt: skip
        kept = {"create", "claim", "advance"}
        return [move for move in every if move[0] in kept or self.rng.random() < 0.75]

    # The run.

    async def run(self) -> list[str]:
        """The events of the day."""
        await self.node.open()
        try:
            names = [name for name, _, weight in self.moves for _ in range(weight)]
            by_name = {name: move for name, move, _ in self.moves}
            for step in range(self.steps):
                name = self.rng.choice(names)
                self.note(f"{step} {self.node.now_ms} {name}")
                await by_name[name]()
                await self.look(thorough=step % 4 == 3)
            await self.heal()
        finally:
            await self.node.close()
        return self.log

    def note(self, event: str) -> None:
        self.log.append(event)

    def name(self, job_id: bytes) -> str:
        """`j3` for the fourth job made."""
        return self.names.setdefault(job_id, f"j{len(self.names)}")

    # What the model learns.

    def learn(self, state: JobState) -> None:
        """A state as acknowledged; of several, the newest counts."""
        job = self.jobs.get(state.job_id)
        if job is None:
            job = self.jobs[state.job_id] = ModelJob(state, self.node.now_ms)
        elif state.version < job.state.version:
            return
        before, job.state = job.state, state
        if state.status in (Status.SCHEDULED, Status.RETRYING) and (before.version != state.version or before is state):
            # A job that waits for the same instant as before has been due since, if it was.
            if due_at_ms(before) != due_at_ms(state) or before.status != state.status:
                job.wall_max_ms = self.node.now_ms
            if state.outcome == Outcome.RELEASED:
                job.wall_max_ms = max(job.wall_max_ms, due_at_ms(state))
        self.note(f"  {self.name(state.job_id)} v{state.version} {Status(state.status).name} attempt {state.attempt}")

    def learn_claim(self, claimed: ClaimedJob, queues: Sequence[str], *, sure: bool = True) -> None:
        """A job that reached a worker: it may have, and nobody else holds it."""
        state, job = claimed.state, self.jobs[claimed.state.job_id]
        name = self.name(state.job_id)
        stamp_ms = state.lease_expires_at_ms - state.lease_ms
        job.wall_max_ms = max(job.wall_max_ms, stamp_ms)
        told = job.state.fencing == state.fencing  # another call's answer told of this very lease already
        if sure and not told:
            assert job.expected() is Status.QUEUED, f"never_early: {name} claimed while {job.expected().name}"
            assert state.attempt == job.state.attempt + 1, f"{name} attempt {state.attempt} after {job.state.attempt}"
        assert told or state.fencing > job.state.fencing, f"token_grows: {name} {state.fencing} after {job.state.fencing}"
        group = group_of(state.job_id, self.node.settings.cluster.group_count)
        assert state.fencing > self.group_tokens.get(group, 0), f"token_grows: group {group} gave {state.fencing} again"
        self.group_tokens[group] = state.fencing
        assert state.queue in queues and not self.queues[state.queue].paused, f"{name} of queue {state.queue} claimed"
        self.learn(state)
        mono_ms = self.node.clock.mono_ms() - (self.node.now_ms - stamp_ms)
        job.lease_end_ms, job.timeout_ms = mono_ms + state.lease_ms, mono_ms + state.timeout_ms
        job.claim_ms = state.lease_ms
        self.queues[state.queue].starts.append(mono_ms)
        self.held.append(claimed)

    async def look(self, *, thorough: bool = False) -> None:
        """Let everything due happen, then compare the node with the model."""
        await self.node.settle()
        for job in self.jobs.values():
            job.wall_max_ms = max(job.wall_max_ms, self.node.now_ms)
        for job_id, job in self.jobs.items():
            if not job.gone:
                self._compare(job_id, job, await self.node.node.read_job(self.node.tenant, job_id))
        for name, queue in self.queues.items():
            self._check_caps(name, queue)
            if await self.node.node.queue_view(self.node.tenant, name) is not None:
                await check_depth(self.node, name)
        if thorough:
            check_rows(self.node.store, self.node.settings.cluster.group_count)
            await check_audit(self.node)

    def _compare(self, job_id: bytes, job: ModelJob, record: JobRecord | None) -> None:
        name, before = self.name(job_id), job.state
        if record is None:
            assert self._may_be_purged(job), f"never_lost: {name} {Status(before.status).name} is gone"
            job.gone = True
            return
        now = record.state
        if job.leased and now.version != before.version:
            self._check_expiry(name, job, now)
        elif job.leased:
            over = min(job.lease_end_ms, job.timeout_ms) <= self.node.clock.mono_ms()
            assert not over, f"{name} runs beyond the end of its lease"
        expected = job.expected()
        assert record.status is expected, f"{name} is {record.status.name}, expected {expected.name}: {now}"
        if expected is Status.SKIPPED and before.status != Status.SKIPPED:
            assert now.version == before.version + 1
            job.state = now
        assert now.version == job.state.version, f"{name} v{now.version}, expected v{job.state.version}"
        assert now.fencing == job.state.fencing and now.attempt == job.state.attempt

    def _check_expiry(self, name: str, job: ModelJob, now: JobState) -> None:
        before, mono_ms = job.state, self.node.clock.mono_ms()
        ended_ms = min(job.lease_end_ms, job.timeout_ms)
        assert ended_ms <= mono_ms, f"{name} lost its lease {ended_ms - mono_ms} ms early"
        assert now.version == before.version + 1 and now.outcome in (Outcome.LEASE_EXPIRED, Outcome.TIMED_OUT), f"{name} {now}"
        wanted = Status.RETRYING if before.attempt - before.attempt_base < before.max_attempts else Status.DEAD
        wanted = Status.CANCELLED if before.status == Status.CANCEL_REQUESTED else wanted
        assert now.status == wanted, f"{name} {Status(now.status).name} after its lease ran out, expected {wanted.name}"
        if wanted is Status.RETRYING:
            bound_ms = min(before.max_backoff_ms, before.initial_backoff_ms << (before.attempt - 1))
            ended_at_ms = self.node.now_ms - (mono_ms - ended_ms)
            assert ended_at_ms <= now.next_attempt_at_ms <= ended_at_ms + bound_ms, f"{name} backoff {now}"
        job.state, job.wall_max_ms = now, self.node.now_ms
        self.note(f"  {name} v{now.version} {Status(now.status).name} by its lease")

    def _may_be_purged(self, job: ModelJob) -> bool:
        state = job.state
        if state.status not in FINAL:
            return False
        kept_ms = 90 * 86_400_000 if state.status == Status.DEAD else self.queues[state.queue].retention_ms
        return state.finished_at_ms + kept_ms <= job.wall_max_ms and state.keep_until_ms <= job.wall_max_ms

    def _check_caps(self, name: str, queue: ModelQueue) -> None:
        if queue.rate_per_s < 0:
            return
        burst, now_ms = max(queue.rate_per_s, 1.0), self.node.clock.mono_ms()
        starts = [at_ms for at_ms in queue.starts if at_ms >= queue.rate_since_ms]
        for place, since_ms in enumerate(starts):
            allowed = burst + queue.rate_per_s * (now_ms - since_ms) / 1000
            assert len(starts) - place <= allowed + 1e-6, f"queue {name} started {len(starts) - place}, rate allows {allowed}"

    def _room(self, name: str) -> int:
        """How many more jobs the caps of a queue allow, as far as the model can say."""
        queue = self.queues[name]
        if queue.paused:
            return 0
        running = sum(job.leased and not job.gone and job.state.queue == name for job in self.jobs.values())
        return max(queue.max_concurrency - running, 0) if queue.max_concurrency >= 0 else 1 << 30

    # One step each.

    def _options(self) -> dict[str, Any]:
        choose, chance = self.rng.choice, self.rng.random
        options: dict[str, Any] = {
            "queue": choose(QUEUES), "priority": choose(PRIORITIES), "max_attempts": choose((1, 2, 3)),
            "initial_backoff_s": choose((0.0, 0.5, 10.0)), "max_backoff_s": choose((0.0, 2.0, 600.0)),
            "timeout_s": choose((0.5, 30.0, 3_600.0)),
        }  # fmt: skip
        if chance() < 0.2:
            options["run_at_ms"] = self.node.now_ms + choose((-3_600_000, -1, 0, 1, 1_000, 400_000))
        else:
            options["delay_s"] = choose(DELAYS_S)
        if chance() < 0.3:
            options["window_s"] = choose((1.0, 60.0, 3_600.0))
        if chance() < 0.15:
            options["start_deadline_s"] = choose((0.0, 1.0, 30.0))
        return options

    def _pick(self, wanted: Callable[[ModelJob], bool] = lambda _job: True) -> ModelJob | None:
        found = [job for job in self.jobs.values() if not job.gone and wanted(job)]
        return self.rng.choice(found) if found else None

    async def create(self) -> None:
        if len(self.jobs) < JOBS_MAX:
            state = await self.node.create(**self._options())
            assert state.fire_at_ms >= min(self.node.now_ms, state.created_at_ms)
            self.learn(state)

    async def create_many(self) -> None:
        if len(self.jobs) < JOBS_MAX:
            for reply in await self.node.create_many([self._options() for _ in range(self.rng.randrange(2, 12))]):
                assert reply.state is not None
                self.learn(reply.state)

    async def create_keyed(self) -> None:
        number = self.rng.randrange(self.keys + 1)
        self.keys = max(self.keys, number + 1)
        options: dict[str, Any] = {"queue": "a", "delay_s": 5.0, "key": f"key-{number}"}
        options["priority"] = self.rng.choice(("default", "default", "bulk"))
        known = self.jobs.get(self.node.command(**options).job_id)
        try:
            state = await self.node.create(**options)
        except WheelschedError as error:
            assert known is not None and error.code in ("idempotency-key-reused", "job-finished"), error
            assert error.code == "job-finished" or known.state.fingerprint != self.node.command(**options).fingerprint
            return
        if known is not None and known.gone:
            self.jobs.pop(state.job_id)
        elif known is not None:
            assert state.version == known.state.version, "the same key made another job"
        self.learn(state)

    async def _change(
        self, job: ModelJob | None, call: Callable[[bytes], Coroutine[Any, Any, JobState]], refusals: tuple[str, ...]
    ) -> None:
        if job is None:
            return
        try:
            self.learn(await call(job.state.job_id))
        except WheelschedError as error:
            assert error.code in refusals, error
            self.note(f"  {self.name(job.state.job_id)} refused {error.code}")

    async def update(self) -> None:
        job = self._pick(lambda job: job.state.status not in FINAL)
        changes = self.rng.choice((
            {"delay_s": self.rng.choice(DELAYS_S)}, {"priority": self.rng.choice(PRIORITIES)}, {"window_s": self.rng.choice((0.0, 60.0))},
            {"run_at_ms": self.node.now_ms - 1}, {"labels": {"a": "b"}},
        ))  # fmt: skip
        if job is not None:
            changeable = job.expected() is Status.SCHEDULED and job.state.attempt == job.state.attempt_base
            refusals = () if changeable else ("job-not-scheduled",)
            await self._change(job, lambda job_id: self.node.update(job_id, **changes), refusals)

    async def cancel(self) -> None:
        job = self._pick(lambda job: job.state.status not in FINAL or self.rng.random() < 0.1)
        if job is not None:
            refusals = ("job-finished",) if job.expected() in FINAL else ()
            await self._change(job, self.node.cancel, refusals)

    async def run_now(self) -> None:
        job = self._pick(lambda job: job.state.status not in FINAL)
        if job is not None:
            await self._change(job, self.node.run_now, ("job-finished",) if job.expected() in FINAL | {Status.CANCEL_REQUESTED} else ())

    async def redrive(self) -> None:
        job = self._pick(lambda job: job.state.status == Status.DEAD)
        delay_s = self.rng.choice((0.0, 0.0, 30.0))
        await self._change(job, lambda job_id: self.node.redrive(job_id, delay_s=delay_s), ())

    async def discard(self) -> None:
        job = self._pick(lambda job: job.state.status == Status.DEAD)
        if job is not None:
            await self.node.discard(job.state.job_id)
            job.gone = True

    def _claim_options(self) -> tuple[tuple[str, ...], dict[str, Any]]:
        queues = tuple(self.rng.sample(QUEUES, self.rng.choice((1, 2))))
        return queues, {
            "jobs_max": self.rng.choice((1, 1, 2, 10)), "lease_s": self.rng.choice(LEASES_S), "worker": self.rng.choice(WORKERS),
        }  # fmt: skip

    async def claim(self) -> None:
        queues, options = self._claim_options()
        ready = {
            name: sum(not job.gone and job.state.queue == name and job.expected() is Status.QUEUED for job in self.jobs.values())
            for name in queues
        }
        room = {name: self._room(name) for name in queues}
        handed = await self.node.claim(*queues, **options)
        for claimed in by_token(handed):
            self.learn_claim(claimed, queues)
        for name in queues:
            count = sum(claimed.state.queue == name for claimed in handed)
            assert count <= room[name], f"queue {name} started {count}, its cap leaves {room[name]}"
        if all(self.queues[name].rate_per_s < 0 for name in queues):
            wanted = min(options["jobs_max"], sum(min(ready[name], room[name]) for name in queues))
            # Fewer than are ready, where some had moved on when they were looked at or are spilled; none only where none is.
            assert len(handed) <= wanted and bool(handed) == bool(wanted), f"claimed {len(handed)} of {wanted} ready"

    async def complete(self) -> None:
        if not self.held:
            return
        claimed = self.held[self.rng.randrange(len(self.held))]
        outcome = self.rng.choice(("succeeded", "succeeded", "retryable_failure", "retryable_failure", "fatal_failure", "cancelled"))
        await self._complete(claimed, outcome, self.rng.choice((None, None, 0.0, 7.0)))

    async def _complete(self, claimed: ClaimedJob, outcome: str, retry_after_s: float | None) -> None:
        job = self.jobs[claimed.state.job_id]
        current = job.leased and job.state.fencing == claimed.state.fencing and not job.gone
        try:
            state = await self.node.complete(claimed, outcome, error="no" if "failure" in outcome else None, retry_after_s=retry_after_s)
        except StaleLease:
            assert not current, f"the holder of {self.name(claimed.state.job_id)} was refused"
            return
        if not current:
            assert state.version == job.state.version and state.outcome == Outcome[outcome.upper()], "a stale token changed a job"
            return
        if job.state.status == Status.CANCEL_REQUESTED:
            assert state.status == (Status.SUCCEEDED if outcome == "succeeded" else Status.CANCELLED)
        self.learn(state)

    async def heartbeat(self) -> None:
        if not self.held:
            return
        claimed = self.rng.choice(self.held)
        job = self.jobs[claimed.state.job_id]
        current = job.leased and job.state.fencing == claimed.state.fencing and not job.gone
        lease_s = self.rng.choice((None, None, *LEASES_S))
        try:
            reply = await self.node.heartbeat(claimed, lease_s=lease_s, progress={"done": 1})
        except StaleLease:
            assert not current, f"the heartbeat of {self.name(claimed.state.job_id)}'s holder was refused"
            return
        assert current, "a stale token got a heartbeat"
        assert reply.cancel_requested == (job.state.status == Status.CANCEL_REQUESTED)
        given_ms = job.claim_ms if lease_s is None else round(lease_s * 1000)
        job.lease_end_ms = self.node.clock.mono_ms() + given_ms
        on_record_ms = max(job.state.lease_ms, given_ms)
        self.learn((await self.node.get(claimed)).state)
        assert job.state.lease_ms == on_record_ms, "the log knows the longest length given, and no heartbeat of another"

    async def release(self) -> None:
        if not self.held:
            return
        claimed = self.rng.choice(self.held)
        job = self.jobs[claimed.state.job_id]
        current = job.leased and job.state.fencing == claimed.state.fencing and not job.gone
        try:
            state = await self.node.release(claimed)
        except StaleLease:
            assert not current
            return
        assert current
        self.learn(state)

    async def put_queue(self) -> None:
        name, choose = self.rng.choice(QUEUES), self.rng.choice
        queue = self.queues[name]
        queue.max_concurrency, queue.rate_per_s = choose((-1, 1, 2, 5)), choose((-1.0, -1.0, 0.5, 3.0))
        queue.retention_ms = choose((3_600_000, 30 * 86_400_000))
        queue.rate_since_ms, queue.starts = self.node.clock.mono_ms(), []
        await self.node.put_queue(name, max_concurrency=queue.max_concurrency, rate_per_s=queue.rate_per_s, retention_ms=queue.retention_ms)

    async def pause(self) -> None:
        name = self.rng.choice(QUEUES)
        queue = self.queues[name]
        queue.paused = not queue.paused
        await (self.node.pause(name) if queue.paused else self.node.resume(name))

    async def advance(self) -> None:
        await self.node.advance(s=self.rng.choice(ADVANCES_S))

    async def step_clock(self) -> None:
        step_s = self.rng.choice(STEPS_S)
        self.note(f"  by {step_s} s")
        await self.node.step_wall_clock(s=step_s)

    async def restart(self) -> None:
        await self.node.graceful_restart()
        self._leases_anew()

    async def crash(self) -> None:
        await self.node.crash_and_restart(keep_bytes_fraction=self.rng.choice((0.0, 0.3, 1.0)))
        self._leases_anew()

    def _leases_anew(self) -> None:
        """A node that starts grants each running attempt one full lease; what its timeout has left is told by the wall clock."""
        mono_ms, wall_ms = self.node.clock.mono_ms(), self.node.now_ms
        for job in self.jobs.values():
            if job.leased and not job.gone:
                state = job.state
                job.lease_end_ms, job.claim_ms = mono_ms + state.lease_ms, state.lease_ms
                job.timeout_ms = mono_ms + max(state.timeout_ms - max(wall_ms - state.started_at_ms, 0), 0)
        for queue in self.queues.values():
            queue.rate_since_ms, queue.starts = mono_ms, []

    # Several things at once.

    def _calls(self) -> list[Coroutine[Any, Any, Any]]:
        calls: list[Coroutine[Any, Any, Any]] = []
        if len(self.jobs) < JOBS_MAX:
            calls += [self.node.create(**self._options()) for _ in range(self.rng.randrange(4))]
        for _ in range(self.rng.randrange(5)):
            queues, options = self._claim_options()
            calls.append(self._claim_all(queues, options))
        for claimed in self.rng.sample(self.held, min(len(self.held), self.rng.randrange(4))):
            calls.append(self.node.complete(claimed, self.rng.choice(("succeeded", "retryable_failure", "fatal_failure"))))
        waiting = [job.state.job_id for job in self.jobs.values() if not job.gone and job.state.status not in FINAL]
        for job_id in self.rng.sample(waiting, min(len(waiting), self.rng.randrange(5))):
            change = self.rng.choice((self.node.cancel, self.node.run_now, self._postpone))
            calls.append(change(job_id))
        self.rng.shuffle(calls)
        return calls

    async def _claim_all(self, queues: Sequence[str], options: dict[str, Any]) -> tuple[Sequence[str], list[ClaimedJob]]:
        return queues, await self.node.claim(*queues, **options)

    def _postpone(self, job_id: bytes) -> Coroutine[Any, Any, JobState]:
        return self.node.update(job_id, delay_s=30.0)

    async def burst(self) -> None:
        """Calls that share a turn. Only what they were answered is known of their order."""
        before = {name: self._room(name) for name in QUEUES}
        results = await self.node.together(*self._calls())
        self._learn_all(results)
        for name, room in before.items():
            cap = self.queues[name].max_concurrency
            running = sum(job.leased and job.state.queue == name for job in self.jobs.values())
            assert cap < 0 or running <= cap or room == 0, f"queue {name} runs {running}, its cap is {cap}"

    def _learn_all(self, results: Sequence[Any]) -> None:
        states: list[JobState] = []
        for result in results:
            if isinstance(result, JobState):
                states.append(result)
            elif isinstance(result, BaseException):
                assert isinstance(result, WheelschedError), repr(result)
                assert result.code in ("stale-lease", "job-not-scheduled", "job-finished"), repr(result)
        for state in sorted(states, key=lambda state: state.version):
            if state.job_id not in self.jobs:
                self.learn(state)
        claims = [(queues, claimed) for result in results if isinstance(result, tuple) for queues, jobs in [result] for claimed in jobs]
        tokens = [(claimed.state.job_id, claimed.state.fencing) for _, claimed in claims]
        assert len(tokens) == len(set(tokens)), "one_live_lease: the same lease was handed out twice"
        for claimed in by_token([claimed for _, claimed in claims]):
            # In the middle of a burst a job can have been made due, run and claimed.
            self.learn_claim(claimed, QUEUES, sure=False)
        for state in sorted(states, key=lambda state: state.version):
            self.learn(state)

    async def burst_and_crash(self) -> None:
        """Calls under way when the power goes: what was answered holds, the rest may or may not have happened."""
        tasks = [asyncio.ensure_future(call) for call in self._calls()]
        for _ in range(self.rng.randrange(12)):
            await asyncio.sleep(0)
        answered = [task.exception() or task.result() for task in tasks if task.done()]
        await self.node.crash(keep_bytes_fraction=self.rng.choice((0.0, 0.5, 1.0)))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._learn_all([result for result in answered if not isinstance(result, (OutcomeUnknown, Unavailable))])
        self.node.restart_count += 1
        await self.node.open()
        await self._adopt()

    async def _adopt(self) -> None:
        """After a crash with calls under way: take what the node has, if it is not older than what was acknowledged."""
        for record in [record for name in QUEUES for record in await self.node.list_jobs(name)]:
            job = self.jobs.get(record.state.job_id)
            if job is None:
                self.learn(record.state)
                continue
            assert record.state.version >= job.state.version, f"never_lost: {self.name(record.state.job_id)} fell back to {record.state}"
            assert record.state.fencing >= job.state.fencing
            if record.state.version > job.state.version:
                self.learn(record.state)
        for state in check_rows(self.node.store, self.node.settings.cluster.group_count).values():
            group = group_of(state.job_id, self.node.settings.cluster.group_count)
            self.group_tokens[group] = max(self.group_tokens.get(group, 0), state.fencing)
        self._leases_anew()

    async def wait(self) -> None:
        """Long polls, and then something becomes ready: whoever can be served is."""
        polls = []
        for _ in range(self.rng.randrange(1, 4)):
            queues, options = self._claim_options()
            polls.append((queues, asyncio.ensure_future(self.node.claim(*queues, wait_s=60.0, **options))))
        await asyncio.sleep(0)
        move = self.rng.choice((self.create, self.advance, self.run_now, self.release, self.complete, self.pause))
        # Of what the move is answered some may be claimed already: the model learns of the claims first.
        known = {job_id: job.state.version for job_id, job in self.jobs.items()}
        await move()
        await self.node.settle()
        await self._quiet()
        served = [claimed for _, poll in polls if poll.done() for claimed in poll.result()]
        for claimed in by_token(served):
            sure = known.get(claimed.state.job_id) == claimed.state.version - 1
            self.learn_claim_soon(claimed, QUEUES, sure=sure)
        for job in self.jobs.values():
            job.wall_max_ms = max(job.wall_max_ms, self.node.now_ms)
        await self._check_nobody_forgotten([queues for queues, poll in polls if not poll.done()])
        for _, poll in polls:
            poll.cancel()
        await asyncio.gather(*(poll for _, poll in polls), return_exceptions=True)

    def learn_claim_soon(self, claimed: ClaimedJob, queues: Sequence[str], *, sure: bool) -> None:
        """A claim that was answered in the course of a move: the pause or the expiry may have come after it."""
        queue = self.queues[claimed.state.queue]
        paused, queue.paused = queue.paused, False
        self.learn_claim(claimed, queues, sure=sure)
        queue.paused = paused

    async def _quiet(self) -> None:
        for _ in range(QUIET_TURNS):
            await asyncio.sleep(0)

    async def _check_nobody_forgotten(self, waiting: Sequence[Sequence[str]]) -> None:
        for queues in waiting:
            for name in queues:
                ready = [job for job in self.jobs.values() if not job.gone and job.state.queue == name and job.expected() is Status.QUEUED]
                free = self._room(name) > 0 and self.queues[name].rate_per_s < 0
                assert not (ready and free), f"lost wake-up: a worker waits for {name}, {self.name(ready[0].state.job_id)} is ready"

    async def hang_up(self) -> None:
        """Workers that leave at any moment: what had been claimed for them goes back uncounted."""
        polls = []
        for _ in range(self.rng.randrange(1, 5)):
            queues, options = self._claim_options()
            polls.append(asyncio.ensure_future(self.node.claim(*queues, wait_s=60.0, **options)))
        for _ in range(self.rng.randrange(8)):
            await asyncio.sleep(0)
        served = [poll.result() for poll in polls if poll.done()]
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)
        for claimed in by_token([claimed for handed in served for claimed in handed]):
            self.learn_claim(claimed, QUEUES)
        await self._quiet()
        await self.node.settle()
        for job_id, job in self.jobs.items():
            record = None if job.gone else await self.node.node.read_job(self.node.tenant, job_id)
            if record is not None and record.state.version != job.state.version and not job.leased:
                state = record.state
                assert state.outcome == Outcome.RELEASED and state.attempt == job.state.attempt, f"{self.name(job_id)} {state}"
                group = group_of(job_id, self.node.settings.cluster.group_count)
                self.group_tokens[group] = max(self.group_tokens.get(group, 0), state.fencing)
                wall_max_ms = job.wall_max_ms
                self.learn(state)
                job.wall_max_ms = max(wall_max_ms, job.wall_max_ms)
                for queue in self.queues.values():
                    queue.starts = []  # what was put back counts for the rate, or does not

    # The end.

    async def heal(self) -> None:
        """No more caps and faults: everything is claimed, ends, and leaves nothing behind."""
        self.note("heal")
        for name, queue in self.queues.items():
            queue.max_concurrency, queue.rate_per_s, queue.paused, queue.retention_ms = -1, -1.0, False, 3_600_000
            await self.node.put_queue(name, retention_ms=queue.retention_ms)
            await self.node.resume(name)
        # What was stepped back is waited for: a job fires at its time by the clock that made it.
        for _ in range(200):
            await self._work_off()
            waiting = [job for job in self.jobs.values() if not job.gone and job.expected() not in FINAL]
            if not waiting:
                break
            await self.node.advance(to=max(self.node.now_ms + 1_000, min(self._next_ms(job) for job in waiting)))
            await self.look()
        await self.look(thorough=True)
        left = [self.name(job_id) for job_id, job in self.jobs.items() if not job.gone and job.expected() not in FINAL]
        assert not left, f"never_lost: {left} never ended"
        await self.node.advance(s=91 * 86_400.0)
        await self.node.advance(s=60.0)
        await self.look(thorough=True)
        rows = all_rows(self.node.store)
        rows.pop(keys.META)
        assert not any(rows.values()), f"rows left behind: {rows}"

    def _next_ms(self, job: ModelJob) -> int:
        if job.leased:
            return self.node.now_ms + max(min(job.lease_end_ms, job.timeout_ms) - self.node.clock.mono_ms(), 0)
        return due_at_ms(job.state)

    async def _work_off(self) -> None:
        while handed := await self.node.claim(*QUEUES, jobs_max=100):
            for claimed in by_token(handed):
                self.learn_claim(claimed, QUEUES)
                await self._complete(claimed, "succeeded", None)
            await self.node.settle()
        await self.look()
        left = [self.name(job_id) for job_id, job in self.jobs.items() if not job.gone and job.expected() is Status.QUEUED]
        assert not left, f"due and not claimable: {left}"


def by_token(claimed: Sequence[ClaimedJob]) -> list[ClaimedJob]:
    """In the order in which they were leased, group by group."""
    return sorted(claimed, key=lambda job: job.state.fencing)


class SeedFailed(AssertionError):
    """Says how to see it again."""


def run_seed(seed: int, *, steps: int = STEPS_DEFAULT) -> list[str]:
    """The events of one seed. Raises `SeedFailed` with the seed, the last events and the command that replays it."""
    simulation = Simulation(seed, steps=steps)
    try:
        return asyncio.run(simulation.run())
    except Exception as error:
        command = f"python -m wheelsched.testing.simulate_node --seed {seed} --steps {steps} --trace"
        events = "\n".join(simulation.log[-25:])
        raise SeedFailed(f"seed {seed}: {type(error).__name__}: {error}\n{events}\nreplay: {command}") from error


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulate random days of a node.")
    parser.add_argument("--seed", type=int, action="append", help="a seed to run; may be given more than once")
    parser.add_argument("--fresh", type=int, default=0, metavar="N", help="run N new seeds")
    parser.add_argument("--range", type=int, nargs=2, default=(0, 0), metavar=("FROM", "TO"), help="run seeds FROM to TO - 1")
    parser.add_argument("--steps", type=int, default=STEPS_DEFAULT)
    parser.add_argument("--trace", action="store_true", help="print every event")
    arguments = parser.parse_args()
    quiet_logs()
    seeds = [*(arguments.seed or []), *range(*arguments.range), *(random.SystemRandom().getrandbits(32) for _ in range(arguments.fresh))]
    started, failed = time.monotonic(), 0
    for seed in seeds:
        try:
            events = run_seed(seed, steps=arguments.steps)
        except SeedFailed as failure:
            failed += 1
            print(failure, file=sys.stderr)
            continue
        if arguments.trace:
            print("\n".join(events))
    print(f"{len(seeds)} seeds, {failed} failed, {time.monotonic() - started:.1f} s")
    return 1 if failed else 0


def quiet_logs() -> None:
    """Only errors: a simulated day starts and stops many nodes."""
    import logging

    import structlog

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))


if __name__ == "__main__":
    sys.exit(main())
