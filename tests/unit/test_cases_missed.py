"""Cases from the field about missed runs, catching up and overlap (CASES.md, kind 2), and about zone data that changes (B-019).

A stall is a clock that moves on while nothing fires; an outage is a node that is gone.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import Counter
from datetime import UTC, datetime
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from wheelsched.core.errors import ConcurrencyLimit
from wheelsched.cron import ZoneData
from wheelsched.model import keys
from wheelsched.model.schedules import Reason
from wheelsched.model.states import Status
from wheelsched.node.face import JobRecord
from wheelsched.node.schedules import ZONES_KEY
from wheelsched.testing import TestNode, open_test_node
from wheelsched.testing.checks import check_audit, check_rows

MINUTE_MS = 60_000
HOUR_MS = 3_600_000


def ms(text: str) -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


START_MS = ms("2026-01-05T10:00:00")


def at_of(job: JobRecord) -> int:
    assert job.state.run is not None
    return job.state.run.scheduled_for_ms


def why(job: JobRecord) -> str:
    return str(msgspec.json.decode(job.error)["code"])


async def told(node: TestNode, name: str = "schedule", step_ms: int = MINUTE_MS) -> dict[int, str]:
    """What became of each occurrence: its job's status, a skip with its reason; each may be told once."""
    jobs, skipped = await node.runs(name)
    found: dict[int, str] = {}
    for job in jobs:
        assert at_of(job) not in found, "one_job_per_occurrence"
        found[at_of(job)] = why(job) if job.status is Status.SKIPPED else job.status.name
    for row in skipped:
        for at_ms in range(row.from_ms, row.to_ms + 1, step_ms):
            assert at_ms not in found, "an occurrence with a job has a record, too"
            found[at_ms] = Reason(row.reason).name.lower()
    return dict(sorted(found.items()))


async def outage(node: TestNode, length_ms: int) -> None:
    await node.crash()
    node.clock.advance(ms=length_ms)
    await node.open()


async def stall(node: TestNode, length_ms: int) -> None:
    """Time passes, and nobody looks."""
    node.clock.advance(ms=length_ms)
    await node.settle()


