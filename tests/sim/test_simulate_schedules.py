"""Random days of schedules: fixed seeds, so that a change that breaks one is seen, and a few that are new each time."""

from __future__ import annotations

import asyncio
import random

import pytest

from wheelsched.model import keys
from wheelsched.testing.simulate_node import quiet_logs
from wheelsched.testing.simulate_schedules import Simulation, run_seed

STEPS = 25
FIXED = [range(first, first + 5) for first in range(0, 20, 5)]
FRESH_COUNT = 3


@pytest.fixture(autouse=True)
def _quiet() -> None:
    quiet_logs()


@pytest.mark.parametrize("seeds", FIXED, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_no_occurrence_is_lost_or_made_twice_through_random_days(seeds: range) -> None:
    for seed in seeds:
        run_seed(seed, steps=STEPS)


def test_no_occurrence_is_lost_or_made_twice_on_new_days() -> None:
    seeds = [random.SystemRandom().getrandbits(32) for _ in range(FRESH_COUNT)]
    print("fresh seeds:", *seeds)
    for seed in seeds:
        run_seed(seed, steps=STEPS)


def test_the_same_seed_gives_the_same_events() -> None:
    assert run_seed(3, steps=STEPS) == run_seed(3, steps=STEPS)


@pytest.mark.parametrize(("row", "told"), [("job", "jobs: orphans"), ("record", "records, there are 0")])
def test_the_checks_see_a_row_that_went_behind_the_nodes_back(row: str, told: str) -> None:
    """A checker that cannot fail shows nothing."""

    async def lose() -> None:
        simulation = Simulation(1, steps=0)
        await simulation.node.open()
        await simulation.node.put_schedule("s0", cron="* * * * *", shadow=True)
        await simulation.node.advance(s=200)
        await simulation.look()
        store = simulation.node.store
        family = keys.STATE if row == "job" else keys.SCHEDULES
        rows = store.scan(family, b"", b"", 100)
        gone = [key for key, _ in rows if row == "job" or key[2:3] == b"k"]
        assert gone
        store.write({family: dict.fromkeys(gone)})
        with pytest.raises(AssertionError, match=told):
            await simulation.look()
        await simulation.node.crash()

    asyncio.run(lose())
