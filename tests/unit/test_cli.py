"""The commands: help, exit codes, what is sent, and what is said when things go wrong. A small fake stands for the node."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import click
import pytest
import structlog
from click.testing import CliRunner

from wheelsched.cli.demo_plan import KIND_BY_NAME, planned_jobs
from wheelsched.cli.demo_report import Account, Finished, Outage, Run
from wheelsched.cli.main import cli, main
from wheelsched.cli.options import Duration
from wheelsched.cli.remote import Remote


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


ALL = dict(commands(cli))
LEAVES = [path for path, command in ALL.items() if not isinstance(command, click.Group)]


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help_works_and_has_an_example(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, [*path, "--help"])
    assert result.exit_code == 0, result.output
    assert "Example:" in result.output
    assert f"wheelsched {path[0]}" in result.output.partition("Example:")[2]


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_every_command_has_json_and_says_what_its_options_are_for(path: tuple[str, ...]) -> None:
    options = [parameter for parameter in ALL[path].params if isinstance(parameter, click.Option)]
    assert any("--json" in option.opts for option in options)
    assert all(option.help for option in options)


EXAMPLE = re.compile(r"^\s*wheelsched (.+)$", re.MULTILINE)


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_examples_name_commands_and_options_that_exist(path: tuple[str, ...]) -> None:
    for example in EXAMPLE.findall((ALL[path].help or "").partition("Example:")[2]):
        words = re.split(r"\s+", example.strip())
        found = next((ALL[tuple(words[:count])] for count in (2, 1) if tuple(words[:count]) in ALL), None)
        assert found is not None, example
        known = {name for parameter in found.params for name in parameter.opts}
        assert {word for word in words if re.fullmatch(r"--[a-z-]+", word)} <= known, example


class FakeNode:
    """Answers from a table (method, path) -> (status, document) and notes what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], tuple[int, Any]] = {}
        self.asked: list[tuple[str, str, Any, dict[str, str]]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fake.asked.append((self.command, self.path, json.loads(body) if body else None, dict(self.headers)))
                status, document = fake.answers.get((self.command, self.path.partition("?")[0]), (404, problem("not-found", 404)))
                if callable(document):
                    document = document(self.path)
                answer = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                if status == 503:
                    self.send_header("Retry-After", "1")
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="fake node")
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def problem(code: str, status: int, detail: str = "there is no such thing") -> dict[str, Any]:
    return {"code": code, "status": status, "title": code, "detail": detail}


@pytest.fixture
def fake() -> Iterator[FakeNode]:
    node = FakeNode()
    yield node
    node.close()


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    """Run a command as the console script does: (exit code, stdout, stderr)."""
    monkeypatch.delenv("WHEELSCHED_URL", raising=False)
    handlers, level = logging.root.handlers[:], logging.root.level

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        out = capsys.readouterr()
        return int(ended.value.code or 0), out.out, out.err

    yield call
    # Commands that run something set up logs, to a stderr that ends with the test.
    structlog.reset_defaults()
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


JOB = {
    "job_id": "job_1",
    "queue": "mail",
    "status": "SCHEDULED",
    "fire_at": "2026-11-01T07:00:00Z",
    "attempt": 0,
    "priority": "default",
    "version": 1,
}


def test_create_sends_what_was_asked_and_tells_the_id(fake: FakeNode, call: Call) -> None:
    fake.answers["POST", "/v1/jobs"] = (201, JOB)
    code, out, _ = call(
        "jobs",
        "create",
        "mail",
        "--url",
        fake.url,
        "--delay",
        "1h30m",
        "--payload",
        '{"to": "ada"}',
        "--key",
        "k1",
        "--window",
        "60",
        "--max-attempts",
        "3",
        "--label",
        "a=b=c",
        "--priority",
        "bulk",
    )
    assert code == 0 and "job_1" in out
    (_, _, body, headers) = fake.asked[0]
    assert body == {
        "queue": "mail",
        "delay_s": 5400.0,
        "payload": {"to": "ada"},
        "priority": "bulk",
        "labels": {"a": "b=c"},
        "timing": {"class": "flexible", "window_s": 60},
        "retry": {"max_attempts": 3},
    }
    assert headers["Idempotency-Key"] == "k1"


def test_create_from_a_file_goes_in_batches_and_tells_what_was_refused(fake: FakeNode, call: Call, tmp_path: Path) -> None:
    results = [{"status": 201, "job": JOB}, {"status": 400, "problem": problem("invalid-request", 400, "queue is missing")}]
    fake.answers["POST", "/v1/jobs:batch"] = (200, {"results": results})
    source = tmp_path / "jobs.jsonl"
    source.write_text('{"queue": "mail"}\n\n{"payload": 1}\n')
    code, out, _ = call("jobs", "create", "--from", source, "--url", fake.url, "--json")
    assert code == 1
    assert json.loads(out) == {"created": 1, "refused": [{"line": 3, "problem": results[1]["problem"]}]}
    keys = [item["idempotency_key"] for item in fake.asked[0][2]["jobs"]]
    assert len(set(keys)) == 2


