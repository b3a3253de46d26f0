"""AWS EventBridge: schedules of EventBridge Scheduler (`aws scheduler get-schedule`) and rules with a schedule
(`aws events list-rules`, `describe-rule`), as the JSON that the AWS CLI prints.

Its cron has six fields, counts weekdays from Sunday = 1, and one of the two day fields is `?`. Its years become `start_at` and
`end_at`. What is sent to a target becomes the payload: `{"target": ARN, "input": …}`, for a handler that does what the target did.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from wheelsched.core.errors import InvalidSchedule
from wheelsched.core.limits import WINDOW_S_MAX
from wheelsched.cron import Zone
from wheelsched.imports.documents import Members, json_documents, shown
from wheelsched.imports.fields import DAY, FIELDS, REWRITE, WEEKDAY, WEEKDAYS, FieldKind, Item, items_of, spread, written
from wheelsched.imports.plan import (
    Collector,
    ImportSettings,
    Plan,
    PlannedSchedule,
    Refused,
    capped_attempts,
    meets_clock_change,
    valid_name,
)
from wheelsched.imports.times import instant_text, parse_instant, year_start_ms

DEFAULT_QUEUE: Final = "eventbridge"
_EXPRESSION: Final = re.compile(r"\s*(?P<kind>cron|rate|at)\s*\((?P<inside>.*)\)\s*", re.DOTALL)
_RATE: Final = re.compile(r"\s*(?P<count>\d+)\s+(?P<unit>minute|hour|day)s?\s*")
_UNITS_S: Final = {"minute": 60, "hour": 3_600, "day": 86_400}
_DAY_RULE: Final = re.compile(r"LW|L(?:-\d{1,2})?|\d{1,2}W", re.IGNORECASE)
_WEEKDAY_RULE: Final = re.compile(r"(?P<day>[1-7]|[A-Za-z]{3})(?P<rule>L|#[1-5])", re.IGNORECASE)
_YEARS: Final = range(1970, 2200)
_EVENT_AGE_S_DEFAULT: Final = 86_400


def read_eventbridge(text: str, settings: ImportSettings) -> Plan:
    """The plan of all schedules in a JSON text, also of several documents one after the other. InvalidRequest if it is no JSON."""
    collector = Collector("eventbridge", settings)
    for line, document in json_documents(text):
        for place, found in _found(document, f"line {line}"):
            with collector.at(place):
                item = Members.of(found, "")
                named = f"{place} ({item.get('Name')})" if item.get("Name") else place
                with collector.at(named):
                    _add(collector, named, item)
    return collector.plan()


def _found(document: Any, place: str) -> Iterator[tuple[str, Any]]:
    """The schedules and rules of a document: a list's, or itself."""
    if isinstance(document, list):
        for number, one in enumerate(document, 1):
            yield from _found(one, f"{place}, item {number}")
        return
    if isinstance(document, dict):
        for key in ("Schedules", "Rules"):
            if isinstance(document.get(key), list):
                yield from ((f"{place}, {key}[{number}]", one) for number, one in enumerate(document[key]))
                return
    yield place, document


def _add(collector: Collector, place: str, item: Members) -> None:
    name = item.needed_text("Name")
    expression = item.text("ScheduleExpression")
    if item.get("ManagedBy") is not None:
        collector.note(place, f"left out: the rule is managed by {item.get('ManagedBy')}")
        return
    is_rule = "Target" not in item.value and "FlexibleTimeWindow" not in item.value
    if not expression:
        if item.get("EventPattern") is not None:
            collector.note(place, "left out: a rule on events has no schedule")
            return
        group = item.text("GroupName") or "default"
        raise Refused(
            "ScheduleExpression is missing, list-schedules does not give it",
            f"import the output of: aws scheduler get-schedule --name {name} --group-name {group}",
        )
    if item.get("EventPattern") is not None:
        raise Refused("it has a schedule and an EventPattern", "take the events over by another way, and import the schedule alone")
    targets = [Members.of(target, f"Targets[{number}]") for number, target in enumerate(item.items("Targets"))]
    if item.get("Target") is not None:
        targets = [item.members("Target")]
    for number, target in enumerate(targets or [None]):
        suffix = f".{target.text('Id') or number + 1}" if target is not None and len(targets) > 1 else ""
        with collector.at(f"{place}, target {number + 1}" if suffix else place):
            collector.add(_planned(collector, place, item, name + suffix, expression, target, is_rule=is_rule))


