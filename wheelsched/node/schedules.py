"""Schedules of one node: definitions in, occurrences computed beside them, runs and records out."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Final

import structlog
from msgspec.structs import replace

from wheelsched.core import limits
from wheelsched.core.clock import Clock, Rng
from wheelsched.core.errors import BY_CODE, InvalidRequest, NotFound, Unavailable, WheelschedError
from wheelsched.core.ids import group_of, keyed_run_id, new_run_id, new_schedule_id
from wheelsched.cron import Timing, ZoneData
from wheelsched.dispatch import Dispatcher
from wheelsched.engine.schedules import OCCURRENCE_DUE, OUTDATED
from wheelsched.model import keys
from wheelsched.model.commands import (
    AnyCommand,
    Backfill,
    Cancel,
    DropSchedule,
    PauseSchedule,
    PutSchedule,
    Reply,
    Rezone,
    RunNow,
    StartRun,
    Update,
)
from wheelsched.model.rows import (
    JobState,
    decode_course,
    decode_definition,
    decode_skip,
    decode_state,
    encode_row,
)
from wheelsched.model.schedules import Course, Definition, NextRun, SkipRow, Successor, same_timing
from wheelsched.node.face import BackfillCounts, JobRecord, Preview, RunPage, ScheduleRecord, ZonesReloaded
from wheelsched.node.forecast import MINUTE_MS, due_in_minute
from wheelsched.store import Store

# The year 9998 ends here: a zone's clock may be a day ahead, and after 9999 there is no way to write an instant (RFC 3339).
SHOWN_MS_MAX: Final = 253_370_764_799_999
# Fewer jobs in a minute than this are no crowd; rows looked at to tell.
CROWD_MIN: Final = 10_000
CROWD_LOOK_MIN: Final = 2_000
# Thousands of schedules are made for the same minute: it is looked at once in a while.
CROWD_KEPT_MS: Final = 10_000
CROWDS_MAX: Final = 10_000
# A command whose schedule changed under it is computed again; each time somebody else got on.
TRIES_MAX: Final = 50
# One backfill call: an hour of a schedule that runs every second is 3,600.
BACKFILL_MAX: Final = 100_000
_BACKFILL_SLICE: Final = 50
_SCAN: Final = 200
# raft_meta, of this node alone: the time-zone data by which all waiting occurrences stand.
ZONES_KEY: Final = b"Z"

log = structlog.get_logger()

Propose = Callable[[int, AnyCommand], Awaitable[Reply]]


class Schedules:
    """What `node.Node` does for schedules; see `face.NodeFace` for what the methods promise."""

    def __init__(
        self, store: Store, dispatcher: Dispatcher, clock: Clock, rng: Rng, propose: Propose, *, group_count: int,
        record_queue: Callable[[str, str], None], complete: Callable[[JobState], JobRecord | None],
    ) -> None:  # fmt: skip
        """`propose(group, command)` returns when the command is applied; `complete` makes the whole job of a state row."""
        self._store = store
        self._dispatcher = dispatcher
        self._timetable = dispatcher.timetable
        self._clock = clock
        self._rng = rng
        self._propose = propose
        self._group_count = group_count
        self._record_queue = record_queue
        self._complete = complete
        self._reloading = asyncio.Lock()
        self._crowd_look = max(CROWD_LOOK_MIN, CROWD_MIN // group_count)
        self._crowds: dict[tuple[int, int], tuple[int, int]] = {}  # (group, minute) -> (looked at, mono ms; jobs due)

    # Definitions.

    def preview(self, definition: Definition, *, after_ms: int, count: int) -> Preview:
        zone = self._timetable.zone(definition)
        # What cannot be written is not shown.
        runs = [at_ms for at_ms in self._timetable.timing(definition).upcoming(after_ms, count) if at_ms <= SHOWN_MS_MAX]
        advice = self._timetable.advice(definition, self._clock.wall_ms())
        if runs:
            advice += self._crowd(definition, runs[0])
        local = () if zone is None else tuple(zone.local_text(at_ms) for at_ms in runs)
        return Preview(tuple(runs), local, advice)

    def _crowd(self, definition: Definition, at_ms: int) -> tuple[str, ...]:
        """A warning where the next run joins many others; estimated from one group, which holds a fair sample of all."""
        at_ms += definition.offset_ms
        group = self._group(definition.tenant, definition.name)
        place = (group, at_ms // MINUTE_MS)
        looked_ms, count = self._crowds.get(place, (-CROWD_KEPT_MS, 0))
        if self._clock.mono_ms() - looked_ms >= CROWD_KEPT_MS:
            count = due_in_minute(self._store, group, at_ms, most=self._crowd_look)
            if len(self._crowds) >= CROWDS_MAX:
                self._crowds.clear()
            self._crowds[place] = (self._clock.mono_ms(), count)
        if count * self._group_count < CROWD_MIN:
            return ()
        more = "more than " if count >= self._crowd_look else "about "
        return (f"{more}{count * self._group_count:,} jobs are due in the minute of its next run; jitter_s or another minute spreads them",)

    async def put(
        self, definition: Definition, *, create: bool, if_version: int, paused: bool | None, actor: str
    ) -> tuple[ScheduleRecord, bool]:
        tenant, name = definition.tenant, definition.name
        self._record_queue(tenant, definition.queue)
        definition = replace(definition, schedule_id=new_schedule_id(tenant, name, self._rng))
        group = self._group(tenant, name)

        def command() -> PutSchedule:
            following = self._first_run(group, definition)
            flag = -1 if paused is None else int(paused)
            return PutSchedule(encode_row(definition), following, create, if_version, flag, actor)

        reply = await self._settle(tenant, name, command)
        return self._required(tenant, name), reply.count == 1

    def _first_run(self, group: int, definition: Definition) -> NextRun:
        """The occurrence that a definition begins with, or goes on with where it replaces one."""
        found = self._timetable.read(group, definition.tenant, definition.name)
        now_ms = self._clock.wall_ms()
        if found is None:
            return self._timetable.next_run(definition, now_ms, check=False)
        existing, course = found
        after_ms = now_ms
        if same_timing(existing, definition):
            # What was run or cancelled ahead of its time stays so, whatever else changes.
            after_ms = max(now_ms, course.decided_ms)
        definition = replace(definition, schedule_id=existing.schedule_id)
        return self._timetable.next_run(definition, after_ms, besides=course.next_job)

    def read(self, tenant: str, name: str) -> ScheduleRecord | None:
        found = self._timetable.read(self._group(tenant, name), tenant, name)
        return None if found is None else self._record(*found)

    def _required(self, tenant: str, name: str) -> ScheduleRecord:
        record = self.read(tenant, name)
        if record is None:
            raise _no_schedule(name)
        return record

    def _record(self, definition: Definition, course: Course) -> ScheduleRecord:
        last_run = None
        if course.last_job:
            row = self._store.get(keys.STATE, keys.state_key(group_of(course.last_job, self._group_count), course.last_job))
            last_run = None if row is None else self._complete(decode_state(row))
        preview = self.preview(definition, after_ms=self._clock.wall_ms(), count=limits.NEXT_RUNS)
        if definition.paused:
            preview = Preview((), (), preview.warnings)
        elif course.next_at_ms != -1 and (not preview.next_runs or course.next_at_ms != preview.next_runs[0]):
            preview = self._from_next(definition, course, preview)
        return ScheduleRecord(definition, course, preview, last_run)

    def _from_next(self, definition: Definition, course: Course, preview: Preview) -> Preview:
        """The next runs begin with the occurrence that waits: one before it was taken away, or it is due this very moment."""
        rest = self.preview(definition, after_ms=course.next_at_ms, count=limits.NEXT_RUNS - 1)
        zone = self._timetable.zone(definition)
        local = () if zone is None else (zone.local_text(course.next_at_ms), *rest.local)
        return Preview((course.next_at_ms, *rest.next_runs), local, preview.warnings)

    async def drop(self, tenant: str, name: str, *, actor: str) -> None:
        await self._settle(tenant, name, lambda: DropSchedule(tenant, name, actor))

    async def pause(self, tenant: str, name: str, paused: bool, *, actor: str) -> ScheduleRecord:
        group = self._group(tenant, name)

        def command() -> PauseSchedule:
            found = self._timetable.read(group, tenant, name)
            if paused or found is None or not found[0].paused:
                return PauseSchedule(tenant, name, paused, actor=actor)
            definition, course = found
            now_ms = self._clock.wall_ms()
            # On from now, or from where a clock since set back, or a run ahead of its time, had brought it; a backfill may have made
            # jobs of what comes.
            following = self._timetable.next_run(definition, max(now_ms, course.decided_ms))
            timing = self._timetable.timing(definition)
            from_ms = course.decided_ms + 1
            count = timing.count(from_ms, now_ms + 1) if from_ms <= now_ms else 0
            left_out = (timing.next_after(from_ms - 1), timing.last_before(now_ms + 1), count) if count else None
            return PauseSchedule(tenant, name, False, definition.version, following, left_out, actor)

        await self._settle(tenant, name, command)
        return self._required(tenant, name)

    async def page(self, groups: Sequence[int], tenant: str, *, queue: str, after: str, limit: int) -> list[ScheduleRecord]:
        """At most `limit` by name, of these groups."""
        sources = [self._definitions(group, tenant, after) for group in groups]
        records: list[ScheduleRecord] = []
        for looked_at, definition in enumerate(heapq.merge(*sources, key=lambda definition: definition.name)):
            if looked_at % 100 == 99:
                await asyncio.sleep(0)
            if queue and definition.queue != queue:
                continue
            if len(records) == limit:
                break
            row = self._store.get(keys.SCHEDULES, keys.course_key(self._group(tenant, definition.name), tenant, definition.name))
            if row is not None:
                records.append(self._record(definition, decode_course(row)))
        return records

    def _definitions(self, group: int, tenant: str, after: str) -> Iterator[Definition]:
        prefix = keys.definitions_prefix(group, tenant)
        start = keys.definition_key(group, tenant, after) + b"\0" if after else prefix
        while rows := self._store.scan(keys.SCHEDULES, start, keys.prefix_end(prefix), _SCAN):
            for _, row in rows:
                yield decode_definition(row)
            if len(rows) < _SCAN:
                return
            start = rows[-1][0] + b"\0"

    # Runs.

    async def start_run(
        self, tenant: str, name: str, *, run_at_ms: int, delay_ms: int, payload: bytes | None, key: str, fingerprint: bytes,
        actor: str,
    ) -> Reply:  # fmt: skip
        job_id = keyed_run_id(tenant, name, key) if key else new_run_id(tenant, name, self._clock.wall_ms(), self._rng)
        command = StartRun(job_id, tenant, name, run_at_ms, delay_ms, payload, fingerprint if key else b"", actor)
        return await self._propose(self._group(tenant, name), command)

    async def backfill(self, tenant: str, name: str, *, from_ms: int, to_ms: int, actor: str) -> BackfillCounts:
        group = self._group(tenant, name)
        totals = [0, 0, 0]
        done_ms = from_ms - 1
        tries = 0
        while True:
            found = self._timetable.read(group, tenant, name)
            if found is None:
                raise _no_schedule(name)
            definition, _ = found
            timing = self._timetable.timing(definition)
            until_ms = min(to_ms, self._clock.wall_ms() + 1)
            if done_ms < from_ms and (count := timing.count(from_ms, until_ms)) > BACKFILL_MAX:
                detail = f"the range holds {count} occurrences, above {BACKFILL_MAX}; backfill it in parts"
                raise InvalidRequest(detail, errors=({"pointer": "/to", "detail": detail},))
            instants = self._slice(timing, from_ms, done_ms, until_ms)
            if not instants:
                return BackfillCounts(*totals)
            reply = await self._propose(group, Backfill(tenant, name, definition.version, instants, actor))
            if reply.refusal == OUTDATED and tries < TRIES_MAX:
                tries += 1
                continue
            if reply.refusal:
                raise _error(reply)
            totals = [total + part for total, part in zip(totals, reply.counts, strict=True)]
            done_ms = instants[-1][0]

    @staticmethod
    def _slice(timing: Timing, from_ms: int, done_ms: int, until_ms: int) -> list[tuple[int, int, str]]:
        """The next instants with the intervals they cover, each from the occurrence before."""
        runs = [at_ms for at_ms in timing.upcoming(done_ms, _BACKFILL_SLICE) if at_ms < until_ms]
        if not runs:
            return []
        before_ms = timing.last_before(runs[0])
        return [(at_ms, start_ms, timing.nominal(at_ms)) for at_ms, start_ms in zip(runs, [before_ms, *runs], strict=False)]

    async def runs(self, tenant: str, name: str, *, cursor: bytes | None, limit: int) -> RunPage | None:
        group = self._group(tenant, name)
        found = self._timetable.read(group, tenant, name)
        if found is None:
            return None
        schedule_id = found[0].schedule_id
        prefix = keys.runs_prefix(group, schedule_id)
        end = prefix + cursor if cursor else keys.prefix_end(prefix)
        rows = self._store.scan_back(keys.SCHEDULES, prefix, end, limit)
        jobs = []
        for key, _ in rows:
            state_row = self._store.get(keys.STATE, keys.state_key(group, keys.parse_run_key(key)[1]))
            record = None if state_row is None else self._complete(decode_state(state_row))
            if record is not None:
                jobs.append(record)
        is_last = len(rows) < limit
        from_ms = 0 if is_last else keys.parse_run_key(rows[-1][0])[0]
        to_ms = int.from_bytes(cursor[:8], "big") if cursor else 2**62
        return RunPage(jobs, self._skips(group, schedule_id, from_ms, to_ms), None if is_last else rows[-1][0][len(prefix) :])

    def _skips(self, group: int, schedule_id: bytes, from_ms: int, to_ms: int) -> list[SkipRow]:
        """Records that begin in [from, to), newest first; there are at most some thousand."""
        start, end = keys.skip_key(group, schedule_id, from_ms), keys.skip_key(group, schedule_id, to_ms)
        return [decode_skip(row) for _, row in reversed(self._store.scan(keys.SCHEDULES, start, end, 2_000))]

    # Commands on a job that may be a schedule's next occurrence.

    async def propose_on_job(self, command: Cancel | RunNow | Update) -> Reply:
        """Propose it with the successor of the occurrence it takes away, where it does."""
        group = group_of(command.job_id, self._group_count)
        reply = await self._propose(group, command)
        for _ in range(TRIES_MAX):
            if reply.refusal != OUTDATED:
                return reply
            successor = self._successor(group, reply.state)
            reply = await self._propose(group, replace(command, successor=successor))
        raise _busy()

    def _successor(self, group: int, state: JobState | None) -> Successor | None:
        if state is None or state.run is None:
            return None
        found = self._timetable.read(group, state.tenant, state.run.schedule)
        if found is None or found[1].next_at_ms == -1:
            return None
        definition, course = found
        return Successor(definition.version, course.next_at_ms, self._timetable.next_run(definition, course.next_at_ms))

    # Time-zone data.

    @property
    def zone_version(self) -> str:
        return self._timetable.zones.version

    def has_used(self, zones: ZoneData) -> bool:
        """Whether every waiting occurrence was computed, or looked at, under this data."""
        return self._store.get(keys.RAFT_META, ZONES_KEY) == zones.fingerprint().encode()

    async def use_zones(self, zones: ZoneData, *, forced: bool) -> ZonesReloaded:
        """Compute by this data from now on, and move waiting occurrences. `forced`: also where the version is not newer than the one
        a schedule was computed with, as long as the zone's rules differ."""
        async with self._reloading:
            self._timetable.use(zones)
            changed: dict[str, None] = {}
            moved = 0
            for group in range(self._group_count):
                async for tenant, name, course in self._courses(group):
                    if self._is_affected(course, zones, forced=forced):
                        changed[course.zone] = None
                        moved += await self._rezone(group, tenant, name)
            self._store.write({keys.RAFT_META: {ZONES_KEY: zones.fingerprint().encode()}})
            log.info("zones_loaded", version=zones.version, changed=sorted(changed), moved=moved)
            return ZonesReloaded(zones.version, tuple(sorted(changed)), moved)

    async def _courses(self, group: int) -> AsyncIterator[tuple[str, str, Course]]:
        prefix = keys.courses_prefix(group)
        start = prefix
        while rows := self._store.scan(keys.SCHEDULES, start, keys.prefix_end(prefix), _SCAN):
            for key, row in rows:
                yield *keys.parse_schedule_key(key), decode_course(row)
            start = rows[-1][0] + b"\0"
            await asyncio.sleep(0)

    @staticmethod
    def _is_affected(course: Course, zones: ZoneData, *, forced: bool) -> bool:
        if not course.zone_version or course.next_at_ms == -1:
            return False
        # Only a newer version recomputes, so that nodes with different ones do not take turns.
        if not forced and zones.version <= course.zone_version:
            return False
        if course.zone not in zones.names:
            log.error("zone_unknown", zone=course.zone, version=zones.version, remedy="install time-zone data that has it")
            return False
        return zones.zone(course.zone).digest != course.zone_digest

    async def _rezone(self, group: int, tenant: str, name: str) -> bool:
        """Move a schedule's waiting occurrence to its instant by the data now in use; whether it moved."""
        for _ in range(TRIES_MAX):
            found = self._timetable.read(group, tenant, name)
            if found is None or found[0].paused or found[1].next_at_ms == -1:
                return False
            definition, course = found
            following = self._timetable.next_run(definition, course.decided_ms, besides=course.next_job)
            reply = await self._propose(group, Rezone(tenant, name, definition.version, course.next_at_ms, following))
            if not reply.refusal:
                return not reply.replayed
        raise _busy()

    # Shared.

    def _group(self, tenant: str, name: str) -> int:
        return self._dispatcher.group_of_schedule(tenant, name)

    async def _settle(self, tenant: str, name: str, command: Callable[[], AnyCommand]) -> Reply:
        """Propose what `command` computes, again and again while the schedule moves on under it."""
        group = self._group(tenant, name)
        for _ in range(TRIES_MAX):
            reply = await self._propose(group, command())
            if reply.refusal == OCCURRENCE_DUE:
                await self._dispatcher.occurrences.decide_now(tenant, name)
            elif reply.refusal != OUTDATED:
                if reply.refusal:
                    raise _error(reply)
                return reply
        raise _busy()


def _error(reply: Reply) -> WheelschedError:
    return BY_CODE[reply.refusal](reply.detail)


def _busy() -> Unavailable:
    return Unavailable("the schedule changes faster than this call could follow; try again in a moment", retry_after_s=1)


def _no_schedule(name: str) -> NotFound:
    return NotFound(f"no schedule {name}")
