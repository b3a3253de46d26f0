"""Jobs over HTTP: fields, bounds, idempotency, batches, changes, history, listings."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import msgspec
import pytest
from fake_node import NOW_MS, FakeNode, serving

from wheelsched.api import schemas
from wheelsched.api.times import parse_instant
from wheelsched.core.errors import OutcomeUnknown, Unavailable
from wheelsched.core.ids import format_job_id, new_job_id
from wheelsched.core.limits import BATCH_BYTES_MAX
from wheelsched.model.commands import Create
from wheelsched.model.rows import JobSpec, encode_spec

NOW = "2027-01-15T08:00:00Z"
JOB_FIELDS = [
    "job_id", "queue", "status", "run_at", "fire_at", "timing", "priority", "target", "payload", "retry", "timeout_s", "labels",
    "version", "attempt", "created_at", "updated_at",
]  # fmt: skip
strict_job = msgspec.json.Decoder(schemas.Job).decode


async def test_a_job_comes_back_field_by_field() -> None:
    async with serving() as api:
        answer = await api.call("POST", "/v1/jobs", b'{"queue":"mail","payload": {"n" : 12345678901234567890, "e":1e400} }')
        job = answer.json
        assert answer.status == 201 and answer.headers["etag"] == '"v1"'
        assert answer.headers["location"] == f"/v1/jobs/{job['job_id']}"
        assert list(job) == JOB_FIELDS
        assert b'"payload":{"n" : 12345678901234567890, "e":1e400}' in answer.body
        del job["job_id"], job["payload"]
        assert job == {
            "queue": "mail", "status": "QUEUED", "run_at": NOW, "fire_at": NOW, "timing": {"class": "precise"}, "priority": "default",
            "target": {"type": "task"}, "retry": {"max_attempts": 6, "initial_backoff_s": 10, "max_backoff_s": 600}, "timeout_s": 3600,
            "labels": {}, "version": 1, "attempt": 0, "created_at": NOW, "updated_at": NOW,
        }  # fmt: skip
        again = await api.call("GET", answer.headers["location"])
        assert again.body == answer.body and again.headers["etag"] == '"v1"'


CREATES: list[dict[str, Any]] = [
    {}, {"delay_s": 0}, {"delay_s": 0.001}, {"delay_s": 31_622_400}, {"run_at": "2027-01-15T09:00:00.25+00:30"},
    {"run_at": "2001-01-01T00:00:00Z"}, {"run_at": "2028-01-16T08:00:00Z"},
    {"timing": {"class": "flexible", "window_s": 3600}}, {"timing": {"class": "flexible", "window_s": 1.5}, "delay_s": 77.5},
    {"timing": {"class": "flexible", "window_s": 86400}, "run_at": "2027-02-01T00:00:00Z"}, {"timing": {"class": "precise"}},
    {"priority": "critical"}, {"priority": "bulk"}, {"target": {"type": "task"}}, {"payload": None}, {"payload": "x"},
    {"retry": {"max_attempts": 1}}, {"retry": {"max_attempts": 100, "initial_backoff_s": 0.5, "max_backoff_s": 0}},
    {"timeout_s": 0.1}, {"timeout_s": 43_200}, {"start_deadline_s": 60}, {"labels": {str(n): "v" * 255 for n in range(16)}},
    {"labels": {"a:b": "c:d", "\u00fc": "\U0001f600"}},
]  # fmt: skip


@pytest.mark.parametrize("fields", CREATES)
async def test_the_answer_to_a_create_is_what_a_read_gives(fields: dict[str, Any]) -> None:
    """Single and in a batch, with and without a spread: the create's answer is built without reading, and may not differ."""
    async with serving() as api:
        single = await api.create(**fields)
        assert (await api.call("GET", f"/v1/jobs/{single['job_id']}")).json == single
        batch = await api.call("POST", "/v1/jobs:batch", {"jobs": [{"queue": "mail"} | fields], "spread_s": 600})
        result = batch.json["results"][0]
        assert result["status"] == 201
        assert (await api.call("GET", f"/v1/jobs/{result['job']['job_id']}")).json == result["job"]
        strict_job(json.dumps(single))


