"""Independent readings of other schedulers' rules, written from their documentation and as plainly as can be: a set of values for
each field, and a test of each day. UTC only. The importers' tests compare instants with them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import UTC, date, datetime, timedelta

from wheelsched.cron import ZoneData, between, parse
from wheelsched.imports import ImportSettings, Plan, PlannedSchedule

ZONES = ZoneData.of_package()
# 2026-11-05T09:00:00Z, a Thursday.
NOW_MS = 1_793_869_200_000
# Short and long months, a leap day: 2027-12-01 to 2028-04-01.
FIRST_DAY, LAST_DAY = date(2027, 12, 1), date(2028, 4, 1)


def the_settings(**given: object) -> ImportSettings:
    return ImportSettings(ZONES, NOW_MS, **given)  # type: ignore[arg-type]


def only(plan: Plan) -> PlannedSchedule:
    """The plan's one schedule; its problems are the message if there is none."""
    assert len(plan.schedules) == 1 and not plan.problems, [str(problem) for problem in plan.problems]
    return plan.schedules[0]


def refusal(plan: Plan) -> str:
    """What the plan's one problem says."""
    assert not plan.schedules, [schedule.when for schedule in plan.schedules]
    (problem,) = plan.problems
    return str(problem)


def day_ms(day: date) -> int:
    return int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) * 1000


def ours(schedule: PlannedSchedule, first_day: date = FIRST_DAY) -> list[int]:
    """The instants of a planned cron schedule over the months of the comparison."""
    assert schedule.cron is not None
    expression = parse(schedule.cron, name=schedule.name)
    return list(between(expression, ZONES.zone("UTC"), day_ms(first_day), day_ms(LAST_DAY)))


def theirs(
    minutes: Collection[int], hours: Collection[int], matches: Callable[[date], bool], first_day: date = FIRST_DAY
) -> list[int]:  # fmt: skip
    """Each minute of each hour of each day that matches."""
    found = []
    day = first_day
    while day < LAST_DAY:
        if matches(day):
            found += [day_ms(day) + (hour * 60 + minute) * 60_000 for hour in sorted(hours) for minute in sorted(minutes)]
        day += timedelta(days=1)
    return found


def month_length(day: date) -> int:
    return ((day.replace(day=28) + timedelta(days=4)).replace(day=1) - timedelta(days=1)).day


def sunday_0(day: date) -> int:
    """The weekday, Sunday = 0."""
    return day.isoweekday() % 7
