"""What workers and their silence bring: claim, complete, extend, expire, release.

A token is (attempt, fencing): it counts while the job is leased under exactly that pair, else nothing changes (`one_live_lease`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import msgspec
from msgspec.structs import replace

from wheelsched.core.ids import format_job_id
from wheelsched.engine.context import (
    CANCEL_REQUESTED,
    CANCELLED,
    DEAD,
    RETRYING,
    RUNNING,
    SCHEDULED,
    SKIPPED,
    SUCCEEDED,
    Context,
)
from wheelsched.model.commands import AnyCommand, Claim, Complete, Expire, Extend, Release, Reply
from wheelsched.model.rows import JobState
from wheelsched.model.states import Outcome, Status

_O_RUNNING: Final = int(Outcome.RUNNING)
_O_SUCCEEDED: Final = int(Outcome.SUCCEEDED)
_O_RETRYABLE: Final = int(Outcome.RETRYABLE_FAILURE)
_O_FATAL: Final = int(Outcome.FATAL_FAILURE)
_O_CANCELLED: Final = int(Outcome.CANCELLED)
_O_EXPIRED: Final = int(Outcome.LEASE_EXPIRED)
_O_TIMED_OUT: Final = int(Outcome.TIMED_OUT)
_O_RELEASED: Final = int(Outcome.RELEASED)
_REPORTED: Final = (_O_SUCCEEDED, _O_RETRYABLE, _O_FATAL, _O_CANCELLED)

_JITTER_BITS: Final = 32
# 2^40 times the least backoff (1 ms) is 35 years, above any cap: a larger shift changes nothing but the size of the integer.
_SHIFT_MAX: Final = 40


class _Token(Protocol):
    @property
    def job_id(self) -> bytes: ...
    @property
    def attempt(self) -> int: ...
    @property
    def fencing(self) -> int: ...


def claim(context: Context, command: Claim) -> Reply:
    """Lease each job that is seen QUEUED at the version named; None where another claim, a cancel or a deadline was first."""
    jobs, lease_ms, worker = command.jobs, command.lease_ms, command.worker
    states: list[JobState | None] = []
    while len(states) < len(jobs):
        if len(jobs) > 1:
            states += _claim_run(context, command, len(states))
        if len(states) < len(jobs):
            states.append(_claim_one(context, *jobs[len(states)], lease_ms, worker))
    return Reply(states=tuple(states))


def _claim_run(context: Context, command: Claim, start: int) -> list[JobState]:
    """Those from `start` on with which nothing is unusual, at once."""
    group_state = context.group_state
    stamps = (context.stamp_ms, context.time_ms, group_state.watermark_ms)
    befores, afters = context.txn.claim_many(command.jobs, start, stamps, group_state.fencing, command.lease_ms, command.worker)
    if afters:
        group_state.fencing += len(afters)
        context.changed_many("claim", befores, afters)
    return afters


def _claim_one(context: Context, job_id: bytes, version: int, lease_ms: int, worker: str) -> JobState | None:
    before = context.txn.state(job_id)
    if before is None or (version and version != before.version) or context.seen(before) is not Status.QUEUED:
        return None
    if _start_deadline_passed(context, before):
        _skip(context, before)
        return None
    group_state, now_ms = context.group_state, context.time_ms
    group_state.fencing += 1
    after = replace(
        before, status=RUNNING, version=before.version + 1, attempt=before.attempt + 1, fencing=group_state.fencing,
        lease_ms=lease_ms, lease_expires_at_ms=context.stamp_ms + lease_ms, next_attempt_at_ms=0, started_at_ms=now_ms,
        first_started_at_ms=before.first_started_at_ms or now_ms, outcome=_O_RUNNING, worker=worker, updated_at_ms=now_ms,
    )  # fmt: skip
    context.change("claim", before, after)
    return after


def complete(context: Context, command: Complete) -> Reply:
    """End the attempt as its worker says; the same end reported twice gets the same answer."""
    outcome = command.outcome
    before = _leased(context, command)
    if before is None:
        return _complete_again(context, command)
    if outcome not in _REPORTED:
        return Reply("invalid-request", f"outcome {outcome} cannot be reported")
    after = _end_attempt(
        context, before, outcome, command.jitter,
        error=command.error, result=command.result, retry_after_ms=command.retry_after_ms,
    )  # fmt: skip
    return Reply(state=after)


def succeed_run(context: Context, commands: Sequence[AnyCommand], start: int) -> list[Reply]:
    """`complete` for the successes from `start` on with which nothing is unusual, at once; as many replies."""
    befores, afters = context.txn.succeed_many(commands, start, context.time_ms)
    if afters:
        context.changed_many("succeeded", befores, afters)
    return [Reply(state=state) for state in afters]


def _complete_again(context: Context, command: Complete) -> Reply:
    state = context.txn.state(command.job_id)
    if (
        state is not None
        and state.status not in (RUNNING, CANCEL_REQUESTED)
        and state.attempt == command.attempt
        and state.fencing == command.fencing
        and state.outcome == command.outcome
        and command.outcome in _REPORTED
    ):
        return Reply(state=state, replayed=True)
    return _stale(command)


def extend(context: Context, command: Extend) -> Reply:
    """Lease the attempt for another length, from the stamp on. No version: timers of the attempt stay good."""
    before = _leased(context, command)
    if before is None:
        return _stale(command)
    after = replace(before, lease_ms=command.lease_ms, lease_expires_at_ms=context.stamp_ms + command.lease_ms)
    context.change("extend", before, after)
    return Reply(state=after)


def expire(context: Context, command: Expire) -> Reply:
    """End an attempt whose lease or timeout ran out; with attempt 0, a job whose start deadline passed."""
    if command.attempt == 0:
        return _expire_start(context, command.job_id)
    before = _leased(context, command)
    if before is None:
        return _stale(command)
    outcome = _O_TIMED_OUT if command.outcome == _O_TIMED_OUT else _O_EXPIRED
    after = _end_attempt(context, before, outcome, command.jitter, error=_expiry_error(before, outcome))
    return Reply(state=after)


def _expire_start(context: Context, job_id: bytes) -> Reply:
    before = context.txn.state(job_id)
    if before is None or before.status != SCHEDULED or not _start_deadline_passed(context, before):
        return Reply(state=before, replayed=True)
    if before.held and before.run is not None:
        return Reply(state=before, replayed=True)  # a schedule decides about it, and the deadline counts from its firing
    return Reply(state=_skip(context, before))


def release(context: Context, command: Release) -> Reply:
    """Give the job back, the attempt not counted; CANCELLED where that was asked for meanwhile."""
    before = _leased(context, command)
    if before is None:
        return _stale(command)
    if before.status == CANCEL_REQUESTED:
        return Reply(state=_end_attempt(context, before, _O_RELEASED, 0))
    attempt, now_ms = before.attempt - 1, context.time_ms
    # It was due when it was claimed, so `fire_at` lies under the watermark and it is seen QUEUED at once.
    again = attempt == before.attempt_base
    after = replace(
        before, status=SCHEDULED if again else RETRYING, version=before.version + 1, attempt=attempt, outcome=_O_RELEASED,
        next_attempt_at_ms=0 if again else before.fire_at_ms, lease_ms=0, lease_expires_at_ms=0, worker="",
        started_at_ms=before.started_at_ms if attempt else 0, first_started_at_ms=before.first_started_at_ms if attempt else 0,
        updated_at_ms=now_ms,
    )  # fmt: skip
    context.record_attempt("release", before, after, outcome=_O_RELEASED, seen=context.seen(after))
    context.change("release", before, after)
    return Reply(state=after)


def backoff_ms(*, attempt: int, initial_ms: int, max_ms: int, jitter: int) -> int:
    """Full jitter after an attempt that failed: jitter / 2^32 of min(max, initial * 2^(attempt - 1)).

    Never negative, never above `max_ms` (Brooker, "Exponential Backoff and Jitter", AWS 2015).
    """
    assert attempt >= 1
    bound_ms = min(max_ms, initial_ms << min(attempt - 1, _SHIFT_MAX))
    return (jitter & 0xFFFF_FFFF) * bound_ms >> _JITTER_BITS


def _leased(context: Context, token: _Token) -> JobState | None:
    """The job, while it is leased under this token."""
    state = context.txn.state(token.job_id)
    if (
        state is None
        or state.fencing != token.fencing
        or state.attempt != token.attempt
        or (state.status != RUNNING and state.status != CANCEL_REQUESTED)
    ):
        return None
    return state


def _stale(token: _Token) -> Reply:
    return Reply(
        "stale-lease",
        f"attempt {token.attempt} of {format_job_id(token.job_id)} is no longer the current one; drop its work and claim again",
    )


def _end_attempt(
    context: Context, before: JobState, outcome: int, jitter: int, *,
    error: bytes = b"", result: bytes = b"", retry_after_ms: int = -1,
) -> JobState:  # fmt: skip
    """The one place that decides what an attempt's end makes of the job. After a cancel request only a success counts."""
    status, cause = _after_attempt(before, outcome)
    changes = {"version": before.version + 1, "outcome": outcome, "updated_at_ms": context.time_ms}
    if status == RETRYING:
        due_at_ms, held = context.settle_due(context.stamp_ms + _retry_delay_ms(before, jitter, retry_after_ms))
        after = replace(before, status=RETRYING, next_attempt_at_ms=due_at_ms, held=held, **changes)
        context.mark_held(before, after)
        context.record_attempt(cause, before, after, outcome=outcome, seen=Status.RETRYING, error=error)
        context.change(cause, before, after)
        return after
    after = replace(before, status=status, finished_at_ms=context.time_ms, **changes)
    if status != SUCCEEDED:
        context.record_attempt(cause, before, after, outcome=outcome, seen=Status(status), error=error)
        return context.finish(cause, before, after, error=error, result=result)
    if before.status == CANCEL_REQUESTED:
        context.record_attempt(cause, before, after, outcome=outcome, seen=Status(status), detail="cancel_too_late")
    return context.finish(cause, before, after, result=result)


