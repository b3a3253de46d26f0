"""Zones: the pinned copy alone, the same offsets as `zoneinfo`, and which names are refused."""

from __future__ import annotations

import importlib.resources
import random
import shutil
import struct
import zoneinfo
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest
from cron_reference import tzif, zone_info, zone_info_of
from hypothesis import given
from hypothesis import strategies as st

from wheelsched.core.errors import InvalidSchedule
from wheelsched.cron import Zone, ZoneData, changed_zones, next_after, parse
from wheelsched.cron.zones import build_zone

ZONES = ZoneData.of_package()
ZONE_NAMES = sorted(ZONES.names)
PACKAGE = Path(str(importlib.resources.files("tzdata")))
LAST_MS = 4_102_444_800_000  # 2100


def offset_by_zoneinfo(tz: zoneinfo.ZoneInfo, at_s: int) -> int:
    offset = datetime.fromtimestamp(at_s, UTC).astimezone(tz).utcoffset()
    assert offset is not None
    return int(offset.total_seconds())


def test_the_names_are_those_the_package_lists() -> None:
    assert (PACKAGE / "zones").read_text().split() and ZONES.names == set((PACKAGE / "zones").read_text().split())


def test_the_clock_is_that_of_zoneinfo_in_every_zone_from_1970_to_2100() -> None:
    """Both sides of every change, and twelve other moments between each two, or of the whole time if there are none."""
    rng = random.Random(1)
    for zone in {zone.digest: zone for zone in map(ZONES.zone, ZONE_NAMES)}.values():
        tz = zone_info(zone.name)
        changes = [change.at_ms // 1000 for change in zone.transitions(0, LAST_MS)]
        for at_s in changes:
            assert zone.offset_s(at_s) != zone.offset_s(at_s - 1), zone.name
        edges = [0, *changes, LAST_MS // 1000]
        some = changes if len(changes) < 40 else rng.sample(changes, 40)
        moments = [moment for at_s in some for moment in (at_s - 1, at_s)]
        for start, end in rng.choices(list(pairwise(edges)), k=12):
            moments += [rng.randrange(start, end) for _ in range(4)]
        for at_s in moments:
            assert zone.offset_s(at_s) == offset_by_zoneinfo(tz, at_s), f"{zone.name} at {at_s}"


def test_transitions_say_what_the_clock_does() -> None:
    (gap, overlap) = ZONES.zone("Australia/Lord_Howe").transitions(1_782_000_000_000, 1_813_536_000_000)
    assert gap.is_gap and gap.reading_after - gap.reading_before == 30
    assert not overlap.is_gap and overlap.reading_before - overlap.reading_after == 30
    (apia,) = (change for change in ZONES.zone("Pacific/Apia").transitions(1_325_000_000_000, 1_325_500_000_000))
    assert apia.reading_after - apia.reading_before == 1_440
    assert list(ZONES.zone("UTC").transitions(0, LAST_MS)) == []


def test_transitions_are_taken_from_a_half_open_range() -> None:
    berlin = ZONES.zone("Europe/Berlin")
    at_ms = next(iter(berlin.transitions(1_767_225_600_000, LAST_MS))).at_ms
    assert [change.at_ms for change in berlin.transitions(at_ms, at_ms + 1)] == [at_ms]
    assert list(berlin.transitions(at_ms + 1, at_ms + 2)) == [] == list(berlin.transitions(at_ms - 1, at_ms))
    far_ms = 20 * 146_097 * 86_400_000
    assert [change.at_ms for change in berlin.transitions(at_ms + far_ms, at_ms + far_ms + 1)] == [at_ms + far_ms]


def test_no_zone_shows_a_reading_that_it_jumped_over_before() -> None:
    """`instants.py` takes the first instant at which the clock is at or past a reading; that is the rule as long as this holds."""
    for zone in map(ZONES.zone, ZONE_NAMES):
        for index, start_s in enumerate(zone.starts_s):
            if start_s >= 0:
                gap = (zone.shown_s[index - 1], start_s + zone.offsets_s[index])
                for later in range(index + 1, min(index + 6, len(zone.starts_s))):
                    first_shown = zone.starts_s[later] + zone.offsets_s[later]
                    assert gap[0] >= gap[1] or first_shown >= gap[1], f"{zone.name} at {start_s}"


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("", "write UTC"),
        ("localtime", "name it"),
        ("../UTC", "such as Europe/Berlin"),
        ("/etc/localtime", "such as Europe/Berlin"),
        ("Europe/../UTC", "such as Europe/Berlin"),
        ("posix/Europe/Berlin", "such as Europe/Berlin"),
        ("Europe", "such as Europe/Berlin"),
        ("tzdata.zi", "such as Europe/Berlin"),
        ("+02:00", "offsets and rules are not zones"),
        ("UTC+2", "offsets and rules are not zones"),
        ("EST5EDT4,M3.2.0,M11.1.0", "offsets and rules are not zones"),
        ("europe/berlin", "did you mean Europe/Berlin?"),
        (" UTC ", "did you mean UTC?"),
        ("Europe/Berlln", "did you mean Europe/Berlin?"),
        ("America/New York", "did you mean America/New_York?"),
        ("UTC\0", "write a name"),
        ("Z" * 100_000, "such as Europe/Berlin"),
    ],
)
def test_what_is_not_a_name_of_the_database_is_refused(name: str, advice: str) -> None:
    with pytest.raises(InvalidSchedule, match="time zone") as refusal:
        ZONES.zone(name)
    assert advice in str(refusal.value) or "did you mean" in str(refusal.value)
    assert refusal.value.errors[0]["pointer"] == "/time_zone"
    assert str(refusal.value).isascii() and len(str(refusal.value)) < 300


