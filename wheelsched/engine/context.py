"""What the functions of one entry share: the stamp, the group's state, the transaction, and the ways to change a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from wheelsched.core import limits
from wheelsched.core.ids import format_job_id, spread_hash
from wheelsched.core.invariants import invariant
from wheelsched.engine.rows import tally_moves
from wheelsched.engine.transaction import Transaction
from wheelsched.model import keys
from wheelsched.model.commands import Reply
from wheelsched.model.effects import Effect, JobChanged, JobsMoved
from wheelsched.model.rows import (
    AttemptRow,
    DoneRow,
    GroupState,
    JobState,
    encode_index,
    encode_job,
    encode_row,
    is_final,
    run_instant_ms,
    split_job,
)
from wheelsched.model.states import Lane, Outcome, Status, status_of

# Plain integers: rows hold those, and an enum member costs 0.1 us a look.
SCHEDULED: Final = int(Status.SCHEDULED)
RUNNING: Final = int(Status.RUNNING)
RETRYING: Final = int(Status.RETRYING)
CANCEL_REQUESTED: Final = int(Status.CANCEL_REQUESTED)
SUCCEEDED: Final = int(Status.SUCCEEDED)
DEAD: Final = int(Status.DEAD)
CANCELLED: Final = int(Status.CANCELLED)
SKIPPED: Final = int(Status.SKIPPED)
DISCARDED: Final = int(Status.DISCARDED)

_PRECISE: Final = int(Lane.PRECISE)
_FLEXIBLE: Final = int(Lane.FLEXIBLE)
_PRIORITIES: Final = 3
_NOT_FOUND: Final = "not-found"


class Context:
    """One entry under way. `stamp_ms` decides what is due; `time_ms` dates rows and events."""

    __slots__ = ("_on_run_end", "effects", "group", "group_state", "stamp_ms", "time_ms", "txn")

    def __init__(
        self, group: int, group_state: GroupState, txn: Transaction, stamp_ms: int,
        on_run_end: Callable[[Context, JobState], None],
    ) -> None:  # fmt: skip
        """`on_run_end(context, state)` is told of every run of a schedule that has ended."""
        self._on_run_end = on_run_end
        self.group = group
        self.group_state = group_state
        self.txn = txn
        self.stamp_ms = stamp_ms
        self.time_ms = group_state.time_ms = max(group_state.time_ms, stamp_ms)
        self.effects: list[Effect] = []

    def seen(self, state: JobState) -> Status:
        """The status everybody sees at this point of the log."""
        return status_of(state, self.group_state.watermark_ms)

    def seen_soon(self, state: JobState) -> Status:
        """The status once the Fire that follows in this entry moved the watermark to the stamp."""
        return status_of(state, max(self.group_state.watermark_ms, self.stamp_ms))

    def settle_due(self, due_at_ms: int) -> tuple[int, bool]:
        """(instant, held) of a job that is to be due at `due_at_ms`: the one rule for create, update, redrive, retry (DESIGN 5).

        Due at or before the stamp: the stamp, and the Fire that follows passes it. After the stamp yet not above the watermark
        (the clock went back, or the last leader's ran ahead): held, else it were seen as QUEUED before its time (`never_early`).
        """
        if due_at_ms <= self.stamp_ms:
            return self.stamp_ms, False
        return due_at_ms, due_at_ms <= self.group_state.watermark_ms

    def change(self, cause: str, before: JobState | None, after: JobState) -> None:
        """Store the state row, keep the counts and tell the leader."""
        self.txn.put_state(after.job_id, after)
        cells = self.txn.counts(after.tenant, after.queue).cells
        if before is not None:
            cells[before.status * _PRIORITIES + before.priority] -= 1
        cells[after.status * _PRIORITIES + after.priority] += 1
        self.effects.append(JobChanged(cause, before, after))

    def changed_many(self, cause: str, befores: list[JobState], afters: list[JobState]) -> None:
        """What `change` does beside storing the row, for many whose rows are stored."""
        tallies = tally_moves(befores, afters, JobState)
        for tenant, queue, before, after, priority, _, count in tallies:
            cells = self.txn.counts(tenant, queue).cells
            cells[before * _PRIORITIES + priority] -= count
            cells[after * _PRIORITIES + priority] += count
        self.effects.append(JobsMoved(cause, befores, afters, tallies))

    def forget(self, cause: str, before: JobState) -> None:
        """Delete the state row of a job that is gone."""
        self.txn.put_state(before.job_id, None)
        if before.run is not None:
            key = keys.run_key(self.group, before.run.schedule_id, run_instant_ms(before), before.job_id)
            self.txn.delete(keys.SCHEDULES, key)
        self.txn.counts(before.tenant, before.queue).cells[before.status * _PRIORITIES + before.priority] -= 1
        self.effects.append(JobChanged(cause, before, None))

    def put_job(self, state: JobState, spec: bytes, payload: bytes) -> None:
        """Write job and index rows. Their version is that of this write: a claim or a retry moves on without them."""
        group = self.group
        job_key = keys.job_key(group, state.lane, state.fire_at_ms, state.job_id)
        index_key = keys.index_key(group, state.tenant, state.queue, state.fire_at_ms, state.job_id)
        self.txn.put(keys.JOBS, job_key, encode_job(state, spec, payload))
        self.txn.put(keys.INDEX, index_key, encode_index(state.lane, state.priority, state.version))

    def job_row(self, state: JobState) -> bytes:
        """The job row of an unfinished job."""
        return self._read_job(state, keys.job_key(self.group, state.lane, state.fire_at_ms, state.job_id))

    def drop_job(self, state: JobState) -> None:
        """Delete job and index rows."""
        group, txn = self.group, self.txn
        txn.delete(keys.JOBS, keys.job_key(group, state.lane, state.fire_at_ms, state.job_id))
        txn.delete(keys.INDEX, keys.index_key(group, state.tenant, state.queue, state.fire_at_ms, state.job_id))

    def mark_held(self, before: JobState, after: JobState) -> None:
        """Let the job row tell `after.held`, where that is another than before."""
        if before.held != after.held:
            spec, payload = split_job(self.job_row(before))
            self.txn.put(
                keys.JOBS,
                keys.job_key(self.group, after.lane, after.fire_at_ms, after.job_id),
                encode_job(after, spec, payload),
            )

    def finish(self, cause: str, before: JobState, after: JobState, *, error: bytes = b"", result: bytes = b"") -> JobState:
        """Move a job from `jobs` and `index` to `done`; returns the state as stored."""
        group, txn = self.group, self.txn
        job_key = keys.job_key(group, before.lane, before.fire_at_ms, before.job_id)
        job = self._read_job(before, job_key)
        txn.delete(keys.JOBS, job_key)
        txn.delete(keys.INDEX, keys.index_key(group, before.tenant, before.queue, before.fire_at_ms, before.job_id))
        if after.fingerprint:
            after = replace(after, keep_until_ms=max(after.keep_until_ms, after.finished_at_ms + limits.KEEP_KEYED_MS))
        done_key = keys.done_key(group, after.tenant, after.queue, after.status, after.fire_at_ms, after.job_id)
        txn.put(keys.DONE, done_key, encode_row(DoneRow(after, job, error, result)))
        self.change(cause, before, after)
        if after.run is not None:
            self._on_run_end(self, after)
        return after

    def record_attempt(
        self, cause: str, before: JobState, after: JobState, *, outcome: int, seen: Status, error: bytes = b"", detail: str = ""
    ) -> None:
        """Write how the attempt of `before` ended."""
        row = AttemptRow(
            self.time_ms, cause, before.status, int(seen), before.attempt, outcome, before.worker, before.started_at_ms,
            # When it was granted, the lease was to end then; heartbeats moved that in memory, up to the end told here.
            self.time_ms if outcome == Outcome.LEASE_EXPIRED else before.lease_expires_at_ms,
            before.fencing, error, "", detail, after.next_attempt_at_ms,
        )  # fmt: skip
        self.txn.put(keys.ATTEMPTS, keys.attempt_key(self.group, before.job_id, after.version), encode_row(row))

    def record_event(self, cause: str, before: JobState, after: JobState, *, actor: str = "", error: bytes = b"", detail: str = "") -> None:
        """Write a transition that ended no attempt."""
        row = AttemptRow(
            self.time_ms, cause, int(self.seen(before)), int(self.seen_soon(after)), before.attempt, int(Outcome.NONE),
            error=error, actor=actor, detail=detail,
        )  # fmt: skip
        self.txn.put(keys.ATTEMPTS, keys.attempt_key(self.group, before.job_id, after.version), encode_row(row))

    def find(self, job_id: bytes, tenant: str) -> JobState | None:
        """The job as this tenant may see it: another tenant's and a discarded one look like none."""
        state = self.txn.state(job_id)
        return None if state is None or state.tenant != tenant or state.status == DISCARDED else state

    def _read_job(self, state: JobState, key: bytes) -> bytes:
        row = self.txn.get(keys.JOBS, key)
        if row is None:
            invariant(False, "job_row_of_unfinished_job", job_id=format_job_id(state.job_id), fire_at_ms=state.fire_at_ms)
        assert row is not None
        return row


def placed(job_id: bytes, base_ms: int, window_ms: int) -> tuple[int, int]:
    """(lane, fire_at): a flexible job falls by its id into the first nine tenths of its window, to start inside it too."""
    if window_ms <= 0:
        return _PRECISE, base_ms
    # The upper half of the hash: a batch's spread is the hash modulo the spread, and the two have to be independent.
    return _FLEXIBLE, base_ms + (spread_hash(job_id) >> 32) % max(1, window_ms * 9 // 10)


def created_again(existing: JobState, fingerprint: bytes) -> Reply:
    """The answer to a create whose idempotency key has made a job before."""
    made = f"{format_job_id(existing.job_id)} was made with this Idempotency-Key"
    if existing.status == DISCARDED:
        return Reply("job-finished", f"{made} and discarded; use another key")
    if existing.fingerprint != fingerprint:
        return Reply("idempotency-key-reused", f"{made} and another body; use another key")
    return Reply(state=existing, replayed=True)


def not_found(job_id: bytes) -> Reply:
    return Reply(_NOT_FOUND, f"no job {format_job_id(job_id)}")


def finished(state: JobState, verb: str) -> Reply:
    """The refusal of a command that the job's status rules out."""
    why = "has finished" if is_final(state) else "is being cancelled" if state.status == CANCEL_REQUESTED else "is not dead"
    detail = f"{format_job_id(state.job_id)} {why} ({Status(state.status).name}): it cannot be {verb}"
    return Reply("job-finished", detail, state)
