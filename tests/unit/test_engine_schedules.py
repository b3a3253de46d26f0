"""The commands of schedules, one by one: what each makes of the next occurrence, of the runs that go on, and of what is left out.

Method: a group whose promises are looked at after every entry (`schedule_builders.py`): one waiting occurrence, one job for each
occurrence, counts that add up, no row of nothing. A leader that computed from what is no longer so changes not a byte.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from builders import a_completion, an_id, must
from msgspec.structs import replace
from schedule_builders import MINUTE_MS, START_MS, TENANT, ScheduleGroup, a_definition

from wheelsched.core.ids import occurrence_id
from wheelsched.core.limits import KEEP_KEYED_MS
from wheelsched.engine import schedules
from wheelsched.model import keys
from wheelsched.model.commands import (
    AnyCommand,
    Backfill,
    Cancel,
    Discard,
    DropSchedule,
    Expire,
    Fire,
    Occur,
    Purge,
    PutSchedule,
    Redrive,
    Release,
    Rezone,
    RunNow,
    StartRun,
    Update,
)
from wheelsched.model.effects import JobChanged, OccurrencesSkipped, ScheduleChanged
from wheelsched.model.rows import JobState, encode_row
from wheelsched.model.schedules import Cause, NextRun, Overlap, Phase, Reason, SkipRow, Successor
from wheelsched.model.states import Outcome, Status

POLICIES = [Overlap.FORBID, Overlap.REPLACE, Overlap.BUFFER_ONE]


@pytest.fixture
def group() -> ScheduleGroup:
    return ScheduleGroup()


def at(minute: float) -> int:
    return round(START_MS + minute * MINUTE_MS)


def go_to(group: ScheduleGroup, minute: float) -> None:
    group.now_ms = at(minute)


def phase_of(group: ScheduleGroup, state: JobState) -> int:
    now = group.stored(state)
    assert now is not None and now.run is not None
    return now.run.phase


def why(group: ScheduleGroup, state: JobState) -> str:
    return str(json.loads(group.done(state).error)["code"])


def ended(group: ScheduleGroup, state: JobState, outcome: Outcome = Outcome.SUCCEEDED) -> JobState:
    return must(group.apply(a_completion(state, outcome), Fire(group.now_ms))[0])


# --- definitions ----------------------------------------------------------------------------------------------------------------


def test_a_new_schedule_has_its_next_occurrence_waiting(group: ScheduleGroup) -> None:
    definition = group.put(spec={"max_attempts": 3}, payload=b'{"a": 1.0}', priority=2)
    state, course = group.waiting(), group.course()
    assert (definition.version, definition.created_at_ms, definition.paused) == (1, START_MS, False)
    assert (course.next_at_ms, course.decided_ms, course.runs) == (at(1), START_MS, [])
    assert (state.job_id, state.fire_at_ms) == (occurrence_id(definition.schedule_id, at(1)), at(1))
    assert (state.status, state.held, state.queue, state.priority, state.max_attempts) == (Status.SCHEDULED, True, "mail", 2, 3)
    assert state.run is not None and (state.run.schedule, state.run.scheduled_for_ms, state.run.phase) == ("s", at(1), Phase.NEXT)


def test_jitter_and_a_window_move_the_start_and_not_the_occurrence(group: ScheduleGroup) -> None:
    group.put(offset_ms=7_000, window_ms=30_000)
    state = group.waiting()
    assert at(1) + 7_000 <= state.fire_at_ms < at(1) + 7_000 + 27_000
    assert group.course().next_at_ms == at(1)
    assert group.course().next_fire_at_ms == state.fire_at_ms


def test_without_times_a_schedule_has_no_next_occurrence(group: ScheduleGroup) -> None:
    group.put(every_ms=0)
    assert (group.course().next_at_ms, group.jobs()) == (-1, [])


def test_the_same_definition_again_changes_nothing(group: ScheduleGroup) -> None:
    group.put()
    group.advance(5_000)
    before = group.rows()
    reply = group.do(group.put_command(a_definition(life=9)))
    assert reply.replayed and not reply.refusal
    assert group.rows() == before and group.effects == []


def test_a_changed_definition_keeps_its_identity_and_counts_its_version(group: ScheduleGroup) -> None:
    first = group.put()
    waiting = group.waiting()
    group.advance(5_000)
    second = group.put(life=9, priority=0)
    assert (second.schedule_id, second.version, second.created_at_ms) == (first.schedule_id, 2, START_MS)
    assert second.updated_at_ms == START_MS + 5_000
    assert group.waiting().job_id == waiting.job_id, "the same occurrence, made anew from the new template"
    assert group.waiting().priority == 0


def test_another_timing_counts_from_the_change_on(group: ScheduleGroup) -> None:
    """B-041: slots of a pattern before its own version began are not missed ones."""
    group.put()
    group.occur()
    go_to(group, 1.5)
    group.put(every_ms=60 * MINUTE_MS)
    assert group.course().decided_ms == at(1.5)
    assert group.course().next_at_ms % (60 * MINUTE_MS) == 0
    assert group.statuses() == {1: "QUEUED", (group.course().next_at_ms - START_MS) // MINUTE_MS: "SCHEDULED"}


def test_create_refuses_a_name_that_is_taken_and_answers_its_own_key_again(group: ScheduleGroup) -> None:
    keyed = a_definition(key_digest=b"k" * 16, fingerprint=b"f" * 16)
    assert group.do(group.put_command(keyed, create=True)).count == 1
    before = group.rows()
    assert group.do(group.put_command(replace(keyed, schedule_id=b"x" * 16), create=True)).replayed
    assert group.do(group.put_command(a_definition(life=1), create=True)).refusal == "name-taken"
    assert group.do(group.put_command(replace(keyed, fingerprint=b"g" * 16), create=True)).refusal == "idempotency-key-reused"
    assert group.rows() == before


def test_a_replacement_of_another_version_is_refused(group: ScheduleGroup) -> None:
    assert group.do(group.put_command(a_definition(), if_version=1)).refusal == "not-found"
    group.put()
    before = group.rows()
    assert group.do(group.put_command(a_definition(priority=0), if_version=2)).refusal == "version-mismatch"
    assert group.rows() == before
    assert not group.do(group.put_command(a_definition(priority=0), if_version=1)).refusal


def test_deleting_withdraws_what_waits_and_leaves_what_has_fired(group: ScheduleGroup) -> None:
    group.put(overlap=Overlap.BUFFER_ONE)
    going = group.started()
    group.occur()
    group.start("later", delay_ms=600_000)
    group.drop()
    assert group.find_definition("s") is None
    assert [state.job_id for state in group.jobs()] == [going.job_id, an_id("later")]
    assert group.seen(going) is Status.RUNNING
    ended(group, going)
    group.advance(600_000)
    (later,) = [state for state in group.jobs() if state.job_id == an_id("later")]
    group.fire(later)
    assert group.seen(later) is Status.QUEUED, "a run that was asked for by hand outlives its schedule"
    assert group.do(DropSchedule(TENANT, "s")).refusal == "not-found"


def test_deleted_and_made_again_it_has_one_occurrence_of_its_own(group: ScheduleGroup) -> None:
    """B-046, ten times within a second."""
    for life in range(10):
        group.put(life=life)
        group.drop()
        group.advance(90)
    group.put(life=10)
    assert group.statuses() == {1: "SCHEDULED"}
    assert len(group.jobs()) == 1


def test_another_tenants_schedule_is_none(group: ScheduleGroup) -> None:
    group.put()
    before = group.rows()
    assert group.do(StartRun(an_id(), "other", "s")).refusal == "not-found"
    assert group.do(DropSchedule("other", "s")).refusal == "not-found"
    assert group.rows() == before


# --- commands that come too late ------------------------------------------------------------------------------------------------


def outdated_commands(group: ScheduleGroup) -> dict[str, AnyCommand]:
    """As a leader would propose them that has not seen the last change."""
    definition, successor, waiting = group.definition(), group.successor(), group.waiting()
    following = NextRun(at(30))
    elsewhere = Successor(definition.version, at(7), following)
    return {
        "occur of an old version": group.occur_command(version=definition.version - 1),
        "occur of another instant": group.occur_command(at_ms=at(7)),
        "occur with a successor that has a job": group.occur_command(next=NextRun(at(20))),
        "occur of no schedule": Occur(TENANT, "none", 1, at(1), following, [(at(1), "")]),
        "rezone of an old version": Rezone(TENANT, "s", definition.version - 1, successor.at_ms, following),
        "rezone of another instant": Rezone(TENANT, "s", definition.version, at(7), following),
        "rezone to an instant that has a job": Rezone(TENANT, "s", definition.version, successor.at_ms, NextRun(at(20))),
        "put with a next that has a job": PutSchedule(encode_row(a_definition(priority=0)), NextRun(at(20))),
        "cancel without a successor": Cancel(waiting.job_id, TENANT),
        "cancel with another occurrence's successor": Cancel(waiting.job_id, TENANT, successor=elsewhere),
        "cancel with a successor of an old version": Cancel(waiting.job_id, TENANT, successor=replace(successor, version=1)),
        "cancel with a successor that has a job": Cancel(waiting.job_id, TENANT, successor=replace(successor, next=NextRun(at(20)))),
        "run without a successor": RunNow(waiting.job_id, TENANT),
        "run with another occurrence's successor": RunNow(waiting.job_id, TENANT, successor=elsewhere),
        "move without a successor": Update(waiting.job_id, TENANT, run_at_ms=at(5)),
        "move with another occurrence's successor": Update(waiting.job_id, TENANT, run_at_ms=at(5), successor=elsewhere),
        "backfill of an old version": Backfill(TENANT, "s", definition.version - 1, [(at(2), -1, "")]),
    }


def prepared() -> ScheduleGroup:
    """At version 2, with a job at minute 20 that a backfill of the future made."""
    group = ScheduleGroup()
    group.put(priority=0)
    group.put()
    group.backfill(20)
    return group


@pytest.mark.parametrize("what", outdated_commands(prepared()))
def test_a_command_computed_from_what_is_no_longer_so_changes_nothing(what: str) -> None:
    """`outdated`, so that the leader computes it again. Method: the rows, byte by byte, and that nobody is told of anything."""
    group = prepared()
    before = group.rows()
    assert group.do(outdated_commands(group)[what]).refusal == "outdated"
    assert group.rows() == before and group.effects == []


def test_going_on_with_another_version_is_outdated(group: ScheduleGroup) -> None:
    group.put()
    group.pause()
    before = group.rows()
    assert group.do(replace(group.pause_command(False), version=1)).refusal == "outdated"
    assert group.rows() == before


@pytest.mark.parametrize("what", ["put", "drop", "pause"])
def test_a_change_after_the_occurrence_has_come_lets_it_be_decided_first(group: ScheduleGroup, what: str) -> None:
    """Else it would be lost: neither run nor left out."""
    group.put()
    go_to(group, 1)
    commands: dict[str, AnyCommand] = {
        "put": group.put_command(a_definition(priority=0)), "drop": DropSchedule(TENANT, "s"), "pause": group.pause_command(True),
    }  # fmt: skip
    before = group.rows()
    assert group.do(commands[what]).refusal == "occurrence-due"
    assert group.rows() == before
    group.occur()
    assert group.statuses() == {1: "QUEUED", 2: "SCHEDULED"}
    again = group.put_command(a_definition(priority=0)) if what == "put" else commands[what]
    assert not group.do(again).refusal


def test_the_same_occurrence_decided_twice_runs_once(group: ScheduleGroup) -> None:
    """`one_job_per_occurrence`: two leaders, or one that got no answer."""
    group.put()
    command = group.occur_command()
    go_to(group, 1)
    first, second = group.apply(command, command)
    assert (first.refusal, second.refusal) == ("", "outdated")
    assert group.statuses() == {1: "SCHEDULED", 2: "SCHEDULED"}
    group.fire()
    assert group.statuses() == {1: "QUEUED", 2: "SCHEDULED"}


# --- the next occurrence --------------------------------------------------------------------------------------------------------


def test_an_occurrence_fires_at_its_instant_and_its_successor_stands(group: ScheduleGroup) -> None:
    group.put()
    waiting = group.waiting()
    state = group.occur()
    assert state is not None and (state.fire_at_ms, state.version, state.held) == (at(1), waiting.version, False)
    assert group.statuses() == {1: "QUEUED", 2: "SCHEDULED"}
    assert group.course().last_job == state.job_id and group.course().covered_ms == at(1)
    third = group.occur()
    assert third is not None and third.run is not None
    assert (third.run.from_ms, third.run.scheduled_for_ms, third.run.cause) == (at(1), at(2), Cause.ON_TIME)


def test_decided_a_little_late_it_still_has_its_instant(group: ScheduleGroup) -> None:
    group.put(starting_deadline_ms=0)
    go_to(group, 1)
    group.advance(999)
    state = group.occur()
    assert state is not None and state.fire_at_ms == at(1)
    assert group.seen(state) is Status.QUEUED


def test_decided_later_than_the_deadline_allows_it_is_skipped(group: ScheduleGroup) -> None:
    group.put(starting_deadline_ms=5_000)
    waiting = group.waiting()
    go_to(group, 1)
    group.advance(5_001)
    group.occur()
    assert why(group, waiting) == "missed_deadline"
    assert group.course().skipped[Reason.MISSED_DEADLINE] == 1
    assert group.course().next_at_ms == at(2)


def test_without_a_deadline_nothing_is_too_late(group: ScheduleGroup) -> None:
    """B-023."""
    group.put()
    go_to(group, 1.9)
    state = group.occur()
    assert state is not None and group.seen(state) is Status.QUEUED


def test_after_the_last_occurrence_none_waits(group: ScheduleGroup) -> None:
    group.put(end_ms=at(2))
    state = group.occur()
    assert state is not None and group.seen(state) is Status.QUEUED
    assert group.course().next_at_ms == -1


@pytest.mark.parametrize("what", ["cancel", "run", "move"])
def test_what_takes_the_next_one_away_puts_its_successor_there(group: ScheduleGroup, what: str) -> None:
    """B-050: in the same command, so that no chain breaks, whatever dies next."""
    group.put()
    waiting, successor = group.waiting(), group.successor()
    if what == "cancel":
        assert group.cancel(waiting, successor=successor).status == Status.CANCELLED
    elif what == "run":
        assert must(group.run_now(waiting, successor=successor)).fire_at_ms == START_MS
        assert group.seen(waiting) is Status.QUEUED
    else:
        moved = group.move(waiting, at(30), successor=successor)
        assert moved.held and moved.run is not None and moved.run.phase == Phase.SET
    assert group.course().next_at_ms == at(2)
    assert group.course().decided_ms == at(1), "the first minute is decided, and does not come again"
    group.occur()
    assert group.course().next_at_ms == at(3)
    if what == "move":
        go_to(group, 30)
        moved_now = group.stored(waiting)
        assert moved_now is not None
        group.fire(moved_now)
        assert group.seen(waiting) is Status.QUEUED


def test_the_last_occurrence_can_be_taken_away_too(group: ScheduleGroup) -> None:
    group.put(end_ms=at(2))
    assert group.cancel(group.waiting(), successor=group.successor()).status == Status.CANCELLED
    assert group.course().next_at_ms == -1


def test_a_change_that_moves_nothing_leaves_it_the_next_one(group: ScheduleGroup) -> None:
    group.put()
    state = must(group.act(Update(group.waiting().job_id, TENANT, priority=0, spec_changes={"max_attempts": 2})))
    assert state.held and state.priority == 0
    assert phase_of(group, state) == Phase.NEXT
    fired = group.occur()
    assert fired is not None and (fired.priority, fired.max_attempts) == (0, 2)


@pytest.mark.parametrize("minute", [0.5, 1])
def test_a_change_to_the_time_it_has_leaves_it_the_next_one(group: ScheduleGroup, minute: float) -> None:
    """Before its time, and at it: else it would fire by itself, and the chain would end there."""
    group.put()
    waiting = group.waiting()
    go_to(group, minute)
    reply = group.act(Update(waiting.job_id, TENANT, run_at_ms=at(1)))
    assert reply.replayed and group.stored(waiting) == waiting
    moved = group.move(waiting, at(2.5), successor=group.successor())
    assert group.act(Update(moved.job_id, TENANT, run_at_ms=at(2.5))).replayed
    assert group.course().next_at_ms == at(2)


def test_cancelled_ahead_of_its_time_it_does_not_come_back_with_the_next_change(group: ScheduleGroup) -> None:
    group.put()
    group.cancel(group.waiting(), successor=group.successor())
    group.put(priority=0)
    assert group.course().next_at_ms == at(2)


def test_a_start_deadline_does_not_end_the_next_one(group: ScheduleGroup) -> None:
    """The deadline of a job counts from its firing, and what waits for its schedule has not fired."""
    group.put(spec={"start_deadline_ms": 1_000})
    waiting = group.waiting()
    go_to(group, 1.5)
    assert group.do(Expire(waiting.job_id, 0, 0, 0, 0)).replayed
    assert phase_of(group, waiting) == Phase.NEXT
    group.occur()
    group.do(Expire(waiting.job_id, 0, 0, 0, 0))
    assert group.seen(waiting) is Status.SKIPPED
    assert why(group, waiting) == "start_deadline"


def test_a_start_deadline_ends_a_counted_run_and_frees_its_place(group: ScheduleGroup) -> None:
    group.put(overlap=Overlap.FORBID, spec={"start_deadline_ms": 1_000})
    first = group.occur()
    assert first is not None
    group.advance(1_001)
    group.do(Expire(first.job_id, 0, 0, 0, 0))
    assert group.course().runs == []


# --- overlap --------------------------------------------------------------------------------------------------------------------


def test_allow_keeps_no_account(group: ScheduleGroup) -> None:
    group.put()
    for _ in range(3):
        group.started()
    assert group.course().runs == [] and group.statuses() == {1: "RUNNING", 2: "RUNNING", 3: "RUNNING", 4: "SCHEDULED"}


def test_forbid_skips_for_good_while_a_run_goes_on(group: ScheduleGroup) -> None:
    """B-033: decided at the occurrence's own instant, whatever the deadline says."""
    group.put(overlap=Overlap.FORBID, starting_deadline_ms=120_000)
    first = group.started()
    second = group.occur()
    assert second is not None and why(group, second) == "overlap"
    group.advance(10_000)
    ended(group, first)
    assert group.statuses() == {1: "SUCCEEDED", 2: "SKIPPED", 3: "SCHEDULED"}
    group.occur()
    assert group.statuses()[3] == "QUEUED"
    assert group.course().skipped[Reason.OVERLAP] == 1


