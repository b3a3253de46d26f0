"""What bodies may hold: the models that validate requests, and that `/openapi.json` is generated from.

Bounds stand in the annotations and are checked by msgspec; patterns are stated for the document only and checked by `check_name`,
which remembers good names (a regular expression costs more than decoding the rest). Answers have models too: nothing here builds one
of those, but the document, the tests and a reader need them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from wheelsched.api import times
from wheelsched.api.bodies import shown
from wheelsched.api.problem import Fault, invalid
from wheelsched.core import limits
from wheelsched.core.errors import PayloadTooLarge

NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
_NAME: Final = re.compile(NAME_PATTERN.removesuffix("$") + r"\Z")
_NAME_LETTER: Final = re.compile(r"[A-Za-z0-9._-]")
_known_names: set[str] = set()
_KNOWN_NAMES_MAX: Final = 10_000


Name = Annotated[str, Meta(description="1 to 128 of A-Z a-z 0-9 . _ -, starting with a letter or digit.",
                           extra_json_schema={"pattern": NAME_PATTERN, "minLength": 1, "maxLength": limits.NAME_LENGTH_MAX})]  # fmt: skip
Instant = Annotated[str, Meta(description="RFC 3339 with an offset or Z.", extra_json_schema={"format": "date-time"})]
Json = Annotated[Raw, Meta(description="Any JSON value; given back byte for byte.")]
_LabelValue = Annotated[str, Meta(extra_json_schema={"maxLength": limits.LABEL_VALUE_LENGTH_MAX})]
Labels = Annotated[
    dict[str, _LabelValue],
    Meta(description=f"Up to {limits.LABELS_MAX} string pairs; names of 1 to {limits.LABEL_KEY_LENGTH_MAX}, "
                     f"values of up to {limits.LABEL_VALUE_LENGTH_MAX} characters.",
         max_length=limits.LABELS_MAX,
         extra_json_schema={"propertyNames": {"minLength": 1, "maxLength": limits.LABEL_KEY_LENGTH_MAX}}),
]  # fmt: skip
PriorityName = Literal["critical", "default", "bulk"]
OutcomeName = Literal["succeeded", "retryable_failure", "fatal_failure", "cancelled"]
StatusName = Literal["SCHEDULED", "QUEUED", "RUNNING", "RETRYING", "CANCEL_REQUESTED", "SUCCEEDED", "DEAD", "CANCELLED", "SKIPPED"]

LeaseS = Annotated[float, Meta(ge=limits.LEASE_S_MIN, le=limits.LEASE_S_MAX, description="Length of the lease in seconds.")]
DelayS = Annotated[float, Meta(ge=0, description="Seconds from the acceptance.", extra_json_schema={"maximum": limits.DELAY_S_MAX})]
SpreadS = Annotated[float, Meta(ge=0, le=limits.WINDOW_S_MAX, description="Spread over a window of so many seconds, by job id.")]
TimeoutS = Annotated[float, Meta(ge=limits.TIMEOUT_S_MIN, le=limits.TIMEOUT_S_MAX, description="How long one attempt may run, in seconds.")]


class Model(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    pass


# --- requests -------------------------------------------------------------------------------------------------------------------


class Precise(Model, tag_field="class", tag="precise", kw_only=True):
    """Due at `run_at`."""


class Flexible(Model, tag_field="class", tag="flexible", kw_only=True):
    """Due somewhere in the window that begins at `run_at`."""

    window_s: Annotated[float, Meta(ge=1, le=limits.WINDOW_S_MAX)]


Timing = Precise | Flexible


class Retry(Model, kw_only=True):
    """Full jitter between 0 and min(max_backoff_s, initial_backoff_s * 2^(attempt - 1))."""

    max_attempts: Annotated[int, Meta(ge=1, le=limits.ATTEMPTS_MAX)] | UnsetType = UNSET
    initial_backoff_s: Annotated[float, Meta(ge=0, le=limits.BACKOFF_S_MAX)] | UnsetType = UNSET
    max_backoff_s: Annotated[float, Meta(ge=0, le=limits.BACKOFF_S_MAX)] | UnsetType = UNSET


class Target(Model, kw_only=True):
    """Who does the work: `task`, a worker that claims it."""

    type: Literal["task"]


class JobTemplate(Model, kw_only=True):
    """A job, apart from its time."""

    queue: Name
    timing: Timing | UnsetType = UNSET
    priority: PriorityName | UnsetType = UNSET
    target: Target | UnsetType = UNSET
    payload: Json | UnsetType = UNSET
    payload_ref: Annotated[str, Meta(description="A blob's reference; refused while no blob store is configured.")] | UnsetType = UNSET
    retry: Retry | UnsetType = UNSET
    timeout_s: TimeoutS | UnsetType = UNSET
    start_deadline_s: (
        Annotated[float, Meta(ge=0, le=limits.DELAY_S_MAX, description="First attempt not started so long after fire_at: SKIPPED.")]
        | UnsetType
    ) = UNSET
    labels: Labels | UnsetType = UNSET


class JobCreate(JobTemplate, kw_only=True):
    run_at: Instant | UnsetType = UNSET
    delay_s: DelayS | UnsetType = UNSET


class BatchJob(JobCreate, kw_only=True):
    """A job of a batch."""

    idempotency_key: (
        Annotated[str, Meta(description="1 to 255 visible ASCII characters.",
                            extra_json_schema={"pattern": "^[!-~]{1,255}$"})]
        | UnsetType
    ) = UNSET  # fmt: skip


class JobBatch(Model, kw_only=True):
    # Items are decoded one by one: a bad one is its own problem. The document says what they are.
    jobs: Annotated[
        list[Raw],
        Meta(min_length=1,
             extra_json_schema={"maxItems": limits.BATCH_ITEMS_MAX, "items": {"$ref": "#/components/schemas/BatchJob"}}),
    ]  # fmt: skip
    spread_s: SpreadS | UnsetType = UNSET


class JobPatch(Model, kw_only=True):
    run_at: Instant | UnsetType = UNSET
    delay_s: DelayS | UnsetType = UNSET
    timing: Timing | UnsetType = UNSET
    priority: PriorityName | UnsetType = UNSET
    payload: Json | UnsetType = UNSET
    retry: Retry | UnsetType = UNSET
    timeout_s: TimeoutS | UnsetType = UNSET
    labels: Labels | UnsetType = UNSET


class Nothing(Model, kw_only=True):
    """A call without a body, or with an empty object."""


class ClaimRequest(Model, kw_only=True):
    max: Annotated[int, Meta(ge=1, le=limits.CLAIM_JOBS_MAX, extra_json_schema={"default": 1})] | UnsetType = UNSET
    lease_s: LeaseS | UnsetType = UNSET
    wait_s: (
        Annotated[
            float,
            Meta(ge=0, le=limits.WAIT_S_MAX, description="How long to wait for the first ready job.", extra_json_schema={"default": 0}),
        ]
        | UnsetType
    ) = UNSET
    worker: Name | UnsetType = UNSET


CLAIM_QUEUES_MAX: Final = 100


class ClaimMany(ClaimRequest, kw_only=True):
    queues: Annotated[list[Name], Meta(min_length=1, max_length=CLAIM_QUEUES_MAX, description="In the order of preference.")]


class Heartbeat(Model, kw_only=True):
    lease_s: LeaseS | UnsetType = UNSET
    progress: Json | UnsetType = UNSET


class BatchHeartbeat(Heartbeat, kw_only=True):
    token: str


_ErrorJson = Annotated[Raw, Meta(description="Text or an object; cut at 4 KiB.", extra_json_schema={"type": ["string", "object"]})]


class Completion(Model, kw_only=True):
    outcome: OutcomeName
    error: _ErrorJson | UnsetType = UNSET
    result: Json | UnsetType = UNSET
    retry_after_s: Annotated[float, Meta(ge=0, le=limits.BACKOFF_S_MAX)] | UnsetType = UNSET


class BatchCompletion(Completion, kw_only=True):
    token: str


class HeartbeatBatch(Model, kw_only=True):
    heartbeats: Annotated[
        list[Raw],
        Meta(min_length=1,
             extra_json_schema={"maxItems": limits.BATCH_ITEMS_MAX, "items": {"$ref": "#/components/schemas/BatchHeartbeat"}}),
    ]  # fmt: skip


class CompletionBatch(Model, kw_only=True):
    completions: Annotated[
        list[Raw],
        Meta(min_length=1,
             extra_json_schema={"maxItems": limits.BATCH_ITEMS_MAX, "items": {"$ref": "#/components/schemas/BatchCompletion"}}),
    ]  # fmt: skip


def _weight(default: int) -> Meta:
    return Meta(ge=1, le=1_000, extra_json_schema={"default": default})


class Weights(Model, kw_only=True):
    critical: Annotated[int, _weight(70)] | UnsetType = UNSET
    default: Annotated[int, _weight(25)] | UnsetType = UNSET
    bulk: Annotated[int, _weight(5)] | UnsetType = UNSET


RETENTION_S_MAX: Final = 10 * limits.DELAY_S_MAX


class QueuePut(Model, kw_only=True):
    """Settings left out return to their defaults; `null` is none."""

    max_concurrency: Annotated[int, Meta(ge=1, le=1000000)] | UnsetType | None = UNSET
    rate_per_s: Annotated[float, Meta(ge=0.001, le=1000000)] | UnsetType | None = UNSET
    lease_s: LeaseS | UnsetType = UNSET
    retention_s: Annotated[float, Meta(ge=0, le=RETENTION_S_MAX)] | UnsetType = UNSET
    weights: Weights | UnsetType = UNSET


MissedPolicy = Literal["run_latest", "run_all", "skip"]
OverlapPolicy = Literal["allow", "forbid", "replace", "buffer_one"]
TriggerName = Literal["on_time", "catch_up", "manual", "backfill"]

StartingDeadlineS = Annotated[
    float, Meta(ge=0, le=limits.DELAY_S_MAX, description="How long after its instant a run may still start, in seconds; none by default.")
]


class MissedRuns(Model, kw_only=True):
    """What becomes of occurrences that were due while nothing could fire."""

    policy: Annotated[MissedPolicy, Meta(extra_json_schema={"default": "run_latest"})] | UnsetType = UNSET
    starting_deadline_s: StartingDeadlineS | UnsetType | None = UNSET


class _ScheduleFields(Model, kw_only=True):
    """What a schedule has beside its name and template. `null` is the default."""

    cron: (
        Annotated[str, Meta(description="Five fields, or @daily and the like; H for a value hashed from the name. Excludes every_s.")]
        | UnsetType
        | None
    ) = UNSET
    time_zone: (
        Annotated[str, Meta(description="Of cron: a name of the IANA database.", extra_json_schema={"default": "UTC"})] | UnsetType | None
    ) = UNSET
    every_s: (
        Annotated[
            float,
            Meta(ge=limits.EVERY_S_MIN, le=limits.DELAY_S_MAX, description="Elapsed seconds between runs. Excludes cron and time_zone."),
        ]
        | UnsetType
        | None
    ) = UNSET
    anchor_at: (
        Annotated[
            str,
            Meta(
                description="Of every_s: the instant that runs are counted from; by default when every_s was set.",
                extra_json_schema={"format": "date-time"},
            ),
        ]
        | UnsetType
        | None
    ) = UNSET
    jitter_s: (
        Annotated[
            float,
            Meta(
                ge=0, le=limits.WINDOW_S_MAX, extra_json_schema={"default": 0},
                description="Runs start later than their instants by a stable offset below this, hashed from the name.",
            ),
        ]
        | UnsetType
        | None
    ) = UNSET  # fmt: skip
    missed_runs: MissedRuns | UnsetType | None = UNSET
    overlap: Annotated[OverlapPolicy, Meta(extra_json_schema={"default": "allow"})] | UnsetType | None = UNSET
    max_concurrency: Annotated[int, Meta(ge=1, le=1000000, description="Runs leased at once; none by default.")] | UnsetType | None = UNSET
    start_at: Annotated[str, Meta(description="No run before.", extra_json_schema={"format": "date-time"})] | UnsetType | None = UNSET
    end_at: Annotated[str, Meta(description="No run from then on.", extra_json_schema={"format": "date-time"})] | UnsetType | None = UNSET
    paused: Annotated[bool, Meta(description="Left out of a PUT: as it is.", extra_json_schema={"default": False})] | UnsetType | None = (
        UNSET
    )
    shadow: (
        Annotated[bool, Meta(description="Record what would have fired, run nothing.", extra_json_schema={"default": False})]
        | UnsetType
        | None
    ) = UNSET


class ScheduleCreate(_ScheduleFields, kw_only=True):
    """`cron` with `time_zone`, or `every_s` with `anchor_at`, or neither: then it runs by hand only."""

    name: Name
    job_template: JobTemplate


class SchedulePut(_ScheduleFields, kw_only=True):
    """What is left out returns to its default, but for `paused`. `name`, where given, is the one in the path."""

    name: Name | UnsetType = UNSET
    job_template: JobTemplate


class SchedulePatch(_ScheduleFields, kw_only=True):
    """What is given replaces, whole; `null` returns to the default; all else stays. `cron` takes the place of `every_s` and the other
    way round."""

    name: Name | UnsetType = UNSET
    job_template: JobTemplate | UnsetType = UNSET


class SchedulePreview(_ScheduleFields, kw_only=True):
    name: Name | UnsetType = UNSET
    job_template: JobTemplate | UnsetType = UNSET
    after: Annotated[Instant, Meta(description="Runs later than this; now by default.")] | UnsetType = UNSET
    count: Annotated[int, Meta(ge=1, le=limits.PREVIEW_MAX, extra_json_schema={"default": limits.NEXT_RUNS})] | UnsetType = UNSET


class ScheduleBatch(Model, kw_only=True):
    schedules: Annotated[
        list[Raw],
        Meta(min_length=1,
             extra_json_schema={"maxItems": limits.BATCH_ITEMS_MAX, "items": {"$ref": "#/components/schemas/ScheduleCreate"}}),
    ]  # fmt: skip


class RunCreate(Model, kw_only=True):
    """A run by hand: now, or at its own time."""

    run_at: Instant | UnsetType = UNSET
    delay_s: DelayS | UnsetType = UNSET
    payload: Annotated[Json, Meta(description="Instead of the template's.")] | UnsetType = UNSET


class BackfillRequest(Model, kw_only=True):
    from_: Annotated[Instant, Meta(description="Inclusive.")] = msgspec.field(name="from")
    to: Annotated[Instant, Meta(description="Exclusive.")]


class DeadSelection(Model, kw_only=True):
    """Either `job_ids`, or `all` with what narrows it."""

    job_ids: Annotated[list[str], Meta(min_length=1, max_length=limits.BATCH_ITEMS_MAX)] | UnsetType = UNSET
    all: Literal[True] | UnsetType = UNSET
    error_contains: Annotated[str, Meta(min_length=1)] | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=1)] | UnsetType = UNSET


class DeadRedrive(DeadSelection, kw_only=True):
    spread_s: SpreadS | UnsetType = UNSET


class ClockAdvance(Model, kw_only=True):
    """Either `by_s` or `to`."""

    by_s: Annotated[float, Meta(ge=0)] | UnsetType = UNSET
    to: Instant | UnsetType = UNSET


# --- answers --------------------------------------------------------------------------------------------------------------------


class Answer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    pass


class FaultInfo(Answer, kw_only=True):
    pointer: str
    detail: str


class Problem(Answer, kw_only=True):
    """Problem details, RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    request_id: str
    errors: list[FaultInfo] | UnsetType = UNSET