def test_list_follows_the_pages(fake: FakeNode, call: Call) -> None:
    def page(path: str) -> dict[str, Any]:
        return {"jobs": [JOB], "next_cursor": None if "cursor=c1" in path else "c1"}

    fake.answers["GET", "/v1/jobs"] = (200, page)
    code, out, _ = call("jobs", "list", "--queue", "mail", "--status", "scheduled", "--label", "a=b", "--all", "--json", "--url", fake.url)
    assert code == 0 and len(json.loads(out)["jobs"]) == 2
    assert "status=SCHEDULED" in fake.asked[0][1] and "label=a%3Ab" in fake.asked[0][1]
    code, out, _ = call("jobs", "list", "--limit", "1", "--url", fake.url)
    assert code == 0 and "job_1" in out and "2026-11-01T07:00:00Z" in out


def test_exit_codes_follow_the_kind_of_refusal(fake: FakeNode, call: Call) -> None:
    assert call("jobs", "get", "job_x", "--url", fake.url)[0] == 3
    fake.answers["DELETE", "/v1/jobs/job_1"] = (409, problem("job-finished", 409, "job_1 is SUCCEEDED"))
    code, out, _ = call("jobs", "cancel", "job_1", "--url", fake.url)
    assert code == 4 and "job_1 is SUCCEEDED" in out
    fake.answers["PATCH", "/v1/jobs/job_1"] = (412, problem("version-mismatch", 412))
    assert call("jobs", "update", "job_1", "--delay", "1", "--if-version", "2", "--url", fake.url)[0] == 4
    assert fake.asked[-1][3]["If-Match"] == '"v2"'
    fake.answers["GET", "/v1/queues"] = (503, problem("unavailable", 503, "no quorum"))
    code, _, err = call("queues", "list", "--url", fake.url)
    assert code == 5 and "no quorum" in err and "try again in 1 s" in err
    fake.answers["GET", "/v1/queues"] = (
        400,
        {**problem("invalid-request", 400), "errors": [{"pointer": "/x", "detail": "bad x"}]},
    )
    code, _, err = call("queues", "list", "--url", fake.url)
    assert code == 2 and "/x: bad x" in err


