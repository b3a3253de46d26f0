"""Schedules through the client, the worker and the commands, each against a node that answers HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from wheelsched.api.times import parse_instant
from wheelsched.cli.main import cli
from wheelsched.client import AsyncClient, Backfilled, Backoff, BatchFailed, Client, DataInterval
from wheelsched.core.errors import (
    ConcurrencyLimit,
    IdempotencyKeyReused,
    InvalidRequest,
    InvalidSchedule,
    NameTaken,
    NotFound,
    Unavailable,
    VersionMismatch,
)
from wheelsched.testing import TestNode, open_test_node
from wheelsched.worker.job import Job, Signs

START = "2026-01-05T10:00:00Z"
SPEC = {"cron": "0 9 * * *", "time_zone": "Europe/Berlin", "job_template": {"queue": "reports"}}
HOUR = timedelta(hours=1)


@asynccontextmanager
async def served() -> AsyncIterator[tuple[TestNode, AsyncClient]]:
    async with (
        open_test_node(start_ms=parse_instant(START), serve=True) as node,
        AsyncClient(node.url, backoff=Backoff(initial_s=0.001, cap_s=0.002)) as client,
    ):
        yield node, client


# --- the client -----------------------------------------------------------------------------------------------------------------


async def test_a_schedule_is_made_changed_and_deleted() -> None:
    async with served() as (_, client):
        made = await client.create_schedule("report", SPEC, idempotency_key="k")
        assert (made["version"], made["next_runs"][0]) == (1, "2026-01-06T08:00:00Z")
        assert await client.create_schedule("report", SPEC, idempotency_key="k") == made
        with pytest.raises(NameTaken, match="report"):
            await client.create_schedule("report", SPEC)
        with pytest.raises(IdempotencyKeyReused):
            await client.create_schedule("report", SPEC | {"overlap": "forbid"}, idempotency_key="k")
        assert await client.put_schedule("report", SPEC) == made
        changed = await client.patch_schedule("report", {"end_at": datetime(2027, 1, 1, tzinfo=timezone(HOUR))}, if_version=1)
        assert (changed["end_at"], changed["version"]) == ("2026-12-31T23:00:00Z", 2)
        with pytest.raises(VersionMismatch):
            await client.patch_schedule("report", {"end_at": None}, if_version=1)
        with pytest.raises(VersionMismatch):
            await client.put_schedule("report", SPEC, if_version=1)
        assert (await client.pause_schedule("report"))["paused"]
        assert not (await client.resume_schedule("report"))["paused"]
        assert (await client.get_schedule("report"))["version"] == 4
        await client.delete_schedule("report")
        with pytest.raises(NotFound):
            await client.get_schedule("report")
        with pytest.raises(NotFound):
            await client.delete_schedule("report")


async def test_a_payload_is_exact_and_may_be_json_already() -> None:
    big = 12345678901234567890123
    async with served() as (_, client):
        made = await client.put_schedule("a", {"job_template": {"queue": "q", "payload": {"n": big}}})
        assert made["job_template"]["payload"] == {"n": big}
        raw = await client.put_schedule("b", {"job_template": {"queue": "q", "payload": b'{"n":  1}'}})
        assert raw["job_template"]["payload"] == {"n": 1}
        assert bytes((await client.run_schedule("b")).payload_raw) == b'{"n":  1}'
        with pytest.raises(ValueError, match="JSON"):
            await client.put_schedule("c", {"job_template": {"queue": "q", "payload": b"1,2"}})


async def test_a_spec_that_is_wrong_is_the_error_of_its_kind_with_its_places() -> None:
    async with served() as (_, client):
        with pytest.raises(InvalidSchedule) as never:
            await client.create_schedule("a", SPEC | {"cron": "0 0 31 2 *"})
        assert never.value.errors[0]["pointer"] == "/cron"
        with pytest.raises(InvalidRequest) as both:
            await client.put_schedule("a", SPEC | {"every_s": 60})
        assert [fault["pointer"] for fault in both.value.errors][:2] == ["/cron", "/every_s"]


async def test_many_are_stored_in_requests_of_a_thousand_and_listed_again() -> None:
    async with served() as (_, client):
        specs = [{"name": f"s-{number:04}", "every_s": 3_600, "job_template": {"queue": "q"}} for number in range(1_500)]
        stored = await client.put_schedules(specs)
        assert [schedule["name"] for schedule in stored if isinstance(schedule, dict)] == [spec["name"] for spec in specs]
        names, cursor = [], None
        while True:
            page = await client.list_schedules(queue="q", limit=1_000, cursor=cursor)
            names += [schedule["name"] for schedule in page]
            if (cursor := page.next_cursor) is None:
                break
        assert names == [spec["name"] for spec in specs]
        bad = [SPEC | {"name": "good"}, SPEC | {"name": "bad", "cron": "x"}]
        with pytest.raises(BatchFailed, match="1 of 2 schedules were not created; the first is number 1") as failed:
            await client.put_schedules(bad)
        assert isinstance(failed.value.results[1], InvalidSchedule)
        good, refused = await client.put_schedules(bad, return_errors=True)
        assert isinstance(good, dict) and isinstance(refused, InvalidSchedule)


async def test_an_item_refused_for_the_moment_is_tried_again_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as (node, client):
        put = node.node.put_schedule
        refusals = 2

        async def busy(definition: Any, **options: Any) -> Any:
            nonlocal refusals
            if definition.name == "b" and refusals:
                refusals -= 1
                raise Unavailable("busy", retry_after_s=0)
            return await put(definition, **options)

        monkeypatch.setattr(node.node, "put_schedule", busy)
        stored = await client.put_schedules([SPEC | {"name": name} for name in "abc"])
        assert [schedule["name"] for schedule in stored if isinstance(schedule, dict)] == ["a", "b", "c"]
        assert refusals == 0


async def test_runs_by_hand_backfills_and_the_list_of_runs() -> None:
    async with served() as (node, client):
        await client.put_schedule("report", {"cron": "0 * * * *", "overlap": "allow", "job_template": {"queue": "reports"}})
        by_hand = await client.run_schedule("report", payload={"month": 2}, delay_s=60, idempotency_key="k")
        assert (by_hand.trigger, by_hand.payload, by_hand.scheduled_for) == ("manual", {"month": 2}, None)
        assert (await client.run_schedule("report", payload={"month": 2}, delay_s=60, idempotency_key="k")).job_id == by_hand.job_id
        at = await client.run_schedule("report", run_at=datetime(2026, 1, 5, 10, 2, tzinfo=UTC), payload=None)
        assert (at.fire_at, at.payload) == (datetime(2026, 1, 5, 10, 2, tzinfo=UTC), None)
        with pytest.raises(ValueError, match="exclude"):
            await client.run_schedule("report", run_at=START, delay_s=1)
        await node.advance(s=2 * 3_600)
        counts = await client.backfill_schedule("report", datetime(2026, 1, 5, 8, tzinfo=UTC), "2026-01-05T12:00:00Z")
        assert counts == Backfilled(created=3, skipped=0, existing=1)
        page = await client.schedule_runs("report", limit=2)
        assert [run.scheduled_for for run in page] == [datetime(2026, 1, 5, hour, tzinfo=UTC) for hour in (13, 12)]
        assert page.items[1].data_interval == DataInterval(
            from_at=datetime(2026, 1, 5, 11, tzinfo=UTC), to_at=datetime(2026, 1, 5, 12, tzinfo=UTC)
        )
        assert page.next_cursor is not None
        rest = await client.schedule_runs("report", cursor=page.next_cursor)
        assert sorted(run.trigger or "" for run in rest) == ["backfill"] * 3 + ["manual"] * 2 + ["on_time"]
        listed = await client.list(schedule="report")
        assert len(listed) == len(page) + len(rest)
        await client.patch_schedule("report", {"overlap": "forbid"})
        with pytest.raises(ConcurrencyLimit):
            await client.run_schedule("report")


async def test_what_was_left_out_a_preview_and_the_zone_data() -> None:
    async with served() as (node, client):
        await client.put_schedule("report", SPEC | {"cron": "*/10 * * * *", "shadow": True})
        await node.advance(s=3_600)
        (left_out,) = (await client.schedule_runs("report")).skipped
        assert (left_out.count, left_out.reason, left_out.to_at) == (6, "shadow", datetime(2026, 1, 5, 11, tzinfo=UTC))
        found = await client.preview_schedule({"cron": "0 9 * * *"}, after=datetime(2026, 2, 1, tzinfo=UTC), count=1)
        assert found["next_runs"] == ["2026-02-01T09:00:00Z"]
        zones = await client.reload_zones()
        assert (zones.moved, zones.zones) == (0, ())
        assert zones.version


async def test_the_blocking_client_has_the_same_calls() -> None:
    async with served() as (node, _):

        def calls() -> list[Any]:
            with Client(node.url) as client:
                client.put_schedule("report", SPEC)
                client.put_schedules([SPEC | {"name": "other"}])
                return [schedule["name"] for schedule in client.list_schedules()]

        assert await asyncio.to_thread(calls) == ["other", "report"]


async def test_a_handler_sees_what_its_run_is_for() -> None:
    async with served() as (node, client):
        await client.put_schedule("close", {"cron": "30 2 * * *", "time_zone": "America/Los_Angeles", "job_template": {"queue": "q"}})
        await node.advance(to=parse_instant("2026-03-08T10:00:00Z"))
        claimed = (await client.claim("q", jobs_max=100))[-1]
        job = Job(claimed, Signs())
        assert (job.schedule, job.trigger, job.scheduled_local) == ("close", "on_time", "2026-03-08T02:30")
        assert job.scheduled_for == datetime(2026, 3, 8, 10, tzinfo=UTC)
        assert job.data_interval == DataInterval(
            from_at=datetime(2026, 3, 7, 10, 30, tzinfo=UTC), to_at=datetime(2026, 3, 8, 10, tzinfo=UTC)
        )
        await client.create("plain")
        (plain,) = await client.claim("plain")
        job = Job(plain, Signs())
        assert (job.schedule, job.scheduled_for, job.data_interval, job.trigger, job.scheduled_local) == (None,) * 5


# --- the commands ---------------------------------------------------------------------------------------------------------------


async def run(node: TestNode, *arguments: str, code: int = 0, stdin: str | None = None) -> Result:
    """A command against the node, which goes on answering meanwhile."""
    words: Sequence[str] = ["schedules", *arguments, "--url", node.url]
    result = await asyncio.to_thread(CliRunner().invoke, cli, words, input=stdin, standalone_mode=False)
    if code == 0 and result.exception is not None:
        raise result.exception
    assert (result.return_value or 0) == code, result.output
    return result


async def document(node: TestNode, *arguments: str) -> Any:
    return json.loads((await run(node, *arguments, "--json")).output)


async def test_commands_make_change_and_show_schedules() -> None:
    async with served() as (node, client):
        told = (await run(node, "create", "report", "--cron", "0 9 * * MON-FRI", "--zone", "Europe/Berlin", "--queue", "reports")).output
        assert "report version 1: 0 9 * * MON-FRI Europe/Berlin" in told
        assert "next 2026-01-06T08:00:00Z (2026-01-06T09:00:00+01:00)" in told
        assert "note: minute 0" in told
        with pytest.raises(NameTaken):
            await run(node, "create", "report", "--every", "15m", "--queue", "q")
        put = await document(
            node, "put", "poll", "--every", "15m", "--queue", "feeds", "--overlap", "forbid", "--missed", "skip",
            "--starting-deadline", "10m", "--jitter", "30s", "--max-concurrency", "2", "--paused", "--shadow",
            "--start", "2026-02-01T00:00:00Z", "--end", "2026-03-01T00:00:00Z", "--anchor", START, "--payload", '{"n": 1}',
            "--priority", "bulk", "--window", "1m",
            "--max-attempts", "3", "--backoff", "1s", "--max-backoff", "1m", "--timeout", "5m", "--start-deadline", "1h", "--label", "a=b",
        )  # fmt: skip
        assert put == await client.get_schedule("poll")
        assert (put["every_s"], put["overlap"], put["missed_runs"]) == (900, "forbid", {"policy": "skip", "starting_deadline_s": 600})
        assert (put["jitter_s"], put["max_concurrency"], put["paused"], put["shadow"]) == (30, 2, True, True)
        assert (put["start_at"], put["end_at"], put["anchor_at"]) == ("2026-02-01T00:00:00Z", "2026-03-01T00:00:00Z", START)
        template = put["job_template"]
        assert (template["timing"], template["payload"], template["labels"]) == (
            {"class": "flexible", "window_s": 60},
            {"n": 1},
            {"a": "b"},
        )
        assert template["retry"] == {"max_attempts": 3, "initial_backoff_s": 1, "max_backoff_s": 60}
        changed = await document(
            node, "patch", "poll", "--timeout", "10m", "--backoff", "2s", "--missed", "run_all", "--unset", "end_at", "--unset", "shadow"
        )
        assert changed["job_template"] == template | {"timeout_s": 600, "retry": template["retry"] | {"initial_backoff_s": 2}}
        assert (changed["missed_runs"], changed["end_at"]) == ({"policy": "run_all", "starting_deadline_s": 600}, None)
        assert not changed["shadow"]
        with pytest.raises(VersionMismatch):
            await run(node, "patch", "poll", "--overlap", "allow", "--if-version", "1")
        listed = (await run(node, "list")).output
        assert "every 900 s" in listed and "paused" in listed and "Europe/Berlin" in listed
        assert [schedule["name"] for schedule in (await document(node, "list", "--queue", "feeds"))["schedules"]] == ["poll"]
        assert (await document(node, "show", "report"))["name"] == "report"
        assert "poll: going, next 2026-02-01" in (await run(node, "resume", "poll")).output
        assert "poll: paused" in (await run(node, "pause", "poll")).output
        assert "poll: deleted" in (await run(node, "delete", "poll")).output
        with pytest.raises(NotFound):
            await run(node, "show", "poll")


async def test_commands_run_backfill_and_list_runs() -> None:
    async with served() as (node, client):
        await client.put_schedule("report", {"cron": "0 * * * *", "job_template": {"queue": "reports"}})
        by_hand = await document(node, "run", "report", "--payload", '{"month": 1}', "--key", "k")
        assert (by_hand["trigger"], by_hand["payload"]) == ("manual", {"month": 1})
        assert by_hand["job_id"] in (await run(node, "run", "report", "--payload", '{"month": 1}', "--key", "k")).output
        await node.advance(s=3_600)
        told = (await run(node, "backfill", "report", "--from", "2026-01-05T08:00:00Z", "--to", "2026-01-05T12:00:00Z")).output
        assert "3 runs made, 1 there already, 0 left out" in told
        found = await document(node, "runs", "report", "--limit", "4")
        assert [job.get("scheduled_for", "by hand")[-9:-4] for job in found["jobs"]][:2] == ["12:00", "11:00"]
        assert len(found["jobs"]) == 4
        await client.patch_schedule("report", {"shadow": True})
        await node.advance(s=3_600)
        told = (await run(node, "runs", "report")).output
        assert "left out" in told and "shadow" in told and "manual" in told
        assert "time-zone data" in (await run(node, "reload-zones")).output


async def test_a_file_of_schedules_is_stored_and_what_is_refused_is_told_by_line(tmp_path: Path) -> None:
    async with served() as (node, client):
        lines = [{"name": f"s-{number}", "every_s": 60, "job_template": {"queue": "q"}} for number in range(3)]
        lines[1]["every_s"] = 0.5
        file = tmp_path / "schedules.jsonl"
        file.write_text("\n".join(map(json.dumps, lines)) + "\n")
        told = (await run(node, "put", "--from", str(file), code=1)).output
        assert "2 schedules stored, 1 refused" in told
        assert "line 2: every_s 0.5 is below 1" in told
        assert [schedule["name"] for schedule in await client.list_schedules()] == ["s-0", "s-2"]


async def test_a_preview_here_says_what_the_node_says() -> None:
    specs = (
        ("0 9 * * *", "--zone", "Europe/Berlin"),
        ("30 2 * * *", "--zone", "America/New_York", "--after", "2026-03-01T00:00:00Z", "--count", "10"),
        ("H H * * *", "--name", "report", "--after", START),
        ("@daily", "--start", "2026-04-01T12:00:00Z", "--end", "2026-04-04T00:00:00Z"),
        ("--every", "90", "--anchor", START, "--after", "2026-01-05T11:00:10Z", "--count", "3"),
        ("*/15 2 * 3 SUN#2", "--zone", "America/New_York", "--after", START),
    )
    async with served() as (node, _):
        for words in specs:
            after = () if "--after" in words else ("--after", START)
            remote = await document(node, "preview", *words, *after)
            local = await document(node, "preview", *words, *after, "--local")
            # Warnings look a year ahead from now, which is another one on the virtual clock.
            assert local["next_runs"] == remote["next_runs"], words
            assert local["next_runs_local"] == remote["next_runs_local"], words
        told = (await run(node, "preview", "0 9 * * *", "--zone", "Europe/Berlin")).output
        assert told.startswith("2026-01-06T08:00:00Z (2026-01-06T09:00:00+01:00)\n")
        assert "note: minute 0" in told


@pytest.mark.parametrize("words", [
    ("0 24 * * *",), ("0 9 * * *", "--zone", "Europe/Berln"), ("0 0 31 2 *",), ("H 1 * * *",),
])  # fmt: skip
def test_a_preview_here_refuses_what_the_node_refuses_without_one(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, ["schedules", "preview", *words, "--local"], standalone_mode=False)
    assert isinstance(result.exception, InvalidSchedule)


@pytest.mark.parametrize(("words", "told"), [
    (("preview",), "EXPR is missing"), (("preview", "@daily", "--cron", "@daily"), "given twice"),
    (("create", "a"), "--queue is missing"), (("put",), "NAME is missing"), (("patch", "a"), "nothing to change"),
    (("run", "a", "--at", START, "--delay", "1"), "twice"), (("preview", "@daily", "--every", "60", "--local"), "exclude"),
])  # fmt: skip
def test_usage_is_told_before_a_node_is_asked(words: tuple[str, ...], told: str) -> None:
    result = CliRunner().invoke(cli, ["schedules", *words])
    assert result.exit_code == 2
    assert told in result.output
