"""Celery beat: the three forms, days that must match both fields, and Python that is read but never run."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from imports_reference import only, ours, refusal, sunday_0, the_settings, theirs

from wheelsched.core.errors import InvalidRequest
from wheelsched.imports import Plan, PlannedSchedule, read_celery_beat

MODULE = """\
import os
from datetime import timedelta

from celery import Celery
from celery.schedules import crontab, solar

MINUTE = 60
app = Celery("shop")
app.conf.timezone = "Europe/Berlin"
app.conf.beat_schedule = {
    # Every Monday morning.
    "monday report": {
        "task": "shop.tasks.report",
        "schedule": crontab(hour=7, minute=30, day_of_week=1),
        "args": (16, [True, None]),
        "kwargs": {"full": True},
        "options": {"queue": "reports", "expires": 15 * 60.0},
    },
    "sweep": {"task": "shop.tasks.sweep", "schedule": 5 * MINUTE},
    "ping": {"task": "shop.tasks.ping", "schedule": timedelta(minutes=1, seconds=30)},
    "sunset": {"task": "shop.tasks.lights", "schedule": solar("sunset", -37.8, 144.9)},
    "secret": {"task": "shop.tasks.x", "schedule": 10, "args": (os.environ["TOKEN"],)},
    **more_entries,
}
app.conf.beat_schedule["late"] = {"task": "shop.tasks.late", "schedule": crontab("0", "*/2")}


@app.on_after_configure.connect
def setup_periodic_tasks(sender, **kwargs):
    sender.add_periodic_task(10.0, test.s("hello"), name="add every 10")
