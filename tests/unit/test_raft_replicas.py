"""The driver of Raft groups: what leaves when, what is answered how, and what a crash at any write leaves behind.

Nodes are driven as in the cluster simulator, on its clock and network, but by hand: each test says what happens.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from wheelsched.core.errors import InvalidRequest, NotLeader, OutcomeUnknown, Unavailable
from wheelsched.core.limits import ENTRY_COMMANDS_MAX
from wheelsched.core.settings import StoreSettings
from wheelsched.model import keys
from wheelsched.model.commands import Claim, Create, Fire, Reply
from wheelsched.model.rows import GroupState, JobSpec, encode_spec
from wheelsched.raft import (
    AnyMessage,
    Append,
    Change,
    ChangeKind,
    Entry,
    EntryKind,
    Heartbeat,
    HeartbeatResponse,
    InstallSnapshot,
    PeerState,
    RaftConfig,
    make_configuration,
    make_entry,
)
from wheelsched.replica import Replicas
from wheelsched.replica import snapshots as snapshots_module
from wheelsched.replica.membership import CAUGHT_UP_ENTRIES, check_change
from wheelsched.replica.raft_member import BandedTimeouts
from wheelsched.replica.raft_replicas import RaftReplicas
from wheelsched.replica.raft_settings import ReplicaSettings
from wheelsched.replica.snapshots import IncomingSnapshot, SnapshotRefused, SnapshotView
from wheelsched.runtime.clock import RealClock, VirtualClock
from wheelsched.store.memory import MemoryStore
from wheelsched.store.memory import _apply as apply_batch
from wheelsched.store.raftlog import RaftLog
from wheelsched.store.rocks import RocksStore
from wheelsched.testing.cluster_sim import Profile, SimNode, SimStore, Simulation
from wheelsched.testing.simulate_node import quiet_logs

GROUP = 0


@pytest.fixture(autouse=True)
def _quiet() -> None:
    quiet_logs()


def a_create(number: int, *, delay_ms: int = 3_600_000, payload: bytes = b"null") -> Create:
    job_id = number.to_bytes(14, "big") + b"\0\0"
    return Create(job_id, "t", "q", 1, -1, delay_ms, 0, 0, encode_spec(JobSpec(0)), payload)


class Cluster(Simulation):
    """Nodes without chance: nothing is lost or late unless a test says so."""

    def __init__(
        self, nodes: int = 3, *, voters: int | None = None, settings: ReplicaSettings | None = None, seed: int = 1,
        replicas_type: type[RaftReplicas] = RaftReplicas,
    ) -> None:  # fmt: skip
        super().__init__(seed, replicas_type=replicas_type)
        voters = nodes if voters is None else voters
        self.profile = Profile(
            nodes=nodes, voters=voters, settings=settings or ReplicaSettings(voters_min=min(voters, 3)), loss=0.0, duplication=0.0,
            delay_ms=1, in_order=True, partitions=0.0, holds_cut=False, crashes=0.0, torn=False, pauses=0.0, clock_steps=0.0,
            clock_rates=(1.0,) * nodes, sync_ms=(1,) * nodes, transfers=0.0, churn=0.0, pace_ms=1,
        )  # fmt: skip

    async def open(self) -> Cluster:
        for node_id in range(1, self.profile.nodes + 1):
            node = self.nodes[node_id] = SimNode(self, node_id, 1.0)
            node.start()
        await self.advance(3_000)
        return self

    async def __aenter__(self) -> Cluster:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    @property
    def leader(self) -> SimNode:
        (leader,) = [node for node in self.nodes.values() if node.replicas is not None and node.replicas.leads(GROUP)]
        return leader

    @property
    def replicas(self) -> RaftReplicas:
        """Of the leader."""
        assert self.leader.replicas is not None
        return self.leader.replicas

    def others(self, node: SimNode) -> list[SimNode]:
        return [other for other in self.nodes.values() if other is not node]

    def isolate(self, node: SimNode) -> None:
        for other in self.others(node):
            self.network.cut |= {(node.node_id, other.node_id), (other.node_id, node.node_id)}

    async def until(self, condition: Callable[[], object], *, ms_max: int = 20_000) -> None:
        until_ms = self.world.now_ms + ms_max
        while not condition():
            assert self.world.now_ms < until_ms, "it did not come to pass"
            await self.advance(10)

    async def create(self, number: int, **options: Any) -> Reply:
        batch = self.replicas.propose(GROUP, a_create(number, **options))
        await self.until(batch.future.done)
        return batch.future.result()[0]

    async def create_many(self, numbers: Sequence[int], **options: Any) -> None:
        batch = self.replicas.propose_many([(GROUP, a_create(number, **options)) for number in numbers])
        await self.until(batch.future.done)
        assert len(batch.future.result()) == len(numbers)

    def applied(self) -> set[int]:
        return {node.member(GROUP).state.applied_index for node in self.nodes.values() if node.replicas is not None}


def jobs_of(node: SimNode) -> set[int]:
    return {int.from_bytes(job_id[:14], "big") for job_id in node.versions(GROUP)}


# ---- a group of one


async def test_a_group_with_one_member_elects_itself_and_answers_after_its_fsync() -> None:
    async with Cluster(1) as cluster:
        node = cluster.leader
        assert node.replicas is not None and node.replicas.leader_of(GROUP) == 1
        node.stalled_ms = 500
        batch = node.replicas.propose(GROUP, a_create(1))
        await cluster.advance(400)
        assert not batch.future.done() and jobs_of(node) == set()
        await cluster.advance(200)
        assert batch.future.done() and jobs_of(node) == {1}
        await node.replicas.read_barrier(GROUP)


async def test_a_node_alone_leads_again_right_after_a_restart_and_has_everything() -> None:
    """No silence after a restart where nobody was promised anything, and no lease to wait for."""
    async with Cluster(1) as cluster:
        await cluster.create_many(range(300))
        for keep in (0.0, 0.5, 1.0):
            await cluster.leader.crash(keep)
            cluster._restart(cluster.nodes[1])
            await cluster.advance(20)
            assert jobs_of(cluster.leader) == set(range(300))


async def test_a_node_alone_keeps_leading_through_a_long_pause() -> None:
    async with Cluster(1) as cluster:
        cluster.world.paused[1] = []
        await cluster.advance(60_000)
        assert cluster.replicas.leads(GROUP)
        cluster.world.resume(1)
        await cluster.create(1)


async def test_a_log_written_by_a_node_alone_before_there_was_raft_is_taken_over() -> None:
    """Rows of the loop for groups with one member: term 1 throughout, no configuration on record."""
    store = MemoryStore()
    old = Replicas(store, RaftLog(store, (0, 1)), VirtualClock(1_700_000_000_000), (0, 1), on_effects=lambda _group, _effects: None)
    running = asyncio.ensure_future(old.run())
    await old.propose_many([(GROUP, a_create(number)) for number in range(3 * ENTRY_COMMANDS_MAX)]).future
    old.stop()
    await running
    cluster = Cluster(1)
    node = cluster.nodes[1] = SimNode(cluster, 1, 1.0)
    node.store._families = store._families
    node.store._synced = node.store._image()
    node.start()
    await cluster.advance(100)
    assert jobs_of(cluster.leader) == set(range(3 * ENTRY_COMMANDS_MAX))
    await cluster.create(1_000)
    await cluster._close()


# ---- replication


async def test_what_is_answered_is_on_a_majority_and_soon_everywhere() -> None:
    async with Cluster(3) as cluster:
        await cluster.create_many(range(200))
        await cluster.advance(300)
        assert len(cluster.applied()) == 1
        for node in cluster.nodes.values():
            assert jobs_of(node) == set(range(200))
            assert node.digest(GROUP) == cluster.leader.digest(GROUP)


async def test_nothing_is_answered_without_a_majority() -> None:
    async with Cluster(3) as cluster:
        leader = cluster.leader
        cluster.isolate(leader)
        batch = cluster.replicas.propose(GROUP, a_create(1))
        await cluster.advance(300)
        assert not batch.future.done() and jobs_of(leader) == set()


async def test_votes_and_acknowledgements_leave_after_the_fsync_and_appends_before_it() -> None:
    """The network checks each acknowledgement against the sender's disk; here the follower's fsync takes half a second."""
    async with Cluster(3) as cluster:
        leader = cluster.leader
        for node in cluster.others(leader):
            node.stalled_ms = 300
        leader.stalled_ms = 300
        start_ms = cluster.world.now_ms
        await cluster.create(1)
        # Had the leader waited for its own disk first, it were 600.
        assert 290 < cluster.world.now_ms - start_ms < 450


async def test_load_makes_entries_larger_not_more() -> None:
    async with Cluster(1) as cluster:
        replicas = cluster.replicas
        cluster.leader.stalled_ms = 200
        before = replicas.entry_count
        batches = [replicas.propose(GROUP, a_create(0))]
        await cluster.advance(50)
        for number in range(1, 60):
            batches.append(replicas.propose(GROUP, a_create(number)))
            await cluster.advance(1)
        await cluster.until(lambda: all(batch.future.done() for batch in batches))
        assert replicas.entry_count - before == 2


async def test_heartbeats_of_all_groups_to_a_peer_are_one_send(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Cluster(3) as cluster:
        sent: list[tuple[int, list[type[AnyMessage]]]] = []
        leader = cluster.leader
        for group in (0, 1):
            if not cluster.replicas.leads(group):
                (other,) = [node for node in cluster.others(leader) if node.replicas is not None and node.replicas.leads(group)]
                assert other.replicas is not None
                other.replicas.transfer(group, leader.node_id)
        await cluster.until(lambda: cluster.replicas.leads(1))
        await cluster.advance(500)
        send = cluster.network.send

        def record(sender: int, to: int, messages: Sequence[tuple[int, AnyMessage]]) -> None:
            if sender == leader.node_id:
                sent.append((to, [type(message) for _, message in messages]))
            send(sender, to, messages)

        monkeypatch.setattr(cluster.network, "send", record)
        await cluster.advance(1_000)
        assert sent and all(kinds == [Heartbeat, Heartbeat] for _, kinds in sent)
        assert len(sent) == 2 * 10, "one round each 100 ms, which renews the lease as well"


async def test_a_damaged_entry_and_a_message_that_is_not_for_us_are_dropped() -> None:
    async with Cluster(3) as cluster:
        leader = cluster.leader
        follower = cluster.others(leader)[0]
        replicas, raft = follower.replicas, follower.member(GROUP).raft
        assert replicas is not None
        last, term = raft.log.last_index, raft.term
        good = make_entry(GROUP, last + 1, term, EntryKind.EMPTY)
        bad = Entry(good.index, good.term, good.kind, b"other", good.crc)

        def append(entry: Entry, to: int) -> Append:
            return Append(GROUP, leader.node_id, to, term, last, raft.log.last_term, (entry,), last)

        replicas.on_messages(leader.node_id, [(GROUP, append(bad, follower.node_id)), (GROUP, append(good, 99))])
        replicas.on_messages(99, [(GROUP, append(good, follower.node_id))])
        replicas.on_messages(leader.node_id, [(77, append(good, follower.node_id))])
        snapshot = InstallSnapshot(GROUP, leader.node_id, follower.node_id, term, last + 5, term, raft.configuration, 1)
        replicas.on_messages(leader.node_id, [(GROUP, snapshot)])
        assert replicas.dropped_count == 5
        await cluster.advance(1)
        assert raft.log.last_index == last


# ---- proposals that lose


async def test_a_follower_refuses_and_names_the_leader() -> None:
    async with Cluster(3) as cluster:
        leader = cluster.leader
        for follower in cluster.others(leader):
            assert follower.replicas is not None
            with pytest.raises(NotLeader) as refused:
                follower.replicas.propose(GROUP, a_create(1))
            assert refused.value.leader == leader.node_id == follower.replicas.leader_of(GROUP)
            with pytest.raises(NotLeader):
                await follower.replicas.read_barrier(GROUP)
        # One group that is led elsewhere, and nothing of the batch is taken.
        follower = cluster.others(leader)[0]
        assert follower.replicas is not None
        with pytest.raises(NotLeader):
            follower.replicas.propose_many([(GROUP, a_create(1)), (1, a_create(2))])
        assert follower.replicas.inbox_count == 0


async def test_what_another_leader_overwrote_is_told_to_have_lost() -> None:
    """The entry was in the log of the old leader alone; once another one is committed in its place nothing happened, for certain."""
    async with Cluster(3) as cluster:
        old = cluster.leader
        cluster.isolate(old)
        assert old.replicas is not None
        batch = old.replicas.propose(GROUP, a_create(1))
        late = old.replicas.propose(GROUP, a_create(2))
        await cluster.until(lambda: any(node.replicas and node.replicas.leads(GROUP) for node in cluster.others(old)))
        await cluster.until(lambda: not old.member(GROUP).office)
        cluster.network.heal()
        await cluster.until(batch.future.done)
        for lost in (batch, late):
            error = lost.future.exception()
            assert isinstance(error, NotLeader) and error.leader == cluster.leader.node_id
        assert jobs_of(old) == set() == jobs_of(cluster.leader)


async def test_what_a_new_leader_committed_is_answered_by_the_old_one() -> None:
    """The entry had reached a follower when its leader was deposed: it is in the next term, and its proposer hears so."""
    async with Cluster(3) as cluster:
        old = cluster.leader
        first, second = cluster.others(old)
        # One-way: what the old leader sends arrives, the answers do not.
        cluster.network.cut |= {(first.node_id, old.node_id), (second.node_id, old.node_id), (old.node_id, second.node_id)}
        assert old.replicas is not None
        batch = old.replicas.propose(GROUP, a_create(1))
        await cluster.advance(10)
        cluster.isolate(old)
        await cluster.until(lambda: first.replicas is not None and first.replicas.leads(GROUP))
        assert jobs_of(first) == {1}
        cluster.network.heal()
        await cluster.until(batch.future.done)
        assert batch.future.result()[0].state is not None


async def test_a_former_leader_that_stays_cut_off_does_not_keep_its_callers_waiting() -> None:
    async with Cluster(3) as cluster:
        old = cluster.leader
        cluster.isolate(old)
        assert old.replicas is not None
        batch = old.replicas.propose(GROUP, a_create(1))
        await cluster.advance(20)
        await cluster.until(batch.future.done, ms_max=3_000)
        assert isinstance(batch.future.exception(), OutcomeUnknown)


async def test_what_is_not_in_the_log_when_the_office_ends_did_not_happen() -> None:
    async with Cluster(3) as cluster:
        old = cluster.leader
        assert old.replicas is not None
        cluster.isolate(old)
        old.stalled_ms = 5_000
        first = old.replicas.propose(GROUP, a_create(1))
        await cluster.advance(1)
        waiting = old.replicas.propose(GROUP, a_create(2))  # behind the fsync of the first
        await cluster.until(waiting.future.done, ms_max=4_000)
        assert isinstance(waiting.future.exception(), NotLeader)
        assert not first.future.done() or isinstance(first.future.exception(), OutcomeUnknown)
        assert old.replicas.inbox_count == 0


async def test_abort_tells_everybody_wherever_their_command_stands() -> None:
    async with Cluster(3) as cluster:
        leader = cluster.leader
        replicas = cluster.replicas
        cluster.isolate(leader)
        in_log = replicas.propose(GROUP, a_create(1))
        await cluster.advance(5)
        queued = replicas.propose(GROUP, a_create(2))
        read = asyncio.ensure_future(replicas.read_barrier(GROUP))
        await asyncio.sleep(0)
        await leader.crash(0.0)
        await asyncio.gather(read, return_exceptions=True)
        for future in (in_log.future, queued.future, read):
            assert isinstance(future.exception(), OutcomeUnknown)
        with pytest.raises(Unavailable):
            replicas.propose(GROUP, a_create(3))


async def test_stop_answers_what_was_proposed_and_gives_up_where_nobody_confirms_it() -> None:
    async with Cluster(3) as cluster:
        replicas, leader = cluster.replicas, cluster.leader
        batch = replicas.propose(GROUP, a_create(1))
        replicas.stop()
        with pytest.raises(Unavailable):
            replicas.propose(GROUP, a_create(2))
        running, leader.running = leader.running, None
        assert running is not None
        await cluster.until(running.done)
        assert batch.future.result()[0].state is not None
        leader.replicas = None
        await cluster.until(lambda: any(node.replicas and node.replicas.leads(GROUP) for node in cluster.nodes.values()))
        second, replicas = cluster.leader, cluster.replicas
        cluster.isolate(second)
        batch = replicas.propose(GROUP, a_create(3))
        replicas.stop()
        running, second.running = second.running, None
        assert running is not None
        await cluster.until(running.done, ms_max=3_000)
        second.replicas = None
        assert isinstance(batch.future.exception(), OutcomeUnknown)


# ---- office, lease, reads


async def test_a_leader_that_is_cut_off_stops_acting_before_another_one_begins() -> None:
    """B-058: `one_live_lease`, which the simulation checks at every event; here that the lease ends by itself, and that its end is told."""
    async with Cluster(3) as cluster:
        old = cluster.leader
        assert old.replicas is not None and GROUP in old.memory
        cluster.isolate(old)
        start_ms = cluster.world.now_ms
        await cluster.until(lambda: GROUP not in old.memory)
        assert cluster.world.now_ms - start_ms <= cluster.profile.settings.lease_ms + 60
        assert old.member(GROUP).raft.leadership is not None, "it does not know yet that it lost its office"
        for command in (Fire(1), Claim([(a_create(1).job_id, 0)], 1_000)):
            with pytest.raises(NotLeader):
                old.replicas.propose(GROUP, command)
        await cluster.until(lambda: any(node.replicas and node.replicas.leads(GROUP) for node in cluster.others(old)))
        assert cluster.world.now_ms - start_ms < 2_000, "fires again within two seconds"


async def test_a_lease_that_lapses_and_comes_back_is_a_new_beginning() -> None:
    """The memory of whoever acts for a group is dropped and built anew: effects in between were not given."""
    async with Cluster(3) as cluster:
        leader = cluster.leader
        assert leader.replicas is not None
        batch = leader.replicas.propose(GROUP, a_create(1))
        await cluster.until(batch.future.done)
        assert a_create(1).job_id in leader.memory[GROUP]
        # Time passes for it without a turn: the answers of its followers come too late for the lease, in time for the office.
        cluster.isolate(leader)
        await cluster.advance(430)
        cluster.network.cut.clear()
        assert not leader.replicas.leads(GROUP)
        batch = leader.replicas.propose(GROUP, a_create(2))
        await cluster.until(lambda: leader.replicas is not None and leader.replicas.leads(GROUP), ms_max=300)
        await cluster.until(batch.future.done)
        assert {a_create(1).job_id, a_create(2).job_id} <= leader.memory[GROUP].keys()
        assert cluster.counts["offices"] >= 3  # both groups at first, and this


async def test_a_new_leader_acts_only_when_everything_before_its_term_is_applied() -> None:
    async with Cluster(3) as cluster:
        await cluster.create_many(range(50))
        old = cluster.leader
        await old.crash(0.0)
        await cluster.until(lambda: any(node.replicas and node.replicas.leads(GROUP) for node in cluster.others(old)))
        # `check_leader_holds` ran in `on_lead`; the memory built then has all of them.
        assert {a_create(number).job_id for number in range(50)} <= cluster.leader.memory[GROUP].keys()


async def test_a_transfer_hands_the_office_over_and_ends_the_lease_at_once() -> None:
    async with Cluster(3) as cluster:
        old = cluster.leader
        replicas = cluster.replicas
        to = cluster.others(old)[1].node_id
        start_ms = cluster.world.now_ms
        replicas.transfer(GROUP, to)
        assert not replicas.leads(GROUP) and GROUP not in old.memory, "from now on somebody else can be elected"
        await cluster.until(lambda: cluster.nodes[to].replicas.leads(GROUP))  # type: ignore[union-attr]
        assert cluster.world.now_ms - start_ms < 100
        assert replicas.leader_of(GROUP) == to


async def test_a_transfer_that_fails_lets_the_old_leader_act_again_within_a_moment() -> None:
    """Its lease is void for the rest of the term, so it has itself elected anew, past the promises its voters made to it."""
    async with Cluster(3) as cluster:
        old = cluster.leader
        replicas = cluster.replicas
        target = cluster.others(old)[0]
        term = replicas.status(GROUP).term
        cluster.network.cut |= {(old.node_id, target.node_id)}
        replicas.transfer(GROUP, target.node_id)
        waiting = replicas.propose(GROUP, a_create(1))
        assert not replicas.leads(GROUP)
        await cluster.advance(5)  # the order to stand is lost
        cluster.network.cut.clear()
        await cluster.until(lambda: replicas.leads(GROUP), ms_max=800)
        assert replicas.status(GROUP).term > term
        await cluster.until(waiting.future.done)
        error = waiting.future.exception()
        assert error is None or isinstance(error, NotLeader)


async def test_a_transfer_to_a_stranger_is_refused() -> None:
    async with Cluster(3) as cluster:
        with pytest.raises(InvalidRequest):
            cluster.replicas.transfer(GROUP, 77)
        follower = cluster.others(cluster.leader)[0]
        assert follower.replicas is not None
        with pytest.raises(NotLeader):
            follower.replicas.transfer(GROUP, 1)


async def test_a_node_about_to_stop_hands_everything_over() -> None:
    async with Cluster(3) as cluster:
        leader, replicas = cluster.leader, cluster.replicas
        handing = asyncio.ensure_future(replicas.hand_over())
        await cluster.until(handing.done)
        assert handing.result() == 0
        assert cluster.leader is not leader


async def test_a_leader_whose_disk_stalls_loses_its_office() -> None:
    """B-060, with a slow disk: it could go on talking for ever (hashicorp/raft #503, etcd #13527)."""
    async with Cluster(3) as cluster:
        old = cluster.leader
        assert old.replicas is not None
        old.stalled_ms = 30_000
        old.replicas.propose(GROUP, a_create(1))
        await cluster.until(lambda: any(node.replicas and node.replicas.leads(GROUP) for node in cluster.others(old)), ms_max=3_000)


async def test_a_node_behind_a_slow_disk_waits_for_it_and_does_not_turn_in_circles() -> None:
    """Entries pour in and each takes a write; past a few unsynced turns they wait outside, and the end of the fsync goes on with them."""
    async with Cluster(3) as cluster:
        slow = cluster.others(cluster.leader)[0]
        assert slow.replicas is not None
        slow.stalled_ms = 600
        before = slow.replicas.turn_count
        batches = []
        for number in range(40):
            batches.append(cluster.replicas.propose(GROUP, a_create(number)))
            await cluster.advance(10)
        assert slow.replicas._inbound, "it takes no more"
        assert slow.replicas.turn_count - before < 100
        await cluster.until(lambda: all(batch.future.done() for batch in batches) and jobs_of(slow) == set(range(40)))


async def test_reads_of_a_turn_share_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Cluster(3) as cluster:
        replicas = cluster.replicas
        await cluster.create(1)
        answers: list[int] = []
        send = cluster.network.send

        def record(sender: int, to: int, messages: Sequence[tuple[int, AnyMessage]]) -> None:
            answers.extend(to for _, message in messages if type(message) is HeartbeatResponse and message.group == GROUP)
            send(sender, to, messages)

        ticks = replicas._tick_count
        await cluster.until(lambda: replicas._tick_count > ticks)
        await cluster.advance(10)  # in the middle between two ticks
        monkeypatch.setattr(cluster.network, "send", record)
        reads = [asyncio.ensure_future(replicas.read_barrier(GROUP)) for _ in range(20)]
        await cluster.advance(10)
        assert all(read.done() and read.exception() is None for read in reads)
        assert len(answers) == 2, "one round for all"


async def test_a_read_waits_for_a_majority_and_fails_with_the_office() -> None:
    async with Cluster(3) as cluster:
        old, replicas = cluster.leader, cluster.replicas
        cluster.isolate(old)
        read = asyncio.ensure_future(replicas.read_barrier(GROUP))
        await cluster.advance(300)
        assert not read.done()
        await cluster.until(read.done)
        assert isinstance(read.exception(), NotLeader)


async def test_a_lease_read_is_answered_at_once_where_it_is_allowed() -> None:
    async with Cluster(3, settings=ReplicaSettings(lease_reads=True)) as cluster:
        old, replicas = cluster.leader, cluster.replicas
        await replicas.read_barrier(GROUP)
        cluster.isolate(old)
        await cluster.until(lambda: not replicas.leads(GROUP))
        read = asyncio.ensure_future(replicas.read_barrier(GROUP))
        await cluster.advance(5)
        assert not read.done(), "without a lease it asks"
        read.cancel()


@pytest.mark.parametrize(("voters", "wanted"), [(3, [{11, 12, 13}, {16, 17, 18, 19}]), (4, [{11}, {14, 15}, {18, 19}])])
async def test_election_timeouts_of_the_voters_that_may_follow_keep_apart(voters: int, wanted: list[set[int]]) -> None:
    class Core:
        leader = 1
        configuration = make_configuration(range(1, voters + 1))

    for group in (0, 1):
        drawn = []
        for node_id in range(2, voters + 1):
            source = BandedTimeouts(node_id, group, random.Random(node_id))
            source.raft = Core()  # type: ignore[assignment]
            drawn.append({10 + source.randrange(10) for _ in range(500)})
        assert sorted(drawn, key=min) == wanted
        assert (drawn == wanted) == (group == 0), "another order in each group"


# ---- members


def voter(node_id: int) -> Change:
    return Change(ChangeKind.ADD_VOTER, node_id)


def gone(node_id: int) -> Change:
    return Change(ChangeKind.REMOVE, node_id)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ([voter(4)], None),
        ([voter(4), gone(1)], None),
        ([gone(5)], None),
        ([voter(4), voter(5)], InvalidRequest),  # two enter
        ([voter(4), gone(1), gone(2)], InvalidRequest),  # two leave
        ([voter(4), Change(ChangeKind.ADD_LEARNER, 1), gone(2)], InvalidRequest),  # a voter that becomes a learner leaves too
        ([voter(6)], InvalidRequest),  # no learner
        ([voter(5)], Unavailable),  # not level
        ([gone(1)], InvalidRequest),  # too few are left
        ([gone(1), gone(2), gone(3)], InvalidRequest),
    ],
)
def test_one_voter_enters_and_one_leaves_at_a_time_and_who_enters_is_level(changes: list[Change], error: type[Exception] | None) -> None:
    configuration = make_configuration([1, 2, 3], learners=[4, 5])
    matches = {1: 5_000, 2: 5_000, 3: 5_000, 4: 5_000 - CAUGHT_UP_ENTRIES, 5: 5_000 - CAUGHT_UP_ENTRIES - 1}

    def check(*, force: bool = False) -> None:
        check_change(configuration, changes, matches=matches, last_index=5_000, voters_min=3, force=force)

    if error is None:
        check()
    else:
        with pytest.raises(error):
            check()
    if changes == [gone(1)]:
        check(force=True)


