"""What a node does with its replica of a group that it is no member of any more: it drops it, once that is proven, and gives no vote.

`cluster_sim` does the same under faults, and demands that no node keeps anything of a group that it left."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from test_raft_replicas import GROUP, Cluster, a_create, jobs_of, staged_rows

from wheelsched.core.settings import StoreSettings
from wheelsched.model import keys
from wheelsched.model.rows import GroupState
from wheelsched.raft import (
    AnyMessage,
    Append,
    AppendResponse,
    Configuration,
    Heartbeat,
    InstallSnapshot,
    PreVoteRequest,
    PreVoteResponse,
    RaftConfig,
    VoteRequest,
    VoteResponse,
    make_configuration,
)
from wheelsched.replica.leaving import ASK_MS, is_farewell
from wheelsched.replica.loading import load_member
from wheelsched.replica.raft_member import Left
from wheelsched.replica.raft_settings import ReplicaSettings
from wheelsched.replica.snapshots import state_ranges
from wheelsched.store import Store
from wheelsched.store.memory import MemoryStore
from wheelsched.store.raftlog import HardState, Puts, RaftLog, Ranges
from wheelsched.store.rocks import RocksStore
from wheelsched.testing.cluster_sim import SimNode, SimStore
from wheelsched.testing.simulate_node import quiet_logs

LEAVE_MS = 500
SETTINGS = ReplicaSettings(leave_ms=LEAVE_MS)
SMALL = ReplicaSettings(leave_ms=LEAVE_MS, compact_entries=8, keep_entries=40)
STAGED = ReplicaSettings(leave_ms=LEAVE_MS, small_snapshot_rows=0, copy_rows=7)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    quiet_logs()


def log_rows(store: Store) -> list[tuple[bytes, bytes]]:
    prefix = keys.group_prefix(GROUP)
    return store.scan(keys.RAFT_LOG, prefix, keys.prefix_end(prefix), 1_000)


def is_blank(node: SimNode) -> bool:
    return node.replicas is not None and node.member(GROUP).left is not None


async def add(cluster: Cluster, node: SimNode) -> None:
    future = cluster.replicas.add_learner(GROUP, node.node_id)
    await cluster.until(future.done)
    future.result()


async def swap(cluster: Cluster, enter: SimNode, leave: SimNode) -> None:
    """One becomes a voter in place of another."""
    await add(cluster, enter)
    replicas = cluster.replicas
    await cluster.until(lambda: replicas.status(GROUP).peers[enter.node_id].match == replicas.status(GROUP).last_index)
    future = cluster.replicas.promote(GROUP, enter.node_id, in_place_of=leave.node_id)
    await cluster.until(future.done)
    assert leave.node_id not in future.result().members()


@asynccontextmanager
async def left_cluster(settings: ReplicaSettings = SETTINGS) -> AsyncIterator[tuple[Cluster, SimNode]]:
    """Four nodes of which the last took the place of one that has dropped what it had."""
    async with Cluster(4, voters=3, settings=settings) as cluster:
        await cluster.create_many(range(100))
        leaving = cluster.others(cluster.leader)[0]
        await swap(cluster, cluster.nodes[4], leaving)
        await cluster.until(lambda: is_blank(leaving))
        yield cluster, leaving


class Sent:
    """What one node sends from now on."""

    def __init__(self, cluster: Cluster, node: SimNode, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: list[AnyMessage] = []
        send = cluster.network.send

        def record(sender: int, to: int, messages: Sequence[tuple[int, AnyMessage]]) -> None:
            if sender == node.node_id:
                self.messages += [message for group, message in messages if group == GROUP]
            send(sender, to, messages)

        monkeypatch.setattr(cluster.network, "send", record)


# ---- rows and log go, term and vote stay


async def test_a_node_that_was_replaced_in_a_group_drops_rows_and_log_and_keeps_term_and_vote() -> None:
    async with Cluster(4, voters=3, settings=SETTINGS) as cluster:
        await cluster.create_many(range(100))
        leaving, newcomer = cluster.others(cluster.leader)[0], cluster.nodes[4]
        other_group = leaving.digest(1)
        raft = leaving.member(GROUP).raft
        promised = (raft.term, raft.vote)
        await swap(cluster, newcomer, leaving)
        assert leaving.rows(GROUP), "not before its time: it might be taken back"
        await cluster.until(lambda: is_blank(leaving), ms_max=LEAVE_MS + 4_000)
        for _ in range(2):
            member = leaving.member(GROUP)
            assert leaving.rows(GROUP) == [] == log_rows(leaving.store) == staged_rows(leaving.store)
            assert member.state == GroupState() and member.raft.configuration == Configuration() and member.raft.log.last_index == 0
            assert (member.raft.term, member.raft.vote) == promised
            assert leaving.digest(1) == other_group, "the other group is as it was"
            await leaving.crash(0.0)
            cluster._restart(leaving)
            await cluster.advance(2_000)
        await cluster.create(200)
        assert 200 in jobs_of(newcomer) and jobs_of(leaving) == set()


async def test_nothing_is_dropped_by_a_member() -> None:
    """Neither by one that is cut off, nor by a learner, nor by a leader nobody answers, however long it lasts."""
    async with Cluster(4, voters=3, settings=SETTINGS) as cluster:
        await add(cluster, cluster.nodes[4])
        await cluster.create_many(range(50))
        await cluster.advance(500)
        for node in (cluster.leader, cluster.nodes[4]):
            cluster.isolate(node)
            await cluster.advance(2 * ASK_MS + 5_000)
            assert not is_blank(node) and jobs_of(node) == set(range(50))
            cluster.network.heal()
            await cluster.advance(2_000)


async def test_a_crash_after_any_write_leaves_the_whole_replica_or_none_of_it() -> None:
    """The disk keeps a prefix of what was written, as long as each possible one."""
    async with Cluster(4, voters=3, settings=SETTINGS) as cluster:
        await cluster.create_many(range(20))
        leaving = cluster.others(cluster.leader)[0]
        images = []

        class Recording(SimStore):
            def write(self, puts: Any, ranges: Any = ()) -> None:
                super().write(puts, ranges)
                images.append(self._image())

        leaving.store.__class__ = Recording
        await swap(cluster, cluster.nodes[4], leaving)
        await cluster.until(lambda: is_blank(leaving))
        await cluster.create(40)
        await leaving.crash(1.0)
        blank = 0
        for image in images[-12:]:
            store = SimStore(cluster.world, leaving.node_id, lambda: 1)
            store._families = {family: rows.snapshot() for family, rows in image.items()}
            store._synced = store._image()
            leaving.store = store
            cluster._restart(leaving)
            assert leaving.replicas is not None
            if is_blank(leaving):
                blank += 1
                assert leaving.rows(GROUP) == [] == log_rows(store)
            else:
                assert jobs_of(leaving) == set(range(20)) and log_rows(store)
                await cluster.until(lambda: is_blank(leaving))
            await leaving.crash(1.0)
        assert 0 < blank < 12, "both were among them"
        cluster._restart(leaving)


# ---- how it hears


async def test_a_node_that_was_away_while_it_was_replaced_hears_so_when_it_asks_for_votes() -> None:
    async with Cluster(4, voters=3, settings=SETTINGS) as cluster:
        await cluster.create_many(range(20))
        leaving = cluster.others(cluster.leader)[0]
        cluster.isolate(leaving)
        await swap(cluster, cluster.nodes[4], leaving)
        await cluster.create(30)
        await cluster.advance(5_000)
        assert jobs_of(leaving) == set(range(20))
        leader, term = cluster.leader, cluster.leader.member(GROUP).raft.term
        cluster.network.heal()
        await cluster.until(lambda: is_blank(leaving), ms_max=5_000)
        assert cluster.leader is leader and leader.member(GROUP).raft.term == term, "nobody was disturbed"


async def test_one_whose_whole_configuration_left_meanwhile_hears_it_from_those_that_left() -> None:
    settings = ReplicaSettings(leave_ms=LEAVE_MS, voters_min=1)
    async with Cluster(4, voters=2, settings=settings) as cluster:
        await cluster.create_many(range(20))
        away = cluster.others(cluster.leader)[0] if cluster.leader.node_id == 1 else cluster.nodes[1]
        other = cluster.leader
        assert {away.node_id, other.node_id} == {1, 2}
        await add(cluster, cluster.nodes[3])
        await cluster.advance(500)
        future = cluster.replicas.promote(GROUP, 3)
        await cluster.until(future.done)
        cluster.isolate(away)
        for enter, leave in ((cluster.nodes[4], away), (None, other)):
            if cluster.leader is leave:
                cluster.replicas.transfer(GROUP, 3)
                await cluster.until(lambda: cluster.nodes[3].replicas.leads(GROUP))  # type: ignore[union-attr]
            if enter is not None:
                await swap(cluster, enter, leave)
            else:
                future = cluster.replicas.remove(GROUP, leave.node_id)
                await cluster.until(future.done)
        await cluster.until(lambda: is_blank(other))
        cluster.network.heal()
        for node in (3, 4):
            cluster.network.cut |= {(away.node_id, node), (node, away.node_id)}
        await cluster.until(lambda: is_blank(away), ms_max=5_000)


async def test_a_learner_that_was_taken_out_while_it_was_away_asks() -> None:
    async with Cluster(4, voters=3, settings=SETTINGS) as cluster:
        learner = cluster.nodes[4]
        await add(cluster, learner)
        await cluster.create_many(range(20))
        await cluster.until(lambda: len(jobs_of(learner)) == 20)
        cluster.isolate(learner)
        future = cluster.replicas.remove(GROUP, 4)
        await cluster.until(future.done)
        await cluster.advance(2_000)
        cluster.network.heal()
        term = cluster.leader.member(GROUP).raft.term
        await cluster.until(lambda: is_blank(learner), ms_max=2 * ASK_MS)
        assert cluster.leader.member(GROUP).raft.term == term


async def test_a_leader_that_was_removed_with_entries_nobody_else_has_drops_them_too() -> None:
    """Its log ends behind everything that was ever committed; that what lies there is lost shows in the entries before."""
    async with Cluster(4, voters=3, settings=SETTINGS) as cluster:
        old = cluster.leader
        await cluster.create_many(range(20))
        await add(cluster, cluster.nodes[4])
        await cluster.advance(500)
        replicas = cluster.replicas
        cluster.isolate(old)
        batches = []
        for number in range(100, 140):
            batches.append(replicas.propose(GROUP, a_create(number)))
            await cluster.advance(5)
        await cluster.until(lambda: not replicas.leads(GROUP))
        await cluster.until(lambda: any(node.replicas and node.replicas.leads(GROUP) for node in cluster.others(old)))
        future = cluster.replicas.promote(GROUP, 4, in_place_of=old.node_id)
        await cluster.until(future.done)
        assert old.member(GROUP).raft.log.last_index > cluster.leader.member(GROUP).raft.log.last_index
        cluster.network.heal()
        await cluster.until(lambda: is_blank(old), ms_max=10_000)
        assert all(batch.future.done() for batch in batches)


async def test_a_farewell_of_before_it_came_back_is_no_proof() -> None:
    async with left_cluster() as (cluster, leaving):
        left = leaving.member(GROUP).left
        assert left is not None
        await add(cluster, leaving)
        await cluster.until(lambda: jobs_of(leaving) == set(range(100)))
        late = InstallSnapshot(GROUP, 4, leaving.node_id, 1, left.index, left.term, left.configuration)
        assert is_farewell(late) and leaving.replicas is not None
        leaving.replicas.on_messages(4, [(GROUP, late)])
        await cluster.advance(5_000)
        assert not is_blank(leaving) and jobs_of(leaving) == set(range(100))


@pytest.mark.parametrize(
    "conf", [make_configuration(), make_configuration([1, 2, 3]), make_configuration([4, 5], outgoing=[5], auto_leave=True)],
    ids=["nobody", "with it", "joint"],
)  # fmt: skip
def test_what_is_no_farewell_proves_nothing(conf: Configuration) -> None:
    assert not is_farewell(InstallSnapshot(GROUP, 4, 2, 1, 99, 1, conf))


# ---- what it says afterwards


async def test_it_gives_no_vote_and_tells_who_counts_on_it_what_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that lags and still has it among its voters must not win by it: its log is blank, and would find everybody's good."""
    async with left_cluster() as (cluster, leaving):
        left, replicas = leaving.member(GROUP).left, leaving.replicas
        assert left is not None and replicas is not None
        member = left.configuration.voters[0]
        sent = Sent(cluster, leaving, monkeypatch)
        for term in (leaving.member(GROUP).raft.term, 50):
            for node in range(1, 5):
                if node != leaving.node_id:
                    replicas.on_messages(node, [(GROUP, VoteRequest(GROUP, node, leaving.node_id, term, 10_000, term))])
        await cluster.advance(20)
        assert not [message for message in sent.messages if isinstance(message, VoteResponse)]
        assert leaving.member(GROUP).raft.term < 50
        replicas.on_messages(member, [(GROUP, PreVoteRequest(GROUP, member, leaving.node_id, 60, 5, 1))])
        await cluster.advance(20)
        assert sent.messages == [PreVoteResponse(GROUP, leaving.node_id, member, 59, True, left.index, left.term)]