"""


def test_a_module_is_read_without_running_it() -> None:
    plan = read_celery_beat(MODULE, the_settings())
    assert [(schedule.source_name, schedule.when, schedule.time_zone) for schedule in plan.schedules] == [
        ("monday report", "30 7 * * MON", "Europe/Berlin"),
        ("sweep", "every 300 s", "UTC"),
        ("ping", "every 90 s", "UTC"),
        ("late", "0 */2 * * *", "Europe/Berlin"),
    ]
    report = plan.schedules[0]
    assert report.name.startswith("monday-report-") and report.place == "line 12 (monday report)"
    assert report.job_template == {
        "queue": "reports",
        "payload": {"task": "shop.tasks.report", "args": [16, [True, None]], "kwargs": {"full": True}},
        "retry": {"max_attempts": 1},
        "start_deadline_s": 900,
    }
    assert [problem.place for problem in plan.problems] == ["line 21 (sunset)", "line 22", "line 23", "line 30"]
    told = [str(problem) for problem in plan.problems]
    assert "follows the sun" in told[0] and "os.environ['TOKEN']" in told[1] and "more_entries" in told[2]
    assert "add_periodic_task" in told[3]


@pytest.mark.parametrize(
    ("text", "when"),
    [
        ('CELERY_BEAT_SCHEDULE = {"a": {"task": "t", "schedule": 30.5}}', "every 30.5 s"),
        ('CELERYBEAT_SCHEDULE: dict = {"a": {"task": "t", "schedule": crontab()}}', "* * * * *"),
        ('app.conf.update(beat_schedule={"a": {"task": "t", "schedule": schedule(run_every=30)}})', "every 30 s"),
        ('app.conf.update({"beat_schedule": {"a": {"task": "t", "schedule": schedule(timedelta(hours=2))}}})', "every 7200 s"),
        ('app.conf["beat_schedule"] = dict(a={"task": "t", "schedule": timedelta(1)})', "every 86400 s"),
        ('S = {"a": dict(task="t", schedule=schedules.crontab(minute="*/15"))}\nclass Config:\n    beat_schedule = S', "*/15 * * * *"),
        ('beat_schedule.update({"a": {"task": "t", "schedule": timedelta(hours=1) + timedelta(minutes=1)}})', "every 3660 s"),
        ('beat_schedule = {"a": {"task": "t", "schedule": crontab(0, [8, 20], "mon-fri")}}', "0 8,20 * * MON-FRI"),
        ('beat_schedule = {"a": {"task": "t", "schedule": crontab(minute={0, 30})}}', "0,30 * * * *"),
    ],
)
def test_the_ways_of_writing_it_in_python(text: str, when: str) -> None:
    assert only(read_celery_beat(text, the_settings(zone="UTC"))).when == when


@pytest.mark.parametrize(
    "value",
    ["f'{x}'", "print", "make()", "[x for x in y]", "lambda: 1", "A", "B", "1 if x else 2", "2 ** 99", "x.y", "'a' * 3", "5 / 0", "-x"],
)
def test_values_that_only_running_shows_are_problems_of_their_line(value: str) -> None:
    text = f'A = 1\nA = 2\nB = B\nbeat_schedule = {{\n "a": {{"task": "t", "schedule": {value}}},\n "b": {{"task": "t", "schedule": 9}}}}\n'
    plan = read_celery_beat(text, the_settings())
    assert [schedule.source_name for schedule in plan.schedules] == ["b"]
    assert plan.problems[0].place == "line 5" and plan.problems[0].remedy


def test_nothing_of_a_module_is_executed(tmp_path: Path) -> None:
    target = tmp_path / "ran"
    text = f'open({str(target)!r}, "w")\nbeat_schedule = {{"a": {{"task": "t", "schedule": open({str(target)!r}, "w")}}}}\n'
    assert read_celery_beat(text, the_settings()).problems
    assert not target.exists()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("x = 1\n", "no beat_schedule is assigned"),
        ("beat_schedule = {\n  'a': (\n", "line 2: neither JSON nor Python"),
        ('{"a": ', "line 1, column 7: not JSON"),
        ('{"a": {"task": "t", "schedule": NaN}}', "NaN is not a JSON value"),
        ("\x00", "line 1: neither JSON nor Python"),
        ("beat_schedule = " + "-" * 100_000 + "1", "not readable as Python"),
    ],
)
def test_what_cannot_be_read_at_all_is_told_with_its_line(text: str, what: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_celery_beat(text, the_settings())
    assert what in refused.value.detail


def test_an_expression_of_great_depth_is_a_problem() -> None:
    text = "A = " + "1+" * 900 + "1\nbeat_schedule = {'a': {'task': 't', 'schedule': A}}"
    assert read_celery_beat(text, the_settings()).problems


# JSON


def entry(**given: Any) -> dict[str, Any]:
    return {"task": "t", "schedule": 30, **given}


def planned(**given: Any) -> PlannedSchedule:
    return only(read_celery_beat(json.dumps({"timezone": "UTC", "beat_schedule": {"a": entry(**given)}}), the_settings()))


def refused(**given: Any) -> str:
    return refusal(read_celery_beat(json.dumps({"a": entry(**given)}), the_settings(zone="UTC")))


def test_the_json_form() -> None:
    schedule = planned(schedule={"crontab": {"minute": 0, "hour": "8-18/2"}}, args=[1], kwargs={"b": 2}, options={"queue": "q"})
    assert (schedule.cron, schedule.time_zone) == ("0 8,10,12,14,16,18 * * *", "UTC")
    assert schedule.job_template == {
        "queue": "q", "payload": {"task": "t", "args": [1], "kwargs": {"b": 2}}, "retry": {"max_attempts": 1},
    }  # fmt: skip
    assert planned(schedule={"every_s": 0.5 + 1}).every_s == 1.5
    assert planned(schedule={"timedelta": {"minutes": 2}}).every_s == 120
    assert planned(enabled=False).paused


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"schedule": None}, "schedule is missing"),
        ({"schedule": "0 5 * * *"}, "'0 5 * * *', which is no schedule"),
        ({"schedule": True}, "which is no schedule"),
        ({"schedule": 0}, "an interval of 0 s is not above 0"),
        ({"schedule": 0.2}, "every_s would be 0.2, it is 1 to"),
        ({"schedule": {"solar": ["sunset", 1, 2]}}, "follows the sun"),
        ({"schedule": {"clocked": "2026-12-01"}}, "runs once"),
        ({"schedule": {"crontab": {"minute": 60}}}, "minute 60 is out of Celery's range 0-59"),
        ({"schedule": {"crontab": {"day_of_week": "7"}}}, "day of week 7 is out of Celery's range 0-6"),
        ({"schedule": {"crontab": {"minute": "5/15"}}}, "write 5-59/15"),
        ({"schedule": {"crontab": {"minute": "*/0"}}}, "the step '0'"),
        ({"schedule": {"crontab": {"minute": "H"}}}, "minute 'H' is not a value"),
        ({"schedule": {"crontab": {"minute": ""}}}, "minute ''"),
        ({"schedule": {"crontab": {"minute": []}}}, "minute is empty"),
        ({"schedule": {"crontab": {"minutes": 5}}}, "crontab(...) has minutes"),
        ({"schedule": {"crontab": {"day_of_month": 31, "month_of_year": 2}}}, "never comes"),
        ({"task": None}, "task is missing"),
        ({"args": {}}, "args is {}, not a list"),
        ({"crontab": {}}, "crontab is not a member of an entry"),
    ],
)
def test_what_cannot_be_taken_over_names_the_entry(given: dict[str, Any], what: str) -> None:
    told = refused(**given)
    assert told.startswith("entry a: ") and what in told, told


def test_options_without_a_counterpart_are_told() -> None:
    schedule = planned(options={"queue": {"name": "low prio"}, "priority": 9, "routing_key": "x", "time_limit": 90_000, "expires": "x"})
    assert schedule.job_template["queue"].startswith("low-prio-") and schedule.job_template["timeout_s"] == 43_200
    told = " ".join(schedule.warnings)
    assert all(text in told for text in ("'low prio' is not a name", "routing_key, priority", "90000 s becomes", "expires 'x'"))
    assert planned(options={"queue": "low prio"}).name == "a"


# dumpdata


def row(model: str, pk: int, **fields: Any) -> dict[str, Any]:
    return {"model": f"django_celery_beat.{model}", "pk": pk, "fields": fields}


def task(pk: int, name: str, **fields: Any) -> dict[str, Any]:
    empty = {"interval": None, "crontab": None, "solar": None, "clocked": None, "args": "[]", "kwargs": "{}", "headers": "{}"}
    return row("periodictask", pk, **{**empty, "name": name, "task": "shop.t", "enabled": True, "one_off": False, **fields})


TABLES = [
    row(
        "crontabschedule", 1, minute="*/15", hour="8-18", day_of_week="mon-fri", day_of_month="*", month_of_year="*",
        timezone="Europe/Berlin",
    ),
    row("intervalschedule", 7, every=10, period="minutes"),
    row("solarschedule", 1, event="sunset", latitude="1.0", longitude="2.0"),
    row("clockedschedule", 1, clocked_time="2026-12-01T00:00:00Z"),
    row("periodictasks", 1, last_update="2026-01-01T00:00:00Z"),
    {"model": "auth.user", "pk": 1, "fields": {}},
]  # fmt: skip


def test_a_dump_of_django_is_joined() -> None:
    rows = [
        *TABLES,
        task(1, "office", crontab=1, args='[1, "a"]', kwargs='{"b": 2}', queue="q", expire_seconds=30),
        task(
            2, "sync", interval=7, enabled=False, start_time="2026-11-01T00:00:00Z", expires="2027-01-01T00:00:00", priority=3,
            headers='{"a": 1}',
        ),
        task(3, "celery.backend_cleanup", task="celery.backend_cleanup", crontab=1),
    ]  # fmt: skip
    plan = read_celery_beat(json.dumps(rows), the_settings())
    assert not plan.problems
    office, sync = plan.schedules
    assert (office.cron, office.time_zone, office.place) == ("*/15 8-18 * * MON-FRI", "Europe/Berlin", "row 7 (office)")
    assert office.job_template["payload"] == {"task": "shop.t", "args": [1, "a"], "kwargs": {"b": 2}}
    assert (office.job_template["queue"], office.job_template["start_deadline_s"]) == ("q", 30)
    spec = sync.spec()
    assert (spec["every_s"], spec["anchor_at"], spec["start_at"], spec["end_at"], spec["paused"]) == (
        600, "2026-11-01T00:00:00Z", "2026-11-01T00:00:00Z", "2027-01-01T00:00:00Z", True,
    )  # fmt: skip
    assert any("headers, priority" in text or "priority" in text for text in sync.warnings)
    assert any("celery.backend_cleanup is left out" in note.what for note in plan.notes)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"solar": 1}, "follows the sun"),
        ({"clocked": 1, "one_off": True}, "runs once; create a job"),
        ({"crontab": 1, "one_off": True}, "one_off: it runs once"),
        ({}, "none of crontab, interval, solar, clocked is set"),
        ({"crontab": 1, "interval": 7}, "which is more than one"),
        ({"crontab": 99}, "crontab 99 is not in the dump"),
        ({"crontab": 1, "args": "[1"}, "args is '[1', not JSON"),
        ({"crontab": 1, "kwargs": "[]"}, "kwargs is '[]', not an object"),
        ({"crontab": 1, "start_time": "soon"}, "start_time is 'soon', not an instant"),
        ({"crontab": 1, "expires": "2026-01-01T00:00:00Z"}, "it ended at 2026-01-01T00:00:00Z"),
    ],
)
def test_rows_that_cannot_be_taken_over_are_named(fields: dict[str, Any], what: str) -> None:
    told = refusal(read_celery_beat(json.dumps([*TABLES, task(1, "x", **fields)]), the_settings()))
    assert told.startswith("row 7 (x): ") and what in told, told


# Days


@pytest.mark.parametrize(
    ("days", "weekdays", "expected"),
    [
        ("1-7", "mon", "0 0 * * MON#1"),
        ("8-14,22-28", "mon,tue", "0 0 * * MON#2,TUE#2,MON#4,TUE#4"),
        ("29-31", "fri", "0 0 * * FRI#5"),
        ("*/2", "mon", "0 0 */2 * MON"),
        ("1,15", "mon-fri", "0 0 */31,15 * MON-FRI"),
        ("1", "mon", "0 0 */31 * MON"),
        ("13", "sun,fri", "0 0 13 * */7,FRI"),
        ("13", "0,3,6", "0 0 13 * */3"),
        ("13", "0-6", "0 0 13 * *"),
        ("1-31", "fri", "0 0 * * FRI"),
        ("25-5", "sun", "0 0 */31,2-5,25-31 * SUN"),
    ],
)
def test_days_of_both_fields_are_said_exactly(days: str, weekdays: str, expected: str) -> None:
    fields = {"minute": 0, "hour": 0, "day_of_month": days, "day_of_week": weekdays}
    assert planned(schedule={"crontab": fields}).cron == expected


def test_days_that_cron_cannot_say_are_refused() -> None:
    told = refused(schedule={"crontab": {"minute": 0, "hour": 0, "day_of_month": "13", "day_of_week": "fri"}})
    assert "Celery runs on days 13 that are also FRI" in told and "let the handler leave out" in told


NAMES = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")


def celery_field(text: str, low: int, high: int) -> set[int]:
    """The values of a field by Celery's documentation: ranges pass the end of the field, a step counts what comes before it."""

    def number(word: str) -> int:
        return int(word) if word.isdigit() else NAMES.index(word[:3])

    found = set()
    for part in text.split(","):
        base, _, step = part.partition("/")
        if base == "*":
            values = list(range(low, high + 1))
        else:
            first, _, last = base.partition("-")
            values = [number(first)]
            while last and values[-1] != number(last):
                values.append(values[-1] + 1 if values[-1] < high else low)
        found.update(values[:: int(step or 1)])
    return found


