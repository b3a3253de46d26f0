"""What a node does with leases that run out just when it leads their group no more."""

from __future__ import annotations

import asyncio

from wheelsched.core.ids import group_of
from wheelsched.model.commands import Create
from wheelsched.model.rows import JobSpec, encode_spec
from wheelsched.model.states import Status
from wheelsched.node.cluster import ClusterNode
from wheelsched.testing.cluster import GROUP_COUNT, open_test_cluster

TENANT = "default"
SPEC = encode_spec(JobSpec())


def a_create(face: ClusterNode, group: int) -> Create:
    while group_of(job_id := face.new_job_id(), GROUP_COUNT) != group:
        pass
    return Create(job_id, TENANT, "q", 1, -1, 0, 0, 0, SPEC, b"1")


async def test_a_lease_that_ends_with_the_office_is_the_next_leaders() -> None:
    """The leader's own lease lapses unheard of first: the lease of a job that runs out then is refused, and the node goes on."""
    async with open_test_cluster() as cluster:
        leader = cluster.leader_of(0)
        assert leader is not None
        face = cluster.face(leader)
        (reply,) = await face.propose_many([a_create(face, 0)])
        assert reply.state is not None
        (job,) = await face.claim(TENANT, ["q"], jobs_max=1, lease_ms=60_000, wait_ms=10_000, worker="w")
        dispatcher = face.local.dispatcher
        lease = dispatcher.leases.get(job.state.job_id)
        assert lease is not None
        cluster.isolate(leader)
        # The office's lease is over before anybody has looked.
        while face.replicas.leads(0):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        dispatcher.leases._expire(lease, face.clock.mono_ms())
        assert dispatcher.leases.get(job.state.job_id) is None
        cluster.heal()
        await cluster.wait_led()
        record = await face.read_job(TENANT, job.state.job_id)
        assert record is not None and record.status in (Status.RUNNING, Status.RETRYING, Status.QUEUED)