def test_no_change_is_let_in_while_another_one_is_under_way() -> None:
    joint = make_configuration([1, 2, 4], outgoing=[1, 2, 3], auto_leave=True)
    with pytest.raises(Unavailable):
        check_change(joint, [gone(4)], matches={}, last_index=10, voters_min=1, force=True)


async def test_a_blank_node_joins_by_snapshot_learns_and_takes_the_place_of_another() -> None:
    async with Cluster(4, voters=3) as cluster:
        await cluster.create_many(range(100))
        newcomer, replicas = cluster.nodes[4], cluster.replicas
        future = replicas.add_learner(GROUP, 4)
        await cluster.until(future.done)
        assert future.result().learners == (4,)
        await cluster.until(lambda: jobs_of(newcomer) == set(range(100)))
        assert newcomer.member(GROUP).raft.log.start_index > 10, "by snapshot, not from the log's beginning"
        await cluster.until(lambda: replicas.status(GROUP).peers[4].match)
        leaving = cluster.others(cluster.leader)[0].node_id
        future = replicas.promote(GROUP, 4, in_place_of=leaving)
        with pytest.raises(Unavailable):
            replicas.remove(GROUP, 4)
        await cluster.until(future.done)
        assert set(future.result().voters) == {1, 2, 3, 4} - {leaving} and not future.result().is_joint
        await cluster.create(500)
        await cluster.until(lambda: 500 in jobs_of(newcomer))
        for node_id in (4, cluster.leader.node_id):
            await cluster.nodes[node_id].crash(0.0)
            cluster._restart(cluster.nodes[node_id])
        assert newcomer.replicas is not None
        assert set(newcomer.replicas.configuration(GROUP).voters) == {1, 2, 3, 4} - {leaving}, "the configuration survives a restart"


