"""Caps and rates of queues over all nodes of a cluster: they hold whatever leads what, and room is found wherever it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from wheelsched.core.errors import OutcomeUnknown, Unavailable
from wheelsched.core.ids import group_of
from wheelsched.model import keys
from wheelsched.model.commands import Create
from wheelsched.model.rows import JobSpec, QueueSettings, decode_counts, encode_spec
from wheelsched.model.schedules import Definition
from wheelsched.model.states import Outcome, Status
from wheelsched.node.face import ClaimedJob
from wheelsched.store import StoreFailed
from wheelsched.testing.cluster import GROUP_COUNT, TestCluster, open_test_cluster

TENANT = "default"


class Capped:
    """A cluster and what was claimed from its queue `q`; `most`: how many jobs the rows ever had leased at once."""

    def __init__(self, cluster: TestCluster) -> None:
        self.cluster = cluster
        self.most = 0
        self._numbers = 0
        self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        while True:
            self.most = max(self.most, self.leased())
            await asyncio.sleep(0.001)

    def leased(self) -> int:
        return sum(sum(cells[6:9]) + sum(cells[12:15]) for cells in self.counts())

    def succeeded(self) -> int:
        return sum(sum(cells[15:18]) for cells in self.counts())

    def counts(self) -> Iterator[Sequence[int]]:
        """By the rows of each group's leader, where one is known."""
        for group in range(GROUP_COUNT):
            leader = self.cluster.leader_of(group)
            if leader is not None:
                row = self.cluster.nodes[leader].store.get(keys.COUNTS, keys.queue_prefix(group, TENANT, "q"))
                if row:
                    yield decode_counts(row).cells

    async def close(self) -> None:
        self._looking.cancel()
        with suppress(asyncio.CancelledError):
            await self._looking

    async def put_queue(self, **settings: Any) -> None:
        await self.cluster.face(1).put_queue(TENANT, "q", QueueSettings(**settings), actor="test")

    async def create(self, count: int, *, group: int | None = None, queue: str = "q") -> None:
        face = next(node.face for node in self.cluster.nodes.values() if node.face is not None)
        commands = []
        while len(commands) < count:
            job_id = face.new_job_id()
            if group is None or group_of(job_id, GROUP_COUNT) == group:
                spec = JobSpec(0, max_attempts=9, initial_backoff_ms=0, max_backoff_ms=0, timeout_ms=3_600_000)
                commands.append(Create(job_id, TENANT, queue, 1, -1, 0, 0, 0, encode_spec(spec), b"1", b""))
        for reply in await face.propose_many(commands):
            assert reply.state is not None

    async def claim(self, node: int, *, jobs_max: int = 1, wait_s: float = 5.0, lease_ms: int = 600_000) -> list[ClaimedJob]:
        return await self.cluster.face(node).claim(
            TENANT, ["q"], jobs_max=jobs_max, lease_ms=lease_ms, wait_ms=round(wait_s * 1000), worker=f"w{node}"
        )

    async def complete(self, node: int, jobs: Sequence[ClaimedJob]) -> None:
        for job in jobs:
            state = job.state
            await self.cluster.face(node).complete(
                state.job_id, state.attempt, state.fencing, outcome=int(Outcome.SUCCEEDED), error=b"", result=b"", retry_after_ms=-1
            )

    async def work(self, node: int, *, until: int, for_s: float = 0.005) -> None:
        """A worker, until so many jobs are done by all. What gets lost on its way to one runs out after a second."""
        while self.succeeded() < until:
            face = self.cluster.nodes[node].face
            try:
                async with asyncio.timeout(10):
                    jobs = await self.claim(node, wait_s=0.5, lease_ms=1_000)
                    await asyncio.sleep(for_s)
                    await self.complete(node, jobs)
            except TimeoutError:
                assert face is not self.cluster.nodes[node].face, "a node that lives answers"
            except (Unavailable, OutcomeUnknown, AssertionError, StoreFailed):
                await asyncio.sleep(0.05)  # the node is down or died meanwhile, or a leader is being elected


@asynccontextmanager
async def open_capped(count: int = 3, **settings: Any) -> AsyncIterator[Capped]:
    async with open_test_cluster(count) as cluster:
        capped = Capped(cluster)
        try:
            await capped.put_queue(**settings)
            yield capped
        finally:
            await capped.close()


async def spread(capped: Capped) -> None:
    """Each node leads a group at least."""
    cluster = capped.cluster
    for group in range(GROUP_COUNT):
        leader, wanted = cluster.leader_of(group), group % len(cluster.nodes) + 1
        if leader is not None and leader != wanted:
            cluster.face(leader).replicas.transfer(group, wanted)
    async with asyncio.timeout(30):
        while {cluster.leader_of(group) for group in range(GROUP_COUNT)} != set(cluster.nodes):  # noqa: ASYNC110  # in several nodes
            await asyncio.sleep(0.02)
    await cluster.wait_led()


