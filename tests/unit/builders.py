"""A group in a dictionary: what engine tests build jobs with and look at them through.

Everything has a default; what a test sets, it is about.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from wheelsched.engine import GroupMachine, Transaction, prefetch_job_keys, prefetch_state_keys
from wheelsched.model import keys
from wheelsched.model.commands import COMMAND_VERSION, AnyCommand, Claim, Complete, Create, Entry, Fire, Reply
from wheelsched.model.effects import Effect, JobChanged, JobsCreated, JobsMoved
from wheelsched.model.rows import (
    AttemptRow,
    DoneRow,
    GroupState,
    JobSpec,
    JobState,
    decode_attempt,
    decode_counts,
    decode_done,
    decode_header,
    decode_index,
    decode_state,
    encode_spec,
    is_final,
)
from wheelsched.model.states import LEASED, Outcome, Status, status_of

GROUP = 3
NOW_MS = 1_800_000_000_000


class DictReader:
    """A `StateReader` over dictionaries, with `Store.write`'s order: ranges first, then rows."""

    def __init__(self) -> None:
        self.families: dict[str, dict[bytes, bytes]] = {family: {} for family in keys.STATE_FAMILIES}
        self.get_count = 0

    def get(self, family: str, key: bytes) -> bytes | None:
        self.get_count += 1
        return self.families[family].get(key)

    def scan(self, family: str, start: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        rows = self.families[family]
        names = sorted(rows)
        first = bisect.bisect_left(names, start)
        last = bisect.bisect_left(names, end) if end else len(names)
        return [(name, rows[name]) for name in names[first:last][:limit]]

    def scan_back(self, family: str, start: bytes, end: bytes, limit: int) -> list[tuple[bytes, bytes]]:
        return self.scan(family, start, end, 1 << 30)[::-1][:limit]

    def write(self, puts: Mapping[str, Mapping[bytes, bytes | None]], ranges: Sequence[tuple[str, bytes, bytes]] = ()) -> None:
        for family, start, end in ranges:
            rows = self.families[family]
            for key in [key for key in rows if start <= key < end]:
                del rows[key]
        for family, changes in puts.items():
            for key, value in changes.items():
                if value is None:
                    self.families[family].pop(key, None)
                else:
                    self.families[family][key] = value


def one_by_one(effects: Sequence[Effect]) -> list[Effect]:
    """The same effects with those of many jobs told job by job: how many go together depends on how commands fall into entries."""
    told: list[Effect] = []
    for effect in effects:
        if isinstance(effect, JobsCreated):
            told += [JobChanged("create", None, state) for state in effect.states]
        elif isinstance(effect, JobsMoved):
            told += [JobChanged(effect.cause, *pair) for pair in zip(effect.befores, effect.afters, strict=True)]
        else:
            told.append(effect)
    return told


class EngineGroup:
    """One group: its rows, its state, and the stamp that the next entry gets. `check()` runs after every entry."""

    def __init__(self, now_ms: int = NOW_MS, group: int = GROUP, *, prefetch: bool = True) -> None:
        self.now_ms = now_ms
        self.group = group
        self.reader = DictReader()
        self.state = GroupState()
        self.machine = GroupMachine(group)
        self.effects: list[Effect] = []  # of the last entry
        self.last: Transaction | None = None
        self._prefetch = prefetch
        self._kept_states: dict[bytes, JobState] = {}
        self._kept_rows: dict[bytes, bytes] = {}

    def apply(self, *commands: AnyCommand) -> list[Reply]:
        """Apply one entry at `now_ms`."""
        return self.apply_entry(Entry(COMMAND_VERSION, self.now_ms, list(commands)))

    def apply_entry(self, entry: Entry) -> list[Reply]:
        txn = self.last = Transaction(self.group, self.reader, None, self._kept_states, self._kept_rows)
        if self._prefetch:
            for job_id in prefetch_state_keys(entry):
                txn.preload(job_id, self.reader.families[keys.STATE].get(keys.state_key(self.group, job_id)))
            for key in prefetch_job_keys(entry, txn):
                txn.preload_row(keys.JOBS, key, self.reader.families[keys.JOBS].get(key))
        replies, self.effects = self.machine.apply(self.state, txn, entry)
        txn.finish()
        self.reader.write(txn.writes, txn.ranges)
        if self._prefetch:
            self._keep_leased()
        self.check()
        return replies

    def _keep_leased(self) -> None:
        """What a replica keeps of leased jobs from entry to entry: states and job rows."""
        families = self.reader.families
        states = [decode_state(row) for row in families[keys.STATE].values()]
        self._kept_states = {state.job_id: state for state in states if state.status in LEASED}
        self._kept_rows = {
            state.job_id: families[keys.JOBS][keys.job_key(self.group, state.lane, state.fire_at_ms, state.job_id)]
            for state in self._kept_states.values()
        }

    def do(self, command: AnyCommand) -> Reply:
        """Apply one command alone."""
        (reply,) = self.apply(command)
        return reply

    def advance(self, ms: int) -> None:
        self.now_ms += ms

    def fire(self, *held: JobState) -> None:
        """Fire up to now, and these held jobs by name."""
        self.do(Fire(self.now_ms, [(state.job_id, state.version) for state in held]))

    def create(self, name: str = "one", **options: Any) -> JobState:
        return must(self.do(a_create(name, **options)))

    def claim(self, state: JobState, *, lease_ms: int = 45_000, worker: str = "w1") -> JobState:
        """Fire what is due, then claim the job at the version given."""
        self.fire()
        (claimed,) = self.do(Claim([(state.job_id, state.version)], lease_ms, worker)).states
        assert claimed is not None, f"{name_of(self.seen(state))} cannot be claimed"
        return claimed

    def running(self, name: str = "one", **options: Any) -> JobState:
        return self.claim(self.create(name, **options))

    def dead(self, name: str = "one", **options: Any) -> JobState:
        return must(self.do(a_completion(self.running(name, **options), Outcome.FATAL_FAILURE, error=b'"broken"')))

    def state_of(self, job_id: bytes) -> JobState | None:
        row = self.reader.families[keys.STATE].get(keys.state_key(self.group, job_id))
        return None if row is None else decode_state(row)

    def stored(self, state: JobState) -> JobState | None:
        return self.state_of(state.job_id)

    def seen(self, state: JobState) -> Status | None:
        now = self.stored(state)
        return None if now is None else status_of(now, self.state.watermark_ms)

    def done(self, state: JobState) -> DoneRow:
        now = self.stored(state)
        assert now is not None
        key = keys.done_key(self.group, now.tenant, now.queue, now.status, now.fire_at_ms, now.job_id)
        return decode_done(self.reader.families[keys.DONE][key])

    def attempts(self, state: JobState) -> list[AttemptRow]:
        prefix = keys.attempt_key(self.group, state.job_id, 0)[:-4]
        rows = self.reader.scan(keys.ATTEMPTS, prefix, keys.prefix_end(prefix), 1_000)
        return [decode_attempt(row) for _, row in rows]

    def counts(self, tenant: str = "acme", queue: str = "mail") -> dict[tuple[Status, int], int]:
        row = self.reader.families[keys.COUNTS].get(keys.counts_key(self.group, tenant, queue))
        cells = [] if row is None else decode_counts(row).cells
        return {(Status(place // 3), place % 3): count for place, count in enumerate(cells) if count}

    def changes(self) -> list[tuple[str, JobState | None, JobState | None]]:
        """The jobs changed by the last entry."""
        return [(e.cause, e.before, e.after) for e in one_by_one(self.effects) if isinstance(e, JobChanged)]

    def check(self) -> None:
        """Rows of all families agree: no orphan, no double, counts as counted anew. Slow and obvious."""
        rows = self.reader.families
        states = {key: decode_state(row) for key, row in rows[keys.STATE].items()}
        assert set(states) == {keys.state_key(self.group, state.job_id) for state in states.values()}
        alive = [s for s in states.values() if not is_final(s) and s.status != Status.DISCARDED]
        ended = [s for s in states.values() if s not in alive]
        assert set(rows[keys.JOBS]) == {keys.job_key(self.group, s.lane, s.fire_at_ms, s.job_id) for s in alive}
        assert set(rows[keys.INDEX]) == {keys.index_key(self.group, s.tenant, s.queue, s.fire_at_ms, s.job_id) for s in alive}
        assert set(rows[keys.DONE]) == {keys.done_key(self.group, s.tenant, s.queue, s.status, s.fire_at_ms, s.job_id) for s in ended}
        for state in alive:
            self._check_alive(state)
        for row in rows[keys.DONE].values():
            state = decode_done(row).state
            assert states[keys.state_key(self.group, state.job_id)] == state
        for key in rows[keys.ATTEMPTS]:
            owner = states[keys.state_key(self.group, key[2:18])]
            assert owner.status != Status.DISCARDED and 1 < keys.attempt_version(key) <= owner.version
        self._check_counts(list(states.values()))

    def _check_alive(self, state: JobState) -> None:
        rows = self.reader.families
        header = decode_header(rows[keys.JOBS][keys.job_key(self.group, state.lane, state.fire_at_ms, state.job_id)])
        assert (header.priority, header.tenant, header.queue) == (state.priority, state.tenant, state.queue)
        # A run that fires on time leaves its job row alone: held there says that the state has to be looked at.
        assert header.held == state.held or (header.held and state.run is not None)
        index_key = keys.index_key(self.group, state.tenant, state.queue, state.fire_at_ms, state.job_id)
        lane, priority, version = decode_index(rows[keys.INDEX][index_key])
        assert (lane, priority) == (state.lane, state.priority)
        assert 1 <= version <= state.version and header.version <= state.version
        assert state.fencing <= self.state.fencing and state.attempt >= state.attempt_base

    def _check_counts(self, states: list[JobState]) -> None:
        counted: dict[bytes, list[int]] = {}
        for state in states:
            if state.status != Status.DISCARDED:
                cells = counted.setdefault(keys.counts_key(self.group, state.tenant, state.queue), [0] * 30)
                cells[state.status * 3 + state.priority] += 1
        assert {key: decode_counts(row).cells for key, row in self.reader.families[keys.COUNTS].items()} == counted


def must(reply: Reply) -> JobState:
    """The state in a reply that is no refusal."""
    assert not reply.refusal, reply
    assert reply.state is not None
    return reply.state


def name_of(status: Status | None) -> str:
    return "nothing" if status is None else status.name


def an_id(name: str = "one") -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def a_create(
    name: str = "one", *, tenant: str = "acme", queue: str = "mail", priority: int = 1, run_at_ms: int = -1, delay_ms: int = 0,
    window_ms: int = 0, spread_ms: int = 0, payload: bytes = b"null", fingerprint: bytes = b"", **spec: Any,
) -> Create:  # fmt: skip
    """`spec`: fields of a `JobSpec`."""
    return Create(
        an_id(name), tenant, queue, priority, run_at_ms, delay_ms, window_ms, spread_ms, encode_spec(JobSpec(window_ms, **spec)), payload,
        fingerprint,
    )  # fmt: skip


def a_completion(leased: JobState, outcome: int = Outcome.SUCCEEDED, *, jitter: int = 0, **options: Any) -> Complete:
    """The end of the attempt that `leased` was claimed for."""
    return Complete(leased.job_id, leased.attempt, leased.fencing, int(outcome), jitter, **options)
