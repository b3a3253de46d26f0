"""Whole clusters under faults: seeds that are fixed, so that a change that breaks one is seen, and seeds that are new in every run.

A failure names its seed, shows the last events and prints the command that replays it. That the checkers see something is shown by
mutants: drivers with one deliberate bug each, every one of which must be caught.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from wheelsched.model.keys import RAFT_META
from wheelsched.raft import Ready
from wheelsched.replica.offices import Offices
from wheelsched.replica.raft_member import RaftMember, ReadRound
from wheelsched.replica.raft_replicas import RaftReplicas
from wheelsched.replica.transfers import Transfers
from wheelsched.store import Store
from wheelsched.testing import cluster_sim
from wheelsched.testing.cluster_sim import SeedFailed, Simulation, run_seed, run_seeds
from wheelsched.testing.simulate_node import quiet_logs

STEPS = 60
FIXED = [range(first, first + 4) for first in range(0, 12, 4)]
FRESH_COUNT = 3


@pytest.fixture(autouse=True)
def _quiet() -> None:
    quiet_logs()


@pytest.mark.parametrize("seeds", FIXED, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_a_cluster_keeps_its_promises_under_faults(seeds: range) -> None:
    run_seeds(seeds, steps=STEPS)


def test_a_cluster_keeps_its_promises_on_new_seeds() -> None:
    """New seeds in every run; they are printed, so that a run that found nothing can be told apart from one that did not look."""
    seeds = [random.SystemRandom().getrandbits(32) for _ in range(FRESH_COUNT)]
    print("fresh seeds:", *seeds)
    counts = run_seeds(seeds, steps=STEPS)
    assert counts["replies"] > 0 and counts["offices"] >= 2 * FRESH_COUNT, "the clusters did something"


def test_the_same_seed_gives_the_same_events_in_another_process() -> None:
    """Nothing depends on hash order, addresses or the time of day."""
    script = f"from wheelsched.testing.cluster_sim import *; quiet_logs(); print('\\n'.join(run_seed(7, steps={STEPS}).log))"
    runs = [
        subprocess.run([sys.executable, "-c", script], env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."}, capture_output=True, text=True)
        for seed in ("1", "2")
    ]
    assert runs[0].returncode == 0, runs[0].stderr
    assert len(runs[0].stdout) > 1_000 and runs[0].stdout == runs[1].stdout


def test_a_failure_prints_its_seed_and_the_command_that_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fall(self: Simulation) -> list[str]:
        self.note("3 something happened")
        raise cluster_sim.ClusterBroken("never_lost", job="j1")

    monkeypatch.setattr(Simulation, "run", fall)
    with pytest.raises(SeedFailed) as failure:
        run_seed(12, steps=STEPS)
    text = str(failure.value)
    assert "never_lost: job='j1'" in text and "3 something happened" in text
    assert f"python -m wheelsched.testing.cluster_sim --seed 12 --steps {STEPS}" in text


# ---- mutants


class AcknowledgesBeforeTheDisk(RaftReplicas):
    def _await_durable(self, written: Sequence[tuple[RaftMember, Ready]]) -> None:
        for member, ready in written:
            for message in ready.after:
                self._outbox.setdefault(message.to, []).append((member.group, message))
        super()._await_durable([(member, replace(ready, after=())) for member, ready in written])


class TakesOneFsyncForAnother(RaftReplicas):
    """What was written while an fsync was under way is taken for covered by it."""

    def _on_synced(self, turn: int) -> None:
        super()._on_synced(self._written_turn)


class GivesEffectsToFollowers(RaftReplicas):
    def _give_effects(self, group: int, effects: Sequence[Any]) -> None:
        self._on_effects(group, effects)


class SwallowsEffects(RaftReplicas):
    """Says nothing of some entries, and does not say either that it stopped leading."""

    def _give_effects(self, group: int, effects: Sequence[Any]) -> None:
        if self._members[group].state.applied_index % 7:
            super()._give_effects(group, effects)


class AnswersReadsByItself(RaftReplicas):
    async def read_barrier(self, group: int) -> None:
        if self._members[group].raft.leadership is None:
            raise self._members[group].not_leader()


class AppliesInTwoWrites(RaftReplicas):
    """The applied index in one batch, the rows in another (etcd 3.5.0 to 3.5.2)."""

    class Split:
        def __init__(self, store: Store) -> None:
            self._store = store

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        def write(self, puts: Mapping[str, Any], ranges: Sequence[tuple[str, bytes, bytes]] = ()) -> None:
            self._store.write({family: rows for family, rows in puts.items() if family == RAFT_META})
            self._store.write({family: rows for family, rows in puts.items() if family != RAFT_META}, ranges)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._applier._store = self.Split(self._store)  # type: ignore[assignment]


class KeepsWhatASnapshotReplaced(RaftReplicas):
    """Decoded counts of before are used on the rows of after."""

    def _put(self, member: RaftMember, ready: Ready, *batch: Any) -> None:
        counts = dict(member.counts)
        super()._put(member, ready, *batch)
        member.counts.update(counts)


def with_offices(mutant: type[Offices]) -> type[RaftReplicas]:
    class Mutant(RaftReplicas):
        mutant_name = mutant.__name__

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self._offices.__class__ = mutant

    return Mutant


def with_transfers(mutant: type[Transfers]) -> type[RaftReplicas]:
    class Mutant(RaftReplicas):
        mutant_name = mutant.__name__

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self._transfers.__class__ = mutant

    return Mutant


class HasNoLease(Offices):
    def may_lead(self, member: RaftMember) -> bool:
        member.lease_until_ms = 1 << 60
        return super().may_lead(member)


class LeasesFromTheAnswer(Offices):
    """Reckons the lease from when the answers came, not from when it asked."""

    def on_read(self, member: RaftMember, read: ReadRound, index: int) -> None:
        late = ReadRound(read.term, self._clock.mono_ms() + self._settings.election_ms, read.waiting)
        member.rounds.pop(read, None)
        super().on_read(member, late, index)


class LeadsBeforeItKnowsAll(Offices):
    """Acts while entries of former terms may still have to be applied."""

    def may_lead(self, member: RaftMember) -> bool:
        leadership = member.raft.leadership
        if leadership is None or leadership.lease_void:
            return False
        return member.is_alone() or self._clock.mono_ms() < member.lease_until_ms


class TellsWhatIsInTheLogToHaveLost(Offices):
    def _leave(self, member: RaftMember) -> None:
        super()._leave(member)
        self._inboxes.fail_in_log(member.take_all_waiting(), member.not_leader())


class InstallsUnmarked(Transfers):
    def begin(self, member: RaftMember, ready: Ready, puts: Any) -> bool:
        begun = super().begin(member, ready, puts)
        for key in [key for key in puts[RAFT_META] if key.startswith(b"P")]:
            del puts[RAFT_META][key]
        return begun


class NeverReportsASnapshot(Transfers):
    def _on_sent(self, member: RaftMember, node: int, sent: Any) -> None:
        self._sending.pop((member.group, node), None)


# (mutant, what it breaks, seeds known to show it: tried first, and then the others)
MUTANTS: list[tuple[type[RaftReplicas], str, Sequence[int]]] = [
    (AcknowledgesBeforeTheDisk, "acknowledged_is_durable", [0]),
    (TakesOneFsyncForAnother, "acknowledged_is_durable", [0]),
    (GivesEffectsToFollowers, "effects_of_leaders_only", [0]),
    (SwallowsEffects, "memory_is_what_the_rows_say", [0]),
    (AnswersReadsByItself, "never_lost", [5, 23]),
    (AppliesInTwoWrites, "applied_agrees", [3, 12, 19]),
    (KeepsWhatASnapshotReplaced, "applied_agrees", [6, 18, 20]),
    (with_offices(HasNoLease), "one_live_lease", [16, 19, 23]),
    (with_offices(LeasesFromTheAnswer), "one_live_lease", [16, 19, 23]),
    (with_offices(LeadsBeforeItKnowsAll), "never_lost", [5, 26, 36]),
    (with_offices(TellsWhatIsInTheLogToHaveLost), "never_lost", [18, 35, 47]),
    (with_transfers(InstallsUnmarked), "applied_agrees", [425, 1_069, 2_467]),
    (with_transfers(NeverReportsASnapshot), "progress_after_healing", [1, 20]),
]
SEEDS_MAX = 60


@pytest.mark.parametrize(
    ("mutant", "broken", "seeds"), MUTANTS, ids=lambda value: getattr(value, "mutant_name", getattr(value, "__name__", None))
)
def test_a_driver_with_a_bug_is_caught(mutant: type[RaftReplicas], broken: str, seeds: Sequence[int]) -> None:
    for seed in (*seeds, *range(SEEDS_MAX)):
        try:
            run_seed(seed, steps=STEPS, replicas_type=mutant)
        except SeedFailed as failure:
            assert broken in str(failure), f"caught by another check than {broken}: {failure}"
            return
    raise AssertionError(f"{SEEDS_MAX} seeds did not show it")