def _planned(
    collector: Collector, place: str, item: Members, name: str, expression: str, target: Members | None, *, is_rule: bool
) -> PlannedSchedule:  # fmt: skip
    zone = _zone(collector, item)
    warnings: list[str] = []
    start_ms, end_ms = _instant(item, "StartDate"), _instant(item, "EndDate")
    timing = _timing(expression, zone, warnings)
    if timing.start_ms is not None:
        start_ms = max(timing.start_ms, start_ms if start_ms is not None else timing.start_ms)
    if timing.end_ms is not None:
        end_ms = min(timing.end_ms, end_ms if end_ms is not None else timing.end_ms)
    anchor_ms = None
    if timing.every_s is not None:
        anchor_ms = start_ms if start_ms is not None else _instant(item, "CreationDate")
        since = "from the import" if anchor_ms is None else f"from {instant_text(anchor_ms)}"
        warnings.append(f"the interval counts {since}; AWS does not say at which second its own does")
    if item.text("ActionAfterCompletion") == "DELETE":
        warnings.append("ActionAfterCompletion DELETE is left out: a schedule whose end has come stays, and does nothing")
    group = item.text("GroupName") if not is_rule else item.text("EventBusName")
    full = f"{group}.{name}" if group and group != "default" else name
    state = item.text("State") or "ENABLED"
    if not state.startswith(("ENABLED", "DISABLED")):
        raise Refused(f"State is {state!r}", "it is ENABLED or DISABLED")
    planned = PlannedSchedule(
        name=collector.full_name(full),
        place=place,
        source=expression,
        source_name=f"{group}/{name}" if group and group != "default" else name,
        cron=timing.cron,
        every_s=timing.every_s,
        anchor_at_ms=anchor_ms,
        time_zone=zone.name,
        job_template=_template(collector, item, name, target, warnings),
        paused=state.startswith("DISABLED"),
        start_at_ms=start_ms,
        end_at_ms=end_ms,
        warnings=tuple(warnings),
    )
    if meets_clock_change(planned, collector.settings.zones, collector.settings.now_ms):
        told = "EventBridge skips a time that a clock change leaves out and runs one that comes twice once; compare with what happens here"
        return replace(planned, warnings=(*planned.warnings, told))
    return planned


def _zone(collector: Collector, item: Members) -> Zone:
    """Rules and schedules that name no zone are in UTC, whatever the user's default."""
    named = item.text("ScheduleExpressionTimezone") or "UTC"
    try:
        return collector.settings.zones.zone(named)
    except InvalidSchedule as error:
        what, _, remedy = error.detail.partition("; ")
        raise Refused(f"ScheduleExpressionTimezone: {what}", remedy or REWRITE) from error


def _instant(item: Members, name: str) -> int | None:
    """An instant as the AWS CLI writes it: ISO 8601, or seconds since 1970 (version 1)."""
    value = item.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return int(value * 1000)
    text = item.text(name)
    if text is None:
        return None
    try:
        return parse_instant(text)
    except (ValueError, OverflowError):
        raise Refused(f"{name} is {text!r}, not an instant with an offset", "export it again with the AWS CLI") from None


@dataclass(frozen=True, slots=True)
class Timing:
    """What an expression says: `cron` or `every_s`, and the bounds that its years are."""

    cron: str | None = None
    every_s: int | None = None
    start_ms: int | None = None
    end_ms: int | None = None


def _timing(expression: str, zone: Zone, warnings: list[str]) -> Timing:
    match = _EXPRESSION.fullmatch(expression)
    if match is None:
        raise Refused(f"ScheduleExpression {shown(expression)} is not one", "there are cron(...), rate(...) and at(...)")
    inside = match["inside"]
    if match["kind"] == "at":
        raise _once(inside.strip(), zone)
    if match["kind"] == "rate":
        rate = _RATE.fullmatch(inside)
        if rate is None or int(rate["count"]) < 1:
            raise Refused(f"rate({inside}) is not a rate", "write a number of at least 1 and minutes, hours or days")
        return Timing(every_s=int(rate["count"]) * _UNITS_S[rate["unit"]])
    cron, years = translate(inside, warnings)
    start_ms, end_ms = _bounds(years, zone)
    return Timing(cron=cron, start_ms=start_ms, end_ms=end_ms)