async def test_a_change_whose_leader_is_deposed_ends_in_an_unknown_outcome() -> None:
    async with Cluster(4, voters=3) as cluster:
        old, replicas = cluster.leader, cluster.replicas
        cluster.isolate(old)
        future = replicas.add_learner(GROUP, 4)
        await cluster.until(future.done)
        assert isinstance(future.exception(), OutcomeUnknown)
        with pytest.raises(NotLeader):
            replicas.add_learner(GROUP, 4)


async def test_a_leader_that_is_removed_stops_leading() -> None:
    async with Cluster(3, settings=ReplicaSettings(voters_min=2)) as cluster:
        old, replicas = cluster.leader, cluster.replicas
        future = replicas.remove(GROUP, old.node_id)
        await cluster.until(future.done)
        assert future.exception() is None
        await cluster.until(lambda: any(node.replicas and node.replicas.leads(GROUP) for node in cluster.others(old)))
        await cluster.create(1)


# ---- compaction and snapshots

SMALL = ReplicaSettings(compact_entries=8, keep_entries=40, small_snapshot_rows=2_000)
STAGED = ReplicaSettings(compact_entries=8, keep_entries=40, small_snapshot_rows=0, copy_rows=7)


async def test_the_log_is_kept_for_a_peer_that_lags_and_dropped_past_a_bound() -> None:
    async with Cluster(3, settings=SMALL) as cluster:
        leader, replicas = cluster.leader, cluster.replicas
        slow = cluster.others(leader)[0]
        await cluster.advance(500)
        match = replicas.status(GROUP).peers[slow.node_id].match
        slow.stalled_ms = 1_500  # it answers heartbeats, and acknowledges nothing
        for number in range(20):
            await cluster.create(number)
        assert replicas.status(GROUP).first_index <= match + 1
        for number in range(20, 80):
            await cluster.create(number)
        assert replicas.status(GROUP).first_index > match + 1
        assert replicas.status(GROUP).last_index - replicas.status(GROUP).first_index <= 41
        await cluster.until(lambda: jobs_of(slow) == set(range(80)))


