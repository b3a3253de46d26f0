"""The checksum of what entries write: the same wherever they are applied, and what happens where it is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from test_raft_replicas import GROUP, Cluster, a_create, jobs_of

from wheelsched.backup.restoring import restored_state
from wheelsched.core.settings import StoreSettings
from wheelsched.model import keys
from wheelsched.model.commands import COMMAND_VERSION, AnyCommand, Cancel, Claim, Complete, DropSchedule, Entry, Fire, Purge, encode_entry
from wheelsched.model.rows import GroupState, decode_group, decode_state, encode_row
from wheelsched.model.states import Outcome, Status
from wheelsched.raft import RaftConfig
from wheelsched.replica.applying import Applier, Member, ToApply
from wheelsched.replica.digests import Note, ReplicasDiffer, compare, end_window, fold, note_of, read_note
from wheelsched.replica.raft_member import RaftMember
from wheelsched.replica.raft_settings import ReplicaSettings
from wheelsched.runtime.clock import VirtualClock
from wheelsched.store import Store
from wheelsched.store.memory import MemoryStore
from wheelsched.store.raftlog import LogEntry, RaftLog
from wheelsched.store.rocks import RocksStore
from wheelsched.testing.cluster_sim import SimNode
from wheelsched.testing.simulate_node import quiet_logs

WINDOW = 8
SETTINGS = ReplicaSettings(digest_window=WINDOW)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    quiet_logs()


# ---- the same everywhere


def entries() -> list[list[AnyCommand]]:
    """Lives of jobs, in entries of many commands as of few."""
    stamp_ms = 1_700_000_000_000
    ids = [a_create(number).job_id for number in range(200)]
    return [
        [*(a_create(number, delay_ms=0, payload=b"%d" % number) for number in range(150)), Fire(stamp_ms)],
        [a_create(number, delay_ms=60_000) for number in range(150, 200)],
        [Claim([(job_id, 0) for job_id in ids[:120]], 60_000, "worker")],
        [Complete(job_id, 1, number + 1, int(Outcome.SUCCEEDED), 7, b"", b"1") for number, job_id in enumerate(ids[:100])],
        [Complete(job_id, 1, number + 101, int(Outcome.RETRYABLE_FAILURE), 7, b'"no"') for number, job_id in enumerate(ids[100:110])],
        [Cancel(ids[160], "t"), Cancel(ids[0], "t"), DropSchedule("t", "none"), a_create(1)],
        [Purge("t", "q", int(Status.SUCCEEDED), stamp_ms + 1)],
    ]


def state_after(store: Store, *, keeps_leased: bool = True) -> GroupState:
    raft_log = RaftLog(store, (GROUP,))
    applier = Applier(store, raft_log, VirtualClock(1), on_effects=lambda _group, _effects: None, digest_window=10_000)
    member = Member(GROUP, raft_log.group_state(GROUP))
    for number, commands in enumerate(entries()):
        entry = Entry(COMMAND_VERSION, 1_700_000_000_000 + number, commands)
        index = raft_log.last_index(GROUP) + 1
        puts: dict[str, dict[bytes, bytes | None]] = {}
        raft_log.add(puts, GROUP, LogEntry(index, 1, 0, encode_entry(entry)), commit=index)
        store.write(puts)
        applier.apply([ToApply(member, index, 1, entry)])
        if not keeps_leased:
            applier.kept.forget()
            member.counts.clear()
    return member.state


def test_it_does_not_depend_on_what_is_kept_in_memory() -> None:
    assert state_after(MemoryStore()) == state_after(MemoryStore(), keeps_leased=False)


@pytest.mark.blocking_allowed
def test_it_does_not_depend_on_the_store(tmp_path: Path) -> None:
    store = RocksStore(tmp_path, StoreSettings(free_bytes_min=0, free_bytes_stop=0))
    try:
        assert state_after(store) == state_after(MemoryStore())
    finally:
        store.close()


@pytest.mark.blocking_allowed
def test_it_does_not_depend_on_compiled_code_nor_on_hash_order() -> None:
    script = (
        "from test_raft_digests import *; import wheelsched.engine.rows as rows; "
        "print(rows.create_rows.__module__ or 'native'); print(state_after(MemoryStore()))"
    )
    found = set()
    for pure, seed in (("0", "1"), ("1", "2")):
        environment = {**os.environ, "WHEELSCHED_PURE": pure, "PYTHONHASHSEED": seed, "PYTHONPATH": f".{os.pathsep}tests/unit"}
        run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
        found.add(run.stdout.splitlines()[1])
    assert found == {str(state_after(MemoryStore()))}


def test_every_change_of_a_row_shows() -> None:
    def writes(**rows: dict[bytes, bytes | None]) -> dict[str, dict[bytes, bytes | None]]:
        return {family: rows.get(family, {}) for family in keys.STATE_FAMILIES}

    found = [
        fold(0, writes(), []),
        fold(0, writes(state={b"a": b"1"}), []),
        fold(0, writes(state={b"a": b"2"}), []),
        fold(0, writes(state={b"a": None}), []),
        fold(0, writes(state={b"b": b"1"}), []),
        fold(0, writes(counts={b"a": b"1"}), []),
        fold(0, writes(), [(keys.STATE, b"a", b"b")]),
        fold(0, writes(), [(keys.STATE, b"a", b"c")]),
        fold(1, writes(state={b"a": b"1"}), []),
    ]
    assert len(set(found)) == len(found)


# ---- windows


def test_a_window_that_was_not_seen_from_its_beginning_is_not_compared() -> None:
    state = GroupState(applied_index=20, digest=7, digest_from=-1)
    end_window(state, 10)
    assert (state.checked_index, state.digest, state.digest_from) == (0, 0, 20)
    compare(GROUP, state, Note(20, 10, 99), 10)
    state.applied_index, state.digest = 30, 7
    end_window(state, 10)
    assert state.checked_index == 30
    compare(GROUP, state, Note(30, 10, state.checked_digest), 10)
    compare(GROUP, state, Note(20, 10, 99), 10)  # of a window that is over
    compare(GROUP, state, Note(30, 15, 99), 10)  # of another release
    with pytest.raises(ReplicasDiffer, match=r"entries 21 to 30.*cluster replace"):
        compare(GROUP, state, Note(30, 10, state.checked_digest ^ 1), 10)


@pytest.mark.parametrize("field", ["applied_term", "time_ms", "watermark_ms", "fencing"])
def test_what_else_the_row_holds_is_compared(field: str) -> None:
    states = [GroupState(applied_index=10, digest=7, digest_from=0), GroupState(applied_index=10, digest=7, digest_from=0, **{field: 1})]
    for state in states:
        end_window(state, 10)
    assert states[0].checked_digest != states[1].checked_digest


def test_a_note_is_read_by_who_knows_it_and_passed_over_by_who_does_not() -> None:
    state = GroupState(checked_index=20, checked_digest=5)
    assert read_note(note_of(state, 10)) == Note(20, 10, 5)
    for payload in (b"", b"noise", b"\x93\xa1z\x01\x02"):
        assert read_note(payload) is None


def test_a_row_of_a_release_without_checksums_is_read() -> None:
    old = encode_row(GroupState(5, 1, 2, 3, 4, 0, -1))
    assert decode_group(b"\x01\x95" + old[2:7]) == GroupState(5, 1, 2, 3, 4)


def test_a_restored_group_begins_anew() -> None:
    state = restored_state(GroupState(50_123, 7, 1, 2, 3, 4, 50_000, 50_000, 6))
    assert (state.digest, state.digest_from, state.checked_index, state.checked_digest) == (0, 0, 0, 0)


# ---- in a cluster


class Unwatched(Cluster):
    """The simulation compares rows itself, at every event; here the nodes are to find out."""

    def _check_state(self, node: SimNode, group: int, member: RaftMember) -> None:
        pass


async def windows(cluster: Cluster, count: int, *, first: int = 1_000) -> None:
    start = cluster.leader.member(GROUP).state.checked_index
    number = first
    while cluster.leader.member(GROUP).state.checked_index < start + count * WINDOW:
        await cluster.create(number)
        number += 1
    await cluster.advance(500)


async def test_replicas_agree_through_crashes_snapshots_and_changes_of_the_leader() -> None:
    """`applied_agrees`, which the simulation checks at every event, covers the checksums: they are in the state."""
    async with Cluster(4, voters=3, settings=ReplicaSettings(digest_window=WINDOW, compact_entries=8, keep_entries=16)) as cluster:
        await windows(cluster, 3)
        assert {node.member(GROUP).told_digest for node in list(cluster.nodes.values())[:3]} != {0}
        away = cluster.others(cluster.leader)[0]
        await away.crash(0.5)
        await windows(cluster, 6, first=2_000)
        cluster._restart(away)
        await cluster.until(lambda: jobs_of(away) == jobs_of(cluster.leader))
        old = cluster.leader
        await old.crash(0.0)
        await cluster.until(lambda: any(node.replicas and node.replicas.leads(GROUP) for node in cluster.others(old)))
        cluster._restart(old)
        await windows(cluster, 2, first=3_000)
        states = [node.member(GROUP).state for node in cluster.nodes.values() if node.member(GROUP).raft.configuration.voters]
        assert len(states) == 3 and states[0].checked_index >= 11 * WINDOW and all(state == states[0] for state in states)


def change_a_row(node: SimNode, job_id: bytes) -> None:
    key = keys.state_key(GROUP, job_id)
    row = node.store.get(keys.STATE, key)
    assert row is not None
    node.store.write({keys.STATE: {key: encode_row(replace(decode_state(row), max_attempts=77))}})


async def test_a_follower_whose_rows_differ_stops_and_says_what_to_do() -> None:
    cluster = await Unwatched(3, settings=SETTINGS).open()
    await windows(cluster, 2)
    follower = cluster.others(cluster.leader)[0]
    await cluster.create(1)
    await cluster.advance(100)
    change_a_row(follower, a_create(1).job_id)
    batch = cluster.replicas.propose(GROUP, Cancel(a_create(1).job_id, "t"))
    await cluster.until(batch.future.done)
    with pytest.raises(ReplicasDiffer, match=rf"rows of group {GROUP} differ from its leader's after entries") as failure:
        await windows(cluster, 2, first=5_000)
    assert "wheelsched cluster replace" in str(failure.value)
    ended = [node for node in cluster.nodes.values() if node.running is not None and node.running.done()]
    assert ended == [follower]
    # It does not pass that place at its next start either.
    follower.running = None
    follower.store = follower.store.crash(1.0)
    with pytest.raises(ReplicasDiffer):
        follower.start()
        await cluster.advance(3_000)
    await cluster._close()


async def test_a_node_of_a_release_without_checksums_is_compared_from_the_next_window_on() -> None:
    async with Unwatched(3, settings=SETTINGS) as cluster:
        await windows(cluster, 2)
        follower = cluster.others(cluster.leader)[0]
        await follower.crash(1.0)
        key = b"A" + keys.group_prefix(GROUP)
        row = follower.store.get(keys.RAFT_META, key)
        assert row is not None
        state = replace(decode_group(row), digest=0, digest_from=-1, checked_index=0, checked_digest=0)
        follower.store.write({keys.RAFT_META: {key: encode_row(state)}})
        cluster._restart(follower)
        await windows(cluster, 1, first=2_000)
        assert follower.member(GROUP).state.checked_index == 0
        await windows(cluster, 1, first=3_000)
        assert follower.member(GROUP).state == cluster.leader.member(GROUP).state


async def test_the_checksum_of_a_window_is_told_once() -> None:
    async with Cluster(3, settings=SETTINGS) as cluster:
        await windows(cluster, 1)
        last = cluster.leader.member(GROUP).raft.log.last_index
        await cluster.advance(5_000)
        assert cluster.leader.member(GROUP).raft.log.last_index == last


def test_the_default_is_every_ten_thousand_entries() -> None:
    assert ReplicaSettings().digest_window == 10_000 and ReplicaSettings().raft == RaftConfig()
