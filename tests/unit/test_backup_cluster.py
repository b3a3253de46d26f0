"""Backup and restore of several nodes: into another number of them, into one cluster only together, into data directories."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from backups import back_up, restored_cluster, restored_node
from test_cluster_bootstrap import NAMES, FakeTable, Node, founded, network, settings_of

from wheelsched.backup import BackupUnusable, verify
from wheelsched.cli import main
from wheelsched.cluster.bootstrap import StartRefused
from wheelsched.cluster.identity import LocalIdentity
from wheelsched.cluster.placement import Founding
from wheelsched.core.settings import NodeSettings, Settings
from wheelsched.model.commands import Create
from wheelsched.model.keys import META, META_GROUP
from wheelsched.model.members import CLUSTER_KEY
from wheelsched.model.rows import JobSpec, encode_spec
from wheelsched.model.states import Outcome
from wheelsched.node import open_node
from wheelsched.node import restore as restoring
from wheelsched.node.cluster import ClusterNode
from wheelsched.node.face import ClaimedJob, JobFilter
from wheelsched.node.restore import check_backup, fill_node, restore
from wheelsched.store import StoreError, StoreRefused
from wheelsched.store.memory import MemoryStore
from wheelsched.store.raftlog import RaftLog, read_group_state
from wheelsched.testing.cluster import TestCluster, open_test_cluster
from wheelsched.testing.node import open_test_node

TENANT = "default"
SPEC = encode_spec(JobSpec())


async def create(face: ClusterNode, count: int, queue: str = "q", *, delay_ms: int = 0) -> set[bytes]:
    commands = [Create(face.new_job_id(), TENANT, queue, 1, -1, delay_ms, 0, 0, SPEC, b"1") for _ in range(count)]
    return {reply.state.job_id for reply in await face.propose_many(commands) if reply.state is not None}


async def claim(face: ClusterNode, count: int, *queues: str, wait_ms: int = 0) -> list[ClaimedJob]:
    return await face.claim(TENANT, queues or ("q",), jobs_max=count, lease_ms=None, wait_ms=wait_ms, worker="w")


async def claim_all(face: ClusterNode) -> set[bytes]:
    claimed: set[bytes] = set()
    while jobs := await claim(face, 50, wait_ms=300):
        claimed |= {job.state.job_id for job in jobs}
    return claimed


async def listed(face: ClusterNode) -> set[bytes]:
    page = await face.list_jobs(JobFilter(TENANT, "q", frozenset()), cursor=None, limit=10_000)
    assert page.cursor is None
    return {record.state.job_id for record in page.jobs}


async def create_until(cluster: TestCluster, done: asyncio.Event) -> None:
    while not done.is_set():
        for node_id, node in cluster.nodes.items():
            if node.is_up:
                await create(cluster.face(node_id), 5)


# ---- other numbers of nodes


async def test_a_cluster_is_backed_up_under_load_and_restored_to_one_node_and_to_three(tmp_path: Path) -> None:
    async with open_test_cluster() as cluster:
        made = await create(cluster.face(1), 200)
        done = asyncio.Event()
        creating = asyncio.create_task(create_until(cluster, done))
        record = await cluster.face(3).backups.take(str(tmp_path / "b"))
        done.set()
        await creating
        known = await listed(cluster.face(2))
    assert record.manifest is not None and verify(tmp_path / "b") == (record.manifest, [])
    async with restored_node(tmp_path / "b", now_ms=record.ended_at_ms) as one:
        alone = {job.state.job_id for job in await one.list_jobs("q")}
        assert made <= alone <= known
        assert {job.state.job_id for _ in range(100) for job in await one.claim("q", jobs_max=50)} == alone
    async with restored_cluster(tmp_path / "b") as three:
        assert await listed(three.face(1)) == alone
        new = await create(three.face(3), 20)
        assert await claim_all(three.face(2)) == alone | new


async def test_one_node_becomes_three_and_its_fencing_and_watermarks_do_not_fall(tmp_path: Path) -> None:
    # On the clock of the cluster to be: an attempt of a year ago is over.
    async with open_test_node(start_ms=time.time_ns() // 1_000_000) as node:
        for _ in range(30):
            await node.create("q")
        leased = await node.claim("q", jobs_max=20)
        manifest = await back_up(node, tmp_path / "b")
    async with restored_cluster(tmp_path / "b") as three:
        for entry in manifest.groups:
            for member in three.nodes.values():
                state = read_group_state(member.store, entry.group)
                assert state.watermark_ms >= entry.watermark_ms and state.fencing >= entry.fencing
        claimed: list[ClaimedJob] = []
        async with asyncio.timeout(10):
            while len(claimed) < 10:
                claimed += await claim(three.face(2), 50, wait_ms=300)
        assert min(job.state.fencing for job in claimed) > max(job.state.fencing for job in leased)
        state = leased[0].state
        reply = await three.face(1).complete(
            state.job_id, state.attempt, state.fencing, outcome=Outcome.SUCCEEDED, error=b"", result=b"", retry_after_ms=-1
        )
        assert not reply.refusal


async def test_a_backup_goes_on_where_a_leader_dies_on_the_way(tmp_path: Path) -> None:
    async with open_test_cluster() as cluster:
        made = await create(cluster.face(1), 300)
        taker = next(node_id for node_id in cluster.nodes if node_id != cluster.leader_of(META_GROUP) and node_id != cluster.leader_of(3))
        victim = cluster.leader_of(3)
        assert victim is not None
        backup = asyncio.create_task(cluster.face(taker).backups.take(str(tmp_path / "b")))
        await asyncio.sleep(0)
        await cluster.nodes[victim].crash()
        record = await backup
    assert record.state == "done"
    assert verify(tmp_path / "b")[1] == []
    async with restored_node(tmp_path / "b", now_ms=record.ended_at_ms) as one:
        assert {job.state.job_id for job in await one.list_jobs("q")} == made


async def test_a_held_cluster_fires_on_no_node_until_it_is_released_on_one(tmp_path: Path) -> None:
    async with open_test_node() as node:
        await node.create("q", delay_s=1)
        await node.create("q")
        await back_up(node, tmp_path / "b")
    async with restored_cluster(tmp_path / "b", hold=True) as three:
        new = await create(three.face(2), 10)
        assert await claim(three.face(1), 10, wait_ms=200) == []
        for node_id in three.nodes:
            reasons = three.face(node_id).readiness().reasons
            assert any("held" in reason for reason in reasons)
        assert await three.face(3).release_hold(actor="ada")
        async with asyncio.timeout(10):
            claimed: set[bytes] = set()
            while len(claimed) < 12:
                claimed |= {job.state.job_id for job in await claim(three.face(1), 50, wait_ms=200)}
        assert new < claimed
        assert not await three.face(1).release_hold(actor="ada")
        await three.wait_led()


# ---- one cluster together


def test_what_a_cluster_is_made_from_names_the_backup() -> None:
    plain, other = Founding.of(settings_of("n1")), Founding.of(settings_of("n1"), origin="backup 1")
    told = (plain.cluster_name, plain.group_count, plain.partition_count, plain.replication_factor, plain.nodes)
    assert plain.cluster_id == hashlib.blake2b(msgspec.msgpack.encode(told), digest_size=16, person=b"ws-cluster-id").digest()
    assert len({plain.cluster_id, other.cluster_id, Founding.of(settings_of("n1"), origin="backup 1, held").cluster_id}) == 3
    assert plain.differences(other) == ["data not restored and restored from backup 1"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=Founding) == plain


async def a_backup(folder: Path, seed: int = 0) -> Path:
    async with open_test_node(seed=seed) as node:
        for _ in range(10):
            await node.create("q", delay_s=60)
        await back_up(node, folder)
    return folder


def restored(name: str, folder: Path, *, hold: bool = False) -> Node:
    store, settings = MemoryStore(), settings_of(name)
    fill_node(store, folder, check_backup(folder, settings), settings, hold=hold)
    return Node(name, store)


async def test_nodes_restored_from_one_backup_become_a_cluster_with_its_rows(tmp_path: Path) -> None:
    folder = await a_backup(tmp_path / "b")
    nodes = [restored(name, folder) for name in NAMES]
    async with network(*nodes):
        await asyncio.gather(*(node.bootstrap() for node in nodes))
    manifest = verify(folder)[0]
    assert {node.identity.cluster_id for node in nodes} == {Founding.of(settings_of("n1"), origin=f"backup {manifest.id}").cluster_id}
    for node in nodes:
        groups = (*range(4), META_GROUP)
        assert node.identity.joining(groups) == []
        log = RaftLog(node.store, groups)
        assert [log.last_index(group) for group in groups] == [10] * 5
        assert node.store.get(META, CLUSTER_KEY) is None
        # A later start finds what was made, whatever the settings say by then.
        assert not LocalIdentity.open(node.store, settings_of(node.name, ("n1", "n2", "n3", "n4")), random.Random()).is_blank


@pytest.mark.parametrize("second", ["another backup", "held", "blank"])
async def test_nodes_that_were_not_restored_alike_refuse_each_other(tmp_path: Path, second: str) -> None:
    folder = await a_backup(tmp_path / "b")
    n1, n2 = restored("n1", folder), restored("n2", folder)
    match second:
        case "another backup":
            n3 = restored("n3", await a_backup(tmp_path / "c", seed=1))
        case "held":
            n3 = restored("n3", folder, hold=True)
        case _:
            n3 = Node("n3")
    async with network(n1, n2, n3):
        tasks = [node.bootstrap() for node in (n1, n2, n3)]
        with pytest.raises(StartRefused, match="restored from backup"):
            await tasks[2]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert n1.identity.is_blank and n2.identity.is_blank and n3.identity.is_blank


async def test_a_restored_node_does_not_join_a_cluster_that_exists(tmp_path: Path) -> None:
    """Not even one that has a place for it: its rows are not what that cluster's logs begin with."""
    folder = await a_backup(tmp_path / "b")
    four = (*NAMES, "n4")
    store, settings = MemoryStore(), settings_of("n4", four)
    fill_node(store, folder, check_backup(folder, settings), settings)
    late = Node("n4", store, four)
    nodes = [Node(node.name, node.store, life=2) for node in await founded()]
    for node in nodes:
        node.answers.table = FakeTable("n4")
    async with network(*nodes, late, names=four):
        with pytest.raises(StartRefused, match="could only join with an empty data directory"):
            await late.bootstrap()
    assert late.identity.is_blank


