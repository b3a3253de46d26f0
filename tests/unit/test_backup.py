"""Backup and restore of a node: what comes back, what a fault in the files looks like, and a node that is held."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from backups import back_up, restored_node, state_rows

from wheelsched.backup import BackupUnusable, Slice, Views, verify
from wheelsched.backup.files import MANIFEST, file_name, read_manifest
from wheelsched.core.errors import InvalidRequest, NotLeader, StaleLease, Unavailable
from wheelsched.model.keys import META_GROUP, STATE_FAMILIES
from wheelsched.model.states import Outcome
from wheelsched.node.backup import Backups
from wheelsched.node.restore import check_backup, fill_node
from wheelsched.store.raftlog import FIRST_INDEX, FIRST_TERM, read_group_state
from wheelsched.testing.node import START_MS, TestNode, make_settings, open_test_node

GROUPS = (0, 1, 2, 3, META_GROUP)


async def populate(node: TestNode) -> None:
    """A job of every kind, in every group."""
    await node.put_queue("mail", lease_ms=20_000)
    for number in range(40):
        await node.create("mail", delay_s=60 * number, payload={"number": number}, labels={"n": str(number)})
    await node.create("mail", key="order-1", delay_s=86_400)
    for ending in ("succeeded", "retryable_failure", "fatal_failure"):
        await node.create("ended")
        (job,) = await node.claim("ended")
        await node.complete(job, ending, error={"why": ending}, result=[1])
    await node.create("leased", max_attempts=2)
    await node.put_schedule("hourly", queue="runs", every_s=3_600)
    await node.put_schedule("weekly", queue="runs", cron="0 9 * * 1", zone="Europe/Berlin")


async def records(node: TestNode) -> dict[bytes, Any]:
    return {record.state.job_id: record for queue in ("mail", "ended", "leased", "runs") for record in await node.list_jobs(queue)}


async def test_everything_comes_back_as_it_was(tmp_path: Path) -> None:
    async with open_test_node() as node:
        await populate(node)
        await node.advance(s=150)
        before, depth = await records(node), await node.depth("mail")
        rows = {family: state_rows(node.store, family) for family in STATE_FAMILIES}
        manifest = await back_up(node, tmp_path / "b")
        states = {group: read_group_state(node.store, group) for group in GROUPS}
        now_ms = node.now_ms
    assert verify(tmp_path / "b") == (manifest, [])
    assert manifest.row_count == sum(map(len, rows.values()))
    async with restored_node(tmp_path / "b", now_ms=now_ms) as again:
        assert {family: state_rows(again.store, family) for family in STATE_FAMILIES} == rows
        assert await records(again) == before
        assert await again.depth("mail") == depth
        assert (await again.queue("mail")).settings.lease_ms == 20_000
        for group, state in states.items():
            restored = read_group_state(again.store, group)
            assert restored.watermark_ms >= state.watermark_ms
            assert restored.fencing >= state.fencing + 2**32
            assert restored.time_ms >= state.time_ms
        repeated = await again.create("mail", key="order-1", delay_s=86_400)
        assert repeated.job_id in before
        await again.advance(s=40 * 60)
        assert (await again.depth("mail"))["QUEUED"] == (0, 40, 0)


async def test_a_restored_log_starts_where_every_new_one_does(tmp_path: Path) -> None:
    async with open_test_node() as node:
        await populate(node)
        await back_up(node, tmp_path / "b")
    blank = TestNode()
    manifest = check_backup(tmp_path / "b", blank.settings)
    fill_node(blank.store, tmp_path / "b", manifest, blank.settings)
    for entry in manifest.groups:
        state = read_group_state(blank.store, entry.group)
        assert (state.applied_index, state.applied_term) == (FIRST_INDEX, FIRST_TERM)
        assert entry.index > FIRST_INDEX
        assert state.watermark_ms == entry.watermark_ms


async def test_what_was_leased_is_leased_again_and_ends_by_its_lease(tmp_path: Path) -> None:
    async with open_test_node() as node:
        await node.create("q")
        await node.create("q")
        reported, silent = await node.claim("q", jobs_max=2, lease_s=30)
        await back_up(node, tmp_path / "b")
    async with restored_node(tmp_path / "b", now_ms=START_MS + 600_000) as again:
        assert await again.status(reported) == await again.status(silent) == "RUNNING"
        await again.complete(reported)
        assert await again.status(reported) == "SUCCEEDED"
        await again.advance(s=29)
        assert await again.status(silent) == "RUNNING"
        await again.advance(s=2)
        assert await again.status(silent) == "RETRYING"
        assert [row.outcome for row in await again.attempts(silent)][-1] == Outcome.LEASE_EXPIRED


async def test_a_token_minted_after_the_backup_is_never_minted_again(tmp_path: Path) -> None:
    """The lost node's worker still runs a job that the restored node does not know to be claimed; its claim there is another one."""
    async with open_test_node() as node:
        job = await node.create("q")
        await back_up(node, tmp_path / "b")
        (lost,) = await node.claim("q")
        assert lost.state.job_id == job.job_id
    async with restored_node(tmp_path / "b") as again:
        (claimed,) = await again.claim("q")
        assert (claimed.state.job_id, claimed.state.attempt) == (lost.state.job_id, lost.state.attempt)
        assert claimed.state.fencing > lost.state.fencing
        with pytest.raises(StaleLease):
            await again.complete(lost)
        await again.complete(claimed)