class PreciseInfo(Answer, tag_field="class", tag="precise", kw_only=True):
    pass


class FlexibleInfo(Answer, tag_field="class", tag="flexible", kw_only=True):
    window_s: float


class RetryInfo(Answer, kw_only=True):
    max_attempts: int
    initial_backoff_s: float
    max_backoff_s: float


_NominalReading = Annotated[str, Meta(description="What the zone's clock was to show, where it jumped over that: 2026-03-08T02:30.")]


class IntervalInfo(Answer, kw_only=True):
    """What a run covers: from its predecessor's instant to its own."""

    from_: Instant = msgspec.field(name="from")
    to: Instant


class Job(Answer, kw_only=True):
    job_id: str
    queue: str
    status: StatusName
    run_at: Instant
    fire_at: Instant
    timing: PreciseInfo | FlexibleInfo
    priority: PriorityName
    target: Annotated[dict[str, Any], Meta(examples=[{"type": "task"}])]
    payload: Json | UnsetType = UNSET
    payload_ref: str | UnsetType = UNSET
    retry: RetryInfo
    timeout_s: float
    start_deadline_s: float | UnsetType = UNSET
    labels: dict[str, str]
    version: int
    attempt: int
    created_at: Instant
    updated_at: Instant
    started_at: Instant | UnsetType = UNSET
    finished_at: Instant | UnsetType = UNSET
    next_attempt_at: Instant | UnsetType = UNSET
    last_error: Json | UnsetType = UNSET
    result: Json | UnsetType = UNSET
    progress: Json | UnsetType = UNSET
    schedule: str | UnsetType = UNSET
    scheduled_for: Annotated[Instant, Meta(description="The occurrence; absent of a run by hand.")] | UnsetType = UNSET
    data_interval: IntervalInfo | UnsetType = UNSET
    trigger: TriggerName | UnsetType = UNSET
    scheduled_local: _NominalReading | UnsetType = UNSET
    flow_run: str | UnsetType = UNSET


