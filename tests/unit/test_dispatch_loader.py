"""The horizon: jobs beyond it, around its mark, and changed while a scan is under way."""

from __future__ import annotations

import asyncio

import pytest

from wheelsched.testing import TestNode, open_test_node
from wheelsched.testing.checks import check_audit, check_depth

HORIZON_S = 10.0


def small(**scheduler: float) -> dict[str, dict[str, float]]:
    return {"cluster": {"group_count": 1}, "scheduler": {"horizon_s": HORIZON_S, **scheduler}}


async def drain(node: TestNode) -> list[bytes]:
    """Everything ready, claimed and done."""
    claimed: list[bytes] = []
    while jobs := await node.claim(jobs_max=100):
        claimed += [job.state.job_id for job in jobs]
        await node.together(*(node.complete(job) for job in jobs))
    return claimed


@pytest.mark.parametrize("off_ms", [-1, 0, 1])
async def test_a_job_at_the_mark_fires_at_its_time_once(off_ms: int) -> None:
    async with open_test_node(settings=small()) as node:
        job = await node.create(delay_s=HORIZON_S + off_ms / 1000)
        await node.advance(s=HORIZON_S + (off_ms - 1) / 1000)
        assert await node.claim() == []
        await node.advance(ms=1)
        assert await drain(node) == [job.job_id]


@pytest.mark.parametrize("window_s", [0.0, 5.0])
async def test_moves_across_the_mark_leave_no_timer_behind_and_lose_none(window_s: float) -> None:
    """PATCH from within to beyond and back, cancel on both sides."""
    async with open_test_node(settings=small()) as node:
        outwards = await node.create(delay_s=5, window_s=window_s)
        await node.update(outwards, delay_s=600)
        inwards = await node.create(delay_s=600, window_s=window_s)
        await node.update(inwards, delay_s=5)
        there_and_back = await node.create(delay_s=5, window_s=window_s)
        await node.update(there_and_back, delay_s=600)
        await node.update(there_and_back, delay_s=5)
        for delay_s in (5, 600):
            await node.cancel(await node.create(delay_s=delay_s, window_s=window_s))
        assert node.node.dispatcher.statistics().timers == 2
        await node.advance(s=10)
        assert set(await drain(node)) == {inwards.job_id, there_and_back.job_id}
        await node.advance(s=600)
        assert await drain(node) == [outwards.job_id]