async def test_occurrences_go_on_and_those_of_the_gap_were_missed(tmp_path: Path) -> None:
    counts = {policy: {"QUEUED": queued, "SCHEDULED": 1} for policy, queued in (("run_latest", 3), ("skip", 2), ("run_all", 5))}
    async with open_test_node() as node:
        for policy in counts:
            await node.put_schedule(policy, every_s=60, missed=policy)
        await node.advance(s=120)
        await back_up(node, tmp_path / "b")
        now_ms = node.now_ms
    async with restored_node(tmp_path / "b", now_ms=now_ms + 3 * 60_000 + 5) as again:
        # Two had run, three were due in the gap, one waits.
        assert {policy: await seen(again, policy) for policy in counts} == counts
        await again.advance(s=60)
        after = {policy: {"QUEUED": found["QUEUED"] + 1, "SCHEDULED": 1} for policy, found in counts.items()}
        assert {policy: await seen(again, policy) for policy in counts} == after


async def seen(node: TestNode, schedule: str) -> dict[str, int]:
    """Its runs by status, but for those that were skipped."""
    runs = [record.status.name for record in (await node.runs(schedule))[0]]
    return {status: runs.count(status) for status in ("QUEUED", "SCHEDULED")}


async def test_a_backup_holds_what_was_acknowledged_before_it_and_one_instant_of_each_group(tmp_path: Path) -> None:
    """Jobs are created and claimed while slices are read."""
    async with open_test_node() as node:
        await node.create_many([{"queue": "q", "payload": "x" * 20_000} for _ in range(300)])
        before = {record.state.job_id for record in await node.list_jobs("q")}
        slow = make_settings({"cluster": {"snapshot_mib_per_s": 10}})
        node.node.backups = Backups(slow, node.clock, node.rng, node.node.views.read)
        backup = asyncio.create_task(back_up(node, tmp_path / "b"))
        while not backup.done():
            for _ in range(10):
                await node.create("q")
            for job in await node.claim("q", jobs_max=5):
                await node.complete(job)
        await backup
        after = {record.state.job_id for record in await node.list_jobs("q")}
    async with restored_node(tmp_path / "b") as again:
        found = {record.state.job_id for record in await again.list_jobs("q")}
        assert before <= found <= after
        assert sum(sum(counts) for counts in (await again.depth("q")).values()) == len(found)
        await again.node.dispatcher.audit.sweep()
        assert again.node.dispatcher.statistics().audit_repairs == 0


# ---- faults


async def a_backup(folder: Path) -> Path:
    async with open_test_node() as node:
        await node.create_many([{"queue": "q", "payload": number, "delay_s": 60} for number in range(12)])
        await back_up(node, folder)
    return folder


