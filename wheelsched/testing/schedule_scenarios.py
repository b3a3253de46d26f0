"""Schedules, outages and run durations played on a real node, and what became of each occurrence: the vectors of `missed.jsonl`.

    PYTHONTZPATH= python -m wheelsched.testing.schedule_scenarios tests/vectors/missed.jsonl          # through the node's own methods
    python -m wheelsched.testing.schedule_scenarios --http tests/vectors/missed.jsonl                 # through the HTTP API

A scenario is the schedule, its window, when the scheduler is down, how long runs take and the policies; `tests/vectors/README.md` says
what has to come of it. A worker claims each run the instant it starts and ends it when its duration is over. At one instant runs end
first, so the clock is moved without letting the node decide (`TestNode.advance(before_deciding=...)`), the worker reports, and then
the node decides. An outage is a crash: the node starts again when it is over, runs that ended meanwhile are reported, and only then
does it decide what was missed.

`play` gives an entry for each occurrence in the form of the vectors' `expect`; whatever the node has that no occurrence accounts for
is an error, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from wheelsched.cron import Timing, ZoneData, parse
from wheelsched.model.schedules import REASONS, Cause
from wheelsched.model.states import Status
from wheelsched.node.face import ClaimedJob
from wheelsched.testing.node import TestNode

Scenario = Mapping[str, Any]
Entry = dict[str, Any]

NAME: Final = "scenario"
QUEUE: Final = "runs"
LEASE_S: Final = 43_200  # the longest the API gives
HEARTBEAT_MS: Final = 6 * 3_600_000
CAUSES: Final = tuple(cause.name.lower() for cause in Cause)
# A scenario that does not come to an end has a run that is never free, or a node that makes new ones.
STEPS_MAX: Final = 200_000


@dataclass(slots=True)
class Run:
    """A run as its worker knows it. `handle`: what the port needs to speak of it."""

    at_ms: int
    start_ms: int
    end_ms: int
    handle: Any
    ended: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """A job of the schedule as the node tells it in the end. `reason`: of a skipped one; `cause`: why it ran, as in the API."""

    at_ms: int
    status: str
    fire_at_ms: int
    cause: str
    reason: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Occurrences [from, to] that the node left out without a job."""

    from_ms: int
    to_ms: int
    count: int
    reason: str


# --- how to speak with the node -------------------------------------------------------------------------------------------------


class Port(ABC):
    """The calls of a client and of a worker, on one node."""

    def __init__(self, node: TestNode) -> None:
        self.node = node

    @abstractmethod
    async def connect(self) -> None:
        """After each start of the node."""

    @abstractmethod
    async def disconnect(self) -> None:
        """Before it goes away."""

    @abstractmethod
    async def put(self, scenario: Scenario) -> None: ...

    @abstractmethod
    async def claim(self) -> list[tuple[int, Any]]:
        """(occurrence, handle) of everything that is ready."""

    @abstractmethod
    async def end(self, handle: Any, outcome: str) -> None: ...

    @abstractmethod
    async def is_replaced(self, handle: Any) -> bool:
        """Whether the worker is asked to end; its lease lasts on."""

    @abstractmethod
    async def look(self) -> tuple[list[Seen], list[LeftOut]]: ...


class FacePort(Port):
    """The node's own methods (`NodeFace`)."""

    async def connect(self) -> None:
        pass

    async def disconnect(self) -> None:
        pass

    async def put(self, scenario: Scenario) -> None:
        schedule, policy = scenario["schedule"], scenario["policy"]
        start_ms, end_ms = map(instant_ms, scenario["window"])
        # The attempt's time-out: longer than any scenario.
        await self.node.put_schedule(
            NAME, queue=QUEUE, cron=schedule.get("cron", ""), zone=schedule.get("time_zone", "UTC"), every_s=schedule.get("every_s", 0),
            anchor_ms=instant_ms(schedule["anchor_at"]) if "anchor_at" in schedule else None, start_ms=start_ms, end_ms=end_ms,
            missed=policy["missed_runs"]["policy"], starting_deadline_s=policy["missed_runs"]["starting_deadline_s"],
            overlap=policy["overlap"], timeout_s=365 * 86_400,
        )  # fmt: skip

    async def claim(self) -> list[tuple[int, Any]]:
        claimed = await self.node.claim(QUEUE, jobs_max=100, lease_s=LEASE_S)
        return [(_occurrence(job), job) for job in claimed]

    async def end(self, handle: Any, outcome: str) -> None:
        await self.node.complete(handle, outcome)

    async def is_replaced(self, handle: Any) -> bool:
        return (await self.node.heartbeat(handle, lease_s=LEASE_S)).cancel_requested

    async def look(self) -> tuple[list[Seen], list[LeftOut]]:
        jobs, skipped = await self.node.runs(NAME)
        seen = []
        for job in jobs:
            run = job.state.run
            assert run is not None
            reason = msgspec.json.decode(job.error)["code"] if job.status is Status.SKIPPED else ""
            seen.append(Seen(run.scheduled_for_ms, job.status.name, job.state.fire_at_ms, CAUSES[run.cause], reason))
        return seen, [LeftOut(row.from_ms, row.to_ms, row.count, REASONS[row.reason]) for row in skipped]


