"""Recurring schedules: one next occurrence each, and what becomes of it when its time has come.

Kept by every command here: a schedule that is not paused and has an occurrence left has exactly one job of phase NEXT
(`one_next_occurrence`), and an occurrence's job id follows from schedule and instant, so that it is made once however often it is
computed (`one_job_per_occurrence`). What takes the NEXT one away inserts its successor in the same command, so no chain breaks.

The leader computed the instants. Where a command was computed from what is no longer so, it changes nothing and is answered
`outdated`, and the leader computes again; `occurrence-due` says that the waiting occurrence has to be decided first. Neither reaches
a client.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec.structs import replace

from wheelsched.core import limits
from wheelsched.core.ids import occurrence_id
from wheelsched.core.invariants import invariant
from wheelsched.engine.context import (
    CANCEL_REQUESTED,
    CANCELLED,
    RUNNING,
    SCHEDULED,
    SKIPPED,
    Context,
    created_again,
    placed,
)
from wheelsched.engine.purge import drop_attempts
from wheelsched.model import keys
from wheelsched.model.commands import (
    Backfill,
    DropSchedule,
    Occur,
    PauseSchedule,
    PutSchedule,
    Reply,
    Rezone,
    RunNow,
    StartRun,
)
from wheelsched.model.effects import JobChanged, OccurrencesSkipped, ScheduleChanged
from wheelsched.model.rows import (
    JobState,
    decode_definition,
    decode_spec,
    encode_row,
    is_final,
    run_instant_ms,
    split_job,
)
from wheelsched.model.schedules import (
    LATE_ALLOWED_MS,
    REASONS,
    SKIP_ROWS_MAX,
    Cause,
    Course,
    Definition,
    NextRun,
    Overlap,
    Phase,
    Reason,
    Run,
    SkipRow,
    Successor,
    same_definition,
    same_timing,
)

OUTDATED: Final = "outdated"
OCCURRENCE_DUE: Final = "occurrence-due"

_NEXT, _SET, _BUFFERED, _FREE, _COUNTED = (int(phase) for phase in Phase)
_ALLOW, _FORBID, _REPLACE, _BUFFER_ONE = (int(overlap) for overlap in Overlap)
_ON_TIME, _CATCH_UP, _MANUAL, _BACKFILL = (int(cause) for cause in Cause)
# Unfinished runs looked for when a schedule leaves `allow`, which keeps no account of them.
_ADOPTED_MAX: Final = 1_000
_WHY: Final = {
    Reason.OVERLAP: "an earlier run was still going (overlap: forbid)",
    Reason.BUFFER_FULL: "an earlier run was still going and another occurrence already waited (overlap: buffer_one)",
    Reason.REPLACED: "a later occurrence took its place before it started (overlap: replace)",
    Reason.MISSED: "it was due while nothing could fire (missed_runs: skip)",
    Reason.MISSED_DEADLINE: "it could only have started later than starting_deadline_s allows",
    Reason.SUPERSEDED: "it was due while nothing could fire, and a later one was (missed_runs: run_latest)",
    Reason.CATCH_UP_CAP: "more occurrences were missed than run_all catches up",
}


# --- definitions ----------------------------------------------------------------------------------------------------------------


def put_schedule(context: Context, command: PutSchedule) -> Reply:
    """Create or replace. `count` of the reply is 1 where it was created."""
    wanted = decode_definition(command.definition)
    existing = _definition(context, wanted.tenant, wanted.name)
    if existing is None:
        return _create(context, command, wanted)
    if command.create:
        return _create_again(existing, wanted)
    if command.if_version and command.if_version != existing.version:
        detail = f"schedule {existing.name} is at version {existing.version}, not {command.if_version}; read it again"
        return Reply("version-mismatch", detail)
    paused = existing.paused if command.paused == -1 else bool(command.paused)
    if same_definition(existing, wanted) and paused == existing.paused:
        return Reply(replayed=True)
    course = _course(context, existing)
    if _is_due(context, existing, course):
        return Reply(OCCURRENCE_DUE)
    if not paused and _is_taken(context, existing.schedule_id, command.next, besides=course.next_job):
        return Reply(OUTDATED)
    _withdraw_next(context, course)
    if not same_timing(existing, wanted):
        # Instants of a pattern before its own version began are not missed ones.
        course.decided_ms = context.stamp_ms
    elif paused != existing.paused:
        # Nor are those while it stood still; what was run or cancelled ahead of its time stays so.
        course.decided_ms = max(course.decided_ms, context.stamp_ms)
    if existing.overlap == _ALLOW and wanted.overlap != _ALLOW:
        _adopt_runs(context, course)
    definition = replace(
        wanted, schedule_id=existing.schedule_id, version=existing.version + 1, created_at_ms=existing.created_at_ms,
        updated_at_ms=context.time_ms, paused=paused, key_digest=existing.key_digest, fingerprint=existing.fingerprint,
    )  # fmt: skip
    _store(context, definition, course, command.next)
    return Reply()


def _create(context: Context, command: PutSchedule, wanted: Definition) -> Reply:
    if command.if_version:
        return _no_schedule(wanted.name)
    definition = replace(
        wanted, version=1, created_at_ms=context.time_ms, updated_at_ms=context.time_ms, paused=command.paused == 1
    )  # fmt: skip
    course = Course(definition.schedule_id, 1, context.stamp_ms)
    _store(context, definition, course, command.next)
    return Reply(count=1)


def _create_again(existing: Definition, wanted: Definition) -> Reply:
    if not wanted.key_digest or wanted.key_digest != existing.key_digest:
        return Reply("name-taken", f"there is a schedule {existing.name} already; PUT replaces it, PATCH changes it")
    if wanted.fingerprint != existing.fingerprint:
        return Reply("idempotency-key-reused", f"schedule {existing.name} was made with this Idempotency-Key and another body")
    return Reply(replayed=True)


def _store(context: Context, definition: Definition, course: Course, following: NextRun) -> None:
    """Write the definition, and the waiting occurrence where it is to have one."""
    course.version = definition.version
    course.zone = definition.zone
    course.skip_count = 0  # what is left out from now on may be of another pattern
    context.txn.put(keys.SCHEDULES, keys.definition_key(context.group, definition.tenant, definition.name), encode_row(definition))
    _insert_next(context, definition, course, NextRun() if definition.paused else following)
    context.effects.append(ScheduleChanged(definition.tenant, definition.name))


def drop_schedule(context: Context, command: DropSchedule) -> Reply:
    """Delete; runs that were fired go on, and those set by hand fire at their time."""
    definition = _definition(context, command.tenant, command.name)
    if definition is None:
        return _no_schedule(command.name)
    course = _course(context, definition)
    if _is_due(context, definition, course):
        return Reply(OCCURRENCE_DUE)
    _withdraw_next(context, course)
    if course.buffered:
        _withdraw(context, _state(context, course.buffered))
    txn, group = context.txn, context.group
    txn.delete(keys.SCHEDULES, keys.definition_key(group, command.tenant, command.name))
    txn.put_course(command.tenant, command.name, None)
    prefix = keys.skips_prefix(group, definition.schedule_id)
    txn.delete_range(keys.SCHEDULES, prefix, keys.prefix_end(prefix))
    context.effects.append(ScheduleChanged(command.tenant, command.name))
    return Reply()


def pause_schedule(context: Context, command: PauseSchedule) -> Reply:
    definition = _definition(context, command.tenant, command.name)
    if definition is None:
        return _no_schedule(command.name)
    if definition.paused == command.paused:
        return Reply(replayed=True)
    course = _course(context, definition)
    if command.paused:
        if _is_due(context, definition, course):
            return Reply(OCCURRENCE_DUE)
        _withdraw_next(context, course)
        course.decided_ms = max(course.decided_ms, context.stamp_ms)
    else:
        if command.version != definition.version or _is_taken(context, definition.schedule_id, command.next):
            return Reply(OUTDATED)
        if command.left_out is not None:
            _leave_out(context, definition, course, *command.left_out, int(Reason.PAUSED))
        course.decided_ms = max(course.decided_ms, context.stamp_ms)
    definition = replace(definition, paused=command.paused, version=definition.version + 1, updated_at_ms=context.time_ms)
    _store(context, definition, course, command.next)
    return Reply()


def rezone(context: Context, command: Rezone) -> Reply:
    """The waiting occurrence at its instant by other time-zone data; only a newer version is proposed, so nodes take no turns."""
    definition, course = _find(context, command.tenant, command.name, command.version)
    if definition is None or course is None or course.next_at_ms != command.at_ms or definition.paused:
        return Reply(OUTDATED)
    following = command.next
    if following.at_ms == course.next_at_ms:
        course.zone_version, course.zone_digest = following.zone_version, following.zone_digest
        context.txn.put_course(command.tenant, command.name, course)
        return Reply(replayed=True)
    if _is_taken(context, definition.schedule_id, following):
        return Reply(OUTDATED)
    _withdraw_next(context, course)
    _insert_next(context, definition, course, following)
    return Reply()


# --- occurrences ----------------------------------------------------------------------------------------------------------------


def occur(context: Context, command: Occur) -> Reply:
    """Decide the waiting occurrence, and with it what was missed since; insert its successor."""
    definition, course = _find(context, command.tenant, command.name, command.version)
    if definition is None or course is None or definition.paused or course.next_at_ms != command.at_ms:
        return Reply(OUTDATED)
    if _is_taken(context, definition.schedule_id, command.next):
        return Reply(OUTDATED)
    before = _take_next(context, course)
    course.decided_ms = max(course.decided_ms, command.at_ms, command.decided_ms)
    cause = _CATCH_UP if command.missed else _ON_TIME
    runs, reason = command.runs, command.reason
    if not command.missed and _is_too_late(context, definition, before.fire_at_ms, LATE_ALLOWED_MS):
        runs, reason = [], int(Reason.MISSED_DEADLINE)
    if not runs or runs[0][0] != command.at_ms:
        _leave(context, definition, course, before, command.at_ms, reason)
    for first_ms, last_ms, count, why in command.left_out:
        _leave_out(context, definition, course, first_ms, last_ms, count, why)
    for place, (at_ms, nominal) in enumerate(runs):
        state = before if at_ms == command.at_ms else None
        if definition.overlap == _REPLACE and place < len(runs) - 1:
            _leave(context, definition, course, state, at_ms, int(Reason.REPLACED))
        else:
            _offer(context, definition, course, state, at_ms, nominal, cause)
    _insert_next(context, definition, course, command.next)
    return Reply()


def offer_set(context: Context, before: JobState) -> None:
    """A run that was set to a time of its own is due: overlap is decided now."""
    run = before.run
    assert run is not None
    definition, course = _of_run(context, before)
    if definition is None or course is None:
        _start(context, before, run, _FREE)
        return
    _offer(context, definition, course, before, run.scheduled_for_ms, run.nominal, run.cause)
    context.txn.put_course(definition.tenant, definition.name, course)


def _offer(
    context: Context, definition: Definition, course: Course, before: JobState | None, at_ms: int, nominal: str, cause: int,
    *, from_ms: int = -1, payload: bytes | None = None,
) -> JobState | None:  # fmt: skip
    """Start it, let it wait, or leave it out, as the overlap policy says (vectors/README.md, "Offering"). None: left out."""
    if definition.shadow and cause != _MANUAL:
        _leave(context, definition, course, before, at_ms, int(Reason.SHADOW), record=cause != _BACKFILL)
        return None
    overlap = definition.overlap
    if overlap == _FORBID and course.runs:
        _leave(context, definition, course, before, at_ms, int(Reason.OVERLAP), record=cause != _BACKFILL)
        return None
    phase = _FREE if overlap == _ALLOW else _COUNTED
    if overlap == _REPLACE:
        _replace_runs(context, definition, course)
    elif overlap == _BUFFER_ONE and (course.runs or course.buffered):
        _drop_late_buffered(context, definition, course)
        if course.buffered:
            _leave(context, definition, course, before, at_ms, int(Reason.BUFFER_FULL), record=cause != _BACKFILL)
            return None
        phase = _BUFFERED
    if from_ms == -1 and cause in (_ON_TIME, _CATCH_UP) and course.covered_ms < at_ms:
        from_ms = course.covered_ms
    if before is not None and before.run is not None:
        nominal = before.run.nominal
    run = Run(definition.schedule_id, definition.name, at_ms, phase, cause, from_ms, nominal, definition.max_concurrency >= 0)
    if before is None:
        state = _create_run(context, definition, run, occurrence_id(definition.schedule_id, at_ms), context.stamp_ms, payload)
    else:
        state = _start(context, before, run, phase)
    _note_started(course, state)
    return state


def _note_started(course: Course, state: JobState) -> None:
    run = state.run
    assert run is not None
    if run.phase == _BUFFERED:
        course.buffered = state.job_id
    elif run.phase == _COUNTED:
        course.runs.append(state.job_id)
    if run.scheduled_for_ms >= 0:
        course.covered_ms = max(course.covered_ms, run.scheduled_for_ms)
    course.last_at_ms, course.last_job = run_instant_ms(state), state.job_id


def _create_run(
    context: Context, definition: Definition, run: Run, job_id: bytes, fire_at_ms: int, payload: bytes | None,
    *, fingerprint: bytes = b"",
) -> JobState:  # fmt: skip
    """A job for a run, from the template. Held, unless it starts now."""
    spec = decode_spec(definition.spec)
    lane, _ = placed(job_id, fire_at_ms, definition.window_ms)
    now_ms = context.time_ms
    state = JobState(
        job_id, SCHEDULED, 1, definition.tenant, definition.queue, lane, definition.priority, fire_at_ms, now_ms, now_ms,
        run.phase <= _BUFFERED, fingerprint=fingerprint, keep_until_ms=now_ms + limits.KEEP_KEYED_MS if fingerprint else 0,
        max_attempts=spec.max_attempts, initial_backoff_ms=spec.initial_backoff_ms, max_backoff_ms=spec.max_backoff_ms,
        timeout_ms=spec.timeout_ms, start_deadline_ms=spec.start_deadline_ms, run_at_ms=fire_at_ms, run=run,
    )  # fmt: skip
    context.put_job(state, definition.spec, definition.payload if payload is None else payload)
    context.txn.put(keys.SCHEDULES, keys.run_key(context.group, run.schedule_id, run_instant_ms(state), job_id), b"")
    context.change("create", None, state)
    return state


def _start(context: Context, before: JobState, run: Run, phase: int) -> JobState:
    """A held run starts, or begins to wait in the buffer. One on time keeps its instant; one that comes later starts now."""
    run = replace(run, phase=phase)
    if phase == _BUFFERED:
        after = replace(before, run=run)
        context.change("buffer", before, after)
        return after
    if run.cause == _CATCH_UP or (before.run is not None and before.run.phase == _BUFFERED):
        after = _moved(context, before, replace(before, held=False, run=run, fire_at_ms=context.stamp_ms))
    else:
        after = replace(before, held=False, run=run)
    context.txn.put_state(after.job_id, after)
    context.effects.append(JobChanged("fire", before, after))
    return after


def _moved(context: Context, before: JobState, after: JobState) -> JobState:
    spec, payload = split_job(context.job_row(before))
    context.drop_job(before)
    context.put_job(after, spec, payload)
    return after


def run_ended(context: Context, state: JobState) -> None:
    """A run is finished: it counts no more, and one that waited for it starts."""
    run = state.run
    assert run is not None
    if run.phase != _COUNTED:
        return
    course = context.txn.course(state.tenant, run.schedule)
    if course is None or course.schedule_id != run.schedule_id or state.job_id not in course.runs:
        return
    course.runs.remove(state.job_id)
    if course.buffered and not course.runs:
        definition = _definition(context, state.tenant, run.schedule)
        assert definition is not None
        _start_buffered(context, definition, course)
    context.txn.put_course(state.tenant, run.schedule, course)


def run_again(context: Context, state: JobState) -> None:
    """A dead run was redriven: it counts again."""
    assert state.run is not None
    if state.run.phase == _COUNTED:
        definition, course = _of_run(context, state)
        if definition is not None and course is not None and state.job_id not in course.runs:
            course.runs.append(state.job_id)
            context.txn.put_course(definition.tenant, definition.name, course)


def _start_buffered(context: Context, definition: Definition, course: Course) -> None:
    _drop_late_buffered(context, definition, course)
    if not course.buffered:
        return
    before = _state(context, course.buffered)
    assert before.run is not None
    course.buffered = b""
    # It is due at the stamp: the next sweep's Fire passes it.
    course.runs.append(_start(context, before, before.run, _COUNTED).job_id)


def _drop_late_buffered(context: Context, definition: Definition, course: Course) -> None:
    if course.buffered:
        before = _state(context, course.buffered)
        assert before.run is not None
        at_ms = before.run.scheduled_for_ms
        due_ms = before.fire_at_ms if at_ms == -1 else at_ms + definition.offset_ms
        if _is_too_late(context, definition, due_ms, 0):
            course.buffered = b""
            _leave(context, definition, course, before, due_ms, int(Reason.MISSED_DEADLINE))


def _is_too_late(context: Context, definition: Definition, due_ms: int, allowed_ms: int) -> bool:
    deadline_ms = definition.starting_deadline_ms
    return deadline_ms >= 0 and context.stamp_ms - due_ms > max(deadline_ms, allowed_ms)


def _replace_runs(context: Context, definition: Definition, course: Course) -> None:
    """Every run that is going ends now; one that was fired at this very instant does not count as started."""
    going, course.runs = course.runs, []
    for job_id in going:
        before = context.txn.state(job_id)
        if before is None or is_final(before) or before.status == CANCEL_REQUESTED:
            continue
        if before.attempt == 0 and before.fire_at_ms == context.stamp_ms and before.status == SCHEDULED:
            _skip_job(context, before, int(Reason.REPLACED))
            _count_skipped(context, definition, course, int(Reason.REPLACED), 1, before.fire_at_ms, before.fire_at_ms)
        else:
            cancel_job(context, before, actor=f"schedule {definition.name}", detail="replaced by a later run")


# --- runs by hand ---------------------------------------------------------------------------------------------------------------


def start_run(context: Context, command: StartRun) -> Reply:
    """A run now, or at a time of its own."""
    if command.fingerprint and (existing := context.txn.state(command.job_id)) is not None:
        return created_again(existing, command.fingerprint)
    definition = _definition(context, command.tenant, command.name)
    if definition is None:
        return _no_schedule(command.name)
    course = _course(context, definition)
    at_ms = command.run_at_ms if command.run_at_ms != -1 else context.stamp_ms + command.delay_ms
    phase = _SET
    if at_ms <= context.stamp_ms:
        if (refusal := _refusal_by_hand(context, definition, course)) is not None:
            return refusal
        at_ms = context.stamp_ms
        phase = _free_phase(context, definition, course)
    run = Run(definition.schedule_id, definition.name, -1, phase, _MANUAL, capped=definition.max_concurrency >= 0)
    state = _create_run(context, definition, run, command.job_id, at_ms, command.payload, fingerprint=command.fingerprint)
    if phase != _SET:
        _note_started(course, state)
        context.txn.put_course(definition.tenant, definition.name, course)
    return Reply(state=state)


def _refusal_by_hand(context: Context, definition: Definition, course: Course) -> Reply | None:
    if definition.overlap == _FORBID and course.runs:
        return Reply("concurrency-limit", f"a run of {definition.name} is going and overlap is forbid; wait for its end or cancel it")
    if definition.overlap == _BUFFER_ONE and course.runs:
        _drop_late_buffered(context, definition, course)
        if course.buffered:
            return Reply("concurrency-limit", f"a run of {definition.name} is going and another waits for its end (buffer_one)")
    return None


def _free_phase(context: Context, definition: Definition, course: Course) -> int:
    """The phase of a run that starts now and that nothing forbids."""
    if definition.overlap == _ALLOW:
        return _FREE
    if definition.overlap == _REPLACE:
        _replace_runs(context, definition, course)
    return _BUFFERED if definition.overlap == _BUFFER_ONE and course.runs else _COUNTED


def run_held(context: Context, command: RunNow, before: JobState) -> Reply:
    """`:run` of a run that is held: it starts now, and where it was the next one its successor stands."""
    run = before.run
    assert run is not None
    definition, course = _of_run(context, before)
    if run.phase == _BUFFERED and course is not None:
        return Reply("concurrency-limit", f"an earlier run of {run.schedule} is going, and this one waits for its end")
    if run.phase == _NEXT and not _succeeds(context, definition, course, before, command.successor):
        return Reply(OUTDATED, state=before)
    phase = _FREE
    if definition is not None and course is not None:
        if (refusal := _refusal_by_hand(context, definition, course)) is not None:
            return replace(refusal, state=before)
        if run.phase == _NEXT:
            _take_next(context, course)
            course.decided_ms = max(course.decided_ms, run.scheduled_for_ms)
        phase = _free_phase(context, definition, course)
    after = replace(
        before, fire_at_ms=context.stamp_ms, held=phase == _BUFFERED, version=before.version + 1, updated_at_ms=context.time_ms,
        run=replace(run, phase=phase),
    )  # fmt: skip
    _moved(context, before, after)
    context.record_event("run", before, after, actor=command.actor)
    context.change("run", before, after)
    if definition is not None and course is not None:
        _note_started(course, after)
        if run.phase == _NEXT:
            assert command.successor is not None
            _insert_next(context, definition, course, command.successor.next)
        context.txn.put_course(definition.tenant, definition.name, course)
    return Reply(state=after)


def take_away(context: Context, before: JobState, successor: Successor | None) -> bool:
    """Before a held run is cancelled or moved: its place in the schedule's course is given up. False: the command is outdated."""
    run = before.run
    if run is None or run.phase not in (_NEXT, _BUFFERED):
        return True
    definition, course = _of_run(context, before)
    if definition is None or course is None:
        return True
    if run.phase == _BUFFERED:
        course.buffered = b""
    elif not _succeeds(context, definition, course, before, successor):
        return False
    else:
        assert successor is not None
        _take_next(context, course)
        course.decided_ms = max(course.decided_ms, run.scheduled_for_ms)
        course.skip_count = 0
        _insert_next(context, definition, course, successor.next)
    context.txn.put_course(definition.tenant, definition.name, course)
    return True