@pytest.mark.parametrize("end", ["succeeded", "fatal", "cancelled", "exhausted", "expired", "cancel by hand", "released after cancel"])
def test_whatever_ends_a_run_frees_its_place(group: ScheduleGroup, end: str) -> None:
    """B-031: a run counts until its end, retries included, and no longer."""
    group.put(overlap=Overlap.FORBID, spec={"max_attempts": 1})
    run = group.started()
    if end in ("succeeded", "fatal", "cancelled", "exhausted"):
        outcome = {
            "succeeded": Outcome.SUCCEEDED, "fatal": Outcome.FATAL_FAILURE, "cancelled": Outcome.CANCELLED,
            "exhausted": Outcome.RETRYABLE_FAILURE,
        }[end]  # fmt: skip
        ended(group, run, outcome)
    elif end == "expired":
        group.do(Expire(run.job_id, run.attempt, run.fencing, int(Outcome.LEASE_EXPIRED), 0))
    else:
        group.cancel(run)
        assert group.course().runs == [run.job_id], "it goes on until the worker ends it"
        if end == "cancel by hand":
            ended(group, run, Outcome.CANCELLED)
        else:
            group.do(Release(run.job_id, run.attempt, run.fencing))
    assert group.course().runs == []


def test_a_run_that_waits_for_its_retry_counts(group: ScheduleGroup) -> None:
    group.put(overlap=Overlap.FORBID)
    run = group.started()
    ended(group, run, Outcome.RETRYABLE_FAILURE)
    second = group.occur()
    assert second is not None and why(group, second) == "overlap"


