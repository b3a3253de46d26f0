"""Schedules over HTTP, on a real node in memory: definitions, their errors, their runs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import pytest
from msgspec.structs import replace
from scheduling import TEMPLATE, scheduling

from wheelsched.api import openapi
from wheelsched.api.times import parse_instant
from wheelsched.core import limits
from wheelsched.core.errors import VersionMismatch
from wheelsched.cron import jitter_of
from wheelsched.model.schedules import Definition

DAILY = {"cron": "0 9 * * *", "time_zone": "Europe/Berlin"}
FULL_TEMPLATE = {
    "queue": "reports", "timing": {"class": "flexible", "window_s": 60}, "priority": "bulk", "target": {"type": "task"},
    "payload": {"n": 12345678901234567890, "s": "ä"}, "retry": {"max_attempts": 2, "initial_backoff_s": 0.5, "max_backoff_s": 3},
    "timeout_s": 30, "start_deadline_s": 900, "labels": {"team": "a"},
}  # fmt: skip
FULL = {
    **DAILY, "job_template": FULL_TEMPLATE, "jitter_s": 600, "missed_runs": {"policy": "run_all", "starting_deadline_s": 3_600},
    "overlap": "forbid", "max_concurrency": 3, "start_at": "2026-02-01T00:00:00Z", "end_at": "2027-01-01T00:00:00Z",
    "paused": False, "shadow": True,
}  # fmt: skip
WRITTEN = ("cron", "time_zone", "every_s", "anchor_at", "job_template", "jitter_s", "missed_runs", "overlap", "max_concurrency",
           "start_at", "end_at", "paused", "shadow")  # fmt: skip


def written(schedule: dict[str, Any]) -> dict[str, Any]:
    """What a schedule is, without what has become of it."""
    return {name: schedule[name] for name in WRITTEN if name in schedule}


# --- create ---------------------------------------------------------------------------------------------------------------------


async def test_a_schedule_is_made_with_its_defaults_and_tells_its_next_runs() -> None:
    async with scheduling() as api:
        answer = await api.call("POST", "/v1/schedules", {"name": "report", **DAILY, "job_template": TEMPLATE})
        assert (answer.status, answer.headers["location"], answer.headers["etag"]) == (201, "/v1/schedules/report", '"v1"')
        made = answer.json
        assert made.pop("schedule_id").startswith("sch_")
        assert made.pop("time_zone_data")
        assert made == {
            "name": "report", "cron": "0 9 * * *", "time_zone": "Europe/Berlin",
            "job_template": {
                "queue": "reports", "timing": {"class": "precise"}, "priority": "default", "target": {"type": "task"}, "payload": None,
                "retry": {"max_attempts": 6, "initial_backoff_s": 10, "max_backoff_s": 600}, "timeout_s": 3_600, "labels": {},
            },
            "jitter_s": 0, "missed_runs": {"policy": "run_latest", "starting_deadline_s": None}, "overlap": "allow",
            "max_concurrency": None, "start_at": None, "end_at": None, "paused": False, "shadow": False,
            "next_runs": [f"2026-01-{day:02}T08:00:00Z" for day in range(6, 11)],
            "next_runs_local": [f"2026-01-{day:02}T09:00:00+01:00" for day in range(6, 11)],
            "warnings": ["minute 0 is when most schedules run; if any minute will do, write H for one that is yours"],
            "last_run": None, "skipped": {}, "version": 1, "created_at": "2026-01-05T10:00:00Z", "updated_at": "2026-01-05T10:00:00Z",
        }  # fmt: skip
        read = await api.call("GET", "/v1/schedules/report")
        assert (read.body, read.headers["etag"]) == (answer.body, '"v1"')


async def test_every_field_comes_back_as_it_was_sent_and_can_be_sent_again() -> None:
    async with scheduling() as api:
        made = await api.create("report", **FULL)
        assert written(made) == FULL
        assert await api.put("report", **written(made)) == made


async def test_a_payload_comes_back_byte_for_byte_in_the_template_and_in_its_runs() -> None:
    payload = b'{"b":1, "a":  12345678901234567890,"b":1e400, "s":"\\ud800\\u00e4"}'
    body = b'{"name":"raw","every_s":60,"job_template":{"queue":"reports","payload":' + payload + b"}}"
    async with scheduling() as api:
        for path in ("/v1/schedules", "/v1/schedules:batch"):
            whole = body if path == "/v1/schedules" else b'{"schedules":[' + body + b"]}"
            answer = await api.call("POST", path, whole)
            assert answer.status in (200, 201), answer.body
            assert b'"payload":' + payload + b',"retry"' in answer.body
        assert b'"payload":' + payload in (await api.call("GET", "/v1/schedules/raw/runs")).body
        await api.patch("raw", every_s=120)
        assert b'"payload":' + payload in (await api.call("GET", "/v1/schedules/raw")).body


async def test_an_interval_counts_from_when_it_was_set_unless_told_from_when() -> None:
    async with scheduling() as api:
        made = await api.create("poll", every_s=90.5)
        assert (made["anchor_at"], made["next_runs"][0]) == ("2026-01-05T10:00:00Z", "2026-01-05T10:01:30.500Z")
        assert made["time_zone_data"] is None
        assert "cron" not in made and "time_zone" not in made
        await api.to("2026-01-05T10:01:00Z")
        assert await api.put("poll", every_s=90.5) == made, "the same interval goes on"
        moved = await api.put("poll", every_s=60)
        assert (moved["anchor_at"], moved["version"]) == ("2026-01-05T10:01:00Z", 2)
        set_ = await api.put("poll", every_s=60, anchor_at="2026-01-05T11:00:30+01:00")
        assert (set_["anchor_at"], set_["next_runs"][0]) == ("2026-01-05T10:00:30Z", "2026-01-05T10:01:30Z")
        assert (await api.put("poll", every_s=60))["version"] == set_["version"]
        assert (await api.patch("poll", anchor_at=None))["anchor_at"] == "2026-01-05T10:01:00Z"


async def test_a_definition_without_times_runs_by_hand_only() -> None:
    async with scheduling() as api:
        made = await api.create("export")
        assert (made["next_runs"], made["next_runs_local"], made["warnings"]) == ([], [], [])
        assert not {"cron", "time_zone", "every_s", "anchor_at"} & made.keys()
        run = await api.good("POST", "/v1/schedules/export/runs")
        assert (run["status"], run["trigger"]) == ("QUEUED", "manual")


async def test_a_name_is_taken_and_a_key_answers_with_what_it_made() -> None:
    body = {"name": "report", "job_template": TEMPLATE, "every_s": 60}
    async with scheduling() as api:
        assert await api.good("POST", "/v1/schedules", body, Idempotency_Key="k-1")
        await api.to("2026-01-05T10:00:10Z")
        again = await api.call("POST", "/v1/schedules", dict(reversed(body.items())), Idempotency_Key="k-1")
        assert (again.status, again.headers["idempotent-replayed"]) == (200, "true")
        assert (again.json["version"], again.json["anchor_at"]) == (1, "2026-01-05T10:00:00Z")
        assert await api.refused("POST", "/v1/schedules", body) == (409, "name-taken", [])
        assert await api.refused("POST", "/v1/schedules", body, Idempotency_Key="k-2") == (409, "name-taken", [])
        reused = await api.refused("POST", "/v1/schedules", body | {"every_s": 61}, Idempotency_Key="k-1")
        assert reused == (422, "idempotency-key-reused", [])
        assert await api.refused("POST", "/v1/schedules", body, Idempotency_Key="k 1") == (400, "invalid-request", [""])


# --- replace and change ---------------------------------------------------------------------------------------------------------


async def test_put_makes_then_replaces_and_the_same_again_changes_nothing() -> None:
    async with scheduling() as api:
        body = {**DAILY, "job_template": TEMPLATE, "overlap": "forbid"}
        first = await api.call("PUT", "/v1/schedules/report", body | {"name": "report"})
        assert (first.status, first.headers["location"]) == (201, "/v1/schedules/report")
        same = await api.call("PUT", "/v1/schedules/report", body)
        assert (same.status, same.body) == (200, first.body)
        assert "location" not in same.headers
        other = await api.put("report", **DAILY)
        assert (other["version"], other["overlap"]) == (2, "allow"), "what is left out has its default"
        assert other["schedule_id"] == first.json["schedule_id"]
        assert await api.refused("PUT", "/v1/schedules/report", body | {"name": "other"}) == (400, "invalid-request", ["/name"])


async def test_put_leaves_a_pause_alone_unless_it_names_it() -> None:
    async with scheduling() as api:
        await api.put("report", **DAILY)
        await api.good("POST", "/v1/schedules/report:pause")
        assert (await api.put("report", **DAILY, overlap="forbid"))["paused"]
        assert not (await api.put("report", **DAILY, paused=False))["paused"]
        assert (await api.put("new", **DAILY, paused=True))["next_runs"] == []


async def test_patch_replaces_what_is_given_and_null_is_the_default() -> None:
    async with scheduling() as api:
        before = await api.create("report", **FULL)
        assert await api.patch("report") == before, "no change, no version"
        changed = await api.patch("report", overlap="replace", jitter_s=None, missed_runs={"policy": "skip"}, end_at=None, shadow=None)
        expected = FULL | {
            "overlap": "replace", "jitter_s": 0, "missed_runs": {"policy": "skip", "starting_deadline_s": None}, "end_at": None,
            "shadow": False,
        }  # fmt: skip
        assert (written(changed), changed["version"]) == (expected, 2)
        assert (await api.patch("report", time_zone="Asia/Tokyo"))["next_runs_local"][0] == "2026-02-01T09:00:00+09:00"
        assert (await api.patch("report", time_zone=None))["time_zone"] == "UTC"
        cleared = await api.patch("report", missed_runs=None, overlap=None, max_concurrency=None, start_at=None, paused=True, name="report")
        assert (cleared["overlap"], cleared["max_concurrency"], cleared["start_at"], cleared["paused"]) == ("allow", None, None, True)
        assert cleared["missed_runs"]["policy"] == "run_latest"
        template = (await api.patch("report", job_template={"queue": "other"}))["job_template"]
        assert (template["queue"], template["payload"], template["timeout_s"]) == ("other", None, 3_600)
        bare = await api.patch("report", cron=None)
        assert not {"cron", "time_zone", "every_s", "anchor_at"} & bare.keys()


async def test_cron_and_an_interval_take_each_others_place() -> None:
    async with scheduling() as api:
        await api.create("report", **DAILY)
        interval = await api.patch("report", every_s=60)
        assert "cron" not in interval and interval["every_s"] == 60
        cron = await api.patch("report", cron="@daily")
        assert (cron["cron"], cron["time_zone"]) == ("@daily", "UTC")
        assert "every_s" not in cron


async def test_if_match_changes_only_the_version_it_names() -> None:
    async with scheduling() as api:
        await api.create("report", **DAILY)
        for method, body in (("PATCH", {"overlap": "forbid"}), ("PUT", {**DAILY, "job_template": TEMPLATE})):
            mismatch = await api.refused(method, "/v1/schedules/report", body, If_Match='"v7"')
            assert mismatch == (412, "version-mismatch", [])
        assert (await api.good("PATCH", "/v1/schedules/report", {"overlap": "forbid"}, If_Match='"v7", "v1"'))["version"] == 2
        replaced = await api.good("PUT", "/v1/schedules/report", {**DAILY, "job_template": TEMPLATE}, If_Match='"v2"')
        assert replaced["version"] == 3
        absent = await api.refused("PUT", "/v1/schedules/absent", {**DAILY, "job_template": TEMPLATE}, If_Match='"v1"')
        assert absent == (412, "version-mismatch", [])
        assert await api.refused("PATCH", "/v1/schedules/absent", {}, If_Match='"v1"') == (412, "version-mismatch", [])
        assert (await api.refused("PATCH", "/v1/schedules/report", {}, If_Match="v1"))[:2] == (400, "invalid-request")


async def test_a_change_that_met_another_keeps_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another client's change comes between our read and our write, once; then always."""
    async with scheduling() as api:
        await api.create("report", **DAILY)
        node = api.node.node
        put = node.put_schedule
        between = 1

        async def late(definition: Definition, **options: Any) -> Any:
            nonlocal between
            if between and options.get("if_version"):
                between -= 1
                await put(await changed(), actor="other")
            return await put(definition, **options)

        async def changed() -> Definition:
            record = await node.read_schedule("default", "report")
            assert record is not None
            return replace(record.definition, max_concurrency=1 if record.definition.max_concurrency != 1 else 2)

        monkeypatch.setattr(node, "put_schedule", late)
        both = await api.patch("report", overlap="forbid")
        assert (both["overlap"], both["max_concurrency"], both["version"]) == ("forbid", 1, 3)
        between = 100
        answer = await api.call("PATCH", "/v1/schedules/report", {"overlap": "allow"})
        assert (answer.status, answer.json["code"], answer.headers["retry-after"]) == (503, "unavailable", "1")
        tag = f'"v{(await api.get("report"))["version"]}"'
        answer = await api.call("PATCH", "/v1/schedules/report", {"overlap": "allow"}, If_Match=tag)
        assert answer.json["code"] == VersionMismatch.code


