"""Cases from the field about calendars, catching up, and changing schedules (CASES.md, kinds 1 to 3), through HTTP."""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from scheduling import TEMPLATE, scheduling

from wheelsched.api.times import parse_instant
from wheelsched.cron import ZoneData


def at(*times: str, day: str) -> list[str]:
    return [f"{day}T{time}:00Z" for time in times]


# --- kind 1: daylight saving, calendars and zone data ---------------------------------------------------------------------------


async def test_a_fixed_hour_runs_once_in_the_repeated_hour_and_the_preview_says_so() -> None:
    """B-001: 30 1 New York over 1 November 2026, first copy only."""
    spec = {"cron": "30 1 * * *", "time_zone": "America/New_York"}
    async with scheduling("2026-11-01T04:00:00Z") as api:
        made = await api.create("backup", **spec)
        assert made["next_runs"][:2] == ["2026-11-01T05:30:00Z", "2026-11-02T06:30:00Z"]
        assert await api.preview("2026-11-01T04:00:00Z", 2, **spec) == made["next_runs"][:2]
        await api.to("2026-11-01T08:00:00Z")
        assert await api.fired("backup") == ["2026-11-01T05:30:00Z"]
        assert (await api.get("backup"))["next_runs"][0] == "2026-11-02T06:30:00Z"


@pytest.mark.parametrize(("cron", "nominal"), [("0 2 * * *", "2026-03-08T02:00"), ("30 2 * * *", "2026-03-08T02:30")])
async def test_a_run_inside_the_skipped_hour_runs_right_after_it_and_keeps_what_the_clock_was_to_show(cron: str, nominal: str) -> None:
    """B-003: once, at 10:00Z, the first instant after the gap of Los Angeles."""
    async with scheduling("2026-03-08T00:00:00Z") as api:
        made = await api.create("close", cron=cron, time_zone="America/Los_Angeles")
        assert any(nominal.replace("T", " ") in warning for warning in made["warnings"])
        assert made["next_runs_local"][0] == "2026-03-08T03:00:00-07:00"
        await api.to("2026-03-09T00:00:00Z")
        (run,) = [job for job in await api.runs("close") if job["status"] == "QUEUED"]
        assert (run["scheduled_for"], run["fire_at"], run["scheduled_local"]) == ("2026-03-08T10:00:00Z", "2026-03-08T10:00:00Z", nominal)
        (claimed,) = await api.work()
        assert (claimed["scheduled_for"], claimed["scheduled_local"]) == ("2026-03-08T10:00:00Z", nominal)
        await api.to("2026-03-10T00:00:00Z")
        assert "scheduled_local" not in (await api.runs("close"))[1]


@pytest.mark.parametrize("base", ["2026-03-08T06:59:00Z", "2026-03-08T06:30:00Z", "2026-03-08T06:00:00Z"])
@pytest.mark.parametrize("cron", ["* * * * *", "*/5 * * * *", "0 * * * *"])
async def test_the_next_run_is_always_later_and_no_catch_up_spins(cron: str, base: str) -> None:
    """B-005: previews ascend over the gap; an hour behind, the newest instant runs and the others are left out, each once."""
    spec = {"cron": cron, "time_zone": "America/New_York"}
    async with scheduling(base) as api:
        runs = await api.preview(base, 100, **spec)
        assert base < runs[0]
        assert all(one < other for one, other in pairwise(runs))
        await api.create("poll", **spec)
        await api.node.step_wall_clock(s=3_600)
        later = await api.get("poll")
        assert later["next_runs"][0] > api.now
        assert len(await api.fired("poll")) == 1
        assert 1 + sum(later["skipped"].values()) == len([run for run in runs if run <= api.now])


