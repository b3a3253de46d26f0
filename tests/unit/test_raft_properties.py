"""What the conformance vectors cannot say as data: chance, every configuration, and each part against an obvious model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wheelsched.raft import (
    Answer,
    AnyMessage,
    Append,
    AppendResponse,
    Change,
    ChangeKind,
    Configuration,
    Entry,
    EntryKind,
    Heartbeat,
    HeartbeatResponse,
    InstallSnapshot,
    PreVoteRequest,
    PreVoteResponse,
    Raft,
    RaftConfig,
    RaftFault,
    ReadMode,
    RestoredState,
    Role,
    TimeoutNow,
    VoteRequest,
    VoteResponse,
    decode_change,
    decode_configuration,
    decode_message,
    encode_change,
    encode_message,
    is_sound,
    make_configuration,
    make_entry,
)
from wheelsched.raft.configuration import ConfChange, Refused, Step, enter_joint, leave_joint, simple
from wheelsched.raft.log import Log
from wheelsched.raft.quorum import VoteResult, committed_index, vote_result

TEST_CONFIG = RaftConfig(heartbeat_tick=1, pre_vote=False, check_quorum=False, restart_grace=False)


def a_core(node_id: int = 1, *, voters: Sequence[int] = (1, 2, 3), seed: int = 1, config: RaftConfig = TEST_CONFIG) -> Raft:
    return Raft(node_id, config, RestoredState(make_configuration(voters)), random.Random(seed))


def handle(core: Raft) -> list[AnyMessage]:
    """All work at once, as the simplest driver does it."""
    messages: list[AnyMessage] = []
    while (ready := core.take_ready()) is not None:
        core.persisted(ready)
        messages += [*ready.now, *ready.after]
        for entry in ready.committed:
            if entry.kind == EntryKind.CONFIGURATION:
                core.apply_conf(decode_change(entry.payload))
            core.applied(entry.index)
    return messages


def a_leader(*, voters: Sequence[int] = (1, 2, 3), config: RaftConfig = TEST_CONFIG) -> Raft:
    core = a_core(voters=voters, config=config)
    core.campaign()
    handle(core)
    for peer in voters[1:]:
        core.step(VoteResponse(0, peer, 1, 1))
        core.step(AppendResponse(0, peer, 1, 1, 1))
        handle(core)
    assert core.role is Role.LEADER
    return core


# ---- chance


def ticks_until_election(core: Raft) -> int:
    """From a fresh follower on; raft_paper_test FollowerElectionTimeoutRandomized."""
    core.step(Heartbeat(0, 2, core.node_id, core.term + 1))
    ticks = 0
    while core.role is Role.FOLLOWER:
        core.tick()
        ticks += 1
    return ticks


def test_every_timeout_of_the_range_occurs_and_no_other() -> None:
    core = a_core()
    counts = Counter(ticks_until_election(core) for _ in range(500))
    assert set(counts) == set(range(10, 20))


def test_followers_seldom_time_out_together() -> None:
    """raft_paper_test FollowersElectionTimeoutNonconflict: in at most 30 % of the rounds do two of five time out in the same tick."""
    cores = [a_core(node_id, voters=(1, 2, 3, 4, 5), seed=node_id) for node_id in range(1, 6)]
    conflicts = 0
    for _ in range(1_000):
        timeouts = sorted(ticks_until_election(core) for core in cores)
        conflicts += timeouts[0] == timeouts[1]
    assert conflicts <= 300


def test_the_same_seed_gives_the_same_bytes() -> None:
    def history(seed: int) -> bytes:
        core = a_core(seed=seed, config=RaftConfig(heartbeat_tick=1))
        out = b""
        for _ in range(200):
            core.tick()
            out += b"".join(encode_message(message) for message in handle(core))
        return out

    assert history(7) == history(7) != b""


# ---- quorums

ids = st.integers(1, 9)
voter_sets = st.lists(ids, max_size=7, unique=True)
acks = st.dictionaries(ids, st.integers(0, 20))


def majority_by_counting(voters: Sequence[int], acked: dict[int, int]) -> int | None:
    """The obvious way: try every index."""
    if not voters:
        return None
    return max(index for index in range(21) if 2 * sum(acked.get(voter, 0) >= index for voter in voters) > len(voters))


@given(voters=voter_sets, outgoing=voter_sets, acked=acks)
def test_committed_is_what_counting_says(voters: list[int], outgoing: list[int], acked: dict[int, int]) -> None:
    halves = [index for index in (majority_by_counting(voters, acked), majority_by_counting(outgoing, acked)) if index is not None]
    assert committed_index(voters, outgoing, acked) == min(halves, default=None)


@given(voters=voter_sets, acked=acks)
def test_committed_is_the_middle_of_the_sorted(voters: list[int], acked: dict[int, int]) -> None:
    held = sorted((acked.get(voter, 0) for voter in voters), reverse=True)
    assert committed_index(voters, (), acked) == (held[len(voters) // 2] if voters else None)


@given(voters=voter_sets, outgoing=voter_sets, votes=st.dictionaries(ids, st.booleans()))
def test_an_election_is_pending_while_it_can_go_either_way(voters: list[int], outgoing: list[int], votes: dict[int, bool]) -> None:
    def is_won(answers: dict[int, bool]) -> bool:
        return all(2 * sum(answers.get(voter, False) for voter in half) > len(half) for half in (voters, outgoing) if half)

    missing = [voter for voter in {*voters, *outgoing} if voter not in votes]
    can_win = is_won(votes | dict.fromkeys(missing, True))
    undecided = VoteResult.PENDING if can_win else VoteResult.LOST
    assert vote_result(voters, outgoing, votes) is (VoteResult.WON if is_won(votes) else undecided)


@given(voters=st.lists(ids, min_size=1, max_size=7, unique=True), acked=acks)
def test_two_majorities_meet(voters: list[int], acked: dict[int, int]) -> None:
    """Whoever is elected holds what is committed: a voter that granted is among those that acknowledged."""
    committed = committed_index(voters, (), acked)
    assert committed is not None
    behind = {voter: acked.get(voter, 0) < committed for voter in voters}
    assert vote_result(voters, (), behind) is VoteResult.LOST


# ---- configurations


@st.composite
def configurations(draw: st.DrawFn) -> Configuration:
    """As confchange/restore_test makes them: joint or not, learners apart from voters, demoted ones from the outgoing half."""
    pool = draw(st.permutations(range(1, 13)))
    voters = pool[: draw(st.integers(1, 5))]
    learners = pool[5 : 5 + draw(st.integers(0, 3))]
    removed = pool[8 : 8 + draw(st.integers(0, 4))]
    is_joint = draw(st.booleans()) and (bool(removed) or draw(st.booleans()))
    outgoing = [*removed, *(voter for voter in voters if draw(st.booleans()))] if is_joint else []
    demoted = [node_id for node_id in removed if draw(st.booleans())] if outgoing else []
    auto_leave = bool(outgoing) and draw(st.booleans())
    return make_configuration(voters, outgoing=outgoing, learners=learners, learners_next=demoted, auto_leave=auto_leave)


changes = st.lists(st.builds(Change, st.sampled_from(list(ChangeKind)), st.integers(1, 8)), max_size=8)


@given(conf=configurations())
def test_a_configuration_survives_the_wire_and_the_disk(conf: Configuration) -> None:
    assert decode_configuration(conf.encode()) == conf


@given(conf=configurations(), batch=changes)
def test_joint_and_back_is_what_simple_steps_give(conf: Configuration, batch: list[Change]) -> None:
    """confchange quick_test: one change after the other, or all through a joint configuration."""
    start = make_configuration(conf.voters, learners=conf.learners)
    try:
        joint = enter_joint(start, batch, auto_leave=False)
    except Refused as refused:
        assert refused.code == "no_voters"
        return
    stepwise = start
    for change in batch:
        try:
            stepwise = simple(stepwise, [change])
        except Refused:
            return  # without voters for a moment, which only the joint way can pass over
    assert leave_joint(joint) == stepwise
    check_configuration(joint)
    check_configuration(stepwise)


def check_configuration(conf: Configuration) -> None:
    for group in (conf.voters, conf.outgoing, conf.learners, conf.learners_next):
        assert list(group) == sorted(set(group))
    assert conf.voters
    assert not set(conf.learners) & {*conf.voters, *conf.outgoing}
    assert set(conf.learners_next) <= set(conf.outgoing) - set(conf.voters)
    assert conf.outgoing or not (conf.learners_next or conf.auto_leave)


@given(conf=configurations(), batch=changes)
def test_a_refused_change_leaves_no_trace(conf: Configuration, batch: list[Change]) -> None:
    before = conf.encode()
    for step in Step:
        with suppress(Refused):
            check_configuration(conf.apply(ConfChange(step, tuple(batch))))
        assert conf.encode() == before


# ---- the log, against a list


@st.composite
def log_moves(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    moves = st.tuples(st.sampled_from(["append", "append", "write", "persist", "compact", "evict"]), st.integers(0, 5), st.integers(0, 2))
    return draw(st.lists(moves, max_size=40))


@given(moves=log_moves())
def test_the_log_is_a_list_with_a_start(moves: list[tuple[str, int, int]]) -> None:
    """Appends that replace tails, writes in flight, compaction and eviction, against lists of what memory and disk hold."""
    disk: dict[int, Entry] = {}
    log = Log(10, 1, reader=lambda first, last: [disk[index] for index in range(first, last + 1)])
    model: dict[int, Entry] = {}
    flights: list[tuple[Entry, ...]] = []
    safe, term = 10, 1  # nothing at or below `safe` is ever replaced, as nothing committed is
    for move, number, step in moves:
        if move == "append":
            term += step
            first = max(safe + 1, log.last_index + 1 - (number if step else 0))
            entries = [make_entry(0, first + offset, term, EntryKind.COMMANDS, b"x" * (number + 1)) for offset in range(1 + number % 3)]
            log.append(entries)
            model = {index: entry for index, entry in model.items() if index < first} | {entry.index: entry for entry in entries}
        elif move == "write":
            flights.append(log.take_unwritten())
        elif move == "persist" and flights:
            log.persisted()
            disk |= {entry.index: entry for entry in flights.pop(0)}
            safe = max(safe, log.durable - number)
        elif move == "compact" and safe > log.start_index:
            log.compact(min(safe, log.start_index + number))
        elif move == "evict":
            log.evict(safe, number)
        log.check()
        assert log.last_index == max(model, default=10)
        for index in range(log.start_index + 1, log.durable + 1):
            assert disk[index] == model[index], "durable means that the disk holds this very entry"
        held = [model[index] for index in range(log.start_index + 1, log.last_index + 1)]
        got: list[Entry] = []
        while len(got) < len(held):
            got += log.slice(log.start_index + 1 + len(got), log.last_index)
        assert got == held
        for index in range(log.start_index + 1, log.last_index + 2):
            assert log.term(index) == (model[index].term if index in model else None)
    assert log.term(log.start_index - 1) is None


@given(runs=st.lists(st.integers(1, 3), min_size=1, max_size=6), index=st.integers(0, 20), term=st.integers(0, 8))
def test_a_hint_is_what_walking_back_finds(runs: list[int], index: int, term: int) -> None:
    terms = [position + 1 for position, length in enumerate(runs) for _ in range(length)]
    log = Log(0, 0, [make_entry(0, at + 1, value, EntryKind.EMPTY) for at, value in enumerate(terms)])
    expected = min(index, len(terms))
    while expected and terms[expected - 1] > term:
        expected -= 1
    assert log.hint_by_term(index, term) == (expected, terms[expected - 1] if expected else 0)


def test_a_slice_ends_where_the_bytes_do_but_is_never_empty() -> None:
    log = Log(0, 0, [make_entry(0, index, 1, EntryKind.COMMANDS, b"x" * 10) for index in range(1, 6)])
    assert [entry.index for entry in log.slice(1, 5, 25)] == [1, 2]
    assert [entry.index for entry in log.slice(2, 5, 1)] == [2]
    assert len(log.slice(1, 5, 0)) == 5
    assert log.slice(6, 5) == ()


@pytest.mark.parametrize("entries", [[(3, 1)], [(1, 2), (2, 1)], [(1, 1), (3, 1)]], ids=["gap", "falling term", "hole"])
def test_a_log_refuses_what_does_not_fit(entries: list[tuple[int, int]]) -> None:
    with pytest.raises(RaftFault):
        Log(0, 0).append([make_entry(0, index, term, EntryKind.EMPTY) for index, term in entries])


# ---- messages

CONF = make_configuration([1, 2], outgoing=[1, 3], learners=[4], learners_next=[3], auto_leave=True)
ENTRY = make_entry(7, 12, 3, EntryKind.COMMANDS, b"\x00payload")
MESSAGES: list[AnyMessage] = [
    VoteRequest(7, 1, 2, 3, 11, 2, True, 9, 2),
    PreVoteRequest(7, 1, 2, 4, 11, 2),
    VoteResponse(7, 2, 1, 3, True, 9, 2),
    PreVoteResponse(7, 2, 1, 4),
    Append(7, 1, 2, 3, 11, 2, (ENTRY,), 9),
    AppendResponse(7, 2, 1, 3, 11, True, 10, 2),
    Heartbeat(7, 1, 2, 3, 9, 5),
    HeartbeatResponse(7, 2, 1, 3, 5),
    InstallSnapshot(7, 1, 2, 3, 11, 2, CONF, 1),
    TimeoutNow(7, 1, 2, 3),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire_as_an_array(message: AnyMessage) -> None:
    data = encode_message(message)
    assert decode_message(data) == message
    assert isinstance(msgspec.msgpack.decode(data), list)


@given(data=st.binary(max_size=40))
def test_garbage_is_refused_and_nothing_else_happens(data: bytes) -> None:
    with suppress(msgspec.DecodeError, msgspec.ValidationError):
        decode_message(data)


def test_an_older_peer_may_leave_out_the_last_fields() -> None:
    short = msgspec.msgpack.encode([7, 7, 1, 2, 3, 9])
    assert decode_message(short) == Heartbeat(7, 1, 2, 3, 9, 0)


def test_a_checksum_belongs_to_group_place_and_content() -> None:
    assert is_sound(7, ENTRY)
    assert not is_sound(8, ENTRY)
    for wrong in ({"index": 13}, {"term": 4}, {"kind": EntryKind.CONFIGURATION}, {"payload": b"\x00payloae"}):
        assert not is_sound(7, msgspec.structs.replace(ENTRY, **wrong))


def test_a_change_survives_the_log() -> None:
    change = ConfChange(Step.ENTER_JOINT_AUTO, (Change(ChangeKind.ADD_VOTER, 4), Change(ChangeKind.REMOVE, 1)))
    assert decode_change(encode_change(change)) == change


# ---- the core, where the vectors have no words for it


def test_many_reads_of_a_turn_cost_one_round() -> None:
    core = a_leader()
    for number in range(100):
        assert core.read_index(number) is Answer.ACCEPTED
    beats = [message for message in handle(core) if isinstance(message, Heartbeat)]
    assert [(beat.to, beat.read_seq) for beat in beats] == [(2, 100), (3, 100)]
    core.step(HeartbeatResponse(0, 2, 1, 1, 100))
    ready = core.take_ready()
    assert ready is not None
    assert [(read.ctx, read.index) for read in ready.reads] == [(number, 1) for number in range(100)]


def test_a_late_answer_confirms_no_later_read_of_the_same_context() -> None:
    """etcd #20418: contexts are the caller's business and are never compared."""
    core = a_leader()
    core.read_index("same")
    handle(core)
    core.step(HeartbeatResponse(0, 2, 1, 1, 1))
    handle(core)
    core.read_index("same")
    handle(core)
    core.step(HeartbeatResponse(0, 3, 1, 1, 1))
    assert core.status().waiting_reads == 1
    core.step(HeartbeatResponse(0, 3, 1, 1, 2))
    assert core.status().waiting_reads == 0