def _succeeds(
    context: Context, definition: Definition | None, course: Course | None, before: JobState, successor: Successor | None
) -> bool:
    """Whether the successor that came with a command was computed from what is so now."""
    return (
        successor is not None
        and definition is not None
        and course is not None
        and course.next_job == before.job_id
        and successor.version == definition.version
        and successor.at_ms == course.next_at_ms
        and not _is_taken(context, definition.schedule_id, successor.next)
    )


def backfill(context: Context, command: Backfill) -> Reply:
    """A run for each instant without a job, subject to overlap; `counts` says what became of them."""
    definition, course = _find(context, command.tenant, command.name, command.version)
    if definition is None or course is None:
        return _no_schedule(command.name) if _definition(context, command.tenant, command.name) is None else Reply(OUTDATED)
    made = left_out = had = 0
    for at_ms, from_ms, nominal in command.instants:
        if context.txn.state(occurrence_id(definition.schedule_id, at_ms)) is not None:
            had += 1
        elif _offer(context, definition, course, None, at_ms, nominal, _BACKFILL, from_ms=from_ms) is None:
            left_out += 1
        else:
            made += 1
    context.txn.put_course(definition.tenant, definition.name, course)
    return Reply(counts=(made, left_out, had))


# --- what was left out ----------------------------------------------------------------------------------------------------------


