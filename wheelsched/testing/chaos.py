"""Faults of every kind against a cluster of real processes under load, and a check that it kept its word.

    python -m wheelsched.testing.chaos --faults 100 --nodes 3 --seed 7         # make chaos; --data-dir keeps everything for a look
    python -m wheelsched.testing.chaos --faults 20 --kinds kill,cut,one_way

Three or five nodes start from one file (`cluster_process.py`) and reach each other through proxies (`links.py`). Clients call any of
them, at random: they create (single, in batches, with keys sent again and again), claim, heartbeat, end attempts every way there is,
abandon some, end some long after their lease, cancel, read. A metronome makes a precise job come due in every group four times a
second, created long before: how late they start is the gap that a fault makes. In the end workers drain the queues, `history.check`
compares what the clients know with what the cluster tells, `check_reads` whether what each of them was told of a job fits one order of
events, and the rows of all replicas are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp

from wheelsched import __version__
from wheelsched.model import keys
from wheelsched.node.build import open_store
from wheelsched.runtime.config import load_settings
from wheelsched.runtime.metrics import Metrics
from wheelsched.store import Store
from wheelsched.testing.cluster_process import ClusterProcesses, key_in_group
from wheelsched.testing.crash import QUEUES, RETRY, STILL, Clients, Interrupted
from wheelsched.testing.history import FINAL_NAMES, Creation, End, History, Known, Told, check, instant_ms, is_undelivered
from wheelsched.testing.links import Links, run_links
from wheelsched.testing.process import NodeFailed, NodeProcess

GROUP_COUNT: Final = 8
# Longer than any long poll here, shorter than most pauses: a client gives up on a node that stands still and asks another one.
CALL_S_MAX: Final = 10.0
CONNECT_S_MAX: Final = 1.0
READ_S_MAX: Final = 90.0
SETTLE_S_MAX: Final = 90.0
REJOIN_S_MAX: Final = 240.0
STOP_S_MAX: Final = 5.0
DRAIN_S_MAX: Final = 240.0
LOOK_S: Final = 0.05
BEAT: Final = "beat"
BEAT_S: Final = 0.25
# A beat is created so long before it is due that no fault keeps it from being there in time.
BEAT_AHEAD_S: Final = 30.0
BEAT_LEASE_S: Final = 2
# At each node; those of a node that stands still hang there, so that a gap is one in firing.
BEAT_WORKERS: Final = 6
# A node whose clock is off by more than 250 ms from most others stops dispatching within half a second; none may fire so early.
EARLY_MS_MAX: Final = 250 + 50
CLOCK_STEPS_MS: Final = (2_000, -2_000, 3_600_000, -3_600_000)
DISK_BYTES: Final = 2 * 1024**3
DISK_LEFT_BYTES: Final = DISK_BYTES // 100  # under the fortieth at which a node stops
PAUSES_S: Final = {"produce": 0.3, "work": 0.1, "oversleep": 0.5, "cancel": 0.5, "read_one": 0.05, "beat_worker": 0.0}
SECTION: Final = ("<!-- chaos: begin -->", "<!-- chaos: end -->")

# kind -> how often it is drawn.
WEIGHTS: Final = {
    "kill": 4, "pause": 2, "cut": 2, "one_way": 2, "term": 2, "clock": 2, "slow": 1, "slow_disk": 2, "stutter": 1, "kill_all": 1,
    "full": 1, "wipe": 1,
}  # fmt: skip
KINDS: Final = {
    "kill": "kill -9, restart",
    "pause": "SIGSTOP for 1 to 20 s",
    "cut": "a node cut off from all others",
    "one_way": "a link cut in one direction",
    "term": "SIGTERM, restart",
    "clock": "a clock stepped by 2 s or 1 h",
    "slow": "a slow link",
    "slow_disk": "a slow disk",
    "stutter": "SIGSTOP in short bursts",
    "kill_all": "kill -9 of all nodes at once",
    "full": "a full disk",
    "wipe": "data lost, node replaced",
}
# After these a node may end by itself: a store whose fsync took 10 s, or whose disk is full, must not go on.
MAY_END: Final = frozenset({"pause", "full", "slow_disk"})


# --- clients --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seen:
    """What an answer told of a job; `version` 0: it did not say. Seconds of one monotonic clock."""

    sent_at: float
    answered_at: float
    status: str
    version: int = 0


@dataclass(slots=True)
class Beat:
    """A precise job that was due at an instant in a group. Unix milliseconds; 0: not yet. `leased_ms`: when it was first leased, which
    workers that wait for it make the instant at which it fired; `started_ms`: when a worker had it, which the fault may have kept from
    the first lease."""

    group: int
    due_ms: int
    acknowledged_ms: int = 0
    leased_ms: int = 0
    started_ms: int = 0

    @property
    def late_ms(self) -> int | None:
        """How late it fired, from when it could have; None of one that did not."""
        return self.leased_ms - max(self.due_ms, self.acknowledged_ms) if self.leased_ms and self.acknowledged_ms else None


_HOME: ContextVar[str] = ContextVar("home", default="")  # the node that a caller asks first


class ChaosClients(Clients):
    """Callers of several nodes, any of which may be away, stand still or be cut off from the others."""

    def __init__(self, history: History, rng: random.Random, nodes: Mapping[str, NodeProcess]) -> None:
        super().__init__(history, rng)
        self.urls = [node.url for node in nodes.values()]
        self.seen: dict[str, list[Seen]] = defaultdict(list)
        self.started_ms: dict[str, int] = {}  # job -> when a worker had it for the first time
        self.beats: dict[str, Beat] = {}
        self.surprises: list[str] = []
        self.answers: Counter[int] = Counter()
        self.late_refused = 0
        self.late_accepted = 0
        self._up.set()

    async def call(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
        """The answer of any node, or of the caller's own; those that do not even take a connection are passed over. Raises
        `Interrupted`."""
        home = _HOME.get()
        for url in sorted(self.rng.sample(self.urls, len(self.urls)), key=lambda url: url != home):
            with suppress(_NotThere):
                return await self._call(url, method, path, body, headers)
        await asyncio.sleep(LOOK_S)
        raise Interrupted(sent=False)

    async def _call(self, url: str, method: str, path: str, body: Any, headers: Mapping[str, str] | None) -> tuple[int, Any]:
        assert self._session is not None
        sent_at = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=CALL_S_MAX, sock_connect=CONNECT_S_MAX)
        try:
            async with self._session.request(method, url + path, json=body, headers=headers, timeout=timeout) as answer:
                raw = await answer.read()
                status, told = answer.status, json.loads(raw) if raw else None
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            raise _NotThere from None
        except (aiohttp.ClientError, TimeoutError):
            raise Interrupted(sent=True) from None
        self.answers[status] += 1
        if status == 504:
            raise Interrupted(sent=True)
        if status not in (200, 201, 202, 204, 404, 409, 503):
            self.surprises.append(f"answer: {method} {path}: {status} {told}")
            raise Interrupted(sent=True)
        if status in (200, 201, 202):
            self._note_seen(sent_at, told)
        return status, told

    def _note_seen(self, sent_at: float, told: Any) -> None:
        now = time.monotonic()
        if "job_id" in told and "version" in told:
            self.seen[told["job_id"]].append(Seen(sent_at, now, told["status"], told["version"]))
        for job in told.get("jobs", ()):
            if "lease_token" in job:
                now_ms = round(time.time() * 1000)
                early_ms = instant_ms(job["fire_at"]) - now_ms
                if early_ms > EARLY_MS_MAX:
                    self.surprises.append(f"never_early: {job['job_id']} was handed out {early_ms} ms before it was due")
                self.started_ms.setdefault(job["job_id"], now_ms)

    async def read(self, path: str) -> Any:
        """The JSON of a GET that has to succeed once the cluster is whole."""
        give_up = time.monotonic() + READ_S_MAX
        while True:
            status, answer = 0, None
            with suppress(Interrupted):
                status, answer = await self.call("GET", path)
            if status == 200:
                return answer
            if time.monotonic() > give_up:
                raise NodeFailed(f"GET {path}: {status} {answer}")
            await asyncio.sleep(LOOK_S)

    async def forever(self, act: Callable[[], Awaitable[None]], pause_s: float) -> None:
        while True:
            with suppress(Interrupted):
                await act()
            await asyncio.sleep(self.rng.uniform(0, pause_s))

    def _note(self, creation: Creation, status: int, answer: Any) -> None:
        if status == 504:  # of one job in a batch
            self._lost(creation, Interrupted(sent=True))
        else:
            super()._note(creation, status, answer)

    def _note_end(self, end: End, status: int, job_status: Any) -> None:
        super()._note_end(end, status, job_status)
        if end.known is Known.DONE and end.status in FINAL_NAMES:
            now = time.monotonic()
            # When it was sent is not known here; only that it was answered counts.
            self.seen[end.handed.job_id].append(Seen(now, now, end.status))

    async def read_one(self) -> None:
        """Any of the jobs acknowledged last."""
        if not self.jobs:
            return
        job_id = self.rng.choice(self.jobs[-300:])
        status, _ = await self.call("GET", f"/v1/jobs/{job_id}")
        if status == 404:
            self.surprises.append(f"never_lost: {job_id} was acknowledged, and is not found")

    async def oversleep(self) -> None:
        """A worker that stands still until long after its lease, and then reports as if nothing had been."""
        call = await self.claim(self.rng.sample(QUEUES, 1), jobs_max=1, lease_s=1, wait_s=1)
        for handed in call.jobs.values():
            await asyncio.sleep(self.rng.uniform(1.5, 6))
            before = len(self.history.ends)
            await self.end(handed, call.worker, "succeeded")
            if self.history.ends[before].known is Known.DONE:
                self.late_accepted += 1  # nobody else had it meanwhile, else `check` tells
            else:
                self.late_refused += 1

    # The metronome.

    async def make_beats(self) -> None:
        """For ever: precise jobs, one in each group every `BEAT_S`, created `BEAT_AHEAD_S` before."""
        due_s = time.time() + 5
        while True:
            made = [self._beat(group, round(due_s * 1000)) for group in range(GROUP_COUNT)]
            await self._create_beats(made)
            due_s += BEAT_S
            await asyncio.sleep(max(0.0, due_s - BEAT_AHEAD_S - time.time()))

    def _beat(self, group: int, due_ms: int) -> tuple[Creation, dict[str, Any], Beat]:
        key = key_in_group(f"beat-{group}-{due_ms}", group, GROUP_COUNT)
        creation = Creation(len(self.history.creations), BEAT, key)
        self.history.creations[creation.number] = creation
        at = datetime.fromtimestamp(due_ms / 1000, UTC).isoformat(timespec="milliseconds")
        body = {"queue": BEAT, "payload": {"number": creation.number}, "run_at": at, "idempotency_key": key, "retry": RETRY}
        return creation, body, Beat(group, due_ms)

    async def _create_beats(self, made: Sequence[tuple[Creation, dict[str, Any], Beat]]) -> None:
        while made:
            try:
                status, answer = await self.call("POST", "/v1/jobs:batch", {"jobs": [body for _, body, _ in made]})
            except Interrupted as cut:
                for creation, _, _ in made:
                    self._lost(creation, cut)
                continue
            results = answer["results"] if status == 200 else [{"status": status}] * len(made)
            for (creation, _, beat), result in zip(made, results, strict=True):
                if result["status"] in (200, 201):
                    creation.known = Known.DONE
                    creation.answered_count += 1
                    creation.job_ids.add(result["job"]["job_id"])
                    beat.acknowledged_ms = round(time.time() * 1000)
                    self.beats[result["job"]["job_id"]] = beat
            made = [one for one in made if one[0].known is not Known.DONE]
            if made:
                await asyncio.sleep(LOOK_S)

    async def beat_worker(self, url: str) -> None:
        """It stays with its node, as workers do: else one node that stands still would soon have all of them waiting for it."""
        _HOME.set(url)
        call = await self.claim((BEAT,), jobs_max=20, lease_s=BEAT_LEASE_S, wait_s=2)
        if call.jobs:
            await self.end_many(list(call.jobs.values()), call.worker)

    def finish_beats(self, told: Told) -> None:
        """When each of them started, as its worker saw it and as the cluster did."""
        for job_id, beat in self.beats.items():
            beat.started_ms = self.started_ms.get(job_id, 0)
            found = told.jobs.get(job_id)
            beat.leased_ms = instant_ms(found.job["started_at"]) if found is not None and "started_at" in found.job else 0

    # The end.

    async def drain(self) -> None:
        """Work until every job is final."""
        give_up = time.monotonic() + DRAIN_S_MAX
        waiting = "&".join(f"status={name}" for name in ("SCHEDULED", "QUEUED", "RUNNING", "RETRYING", "CANCEL_REQUESTED"))
        while True:
            with suppress(Interrupted):
                call = await self.claim((*QUEUES, STILL, BEAT), jobs_max=100, lease_s=3, wait_s=0.5)
                if call.jobs:
                    await self.end_many(list(call.jobs.values()), call.worker)
                    continue
            left = (await self.read(f"/v1/jobs?{waiting}&limit=5"))["jobs"]
            if not left:
                return
            if time.monotonic() > give_up:
                raise NodeFailed(f"jobs that never end: {left}")


class _NotThere(Exception):
    """No connection: the node cannot have seen the call."""


def check_reads(seen: Mapping[str, Sequence[Seen]]) -> Iterator[str]:
    """Whether the answers about each job fit one order of events that respects real time: what is sent after an answer came sees at
    least what that one told. The versions of a job are that order; within one of them a job only becomes due."""
    for job_id, told in seen.items():
        answered = sorted(told, key=lambda one: one.answered_at)
        highest, ended, due, place = 0, "", 0, 0
        for one in sorted(told, key=lambda one: one.sent_at):
            while place < len(answered) and answered[place].answered_at < one.sent_at:
                before = answered[place]
                highest = max(highest, before.version)
                ended = before.status if before.status in FINAL_NAMES else ended
                due = max(due, before.version) if before.status == "QUEUED" else due
                place += 1
            if one.version and one.version < highest:
                yield f"linearizable: {job_id} was told at version {highest}, and later at {one.version}"
            if ended and one.status != ended:
                yield f"linearizable: {job_id} was told {ended}, and later {one.status}"
            if one.version and one.version == due and one.status in ("SCHEDULED", "RETRYING"):
                yield f"linearizable: {job_id} was told QUEUED at version {due}, and later {one.status}"
        by_version: dict[int, set[str]] = defaultdict(set)
        for one in told:
            if one.version:
                by_version[one.version].add(one.status)
        for version, statuses in by_version.items():
            if len(statuses - {"QUEUED"}) > 1:
                yield f"linearizable: {job_id} has at version {version} the statuses {sorted(statuses)}"


# --- faults ---------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Event:
    """One fault as it went. `groups`: those that the node led; Unix milliseconds."""

    kind: str
    node: str
    groups: tuple[int, ...]
    began_ms: int
    detail: str = ""
    healed_ms: int = 0
    settled_ms: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """`overlap`: share of faults that begin while the one before goes on; with three nodes the majority may go with it."""

    faults: int = 100
    nodes: int = 3
    seed: int = 0
    minutes: float = 60.0
    kinds: tuple[str, ...] = tuple(KINDS)
    overlap: float = 0.1
    producers: int = 2
    workers: int = 3

    def options(self) -> str:
        """As on the command line."""
        named = "" if self.kinds == tuple(KINDS) else f" --kinds {','.join(self.kinds)}"
        return f"--faults {self.faults} --nodes {self.nodes} --seed {self.seed}{named}"

    def draw(self, rng: random.Random, available: Sequence[str]) -> list[str]:
        """The kinds of all faults in order; each of the available ones at least once where there are enough."""
        once = list(available) if self.faults >= len(available) else []
        drawn = once + rng.choices(available, [WEIGHTS[kind] for kind in available], k=self.faults - len(once))
        rng.shuffle(drawn)
        return drawn


class Chaos:
    """Does things to the nodes of a cluster, and undoes them."""

    def __init__(self, cluster: ClusterProcesses, links: Links, rng: random.Random, disk: Path | None) -> None:
        """`disk`: a small file system that holds the data of the last node, and nothing else."""
        self.cluster = cluster
        self.links = links
        self.rng = rng
        self.disk = disk
        self.events: list[Event] = []
        self.faults: list[str] = []
        self.exits: list[tuple[int, float]] = []
        self._busy: set[str] = set()
        # Forking the next node looks at modules of this process, one at a time.
        self._starting = threading.Lock()

    def available(self, kinds: Sequence[str]) -> list[str]:
        return [kind for kind in kinds if kind != "full" or self.disk is not None]

    async def play(self, kind: str) -> None:
        """One fault from its beginning until all is whole again."""
        node = await self._victim(kind)
        self._busy.add(node)
        try:
            groups = tuple(await asyncio.to_thread(self.cluster.led_by, node))
            event = Event(kind, node, groups, _now_ms())
            self.events.append(event)
            await getattr(self, f"_{kind}")(node, event)
            event.healed_ms = _now_ms()
            if not self._busy - {node}:
                await self._settle(event)
            event.settled_ms = _now_ms()
        finally:
            self._busy.discard(node)

    async def _victim(self, kind: str) -> str:
        """Mostly the node that leads most."""
        if kind == "full":
            return self.cluster.names[-1]
        free = [name for name in self.cluster.names if name not in self._busy]
        if kind == "wipe":
            # A blank node knows the others by the ids that the settings stand for: one has to be left that was never replaced.
            return self.rng.choice([name for name in free if name != self.cluster.names[0]])
        if self.rng.random() < 0.5:
            return self.rng.choice(free)
        led = [(len(await asyncio.to_thread(self.cluster.led_by, name)), name) for name in free]
        return max(led)[1]

    async def _settle(self, event: Event) -> None:
        """Everything is healed: all nodes run and say so."""
        give_up = time.monotonic() + SETTLE_S_MAX
        for name in self.cluster.names:
            while True:
                for each in self.cluster.names:  # those that follow may be what this one waits for
                    await self._revive(each, event.kind)
                if await asyncio.to_thread(self.cluster.ask, name, "/readyz") is not None:
                    break
                if time.monotonic() > give_up:
                    status = await asyncio.to_thread(self.cluster.ask, name, "/status")
                    raise NodeFailed(f"after {event} {name} is not ready: {status}\n{self.cluster.log_tails()}")
                await asyncio.sleep(LOOK_S)

    async def _revive(self, name: str, kind: str) -> None:
        node = self.cluster.nodes[name]
        if node.has_ended:
            code = node.exit_code()
            if kind not in MAY_END and not self._busy:
                self.faults.append(f"ended: {name} ended by itself with code {code} after {kind}: {node.log_tail(3)[-500:]}")
            await self._start(name)

    async def _start(self, name: str) -> None:
        def start() -> None:
            with self._starting:
                self.cluster.nodes[name].spawn()
            self.cluster.nodes[name].wait_ready()

        await asyncio.to_thread(start)

    def _others(self, node: str) -> list[str]:
        return [name for name in self.cluster.names if name != node]

    def _around(self, node: str) -> list[tuple[str, str]]:
        return [pair for other in self._others(node) for pair in ((node, other), (other, node))]

    # One method a kind; each returns when the fault is over.

    async def _kill(self, node: str, event: Event) -> None:
        await asyncio.to_thread(self.cluster.nodes[node].kill)
        await asyncio.sleep(self.rng.choice((0.0, self.rng.uniform(0, 1), self.rng.uniform(1, 5))))
        await self._start(node)

    async def _kill_all(self, node: str, event: Event) -> None:
        for name in self.cluster.names:
            if name not in self._busy - {node}:
                self.cluster.nodes[name].signal(signal.SIGKILL)
        names = [name for name in self.cluster.names if name not in self._busy - {node}]
        for name in names:
            await asyncio.to_thread(self.cluster.nodes[name].kill)
        await asyncio.gather(*(self._start(name) for name in names))

    async def _pause(self, node: str, event: Event) -> None:
        hold_s = self.rng.choice((self.rng.uniform(1, 3), self.rng.uniform(3, 20)))
        event.detail = f"{hold_s:.1f} s"
        self.cluster.nodes[node].signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(hold_s)
        finally:
            self.cluster.nodes[node].signal(signal.SIGCONT)

    async def _stutter(self, node: str, event: Event) -> None:
        until = time.monotonic() + self.rng.uniform(3, 6)
        process = self.cluster.nodes[node]
        while time.monotonic() < until and process.is_alive:
            process.signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(self.rng.uniform(0.05, 0.4))
            finally:
                process.signal(signal.SIGCONT)
            await asyncio.sleep(self.rng.uniform(0.02, 0.2))

    async def _cut(self, node: str, event: Event) -> None:
        await self._with_links(lambda: self.links.cut(self._around(node)), event)

    async def _one_way(self, node: str, event: Event) -> None:
        others = self._others(node)
        kinds = {
            "all it sends": [(node, other) for other in others],
            "all it is sent": [(other, node) for other in others],
            "one link": [(node, self.rng.choice(others))],
        }
        event.detail = self.rng.choice(sorted(kinds))
        pairs = kinds[event.detail]
        await self._with_links(lambda: self.links.cut(pairs), event)

    async def _slow(self, node: str, event: Event) -> None:
        delay_s = self.rng.choice((0.01, 0.05, 0.2))
        event.detail = f"{delay_s * 1000:.0f} ms"
        await self._with_links(lambda: self.links.slow(self._around(node), delay_s), event)

    async def _slow_disk(self, node: str, event: Event) -> None:
        delay_ms, hold_s = self.rng.choice((20, 100, 500, 3_000)), self.rng.uniform(2, 8)
        event.detail = f"{delay_ms} ms a sync, {hold_s:.1f} s"
        file = self.cluster.disk_file(node)
        _write_whole(file, str(delay_ms))
        try:
            await asyncio.sleep(hold_s)
        finally:
            _write_whole(file, "0")

    async def _with_links(self, cut: Callable[[], None], event: Event) -> None:
        hold_s = self.rng.choice((self.rng.uniform(0.2, 2), self.rng.uniform(2, 10)))
        event.detail += f" {hold_s:.1f} s"
        cut()
        try:
            await asyncio.sleep(hold_s)
        finally:
            self.links.heal()

    async def _clock(self, node: str, event: Event) -> None:
        step_ms = self.rng.choice(CLOCK_STEPS_MS)
        event.detail = f"{step_ms / 1000:+g} s"
        file = self.cluster.clock_file(node)
        _write_whole(file, str(step_ms))
        try:
            await asyncio.sleep(self.rng.uniform(2, 8))
            if self.rng.random() < 0.3:
                # A node that starts with a wrong clock knows no better one yet.
                event.detail += ", restarted"
                await asyncio.to_thread(self.cluster.nodes[node].kill)
                await self._start(node)
                await asyncio.sleep(self.rng.uniform(1, 4))
        finally:
            _write_whole(file, "0")

    async def _term(self, node: str, event: Event) -> None:
        code, took_s = await asyncio.to_thread(self.cluster.nodes[node].terminate, 30.0)
        self.exits.append((code, took_s))
        event.detail = f"{took_s:.1f} s"
        if code or took_s > STOP_S_MAX:
            self.faults.append(f"term: {node} ended with code {code} after {took_s:.1f} s: {self.cluster.nodes[node].log_tail(3)[-500:]}")
        await asyncio.sleep(self.rng.choice((0.0, self.rng.uniform(0, 2))))
        await self._start(node)

    async def _full(self, node: str, event: Event) -> None:
        assert self.disk is not None
        process = self.cluster.nodes[node]
        filler = self.disk / "filler"
        stat = os.statvfs(self.disk)
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, stat.f_bavail * stat.f_frsize - DISK_LEFT_BYTES))
        try:
            give_up = time.monotonic() + SETTLE_S_MAX
            while process.is_alive:
                if time.monotonic() > give_up:
                    self.faults.append(f"full: {node} went on for {SETTLE_S_MAX:g} s on a full disk")
                    break
                await asyncio.sleep(LOOK_S)
        finally:
            filler.unlink()

    async def _wipe(self, node: str, event: Event) -> None:
        """Its data is gone: it is replaced, under its old name, and gets everything anew."""
        process = self.cluster.nodes[node]
        await asyncio.to_thread(process.kill)
        for path in process.data_dir.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        give_up = time.monotonic() + REJOIN_S_MAX
        while not await self._replace(node):
            if time.monotonic() > give_up:
                raise NodeFailed(f"{node} could not be replaced within {REJOIN_S_MAX:g} s")
            await asyncio.sleep(0.2)
        await self._start(node)
        while not await asyncio.to_thread(self._is_whole, node):
            if time.monotonic() > give_up:
                found = await asyncio.to_thread(self.cluster.ask, self._others(node)[0], "/v1/cluster")
                raise NodeFailed(f"{node} was replaced and is not whole within {REJOIN_S_MAX:g} s: {found}\n{self.cluster.log_tails()}")
            await asyncio.sleep(0.2)

    async def _replace(self, node: str) -> bool:
        url = self.cluster.nodes[self.rng.choice(self._others(node))].url
        timeout = aiohttp.ClientTimeout(total=CALL_S_MAX)
        with suppress(aiohttp.ClientError, TimeoutError):
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(f"{url}/v1/cluster/nodes", json={"id": node, "replace": True}) as answer,
            ):
                return answer.status in (200, 202)
        return False

    def _is_whole(self, node: str) -> bool:
        """Whether a replaced node has all that it is to hold, and nothing is under way."""
        found = self.cluster.ask(self._others(node)[0], "/v1/cluster")
        if found is None:
            return False
        member = next((one for one in found["nodes"] if one["id"] == node and one["state"] == "active"), None)
        held = [replica for group in found["groups"] for replica in group["replicas"] if replica["node"] == node]
        wanted = min(3, len(self.cluster.names))
        return (
            member is not None
            and all(group["change"] is None for group in found["groups"])
            and all(sum(one["role"] == "voter" for one in group["replicas"]) >= wanted for group in found["groups"])
            and bool(held)
            and all(replica["role"] == "voter" or len(self.cluster.names) > wanted for replica in held)
        )


def _may_overlap(one: str, other: str) -> bool:
    """Two wrong clocks of three are a majority, which no node can tell from a right one."""
    return not {"wipe", "full", "kill_all"} & {one, other} and (one, other) != ("clock", "clock")


def _now_ms() -> int:
    return round(time.time() * 1000)


def _write_whole(file: Path, text: str) -> None:
    part = file.with_suffix(".part")
    part.write_text(text)
    part.replace(file)


# --- the run --------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Report:
    """What a run did and found. `faults` empty: the cluster kept its word."""

    plan: Plan
    events: list[Event] = field(default_factory=list)
    beats: list[Beat] = field(default_factory=list)
    counts: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    answers: Counter[int] = field(default_factory=Counter)
    took_s: float = 0.0
    jobs: int = 0
    attempts: int = 0
    retried: int = 0
    undelivered: int = 0
    reads: int = 0
    replicas: int = 0
    late_refused: int = 0
    late_accepted: int = 0
    stop_s_max: float = 0.0
    skipped: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def gap_ms(self, event: Event) -> int | None:
        """How late the latest fired of what came due in the groups that the node led, from the fault to two seconds after it was over."""
        late = [
            beat.late_ms for beat in self.beats
            if beat.group in event.groups and event.began_ms <= beat.due_ms <= event.healed_ms + 2_000 and beat.late_ms is not None
        ]  # fmt: skip
        return max(late, default=None)

    def longest(self, count: int = 3) -> list[str]:
        """The faults with the longest gaps, in words."""
        gaps = sorted(((gap, event) for event in self.events if (gap := self.gap_ms(event)) is not None), key=lambda one: -one[0])
        return [
            f"{_seconds(gap)} at {KINDS[event.kind]} {event.detail} (over after {_seconds(event.healed_ms - event.began_ms)})"
            for gap, event in gaps[:count]
        ] or ["none"]  # fmt: skip

    def table(self) -> list[str]:
        """One row a kind, as Markdown."""
        rows = ["| fault | times | of nodes that led | gap p50 | gap max | whole again p50 | max |", "|---|---:|---:|---:|---:|---:|---:|"]
        for kind, name in KINDS.items():
            events = [event for event in self.events if event.kind == kind]
            if not events:
                continue
            gaps = sorted(gap for event in events if event.groups and (gap := self.gap_ms(event)) is not None)
            whole = sorted(event.settled_ms - event.began_ms for event in events if event.settled_ms)
            rows.append(
                f"| {name} | {len(events)} | {sum(bool(event.groups) for event in events)} | {_middle(gaps)} | {_last(gaps)} "
                f"| {_middle(whole)} | {_last(whole)} |"
            )
        return rows

    def lines(self) -> list[str]:
        plan = self.plan
        late = sorted(beat.late_ms for beat in self.beats if beat.late_ms is not None)
        handed = sorted(beat.started_ms - max(beat.due_ms, beat.acknowledged_ms) for beat in self.beats if beat.started_ms)
        told = [f"{len(self.events)} faults, {plan.nodes} nodes, seed {plan.seed}, {self.took_s / 60:.1f} min", "", *self.table(), ""]
        if self.skipped:
            told += [f"Not possible here: {', '.join(KINDS[kind] for kind in self.skipped)}.", ""]
        told += ["| calls | acknowledged | refused | unknown |", "|---|---:|---:|---:|"]
        told += [f"| {name} | {done:,} | {refused:,} | {unknown:,} |" for name, (done, refused, unknown) in self.counts.items()]
        told += [
            "",
            f"{self.jobs:,} jobs with {self.attempts:,} attempts on record, {self.retried:,} of them beyond a first one; "
            f"{self.reads:,} answers about single jobs held against each other; rows of {self.replicas} replicas compared.",
            f"{self.undelivered} attempts were leased and lost on the way to the worker, with node or link; each ended by its lease.",
            f"Ends long after the lease: {self.late_refused} refused as stale, {self.late_accepted} accepted because nobody else had "
            "the job.",
            f"{len(self.beats):,} precise jobs ({1 / BEAT_S:g} a second and group) fired late by p50 {_at(late, 0.5)}, "
            f"p99 {_at(late, 0.99)}; "
            f"**longest gap in firing {_last(late)}**. In a worker's hands, lost attempts included: p50 {_at(handed, 0.5)}, "
            f"p99 {_at(handed, 0.99)}, max {_last(handed)}.",
            f"The longest: {'; '.join(self.longest())}.",
            "",
        ]
        told += self.faults[:50] or [
            "**0 acknowledged jobs lost, 0 triggered twice, 0 stale ends accepted, every due job run, every job's history linearizable, "
            "all replicas alike, 0 audit repairs.**"
        ]
        return told


def _at(ordered: Sequence[int], q: float) -> str:
    return "-" if not ordered else _seconds(ordered[min(len(ordered) - 1, int(q * len(ordered)))])


def _middle(ordered: Sequence[int]) -> str:
    return _at(ordered, 0.5)


def _last(ordered: Sequence[int]) -> str:
    return _at(ordered, 1)


def _seconds(ms: int) -> str:
    return f"{ms} ms" if ms < 1_000 else f"{ms / 1000:.2f} s"


async def run(plan: Plan, directory: Path, tell: Callable[[str], None] = lambda _line: None) -> Report:
    """Play a plan in a directory that is there and empty."""
    with ExitStack() as stack:
        disk = stack.enter_context(_small_disk(directory / "disk")) if "full" in plan.kinds else None
        names = [f"n{number + 1}" for number in range(plan.nodes)]
        cluster = ClusterProcesses(
            directory, plan.nodes, group_count=GROUP_COUNT, proxied=True,
            settings={"scheduler.audit_interval_s": 1, "store.write_buffer_mib": 16},
            data_dirs={} if disk is None else {names[-1]: disk / "data"},
        )  # fmt: skip
        stack.callback(cluster.kill)
        report = Report(plan)
        began = time.monotonic()
        async with run_links(cluster.peer_ports, cluster.listen_ports) as links:
            await asyncio.to_thread(cluster.start)
            rng = random.Random(plan.seed)
            chaos = Chaos(cluster, links, rng, disk)
            clients = ChaosClients(History(), random.Random(plan.seed + 1), cluster.nodes)
            async with clients.session():
                await _play(plan, chaos, clients, rng, report, tell)
                await _judge(cluster, chaos, clients, report, tell, _now_ms())
        report.took_s = time.monotonic() - began
    return report


async def _play(plan: Plan, chaos: Chaos, clients: ChaosClients, rng: random.Random, report: Report, tell: Callable[[str], None]) -> None:
    acts = [clients.produce] * plan.producers + [clients.work] * plan.workers
    acts += [clients.oversleep, clients.cancel, clients.read_one]
    available = chaos.available(plan.kinds)
    report.skipped = [kind for kind in plan.kinds if kind not in available]
    until = time.monotonic() + plan.minutes * 60
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(clients.forever(act, PAUSES_S[act.__name__]), name=act.__name__) for act in acts]
        running += [
            tasks.create_task(clients.forever(partial(clients.beat_worker, url), PAUSES_S["beat_worker"]), name="beat_worker")
            for url in clients.urls
            for _ in range(BEAT_WORKERS)
        ]
        running.append(tasks.create_task(clients.make_beats(), name="beats"))
        await asyncio.sleep(6)  # the first beats come due
        drawn = plan.draw(rng, available)
        while drawn and time.monotonic() < until:
            together = [drawn.pop()]
            if drawn and rng.random() < plan.overlap and _may_overlap(together[0], drawn[-1]):
                together.append(drawn.pop())
            async with asyncio.TaskGroup() as faults:
                for kind in together:
                    faults.create_task(chaos.play(kind), name=kind)
                    await asyncio.sleep(rng.uniform(0, 1))
            event = chaos.events[-1]
            took_s = (event.settled_ms - event.began_ms) / 1000
            tell(f"{len(chaos.events)}: {' with '.join(together)} {event.node} {event.detail}, whole after {took_s:.1f} s")
            await asyncio.sleep(rng.uniform(0.5, 2.5))
        await asyncio.sleep(2)
        for task in running:
            task.cancel()


async def _judge(
    cluster: ClusterProcesses, chaos: Chaos, clients: ChaosClients, report: Report, tell: Callable[[str], None], played_ms: int
) -> None:
    """Drain, look, compare."""
    tell("draining")
    await clients.drain()
    tell(f"looking at {len(clients.history.creations):,} jobs")
    told = await clients.look()
    clients.finish_beats(told)
    # What came due later had one worker, the one that drains.
    report.events, report.beats = chaos.events, [beat for beat in clients.beats.values() if beat.due_ms < played_ms]
    report.jobs, report.attempts = len(told.jobs), sum(len(found.attempts) for found in told.jobs.values())
    report.retried = sum(max(0, len(found.attempts) - 1) for found in told.jobs.values())
    report.counts, report.answers = clients.history.counts(), clients.answers
    report.reads = sum(map(len, clients.seen.values()))
    report.late_refused, report.late_accepted = clients.late_refused, clients.late_accepted
    report.faults = chaos.faults + clients.surprises
    # Leases are told by the leader's clock, and the next leader has another one.
    report.faults += check(clients.history, told, lossy=True, timed=False)
    report.undelivered = sum(
        is_undelivered(job_id, row, clients.history.claims) for job_id, found in told.jobs.items() for row in found.attempts
    )
    report.faults += check_reads(clients.seen)
    for name in cluster.names:
        status = await asyncio.to_thread(cluster.ask, name, "/status")
        if status is None or status["in_flight"] or status["ready_jobs"]["count"]:
            report.faults.append(f"depth_adds_up: after the drain {name} tells {status}")
        elif status["audit"]["repairs"]:
            report.faults.append(f"audit: {status['audit']['repairs']} repairs on {name}")
    members = await asyncio.to_thread(cluster.ask, cluster.names[0], "/v1/cluster")
    tell("stopping all nodes and comparing what they hold")
    for node in cluster.nodes.values():
        if node.is_alive:
            code, took_s = await asyncio.to_thread(node.terminate, 30.0)
            report.stop_s_max = max(report.stop_s_max, took_s)
            if code:
                report.faults.append(f"term: a node ended with code {code}: {node.log_tail(3)[-500:]}")
    report.faults += await asyncio.to_thread(lambda: list(_compare(cluster, members, report)))
    for name, node in cluster.nodes.items():
        report.faults += [f"log of {name}: {line[:500]}" for line in node.log_faults() if "disk_nearly_full" not in line]


def _compare(cluster: ClusterProcesses, members: Mapping[str, Any], report: Report) -> Iterator[str]:
    """Differences between the rows that the voters of each group hold. All nodes have ended, after a time in which nothing changed."""
    held: dict[str, dict[int, str]] = {}
    for name, node in cluster.nodes.items():
        settings = load_settings(cluster.file, environment={}, overrides={"node.id": name, "node.data_dir": str(node.data_dir)})
        store = open_store(settings, Metrics(version=__version__))
        try:
            held[name] = {group: _digest(store, group) for group in range(cluster.group_count)}
        finally:
            store.close()
    for group in members["groups"]:
        if not group["group"].isdigit():
            continue
        voters = [one["node"] for one in group["replicas"] if one["role"] == "voter"]
        report.replicas += len(voters)
        digests = {name: held[name][int(group["group"])] for name in voters}
        if len(set(digests.values())) > 1:
            yield f"replicas: those of group {group['group']} differ: {digests}"


def _digest(store: Store, group: int) -> str:
    prefix = group.to_bytes(2, "big")
    end = (group + 1).to_bytes(2, "big")
    digest = hashlib.blake2b(digest_size=8)
    for family in keys.STATE_FAMILIES:
        for key, row in store.scan(family, prefix, end, 1 << 30):
            digest.update(len(key).to_bytes(4, "big") + key + len(row).to_bytes(4, "big") + row)
    return digest.hexdigest()


@contextmanager
def _small_disk(path: Path) -> Iterator[Path | None]:
    """A file system of `DISK_BYTES`; None where this user may not make one."""
    path.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        yield None
        return
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def write_section(document: Path, lines: Sequence[str]) -> None:
    """Put the lines between the marks of a document, in place of what is there."""
    begin, end = SECTION
    text = document.read_text(encoding="utf-8")
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    if not tail:
        raise ValueError(f"{document} lacks the marks {begin} and {end}")
    document.write_text("".join((head, begin, "\n", "\n".join(lines), "\n", end, tail)), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    usual = Plan()
    parser = argparse.ArgumentParser("python -m wheelsched.testing.chaos", description="Faults against a cluster, and a check of its word.")
    parser.add_argument("--faults", type=int, default=usual.faults)
    parser.add_argument("--nodes", type=int, choices=(3, 5), default=usual.nodes)
    parser.add_argument("--seed", type=int, help="of faults and clients; a new one by default")
    parser.add_argument("--minutes", type=float, default=usual.minutes, help="no fault begins later")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of faults, by comma: %(default)s")
    parser.add_argument("--overlap", type=float, default=usual.overlap, help="share of faults that begin while another one goes on")
    parser.add_argument("--document", type=Path, help="put the report between the marks of this file, too")
    parser.add_argument("--data-dir", type=Path, help="kept, with the logs; by default removed if all is well")
    given = parser.parse_args(arguments)
    kinds = tuple(given.kinds.split(","))
    if unknown := set(kinds) - KINDS.keys():
        parser.error(f"--kinds: there is no {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    plan = Plan(given.faults, given.nodes, seed, given.minutes, kinds, given.overlap)
    directory = (given.data_dir or Path(tempfile.mkdtemp(prefix="wheelsched-chaos-"))).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        report = asyncio.run(run(plan, directory, lambda line: print(line, flush=True)))
        faults = report.faults
        print("\n".join(report.lines()))
        if given.document is not None:
            write_section(given.document, report.lines())
    except* NodeFailed as group:
        faults = [str(error) for error in group.exceptions]
        print("\n".join(faults))
    if faults:
        print(f"FAILED; everything is in {directory}. Again: python -m wheelsched.testing.chaos {plan.options()}")
        return 1
    if given.data_dir is None:
        shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
