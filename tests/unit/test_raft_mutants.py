"""Every planted bug is found: by the vectors, and some by plans or the random walk as well. See `wheelsched/testing/raft_mutants.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from wheelsched.testing.raft_mutants import MUTANTS, Mutant, caught_by_plan, caught_by_vectors, caught_by_walk

VECTORS = Path(__file__).parents[1] / "vectors" / "raft"


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.topics], ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_the_vectors_catch(mutant: Mutant) -> None:
    assert caught_by_vectors(mutant, VECTORS, mutant.topics)


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.walk_seeds], ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_the_walk_catches(mutant: Mutant) -> None:
    assert caught_by_walk(mutant, mutant.walk_seeds)


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.plan], ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_the_plan_catches(mutant: Mutant) -> None:
    assert caught_by_plan(mutant, mutant.plan, mutant.plan_seeds)


def test_every_mutant_is_asked_after() -> None:
    assert all(mutant.topics or mutant.walk_seeds or mutant.plan_seeds for mutant in MUTANTS)


def test_without_a_mutant_nothing_is_caught() -> None:
    nothing = Mutant("nothing", (Mutant, "unused", None))
    Mutant.unused = None  # type: ignore[attr-defined]
    try:
        assert not caught_by_vectors(nothing, VECTORS, ("durability", "own"))
        assert not caught_by_walk(nothing, 3)
        assert not caught_by_plan(nothing, "figure_8", 2)
    finally:
        del Mutant.unused  # type: ignore[attr-defined]
