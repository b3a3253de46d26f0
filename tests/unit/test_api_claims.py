"""Claims, attempts and hanging up over HTTP."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
import uvloop
from fake_node import NOW_MS, FakeNode, Serving, serving

from wheelsched.api import schemas
from wheelsched.core.ids import format_token


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run on asyncio's loop and on uvloop: transports differ in when and how they tell that a connection ended."""

    @functools.wraps(test)
    def run(*args: Any, loop_factory: Callable[[], asyncio.AbstractEventLoop], **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(test(*args, **kwargs))

    signature = inspect.signature(test)
    factory = inspect.Parameter("loop_factory", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), factory])  # type: ignore[attr-defined]
    del run.__wrapped__  # type: ignore[attr-defined]
    factories = [pytest.param(asyncio.SelectorEventLoop, id="asyncio"), pytest.param(uvloop.new_event_loop, id="uvloop")]
    return pytest.mark.parametrize("loop_factory", factories)(run)


async def test_a_claimed_job_has_the_fields_of_the_contract() -> None:
    async with serving() as api:
        answer = await api.call(
            "POST", "/v1/jobs", b'{"queue":"mail","payload": {"a" :1} ,"labels":{"k":"v"},"delay_s":0.25,"timeout_s":1.5}'
        )
        job = answer.json
        await api.node.advance_clock(NOW_MS + 250)
        claimed = await api.call("POST", "/v1/queues/mail:claim", {"max": 10, "lease_s": 45, "wait_s": 20, "worker": "host-7"})
        assert b'"payload":{"a" :1},' in claimed.body
        (item,) = claimed.json["jobs"]
        token = item.pop("lease_token")
        assert token.startswith("att_") and len(token) == 60
        assert item == {
            "job_id": job["job_id"], "queue": "mail", "attempt": 1, "lease_expires_at": "2027-01-15T08:00:45.250Z",
            "idempotency_key": f"{job['job_id']}@2027-01-15T08:00:00.250Z", "fencing_token": 1, "payload": {"a": 1},
            "run_at": "2027-01-15T08:00:00.250Z", "fire_at": "2027-01-15T08:00:00.250Z", "timeout_s": 1.5, "max_attempts": 6,
            "labels": {"k": "v"},
        }  # fmt: skip
        msgspec.json.decode(claimed.body, type=schemas.Claimed)
        running = (await api.call("GET", f"/v1/jobs/{job['job_id']}")).json
        assert (running["status"], running["attempt"], running["started_at"]) == ("RUNNING", 1, "2027-01-15T08:00:00.250Z")


async def test_claims_take_what_they_ask_for() -> None:
    async with serving() as api:
        assert await api.claim() == []
        for queue in ("a", "b", "b"):
            await api.create(queue=queue)
        answer = await api.call("POST", "/v1/claims", {"queues": ["b", "a", "b"], "max": 2})
        assert [job["queue"] for job in answer.json["jobs"]] == ["b", "b"]
        assert len(await api.claim("a")) == 1
        assert (await api.call("POST", "/v1/queues/a:claim")).json == {"jobs": []}