def _leave(
    context: Context, definition: Definition, course: Course, before: JobState | None, at_ms: int, reason: int,
    *, record: bool = True,
) -> None:  # fmt: skip
    """An occurrence does not run: one that has a job is SKIPPED, any other is a record."""
    if before is not None and reason != Reason.SHADOW:
        _skip_job(context, before, reason)
        _count_skipped(context, definition, course, reason, 1, at_ms, at_ms)
        course.skip_count = 0  # no record reaches over an occurrence that has a job
        return
    was_moved = False
    if before is not None:
        was_moved = before.run is not None and before.run.phase == _SET
        _withdraw(context, before)
    if record:
        _leave_out(context, definition, course, at_ms, at_ms, 1, reason, alone=was_moved)
    else:
        _count_skipped(context, definition, course, reason, 1, at_ms, at_ms)


def _leave_out(
    context: Context, definition: Definition, course: Course, first_ms: int, last_ms: int, count: int, reason: int,
    *, alone: bool = False,
) -> None:  # fmt: skip
    """Record occurrences without rows; the record before is extended where it says the same and no job lies in between. `alone`: of
    one that had been moved, which comes after later ones; theirs goes on without it."""
    if not alone and course.skip_count and course.skip_reason == reason and course.last_at_ms < course.skip_from_ms <= first_ms:
        row = SkipRow(course.skip_from_ms, last_ms, course.skip_count + count, reason)
    else:
        row = SkipRow(first_ms, last_ms, count, reason)
        _make_room_for_record(context, definition, course)
    if not alone:
        course.skip_from_ms, course.skip_count, course.skip_reason = row.from_ms, row.count, reason
    context.txn.put(keys.SCHEDULES, keys.skip_key(context.group, definition.schedule_id, row.from_ms), encode_row(row))
    _count_skipped(context, definition, course, reason, count, first_ms, last_ms)


