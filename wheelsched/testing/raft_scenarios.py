"""Runs Raft conformance vectors: `python -m wheelsched.testing.raft_scenarios DIR`.

Format: `tests/vectors/raft/README.md`. DIR holds scenario files, or `scenarios/` and `tables/`; `tables/` may also lie beside it. One
line is printed for each scenario and table row, and a summary; the exit code is 1 if anything failed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from wheelsched.raft import (
    AnyMessage,
    Append,
    AppendResponse,
    Change,
    ChangeKind,
    Configuration,
    Entry,
    EntryKind,
    Heartbeat,
    HeartbeatResponse,
    InstallSnapshot,
    Mode,
    PreVoteRequest,
    PreVoteResponse,
    Raft,
    RaftConfig,
    RaftFault,
    ReadMode,
    TimeoutNow,
    VoteRequest,
    VoteResponse,
    make_configuration,
    make_entry,
)
from wheelsched.testing.raft_tables import check_row
from wheelsched.testing.raft_world import Image, Invariants, Node, Timeouts, World

Json = dict[str, Any]

KINDS: dict[str, type[AnyMessage]] = {
    "vote": VoteRequest, "prevote": PreVoteRequest, "vote_resp": VoteResponse, "prevote_resp": PreVoteResponse,
    "append": Append, "append_resp": AppendResponse, "heartbeat": Heartbeat, "heartbeat_resp": HeartbeatResponse,
    "snapshot": InstallSnapshot, "timeout_now": TimeoutNow,
}  # fmt: skip
KIND_NAMES = {cls: name for name, cls in KINDS.items()}
SETTLE_ROUNDS_MAX = 3_000

# The defaults of the vectors, which are not the product's.
DEFAULT_CONFIG = RaftConfig(
    election_tick=10, heartbeat_tick=1, pre_vote=False, check_quorum=False, restart_grace=False, read_mode=ReadMode.SAFE,
    max_inflight=256, max_inflight_bytes=0, max_msg_bytes=0, max_uncommitted=0, max_apply_batch=0,
)  # fmt: skip


class ScenarioFailed(AssertionError):
    """A check did not hold; the message names step, check and what was found."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One scenario or table row; `error` empty: passed."""

    id: str
    title: str
    error: str = ""


# ---- the files


def load_scenarios(directory: Path) -> list[Json]:
    """All scenarios below a directory in order of file names."""
    return [scenario for document in _documents(directory, "scenarios") for scenario in document["scenarios"]]


def load_tables(directory: Path) -> list[Json]:
    """All tables below a directory or in `tables/` beside it."""
    tables = list(_documents(directory, "table"))
    if not tables and (directory.parent / "tables").is_dir():
        tables = list(_documents(directory.parent / "tables", "table"))
    return tables