@pytest.mark.parametrize(("cron", "count"), [("*/15 * * * *", 12), ("0 * * * *", 3)])
async def test_a_frequent_schedule_goes_on_through_the_repeated_hour(cron: str, count: int) -> None:
    """B-009: London, 25 October 2026: no silent hour, no burst."""
    async with scheduling("2026-10-24T23:59:59Z") as api:
        await api.create("tick", cron=cron, time_zone="Europe/London", job_template=TEMPLATE)
        await api.to("2026-10-25T02:59:59Z")
        fired = [parse_instant(run) for run in await api.fired("tick")]
        assert len(fired) == count
        assert {later - run for run, later in pairwise(fired)} == {3 * 3_600_000 // count}


async def test_every_previewed_instant_survives_the_way_to_the_zones_clock_and_back() -> None:
    """B-011: the local rendering is a real reading of that instant, in zones from everywhere."""
    async with scheduling() as api:
        for index, zone in enumerate(sorted(ZoneData.of_package().names)[::7]):
            after = f"{2024 + index % 12}-0{3 + index % 2}-20T00:00:00Z"
            spec = {"cron": "30 2 * * *", "time_zone": zone, "after": after, "count": 20}
            found = await api.good("POST", "/v1/schedules:preview", spec)
            for instant, local in zip(found["next_runs"], found["next_runs_local"], strict=True):
                shown = datetime.fromisoformat(local)
                assert round(shown.timestamp() * 1000) == parse_instant(instant), zone


def test_the_local_rendering_is_what_the_standard_library_shows() -> None:
    """B-011, against another reader of zone files, where its copy is as new."""
    data = ZoneData.of_package()
    for name in ("America/New_York", "Europe/London", "Asia/Kolkata", "Australia/Lord_Howe"):
        for instant in ("2026-03-08T10:00:00Z", "2026-10-25T01:30:00Z", "2026-04-04T15:00:00Z"):
            ms = parse_instant(instant)
            assert data.zone(name).local_text(ms) == datetime.fromtimestamp(ms // 1000, ZoneInfo(name)).isoformat()


@pytest.mark.parametrize("cron", ["0 0 31 2 *", "0 0 30 2 *", "0 0 31 4,6,9,11 *"])
async def test_a_date_that_never_comes_is_refused_and_the_schedule_in_force_stays(cron: str) -> None:
    """B-013: at create, replace, change and preview, naming the field."""
    async with scheduling() as api:
        before = await api.create("yearly", cron="0 0 1 1 *")
        impossible = (400, "invalid-schedule", ["/cron"])
        body = {"cron": cron, "job_template": TEMPLATE}
        assert await api.refused("POST", "/v1/schedules", {"name": "other", **body}) == impossible
        assert await api.refused("PUT", "/v1/schedules/yearly", body) == impossible
        assert await api.refused("PATCH", "/v1/schedules/yearly", {"cron": cron}) == impossible
        assert await api.refused("POST", "/v1/schedules:preview", {"cron": cron}) == impossible
        answer = await api.call("PATCH", "/v1/schedules/yearly", {"cron": cron})
        assert "day of month" in answer.json["detail"]
        assert await api.get("yearly") == before
        assert await api.refused("GET", "/v1/schedules/other") == (404, "not-found", [])


async def test_the_31st_comes_in_the_months_that_have_one_and_previews_do_not_end_early() -> None:
    """B-016."""
    async with scheduling() as api:
        runs = await api.preview("2026-01-01T00:00:00Z", 5, cron="0 0 31 2,3,4,5 *")
        assert [run[:10] for run in runs] == ["2026-03-31", "2026-05-31", "2027-03-31", "2027-05-31", "2028-03-31"]


async def test_a_start_bound_is_an_instant_whatever_its_offset_and_the_pattern_is_local() -> None:
    """B-018: from 08:00Z on, the first 01:00 IST is 19:30Z."""
    async with scheduling() as api:
        made = await api.create("digest", cron="0 1 * * *", time_zone="Asia/Kolkata", start_at="2026-03-01T00:00:00-08:00")
        assert made["start_at"] == "2026-03-01T08:00:00Z"
        assert (made["next_runs"][0], made["next_runs_local"][0]) == ("2026-03-01T19:30:00Z", "2026-03-02T01:00:00+05:30")
        await api.to("2026-03-01T20:00:00Z")
        assert await api.fired("digest") == ["2026-03-01T19:30:00Z"]


# --- kind 2: catching up --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["verb", "patch", "put"])
async def test_a_schedule_resumed_runs_at_its_next_slot_and_resuming_again_changes_nothing(how: str) -> None:
    """B-035: every five minutes, off at 07:01, on at 07:08: first run 07:10, and nothing at once."""
    spec = {"cron": "*/5 * * * *", "job_template": TEMPLATE}

    async def turn(paused: bool) -> Any:
        if how == "patch":
            return await api.patch("poll", paused=paused)
        if how == "put":
            return await api.put("poll", **spec, paused=paused)
        return await api.good("POST", f"/v1/schedules/poll:{'pause' if paused else 'resume'}")

    async with scheduling("2026-01-05T06:58:00Z") as api:
        await api.create("poll", **spec)
        await api.to("2026-01-05T07:01:00Z")
        assert (await turn(True))["next_runs"] == []
        await api.to("2026-01-05T07:08:00Z")
        assert await api.fired("poll") == ["2026-01-05T07:00:00Z"]
        on = await turn(False)
        assert on["next_runs"][0] == "2026-01-05T07:10:00Z"
        assert await turn(False) == on
        await api.to("2026-01-05T07:16:00Z")
        assert await api.fired("poll") == at("07:00", "07:10", "07:15", day="2026-01-05")


async def test_making_and_changing_one_schedule_fires_no_other() -> None:
    """B-037: five ran at :00 and could still start until :59; a sixth is made at :20 and a seventh changed."""
    async with scheduling("2026-01-05T09:50:00Z") as api:
        names = [f"hourly-{number}" for number in range(5)]
        missed = {"policy": "run_all", "starting_deadline_s": 3_600}
        for name in names:
            await api.create(name, cron="0 * * * *", missed_runs=missed)
        await api.create("seventh", cron="0 12 * * *")
        await api.to("2026-01-05T10:20:00Z")
        before = {name: await api.runs(name) for name in names}
        await api.create("sixth", cron="0 * * * *", missed_runs=missed)
        await api.patch("seventh", cron="0 13 * * *")
        await api.good("DELETE", "/v1/schedules/seventh")
        await api.node.settle()
        assert {name: await api.runs(name) for name in names} == before
        assert await api.fired("sixth") == []
        await api.to("2026-01-05T11:00:00Z")
        for name in names:
            assert await api.fired(name) == at("10:00", "11:00", day="2026-01-05")


# --- kind 3: editing, pausing, cancelling and rescheduling ----------------------------------------------------------------------


async def test_a_changed_pattern_does_not_run_for_slots_before_the_change() -> None:
    """B-041: ran on the 10th; on the 12th it is moved to the 11th: next is the 11th of the next month."""
    async with scheduling("2026-01-09T00:00:00Z") as api:
        await api.create("statement", cron="0 6 10 * *", missed_runs={"policy": "run_all"})
        await api.to("2026-01-12T00:00:00Z")
        changed = await api.patch("statement", cron="0 6 11 * *")
        assert changed["next_runs"][0] == "2026-02-11T06:00:00Z"
        await api.to("2026-02-12T00:00:00Z")
        assert await api.fired("statement") == ["2026-01-10T06:00:00Z", "2026-02-11T06:00:00Z"]


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ({"every_s": 3_600}, "2026-01-05T13:20:00Z"),
        ({"cron": None, "every_s": 3_600}, "2026-01-05T13:20:00Z"),
        ({"cron": "0 * * * *"}, "2026-01-05T13:00:00Z"),
    ],
)
async def test_from_daily_to_hourly_the_next_run_lies_ahead(change: dict[str, Any], first: str) -> None:
    """B-043: changed at 12:20, an interval counts from the change, a cron from its pattern."""
    async with scheduling("2026-01-05T03:00:00Z") as api:
        await api.create("sync", cron="0 4 * * *")
        await api.to("2026-01-05T12:20:00Z")
        assert (await api.patch("sync", **change))["next_runs"][0] == first
        await api.to(first)
        assert await api.fired("sync") == ["2026-01-05T04:00:00Z", first]