def _make_room_for_record(context: Context, definition: Definition, course: Course) -> None:
    course.skip_row_count += 1
    if course.skip_row_count > SKIP_ROWS_MAX:
        prefix = keys.skips_prefix(context.group, definition.schedule_id)
        for key, _ in context.txn.scan(keys.SCHEDULES, prefix, keys.prefix_end(prefix), 1):
            context.txn.delete(keys.SCHEDULES, key)
            course.skip_row_count -= 1


def _count_skipped(context: Context, definition: Definition, course: Course, reason: int, count: int, first_ms: int, last_ms: int) -> None:
    course.skipped += [0] * (len(Reason) - len(course.skipped))
    course.skipped[reason] += count
    context.effects.append(OccurrencesSkipped(definition.tenant, definition.name, reason, count, first_ms, last_ms))


def _skip_job(context: Context, before: JobState, reason: int) -> None:
    assert before.run is not None
    error = msgspec.json.encode({"code": REASONS[reason], "message": _WHY[Reason(reason)]})
    after = replace(
        before, status=SKIPPED, version=before.version + 1, held=False, finished_at_ms=context.time_ms,
        updated_at_ms=context.time_ms,
    )  # fmt: skip
    context.record_event("skip", before, after, actor=f"schedule {before.run.schedule}", error=error, detail=REASONS[reason])
    context.finish("skip", before, after, error=error)


