"""When schedules run, computed for the leader: time zones are known here, and what comes out of it travels in commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from wheelsched.core.ids import group_of, occurrence_id
from wheelsched.cron import Timing, Zone, ZoneData, parse, warnings
from wheelsched.model import keys
from wheelsched.model.commands import Occur
from wheelsched.model.rows import decode_course, decode_definition
from wheelsched.model.schedules import CATCH_UP_MAX, Course, Definition, Missed, NextRun, Reason
from wheelsched.store import Store

# Parsed schedules kept: a few hundred bytes each, and a parse costs some 20 us.
TIMINGS_MAX: Final = 20_000
# Occurrences with a job of their own that are passed over in a row: those of a backfill of the future, or of a clock set back.
TAKEN_MAX: Final = 100_000

_HOUR_MS: Final = 3_600_000

_Key = tuple[str, str, str, int, int, int, int]


class Timetable:
    """Instants of definitions under one version of the time-zone data, and what to do about those that have come."""

    def __init__(self, store: Store, zones: ZoneData, *, group_count: int) -> None:
        self._store = store
        self._group_count = group_count
        self._timings: dict[_Key, Timing] = {}
        self._zones = zones
        self._advice: dict[Timing, tuple[str, ...]] = {}
        self._advice_hour = 0

    @property
    def zones(self) -> ZoneData:
        return self._zones

    def use(self, zones: ZoneData) -> None:
        """Compute by other time-zone data from now on."""
        self._zones = zones
        self._timings.clear()
        self._advice.clear()

    def timing(self, definition: Definition) -> Timing:
        """Raises InvalidSchedule for an expression or a zone that is none."""
        if not definition.cron and not definition.every_ms:
            return Timing.none()
        # The name counts where a field is hashed by it; a few other expressions have the letter too.
        name = definition.name if "h" in definition.cron.lower() else ""
        key = (
            definition.cron, name, definition.zone, definition.every_ms, definition.anchor_ms, definition.start_ms, definition.end_ms
        )  # fmt: skip
        timing = self._timings.get(key)
        if timing is None:
            if len(self._timings) >= TIMINGS_MAX:
                self._timings.clear()
            timing = self._timings[key] = self._make(definition)
        return timing

    def _make(self, definition: Definition) -> Timing:
        start_ms, end_ms = definition.start_ms, definition.end_ms
        if definition.cron:
            return Timing.of_cron(parse(definition.cron, name=definition.name), self._zones.zone(definition.zone), start_ms, end_ms)
        return Timing.of_interval(definition.every_ms, definition.anchor_ms, start_ms, end_ms)

    def advice(self, definition: Definition, now_ms: int) -> tuple[str, ...]:
        """What may surprise about it in the coming year; kept for an hour, for thousands of schedules share an expression."""
        timing, zone = self.timing(definition), self.zone(definition)
        if timing.expression is None or zone is None:
            return ()
        hour = now_ms // _HOUR_MS
        if hour != self._advice_hour or len(self._advice) >= TIMINGS_MAX:
            self._advice.clear()
            self._advice_hour = hour
        found = self._advice.get(timing)
        if found is None:
            found = self._advice[timing] = warnings(timing.expression, zone, now_ms)
        return found

    def zone(self, definition: Definition) -> Zone | None:
        return self._zones.zone(definition.zone) if definition.cron else None

    def next_run(self, definition: Definition, after_ms: int, *, besides: bytes = b"", check: bool = True) -> NextRun:
        """The first occurrence after an instant that has no job yet, `besides` apart. `check` False: whether it has one is left to
        apply, which answers `outdated`."""
        timing, zone = self.timing(definition), self.zone(definition)
        version, digest = ("", "") if zone is None else (self._zones.version, zone.digest)
        for _ in range(TAKEN_MAX):
            at_ms = timing.next_after(after_ms)
            if at_ms == -1:
                break
            if not check or not self._has_job(definition, at_ms, besides):
                return NextRun(at_ms, timing.nominal(at_ms), version, digest)
            after_ms = at_ms
        return NextRun(-1, "", version, digest)

    def _has_job(self, definition: Definition, at_ms: int, besides: bytes) -> bool:
        job_id = occurrence_id(definition.schedule_id, at_ms)
        key = keys.state_key(group_of(job_id, self._group_count), job_id)
        return job_id != besides and self._store.get(keys.STATE, key) is not None

    def read(self, group: int, tenant: str, name: str) -> tuple[Definition, Course] | None:
        """A schedule as it was applied last."""
        definition = self._store.get(keys.SCHEDULES, keys.definition_key(group, tenant, name))
        course = self._store.get(keys.SCHEDULES, keys.course_key(group, tenant, name))
        if definition is None or course is None:
            return None
        return decode_definition(definition), decode_course(course)

    def decide(self, definition: Definition, course: Course, *, now_ms: int, began_ms: int, check: bool) -> Occur:
        """What to do about the waiting occurrence, which has come. Due before `began_ms`: it was missed, and so were all since."""
        at_ms = course.next_at_ms
        if course.next_fire_at_ms >= began_ms:
            following = self.next_run(definition, at_ms, check=check)
            return Occur(definition.tenant, definition.name, definition.version, at_ms, following, [(at_ms, "")], decided_ms=at_ms)
        return _Recovery(self.timing(definition), definition, at_ms, now_ms, began_ms).command(
            lambda after_ms: self.next_run(definition, after_ms, check=check)
        )


class _Recovery:
    """The missed occurrences of one outage (vectors/README.md, "At one instant", 4), without looking at each of them."""

    def __init__(self, timing: Timing, definition: Definition, at_ms: int, now_ms: int, began_ms: int) -> None:
        self._timing = timing
        self._definition = definition
        self._at_ms = at_ms
        self._now_ms = now_ms
        self._began_ms = began_ms
        self._reason = 0  # of the waiting one, where it does not run
        self._left_out: list[tuple[int, int, int, int]] = []

    def command(self, next_run: Callable[[int], NextRun]) -> Occur:
        definition, timing, offset_ms = self._definition, self._timing, self._definition.offset_ms
        last_ms = max(timing.last_before(self._began_ms - offset_ms), self._at_ms)
        following = next_run(last_ms)
        start_ms = self._at_ms
        if definition.starting_deadline_ms >= 0:
            # Too late now: those earlier than this.
            in_time_ms = min(self._now_ms - offset_ms - definition.starting_deadline_ms, last_ms + 1)
            self._leave(start_ms, in_time_ms, Reason.MISSED_DEADLINE)
            start_ms = max(start_ms, in_time_ms)
        runs: list[int] = []
        if definition.missed == Missed.SKIP:
            self._leave(start_ms, last_ms + 1, Reason.MISSED)
        elif definition.missed == Missed.RUN_LATEST:
            # One that falls on the recovery itself is the latest, and on time.
            is_latest = following.at_ms == -1 or following.at_ms + offset_ms != self._began_ms
            if is_latest and start_ms <= last_ms:
                runs = [last_ms]
            self._leave(start_ms, last_ms if is_latest else last_ms + 1, Reason.SUPERSEDED)
        elif start_ms <= last_ms:
            runs = timing.last_few(last_ms + 1, CATCH_UP_MAX, start_ms)
            self._leave(start_ms, runs[0], Reason.CATCH_UP_CAP)
        return Occur(
            definition.tenant, definition.name, definition.version, self._at_ms, following,
            [(at_ms, timing.nominal(at_ms)) for at_ms in runs], True, self._reason, self._left_out, last_ms,
        )  # fmt: skip

    def _leave(self, from_ms: int, to_ms: int, reason: Reason) -> None:
        """Occurrences of [from, to): the waiting one has a job, the others are a record."""
        if from_ms >= to_ms:
            return
        if from_ms == self._at_ms:
            self._reason = int(reason)
            from_ms += 1
        count = self._timing.count(from_ms, to_ms)
        if count:
            first_ms = self._timing.next_after(from_ms - 1)
            self._left_out.append((first_ms, self._timing.last_before(to_ms), count, int(reason)))