@pytest.mark.parametrize(
    ("fields", "pointer", "part"),
    [
        ({"queue": "a/b"}, "/queue", '"/" (U+002F)'),
        ({"queue": 5}, "/queue", "queue 5 is an integer; it has to be a string"),
        ({"queue": None}, "/queue", "null"),
        ({"frobnicate": 1}, "/frobnicate", "frobnicate is not a field"),
        ({"idempotency_key": "k"}, "/idempotency_key", "header Idempotency-Key"),
        ({"run_at": NOW, "delay_s": 1}, "/run_at", "both"),
        ({"run_at": "2027-01-15T08:00:00"}, "/run_at", "no offset"),
        ({"run_at": 1793849652}, "/run_at", "string"),
        ({"delay_s": -0.001}, "/delay_s", "delay_s -0.001 is below 0"),
        ({"delay_s": 0.0001}, "/delay_s", "finer than 0.001"),
        ({"delay_s": True}, "/delay_s", "true is true or false; it has to be a number"),
        ({"delay_s": "5"}, "/delay_s", "a number"),
        ({"timing": {"class": "flexible"}}, "/timing/window_s", "missing"),
        ({"timing": {"class": "flexible", "window_s": 86_401}}, "/timing/window_s", "above 86400"),
        ({"timing": {"class": "loose"}}, "/timing/class", "precise, flexible"),
        ({"timing": {"class": "precise", "window_s": 5}}, "/timing/window_s", "not a field"),
        ({"priority": "urgent"}, "/priority", "critical, default, bulk"),
        ({"target": {"type": "http", "url": "https://example.org"}}, "/target/type", "only task is supported by this version"),
        ({"target": {"type": "task", "url": "x"}}, "/target/url", "not a field"),
        ({"payload_ref": "blob_1"}, "/payload_ref", "no"),
        ({"retry": {"max_attempts": 0}}, "/retry/max_attempts", "retry.max_attempts 0 is below 1"),
        ({"retry": {"max_attempts": 101}}, "/retry/max_attempts", "above 100"),
        ({"retry": {"max_attempts": 1.5}}, "/retry/max_attempts", "integer"),
        ({"retry": {"max_attempts": True}}, "/retry/max_attempts", "integer"),
        ({"retry": {"jitter": 1}}, "/retry/jitter", "not a field"),
        ({"timeout_s": 0.05}, "/timeout_s", "below 0.1"),
        ({"timeout_s": 43_200.001}, "/timeout_s", "above 43200"),
        ({"labels": {str(n): "" for n in range(17)}}, "/labels", "17 members, above 16"),
        ({"labels": {"a": 1}}, "/labels/a", "string"),
        ({"labels": {"": "x"}}, "/labels", "0 characters"),
        ({"labels": {"k" * 64: "x"}}, "/labels", "64 characters"),
        ({"labels": {"k": "v" * 256}}, "/labels", "256 characters"),
    ],
)
async def test_a_bad_field_is_named_alone_and_in_a_batch(fields: dict[str, Any], pointer: str, part: str) -> None:
    async with serving() as api:
        answer = await api.call("POST", "/v1/jobs", {"queue": "mail"} | fields)
        problem = answer.json
        assert answer.status == 400 and answer.headers["content-type"] == "application/problem+json"
        assert (problem["code"], problem["type"]) == ("invalid-request", "urn:wheelsched:problem:invalid-request")
        assert pointer in answer.pointers and part in problem["detail"], problem
        assert problem["request_id"] == answer.headers["x-request-id"]
        if "idempotency_key" in fields:
            return
        batch = await api.call("POST", "/v1/jobs:batch", {"jobs": [{"queue": "mail"}, {"queue": "mail"} | fields, {"queue": "mail"}]})
        assert [result["status"] for result in batch.json["results"]] == [201, 400, 201]
        assert batch.json["results"][1]["problem"]["errors"] == problem["errors"]


@pytest.mark.parametrize("fields", [{"delay_s": 31_622_400.001}, {"delay_s": 1e300}, {"run_at": "2028-01-16T08:00:00.001Z"}])
async def test_too_far_ahead_has_its_own_code(fields: dict[str, Any]) -> None:
    async with serving() as api:
        answer = await api.call("POST", "/v1/jobs", {"queue": "mail"} | fields)
        assert (answer.status, answer.json["code"]) == (400, "run-at-too-far")