async def test_a_changed_byte_is_found_wherever_it_is(tmp_path: Path) -> None:
    folder = await a_backup(tmp_path / "b")
    assert verify(folder)[1] == []
    unnoticed = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        for position in range(0, len(data), 3 if path.name == MANIFEST else 17):
            path.write_bytes(data[:position] + bytes((data[position] ^ 1 << position % 8,)) + data[position + 1 :])
            if not faults_of(folder):
                unnoticed.append((path.name, position))
        for changed in (data[:-1], data + b"\0", b"", data[: len(data) // 2]):
            path.write_bytes(changed)
            if not faults_of(folder):
                unnoticed.append((path.name, len(changed)))
        path.write_bytes(data)
    assert unnoticed == []


def faults_of(folder: Path) -> list[str]:
    try:
        return verify(folder)[1]
    except BackupUnusable as error:
        return [str(error)]


async def test_a_swapped_and_a_missing_file_are_found_and_each_is_named(tmp_path: Path) -> None:
    folder = await a_backup(tmp_path / "b")
    (folder / file_name(1)).rename(tmp_path / "one")
    shutil.copy(folder / file_name(2), folder / file_name(1))
    (folder / file_name(3)).unlink()
    faults = verify(folder)[1]
    assert len(faults) == 2
    assert file_name(1) in faults[0] and "group 1" in faults[0]
    assert file_name(3) in faults[1] and "missing" in faults[1]
    with pytest.raises(BackupUnusable, match="missing"):
        check_backup(folder, make_settings())


async def test_a_whole_file_of_another_backup_is_found_though_it_looks_alike(tmp_path: Path) -> None:
    for name in ("a", "b"):
        async with open_test_node() as node:
            await node.create("q", key="one", payload=name, delay_s=60)
            await back_up(node, tmp_path / name)
    (one, other), _ = zip(verify(tmp_path / "a"), verify(tmp_path / "b"), strict=True)
    (entry, alike) = next((a, b) for a, b in zip(one.groups, other.groups, strict=True) if a.rows and a.checksum != b.checksum)
    assert (entry.rows, entry.bytes, entry.index, entry.fencing) == (alike.rows, alike.bytes, alike.index, alike.fencing)
    shutil.copy(tmp_path / "b" / alike.file, tmp_path / "a" / entry.file)
    (fault,) = verify(tmp_path / "a")[1]
    assert entry.file in fault and "checksum" in fault


async def test_without_a_manifest_it_is_no_backup(tmp_path: Path) -> None:
    folder = await a_backup(tmp_path / "b")
    (folder / MANIFEST).unlink()
    with pytest.raises(BackupUnusable, match=r"holds no manifest\.json"):
        verify(folder)
    with pytest.raises(BackupUnusable, match="holds no"):
        check_backup(tmp_path / "nowhere", make_settings())


async def test_another_format_and_another_number_of_groups_are_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = await a_backup(tmp_path / "b")
    with pytest.raises(BackupUnusable, match=r"set cluster\.group_count: 4"):
        check_backup(folder, make_settings({"cluster": {"group_count": 8}}))
    document = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(document | {"format": 2, "new": 1}))
    with pytest.raises(BackupUnusable, match="use the release that wrote it"):
        read_manifest(folder)


async def test_a_path_that_cannot_be_used_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("")
    async with open_test_node() as node:
        for path in ("relative/b", str(tmp_path / "full"), str(tmp_path / "file"), str(tmp_path / "file" / "b"), "/proc/none/b"):
            with pytest.raises(InvalidRequest) as caught:
                await node.node.backups.take(path)
            assert caught.value.errors[0]["pointer"] == "/path"
            assert path in caught.value.detail
        (tmp_path / "empty").mkdir()
        await node.node.backups.take(str(tmp_path / "empty"))
        assert [record.state for record in node.node.backups.recent()] == ["done", *["failed"] * 5]
        assert verify(tmp_path / "empty")[1] == []
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "full"]


