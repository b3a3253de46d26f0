"""The settings of a node: one frozen tree, read once at start.

What all nodes of a cluster must share stands under `cluster`, `limits`, `scheduler`; what each may choose under `node`, `http`,
`store`, `logging`. `runtime/config.py` reads it from YAML and the environment; `conf/reference.yaml` is generated from it. A field's
comment is its documentation: `doc` and bounds travel in the annotation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from wheelsched.core import limits
from wheelsched.core.ids import GROUP_COUNT_DEFAULT

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Positive = Annotated[float, Meta(gt=0)]
# A name or an address, IPv6 in brackets, and a port.
_ADDRESS = r"^([A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.%]+\]):[0-9]{1,5}$"
Address = Annotated[str, Meta(pattern=_ADDRESS)]


def _doc(text: str) -> Meta:
    return Meta(description=text)


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class NodeAddress(_Section, frozen=True):
    """One node of `cluster.nodes`."""

    id: Annotated[Name, _doc("Its name.")]
    http: Annotated[Address, _doc("Where clients reach it, host:port.")]
    peer: Annotated[Address, _doc("Where the other nodes reach it, host:port.")]


class TlsSettings(_Section, frozen=True):
    """All three or none."""

    cert_file: Annotated[str, _doc("This node's certificate and chain (PEM), naming the node's id; empty: no TLS.")] = ""
    key_file: Annotated[str, _doc("The certificate's private key (PEM), without a password.")] = ""
    ca_file: Annotated[str, _doc("The authority that signed every node's certificate (PEM).")] = ""


class ClusterSettings(_Section, frozen=True):
    name: Annotated[Name, _doc("Name of the cluster; nodes of another name are refused.")] = "wheelsched"
    group_count: Annotated[
        int, Meta(ge=1, le=128, description="Raft groups the 1,024 partitions are split into; a power of two, fixed at creation.")
    ] = GROUP_COUNT_DEFAULT
    nodes: Annotated[tuple[NodeAddress, ...], _doc("All nodes, the same list on each; empty: this node is alone.")] = ()
    replication_factor: Annotated[
        int, Meta(ge=1, le=7, description="Nodes that hold each group; an odd number. One node alone holds all, whatever this says.")
    ] = 3
    snapshot_mib_per_s: Annotated[
        int, Meta(ge=1, le=10_000, description="Most that a node sends of snapshots, to all others together, MiB a second.")
    ] = 50
    secret_file: Annotated[
        str, _doc("File with a secret that all nodes share and prove to each other, where TLS is not used; empty: no proof.")
    ] = ""
    tls: Annotated[TlsSettings, _doc("Mutual TLS between nodes.")] = TlsSettings()


class NodeSettings(_Section, frozen=True):
    id: Annotated[Name, _doc("This node's name.")] = "n1"
    data_dir: Annotated[str, _doc("Where the node keeps its data; {id} stands for the node's name.")] = "./wheelsched-data"
    peer_listen: Annotated[
        str,
        Meta(
            pattern=rf"^$|{_ADDRESS}",
            description="Where to listen for the other nodes, if they reach this one by another address; empty: that one.",
        ),
    ] = ""


class HttpSettings(_Section, frozen=True):
    host: Annotated[str, _doc("Address to listen on. Without authentication only loopback is allowed.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0 picks a free one.")] = 8080
    connections_max: Annotated[int, Meta(ge=1, description="Open client connections; further ones are answered 503.")] = 20_000
    drain_s: Annotated[Positive, _doc("How long a shutdown waits for calls under way.")] = 3.0


class LimitSettings(_Section, frozen=True):
    payload_bytes: Annotated[
        int,
        Meta(ge=1, le=limits.PAYLOAD_BYTES_MAX, description="Largest payload or result, as received (64 KiB; at most 256 KiB)."),
    ] = limits.PAYLOAD_BYTES_DEFAULT


class SchedulerSettings(_Section, frozen=True):
    horizon_s: Annotated[Positive, _doc("How far ahead of now timers are kept in memory.")] = 300.0
    ready_queue_max: Annotated[
        int, Meta(ge=1_000, description="Ready jobs kept in memory per queue and priority; later ones are read again from disk.")
    ] = 262_144
    audit_interval_s: Annotated[Positive, _doc("How often the audit starts to compare memory with disk.")] = 60.0
    purge_interval_s: Annotated[Positive, _doc("How often finished jobs over their retention are looked for.")] = 10.0
    time_zone_dir: Annotated[
        str, _doc("Folder of TZif files with tzdata.zi, the same on all nodes; empty: the installed tzdata package.")
    ] = ""
    zone_check_interval_s: Annotated[Positive, _doc("How often the time-zone data is looked at for a newer version.")] = 60.0
    loop_lag_max_ms: Annotated[int, Meta(ge=10, description="Event-loop lag above which new jobs and long polls are answered 503.")] = 500


class StoreSettings(_Section, frozen=True):
    kind: Annotated[Literal["rocksdb", "memory"], _doc("rocksdb keeps data in node.data_dir; memory forgets it at exit (tests).")] = (
        "rocksdb"
    )
    block_cache_mib: Annotated[int, Meta(ge=8, description="RocksDB block cache.")] = 128
    write_buffer_mib: Annotated[int, Meta(ge=4, description="All memtables together.")] = 128
    free_bytes_min: Annotated[
        int, Meta(ge=0, description="Below this much free disk (or 10 % of a smaller disk) new jobs are refused.")
    ] = 2 * 1024**3
    free_bytes_stop: Annotated[
        int, Meta(ge=0, description="Below this much free disk (or 2.5 % of a smaller disk) the node stops cleanly.")
    ] = 512 * 1024**2


class ClockSettings(_Section, frozen=True):
    kind: Annotated[Literal["real", "virtual"], _doc("virtual stands still between calls of /v1/clock:advance (tests).")] = "real"
    start: Annotated[str, _doc("First instant of a virtual clock, RFC 3339; empty: now.")] = ""
    offset_file: Annotated[str, _doc("File with milliseconds to add to the wall clock, for tests of stepped clocks; empty: none.")] = ""


class LoggingSettings(_Section, frozen=True):
    level: Annotated[Literal["debug", "info", "warning", "error"], _doc("Least severe level written.")] = "info"
    format: Annotated[Literal["text", "json"], _doc("text for people, json for log collectors.")] = "text"


class AuthSettings(_Section, frozen=True):
    mode: Annotated[Literal["none"], _doc("none: no authentication, allowed on loopback only.")] = "none"


class Settings(_Section, frozen=True):
    cluster: ClusterSettings = ClusterSettings()
    node: NodeSettings = NodeSettings()
    http: HttpSettings = HttpSettings()
    limits: LimitSettings = LimitSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    store: StoreSettings = StoreSettings()
    clock: ClockSettings = ClockSettings()
    logging: LoggingSettings = LoggingSettings()
    auth: AuthSettings = AuthSettings()


# What is compared when two nodes meet (cluster/handshake.py). Files are each node's own.
SHARED_SECTIONS = ("cluster", "limits", "scheduler")
_OWN = ("cluster.secret_file", "cluster.tls.")


def shared_settings(settings: Settings) -> dict[str, str]:
    """What all nodes of a cluster must share, as text by dotted key, in the order of the tree."""
    found: dict[str, str] = {}

    def collect(name: str, value: object) -> None:
        if isinstance(value, msgspec.Struct):
            for field in msgspec.structs.fields(value):
                collect(f"{name}.{field.name}", getattr(value, field.name))
        elif not name.startswith(_OWN):
            found[name] = msgspec.json.encode(value).decode()

    for section in SHARED_SECTIONS:
        collect(section, getattr(settings, section))
    return found


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of an `Address`; the brackets of IPv6 fall."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def raft_id_of(node_id: str) -> int:
    """The number that stands for a node in messages, votes and configurations: 64 bits, never 0, the same for ever."""
    # 0 is "nobody" in votes. One name in 2^64 would hash to it.
    return int.from_bytes(hashlib.blake2b(node_id.encode(), digest_size=8, person=b"ws-raft-id").digest(), "big") or 1


def raft_ids(node_ids: Iterable[str], *, id_of: Callable[[str], int] = raft_id_of) -> dict[str, int]:
    """Raft id by node id. Raises ValueError where two names stand for one number: the second name has to change."""
    ids: dict[str, int] = {}
    names: dict[int, str] = {}
    for name in node_ids:
        number = id_of(name)
        if names.setdefault(number, name) != name:
            raise ValueError(f"{name} and {names[number]} have the same raft id {number}; give {name} another id")
        ids[name] = number
    return ids