def _after_attempt(before: JobState, outcome: int) -> tuple[int, str]:
    """(status, cause), as in states.MOVES."""
    if outcome == _O_SUCCEEDED:
        return SUCCEEDED, "succeeded"
    if before.status == CANCEL_REQUESTED:
        return CANCELLED, "ended"
    if outcome == _O_CANCELLED:
        return CANCELLED, "cancelled"
    if outcome == _O_FATAL:
        return DEAD, "fatal"
    if before.attempt - before.attempt_base >= before.max_attempts:
        return DEAD, "exhausted"
    return RETRYING, "retry"


def _retry_delay_ms(before: JobState, jitter: int, retry_after_ms: int) -> int:
    if retry_after_ms >= 0:
        return retry_after_ms
    return backoff_ms(
        attempt=before.attempt,
        initial_ms=before.initial_backoff_ms, max_ms=before.max_backoff_ms, jitter=jitter,
    )  # fmt: skip


def _expiry_error(before: JobState, outcome: int) -> bytes:
    who = f"worker {before.worker}" if before.worker else "its worker"
    if outcome == _O_TIMED_OUT:
        code = "timed_out"
        message = f"attempt {before.attempt} ran longer than timeout_s {_seconds(before.timeout_ms)}; raise timeout_s or split the work"
    else:
        code = "lease_expired"
        message = (
            f"{who} neither completed nor extended attempt {before.attempt} within its lease of {_seconds(before.lease_ms)} s; "
            "it crashed, hangs, or has to heartbeat more often"
        )
    return msgspec.json.encode({"code": code, "message": message})


def _start_deadline_passed(context: Context, state: JobState) -> bool:
    """It binds only while no attempt counts."""
    deadline_ms = state.start_deadline_ms
    return deadline_ms >= 0 and state.attempt == 0 and context.stamp_ms > state.fire_at_ms + deadline_ms


def _skip(context: Context, before: JobState) -> JobState:
    bound, late = _seconds(before.start_deadline_ms), _seconds(context.stamp_ms - before.fire_at_ms)
    message = f"not started within start_deadline_s {bound} of fire_at; {late} s had passed"
    error = msgspec.json.encode({"code": "start_deadline", "message": message})
    after = replace(
        before, status=SKIPPED, version=before.version + 1, held=False, finished_at_ms=context.time_ms,
        updated_at_ms=context.time_ms,
    )  # fmt: skip
    cause = "start_deadline" if context.seen(before) is Status.QUEUED else "skip"
    context.record_event(cause, before, after, error=error)
    return context.finish(cause, before, after, error=error)


def _seconds(ms: int) -> str:
    """45000 -> 45, 1500 -> 1.500; by integers, so that every replica writes the same."""
    return f"{ms // 1000}" if ms % 1000 == 0 else f"{ms // 1000}.{ms % 1000:03d}"
