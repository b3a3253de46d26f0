"""What every `Store` promises, over the memory twin and over RocksDB."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wheelsched.core.settings import StoreSettings
from wheelsched.model.keys import FAMILIES, INDEX, JOBS, STATE
from wheelsched.store import StoreFailed
from wheelsched.store.failure import Failure
from wheelsched.store.memory import MemoryStore
from wheelsched.store.rocks import RocksStore

SMALL = StoreSettings(block_cache_mib=8, write_buffer_mib=4, free_bytes_min=0, free_bytes_stop=0)
AnyStore = MemoryStore | RocksStore
MakeStore = Callable[..., AnyStore]


@pytest.fixture(params=["memory", "rocks"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeStore]:
    """A maker of stores, each in a directory of its own; closed at the end."""
    made: list[AnyStore] = []

    def make(**arguments: Any) -> AnyStore:
        if request.param == "memory":
            made.append(MemoryStore(**arguments))
        else:
            made.append(RocksStore(tmp_path / str(len(made)), SMALL, disk=lambda _: (1 << 40, 1 << 20), **arguments))
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def store(make_store: MakeStore) -> AnyStore:
    return make_store()


def everything(store: AnyStore, family: str = JOBS) -> dict[bytes, bytes]:
    return dict(store.scan(family, b"", b"", 1 << 30))


def letters(text: str) -> dict[bytes, bytes | None]:
    """`abc` -> rows a, b, c with the upper-case letter as value."""
    return {letter.encode(): letter.upper().encode() for letter in text}


# ---- rows


def test_a_batch_is_seen_whole_over_all_families(store: AnyStore) -> None:
    store.write({family: {b"k": family.encode()} for family in FAMILIES})
    assert [store.get(family, b"k") for family in FAMILIES] == [family.encode() for family in FAMILIES]
    assert store.get(JOBS, b"other") is None


def test_nothing_of_a_refused_batch_is_written(store: AnyStore) -> None:
    with pytest.raises(KeyError):
        store.write({JOBS: letters("a"), "no-such-family": letters("b")})
    assert everything(store) == {}


def test_an_empty_value_is_a_row(store: AnyStore) -> None:
    store.write({JOBS: {b"a": b""}})
    assert store.get(JOBS, b"a") == b"" and store.multiget(JOBS, [b"a", b"b"]) == [b"", None]


def test_none_deletes_and_deleting_nothing_is_nothing(store: AnyStore) -> None:
    store.write({JOBS: letters("ab")})
    store.write({JOBS: {b"a": None, b"z": None}})
    assert everything(store) == {b"b": b"B"}


def test_ranges_are_deleted_before_rows_are_put(store: AnyStore) -> None:
    store.write({JOBS: letters("abcd")})
    store.write({JOBS: {b"b": b"new"}}, [(JOBS, b"b", b"d")])
    assert everything(store) == {b"a": b"A", b"b": b"new", b"d": b"D"}


def test_a_range_touches_its_own_family_and_ends_before_its_end(store: AnyStore) -> None:
    store.write({JOBS: letters("abc"), INDEX: letters("abc")})
    store.write({}, [(JOBS, b"a", b"c")])
    assert everything(store) == {b"c": b"C"} and len(everything(store, INDEX)) == 3


def test_a_range_without_end_reaches_to_the_end_of_the_family(store: AnyStore) -> None:
    store.write({JOBS: {**letters("ab"), b"\xff\xff" + b"\xff" * 24: b"last"}})
    store.write({}, [(JOBS, b"b", b"")])
    assert everything(store) == {b"a": b"A"}


def test_a_range_the_wrong_way_round_deletes_nothing_and_harms_nothing(store: AnyStore) -> None:
    """RocksDB itself would write it to the WAL and never open again."""
    store.write({JOBS: letters("abc")})
    store.write({}, [(JOBS, b"c", b"a"), (JOBS, b"b", b"b")])
    store.write({JOBS: letters("d")})
    assert everything(store) == letters("abcd")


def test_the_dicts_of_a_batch_may_be_used_again(store: AnyStore) -> None:
    rows = letters("a")
    store.write({JOBS: rows})
    rows[b"a"] = b"changed"
    assert store.get(JOBS, b"a") == b"A"


# ---- reads


def test_multiget_answers_in_the_callers_order(store: AnyStore) -> None:
    store.write({STATE: letters("abc")})
    assert store.multiget(STATE, [b"c", b"x", b"a", b"c", b"b"]) == [b"C", None, b"A", b"C", b"B"]
    assert store.multiget(STATE, []) == []


@pytest.mark.parametrize(
    ("start", "end", "limit", "forward", "back"),
    [
        (b"", b"", 9, "abcd", "dcba"),
        (b"b", b"d", 9, "bc", "cb"),
        (b"b", b"d", 1, "b", "c"),
        (b"aa", b"cc", 9, "bc", "cb"),
        (b"b", b"", 9, "bcd", "dcb"),
        (b"", b"b", 9, "a", "a"),
        (b"b", b"b", 9, "", ""),
        (b"c", b"b", 9, "", ""),
        (b"e", b"", 9, "", ""),
        (b"a", b"d", 0, "", ""),
    ],
)
def test_scans_keep_their_bounds(store: AnyStore, start: bytes, end: bytes, limit: int, forward: str, back: str) -> None:
    store.write({JOBS: letters("abcd"), INDEX: letters("xyz"), STATE: letters("xyz")})
    assert store.scan(JOBS, start, end, limit) == list(letters(forward).items())
    assert store.scan_back(JOBS, start, end, limit) == list(letters(back).items())


def test_cursor_seeks_forward_and_back_and_ends_with_none(store: AnyStore) -> None:
    store.write({JOBS: letters("bdf"), INDEX: letters("xyz")})
    cursor = store.cursor(JOBS)
    assert cursor.next() is None, "before the first seek"
    assert cursor.seek(b"c") == (b"d", b"D")
    assert cursor.next() == (b"f", b"F")
    assert cursor.next() is None and cursor.next() is None
    assert cursor.seek(b"") == (b"b", b"B"), "a cursor at its end can be used again"
    assert cursor.seek(b"g") is None and cursor.next() is None


def test_cursor_sees_the_family_as_it_was(store: AnyStore) -> None:
    store.write({JOBS: letters("abc")})
    cursor = store.cursor(JOBS)
    store.write({JOBS: {b"a": b"changed", b"b": None, b"d": b"D"}}, [(JOBS, b"c", b"d")])
    assert cursor.seek(b"") == (b"a", b"A")
    assert [cursor.next(), cursor.next(), cursor.next()] == [(b"b", b"B"), (b"c", b"C"), None]
    fresh = store.cursor(JOBS)
    assert [fresh.seek(b""), fresh.next(), fresh.next()] == [(b"a", b"changed"), (b"d", b"D"), None]


# ---- against an obvious model

KEYS = st.binary(min_size=1, max_size=2).map(lambda key: bytes(byte & 0b11 for byte in key))
BATCHES = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from([JOBS, INDEX]), st.dictionaries(KEYS, st.none() | st.binary(max_size=3), max_size=5)),
        st.lists(st.tuples(st.sampled_from([JOBS, INDEX]), KEYS, KEYS | st.just(b"")), max_size=2),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=BATCHES, start=KEYS | st.just(b""), end=KEYS | st.just(b""), limit=st.integers(0, 20))
def test_agrees_with_a_dict(make_store: MakeStore, batches: list[Any], start: bytes, end: bytes, limit: int) -> None:
    store = shared_store(make_store)
    store.write({}, [(JOBS, b"", b""), (INDEX, b"", b"")])
    model: dict[str, dict[bytes, bytes]] = {JOBS: {}, INDEX: {}}
    for puts, ranges in batches:
        store.write(puts, ranges)
        for family, low, high in ranges:
            model[family] = {key: row for key, row in model[family].items() if not (low <= key and (not high or key < high))}
        for family, rows in puts.items():
            for key, value in rows.items():
                if value is None:
                    model[family].pop(key, None)
                else:
                    model[family][key] = value
    for family, rows in model.items():
        ordered = sorted(rows.items())
        assert store.scan(family, b"", b"", 1_000) == ordered
        within = [(key, row) for key, row in ordered if start <= key and (not end or key < end)]
        assert store.scan(family, start, end, limit) == within[:limit]
        assert store.scan_back(family, start, end, limit) == within[::-1][:limit]
        at_or_after = [row for row in ordered if row[0] >= start]
        cursor = store.cursor(family)
        assert cursor.seek(start) == (at_or_after[0] if at_or_after else None)
        assert cursor.next() == (at_or_after[1] if len(at_or_after) > 1 else None)


def shared_store(make_store: MakeStore) -> AnyStore:
    """One store for all examples of a test: opening RocksDB takes longer than an example."""
    if not hasattr(make_store, "shared"):
        make_store.shared = make_store()  # type: ignore[attr-defined]
    return make_store.shared  # type: ignore[attr-defined, no-any-return]


# ---- sync, failure, end


async def test_concurrent_syncs_share_one_fsync(store: AnyStore) -> None:
    """50 calls in one turn of the loop: the first may have begun alone, all others share one."""
    store.write({JOBS: letters("a")})
    before = store.statistics().sync_count
    await asyncio.gather(*(store.sync() for _ in range(50)))
    assert 1 <= store.statistics().sync_count - before <= 2


async def test_a_caller_that_gives_up_does_not_take_the_sync_of_others(store: AnyStore) -> None:
    waiting = [asyncio.ensure_future(store.sync()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError) and results[1:] == [None, None]


class Breaks:
    """Faults that can be switched on: the disk says no."""

    def __init__(self) -> None:
        self.write = self.sync = False

    def on_write(self) -> None:
        if self.write:
            raise OSError(28, "No space left on device")

    def on_sync(self) -> None:
        if self.sync:
            raise OSError(5, "Input/output error")


@pytest.fixture
def faults() -> Breaks:
    return Breaks()


@pytest.fixture
def fatal() -> list[str]:
    """Messages of the calls of `fatal`."""
    return []


@pytest.fixture
def breaking(make_store: MakeStore, faults: Breaks, fatal: list[str]) -> AnyStore:
    return make_store(faults=faults, fatal=fatal.append)


async def test_a_failed_fsync_is_fatal_once_and_never_acknowledged(breaking: AnyStore, faults: Breaks, fatal: list[str]) -> None:
    """Also when the disk recovers: the pages of the failed fsync are lost, and the next one would say nothing of it."""
    store = breaking
    store.write({JOBS: letters("a")})
    faults.sync = True
    results = await asyncio.gather(*(store.sync() for _ in range(3)), return_exceptions=True)
    assert all(isinstance(result, StoreFailed) for result in results), results
    faults.sync = False
    with pytest.raises(StoreFailed):
        await store.sync()
    with pytest.raises(StoreFailed):
        store.write({JOBS: letters("b")})
    assert store.statistics().sync_count == 0
    assert fatal == [
        "wheelsched: sync of the store failed: [Errno 5] Input/output error; the node stops because what the disk holds is unknown"
    ]


async def test_a_failed_write_is_fatal_once_and_nothing_is_synced_after_it(breaking: AnyStore, faults: Breaks, fatal: list[str]) -> None:
    store = breaking
    faults.write = True
    with pytest.raises(StoreFailed, match="No space left"):
        store.write({JOBS: letters("a")})
    faults.write = False
    with pytest.raises(StoreFailed):
        store.write({JOBS: letters("a")})
    with pytest.raises(StoreFailed):
        await store.sync()
    assert len(fatal) == 1 and everything(store) == {}


def test_only_the_first_of_two_failures_is_fatal(fatal: list[str]) -> None:
    """As when a write fails while an fsync is failing on its thread."""
    failure = Failure(fatal.append)  # type: ignore[arg-type]
    failures = [failure.fail("write", OSError("first")), failure.fail("sync", OSError("second"))]
    assert len(fatal) == 1 and [str(seen) for seen in failures] == fatal * 2


async def test_a_closed_store_refuses_everything(store: AnyStore) -> None:
    cursor = store.cursor(JOBS)
    store.close()
    store.close()
    for use in (
        lambda: store.get(JOBS, b"a"),
        lambda: store.scan(JOBS, b"", b"", 1),
        lambda: store.write({JOBS: letters("a")}),
        lambda: cursor.seek(b""),
        lambda: store.cursor(JOBS),
    ):
        with pytest.raises(StoreFailed, match="closed"):
            use()
    with pytest.raises(StoreFailed, match="closed"):
        await store.sync()