async def test_one_backup_at_a_time_and_none_of_a_node_that_stops(tmp_path: Path) -> None:
    async with open_test_node() as node:
        await node.create("q")
        backups = node.node.backups
        running = asyncio.create_task(backups.take(str(tmp_path / "b")))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="is being written"):
            await backups.take(str(tmp_path / "c"))
        backups.drain()
        with pytest.raises(Unavailable, match="shutting down"):
            await running
    assert os.listdir(tmp_path) == []


# ---- reading groups


async def test_a_group_is_read_again_under_its_next_leader_and_after_a_lost_view(tmp_path: Path) -> None:
    async with open_test_node() as node:
        await node.create_many([{"queue": "q", "payload": "x" * 60_000} for _ in range(400)])
        views, other = Views(node.store), Views(node.store)
        asked: list[tuple[int, int]] = []

        async def read(group: int, reader: bytes, sequence: int) -> Slice:
            asked.append((group, sequence))
            if asked.count((0, 1)) == 1 and (group, sequence) == (0, 1):
                raise NotLeader("led elsewhere now")
            if asked.count((1, 1)) == 1 and (group, sequence) == (1, 1):
                return await other.read(group, reader, sequence)  # a leader that never heard of it
            return await views.read(group, reader, sequence)

        backups = Backups(node.settings, node.clock, node.rng, read)
        record = await backups.take(str(tmp_path / "b"))
        assert asked.count((0, 0)) == asked.count((1, 0)) == 2
        assert max(sequence for _, sequence in asked) >= 1
        assert len(views) == 0
    assert record.manifest is not None
    manifest, faults = verify(tmp_path / "b")
    assert (manifest, faults) == (record.manifest, [])
    assert record.progress.rows == manifest.row_count


async def test_a_view_that_nobody_reads_on_is_closed(tmp_path: Path) -> None:
    async with open_test_node() as node:
        await node.create_many([{"queue": "q", "payload": "x" * 60_000} for _ in range(400)])
        views = Views(node.store, view_s=0.01)
        first = await views.read(0, b"r", 0)
        assert not first.is_last and not first.is_gone
        assert sum(map(len, first.chunks)) <= 4 * 1024 * 1024
        async with asyncio.timeout(5):
            while len(views):  # noqa: ASYNC110  # its timer
                await asyncio.sleep(0.005)
        assert (await views.read(0, b"r", 1)).is_gone
        again = Views(node.store)
        await again.read(0, b"r", 0)
        assert (await again.read(0, b"r", 2)).is_gone  # a slice is never skipped
        assert (await again.read(0, b"other", 1)).is_gone


# ---- held


async def test_a_held_node_fires_nothing_and_goes_on_once_it_is_released(tmp_path: Path) -> None:
    async with open_test_node() as node:
        await node.create("due")
        await node.create("soon", delay_s=60)
        await node.create("leased", max_attempts=2, timeout_s=43_200)
        (leased,) = await node.claim("leased", lease_s=30)
        await node.put_schedule("hourly", queue="runs", every_s=3_600)
        await back_up(node, tmp_path / "b")
        watermarks = [node.node.replicas.watermark_ms(group) for group in range(4)]
    async with restored_node(tmp_path / "b", now_ms=START_MS + 1_000, hold=True) as again:
        for restart in (False, True):
            if restart:
                await again.crash_and_restart()
            readiness = again.node.readiness()
            assert not readiness.ready and "held" in readiness.reasons[0]
            new = await again.create("new")
            await again.advance(s=2 * 3_600)
            assert [again.node.replicas.watermark_ms(group) for group in range(4)] == watermarks
            assert await again.claim("due", "soon", "runs", "new", wait_s=0.01) == []
            assert [await again.status(record) for record in await again.list_jobs("soon")] == ["SCHEDULED"]
            assert await again.status(new) == "SCHEDULED"
            assert await again.status(leased) == "RUNNING"
            assert len((await again.runs("hourly"))[0]) == 1
            with pytest.raises(Unavailable, match="restore --release"):
                await again.pause_schedule("hourly")
        assert await again.node.release_hold(actor="ada")
        assert not await again.node.release_hold(actor="ada")
        await again.settle()
        assert again.node.readiness().ready
        assert len(await again.claim("due", "soon", "new", jobs_max=10)) == 4
        assert await again.status(leased) == "RUNNING"  # its lease began anew
        await again.advance(s=31)
        assert await again.status(leased) == "RETRYING"
        assert await seen(again, "hourly") == {"QUEUED": 1, "SCHEDULED": 1}
        await again.crash_and_restart()
        assert again.node.readiness().ready
        await again.create("later")
        assert len(await again.claim("later")) == 1