@pytest.mark.parametrize("letter", ["x", "\u20ac", "\U0001f600"])
async def test_the_payload_limit_counts_bytes_as_received_and_is_inclusive(letter: str) -> None:
    async with serving() as api:
        for over, status in ((-1, 201), (0, 201), (1, 413)):
            text = letter.encode()
            payload = b'"%b%b"' % (text * ((65_534 + over) // len(text)), b"x" * ((65_534 + over) % len(text)))
            assert len(payload) == 65_536 + over
            answer = await api.call("POST", "/v1/jobs", b'{"queue":"mail","payload":%b}' % payload)
            assert answer.status == status
            if status == 413:
                assert answer.json["code"] == "payload-too-large"
        spaces = b"[" + b" " * 65_534 + b"]"
        assert (await api.call("POST", "/v1/jobs", b'{"queue":"mail","payload":%b}' % spaces)).status == 201


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"", "empty"),
        (b"   ", "empty"),
        (b"[]", "an object"),
        (b"null", "an object"),
        (b'"x"', "an object"),
        (b'{"queue":"mail"', "truncated"),
        (b'{"queue":"mail"}x', "trailing"),
        (b'\xef\xbb\xbf{"queue":"mail"}', "byte 0"),
        (b'{"queue":"mail","payload":NaN}', "NaN at byte 26"),
        (b'{"queue":"ma\xffil"}', "UTF-8"),
        (b'{"queue":"mail","payload":"\xff"}', "UTF-8"),
        (b"[" * 20_000, "deeper than 128"),
        (b'{"queue":"mail","payload":' + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b"}", "deeper than 128"),
        (b"{}", "queue is missing"),
    ],
)
async def test_a_bad_body_is_told_its_fault(body: bytes, part: str) -> None:
    async with serving() as api:
        answer = await api.call("POST", "/v1/jobs", body)
        assert answer.status == 400 and part in answer.json["detail"], answer.body
        assert (await api.call("GET", "/livez")).status == 200


async def test_the_same_key_and_body_answer_with_the_same_job() -> None:
    async with serving() as api:
        first = await api.call("POST", "/v1/jobs", b'{"queue":"mail","payload":{"a":1,"b":2}}', Idempotency_Key="k")
        again = await api.call("POST", "/v1/jobs", b'{ "payload" : {"b":2, "a":1}, "queue":"mail" }', Idempotency_Key="k")
        assert (first.status, again.status) == (201, 200)
        assert again.headers["idempotent-replayed"] == "true" and "idempotent-replayed" not in first.headers
        assert again.json == first.json and again.headers["location"] == first.headers["location"]
        for body in (b'{"queue":"mail","payload":{"a":1,"b":3}}', b'{"queue":"mail","payload":{"a":1.0,"b":2}}', b'{"queue":"post"}'):
            other = await api.call("POST", "/v1/jobs", body, Idempotency_Key="k")
            assert (other.status, other.json["code"]) == (422, "idempotency-key-reused")
        batch = await api.call("POST", "/v1/jobs:batch", {"jobs": [{"queue": "mail", "payload": {"a": 1, "b": 2}, "idempotency_key": "k"}]})
        assert batch.json["results"] == [{"status": 200, "job": first.json}]


async def test_a_replay_shows_the_job_as_it_is_now() -> None:
    async with serving() as api:
        first = await api.call("POST", "/v1/jobs", {"queue": "mail"}, Idempotency_Key="k")
        await api.claim()
        again = await api.call("POST", "/v1/jobs", {"queue": "mail"}, Idempotency_Key="k")
        assert (again.status, again.json["status"], again.headers["etag"]) == (200, "RUNNING", '"v2"')
        assert again.json["job_id"] == first.json["job_id"]


async def test_fifty_parallel_creates_with_one_key_make_one_job() -> None:
    """With the log held up until all of them have been sent."""
    node = FakeNode()
    all_in = asyncio.Event()
    count = 0

    async def hold(commands: object) -> None:
        nonlocal count
        count += 1
        if count == 50:
            all_in.set()
        await all_in.wait()

    node.before_propose = hold
    async with serving(node) as api:
        answers = await asyncio.gather(*(api.call("POST", "/v1/jobs", {"queue": "mail"}, Idempotency_Key="k") for _ in range(50)))
        assert sorted(answer.status for answer in answers) == [200] * 49 + [201]
        assert len({answer.json["job_id"] for answer in answers}) == 1


@pytest.mark.parametrize("key", ["", "a b", "k" * 256, "\u00fc", "a\tb"])
async def test_a_key_is_visible_ascii(key: str) -> None:
    async with serving() as api:
        single = await api.call("POST", "/v1/jobs", {"queue": "mail"}, Idempotency_Key=key)
        assert single.status == 400 and "visible ASCII" in single.json["detail"]
        batch = await api.call("POST", "/v1/jobs:batch", {"jobs": [{"queue": "mail", "idempotency_key": key}]})
        assert batch.json["results"][0]["problem"]["errors"][0]["pointer"] == "/idempotency_key"