class JobResult(Answer, kw_only=True):
    status: int
    job: Job | UnsetType = UNSET
    problem: Problem | UnsetType = UNSET


class JobResults(Answer, kw_only=True):
    results: list[JobResult]


class JobPage(Answer, kw_only=True):
    jobs: list[Job]
    next_cursor: str | None


class Attempt(Answer, kw_only=True):
    attempt: int
    worker: str | None
    started_at: Instant | None
    ended_at: Instant | None
    lease_expires_at: Instant | None
    outcome: Literal[
        "running", "succeeded", "retryable_failure", "fatal_failure", "cancelled", "lease_expired", "timed_out", "released"
    ]  # fmt: skip
    error: Json
    http_status: int | UnsetType = UNSET


class Attempts(Answer, kw_only=True):
    attempts: list[Attempt]


class Event(Answer, kw_only=True):
    at: Instant
    from_: StatusName | None = msgspec.field(name="from")
    to: StatusName
    attempt: int
    version: int
    actor: str | None
    detail: str | None


class Events(Answer, kw_only=True):
    events: list[Event]


class ClaimedJobInfo(Answer, kw_only=True):
    job_id: str
    queue: str
    attempt: int
    lease_token: str
    lease_expires_at: Instant
    idempotency_key: str
    fencing_token: int
    payload: Json | UnsetType = UNSET
    payload_ref: str | UnsetType = UNSET
    run_at: Instant
    fire_at: Instant
    timeout_s: float
    max_attempts: int
    labels: dict[str, str]
    schedule: str | UnsetType = UNSET
    scheduled_for: Instant | UnsetType = UNSET
    data_interval: IntervalInfo | UnsetType = UNSET
    trigger: TriggerName | UnsetType = UNSET
    scheduled_local: _NominalReading | UnsetType = UNSET
    traceparent: str | UnsetType = UNSET


