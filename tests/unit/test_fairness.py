"""Shares of priorities and tenants: right over time, nobody starved, nothing left lying."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wheelsched.fairness import DeficitRoundRobin, PriorityShares

WEIGHTS = (70, 25, 5)
PLENTY = (10**6, 10**6, 10**6)

counts = st.integers(0, 300) | st.integers(0, 3)
availables = st.tuples(counts, counts, counts)


def total(parts: list[tuple[int, int, int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*parts, strict=True)))


# -- priorities


@given(calls=st.lists(st.tuples(counts, availables), max_size=40))
@settings(max_examples=200, deadline=None)
def test_a_split_gives_all_there_is_to_those_who_have_work(calls: list[tuple[int, tuple[int, int, int]]]) -> None:
    shares = PriorityShares(WEIGHTS)
    for n, available in calls:
        taken = shares.split(n, available)
        assert sum(taken) == min(n, sum(available))
        assert all(0 <= took <= there for took, there in zip(taken, available, strict=True))
        shares.check()


@given(before=st.lists(st.tuples(counts, availables), max_size=10))
@settings(max_examples=40, deadline=None)
def test_a_hundred_single_claims_are_70_25_5(before: list[tuple[int, tuple[int, int, int]]]) -> None:
    """After any history, within the one claim by which that may have left a class ahead."""
    fresh = PriorityShares(WEIGHTS)
    assert total([fresh.split(1, PLENTY) for _ in range(100)]) == WEIGHTS
    used = PriorityShares(WEIGHTS)
    for n, available in before:
        used.split(n, available)
    taken = total([used.split(1, PLENTY) for _ in range(1_000)])
    assert all(abs(took - 10 * weight) <= 0.05 * 1_000 for took, weight in zip(taken, WEIGHTS, strict=True))


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 400), min_size=20, max_size=60))
def test_shares_follow_the_weights_whatever_the_sizes(sizes: list[int]) -> None:
    shares = PriorityShares(WEIGHTS)
    taken = total([shares.split(n, PLENTY) for n in sizes])
    assert all(abs(took - sum(sizes) * weight / 100) <= 1 for took, weight in zip(taken, WEIGHTS, strict=True))


@settings(deadline=None)
@given(n=st.integers(0, 400), available=availables)
def test_a_split_gives_what_as_many_single_claims_give_within_two(n: int, available: tuple[int, int, int]) -> None:
    """A class that runs out in the middle of a round leaves the others' credit uneven, which whole rounds at once do not see."""
    at_once = PriorityShares(WEIGHTS).split(n, available)
    one_by_one, left = PriorityShares(WEIGHTS), list(available)
    for _ in range(n):
        for index, took in enumerate(one_by_one.split(1, (left[0], left[1], left[2]))):
            left[index] -= took
    assert sum(at_once) == sum(available) - sum(left)
    for took, there, rest in zip(at_once, available, left, strict=True):
        assert abs(took - (there - rest)) <= 2


def test_single_claims_are_mixed_not_in_runs() -> None:
    shares = PriorityShares(WEIGHTS)
    order = [shares.split(1, PLENTY).index(1) for _ in range(200)]
    places = [place for place, index in enumerate(order) if index == 2]
    assert max(later - earlier for earlier, later in pairwise(places)) <= 21


def test_an_idle_class_does_not_save_up_credit() -> None:
    shares = PriorityShares(WEIGHTS)
    for _ in range(1_000):
        shares.split(1, (0, 10, 10))
    first = total([shares.split(1, PLENTY) for _ in range(100)])
    assert first[0] <= WEIGHTS[0] + 2
    for _ in range(1_000):
        shares.split(1, (10, 10, 0))
    assert total([shares.split(1, PLENTY) for _ in range(100)])[2] <= WEIGHTS[2] + 2


def test_a_class_with_one_job_at_a_time_does_not_shed_its_debt() -> None:
    """Bulk runs out after each claim and has a new job at once: still one claim in twenty."""
    shares = PriorityShares(WEIGHTS)
    taken = total([shares.split(1, (10**6, 10**6, 1)) for _ in range(1_000)])
    assert abs(taken[2] - 50) <= 2


def test_unused_share_flows_on_by_weight() -> None:
    shares = PriorityShares(WEIGHTS)
    assert total([shares.split(1, (0, 10**6, 10**6)) for _ in range(300)]) == (0, 250, 50)
    assert shares.split(100, (3, 0, 1_000)) == (3, 0, 97)


