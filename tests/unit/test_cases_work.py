"""Cases from the field about fairness, caps, retries and dead letters (CASES.md, kinds 10 and 11)."""

from __future__ import annotations

import asyncio

from wheelsched.model.states import Priority
from wheelsched.testing import TestNode, open_test_node


async def test_a_backlog_in_one_queue_does_not_delay_another() -> None:
    """B-132, with one tenant: a worker of the small queue gets its job though a thousand others were due before it."""
    async with open_test_node() as node:
        for _ in range(10):
            await node.create_many([{"queue": "flood"}] * 100)
        small = await node.create("small")
        (claimed,) = await node.claim("small")
        assert claimed.state.job_id == small.job_id
        assert len(await node.claim("small", "flood", jobs_max=5)) == 5


async def running(node: TestNode) -> int:
    return (await node.queue()).running


async def test_a_concurrency_limit_holds_at_every_instant_also_after_a_crash() -> None:
    """B-136: limit 5; a hundred workers claim ten each at once, again after a crash, and again as attempts end."""
    async with open_test_node() as node:
        await node.put_queue(max_concurrency=5)
        await node.create_many([{}] * 300)
        claims = await node.together(*(node.claim(jobs_max=10) for _ in range(100)))
        held = [job for jobs in claims if isinstance(jobs, list) for job in jobs]
        assert len(held) == 5 == await running(node)
        await node.crash_and_restart()
        assert await node.claim(jobs_max=10) == []
        await node.complete(held[0])
        await node.complete(held[1], "retryable_failure")
        claims = await node.together(*(node.claim(jobs_max=10) for _ in range(100)))
        assert sum(len(jobs) for jobs in claims if isinstance(jobs, list)) == 2
        assert await running(node) == 5


async def test_waiting_workers_are_woken_for_exactly_the_room_there_is() -> None:
    """B-136: ten long polls, a limit of two; each end of an attempt wakes one more."""
    async with open_test_node() as node:
        await node.put_queue(max_concurrency=2)
        polls = [asyncio.ensure_future(node.claim(wait_s=60)) for _ in range(10)]
        await asyncio.sleep(0)
        await node.create_many([{}] * 10)
        served: list[int] = []
        while len(served) < 10:
            done, _ = await asyncio.wait(
                [poll for number, poll in enumerate(polls) if number not in served], return_when=asyncio.FIRST_COMPLETED
            )
            assert await running(node) <= 2
            for number, poll in enumerate(polls):
                if poll in done:
                    served.append(number)
                    await node.complete(poll.result()[0])


async def test_the_next_free_slot_goes_to_critical_work() -> None:
    """B-137: slots held by long ordinary jobs are not taken from them; critical ones have the first that comes free."""
    async with open_test_node() as node:
        await node.put_queue(max_concurrency=10)
        await node.create_many([{}] * 20)
        held = await node.claim(jobs_max=100)
        assert len(held) == 10
        await node.create_many([{"priority": "critical"}] * 100)
        assert await node.claim() == []
        await node.complete(held[0])
        (claimed,) = await node.claim()
        assert claimed.state.priority == Priority.CRITICAL


async def test_shares_of_seventy_twentyfive_and_five_hold_while_all_have_work() -> None:
    """B-138: a steady flow of critical work leaves the others their published minimum."""
    async with open_test_node() as node:
        for priority in ("critical", "default", "bulk"):
            for _ in range(3):
                await node.create_many([{"priority": priority}] * 300)
        counts = [0, 0, 0]
        for _ in range(100):
            for claimed in await node.claim(jobs_max=10, lease_s=600):
                counts[claimed.state.priority] += 1
        assert counts == [700, 250, 50]


async def test_precise_jobs_go_before_flexible_ones_and_by_time_within_a_priority() -> None:
    """API.md: precise before flexible, then by priority weights, then in the order of fire_at."""
    async with open_test_node() as node:
        flexible = await node.create(window_s=1)
        await node.advance(s=1)
        precise = [await node.create(run_at_ms=node.now_ms + late) for late in (3, 1, 2)]
        await node.advance(ms=3)
        order = [job.state.job_id for job in await node.claim(jobs_max=10)]
        assert order == [precise[1].job_id, precise[2].job_id, precise[0].job_id, flexible.job_id]


async def test_backoff_never_overflows_is_never_negative_and_never_above_its_cap() -> None:
    """B-140: initial 10 s, cap 600 s, a hundred attempts, the most there may be."""
    async with open_test_node() as node:
        job = await node.create(max_attempts=100, initial_backoff_s=10, max_backoff_s=600)
        for attempt in range(1, 101):
            (claimed,) = await node.claim()
            assert claimed.state.attempt == attempt
            state = await node.complete(claimed, "retryable_failure")
            if attempt < 100:
                assert 0 <= state.next_attempt_at_ms - node.now_ms <= min(600_000, 10_000 << (attempt - 1))
                await node.advance(to=max(state.next_attempt_at_ms, node.now_ms))
        assert await node.status(job) == "DEAD"


async def test_of_a_claim_of_ten_only_the_unreported_come_back() -> None:
    """B-145: five are reported, the worker is gone, and so is the node; one fails by itself."""
    async with open_test_node() as node:
        await node.create_many([{"initial_backoff_s": 0}] * 20)
        first = await node.claim(jobs_max=10, lease_s=30)
        for claimed in first[:9]:
            await node.complete(claimed)
        await node.complete(first[9], "fatal_failure", error="no")
        second = await node.claim(jobs_max=10, lease_s=30)
        for claimed in second[:5]:
            await node.complete(claimed)
        await node.crash_and_restart()
        await node.advance(s=30)
        again = await node.claim(jobs_max=100)
        assert {job.state.job_id for job in again} == {job.state.job_id for job in second[5:]}
        assert all(job.state.attempt == 2 for job in again)
        assert (await node.depth())["SUCCEEDED"] == (0, 14, 0)
