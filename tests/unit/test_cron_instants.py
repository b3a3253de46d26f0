"""The instants of a schedule against a reference that looks at every minute, in all zones; and the cost of the rarest ones."""

from __future__ import annotations

import os
import random
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from types import FrameType
from typing import Any

import pytest
from cron_reference import DAY_MINUTES, Draw, Reference, Wall, daily_runs, tzif, zone_info, zone_info_of
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from wheelsched.core.errors import InvalidSchedule
from wheelsched.cron import (
    CronExpression,
    Kind,
    Zone,
    ZoneData,
    between,
    count_between,
    last_before,
    last_few,
    next_after,
    nominal_reading,
    parse,
    upcoming,
    warnings,
)
from wheelsched.cron.zones import build_zone

ZONES = ZoneData.of_package()
ZONE_NAMES = sorted(ZONES.names)
MINUTE_MS, DAY_MS = 60_000, 86_400_000
CYCLE_MS = 146_097 * DAY_MS
DATETIME_LAST_MS = 253_402_000_000_000  # 9999
FIRST_MS, LAST_MS = 0, 4_102_444_800_000  # 1970 to 2100
# The one clock that was not at whole minutes, until 8 January 1972; the rules leave those years open.
ODD_CLOCK, ODD_UNTIL_MS = "Africa/Monrovia", 64_000_000_000
# A new one each run; the failing test shows it, and setting it replays the run.
SEED = int(os.environ.get("WHEELSCHED_TEST_SEED") or random.SystemRandom().getrandbits(32))
EXPRESSIONS_A_WINDOW, WINDOW_MINUTES = 4, 3 * DAY_MINUTES
# Lines of Python executed by one search: measured 1,250 for the rarest, and each is some 50 ns.
LINES_MAX = 3_000
YEAR_LINES_MAX = 600

# A year as far as the eye can see without a run, and those in which many clock changes lie between two runs.
RARE = (
    "0 0 29 2 */7", "* * 29 2 */7", "30 2 29 2 */7", "*/59 */23 29 2 */6", "0 0 29 2 *", "0 0 29W 2 */5", "0 0 */32 2 SUN#1",
    "0 0 * 2 SUN#5", "* * * 2 SUN#5", "59 23 31 12 *", "* * 31 12 */7", "0 0 L-28 2 *", "30 1 29 2 *", "0 0 L 2 */4",
    "0 0 13 2 */5", "0,59 0,23 29 2 */7", "* 2 29 2 */7", "*/60 3 29 2 */3",
)  # fmt: skip