async def test_a_batch_follows_the_rules_of_single_creates() -> None:
    """100 items, of which 40 share keys with each other and 10 with existing ones: one proposal, results in order."""
    async with serving() as api:
        for n in range(10):
            await api.call("POST", "/v1/jobs", {"queue": "mail", "payload": n}, Idempotency_Key=f"old-{n}")
        before = api.node.proposals
        jobs = [{"queue": "mail", "payload": n, "idempotency_key": f"old-{n}"} for n in range(10)]
        jobs += [{"queue": "mail", "payload": n // 2, "idempotency_key": f"new-{n // 2}"} for n in range(40)]
        jobs += [{"queue": "mail", "payload": -n} for n in range(50)]
        results = (await api.call("POST", "/v1/jobs:batch", {"jobs": jobs})).json["results"]
        assert [result["status"] for result in results] == [200] * 10 + [201, 200] * 20 + [201] * 50
        assert [result["job"]["payload"] for result in results] == [job["payload"] for job in jobs]
        assert api.node.proposals == before + 1
        reused = await api.call("POST", "/v1/jobs:batch", {"jobs": [{"queue": "mail", "payload": 9, "idempotency_key": "old-1"}]})
        assert reused.json["results"][0]["status"] == 422


async def test_a_spread_places_jobs_in_its_window() -> None:
    async with serving() as api:
        answer = await api.call("POST", "/v1/jobs:batch", {"jobs": [{"queue": "mail", "delay_s": 60}] * 200, "spread_s": 600})
        ats = [parse_instant(result["job"]["fire_at"]) - NOW_MS for result in answer.json["results"]]
        assert min(ats) >= 60_000 and max(ats) < 660_000 and len(set(ats)) > 190


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        (b'{"jobs":[]}', "/jobs"), (b'{"jobs":{}}', "/jobs"), (b"{}", "/jobs"), (b'{"jobs":[{"queue":"a"}],"x":1}', "/x"),
        (b'{"jobs":[{"queue":"a"}],"spread_s":86401}', "/spread_s"),
        (b'{"jobs":[{"queue":"a"}],"jobs":[{"queue":"b"}]}', "/jobs"), (b'{"jobs":[{"queue":"a"}],"spread_s":1,"spread_s":2}', "/spread_s"),
    ],
)  # fmt: skip
async def test_a_bad_envelope_of_a_batch_is_a_400(body: bytes, pointer: str) -> None:
    async with serving() as api:
        answer = await api.call("POST", "/v1/jobs:batch", body)
        assert answer.status == 400 and answer.pointers == [pointer], answer.body
        assert api.node.proposals == 0


async def test_faults_of_single_items_stay_theirs() -> None:
    async with serving() as api:
        items = b'{"queue":"a","queue":"b"},5,null,{"queue":"a","payload":{"x":1,"x":2}},{"queue":"a","payload":"%b"}' % (b"x" * 65_535)
        answer = await api.call("POST", "/v1/jobs:batch", b'{"jobs":[%b]}' % items)
        assert [result["status"] for result in answer.json["results"]] == [400, 400, 400, 201, 413]
        assert b'"payload":{"x":1,"x":2}' in answer.body
        deep = b'{"jobs":[{"queue":"a"},{"queue":"a","payload":%b}]}' % (b"[" * 126 + b"]" * 126)
        assert (await api.call("POST", "/v1/jobs:batch", deep)).status == 400
        header = await api.call("POST", "/v1/jobs:batch", {"jobs": [{"queue": "a"}]}, Idempotency_Key="k")
        assert header.status == 400 and "idempotency_key" in header.json["detail"]


async def test_a_batch_may_have_32_mebibytes_and_no_more() -> None:
    async with serving() as api:
        item = b'{"queue":"a","payload":"%b"}' % (b"x" * 60_000)
        body = b'{"jobs":[%b' % b",".join([item] * 500) + b"]"
        body += b" " * (BATCH_BYTES_MAX - len(body) - 1) + b"}"
        answer = await api.call("POST", "/v1/jobs:batch", body)
        assert answer.status == 200 and {result["status"] for result in answer.json["results"]} == {201}
        assert (await api.call("POST", "/v1/jobs:batch", body + b" ")).status == 413


# --- change ---------------------------------------------------------------------------------------------------------------------


