"""The published vectors, each a case of its own: what runs when, and what is refused."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from wheelsched.core.errors import InvalidSchedule
from wheelsched.cron import ZoneData, count_between, last_before, last_few, next_after, parse, upcoming

VECTORS = Path(__file__).parents[1] / "vectors"
HEADER = json.loads((VECTORS / "header.json").read_text(encoding="ascii"))
ZONES = ZoneData.of_package()


def cases(*, refused: bool) -> list[Any]:
    vectors = [json.loads(line) for line in (VECTORS / "cron.jsonl").read_text(encoding="ascii").splitlines()]
    return [pytest.param(vector, id=vector["id"]) for vector in vectors if bool(vector.get("error")) is refused]


def utc_ms(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp()) * 1000


def test_the_vectors_were_computed_with_the_zone_data_in_use() -> None:
    assert ZONES.version == HEADER["iana_version"]


@pytest.mark.parametrize("vector", cases(refused=False))
def test_the_runs_are_those_of_the_vector(vector: dict[str, Any]) -> None:
    """Also asked one by one and from half-way: the set of runs does not depend on the start."""
    expression, zone = parse(vector["expr"]), ZONES.zone(vector["tz"])
    after_ms, expected = utc_ms(vector["after"]), [utc_ms(text) for text in vector["expect"]]
    assert upcoming(expression, zone, after_ms, len(expected)) == expected
    for earlier_ms, later_ms in zip([after_ms, *expected], expected, strict=False):
        assert next_after(expression, zone, (earlier_ms + later_ms) // 2) == later_ms
        assert next_after(expression, zone, later_ms - 1) == later_ms
        assert last_before(expression, zone, later_ms + 1) == later_ms
    assert last_few(expression, zone, expected[-1] + 1, len(expected)) == expected
    assert count_between(expression, zone, after_ms + 1, expected[-1] + 1) == len(expected)


@pytest.mark.parametrize("vector", cases(refused=True))
def test_the_vector_is_refused(vector: dict[str, Any]) -> None:
    with pytest.raises(InvalidSchedule) as refusal:
        parse(vector["expr"])
        ZONES.zone(vector["tz"])
    (error,) = refusal.value.errors
    assert error["detail"] == str(refusal.value)
    if error["pointer"] == "/cron":
        assert ", column " in error["detail"]
    else:
        assert error["pointer"] == "/time_zone"
    assert error["detail"].isascii() and len(error["detail"]) < 300
