"""How a node ends and begins: SIGTERM, locks, ports."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import MakeNode
from http_calls import Http, wait_until

from wheelsched.testing.process import NodeFailed, NodeProcess

POLLS = 20


def poll(url: str) -> tuple[int, object, float]:
    """(status, body, seconds) of a claim that has nothing to get."""
    began = time.monotonic()
    with Http(url) as http:
        answer = http.call("POST", "/v1/queues/empty:claim", {"wait_s": 60})
    return answer.status, answer.body, time.monotonic() - began


def test_sigterm_answers_long_polls_and_keeps_leases(node: NodeProcess, http: Http) -> None:
    """Every waiting claim gets an empty list at once, the node ends with 0 within 5 s, and what ran before it runs on after it:
    the same token heartbeats and completes on the next process, which starts at once because the lock is gone."""
    job_id = http.create()["job_id"]
    (job,) = http.claim(lease_s=30)
    with ThreadPoolExecutor(POLLS) as pool:
        polls = [pool.submit(poll, node.url) for _ in range(POLLS)]
        wait_until(lambda: http.get("/status")["waiters"] == POLLS)
        code, took_s = node.terminate()
        answers = [one.result() for one in polls]
    assert code == 0, node.log_tail()
    assert took_s < 5
    assert [(status, body) for status, body, _ in answers] == [(200, {"jobs": []})] * POLLS
    assert max(seconds for _, _, seconds in answers) < 30
    node.start()
    with Http(node.url) as again:
        assert again.get(f"/v1/jobs/{job_id}")["status"] == "RUNNING"
        beat = again.post(f"/v1/attempts/{job['lease_token']}:heartbeat")
        assert beat["cancel_requested"] is False
        assert again.claim() == []
        assert again.complete(job)["status"] == "SUCCEEDED"
        assert [row["outcome"] for row in again.get(f"/v1/jobs/{job_id}/attempts")["attempts"]] == ["succeeded"]


def test_sigterm_with_work_under_way_loses_no_answer(node: NodeProcess) -> None:
    """Callers that create without pause see answers or a closed connection, never a 500; every 201 is there afterwards."""

    def create_until_the_end(number: int) -> tuple[list[str], set[int]]:
        made: list[str] = []
        statuses: set[int] = set()
        try:
            with Http(url) as http:
                while True:
                    answer = http.call("POST", "/v1/jobs", {"queue": f"q{number}"})
                    statuses.add(answer.status)
                    if answer.status == 201:
                        made.append(answer.body["job_id"])
        except OSError:
            return made, statuses
        except Exception as error:  # http.client's own, for a connection that ended
            assert type(error).__module__ == "http.client", error
            return made, statuses

    url = node.url
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(create_until_the_end, number) for number in range(4)]
        with Http(url) as http:
            wait_until(lambda: len(http.get("/v1/jobs?limit=200")["jobs"]) > 100)
        code, _ = node.terminate()
        results = [run.result() for run in runs]
    assert code == 0
    assert set().union(*(statuses for _, statuses in results)) <= {201, 503}
    node.start()
    with Http(node.url) as http:
        for made, _ in results:
            for job_id in made:
                assert http.get(f"/v1/jobs/{job_id}")["status"] == "QUEUED"


def test_a_second_signal_quits_at_once(node: NodeProcess, http: Http) -> None:
    http.create()
    node.signal(signal.SIGTERM)
    node.signal(signal.SIGTERM)
    assert node.exit_code(10) in (0, 1)  # the first may have been quicker
    node.start()
    with Http(node.url) as again:
        assert len(again.get("/v1/jobs")["jobs"]) == 1


def test_sigterm_while_it_starts_ends_it(make_node: MakeNode) -> None:
    """At whatever point of the start the signal arrives."""
    for delay_s in (0.0, 0.05, 0.1, 0.15, 0.2):
        node = make_node(f"n{delay_s}")
        node.spawn()
        time.sleep(delay_s)
        code, _ = node.terminate()
        # Before Python has its handler, SIGTERM does what it does to any process.
        assert code in (0, -signal.SIGTERM)
        node.start()
        node.kill()


def test_a_directory_in_use_is_refused_with_the_owner(node: NodeProcess, http: Http, make_node: MakeNode) -> None:
    """By name, with the way out, and without harm to the owner."""
    second = make_node("second", data_dir=node.data_dir)
    second.log_path = node.log_path.with_name("second.log")
    owner = node.pid
    with pytest.raises(NodeFailed) as failed:
        second.start()
    message = str(failed.value)
    assert "code 1" in message
    assert f"is in use by process {owner}" in message
    assert "stop that node, or name another node.data_dir" in message
    assert http.create()["status"] == "QUEUED"


def test_the_command_of_a_user_starts_and_stops(tmp_path: Path) -> None:
    """`wheelsched dev` itself, not forked: one line of JSON, a served port, exit code 0; a taken port is told in words."""
    command = [sys.executable, "-m", "wheelsched.cli", "dev", "--port", "0", "--json", "--data-dir"]
    with subprocess.Popen([*command, str(tmp_path / "one")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        started = json.loads(node.stdout.readline())
        assert started["pid"] == node.pid
        with Http(started["url"]) as http:
            assert http.get("/readyz") == {"ready": True, "reasons": []}
        node.terminate()
        assert node.wait(10) == 0
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command[command.index("0")] = port
        run = subprocess.run([*command, str(tmp_path / "two")], capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 1
    assert f"127.0.0.1:{port} is in use; choose another port with --port" in run.stderr
