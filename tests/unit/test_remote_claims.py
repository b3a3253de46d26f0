"""Long polls across nodes: a worker of any is given the jobs of all, nothing is claimed for nobody, and what is lost on the way ends.

Three nodes in memory, each with jobs of its own, joined by a network on a virtual clock that loses, delays and cuts as it is told.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest

from wheelsched.cluster.errors import NotConnected
from wheelsched.core.errors import NotLeader, OutcomeUnknown, Unavailable
from wheelsched.model.commands import AnyCommand, Claim, Create
from wheelsched.model.rows import JobSpec, JobState, QueueSettings, encode_spec
from wheelsched.model.states import Outcome
from wheelsched.node.calls import JOBS_BYTES_MAX, Service, split_to_fit
from wheelsched.node.face import ClaimedJob
from wheelsched.node.offers import DELIVER_TRIES_MS, DEMAND_MS, OFFER_MS, RENEW_MS, STARVED_MS
from wheelsched.node.remote_claims import INTEREST_MS, PROMISE_MS, RemoteClaims
from wheelsched.replica.kept import Kept
from wheelsched.replica.proposals import Batch
from wheelsched.runtime.clock import VirtualClock
from wheelsched.testing import START_MS, TestNode, open_test_node
from wheelsched.testing.checks import check_audit
from wheelsched.testing.cluster import open_test_cluster

Fault = Callable[[int, int, str], str]


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def until(is_so: Callable[[], bool]) -> None:
    for _ in range(1_000):
        if is_so():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come to be")


class World:
    """See `open_world`. `fault(sender, node, method)` says what becomes of a call: "" nothing bad, "refuse" it is not sent, "lose" it does
    not arrive, "lose answer", "hold answer" it comes once `gate` is set."""

    def __init__(self, seed: int) -> None:
        self.clock = VirtualClock(START_MS)
        self.rng = random.Random(seed)
        self.delay_turns_max = 0
        self.nodes: dict[int, TestNode] = {}
        self.claims: dict[int, RemoteClaims] = {}
        self.services: dict[int, Service] = {}
        self.fault: Fault = lambda _sender, _node, _method: ""
        self.gate = asyncio.Event()
        self.calls: list[tuple[int, int, str]] = []

    async def request(self, sender: int, node: int, method: str, body: bytes, timeout_ms: int) -> bytes:
        until_ms = self.clock.mono_ms() + timeout_ms
        self.calls.append((sender, node, method))
        fault = self.fault(sender, node, method)
        if fault == "refuse":
            raise NotConnected(f"n{node} is not connected")
        await turns(1 + self.rng.randint(0, self.delay_turns_max))
        if fault != "lose":
            if method in RemoteClaims.METHODS:
                answer = await self.claims[node].answer(sender, method, body)
            else:
                answer = await self.services[node].answer(method, body)
            await turns(1 + self.rng.randint(0, self.delay_turns_max))
            if fault == "hold answer":
                await self.gate.wait()
            if fault != "lose answer":
                return answer
        await self.clock.sleep_until(until_ms)
        raise OutcomeUnknown(f"n{node} has not answered")

    def give_back(self, jobs: list[ClaimedJob]) -> None:
        for job in jobs:
            self.owner(job.state).node.dispatcher.claims.release([job.state])

    def owner(self, state: JobState) -> TestNode:
        (owner,) = (node for node in self.nodes.values() if node.node._state(state.job_id) is not None)
        return owner

    async def advance(self, *, ms: int) -> None:
        """In steps, so that everything happens at about its instant."""
        until_ms = self.clock.mono_ms() + ms
        while self.clock.mono_ms() < until_ms:
            self.clock.advance(ms=min(50, until_ms - self.clock.mono_ms()))
            await self.settle()

    async def settle(self) -> None:
        await turns(60)

    def poll(self, node: int, *queues: str, jobs_max: int = 1, wait_s: float = 3_600.0) -> asyncio.Task[list[ClaimedJob]]:
        return asyncio.ensure_future(self.claim(node, *queues, jobs_max=jobs_max, wait_s=wait_s))

    async def claim(self, node: int, *queues: str, jobs_max: int = 1, wait_s: float = 0.0) -> list[ClaimedJob]:
        return await self.claims[node].claim(
            "default", queues or ("default",), jobs_max=jobs_max, lease_ms=600_000, wait_ms=round(wait_s * 1000), worker=f"w{node}"
        )

    def claim_count(self) -> int:
        """Claims in all logs: each mints one token."""
        return sum(
            replica.state.fencing
            for node in self.nodes.values()
            for replica in node.node.replicas._replicas.values()  # type: ignore[attr-defined]
        )

    async def release_count(self) -> int:
        jobs = [(node, job) for node in self.nodes.values() for job in await node.list_jobs()]
        return sum([sum(row.outcome == Outcome.RELEASED for row in await node.attempts(job)) for node, job in jobs])

    def count(self, method: str) -> int:
        return sum(called == method for _, _, called in self.calls)

    def waiter_count(self) -> int:
        return sum(node.node.dispatcher.claims.waiter_count for node in self.nodes.values())


@asynccontextmanager
async def open_world(seed: int = 0) -> AsyncIterator[World]:
    world = World(seed)
    async with AsyncExitStack() as stack:
        for number in (1, 2, 3):
            world.nodes[number] = await stack.enter_async_context(open_test_node(seed=10 * seed + number))
            node = world.nodes[number].node
            world.services[number] = Service(node, lambda _group: None)
            world.claims[number] = RemoteClaims(
                node, partial(world.request, number), lambda: sorted(world.nodes), world.clock, random.Random(number), world.give_back
            )
        for number, claims in world.claims.items():
            claims._peers = lambda number=number: [other for other in world.nodes if other != number]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(claims.run()) for claims in world.claims.values()]
            await turns(3)
            yield world
            for task in running:
                task.cancel()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with open_world() as world:
        yield world


# What is claimed, and for whom.


async def test_one_worker_takes_300_jobs_of_three_leaders_one_by_one_and_only_those_are_claimed(world: World) -> None:
    made = {(await node.create()).job_id for node in world.nodes.values() for _ in range(100)}
    taken = []
    while len(taken) < len(made):
        async with asyncio.timeout(10):
            taken += await world.claim(1, wait_s=60)
        assert world.claim_count() == len(taken)
    assert {job.state.job_id for job in taken} == made
    assert await world.release_count() == 0


async def test_one_waiter_that_three_leaders_have_jobs_for_in_the_same_turn_is_claimed_for_once(world: World) -> None:
    for node in world.nodes.values():
        await node.pause()
        await node.create_many([{}] * 100)
    taken = 0
    for _ in range(5):
        waiting = world.poll(1)
        await world.settle()
        await asyncio.gather(*(node.resume() for node in world.nodes.values()))
        async with asyncio.timeout(5):
            taken += len(await waiting)
        await world.settle()
        assert world.claim_count() == taken
        await asyncio.gather(*(node.pause() for node in world.nodes.values()))
    assert taken == 5 and await world.release_count() == 0


async def test_a_waiter_is_told_of_a_job_that_becomes_ready_on_another_node(world: World) -> None:
    waiting = world.poll(3)
    await world.settle()
    job = await world.nodes[1].create()
    async with asyncio.timeout(5):
        (claimed,) = await waiting
    assert claimed.state.job_id == job.job_id and claimed.state.worker == "w3" and claimed.state.lease_ms == 600_000
    assert world.count("offer") == world.count("deliver") == 1


async def test_a_waiter_that_comes_later_gets_what_was_ready_on_another_node_before(world: World) -> None:
    job = await world.nodes[1].create()
    await world.settle()
    async with asyncio.timeout(5):
        (claimed,) = await world.claim(3, wait_s=60)
    assert claimed.state.job_id == job.job_id


async def test_what_a_node_wants_while_its_answer_to_an_offer_is_on_its_way_is_not_forgotten_for_that(world: World) -> None:
    """The answer says that it wants nothing more, and is older than what it told since."""
    world.fault = lambda _sender, _node, method: "hold answer" if method == "offer" else ""
    first = world.poll(1)
    await world.settle()
    await world.nodes[2].create()
    await world.settle()
    second = world.poll(1)
    await world.settle()
    world.fault = lambda _sender, _node, _method: ""
    world.gate.set()
    await world.settle()
    await world.nodes[2].create()
    await world.settle()
    assert first.done() and second.done()


async def test_many_waiters_of_two_nodes_share_the_jobs_of_a_third(world: World) -> None:
    waiting = [world.poll(1 + number % 2, jobs_max=2) for number in range(10)]
    await world.settle()
    await world.nodes[3].create_many([{}] * 20)
    async with asyncio.timeout(5):
        taken = sum([len(await task) for task in waiting])
    assert world.claim_count() == taken and await world.release_count() == 0
    while jobs := await world.claim(2, jobs_max=10):
        taken += len(jobs)
    assert taken == 20


async def test_of_two_nodes_that_want_all_jobs_neither_gets_them_all(world: World) -> None:
    waiting = {number: [world.poll(number) for _ in range(20)] for number in (1, 2)}
    await world.settle()
    await world.nodes[3].create_many([{}] * 20)
    await world.settle()
    shares = [sum(task.done() for task in tasks) for tasks in waiting.values()]
    assert sum(shares) == 20 and min(shares) >= 4, shares


async def test_waiters_of_a_node_that_waits_too_long_come_before_those_of_the_leader(world: World) -> None:
    far, near = world.poll(2), [world.poll(1) for _ in range(5)]
    await world.settle()
    await world.nodes[1].create()
    await world.settle()
    assert not far.done() and near[0].done(), "who is near comes first"
    await world.advance(ms=STARVED_MS)
    await world.nodes[1].create_many([{}] * 2)
    await world.settle()
    assert far.done() and [task.done() for task in near] == [True, True, False, False, False]
    assert len(far.result()) == 1


async def test_a_claim_that_does_not_wait_asks_all_nodes(world: World) -> None:
    assert await world.claim(1) == []
    for number in (3, 2, 1):
        job = await world.nodes[number].create()
        (claimed,) = await world.claim(1)
        assert claimed.state.job_id == job.job_id
    assert await world.claim(1) == []


async def test_a_claim_takes_the_older_jobs_of_another_node_first_once_it_knows_of_them(world: World) -> None:
    older = await world.nodes[2].create()
    for node in world.nodes.values():
        await node.advance(s=5)
    newer = await world.nodes[1].create()
    await world.nodes[1].create("other")
    assert len(await world.claim(1, "default", "other", jobs_max=2)) == 2, "nothing is known of the others yet"
    await world.nodes[1].release(await _running(world.nodes[1], newer))
    await world.settle()
    first = await world.claim(1, jobs_max=1)
    second = await world.claim(1, jobs_max=1)
    assert [job.state.job_id for job in first + second] == [older.job_id, newer.job_id]


async def _running(node: TestNode, state: JobState) -> ClaimedJob:
    record = await node.get(state)
    return ClaimedJob(record.state, record.spec, record.payload)


async def test_a_precise_job_of_another_node_comes_before_flexible_ones_here(world: World) -> None:
    await world.claim(1)
    await world.nodes[1].create_many([{"window_s": 600, "delay_s": 1}] * 2)
    precise = await world.nodes[2].create(delay_s=1)
    await asyncio.gather(*(node.advance(s=601) for node in world.nodes.values()))
    await world.advance(ms=RENEW_MS)
    (claimed,) = await world.claim(1)
    assert claimed.state.job_id == precise.job_id


async def test_a_job_that_a_waiter_gets_here_and_one_that_another_node_offers_in_the_same_turn_are_not_both_its(world: World) -> None:
    for delay in range(12):
        before = world.claim_count()
        waiting = world.poll(1)
        await world.settle()
        far = asyncio.ensure_future(world.nodes[2].create())
        await turns(delay)
        await world.nodes[1].create()
        await far
        async with asyncio.timeout(5):
            (claimed,) = await waiting
        await world.settle()
        assert world.claim_count() == before + 1
        (left,) = await world.claim(3)
        assert left.state.job_id != claimed.state.job_id
    assert await world.release_count() == 0


async def test_a_job_that_moved_on_before_its_claim_leaves_the_waiter_in_its_place(world: World) -> None:
    """Its record is at the head of the ready queue still. The waiter is promised it, gets nothing, and is served before the one that came
    after it."""
    gone, _ = await world.nodes[2].create(), await world.nodes[2].pause()
    await world.nodes[2].cancel(gone)
    first, second = world.poll(1), world.poll(1)
    await world.settle()
    await world.nodes[2].resume()
    await world.settle()
    assert world.count("deliver") >= 1 and world.claim_count() == 0 and not first.done()
    for waiting in (first, second):
        await world.nodes[2].create()
        await world.settle()
        assert waiting.done()


async def test_a_waiter_whose_promise_came_to_nothing_is_told_of_at_once(world: World) -> None:
    """Its node had said that it wants nothing beyond what was promised."""
    gone = await world.nodes[2].create()
    await world.nodes[2].pause()
    await world.nodes[2].cancel(gone)
    waiting = world.poll(1)
    await world.settle()
    await world.nodes[2].resume()
    await world.settle()
    assert world.count("deliver") == 1 and not waiting.done()
    await world.nodes[2].create()
    await world.settle()
    assert waiting.done()


async def test_a_rate_holds_back_what_is_offered_to_others(world: World) -> None:
    await world.nodes[2].put_queue(rate_per_s=1_000.0)
    await world.nodes[2].create_many([{}] * 3)
    await world.nodes[2].put_queue(rate_per_s=1.0)
    waiting = [world.poll(1) for _ in range(3)]
    await world.settle()
    assert [task.done() for task in waiting] == [True, False, False]


@pytest.mark.parametrize("seed", range(40))
async def test_no_wake_up_is_lost_in_any_interleaving(seed: int) -> None:
    """Workers arrive and hang up anywhere, jobs are made, end and are given back, and calls take their time. When it is quiet, no job is
    ready anywhere while a worker waits anywhere; no job has two leases; and nothing was claimed for nobody who stayed."""
    async with open_world(seed) as world:
        rng = random.Random(seed)
        world.delay_turns_max = rng.choice((0, 3, 12))
        polls: list[asyncio.Task[list[ClaimedJob]]] = []
        held: list[ClaimedJob] = []
        made = []
        for _ in range(60):
            match rng.randrange(7):
                case 0 | 1:
                    polls.append(world.poll(rng.choice((1, 2, 3)), "a", "b", jobs_max=rng.choice((1, 3)), wait_s=rng.choice((0, 60, 60))))
                case 2 if polls:
                    rng.choice(polls).cancel()
                case 3 | 4:
                    made.append(asyncio.ensure_future(world.nodes[rng.choice((1, 2, 3))].create(rng.choice("ab"))))
                case 5 if held:
                    job = held.pop(rng.randrange(len(held)))
                    await world.owner(job.state).release(job)
                case 6 if held:
                    job = held.pop(rng.randrange(len(held)))
                    await world.owner(job.state).complete(job)
            await turns(rng.choice((0, 0, 1, 2, 5, 20)))
            held += [job for task in polls if task.done() and not task.cancelled() for job in task.result()]
            polls = [task for task in polls if not task.done()]
            if rng.random() < 0.2:
                await asyncio.gather(*made)
                await turns(400)
                if not any(task.done() for task in polls):
                    ready = [await _ready(node) for node in world.nodes.values()]
                    assert not (world.waiter_count() and any(ready)), f"{world.waiter_count()} wait while {ready} are ready"
        await turns(400)
        held += [job for task in polls if task.done() and not task.cancelled() for job in task.result()]
        tokens = [(job.state.job_id, job.state.fencing) for job in held]
        assert len(tokens) == len(set(tokens))
        for task in polls:
            task.cancel()
        await asyncio.gather(*polls, return_exceptions=True)
        await turns(400)
        leased = sum(len(node.node.dispatcher.leases) for node in world.nodes.values())
        assert leased == len(held), "a job is leased to nobody"
        for node in world.nodes.values():
            await node.settle()
            await check_audit(node)
            assert all(queue.reserved == 0 for queue in node.node.dispatcher.queues)


async def _ready(node: TestNode) -> int:
    names = [name for name in "ab" if await node.node.queue_view(node.tenant, name)]
    return sum([sum((await node.depth(name)).get("QUEUED", ())) for name in names])


# Who hangs up.


@pytest.mark.parametrize("leave_after", range(0, 36, 1))
async def test_a_job_claimed_for_one_who_hung_up_anywhere_on_the_way_goes_back_uncounted(world: World, leave_after: int) -> None:
    """B-085, across nodes: the worker hangs up while another node has, offers or sends its job."""
    leaver = world.poll(1)
    await world.settle()
    making = asyncio.ensure_future(world.nodes[2].create())
    await turns(leave_after)
    leaver.cancel()
    await asyncio.gather(leaver, return_exceptions=True)
    await making
    await world.settle()
    if not leaver.cancelled():
        assert len(leaver.result()) == 1 and world.claim_count() == 1
        return
    async with asyncio.timeout(5):
        (claimed,) = await world.claim(3, wait_s=60)
    assert claimed.state.attempt == 1


@pytest.mark.parametrize("leave_after", range(0, 30, 1))
async def test_a_claim_that_asks_another_node_and_is_cancelled_gives_back_what_comes(world: World, leave_after: int) -> None:
    await world.nodes[2].create()
    leaver = world.poll(1, wait_s=0)
    await turns(leave_after)
    leaver.cancel()
    await asyncio.gather(leaver, return_exceptions=True)
    await world.settle()
    left = await world.claim(3)
    assert len(left) == (1 if leaver.cancelled() else 0)
    assert all(job.state.attempt == 1 for job in left)


async def test_a_waiter_whose_time_ends_while_jobs_are_claimed_for_it_gets_them(world: World) -> None:
    world.fault = lambda _sender, _node, method: "lose answer" if method == "deliver" else ""
    claims = world.nodes[1].node.dispatcher.claims
    waiting = world.poll(1)
    await world.settle()
    (waiter,) = world.nodes[1].node.dispatcher.queues.ensure("default", "default").waiters
    making = asyncio.ensure_future(world.nodes[2].create())
    await until(lambda: waiter.is_promised)
    claims._time_out(waiter)
    await making
    async with asyncio.timeout(5):
        assert len(await waiting) == 1
    await world.advance(ms=DELIVER_TRIES_MS + RENEW_MS)
    assert await world.release_count() == 0


async def test_a_waiter_whose_time_ended_is_answered_when_its_promise_comes_to_nothing(world: World) -> None:
    world.fault = lambda sender, _node, method: "lose answer" if method in ("offer", "withdraw") and sender == 2 else ""
    waiting = world.poll(1)
    await world.settle()
    (waiter,) = world.nodes[1].node.dispatcher.queues.ensure("default", "default").waiters
    await world.nodes[2].create()
    await world.settle()
    assert waiter.is_promised
    world.nodes[1].node.dispatcher.claims._time_out(waiter)
    await world.advance(ms=PROMISE_MS)
    assert await waiting == []


async def test_a_node_that_drains_answers_the_waiters_that_were_promised_jobs(world: World) -> None:
    world.fault = lambda _sender, _node, method: "lose" if method == "deliver" else ""
    waiting = [world.poll(1) for _ in range(2)]
    await world.settle()
    await world.nodes[2].create()
    await world.settle()
    world.nodes[1].node.drain()
    world.claims[1].drain()
    assert [await task for task in waiting] == [[], []]
    world.fault = lambda _sender, _node, _method: ""
    await world.advance(ms=2 * RENEW_MS)
    async with asyncio.timeout(5):
        (claimed,) = await world.claim(3, wait_s=60)
    assert claimed.state.attempt == 1


# What is lost on the way.


async def test_an_offer_that_is_lost_goes_elsewhere_after_a_quarter_of_a_second(world: World) -> None:
    near, far = world.poll(1), world.poll(3)
    await world.settle()
    world.fault = lambda _sender, node, method: "lose" if (node, method) == (1, "offer") else ""
    jobs = [await world.nodes[2].create() for _ in range(2)]
    await world.advance(ms=OFFER_MS)
    assert far.done() and not near.done()
    world.fault = lambda _sender, _node, _method: ""
    await world.advance(ms=2 * RENEW_MS)
    assert {job.state.job_id for job in near.result() + far.result()} == {job.job_id for job in jobs}
    assert world.claims[2].statistics().offers_unanswered == 1 and await world.release_count() == 0


@pytest.mark.parametrize("withdrawn", [True, False])
async def test_grants_that_are_lost_leave_their_waiter_waiting(world: World, withdrawn: bool) -> None:
    """Told that the offer is withdrawn, or after two seconds at the latest, it stands in its queue again."""
    lost = ("offer",) if withdrawn else ("offer", "withdraw")
    waiting = world.poll(1)
    await world.settle()
    world.fault = lambda _sender, _node, method: "lose answer" if method == "offer" else "lose" if method in lost else ""
    job = await world.nodes[2].create()
    await world.advance(ms=OFFER_MS)
    assert world.claims[1].statistics().promises == (0 if withdrawn else 1)
    assert world.claim_count() == 0
    world.fault = lambda _sender, _node, _method: ""
    await world.advance(ms=PROMISE_MS + RENEW_MS)
    assert [claimed.state.job_id for claimed in waiting.result()] == [job.job_id]
    assert world.claim_count() == 1


async def test_a_waiter_whose_promise_came_to_nothing_gets_what_became_ready_here_meanwhile(world: World) -> None:
    world.fault = lambda _sender, _node, method: "lose answer" if method in ("offer", "withdraw") else ""
    waiting = world.poll(1)
    await world.settle()
    await world.nodes[2].create()
    await world.settle()
    job = await world.nodes[1].create()
    assert not waiting.done()
    await world.advance(ms=PROMISE_MS)
    assert [claimed.state.job_id for claimed in waiting.result()] == [job.job_id]


@pytest.mark.parametrize("fault", ["lose", "lose answer"])
async def test_a_delivery_is_repeated_until_it_is_known_who_has_the_jobs(world: World, fault: str) -> None:
    faults = [fault]
    world.fault = lambda _sender, _node, method: faults.pop() if method == "deliver" and faults else ""
    waiting = world.poll(1)
    await world.settle()
    await world.nodes[2].create()
    await world.advance(ms=2 * RENEW_MS)
    assert len(waiting.result()) == 1 and world.count("deliver") == 2
    assert world.claim_count() == 1 and await world.release_count() == 0
    assert world.claims[2].statistics().jobs_delivered == 1


async def test_a_delivery_that_cannot_be_sent_goes_back_uncounted_and_elsewhere(world: World) -> None:
    waiting, other = world.poll(1), world.poll(3)
    await world.settle()
    world.fault = lambda _sender, node, method: "refuse" if (node, method) == (1, "deliver") else ""
    await world.nodes[2].create()
    await world.advance(ms=RENEW_MS)
    (claimed,) = other.result()
    assert claimed.state.attempt == 1 and not waiting.done()
    await world.advance(ms=PROMISE_MS)
    await world.nodes[1].create()
    await world.settle()
    assert waiting.done(), "it stands in its queue again"


async def test_a_job_whose_delivery_may_have_come_is_not_given_to_another_worker(world: World) -> None:
    """It is leased until its lease ends: the worker of a node that is cut off may be at it."""
    waiting = world.poll(1)
    await world.settle()
    world.fault = lambda _sender, _node, method: "lose answer" if method == "deliver" else ""
    await world.nodes[2].create()
    await world.advance(ms=2 * DELIVER_TRIES_MS)
    assert len(waiting.result()) == 1
    assert await world.claim(3) == [] and await world.release_count() == 0


async def test_a_delivery_to_another_life_of_the_process_is_released_where_it_cannot_have_come_before(world: World) -> None:
    waiting = world.poll(1)
    await world.settle()
    making = asyncio.ensure_future(world.nodes[2].create())
    await until(lambda: world.claims[1].statistics().promises > 0)
    world.claims[1]._epoch += 1
    await making
    await world.settle()
    (claimed,) = await world.claim(3)
    assert claimed.state.attempt == 1
    waiting.cancel()


async def test_demand_that_is_not_renewed_is_forgotten(world: World) -> None:
    waiting = world.poll(1)
    await world.settle()
    assert world.claims[2].statistics().queues_wanted == 1
    world.fault = lambda sender, node, _method: "refuse" if 1 in (sender, node) else ""
    await world.advance(ms=DEMAND_MS + RENEW_MS)
    assert world.claims[2].statistics().queues_wanted == 0
    await world.nodes[2].create()
    await world.settle()
    assert world.count("offer") == 0
    world.fault = lambda _sender, _node, _method: ""
    await world.advance(ms=RENEW_MS)
    assert len(waiting.result()) == 1


async def test_demand_that_was_lost_is_heard_within_a_second(world: World) -> None:
    world.fault = lambda _sender, _node, method: "lose" if method == "demand" else ""
    waiting = world.poll(1)
    await world.settle()
    await world.nodes[2].create()
    await world.settle()
    assert not waiting.done()
    world.fault = lambda _sender, _node, _method: ""
    await world.advance(ms=2 * RENEW_MS)
    assert len(waiting.result()) == 1


async def test_a_queue_that_nobody_claims_from_any_more_is_not_talked_of(world: World) -> None:
    await world.claim(1)
    await world.advance(ms=INTEREST_MS + DEMAND_MS + 2 * RENEW_MS)
    told = world.count("demand")
    assert told > 2
    await world.advance(ms=10 * RENEW_MS)
    assert world.count("demand") == told
    assert all(not claims.offers._demand and not claims._hints for claims in world.claims.values())


@pytest.mark.parametrize("seed", range(10))
async def test_a_network_that_loses_calls_loses_no_job_and_leases_none_twice(seed: int) -> None:
    """A tenth of all calls or their answers is lost. Once it heals, all waiters are served; a lease that nobody holds ends by itself."""
    async with open_world(seed) as world:
        rng = random.Random(seed)
        world.fault = lambda _sender, _node, _method: rng.choice(("lose", "lose answer", "refuse")) if rng.random() < 0.1 else ""
        world.delay_turns_max = 4
        made = {(await world.nodes[rng.choice((1, 2, 3))].create()).job_id for _ in range(30)}
        taken: list[ClaimedJob] = []
        polls = [world.poll(rng.choice((1, 2, 3)), jobs_max=2) for _ in range(8)]
        for _ in range(40):
            await world.advance(ms=200)
            taken += [job for task in polls if task.done() for job in task.result()]
            polls = [world.poll(rng.choice((1, 2, 3)), jobs_max=2) if task.done() else task for task in polls]
        world.fault = lambda _sender, _node, _method: ""
        await world.advance(ms=3 * RENEW_MS + DELIVER_TRIES_MS)
        taken += [job for task in polls if task.done() for job in task.result()]
        assert len({job.state.job_id for job in taken}) == len(taken), "two workers have the same job"
        leased = sum(len(node.node.dispatcher.leases) for node in world.nodes.values())
        ready = [sum((await node.depth()).get("QUEUED", ())) for node in world.nodes.values()]
        assert sum(ready) == 0 and leased == len(made), "each job is leased, to somebody or to nobody"
        for task in polls:
            task.cancel()


# Groups that move.


class Moving:
    """The replicas of a node, some of whose groups come to nothing: refused with an error, or answered with one."""

    groups_share_fate = False

    def __init__(self, node: TestNode) -> None:
        self._replicas = node.node.replicas
        self.refused: dict[int, Exception] = {}
        self.failed: dict[int, Exception] = {}
        self.held: dict[int, tuple[Batch, list[tuple[int, AnyCommand]]]] = {}

    def propose_many(self, commands: list, **options: bool) -> Batch:  # type: ignore[type-arg]
        if not all(isinstance(command, Claim) for _, command in commands):
            return self._replicas.propose_many(commands, **options)
        ((group, _),) = commands
        if group in self.refused:
            raise self.refused[group]
        if group in self.failed:
            batch = Batch(1, asyncio.get_running_loop())
            batch.fail(self.failed[group])
            return batch
        if group in self.held:
            batch, held = self.held[group]
            held += commands
            return batch
        return self._replicas.propose_many(commands, **options)

    @property
    def kept(self) -> Kept:
        return self._replicas.kept


@asynccontextmanager
async def open_moving() -> AsyncIterator[tuple[TestNode, Moving]]:
    """A node with 40 ready jobs in four groups."""
    async with open_test_node() as node:
        await node.create_many([{}] * 40)
        moving = Moving(node)
        node.node.dispatcher.claims._replicas = moving  # type: ignore[assignment]
        yield node, moving


def _memory(node: TestNode) -> tuple[int, int]:
    queue = node.node.dispatcher.queues.ensure("default", "default")
    return queue.ready_count, queue.reserved


@pytest.mark.parametrize("error", [NotLeader("moved"), OutcomeUnknown("lost")])
@pytest.mark.parametrize("when", ["refused", "failed"])
async def test_jobs_of_other_groups_are_delivered_and_those_of_one_that_moved_are_dropped(error: Exception, when: str) -> None:
    if when == "refused" and isinstance(error, OutcomeUnknown):
        pytest.skip("what is refused is known")
    async with open_moving() as (node, moving):
        getattr(moving, when)[1] = error
        claimed = await node.claim(jobs_max=40)
        assert 0 < len(claimed) < 40
        assert _memory(node) == (0, 0)


async def test_jobs_of_a_group_without_room_are_put_back_and_the_others_delivered() -> None:
    async with open_moving() as (node, moving):
        moving.refused[1] = Unavailable("full")
        claimed = await node.claim(jobs_max=40)
        assert 0 < len(claimed) < 40
        assert _memory(node) == (40 - len(claimed), 0)
        with pytest.raises(Unavailable):
            await node.claim(jobs_max=40)
        moving.refused.clear()
        assert len(claimed + await node.claim(jobs_max=40)) == 40


async def test_a_claim_whose_groups_all_moved_goes_on_waiting() -> None:
    async with open_moving() as (node, moving):
        moving.failed = dict.fromkeys(range(4), NotLeader("moved"))
        waiting = asyncio.ensure_future(node.claim(jobs_max=40, wait_s=60))
        await turns(20)
        assert not waiting.done() and _memory(node) == (0, 0)
        moving.failed.clear()
        await node.create()
        async with asyncio.timeout(5):
            assert len(await waiting) == 1


async def test_a_group_without_a_quorum_does_not_hold_up_the_jobs_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wheelsched.dispatch.claims.STRAGGLERS_S", 0.0)
    async with open_moving() as (node, moving):
        moving.held[1] = (Batch(1, asyncio.get_running_loop()), [])
        claimed = await node.claim(jobs_max=40)
        assert 0 < len(claimed) < 40 and _memory(node) == (0, 40 - len(claimed))
        moving.held[1][0].fail(NotLeader("moved"))
        await turns(5)
        assert _memory(node) == (0, 0)


async def test_a_straggler_that_was_claimed_after_all_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wheelsched.dispatch.claims.STRAGGLERS_S", 0.0)
    async with open_moving() as (node, moving):
        moving.held[1] = (Batch(1, asyncio.get_running_loop()), [])
        claimed = await node.claim(jobs_max=40)
        (held, commands), moving.held = moving.held[1], {}
        reply = (await node.node.replicas.propose_many(commands).future)[0]
        held.settle(0, reply)
        await turns(20)
        again = await node.claim(jobs_max=40)
        assert len(claimed) + len(again) == 40 and all(job.state.attempt == 1 for job in again)
        assert _memory(node) == (0, 0)


def test_jobs_too_large_for_one_message_are_split() -> None:
    job = ClaimedJob(None, None, b"x" * 200_000)  # type: ignore[arg-type]
    fitting, rest = split_to_fit([job] * 100)
    assert len(fitting) + len(rest) == 100 and 30 < len(fitting) < JOBS_BYTES_MAX // 200_000
    assert split_to_fit([job._replace(payload=b"x" * 65_536)] * 100)[1] == []
    assert len(split_to_fit([job._replace(payload=b"x" * JOBS_BYTES_MAX)] * 2)[0]) == 1


# Over a real cluster.


async def test_a_worker_of_one_node_of_a_cluster_is_given_the_jobs_of_all_as_they_come_due() -> None:
    async with open_test_cluster() as cluster:
        worker = cluster.face(3)
        jobs: list[ClaimedJob] = []
        commands = [Create(worker.new_job_id(), "default", "q", 1, -1, 300, 0, 0, encode_spec(JobSpec()), b"1") for _ in range(40)]
        made = {reply.state.job_id for reply in await cluster.face(1).propose_many(commands) if reply.state is not None}
        async with asyncio.timeout(30):
            while len(jobs) < len(commands):
                jobs += await worker.claim("default", ["q"], jobs_max=1, lease_ms=None, wait_ms=5_000, worker="w")
        assert {job.state.job_id for job in jobs} == made
        assert all(job.state.attempt == 1 and job.state.version == 2 for job in jobs), "each was claimed once, and never released"


async def test_no_job_is_lost_or_reserved_for_ever_while_groups_change_their_leaders() -> None:
    """Workers of all nodes take and finish jobs of a queue with a cap, while each group moves again and again."""
    async with open_test_cluster() as cluster:
        await cluster.face(1).put_queue("default", "q", QueueSettings(max_concurrency=20), actor="test")
        made: set[bytes] = set()
        done: set[bytes] = set()

        async def work(node: int) -> None:
            face = cluster.face(node)
            while True:
                for job in await face.claim("default", ["q"], jobs_max=3, lease_ms=None, wait_ms=2_000, worker=f"w{node}"):
                    state = job.state
                    reply = await face.complete(
                        state.job_id, state.attempt, state.fencing, outcome=Outcome.SUCCEEDED, error=b"", result=b"", retry_after_ms=-1
                    )
                    assert not reply.refusal, reply
                    done.add(state.job_id)

        workers = [asyncio.ensure_future(work(node)) for node in cluster.nodes for _ in range(3)]
        for turn in range(8):
            commands = [
                Create(cluster.face(1).new_job_id(), "default", "q", 1, -1, 0, 0, 0, encode_spec(JobSpec()), b"1") for _ in range(20)
            ]
            made |= {reply.state.job_id for reply in await cluster.face(1).propose_many(commands) if reply.state is not None}
            group = turn % 4
            leader = cluster.leader_of(group)
            if leader is not None:
                cluster.face(leader).replicas.transfer(group, cluster.others(leader)[turn % 2])
            await cluster.wait_led()
        async with asyncio.timeout(40):
            while done < made:
                assert not any(task.done() for task in workers), [task.exception() for task in workers if task.done()]
                await asyncio.sleep(0.05)
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        queues = {node: cluster.face(node).local.dispatcher.queues.ensure("default", "q") for node in cluster.nodes}
        async with asyncio.timeout(5):
            while any(queue.reserved for queue in queues.values()):  # noqa: ASYNC110  # what is waited for is in several nodes
                await asyncio.sleep(0.01)
        assert done == made