async def test_a_long_poll_of_a_held_node_is_served_when_it_is_released(tmp_path: Path) -> None:
    async with open_test_node() as node:
        await node.create("q")
        await back_up(node, tmp_path / "b")
    async with restored_node(tmp_path / "b", hold=True) as again:
        waiting = asyncio.create_task(again.claim("q", wait_s=30))
        await again.settle()
        assert not waiting.done()
        await again.node.release_hold(actor="")
        async with asyncio.timeout(10):
            assert len(await waiting) == 1


async def test_a_worker_of_the_lost_cluster_may_report_while_the_new_one_is_held(tmp_path: Path) -> None:
    async with open_test_node() as node:
        await node.create("q")
        (job,) = await node.claim("q")
        await back_up(node, tmp_path / "b")
    async with restored_node(tmp_path / "b", hold=True) as again:
        await again.heartbeat(job)
        await again.complete(job)
        assert await again.status(job) == "SUCCEEDED"


async def test_a_backup_of_a_held_node_is_restored_held_only_if_asked_for(tmp_path: Path) -> None:
    async with open_test_node() as node:
        await node.create("q", delay_s=1)
        await back_up(node, tmp_path / "a")
    async with restored_node(tmp_path / "a", hold=True) as held:
        await back_up(held, tmp_path / "b")
    async with restored_node(tmp_path / "b") as again:
        assert again.node.readiness().ready
        await again.advance(s=2)
        assert len(await again.claim("q")) == 1


# ---- over HTTP


def call(url: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, method=method, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


async def test_a_backup_over_http_has_the_totals_and_is_listed(tmp_path: Path) -> None:
    async with open_test_node(serve=True) as node:
        await populate(node)
        status, problem = await asyncio.to_thread(call, node.url, "POST", "/v1/backups", {"path": "b"})
        assert (status, problem["errors"][0]["pointer"]) == (400, "/path")
        assert (await asyncio.to_thread(call, node.url, "POST", "/v1/backups", {"path": "/b", "more": 1}))[0] == 400
        status, done = await asyncio.to_thread(call, node.url, "POST", "/v1/backups", {"path": str(tmp_path / "b")})
        manifest = verify(tmp_path / "b")[0]
        assert (status, done["state"], done["id"]) == (201, "done", manifest.id)
        assert (done["rows"], done["bytes"], done["groups"], done["groups_done"]) == (manifest.row_count, manifest.byte_count, 5, 5)
        _, listed = await asyncio.to_thread(call, node.url, "GET", "/v1/backups")
        assert listed["backups"][0] == done
        assert [each["state"] for each in listed["backups"]] == ["done", "failed"]
        assert await asyncio.to_thread(call, node.url, "POST", "/v1/hold:release") == (200, {"was_held": False})
    async with restored_node(tmp_path / "b", hold=True, serve=True) as again:
        status, ready = await asyncio.to_thread(call, again.url, "GET", "/readyz")
        assert (status, ready["ready"]) == (503, False) and "hold:release" in ready["reasons"][0]
        assert (await asyncio.to_thread(call, again.url, "GET", "/status"))[1]["held"] is True
        assert await asyncio.to_thread(call, again.url, "POST", "/v1/hold:release", {}) == (200, {"was_held": True})
        assert (await asyncio.to_thread(call, again.url, "GET", "/readyz"))[0] == 200