class Claimed(Answer, kw_only=True):
    jobs: list[ClaimedJobInfo]


class HeartbeatInfo(Answer, kw_only=True):
    lease_expires_at: Instant
    cancel_requested: bool


class CompletionInfo(Answer, kw_only=True):
    job_id: str
    status: StatusName
    next_attempt_at: Instant | UnsetType = UNSET


class ReleaseInfo(Answer, kw_only=True):
    job_id: str
    status: StatusName


class HeartbeatResult(Answer, kw_only=True):
    status: int
    lease_expires_at: Instant | UnsetType = UNSET
    cancel_requested: bool | UnsetType = UNSET
    problem: Problem | UnsetType = UNSET


class HeartbeatResults(Answer, kw_only=True):
    results: list[HeartbeatResult]


class CompletionResult(Answer, kw_only=True):
    status: int
    job_id: str | UnsetType = UNSET
    job_status: StatusName | UnsetType = UNSET
    next_attempt_at: Instant | UnsetType = UNSET
    problem: Problem | UnsetType = UNSET


class CompletionResults(Answer, kw_only=True):
    results: list[CompletionResult]


class WeightsInfo(Answer, kw_only=True):
    critical: int
    default: int
    bulk: int


class QueueSettingsInfo(Answer, kw_only=True):
    max_concurrency: int | None
    rate_per_s: float | None
    lease_s: float
    retention_s: float
    weights: WeightsInfo


