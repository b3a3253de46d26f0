"""Batches of creates and of ends of attempts, which stand in the inbox of a replicated group as one: cut, put back, lost and counted."""

from __future__ import annotations

import asyncio

import pytest
from test_raft_replicas import GROUP, Cluster, a_create, jobs_of

from wheelsched.core.errors import NotLeader, OutcomeUnknown, Unavailable
from wheelsched.core.limits import ENTRY_BYTES_MAX, ENTRY_COMMANDS_MAX, INBOX_COMMANDS_MAX
from wheelsched.model.commands import AnyCommand, Claim, Complete, Create, Fire
from wheelsched.model.states import Outcome, Status
from wheelsched.replica import raft_replicas as replicas_module
from wheelsched.replica.proposals import RUN_COMMANDS_MIN, Batch, ProposalRun
from wheelsched.replica.raft_replicas import RaftReplicas
from wheelsched.testing.simulate_node import quiet_logs


@pytest.fixture(autouse=True)
def _quiet() -> None:
    quiet_logs()


def creates(numbers: range, *, delay_ms: int = 3_600_000, payload: bytes = b"null") -> list[tuple[int, AnyCommand]]:
    """For both groups, in turns."""
    return [(number % 2, a_create(number, delay_ms=delay_ms, payload=payload)) for number in numbers]


def number_of(batch: Batch, position: int) -> int:
    state = batch.future.result()[position].state
    assert state is not None
    return int.from_bytes(state.job_id[:14], "big")


async def lead_both(cluster: Cluster) -> RaftReplicas:
    replicas = cluster.replicas
    if not replicas.leads(1):
        (other,) = [node for node in cluster.nodes.values() if node.replicas is not None and node.replicas.leads(1)]
        assert other.replicas is not None
        other.replicas.transfer(1, cluster.leader.node_id)
        await cluster.until(lambda: replicas.leads(1))
    return replicas


def waiting(replicas: RaftReplicas) -> tuple[int, int, list[int]]:
    """(commands in all inboxes, their bytes, commands by group)."""
    return replicas.inbox_count, replicas._inboxes.bytes, [member.waiting_count for member in replicas._members.values()]


