"""EventBridge: weekdays from Sunday = 1, years as bounds, rates, and what the AWS CLI prints."""

from __future__ import annotations

import json
from datetime import date, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from imports_reference import month_length, only, ours, refusal, the_settings, theirs

from wheelsched.core.errors import InvalidRequest
from wheelsched.imports import PlannedSchedule, read_eventbridge

LAMBDA = "arn:aws:lambda:eu-central-1:123456789012:function:nightly-report:live"
SCHEDULE = {
    "ActionAfterCompletion": "DELETE",
    "Arn": "arn:aws:scheduler:eu-central-1:123456789012:schedule/billing/nightly",
    "CreationDate": "2026-01-02T10:20:30.456000+01:00",
    "Description": "",
    "EndDate": "2027-06-30T22:00:00+00:00",
    "FlexibleTimeWindow": {"MaximumWindowInMinutes": 15, "Mode": "FLEXIBLE"},
    "GroupName": "billing",
    "LastModificationDate": "2026-01-02T10:20:30.456000+01:00",
    "Name": "nightly",
    "ScheduleExpression": "cron(30 2 ? * 2-6 *)",
    "ScheduleExpressionTimezone": "Europe/Berlin",
    "StartDate": "2026-12-01T00:00:00+01:00",
    "State": "ENABLED",
    "Target": {
        "Arn": LAMBDA,
        "DeadLetterConfig": {"Arn": "arn:aws:sqs:eu-central-1:123456789012:dead"},
        "EcsParameters": {"TaskCount": 1},
        "Input": '{"day": "yesterday", "n": 1}',
        "RetryPolicy": {"MaximumEventAgeInSeconds": 3600, "MaximumRetryAttempts": 185},
        "RoleArn": "arn:aws:iam::123456789012:role/scheduler",
    },
}


def test_a_schedule_is_read_with_all_its_members() -> None:
    schedule = only(read_eventbridge(json.dumps(SCHEDULE), the_settings(prefix="aws-")))
    assert (schedule.name, schedule.source_name, schedule.place) == ("aws-billing.nightly", "billing/nightly", "line 1 (nightly)")
    assert schedule.spec() == {
        "cron": "30 2 * * MON-FRI",
        "time_zone": "Europe/Berlin",
        "start_at": "2026-11-30T23:00:00Z",
        "end_at": "2027-06-30T22:00:00Z",
        "job_template": {
            "queue": "nightly-report",
            "payload": {"target": LAMBDA, "input": {"day": "yesterday", "n": 1}},
            "retry": {"max_attempts": 100},
            "start_deadline_s": 3600,
            "timing": {"class": "flexible", "window_s": 900},
        },
    }
    told = " ".join(schedule.warnings)
    assert all(text in told for text in ("185 retries", "DELETE", "DeadLetterConfig", "EcsParameters", "EventAge"))
    assert schedule.document()["next_runs"][0] == "2026-12-01T01:30:00Z"


def a_rule(expression: str = "cron(0 8 * * ? *)", **given: Any) -> dict[str, Any]:
    return {"Name": "r", "ScheduleExpression": expression, "State": "ENABLED", "EventBusName": "default", **given}


def planned(expression: str = "cron(0 8 * * ? *)", **given: Any) -> PlannedSchedule:
    return only(read_eventbridge(json.dumps(a_rule(expression, **given)), the_settings()))


def refused(expression: str | None = "cron(0 8 * * ? *)", **given: Any) -> str:
    return refusal(read_eventbridge(json.dumps({**a_rule(), "ScheduleExpression": expression, **given}), the_settings()))


def test_rules_lists_and_documents_one_after_the_other() -> None:
    rules = {"Rules": [
        a_rule("rate(5 minutes)", Name="a", State="DISABLED"),
        {"Name": "b", "EventPattern": "{}", "State": "ENABLED"},
        a_rule(Name="m", ManagedBy="autoscaling.amazonaws.com"),
        a_rule(Name="c", State="ENABLED_WITH_ALL_CLOUDTRAIL_MANAGEMENT_EVENTS"),
    ]}  # fmt: skip
    text = json.dumps(rules) + "\n" + json.dumps([a_rule(Name="d")], indent=1) + json.dumps(SCHEDULE)
    plan = read_eventbridge(text, the_settings(zone="Asia/Tokyo"))
    assert [schedule.name for schedule in plan.schedules] == ["a", "c", "d", "billing.nightly"]
    assert (plan.schedules[0].every_s, plan.schedules[0].paused, plan.schedules[1].paused) == (300, True, False)
    assert plan.schedules[1].time_zone == "UTC"  # rules are, whatever the user's default
    assert not plan.problems
    assert [note.what for note in plan.notes] == [
        "left out: a rule on events has no schedule",
        "left out: the rule is managed by autoscaling.amazonaws.com",
    ]


