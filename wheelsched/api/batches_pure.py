"""Batches in plain Python: specification, fallback and the tests' reference for `native/batches.pyx`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from wheelsched.api.times import instant_bytes
from wheelsched.core.ids import ID_BYTES, format_token
from wheelsched.model.commands import Create, Reply
from wheelsched.model.rows import JobSpec, JobState

_PRIORITIES = (b"critical", b"default", b"bulk")


class Spec(NamedTuple):
    """What most jobs of a queue share, and how an answer shows it: members `timing`, from `retry` to `labels`, and `target`."""

    window_ms: int
    row: bytes
    spec: JobSpec
    timing: bytes
    tail: bytes
    target: bytes


Item = tuple[str, int, int, int, bytes, Spec]  # queue, priority, run_at ms or -1, delay ms, payload, spec


def scan_jobs(body: bytes, payload_max: int, run_at_max_ms: int, specs: Mapping[bytes, Spec], /) -> tuple[list[Any], int] | None:
    """The items of a batch and its spread in ms; None where the decoder has to look at the body. `body` is UTF-8.

    An item is an `Item`, or (its bytes, key) where it has to be decoded by itself. `specs` holds specs by the bytes of the members
    they come from; `key`, where not empty, is those of one that was missing.

    Reading ahead pays in C alone: here every body goes to the decoder.
    """
    return None


def draft_jobs(
    items: list[Any], ids: bytes, tenant: str, spread_ms: int, create: Callable[..., Create], draft: Callable[..., Any], /
) -> None:
    """Turn every `Item` of a list into `draft(create(…), spec)`, with the ids of 16 bytes each one after the other."""
    used = 0
    for place, item in enumerate(items):
        if type(item) is tuple:
            queue, priority, run_at_ms, delay_ms, payload, spec = item
            job_id = ids[used : used + ID_BYTES]
            used += ID_BYTES
            items[place] = draft(
                create(job_id, tenant, queue, priority, run_at_ms, delay_ms, spec.window_ms, spread_ms, spec.row, payload), spec
            )


def created_json(drafts: Sequence[Any], replies: Sequence[Reply | None], others: Sequence[bytes | None] | None, /) -> bytes | None:
    """The answer to a batch: for each item what `others` has, else the job that its reply made, in its draft's words.

    Without `others` every reply has to be of a job just made; None where one is not."""
    if others is None:
        if any(reply is None or reply.refusal or reply.replayed for reply in replies):
            return None
        others = [None] * len(drafts)
    results = [
        _created(draft.command, draft.spec, reply) if other is None else other
        for draft, reply, other in zip(drafts, replies, others, strict=True)
    ]
    return b'{"results":[' + b",".join(results) + b"]}"


def _created(command: Create, spec: Spec, reply: Reply | None) -> bytes:
    assert reply is not None
    state = reply.state
    assert state is not None
    # Due at its acceptance: the Fire that follows in the same entry makes it QUEUED before this answer leaves.
    is_due = state.fire_at_ms <= state.created_at_ms and not state.held
    return (
        b'{"status":201,"job":{"job_id":"job_%b","queue":"%b","status":"%b","run_at":"%b","fire_at":"%b","timing":%b,"priority":"%b",'
        b'"target":%b,"payload":%b%b,"version":%d,"attempt":%d,"created_at":"%b","updated_at":"%b"}}'
    ) % (
        state.job_id.hex().encode(), state.queue.encode(), b"QUEUED" if is_due else b"SCHEDULED", instant_bytes(state.run_at_ms),
        instant_bytes(state.fire_at_ms), spec.timing, _PRIORITIES[state.priority], spec.target, command.payload, spec.tail,
        state.version, state.attempt, instant_bytes(state.created_at_ms), instant_bytes(state.updated_at_ms),
    )  # fmt: skip


# --- attempts that end ----------------------------------------------------------------------------------------------------------

Ended = tuple[bytes, int, int, int, bytes, bytes, int]  # job id, attempt, fencing, outcome, error, result, retry_after ms


def scan_completions(body: bytes, result_max: int, error_max: int, outcomes: tuple[int, int, int, int], /) -> list[Any] | None:
    """The items of a batch of completions, each an `Ended` or its bytes where it has to be decoded by itself; None where the decoder
    has to look at the body. `outcomes`: the numbers of succeeded, retryable_failure, fatal_failure, cancelled."""
    return None


def ended_json(replies: Sequence[Reply | None], others: Sequence[bytes | None], status_names: Sequence[str], retrying: int, /) -> bytes:
    """The answer to a batch of completions: for each item what `others` has, else what its reply says the job has become."""
    results = [_ended(reply, status_names, retrying) if other is None else other for reply, other in zip(replies, others, strict=True)]
    return b'{"results":[' + b",".join(results) + b"]}"


def _ended(reply: Reply | None, status_names: Sequence[str], retrying: int) -> bytes:
    assert reply is not None
    state = reply.state
    assert state is not None
    next_at = b',"next_attempt_at":"%b"' % instant_bytes(state.next_attempt_at_ms) if state.status == retrying else b""
    return b'{"status":200,"job_id":"job_%b","job_status":"%b"%b}' % (
        state.job_id.hex().encode(), status_names[state.status].encode(), next_at,
    )  # fmt: skip


# --- claimed jobs ---------------------------------------------------------------------------------------------------------------


def claimed_json(
    jobs: Sequence[tuple[JobState, JobSpec, bytes]], words: Callable[[JobSpec], tuple[bytes, bytes]], other: Callable[[Any], bytes], /
) -> bytes:
    """The answer to a claim. `words(spec)`: (what stands for the payload, empty: the payload itself; the members from `timeout_s` on
    and the closing brace). `other(job)` writes the runs of schedules, which have more to tell."""
    return b'{"jobs":[' + b",".join([_claimed(job, words) if job[0].run is None else other(job) for job in jobs]) + b"]}"


def _claimed(job: tuple[JobState, JobSpec, bytes], words: Callable[[JobSpec], tuple[bytes, bytes]]) -> bytes:
    state, spec, payload = job
    head, tail = words(spec)
    job_id = state.job_id.hex().encode()
    return (
        b'{"job_id":"job_%b","queue":"%b","attempt":%d,"lease_token":"%b","lease_expires_at":"%b","idempotency_key":"job_%b@%b",'
        b'"fencing_token":%d,%b,"run_at":"%b","fire_at":"%b",%b'
    ) % (
        job_id, state.queue.encode(), state.attempt, format_token(state.job_id, state.attempt, state.fencing).encode(),
        instant_bytes(state.lease_expires_at_ms), job_id, instant_bytes(state.key_at_ms or state.fire_at_ms), state.fencing,
        head or b'"payload":' + payload, instant_bytes(state.run_at_ms), instant_bytes(state.fire_at_ms), tail,
    )  # fmt: skip