async def test_a_group_whose_survivors_do_not_know_that_it_left_can_elect() -> None:
    """The leader that went knew that its going was committed, and nobody else: they still need a vote of the old half, whose other member
    is dead. What the one that left tells them is all they need."""
    async with Cluster(4, voters=3, settings=SETTINGS) as cluster:
        old = cluster.leader
        await cluster.create_many(range(20))
        await add(cluster, cluster.nodes[4])
        await cluster.advance(500)
        dead, *alive = cluster.others(old)
        cluster.replicas.promote(GROUP, 4, in_place_of=old.node_id)
        raft = old.member(GROUP).raft
        await cluster.advance(1_000, until=lambda: raft.configuration.is_joint)
        await dead.crash(1.0)
        # The entry that ends the joint configuration arrives everywhere; that it is committed is heard nowhere.
        await cluster.advance(1_000, until=lambda: all(node.member(GROUP).raft.log.last_index == raft.log.last_index for node in alive))
        last = raft.log.last_index
        cluster.network.cut |= {(old.node_id, node.node_id) for node in alive}
        await cluster.advance(1_000, until=lambda: not raft.configuration.is_joint)
        cluster.isolate(old)
        await cluster.until(lambda: is_blank(old))
        assert old.member(GROUP).left.index == last  # type: ignore[union-attr]
        for node in alive:
            assert node.member(GROUP).raft.configuration.is_joint and node.member(GROUP).raft.commit < last
        cluster.network.heal()
        await cluster.until(lambda: any(node.replicas and node.replicas.leads(GROUP) for node in alive), ms_max=10_000)
        await cluster.create(50)