def test_each_target_of_a_rule_has_a_schedule() -> None:
    targets = [{"Id": "one", "Arn": "arn:aws:sqs:us-east-1:1:jobs", "Input": "not json"}, {"Id": "2", "Arn": LAMBDA}]
    plan = read_eventbridge(json.dumps(a_rule(Targets=targets)), the_settings())
    assert [(schedule.name, schedule.job_template["queue"]) for schedule in plan.schedules] == [
        ("r.one", "jobs"),
        ("r.2", "nightly-report"),
    ]
    assert plan.schedules[0].job_template["payload"] == {"target": "arn:aws:sqs:us-east-1:1:jobs", "input": "not json"}
    assert planned(Targets=targets[:1]).name == "r"


@pytest.mark.parametrize(
    ("arn", "queue"),
    [
        ("arn:aws:lambda:eu-central-1:1:function:report", "report"),
        ("arn:aws:states:eu-central-1:1:stateMachine:Flow", "Flow"),
        ("arn:aws:events:eu-central-1:1:event-bus/orders", "orders"),
        ("arn:aws:ecs:eu-central-1:1:cluster/main", "main"),
        ("arn:aws:scheduler:::aws-sdk:sqs:sendMessage", "sqs-sendMessage"),
        ("something", "eventbridge"),
    ],
)
def test_the_queue_is_the_targets_name(arn: str, queue: str) -> None:
    assert planned(Target={"Arn": arn}, FlexibleTimeWindow={"Mode": "OFF"}).job_template["queue"] == queue


@pytest.mark.parametrize(
    ("expression", "cron"),
    [
        ("cron(0 10 * * ? *)", "0 10 * * *"),
        ("cron(15 12 * * ? *)", "15 12 * * *"),
        ("cron(0 18 ? * MON-FRI *)", "0 18 * * MON-FRI"),
        ("cron(0 8 1 * ? *)", "0 8 1 * *"),
        ("cron(0/15 * * * ? *)", "0/15 * * * *"),
        ("cron(0/5 8-17 ? * 2-6 *)", "0/5 8-17 * * MON-FRI"),
        ("cron(0/30 20-2 ? * MON-FRI *)", None),
        ("cron(15 10 ? * 6L *)", "15 10 * * FRIL"),
        ("cron(0 9 ? * 2#1 *)", "0 9 * * MON#1"),
        ("cron(0 9 ? * tue#5 *)", "0 9 * * TUE#5"),
        ("cron(0 9 ? * L *)", "0 9 * * SAT"),
        ("cron(0 9 ? * 7-1 *)", "0 9 * * SUN,SAT"),
        ("cron(0 9 ? * SUN,3,5-6 *)", "0 9 * * SUN,TUE,THU-FRI"),
        ("cron(0 9 L * ? *)", "0 9 L * *"),
        ("cron(0 9 L-2,15W,LW jan-mar ? *)", "0 9 L-2,15W,LW 1-3 *"),
        ("cron(0 9 */2 */3 ? *)", "0 9 */2 */3 *"),
        ("cron(0 9 ? * * *)", "0 9 * * *"),
        (" cron( 0  9 * * ? * ) ", "0 9 * * *"),
    ],
)
def test_expressions(expression: str, cron: str | None) -> None:
    if cron is None:
        assert "runs backwards; write 20-23,0-2" in refused(expression)
    else:
        assert planned(expression).cron == cron