@pytest.mark.parametrize(
    ("path", "body", "pointer"),
    [
        ("/v1/queues/mail:claim", {"max": 0}, "/max"), ("/v1/queues/mail:claim", {"max": 101}, "/max"),
        ("/v1/queues/mail:claim", {"max": True}, "/max"), ("/v1/queues/mail:claim", {"lease_s": 0.5}, "/lease_s"),
        ("/v1/queues/mail:claim", {"lease_s": 43_201}, "/lease_s"), ("/v1/queues/mail:claim", {"lease_s": 1.0001}, "/lease_s"),
        ("/v1/queues/mail:claim", {"wait_s": 60.5}, "/wait_s"), ("/v1/queues/mail:claim", {"wait_s": -1}, "/wait_s"),
        ("/v1/queues/mail:claim", {"worker": ""}, "/worker"), ("/v1/queues/mail:claim", {"worker": "a b"}, "/worker"),
        ("/v1/queues/mail:claim", {"queues": ["a"]}, "/queues"), ("/v1/queues/a%2Fb:claim", {}, ""), ("/v1/queues/q%3Aclaim:claim", {}, ""),
        ("/v1/queues/%C3%BC:claim", {}, ""), ("/v1/queues/..:claim", {}, ""), ("/v1/queues/%00:claim", {}, ""),
        ("/v1/claims", {}, "/queues"), ("/v1/claims", {"queues": []}, "/queues"), ("/v1/claims", {"queues": ["a", "b/c"]}, "/queues/1"),
        ("/v1/claims", {"queues": ["a", 5]}, "/queues/1"),
    ],
)  # fmt: skip
async def test_a_bad_claim_is_told_its_fault(path: str, body: dict[str, Any], pointer: str) -> None:
    async with serving() as api:
        answer = await api.call("POST", path, body)
        assert answer.status == 400 and answer.pointers == [pointer], answer.body


async def test_heartbeats() -> None:
    async with serving() as api:
        job = await api.create()
        (claimed,) = await api.claim(lease_s=30)
        path = f"/v1/attempts/{claimed['lease_token']}:heartbeat"
        await api.node.advance_clock(NOW_MS + 10_000)
        assert (await api.call("POST", path)).json == {"lease_expires_at": "2027-01-15T08:00:40Z", "cancel_requested": False}
        beat = await api.call("POST", path, b'{"lease_s":60,"progress":{"n" : 1e400}}')
        assert beat.json["lease_expires_at"] == "2027-01-15T08:01:10Z"
        shown = await api.call("GET", f"/v1/jobs/{job['job_id']}")
        assert b'"progress":{"n" : 1e400}' in shown.body
        for size, status in ((4_096, 200), (4_097, 413)):
            answer = await api.call("POST", path, b'{"progress":"%b"}' % (b"x" * (size - 2)))
            assert answer.status == status
        assert (await api.call("POST", path, {"lease_s": 50_000})).json["detail"] == (
            "lease_s 50000 is above 43200; heartbeat to extend a lease instead"
        )


@pytest.mark.parametrize("verb", ["heartbeat", "complete", "release"])
async def test_a_token_that_is_not_the_current_attempt_is_stale(verb: str) -> None:
    async with serving() as api:
        await api.create(retry={"initial_backoff_s": 0, "max_backoff_s": 0})
        (old,) = await api.claim()
        await api.node.advance_clock(NOW_MS + 46_000)
        (new,) = await api.claim()
        body = {"outcome": "succeeded"} if verb == "complete" else {}
        for token in (old["lease_token"], "att_x", "x", "att_" + "0" * 46, format_token(b"\xff" * 16, 1, 1), "%20"):
            answer = await api.call("POST", f"/v1/attempts/{token}:{verb}", body)
            assert (answer.status, answer.json["code"]) == (409, "stale-lease"), token
        assert (await api.call("POST", f"/v1/attempts/{new['lease_token']}:{verb}", body)).status == 200


async def test_completions() -> None:
    async with serving() as api:
        for outcome, status in (("succeeded", "SUCCEEDED"), ("fatal_failure", "DEAD"), ("cancelled", "CANCELLED")):
            job = await api.create(queue=outcome)
            (claimed,) = await api.claim(outcome)
            path = f"/v1/attempts/{claimed['lease_token']}:complete"
            for _ in range(2):
                answer = await api.call("POST", path, {"outcome": outcome, "error": "e", "result": [1]})
                assert answer.json == {"job_id": job["job_id"], "status": status}
            assert (await api.call("POST", path, {"outcome": "retryable_failure"})).status == 409
        await api.create()
        (claimed,) = await api.claim()
        answer = await api.call(
            "POST", f"/v1/attempts/{claimed['lease_token']}:complete", {"outcome": "retryable_failure", "retry_after_s": 2.5}
        )
        assert (answer.json["status"], answer.json["next_attempt_at"]) == ("RETRYING", "2027-01-15T08:00:02.500Z")


