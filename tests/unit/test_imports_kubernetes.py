"""CronJobs: the fields, the star rule of their cron library, and YAML that is none."""

from __future__ import annotations

import json
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from imports_reference import only, ours, refusal, sunday_0, the_settings, theirs

from wheelsched.core.errors import InvalidRequest
from wheelsched.imports import PlannedSchedule, read_kubernetes

TWO = """\
apiVersion: batch/v1
kind: CronJob
metadata:
  name: invoices
  namespace: billing
  labels:
    app.kubernetes.io/name: invoices
    team: money
spec:
  schedule: "30 6 1 * *"
  timeZone: Europe/Berlin
  concurrencyPolicy: Forbid
  startingDeadlineSeconds: 600
  successfulJobsHistoryLimit: 3
  suspend: true
  jobTemplate:
    spec:
      backoffLimit: 2
      activeDeadlineSeconds: 1800
      template:
        spec:
          restartPolicy: OnFailure
          serviceAccountName: billing
          containers:
          - name: main
            image: registry.example.com/billing:2.7
            command: [python, -m, billing.invoices]
            args: ["--month", "last"]
            env:
            - {name: MODE, value: live}
            - {name: PASSWORD, valueFrom: {secretKeyRef: {name: db, key: password}}}
---
---
apiVersion: v1
kind: List
items:
- apiVersion: v1
  kind: ConfigMap
  metadata: {name: settings}
- apiVersion: batch/v1
  kind: CronJob
  metadata: {name: sweep}
  spec:
    schedule: "*/5 * * * *"
    concurrencyPolicy: Replace
    jobTemplate:
      spec:
        template:
          spec:
            containers: [{name: a, image: a:1}, {name: b, image: b:1}]
"""


def test_documents_and_lists_are_read_with_all_their_fields() -> None:
    plan = read_kubernetes(TWO, the_settings())
    assert not plan.problems
    invoices, sweep = plan.schedules
    assert (invoices.name, invoices.source_name) == ("billing.invoices", "billing/invoices")
    assert invoices.place == "document 1, line 1 (billing/invoices)"
    assert invoices.spec(shadow=True) == {
        "cron": "30 6 1 * *",
        "time_zone": "Europe/Berlin",
        "missed_runs": {"policy": "run_latest", "starting_deadline_s": 600},
        "overlap": "forbid",
        "paused": True,
        "shadow": True,
        "job_template": {
            "queue": "kubernetes",
            "payload": {
                "cronjob": "invoices",
                "namespace": "billing",
                "container": "main",
                "image": "registry.example.com/billing:2.7",
                "command": ["python", "-m", "billing.invoices"],
                "args": ["--month", "last"],
                "env": {"MODE": "live"},
            },
            "retry": {"max_attempts": 3, "initial_backoff_s": 10, "max_backoff_s": 360},
            "timeout_s": 1800,
            "labels": {"cronjob": "invoices", "namespace": "billing", "app.kubernetes.io/name": "invoices", "team": "money"},
        },
    }
    assert any("PASSWORD" in text for text in invoices.warnings)
    assert any("serviceAccountName" in text for text in invoices.warnings)
    assert sweep.place == "document 3, item 2, line 40 (sweep)"
    assert (sweep.overlap, sweep.missed_runs, sweep.paused) == ("replace", None, False)
    assert [container["image"] for container in sweep.job_template["payload"]["containers"]] == ["a:1", "b:1"]
    assert sweep.job_template["retry"]["max_attempts"] == 7 and sweep.job_template["timeout_s"] == 43_200
    assert [note.what for note in plan.notes if "ConfigMap" in note.what] == ["kind 'ConfigMap' is left out"]
    assert any("kube-controller-manager" in note.what for note in plan.notes)


def a_cronjob(schedule: str = "0 5 * * *", *, job: dict[str, Any] | None = None, name: str = "x", **spec: Any) -> dict[str, Any]:
    template = {"spec": {"containers": [{"image": "x:1"}]}}
    return {
        "kind": "CronJob",
        "metadata": {"name": name},
        "spec": {"schedule": schedule, **spec, "jobTemplate": {"spec": {"template": template, **(job or {})}}},
    }


def planned(schedule: str = "0 5 * * *", **spec: Any) -> PlannedSchedule:
    return only(read_kubernetes(json.dumps(a_cronjob(schedule, **spec)), the_settings()))


def refused(schedule: str = "0 5 * * *", **spec: Any) -> str:
    return refusal(read_kubernetes(json.dumps(a_cronjob(schedule, **spec)), the_settings()))


@pytest.mark.parametrize("prefix", ["TZ=Asia/Tokyo ", "CRON_TZ=Asia/Tokyo  "])
def test_a_zone_within_the_schedule_is_taken_and_told(prefix: str) -> None:
    schedule = planned(prefix + "0 5 * * *")
    assert (schedule.cron, schedule.time_zone) == ("0 5 * * *", "Asia/Tokyo")
    assert any("was written in the schedule" in text for text in schedule.warnings)
    assert "leave one of them out" in refused(prefix + "0 5 * * *", timeZone="UTC")


def test_intervals_and_macros() -> None:
    schedule = planned("@every 1h30m")
    assert (schedule.cron, schedule.spec()["every_s"]) == (None, 5_400)
    assert "time_zone" not in schedule.spec()
    assert planned("@every 2m0.9s").every_s == 120
    assert planned("@daily").cron == "@daily"
    assert "not a duration" in refused("@every soon")
    assert "@reboot' is not a descriptor" in refused("@reboot")