def test_replace_ends_what_goes_on_and_starts(group: ScheduleGroup) -> None:
    group.put(overlap=Overlap.REPLACE)
    first = group.started()
    second = group.occur()
    assert second is not None
    assert group.seen(first) is Status.CANCEL_REQUESTED and group.course().runs == [second.job_id]
    assert [(row.cause, row.actor) for row in group.attempts(first)] == [("cancel", "schedule s")]
    third = group.occur()
    assert third is not None
    assert group.seen(second) is Status.CANCELLED, "it had not been claimed"
    ended(group, first, Outcome.CANCELLED)
    assert group.course().runs == [third.job_id]


def test_of_two_at_one_instant_the_later_replaces_the_earlier_before_it_started(group: ScheduleGroup) -> None:
    group.put(overlap=Overlap.REPLACE)
    go_to(group, 1)
    first = must(group.start("now"))
    second = group.occur()
    assert second is not None
    assert why(group, first) == "replaced" and group.course().runs == [second.job_id]
    assert group.course().skipped[Reason.REPLACED] == 1


def test_one_waits_and_starts_when_the_run_ends(group: ScheduleGroup) -> None:
    group.put(overlap=Overlap.BUFFER_ONE)
    first, second = group.started(), group.occur()
    third = group.occur()
    assert second is not None and third is not None
    assert phase_of(group, second) == Phase.BUFFERED and group.seen(second) is Status.SCHEDULED
    assert why(group, third) == "buffer_full"
    group.advance(7_000)
    ended(group, first)
    started = group.stored(second)
    assert started is not None and started.fire_at_ms == group.now_ms
    assert group.seen(second) is Status.QUEUED
    assert (group.course().runs, group.course().buffered) == ([second.job_id], b"")