class LatenessInfo(Answer, kw_only=True):
    p50_s: float | None
    p99_s: float | None


class Queue(Answer, kw_only=True):
    name: str
    depth: Annotated[dict[str, dict[str, int]], Meta(description="Jobs by status and priority.")]
    oldest_ready_age_s: float | None
    running: int
    lateness: LatenessInfo
    paused: bool
    settings: QueueSettingsInfo


class QueuePage(Answer, kw_only=True):
    queues: list[Queue]
    next_cursor: str | None


class MissedRunsInfo(Answer, kw_only=True):
    policy: MissedPolicy
    starting_deadline_s: float | None


class JobTemplateInfo(Answer, kw_only=True):
    queue: str
    timing: PreciseInfo | FlexibleInfo
    priority: PriorityName
    target: Annotated[dict[str, Any], Meta(examples=[{"type": "task"}])]
    payload: Json | UnsetType = UNSET
    payload_ref: str | UnsetType = UNSET
    retry: RetryInfo
    timeout_s: float
    start_deadline_s: float | UnsetType = UNSET
    labels: dict[str, str]


class LastRun(Answer, kw_only=True):
    job_id: str
    scheduled_for: Annotated[Instant, Meta(description="null: a run by hand.")] | None
    status: StatusName
    fire_at: Instant
    finished_at: Instant | UnsetType = UNSET


