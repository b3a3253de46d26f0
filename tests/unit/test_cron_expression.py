"""The grammar: what is understood, what H makes of a name, and what a refusal says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wheelsched.core.errors import InvalidSchedule
from wheelsched.cron import Kind, ZoneData, parse, upcoming
from wheelsched.cron.expression import EXPRESSION_LENGTH_MAX, MACROS

ZONES = ZoneData.of_package()
NAMES = 4_000
GOLDEN = {
    "nightly": "57 10 23 3 5",
    "reports/eu": "15 8 5 6 2",
    "\u00fcbersicht": "16 0 10 11 2",
    "nightly, ranges": "12-59/15 10 2-31/7 5-11/4 2",
}


def refusal(text: str, name: str | None = "nightly") -> str:
    with pytest.raises(InvalidSchedule) as refused:
        parse(text, name=name)
    return str(refused.value)


def values(mask: int) -> set[int]:
    return {bit for bit in range(mask.bit_length()) if mask >> bit & 1}


@pytest.mark.parametrize(
    ("text", "column", "says"),
    [
        ("* 24 * * *", 3, "hour 24 is out of range 0-23"),
        ("0  5 32 * *", 6, "day of month 32 is out of range 1-31"),
        ("0 0 1,2,40 * *", 9, "day of month 40 is out of range 1-31"),
        ("0 0 1-32 * *", 7, "day of month 32 is out of range 1-31"),
        ("0 0 * * 8", 9, "day of week 8 is out of range 0-7"),
        ("\t0 61,5 * * *", 4, "hour 61 is out of range 0-23"),
        ("0 22-2 * * *", 3, "write 22-23,0-2"),
        ("0 0 * * FRI-MON", 9, "write 5-6,0-1"),
        ("0 0 * * SAT-SUN", 9, "write 6-7"),
        ("0 0 * NOV-FEB *", 7, "write 11-12,1-2"),
        ("0 0 * * 7/2", 9, "write 0/2"),
        ("*/0 * * * *", 3, "step 0 is below 1"),
        ("*/1000 * * * *", 3, "one to three digits"),
        ("0005 * * * *", 1, "one to three digits"),
        ("0 0 ? * MON", 5, "write *"),
        ("* * * * * *", 11, "drop the seconds"),
        ("0 0 9 * * MON", 11, "every_s"),
        ("0 0 1 1 * 2027", 11, "drop the year"),
        ("0 0 12 * * ? 2027", 12, "drop the seconds, the first, and the year"),
        ("* * * *", 8, "4 of five fields"),
        ("@every 5m", 1, "every_s"),
        ("@reboot", 1, "not a time"),
        ("@fortnightly", 1, "@weekly"),
        ("@daily 5", 8, "a macro stands alone"),
        (" daily", 2, "write @daily"),
        ("R * * * *", 1, "write H "),
        ("R/15 * * * *", 1, "write H/15"),
        ("0 R(1-5) * * *", 3, "write H(1-5)"),
        ("1~5 * * * *", 1, "write H(1-5)"),
        ("0 ~ * * *", 3, "write H(0-23)"),
        ("h * * * *", 1, "upper case"),
        ("0 5,H * * *", 5, "whole field"),
        ("0 H(9-5) * * *", 5, "backwards"),
        ("0 H(0-24) * * *", 7, "hour 24 is out of range 0-23"),
        ("0 H/0 * * *", 5, "step 0 is below 1"),
        ("TZ=UTC 0 0 * * *", 1, "time_zone"),
        ("CRON_TZ=Europe/Berlin 0 0 * * *", 1, "time_zone"),
        ("0 0 * * * # nightly", 11, "comments"),
        ("# 0 0 * * *", 1, "comments"),
        ("'0 0 * * *'", 1, "quotes"),
        ("0 0 * * MONDAY", 9, "write MON"),
        ("0 0 * SEPT *", 7, "write SEP"),
        ("0 0 * MON *", 7, "day of week field"),
        ("0 0 * * L", 9, "write SATL"),
        ("0 0 L-3W * *", 5, "stand alone"),
        ("0 0 MON#2 * *", 5, "day-of-week field"),
        ("0 0 1L * *", 5, "stand alone"),
        ("0 L * * *", 3, "day fields"),
        ("0 0 * * 5#6", 9, "6 is out of range 1-5"),
        ("0 0 L-31 * *", 5, "31 is out of range 1-30"),
        ("0 0 31 2 *", 5, "never comes"),
        ("0 0 30 2 *", 5, "never comes"),
        ("0 0 31 4,6,9,11 *", 5, "never comes"),
        ("0 0 15W * */7", 5, "never comes"),
        ("0 0 */32 * FRI#5", 5, "never comes"),
        ("0 0 L-29 2 *", 5, "never comes"),
        ("", 1, "write five fields"),
        ("0 0 * * *\n", 10, "U+000A"),
        ("0\u00a00 * * *", 2, "U+00A0"),
        ("\ud800 * * * *", 1, "U+D800"),
        ("0,, * * * *", 3, "empty item"),
        ("*" * 1_001, 1_001, "the maximum is 1000"),
    ],
)
def test_a_refusal_names_the_column_and_says_what_to_write(text: str, column: int, says: str) -> None:
    message = refusal(text)
    assert says in message
    assert message.endswith(f", column {column}")


def test_the_maximum_length_counts_the_blanks_at_the_ends() -> None:
    text = "0 0 * * *"
    assert parse(text.rjust(EXPRESSION_LENGTH_MAX)).resolved == text
    assert "1001 characters" in refusal(text.rjust(EXPRESSION_LENGTH_MAX + 1))


@given(text=st.text(st.sampled_from("0123456789*/-,LW#HR?@ \tMONFEBjan()~=."), max_size=40) | st.text(max_size=60))
@settings(max_examples=300)
def test_any_text_is_understood_or_refused_in_a_short_ascii_sentence(text: str) -> None:
    try:
        expression = parse(text, name="nightly")
    except InvalidSchedule as refused:
        (error,) = refused.errors
        assert error == {"pointer": "/cron", "detail": str(refused)}
        assert str(refused).isascii() and str(refused).isprintable() and len(str(refused)) < 400
        assert ", column " in str(refused)
    else:
        assert upcoming(expression, ZONES.zone("UTC"), 0, 2)


@pytest.mark.parametrize("macro", MACROS)
def test_a_macro_means_its_expansion_in_any_case(macro: str) -> None:
    for text in (macro, macro.upper(), f"\t {macro.title()} "):
        expression, expansion = parse(text), parse(MACROS[macro])
        assert (expression.resolved, expression.kind) == (expansion.resolved, expansion.kind)
        assert (expression.minutes, expression.hours, expression.months, expression.days) == (
            expansion.minutes, expansion.hours, expansion.months, expansion.days,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("*/15 * * * *", Kind.INTERVAL),
        ("0 */2 * * *", Kind.INTERVAL),
        ("*/15 2 * * *", Kind.INTERVAL),
        ("*,5 2 * * *", Kind.INTERVAL),
        ("H * * * *", Kind.INTERVAL),
        ("@hourly", Kind.INTERVAL),
        ("5,* 2 * * *", Kind.FIXED_TIME),
        ("0 0-23 * * *", Kind.FIXED_TIME),
        ("0 0,* * * *", Kind.FIXED_TIME),
        ("H H * * *", Kind.FIXED_TIME),
        ("@daily", Kind.FIXED_TIME),
    ],
)
def test_the_first_character_of_minute_and_hour_decides_the_kind(text: str, kind: Kind) -> None:
    assert parse(text, name="nightly").kind is kind


def test_an_expression_is_frozen_and_equal_by_what_it_says() -> None:
    expression = parse("0 9 * * MON-FRI")
    assert expression == parse("0 9 * * MON-FRI") and hash(expression) == hash(parse("0 9 * * MON-FRI"))
    with pytest.raises(FrozenInstanceError):
        expression.minutes = 0  # type: ignore[misc]


# -- hashed fields --------------------------------------------------------------------------------------------------------------


def test_a_name_gives_the_values_it_gave_in_the_first_release() -> None:
    """Promised for every node and release: a change of these moves everybody's schedules."""
    assert parse("H H H H H", name="nightly").resolved == GOLDEN["nightly"]
    assert parse("H H H H H", name="reports/eu").resolved == GOLDEN["reports/eu"]
    assert parse("H/15 H(9-17) H/7 H(3-11)/4 H(MON-FRI)", name="nightly").resolved == GOLDEN["nightly, ranges"]
    assert parse("H H H H H", name="\u00fcbersicht").resolved == GOLDEN["\u00fcbersicht"]


