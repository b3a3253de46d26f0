"""Concurrency per definition: runs beyond it wait, cost nothing while they do, and come back as leases end."""

from __future__ import annotations

from msgspec.structs import replace

from wheelsched.model.rows import JobSpec, encode_spec
from wheelsched.model.schedules import Definition, Overlap
from wheelsched.testing import TestNode, open_test_node

HOUR_MS = 3_600_000


async def _backfilled(node: TestNode, count: int, *, limit: int) -> None:
    definition = Definition(
        b"", node.tenant, "reports", "q", every_ms=60_000, anchor_ms=node.now_ms - count * 60_000, max_concurrency=limit,
        overlap=Overlap.ALLOW, spec=encode_spec(JobSpec()),
    )  # fmt: skip
    await node.node.put_schedule(definition)
    counts = await node.node.backfill(node.tenant, "reports", from_ms=definition.anchor_ms, to_ms=node.now_ms, actor="")
    assert counts.created == count
    await node.settle()


async def test_no_more_runs_are_leased_than_the_definition_allows() -> None:
    async with open_test_node() as node:
        await _backfilled(node, 30, limit=2)
        first = await node.claim("q", jobs_max=10)
        assert len(first) == 2
        assert await node.claim("q", jobs_max=10) == []
        await node.complete(first[0])
        second = await node.claim("q", jobs_max=10)
        assert len(second) == 1
        assert second[0].state.fire_at_ms >= first[1].state.fire_at_ms


async def test_runs_put_aside_do_not_hold_back_other_jobs_of_the_queue() -> None:
    async with open_test_node() as node:
        await _backfilled(node, 200, limit=1)
        await node.create("q", payload="plain")
        claimed = await node.claim("q", jobs_max=100)
        assert [job.state.run is None for job in claimed].count(True) == 1
        assert len(claimed) == 2
        assert await node.node.dispatcher.audit.sweep() == 0


async def test_every_run_comes_to_its_turn_also_after_a_crash() -> None:
    async with open_test_node() as node:
        await _backfilled(node, 25, limit=3)
        seen = set()
        for turn in range(30):
            if turn == 4:
                await node.crash_and_restart()
            jobs = await node.claim("q", jobs_max=100)
            assert len(jobs) <= 3
            for job in jobs:
                assert job.state.job_id not in seen
                seen.add(job.state.job_id)
                await node.complete(job)
        assert len(seen) == 25


async def test_a_raised_limit_counts_for_runs_that_wait() -> None:
    async with open_test_node() as node:
        await _backfilled(node, 10, limit=1)
        assert len(await node.claim("q", jobs_max=10)) == 1
        record = await node.node.read_schedule(node.tenant, "reports")
        assert record is not None
        await node.node.put_schedule(replace(record.definition, max_concurrency=5))
        assert len(await node.claim("q", jobs_max=10)) == 4


async def test_a_run_that_was_cancelled_behind_the_cap_leaves_its_place_to_the_next() -> None:
    """The place that became free is given to the first that waits behind the cap. Where that one has been cancelled, nobody but who
    finds that out can tell the next."""
    async with open_test_node() as node:
        await _backfilled(node, 4, limit=1)
        waiting = [record.state.job_id for record in await node.list_jobs("q")]
        (first,) = await node.claim("q", jobs_max=10)
        assert first.state.job_id == waiting[0]
        await node.cancel(waiting[1])
        await node.complete(first)
        (second,) = await node.claim("q", jobs_max=10) or await node.claim("q", jobs_max=10)
        assert second.state.job_id == waiting[2]
