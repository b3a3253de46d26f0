"""What a review of the dispatcher found: work that grew with everything there is, memory that outlived its jobs, a wake-up lost."""

from __future__ import annotations

import asyncio
import random

import pytest

from wheelsched.core.errors import Unavailable
from wheelsched.core.ids import group_of
from wheelsched.dispatch import leases, purging
from wheelsched.dispatch.queues import LATENESS_WINDOW_MS
from wheelsched.dispatch.timers import Due, Special, Timers
from wheelsched.model import keys
from wheelsched.model.commands import AnyCommand
from wheelsched.model.rows import KIND_HELD, KIND_JOB, KIND_NEXT, KIND_RETRY, TIMER, timer_word
from wheelsched.replica import Replicas
from wheelsched.runtime.clock import VirtualClock
from wheelsched.store.heads import RangeHeads
from wheelsched.store.memory import MemoryStore
from wheelsched.store.raftlog import RaftLog
from wheelsched.testing import START_MS, open_test_node
from wheelsched.testing.node import make_settings


async def test_a_waiter_is_served_at_the_new_rate_once_a_slow_one_is_raised() -> None:
    """The old rate allowed the next job in 1,000 s, and the timer that waited for it stood in the way of the new one's."""
    async with open_test_node() as node:
        await node.put_queue(rate_per_s=0.001)
        await node.create()
        waiting = asyncio.ensure_future(node.claim(wait_s=30))
        await node.settle()
        await node.put_queue(rate_per_s=1_000.0)
        await node.advance(ms=5)
        async with asyncio.timeout(5):
            assert len(await waiting) == 1


async def test_only_queues_with_jobs_on_disk_alone_are_looked_at_for_a_refill() -> None:
    """A pass over 100,000 queues took 175 ms, every 20 ms."""
    async with open_test_node(settings=make_settings(ready_queue_max=8)) as node:
        queues = node.node.dispatcher.queues
        await node.create("small")
        await node.create_many([{"queue": "large"}] * 60)
        assert [queue.name for queue in queues.spilled()] == ["large"]
        taken = 0
        while jobs := await node.claim("large", jobs_max=10):
            taken += len(jobs)
            await node.settle()
        assert taken == 60 and queues.spilled() == []


