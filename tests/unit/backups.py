"""Builders for tests of backups: a node with a job of each kind, and nodes that start on what was restored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from wheelsched.backup import Manifest, fill_group
from wheelsched.node.restore import check_backup, fill_node
from wheelsched.store.memory import MemoryStore
from wheelsched.testing.cluster import TestCluster
from wheelsched.testing.node import START_MS, TestNode, make_settings


async def back_up(node: TestNode, folder: Path) -> Manifest:
    record = await node.node.backups.take(str(folder))
    assert record.manifest is not None
    return record.manifest


@asynccontextmanager
async def restored_node(
    folder: Path, *, now_ms: int = START_MS, hold: bool = False, settle: bool = True, serve: bool = False
) -> AsyncIterator[TestNode]:  # fmt: skip
    """A node that is alone, made from a backup."""
    node = TestNode(seed=99, start_ms=now_ms, serve=serve)
    manifest = check_backup(folder, node.settings)
    fill_node(node.store, folder, manifest, node.settings, hold=hold)
    await node.store.sync()
    await node.open(settle=settle)
    try:
        yield node
    finally:
        await node.close()


@asynccontextmanager
async def restored_cluster(folder: Path, count: int = 3, *, hold: bool = False) -> AsyncIterator[TestCluster]:
    """Nodes that hold all groups each, made from a backup, on the real clock."""
    cluster = TestCluster(count, seed=99, settings={})
    manifest = check_backup(folder, cluster.settings)
    for node in cluster.nodes.values():
        for entry in manifest.groups:
            fill_group(node.store, folder, entry, hold=bytes.fromhex(manifest.id) if hold else b"")
        await node.store.sync()
        await node.start()
    try:
        async with asyncio.timeout(30):
            while any(cluster.leader_of(group) is None for group in range(manifest.group_count)):  # noqa: ASYNC110  # in several nodes
                await asyncio.sleep(0.02)
        if not hold:
            await cluster.wait_led()
        yield cluster
    finally:
        for node in cluster.nodes.values():
            if node.is_up:
                await node.crash()


def state_rows(store: MemoryStore, family: str) -> dict[bytes, bytes]:
    return dict(store.scan(family, b"", b"", 1_000_000))


def settings_of(**sections: Any) -> Any:
    return make_settings(sections)
