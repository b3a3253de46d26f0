"""Jobs, attempts, events, claims and queues as JSON bytes, their fields in the order of API.md.

Bytes are joined rather than dictionaries dumped: a client's own values go out as they came in, and a claim of 100 jobs is 100 short
formattings. Names were checked when they came in, so they need no escaping; labels are dumped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import orjson

from wheelsched.api.times import format_instant, format_seconds, to_seconds
from wheelsched.core.ids import format_job_id, format_token
from wheelsched.model.rows import AttemptRow, JobSpec, JobState, idempotency_instant_ms
from wheelsched.model.states import LEASED, Outcome, Status
from wheelsched.node.face import ClaimedJob, JobRecord, QueueView

PRIORITY_NAMES: Final = ("critical", "default", "bulk")
STATUS_NAMES: Final = tuple(status.name for status in Status)
OUTCOME_NAMES: Final = tuple(outcome.name.lower() for outcome in Outcome)
_SHOWN_STATUSES: Final = tuple(status for status in Status if status is not Status.DISCARDED)

# Who acts where nobody called.
_SCHEDULER: Final = "scheduler"


def labels_json(labels: dict[str, str]) -> bytes:
    return orjson.dumps(labels) if labels else b"{}"


def job(record: JobRecord) -> bytes:
    """One job, as every call that answers with a job shows it."""
    return job_json(record.state, STATUS_NAMES[record.status], record.spec, record.payload, _ends(record))


def _ends(record: JobRecord) -> bytes:
    parts = []
    if record.error:
        parts.append(b',"last_error":' + record.error)
    if record.result:
        parts.append(b',"result":' + record.result)
    if record.progress:
        parts.append(b',"progress":' + record.progress)
    return b"".join(parts)


def job_json(state: JobState, status: str, spec: JobSpec, payload: bytes, ends: bytes = b"") -> bytes:
    """The same from its parts; `ends` are the members after the instants, each with its comma."""
    timing = f'{{"class":"flexible","window_s":{format_seconds(spec.window_ms)}}}' if spec.window_ms else '{"class":"precise"}'
    head = (
        f'{{"job_id":"{format_job_id(state.job_id)}","queue":"{state.queue}","status":"{status}",'
        f'"run_at":"{format_instant(state.run_at_ms)}","fire_at":"{format_instant(state.fire_at_ms)}","timing":{timing},'
        f'"priority":"{PRIORITY_NAMES[state.priority]}","target":'
    )
    target = spec.target or b'{"type":"task"}'
    content = b',"payload":' + payload if not spec.payload_ref else b',"payload_ref":' + orjson.dumps(spec.payload_ref)
    retry = (
        f',"retry":{{"max_attempts":{spec.max_attempts},"initial_backoff_s":{format_seconds(spec.initial_backoff_ms)},'
        f'"max_backoff_s":{format_seconds(spec.max_backoff_ms)}}},"timeout_s":{format_seconds(spec.timeout_ms)},"labels":'
    )
    tail = (
        f',"version":{state.version},"attempt":{state.attempt},"created_at":"{format_instant(state.created_at_ms)}",'
        f'"updated_at":"{format_instant(state.updated_at_ms)}"'
    )
    if state.first_started_at_ms:
        tail += f',"started_at":"{format_instant(state.first_started_at_ms)}"'
    if state.finished_at_ms:
        tail += f',"finished_at":"{format_instant(state.finished_at_ms)}"'
    if status == "RETRYING":
        tail += f',"next_attempt_at":"{format_instant(state.next_attempt_at_ms)}"'
    return b"".join((head.encode(), target, content, retry.encode(), labels_json(spec.labels), tail.encode(), ends, b"}"))


def etag(version: int) -> bytes:
    return b'ETag: "v%d"\r\n' % version


def page(name: bytes, items: Sequence[bytes], next_cursor: str | None) -> bytes:
    tail = b'],"next_cursor":null}' if next_cursor is None else b'],"next_cursor":"%b"}' % next_cursor.encode()
    return b'{"%b":[' % name + b",".join(items) + tail


# --- claims ---------------------------------------------------------------------------------------------------------------------


def claimed(jobs: Sequence[ClaimedJob]) -> bytes:
    """The answer to a claim."""
    return b'{"jobs":[' + b",".join([_claimed_job(item) for item in jobs]) + b"]}"


def _claimed_job(item: ClaimedJob) -> bytes:
    state, spec = item.state, item.spec
    text_id = format_job_id(state.job_id)
    fire_at = format_instant(state.fire_at_ms)
    key_at = fire_at if not state.key_at_ms else format_instant(idempotency_instant_ms(state))
    head = (
        f'{{"job_id":"{text_id}","queue":"{state.queue}","attempt":{state.attempt},'
        f'"lease_token":"{format_token(state.job_id, state.attempt, state.fencing)}",'
        f'"lease_expires_at":"{format_instant(state.lease_expires_at_ms)}","idempotency_key":"{text_id}@{key_at}",'
        f'"fencing_token":{state.fencing},"payload'
    )
    content = b'":' + item.payload if not spec.payload_ref else b'_ref":' + orjson.dumps(spec.payload_ref)
    tail = (
        f',"run_at":"{format_instant(state.run_at_ms)}","fire_at":"{fire_at}","timeout_s":{format_seconds(spec.timeout_ms)},'
        f'"max_attempts":{spec.max_attempts},"labels":'
    )
    end = b',"traceparent":"%b"}' % spec.traceparent.encode() if spec.traceparent else b"}"
    return b"".join((head.encode(), content, tail.encode(), labels_json(spec.labels), end))


# --- attempts and events --------------------------------------------------------------------------------------------------------


def _instant_or_null(ms: int) -> str:
    return f'"{format_instant(ms)}"' if ms else "null"


def _text_or_null(text: str) -> bytes:
    return orjson.dumps(text) if text else b"null"


def attempts(record: JobRecord, rows: Sequence[tuple[int, AttemptRow]]) -> bytes:
    """`/attempts`: recorded ends first; the attempt under way and a success are told by the state."""
    state = record.state
    ends = [row for _, row in rows if row.outcome != Outcome.NONE]
    items = [
        _attempt(row.attempt, row.worker, row.started_at_ms, row.at_ms, row.lease_expires_at_ms, row.outcome, row.error) for row in ends
    ]
    if state.status in LEASED:
        items.append(_attempt(state.attempt, state.worker, state.started_at_ms, 0, state.lease_expires_at_ms, Outcome.RUNNING, b""))
    elif state.status == Status.SUCCEEDED and not any(row.outcome == Outcome.SUCCEEDED for row in ends):
        items.append(
            _attempt(
                state.attempt, state.worker, state.started_at_ms, state.finished_at_ms, state.lease_expires_at_ms, Outcome.SUCCEEDED, b""
            )
        )
    return b'{"attempts":[' + b",".join(items) + b"]}"


def _attempt(number: int, worker: str, started_ms: int, ended_ms: int, lease_ms: int, outcome: int, error: bytes) -> bytes:
    head = f'{{"attempt":{number},"worker":'.encode() + _text_or_null(worker)
    middle = (
        f',"started_at":{_instant_or_null(started_ms)},"ended_at":{_instant_or_null(ended_ms)},'
        f'"lease_expires_at":{_instant_or_null(lease_ms)},"outcome":"{OUTCOME_NAMES[outcome]}","error":'
    )
    return b"".join((head, middle.encode(), error or b"null", b"}"))


def events(record: JobRecord, rows: Sequence[tuple[int, AttemptRow]]) -> bytes:
    """`/events`: every transition, also those that have no row because others tell them."""
    return b'{"events":[' + b",".join(_Story(record, rows).tell()) + b"]}"


class _Story:
    """Tells a job's transitions in order.

    What has a row is read from it. Creation, becoming due, claims and a success have none (DESIGN 4): a row that sets out from QUEUED
    or from a running attempt says that they lie before it, and the state says what lies behind the last row. Their versions follow by
    counting, since each change adds one and becoming due adds none.
    """

    def __init__(self, record: JobRecord, rows: Sequence[tuple[int, AttemptRow]]) -> None:
        self._record = record
        self._versions = [version for version, _ in rows]
        self._rows = [row for _, row in rows]
        self._version = 0
        self._attempt = 0
        self._seen = Status.SCHEDULED
        # When the job is due next: the instant in its idempotency key is that of its first run.
        self._due_ms = idempotency_instant_ms(record.state)
        self._told: list[bytes] = []

    def tell(self) -> list[bytes]:
        state = self._record.state
        self._move(state.created_at_ms, None, Status.SCHEDULED)
        for index, row in enumerate(self._rows):
            self._lead_to(Status(row.before), index)
            self._row(index, row)
        if self._seen is not Status.SUCCEEDED or self._record.status is not Status.SUCCEEDED:
            self._end()
        return self._told

    def _row(self, index: int, row: AttemptRow) -> None:
        if self._is_last_redrive(index):
            self._due_ms = self._record.state.fire_at_ms
        elif row.cause in ("redrive", "run"):
            self._due_ms = row.at_ms
        ended = row.outcome != Outcome.NONE
        by_time = row.outcome in (Outcome.LEASE_EXPIRED, Outcome.TIMED_OUT) or row.cause in ("skip", "start_deadline")
        actor = _SCHEDULER if by_time else row.actor or (row.worker if ended else "")
        detail = row.detail or (OUTCOME_NAMES[row.outcome] if ended else row.cause)
        self._attempt = row.attempt
        self._version = self._versions[index] - 1
        self._move(row.at_ms, self._seen, Status(row.after), actor=actor, detail=detail)
        if row.outcome == Outcome.RELEASED and row.after != Status.CANCELLED:
            self._attempt = row.attempt - 1
        if row.after == Status.RETRYING:
            # Not recorded; the claim that follows, or the state, bounds it from above.
            later = self._starts_after(index + 1)
            is_now = self._record.state.status == Status.RETRYING and not later
            self._due_ms = self._record.state.next_attempt_at_ms if is_now else later or row.at_ms

    def _is_last_redrive(self, index: int) -> bool:
        return self._rows[index].cause == "redrive" and not any(row.cause in ("redrive", "run") for row in self._rows[index + 1 :])

    def _lead_to(self, status: Status, index: int) -> None:
        """Tell what must have happened for the job to be in `status` before the row at `index`."""
        if status is Status.QUEUED or (status in LEASED and self._seen not in LEASED):
            self._fire()
        if status in LEASED and self._seen not in LEASED:
            self._claim(index)

    def _fire(self) -> None:
        if self._seen in (Status.SCHEDULED, Status.RETRYING):
            cause = "fire" if self._seen is Status.SCHEDULED else "timer"
            self._move(self._due_ms, self._seen, Status.QUEUED, actor=_SCHEDULER, detail=cause, counts=False)

    def _claim(self, index: int) -> None:
        state = self._record.state
        started_ms, worker, attempt = state.started_at_ms, state.worker, state.attempt
        for row in self._rows[index:]:
            if row.outcome != Outcome.NONE:
                started_ms, worker, attempt = row.started_at_ms, row.worker, row.attempt
                break
        self._attempt = attempt
        self._move(started_ms, self._seen, Status.RUNNING, actor=worker, detail="claim")

    def _starts_after(self, index: int) -> int:
        for row in self._rows[index:]:
            if row.started_at_ms:
                return row.started_at_ms
        state = self._record.state
        return state.started_at_ms if state.status in LEASED or state.status == Status.SUCCEEDED else 0

    def _end(self) -> None:
        """From the last row to the status of now."""
        state, now = self._record.state, self._record.status
        if now is Status.QUEUED:
            self._due_ms = state.next_attempt_at_ms or state.fire_at_ms
            self._fire()
        elif now in LEASED or now is Status.SUCCEEDED:
            self._lead_to(Status.RUNNING, len(self._rows))
            if now is Status.SUCCEEDED:
                self._attempt = state.attempt
                self._move(state.finished_at_ms, self._seen, Status.SUCCEEDED, actor=state.worker, detail="succeeded")

    def _move(self, at_ms: int, before: Status | None, after: Status, *, actor: str = "", detail: str = "", counts: bool = True) -> None:
        self._version += counts
        start = "null" if before is None else f'"{before.name}"'
        head = (
            f'{{"at":"{format_instant(at_ms)}","from":{start},"to":"{after.name}","attempt":{self._attempt},'
            f'"version":{self._version},"actor":'
        )
        self._told.append(b"".join((head.encode(), _text_or_null(actor), b',"detail":', _text_or_null(detail), b"}")))
        self._seen = after


# --- queues ---------------------------------------------------------------------------------------------------------------------


def queue(view: QueueView) -> bytes:
    zeros = (0, 0, 0)
    settings = view.settings
    return orjson.dumps({
        "name": view.name,
        "depth": {
            status.name: dict(zip(PRIORITY_NAMES, view.depth.get(status, zeros), strict=True)) for status in _SHOWN_STATUSES
        },
        "oldest_ready_age_s": view.oldest_ready_age_s,
        "running": view.running,
        "lateness": {"p50_s": view.lateness_p50_s, "p99_s": view.lateness_p99_s},
        "paused": settings.paused,
        "settings": {
            "max_concurrency": None if settings.max_concurrency < 0 else settings.max_concurrency,
            "rate_per_s": None if settings.rate_per_s < 0 else settings.rate_per_s,
            "lease_s": to_seconds(settings.lease_ms),
            "retention_s": to_seconds(settings.retention_ms),
            "weights": dict(zip(PRIORITY_NAMES, settings.weights, strict=True)),
        },
    })  # fmt: skip
