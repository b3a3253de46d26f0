"""A node from its start to a clean end: what is under way then, what it remembers, and the small steps of its clock."""

from __future__ import annotations

import asyncio

import pytest
from test_replica import GatedStore

from wheelsched.core.errors import NotFound
from wheelsched.model.commands import Cancel
from wheelsched.model.rows import QueueSettings
from wheelsched.testing import TestNode, open_test_node
from wheelsched.testing.checks import check_audit, check_rows


async def test_timers_and_leases_that_come_due_during_the_last_sync_do_not_spoil_a_clean_end() -> None:
    """Dispatch ends before the log does: else what it proposes is refused, which ended the node as a failure."""
    node = TestNode()
    node.store = store = GatedStore()
    await node.open()
    await node.create_many([{}] * 5)
    await node.claim(jobs_max=3, lease_s=5)
    await node.create(delay_s=5)
    store.gate.clear()
    last = asyncio.ensure_future(node.node.propose(node.command(delay_s=60)))
    for _ in range(5):
        await asyncio.sleep(0)
    closing = asyncio.ensure_future(node.close())
    await asyncio.sleep(0)
    node.clock.advance(ms=5_000)
    dispatcher = node.node.dispatcher
    dispatcher.firing.waking.wake()
    dispatcher.leases.waking.wake()
    for _ in range(20):
        await asyncio.sleep(0)
    store.gate.set()
    await closing
    assert (await last).state is not None


async def test_a_worker_that_hangs_up_while_the_node_stops_keeps_its_lease_until_it_ends() -> None:
    async with open_test_node() as node:
        await node.create(initial_backoff_s=0)
        handed = await node.claim(lease_s=30)
        node.node.stop()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        node.node.give_back(handed)  # cannot be proposed any more; no error either
        await node.graceful_restart()
        await node.advance(s=30)
        assert len(await node.claim()) == 1


async def test_a_restart_leaves_everything_as_it_was() -> None:
    async with open_test_node() as node:
        jobs = [await node.create(("a", "b")[number % 2], delay_s=number * 10, labels={"n": str(number)}) for number in range(20)]
        await node.advance(s=50)
        (claimed,) = await node.claim("a")
        await node.complete(claimed, result={"ok": True})
        before = [await node.get(job) for job in jobs]
        for restart in (node.graceful_restart, node.crash_and_restart):
            await restart()
            assert [await node.get(job) for job in jobs] == before
        assert node.restart_count == 2


async def test_a_queue_exists_from_its_first_claim_or_setting_and_across_restarts() -> None:
    async with open_test_node() as node:
        with pytest.raises(NotFound):
            await node.queue("made")
        await node.claim("claimed")
        await node.put_queue("set", max_concurrency=2)
        await node.pause("paused")
        await node.create("made", delay_s=60)
        await node.graceful_restart()
        views, more = await node.node.list_queues(node.tenant, after="", limit=10)
        assert [view.name for view in views] == ["claimed", "made", "paused", "set"] and more is None
        assert views[0].settings == QueueSettings() and views[2].settings.paused and views[3].settings.max_concurrency == 2


async def test_the_virtual_clock_fires_each_timer_at_its_own_instant() -> None:
    """Retries, leases and deadlines that follow from each other, within one move of the clock."""
    async with open_test_node() as node:
        job = await node.create(delay_s=10, max_attempts=2, initial_backoff_s=0)
        due_ms = node.now_ms + 10_000
        await node.advance(s=60)
        assert (await node.get(job)).state.fire_at_ms == due_ms
        (claimed,) = await node.claim(lease_s=5)
        claimed_ms = node.now_ms
        skipped = await node.create(start_deadline_s=7)
        await node.advance(s=3_600)
        row = (await node.attempts(job))[-1]
        assert row.at_ms == claimed_ms + 5_000 and claimed.state.started_at_ms == claimed_ms
        assert (await node.get(skipped)).state.finished_at_ms == claimed_ms + 7_001


@pytest.mark.parametrize("step_ms", [-1, -2, -50, -1_000])
async def test_a_clock_set_back_between_a_sweep_and_its_fire_delays_no_job(step_ms: int) -> None:
    """The Fire's stamp falls short of the batch that was put aside: it has to be proposed again."""
    async with open_test_node() as node:
        job = await node.create(delay_s=10)
        node.clock.advance(ms=10_000)
        firing = asyncio.ensure_future(node.node.dispatcher.firing.turn())
        await asyncio.sleep(0)
        node.clock.step_wall(ms=step_ms)
        await firing
        assert await node.claim() == [], "never_early"
        node.clock.advance(ms=-step_ms)
        await node.settle()
        (claimed,) = await node.claim()
        assert claimed.state.job_id == job.job_id
        await check_audit(node)


@pytest.mark.parametrize("step_ms", [-1, -2, -1_000])
async def test_a_clock_set_back_between_a_sweep_and_the_naming_of_a_held_job_loses_it_not(step_ms: int) -> None:
    async with open_test_node() as node:
        await node.advance(s=100)
        for _ in range(20):
            await node.create()  # moves the watermarks of all groups
        await node.step_wall_clock(s=-50)
        held = await node.create("held", delay_s=10)
        assert (await node.get(held)).state.held
        node.clock.advance(ms=10_000)
        firing = asyncio.ensure_future(node.node.dispatcher.firing.turn())
        await asyncio.sleep(0)
        node.clock.step_wall(ms=step_ms)
        await firing
        assert await node.claim("held") == []
        node.clock.advance(ms=-step_ms)
        await node.settle()
        assert len(await node.claim("held")) == 1


async def test_a_job_cancelled_between_its_sweep_and_its_fire_is_counted_nowhere() -> None:
    """The cancel is an entry before the Fire; the job's record, swept already, must not come to the ready queue after it."""
    node = TestNode()
    node.store = store = GatedStore()
    await node.open()
    waiting = await node.create(delay_s=3_600)
    jobs = [await node.create(delay_s=10, window_s=float(number % 2) * 0.001) for number in range(10)]
    node.clock.advance(ms=10_000)
    store.gate.clear()
    cancels = [asyncio.ensure_future(node.node.propose(Cancel(job.job_id, node.tenant))) for job in jobs[::2]]
    for _ in range(5):
        await asyncio.sleep(0)
    firing = asyncio.ensure_future(node.node.dispatcher.firing.turn())
    for _ in range(5):
        await asyncio.sleep(0)
    store.gate.set()
    await asyncio.gather(firing, *cancels)
    await node.settle()
    assert await node.depth() == {"SCHEDULED": (0, 1, 0), "QUEUED": (0, 5, 0), "CANCELLED": (0, 5, 0)}
    assert node.node.dispatcher.statistics().ready == 5
    assert len(await node.claim(jobs_max=10)) == 5
    assert await node.status(waiting) == "SCHEDULED"
    check_rows(node.store, node.settings.cluster.group_count)
    await node.close()
