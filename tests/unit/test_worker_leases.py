"""What a worker may believe about its leases, with the time as an argument; and the thread that asks, against a model of it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from wheelsched.worker.leases import MISSES_MAX, LeaseBook


def book_of(*tokens: str) -> LeaseBook:
    book = LeaseBook()
    for token in tokens:
        book.add(token, lease_ms=300, expires_at_ms=300)
    return book


def test_three_misses_in_a_row_lose_a_lease_and_an_answer_forgives_two() -> None:
    book = book_of("a", "b")
    assert book.on_missed(["a", "b"]) == []
    assert book.on_missed(["a", "b"]) == []
    book.on_extended("a", sent_at_ms=200, progress=None, cancel_requested=False)
    assert book.on_missed(["a", "b"]) == ["b"]
    assert book.is_held("a", 499) and not book.is_held("b", 0)


def test_a_lease_counts_from_the_sending_of_the_heartbeat() -> None:
    book = book_of("a")
    book.on_extended("a", sent_at_ms=100, progress=None, cancel_requested=False)
    assert book.is_held("a", 399) and not book.is_held("a", 400)
    assert book.take_expired(399) == []
    assert book.take_expired(400) == ["a"]
    assert book.next_expiry_ms() is None


def test_an_answer_to_an_older_heartbeat_does_not_shorten_a_lease() -> None:
    book = book_of("a")
    book.on_extended("a", sent_at_ms=200, progress=None, cancel_requested=False)
    book.on_extended("a", sent_at_ms=100, progress=None, cancel_requested=False)
    assert book.is_held("a", 499)


def test_progress_is_sent_until_it_has_arrived_and_the_last_counts() -> None:
    book = book_of("a")
    book.set_progress("a", b"1")
    assert book.beats() == [("a", b"1")]
    book.on_missed(["a"])
    book.set_progress("a", b"2")
    book.on_extended("a", sent_at_ms=1, progress=b"1", cancel_requested=False)
    assert book.beats() == [("a", b"2")]
    ((_, progress),) = book.beats()
    book.on_extended("a", sent_at_ms=2, progress=progress, cancel_requested=False)
    assert book.beats() == [("a", None)]
    assert not book.set_progress("gone", b"1")


def test_a_cancel_request_is_news_once() -> None:
    book = book_of("a")
    assert book.on_extended("a", sent_at_ms=1, progress=None, cancel_requested=True)
    assert not book.on_extended("a", sent_at_ms=2, progress=None, cancel_requested=True)


def test_what_is_no_longer_held_is_lost_once() -> None:
    book = book_of("a")
    assert book.on_stale("a")
    assert not book.on_stale("a")
    assert book.on_missed(["a"]) == [] and book.take_expired(10**9) == []
    book.remove("a")


class LeaseMachine(RuleBasedStateMachine):
    """Against {token: (end, misses)}, the obvious."""

    def __init__(self) -> None:
        super().__init__()
        self.book = LeaseBook()
        self.model: dict[str, tuple[int, int]] = {}
        self.now_ms = 0
        self.count = 0

    @rule(ms=st.integers(0, 400))
    def advance(self, ms: int) -> None:
        self.now_ms += ms
        assert sorted(self.book.take_expired(self.now_ms)) == sorted(t for t, (end, _) in self.model.items() if end <= self.now_ms)
        self.model = {token: lease for token, lease in self.model.items() if lease[0] > self.now_ms}

    @rule()
    def add(self) -> None:
        self.count += 1
        self.book.add(f"t{self.count}", lease_ms=300, expires_at_ms=self.now_ms + 300)
        self.model[f"t{self.count}"] = (self.now_ms + 300, 0)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        token = data.draw(st.sampled_from(sorted(self.model)))
        self.book.on_extended(token, sent_at_ms=self.now_ms, progress=None, cancel_requested=False)
        self.model[token] = (max(self.model[token][0], self.now_ms + 300), 0)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def miss(self, data: st.DataObject) -> None:
        token = data.draw(st.sampled_from(sorted(self.model)))
        end, misses = self.model[token]
        lost = self.book.on_missed([token])
        if misses + 1 == MISSES_MAX:
            assert lost == [token]
            del self.model[token]
        else:
            assert lost == []
            self.model[token] = (end, misses + 1)

    @invariant()
    def agrees(self) -> None:
        self.book.check()
        assert sorted(token for token, _ in self.book.beats()) == sorted(self.model)
        assert all(self.book.is_held(token, self.now_ms) for token in self.model)
        assert self.book.next_expiry_ms() == min((end for end, _ in self.model.values()), default=None)


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=30)


def test_a_token_is_added_once() -> None:
    book = book_of("a")
    with pytest.raises(AssertionError):
        book.add("a", lease_ms=1, expires_at_ms=1)
