"""Celery beat, in three forms: what `manage.py dumpdata django_celery_beat` writes, the `beat_schedule` as JSON, or the Python
module that sets it, which is parsed and never run.

What beat does is kept: it sends a task once and does not repeat it (`retry.max_attempts` 1: repeating is the business of the task's
own code there), a run that was due while beat was down is sent once when it is back (our default), runs may overlap (our default).

Celery runs on the days that match day of month *and* day of week; ours, as Vixie cron, on those that match either, unless one of the
fields begins with `*`. `days_of` says the same dates in our grammar, or refuses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from wheelsched.core.errors import InvalidRequest
from wheelsched.cron import ZoneData
from wheelsched.imports.celery_python import CrontabCall, IntervalCall, OtherCall, read_module
from wheelsched.imports.documents import Members, json_documents, shown
from wheelsched.imports.fields import DAY, HOUR, MINUTE, MONTH, REWRITE, WEEKDAY, FieldKind, spread, written
from wheelsched.imports.plan import (
    NAME,
    Collector,
    ImportSettings,
    Plan,
    PlannedSchedule,
    Refused,
    capped_timeout,
    valid_name,
    whole,
)
from wheelsched.imports.times import parse_instant

DEFAULT_QUEUE: Final = "celery"
_HOUSEKEEPING: Final = "celery.backend_cleanup"
_FIELDS: Final = {"minute": MINUTE, "hour": HOUR, "day_of_month": DAY, "month_of_year": MONTH, "day_of_week": WEEKDAY}
_PERIODS_S: Final = {"days": 86_400.0, "hours": 3_600.0, "minutes": 60.0, "seconds": 1.0, "microseconds": 1e-6}
_MODELS: Final = ("crontabschedule", "intervalschedule", "solarschedule", "clockedschedule", "periodictask")
_KINDS: Final = ("crontab", "interval", "solar", "clocked")
_RANGE: Final = re.compile(r"(?P<first>\w+)(?:-(?P<last>\w+))?(?:/(?P<step>\w+))?", re.ASCII)
_STAR: Final = re.compile(r"\*(?:/(?P<step>\w+))?", re.ASCII)
# What `apply_async` may be told and jobs have no counterpart for.
_ROUTING: Final = ("exchange", "routing_key", "headers", "priority", "countdown", "eta", "link", "serializer", "compression", "shadow")
_ENTRY_MEMBERS: Final = {"task", "schedule", "args", "kwargs", "options", "relative", "enabled", "timezone"}
# The week days of a month by number: `MON#2` is the Monday among days 8 to 14.
_WEEKS: Final = tuple(frozenset(range(7 * week + 1, min(7 * week + 7, 31) + 1)) for week in range(5))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One periodic task, whatever form it came in."""

    place: str
    name: str
    task: str
    timing: CrontabCall | IntervalCall
    zone: str | None
    args: list[Any] = field(default_factory=list)
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    paused: bool = False
    start_at_ms: int | None = None
    end_at_ms: int | None = None


def read_celery_beat(text: str, settings: ImportSettings) -> Plan:
    """The plan of a beat schedule; JSON if the text begins with `{` or `[`, else Python. InvalidRequest if it is neither."""
    collector = Collector("celery-beat", settings)
    if text.lstrip("\ufeff \t\r\n")[:1] in ("{", "["):
        _read_json(collector, text)
    else:
        _read_python(collector, text)
    return collector.plan()


def _read_python(collector: Collector, text: str) -> None:
    module = read_module(text)
    for line, name, members in module.entries:
        place = f"line {line} ({name})"
        with collector.at(place):
            _add(collector, _entry(place, name, Members(members, ""), module.zone))
    for line, refused in module.faults:
        collector.problem(f"line {line}", re.sub(rf"^line {line}: ", "", refused.what), refused.remedy)