async def test_a_sweep_for_history_lets_others_have_their_turn_where_nothing_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs kept for their Idempotency-Key lie before the end of a retention of no time at all, and each sweep reads all of them."""
    monkeypatch.setattr(purging, "SLICE_JOBS", 5)
    async with open_test_node() as node:
        await node.put_queue(retention_ms=0)
        await node.create_many([{"key": f"key-{number}"} for number in range(200)])
        while jobs := await node.claim(jobs_max=100):
            await node.together(*(node.complete(job) for job in jobs))
        await node.advance(s=1)
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.ensure_future(count_turns())
        sweep = node.node.dispatcher.purging
        sweep._next_ms = 0
        assert await sweep.turn() == 0
        counting.cancel()
        assert turns >= 200 // 5


@pytest.mark.parametrize("seed", range(20))
def test_special_timers_are_told_from_plain_ones_wherever_they_stand_in_a_batch(seed: int) -> None:
    rng = random.Random(seed)
    timers = Timers(1, 0)
    records, plain, occurrences, held = b"", b"", b"", []
    for low in range(rng.randrange(40)):
        kind = rng.choice((KIND_JOB, KIND_JOB, KIND_RETRY, KIND_HELD, KIND_NEXT))
        # Bytes of 1 and 0 all over, so that a search by bytes that is off by some would show.
        word = timer_word(rng.choice((0, 1, 0x010101)), rng.randrange(3), kind)
        record = TIMER.pack(1 << rng.randrange(40), low, 7, word)
        records += record
        if kind == KIND_JOB:
            plain += record
        elif kind == KIND_NEXT:
            occurrences += record
        elif rng.random() < 0.7:
            special = Special(bytes(16), rng.choice((7, 7, 8)), 1_000 + low, 0, None, False)  # type: ignore[arg-type]
            timers._special[0][low] = special
            if special.version == 7 and kind == KIND_HELD:
                held.append(special)
            elif special.version == 7:
                plain += TIMER.pack(special.fire_at_ms, low, 7, word & ~7)
    timers._special[0].setdefault(1_000, Special(bytes(16), 1, 0, 0, None, False))  # type: ignore[arg-type]
    due = timers._resolve(0, records)
    assert due == Due(0, 0, plain, held, occurrences)


async def test_rows_that_moved_to_another_time_count_as_gone_from_where_they_were() -> None:
    """Else a queue whose jobs are put off again and again never gets a new head, and scans run over all that ever stood there."""
    async with open_test_node() as node:
        heads = node.node._heads
        heads._trim_deletions = 5
        jobs = [await node.create(delay_s=10) for _ in range(100)]
        for job in jobs:
            await node.update(job, delay_s=200)
        ranges = heads.trim(1_000)
        assert {family for family, _, _ in ranges} == {keys.JOBS, keys.INDEX}
        node.store.write({}, ranges)
        assert len(await node.list_jobs("default")) == 100
        await node.advance(s=200)
        assert len(await node.claim(jobs_max=100)) == 100


async def test_attempts_that_ended_do_not_pile_up_behind_a_long_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "OUTDATED_MAX", 10)
    async with open_test_node() as node:
        await node.create()
        (slow,) = await node.claim(lease_s=60)
        heap = node.node.dispatcher.leases._heap
        for _ in range(5):
            await node.create_many([{}] * 20)
            for job in await node.claim(jobs_max=20, lease_s=3_600):
                await node.complete(job)
            heap = node.node.dispatcher.leases._heap
            assert len(heap) <= 10 + 2
        await node.advance(s=60)
        assert await node.status(slow) == "RETRYING"


async def test_heartbeats_of_changing_length_leave_one_entry_of_their_lease() -> None:
    """Each shorter one added an entry, and each entry added itself again when it came due and the lease had been extended."""
    async with open_test_node() as node:
        await node.create(timeout_s=600)
        (claimed,) = await node.claim(lease_s=40)
        for _ in range(20):
            await node.heartbeat(claimed, lease_s=5)
            await node.heartbeat(claimed, lease_s=40)
            await node.advance(ms=100)
        await node.advance(s=39)
        assert await node.status(claimed) == "RUNNING" and len(node.node.dispatcher.leases._heap) == 1
        await node.advance(s=1)
        assert await node.status(claimed) == "RETRYING"


async def test_nothing_is_taken_by_replicas_that_have_ended() -> None:
    """Their loop is gone: whoever was let in would wait for ever."""
    store = MemoryStore()
    replicas = Replicas(store, RaftLog(store, (0,)), VirtualClock(START_MS), (0,), on_effects=lambda _group, _effects: None)
    replicas.abort()
    with pytest.raises(Unavailable):
        replicas.propose_many(())


async def test_lateness_is_remembered_for_its_window_only() -> None:
    async with open_test_node() as node:
        for _ in range(3):
            await node.create()
            for job in await node.claim():
                await node.complete(job)
        queue = node.node.dispatcher.queues.ensure("default", "default")
        assert len(queue.lateness) == 3
        await node.advance(ms=LATENESS_WINDOW_MS + 1)
        await node.create()
        await node.claim()
        assert len(queue.lateness) == 1


async def test_the_start_deadline_of_a_job_that_started_is_forgotten_and_proposes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each was kept until it passed, be it a year, and then went through the log in vain."""
    monkeypatch.setattr(leases, "OUTDATED_MAX", 10)
    async with open_test_node() as node:
        late, moved = [await node.create(start_deadline_s=60) for _ in range(2)], await node.create(delay_s=30, start_deadline_s=60)
        await node.update(moved, delay_s=50)
        for _ in range(5):
            await node.create_many([{"queue": "busy", "start_deadline_s": 3_600}] * 20)
            await node.together(*(node.complete(job) for job in await node.claim("busy", jobs_max=20)))
        assert len(node.node.dispatcher.leases._starts) <= 2 * 3 + 10
        (released,) = await node.claim()
        await node.release(released)
        await node.advance(s=61)
        assert [await node.status(job) for job in late] == ["SKIPPED", "SKIPPED"]
        assert await node.status(moved) == "QUEUED"
        entries = node.node.status()["log"]["entries"]
        await node.advance(s=3_600)
        assert await node.status(moved) == "SKIPPED"
        assert node.node.status()["log"]["entries"] == entries + 1


async def test_a_fire_goes_before_what_waits_in_the_inbox_of_its_group() -> None:
    """A flood into one group would hold up the firing of all, for a sweep ends when its last Fire is applied."""
    async with open_test_node() as node:
        due = await node.create(delay_s=1)
        group = group_of(due.job_id, node.settings.cluster.group_count)
        flood: list[AnyCommand] = []
        while len(flood) < 1_000:
            command = node.command(delay_s=100)
            if group_of(command.job_id, node.settings.cluster.group_count) == group:
                flood.append(command)
        flooding = asyncio.ensure_future(node.node.propose_many(flood))
        await asyncio.sleep(0)
        node.clock.advance(ms=1_000)
        await node.node.dispatcher.firing.turn()
        assert not flooding.done() and await node.status(due) == "QUEUED"
        assert len(await flooding) == 1_000


def test_the_head_of_a_busy_range_outlives_those_of_many_idle_ones() -> None:
    """Each end notes one of few `jobs` ranges and one of more `index` ranges than there is room for."""
    heads = RangeHeads(MemoryStore(), trim_deletions=1_000, prefixes_max=100)
    for number in range(1_000):
        heads.note_deleted(keys.JOBS, b"\0\0\0")
        heads.note_deleted(keys.INDEX, b"%04d" % number)
    assert list(heads._due) == [(keys.JOBS, b"\0\0\0")] and len(heads._heads) == 100