@pytest.mark.parametrize(
    ("body", "status", "pointer"),
    [
        (b"{}", 400, "/outcome"), (b'{"outcome":"done"}', 400, "/outcome"), (b'{"outcome":"succeeded","error":5}', 400, "/error"),
        (b'{"outcome":"succeeded","error":null}', 400, "/error"), (b'{"outcome":"succeeded","error":["x"]}', 400, "/error"),
        (b'{"outcome":"retryable_failure","retry_after_s":-1}', 400, "/retry_after_s"), (b'{"outcome":"succeeded","x":1}', 400, "/x"),
        (b'{"outcome":"succeeded","result":"%b"}' % (b"x" * 65_535), 413, "/result"),
        (b'{"outcome":"succeeded","result":"%b"}' % (b"x" * 65_534), 200, ""),
    ],
)  # fmt: skip
async def test_a_bad_completion_is_told_its_fault(body: bytes, status: int, pointer: str) -> None:
    async with serving() as api:
        await api.create()
        (claimed,) = await api.claim()
        answer = await api.call("POST", f"/v1/attempts/{claimed['lease_token']}:complete", body)
        assert answer.status == status
        if pointer:
            assert answer.pointers == [pointer]


@pytest.mark.parametrize(
    "error",
    [
        b'"short \\u0000 \\ud800"',
        b'{"code" : "x"}',
        b'"%b"' % (b"x" * 10_000),
        '"{}"'.format("\u20ac" * 5_000).encode(),
        b'"%b"' % (b"\\n" * 5_000),
        b'{"code":"x","trace":"%b","n":12345678901234567890}' % (b"y\\n" * 9_000),
        b'{"a":[%b]}' % b",".join([b"1"] * 5_000),
        b'{"a":"%b","b":"%b"}' % (b"x" * 5_000, b"y" * 4_000),
        b'"%b"' % (b"\\ud800" * 3_000),
    ],
)
async def test_an_error_is_kept_or_cut_to_4_kib_of_json(error: bytes) -> None:
    async with serving() as api:
        job = await api.create()
        (claimed,) = await api.claim()
        answer = await api.call(
            "POST", f"/v1/attempts/{claimed['lease_token']}:complete", b'{"outcome":"fatal_failure","error":%b}' % error
        )
        assert answer.status == 200, answer.body
        shown = (await api.call("GET", f"/v1/jobs/{job['job_id']}")).body
        kept = shown[shown.index(b'"last_error":') + 13 : -1]
        if len(error) <= 4_096:
            assert kept == error
        else:
            assert 4_000 < len(kept) <= 4_096
            value, cut = json.loads(error), json.loads(kept)
            if isinstance(cut, dict):
                assert set(cut) == set(value) and cut.get("n") == value.get("n")


async def test_a_release_gives_the_job_back_uncounted() -> None:
    async with serving() as api:
        job = await api.create()
        (claimed,) = await api.claim()
        path = f"/v1/attempts/{claimed['lease_token']}:release"
        assert (await api.call("POST", path)).json == {"job_id": job["job_id"], "status": "QUEUED"}
        assert (await api.call("POST", path)).json["code"] == "stale-lease"
        (again,) = await api.claim()
        assert again["attempt"] == 1 and again["fencing_token"] > claimed["fencing_token"]
        await api.call("DELETE", f"/v1/jobs/{job['job_id']}")
        assert (await api.call("POST", f"/v1/attempts/{again['lease_token']}:release")).json["status"] == "CANCELLED"


