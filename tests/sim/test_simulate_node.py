"""Random days of a node, a few hundred seeds: each either fixed, so that a change that breaks one is seen, or new each time.

A failure names its seed, shows the last events, and prints the command that replays it.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys

import pytest
from msgspec.structs import replace

from wheelsched.testing.simulate_node import SeedFailed, Simulation, quiet_logs, run_seed

STEPS = 30
FIXED = [range(first, first + 25) for first in range(0, 275, 25)]
FRESH_COUNT = 50


@pytest.fixture(autouse=True)
def _quiet() -> None:
    quiet_logs()


@pytest.mark.parametrize("seeds", FIXED, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_a_node_agrees_with_the_obvious_model_through_random_days(seeds: range) -> None:
    for seed in seeds:
        run_seed(seed, steps=STEPS)


def test_a_node_agrees_with_the_obvious_model_on_new_days() -> None:
    """New seeds in every run; they are printed, so that a run that found nothing can be told apart from one that did not look."""
    seeds = [random.SystemRandom().getrandbits(32) for _ in range(FRESH_COUNT)]
    print("fresh seeds:", *seeds)
    for seed in seeds:
        run_seed(seed, steps=STEPS)


def test_a_long_day_holds_too() -> None:
    run_seed(4_711, steps=400)


@pytest.mark.parametrize("seed", [3, 17, 42])
def test_the_same_seed_gives_the_same_events(seed: int) -> None:
    assert run_seed(seed, steps=STEPS) == run_seed(seed, steps=STEPS)


def test_the_same_seed_gives_the_same_events_in_another_process() -> None:
    """Nothing depends on hash order, addresses or the time of day."""
    script = f"from wheelsched.testing.simulate_node import *; quiet_logs(); print('\\n'.join(run_seed(5, steps={STEPS})))"
    runs = [
        subprocess.run([sys.executable, "-c", script], env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."}, capture_output=True, text=True)
        for seed in ("1", "2")
    ]
    assert runs[0].returncode == 0, runs[0].stderr
    assert runs[0].stdout == runs[1].stdout


def test_a_failure_prints_its_seed_and_the_command_that_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fall(self: Simulation) -> list[str]:
        self.note("3 something happened")
        raise AssertionError("never_lost: j1 is gone")

    monkeypatch.setattr(Simulation, "run", fall)
    with pytest.raises(SeedFailed) as failure:
        run_seed(12, steps=STEPS)
    text = str(failure.value)
    assert "never_lost: j1 is gone" in text and "3 something happened" in text
    assert f"python -m wheelsched.testing.simulate_node --seed 12 --steps {STEPS}" in text


def test_the_model_sees_a_lost_job_and_a_job_run_early() -> None:
    """A checker that cannot fail shows nothing: take a row away behind the node's back, and claim a job before its time."""

    async def lose() -> None:
        simulation = Simulation(1, steps=0)
        await simulation.node.open()
        await simulation.create()
        assert len(simulation.jobs) == 1
        rows = simulation.node.store.scan("state", b"", b"", 10)
        simulation.node.store.write({"state": {key: None for key, _ in rows}})
        with pytest.raises(AssertionError, match="never_lost"):
            await simulation.look()
        await simulation.node.crash()

    asyncio.run(lose())

    async def early() -> None:
        simulation = Simulation(1, steps=0)
        await simulation.node.open()
        simulation.learn(await simulation.node.create("a", delay_s=60))
        await simulation.node.advance(s=60)
        (claimed,) = await simulation.node.claim("a")
        with pytest.raises(AssertionError, match="never_early"):
            simulation.node.clock.step_wall(ms=-60_000)
            for job in simulation.jobs.values():
                job.wall_max_ms = 0
            simulation.learn_claim(claimed._replace(state=replace(claimed.state, lease_expires_at_ms=1)), ("a",))
        await simulation.node.crash()

    asyncio.run(early())
