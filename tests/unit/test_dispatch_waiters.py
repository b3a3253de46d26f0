"""Workers that wait, hang up and time out: no wake-up is lost, and what was claimed for one who left goes back uncounted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from wheelsched.core.errors import Unavailable
from wheelsched.model.commands import Cancel
from wheelsched.model.states import Outcome, Status
from wheelsched.node.face import ClaimedJob
from wheelsched.testing import TestNode, open_test_node
from wheelsched.testing.checks import check_audit, check_depth


@pytest.fixture
async def node() -> AsyncIterator[TestNode]:
    async with open_test_node() as node:
        yield node


def poll(node: TestNode, *queues: str, **options: float) -> asyncio.Task[list[ClaimedJob]]:
    return asyncio.ensure_future(node.claim(*queues, wait_s=60, **options))


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_waiter_gets_what_is_made_what_comes_due_and_what_is_given_back(node: TestNode) -> None:
    waiting = poll(node)
    await node.create()
    (first,) = await waiting
    waiting = poll(node)
    await node.release(first)
    (again,) = await waiting
    assert again.state.attempt == 1
    waiting = poll(node)
    await node.create(delay_s=30)
    await node.advance(s=30)
    assert len(await waiting) == 1


async def test_a_waiter_of_several_queues_is_served_once(node: TestNode) -> None:
    waiting = poll(node, "a", "b", jobs_max=1)
    await turns(3)
    await node.together(node.create("a"), node.create("b"))
    assert len(await waiting) == 1
    assert sum([len(await node.claim(name)) for name in ("a", "b")]) == 1


async def test_waiters_are_served_in_the_order_they_came(node: TestNode) -> None:
    waiting = [poll(node) for _ in range(3)]
    await turns(3)
    for place in range(3):
        await node.create()
        await turns(10)
        assert [task.done() for task in waiting] == [number <= place for number in range(3)]


@pytest.mark.parametrize("leave_after", range(14))
async def test_a_claim_cancelled_at_any_await_gives_its_jobs_back_uncounted(node: TestNode, leave_after: int) -> None:
    """B-085: hung up after each possible number of turns of the loop, from before it waits to after it was served."""
    await node.create_many([{}] * 3)
    task = poll(node, jobs_max=2)
    await turns(leave_after)
    if task.cancel():
        await asyncio.gather(task, return_exceptions=True)
        await turns(20)
        await node.settle()
    handed = [] if task.cancelled() else task.result()
    again = await node.claim(jobs_max=10)
    assert len(again) == 3 - len(handed)
    assert all(job.state.attempt == 1 for job in again)
    await check_depth(node, "default")


@pytest.mark.parametrize("leave_after", range(14))
async def test_a_waiter_cancelled_while_a_job_becomes_ready_leaves_it_to_the_next(node: TestNode, leave_after: int) -> None:
    leaver, stayer = poll(node), poll(node)
    await turns(3)
    making = asyncio.ensure_future(node.create())
    await turns(leave_after)
    leaver.cancel()
    await asyncio.gather(leaver, return_exceptions=True)
    await making
    if not leaver.cancelled():
        stayer.cancel()
        return
    (claimed,) = await asyncio.wait_for(stayer, 5)
    assert claimed.state.attempt == 1


async def test_jobs_given_back_for_a_lost_answer_are_uncounted_and_recorded_as_released(node: TestNode) -> None:
    job = await node.create()
    node.node.give_back(await node.claim())
    await node.settle()
    assert (await node.get(job)).state.attempt == 0
    assert [row.outcome for row in await node.attempts(job)] == [Outcome.RELEASED]


async def test_a_job_behind_one_that_was_cancelled_is_claimed_without_waiting(node: TestNode) -> None:
    """The record of the cancelled one is still at the head of the ready queue; a claim that does not wait must look behind it."""
    first = await node.create()
    second = await node.create(delay_s=0.001)
    await node.advance(ms=1)
    await node.cancel(first)
    (claimed,) = await node.claim(jobs_max=1)
    assert claimed.state.job_id == second.job_id


async def test_room_that_a_cancelled_job_leaves_under_a_cap_wakes_the_next_waiter(node: TestNode) -> None:
    """Two are reserved under a cap of two, and the cancel of one is before the claim in the log: who waits behind has room then."""
    await node.put_queue(max_concurrency=2)
    jobs = [await node.create(delay_s=1 + number / 1000) for number in range(3)]
    await node.advance(s=2)
    claims = [node.node.claim(node.tenant, ("default",), jobs_max=jobs_max, lease_ms=None, wait_ms=500, worker="w") for jobs_max in (2, 1)]
    cancelled, first, second = await asyncio.gather(node.node.propose(Cancel(jobs[0].job_id, node.tenant)), *claims)
    assert cancelled.state is not None and cancelled.state.status == Status.CANCELLED
    assert [job.state.job_id for job in (*first, *second)] == [jobs[1].job_id, jobs[2].job_id]


async def test_a_full_inbox_puts_reserved_jobs_back(node: TestNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before the log: nothing happened, and nobody has to wait for a lease to end."""
    await node.create()
    replicas = node.node.dispatcher.claims._replicas

    def refuse(*_arguments: object, **_options: object) -> None:
        raise Unavailable("full")

    with monkeypatch.context() as patched:
        patched.setattr(replicas, "propose_many", refuse)
        with pytest.raises(Unavailable):
            await node.claim()
    assert len(await node.claim()) == 1


