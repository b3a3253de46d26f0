"""The way back: a group's file becomes the rows of a new group, the same on every node that is to hold it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from wheelsched.backup.files import BackupUnusable, GroupEntry, GroupFile, Manifest
from wheelsched.core.ids import PARTITION_COUNT
from wheelsched.model import keys, members
from wheelsched.model.rows import GroupState
from wheelsched.store import Store
from wheelsched.store.raftlog import FIRST_INDEX, FIRST_TERM, Puts, add_first_rows

# Tokens that the lost cluster may have minted after the backup: more than it could in years. Without the gap a job that it claimed then
# could be claimed again under the very same lease token, and its first worker would end the second one's attempt; and whoever keeps the
# highest fencing token seen would refuse the restored cluster's. Two million restores fit into what JSON numbers can tell apart.
FENCING_GAP: Final = 1 << 32
_HOLD_FORMAT: Final = b"\x01"


def check_target_groups(manifest: Manifest, group_count: int) -> None:
    """Raise `BackupUnusable` where a cluster of so many groups cannot be made of the backup."""
    if manifest.group_count != group_count:
        raise BackupUnusable(
            f"the backup has {manifest.group_count} groups and the settings say cluster.group_count {group_count}; it is fixed when a "
            f"cluster is made, so set cluster.group_count: {manifest.group_count}"
        )
    if manifest.partition_count != PARTITION_COUNT:
        raise BackupUnusable(
            f"the backup has {manifest.partition_count:,} partitions, this release {PARTITION_COUNT:,}; use the release that wrote it"
        )


def restored_state(state: GroupState) -> GroupState:
    """A group's state as its new log starts behind it: at the index of every new group, so that a blank node joins by snapshot only."""
    return replace(
        state, applied_index=FIRST_INDEX, applied_term=FIRST_TERM, fencing=state.fencing + FENCING_GAP, digest=0, digest_from=0,
        checked_index=0, checked_digest=0,
    )  # fmt: skip


def fill_group(
    store: Store, folder: Path, entry: GroupEntry, *, hold: bytes = b"", on_rows: Callable[[int], None] = lambda _: None
) -> None:  # fmt: skip
    """Write a group's rows into a store that holds none of it, and last the rows of its log. `hold`: not empty, the cluster starts held
    (the backup's id); counts for the meta group. Blocks; nothing is durable before the store is synced. Raises `BackupUnusable`."""
    group = entry.group
    file = GroupFile(folder, entry)
    for chunk in file.chunks():
        rows: dict[bytes, bytes | None] = {key: value for key, value in chunk.rows if not _is_of_old_cluster(chunk.family, key)}
        store.write({chunk.family: rows})
        on_rows(len(chunk.rows))
    puts: Puts = {}
    add_first_rows(puts, group, restored_state(file.state))
    if group == keys.META_GROUP and hold:
        puts[keys.META] = {keys.HOLD_KEY: _HOLD_FORMAT + hold}
    store.write(puts)


def _is_of_old_cluster(family: str, key: bytes) -> bool:
    """Who its members were, and whether it was held: the new cluster has members of its own, and writes them when it is made."""
    return family == keys.META and (
        key in (members.CLUSTER_KEY, keys.HOLD_KEY) or key.startswith((members.MEMBERS_PREFIX, members.GROUPS_PREFIX))
    )
