"""The conformance vectors of `tests/vectors/raft`, each scenario and each table one case; the invariants hold after every step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from wheelsched.testing.raft_scenarios import ScenarioFailed, load_scenarios, load_tables, main, run_scenario
from wheelsched.testing.raft_tables import CHECKS, check_row

VECTORS = Path(__file__).parents[1] / "vectors" / "raft"
SCENARIOS = load_scenarios(VECTORS)
TABLES = load_tables(VECTORS)


def scenario_named(name: str) -> dict[str, Any]:
    return copy.deepcopy(next(scenario for scenario in SCENARIOS if scenario["id"] == name))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=[scenario["id"] for scenario in SCENARIOS])
def test_scenario(scenario: dict[str, Any]) -> None:
    run_scenario(scenario)


@pytest.mark.parametrize("table", TABLES, ids=[table["table"] for table in TABLES])
def test_table(table: dict[str, Any]) -> None:
    assert table["rows"]
    for row in table["rows"]:
        try:
            check_row(table["table"], row)
        except AssertionError as error:
            raise AssertionError(f"{row['id']}: {error}") from error


def test_every_kind_of_table_is_there() -> None:
    assert {table["table"] for table in TABLES} == set(CHECKS)


def test_scenario_ids_are_unique() -> None:
    assert len({scenario["id"] for scenario in SCENARIOS}) == len(SCENARIOS)


# A runner that accepts everything would look like a core without faults.


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("election/elect-three", {"node": 1, "role": "follower"}),
        ("election/elect-three", {"nodes": [1, 2], "log": [3, 1]}),
        ("election/elect-three", {"sent": {"kind": "vote"}, "count": 3}),
        ("election/elect-three", {"sent": {"kind": "vote"}, "min": 3}),
        ("election/elect-three", {"in_flight": {}, "min": 1}),
        ("election/elect-three", {"leaders": [1, 2]}),
        ("election/elect-three", {"leader_among": [2, 3]}),
        ("election/elect-three", {"durable": 2, "vote": 3}),
        ("election/elect-three", {"progress": [1, 2], "match": 2}),
        ("election/elect-three", {"node": 1, "conf": {"voters": [1, 2]}}),
        ("reads/safe-read", {"reads": 1, "equals": []}),
    ],
)
def test_the_runner_sees_a_wrong_expectation(name: str, check: dict[str, Any]) -> None:
    scenario = scenario_named(name)
    scenario["expect"] = [check]
    with pytest.raises(ScenarioFailed):
        run_scenario(scenario)


def test_the_runner_sees_a_wrong_result_and_a_missing_fault() -> None:
    scenario = scenario_named("election/elect-single")
    scenario["steps"] = [{"op": "propose", "node": 1, "data": ["a"], "result": "accepted"}]
    with pytest.raises(ScenarioFailed, match="not_leader"):
        run_scenario(scenario)
    scenario["steps"] = [{"op": "tick", "node": 1, "fault": True}]
    with pytest.raises(ScenarioFailed, match="no fault"):
        run_scenario(scenario)


def test_the_command_prints_a_line_for_each_and_fails_where_one_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = tmp_path / "tables"
    tables.mkdir()
    (tables / "a.json").write_text('{"table": "up_to_date", "rows": [{"id": "r", "log": [1], "candidate": [1, 1], "up_to_date": true}]}')
    scenarios = tmp_path / "scenarios"
    scenarios.mkdir()
    good = '{"id": "good", "nodes": {"1": {}}, "steps": [{"op": "check", "expect": [{"node": 1, "term": 0}]}]}'
    (scenarios / "a.json").write_text('{"scenarios": [' + good + "]}")
    assert main([str(tmp_path)]) == 0
    assert main([str(scenarios)]) == 0
    assert capsys.readouterr().out.count("pass up_to_date/r") == 2  # below the directory, and beside it
    bad = good.replace('"term": 0', '"term": 1').replace("good", "bad")
    (scenarios / "b.json").write_text('{"scenarios": [' + bad + "]}")
    assert main([str(tmp_path)]) == 1
    assert "FAIL bad: ScenarioFailed: step 0 check" in capsys.readouterr().out
    assert main([]) == 2
