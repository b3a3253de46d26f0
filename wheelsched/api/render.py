"""Jobs, attempts, events, claims, queues and schedules as JSON bytes, their fields in the order of API.md.

Bytes are joined rather than dictionaries dumped: a client's own values go out as they came in, and a claim of 100 jobs is 100 short
formattings. Names were checked when they came in, so they need no escaping; labels are dumped.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import orjson

from wheelsched.api import batches
from wheelsched.api.times import format_instant, format_seconds, instant_bytes, to_seconds
from wheelsched.core.ids import format_job_id, format_schedule_id, format_token
from wheelsched.model.rows import AttemptRow, JobSpec, JobState, decode_spec, idempotency_instant_ms
from wheelsched.model.schedules import REASONS, Cause, Definition, Missed, Overlap, Run, SkipRow
from wheelsched.model.states import LEASED, Outcome, Status
from wheelsched.node.face import ClaimedJob, JobRecord, Preview, QueueView, ScheduleRecord

PRIORITY_NAMES: Final = ("critical", "default", "bulk")
_PRIORITY_BYTES: Final = tuple(name.encode() for name in PRIORITY_NAMES)
_TRIGGER_BYTES: Final = tuple(cause.name.lower().encode() for cause in Cause)
STATUS_NAMES: Final = tuple(status.name for status in Status)
OUTCOME_NAMES: Final = tuple(outcome.name.lower() for outcome in Outcome)
_SHOWN_STATUSES: Final = tuple(status for status in Status if status is not Status.DISCARDED)

_TASK: Final = b'{"type":"task"}'
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
    timing, retry = _spec_json(
        spec.window_ms, spec.max_attempts, spec.initial_backoff_ms, spec.max_backoff_ms, spec.timeout_ms, spec.start_deadline_ms
    )
    if state.run is not None:
        ends += _run(state.run)
    if state.first_started_at_ms or state.finished_at_ms or status == "RETRYING":
        ends = _later_instants(state, status) + ends
    return (
        b'{"job_id":"job_%b","queue":"%b","status":"%b","run_at":"%b","fire_at":"%b","timing":%b,"priority":"%b","target":%b,%b%b,"labels":%b,'
        b'"version":%d,"attempt":%d,"created_at":"%b","updated_at":"%b"%b}'
    ) % (
        state.job_id.hex().encode(), state.queue.encode(), status.encode(), instant_bytes(state.run_at_ms),
        instant_bytes(state.fire_at_ms), timing, _PRIORITY_BYTES[state.priority], spec.target or _TASK,
        _content(spec, payload), retry, labels_json(spec.labels), state.version, state.attempt, instant_bytes(state.created_at_ms),
        instant_bytes(state.updated_at_ms), ends,
    )  # fmt: skip


def spec_json(spec: JobSpec) -> tuple[bytes, bytes, bytes]:
    """(`timing`, the members from `retry` to `labels`, `target`), for answers made piece by piece."""
    timing, retry = _spec_json(
        spec.window_ms, spec.max_attempts, spec.initial_backoff_ms, spec.max_backoff_ms, spec.timeout_ms, spec.start_deadline_ms
    )
    return timing, retry + b',"labels":' + labels_json(spec.labels), spec.target or _TASK


@lru_cache(maxsize=1_024)
def _spec_json(
    window_ms: int, max_attempts: int, initial_ms: int, max_ms: int, timeout_ms: int, start_deadline_ms: int
) -> tuple[bytes, bytes]:
    """(`timing`, the members from `retry` to `start_deadline_s`): the same for most jobs."""
    timing = f'{{"class":"flexible","window_s":{format_seconds(window_ms)}}}' if window_ms else '{"class":"precise"}'
    retry = (
        f',"retry":{{"max_attempts":{max_attempts},"initial_backoff_s":{format_seconds(initial_ms)},'
        f'"max_backoff_s":{format_seconds(max_ms)}}},"timeout_s":{format_seconds(timeout_ms)}'
    )
    if start_deadline_ms >= 0:
        retry += f',"start_deadline_s":{format_seconds(start_deadline_ms)}'
    return timing.encode(), retry.encode()


def _content(spec: JobSpec, payload: bytes) -> bytes:
    return b'"payload":' + payload if not spec.payload_ref else b'"payload_ref":' + orjson.dumps(spec.payload_ref)


def _run(run: Run) -> bytes:
    """What ties a job to its schedule, each member with its comma."""
    parts = [b',"schedule":"%b"' % run.schedule.encode()]
    if run.scheduled_for_ms >= 0:
        parts.append(b',"scheduled_for":"%b"' % instant_bytes(run.scheduled_for_ms))
        if run.from_ms >= 0:
            interval = instant_bytes(run.from_ms), instant_bytes(run.scheduled_for_ms)
            parts.append(b',"data_interval":{"from":"%b","to":"%b"}' % interval)
    parts.append(b',"trigger":"%b"' % _TRIGGER_BYTES[run.cause])
    if run.nominal:
        parts.append(b',"scheduled_local":"%b"' % run.nominal.encode())
    return b"".join(parts)


def _later_instants(state: JobState, status: str) -> bytes:
    parts = []
    if state.first_started_at_ms:
        parts.append(b',"started_at":"%b"' % instant_bytes(state.first_started_at_ms))
    if state.finished_at_ms:
        parts.append(b',"finished_at":"%b"' % instant_bytes(state.finished_at_ms))
    if status == "RETRYING":
        parts.append(b',"next_attempt_at":"%b"' % instant_bytes(state.next_attempt_at_ms))
    return b"".join(parts)


def etag(version: int) -> bytes:
    return b'ETag: "v%d"\r\n' % version


def page(name: bytes, items: Sequence[bytes], next_cursor: str | None) -> bytes:
    tail = b'],"next_cursor":null}' if next_cursor is None else b'],"next_cursor":"%b"}' % next_cursor.encode()
    return b'{"%b":[' % name + b",".join(items) + tail


# --- claims ---------------------------------------------------------------------------------------------------------------------


def claimed(jobs: Sequence[ClaimedJob]) -> bytes:
    """The answer to a claim."""
    return batches.claimed_json(jobs, _claim_words, _claimed_job)


def _claim_words(spec: JobSpec) -> tuple[bytes, bytes]:
    """(what stands in the place of the payload, if anything; the members from `timeout_s` on): the same for most jobs."""
    head = b'"payload_ref":' + orjson.dumps(spec.payload_ref) if spec.payload_ref else b""
    return head, _claim_tail(spec, b"")


def _claim_tail(spec: JobSpec, ends: bytes) -> bytes:
    if spec.traceparent:
        ends += b',"traceparent":"%b"' % spec.traceparent.encode()
    return b'"timeout_s":%b,"max_attempts":%d,"labels":%b%b}' % (
        format_seconds(spec.timeout_ms).encode(), spec.max_attempts, labels_json(spec.labels), ends,
    )  # fmt: skip


def _claimed_job(item: ClaimedJob) -> bytes:
    state, spec = item.state, item.spec
    job_id = state.job_id.hex().encode()
    fire_at = instant_bytes(state.fire_at_ms)
    ends = _run(state.run) if state.run is not None else b""
    key_at = fire_at if not state.key_at_ms else instant_bytes(idempotency_instant_ms(state))
    return (
        b'{"job_id":"job_%b","queue":"%b","attempt":%d,"lease_token":"%b","lease_expires_at":"%b","idempotency_key":"job_%b@%b",'
        b'"fencing_token":%d,%b,"run_at":"%b","fire_at":"%b",%b'
    ) % (
        job_id, state.queue.encode(), state.attempt, format_token(state.job_id, state.attempt, state.fencing).encode(),
        instant_bytes(state.lease_expires_at_ms), job_id, key_at, state.fencing, _content(spec, item.payload),
        instant_bytes(state.run_at_ms), fire_at, _claim_tail(spec, ends),
    )  # fmt: skip


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
            self._due_ms = row.next_attempt_at_ms

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


# --- schedules ------------------------------------------------------------------------------------------------------------------


def schedule(record: ScheduleRecord) -> bytes:
    """One schedule. Its template's payload goes out as it came."""
    definition, course = record.definition, record.course
    parts = [
        b'{"schedule_id":"%b","name":"%b"' % (format_schedule_id(definition.schedule_id).encode(), definition.name.encode()),
        _timing(definition),
        b',"job_template":' + _template(definition),
        _policies(definition),
        b"," + _preview(record.preview),
        b',"last_run":' + _last_run(record.last_run),
        b',"skipped":' + orjson.dumps({REASONS[reason]: count for reason, count in enumerate(course.skipped) if count}),
        b',"version":%d,"created_at":"%b","updated_at":"%b","time_zone_data":%b}'
        % (
            definition.version, instant_bytes(definition.created_at_ms), instant_bytes(definition.updated_at_ms),
            _text_or_null(course.zone_version if definition.cron else ""),
        ),
    ]  # fmt: skip
    return b"".join(parts)