async def test_a_patch_changes_what_it_names() -> None:
    async with serving() as api:
        job = await api.create(delay_s=600, payload=1, labels={"a": "b"})
        path = f"/v1/jobs/{job['job_id']}"
        changes = {
            "delay_s": 60, "payload": [2], "priority": "bulk", "retry": {"max_attempts": 2}, "timeout_s": 5, "labels": {"c": "d"},
        }  # fmt: skip
        answer = await api.call("PATCH", path, changes, If_Match='"v1"')
        assert answer.status == 200 and answer.headers["etag"] == '"v2"'
        assert answer.json == job | {
            "run_at": "2027-01-15T08:01:00Z", "fire_at": "2027-01-15T08:01:00Z", "payload": [2], "priority": "bulk",
            "retry": job["retry"] | {"max_attempts": 2}, "timeout_s": 5, "labels": {"c": "d"}, "version": 2,
        }  # fmt: skip
        flexible = await api.call("PATCH", path, {"timing": {"class": "flexible", "window_s": 100}})
        assert flexible.json["timing"] == {"class": "flexible", "window_s": 100} and flexible.json["run_at"] == "2027-01-15T08:01:00Z"
        assert (await api.call("PATCH", path, {"timing": {"class": "precise"}})).json["fire_at"] == "2027-01-15T08:01:00Z"
        assert (await api.call("PATCH", path, {})).json["version"] == 4


@pytest.mark.parametrize(
    ("tag", "status"),
    [
        ('"v1"', 200),
        ("*", 200),
        ('"v9", "v1"', 200),
        ('"v2"', 412),
        ('W/"v1"', 412),
        ('"abc"', 412),
        ('"v9","v8"', 412),
        ("v1", 400),
        ("", 400),
        ('"v0"', 412),
        ('"v99999999999999999999"', 412),
    ],
)
async def test_if_match_guards_a_change(tag: str, status: int) -> None:
    async with serving() as api:
        job = await api.create(delay_s=600)
        answer = await api.call("PATCH", f"/v1/jobs/{job['job_id']}", {"priority": "bulk"}, If_Match=tag)
        assert answer.status == status, answer.body
        if status == 412:
            assert answer.json["code"] == "version-mismatch"


async def test_what_is_past_scheduled_is_not_changed() -> None:
    async with serving() as api:
        job = await api.create()
        answer = await api.call("PATCH", f"/v1/jobs/{job['job_id']}", {"priority": "bulk"})
        assert (answer.status, answer.json["code"]) == (409, "job-not-scheduled")
        for fields in ({"queue": "b"}, {"target": {"type": "task"}}, {"delay_s": 1, "run_at": NOW}, {"delay_s": 0.0001}, {"labels": None}):
            assert (await api.call("PATCH", f"/v1/jobs/{job['job_id']}", fields)).status == 400


async def test_cancel_by_state() -> None:
    async with serving() as api:
        waiting, ready = await api.create(delay_s=60), await api.create()
        for job in (waiting, ready):
            for _ in range(2):
                answer = await api.call("DELETE", f"/v1/jobs/{job['job_id']}")
                assert (answer.status, answer.json["status"]) == (200, "CANCELLED")
        running = await api.create()
        (claimed,) = await api.claim()
        for _ in range(2):
            answer = await api.call("DELETE", f"/v1/jobs/{running['job_id']}")
            assert (answer.status, answer.json["status"]) == (202, "CANCEL_REQUESTED")
        beat = await api.call("POST", f"/v1/attempts/{claimed['lease_token']}:heartbeat")
        assert beat.json["cancel_requested"] is True
        done = await api.call("POST", f"/v1/attempts/{claimed['lease_token']}:complete", {"outcome": "succeeded"})
        assert done.json == {"job_id": running["job_id"], "status": "SUCCEEDED"}
        answer = await api.call("DELETE", f"/v1/jobs/{running['job_id']}")
        assert (answer.status, answer.json["code"]) == (409, "job-finished")


@pytest.mark.parametrize("call", [("GET", ""), ("PATCH", ""), ("DELETE", ""), ("GET", "/attempts"), ("GET", "/events"), ("POST", ":run"),
                                  ("POST", ":redrive"), ("POST", ":discard")])  # fmt: skip
async def test_no_such_job_is_a_404(call: tuple[str, str]) -> None:
    method, tail = call
    async with serving() as api:
        for name in ("job_" + "0" * 26, "job_xyz", "JOB_" + "0" * 26, "", "%ff" if tail != "" else "x", "a%2Fb"):
            answer = await api.call(method, f"/v1/jobs/{name}{tail}", {} if method in ("PATCH", "POST") else None)
            assert (answer.status, answer.json["code"]) in ((404, "not-found"), (400, "invalid-request")), name
            assert answer.status == 404 or name == "%ff"