@pytest.mark.parametrize("settings", [SMALL, STAGED], ids=["small", "staged"])
async def test_a_node_that_was_away_gets_a_snapshot_and_goes_on_by_the_log(settings: ReplicaSettings) -> None:
    async with Cluster(3, settings=settings) as cluster:
        away = cluster.others(cluster.leader)[0]
        await cluster.create_many(range(1_000, 1_100))
        await away.crash(0.0)
        for number in range(60):
            await cluster.create(number)
        cluster._restart(away)
        await cluster.until(lambda: jobs_of(away) >= set(range(60)))
        assert cluster.counts["snapshots"] == 1
        await cluster.create(60)
        await cluster.advance(500)
        assert away.digest(GROUP) == cluster.leader.digest(GROUP)
        assert cluster.replicas.status(GROUP).peers[away.node_id].state is PeerState.REPLICATE
        assert staged_rows(away.store) == [], "nothing is left behind"
        await away.crash(0.0)
        cluster._restart(away)
        await cluster.advance(500)
        assert away.digest(GROUP) == cluster.leader.digest(GROUP)


def staged_rows(store: MemoryStore) -> list[tuple[bytes, bytes]]:
    return store.scan(*snapshots_module.staged_range(GROUP), 10)


@pytest.mark.parametrize("settings", [SMALL, STAGED], ids=["small", "staged"])
async def test_a_crash_after_any_write_of_an_installation_leaves_the_old_state_or_the_new_one(settings: ReplicaSettings) -> None:
    """B-072: the disk keeps a prefix of what was written, as long as each possible one. Before the first write that belongs to the
    installation the replica must be as it was; wherever the crash fell it must come up, agree with the others at its applied index, and
    catch up."""
    async with Cluster(3, settings=settings) as cluster:
        leader = cluster.leader
        away = cluster.others(leader)[0]
        await cluster.create_many(range(1_000, 1_010))
        await cluster.advance(500)
        await away.crash(1.0)
        for number in range(24):
            await cluster.create(number)
        before = away.store
        images = []

        class Recording(SimStore):
            def write(self, puts: Any, ranges: Any = ()) -> None:
                super().write(puts, ranges)
                images.append(self._image())

        store = Recording(cluster.world, away.node_id, lambda: 1)
        store._families = {family: rows.snapshot() for family, rows in before._families.items()}
        store._synced = store._image()
        away.store = store
        cluster._restart(away)
        await cluster.until(lambda: jobs_of(away) >= set(range(24)) and cluster.counts.get("snapshots") == 1)
        await away.crash(1.0)
        await cluster.create(40)
        again = 0
        for number, image in enumerate(images):
            is_halfway = image[keys.RAFT_META].get(b"P" + keys.group_prefix(GROUP)) is not None
            again += is_halfway
            if not is_halfway and number % 4:
                continue
            after = SimStore(cluster.world, away.node_id, lambda: 1)
            after._families = {family: rows.snapshot() for family, rows in image.items()}
            after._synced = after._image()
            away.store = after
            # The others forget what it acknowledged in a life that was longer than this one.
            for node in cluster.others(away):
                await node.crash(1.0)
            for node in cluster.nodes.values():
                cluster._restart(node)
            await cluster.settle()  # agrees at its applied index
            await cluster.until(lambda: 40 in jobs_of(away))
            assert staged_rows(after) == []
            await away.crash(1.0)
        assert (again > 5) == (settings is STAGED), "the interesting ones were among them"


