"""The client against a fake server: what goes over the wire, what comes back, and what is sent twice."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from random import Random
from typing import Any

import msgspec
import pytest
from fake_server import FakeServer, Fault
from hypothesis import given
from hypothesis import strategies as st

from wheelsched.client import AsyncClient, Backoff, BatchFailed, Client, Completion, Heartbeat, Job, Lease, NewJob, RetryPolicy
from wheelsched.client.encoding import decode_json, encode_json, encode_object, format_instant, path_segment
from wheelsched.client.transport import parse_retry_after
from wheelsched.core.errors import (
    IdempotencyKeyReused,
    InvalidRequest,
    NotFound,
    OutcomeUnknown,
    QuotaExceeded,
    StaleLease,
    Unavailable,
    WheelschedError,
)
from wheelsched.core.limits import BATCH_BYTES_MAX

SOON = Backoff(initial_s=0.001, cap_s=0.002)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def client_of(server: FakeServer, **options: Any) -> AsyncClient:
    return AsyncClient(server.url, backoff=SOON, **options)


def free_url() -> str:
    """A port nobody listens on."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{held.getsockname()[1]}"


# --- payloads -------------------------------------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)


@given(json_values)
def test_json_comes_back_as_it_went_in(value: Any) -> None:
    assert decode_json(encode_json(value)) == value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, {"a": [1, math.nan]}, {"a": {"b": math.inf}}])
def test_numbers_that_are_no_json_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode_json(value)


def test_a_deeply_nested_or_circular_value_is_a_value_error() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="deeply"):
        encode_json(deep)
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(ValueError, match="Circular"):
        encode_json(circle)


@pytest.mark.parametrize("raw", [b"", b"NaN", b"[1", b"01", b'1, "queue": "other"', b'"\xff"', b"[" * 5_000 + b"]" * 5_000])
def test_bytes_that_are_not_one_json_value_are_refused(raw: bytes) -> None:
    with pytest.raises(ValueError):
        encode_json(raw)


def test_a_number_beyond_a_float_is_exact() -> None:
    assert decode_json(b'{"e": 1e400, "f": 0.1, "s": "\\ud800"}') == {"e": Decimal("1e400"), "f": 0.1, "s": "\ud800"}


def test_members_that_are_raw_stand_as_they_are() -> None:
    assert encode_object({"a": 1, "p": msgspec.Raw(b"[1 , 2]")}) == b'{"a":1,"p":[1 , 2]}'
    assert encode_object({"p": msgspec.Raw(b"1")}) == b'{"p":1}'
    assert encode_object({}) == b"{}"


def test_instants_are_utc_rounded_up_and_need_a_zone() -> None:
    assert format_instant(datetime(2026, 11, 5, 3, 34, 12, tzinfo=UTC)) == "2026-11-05T03:34:12Z"
    assert format_instant(datetime(2026, 11, 5, 3, 34, 12, 250_001, tzinfo=UTC)) == "2026-11-05T03:34:12.251Z"
    east = timezone(timedelta(hours=2))
    assert format_instant(datetime(2026, 11, 5, 1, 0, 0, 999_999, tzinfo=east)) == "2026-11-04T23:00:01Z"
    with pytest.raises(ValueError, match="no time zone"):
        format_instant(datetime(2026, 11, 5))


def test_path_segments_are_escaped() -> None:
    assert path_segment("a/b+c:d%2F ü") == "a%2Fb%2Bc%3Ad%252F%20%C3%BC"
    for text in ("", ".", ".."):
        with pytest.raises(ValueError):
            path_segment(text)


async def test_a_payload_of_big_integers_and_nul_is_exact(server: FakeServer) -> None:
    payload = {"id": 3889108265204450030, "n": 123456789012345678901234567890, "f": 0.1, "s": "a\u0000b", "ü": "𝄞"}
    async with client_of(server) as client:
        job = await client.create("mail", payload)
        assert job.payload == payload
        (claimed,) = await client.claim("mail")
        assert claimed.payload == payload
        assert claimed.fencing_token > 2**60