async def test_three_leaders_keep_one_cap_and_all_jobs_run() -> None:
    async with open_capped(max_concurrency=2) as capped:
        await spread(capped)
        await capped.create(60)
        async with asyncio.timeout(60):
            await asyncio.gather(*(capped.work(node, until=60) for node in (1, 2, 3) for _ in range(3)))
        assert capped.most == 2
        assert capped.succeeded() == 60


async def test_a_cap_holds_while_leaders_die_and_hand_over() -> None:
    async with open_capped(max_concurrency=3) as capped:
        cluster = capped.cluster
        await spread(capped)
        await capped.create(150)

        async def disturb() -> None:
            for turn in range(4):
                await asyncio.sleep(0.4)
                home = cluster.face(1).replicas.leader_of(keys.META_GROUP)
                victim = home if home is not None and turn < 2 else turn % 3 + 1  # who shares out the cap, and others
                await cluster.nodes[victim].crash() if turn % 2 else await cluster.nodes[victim].stop()
                await asyncio.sleep(0.6)
                await cluster.nodes[victim].start()
                await cluster.wait_led()
                await spread(capped)

        async with asyncio.timeout(120):
            working = asyncio.gather(*(capped.work(node, until=150, for_s=0.02) for node in (1, 2, 3) for _ in range(3)))
            await disturb()
            await working
        assert 2 <= capped.most <= 3


async def test_room_is_given_to_the_leader_that_has_the_jobs() -> None:
    async with open_capped(max_concurrency=10) as capped:
        await spread(capped)
        loop = asyncio.get_running_loop()
        held = []
        for turn in range(10):
            waiting = asyncio.create_task(capped.claim(turn % 3 + 1))
            await asyncio.sleep(0.05)
            started = loop.time()
            await capped.create(1, group=turn % GROUP_COUNT)
            held.append((await waiting, loop.time() - started))
        assert [len(jobs) for jobs, _ in held] == [1] * 10
        assert sorted(took_s for _, took_s in held)[5] < 0.3
        assert await capped.claim(1, wait_s=0.2) == []
        await capped.create(5, group=0)
        assert await capped.claim(1, jobs_max=5, wait_s=0.5) == [], "ten run"
        waiting = asyncio.create_task(capped.claim(2, jobs_max=5))
        await capped.complete(1, held[3][0])
        assert len(await waiting) == 1
        assert capped.most == 10


async def test_all_of_a_cap_can_be_used_by_one_leader() -> None:
    async with open_capped(max_concurrency=9) as capped:
        await spread(capped)
        await capped.create(20, group=1)
        jobs: list[ClaimedJob] = []
        async with asyncio.timeout(10):
            while len(jobs) < 9:
                jobs += await capped.claim(3, jobs_max=9 - len(jobs))
        assert await capped.claim(3, wait_s=0.3) == []
        assert capped.most == 9


async def test_a_lower_cap_and_none_at_all_are_known_everywhere_within_a_second() -> None:
    async with open_capped(max_concurrency=6) as capped:
        await spread(capped)
        await capped.create(40)
        jobs: list[ClaimedJob] = []
        async with asyncio.timeout(10):
            while len(jobs) < 6:
                jobs += await capped.claim(1, jobs_max=6)
        await capped.put_queue(max_concurrency=1)
        for number in range(6):
            await asyncio.sleep(0.1)
            assert await capped.claim(number % 3 + 1, wait_s=0) == []
            await capped.complete(1, [jobs[number]])
        (last,) = await capped.claim(2)
        assert await capped.claim(3, wait_s=0.3) == []
        await capped.put_queue()
        async with asyncio.timeout(10):
            left = 33
            while left:
                left -= len(await capped.claim(3, jobs_max=10))
        await capped.complete(2, [last])


async def test_a_node_that_was_away_when_a_cap_was_set_starts_nothing_before_it_knows() -> None:
    async with open_test_cluster() as cluster:
        capped = Capped(cluster)
        await capped.create(30)
        away = next(node for node in (2, 3) if cluster.face(1).replicas.leader_of(keys.META_GROUP) != node)
        await cluster.nodes[away].stop()
        await cluster.wait_led()
        await capped.put_queue(max_concurrency=1)
        await cluster.nodes[away].start()
        claims = cluster.face(away).local.dispatcher.claims
        assert not claims.is_open
        workers = [asyncio.create_task(capped.claim(node, jobs_max=9, wait_s=3.0)) for node in (1, 2, 3) for _ in range(2)]
        for group in range(GROUP_COUNT):
            leader = cluster.leader_of(group)
            if leader is not None and leader != away:
                cluster.face(leader).replicas.transfer(group, away)
        assert sum([len(await worker) for worker in workers]) == 1
        assert claims.is_open and capped.most == 1
        await capped.close()