def _once(text: str, zone: Zone) -> Refused:
    try:
        at = instant_text(parse_instant(text, zone))
    except (ValueError, OverflowError):
        return Refused(f"at({text}) runs once, at a time that is not one", REWRITE)
    return Refused(f"at({text}) runs once", f"create a job: wheelsched jobs create QUEUE --at {at}")


def translate(text: str, warnings: list[str]) -> tuple[str, str]:
    """(our five fields, the year field) of what stands within `cron(...)`. Refused for what EventBridge refuses itself."""
    parts = text.split()
    if len(parts) != 6:
        raise Refused(f"cron({text}) has {len(parts)} of six fields", "write minute, hour, day, month, weekday and year")
    *fields, year = parts
    if "?" not in (fields[2], fields[4]):
        raise Refused(f"cron({text}) has neither day field '?'", "EventBridge takes one of them only; write ? in the other")
    if fields[2] == fields[4]:
        fields[2] = "*"  # `?` in both is refused there; every day is all that it can mean
    return " ".join(_field(kind, field, warnings) for kind, field in zip(FIELDS, fields, strict=True)), year


def _field(kind: FieldKind, text: str, warnings: list[str]) -> str:
    if text in ("*", "?"):
        # The other day field decides alone: in ours both must match if one begins with `*`.
        if text == "?" and kind not in (DAY, WEEKDAY):
            raise Refused(f"{kind.name} is '?', which the day fields alone may be", "write *")
        return "*"
    return ",".join(_item(kind, item, warnings) for item in items_of_rules(kind, text))


def items_of_rules(kind: FieldKind, text: str) -> list[Item]:
    """The items of a field; a rule such as `L-3` or `6#2` is an item whose `first` is all of it."""
    found = []
    for part in text.split(","):
        rules = _DAY_RULE if kind is DAY else _WEEKDAY_RULE if kind is WEEKDAY else None
        is_rule = rules is not None and (part.upper() == "L" or rules.fullmatch(part))
        found += [Item(part, part, None, None)] if is_rule else items_of(kind, part, "EventBridge")
    return found


def _item(kind: FieldKind, item: Item, warnings: list[str]) -> str:
    text = item.text.upper()
    if kind is DAY and _DAY_RULE.fullmatch(text):
        if text.endswith("W") and text != "LW" and int(text[:-1]) > 28:
            warnings.append(f"{text} has no day in shorter months here; what EventBridge does then is not documented")
        return text
    if kind is WEEKDAY and text == "L":
        warnings.append("day of week L is the last day of the week, Saturday")
        return WEEKDAYS[6]
    if kind is WEEKDAY and (rule := _WEEKDAY_RULE.fullmatch(text)):
        return f"{WEEKDAYS[_number(kind, rule['day'], item)]}{rule['rule']}"
    step = _step(kind, item)
    suffix = f"/{item.step}" if item.step is not None else ""
    if item.first == "*":
        if item.last is not None:
            raise Refused(f"{kind.name} {item.text!r} is not a range", REWRITE)
        return f"*{suffix}"
    first = _number(kind, item.first, item)
    if item.last is None:
        return f"{kind.text(first)}{suffix}"
    last = _number(kind, item.last, item)
    if first <= last:
        return f"{kind.text(first)}-{kind.text(last)}{suffix}"
    if kind is not WEEKDAY:
        raise Refused(f"{kind.name} {item.text!r} runs backwards", f"write {first}-{kind.high},{kind.low}-{last}")
    return written(kind, spread(kind, first, last, step))


def _number(kind: FieldKind, text: str, item: Item) -> int:
    """A value in our numbering: EventBridge's Sunday is 1."""
    if text.upper() in kind.names:
        return kind.names[text.upper()]
    shift = 1 if kind is WEEKDAY else 0
    if not text.isdecimal():
        raise Refused(f"{kind.name} {item.text!r}: {text!r} is not a value", REWRITE)
    value = int(text)
    if not kind.low + shift <= value <= kind.high + shift:
        raise Refused(f"{kind.name} {item.text!r}: {value} is out of EventBridge's range {kind.low + shift}-{kind.high + shift}", REWRITE)
    return value - shift


def _step(kind: FieldKind, item: Item) -> int:
    if item.step is None:
        return 1
    if not item.step.isdecimal() or int(item.step) < 1:
        raise Refused(f"{kind.name} {item.text!r}: the step {item.step!r} is not a number of at least 1", REWRITE)
    return int(item.step)