async def test_jitter_is_a_stable_offset_of_the_name_and_instants_stay_nominal() -> None:
    async with scheduling() as api:
        made = await api.create("report", every_s=3_600, anchor_at="2026-01-05T00:00:00Z", jitter_s=600)
        assert made["next_runs"][0] == "2026-01-05T11:00:00Z"
        (run,) = await api.runs("report")
        offset_ms = jitter_of("report", 600_000)
        assert run["scheduled_for"] == "2026-01-05T11:00:00Z"
        assert parse_instant(run["fire_at"]) - parse_instant(run["scheduled_for"]) == offset_ms
        await api.patch("report", jitter_s=60)
        (run,) = await api.runs("report")
        assert parse_instant(run["fire_at"]) - parse_instant(run["scheduled_for"]) == jitter_of("report", 60_000)


# --- what is refused ------------------------------------------------------------------------------------------------------------

GOOD = {"name": "report", "job_template": TEMPLATE}
BAD: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"name": "a b"}, "invalid-request", ["/name"]),
    ({"name": ""}, "invalid-request", ["/name"]),
    ({"name": 7}, "invalid-request", ["/name"]),
    ({"nmae": "x"}, "invalid-request", ["/nmae"]),
    ({"cron": "0 24 * * *"}, "invalid-schedule", ["/cron"]),
    ({"cron": ""}, "invalid-schedule", ["/cron"]),
    ({"cron": "  "}, "invalid-schedule", ["/cron"]),
    ({"cron": "0 0 31 2 *"}, "invalid-schedule", ["/cron"]),
    ({"cron": "* * * * *" + " " * 1_000}, "invalid-schedule", ["/cron"]),
    ({"cron": 5}, "invalid-request", ["/cron"]),
    ({"cron": "0 9 * * *", "time_zone": "Europe/Berln"}, "invalid-schedule", ["/time_zone"]),
    ({"cron": "0 9 * * *", "time_zone": ""}, "invalid-schedule", ["/time_zone"]),
    ({"cron": "0 9 * * *", "time_zone": "+01:00"}, "invalid-schedule", ["/time_zone"]),
    ({"cron": "0 9 * * *", "every_s": 60}, "invalid-request", ["/cron", "/every_s"]),
    ({"cron": "0 9 * * *", "anchor_at": "2026-01-01T00:00:00Z"}, "invalid-request", ["/anchor_at", "/cron"]),
    ({"every_s": 60, "time_zone": "UTC"}, "invalid-request", ["/time_zone", "/every_s"]),
    ({"time_zone": "UTC"}, "invalid-request", ["/time_zone"]),
    ({"anchor_at": "2026-01-01T00:00:00Z"}, "invalid-request", ["/anchor_at"]),
    ({"every_s": 0.999}, "invalid-request", ["/every_s"]),
    ({"every_s": 1.0005}, "invalid-request", ["/every_s"]),
    ({"every_s": "60"}, "invalid-request", ["/every_s"]),
    ({"every_s": limits.DELAY_S_MAX + 1}, "invalid-request", ["/every_s"]),
    ({"every_s": 60, "anchor_at": "2026-01-01T00:00:00"}, "invalid-request", ["/anchor_at"]),
    ({"start_at": "tomorrow"}, "invalid-request", ["/start_at"]),
    ({"start_at": "9900-01-01T00:00:00Z"}, "invalid-request", ["/start_at"]),
    ({"every_s": 60, "anchor_at": "9999-12-31T23:59:59Z"}, "invalid-request", ["/anchor_at"]),
    ({"end_at": "2026-02-30T00:00:00Z"}, "invalid-request", ["/end_at"]),
    ({"start_at": "2026-02-01T00:00:00Z", "end_at": "2026-02-01T01:00:00+01:00"}, "invalid-request", ["/start_at", "/end_at"]),
    ({"jitter_s": -1}, "invalid-request", ["/jitter_s"]),
    ({"jitter_s": 86_401}, "invalid-request", ["/jitter_s"]),
    ({"jitter_s": 0.0001}, "invalid-request", ["/jitter_s"]),
    ({"missed_runs": {"policy": "all"}}, "invalid-request", ["/missed_runs/policy"]),
    ({"missed_runs": {"starting_deadline_s": -1}}, "invalid-request", ["/missed_runs/starting_deadline_s"]),
    ({"missed_runs": {"starting_deadline_s": 0.0001}}, "invalid-request", ["/missed_runs/starting_deadline_s"]),
    ({"missed_runs": {"deadline": 1}}, "invalid-request", ["/missed_runs/deadline"]),
    ({"missed_runs": "skip"}, "invalid-request", ["/missed_runs"]),
    ({"overlap": "queue"}, "invalid-request", ["/overlap"]),
    ({"max_concurrency": 0}, "invalid-request", ["/max_concurrency"]),
    ({"paused": 1}, "invalid-request", ["/paused"]),
    ({"shadow": "yes"}, "invalid-request", ["/shadow"]),
    ({"job_template": {}}, "invalid-request", ["/job_template/queue"]),
    ({"job_template": None}, "invalid-request", ["/job_template"]),
    ({"job_template": {"queue": "a/b"}}, "invalid-request", ["/job_template/queue"]),
    ({"job_template": {"queue": "q", "run_at": "2026-01-01T00:00:00Z"}}, "invalid-request", ["/job_template/run_at"]),
    ({"job_template": {"queue": "q", "delay_s": 1}}, "invalid-request", ["/job_template/delay_s"]),
    ({"job_template": {"queue": "q", "idempotency_key": "k"}}, "invalid-request", ["/job_template/idempotency_key"]),
    ({"job_template": {"queue": "q", "payload_ref": "b"}}, "invalid-request", ["/job_template/payload_ref"]),
    ({"job_template": {"queue": "q", "timeout_s": 0.10001}}, "invalid-request", ["/job_template/timeout_s"]),
    ({"job_template": {"queue": "q", "timing": {"class": "flexible"}}}, "invalid-request", ["/job_template/timing/window_s"]),
    ({"job_template": {"queue": "q", "labels": {"": "x"}}}, "invalid-request", ["/job_template/labels"]),
    ({"job_template": {"queue": "q", "target": {"type": "http"}}}, "invalid-request", ["/job_template/target/type"]),
    ({"job_template": {"queue": "q", "payload": "x" * 65_536}}, "payload-too-large", ["/job_template/payload"]),
]


