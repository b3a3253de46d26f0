"""`/openapi.json` against the node: made-up requests, good and bad, for every call, and the answers against what is documented."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import size
from http_calls import Http

from wheelsched.testing.process import NodeProcess

EXAMPLES = size("E2E_SCHEMA_EXAMPLES", 15)
FOLDER = Path(__file__).parent / "schema"
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,response_schema_conformance,"
    "negative_data_rejection,unsupported_method,allow_header_conformance"
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, None], ids=("fixed", "fresh"))
def test_answers_are_as_documented_whatever_is_sent(seed: int | None, node: NodeProcess, http: Http, tmp_path: Path) -> None:
    """No 5xx but 503; statuses, types and bodies as documented; what the schema forbids is refused. A traceback in the log fails
    the test as well (see `make_node`)."""
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    command = [
        str(Path(sys.executable).with_name("st")), "--config-file", str(FOLDER / "schemathesis.toml"),
        "run", f"{node.url}/openapi.json", "--seed", str(seed), "--max-examples", str(EXAMPLES), "--checks", CHECKS,
        "--request-timeout", "30", "--continue-on-failure", "--no-color", "--no-shrink", "--warnings", "off",
    ]  # fmt: skip
    run = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(FOLDER)}, capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"seed {seed}\n{run.stdout}\n{run.stderr}"
    assert http.get("/readyz")["ready"]


@pytest.mark.parametrize(
    ("path", "body", "pointer"),
    [
        # A tag of the wrong type: found by the run above, once a 500.
        ("/v1/jobs", {"queue": "mail", "timing": {"class": 5}}, "/timing/class"),
        ("/v1/jobs", {"queue": "mail", "timing": {"class": None}}, "/timing/class"),
        ("/v1/jobs", {"queue": "mail", "target": {"type": []}}, "/target/type"),
    ],
)
def test_what_was_once_a_500_is_a_400_with_its_place(path: str, body: object, pointer: str, http: Http) -> None:
    answer = http.call("POST", path, body)
    assert (answer.status, [fault["pointer"] for fault in answer.body["errors"]]) == (400, [pointer])
