"""What clients and time ask for: create, update, cancel, run, redrive, discard; and fire."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from wheelsched.core import limits
from wheelsched.core.ids import format_job_id, spread_hash
from wheelsched.core.invariants import invariant
from wheelsched.engine import schedules
from wheelsched.engine.context import (
    CANCEL_REQUESTED,
    CANCELLED,
    DEAD,
    DISCARDED,
    RETRYING,
    SCHEDULED,
    Context,
    created_again,
    finished,
    not_found,
    placed,
)
from wheelsched.engine.purge import drop_attempts
from wheelsched.model import keys
from wheelsched.model.commands import Cancel, Create, Discard, Fire, Redrive, Reply, RunNow, Update
from wheelsched.model.effects import Fired, JobChanged
from wheelsched.model.rows import (
    DoneRow,
    JobSpec,
    JobState,
    decode_done,
    decode_spec,
    encode_row,
    encode_spec,
    idempotency_instant_ms,
    is_final,
    split_job,
)
from wheelsched.model.schedules import Phase
from wheelsched.model.states import Status, due_at_ms

_SET, _BUFFERED = int(Phase.SET), int(Phase.BUFFERED)
_CHANGEABLE: Final = ("max_attempts", "initial_backoff_ms", "max_backoff_ms", "timeout_ms", "labels")
_WAITING: Final = (SCHEDULED, RETRYING)


def create(context: Context, command: Create) -> Reply:
    """Insert a job. A key seen before: the job it made, or a refusal where the body is another."""
    job_id, fingerprint = command.job_id, command.fingerprint
    if fingerprint:
        existing = context.txn.state(job_id)
        if existing is not None and existing.status == DISCARDED and existing.keep_until_ms <= context.stamp_ms:
            # The tombstone's day is over, and the purge has not come by yet.
            context.txn.delete(keys.DONE, _done_key(context, existing))
        elif existing is not None:
            return created_again(existing, fingerprint)
    spec = decode_spec(command.spec)
    base_ms = command.run_at_ms if command.run_at_ms != -1 else context.stamp_ms + command.delay_ms
    if command.spread_ms > 0:
        base_ms += spread_hash(job_id) % command.spread_ms
    lane, fire_at_ms = placed(job_id, base_ms, command.window_ms)
    fire_at_ms, held = context.settle_due(fire_at_ms)
    now_ms = context.time_ms
    state = JobState(
        job_id, SCHEDULED, 1, command.tenant, command.queue, lane, command.priority, fire_at_ms, now_ms, now_ms, held,
        fingerprint=fingerprint, keep_until_ms=now_ms + limits.KEEP_KEYED_MS if fingerprint else 0,
        max_attempts=spec.max_attempts, initial_backoff_ms=spec.initial_backoff_ms, max_backoff_ms=spec.max_backoff_ms,
        timeout_ms=spec.timeout_ms, start_deadline_ms=spec.start_deadline_ms, run_at_ms=base_ms,
    )  # fmt: skip
    context.put_job(state, command.spec, command.payload)
    context.change("create", None, state)
    return Reply(state=state)


def update(context: Context, command: Update) -> Reply:
    """PATCH, of a job that is seen SCHEDULED; the row moves where time or timing change."""
    before = context.find(command.job_id, command.tenant)
    if before is None:
        return not_found(command.job_id)
    seen = context.seen(before)
    if seen is not Status.SCHEDULED:
        detail = f"{format_job_id(before.job_id)} is {seen.name}: only a SCHEDULED job can be changed"
        return Reply("job-not-scheduled", detail, before)
    if command.if_version and command.if_version != before.version:
        detail = f"{format_job_id(before.job_id)} is at version {before.version}, not {command.if_version}; read it again"
        return Reply("version-mismatch", detail, before)
    spec_bytes, payload = split_job(context.job_row(before))
    spec = decode_spec(spec_bytes)
    new_spec = _changed_spec(spec, command)
    after = _changed_state(context, before, spec, new_spec, command)
    waits_for_schedule = before.run is not None and before.run.phase <= _BUFFERED
    if waits_for_schedule:
        # Also where its time is the one it had: unheld it would fire with neither a successor nor a look at what overlaps.
        after = replace(after, held=True)
    new_payload = payload if command.payload is None else command.payload
    if after == before and new_spec == spec and new_payload == payload:
        return Reply(state=before, replayed=True)
    if before.run is not None and waits_for_schedule and _has_moved(before, after):
        if not schedules.take_away(context, before, command.successor):
            return Reply(schedules.OUTDATED, state=before)
        # Overlap is decided when its new time comes: it stays held.
        after = replace(after, run=replace(before.run, phase=_SET))
    after = replace(after, version=before.version + 1, updated_at_ms=context.time_ms)
    context.drop_job(before)
    context.put_job(after, encode_spec(new_spec), new_payload)
    context.record_event("update", before, after, actor=command.actor)
    context.change("update", before, after)
    return Reply(state=after)


def _has_moved(before: JobState, after: JobState) -> bool:
    return after.fire_at_ms != before.fire_at_ms or after.lane != before.lane or after.run_at_ms != before.run_at_ms


def _changed_spec(spec: JobSpec, command: Update) -> JobSpec:
    changes: dict[str, object] = {name: command.spec_changes[name] for name in _CHANGEABLE if name in command.spec_changes}
    if command.window_ms != -1:
        changes["window_ms"] = command.window_ms
    if command.payload is not None:
        changes["payload_ref"] = ""
    return replace(spec, **changes) if changes else spec


def _changed_state(context: Context, before: JobState, spec: JobSpec, new_spec: JobSpec, command: Update) -> JobState:
    """`before` with what the command changes, its version not yet counted up."""
    after = replace(
        before,
        priority=before.priority if command.priority == -1 else command.priority,
        max_attempts=new_spec.max_attempts, initial_backoff_ms=new_spec.initial_backoff_ms,
        max_backoff_ms=new_spec.max_backoff_ms, timeout_ms=new_spec.timeout_ms,
    )  # fmt: skip
    run_at_ms = before.run_at_ms
    if command.run_at_ms != -1:
        run_at_ms = command.run_at_ms
    elif command.delay_ms != -1:
        run_at_ms = context.stamp_ms + command.delay_ms
    elif new_spec.window_ms == spec.window_ms:
        return after
    lane, fire_at_ms = placed(before.job_id, run_at_ms, new_spec.window_ms)
    fire_at_ms, held = context.settle_due(fire_at_ms)
    return replace(after, lane=lane, fire_at_ms=fire_at_ms, held=held, run_at_ms=run_at_ms)


def cancel(context: Context, command: Cancel) -> Reply:
    """CANCELLED if it waits; CANCEL_REQUESTED if it runs, decided in the log so that the completion meets it there."""
    before = context.find(command.job_id, command.tenant)
    if before is None:
        return not_found(command.job_id)
    if before.status in (CANCEL_REQUESTED, CANCELLED):
        return Reply(state=before, replayed=True)
    if is_final(before):
        return finished(before, "cancelled")
    if not schedules.take_away(context, before, command.successor):
        return Reply(schedules.OUTDATED, state=before)
    return Reply(state=schedules.cancel_job(context, before, actor=command.actor))


def fire(context: Context, command: Fire) -> Reply:
    """Move the watermark, never back and never above the stamp; fire held jobs by name."""
    group_state = context.group_state
    # A leader that asks for more than its own stamp would fire early on every replica: the stamp is the bound (`never_early`).
    up_to_ms = min(command.up_to_ms, context.stamp_ms)
    if up_to_ms > group_state.watermark_ms:
        group_state.watermark_ms = up_to_ms
        context.effects.append(Fired(up_to_ms))
    for job_id, version in command.held:
        before = context.txn.state(job_id)
        if before is not None and before.held and before.version == version and before.status in _WAITING:
            _fire_held(context, before)
    return Reply()


def _fire_held(context: Context, before: JobState) -> None:
    if due_at_ms(before) > context.stamp_ms:
        return
    if before.run is not None and before.run.phase <= _BUFFERED:
        if before.run.phase == _SET:
            schedules.offer_set(context, before)
        return
    after = replace(before, held=False)
    context.mark_held(before, after)
    context.txn.put_state(after.job_id, after)
    context.effects.append(JobChanged("fire", before, after))


def run_now(context: Context, command: RunNow) -> Reply:
    """Make a waiting job due at the stamp; one that is due or runs already stays as it is."""
    before = context.find(command.job_id, command.tenant)
    if before is None:
        return not_found(command.job_id)
    if is_final(before) or before.status == CANCEL_REQUESTED:
        return finished(before, "run now")
    if context.seen(before) not in (Status.SCHEDULED, Status.RETRYING):
        return Reply(state=before, replayed=True)
    if before.run is not None and before.run.phase <= _BUFFERED:
        return schedules.run_held(context, command, before)
    changes = {"version": before.version + 1, "updated_at_ms": context.time_ms, "held": False}
    if before.status == RETRYING:
        after = replace(before, next_attempt_at_ms=context.stamp_ms, **changes)
        context.mark_held(before, after)
    else:
        after = replace(before, fire_at_ms=context.stamp_ms, **changes)
        spec, payload = split_job(context.job_row(before))
        context.drop_job(before)
        context.put_job(after, spec, payload)
    context.record_event("run", before, after, actor=command.actor)
    context.change("run", before, after)
    return Reply(state=after)


def redrive(context: Context, command: Redrive) -> Reply:
    """A DEAD job waits again: a new `fire_at`, the idempotency key of its first run, `max_attempts` counted anew."""
    before = context.find(command.job_id, command.tenant)
    if before is None:
        return not_found(command.job_id)
    if before.status != DEAD:
        return finished(before, "redriven")
    done = _take_done(context, before)
    fire_at_ms, held = context.settle_due(context.stamp_ms + command.delay_ms)
    after = replace(
        before, status=SCHEDULED, version=before.version + 1, fire_at_ms=fire_at_ms, held=held, updated_at_ms=context.time_ms,
        finished_at_ms=0, next_attempt_at_ms=0, attempt_base=before.attempt, key_at_ms=idempotency_instant_ms(before),
    )  # fmt: skip
    spec, payload = split_job(done.job)
    context.put_job(after, spec, payload)
    context.record_event("redrive", before, after, actor=command.actor)
    context.change("redrive", before, after)
    if after.run is not None:
        schedules.run_again(context, after)
    return Reply(state=after)


def discard(context: Context, command: Discard) -> Reply:
    """A DEAD job is gone. One with an idempotency key leaves a tombstone for 24 h, which refuses the key."""
    before = context.find(command.job_id, command.tenant)
    if before is None:
        return not_found(command.job_id)
    if before.status != DEAD:
        return finished(before, "discarded")
    _take_done(context, before)
    drop_attempts(context, before)
    context.forget("discard", before)
    if before.fingerprint:
        tombstone = replace(
            before, status=DISCARDED, version=before.version + 1, updated_at_ms=context.time_ms, finished_at_ms=context.time_ms,
            keep_until_ms=context.stamp_ms + limits.KEEP_KEYED_MS,
        )  # fmt: skip
        context.txn.put_state(before.job_id, tombstone)
        context.txn.put(keys.DONE, _done_key(context, tombstone), encode_row(DoneRow(tombstone, b"")))
    return Reply(state=before)


def _take_done(context: Context, state: JobState) -> DoneRow:
    key = _done_key(context, state)
    row = context.txn.get(keys.DONE, key)
    invariant(row is not None, "done_row_of_finished_job", job_id=format_job_id(state.job_id))
    assert row is not None
    context.txn.delete(keys.DONE, key)
    return decode_done(row)


def _done_key(context: Context, state: JobState) -> bytes:
    return keys.done_key(context.group, state.tenant, state.queue, state.status, state.fire_at_ms, state.job_id)