async def test_what_a_start_installed_again_is_told_to_nobody_before_it_is_durable() -> None:
    """The network compares an acknowledgement with the sender's disk; the fsync of the start takes half a second here."""
    async with Cluster(3, settings=STAGED) as cluster:
        leader = cluster.leader
        away = cluster.others(leader)[0]
        await cluster.create_many(range(1_000, 1_010))
        await away.crash(0.0)
        for number in range(24):
            await cluster.create(number)
        cluster._restart(away)
        await cluster.advance(20_000, until=lambda: any(ready.snapshot for _, ready in away.member(GROUP).pending))
        marked = away.store
        installing = keys.group_prefix(GROUP)
        while marked.get(keys.RAFT_META, b"P" + installing) is None:
            # From the end of what is not durable back to where the installation is under way.
            del marked._unsynced[-1]
            marked._families = {family: rows.snapshot() for family, rows in marked._synced.items()}
            for batch in marked._unsynced:
                apply_batch(marked._families, batch)
        await away.crash(1.0)
        away.stalled_ms = 500
        cluster._restart(away)
        replicas, raft = away.replicas, leader.member(GROUP).raft
        assert replicas is not None and away.member(GROUP).state.applied_index > 20
        old = Append(GROUP, leader.node_id, away.node_id, raft.term, 11, 2, (), 11)  # answered with the commit index
        replicas.on_messages(leader.node_id, [(GROUP, old)])
        await cluster.advance(2_000)
        assert jobs_of(away) == jobs_of(leader)


