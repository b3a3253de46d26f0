"""Claim, complete, extend, expire, release: what workers and their silence bring."""

from __future__ import annotations

import json
from typing import Any

import pytest
from builders import NOW_MS, EngineGroup, a_completion, an_id, must

from wheelsched.engine.attempts import backoff_ms
from wheelsched.model import keys
from wheelsched.model.commands import Cancel, Claim, Complete, Expire, Extend, Redrive, Release, Reply
from wheelsched.model.rows import JobState
from wheelsched.model.states import Outcome, Status

JITTER_MAX = 2**32 - 1
FAILED, FATAL = Outcome.RETRYABLE_FAILURE, Outcome.FATAL_FAILURE


@pytest.fixture
def group() -> EngineGroup:
    return EngineGroup()


def expiry(leased: JobState, outcome: Outcome = Outcome.LEASE_EXPIRED, jitter: int = 0) -> Expire:
    return Expire(leased.job_id, leased.attempt, leased.fencing, int(outcome), jitter)


def a_release(leased: JobState) -> Release:
    return Release(leased.job_id, leased.attempt, leased.fencing)


def assert_stale(group: EngineGroup, reply: Reply) -> None:
    assert (reply.refusal, reply.state, group.effects) == ("stale-lease", None, [])
    assert "attempt" in reply.detail and "job_" in reply.detail


# Claim


def test_a_claim_counts_the_attempt_and_mints_a_token(group: EngineGroup) -> None:
    state = group.create()
    claimed = group.claim(state, lease_ms=30_000, worker="host-7")
    assert (claimed.status, claimed.version, claimed.attempt, claimed.fencing) == (Status.RUNNING, 2, 1, 1)
    assert (claimed.lease_ms, claimed.lease_expires_at_ms, claimed.worker) == (30_000, NOW_MS + 30_000, "host-7")
    assert (claimed.started_at_ms, claimed.first_started_at_ms, claimed.outcome) == (NOW_MS, NOW_MS, Outcome.RUNNING)
    assert group.changes() == [("claim", state, claimed)]
    assert group.attempts(state) == []


def test_a_claim_writes_one_row_and_the_counts(group: EngineGroup) -> None:
    group.claim(group.create())
    assert group.last is not None
    written = {family: len(rows) for family, rows in group.last.writes.items() if rows}
    assert written == {keys.STATE: 1, keys.COUNTS: 1}


def test_a_job_is_claimed_once(group: EngineGroup) -> None:
    state = group.create()
    group.fire()
    first, second = group.apply(Claim([(state.job_id, 1)], 1_000), Claim([(state.job_id, 1), (state.job_id, 0)], 1_000))
    assert first.states[0] is not None and second.states == (None, None)


def test_claims_answer_in_order_with_none_for_what_is_not_ready(group: EngineGroup) -> None:
    later, old, ready = group.create("later", delay_ms=1), group.create("old"), group.create("ready")
    group.fire()
    states = group.do(Claim([(later.job_id, 1), (an_id("none"), 0), (old.job_id, 9), (ready.job_id, 0)], 1_000)).states
    assert states[:3] == (None, None, None)
    assert states[3] is not None and states[3].job_id == ready.job_id


def test_a_job_is_not_claimed_before_its_group_fired_it(group: EngineGroup) -> None:
    state = group.create()
    group.advance(10_000)
    assert group.do(Claim([(state.job_id, 0)], 1_000)).states == (None,)


def test_tokens_grow_over_jobs_and_attempts(group: EngineGroup) -> None:
    tokens = []
    for name in ("one", "two"):
        running = group.running(name)
        tokens.append(running.fencing)
        retry = must(group.do(a_completion(running, FAILED)))
        tokens.append(group.claim(retry).fencing)
    assert tokens == [1, 2, 3, 4] and group.state.fencing == 4


def test_a_claim_after_the_start_deadline_skips_the_job(group: EngineGroup) -> None:
    state = group.create(start_deadline_ms=1_000)
    group.fire()
    group.advance(1_001)
    assert group.do(Claim([(state.job_id, 1)], 1_000)).states == (None,)
    ((cause, _, after),) = group.changes()
    assert cause == "start_deadline" and after is not None and after.status == Status.SKIPPED
    assert json.loads(group.done(state).error)["code"] == "start_deadline"
    assert [(row.cause, row.before, row.after) for row in group.attempts(state)] == [("start_deadline", Status.QUEUED, Status.SKIPPED)]
    assert group.state.fencing == 0