def test_one_that_waited_too_long_gives_its_place_to_the_next(group: ScheduleGroup) -> None:
    group.put(overlap=Overlap.BUFFER_ONE, starting_deadline_ms=30_000)
    group.started()
    second, third = group.occur(), group.occur()
    assert second is not None and third is not None
    assert why(group, second) == "missed_deadline"
    assert group.course().buffered == third.job_id


def test_one_that_waited_too_long_does_not_start_at_the_end(group: ScheduleGroup) -> None:
    group.put(overlap=Overlap.BUFFER_ONE, starting_deadline_ms=30_000)
    first, second = group.started(), group.occur()
    assert second is not None
    group.advance(30_001)
    ended(group, first)
    assert why(group, second) == "missed_deadline"
    assert (group.course().runs, group.course().buffered) == ([], b"")


def test_one_that_waits_can_be_cancelled_moved_and_not_be_run(group: ScheduleGroup) -> None:
    group.put(overlap=Overlap.BUFFER_ONE)
    first, second = group.started(), group.occur()
    assert second is not None
    before = group.rows()
    assert group.run_now(second).refusal == "concurrency-limit"
    assert {**group.rows(), keys.META: {}} == {**before, keys.META: {}}
    assert group.cancel(second).status == Status.CANCELLED
    assert group.course().buffered == b""
    third = group.occur()
    assert third is not None and group.course().buffered == third.job_id
    moved = group.move(third, at(50))
    assert moved.run is not None and moved.run.phase == Phase.SET
    assert group.course().buffered == b""
    ended(group, first)
    assert group.course().runs == []


