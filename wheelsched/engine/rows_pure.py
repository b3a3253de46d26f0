"""Rows of many jobs in plain Python: specification, fallback and the tests' reference for `native/rows.pyx`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from wheelsched.model import keys
from wheelsched.model.rows import DoneRow, JobState, encode_index, encode_job, encode_row

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
    changed: Iterable[bytes], states: Mapping[bytes, JobState | None], encoded: Mapping[bytes, bytes], group: int,
    encode: Callable[[Any], bytes], format: bytes, rows: Rows, /,
) -> None:  # fmt: skip
    """Put the state rows of the ids in `changed` into `rows`; None where the state is None. `encoded`: what `encode` gave already."""
    for job_id in changed:
        state = states[job_id]
        rows[keys.state_key(group, job_id)] = None if state is None else format + (encoded.get(job_id) or encode(state))


def claim_rows(
    jobs: Sequence[tuple[bytes, int]], start: int, stamps: tuple[int, int, int], fencing: int, lease_ms: int, worker: str,
    kind: type[JobState], states: dict[bytes, JobState | None], changed: dict[bytes, None], befores: list[JobState],
    afters: list[JobState], /,
) -> int:  # fmt: skip
    """Lease the jobs from `start` on, as `attempts.claim` does, up to the first that is anything but plainly QUEUED at its version,
    without a start deadline and of no schedule; returns where it stopped.

    `stamps`: stamp, time that dates rows, watermark; `fencing`: the last token minted, one more is minted with each. New states go into
    `states` and `changed`."""
    stamp_ms, time_ms, watermark_ms = stamps
    for job_id, version in jobs[start:]:
        before = states.get(job_id)
        if before is None or before.status not in (0, 3) or before.held or before.start_deadline_ms >= 0:
            break
        due_at_ms = before.next_attempt_at_ms if before.status else before.fire_at_ms
        if due_at_ms > watermark_ms or (version and version != before.version) or before.run is not None:
            break
        fencing += 1
        after = replace(
            before, status=2, version=before.version + 1, attempt=before.attempt + 1, fencing=fencing, lease_ms=lease_ms,
            lease_expires_at_ms=stamp_ms + lease_ms, next_attempt_at_ms=0, started_at_ms=time_ms,
            first_started_at_ms=before.first_started_at_ms or time_ms, outcome=1, worker=worker, updated_at_ms=time_ms,
        )  # fmt: skip
        states[job_id] = after
        changed[job_id] = None
        befores.append(before)
        afters.append(after)
        start += 1
    return start


def succeed_rows(
    commands: Sequence[Any], start: int, group: int, time_ms: int, kinds: tuple[type[Any], type[JobState]],
    calls: tuple[Callable[[Any], bytes], Callable[[int, str, str], bytes]], states: dict[bytes, JobState | None],
    changed: dict[bytes, None], encoded: dict[bytes, bytes], kept_states: Mapping[bytes, JobState], kept_rows: Mapping[bytes, bytes],
    job_rows: Rows, index_rows: Rows, done_rows: Rows, befores: list[JobState], afters: list[JobState], /,
) -> int:  # fmt: skip
    """End attempts as `attempts.complete` does, from the command at `start` on, up to the first that is no success of a RUNNING job
    whose state and row are kept, which this entry has not touched, and which has neither key nor schedule; returns where it stopped.

    `kinds`: Complete, JobState. `calls`: encoder of a state, `queue_prefix`. What was encoded goes into `encoded` too.
    """
    complete_kind, _ = kinds
    encode, queue_prefix = calls
    for command in commands[start:]:
        if type(command) is not complete_kind or command.outcome != 2 or command.job_id in changed:
            break
        before, job = kept_states.get(command.job_id), kept_rows.get(command.job_id)
        if before is None or job is None or before.status != 2 or before.fencing != command.fencing:
            break
        if before.attempt != command.attempt or before.fingerprint or before.run is not None:
            break
        after = replace(before, status=5, version=before.version + 1, outcome=2, updated_at_ms=time_ms, finished_at_ms=time_ms)
        prefix, tail = queue_prefix(group, before.tenant, before.queue), keys.time_id(before.fire_at_ms, before.job_id)
        job_rows[keys.job_key(group, before.lane, before.fire_at_ms, before.job_id)] = None
        index_rows[prefix + tail] = None
        done_rows[prefix + b"\x05" + tail] = encode_row(DoneRow(after, job, b"", command.result))
        states[command.job_id] = after
        changed[command.job_id] = None
        encoded[command.job_id] = encode(after)
        befores.append(before)
        afters.append(after)
        start += 1
    return start


def tally_moves(
    befores: Sequence[JobState], afters: Sequence[JobState], kind: type[JobState], /
) -> list[tuple[str, str, int, int, int, int, int]]:
    """How many states moved alike, one behind the other: (tenant, queue, status before, after, priority, lane, count)."""
    tallies: list[tuple[str, str, int, int, int, int, int]] = []
    for before, after in zip(befores, afters, strict=True):
        move = (before.tenant, before.queue, before.status, after.status, before.priority, before.lane)
        if tallies and tallies[-1][:6] == move:
            tallies[-1] = (*move, tallies[-1][6] + 1)
        else:
            tallies.append((*move, 1))
    return tallies


def needs_reading(
    commands: Sequence[Any], create_kind: type[Any], complete_kind: type[Any], kept_states: Mapping[bytes, Any],
    kept_rows: Mapping[bytes, Any], /,
) -> list[Any]:  # fmt: skip
    """The commands that may ask for rows: not creates without a key, nor ends of attempts whose state and row are kept."""
    return [
        command
        for command in commands
        if not (type(command) is create_kind and not command.fingerprint)
        and not (type(command) is complete_kind and command.job_id in kept_states and command.job_id in kept_rows)
    ]
