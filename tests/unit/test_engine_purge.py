"""The end of history, the meta group's rows, and the transaction underneath."""

from __future__ import annotations

import pytest
from builders import NOW_MS, DictReader, EngineGroup, a_completion, a_create, an_id, must
from hypothesis import given
from hypothesis import strategies as st

from wheelsched.core.invariants import InvariantBroken
from wheelsched.core.limits import KEEP_KEYED_MS
from wheelsched.engine import GroupMachine, Transaction, prefetch_state_keys
from wheelsched.model import keys
from wheelsched.model.commands import (
    AnyCommand,
    Cancel,
    Claim,
    Entry,
    Expire,
    Fire,
    PauseQueue,
    Purge,
    PutQueue,
    Release,
    RunNow,
    Update,
)
from wheelsched.model.effects import QueueChanged
from wheelsched.model.rows import GroupState, QueueSettings, decode_queue, encode_row
from wheelsched.model.states import Outcome, Status


def a_purge(status: Status = Status.SUCCEEDED, *, before_ms: int = NOW_MS + 1, limit: int = 200, after: bytes = b"") -> Purge:
    return Purge("acme", "mail", int(status), before_ms, limit, after)


def with_finished(count: int, **options: object) -> EngineGroup:
    """A group with `count` jobs that succeeded, in order of `fire_at`, one a millisecond."""
    group = EngineGroup()
    for number in range(count):
        must(group.do(a_completion(group.running(f"job {number}", **options))))
        group.advance(1)
    return group


# Purge


def test_a_purge_removes_what_ended_before_and_nothing_else() -> None:
    group = with_finished(5)
    reply = group.do(a_purge(before_ms=NOW_MS + 3))
    assert (reply.count, reply.cursor) == (3, b"")
    assert group.counts() == {(Status.SUCCEEDED, 1): 2}
    assert [(cause, after) for cause, _, after in group.changes()] == [("purge", None)] * 3
    assert group.do(a_purge(before_ms=NOW_MS + 5)).count == 2
    assert not any(group.reader.families.values()), "no row of any family is left"


def test_a_purge_goes_on_where_the_last_one_stopped() -> None:
    group = with_finished(7)
    reply = group.do(a_purge(before_ms=NOW_MS, limit=3))
    assert reply.count == 0
    looked_at = [reply.cursor]
    while reply.cursor:
        reply = group.do(a_purge(before_ms=NOW_MS, limit=3, after=reply.cursor))
        looked_at.append(reply.cursor)
    assert [keys.parse_time_id(tail)[0] for tail in looked_at[:-1]] == [NOW_MS + 2, NOW_MS + 5]
    assert len(looked_at) == 3


def test_a_full_head_goes_by_one_range() -> None:
    group = with_finished(20)
    assert group.do(a_purge(before_ms=NOW_MS + 12)).count == 12
    assert group.last is not None
    assert group.last.writes[keys.DONE] == {} and len(group.last.ranges) == 1


def test_a_gap_in_the_head_is_kept_and_the_rest_goes_row_by_row() -> None:
    group = EngineGroup()
    for number in range(20):
        keyed = b"body" if number == 12 else b""
        must(group.do(a_completion(group.running(f"job {number}", fingerprint=keyed))))
        group.advance(1)
    assert group.do(a_purge(before_ms=NOW_MS + 100)).count == 19
    assert group.last is not None and len(group.last.ranges) == 1
    assert len(group.last.writes[keys.DONE]) == 7
    group.advance(KEEP_KEYED_MS)
    assert group.do(a_purge(before_ms=NOW_MS + 100)).count == 1


def test_two_purges_in_one_entry_count_each_job_once() -> None:
    group = with_finished(20)
    first, second = group.apply(a_purge(before_ms=NOW_MS + 10), a_purge(before_ms=NOW_MS + 15))
    assert (first.count, second.count) == (10, 5)


def test_attempts_of_a_purged_job_go_with_it() -> None:
    group = EngineGroup()
    dead = group.running("dead", max_attempts=4)
    while must(group.do(a_completion(dead, Outcome.RETRYABLE_FAILURE))).status != Status.DEAD:
        stored = group.stored(dead)
        assert stored is not None
        dead = group.claim(stored)
    cancelled = group.create("cancelled", delay_ms=1_000)
    must(group.do(Cancel(cancelled.job_id, "acme")))
    assert len(group.attempts(dead)) == 4 and len(group.attempts(cancelled)) == 1
    for status in (Status.DEAD, Status.CANCELLED):
        assert group.do(a_purge(status)).count == 1
    assert not any(group.reader.families.values())


def test_a_job_purged_and_made_again_in_one_entry_is_there() -> None:
    group = EngineGroup()
    must(group.do(Cancel(group.create(fingerprint=b"body", delay_ms=9).job_id, "acme")))
    group.advance(KEEP_KEYED_MS)
    purge, create = group.apply(a_purge(Status.CANCELLED, before_ms=group.now_ms), a_create(fingerprint=b"body", delay_ms=5))
    assert purge.count == 1 and must(create).version == 1 and not create.replayed


def test_another_queues_and_another_status_are_left_alone() -> None:
    group = EngineGroup()
    must(group.do(a_completion(group.running("near", queue="mail2"))))
    group.dead()
    assert group.do(a_purge()).count == 0
    assert group.counts() == {(Status.DEAD, 1): 1}


# Meta group


@pytest.fixture
def meta() -> EngineGroup:
    return EngineGroup(group=keys.META_GROUP)


def settings_of(meta: EngineGroup) -> QueueSettings | None:
    row = meta.reader.families[keys.META].get(keys.queue_row_key("acme", "mail"))
    return None if row is None else decode_queue(row)