@pytest.mark.parametrize("seed", range(40))
async def test_no_wake_up_is_lost_in_any_interleaving(node: TestNode, seed: int) -> None:
    """Workers arrive, hang up and run out of time, jobs are made, cancelled and given back, in every order of turns. Whenever it is
    quiet, there is not both a ready job and a worker that waits for it; every job is held by one worker at most."""
    rng = random.Random(seed)
    cap = rng.choice((-1, -1, 1, 3))
    await node.put_queue("a", max_concurrency=cap)
    polls: list[asyncio.Task[list[ClaimedJob]]] = []
    held: list[ClaimedJob] = []
    made = []
    for _ in range(60):
        match rng.randrange(7):
            case 0 | 1:
                wait_s = rng.choice((0.0, 0.001, 60.0, 60.0))
                polls.append(asyncio.ensure_future(node.claim("a", "b", jobs_max=rng.choice((1, 2)), lease_s=600, wait_s=wait_s)))
            case 2 if polls:
                rng.choice(polls).cancel()
            case 3 | 4:
                made.append(asyncio.ensure_future(node.create(rng.choice("ab"))))
            case 5 if held:
                await node.release(held.pop(rng.randrange(len(held))))
            case 6 if held:
                await node.complete(held.pop(rng.randrange(len(held))))
        await turns(rng.choice((0, 0, 1, 2, 5)))
        held += [job for task in polls if task.done() and not task.cancelled() for job in task.result()]
        polls = [task for task in polls if not task.done()]
        if rng.random() < 0.2:
            await asyncio.gather(*made)
            await turns(40)
            if any(task.done() for task in polls):
                continue
            known = [name for name in "ab" if await node.node.queue_view(node.tenant, name)]
            ready = {name: sum((await node.depth(name)).get("QUEUED", ())) for name in known}
            free = cap < 0 or (await node.queue("a")).running < cap
            patient = node.node.dispatcher.claims.waiter_count
            assert not (patient and (ready.get("b") or (ready.get("a") and free))), f"{patient} wait while {ready} are ready"
    tokens = [(job.state.job_id, job.state.fencing) for job in held]
    assert len(tokens) == len(set(tokens))
    for task in polls:
        task.cancel()
    await asyncio.gather(*polls, return_exceptions=True)
    await node.settle()
    await check_audit(node)


async def test_pause_stops_claims_and_resume_wakes_the_waiters(node: TestNode) -> None:
    await node.pause()
    waiting = [poll(node) for _ in range(2)]
    await node.create_many([{}] * 2)
    await node.create(delay_s=5)
    await node.advance(s=5)
    await turns(10)
    assert not any(task.done() for task in waiting)
    assert (await node.depth())["QUEUED"] == (0, 3, 0), "jobs still become due"
    await node.resume()
    assert [len(await task) for task in waiting] == [1, 1]


async def test_a_raised_cap_wakes_the_waiters(node: TestNode) -> None:
    await node.put_queue(max_concurrency=1)
    await node.create_many([{}] * 3)
    await node.claim()
    waiting = [poll(node) for _ in range(2)]
    await turns(5)
    await node.put_queue(max_concurrency=3)
    assert [len(await task) for task in waiting] == [1, 1]


async def test_a_rate_is_kept_and_gone_jobs_do_not_use_it_up(node: TestNode) -> None:
    """Ten a second, bursts of one second's worth; a job that was cancelled before its claim took nothing from it."""
    await node.put_queue(rate_per_s=10.0)
    jobs = [await node.create(delay_s=number / 1000) for number in range(60)]
    await node.advance(s=1)
    for job in jobs[:10]:
        await node.cancel(job)
    assert len(await node.claim(jobs_max=100, lease_s=600)) == 10
    for _ in range(4):
        await node.advance(ms=500)
        assert len(await node.claim(jobs_max=100, lease_s=600)) == 5
    await node.advance(s=60)
    assert len(await node.claim(jobs_max=100, lease_s=600)) == 10, "at most one second's worth at once"


async def test_a_rate_below_one_a_second_lets_single_jobs_through(node: TestNode) -> None:
    await node.put_queue(rate_per_s=0.5)
    await node.create_many([{}] * 4)
    assert len(await node.claim(jobs_max=4)) == 1, "a bucket that nobody drew from holds one job"
    for _ in range(3):
        await node.advance(ms=1_999)
        assert await node.claim() == []
        await node.advance(ms=1)
        assert len(await node.claim()) == 1


async def test_a_drained_node_answers_every_waiter(node: TestNode) -> None:
    waiting = [poll(node) for _ in range(5)]
    await turns(3)
    node.node.drain()
    assert [await task for task in waiting] == [[]] * 5
    assert await node.claim(wait_s=60) == []
    with pytest.raises(Unavailable):
        await node.create()
