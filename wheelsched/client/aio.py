"""`AsyncClient`: one method for each call of the API."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from random import Random
from types import TracebackType
from typing import Any, Final, Literal, Protocol, Self, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from wheelsched.client.encoding import decode_json, encode_json, encode_object, format_instant, header_value, path_segment
from wheelsched.client.transport import Backoff, Repeat, Transport, is_repeatable
from wheelsched.client.types import (
    Attempt,
    Backfilled,
    ClaimedJob,
    Completed,
    Event,
    Forecast,
    Job,
    Lease,
    Page,
    Queue,
    Runs,
    ZonesReloaded,
)
from wheelsched.core.errors import NotFound, OutcomeUnknown, StaleLease, Unavailable, WheelschedError, from_problem
from wheelsched.core.limits import BATCH_BYTES_MAX, BATCH_ITEMS_MAX, CLAIM_JOBS_MAX, IDEMPOTENCY_KEY_LENGTH_MAX, PAGE_MAX

PriorityName = Literal["critical", "default", "bulk"]
OutcomeName = Literal["succeeded", "retryable_failure", "fatal_failure", "cancelled"]

T = TypeVar("T")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

# What works through up to 1,000 jobs, or a clock that fires a year of timers, may take this many times a single call's time.
_BATCH_TIMEOUT_FACTOR: Final = 4


class BatchFailed(WheelschedError):
    """Some jobs or schedules of a batch were not created. `results` has what became of each, or its error, in the order given."""

    code, status, title = "batch-failed", 400, "Batch failed in part"

    def __init__(self, results: Sequence[Any], what: str = "jobs") -> None:
        failed = [(index, result) for index, result in enumerate(results) if isinstance(result, WheelschedError)]
        index, first = failed[0]
        super().__init__(f"{len(failed)} of {len(results)} {what} were not created; the first is number {index}: {first.detail}")
        self.results = tuple(results)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often an attempt that failed is repeated; what is None is left to the server (6 attempts, 10 s, 600 s)."""

    max_attempts: int | None = None
    initial_backoff_s: float | None = None
    max_backoff_s: float | None = None


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to be created: what `create` takes, as a value for `create_many`. None: the server's default.

    `run_at` and `delay_s` exclude each other; neither: now. `window_s` makes the job flexible: it starts inside that window.
    """

    queue: str
    payload: Any = None
    _: KW_ONLY
    run_at: datetime | str | None = None
    delay_s: float | None = None
    window_s: float | None = None
    priority: PriorityName | None = None
    target: Mapping[str, Any] | None = None
    retry: RetryPolicy | Mapping[str, Any] | None = None
    timeout_s: float | None = None
    start_deadline_s: float | None = None
    labels: Mapping[str, str] | None = None
    idempotency_key: str | None = None

    def body(self) -> dict[str, Any]:
        """The members of the request, without the key; raises ValueError or TypeError for what must not be sent."""
        body = _job_fields(self)
        body["queue"] = self.queue
        if self.payload is not None:
            body["payload"] = msgspec.Raw(encode_json(self.payload))
        for name in ("target", "start_deadline_s"):
            if (value := getattr(self, name)) is not None:
                body[name] = value
        return body


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changes:
    run_at: datetime | str | None
    delay_s: float | None
    window_s: float | None
    priority: PriorityName | None
    retry: RetryPolicy | Mapping[str, Any] | None
    timeout_s: float | None
    labels: Mapping[str, str] | None


def _job_fields(job: NewJob | _Changes) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if job.run_at is not None and job.delay_s is not None:
        raise ValueError("run_at and delay_s exclude each other; give one of them")
    if job.run_at is not None:
        body["run_at"] = format_instant(job.run_at)
    if job.window_s is not None:
        body["timing"] = {"class": "flexible", "window_s": job.window_s}
    if job.retry is not None:
        body["retry"] = _policy(job.retry)
    for name in ("delay_s", "priority", "timeout_s", "labels"):
        if (value := getattr(job, name)) is not None:
            body[name] = value
    return body


def _policy(retry: RetryPolicy | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(retry, Mapping):
        return dict(retry)
    named = (
        ("max_attempts", retry.max_attempts),
        ("initial_backoff_s", retry.initial_backoff_s),
        ("max_backoff_s", retry.max_backoff_s),
    )
    return {name: value for name, value in named if value is not None}


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """One lease of `heartbeat_many`. `progress` left out: what was reported last stays."""

    token: str
    lease_s: float | None = None
    progress: Any = UNSET

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"token": self.token}
        if self.lease_s is not None:
            body["lease_s"] = self.lease_s
        if self.progress is not UNSET:
            body["progress"] = msgspec.Raw(encode_json(self.progress))
        return body


@dataclass(frozen=True, slots=True)
class Completion:
    """One end of `complete_many`. `error` is text or an object, `result` any JSON value; None: none."""

    token: str
    outcome: OutcomeName
    error: str | Mapping[str, Any] | None = None
    result: Any = None
    retry_after_s: float | None = None

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"token": self.token, "outcome": self.outcome}
        if self.error is not None:
            body["error"] = msgspec.Raw(encode_json(self.error))
        if self.result is not None:
            body["result"] = msgspec.Raw(encode_json(self.result))
        if self.retry_after_s is not None:
            body["retry_after_s"] = self.retry_after_s
        return body


class _JobPage(msgspec.Struct):
    jobs: tuple[Job, ...]
    next_cursor: str | None = None


class _QueuePage(msgspec.Struct):
    queues: tuple[Queue, ...]
    next_cursor: str | None = None


class _Attempts(msgspec.Struct):
    attempts: tuple[Attempt, ...]


class _Events(msgspec.Struct):
    events: tuple[Event, ...]


class _Claimed(msgspec.Struct):
    jobs: tuple[ClaimedJob, ...]


class _Now(msgspec.Struct):
    now: datetime


class _Created(msgspec.Struct):
    status: int
    job: Job | None = None
    problem: dict[str, Any] | None = None

    def value(self) -> Job | WheelschedError:
        return self.job if self.job is not None else _item_error(self.status, self.problem)


_NOTHING: Final = msgspec.Raw(b"")


class _Stored(msgspec.Struct):
    status: int
    schedule: msgspec.Raw = _NOTHING
    problem: dict[str, Any] | None = None

    def value(self) -> dict[str, Any] | WheelschedError:
        return _schedule(self.schedule) if bytes(self.schedule) else _item_error(self.status, self.problem)


class _SchedulePage(msgspec.Struct):
    schedules: tuple[msgspec.Raw, ...]
    next_cursor: str | None = None


class _Beaten(msgspec.Struct):
    status: int
    lease_expires_at: datetime | None = None
    cancel_requested: bool = False
    problem: dict[str, Any] | None = None

    def value(self) -> Lease | WheelschedError:
        if self.lease_expires_at is None:
            return _item_error(self.status, self.problem)
        return Lease(lease_expires_at=self.lease_expires_at, cancel_requested=self.cancel_requested)


class _Ended(msgspec.Struct):
    status: int
    job_id: str | None = None
    job_status: str | None = None
    next_attempt_at: datetime | None = None
    problem: dict[str, Any] | None = None

    def value(self) -> Completed | WheelschedError:
        if self.job_id is None or self.job_status is None:
            return _item_error(self.status, self.problem)
        return Completed(job_id=self.job_id, status=self.job_status, next_attempt_at=self.next_attempt_at)


class _Results(msgspec.Struct):
    results: list[msgspec.Raw]


class _Valued(Protocol[R_co]):
    def value(self) -> R_co | WheelschedError: ...


def _item_error(status: int, problem: dict[str, Any] | None) -> WheelschedError:
    return from_problem(problem or {"detail": f"the item was answered {status} without a reason"})


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise WheelschedError(f"the server's answer is not a {kind.__name__.lstrip('_')}: {error}") from error


def _batch_values(body: bytes, kind: type[_Valued[R]], count: int) -> list[R | WheelschedError]:
    raws = _decoded(body, _Results).results
    if len(raws) != count:
        raise WheelschedError(f"the server answered {len(raws)} results for {count} items")
    return [_decoded(bytes(raw), kind).value() for raw in raws]


def _chunks(items: Sequence[bytes], *, overhead: int) -> Iterator[Sequence[bytes]]:
    """Runs of items that fit a batch; one that is too large by itself goes alone, for the server to refuse."""
    start, size = 0, overhead
    for index, item in enumerate(items):
        if index > start and (index - start == BATCH_ITEMS_MAX or size + len(item) + 1 > BATCH_BYTES_MAX):
            yield items[start:index]
            start, size = index, overhead
        size += len(item) + 1
    if start < len(items):
        yield items[start:]


def _job_path(job_id: str) -> str:
    return "/v1/jobs/" + path_segment(job_id)


def _queue_path(queue: str) -> str:
    return "/v1/queues/" + path_segment(queue)


def _schedule_path(name: str) -> str:
    return "/v1/schedules/" + path_segment(name)


def _schedule(body: bytes | msgspec.Raw) -> dict[str, Any]:
    """A schedule as it was answered; numbers of its payload are exact."""
    document = decode_json(body)
    if not isinstance(document, dict):
        raise WheelschedError(f"the server's answer is not a schedule: {bytes(body)[:100]!r}")
    return document


_SPEC_INSTANTS: Final = ("anchor_at", "start_at", "end_at", "after")


def _spec_json(spec: Mapping[str, Any]) -> bytes:
    """The body of a schedule: its instants may be datetimes, its template's payload bytes that are JSON already."""
    members = dict(spec)
    for name in _SPEC_INSTANTS:
        if isinstance(members.get(name), datetime):
            members[name] = format_instant(members[name])
    template = members.get("job_template")
    if isinstance(template, Mapping) and "payload" in template:
        template = {**template, "payload": msgspec.Raw(encode_json(template["payload"]))}
        members["job_template"] = msgspec.Raw(encode_object(template))
    return encode_object(members)