def _occurrence(job: ClaimedJob) -> int:
    run = job.state.run
    assert run is not None
    return run.scheduled_for_ms


class HttpPort(Port):
    """What anybody sees of the node: the HTTP API."""

    def __init__(self, node: TestNode) -> None:
        super().__init__(node)
        self._session: aiohttp.ClientSession | None = None

    async def connect(self) -> None:
        self._session = aiohttp.ClientSession(base_url=self.node.url)

    async def disconnect(self) -> None:
        assert self._session is not None
        await self._session.close()

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        assert self._session is not None
        async with self._session.request(method, path, json=body) as answer:
            text = await answer.read()
            if answer.status >= 400:
                raise RuntimeError(f"{method} {path}: {answer.status} {text.decode()}")
            return json.loads(text) if text else None

    async def put(self, scenario: Scenario) -> None:
        start_at, end_at = scenario["window"]
        body = {
            **scenario["schedule"], "start_at": start_at, "end_at": end_at, **scenario["policy"],
            "job_template": {"queue": QUEUE, "timeout_s": LEASE_S},
        }  # fmt: skip
        await self._call("PUT", f"/v1/schedules/{NAME}", body)

    async def claim(self) -> list[tuple[int, Any]]:
        body = {"queues": [QUEUE], "max": 100, "lease_s": LEASE_S, "wait_s": 0, "worker": "worker-1"}
        jobs = (await self._call("POST", "/v1/claims", body))["jobs"]
        return [(instant_ms(job["scheduled_for"]), job["lease_token"]) for job in jobs]

    async def end(self, handle: Any, outcome: str) -> None:
        await self._call("POST", f"/v1/attempts/{handle}:complete", {"outcome": outcome})

    async def is_replaced(self, handle: Any) -> bool:
        answer = await self._call("POST", f"/v1/attempts/{handle}:heartbeat", {"lease_s": LEASE_S})
        return bool(answer["cancel_requested"])

    async def look(self) -> tuple[list[Seen], list[LeftOut]]:
        seen: list[Seen] = []
        left_out: list[LeftOut] = []
        cursor = ""
        while True:
            page = await self._call("GET", f"/v1/schedules/{NAME}/runs?limit=100{cursor}")
            seen += [_seen(job) for job in page["jobs"]]
            left_out += [LeftOut(instant_ms(row["from"]), instant_ms(row["to"]), row["count"], row["reason"]) for row in page["skipped"]]
            if page["next_cursor"] is None:
                return seen[::-1], left_out[::-1]
            cursor = f"&cursor={page['next_cursor']}"


def _seen(job: Mapping[str, Any]) -> Seen:
    reason = job["last_error"]["code"] if job["status"] == "SKIPPED" else ""
    return Seen(instant_ms(job["scheduled_for"]), job["status"], instant_ms(job["fire_at"]), job["trigger"], reason)


# --- playing --------------------------------------------------------------------------------------------------------------------


class ScenarioError(AssertionError):
    """The node did something that no scenario can lead to, whatever is expected of it."""


