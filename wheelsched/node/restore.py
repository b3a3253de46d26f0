"""Data directories made from a backup: of a node that is alone, or of the nodes of a new cluster of any number of them.

A restored node is blank still: it makes its cluster at the first start as any new node does, once all of them are there. What the
cluster is made from names the backup, so nodes that were restored from different ones, or not at all, refuse each other.

A directory is made aside and gets its database by one rename, when that is durable and closed: a restore that was cut short leaves
nothing that a node would start on. All of it blocks.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from wheelsched.backup import BackupUnusable, Manifest, check_target_groups, fill_group, verify
from wheelsched.backup.files import GroupEntry, sync_directory
from wheelsched.cluster.identity import LocalIdentity
from wheelsched.cluster.placement import Founding
from wheelsched.core.settings import Settings
from wheelsched.model.keys import META_GROUP
from wheelsched.store import Store, StoreError
from wheelsched.store.directory import DB_NAME, PID_NAME, DataDirectory, Identity
from wheelsched.store.rocks import RocksStore

# No hidden name: a node that finds it beside no database refuses to start, instead of beginning anew.
ASIDE_NAME: Final = "restoring"
_MAY_BE_THERE: Final = frozenset((PID_NAME, ASIDE_NAME, "lost+found"))


@dataclass(frozen=True, slots=True)
class RestoredNode:
    """A data directory that was made. `groups`: how many it holds, the meta group not counted."""

    node: str
    data_dir: Path
    groups: int
    rows: int


def origin_of(manifest: Manifest, *, hold: bool) -> str:
    """What `Founding.origin` says of a cluster that is restored. Held or not is part of it: the nodes have to agree on that, too."""
    return f"backup {manifest.id}" + (", held" if hold else "")


def check_backup(folder: Path, settings: Settings, *, on_group: Callable[[GroupEntry], None] = lambda _: None) -> Manifest:
    """The manifest of a backup that is whole and fits. Raises `BackupUnusable`."""
    manifest, faults = verify(folder, on_group=on_group)
    if faults:
        raise BackupUnusable("; ".join(faults))
    check_target_groups(manifest, settings.cluster.group_count)
    return manifest


def restore(
    folder: Path, manifest: Manifest, settings: Settings, nodes: Sequence[str], *, hold: bool = False,
    on_rows: Callable[[int], None] = lambda _: None,
) -> list[RestoredNode]:  # fmt: skip
    """Make the data directories of these nodes of the settings. All are looked at before the first one is written.

    Raises `BackupUnusable`, `StoreError` where a directory is not empty, in use or cannot be written."""
    directories = {}
    try:
        for node in nodes:
            directory = directories[node] = DataDirectory(_data_dir(settings, node))
            _check_empty(directory.path)
        return [_restore_node(folder, manifest, settings, node, directories[node].path, hold, on_rows) for node in nodes]
    finally:
        for directory in directories.values():
            directory.release()


def _data_dir(settings: Settings, node: str) -> Path:
    return Path(settings.node.data_dir.replace("{id}", node))


def _check_empty(path: Path) -> None:
    found = sorted(name for name in os.listdir(path) if name not in _MAY_BE_THERE)
    if found:
        raise StoreError(
            f"data directory {path} is not empty: it holds {', '.join(found[:3])}; a backup is restored into an empty one only, so move it "
            "away or name another node.data_dir"
        )


def _restore_node(
    folder: Path, manifest: Manifest, settings: Settings, node: str, path: Path, hold: bool, on_rows: Callable[[int], None]
) -> RestoredNode:  # fmt: skip
    settings = msgspec.structs.replace(settings, node=msgspec.structs.replace(settings.node, id=node))
    aside = path / ASIDE_NAME
    shutil.rmtree(aside, ignore_errors=True)  # of a restore that was cut short
    cluster = settings.cluster
    identity = Identity(cluster_name=cluster.name, group_count=cluster.group_count, node_id=node)
    store = RocksStore(aside, settings.store, identity=identity, fatal=_fail)
    try:
        restored = fill_node(store, folder, manifest, settings, hold=hold, on_rows=on_rows)
    finally:
        store.close()
    sync_directory(aside / DB_NAME)
    (aside / DB_NAME).rename(path / DB_NAME)
    sync_directory(path)
    shutil.rmtree(aside)
    return RestoredNode(node, path, len(restored) - 1, sum(entry.rows for entry in restored))


def fill_node(
    store: Store, folder: Path, manifest: Manifest, settings: Settings, *, hold: bool = False,
    on_rows: Callable[[int], None] = lambda _: None,
) -> list[GroupEntry]:  # fmt: skip
    """Write what `settings.node.id` holds of the backup into a new store; not durable yet. The groups it holds."""
    marker = bytes.fromhex(manifest.id) if hold else b""
    held = list(manifest.groups)
    if settings.cluster.nodes:
        identity = LocalIdentity.open(store, settings, random.SystemRandom())
        founding = Founding.of(settings, origin=origin_of(manifest, hold=hold))
        held = [entry for entry in held if identity.raft_id in founding.configuration(entry.group).members()]
        identity.restore(founding)
    for entry in held:
        fill_group(store, folder, entry, hold=marker, on_rows=on_rows)
    assert any(entry.group == META_GROUP for entry in held), "every node has the meta group"
    return held


def _fail(message: str) -> NoReturn:
    raise StoreError(message)