@pytest.mark.parametrize(
    ("expression", "what"),
    [
        ("cron(0 8 1 * MON *)", "has neither day field '?'"),
        ("cron(0 8 * * * *)", "has neither day field '?'"),
        ("cron(0 8 * * ?)", "has 5 of six fields"),
        ("cron(0 24 * * ? *)", "hour '24': 24 is out of EventBridge's range 0-23"),
        ("cron(0 8 ? * 0 *)", "day of week '0': 0 is out of EventBridge's range 1-7"),
        ("cron(0 8 ? * MON#6 *)", "is not a value"),
        ("cron(0 H * * ? *)", "'H' is not a value"),
        ("cron(? 8 * * ? *)", "which the day fields alone may be"),
        ("cron(0 8 31 2 ? *)", "never comes"),
        ("cron(0/0 8 * * ? *)", "the step '0'"),
        ("cron(0, 8 * * ? *)", "empty item"),
        ("cron(0 8 * * ? 2020)", "it ended at 2021-01-01T00:00:00Z"),
        ("cron(0 8 * * ? 2027,2029)", "year '2027,2029' has gaps"),
        ("cron(0 8 * * ? 2026/2)", "has gaps"),
        ("cron(0 8 * * ? 3000)", "not within 1970 to 2199"),
        ("cron(0 8 * * ? soon)", "year 'soon' is not one"),
        ("rate(5 weeks)", "rate(5 weeks) is not a rate"),
        ("rate(0 minutes)", "is not a rate"),
        ("rate(400 days)", "every_s would be 34560000, it is 1 to"),
        ("at(2026-12-20T13:00:00)", "create a job: wheelsched jobs create QUEUE --at 2026-12-20T13:00:00Z"),
        ("at(soon)", "a time that is not one"),
        ("every 5 minutes", "there are cron(...), rate(...) and at(...)"),
        (None, "aws scheduler get-schedule --name r --group-name default"),
    ],
)
def test_what_cannot_be_taken_over_names_the_schedule(expression: str | None, what: str) -> None:
    told = refused(expression)
    assert told.startswith("line 1 (r): ") and what in told, told


def test_other_members_that_are_wrong_are_named() -> None:
    assert "State is 'PAUSED'" in refused(State="PAUSED")
    assert "StartDate is 'soon'" in refused(StartDate="soon")
    assert "ScheduleExpressionTimezone: time zone 'Mars' is not a name" in refused(ScheduleExpressionTimezone="Mars")
    assert "MaximumWindowInMinutes is 2000" in refused(FlexibleTimeWindow={"Mode": "FLEXIBLE", "MaximumWindowInMinutes": 2000})
    assert "Target.Arn is missing" in refused(Target={})
    assert "Name is missing" in refusal(read_eventbridge("{}", the_settings()))
    with pytest.raises(InvalidRequest, match="line 3, column 1: not JSON"):
        read_eventbridge('{"Name": 1\n\n', the_settings())


def test_years_become_bounds_of_the_zones_own_year() -> None:
    new_york = {"ScheduleExpressionTimezone": "America/New_York"}
    spec = planned("cron(0 8 * * ? 2027)", **new_york).spec()
    assert (spec["start_at"], spec["end_at"]) == ("2027-01-01T05:00:00Z", "2028-01-01T05:00:00Z")
    spec = planned("cron(0 8 * * ? 2026-2028)", StartDate="2027-02-01T00:00:00Z", EndDate="2030-01-01T00:00:00Z").spec()
    assert (spec["start_at"], spec["end_at"]) == ("2027-02-01T00:00:00Z", "2029-01-01T00:00:00Z")
    spec = planned("cron(0 8 * * ? 2027/1)").spec()
    assert spec["start_at"] == "2027-01-01T00:00:00Z" and "end_at" not in spec
    assert not {"start_at", "end_at"} & planned("cron(0 8 * * ? */1)").spec().keys()


def test_a_rate_counts_from_where_aws_does_as_far_as_is_known() -> None:
    assert planned("rate(1 hour)").spec().get("anchor_at") is None
    spec = planned("rate(2 days)", CreationDate=1_767_345_630.5).spec()
    assert (spec["every_s"], spec["anchor_at"]) == (172_800, "2026-01-02T09:20:30.500Z")
    spec = planned("rate(2 days)", CreationDate="2026-01-01T00:00:00+00:00", StartDate="2026-12-01T03:00:00+00:00").spec()
    assert spec["anchor_at"] == spec["start_at"] == "2026-12-01T03:00:00Z"


def test_a_clock_change_that_eventbridge_treats_otherwise_is_told() -> None:
    berlin = {"ScheduleExpressionTimezone": "Europe/Berlin"}
    assert any("EventBridge skips" in text for text in planned("cron(30 2 * * ? *)", **berlin).warnings)
    assert not any("EventBridge skips" in text for text in planned("cron(30 5 * * ? *)", **berlin).warnings)


# The instants


DAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")


def weekday_1(day: date) -> int:
    """The weekday as EventBridge counts it, Sunday = 1."""
    return day.isoweekday() % 7 + 1


