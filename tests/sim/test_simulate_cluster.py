"""Whole clusters under faults, a few seeds: fixed ones, so that a change that breaks one is seen, and one that was never run.

A failure names seed and commit, shows the last events, and prints the command that replays it. Many more seeds:
`python -m wheelsched.testing.simulate --schedules 200 --fresh`; deliberate bugs and what catches each of them:
`python -m wheelsched.testing.mutants`.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys

import pytest

from wheelsched.model.rows import JobState
from wheelsched.testing import mutants
from wheelsched.testing.cluster_sim import ClusterBroken
from wheelsched.testing.simulate import Known, Profile, SeedFailed, Simulation, Walls, run_seed
from wheelsched.testing.simulate_node import quiet_logs
from wheelsched.testing.virtual_loop import OWNER, NothingLeft, VirtualLoop

STEPS = 40
# Between them: crashes, cuts, pauses, transfers, clocks that are set, schedules.
FIXED = (2, 10, 16)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    quiet_logs()


# The loop.


def in_virtual_time(work: object) -> object:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)  # type: ignore[arg-type]


def test_an_hour_passes_at_once_and_to_the_millisecond() -> None:
    async def work() -> float:
        await asyncio.sleep(3_600.001)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.25):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert in_virtual_time(work()) == pytest.approx(3_600.251, abs=1e-5)


def test_a_node_that_stands_still_is_late_with_everything_and_loses_nothing() -> None:
    async def work() -> list[tuple[int, float]]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        seen: list[tuple[int, float]] = []

        async def tick(owner: int) -> None:
            OWNER.set(owner)
            for _ in range(3):
                await asyncio.sleep(1)
                seen.append((owner, round(loop.time(), 3)))

        tasks = [asyncio.ensure_future(tick(owner)) for owner in (1, 2)]
        await asyncio.sleep(1.5)
        loop.pause(1)
        await asyncio.sleep(2)
        loop.resume(1)
        await asyncio.gather(*tasks)
        return seen

    assert in_virtual_time(work()) == [(1, 1.0), (2, 1.0), (2, 2.0), (2, 3.0), (1, 3.5), (1, 4.5)]


def test_waiting_for_nobody_is_an_error_and_not_a_hang() -> None:
    async def work() -> None:
        await asyncio.Event().wait()

    with pytest.raises(NothingLeft):
        in_virtual_time(work())


# The cluster.


@pytest.mark.parametrize("seed", FIXED)
def test_a_cluster_keeps_its_promises_under_faults(seed: int) -> None:
    run_seed(seed, steps=STEPS)


def test_a_cluster_keeps_its_promises_under_new_faults() -> None:
    """A new seed in every run; it is printed, so that a run that found nothing can be told apart from one that did not look."""
    seed = random.SystemRandom().getrandbits(32)
    print("fresh seed:", seed)
    run_seed(seed, steps=STEPS)


def test_the_same_seed_gives_the_same_history_in_another_process() -> None:
    """Byte for byte: nothing depends on hash order, addresses or the time of day."""
    script = "from wheelsched.testing.simulate import *; quiet_logs(); print(run_seed(3, steps=15).trace_hash())"
    runs = [
        subprocess.run([sys.executable, "-c", script], env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."}, capture_output=True, text=True)
        for seed in ("1", "2")
    ]
    assert runs[0].returncode == 0, runs[0].stderr
    assert runs[0].stdout == runs[1].stdout and len(runs[0].stdout) > 30


def test_a_failure_prints_its_seed_and_the_command_that_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fall(self: Simulation) -> str:
        self.note("something happened")
        raise ClusterBroken("never_lost", job="j1")

    monkeypatch.setattr(Simulation, "run", fall)
    with pytest.raises(SeedFailed) as failure:
        run_seed(12, steps=STEPS)
    text = str(failure.value)
    assert failure.value.name == "never_lost" and "something happened" in text and "commit" in text
    assert f"python -m wheelsched.testing.simulate --seed 12 --steps {STEPS}" in text


@pytest.mark.parametrize("name", ["lost wake-up of a waiter"])
def test_a_planted_bug_is_caught(name: str) -> None:
    (bug,) = [bug for bug in mutants.BUGS if bug.name == name]
    catch = mutants.hunt(bug)
    assert catch.by == "simulate", f"{name} survived {catch.schedules} schedules"


def test_every_planted_bug_is_taken_out_again() -> None:
    for bug in mutants.BUGS:
        before = [vars(owner)[name] for owner, name, _ in bug.patches]
        with mutants.planted(bug):
            assert [vars(owner)[name] for owner, name, _ in bug.patches] != before
        assert [vars(owner)[name] for owner, name, _ in bug.patches] == before


# The checkers can fail.


def a_state(version: int, *, status: int = 0, fencing: int = 0, attempt: int = 0) -> JobState:
    return JobState(b"0123456789abcdef", status, version, "t", "q", 0, 1, 5, 5, 5, fencing=fencing, attempt=attempt)


def a_simulation() -> Simulation:
    return Simulation(1, VirtualLoop(), profile=Profile.draw(random.Random("profile 1")))


def test_an_answer_older_than_one_that_was_there_before_the_question_is_seen() -> None:
    simulation = a_simulation()
    simulation._learn(a_state(4), 0, "create")
    simulation._learn(a_state(3), 0, "read")  # asked before the other answer came
    with pytest.raises(ClusterBroken, match="linearizable"):
        simulation._learn(a_state(3), 10, "read")


def test_one_version_told_in_two_ways_is_seen() -> None:
    simulation = a_simulation()
    simulation._learn(a_state(2, status=2, fencing=7), 0, "claim")
    with pytest.raises(ClusterBroken, match="linearizable"):
        simulation._learn(a_state(2, status=5, fencing=7), 0, "complete")


def test_a_token_that_falls_and_an_end_that_is_taken_back_are_seen() -> None:
    job = Known("j1", 0)
    simulation = a_simulation()
    simulation._check_states(job, a_state(2, fencing=7, attempt=1, status=2))
    with pytest.raises(ClusterBroken, match="token_grows"):
        simulation._check_states(job, a_state(3, fencing=6, attempt=1, status=2))
    job = Known("j2", 0)
    simulation._check_states(job, a_state(2, fencing=7, attempt=1, status=5))
    with pytest.raises(ClusterBroken, match="never_lost"):
        simulation._check_states(job, a_state(3, fencing=7, attempt=1, status=2))


def test_what_clocks_have_read_is_known_for_each_stretch_of_time() -> None:
    walls = Walls()
    walls.note(1, 0, 0)
    walls.note(2, 0, 0)
    walls.note(2, 1_000, 5_000)
    walls.note(2, 2_000, -5_000)
    assert walls.most_ahead_ms(0, 900) == 0
    assert walls.most_ahead_ms(1_500, 1_600) == 5_000
    assert walls.most_ahead_ms(2_500, 3_000) == 0