def test_a_claim_at_the_start_deadline_is_in_time(group: EngineGroup) -> None:
    state = group.create(start_deadline_ms=1_000)
    group.advance(1_000)
    assert group.claim(state).attempt == 1


# Complete


def test_success_moves_the_job_into_done_without_an_attempt_row(group: EngineGroup) -> None:
    running = group.running(payload=b"[1]")
    job_row = next(iter(group.reader.families[keys.JOBS].values()))
    group.advance(500)
    ended = must(group.do(a_completion(running, result=b'{"n": 1}')))
    assert (ended.status, ended.version, ended.finished_at_ms) == (Status.SUCCEEDED, 3, NOW_MS + 500)
    done = group.done(running)
    assert (done.state, done.job, done.result, done.error) == (ended, job_row, b'{"n": 1}', b"")
    assert group.changes() == [("succeeded", running, ended)]
    assert group.attempts(running) == []
    assert group.counts() == {(Status.SUCCEEDED, 1): 1}


def test_a_failure_retries_after_its_jittered_backoff(group: EngineGroup) -> None:
    running = group.running(initial_backoff_ms=10_000)
    retry = must(group.do(a_completion(running, FAILED, jitter=2**31, error=b'"no"')))
    assert (retry.status, retry.next_attempt_at_ms) == (Status.RETRYING, NOW_MS + 5_000)
    (row,) = group.attempts(running)
    assert (row.cause, row.attempt, row.outcome, row.error, row.worker) == ("retry", 1, FAILED, b'"no"', "w1")
    assert (row.started_at_ms, row.lease_expires_at_ms, row.fencing) == (NOW_MS, NOW_MS + 45_000, 1)
    group.advance(4_999)
    group.fire()
    assert group.seen(retry) is Status.RETRYING
    group.advance(1)
    second = group.claim(retry)
    assert (second.attempt, second.first_started_at_ms, second.next_attempt_at_ms) == (2, NOW_MS, 0)


def test_retry_after_replaces_the_backoff(group: EngineGroup) -> None:
    retry = must(group.do(a_completion(group.running(), FAILED, jitter=JITTER_MAX, retry_after_ms=123_456)))
    assert retry.next_attempt_at_ms == NOW_MS + 123_456


def test_a_retry_under_the_watermark_is_held(group: EngineGroup) -> None:
    running = group.running()
    group.advance(-60_000)
    retry = must(group.do(a_completion(running, FAILED, retry_after_ms=1_000)))
    assert retry.held and group.seen(retry) is Status.RETRYING
    group.advance(1_000)
    group.fire(retry)
    assert group.seen(retry) is Status.QUEUED


def test_the_last_attempt_and_a_fatal_failure_are_dead(group: EngineGroup) -> None:
    last = must(group.do(a_completion(group.running("last", max_attempts=1), FAILED, error=b'"e"')))
    fatal = must(group.do(a_completion(group.running("fatal"), FATAL, error=b'"e"')))
    for ended, cause in ((last, "exhausted"), (fatal, "fatal")):
        assert ended.status == Status.DEAD and group.done(ended).error == b'"e"'
        assert [row.cause for row in group.attempts(ended)] == [cause]


def test_a_worker_may_cancel_its_own_job(group: EngineGroup) -> None:
    ended = must(group.do(a_completion(group.running(), Outcome.CANCELLED)))
    assert ended.status == Status.CANCELLED
    assert [(row.cause, row.outcome) for row in group.attempts(ended)] == [("cancelled", Outcome.CANCELLED)]


@pytest.mark.parametrize("outcome", [FAILED, FATAL, Outcome.CANCELLED])
def test_after_a_cancel_request_every_end_but_success_is_cancelled(group: EngineGroup, outcome: Outcome) -> None:
    """B-051: the retry that would forget the cancel never happens; the log decides which came first."""
    running = group.running()
    must(group.do(Cancel(running.job_id, "acme")))
    ended = must(group.do(a_completion(running, outcome)))
    assert (ended.status, ended.outcome) == (Status.CANCELLED, outcome)
    assert [row.cause for row in group.attempts(running)] == ["cancel", "ended"]


@pytest.mark.parametrize("end", [expiry, a_release])
def test_after_a_cancel_request_expiry_and_release_end_cancelled(group: EngineGroup, end: Any) -> None:
    running = group.running()
    must(group.do(Cancel(running.job_id, "acme")))
    assert must(group.do(end(running))).status == Status.CANCELLED