async def test_a_rate_is_that_of_all_nodes_together() -> None:
    async with open_capped(rate_per_s=20.0) as capped:
        await spread(capped)
        loop = asyncio.get_running_loop()
        await capped.create(200)
        started: list[float] = []

        async def work(node: int) -> None:
            while loop.time() < end:
                for _ in await capped.claim(node, wait_s=0.2):
                    started.append(loop.time())

        end = loop.time() + 4.0
        await asyncio.gather(*(work(node) for node in (1, 2, 3) for _ in range(4)))
        for first, at in enumerate(started):
            within = sum(at <= other < at + 1.0 for other in started[first:])
            assert within <= 20 + 20 + 4, "a second's worth may come at once; the clocks of claim and test are two"
        assert len(started) >= 45


async def test_a_cap_of_one_moves_between_groups_that_all_have_work() -> None:
    async with open_capped(max_concurrency=1) as capped:
        await spread(capped)
        for group in range(GROUP_COUNT):
            await capped.create(400, group=group)
        workers = [asyncio.create_task(capped.work(node, until=1 << 30, for_s=0.002)) for node in (1, 2, 3)]
        async with asyncio.timeout(30):
            while sum(sum(cells[15:18]) > 0 for cells in capped.counts()) < GROUP_COUNT:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        assert capped.most == 1


async def test_views_add_up_what_runs_and_waits_on_all_nodes() -> None:
    async with open_capped(max_concurrency=4) as capped:
        await spread(capped)
        await capped.create(20)
        jobs: list[ClaimedJob] = []
        async with asyncio.timeout(10):
            while len(jobs) < 4:
                jobs += await capped.claim(1, jobs_max=4)
        for node in (1, 2, 3):
            view = await capped.cluster.face(node).queue_view(TENANT, "q")
            assert view is not None and view.running == 4 and sum(view.depth[Status.QUEUED]) == 16
            ((listed,), _) = await capped.cluster.face(node).list_queues(TENANT, after="", limit=5)
            assert (listed.running, listed.settings.max_concurrency) == (4, 4)


async def test_runs_of_one_definition_keep_its_cap_in_a_cluster() -> None:
    """They are all of one group, so nobody has to share."""
    async with open_test_cluster() as cluster:
        capped = Capped(cluster)
        face = cluster.face(1)
        now_ms = face.clock.wall_ms()
        spec = encode_spec(JobSpec(0, max_attempts=9, initial_backoff_ms=0, max_backoff_ms=0, timeout_ms=3_600_000))
        definition = Definition(b"", TENANT, "often", "q", every_ms=3_600_000, anchor_ms=now_ms + 3_600_000, max_concurrency=2, spec=spec)
        await face.put_schedule(definition, actor="test")
        for number in range(8):
            await cluster.face(number % 3 + 1).start_run(
                TENANT, "often", run_at_ms=-1, delay_ms=0, payload=None, key="", fingerprint=b"", actor="test"
            )
        claims = await asyncio.gather(*(capped.claim(node, jobs_max=4, wait_s=1.0) for node in (1, 2, 3)))
        assert sum(map(len, claims)) == 2
        await capped.complete(1, [job for jobs in claims for job in jobs][:1])
        claims = await asyncio.gather(*(capped.claim(node, jobs_max=4, wait_s=1.0) for node in (1, 2, 3)))
        assert sum(map(len, claims)) == 1 and capped.most == 2
        await capped.close()


async def test_a_queue_without_cap_or_rate_costs_no_message() -> None:
    async with open_test_cluster() as cluster:
        capped = Capped(cluster)
        await capped.create(30)
        taken = 0
        async with asyncio.timeout(20):
            while taken < 30:
                taken += len(await capped.claim(taken % 3 + 1, jobs_max=5))
        assert all(cluster.face(node).shares.statistics().reports == 0 for node in (1, 2, 3))
        await capped.close()


@pytest.mark.parametrize("is_capped", [False, True])
async def test_a_single_node_asks_nobody(is_capped: bool) -> None:
    async with open_test_cluster(1) as cluster:
        capped = Capped(cluster)
        if is_capped:
            await capped.put_queue(max_concurrency=3)
        await capped.create(10)
        taken = await capped.claim(1, jobs_max=10)
        while len(taken) < (3 if is_capped else 10):
            taken += await capped.claim(1, jobs_max=10)
        assert await capped.claim(1, wait_s=0.1) == []
        await capped.close()