def test_a_queue_becomes_known_once(meta: EngineGroup) -> None:
    meta.do(PutQueue("acme", "mail"))
    assert settings_of(meta) == QueueSettings() and meta.effects == [QueueChanged("acme", "mail")]
    meta.do(PutQueue("acme", "mail"))
    assert meta.effects == []


def test_settings_are_replaced_and_a_pause_outlives_them(meta: EngineGroup) -> None:
    meta.do(PauseQueue("acme", "mail", True))
    meta.do(PutQueue("acme", "mail", encode_row(QueueSettings(lease_ms=7))))
    assert settings_of(meta) == QueueSettings(lease_ms=7, paused=True)
    meta.do(PutQueue("acme", "mail"))
    assert settings_of(meta) == QueueSettings(lease_ms=7, paused=True) and meta.effects == []
    meta.do(PauseQueue("acme", "mail", False))
    assert settings_of(meta) == QueueSettings(lease_ms=7)
    meta.do(PauseQueue("acme", "mail", False))
    assert meta.effects == []


# Machine and transaction


def test_an_entry_of_another_version_stops_the_node() -> None:
    with pytest.raises(InvariantBroken, match="entry_version_known"):
        GroupMachine(1).apply(GroupState(), Transaction(1, DictReader()), Entry(2, NOW_MS, []))


def test_a_missing_job_row_stops_the_node() -> None:
    group = EngineGroup(prefetch=False)  # nothing is kept from the claim
    running = group.running()
    group.reader.families[keys.JOBS].clear()
    with pytest.raises(InvariantBroken, match="job_row_of_unfinished_job"):
        group.do(a_completion(running))


def test_a_scan_reads_on_past_a_cleared_range() -> None:
    reader = DictReader()
    reader.families[keys.DONE] = {bytes((number,)): b"" for number in range(20)}
    txn = Transaction(1, reader)
    txn.delete_range(keys.DONE, b"\x00", b"\x0c")
    assert [key[0] for key, _ in txn.scan(keys.DONE, b"", b"", 3)] == [12, 13, 14]


def test_state_rows_are_read_ahead_once_and_for_creates_only_with_a_key() -> None:
    one, two, three, four = (an_id(name) for name in ("one", "two", "three", "four"))
    commands: list[AnyCommand] = [
        a_create("plain"), a_create("two", fingerprint=b"body"), Claim([(one, 1), (two, 1)], 1_000), Fire(NOW_MS, [(three, 1)]),
        Cancel(four, "acme"), Cancel(one, "acme"), Fire(NOW_MS), a_purge(), PutQueue("acme", "mail"),
    ]  # fmt: skip
    assert prefetch_state_keys(Entry(1, NOW_MS, commands)) == [two, one, three, four]


def test_job_rows_are_read_ahead_for_what_ends_a_job_or_moves_it() -> None:
    """Method: the reader counts what apply still reads singly: the counts row of the queue, nothing else."""
    group = EngineGroup()
    ending = [group.running(name) for name in ("succeeded", "fatal", "requested")]
    last, retried, lost = group.running("last", max_attempts=1), group.running("retried"), group.running("lost", max_attempts=1)
    waiting = [group.create(name, delay_ms=60_000) for name in ("cancelled", "updated", "run")]
    must(group.do(Cancel(ending[2].job_id, "acme")))
    group.reader.get_count = 0
    replies = group.apply(
        a_completion(ending[0]),
        a_completion(ending[1], Outcome.FATAL_FAILURE),
        Release(ending[2].job_id, 1, ending[2].fencing),
        a_completion(last, Outcome.RETRYABLE_FAILURE),
        a_completion(retried, Outcome.RETRYABLE_FAILURE),
        Expire(lost.job_id, 1, lost.fencing, int(Outcome.LEASE_EXPIRED), 0),
        Cancel(waiting[0].job_id, "acme"),
        Update(waiting[1].job_id, "acme", delay_ms=1),
        RunNow(waiting[2].job_id, "acme"),
    )
    assert not any(reply.refusal for reply in replies)
    assert group.reader.get_count == 1


_KEYS = st.integers(0, 12).map(lambda number: bytes((number,)))
_ACTIONS = st.one_of(
    st.tuples(st.just("put"), _KEYS, _KEYS),
    st.tuples(st.just("delete"), _KEYS, _KEYS),
    st.tuples(st.just("delete_range"), _KEYS, _KEYS),
    st.tuples(st.just("scan"), _KEYS, _KEYS),
)


@given(stored=st.sets(_KEYS), actions=st.lists(_ACTIONS, max_size=12), limit=st.integers(1, 6))
def test_a_transaction_reads_what_the_store_holds_after_its_write(
    stored: set[bytes], actions: list[tuple[str, bytes, bytes]], limit: int
) -> None:
    """Method: every action on a plain dictionary too; scans and gets agree on the way, the store at the end."""
    reader = DictReader()
    reader.families[keys.DONE] = dict.fromkeys(sorted(stored), b"stored")
    rows = dict(reader.families[keys.DONE])
    txn = Transaction(1, reader)
    for action, one, other in actions:
        if action == "put":
            txn.put(keys.DONE, one, other)
            rows[one] = other
        elif action == "delete":
            txn.delete(keys.DONE, one)
            rows.pop(one, None)
        elif action == "delete_range" and one < other:
            txn.delete_range(keys.DONE, one, other)
            rows = {key: row for key, row in rows.items() if not one <= key < other}
        wanted = sorted((key, row) for key, row in rows.items() if one <= key < other)
        assert txn.scan(keys.DONE, one, other, limit) == wanted[:limit]
        assert txn.get(keys.DONE, one) == rows.get(one)
    reader.write(txn.writes, txn.ranges)
    assert reader.families[keys.DONE] == rows