def test_bad_weights_and_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="weights"):
        PriorityShares((1, 0, 1))
    with pytest.raises(ValueError, match="or more"):
        PriorityShares().split(-1, PLENTY)
    with pytest.raises(ValueError, match="or more"):
        PriorityShares().split(1, (0, -1, 0))


# -- tenants

names = st.sampled_from("abcdef")
allotments = st.tuples(st.just("allot"), counts, st.dictionaries(names, counts))
changes = st.one_of(
    allotments, allotments, st.tuples(st.just("add"), names, st.integers(1, 20)), st.tuples(st.just("remove"), names, st.just(0))
)


@given(steps=st.lists(changes, max_size=50))
@settings(max_examples=150, deadline=None)
def test_an_allotment_gives_all_there_is(steps: list[tuple[str, object, object]]) -> None:
    shares, known = DeficitRoundRobin(), {}
    for name, first, second in steps:
        if name == "add":
            shares.add(first, second)
            known[first] = second
        elif name == "remove" and first in known:
            shares.remove(first)
            del known[first]
        elif name == "allot":
            available = {key: count for key, count in second.items() if key in known}
            allotted = shares.allot(first, available)
            assert sum(allotted.values()) == min(first, sum(available.values()))
            assert all(0 < count <= available[key] for key, count in allotted.items())
        shares.check()
        assert len(shares) == len(known)


@settings(deadline=None)
@given(
    weights=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=60),
)
def test_tenants_get_their_weights_over_time(weights: list[int], sizes: list[int]) -> None:
    """At every moment nobody is more than one turn away from its share, so nobody waits longer than a round."""
    shares = DeficitRoundRobin()
    keys = [f"tenant {place}" for place in range(len(weights))]
    for key, weight in zip(keys, weights, strict=True):
        shares.add(key, weight)
    taken, given_out = dict.fromkeys(keys, 0), 0
    for n in sizes:
        given_out += n
        for key, count in shares.allot(n, dict.fromkeys(keys, 10**6)).items():
            taken[key] += count
        for key, weight in zip(keys, weights, strict=True):
            assert abs(taken[key] - given_out * weight / sum(weights)) <= weight
    again = DeficitRoundRobin()
    for key, weight in zip(keys, weights, strict=True):
        again.add(key, weight)
    assert again.allot(sum(sizes), dict.fromkeys(keys, 10**6)) == {key: count for key, count in taken.items() if count}


def test_unused_share_of_a_tenant_flows_on() -> None:
    shares = DeficitRoundRobin()
    for key, weight in (("a", 1), ("b", 3), ("c", 1)):
        shares.add(key, weight)
    assert shares.allot(100, {"a": 50, "b": 4, "c": 100}) == {"a": 48, "b": 4, "c": 48}
    assert shares.allot(10, {"c": 100}) == {"c": 10}
    assert shares.allot(10, {}) == {}


def test_an_idle_tenant_does_not_save_up() -> None:
    shares = DeficitRoundRobin()
    shares.add("idle", 5)
    shares.add("busy", 5)
    shares.allot(10_003, {"busy": 10**6})
    both = shares.allot(100, {"idle": 10**6, "busy": 10**6})
    assert abs(both["idle"] - 50) <= 5


def test_changing_a_weight_keeps_the_place() -> None:
    shares = DeficitRoundRobin()
    shares.add("a", 10)
    shares.add("b", 10)
    assert shares.allot(3, {"a": 100, "b": 100}) == {"a": 3}
    shares.add("a", 2)
    shares.check()
    assert shares.allot(4, {"a": 100, "b": 100}) == {"a": 2, "b": 2}
    shares.remove("b")
    assert "b" not in shares
    assert shares.allot(4, {"a": 3}) == {"a": 3}


def test_unknown_tenants_and_bad_counts_are_refused() -> None:
    shares = DeficitRoundRobin()
    with pytest.raises(ValueError, match="below 1"):
        shares.add("a", 0)
    with pytest.raises(KeyError):
        shares.remove("a")
    with pytest.raises(KeyError):
        shares.allot(1, {"a": 1})
    with pytest.raises(ValueError, match="or more"):
        shares.allot(1, {"a": -1})