async def test_only_two_snapshots_leave_a_node_at_a_time_and_the_third_follows() -> None:
    async with Cluster(4, voters=1, settings=ReplicaSettings(voters_min=1)) as cluster:
        await cluster.create_many(range(50))
        replicas = cluster.replicas
        moving: list[int] = []
        send_snapshot = cluster.network.send_snapshot
        most = 0

        def record(*args: Any) -> asyncio.Future[bool]:
            nonlocal most
            sent = send_snapshot(*args)
            moving.append(1)
            most = max(most, len(moving))
            sent.add_done_callback(lambda _sent: moving.pop())
            return sent

        cluster.network.send_snapshot = record  # type: ignore[method-assign]
        for node_id in (2, 3, 4):
            future = replicas.add_learner(GROUP, node_id)
            while not future.done():
                await cluster.advance(0)
                await asyncio.sleep(0)
                if not future.done():
                    await cluster.advance(1)
        await cluster.until(lambda: all(jobs_of(cluster.nodes[node_id]) == set(range(50)) for node_id in (2, 3, 4)))
        assert most <= 2


async def chunks_of(store: MemoryStore, state: GroupState, message: InstallSnapshot) -> list[bytes]:
    return [chunk async for chunk in SnapshotView(store, message, state).chunks()]


def a_snapshot(rows: int) -> tuple[MemoryStore, GroupState, InstallSnapshot]:
    store = MemoryStore()
    prefix, other = keys.group_prefix(3), keys.group_prefix(4)
    for family in keys.STATE_FAMILIES:
        store.write({family: {prefix + b"%05d" % number: family.encode() * 9 for number in range(rows)} | {other + b"x": b"y"}})
    state = GroupState(applied_index=50, applied_term=2, watermark_ms=7)
    return store, state, InstallSnapshot(3, 1, 2, 2, 50, 2, make_configuration([1, 2]), 9)