def test_a_success_after_a_cancel_request_counts_and_says_that_the_cancel_was_too_late(group: EngineGroup) -> None:
    running = group.running()
    must(group.do(Cancel(running.job_id, "acme")))
    assert must(group.do(a_completion(running))).status == Status.SUCCEEDED
    assert group.attempts(running)[-1].detail == "cancel_too_late"


@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, FAILED, FATAL, Outcome.CANCELLED])
def test_the_same_end_reported_twice_gets_the_same_answer(group: EngineGroup, outcome: Outcome) -> None:
    running = group.running()
    first = group.do(a_completion(running, outcome, jitter=1))
    again = group.do(a_completion(running, outcome, jitter=JITTER_MAX))
    assert (again.state, again.refusal, again.replayed, group.effects) == (first.state, "", True, [])


def test_another_end_than_the_one_on_record_is_stale(group: EngineGroup) -> None:
    running = group.running()
    must(group.do(a_completion(running)))
    assert_stale(group, group.do(a_completion(running, FAILED)))


def test_an_end_repeated_after_the_next_claim_is_stale(group: EngineGroup) -> None:
    first = group.running()
    second = group.claim(must(group.do(a_completion(first, FAILED))))
    assert_stale(group, group.do(a_completion(first, FAILED)))
    assert group.stored(first) == second


def test_a_wrong_token_changes_nothing(group: EngineGroup) -> None:
    running = group.running()
    job_id, attempt, fencing = running.job_id, running.attempt, running.fencing
    for job, number, token in ((job_id, attempt, fencing + 1), (job_id, attempt + 1, fencing), (an_id("none"), 1, 1)):
        assert_stale(group, group.do(Complete(job, number, token, int(Outcome.SUCCEEDED), 0)))
        assert_stale(group, group.do(Extend(job, number, token, 1)))
        assert_stale(group, group.do(Release(job, number, token)))
        assert_stale(group, group.do(Expire(job, number, token, int(Outcome.LEASE_EXPIRED), 0)))
    assert group.stored(running) == running


@pytest.mark.parametrize("end", [expiry, a_release])
def test_an_attempt_that_was_taken_away_cannot_complete(group: EngineGroup, end: Any) -> None:
    running = group.running()
    must(group.do(end(running)))
    for outcome in (Outcome.SUCCEEDED, FAILED, Outcome.CANCELLED):
        assert_stale(group, group.do(a_completion(running, outcome)))


def test_an_outcome_that_no_worker_can_report_is_refused(group: EngineGroup) -> None:
    running = group.running()
    assert group.do(a_completion(running, Outcome.RELEASED)).refusal == "invalid-request"
    must(group.do(expiry(running)))
    assert group.do(a_completion(running, Outcome.LEASE_EXPIRED)).refusal == "stale-lease"


# Extend


def test_an_extension_moves_the_lease_and_nothing_else(group: EngineGroup) -> None:
    running = group.running()
    group.advance(10_000)
    longer = must(group.do(Extend(running.job_id, running.attempt, running.fencing, 90_000)))
    assert (longer.lease_ms, longer.lease_expires_at_ms) == (90_000, group.now_ms + 90_000)
    assert (longer.version, longer.status) == (running.version, Status.RUNNING)
    assert group.changes() == [("extend", running, longer)] and group.attempts(running) == []


# Expire


@pytest.mark.parametrize(("outcome", "code"), [(Outcome.LEASE_EXPIRED, "lease_expired"), (Outcome.TIMED_OUT, "timed_out")])
def test_lease_expiry_and_timeout_count_attempts_up_to_the_limit(group: EngineGroup, outcome: Outcome, code: str) -> None:
    """B-076: a payload that kills its worker reports nothing, and is claimed max_attempts times all the same."""
    state = group.create(max_attempts=3)
    claims = 0
    while group.seen(state) is not Status.DEAD:
        stored = group.stored(state)
        assert stored is not None
        running = group.claim(stored)
        claims += 1
        must(group.do(expiry(running, outcome)))
    assert claims == 3
    rows = group.attempts(state)
    assert [(row.attempt, row.outcome) for row in rows] == [(1, outcome), (2, outcome), (3, outcome)]
    assert json.loads(group.done(state).error)["code"] == code == json.loads(rows[0].error)["code"]


