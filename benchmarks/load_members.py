"""A cluster whose members and settings change under load: `python -m benchmarks.load_members [--parts routes,growth] [--check]`.

Real processes of this machine, and the commands that an operator would give. Each part starts a cluster of its own:

`routes`    Every node's worker is given the jobs of every other node's groups; what was acknowledged at one node is read at another; any
            node answers any call.
`growth`    Two nodes join three, then the one that leads most is drained and removed.
`setting`   A shared setting is changed in the file and the nodes restarted one by one.
`snapshot`  A node that lost its data is replaced, and needs a snapshot that takes `--snapshot-minutes` at 1 MiB/s.

The last three under the load of `traffic.py`: no call may fail beyond the SDK's retries, no job be lost or run twice by one trigger, no
precise job start more than a second late.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import permutations
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from benchmarks.client import Connection, connections, get, instant, now_ms, run_loop
from benchmarks.common import ROOT, BenchmarkFailed, Figure, percentile, report, temporary_directory
from benchmarks.load_cluster import wakes
from benchmarks.traffic import Traffic
from wheelsched.client import AsyncClient, NewJob
from wheelsched.core.errors import WheelschedError
from wheelsched.testing.cluster_process import ClusterProcesses, key_in_group

PARTS: Final = ("routes", "growth", "setting", "snapshot")
NODES: Final = 3
LOOK_S: Final = 0.25
OPERATION_S_MAX: Final = 1_800.0
TRANSFERS_MAX: Final = 4
# Leaderships are evened out once they were uneven for half a minute, one at a time, and never towards a node younger than a minute.
EVEN_S_MAX: Final = 300.0
WAKE_MS_P50_MAX: Final = 50.0
EXIT_S_MAX: Final = 5.0
DAY_S: Final = 86_400
MIB: Final = 1024 * 1024

# A payload of the default limit holds 64 KiB; base64 of random bytes, so that nothing on the way makes it smaller.
BIG_RAW_BYTES: Final = 45_000
BIG_BYTES: Final = BIG_RAW_BYTES * 4 // 3
BIG_A_CALL: Final = 20
# Two groups: most of the data lies in one of them, and the other shows what goes on beside it.
SNAPSHOT_GROUPS, BIG_GROUP = 2, 0
SNAPSHOT_MIB_PER_S: Final = 1
# A log is compacted at 64 MiB (`ReplicaSettings.compact_bytes`): so much is written to each group during the transfer.
LOGGED_MIB: Final = 2 * 64 + 16
SAMPLES: Final = 40


@contextmanager
def running(size: int, groups: int, settings: Mapping[str, object] | None = None) -> Iterator[ClusterProcesses]:
    """A cluster that is ready, on a directory that goes away with it."""
    with temporary_directory() as directory:
        cluster = ClusterProcesses(directory, size, group_count=groups, settings={"logging.level": "info"} | dict(settings or {}))
        try:
            cluster.start()
            yield cluster
        except BaseException:
            print(cluster.log_tails(), file=sys.stderr)
            raise
        finally:
            cluster.kill()


def tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


async def wait(what: str, holds: Callable[[], bool], timeout_s: float = OPERATION_S_MAX) -> None:
    """What other processes do sets no event of ours; `holds` may block."""
    give_up = time.monotonic() + timeout_s
    while not await asyncio.to_thread(holds):
        if time.monotonic() > give_up:
            raise BenchmarkFailed(f"not within {timeout_s:g} s: {what}")
        await asyncio.sleep(LOOK_S)


# --- what an operator does ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operation:
    """A command `wheelsched cluster …`: what it printed until it was done. `seconds`: its own start included."""

    lines: list[str]
    seconds: float

    @property
    def shows_progress(self) -> bool:
        """Whether it told how far the node was, between the beginning and the end."""
        return sum(" groups" in line for line in self.lines) > 1


def operate(url: str, *arguments: str, on_line: Callable[[str], None] = lambda _line: None) -> Operation:
    """Run a command against a node; raises `BenchmarkFailed` where it fails."""
    began = time.monotonic()
    command = [sys.executable, "-m", "wheelsched.cli", "cluster", *arguments, "--url", url]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    killer = threading.Timer(OPERATION_S_MAX, process.kill)
    killer.start()
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line.rstrip())
            tell(f"  cluster {arguments[0]}: {lines[-1]}")
            on_line(line)
        code = process.wait()
    finally:
        killer.cancel()
        process.kill()
    if code:
        raise BenchmarkFailed(f"wheelsched cluster {' '.join(arguments)} ended with code {code}:\n" + "\n".join(lines))
    return Operation(lines, time.monotonic() - began)


def starts(cluster: ClusterProcesses, name: str) -> Callable[[str], None]:
    """For `operate`: start a node when there is a place for it."""

    def on_line(line: str) -> None:
        if "place" in line and not cluster.nodes[name].is_alive:
            cluster.nodes[name].spawn()

    return on_line


def picture(cluster: ClusterProcesses, name: str) -> dict[str, Any]:
    found: dict[str, Any] | None = cluster.ask(name, "/v1/cluster")
    return found or {"nodes": [], "groups": []}


def is_even(found: Mapping[str, Any], what: str) -> bool:
    """Whether `holds` or `leads` of the active nodes differ by one at most, and nothing is under way."""
    counts = [node[what] for node in found["nodes"] if node["state"] == "active"]
    return bool(counts) and max(counts) - min(counts) <= 1 and not any(group["change"] for group in found["groups"])


# --- routes ---------------------------------------------------------------------------------------------------------------------


def routes(arguments: argparse.Namespace) -> list[Figure]:
    with running(NODES, arguments.groups) as cluster:
        figures = []
        for leader, waiter in permutations(cluster.names, 2):
            if not cluster.led_by(leader):
                # Who was elected where is chance.
                operate(cluster.nodes[leader].url, "transfer", str(cluster.led_by(waiter)[0]), leader)
                cluster.wait(f"{leader} leads a group", lambda leader=leader: cluster.led_by(leader))  # type: ignore[misc]
            took_ms = run_loop(wakes(cluster, leader, waiter, arguments.wakes))
            name = f"due at {leader} to a worker at {waiter}"
            figures += [
                Figure(f"{name}, p50", percentile(took_ms, 0.5), "ms", WAKE_MS_P50_MAX, f"{len(took_ms)} jobs"),
                Figure(f"{name}, p99", percentile(took_ms, 0.99), "ms"),
            ]
        reads, misses = run_loop(read_after_write(cluster, arguments.rounds))
        figures.append(Figure("reads that missed a write acknowledged elsewhere", sum(misses.values()), "reads", 0, f"of {reads:,}"))
        asked = run_loop(call_everything(cluster))
        calls = len({name for name, _ in asked.asked})
        note = f"{calls} calls, each at {len(asked.asked) / calls:g} nodes; " + "; ".join(asked.wrong[:3])
        return [*figures, Figure("calls not answered as documented", len(asked.wrong), "calls", 0, note)]


def request(method: str, path: str, body: object = None) -> bytes:
    """A whole request."""
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: node\r\nContent-Length: {len(data)}\r\n"
    return head.encode() + (b"Content-Type: application/json\r\n" if data else b"") + b"\r\n" + data


async def read_after_write(cluster: ClusterProcesses, rounds: int) -> tuple[int, Counter[str]]:
    """(reads, reads that did not show what another node had just acknowledged), over all pairs of nodes."""
    pairs = list(permutations(cluster.names, 2))
    misses: Counter[str] = Counter()
    reads = 0
    first_ms = now_ms() + DAY_S * 1000
    async with lines_of(cluster) as lines:

        async def read(name: str, path: str) -> Any:
            nonlocal reads
            reads += 1
            return json.loads(await lines[name].ask(get(path)))

        for number in range(rounds):
            writer, reader = pairs[number % len(pairs)]
            at_ms = first_ms + number
            listing = f"/v1/jobs?queue=reads&from={quote(instant(at_ms))}&to={quote(instant(at_ms + 1))}"
            body = {"queue": "reads", "payload": number, "run_at": instant(at_ms)}
            job_id = json.loads(await lines[writer].ask(request("POST", "/v1/jobs", body)))["job_id"]
            path, labels = f"/v1/jobs/{job_id}", {"round": str(number)}
            misses["create"] += (await read(reader, path))["status"] != "SCHEDULED"
            misses["create, listed"] += [job["job_id"] for job in (await read(reader, listing))["jobs"]] != [job_id]
            await lines[writer].ask(request("PATCH", path, {"labels": labels}))
            misses["change"] += (await read(reader, path))["labels"] != labels
            await lines[writer].ask(request("DELETE", path))
            misses["cancel"] += (await read(reader, path))["status"] != "CANCELLED"
            misses["cancel, listed"] += [job["status"] for job in (await read(reader, listing))["jobs"]] != ["CANCELLED"]
    return reads, misses


@asynccontextmanager
async def lines_of(cluster: ClusterProcesses) -> AsyncIterator[dict[str, Connection]]:
    """One connection to each node, by name."""
    async with AsyncExitStack() as stack:
        yield {name: (await stack.enter_async_context(connections(cluster.http_ports[name], 1)))[0] for name in cluster.names}


@dataclass(slots=True)
class Asked:
    """Every call of the contract that a cluster has, each sent to the next node. `asked`: (call, node)."""

    lines: dict[str, Connection]
    turn: int = 0
    asked: set[tuple[str, str]] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)

    async def __call__(self, call: str, path: str, body: object = None, *, status: int = 200) -> Any:
        """The answer's JSON, `{}` where it has none or is not as documented. `call`: method and a name."""
        name = list(self.lines)[self.turn % len(self.lines)]
        self.turn += 1
        self.asked.add((call, name))
        found, content = await self.lines[name].call(request(call.partition(" ")[0], path, body))
        if found != status:
            self.wrong.append(f"{name} answered {call} with {found}: {content[:200].decode(errors='replace')}")
            return {}
        with suppress(ValueError):
            return json.loads(content)
        return {}


