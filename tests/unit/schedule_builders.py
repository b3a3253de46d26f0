"""A group with schedules in it, and the leader that computes their instants: multiples of a minute, no zones, no cron."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import Any

from builders import EngineGroup, must
from msgspec.structs import replace

from wheelsched.core.ids import occurrence_id
from wheelsched.model import keys
from wheelsched.model.commands import (
    AnyCommand,
    Backfill,
    Cancel,
    DropSchedule,
    Fire,
    Occur,
    PauseSchedule,
    PutSchedule,
    Reply,
    RunNow,
    StartRun,
    Update,
)
from wheelsched.model.rows import (
    JobSpec,
    JobState,
    decode_course,
    decode_definition,
    decode_skip,
    decode_state,
    encode_row,
    encode_spec,
    is_final,
    run_instant_ms,
)
from wheelsched.model.schedules import SKIP_ROWS_MAX, Course, Definition, NextRun, Overlap, Phase, SkipRow, Successor
from wheelsched.model.states import Status

TENANT = "acme"
MINUTE_MS = 60_000
START_MS = 1_800_000_000_000 // MINUTE_MS * MINUTE_MS


def schedule_id(name: str, life: int = 0) -> bytes:
    return hashlib.blake2b(f"{name} {life}".encode(), digest_size=16).digest()


def a_definition(name: str = "s", *, life: int = 0, overlap: Overlap = Overlap.ALLOW, **fields: Any) -> Definition:
    """Every minute on the minute. `spec`: fields of a JobSpec; the rest fields of a Definition."""
    spec = JobSpec(fields.get("window_ms", 0), **fields.pop("spec", {}))
    fields = {"every_ms": MINUTE_MS, "anchor_ms": 0, **fields}
    return Definition(schedule_id(name, life), TENANT, name, "mail", spec=encode_spec(spec), overlap=int(overlap), **fields)


class ScheduleGroup(EngineGroup):
    """Plays the leader: its commands are computed from the rows as they stand. `check` knows the promises of schedules."""

    def __init__(self, now_ms: int = START_MS, *, prefetch: bool = True) -> None:
        super().__init__(now_ms, prefetch=prefetch)

    # What is stored.

    def definition(self, name: str = "s") -> Definition:
        found = self.find_definition(name)
        assert found is not None, f"no schedule {name}"
        return found

    def find_definition(self, name: str) -> Definition | None:
        row = self.reader.families[keys.SCHEDULES].get(keys.definition_key(self.group, TENANT, name))
        return None if row is None else decode_definition(row)

    def course(self, name: str = "s") -> Course:
        return decode_course(self.reader.families[keys.SCHEDULES][keys.course_key(self.group, TENANT, name)])

    def waiting(self, name: str = "s") -> JobState:
        """The next occurrence."""
        state = self.state_of(self.course(name).next_job)
        assert state is not None
        return state

    def job_at(self, at_ms: int, name: str = "s") -> JobState | None:
        return self.state_of(occurrence_id(self.definition(name).schedule_id, at_ms))

    def jobs(self) -> list[JobState]:
        return [decode_state(row) for row in self.reader.families[keys.STATE].values()]

    def statuses(self, name: str = "s") -> dict[int, str]:
        """Seen status by occurrence, in minutes since the start; runs by hand are left out."""
        found = {}
        for state in self.jobs():
            if state.run is not None and state.run.schedule_id == self.definition(name).schedule_id and state.run.scheduled_for_ms >= 0:
                seen = self.seen(state)
                assert seen is not None
                found[(state.run.scheduled_for_ms - START_MS) // MINUTE_MS] = seen.name
        return dict(sorted(found.items()))

    def skips(self, name: str = "s") -> list[SkipRow]:
        prefix = keys.skips_prefix(self.group, self.definition(name).schedule_id)
        return [decode_skip(row) for _, row in self.reader.scan(keys.SCHEDULES, prefix, keys.prefix_end(prefix), 1 << 30)]

    def rows(self) -> dict[str, dict[bytes, bytes]]:
        """A copy, to compare with later."""
        return {family: dict(rows) for family, rows in self.reader.families.items()}

    # What the leader computes.

    def next_run(self, definition: Definition, after_ms: int, *, besides: bytes = b"") -> NextRun:
        """The next multiple that has no job."""
        if not definition.every_ms:
            return NextRun()
        at_ms = max(after_ms, definition.start_ms - 1)
        while True:
            at_ms = at_ms // definition.every_ms * definition.every_ms + definition.every_ms
            if 0 <= definition.end_ms <= at_ms:
                return NextRun()
            job_id = occurrence_id(definition.schedule_id, at_ms)
            if job_id == besides or self.state_of(job_id) is None:
                return NextRun(at_ms)

    def successor(self, name: str = "s") -> Successor:
        definition, course = self.definition(name), self.course(name)
        return Successor(definition.version, course.next_at_ms, self.next_run(definition, course.next_at_ms))

    def put_command(self, wanted: Definition, **options: Any) -> PutSchedule:
        existing = self.find_definition(wanted.name)
        if existing is None:
            return PutSchedule(encode_row(wanted), self.next_run(wanted, self.now_ms), **options)
        course = self.course(wanted.name)
        after_ms = max(self.now_ms, course.decided_ms)
        stored = replace(wanted, schedule_id=existing.schedule_id)
        return PutSchedule(encode_row(wanted), self.next_run(stored, after_ms, besides=course.next_job), **options)

    def occur_command(self, name: str = "s", **changes: Any) -> Occur:
        """The waiting occurrence, on time, with what `changes` says."""
        definition, course = self.definition(name), self.course(name)
        at_ms = course.next_at_ms
        fields = {
            "version": definition.version, "at_ms": at_ms, "next": self.next_run(definition, max(at_ms, changes.get("decided_ms", 0))),
            "runs": [(at_ms, "")], "decided_ms": at_ms, **changes,
        }  # fmt: skip
        return Occur(TENANT, name, **fields)

    def pause_command(self, paused: bool, name: str = "s") -> PauseSchedule:
        if paused:
            return PauseSchedule(TENANT, name, True)
        definition, course = self.definition(name), self.course(name)
        first_ms = (course.decided_ms // MINUTE_MS + 1) * MINUTE_MS
        last_ms = self.now_ms // MINUTE_MS * MINUTE_MS
        left_out = (first_ms, last_ms, (last_ms - first_ms) // MINUTE_MS + 1) if first_ms <= last_ms and definition.every_ms else None
        following = self.next_run(definition, max(self.now_ms, course.decided_ms))
        return PauseSchedule(TENANT, name, False, definition.version, following, left_out)

    # What is done to a schedule: proposed, and a Fire behind it as the replica lets it follow.

    def act(self, command: AnyCommand) -> Reply:
        return self.apply(command, Fire(self.now_ms))[0]

    def put(self, name: str = "s", **fields: Any) -> Definition:
        reply = self.act(self.put_command(a_definition(name, **fields)))
        assert not reply.refusal, reply
        return self.definition(name)

    def occur(self, name: str = "s", **changes: Any) -> JobState | None:
        """Go to the waiting occurrence if it is not there yet, and decide it; its job afterwards."""
        course = self.course(name)
        self.now_ms = max(self.now_ms, course.next_fire_at_ms)
        reply = self.act(self.occur_command(name, **changes))
        assert not reply.refusal, reply
        return self.state_of(course.next_job)

    def started(self, name: str = "s") -> JobState:
        """The next occurrence, fired and claimed."""
        state = self.occur(name)
        assert state is not None
        return self.claim(state)

    def pause(self, name: str = "s") -> None:
        assert not self.act(self.pause_command(True, name)).refusal

    def resume(self, name: str = "s") -> None:
        assert not self.act(self.pause_command(False, name)).refusal

    def drop(self, name: str = "s") -> None:
        assert not self.act(DropSchedule(TENANT, name)).refusal

    def start(self, run: str = "by hand", name: str = "s", **options: Any) -> Reply:
        return self.act(StartRun(hashlib.blake2b(run.encode(), digest_size=16).digest(), TENANT, name, **options))

    def backfill(self, *minutes: int, name: str = "s") -> tuple[int, ...]:
        instants = [(START_MS + minute * MINUTE_MS, START_MS + (minute - 1) * MINUTE_MS, "") for minute in minutes]
        reply = self.act(Backfill(TENANT, name, self.definition(name).version, instants))
        assert not reply.refusal, reply
        return reply.counts

    def cancel(self, state: JobState, **options: Any) -> JobState:
        return must(self.act(Cancel(state.job_id, TENANT, **options)))

    def run_now(self, state: JobState, **options: Any) -> Reply:
        return self.act(RunNow(state.job_id, TENANT, **options))

    def move(self, state: JobState, to_ms: int, **options: Any) -> JobState:
        return must(self.act(Update(state.job_id, TENANT, run_at_ms=to_ms, **options)))

    # The promises.

    def check(self) -> None:
        super().check()
        rows = self.reader.families[keys.SCHEDULES]
        states = self.jobs()
        runs = [state for state in states if state.run is not None and state.status != Status.DISCARDED]
        wanted_keys = {keys.run_key(self.group, s.run.schedule_id, run_instant_ms(s), s.job_id) for s in runs if s.run is not None}
        for key, row in rows.items():
            if key.startswith(keys.definitions_prefix(self.group, TENANT)):
                definition = decode_definition(row)
                course = decode_course(rows[keys.course_key(self.group, TENANT, definition.name)])
                mine = [state for state in runs if state.run is not None and state.run.schedule_id == definition.schedule_id]
                self._check_schedule(definition, course, mine)
                wanted_keys |= {key, keys.course_key(self.group, TENANT, definition.name)}
                wanted_keys |= self._check_skips(definition, course)
        assert rows.keys() == wanted_keys, "rows of no schedule, or runs of no job"
        held = [s for s in runs if s.run is not None and s.status == Status.SCHEDULED and s.attempt == s.attempt_base]
        for state in held:
            assert state.run is not None
            assert state.held or state.run.phase > Phase.BUFFERED, state

    def _check_schedule(self, definition: Definition, course: Course, runs: list[JobState]) -> None:
        assert (course.schedule_id, course.version, course.zone) == (definition.schedule_id, definition.version, definition.zone)
        phases: dict[int, list[JobState]] = {phase: [] for phase in Phase}
        for state in runs:
            if not is_final(state):
                assert state.run is not None
                phases[state.run.phase].append(state)
        assert [s.job_id for s in phases[Phase.NEXT]] == [course.next_job] * (course.next_at_ms != -1), "one_next_occurrence"
        if course.next_at_ms != -1:
            state, run = phases[Phase.NEXT][0], phases[Phase.NEXT][0].run
            assert run is not None and run.scheduled_for_ms == course.next_at_ms > course.decided_ms
            assert state.job_id == occurrence_id(definition.schedule_id, course.next_at_ms)
            assert state.fire_at_ms == course.next_fire_at_ms and not definition.paused
        assert [s.job_id for s in phases[Phase.BUFFERED]] == [course.buffered] * bool(course.buffered)
        assert not course.buffered or course.runs, "what waits in the buffer waits for something"
        counted = {s.job_id for s in phases[Phase.COUNTED]}
        assert len(course.runs) == len(set(course.runs)) and set(course.runs) <= counted, "a run that has ended counts"
        replaced = {s.job_id for s in phases[Phase.COUNTED] if s.status == Status.CANCEL_REQUESTED}
        assert counted - set(course.runs) <= replaced, "a run that goes on does not count"
        for state in runs:
            assert state.run is not None
            if state.run.scheduled_for_ms >= 0:
                assert state.job_id == occurrence_id(definition.schedule_id, state.run.scheduled_for_ms), "one_job_per_occurrence"

    def _check_skips(self, definition: Definition, course: Course) -> set[bytes]:
        skips = self.skips(definition.name)
        assert len(skips) == course.skip_row_count <= SKIP_ROWS_MAX
        for earlier, later in pairwise(skips):
            assert earlier.from_ms <= earlier.to_ms < later.from_ms
        return {keys.skip_key(self.group, definition.schedule_id, skip.from_ms) for skip in skips}