class Schedule(Answer, kw_only=True):
    """`cron` with `time_zone`, or `every_s` with `anchor_at`, or neither."""

    schedule_id: str
    name: str
    cron: str | UnsetType = UNSET
    time_zone: str | UnsetType = UNSET
    every_s: float | UnsetType = UNSET
    anchor_at: Instant | UnsetType = UNSET
    job_template: JobTemplateInfo
    jitter_s: float
    missed_runs: MissedRunsInfo
    overlap: OverlapPolicy
    max_concurrency: int | None
    start_at: Instant | None
    end_at: Instant | None
    paused: bool
    shadow: bool
    next_runs: Annotated[list[Instant], Meta(description="The next five instants, without jitter; none while it is paused.")]
    next_runs_local: Annotated[list[str], Meta(description="The same as the zone's clock shows them, with its offset.")]
    warnings: list[str]
    last_run: LastRun | None
    skipped: Annotated[dict[str, int], Meta(description="Occurrences that did not run, by reason.")]
    version: int
    created_at: Instant
    updated_at: Instant
    time_zone_data: Annotated[str, Meta(description="Version of the zone data that the waiting occurrence was computed with.")] | None


class ScheduleResult(Answer, kw_only=True):
    status: int
    schedule: Schedule | UnsetType = UNSET
    problem: Problem | UnsetType = UNSET


class ScheduleResults(Answer, kw_only=True):
    results: list[ScheduleResult]


class SchedulePage(Answer, kw_only=True):
    schedules: list[Schedule]
    next_cursor: str | None


