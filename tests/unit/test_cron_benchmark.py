"""The small size of the benchmark runs, so that it cannot rot, and the chains of instants show that the work was done."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def load() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "bench_cron.py"
    spec = importlib.util.spec_from_file_location("bench_cron", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# croniter takes either day field where one begins with `*`; and a fixed time of the repeated hour runs both times.
DIFFERENT = {f"{direction}{name}" for direction in ("", "last ") for name in ("new year's Sundays", "leap-day Sundays")} | {"last daily"}


def test_the_small_benchmark_runs_and_agrees_with_its_peers_where_the_rules_are_the_same() -> None:
    rows = load().run("small")
    assert {(row["name"], row["baseline"]) for row in rows if not row["agrees"]} == {(name, "croniter") for name in DIFFERENT}
    assert len(rows) == 2 * 2 * 8 + 5 and all(row["value"] > 0 for row in rows)
    assert {row["baseline"] for row in rows} == {"croniter", "cronsim", "one by one"}
