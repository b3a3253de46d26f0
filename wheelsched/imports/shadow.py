"""Shadow mode's question: had the plan fired, would it have run what the old scheduler ran?"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from wheelsched.core.errors import InvalidRequest
from wheelsched.cron import ZoneData
from wheelsched.imports.logs import LogEntry
from wheelsched.imports.plan import PlannedSchedule, Refused, interval_ms, timing_of
from wheelsched.imports.times import instant_text

# A schedule of every minute has half a million runs a year; so many take 10 seconds and 100 MB.
RUNS_MAX: Final = 1_000_000
# Schedulers are late, hardly ever early: what an unsynchronised clock explains. With a window as wide before a run as after it, a
# run that was not planned would stand for the next one that was, whose entry for the one after it, and the last be told as extra.
EARLY_MS_MAX: Final = 5_000


@dataclass(frozen=True, slots=True)
class PlannedRuns:
    """The nominal instants at which a schedule would have fired, and what logs may call it.

    `slack_ms`: how much later than its instant a run may start by design (jitter, a flexible window). `user`: only this user's lines
    count, where a log has users.
    """

    name: str
    keys: frozenset[str]
    runs_ms: tuple[int, ...]
    slack_ms: int = 0
    user: str | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """One schedule against the log: how many runs both have, and which only one of them. `offset_ms_max`: the latest match."""

    name: str
    matched: int
    missing_ms: tuple[int, ...]
    extra_ms: tuple[int, ...]
    offset_ms_max: int = 0

    @property
    def agrees(self) -> bool:
        return not self.missing_ms and not self.extra_ms

    def document(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "matched": self.matched,
            "missing": [instant_text(at_ms) for at_ms in self.missing_ms],
            "extra": [instant_text(at_ms) for at_ms in self.extra_ms],
            "offset_s_max": self.offset_ms_max / 1000,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """`unplanned`: names of the log that no schedule answers to, with how often they ran."""

    from_ms: int
    to_ms: int
    differences: tuple[Difference, ...]
    unplanned: Mapping[str, int]

    @property
    def agrees(self) -> bool:
        return all(difference.agrees for difference in self.differences)

    def document(self) -> dict[str, Any]:
        return {
            "from": instant_text(self.from_ms),
            "to": instant_text(self.to_ms),
            "agrees": self.agrees,
            "schedules": [difference.document() for difference in self.differences],
            "unplanned": [{"name": name, "count": count} for name, count in self.unplanned.items()],
        }


def planned_runs(
    schedules: Iterable[PlannedSchedule],
    entries: Sequence[LogEntry],
    zones: ZoneData,
    *,
    from_ms: int,
    to_ms: int,
    tolerance_ms: int,
) -> list[PlannedRuns]:
    """When each schedule would have fired in `[from_ms, to_ms)` and one tolerance around it.

    An interval without an anchor starts at the import, so its phase is taken from its first run in the log. InvalidRequest for more
    than `RUNS_MAX` runs.
    """
    found = []
    left = RUNS_MAX
    first_ms: dict[str, int] = {}
    for entry in entries:
        first_ms.setdefault(entry.name, entry.at_ms)
    for schedule in schedules:
        keys = frozenset((schedule.name, schedule.source_name, " ".join(schedule.source_name.split())))
        window_s = (schedule.job_template.get("timing") or {}).get("window_s", 0)
        slack_ms = round(((schedule.jitter_s or 0) + window_s) * 1000)
        begin_ms = max(0, from_ms - tolerance_ms - slack_ms)
        try:
            runs = _runs(schedule, keys, first_ms, zones, begin_ms, to_ms + tolerance_ms, left)
        except Refused as refused:
            raise InvalidRequest(f"{schedule.name}: {refused.what}; {refused.remedy}") from refused
        left -= len(runs)
        payload = schedule.job_template.get("payload")
        user = payload.get("user") if isinstance(payload, dict) else None
        found.append(PlannedRuns(schedule.name, keys, runs, slack_ms, user if isinstance(user, str) else None))
    return found


def _runs(
    schedule: PlannedSchedule, keys: frozenset[str], first_ms: Mapping[str, int], zones: ZoneData, from_ms: int, to_ms: int, left: int
) -> tuple[int, ...]:  # fmt: skip
    anchor_ms = None
    if schedule.every_s is not None and schedule.anchor_at_ms is None:
        seen = [first_ms[key] for key in keys if key in first_ms]
        if not seen:
            return ()
        # The same phase, from the beginning of the range.
        every_ms = interval_ms(schedule.every_s)
        anchor_ms = min(seen) - max(0, min(seen) - from_ms) // every_ms * every_ms
    timing = timing_of(schedule, zones, anchor_ms=anchor_ms)
    if schedule.paused:
        return ()
    if timing.count(from_ms, to_ms) > left:
        raise InvalidRequest(f"more than {RUNS_MAX} runs between {instant_text(from_ms)} and {instant_text(to_ms)}; narrow the range")
    runs = []
    at_ms = from_ms - 1
    while 0 <= (at_ms := timing.next_after(at_ms)) < to_ms:
        runs.append(at_ms)
    return tuple(runs)


@dataclass(frozen=True, slots=True)
class Stretch:
    """What a node recorded of a schedule: `count` runs, the first and the last of them."""

    from_ms: int
    to_ms: int
    count: int


def recorded_runs(planned: PlannedRuns, stretches: Iterable[Stretch], *, from_ms: int, to_ms: int) -> PlannedRuns:
    """The runs that a node recorded, by what it wrote down (the ends of each stretch and how many) and the plan (those between).

    `planned` is complete in `[from_ms, to_ms)`, stretches that lie in it are checked: InvalidRequest if node and plan disagree.
    """
    found: set[int] = set()
    for stretch in stretches:
        first, last = bisect_left(planned.runs_ms, stretch.from_ms), bisect_right(planned.runs_ms, stretch.to_ms)
        ends = {at_ms for at_ms in (stretch.from_ms, stretch.to_ms) if from_ms <= at_ms < to_ms}
        runs = {*planned.runs_ms[first:last]}
        if not ends <= runs or (len(ends) == len({stretch.from_ms, stretch.to_ms}) and len(runs) != stretch.count):
            raise InvalidRequest(
                f"{planned.name}: the node recorded {stretch.count} runs from {instant_text(stretch.from_ms)} to "
                f"{instant_text(stretch.to_ms)}, the plan has {len(runs)} there; the schedule is not as the plan says, import it again"
            )
        found |= runs
    return replace(planned, runs_ms=tuple(sorted(found)))


def compare(
    planned: Sequence[PlannedRuns], entries: Iterable[LogEntry], *, from_ms: int, to_ms: int, tolerance_ms: int
) -> Comparison:  # fmt: skip
    """Match runs with log entries, each at most once, as many as can be. O(n log n).

    An entry belongs to a run if it is less than `tolerance_ms` later, or earlier by at most that and `EARLY_MS_MAX`.

    `planned` should reach one tolerance beyond `[from_ms, to_ms)`: an entry near the edge may belong to a run outside. Only runs and
    entries inside are counted. Schedules that answer to the same name (one command at two times of a crontab) share its entries; what
    is extra is told of the first of them.
    """
    by_key: dict[str, list[int]] = defaultdict(list)
    for index, schedule in enumerate(planned):
        for key in schedule.keys:
            by_key[key].append(index)
    pools: dict[tuple[int, ...], list[int]] = defaultdict(list)
    unplanned: Counter[str] = Counter()
    for entry in entries:
        answering = tuple(index for index in by_key.get(entry.name, ()) if _is_users(planned[index], entry))
        if answering:
            pools[answering].append(entry.at_ms)
        elif from_ms <= entry.at_ms < to_ms:
            unplanned[entry.name] += 1
    outcomes = [_Outcome() for _ in planned]
    for group in _groups(pools, len(planned)):
        times = sorted(at_ms for indexes, found in pools.items() if indexes[0] in group for at_ms in found)
        _match([(planned[index], outcomes[index]) for index in sorted(group)], times, from_ms, to_ms, tolerance_ms)
    return Comparison(
        from_ms,
        to_ms,
        tuple(
            Difference(schedule.name, outcome.matched, tuple(outcome.missing_ms), tuple(outcome.extra_ms), outcome.offset_ms_max)
            for schedule, outcome in zip(planned, outcomes, strict=True)
        ),
        dict(sorted(unplanned.items())),
    )


@dataclass
class _Outcome:
    matched: int = 0
    missing_ms: list[int] = field(default_factory=list)
    extra_ms: list[int] = field(default_factory=list)
    offset_ms_max: int = 0


def _is_users(schedule: PlannedRuns, entry: LogEntry) -> bool:
    return schedule.user is None or entry.user is None or schedule.user == entry.user


def _groups(pools: Iterable[tuple[int, ...]], count: int) -> list[set[int]]:
    """The schedules that share entries, together; the others alone."""
    group_of = {index: {index} for index in range(count)}
    for indexes in pools:
        joined = set().union(*(group_of[index] for index in indexes))
        for index in joined:
            group_of[index] = joined
    return list({min(group): group for group in group_of.values()}.values())


def _match(members: Sequence[tuple[PlannedRuns, _Outcome]], times: list[int], from_ms: int, to_ms: int, tolerance_ms: int) -> None:
    """Each run, by the end of the time in which it may start, takes the earliest entry left: that matches as many as can be."""
    runs = sorted((at_ms + schedule.slack_ms, at_ms, number) for number, (schedule, _) in enumerate(members) for at_ms in schedule.runs_ms)
    # Entries taken are skipped over by following `following` to the next one left (with the path halved on the way).
    following = list(range(len(times) + 1))

    def left_from(index: int) -> int:
        while following[index] != index:
            following[index] = following[following[index]]
            index = following[index]
        return index

    for end_ms, at_ms, number in runs:
        outcome = members[number][1]
        index = left_from(bisect_left(times, at_ms - min(tolerance_ms, EARLY_MS_MAX)))
        inside = from_ms <= at_ms < to_ms
        if index < bisect_left(times, end_ms + max(tolerance_ms, 1)):
            following[index] = index + 1
            if inside:
                outcome.matched += 1
                outcome.offset_ms_max = max(outcome.offset_ms_max, abs(times[index] - at_ms))
        elif inside:
            outcome.missing_ms.append(at_ms)
    first = members[0][1]
    first.extra_ms += [at_ms for index, at_ms in enumerate(times) if following[index] == index and from_ms <= at_ms < to_ms]