def test_reads_die_with_the_leadership() -> None:
    core = a_leader()
    core.read_index("r")
    handle(core)
    core.step(Heartbeat(0, 2, 1, 2))
    core.step(HeartbeatResponse(0, 3, 1, 2, 1))
    ready = core.take_ready()
    assert ready is not None and not ready.reads
    assert core.read_index("s") is Answer.NOT_LEADER


def test_appends_keep_to_message_and_window_limits() -> None:
    config = replace(TEST_CONFIG, max_msg_bytes=100, max_inflight_bytes=250)
    core = a_leader(voters=(1, 2), config=config)
    core.propose([b"x" * 40] * 20)
    appends = [message for message in handle(core) if isinstance(message, Append) and message.entries]
    # The broadcast sends one; the others follow with the answers, two entries each, three in flight.
    assert [len(append.entries) for append in appends] == [2]
    sent = list(appends)
    for _ in range(12):
        core.step(AppendResponse(0, 2, 1, 1, sent[-1].prev_index + len(sent[-1].entries)))
        sent += [message for message in handle(core) if isinstance(message, Append) and message.entries]
    assert all(len(append.entries) <= 2 for append in sent)
    assert sum(len(append.entries) for append in sent) == 20
    assert all(a.prev_index + len(a.entries) == b.prev_index for a, b in pairwise(sent))


