"""Memory made anew from the rows: after a crash, a restart, and when the wall clock was set back."""

from __future__ import annotations

import asyncio

import pytest

from wheelsched.core.errors import StaleLease
from wheelsched.model.commands import Release
from wheelsched.testing import TestNode, open_test_node
from wheelsched.testing.checks import check_audit, check_depth, check_rows
from wheelsched.testing.node import make_settings

RESTARTS = ["crash", "stop", "step"]


async def again(node: TestNode, how: str) -> None:
    if how == "crash":
        await node.crash_and_restart()
    elif how == "stop":
        await node.graceful_restart()
    else:  # the wheels and ready queues are dropped and read again while the node runs
        await node.step_wall_clock(s=-1)
        await node.advance(s=1)


@pytest.mark.parametrize("how", RESTARTS)
async def test_ready_retrying_running_held_and_spilled_jobs_are_all_where_they_were(how: str) -> None:
    async with open_test_node(settings=make_settings(ready_queue_max=8)) as node:
        await node.advance(s=3_600)
        await node.create()
        await node.complete((await node.claim())[0])
        await node.step_wall_clock(s=-1_800)  # what is due in the next half hour is held from here on
        held = [await node.create(delay_s=600) for _ in range(3)]
        ready = [await node.create(window_s=float(number % 2) * 0.001) for number in range(40)]
        await node.settle()
        running = await node.claim(jobs_max=4, lease_s=300)
        retrying = await node.claim(jobs_max=4)
        for claimed in retrying:
            await node.complete(claimed, "retryable_failure", retry_after_s=60)
        later = [await node.create(delay_s=90_000, window_s=60)]
        before = await node.depth()
        await again(node, how)
        assert await node.depth() == before
        await check_depth(node, "default")
        await check_audit(node)
        claimed_ids: list[bytes] = []
        while jobs := await node.claim(jobs_max=7, lease_s=43_200):
            claimed_ids += [job.state.job_id for job in jobs]
            await node.settle()
        gone = {job.state.job_id for job in (*running, *retrying)}
        assert set(claimed_ids) == {job.job_id for job in ready} - gone and len(claimed_ids) == len(set(claimed_ids))
        await node.advance(s=60)
        assert {job.state.job_id for job in await node.claim(jobs_max=100, lease_s=43_200)} == {job.state.job_id for job in retrying}
        for claimed in running:
            await node.complete(claimed)
        await node.advance(s=540)
        assert {job.state.job_id for job in await node.claim(jobs_max=100, lease_s=43_200)} == {job.job_id for job in held}
        assert await node.status(later[0]) == "SCHEDULED"
        check_rows(node.store, node.settings.cluster.group_count)


@pytest.mark.parametrize("how", RESTARTS)
async def test_the_horizon_is_loaded_again_and_what_was_cancelled_stays_so(how: str) -> None:
    async with open_test_node(settings={"scheduler": {"horizon_s": 60}}) as node:
        jobs = [await node.create(delay_s=5 * number, window_s=float(number % 2)) for number in range(1, 40)]
        for job in jobs[::4]:
            await node.cancel(job)
        await node.advance(s=50)
        await again(node, how)
        await node.advance(s=200)
        claimed = {job.state.job_id for job in await node.claim(jobs_max=100)}
        assert claimed == {job.job_id for number, job in enumerate(jobs) if number % 4}
        assert node.node.dispatcher.statistics().timers == 0


@pytest.mark.parametrize("how", ["crash", "stop"])
async def test_a_running_attempt_is_granted_one_full_lease_after_a_restart(how: str) -> None:
    async with open_test_node() as node:
        await node.create(initial_backoff_s=0)
        (claimed,) = await node.claim(lease_s=30)
        await node.advance(s=29)
        await again(node, how)
        await node.advance(s=29)
        await node.heartbeat(claimed, lease_s=60)
        await node.heartbeat(claimed, lease_s=5)
        await again(node, how)
        # The longest that was asked for is on record; the shorter one was a matter of this node's memory.
        await node.advance(s=59.999)
        await node.heartbeat(claimed)
        await node.advance(s=60)
        with pytest.raises(StaleLease):
            await node.heartbeat(claimed)


