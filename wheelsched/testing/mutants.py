"""Deliberate bugs of every layer, each planted for as long as a `with` lasts, and what catches it: `python -m wheelsched.testing.mutants`.

The product holds none of them and no file is changed: attributes and functions are replaced in this process. Those of the Raft core alone
are in `raft_mutants.py`, which this reuses; here stand the ones of driver, engine, dispatch and node besides, so that of each kind of
promise at least one has been broken once. Prints a table: the bug, what caught it, after how many schedules, by which invariant. A bug that
nothing catches within its budget survives, and the exit code says so.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

import wheelsched.engine.attempts as attempts_module
import wheelsched.raft.raft as raft_module
import wheelsched.replica.raft_replicas as replicas_module
from wheelsched.dispatch.dispatcher import Dispatcher
from wheelsched.dispatch.loader import Loader
from wheelsched.dispatch.timers import Timers
from wheelsched.engine.context import Context
from wheelsched.fairness import split_by_queue
from wheelsched.model import keys
from wheelsched.model.rows import decode_state, encode_row
from wheelsched.model.states import LEASED
from wheelsched.node.allowances import _Ledger
from wheelsched.node.node import Node
from wheelsched.raft import Configuration, Entry, PreVoteRequest, Raft
from wheelsched.replica.applying import Applier
from wheelsched.replica.offices import Offices
from wheelsched.replica.raft_replicas import RaftReplicas
from wheelsched.store.memory import MemoryStore
from wheelsched.store.raftlog import RaftLog, _meta_key
from wheelsched.testing import cluster_sim, raft_mutants, simulate
from wheelsched.testing.raft_plans import run_plan
from wheelsched.testing.raft_scenarios import load_scenarios, run_scenario
from wheelsched.testing.raft_sim import run_seed as run_raft_seed
from wheelsched.testing.simulate_node import quiet_logs

VECTORS: Final = Path(__file__).parents[2] / "tests" / "vectors" / "raft"

STEPS: Final = 50

Patch = tuple[Any, str, Any]


@dataclass(frozen=True, slots=True)
class Bug:
    """`hunters`: what is let loose on it, in this order, and how many schedules each may take; of the vectors the topics, 0 schedules."""

    name: str
    patches: tuple[Patch, ...]
    hunters: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Catch:
    """`by` empty: nothing caught it within its budget."""

    by: str
    schedules: int
    reason: str


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """The bug is in the product of this process."""
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in bug.patches]
    handlers: dict[Any, Any] = raft_module._HANDLERS
    before = dict(handlers)
    for owner, name, value in bug.patches:
        original = vars(owner)[name]
        setattr(owner, name, value)
        handlers.update({kind: value for kind, handler in handlers.items() if handler is original})
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
        handlers.update(before)


# ---- the bugs

_handle_pre_vote = Raft._on_vote_request
_apply_conf = Raft.apply_conf
_write = MemoryStore.write
_install = RaftLog.install
_run = Applier._run


def acknowledges_before_fsync(self: RaftReplicas, written: Sequence[tuple[Any, Any]]) -> None:
    if any(ready.must_sync for _, ready in written):
        self._written_turn += 1
        self._sync_wanted.set()
    for member, ready in written:
        self._persist(member, ready)


def pre_vote_regardless_of_log(self: Raft, message: Any) -> None:
    if type(message) is PreVoteRequest:
        message = msgspec.structs.replace(message, last_index=1 << 40, last_term=1 << 40)
    _handle_pre_vote(self, message)


def applies_before_commit(self: Raft) -> tuple[Entry, ...]:
    entries = self.log.slice(self._handed + 1, self.log.durable)
    self._handed = entries[-1].index
    return entries


def writes_index_apart(self: MemoryStore, puts: Any, ranges: Any = ()) -> None:
    meta = puts.get(keys.RAFT_META, {})
    index = {key: row for key, row in meta.items() if key[:1] == b"A"}
    if index and any(puts.get(family) for family in keys.STATE_FAMILIES):
        _write(self, {keys.RAFT_META: index})
        puts = {**puts, keys.RAFT_META: {key: row for key, row in meta.items() if key not in index}}
    _write(self, puts, ranges)


def installs_without_index(self: RaftLog, puts: Any, ranges: Any, group: int, *rest: Any) -> None:
    _install(self, puts, ranges, group, *rest)
    del puts[keys.RAFT_META][_meta_key(b"A", group)]


async def reads_without_quorum(self: RaftReplicas, group: int) -> None:
    member = self._members[group]
    if member.raft.leadership is None or self._stopping:
        raise member.not_leader()


def leads_without_lease(self: Offices, member: Any) -> bool:
    leadership = member.raft.leadership
    return leadership is not None and member.state.applied_index >= leadership.first_own_index


async def moves_mark_after_scan(self: Loader, group: int, lane: int) -> None:
    if group not in self._led:
        return
    marks = self._timers.loaded_ms[lane]
    until_ms = self._clock.wall_ms() + self._reach_ms()
    start = keys.job_range(group, lane, marks[group])
    end = keys.job_range(group, lane, max(until_ms, marks[group]))
    while rows := self._store.scan(keys.JOBS, start, end, self._slice_rows):
        self._add_timers(group, lane, rows)
        self._on_timers()
        start = rows[-1][0] + b"\0"
        await asyncio.sleep(0)
        if group not in self._led:
            return
    marks[group] = max(until_ms, marks[group])


def answers_after_expire(self: Node, job_id: bytes, attempt: int, fencing: int) -> Any:
    lease = self.dispatcher.leases.get(job_id)
    return None if lease is None or lease.attempt != attempt or lease.fencing != fencing else lease


def never_holds(self: Context, due_at_ms: int) -> tuple[int, bool]:
    return max(due_at_ms, self.stamp_ms), False


def applies_conf_twice(self: Raft, change: Any) -> Configuration:
    _apply_conf(self, change)
    return _apply_conf(self, change)


def keeps_timers(self: Timers, group: int) -> None:
    for lane in (0, 1):
        self.loaded_ms[lane][group] = 0


def wakes_nobody(self: Dispatcher, group: int, lane: int, records: bytes) -> None:
    for place, batch in split_by_queue(records):
        self.queues.by_number(place >> 2).make_ready(group, lane, place & 3, batch)


def writes_other_rows(self: Applier, member: Any, entry: Any) -> Any:
    """On one node, now and then."""
    txn, replies, effects = _run(self, member, entry)
    states = txn.writes[keys.STATE]
    if getattr(self._store, "_node", 0) == 2 and entry.stamp_ms % 7 == 0:
        for key, row in states.items():
            if row is not None:
                state = decode_state(row)
                states[key] = encode_row(msgspec.structs.replace(state, updated_at_ms=state.updated_at_ms + 1))
    return txn, replies, effects


def looks_the_same(self: cluster_sim.SimNode, group: int) -> int:
    return 0


def takes_any_token(context: Any, command: Any) -> Any:
    state = context.txn.state(command.job_id)
    return state if state is not None and state.status in LEASED else None


def _raft(name: str) -> tuple[Patch, ...]:
    return (next(mutant for mutant in raft_mutants.MUTANTS if mutant.name == name).patch,)


BUGS: Final = (
    Bug("acknowledge before fsync", ((RaftReplicas, "_await_durable", acknowledges_before_fsync),), (("cluster_sim", 5), ("simulate", 20))),
    Bug("vote forgotten on restart", _raft("vote forgotten on restart"), (("vectors durability", 0), ("walk", 10))),
    Bug(
        "commit of an earlier term by counting", _raft("old terms committed by count"),
        (("vectors replication", 0), ("plan figure_8", 20)),
    ),
    Bug("pre-vote regardless of the log", ((Raft, "_on_vote_request", pre_vote_regardless_of_log),), (("vectors prevote", 0),)),
    Bug("apply before commit", ((Raft, "_take_committed", applies_before_commit),), (("vectors replication", 0), ("cluster_sim", 10))),
    Bug("applied index outside the batch", ((MemoryStore, "write", writes_index_apart),), (("cluster_sim", 40), ("simulate", 20))),
    Bug("snapshot without its index", ((RaftLog, "install", installs_without_index),), (("cluster_sim", 60), ("simulate", 20))),
    Bug("committed suffix truncated", _raft("short append cuts a longer log"), (("vectors replication", 0),)),
    Bug("read without a quorum round", ((RaftReplicas, "read_barrier", reads_without_quorum),), (("cluster_sim", 40), ("simulate", 40))),
    Bug("read without a quorum round (core)", _raft("read without quorum"), (("vectors reads", 0),)),
    Bug(
        "fire without lease", ((replicas_module, "_BY_LEASE", ()), (Offices, "may_lead", leads_without_lease)),
        (("cluster_sim", 20), ("simulate", 20)),
    ),
    Bug("loader mark moved after the scan", ((Loader, "_load_group", moves_mark_after_scan),), (("simulate", 40),)),
    Bug("heartbeat answered after Expire", ((Node, "_live_lease", answers_after_expire),), (("simulate", 20),)),
    Bug("held mark ignored", ((Context, "settle_due", never_holds),), (("simulate clocks", 30),)),
    Bug("membership applied twice", ((Raft, "apply_conf", applies_conf_twice),), (("vectors membership", 0), ("plan churn", 20))),
    Bug("duplicated timer after re-election", ((Timers, "clear_group", keeps_timers),), (("simulate", 5),)),
    Bug("lost wake-up of a waiter", ((Dispatcher, "_ready", wakes_nobody),), (("simulate", 5),)),
    # The simulation would see it at once, so it is told not to look: the nodes have to.
    Bug(
        "rows that differ on one node", ((Applier, "_run", writes_other_rows), (cluster_sim.SimNode, "digest", looks_the_same)),
        (("cluster_sim", 20),),
    ),
    Bug("room given out before all told what runs", ((_Ledger, "is_blind", False),), (("simulate caps", 30),)),
    Bug("end of a stale attempt accepted", ((attempts_module, "_leased", takes_any_token),), (("simulate", 10),)),
)  # fmt: skip


def hunt(bug: Bug, *, scale: float = 1.0) -> Catch:
    """What catches the bug first. `scale` of the budgets."""
    spent = 0
    with planted(bug):
        for hunter, budget in bug.hunters:
            schedules = max(int(budget * scale), 1)
            catch = _by_vectors(hunter) if not budget else _by_schedules(hunter, schedules)
            if catch is not None:
                return catch
            spent += schedules
    return Catch("", spent, "")


def _by_vectors(hunter: str) -> Catch | None:
    topics = tuple(hunter.split()[1:])
    for count, scenario in enumerate(load_scenarios(VECTORS), 1):
        if topics and not scenario["id"].startswith(topics):
            continue
        try:
            run_scenario(scenario)
        except Exception:
            return Catch("vectors", count, str(scenario["id"]))
    return None


def _by_schedules(hunter: str, schedules: int) -> Catch | None:
    run = _runner(hunter)
    for seed in range(1, schedules + 1):
        try:
            run(seed)
        except Exception as error:
            cause = error.__cause__ or error
            return Catch(hunter, seed, str(getattr(error, "name", "") or getattr(cause, "name", "") or f"{type(cause).__name__}"))
    return None


def _runner(hunter: str) -> Callable[[int], object]:
    match hunter.split():
        case ["cluster_sim"]:
            return cluster_sim.run_seed
        case ["simulate"]:
            return lambda seed: simulate.run_seed(seed, steps=STEPS)
        case ["simulate", "clocks"]:  # nothing but clocks that are set
            return lambda seed: simulate.run_seed(seed, steps=STEPS, profile=_only(seed, clock_steps=(-200, -80, -2_000, 200)))
        case ["simulate", "caps"]:  # a cap over groups that move
            faults = {"cap": 3, "group_count": 4, "transfers": 1.5, "crashes": 1.0}
            return lambda seed: simulate.run_seed(seed, steps=STEPS, profile=_only(seed, **faults))
        case ["plan", plan]:
            return lambda seed: run_plan(plan, seed)
        case ["walk"]:
            return lambda seed: run_raft_seed(seed, 600)
    raise ValueError(f"no hunter {hunter}")


def _only(seed: int, **faults: Any) -> simulate.Profile:
    """The profile of a seed without any faults but these."""
    calm = {"cuts": 0.0, "crashes": 0.0, "stops": 0.0, "pauses": 0.0, "clock_steps": (), "stalls": 0.0, "transfers": 0.0}
    return replace(simulate.Profile.draw(random.Random(f"profile {seed}")), **{**calm, **faults})


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant deliberate bugs and see what catches them.")
    parser.add_argument("names", nargs="*", help="bugs whose name begins so; none: all")
    parser.add_argument("--scale", type=float, default=1.0, help="times the number of schedules each may take")
    arguments = parser.parse_args()
    quiet_logs()
    survivors = 0
    print(f"{'bug':42} {'caught by':14} {'schedules':>9} {'seconds':>7}  how it showed")
    for bug in BUGS:
        if arguments.names and not bug.name.startswith(tuple(arguments.names)):
            continue
        started = time.process_time()
        catch = hunt(bug, scale=arguments.scale)
        survivors += not catch.by
        seconds = time.process_time() - started
        print(f"{bug.name:42} {catch.by or 'SURVIVES':14} {catch.schedules:>9} {seconds:>7.1f}  {catch.reason}", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