@pytest.mark.parametrize("small_rows_max", [0, 100_000], ids=["staged", "in memory"])
async def test_a_snapshot_arrives_as_it_was_when_it_was_opened(small_rows_max: int) -> None:
    store, state, message = a_snapshot(1_000)
    view = SnapshotView(store, message, state)
    store.write({}, [(family, b"", b"") for family in keys.STATE_FAMILIES])  # later changes are not in it
    target = MemoryStore()
    incoming = IncomingSnapshot(target, 2, 3, small_rows_max=small_rows_max)
    async for chunk in view.chunks():
        incoming.take(chunk)
    assert incoming.is_complete and incoming.state == state and incoming.message == message
    if incoming.is_staged:
        copying = snapshots_module.Copying(target, 3)
        while not copying.step(97):
            pass
    else:
        target.write(incoming.rows())
    prefix = keys.group_prefix(3)
    for family in keys.STATE_FAMILIES:
        wanted = [(prefix + b"%05d" % number, family.encode() * 9) for number in range(1_000)]
        assert target.scan(family, b"", b"", 10_000) == wanted
    incoming.discard()
    assert target.scan(keys.RAFT_LOG, b"", b"", 10) == []


async def test_a_snapshot_with_a_chunk_missing_doubled_damaged_or_of_another_group_is_refused() -> None:
    store, state, message = a_snapshot(1_000)
    whole = await chunks_of(store, state, message)
    assert len(whole) > 10
    flipped = whole[3][:-30] + bytes((whole[3][-30] ^ 1,)) + whole[3][-29:]
    broken = {
        "no header": whole[1:],
        "two headers": [whole[0], *whole],
        "a chunk missing": [*whole[:4], *whole[5:]],
        "a chunk doubled": [*whole[:4], whole[3], *whole[4:]],
        "two swapped": [*whole[:3], whole[4], whole[3], *whole[5:]],
        "a flipped bit": [*whole[:3], flipped, *whole[4:]],
        "no chunk at all": [whole[0], whole[-1]],
        "more behind the end": [*whole, whole[1]],
        "noise": [whole[0], b"noise"],
    }
    for what, chunks in broken.items():
        incoming = IncomingSnapshot(MemoryStore(), 2, 3, small_rows_max=0)
        with pytest.raises(SnapshotRefused):
            for chunk in chunks:
                incoming.take(chunk)
            raise AssertionError(what)
    for group, node_id in ((4, 2), (3, 1)):
        with pytest.raises(SnapshotRefused):
            IncomingSnapshot(MemoryStore(), node_id, group).take(whole[0])
    foreign = SnapshotView(store, msgspec.structs.replace(message, group=4), state)
    rows_of_another = [chunk async for chunk in foreign.chunks()]
    incoming = IncomingSnapshot(MemoryStore(), 2, 3)
    incoming.take(whole[0])
    with pytest.raises(SnapshotRefused):
        incoming.take(rows_of_another[1])


