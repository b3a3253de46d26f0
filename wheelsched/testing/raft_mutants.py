"""Deliberate bugs in the Raft core (SIM.md section 8), each a patch for as long as a `with` lasts; the product holds none of them.

A suite that misses a planted bug would miss a real one too: `tests/unit/test_raft_mutants.py` demands that each is caught.
`python -m wheelsched.testing.raft_mutants [NAME...]` says by what, and after how many schedules of the random walk.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

import wheelsched.raft.leadership as leadership_module
import wheelsched.raft.raft as raft_module
from wheelsched.raft import (
    Answer,
    Append,
    AppendResponse,
    ConfChange,
    Configuration,
    Heartbeat,
    HeartbeatResponse,
    InstallSnapshot,
    PeerState,
    PreVoteRequest,
    Raft,
    RaftConfig,
    Ready,
    RestoredState,
    VoteRequest,
)
from wheelsched.raft.configuration import Change, Mode
from wheelsched.raft.leadership import Leadership
from wheelsched.raft.log import Log
from wheelsched.raft.progress import Progress
from wheelsched.raft.quorum import committed_index as _committed_index
from wheelsched.testing.raft_plans import PLANS, run_plan
from wheelsched.testing.raft_scenarios import load_scenarios, run_scenario
from wheelsched.testing.raft_sim import run_seed
from wheelsched.testing.raft_world import Image, Node, World

Patch = tuple[object, str, Any]
SEEDS_MAX = 30


@dataclass(frozen=True, slots=True)
class Mutant:
    """`topics`: scenario files that catch it. `walk_seeds`: schedules of 600 events that do; `plan`, `plan_seeds`: the directed plan
    and how many seeds of it. 0: not asked to, as it takes too long or never happened."""

    name: str
    patch: Patch
    topics: tuple[str, ...] = ()
    walk_seeds: int = 0
    plan: str = ""
    plan_seeds: int = 0


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    owner, name, value = mutant.patch
    original = vars(owner)[name]
    handlers: dict[Any, Any] = raft_module._HANDLERS
    handled = [kind for kind, handler in handlers.items() if handler is original]
    setattr(owner, name, value)
    handlers.update(dict.fromkeys(handled, value))
    try:
        yield
    finally:
        setattr(owner, name, original)
        handlers.update(dict.fromkeys(handled, original))


def caught_by_vectors(mutant: Mutant, directory: Path, topics: tuple[str, ...] | None = None) -> str:
    """Id of the first scenario that fails with the bug planted, empty if none does."""
    with planted(mutant):
        for scenario in load_scenarios(directory):
            if topics and not scenario["id"].startswith(topics):
                continue
            try:
                run_scenario(scenario)
            except Exception:
                return str(scenario["id"])
    return ""


def caught_by_walk(mutant: Mutant, seeds: int, steps: int = 600) -> int:
    """Number of schedules until one fails with the bug planted, 0 if none does."""
    with planted(mutant):
        for seed in range(1, seeds + 1):
            try:
                run_seed(seed, steps)
            except Exception:
                return seed
    return 0


def caught_by_plan(mutant: Mutant, plan: str, seeds: int) -> int:
    """Number of seeds of a directed plan until one fails with the bug planted, 0 if none does."""
    with planted(mutant):
        for seed in range(1, seeds + 1):
            try:
                run_plan(plan, seed)
            except Exception:
                return seed
    return 0


# ---- the bugs

_take_ready, _on_append, _on_snapshot = Raft.take_ready, Raft._on_append, Raft._on_snapshot
_init, _settle_term, _on_vote_request, _apply_conf = Raft.__init__, Raft._settle_term, Raft._on_vote_request, Raft.apply_conf
_append, _propose, _propose_conf = Leadership._append, Leadership.propose, Leadership.propose_conf
_on_heartbeat_response, _order_campaign = Leadership.on_heartbeat_response, Leadership._order_campaign
_restored, _write = Image.restored, Image.write


def everything_at_once(self: Raft) -> Ready | None:
    ready = _take_ready(self)
    return ready and replace(ready, now=ready.now + ready.after, after=())


def vote_requests_at_once(self: Raft) -> Ready | None:
    ready = _take_ready(self)
    if ready is None:
        return None
    requests = tuple(message for message in ready.after if isinstance(message, VoteRequest))
    rest = tuple(message for message in ready.after if not isinstance(message, VoteRequest))
    return replace(ready, now=ready.now + requests, after=rest)


def no_fsync(self: World, node: Node) -> bool:
    busy = bool(node.written)
    while node.written:
        ready = node.written.popleft()
        node.running.persisted(ready)
        for message in ready.after:
            self.send(node, message)
    return busy


def old_terms_by_count(self: Leadership) -> bool:
    raft, conf = self._raft, self._raft.configuration
    matches = {node_id: peer.match for node_id, peer in self.peers.items()}
    index = _committed_index(conf.voters, conf.outgoing, matches)
    if index is None or index <= raft.commit:
        return False
    for entry in raft.log.slice(raft.commit + 1, index):
        self.uncommitted_bytes -= leadership_module._weight(entry)
    raft.commit_to(index)
    if self.has_committed_own:
        self.reads.settle_index(index)
    self._answer_reads()
    return True


def counts_itself_early(self: Leadership, contents: Any) -> None:
    _append(self, contents)
    self.on_durable(self._raft.log.last_index)


def forgets_vote(self: Image) -> RestoredState:
    return replace(_restored(self), vote=0)


def loses_log_start(self: Image) -> RestoredState:
    return replace(_restored(self), snapshot_index=0, snapshot_term=0)


def no_hard_state(self: Image, ready: Ready, state: Image | None) -> None:
    _write(self, replace(ready, hard_state=None), state)


def change_upon_change(self: Leadership, changes: list[Change], mode: Mode) -> Answer:
    self.pending_conf_index = 0
    return _propose_conf(self, changes, mode)


def removed_leader_stays(self: Raft, change: ConfChange) -> Configuration:
    self.configuration = self.configuration.apply(change)
    if self.leadership is not None:
        self.leadership.on_configuration()
    return self.configuration


def reads_at_once(self: Leadership) -> None:
    if len(self.reads) and self.has_committed_own:
        self._raft.answer_reads(self.reads.take_confirmed(self.reads.newest))


def any_answer_confirms(self: Leadership, message: HeartbeatResponse) -> None:
    _on_heartbeat_response(self, message)
    if message.read_seq and self.has_committed_own:
        self._raft.answer_reads(self.reads.take_confirmed(message.read_seq))


def full_commit_in_heartbeats(self: Raft, message: Any) -> None:
    if isinstance(message, Heartbeat):
        message = msgspec.structs.replace(message, commit=self.commit)
    self._now.append(message)


def votes_twice(self: Raft, message: Any) -> None:
    self.vote = 0
    _on_vote_request(self, message)


def takes_old_terms(self: Raft, message: Any) -> bool:
    return True if message.term < self.term else _settle_term(self, message)


def prevote_raises_term(self: Raft, message: Any) -> bool:
    if type(message) is PreVoteRequest and message.term > self.term:
        self._become_follower(message.term, leader=0)
    return _settle_term(self, message)


def no_consistency_check(self: Raft, message: Append) -> None:
    term = self.log.term(message.prev_index)
    _on_append(self, message if term is None else msgspec.structs.replace(message, prev_term=term))


def cuts_always(self: Log, entries: Any) -> int:
    return int(entries[0].index)


def commits_beyond_message(self: Raft, message: Append) -> None:
    _on_append(self, message)
    if self.log.has(message.prev_index, message.prev_term):
        self.commit_to(min(message.commit, self.log.last_index))


def acknowledges_all(self: Raft, to: int, index: int) -> None:
    self._after.append(AppendResponse(0, self.node_id, to, self.term, self.log.last_index))


def proposes_during_transfer(self: Leadership, payloads: list[bytes]) -> Answer:
    target, self.transferee = self.transferee, 0
    try:
        return _propose(self, payloads)
    finally:
        self.transferee = target


def installs_old_snapshots(self: Raft, message: InstallSnapshot) -> None:
    self._follow(message.sender)
    self.log.restore(message.index, message.snap_term)
    self.commit = self._handed = self._installing = message.index
    self._snapshot = message
    self._acknowledge(message.sender, message.index)


def snapshot_cuts_matching_log(self: Raft, message: InstallSnapshot) -> None:
    if message.index > self.commit and self.node_id in message.conf.members():
        installs_old_snapshots(self, message)
    else:
        _on_snapshot(self, message)


def stale_refusals_count(self: Progress, index: int, hint: int) -> bool:
    if self.state is PeerState.SNAPSHOT:
        return False
    self.next = max(min(index, hint + 1), 1)
    self.is_waiting = False
    return True


def full_window_waits_for_ever(self: Leadership, message: HeartbeatResponse) -> None:
    peer = self.peers.get(message.sender)
    was_waiting = peer is not None and peer.is_waiting
    if peer is not None and was_waiting:
        peer.recent_active = True
        return
    _on_heartbeat_response(self, message)


def keeps_lease(self: Leadership, to: int) -> None:
    _order_campaign(self, to)
    self.lease_void = False


def speaks_after_restart(self: Raft, node_id: int, config: RaftConfig, restored: RestoredState, rng: Any, **reader: Any) -> None:
    _init(self, node_id, replace(config, restart_grace=False), restored, rng, **reader)


def stays(self: Log, index: int) -> None:
    pass


def new_half_only(voters: Any, outgoing: Any, acked: Any) -> int | None:
    return _committed_index(voters, (), acked)


def everybody_counts(voters: Any, outgoing: Any, acked: Any) -> int | None:
    return _committed_index(tuple(acked), (), acked)


MUTANTS = (
    Mutant("no fsync", (World, "sync", no_fsync), ("durability",), 2),
    Mutant("acknowledged before persisted", (Raft, "take_ready", everything_at_once), ("durability",), 2),
    Mutant("vote request before persisted", (Raft, "take_ready", vote_requests_at_once), ("durability",), 0, "early_vote", 2),
    Mutant("old terms committed by count", (Leadership, "advance_commit", old_terms_by_count), ("replication",), 0, "figure_8", 20),
    Mutant("timeouts not randomized", (Raft, "_draw_timeout", lambda self: self.config.election_tick), (), 0, "churn", 5),
    Mutant("vote forgotten on restart", (Image, "restored", forgets_vote), ("durability",), 10, "power_loss", 5),
    Mutant("hard state not written", (Image, "write", no_hard_state), ("durability",), 2),
    Mutant("log start lost", (Image, "restored", loses_log_start), ("durability",), 2),
    Mutant("no empty entry of a new leader", (Leadership, "take_office", lambda self: None), ("election",), 2),
    Mutant("leader counts its unsynced entry", (Leadership, "_append", counts_itself_early), ("durability",), 0, "lazy_disk", 20),
    Mutant("durability of replaced entries counts", (Log, "_cut_flights", stays), ("durability",), 0, "overwritten", 10),
    Mutant("campaign with unapplied change", (Raft, "_has_unapplied_change", lambda self: False), ("own",), 0, "churn", 60),
    Mutant("several changes pending", (Leadership, "propose_conf", change_upon_change), ("membership",), 0, "churn", 10),
    Mutant("joint commit looks at the new half only", (leadership_module, "committed_index", new_half_only), ("membership",)),
    Mutant("learner counts for commit", (leadership_module, "committed_index", everybody_counts), ("reads",)),
    Mutant("removed leader stays", (Raft, "apply_conf", removed_leader_stays), ("membership",), 0, "churn", 10),
    Mutant("read without quorum", (Leadership, "_answer_reads", reads_at_once), ("reads",), 0, "stale_reader", 10),
    Mutant(
        "any heartbeat answer confirms reads", (Leadership, "on_heartbeat_response", any_answer_confirms), ("reads",), 0, "stale_reader", 20
    ),
    Mutant("read before own-term commit", (Leadership, "has_committed_own", property(lambda self: True)), ("reads",), 0, "new_reader", 10),
    Mutant("heartbeat carries full commit index", (Raft, "send_now", full_commit_in_heartbeats), ("replication",), 10),
    Mutant("vote regardless of log", (Log, "is_up_to_date", lambda self, index, term: True), ("election",), 0, "figure_8", 10),
    Mutant("vote twice in a term", (Raft, "_on_vote_request", votes_twice), ("election",), 10),
    Mutant("older terms accepted", (Raft, "_settle_term", takes_old_terms), ("election",), 40),
    Mutant("no consistency check", (Raft, "_on_append", no_consistency_check), ("replication",), 0, "figure_8", 10),
    Mutant("short append cuts a longer log", (Log, "find_conflict", cuts_always), ("replication",)),
    Mutant("commit beyond the message", (Raft, "_on_append", commits_beyond_message), ("own",)),
    Mutant("acknowledges the own last index", (Raft, "_acknowledge", acknowledges_all), ("replication",)),
    Mutant("pre-vote raises the term", (Raft, "_settle_term", prevote_raises_term), ("election",)),
    Mutant("promise to the leader not kept", (Raft, "_keeps_promise", lambda self: False), ("checkquorum",)),
    Mutant("no silence after restart", (Raft, "__init__", speaks_after_restart), ("checkquorum",)),
    Mutant("proposals taken during transfer", (Leadership, "propose", proposes_during_transfer), ("own",)),
    Mutant("old snapshot installed", (Raft, "_on_snapshot", installs_old_snapshots), ("own",)),
    Mutant("snapshot cuts a matching log", (Raft, "_on_snapshot", snapshot_cuts_matching_log), ("own",)),
    Mutant("stale refusal lowers the peer", (Progress, "refused", stale_refusals_count), ("replication",), 20),
    Mutant("full window waits for ever", (Leadership, "on_heartbeat_response", full_window_waits_for_ever), ("flow",), 20),
    Mutant("lease kept after timeout_now", (Leadership, "_order_campaign", keeps_lease), ("own",)),
)


def main(names: list[str]) -> int:
    """Search afresh: all scenarios, all plans, and the walk."""
    directory = Path(__file__).parents[2] / "tests" / "vectors" / "raft"
    survivors = 0
    print(f"{'mutant':40} {'vectors':46} {'walk':>4}  plans")
    for mutant in MUTANTS:
        if names and mutant.name not in names:
            continue
        scenario, seed = caught_by_vectors(mutant, directory), caught_by_walk(mutant, SEEDS_MAX)
        plans = {plan: caught_by_plan(mutant, plan, SEEDS_MAX) for plan in PLANS}
        survivors += not scenario and not seed and not any(plans.values())
        found = ", ".join(f"{plan} {count}" for plan, count in plans.items() if count)
        print(f"{mutant.name:40} {scenario or '-':46} {seed or '-':>4}  {found or '-'}", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