def test_a_peer_far_behind_is_served_from_the_reader() -> None:
    """Applied entries leave memory; what an old peer needs comes back in chunks."""
    stored: dict[int, Entry] = {}
    config = replace(TEST_CONFIG, cache_bytes=100, max_inflight=4)
    reader_calls: list[tuple[int, int]] = []

    def read(first: int, last: int) -> list[Entry]:
        reader_calls.append((first, last))
        return [stored[index] for index in range(first, last + 1)]

    core = Raft(1, config, RestoredState(make_configuration([1, 2, 3])), random.Random(1), reader=read)

    def work() -> list[Append]:
        appends: list[Append] = []
        while (ready := core.take_ready()) is not None:
            stored.update({entry.index: entry for entry in ready.entries})
            core.persisted(ready)
            for entry in ready.committed:
                core.applied(entry.index)
            appends += [message for message in ready.now if isinstance(message, Append) and message.to == 3]
        return appends

    core.campaign()
    work()
    core.step(VoteResponse(0, 2, 1, 1))
    work()
    for index in range(1, 200):
        core.step(AppendResponse(0, 2, 1, 1, index))
        core.propose([b"x" * 10])
        work()
    core.step(AppendResponse(0, 2, 1, 1, 200))
    work()
    assert core.log.cached_bytes <= 100 and not core.log.is_cached(100)
    held: list[Entry] = []
    core.step(HeartbeatResponse(0, 3, 1, 1))
    for _ in range(200):
        appends = work()
        for append in appends:
            if append.prev_index == len(held):
                held += append.entries
        if len(held) == 200:
            break
        core.step(AppendResponse(0, 3, 1, 1, len(held)))
    assert [entry.index for entry in held] == list(range(1, 201))
    assert reader_calls and all(last - first < 64 for first, last in reader_calls)


