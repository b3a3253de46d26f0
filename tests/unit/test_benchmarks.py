"""The small size of every benchmark runs, so that none of them rots; figures are not judged, work done is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import client, common  # noqa: E402  # they lie beside the package, not in it
from benchmarks.run import names  # noqa: E402

FIELDS = {"name", "n", "value", "unit", "baseline", "baseline_value", "ratio"}
LOADS = sorted(path.stem for path in (ROOT / "benchmarks").glob("load_*.py"))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", names())
def test_small_size_runs_and_writes_its_rows(name: str, tmp_path: Path) -> None:
    """What the benchmarks check of their own work (counts, checksums, order) fails the run."""
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks.run", "--only", name, "--size", "small", "--results", str(results)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-4_000:]
    document: dict[str, Any] = json.loads(results.read_text())
    assert {"cpu", "cores", "python", "commit"} <= set(document["machine"])
    (result,) = document["benchmarks"]
    assert result["name"] == name
    assert result["rows"]
    for line in result["rows"]:
        assert set(line) >= FIELDS
        assert isinstance(line["value"], int | float)
        assert line["unit"]


@pytest.mark.parametrize("name", LOADS)
def test_load_scripts_explain_themselves(name: str) -> None:
    done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--check" in done.stdout


@pytest.mark.timeout(120)
def test_a_load_script_measures_and_checks_its_bounds() -> None:
    """One of them end to end, tiny; its figures on a busy machine are nobody's fault, so without `--check`."""
    command = [sys.executable, "-m", "benchmarks.load_lateness", "--rate", "20", "--seconds", "1", "--workers", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lateness at the worker, p99" in done.stdout


def test_a_broken_bound_is_an_exit_code_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    figures = [common.Figure("fine", 1.0, "ms", 2.0), common.Figure("late", 3.0, "ms", 2.0)]
    assert common.report("bounds", figures, check=False) == 0
    assert common.report("bounds", figures, check=True) == 1
    assert "broken: late" in capsys.readouterr().out


@pytest.mark.parametrize(("q", "value"), [(0.0, 1), (0.5, 5), (0.9, 9), (0.99, 10), (1.0, 10)])
def test_a_percentile_is_a_value_that_was_seen(q: float, value: float) -> None:
    assert common.percentile([10, 9, 8, 7, 6, 5, 4, 3, 2, 1], q) == value


def test_ratio_above_one_is_better_whatever_the_unit() -> None:
    assert common.row("rate", 1, 200.0, "jobs/s", "other", 100.0)["ratio"] == 2.0
    assert common.row("cost", 1, 100.0, "us/job", "other", 200.0)["ratio"] == 2.0


def test_an_answer_in_pieces_is_put_together() -> None:
    """Sockets cut where they like: at every byte of head and body."""
    answer = b'HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nContent-Length: 11\r\n\r\n{"a": true}'
    for cut in range(1, len(answer)):
        got: list[tuple[int, bytes]] = []
        connection = client.Connection()
        connection.on_answer = lambda status, body, got=got: got.append((status, body))
        for _ in range(2):  # and the next one on the same connection
            connection.data_received(answer[:cut])
            connection.data_received(answer[cut:])
        assert got == [(201, b'{"a": true}')] * 2


def test_the_sum_of_numbers_knows_a_last_short_batch() -> None:
    assert client.numbers_sum(250, 100) == sum(range(100)) * 2 + sum(range(50))


def test_a_job_has_the_payload_size_that_is_written_down() -> None:
    job = json.loads(client.a_job("q", 7, delay_s=1.5, kind="precise"))
    assert len(json.dumps(job["payload"], separators=(",", ":"))) == client.PAYLOAD_BYTES
    assert (job["queue"], job["delay_s"], job["payload"]["number"]) == ("q", 1.5, 7)
