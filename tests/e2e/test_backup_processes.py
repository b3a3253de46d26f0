"""Backup and restore with real processes: three nodes under load, backed up, lost, and there again as three and as one."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from http_calls import Http

from wheelsched.cli import main
from wheelsched.testing.cluster_process import ClusterProcesses
from wheelsched.testing.process import NodeProcess

GROUP_COUNT = 8


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """What a command tells programs; it has to succeed."""
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--json"])
    told = capsys.readouterr()
    assert not ended.value.code, told.err
    return json.loads(told.out)


@contextmanager
def cluster_of(folder: Path) -> Iterator[ClusterProcesses]:
    cluster = ClusterProcesses(folder, 3, group_count=GROUP_COUNT)
    try:
        yield cluster
    finally:
        cluster.kill()


class Creating(threading.Thread):
    """Creates jobs until it is stopped; `acknowledged` holds the ids of those that were."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._stop_it = threading.Event()
        self.acknowledged: list[str] = []

    def run(self) -> None:
        with Http(self._url) as http:
            while not self._stop_it.is_set():
                self.acknowledged.append(create(http, "load"))

    def stop(self) -> None:
        self._stop_it.set()
        self.join()


def create(http: Http, queue: str, **fields: Any) -> str:
    return str(http.create(queue=queue, payload=1, **fields)["job_id"])


def listed(http: Http, queue: str) -> dict[str, str]:
    found: dict[str, str] = {}
    cursor = ""
    while True:
        page = http.get(f"/v1/jobs?queue={queue}&limit=1000{cursor}")
        found |= {job["job_id"]: job["status"] for job in page["jobs"]}
        if page["next_cursor"] is None:
            return found
        cursor = f"&cursor={page['next_cursor']}"


def test_three_nodes_are_backed_up_lost_and_restored_to_three_held_ones_and_to_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "backup"
    with cluster_of(tmp_path / "lost") as lost:
        lost.start()
        url = lost.nodes["n2"].url
        with Http(url) as http:
            due = {create(http, "due") for _ in range(20)}
            later = {create(http, "later", delay_s=86_400) for _ in range(50)}
            (leased,) = http.claim("due", lease_s=600)
            http.post("/v1/schedules", {"name": "tick", "every_s": 1, "job_template": {"queue": "ticks"}})
            creating = Creating(lost.nodes["n1"].url)
            creating.start()
            before = list(creating.acknowledged)
            done = run("backup", str(folder), "--url", url, capsys=capsys)
            creating.stop()
            # Claimed after the backup: its worker lives on, and must not end what the restored cluster claims.
            (stale,) = http.claim("due", lease_s=600)
        lost.kill()
    assert done["state"] == "done" and done["groups"] == GROUP_COUNT + 1
    assert run("verify", str(folder), capsys=capsys)["id"] == done["id"]

    with cluster_of(tmp_path / "new") as new:
        made = run("restore", str(folder), "-c", str(new.file), "--hold", capsys=capsys)
        assert [node["node"] for node in made["nodes"]] == ["n1", "n2", "n3"]
        for node in new.nodes.values():
            node.spawn()
        for node in new.nodes.values():
            node.wait_ready()
        new.wait("all groups are led", lambda: len(new.leaders()) == GROUP_COUNT)
        with Http(new.nodes["n3"].url) as http:
            unready = http.call("GET", "/readyz")
            assert unready.status == 503 and any("held" in reason for reason in unready.body["reasons"])
            ticks = listed(http, "ticks")
            assert http.claim("due", max=100, wait_s=2) == []
            assert listed(http, "ticks") == ticks
            assert listed(http, "later") == dict.fromkeys(later, "SCHEDULED")
            assert set(before) <= set(listed(http, "load")) <= set(creating.acknowledged)
            assert run("restore", "--release", "--url", new.nodes["n1"].url, capsys=capsys) == {"was_held": True}
            new.wait_ready()
            claimed: dict[str, Any] = {}
            while len(claimed) < len(due) - 1:
                for job in http.claim("due", max=100, wait_s=5):
                    claimed[job["job_id"]] = job
            assert set(claimed) == due - {leased["job_id"]}
            assert claimed[stale["job_id"]]["fencing_token"] > stale["fencing_token"]
            ended = http.call("POST", f"/v1/attempts/{stale['lease_token']}:complete", {"outcome": "succeeded"})
            assert (ended.status, ended.body["code"]) == (409, "stale-lease")
            http.complete(leased)
            new.wait("the schedule goes on", lambda: len(listed(http, "ticks")) > len(ticks) + 2)
            # It is a cluster as any other: a node may die.
            new.nodes["n2"].kill()
            new.wait("the others go on", lambda: http.call("POST", "/v1/jobs", {"queue": "due"}).status == 201)

    single = tmp_path / "single"
    file = tmp_path / "single.yaml"
    file.write_text(yaml.safe_dump({"cluster": {"group_count": GROUP_COUNT}, "node": {"data_dir": str(single)}, "http": {"port": 0}}))
    run("restore", str(folder), "-c", str(file), capsys=capsys)
    node = NodeProcess(single, command=("serve", "-c", str(file)))
    try:
        node.start()
        with Http(node.url) as http:
            assert http.get("/readyz")["ready"]
            assert listed(http, "later") == dict.fromkeys(later, "SCHEDULED")
            assert len(http.claim("due", max=100)) == len(due) - 1
    finally:
        node.kill()
    assert node.log_faults() == []
