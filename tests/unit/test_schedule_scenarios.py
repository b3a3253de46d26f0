"""What becomes of each occurrence: the published vectors, and random scenarios against a model that takes the rules at their word."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from schedule_model import Model, text

from wheelsched.cron import ZoneData
from wheelsched.testing.schedule_scenarios import ScenarioError, check_vectors, differences, play
from wheelsched.testing.simulate_node import quiet_logs

LINES = (Path(__file__).parents[1] / "vectors" / "missed.jsonl").read_text(encoding="ascii").splitlines()
VECTORS = [pytest.param(json.loads(line), id=json.loads(line)["id"]) for line in LINES]
ZONES = ZoneData.of_package()
START = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp())


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    quiet_logs()
    yield


@pytest.mark.parametrize("vector", VECTORS)
def test_the_model_does_what_the_vector_says(vector: dict[str, Any]) -> None:
    """First of all: what the node is compared with below is right itself."""
    assert differences(vector["expect"], Model(vector).play()) == []


@pytest.mark.parametrize("vector", VECTORS)
async def test_a_node_does_what_the_vector_says(vector: dict[str, Any]) -> None:
    assert differences(vector["expect"], await play(vector, zones=ZONES)) == []


@pytest.mark.parametrize("vector", VECTORS[::3])
async def test_a_node_does_what_the_vector_says_over_http(vector: dict[str, Any]) -> None:
    assert differences(vector["expect"], await play(vector, http=True, zones=ZONES)) == []


# --- random scenarios -----------------------------------------------------------------------------------------------------------

STEP = 60  # occurrences are a minute apart
LENGTHS = [1, 20, 59, 60, 61, 119, 120, 121, 200, 400]


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, Any]:
    """Up to twenty minutes; ends of runs and outages fall on occurrences as often as beside them."""
    minutes = draw(st.integers(1, 20))
    moments = st.one_of(st.integers(-2, minutes + 5).map(lambda minute: minute * STEP), st.integers(-90, (minutes + 5) * STEP))
    outages = []
    for start, length in draw(st.lists(st.tuples(moments, st.sampled_from([1, 30, 60, 61, 120, 185, 600])), max_size=3)):
        outages.append([text(START + start), text(START + start + length)])
    marks = draw(st.lists(st.integers(0, minutes - 1), max_size=4, unique=True))
    return {
        "schedule": draw(st.sampled_from([
            {"cron": "* * * * *", "time_zone": "UTC"}, {"every_s": STEP, "anchor_at": text(START)},
            {"every_s": 45, "anchor_at": text(START + 15)}, {"cron": "*/2 * * * *", "time_zone": "Asia/Kolkata"},
        ])),
        "window": [text(START), text(START + minutes * STEP)],
        "down": outages,
        "run_s": draw(st.sampled_from(LENGTHS)),
        "run_s_at": {text(START + minute * STEP): draw(st.sampled_from(LENGTHS)) for minute in marks},
        "policy": {
            "missed_runs": {
                "policy": draw(st.sampled_from(["run_latest", "run_all", "skip"])),
                "starting_deadline_s": draw(st.sampled_from([None, None, 0, 1, 59, 60, 61, 120, 300])),
            },
            "overlap": draw(st.sampled_from(["allow", "forbid", "replace", "buffer_one"])),
        },
    }  # fmt: skip


def a_scenario(**changes: Any) -> dict[str, Any]:
    return {
        "schedule": {"cron": "* * * * *", "time_zone": "UTC"}, "window": [text(START), text(START + 300)], "down": [], "run_s": 20,
        "policy": {"missed_runs": {"policy": "run_all", "starting_deadline_s": None}, "overlap": "allow"}, **changes,
    }  # fmt: skip


@settings(max_examples=100, deadline=None)
@example(a_scenario(down=[[text(START + 50), text(START + 120)], [text(START + 120), text(START + 150)]]))
@given(scenario=scenarios())
def test_a_node_does_what_the_model_does(scenario: Mapping[str, Any]) -> None:
    expected = Model(scenario).play()
    for entry in expected:
        event(f"{entry['do']} {entry['why']} {entry.get('ended', '')}")
    told = differences(expected, asyncio.run(play(scenario, zones=ZONES)))
    assert told == [], "\n".join([json.dumps(scenario), *told])


@pytest.mark.parametrize("overlap", ["allow", "buffer_one", "replace"])
async def test_run_all_catches_up_the_newest_hundred_and_says_so_of_the_rest(overlap: str) -> None:
    scenario = a_scenario(
        window=[text(START), text(START + 9_000)], down=[[text(START + 30), text(START + 8_000)]],
        policy={"missed_runs": {"policy": "run_all", "starting_deadline_s": None}, "overlap": overlap},
    )  # fmt: skip
    expected = Model(scenario).play()
    assert sum(entry["why"] == "catch_up_cap" for entry in expected) == 33
    assert differences(expected, await play(scenario, zones=ZONES)) == []


# --- the checker itself ---------------------------------------------------------------------------------------------------------


async def test_a_difference_is_shown_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    vector = json.loads(LINES[0])
    vector["expect"][2]["why"] = "catch_up"
    assert await check_vectors([json.dumps(vector), LINES[1]]) == 1
    told = capsys.readouterr().out
    assert "m001  DIFFERS" in told and '"why": "catch_up"' in told and '"why": "on_time"' in told
    assert "2 vectors in process, 1 as expected, 1 differ" in told


async def test_a_run_that_no_occurrence_accounts_for_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checker that only looks where something is expected would not see a run too many."""
    from wheelsched.testing import schedule_scenarios

    whole = schedule_scenarios.occurrences_of
    monkeypatch.setattr(schedule_scenarios, "occurrences_of", lambda scenario, zones: whole(scenario, zones)[:-1])
    with pytest.raises(ScenarioError, match="2026-01-01T00:04:00Z"):
        # The last run of the others is still going when the fifth comes.
        await play(a_scenario(run_s=100), zones=ZONES)