@pytest.mark.parametrize(
    ("schedule", "spec", "what"),
    [
        ("0 5 * * *", {"concurrencyPolicy": "Queue"}, "'Queue' is unknown; there are Allow, Forbid, Replace"),
        ("0 5 * * *", {"suspend": "yes"}, "spec.suspend is 'yes', not true or false"),
        ("0 5 * * *", {"startingDeadlineSeconds": -1}, "startingDeadlineSeconds is -1, not a whole number"),
        ("0 5 * * *", {"timeZone": "Berlin"}, "time zone 'Berlin' is not a name"),
        ("0 5 * * *", {"job": {"template": {"spec": {}}}}, "containers is missing"),
        ("0 5 * * *", {"job": {"activeDeadlineSeconds": 0}}, "activeDeadlineSeconds is 0"),
        ("0 5 * *", {}, "has 4 of five fields"),
        ("0 25 * * *", {}, "hour 25 is out of range 0-23"),
        ("H 5 * * *", {}, "minute 'H' is not cron's"),
        ("0 5 * * 5-1", {}, "runs backwards"),
        ("", {}, "spec.schedule is missing"),
    ],
)
def test_what_cannot_be_taken_over_names_the_cronjob_and_the_member(schedule: str, spec: dict[str, Any], what: str) -> None:
    told = refused(schedule, **spec)
    assert told.startswith("document 1, line 1 (x): ") and what in told, told


def test_limits_above_ours_are_told() -> None:
    schedule = planned(job={"backoffLimit": 500, "activeDeadlineSeconds": 90_000, "completions": 3})
    assert schedule.job_template["retry"]["max_attempts"] == 100 and schedule.job_template["timeout_s"] == 43_200
    told = " ".join(schedule.warnings)
    assert "500 retries become 100 attempts" in told and "90000 s becomes 43200 s" in told and "completions 3" in told


def test_a_name_twice_is_a_problem_of_the_second() -> None:
    plan = read_kubernetes(json.dumps({"kind": "List", "items": [a_cronjob(), a_cronjob("1 5 * * *")]}), the_settings())
    assert [schedule.cron for schedule in plan.schedules] == ["0 5 * * *"]
    assert "the name x is taken by document 1, item 1" in str(plan.problems[0])


def test_a_clock_change_that_kubernetes_treats_otherwise_is_told() -> None:
    assert any("Kubernetes skips" in text for text in planned("30 2 * * *", timeZone="Europe/Berlin").warnings)
    assert not any("Kubernetes skips" in text for text in planned("30 5 * * *", timeZone="Europe/Berlin").warnings)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("kind: CronJob\n  x: [", "line 2"),
        ("kind: CronJob\nspec:\n  schedule: @daily\n", "quote what begins with @ or *"),
        ("kind: CronJob\nspec:\n  schedule: */5 * * * *\n", "line 3, column 14: not YAML"),
        ("x: 2026-02-31\n", "a value that is none"),
        ("kind: !!python/object/apply:os.system [id]\n", "not YAML"),
        ("a: " + "[" * 5_000, "YAML"),
    ],
)
def test_what_is_no_yaml_is_told_with_its_line(text: str, what: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_kubernetes(text, the_settings())
    assert what in refused.value.detail


def test_other_shapes_are_problems_or_notes() -> None:
    assert "the document is [1], not an object" in refusal(read_kubernetes("[1]\n", the_settings()))
    assert read_kubernetes("", the_settings()).document()["schedules"] == []
    assert read_kubernetes("kind: Pod\n", the_settings()).notes


def day_items(low: int, high: int, names: tuple[str, ...] = ()) -> st.SearchStrategy[str]:
    number = st.integers(low, high)
    values = number.map(str) | (st.sampled_from(names) if names else st.nothing())
    ranges = st.tuples(number, number).map(lambda pair: f"{min(pair)}-{max(pair)}")
    stars = st.sampled_from(["*", "?"])
    return st.one_of(values, ranges, stars, st.builds("{}/{}".format, number.map(str) | ranges | stars, st.integers(1, 9)))


DAYS = ("SUN", "mon", "TUE", "wed", "THU", "Fri", "SAT")


def robfig(text: str, low: int, high: int, names: tuple[str, ...] = ()) -> tuple[set[int], bool]:
    """(values, star bit) of a day field, as the documentation of robfig/cron 3 has it."""
    values: set[int] = set()
    star = False
    for item in text.split(","):
        base, _, step = item.partition("/")
        first, _, last = base.partition("-")
        if first in ("*", "?"):
            begin, end = low, high
            star = star or int(step or 1) == 1
        else:
            begin = [name.lower() for name in names].index(first.lower()) if first.isalpha() else int(first)
            end = int(last) if last else high if step else begin
        values |= set(range(begin, end + 1, int(step or 1)))
    return values, star


@given(
    day=st.lists(day_items(1, 31), min_size=1, max_size=3).map(",".join),
    weekday=st.lists(day_items(0, 6, DAYS), min_size=1, max_size=3).map(",".join),
    time=st.sampled_from([("30", "4"), ("*/20", "?"), ("5/25", "8-18/5")]),
)
def test_the_days_are_those_of_its_own_library(day: str, weekday: str, time: tuple[str, str]) -> None:
    days, day_star = robfig(day, 1, 31)
    weekdays, weekday_star = robfig(weekday, 0, 6, DAYS)
    minutes, _ = robfig(time[0], 0, 59)
    hours, _ = robfig(time[1], 0, 23)

    def matches(one: date) -> bool:
        found = (one.day in days, sunday_0(one) in weekdays)
        return all(found) if day_star or weekday_star else any(found)

    schedule = planned(f"{time[0]} {time[1]} {day} * {weekday}")
    assert ours(schedule) == theirs(minutes, hours, matches), schedule.cron
