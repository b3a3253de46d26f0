"""Cases from the field about cancelling and leases (CASES.md, kinds 3 and 5), on the virtual clock."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from wheelsched.core.errors import StaleLease
from wheelsched.model.states import Outcome
from wheelsched.testing import TestNode, open_test_node


@pytest.fixture
async def node() -> AsyncIterator[TestNode]:
    async with open_test_node() as node:
        yield node


async def test_a_cancel_that_meets_a_failure_is_kept(node: TestNode) -> None:
    """B-051: the request is in the log, so the failure that comes after it schedules no retry."""
    job = await node.create(max_attempts=5)
    (claimed,) = await node.claim()
    assert (await node.cancel(job)).status == 4  # CANCEL_REQUESTED
    await node.complete(claimed, "retryable_failure", error="broken pipe")
    assert await node.status(job) == "CANCELLED"
    await node.advance(s=3_600)
    assert await node.claim() == []


async def test_a_success_after_a_cancel_request_counts_and_says_that_the_cancel_was_late(node: TestNode) -> None:
    """B-051, the other way: what was done is done."""
    job = await node.create()
    (claimed,) = await node.claim()
    await node.cancel(job)
    assert (await node.heartbeat(claimed)).cancel_requested
    await node.complete(claimed)
    assert await node.status(job) == "SUCCEEDED"
    assert [row.detail for row in await node.attempts(job)][-1] == "cancel_too_late"


@pytest.mark.parametrize("end", ["crash", "stop"])
async def test_a_cancelled_job_is_never_delivered_whatever_restarts(node: TestNode, end: str) -> None:
    """B-054: no worker is there when the job is cancelled, and the node goes down before one comes."""
    job = await node.create(delay_s=10)
    due = await node.create()
    await node.cancel(job)
    await node.cancel(due)
    await (node.crash_and_restart() if end == "crash" else node.graceful_restart())
    await node.advance(s=60)
    assert await node.claim(jobs_max=10) == []
    assert [await node.status(job), await node.status(due)] == ["CANCELLED", "CANCELLED"]


async def test_a_cancel_request_survives_the_crash_of_the_node(node: TestNode) -> None:
    """B-054: the running worker is told by its next heartbeat, after the restart too."""
    job = await node.create()
    (claimed,) = await node.claim()
    await node.cancel(job)
    await node.crash_and_restart()
    assert (await node.heartbeat(claimed)).cancel_requested
    await node.complete(claimed, "retryable_failure")
    assert await node.status(job) == "CANCELLED"


async def test_the_job_of_a_killed_worker_is_handed_out_again_within_two_seconds_of_its_lease(node: TestNode) -> None:
    """B-075: without a restart or an operator."""
    job = await node.create(initial_backoff_s=1)
    await node.claim(lease_s=45, worker="killed")
    await node.advance(s=44.999)
    assert await node.claim() == []
    await node.advance(s=2)
    (again,) = await node.claim()
    assert (again.state.job_id, again.state.attempt) == (job.job_id, 2)


async def test_a_payload_that_kills_its_worker_is_dead_after_its_attempts(node: TestNode) -> None:
    """B-076: attempts count at the claim, so three silent deaths are the end."""
    job = await node.create(max_attempts=3, initial_backoff_s=0)
    claims = 0
    for _ in range(10):
        claims += len(await node.claim(lease_s=5))
        await node.advance(s=6)
    assert claims == 3
    record = await node.get(job)
    assert record.status.name == "DEAD" and json.loads(record.error)["code"] == "lease_expired"


async def test_a_worker_restarted_under_its_old_name_gets_its_jobs_back_when_their_leases_end(node: TestNode) -> None:
    """B-079: leases belong to tokens, not to names."""
    for _ in range(5):
        await node.create(initial_backoff_s=0)
    lost = await node.claim(jobs_max=5, lease_s=45, worker="host-7")
    assert await node.claim(jobs_max=5, worker="host-7") == []
    await node.advance(s=45)
    again = await node.claim(jobs_max=10, worker="host-7")
    assert {job.state.job_id for job in again} == {job.state.job_id for job in lost}
    with pytest.raises(StaleLease):
        await node.complete(lost[0])


async def test_stuck_jobs_of_all_kinds_are_rescued_without_knowing_the_kind(node: TestNode) -> None:
    """B-081: rescue is the node's work; a worker that finds an unknown kind releases the job, and no attempt is counted."""
    first, second = await node.create("mail", initial_backoff_s=0), await node.create("pdf", initial_backoff_s=0)
    await node.claim("mail", lease_s=5)
    (unknown,) = await node.claim("pdf", lease_s=5)
    await node.release(unknown)
    assert (await node.get(second)).state.attempt == 0
    await node.advance(s=6)
    assert [await node.status(job) for job in (first, second)] == ["QUEUED", "QUEUED"]


async def test_heartbeats_a_second_before_the_end_of_the_lease_keep_every_job(node: TestNode) -> None:
    """B-090: fifty workers, heartbeats as late as may be, workers that come and go: no second attempt."""
    for _ in range(50):
        await node.create()
    running = [(await node.claim(lease_s=10, worker=f"w{number}"))[0] for number in range(50)]
    for _ in range(12):
        await node.advance(s=9)
        for claimed in running:
            await node.heartbeat(claimed)
        assert await node.claim(jobs_max=50, worker="new") == []
    for claimed in running:
        assert (await node.complete(claimed)).attempt == 1


async def test_a_heartbeat_that_arrives_with_the_end_of_the_lease_is_too_late(node: TestNode) -> None:
    """B-090, the edge: the node's clock alone decides."""
    await node.create()
    (claimed,) = await node.claim(lease_s=10)
    await node.advance(s=10)
    with pytest.raises(StaleLease):
        await node.heartbeat(claimed)


async def test_a_worker_that_never_heartbeats_expires_and_its_history_says_what_to_do(node: TestNode) -> None:
    """B-092: lease and timeout are two settings, told apart in history."""
    job = await node.create(timeout_s=60)
    await node.claim(lease_s=5)
    await node.advance(s=5)
    row = (await node.attempts(job))[-1]
    assert row.outcome == Outcome.LEASE_EXPIRED and "heartbeat" in json.loads(row.error)["message"]
    slow = await node.create(timeout_s=60)
    await node.advance(s=600)
    claims = await node.claim(jobs_max=10, lease_s=600)
    assert slow.job_id in {claimed.state.job_id for claimed in claims}
    await node.advance(s=60)
    assert (await node.attempts(slow))[-1].outcome == Outcome.TIMED_OUT


async def test_a_long_run_that_heartbeats_is_one_attempt(node: TestNode) -> None:
    """B-092: lease 5 s, handler 60 s."""
    job = await node.create(timeout_s=120)
    (claimed,) = await node.claim(lease_s=5)
    for _ in range(15):
        await node.advance(s=4)
        await node.heartbeat(claimed)
    await node.complete(claimed)
    assert (await node.get(job)).state.attempt == 1 and await node.attempts(job) == []


async def test_a_delay_far_longer_than_the_lease_is_delivered_once_and_not_before(node: TestNode) -> None:
    """B-093: delay 6 h, lease 45 s, twenty workers polling."""
    await node.create(delay_s=6 * 3_600)
    for _ in range(20 * 18):
        assert await node.claim(lease_s=45) == []
        await node.advance(s=60)
    assert len(await node.claim(lease_s=45, jobs_max=10)) == 1
    assert await node.claim(lease_s=45, jobs_max=10) == []