async def call_everything(cluster: ClusterProcesses) -> Asked:
    """Every call at every node, twice: each round begins with another node."""
    async with lines_of(cluster) as lines:
        asked = Asked(lines)
        for number in range(2 * len(cluster.names)):
            for ask in (_jobs, _attempts, _schedules, _others):
                asked.turn = number
                await ask(asked, f"any-{number}")
    return asked


async def _jobs(ask: Asked, queue: str) -> None:
    await ask("PUT queue", f"/v1/queues/{queue}", {"lease_s": 30, "max_concurrency": 50})
    job = await ask("POST job", "/v1/jobs", {"queue": queue, "payload": {"a": 1}, "delay_s": 3600}, status=201)
    path = f"/v1/jobs/{job.get('job_id')}"
    await ask("GET job", path)
    await ask("GET jobs", f"/v1/jobs?queue={queue}&status=SCHEDULED")
    await ask("PATCH job", path, {"priority": "critical"})
    await ask("GET attempts", f"{path}/attempts")
    await ask("GET events", f"{path}/events")
    await ask("DELETE job", path)
    await ask("DELETE job again", path)
    await ask("GET queue", f"/v1/queues/{queue}")
    await ask("POST pause", f"/v1/queues/{queue}:pause", {})
    await ask("POST resume", f"/v1/queues/{queue}:resume", {})
    await ask("GET queues", "/v1/queues?limit=5")