async def test_a_leader_that_has_not_heard_yet_does_it_no_harm() -> None:
    """Its heartbeats would have committed what is no longer here; its snapshots are of before."""
    async with left_cluster() as (cluster, leaving):
        member, replicas, leader = leaving.member(GROUP), leaving.replicas, cluster.leader.node_id
        assert member.left is not None and replicas is not None
        term, index = member.raft.term, member.left.index
        replicas.on_messages(leader, [(GROUP, Heartbeat(GROUP, leader, leaving.node_id, term, index, 0))])
        replicas.on_messages(leader, [(GROUP, Append(GROUP, leader, leaving.node_id, term, index, term, (), index))])
        await cluster.advance(50)
        assert is_blank(leaving) and member.raft.commit == 0


# ---- coming back


@pytest.mark.parametrize("settings", [SETTINGS, STAGED], ids=["small", "staged"])
async def test_a_node_that_is_taken_back_gets_a_snapshot_and_votes_again(settings: ReplicaSettings) -> None:
    async with left_cluster(settings) as (cluster, leaving):
        term = leaving.member(GROUP).raft.term
        for number in range(200, 220):
            await cluster.create(number)
        await swap(cluster, leaving, cluster.nodes[4])
        assert not is_blank(leaving) and leaving.member(GROUP).raft.term >= term
        await cluster.until(lambda: is_blank(cluster.nodes[4]))
        assert leaving.digest(GROUP) == cluster.leader.digest(GROUP)
        await leaving.crash(0.0)
        cluster._restart(leaving)
        await cluster.advance(1_000)
        assert not is_blank(leaving)
        # Of the three voters another one goes: without the vote of the one that came back nobody could be elected.
        gone = cluster.leader
        await gone.crash(1.0)
        await cluster.until(lambda: any(node.replicas and node.replicas.leads(GROUP) for node in cluster.others(gone)))
        await cluster.create(300)