def test_expiry_backs_off_like_a_failure(group: EngineGroup) -> None:
    retry = must(group.do(expiry(group.running(initial_backoff_ms=8_000), jitter=2**30)))
    assert (retry.status, retry.next_attempt_at_ms) == (Status.RETRYING, NOW_MS + 2_000)


def test_the_start_deadline_skips_a_job_that_never_started(group: EngineGroup) -> None:
    state = group.create(start_deadline_ms=1_000)
    group.fire()
    command = Expire(state.job_id, 0, 0, 0, 0)
    group.advance(1_000)
    assert group.do(command).state == state and group.effects == []
    group.advance(1)
    assert must(group.do(command)).status == Status.SKIPPED
    assert json.loads(group.done(state).error)["code"] == "start_deadline"
    assert group.do(command).replayed


def test_the_start_deadline_does_not_bind_once_started(group: EngineGroup) -> None:
    running = group.running(start_deadline_ms=1_000)
    group.advance(5_000)
    command = Expire(running.job_id, 0, 0, 0, 0)
    assert group.do(command).state == running
    retry = must(group.do(a_completion(running, FAILED)))
    assert group.do(command).state == retry and group.effects == []


# Release


def test_a_released_job_is_queued_and_its_attempt_not_counted(group: EngineGroup) -> None:
    state = group.create()
    running = group.claim(state)
    group.advance(100)
    back = must(group.do(a_release(running)))
    assert group.seen(back) is Status.QUEUED
    assert (back.attempt, back.version, back.started_at_ms, back.first_started_at_ms) == (0, 3, 0, 0)
    (row,) = group.attempts(state)
    assert (row.cause, row.attempt, row.outcome, row.after) == ("release", 1, Outcome.RELEASED, Status.QUEUED)
    again = group.claim(back)
    assert (again.attempt, again.fencing) == (1, running.fencing + 1)
    assert_stale(group, group.do(a_release(running)))


def test_a_release_of_a_later_attempt_is_queued_too(group: EngineGroup) -> None:
    retry = must(group.do(a_completion(group.running(), FAILED, retry_after_ms=5_000)))
    group.advance(5_000)
    back = must(group.do(a_release(group.claim(retry))))
    assert (back.status, back.attempt, group.seen(back)) == (Status.RETRYING, 1, Status.QUEUED)
    assert back.first_started_at_ms == NOW_MS
    assert group.claim(back).attempt == 2


def test_a_release_after_a_redrive_is_queued_too(group: EngineGroup) -> None:
    dead = group.dead()
    again = group.claim(must(group.do(Redrive(dead.job_id, "acme"))))
    back = must(group.do(a_release(again)))
    assert (back.status, back.attempt, group.seen(back)) == (Status.SCHEDULED, 1, Status.QUEUED)


def test_a_released_job_stays_queued_though_the_clock_went_back(group: EngineGroup) -> None:
    running = group.running()
    group.advance(-3_600_000)
    assert group.seen(must(group.do(a_release(running)))) is Status.QUEUED


# Backoff


def test_backoff_doubles_with_the_attempt_and_goes_on_after_a_redrive(group: EngineGroup) -> None:
    state, delays = group.create(max_attempts=3, initial_backoff_ms=1_000), []
    for _ in range(2):
        for _ in range(2):
            retry = must(group.do(a_completion(group.claim(state), FAILED, jitter=2**31)))
            delays.append(retry.next_attempt_at_ms - group.now_ms)
            group.advance(10_000)
            state = retry
        dead = must(group.do(a_completion(group.claim(state), FAILED)))
        state = must(group.do(Redrive(dead.job_id, "acme")))
    assert delays == [500, 1_000, 4_000, 8_000]


@pytest.mark.parametrize(("initial_ms", "max_ms"), [(10_000, 600_000), (1, 31_622_400_000), (0, 0), (600_000, 5), (1, 1)])
def test_backoff_is_never_negative_and_never_above_its_cap(initial_ms: int, max_ms: int) -> None:
    """B-140: 2^n outgrew the integer and the retry was immediate."""
    for failures in range(1, 101):
        bound = min(max_ms, initial_ms * 2 ** (failures - 1))
        for jitter in (0, 1, 2**31, JITTER_MAX):
            delay = backoff_ms(attempt=failures, initial_ms=initial_ms, max_ms=max_ms, jitter=jitter)
            assert 0 <= delay <= bound <= max_ms
        assert delay >= bound - bound // 2**32 - 1, "full jitter reaches up to the bound"
