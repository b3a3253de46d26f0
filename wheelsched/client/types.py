"""What the calls answer: frozen records. Fields a later server adds are ignored, those it leaves out are None.

JSON values (`payload`, `result`, `progress`, errors) stay bytes until they are asked for: `payload_raw` is what was sent,
`payload` decodes it each time. Instants are aware datetimes in UTC; a `status` is the name the API gives it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final, Generic, TypeVar

import msgspec
from msgspec import field

from wheelsched.client.encoding import decode_json
from wheelsched.model.states import FINAL

T = TypeVar("T")

_NULL: Final = msgspec.Raw(b"null")
_FINAL_NAMES: Final = frozenset(status.name for status in FINAL)


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    pass


class DataInterval(_Record, frozen=True, kw_only=True):
    """What a run of a schedule covers: from its predecessor's instant up to its own."""

    from_at: datetime = field(name="from")
    to_at: datetime = field(name="to")


class Job(_Record, frozen=True, kw_only=True):
    """A job as it was when the server answered. `version` grows with every change and is what `update(if_version=)` compares."""

    job_id: str
    queue: str
    status: str
    fire_at: datetime
    run_at: datetime | None = None
    timing: Mapping[str, Any] = {}
    priority: str = "default"
    target: Mapping[str, Any] = {}
    payload_raw: msgspec.Raw = field(name="payload", default=_NULL)
    payload_ref: str | None = None
    retry: Mapping[str, Any] = {}
    timeout_s: float | None = None
    start_deadline_s: float | None = None
    labels: Mapping[str, str] = {}
    version: int = 1
    attempt: int = 0
    created_at: datetime | None = None
    updated_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    next_attempt_at: datetime | None = None
    last_error_raw: msgspec.Raw = field(name="last_error", default=_NULL)
    result_raw: msgspec.Raw = field(name="result", default=_NULL)
    progress_raw: msgspec.Raw = field(name="progress", default=_NULL)
    schedule: str | None = None
    scheduled_for: datetime | None = None
    data_interval: DataInterval | None = None
    trigger: str | None = None
    scheduled_local: str | None = None
    flow_run: str | None = None

    @property
    def payload(self) -> Any:
        return decode_json(self.payload_raw)

    @property
    def result(self) -> Any:
        return decode_json(self.result_raw)

    @property
    def progress(self) -> Any:
        return decode_json(self.progress_raw)

    @property
    def last_error(self) -> Any:
        return decode_json(self.last_error_raw)

    @property
    def is_final(self) -> bool:
        """Whether nothing happens to it any more, short of a redrive."""
        return self.status in _FINAL_NAMES


class Attempt(_Record, frozen=True, kw_only=True):
    attempt: int
    outcome: str
    worker: str | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    lease_expires_at: datetime | None = None
    error_raw: msgspec.Raw = field(name="error", default=_NULL)
    http_status: int | None = None

    @property
    def error(self) -> Any:
        return decode_json(self.error_raw)


class Event(_Record, frozen=True, kw_only=True):
    """One recorded transition of a job."""

    at: datetime
    to_status: str | None = field(name="to", default=None)
    from_status: str | None = field(name="from", default=None)
    attempt: int | None = None
    version: int | None = None
    actor: str | None = None
    detail: Any = None


class Lateness(_Record, frozen=True, kw_only=True):
    """Start minus `fire_at` over the last five minutes; None where nothing started."""

    p50_s: float | None = None
    p99_s: float | None = None


class QueueSettings(_Record, frozen=True, kw_only=True):
    max_concurrency: int | None = None
    rate_per_s: float | None = None
    lease_s: float | None = None
    retention_s: float | None = None
    weights: Mapping[str, int] = {}


class Queue(_Record, frozen=True, kw_only=True):
    """`depth` is {status: {priority: count}}."""

    name: str
    depth: Mapping[str, Mapping[str, int]] = {}
    oldest_ready_age_s: float | None = None
    running: int = 0
    lateness: Lateness | None = None
    paused: bool = False
    settings: QueueSettings = QueueSettings()


class ClaimedJob(_Record, frozen=True, kw_only=True):
    """A job leased to this caller until `lease_expires_at`, by the server's clock; `lease_token` is the handle of that right."""

    job_id: str
    queue: str
    attempt: int
    lease_token: str
    lease_expires_at: datetime
    idempotency_key: str
    fencing_token: int
    payload_raw: msgspec.Raw = field(name="payload", default=_NULL)
    payload_ref: str | None = None
    run_at: datetime | None = None
    fire_at: datetime | None = None
    timeout_s: float | None = None
    max_attempts: int | None = None
    labels: Mapping[str, str] = {}
    schedule: str | None = None
    scheduled_for: datetime | None = None
    data_interval: DataInterval | None = None
    trigger: str | None = None
    scheduled_local: str | None = None
    traceparent: str | None = None

    @property
    def payload(self) -> Any:
        return decode_json(self.payload_raw)


class Lease(_Record, frozen=True, kw_only=True):
    """The answer to a heartbeat."""

    lease_expires_at: datetime
    cancel_requested: bool = False


class Completed(_Record, frozen=True, kw_only=True):
    """The answer to a completion: what became of the job."""

    job_id: str
    status: str
    next_attempt_at: datetime | None = None


class Skipped(_Record, frozen=True, kw_only=True):
    """Occurrences of a schedule that were left out without a job: the first, the last, how many, and why."""

    from_at: datetime = field(name="from")
    to_at: datetime = field(name="to")
    count: int
    reason: str


class Backfilled(_Record, frozen=True, kw_only=True):
    """Occurrences of a backfill's range: runs made, left out by the overlap policy, and those that had a job already."""

    created: int
    skipped: int
    existing: int


class ZonesReloaded(_Record, frozen=True, kw_only=True):
    """Time-zone data after a reload: its version, the zones that changed, how many waiting runs moved."""

    version: str
    zones: tuple[str, ...] = ()
    moved: int = 0


class QueueForecast(_Record, frozen=True, kw_only=True):
    queue: str
    jobs: int


class MinuteForecast(_Record, frozen=True, kw_only=True):
    """Jobs due in the minute that begins at `at`."""

    at: datetime
    jobs: int
    queues: tuple[QueueForecast, ...] = ()


class Forecast(_Record, frozen=True, kw_only=True):
    """Jobs that will be due by minute, those with none left out."""

    minutes: tuple[MinuteForecast, ...] = ()


class Runs(_Record, frozen=True, kw_only=True):
    """One page of a schedule's runs, newest first, and what that stretch left out without a job."""

    items: tuple[Job, ...] = field(name="jobs")
    skipped: tuple[Skipped, ...] = ()
    next_cursor: str | None = None

    def __iter__(self) -> Iterator[Job]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


class Page(_Record, Generic[T], frozen=True, kw_only=True):
    """One page of a listing. It may be short or empty and still have a `next_cursor`; None there means the end."""

    items: tuple[T, ...]
    next_cursor: str | None = None

    def __iter__(self) -> Iterator[T]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)
