"""A running node: commands to their groups, reads of what has been applied, claims, and its own life from start to drain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import structlog
from msgspec.structs import replace

from wheelsched import __version__
from wheelsched.backup import Views
from wheelsched.cluster.admin import ClusterAdmin
from wheelsched.core.clock import Clock, Rng
from wheelsched.core.errors import NotFound, QuotaExceeded, StaleLease, Unavailable
from wheelsched.core.ids import format_job_id, group_of, new_job_id
from wheelsched.core.invariants import invariant
from wheelsched.core.settings import Settings
from wheelsched.cron import ZoneData
from wheelsched.dispatch import Dispatcher
from wheelsched.dispatch.leases import Lease
from wheelsched.dispatch.queues import QueueMemory
from wheelsched.model import keys
from wheelsched.model.commands import (
    AnyCommand,
    Backfill,
    Cancel,
    Complete,
    Create,
    Extend,
    PauseQueue,
    PutQueue,
    PutSchedule,
    ReleaseHold,
    Reply,
    RunNow,
    StartRun,
    Update,
)
from wheelsched.model.effects import Effect
from wheelsched.model.rows import (
    AttemptRow,
    DoneRow,
    JobState,
    QueueSettings,
    decode_attempt,
    decode_done,
    decode_queue,
    decode_spec,
    decode_state,
    encode_row,
    split_job,
)  # fmt: skip
from wheelsched.model.schedules import Definition
from wheelsched.model.states import FINAL, LEASED, Status, status_of
from wheelsched.node.backup import Backups
from wheelsched.node.face import (
    BackfillCounts,
    ClaimedJob,
    HeartbeatReply,
    JobFilter,
    JobPage,
    JobRecord,
    MinuteForecast,
    Preview,
    QueueView,
    Readiness,
    RunPage,
    ScheduleRecord,
    ZonesReloaded,
)
from wheelsched.node.forecast import by_minute, forecast
from wheelsched.node.listing import Listing
from wheelsched.node.schedules import Schedules
from wheelsched.replica import Replicas, ReplicaSet
from wheelsched.runtime.clock import VirtualClock
from wheelsched.runtime.lag import LoopLag
from wheelsched.runtime.metrics import QUEUE_LABELS_MAX, Gauges, Metrics, QueueGauges
from wheelsched.store import Store
from wheelsched.store.failure import exit_now
from wheelsched.store.heads import RangeHeads
from wheelsched.store.raftlog import RaftLog

# A queue costs memory from its first name on, and names are the clients' to choose.
QUEUES_MAX = 100_000
UPKEEP_INTERVAL_S = 0.25
# Heads looked up a time, about 2 ms each; a prefix comes due after some 10,000 ends.
TRIM_PREFIXES = 2
# A dispatcher that has not swept its wheels for this long is stuck, whatever the API can still answer.
STUCK_MS = 5_000
# An installer writes file by file: data that is the same after this long is complete.
ZONES_SETTLE_S = 2.0
# A node that can talk but not write is worse than none: whoever waits for it would wait for ever.
SYNC_STALL_MS = 30_000
HELD = "restored and held: nothing is dispatched; look, then `wheelsched restore --release` (POST /v1/hold:release)"
# Steps of a virtual clock without getting anywhere mean a bug, not a busy year.
STANDSTILL_STEPS_MAX = 100_000

log = structlog.get_logger()


class Node:
    """See `face.NodeFace` for what its methods promise."""

    CLOCK_KEY = b"C"  # raft_meta: last instant of a virtual clock

    def __init__(
        self, settings: Settings, store: Store, clock: Clock, rng: Rng, metrics: Metrics, read_zones: Callable[[], ZoneData],
        make_replicas: Callable[[Node], ReplicaSet] | None = None,
    ) -> None:  # fmt: skip
        """`make_replicas(node)` gives the groups of a node that is one of several; they tell it by `on_effects`, `on_lead`, `on_follow`
        and `on_replaced`. None: the node is alone."""
        self.settings = settings
        self.clock = clock
        self.rng = rng
        self.metrics = metrics
        self._store = store
        self._group_count = settings.cluster.group_count
        groups = (*range(self._group_count), keys.META_GROUP)
        self._heads = RangeHeads(store)
        self.replicas: ReplicaSet = (
            Replicas(store, RaftLog(store, groups), clock, groups, on_effects=self.on_effects)
            if make_replicas is None
            else make_replicas(self)
        )
        self._is_alone = make_replicas is None
        self.cluster: ClusterAdmin | None = None
        self.replicas.on_commit_ms = lambda ms: metrics.commit_latency.observe(ms / 1000)
        self.dispatcher = Dispatcher(
            store, self._heads, self.replicas, clock, rng, settings.scheduler, metrics, read_zones(), group_count=self._group_count
        )
        self._read_zones = read_zones
        self._schedules = Schedules(
            store, self.dispatcher, clock, rng, self._propose_to, group_count=self._group_count,
            record_queue=self.note_queue, complete=self._complete_record,
        )  # fmt: skip
        self._listing = Listing(store, self._heads, self._complete_record, self._finished_record)
        self.views = Views(store)
        self.backups = Backups(settings, clock, rng, self.views.read)
        self._lag = LoopLag()
        self._recorded_queues: set[tuple[str, str]] = set()
        self.on_office: Callable[[], None] = lambda: None  # told whenever this node leads another group, or one less
        self.on_close: Callable[[], None] = lambda: None  # told right before the store is closed, to whoever else reads it
        # A node of several hands over what it leads before it ends.
        self.on_disk_full: Callable[[], None] = self.stop
        # Commands that nobody waits for and that may be repeated; a node of several sends them to whoever leads.
        self.propose_later: Callable[[int, AnyCommand], None] = self._propose_here
        self._started = False
        self._draining = False
        self._stop = asyncio.Event()
        self._advancing = asyncio.Lock()
        self._started_at = time.time()
        metrics.gauges = self._gauges

    # Life.

    async def start(self) -> None:
        """Replay the log, load what is due and near. Call once, before `run`."""
        entries = self.replicas.recover()
        self._started = True
        await self.dispatcher.start(range(self._group_count) if self._is_alone else ())
        # One that is known by its jobs alone lost its record with an unsynced tail; it is recorded with its next job.
        self._recorded_queues = {
            (queue.tenant, queue.name)
            for queue in self.dispatcher.queues
            if self._store.get(keys.META, keys.queue_row_key(queue.tenant, queue.name)) is not None
        }
        log.info("node_loaded", entries_replayed=entries, timers=len(self.dispatcher.timers))

    async def run(self) -> None:
        """Serve until `stop`; then apply what is in the log, flush and close the store. Raises what stopped it otherwise."""
        try:
            async with asyncio.TaskGroup() as tasks:
                replicas = tasks.create_task(self.replicas.run(), name="replicas")
                others = [
                    tasks.create_task(self.dispatcher.run(), name="dispatcher"),
                    tasks.create_task(self._lag.run(), name="lag"),
                    tasks.create_task(self._upkeep(), name="upkeep"),
                    tasks.create_task(self._watch_zones(), name="time zones"),
                ]
                await self._stop.wait()
                # Dispatch ends first: a timer that fires or a lease that runs out meanwhile could not be proposed any more.
                for task in others:
                    task.cancel()
                await asyncio.wait(others)
                self.replicas.stop()
                await replicas
        finally:
            self.on_close()
            self.replicas.abort()
            self._store.close()

    def drain(self) -> None:
        """Refuse new work and answer every long poll; what is under way goes on."""
        if not self._draining:
            self._draining = True
            self.backups.drain()
            log.info("node_draining", waiters=self.dispatcher.claims.waiter_count)
            self.dispatcher.claims.drain(list(self.dispatcher.queues))

    def stop(self) -> None:
        """Make `run` return once everything proposed has been applied."""
        self.drain()
        self._stop.set()

    async def _upkeep(self) -> None:
        """Disk space, and the heads of ranges that lost rows."""
        while True:
            self._store.check_disk()
            if self._store.sync_pending_ms() > SYNC_STALL_MS:
                exit_now(f"wheelsched: the disk has not answered an fsync for {SYNC_STALL_MS // 1000} s; the node stops, nothing was lost")
            ranges = self._heads.trim(TRIM_PREFIXES)
            if ranges:
                self._store.write({}, ranges)
            if self._store.must_stop:
                log.error("disk_nearly_full", remedy="free space in the data directory, then start the node again")
                self.on_disk_full()
                return
            await asyncio.sleep(UPKEEP_INTERVAL_S)

    def on_effects(self, group: int, effects: Sequence[Effect]) -> None:
        # While the log is replayed nobody is served yet: memory is made from the rows afterwards.
        if self._started:
            self.dispatcher.on_effects(group, effects)

    def on_lead(self, group: int) -> None:
        if group != keys.META_GROUP:
            self.dispatcher.lead(group)
        self.on_office()

    def on_follow(self, group: int) -> None:
        if group != keys.META_GROUP:
            self.dispatcher.unlead(group)
        self.on_office()

    def on_replaced(self, group: int) -> None:
        """A snapshot took the place of all rows of a group."""
        self._heads.forget(keys.group_prefix(group))
        if group == keys.META_GROUP and self._started:
            self.dispatcher.read_settings()

    # Admission and writes.

    def new_job_id(self) -> bytes:
        return new_job_id(self.clock.wall_ms(), self.rng)

    def check_admission(self, *, new_jobs: bool = True) -> None:
        if self._draining:
            raise Unavailable("the node is shutting down; try again in a moment", retry_after_s=1)
        if new_jobs and not self._store.writable:
            raise Unavailable(
                "the disk is nearly full: new jobs are refused, jobs already taken go on; free space in the data directory",
                retry_after_s=10,
            )
        if self._lag.lag_ms > self.settings.scheduler.loop_lag_max_ms:
            raise Unavailable("the node is overloaded; try again in a moment", retry_after_s=1)

    async def propose(self, command: AnyCommand) -> Reply:
        if isinstance(command, (Cancel, RunNow, Update)):
            return await self._schedules.propose_on_job(command)
        return (await self.propose_many((command,)))[0]

    async def _propose_to(self, group: int, command: AnyCommand) -> Reply:
        urgent = not isinstance(command, (PutSchedule, StartRun, Backfill))
        return (await asyncio.shield(self.replicas.propose(group, command, urgent=urgent).future))[0]

    async def propose_many(self, commands: Sequence[AnyCommand]) -> list[Reply]:
        group_count = self._group_count
        routed = []
        urgent = True
        for command in commands:
            if type(command) is Create:
                urgent = False
                if (command.tenant, command.queue) not in self._recorded_queues:
                    self._record_queue(command.tenant, command.queue)
            routed.append((group_of(command.job_id, group_count), command))  # type: ignore[union-attr]  # commands of one job
        # A caller that hangs up does not undo its command: shield the batch, others may wait on it.
        return await asyncio.shield(self.replicas.propose_many(routed, urgent=urgent).future)

    def _propose_here(self, group: int, command: AnyCommand) -> None:
        self.replicas.propose(group, command, urgent=True)

    def note_queues(self, commands: Sequence[AnyCommand]) -> None:
        """Record the queues of new jobs, where they are new themselves."""
        for command in commands:
            if type(command) is Create:
                self.note_queue(command.tenant, command.queue)

    def note_queue(self, tenant: str, name: str) -> None:
        if (tenant, name) not in self._recorded_queues:
            self._record_queue(tenant, name)

    def _record_queue(self, tenant: str, name: str) -> QueueMemory:
        """A queue exists from its first job or claim on: remember it in the meta group."""
        if len(self._recorded_queues) >= QUEUES_MAX:
            raise QuotaExceeded(f"there are {QUEUES_MAX} queues already; use labels to tell jobs of one queue apart", retry_after_s=60)
        self.propose_later(keys.META_GROUP, PutQueue(tenant, name))
        self._recorded_queues.add((tenant, name))
        return self.dispatcher.queues.ensure(tenant, name)

    # Reads.

    async def read_job(self, tenant: str, job_id: bytes) -> JobRecord | None:
        await self.replicas.read_barrier(group_of(job_id, self._group_count))
        state = self._state(job_id)
        return None if state is None or state.tenant != tenant else self._complete_record(state)

    def _state(self, job_id: bytes) -> JobState | None:
        row = self._store.get(keys.STATE, keys.state_key(group_of(job_id, self._group_count), job_id))
        return None if row is None else decode_state(row)

    def _complete_record(self, state: JobState) -> JobRecord | None:
        """The whole job of a state row."""
        group = group_of(state.job_id, self._group_count)
        if state.status in FINAL:
            key = keys.done_key(group, state.tenant, state.queue, state.status, state.fire_at_ms, state.job_id)
            row = self._store.get(keys.DONE, key)
            if row is None:
                invariant(False, "never_lost", job_id=format_job_id(state.job_id), family=keys.DONE)
            assert row is not None
            return self._finished_record(decode_done(row))
        if state.status == Status.DISCARDED:
            return None
        row = self._store.get(keys.JOBS, keys.job_key(group, state.lane, state.fire_at_ms, state.job_id))
        if row is None:
            invariant(False, "never_lost", job_id=format_job_id(state.job_id), family=keys.JOBS)
        assert row is not None
        spec, payload = split_job(row)
        lease = self.dispatcher.leases.get(state.job_id)
        progress = lease.progress if lease is not None and state.status in LEASED else b""
        status = status_of(state, self.replicas.watermark_ms(group))
        return JobRecord(state, status, decode_spec(spec), payload, self._last_error(group, state), b"", progress)

    def _finished_record(self, done: DoneRow) -> JobRecord:
        state = done.state
        spec, payload = split_job(done.job)
        error = done.error
        if not error and state.status in (Status.DEAD, Status.CANCELLED):
            # The last attempt told none, or none was under way: what is known is what failed before.
            error = self._last_error(group_of(state.job_id, self._group_count), state)
        return JobRecord(state, Status(state.status), decode_spec(spec), payload, error, done.result)

    def _last_error(self, group: int, state: JobState) -> bytes:
        """Of the last attempt that failed."""
        if state.attempt == 0 or (state.attempt == 1 and state.status in LEASED):
            return b""
        prefix = keys.state_key(group, state.job_id)
        for _, row in self._store.scan_back(keys.ATTEMPTS, prefix, keys.prefix_end(prefix), 8):
            if error := decode_attempt(row).error:
                return error
        return b""

    async def read_attempts(self, tenant: str, job_id: bytes) -> tuple[JobRecord, list[tuple[int, AttemptRow]]] | None:
        record = await self.read_job(tenant, job_id)
        if record is None:
            return None
        lease = self.dispatcher.leases.get(job_id)
        if lease is not None and record.state.status in LEASED:
            # Heartbeats moved it in memory only.
            expires_at_ms = self.clock.wall_ms() + lease.deadline_ms - self.clock.mono_ms()
            record = replace(record, state=replace(record.state, lease_expires_at_ms=expires_at_ms))
        prefix = keys.state_key(group_of(job_id, self._group_count), job_id)
        rows = self._store.scan(keys.ATTEMPTS, prefix, keys.prefix_end(prefix), 10_000)
        return record, [(keys.attempt_version(key), decode_attempt(row)) for key, row in rows]

    async def list_jobs(self, wanted: JobFilter, *, cursor: bytes | None, limit: int) -> JobPage:
        return await self.list_jobs_of(range(self._group_count), wanted, cursor=cursor, limit=limit)

    async def list_jobs_of(self, groups: Sequence[int], wanted: JobFilter, *, cursor: bytes | None, limit: int) -> JobPage:
        """The same of some groups alone."""
        queues = self.dispatcher.queues
        names = [wanted.queue] if wanted.queue else sorted(queue.name for queue in queues if queue.tenant == wanted.tenant)
        return await self._listing.page(wanted, groups, names, cursor=cursor, limit=limit)

    # Claims and attempts.

    async def claim(
        self, tenant: str, queues: Sequence[str], *, jobs_max: int, lease_ms: int | None, wait_ms: int, worker: str
    ) -> list[ClaimedJob]:
        memories = [
            self.dispatcher.queues.ensure(tenant, name) if (tenant, name) in self._recorded_queues else self._record_queue(tenant, name)
            for name in dict.fromkeys(queues)
        ]
        started = time.monotonic()
        handed = await self.dispatcher.claims.claim(memories, jobs_max=jobs_max, lease_ms=lease_ms, wait_ms=wait_ms, worker=worker)
        if handed:
            self.metrics.claim_wait.observe(time.monotonic() - started)
        return handed

    def give_back(self, jobs: Sequence[ClaimedJob]) -> None:
        self.dispatcher.claims.give_back(jobs)

    async def heartbeat(self, job_id: bytes, attempt: int, fencing: int, *, lease_ms: int | None, progress: bytes | None) -> HeartbeatReply:
        lease = self._live_lease(job_id, attempt, fencing)
        if lease is not None and lease_ms is not None and lease_ms > lease.lease_ms:
            # A longer one than the log knows has to outlive this node.
            await self.propose(Extend(job_id, attempt, fencing, lease_ms))
            lease = self._live_lease(job_id, attempt, fencing)
        if lease is None:
            return HeartbeatReply(StaleLease.code, f"attempt {attempt} of {format_job_id(job_id)} is not the current one; claim again")
        expires_at_ms = self.dispatcher.leases.heartbeat(lease, lease.claim_ms if lease_ms is None else lease_ms, progress)
        return HeartbeatReply("", "", expires_at_ms, lease.cancel_requested)

    def _live_lease(self, job_id: bytes, attempt: int, fencing: int) -> Lease | None:
        lease = self.dispatcher.leases.get(job_id)
        if lease is None or lease.attempt != attempt or lease.fencing != fencing or lease.ending:
            return None
        return lease

    async def complete(
        self, job_id: bytes, attempt: int, fencing: int, *, outcome: int, error: bytes, result: bytes, retry_after_ms: int
    ) -> Reply:
        return (await self.complete_many(((job_id, attempt, fencing, outcome, error, result, retry_after_ms),)))[0]

    async def complete_many(self, completions: Sequence[tuple[bytes, int, int, int, bytes, bytes, int]]) -> list[Reply]:
        draw = self.rng.getrandbits
        replies = await self.propose_many(
            [
                Complete(job_id, attempt, fencing, outcome, draw(32), error, result, retry_after_ms)
                for job_id, attempt, fencing, outcome, error, result, retry_after_ms in completions
            ]
        )
        self.metrics.stale_completions += sum(reply.refusal == StaleLease.code for reply in replies)
        return replies

    # Queues.

    async def queue_view(self, tenant: str, queue: str) -> QueueView | None:
        memory = self.dispatcher.queues.get(tenant, queue)
        return None if memory is None else self._view(memory)

    def _view(self, queue: QueueMemory) -> QueueView:
        now_ms = self.clock.wall_ms()
        oldest = self.dispatcher.oldest_ready_at_ms(queue)
        quantiles = queue.lateness_quantiles_s(now_ms)
        return QueueView(
            queue.tenant, queue.name, queue.settings, self.dispatcher.depth(queue), queue.running,
            None if oldest is None else max(now_ms - oldest, 0) / 1000,
            quantiles[0] if quantiles else None, quantiles[1] if quantiles else None,
        )  # fmt: skip

    async def list_queues(self, tenant: str, *, after: str, limit: int) -> tuple[list[QueueView], str | None]:
        names = self.queue_names(tenant, after=after)
        views = [self._view(self.dispatcher.queues.ensure(tenant, name)) for name in names[:limit]]
        return views, views[-1].name if len(names) > limit else None

    def queue_names(self, tenant: str, *, after: str) -> list[str]:
        return sorted(queue.name for queue in self.dispatcher.queues if queue.tenant == tenant and queue.name > after)

    def queue_settings(self, tenant: str, queue: str) -> QueueSettings | None:
        row = self._store.get(keys.META, keys.queue_row_key(tenant, queue))
        return None if row is None else decode_queue(row)

    async def put_queue(self, tenant: str, queue: str, settings: QueueSettings, *, actor: str) -> QueueView:
        return await self._change_queue(tenant, queue, PutQueue(tenant, queue, encode_row(settings), actor))

    async def pause_queue(self, tenant: str, queue: str, paused: bool, *, actor: str) -> QueueView:
        return await self._change_queue(tenant, queue, PauseQueue(tenant, queue, paused, actor))

    async def _change_queue(self, tenant: str, queue: str, command: AnyCommand) -> QueueView:
        if (tenant, queue) not in self._recorded_queues:
            self._record_queue(tenant, queue)
        await asyncio.shield(self.replicas.propose(keys.META_GROUP, command, urgent=True).future)
        return self._view(self.dispatcher.queues.ensure(tenant, queue))

    # Schedules.

    def preview(self, definition: Definition, *, after_ms: int, count: int) -> Preview:
        return self._schedules.preview(definition, after_ms=after_ms, count=count)

    async def put_schedule(
        self, definition: Definition, *, create: bool = False, if_version: int = 0, paused: bool | None = None, actor: str = ""
    ) -> tuple[ScheduleRecord, bool]:
        return await self._schedules.put(definition, create=create, if_version=if_version, paused=paused, actor=actor)

    async def read_schedule(self, tenant: str, name: str) -> ScheduleRecord | None:
        return self._schedules.read(tenant, name)

    async def drop_schedule(self, tenant: str, name: str, *, actor: str) -> None:
        await self._schedules.drop(tenant, name, actor=actor)

    async def pause_schedule(self, tenant: str, name: str, paused: bool, *, actor: str) -> ScheduleRecord:
        return await self._schedules.pause(tenant, name, paused, actor=actor)

    async def list_schedules(self, tenant: str, *, queue: str, after: str, limit: int) -> tuple[list[ScheduleRecord], str | None]:
        records = await self.list_schedules_of(range(self._group_count), tenant, queue=queue, after=after, limit=limit + 1)
        return records[:limit], records[limit - 1].definition.name if len(records) > limit else None

    async def list_schedules_of(self, groups: Sequence[int], tenant: str, *, queue: str, after: str, limit: int) -> list[ScheduleRecord]:
        """The same of some groups alone."""
        return await self._schedules.page(groups, tenant, queue=queue, after=after, limit=limit)

    async def start_run(
        self, tenant: str, name: str, *, run_at_ms: int, delay_ms: int, payload: bytes | None, key: str, fingerprint: bytes,
        actor: str,
    ) -> Reply:  # fmt: skip
        return await self._schedules.start_run(
            tenant, name, run_at_ms=run_at_ms, delay_ms=delay_ms, payload=payload, key=key, fingerprint=fingerprint, actor=actor
        )

    async def backfill(self, tenant: str, name: str, *, from_ms: int, to_ms: int, actor: str) -> BackfillCounts:
        return await self._schedules.backfill(tenant, name, from_ms=from_ms, to_ms=to_ms, actor=actor)

    async def list_runs(self, tenant: str, name: str, *, cursor: bytes | None, limit: int) -> RunPage | None:
        return await self._schedules.runs(tenant, name, cursor=cursor, limit=limit)

    async def forecast(self, tenant: str, *, from_ms: int, to_ms: int) -> list[MinuteForecast]:
        return by_minute(await self.forecast_of(range(self._group_count), tenant, from_ms=from_ms, to_ms=to_ms))

    async def forecast_of(self, groups: Sequence[int], tenant: str, *, from_ms: int, to_ms: int) -> list[tuple[int, str, int]]:
        """(minute, queue, jobs) of some groups alone."""
        counts = await forecast(self._store, self.dispatcher.timetable, groups, from_ms=from_ms, to_ms=to_ms)
        return [(at_ms, queue, count) for (at_ms, owner, queue), count in counts.items() if owner == tenant]

    async def reload_zones(self) -> ZonesReloaded:
        return await self._schedules.use_zones(await asyncio.to_thread(self._read_zones), forced=True)

    async def _watch_zones(self) -> None:
        """Waiting occurrences follow newer time-zone data, at the start and when the installed copy changes."""
        if not self._schedules.has_used(self.dispatcher.timetable.zones):
            await self._schedules.use_zones(self.dispatcher.timetable.zones, forced=False)
        while True:
            await asyncio.sleep(self.settings.scheduler.zone_check_interval_s)
            if await asyncio.to_thread(self.dispatcher.timetable.zones.is_current):
                continue
            try:
                fresh = await asyncio.to_thread(self._read_zones)
                await asyncio.sleep(ZONES_SETTLE_S)
                if await asyncio.to_thread(fresh.is_current):
                    await self._schedules.use_zones(fresh, forced=True)
            except (OSError, ValueError) as error:
                log.warning("zones_unreadable", error=str(error), remedy="repair the time-zone data; the one in memory stays in use")

    # After a restore.

    async def release_hold(self, *, actor: str) -> bool:
        (reply,) = await asyncio.shield(self.replicas.propose(keys.META_GROUP, ReleaseHold(actor), urgent=True).future)
        return not reply.replayed

    # The virtual clock.

    @property
    def clock_is_virtual(self) -> bool:
        return isinstance(self.clock, VirtualClock)

    async def advance_clock(self, to_ms: int) -> int:
        clock = self.clock
        if not isinstance(clock, VirtualClock):
            raise NotFound("the clock of this node is real; start it with --clock virtual to move time")
        async with self._advancing:
            await self.dispatcher.turn()
            steps = 0
            while (next_ms := self.dispatcher.next_event_ms()) is not None and next_ms <= to_ms:
                steps = 0 if next_ms > clock.wall_ms() else steps + 1
                invariant(steps < STANDSTILL_STEPS_MAX, "clock_moves", at_ms=next_ms)
                clock.advance_to(next_ms)
                await self.dispatcher.turn()
            clock.advance_to(to_ms)
            await self.dispatcher.turn()
            self._store.write({keys.RAFT_META: {self.CLOCK_KEY: clock.wall_ms().to_bytes(8, "big")}})
            await self._store.sync()
            return clock.wall_ms()

    # What operators see.

    def readiness(self) -> Readiness:
        reasons = []
        if self._draining:
            reasons.append("the node is shutting down")
        if not self._store.writable:
            reasons.append("the disk is nearly full: new jobs are refused")
        if not self.clock_is_virtual and self.clock.mono_ms() - self.dispatcher.firing.swept_at_mono_ms > STUCK_MS:
            reasons.append("the dispatcher has not looked at its timers for 5 s")
        if self.dispatcher.held:
            reasons.append(HELD)
        return Readiness(not reasons, tuple(reasons))

    def status(self) -> dict[str, Any]:
        dispatch = self.dispatcher.statistics()
        store = self._store.statistics()
        readiness = self.readiness()
        return {
            "version": __version__,
            "node": self.settings.node.id,
            "cluster": self.settings.cluster.name,
            "groups": self._group_count,
            "ready": readiness.ready,
            "reasons": list(readiness.reasons),
            "uptime_s": round(time.time() - self._started_at, 3),
            "clock": "virtual" if self.clock_is_virtual else "real",
            "loaded": self.dispatcher.is_loaded,
            "held": self.dispatcher.held,
            "queues": len(self.dispatcher.queues),
            "time_zone_data": self._schedules.zone_version,
            "timers": {"count": dispatch.timers, "bytes": dispatch.timer_bytes},
            "ready_jobs": {"count": dispatch.ready, "bytes": dispatch.ready_bytes},
            "in_flight": dispatch.in_flight,
            "waiters": dispatch.waiters,
            "dispatch_lag_ms": self.dispatcher.firing.lag_ms(),
            "loop_lag_ms": round(self._lag.lag_ms, 3),
            "audit": {"sweeps": self.dispatcher.audit.sweep_count, "repairs": dispatch.audit_repairs},
            "log": {"turns": self.replicas.turn_count, "entries": self.replicas.entry_count, "inbox": self.replicas.inbox_count},
            "store": {
                "writable": store.writable, "disk_free_bytes": store.disk_free_bytes, "disk_bytes": store.disk_bytes,
                "memory_bytes": store.memory_bytes, "syncs": store.sync_count,
            },
        }  # fmt: skip

    def _gauges(self) -> Gauges:
        store = self._store.statistics()
        now_ms = self.clock.wall_ms()
        return Gauges(
            # As many as get a label of their own: each costs some 60 us of the loop, and names are the clients' to choose.
            queues=[self._queue_gauges(queue, now_ms) for queue in islice(self.dispatcher.queues, QUEUE_LABELS_MAX)],
            in_flight=len(self.dispatcher.leases),
            timers_loaded=len(self.dispatcher.timers),
            timers_due_backlog=self.dispatcher.firing.pending_count,
            dispatch_lag_s=self.dispatcher.firing.lag_ms() / 1000,
            store_writable=store.writable,
            disk_free_bytes=store.disk_free_bytes,
            occurrences_due=len(self.dispatcher.occurrences),
            zone_version=self._schedules.zone_version,
        )

    def _queue_gauges(self, queue: QueueMemory, now_ms: int) -> QueueGauges:
        depth = {status: sum(counts) for status, counts in self.dispatcher.depth(queue).items()}
        oldest = self.dispatcher.oldest_ready_at_ms(queue)
        return QueueGauges(queue.name, depth, None if oldest is None else max(now_ms - oldest, 0) / 1000)

    def render_metrics(self) -> tuple[bytes, str]:
        return self.metrics.render()
