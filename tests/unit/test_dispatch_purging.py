"""The end of history: finished jobs go when their time is over, in slices, and take every row with them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from wheelsched.model import keys
from wheelsched.testing import TestNode, open_test_node
from wheelsched.testing.checks import all_rows, check_depth, check_rows

HOUR_S = 3_600


@pytest.fixture
async def node() -> AsyncIterator[TestNode]:
    async with open_test_node() as node:
        await node.put_queue(retention_ms=HOUR_S * 1_000)
        yield node


async def finish(node: TestNode, outcome: str = "succeeded") -> None:
    while claimed := await node.claim(jobs_max=100):
        await node.together(*(node.complete(job, outcome) for job in claimed))


async def test_more_jobs_than_a_slice_holds_leave_no_row_of_any_family(node: TestNode) -> None:
    """Retries, releases, updates and cancels on the way, so that there are attempt rows of all kinds."""
    for _ in range(4):
        await node.create_many([{"initial_backoff_s": 0}] * 300)
    for job in await node.claim(jobs_max=100):
        await node.complete(job, "retryable_failure", retry_after_s=0)
    for job in await node.claim(jobs_max=50):
        await node.release(job)
    later = [await node.create(delay_s=5) for _ in range(20)]
    for number, job in enumerate(later):
        await (node.cancel(job) if number % 2 else node.update(job, priority="bulk"))
    await node.advance(s=5)
    await finish(node)
    await node.advance(s=HOUR_S - 5)
    assert len(check_rows(node.store, node.settings.cluster.group_count)) == 1_220
    await node.advance(s=15)
    rows = all_rows(node.store)
    assert {family: len(found) for family, found in rows.items() if found} == {keys.META: 1}
    assert await node.depth() == {} and await node.list_jobs("default") == []


async def test_purging_in_a_queue_touches_no_other_and_nothing_that_waits_or_runs(node: TestNode) -> None:
    kept = [await node.create("other"), await node.create(delay_s=10 * HOUR_S), await node.create()]
    await node.complete((await node.claim("other"))[0])
    (running,) = await node.claim(lease_s=43_200)
    await node.create_many([{}] * 10)
    await finish(node)
    for _ in range(3):
        await node.advance(s=1_300)
        await node.heartbeat(running) if (await node.status(running)) == "RUNNING" else None
    assert set(check_rows(node.store, node.settings.cluster.group_count)) == {job.job_id for job in kept}
    for name in ("default", "other"):
        await check_depth(node, name)


async def test_a_longer_retention_set_later_keeps_what_is_still_there(node: TestNode) -> None:
    await node.create_many([{}] * 10)
    await finish(node)
    await node.advance(s=HOUR_S - 60)
    await node.put_queue(retention_ms=2 * HOUR_S * 1_000)
    await node.advance(s=HOUR_S)
    assert (await node.depth())["SUCCEEDED"] == (0, 10, 0)
    await node.advance(s=75)
    assert await node.depth() == {}


async def test_keyed_jobs_between_others_are_left_until_their_day_is_over(node: TestNode) -> None:
    """A slice with gaps: what may go goes, what must stay stays."""
    await node.create_many([{"key": f"k{number}"} if number % 7 == 0 else {} for number in range(350)])
    await finish(node)
    await node.advance(s=2 * HOUR_S)
    assert (await node.depth())["SUCCEEDED"] == (0, 50, 0)
    check_rows(node.store, node.settings.cluster.group_count)
    await node.advance(s=23 * HOUR_S)
    assert await node.depth() == {}


async def test_dead_letters_stay_ninety_days_or_as_long_as_the_queue_says_if_that_is_longer(node: TestNode) -> None:
    await node.create_many([{}] * 3)
    await finish(node, "fatal_failure")
    await node.advance(s=89 * 86_400)
    assert (await node.depth())["DEAD"] == (0, 3, 0)
    await node.put_queue(retention_ms=100 * 86_400_000)
    await node.advance(s=10 * 86_400)
    assert (await node.depth())["DEAD"] == (0, 3, 0)
    await node.advance(s=86_400 + 15)
    assert await node.depth() == {}