async def test_jobs_changed_while_a_scan_is_under_way_are_in_memory_exactly_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scan takes a hundred slices; between them jobs are made, cancelled and moved, before and behind where it stands."""
    monkeypatch.setattr("wheelsched.dispatch.loader.SLICE_ROWS", 20)
    async with open_test_node(settings=small()) as node:
        made = []
        for chunk in range(4):
            replies = await node.create_many([{"delay_s": 60 + (chunk * 500 + number) // 40 / 1000} for number in range(500)])
            made += [reply.state for reply in replies if reply.state]
        await node.create_many([{"delay_s": 90_000.0}] * 20)  # else a count too high would not show
        node.clock.advance(ms=55_000)  # all of them come within the horizon at once
        scan = asyncio.ensure_future(node.node.dispatcher.loader.load_ahead())
        await asyncio.sleep(0)
        changes = [node.create(run_at_ms=made[0].fire_at_ms + at_ms) for at_ms in (0, 10, 25, 49)]
        changes += [node.cancel(made[place]) for place in (0, 499, 500, 1_200, 1_999)]
        changes += [node.update(made[place], run_at_ms=made[0].fire_at_ms + 33) for place in (3, 800, 1_900)]
        changes += [node.update(made[place], delay_s=3_600) for place in (7, 900, 1_950)]
        results = await node.together(*changes)
        assert not [result for result in results if isinstance(result, BaseException)]
        assert not scan.done(), "the changes were to fall into the scan"
        await scan
        await node.advance(s=10)
        await check_depth(node, "default")
        claimed = await drain(node)
        assert len(claimed) == len(set(claimed)) == 2_000 + 4 - 5 - 3
        assert made[0].job_id not in claimed and made[7].job_id not in claimed and made[3].job_id in claimed


async def test_a_scan_that_is_cut_short_goes_on_where_it_stopped() -> None:
    """The call that moved a virtual clock hangs up in the middle of the loading: no timer may be missing afterwards."""
    async with open_test_node(settings=small()) as node:
        for chunk in range(4):
            await node.create_many([{"delay_s": 60 + (chunk * 500 + number) // 40 / 1000} for number in range(500)])
        node.clock.advance(ms=55_000)
        scan = asyncio.ensure_future(node.node.dispatcher.loader.load_ahead())
        await asyncio.sleep(0)
        scan.cancel()
        await asyncio.gather(scan, return_exceptions=True)
        await node.settle()
        assert node.node.dispatcher.statistics().timers == 2_000
        await node.advance(s=10)
        assert len(set(await drain(node))) == 2_000


async def test_a_start_deadline_beyond_the_horizon_is_watched_once_it_is_loaded() -> None:
    async with open_test_node(settings=small()) as node:
        job = await node.create(delay_s=100, start_deadline_s=5)
        await node.pause()
        await node.advance(s=105)
        assert await node.status(job) == "QUEUED"
        await node.advance(ms=1)
        assert await node.status(job) == "SKIPPED"
        await check_depth(node, "default")


@pytest.mark.parametrize("claimed_in_time", [True, False])
async def test_the_start_deadline_binds_with_and_without_workers(claimed_in_time: bool) -> None:
    """SKIPPED without a worker; not, where an attempt started in time, even if that attempt fails later; and again after a release."""
    async with open_test_node() as node:
        job = await node.create(delay_s=1, start_deadline_s=10, initial_backoff_s=0)
        await node.advance(s=11)
        if claimed_in_time:
            (claimed,) = await node.claim()
            await node.advance(s=10)
            await node.complete(claimed, "retryable_failure", retry_after_s=0)
            await node.settle()
            assert await node.status(job) == "QUEUED"
            return
        await node.advance(ms=1)
        assert await node.status(job) == "SKIPPED" and await node.claim() == []
        other = await node.create(start_deadline_s=10)
        (claimed,) = await node.claim()
        await node.advance(s=11)
        assert await node.status(other) == "RUNNING"
        await node.release(claimed)
        await node.settle()
        assert await node.status(other) == "SKIPPED"


async def test_the_audit_finds_nothing_to_repair_while_retries_are_on_their_way_through_the_log() -> None:
    """A retry that was swept is in no table until its Fire is applied; that is not lost."""
    async with open_test_node(settings=small()) as node:
        await node.create()
        (claimed,) = await node.claim()
        await node.complete(claimed, "retryable_failure", retry_after_s=30)
        await node.advance(s=29.999)
        node.clock.advance(ms=1)
        firing = asyncio.ensure_future(node.node.dispatcher.firing.turn())
        await asyncio.sleep(0)
        await check_audit(node)
        await firing
        await check_audit(node)
        assert len(await node.claim()) == 1


async def test_the_audit_puts_back_what_memory_has_lost() -> None:
    """Take a job of each kind out of memory behind its back."""
    async with open_test_node(settings=small()) as node:
        await node.create()
        retry = (await node.claim())[0]
        await node.complete(retry, "retryable_failure", retry_after_s=600)
        await node.create()
        running = (await node.claim(lease_s=600))[0]
        await node.create()
        await node.advance(s=60)
        dispatcher = node.node.dispatcher
        dispatcher.timers.clear(node.now_ms)
        dispatcher.leases.end(running.state.job_id)
        memory = dispatcher.queues.ensure(node.tenant, "default")
        memory.clear_ready()
        assert await dispatcher.audit.sweep() == 3
        assert await dispatcher.audit.sweep() == 0
        assert len(await node.claim()) == 1
        await node.advance(s=600)
        assert len(await node.claim(jobs_max=5)) == 2