async def test_a_restored_node_starts_with_the_settings_it_was_restored_for_only(tmp_path: Path) -> None:
    folder = await a_backup(tmp_path / "b")
    store = restored("n1", folder).store
    with pytest.raises(StoreRefused, match=r"cluster\.replication_factor 3 and 1.*restore again"):
        LocalIdentity.open(store, settings_of("n1", replication_factor=1), random.Random())
    with pytest.raises(StoreRefused, match=r"cluster\.nodes without n4"):
        LocalIdentity.open(store, settings_of("n1", ("n1", "n2", "n3", "n4")), random.Random())
    assert LocalIdentity.open(store, settings_of("n1"), random.Random()).is_blank


async def test_a_node_gets_the_groups_that_it_is_to_hold_and_no_others(tmp_path: Path) -> None:
    folder = await a_backup(tmp_path / "b")
    held: dict[int, int] = {}
    for name in NAMES:
        store, settings = MemoryStore(), settings_of(name, replication_factor=1)
        entries = fill_node(store, folder, check_backup(folder, settings), settings)
        identity = LocalIdentity.open(store, settings, random.Random())
        for entry in entries:
            held[entry.group] = held.get(entry.group, 0) + 1
            assert identity.raft_id in Founding.of(settings).configuration(entry.group).members()
    assert held == {0: 1, 1: 1, 2: 1, 3: 1, META_GROUP: 3}