async def _attempts(ask: Asked, queue: str) -> None:
    made = await ask("POST batch", "/v1/jobs:batch", {"jobs": [{"queue": queue, "payload": number} for number in range(3)]})
    later = await ask("POST job", "/v1/jobs", {"queue": queue, "delay_s": 3600, "retry": {"max_attempts": 2}}, status=201)
    await ask("POST run", f"/v1/jobs/{later.get('job_id')}:run", {})
    tokens: dict[str, str] = {}
    claims = 0
    while len(tokens) < 1 + len(made.get("results", ())) and claims < 20:
        claims += 1
        body = {"max": 2, "wait_s": 5, "lease_s": 60}
        if claims % 2:
            found = await ask("POST claim", f"/v1/queues/{queue}:claim", body)
        else:
            found = await ask("POST claims", "/v1/claims", body | {"queues": [queue, f"{queue}-other"]})
        tokens |= {job["job_id"]: job["lease_token"] for job in found.get("jobs", ())}
    if len(tokens) != 4:
        ask.wrong.append(f"{len(tokens)} of 4 jobs came from {queue}")
        return
    fatal = tokens.pop(later["job_id"])
    one, two, three = tokens.values()
    await ask("POST heartbeat", f"/v1/attempts/{one}:heartbeat", {"progress": {"done": 1}})
    await ask("POST heartbeats", "/v1/attempts:heartbeat", {"heartbeats": [{"token": two}, {"token": three}]})
    await ask("POST complete", f"/v1/attempts/{one}:complete", {"outcome": "succeeded", "result": 1})
    await ask("POST completions", "/v1/attempts:complete", {"completions": [{"token": two, "outcome": "succeeded"}]})
    await ask("POST release", f"/v1/attempts/{three}:release", {})
    await ask("POST release again", f"/v1/attempts/{three}:release", {}, status=409)
    await ask("POST failure", f"/v1/attempts/{fatal}:complete", {"outcome": "fatal_failure", "error": "no"})
    await ask("GET dead letters", f"/v1/queues/{queue}/dead-letters")
    await ask("POST redrive", f"/v1/jobs/{later['job_id']}:redrive", {})
    await ask("DELETE job", f"/v1/jobs/{later['job_id']}")
    await ask("POST redrive all", f"/v1/queues/{queue}/dead-letters:redrive", {"all": True})
    await ask("POST discard all", f"/v1/queues/{queue}/dead-letters:discard", {"all": True})