async def test_deleted_and_made_again_it_has_one_run_a_slot() -> None:
    """B-046: ten times within a second."""
    async with scheduling() as api:
        await api.create("sync", cron="*/10 * * * *")
        for _ in range(10):
            await api.good("DELETE", "/v1/schedules/sync")
            waiting = await api.good("GET", "/v1/jobs?queue=reports&status=SCHEDULED")
            assert waiting["jobs"] == [], "the waiting run went with its schedule"
            await api.create("sync", cron="*/10 * * * *")
        await api.to("2026-01-05T10:30:00Z")
        jobs = (await api.good("GET", "/v1/jobs?queue=reports&status=QUEUED"))["jobs"]
        assert [job["fire_at"] for job in jobs] == at("10:10", "10:20", "10:30", day="2026-01-05")


@pytest.mark.parametrize("spec", [{"every_s": 3_600}, {"cron": "0 * * * *"}])
async def test_a_run_by_hand_leaves_the_timetable_as_it_is(spec: dict[str, Any]) -> None:
    """B-048: at :20, before and after a restart; the run has its own id and says that it was made by hand."""
    async with scheduling() as api:
        made = await api.create("sync", **spec)
        await api.to("2026-01-05T10:20:00Z")
        by_hand = await api.good("POST", "/v1/schedules/sync/runs")
        assert (by_hand["trigger"], by_hand["fire_at"], by_hand["schedule"]) == ("manual", "2026-01-05T10:20:00Z", "sync")
        assert "scheduled_for" not in by_hand
        after = await api.get("sync")
        assert (after["next_runs"], after["version"]) == (made["next_runs"], made["version"])
        assert after["last_run"]["job_id"] == by_hand["job_id"]
        await api.to("2026-01-05T11:00:00Z")
        waiting = {job["job_id"]: job for job in await api.runs("sync")}
        assert len(waiting) == 3
        assert [job["trigger"] for job in waiting.values()] == ["manual", "on_time", "on_time"]