# ---- data directories


def disk_settings(folder: Path, **cluster: Any) -> Settings:
    found = msgspec.structs.replace(settings_of("n1", (), **cluster), node=NodeSettings(id="n1", data_dir=str(folder)))
    return msgspec.structs.replace(found, store=msgspec.structs.replace(found.store, block_cache_mib=8, write_buffer_mib=8))


async def test_a_data_directory_is_made_and_a_node_starts_on_it(tmp_path: Path) -> None:
    folder = await a_backup(tmp_path / "b")
    settings = disk_settings(tmp_path / "n1")
    manifest = check_backup(folder, settings)
    (made,) = await asyncio.to_thread(restore, folder, manifest, settings, ["n1"])
    assert (made.node, made.rows, made.groups) == ("n1", manifest.row_count, 4)
    assert sorted(os.listdir(tmp_path / "n1")) == ["db", "wheelsched.pid"]
    node = await open_node(settings)
    running = asyncio.create_task(node.run())
    page = await node.list_jobs(JobFilter(TENANT, "q", frozenset()), cursor=None, limit=100)
    assert len(page.jobs) == 10
    with pytest.raises(StoreRefused, match="in use"):
        await asyncio.to_thread(restore, folder, manifest, settings, ["n1"])
    node.stop()
    await running
    with pytest.raises(StoreError, match=r"is not empty: it holds ballast, db"):
        await asyncio.to_thread(restore, folder, manifest, settings, ["n1"])


