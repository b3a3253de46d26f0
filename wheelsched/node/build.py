"""The composition root: the only place where real clocks, disks and chance are chosen."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from wheelsched import __version__
from wheelsched.cluster.identity import check_alone
from wheelsched.core.clock import Clock, Rng
from wheelsched.core.settings import Settings
from wheelsched.cron import ZoneData
from wheelsched.model import keys
from wheelsched.node.node import Node
from wheelsched.runtime.clock import OffsetClock, RealClock, VirtualClock
from wheelsched.runtime.metrics import Metrics
from wheelsched.store import Store
from wheelsched.store.directory import Identity
from wheelsched.store.memory import MemoryStore
from wheelsched.store.rocks import RocksStore


async def open_node(
    settings: Settings, *, store: Store | None = None, clock: Clock | None = None, rng: Rng | None = None,
    read_zones: Callable[[], ZoneData] | None = None,
) -> Node:  # fmt: skip
    """A node with its log replayed and its precise lane loaded, ready for `run`. What is not in `settings` is for tests.

    Raises what `RocksStore` raises for a data directory that is locked, foreign or corrupt.
    """
    metrics = Metrics(version=__version__)
    opened = store or open_store(settings, metrics)
    try:
        check_alone(opened)
        node = Node(
            settings, opened, clock or _open_clock(settings, opened), rng or random.Random(secrets.randbits(256)), metrics,
            read_zones or (lambda: read_zone_data(settings)),
        )  # fmt: skip
        await node.start()
    except BaseException:
        opened.close()
        raise
    return node


def open_store(settings: Settings, metrics: Metrics) -> Store:
    if settings.store.kind == "memory":
        return MemoryStore()
    data_dir = Path(settings.node.data_dir.replace("{id}", settings.node.id))
    cluster = settings.cluster
    identity = Identity(cluster_name=cluster.name, group_count=cluster.group_count, node_id=settings.node.id)
    return RocksStore(data_dir, settings.store, identity=identity, on_sync_s=metrics.fsync.observe)


def read_zone_data(settings: Settings) -> ZoneData:
    folder = settings.scheduler.time_zone_dir
    return ZoneData.of_folder(Path(folder)) if folder else ZoneData.of_package()


def _open_clock(settings: Settings, store: Store) -> Clock:
    if settings.clock.kind == "real":
        return open_real_clock(settings)
    start_ms = _instant_ms(settings.clock.start)
    last = store.get(keys.RAFT_META, Node.CLOCK_KEY)
    return VirtualClock(max(start_ms, int.from_bytes(last, "big") if last else 0))


def open_real_clock(settings: Settings) -> RealClock:
    return OffsetClock(Path(settings.clock.offset_file)) if settings.clock.offset_file else RealClock()


def _instant_ms(text: str) -> int:
    instant = datetime.fromisoformat(text) if text else datetime.now(UTC)
    return int(instant.timestamp() * 1000)
