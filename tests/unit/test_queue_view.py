"""What a queue tells of itself."""

from __future__ import annotations

from wheelsched.testing import open_test_node


async def test_the_age_of_the_oldest_ready_job_counts_no_job_that_has_gone() -> None:
    async with open_test_node() as node:
        old = await node.create(queue="mail")
        await node.advance(s=100)
        await node.create(queue="mail")
        await node.advance(s=7)
        assert (await node.queue("mail")).oldest_ready_age_s == 107
        await node.cancel(old)
        assert (await node.queue("mail")).oldest_ready_age_s == 7
        (claimed,) = await node.claim("mail")
        await node.complete(claimed)
        assert (await node.queue("mail")).oldest_ready_age_s is None


async def test_a_new_rate_allows_a_seconds_worth_at_once() -> None:
    async with open_test_node() as node:
        await node.put_queue(rate_per_s=2)
        await node.create_many([{}] * 10)
        assert len(await node.claim(jobs_max=10)) == 2
        await node.advance(s=1)
        assert len(await node.claim(jobs_max=10)) == 2