async def test_batches_of_heartbeats_and_completions() -> None:
    async with serving() as api:
        for _ in range(3):
            await api.create()
        a, b, c = (job["lease_token"] for job in await api.claim(max=3))
        beats = [{"token": a}, {"token": "x"}, {"token": b, "lease_s": 100, "progress": 1}, {"token": c, "lease_s": 0}, 5, {"lease_s": 5}]
        answer = await api.call("POST", "/v1/attempts:heartbeat", {"heartbeats": beats})
        results = answer.json["results"]
        assert [result["status"] for result in results] == [200, 409, 200, 400, 400, 400]
        assert results[0] == {"status": 200, "lease_expires_at": "2027-01-15T08:00:45Z", "cancel_requested": False}
        assert results[2]["lease_expires_at"] == "2027-01-15T08:01:40Z" and results[1]["problem"]["code"] == "stale-lease"
        msgspec.json.decode(answer.body, type=schemas.HeartbeatResults)
        ends = [
            {"token": a, "outcome": "succeeded"},
            {"token": b, "outcome": "retryable_failure", "retry_after_s": 1},
            {"token": a, "outcome": "succeeded"},
            {"token": "x", "outcome": "succeeded"},
            {"token": c},
            {"token": c, "outcome": "fatal_failure", "error": 1},
        ]
        before = api.node.proposals
        answer = await api.call("POST", "/v1/attempts:complete", {"completions": ends})
        results = answer.json["results"]
        assert [result["status"] for result in results] == [200, 200, 200, 409, 400, 400]
        assert [result.get("job_status") for result in results[:3]] == ["SUCCEEDED", "RETRYING", "SUCCEEDED"]
        assert results[1]["next_attempt_at"] == "2027-01-15T08:00:01Z" and api.node.proposals == before + 1
        msgspec.json.decode(answer.body, type=schemas.CompletionResults)
        for path, field in (("heartbeat", "heartbeats"), ("complete", "completions")):
            for bad in ([], {}):
                assert (await api.call("POST", f"/v1/attempts:{path}", {field: bad})).pointers == [f"/{field}"]


# --- waiting and hanging up -----------------------------------------------------------------------------------------------------


async def waiting_claim(api: Serving, **fields: Any):  # type: ignore[no-untyped-def]
    wire = await api.wire()
    body = json.dumps({"wait_s": 60, "max": 5} | fields).encode()
    api.node.waiting.clear()
    wire.request("POST", "/v1/queues/mail:claim", body, Content_Type="application/json")
    await api.node.waiting.wait()
    return wire


@on_both_loops
async def test_a_claim_waits_for_the_first_job() -> None:
    async with serving() as api:
        wire = await waiting_claim(api)
        job = await api.create()
        assert [item["job_id"] for item in (await wire.answer()).json["jobs"]] == [job["job_id"]]


@pytest.mark.parametrize("how", ["close", "reset", "half_close"])
@on_both_loops
async def test_a_client_that_hangs_up_while_it_waits_cancels_the_claim(how: str) -> None:
    async with serving() as api:
        wire = await waiting_claim(api)
        if how == "close":
            wire.close()
        elif how == "reset":
            wire.reset()
        else:
            wire.writer.write_eof()
        await api.node.given_back_event.wait()
        assert api.node.cancelled_claims == 1
        job = await api.create()
        assert [item["job_id"] for item in await api.claim()] == [job["job_id"]]