async def test_an_acknowledgement_of_before_that_comes_late_does_not_keep_it_from_the_snapshot() -> None:
    async with left_cluster() as (cluster, leaving):
        cluster.isolate(leaving)
        await add(cluster, leaving)
        raft = cluster.leader.member(GROUP).raft
        late = AppendResponse(GROUP, leaving.node_id, cluster.leader.node_id, raft.term, raft.commit)
        cluster.replicas.on_messages(leaving.node_id, [(GROUP, late)])
        await cluster.advance(100)
        assert cluster.replicas.status(GROUP).peers[leaving.node_id].match == raft.commit
        cluster.network.heal()
        await cluster.create(500)
        await cluster.until(lambda: 500 in jobs_of(leaving), ms_max=5_000)
        assert leaving.digest(GROUP) == cluster.leader.digest(GROUP)


async def test_one_that_is_taken_back_in_time_goes_on_from_its_log() -> None:
    async with Cluster(4, voters=3, settings=ReplicaSettings(leave_ms=60_000)) as cluster:
        await cluster.create_many(range(20))
        leaving = cluster.others(cluster.leader)[0]
        await swap(cluster, cluster.nodes[4], leaving)
        await cluster.advance(5_000)
        snapshots = cluster.counts.get("snapshots", 0)
        await add(cluster, leaving)
        await cluster.create(30)
        await cluster.until(lambda: 30 in jobs_of(leaving))
        assert cluster.counts.get("snapshots", 0) == snapshots
        await cluster.advance(70_000)
        assert not is_blank(leaving)