async def test_raw_bytes_are_sent_and_given_back_byte_for_byte(server: FakeServer) -> None:
    raw = b'{ "b": 1e400,\t"a" : 1.0, "a": 2 }'
    async with client_of(server) as client:
        job = await client.create("mail", raw)
        assert bytes(job.payload_raw) == raw
        (claimed,) = await client.claim("mail")
        assert bytes(claimed.payload_raw) == raw


async def test_nothing_is_sent_that_must_not_be(server: FakeServer) -> None:
    async with client_of(server) as client:
        for bad in (
            client.create("mail", math.nan),
            client.create("mail", delay_s=math.nan),
            client.create("mail", retry={"initial_backoff_s": math.inf}),
            client.create("mail", run_at=datetime(2026, 1, 1)),
            client.create("mail", run_at=datetime.now(UTC), delay_s=1),
            client.create("mail", idempotency_key="a\u0000b"),
            client.create("mail", idempotency_key=""),
            client.create_many([NewJob("mail"), NewJob("mail", [math.nan])]),
            client.get(".."),
            client.claim("mail", jobs_max=101),
            client.complete("att_1", result=math.inf),
            client.complete("att_1", "retryable_failure", retry_after_s=math.nan),
            client.heartbeat("att_1", progress=math.nan),
            client.advance_clock(),
        ):
            with pytest.raises(ValueError):
                await bad
        with pytest.raises(TypeError):
            await client.create("mail", object())
    assert server.requests == []


# --- calls ----------------------------------------------------------------------------------------------------------------------


async def test_create_sends_every_field_and_only_what_was_given(server: FakeServer) -> None:
    at = datetime(2026, 11, 5, 3, 34, 12, 250_000, tzinfo=UTC)
    async with client_of(server) as client:
        await client.create(
            "mail", {"a": 1}, run_at=at, window_s=60, priority="bulk", retry=RetryPolicy(max_attempts=3), timeout_s=30,
            start_deadline_s=5, labels={"k": "v"}, idempotency_key="order-1",
        )  # fmt: skip
        await client.create("mail")
        await client.create("mail", None, delay_s=0.5)
    full, least, delayed = server.bodies("/v1/jobs")
    assert full == {
        "queue": "mail", "payload": {"a": 1}, "run_at": "2026-11-05T03:34:12.250Z",
        "timing": {"class": "flexible", "window_s": 60}, "priority": "bulk", "retry": {"max_attempts": 3}, "timeout_s": 30,
        "start_deadline_s": 5, "labels": {"k": "v"},
    }  # fmt: skip
    assert least == {"queue": "mail"}
    assert delayed == {"queue": "mail", "delay_s": 0.5}
    assert server.headers[0]["Idempotency-Key"] == "order-1"
    assert server.headers[0]["Accept-Encoding"] == "identity"


async def test_update_tells_a_null_payload_from_none_given(server: FakeServer) -> None:
    job = server.add("mail")
    async with client_of(server) as client:
        await client.update(job.job_id, priority="critical")
        await client.update(job.job_id, payload=None, window_s=0, if_version=7)
    first, second = server.bodies(job.job_id)
    assert first == {"priority": "critical"}
    assert second == {"payload": None, "timing": {"class": "precise"}}
    assert server.headers[1]["If-Match"] == '"v7"'


async def test_a_name_is_escaped_in_the_path(server: FakeServer) -> None:
    async with client_of(server) as client:
        assert (await client.queue("a/b:c%2F")).name == "a/b:c%2F"
    assert server.requests[0][1] == "/v1/queues/a%2Fb%3Ac%252F"


async def test_iterate_gives_each_job_once_over_pages(server: FakeServer) -> None:
    jobs = [server.add("mail") for _ in range(7)]
    server.add("other")
    async with client_of(server) as client:
        seen = [job.job_id async for job in client.iterate(queue="mail", status=["QUEUED", "DEAD"], labels={"k": "v"}, page_size=3)]
        assert seen == [job.job_id for job in jobs]
        page = await client.list(queue="mail", limit=2)
        assert len(page) == 2 and page.next_cursor == "2"
    assert server.count("/v1/jobs") == 4
    assert ("status", "DEAD") in server.queries[0] and ("label", "k:v") in server.queries[0]


