"""`TestNode`: a node in memory on a virtual clock, with the calls a test makes. Refusals are raised as the errors a client would see."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn, TypeVar

import msgspec
from msgspec.structs import replace

from wheelsched.core.errors import BY_CODE, NotFound, WheelschedError
from wheelsched.core.ids import keyed_job_id
from wheelsched.core.settings import Settings
from wheelsched.cron import ZoneData, jitter_of
from wheelsched.model.commands import AnyCommand, Cancel, Create, Discard, Redrive, Release, Reply, RunNow, Update
from wheelsched.model.rows import AttemptRow, JobSpec, JobState, QueueSettings, encode_spec
from wheelsched.model.schedules import Definition, Missed, Overlap, SkipRow
from wheelsched.model.states import Outcome, Priority, Status
from wheelsched.node import Node, open_node
from wheelsched.node.face import BackfillCounts, ClaimedJob, HeartbeatReply, JobFilter, JobRecord, QueueView, ScheduleRecord
from wheelsched.store.memory import MemoryStore
from wheelsched.testing.clock import SteppedClock

START_MS = 1_767_413_106_007  # 2026-01-03T04:05:06.007Z: every field of a date differs
TENANT = "default"
# Few groups make a node that opens in a millisecond; what they share is the same with 32.
GROUP_COUNT = 4

T = TypeVar("T")


@asynccontextmanager
async def open_test_node(
    *, seed: int = 0, start_ms: int = START_MS, settings: Settings | Mapping[str, Mapping[str, Any]] | None = None, serve: bool = False,
    read_zones: Callable[[], ZoneData] | None = None,
) -> AsyncIterator[TestNode]:  # fmt: skip
    """A running `TestNode`; closed at the end of the block. `settings` as in the YAML, e.g. `{"scheduler": {"horizon_s": 60}}`, or a
    whole tree; `serve`: also answer HTTP on a free loopback port, at `url`; `read_zones`: other time-zone data than the package's,
    asked for anew at each start."""
    node = TestNode(seed=seed, start_ms=start_ms, settings=settings, serve=serve, read_zones=read_zones)
    await node.open()
    try:
        yield node
    finally:
        await node.close()


class TestNode:
    """See `open_test_node`. Jobs are named by what `create` returned, by what `claim` returned, or by id."""

    __test__ = False  # no test class, whatever its name begins with

    def __init__(
        self, *, seed: int = 0, start_ms: int = START_MS, settings: Settings | Mapping[str, Mapping[str, Any]] | None = None,
        serve: bool = False, read_zones: Callable[[], ZoneData] | None = None,
    ) -> None:  # fmt: skip
        self.settings = settings if isinstance(settings, Settings) else make_settings(settings)
        self.clock = SteppedClock(start_ms)
        self.rng = random.Random(seed)
        self.store = MemoryStore(fatal=_fail)
        self.tenant = TENANT
        self.restart_count = 0
        self.read_zones = read_zones
        self._serve = serve
        self._port = 0
        self._server: Any = None
        self._node: Node | None = None
        self._running: asyncio.Task[None] | None = None

    # Life.

    @property
    def node(self) -> Node:
        assert self._node is not None, "the node is not open"
        return self._node

    @property
    def url(self) -> str:
        """Of the HTTP front; the same after a restart."""
        assert self._server is not None, "open the node with serve=True"
        return f"http://127.0.0.1:{self._port}"

    @property
    def now_ms(self) -> int:
        return self.clock.wall_ms()

    async def open(self, *, settle: bool = True) -> None:
        """Start on what the store holds; return when everything due is ready. `settle` False: what schedules have to decide waits for
        the next step of time, as though the workers were quicker with their reports than the node with its decisions."""
        self._node = await open_node(self.settings, store=self.store, clock=self.clock, rng=self.rng, read_zones=self.read_zones)
        self._running = asyncio.create_task(self._node.run(), name="test node")
        await self._while_running(self._wait_loaded())
        if settle:
            await self.settle()
        if self._serve:
            from wheelsched import api

            self._server = await api.serve(self._node, host="127.0.0.1", port=self._port)
            self._port = self._server.port

    async def _wait_loaded(self) -> None:
        while not self.node.dispatcher.is_loaded:  # noqa: ASYNC110  # each turn of the loop reads on
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Stop cleanly: apply what was proposed, flush, close."""
        if self._running is None:
            return
        self.node.drain()
        if self._server is not None:
            await self._server.drain(self.settings.http.drain_s)
        self.node.stop()
        try:
            await self._running
        finally:
            await self._forget()

    async def crash(self, *, keep_bytes_fraction: float = 0.0) -> None:
        """Lose power: what was not synced is gone, but for a prefix of that fraction; calls under way are never answered."""
        assert self._running is not None, "the node is not open"
        self.store = self.store.crash(keep_bytes_fraction)
        self._running.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self._running
        await self._forget()

    async def crash_and_restart(self, *, keep_bytes_fraction: float = 0.0) -> None:
        """Lose power, then start on what is left. Time stood still meanwhile; leases begin anew, in their full length."""
        await self.crash(keep_bytes_fraction=keep_bytes_fraction)
        self.restart_count += 1
        await self.open()

    async def graceful_restart(self) -> None:
        """Stop cleanly and start again."""
        await self.close()
        # A closed store refuses everything: what it held is what the next one opens on.
        self.store = self.store.crash(1.0)
        self.restart_count += 1
        await self.open()

    async def _forget(self) -> None:
        self._node = self._running = None
        if self._server is not None:
            server, self._server = self._server, None
            await server.close()

    async def _while_running(self, call: Awaitable[T]) -> T:
        """Await a call, or raise what ended the node meanwhile: nothing here waits for a node that is gone."""
        assert self._running is not None, "the node is not open"
        pending = asyncio.ensure_future(call)
        pending.add_done_callback(_retrieve)
        try:
            await asyncio.wait({pending, self._running}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not pending.done():
                pending.cancel()
        if pending.cancelled() or not pending.done():
            self._running.result()
            raise RuntimeError("the node has stopped")
        return pending.result()

    # Time.

    async def advance(
        self, *, s: float = 0.0, ms: int = 0, to: int | None = None, before_deciding: Callable[[], Awaitable[object]] | None = None
    ) -> int:
        """Move the clock by `s` seconds and `ms` milliseconds, or to an instant (UTC ms). Everything on the way fires in order, each
        at its own instant; returns the new now. `before_deciding` is awaited when the clock reads that instant and nothing that is due
        at it has fired or been decided: what it does comes first."""
        to_ms = self.now_ms + round(s * 1000) + ms if to is None else to
        if before_deciding is not None:
            if to_ms > self.now_ms + 1:
                await self._while_running(self.node.advance_clock(to_ms - 1))
            self.clock.advance_to(to_ms)
            await before_deciding()
        return await self._while_running(self.node.advance_clock(to_ms))

    async def settle(self) -> None:
        """Let everything happen that is due at this very instant; the clock stands."""
        await self._while_running(self._settle())

    async def _settle(self) -> None:
        dispatcher = self.node.dispatcher
        await dispatcher.turn()
        while (next_ms := dispatcher.next_event_ms()) is not None and next_ms <= self.now_ms:
            await dispatcher.turn()

    async def step_wall_clock(self, *, s: float = 0.0, ms: int = 0) -> None:
        """Set the wall clock forward or back, as an operator does; monotonic time stands. Then settle."""
        self.clock.step_wall(ms=round(s * 1000) + ms)
        await self.settle()

    # Jobs.

    def command(
        self, queue: str = "default", *, payload: Any = None, delay_s: float = 0.0, run_at_ms: int | None = None, window_s: float = 0.0,
        priority: str = "default", max_attempts: int = 6, initial_backoff_s: float = 10.0, max_backoff_s: float = 600.0,
        timeout_s: float = 3_600.0, start_deadline_s: float | None = None, labels: Mapping[str, str] | None = None, key: str = "",
        spread_s: float = 0.0,
    ) -> Create:  # fmt: skip
        """The command that `create` proposes."""
        fields = {name: value for name, value in locals().items() if name not in ("self", "key")}
        spec = JobSpec(
            _ms(window_s), max_attempts=max_attempts, initial_backoff_ms=_ms(initial_backoff_s), max_backoff_ms=_ms(max_backoff_s),
            timeout_ms=_ms(timeout_s), start_deadline_ms=-1 if start_deadline_s is None else _ms(start_deadline_s),
            labels=dict(labels or {}),
        )  # fmt: skip
        return Create(
            keyed_job_id(self.tenant, key) if key else self.node.new_job_id(), self.tenant, queue, Priority[priority.upper()],
            -1 if run_at_ms is None else run_at_ms, _ms(delay_s), _ms(window_s), _ms(spread_s), encode_spec(spec),
            msgspec.json.encode(payload), _fingerprint(fields) if key else b"",
        )  # fmt: skip

    async def create(self, queue: str = "default", **options: Any) -> JobState:
        """A new job, as acknowledged; options as of `command`, seconds as in the API. `key`: its Idempotency-Key."""
        self.node.check_admission()
        return _state(await self.propose(self.command(queue, **options)))

    async def create_many(self, jobs: Sequence[Mapping[str, Any]]) -> list[Reply]:
        """A batch, with one wait; each reply by itself."""
        self.node.check_admission()
        return await self._while_running(self.node.propose_many([self.command(**job) for job in jobs]))

    async def propose(self, command: AnyCommand) -> Reply:
        return await self._while_running(self.node.propose(command))

    async def update(self, job: Job, **changes: Any) -> JobState:
        """PATCH: `delay_s`, `run_at_ms`, `window_s`, `priority`, `payload`, `max_attempts`, `labels`, `if_version`, …"""
        return _state(await self.propose(self._update(_id(job), **changes)))

    def _update(
        self, job_id: bytes, *, delay_s: float | None = None, run_at_ms: int | None = None, window_s: float | None = None,
        priority: str | None = None, payload: bytes | None = None, if_version: int = 0, **spec_changes: Any,
    ) -> Update:  # fmt: skip
        return Update(
            job_id, self.tenant, -1 if run_at_ms is None else run_at_ms, -1 if delay_s is None else _ms(delay_s),
            -1 if priority is None else Priority[priority.upper()], -1 if window_s is None else _ms(window_s), spec_changes, payload,
            if_version,
        )  # fmt: skip

    async def cancel(self, job: Job) -> JobState:
        return _state(await self.propose(Cancel(_id(job), self.tenant)))

    async def run_now(self, job: Job) -> JobState:
        return _state(await self.propose(RunNow(_id(job), self.tenant)))

    async def redrive(self, job: Job, *, delay_s: float = 0.0) -> JobState:
        return _state(await self.propose(Redrive(_id(job), self.tenant, _ms(delay_s))))

    async def discard(self, job: Job) -> None:
        _state(await self.propose(Discard(_id(job), self.tenant)))

    async def get(self, job: Job) -> JobRecord:
        """The job as seen now. Raises `NotFound`."""
        record = await self.node.read_job(self.tenant, _id(job))
        if record is None:
            raise NotFound("no such job, or its history has been purged")
        return record

    async def status(self, job: Job) -> str:
        """The name of its status."""
        return (await self.get(job)).status.name

    async def attempts(self, job: Job) -> list[AttemptRow]:
        """Its recorded transitions, oldest first."""
        found = await self.node.read_attempts(self.tenant, _id(job))
        if found is None:
            raise NotFound("no such job, or its history has been purged")
        return [row for _, row in found[1]]

    async def list_jobs(self, queue: str = "", *, statuses: Sequence[Status] = (), limit: int = 100) -> list[JobRecord]:
        """All pages of a listing, in order."""
        wanted = JobFilter(self.tenant, queue, frozenset(statuses))
        jobs: list[JobRecord] = []
        cursor: bytes | None = None
        while True:
            page = await self.node.list_jobs(wanted, cursor=cursor, limit=limit)
            jobs += page.jobs
            if (cursor := page.cursor) is None:
                return jobs

    # Work.

    async def claim(
        self, *queues: str, jobs_max: int = 1, lease_s: float | None = None, wait_s: float = 0.0, worker: str = "worker-1"
    ) -> list[ClaimedJob]:
        """Up to `jobs_max` ready jobs of the queues, in that order of preference; `wait_s` is real time."""
        claim = asyncio.ensure_future(
            self.node.claim(
                self.tenant, queues or ("default",), jobs_max=jobs_max, lease_ms=None if lease_s is None else _ms(lease_s),
                wait_ms=_ms(wait_s), worker=worker,
            )
        )  # fmt: skip
        try:
            return await self._while_running(claim)
        except asyncio.CancelledError:
            # Cancelled in the very turn in which it was served: as for a worker that hangs up, the jobs go back.
            if claim.done() and not claim.cancelled() and claim.exception() is None:
                self.node.give_back(claim.result())
            raise

    async def complete(
        self, job: ClaimedJob, outcome: str = "succeeded", *, error: Any = None, result: Any = None, retry_after_s: float | None = None
    ) -> JobState:
        """End the attempt. Raises `StaleLease` where it is not the job's current one."""
        state = job.state
        return _state(
            await self._while_running(
                self.node.complete(
                    state.job_id, state.attempt, state.fencing, outcome=Outcome[outcome.upper()],
                    error=b"" if error is None else msgspec.json.encode(error),
                    result=b"" if result is None else msgspec.json.encode(result),
                    retry_after_ms=-1 if retry_after_s is None else _ms(retry_after_s),
                )
            )
        )  # fmt: skip

    async def heartbeat(self, job: ClaimedJob, *, lease_s: float | None = None, progress: Any = None) -> HeartbeatReply:
        """Extend the lease. Raises `StaleLease` where the attempt is not the job's current one."""
        state = job.state
        reply = await self._while_running(
            self.node.heartbeat(
                state.job_id, state.attempt, state.fencing, lease_ms=None if lease_s is None else _ms(lease_s),
                progress=None if progress is None else msgspec.json.encode(progress),
            )
        )  # fmt: skip
        if reply.refusal:
            raise BY_CODE[reply.refusal](reply.detail)
        return reply

    async def release(self, job: ClaimedJob) -> JobState:
        """Give the job back, its attempt uncounted."""
        return _state(await self.propose(Release(job.state.job_id, job.state.attempt, job.state.fencing)))

    # Queues.

    async def queue(self, name: str = "default") -> QueueView:
        view = await self.node.queue_view(self.tenant, name)
        if view is None:
            raise NotFound(f"no queue {name}")
        return view

    async def depth(self, name: str = "default") -> dict[str, tuple[int, int, int]]:
        """Jobs by status and priority (critical, default, bulk), statuses without any left out."""
        return {status.name: counts for status, counts in (await self.queue(name)).depth.items() if any(counts)}

    async def put_queue(self, name: str = "default", **settings: Any) -> QueueView:
        """Replace its settings: fields of `QueueSettings`."""
        row = QueueSettings(**settings)
        return await self._while_running(self.node.put_queue(self.tenant, name, row, actor="test"))

    async def pause(self, name: str = "default") -> None:
        await self._while_running(self.node.pause_queue(self.tenant, name, True, actor="test"))

    async def resume(self, name: str = "default") -> None:
        await self._while_running(self.node.pause_queue(self.tenant, name, False, actor="test"))

    # Schedules.

    async def put_schedule(self, name: str = "schedule", *, paused: bool | None = None, **options: Any) -> ScheduleRecord:
        """Create or replace; options as of `definition`."""
        record, _ = await self._while_running(self.node.put_schedule(self.definition(name, **options), paused=paused, actor="test"))
        return record

    def definition(
        self, name: str = "schedule", *, queue: str = "default", cron: str = "", zone: str = "UTC", every_s: float = 0.0,
        anchor_ms: int | None = None, start_ms: int | None = None, end_ms: int | None = None, missed: str = "run_latest",
        starting_deadline_s: float | None = None, overlap: str = "allow", jitter_s: float = 0.0, shadow: bool = False,
        priority: str = "default", window_s: float = 0.0, payload: Any = None, max_attempts: int = 6, initial_backoff_s: float = 10.0,
        max_backoff_s: float = 600.0, timeout_s: float = 3_600.0, start_deadline_s: float | None = None,
    ) -> Definition:  # fmt: skip
        """What `put_schedule` puts: names and seconds as in the API, the template's fields among them. `anchor_ms` of an interval: now."""
        spec = JobSpec(
            _ms(window_s), max_attempts=max_attempts, initial_backoff_ms=_ms(initial_backoff_s), max_backoff_ms=_ms(max_backoff_s),
            timeout_ms=_ms(timeout_s), start_deadline_ms=-1 if start_deadline_s is None else _ms(start_deadline_s),
        )  # fmt: skip
        every_ms, jitter_ms = _ms(every_s), _ms(jitter_s)
        return Definition(
            b"", self.tenant, name, queue, cron=cron, zone=zone, every_ms=every_ms,
            anchor_ms=-1 if not every_ms else self.now_ms if anchor_ms is None else anchor_ms,
            jitter_ms=jitter_ms, offset_ms=jitter_of(name, jitter_ms), start_ms=-1 if start_ms is None else start_ms,
            end_ms=-1 if end_ms is None else end_ms, missed=Missed[missed.upper()],
            starting_deadline_ms=-1 if starting_deadline_s is None else _ms(starting_deadline_s), overlap=Overlap[overlap.upper()],
            shadow=shadow, priority=Priority[priority.upper()], window_ms=_ms(window_s), spec=encode_spec(spec),
            payload=msgspec.json.encode(payload),
        )  # fmt: skip

    async def schedule(self, name: str = "schedule") -> ScheduleRecord:
        record = await self.node.read_schedule(self.tenant, name)
        if record is None:
            raise NotFound(f"no schedule {name}")
        return record

    async def pause_schedule(self, name: str = "schedule") -> ScheduleRecord:
        return await self._while_running(self.node.pause_schedule(self.tenant, name, True, actor="test"))

    async def resume_schedule(self, name: str = "schedule") -> ScheduleRecord:
        return await self._while_running(self.node.pause_schedule(self.tenant, name, False, actor="test"))

    async def drop_schedule(self, name: str = "schedule") -> None:
        await self._while_running(self.node.drop_schedule(self.tenant, name, actor="test"))

    async def start_run(
        self, name: str = "schedule", *, delay_s: float = 0.0, run_at_ms: int | None = None, payload: Any = None, key: str = ""
    ) -> JobState:
        """A run by hand. `key`: its Idempotency-Key."""
        fields = {"delay_s": delay_s, "run_at_ms": run_at_ms, "payload": payload}
        reply = await self._while_running(
            self.node.start_run(
                self.tenant, name, run_at_ms=-1 if run_at_ms is None else run_at_ms, delay_ms=_ms(delay_s),
                payload=None if payload is None else msgspec.json.encode(payload), key=key,
                fingerprint=_fingerprint(fields) if key else b"", actor="test",
            )
        )  # fmt: skip
        return _state(reply)

    async def backfill(self, name: str = "schedule", *, from_ms: int, to_ms: int) -> BackfillCounts:
        return await self._while_running(self.node.backfill(self.tenant, name, from_ms=from_ms, to_ms=to_ms, actor="test"))

    async def runs(self, name: str = "schedule") -> tuple[list[JobRecord], list[SkipRow]]:
        """All pages: its jobs, the one that waits included, and the records of what was left out; oldest first."""
        jobs: list[JobRecord] = []
        skipped: list[SkipRow] = []
        cursor: bytes | None = None
        while True:
            page = await self.node.list_runs(self.tenant, name, cursor=cursor, limit=1_000)
            if page is None:
                raise NotFound(f"no schedule {name}")
            jobs += page.jobs
            skipped += page.skipped
            if (cursor := page.cursor) is None:
                return jobs[::-1], skipped[::-1]

    # Several things at once.

    async def together(self, *calls: Coroutine[Any, Any, T]) -> list[T | BaseException]:
        """Start all calls in this turn of the loop; their results or errors, in order."""
        return await asyncio.gather(*calls, return_exceptions=True)


def make_settings(given: Mapping[str, Mapping[str, Any]] | None = None, *, ready_queue_max: int | None = None) -> Settings:
    """Settings of a test node. `ready_queue_max` may lie below what a YAML file may say, so that a test can spill a few jobs."""
    sections: dict[str, dict[str, Any]] = {
        "cluster": {"group_count": GROUP_COUNT}, "store": {"kind": "memory"}, "clock": {"kind": "virtual"},
        # A loop that lags says how busy the machine of the tests is, and nothing else here depends on real time.
        "scheduler": {"loop_lag_max_ms": 86_400_000},
    }  # fmt: skip
    for name, section in (given or {}).items():
        sections[name] = {**sections.get(name, {}), **section}
    settings = msgspec.convert(sections, Settings)
    if ready_queue_max is not None:
        scheduler = replace(settings.scheduler, ready_queue_max=ready_queue_max)
        settings = replace(settings, scheduler=scheduler)
    return settings


Job = JobState | ClaimedJob | JobRecord | bytes


def _id(job: Job) -> bytes:
    if isinstance(job, bytes):
        return job
    return job.job_id if isinstance(job, JobState) else job.state.job_id


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _state(reply: Reply) -> JobState:
    if reply.refusal:
        raise BY_CODE.get(reply.refusal, WheelschedError)(reply.detail)
    assert reply.state is not None
    return reply.state


def _fingerprint(fields: Mapping[str, Any]) -> bytes:
    """Two creates are the same where they would make the same job."""
    return hashlib.blake2b(msgspec.json.encode(fields, order="deterministic"), digest_size=16).digest()


def _retrieve(done: asyncio.Future[Any]) -> None:
    """Whoever awaited a call may have left: its error is no lost one."""
    if not done.cancelled():
        done.exception()


def _fail(message: str) -> NoReturn:
    raise AssertionError(message)
