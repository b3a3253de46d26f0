"""Queues and dead letters over HTTP."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from fake_node import NOW_MS, Serving, serving

from wheelsched.api import schemas

DEFAULTS = {
    "max_concurrency": None, "rate_per_s": None, "lease_s": 45, "retention_s": 2_592_000,
    "weights": {"critical": 70, "default": 25, "bulk": 5},
}  # fmt: skip


async def test_a_queue_exists_from_its_first_job() -> None:
    async with serving() as api:
        assert (await api.call("GET", "/v1/queues/mail")).json["code"] == "not-found"
        await api.create(priority="bulk", delay_s=5)
        await api.create()
        await api.claim()
        answer = await api.call("GET", "/v1/queues/mail")
        view = answer.json
        msgspec.json.decode(answer.body, type=schemas.Queue)
        assert list(view) == ["name", "depth", "oldest_ready_age_s", "running", "lateness", "paused", "settings"]
        assert view["depth"]["SCHEDULED"] == {"critical": 0, "default": 0, "bulk": 1} and view["depth"]["RUNNING"]["default"] == 1
        assert "DISCARDED" not in view["depth"]
        assert (view["running"], view["paused"], view["settings"]) == (1, False, DEFAULTS)


async def test_put_replaces_and_what_is_left_out_returns_to_its_default() -> None:
    async with serving() as api:
        await api.call("POST", "/v1/queues/mail:pause")
        wanted = {
            "max_concurrency": 5,
            "rate_per_s": 0.5,
            "lease_s": 1.5,
            "retention_s": 60,
            "weights": {"critical": 1, "default": 1, "bulk": 1},
        }
        answer = await api.call("PUT", "/v1/queues/mail", wanted)
        assert answer.status == 200 and answer.json["settings"] == wanted and answer.json["paused"] is True
        assert (await api.call("PUT", "/v1/queues/mail", {"weights": {"bulk": 10}})).json["settings"] == DEFAULTS | {
            "weights": {"critical": 70, "default": 25, "bulk": 10}
        }
        assert (await api.call("PUT", "/v1/queues/mail", DEFAULTS)).json["settings"] == DEFAULTS
        assert (await api.call("PUT", "/v1/queues/mail", {})).json["settings"] == DEFAULTS


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"max_concurrency": 0}, "/max_concurrency"),
        ({"max_concurrency": 1.5}, "/max_concurrency"),
        ({"rate_per_s": 0}, "/rate_per_s"),
        ({"lease_s": 0.5}, "/lease_s"),
        ({"lease_s": None}, "/lease_s"),
        ({"retention_s": -1}, "/retention_s"),
        ({"paused": True}, "/paused"),
        ({"weights": {"urgent": 1}}, "/weights/urgent"),
        ({"weights": {"bulk": 0}}, "/weights/bulk"),
        ({"lease_s": 1.00001}, "/lease_s"),
    ],
)
async def test_bad_settings_are_told_their_fault(body: dict[str, Any], pointer: str) -> None:
    async with serving() as api:
        answer = await api.call("PUT", "/v1/queues/mail", body)
        assert answer.status == 400 and answer.pointers == [pointer]


@pytest.mark.parametrize("name", ["a%2Fb", "a+b", "a%252Fb", "q%3Aclaim", "%C3%BCn%C3%AFcode", "..", "x" * 300, "%FF"])
@pytest.mark.parametrize(
    ("method", "tail"), [("GET", ""), ("PUT", ""), ("POST", ":pause"), ("GET", "/dead-letters"), ("POST", "/dead-letters:redrive")]
)
async def test_a_bad_name_is_refused_everywhere(name: str, method: str, tail: str) -> None:
    async with serving() as api:
        answer = await api.call(method, f"/v1/queues/{name}{tail}", {} if method != "GET" else None)
        assert (answer.status, answer.json["code"]) == (400, "invalid-request")


async def test_pause_and_resume() -> None:
    async with serving() as api:
        await api.create()
        paused = await api.call("POST", "/v1/queues/mail:pause", {})
        assert (paused.status, paused.json["paused"]) == (200, True)
        assert await api.claim() == []
        assert (await api.call("POST", "/v1/queues/mail:resume")).json["paused"] is False
        assert len(await api.claim()) == 1
        assert (await api.call("POST", "/v1/queues/mail:pause", {"for_s": 5})).status == 400


async def test_queues_are_listed_in_pages() -> None:
    async with serving() as api:
        for name in ("c", "a", "b"):
            await api.create(queue=name)
        seen, cursor = [], ""
        for _ in range(3):
            page = (await api.call("GET", f"/v1/queues?limit=2{cursor}")).json
            seen += [view["name"] for view in page["queues"]]
            if page["next_cursor"] is None:
                break
            cursor = f"&cursor={page['next_cursor']}"
        assert seen == ["a", "b", "c"]


async def dead(api: Serving, count: int, **fields: Any) -> list[str]:
    ids = []
    for n in range(count):
        await api.create(**fields)
        (claimed,) = await api.claim(fields.get("queue", "mail"))
        error: object = f"boom <{n}>" if n % 2 else {"code": "timeout", "n": n}
        path = f"/v1/attempts/{claimed['lease_token']}:complete"
        assert (await api.call("POST", path, {"outcome": "fatal_failure", "error": error})).status == 200
        ids.append(claimed["job_id"])
    return ids


async def test_dead_letters_are_listed_with_their_error() -> None:
    async with serving() as api:
        assert (await api.call("GET", "/v1/queues/mail/dead-letters")).status == 404
        ids = await dead(api, 3)
        await api.create()
        page = await api.call("GET", "/v1/queues/mail/dead-letters?limit=2")
        assert {job["status"] for job in page.json["jobs"]} == {"DEAD"} and page.json["next_cursor"]
        rest = await api.call("GET", f"/v1/queues/mail/dead-letters?limit=2&cursor={page.json['next_cursor']}")
        jobs = page.json["jobs"] + rest.json["jobs"]
        assert sorted(job["job_id"] for job in jobs) == sorted(ids) and rest.json["next_cursor"] is None
        assert {json.dumps(job["last_error"]) for job in jobs} == {
            '"boom <1>"',
            '{"code": "timeout", "n": 0}',
            '{"code": "timeout", "n": 2}',
        }


async def test_dead_letters_are_redriven_and_discarded_by_choice() -> None:
    async with serving() as api:
        ids = await dead(api, 6)
        (other,) = await dead(api, 1, queue="post")
        path = "/v1/queues/mail/dead-letters"

        async def send(verb: str, body: Any) -> Any:
            answer = await api.call("POST", f"{path}:{verb}", body)
            assert answer.status == 200, answer.body
            return answer.json

        assert await send("redrive", {"job_ids": [ids[0], ids[0], other, "job_x", "job_" + "0" * 26]}) == {"redriven": 1}
        assert await send("redrive", {"all": True, "error_contains": "boom <3"}) == {"redriven": 1}
        assert await send("redrive", {"all": True, "error_contains": '"timeout"', "limit": 1, "spread_s": 600}) == {"redriven": 1}
        assert await send("discard", {"job_ids": [ids[0]]}) == {"discarded": 0}
        assert await send("discard", {"all": True, "limit": 2}) == {"discarded": 2}
        assert await send("redrive", {"all": True}) == {"redriven": 1}
        assert await send("redrive", {"all": True}) == {"redriven": 0}
        assert (await api.call("GET", f"/v1/jobs/{other}")).json["status"] == "DEAD"


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("redrive", {}),
        ("redrive", {"all": False}),
        ("redrive", {"all": True, "job_ids": ["x"]}),
        ("redrive", {"job_ids": []}),
        ("redrive", {"job_ids": ["x"], "limit": 5}),
        ("redrive", {"all": True, "limit": 0}),
        ("redrive", {"all": True, "spread_s": -1}),
        ("discard", {"all": True, "spread_s": 5}),
        ("discard", {"all": True, "error_contains": ""}),
        ("redrive", {"job_ids": ["x"] * 1_001}),
    ],
)
async def test_a_bad_choice_of_dead_letters_is_a_400(verb: str, body: Any) -> None:
    async with serving() as api:
        answer = await api.call("POST", f"/v1/queues/mail/dead-letters:{verb}", body)
        assert (answer.status, answer.json["code"]) == (400, "invalid-request")


async def test_many_dead_letters_go_in_slices() -> None:
    async with serving() as api:
        await api.call("POST", "/v1/jobs:batch", {"jobs": [{"queue": "mail"}] * 700})
        for _ in range(7):
            ends = [{"token": job["lease_token"], "outcome": "fatal_failure"} for job in await api.claim(max=100)]
            assert (await api.call("POST", "/v1/attempts:complete", {"completions": ends})).status == 200
        assert (await api.call("POST", "/v1/queues/mail/dead-letters:redrive", {"all": True})).json == {"redriven": 700}
        assert api.node.clock.wall_ms() == NOW_MS
