"""Cases from the field about listings and retention (CASES.md, kind 12)."""

from __future__ import annotations

import pytest

from wheelsched.model.states import Status
from wheelsched.node.face import JobFilter
from wheelsched.testing import TestNode, open_test_node
from wheelsched.testing.checks import all_rows, check_rows


@pytest.mark.parametrize("limit", [1, 7, 100])
async def test_jobs_of_one_instant_are_each_on_exactly_one_page(limit: int) -> None:
    """B-147: a thousand of one commit, while others are made, cancelled and claimed between the pages."""
    async with open_test_node() as node:
        run_at_ms = node.now_ms + 3_600_000
        replies = await node.create_many([{"run_at_ms": run_at_ms}] * (1_000 if limit > 1 else 100))
        ids = [reply.state.job_id for reply in replies if reply.state]
        doomed = set(ids[::10])
        seen: list[bytes] = []
        cursor: bytes | None = None
        while True:
            page = await node.node.list_jobs(JobFilter(node.tenant, "default"), cursor=cursor, limit=limit)
            seen += [record.state.job_id for record in page.jobs]
            if (cursor := page.cursor) is None:
                break
            await node.create(run_at_ms=run_at_ms + len(seen) % 3 - 1)
            if doomed:
                await node.cancel(doomed.pop())
        kept = set(ids) - set(ids[::10])
        counts = {job_id: seen.count(job_id) for job_id in kept}
        assert set(counts.values()) == {1}
        assert all(seen.count(job_id) <= 2 for job_id in ids), "a job cancelled meanwhile may be listed anew where it went"


async def in_every_final_state(node: TestNode) -> dict[str, bytes]:
    """One job in each, none with a key."""
    jobs = {"CANCELLED": await node.create(delay_s=300 * 86_400)}
    await node.cancel(jobs["CANCELLED"])
    jobs["SKIPPED"] = await node.create(start_deadline_s=1)
    await node.advance(s=2)
    for status, outcome in (("SUCCEEDED", "succeeded"), ("DEAD", "fatal_failure")):
        jobs[status] = await node.create(max_attempts=3)
        (claimed,) = await node.claim()
        await node.complete(claimed, "retryable_failure", retry_after_s=0)
        await node.advance(ms=1)
        (claimed,) = await node.claim()
        await node.complete(claimed, outcome)
    assert {status: await node.status(job) for status, job in jobs.items()} == {status: status for status in jobs}
    return {status: job.job_id for status, job in jobs.items()}


async def test_every_final_state_is_purged_after_its_own_period_and_leaves_no_row() -> None:
    """B-153: retention 1 h; dead letters 90 days; a job cancelled long before its time counts from its cancellation."""
    async with open_test_node() as node:
        await node.put_queue(retention_ms=3_600_000)
        waiting = [await node.create(delay_s=200 * 86_400), await node.create("other")]
        await node.claim("other", lease_s=43_200)
        jobs = await in_every_final_state(node)
        await node.advance(s=3_590)
        assert len([job for job in jobs.values() if await node.node.read_job(node.tenant, job)]) == 4
        await node.advance(s=30)
        left = [status for status, job in jobs.items() if await node.node.read_job(node.tenant, job)]
        assert left == ["DEAD"]
        await node.advance(s=90 * 86_400)
        assert await node.node.read_job(node.tenant, jobs["DEAD"]) is None
        states = check_rows(node.store, node.settings.cluster.group_count)
        assert set(states) == {job.job_id for job in waiting}
        rows = all_rows(node.store)
        assert not any(job in key for family in rows.values() for job in jobs.values() for key in family)


async def test_cancelled_jobs_of_the_far_future_are_purged_however_many_there_are() -> None:
    """B-153: more than one sweep looks at; those that wait on are not touched."""
    async with open_test_node() as node:
        await node.put_queue(retention_ms=3_600_000)
        for number in range(12):
            replies = await node.create_many([{"delay_s": 86_400.0 * (1 + number)}] * 100)
            for reply in replies:
                assert reply.state is not None
                await node.cancel(reply.state)
        kept = await node.create(delay_s=86_400 * 5)
        await node.advance(s=3_600)
        for _ in range(20):
            await node.advance(s=10)
        assert [record.state.job_id for record in await node.list_jobs("default")] == [kept.job_id]
        assert (await node.depth()) == {"SCHEDULED": (0, 1, 0)}
        assert (await node.get(kept)).status is Status.SCHEDULED