@pytest.mark.parametrize("overlap", POLICIES)
def test_a_dead_run_that_is_redriven_counts_again(group: ScheduleGroup, overlap: Overlap) -> None:
    group.put(overlap=overlap)
    run = group.started()
    ended(group, run, Outcome.FATAL_FAILURE)
    assert group.course().runs == []
    must(group.act(Redrive(run.job_id, TENANT)))
    assert group.course().runs == [run.job_id]
    again = group.stored(run)
    assert again is not None
    ended(group, group.claim(again))
    assert group.course().runs == []


def test_a_dead_run_that_is_discarded_leaves_no_trace(group: ScheduleGroup) -> None:
    group.put(overlap=Overlap.FORBID)
    run = group.started()
    ended(group, run, Outcome.FATAL_FAILURE)
    assert not group.do(Discard(run.job_id, TENANT)).refusal
    assert group.stored(run) is None


def test_runs_that_go_on_are_counted_when_allow_is_left(group: ScheduleGroup) -> None:
    group.put()
    first, second, third = group.started(), group.started(), group.started()
    ended(group, second)
    group.put(overlap=Overlap.FORBID)
    assert sorted(group.course().runs) == sorted([first.job_id, third.job_id])
    fourth = group.occur()
    assert fourth is not None and why(group, fourth) == "overlap"
    ended(group, first)
    ended(group, third)
    group.occur()
    assert group.statuses()[5] == "QUEUED"


