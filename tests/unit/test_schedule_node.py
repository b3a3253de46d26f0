"""Schedules on a whole node: what only shows where rows, memory and log meet."""

from __future__ import annotations

from collections import Counter

from wheelsched.model.schedules import Reason
from wheelsched.model.states import Status
from wheelsched.testing import open_test_node
from wheelsched.testing.checks import check_audit, check_schedules

MINUTE_MS = 60_000
START_MS = 1_767_607_200_000  # a full minute


async def test_what_becomes_due_and_is_taken_away_in_one_entry_leaves_the_depth_right() -> None:
    """It leaves the ready queue before the entry's records come there: a queue that never had any stopped the node."""
    async with open_test_node(settings={"cluster": {"group_count": 1}}) as node:
        job = await node.create("fresh", delay_s=60)
        results = await node.together(node.run_now(job), node.cancel(job))
        assert [result.status for result in results if not isinstance(result, BaseException)] == [Status.SCHEDULED, Status.CANCELLED]
        assert await node.claim("fresh") == []
        assert await node.depth("fresh") == {"CANCELLED": (0, 1, 0)}
        later = await node.create("fresh")
        (claimed,) = await node.claim("fresh")
        assert claimed.state.job_id == later.job_id


async def test_a_run_that_was_leased_under_allow_counts_until_its_end_when_the_policy_becomes_forbid() -> None:
    async with open_test_node(start_ms=START_MS) as node:
        await node.put_schedule(cron="* * * * *")
        await node.advance(s=60)
        (first,) = await node.claim(lease_s=600)
        await node.put_schedule(cron="* * * * *", overlap="forbid")
        await node.advance(s=60)
        assert (await node.schedule()).course.skipped[Reason.OVERLAP] == 1
        await node.complete(first)
        await node.advance(s=60)
        assert Counter(job.status.name for job in (await node.runs())[0]) == {"SUCCEEDED": 1, "SKIPPED": 1, "QUEUED": 1, "SCHEDULED": 1}


async def test_a_waiting_occurrence_patched_to_the_time_it_has_keeps_its_chain() -> None:
    async with open_test_node(start_ms=START_MS) as node:
        await node.put_schedule(cron="* * * * *")
        waiting = (await node.schedule()).course.next_job
        await node.update(waiting, run_at_ms=START_MS + MINUTE_MS)
        await node.advance(s=180)
        assert [job.status.name for job in (await node.runs())[0]] == ["QUEUED"] * 3 + ["SCHEDULED"]
        check_schedules(node.store, node.settings.cluster.group_count)


async def test_what_was_decided_before_the_clock_was_set_back_is_not_decided_again_after_a_pause() -> None:
    """The occurrences of an outage are on record; the clock goes back over them, and the schedule is paused and goes on."""
    async with open_test_node(start_ms=START_MS) as node:
        await node.put_schedule(cron="* * * * *", missed="skip")
        await node.crash()
        node.clock.advance(ms=30 * MINUTE_MS + 500)
        await node.open()
        await node.step_wall_clock(s=-1_200)
        await node.pause_schedule()
        await node.resume_schedule()
        await node.put_schedule(cron="* * * * *", missed="skip", priority="bulk")
        assert (await node.schedule()).course.next_at_ms == START_MS + 31 * MINUTE_MS
        await node.advance(s=1_300)
        jobs, skipped = await node.runs()
        assert [(row.from_ms, row.to_ms, row.count) for row in skipped] == [(START_MS + 2 * MINUTE_MS, START_MS + 30 * MINUTE_MS, 29)]
        assert [job.status.name for job in jobs] == ["SKIPPED", "QUEUED", "SCHEDULED"]
        await check_audit(node)


async def test_pauses_are_on_record_whole_also_where_the_schedule_was_changed_in_between() -> None:
    async with open_test_node(start_ms=START_MS) as node:
        await node.put_schedule(cron="* * * * *")
        await node.advance(s=90)
        await node.pause_schedule()
        await node.advance(s=180)
        await node.put_schedule(cron="* * * * *", priority="bulk")
        await node.advance(s=180)
        await node.resume_schedule()
        _, (row,) = await node.runs()
        assert (row.from_ms, row.to_ms, row.count, row.reason) == (START_MS + 2 * MINUTE_MS, START_MS + 7 * MINUTE_MS, 6, Reason.PAUSED)