async def test_the_other_calls_are_understood(server: FakeServer) -> None:
    job = server.add("mail")
    async with client_of(server) as client:
        assert (await client.get(job.job_id)).fire_at == datetime(2026, 1, 3, 4, 5, 6, 250_000, tzinfo=UTC)
        assert (await client.cancel(job.job_id)).is_final
        assert (await client.queue("mail")).depth["QUEUED"]["default"] == 2
        assert await client.clock() == datetime(2026, 1, 3, 4, 5, 6, 250_000, tzinfo=UTC)
        assert await client.ready()
        assert await client.redrive_all("mail", error_contains="x") == 3
        assert await client.redrive_all("mail", job_ids=["job_1"] * 2_001) == 9
    chosen = server.bodies("/v1/queues/mail/dead-letters:redrive")
    assert chosen[0] == {"all": True, "error_contains": "x"}
    assert [len(body["job_ids"]) for body in chosen[1:]] == [1_000, 1_000, 1]


async def test_attempts_are_extended_ended_and_given_back(server: FakeServer) -> None:
    for number in range(3):
        server.add("mail", number)
    async with client_of(server) as client:
        first, second, third = await client.claim(["mail", "other"], jobs_max=5, lease_s=30, worker="w-1")
        lease = await client.heartbeat(first.lease_token, progress={"done": 1})
        assert not lease.cancel_requested
        extended, stale = await client.heartbeat_many([Heartbeat(first.lease_token), Heartbeat("att_old")])
        assert isinstance(extended, Lease) and isinstance(stale, StaleLease)
        done, refused = await client.complete_many(
            [Completion(first.lease_token, "succeeded", result={"n": 2**80}), Completion("att_old", "succeeded")]
        )
        assert not isinstance(done, WheelschedError) and done.status == "SUCCEEDED"
        assert isinstance(refused, StaleLease)
        ended = await client.complete(second.lease_token, "fatal_failure", error="no such user")
        assert (ended.job_id, ended.status) == (second.job_id, "DEAD")
        await client.release(third.lease_token)
        with pytest.raises(StaleLease):
            await client.release(third.lease_token)
    assert server.jobs[first.job_id].reports[0]["result"] == {"n": 2**80}
    assert server.bodies("/v1/claims") == [{"max": 5, "wait_s": 0.0, "lease_s": 30, "worker": "w-1", "queues": ["mail", "other"]}]


# --- errors and repetitions -----------------------------------------------------------------------------------------------------


async def test_a_problem_becomes_the_error_of_its_code(server: FakeServer) -> None:
    server.script("/v1/jobs", Fault(422, code="idempotency-key-reused"), Fault(400, code="invalid-request"), Fault(418))
    async with client_of(server) as client:
        for kind in (IdempotencyKeyReused, InvalidRequest, WheelschedError):
            with pytest.raises(kind):
                await client.create("mail")
        with pytest.raises(NotFound):
            await client.get("job_none")
    assert server.count("/v1/jobs") == 3


@pytest.mark.parametrize("status", [503, 429, 504, 502, 0])
@pytest.mark.parametrize("then", [False, True])
async def test_create_is_repeated_with_one_key_until_it_is_answered(server: FakeServer, status: int, then: bool) -> None:
    """Whether or not the lost try was accepted, there is one job."""
    server.script("/v1/jobs", *[Fault(status, then=then)] * 2)
    async with client_of(server) as client:
        job = await client.create("mail", {"a": 1})
    assert list(server.jobs) == [job.job_id]
    assert server.count("/v1/jobs") == 3
    assert len({headers["Idempotency-Key"] for headers in server.headers}) == 1


async def test_create_without_a_key_is_not_repeated_when_its_outcome_is_unknown(server: FakeServer) -> None:
    server.script("/v1/jobs", Fault(503, code="unavailable"), Fault(0, then=True))
    async with client_of(server, auto_idempotency=False) as client:
        with pytest.raises(OutcomeUnknown):
            await client.create("mail")
    assert server.count("/v1/jobs") == 2
    assert "Idempotency-Key" not in server.headers[0]


