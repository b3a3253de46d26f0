"""The Raft logs of all groups, as rows of one store: `raft_log` holds entries, `raft_meta` what is known about each log.

    raft_log   group, index    term, kind, crc, payload
    raft_meta  H group         hard state: term, vote, commit, last index, crc
    raft_meta  T group         log start: index and term of the last entry that was dropped (or came as a snapshot), crc
    raft_meta  A group         GroupState (model/rows.py), in the same batch as the rows it describes
    raft_meta  C group         configuration as of A, crc; written by each change of it, so absent before the first
    raft_meta  P group         a snapshot that is being installed, crc; absent otherwise
    raft_meta  L group         how this node left the group, crc; absent while it is a member, or never was one

`H` names the last index, so a log ends where its last append said, and nowhere else. Nothing here writes: callers get rows and
ranges for a batch of theirs, and what this object remembers is ahead of the disk until they wrote it. So: no decision about a
log between `add` or `compact` and the write of their rows, and a write that fails ends the process.

Every group starts behind a snapshot at index 10, term 1, so that a blank node can join by snapshot only (RAFT.md 3.18): one that
joins later starts at index 0, where no log of the group reaches back to.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol
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


class SealedEntry(Protocol):
    """An entry with the checksum its proposer gave it, by the formula of the rows here; the Raft core's fits."""

    @property
    def index(self) -> int: ...

    @property
    def term(self) -> int: ...

    @property
    def kind(self) -> int: ...

    @property
    def payload(self) -> bytes: ...

    @property
    def crc(self) -> int: ...


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

    def __init__(self, store: Store, groups: Sequence[int], *, joining: Collection[int] = ()) -> None:
        """Load every group, making the blank ones. Reads the entries after the applied index: some ms for 20,000 of them.

        `joining`: those of the groups that exist elsewhere; where such a one is blank it waits at index 0 for a snapshot."""
        self._store = store
        self._groups: dict[int, _Group] = {}
        puts: Puts = {}
        ranges: Ranges = []
        for group in groups:
            self._groups[group] = self._load(group, puts, ranges, joins=group in joining)
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
        return read_group_state(self._store, group)

    def term_runs(self, group: int, from_index: int, to_index: int) -> list[tuple[int, int]]:
        """(first index, term) of every stretch of entries with one term, in order. Terms never fall, so each is found by halving:
        a get per halving, some 17 for each stretch of a long log."""
        runs: list[tuple[int, int]] = []
        while from_index <= to_index:
            term = self.term(group, from_index)
            runs.append((from_index, term))
            same, other = from_index, to_index + 1
            while other - same > 1:
                middle = (same + other) // 2
                if self.term(group, middle) == term:
                    same = middle
                else:
                    other = middle
            from_index = other
        return runs

    def bytes_held(self, group: int) -> int:
        """About how many bytes the entries take that this process read or wrote."""
        return self._groups[group].bytes_held

    def configuration(self, group: int) -> bytes | None:
        """The row `C`; None where no change of configuration was applied yet."""
        row = self._store.get(RAFT_META, _meta_key(b"C", group))
        return None if row is None else _unsealed(b"C", group, row)

    def installing(self, group: int) -> bytes | None:
        """The row `P`: what was being installed when the process ended; None for nothing."""
        row = self._store.get(RAFT_META, _meta_key(b"P", group))
        return None if row is None else _unsealed(b"P", group, row)

    def left(self, group: int) -> bytes | None:
        """The row `L`: how this node left the group; None where it did not, or came back."""
        row = self._store.get(RAFT_META, _meta_key(b"L", group))
        return None if row is None else _unsealed(b"L", group, row)

    # ---- what is to be written

    def add(self, puts: Puts, group: int, entry: LogEntry, *, commit: int | None = None) -> None:
        """Put the rows of an entry and the hard state that goes with it into a batch; 5 to 10 µs.

        An entry at or below the last index replaces the tail from there; never one that is committed. `commit` moves the commit
        index along; a single node passes `entry.index`, for here an entry is durable and committed by the same sync."""
        state = self._groups[group]
        index, hard = entry.index, state.hard
        invariant(hard.commit < index <= state.last_index + 1, "log_grows_by_one", group=group, index=index, last=state.last_index)
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

    def append(self, puts: Puts, group: int, entries: Sequence[SealedEntry]) -> None:
        """Put entries into a batch; they replace the tail from the first one's index on. The batch is to hold `H` as well, which
        names the new end: call `add_hard_state` next. 3 µs an entry."""
        state = self._groups[group]
        first, last = entries[0].index, entries[-1].index
        invariant(
            state.applied_index < first <= state.last_index + 1, "log_grows_by_one",
            group=group, index=first, last=state.last_index, applied=state.applied_index,
        )  # fmt: skip
        rows = puts.setdefault(RAFT_LOG, {})
        for entry in entries:
            row = rows[log_key(group, entry.index)] = _ENTRY.pack(entry.term, entry.kind, entry.crc) + entry.payload
            state.bytes_held += len(row)
        for replaced in range(last + 1, state.last_index + 1):
            rows[log_key(group, replaced)] = None
        state.last_index, state.last_term = last, entries[-1].term

    def add_hard_state(self, puts: Puts, group: int, hard: HardState) -> None:
        """Put the row `H` into a batch. A new term or vote has to be synced before it is told; a new commit index need not."""
        state = self._groups[group]
        before = state.hard
        invariant(hard.term >= before.term and hard.commit >= before.commit, "hard_state_never_falls", group=group, hard=hard)
        invariant(hard.commit <= state.last_index, "commit_is_held", group=group, commit=hard.commit, last=state.last_index)
        state.hard = hard
        row = _HARD.pack(hard.term, hard.vote, hard.commit, state.last_index)
        _put_sealed(puts.setdefault(RAFT_META, {}), b"H", group, row)

    def note_commit(self, group: int, commit: int) -> None:
        """A commit index that is not worth a write of its own: the next row `H` carries it. A restart knows at least what is applied."""
        state = self._groups[group]
        invariant(state.hard.commit <= commit <= state.last_index, "commit_is_held", group=group, commit=commit, last=state.last_index)
        state.hard = HardState(state.hard.term, state.hard.vote, commit)

    def add_group_state(self, puts: Puts, group: int, group_state: GroupState) -> None:
        """Put the row `A` into the batch that holds the rows it describes: a crash then rolls both back together."""
        state = self._groups[group]
        invariant(
            state.applied_index <= group_state.applied_index <= state.last_index, "applied_never_falls",
            group=group, before=state.applied_index, applied=group_state.applied_index, last=state.last_index,
        )  # fmt: skip
        state.applied_index = group_state.applied_index
        puts.setdefault(RAFT_META, {})[_meta_key(b"A", group)] = encode_row(group_state)

    def add_configuration(self, puts: Puts, group: int, configuration: bytes) -> None:
        """Put the row `C` into the batch whose `A` tells that the change was applied."""
        _put_sealed(puts.setdefault(RAFT_META, {}), b"C", group, configuration)

    # ---- snapshots

    def add_installing(self, puts: Puts, group: int, description: bytes) -> None:
        """Put the row `P` into a batch: from here on the group's rows are no state until `install` is written."""
        _put_sealed(puts.setdefault(RAFT_META, {}), b"P", group, description)

    def install(self, puts: Puts, ranges: Ranges, group: int, group_state: GroupState, hard: HardState, configuration: bytes) -> None:
        """Put what makes a snapshot the start of the log into the batch that completes its rows; `group_state` says where it ends.
        Entries go, all of them: what the leader has beyond the snapshot it sends."""
        state = self._groups[group]
        index, term = group_state.applied_index, group_state.applied_term
        invariant(index > state.applied_index, "applied_never_falls", group=group, before=state.applied_index, applied=index)
        invariant(hard.term >= state.hard.term, "hard_state_never_falls", group=group, hard=hard, before=state.hard)
        ranges.append((RAFT_LOG, group_prefix(group), prefix_end(group_prefix(group))))
        rows = puts.setdefault(RAFT_META, {})
        _put_sealed(rows, b"T", group, _START.pack(index, term))
        _put_sealed(rows, b"H", group, _HARD.pack(hard.term, hard.vote, hard.commit, index))
        _put_sealed(rows, b"C", group, configuration)
        rows[_meta_key(b"A", group)] = encode_row(group_state)
        rows[_meta_key(b"P", group)] = None
        rows[_meta_key(b"L", group)] = None
        self._groups[group] = _Group(index, term, index, term, hard, index)

    # ---- the end

    def leave(self, puts: Puts, ranges: Ranges, group: int, hard: HardState, configuration: bytes, description: bytes) -> None:
        """Put what makes the log blank into the batch that drops the group's rows. Term and vote stay, for the node may come back and
        must not vote twice; `configuration`: one without members; `description`: the row `L`."""
        before = self._groups[group].hard
        is_kept = hard.term > before.term or (hard.term == before.term and (not before.vote or hard.vote == before.vote))
        invariant(is_kept and not hard.commit, "vote_is_never_forgotten", group=group, hard=hard, before=before)
        ranges.append((RAFT_LOG, group_prefix(group), prefix_end(group_prefix(group))))
        rows = puts.setdefault(RAFT_META, {})
        _put_sealed(rows, b"T", group, _START.pack(0, 0))
        _put_sealed(rows, b"H", group, _HARD.pack(hard.term, hard.vote, 0, 0))
        _put_sealed(rows, b"C", group, configuration)
        _put_sealed(rows, b"L", group, description)
        rows[_meta_key(b"A", group)] = encode_row(GroupState())
        self._groups[group] = _Group(0, 0, 0, 0, hard, 0)

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

    def _load(self, group: int, puts: Puts, ranges: Ranges, *, joins: bool) -> _Group:
        """Read a group's rows and check them against each other; leftovers to delete and first rows go to the batch."""
        names = [_meta_key(letter, group) for letter in (b"T", b"H", b"A")]
        start_row, hard_row, applied_row = self._store.multiget(RAFT_META, names)
        if start_row is None and hard_row is None and applied_row is None:
            return self._make(group, puts, 0 if joins else FIRST_INDEX, 0 if joins else FIRST_TERM)
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

    def _make(self, group: int, puts: Puts, index: int, term: int) -> _Group:
        """The first rows of a blank group."""
        if self._store.scan(RAFT_LOG, group_prefix(group), prefix_end(group_prefix(group)), 1):
            raise StoreCorrupt(_fault(group, "it has entries but no rows in raft_meta"))
        state = _Group(index, term, index, term, HardState(term, 0, index), index)
        add_first_rows(puts, group, GroupState(applied_index=index, applied_term=term, digest_from=0 if index else -1))
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
                raise StoreCorrupt(_fault(group, f"entry {index} has term {entry.term} after {term}, with {state.hard.term} current"))
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


def read_group_state(store: Store, group: int) -> GroupState:
    """The row `A` of a group: what is current with the rows that the store shows at this instant."""
    row = store.get(RAFT_META, _meta_key(b"A", group))
    if row is None:
        raise StoreCorrupt(_fault(group, "its row A is missing"))
    return decode_group(row)


def add_first_rows(puts: Puts, group: int, group_state: GroupState) -> None:
    """Put the rows of a log that holds nothing and starts behind `group_state` into the batch that completes the rows it describes."""
    index, term = group_state.applied_index, group_state.applied_term
    rows = puts.setdefault(RAFT_META, {})
    _put_sealed(rows, b"T", group, _START.pack(index, term))
    _put_sealed(rows, b"H", group, _HARD.pack(term, 0, index, index))
    rows[_meta_key(b"A", group)] = encode_row(group_state)


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
