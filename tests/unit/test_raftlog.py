"""The Raft logs of all groups as rows: what is added is read back, and what does not fit together is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wheelsched.core.invariants import InvariantBroken
from wheelsched.model.keys import META_GROUP, RAFT_LOG, RAFT_META, group_prefix, log_key
from wheelsched.model.rows import GroupState
from wheelsched.raft import EntryKind, make_entry
from wheelsched.store import StoreCorrupt
from wheelsched.store import raftlog as module
from wheelsched.store.memory import MemoryStore
from wheelsched.store.raftlog import FIRST_INDEX, FIRST_TERM, HardState, LogEntry, Puts, RaftLog

GROUPS = (0, 1, 31, META_GROUP)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def an_entry(index: int, term: int = 1, payload: bytes | None = None) -> LogEntry:
    return LogEntry(index, term, kind=1, payload=b"entry %d" % index if payload is None else payload)


def append(store: MemoryStore, log: RaftLog, group: int, *entries: LogEntry, commit: bool = True) -> None:
    puts: Puts = {}
    for entry in entries:
        log.add(puts, group, entry, commit=entry.index if commit else None)
    store.write(puts)


def apply_to(store: MemoryStore, log: RaftLog, group: int, index: int) -> None:
    puts: Puts = {}
    state = log.group_state(group)
    state.applied_index, state.watermark_ms = index, index * 1_000
    log.add_group_state(puts, group, state)
    store.write(puts)


def flip(store: MemoryStore, family: str, key: bytes, position: int) -> None:
    row = bytearray(store.get(family, key) or b"")
    row[position] ^= 0x10
    store.write({family: {key: bytes(row)}})


def test_a_commit_index_that_was_noted_is_in_the_next_hard_state(store: MemoryStore) -> None:
    log = RaftLog(store, GROUPS)
    append(store, log, 1, an_entry(11), an_entry(12), commit=False)
    log.note_commit(1, 12)
    assert log.hard_state(1).commit == 12 and RaftLog(store, GROUPS).hard_state(1).commit == FIRST_INDEX
    with pytest.raises(InvariantBroken):
        log.note_commit(1, 13)
    append(store, log, 1, an_entry(13), commit=False)
    assert RaftLog(store, GROUPS).hard_state(1).commit == 12


def test_a_group_that_is_joined_starts_before_everything_the_others_have(store: MemoryStore) -> None:
    log = RaftLog(store, GROUPS, joining=(1,))
    assert (log.first_index(1), log.last_index(1), log.term(1, 0)) == (1, 0, 0)
    assert log.hard_state(1) == HardState(term=0, vote=0, commit=0)
    assert log.first_index(0) == FIRST_INDEX + 1
    append(store, log, 0, an_entry(11))
    again = RaftLog(store, GROUPS, joining=GROUPS)
    assert again.last_index(0) == 11 and again.last_index(1) == 0, "what is there stays"


def test_entries_of_the_core_are_the_same_rows_and_replace_a_tail(store: MemoryStore) -> None:
    log = RaftLog(store, GROUPS)
    puts: Puts = {}
    log.append(puts, 1, [make_entry(1, index, 2, EntryKind.COMMANDS, b"%d" % index) for index in range(11, 16)])
    log.add_hard_state(puts, 1, HardState(2, 0, FIRST_INDEX))
    store.write(puts)
    puts = {}
    log.append(puts, 1, [make_entry(1, 13, 3, EntryKind.COMMANDS, b"new")])
    log.add_hard_state(puts, 1, HardState(3, 0, FIRST_INDEX))
    store.write(puts)
    for read in (log, RaftLog(store, GROUPS)):
        assert [(entry.index, entry.term, entry.payload) for entry in read.read(1, 11, 13)] == [
            (11, 2, b"11"), (12, 2, b"12"), (13, 3, b"new"),
        ]  # fmt: skip
        assert read.last_index(1) == 13 and read.term_runs(1, 11, 13) == [(11, 2), (13, 3)]
    assert store.get(RAFT_LOG, log_key(1, 14)) is None
    with pytest.raises(InvariantBroken):
        log.append({}, 1, [make_entry(1, 15, 3, EntryKind.COMMANDS)])


@pytest.mark.parametrize("terms", [[2], [2] * 50, [2, 3, 4, 5, 6], [2] * 7 + [5] * 30 + [6] + [9] * 11])
def test_stretches_of_one_term_are_found_by_halving(store: MemoryStore, terms: list[int]) -> None:
    log = RaftLog(store, GROUPS)
    append(store, log, 0, *(an_entry(11 + place, term) for place, term in enumerate(terms)))
    wanted = [(11 + place, term) for place, term in enumerate(terms) if not place or terms[place - 1] != term]
    last = log.last_index(0)
    assert log.term_runs(0, 11, last) == wanted
    assert log.term_runs(0, 11, 10) == []


def test_an_installed_snapshot_is_the_start_of_the_log(store: MemoryStore) -> None:
    log = RaftLog(store, GROUPS)
    append(store, log, 1, *(an_entry(index, 2) for index in range(11, 20)))
    puts: Puts = {}
    log.add_installing(puts, 1, b"what it is")
    store.write(puts)
    assert RaftLog(store, GROUPS).installing(1) == b"what it is" and log.installing(0) is None
    puts, ranges = {}, []
    log.install(puts, ranges, 1, GroupState(applied_index=50, applied_term=3), HardState(4, 2, 50), b"members")
    store.write(puts, ranges)
    for read in (log, RaftLog(store, GROUPS)):
        assert (read.first_index(1), read.last_index(1), read.term(1, 50)) == (51, 50, 3)
        assert read.hard_state(1) == HardState(4, 2, 50) and read.group_state(1).applied_index == 50
        assert read.configuration(1) == b"members" and read.configuration(0) is None and read.installing(1) is None
    assert store.scan(RAFT_LOG, log_key(1, 0), log_key(2, 0), 10) == []
    flip(store, RAFT_META, b"C" + group_prefix(1), 0)
    with pytest.raises(StoreCorrupt):
        log.configuration(1)
    with pytest.raises(InvariantBroken):
        log.install({}, [], 1, GroupState(applied_index=50, applied_term=3), HardState(4, 2, 50), b"")


def test_a_blank_group_starts_behind_a_snapshot(store: MemoryStore) -> None:
    for log in (RaftLog(store, GROUPS), RaftLog(store, GROUPS)):
        for group in GROUPS:
            assert (log.first_index(group), log.last_index(group)) == (FIRST_INDEX + 1, FIRST_INDEX)
            assert log.term(group, FIRST_INDEX) == FIRST_TERM
            assert log.hard_state(group) == HardState(term=1, vote=0, commit=FIRST_INDEX)
            assert log.group_state(group).applied_index == FIRST_INDEX


def test_what_was_added_is_there_after_a_restart(store: MemoryStore) -> None:
    entries = [an_entry(11), an_entry(12, payload=b""), an_entry(13, term=3, payload=b"x" * 100_000)]
    first = RaftLog(store, GROUPS)
    append(store, first, 31, *entries)
    append(store, first, META_GROUP, an_entry(11, term=2))
    apply_to(store, first, 31, 12)
    log = RaftLog(store, GROUPS)
    assert log.read(31, 11, 13) == entries and log.read(31, 12, 12) == entries[1:2]
    assert [log.term(31, index) for index in (10, 11, 12, 13)] == [1, 1, 1, 3]
    assert log.hard_state(31) == HardState(term=3, vote=0, commit=13)
    assert log.group_state(31).watermark_ms == 12_000
    assert (log.last_index(0), log.last_index(META_GROUP), log.term(META_GROUP, 11)) == (10, 11, 2)


def test_a_restart_after_everything_was_applied_knows_the_last_term(store: MemoryStore) -> None:
    log = RaftLog(store, [0])
    append(store, log, 0, an_entry(11, term=7))
    apply_to(store, log, 0, 11)
    assert RaftLog(store, [0]).term(0, 11) == 7


def test_a_vote_is_kept_within_its_term_and_gone_in_the_next(store: MemoryStore) -> None:
    log = RaftLog(store, [0])
    puts: Puts = {}
    log.add_hard_state(puts, 0, HardState(term=4, vote=2, commit=10))
    log.add(puts, 0, an_entry(11, term=1))
    store.write(puts)
    log = RaftLog(store, [0])
    assert log.hard_state(0) == HardState(term=4, vote=2, commit=10), "an old entry does not touch the current term"
    append(store, log, 0, an_entry(12, term=5), commit=False)
    assert log.hard_state(0) == HardState(term=5, vote=0, commit=10)


def test_a_conflicting_tail_is_replaced_in_one_batch(store: MemoryStore) -> None:
    log = RaftLog(store, [0])
    append(store, log, 0, *(an_entry(index) for index in range(11, 16)), commit=False)
    append(store, log, 0, an_entry(12, term=2, payload=b"new"), commit=False)
    assert log.last_index(0) == 12
    assert store.get(RAFT_LOG, log_key(0, 13)) is None
    again = RaftLog(store, [0])
    assert again.last_index(0) == 12 and again.read(0, 12, 12)[0].payload == b"new"


def test_what_was_committed_is_never_replaced(store: MemoryStore) -> None:
    log = RaftLog(store, [0])
    append(store, log, 0, an_entry(11), an_entry(12))
    with pytest.raises(InvariantBroken, match="log_grows_by_one"):
        log.add({}, 0, an_entry(12, term=2))


@pytest.mark.parametrize(("index", "term", "name"), [(12, 2, "log_grows_by_one"), (11, 0, "term_never_falls")])
def test_a_gap_or_a_falling_term_is_a_bug(store: MemoryStore, index: int, term: int, name: str) -> None:
    with pytest.raises(InvariantBroken, match=name):
        RaftLog(store, [0]).add({}, 0, an_entry(index, term=term))


def test_nothing_is_applied_that_is_not_in_the_log(store: MemoryStore) -> None:
    log = RaftLog(store, [0])
    state = log.group_state(0)
    state.applied_index = 11
    with pytest.raises(InvariantBroken, match="applied_never_falls"):
        log.add_group_state({}, 0, state)


@pytest.mark.parametrize("position", [0, 8, 9, 13, 20])
def test_a_flipped_bit_in_an_entry_is_found(store: MemoryStore, position: int) -> None:
    """In term, kind, checksum and payload; when read and, behind the applied index, when the log is loaded."""
    log = RaftLog(store, [0])
    append(store, log, 0, an_entry(11), an_entry(12), an_entry(13))
    flip(store, RAFT_LOG, log_key(0, 12), position)
    with pytest.raises(StoreCorrupt, match="entry 12 does not match"):
        log.read(0, 11, 13)
    with pytest.raises(StoreCorrupt, match=r"group 0 .* entry 12"):
        RaftLog(store, [0])


def test_an_entry_in_the_place_of_another_is_found(store: MemoryStore) -> None:
    """The checksum covers group and index, so that a whole row in the wrong place does not pass."""
    log = RaftLog(store, [0, 1])
    append(store, log, 0, an_entry(11, payload=b"same"), an_entry(12, payload=b"same"))
    store.write({RAFT_LOG: {log_key(0, 12): store.get(RAFT_LOG, log_key(0, 11))}})
    with pytest.raises(StoreCorrupt, match="entry 12"):
        log.read(0, 12, 12)


def test_a_missing_entry_is_found(store: MemoryStore) -> None:
    log = RaftLog(store, [0])
    append(store, log, 0, an_entry(11), an_entry(12), an_entry(13))
    store.write({RAFT_LOG: {log_key(0, 12): None}})
    with pytest.raises(StoreCorrupt, match="entry 12 is missing"):
        RaftLog(store, [0])
    with pytest.raises(StoreCorrupt, match="entry 12 is missing"):
        log.read(0, 11, 13)


@pytest.mark.parametrize("letter", [b"H", b"T"])
def test_a_flipped_bit_in_what_is_known_of_a_log_is_found(store: MemoryStore, letter: bytes) -> None:
    RaftLog(store, [7])
    flip(store, RAFT_META, letter + b"\0\x07", 3)
    with pytest.raises(StoreCorrupt, match=f"group 7 .* row {letter.decode()}"):
        RaftLog(store, [7])


@pytest.mark.parametrize("letter", [b"H", b"T", b"A"])
def test_a_missing_row_of_a_group_is_not_taken_for_a_blank_group(store: MemoryStore, letter: bytes) -> None:
    RaftLog(store, [7])
    store.write({RAFT_META: {letter + b"\0\x07": None}})
    with pytest.raises(StoreCorrupt, match=f"row {letter.decode()} of raft_meta is missing"):
        RaftLog(store, [7])


def test_entries_without_anything_known_of_them_are_refused(store: MemoryStore) -> None:
    append(store, RaftLog(store, [0]), 0, an_entry(11))
    store.write({}, [(RAFT_META, b"", b"")])
    with pytest.raises(StoreCorrupt, match="no rows in raft_meta"):
        RaftLog(store, [0])


def test_state_ahead_of_its_log_is_refused(store: MemoryStore) -> None:
    """As after etcd 3.5.0: rows and applied index that parted from the log they came from."""
    log = RaftLog(store, [0])
    hard = store.get(RAFT_META, b"H\0\0")
    append(store, log, 0, an_entry(11))
    apply_to(store, log, 0, 11)
    store.write({RAFT_META: {b"H\0\0": hard}})
    with pytest.raises(StoreCorrupt, match="applied 11"):
        RaftLog(store, [0])


@pytest.mark.parametrize("group", [0, META_GROUP])
def test_leftovers_behind_the_last_index_are_cut(store: MemoryStore, group: int) -> None:
    log = RaftLog(store, [0, 1, META_GROUP])
    append(store, log, 1, an_entry(11))
    append(store, log, group, an_entry(11))
    row = store.get(RAFT_LOG, log_key(group, 11))
    store.write({RAFT_LOG: {log_key(group, 12): row, log_key(group, 20): row}})
    again = RaftLog(store, [0, 1, META_GROUP])
    assert again.last_index(group) == 11
    assert store.get(RAFT_LOG, log_key(group, 12)) is None and store.get(RAFT_LOG, log_key(group, 20)) is None
    assert again.read(group, 11, 11) and again.read(1, 11, 11), "neighbours stay"


def test_compaction_drops_the_head_and_remembers_its_term(store: MemoryStore) -> None:
    log = RaftLog(store, [0, 1])
    append(store, log, 1, an_entry(11))
    append(store, log, 0, *(an_entry(index, term=1 + index // 15) for index in range(11, 31)))
    apply_to(store, log, 0, 25)
    ranges, puts = log.compact(0, 20)
    store.write(puts, ranges)
    for seen in (log, RaftLog(store, [0, 1])):
        assert (seen.first_index(0), seen.last_index(0), seen.term(0, 20)) == (21, 30, 2)
        assert [entry.index for entry in seen.read(0, 21, 30)] == list(range(21, 31))
        assert seen.read(1, 11, 11)
    assert store.get(RAFT_LOG, log_key(0, 20)) is None
    assert log.compact(0, 20) == ([], {}), "dropped already"


def test_compaction_never_passes_what_was_applied(store: MemoryStore) -> None:
    log = RaftLog(store, [0])
    append(store, log, 0, an_entry(11), an_entry(12))
    apply_to(store, log, 0, 11)
    with pytest.raises(InvariantBroken, match="compacts_applied_only"):
        log.compact(0, 12)


def test_a_log_that_was_dropped_whole_goes_on(store: MemoryStore) -> None:
    log = RaftLog(store, [0])
    append(store, log, 0, an_entry(11))
    apply_to(store, log, 0, 11)
    ranges, puts = log.compact(0, 11)
    store.write(puts, ranges)
    log = RaftLog(store, [0])
    assert (log.first_index(0), log.last_index(0)) == (12, 11)
    append(store, log, 0, an_entry(12, term=2))
    assert RaftLog(store, [0]).read(0, 12, 12) == [an_entry(12, term=2)]


def test_compaction_is_due_by_entries_and_by_bytes(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPACT_ENTRIES", 10)
    monkeypatch.setattr(module, "COMPACT_BYTES", 10_000)
    log = RaftLog(store, [0])
    append(store, log, 0, *(an_entry(index) for index in range(11, 25)))
    assert not log.due_for_compaction(0, 20) and log.due_for_compaction(0, 21)
    append(store, log, 0, an_entry(25, payload=b"x" * 10_000))
    assert log.due_for_compaction(0, 11) and not log.due_for_compaction(0, 10)
    apply_to(store, log, 0, 25)
    ranges, puts = log.compact(0, 25)
    store.write(puts, ranges)
    assert not log.due_for_compaction(0, 25)


async def test_a_crash_rolls_entries_and_state_back_together(store: MemoryStore) -> None:
    """B-070: state and log are of one write-ahead log, so no cut leaves one without the other."""
    log = RaftLog(store, [0])
    append(store, log, 0, an_entry(11))
    await store.sync()
    append(store, log, 0, an_entry(12))
    apply_to(store, log, 0, 12)
    after = RaftLog(store.crash(), [0])
    assert after.last_index(0) == 11 and after.group_state(0).applied_index == 10
    assert after.hard_state(0) == replace(after.hard_state(0), commit=11)