def test_a_restart_needs_only_the_tail_in_memory() -> None:
    entries = [make_entry(0, index, 3, EntryKind.COMMANDS, b"x") for index in range(15, 18)]
    restored = RestoredState(
        make_configuration([1]), snapshot_index=10, snapshot_term=1, entries=entries, older_terms=[(11, 1), (13, 2)], term=3,
        commit=16, applied=14,
    )  # fmt: skip
    core = Raft(1, TEST_CONFIG, restored, random.Random(1), reader=lambda first, last: [])
    assert [core.log.term(index) for index in range(9, 19)] == [None, 1, 1, 1, 2, 2, 3, 3, 3, None]
    ready = core.take_ready()
    assert ready is not None and [entry.index for entry in ready.committed] == [15, 16] and not ready.must_sync


def test_a_restart_without_the_unapplied_entries_is_refused() -> None:
    entries = [make_entry(0, index, 3, EntryKind.COMMANDS, b"x") for index in range(15, 18)]
    restored = RestoredState(make_configuration([1]), entries=entries, older_terms=[(1, 2)], term=3, commit=16, applied=9)
    with pytest.raises(RaftFault, match="unapplied_entries_are_given"):
        Raft(1, TEST_CONFIG, restored, random.Random(1), reader=lambda first, last: [])


