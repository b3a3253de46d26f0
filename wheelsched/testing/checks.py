"""Slow and obvious: what the rows of a store say, counted anew, against each other and against what a node tells."""

from __future__ import annotations

from collections.abc import Mapping

from wheelsched.core.ids import group_of, occurrence_id
from wheelsched.model import keys
from wheelsched.model.rows import (
    JobState,
    decode_counts,
    decode_course,
    decode_definition,
    decode_done,
    decode_header,
    decode_index,
    decode_skip,
    decode_state,
    is_final,
    run_instant_ms,
)
from wheelsched.model.schedules import Course, Definition, Phase
from wheelsched.model.states import Status
from wheelsched.store import Store
from wheelsched.testing.node import TestNode


def all_rows(store: Store) -> dict[str, dict[bytes, bytes]]:
    """Every row of every state family."""
    return {family: dict(store.scan(family, b"", b"", 1 << 30)) for family in keys.STATE_FAMILIES}


def check_rows(store: Store, group_count: int) -> dict[bytes, JobState]:
    """Raise AssertionError unless the families agree: no orphan, no double, counts as counted anew. The states by job id."""
    rows = all_rows(store)
    states = {key[2:]: decode_state(row) for key, row in rows[keys.STATE].items()}
    groups = {job_id: group_of(job_id, group_count) for job_id in states}
    _same("state", rows[keys.STATE], {keys.state_key(groups[s.job_id], s.job_id) for s in states.values()})
    ended = {s.job_id for s in states.values() if is_final(s) or s.status == Status.DISCARDED}
    alive = [s for s in states.values() if s.job_id not in ended]
    _same("jobs", rows[keys.JOBS], {keys.job_key(groups[s.job_id], s.lane, s.fire_at_ms, s.job_id) for s in alive})
    _same("index", rows[keys.INDEX], {_index_key(groups[s.job_id], s) for s in alive})
    _same("done", rows[keys.DONE], {_done_key(groups[job_id], states[job_id]) for job_id in ended})
    for state in alive:
        header = decode_header(rows[keys.JOBS][keys.job_key(groups[state.job_id], state.lane, state.fire_at_ms, state.job_id)])
        lane, priority, version = decode_index(rows[keys.INDEX][_index_key(groups[state.job_id], state)])
        assert (header.priority, header.queue) == (state.priority, state.queue), state
        # A run that fires on time leaves its job row alone: held there says that the state has to be looked at.
        assert header.held == state.held or (header.held and state.run is not None), state
        assert (lane, priority) == (state.lane, state.priority) and version <= state.version, state
    for row in rows[keys.DONE].values():
        state = decode_done(row).state
        assert states[state.job_id] == state, f"done and state differ: {state} {states[state.job_id]}"
    for key in rows[keys.ATTEMPTS]:
        owner = states.get(key[2:18])
        assert owner is not None and owner.status != Status.DISCARDED, f"attempts of no job: {key.hex()}"
        assert 1 < keys.attempt_version(key) <= owner.version, f"attempt of version {keys.attempt_version(key)}: {owner}"
    counted: dict[bytes, list[int]] = {}
    for state in states.values():
        if state.status != Status.DISCARDED:
            cells = counted.setdefault(keys.counts_key(groups[state.job_id], state.tenant, state.queue), [0] * 30)
            cells[state.status * 3 + state.priority] += 1
    assert {key: decode_counts(row).cells for key, row in rows[keys.COUNTS].items()} == counted
    return states


def _index_key(group: int, state: JobState) -> bytes:
    return keys.index_key(group, state.tenant, state.queue, state.fire_at_ms, state.job_id)


def _done_key(group: int, state: JobState) -> bytes:
    return keys.done_key(group, state.tenant, state.queue, state.status, state.fire_at_ms, state.job_id)


def _same(family: str, rows: Mapping[bytes, bytes], wanted: set[bytes]) -> None:
    orphans, missing = rows.keys() - wanted, wanted - rows.keys()
    assert not orphans and not missing, f"{family}: orphans {[k.hex() for k in orphans]}, missing {[k.hex() for k in missing]}"