def test_the_hash_of_a_name_is_not_the_interpreters() -> None:
    code = "from wheelsched.cron import parse; print(parse('H H H H H', name='nightly').resolved)"
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert found.stdout.strip() == GOLDEN["nightly"]


@pytest.mark.parametrize(
    ("index", "field", "allowed"),
    [
        (0, "H", range(60)), (1, "H", range(24)), (2, "H", range(1, 29)), (3, "H", range(1, 13)), (4, "H", range(7)),
        (0, "H(10-19)", range(10, 20)), (1, "H(3-3)", range(3, 4)), (2, "H(29-31)", range(29, 32)), (4, "H(MON-FRI)", range(1, 6)),
    ],
)  # fmt: skip
def test_one_hashed_value_is_spread_evenly_over_those_allowed(index: int, field: str, allowed: range) -> None:
    fields = ["0", "0", "1", "*", "*"]
    fields[index] = field
    if index == 4:
        fields[2] = "*"
    counts = Counter(int(parse(" ".join(fields), name=f"job-{n}").resolved.split()[index]) for n in range(NAMES))
    assert set(counts) == set(allowed)
    expected = NAMES / len(allowed)
    # Chi squared: its mean is the degrees of freedom, and six deviations above are one in a billion; the names are fixed anyway.
    degrees = len(allowed) - 1
    assert sum((count - expected) ** 2 / expected for count in counts.values()) <= degrees + 6 * (2 * degrees) ** 0.5


