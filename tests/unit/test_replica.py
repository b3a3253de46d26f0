"""The loop between log, disk and state: what is acknowledged is durable, and each entry is applied exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from wheelsched.core.errors import OutcomeUnknown, Unavailable
from wheelsched.core.limits import ENTRY_COMMANDS_MAX, INBOX_COMMANDS_MAX
from wheelsched.model import keys
from wheelsched.model.commands import Create, Fire
from wheelsched.model.effects import Effect, JobChanged, JobsCreated
from wheelsched.model.rows import JobSpec, encode_spec
from wheelsched.replica import Replicas
from wheelsched.runtime.clock import VirtualClock
from wheelsched.store.memory import MemoryStore
from wheelsched.store.raftlog import RaftLog
from wheelsched.testing import START_MS, SteppedClock, TestNode, open_test_node
from wheelsched.testing.checks import check_rows


class GatedStore(MemoryStore):
    """A store whose syncs wait until they are let through."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()

    async def sync(self) -> None:
        await self.gate.wait()
        await super().sync()


class Group:
    """Replicas of one group over a store, with what they told."""

    def __init__(self, store: MemoryStore, clock: VirtualClock) -> None:
        self.effects: list[Effect] = []
        self.replicas = Replicas(store, RaftLog(store, (0,)), clock, (0,), on_effects=self._take)

    def _take(self, group: int, effects: Sequence[Effect]) -> None:
        self.effects += effects

    @property
    def created(self) -> list[bytes]:
        states = []
        for effect in self.effects:
            if isinstance(effect, JobsCreated):
                states += effect.states
            elif isinstance(effect, JobChanged) and effect.after:
                states.append(effect.after)
        return [state.job_id for state in states]


def a_create(number: int, *, delay_ms: int = 0) -> Create:
    job_id = number.to_bytes(14, "big") + b"\0\0"
    return Create(job_id, "t", "q", 1, -1, delay_ms, 0, 0, encode_spec(JobSpec(0)), b"null")


async def test_nothing_is_applied_or_answered_before_it_is_durable() -> None:
    store = GatedStore()
    group = Group(store, VirtualClock(START_MS))
    running = asyncio.ensure_future(group.replicas.run())
    store.gate.clear()
    batch = group.replicas.propose(0, a_create(1))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not batch.future.done() and group.effects == [] and store.scan(keys.STATE, b"", b"", 10) == []
    store.gate.set()
    (reply,) = await batch.future
    assert reply.state is not None and group.created == [reply.state.job_id]
    group.replicas.stop()
    await running


async def test_what_arrives_during_a_sync_is_the_next_entry() -> None:
    """Group commit: load makes entries larger, not turns more frequent."""
    store = GatedStore()
    group = Group(store, VirtualClock(START_MS))
    running = asyncio.ensure_future(group.replicas.run())
    store.gate.clear()
    batches = [group.replicas.propose(0, a_create(1))]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    batches += [group.replicas.propose(0, a_create(number)) for number in range(2, 60)]
    store.gate.set()
    await asyncio.gather(*(batch.future for batch in batches))
    assert group.replicas.entry_count == 2
    assert group.created == [a_create(number).job_id for number in range(1, 60)]
    group.replicas.stop()
    await running


async def test_a_large_batch_is_cut_into_entries_and_answered_in_order() -> None:
    store = MemoryStore()
    group = Group(store, VirtualClock(START_MS))
    running = asyncio.ensure_future(group.replicas.run())
    count = 3 * ENTRY_COMMANDS_MAX + 1
    replies = await group.replicas.propose_many([(0, a_create(number)) for number in range(count)]).future
    assert [reply.state.job_id for reply in replies if reply.state] == [a_create(number).job_id for number in range(count)]
    assert group.replicas.entry_count == 4
    group.replicas.stop()
    await running


