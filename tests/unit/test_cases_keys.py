"""Cases from the field about idempotency (CASES.md, kind 7)."""

from __future__ import annotations

import pytest

from wheelsched.core.errors import IdempotencyKeyReused, JobFinished
from wheelsched.model.rows import JobState
from wheelsched.testing import open_test_node


async def test_fifty_creates_of_one_key_at_once_make_one_job() -> None:
    """B-105: they share a turn of the log, and the next turn too."""
    async with open_test_node() as node:
        made = await node.together(*(node.create(key="order-7", payload={"n": 1}) for _ in range(50)))
        assert all(isinstance(state, JobState) for state in made)
        assert len({state.job_id for state in made if isinstance(state, JobState)}) == 1
        assert len(await node.list_jobs("default")) == 1
        assert len(await node.claim(jobs_max=10)) == 1


async def test_a_key_seen_before_is_replayed_for_the_same_body_and_refused_for_another() -> None:
    """B-106: in every state of the job, and after a crash."""
    async with open_test_node() as node:
        first = await node.create(key="k", payload={"a": 1, "b": 2}, delay_s=1)
        with pytest.raises(IdempotencyKeyReused):
            await node.create(key="k", payload={"a": 2, "b": 2}, delay_s=1)
        await node.crash_and_restart()
        assert (await node.create(key="k", payload={"b": 2, "a": 1}, delay_s=1)).job_id == first.job_id
        await node.advance(s=1)
        (claimed,) = await node.claim()
        await node.complete(claimed)
        again = await node.create(key="k", payload={"a": 1, "b": 2}, delay_s=1)
        assert (again.job_id, again.status) == (first.job_id, 5)  # SUCCEEDED
        with pytest.raises(IdempotencyKeyReused):
            await node.create(key="k", payload="other")


async def test_a_batch_follows_the_rules_of_single_creates() -> None:
    """B-112: 100 items, of which 40 share keys with each other and 10 with existing ones."""
    async with open_test_node() as node:
        for number in range(10):
            await node.create(key=f"old-{number}")
        shared = [{"key": f"shared-{number // 2}"} for number in range(40)]
        known = [{"key": f"old-{number}", "payload": None if number % 2 else "other"} for number in range(10)]
        replies = await node.create_many(shared + known + [{"key": f"new-{number}"} for number in range(50)])
        assert [reply.replayed for reply in replies[:40]] == [False, True] * 20
        assert [reply.refusal for reply in replies[40:50]] == ["idempotency-key-reused", ""] * 5
        assert not any(reply.refusal or reply.replayed for reply in replies[50:])
        assert len(await node.list_jobs("default", limit=7)) == 10 + 20 + 50


async def test_a_keyed_job_is_kept_a_day_at_least_whatever_the_retention() -> None:
    """B-105, in time: a retention of an hour does not open the key after an hour."""
    async with open_test_node() as node:
        await node.put_queue(retention_ms=3_600_000)
        first = await node.create(key="k")
        await node.complete((await node.claim())[0])
        await node.advance(s=23 * 3_600)
        assert (await node.create(key="k")).version == 3
        await node.advance(s=3_600 + 20)
        assert (await node.create(key="k")).version == 1, "after a day the key makes a new job"
        assert (await node.list_jobs("default"))[0].state.job_id == first.job_id


async def test_the_key_of_a_discarded_job_is_refused_for_a_day() -> None:
    """The tombstone outlives a crash, counts nowhere and goes after 24 h."""
    async with open_test_node() as node:
        job = await node.create(key="k", max_attempts=1)
        await node.complete((await node.claim())[0], "fatal_failure")
        await node.discard(job)
        assert await node.depth() == {} and await node.list_jobs("default") == []
        await node.advance(s=86_399)
        await node.crash_and_restart()
        with pytest.raises(JobFinished):
            await node.create(key="k", max_attempts=1)
        await node.advance(s=60)
        assert (await node.create(key="k", max_attempts=1)).version == 1