async def test_a_batch_is_cut_into_entries_and_answered_in_its_order() -> None:
    async with Cluster(3) as cluster:
        replicas = await lead_both(cluster)
        count = 5 * ENTRY_COMMANDS_MAX + 3
        batch = replicas.propose_many(creates(range(count)))
        assert all(type(item) is ProposalRun for member in replicas._members.values() for item in member.inbox)
        assert waiting(replicas)[0] == count and waiting(replicas)[2] == [(count + 1) // 2, count // 2]
        before = replicas.entry_count
        await cluster.until(batch.future.done)
        assert [number_of(batch, position) for position in range(count)] == list(range(count))
        assert replicas.entry_count - before == 6, "three for each group"
        assert waiting(replicas) == (0, 0, [0, 0])


async def test_large_payloads_part_a_batch_and_one_too_large_for_an_entry_has_one_of_its_own() -> None:
    async with Cluster(1) as cluster:
        replicas = cluster.replicas
        sizes = [ENTRY_BYTES_MAX // 2 - 500, ENTRY_BYTES_MAX // 2 - 500, ENTRY_BYTES_MAX + 1, 10, 10]
        before = replicas.entry_count
        batch = replicas.propose_many([(GROUP, a_create(number, payload=b"x" * size)) for number, size in enumerate(sizes)])
        await cluster.until(batch.future.done)
        assert [number_of(batch, position) for position in range(5)] == [0, 1, 2, 3, 4]
        assert replicas.entry_count - before == 3 and waiting(replicas) == (0, 0, [0, 0])


async def test_a_batch_of_due_jobs_brings_the_fire_along_and_its_ends_do_not() -> None:
    async with Cluster(1) as cluster:
        replicas = cluster.replicas
        count = 2 * RUN_COMMANDS_MIN
        batch = replicas.propose_many([(GROUP, a_create(number, delay_ms=0)) for number in range(count)])
        await cluster.until(batch.future.done)
        fired_ms = replicas.watermark_ms(GROUP)
        assert fired_ms > 0
        claim = replicas.propose(GROUP, Claim([(a_create(number).job_id, 0) for number in range(count)], 60_000, "w"))
        await cluster.until(claim.future.done)
        ends: list[tuple[int, AnyCommand]] = []
        for state in claim.future.result()[0].states:
            assert state is not None
            ends.append((GROUP, Complete(state.job_id, state.attempt, state.fencing, int(Outcome.SUCCEEDED), 0)))
        await cluster.advance(100)
        batch = replicas.propose_many(ends, urgent=True)
        await cluster.until(batch.future.done)
        assert all(reply.state is not None and reply.state.status == Status.SUCCEEDED for reply in batch.future.result())
        assert replicas.watermark_ms(GROUP) == fired_ms


async def test_what_a_transfer_keeps_from_the_log_waits_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core takes nothing while an office is handed over: what was cut goes back to the front, the pieces of a batch as well."""
    async with Cluster(3) as cluster:
        leader, replicas = cluster.leader, cluster.replicas
        target = cluster.others(leader)[0]
        cluster.network.cut |= {(leader.node_id, target.node_id)}
        replicas.propose(GROUP, a_create(5_000))
        await cluster.advance(20)
        replicas.transfer(GROUP, target.node_id)  # it is not level, so it is not told to stand
        count = 2 * ENTRY_COMMANDS_MAX + 10
        batch = replicas.propose_many([(GROUP, a_create(number)) for number in range(count)])
        single = replicas.propose(GROUP, a_create(6_000))
        await cluster.advance(60)
        assert not batch.future.done() and waiting(replicas)[0] == count + 1 == waiting(replicas)[2][GROUP]
        queued: list[AnyCommand] = []
        for item in leader.member(GROUP).inbox:
            queued += item.commands if isinstance(item, ProposalRun) else [item.command]
        assert queued == [*(a_create(number) for number in range(count)), a_create(6_000)]
        assert replicas._inboxes.bytes == sum(replicas_module.command_bytes(command) for command in queued)
        cluster.network.heal()
        cluster.network.cut.clear()
        await cluster.until(lambda: batch.future.done() and single.future.done())
        if batch.future.exception() is None:
            assert [number_of(batch, position) for position in range(count)] == list(range(count))
        else:
            assert isinstance(batch.future.exception(), NotLeader)
        assert waiting(replicas) == (0, 0, [0, 0])


async def test_a_batch_of_which_one_group_is_led_elsewhere_is_refused_whole() -> None:
    async with Cluster(3) as cluster:
        replicas = await lead_both(cluster)
        other = cluster.others(cluster.leader)[0]
        replicas.transfer(1, other.node_id)
        await cluster.until(lambda: other.replicas is not None and other.replicas.leads(1))
        with pytest.raises(NotLeader) as refused:
            replicas.propose_many(creates(range(20)))
        assert refused.value.leader == other.node_id and waiting(replicas) == (0, 0, [0, 0])


async def test_an_office_that_ends_fails_what_waits_and_forgets_its_count() -> None:
    async with Cluster(3) as cluster:
        old, replicas = cluster.leader, cluster.replicas
        cluster.isolate(old)
        old.stalled_ms = 5_000
        replicas.propose(GROUP, a_create(1_000))
        await cluster.advance(1)
        batch = replicas.propose_many([(GROUP, a_create(number)) for number in range(100)])
        await cluster.until(batch.future.done, ms_max=4_000)
        assert isinstance(batch.future.exception(), NotLeader) and waiting(replicas) == (0, 0, [0, 0])
        assert jobs_of(old) == set()


async def test_a_node_that_ends_tells_who_waits_for_a_batch() -> None:
    async with Cluster(3) as cluster:
        leader, replicas = cluster.leader, cluster.replicas
        cluster.isolate(leader)
        batch = replicas.propose_many([(GROUP, a_create(number)) for number in range(3 * ENTRY_COMMANDS_MAX)])
        await cluster.advance(5)
        await leader.crash(0.0)
        assert isinstance(batch.future.exception(), OutcomeUnknown) and waiting(replicas) == (0, 0, [0, 0])
        with pytest.raises(Unavailable):
            replicas.propose_many(creates(range(20)))


async def test_a_full_inbox_refuses_a_batch_whole_and_takes_ends_and_the_nodes_own() -> None:
    async with Cluster(1) as cluster:
        replicas = cluster.replicas
        await asyncio.sleep(0)
        filler: list[tuple[int, AnyCommand]] = [(GROUP, a_create(number)) for number in range(INBOX_COMMANDS_MAX - 2)]
        batch = replicas.propose_many(filler)
        with pytest.raises(Unavailable):
            replicas.propose_many([(GROUP, a_create(20_000 + number)) for number in range(RUN_COMMANDS_MIN)])
        assert waiting(replicas)[0] == INBOX_COMMANDS_MAX - 2
        ends: list[tuple[int, AnyCommand]] = [(GROUP, Complete(a_create(number).job_id, 1, 1, 1, 0)) for number in range(RUN_COMMANDS_MIN)]
        urgent = replicas.propose_many(ends, urgent=True)
        own = replicas.propose_many([(GROUP, Fire(1))], own=True)
        await cluster.until(lambda: all(each.future.done() for each in (batch, urgent, own)))
        assert waiting(replicas) == (0, 0, [0, 0])


def test_runs_are_of_the_kinds_that_no_lease_guards() -> None:
    assert not {Create, Complete} & set(replicas_module._BY_LEASE)
