"""Owns the leader's memory and keeps it in step with the log: every effect of an applied command passes through `on_effects`."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from wheelsched.core.clock import Clock, Rng
from wheelsched.core.errors import Unavailable
from wheelsched.core.ids import PARTITION_COUNT, group_of, group_of_low, id_low, schedule_partition
from wheelsched.core.settings import SchedulerSettings
from wheelsched.cron import ZoneData
from wheelsched.dispatch.audit import Audit
from wheelsched.dispatch.batches import sort_created
from wheelsched.dispatch.caps import Caps
from wheelsched.dispatch.claims import Claims
from wheelsched.dispatch.firing import Firing
from wheelsched.dispatch.leases import Leases
from wheelsched.dispatch.loader import Loader
from wheelsched.dispatch.occurrences import Occurrences
from wheelsched.dispatch.purging import Purging
from wheelsched.dispatch.queues import RECORD_BYTES, QueueMemory, Queues
from wheelsched.dispatch.timers import Special, Timers, pack
from wheelsched.dispatch.timetable import Timetable
from wheelsched.fairness import ReadyQueue, split_by_queue
from wheelsched.model import keys
from wheelsched.model.commands import AnyCommand
from wheelsched.model.effects import (
    Effect,
    Fired,
    HoldReleased,
    JobChanged,
    JobsCreated,
    JobsMoved,
    OccurrencesSkipped,
    QueueChanged,
    ScheduleChanged,
)
from wheelsched.model.rows import JobState, decode_counts, decode_queue, decode_state
from wheelsched.model.states import Lane, Outcome, Status, due_at_ms, status_of
from wheelsched.replica import ReplicaSet
from wheelsched.runtime.clock import VirtualClock
from wheelsched.runtime.metrics import Metrics
from wheelsched.store import Store
from wheelsched.store.heads import RangeHeads

Ready = tuple[list[tuple[JobState, QueueMemory]], list[tuple[JobState, QueueMemory]]]  # by lane

# Looked up once, for every command passes here: an enum member costs 0.1 us a time.
_CANCEL_REQUESTED, _DEAD, _DISCARDED = int(Status.CANCEL_REQUESTED), int(Status.DEAD), int(Status.DISCARDED)
_LEASED = (int(Status.RUNNING), int(Status.CANCEL_REQUESTED))
_QUEUED = Status.QUEUED
_LEASE_EXPIRED, _SUCCEEDED = int(Outcome.LEASE_EXPIRED), int(Outcome.SUCCEEDED)

# A refill reads this many index rows and their states: about 4 ms.
REFILL_ROWS = 512
STALE_HEADS_MAX = 100
REFILL_INTERVAL_S = 0.02


@dataclass(frozen=True, slots=True)
class DispatchStatistics:
    timers: int
    timer_bytes: int
    ready: int
    ready_bytes: int
    due_backlog: int
    in_flight: int
    waiters: int
    audit_repairs: int


class Dispatcher:
    """Timers, ready queues, claims and leases of all groups this node leads."""

    def __init__(
        self, store: Store, heads: RangeHeads, replicas: ReplicaSet, clock: Clock, rng: Rng, settings: SchedulerSettings,
        metrics: Metrics, zones: ZoneData, *, group_count: int,
    ) -> None:  # fmt: skip
        self._store = store
        self._heads = heads
        self._replicas = replicas
        self._clock = clock
        self._metrics = metrics
        self._group_count = group_count
        # A cluster that was restored held: nothing fires, is claimed, runs out or is purged until it is released; all else goes on.
        self.held = False
        self.led: list[int] = []  # groups, ascending; the parts look at this very list
        self.queues = Queues(clock, settings.ready_queue_max)
        self.timers = Timers(group_count, clock.wall_ms())
        self.leases = Leases(clock, rng, self._propose)
        self.caps = Caps(self._read_limit)
        self.claims = Claims(store, replicas, group_count, self.caps, self._on_started)
        self.loader = Loader(
            store, heads, clock, self.timers, self.queues, self.leases, self.caps, led=self.led,
            horizon_ms=int(settings.horizon_s * 1000), watermark_ms=replicas.watermark_ms, on_ready=self._ready,
            on_timers=lambda: self.firing.waking.wake(),
        )  # fmt: skip
        self.timetable = Timetable(store, zones, group_count=group_count)
        self.occurrences = Occurrences(
            store, replicas, clock, self.timers, self.timetable, group_of_schedule=self.group_of_schedule,
            by_itself=not isinstance(clock, VirtualClock),
        )  # fmt: skip
        self.firing = Firing(
            clock, self.timers, replicas, on_ready=self._on_fired, on_step_back=self._reload, on_named=self._hold_again,
            occurrences=self.occurrences,
        )  # fmt: skip
        self.audit = Audit(self, store, heads, replicas, clock, interval_s=settings.audit_interval_s)
        self.purging = Purging(self.queues, store, replicas, clock, led=self.led, interval_s=settings.purge_interval_s)
        self._lane_prefixes = [[keys.job_range(group, lane, 0)[:3] for group in range(group_count)] for lane in Lane]

    # Start, stop, start again.

    async def start(self, groups: Sequence[int]) -> None:
        """Make the memory of these groups from the rows, precise lane first; claims open when that one is read. The flexible lane
        follows in `run`, as do groups that this node comes to lead later."""
        self.read_settings()
        for group in groups:
            self.lead(group)
        await self.loader.rebuild_lane(Lane.PRECISE)
        await self.loader.load_ahead()
        if not self.held:
            self.claims.open()

    def lead(self, group: int) -> None:
        """This node acts for the group from now on; its memory is made by the loader, precise lane first."""
        assert group not in self.led
        insort(self.led, group)
        self._heads.forget(keys.group_prefix(group))  # whoever led it before wrote rows that nothing here was told of
        self._count_rows(group, 1)
        self.occurrences.begin(group)
        self.loader.start(group)

    def unlead(self, group: int) -> None:
        """Another node acts for the group: everything about it is forgotten, in this very turn."""
        self.led.remove(group)
        self.loader.end(group)
        self.firing.forget_group(group)
        self.timers.clear_group(group)
        self.occurrences.end(group)
        self.leases.end_group(lambda job_id: group_of(job_id, self._group_count) == group)
        self.caps.end_group(lambda tenant, name: self.group_of_schedule(tenant, name) == group)
        width = PARTITION_COUNT // self._group_count
        for queue in self.queues:
            queue.forget_group(group, (group * width, (group + 1) * width - 1))
        self._count_rows(group, -1)

    def _count_rows(self, group: int, sign: int) -> None:
        """Add the group's jobs to the counts of their queues, or take them away."""
        start, end = keys.group_prefix(group), keys.prefix_end(keys.group_prefix(group))
        while rows := self._store.scan(keys.COUNTS, start, end, 1_000):
            for key, row in rows:
                cells = self.queues.ensure(*keys.parse_counts_key(key)).cells
                for place, count in enumerate(decode_counts(row).cells):
                    cells[place] += sign * count
            start = rows[-1][0] + b"\0"

    def read_settings(self) -> None:
        """Settings of all queues, and whether the cluster is held, from the meta group's rows."""
        self._look_whether_held()
        prefix = keys.group_prefix(keys.META_GROUP) + b"q"
        start, end = prefix, keys.prefix_end(prefix)
        while rows := self._store.scan(keys.META, start, end, 1_000):
            for key, row in rows:
                tenant, name = key[3:].split(b"\0")
                self.queues.ensure(tenant.decode(), name.decode()).set_settings(decode_queue(row))
            start = rows[-1][0] + b"\0"

    def _look_whether_held(self) -> None:
        was_held, self.held = self.held, self._store.get(keys.META, keys.HOLD_KEY) is not None
        if was_held == self.held:
            return
        self._replicas.fires_along = not self.held
        for part in (self.firing, self.occurrences, self.leases, self.purging):
            part.is_held = self.held
        if self.held:
            self.claims.close()
            return
        # As though this node came to lead them now: leases begin anew, and what schedules had due meanwhile was missed.
        for group in list(self.led):
            self.unlead(group)
            self.lead(group)
        self.claims.open()
        self.firing.waking.wake()

    async def run(self) -> None:
        """All loops of the dispatcher, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.firing.run(), name="firing")
            tasks.create_task(self.occurrences.run(), name="occurrences")
            tasks.create_task(self.leases.run(), name="leases")
            tasks.create_task(self.loader.run(), name="loader")
            tasks.create_task(self._refill(), name="refill")
            tasks.create_task(self.audit.run(), name="audit")
            tasks.create_task(self.purging.run(), name="purging")

    @property
    def is_loaded(self) -> bool:
        """Both lanes of every led group have been rebuilt: what is due and what is in memory agree."""
        return not self.loader.is_behind

    async def _reload(self) -> None:
        """The wall clock was set back: drop the wheels and load them anew at the new time. Leases are monotonic and stay."""
        self.firing.forget()
        self.occurrences.step_back(self._clock.wall_ms())
        self.timers.clear(self._clock.wall_ms())
        self.leases.clear_starts()
        self.caps.forget_parked()
        for queue in self.queues:
            queue.clear_ready()
        for group in self.led:
            self.loader.start(group)
        for lane in (Lane.PRECISE, Lane.FLEXIBLE):
            await self.loader.rebuild_lane(lane)
        await self.loader.load_ahead()

    # Effects.

    def on_effects(self, group: int, effects: Sequence[Effect]) -> None:
        """Bring memory in step with one applied entry. Synchronous, so that nobody sees half of it."""
        ready: Ready = ([], [])
        packed: tuple[list[bytes], list[bytes]] = ([], [])  # those of many, by lane
        touched: dict[QueueMemory, None] = {}
        for effect in effects:
            match effect:
                case JobChanged():
                    self._job_changed(group, effect, ready, touched)
                case JobsCreated():
                    self._jobs_created(group, effect.states, ready, packed)
                case JobsMoved():
                    self._jobs_moved(group, effect, ready, touched)
                case Fired():
                    self.firing.on_watermark(group, effect.watermark_ms)
                case QueueChanged():
                    self._queue_changed(effect.tenant, effect.queue)
                case OccurrencesSkipped():
                    self._metrics.occurrences_skipped[effect.reason] += effect.count
                case HoldReleased():
                    self._look_whether_held()
                case ScheduleChanged():
                    for queue in self.caps.on_definition(effect.tenant, effect.name):
                        touched[queue] = None
        for lane in (Lane.PRECISE, Lane.FLEXIBLE):
            if ready[lane] or packed[lane]:
                self._ready(group, lane, pack(ready[lane]) + b"".join(packed[lane]))
        for queue in touched:
            self.claims.serve(queue)

    def _job_changed(self, group: int, change: JobChanged, ready: Ready, touched: dict[QueueMemory, None]) -> None:
        before, after = change.before, change.after
        if change.cause == "adopt":
            return  # the lease goes on as it is
        state = after or before
        assert state is not None
        queue = self.queues.ensure(state.tenant, state.queue)
        watermark_ms = self._replicas.watermark_ms(group)
        if before is not None:
            if before.status != _DISCARDED:
                queue.cells[before.status * 3 + before.priority] -= 1
            if before.status <= _CANCEL_REQUESTED:
                self._leave(group, change.cause, before, after, queue, watermark_ms, touched)
            if before.status in _LEASED and (after is None or after.status not in _LEASED):
                touched[queue] = None  # there is room under the queue's concurrency
        if after is not None:
            if after.status != _DISCARDED:
                queue.cells[after.status * 3 + after.priority] += 1
            if after.status <= _CANCEL_REQUESTED:
                self._enter(group, before, after, queue, watermark_ms, ready)
        self._count(change, queue)

    def _jobs_created(self, group: int, states: list[JobState], ready: Ready, packed: tuple[list[bytes], list[bytes]]) -> None:
        """As `_job_changed` for each of them, with what they share done once."""
        watermark_ms = self._replicas.watermark_ms(group)
        if self.loader.is_reading:
            for state in states:
                queue = self.queues.ensure(state.tenant, state.queue)
                queue.cells[state.priority] += 1
                self._enter(group, None, state, queue, watermark_ms, ready)
            self._metrics.jobs_created += len(states)
            return
        precise_ms, flexible_ms = (marks[group] for marks in self.timers.loaded_ms)
        tallies, due, timers, first_ms, odd = sort_created(states, watermark_ms, precise_ms, flexible_ms, self._number_of)
        for tenant, name, priority, count, at_ms in tallies:
            queue = self.queues.ensure(tenant, name)
            queue.cells[priority] += count  # SCHEDULED is status 0
            prefix = queue.index_prefix(group)
            if self._heads.lower_bound(keys.INDEX, prefix) is not prefix:
                self._heads.note_put(keys.INDEX, prefix, prefix + keys.time_prefix(at_ms))
        for lane in (Lane.PRECISE, Lane.FLEXIBLE):
            if first_ms[lane] < 0:
                continue
            prefix = self._lane_prefixes[lane][group]
            if self._heads.lower_bound(keys.JOBS, prefix) is not prefix:
                self._heads.note_put(keys.JOBS, prefix, keys.job_range(group, lane, first_ms[lane]))
            if due[lane]:
                packed[lane].append(due[lane])
            if timers[lane]:
                self.timers.add_records(group, lane, timers[lane])
                self.firing.wake(first_ms[lane])
        for state in odd:
            self._enter(group, None, state, self.queues.ensure(state.tenant, state.queue), watermark_ms, ready)
        self._metrics.jobs_created += len(states)

    def _jobs_moved(self, group: int, change: JobsMoved, ready: Ready, touched: dict[QueueMemory, None]) -> None:
        """As `_job_changed` for each of them, with what they share done once."""
        if self.loader.is_reading:
            for before, after in zip(change.befores, change.afters, strict=True):
                self._job_changed(group, JobChanged(change.cause, before, after), ready, touched)
            return
        is_claim = change.cause == "claim"
        for tenant, name, before_status, after_status, priority, lane, count in change.tallies:
            queue = self.queues.ensure(tenant, name)
            queue.cells[before_status * 3 + priority] -= count
            queue.cells[after_status * 3 + priority] += count
            if is_claim:
                queue.leave_queued(group, priority, count)
            else:
                touched[queue] = None  # there is room under the queue's concurrency
                self._heads.note_deleted(keys.JOBS, self._lane_prefixes[lane][group], count)
                self._heads.note_deleted(keys.INDEX, queue.index_prefix(group), count)
                self._metrics.jobs_finished.add(name, after_status, count)
        if is_claim:
            self.leases.grant_many(change.afters)
            return
        self.leases.end_many(change.befores)
        self._metrics.attempts[_SUCCEEDED] += len(change.afters)
        durations: dict[int, int] = {}
        for before, after in zip(change.befores, change.afters, strict=True):
            ran_ms = after.updated_at_ms - before.started_at_ms
            durations[ran_ms] = durations.get(ran_ms, 0) + 1
        for ran_ms, count in durations.items():
            self._metrics.run_duration.observe_many(max(ran_ms, 0) / 1000, count)

    def _number_of(self, tenant: str, name: str) -> int:
        return self.queues.ensure(tenant, name).number

    def _leave(
        self, group: int, cause: str, before: JobState, after: JobState | None, queue: QueueMemory, watermark_ms: int,
        touched: dict[QueueMemory, None],
    ) -> None:  # fmt: skip
        """Take an unfinished job out of where its former state had put it."""
        if before.status in _LEASED:
            if after is None or after.status not in _LEASED:
                self.leases.end(before.job_id)
                if before.run is not None:
                    touched.update(dict.fromkeys(self.caps.on_lease_end(before)))
        else:
            if before.start_deadline_ms >= 0:
                self.leases.unwatch_start(before.job_id)
            if cause != "fire" and not self.loader.will_read(group, before):  # named by a Fire: its timer is out of the wheel
                self._leave_waiting(group, before, queue, watermark_ms)
        if after is None or after.status > _CANCEL_REQUESTED or before.fire_at_ms != after.fire_at_ms or before.lane != after.lane:
            # Job and index rows went, to `done` or to another time: the ranges' heads move on with them.
            self._heads.note_deleted(keys.JOBS, self._lane_prefixes[before.lane][group])
            self._heads.note_deleted(keys.INDEX, queue.index_prefix(group))

    def _leave_waiting(self, group: int, before: JobState, queue: QueueMemory, watermark_ms: int) -> None:
        if status_of(before, watermark_ms) is _QUEUED:
            queue.leave_queued(group, before.priority)
        else:
            self.timers.cancel(group, before)
            self.firing.withdraw(group, before.lane, before.fire_at_ms, id_low(before.job_id), before.version)

    def _enter(self, group: int, before: JobState | None, after: JobState, queue: QueueMemory, watermark_ms: int, ready: Ready) -> None:
        """Put an unfinished job where its new state belongs."""
        if after.status in _LEASED:
            self.leases.grant(after)
            if after.run is not None and (before is None or before.status not in _LEASED):
                self.caps.on_lease(after)
            return
        if before is None or before.status == _DEAD or before.fire_at_ms != after.fire_at_ms or before.lane != after.lane:
            self._note_new_rows(group, after, queue)
        if self.loader.will_read(group, after):
            return
        if status_of(after, watermark_ms) is _QUEUED:
            ready[after.lane].append((after, queue))
        else:
            self.timers.add(group, after, queue)
            self.firing.wake(due_at_ms(after))
        if after.held and after.run is not None:
            return  # a start deadline counts from the firing
        if after.start_deadline_ms >= 0 and after.attempt == 0 and after.fire_at_ms < self.timers.loaded_ms[after.lane][group]:
            self.leases.watch_start(after.job_id, after.fire_at_ms + after.start_deadline_ms)

    def _note_new_rows(self, group: int, after: JobState, queue: QueueMemory) -> None:
        """Job and index rows came: a head beyond them moves back."""
        prefix = self._lane_prefixes[after.lane][group]
        if self._heads.lower_bound(keys.JOBS, prefix) is not prefix:
            self._heads.note_put(keys.JOBS, prefix, keys.job_key(group, after.lane, after.fire_at_ms, after.job_id))
        prefix = queue.index_prefix(group)
        if self._heads.lower_bound(keys.INDEX, prefix) is not prefix:
            self._heads.note_put(keys.INDEX, prefix, prefix + keys.time_id(after.fire_at_ms, after.job_id))

    def _queue_changed(self, tenant: str, name: str) -> None:
        row = self._store.get(keys.META, keys.queue_row_key(tenant, name))
        queue = self.queues.ensure(tenant, name)
        if row is not None:
            queue.set_settings(decode_queue(row))
        self.claims.on_settings(queue)

    def _ready(self, group: int, lane: int, records: bytes) -> None:
        """QUEUED jobs of a group, packed: into their ready queues, and to whoever waits for them."""
        for place, batch in split_by_queue(records):
            queue = self.queues.by_number(place >> 2)
            queue.make_ready(group, lane, place & 3, batch)
            self.claims.serve(queue)

    def _on_fired(self, group: int, lane: int, records: bytes) -> None:
        self._metrics.jobs_fired += len(records) // RECORD_BYTES
        self._ready(group, lane, records)

    def _hold_again(self, group: int, named: Sequence[Special]) -> None:
        rows = self._store.multiget(keys.STATE, [keys.state_key(group, special.job_id) for special in named])
        for special, row in zip(named, rows, strict=True):
            state = None if row is None else decode_state(row)
            if state is not None and state.held and state.version == special.version:
                self.timers.add(group, state, special.queue)

    def _propose(self, job_id: bytes, command: AnyCommand) -> None:
        """What a lease or a deadline brings. Of a group that is led no more, be it since this very call, it is the next leader's."""
        with suppress(Unavailable):
            self._replicas.propose_many(((group_of(job_id, self._group_count), command),), own=True)

    def group_of_schedule(self, tenant: str, name: str) -> int:
        return schedule_partition(tenant, name) * self._group_count // PARTITION_COUNT

    def _read_limit(self, tenant: str, schedule: str) -> int:
        found = self.timetable.read(self.group_of_schedule(tenant, schedule), tenant, schedule)
        return -1 if found is None else found[0].max_concurrency

    def repair(self, group: int, state: JobState) -> None:
        """Put a job that memory had lost back where its state belongs."""
        self._metrics.audit_repairs += 1
        ready: Ready = ([], [])
        queue = self.queues.ensure(state.tenant, state.queue)
        self._enter(group, state, state, queue, self._replicas.watermark_ms(group), ready)
        self._ready(group, state.lane, pack(ready[state.lane]))

    # Spilled ready queues.

    async def _refill(self) -> None:
        """Read spilled jobs again before their ready queue runs dry, a slice a turn."""
        while True:
            if not await self._refill_once():
                await asyncio.sleep(REFILL_INTERVAL_S)

    async def _refill_once(self) -> bool:
        """A slice for each ready queue that runs low; False where none does."""
        busy = False
        for queue in self.queues.spilled():
            for lane, priority, ready in list(queue.spilled()):
                self._refill_slice(queue, lane, priority, ready)
                busy = True
                await asyncio.sleep(0)
        return busy

    def _refill_slice(self, queue: QueueMemory, lane: int, priority: int, ready: ReadyQueue) -> None:
        mark = ready.spilled_from
        if mark is None:
            return  # read by the other caller meanwhile
        records, reached = self.loader.refill(queue, lane, priority, mark, REFILL_ROWS)
        queue.note_refill(lane, priority, reached, records)
        self.claims.serve(queue)

    # What is counted and seen.

    def _on_started(self, queue: QueueMemory, states: list[JobState]) -> None:
        """Attempts were handed out: the first one says how late a job is."""
        observe, note = self._metrics.lateness.observe, queue.note_lateness
        for state in states:
            if state.attempt == 1:
                started_at_ms = state.started_at_ms
                late_ms = max(started_at_ms - state.fire_at_ms, 0)
                observe(state.lane, late_ms / 1000)
                note(started_at_ms, late_ms)

    def _count(self, change: JobChanged, queue: QueueMemory) -> None:
        before, after = change.before, change.after
        if before is None:
            self._metrics.jobs_created += 1
        if after is None or before is None:
            return
        if before.status in _LEASED and after.status not in _LEASED:
            outcome = after.outcome
            self._metrics.attempts[outcome] += 1
            self._metrics.run_duration.observe(max(after.updated_at_ms - before.started_at_ms, 0) / 1000)
            if outcome == _LEASE_EXPIRED:
                self._metrics.lease_expired += 1
        if before.status <= _CANCEL_REQUESTED < after.status:
            self._metrics.jobs_finished.add(queue.name, after.status)

    def statistics(self) -> DispatchStatistics:
        ready = [ready for queue in self.queues for _, _, ready in queue.ready_queues()]
        return DispatchStatistics(
            timers=len(self.timers), timer_bytes=self.timers.reserved_bytes, ready=sum(map(len, ready)),
            ready_bytes=sum(queue.reserved_bytes for queue in ready), due_backlog=self.firing.pending_count,
            in_flight=len(self.leases), waiters=self.claims.waiter_count, audit_repairs=self._metrics.audit_repairs,
        )  # fmt: skip

    def oldest_ready_at_ms(self, queue: QueueMemory) -> int | None:
        """`fire_at` of the oldest QUEUED job in memory. Records that jobs left behind, in front of it, are dropped on the way."""
        if not any(queue.queued):
            return None
        heads = []
        for lane, priority, ready in queue.ready_queues():
            for _ in range(STALE_HEADS_MAX):
                head = ready.head()
                if head is None:
                    break
                # Only where more records are at hand than jobs can some be stale.
                if len(ready) <= queue.queued[priority] or self._is_ready(lane, head):
                    heads.append(head[0])
                    break
                ready.take(1)
        return min(heads, default=None)

    def _is_ready(self, lane: int, head: tuple[int, int]) -> bool:
        """Whether a job with this fire_at and random half is QUEUED."""
        fire_at_ms, low = head
        group = group_of_low(low, self._group_count)
        seek = keys.job_seek(group, lane, fire_at_ms, low)
        row = self._store.cursor(keys.JOBS).seek(seek)
        if row is None or not row[0].startswith(seek):
            return False
        state_row = self._store.get(keys.STATE, keys.state_key(group, keys.parse_job_key(row[0])[3]))
        return state_row is not None and status_of(decode_state(state_row), self._replicas.watermark_ms(group)) is _QUEUED

    def depth(self, queue: QueueMemory) -> dict[Status, tuple[int, int, int]]:
        """Jobs by seen status and priority. QUEUED is what the ready queues hold, the rest of the waiting ones is SCHEDULED."""
        cells = queue.cells
        rows = {status: [cells[status * 3 + priority] for priority in range(3)] for status in Status if status < Status.DISCARDED}
        for priority in range(3):
            waiting = rows[Status.SCHEDULED][priority] + rows[Status.RETRYING][priority]
            retrying = queue.retrying[priority]
            # Between a Fire and its sweep, and while a lane is read anew, fewer are counted than have become due.
            queued = min(max(queue.queued[priority], 0), waiting - retrying)
            rows[Status.QUEUED][priority] = queued
            rows[Status.RETRYING][priority] = retrying
            rows[Status.SCHEDULED][priority] = waiting - retrying - queued
        return {status: (row[0], row[1], row[2]) for status, row in rows.items()}

    # The virtual clock.

    def next_event_ms(self) -> int | None:
        """When anything here happens next, as wall time; None where nothing is known to."""
        if self.held:
            return None
        nexts = (self.timers.next_deadline_ms(), self.leases.next_wall_ms(), self.loader.next_row_ms())
        return min((at_ms for at_ms in nexts if at_ms is not None), default=None)

    async def turn(self) -> None:
        """Everything due at this very instant, applied."""
        await self.loader.load_ahead()
        while await self.firing.turn() or await self.occurrences.turn():
            pass
        self.leases.turn()
        await self.purging.turn()
        await self._replicas.wait_idle()
        while await self._refill_once():
            pass