async def test_the_timeout_goes_on_across_a_restart() -> None:
    async with open_test_node() as node:
        job = await node.create(timeout_s=100, max_attempts=1)
        await node.claim(lease_s=600)
        await node.advance(s=60)
        await node.crash_and_restart()
        await node.advance(s=39.999)
        assert await node.status(job) == "RUNNING"
        await node.advance(ms=1)
        assert await node.status(job) == "DEAD"


async def test_queue_settings_and_pause_survive_a_crash() -> None:
    async with open_test_node() as node:
        await node.put_queue(max_concurrency=3, lease_ms=7_000, retention_ms=60_000, weights=(1, 2, 3), rate_per_s=50.0)
        await node.pause()
        settings = (await node.queue()).settings
        await node.create_many([{}] * 5)
        await node.crash_and_restart()
        assert (await node.queue()).settings == settings and settings.paused
        assert await node.claim() == []
        await node.resume()
        await node.graceful_restart()
        await node.advance(s=1)
        assert len(await node.claim(jobs_max=10)) == 3


async def test_changes_while_the_rows_are_read_again_are_in_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small slices, so that the loop turns between them; jobs are made, cancelled, claimed and released then."""
    monkeypatch.setattr("wheelsched.dispatch.loader.SLICE_ROWS", 10)
    async with open_test_node(settings={"cluster": {"group_count": 1}}) as node:
        for _ in range(3):
            await node.create_many([{}] * 500)
        await node.create_many([{"queue": "default", "delay_s": 90_000.0}] * 200)  # else a count too high would not show
        jobs = [record.state.job_id for record in await node.list_jobs("default", limit=1_000)][:1_500]
        held = await node.claim(jobs_max=100)
        node.clock.step_wall(ms=-1_000)
        reading = asyncio.ensure_future(node.settle())
        changes = [node.cancel(job_id) for job_id in jobs[100::150]]
        changes += [node.create() for _ in range(10)]
        changes += [node.release(claimed) for claimed in held[:5]]
        await node.together(*changes)
        assert not reading.done(), "the changes were to fall into the reading"
        await reading
        await check_depth(node, "default")
        claimed: list[bytes] = []
        while handed := await node.claim(jobs_max=100):
            claimed += [job.state.job_id for job in handed]
        assert len(claimed) == len(set(claimed)) == 1_500 - 100 - 10 + 10 + 5
        await check_depth(node, "default")
        await check_audit(node)


async def test_the_flexible_lane_is_read_while_the_node_works_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is claimed, released and made before its rows are read is counted and handed out once."""
    monkeypatch.setattr("wheelsched.dispatch.loader.SLICE_ROWS", 10)
    async with open_test_node(settings={"cluster": {"group_count": 1}}) as node:
        for _ in range(3):
            await node.create_many([{"window_s": 1.0}] * 500)
        await node.advance(s=1)
        await node.create_many([{"delay_s": 90_000.0}] * 200)  # else a count too high would not show
        running = await node.claim(jobs_max=100)
        await node.crash()
        opening = asyncio.ensure_future(node.open())
        while node._node is None:  # noqa: ASYNC110  # it opens within a few turns of the loop
            await asyncio.sleep(0)
        made = [node.node.propose(node.command(window_s=1.0)) for _ in range(20)]
        released = [node.node.propose(Release(job.state.job_id, job.state.attempt, job.state.fencing)) for job in running]
        await asyncio.gather(opening, *made, *released)
        await check_depth(node, "default")
        await node.advance(s=1)
        claimed: list[bytes] = []
        while handed := await node.claim(jobs_max=100):
            claimed += [job.state.job_id for job in handed]
        assert len(claimed) == len(set(claimed)) == 1_520
        await check_depth(node, "default")
