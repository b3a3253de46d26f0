"""Logs of the old scheduler, and what a plan would have run beside them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from imports_reference import NOW_MS, ZONES, the_settings

from wheelsched.core.errors import InvalidRequest
from wheelsched.imports import (
    Comparison,
    ImportSettings,
    LogEntry,
    PlannedRuns,
    compare,
    planned_runs,
    read_celery_beat,
    read_crontab,
    read_eventbridge,
    read_log,
    read_plan,
)
from wheelsched.imports.times import instant_text, instants_of_reading, parse_instant

UTC_ZONE, BERLIN = ZONES.zone("UTC"), ZONES.zone("Europe/Berlin")
MINUTE_MS, HOUR_MS = 60_000, 3_600_000


def at(text: str) -> int:
    return parse_instant(text)


# Logs


def read(text: str, **given: object) -> list[tuple[str, str]]:
    options = {"zone": UTC_ZONE, "until_ms": NOW_MS, **given}
    return [(entry.name, instant_text(entry.at_ms)) for entry in read_log(text, **options)]  # type: ignore[arg-type]


def test_csv_needs_its_columns_alone() -> None:
    text = 'host,Time,name\nx,2026-11-05T03:17:01+01:00,"a, b"\n\ny,1793869200.5,c\n'
    assert read(text) == [("a, b", "2026-11-05T02:17:01Z"), ("c", "2026-11-05T09:00:00.500Z")]
    assert read("name,time\na,2026-11-05T03:00:00\n", zone=BERLIN) == [("a", "2026-11-05T02:00:00Z")]
    assert read("name,time\n") == read("") == []


def test_json_lines() -> None:
    text = '{"name": "b", "time": "2026-11-05T04:00:00Z", "more": 1}\n\n{"name": "a", "time": 1793847600}\n'
    assert read(text) == [("a", "2026-11-05T03:00:00Z"), ("b", "2026-11-05T04:00:00Z")]


SYSLOG = """\
Nov  4 23:17:01 web1 CRON[811]: (root) CMD (   cd / && run-parts --report /etc/cron.hourly)
Nov  5 03:00:00 web1 sshd[99]: Accepted publickey for ada
Nov  5 03:00:01 web1 CRON[812]: (ada) CMD (/bin/backup (all))
Nov  5 03:00:02 web1 CRON[812]: pam_unix(cron:session): session opened
2026-11-05T05:00:01.250000+01:00 web1 CROND[813]: (ada) CMD (x)
2026-11-05T05:01:01+0100 web1 /usr/sbin/cron[814]: (ada) CMD (y)
<78>Nov  5 04:02:01 web1 crond[815]: (ada) CMD (z)
"""


def test_cron_lines_of_syslog_are_found_among_others() -> None:
    assert read(SYSLOG) == [
        ("cd / && run-parts --report /etc/cron.hourly", "2026-11-04T23:17:01Z"),
        ("/bin/backup (all)", "2026-11-05T03:00:01Z"),
        ("x", "2026-11-05T04:00:01.250Z"),
        ("y", "2026-11-05T04:01:01Z"),
        ("z", "2026-11-05T04:02:01Z"),
    ]
    entries = read_log(SYSLOG, zone=UTC_ZONE, until_ms=NOW_MS)
    assert [entry.user for entry in entries] == ["root", "ada", "ada", "ada", "ada"]


def test_syslog_dates_get_the_latest_year_they_can_have() -> None:
    line = "{} 03:00:01 h CRON[1]: (a) CMD (x)\n"
    assert read(line.format("Dec 31"))[0][1] == "2025-12-31T03:00:01Z"
    assert read(line.format("Nov  5"))[0][1] == "2026-11-05T03:00:01Z"
    assert read(line.format("Feb 29"))[0][1] == "2024-02-29T03:00:01Z"


def test_an_hour_that_comes_twice_goes_on_in_time() -> None:
    lines = [f"Oct 25 {clock} h CRON[1]: (a) CMD (x)" for clock in ("01:30:00", "02:00:00", "02:30:00", "02:00:00", "02:30:00", "03:00:00")]
    found = read("\n".join(lines), zone=BERLIN)
    assert [time[11:16] for _, time in found] == ["23:30", "00:00", "00:30", "01:00", "01:30", "02:00"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("when,what\n1,2\n", "line 1: the columns are when, what; the first line of a CSV names name and time"),
        ("name,time\na\n", "line 2: 1 columns"),
        ("name,time\na,soon\n", "line 2: time 'soon' is not an instant; write 2026-11-05T03:17:01Z"),
        ('{"name": "a"}\n', "line 1: name and time are missing"),
        ('{"name": "a", "time": true}\n', "line 1: name and time are missing"),
        ('{"name": "a", "time": 1}\n{"name"\n', "line 2: not JSON"),
        (SYSLOG + "Nov 5 CRON: (a) CMD (x)\n", "line 8: not a line of cron's in syslog"),
        ("Nov 31 03:00:00 h CRON[1]: (a) CMD (x)\n", "'Nov 31 03:00:00' is not a date"),
        ("Nov 30 25:00:00 h CRON[1]: (a) CMD (x)\n", "is not a date"),
    ],
)
def test_lines_that_cannot_be_read_are_named(text: str, what: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_log(text, zone=UTC_ZONE, until_ms=NOW_MS)
    assert what in refused.value.detail


@pytest.mark.parametrize(
    ("reading", "instants"),
    [
        ("2026-03-29T02:30:00", ["2026-03-29T01:30:00Z"]),
        ("2026-10-25T02:30:00", ["2026-10-25T00:30:00Z", "2026-10-25T01:30:00Z"]),
        ("2026-07-01T00:00:00", ["2026-06-30T22:00:00Z"]),
    ],
)
def test_readings_of_a_clock(reading: str, instants: list[str]) -> None:
    reading_s = int(datetime.fromisoformat(reading).replace(tzinfo=UTC).timestamp())
    assert [instant_text(at_s * 1000) for at_s in instants_of_reading(BERLIN, reading_s)] == instants


# Comparison


def runs(*times_ms: int, name: str = "a", slack_ms: int = 0, user: str | None = None) -> PlannedRuns:
    return PlannedRuns(name, frozenset((name,)), times_ms, slack_ms, user)


def compared(planned: Sequence[PlannedRuns], *times_ms: int, tolerance_ms: int = 1_000, to_ms: int = 1_000_000) -> Comparison:
    entries = [LogEntry("a", at_ms) for at_ms in times_ms]
    return compare(planned, entries, from_ms=0, to_ms=to_ms, tolerance_ms=tolerance_ms)


def test_runs_and_entries_match_within_the_tolerance_and_once() -> None:
    (found,) = compared([runs(60_000, 120_000, 180_000)], 60_900, 121_000, 119_500, 240_000).differences
    assert (found.matched, found.missing_ms, found.extra_ms, found.offset_ms_max) == (2, (180_000,), (121_000, 240_000), 900)


def test_a_missing_run_is_told_at_its_own_time() -> None:
    """Were the end of the window the next run itself, each entry would stand for the run before it, and the last were missing."""
    planned = runs(*(number * MINUTE_MS for number in range(1, 9)))
    times = [number * MINUTE_MS for number in range(1, 9) if number != 3]
    (found,) = compared([planned], *times, tolerance_ms=MINUTE_MS).differences
    assert (found.missing_ms, found.extra_ms) == ((3 * MINUTE_MS,), ())


def test_an_extra_run_is_told_at_its_own_time() -> None:
    """Were the window as wide before a run as after it, the extra one would stand for the next run, and the last entry were extra."""
    planned = runs(*(number * MINUTE_MS for number in range(1, 9)))
    times = [*(number * MINUTE_MS + 1_000 for number in range(1, 9)), 3 * MINUTE_MS - 20_000]
    (found,) = compared([planned], *times, tolerance_ms=MINUTE_MS).differences
    assert (found.missing_ms, found.extra_ms) == ((), (3 * MINUTE_MS - 20_000,))


def test_what_lies_outside_of_the_range_is_matched_and_not_counted() -> None:
    (found,) = compared([runs(999_900, 1_000_100, 2_000_000)], 999_950, 999_990, to_ms=1_000_000).differences
    assert (found.matched, found.missing_ms, found.extra_ms) == (1, (), ())


def test_slack_is_added_after_the_run() -> None:
    (found,) = compared([runs(0, slack_ms=900_000)], 850_000).differences
    assert found.agrees and found.matched == 1


def test_one_command_at_two_times_shares_its_entries() -> None:
    first, second = runs(60_000), runs(180_000, name="a-2")
    second = PlannedRuns(second.name, frozenset(("a", "a-2")), second.runs_ms)
    found = compared([first, second], 60_000, 180_000, 300_000)
    assert [difference.matched for difference in found.differences] == [1, 1]
    assert [difference.extra_ms for difference in found.differences] == [(300_000,), ()]


def test_users_tell_equal_commands_apart_and_strangers_are_listed() -> None:
    planned = [runs(60_000, user="ada"), PlannedRuns("b", frozenset(("a",)), (120_000,), 0, "bob")]
    entries = [LogEntry("a", 60_000, "ada"), LogEntry("a", 120_000, "ada"), LogEntry("a", 5, "root"), LogEntry("z", 7), LogEntry("z", -1)]
    found = compare(planned, entries, from_ms=0, to_ms=200_000, tolerance_ms=1_000)
    assert [(one.matched, one.missing_ms, one.extra_ms) for one in found.differences] == [(1, (), (120_000,)), (0, (120_000,), ())]
    assert found.unplanned == {"a": 1, "z": 1} and not found.agrees


times = st.lists(st.integers(0, 60), max_size=6)


@given(times, times, st.integers(0, 8), st.integers(0, 6))
def test_as_many_match_as_can(planned: list[int], logged: list[int], tolerance: int, slack: int) -> None:
    """Against every way of pairing, tried one after the other."""

    def fits(run: int, entry: int) -> bool:
        return run - min(tolerance, 5_000) <= entry < run + slack + max(tolerance, 1)

    def best(left: tuple[int, ...], entries: tuple[int, ...]) -> int:
        if not left:
            return 0
        choices = [best(left[1:], entries)]
        for index, entry in enumerate(entries):
            if fits(left[0], entry):
                choices.append(1 + best(left[1:], entries[:index] + entries[index + 1 :]))
        return max(choices)

    (found,) = compared([runs(*sorted(planned), slack_ms=slack)], *logged, tolerance_ms=tolerance).differences
    assert found.matched == best(tuple(planned), tuple(logged))
    assert found.matched + len(found.missing_ms) == len(planned)
    assert found.matched + len(found.extra_ms) == len(logged)


# A whole week


def test_a_week_of_cron_against_its_syslog() -> None:
    """The plan, written and read back, agrees with the log of a cron that did what it says; and finds what it did not do."""
    crontab = "CRON_TZ=Europe/Berlin\n30 4 * * 1-5 /bin/report\n0 */6 * * * cd /srv && ./sweep  --all\n0 12 * * * /bin/report\n"
    text = json.dumps(read_crontab(crontab, the_settings()).document())
    schedules = read_plan(text, "plan.json")
    days = [f"2026-11-{day:02}" for day in range(2, 9)]
    log = [(f"{day}T03:30:01Z", "/bin/report") for day in days[:5]] + [(f"{day}T11:00:01Z", "/bin/report") for day in days]
    log += [(f"{day}T{hour:02}:00:02Z", "cd /srv && ./sweep --all") for day in days for hour in (5, 11, 17, 23)]
    lines = [f"{time} h CRON[1]: (ada) CMD ({command})" for time, command in sorted(log)]

    def difference(lines: list[str]) -> Comparison:
        entries = read_log("\n".join(lines), zone=UTC_ZONE, until_ms=NOW_MS)
        bounds = {"from_ms": at("2026-11-02T00:00:00Z"), "to_ms": at("2026-11-09T00:00:00Z"), "tolerance_ms": 30_000}
        return compare(planned_runs(schedules, entries, ZONES, **bounds), entries, **bounds)

    assert difference(lines).agrees
    found = difference(lines[:7] + lines[8:])
    assert not found.agrees and sum(len(one.missing_ms) for one in found.differences) == 1


def test_an_interval_without_an_anchor_takes_its_phase_from_the_log() -> None:
    beat = json.dumps({"a b": {"task": "t", "schedule": 600}})
    schedules = read_plan(json.dumps(read_celery_beat(beat, the_settings()).document()), "p")
    entries = [LogEntry("a b", at(f"2026-11-05T0{hour}:{minute}7:13Z")) for hour in (1, 2) for minute in range(6)]
    bounds = {"from_ms": at("2026-11-05T01:00:00Z"), "to_ms": at("2026-11-05T03:00:00Z"), "tolerance_ms": 5_000}
    found = compare(planned_runs(schedules, entries, ZONES, **bounds), entries, **bounds)
    assert found.agrees and found.differences[0].matched == 12
    assert planned_runs(schedules, [], ZONES, **bounds)[0].runs_ms == ()


def test_a_paused_schedule_and_one_outside_of_its_bounds_plan_nothing() -> None:
    rules = [
        {"Name": "off", "ScheduleExpression": "rate(5 minutes)", "State": "DISABLED", "CreationDate": "2026-01-01T00:00:00Z"},
        {
            "Name": "later",
            "ScheduleExpression": "cron(0 * * * ? *)",
            "StartDate": "2026-11-05T02:00:00Z",
            "EndDate": "2026-11-05T04:00:00Z",
        },
    ]
    earlier = ImportSettings(ZONES, at("2026-11-01T00:00:00Z"))
    plan = read_plan(json.dumps(read_eventbridge(json.dumps(rules), earlier).document()), "p")
    bounds = {"from_ms": at("2026-11-05T00:00:00Z"), "to_ms": at("2026-11-06T00:00:00Z"), "tolerance_ms": 0}
    found = planned_runs(plan, [], ZONES, **bounds)
    assert [[instant_text(at_ms) for at_ms in one.runs_ms] for one in found] == [[], ["2026-11-05T02:00:00Z", "2026-11-05T03:00:00Z"]]


def test_too_many_runs_are_refused() -> None:
    schedules = read_crontab("* * * * * x\n", the_settings()).schedules
    with pytest.raises(InvalidRequest, match="more than 1000000 runs between"):
        planned_runs(schedules, [], ZONES, from_ms=0, to_ms=NOW_MS, tolerance_ms=0)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "plan.json is not JSON"),
        ("[]", "plan.json is not a plan: it has no list `schedules`"),
        ('{"schedules": [{"name": "a"}]}', "plan.json, schedule 1 is not readable (spec is missing)"),
        ('{"schedules": [{"name": "a", "spec": {"job_template": {}}}]}', "neither cron nor every_s, or both"),
        ('{"schedules": [{"name": "a", "spec": {"job_template": {}, "every_s": 1, "anchor_at": "soon"}}]}', "schedule 1 is not readable"),
        ('{"schedules": [7]}', "schedule 1 is not readable"),
    ],
)
def test_a_plan_that_is_none_is_named(text: str, what: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_plan(text, "plan.json")
    assert what in refused.value.detail


def test_a_plan_with_a_cron_that_is_none_is_named() -> None:
    (schedule,) = read_plan('{"schedules": [{"name": "a", "spec": {"job_template": {}, "cron": "x"}}]}', "p")
    with pytest.raises(InvalidRequest, match="a: "):
        planned_runs([schedule], [], ZONES, from_ms=0, to_ms=1, tolerance_ms=0)
