"""What is done with many jobs at once: the compiled functions and their plain twins give the same bytes, in the same order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wheelsched.api import batches_pure as api_pure
from wheelsched.api.jobs import _shown
from wheelsched.core.ids import id_low, spread_hash
from wheelsched.dispatch import batches_pure as dispatch_pure
from wheelsched.dispatch.claims import ClaimedJob, _Found
from wheelsched.engine import rows_pure as engine_pure
from wheelsched.model import keys
from wheelsched.model.commands import Cancel, Complete, Create, Reply
from wheelsched.model.rows import (
    FORMAT,
    KIND_JOB,
    TIMER,
    JobSpec,
    JobState,
    decode_spec,
    decode_state,
    encode_body,
    encode_job,
    encode_spec,
    timer_word,
)
from wheelsched.model.schedules import Run
from wheelsched.model.states import Status
from wheelsched.replica import batches_pure as replica_pure

native_rows = pytest.importorskip("wheelsched._native.rows", reason="nothing was compiled")
native_batches = pytest.importorskip("wheelsched._native.batches", reason="nothing was compiled")

NOW_MS = 1_800_000_000_000
GROUP = 513
SPECS = (JobSpec(), JobSpec(60_000, 3, 1, 2, 3, 4, {"a": "é"}, "", "00-x"), JobSpec(max_attempts=1), JobSpec(payload_ref="blob"))
IDS = st.binary(min_size=16, max_size=16)
NAMES = st.sampled_from([("acme", "mail"), ("acme", "mail2"), ("b", "x" * 128)])
TIMES = st.sampled_from([NOW_MS - 1, NOW_MS, NOW_MS + 1, NOW_MS + 5, NOW_MS + 86_400_000])
PAYLOADS = st.sampled_from([b"null", b'{"a":1}', b'"' + b"x" * 70_000 + b'"', b'"' + b"y" * 300 + b'"'])
SETTINGS = settings(max_examples=80, deadline=None)


@st.composite
def creates(draw: st.DrawFn) -> Create:
    tenant, queue = draw(NAMES)
    run_at_ms = draw(st.one_of(st.just(-1), TIMES))
    return Create(
        draw(IDS), tenant, queue, draw(st.integers(0, 2)), run_at_ms, draw(st.sampled_from([0, 3, 10**9])) if run_at_ms == -1 else 0,
        draw(st.sampled_from([0, 0, 1, 60_000])), draw(st.sampled_from([0, 0, 7, 600_000])), encode_spec(draw(st.sampled_from(SPECS))),
        draw(PAYLOADS), draw(st.sampled_from([b"", b"", b"", b"", b"f" * 16])),
    )  # fmt: skip


@st.composite
def states(draw: st.DrawFn, *statuses: int) -> JobState:
    tenant, queue = draw(NAMES)
    started_ms = draw(st.sampled_from([0, NOW_MS - 50]))
    run = Run(bytes(16), "nightly", NOW_MS, 1) if draw(st.integers(0, 9)) == 0 else None
    return JobState(
        draw(IDS), draw(st.sampled_from(statuses or (0, 2, 3, 4, 5))), draw(st.integers(1, 300)), tenant, queue, draw(st.integers(0, 1)),
        draw(st.integers(0, 2)), draw(TIMES), NOW_MS - 100, NOW_MS - 10, draw(st.integers(0, 9)) == 0, draw(st.integers(0, 200)), 0,
        draw(st.integers(0, 2**40)), 45_000, NOW_MS, draw(TIMES), started_ms, started_ms, 0, draw(st.sampled_from([0, NOW_MS])), 0, "w1",
        draw(st.sampled_from([b"", b"", b"", b"k" * 16])), start_deadline_ms=draw(st.sampled_from([-1, -1, -1, 60_000])),
        run_at_ms=draw(TIMES), run=run,
    )  # fmt: skip


def listed(rows: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """With its order, which is that in which rows are written."""
    return list(rows.items())


@SETTINGS
@given(commands=st.lists(creates(), max_size=8), start=st.integers(0, 2), watermark_ms=TIMES)
def test_created_rows(commands: list[Create], start: int, watermark_ms: int) -> None:
    def run(create_rows: Callable[..., Any]) -> Any:
        jobs: dict[bytes, bytes | None] = {}
        index: dict[bytes, bytes | None] = {}
        tallies: list[Any] = []
        stamps = (GROUP, NOW_MS, NOW_MS + 2, watermark_ms)
        calls = (decode_spec, keys.queue_prefix, spread_hash)
        made = create_rows(commands, start, stamps, (Create, JobState), calls, jobs, index, tallies)
        return made, [encode_body(state) for state in made], listed(jobs), listed(index), tallies

    assert run(native_rows.create_rows) == run(engine_pure.create_rows)


@SETTINGS
@given(made=st.lists(states(), max_size=5, unique_by=lambda state: state.job_id), gone=IDS, data=st.data())
def test_state_rows(made: list[JobState], gone: bytes, data: st.DataObject) -> None:
    known: dict[bytes, JobState | None] = {state.job_id: state for state in made} | {gone: None}
    encoded = {state.job_id: encode_body(state) for state in made if data.draw(st.booleans())}

    def run(state_rows: Callable[..., None]) -> Any:
        rows: dict[bytes, bytes | None] = {}
        state_rows(dict.fromkeys(known), known, encoded, GROUP, encode_body, FORMAT, rows)
        return listed(rows)

    found = run(native_rows.state_rows)
    assert found == run(engine_pure.state_rows)
    assert all(row is None or decode_state(row) == known[key[2:]] for key, row in found)


@SETTINGS
@given(made=st.lists(states(0, 0, 3), max_size=8), watermark_ms=TIMES, data=st.data())
def test_claimed_rows(made: list[JobState], watermark_ms: int, data: st.DataObject) -> None:
    named = [(state.job_id, data.draw(st.sampled_from([0, state.version, state.version, state.version + 1]))) for state in made]
    named = named + named[:1]

    def run(claim_rows: Callable[..., int]) -> Any:
        known: dict[bytes, JobState | None] = {state.job_id: state for state in made[:7]}
        changed: dict[bytes, None] = {}
        befores: list[JobState] = []
        afters: list[JobState] = []
        stopped = [0]
        for start in range(len(named)):
            if start >= stopped[-1]:
                stopped.append(claim_rows(
                    named, start, (NOW_MS, NOW_MS + 2, watermark_ms), 2**32 + len(afters), 30_000, "w2", JobState, known, changed, befores,
                    afters,
                ))  # fmt: skip
        return stopped, listed(known), listed(changed), befores, [encode_body(state) for state in afters]

    before = [encode_body(state) for state in made]
    assert run(native_rows.claim_rows) == run(engine_pure.claim_rows)
    assert before == [encode_body(state) for state in made], "a state that others hold was written to"


@SETTINGS
@given(made=st.lists(states(2, 2, 4), max_size=8), data=st.data())
def test_rows_of_jobs_that_succeed(made: list[JobState], data: st.DataObject) -> None:
    kept = {state.job_id: state for state in made}
    rows = {state.job_id: encode_job(state, encode_spec(SPECS[0]), data.draw(PAYLOADS)) for state in made[:7]}
    commands: list[Any] = [
        Complete(
            state.job_id, state.attempt + data.draw(st.sampled_from([0, 0, 0, 1])), state.fencing, data.draw(st.sampled_from([2, 2, 2, 3])),
            7, b'"e"', data.draw(PAYLOADS),
        )
        for state in made
    ]  # fmt: skip
    commands = [*commands, *commands[:1], Cancel(bytes(16), "acme")]

    def run(succeed_rows: Callable[..., int]) -> Any:
        known: dict[bytes, JobState | None] = {}
        changed: dict[bytes, None] = {}
        encoded: dict[bytes, bytes] = {}
        job_rows: dict[bytes, bytes | None] = {}
        index_rows: dict[bytes, bytes | None] = {}
        done_rows: dict[bytes, bytes | None] = {}
        befores: list[JobState] = []
        afters: list[JobState] = []
        stopped = [0]
        for start in range(len(commands)):
            if start >= stopped[-1]:
                stopped.append(succeed_rows(
                    commands, start, GROUP, NOW_MS, (Complete, JobState), (encode_body, keys.queue_prefix), known, changed, encoded, kept,
                    rows, job_rows, index_rows, done_rows, befores, afters,
                ))  # fmt: skip
        ways = [listed(each) for each in (known, changed, encoded, job_rows, index_rows, done_rows)]
        return stopped, ways, befores, [encode_body(state) for state in afters]

    assert run(native_rows.succeed_rows) == run(engine_pure.succeed_rows)


@SETTINGS
@given(made=st.lists(states(), max_size=8))
def test_tallies_of_moves(made: list[JobState]) -> None:
    afters = [msgspec.structs.replace(state, status=5) for state in made]
    assert native_rows.tally_moves(made, afters, JobState) == engine_pure.tally_moves(made, afters, JobState)


@SETTINGS
@given(commands=st.lists(creates(), max_size=5), ended=st.lists(IDS, max_size=4), data=st.data())
def test_what_needs_reading_and_how_it_groups(commands: list[Create], ended: list[bytes], data: st.DataObject) -> None:
    mixed: list[Any] = [*commands, *(Complete(job_id, 1, 1, 2, 0, b"e" * 3, b"r" * 5) for job_id in ended)]
    mixed = data.draw(st.permutations(mixed))
    kept = dict.fromkeys(ended[:3], None)
    rows = dict.fromkeys(ended[1:], b"")
    arguments = (Create, Complete, kept, rows)
    assert native_rows.needs_reading(mixed, *arguments) == engine_pure.needs_reading(mixed, *arguments)
    routed = [(place % 3, command) for place, command in enumerate(mixed)]
    found = native_rows.by_group(routed, Create, Complete)
    assert {group: tuple(of_group) for group, of_group in found.items()} == replica_pure.by_group(routed, Create, Complete)
    routed.append((0, Cancel(bytes(16), "acme")))
    assert native_rows.by_group(routed, Create, Complete) is replica_pure.by_group(routed, Create, Complete) is None


@SETTINGS
@given(made=st.lists(states(0), max_size=8), watermark_ms=TIMES, loaded=st.tuples(TIMES, TIMES))
def test_where_created_jobs_belong(made: list[JobState], watermark_ms: int, loaded: tuple[int, int]) -> None:
    def number_of(tenant: str, queue: str) -> int:
        return len(tenant) * 1_000 + len(queue)

    arguments = (made, watermark_ms, *loaded, number_of)
    assert native_rows.sort_created(*arguments) == dispatch_pure.sort_created(*arguments)


@SETTINGS
@given(made=st.lists(states(0), min_size=1, max_size=8), rank=st.integers(0, 99), data=st.data())
def test_from_ready_records_to_jobs_handed_over(made: list[JobState], rank: int, data: st.DataObject) -> None:
    group_count = 8
    records = [TIMER.pack(state.fire_at_ms, id_low(state.job_id), state.version, timer_word(3, state.priority, KIND_JOB)) for state in made]
    taken = [(0, b"".join(records[:4])), (1, b"".join(records[4:]))]
    wanted = native_rows.seeks_of(taken, group_count)
    assert wanted == dispatch_pure.seeks_of(taken, group_count)
    by_low = {id_low(state.job_id): state for state in made}
    rows: list[tuple[bytes, bytes] | None] = []
    for seek, _, _, record in wanted:
        state = by_low[TIMER.unpack(record)[1]]
        row = encode_job(state, encode_spec(data.draw(st.sampled_from(SPECS))), data.draw(PAYLOADS))
        if data.draw(st.integers(0, 5)) == 0:
            row = row[:6] + bytes((row[6] | 4,)) + row[7:]  # of a run whose definition limits how many run
        rows.append(data.draw(st.sampled_from([(seek + state.job_id[:8], row)] * 4 + [None, (b"\xff" * 27, row)])))
    found = native_rows.rows_found(wanted, rows, _Found)
    assert found == dispatch_pure.rows_found(wanted, rows, _Found)
    for founds in found[0].values():
        replies = tuple(data.draw(st.sampled_from([by_low[id_low(one.job_id)]] * 3 + [None])) for one in founds)

        def run(hand_over: Callable[..., int], founds: list[Any] = founds, replies: Any = replies) -> Any:
            handed: list[Any] = []
            order: list[int] = []
            dropped = hand_over(founds, replies, rank, decode_spec, ClaimedJob, handed, order)
            assert all(type(job) is ClaimedJob for job in handed)
            return dropped, handed, order

        assert run(native_rows.hand_over) == run(dispatch_pure.hand_over)


@SETTINGS
@given(commands=st.lists(creates(), max_size=5), data=st.data())
def test_answers_to_creates(commands: list[Create], data: st.DataObject) -> None:
    from wheelsched.api.jobs import Draft

    commands = [msgspec.structs.replace(command, fingerprint=b"") for command in commands]
    made = engine_pure.create_rows(
        commands, 0, (GROUP, NOW_MS, NOW_MS, NOW_MS), (Create, JobState), (decode_spec, keys.queue_prefix, spread_hash), {}, {}, []
    )
    drafts = [Draft(command, _shown(decode_spec(command.spec))) for command in commands]
    replies = [Reply(state=state) for state in made]
    others = data.draw(st.none() | st.just([data.draw(st.sampled_from([None, b'{"status":400}'])) for _ in made]))
    assert native_batches.created_json(drafts, replies, others) == api_pure.created_json(drafts, replies, others)


@SETTINGS
@given(made=st.lists(states(), max_size=6), data=st.data())
def test_answers_to_claims_and_completions(made: list[JobState], data: st.DataObject) -> None:
    def words(spec: JobSpec) -> tuple[bytes, bytes]:
        return spec.payload_ref.encode(), b'"max_attempts":%d}' % spec.max_attempts

    def other(job: Any) -> bytes:
        return b'{"run":"' + job[0].job_id.hex().encode() + b'"}'

    jobs = [ClaimedJob(state, data.draw(st.sampled_from(SPECS)), data.draw(PAYLOADS)) for state in made]
    assert native_batches.claimed_json(jobs, words, other) == api_pure.claimed_json(jobs, words, other)
    replies = [Reply(state=state) for state in made]
    others = [data.draw(st.sampled_from([None, b'{"status":409}'])) for _ in made]
    names = tuple(status.name for status in Status)
    assert native_batches.ended_json(replies, others, names, 3) == api_pure.ended_json(replies, others, names, 3)


@SETTINGS
@given(
    items=st.lists(
        st.tuples(st.sampled_from(["mail", "x"]), st.integers(0, 2), st.integers(-1, 2**45), st.integers(0, 9), PAYLOADS), max_size=4
    )
)
def test_drafts(items: list[Any]) -> None:
    rng = random.Random(1)
    whole = [(*item, _shown(rng.choice(SPECS))) for item in items]
    ids = rng.randbytes(16 * len(whole))

    def run(draft_jobs: Callable[..., None]) -> list[Any]:
        drafts: list[Any] = [*whole[:2], "an error", *whole[2:]]
        draft_jobs(drafts, ids, "acme", 60_000, Create, lambda command, spec: (type(command), command, spec))
        return drafts

    assert run(native_batches.draft_jobs) == run(api_pure.draft_jobs)


@SETTINGS
@given(ms=st.one_of(st.integers(0, 253_402_300_799_999), st.sampled_from([0, 999, 951_782_399_999, 951_782_400_000, 4_107_542_400_000])))
def test_instants_are_written_as_everywhere(ms: int) -> None:
    state = JobState(bytes(16), 3, 1, "t", "q", 0, 1, 0, 0, 0, next_attempt_at_ms=ms)
    arguments = ([Reply(state=state)], [None], tuple(status.name for status in Status), 3)
    assert native_batches.ended_json(*arguments) == api_pure.ended_json(*arguments)


def test_what_is_no_job_id_or_row_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        native_rows.state_rows({b"x": None}, {b"x": None}, {}, GROUP, encode_body, FORMAT, {})
    with pytest.raises(ValueError, match="multiple of 24"):
        native_rows.seeks_of([(0, b"x" * 23)], 8)
    state = JobState(bytes(16), 0, 1, "t", "q", 0, 1, NOW_MS, NOW_MS, NOW_MS)
    with pytest.raises(ValueError, match="no job row"):
        native_rows.hand_over([_Found(bytes(16), 1, 0, b"", b"\x02" * 20)], (state,), 0, decode_spec, ClaimedJob, [], [])
    with pytest.raises(TypeError, match="no slot"):
        native_rows.tally_moves([], [], _NoSlots)


class _NoSlots:
    job_id = status = version = tenant = queue = 0