async def check_depth(node: TestNode, queue: str) -> None:
    """Raise AssertionError unless the depths that a queue tells are those of a listing, counted."""
    counted: dict[str, list[int]] = {}
    for record in await node.list_jobs(queue):
        counted.setdefault(record.status.name, [0, 0, 0])[record.state.priority] += 1
    listed = {status: tuple(counts) for status, counts in counted.items()}
    told = await node.depth(queue)
    assert told == listed, f"queue {queue} tells {told}, its listing {listed}"


async def check_audit(node: TestNode) -> None:
    """Raise AssertionError if the audit finds a job that memory has lost."""
    repairs = await node.node.dispatcher.audit.sweep()
    assert repairs == 0, f"the audit had to repair {repairs} jobs"


def check_schedules(store: Store, group_count: int) -> None:
    """Raise AssertionError unless the rows of schedules keep their promises: one waiting occurrence each (`one_next_occurrence`), ids
    that follow from schedule and instant (`one_job_per_occurrence`), runs that count exactly while they go on, and no row of nothing."""
    rows = all_rows(store)
    runs = [state for row in rows[keys.STATE].values() if (state := decode_state(row)).run is not None]
    runs = [state for state in runs if state.status != Status.DISCARDED]
    wanted = set()
    for state in runs:
        assert state.run is not None
        group = group_of(state.job_id, group_count)
        wanted.add(keys.run_key(group, state.run.schedule_id, run_instant_ms(state), state.job_id))
        if state.run.scheduled_for_ms >= 0:
            assert state.job_id == occurrence_id(state.run.schedule_id, state.run.scheduled_for_ms), f"one_job_per_occurrence: {state}"
    known = set()
    for group in range(group_count):
        prefix = keys.courses_prefix(group)
        for key, row in rows[keys.SCHEDULES].items():
            if not key.startswith(prefix):
                continue
            tenant, name = keys.parse_schedule_key(key)
            definition_key = keys.definition_key(group, tenant, name)
            definition, course = decode_definition(rows[keys.SCHEDULES][definition_key]), decode_course(row)
            known.add(definition.schedule_id)
            mine = [state for state in runs if state.run is not None and state.run.schedule_id == definition.schedule_id]
            _check_course(definition, course, mine)
            skips_prefix = keys.skips_prefix(group, definition.schedule_id)
            skips = {key: decode_skip(row) for key, row in rows[keys.SCHEDULES].items() if key.startswith(skips_prefix)}
            assert len(skips) == course.skip_row_count, f"{name} counts {course.skip_row_count} records, there are {len(skips)}"
            wanted |= {key, definition_key, *skips}
    _same("schedules", rows[keys.SCHEDULES], wanted)
    for state in runs:
        assert state.run is not None
        waits = state.run.phase in (Phase.NEXT, Phase.BUFFERED) and not is_final(state)
        assert not waits or state.run.schedule_id in known, f"one_next_occurrence: {state} waits for a schedule that is gone"


def _check_course(definition: Definition, course: Course, runs: list[JobState]) -> None:
    name = definition.name
    going: dict[int, set[bytes]] = {phase: set() for phase in Phase}
    for state in runs:
        if not is_final(state):
            assert state.run is not None
            going[state.run.phase].add(state.job_id)
    assert (course.schedule_id, course.version) == (definition.schedule_id, definition.version), name
    assert going[Phase.NEXT] == ({course.next_job} if course.next_at_ms != -1 else set()), f"one_next_occurrence: {name} {course}"
    assert not definition.paused or course.next_at_ms == -1, f"{name} is paused, and an occurrence waits"
    assert going[Phase.BUFFERED] == ({course.buffered} if course.buffered else set()), f"{name} {course}"
    assert not course.buffered or course.runs, f"{name}: what waits in the buffer waits for nothing"
    counted = set(course.runs)
    assert len(counted) == len(course.runs) and counted <= going[Phase.COUNTED], f"{name} counts runs that have ended: {course}"
    left = {state.job_id for state in runs if state.status == Status.CANCEL_REQUESTED}
    assert going[Phase.COUNTED] - counted <= left, f"{name} does not count a run that goes on: {course}"