def plain(item: str, low: int, high: int, names: tuple[str, ...] = ()) -> set[int]:
    def number(word: str) -> int:
        return names.index(word) + 1 if word in names else int(word)

    base, _, step = item.partition("/")
    first, _, last = base.partition("-")
    begin = low if first == "*" else number(first)
    end = number(last) if last else high if step or first == "*" else begin
    return set(range(begin, end + 1, int(step or 1)))


def is_workday(day: date) -> bool:
    return 2 <= weekday_1(day) <= 6


def nearest(wanted: int, day: date) -> date | None:
    """`15W`: the day itself, or the nearest workday of the same month."""
    if wanted > month_length(day):
        return None
    month = [day.replace(day=number) for number in range(1, month_length(day) + 1)]
    return min(filter(is_workday, month), key=lambda one: abs(one.day - wanted))


def day_matches(item: str, day: date) -> bool:
    last = month_length(day)
    if item == "LW":
        return is_workday(day) and not any(is_workday(day + timedelta(days=number)) for number in range(1, last - day.day + 1))
    if item.startswith("L"):
        return day.day == last - int(item[2:] or 0)
    if item.endswith("W"):
        return day == nearest(int(item[:-1]), day)
    return day.day in plain(item, 1, 31)


def weekday_matches(item: str, day: date) -> bool:
    word, _, nth = item.partition("#")
    if nth:
        return weekday_1(day) in plain(word, 1, 7, DAYS) and (day.day - 1) // 7 + 1 == int(nth)
    if item == "L":
        return weekday_1(day) == 7
    if item.endswith("L"):
        return weekday_1(day) in plain(item[:-1], 1, 7, DAYS) and day.day + 7 > month_length(day)
    return weekday_1(day) in plain(item, 1, 7, DAYS)


def plain_items(low: int, high: int, names: tuple[str, ...] = ()) -> st.SearchStrategy[str]:
    number = st.integers(low, high)
    values = number.map(str) | (st.sampled_from(names) if names else st.nothing())
    ranges = st.tuples(number, number).map(lambda pair: f"{min(pair)}-{max(pair)}")
    return st.one_of(values, ranges, st.just("*"), st.builds("{}/{}".format, number.map(str) | ranges | st.just("*"), st.integers(1, 30)))


day_rules = st.one_of(st.sampled_from(["L", "LW"]), st.integers(1, 9).map("L-{}".format), st.integers(1, 31).map("{}W".format))
weekday_rules = st.one_of(
    st.builds("{}#{}".format, st.integers(1, 7) | st.sampled_from(DAYS), st.integers(1, 5)),
    st.builds("{}L".format, st.integers(1, 7) | st.sampled_from(DAYS)),
    st.just("L"),
)


def some(items: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(items, min_size=1, max_size=3).map(",".join)


@given(minute=some(plain_items(0, 59)), hour=some(plain_items(0, 23)))
def test_the_times_are_eventbridges(minute: str, hour: str) -> None:
    minutes = {value for item in minute.split(",") for value in plain(item, 0, 59)}
    hours = {value for item in hour.split(",") for value in plain(item, 0, 23)}
    day = date(2028, 3, 31)
    assert ours(planned(f"cron({minute} {hour} * * ? *)"), day) == theirs(minutes, hours, lambda one: True, day)


@given(
    month=st.just("*") | some(plain_items(1, 12)), day=some(plain_items(1, 31) | day_rules),
    weekday=some(plain_items(1, 7, DAYS) | weekday_rules), by_day=st.booleans(),
)  # fmt: skip
def test_the_days_are_eventbridges(month: str, day: str, weekday: str, by_day: bool) -> None:
    days = f"{day} {month} ?" if by_day else f"? {month} {weekday}"
    plan = read_eventbridge(json.dumps(a_rule(f"cron(0/30 12 {days} *)")), the_settings())
    if plan.problems:
        assert "never comes" in plan.problems[0].what
        return

    def matches(one: date) -> bool:
        if one.month not in {value for item in month.split(",") for value in plain(item, 1, 12)}:
            return False
        if by_day:
            return any(day_matches(item, one) for item in day.split(","))
        return any(weekday_matches(item, one) for item in weekday.split(","))

    assert ours(only(plan)) == theirs({0, 30}, {12}, matches), plan.schedules[0].cron


MEMBERS = ["Name", "ScheduleExpression", "Target", "State", "Rules", "Targets", "RetryPolicy"]
leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
documents = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(MEMBERS), inner))


@given(documents)
def test_any_document_is_read_or_refused(document: Any) -> None:
    text = json.dumps(document)
    assert read_eventbridge(text, the_settings()) == read_eventbridge(text, the_settings())