async def test_what_is_wrong_is_refused_with_its_place_on_every_path() -> None:
    """Create, replace, change, preview and batch share the check: what one refuses, the others refuse the same way."""
    async with scheduling() as api:
        await api.create("report", **DAILY)
        before = await api.get("report")
        for fields, code, pointers in BAD:
            status = 413 if code == "payload-too-large" else 400
            body = GOOD | fields
            assert await api.refused("POST", "/v1/schedules", body) == (status, code, pointers), fields
            (result,) = (await api.good("POST", "/v1/schedules:batch", {"schedules": [body]}))["results"]
            problem = result["problem"]
            found = result["status"], problem["code"], [fault["pointer"] for fault in problem["errors"]]
            assert found == (status, code, pointers), fields
            rest = {name: value for name, value in body.items() if name != "name"} if "name" not in fields else body
            assert await api.refused("PUT", "/v1/schedules/report", rest) == (status, code, pointers), fields
            if fields != {"time_zone": "UTC"}:  # which is a change of a cron schedule
                refused = await api.refused("PATCH", "/v1/schedules/report", fields)
                assert (*refused[:2], sorted(refused[2])[:1]) == (status, code, sorted(pointers)[:1]), fields
            assert await api.refused("POST", "/v1/schedules:preview", rest) == (status, code, pointers), fields
        assert await api.get("report") == before, "nothing of it was kept"