async def test_run_redrive_and_discard() -> None:
    async with serving() as api:
        job = await api.create(delay_s=600, retry={"max_attempts": 1})
        path = f"/v1/jobs/{job['job_id']}"
        assert (await api.call("POST", f"{path}:redrive")).json["code"] == "job-finished"
        for body in (None, {}):
            answer = await api.call("POST", f"{path}:run", body)
            assert (answer.status, answer.json["status"], answer.json["version"]) == (200, "QUEUED", 2)
        assert (await api.call("POST", f"{path}:run", {"now": True})).status == 400
        (claimed,) = await api.claim()
        await api.call("POST", f"/v1/attempts/{claimed['lease_token']}:complete", {"outcome": "fatal_failure", "error": {"m": "x"}})
        dead = (await api.call("GET", path)).json
        assert (dead["status"], dead["last_error"]) == ("DEAD", {"m": "x"}) and "finished_at" in dead
        assert (await api.call("POST", f"{path}:run")).json["code"] == "job-finished"
        again = await api.call("POST", f"{path}:redrive")
        assert (again.status, again.json["status"], again.json["attempt"]) == (200, "QUEUED", 1)
        (second,) = await api.claim()
        assert second["idempotency_key"] == claimed["idempotency_key"] and second["attempt"] == 2
        await api.call("POST", f"/v1/attempts/{second['lease_token']}:complete", {"outcome": "retryable_failure"})
        assert (await api.call("POST", f"{path}:discard")).status == 200
        assert (await api.call("GET", path)).status == 404
        assert (await api.call("POST", f"{path}:discard")).status == 404


# --- history --------------------------------------------------------------------------------------------------------------------


async def test_events_tell_every_transition() -> None:
    """A retry, a release, a changed mind, and a success: all in order, versions without a gap."""
    async with serving() as api:
        job = await api.create(delay_s=10)
        path = f"/v1/jobs/{job['job_id']}"
        await api.call("PATCH", path, {"delay_s": 20})
        await api.node.advance_clock(NOW_MS + 20_000)
        (first,) = await api.claim(worker="w1")
        await api.call("POST", f"/v1/attempts/{first['lease_token']}:release")
        await api.claim(worker="w2", lease_s=5)
        await api.node.advance_clock(NOW_MS + 25_000)
        retrying = (await api.call("GET", path)).json
        await api.call("POST", f"{path}:run")
        (third,) = await api.claim(worker="w3")
        await api.call("POST", f"/v1/attempts/{third['lease_token']}:complete", {"outcome": "succeeded", "result": 1})
        events = (await api.call("GET", f"{path}/events")).json["events"]
        final = (await api.call("GET", path)).json
        moves = [(event["from"], event["to"], event["attempt"], event["version"], event["actor"]) for event in events]
        head = [
            (None, "SCHEDULED", 0, 1, None),
            ("SCHEDULED", "SCHEDULED", 0, 2, None),
            ("SCHEDULED", "QUEUED", 0, 2, "scheduler"),
            ("QUEUED", "RUNNING", 1, 3, "w1"),
            ("RUNNING", "QUEUED", 1, 4, "w1"),
            ("QUEUED", "RUNNING", 1, 5, "w2"),
            ("RUNNING", "RETRYING", 1, 6, "scheduler"),
        ]
        assert moves[: len(head)] == head
        assert moves[-2:] == [("QUEUED", "RUNNING", 2, final["version"] - 1, "w3"), ("RUNNING", "SUCCEEDED", 2, final["version"], "w3")]
        assert all(before["to"] == after["from"] for before, after in itertools.pairwise(events))
        assert events[2]["at"] == "2027-01-15T08:00:20Z" == final["fire_at"]
        assert [event["at"] for event in events] == sorted(event["at"] for event in events)
        msgspec.json.decode(json.dumps({"events": events}), type=schemas.Events)
        assert retrying["last_error"]["code"] == "lease_expired"
        attempts = (await api.call("GET", f"{path}/attempts")).json["attempts"]
        assert [(item["attempt"], item["worker"], item["outcome"]) for item in attempts] == [
            (1, "w1", "released"), (1, "w2", "lease_expired"), (2, "w3", "succeeded"),
        ]  # fmt: skip
        assert attempts[1]["error"]["code"] == "lease_expired" and attempts[2]["error"] is None
        assert list(attempts[0]) == ["attempt", "worker", "started_at", "ended_at", "lease_expires_at", "outcome", "error"]