def _timing(definition: Definition) -> bytes:
    """The members that say when it runs, each with its comma; none where it runs by hand only."""
    if definition.cron:
        return b',"cron":%b,"time_zone":%b' % (orjson.dumps(definition.cron), orjson.dumps(definition.zone))
    if definition.every_ms:
        return b',"every_s":%b,"anchor_at":"%b"' % (format_seconds(definition.every_ms).encode(), instant_bytes(definition.anchor_ms))
    return b""


def _template(definition: Definition) -> bytes:
    spec = decode_spec(definition.spec)
    timing, tail, target = spec_json(spec)
    return b'{"queue":"%b","timing":%b,"priority":"%b","target":%b,%b%b}' % (
        definition.queue.encode(), timing, _PRIORITY_BYTES[definition.priority], target, _content(spec, definition.payload), tail,
    )  # fmt: skip


def _policies(definition: Definition) -> bytes:
    deadline_ms = definition.starting_deadline_ms
    document = {
        "jitter_s": to_seconds(definition.jitter_ms),
        "missed_runs": {
            "policy": Missed(definition.missed).name.lower(),
            "starting_deadline_s": to_seconds(deadline_ms) if deadline_ms >= 0 else None,
        },
        "overlap": Overlap(definition.overlap).name.lower(),
        "max_concurrency": definition.max_concurrency if definition.max_concurrency >= 0 else None,
        "start_at": format_instant(definition.start_ms) if definition.start_ms >= 0 else None,
        "end_at": format_instant(definition.end_ms) if definition.end_ms >= 0 else None,
        "paused": definition.paused,
        "shadow": definition.shadow,
    }
    return b"," + orjson.dumps(document)[1:-1]