def _bounds(text: str, zone: Zone) -> tuple[int | None, int | None]:
    """(start, end) of a year field: none for `*`, the year or the years without a gap; the end is exclusive."""
    if text in ("*", "?"):
        return None, None
    years: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(?P<first>\d{4}|\*)(?:-(?P<last>\d{4}))?(?:/(?P<step>\d+))?", part)
        if match is None or (match["step"] is not None and int(match["step"]) < 1):
            raise Refused(f"year {text!r} is not one", f"years are {_YEARS[0]} to {_YEARS[-1]}; write *")
        first = _YEARS[0] if match["first"] == "*" else int(match["first"])
        last = int(match["last"]) if match["last"] else _YEARS[-1] if match["first"] == "*" or match["step"] else first
        years.update(range(first, last + 1, int(match["step"] or 1)))
    if not years or not years <= set(_YEARS):
        raise Refused(f"year {text!r} is not within {_YEARS[0]} to {_YEARS[-1]}", REWRITE)
    if len(years) != max(years) - min(years) + 1:
        raise Refused(f"year {text!r} has gaps, and there is no year field", "make one schedule for each stretch of years")
    start_ms = None if min(years) == _YEARS[0] else year_start_ms(zone, min(years))
    return start_ms, None if max(years) == _YEARS[-1] else year_start_ms(zone, max(years) + 1)


def _template(
    collector: Collector, item: Members, name: str, target: Members | None, warnings: list[str]
) -> dict[str, Any]:  # fmt: skip
    payload: dict[str, Any] = {"schedule": name}
    queue = DEFAULT_QUEUE
    template: dict[str, Any] = {}
    if target is None:
        warnings.append("list-rules does not give the targets, so the payload has the rule's name alone; list-targets-by-rule has them")
    else:
        arn = target.needed_text("Arn")
        queue = valid_name(target_name(arn))
        payload = {"target": arn}
        if (given := target.text("Input")) is not None:
            payload["input"] = _input(given)
        template |= _retry(target, warnings)
        _note_extras(target, warnings)
    template = {"queue": collector.queue_or(queue), "payload": payload, **template}
    window = item.members("FlexibleTimeWindow")
    if window.text("Mode") == "FLEXIBLE":
        minutes = window.count("MaximumWindowInMinutes")
        if not minutes or minutes * 60 > WINDOW_S_MAX:
            raise Refused(f"FlexibleTimeWindow.MaximumWindowInMinutes is {minutes}", f"it is 1 to {WINDOW_S_MAX // 60}")
        template["timing"] = {"class": "flexible", "window_s": minutes * 60}
    return template


def _input(text: str) -> Any:
    """JSON as JSON, anything else as text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def target_name(arn: str) -> str:
    """The queue for a target: the function's, queue's or state machine's own name; `sqs-sendMessage` for a universal target."""
    parts = arn.split(":", 5)
    if len(parts) < 6:
        return DEFAULT_QUEUE
    resource = parts[5]
    if parts[2] == "scheduler" and resource.startswith("aws-sdk:"):
        return resource.removeprefix("aws-sdk:").replace(":", "-")
    pieces = re.split(r"[:/]", resource)
    # A function's resource is `function:NAME:VERSION`; most others end with their name.
    return pieces[1] if parts[2] == "lambda" and len(pieces) > 1 else pieces[-1]


def _retry(target: Members, warnings: list[str]) -> dict[str, Any]:
    policy = target.members("RetryPolicy")
    found: dict[str, Any] = {}
    retries = policy.count("MaximumRetryAttempts")
    if retries is not None:
        attempts, told = capped_attempts(retries)
        found["retry"] = {"max_attempts": attempts}
        warnings += told
    age_s = policy.count("MaximumEventAgeInSeconds")
    if age_s is not None and age_s != _EVENT_AGE_S_DEFAULT:
        found["start_deadline_s"] = age_s
        warnings.append("MaximumEventAgeInSeconds bounds all tries there; start_deadline_s bounds the start of the first one here")
    return found


def _note_extras(target: Members, warnings: list[str]) -> None:
    if target.members("DeadLetterConfig").get("Arn") is not None:
        warnings.append("DeadLetterConfig is left out: dead letters stay here, see wheelsched dlq list")
    extras = [name for name in sorted(target.value) if name.endswith("Parameters") and target.get(name)]
    extras += [name for name in ("InputPath", "InputTransformer") if target.get(name)]
    if extras:
        warnings.append(f"left out of the payload: {', '.join(extras)}")