@pytest.mark.parametrize("cut", range(8))
async def test_events_end_where_the_job_is(cut: int) -> None:
    """The story of every prefix of one life: its last event leads to the status of now, its last version is the job's."""
    async with serving() as api:
        job = await api.create(delay_s=10, retry={"max_attempts": 2, "initial_backoff_s": 5})
        path = f"/v1/jobs/{job['job_id']}"

        async def complete(outcome: str) -> None:
            (claimed,) = await api.claim()
            await api.call("POST", f"/v1/attempts/{claimed['lease_token']}:complete", {"outcome": outcome, "retry_after_s": 5})

        steps = [
            lambda: api.node.advance_clock(NOW_MS + 10_000), lambda: complete("retryable_failure"),
            lambda: api.node.advance_clock(NOW_MS + 20_000), lambda: complete("retryable_failure"),
            lambda: api.call("POST", f"{path}:redrive"), lambda: api.claim(), lambda: api.call("DELETE", path),
        ]  # fmt: skip
        for step in steps[:cut]:
            await step()
        now = (await api.call("GET", path)).json
        events = (await api.call("GET", f"{path}/events")).json["events"]
        assert (events[-1]["to"], events[-1]["version"], events[-1]["attempt"]) == (now["status"], now["version"], now["attempt"])
        assert all(before["to"] == after["from"] for before, after in itertools.pairwise(events))
        assert {event["version"] for event in events} == set(range(1, now["version"] + 1))
        attempts = (await api.call("GET", f"{path}/attempts")).json["attempts"]
        assert len(attempts) == now["attempt"]


async def test_a_skipped_job_says_why() -> None:
    async with serving() as api:
        job = await api.create(start_deadline_s=5)
        await api.node.advance_clock(NOW_MS + 6_000)
        assert await api.claim() == []
        skipped = (await api.call("GET", f"/v1/jobs/{job['job_id']}")).json
        assert (skipped["status"], skipped["last_error"]["code"]) == ("SKIPPED", "start_deadline")
        events = (await api.call("GET", f"/v1/jobs/{job['job_id']}/events")).json["events"]
        assert [event["to"] for event in events] == ["SCHEDULED", "QUEUED", "SKIPPED"]


# --- listings -------------------------------------------------------------------------------------------------------------------


async def test_pages_give_each_job_once() -> None:
    """All of one commit share their instant; others come and go meanwhile."""
    async with serving() as api:
        made = await api.call("POST", "/v1/jobs:batch", {"jobs": [{"queue": "mail", "delay_s": 60}] * 100})
        wanted = {result["job"]["job_id"] for result in made.json["results"]}
        seen: list[str] = []
        cursor = ""
        while True:
            page = (await api.call("GET", f"/v1/jobs?queue=mail&limit=7{cursor}")).json
            seen += (job["job_id"] for job in page["jobs"])
            await api.create(delay_s=60)
            if page["next_cursor"] is None:
                break
            cursor = f"&cursor={page['next_cursor']}"
            if len(seen) > 300:
                break
        assert wanted <= set(seen) and len(seen) == len(set(seen))


async def test_a_listing_filters() -> None:
    async with serving() as api:
        a = await api.create(labels={"k": "v:w", "n": "1"}, delay_s=10)
        b = await api.create(queue="post", labels={"k": "x"}, delay_s=20)
        c = await api.create()

        async def ids(query: str) -> list[str]:
            answer = await api.call("GET", f"/v1/jobs?{query}")
            assert answer.status == 200, answer.body
            return [job["job_id"] for job in answer.json["jobs"]]

        assert await ids("") == [c["job_id"], a["job_id"], b["job_id"]]
        assert await ids("queue=post") == [b["job_id"]]
        assert await ids("label=k:v%3Aw&label=n:1") == [a["job_id"]]
        assert await ids("status=QUEUED") == [c["job_id"]]
        assert await ids("status=QUEUED&status=SCHEDULED&queue=mail") == [c["job_id"], a["job_id"]]
        assert await ids(f"from={a['fire_at']}&to={b['fire_at']}") == [a["job_id"]]
        assert await ids("from=2027-01-15T09:00:10%2B01:00&to=2027-01-15T08:00:11Z") == [a["job_id"]]
        assert await ids("schedule=nightly") == []


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=1001",
        "limit=x",
        "limit=1.0",
        "limit=-1",
        "limit=",
        "limit=1&limit=2",
        "cursor=x",
        "cursor=",
        "cursor=%C3%BC",
        "foo=1",
        "status=DONE",
        "status=DISCARDED",
        "status=",
        "label=k",
        "label=:v",
        "from=yesterday",
        "to=2027-01-15T08:00:00",
        "queue=a/b",
        "queue=",
        "from=2027-01-15T08:00:00+01:00",
        "schedule=a%20b",
        "queue=%ff",
    ],
)
async def test_a_bad_query_is_a_400(query: str) -> None:
    async with serving() as api:
        answer = await api.call("GET", f"/v1/jobs?{query}")
        assert (answer.status, answer.json["code"]) == (400, "invalid-request"), answer.body
        assert query.partition("=")[0] in answer.json["detail"] or "%ff" in query