def utc_ms(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * 1000


def runs_of(text: str, zone: str, after: str, count: int) -> list[str]:
    expression = parse(text, name="nightly")
    return [
        f"{datetime.fromtimestamp(at_ms // 1000, UTC):%m-%d %H:%M}"
        for at_ms in upcoming(expression, ZONES.zone(zone), utc_ms(after), count)
    ]


# -- beside the reference ------------------------------------------------------------------------------------------------------


def window_near(zone: Zone, choose: Callable[[list[Any]], Any]) -> tuple[int, int]:
    """Three days of UTC minutes around a clock change of 1970 to 2100; anywhere one time in four, or if the zone has none."""
    from_ms = ODD_UNTIL_MS if zone_is_odd(zone) else FIRST_MS
    changes = [change.at_ms // MINUTE_MS for change in zone.transitions(from_ms, LAST_MS)]
    if not changes or choose(["change", "change", "change", "anywhere"]) == "anywhere":
        changes = list(range(from_ms // MINUTE_MS + WINDOW_MINUTES, LAST_MS // MINUTE_MS, 9_973))
    middle = choose(changes)
    return max(middle - WINDOW_MINUTES // 2, 0), middle + WINDOW_MINUTES // 2


def zone_is_odd(zone: Zone) -> bool:
    return zone.digest == ZONES.zone(ODD_CLOCK).digest


def check_window(zone: Zone, wall: Wall, text: str, probes: list[int]) -> int:
    """The runs in the window are the reference's: none skipped, none invented, from wherever one asks. Returns their number."""
    try:
        expression = parse(text)
    except InvalidSchedule as refusal:
        assert "never comes" in str(refusal)
        assert not wall.runs(Reference(text))
        return 0
    expected = [minute * MINUTE_MS for minute in wall.runs(Reference(text))]
    start_ms, end_ms = wall.start * MINUTE_MS, wall.end * MINUTE_MS
    assert list(between(expression, zone, start_ms, end_ms)) == expected
    assert last_few(expression, zone, end_ms, 7)[-len(expected[-7:]) or 7 :] == expected[-7:]
    # The second passage of a repeated hour is entered only by one who asks from inside it, so somebody always does.
    middle_ms = (start_ms + end_ms) // 2
    inside = [middle_ms + minutes * MINUTE_MS for minutes in (-30, 0, 7, 23, 29, 44, 59)]
    for probe_ms in [middle_ms - 1, *inside, *probes]:
        check_backwards(expression, zone, probe_ms, expected, start_ms, end_ms)
        found_ms = next_after(expression, zone, probe_ms)
        index = bisect_right(expected, probe_ms)
        if found_ms is None:
            assert index == len(expected)
            continue
        assert found_ms > probe_ms
        assert found_ms == expected[index] if index < len(expected) else found_ms >= end_ms
        if zone.name in ZONES.names and found_ms < DATETIME_LAST_MS:
            local = datetime.fromtimestamp(found_ms // 1000, wall.tz)
            assert int(local.astimezone(UTC).timestamp()) * 1000 == found_ms
            assert zone.local_text(found_ms) == local.isoformat()
    return len(expected)


def check_backwards(expression: CronExpression, zone: Zone, probe_ms: int, expected: list[int], start_ms: int, end_ms: int) -> None:
    """The last run before the probe, and how many there are on either side of it in [start, end)."""
    index = bisect_left(expected, probe_ms)
    last_ms = last_before(expression, zone, probe_ms)
    if index:
        assert last_ms == expected[index - 1]
    else:
        assert last_ms is None or last_ms < start_ms
    assert count_between(expression, zone, start_ms, probe_ms) == index
    assert count_between(expression, zone, probe_ms, end_ms) == len(expected) - index


@given(data=st.data())
@settings(max_examples=120)
def test_no_run_is_skipped_or_invented_around_a_clock_change(data: st.DataObject) -> None:
    zone = ZONES.zone(data.draw(st.sampled_from(ZONE_NAMES)))

    def choose(options: list[Any]) -> Any:
        return data.draw(st.sampled_from(options))

    start, end = window_near(zone, choose)
    near = datetime.fromtimestamp((start + end) * 30, zone_info(zone.name))
    text = Draw(choose, near).expression()
    probes = data.draw(st.lists(st.integers(start * MINUTE_MS, end * MINUTE_MS - 1), min_size=3, max_size=6))
    runs = check_window(zone, Wall(zone_info(zone.name), start, end), text, probes)
    event("runs" if runs else "no runs")


def test_no_run_is_skipped_or_invented_in_any_zone() -> None:
    """A sweep over every zone there is, one clock change each; aliases of one file count once."""
    rng = random.Random(SEED)
    checked = runs = 0
    for zone in {zone.digest: zone for zone in map(ZONES.zone, ZONE_NAMES)}.values():
        start, end = window_near(zone, rng.choice)
        runs += check_random(zone, Wall(zone_info(zone.name), start, end), rng)
        checked += EXPRESSIONS_A_WINDOW
    print(f"seed {SEED}: {checked} windows, {runs} runs")
    assert checked > 1_000 and runs > checked, f"the windows are nearly empty; WHEELSCHED_TEST_SEED={SEED}"


def check_random(zone: Zone, wall: Wall, rng: random.Random) -> int:
    """Some expressions drawn for the middle of the window; the number of their runs."""
    near = datetime.fromtimestamp((wall.start + wall.end) * 30, wall.tz)
    runs = 0
    for _ in range(EXPRESSIONS_A_WINDOW):
        text = Draw(rng.choice, near).expression()
        probes = [rng.randrange(wall.start * MINUTE_MS, wall.end * MINUTE_MS) for _ in range(3)]
        try:
            runs += check_window(zone, wall, text, probes)
        except BaseException as error:
            error.add_note(f"{text!r} in {zone.name} from minute {wall.start}; WHEELSCHED_TEST_SEED={SEED}")
            raise
    return runs


def test_no_run_is_skipped_or_invented_at_any_kind_of_clock_change() -> None:
    """One of each size that any clock has moved by, forwards and back: 15 minutes to a lost day, half an hour, two, three, seven."""
    rng = random.Random(SEED)
    kinds: dict[int, list[tuple[Zone, int]]] = {}
    for zone in map(ZONES.zone, ZONE_NAMES):
        for change in zone.transitions(ODD_UNTIL_MS, LAST_MS):
            kinds.setdefault(change.reading_after - change.reading_before, []).append((zone, change.at_ms // MINUTE_MS))
    assert {15, 30, 60, 120, 420, 1_440, -30, -60, -120, -180, -420} <= set(kinds)
    for changes in kinds.values():
        zone, minute = rng.choice(changes)
        check_random(zone, Wall(zone_info(zone.name), minute - WINDOW_MINUTES // 2, minute + WINDOW_MINUTES // 2), rng)


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("Pacific/Apia", "2011-12-30T10:00"),
        ("Pacific/Kwajalein", "1993-08-21T12:00"),
        ("Australia/Lord_Howe", "2026-04-04T15:00"),
        ("Australia/Lord_Howe", "2026-10-03T15:30"),
        ("Africa/Casablanca", "2026-02-15T02:00"),
        ("Africa/Casablanca", "2026-03-22T02:00"),
        ("Antarctica/Troll", "2026-03-29T01:00"),
        ("Antarctica/Troll", "2026-10-25T01:00"),
    ],
)
def test_no_run_is_skipped_or_invented_in_the_nights_that_others_get_wrong(name: str, at: str) -> None:
    zone, minute = ZONES.zone(name), utc_ms(at) // MINUTE_MS
    nights = Wall(zone_info(name), minute - WINDOW_MINUTES // 2, minute + WINDOW_MINUTES // 2)
    check_random(zone, nights, random.Random(SEED))
    for text in ("* * * * *", "*/7 0-3 * * *", "0-59/7 0-3 * * *", "30 2 * * *", "0 0-23 * * *", "15,45 * * * *", "0 0 30,31 * *"):
        check_window(zone, nights, text, [])


def test_no_run_is_skipped_or_invented_where_the_clock_changes_several_times_in_a_day() -> None:
    """No zone has done it yet: back and forth, twice in one direction, minutes or hours apart; but never back into what was left out."""
    rng = random.Random(SEED)
    start = 30_000_000
    checked = 0
    while checked < 25:
        at, offset, changes = start + DAY_MINUTES, 0, []
        for _ in range(rng.randint(2, 4)):
            offset += rng.choice([-180, -60, -60, -30, 15, 30, 60, 60, 120])
            changes.append((at * 60, offset * 60))
            at += rng.choice([1, 20, 60, 90, 200, 400])
        wall = Wall(zone_info_of(tzif("", changes)), start, start + WINDOW_MINUTES)
        if any(wall.first.get(reading, 0) > minute for reading, minute in wall.jumped.items()):
            continue
        check_random(build_zone(f"Test/{changes}", tzif("", changes)), wall, rng)
        checked += 1


@given(data=st.data())
@settings(max_examples=40)
def test_years_of_dates_are_those_of_the_calendar(data: st.DataObject) -> None:
    """One time a day, every date of nine years somewhere in 1971 to 2100 looked at."""

    def choose(options: list[Any]) -> Any:
        return data.draw(st.sampled_from(options))

    zone = ZONES.zone(choose([name for name in ZONE_NAMES if not zone_is_odd(ZONES.zone(name))]))
    text = Draw(choose, datetime(2000, 2, 29)).expression().split(" ", 2)[2]
    text = f"{data.draw(st.integers(0, 59))} {data.draw(st.integers(0, 23))} {text}"
    check_years(zone, text, data.draw(st.integers(1971, 2091)), years=9)


@pytest.mark.parametrize("text", ["7 2 29 2 */7", "0 0 29 2 *", "30 1 29W 2 */5", "0 0 * 2 SUN#5", "59 23 L 2 */4", "0 0 */31 12 TUEL"])
@pytest.mark.parametrize("zone", ["UTC", "America/Havana"])
def test_a_century_of_rare_dates_is_that_of_the_calendar(text: str, zone: str) -> None:
    check_years(ZONES.zone(zone), text, 1971, years=129)


def check_years(zone: Zone, text: str, year: int, *, years: int) -> None:
    """The runs of the years, but for two days at either end, which belong to the reference's margin."""
    first, last = date(year, 1, 1), date(year + years - 1, 12, 31)
    try:
        expression = parse(text)
    except InvalidSchedule as refusal:
        assert "never comes" in str(refusal)
        assert not list(daily_runs(Reference(text), "UTC", first, last))
        return
    from_ms, to_ms = utc_ms(first.isoformat()) + 2 * DAY_MS, utc_ms(last.isoformat()) - 2 * DAY_MS
    expected = sorted({minute * MINUTE_MS for minute in daily_runs(Reference(text), zone.name, first, last)})
    expected = [at_ms for at_ms in expected if from_ms <= at_ms < to_ms]
    assert list(between(expression, zone, from_ms, to_ms)) == expected
    assert count_between(expression, zone, from_ms, to_ms) == len(expected)
    # Backwards through all of them if they are few, else through the latest.
    assert last_few(expression, zone, to_ms, len(expected[-100:])) == expected[-100:]
    if expected:
        assert last_before(expression, zone, expected[0] + 1) == expected[0]
        earlier_ms = last_before(expression, zone, expected[0])
        assert earlier_ms is None or earlier_ms < from_ms


@given(
    zone=st.sampled_from(ZONE_NAMES),
    text=st.sampled_from(RARE),
    turns=st.integers(1, 40),
    after_s=st.integers(2_200_000_000, 15_000_000_000),
)
@settings(max_examples=60)
def test_four_hundred_years_later_everything_is_the_same(zone: str, text: str, turns: int, after_s: int) -> None:
    """The calendar repeats, so does the zone's rule; there is no last year. After 2087, when Morocco's list ends."""
    after_ms = after_s * 1000 + 1_600_000_000_000
    expression, at, shift_ms = parse(text), ZONES.zone(zone), turns * CYCLE_MS
    first_ms, last_ms = next_after(expression, at, after_ms), last_before(expression, at, after_ms + CYCLE_MS)
    assert first_ms is not None and last_ms is not None
    assert next_after(expression, at, after_ms + shift_ms) == first_ms + shift_ms
    assert last_before(expression, at, after_ms + CYCLE_MS + shift_ms) == last_ms + shift_ms
    to_ms = first_ms + 2 * DAY_MS
    count = count_between(expression, at, after_ms, to_ms)
    assert count == count_between(expression, at, after_ms + shift_ms, to_ms + shift_ms) > 0
    turn = count_between(expression, at, after_ms, after_ms + CYCLE_MS)
    assert count_between(expression, at, after_ms, to_ms + shift_ms) == count + turns * turn


@given(
    zone=st.sampled_from(["UTC", "America/New_York", "Europe/Berlin", "Australia/Lord_Howe"]), text=st.sampled_from(RARE), data=st.data()
)
@settings(max_examples=60)
def test_where_the_tuples_of_a_zone_end_the_search_goes_on_at_their_beginning(zone: str, text: str, data: st.DataObject) -> None:
    """Their rules are as old as 2008. So 2430, where a search runs over the end, must be as 2030, which knows nothing of turns."""
    expression, at = parse(text), ZONES.zone(zone)
    after_ms = data.draw(st.integers(utc_ms("2060-01-01"), utc_ms("2110-01-01")))
    for moment_ms in (after_ms, data.draw(st.integers(utc_ms("2010-01-01"), utc_ms("2060-01-01")))):
        found_ms = next_after(expression, at, moment_ms)
        assert found_ms is not None and next_after(expression, at, moment_ms + CYCLE_MS) == found_ms + CYCLE_MS
    last_ms = last_before(expression, at, after_ms)
    assert last_ms is not None
    if last_ms >= utc_ms("2010-01-01"):
        assert last_before(expression, at, after_ms + CYCLE_MS) == last_ms + CYCLE_MS
    counts = [count_between(expression, at, utc_ms("2010-01-01") + ms, after_ms + ms) for ms in (0, CYCLE_MS, 2 * CYCLE_MS)]
    assert counts[0] == counts[1] == counts[2]


@given(zone=st.sampled_from(["Asia/Almaty", "Africa/Casablanca", *ZONE_NAMES]), text=st.sampled_from(RARE), data=st.data())
@settings(max_examples=150)
def test_at_the_end_of_a_turn_a_search_stays_within_the_rule_that_holds_for_ever(zone: str, text: str, data: st.DataObject) -> None:
    """Almaty is an hour behind since 2024: 2430 must not look back through 2030 at how it was in 2004, nor run over the end."""
    expression, at = parse(text), ZONES.zone(zone)
    turn_ms = at.cycle_from_s * 1000 + data.draw(st.integers(1, 3)) * CYCLE_MS
    moment_ms = turn_ms + data.draw(st.integers(-45 * 366, 45 * 366)) * DAY_MS
    next_ms, last_ms = next_after(expression, at, moment_ms), last_before(expression, at, moment_ms + 1)
    assert next_ms is not None and last_ms is not None and last_ms <= moment_ms < next_ms
    assert next_after(expression, at, last_ms - 1) == last_ms and next_after(expression, at, last_ms) == next_ms
    assert last_before(expression, at, next_ms + 1) == next_ms and last_before(expression, at, next_ms) == last_ms
    assert count_between(expression, at, last_ms, next_ms) == 1 == count_between(expression, at, last_ms + 1, next_ms + 1)


# -- forwards, backwards and counted are one set --------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=200)
def test_what_comes_next_is_what_came_last_and_nothing_lies_between(data: st.DataObject) -> None:
    """Any expression, any zone, any instant of 1970 to 2100 and beyond: no reference, so it can go where none can follow."""
    after_ms = data.draw(st.one_of(st.integers(ODD_UNTIL_MS, LAST_MS), st.integers(LAST_MS, 8 * LAST_MS)))
    near = datetime.fromtimestamp(min(after_ms, LAST_MS) // 1000, UTC)
    expression = drawn(data, near)
    zone = ZONES.zone(data.draw(st.sampled_from(ZONE_NAMES)))
    next_ms, last_ms = next_after(expression, zone, after_ms), last_before(expression, zone, after_ms + 1)
    assert last_ms is None or last_ms <= after_ms
    if next_ms is None:
        assert count_between(expression, zone, after_ms + 1, after_ms + CYCLE_MS) == 0
        return
    assert next_ms > after_ms
    assert last_before(expression, zone, next_ms + 1) == next_ms
    assert last_before(expression, zone, next_ms) == last_ms
    assert last_ms is None or next_after(expression, zone, last_ms) == next_ms
    assert count_between(expression, zone, after_ms + 1, next_ms) == 0
    assert count_between(expression, zone, after_ms + 1, next_ms + 1) == 1


@given(data=st.data())
@settings(max_examples=100)
def test_as_many_are_counted_as_there_are(data: st.DataObject) -> None:
    """Up to 500 of them one by one; and stretches add up, over centuries."""
    from_ms = data.draw(st.integers(ODD_UNTIL_MS, LAST_MS))
    expression = drawn(data, datetime.fromtimestamp(from_ms // 1000, UTC))
    zone = ZONES.zone(data.draw(st.sampled_from(ZONE_NAMES)))
    runs = upcoming(expression, zone, from_ms - 1, 500)
    for count in {0, 1, len(runs) // 2, len(runs)} & set(range(len(runs) + 1)):
        to_ms = runs[count - 1] + 1 if count else from_ms
        assert count_between(expression, zone, from_ms, to_ms) == count
    middle_ms, to_ms = sorted(data.draw(st.lists(st.integers(from_ms, 6 * LAST_MS), min_size=2, max_size=2)))
    parts = count_between(expression, zone, from_ms, middle_ms) + count_between(expression, zone, middle_ms, to_ms)
    assert parts == count_between(expression, zone, from_ms, to_ms)


def drawn(data: st.DataObject, near: datetime) -> CronExpression:
    text = Draw(lambda options: data.draw(st.sampled_from(options)), near).expression()
    try:
        return parse(text)
    except InvalidSchedule:
        assume(False)
        raise


def test_there_is_no_run_before_1970_and_none_in_an_empty_range() -> None:
    for text in ("* * * * *", "0 0 * * *"):
        for name in ("UTC", "Europe/Berlin", "Pacific/Apia"):
            expression, zone = parse(text), ZONES.zone(name)
            first_ms = next_after(expression, zone, -1)
            assert first_ms is not None and 0 <= first_ms < DAY_MS
            assert [last_before(expression, zone, at_ms) for at_ms in (-1, 0, first_ms, first_ms + 1)] == [None, None, None, first_ms]
            assert count_between(expression, zone, -DAY_MS, first_ms + 1) == 1 == count_between(expression, zone, 0, first_ms + 1)
            assert count_between(expression, zone, DAY_MS, DAY_MS) == 0 == count_between(expression, zone, DAY_MS, 0)
            assert last_few(expression, zone, first_ms + 1, 5) == [first_ms]
            assert last_few(expression, zone, first_ms, 5) == [] == last_few(expression, zone, DAY_MS, 0)


def test_readings_that_became_one_run_count_once() -> None:
    """New York, 8 March 2026: 02:00 to 02:59 and 03:00 are one instant, the other 23 hours are as ever."""
    zone = ZONES.zone("America/New_York")
    day = utc_ms("2026-03-08T05:00"), utc_ms("2026-03-09T04:00")
    assert count_between(parse("0-59 0-23 * * *"), zone, *day) == 23 * 60 == count_between(parse("* * * * *"), zone, *day)
    assert count_between(parse("0-59 2 * * *"), zone, *day) == 1
    assert count_between(parse("* 2 * * *"), zone, *day) == 0
    autumn = utc_ms("2026-11-01T04:00"), utc_ms("2026-11-02T05:00")
    assert count_between(parse("0-59 0-23 * * *"), zone, *autumn) == 24 * 60
    assert count_between(parse("* * * * *"), zone, *autumn) == 25 * 60


@pytest.mark.parametrize("text", ["*/15 2 * 3 SUN#2", "* 2 8 3 */7"])
def test_a_schedule_that_names_only_skipped_times_has_no_next_run(text: str) -> None:
    """The second Sunday of March is when New York's clock jumps over the hour from two, since 2007 and for ever."""
    expression, zone = parse(text), ZONES.zone("America/New_York")
    for after in ("2007-01-01", "2026-01-15", "2440-01-01", "2870-01-01"):
        assert next_after(expression, zone, utc_ms(after)) is None
    assert upcoming(expression, zone, NOW_MS, 5) == [] == list(between(expression, zone, NOW_MS, 6 * LAST_MS))
    last_ms = last_before(expression, zone, NOW_MS)
    assert last_ms is not None and next_after(expression, zone, last_ms - 1) == last_ms < utc_ms("2007-01-01")
    assert last_before(expression, zone, NOW_MS + 2 * CYCLE_MS) == last_ms
    assert count_between(expression, zone, last_ms, 6 * LAST_MS) == 1
    assert any("it never runs" in warning for warning in warnings(expression, zone, NOW_MS))
    assert next_after(expression, ZONES.zone("America/Chicago"), NOW_MS) is None
    assert next_after(expression, ZONES.zone("Europe/Berlin"), NOW_MS) is not None


# -- the nights that matter ---------------------------------------------------------------------------------------------------


def test_a_run_in_the_skipped_hour_comes_right_after_it_and_keeps_its_nominal_time() -> None:
    """CASES B-003."""
    zone = ZONES.zone("America/Los_Angeles")
    for text, nominal in (("0 2 * * *", "2026-03-08 02:00"), ("30 2 * * *", "2026-03-08 02:30")):
        (at_ms,) = upcoming(parse(text), zone, utc_ms("2026-03-08T00:00"), 1)
        assert zone.local_text(at_ms) == "2026-03-08T03:00:00-07:00"
        assert nominal_reading(parse(text), zone, at_ms) == nominal
    assert nominal_reading(parse("0 0 * * *"), zone, utc_ms("2026-07-01T07:00")) == "2026-07-01 00:00"


def test_a_run_in_the_repeated_hour_happens_once() -> None:
    """CASES B-001."""
    assert runs_of("30 1 * * *", "America/New_York", "2026-11-01T04:00", 2) == ["11-01 05:30", "11-02 06:30"]


def test_an_interval_follows_real_time_through_both_copies_of_an_hour() -> None:
    """CASES B-009."""
    quarters = [f"10-25 {hour:02}:{minute:02}" for hour in (0, 1, 2) for minute in (0, 15, 30, 45)]
    assert runs_of("*/15 * * * *", "Europe/London", "2026-10-24T23:59", 12) == quarters
    assert runs_of("0 * * * *", "Europe/London", "2026-10-24T23:59", 3) == quarters[::4]


@pytest.mark.parametrize("text", ["* * * * *", "*/5 * * * *", "0 * * * *"])
@pytest.mark.parametrize("after", ["2026-03-08T06:59", "2026-03-08T06:30"])
def test_just_before_the_jump_the_next_run_is_at_its_end_or_before(text: str, after: str) -> None:
    """CASES B-005."""
    (at_ms,) = upcoming(parse(text), ZONES.zone("America/New_York"), utc_ms(after), 1)
    assert utc_ms(after) < at_ms <= utc_ms("2026-03-08T07:00")


def test_a_short_day_does_not_lose_the_week() -> None:
    """CASES B-007."""
    assert runs_of("0 12 * * 0", "Europe/Berlin", "2026-03-26T11:00", 2) == ["03-29 10:00", "04-05 10:00"]


def test_the_31st_goes_on_across_short_months() -> None:
    """CASES B-016."""
    assert runs_of("0 0 31 2,3,4,5 *", "UTC", "2026-01-01", 5) == ["03-31 00:00", "05-31 00:00"] * 2 + ["03-31 00:00"]


def test_a_start_bound_is_an_instant_and_the_pattern_is_local() -> None:
    """CASES B-018."""
    assert runs_of("0 1 * * *", "Asia/Kolkata", "2026-03-01T08:00", 1) == ["03-01 19:30"]


@given(
    zone=st.sampled_from(ZONE_NAMES),
    text=st.sampled_from(["30 2 * * *", "0 0-23 * * *", "0 0 31 * *"]),
    after_s=st.integers(70_000_000, 4_102_444_800),
)
@settings(max_examples=100)
def test_the_nominal_reading_of_a_run_leads_back_to_it(zone: str, text: str, after_s: int) -> None:
    expression, at = parse(text), ZONES.zone(zone)
    (at_ms,) = upcoming(expression, at, after_s * 1000, 1)
    reading = datetime.fromisoformat(nominal_reading(expression, at, at_ms))
    assert Reference(text).date_matches(reading.date())
    assert reading.hour in Reference(text).hours and reading.minute in Reference(text).minutes
    assert reading.isoformat() <= at.local_text(at_ms)


# -- cost ---------------------------------------------------------------------------------------------------------------------


def lines_of(call: Callable[[], Any]) -> int:
    """How many lines of `wheelsched.cron` run in the call: a measure that a busy machine does not change."""
    count = 0

    def on_line(frame: FrameType, what: str, _: Any) -> Any:
        nonlocal count
        count += what == "line"
        return on_line

    def on_call(frame: FrameType, _what: str, _: Any) -> Any:
        return on_line if "/wheelsched/cron/" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("text", RARE)
def test_the_rarest_runs_are_found_in_bounded_steps(text: str) -> None:
    """From where the wait is longest, in a zone without clock changes, with two a year, with four, and with a lost day."""
    expression = parse(text)
    for name in ("UTC", "America/New_York", "Africa/Casablanca", "Pacific/Apia"):
        zone = ZONES.zone(name)
        for after in ("1970-01-01", "2026-01-01", "2088-03-01", "2168-03-01", "2360-03-01"):
            assert 0 < lines_of(lambda: next_after(expression, zone, utc_ms(after))) <= LINES_MAX  # noqa: B023
            assert 0 < lines_of(lambda: last_before(expression, zone, utc_ms(after) + DAY_MS)) <= LINES_MAX  # noqa: B023


@given(data=st.data())
@settings(max_examples=60)
def test_random_expressions_are_found_in_bounded_steps(data: st.DataObject) -> None:
    expression = drawn(data, datetime(2096, 2, 29))
    zone = ZONES.zone(data.draw(st.sampled_from(ZONE_NAMES)))
    at_ms = data.draw(st.integers(FIRST_MS, 3 * LAST_MS))
    assume(next_after(expression, zone, at_ms) is not None)
    assert lines_of(lambda: next_after(expression, zone, at_ms)) <= LINES_MAX
    assert lines_of(lambda: last_before(expression, zone, at_ms)) <= LINES_MAX


@pytest.mark.parametrize("text", ["* * * * *", "*/15 2 * * *", "0-59 0-23 * * *", "30 2 29 2 */7"])
@pytest.mark.parametrize("name", ["UTC", "America/New_York", "Africa/Casablanca"])
def test_a_year_is_counted_without_looking_at_its_runs(text: str, name: str) -> None:
    """Half a million runs of `* * * * *` in 300 lines; and 1,000 years in the time of two turns of the calendar."""
    expression, zone, from_ms = parse(text), ZONES.zone(name), utc_ms("2026-01-01")
    assert 0 < lines_of(lambda: count_between(expression, zone, from_ms, from_ms + 366 * DAY_MS)) <= YEAR_LINES_MAX
    assert lines_of(lambda: count_between(expression, zone, from_ms, from_ms + 30 * CYCLE_MS)) <= 800 * YEAR_LINES_MAX


# -- warnings -----------------------------------------------------------------------------------------------------------------

NOW_MS = utc_ms("2026-01-15")


def warnings_of(text: str, zone: str) -> tuple[str, ...]:
    return warnings(parse(text, name="nightly"), ZONES.zone(zone), NOW_MS)


def test_minute_0_is_warned_of_and_a_hashed_or_other_minute_is_not() -> None:
    for text in ("0 9 * * *", "@daily", "0 * * * *"):
        (warning,) = warnings_of(text, "UTC")
        assert "write H" in warning
    for text in ("5 9 * * *", "H 9 * * *", "*/15 * * * *", "0,30 9 * * *", "H(0-0) 9 * * *"):
        assert warnings_of(text, "UTC") == ()


def test_a_skipped_and_a_repeated_time_are_named_with_their_dates() -> None:
    (gap,) = warnings_of("30 2 * * *", "America/New_York")
    assert gap.startswith("2026-03-08 02:30 does not exist") and gap.endswith("it runs at 2026-03-08 03:00 instead")
    (overlap,) = warnings_of("30 1 * * *", "America/New_York")
    assert overlap.startswith("2026-11-01 01:30 comes twice") and "the first time only" in overlap
    (gap, overlap) = warnings_of("5 */2 * * *", "Europe/Berlin")
    assert "2026-03-29 02:05 does not exist" in gap and "it does not run then" in gap
    assert "2026-10-25 02:05 comes twice" in overlap and "both times" in overlap
    assert "2026-10-04 02:15" in warnings_of("15 2 * * *", "Australia/Lord_Howe")[0]


@pytest.mark.parametrize(
    ("text", "zone"),
    [
        ("30 2 * * MON", "America/New_York"),
        ("*/15 * * * *", "Europe/Berlin"),
        ("30 12 * * *", "Europe/Berlin"),
        ("30 2 * * *", "Asia/Tokyo"),
    ],
)
def test_what_no_clock_change_touches_is_not_warned_of(text: str, zone: str) -> None:
    assert warnings_of(text, zone) == ()


@given(data=st.data())
@settings(max_examples=40)
def test_a_fixed_time_is_warned_of_exactly_if_a_change_of_the_coming_year_touches_it(data: st.DataObject) -> None:
    zone = ZONES.zone(data.draw(st.sampled_from(["America/New_York", "Africa/Casablanca", "Australia/Lord_Howe", "Africa/Cairo"])))
    hour, minute = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 59))
    expression = parse(f"{minute} {hour} * * *")
    assert expression.kind is Kind.FIXED_TIME
    touched = list(touched_days(expression, zone))
    assert len(warnings(expression, zone, NOW_MS)) == len(touched), touched


def touched_days(expression: CronExpression, zone: Zone) -> Iterator[date]:
    """Days on which the reading is missing or comes twice, by asking `zoneinfo` for both folds."""
    tz = zone_info(zone.name)
    (hour, minute), from_ordinal = divmod(expression.first_time, 60), date(2026, 1, 15).toordinal()
    for ordinal in range(from_ordinal, from_ordinal + 366):
        day = date.fromordinal(ordinal)
        early, late = (datetime(day.year, day.month, day.day, hour, minute, tzinfo=tz, fold=fold) for fold in (0, 1))
        if early.utcoffset() != late.utcoffset():
            yield day
