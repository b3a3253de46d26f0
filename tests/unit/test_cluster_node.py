"""Several nodes as one: any of them answers any call, and what one knew is known after it died."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest

from wheelsched.core.errors import OutcomeUnknown, Unavailable
from wheelsched.model.commands import Create
from wheelsched.model.rows import JobSpec, QueueSettings, encode_spec
from wheelsched.model.schedules import Definition, Overlap
from wheelsched.model.states import Outcome, Status
from wheelsched.node.cluster import ClusterNode, Directory
from wheelsched.node.face import ClaimedJob, JobFilter
from wheelsched.testing.cluster import GROUP_COUNT, TestCluster, open_test_cluster

TENANT = "default"
SPEC = encode_spec(JobSpec())


def a_create(face: ClusterNode, queue: str = "q", *, delay_ms: int = 0) -> Create:
    return Create(face.new_job_id(), TENANT, queue, 1, -1, delay_ms, 0, 0, SPEC, b"1")


async def create(face: ClusterNode, count: int, queue: str = "q", *, delay_ms: int = 0) -> list[bytes]:
    replies = await face.propose_many([a_create(face, queue, delay_ms=delay_ms) for _ in range(count)])
    assert not any(reply.refusal for reply in replies)
    return [reply.state.job_id for reply in replies if reply.state is not None]


async def claim(face: ClusterNode, count: int, queue: str = "q", *, wait_ms: int = 0) -> list[ClaimedJob]:
    return await face.claim(TENANT, [queue], jobs_max=count, lease_ms=None, wait_ms=wait_ms, worker="w")


async def succeed(face: ClusterNode, job: ClaimedJob) -> None:
    state = job.state
    reply = await face.complete(
        state.job_id, state.attempt, state.fencing, outcome=Outcome.SUCCEEDED, error=b"", result=b"", retry_after_ms=-1
    )
    assert not reply.refusal


async def test_any_node_takes_any_job_and_shows_it_at_once() -> None:
    async with open_test_cluster() as cluster:
        for writer in cluster.nodes:
            for job_id in await create(cluster.face(writer), 20):
                for reader in cluster.nodes:
                    record = await cluster.face(reader).read_job(TENANT, job_id)
                    assert record is not None and record.status is Status.QUEUED


async def test_a_worker_of_one_node_is_given_the_jobs_of_all() -> None:
    async with open_test_cluster() as cluster:
        made = set(await create(cluster.face(1), 60))
        worker = cluster.face(3)
        claimed: list[ClaimedJob] = []
        async with asyncio.timeout(30):
            while len(claimed) < len(made):
                claimed += await claim(worker, 7, wait_ms=200)
        assert await claim(worker, 7) == []
        assert {job.state.job_id for job in claimed} == made
        assert len(claimed) == len(made)
        for job in claimed:
            await succeed(cluster.face(2), job)
        view = await cluster.face(1).queue_view(TENANT, "q")
        assert view is not None and sum(view.depth[Status.SUCCEEDED]) == len(made)


async def test_pages_of_a_listing_neither_skip_nor_repeat_a_job_of_any_leader() -> None:
    async with open_test_cluster() as cluster:
        made = set(await create(cluster.face(2), 57, delay_ms=3_600_000))
        seen: list[bytes] = []
        cursor: bytes | None = None
        while True:
            page = await cluster.face(1).list_jobs(JobFilter(TENANT), cursor=cursor, limit=10)
            seen += [record.state.job_id for record in page.jobs]
            cursor = page.cursor
            if cursor is None:
                break
        assert len(seen) == len(made) and set(seen) == made


async def test_jobs_that_were_acknowledged_are_there_after_their_leader_died() -> None:
    async with open_test_cluster() as cluster:
        made = set(await create(cluster.face(1), 40))
        (first,) = await claim(cluster.face(1), 1)
        died = cluster.leader_of(0)
        assert died is not None
        await cluster.nodes[died].crash()
        survivor = cluster.face(cluster.others(died)[0])
        made |= set(await create(survivor, 10))
        claimed = [first]
        async with asyncio.timeout(20):
            while len(claimed) < len(made):
                claimed += await claim(survivor, 100, wait_ms=200)
        assert {job.state.job_id for job in claimed} == made
        tokens = [job.state.fencing for job in claimed]
        assert all(token > 0 for token in tokens)
        await cluster.nodes[died].start()
        await cluster.wait_led()
        page = await cluster.face(died).list_jobs(JobFilter(TENANT), cursor=None, limit=1_000)
        assert {record.state.job_id for record in page.jobs} == made


async def test_a_node_that_is_cut_off_answers_503_and_leads_nothing() -> None:
    async with open_test_cluster() as cluster:
        lonely = cluster.leader_of(0)
        assert lonely is not None
        cluster.isolate(lonely)
        others = [node_id for node_id in cluster.nodes if node_id != lonely]
        await create(cluster.face(others[0]), 20)
        assert cluster.face(lonely).local.dispatcher.led == []
        # 503, or 504 for what it had in its log when it was cut off; never an answer that looks like the caller's fault.
        with pytest.raises((Unavailable, OutcomeUnknown)):
            await cluster.face(lonely).propose(a_create(cluster.face(lonely)))
        cluster.heal()
        await cluster.wait_led()
        await create(cluster.face(lonely), 20)


async def test_memory_equals_the_rows_after_leaders_changed_ten_times() -> None:
    """B-056: whoever comes to lead a group again has each timer once."""
    async with open_test_cluster() as cluster:
        made = await create(cluster.face(1), 200, delay_ms=60_000)
        for turn in range(10):
            group = turn % GROUP_COUNT
            await cluster.wait_led()
            leader = cluster.leader_of(group)
            assert leader is not None
            replicas = cluster.face(leader).replicas
            replicas.transfer(group, cluster.others(leader)[turn % 2])
            await _until(lambda group=group, leader=leader: cluster.leader_of(group) not in (leader, None))  # type: ignore[misc]
        await cluster.wait_led()
        await _wait_loaded(cluster)
        timers = sum(len(cluster.face(node_id).local.dispatcher.timers) for node_id in cluster.nodes)
        assert timers == len(made)
        view = await cluster.face(2).queue_view(TENANT, "q")
        assert view is not None and sum(view.depth[Status.SCHEDULED]) == len(made)
        assert [await cluster.face(node_id).local.dispatcher.audit.sweep() for node_id in cluster.nodes] == [0, 0, 0]


async def test_a_queue_paused_on_one_node_gives_nothing_on_the_others() -> None:
    async with open_test_cluster() as cluster:
        await create(cluster.face(1), 30)
        view = await cluster.face(1).pause_queue(TENANT, "q", True, actor="me")
        assert view.settings.paused
        await _until(lambda: all(_settings(cluster, node_id).paused for node_id in cluster.nodes))
        assert await claim(cluster.face(2), 10) == []
        await cluster.face(3).pause_queue(TENANT, "q", False, actor="me")
        await _until(lambda: not any(_settings(cluster, node_id).paused for node_id in cluster.nodes))
        assert len(await claim(cluster.face(2), 10)) > 0


async def test_a_schedule_goes_on_after_its_leader_died() -> None:
    async with open_test_cluster() as cluster:
        definition = Definition(
            b"", TENANT, "beat", "q", every_ms=1_000, anchor_ms=0, overlap=Overlap.ALLOW, spec=SPEC
        )  # fmt: skip
        record, created = await cluster.face(1).put_schedule(definition)
        assert created
        first = record.course.next_at_ms
        leader = cluster.leader_of(cluster.face(1).local.dispatcher.group_of_schedule(TENANT, "beat"))
        assert leader is not None
        await cluster.nodes[leader].crash()
        survivor = cluster.face(cluster.others(leader)[0])
        jobs: list[ClaimedJob] = []
        async with asyncio.timeout(20):
            while len(jobs) < 3:
                jobs += await claim(survivor, 10, wait_ms=500)
        instants = sorted(job.state.run.scheduled_for_ms for job in jobs if job.state.run is not None)
        assert len(set(instants)) == len(instants)
        assert instants[0] >= first
        assert all((after - before) % 1_000 == 0 for before, after in itertools.pairwise(instants))


def _settings(cluster: TestCluster, node_id: int) -> QueueSettings:
    return cluster.face(node_id).local.dispatcher.queues.ensure(TENANT, "q").settings


async def _wait_loaded(cluster: TestCluster) -> None:
    await _until(lambda: all(cluster.face(node_id).local.dispatcher.is_loaded for node_id in cluster.nodes))
    for node_id in cluster.nodes:
        await cluster.face(node_id).local.dispatcher.loader.load_ahead()


async def _until(condition: Callable[[], bool]) -> None:
    """What several nodes come to agree on sets no event of the test's."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class _Known:
    """What a node's own replica of a group knows."""

    def __init__(self, term: int, leader: int | None) -> None:
        self.term, self.leader = term, leader

    def term_of(self, group: int) -> int:
        return self.term

    def leader_of(self, group: int) -> int | None:
        return self.leader


@pytest.mark.parametrize(
    ("own_term", "own_leader", "told_term", "wanted"),
    [
        (3, 1, 0, 1),
        (3, 1, 3, 1),
        (3, None, 4, 2),
        (3, None, 3, 2),  # the group was left: no leader speaks to this replica any more
        (4, None, 3, None),  # an election
        (4, 1, 3, 1),
    ],
)
def test_who_leads_is_known_by_the_newest_term_also_where_the_group_was_left(
    own_term: int, own_leader: int | None, told_term: int, wanted: int | None
) -> None:
    directory = Directory(_Known(own_term, own_leader))  # type: ignore[arg-type]
    if told_term:
        directory.on_leads(2, [(7, told_term)])
    assert directory.leader_of(7) == wanted
