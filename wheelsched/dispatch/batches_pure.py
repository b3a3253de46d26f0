"""What is done with many jobs at once, in plain Python: specification, fallback and the tests' reference for `native/rows.pyx`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from wheelsched.core.ids import group_of_low, id_low
from wheelsched.model import keys
from wheelsched.model.rows import KIND_JOB, TIMER, JobSpec, JobState, is_capped, split_job, timer_word

Tally = tuple[str, str, int, int, int]  # tenant, queue, priority, count, first fire_at


def sort_created(
    states: Sequence[JobState], watermark_ms: int, loaded_precise_ms: int, loaded_flexible_ms: int,
    number_of: Callable[[str, str], int], /,
) -> tuple[list[Tally], tuple[bytes, bytes], tuple[bytes, bytes], tuple[int, int], list[JobState]]:  # fmt: skip
    """(tallies, ready records by lane, timers by lane, first `fire_at` by lane or -1, the odd ones) of jobs that were just created.

    Ready is what is due at or under the watermark; a timer what is due before its lane's loaded mark; what lies beyond is the loader's.
    Held jobs and those with a start deadline are only counted, and left to the caller as the odd ones. `number_of(tenant, queue)`.
    """
    loaded = (loaded_precise_ms, loaded_flexible_ms)
    tallies: list[Tally] = []
    ready: tuple[list[bytes], list[bytes]] = ([], [])
    timers: tuple[list[bytes], list[bytes]] = ([], [])
    earliest = [-1, -1]
    odd: list[JobState] = []
    for state in states:
        at_ms, lane = state.fire_at_ms, state.lane
        place = (state.tenant, state.queue, state.priority)
        if tallies and tallies[-1][:3] == place:
            _, _, _, count, first_ms = tallies[-1]
            tallies[-1] = (*place, count + 1, min(first_ms, at_ms))
        else:
            tallies.append((*place, 1, at_ms))
        if earliest[lane] < 0 or at_ms < earliest[lane]:
            earliest[lane] = at_ms
        if state.held or state.start_deadline_ms >= 0:
            odd.append(state)
            continue
        word = timer_word(number_of(state.tenant, state.queue), state.priority, KIND_JOB)
        record = TIMER.pack(at_ms, id_low(state.job_id), state.version, word)
        if at_ms <= watermark_ms:
            ready[lane].append(record)
        elif at_ms < loaded[lane]:
            timers[lane].append(record)
    return (
        tallies, (b"".join(ready[0]), b"".join(ready[1])), (b"".join(timers[0]), b"".join(timers[1])), (earliest[0], earliest[1]), odd,
    )  # fmt: skip


# Claims: from ready records to jobs handed over.

Wanted = tuple[bytes, int, int, bytes]  # where a record's row begins, its version, its lane, itself


def seeks_of(taken: Sequence[tuple[int, bytes]], group_count: int, /) -> list[Wanted]:
    """Where the rows of reserved records (by lane, packed) are, in the order of their keys."""
    wanted = []
    for lane, records in taken:
        if len(records) % TIMER.size:
            raise ValueError(f"{len(records)} bytes of records are not a multiple of {TIMER.size}")
        for position in range(0, len(records), TIMER.size):
            record = records[position : position + TIMER.size]
            fire_at_ms, low, version, _ = TIMER.unpack(record)
            wanted.append((keys.job_seek(group_of_low(low, group_count), lane, fire_at_ms, low), version, lane, record))
    wanted.sort()
    return wanted


def rows_found(
    wanted: Sequence[Wanted], rows: Sequence[tuple[bytes, bytes] | None], kind: type[Any], /
) -> tuple[dict[int, list[Any]], list[Any], int]:
    """(those that were found by group, those of runs whose definition limits how many run, how many are stale): `rows` are the first
    rows at or after each seek, and what was found is a `kind(job id, version, lane, record, row, "")`."""
    by_group: dict[int, list[Any]] = {}
    capped: list[Any] = []
    stale = 0
    for (seek, version, lane, record), row in zip(wanted, rows, strict=True):
        if row is None or not row[0].startswith(seek):
            stale += 1
            continue
        group, _, _, job_id = keys.parse_job_key(row[0])
        made = kind(job_id, version, lane, record, row[1], "")
        (capped if is_capped(row[1]) else by_group.setdefault(group, [])).append(made)
    return by_group, capped, stale


def hand_over(
    founds: Sequence[Any], states: Sequence[JobState | None], rank: int, decode_spec: Callable[[bytes], JobSpec], kind: type[Any],
    handed: list[Any], order: list[int], /,
) -> int:  # fmt: skip
    """Add `kind(state, spec, payload)` of every job that was claimed to `handed`, and by what it is sorted (rank of its queue, lane,
    priority, fire_at) to `order`; returns how many were not."""
    dropped = 0
    for found, state in zip(founds, states, strict=True):
        if state is None:
            dropped += 1
            continue
        spec, payload = split_job(found[4])
        order.append((rank << 3 | state.lane << 2 | state.priority) << 48 | state.fire_at_ms)
        handed.append(kind(state, decode_spec(spec), payload))
    return dropped