# ---- on RocksDB


@pytest.mark.blocking_allowed
@pytest.mark.parametrize("group", [3, keys.META_GROUP])
def test_a_database_without_the_group_opens_again_and_has_all_others(tmp_path: Path, group: int) -> None:
    """A range the wrong way round would end the recovery of the log there; the last group's range has no end."""
    settings = StoreSettings(free_bytes_min=0, free_bytes_stop=0)
    groups = (2, 3, 4, keys.META_GROUP)
    store = RocksStore(tmp_path, settings)
    raft_log = RaftLog(store, groups)
    for each in groups:
        rows = {keys.group_prefix(each) + b"%05d" % number: b"row" for number in range(1_000)}
        store.write({family: dict(rows) for family in keys.STATE_FAMILIES})
    puts: Puts = {}
    raft_log.add_hard_state(puts, group, HardState(7, 5, 10))
    store.write(puts)
    puts = {}
    ranges: Ranges = state_ranges(group)
    left = Left(40, 6, make_configuration([1, 2]))
    raft_log.leave(puts, ranges, group, HardState(8, 6, 0), Configuration().encode(), left.encode())
    store.write(puts, ranges)
    store.write({keys.RAFT_META: {b"behind": b"it"}})
    store.close()
    store = RocksStore(tmp_path, settings)
    try:
        assert store.get(keys.RAFT_META, b"behind") == b"it"
        raft_log = RaftLog(store, groups)
        for each in groups:
            for family in keys.STATE_FAMILIES:
                prefix = keys.group_prefix(each)
                assert len(store.scan(family, prefix, keys.prefix_end(prefix), 2_000)) == (0 if each == group else 1_000)
        member = load_member(
            store, raft_log, group, 1, ReplicaSettings(), random.Random(1), lambda _group: make_configuration([1, 2, 3])
        )  # fmt: skip
        assert member.left == left and member.raft.configuration == Configuration()
        assert (member.raft.term, member.raft.vote, member.raft.log.last_index, member.state.applied_index) == (8, 6, 0, 0)
    finally:
        store.close()


def test_a_vote_is_not_forgotten_on_leaving() -> None:
    store = MemoryStore()
    raft_log = RaftLog(store, (GROUP,))
    puts: Puts = {}
    raft_log.add_hard_state(puts, GROUP, HardState(7, 5, 10))
    store.write(puts)
    for forgotten in (HardState(6, 5, 0), HardState(7, 0, 0), HardState(7, 4, 0), HardState(7, 5, 10)):
        with pytest.raises(AssertionError, match="vote_is_never_forgotten"):
            raft_log.leave({}, [], GROUP, forgotten, b"", b"")


def test_the_default_is_to_wait_a_minute() -> None:
    assert ReplicaSettings().leave_ms == 60_000 and ReplicaSettings().raft == RaftConfig()
