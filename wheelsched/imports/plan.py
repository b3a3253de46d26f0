"""What a reader hands over: a plan of schedules, each checked as the server would check it, and what could not be taken over."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from wheelsched.core.errors import InvalidRequest, InvalidSchedule
from wheelsched.core.limits import (
    ATTEMPTS_MAX,
    DELAY_S_MAX,
    EVERY_S_MIN,
    LABEL_KEY_LENGTH_MAX,
    LABEL_VALUE_LENGTH_MAX,
    LABELS_MAX,
    NAME_LENGTH_MAX,
    PAYLOAD_BYTES_DEFAULT,
    TIMEOUT_S_MAX,
    TIMEOUT_S_MIN,
    WINDOW_S_MAX,
)
from wheelsched.cron import Kind, Timing, ZoneData, parse, warnings
from wheelsched.imports.times import instant_text, parse_instant

NEXT_RUNS: Final = 5
NAME: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_LENGTH_MAX - 1}}}")
_DIGEST_CHARACTERS: Final = 8
_END_OF_TIME_MS: Final = 253_402_300_800_000  # 10000-01-01T00:00:00Z


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that could not be taken over, or, as a note, that the reader of the plan should know."""

    place: str
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.place}: {self.what}" + (f"; {self.remedy}" if self.remedy else "")


