"""The memory twin: its sorted rows, and what its crash leaves."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wheelsched.model.keys import JOBS, STATE
from wheelsched.store import StoreFailed
from wheelsched.store.memory import CHUNK_ROWS, MemoryStore, SortedRows


async def test_a_crash_loses_what_was_not_synced() -> None:
    store = MemoryStore()
    store.write({JOBS: {b"a": b"1", b"b": b"1"}})
    await store.sync()
    store.write({JOBS: {b"a": b"2", b"c": b"2"}}, [(JOBS, b"b", b"c")])
    after = store.crash()
    assert after.scan(JOBS, b"", b"", 9) == [(b"a", b"1"), (b"b", b"1")]
    with pytest.raises(StoreFailed):
        store.get(JOBS, b"a")


async def test_a_crash_keeps_whole_batches_from_the_first_on() -> None:
    store = MemoryStore()
    for number in range(10):
        store.write({JOBS: {b"%d" % number: b"x" * 9}, STATE: {b"%d" % number: b"x" * 9}})
    after = store.crash(keep_bytes_fraction=0.55)
    kept = [key for key, _ in after.scan(JOBS, b"", b"", 99)]
    assert kept == [b"0", b"1", b"2", b"3", b"4"]
    assert kept == [key for key, _ in after.scan(STATE, b"", b"", 99)]


async def test_a_crash_may_keep_everything() -> None:
    store = MemoryStore()
    store.write({JOBS: {b"a": b"1"}})
    assert store.crash(keep_bytes_fraction=1.0).get(JOBS, b"a") == b"1"


async def test_a_sync_under_way_is_not_answered_by_a_crash() -> None:
    store = MemoryStore()
    store.write({JOBS: {b"a": b"1"}})
    waiting = asyncio.ensure_future(store.sync())
    after = store.crash()
    with pytest.raises(StoreFailed):
        await waiting
    assert after.get(JOBS, b"a") is None


async def test_what_the_restarted_store_wrote_is_its_own() -> None:
    store = MemoryStore()
    store.write({JOBS: {b"a": b"1"}})
    await store.sync()
    second = store.crash()
    second.write({JOBS: {b"a": b"2"}})
    assert second.crash().get(JOBS, b"a") == b"1"


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("fill"), st.integers(0, 3_000), st.integers(0, 900)),
        st.tuples(st.just("put"), st.integers(0, 3_000), st.just(0)),
        st.tuples(st.just("delete"), st.integers(0, 3_000), st.just(0)),
        st.tuples(st.just("cut"), st.integers(0, 3_000), st.integers(0, 2_000)),
        st.tuples(st.just("snapshot"), st.just(0), st.just(0)),
    ),
    max_size=30,
)


@settings(max_examples=80, deadline=None)
@given(operations=OPERATIONS)
def test_sorted_rows_agree_with_a_dict_and_snapshots_stay_as_they_were(operations: list[tuple[str, int, int]]) -> None:
    rows, model = SortedRows(), dict[bytes, bytes]()
    snapshots: list[tuple[SortedRows, dict[bytes, bytes]]] = []
    for name, at, count in operations:
        key = b"%06d" % at
        if name == "fill":
            for number in range(at, at + count):
                rows.put(b"%06d" % number, b"v")
                model[b"%06d" % number] = b"v"
        elif name == "put":
            rows.put(key, name.encode())
            model[key] = name.encode()
        elif name == "delete":
            rows.delete(key)
            model.pop(key, None)
        elif name == "cut":
            end = b"%06d" % (at + count)
            rows.delete_range(key, end)
            model = {k: v for k, v in model.items() if not key <= k < end}
        else:
            snapshots.append((rows.snapshot(), dict(model)))
        rows.check()
    for seen, expected in [*snapshots, (rows, model)]:
        assert seen.scan(b"", b"", 1 << 30) == sorted(expected.items())
        assert seen.scan_back(b"", b"", 1 << 30) == sorted(expected.items(), reverse=True)


def test_growing_keys_fill_the_chunks() -> None:
    rows = SortedRows()
    for number in range(10 * CHUNK_ROWS):
        rows.put(b"%06d" % number, b"")
    assert len(rows.chunks) <= 11