async def _schedules(ask: Asked, name: str) -> None:
    spec = {"cron": "0 3 * * *", "time_zone": "Europe/Berlin", "job_template": {"queue": name}}
    path = f"/v1/schedules/{name}"
    await ask("POST preview", "/v1/schedules:preview", {"cron": "0 3 * * *"})
    await ask("PUT schedule", path, spec, status=201)
    await ask("PUT schedule again", path, spec)
    await ask("GET schedule", path)
    await ask("GET schedules", "/v1/schedules?limit=10")
    await ask("PATCH schedule", path, {"cron": "0 4 * * *"})
    await ask("POST pause schedule", f"{path}:pause", {})
    await ask("POST resume schedule", f"{path}:resume", {})
    await ask("POST run by hand", f"{path}/runs", {"delay_s": 3600}, status=201)
    await ask("GET runs", f"{path}/runs")
    await ask("DELETE schedule", path, status=204)
    await ask("GET schedule that is gone", path, status=404)


async def _others(ask: Asked, queue: str) -> None:
    for path in ("/v1/cluster", "/v1/forecast", "/status", "/livez", "/readyz", "/metrics", "/openapi.json"):
        await ask(f"GET {path}", path)
    await ask("GET job that is not there", "/v1/jobs/job_00000000000000000000000000", status=404)


# --- growth ---------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Growth:
    """Seconds of each step, and what an operator saw. `unseen`: steps that showed no progress."""

    seconds: dict[str, float] = field(default_factory=dict)
    unseen: list[str] = field(default_factory=list)
    exit_code: int = 0
    left: int = 0
    waiting: int = 0

    def note(self, step: str, operation: Operation) -> None:
        self.seconds[step] = operation.seconds
        if not operation.shows_progress:
            self.unseen.append(step)


def growth(arguments: argparse.Namespace) -> list[Figure]:
    found = Growth()
    with running(NODES, arguments.groups) as cluster:
        traffic = Traffic(cluster, "growth", cluster.names, arguments.rate)

        async def main() -> None:
            await make_waiting(cluster, arguments.waiting)
            await traffic.run(lambda traffic: grow(cluster, traffic, found))
            async with traffic.client("n5") as client:
                depth = (await client.queue("waiting")).depth
                found.waiting = sum(depth.get("SCHEDULED", {}).values())

        run_loop(main())
    return [
        *(Figure(f"growth: {step}", seconds, "s") for step, seconds in found.seconds.items()),
        Figure("growth: steps without visible progress", len(found.unseen), "steps", 0, ", ".join(found.unseen)),
        Figure("growth: groups that the drained node still held", found.left, "groups", 0),
        Figure("growth: exit code of the removed node", found.exit_code, "", 0, "it ends by itself"),
        Figure("growth: waiting jobs lost", arguments.waiting - found.waiting, "jobs", 0, f"of {arguments.waiting:,}"),
        *traffic.figures("growth"),
    ]


