"""Recurring schedules under `kill -9`: clients that change them all the time, and the account of their occurrences in the end.

    python -m wheelsched.testing.crash --schedules --rounds 100 --seed 7               # the real clock: every second, every minute
    python -m wheelsched.testing.crash --schedules --virtual --rounds 100 --seed 7     # a virtual one, moved by minutes at a time

Each schedule has its own policies and template. While nodes die, workers work off the runs, and others pause, resume and replace
schedules, run, move and cancel the waiting occurrence, start runs by hand, and delete and make anew a schedule of their own. Nothing of
it changes when a schedule runs, so at the end, all being paused, the account is simple, however many calls were never answered:

    never_lost              each instant of the schedule from its creation to the last pause has a job, or lies in a record
    one_job_per_occurrence  it has one of the two, once; records count what they cover; no job is for any other instant
    one_next_occurrence     nothing waits for a schedule that is paused, and none is left by one that was deleted
    skipped_adds_up         the schedule's own counts of what did not run are those of its jobs and records
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from wheelsched.testing.crash import QUEUES, RETRY, Clients, Interrupted, Report
from wheelsched.testing.history import History, instant_ms

SECOND_MS, MINUTE_MS = 1_000, 60_000
CLOCK_START: Final = "2026-03-07T23:58:30Z"
POLICIES: Final = ("run_latest", "run_all", "skip")
OVERLAPS: Final = ("allow", "forbid", "replace", "buffer_one")
DOOMED: Final = "doomed"
# After a start a node waits so long for reports of what ended meanwhile, before it decides an overlap with it.
DECIDED_S: Final = 3.0
ADVANCES_S: Final = (0.4, 1, 5, 20, 61, 200)


@dataclass(frozen=True, slots=True)
class Planned:
    """A schedule of the run. Its instants are the multiples of `every_ms`."""

    name: str
    every_ms: int
    body: dict[str, Any]


@dataclass(slots=True)
class Accounts:
    """What became of the occurrences of all schedules."""

    occurrences: int = 0
    ran: int = 0
    skipped: int = 0
    recorded: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def line(self) -> str:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(self.reasons.items()))
        return (
            f"{self.occurrences:,} occurrences: {self.ran:,} with a run, {self.skipped:,} skipped,"
            f" {self.recorded:,} on record without a job ({reasons})"
        )


def planned(rng: random.Random, *, virtual: bool) -> list[Planned]:
    """One for each overlap and missed-runs policy, every second and every minute; on a virtual clock every minute alone."""
    found = []
    for overlap in OVERLAPS:
        for missed in POLICIES:
            for every_ms in (MINUTE_MS,) if virtual else (SECOND_MS, MINUTE_MS):
                timing = {"cron": "* * * * *"} if every_ms == MINUTE_MS else {"every_s": 1, "anchor_at": "2026-01-01T00:00:00Z"}
                missed_runs: dict[str, Any] = {"policy": missed}
                if rng.random() < 0.25:
                    missed_runs["starting_deadline_s"] = rng.choice((0, 2, 30))
                body = {
                    **timing, "overlap": overlap, "missed_runs": missed_runs,
                    "job_template": {"queue": rng.choice(QUEUES), "retry": RETRY, "payload": {"filler": "x" * rng.choice((0, 500))}},
                }  # fmt: skip
                found.append(Planned(f"{overlap}-{missed}-{every_ms // 1000}s", every_ms, body))
    return found


class ScheduleClients(Clients):
    """Callers that have schedules instead of jobs."""

    def __init__(self, history: History, rng: random.Random, *, virtual: bool) -> None:
        super().__init__(history, rng)
        self.virtual = virtual
        self.schedules = planned(rng, virtual=virtual)
        self.accounts = Accounts()
        self.change_counts: Counter[str] = Counter()
        self._made = False
        # A virtual clock begins again at the last instant it was moved to, and rows are dated by the latest that was ever seen.
        self._paused_ms = 0

    async def until_answered(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        while True:
            with suppress(Interrupted):
                status, answer = await self.call(method, path, body)
                if status != 503:
                    return status, answer
            await asyncio.sleep(0.02)

    async def make_schedules(self) -> None:
        """Once; the same body again changes nothing."""
        if not self._made:
            for schedule in self.schedules:
                await self.until_answered("PUT", f"/v1/schedules/{schedule.name}", schedule.body)
            self._made = True

    # Changes, each of which may stay unanswered.

    async def change(self) -> None:
        await self.make_schedules()
        acts = (self.touch_waiting, self.pause_and_resume, self.replace, self.start, self.delete_and_make)
        act = self.rng.choices(acts, (2, 3, 2, 2, 1))[0]
        await act(self.rng.choice(self.schedules))
        self.change_counts[act.__name__] += 1

    async def touch_waiting(self, schedule: Planned) -> None:
        """Cancel, run or move the occurrence that waits: its successor has to stand."""
        status, page = await self.call("GET", f"/v1/schedules/{schedule.name}/runs?limit=1")
        if status != 200 or not page["jobs"]:
            return
        path = f"/v1/jobs/{page['jobs'][0]['job_id']}"
        method, path, body = self.rng.choice(
            (("DELETE", path, None), ("POST", path + ":run", None), ("PATCH", path, {"delay_s": self.rng.choice((0, 0.5, 2))}))
        )
        await self.call(method, path, body)

    async def pause_and_resume(self, schedule: Planned) -> None:
        await self.call("POST", f"/v1/schedules/{schedule.name}:pause")
        await asyncio.sleep(self.rng.choice((0, 0.3, 1.5)))
        await self.call("POST", f"/v1/schedules/{schedule.name}:resume")

    async def replace(self, schedule: Planned) -> None:
        """Another template, another policy; the same instants."""
        template = schedule.body["job_template"] | {"priority": self.rng.choice(("critical", "default", "bulk"))}
        body = {"job_template": template, "overlap": self.rng.choice(OVERLAPS)}
        await self.call("PATCH", f"/v1/schedules/{schedule.name}", body)

    async def start(self, schedule: Planned) -> None:
        await self.call("POST", f"/v1/schedules/{schedule.name}/runs", {"delay_s": self.rng.choice((0, 0, 0.5))})

    async def delete_and_make(self, _schedule: Planned) -> None:
        """B-046: of a schedule that is gone nothing waits."""
        await self.call("PUT", f"/v1/schedules/{DOOMED}", self.schedules[0].body)
        await self.call("DELETE", f"/v1/schedules/{DOOMED}")

    async def move_clock(self) -> None:
        await self.make_schedules()
        await self.call("POST", "/v1/clock:advance", {"by_s": self.rng.choice(ADVANCES_S)})

    # The end.

    async def stop(self) -> None:
        """Let all go on, so that what pauses left out is recorded, then pause all; delete the doomed one."""
        await self.make_schedules()
        for schedule in self.schedules:
            await self.until_answered("POST", f"/v1/schedules/{schedule.name}:resume")
        if self.virtual:
            _, answer = await self.until_answered("POST", "/v1/clock:advance", {"by_s": 90})
            self._paused_ms = instant_ms(answer["now"])
        else:
            await asyncio.sleep(DECIDED_S)
        for schedule in self.schedules:
            await self.until_answered("POST", f"/v1/schedules/{schedule.name}:pause")
        await self.until_answered("DELETE", f"/v1/schedules/{DOOMED}")

    async def idle(self) -> None:
        """Retries and runs that were moved are waited for; on a virtual clock somebody has to move it."""
        if self.virtual:
            await self.until_answered("POST", "/v1/clock:advance", {"by_s": 2})

    async def judge(self, report: Report) -> list[str]:
        faults = await self._check_schedules()
        acts = ", ".join(f"{name} {count:,}" for name, count in sorted(self.change_counts.items()))
        report.more += [self.accounts.line(), f"answered changes: {acts}"]
        return faults

    async def _check_schedules(self) -> list[str]:
        faults: list[str] = []
        for schedule in self.schedules:
            told = await self.read(f"/v1/schedules/{schedule.name}")
            jobs: list[Any] = []
            records: list[Any] = []
            cursor: str | None = ""
            while cursor is not None:
                page = await self.read(f"/v1/schedules/{schedule.name}/runs?limit=1000" + (f"&cursor={cursor}" if cursor else ""))
                jobs += page["jobs"]
                records += page["skipped"]
                cursor = page["next_cursor"]
            faults += self._check(schedule, told, jobs, records)
        doomed = (await self.read(f"/v1/jobs?schedule={DOOMED}&status=SCHEDULED&limit=5"))["jobs"]
        faults += [f"one_next_occurrence: {job['job_id']} waits for a schedule that was deleted" for job in doomed]
        return faults

    def _check(self, schedule: Planned, told: Any, jobs: list[Any], records: list[Any]) -> Iterator[str]:
        name, every_ms = schedule.name, schedule.every_ms
        if not told["paused"] or told["next_runs"]:
            yield f"one_next_occurrence: {name} is not paused, or has next runs: {json.dumps(told)}"
        created_ms, paused_ms = instant_ms(told["created_at"]), self._paused_ms or instant_ms(told["updated_at"])
        found: Counter[int] = Counter()
        reasons: Counter[str] = Counter()
        for job in jobs:
            if "scheduled_for" in job:
                found[instant_ms(job["scheduled_for"])] += 1
            if job["status"] == "SKIPPED":
                reasons[job["last_error"]["code"]] += 1
        skipped = sum(job["status"] == "SKIPPED" and "scheduled_for" in job for job in jobs)
        self.accounts.skipped += skipped
        self.accounts.ran += len(found) - skipped
        for record in records:
            covered = range(instant_ms(record["from"]), instant_ms(record["to"]) + 1, every_ms)
            found.update(covered)
            reasons[record["reason"]] += record["count"]
            self.accounts.recorded += len(covered)
            if len(covered) != record["count"]:
                yield f"one_job_per_occurrence: {name} has a record that counts {record['count']} and covers {len(covered)}: {record}"
        # Some may have been run, moved or cancelled before their time, one after the other.
        last_ms = max([paused_ms, *found])
        wanted = range(created_ms // every_ms * every_ms + every_ms, last_ms + 1, every_ms)
        self.accounts.occurrences += len(wanted)
        self.accounts.reasons += reasons
        yield from self._compare(name, wanted, found)
        if told["skipped"] != dict(reasons):
            yield f"skipped_adds_up: {name} tells {told['skipped']}, its jobs and records {dict(reasons)}"

    @staticmethod
    def _compare(name: str, wanted: range, found: Counter[int]) -> Iterator[str]:
        missing = [at_ms for at_ms in wanted if not found[at_ms]]
        twice = [at_ms for at_ms, count in found.items() if count > 1]
        foreign = [at_ms for at_ms, count in found.items() if count and at_ms not in wanted]
        if missing:
            yield f"never_lost: {name} has nothing of {len(missing)} occurrences, the first {missing[0]} of {wanted}"
        if twice:
            yield f"one_job_per_occurrence: {name} has {len(twice)} occurrences twice, the first {twice[0]}"
        if foreign:
            yield f"one_job_per_occurrence: {name} has {len(foreign)} that are none of its instants, the first {foreign[0]} of {wanted}"