async def test_a_snapshot_that_breaks_off_leaves_nothing_and_the_next_one_is_taken() -> None:
    async with Cluster(3, settings=STAGED) as cluster:
        leader = cluster.leader
        away = cluster.others(leader)[0]
        await cluster.create_many(range(1_000, 1_100))
        await away.crash(0.0)
        for number in range(60):
            await cluster.create(number)
        arriving = cluster.network._arriving
        breaks = 2

        async def break_off(sender: int, to: int, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            nonlocal breaks
            breaks -= 1
            count = 0
            async for chunk in arriving(sender, to, chunks):
                count += 1
                if breaks >= 0 and count == 3:
                    return
                yield chunk

        cluster.network._arriving = break_off  # type: ignore[method-assign]
        cluster._restart(away)
        await cluster.until(lambda: jobs_of(away) >= set(range(60)))
        assert breaks < 0 and staged_rows(away.store) == []


def test_the_lease_is_shorter_than_the_promise_by_what_clocks_and_ticks_may_differ() -> None:
    settings = ReplicaSettings(raft=RaftConfig(election_tick=20))
    assert settings.election_ms == 1_000 and settings.lease_ms == 850


# ---- on RocksDB


@pytest.mark.blocking_allowed
async def test_a_snapshot_moves_between_two_databases_while_the_first_one_changes(tmp_path: Path) -> None:
    """One view over all families: cursors made in one turn see one state of the database."""
    settings = StoreSettings(free_bytes_min=0, free_bytes_stop=0)
    prefix = keys.group_prefix(3)
    state = GroupState(applied_index=50, applied_term=2)
    message = InstallSnapshot(3, 1, 2, 2, 50, 2, make_configuration([1, 2]), 9)
    source = RocksStore(tmp_path / "source", settings)
    target = RocksStore(tmp_path / "target", settings)
    try:
        for family in keys.STATE_FAMILIES:
            source.write({family: {prefix + b"%05d" % number: b"before" for number in range(1_000)}})
        incoming = IncomingSnapshot(target, 2, 3, small_rows_max=0)
        view = SnapshotView(source, message, state)
        async for chunk in view.chunks():
            incoming.take(chunk)
            for family in keys.STATE_FAMILIES:
                source.write({family: {prefix + b"%05d" % number: b"after" for number in range(0, 1_000, 100)}})
        target.write({family: {prefix + b"x": b"old"} for family in keys.STATE_FAMILIES})
        copying = snapshots_module.Copying(target, 3)
        while not copying.step():
            pass
        incoming.discard()
        for family in keys.STATE_FAMILIES:
            assert target.scan(family, b"", b"", 10_000) == [(prefix + b"%05d" % number, b"before") for number in range(1_000)]
        assert target.scan(keys.RAFT_LOG, b"", b"", 10) == []
    finally:
        source.close()
        target.close()


class NoPeers:
    def send(self, node: int, messages: Sequence[tuple[int, AnyMessage]]) -> None:
        raise AssertionError("a node alone has nobody to speak to")

    def send_snapshot(self, node: int, group: int, snapshot_id: int, chunks: AsyncIterator[bytes]) -> asyncio.Future[bool]:
        raise AssertionError("a node alone has nobody to speak to")


@pytest.mark.blocking_allowed
async def test_a_node_alone_on_rocksdb_and_the_real_clock_keeps_what_it_answered(tmp_path: Path) -> None:
    """Three starts; the log is compacted on the way."""
    settings = StoreSettings(free_bytes_min=0, free_bytes_stop=0)
    for start in range(3):
        store = RocksStore(tmp_path, settings)
        leads = asyncio.Event()
        replicas = RaftReplicas(
            store, RaftLog(store, (GROUP,)), RealClock(), random.Random(1), NoPeers(), 1, (GROUP,),
            first_configuration=lambda _group: make_configuration([1]), on_effects=lambda _group, _effects: None,
            on_lead=lambda _group, leads=leads: leads.set(), settings=ReplicaSettings(compact_entries=4),  # type: ignore[misc]
        )  # fmt: skip
        replicas.recover()
        running = asyncio.ensure_future(replicas.run())
        await leads.wait()
        for number in range(10):
            await replicas.propose(GROUP, a_create(100 * start + number)).future
        assert len(store.scan(keys.STATE, b"", b"", 100)) == 10 * (start + 1)
        assert replicas.status(GROUP).first_index > 11
        replicas.stop()
        await running
        store.close()