def cancel_job(context: Context, before: JobState, *, actor: str, detail: str = "") -> JobState:
    """CANCELLED if it waits; CANCEL_REQUESTED if it runs, decided in the log so that the completion meets it there."""
    changes = {"version": before.version + 1, "updated_at_ms": context.time_ms}
    if before.status == RUNNING:
        after = replace(before, status=CANCEL_REQUESTED, **changes)
        context.record_event("cancel", before, after, actor=actor, detail=detail)
        context.change("cancel", before, after)
        return after
    after = replace(before, status=CANCELLED, held=False, next_attempt_at_ms=0, finished_at_ms=context.time_ms, **changes)
    context.record_event("cancel", before, after, actor=actor, detail=detail)
    return context.finish("cancel", before, after)


# --- the waiting occurrence -----------------------------------------------------------------------------------------------------


def _insert_next(context: Context, definition: Definition, course: Course, following: NextRun) -> None:
    """Write the one next occurrence; there is none before."""
    assert course.next_at_ms == -1
    context.txn.put_course(definition.tenant, definition.name, course)
    if following.zone_version:
        course.zone_version, course.zone_digest = following.zone_version, following.zone_digest
    if following.at_ms == -1:
        return
    job_id = occurrence_id(definition.schedule_id, following.at_ms)
    invariant(context.txn.state(job_id) is None, "one_job_per_occurrence", schedule=definition.name, at_ms=following.at_ms)
    _, fire_at_ms = placed(job_id, following.at_ms + definition.offset_ms, definition.window_ms)
    capped = definition.max_concurrency >= 0
    run = Run(definition.schedule_id, definition.name, following.at_ms, _NEXT, nominal=following.nominal, capped=capped)
    _create_run(context, definition, run, job_id, fire_at_ms, None)
    course.next_at_ms, course.next_fire_at_ms, course.next_job = following.at_ms, fire_at_ms, job_id