async def make_waiting(cluster: ClusterProcesses, count: int) -> None:
    """Jobs due in a day: what the replicas that move carry."""
    async with AsyncClient(cluster.nodes["n1"].url) as client:
        for first in range(0, count, 500):
            await client.create_many(NewJob("waiting", "x" * 500, delay_s=DAY_S) for _ in range(first, min(first + 500, count)))


async def grow(cluster: ClusterProcesses, traffic: Traffic, found: Growth) -> None:
    for name in ("n4", "n5"):
        await join(cluster, traffic, found, name)
    async with traffic.step("leaderships even out") as step:
        await wait("leaderships are even", lambda: is_even(picture(cluster, "n1"), "leads"), EVEN_S_MAX)
    found.seconds["five nodes until they lead alike"] = step.seconds
    leads = {node["id"]: node["leads"] for node in picture(cluster, "n5")["nodes"]}
    victim = max(cluster.names[:NODES], key=lambda name: leads[name])
    url = cluster.nodes["n5"].url
    async with traffic.step(f"{victim}, which leads {leads[victim]} groups, is drained"):
        found.note("drain", await asyncio.to_thread(operate, url, "drain", victim, "--watch"))
    found.left = next(node["holds"] for node in picture(cluster, "n5")["nodes"] if node["id"] == victim)
    process = cluster.leave_out(victim)
    async with traffic.step(f"{victim} is removed") as step:
        await asyncio.to_thread(operate, url, "remove", victim, "--watch")
        found.exit_code = await asyncio.to_thread(process.exit_code, 60.0)
    tell(f"  {victim} ended: {process.log_tail(1)}")
    found.seconds["remove, until its process has ended"] = step.seconds


async def join(cluster: ClusterProcesses, traffic: Traffic, found: Growth, name: str) -> None:
    cluster.add(name)
    places = ("--http", f"127.0.0.1:{cluster.http_ports[name]}", "--peer", f"127.0.0.1:{cluster.peer_ports[name]}")
    async with traffic.step(f"{name} joins") as step:
        operation = await asyncio.to_thread(
            operate, cluster.nodes["n1"].url, "add", name, *places, "--watch", on_line=starts(cluster, name)
        )
        await asyncio.to_thread(cluster.nodes[name].wait_ready)
        await asyncio.to_thread(cluster.wait_ready, [name])
        found.note(f"{name}: add, as the command says", operation)
        await wait("replicas are even", lambda: is_even(picture(cluster, "n1"), "holds"), EVEN_S_MAX)
    found.seconds[f"{name}: add, until it holds its share"] = step.seconds
    traffic.add_workers(name)


# --- setting --------------------------------------------------------------------------------------------------------------------

PAYLOAD_BYTES, OVER_BYTES = 128 * 1024, 80_000


@dataclass(slots=True)
class Change:
    """What was seen while a setting was changed node by node. `silent`: nodes that did not show that settings differ."""

    exits: list[tuple[int, float]] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    refused: int = 0
    logged: int = 0


def setting(arguments: argparse.Namespace) -> list[Figure]:
    found = Change()
    with running(NODES, arguments.groups) as cluster:
        traffic = Traffic(cluster, "setting", cluster.names, arguments.rate)
        run_loop(traffic.run(lambda traffic: change(cluster, traffic, found)))
        found.logged = sum(node.log().count('"peer_settings_differ"') for node in cluster.nodes.values())
    return [
        Figure("setting: nodes restarted", len(found.exits), "nodes"),
        Figure("setting: exit codes that are not 0", sum(code != 0 for code, _ in found.exits), "nodes", 0),
        Figure("setting: SIGTERM to the end, max", max(took_s for _, took_s in found.exits), "s", EXIT_S_MAX),
        Figure("setting: nodes that did not say that settings differ", len(found.silent), "nodes", 0, "; ".join(found.silent)),
        Figure("setting: warnings logged meanwhile", found.logged, "lines"),
        Figure("setting: warnings left at the end", len(found.left), "settings", 0, "; ".join(found.left)),
        Figure("setting: payloads of the new size refused at the end", found.refused, "nodes", 0),
        *traffic.figures("setting"),
    ]


