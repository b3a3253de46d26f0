"""Slow and obvious: what the rows of a store say, counted anew, against each other and against what a node tells."""

from __future__ import annotations

from collections.abc import Mapping

from wheelsched.core.ids import group_of
from wheelsched.model import keys
from wheelsched.model.rows import JobState, decode_counts, decode_done, decode_header, decode_index, decode_state, is_final
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
        assert (header.priority, header.held, header.queue) == (state.priority, state.held, state.queue), state
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
