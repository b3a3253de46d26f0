"""The Raft logs of all groups, as rows of one store: `raft_log` holds entries, `raft_meta` what is known about each log.

    raft_log   group, index    term, kind, crc, payload
    raft_meta  H group         hard state: term, vote, commit, last index, crc
    raft_meta  T group         log start: index and term of the last entry that was dropped (or came as a snapshot), crc
    raft_meta  A group         GroupState (model/rows.py), in the same batch as the rows it describes

`H` names the last index, so a log ends where its last append said, and nowhere else. Nothing here writes: callers get rows and
ranges for a batch of theirs, and what this object remembers is ahead of the disk until they wrote it. So: no decision about a
log between `add` or `compact` and the write of their rows, and a write that fails ends the process.

Every group starts behind a snapshot at index 10, term 1, so that a blank node can join by snapshot only (RAFT.md 3.18).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import structlog

from wheelsched.core.invariants import invariant
from wheelsched.model.keys import RAFT_LOG, RAFT_META, group_prefix, log_key, prefix_end
from wheelsched.model.rows import GroupState, decode_group, encode_row
from wheelsched.store import Store
from wheelsched.store.errors import StoreCorrupt

log = structlog.get_logger()

FIRST_INDEX, FIRST_TERM = 10, 1  # of the snapshot that every log starts behind
COMPACT_ENTRIES, COMPACT_BYTES = 20_000, 64 * 1024 * 1024

Puts = dict[str, dict[bytes, bytes | None]]
Ranges = list[tuple[str, bytes, bytes]]

_ENTRY = struct.Struct(">QBI")  # term, kind, crc
_ENTRY_CRC = struct.Struct(">HQQB")  # group, index, term, kind
_HARD = struct.Struct(">QQQQ")  # term, vote, commit, last index
_START = struct.Struct(">QQ")  # index, term
_CRC = struct.Struct(">I")
_ENTRY_SIZE = _ENTRY.size


@dataclass(frozen=True, slots=True)
class LogEntry:
    """`kind` and `payload` are opaque here."""

    index: int
    term: int
    kind: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class HardState:
    """What a replica promised. `vote`: raft id, 0 for none. `commit` may lag behind what was committed, never run ahead."""

    term: int
    vote: int
    commit: int


@dataclass(slots=True)
class _Group:
    start_index: int
    start_term: int
    last_index: int
    last_term: int
    hard: HardState
    applied_index: int
    bytes_held: int = 0  # of entries after the start, as far as this process read or wrote them


class RaftLog:
    """The logs of `groups` in `store`. Raises `StoreCorrupt` where a log does not fit together."""

    def __init__(self, store: Store, groups: Sequence[int]) -> None:
        """Load every group, making the blank ones. Reads the entries after the applied index: some ms for 20,000 of them."""
        self._store = store
        self._groups: dict[int, _Group] = {}
        puts: Puts = {}
        ranges: Ranges = []
        for group in groups:
            self._groups[group] = self._load(group, puts, ranges)
        if puts or ranges:
            store.write(puts, ranges)

    # ---- what is there

    def first_index(self, group: int) -> int:
        """Index of the first entry held, or that the next one will get."""
        return self._groups[group].start_index + 1

    def last_index(self, group: int) -> int:
        """Index of the last entry; `first_index - 1` where none is held."""
        return self._groups[group].last_index

    def hard_state(self, group: int) -> HardState:
        return self._groups[group].hard

    def term(self, group: int, index: int) -> int:
        """Term of an entry from `first_index - 1` (the log's start) to `last_index`. Free at both ends, else one get."""
        state = self._groups[group]
        if index == state.start_index:
            return state.start_term
        if index == state.last_index:
            return state.last_term
        assert state.start_index < index < state.last_index, (group, index)
        return _decode(group, index, self._store.get(RAFT_LOG, log_key(group, index))).term

    def read(self, group: int, from_index: int, to_index: int) -> list[LogEntry]:
        """Entries from_index to to_index, both included, CRC checked. 8 µs and 2 to 5 µs an entry; the caller bounds how many.

        Raises StoreCorrupt where one is missing or wrong."""
        state = self._groups[group]
        assert state.start_index < from_index and to_index <= state.last_index, (group, from_index, to_index)
        start, end = log_key(group, from_index), log_key(group, to_index + 1)
        rows = dict(self._store.scan(RAFT_LOG, start, end, to_index + 1 - from_index))
        return [_decode(group, index, rows.get(log_key(group, index))) for index in range(from_index, to_index + 1)]

    def group_state(self, group: int) -> GroupState:
        """The row `A`, as last written."""
        row = self._store.get(RAFT_META, _meta_key(b"A", group))
        if row is None:
            raise StoreCorrupt(_fault(group, "its row A is missing"))
        return decode_group(row)

    # ---- what is to be written

    def add(self, puts: Puts, group: int, entry: LogEntry, *, commit: int | None = None) -> None:
        """Put the rows of an entry and the hard state that goes with it into a batch; 5 to 10 µs.

        An entry at or below the last index replaces the tail from there; never one that is committed. `commit` moves the commit
        index along; a single node passes `entry.index`, for here an entry is durable and committed by the same sync."""
        state = self._groups[group]
        index, hard = entry.index, state.hard
        invariant(
            hard.commit < index <= state.last_index + 1, "log_grows_by_one", group=group, index=index, last=state.last_index
        )
        if index > state.last_index:
            invariant(entry.term >= state.last_term, "term_never_falls", group=group, term=entry.term, last_term=state.last_term)
        rows = puts.setdefault(RAFT_LOG, {})
        for replaced in range(index + 1, state.last_index + 1):
            rows[log_key(group, replaced)] = None
        row = _encode(group, entry)
        rows[log_key(group, index)] = row
        state.last_index, state.last_term = index, entry.term
        state.bytes_held += len(row)
        # Entries of older terms come in while a new leader brings a follower up to date: the current term stays.
        term, vote = (entry.term, 0) if entry.term > hard.term else (hard.term, hard.vote)
        self.add_hard_state(puts, group, HardState(term, vote, hard.commit if commit is None else commit))

    def add_hard_state(self, puts: Puts, group: int, hard: HardState) -> None:
        """Put the row `H` into a batch. A new term or vote has to be synced before it is told; a new commit index need not."""
        state = self._groups[group]
        before = state.hard
        invariant(hard.term >= before.term and hard.commit >= before.commit, "hard_state_never_falls", group=group, hard=hard)
        invariant(hard.commit <= state.last_index, "commit_is_held", group=group, commit=hard.commit, last=state.last_index)
        state.hard = hard
        row = _HARD.pack(hard.term, hard.vote, hard.commit, state.last_index)
        _put_sealed(puts.setdefault(RAFT_META, {}), b"H", group, row)

    def add_group_state(self, puts: Puts, group: int, group_state: GroupState) -> None:
        """Put the row `A` into the batch that holds the rows it describes: a crash then rolls both back together."""
        state = self._groups[group]
        invariant(
            state.applied_index <= group_state.applied_index <= state.last_index, "applied_never_falls",
            group=group, before=state.applied_index, applied=group_state.applied_index, last=state.last_index,
        )  # fmt: skip
        state.applied_index = group_state.applied_index
        puts.setdefault(RAFT_META, {})[_meta_key(b"A", group)] = encode_row(group_state)

    # ---- compaction

    def due_for_compaction(self, group: int, applied_index: int) -> bool:
        """Whether more than 20,000 applied entries, or about 64 MiB, are held. O(1).

        Entries from before this process count in number, not in bytes: nobody read them."""
        state = self._groups[group]
        return applied_index - state.start_index > COMPACT_ENTRIES or (
            state.bytes_held > COMPACT_BYTES and applied_index > state.start_index
        )

    def compact(self, group: int, up_to_index: int) -> tuple[Ranges, Puts]:
        """(ranges, puts) that drop the entries up to an index, itself included, for one `store.write`. Never past applied."""
        state = self._groups[group]
        invariant(up_to_index <= state.applied_index, "compacts_applied_only", group=group, index=up_to_index)
        if up_to_index <= state.start_index:
            return [], {}
        term = self.term(group, up_to_index)
        # From the group's beginning: one wide range each time, instead of a growing row of neighbours.
        ranges = [(RAFT_LOG, log_key(group, 0), log_key(group, up_to_index + 1))]
        left, held = state.last_index - up_to_index, state.last_index - state.start_index
        state.bytes_held = state.bytes_held * left // held
        state.start_index, state.start_term = up_to_index, term
        rows: dict[bytes, bytes | None] = {}
        _put_sealed(rows, b"T", group, _START.pack(up_to_index, term))
        return ranges, {RAFT_META: rows}

    # ---- loading

    def _load(self, group: int, puts: Puts, ranges: Ranges) -> _Group:
        """Read a group's rows and check them against each other; leftovers to delete and first rows go to the batch."""
        names = [_meta_key(letter, group) for letter in (b"T", b"H", b"A")]
        start_row, hard_row, applied_row = self._store.multiget(RAFT_META, names)
        if start_row is None and hard_row is None and applied_row is None:
            return self._make(group, puts)
        if start_row is None or hard_row is None or applied_row is None:
            missing = [name for name, row in zip("THA", (start_row, hard_row, applied_row), strict=True) if row is None]
            raise StoreCorrupt(_fault(group, f"row {' and '.join(missing)} of raft_meta is missing"))
        start_index, start_term = _START.unpack(_unsealed(b"T", group, start_row))
        term, vote, commit, last_index = _HARD.unpack(_unsealed(b"H", group, hard_row))
        applied_index = decode_group(applied_row).applied_index
        if not start_index <= applied_index <= last_index or commit > last_index:
            raise StoreCorrupt(
                _fault(group, f"start {start_index}, applied {applied_index}, commit {commit} and last {last_index} do not fit")
            )
        hard = HardState(term, vote, max(commit, applied_index))  # what was applied was committed
        state = _Group(start_index, start_term, last_index, start_term, hard, applied_index)
        self._check_tail(group, state)
        self._drop_leftovers(group, state, ranges)
        return state

    def _make(self, group: int, puts: Puts) -> _Group:
        """The first rows of a blank group."""
        if self._store.scan(RAFT_LOG, group_prefix(group), prefix_end(group_prefix(group)), 1):
            raise StoreCorrupt(_fault(group, "it has entries but no rows in raft_meta"))
        state = _Group(FIRST_INDEX, FIRST_TERM, FIRST_INDEX, FIRST_TERM, HardState(FIRST_TERM, 0, FIRST_INDEX), FIRST_INDEX)
        rows = puts.setdefault(RAFT_META, {})
        _put_sealed(rows, b"T", group, _START.pack(FIRST_INDEX, FIRST_TERM))
        _put_sealed(rows, b"H", group, _HARD.pack(FIRST_TERM, 0, FIRST_INDEX, FIRST_INDEX))
        rows[_meta_key(b"A", group)] = encode_row(GroupState(applied_index=FIRST_INDEX, applied_term=FIRST_TERM))
        return state

    def _check_tail(self, group: int, state: _Group) -> None:
        """Entries after the applied index: each there, each right, terms not falling. They are about to be applied."""
        cursor = self._store.cursor(RAFT_LOG)
        term = state.start_term
        found = cursor.seek(log_key(group, state.applied_index + 1))
        for index in range(state.applied_index + 1, state.last_index + 1):
            row = found[1] if found and found[0] == log_key(group, index) else None
            entry = _decode(group, index, row)
            if not term <= entry.term <= state.hard.term:
                raise StoreCorrupt(
                    _fault(group, f"entry {index} has term {entry.term} after {term}, with {state.hard.term} current")
                )
            term = state.last_term = entry.term
            state.bytes_held += len(entry.payload) + _ENTRY_SIZE
            found = cursor.next()
        if state.start_index < state.applied_index == state.last_index:
            last_row = self._store.get(RAFT_LOG, log_key(group, state.last_index))
            state.last_term = _decode(group, state.last_index, last_row).term

    def _drop_leftovers(self, group: int, state: _Group, ranges: Ranges) -> None:
        behind, end = log_key(group, state.last_index + 1), prefix_end(group_prefix(group))
        if self._store.scan(RAFT_LOG, behind, end, 1):
            log.warning("log_leftovers_dropped", group=group, last_index=state.last_index)
            ranges.append((RAFT_LOG, behind, end))


def _meta_key(letter: bytes, group: int) -> bytes:
    return letter + group_prefix(group)


def _crc(group: int, entry: LogEntry) -> int:
    return crc32(entry.payload, crc32(_ENTRY_CRC.pack(group, entry.index, entry.term, entry.kind)))


def _encode(group: int, entry: LogEntry) -> bytes:
    return _ENTRY.pack(entry.term, entry.kind, _crc(group, entry)) + entry.payload


def _decode(group: int, index: int, row: bytes | None) -> LogEntry:
    if row is None:
        raise StoreCorrupt(_fault(group, f"entry {index} is missing"))
    if len(row) < _ENTRY_SIZE:
        raise StoreCorrupt(_fault(group, f"entry {index} is cut short"))
    term, kind, crc = _ENTRY.unpack_from(row)
    entry = LogEntry(index, term, kind, row[_ENTRY_SIZE:])
    if crc != _crc(group, entry):
        raise StoreCorrupt(_fault(group, f"entry {index} does not match its checksum"))
    return entry


def _put_sealed(rows: dict[bytes, bytes | None], letter: bytes, group: int, body: bytes) -> None:
    key = _meta_key(letter, group)
    rows[key] = body + _CRC.pack(crc32(body, crc32(key)))


def _unsealed(letter: bytes, group: int, row: bytes) -> bytes:
    body = row[:-4]
    if row[-4:] != _CRC.pack(crc32(body, crc32(_meta_key(letter, group)))):
        raise StoreCorrupt(_fault(group, f"row {letter.decode()} of raft_meta does not match its checksum"))
    return body


def _fault(group: int, what: str) -> str:
    return f"the log of group {group} is broken: {what}; restore a backup, or remove the data directory and join anew"
