"""One run of an app: claim, start, settle, and at the end drain."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import Any, Final

import structlog

from wheelsched.client import AsyncClient, Backoff, ClaimedJob, Completion
from wheelsched.core.errors import StaleLease, WheelschedError
from wheelsched.core.limits import CLAIM_JOBS_MAX
from wheelsched.worker.handlers import Coroutines, Handler, Processes, Running, Starter, Threads
from wheelsched.worker.heartbeats import Heartbeats
from wheelsched.worker.job import Job, Signs, mono_ms
from wheelsched.worker.outcomes import Release, StopReason, end_of
from wheelsched.worker.reporter import Answer, Reporter

log = structlog.get_logger("wheelsched.worker")

# How long a handler that was stopped at the end of the grace period may take to clean up.
STOP_S: Final = 5.0
# Reports without an answer beyond this many, or the slots if they are more, hold up claims: the server is behind.
REPORTS_PENDING_MAX: Final = 100
# An answer without jobs that comes sooner than this was no wait: a paused queue, a node that drains.
EMPTY_ANSWER_MS_MIN: Final = 100
SLOTS_WARNING_S: Final = 60.0


class Kind(Enum):
    """Where a handler runs."""

    COROUTINE = "coroutine"
    THREAD = "thread"
    PROCESS = "process"


@dataclass(frozen=True, slots=True)
class Task:
    """A queue and what handles its jobs. `reserved_slots` are used by this queue alone."""

    queue: str
    handler: Handler
    kind: Kind
    timeout_s: float | None = None
    reserved_slots: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    base_urls: tuple[str, ...]
    worker: str
    slots: int
    lease_s: float
    wait_s: float
    grace_s: float
    timeout_s: float
    token: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatistics:
    """Counts since the start. `stale`: ends reported when the lease was over; `unreported`: ends the server never took or saw."""

    running: int = 0
    reporting: int = 0
    claimed: int = 0
    succeeded: int = 0
    retryable_failures: int = 0
    fatal_failures: int = 0
    cancelled: int = 0
    released: int = 0
    lost: int = 0
    stale: int = 0
    unreported: int = 0
    abandoned: int = 0
    claim_errors: int = 0
    heartbeats: int = 0
    heartbeats_missed: int = 0


_COUNTER_BY_OUTCOME: Final = {
    "succeeded": "succeeded",
    "retryable_failure": "retryable_failures",
    "fatal_failure": "fatal_failures",
    "cancelled": "cancelled",
}


@dataclass(slots=True)
class _Lane:
    """A pool of slots, the queues it serves in order of preference, and one claim at a time."""

    name: str
    queues: tuple[str, ...]
    slots: int
    running: int = 0
    freed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class _Attempt:
    claimed: ClaimedJob
    task: Task
    lane: _Lane
    job: Job
    signs: Signs
    timeout_s: float | None
    abandoned: asyncio.Future[None]
    running: Running | None = None
    reason: StopReason | None = None
    ended: bool = False


def _reason_of(attempt: _Attempt) -> StopReason | None:
    """Why the handler may have ended early. It sees the signs before the loop does, which it may have been blocking."""
    if attempt.signs.lease_lost:
        return StopReason.LOST
    if attempt.reason is not None:
        return attempt.reason
    if attempt.signs.cancel_requested:
        return StopReason.CANCEL
    return StopReason.TIMEOUT if attempt.job.timed_out else None


def lanes_of(tasks: Iterable[Task], slots: int) -> list[_Lane]:
    """A lane for each queue with reserved slots, and one for all queues with the rest.

    Raises ValueError where the reserved slots leave none: a queue without any of its own would never be served.
    """
    tasks = list(tasks)
    shared = slots - sum(task.reserved_slots for task in tasks)
    unserved = [task.queue for task in tasks if not task.reserved_slots]
    if shared < 0 or (shared == 0 and unserved):
        raise ValueError(f"slots {slots} leave {shared} beside the reserved ones; raise slots or reserve fewer")
    lanes = [_Lane(task.queue, (task.queue,), task.reserved_slots) for task in tasks if task.reserved_slots]
    if shared:
        lanes.append(_Lane("shared", tuple(task.queue for task in tasks), shared))
    return lanes


class Runner:
    """Made on the loop it runs on; `run` returns when everything has ended, after `stop` was called."""

    def __init__(self, settings: WorkerSettings, tasks: Mapping[str, Task]) -> None:
        self._settings = settings
        self._tasks = tasks
        self._lanes = lanes_of(tasks.values(), settings.slots)
        self._loop = asyncio.get_running_loop()
        self._client = AsyncClient(settings.base_urls, timeout_s=settings.timeout_s, retries=2, token=settings.token)
        self._lease_ms = max(1, round(settings.lease_s * 1000))
        self._heartbeats = Heartbeats(settings.base_urls, lease_ms=self._lease_ms, owner=self, auth_token=settings.token)
        self._reporter = Reporter(self._client.complete_many, self)
        self._starters: dict[Kind, Starter] = {
            Kind.COROUTINE: Coroutines(),
            Kind.THREAD: Threads(),
            Kind.PROCESS: Processes(),
        }
        # Low, for a node that is back has jobs waiting: the cap is how late their workers are.
        self._backoff = Backoff(initial_s=0.2, cap_s=1.0)
        self._rng = Random()
        self._stopping: asyncio.Future[None] = self._loop.create_future()
        # From the claim to the last word on the report; read by the heartbeat thread.
        self._attempts: dict[str, _Attempt] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._counts: dict[str, int] = {}

    # For the app

    def stop(self) -> None:
        """Begin the shutdown; from any thread and from signal handlers, any number of times."""
        with suppress(RuntimeError):  # the loop is closed: it has ended already
            self._loop.call_soon_threadsafe(self._begin_stop)

    def _begin_stop(self) -> None:
        if not self._stopping.done():
            log.info("worker_stopping", running=self._running(), grace_s=self._settings.grace_s)
            self._stopping.set_result(None)

    def statistics(self) -> WorkerStatistics:
        return WorkerStatistics(
            running=self._running(),
            reporting=self._reporter.pending,
            heartbeats=self._heartbeats.sent,
            heartbeats_missed=self._heartbeats.missed,
            **self._counts,
        )

    def _running(self) -> int:
        return sum(lane.running for lane in self._lanes)

    def _count(self, name: str, by: int = 1) -> None:
        self._counts[name] = self._counts.get(name, 0) + by

    async def run(self) -> None:
        """Claim and work until stopped, then drain: the order below is the shutdown."""
        log.info("worker_started", worker=self._settings.worker, queues=list(self._tasks), slots=self._settings.slots)
        self._heartbeats.start()
        try:
            async with self._client, asyncio.TaskGroup() as work:
                reporting = work.create_task(self._reporter.run(), name="reporter")
                async with asyncio.TaskGroup() as claiming:
                    for lane in self._lanes:
                        claiming.create_task(self._claim_for(lane, work), name=f"claims {lane.name}")
                await self._drain()
                await self._wait_reported()
                reporting.cancel()
        finally:
            self._heartbeats.stop()
            for starter in self._starters.values():
                starter.close()
            log.info("worker_stopped", **{name: count for name, count in sorted(self._counts.items()) if count})

    # Claiming

    async def _claim_for(self, lane: _Lane, work: asyncio.TaskGroup) -> None:
        failures = 0
        while not self._stopping.done():
            if not await self._wait_slots(lane):
                return
            asked_at_ms = mono_ms()
            try:
                jobs = await self._poll(lane)
            except WheelschedError as error:
                failures += 1
                self._count("claim_errors")
                log.warning("claim_failed", lane=lane.name, error=str(error), code=error.code)
                await self._pause(self._backoff.wait_s(failures, self._rng, retry_after_s=error.retry_after_s))
                continue
            if not jobs and mono_ms() - asked_at_ms < EMPTY_ANSWER_MS_MIN:
                failures += 1
                await self._pause(self._backoff.wait_s(failures, self._rng))
                continue
            failures = 0
            await self._take(jobs, lane, work, asked_at_ms=asked_at_ms)

    async def _wait_slots(self, lane: _Lane) -> bool:
        """Wait until the lane may claim; False: stopping."""
        waiting_since_ms, warned = mono_ms(), False
        while lane.running >= lane.slots or self._reporter.pending >= max(REPORTS_PENDING_MAX, self._settings.slots):
            if self._stopping.done():
                return False
            lane.freed.clear()
            freed = asyncio.ensure_future(lane.freed.wait())
            try:
                await asyncio.wait((freed, self._stopping), timeout=SLOTS_WARNING_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                freed.cancel()
            if not warned and mono_ms() - waiting_since_ms >= SLOTS_WARNING_S * 1000:
                warned = True
                log.warning("slots_exhausted", lane=lane.name, slots=lane.slots, waited_s=SLOTS_WARNING_S)
        return not self._stopping.done()

    async def _poll(self, lane: _Lane) -> Sequence[ClaimedJob]:
        """The jobs of one claim; () also when the shutdown broke it off, whose jobs the server takes back as those of a client
        that hung up."""
        claim = asyncio.ensure_future(
            self._client.claim(
                lane.queues,
                jobs_max=min(CLAIM_JOBS_MAX, lane.slots - lane.running),
                lease_s=self._settings.lease_s,
                wait_s=self._settings.wait_s,
                worker=self._settings.worker,
            )
        )
        try:
            await asyncio.wait((claim, self._stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not claim.done():
                claim.cancel()
                await asyncio.wait((claim,))
        if claim.cancelled():
            return ()
        return claim.result()

    async def _take(self, jobs: Sequence[ClaimedJob], lane: _Lane, work: asyncio.TaskGroup, *, asked_at_ms: int) -> None:
        """Start the jobs of an answer, or give them back: all once the shutdown has begun, and those nobody here knows."""
        received_at_ms = mono_ms()
        self._count("claimed", len(jobs))
        # The lease counts from some instant between question and answer. Of an answer that took long to arrive, nobody knows how
        # much is gone: the first heartbeat goes out at once and says whether it is ours.
        started_at_ms = min(received_at_ms, asked_at_ms + round(self._settings.wait_s * 1000))
        soon = received_at_ms - asked_at_ms > self._lease_ms // 3
        unwanted = []
        for claimed in jobs:
            if self._stopping.done() or claimed.queue not in self._tasks:
                unwanted.append(claimed)
                continue
            attempt = self._attempt_of(claimed, lane)
            self._heartbeats.add(claimed.lease_token, expires_at_ms=started_at_ms + self._lease_ms, soon=soon)
            work.create_task(self._work_on(attempt), name=f"attempt {claimed.job_id}")
        async with asyncio.TaskGroup() as releasing:
            for claimed in unwanted:
                releasing.create_task(self._release(claimed), name=f"release {claimed.job_id}")

    def _attempt_of(self, claimed: ClaimedJob, lane: _Lane) -> _Attempt:
        task = self._tasks[claimed.queue]
        token = claimed.lease_token
        timeout_s = min((bound for bound in (claimed.timeout_s, task.timeout_s) if bound is not None), default=None)
        signs = Signs(
            None if timeout_s is None else mono_ms() + round(timeout_s * 1000),
            lambda progress: self._heartbeats.report_progress(token, progress),
        )
        attempt = _Attempt(
            claimed=claimed,
            task=task,
            lane=lane,
            job=Job(claimed, signs),
            signs=signs,
            timeout_s=timeout_s,
            abandoned=self._loop.create_future(),
        )
        self._attempts[token] = attempt
        lane.running += 1
        self._idle.clear()
        return attempt

    async def _pause(self, wait_s: float) -> None:
        await asyncio.wait((self._stopping,), timeout=wait_s)

    # Working

    async def _work_on(self, attempt: _Attempt) -> None:
        running = self._starters[attempt.task.kind].start(attempt.task.handler, attempt.job)
        attempt.running = running
        timer = None
        if attempt.timeout_s is not None:
            timer = self._loop.call_later(attempt.timeout_s, self._ask_to_stop, attempt, StopReason.TIMEOUT)
        if attempt.reason is not None:
            running.stop()  # asked to while it was not there yet
        try:
            await asyncio.wait((running.future, attempt.abandoned), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if timer is not None:
                timer.cancel()
            attempt.ended = True
            if not (has_ended := running.future.done()):
                # Left behind. A thread goes on all the same, and is not to tell a loop that may be closed by then.
                running.future.cancel()
        if has_ended:
            await self._settle(attempt, running.future)
        self._free(attempt.lane)

    async def _settle(self, attempt: _Attempt, future: asyncio.Future[Any]) -> None:
        claimed = attempt.claimed
        end = end_of(claimed.lease_token, future, _reason_of(attempt), timeout_s=attempt.timeout_s)
        if isinstance(end, Completion):
            self._reporter.submit(end)
            return
        if end is Release.RELEASE:
            await self._release(claimed)
        self._forget(claimed.lease_token)

    def _free(self, lane: _Lane) -> None:
        lane.running -= 1
        assert lane.running >= 0
        lane.freed.set()
        if not self._running():
            self._idle.set()

    def _forget(self, token: str) -> None:
        self._heartbeats.remove(token)
        self._attempts.pop(token, None)

    async def _release(self, claimed: ClaimedJob) -> None:
        try:
            await self._client.release(claimed.lease_token)
        except StaleLease:
            return
        except WheelschedError as error:
            log.warning("release_failed", job_id=claimed.job_id, attempt=claimed.attempt, error=str(error))
            return
        self._count("released")
        log.info("job_released", job_id=claimed.job_id, queue=claimed.queue, attempt=claimed.attempt)

    def _ask_to_stop(self, attempt: _Attempt, reason: StopReason) -> None:
        """The first reason stops a handler; a later one is shown to it, but does not break into its cleanup. Shutdown insists."""
        if attempt.ended:
            return
        first = attempt.reason is None
        if first:
            attempt.reason = reason
            log.info("handler_stopped", job_id=attempt.claimed.job_id, attempt=attempt.claimed.attempt, reason=reason.value)
        if attempt.running is not None and (first or reason is StopReason.SHUTDOWN):
            attempt.running.stop()

    # Heartbeats: called on their thread

    def on_lease_lost(self, token: str, why: str) -> None:
        if (attempt := self._attempts.get(token)) is None:
            return
        # The sign is set here and now: a handler that blocks the loop sees it before its result counts.
        attempt.signs.lease_lost = True
        self._tell_loop(attempt, StopReason.LOST, why)

    def on_cancel_requested(self, token: str) -> None:
        if (attempt := self._attempts.get(token)) is not None:
            attempt.signs.cancel_requested = True
            self._tell_loop(attempt, StopReason.CANCEL, "")

    def _tell_loop(self, attempt: _Attempt, reason: StopReason, why: str) -> None:
        with suppress(RuntimeError):  # the loop is closed: the run is over
            self._loop.call_soon_threadsafe(self._on_sign, attempt, reason, why)

    def _on_sign(self, attempt: _Attempt, reason: StopReason, why: str) -> None:
        if reason is StopReason.LOST and not attempt.ended:
            self._count("lost")
            log.warning("lease_lost", job_id=attempt.claimed.job_id, attempt=attempt.claimed.attempt, why=why)
        self._ask_to_stop(attempt, reason)

    # Reports

    def is_held(self, token: str) -> bool:
        return self._heartbeats.is_held(token)

    def on_reported(self, completion: Completion, answer: Answer | None) -> None:
        attempt = self._attempts.get(completion.token)
        self._forget(completion.token)
        for lane in self._lanes:
            lane.freed.set()  # they may have waited for the reports
        assert attempt is not None, "an attempt is kept until its report has had the last word"
        facts = {"job_id": attempt.claimed.job_id, "queue": attempt.claimed.queue, "attempt": attempt.claimed.attempt}
        if answer is None:
            self._count("stale" if attempt.signs.lease_lost else "unreported")
            log.warning("outcome_unreported", **facts, outcome=completion.outcome)
        elif isinstance(answer, WheelschedError):
            self._count("stale" if isinstance(answer, StaleLease) else "unreported")
            log.warning("outcome_refused", **facts, outcome=completion.outcome, code=answer.code, error=answer.detail)
        else:
            self._count(_COUNTER_BY_OUTCOME[completion.outcome])
            level = log.debug if completion.outcome == "succeeded" else log.info
            level("attempt_ended", **facts, outcome=completion.outcome, status=answer.status)

    # Shutdown

    async def _drain(self) -> None:
        """Wait for the handlers, then stop them, then leave them. Heartbeats go on all the while (B-084)."""
        if await self._wait_idle(self._settings.grace_s):
            return
        for attempt in self._at_work():
            attempt.signs.shutting_down = True
            self._ask_to_stop(attempt, StopReason.SHUTDOWN)
        if await self._wait_idle(STOP_S):
            return
        for attempt in self._at_work():
            # It still runs, so it is not given back: a second one would run beside it. Its lease keeps others away for a while.
            log.warning("attempt_left_to_its_lease", job_id=attempt.claimed.job_id, attempt=attempt.claimed.attempt)
            self._count("abandoned")
            self._forget(attempt.claimed.lease_token)
            attempt.abandoned.set_result(None)
        await self._idle.wait()

    async def _wait_reported(self) -> None:
        try:
            # Every report ends with its lease, but a server that takes heartbeats and no reports would keep those alive for ever.
            async with asyncio.timeout(max(self._settings.lease_s, STOP_S)):
                await self._reporter.wait_settled()
        except TimeoutError:
            self._count("unreported", self._reporter.pending)
            log.error("outcomes_unreported", reports=self._reporter.pending)

    def _at_work(self) -> list[_Attempt]:
        return [attempt for attempt in self._attempts.values() if not attempt.ended]

    async def _wait_idle(self, bound_s: float) -> bool:
        try:
            async with asyncio.timeout(bound_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
