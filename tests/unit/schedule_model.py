"""What becomes of each occurrence of a schedule, said as plainly as the published rules say it (`tests/vectors/README.md`).

Every whole second is looked at, and at each the six steps of "At one instant" are taken in their order. It shares nothing with the
product but those rules; what a cron expression means it asks `cron_reference.py`. `CAP` is the product's bound on what `run_all`
catches up, which the rules leave open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from cron_reference import Reference, Wall, zone_info

CAP = 100

Entry = dict[str, Any]


def seconds(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp())


def text(at: int) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def occurrences(scenario: Mapping[str, Any]) -> list[int]:
    schedule, (first, end) = scenario["schedule"], map(seconds, scenario["window"])
    if "cron" in schedule:
        wall = Wall(zone_info(schedule["time_zone"]), first // 60, end // 60 + 1)
        return [minute * 60 for minute in wall.runs(Reference(schedule["cron"])) if first <= minute * 60 < end]
    anchor, every = seconds(schedule["anchor_at"]), schedule["every_s"]
    return [at for at in range(first, end) if at >= anchor and (at - anchor) % every == 0]


@dataclass
class Going:
    at: int
    start: int
    end: int
    why: str


@dataclass
class Model:
    scenario: Mapping[str, Any]
    told: dict[int, Entry] = field(default_factory=dict)
    running: list[Going] = field(default_factory=list)
    waiting: int | None = None
    now: int = 0

    def play(self) -> list[Entry]:
        scenario = self.scenario
        self.deadline = scenario["policy"]["missed_runs"]["starting_deadline_s"]
        self.missed_policy = scenario["policy"]["missed_runs"]["policy"]
        self.overlap = scenario["policy"]["overlap"]
        self.duration = {seconds(at): duration for at, duration in scenario.get("run_s_at", {}).items()}
        every = occurrences(scenario)
        due = set(every)
        outages = [(seconds(start), seconds(end)) for start, end in scenario["down"]]
        first, end = map(seconds, scenario["window"])
        down_before, missed = False, []
        self.now = min([first, *(start for start, _ in outages)])
        last = max([end, *(stop for _, stop in outages)])
        while self.now <= last or self.running or self.waiting is not None:
            down = any(start <= self.now < stop for start, stop in outages)
            self.end_runs()  # 1
            if not down:
                self.start_waiting()  # 3
                if down_before:
                    self.recover(missed, self.now in due)  # 4
                    missed = []
                if self.now in due:
                    self.offer(self.now, "on_time")  # 5
            elif self.now in due:
                missed.append(self.now)  # 6
            down_before = down
            self.now += 1
        return [self.told[at] for at in every]

    def skip(self, at: int, why: str) -> None:
        assert at not in self.told
        self.told[at] = {"at": text(at), "do": "skip", "why": why}

    def is_too_late(self, at: int) -> bool:
        return self.deadline is not None and self.now - at > self.deadline

    def end_runs(self) -> None:
        for run in [run for run in self.running if run.end <= self.now]:
            self.finish(run, "completed")

    def finish(self, run: Going, ended: str) -> None:
        self.running.remove(run)
        assert run.at not in self.told
        self.told[run.at] = {
            "at": text(run.at), "do": "run", "start": text(run.start), "why": run.why, "end": text(self.now), "ended": ended,
        }  # fmt: skip

    def start(self, at: int, why: str) -> None:
        self.running.append(Going(at, self.now, self.now + self.duration.get(at, self.scenario["run_s"]), why))

    def start_waiting(self) -> None:
        if self.waiting is not None and not self.running:
            at, self.waiting = self.waiting, None
            if self.is_too_late(at):
                self.skip(at, "missed_deadline")
            else:
                self.start(at, "buffered")

    def recover(self, missed: list[int], falls_on_recovery: bool) -> None:
        for at in [at for at in missed if self.is_too_late(at)]:
            missed.remove(at)
            self.skip(at, "missed_deadline")
        if self.missed_policy == "skip":
            for at in missed:
                self.skip(at, "missed")
        elif self.missed_policy == "run_latest":
            offered = [] if falls_on_recovery else missed[-1:]
            for at in missed:
                if at not in offered:
                    self.skip(at, "superseded")
            for at in offered:
                self.offer(at, "catch_up")
        else:
            for at in missed[:-CAP]:
                self.skip(at, "catch_up_cap")
            for at in missed[-CAP:]:
                self.offer(at, "catch_up")

    def offer(self, at: int, why: str) -> None:
        if not self.running or self.overlap == "allow":
            self.start(at, why)
        elif self.overlap == "forbid":
            self.skip(at, "overlap")
        elif self.overlap == "replace":
            for run in list(self.running):
                if run.start == self.now:
                    self.running.remove(run)
                    self.skip(run.at, "replaced")
                else:
                    self.finish(run, "replaced")
            self.start(at, why)
        else:
            if self.waiting is not None and self.is_too_late(self.waiting):
                self.skip(self.waiting, "missed_deadline")
                self.waiting = None
            if self.waiting is None:
                self.waiting = at
            else:
                self.skip(at, "buffer_full")
