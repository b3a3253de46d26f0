"""The obvious model of a group: jobs in a dictionary, firing as a mark on each. No watermark rule, no rows, no counts.

Where the machine derives QUEUED from a watermark, the model walks over all jobs at every Fire and marks those that are due; a job
placed under the watermark but after the stamp is marked as passed over. `Story` runs both and compares after every entry.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from builders import NOW_MS, EngineGroup, a_create, an_id, one_by_one
from hypothesis import strategies as st

from wheelsched.core.limits import KEEP_KEYED_MS
from wheelsched.model.commands import (
    COMMAND_VERSION,
    AnyCommand,
    Cancel,
    Claim,
    Complete,
    Discard,
    Entry,
    Expire,
    Extend,
    Fire,
    Purge,
    Redrive,
    Release,
    Reply,
    RunNow,
    Update,
    decode_entry,
    encode_entry,
)
from wheelsched.model.effects import Effect, JobChanged
from wheelsched.model.states import LEGAL, MOVES, Outcome, Status, status_of

S = Status
JOBS = ("a", "b", "c", "d")
FINAL = {S.SUCCEEDED, S.DEAD, S.CANCELLED, S.SKIPPED}
LEASED = {S.RUNNING, S.CANCEL_REQUESTED}
MAX_ATTEMPTS, INITIAL_MS, MAX_MS, DEADLINE_MS = 3, 1_000, 2_500, 4_000
JITTERS = (0, 2**31, 2**32 - 1)


@dataclass
class ModelJob:
    fire_at: int
    fingerprint: bytes
    deadline: int
    status: Status = S.SCHEDULED
    due: int = 0
    passed_over: bool = False  # by the watermark before it was there: only a Fire by name makes it QUEUED
    version: int = 1
    priority: int = 1
    attempt: int = 0
    base: int = 0
    fencing: int = 0
    outcome: Outcome = Outcome.NONE
    finished: int = 0
    keep: int = 0
    seen_tokens: list[tuple[int, int]] = field(default_factory=list)


class ModelGroup:
    """What a group should do, said as plainly as possible."""

    def __init__(self) -> None:
        self.jobs: dict[str, ModelJob] = {}
        self.stamp = 0
        self.time = 0
        self.watermark = 0
        self.fencing = 0

    def place(self, job: ModelJob, status: Status, due: int) -> int:
        """Let the job wait for `due`; returns the instant it gets."""
        job.due = max(due, self.stamp)
        job.passed_over = self.stamp < job.due <= self.watermark
        job.status = S.QUEUED if job.due <= self.watermark and not job.passed_over else status
        return job.due

    def end(self, job: ModelJob, status: Status) -> None:
        job.status, job.finished, job.passed_over = status, self.time, False
        if job.fingerprint:
            job.keep = self.time + KEEP_KEYED_MS

    def fire(self, up_to: int, named: list[tuple[str, int]]) -> None:
        self.watermark = max(self.watermark, min(up_to, self.stamp))
        for job in self.jobs.values():
            if job.status in (S.SCHEDULED, S.RETRYING) and not job.passed_over and job.due <= self.watermark:
                job.status = S.QUEUED
        for name, version in named:
            job = self.jobs.get(name)  # type: ignore[assignment]
            if job and job.passed_over and job.version == version and job.due <= self.stamp:
                job.passed_over, job.status = False, S.QUEUED

    def create(self, name: str, due: int, fingerprint: bytes, deadline: int) -> str:
        old = self.jobs.get(name)
        if old is not None and fingerprint:
            if old.status is S.DISCARDED:
                return "job-finished"
            return "" if old.fingerprint == fingerprint else "idempotency-key-reused"
        job = self.jobs[name] = ModelJob(0, fingerprint, deadline)
        job.fire_at = self.place(job, S.SCHEDULED, due)
        return ""

    def claim(self, name: str, version: int) -> bool:
        job = self.jobs.get(name)
        if job is None or job.status is not S.QUEUED or version not in (0, job.version):
            return False
        job.version += 1
        if job.attempt == 0 and job.deadline >= 0 and self.stamp > job.fire_at + job.deadline:
            self.end(job, S.SKIPPED)
            return False
        self.fencing += 1
        job.attempt += 1
        job.status, job.fencing, job.outcome = S.RUNNING, self.fencing, Outcome.RUNNING
        job.seen_tokens.append((job.attempt, job.fencing))
        return True

    def leased(self, name: str, token: tuple[int, int]) -> ModelJob | None:
        job = self.jobs.get(name)
        return job if job and job.status in LEASED and (job.attempt, job.fencing) == token else None

    def end_attempt(self, name: str, token: tuple[int, int], outcome: Outcome, jitter: int, retry_after: int = -1) -> str:
        job = self.leased(name, token)
        if job is None:
            job = self.jobs.get(name)
            reported = outcome not in (Outcome.LEASE_EXPIRED, Outcome.TIMED_OUT)
            again = job and reported and job.status not in LEASED and (job.attempt, job.fencing, job.outcome) == (*token, outcome)
            return "" if again else "stale-lease"
        job.version += 1
        job.outcome = outcome
        failures = job.attempt - job.base
        if outcome is Outcome.SUCCEEDED:
            self.end(job, S.SUCCEEDED)
        elif job.status is S.CANCEL_REQUESTED or outcome is Outcome.CANCELLED:
            self.end(job, S.CANCELLED)
        elif outcome is Outcome.FATAL_FAILURE or failures >= MAX_ATTEMPTS:
            self.end(job, S.DEAD)
        else:
            backoff = int(Fraction(jitter, 2**32) * min(MAX_MS, INITIAL_MS * 2 ** (job.attempt - 1)))
            self.place(job, S.RETRYING, self.stamp + (retry_after if retry_after >= 0 else backoff))
        return ""

    def release(self, name: str, token: tuple[int, int]) -> str:
        job = self.leased(name, token)
        if job is None:
            return "stale-lease"
        job.version += 1
        job.outcome = Outcome.RELEASED
        if job.status is S.CANCEL_REQUESTED:
            self.end(job, S.CANCELLED)
        else:
            job.attempt -= 1
            job.status = S.QUEUED
        return ""

    def expire_start(self, name: str) -> None:
        job = self.jobs.get(name)
        waits = job and job.status in (S.SCHEDULED, S.QUEUED) and job.attempt == 0
        if job and waits and job.deadline >= 0 and self.stamp > job.fire_at + job.deadline:
            job.version += 1
            self.end(job, S.SKIPPED)

    def cancel(self, name: str) -> str:
        job = self.find(name)
        if job is None:
            return "not-found"
        if job.status in (S.CANCELLED, S.CANCEL_REQUESTED):
            return ""
        if job.status in FINAL:
            return "job-finished"
        job.version += 1
        if job.status is S.RUNNING:
            job.status = S.CANCEL_REQUESTED
        else:
            self.end(job, S.CANCELLED)
        return ""

    def update(self, name: str, due: int, if_version: int) -> str:
        job = self.find(name)
        if job is None:
            return "not-found"
        if job.status is not S.SCHEDULED:
            return "job-not-scheduled"
        if if_version not in (0, job.version):
            return "version-mismatch"
        job.version += 1
        job.priority = (job.priority + 1) % 3
        job.fire_at = self.place(job, S.SCHEDULED, due)
        return ""

    def run(self, name: str) -> str:
        job = self.find(name)
        if job is None:
            return "not-found"
        if job.status in FINAL or job.status is S.CANCEL_REQUESTED:
            return "job-finished"
        if job.status in (S.SCHEDULED, S.RETRYING):
            job.version += 1
            moved = job.status is S.SCHEDULED
            due = self.place(job, job.status, self.stamp)
            job.fire_at = due if moved else job.fire_at
        return ""

    def redrive(self, name: str, delay: int) -> str:
        job = self.find(name)
        if job is None:
            return "not-found"
        if job.status is not S.DEAD:
            return "job-finished"
        job.version += 1
        job.base, job.finished = job.attempt, 0
        job.fire_at = self.place(job, S.SCHEDULED, self.stamp + delay)
        return ""

    def discard(self, name: str) -> str:
        job = self.find(name)
        if job is None:
            return "not-found"
        if job.status is not S.DEAD:
            return "job-finished"
        if job.fingerprint:
            job.version += 1
            job.status, job.finished, job.keep = S.DISCARDED, self.time, self.stamp + KEEP_KEYED_MS
        else:
            del self.jobs[name]
        return ""

    def purge(self, status: Status, before: int) -> int:
        gone = [name for name, job in self.jobs.items() if job.status is status and job.finished < before and job.keep <= self.stamp]
        for name in gone:
            del self.jobs[name]
        return len(gone)

    def find(self, name: str) -> ModelJob | None:
        job = self.jobs.get(name)
        return None if job is None or job.status is S.DISCARDED else job


@dataclass(frozen=True)
class Step:
    """One entry: a command of `kind`, the clock `clock_ms` on (or back), a Fire behind it or not."""

    kind: str
    job: str
    clock_ms: int
    number: int
    fire: bool


KINDS = (
    "create", "create", "claim", "claim", "claim", "complete", "complete", "complete", "expire", "release", "extend", "cancel",
    "update", "run", "redrive", "discard", "purge", "nothing", "start_deadline",
)  # fmt: skip
STEPS = st.lists(
    st.builds(
        Step,
        kind=st.sampled_from(KINDS),
        job=st.sampled_from(JOBS),
        clock_ms=st.sampled_from((0, 0, 1, 700, 3_000, -2_500, KEEP_KEYED_MS)),
        number=st.integers(0, 63),
        fire=st.booleans(),
    ),
    max_size=60,
)


class Story:
    """Machine and model on the same entries. `entries` are kept as bytes, to be played again elsewhere."""

    def __init__(self) -> None:
        self.group = EngineGroup()
        self.model = ModelGroup()
        self.now_ms = NOW_MS
        self.entries: list[bytes] = []
        self.all_effects: list[Effect] = []
        self.moves: set[tuple[Status, str, Status]] = set()
        self.fired_up_to_ms = 0
        self.tokens: list[int] = []
        self.ids = {name: an_id(name) for name in JOBS}
        self.names = {job_id: name for name, job_id in self.ids.items()}

    def step(self, step: Step) -> None:
        self.now_ms += step.clock_ms
        model, time_before = self.model, self.model.time
        model.stamp, model.time = self.now_ms, max(model.time, self.now_ms)
        before = {name: self.seen(name) for name in JOBS}
        watermark_before = self.group.state.watermark_ms
        command, expected = self._act(step)
        commands = [] if command is None else [command]
        # A group that dispatches lets a Fire follow whatever may be due now; else the seen status would lag behind the move.
        if step.fire or isinstance(command, RunNow | Update | Redrive | Complete | Expire):
            commands.append(self._fire(step))
        if not commands:
            model.time = time_before  # no entry, so the group's time stands still
            return
        payload = encode_entry(Entry(COMMAND_VERSION, self.now_ms, commands))
        self.entries.append(payload)
        replies = self.group.apply_entry(decode_entry(payload))
        if command is not None:
            self._check_reply(step, replies[0], expected)
        self.all_effects += self.group.effects
        self._check_moves(before, watermark_before)
        self._check_jobs()

    def seen(self, name: str) -> Status | None:
        state = self.group.state_of(self.ids[name])
        return None if state is None else status_of(state, self.group.state.watermark_ms)

    def _fire(self, step: Step) -> Fire:
        # Held jobs are named with the version the command before in the entry left them with.
        named = [(name, job.version) for name, job in self.model.jobs.items() if job.passed_over and step.number % 2]
        self.fired_up_to_ms = max(self.fired_up_to_ms, self.now_ms)
        self.model.fire(self.now_ms + step.number, named)
        return Fire(self.now_ms + step.number, [(self.ids[name], version) for name, version in named])

    def _act(self, step: Step) -> tuple[AnyCommand | None, Any]:
        """(command, what the model says to it); None: there is nothing to do in this step."""
        job = self.model.jobs.get(step.job)
        return getattr(self, f"_{step.kind}")(step, self.ids[step.job], job)  # type: ignore[no-any-return]

    def _create(self, step: Step, job_id: bytes, job: ModelJob | None) -> tuple[AnyCommand | None, Any]:
        fingerprint = (b"", b"body", b"other")[step.number % 3]
        if job is not None and not fingerprint:
            return None, None  # an id without a key is never made twice
        delay, deadline = step.number // 3 * 200, DEADLINE_MS if step.number % 2 else -1
        command = a_create(
            step.job, delay_ms=delay, fingerprint=fingerprint, start_deadline_ms=deadline, max_attempts=MAX_ATTEMPTS,
            initial_backoff_ms=INITIAL_MS, max_backoff_ms=MAX_MS,
        )  # fmt: skip
        return command, self.model.create(step.job, self.now_ms + delay, fingerprint, deadline)

    def _claim(self, step: Step, job_id: bytes, job: ModelJob | None) -> tuple[AnyCommand, Any]:
        names = (step.job, JOBS[step.number % len(JOBS)])
        wanted = []
        for name in names:
            current = self.model.jobs.get(name)
            wanted.append((name, 0 if current is None or step.number < 32 else max(1, current.version - step.number % 2)))
        command = Claim([(self.ids[name], version) for name, version in wanted], 1_000 + step.number, "w")
        return command, [self.model.claim(name, version) for name, version in wanted]

    def _token(self, step: Step, job: ModelJob | None) -> tuple[int, int]:
        """Mostly the current token, else an earlier or an invented one."""
        if job is None or not job.seen_tokens or step.number % 8 == 7:
            return (1 + step.number % 3, step.number)
        return job.seen_tokens[-1 if step.number % 8 < 6 else step.number % len(job.seen_tokens)]

    def _complete(self, step: Step, job_id: bytes, job: ModelJob | None) -> tuple[AnyCommand, Any]:
        token = self._token(step, job)
        outcomes = (
            Outcome.SUCCEEDED,
            Outcome.RETRYABLE_FAILURE,
            Outcome.FATAL_FAILURE,
            Outcome.RETRYABLE_FAILURE,
            Outcome.CANCELLED,
        )
        outcome, jitter = outcomes[step.number % 5], JITTERS[step.number % 3]
        retry_after = 1_500 if step.number > 48 else -1
        expected = self.model.end_attempt(step.job, token, outcome, jitter, retry_after)
        return Complete(job_id, *token, int(outcome), jitter, b'"e"', b"", retry_after), expected

    def _expire(self, step: Step, job_id: bytes, job: ModelJob | None) -> tuple[AnyCommand, Any]:
        token = self._token(step, job)
        outcome, jitter = (Outcome.LEASE_EXPIRED, Outcome.TIMED_OUT)[step.number % 2], JITTERS[step.number % 3]
        return Expire(job_id, *token, int(outcome), jitter), self.model.end_attempt(step.job, token, outcome, jitter)

    def _start_deadline(self, step: Step, job_id: bytes, job: ModelJob | None) -> tuple[AnyCommand, Any]:
        self.model.expire_start(step.job)
        return Expire(job_id, 0, 0, 0, 0), ""

    def _release(self, step: Step, job_id: bytes, job: ModelJob | None) -> tuple[AnyCommand, Any]:
        token = self._token(step, job)
        return Release(job_id, *token), self.model.release(step.job, token)

    def _extend(self, step: Step, job_id: bytes, job: ModelJob | None) -> tuple[AnyCommand, Any]:
        token = self._token(step, job)
        return Extend(job_id, *token, 7_000), "" if self.model.leased(step.job, token) else "stale-lease"

    def _cancel(self, step: Step, job_id: bytes, job: ModelJob | None) -> tuple[AnyCommand, Any]:
        return Cancel(job_id, "acme"), self.model.cancel(step.job)

    def _update(self, step: Step, job_id: bytes, job: ModelJob | None) -> tuple[AnyCommand, Any]:
        priority = -1 if job is None else (job.priority + 1) % 3
        if_version, run_at_ms = step.number % 3, self.now_ms + (step.number - 10) * 100
        command = Update(job_id, "acme", run_at_ms=run_at_ms, priority=priority, if_version=if_version)
        return command, self.model.update(step.job, run_at_ms, if_version)

    def _run(self, step: Step, job_id: bytes, job: ModelJob | None) -> tuple[AnyCommand, Any]:
        return RunNow(job_id, "acme"), self.model.run(step.job)

    def _redrive(self, step: Step, job_id: bytes, job: ModelJob | None) -> tuple[AnyCommand, Any]:
        delay = step.number % 4 * 500
        return Redrive(job_id, "acme", delay), self.model.redrive(step.job, delay)

    def _discard(self, step: Step, job_id: bytes, job: ModelJob | None) -> tuple[AnyCommand, Any]:
        return Discard(job_id, "acme"), self.model.discard(step.job)

    def _purge(self, step: Step, job_id: bytes, job: ModelJob | None) -> tuple[AnyCommand, Any]:
        status = (S.SUCCEEDED, S.DEAD, S.CANCELLED, S.SKIPPED, S.DISCARDED)[step.number % 5]
        before_ms = self.now_ms - step.number * 50
        return Purge("acme", "mail", int(status), before_ms), self.model.purge(status, before_ms)

    def _nothing(self, step: Step, job_id: bytes, job: ModelJob | None) -> tuple[AnyCommand | None, Any]:
        return None, None  # time goes on, and perhaps a Fire

    def _check_reply(self, step: Step, reply: Reply, expected: Any) -> None:
        if step.kind == "claim":
            assert [state is not None for state in reply.states] == expected
            for state in reply.states:
                if state is not None:
                    assert not self.tokens or state.fencing > self.tokens[-1], "token_grows"
                    self.tokens.append(state.fencing)
                    assert state.fire_at_ms <= self.fired_up_to_ms, "never_early"
        elif step.kind == "purge":
            assert reply.count == expected
        else:
            assert reply.refusal == expected, (step, reply)

    def _check_moves(self, before: dict[str, Status | None], watermark_before: int) -> None:
        for name, was in before.items():
            now = self.seen(name)
            if was is not None and now is not None and was is not now and was is not S.DISCARDED:
                assert (was, now) in LEGAL, (name, was, now)
        for effect in one_by_one(self.group.effects):
            if isinstance(effect, JobChanged) and effect.before is not None and effect.after is not None:
                assert effect.before != effect.after
                pair = status_of(effect.before, watermark_before), status_of(effect.after, self.group.state.watermark_ms)
                self.moves.add((pair[0], effect.cause, pair[1]))

    def _check_jobs(self) -> None:
        live_tokens = []
        for name in JOBS:
            job, state = self.model.jobs.get(name), self.group.state_of(self.ids[name])
            assert (job is None) == (state is None), name
            if job is None or state is None:
                continue
            assert self.seen(name) is job.status, name
            assert (state.version, state.attempt, state.attempt_base, state.fencing, state.priority) == (
                job.version, job.attempt, job.base, job.fencing, job.priority,
            )  # fmt: skip
            assert (state.fire_at_ms, state.finished_at_ms, state.held) == (job.fire_at, job.finished, job.passed_over)
            if job.status is S.RETRYING:
                assert state.next_attempt_at_ms == job.due
            if job.status in LEASED:
                live_tokens.append(job.fencing)
        assert len(set(live_tokens)) == len(live_tokens), "one_live_lease"


def told(steps: Iterable[Step]) -> Story:
    story = Story()
    for step in steps:
        story.step(step)
    return story


def random_stories(rng: random.Random, count: int) -> Iterator[Story]:
    """Long ones, of few jobs, to which much happens."""
    kinds = [kind for kind in KINDS if kind not in ("discard", "purge")] + ["claim", "redrive", "redrive", "start_deadline"]
    for _ in range(count):
        yield told(
            Step(rng.choice(kinds), rng.choice("ab"), rng.choice((0, 1, 700, 3_000, 9_000, -2_500)), rng.randrange(64), rng.random() < 0.5)
            for _ in range(50)
        )


def play_again(entries: list[bytes], *, prefetch: bool) -> tuple[EngineGroup, list[Effect]]:
    """A second replica, fed the same bytes."""
    group, effects = EngineGroup(prefetch=prefetch), []
    for payload in entries:
        group.apply_entry(decode_entry(payload))
        effects += group.effects
    return group, effects


def merged(entries: list[bytes]) -> list[bytes]:
    """The same commands, those of one stamp in one entry."""
    out: list[Entry] = []
    for payload in entries:
        entry = decode_entry(payload)
        if out and out[-1].stamp_ms == entry.stamp_ms:
            out[-1] = Entry(entry.version, entry.stamp_ms, out[-1].commands + entry.commands)
        else:
            out.append(entry)
    return [encode_entry(entry) for entry in out]


# What a table of moves cannot say: an extension moves no status; a retry, a redrive or a new time may be due in the same entry.
MOVES_SEEN = frozenset(MOVES) | {
    (S.RUNNING, "extend", S.RUNNING),
    (S.CANCEL_REQUESTED, "extend", S.CANCEL_REQUESTED),
    (S.RUNNING, "retry", S.QUEUED),
    (S.RETRYING, "fire", S.QUEUED),
}

__all__ = ["KINDS", "MOVES_SEEN", "STEPS", "Step", "Story", "merged", "play_again"]
