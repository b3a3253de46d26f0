"""What `api` and `cli` may ask of a node, and what they get: the one face between HTTP and everything below it.

Milliseconds and bytes in and out; RFC 3339, seconds and JSON envelopes stay in `api/`. Methods that change state raise
`Unavailable` before anything was accepted, or `OutcomeUnknown` after; refusals come back in `Reply.refusal`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from wheelsched.cluster.admin import ClusterAdmin
from wheelsched.core.clock import Clock, Rng
from wheelsched.core.settings import Settings
from wheelsched.dispatch.claims import ClaimedJob
from wheelsched.model.commands import AnyCommand, Reply
from wheelsched.model.rows import AttemptRow, JobSpec, JobState, QueueSettings
from wheelsched.model.schedules import Course, Definition, SkipRow
from wheelsched.model.states import Status
from wheelsched.node.backup import Backups

__all__ = [
    "BackfillCounts", "ClaimedJob", "HeartbeatReply", "JobFilter", "JobPage", "JobRecord", "MinuteForecast", "NodeFace", "Preview",
    "QueueView", "Readiness", "RunPage", "ScheduleRecord", "ZonesReloaded",
]  # fmt: skip


class JobRecord(msgspec.Struct, frozen=True, gc=False):
    """A job as seen now. `payload` is the client's JSON bytes, `error`, `result`, `progress` JSON bytes; empty: none."""

    state: JobState
    status: Status
    spec: JobSpec
    payload: bytes
    error: bytes = b""
    result: bytes = b""
    progress: bytes = b""


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs a listing gives. Empty `queue` or `statuses`: any. Instants bound `fire_at`: from <= fire_at < to."""

    tenant: str
    queue: str = ""
    statuses: frozenset[Status] = frozenset()
    labels: tuple[tuple[str, str], ...] = ()
    from_ms: int = 0
    to_ms: int = 2**62
    schedule: str = ""


@dataclass(frozen=True, slots=True)
class JobPage:
    """`cursor` is the position after the last job looked at (24 bytes: fire_at, id), None on the last page."""

    jobs: list[JobRecord]
    cursor: bytes | None


@dataclass(frozen=True, slots=True)
class QueueView:
    """Depth by seen status and priority (critical, default, bulk); ages and lateness in seconds, None where nothing is known."""

    tenant: str
    name: str
    settings: QueueSettings
    depth: dict[Status, tuple[int, int, int]]
    running: int
    oldest_ready_age_s: float | None
    lateness_p50_s: float | None
    lateness_p99_s: float | None


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """`refusal` "stale-lease": not the current attempt."""

    refusal: str
    detail: str
    lease_expires_at_ms: int = 0
    cancel_requested: bool = False


@dataclass(frozen=True, slots=True)
class Preview:
    """The next instants of a schedule (UTC ms), each as its zone's clock shows it (RFC 3339 with offset), and what may surprise."""

    next_runs: tuple[int, ...]
    local: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ScheduleRecord:
    """A schedule as it is now. `last_run`: the job of its last run, None before the first or once that is purged."""

    definition: Definition
    course: Course
    preview: Preview
    last_run: JobRecord | None


@dataclass(frozen=True, slots=True)
class RunPage:
    """Runs of a schedule, newest first, and what that stretch left out without a job. `cursor`: opaque bytes, None on the last page."""

    jobs: list[JobRecord]
    skipped: list[SkipRow]
    cursor: bytes | None


@dataclass(frozen=True, slots=True)
class BackfillCounts:
    """Occurrences of the range: runs made, left out by the overlap policy, and those that had a job already."""

    created: int
    skipped: int
    existing: int


class MinuteForecast(msgspec.Struct, frozen=True, gc=False):
    """One minute to come. `queues`: jobs due by queue, the most first."""

    at_ms: int
    queues: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class ZonesReloaded:
    """Time-zone data after a reload: its version, the zones that changed, how many waiting occurrences moved."""

    version: str
    zones: tuple[str, ...]
    moved: int


@dataclass(frozen=True, slots=True)
class Readiness:
    """`ready` False: `reasons` say what is missing, in words."""

    ready: bool
    reasons: tuple[str, ...]