def test_nobody_there_says_which_url_and_how_to_start(call: Call) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        code, out, err = call("jobs", "list", "--url", url)
    assert (code, out) == (5, "")
    assert url in err and "wheelsched dev" in err and "WHEELSCHED_URL" in err
    code, _, err = call("jobs", "list", "--url", url, "--json")
    assert code == 5 and json.loads(err)["error"]["code"] == "unreachable"


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("jobs", "create"),
        ("jobs", "create", "q", "--delay", "soon"),
        ("jobs", "create", "q", "--payload", "{"),
        ("jobs", "create", "q", "--at", "x", "--delay", "1"),
        ("jobs", "update", "job_1"),
        ("jobs", "list", "--url", "localhost"),
        ("queues", "set", "q"),
        ("queues", "set", "q", "--weights", "1,2"),
        ("dlq", "redrive", "q"),
        ("dlq", "redrive", "q", "job_1", "--all"),
        ("serve",),
        ("worker", "no_colon"),
        ("config", "check", "no/such/file.yaml"),
        ("dev", "--clock-start", "yesterday"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_says_why(call: Call, arguments: tuple[str, ...]) -> None:
    code, out, err = call(*arguments)
    assert code == 2 and not out and len(err) > 20


def test_queue_set_keeps_what_is_not_named(fake: FakeNode, call: Call) -> None:
    fake.answers["GET", "/v1/queues/mail"] = (
        200,
        {"name": "mail", "settings": {"lease_s": 45, "rate_per_s": 5, "max_concurrency": None}},
    )
    fake.answers["PUT", "/v1/queues/mail"] = (200, {"name": "mail"})
    assert call("queues", "set", "mail", "--max-concurrency", "20", "--rate", "none", "--url", fake.url)[0] == 0
    assert fake.asked[-1][2] == {"lease_s": 45, "max_concurrency": 20}
    assert call("queues", "set", "mail", "--reset", "--lease", "30s", "--url", fake.url)[0] == 0
    assert fake.asked[-1][2] == {"lease_s": 30.0}


def test_dead_letters_are_chosen_and_redriven(fake: FakeNode, call: Call) -> None:
    fake.answers["POST", "/v1/queues/mail/dead-letters:redrive"] = (200, {"redriven": 7})
    code, out, _ = call("dlq", "redrive", "mail", "--all", "--error-contains", "timeout", "--spread", "10m", "--url", fake.url)
    assert code == 0 and "7 redriven" in out
    assert fake.asked[-1][2] == {"all": True, "error_contains": "timeout", "spread_s": 600.0}


def test_config_check_tells_all_faults(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("http:\n  prot: 1\n  port: 99999\n")
    code, _, err = call("config", "check", path)
    assert code == 2 and f"{path}:2: http.prot" in err and f"{path}:3: http.port" in err
    path.write_text("http: {port: 9000}\n")
    code, out, _ = call("config", "check", path, "--json")
    assert code == 0 and json.loads(out)["http"]["port"] == 9000


def test_version_and_doctor_speak_json(call: Call) -> None:
    code, out, _ = call("version", "--json")
    assert code == 0 and set(json.loads(out)) == {"version", "python", "native"}
    code, out, _ = call("doctor", "--json")
    findings = json.loads(out)["findings"]
    assert [finding["check"] for finding in findings] == [
        "python",
        "native",
        "data directory",
        "disk space",
        "disk fsync",
        "file limit",
        "clock",
        "port",
    ]
    assert code == (1 if any(finding["verdict"] == "bad" for finding in findings) else 0)
    assert all(finding["advice"] for finding in findings if finding["verdict"] != "good")


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("1.5s", 1.5), ("250ms", 0.25), ("2h30m", 9_000), ("1d", 86_400)])
def test_durations(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == seconds


# Real processes.


def start_node(*options: object) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    command = [sys.executable, "-m", "wheelsched.cli", "dev", "--json", "--log-format", "json", *map(str, options)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WHEELSCHED_")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return process, json.loads(line)


@pytest.mark.slow
def test_dev_tells_where_it_listens_keeps_its_data_and_stops_cleanly(call: Call, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    process, started = start_node("--data-dir", folder, "--port", 0)
    try:
        assert started["data_dir"] == str(folder) and started["pid"] == process.pid
        code, out, _ = call("jobs", "create", "mail", "--delay", "1h", "--key", "k", "--json", "--url", started["url"])
        assert code == 0
        job_id = json.loads(out)["job_id"]
        code, _, err = call("dev", "--data-dir", folder, "--port", 0)
        assert code == 1 and f"in use by process {process.pid}" in err
        port = int(started["url"].rpartition(":")[2])
        code, _, err = call("dev", "--memory", "--port", port)
        assert code == 1 and f"127.0.0.1:{port} is in use" in err and "--port" in err
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=20)
        assert process.returncode == 0, log
        assert all(json.loads(line)["event"] for line in log.splitlines())
    finally:
        process.kill()
        process.communicate()
    process, started = start_node("--data-dir", folder, "--port", 0)
    try:
        assert call("jobs", "get", job_id, "--url", started["url"])[0] == 0
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert process.returncode == 0


@pytest.mark.slow
def test_dev_with_a_virtual_clock_starts_where_it_is_told() -> None:
    process, started = start_node("--memory", "--port", 0, "--clock", "virtual", "--clock-start", "2026-11-01T00:00:00Z")
    try:
        assert Remote(started["url"]).get("/v1/clock") == {"now": "2026-11-01T00:00:00Z"}
        assert Remote(started["url"]).post("/v1/clock:advance", {"by_s": 3600})["now"] == "2026-11-01T01:00:00Z"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    assert process.returncode == 0


# The demo's account: it must notice what it is there to notice.


def finished(
    status: str = "SUCCEEDED", outcomes: tuple[str, ...] = ("succeeded",), runs: tuple[int, ...] = (1,), kind: str = "delayed"
) -> Finished:
    job = None if status == "GONE" else {"status": status, "fire_at": "2026-11-01T07:00:00Z"}
    attempts = [{"attempt": number, "outcome": outcome} for number, outcome in enumerate(outcomes, start=1)]
    return Finished(KIND_BY_NAME[kind], "job_1", job, attempts, [Run("job_1", attempt, 0.0) for attempt in runs])


@pytest.mark.parametrize(
    ("one", "lost", "twice"),
    [
        (finished(), False, False),
        (finished(outcomes=("retryable_failure", "succeeded"), runs=(1, 2)), False, False),
        (finished(outcomes=("lease_expired", "succeeded"), runs=(2,)), False, False),
        (finished(outcomes=("released", "succeeded"), runs=(1, 1)), False, False),
        (finished("DEAD", ("retryable_failure",) * 3, (1, 2, 3), "fails for ever"), False, False),
        (finished("GONE", (), ()), True, False),
        (finished("RUNNING", ("running",)), True, False),
        (finished("DEAD", ("fatal_failure",)), True, False),
        (finished(runs=(1, 1)), False, True),
        (finished(outcomes=("succeeded", "succeeded"), runs=(1, 2)), False, True),
        (finished(runs=(1, 2)), False, True),
    ],
)
def test_demo_account_tells_lost_and_doubled_jobs_from_honest_retries(one: Finished, lost: bool, twice: bool) -> None:
    assert (one.lost, one.run_twice) == (lost, twice)
    account = Account([one], Outage(0, 3, 4), 0, replayed=1, replay_mistakes=0, unknown_jobs=0)
    assert account.good is not (lost or twice)


def test_demo_plan_is_the_same_every_time_and_its_keys_differ() -> None:
    first, second = list(planned_jobs(1_000.0)), list(planned_jobs(1_000.0))
    assert first == second
    assert len({job.key for job in first}) == len(first) >= 300