async def test_repetitions_end_and_the_last_error_is_raised(server: FakeServer) -> None:
    server.always("/v1/jobs", Fault(429, code="quota-exceeded", headers={"Retry-After": "0"}))
    async with client_of(server, retries=2) as client:
        with pytest.raises(QuotaExceeded) as caught:
            await client.create("mail")
    assert caught.value.retry_after_s == 0
    assert server.count("/v1/jobs") == 3


async def test_a_long_retry_after_is_the_callers_to_wait_for(server: FakeServer) -> None:
    server.script("/v1/jobs", Fault(503, code="unavailable", headers={"Retry-After": "3600"}))
    async with client_of(server) as client:
        with pytest.raises(Unavailable) as caught:
            await client.create("mail")
    assert caught.value.retry_after_s == 3600
    assert server.count("/v1/jobs") == 1


async def test_a_claim_is_repeated_only_when_nothing_was_accepted(server: FakeServer) -> None:
    server.add("mail")
    server.script("/v1/queues/mail:claim", Fault(503, code="unavailable"), Fault(0, then=True))
    async with client_of(server) as client:
        with pytest.raises(OutcomeUnknown):
            await client.claim("mail")
    assert server.count("mail:claim") == 2


async def test_a_release_whose_answer_was_lost_is_not_an_error(server: FakeServer) -> None:
    server.add("mail")
    async with client_of(server) as client:
        (claimed,) = await client.claim("mail")
        server.script(":release", Fault(0, then=True))
        await client.release(claimed.lease_token)
    assert server.released == [claimed.job_id]


async def test_a_node_nobody_can_reach_is_unavailable_and_the_next_one_is_asked(server: FakeServer) -> None:
    gone = free_url()
    async with AsyncClient(gone, backoff=SOON, retries=1) as client:
        with pytest.raises(Unavailable, match="cannot connect"):
            await client.create("mail")
        assert not await client.ready()
    async with AsyncClient([gone, server.url], backoff=SOON) as client:
        await client.create("mail")
    assert len(server.jobs) == 1


async def test_a_cancelled_claim_hangs_up_and_the_connection_is_reset() -> None:
    """The server has to learn that an answer it just sent was not read: a reset says so, a clean close does not."""
    asked = asyncio.Event()
    ends: asyncio.Queue[BaseException | None] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        try:
            while await reader.read(1_000):
                pass
            ends.put_nowait(None)
        except ConnectionResetError as error:
            ends.put_nowait(error)
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener, AsyncClient(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}") as client:
        claim = asyncio.ensure_future(client.claim("mail", wait_s=20))
        await asked.wait()
        claim.cancel()
        assert isinstance(await asyncio.wait_for(ends.get(), 10), ConnectionResetError)


async def test_a_connection_whose_answer_was_read_is_closed_cleanly() -> None:
    """A worker that dies at work must not look like one that never got its jobs: those attempts have to count."""
    ends: asyncio.Queue[BaseException | None] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 11\r\n\r\n{"jobs":[]}')
        try:
            while await reader.read(1_000):
                pass
            ends.put_nowait(None)
        except ConnectionResetError as error:
            ends.put_nowait(error)
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        async with AsyncClient(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}") as client:
            assert await client.claim("mail") == ()
        assert await asyncio.wait_for(ends.get(), 10) is None


@given(st.integers(1, 10_000), st.randoms(use_true_random=False))
def test_backoff_is_between_nothing_and_its_cap(tries: int, rng: Random) -> None:
    backoff = Backoff(initial_s=0.1, cap_s=5)
    assert 0 <= backoff.wait_s(tries, rng) <= 5
    assert 7 <= backoff.wait_s(tries, rng, retry_after_s=7) <= 12


def test_retry_after_is_read_as_seconds_or_date_and_never_negative() -> None:
    assert parse_retry_after("3") == 3
    assert parse_retry_after("-5") == 0
    assert parse_retry_after("Thu, 01 Jan 1970 00:00:00 GMT") == 0
    later = parse_retry_after("Fri, 01 Jan 2100 00:00:00 GMT")
    assert later is not None and later > 1e9
    for text in (None, "", "soon", "nan", "1e400"):
        assert parse_retry_after(text) is None


# --- batches --------------------------------------------------------------------------------------------------------------------


