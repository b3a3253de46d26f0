"""The writes of one entry, over the state it started from: each command sees those of the commands before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from wheelsched.core.ids import spread_hash
from wheelsched.engine.rows import claim_rows, create_rows, state_rows, succeed_rows
from wheelsched.model import keys
from wheelsched.model.commands import AnyCommand, Complete, Create
from wheelsched.model.rows import (
    FORMAT,
    JobState,
    QueueCounts,
    decode_counts,
    decode_course,
    decode_spec,
    decode_state,
    encode_body,
    encode_row,
)
from wheelsched.model.schedules import Course

_CREATE_CALLS: Final = (decode_spec, keys.queue_prefix, spread_hash)
_SUCCEED_CALLS: Final = (encode_body, keys.queue_prefix)


class StateReader(Protocol):
    """What the state machine needs of a store."""

    def get(self, family: str, key: bytes, /) -> bytes | None: ...

    def scan(self, family: str, start: bytes, end: bytes, limit: int, /) -> Sequence[tuple[bytes, bytes]]: ...

    def scan_back(self, family: str, start: bytes, end: bytes, limit: int, /) -> Sequence[tuple[bytes, bytes]]: ...


class Transaction:
    """Reads see the transaction's own writes; `writes` and `ranges` are what to hand to `Store.write`, ranges first.

    State and counts rows are kept decoded until `finish`, since several commands of an entry often touch the same ones: go
    through `state` and `counts` for those, never through `get`. What the replica read for many commands at once comes in by
    `preload` and `preload_row`; it must be as of the state the entry starts from.
    """

    __slots__ = (
        "_changed", "_changed_courses", "_counts", "_courses", "_encoded", "_kept_counts", "_kept_rows", "_kept_states", "_loaded",
        "_reader", "_states", "group", "ranges", "writes",
    )  # fmt: skip

    def __init__(
        self, group: int, reader: StateReader, kept_counts: dict[tuple[str, str], QueueCounts] | None = None,
        kept_states: dict[bytes, JobState] | None = None, kept_rows: dict[bytes, bytes] | None = None,
    ) -> None:  # fmt: skip
        """`kept_counts`: the group's counts as applied last, kept by the caller from entry to entry and brought up to date here.
        `kept_states`, `kept_rows`: of leased jobs by id, the state as applied last and the job row; only read here."""
        self.group = group
        self._reader = reader
        self._states: dict[bytes, JobState | None] = {}
        self._changed: dict[bytes, None] = {}  # job ids in the order of their first write
        self._encoded: dict[bytes, bytes] = {}  # states that were encoded on the way, as they are now
        self._counts: dict[tuple[str, str], QueueCounts] = {}
        self._courses: dict[tuple[str, str], Course | None] = {}
        self._changed_courses: dict[tuple[str, str], None] = {}
        self._kept_counts = {} if kept_counts is None else kept_counts
        self._kept_states = {} if kept_states is None else kept_states
        self._kept_rows = {} if kept_rows is None else kept_rows
        self._loaded: dict[str, dict[bytes, bytes | None]] = {}
        self.writes: dict[str, dict[bytes, bytes | None]] = {family: {} for family in keys.STATE_FAMILIES}
        self.ranges: list[tuple[str, bytes, bytes]] = []

    def preload(self, job_id: bytes, row: bytes | None) -> None:
        """Take a state row that was read already (None: there is none)."""
        if job_id not in self._states:
            self._states[job_id] = None if row is None else decode_state(row)

    def preload_state(self, state: JobState) -> None:
        """Take a state as it was applied last."""
        self._states.setdefault(state.job_id, state)

    def preload_row(self, family: str, key: bytes, value: bytes | None) -> None:
        """Take a row of another family that was read already (None: there is none)."""
        self._loaded.setdefault(family, {})[key] = value

    def get(self, family: str, key: bytes) -> bytes | None:
        rows = self.writes[family]
        if key in rows:
            return rows[key]
        if self.ranges and self._is_cleared(family, key):
            return None
        loaded = self._loaded.get(family)
        if loaded is not None and key in loaded:
            return loaded[key]
        if family == keys.JOBS and (row := self._kept_row(key)) is not None:
            return row
        return self._reader.get(family, key)

    def _kept_row(self, key: bytes) -> bytes | None:
        _, lane, fire_at_ms, job_id = keys.parse_job_key(key)
        row, state = self._kept_rows.get(job_id), self._kept_states.get(job_id)
        is_its = row is not None and state is not None and state.lane == lane and state.fire_at_ms == fire_at_ms
        return row if is_its else None

    def put(self, family: str, key: bytes, value: bytes) -> None:
        self.writes[family][key] = value

    def delete(self, family: str, key: bytes) -> None:
        self.writes[family][key] = None

    def delete_range(self, family: str, start: bytes, end: bytes) -> None:
        """Remove all rows of [start, end), stored and written so far; what is put there later stays."""
        assert start < end
        rows = self.writes[family]
        # The store clears ranges before it puts rows, so a row put earlier in the transaction has to go here.
        for key in [key for key in rows if start <= key < end]:
            del rows[key]
        self.ranges.append((family, start, end))

    def scan(self, family: str, start: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        """At most `limit` rows of [start, end), the transaction's own writes included."""
        own = {key: value for key, value in self.writes[family].items() if start <= key and (not end or key < end)}
        rows = {key: value for key, value in own.items() if value is not None}
        # Own deletions and cleared ranges hide stored rows, so read on until enough are seen.
        wanted, position = limit + len(own), start
        while wanted > 0:
            chunk = self._reader.scan(family, position, end, wanted)
            seen = [row for row in chunk if row[0] not in own and not self._is_cleared(family, row[0])]
            rows.update(seen)
            if len(chunk) < wanted or len(seen) >= limit:
                break
            position = chunk[-1][0] + b"\0"
        return sorted(rows.items())[:limit]

    def state(self, job_id: bytes) -> JobState | None:
        states = self._states
        if job_id in states:
            return states[job_id]
        kept = self._kept_states.get(job_id)
        if kept is not None:
            states[job_id] = kept
            return kept
        row = self._reader.get(keys.STATE, keys.state_key(self.group, job_id))
        state = states[job_id] = None if row is None else decode_state(row)
        return state

    def put_state(self, job_id: bytes, state: JobState | None) -> None:
        """Write the state row (None: delete it) when the transaction ends."""
        self._states[job_id] = state
        self._changed[job_id] = None
        if self._encoded:
            self._encoded.pop(job_id, None)

    # Many jobs at once: see rows_pure.py for which of them are taken and where each call stops.

    def create_many(
        self, commands: Sequence[AnyCommand], start: int, stamps: tuple[int, int, int]
    ) -> tuple[list[JobState], list[tuple[str, str, int, int]]]:
        """(states made, how many as (tenant, queue, priority, count)). `stamps`: stamp, time that dates rows, watermark."""
        tallies: list[tuple[str, str, int, int]] = []
        writes = self.writes
        states = create_rows(
            commands, start, (self.group, *stamps), (Create, JobState), _CREATE_CALLS, writes[keys.JOBS], writes[keys.INDEX], tallies
        )
        by_id = {state.job_id: state for state in states}
        self._states.update(by_id)
        self._changed.update(dict.fromkeys(by_id))
        for job_id in self._encoded.keys() & by_id.keys() if self._encoded else ():
            del self._encoded[job_id]
        return states, tallies

    def claim_many(
        self, jobs: Sequence[tuple[bytes, int]], start: int, stamps: tuple[int, int, int], fencing: int, lease_ms: int, worker: str
    ) -> tuple[list[JobState], list[JobState]]:
        """States before and after, of as many jobs as were claimed."""
        befores: list[JobState] = []
        afters: list[JobState] = []
        claim_rows(jobs, start, stamps, fencing, lease_ms, worker, JobState, self._states, self._changed, befores, afters)
        for state in afters if self._encoded else ():
            self._encoded.pop(state.job_id, None)
        return befores, afters

    def succeed_many(self, commands: Sequence[AnyCommand], start: int, time_ms: int) -> tuple[list[JobState], list[JobState]]:
        """States before and after, of as many jobs as have succeeded."""
        befores: list[JobState] = []
        afters: list[JobState] = []
        writes = self.writes
        succeed_rows(
            commands, start, self.group, time_ms, (Complete, JobState), _SUCCEED_CALLS, self._states, self._changed, self._encoded,
            self._kept_states, self._kept_rows, writes[keys.JOBS], writes[keys.INDEX], writes[keys.DONE], befores, afters,
        )  # fmt: skip
        return befores, afters

    def counts(self, tenant: str, queue: str) -> QueueCounts:
        """The queue's counts, to be changed in place and written when the transaction ends."""
        name = (tenant, queue)
        counts = self._counts.get(name)
        if counts is None:
            counts = self._kept_counts.get(name)
            if counts is None:
                row = self.get(keys.COUNTS, keys.counts_key(self.group, tenant, queue))
                counts = self._kept_counts[name] = QueueCounts() if row is None else decode_counts(row)
            self._counts[name] = counts
        return counts

    def course(self, tenant: str, name: str) -> Course | None:
        """The course of a schedule, to be changed in place and handed to `put_course`."""
        place = (tenant, name)
        if place in self._courses:
            return self._courses[place]
        row = self._reader.get(keys.SCHEDULES, keys.course_key(self.group, tenant, name))
        course = self._courses[place] = None if row is None else decode_course(row)
        return course

    def put_course(self, tenant: str, name: str, course: Course | None) -> None:
        """Write the course (None: delete it) when the transaction ends."""
        self._courses[tenant, name] = course
        self._changed_courses[tenant, name] = None

    def newest(self, family: str, prefix: bytes, limit: int) -> list[bytes]:
        """Keys of at most `limit` stored rows with this prefix, the last first. The transaction's own new rows are not among them."""
        rows = self._reader.scan_back(family, prefix, keys.prefix_end(prefix), limit)
        own = self.writes[family]
        return [key for key, _ in rows if own.get(key, b"") is not None and not self._is_cleared(family, key)]

    def finish(self) -> None:
        """Encode what was kept decoded. Call once, before `writes` is handed on."""
        group = self.group
        state_rows(self._changed, self._states, self._encoded, group, encode_body, FORMAT, self.writes[keys.STATE])
        counts_rows = self.writes[keys.COUNTS]
        for (tenant, queue), counts in self._counts.items():
            # A queue with nothing in it leaves no row behind.
            counts_rows[keys.counts_key(group, tenant, queue)] = encode_row(counts) if any(counts.cells) else None
        for tenant, name in self._changed_courses:
            course = self._courses[tenant, name]
            row = None if course is None else encode_row(course)
            self.writes[keys.SCHEDULES][keys.course_key(group, tenant, name)] = row

    def _is_cleared(self, family: str, key: bytes) -> bool:
        return any(name == family and start <= key < end for name, start, end in self.ranges)