async def change(cluster: ClusterProcesses, traffic: Traffic, found: Change) -> None:
    cluster.write_file({"limits": {"payload_bytes": PAYLOAD_BYTES}})
    for number, name in enumerate(cluster.names, 1):
        async with traffic.step(f"{name} restarts with the new setting"):
            node = cluster.nodes[name]
            found.exits.append(await asyncio.to_thread(node.terminate))
            await asyncio.to_thread(node.start)
            await asyncio.to_thread(cluster.wait_ready)
        await asyncio.sleep(2.0)
        differing = {name: await asyncio.to_thread(differs, cluster, name) for name in cluster.names}
        tell(f"  {name} restarted: {differing}")
        if number < len(cluster.names):
            found.silent += [f"{name} after {number} of {len(cluster.names)}" for name, texts in differing.items() if not texts]
        else:
            found.left += [text for texts in differing.values() for text in texts]
    for name in cluster.names:
        async with AsyncClient(cluster.nodes[name].url) as client:
            try:
                await client.create("large", "x" * OVER_BYTES, delay_s=DAY_S)
            except WheelschedError as error:
                tell(f"  {name}: {error}")
                found.refused += 1


def differs(cluster: ClusterProcesses, name: str) -> list[str]:
    """What a node's `/status` says of settings that are not the same everywhere."""
    status = cluster.ask(name, "/status") or {"peers": []}
    return [text for peer in status["peers"] for text in peer["settings_differ"]]


# --- snapshot -------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Logs:
    """How long the groups' logs were, looked at each second. `compacted`: how often one was a MiB shorter than before."""

    bytes_max: Counter[str] = field(default_factory=Counter)
    compacted: Counter[str] = field(default_factory=Counter)
    leaders: dict[str, set[str | None]] = field(default_factory=dict)
    _last: dict[str, tuple[str | None, int]] = field(default_factory=dict)

    def look(self, found: Mapping[str, Any]) -> None:
        for group in found["groups"]:
            name, size, leader = group["group"], group["log_bytes"], group["leader"]
            before = self._last.get(name, (None, 0))
            # Another leader's log is of another length.
            self.compacted[name] += before[0] == leader and before[1] - size > MIB
            self.bytes_max[name] = max(self.bytes_max[name], size)
            self.leaders.setdefault(name, set()).add(leader)
            self._last[name] = leader, size


@dataclass(slots=True)
class Replaced:
    victim: str = ""
    filled: int = 0
    beside: int = 0
    fill_errors: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    wrong: int = 0
    counted: int = 0
    logs: Logs = field(default_factory=Logs)
    lag_ms: dict[str, float] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)

    def named(self, *names: str) -> list[dict[str, Any]]:
        """Log lines of the nodes about snapshots of the large group."""
        return [event for event in self.events if event["event"] in names and event.get("group") == BIG_GROUP]

    @property
    def transfer_s(self) -> float:
        """From the last time it was sent to when it had become the state."""
        sent, installed = self.named("snapshot_sent"), self.named("snapshot_installed")
        if not sent or not installed:
            raise BenchmarkFailed("the large group came without a snapshot")
        begin, end = (datetime.fromisoformat(events[-1]["timestamp"]) for events in (sent, installed))
        return (end - begin).total_seconds()


def big_payload(number: int) -> str:
    return base64.b64encode(random.Random(number).randbytes(BIG_RAW_BYTES)).decode()


def snapshot(arguments: argparse.Namespace) -> list[Figure]:
    minutes = arguments.snapshot_minutes
    found = Replaced()
    # A tenth more than would take so long: the rows around the payloads are less than what the throttle lets go ahead.
    found.filled = round(minutes * 60 * 1.1 * SNAPSHOT_MIB_PER_S * MIB / BIG_BYTES)
    settings = {"cluster.snapshot_mib_per_s": SNAPSHOT_MIB_PER_S}
    with running(NODES, SNAPSHOT_GROUPS, settings) as cluster:
        found.victim = next(name for name in cluster.names if BIG_GROUP not in cluster.led_by(name))
        others = tuple(name for name in cluster.names if name != found.victim)
        traffic = Traffic(cluster, "snapshot", others, arguments.rate)

        async def main() -> None:
            tell(f"{found.filled * BIG_BYTES / MIB:,.0f} MiB of waiting jobs for group {BIG_GROUP}")
            await fill(cluster, found, others[0], [BIG_GROUP] * found.filled, "filled", pace_s=0.0)
            await asyncio.to_thread(lose, cluster, found.victim, others)
            await traffic.run(lambda traffic: replace(cluster, traffic, found, minutes))
            await look_at_new_node(cluster, found)

        run_loop(main())
    return [*snapshot_figures(found, minutes), *traffic.figures("snapshot")]