def _paging(limit: int | None, cursor: str | None) -> list[tuple[str, str]]:
    named = (("limit", limit), ("cursor", cursor))
    return [(name, str(value)) for name, value in named if value is not None]


class AsyncClient:
    """The API of a wheelsched cluster, from an event loop. `async with AsyncClient() as client:` closes it at the end.

    `base_url` is a node's address, or several: a call that cannot reach one goes to the next. `timeout_s` bounds one try, a
    claim's wait apart. `retries` further tries follow with `backoff`, and every one honours Retry-After up to 30 s. With
    `auto_idempotency` a job created without a key gets one (uuid4), which makes its repetition safe and keeps the job 24 h at
    least; without it such a create is repeated only when nothing was accepted.

    Every method raises a subclass of `WheelschedError`, and ValueError or TypeError for arguments that must not be sent.
    """

    def __init__(
        self,
        base_url: str | Sequence[str] = "http://127.0.0.1:8080",
        *,
        timeout_s: float = 30.0,
        retries: int = 4,
        backoff: Backoff | None = None,
        auto_idempotency: bool = True,
        token: str | None = None,
        connections_max: int = 100,
    ) -> None:
        self._transport = Transport(
            [base_url] if isinstance(base_url, str) else list(base_url),
            timeout_s=timeout_s,
            retries=retries,
            backoff=backoff or Backoff(),
            token=token,
            connections_max=connections_max,
        )
        self._auto_idempotency = auto_idempotency
        self._rng = Random()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. The client cannot be used again."""
        await self._transport.close()

    # Jobs

    async def create(
        self,
        queue: str,
        payload: Any = None,
        *,
        run_at: datetime | str | None = None,
        delay_s: float | None = None,
        window_s: float | None = None,
        priority: PriorityName | None = None,
        target: Mapping[str, Any] | None = None,
        retry: RetryPolicy | Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        start_deadline_s: float | None = None,
        labels: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> Job:
        """Create a job; when this returns it is on disk on a majority. See `NewJob` for the arguments.

        With an `idempotency_key` used before for the same job the answer is that job; for another job `IdempotencyKeyReused`.
        """
        new = NewJob(
            queue, payload, run_at=run_at, delay_s=delay_s, window_s=window_s, priority=priority, target=target, retry=retry,
            timeout_s=timeout_s, start_deadline_s=start_deadline_s, labels=labels, idempotency_key=idempotency_key,
        )  # fmt: skip
        key = self._key_of(new)
        answer = await self._transport.call(
            "POST",
            "/v1/jobs",
            body=encode_object(new.body()),
            headers={} if key is None else {"Idempotency-Key": key},
            repeat=Repeat.REFUSED if key is None else Repeat.ALWAYS,
        )
        return _decoded(answer.body, Job)

    async def create_many(
        self, jobs: Iterable[NewJob | Mapping[str, Any]], *, spread_s: float | None = None, return_errors: bool = False
    ) -> tuple[Job | WheelschedError, ...]:
        """Create many jobs, 1,000 items or 32 MiB a request, and give them back in order. A mapping has `NewJob`'s fields.

        Each job stands for itself: what was refused for the moment is tried again alone. Raises `BatchFailed`, with all results,
        if any was not created; with `return_errors` the error stands in the job's place instead. A request that failed as a whole
        ends the call: its jobs and the ones after it have that error. `spread_s` spreads the start of the jobs over a window.
        """
        wanted = [job if isinstance(job, NewJob) else NewJob(**job) for job in jobs]
        keys = [self._key_of(job) for job in wanted]
        items = [
            encode_object(job.body() if key is None else {**job.body(), "idempotency_key": key})
            for job, key in zip(wanted, keys, strict=True)
        ]
        tail = b"]}" if spread_s is None else b'],"spread_s":' + encode_json(spread_s) + b"}"
        repeat = Repeat.REFUSED if None in keys else Repeat.ALWAYS
        results: list[Job | WheelschedError] = []
        for chunk in _chunks(items, overhead=len(b'{"jobs":[') + len(tail)):
            try:
                results += await self._create_chunk(chunk, tail, repeat)
            except WheelschedError as error:
                # Earlier requests have created their jobs, so this is no failure of the whole; later ones would fare like this
                # one.
                results += [error] * (len(items) - len(results))
                break
        if not return_errors and any(isinstance(result, WheelschedError) for result in results):
            raise BatchFailed(results)
        return tuple(results)

    async def _create_chunk(self, items: Sequence[bytes], tail: bytes, repeat: Repeat) -> Sequence[Job | WheelschedError]:
        results = [*await self._create_once(items, tail, repeat)]
        for tries in range(1, self._transport.retries + 1):
            again = [index for index, result in enumerate(results) if is_repeatable(result, repeat)]
            if not again:
                break
            await asyncio.sleep(self._transport.backoff.wait_s(tries, self._rng))
            answered = await self._create_once([items[index] for index in again], tail, repeat)
            for index, result in zip(again, answered, strict=True):
                results[index] = result
        return results

    async def _create_once(self, items: Sequence[bytes], tail: bytes, repeat: Repeat) -> Sequence[Job | WheelschedError]:
        answer = await self._transport.call(
            "POST",
            "/v1/jobs:batch",
            body=b'{"jobs":[' + b",".join(items) + tail,
            repeat=repeat,
            timeout_s=self._transport.timeout_s * _BATCH_TIMEOUT_FACTOR,
        )
        return _batch_values(answer.body, _Created, len(items))

    async def get(self, job_id: str) -> Job:
        """The job, never stale: it shows every write answered before. Raises `NotFound`."""
        return _decoded((await self._transport.call("GET", _job_path(job_id))).body, Job)

    async def update(
        self,
        job_id: str,
        *,
        run_at: datetime | str | None = None,
        delay_s: float | None = None,
        window_s: float | None = None,
        payload: Any | UnsetType = UNSET,
        priority: PriorityName | None = None,
        retry: RetryPolicy | Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        labels: Mapping[str, str] | None = None,
        if_version: int | None = None,
    ) -> Job:
        """Change a job that is SCHEDULED; what is left out stays. `payload=None` sets null; `window_s=0` makes the job precise.

        Raises `JobNotScheduled` past that state and `VersionMismatch` where the job's version is not `if_version`.
        """
        precise = window_s == 0
        changes = _Changes(
            run_at=run_at, delay_s=delay_s, window_s=None if precise else window_s, priority=priority, retry=retry,
            timeout_s=timeout_s, labels=labels,
        )  # fmt: skip
        body = _job_fields(changes)
        if precise:
            body["timing"] = {"class": "precise"}
        if payload is not UNSET:
            body["payload"] = msgspec.Raw(encode_json(payload))
        answer = await self._transport.call(
            "PATCH",
            _job_path(job_id),
            body=encode_object(body),
            headers={} if if_version is None else {"If-Match": f'"v{if_version}"'},
            # A delay counts from the acceptance, and a version that was matched once does not match again.
            repeat=Repeat.ALWAYS if if_version is None else Repeat.REFUSED,
        )
        return _decoded(answer.body, Job)

    async def cancel(self, job_id: str) -> Job:
        """Cancel a job: CANCELLED if it had not started, CANCEL_REQUESTED if it runs. Raises `JobFinished` past that."""
        return _decoded((await self._transport.call("DELETE", _job_path(job_id))).body, Job)

    async def run(self, job_id: str) -> Job:
        """Fire a waiting job now. Raises `JobFinished`."""
        return _decoded((await self._transport.call("POST", _job_path(job_id) + ":run")).body, Job)

    async def redrive(self, job_id: str) -> Job:
        """Make a DEAD job run again. Raises `JobFinished` for a job in another state."""
        # Repeated after an unknown outcome it would be refused: the job is no longer DEAD.
        return _decoded((await self._transport.call("POST", _job_path(job_id) + ":redrive", repeat=Repeat.REFUSED)).body, Job)

    async def discard(self, job_id: str) -> None:
        """Remove a DEAD job for good. Raises `JobFinished` for a job in another state."""
        await self._transport.call("POST", _job_path(job_id) + ":discard", echo=NotFound)

    async def attempts(self, job_id: str) -> tuple[Attempt, ...]:
        """The job's attempts, oldest first."""
        return _decoded((await self._transport.call("GET", _job_path(job_id) + "/attempts")).body, _Attempts).attempts

    async def events(self, job_id: str) -> tuple[Event, ...]:
        """Every transition of the job, oldest first."""
        return _decoded((await self._transport.call("GET", _job_path(job_id) + "/events")).body, _Events).events

    async def list(
        self,
        *,
        queue: str | None = None,
        status: str | Sequence[str] | None = None,
        labels: Mapping[str, str] | None = None,
        schedule: str | None = None,
        from_at: datetime | str | None = None,
        to_at: datetime | str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Page[Job]:
        """One page of jobs in the order of `fire_at`, which `from_at` (inclusive) and `to_at` (exclusive) bound."""
        query: list[tuple[str, str]] = [("queue", queue)] if queue is not None else []
        query += [("status", name) for name in ([status] if isinstance(status, str) else status or ())]
        query += [("label", f"{key}:{value}") for key, value in (labels or {}).items()]
        named = (
            ("schedule", schedule),
            ("from", None if from_at is None else format_instant(from_at)),
            ("to", None if to_at is None else format_instant(to_at)),
        )
        query += [(name, value) for name, value in named if value is not None]
        page = _decoded((await self._transport.call("GET", "/v1/jobs", query=query + _paging(limit, cursor))).body, _JobPage)
        return Page(items=page.jobs, next_cursor=page.next_cursor)

    async def iterate(
        self,
        *,
        queue: str | None = None,
        status: str | Sequence[str] | None = None,
        labels: Mapping[str, str] | None = None,
        schedule: str | None = None,
        from_at: datetime | str | None = None,
        to_at: datetime | str | None = None,
        page_size: int = PAGE_MAX,
    ) -> AsyncIterator[Job]:
        """All jobs `list` would give, page by page as they are asked for."""
        cursor: str | None = None
        while True:
            page = await self.list(
                queue=queue, status=status, labels=labels, schedule=schedule, from_at=from_at, to_at=to_at, limit=page_size,
                cursor=cursor,
            )  # fmt: skip
            for job in page.items:
                yield job
            if (cursor := page.next_cursor) is None:
                return

    # Queues

    async def queues(self, *, limit: int | None = None, cursor: str | None = None) -> Page[Queue]:
        """One page of queues by name."""
        page = _decoded((await self._transport.call("GET", "/v1/queues", query=_paging(limit, cursor))).body, _QueuePage)
        return Page(items=page.queues, next_cursor=page.next_cursor)

    async def queue(self, queue: str) -> Queue:
        """The queue's depth, lateness and settings. Raises `NotFound`: a queue exists from its first job, claim or setting."""
        return _decoded((await self._transport.call("GET", _queue_path(queue))).body, Queue)

    async def put_queue(
        self,
        queue: str,
        *,
        max_concurrency: int | None = None,
        rate_per_s: float | None = None,
        lease_s: float | None = None,
        retention_s: float | None = None,
        weights: Mapping[str, int] | None = None,
    ) -> Queue:
        """Replace the queue's settings; what is left out returns to its default."""
        named = (
            ("max_concurrency", max_concurrency),
            ("rate_per_s", rate_per_s),
            ("lease_s", lease_s),
            ("retention_s", retention_s),
            ("weights", weights),
        )
        body = encode_object({name: value for name, value in named if value is not None})
        return _decoded((await self._transport.call("PUT", _queue_path(queue), body=body)).body, Queue)

    async def pause(self, queue: str) -> Queue:
        """Stop claims; jobs still become due."""
        return _decoded((await self._transport.call("POST", _queue_path(queue) + ":pause")).body, Queue)

    async def resume(self, queue: str) -> Queue:
        """Let claims go on."""
        return _decoded((await self._transport.call("POST", _queue_path(queue) + ":resume")).body, Queue)

    async def dead_letters(self, queue: str, *, limit: int | None = None, cursor: str | None = None) -> Page[Job]:
        """One page of the queue's DEAD jobs with their last error."""
        answer = await self._transport.call("GET", _queue_path(queue) + "/dead-letters", query=_paging(limit, cursor))
        page = _decoded(answer.body, _JobPage)
        return Page(items=page.jobs, next_cursor=page.next_cursor)

    async def redrive_all(
        self,
        queue: str,
        *,
        job_ids: Sequence[str] | None = None,
        error_contains: str | None = None,
        limit: int | None = None,
        spread_s: float | None = None,
    ) -> int:
        """Make DEAD jobs of the queue run again, these or all, and say how many; `spread_s` spreads their start."""
        return await self._dead_letters_call(queue, "redrive", "redriven", job_ids, error_contains, limit, spread_s)

    async def discard_all(
        self, queue: str, *, job_ids: Sequence[str] | None = None, error_contains: str | None = None, limit: int | None = None
    ) -> int:
        """Remove DEAD jobs of the queue for good, these or all, and say how many."""
        return await self._dead_letters_call(queue, "discard", "discarded", job_ids, error_contains, limit, None)

    async def _dead_letters_call(
        self,
        queue: str,
        verb: str,
        counted: str,
        job_ids: Sequence[str] | None,
        error_contains: str | None,
        limit: int | None,
        spread_s: float | None,
    ) -> int:
        named = (("error_contains", error_contains), ("limit", limit), ("spread_s", spread_s))
        narrowed = {name: value for name, value in named if value is not None}
        choices: list[dict[str, Any]] = [{"all": True}]
        if job_ids is not None:
            starts = range(0, len(job_ids), BATCH_ITEMS_MAX)
            choices = [{"job_ids": [*job_ids[start : start + BATCH_ITEMS_MAX]]} for start in starts]
        count = 0
        for choice in choices:
            # Repeated after an unknown outcome the count would be of the rest, and a limit would count anew.
            answer = await self._transport.call(
                "POST",
                f"{_queue_path(queue)}/dead-letters:{verb}",
                body=encode_object(choice | narrowed),
                repeat=Repeat.REFUSED,
                timeout_s=self._transport.timeout_s * _BATCH_TIMEOUT_FACTOR,
            )
            count += _decoded(answer.body, dict[str, int])[counted]
        return count

    # Schedules. A spec and what is answered are dictionaries with the fields of API.md, "Schedules"; instants of a spec may be
    # datetimes, and a payload bytes that are JSON already.

    async def create_schedule(self, name: str, spec: Mapping[str, Any], *, idempotency_key: str | None = None) -> dict[str, Any]:
        """Create a schedule: `cron` and `time_zone`, or `every_s`, or neither, and a `job_template`. Raises `NameTaken`, unless it was
        made with the same `idempotency_key` (by default one of its own) and spec."""
        key = self._key(idempotency_key)
        answer = await self._transport.call(
            "POST",
            "/v1/schedules",
            body=_spec_json({**spec, "name": name}),
            headers={} if key is None else {"Idempotency-Key": key},
            repeat=Repeat.REFUSED if key is None else Repeat.ALWAYS,
        )
        return _schedule(answer.body)

    async def put_schedule(self, name: str, spec: Mapping[str, Any], *, if_version: int | None = None) -> dict[str, Any]:
        """Create a schedule or replace the one of that name; the same spec again changes nothing and fires nothing.

        What is left out has its default, but for `paused`, which stays. Raises `VersionMismatch` where it is not at `if_version`.
        """
        return await self._schedule_write("PUT", name, spec, if_version)

    async def patch_schedule(self, name: str, changes: Mapping[str, Any], *, if_version: int | None = None) -> dict[str, Any]:
        """Change the fields given, each as a whole; None returns a field to its default. Raises `NotFound`, `VersionMismatch`."""
        return await self._schedule_write("PATCH", name, changes, if_version)

    async def _schedule_write(self, method: str, name: str, spec: Mapping[str, Any], if_version: int | None) -> dict[str, Any]:
        answer = await self._transport.call(
            method,
            _schedule_path(name),
            body=_spec_json(spec),
            headers={} if if_version is None else {"If-Match": f'"v{if_version}"'},
            # A version that was matched once does not match again.
            repeat=Repeat.ALWAYS if if_version is None else Repeat.REFUSED,
        )
        return _schedule(answer.body)

    async def put_schedules(
        self, specs: Iterable[Mapping[str, Any]], *, return_errors: bool = False
    ) -> tuple[dict[str, Any] | WheelschedError, ...]:
        """Create or replace many schedules, each spec with its `name`, 1,000 items or 32 MiB a request; give them back in order.

        What was refused for the moment is tried again alone. Raises `BatchFailed`, with all results, if any was not stored; with
        `return_errors` the error stands in the schedule's place instead. A request that failed as a whole ends the call: its
        schedules and the ones after it have that error.
        """
        items = [_spec_json(spec) for spec in specs]
        results: list[dict[str, Any] | WheelschedError] = []
        for chunk in _chunks(items, overhead=len(b'{"schedules":[]}')):
            try:
                results += await self._put_chunk(chunk)
            except WheelschedError as error:
                results += [error] * (len(items) - len(results))
                break
        if not return_errors and any(isinstance(result, WheelschedError) for result in results):
            raise BatchFailed(results, "schedules")
        return tuple(results)

    async def _put_chunk(self, items: Sequence[bytes]) -> Sequence[dict[str, Any] | WheelschedError]:
        results = [*await self._put_once(items)]
        for tries in range(1, self._transport.retries + 1):
            again = [index for index, result in enumerate(results) if is_repeatable(result, Repeat.ALWAYS)]
            if not again:
                break
            await asyncio.sleep(self._transport.backoff.wait_s(tries, self._rng))
            answered = await self._put_once([items[index] for index in again])
            for index, result in zip(again, answered, strict=True):
                results[index] = result
        return results

    async def _put_once(self, items: Sequence[bytes]) -> Sequence[dict[str, Any] | WheelschedError]:
        answer = await self._transport.call(
            "POST",
            "/v1/schedules:batch",
            body=b'{"schedules":[' + b",".join(items) + b"]}",
            timeout_s=self._transport.timeout_s * _BATCH_TIMEOUT_FACTOR,
        )
        return _batch_values(answer.body, _Stored, len(items))

    async def get_schedule(self, name: str) -> dict[str, Any]:
        """The schedule with its next runs and its last one. Raises `NotFound`."""
        return _schedule((await self._transport.call("GET", _schedule_path(name))).body)

    async def list_schedules(
        self, *, queue: str | None = None, limit: int | None = None, cursor: str | None = None
    ) -> Page[dict[str, Any]]:
        """One page of schedules by name, of those whose runs go to `queue` where one is given."""
        query = [("queue", queue)] if queue is not None else []
        answer = await self._transport.call("GET", "/v1/schedules", query=query + _paging(limit, cursor))
        page = _decoded(answer.body, _SchedulePage)
        return Page(items=tuple(_schedule(raw) for raw in page.schedules), next_cursor=page.next_cursor)

    async def delete_schedule(self, name: str) -> None:
        """Delete a schedule and withdraw its waiting run; runs that were fired go on. Raises `NotFound`."""
        await self._transport.call("DELETE", _schedule_path(name), echo=NotFound)

    async def pause_schedule(self, name: str) -> dict[str, Any]:
        """Fire no more runs. Raises `NotFound`."""
        return _schedule((await self._transport.call("POST", _schedule_path(name) + ":pause")).body)

    async def resume_schedule(self, name: str) -> dict[str, Any]:
        """Go on from now; what was missed while paused does not run. Raises `NotFound`."""
        return _schedule((await self._transport.call("POST", _schedule_path(name) + ":resume")).body)

    async def preview_schedule(
        self, spec: Mapping[str, Any], *, after: datetime | str | None = None, count: int | None = None
    ) -> dict[str, Any]:
        """`next_runs`, `next_runs_local` and `warnings` of a spec, which needs neither `name` nor `job_template`; nothing is stored."""
        chosen = {name: value for name, value in (("after", after), ("count", count)) if value is not None}
        return _decoded(
            (await self._transport.call("POST", "/v1/schedules:preview", body=_spec_json({**spec, **chosen}))).body, dict[str, Any]
        )

    async def run_schedule(
        self,
        name: str,
        *,
        payload: Any | UnsetType = UNSET,
        run_at: datetime | str | None = None,
        delay_s: float | None = None,
        idempotency_key: str | None = None,
    ) -> Job:
        """A run by hand, now or at `run_at` or after `delay_s`, with the template's payload or this one; its timetable stays.

        Raises `NotFound`, and `ConcurrencyLimit` where a run is going and `overlap` forbids another.
        """
        if run_at is not None and delay_s is not None:
            raise ValueError("run_at and delay_s exclude each other; give one of them")
        body: dict[str, Any] = {}
        if run_at is not None:
            body["run_at"] = format_instant(run_at)
        if delay_s is not None:
            body["delay_s"] = delay_s
        if payload is not UNSET:
            body["payload"] = msgspec.Raw(encode_json(payload))
        key = self._key(idempotency_key)
        answer = await self._transport.call(
            "POST",
            _schedule_path(name) + "/runs",
            body=encode_object(body),
            headers={} if key is None else {"Idempotency-Key": key},
            repeat=Repeat.REFUSED if key is None else Repeat.ALWAYS,
        )
        return _decoded(answer.body, Job)

    async def backfill_schedule(self, name: str, from_at: datetime | str, to_at: datetime | str) -> Backfilled:
        """A run for each occurrence from `from_at` up to `to_at` (exclusive) that has no job. Raises `NotFound`."""
        # Repeated it makes nothing twice, but would count what the first one made as existing.
        answer = await self._transport.call(
            "POST",
            _schedule_path(name) + ":backfill",
            body=encode_object({"from": format_instant(from_at), "to": format_instant(to_at)}),
            repeat=Repeat.REFUSED,
            timeout_s=self._transport.timeout_s * _BATCH_TIMEOUT_FACTOR,
        )
        return _decoded(answer.body, Backfilled)

    async def schedule_runs(self, name: str, *, limit: int | None = None, cursor: str | None = None) -> Runs:
        """One page of the schedule's runs, newest first, and what that stretch left out. Raises `NotFound`."""
        return _decoded((await self._transport.call("GET", _schedule_path(name) + "/runs", query=_paging(limit, cursor))).body, Runs)

    async def reload_zones(self) -> ZonesReloaded:
        """Let the node read its time-zone data again and move waiting runs of zones that changed."""
        return _decoded((await self._transport.call("POST", "/v1/time-zones:reload")).body, ZonesReloaded)

    async def forecast(self, *, from_at: datetime | None = None, to_at: datetime | None = None) -> Forecast:
        """Jobs that will be due, by minute and queue; the next day by default, at most seven."""
        query = [(name, format_instant(at)) for name, at in (("from", from_at), ("to", to_at)) if at is not None]
        return _decoded((await self._transport.call("GET", "/v1/forecast", query=query)).body, Forecast)

    # Claims

    async def claim(
        self,
        queues: str | Sequence[str],
        *,
        jobs_max: int = 1,
        lease_s: float | None = None,
        wait_s: float = 0.0,
        worker: str | None = None,
    ) -> tuple[ClaimedJob, ...]:
        """Lease up to `jobs_max` (100) jobs that are ready in these queues, in the order of preference given; () with none ready.

        Waits up to `wait_s` (60) for the first one. Never repeated once it was sent: jobs of a lost answer come back when their
        lease ends, and a repetition would take further ones. Cancelling the call gives back what was being claimed.
        """
        if not 1 <= jobs_max <= CLAIM_JOBS_MAX:
            raise ValueError(f"jobs_max {jobs_max} is not between 1 and {CLAIM_JOBS_MAX}; claim more often instead")
        body: dict[str, Any] = {"max": jobs_max, "wait_s": wait_s}
        if lease_s is not None:
            body["lease_s"] = lease_s
        if worker is not None:
            body["worker"] = worker
        if isinstance(queues, str):
            path = _queue_path(queues) + ":claim"
        else:
            path, body["queues"] = "/v1/claims", [*queues]
        answer = await self._transport.call(
            "POST", path, body=encode_object(body), repeat=Repeat.REFUSED, timeout_s=wait_s + self._transport.timeout_s,
            claims=True,
        )  # fmt: skip
        return _decoded(answer.body, _Claimed).jobs

    async def heartbeat(self, token: str, *, lease_s: float | None = None, progress: Any = UNSET) -> Lease:
        """Extend a lease from now, by the claim's length or `lease_s`. Raises `StaleLease`: stop, the job is another's."""
        body = Heartbeat(token, lease_s, progress).body()
        del body["token"]
        path = f"/v1/attempts/{path_segment(token)}:heartbeat"
        return _decoded((await self._transport.call("POST", path, body=encode_object(body))).body, Lease)

    async def heartbeat_many(self, heartbeats: Iterable[Heartbeat]) -> tuple[Lease | WheelschedError, ...]:
        """Extend many leases in one call for each 1,000; the lease or the error of each, in order."""
        items = [encode_object(heartbeat.body()) for heartbeat in heartbeats]
        return await self._attempts_batch("heartbeat", "heartbeats", items, _Beaten)

    async def complete(
        self,
        token: str,
        outcome: OutcomeName = "succeeded",
        *,
        error: str | Mapping[str, Any] | None = None,
        result: Any = None,
        retry_after_s: float | None = None,
    ) -> Completed:
        """Report the end of an attempt. Raises `StaleLease` if it is not the job's current one: then nothing has changed."""
        body = Completion(token, outcome, error, result, retry_after_s).body()
        del body["token"]
        path = f"/v1/attempts/{path_segment(token)}:complete"
        return _decoded((await self._transport.call("POST", path, body=encode_object(body))).body, Completed)

    async def complete_many(self, completions: Iterable[Completion]) -> tuple[Completed | WheelschedError, ...]:
        """Report many ends in one call for each 1,000; the answer or the error of each, in order."""
        items = [encode_object(completion.body()) for completion in completions]
        return await self._attempts_batch("complete", "completions", items, _Ended)

    async def _attempts_batch(
        self, verb: str, member: str, items: Sequence[bytes], kind: type[_Valued[R]]
    ) -> tuple[R | WheelschedError, ...]:
        results: list[R | WheelschedError] = []
        head = f'{{"{member}":['.encode()
        for chunk in _chunks(items, overhead=len(head) + 2):
            try:
                answer = await self._transport.call("POST", f"/v1/attempts:{verb}", body=head + b",".join(chunk) + b"]}")
                results += _batch_values(answer.body, kind, len(chunk))
            except WheelschedError as error:
                results += [error] * len(chunk)
        return tuple(results)

    async def release(self, token: str) -> None:
        """Give a job back unfinished: QUEUED again, no attempt counted. Raises `StaleLease` if the lease is not held any more."""
        await self._transport.call("POST", f"/v1/attempts/{path_segment(token)}:release", echo=StaleLease)

    # The node

    async def clock(self) -> datetime:
        """The virtual clock's now. Raises `NotFound` on a node with a real clock."""
        return _decoded((await self._transport.call("GET", "/v1/clock")).body, _Now).now

    async def advance_clock(self, *, by_s: float | None = None, to: datetime | str | None = None) -> datetime:
        """Move the virtual clock on; returns its now when nothing more is due on the way."""
        if (by_s is None) == (to is None):
            raise ValueError("give by_s or to, one of them")
        body = {"by_s": by_s} if to is None else {"to": format_instant(to)}
        answer = await self._transport.call(
            "POST",
            "/v1/clock:advance",
            body=encode_object(body),
            timeout_s=self._transport.timeout_s * _BATCH_TIMEOUT_FACTOR,
            repeat=Repeat.REFUSED if to is None else Repeat.ALWAYS,
        )
        return _decoded(answer.body, _Now).now

    async def status(self) -> dict[str, Any]:
        """The node's `/status`."""
        return _decoded((await self._transport.call("GET", "/status")).body, dict[str, Any])

    async def ready(self) -> bool:
        """Whether the node is ready to serve; False also where nobody answers."""
        try:
            await self._transport.call("GET", "/readyz", repeat=Repeat.NEVER)
        except (Unavailable, OutcomeUnknown):
            return False
        return True

    def _key_of(self, job: NewJob) -> str | None:
        return self._key(job.idempotency_key)

    def _key(self, given: str | None) -> str | None:
        if given is not None:
            return header_value("idempotency_key", given, length_max=IDEMPOTENCY_KEY_LENGTH_MAX)
        return str(uuid.uuid4()) if self._auto_idempotency else None