class SlowNode(FakeNode):
    """Claims at once, and hands over when told: in between, the client can do what it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.claimed = asyncio.Event()
        self.hand_over = asyncio.Event()

    async def claim(self, *args: Any, **kwargs: Any) -> Any:
        jobs = await super().claim(*args, **kwargs)
        self.claimed.set()
        await self.hand_over.wait()
        return jobs


@on_both_loops
async def test_a_client_that_resets_with_the_answer_unread_gets_nothing() -> None:
    async with serving() as api:
        await api.create()
        wire = await api.wire()
        wire.writer.transport.pause_reading()
        wire.request("POST", "/v1/queues/mail:claim", b"{}")
        while not (await api.call("GET", "/v1/jobs?status=RUNNING")).json["jobs"]:
            pass
        wire.reset()
        await api.node.given_back_event.wait()
        assert len(api.node.given_back) == 1
        (again,) = await api.claim()
        assert again["attempt"] == 1


@on_both_loops
async def test_a_client_that_closed_before_the_answer_arrived_gets_nothing() -> None:
    """The server writes before its loop has seen the end of file, so the answer meets a closed socket: the reset that it draws comes
    when nobody reads any more."""
    node = SlowNode()
    async with serving(node) as api:
        await api.create()
        client = socket.create_connection(("127.0.0.1", api.server.port))
        client.sendall(b"POST /v1/queues/mail:claim HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}")
        await node.claimed.wait()
        # The handler goes on in the next turn; the end of file, there at once, is seen only after it.
        node.hand_over.set()
        client.close()
        await node.given_back_event.wait()
        assert len(node.given_back) == 1 and node.cancelled_claims == 0
        assert api.server.statistics().given_back == 1


@on_both_loops
async def test_a_clean_close_after_the_answer_was_read_keeps_the_jobs() -> None:
    async with serving() as api:
        job = await api.create()
        wire = await api.wire()
        wire.request("POST", "/v1/queues/mail:claim", b"{}")
        assert len((await wire.answer()).json["jobs"]) == 1
        wire.close()
        await wire.writer.wait_closed()
        # The server ends the connection once it has judged the end of file.
        await api.server.wait_without_connections()
        assert api.node.given_back == []
        assert (await api.call("GET", f"/v1/jobs/{job['job_id']}")).json["status"] == "RUNNING"


@on_both_loops
async def test_a_reset_after_the_next_request_keeps_the_jobs() -> None:
    async with serving() as api:
        job = await api.create()
        wire = await api.wire()
        wire.request("POST", "/v1/queues/mail:claim", b"{}")
        await wire.answer()
        wire.request("GET", "/livez")
        await wire.answer()
        wire.reset()
        await api.server.wait_without_connections()
        assert api.node.given_back == []
        assert (await api.call("GET", f"/v1/jobs/{job['job_id']}")).json["status"] == "RUNNING"


@on_both_loops
async def test_an_answer_that_ends_the_connection_is_watched_too() -> None:
    async with serving() as api:
        await api.create()
        wire = await api.wire()
        wire.writer.transport.pause_reading()
        wire.request("POST", "/v1/queues/mail:claim", b"{}", Connection="close")
        while not (await api.call("GET", "/v1/jobs?status=RUNNING")).json["jobs"]:
            pass
        wire.reset()
        await api.node.given_back_event.wait()


@on_both_loops
async def test_a_large_answer_that_is_not_read_goes_back() -> None:
    """More than socket buffers hold: the server waits for the client to read, and the client goes away instead."""
    async with serving() as api:
        batch = {"jobs": [{"queue": "mail", "payload": "x" * 60_000}] * 100}
        assert (await api.call("POST", "/v1/jobs:batch", batch)).status == 200
        wire = await api.wire()
        wire.writer.transport.pause_reading()
        wire.request("POST", "/v1/queues/mail:claim", b'{"max":100}')
        while not (await api.call("GET", "/v1/jobs?status=RUNNING&limit=1")).json["jobs"]:
            pass
        wire.close()
        await api.node.given_back_event.wait()
        assert len(api.node.given_back) == 100


@on_both_loops
async def test_draining_ends_waiting_claims_empty_handed() -> None:
    async with serving() as api:
        wire = await waiting_claim(api)
        await api.server.drain(5)
        answer = await wire.answer()
        assert (answer.status, answer.json) == (200, {"jobs": []})
        assert answer.headers["connection"] == "close"
        with pytest.raises(ConnectionRefusedError):
            await api.call("GET", "/livez")