def _documents(directory: Path, key: str) -> Iterable[Json]:
    for path in sorted(directory.rglob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(document, dict) and key in document:
            yield document


# ---- from data to objects and back


def to_configuration(conf: Mapping[str, Any]) -> Configuration:
    return make_configuration(
        conf.get("voters", ()), outgoing=conf.get("outgoing", ()), learners=conf.get("learners", ()),
        learners_next=conf.get("learners_next", ()), auto_leave=conf.get("auto_leave", False),
    )  # fmt: skip


def to_config(base: RaftConfig, changes: Mapping[str, Any]) -> RaftConfig:
    fields = dict(changes)
    if "read_mode" in fields:
        fields["read_mode"] = ReadMode(fields["read_mode"])
    return replace(base, **fields)


def initial_entry(index: int, term: int) -> Entry:
    """What the vectors place in a log themselves: a function of (index, term), of no size, applied without effect."""
    return make_entry(0, index, term, EntryKind.EMPTY)


def to_image(fields: Mapping[str, Any]) -> Image:
    start_index, start_term = fields.get("snapshot", (0, 0))
    log = [initial_entry(start_index + 1 + offset, term) for offset, term in enumerate(fields.get("log", ()))]
    commit = fields.get("commit", start_index)
    image = Image(
        conf=to_configuration(fields.get("conf", {})), term=fields.get("term", 0), vote=fields.get("vote", 0), commit=commit,
        start_index=start_index, start_term=start_term, log=log, applied=fields.get("applied", commit),
    )  # fmt: skip
    image.applied_term = image.term_at(image.applied) or 0
    return image


def to_message(fields: Mapping[str, Any]) -> AnyMessage:
    values: Json = {key: value for key, value in fields.items() if key not in ("kind", "from")}
    values |= {"group": 0, "sender": fields["from"], "term": fields.get("term", 0)}
    if "entries" in values:
        values["entries"] = tuple(initial_entry(index, term) for index, term in values["entries"])
    if "conf" in values:
        values["conf"] = to_configuration(values["conf"])
    cls = KINDS[fields["kind"]]
    defaults: Json = {"last_index": 0, "last_term": 0, "prev_index": 0, "prev_term": 0, "index": 0, "snap_term": 0}
    values = {key: value for key, value in defaults.items() if key in cls.__struct_fields__} | values
    if cls is InstallSnapshot:
        values.setdefault("conf", Configuration())
    return cls(**values)


def to_fields(message: AnyMessage) -> Json:
    fields: Json = {name: getattr(message, name) for name in message.__struct_fields__}
    fields |= {"kind": KIND_NAMES[type(message)], "from": message.sender}
    if isinstance(message, Append):
        fields |= {"entries": [[entry.index, entry.term] for entry in message.entries], "n_entries": len(message.entries)}
    return fields


def matches(pattern: Mapping[str, Any], message: AnyMessage) -> bool:
    fields = to_fields(message)
    for key, wanted in pattern.items():
        value = fields.get(key)
        if key == "conf":
            if not conf_matches(wanted, value):
                return False
        elif key in ("kind", "from", "to") and isinstance(wanted, list):
            if value not in wanted:
                return False
        elif value != wanted:
            return False
    return True


def conf_matches(wanted: Mapping[str, Any], conf: Any) -> bool:
    for key, value in wanted.items():
        held = getattr(conf, key)
        if (sorted(value) != list(held)) if isinstance(value, list) else (value != held):
            return False
    return True


# ---- the run


class Runner:
    """One scenario in one world. The methods named `op_...` are the steps."""

    def __init__(self, scenario: Json) -> None:
        self.scenario = scenario
        self.world = World()
        self.invariants = Invariants(self.world)
        # Vectors inject snapshots that come without state.
        self.invariants.compare_digests = False
        self.faulted: set[int] = set()
        self.config = to_config(DEFAULT_CONFIG, scenario.get("config", {}))
        base = scenario.get("base", {})
        for name, fields in scenario["nodes"].items():
            if fields.get("absent"):
                self.world.absent.add(int(name))
            else:
                self._add(int(name), {**base, **fields})

    def _add(self, node_id: int, fields: Mapping[str, Any]) -> None:
        config = to_config(self.config, fields.get("config", {}))
        timeouts = Timeouts(f"{self.scenario['id']}/{node_id}", fields.get("timeout"))
        self.world.nodes[node_id] = Node(node_id, config, to_image(fields), timeouts)

    def run(self) -> None:
        """Raises `ScenarioFailed`, `WorldBroken` or `RaftFault`."""
        for number, step in enumerate(self.scenario["steps"]):
            where = f"step {number} {step['op']}"
            try:
                self._step(step)
                self.invariants.check_all(but=self.faulted)
                for check in step.get("expect", ()):
                    self._check(check)
            except AssertionError as error:
                raise ScenarioFailed(f"{where}: {type(error).__name__}: {error}") from error
        for check in self.scenario.get("expect", ()):
            self._check(check)

    def _step(self, step: Json) -> None:
        operation: Callable[[Json], Any] = getattr(self, "op_" + step["op"])
        if step.get("fault"):
            try:
                operation(step)
            except RaftFault:
                # Its process would be gone. The core stays to be looked at, but promises nothing any more.
                self.faulted.add(step.get("node") or step["msg"]["to"])
                return
            raise ScenarioFailed("no fault was raised")
        result = operation(step)
        if "result" in step:
            allowed = step["result"] if isinstance(step["result"], list) else [step["result"]]
            _expect(str(result) in allowed, "result", result, allowed)

    def _core(self, step: Json) -> Raft:
        return self._node(step).running

    def _node(self, step: Json) -> Node:
        return self.world.nodes[step["node"]]

    def _nodes(self, step: Json) -> list[Node]:
        """Of `node`, `nodes`, or all running ones, in ascending id."""
        ids = [step["node"]] if "node" in step else step.get("nodes", sorted(self.world.nodes))
        nodes = [self.world.nodes[node_id] for node_id in sorted(ids) if node_id in self.world.nodes]
        return [node for node in nodes if node.core is not None]

    # Inputs.

    def op_tick(self, step: Json) -> None:
        for node in self._nodes(step):
            for _ in range(step.get("n", 1)):
                node.running.tick()

    def op_campaign(self, step: Json) -> None:
        self._core(step).campaign()

    def op_propose(self, step: Json) -> str:
        return self._core(step).propose([data.encode() for data in step["data"]])

    def op_conf(self, step: Json) -> str:
        changes = [Change(ChangeKind(kind), node_id) for kind, node_id in step["changes"]]
        return self._core(step).propose_conf(changes, Mode(step.get("mode", "auto")))

    def op_transfer(self, step: Json) -> str:
        return self._core(step).transfer(step["to"])

    def op_read(self, step: Json) -> str:
        return self._core(step).read_index(step["ctx"])

    def op_forget_leader(self, step: Json) -> None:
        self._core(step).forget_leader()

    def op_unreachable(self, step: Json) -> None:
        self._core(step).report_unreachable(step["peer"])

    def op_snapshot_report(self, step: Json) -> None:
        self._core(step).report_snapshot(step["peer"], step["ok"])

    def op_compact(self, step: Json) -> None:
        self.world.compact(self._node(step), step["index"])

    def op_timeout(self, step: Json) -> None:
        node = self._node(step)
        node.timeouts.pinned = node.running.election_timeout = step["ticks"]

    # Stages.

    def op_write(self, step: Json) -> None:
        for node in self._nodes(step):
            self.world.write(node)

    def op_sync(self, step: Json) -> None:
        for node in self._nodes(step):
            self.world.sync(node)

    def op_apply(self, step: Json) -> None:
        for node in self._nodes(step):
            self.world.apply(node, step.get("n"))

    def op_run(self, step: Json) -> None:
        for node in self._nodes(step):
            self.world.run(node)

    def op_settle(self, step: Json) -> None:
        ids = {node.node_id for node in self._nodes(step)}
        for _ in range(SETTLE_ROUNDS_MAX):
            busy = False
            for node in self._nodes(step):
                busy |= self.world.run(node)
            waiting = [message for message in self.world.messages if message.to in ids]
            self.world.messages = [message for message in self.world.messages if message.to not in ids]
            for message in waiting:
                self.world.deliver(message)
            if not busy and not waiting:
                return
        raise ScenarioFailed(f"not settled after {SETTLE_ROUNDS_MAX} rounds")

    # Messages.

    def _select(self, step: Json) -> list[AnyMessage]:
        pattern = {key: step[key] for key in step if key not in ("op", "n", "order", "expect", "note", "result", "fault")}
        return [message for message in self.world.messages if matches(pattern, message)]

    def _remove(self, chosen: list[AnyMessage]) -> None:
        identities = {id(message) for message in chosen}
        self.world.messages = [message for message in self.world.messages if id(message) not in identities]

    def op_deliver(self, step: Json) -> None:
        chosen = [message for message in self._select(step) if message.to in self.world.nodes]
        if step.get("order") == "last":
            chosen.reverse()
        if "n" in step:
            _expect(len(chosen) >= step["n"], "messages to deliver", len(chosen), step["n"])
            chosen = chosen[: step["n"]]
        self._remove(chosen)
        for message in chosen:
            self.world.deliver(message)

    def op_drop(self, step: Json) -> None:
        self._remove(self._select(step))

    def op_dup(self, step: Json) -> None:
        self.world.messages += [type(message)(**_values(message)) for message in self._select(step)]

    def op_inject(self, step: Json) -> None:
        self.world.deliver(to_message(step["msg"]))

    # Network.

    def op_cut(self, step: Json) -> None:
        for a, b in step["links"]:
            self.world.cut_links.add((a, b))
            if not step.get("one_way"):
                self.world.cut_links.add((b, a))

    def op_isolate(self, step: Json) -> None:
        late, named = self.scenario.get("late", []), {int(name) for name in self.scenario["nodes"]}
        for other in sorted(named | set(late) | set(self.world.nodes)):
            self.world.cut_links |= {(step["node"], other), (other, step["node"])}

    def op_ignore(self, step: Json) -> None:
        self.world.ignored |= {KINDS[kind] for kind in step["kinds"]}

    def op_heal(self, step: Json) -> None:
        self.world.cut_links.clear()
        self.world.ignored.clear()

    # Processes.

    def op_crash(self, step: Json) -> None:
        self.world.crash(self._node(step))

    def op_restart(self, step: Json) -> None:
        node = self._node(step)
        node.config = to_config(node.config, step.get("config", {}))
        node.image = node.durable.copy()
        self.faulted.discard(node.node_id)
        self.world.restart(node)
        self.invariants.on_restart(node)

    def op_start(self, step: Json) -> None:
        self.world.absent.discard(step["node"])
        self._add(step["node"], step)

    # Nothing.

    def op_mark(self, step: Json) -> None:
        self.world.sent.clear()

    def op_check(self, step: Json) -> None:
        pass

    # ---- checks

    def _check(self, check: Json) -> None:
        for key in ("sent", "in_flight"):
            if key in check:
                messages = self.world.sent if key == "sent" else self.world.messages
                self._check_count(check, sum(matches(check[key], message) for message in messages))
                return
        if "progress" in check:
            self._check_progress(check)
        elif "reads" in check:
            reads = [[result.ctx, result.index] for result in self.world.nodes[check["reads"]].reads]
            _expect(reads == check["equals"], "reads", reads, check["equals"])
        elif "durable" in check:
            image = self.world.nodes[check["durable"]].durable
            last = [image.last_index, image.term_at(image.last_index)]
            found = {"term": image.term, "vote": image.vote, "commit": image.commit, "applied": image.applied, "last": last}
            self._compare(check, found, {"durable"})
        elif "leaders" in check or "leader_among" in check:
            leaders = [id_ for id_, node in sorted(self.world.nodes.items()) if node.core is not None and node.core.leadership]
            if "leaders" in check:
                _expect(leaders == sorted(check["leaders"]), "leaders", leaders, check["leaders"])
            else:
                _expect(set(leaders) & set(check["leader_among"]), "leader_among", leaders, check["leader_among"])
        else:
            for node_id in [check["node"]] if "node" in check else check["nodes"]:
                self._check_node(check, self.world.nodes[node_id])

    @staticmethod
    def _check_count(check: Json, count: int) -> None:
        _expect(check.get("min", 0) <= count, f"{check} min", count, check.get("min"))
        _expect(count <= check.get("max", count), f"{check} max", count, check.get("max"))
        _expect(count == check.get("count", count), f"{check} count", count, check.get("count"))

    def _check_node(self, check: Json, node: Node) -> None:
        status, log = node.running.status(), node.running.log
        terms = [log.term(index) for index in range(log.first_index, log.last_index + 1)]
        found: Json = {
            "role": status.role, "term": status.term, "vote": status.vote, "leader": status.leader, "commit": status.commit,
            "applied": node.image.applied, "last": [status.last_index, status.last_term], "first": status.first_index,
            "log": [status.first_index, *terms], "data": [payload.decode() for payload in node.image.data],
            "transferee": status.transferee,
        }  # fmt: skip
        if "conf" in check:
            _expect(conf_matches(check["conf"], status.configuration), f"conf of {node.node_id}", status.configuration, check["conf"])
        if isinstance(check.get("role"), list):
            _expect(status.role in check["role"], f"role of {node.node_id}", status.role, check["role"])
            check = {key: value for key, value in check.items() if key != "role"}
        self._compare(check, found, {"node", "nodes", "conf"}, f" of {node.node_id}")

    def _check_progress(self, check: Json) -> None:
        leader, peer = check["progress"]
        progress = self.world.nodes[leader].running.status().progress.get(peer)
        assert progress is not None, f"{leader} has no progress of {peer}"
        found = {name: getattr(progress, name) for name in ("state", "match", "next", "paused", "inflight", "pending_snapshot")}
        self._compare(check, found, {"progress"}, f" of {leader}, {peer}")

    @staticmethod
    def _compare(check: Json, found: Json, but: set[str], whose: str = "") -> None:
        for key, wanted in check.items():
            if key not in but | {"note"}:
                _expect(found[key] == wanted, key + whose, found[key], wanted)


def _values(message: AnyMessage) -> Json:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def _expect(ok: object, what: str, found: object, wanted: object) -> None:
    if not ok:
        raise ScenarioFailed(f"{what} is {found!r}, expected {wanted!r}")


def run_scenario(scenario: Json) -> None:
    """Run one scenario; raises where it fails."""
    Runner(scenario).run()


def run_directory(directory: Path) -> list[Outcome]:
    """Everything below a directory, in order."""
    outcomes = []
    for scenario in load_scenarios(directory):
        outcomes.append(_outcome(scenario["id"], scenario.get("title", ""), partial(run_scenario, scenario)))
    for table in load_tables(directory):
        for number, row in enumerate(table["rows"]):
            name = f"{table['table']}/{row.get('id', number)}"
            outcomes.append(_outcome(name, row.get("source", ""), partial(check_row, table["table"], row)))
    return outcomes


def _outcome(name: str, title: str, run: Callable[[], None]) -> Outcome:
    try:
        run()
    except Exception as error:  # whatever it is, the others are to be run
        return Outcome(name, title, f"{type(error).__name__}: {error}")
    return Outcome(name, title)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print("usage: python -m wheelsched.testing.raft_scenarios DIR", file=sys.stderr)
        return 2
    outcomes = run_directory(Path(arguments[0]))
    for outcome in outcomes:
        print(f"FAIL {outcome.id}: {outcome.error}" if outcome.error else f"pass {outcome.id}")
    failed = sum(bool(outcome.error) for outcome in outcomes)
    print(f"{len(outcomes)} run, {len(outcomes) - failed} passed, {failed} failed")
    return 1 if failed or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
