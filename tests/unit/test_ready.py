"""Ready queues, compiled and plain, against a sorted list."""

from __future__ import annotations

import importlib
import os
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wheelsched.fairness.ready_pure import READY

Record = tuple[int, int, int, int]
Mark = tuple[int, int]


@pytest.fixture(scope="session", params=["native", "pure"])
def ready(request: pytest.FixtureRequest) -> Any:
    """The module with the queue. A missing native one fails, unless the twin was asked for."""
    if request.param == "native" and os.environ.get("WHEELSCHED_PURE") == "1":
        pytest.skip("WHEELSCHED_PURE=1")
    return importlib.import_module("wheelsched._native.ready" if request.param == "native" else "wheelsched.fairness.ready_pure")


def pack(records: list[Record]) -> bytes:
    return b"".join(READY.pack(*record) for record in records)


def unpack(records: bytes) -> list[Record]:
    return list(READY.iter_unpack(records))  # type: ignore[arg-type]


@dataclass
class SortedJobs:
    """The model: a sorted list that is cut when it is too long."""

    bound: int
    jobs: list[Record] = field(default_factory=list)
    mark: Mark | None = None
    dropped: int = 0

    def push(self, records: list[Record]) -> None:
        for record in records:
            if self.mark is not None and record[:2] >= self.mark:
                self.dropped += 1
                continue
            self.jobs = sorted([*self.jobs, record])
            if len(self.jobs) > self.bound:
                self.mark = self.jobs[self.bound - self.bound // 4][:2]
                kept = [job for job in self.jobs if job[:2] < self.mark]
                self.dropped += len(self.jobs) - len(kept)
                self.jobs = kept

    def take(self, n: int) -> list[Record]:
        taken, self.jobs = self.jobs[:n], self.jobs[n:]
        return taken


records = st.lists(
    st.tuples(st.integers(-5, 60), st.integers(0, 1 << 64) | st.integers(0, 3), st.integers(0, 2), st.integers(0, 9)).filter(
        lambda record: record[1] < 1 << 64
    ),
    max_size=30,
)
marks = st.one_of(st.none(), st.tuples(st.integers(-5, 80), st.integers(0, 3)))
moves = st.lists(
    st.one_of(
        st.tuples(st.just("push"), records),
        st.tuples(st.just("take"), st.integers(0, 40)),
        st.tuples(st.just("put_back"), st.integers(0, 10)),
        st.tuples(st.just("mark"), marks),
    ),
    max_size=30,
)


@given(bound=st.integers(4, 40), moves=moves)
@settings(max_examples=200, deadline=None)
def test_queue_gives_what_a_sorted_list_gives(ready: Any, bound: int, moves: list[tuple[str, Any]]) -> None:
    queue, model = ready.ReadyQueue(bound), SortedJobs(bound)
    for name, argument in moves:
        if name == "push":
            queue.push_batch(pack(argument))
            model.push(argument)
        elif name == "take":
            assert unpack(queue.take(argument)) == model.take(argument)
        elif name == "put_back":
            taken = queue.take(argument)
            queue.put_back(taken)
            model.push(model.take(argument))
        elif argument is None or not model.jobs or argument > model.jobs[-1][:2]:
            queue.set_spilled_from(argument)
            model.mark = argument
        queue.check()
        assert (len(queue), queue.head()) == (len(model.jobs), model.jobs[0][:2] if model.jobs else None)
        assert (queue.spilled_from, queue.dropped) == (model.mark, model.dropped)
    assert unpack(queue.take(1 << 20)) == model.jobs
    assert (len(queue), queue.head()) == (0, None)


@given(seed=st.integers(0, 1 << 32), shape=st.sampled_from(["random", "ascending", "descending", "equal"]))
@settings(max_examples=20, deadline=None)
def test_spill_keeps_the_earliest_of_many(ready: Any, seed: int, shape: str) -> None:
    """Whatever the order of arrival: what is in memory is exactly what lies before the mark."""
    rng = random.Random(seed)
    jobs = [(rng.randrange(1 << 40) if shape != "equal" else 7, rng.getrandbits(64), 1, 0) for _ in range(3_000)]
    if shape != "random":
        jobs.sort(reverse=shape == "descending")
    queue = ready.ReadyQueue(1_000)
    queue.push_batch(pack(jobs))
    queue.check()
    mark = queue.spilled_from
    assert 750 <= len(queue) <= 1_000
    assert queue.dropped == 3_000 - len(queue)
    assert unpack(queue.take(1_000)) == sorted(job for job in jobs if job[:2] < mark)


def test_a_refill_in_order_brings_everything_out_once(ready: Any) -> None:
    """The owner's loop: take, and when the queue is empty read on in the store from the mark."""
    rng = random.Random(3)
    store = sorted((rng.randrange(5_000), id_low, 1, 0) for id_low in range(2_000))
    queue = ready.ReadyQueue(64)
    queue.push_batch(pack(rng.sample(store, len(store))))
    seen: list[Record] = []
    while len(queue) or queue.spilled_from is not None:
        if not len(queue):
            start = queue.spilled_from
            page = [job for job in store if job[:2] >= start][:48]
            after = [job for job in store if job[:2] > page[-1][:2]]
            queue.set_spilled_from(after[0][:2] if after else None)
            queue.push_batch(pack(page))
        seen += unpack(queue.take(10))
        queue.check()
    assert seen == store


def test_jobs_pushed_twice_come_out_twice(ready: Any) -> None:
    queue = ready.ReadyQueue(10)
    queue.push_batch(pack([(1, 2, 3, 4)] * 2))
    assert unpack(queue.take(5)) == [(1, 2, 3, 4)] * 2


def test_clear_forgets_jobs_and_mark(ready: Any) -> None:
    queue = ready.ReadyQueue(4)
    queue.push_batch(pack([(i, 0, 1, 0) for i in range(9)]))
    assert queue.spilled_from == (3, 0)
    queue.clear()
    queue.check()
    assert (len(queue), queue.spilled_from, queue.head(), queue.reserved_bytes, queue.dropped) == (0, None, None, 0, 6)


def test_bad_arguments_are_refused(ready: Any) -> None:
    with pytest.raises(ValueError, match="below 4"):
        ready.ReadyQueue(3)
    with pytest.raises(ValueError, match="multiple of 24"):
        ready.ReadyQueue(4).push_batch(b"x")
    with pytest.raises(ValueError, match="below 0"):
        ready.ReadyQueue(4).take(-1)
    with pytest.raises(ValueError, match="multiple of 24"):
        ready.split_by_queue(b"x" * 23)


@given(words=st.lists(st.integers(0, 100) | st.integers(0, (1 << 32) - 1), max_size=200))
@settings(max_examples=100, deadline=None)
def test_split_groups_by_queue_and_priority_and_keeps_the_order(ready: Any, words: list[int]) -> None:
    jobs = [(place, place, 1, word) for place, word in enumerate(words)]
    groups = ready.split_by_queue(pack(jobs))
    assert [key for key, _ in groups] == sorted({word >> 3 for word in words})
    for key, part in groups:
        assert unpack(part) == [job for job in jobs if job[3] >> 3 == key]