def test_a_snapshot_overtakes_entries_that_wait_to_be_applied() -> None:
    """They were handed out before it came; the driver skips them, and their late `applied` changes nothing."""
    core = a_core()
    core.step(Append(0, 2, 1, 1, 0, 0, tuple(make_entry(0, index, 1, EntryKind.COMMANDS) for index in (1, 2)), 2))
    first = core.take_ready()
    assert first is not None and not first.committed
    core.persisted(first)
    second = core.take_ready()
    assert second is not None and [entry.index for entry in second.committed] == [1, 2]
    core.step(InstallSnapshot(0, 2, 1, 1, 10, 1, make_configuration([1, 2, 3, 4])))
    third = core.take_ready()
    assert third is not None and third.snapshot is not None and third.must_sync and core.is_installing
    core.step(Append(0, 2, 1, 1, 10, 1, (make_entry(0, 11, 1, EntryKind.COMMANDS),), 11))
    fourth = core.take_ready()
    assert fourth is not None and not fourth.committed
    core.persisted(second)
    core.applied(1)
    core.persisted(third)
    assert (core.applied_index, core.status().configuration.voters, core.is_installing) == (10, (1, 2, 3, 4), False)
    core.applied(2)
    assert core.applied_index == 10
    core.persisted(fourth)
    fifth = core.take_ready()
    assert fifth is not None and [entry.index for entry in fifth.committed] == [11]


