"""Create, update, cancel, fire, run, redrive, discard: what clients and time ask for."""

from __future__ import annotations

from typing import Any

import pytest
from builders import NOW_MS, EngineGroup, a_completion, a_create, must

from wheelsched.core.ids import spread_hash
from wheelsched.core.limits import KEEP_KEYED_MS
from wheelsched.model import keys
from wheelsched.model.commands import Cancel, Claim, Discard, Fire, Purge, Redrive, RunNow, Update
from wheelsched.model.effects import Fired
from wheelsched.model.rows import JobState, decode_spec, idempotency_instant_ms, split_job
from wheelsched.model.states import Lane, Outcome, Status

MINUTE_MS = 60_000


@pytest.fixture
def group() -> EngineGroup:
    return EngineGroup()


def patch(state: JobState, **options: Any) -> Update:
    return Update(state.job_id, "acme", **options)


def job_parts(group: EngineGroup, state: JobState) -> tuple[Any, bytes]:
    """(spec, payload) as stored."""
    key = keys.job_key(group.group, state.lane, state.fire_at_ms, state.job_id)
    spec, payload = split_job(group.reader.families[keys.JOBS][key])
    return decode_spec(spec), payload


# Create


def test_a_delay_counts_from_the_stamp(group: EngineGroup) -> None:
    state = group.create(delay_ms=600_000, payload=b'{"a": 1.0}')
    assert (state.version, state.fire_at_ms, state.held, state.attempt) == (1, NOW_MS + 600_000, False, 0)
    assert state.created_at_ms == state.updated_at_ms == NOW_MS
    assert group.seen(state) is Status.SCHEDULED
    assert (state.run_at_ms, job_parts(group, state)[1]) == (NOW_MS + 600_000, b'{"a": 1.0}')
    assert group.changes() == [("create", None, state)]
    assert group.counts() == {(Status.SCHEDULED, 1): 1}


def test_a_run_at_in_the_past_is_due_at_the_stamp_and_still_shown_as_asked(group: EngineGroup) -> None:
    state = group.create(run_at_ms=NOW_MS - 5_000)
    assert state.fire_at_ms == NOW_MS
    assert state.run_at_ms == NOW_MS - 5_000
    assert group.seen(state) is Status.SCHEDULED, "create moves no watermark"
    group.fire()
    assert group.seen(state) is Status.QUEUED


def test_the_fire_that_follows_in_the_same_entry_makes_a_job_due_now_claimable(group: EngineGroup) -> None:
    create = a_create()
    replies = group.apply(create, Fire(group.now_ms), Claim([(create.job_id, 1)], 45_000, "w1"))
    (claimed,) = replies[2].states
    assert claimed is not None and claimed.attempt == 1


def test_a_job_that_comes_in_under_the_watermark_is_held_and_fired_by_name_at_its_time(group: EngineGroup) -> None:
    """The clock goes back by an hour: what is due in between is neither early nor lost."""
    group.fire()
    group.advance(-60 * MINUTE_MS)
    state = group.create(delay_ms=10 * MINUTE_MS)
    assert state.held and group.seen(state) is Status.SCHEDULED
    group.fire(state)
    assert group.stored(state) == state, "too early: the name is passed over"
    group.advance(10 * MINUTE_MS)
    group.fire()
    assert group.seen(state) is Status.SCHEDULED, "the watermark alone does not fire it"
    group.fire(state)
    assert group.seen(state) is Status.QUEUED
    ((cause, before, after),) = group.changes()
    assert (cause, before) == ("fire", state) and after is not None
    assert (after.held, after.version) == (False, state.version)
    assert group.claim(state).attempt == 1


def test_a_held_job_named_with_an_old_version_is_not_fired(group: EngineGroup) -> None:
    group.fire()
    group.advance(-MINUTE_MS)
    state = group.create(delay_ms=30_000)
    must(group.do(patch(state, priority=0)))
    group.advance(30_000)
    group.fire(state)
    assert group.changes() == [] and group.seen(state) is Status.SCHEDULED