def test_the_fields_of_one_name_are_hashed_independently() -> None:
    """Each pair (hour, weekday) about as often as every other; and the minute says nothing about the hour."""
    resolved = [parse("H H * * H", name=f"tenant-{n}").resolved.split() for n in range(NAMES * 2)]
    pairs = Counter((fields[1], fields[4]) for fields in resolved)
    assert len(pairs) == 24 * 7 and max(pairs.values()) < 3 * NAMES * 2 / len(pairs)
    assert 0.2 / 24 < sum(int(fields[0]) % 24 == int(fields[1]) for fields in resolved) / len(resolved) < 2 / 24


@given(
    name=st.text(max_size=30).filter(lambda text: text.isprintable()),
    low=st.integers(0, 59),
    span=st.integers(0, 59),
    step=st.integers(1, 999),
)
def test_a_hashed_step_starts_below_the_step_and_goes_on_by_it(name: str, low: int, span: int, step: int) -> None:
    high = min(low + span, 59)
    for field, first, last in ((f"H/{step}", 0, 59), (f"H({low}-{high})/{step}", low, high)):
        expression = parse(f"{field} * * * *", name=name)
        minutes = values(expression.minutes)
        start = min(minutes)
        assert first <= start < first + step and start <= last
        assert minutes == set(range(start, last + 1, step))
        assert values(parse(expression.resolved).minutes) == minutes


def test_every_hashed_offset_of_a_step_is_used() -> None:
    starts = Counter(min(values(parse("H/15 * * * *", name=f"job-{n}").minutes)) for n in range(NAMES))
    assert set(starts) == set(range(15))


def test_a_hashed_day_comes_in_every_month_whatever_the_step() -> None:
    for n in range(300):
        for field in ("H", "H/3", "H/28", "H/30", "H/31", "H/999"):
            assert len(upcoming(parse(f"0 0 {field} 2 *", name=f"job-{n}"), ZONES.zone("UTC"), 0, 1)) == 1


def test_h_needs_a_name_and_a_macro_does_not_hash() -> None:
    assert "give it one" in refusal("H * * * *", name=None)
    assert parse("@daily", name="a").resolved == parse("@daily", name="b").resolved == "0 0 * * *"
    assert parse("5 4 * * *", name="a") == parse("5 4 * * *", name="b")
