"""A modest number of random walks and plans over a Raft group; more with `python -m wheelsched.testing.raft_sim --seeds N`, and
`raft_plans` the same way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from wheelsched.raft import AppendResponse, Entry, EntryKind, Ready, VoteResponse, make_configuration, make_entry
from wheelsched.raft.ready import HardState
from wheelsched.testing.raft_plans import PLANS, run_plan
from wheelsched.testing.raft_scenarios import DEFAULT_CONFIG
from wheelsched.testing.raft_sim import Simulation, run_seed
from wheelsched.testing.raft_world import Image, Invariants, Node, Timeouts, World, WorldBroken

ROOT = Path(__file__).parents[2]

# (seed, steps) of failures once seen: a newcomer above its leader's term with neither pre-vote nor check-quorum; and, the check's own,
# `match` that fell after an old refusal and rose in the same turn.
REGRESSIONS = ((8_200_396, 400), (8_102_273, 400))
SEEDS = 160
BATCH = 20
PLAN_SEEDS = 16


@pytest.mark.parametrize("first", range(1, SEEDS + 1, BATCH))
def test_walk(first: int) -> None:
    for seed in range(first, first + BATCH):
        run_seed(seed, 600)


@pytest.mark.parametrize("plan", sorted(PLANS))
def test_plan(plan: str) -> None:
    for seed in range(1, PLAN_SEEDS + 1):
        run_plan(plan, seed)


def test_regressions() -> None:
    for seed, steps in REGRESSIONS:
        run_seed(seed, steps)


def test_the_walks_do_something() -> None:
    """A simulator that never elects, crashes or cuts anything finds nothing either."""
    events, terms, commits, reads = 0, 0, 0, 0
    kinds: set[str] = set()
    for seed in range(1, 41):
        simulation = Simulation(seed)
        for _ in range(300):
            simulation.step()
            kinds.add(simulation.recent[-1].split()[1])
        events += simulation.event_count
        terms += len(simulation.invariants._leaders)
        commits += max(simulation.invariants.last_committed - 10, 0)
        reads += simulation.read_count
    assert kinds >= {"tick", "deliver", "turn", "write", "sync", "apply", "propose", "read", "partition", "heal", "crash", "restart",
                     "pause", "compact", "change", "transfer", "campaign"}  # fmt: skip
    assert terms > 30 and commits > 150 and reads > 20


def test_a_seed_replays_byte_for_byte_in_another_process() -> None:
    """No decision hangs on the order of a set or on addresses."""
    prints = []
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-m", "wheelsched.testing.raft_sim", "--seed", "11", "--steps", "400", "--trace"]
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
        prints.append(done.stdout.splitlines()[:-1])  # the last line holds the time it took
    assert prints[0] == prints[1] and len(prints[0]) > 400


# The checkers themselves, on histories made by hand.


def a_world(count: int = 3, *, term: int = 1, log: tuple[int, ...] = ()) -> tuple[World, Invariants]:
    world = World()
    conf = make_configuration(range(1, count + 1))
    for node_id in range(1, count + 1):
        image = Image(conf=conf, term=term, log=[entry(index + 1, value) for index, value in enumerate(log)])
        world.nodes[node_id] = Node(node_id, DEFAULT_CONFIG, image, Timeouts(f"{node_id}"))
    return world, Invariants(world)


def entry(index: int, term: int, payload: bytes = b"") -> Entry:
    return make_entry(0, index, term, EntryKind.COMMANDS, payload)


def broken(invariants: Invariants) -> str:
    with pytest.raises(WorldBroken) as caught:
        invariants.check_all()
    return caught.value.name


def test_two_leaders_of_one_term_are_seen() -> None:
    world, invariants = a_world()
    for node_id in (1, 2):
        world.nodes[node_id].running._lead()
    assert broken(invariants) == "one_leader_per_term"


def test_a_term_or_vote_that_changes_back_is_seen() -> None:
    world, invariants = a_world(term=3)
    core = world.nodes[1].running
    core.vote = 2
    invariants.check_all()
    core.vote = 3
    assert broken(invariants) == "vote_is_kept"
    core.term = 2
    assert broken(invariants) == "term_never_falls"


def test_equal_entries_behind_different_ones_are_seen() -> None:
    world, invariants = a_world(2)
    world.nodes[1].running.log.append([entry(1, 1, b"a"), entry(2, 1, b"b")])
    world.nodes[2].running.log.append([entry(1, 1, b"x"), entry(2, 1, b"b")])
    assert broken(invariants) == "logs_match"


def test_a_committed_entry_that_differs_is_seen() -> None:
    world, invariants = a_world(2)
    for node_id, term in ((1, 1), (2, 2)):
        core = world.nodes[node_id].running
        core.term = 2
        core.log.append([entry(1, term)])
        core.commit = 1
    assert broken(invariants) == "committed_never_changes"


def test_a_leader_without_a_committed_entry_is_seen_but_a_stale_one_is_not() -> None:
    """It is the term in which the entry was first seen committed that counts, not the entry's own: a stale leader of a term in
    between need not have it."""
    world, invariants = a_world(3)
    holder, leader = world.nodes[1].running, world.nodes[2].running
    holder.term = 5
    holder.log.append([entry(1, 3)])
    holder.commit = 1
    leader.term = 4
    leader._lead()
    invariants.check_all()
    leader.step_down()
    leader.term = 6
    leader._lead()
    assert broken(invariants) == "leader_completeness"


def test_states_that_differ_at_one_index_are_seen() -> None:
    world, invariants = a_world(2)
    for node_id in (1, 2):
        world.nodes[node_id].image.applied = 0
    world.nodes[2].image.digest = 1
    assert broken(invariants) == "applied_agrees"


def test_a_promise_that_is_not_on_disk_is_seen() -> None:
    world, _ = a_world(2)
    node = world.nodes[1]
    for message in (AppendResponse(0, 1, 2, 1, 1), AppendResponse(0, 1, 2, 2, 0), VoteResponse(0, 1, 2, 1)):
        with pytest.raises(WorldBroken, match="acknowledged_is_durable"):
            world.send(node, message)
    node.image.write(Ready(1, HardState(1, 2, 0), (entry(1, 1),), None, (), (), (), (), True), None)
    node.durable = node.image.copy()
    world.send(node, AppendResponse(0, 1, 2, 1, 1))
    world.send(node, VoteResponse(0, 1, 2, 1))