def items(low: int, high: int, words: tuple[str, ...] = ()) -> st.SearchStrategy[str]:
    value = st.integers(low, high).map(str) | (st.sampled_from(words) if words else st.nothing())
    ranges = st.builds("{}-{}".format, value, value)
    return st.one_of(value, ranges, st.just("*"), st.builds("{}/{}".format, ranges | st.just("*"), st.integers(1, 40)))


def fields(low: int, high: int, words: tuple[str, ...] = ()) -> st.SearchStrategy[str]:
    return st.lists(items(low, high, words), min_size=1, max_size=3).map(",".join)


def read_crontab_call(**names: Any) -> Plan:
    return read_celery_beat(json.dumps({"a": entry(schedule={"crontab": names})}), the_settings(zone="UTC"))


@given(minute=fields(0, 59), hour=fields(0, 23))
def test_the_times_are_celerys(minute: str, hour: str) -> None:
    day = date(2028, 3, 31)
    found = ours(only(read_crontab_call(minute=minute, hour=hour)), day)
    assert found == theirs(celery_field(minute, 0, 59), celery_field(hour, 0, 23), lambda one: True, day)


@given(
    day=fields(1, 31), month=st.just("*") | fields(1, 12),
    weekday=fields(0, 6, ("sun", "monday", "tue", "wednesday", "thu", "fri", "sat")),
)  # fmt: skip
def test_the_days_are_celerys_or_there_are_none(day: str, month: str, weekday: str) -> None:
    """Every translation is exact. What is refused has days that no star can be put before, or no date at all."""
    plan = read_crontab_call(minute="*/20", hour=9, day_of_month=day, month_of_year=month, day_of_week=weekday)
    days, months, weekdays = celery_field(day, 1, 31), celery_field(month, 1, 12), celery_field(weekday, 0, 6)
    if plan.problems:
        if "never comes" not in plan.problems[0].what:
            assert 1 not in days and 0 not in weekdays, plan.problems[0]
        return

    def matches(one: date) -> bool:
        return one.day in days and one.month in months and sunday_0(one) in weekdays

    assert ours(only(plan)) == theirs({0, 20, 40}, {9}, matches), plan.schedules[0].cron


@given(st.sets(st.integers(1, 31), min_size=1), st.sets(st.integers(0, 6), min_size=1))
def test_any_sets_of_days_are_said_exactly_or_refused(days: set[int], weekdays: set[int]) -> None:
    plan = read_crontab_call(minute=0, hour=12, day_of_month=sorted(days), day_of_week=sorted(weekdays))
    if plan.schedules:
        assert ours(only(plan)) == theirs({0}, {12}, lambda one: one.day in days and sunday_0(one) in weekdays)
    else:
        assert 1 not in days and 0 not in weekdays
