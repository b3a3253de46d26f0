"""A schedule's runs as one value, elapsed time, and jitter: against a list made the obvious way."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import FrozenInstanceError
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wheelsched.cron import LIST_MAX, Timing, ZoneData, between, count_every, jitter_of, last_every, next_every, nominal_reading, parse

ZONES = ZoneData.of_package()
ZONE_NAMES = sorted(ZONES.names)
MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 86_400_000
FAR_MS = 4_102_444_800_000  # 2100
NEW_YORK = ZONES.zone("America/New_York")
GOLDEN = [570_106, 494_504, 131_647, 543_442]


def utc_ms(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * 1000


# -- elapsed time -------------------------------------------------------------------------------------------------------------


@given(every=st.integers(1, 10**10), anchor=st.integers(0, 10**13), after=st.integers(0, 10**13))
def test_an_interval_with_anchor_stays_on_its_grid(every: int, anchor: int, after: int) -> None:
    found = next_every(every, anchor, after)
    assert found > after and found >= anchor and (found - anchor) % every == 0
    assert found == anchor or found - every <= after
    assert last_every(every, anchor, found + 1) == found
    last = last_every(every, anchor, after + 1)
    assert (last is None) == (after < anchor) and last in (None, found - every)


def test_an_interval_does_not_run_before_its_anchor() -> None:
    moments = (0, 999, 1_000, 1_001, 60_999, 61_000, 61_001)
    assert [next_every(60_000, 1_000, after) for after in moments] == [1_000, 1_000, 61_000, 61_000, 61_000, 121_000, 121_000]
    assert [last_every(60_000, 1_000, before) for before in moments] == [None, None, None, 1_000, 1_000, 1_000, 61_000]


@given(every=st.integers(1, 40), anchor=st.integers(-50, 300), first=st.integers(-50, 400), second=st.integers(-50, 400))
@settings(max_examples=300)
def test_an_interval_is_counted_as_a_list_of_it_is(every: int, anchor: int, first: int, second: int) -> None:
    grid = range(anchor, 1_000, every)
    assert count_every(every, anchor, first, second) == sum(first <= run < second for run in grid)
    assert last_every(every, anchor, first) == max((run for run in grid if run < first), default=None)


# -- jitter -------------------------------------------------------------------------------------------------------------------


def test_jitter_is_the_same_for_ever_and_on_every_node() -> None:
    """Golden values: they are what stored runs were moved by."""
    assert [jitter_of(name, 600_000) for name in ("nightly", "reports/eu", "\u00fcbersicht", "")] == GOLDEN
    code = "from wheelsched.cron import jitter_of; print(jitter_of('nightly', 600_000))"
    for seed in ("1", "2"):
        done = subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True)
        assert int(done.stdout) == GOLDEN[0]


def test_jitter_lies_below_its_bound_and_spreads_over_all_of_it() -> None:
    assert jitter_of("nightly", 0) == 0 == jitter_of("nightly", 1)
    counts = Counter(jitter_of(f"job-{number}", 10_000) // 1_000 for number in range(10_000))
    assert set(counts) == set(range(10)) and max(counts.values()) < 1_150


# -- the value ----------------------------------------------------------------------------------------------------------------


def timings(data: st.DataObject, from_ms: int, to_ms: int) -> tuple[Timing, list[int]]:
    """A timing, and its runs in [from, to) the obvious way."""
    bounds = st.one_of(st.just(-1), st.integers(from_ms - DAY_MS, to_ms + DAY_MS))
    start_at_ms, end_at_ms = data.draw(bounds), data.draw(bounds)
    if data.draw(st.booleans()):
        expression = parse(data.draw(st.sampled_from(["0 */6 * * *", "30 2 * * *", "*/40 1-3 * * *", "0 0-23/3 * * *", "0 0 L * *"])))
        zone = ZONES.zone(data.draw(st.sampled_from(ZONE_NAMES)))
        timing = Timing.of_cron(expression, zone, start_at_ms, end_at_ms)
        runs = list(between(expression, zone, from_ms, to_ms))
    else:
        every_ms, anchor_at_ms = data.draw(st.integers(HOUR_MS, DAY_MS)), data.draw(st.integers(from_ms - DAY_MS, to_ms + DAY_MS))
        timing = Timing.of_interval(every_ms, anchor_at_ms, start_at_ms, end_at_ms)
        runs = [run for run in range(anchor_at_ms, to_ms, every_ms) if run >= from_ms]
    return timing, [run for run in runs if start_at_ms <= run and (end_at_ms == -1 or run < end_at_ms)]


@given(data=st.data(), from_ms=st.integers(70_000_000_000, FAR_MS))
@settings(max_examples=150)
def test_a_timing_answers_as_a_list_of_its_runs_would(data: st.DataObject, from_ms: int) -> None:
    to_ms = from_ms + 4 * DAY_MS
    timing, runs = timings(data, from_ms, to_ms)
    for probe_ms in data.draw(
        st.lists(st.one_of(st.integers(from_ms, to_ms - 1), st.sampled_from([*runs, from_ms])), min_size=1, max_size=5)
    ):
        later, earlier = [run for run in runs if run > probe_ms], [run for run in runs if run < probe_ms]
        found_ms, last_ms = timing.next_after(probe_ms), timing.last_before(probe_ms)
        assert found_ms == later[0] if later else found_ms == -1 or found_ms >= to_ms
        assert last_ms == earlier[-1] if earlier else last_ms == -1 or last_ms < from_ms
        assert timing.count(from_ms, probe_ms) == len(earlier)
        assert timing.count(probe_ms, to_ms) == len([run for run in runs if run >= probe_ms])
        assert timing.last_few(probe_ms, 3, from_ms) == earlier[-3:]
        assert timing.upcoming(probe_ms, len(later[:3])) == later[:3]


def test_the_start_is_a_run_and_the_end_is_none() -> None:
    timing = Timing.of_cron(parse("0 * * * *"), NEW_YORK, utc_ms("2026-06-01T10:00"), utc_ms("2026-06-01T12:00"))
    ten, eleven = utc_ms("2026-06-01T10:00"), utc_ms("2026-06-01T11:00")
    assert timing.upcoming(0, 5) == [ten, eleven] == timing.last_few(FAR_MS, 5)
    assert [timing.next_after(at_ms) for at_ms in (-1, ten - 1, ten, eleven)] == [ten, ten, eleven, -1]
    assert [timing.last_before(at_ms) for at_ms in (FAR_MS, eleven, ten)] == [eleven, ten, -1]
    assert timing.count(-1, FAR_MS) == 2 and timing.count(ten + 1, eleven + 1) == 1
    assert timing.last_few(FAR_MS, 5, eleven) == [eleven] and timing.last_few(FAR_MS, 1) == [eleven]
    every = Timing.of_interval(HOUR_MS, ten, ten + 1, eleven + 1)
    assert every.upcoming(0, 5) == [eleven] == every.last_few(FAR_MS, 5)


def test_a_definition_without_a_time_has_no_run() -> None:
    timing = Timing.none()
    assert timing.next_after(0) == -1 == timing.last_before(FAR_MS)
    assert timing.count(0, FAR_MS) == 0 and timing.upcoming(0, 5) == [] == timing.last_few(FAR_MS, 5)
    assert timing.nominal(0) == ""


def test_a_timing_whose_times_are_all_skipped_has_no_run() -> None:
    timing = Timing.of_cron(parse("*/15 2 * 3 SUN#2"), NEW_YORK, utc_ms("2026-01-01"))
    assert timing.next_after(0) == -1 == timing.last_before(FAR_MS) and timing.count(0, FAR_MS) == 0


def test_a_timing_is_a_value() -> None:
    expression = parse("0 9 * * *")
    assert Timing.of_cron(expression, NEW_YORK) == Timing.of_cron(expression, NEW_YORK, -1, -1)
    assert Timing.of_cron(expression, NEW_YORK) != Timing.of_cron(expression, NEW_YORK, 0)
    with pytest.raises(FrozenInstanceError):
        Timing.none().every_ms = 1  # type: ignore[misc]
    with pytest.raises(AssertionError):
        Timing.of_interval(1, 0).last_few(FAR_MS, LIST_MAX + 1)


@pytest.mark.parametrize(
    ("text", "at", "nominal"),
    [
        ("30 2 * * *", "2026-03-08T07:00", "2026-03-08T02:30"),
        ("15,30 2 * * *", "2026-03-08T07:00", "2026-03-08T02:15"),
        ("0 2,3 * * *", "2026-03-08T07:00", ""),
        ("0 3 * * *", "2026-03-08T07:00", ""),
        ("30 2 * * *", "2026-03-09T06:30", ""),
        ("30 1 * * *", "2026-11-01T05:30", ""),
        ("*/30 3 * * *", "2026-03-08T07:00", ""),
        ("30 2 * * *", "2826-03-08T07:00", "2826-03-08T02:30"),
    ],
)
def test_the_nominal_reading_is_told_only_where_the_clock_does_not_show_it(text: str, at: str, nominal: str) -> None:
    timing, at_ms = Timing.of_cron(parse(text), NEW_YORK), utc_ms(at)
    assert timing.next_after(at_ms - 1) == at_ms
    assert timing.nominal(at_ms) == nominal
    shown = nominal_reading(parse(text), NEW_YORK, at_ms)
    assert shown == (nominal.replace("T", " ") or NEW_YORK.local_text(at_ms)[:16].replace("T", " "))


def test_a_lost_day_is_told_by_its_date() -> None:
    """Apia went from 29 to 31 December 2011."""
    timing = Timing.of_cron(parse("30 12 30 12 *"), ZONES.zone("Pacific/Apia"))
    at_ms = timing.next_after(utc_ms("2011-12-01"))
    assert ZONES.zone("Pacific/Apia").local_text(at_ms) == "2011-12-31T00:00:00+14:00"
    assert timing.nominal(at_ms) == "2011-12-30T12:30"