async def test_create_many_splits_at_a_thousand_and_keeps_the_order(server: FakeServer) -> None:
    async with client_of(server) as client:
        jobs = await client.create_many(NewJob("mail", number) for number in range(2_001))
    assert [job.payload for job in jobs if isinstance(job, Job)] == list(range(2_001))
    assert [len(body["jobs"]) for body in server.bodies("/v1/jobs:batch")] == [1_000, 1_000, 1]


async def test_create_many_splits_at_32_mib(server: FakeServer) -> None:
    payload = b'"' + b"x" * (64 * 1024 - 2) + b'"'
    async with client_of(server) as client:
        await client.create_many(NewJob("mail", payload) for _ in range(600))
    sizes = [len(body) for _method, path, body in server.requests if path == "/v1/jobs:batch"]
    assert len(sizes) == 2 and max(sizes) <= BATCH_BYTES_MAX
    assert len(server.jobs) == 600


async def test_create_many_repeats_only_what_was_refused_for_the_moment(server: FakeServer) -> None:
    server.script("item b", Fault(503, code="unavailable"), Fault(429, code="quota-exceeded"))
    server.script("item c", Fault(400, code="invalid-request"))
    async with client_of(server) as client:
        with pytest.raises(BatchFailed, match="1 of 3 jobs") as caught:
            await client.create_many([{"queue": "a"}, {"queue": "b"}, {"queue": "c"}])
    a, b, c = caught.value.results
    assert isinstance(a, Job) and isinstance(b, Job) and isinstance(c, InvalidRequest)
    assert [[job["queue"] for job in body["jobs"]] for body in server.bodies("/v1/jobs:batch")] == [["a", "b", "c"], ["b"], ["b"]]


async def test_create_many_whose_answer_was_lost_creates_each_job_once(server: FakeServer) -> None:
    server.script("/v1/jobs:batch", Fault(0, then=True))
    async with client_of(server) as client:
        jobs = await client.create_many([NewJob("mail", number) for number in range(5)], spread_s=60)
    assert [job.job_id for job in jobs if isinstance(job, Job)] == list(server.jobs)
    assert server.bodies("/v1/jobs:batch")[0]["spread_s"] == 60


async def test_create_many_says_which_jobs_of_a_broken_batch_exist(server: FakeServer) -> None:
    async with client_of(server, retries=0) as client:
        server.script("/v1/jobs:batch", Fault(400, code="invalid-request"))
        results = await client.create_many([NewJob("mail")] * 3, return_errors=True)
    assert all(isinstance(result, InvalidRequest) for result in results) and len(results) == 3
    assert server.jobs == {}


# --- the facade -----------------------------------------------------------------------------------------------------------------


def test_the_blocking_client_is_used_from_many_threads(server: FakeServer) -> None:
    with Client(server.url) as client, ThreadPoolExecutor(8) as threads:
        jobs = list(threads.map(lambda number: client.create("mail", number), range(50)))
        assert len({job.job_id for job in jobs}) == 50
        assert len(list(client.iterate(queue="mail", page_size=20))) == 50
        assert client.get(jobs[7].job_id).payload == 7
        with pytest.raises(NotFound):
            client.get("job_none")
        with pytest.raises(ValueError):
            client.create("mail", math.nan)


def test_the_blocking_client_ends_its_thread_and_refuses_further_calls(server: FakeServer) -> None:
    client = Client(server.url)
    assert client.ready()
    assert any(thread.name == "wheelsched client" for thread in threading.enumerate())
    client.close()
    client.close()
    assert not any(thread.name == "wheelsched client" for thread in threading.enumerate())
    with pytest.raises(RuntimeError, match="closed"):
        client.ready()


def test_closing_the_blocking_client_ends_a_call_in_another_thread(server: FakeServer) -> None:
    client = Client(server.url)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(client.claim, "mail", wait_s=20)
        server.wait(lambda: server.polls == 1, "the poll")
        client.close()
        with pytest.raises(CancelledError):
            waiting.result(10)
    server.wait(lambda: server.hung_up == 1, "the hang-up")


def test_the_blocking_client_works_beside_a_running_loop(server: FakeServer) -> None:
    async def main() -> str:
        with Client(server.url) as client:
            return client.create("mail", json.loads("[1]")).job_id

    assert asyncio.run(main()) in server.jobs