class NodeFace(Protocol):
    settings: Settings
    clock: Clock
    rng: Rng

    @property
    def cluster(self) -> ClusterAdmin | None:
        """Members, groups and their changes; None of a node that is alone."""
        ...

    def new_job_id(self) -> bytes: ...

    def check_admission(self, *, new_jobs: bool = True) -> None:
        """Raise `Unavailable` where a call cannot be taken now: draining, not ready, loop lagging. The disk being low refuses only
        what makes `new_jobs`: claiming and ending the jobs there are is what frees it."""
        ...

    async def propose(self, command: AnyCommand) -> Reply:
        """Route a command to its group, through the log; return when it is applied (and so durable)."""
        ...

    async def propose_many(self, commands: Sequence[AnyCommand]) -> list[Reply]:
        """The same for many, in order, with one wait."""
        ...

    async def read_job(self, tenant: str, job_id: bytes) -> JobRecord | None:
        """None: no such job, another tenant's, or discarded."""
        ...

    async def read_attempts(self, tenant: str, job_id: bytes) -> tuple[JobRecord, list[tuple[int, AttemptRow]]] | None:
        """The job and its recorded transitions as (version they led to, row), oldest first."""
        ...

    async def list_jobs(self, wanted: JobFilter, *, cursor: bytes | None, limit: int) -> JobPage: ...

    async def claim(
        self, tenant: str, queues: Sequence[str], *, jobs_max: int, lease_ms: int | None, wait_ms: int, worker: str
    ) -> list[ClaimedJob]:
        """Lease up to `jobs_max` ready jobs; with none ready wait up to `wait_ms` (real time) for the first. Cancelling the call
        while it waits or claims gives back whatever was claimed for it, uncounted."""
        ...

    def give_back(self, jobs: Sequence[ClaimedJob]) -> None:
        """The answer with these jobs did not reach the worker: release them, uncounted, in the background."""
        ...

    async def heartbeat(
        self, job_id: bytes, attempt: int, fencing: int, *, lease_ms: int | None, progress: bytes | None
    ) -> HeartbeatReply: ...

    async def complete(
        self, job_id: bytes, attempt: int, fencing: int, *, outcome: int, error: bytes, result: bytes, retry_after_ms: int
    ) -> Reply: ...

    async def complete_many(self, completions: Sequence[tuple[bytes, int, int, int, bytes, bytes, int]]) -> list[Reply]:
        """As `complete`, each (job id, attempt, fencing, outcome, error, result, retry_after_ms)."""
        ...

    async def queue_view(self, tenant: str, queue: str) -> QueueView | None: ...

    async def list_queues(self, tenant: str, *, after: str, limit: int) -> tuple[list[QueueView], str | None]:
        """Queues by name from the first after `after`; the name to go on after, None at the end."""
        ...

    async def put_queue(self, tenant: str, queue: str, settings: QueueSettings, *, actor: str) -> QueueView: ...

    async def pause_queue(self, tenant: str, queue: str, paused: bool, *, actor: str) -> QueueView: ...

    # Schedules. A definition is checked by `preview`, which raises InvalidSchedule (pointers from /cron, /time_zone … on); `put_schedule`
    # relies on it.

    def preview(self, definition: Definition, *, after_ms: int, count: int) -> Preview: ...

    async def put_schedule(
        self, definition: Definition, *, create: bool = False, if_version: int = 0, paused: bool | None = None, actor: str = ""
    ) -> tuple[ScheduleRecord, bool]:
        """Create or replace; True where it was created. `paused` None: as it is. `schedule_id`, `version`, times and `paused` of the
        definition are the node's. Raises NameTaken (`create`), VersionMismatch, IdempotencyKeyReused; NotFound with `if_version`."""
        ...

    async def read_schedule(self, tenant: str, name: str) -> ScheduleRecord | None: ...

    async def drop_schedule(self, tenant: str, name: str, *, actor: str) -> None:
        """Raises NotFound."""
        ...

    async def pause_schedule(self, tenant: str, name: str, paused: bool, *, actor: str) -> ScheduleRecord:
        """Raises NotFound."""
        ...

    async def list_schedules(self, tenant: str, *, queue: str, after: str, limit: int) -> tuple[list[ScheduleRecord], str | None]:
        """By name from the first after `after`, of one queue where that is not empty; the name to go on after, None at the end."""
        ...

    async def start_run(
        self,
        tenant: str,
        name: str,
        *,
        run_at_ms: int,
        delay_ms: int,
        payload: bytes | None,
        key: str,
        fingerprint: bytes,
        actor: str,
    ) -> Reply:
        """A run by hand (`run_at_ms` -1: after the delay). Refusals: not-found, concurrency-limit, idempotency-key-reused."""
        ...

    async def backfill(self, tenant: str, name: str, *, from_ms: int, to_ms: int, actor: str) -> BackfillCounts:
        """A run for each occurrence in [from, to) without a job. Raises NotFound, or InvalidRequest for a range too large."""
        ...

    async def list_runs(self, tenant: str, name: str, *, cursor: bytes | None, limit: int) -> RunPage | None:
        """None: no such schedule."""
        ...

    async def forecast(self, tenant: str, *, from_ms: int, to_ms: int) -> list[MinuteForecast]:
        """Jobs of a tenant that will be due in each minute that begins in [from, to), those with none left out."""
        ...

    async def reload_zones(self) -> ZonesReloaded:
        """Read the time-zone data again and move the waiting occurrences of zones that changed."""
        ...

    async def advance_clock(self, to_ms: int) -> int:
        """Virtual clock only: fire everything on the way, each at its instant; return the new now. Raises `NotFound` with a real clock."""
        ...

    @property
    def clock_is_virtual(self) -> bool: ...

    @property
    def backups(self) -> Backups:
        """Backups written by this node."""
        ...

    async def release_hold(self, *, actor: str) -> bool:
        """Let a cluster that was restored held dispatch from now on; False where it was not held."""
        ...

    def readiness(self) -> Readiness: ...

    def status(self) -> dict[str, Any]:
        """The JSON of `/status`."""
        ...

    def render_metrics(self) -> tuple[bytes, str]:
        """(body, content type) of `/metrics`."""
        ...