@pytest.mark.parametrize(("fields", "words"), [
    ({"job_template": {"queue": "q", "run_at": "2026-01-01T00:00:00Z"}}, "the schedule gives its runs their times"),
    ({"job_template": {"queue": "q", "idempotency_key": "k"}}, "each run has a key of its own"),
    ({"cron": "0 0 9 * * *"}, "drop the seconds"),
    ({"cron": "@every 5m"}, "write every_s"),
    ({"overlap": "queue"}, "allow, forbid, replace, buffer_one"),
    ({"cron": "0 9 * * *", "every_s": 60}, "exclude each other"),
])  # fmt: skip
async def test_a_refusal_names_the_way_out(fields: dict[str, Any], words: str) -> None:
    async with scheduling() as api:
        answer = await api.call("POST", "/v1/schedules", GOOD | fields)
        assert words in answer.json["detail"]


async def test_duplicates_and_depth_are_refused_in_the_envelope_only() -> None:
    async with scheduling() as api:
        twice = b'{"name":"a","job_template":{"queue":"q","payload":{"x":1,"x":2}},"overlap":"allow","overlap":"forbid"}'
        assert await api.refused("POST", "/v1/schedules", twice) == (400, "invalid-request", ["/overlap"])
        inner = b'{"name":"a","job_template":{"queue":"q","queue":"p"}}'
        assert await api.refused("POST", "/v1/schedules", inner) == (400, "invalid-request", ["/job_template/queue"])
        deep = b'{"name":"a","job_template":{"queue":"q","payload":' + b"[" * 200 + b"]" * 200 + b"}}"
        assert (await api.refused("POST", "/v1/schedules", deep))[:2] == (400, "invalid-request")
        assert (await api.refused("POST", "/v1/schedules:batch", b'{"schedules":[' + deep + b"]}"))[:2] == (400, "invalid-request")