class Refused(Exception):
    """One entry cannot be taken over. A reader turns it into a Problem at the entry's place, or at `place`."""

    def __init__(self, what: str, remedy: str, *, place: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy
        self.place = place


@dataclass(frozen=True, slots=True)
class ImportSettings:
    """What all readers are told.

    `queue` takes the place of the source's queues, `prefix` stands before every name, `zone` is used where the source names none
    (UTC if None, with a note). `now_ms` decides which runs are next.
    """

    zones: ZoneData
    now_ms: int
    queue: str | None = None
    prefix: str = ""
    zone: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSchedule:
    """A schedule to be created. `cron` or `every_s`; `source` is the time as it was written, `source_name` what logs call it."""

    name: str
    place: str
    source: str
    source_name: str
    job_template: dict[str, Any]
    cron: str | None = None
    time_zone: str = "UTC"
    every_s: float | None = None
    anchor_at_ms: int | None = None
    missed_runs: dict[str, Any] | None = None
    overlap: str | None = None
    paused: bool = False
    start_at_ms: int | None = None
    end_at_ms: int | None = None
    jitter_s: float | None = None
    next_runs_ms: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def when(self) -> str:
        """`0 3 * * *` or `every 90 s`, for people."""
        return self.cron if self.cron is not None else f"every {self.every_s:g} s"

    def spec(self, *, shadow: bool = False) -> dict[str, Any]:
        """The body of `PUT /v1/schedules/{name}`: what differs from the server's defaults."""
        instants = {"anchor_at": self.anchor_at_ms, "start_at": self.start_at_ms, "end_at": self.end_at_ms}
        body: dict[str, Any] = {}
        if self.cron is not None:
            body |= {"cron": self.cron, "time_zone": self.time_zone}
        else:
            body["every_s"] = self.every_s
        body |= {name: instant_text(at_ms) for name, at_ms in instants.items() if at_ms is not None}
        given = {"jitter_s": self.jitter_s, "missed_runs": self.missed_runs, "overlap": self.overlap}
        body |= {name: value for name, value in given.items() if value is not None}
        if self.paused:
            body["paused"] = True
        if shadow:
            body["shadow"] = True
        return body | {"job_template": self.job_template}

    def document(self, *, shadow: bool = False) -> dict[str, Any]:
        """The schedule in a plan's JSON; `read_plan` reads it back."""
        return {
            "name": self.name,
            "place": self.place,
            "source": self.source,
            "source_name": self.source_name,
            "spec": self.spec(shadow=shadow),
            "next_runs": [instant_text(at_ms) for at_ms in self.next_runs_ms],
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a source held. `notes` are no failures: what was left out on purpose, what was assumed."""

    source: str
    schedules: tuple[PlannedSchedule, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[Problem, ...] = ()

    def document(self, *, shadow: bool = False) -> dict[str, Any]:
        def told(problem: Problem) -> dict[str, str]:
            return {"place": problem.place, "what": problem.what, "remedy": problem.remedy}

        return {
            "source": self.source,
            "schedules": [schedule.document(shadow=shadow) for schedule in self.schedules],
            "problems": [told(problem) for problem in self.problems],
            "notes": [told(note) for note in self.notes],
        }


@dataclass
class Collector:
    """Gathers what a reader finds and checks each schedule as the server would."""

    source: str
    settings: ImportSettings
    _schedules: dict[str, PlannedSchedule] = field(default_factory=dict)
    _problems: list[Problem] = field(default_factory=list)
    _notes: list[Problem] = field(default_factory=list)

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        """What is refused inside becomes a Problem at that place, and the reader goes on."""
        try:
            yield
        except Refused as refused:
            self.problem(refused.place or place, refused.what, refused.remedy)

    def problem(self, place: str, what: str, remedy: str) -> None:
        self._problems.append(Problem(place, what, remedy))

    def note(self, place: str, what: str, remedy: str = "") -> None:
        found = Problem(place, what, remedy)
        if found not in self._notes:
            self._notes.append(found)

    def zone_or_default(self, named: str | None, place: str, assumed: str) -> str:
        """The source's zone; without one the user's, or UTC with a note that says what was `assumed`."""
        if named is not None:
            return named
        if self.settings.zone is None:
            self.note(place, assumed, "give --zone if that is not so")
            return "UTC"
        return self.settings.zone

    def queue_or(self, default: str) -> str:
        return self.settings.queue if self.settings.queue is not None else default

    def full_name(self, text: str) -> str:
        """A valid name for what the source calls `text`, prefix included; another text gives another name."""
        return valid_name(text, prefix=self.settings.prefix)

    def is_taken(self, name: str) -> bool:
        return name in self._schedules

    def add(self, schedule: PlannedSchedule) -> None:
        """Check a schedule, compute its next runs and warnings, and take it into the plan. Raises Refused."""
        if not NAME.fullmatch(schedule.name):
            raise Refused(
                f"{schedule.name!r} is not a name", f"names have 1 to {NAME_LENGTH_MAX} of A-Z a-z 0-9 . _ -; give another --prefix"
            )
        taken = self._schedules.get(schedule.name)
        if taken is not None:
            raise Refused(f"the name {schedule.name} is taken by {taken.place}", "rename one of them, or import them apart with --prefix")
        _check_template(schedule.job_template)
        _check_bounds(schedule)
        self._schedules[schedule.name] = self._with_runs(schedule)

    def plan(self) -> Plan:
        return Plan(self.source, tuple(self._schedules.values()), tuple(self._problems), tuple(self._notes))

    def _with_runs(self, schedule: PlannedSchedule) -> PlannedSchedule:
        now_ms = self.settings.now_ms
        # The server counts an interval without an anchor from its start, or from when it was put.
        anchor_ms = max(now_ms, schedule.start_at_ms or 0)
        runs = tuple(timing_of(schedule, self.settings.zones, anchor_ms=anchor_ms).upcoming(now_ms, NEXT_RUNS))
        if not runs:
            raise Refused(
                f"{schedule.source} has no run after {instant_text(self.settings.now_ms)}: it ended at "
                f"{instant_text(schedule.end_at_ms or self.settings.now_ms)}",
                "nothing is left to take over; leave it out",
            )
        told = schedule.warnings
        if schedule.cron is not None:
            expression, zone = parse(schedule.cron, name=schedule.name), self.settings.zones.zone(schedule.time_zone)
            told += warnings(expression, zone, self.settings.now_ms)
        return replace(schedule, next_runs_ms=runs, warnings=told)


def timing_of(schedule: PlannedSchedule, zones: ZoneData, *, anchor_ms: int | None = None) -> Timing:
    """When the schedule runs; `anchor_ms` for an interval that has none. Refused for what the server would refuse."""
    start_ms = -1 if schedule.start_at_ms is None else schedule.start_at_ms
    # A year of five digits cannot be written.
    end_ms = _END_OF_TIME_MS if schedule.end_at_ms is None else schedule.end_at_ms
    if schedule.cron is None:
        assert schedule.every_s is not None
        anchor_ms = schedule.anchor_at_ms if schedule.anchor_at_ms is not None else anchor_ms
        assert anchor_ms is not None
        return Timing.of_interval(interval_ms(schedule.every_s), anchor_ms, start_ms, end_ms)
    try:
        return Timing.of_cron(parse(schedule.cron, name=schedule.name), zones.zone(schedule.time_zone), start_ms, end_ms)
    except InvalidSchedule as error:
        raise _refused(schedule, error) from error


def meets_clock_change(schedule: PlannedSchedule, zones: ZoneData, now_ms: int, *, fixed_only: bool = False) -> bool:
    """Whether a change of the zone's clock in the coming year meets the schedule: then sources differ in what they do.

    `fixed_only`: only if it is a fixed-time one, which our rules move or leave out once.
    """
    if schedule.cron is None:
        return False
    try:
        expression, zone = parse(schedule.cron, name=schedule.name), zones.zone(schedule.time_zone)
    except InvalidSchedule:
        return False  # `add` says so
    if fixed_only and expression.kind is not Kind.FIXED_TIME:
        return False
    return any("the clock of" in text for text in warnings(expression, zone, now_ms))


def interval_ms(every_s: float) -> int:
    every_ms = round(every_s * 1000)
    if every_ms < 1:
        raise Refused(f"an interval of {every_s:g} s is below a millisecond", "write one of at least 0.001 s")
    return every_ms


def _refused(schedule: PlannedSchedule, error: InvalidSchedule) -> Refused:
    # The parser says what is wrong, what to write, and a column, which is that of our expression.
    text = re.sub(r", column \d+$", "", error.detail)
    what, _, remedy = text.partition("; ")
    shown = schedule.source if schedule.source == schedule.cron or schedule.cron is None else f"{schedule.source} ({schedule.cron})"
    return Refused(f"{shown}: {what}", remedy or "correct it at the source, or create the schedule by hand")


def valid_name(text: str, *, prefix: str = "") -> str:
    """`prefix` and `text` if that is a name; else what is left of it and a hash, so that different texts stay different."""
    if NAME.fullmatch(prefix + text):
        return prefix + text
    return name_with_digest(text, text, prefix=prefix)


def name_with_digest(text: str, identity: str, *, prefix: str = "") -> str:
    """A name made from `text`, told apart from others by a hash of `identity`. Stable: the same arguments give the same name."""
    digest = hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_CHARACTERS // 2).hexdigest()
    length_max = NAME_LENGTH_MAX - len(prefix) - len(digest) - 1
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-._")[: max(0, length_max)].rstrip("-._")
    return f"{prefix}{slug}-{digest}" if slug else f"{prefix}{digest}"


def capped_attempts(retries: int) -> tuple[int, tuple[str, ...]]:
    """`retry.max_attempts` for so many repetitions after the first attempt, and a warning if that is above what there is."""
    if retries + 1 <= ATTEMPTS_MAX:
        return retries + 1, ()
    return ATTEMPTS_MAX, (f"{retries} retries become {ATTEMPTS_MAX} attempts, the most a job can have",)


def capped_timeout(seconds: float) -> tuple[float, tuple[str, ...]]:
    """`timeout_s`, and a warning if it is above what there is."""
    if seconds <= TIMEOUT_S_MAX:
        return seconds, ()
    return TIMEOUT_S_MAX, (f"a time limit of {seconds:g} s becomes {TIMEOUT_S_MAX} s, the longest an attempt can run",)


def whole(number: float) -> int | float:
    return int(number) if number == int(number) else number


def _check_template(template: Mapping[str, Any]) -> None:
    queue = template["queue"]
    if not NAME.fullmatch(queue):
        raise Refused(f"{queue!r} is not a name for a queue", "give one with --queue")
    try:
        size = len(json.dumps(template.get("payload"), ensure_ascii=False).encode("utf-8", "surrogatepass"))
    except RecursionError:
        raise Refused("the payload is nested too deeply", "keep such arguments elsewhere and name them") from None
    if size > PAYLOAD_BYTES_DEFAULT:
        raise Refused(f"the payload has {size} bytes, the limit is {PAYLOAD_BYTES_DEFAULT}", "keep large arguments elsewhere and name them")


def _check_bounds(schedule: PlannedSchedule) -> None:
    template = schedule.job_template
    for name, value, low, high in (
        ("every_s", schedule.every_s, EVERY_S_MIN, DELAY_S_MAX),
        ("jitter_s", schedule.jitter_s, 0, WINDOW_S_MAX),
        ("missed_runs.starting_deadline_s", (schedule.missed_runs or {}).get("starting_deadline_s"), 0, DELAY_S_MAX),
        ("timing.window_s", (template.get("timing") or {}).get("window_s"), 1, WINDOW_S_MAX),
        ("timeout_s", template.get("timeout_s"), TIMEOUT_S_MIN, TIMEOUT_S_MAX),
        ("start_deadline_s", template.get("start_deadline_s"), 0, DELAY_S_MAX),
    ):
        if value is not None and not low <= value <= high:
            raise Refused(f"{name} would be {value}, it is {low} to {high}", "change it at the source, or create the schedule by hand")


def kept_labels(labels: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The labels that a job may carry, first come first kept, and a warning naming the others."""
    kept: dict[str, str] = {}
    dropped: list[str] = []
    for key, value in labels.items():
        fits = 0 < len(key) <= LABEL_KEY_LENGTH_MAX and len(value) <= LABEL_VALUE_LENGTH_MAX and len(kept) < LABELS_MAX
        if fits:
            kept[key] = value
        else:
            dropped.append(key)
    if not dropped:
        return kept, ()
    return kept, (f"left out of the labels ({LABELS_MAX} at most, keys up to {LABEL_KEY_LENGTH_MAX} characters): {', '.join(dropped)}",)


def read_plan(text: str, place: str) -> list[PlannedSchedule]:
    """The schedules of a plan's JSON (`Plan.document`). InvalidRequest if it is none."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"{place} is not JSON ({error}); write it with `wheelsched import ... --json`") from error
    entries = document.get("schedules") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise InvalidRequest(f"{place} is not a plan: it has no list `schedules`; write it with `wheelsched import ... --json`")
    return [_planned(entry, f"{place}, schedule {number}") for number, entry in enumerate(entries, 1)]


def _planned(entry: Any, place: str) -> PlannedSchedule:
    def instant(name: str) -> int | None:
        value = spec.get(name)
        return None if value is None else parse_instant(value)

    try:
        spec = entry["spec"]
        planned = PlannedSchedule(
            name=str(entry["name"]),
            place=str(entry.get("place", place)),
            source=str(entry.get("source", "")),
            source_name=str(entry.get("source_name", entry["name"])),
            job_template=dict(spec["job_template"]),
            cron=spec.get("cron"),
            time_zone=spec.get("time_zone", "UTC"),
            every_s=spec.get("every_s"),
            anchor_at_ms=instant("anchor_at"),
            paused=bool(spec.get("paused", False)),
            start_at_ms=instant("start_at"),
            end_at_ms=instant("end_at"),
            jitter_s=spec.get("jitter_s"),
        )
        if (planned.cron is None) == (planned.every_s is None):
            raise ValueError("neither cron nor every_s, or both")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        detail = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise InvalidRequest(f"{place} is not readable ({detail}); write the plan with `wheelsched import ... --json`") from error
    return planned