def _is_taken(context: Context, schedule_id: bytes, following: NextRun, *, besides: bytes = b"") -> bool:
    """Whether the occurrence has a job already: backfilled, or run before the clock was set back."""
    if following.at_ms == -1:
        return False
    job_id = occurrence_id(schedule_id, following.at_ms)
    return job_id != besides and context.txn.state(job_id) is not None


def _take_next(context: Context, course: Course) -> JobState:
    """The waiting occurrence, no longer the next one."""
    before = _state(context, course.next_job)
    invariant(before.run is not None and before.run.phase == _NEXT, "one_next_occurrence", at_ms=course.next_at_ms)
    course.next_at_ms, course.next_fire_at_ms, course.next_job = -1, -1, b""
    return before


def _withdraw_next(context: Context, course: Course) -> None:
    if course.next_at_ms != -1:
        _withdraw(context, _take_next(context, course))


def _withdraw(context: Context, before: JobState) -> None:
    """Its rows go, as though never made, so that the same instant can be inserted again."""
    context.drop_job(before)
    drop_attempts(context, before)
    context.forget("withdraw", before)


def _is_due(context: Context, definition: Definition, course: Course) -> bool:
    """The waiting occurrence has come and was not decided yet: a change now would lose it."""
    return not definition.paused and course.next_at_ms != -1 and course.next_fire_at_ms <= context.stamp_ms