def test_what_counts_and_waits_is_seen_through_when_the_policy_becomes_allow(group: ScheduleGroup) -> None:
    group.put(overlap=Overlap.BUFFER_ONE)
    first, second = group.started(), group.occur()
    assert second is not None
    group.put(overlap=Overlap.ALLOW)
    third = group.occur()
    assert third is not None and phase_of(group, third) == Phase.FREE
    ended(group, first)
    assert group.seen(second) is Status.QUEUED


# --- what was missed ------------------------------------------------------------------------------------------------------------


def test_at_a_recovery_one_job_and_one_record_tell_of_what_was_missed(group: ScheduleGroup) -> None:
    group.put()
    waiting = group.waiting()
    go_to(group, 10.5)
    left_out = [(at(2), at(9), 8, int(Reason.SUPERSEDED))]
    group.occur(missed=True, reason=int(Reason.SUPERSEDED), runs=[(at(10), "")], left_out=left_out, decided_ms=at(10), next=NextRun(at(11)))
    assert why(group, waiting) == "superseded"
    caught_up = group.job_at(at(10))
    assert caught_up is not None and caught_up.run is not None
    assert (caught_up.fire_at_ms, caught_up.run.cause, caught_up.run.phase) == (at(10.5), Cause.CATCH_UP, Phase.FREE)
    assert group.skips() == [SkipRow(at(2), at(9), 8, Reason.SUPERSEDED)]
    assert group.course().skipped[Reason.SUPERSEDED] == 9
    skipped = [effect for effect in group.effects if isinstance(effect, OccurrencesSkipped)]
    assert sum(effect.count for effect in skipped) == 9
    assert group.statuses() == {1: "SKIPPED", 10: "QUEUED", 11: "SCHEDULED"}


def test_the_record_grows_while_nothing_runs_in_between(group: ScheduleGroup) -> None:
    group.put(shadow=True)
    for _ in range(5):
        group.occur()
    assert group.skips() == [SkipRow(at(1), at(5), 5, Reason.SHADOW)]
    must(group.start("now"))
    group.occur()
    assert group.skips() == [SkipRow(at(1), at(5), 5, Reason.SHADOW), SkipRow(at(6), at(6), 1, Reason.SHADOW)]
    assert group.statuses() == {7: "SCHEDULED"}, "what would have run leaves no job"


def test_what_was_moved_gets_a_record_of_its_own(group: ScheduleGroup) -> None:
    """It comes after later ones have been recorded, and no record reaches over another."""
    group.put(shadow=True)
    group.occur()
    moved = [group.move(group.waiting(), at(5.5), successor=group.successor())]
    group.occur()
    moved.append(group.move(group.waiting(), at(5.5), successor=group.successor()))
    group.occur()
    go_to(group, 5.5)
    group.fire(*moved)
    group.occur()
    assert [(skip.from_ms, skip.to_ms, skip.count) for skip in group.skips()] == [
        (at(1), at(1), 1), (at(2), at(2), 1), (at(3), at(3), 1), (at(4), at(4), 1), (at(5), at(6), 2),
    ]  # fmt: skip