def test_persisted_comes_in_order() -> None:
    core = a_leader()
    core.propose([b"a"])
    first = core.take_ready()
    core.propose([b"b"])
    second = core.take_ready()
    assert first is not None and second is not None
    with pytest.raises(RaftFault, match="persisted_in_order"):
        core.persisted(second)


def test_a_commit_index_alone_forces_no_sync() -> None:
    core = a_leader()
    core.propose([b"a"])
    first = core.take_ready()
    assert first is not None and first.must_sync
    core.persisted(first)
    core.step(AppendResponse(0, 2, 1, 1, 2))
    second = core.take_ready()
    assert second is not None and second.hard_state is not None and second.hard_state.commit == 2 and not second.must_sync
    assert [entry.payload for entry in second.committed] == [b"a"]


def test_two_leaders_in_a_term_stop_the_node() -> None:
    core = a_leader()
    with pytest.raises(RaftFault, match="one_leader_per_term"):
        core.step(Heartbeat(0, 2, 1, core.term))


def test_an_acknowledgement_of_more_than_was_sent_stops_the_node() -> None:
    core = a_leader()
    with pytest.raises(RaftFault, match="acknowledged_was_sent"):
        core.step(AppendResponse(0, 2, 1, core.term, 9))


def test_applying_what_was_not_handed_out_stops_the_node() -> None:
    core = a_leader()
    with pytest.raises(RaftFault, match="applies_what_was_handed_out"):
        core.applied(5)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="heartbeat_tick 10"):
        RaftConfig(heartbeat_tick=10)
    with pytest.raises(ValueError, match="max_inflight 0"):
        RaftConfig(max_inflight=0)
    with pytest.raises(ValueError, match="check_quorum"):
        RaftConfig(read_mode=ReadMode.LEASE, check_quorum=False)