@dataclass(slots=True)
class Player:
    """One scenario on one node."""

    scenario: Scenario
    port: Port
    occurrences: list[int]
    outages: list[tuple[int, int]]
    runs: list[Run] = field(default_factory=list)

    @property
    def node(self) -> TestNode:
        return self.port.node

    async def play(self) -> list[Entry]:
        node = self.node
        await node.open()
        await self.port.connect()
        try:
            await self.port.put(self.scenario)
            outages = list(self.outages)
            for _ in range(STEPS_MAX):
                going = [run for run in self.runs if not run.ended]
                events = [at_ms for at_ms in self.occurrences if at_ms > node.now_ms] + [run.end_ms for run in going]
                events += [start_ms for start_ms, _ in outages[:1]]
                if not events:
                    break
                at_ms = min(events)
                if going:
                    at_ms = min(at_ms, node.now_ms + HEARTBEAT_MS)
                if outages and outages[0][0] <= at_ms:
                    await self._be_down(*outages.pop(0))
                else:
                    await node.advance(to=at_ms, before_deciding=self._end_runs)
                await self._start_runs()
            else:
                raise ScenarioError(f"no end after {STEPS_MAX} instants")
            entries = await self._judge(*await self.port.look())
        finally:
            await self.port.disconnect()
            await node.close()
        return entries

    async def _be_down(self, start_ms: int, end_ms: int) -> None:
        """From the first instant on nothing is decided, until the second."""
        node = self.node
        if start_ms > node.now_ms + 1:
            await node.advance(to=start_ms - 1)
            await self._start_runs()
        await self.port.disconnect()
        await node.crash()
        node.clock.advance_to(end_ms)
        await node.open(settle=False)
        await self.port.connect()
        await self._end_runs()
        await node.settle()

    async def _end_runs(self) -> None:
        """Report the runs whose end has come, oldest end first."""
        for run in sorted(self.runs, key=lambda run: run.end_ms):
            if not run.ended and run.end_ms <= self.node.now_ms:
                await self.port.end(run.handle, "succeeded")
                run.ended = "completed"

    async def _start_runs(self) -> None:
        """End what was replaced; claim what starts at this instant."""
        now_ms = self.node.now_ms
        for run in self.runs:
            if not run.ended and await self.port.is_replaced(run.handle):
                run.ended, run.end_ms = "replaced", now_ms
                await self.port.end(run.handle, "cancelled")
        while handed := await self.port.claim():
            for at_ms, handle in handed:
                self.runs.append(Run(at_ms, now_ms, now_ms + self._duration_ms(at_ms), handle))
            await self.node.settle()

    def _duration_ms(self, at_ms: int) -> int:
        given: dict[int, float] = {instant_ms(text): seconds for text, seconds in self.scenario.get("run_s_at", {}).items()}
        run_s: float = self.scenario["run_s"]
        return round(given.get(at_ms, run_s) * 1000)

    # The judgement.

    async def _judge(self, seen: Sequence[Seen], left_out: Sequence[LeftOut]) -> list[Entry]:
        entries: dict[int, Entry] = {}
        by_at = {run.at_ms: run for run in self.runs}
        if len(by_at) != len(self.runs):
            raise ScenarioError(f"one_job_per_occurrence: {len(self.runs) - len(by_at)} runs too many")
        for job in seen:
            self._note(entries, job.at_ms, self._entry(job, by_at.get(job.at_ms)))
        for row in left_out:
            inside = [at_ms for at_ms in self.occurrences if row.from_ms <= at_ms <= row.to_ms]
            if len(inside) != row.count or (inside[0], inside[-1]) != (row.from_ms, row.to_ms):
                raise ScenarioError(f"the record {row} does not cover {list(map(instant, inside))}")
            for at_ms in inside:
                self._note(entries, at_ms, {"at": instant(at_ms), "do": "skip", "why": row.reason})
        return [entries.get(at_ms) or {"at": instant(at_ms), "do": "nothing", "why": "lost"} for at_ms in self.occurrences]

    def _note(self, entries: dict[int, Entry], at_ms: int, entry: Entry) -> None:
        if at_ms not in self.occurrences:
            raise ScenarioError(f"there is no occurrence at {instant(at_ms)}: {entry}")
        if at_ms in entries:
            raise ScenarioError(f"one_job_per_occurrence: {entries[at_ms]} and {entry}")
        entries[at_ms] = entry

    def _entry(self, job: Seen, run: Run | None) -> Entry:
        at = instant(job.at_ms)
        if job.status == "SKIPPED":
            if run is not None:
                raise ScenarioError(f"skipped and run: {at}")
            return {"at": at, "do": "skip", "why": job.reason}
        if run is None:
            return {"at": at, "do": job.status, "why": "never claimed"}
        if job.fire_at_ms != run.start_ms:
            raise ScenarioError(f"the run of {at} started at {instant(run.start_ms)} and has fire_at {instant(job.fire_at_ms)}")
        wanted = {"completed": "SUCCEEDED", "replaced": "CANCELLED"}[run.ended]
        if job.status != wanted:
            raise ScenarioError(f"the run of {at} ended as {run.ended} and is {job.status}")
        start, end = instant(run.start_ms), instant(run.end_ms)
        return {"at": at, "do": "run", "start": start, "why": self._why(job, run), "end": end, "ended": run.ended}

    def _why(self, job: Seen, run: Run) -> str:
        """A run that started later than it was offered had waited in the buffer."""
        offered_ms = job.at_ms
        for start_ms, end_ms in self.outages:
            if start_ms <= job.at_ms < end_ms:
                offered_ms = end_ms
        if (offered_ms > job.at_ms) != (job.cause == "catch_up"):
            raise ScenarioError(f"the run of {instant(job.at_ms)} has the trigger {job.cause}")
        return job.cause if run.start_ms == offered_ms else "buffered"