def test_records_are_kept_up_to_their_number_and_the_oldest_go_first(group: ScheduleGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: each outage makes one, for something ran in between; and the bound is five instead of a thousand."""
    monkeypatch.setattr(schedules, "SKIP_ROWS_MAX", 5)
    group.put()
    for number in range(8):
        first = 1 + number * 4
        go_to(group, first + 3.5)
        group.occur(
            missed=True, reason=int(Reason.SUPERSEDED), runs=[(at(first + 2), "")],
            left_out=[(at(first + 1), at(first + 1), 1, int(Reason.SUPERSEDED))], decided_ms=at(first + 3), next=NextRun(at(first + 4)),
        )  # fmt: skip
    assert [skip.from_ms for skip in group.skips()] == [at(2 + number * 4) for number in range(3, 8)]
    assert group.course().skipped[Reason.SUPERSEDED] == 16, "counted for ever"


# --- pause, resume --------------------------------------------------------------------------------------------------------------


def test_a_pause_withdraws_the_next_one_and_going_on_records_what_it_left_out(group: ScheduleGroup) -> None:
    """B-035: no run at an off-schedule instant when it goes on."""
    group.put()
    group.occur()
    go_to(group, 1.2)
    group.pause()
    assert (group.definition().paused, group.definition().version, group.course().next_at_ms) == (True, 2, -1)
    assert group.statuses() == {1: "QUEUED"}, "gone, not CANCELLED"
    go_to(group, 8.3)
    group.resume()
    assert group.skips() == [SkipRow(at(2), at(8), 7, Reason.PAUSED)]
    assert group.statuses() == {1: "QUEUED", 9: "SCHEDULED"}
    assert group.course().decided_ms == at(8.3)


def test_a_pause_between_two_occurrences_leaves_nothing_out(group: ScheduleGroup) -> None:
    group.put()
    group.advance(1_000)
    group.pause()
    group.advance(1_000)
    group.resume()
    assert (group.skips(), group.statuses()) == ([], {1: "SCHEDULED"})


@pytest.mark.parametrize("paused", [True, False])
def test_what_is_so_already_changes_nothing(group: ScheduleGroup, paused: bool) -> None:
    group.put()
    if paused:
        group.pause()
    before = group.rows()
    assert group.do(group.pause_command(paused)).replayed
    assert group.rows() == before


def test_a_schedule_is_put_paused_changed_paused_and_goes_on_by_a_put(group: ScheduleGroup) -> None:
    assert not group.do(group.put_command(a_definition(), paused=1)).refusal
    assert (group.definition().paused, group.course().next_at_ms) == (True, -1)
    go_to(group, 5.5)
    group.put(priority=0)
    assert group.definition().paused
    assert not group.do(group.put_command(a_definition(priority=0), paused=0)).refusal
    assert (group.definition().paused, group.definition().version, group.course().next_at_ms) == (False, 3, at(6))


def test_runs_by_hand_go_on_while_it_is_paused(group: ScheduleGroup) -> None:
    group.put(overlap=Overlap.FORBID)
    group.pause()
    run = must(group.start("now"))
    assert group.seen(run) is Status.QUEUED and group.course().runs == [run.job_id]
    assert group.start("again").refusal == "concurrency-limit"


# --- runs by hand, backfill -----------------------------------------------------------------------------------------------------


def test_a_run_by_hand_moves_nothing(group: ScheduleGroup) -> None:
    """B-048: it carries its own id, says that it is manual, and the timetable stands."""
    group.put(payload=b'"template"')
    go_to(group, 0.3)
    run = must(group.start("now", payload=b'"mine"'))
    assert run.run is not None and (run.run.cause, run.run.scheduled_for_ms) == (Cause.MANUAL, -1)
    assert (run.fire_at_ms, group.seen(run)) == (at(0.3), Status.QUEUED)
    assert group.course().next_at_ms == at(1)
    group.occur()
    assert group.course().next_at_ms == at(2)


@pytest.mark.parametrize(("overlap", "refused"), [(Overlap.FORBID, True), (Overlap.ALLOW, False), (Overlap.REPLACE, False)])
def test_a_run_by_hand_meets_the_policy_too(group: ScheduleGroup, overlap: Overlap, refused: bool) -> None:
    group.put(overlap=overlap)
    first = group.started()
    reply = group.start("now")
    assert (reply.refusal == "concurrency-limit") is refused
    if overlap is Overlap.REPLACE:
        assert group.seen(first) is Status.CANCEL_REQUESTED


def test_a_run_by_hand_waits_in_the_buffer_and_a_second_is_refused(group: ScheduleGroup) -> None:
    group.put(overlap=Overlap.BUFFER_ONE)
    first = group.started()
    run = must(group.start("now"))
    assert group.course().buffered == run.job_id and group.seen(run) is Status.SCHEDULED
    assert group.start("again").refusal == "concurrency-limit"
    group.advance(1_000)
    ended(group, first)
    assert group.seen(run) is Status.QUEUED


def test_a_run_set_for_later_meets_the_policy_when_its_time_comes(group: ScheduleGroup) -> None:
    group.put(overlap=Overlap.FORBID)
    run = must(group.start("later", delay_ms=90_000))
    assert run.held and phase_of(group, run) == Phase.SET
    group.started()
    go_to(group, 1.5)
    group.fire(run)
    assert group.seen(run) is Status.SKIPPED
    assert why(group, run) == "overlap"


def test_a_run_by_hand_with_a_key_is_made_once(group: ScheduleGroup) -> None:
    group.put()
    first = group.start("keyed", fingerprint=b"f" * 16)
    again = group.start("keyed", fingerprint=b"f" * 16)
    assert again.replayed and must(again).job_id == must(first).job_id
    assert group.start("keyed", fingerprint=b"g" * 16).refusal == "idempotency-key-reused"
    state = must(first)
    ended(group, group.claim(state))
    group.advance(KEEP_KEYED_MS - 1)
    assert group.do(Purge(TENANT, "mail", int(Status.SUCCEEDED), group.now_ms)).count == 0


def test_running_the_next_one_early_under_forbid_is_refused_while_a_run_goes_on(group: ScheduleGroup) -> None:
    group.put(overlap=Overlap.FORBID)
    group.started()
    waiting = group.waiting()
    before = group.rows()
    assert group.run_now(waiting, successor=group.successor()).refusal == "concurrency-limit"
    assert group.rows()[keys.SCHEDULES] == before[keys.SCHEDULES] and group.rows()[keys.STATE] == before[keys.STATE]


def test_running_the_next_one_early_lets_it_wait_in_the_buffer(group: ScheduleGroup) -> None:
    group.put(overlap=Overlap.BUFFER_ONE)
    first, waiting = group.started(), group.waiting()
    run = must(group.run_now(waiting, successor=group.successor()))
    assert group.course().buffered == run.job_id and run.held
    ended(group, first)
    assert group.seen(run) is Status.QUEUED


def test_a_backfill_makes_each_occurrence_once(group: ScheduleGroup) -> None:
    group.put()
    go_to(group, 20)
    group.occur(missed=True, reason=int(Reason.MISSED), runs=[], left_out=[(at(2), at(20), 19, int(Reason.MISSED))],
                decided_ms=at(20), next=NextRun(at(21)))  # fmt: skip
    assert group.backfill(1, 2, 3) == (2, 0, 1), "the first has its job already, a skipped one"
    run = group.job_at(at(2))
    assert run is not None and run.run is not None
    assert (run.run.cause, run.run.from_ms, run.fire_at_ms) == (Cause.BACKFILL, at(1), at(20))
    before = group.rows()
    assert group.backfill(1, 2, 3) == (0, 0, 3)
    assert group.rows()[keys.STATE] == before[keys.STATE]


@pytest.mark.parametrize(
    ("overlap", "counts"), [(Overlap.FORBID, (1, 2, 0)), (Overlap.BUFFER_ONE, (2, 1, 0)), (Overlap.REPLACE, (3, 0, 0))]
)
def test_a_backfill_meets_the_policy(group: ScheduleGroup, overlap: Overlap, counts: tuple[int, ...]) -> None:
    group.put(overlap=overlap, start_ms=at(30))
    go_to(group, 10)
    assert group.backfill(1, 2, 3) == counts
    assert group.skips() == [], "what a backfill leaves out had been dealt with before"


def test_an_occurrence_that_a_backfill_made_is_passed_over_when_its_time_comes(group: ScheduleGroup) -> None:
    group.put()
    group.backfill(2, 3)
    group.occur()
    assert group.course().next_at_ms == at(4)


def test_a_run_that_has_been_purged_can_be_backfilled_again(group: ScheduleGroup) -> None:
    group.put()
    ended(group, group.started())
    group.advance(1_000)
    assert group.do(Purge(TENANT, "mail", int(Status.SUCCEEDED), group.now_ms)).count == 1
    assert group.backfill(1) == (1, 0, 0)


# --- time-zone data -------------------------------------------------------------------------------------------------------------


def test_newer_zone_data_moves_the_waiting_occurrence(group: ScheduleGroup) -> None:
    """B-019, in the log: neither an extra run nor a lost one."""
    group.put()
    version = group.definition().version
    group.do(Rezone(TENANT, "s", version, at(1), NextRun(at(1), "", "2026b", "d1")))
    assert (group.course().zone_version, group.course().zone_digest, group.statuses()) == ("2026b", "d1", {1: "SCHEDULED"})
    reply = group.do(Rezone(TENANT, "s", version, at(1), NextRun(at(4), "", "2026c", "d2")))
    assert not reply.refusal and not reply.replayed
    assert group.statuses() == {4: "SCHEDULED"}
    assert (group.course().zone_version, group.course().decided_ms) == ("2026c", START_MS)
    reply = group.do(Rezone(TENANT, "s", version, at(4), NextRun(-1, "", "2026d", "d3")))
    assert not reply.refusal and group.statuses() == {} and group.course().zone_version == "2026d"


def test_a_paused_schedule_is_not_moved(group: ScheduleGroup) -> None:
    group.put()
    group.pause()
    assert group.do(Rezone(TENANT, "s", 2, -1, NextRun(at(4)))).refusal == "outdated"


# --- effects --------------------------------------------------------------------------------------------------------------------


def test_the_leader_is_told_of_every_change(group: ScheduleGroup) -> None:
    group.put()
    assert ScheduleChanged(TENANT, "s") in group.effects
    group.occur()
    causes = [effect.cause for effect in group.effects if isinstance(effect, JobChanged)]
    assert causes == ["fire", "create"]
    group.pause()
    assert [(cause, after) for cause, _, after in group.changes()] == [("withdraw", None)]
    assert ScheduleChanged(TENANT, "s") in group.effects


def test_rows_of_an_earlier_release_are_read_with_defaults() -> None:
    """Fields are only ever appended: a row that lacks the last ones means their defaults."""
    definition: Any = msgspec.msgpack.decode(msgspec.msgpack.encode(a_definition()))
    short = msgspec.convert(definition[:10], type(a_definition()))
    assert short.overlap == Overlap.ALLOW and short.starting_deadline_ms == -1