class PreviewInfo(Answer, kw_only=True):
    next_runs: list[Instant]
    next_runs_local: list[str]
    warnings: list[str]


class SkippedInfo(Answer, kw_only=True):
    """Occurrences left out without a job: the first, the last, how many, and why."""

    from_: Instant = msgspec.field(name="from")
    to: Instant
    count: int
    reason: str


class RunPage(Answer, kw_only=True):
    jobs: list[Job]
    skipped: list[SkippedInfo]
    next_cursor: str | None


class BackfillInfo(Answer, kw_only=True):
    created: int
    skipped: int
    existing: int


class QueueDue(Answer, kw_only=True):
    queue: Name
    jobs: int


class MinuteDue(Answer, kw_only=True):
    """Jobs due in the minute that begins at `at`."""

    at: Instant
    jobs: int
    queues: list[QueueDue]


class Forecast(Answer, kw_only=True):
    """Minutes without a job are left out."""

    from_: Instant = msgspec.field(name="from")
    to: Instant
    minutes: list[MinuteDue]


class ZonesInfo(Answer, kw_only=True):
    version: str
    zones: list[str]
    moved: int


class Redriven(Answer, kw_only=True):
    redriven: int


class Discarded(Answer, kw_only=True):
    discarded: int


class ClockInfo(Answer, kw_only=True):
    now: Instant


class Alive(Answer, kw_only=True):
    status: Literal["ok"]


class Ready(Answer, kw_only=True):
    ready: bool
    reasons: list[str]


# --- checks that annotations do not make ----------------------------------------------------------------------------------------


def check_item_count(items: Sequence[Raw], field: str) -> None:
    """Raise where a batch holds too many: a limit of size, so a 413, as bytes are."""
    if len(items) > limits.BATCH_ITEMS_MAX:
        detail = f"{field} has {len(items)} items, above {limits.BATCH_ITEMS_MAX}; send several batches"
        raise PayloadTooLarge(detail, errors=({"pointer": "/" + field, "detail": detail},))


def check_name(name: str, pointer: str, what: str) -> None:
    """Raise unless `name` may name a queue, a worker, a schedule or a tenant; the message says which character is wrong."""
    if name in _known_names:
        return
    if _NAME.match(name) is None:
        raise invalid(
            pointer, f"{what} {shown(name)} {_fault_of_name(name)}; use 1 to 128 of A-Z a-z 0-9 . _ -, starting with a letter or digit"
        )
    if len(_known_names) >= _KNOWN_NAMES_MAX:
        _known_names.clear()
    _known_names.add(name)


def _fault_of_name(name: str) -> str:
    if not name:
        return "is empty"
    for character in name:
        if _NAME_LETTER.match(character) is None:
            return f"holds {shown(character)} (U+{ord(character):04X})"
    if len(name) > limits.NAME_LENGTH_MAX:
        return f"has {len(name)} characters, above {limits.NAME_LENGTH_MAX}"
    return f"starts with {shown(name[0])}"


def ms_of(seconds: float, field: str, faults: list[Fault]) -> int:
    """Integer milliseconds; finer than 0.001 s is a fault."""
    ms = times.to_ms(seconds)
    if ms is None:
        faults.append({"pointer": "/" + field.replace(".", "/"), "detail": f"{field} {seconds!r} is finer than 0.001; round it"})
        return 0
    return ms


def check_labels(labels: dict[str, str], faults: list[Fault]) -> None:
    for key, value in labels.items():
        if not 1 <= len(key) <= limits.LABEL_KEY_LENGTH_MAX:
            faults.append({
                "pointer": "/labels",
                "detail": f"the label name {shown(key)} has {len(key)} characters; 1 to {limits.LABEL_KEY_LENGTH_MAX} are allowed",
            })  # fmt: skip
        if len(value) > limits.LABEL_VALUE_LENGTH_MAX:
            faults.append({
                "pointer": "/labels",
                "detail": f"the value of label {shown(key)} has {len(value)} characters, above {limits.LABEL_VALUE_LENGTH_MAX}",
            })  # fmt: skip