def snapshot_figures(found: Replaced, minutes: float) -> list[Figure]:
    sent, broken = found.named("snapshot_sent"), found.named("snapshot_refused", "snapshot_given_up", "snapshot_lost")
    logs = found.logs
    quiet = [name for name in map(str, range(SNAPSHOT_GROUPS)) if not logs.compacted[name]]
    times = ", ".join(f"{logs.compacted[name]} of group {name}" for name in sorted(logs.compacted) if logs.compacted[name])
    big = str(BIG_GROUP)
    return [
        Figure("snapshot: data of the large group when it began", found.filled * BIG_BYTES / MIB, "MiB"),
        Figure("snapshot: transfer and installation", found.transfer_s / 60, "min", None, f"at {SNAPSHOT_MIB_PER_S} MiB/s"),
        Figure("snapshot: shorter than asked for by", max(0.0, minutes - found.transfer_s / 60), "min", 0),
        Figure("snapshot: times it was sent", len(sent), "", 1),
        Figure("snapshot: transfers refused, lost or given up", len(broken), "", 0, ", ".join(event["event"] for event in broken)),
        Figure("snapshot: from replaced to all groups whole", found.seconds, "s"),
        Figure("snapshot: groups whose log was not compacted meanwhile", len(quiet), "groups", 0, times),
        Figure("snapshot: longest log of the large group", logs.bytes_max[big] / MIB, "MiB", None, f"led by {logs.leaders.get(big)}"),
        Figure("snapshot: longest the new node's loop stood still", found.lag_ms.pop(found.victim, 0.0), "ms"),
        Figure("snapshot: longest another node's loop stood still", max(found.lag_ms.values()), "ms"),
        Figure("snapshot: large jobs made meanwhile", found.beside, "jobs", None, f"{found.beside * BIG_BYTES / MIB:,.0f} MiB"),
        Figure("snapshot: large creates that failed", sum(found.fill_errors.values()), "jobs", 0, str(dict(found.fill_errors) or "")),
        Figure("snapshot: jobs missing at the new node", found.filled + found.beside - found.counted, "jobs", 0),
        Figure("snapshot: payloads wrong at the new node", found.wrong, "jobs", 0, f"of {SAMPLES}"),
    ]


async def fill(cluster: ClusterProcesses, found: Replaced, name: str, groups: Sequence[int], what: str, *, pace_s: float) -> None:
    """Large jobs due in a day, one for each group named; `pace_s`: time for each of them."""
    next_at = time.monotonic()
    async with AsyncClient(cluster.nodes[name].url, retries=10) as client:
        for first in range(0, len(groups), BIG_A_CALL):
            jobs = [
                NewJob(
                    what, big_payload(number), delay_s=DAY_S,
                    idempotency_key=key_in_group(f"{what}-{number}", groups[number], cluster.group_count),
                )
                for number in range(first, min(first + BIG_A_CALL, len(groups)))
            ]  # fmt: skip
            for answer in await client.create_many(jobs, return_errors=True):
                if isinstance(answer, WheelschedError):
                    found.fill_errors[answer.code] += 1
            next_at += pace_s * len(jobs)
            await asyncio.sleep(max(0.0, next_at - time.monotonic()))


def lose(cluster: ClusterProcesses, victim: str, others: Sequence[str]) -> None:
    """A node ends and its data is gone; return when the others lead everything."""
    cluster.nodes[victim].kill()
    for path in Path(cluster.nodes[victim].data_dir).iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    cluster.wait("the others lead all", lambda: sum(len(cluster.led_by(name)) for name in others) == cluster.group_count)