@pytest.mark.parametrize(("method", "path", "body"), [
    ("GET", "/v1/schedules/absent", None), ("PATCH", "/v1/schedules/absent", {}), ("DELETE", "/v1/schedules/absent", None),
    ("POST", "/v1/schedules/absent:pause", None), ("POST", "/v1/schedules/absent:resume", None),
    ("POST", "/v1/schedules/absent/runs", None), ("GET", "/v1/schedules/absent/runs", None),
    ("POST", "/v1/schedules/absent:backfill", {"from": "2026-01-01T00:00:00Z", "to": "2026-01-02T00:00:00Z"}),
])  # fmt: skip
async def test_a_schedule_that_is_not_there_or_another_tenants_is_not_found(method: str, path: str, body: Any) -> None:
    async with scheduling() as api:
        assert await api.refused(method, path, body) == (404, "not-found", [])
        await api.node.node.put_schedule(Definition(b"", "other", "absent", "reports"))
        assert await api.refused(method, path, body) == (404, "not-found", [])
        assert (await api.good("GET", "/v1/schedules"))["schedules"] == []


@pytest.mark.parametrize(("method", "path"), [
    ("GET", "/v1/schedules/a%2Fb"), ("PUT", "/v1/schedules/-a"), ("DELETE", "/v1/schedules/" + "a" * 129),
    ("POST", "/v1/schedules/%C3%BC:pause"), ("GET", "/v1/schedules?queue=a/b"), ("GET", "/v1/jobs?schedule=a/b"),
])  # fmt: skip
async def test_names_in_paths_are_checked(method: str, path: str) -> None:
    async with scheduling() as api:
        assert (await api.refused(method, path, {"job_template": TEMPLATE} if method == "PUT" else None))[:2] == (400, "invalid-request")


@pytest.mark.parametrize(("path", "body", "pointers"), [
    ("/v1/schedules/report/runs", {"run_at": "2026-01-06T00:00:00Z", "delay_s": 1}, ["/run_at", "/delay_s"]),
    ("/v1/schedules/report/runs", {"delay_s": -1}, ["/delay_s"]),
    ("/v1/schedules/report/runs", {"queue": "x"}, ["/queue"]),
    ("/v1/schedules/report:backfill", {"from": "2026-01-01T00:00:00Z"}, ["/to"]),
    ("/v1/schedules/report:backfill", {"from": "x", "to": "y"}, ["/from", "/to"]),
    ("/v1/schedules/report:backfill", {"from": "2026-01-01T00:00:00Z", "to": "2026-01-01T00:00:00Z"}, ["/from", "/to"]),
    ("/v1/schedules/report:pause", {"until": 1}, ["/until"]),
    ("/v1/schedules:preview", {"cron": "0 9 * * *", "count": 101}, ["/count"]),
    ("/v1/schedules:preview", {"cron": "0 9 * * *", "after": "x"}, ["/after"]),
    ("/v1/schedules:preview", {"cron": "0 9 * * *", "after": "9999-12-31T00:00:00Z"}, ["/after"]),
    ("/v1/schedules:batch", {"schedules": []}, ["/schedules"]),
    ("/v1/time-zones:reload", {"force": True}, ["/force"]),
])  # fmt: skip
async def test_bodies_of_the_verbs_are_checked(path: str, body: Any, pointers: list[str]) -> None:
    async with scheduling() as api:
        await api.create("report", **DAILY)
        assert await api.refused("POST", path, body) == (400, "invalid-request", pointers)


async def test_a_run_too_far_ahead_and_a_range_too_large_are_refused() -> None:
    async with scheduling() as api:
        await api.create("report", every_s=1, anchor_at="2020-01-01T00:00:00Z")
        assert (await api.refused("POST", "/v1/schedules/report/runs", {"delay_s": limits.DELAY_S_MAX + 1}))[:2] == (400, "run-at-too-far")
        large = {"from": "2020-01-01T00:00:00Z", "to": "2026-01-01T00:00:00Z"}
        assert await api.refused("POST", "/v1/schedules/report:backfill", large) == (400, "invalid-request", ["/to"])


async def test_a_batch_of_1_001_schedules_is_too_large() -> None:
    async with scheduling() as api:
        body = {"schedules": [GOOD] * 1_001}
        assert await api.refused("POST", "/v1/schedules:batch", body) == (413, "payload-too-large", ["/schedules"])
        keyed = await api.refused("POST", "/v1/schedules:batch", {"schedules": [GOOD]}, Idempotency_Key="k")
        assert keyed[:2] == (400, "invalid-request")


# --- preview --------------------------------------------------------------------------------------------------------------------


async def test_a_preview_needs_neither_name_nor_template_and_stores_nothing() -> None:
    async with scheduling() as api:
        found = await api.good("POST", "/v1/schedules:preview", {"cron": "30 2 * * *", "time_zone": "America/New_York"})
        assert len(found["next_runs"]) == len(found["next_runs_local"]) == 5
        assert [warning[:16] for warning in found["warnings"]] == ["2026-03-08 02:30"]
        assert len(await api.preview("2026-01-01T00:00:00Z", 100, cron="@hourly")) == 100
        assert await api.preview("2026-01-05T10:00:00Z", 2, every_s=60) == ["2026-01-05T10:01:00Z", "2026-01-05T10:02:00Z"]
        assert await api.preview("2026-01-05T10:00:00Z", 2) == []
        late = await api.preview("9899-12-31T23:59:59Z", 1, cron="0 0 29 2 *", time_zone="Asia/Tokyo")
        assert late == ["9904-02-28T15:00:00Z"]
        hashed = await api.preview("2026-01-05T10:00:00Z", 3, cron="H H * * *", name="report")
        assert hashed == await api.preview("2026-01-05T10:00:00Z", 3, cron="H H * * *", name="report")
        assert hashed == (await api.create("report", cron="H H * * *"))["next_runs"][:3]
        assert await api.refused("POST", "/v1/schedules:preview", {"cron": "H H * * *"}) == (400, "invalid-schedule", ["/cron"])
        assert [schedule["name"] for schedule in (await api.good("GET", "/v1/schedules"))["schedules"]] == ["report"]