@pytest.mark.parametrize(("alias", "name"), [("US/Eastern", "America/New_York"), ("Asia/Calcutta", "Asia/Kolkata"), ("Zulu", "UTC")])
def test_an_alias_counts(alias: str, name: str) -> None:
    expression = parse("30 2 * * *")
    for at_ms in (0, 1_772_900_000_000, 1_793_500_000_000):
        assert next_after(expression, ZONES.zone(alias), at_ms) == next_after(expression, ZONES.zone(name), at_ms)


def test_neither_the_search_path_nor_the_system_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lying copy on PYTHONTZPATH: Berlin is Tokyo. `zoneinfo` believes it, we do not."""
    (tmp_path / "Europe").mkdir()
    shutil.copy(PACKAGE / "zoneinfo" / "Asia" / "Tokyo", tmp_path / "Europe" / "Berlin")
    monkeypatch.setenv("PYTHONTZPATH", str(tmp_path))
    zoneinfo.reset_tzpath()
    try:
        assert offset_by_zoneinfo(zoneinfo.ZoneInfo.no_cache("Europe/Berlin"), 1_767_225_600) == 9 * 3_600
        assert ZoneData.of_package().zone("Europe/Berlin").offset_s(1_767_225_600) == 3_600
    finally:
        monkeypatch.undo()
        zoneinfo.reset_tzpath()


def copy_of_the_data(folder: Path, *names: str) -> None:
    for name in (*names, "tzdata.zi"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(PACKAGE / "zoneinfo" / name, folder / name)


def patch(folder: Path) -> None:
    """Berlin becomes Tokyo, in a version of its own."""
    shutil.copy(PACKAGE / "zoneinfo" / "Asia" / "Tokyo", folder / "Europe" / "Berlin")
    index = (PACKAGE / "zoneinfo" / "tzdata.zi").read_text().replace(f"# version {ZONES.version}", "# version 2099z", 1)
    (folder / "tzdata.zi").write_text(index)


def test_a_patched_tree_shows_by_its_digests_which_zones_changed(tmp_path: Path) -> None:
    """CASES B-019: what a reload compares."""
    copy_of_the_data(tmp_path, "Europe/Berlin", "Asia/Tokyo")
    patch(tmp_path)
    patched = ZoneData.of_folder(tmp_path)
    assert patched.version == "2099z"
    assert patched.zone("Asia/Tokyo").digest == ZONES.zone("Asia/Tokyo").digest
    assert patched.zone("Europe/Berlin").digest != ZONES.zone("Europe/Berlin").digest
    assert patched.zone("Europe/Berlin").offset_s(1_767_225_600) == 9 * 3_600
    assert changed_zones(ZONES, patched, ["Asia/Tokyo", "Europe/Berlin"]) == ["Europe/Berlin"]
    assert changed_zones(patched, ZONES, ["Europe/Berlin", "Asia/Tokyo"]) == ["Europe/Berlin"]


def test_an_update_in_place_is_noticed_and_what_was_never_read_counts_as_changed(tmp_path: Path) -> None:
    names = ["Asia/Tokyo", "Asia/Kolkata", "Europe/Berlin"]
    copy_of_the_data(tmp_path, *names)
    before = ZoneData.of_folder(tmp_path)
    assert before.is_current() and before.fingerprint() == ZONES.fingerprint()
    for name in ("Europe/Berlin", "Asia/Tokyo"):
        before.zone(name)
    patch(tmp_path)
    assert not before.is_current()
    after = ZoneData.of_folder(tmp_path)
    assert after.is_current() and after.fingerprint() != before.fingerprint()
    assert after.fingerprint().startswith("2099z-")
    assert changed_zones(before, after, names) == ["Asia/Kolkata", "Europe/Berlin"]
    (tmp_path / "tzdata.zi").unlink()
    assert not after.is_current()


def test_the_fingerprint_of_a_patched_copy_of_one_version_differs(tmp_path: Path) -> None:
    copy_of_the_data(tmp_path)
    with (tmp_path / "tzdata.zi").open("a") as file:
        file.write("L Europe/Berlin Europe/Bonn\n")
    patched = ZoneData.of_folder(tmp_path)
    assert patched.version == ZONES.version and patched.fingerprint() != ZONES.fingerprint()
    assert changed_zones(ZONES, patched, ["Europe/Bonn", "Europe/Atlantis"]) == ["Europe/Bonn"]
    assert changed_zones(ZONES, ZoneData.of_package(), ["Europe/Berlin"]) == []


def zone_with_rule(footer: str) -> Zone:
    return build_zone("Test", tzif(footer))


@pytest.mark.parametrize(
    "footer",
    [
        "EST5EDT,M3.2.0,M11.1.0",
        "<-02>2<-01>,M3.5.0/-1,M10.5.0/0",
        "EET-2EEST,M3.4.4/50,M10.4.4/50",
        "IST-1GMT0,M10.5.0,M3.5.0/1",
        "AAA-10BBB-10:30,J60/2:15:00,J300/-2",
    ],
)
def test_rules_after_the_last_listed_change_are_those_of_zoneinfo(footer: str) -> None:
    zone, tz = zone_with_rule(footer), zone_info_of(tzif(footer))
    rng = random.Random(footer)
    changes = [change.at_ms // 1000 for change in zone.transitions(86_400_000 * 366, LAST_MS)]
    assert len(changes) == 2 * 129
    for at_s in [moment for change in changes for moment in (change - 1, change)] + [rng.randrange(10**8, 4 * 10**9) for _ in range(300)]:
        assert zone.offset_s(at_s) == offset_by_zoneinfo(tz, at_s), at_s


@pytest.mark.parametrize(("day", "dates"), [("J59", "02-28 02-28"), ("J60", "03-01 03-01"), ("59", "03-01 02-29"), ("0", "01-01 01-01")])
def test_a_rule_may_count_the_days_of_the_year_with_or_without_29_february(day: str, dates: str) -> None:
    """RFC 9636, 3.3.2, in 2027 and 2028. `zoneinfo` is a day off with two of these; no zone uses them."""
    zone = zone_with_rule(f"AAA0BBB,{day}/12,J300")
    starts = [change for change in zone.transitions(1_798_761_600_000, 1_861_920_000_000) if change.is_gap]
    assert [zone.local_text(change.at_ms - 1)[5:10] for change in starts] == dates.split()


@pytest.mark.parametrize("data", [b"", b"TZif", b"TZif1" + bytes(40), b"GIF89a" + bytes(60), tzif("EST5EDT,lunar,solar"), tzif("?")])
def test_a_damaged_file_is_not_taken_for_a_zone(data: bytes) -> None:
    with pytest.raises((ValueError, struct.error)):
        build_zone("Test", data)


@given(zone=st.sampled_from(ZONE_NAMES), at_s=st.integers(70_000_000, 60_000_000_000))
def test_an_instant_survives_the_way_to_local_text_and_back(zone: str, at_s: int) -> None:
    text = ZONES.zone(zone).local_text(at_s * 1000)
    assert datetime.fromisoformat(text).timestamp() == at_s
    assert text == datetime.fromtimestamp(at_s, zone_info(zone)).isoformat()