# --- B-021 ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missed", ["run_latest", "run_all", "skip"])
async def test_after_more_than_a_hundred_missed_slots_a_schedule_goes_on(missed: str) -> None:
    """B-021: every minute, three hours of nothing. A stated bound on what is caught up, the rest on record, and then the usual."""
    async with open_test_node(start_ms=START_MS) as node:
        await node.put_schedule(cron="* * * * *", missed=missed)
        await node.advance(s=90)
        await outage(node, 3 * HOUR_MS)
        counted = Counter((await told(node)).values())
        wanted = {
            "run_latest": {"QUEUED": 2, "superseded": 179},
            "run_all": {"QUEUED": 101, "catch_up_cap": 80},
            "skip": {"QUEUED": 1, "missed": 180},
        }
        assert counted == {**wanted[missed], "SCHEDULED": 1}
        await node.advance(s=600)
        after = await told(node)
        assert [after[node.now_ms // MINUTE_MS * MINUTE_MS - back * MINUTE_MS] for back in range(10)] == ["QUEUED"] * 10
        assert list(after) == list(range(START_MS + MINUTE_MS, max(after) + 1, MINUTE_MS)), "each occurrence is told, and none twice"
        record = await node.schedule()
        assert sum(record.course.skipped) == sum(count for what, count in counted.items() if what.islower())
        await check_audit(node)
        check_rows(node.store, node.settings.cluster.group_count)


# --- B-023 ----------------------------------------------------------------------------------------------------------------------


async def test_a_stall_makes_runs_late_and_drops_none_without_a_deadline() -> None:
    """B-023: 5 s over the due time of a job and of two schedules; only the one that asked for it loses its run, and says so."""
    async with open_test_node(start_ms=START_MS) as node:
        await node.put_schedule("patient", cron="* * * * *")
        await node.put_schedule("strict", cron="* * * * *", starting_deadline_s=2)
        job = await node.create(delay_s=60)
        await node.advance(s=59.9)
        await stall(node, 5_100)
        assert await node.status(job) == "QUEUED"
        assert await told(node, "patient") == {START_MS + MINUTE_MS: "QUEUED", START_MS + 2 * MINUTE_MS: "SCHEDULED"}
        assert await told(node, "strict") == {START_MS + MINUTE_MS: "missed_deadline", START_MS + 2 * MINUTE_MS: "SCHEDULED"}
        assert (await node.schedule("strict")).course.skipped[Reason.MISSED_DEADLINE] == 1
        assert b'wheelsched_occurrences_skipped_total{reason="missed_deadline"} 1.0' in node.node.render_metrics()[0]
        skipped, _ = (await node.runs("strict"))[0]
        (row,) = await node.attempts(skipped)
        assert (row.cause, row.detail, row.actor) == ("skip", "missed_deadline", "schedule strict")
        # Late it has its instant all the same: how late is told by when it started.
        (late, _) = (await node.runs("patient"))[0]
        assert late.state.fire_at_ms == START_MS + MINUTE_MS


async def test_a_stall_of_a_few_seconds_misses_nothing_whatever_the_policy() -> None:
    """B-023: merely late is not missed."""
    async with open_test_node(start_ms=START_MS) as node:
        await node.put_schedule(every_s=10, missed="skip")
        for _ in range(20):
            await stall(node, 25_000)
        assert set((await told(node, step_ms=10_000)).values()) == {"QUEUED", "SCHEDULED"}
        assert len(await told(node, step_ms=10_000)) == 51


# --- B-031 ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("node_dies", [False, True])
async def test_forbid_and_a_worker_that_dies_do_not_stop_a_schedule_for_ever(node_dies: bool) -> None:
    """B-031: every 10 s; the worker is gone, and the node with it. When the lease has run out the run ends by its policy; slots
    resume, and what was left out is counted."""
    async with open_test_node(start_ms=START_MS) as node:
        await node.put_schedule(every_s=10, overlap="forbid", max_attempts=2, initial_backoff_s=1, max_backoff_s=1)
        await node.advance(s=10)
        (first,) = await node.claim(lease_s=30)
        if node_dies:
            await outage(node, 1_000)
        await node.advance(s=30)
        assert (await node.get(first)).state.attempt == 1, "it waits for its second attempt, or has it still to get"
        await node.advance(s=5)
        (second,) = await node.claim(lease_s=30)
        assert (second.state.job_id, second.state.attempt) == (first.state.job_id, 2)
        await node.advance(s=35)
        assert (await node.get(first)).status is Status.DEAD
        await node.advance(s=20)
        (third,) = await node.claim()
        assert third.state.job_id != first.state.job_id
        await node.complete(third)
        await node.advance(s=10)
        seen = await told(node, step_ms=10_000)
        counted = Counter(seen.values())
        assert counted["DEAD"] == counted["SUCCEEDED"] == counted["SCHEDULED"] == 1
        assert counted["overlap"] == sum((await node.schedule()).course.skipped) >= 6
        assert list(seen) == list(range(START_MS + 10_000, max(seen) + 1, 10_000))
        assert max(seen) == node.now_ms // 10_000 * 10_000 + 10_000


# --- B-033 ----------------------------------------------------------------------------------------------------------------------


async def test_forbid_decides_at_the_slots_own_time_and_for_good() -> None:
    """B-033: the run of :00 goes on to 90 s; within the deadline of :01, which stays skipped. Who wants a queue says `buffer_one`."""
    for overlap, wanted in (("forbid", "overlap"), ("buffer_one", "QUEUED")):
        async with open_test_node(start_ms=START_MS) as node:
            await node.put_schedule(cron="* * * * *", overlap=overlap, starting_deadline_s=120)
            await node.advance(s=60)
            (first,) = await node.claim(lease_s=120)
            await node.advance(s=90)
            await node.complete(first)
            await node.settle()
            assert (await told(node))[START_MS + 2 * MINUTE_MS] == wanted
            await node.advance(s=20)
            assert (await told(node))[START_MS + 2 * MINUTE_MS] == wanted
            if overlap == "forbid":
                await node.advance(s=10)
                (third,) = await node.claim()
                assert third.state.run is not None and third.state.run.scheduled_for_ms == START_MS + 3 * MINUTE_MS


async def test_a_run_by_hand_is_told_what_forbids_it() -> None:
    async with open_test_node(start_ms=START_MS) as node:
        await node.put_schedule(overlap="forbid")
        await node.start_run()
        with pytest.raises(ConcurrencyLimit, match="overlap is forbid"):
            await node.start_run()


# --- B-038 ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missed", ["run_all", "run_latest", "skip"])
@pytest.mark.parametrize("seed", range(4))
async def test_stalls_longer_than_the_interval_leave_no_gap(missed: str, seed: int) -> None:
    """B-038: an hour of every-minute in steps of 61 to 90 s, at random. What goes on goes on from the stored next time."""
    rng = random.Random(seed)
    async with open_test_node(start_ms=START_MS) as node:
        await node.put_schedule(cron="* * * * *", missed=missed)
        while node.now_ms < START_MS + HOUR_MS:
            await stall(node, min(rng.randint(61_000, 90_000), START_MS + HOUR_MS - node.now_ms))
        seen = await told(node)
        assert list(seen) == [START_MS + minute * MINUTE_MS for minute in range(1, 62)]
        counted = Counter(seen.values())
        if missed == "run_all":
            assert counted == {"QUEUED": 60, "SCHEDULED": 1}
        elif missed == "run_latest":
            # A stall passes one slot or two: of two the later runs.
            assert set(counted) <= {"QUEUED", "superseded", "SCHEDULED"} and counted["superseded"] < counted["QUEUED"]
            ran = [at_ms for at_ms, what in seen.items() if what == "QUEUED"]
            assert max(later - earlier for earlier, later in pairwise(ran)) <= 2 * MINUTE_MS
        else:
            assert set(counted) <= {"QUEUED", "missed", "SCHEDULED"}
        assert sum((await node.schedule()).course.skipped) == sum(count for what, count in counted.items() if what.islower())


# --- B-019 ----------------------------------------------------------------------------------------------------------------------

PACKAGE = Path(str(files("tzdata"))) / "zoneinfo"
VERSION = ZoneData.of_package().version


def zone_data(folder: Path, version: str, **replaced: str) -> Path:
    """A tree with a version of its own, some of its zones being others: `Berlin="Asia/Tokyo"`."""
    folder.mkdir(exist_ok=True)
    index = (PACKAGE / "tzdata.zi").read_text().replace(f"# version {VERSION}", f"# version {version}", 1)
    for name in ("Europe/Berlin", "Europe/Paris", "Asia/Tokyo", "UTC"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(PACKAGE / replaced.get(name.split("/")[-1], name), folder / name)
    (folder / "tzdata.zi").write_text(index)
    return folder


async def restarted_with(node: TestNode) -> None:
    """Started again, and done with the zone data it finds: that happens beside everything else."""
    await node.graceful_restart()
    fingerprint = node.node.dispatcher.timetable.zones.fingerprint().encode()
    while node.store.get(keys.RAFT_META, ZONES_KEY) != fingerprint:  # noqa: ASYNC110  # each turn of the loop goes on with it
        await asyncio.sleep(0)


async def test_new_zone_data_moves_what_waits_in_the_zones_that_changed_alone(tmp_path: Path) -> None:
    """B-019: Berlin gets Tokyo's clock overnight. Its runs move, those of Paris and one-off jobs do not; the version is told."""
    old, new = zone_data(tmp_path / "old", "2098a"), zone_data(tmp_path / "new", "2099a", Berlin="Asia/Tokyo")
    in_use = [old]
    async with open_test_node(start_ms=ms("2026-01-05T20:00:00"), read_zones=lambda: ZoneData.of_folder(in_use[0])) as node:
        for name, zone in (("berlin", "Europe/Berlin"), ("paris", "Europe/Paris")):
            await node.put_schedule(name, cron="0 9 * * *", zone=zone)
        one_off = await node.create(run_at_ms=ms("2026-01-06T08:00:00"))
        assert (await node.schedule("berlin")).course.next_at_ms == ms("2026-01-06T08:00:00")
        in_use[0] = new
        told_of = await node.node.reload_zones()
        assert (told_of.version, told_of.zones, told_of.moved) == ("2099a", ("Europe/Berlin",), 1)
        assert (await node.schedule("berlin")).course.next_at_ms == ms("2026-01-06T00:00:00")
        assert (await node.schedule("berlin")).course.zone_version == "2099a"
        assert (await node.schedule("paris")).course.next_at_ms == ms("2026-01-06T08:00:00")
        assert (await node.get(one_off)).state.fire_at_ms == ms("2026-01-06T08:00:00")
        assert node.node.status()["time_zone_data"] == "2099a"
        assert b"2099a" in node.node.render_metrics()[0]
        await node.advance(to=ms("2026-01-08T12:00:00"))
        berlin = [at_of(job) for job in (await node.runs("berlin"))[0] if job.status is Status.QUEUED]
        assert berlin == [ms(f"2026-01-{day:02}T00:00:00") for day in (6, 7, 8)], "neither an extra run nor a lost one"
        paris = [at_of(job) for job in (await node.runs("paris"))[0] if job.status is Status.QUEUED]
        assert paris == [ms(f"2026-01-{day:02}T08:00:00") for day in (6, 7, 8)]
        assert (await node.node.reload_zones()).moved == 0


async def test_zone_data_that_changed_while_the_node_was_away_moves_what_waits_at_its_start(tmp_path: Path) -> None:
    old, new = zone_data(tmp_path / "old", "2098a"), zone_data(tmp_path / "new", "2099a", Berlin="Asia/Tokyo")
    in_use = [old]
    async with open_test_node(start_ms=ms("2026-01-05T20:00:00"), read_zones=lambda: ZoneData.of_folder(in_use[0])) as node:
        await node.put_schedule(cron="0 9 * * *", zone="Europe/Berlin")
        in_use[0] = new
        await restarted_with(node)
        await node.advance(to=ms("2026-01-05T23:00:00"))
        assert (await node.schedule()).course.next_at_ms == ms("2026-01-06T00:00:00")
        await node.advance(to=ms("2026-01-06T12:00:00"))
        assert [at_of(job) for job in (await node.runs())[0]] == [ms("2026-01-06T00:00:00"), ms("2026-01-07T00:00:00")]


async def test_an_occurrence_that_new_zone_data_moves_into_the_past_runs_at_once_and_once(tmp_path: Path) -> None:
    """Today's nine o'clock has not run, and by the new data it is over: the run is not lost."""
    old, new = zone_data(tmp_path / "old", "2098a"), zone_data(tmp_path / "new", "2099a", Berlin="Asia/Tokyo")
    in_use = [old]
    async with open_test_node(start_ms=ms("2026-01-05T06:00:00"), read_zones=lambda: ZoneData.of_folder(in_use[0])) as node:
        await node.put_schedule(cron="0 9 * * *", zone="Europe/Berlin")
        await node.advance(to=ms("2026-01-06T03:00:00"))
        in_use[0] = new
        assert (await node.node.reload_zones()).moved == 1
        await node.advance(to=ms("2026-01-06T23:00:00"))
        assert [at_of(job) for job in (await node.runs())[0]] == [
            ms("2026-01-05T08:00:00"), ms("2026-01-06T00:00:00"), ms("2026-01-07T00:00:00"),
        ]  # fmt: skip


async def test_ten_changes_of_leader_between_two_versions_compute_each_occurrence_anew_once_at_most(tmp_path: Path) -> None:
    """B-019: nodes that carry different data take no turns: only a newer version recomputes. Method: the same node restarted with
    the one and the other data, and the versions that the waiting job went through."""
    trees = [zone_data(tmp_path / "old", "2098a"), zone_data(tmp_path / "new", "2099a", Berlin="Asia/Tokyo")]
    in_use = [trees[0]]
    async with open_test_node(start_ms=ms("2026-01-05T20:00:00"), read_zones=lambda: ZoneData.of_folder(in_use[0])) as node:
        for number in range(5):
            await node.put_schedule(f"s{number}", cron=f"{number} 9 * * *", zone="Europe/Berlin")
        waiting: dict[str, list[int]] = {f"s{number}": [] for number in range(5)}
        for turn in range(10):
            in_use[0] = trees[turn % 2]
            await restarted_with(node)
            for name, seen in waiting.items():
                seen.append((await node.schedule(name)).course.next_at_ms)
        for number, seen in enumerate(waiting.values()):
            offset_ms = number * MINUTE_MS
            assert seen == [ms("2026-01-06T08:00:00") + offset_ms, *[ms("2026-01-06T00:00:00") + offset_ms] * 9]
        await node.advance(to=ms("2026-01-06T12:00:00"))
        for name in waiting:
            jobs, skipped = await node.runs(name)
            assert [job.status.name for job in jobs] == ["QUEUED", "SCHEDULED"] and not skipped
        check_rows(node.store, node.settings.cluster.group_count)
        await check_audit(node)