def _adopt_runs(context: Context, course: Course) -> None:
    """Runs that were fired under `allow` and go on are counted from now on."""
    for key in context.txn.newest(keys.SCHEDULES, keys.runs_prefix(context.group, course.schedule_id), _ADOPTED_MAX):
        _, job_id = keys.parse_run_key(key)
        state = context.txn.state(job_id)
        if state is None or state.run is None or state.run.phase != _FREE or is_final(state):
            continue
        counted = replace(state, run=replace(state.run, phase=_COUNTED))
        context.txn.put_state(job_id, counted)
        context.effects.append(JobChanged("adopt", state, counted))
        course.runs.append(job_id)


def _definition(context: Context, tenant: str, name: str) -> Definition | None:
    row = context.txn.get(keys.SCHEDULES, keys.definition_key(context.group, tenant, name))
    return None if row is None else decode_definition(row)


def _course(context: Context, definition: Definition) -> Course:
    course = context.txn.course(definition.tenant, definition.name)
    if course is None:
        invariant(False, "course_of_schedule", schedule=definition.name)
    assert course is not None
    return course


def _find(context: Context, tenant: str, name: str, version: int) -> tuple[Definition | None, Course | None]:
    """Both, where the definition stands at this version."""
    definition = _definition(context, tenant, name)
    if definition is None or definition.version != version:
        return None, None
    return definition, _course(context, definition)


def _of_run(context: Context, state: JobState) -> tuple[Definition | None, Course | None]:
    """The schedule a run belongs to; none where it was deleted, also if another has its name now."""
    run = state.run
    assert run is not None
    definition = _definition(context, state.tenant, run.schedule)
    if definition is None or definition.schedule_id != run.schedule_id:
        return None, None
    return definition, _course(context, definition)


def _state(context: Context, job_id: bytes) -> JobState:
    state = context.txn.state(job_id)
    if state is None:
        invariant(False, "state_of_run")
    assert state is not None
    return state


def _no_schedule(name: str) -> Reply:
    return Reply("not-found", f"no schedule {name}")
