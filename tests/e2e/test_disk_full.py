"""A node on a disk that fills up: new jobs are refused, those it has go on, and nothing of what it said is lost."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from http_calls import Http, wait_until

from wheelsched.testing.process import NodeFailed, NodeProcess

DISK_BYTES: Final = 128 * 1024 * 1024
# New jobs are refused below a tenth of the disk, the node stops below a fortieth (core/settings.py); half-way between the two.
LEFT_LOW_BYTES: Final = DISK_BYTES * 3 // 50
# Small memtables, so that RocksDB sets aside little for its next WAL file.
SETTINGS: Final = {"store.write_buffer_mib": 8}
JOBS: Final = 50


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of `DISK_BYTES`."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here (root in its own mount namespace can): {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def node(disk: Path) -> Iterator[NodeProcess]:
    node = NodeProcess(disk / "data", settings=SETTINGS)
    # Beside the disk and not on it: a log that cannot be written is another test.
    node.log_path, node.out_path = disk.with_name("log"), disk.with_name("out")
    node.start()
    yield node
    node.kill()


def fill(disk: Path, left_bytes: int) -> Path:
    """Leave so much free, or as much as there is."""
    filler = disk / "filler"
    stat = os.statvfs(disk)
    with filler.open("ab") as file:
        size = stat.f_bavail * stat.f_frsize - left_bytes
        os.posix_fallocate(file.fileno(), file.tell(), size)
    return filler


def refused(http: Http) -> Any:
    """The problem that a create is answered with, None where it is taken."""
    answer = http.call("POST", "/v1/jobs", {"queue": "mail", "delay_s": 1000})
    if answer.status == 201:
        return None
    assert answer.status == 503, answer
    assert int(answer.headers["Retry-After"]) > 0
    return answer.body


def listed(http: Http) -> dict[str, str]:
    return {job["job_id"]: job["status"] for job in http.get("/v1/jobs?limit=1000")["jobs"]}


@pytest.mark.timeout(120)
def test_a_full_disk_refuses_new_jobs_and_nothing_else(disk: Path, node: NodeProcess) -> None:
    """B-067. Low: creates 503 with the reason, claims, heartbeats and completions go on. Room again: creates too, without a restart."""
    with Http(node.url) as http:
        made = [http.create(payload=number)["job_id"] for number in range(JOBS)]
        (running,) = http.claim(lease_s=600)
        filler = fill(disk, LEFT_LOW_BYTES)
        problem = wait_until(lambda: refused(http))
        assert problem["code"] == "unavailable"
        assert "the disk is nearly full" in problem["detail"]
        ready = http.call("GET", "/readyz")
        assert ready.status == 503
        assert "the disk is nearly full" in ready.body["reasons"][0]
        before = listed(http)
        assert http.call("POST", "/v1/jobs:batch", {"jobs": [{"queue": "mail"}]}).status == 503
        assert listed(http) == before  # refused is refused
        assert http.post(f"/v1/attempts/{running['lease_token']}:heartbeat")["cancel_requested"] is False
        ended = {running["job_id"]: http.complete(running)["status"]}
        while jobs := http.claim(max=10):
            for job in jobs:
                ended[job["job_id"]] = http.complete(job, "fatal_failure" if len(ended) % 5 == 0 else "succeeded")["status"]
        assert ended.keys() >= set(made)
        filler.unlink()
        wait_until(lambda: not refused(http))
        assert http.call("GET", "/readyz").status == 200
        told = listed(http)
    node.kill()
    node.start()
    with Http(node.url) as http:
        again = listed(http)
    assert again == told
    assert {job_id: again[job_id] for job_id in ended} == ended
    assert node.log_faults() == []


@pytest.mark.timeout(120)
def test_a_disk_without_any_room_ends_the_node_and_not_its_word(disk: Path, node: NodeProcess) -> None:
    """It stops while it can still write, or at a write that fails; with room it starts again, with everything it had acknowledged."""
    with Http(node.url) as http:
        made = {http.create(payload=number, delay_s=1000)["job_id"] for number in range(JOBS)}
        filler = fill(disk, 0)
        code = node.exit_code(30)
    assert code in (1, 70), node.log_tail()
    assert "full" in node.log_tail() or "No space left" in node.log_tail()
    with pytest.raises(NodeFailed, match="ended with code"):
        node.start()
    filler.unlink()
    node.kill()
    node.start()
    with Http(node.url) as http:
        assert listed(http).keys() >= made
        assert refused(http) is None
