"""`kill -9` at any instant: nothing acknowledged is lost, with and without the unsynced tail of the WAL."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import MakeNode, size
from http_calls import Http

from wheelsched.store.directory import DB_NAME
from wheelsched.testing.process import NodeFailed, cut_wal, synced_lengths, wal_lengths

ROUNDS = size("E2E_CRASH_ROUNDS", 12)


@pytest.mark.slow
@pytest.mark.timeout(60 + 10 * ROUNDS)
@pytest.mark.parametrize("options", [(), ("--cut-wal",)], ids=("killed", "killed and WAL cut"))
def test_a_node_killed_under_load_keeps_its_word(options: tuple[str, ...], tmp_path: Path) -> None:
    """Rounds of load and SIGKILL, then the history of the clients against what the node tells; see testing/crash.py."""
    seed = random.SystemRandom().randrange(10**6)
    command = [sys.executable, "-m", "wheelsched.testing.crash", "--rounds", str(ROUNDS), "--seed", str(seed), *options]
    run = subprocess.run([*command, "--data-dir", str(tmp_path / "crash")], capture_output=True, text=True, check=False)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.timeout(120 + 15 * ROUNDS)
@pytest.mark.parametrize("options", [(), ("--virtual",)], ids=("real clock", "virtual clock"))
def test_schedules_of_a_node_killed_again_and_again_lose_no_occurrence(options: tuple[str, ...], tmp_path: Path) -> None:
    """Rounds of changes and SIGKILL, then the account of every schedule's occurrences; see testing/crash_schedules.py."""
    seed = random.SystemRandom().randrange(10**6)
    rounds = max(ROUNDS // 3, 2)
    command = [sys.executable, "-m", "wheelsched.testing.crash", "--schedules", "--rounds", str(rounds), "--seed", str(seed), *options]
    run = subprocess.run([*command, "--data-dir", str(tmp_path / "crash")], capture_output=True, text=True, check=False)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_kill_during_the_first_start_leaves_a_directory_that_starts(make_node: MakeNode) -> None:
    """The database appears complete, by a rename, or not at all; whatever half of it there is, the next start goes on from it."""
    rng = random.Random(5)
    for number in range(6):
        node = make_node(f"n{number}")
        for _ in range(3):
            node.spawn()
            with contextlib.suppress(NodeFailed):  # a quick one is up already: then it is killed just after its start
                node.wait_ready(rng.uniform(0, 0.15))
            node.kill()
        node.start()
        with Http(node.url) as http:
            assert http.create()["status"] == "QUEUED"
        node.kill()


def test_answers_survive_the_cut_of_everything_not_synced(make_node: MakeNode, tmp_path: Path) -> None:
    """All of the tail that no sync covered is cut off, and every job that was answered is there."""
    node = make_node(notes=tmp_path / "synced")
    node.start()
    with Http(node.url) as http:
        job_ids = [http.create(delay_s=1000, payload=number)["job_id"] for number in range(50)]
    node.kill()
    db_path = node.data_dir / DB_NAME
    name, _ = wal_lengths(db_path)[-1]
    os.truncate(db_path / name, synced_lengths(tmp_path / "synced")[name])
    node.start()
    with Http(node.url) as http:
        assert [http.get(f"/v1/jobs/{job_id}")["payload"] for job_id in job_ids] == list(range(50))


def test_a_cut_into_what_was_synced_is_refused_with_the_reason(make_node: MakeNode, tmp_path: Path) -> None:
    """Shows that the harness would see a loss: one synced byte less, and the node does not start."""
    node = make_node(notes=tmp_path / "synced")
    node.start()
    with Http(node.url) as http:
        for _ in range(5):
            http.create(delay_s=1000)
    node.kill()
    db_path = node.data_dir / DB_NAME
    name, _ = wal_lengths(db_path)[-1]
    os.truncate(db_path / name, synced_lengths(tmp_path / "synced")[name] - 1)
    with pytest.raises(NodeFailed, match=r"(?s)code 1 .*was synced: the end of its WAL is lost"):
        node.start()


def test_the_cut_stays_behind_what_was_synced(tmp_path: Path) -> None:
    db_path, notes = tmp_path / "db", tmp_path / "synced"
    db_path.mkdir()
    notes.write_text("\n000007.log 100\n000009.log 40\n000009.log 60\n\n000009.l")
    for seed in range(200):
        for name, length in (("000007.log", 100), ("000009.log", 90), ("000010.log", 20)):
            (db_path / name).write_bytes(bytes(length))
        unsynced, cut = cut_wal(db_path, notes, random.Random(seed))
        left = dict(wal_lengths(db_path))
        assert unsynced == 30 + 20
        assert cut == 210 - sum(left.values())
        assert left["000007.log"] == 100
        assert 60 <= left["000009.log"] <= 90
