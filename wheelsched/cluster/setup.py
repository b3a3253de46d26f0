"""A transport from the settings of a node. Reads certificate, key and secret files: before the loop runs, or on a thread."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final

from wheelsched import __version__
from wheelsched.cluster.handshake import Identity
from wheelsched.cluster.peer import PeerAddress
from wheelsched.cluster.transport import Handlers, Tls, Transport, TransportOptions
from wheelsched.core.clock import Clock, Rng
from wheelsched.core.ids import PARTITION_COUNT
from wheelsched.core.settings import Settings, TlsSettings, raft_ids, shared_settings, split_address

SECRET_BYTES_MIN: Final = 16


def make_transport(
    settings: Settings, handlers: Handlers, *, incarnation: bytes, cluster_id: bytes, clock: Clock, rng: Rng, raft_id: int = 0
) -> Transport:  # fmt: skip
    """The transport of a node of `cluster.nodes`. `rng` draws nonces too, so it must be one that nobody can guess. `raft_id`: of a node
    that took the place of another of its name; 0: the one that its name stands for.

    Raises ValueError, naming the setting, where a file cannot be used."""
    cluster = settings.cluster
    ids = raft_ids(node.id for node in cluster.nodes)
    own = next(node for node in cluster.nodes if node.id == settings.node.id)
    identity = Identity(
        cluster_name=cluster.name, name=own.id, raft_id=raft_id or ids[own.id], incarnation=incarnation, cluster_id=cluster_id,
        group_count=cluster.group_count, partition_count=PARTITION_COUNT, release=__version__, settings=shared_settings(settings),
        secret=read_secret(cluster.secret_file) if cluster.secret_file else b"",
    )  # fmt: skip
    peers = {ids[node.id]: PeerAddress(node.id, *split_address(node.peer)) for node in cluster.nodes if node.id != own.id}
    tls = read_tls(cluster.tls) if cluster.tls.cert_file else None
    options = TransportOptions(snapshot_bytes_per_s=cluster.snapshot_mib_per_s * 1024 * 1024)
    return Transport(
        identity, split_address(settings.node.peer_listen or own.peer), peers, handlers, clock=clock, rng=rng, tls=tls, options=options
    )


def read_tls(settings: TlsSettings) -> Tls:
    """Mutual TLS 1.3. Host names are not checked: a certificate must name the node's id, which `handshake.py` does."""
    contexts = []
    for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(settings.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ValueError(f"cluster.tls.ca_file {settings.ca_file} cannot be used: {_reason(error)}") from error
        try:
            context.load_cert_chain(settings.cert_file, settings.key_file, password=_no_password)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise ValueError(
                f"cluster.tls.cert_file {settings.cert_file} with cluster.tls.key_file {settings.key_file} cannot be used: {_reason(error)}"
            ) from error
        contexts.append(context)
    return Tls(caller=contexts[0], listener=contexts[1])


def read_secret(file: str) -> bytes:
    """The content of the file without the white space around it."""
    try:
        secret = Path(file).read_bytes().strip()
    except OSError as error:
        raise ValueError(f"cluster.secret_file {file} cannot be read: {error.strerror}") from error
    if len(secret) < SECRET_BYTES_MIN:
        raise ValueError(f"cluster.secret_file {file} holds {len(secret)} bytes; take {SECRET_BYTES_MIN} random ones or more")
    return secret


def _no_password() -> str:
    # Without this OpenSSL would ask on the terminal and the node hang.
    raise ValueError("the key has a password; store it without one")


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
