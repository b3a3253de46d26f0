"""Ready queues that hold fewer jobs than are due: what is spilled is read again in order, once, and none is lost."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest

from wheelsched.testing import TestNode, open_test_node
from wheelsched.testing.checks import check_audit, check_depth, check_rows
from wheelsched.testing.node import make_settings

BOUND = 20


@pytest.fixture
async def node(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TestNode]:
    """Ten times fewer jobs in memory than the tests make, and slices of refills that end in the middle of every group."""
    monkeypatch.setattr("wheelsched.dispatch.dispatcher.REFILL_ROWS", 8)
    async with open_test_node(settings=make_settings(ready_queue_max=BOUND)) as node:
        yield node


async def due_jobs(node: TestNode, count: int) -> list[bytes]:
    """Jobs due in the order of the list, each at a millisecond of its own, made in another order."""
    start_ms = node.now_ms + 1_000
    places = list(range(count))
    random.Random(7).shuffle(places)
    ids: dict[int, bytes] = {}
    for chunk in range(0, count, 50):
        part = places[chunk : chunk + 50]
        for place, reply in zip(part, await node.create_many([{"run_at_ms": start_ms + place} for place in part]), strict=True):
            assert reply.state is not None
            ids[place] = reply.state.job_id
    await node.advance(to=start_ms + count)
    return [ids[place] for place in range(count)]


async def claim_all(node: TestNode, *, jobs_max: int = 7) -> list[bytes]:
    claimed: list[bytes] = []
    while jobs := await node.claim(jobs_max=jobs_max, lease_s=600):
        claimed += [job.state.job_id for job in jobs]
        await node.settle()
    return claimed


async def test_ten_times_more_jobs_than_the_bound_are_claimed_once_and_in_order(node: TestNode) -> None:
    ids = await due_jobs(node, 10 * BOUND)
    assert node.node.dispatcher.statistics().ready <= BOUND
    await check_depth(node, "default")
    assert await claim_all(node) == ids
    await check_depth(node, "default")


async def test_cancelled_jobs_among_the_spilled_are_not_handed_out_and_count_no_more(node: TestNode) -> None:
    ids = await due_jobs(node, 10 * BOUND)
    for job_id in ids[::3]:
        await node.cancel(job_id)
    await check_depth(node, "default")
    assert await claim_all(node) == [job_id for place, job_id in enumerate(ids) if place % 3]
    assert await node.depth() == {"RUNNING": (0, 133, 0), "CANCELLED": (0, 67, 0)}
    await node.create()
    assert (await node.depth())["QUEUED"] == (0, 1, 0), "what was cancelled is not counted against later jobs"


async def test_retries_keep_their_place_among_the_spilled(node: TestNode) -> None:
    """A retry sorts by its `fire_at`, so it comes before what is spilled, and with it when it was late itself."""
    ids = await due_jobs(node, 6 * BOUND)
    early = await node.claim(jobs_max=10, lease_s=600)
    for claimed in early:
        await node.complete(claimed, "retryable_failure", retry_after_s=5)
    await node.advance(s=5)
    assert await claim_all(node) == ids
    await check_audit(node)


async def test_released_jobs_return_before_the_spilled_ones(node: TestNode) -> None:
    ids = await due_jobs(node, 3 * BOUND)
    for claimed in await node.claim(jobs_max=10):
        await node.release(claimed)
    assert await claim_all(node) == ids


async def test_priorities_spill_apart_and_all_come_back(node: TestNode) -> None:
    wanted = [{"priority": ("critical", "default", "bulk")[number % 3], "delay_s": 1 + number / 1000} for number in range(12 * BOUND)]
    await node.create_many(wanted)
    await node.advance(s=2)
    await check_depth(node, "default")
    claimed = await claim_all(node, jobs_max=100)
    assert len(claimed) == len(set(claimed)) == 12 * BOUND


async def test_two_jobs_of_one_instant_across_the_mark_are_both_claimed(node: TestNode) -> None:
    """All of them due in the same millisecond: the mark falls between equals."""
    await node.create_many([{"run_at_ms": node.now_ms + 1_000}] * (10 * BOUND))
    await node.advance(s=1)
    claimed = await claim_all(node)
    assert len(claimed) == len(set(claimed)) == 10 * BOUND


async def test_equals_at_the_end_of_a_slice_are_not_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """All due in one millisecond, and a bound wide enough that the mark is where a slice ended, not where memory was full."""
    monkeypatch.setattr("wheelsched.dispatch.dispatcher.REFILL_ROWS", 8)
    settings = make_settings({"cluster": {"group_count": 1}}, ready_queue_max=100)
    async with open_test_node(settings=settings) as node:
        await node.create_many([{"run_at_ms": node.now_ms + 1_000}] * 400)
        await node.advance(s=1)
        claimed = await claim_all(node)
        assert len(claimed) == len(set(claimed)) == 400


async def test_a_restart_with_spilled_jobs_forgets_none(node: TestNode) -> None:
    ids = await due_jobs(node, 10 * BOUND)
    first = [job.state.job_id for job in await node.claim(jobs_max=15, lease_s=600)]
    await node.crash_and_restart()
    await check_depth(node, "default")
    assert first + await claim_all(node) == ids
    await check_audit(node)
    check_rows(node.store, node.settings.cluster.group_count)


async def test_flexible_jobs_spill_and_follow_the_precise_ones(node: TestNode) -> None:
    await node.create_many([{"window_s": 1.0}] * (5 * BOUND))
    precise = [reply.state.job_id for reply in await node.create_many([{"delay_s": 2.0}] * (5 * BOUND)) if reply.state]
    await node.advance(s=2)
    claimed = await claim_all(node)
    assert set(claimed[: 5 * BOUND]) == set(precise)
    assert len(set(claimed)) == 10 * BOUND
