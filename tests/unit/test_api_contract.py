"""Sentences of API.md that a reader outside found untrue of the running server, one test each."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from fake_node import serving

from wheelsched.api import openapi, schemas
from wheelsched.core import limits
from wheelsched.core.limits import REQUEST_BYTES_MAX


@pytest.mark.parametrize("size", [REQUEST_BYTES_MAX + 1, 8 * REQUEST_BYTES_MAX])
async def test_a_client_that_sends_too_large_a_body_first_and_reads_then_still_reads_413(size: int) -> None:
    """urllib, requests and http.client send all of it before they look at an answer: a close with the body unread is a broken pipe."""
    async with serving() as api:
        wire = await api.wire()
        wire.send(b"POST /v1/jobs HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % size)
        piece = b" " * 65_536
        for start in range(0, size, len(piece)):
            wire.send(piece[: size - start])
            await wire.writer.drain()
        answer = await wire.answer()
        assert (answer.status, answer.json["code"]) == (413, "payload-too-large")
        assert answer.headers["connection"] == "close"


@pytest.mark.parametrize(
    ("path", "field", "item"),
    [
        ("/v1/jobs:batch", "jobs", {"queue": "mail"}),
        ("/v1/attempts:heartbeat", "heartbeats", {"token": "x"}),
        ("/v1/attempts:complete", "completions", {"token": "x", "outcome": "succeeded"}),
    ],
)
async def test_a_batch_of_1_001_items_is_too_large_and_one_of_1_000_is_not(path: str, field: str, item: dict[str, Any]) -> None:
    async with serving() as api:
        assert (await api.call("POST", path, {field: [item] * 1_000})).status == 200
        before = api.node.proposals
        answer = await api.call("POST", path, {field: [item] * 1_001})
        assert (answer.status, answer.json["code"], answer.pointers) == (413, "payload-too-large", [f"/{field}"])
        assert api.node.proposals == before


async def test_a_completion_repeated_after_the_redrive_has_the_same_answer() -> None:
    async with serving() as api:
        await api.call("POST", "/v1/jobs", {"queue": "mail"})
        (job,) = await api.claim()
        end = {"outcome": "fatal_failure", "error": "no"}
        first = await api.call("POST", f"/v1/attempts/{job['lease_token']}:complete", end)
        assert first.json == {"job_id": job["job_id"], "status": "DEAD"}
        await api.call("POST", f"/v1/jobs/{job['job_id']}:redrive")
        again = await api.call("POST", f"/v1/attempts/{job['lease_token']}:complete", end)
        assert (again.status, again.body) == (200, first.body)
        batch = {"completions": [{"token": job["lease_token"]} | end]}
        result = (await api.call("POST", "/v1/attempts:complete", batch)).json["results"][0]
        assert result == {"status": 200, "job_id": job["job_id"], "job_status": "DEAD"}
        await api.claim()
        late = await api.call("POST", f"/v1/attempts/{job['lease_token']}:complete", end)
        assert (late.status, late.json["code"]) == (409, "stale-lease")


def test_the_document_states_every_bound_that_is_checked() -> None:
    document = msgspec.json.decode(openapi.document())
    components = document["components"]["schemas"]
    assert components["JobCreate"]["properties"]["labels"]["additionalProperties"]["maxLength"] == limits.LABEL_VALUE_LENGTH_MAX
    for model, field in ((schemas.JobBatch, "jobs"), (schemas.HeartbeatBatch, "heartbeats"), (schemas.CompletionBatch, "completions")):
        array = components[model.__name__]["properties"][field]
        assert (array["minItems"], array["maxItems"]) == (1, limits.BATCH_ITEMS_MAX)


def test_the_document_says_that_a_call_which_makes_a_queue_may_meet_the_quota() -> None:
    paths = msgspec.json.decode(openapi.document())["paths"]
    for method, path in (
        ("post", "/v1/jobs"), ("post", "/v1/jobs:batch"), ("put", "/v1/queues/{queue}"), ("post", "/v1/queues/{queue}:pause"),
        ("post", "/v1/queues/{queue}:resume"), ("post", "/v1/queues/{queue}:claim"), ("post", "/v1/claims"),
    ):  # fmt: skip
        assert "429" in paths[path][method]["responses"], path
