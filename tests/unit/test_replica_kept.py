"""What is kept of leased jobs agrees with the store after every entry, and changes nothing of what entries do."""

from __future__ import annotations

import random

import pytest
from builders import GROUP, NOW_MS, a_create, an_id
from engine_model import merged, random_stories

from wheelsched.core.invariants import InvariantBroken
from wheelsched.model import keys
from wheelsched.model.commands import COMMAND_VERSION, Claim, Entry, Fire, decode_entry, encode_entry
from wheelsched.model.rows import JobState, decode_state
from wheelsched.model.states import LEASED
from wheelsched.replica.applying import Applier, Member, ToApply
from wheelsched.runtime.clock import VirtualClock
from wheelsched.store.memory import MemoryStore
from wheelsched.store.raftlog import LogEntry, RaftLog


class Group:
    """A group whose kept rows are checked after every entry."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.log = RaftLog(self.store, (GROUP,))
        self.applier = Applier(self.store, self.log, VirtualClock(1), on_effects=lambda _group, _effects: None)
        self.member = Member(GROUP, self.log.group_state(GROUP))

    def apply(self, entry: Entry) -> None:
        index = self.log.last_index(GROUP) + 1
        puts: dict[str, dict[bytes, bytes | None]] = {}
        self.log.add(puts, GROUP, LogEntry(index, 1, 0, encode_entry(entry)), commit=index)
        self.store.write(puts)
        self.applier.apply([ToApply(self.member, index, 1, entry)])
        self.check()

    def check(self) -> None:
        self.applier.kept.check(self.store, lambda _job_id: GROUP)

    def keep_rows(self) -> None:
        """Of all that is leased, as when it is handed over."""
        states = [decode_state(row) for _, row in self.store.scan(keys.STATE, b"", b"", 1_000)]
        self.applier.kept.keep_rows((state, self._row(state)) for state in states if state.status in LEASED)
        self.check()

    def _row(self, state: JobState) -> bytes:
        row = self.store.get(keys.JOBS, keys.job_key(GROUP, state.lane, state.fire_at_ms, state.job_id))
        assert row is not None
        return row

    def rows(self) -> dict[str, list[tuple[bytes, bytes]]]:
        return {family: self.store.scan(family, b"", b"", 10_000) for family in keys.STATE_FAMILIES}


@pytest.mark.parametrize("seed", range(8))
def test_any_story_leaves_what_is_kept_as_the_store_has_it(seed: int) -> None:
    for story in random_stories(random.Random(seed), 10):
        for entries in (story.entries, merged(story.entries)):
            keeping, reading = Group(), Group()
            for payload in entries:
                keeping.apply(decode_entry(payload))
                keeping.keep_rows()
                reading.apply(decode_entry(payload))
                reading.applier.kept.forget()
            assert keeping.rows() == reading.rows()


def test_the_check_finds_what_does_not_agree() -> None:
    group = Group()
    job_id = an_id()
    group.apply(Entry(COMMAND_VERSION, NOW_MS, [a_create(), Fire(NOW_MS), Claim([(job_id, 0)], 60_000, "w")]))
    group.keep_rows()
    assert list(group.applier.kept.rows) == [job_id]
    group.store.write({keys.STATE: {keys.state_key(GROUP, job_id): None}})
    with pytest.raises(InvariantBroken, match="kept_agrees"):
        group.check()
    group.applier.kept.forget()
    group.check()
