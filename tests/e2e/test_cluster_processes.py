"""Three real nodes that start from one file: they answer as one, lose nothing with one of them, and stop when they are asked to."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from conftest import size
from http_calls import Http

from wheelsched.testing.chaos import Beat, Event, Plan, Report, Seen, check_reads, write_section
from wheelsched.testing.cluster_process import ClusterProcesses

FAULTS = size("E2E_CHAOS_FAULTS", 5)
# A condition that does not come true within this long on a busy machine will not.
PATIENCE_S: Final = 120.0
STOP_S_MAX: Final = 5.0
JOBS: Final = 60


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    cluster = ClusterProcesses(tmp_path_factory.mktemp("cluster"), 3)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()
    assert [fault for node in cluster.nodes.values() for fault in node.log_faults()] == []


def repeated(call: Callable[[], Any], statuses: tuple[int, ...]) -> Any:
    """The body of the first answer with one of the statuses. 503 says that nothing was done, and when to ask again."""
    give_up = time.monotonic() + PATIENCE_S
    while (answer := call()).status not in statuses:
        assert answer.status == 503 and time.monotonic() < give_up, answer
        time.sleep(0.05)
    return answer.body


@pytest.mark.timeout(300)
def test_any_node_answers_for_all(cluster: ClusterProcesses) -> None:
    """Created at one node, read at another, claimed at the third, completed at the first, and seen by all."""
    assert sorted(cluster.leaders()) == list(range(cluster.group_count))
    with Http(cluster.nodes["n1"].url) as first, Http(cluster.nodes["n2"].url) as second, Http(cluster.nodes["n3"].url) as third:
        for number in range(12):  # of several groups
            made = first.create(payload=number)
            assert second.get(f"/v1/jobs/{made['job_id']}")["payload"] == number
            (job,) = third.claim(wait_s=20)
            assert job["job_id"] == made["job_id"]
            assert first.complete(job)["status"] == "SUCCEEDED"
            assert [http.get(f"/v1/jobs/{made['job_id']}")["status"] for http in (first, second, third)] == ["SUCCEEDED"] * 3
        nodes = second.get("/v1/cluster")["nodes"]
        assert [(node["id"], node["up"]) for node in nodes] == [("n1", True), ("n2", True), ("n3", True)]


@pytest.mark.timeout(600)
def test_a_killed_node_loses_nothing_and_its_groups_fire_again(cluster: ClusterProcesses) -> None:
    led = cluster.leaders()
    victim = max(cluster.names, key=list(led.values()).count)
    survivors = [name for name in cluster.names if name != victim]
    items = [{"queue": "killed", "delay_s": round(1 + 2 * number / JOBS, 3), "payload": number} for number in range(JOBS)]
    with Http(cluster.nodes[victim].url) as http:
        results = http.post("/v1/jobs:batch", {"jobs": items})["results"]
    made = {result["job"]["job_id"] for result in results}
    assert len(made) == JOBS
    cluster.nodes[victim].kill()
    done: set[str] = set()
    body = {"max": 20, "wait_s": 1, "lease_s": 20}
    give_up = time.monotonic() + PATIENCE_S
    with Http(cluster.nodes[survivors[0]].url) as first, Http(cluster.nodes[survivors[1]].url) as second:
        while done != made:
            assert time.monotonic() < give_up, f"{len(made - done)} of {JOBS} jobs did not come"
            # The dead node's groups have no leader for a moment; a claim is served from those that have one.
            jobs = repeated(lambda: first.call("POST", "/v1/queues/killed:claim", body), (200,))["jobs"]
            for job in jobs:
                path = f"/v1/attempts/{job['lease_token']}:complete"
                repeated(lambda path=path: second.call("POST", path, {"outcome": "succeeded"}), (200,))
                assert job["job_id"] not in done
                done.add(job["job_id"])
        cluster.wait("every group is led by a survivor", lambda: len({g for n in survivors for g in cluster.led_by(n)}) == len(led))
        cluster.nodes[victim].start()
        cluster.wait_ready()
        with Http(cluster.nodes[victim].url) as http:
            for job_id in made:
                assert http.get(f"/v1/jobs/{job_id}")["status"] == "SUCCEEDED"
                assert http.get(f"/v1/jobs/{job_id}/attempts")["attempts"][-1]["outcome"] == "succeeded"


@pytest.mark.timeout(600)
def test_each_node_stops_at_sigterm_and_comes_back(cluster: ClusterProcesses) -> None:
    """One after the other, as a rolling restart does: what it led is led by others before it ends."""
    for name in cluster.names:
        others = [other for other in cluster.names if other != name]
        code, took_s = cluster.nodes[name].terminate()
        assert code == 0
        assert took_s < STOP_S_MAX
        cluster.wait("all is led", lambda others=others: len({g for n in others for g in cluster.led_by(n)}) == cluster.group_count)
        cluster.nodes[name].start()
        cluster.wait_ready()


@pytest.mark.skipif("E2E_CHAOS_FAULTS" not in os.environ, reason="minutes of faults: `make chaos`, or E2E_CHAOS_FAULTS=5 here")
@pytest.mark.timeout(120 + 60 * FAULTS)
def test_a_cluster_keeps_its_word_through_faults(tmp_path: Path) -> None:
    """Kills, cuts, stops and stepped clocks under load, then the history of all clients against the cluster; see testing/chaos.py."""
    seed = random.SystemRandom().randrange(10**6)
    command = [sys.executable, "-m", "wheelsched.testing.chaos", "--faults", str(FAULTS), "--seed", str(seed)]
    command += ["--kinds", "kill,cut,one_way,term,clock", "--data-dir", str(tmp_path / "chaos")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 acknowledged jobs lost" in run.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_demo_of_a_cluster_accounts_for_every_job(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "wheelsched.cli", "demo", "--cluster", "--output-dir", str(tmp_path), "--json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    told = json.loads(run.stdout)
    assert (told["lost"], told["run_twice"], told["keys_created_twice"], told["jobs_nobody_asked_for"]) == (0, 0, 0, 0)
    assert all(kind["created"] == kind["succeeded"] + kind["dead"] for kind in told["kinds"].values())
    assert told["outage_s"] > 0


# --- the checks themselves ------------------------------------------------------------------------------------------------------


def test_reads_that_fit_one_order_are_accepted() -> None:
    told = [Seen(0, 1, "SCHEDULED", 1), Seen(2, 3, "QUEUED", 1), Seen(2, 5, "SCHEDULED", 1), Seen(4, 6, "RUNNING", 2), Seen(7, 7, "DEAD")]
    assert list(check_reads({"j": [*told, Seen(8, 9, "DEAD", 3)]})) == []


@pytest.mark.parametrize(
    ("told", "what"),
    [
        ([Seen(0, 1, "RUNNING", 2), Seen(2, 3, "QUEUED", 1)], "told at version 2, and later at 1"),
        ([Seen(0, 1, "QUEUED", 1), Seen(2, 3, "SCHEDULED", 1)], "told QUEUED at version 1, and later SCHEDULED"),
        ([Seen(0, 1, "SUCCEEDED"), Seen(2, 3, "RUNNING", 2)], "told SUCCEEDED, and later RUNNING"),
        ([Seen(0, 5, "DEAD", 2), Seen(0, 5, "RUNNING", 2)], "at version 2 the statuses"),
    ],
)
def test_a_read_that_went_back_is_found(told: list[Seen], what: str) -> None:
    (fault, *_) = check_reads({"j": told})
    assert what in fault


def test_a_gap_is_that_of_the_groups_the_node_led() -> None:
    event = Event("kill", "n1", (1, 2), 10_000, healed_ms=12_000)
    beats = [
        Beat(1, due_ms=10_100, acknowledged_ms=1, leased_ms=11_000), Beat(3, due_ms=10_100, acknowledged_ms=1, leased_ms=19_000),
        Beat(2, due_ms=9_900, acknowledged_ms=1, leased_ms=19_000), Beat(2, due_ms=10_000, acknowledged_ms=10_500, leased_ms=10_700),
        Beat(2, due_ms=13_000, acknowledged_ms=1),
    ]  # fmt: skip
    report = Report(Plan(), events=[event], beats=beats)
    assert report.gap_ms(event) == 900
    assert "| kill -9, restart | 1 | 1 | 900 ms | 900 ms |" in "\n".join(report.table())


def test_the_report_replaces_what_stands_between_the_marks(tmp_path: Path) -> None:
    document = tmp_path / "chaos.md"
    document.write_text("before\n<!-- chaos: begin -->\nold\n<!-- chaos: end -->\nafter\n")
    write_section(document, ["new", "lines"])
    write_section(document, ["new", "lines"])
    assert document.read_text() == "before\n<!-- chaos: begin -->\nnew\nlines\n<!-- chaos: end -->\nafter\n"
    document.write_text("no marks")
    with pytest.raises(ValueError, match="lacks the marks"):
        write_section(document, [])