async def replace(cluster: ClusterProcesses, traffic: Traffic, found: Replaced, minutes: float) -> None:
    url = cluster.nodes[traffic.names[0]].url
    found.beside = SNAPSHOT_GROUPS * round(LOGGED_MIB * MIB / BIG_BYTES)
    beside = [number % SNAPSHOT_GROUPS for number in range(found.beside)]

    async def watch() -> None:
        while True:
            found.logs.look(await asyncio.to_thread(picture, cluster, traffic.names[0]))
            for name in cluster.names:
                status = await asyncio.to_thread(cluster.ask, name, "/status") or {"loop_lag_ms": 0.0}
                found.lag_ms[name] = max(found.lag_ms.get(name, 0.0), status["loop_lag_ms"])
            await asyncio.sleep(1.0)

    async with traffic.step(f"{found.victim} is replaced") as step, asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch())
        filling = tasks.create_task(
            fill(cluster, found, traffic.names[-1], beside, "beside", pace_s=0.95 * minutes * 60 / found.beside), name="fill"
        )
        await asyncio.to_thread(operate, url, "replace", found.victim, "--watch", on_line=starts(cluster, found.victim))
        await filling
        watching.cancel()
    found.seconds = step.seconds
    for name in cluster.names:
        found.events += [event for line in cluster.nodes[name].log().splitlines() if "snapshot_" in line for event in [json.loads(line)]]
    found.events.sort(key=lambda event: event["timestamp"])


async def look_at_new_node(cluster: ClusterProcesses, found: Replaced) -> None:
    """Let the new node lead the large group, and read there what it was given."""
    url = cluster.nodes[next(name for name in cluster.names if name != found.victim)].url

    def is_level() -> bool:
        groups = picture(cluster, found.victim)["groups"]
        return any(
            group["group"] == str(BIG_GROUP) and replica["node"] == found.victim and replica["lag"] == 0
            for group in groups for replica in group["replicas"]
        )  # fmt: skip

    await wait(f"{found.victim} has what was written meanwhile", is_level)
    for _ in range(TRANSFERS_MAX):  # one that a busy machine lets fail is given up, and the group stays where it is
        await asyncio.to_thread(operate, url, "transfer", str(BIG_GROUP), found.victim)
        with contextlib.suppress(BenchmarkFailed):
            await wait(f"{found.victim} leads group {BIG_GROUP}", lambda: BIG_GROUP in cluster.led_by(found.victim), 15.0)
            break
    else:
        raise BenchmarkFailed(f"{found.victim} does not lead group {BIG_GROUP} after {TRANSFERS_MAX} transfers")
    async with AsyncClient(cluster.nodes[found.victim].url) as client:
        for what in ("filled", "beside"):
            found.counted += sum((await client.queue(what)).depth.get("SCHEDULED", {}).values())
        for number in range(0, found.filled, max(1, found.filled // SAMPLES)):
            key = key_in_group(f"filled-{number}", BIG_GROUP, cluster.group_count)
            job = await client.create("filled", big_payload(number), delay_s=DAY_S, idempotency_key=key)
            found.wrong += job.payload != big_payload(number)
        tell(f"  {found.victim} has {found.counted:,} large jobs")


# --- all of it ------------------------------------------------------------------------------------------------------------------

RUNS: Final[dict[str, Callable[[argparse.Namespace], list[Figure]]]] = {
    "routes": routes, "growth": growth, "setting": setting, "snapshot": snapshot,
}  # fmt: skip


def parts_of(text: str) -> list[str]:
    parts = text.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        raise argparse.ArgumentTypeError(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return parts


def main() -> int:
    parser = argparse.ArgumentParser(description="A cluster whose members and settings change under load.")
    parser.add_argument("--parts", type=parts_of, default=list(PARTS), help=f"which, with commas between them ({','.join(PARTS)})")
    parser.add_argument("--groups", type=int, default=8, help="Raft groups, but for snapshot (8)")
    parser.add_argument("--rate", type=float, default=50.0, help="precise jobs a second beside growth, setting and snapshot (50)")
    parser.add_argument("--wakes", type=int, default=100, help="routes: jobs for each pair of nodes (100)")
    parser.add_argument("--rounds", type=int, default=600, help="routes: jobs that are written at one node and read at another (600)")
    parser.add_argument("--waiting", type=int, default=20_000, help="growth: waiting jobs that move with their groups (20,000)")
    parser.add_argument("--snapshot-minutes", type=float, default=10.0, help="snapshot: how long the transfer takes at least (10)")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bound is broken")
    arguments = parser.parse_args()
    figures: list[Figure] = []
    for part in arguments.parts:
        tell(part)
        figures += RUNS[part](arguments)
    return report(f"members and settings that change, {', '.join(arguments.parts)}", figures, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
