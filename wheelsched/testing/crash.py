"""Rounds of `kill -9` under load, and a check that the node kept its word. For a node that runs as a process of its own.

    python -m wheelsched.testing.crash --rounds 200 --seed 7              # kills; --data-dir keeps the directory for a look
    python -m wheelsched.testing.crash --rounds 200 --seed 7 --cut-wal    # and each time loses a part of what was not synced
    python -m wheelsched.testing.crash --rounds 100 --seed 7 --schedules  # recurring schedules instead: crash_schedules.py

Clients create (single, in batches, with keys sent again and again, with delays, flexible), claim, heartbeat, end attempts every
way there is, abandon some, and cancel. At a random instant the node gets SIGKILL, and starts again in the same directory; now and
then it gets it while it starts. In the end workers drain the queues, and `history.check` compares what the clients know with what
the node tells. What may be cut, and how it is known: process.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

from wheelsched.store.directory import DB_NAME
from wheelsched.testing.history import Cancelling, ClaimCall, Creation, End, Handed, History, Known, SeenJob, Told, check, instant_ms
from wheelsched.testing.process import NodeFailed, NodeProcess, cut_wal

CALL_S_MAX: Final = 20.0
DRAIN_S_MAX: Final = 120.0
# The audit looks at what has been due for 5 s; it is asked to look often, and waited for once, at the end.
AUDIT_INTERVAL_S: Final = 1
AUDIT_GRACE_S: Final = 6.0
ROUND_S: Final = (0.05, 1.0)
# With schedules: long enough for several seconds' runs, and for what is decided only some time after a start.
ROUND_WITH_SCHEDULES_S: Final = (0.05, 3.5)
KILLED_AT_START: Final = 0.15  # share of rounds that also kill the node while it starts
QUEUES: Final = ("a", "b")
# What clients that make no mistakes may be told; 504 is no answer.
EXPECTED: Final = (200, 201, 202, 204, 404, 409, 503)
STILL: Final = "still"  # a queue that nobody claims from until the end: its jobs outlive every round
PAUSES_S: Final = {
    "produce": 0.02,
    "work": 0.01,
    "cancel": 0.1,
    "change": 0.1,
    "move_clock": 0.02,
}  # at most, between two acts of one client
LEASES_S: Final = (1, 2, 3)
RETRY: Final = {"max_attempts": 4, "initial_backoff_s": 0.2, "max_backoff_s": 1}


# --- clients --------------------------------------------------------------------------------------------------------------------


class Interrupted(Exception):
    """No answer came. `sent` False: the node cannot have seen the call."""

    def __init__(self, sent: bool) -> None:
        super().__init__(sent)
        self.sent = sent


class Clients:
    """Callers of one node that is away now and then: while it is, they wait for `resume`."""

    def __init__(self, history: History, rng: random.Random) -> None:
        self.history = history
        self.rng = rng
        self._url = ""
        self._up = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None
        self._call_count = 0
        self.jobs: list[str] = []  # ids of acknowledged ones, oldest first
        self.keyed: list[tuple[Creation, dict[str, Any]]] = []

    @asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=CALL_S_MAX)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as self._session:
            yield

    def resume(self, url: str) -> None:
        self._url = url
        self._up.set()

    def pause(self) -> None:
        self._up.clear()

    async def call(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
        """(status, JSON of the answer). Raises `Interrupted`."""
        assert self._session is not None
        await self._up.wait()
        try:
            async with self._session.request(method, self._url + path, json=body, headers=headers) as answer:
                raw = await answer.read()
                status, told = answer.status, json.loads(raw) if raw else None
        except aiohttp.ClientConnectorError:
            raise Interrupted(sent=False) from None
        except (aiohttp.ClientError, TimeoutError):
            raise Interrupted(sent=True) from None
        if status == 504:
            raise Interrupted(sent=True)
        if status not in EXPECTED:
            raise NodeFailed(f"{method} {path}: {status} {told}")
        return status, told

    async def read(self, path: str) -> Any:
        """The JSON of a GET that has to succeed."""
        status, answer = await self.call("GET", path)
        if status != 200:
            raise NodeFailed(f"GET {path}: {status} {answer}")
        return answer

    async def forever(self, act: Callable[[], Awaitable[None]], pause_s: float) -> None:
        while True:
            await self._up.wait()
            with suppress(Interrupted):
                await act()
            await asyncio.sleep(self.rng.uniform(0, pause_s))

    # Creating.

    def _new(self, *, keyed: bool = False) -> tuple[Creation, dict[str, Any]]:
        number = len(self.history.creations)
        rng = self.rng
        body: dict[str, Any] = {
            "queue": STILL if rng.random() < 0.05 else rng.choice(QUEUES),
            "payload": {"number": number, "filler": "x" * rng.choice((0, 10, 100, 2_000))},
            "priority": rng.choice(("critical", "default", "bulk")),
            "retry": RETRY,
        }
        if rng.random() < 0.6:
            body["delay_s"] = round(rng.uniform(0, 2), 3)
        if rng.random() < 0.2:
            body["timing"] = {"class": "flexible", "window_s": 2}
        creation = Creation(number, body["queue"], f"key-{number}" if keyed else "")
        self.history.creations[number] = creation
        return creation, body

    def _note(self, creation: Creation, status: int, answer: Any) -> None:
        if status in (200, 201):
            creation.known = Known.DONE
            creation.answered_count += 1
            creation.job_ids.add(answer["job_id"])
            self.jobs.append(answer["job_id"])
        elif creation.known is not Known.DONE and not creation.unknown_count:
            creation.known = Known.REFUSED

    @staticmethod
    def _lost(creation: Creation, cut: Interrupted) -> None:
        if cut.sent:
            creation.unknown_count += 1
            creation.known = creation.known if creation.known is Known.DONE else Known.UNKNOWN
        elif not creation.unknown_count and creation.known is not Known.DONE:
            creation.known = Known.REFUSED

    async def create(self) -> None:
        creation, body = self._new()
        try:
            status, answer = await self.call("POST", "/v1/jobs", body)
        except Interrupted as cut:
            self._lost(creation, cut)
            raise
        self._note(creation, status, answer)

    async def create_keyed(self) -> None:
        """A new key until it is answered, or one that was answered long ago once more."""
        again = self.keyed and self.rng.random() < 0.3
        creation, body = self.rng.choice(self.keyed) if again else self._new(keyed=True)
        while True:
            try:
                status, answer = await self.call("POST", "/v1/jobs", body, {"Idempotency-Key": creation.key})
            except Interrupted as cut:
                self._lost(creation, cut)
                continue
            self._note(creation, status, answer)
            if creation.known is Known.DONE:
                break
            await asyncio.sleep(0.05)
        if not again:
            self.keyed.append((creation, body))

    async def create_batch(self) -> None:
        items = [self._new() for _ in range(self.rng.randint(2, 20))]
        try:
            status, answer = await self.call("POST", "/v1/jobs:batch", {"jobs": [body for _, body in items]})
        except Interrupted as cut:
            for creation, _ in items:
                self._lost(creation, cut)
            raise
        results = answer["results"] if status == 200 else [{"status": status}] * len(items)
        for (creation, _), result in zip(items, results, strict=True):
            self._note(creation, result["status"], result.get("job"))

    async def produce(self) -> None:
        act = self.rng.choices((self.create, self.create_keyed, self.create_batch), (6, 3, 1))[0]
        await act()

    # Working.

    async def claim(self, queues: Sequence[str], *, jobs_max: int, lease_s: int, wait_s: float) -> ClaimCall:
        self._call_count += 1
        call = ClaimCall(f"w-{self._call_count}", time.monotonic())
        body = {"queues": queues, "max": jobs_max, "lease_s": lease_s, "wait_s": wait_s, "worker": call.worker}
        await self._up.wait()
        self.history.claims[call.worker] = call
        try:
            status, answer = await self.call("POST", "/v1/claims", body)
        except Interrupted as cut:
            call.known = Known.UNKNOWN if cut.sent else Known.REFUSED
            raise
        call.answered_at = time.monotonic()
        call.known = Known.DONE if status == 200 else Known.REFUSED
        for job in answer.get("jobs", ()):
            call.jobs[job["job_id"]] = Handed(
                job["job_id"], job["attempt"], job["fencing_token"], job["lease_token"], instant_ms(job["lease_expires_at"])
            )
        return call

    async def end(self, handed: Handed, worker: str, outcome: str) -> None:
        """Report an end until it is answered."""
        end = End(handed, worker, outcome)
        self.history.ends.append(end)
        path = f"/v1/attempts/{handed.token}:" + ("release" if outcome == "released" else "complete")
        body = None if outcome == "released" else {"outcome": outcome, "error": outcome}
        while True:
            try:
                status, answer = await self.call("POST", path, body)
            except Interrupted:
                continue
            if status != 503:
                break
            await asyncio.sleep(0.05)
        self._note_end(end, status, answer.get("status"))

    def _note_end(self, end: End, status: int, job_status: Any) -> None:
        # Stale, but perhaps because an answer to this very report was lost: nothing is known then.
        end.known = Known.DONE if status == 200 else Known.UNKNOWN
        end.status = str(job_status) if status == 200 else ""

    async def end_many(self, jobs: Sequence[Handed], worker: str) -> None:
        """Success for all, in one call, until it is answered."""
        ends = [End(handed, worker, "succeeded") for handed in jobs]
        self.history.ends += ends
        completions = [{"token": handed.token, "outcome": "succeeded"} for handed in jobs]
        while True:
            try:
                status, answer = await self.call("POST", "/v1/attempts:complete", {"completions": completions})
            except Interrupted:
                continue
            if status == 200 and not any(result["status"] == 503 for result in answer["results"]):
                break
            await asyncio.sleep(0.05)
        for end, result in zip(ends, answer["results"], strict=True):
            self._note_end(end, result["status"], result.get("job_status"))

    async def heartbeat(self, handed: Handed) -> None:
        status, answer = await self.call("POST", f"/v1/attempts/{handed.token}:heartbeat", {"lease_s": self.rng.choice(LEASES_S)})
        if status == 200:
            handed.lease_end_ms = instant_ms(answer["lease_expires_at"])

    async def work(self) -> None:
        """Claim some jobs and do something with each of them."""
        rng = self.rng
        jobs_max, lease_s, wait_s = rng.choice((1, 1, 3, 10)), rng.choice(LEASES_S), rng.choice((0, 0.3))
        call = await self.claim(rng.sample(QUEUES, len(QUEUES)), jobs_max=jobs_max, lease_s=lease_s, wait_s=wait_s)
        jobs = list(call.jobs.values())
        if len(jobs) > 2 and rng.random() < 0.5:
            await self.end_many(jobs, call.worker)
            return
        for handed in jobs:
            if rng.random() < 0.15:
                with suppress(Interrupted):
                    await self.heartbeat(handed)
            outcomes = ("succeeded", "retryable_failure", "fatal_failure", "released", "abandoned")
            outcome = rng.choices(outcomes, (70, 12, 5, 5, 4))[0]
            if outcome != "abandoned":
                await self.end(handed, call.worker, outcome)

    async def cancel(self) -> None:
        if not self.jobs:
            return
        cancel = Cancelling(self.rng.choice(self.jobs[-200:]))
        self.history.cancels.append(cancel)
        try:
            status, answer = await self.call("DELETE", f"/v1/jobs/{cancel.job_id}")
        except Interrupted as cut:
            cancel.known = Known.UNKNOWN if cut.sent else Known.REFUSED
            raise
        cancel.answered_at = time.monotonic()
        cancel.known = Known.DONE if status in (200, 202) else Known.REFUSED
        cancel.status = str(answer.get("status"))

    # The end.

    async def drain(self) -> None:
        """Work until every job is final."""
        give_up = time.monotonic() + DRAIN_S_MAX
        waiting = "&".join(f"status={name}" for name in ("SCHEDULED", "QUEUED", "RUNNING", "RETRYING", "CANCEL_REQUESTED"))
        while True:
            call = await self.claim((*QUEUES, STILL), jobs_max=100, lease_s=3, wait_s=0.2)
            if call.jobs:
                await self.end_many(list(call.jobs.values()), call.worker)
                continue
            left = (await self.read(f"/v1/jobs?{waiting}&limit=5"))["jobs"]
            if not left:
                return
            await self.idle()
            if time.monotonic() > give_up:
                raise NodeFailed(f"jobs that never end: {left}")

    async def idle(self) -> None:
        """Between two looks for jobs that were not due yet."""

    async def stop(self) -> None:
        """Make nothing new from now on."""

    async def judge(self, report: Report) -> list[str]:
        """Faults beyond those of the history; lines for the report."""
        return []

    async def look(self) -> Told:
        """Every job with its attempts, and the depth of every queue."""
        jobs: dict[str, Any] = {}
        cursor: str | None = ""
        while cursor is not None:
            page = await self.read("/v1/jobs?limit=1000" + (f"&cursor={cursor}" if cursor else ""))
            for job in page["jobs"]:
                if job["job_id"] in jobs:
                    raise NodeFailed(f"the listing gives {job['job_id']} twice")
                jobs[job["job_id"]] = job
            cursor = page["next_cursor"]
        seen: dict[str, SeenJob] = {}
        names = iter(list(jobs))

        async def look_closer() -> None:
            for job_id in names:
                attempts = (await self.read(f"/v1/jobs/{job_id}/attempts"))["attempts"]
                seen[job_id] = SeenJob(jobs[job_id], attempts)

        await asyncio.gather(*(look_closer() for _ in range(8)))
        queues = (await self.read("/v1/queues"))["queues"]
        depths = {queue["name"]: {status: sum(row.values()) for status, row in queue["depth"].items()} for queue in queues}
        return Told(seen, depths, (await self.read("/status"))["groups"])


# --- the run --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """`producers` and `workers`: how many of each run at once. `sync_delay_ms`: with `cut_wal`, how much longer an fsync takes, so that
    more than a row or two is under way at a kill. `schedules`: recurring ones instead of jobs; `virtual`: on a virtual clock."""

    rounds: int = 12
    seed: int = 0
    cut_wal: bool = False
    sync_delay_ms: int = 5
    producers: int = 3
    workers: int = 3
    schedules: bool = False
    virtual: bool = False

    def options(self) -> str:
        """As on the command line."""
        flags = [
            name for name, given in (("--schedules", self.schedules), ("--virtual", self.virtual), ("--cut-wal", self.cut_wal)) if given
        ]
        return " ".join([f"--rounds {self.rounds} --seed {self.seed}", *flags])


@dataclass(slots=True)
class Report:
    """What a run did and found. `faults` empty: the node kept its word."""

    plan: Plan
    kills: int = 0
    starts_killed: int = 0
    unsynced_bytes: int = 0
    cut_bytes: int = 0
    cut_rounds: int = 0
    start_s_max: float = 0.0
    took_s: float = 0.0
    jobs: int = 0
    attempts: int = 0
    sweeps: int = 0
    counts: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    more: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        plan = self.plan
        told = [
            f"{plan.rounds} rounds, seed {plan.seed}, {self.took_s:.1f} s: {self.kills} kills, {self.starts_killed} of them"
            f" while starting; slowest start {self.start_s_max:.2f} s",
        ]
        if plan.cut_wal:
            told.append(f"WAL cut in {self.cut_rounds} rounds: {self.cut_bytes:,} of {self.unsynced_bytes:,} bytes that were not synced")
        for name, (done, refused, unknown) in self.counts.items():
            told.append(f"{name:12}  {done:7,} acknowledged  {refused:6,} refused  {unknown:6,} unknown")
        told += self.more
        told.append(f"{self.jobs:,} jobs with {self.attempts:,} attempts on record, all final; {self.sweeps} audit sweeps")
        told += self.faults[:50] or ["0 lost, 0 triggered twice, 0 ends lost, tokens grow, 0 audit repairs"]
        return told


async def run(plan: Plan, directory: Path, tell: Callable[[str], None] = lambda _line: None) -> Report:
    """Play a plan in a directory that is there and empty."""
    from wheelsched.testing import crash_schedules

    notes = directory / "synced" if plan.cut_wal else None
    node = NodeProcess(
        directory / "data", settings={"scheduler.audit_interval_s": AUDIT_INTERVAL_S}, notes=notes, sync_delay_s=plan.sync_delay_ms / 1000,
        arguments=("--clock-start", crash_schedules.CLOCK_START) if plan.virtual else (),
    )  # fmt: skip
    rng = random.Random(plan.seed)
    report = Report(plan)
    history = History()
    clients_rng = random.Random(plan.seed + 1)
    clients: Clients
    if plan.schedules:
        clients = crash_schedules.ScheduleClients(history, clients_rng, virtual=plan.virtual)
        acts = [clients.change] * plan.producers + [clients.work] * plan.workers + [clients.move_clock] * plan.virtual
    else:
        clients = Clients(history, clients_rng)
        acts = [clients.produce] * plan.producers + [clients.work] * plan.workers + [clients.cancel]
    began = time.monotonic()
    try:
        async with clients.session():
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(clients.forever(act, PAUSES_S[act.__name__]), name=act.__name__) for act in acts]
                for number in range(plan.rounds):
                    await _play_round(node, clients, rng, report)
                    if (number + 1) % 10 == 0:
                        tell(f"round {number + 1}: {len(history.creations)} jobs asked for, {time.monotonic() - began:.0f} s")
                for task in running:
                    task.cancel()
            await _judge(node, clients, report)
    finally:
        node.kill()
    report.took_s = time.monotonic() - began
    return report


async def _play_round(node: NodeProcess, clients: Clients, rng: random.Random, report: Report) -> None:
    """Start, let the clients work, kill."""
    if rng.random() < KILLED_AT_START:
        node.spawn()
        await asyncio.sleep(rng.uniform(0, 0.4))
        await _kill(node, rng, report)
        report.starts_killed += 1
    await _start(node, report)
    clients.resume(node.url)
    await _check_newest(clients)
    await asyncio.sleep(rng.uniform(*(ROUND_WITH_SCHEDULES_S if report.plan.schedules else ROUND_S)))
    if not node.is_alive:
        raise NodeFailed(f"the node ended by itself with code {node.exit_code()}:\n{node.log_tail()}")
    clients.pause()
    await _kill(node, rng, report)


async def _start(node: NodeProcess, report: Report) -> None:
    began = time.monotonic()
    await asyncio.to_thread(node.start)
    report.start_s_max = max(report.start_s_max, time.monotonic() - began)


async def _kill(node: NodeProcess, rng: random.Random, report: Report) -> None:
    await asyncio.to_thread(node.kill)
    report.kills += 1
    if node.notes is not None and node.notes.exists():
        unsynced, cut = cut_wal(node.data_dir / DB_NAME, node.notes, rng)
        report.unsynced_bytes += unsynced
        report.cut_bytes += cut
        report.cut_rounds += cut > 0


async def _check_newest(clients: Clients) -> None:
    """The jobs acknowledged last, at once: a loss is easier to explain in its own round."""
    for job_id in clients.jobs[-10:]:
        with suppress(Interrupted):
            status, _ = await clients.call("GET", f"/v1/jobs/{job_id}")
            if status != 200:
                raise NodeFailed(f"never_lost: {job_id} was acknowledged before the last kill; GET answers {status}")


async def _judge(node: NodeProcess, clients: Clients, report: Report) -> None:
    """Audit, drain, look, compare."""
    await _start(node, report)
    clients.resume(node.url)
    async with _while_alive(node):
        await _judge_alive(node, clients, report)


@asynccontextmanager
async def _while_alive(node: NodeProcess) -> AsyncIterator[None]:
    """Raise NodeFailed where the node ends by itself: its callers would wait for ever."""

    async def watch() -> None:
        while node.is_alive:  # noqa: ASYNC110 - nobody tells of a process that ends
            await asyncio.sleep(0.2)
        raise NodeFailed(f"the node ended by itself:\n{node.log_tail()}")

    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch(), name="watch")
        yield
        watching.cancel()


async def _judge_alive(node: NodeProcess, clients: Clients, report: Report) -> None:
    await clients.stop()
    await asyncio.sleep(AUDIT_GRACE_S)
    swept = (await clients.read("/status"))["audit"]["sweeps"]
    while (await clients.read("/status"))["audit"]["sweeps"] < swept + 2:  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    await clients.drain()
    told = await clients.look()
    report.jobs, report.attempts = len(told.jobs), sum(len(found.attempts) for found in told.jobs.values())
    report.counts = clients.history.counts()
    report.faults = check(clients.history, told, created=not report.plan.schedules, timed=not report.plan.virtual)
    report.faults += await clients.judge(report)
    status = await clients.read("/status")
    report.sweeps = status["audit"]["sweeps"]
    if status["audit"]["repairs"]:
        report.faults.append(f"audit: {status['audit']['repairs']} repairs")
    if status["in_flight"] or status["ready_jobs"]["count"]:
        report.faults.append(f"depth_adds_up: after the drain {status['in_flight']} in flight, ready {status['ready_jobs']}")
    report.faults += [f"log: {line[:500]}" for line in node.log_faults()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m wheelsched.testing.crash", description="Kill a node under load, and check its word.")
    usual = Plan()
    parser.add_argument("--rounds", type=int, default=usual.rounds)
    parser.add_argument("--seed", type=int, help="of kills and clients; a new one by default")
    parser.add_argument("--cut-wal", action="store_true", help="after each kill, cut off a part of what was not synced")
    parser.add_argument("--sync-delay-ms", type=int, default=usual.sync_delay_ms, help="with --cut-wal: how much longer an fsync takes")
    parser.add_argument("--producers", type=int, default=usual.producers)
    parser.add_argument("--workers", type=int, default=usual.workers)
    parser.add_argument("--schedules", action="store_true", help="recurring schedules instead of jobs")
    parser.add_argument("--virtual", action="store_true", help="with --schedules: on a virtual clock")
    parser.add_argument("--data-dir", type=Path, help="kept, with the node's log beside it; by default removed if all is well")
    given = parser.parse_args(arguments)
    seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    if given.virtual and not given.schedules:
        parser.error("--virtual goes with --schedules: plain jobs are checked by the real clock")
    plan = Plan(
        given.rounds, seed, given.cut_wal, given.sync_delay_ms, given.producers, given.workers, given.schedules, given.virtual
    )  # fmt: skip
    directory = given.data_dir or Path(tempfile.mkdtemp(prefix="wheelsched-crash-"))
    directory.mkdir(parents=True, exist_ok=True)
    try:
        report = asyncio.run(run(plan, directory, lambda line: print(line, flush=True)))
        faults = report.faults
        print("\n".join(report.lines()))
    except* NodeFailed as group:
        faults = [str(error) for error in group.exceptions]
        print("\n".join(faults))
    if faults:
        print(f"FAILED; everything is in {directory}. Again: python -m wheelsched.testing.crash {plan.options()}")
        return 1
    if given.data_dir is None:
        shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    # crash_schedules.py imports this module by its name: that one is run, else there were two of each class.
    from wheelsched.testing import crash

    sys.exit(crash.main())