@pytest.mark.parametrize("keep", [0.0, 0.25, 0.5, 0.75, 1.0])
async def test_a_crash_between_the_log_and_the_state_applies_each_entry_exactly_once(keep: float) -> None:
    """The rows of the last turns are never synced when the crash comes; the log is. Recovery goes on from the applied index."""
    store, clock = MemoryStore(), VirtualClock(START_MS)
    group = Group(store, clock)
    running = asyncio.ensure_future(group.replicas.run())
    answered = 0
    for number in range(7):
        await group.replicas.propose(0, a_create(number)).future
        answered += 1
    under_way = [group.replicas.propose(0, a_create(100 + number)) for number in range(3)]
    await asyncio.sleep(0)
    left = store.crash(keep)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    group.replicas.abort()
    for batch in under_way:
        assert isinstance(batch.future.exception(), OutcomeUnknown)
    again = Group(left, clock)
    again.replicas.recover()
    states = check_rows(left, 1)
    assert {a_create(number).job_id for number in range(answered)} <= set(states)
    assert all(state.version == 1 for state in states.values())
    third = Group(left, clock)
    assert third.replicas.recover() == 0, "a second start finds nothing left to apply"


async def test_the_applied_index_may_lie_far_behind_the_log() -> None:
    """A log that was written and synced, and never applied."""
    store, clock = MemoryStore(), VirtualClock(START_MS)
    group = Group(store, clock)
    for number in range(5 * ENTRY_COMMANDS_MAX):
        group.replicas.propose(0, a_create(number, delay_ms=number))
    for _ in range(5):
        group.replicas._cut_and_write()
    await store.sync()
    again = Group(store.crash(), clock)
    assert again.replicas.recover() == 5
    assert len(again.created) == 5 * ENTRY_COMMANDS_MAX
    check_rows(again.replicas._store, 1)  # type: ignore[arg-type]


async def test_a_fire_never_passes_the_stamp_of_its_entry() -> None:
    """The clock is set back between the sweep that found what is due and the entry that says so (`never_early`)."""
    clock = SteppedClock(START_MS)
    group = Group(MemoryStore(), clock)
    running = asyncio.ensure_future(group.replicas.run())
    batch = group.replicas.propose(0, Fire(clock.wall_ms()))
    clock.step_wall(ms=-1_000)
    await batch.future
    assert group.replicas.watermark_ms(0) == START_MS - 1_000
    group.replicas.stop()
    await running


async def test_a_full_inbox_refuses_new_work_later_the_ends_of_attempts_and_never_the_nodes_own_timers() -> None:
    group = Group(MemoryStore(), VirtualClock(START_MS))
    group.replicas.propose_many([(0, a_create(number)) for number in range(INBOX_COMMANDS_MAX)])
    with pytest.raises(Unavailable):
        group.replicas.propose(0, a_create(1))
    group.replicas.propose_many([(0, Fire(0))] * (3 * INBOX_COMMANDS_MAX), urgent=True)
    with pytest.raises(Unavailable):
        group.replicas.propose(0, Fire(0), urgent=True)
    group.replicas.propose_many([(0, Fire(0))], own=True)


async def test_a_node_that_ends_tells_all_who_wait_also_those_whose_entry_is_in_the_log() -> None:
    node = TestNode()
    node.store = store = GatedStore()
    await node.open()
    store.gate.clear()
    call = asyncio.ensure_future(node.node.propose(node.command()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    later = asyncio.ensure_future(node.node.propose(node.command()))
    await asyncio.sleep(0)
    await node.crash()
    for waiting in (call, later):
        with pytest.raises(OutcomeUnknown):
            await waiting


async def test_every_acknowledged_job_survives_a_crash_at_any_turn() -> None:
    """Creates one after the other, a crash after each possible number of turns of the loop."""
    for turns in range(12):
        async with open_test_node(seed=turns) as node:
            calls = [asyncio.ensure_future(node.create(delay_s=number)) for number in range(6)]
            for _ in range(turns):
                await asyncio.sleep(0)
            acknowledged = [call.result().job_id for call in calls if call.done()]
            await node.crash()
            await asyncio.gather(*calls, return_exceptions=True)
            await node.open()
            kept = check_rows(node.store, node.settings.cluster.group_count)
            assert set(acknowledged) <= set(kept)
            await node.advance(s=10)
            assert len(await node.claim(jobs_max=10)) == len(kept)