async def test_a_cursor_changed_or_of_another_filter_is_refused() -> None:
    async with serving() as api:
        for _ in range(3):
            await api.create()
        cursor = (await api.call("GET", "/v1/jobs?limit=1&queue=mail")).json["next_cursor"]
        assert (await api.call("GET", f"/v1/jobs?limit=2&queue=mail&cursor={cursor}")).status == 200
        for query in (f"cursor={cursor}", f"queue=mail&status=QUEUED&cursor={cursor}", f"queue=post&cursor={cursor}"):
            assert (await api.call("GET", f"/v1/jobs?{query}")).status == 400
        for index in range(len(cursor)):
            changed = cursor[:index] + ("A" if cursor[index] != "A" else "B") + cursor[index + 1 :]
            assert (await api.call("GET", f"/v1/jobs?queue=mail&cursor={changed}")).status == 400
        assert (await api.call("GET", f"/v1/queues/mail/dead-letters?cursor={cursor}")).status == 400
        assert (await api.call("GET", f"/v1/queues?cursor={cursor}")).status == 400


# --- what the node says ---------------------------------------------------------------------------------------------------------


async def test_overload_refuses_creates_and_claims_and_nothing_else() -> None:
    async with serving() as api:
        job = await api.create()
        (claimed,) = await api.claim()
        api.node.admission = Unavailable("the node is overloaded", retry_after_s=1.5)
        token = claimed["lease_token"]
        for path, body in (
            ("/v1/jobs", {"queue": "mail"}), ("/v1/jobs:batch", {"jobs": [{"queue": "mail"}]}), ("/v1/queues/mail:claim", {}),
            ("/v1/claims", {"queues": ["mail"]}),
        ):  # fmt: skip
            answer = await api.call("POST", path, body)
            assert (answer.status, answer.json["code"], answer.headers["retry-after"]) == (503, "unavailable", "2")
        assert (await api.call("POST", f"/v1/attempts/{token}:heartbeat")).status == 200
        assert (await api.call("POST", f"/v1/attempts/{token}:complete", {"outcome": "succeeded"})).status == 200
        assert (await api.call("GET", f"/v1/jobs/{job['job_id']}")).status == 200


async def test_errors_of_the_node_are_problems_and_bugs_do_not_leak() -> None:
    node = FakeNode()
    error: BaseException = OutcomeUnknown("the leader went away")

    async def fail(commands: object) -> None:
        raise error

    node.before_propose = fail
    async with serving(node) as api:
        answer = await api.call("POST", "/v1/jobs", {"queue": "mail"})
        assert (answer.status, answer.json["code"]) == (504, "timeout")
        error = KeyError("secret detail")
        answer = await api.call("POST", "/v1/jobs", {"queue": "mail"}, X_Request_Id="my-id")
        assert (answer.status, answer.json["code"], answer.json["request_id"]) == (500, "internal", "my-id")
        assert b"secret" not in answer.body
        assert (await api.call("GET", "/livez")).status == 200


async def test_another_tenants_job_looks_like_none() -> None:
    node = FakeNode()
    job_id = new_job_id(NOW_MS, node.rng)
    node.apply([Create(job_id, "other", "mail", 1, -1, 0, 0, 0, encode_spec(JobSpec()), b"1")])
    async with serving(node) as api:
        assert (await api.call("GET", f"/v1/jobs/{format_job_id(job_id)}")).status == 404
        assert (await api.call("DELETE", f"/v1/jobs/{format_job_id(job_id)}")).status == 404
        assert (await api.call("GET", "/v1/jobs")).json == {"jobs": [], "next_cursor": None}


async def test_traceparent_reaches_the_attempt_or_is_ignored() -> None:
    good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with serving() as api:
        for given in (good, "00-" + "0" * 32 + "-b7ad6b7169203331-01", "ff" + good[2:], good.upper(), good + "x" * 600, "x"):
            await api.call("POST", "/v1/jobs", {"queue": "mail"}, traceparent=given)
        jobs = await api.claim(max=100)
        assert [job.get("traceparent") for job in jobs].count(good) == 1 and sum("traceparent" in job for job in jobs) == 1