async def test_a_restore_that_was_cut_short_leaves_nothing_to_start_on_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = await a_backup(tmp_path / "b")
    settings = disk_settings(tmp_path / "n1")
    manifest = check_backup(folder, settings)
    fill = restoring.fill_group

    def fail_at_the_last(*arguments: Any, **others: Any) -> None:
        if arguments[2].group == META_GROUP:
            raise BackupUnusable("the disk with the backup went")
        fill(*arguments, **others)

    with monkeypatch.context() as patched:
        patched.setattr(restoring, "fill_group", fail_at_the_last)
        with pytest.raises(BackupUnusable):
            await asyncio.to_thread(restore, folder, manifest, settings, ["n1"])
    with pytest.raises(StoreRefused, match="holds restoring but no wheelsched database"):
        await open_node(settings)
    await asyncio.to_thread(restore, folder, manifest, settings, ["n1"])
    node = await open_node(settings)
    running = asyncio.create_task(node.run())
    node.stop()
    await running


# ---- commands


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any, str]:
    """(exit code, the document on stdout, stderr)."""
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--json"])
    told = capsys.readouterr()
    return int(ended.value.code or 0), json.loads(told.out) if told.out.strip() else None, told.err


def a_file(folder: Path, names: Sequence[str], data_dir: str, group_count: int = 4) -> str:
    nodes = [{"id": name, "http": f"127.0.0.1:8{name[1:]}", "peer": f"127.0.0.1:9{name[1:]}"} for name in names]
    path = folder / f"{len(names)}-{group_count}.yaml"
    store = {"block_cache_mib": 8, "write_buffer_mib": 8}
    cluster = {"group_count": group_count, "nodes": nodes}
    path.write_text(yaml.safe_dump({"cluster": cluster, "node": {"data_dir": data_dir}, "store": store}))
    return str(path)


def test_verify_and_restore_as_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = asyncio.run(a_backup(tmp_path / "b"))
    capsys.readouterr()
    code, found, _ = run("verify", str(folder), capsys=capsys)
    assert (code, found["ok"], found["faults"]) == (0, True, [])

    file = a_file(tmp_path, NAMES, str(tmp_path / "data" / "{id}"))
    code, made, _ = run("restore", str(folder), "-c", file, "--hold", capsys=capsys)
    assert code == 0 and made["held"]
    assert [node["node"] for node in made["nodes"]] == list(NAMES)
    assert all((tmp_path / "data" / name / "db").is_dir() for name in NAMES)
    code, _, error = run("restore", str(folder), "-c", file, "--node", "n2", capsys=capsys)
    assert code == 1 and "n2 is not empty" in error

    code, _, error = run("restore", str(folder), "-c", a_file(tmp_path, NAMES, str(tmp_path / "one")), capsys=capsys)
    assert code == 2 and "--node" in error and not (tmp_path / "one").exists()
    code, _, error = run("restore", str(folder), "-c", a_file(tmp_path, (), str(tmp_path / "two"), 8), capsys=capsys)
    assert code == 1 and "set cluster.group_count: 4" in error and not (tmp_path / "two").exists()
    assert run("restore", str(folder), capsys=capsys)[0] == 2
    assert run("restore", str(folder), "--release", capsys=capsys)[0] == 2

    (folder / "group-001.rows").write_bytes(b"")
    code, found, _ = run("verify", str(folder), capsys=capsys)
    assert (code, found["ok"], len(found["faults"])) == (1, False, 1)
    code, _, error = run("restore", str(folder), "-c", a_file(tmp_path, (), str(tmp_path / "two")), capsys=capsys)
    assert code == 1 and "group-001.rows" in error and not (tmp_path / "two").exists()
    assert run("verify", str(tmp_path / "nowhere"), capsys=capsys)[0] == 1