# --- pause, delete, list --------------------------------------------------------------------------------------------------------


async def test_pause_withdraws_what_waits_and_resume_records_what_was_left_out() -> None:
    async with scheduling() as api:
        await api.create("poll", cron="*/10 * * * *")
        paused = await api.call("POST", "/v1/schedules/poll:pause")
        assert (paused.json["paused"], paused.json["next_runs"], paused.headers["etag"]) == (True, [], '"v2"')
        assert (await api.good("POST", "/v1/schedules/poll:pause"))["version"] == 2
        assert await api.runs("poll") == []
        await api.to("2026-01-05T11:05:00Z")
        resumed = await api.good("POST", "/v1/schedules/poll:resume", {})
        assert (resumed["next_runs"][0], resumed["skipped"]) == ("2026-01-05T11:10:00Z", {"paused": 6})
        skipped = (await api.good("GET", "/v1/schedules/poll/runs"))["skipped"]
        assert skipped == [{"from": "2026-01-05T10:10:00Z", "to": "2026-01-05T11:00:00Z", "count": 6, "reason": "paused"}]


async def test_delete_answers_204_without_a_body_on_a_connection_that_goes_on() -> None:
    async with scheduling() as api:
        await api.create("poll", every_s=60)
        wire = await api.http.wire()
        wire.request("DELETE", "/v1/schedules/poll")
        answer = await wire.answer()
        assert (answer.status, answer.headers.keys() & {"content-type", "content-length", "transfer-encoding"}) == (204, set())
        wire.request("GET", "/v1/schedules/poll")
        assert (await wire.answer()).status == 404
        assert (await api.good("GET", "/v1/jobs?schedule=poll"))["jobs"] == []


async def test_the_history_of_a_deleted_schedule_stays() -> None:
    async with scheduling() as api:
        await api.create("poll", every_s=60)
        await api.to("2026-01-05T10:01:00Z")
        (job,) = await api.work()
        await api.good("DELETE", "/v1/schedules/poll")
        kept = await api.good("GET", f"/v1/jobs/{job['job_id']}")
        assert (kept["status"], kept["schedule"], kept["scheduled_for"]) == ("SUCCEEDED", "poll", "2026-01-05T10:01:00Z")


async def test_schedules_are_listed_by_name_page_by_page_and_by_queue() -> None:
    async with scheduling() as api:
        names = [f"s-{number:02}" for number in range(25)]
        for number, name in enumerate(reversed(names)):
            await api.create(name, every_s=60, job_template={"queue": "even" if number % 2 == 0 else "odd"})
        seen: list[str] = []
        cursor = ""
        while True:
            page = await api.good("GET", f"/v1/schedules?limit=7{cursor}")
            seen += [schedule["name"] for schedule in page["schedules"]]
            if page["next_cursor"] is None:
                break
            cursor = "&cursor=" + page["next_cursor"]
        assert seen == names
        odd = await api.good("GET", "/v1/schedules?queue=odd&limit=1000")
        assert [schedule["name"] for schedule in odd["schedules"]] == [name for name in names if int(name[2:]) % 2]
        foreign = f"/v1/schedules?queue=odd{cursor}"
        assert await api.refused("GET", foreign) == (400, "invalid-request", ["?cursor"])


async def test_a_batch_stores_many_and_each_item_stands_for_itself() -> None:
    async with scheduling() as api:
        await api.put("b", **DAILY)
        schedules = [
            {"name": "a", "every_s": 60, "job_template": TEMPLATE},
            {"name": "b", **DAILY, "job_template": TEMPLATE},
            {"name": "c", "cron": "x", "job_template": TEMPLATE},
            {"name": "a", "every_s": 120, "job_template": TEMPLATE},
            {"name": "a", "every_s": 120, "job_template": TEMPLATE},
            7,
        ]
        results = (await api.good("POST", "/v1/schedules:batch", {"schedules": schedules}))["results"]
        assert [result["status"] for result in results] == [201, 200, 400, 200, 200, 400]
        assert [result["schedule"]["version"] for result in results if "schedule" in result] == [1, 1, 2, 2]
        assert results[2]["problem"]["errors"][0]["pointer"] == "/cron"
        assert (await api.get("a"))["every_s"] == 120