async def play(scenario: Scenario, *, http: bool = False, zones: ZoneData | None = None, seed: int = 0) -> list[Entry]:
    """What becomes of each occurrence, in order, on a new node. Raises `ScenarioError` for what cannot be told in such entries."""
    occurrences = occurrences_of(scenario, zones or ZoneData.of_package())
    outages = merged([(instant_ms(start), instant_ms(end)) for start, end in scenario["down"]])
    first_ms = min([instant_ms(scenario["window"][0]), *(start_ms for start_ms, _ in outages)])
    node = TestNode(seed=seed, start_ms=first_ms - 1_000, serve=http)
    port = HttpPort(node) if http else FacePort(node)
    return await Player(scenario, port, occurrences, outages).play()


def occurrences_of(scenario: Scenario, zones: ZoneData) -> list[int]:
    """The instants of the schedule in the window."""
    schedule, (from_ms, to_ms) = scenario["schedule"], map(instant_ms, scenario["window"])
    if "cron" in schedule:
        timing = Timing.of_cron(parse(schedule["cron"], name=NAME), zones.zone(schedule["time_zone"]), from_ms, to_ms)
    else:
        timing = Timing.of_interval(round(schedule["every_s"] * 1000), instant_ms(schedule["anchor_at"]), from_ms, to_ms)
    found: list[int] = []
    at_ms = from_ms - 1
    while (at_ms := timing.next_after(at_ms)) >= 0:
        found.append(at_ms)
    return found


def merged(outages: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those that touch or overlap are one; empty ones are none."""
    found: list[tuple[int, int]] = []
    for start_ms, end_ms in sorted(outages):
        if start_ms >= end_ms:
            continue
        if found and start_ms <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end_ms))
        else:
            found.append((start_ms, end_ms))
    return found


def instant_ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def instant(at_ms: int) -> str:
    """As in the vectors; milliseconds where there are some."""
    at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at_ms)
    return at.isoformat(timespec="milliseconds" if at_ms % 1000 else "seconds").replace("+00:00", "Z")


def differences(expected: Sequence[Entry], seen: Sequence[Entry]) -> list[str]:
    """Line by line, what was to be and what was."""
    lines = []
    for number in range(max(len(expected), len(seen))):
        one = expected[number] if number < len(expected) else None
        other = seen[number] if number < len(seen) else None
        if one != other:
            lines += [f"    expected {json.dumps(one)}", f"    seen     {json.dumps(other)}"]
    return lines


async def check_vectors(lines: Sequence[str], *, http: bool = False, only: Sequence[str] = ()) -> int:
    """Play each vector and tell a line of it; how many differ."""
    began, count, failed = time.monotonic(), 0, 0
    zones = ZoneData.of_package()
    for line in lines:
        vector = json.loads(line)
        if only and vector["id"] not in only:
            continue
        count += 1
        try:
            told = differences(vector["expect"], await play(vector, http=http, zones=zones))
        except Exception as error:
            told = [f"    {type(error).__name__}: {error}"]
        failed += bool(told)
        print(f"{vector['id']}  {'DIFFERS' if told else 'ok     '}  {len(vector['expect']):4} occurrences  {vector.get('name', '')}")
        print("".join(f"{line}\n" for line in told), end="", flush=True)
    how = "over HTTP" if http else "in process"
    print(f"{count} vectors {how}, {count - failed} as expected, {failed} differ, {time.monotonic() - began:.1f} s")
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m wheelsched.testing.schedule_scenarios", description="Play vectors of missed occurrences.")
    parser.add_argument("file", type=Path, help="JSON Lines as tests/vectors/missed.jsonl")
    parser.add_argument("--http", action="store_true", help="speak with the node through its HTTP API")
    parser.add_argument("--only", action="append", default=[], metavar="ID", help="play this vector alone; may be given more than once")
    given = parser.parse_args(arguments)
    from wheelsched.testing.simulate_node import quiet_logs

    quiet_logs()
    lines = given.file.read_text(encoding="utf-8").splitlines()
    return 1 if asyncio.run(check_vectors(lines, http=given.http, only=given.only)) else 0


if __name__ == "__main__":
    sys.exit(main())
