"""Cases from the field about clocks, timers and memory (CASES.md, kind 6), on a clock whose wall time can be stepped."""

from __future__ import annotations

import pytest

from wheelsched.testing import TestNode, open_test_node
from wheelsched.testing.checks import check_audit

DAY_S = 86_400


async def a_job_each_second(node: TestNode, count: int) -> list[bytes]:
    return [(await node.create(delay_s=second)).job_id for second in range(1, count + 1)]


async def claimed_ids(node: TestNode) -> list[bytes]:
    """What is ready now, claimed and done."""
    claimed = await node.claim(jobs_max=100)
    for job in claimed:
        await node.complete(job)
    return [job.state.job_id for job in claimed]


@pytest.mark.parametrize("step_s", [-3_600.0, -60.0, -1.0, -0.001])
async def test_after_a_step_back_nothing_fires_twice_or_early_and_nothing_stalls(step_s: float) -> None:
    """B-096: jobs each second; the wall clock is set back after the fifth."""
    async with open_test_node() as node:
        ids = await a_job_each_second(node, 10)
        await node.advance(s=5)
        assert await claimed_ids(node) == ids[:5]
        await node.step_wall_clock(s=step_s)
        assert await claimed_ids(node) == []
        await node.advance(s=-step_s)
        assert await claimed_ids(node) == []
        for job_id in ids[5:]:
            await node.advance(s=0.999)
            assert await claimed_ids(node) == []
            await node.advance(ms=1)
            assert await claimed_ids(node) == [job_id]


async def test_a_delay_asked_for_after_a_step_back_is_counted_from_the_new_time() -> None:
    """B-096: an hour back, then delay_s 900: due 900 s later, though the node has fired beyond that instant already."""
    async with open_test_node() as node:
        await node.advance(s=10)
        await node.create("warm-up")  # every group's watermark stands at the old time
        await node.step_wall_clock(s=-3_600)
        late = [await node.create(delay_s=900) for _ in range(20)]
        now = await node.create()
        assert await claimed_ids(node) == [now.job_id]
        await node.advance(s=899.999)
        assert await claimed_ids(node) == []
        await node.advance(ms=1)
        assert set(await claimed_ids(node)) == {job.job_id for job in late}
        await node.advance(s=7_200)
        assert await claimed_ids(node) == []


async def test_a_step_forward_fires_what_became_due_once_and_in_order() -> None:
    """B-096: and a step back afterwards takes nothing back."""
    async with open_test_node() as node:
        ids = await a_job_each_second(node, 5)
        await node.step_wall_clock(s=3_600)
        assert await claimed_ids(node) == ids
        await node.step_wall_clock(s=-3_600)
        await node.advance(s=10)
        assert await claimed_ids(node) == []


async def test_a_stepped_wall_clock_ends_no_lease() -> None:
    """B-096: leases are monotonic time."""
    async with open_test_node() as node:
        await node.create()
        (claimed,) = await node.claim(lease_s=45)
        for step_s in (3_600, -7_200, 3_600):
            await node.step_wall_clock(s=step_s)
            await node.heartbeat(claimed)
        await node.advance(s=44)
        await node.complete(claimed)


async def test_a_retry_that_waits_through_a_step_back_is_neither_early_nor_lost() -> None:
    """B-096: the retry is due after the step, under the watermark: it is held until its time."""
    async with open_test_node() as node:
        await node.advance(s=3_600)
        await node.create()
        (claimed,) = await node.claim()
        await node.step_wall_clock(s=-1_800)
        await node.complete(claimed, "retryable_failure", retry_after_s=600)
        await node.advance(s=599.999)
        assert await node.claim() == []
        await node.advance(ms=1)
        assert len(await node.claim()) == 1


async def test_a_step_back_of_one_millisecond_between_creates_loses_nothing() -> None:
    """B-096: the smallest step. A sweep then gives timers up to the hand, which are not due; a claim would drop them for good."""
    async with open_test_node() as node:
        await node.advance(s=1)
        await node.step_wall_clock(ms=-1)
        jobs = [await node.create(delay_s=0.001) for _ in range(8)]
        await node.settle()
        assert await claimed_ids(node) == []
        await node.advance(ms=1)
        assert set(await claimed_ids(node)) == {job.job_id for job in jobs}
        await node.advance(s=60)
        await check_audit(node)


@pytest.mark.parametrize("days", [24, 24.9, 25, 49.7, 50, 364, 365, 366])
async def test_a_long_delay_is_exact_to_the_millisecond(days: float) -> None:
    """B-099: beyond 24.8 days a 32-bit millisecond timer overflows; 366 days is the longest delay there is."""
    async with open_test_node() as node:
        await node.create(delay_s=days * DAY_S)
        await node.advance(s=days * DAY_S - 0.001)
        assert await node.claim() == []
        await node.advance(ms=1)
        assert len(await node.claim()) == 1


async def test_what_lies_beyond_the_horizon_takes_no_memory() -> None:
    """B-100: creates due over a year do not enter the wheel; each comes in when the horizon reaches it."""
    async with open_test_node(settings={"scheduler": {"horizon_s": 300}}) as node:
        near = [{"delay_s": 1 + second} for second in range(100)]
        far = [{"delay_s": 301 + 3_600 * number} for number in range(900)]
        await node.create_many(near + far)
        assert node.node.dispatcher.statistics().timers == 100
        await node.graceful_restart()
        assert node.node.dispatcher.statistics().timers == 100
        await node.advance(s=101)
        assert node.node.dispatcher.statistics().timers == 1  # 301 s lie within 300 s of here
        assert (await node.depth())["QUEUED"] == (0, 100, 0)