async def test_of_items_with_one_name_the_last_counts_however_long_the_others_take(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scheduling() as api:
        put = api.node.node.put_schedule

        async def slow_at_first(definition: Definition, **options: Any) -> Any:
            for _ in range(100 if definition.every_ms == 60_000 else 0):
                await asyncio.sleep(0)
            return await put(definition, **options)

        monkeypatch.setattr(api.node.node, "put_schedule", slow_at_first)
        at = {"anchor_at": "2026-01-05T10:00:00Z", "job_template": TEMPLATE}
        items = [{"name": "a", "every_s": every_s, **at} for every_s in (60, 120)]
        results = (await api.good("POST", "/v1/schedules:batch", {"schedules": items}))["results"]
        assert [(result["status"], result["schedule"]["every_s"]) for result in results] == [(201, 60), (200, 120)]
        assert (await api.get("a"))["every_s"] == 120


async def test_what_is_refused_makes_no_queue_known() -> None:
    async with scheduling() as api:
        await api.create("report", **DAILY)
        bad = {"cron": "0 0 31 2 *", "job_template": {"queue": "never"}}
        await api.refused("PATCH", "/v1/schedules/report", bad)
        await api.refused("PUT", "/v1/schedules/report", bad)
        await api.refused("POST", "/v1/schedules", {"name": "other", **bad})
        await api.good("POST", "/v1/schedules:preview", {"every_s": 1, "job_template": {"queue": "never"}})
        assert await api.refused("GET", "/v1/queues/never") == (404, "not-found", [])


async def test_a_batch_of_a_thousand_is_stored_whole() -> None:
    async with scheduling() as api:
        schedules = [{"name": f"s-{number}", "cron": "H H * * *", "job_template": TEMPLATE} for number in range(1_000)]
        results = (await api.good("POST", "/v1/schedules:batch", {"schedules": schedules}))["results"]
        assert {result["status"] for result in results} == {201}
        assert [result["schedule"]["name"] for result in results] == [schedule["name"] for schedule in schedules]
        again = (await api.good("POST", "/v1/schedules:batch", {"schedules": schedules}))["results"]
        assert {(result["status"], result["schedule"]["version"]) for result in again} == {(200, 1)}


# --- runs -----------------------------------------------------------------------------------------------------------------------


async def test_a_run_tells_its_schedule_its_instant_and_what_it_covers_to_readers_and_workers() -> None:
    async with scheduling() as api:
        await api.create("report", cron="0 * * * *", job_template=TEMPLATE | {"payload": 1})
        await api.to("2026-01-05T12:00:00Z")
        first, second = await api.http.claim("reports", max=10)
        assert (first["schedule"], first["scheduled_for"], first["trigger"]) == ("report", "2026-01-05T11:00:00Z", "on_time")
        assert "data_interval" not in first, "nothing is known of before"
        assert second["data_interval"] == {"from": "2026-01-05T11:00:00Z", "to": "2026-01-05T12:00:00Z"}
        job = await api.good("GET", f"/v1/jobs/{second['job_id']}")
        assert {name: job[name] for name in ("schedule", "scheduled_for", "data_interval", "trigger")} == {
            name: second[name] for name in ("schedule", "scheduled_for", "data_interval", "trigger")
        }
        listed = (await api.good("GET", "/v1/jobs?schedule=report"))["jobs"]
        assert [run["scheduled_for"][11:16] for run in listed] == ["11:00", "12:00", "13:00"]
        assert (await api.good("GET", "/v1/jobs?schedule=other"))["jobs"] == []
        last = (await api.get("report"))["last_run"]
        at = "2026-01-05T12:00:00Z"
        assert last == {"job_id": job["job_id"], "scheduled_for": at, "status": "RUNNING", "fire_at": at}
        for claimed in (first, second):
            await api.good("POST", f"/v1/attempts/{claimed['lease_token']}:complete", {"outcome": "succeeded"})
        last = (await api.get("report"))["last_run"]
        assert (last["status"], last["finished_at"]) == ("SUCCEEDED", "2026-01-05T12:00:00Z")


async def test_a_template_has_the_effect_that_the_fields_of_a_job_have() -> None:
    """B-111: each option through a job, a batch and a template; what is asked for is what the job has."""
    shown = [name for name in FULL_TEMPLATE if name != "queue"]
    async with scheduling() as api:
        single = await api.http.create(**FULL_TEMPLATE)
        (result,) = (await api.good("POST", "/v1/jobs:batch", {"jobs": [FULL_TEMPLATE]}))["results"]
        await api.create("report", job_template=FULL_TEMPLATE)
        run = await api.good("POST", "/v1/schedules/report/runs")
        for job in (single, result["job"], run):
            assert {name: job[name] for name in shown} == {name: FULL_TEMPLATE[name] for name in shown}
        plain = await api.http.create()
        assert "start_deadline_s" not in plain


async def test_a_run_by_hand_may_have_its_own_payload_and_time_and_a_key() -> None:
    async with scheduling() as api:
        await api.create("export", job_template=TEMPLATE | {"payload": {"month": 1}})
        plain = await api.call("POST", "/v1/schedules/export/runs")
        assert (plain.status, plain.headers["location"]) == (201, f"/v1/jobs/{plain.json['job_id']}")
        assert plain.json["payload"] == {"month": 1}
        body = {"payload": {"month": 2}, "delay_s": 60}
        later = await api.call("POST", "/v1/schedules/export/runs", body, Idempotency_Key="month-2")
        assert (later.status, later.json["status"], later.json["fire_at"], later.json["payload"]) == (
            201, "SCHEDULED", "2026-01-05T10:01:00Z", {"month": 2},
        )  # fmt: skip
        again = await api.call("POST", "/v1/schedules/export/runs", dict(reversed(body.items())), Idempotency_Key="month-2")
        assert (again.status, again.headers["idempotent-replayed"], again.json) == (200, "true", later.json)
        reused = await api.refused("POST", "/v1/schedules/export/runs", body | {"delay_s": 61}, Idempotency_Key="month-2")
        assert reused == (422, "idempotency-key-reused", [])
        at = await api.good("POST", "/v1/schedules/export/runs", {"run_at": "2026-01-05T10:00:30Z"})
        assert at["fire_at"] == "2026-01-05T10:00:30Z"
        await api.to("2026-01-05T10:02:00Z")
        assert sorted(await api.fired("export")) == ["2026-01-05T10:00:00Z", "2026-01-05T10:00:30Z", "2026-01-05T10:01:00Z"]
        nothing = await api.good("POST", "/v1/schedules/export/runs", b'{"payload": null}')
        assert nothing["payload"] is None


async def test_a_run_by_hand_is_refused_while_one_goes_and_overlap_forbids() -> None:
    async with scheduling() as api:
        await api.create("export", overlap="forbid")
        await api.good("POST", "/v1/schedules/export/runs")
        assert await api.refused("POST", "/v1/schedules/export/runs") == (409, "concurrency-limit", [])
        await api.work()
        assert await api.good("POST", "/v1/schedules/export/runs")


async def test_a_backfill_makes_what_has_no_job_yet_once() -> None:
    async with scheduling("2026-01-05T10:30:00Z") as api:
        await api.create("report", cron="0 * * * *")
        await api.to("2026-01-05T12:30:00Z")
        stretch = {"from": "2026-01-05T08:00:00Z", "to": "2026-01-05T12:00:00Z"}
        assert await api.good("POST", "/v1/schedules/report:backfill", stretch) == {"created": 3, "skipped": 0, "existing": 1}
        assert await api.good("POST", "/v1/schedules/report:backfill", stretch) == {"created": 0, "skipped": 0, "existing": 4}
        ahead = {"from": "2027-01-05T08:00:00Z", "to": "9999-12-31T23:59:59Z"}
        assert await api.good("POST", "/v1/schedules/report:backfill", ahead) == {"created": 0, "skipped": 0, "existing": 0}
        made = [job for job in await api.runs("report") if job["trigger"] == "backfill"]
        assert [job["scheduled_for"][11:16] for job in made] == ["08:00", "09:00", "10:00"]
        assert made[0]["data_interval"] == {"from": "2026-01-05T07:00:00Z", "to": "2026-01-05T08:00:00Z"}
        assert {job["fire_at"] for job in made} == {"2026-01-05T12:30:00Z"}


async def test_a_schedule_in_shadow_counts_what_would_have_fired_and_runs_nothing() -> None:
    async with scheduling() as api:
        await api.create("report", cron="*/10 * * * *", shadow=True)
        await api.to("2026-01-05T11:00:00Z")
        assert await api.fired("report") == []
        found = await api.get("report")
        assert (found["skipped"], found["last_run"]) == ({"shadow": 6}, None)
        (left_out,) = (await api.good("GET", "/v1/schedules/report/runs"))["skipped"]
        assert left_out == {"from": "2026-01-05T10:10:00Z", "to": "2026-01-05T11:00:00Z", "count": 6, "reason": "shadow"}


async def test_runs_are_listed_newest_first_page_by_page() -> None:
    async with scheduling() as api:
        await api.create("tick", every_s=60)
        await api.to("2026-01-05T10:25:00Z")
        seen: list[str] = []
        cursor = ""
        while True:
            page = await api.good("GET", f"/v1/schedules/tick/runs?limit=4{cursor}")
            seen += [job["scheduled_for"] for job in page["jobs"]]
            if page["next_cursor"] is None:
                break
            cursor = "&cursor=" + page["next_cursor"]
            await api.node.advance(s=60)
        assert seen == [f"2026-01-05T10:{minute:02}:00Z" for minute in range(26, 0, -1)]
        await api.create("other", every_s=60)
        assert await api.refused("GET", f"/v1/schedules/other/runs?limit=4{cursor}") == (400, "invalid-request", ["?cursor"])


async def test_time_zones_are_read_again_on_request() -> None:
    async with scheduling() as api:
        await api.create("report", **DAILY)
        found = await api.good("POST", "/v1/time-zones:reload")
        assert (found["zones"], found["moved"]) == ([], 0)
        assert found["version"] == (await api.get("report"))["time_zone_data"]


# --- the document ---------------------------------------------------------------------------------------------------------------


async def test_answers_fit_their_schemas() -> None:
    document = openapi.as_dict()

    def check(method: str, template: str, status: int, answer: Any) -> None:
        response = document["paths"][template][method.lower()]["responses"][str(status)]
        if "$ref" in response:
            response = document["components"]["responses"][response["$ref"].rpartition("/")[2]]
        if status == 204:
            assert "content" not in response
            return
        ((_, media),) = response["content"].items()
        text = json.dumps({"schema": media["schema"], "$defs": document["components"]["schemas"]})
        whole = json.loads(text.replace("#/components/schemas/", "#/$defs/"))
        jsonschema.Draft202012Validator({"$defs": whole["$defs"], **whole["schema"]}).validate(answer)

    async with scheduling() as api:
        one = "/v1/schedules/{schedule}"
        calls: list[tuple[str, str, Any]] = [
            ("POST", "/v1/schedules", {"name": "report", **FULL, "shadow": False}),
            ("POST", "/v1/schedules", {"name": "report", "job_template": TEMPLATE}),
            ("POST", "/v1/schedules:batch", {"schedules": [{"name": "poll", "every_s": 60, "job_template": TEMPLATE}, {}]}),
            ("POST", "/v1/schedules:preview", {**DAILY}),
            ("PUT", one, {**DAILY, "job_template": TEMPLATE}),
            ("PATCH", one, {"overlap": "replace"}),
            ("PATCH", one, {"cron": "x"}),
            ("GET", one, None),
            ("POST", one + ":pause", None),
            ("POST", one + ":resume", None),
            ("POST", one + "/runs", {"payload": 1}),
            ("POST", one + ":backfill", {"from": "2026-01-01T00:00:00Z", "to": "2026-01-03T00:00:00Z"}),
            ("GET", one + "/runs", None),
            ("GET", one, None),
            ("GET", "/v1/schedules", None),
            ("GET", "/v1/jobs", None),
            ("POST", "/v1/queues/{queue}:claim", {"max": 5}),
            ("POST", "/v1/time-zones:reload", None),
            ("DELETE", one, None),
            ("DELETE", one, None),
        ]
        for method, template, body in calls:
            answer = await api.call(method, template.format(schedule="report", queue="reports"), body)
            check(method, template, answer.status, answer.json if answer.body else None)