def test_due_now_after_the_clock_went_back_is_not_held(group: EngineGroup) -> None:
    group.fire()
    group.advance(-MINUTE_MS)
    state = group.create()
    assert (state.fire_at_ms, state.held) == (group.now_ms, False)
    assert group.seen(state) is Status.QUEUED
    assert state.created_at_ms == NOW_MS, "rows are dated by the greatest stamp"


def test_a_flexible_job_falls_into_nine_tenths_of_its_window(group: EngineGroup) -> None:
    offsets = []
    for number in range(300):
        state = group.create(f"job {number}", delay_ms=MINUTE_MS, window_ms=10_000)
        assert state.lane == Lane.FLEXIBLE
        offsets.append(state.fire_at_ms - NOW_MS - MINUTE_MS)
        assert state.run_at_ms == NOW_MS + MINUTE_MS
    assert 0 <= min(offsets) < 500 and 8_500 < max(offsets) < 9_000


def test_a_window_of_one_millisecond_has_room_for_the_job(group: EngineGroup) -> None:
    assert group.create(delay_ms=10, window_ms=1).fire_at_ms == NOW_MS + 10


def test_spread_and_window_are_independent(group: EngineGroup) -> None:
    """Method: with both of the same length, the sums take more than the even values that one hash used twice would give."""
    span_ms, seen = 1_000, set()
    for number in range(300):
        state = group.create(f"job {number}", delay_ms=1, window_ms=span_ms * 10 // 9 + 1, spread_ms=span_ms)
        run_at_ms = state.run_at_ms
        assert run_at_ms == NOW_MS + 1 + spread_hash(state.job_id) % span_ms
        seen.add((run_at_ms - NOW_MS - 1) // 250 * 4 + (state.fire_at_ms - run_at_ms) // 250)
    assert len(seen) == 16


def test_the_same_key_and_body_answer_with_the_same_job(group: EngineGroup) -> None:
    first = group.create(fingerprint=b"body")
    assert first.keep_until_ms == NOW_MS + KEEP_KEYED_MS
    running = group.claim(first)
    reply = group.do(a_create(fingerprint=b"body", delay_ms=5))
    assert (reply.refusal, reply.replayed, reply.state) == ("", True, running)
    assert group.effects == []


def test_the_same_key_twice_in_one_entry_makes_one_job(group: EngineGroup) -> None:
    first, second = group.apply(a_create(fingerprint=b"body"), a_create(fingerprint=b"body"))
    assert must(second) == must(first) and second.replayed and len(group.effects) == 1


def test_the_same_key_with_another_body_is_refused(group: EngineGroup) -> None:
    group.create(fingerprint=b"body")
    reply = group.do(a_create(fingerprint=b"other"))
    assert (reply.refusal, reply.state) == ("idempotency-key-reused", None)


def test_a_create_without_a_key_reads_no_row_but_the_counts(group: EngineGroup) -> None:
    group.create()
    assert group.reader.get_count == 1


def test_a_key_is_kept_for_a_day_after_the_end_whatever_the_retention(group: EngineGroup) -> None:
    state = group.running(fingerprint=b"body")
    group.advance(MINUTE_MS)
    ended = must(group.do(a_completion(state)))
    assert ended.keep_until_ms == group.now_ms + KEEP_KEYED_MS
    assert group.done(state).state == ended


# Fire


def test_the_watermark_never_goes_back(group: EngineGroup) -> None:
    group.fire()
    assert group.effects == [Fired(NOW_MS)]
    group.advance(-5_000)
    group.fire()
    assert group.effects == [] and group.state.watermark_ms == NOW_MS
    assert group.state.time_ms == NOW_MS


def test_the_watermark_never_passes_the_stamp(group: EngineGroup) -> None:
    state = group.create(delay_ms=1_000)
    group.do(Fire(NOW_MS + 1_000))
    assert group.state.watermark_ms == NOW_MS and group.seen(state) is Status.SCHEDULED


def test_firing_writes_no_row_and_bumps_no_version(group: EngineGroup) -> None:
    state = group.create()
    group.fire()
    assert group.last is not None and not any(group.last.writes.values())
    assert group.stored(state) == state


# Update


def test_a_new_time_moves_the_rows(group: EngineGroup) -> None:
    state = group.create(delay_ms=MINUTE_MS, payload=b"[1]")
    moved = must(group.do(patch(state, delay_ms=5 * MINUTE_MS, actor="ann")))
    assert (moved.version, moved.fire_at_ms) == (2, NOW_MS + 5 * MINUTE_MS)
    assert moved.run_at_ms == NOW_MS + 5 * MINUTE_MS
    assert job_parts(group, moved)[1] == b"[1]"
    (event,) = group.attempts(state)
    assert (event.cause, event.before, event.after, event.actor) == ("update", Status.SCHEDULED, Status.SCHEDULED, "ann")


def test_payload_priority_and_retry_change_where_the_row_is(group: EngineGroup) -> None:
    state = group.create(delay_ms=MINUTE_MS, payload_ref="blob", labels={"a": "b"})
    changes: dict[str, Any] = {"max_attempts": 2, "labels": {"c": "d"}, "timeout_ms": 7}
    changed = must(group.do(patch(state, priority=0, payload=b"[2]", spec_changes=changes)))
    assert (changed.priority, changed.max_attempts, changed.timeout_ms, changed.fire_at_ms) == (0, 2, 7, state.fire_at_ms)
    spec, payload = job_parts(group, changed)
    assert (spec.max_attempts, spec.labels, spec.timeout_ms, spec.payload_ref, payload) == (2, {"c": "d"}, 7, "", b"[2]")
    assert group.counts() == {(Status.SCHEDULED, 0): 1}


def test_a_change_of_timing_is_reckoned_from_run_at(group: EngineGroup) -> None:
    state = group.create(delay_ms=MINUTE_MS, window_ms=MINUTE_MS)
    assert state.fire_at_ms > NOW_MS + MINUTE_MS
    precise = must(group.do(patch(state, window_ms=0)))
    assert (precise.lane, precise.fire_at_ms) == (Lane.PRECISE, NOW_MS + MINUTE_MS)
    flexible = must(group.do(patch(state, window_ms=MINUTE_MS)))
    assert (flexible.lane, flexible.fire_at_ms) == (Lane.FLEXIBLE, state.fire_at_ms)


def test_an_update_to_a_time_under_the_watermark_is_held(group: EngineGroup) -> None:
    group.fire()
    state = group.create(delay_ms=MINUTE_MS)
    group.advance(-5 * MINUTE_MS)
    moved = must(group.do(patch(state, delay_ms=MINUTE_MS)))
    assert moved.held and group.seen(moved) is Status.SCHEDULED
    now = must(group.do(patch(state, run_at_ms=1)))
    assert not now.held and group.seen(now) is Status.QUEUED


def test_an_update_that_changes_nothing_gives_no_version(group: EngineGroup) -> None:
    state = group.create(delay_ms=MINUTE_MS, payload=b"1")
    for update in (patch(state), patch(state, payload=b"1", priority=1, run_at_ms=state.fire_at_ms, window_ms=0)):
        reply = group.do(update)
        assert (reply.state, reply.refusal, group.effects) == (state, "", [])
    assert group.attempts(state) == []


def test_an_update_names_the_version_it_has_seen(group: EngineGroup) -> None:
    state = group.create(delay_ms=MINUTE_MS)
    assert must(group.do(patch(state, priority=0, if_version=1))).version == 2
    assert group.do(patch(state, priority=2, if_version=1)).refusal == "version-mismatch"


def test_only_a_scheduled_job_can_be_changed(group: EngineGroup) -> None:
    state = group.create()
    group.fire()
    assert group.do(patch(state, priority=0)).refusal == "job-not-scheduled"
    running = group.claim(state)
    assert group.do(patch(state, priority=0)).refusal == "job-not-scheduled"
    must(group.do(a_completion(running, Outcome.RETRYABLE_FAILURE, retry_after_ms=99)))
    assert group.do(patch(state, priority=0)).refusal == "job-not-scheduled"
    must(group.do(Cancel(state.job_id, "acme")))
    assert group.do(patch(state, priority=0)).refusal == "job-not-scheduled"
    assert group.effects == []


def test_a_redriven_job_that_waits_can_be_changed_and_keeps_its_key(group: EngineGroup) -> None:
    dead = group.dead()
    again = must(group.do(Redrive(dead.job_id, "acme", MINUTE_MS)))
    assert group.seen(again) is Status.SCHEDULED
    moved = must(group.do(patch(again, delay_ms=2 * MINUTE_MS)))
    assert moved.fire_at_ms == NOW_MS + 2 * MINUTE_MS
    assert moved.key_at_ms == again.key_at_ms, "the idempotency key keeps the instant of the first run"


# Cancel


def test_a_job_that_waits_is_cancelled_at_once_and_again_with_the_same_answer(group: EngineGroup) -> None:
    state = group.create(delay_ms=MINUTE_MS)
    ended = must(group.do(Cancel(state.job_id, "acme", "ann")))
    assert (ended.status, ended.version, ended.finished_at_ms) == (Status.CANCELLED, 2, NOW_MS)
    assert group.attempts(state)[0].actor == "ann"
    again = group.do(Cancel(state.job_id, "acme"))
    assert (again.state, again.replayed, group.effects) == (ended, True, [])


def test_a_cancelled_job_is_never_delivered_though_its_timer_fires(group: EngineGroup) -> None:
    state = group.create()
    must(group.do(Cancel(state.job_id, "acme")))
    group.fire()
    assert group.do(Claim([(state.job_id, 0)], 1_000)).states == (None,)


def test_cancel_of_a_running_job_is_a_request(group: EngineGroup) -> None:
    running = group.running()
    asked = must(group.do(Cancel(running.job_id, "acme")))
    assert (asked.status, asked.version) == (Status.CANCEL_REQUESTED, running.version + 1)
    assert group.do(Cancel(running.job_id, "acme")).replayed
    assert [row.cause for row in group.attempts(running)] == ["cancel"]


def test_a_finished_job_cannot_be_cancelled(group: EngineGroup) -> None:
    running = group.running()
    must(group.do(a_completion(running)))
    assert group.do(Cancel(running.job_id, "acme")).refusal == "job-finished"


@pytest.mark.parametrize("tenant", ["acme", "other"])
@pytest.mark.parametrize("command", [Update, Cancel, RunNow, Redrive, Discard])
def test_no_job_and_another_tenants_job_look_the_same(group: EngineGroup, command: Any, tenant: str) -> None:
    other = group.create("theirs", tenant="them")
    job_id = other.job_id if tenant == "acme" else bytes(16)
    reply = group.do(command(job_id, tenant))
    assert (reply.refusal, reply.state, group.effects) == ("not-found", None, [])


# Run


def test_run_makes_a_scheduled_job_due_at_the_stamp(group: EngineGroup) -> None:
    state = group.create(delay_ms=MINUTE_MS)
    group.advance(10)
    run = must(group.do(RunNow(state.job_id, "acme", "ann")))
    assert (run.fire_at_ms, run.version) == (group.now_ms, 2)
    (event,) = group.attempts(state)
    assert (event.cause, event.before, event.after, event.actor) == ("run", Status.SCHEDULED, Status.QUEUED, "ann")
    assert group.claim(run).attempt == 1


def test_run_makes_a_retry_due_and_clears_its_hold(group: EngineGroup) -> None:
    running = group.running()
    group.advance(-10 * MINUTE_MS)
    held = must(group.do(a_completion(running, Outcome.RETRYABLE_FAILURE, retry_after_ms=MINUTE_MS)))
    assert held.held
    run = must(group.do(RunNow(held.job_id, "acme")))
    assert (run.held, run.next_attempt_at_ms, run.fire_at_ms) == (False, group.now_ms, running.fire_at_ms)
    assert group.seen(run) is Status.QUEUED


def test_run_of_a_job_that_is_due_or_runs_changes_nothing(group: EngineGroup) -> None:
    state = group.create()
    group.fire()
    assert group.do(RunNow(state.job_id, "acme")).state == state
    running = group.claim(state)
    reply = group.do(RunNow(state.job_id, "acme"))
    assert (reply.state, reply.replayed, group.effects) == (running, True, [])
    must(group.do(a_completion(running)))
    assert group.do(RunNow(state.job_id, "acme")).refusal == "job-finished"


# Redrive and discard


def test_a_redriven_job_keeps_its_key_and_counts_attempts_on(group: EngineGroup) -> None:
    dead = group.dead(max_attempts=2, payload=b"[7]")
    group.advance(MINUTE_MS)
    again = must(group.do(Redrive(dead.job_id, "acme", 5_000, "ann")))
    assert (again.status, again.fire_at_ms, again.finished_at_ms) == (Status.SCHEDULED, group.now_ms + 5_000, 0)
    assert idempotency_instant_ms(again) == dead.fire_at_ms
    assert job_parts(group, again)[1] == b"[7]"
    group.advance(5_000)
    second = group.claim(again)
    assert (second.attempt, second.attempt_base) == (2, 1)
    retry = must(group.do(a_completion(second, Outcome.RETRYABLE_FAILURE)))
    assert retry.status == Status.RETRYING, "max_attempts counts from the redrive"
    third = group.claim(retry)
    assert must(group.do(a_completion(third, Outcome.RETRYABLE_FAILURE))).status == Status.DEAD
    assert [row.cause for row in group.attempts(dead)] == ["fatal", "redrive", "retry", "exhausted"]


def test_a_second_redrive_keeps_the_first_instant_in_the_key(group: EngineGroup) -> None:
    dead = group.dead()
    for _ in range(2):
        group.advance(1_000)
        again = group.claim(must(group.do(Redrive(dead.job_id, "acme"))))
        assert idempotency_instant_ms(again) == dead.fire_at_ms
        must(group.do(a_completion(again, Outcome.FATAL_FAILURE)))


def test_a_start_deadline_no_longer_binds_after_a_redrive(group: EngineGroup) -> None:
    dead = group.dead(start_deadline_ms=1_000)
    again = must(group.do(Redrive(dead.job_id, "acme")))
    group.advance(10_000)
    assert group.claim(again).attempt == 2


def test_redrive_under_the_watermark_is_held(group: EngineGroup) -> None:
    dead = group.dead()
    group.advance(-MINUTE_MS)
    assert must(group.do(Redrive(dead.job_id, "acme", 1_000))).held


@pytest.mark.parametrize("command", [Redrive, Discard])
def test_only_a_dead_job_is_redriven_or_discarded(group: EngineGroup, command: Any) -> None:
    state = group.create()
    assert group.do(command(state.job_id, "acme")).refusal == "job-finished"
    must(group.do(a_completion(group.claim(state))))
    assert group.do(command(state.job_id, "acme")).refusal == "job-finished"


def test_a_discarded_job_is_gone(group: EngineGroup) -> None:
    dead = group.dead()
    must(group.do(Discard(dead.job_id, "acme")))
    assert group.changes() == [("discard", dead, None)]
    assert not any(group.reader.families.values())


def test_a_discarded_jobs_key_is_refused_for_a_day(group: EngineGroup) -> None:
    dead = group.dead(fingerprint=b"body")
    must(group.do(Discard(dead.job_id, "acme")))
    assert group.counts() == {} and group.seen(dead) is Status.DISCARDED
    assert group.do(a_create(fingerprint=b"body")).refusal == "job-finished"
    for command in (Cancel, RunNow, Redrive, Discard, Update):
        assert group.do(command(dead.job_id, "acme")).refusal == "not-found"
    purge = Purge("acme", "mail", Status.DISCARDED, group.now_ms + 2 * KEEP_KEYED_MS)
    group.advance(KEEP_KEYED_MS - 1)
    assert group.do(purge).count == 0
    group.advance(1)
    assert group.do(purge).count == 1 and group.effects == []
    assert not any(group.reader.families.values())
    assert group.create(fingerprint=b"other").version == 1