def _last_run(record: JobRecord | None) -> bytes:
    if record is None:
        return b"null"
    state = record.state
    occurrence_ms = -1 if state.run is None else state.run.scheduled_for_ms
    document = {
        "job_id": format_job_id(state.job_id),
        "scheduled_for": format_instant(occurrence_ms) if occurrence_ms >= 0 else None,
        "status": STATUS_NAMES[record.status],
        "fire_at": format_instant(state.fire_at_ms),
    }
    if state.finished_at_ms:
        document["finished_at"] = format_instant(state.finished_at_ms)
    return orjson.dumps(document)


def preview(found: Preview) -> bytes:
    return b"{" + _preview(found) + b"}"


def _preview(found: Preview) -> bytes:
    document = {
        "next_runs": [format_instant(at_ms) for at_ms in found.next_runs],
        "next_runs_local": found.local,
        "warnings": found.warnings,
    }
    return orjson.dumps(document)[1:-1]


def runs(jobs: Sequence[JobRecord], skipped: Sequence[SkipRow], next_cursor: str | None) -> bytes:
    """A page of a schedule's runs, and what that stretch left out."""
    left_out = [
        {"from": format_instant(row.from_ms), "to": format_instant(row.to_ms), "count": row.count, "reason": REASONS[row.reason]}
        for row in skipped
    ]
    tail = b'],"skipped":' + orjson.dumps(left_out) + b',"next_cursor":' + _text_or_null(next_cursor or "") + b"}"
    return b'{"jobs":[' + b",".join([job(record) for record in jobs]) + tail
