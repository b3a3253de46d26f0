"""Rows of many jobs in plain Python: specification, fallback and the tests' reference for `native/rows.pyx`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from wheelsched.model import keys
from wheelsched.model.rows import JobState, encode_index, encode_job

Rows = dict[bytes, bytes | None]


def create_rows(
    commands: Sequence[Any], start: int, stamps: tuple[int, int, int, int], kinds: tuple[type[Any], type[JobState]],
    calls: tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]], job_rows: Rows, index_rows: Rows,
    tallies: list[tuple[str, str, int, int]], /,
) -> list[JobState]:  # fmt: skip
    """States of the jobs made by the creates without a key that stand one behind the other from `start` on, as `jobs.create` makes
    them; their job and index rows go into the dictionaries, and how many there are, as (tenant, queue, priority, count), into `tallies`.

    `stamps`: group, stamp, time that dates rows, watermark. `kinds`: Create, JobState. `calls`: `decode_spec`, `queue_prefix`,
    `spread_hash`.
    """
    group, stamp_ms, time_ms, watermark_ms = stamps
    create_type, state_type = kinds
    decode_spec, queue_prefix, spread_hash = calls
    states: list[JobState] = []
    for command in commands[start:]:
        if type(command) is not create_type or command.fingerprint:
            break
        spec = decode_spec(command.spec)
        base_ms = command.run_at_ms if command.run_at_ms != -1 else stamp_ms + command.delay_ms
        if command.spread_ms > 0:
            base_ms += spread_hash(command.job_id) % command.spread_ms
        lane, fire_at_ms = 0, base_ms
        if command.window_ms > 0:
            lane, fire_at_ms = 1, base_ms + (spread_hash(command.job_id) >> 32) % max(1, command.window_ms * 9 // 10)
        is_due = fire_at_ms <= stamp_ms
        fire_at_ms = stamp_ms if is_due else fire_at_ms
        state = state_type(
            command.job_id, 0, 1, command.tenant, command.queue, lane, command.priority, fire_at_ms, time_ms, time_ms,
            not is_due and fire_at_ms <= watermark_ms,
            max_attempts=spec.max_attempts, initial_backoff_ms=spec.initial_backoff_ms, max_backoff_ms=spec.max_backoff_ms,
            timeout_ms=spec.timeout_ms, start_deadline_ms=spec.start_deadline_ms, run_at_ms=base_ms,
        )  # fmt: skip
        states.append(state)
        job_rows[keys.job_key(group, lane, fire_at_ms, command.job_id)] = encode_job(state, command.spec, command.payload)
        prefix = queue_prefix(group, command.tenant, command.queue)
        index_rows[prefix + keys.time_id(fire_at_ms, command.job_id)] = encode_index(lane, command.priority, 1)
        place = (command.tenant, command.queue, command.priority)
        if tallies and tallies[-1][:3] == place:
            tallies[-1] = (*place, tallies[-1][3] + 1)
        else:
            tallies.append((*place, 1))
    return states


def state_rows(
    changed: Iterable[bytes], states: Mapping[bytes, JobState | None], group: int, encode: Callable[[Any], bytes], format: bytes,
    rows: Rows, /,
) -> None:  # fmt: skip
    """Put the state rows of the ids in `changed` into `rows`; None where the state is None."""
    for job_id in changed:
        state = states[job_id]
        rows[keys.state_key(group, job_id)] = None if state is None else format + encode(state)