def _read_json(collector: Collector, text: str) -> None:
    rows: list[tuple[str, Members]] = []
    for line, document in json_documents(text):
        if isinstance(document, list):
            for number, row in enumerate(document, 1):
                with collector.at(f"row {number}"):
                    rows.append((f"row {number}", Members.of(row, "")))
            continue
        if not isinstance(document, dict):
            raise InvalidRequest(f"line {line}: {shown(document)} is no beat schedule; see docs/importing.md for the forms")
        zone, entries = _simple_form(document)
        for name, value in entries.items():
            place = f"entry {name}"
            with collector.at(place):
                _add(collector, _entry(place, name, Members.of(value, ""), zone))
    if rows:
        _read_rows(collector, rows)


def _simple_form(document: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """(zone, entries) of `{"timezone", "beat_schedule": {...}}` or of the entries alone."""
    lowered = {key.lower(): value for key, value in document.items()}
    for key in ("beat_schedule", "celery_beat_schedule", "celerybeat_schedule"):
        if isinstance(lowered.get(key), dict):
            zone = lowered.get("timezone", lowered.get("celery_timezone"))
            return (zone if isinstance(zone, str) else None), lowered[key]
    return None, document


def _entry(place: str, name: str, members: Members, zone: str | None) -> _Entry:
    unknown = sorted(members.value.keys() - _ENTRY_MEMBERS)
    if unknown:
        raise Refused(f"{', '.join(unknown)} is not a member of an entry", f"there are {', '.join(sorted(_ENTRY_MEMBERS))}")
    timing = _timing(members.get("schedule"))
    if members.flag("relative") and isinstance(timing, IntervalCall):
        timing = IntervalCall(timing.every_s, relative=True)
    return _Entry(
        place=place, name=name, task=members.needed_text("task"), timing=timing, zone=members.text("timezone") or zone,
        args=members.items("args"), kwargs=members.members("kwargs").value, options=members.members("options").value,
        paused=members.get("enabled") is False,
    )  # fmt: skip


def _timing(value: Any) -> CrontabCall | IntervalCall:
    """A schedule as JSON has it (seconds, `{"crontab": {...}}`, `{"every_s": 30}`) or as the Python reader found it."""
    match value:
        case CrontabCall() | IntervalCall():
            return value
        case bool() | None:
            pass
        case int() | float():
            return IntervalCall(value)
        case {"crontab": dict(fields), **rest} if not rest:
            return CrontabCall(fields)
        case {"every_s": int() | float() as every_s, **rest} if not rest and not isinstance(every_s, bool):
            return IntervalCall(every_s)
        case {"timedelta": dict(parts), **rest} if not rest and parts and parts.keys() <= _PERIODS_S.keys():
            given = Members(parts, "schedule.timedelta")
            return IntervalCall(sum((given.number(unit) or 0) * _PERIODS_S[unit] for unit in parts))
        case OtherCall(name=name):
            raise _not_recurring(name)
        case {"solar": _}:
            raise _not_recurring("solar")
        case {"clocked": _}:
            raise _not_recurring("clocked")
    told = "missing" if value is None else f"{shown(value)}, which is no schedule"
    raise Refused(f"schedule is {told}", 'write seconds, {"crontab": {"hour": 4, "minute": 30}} or {"every_s": 30}')


def _not_recurring(kind: str) -> Refused:
    if kind == "solar":
        return Refused(
            "solar(...) follows the sun, which no cron expression does", "let a handler of a frequent schedule decide, or make jobs ahead"
        )
    return Refused("a clocked schedule runs once", "create a job: wheelsched jobs create QUEUE --at INSTANT")


# dumpdata


def _read_rows(collector: Collector, rows: Iterable[tuple[str, Members]]) -> None:
    tables: dict[str, dict[Any, Members]] = {model: {} for model in _MODELS}
    tasks: list[tuple[str, Members]] = []
    for place, row in rows:
        with collector.at(place):
            app, _, model = row.needed_text("model").lower().partition(".")
            if app != "django_celery_beat" or model == "periodictasks":
                continue  # another application of the same dump; a row that only says when the tables changed
            if model not in _MODELS:
                collector.note(place, f"model {model} is left out")
            elif model == "periodictask":
                fields = row.members("fields")
                tasks.append((f"{place} ({fields.get('name')})", fields))
            else:
                tables[model][_key(row.get("pk"))] = row.members("fields")
    for place, task in tasks:
        with collector.at(place):
            _add_row(collector, place, task, tables)


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _add_row(collector: Collector, place: str, task: Members, tables: Mapping[str, Mapping[Any, Members]]) -> None:
    name = task.needed_text("name")
    kinds = [kind for kind in _KINDS if task.get(kind) is not None]
    if len(kinds) != 1:
        told = f"{', '.join(kinds)} are set, which is more than one" if kinds else "none of crontab, interval, solar, clocked is set"
        raise Refused(told, "set one of them at the source")
    kind = kinds[0]
    if kind in ("solar", "clocked"):
        raise _not_recurring(kind)
    if task.flag("one_off"):
        raise Refused("one_off: it runs once", "create a job: wheelsched jobs create QUEUE --at INSTANT")
    row = tables[f"{kind}schedule"].get(_key(task.get(kind)))
    if row is None:
        raise Refused(f"{kind} {shown(task.get(kind))} is not in the dump", "dump all of django_celery_beat, not one table")
    options = {name: task.get(name) for name in ("queue", "exchange", "routing_key", "priority") if task.get(name) not in (None, "")}
    headers = _embedded(task, "headers", "{}")
    if headers:
        options["headers"] = headers
    if task.get("expire_seconds") is not None:
        options["expires"] = task.number("expire_seconds")
    zones = collector.settings.zones
    _add(
        collector,
        _Entry(
            place=place, name=name, task=task.needed_text("task"), timing=_row_timing(kind, row), zone=row.text("timezone"),
            args=_embedded(task, "args", "[]"), kwargs=_embedded(task, "kwargs", "{}"), options=options,
            paused=task.get("enabled") is False, start_at_ms=_instant(task, "start_time", zones),
            end_at_ms=_instant(task, "expires", zones),
        ),
    )  # fmt: skip


def _row_timing(kind: str, row: Members) -> CrontabCall | IntervalCall:
    if kind == "crontab":
        return CrontabCall({name: row.get(name) for name in _FIELDS if row.get(name) is not None})
    period = row.needed_text("period")
    if period not in _PERIODS_S:
        raise Refused(f"period {period!r} is unknown", f"there are {', '.join(_PERIODS_S)}")
    return IntervalCall((row.number("every") or 0) * _PERIODS_S[period])


def _embedded(task: Members, name: str, empty: str) -> Any:
    """The JSON within a text column."""
    text = task.text(name) or empty
    try:
        value = json.loads(text)
    except ValueError:
        raise Refused(f"{name} is {shown(text)}, not JSON", "correct it at the source") from None
    if not isinstance(value, list if empty == "[]" else dict):
        raise Refused(f"{name} is {shown(text)}, not {'a list' if empty == '[]' else 'an object'}", "correct it at the source")
    return value


def _instant(task: Members, name: str, zones: ZoneData) -> int | None:
    text = task.text(name)
    if text is None:
        return None
    try:
        # Without USE_TZ Django writes no offset; Celery takes such a time as UTC.
        return parse_instant(text, zones.zone("UTC"))
    except (ValueError, OverflowError):
        raise Refused(f"{name} is {text!r}, not an instant", "correct it at the source") from None


# An entry becomes a schedule


def _add(collector: Collector, entry: _Entry) -> None:
    if entry.task == _HOUSEKEEPING:
        collector.note(entry.place, f"{_HOUSEKEEPING} is left out: it cleans Celery's own results")
        return
    warnings: list[str] = []
    template = _template(collector, entry, warnings)
    cron: str | None = None
    every_s: float | None = None
    zone = "UTC"
    if isinstance(entry.timing, CrontabCall):
        cron = translate(entry.timing.fields)
        source = "crontab(" + ", ".join(f"{name}={value!r}" for name, value in entry.timing.fields.items()) + ")"
        assumed = "no timezone is set: Celery uses UTC then, and so does the plan"
        zone = collector.zone_or_default(entry.zone, "the file", assumed)
    else:
        every_s = _seconds(entry.timing.every_s)
        source = f"every {every_s:g} s"
        if entry.start_at_ms is None:
            warnings.append("beat counts an interval from its last run, every_s from the import")
        if entry.timing.relative:
            warnings.append("relative: beat rounds the run to the interval's unit; set anchor_at to a full minute or hour")
    collector.add(
        PlannedSchedule(
            name=collector.full_name(entry.name),
            place=entry.place,
            source=source,
            source_name=entry.name,
            cron=cron,
            every_s=every_s,
            anchor_at_ms=entry.start_at_ms if every_s is not None else None,
            time_zone=zone,
            job_template=template,
            paused=entry.paused,
            start_at_ms=entry.start_at_ms,
            end_at_ms=entry.end_at_ms,
            warnings=tuple(warnings),
        )
    )


def _seconds(every_s: float) -> float:
    if not 0 < every_s < float("inf"):
        raise Refused(f"an interval of {every_s:g} s is not above 0", "correct it at the source")
    return whole(every_s)


def _template(collector: Collector, entry: _Entry, warnings: list[str]) -> dict[str, Any]:
    options = Members(entry.options, "options")
    queue = _queue(options)
    named = valid_name(queue)
    if not NAME.fullmatch(queue) and collector.settings.queue is None:
        warnings.append(f"queue {queue!r} is not a name here; it is {named}")
    payload = {"task": entry.task, "args": entry.args, "kwargs": dict(entry.kwargs)}
    template: dict[str, Any] = {"queue": collector.queue_or(named), "payload": payload, "retry": {"max_attempts": 1}}
    limit_s = options.number("time_limit") or options.number("soft_time_limit")
    if limit_s:
        template["timeout_s"], told = capped_timeout(limit_s)
        warnings += told
    expires = options.get("expires")
    if isinstance(expires, IntervalCall):
        template["start_deadline_s"] = whole(expires.every_s)
    elif isinstance(expires, int | float) and not isinstance(expires, bool):
        template["start_deadline_s"] = whole(expires)
    elif expires is not None:
        warnings.append(f"options.expires {shown(expires)} is left out; set start_deadline_s")
    dropped = [name for name in _ROUTING if options.get(name) is not None]
    if dropped:
        warnings.append(f"left out of the options: {', '.join(dropped)}")
    return template


def _queue(options: Members) -> str:
    """`queue` may be a name or, in old configurations, a dict with one."""
    value = options.get("queue")
    if isinstance(value, dict):
        value = value.get("name")
    if value is not None and not isinstance(value, str):
        raise Refused(f"options.queue is {shown(value)}, not a name", "give one with --queue")
    return value or DEFAULT_QUEUE


# Times


def translate(fields: Mapping[str, Any]) -> str:
    """Our expression for the fields of a `crontab`. Raises Refused for what Celery refuses, and for dates ours cannot say."""
    unknown = sorted(fields.keys() - _FIELDS.keys())
    if unknown:
        raise Refused(f"crontab(...) has {', '.join(unknown)}", f"only {', '.join(_FIELDS)} can be taken over")
    values = {name: _values(kind, fields.get(name, "*")) for name, kind in _FIELDS.items()}
    plain = {
        name: _written_like(kind, fields.get(name, "*"), values[name])
        for name, kind in _FIELDS.items()
        if name in ("minute", "hour", "month_of_year")
    }
    day, weekday = days_of(values["day_of_month"], values["day_of_week"])
    return f"{plain['minute']} {plain['hour']} {day} {plain['month_of_year']} {weekday}"


def _written_like(kind: FieldKind, source: Any, values: frozenset[int]) -> str:
    """A set in our grammar; with a star and step where the source had them, which makes the schedule follow real time."""
    if values == kind.everything:
        return "*"
    match = _STAR.fullmatch(source) if isinstance(source, str) else None
    return source if match is not None else written(kind, values)


def days_of(days: frozenset[int], weekdays: frozenset[int]) -> tuple[str, str]:
    """Our two day fields for the dates whose day *and* weekday are in the sets. Refused if there are none that say it exactly."""
    if weekdays == WEEKDAY.everything:
        return (written(DAY, days) if days != DAY.everything else "*"), "*"
    if days == DAY.everything:
        return "*", written(WEEKDAY, weekdays)
    weeks = [number for number, week in enumerate(_WEEKS, 1) if week <= days]
    if days == frozenset().union(*(_WEEKS[number - 1] for number in weeks)):
        return "*", ",".join(f"{WEEKDAY.text(one)}#{number}" for number in weeks for one in sorted(weekdays))
    # Both must match if one field begins with `*`; a star with a long step adds the first value alone, so it must be wanted.
    if DAY.low in days:
        return _starred(DAY, days), written(WEEKDAY, weekdays)
    if WEEKDAY.low in weekdays:
        return written(DAY, days), _starred(WEEKDAY, weekdays)
    raise Refused(
        f"Celery runs on days {written(DAY, days)} that are also {written(WEEKDAY, weekdays)}; a cron expression runs on either",
        f"schedule {written(WEEKDAY, weekdays)} and let the handler leave out the other days of the month",
    )


def _starred(kind: FieldKind, values: frozenset[int]) -> str:
    """A set that has the field's first value, as a field that begins with `*`."""
    step = next(iter(sorted(values - {kind.low})), kind.high + 1) - kind.low
    if len(values) > 2 and values == frozenset(range(kind.low, kind.high + 1, step)):
        return f"*/{step}"
    # A step past the end of the field leaves its first value alone.
    return ",".join(filter(None, (f"*/{kind.high - kind.low + 1}", written(kind, values - {kind.low}))))


def _values(kind: FieldKind, value: Any) -> frozenset[int]:
    """The values of one field: a number, a text in Celery's grammar, or a list of numbers."""
    if isinstance(value, str):
        text = value.replace(" ", "")
        found = [one for part in text.split(",") for one in _part(kind, part, text)]
    elif isinstance(value, list | tuple):
        found = [_number(kind, one) for one in value]
    else:
        found = [_number(kind, value)]
    if not found:
        raise Refused(f"{kind.name} is empty, it would never run", REWRITE)
    return frozenset(found)


def _part(kind: FieldKind, part: str, text: str) -> list[int]:
    star = _STAR.fullmatch(part)
    if star is not None:
        return list(range(kind.low, kind.high + 1))[:: _step(kind, star["step"], part)]
    match = _RANGE.fullmatch(part)
    if match is None:
        raise Refused(f"{kind.name} {text!r}: {part!r} is not Celery's, it has *, a, a-b, */step and a-b/step", REWRITE)
    first = _number(kind, match["first"])
    if match["last"] is None:
        if match["step"] is not None:
            raise Refused(
                f"{kind.name} {part!r}: Celery takes a step after * or a range only", f"write {first}-{kind.high}/{match['step']}"
            )
        return [first]
    # Unlike cron's, Celery's ranges may pass the end of their field.
    return spread(kind, first, _number(kind, match["last"]), _step(kind, match["step"], part))


def _step(kind: FieldKind, text: str | None, part: str) -> int:
    if text is None:
        return 1
    if not text.isdecimal() or int(text) < 1:
        raise Refused(f"{kind.name} {part!r}: the step {text!r} is not a number of at least 1", REWRITE)
    return int(text)


def _number(kind: FieldKind, value: Any) -> int:
    if isinstance(value, str):
        if value.isdecimal():
            value = int(value)
        elif value[:3].upper() in kind.names:
            value = kind.names[value[:3].upper()]  # Celery looks at three letters: `monday`
    if isinstance(value, bool) or not isinstance(value, int):
        raise Refused(f"{kind.name} {shown(value)} is not a value", REWRITE)
    if not kind.low <= value <= kind.high:
        raise Refused(f"{kind.name} {value} is out of Celery's range {kind.low}-{kind.high}", REWRITE)
    return value