@pytest.mark.parametrize("spec", [{"every_s": 3_600}, {"cron": "0 * * * *"}])
async def test_a_run_by_hand_leaves_the_timetable_also_over_a_restart(spec: dict[str, Any]) -> None:
    """B-048, the restart."""
    async with scheduling() as api:
        made = await api.create("sync", **spec)
        await api.good("POST", "/v1/schedules/sync/runs")
        await api.node.graceful_restart()
        record = await api.node.node.read_schedule("default", "sync")
        assert record is not None
        assert [parse_instant(run) for run in made["next_runs"]] == list(record.preview.next_runs)


@pytest.mark.parametrize("how", ["run", "patch"])
async def test_running_the_next_one_early_leaves_its_successor_standing(how: str) -> None:
    """B-050: the successor is there when the answer is, and after a crash."""
    async with scheduling() as api:
        await api.create("sync", cron="0 * * * *")
        (waiting,) = await api.runs("sync")
        if how == "run":
            early = await api.good("POST", f"/v1/jobs/{waiting['job_id']}:run")
        else:
            early = await api.good("PATCH", f"/v1/jobs/{waiting['job_id']}", {"run_at": api.now})
        assert early["scheduled_for"] == "2026-01-05T11:00:00Z"
        runs = await api.runs("sync")
        assert [(job["scheduled_for"], job["status"]) for job in runs] == [
            ("2026-01-05T11:00:00Z", "QUEUED"), ("2026-01-05T12:00:00Z", "SCHEDULED"),
        ]  # fmt: skip
        assert (await api.get("sync"))["next_runs"][0] == "2026-01-05T12:00:00Z"
        await api.node.crash_and_restart()
        await api.node.advance(to=parse_instant("2026-01-05T13:00:00Z"))
        page = await api.node.node.list_runs("default", "sync", cursor=None, limit=100)
        assert page is not None
        fired = sorted(record.state.fire_at_ms for record in page.jobs if record.status.name == "QUEUED")
        assert fired == [parse_instant(f"2026-01-05T{time}:00Z") for time in ("10:00", "12:00", "13:00")]
