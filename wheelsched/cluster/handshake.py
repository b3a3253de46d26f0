"""Who may talk to whom: what two hellos must agree on, and what each side proves. Pure; `transport.py` carries it.

    caller                               listener
    HELLO    who I am, whom I expect  ->
             <-                          WELCOME  who I am, proof of the secret    (or REFUSAL, and the end)
    CONFIRM  proof of the secret      ->
             <-                          CONFIRM  come in

Identity, versions and counts must agree; other shared settings that differ are a warning on both sides: were they refused, no setting
could be changed node by node (RAFT.md 11).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from wheelsched.cluster.frames import MAGIC, PROTOCOL_MAX, PROTOCOL_MIN, Hello, Refusal
from wheelsched.core.settings import NodeAddress, split_address

NONCE_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Identity:
    """What a node says of itself. `settings`: what all nodes share (`core/settings.py`, `shared_settings`).

    `cluster_id`: empty while the node belongs to none: then it may ask and be asked, but has no part in consensus. `secret`: proven by
    each to the other; empty: no proof is asked for. `versions`: first and last protocol version spoken."""

    cluster_name: str
    name: str
    raft_id: int
    incarnation: bytes
    group_count: int
    partition_count: int
    cluster_id: bytes = b""
    release: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    secret: bytes = field(default=b"", repr=False)
    versions: tuple[int, int] = (PROTOCOL_MIN, PROTOCOL_MAX)


def make_hello(identity: Identity, *, expects: int, nonce: bytes, bulk: bool) -> Hello:
    settings = tuple(identity.settings.items())
    text = "\0".join(f"{key}\0{value}" for key, value in settings)
    return Hello(
        magic=MAGIC, protocol_min=identity.versions[0], protocol_max=identity.versions[1], cluster_name=identity.cluster_name,
        cluster_id=identity.cluster_id, name=identity.name, raft_id=identity.raft_id, expects=expects,
        incarnation=identity.incarnation, release=identity.release, nonce=nonce, group_count=identity.group_count,
        partition_count=identity.partition_count, settings_hash=hashlib.blake2b(text.encode(), digest_size=16).digest(),
        settings=settings, bulk=bulk,
    )  # fmt: skip


def find_refusal(mine: Hello, theirs: Hello) -> Refusal | None:
    """Why the two cannot talk, in words that name both sides; None where they can."""
    if theirs.magic != MAGIC:
        return Refusal("magic", f"this is not wheelsched: {theirs.magic[:32]!r}")
    if agreed_version(mine, theirs) is None:
        return Refusal(
            "version",
            f"{theirs.name} speaks protocol {theirs.protocol_min} to {theirs.protocol_max} (release {theirs.release or 'unknown'}), "
            f"{mine.name} {mine.protocol_min} to {mine.protocol_max} (release {mine.release or 'unknown'}); "
            "upgrade one release at a time",
        )
    if theirs.cluster_name != mine.cluster_name:
        return Refusal(
            "cluster-name",
            f"{theirs.name} is of cluster {theirs.cluster_name}, {mine.name} of cluster {mine.cluster_name}; "
            "correct cluster.name or the addresses in cluster.nodes",
        )
    if theirs.cluster_id and mine.cluster_id and theirs.cluster_id != mine.cluster_id:
        return Refusal(
            "cluster-id",
            f"{theirs.name} belongs to cluster {theirs.cluster_id.hex()}, {mine.name} to {mine.cluster_id.hex()}: two clusters "
            f"of the name {mine.cluster_name} were created apart; remove the data of the node that is to join the other one",
        )
    if theirs.raft_id == mine.raft_id or theirs.name == mine.name:
        return Refusal("same-node", f"{theirs.name} and {mine.name} are the same node to others; give one another node.id")
    if theirs.expects != mine.raft_id:
        return Refusal(
            "wrong-node",
            f"{theirs.name} looked for the node of raft id {theirs.expects} and found {mine.name}; correct its address in cluster.nodes",
        )
    for key, there, here in (
        ("cluster.group_count", theirs.group_count, mine.group_count),
        ("partition count", theirs.partition_count, mine.partition_count),
    ):
        if there != here:
            return Refusal("counts", f"{key} is {there} at {theirs.name} and {here} at {mine.name}; it is fixed at creation")
    return None


def agreed_version(mine: Hello, theirs: Hello) -> int | None:
    """The highest protocol version that both speak."""
    highest = min(mine.protocol_max, theirs.protocol_max)
    return highest if highest >= max(mine.protocol_min, theirs.protocol_min) else None


def differing_settings(mine: Hello, theirs: Hello) -> tuple[str, ...]:
    """Each shared setting that differs, with both values. One that a side does not know is of another release and says nothing."""
    if mine.settings_hash == theirs.settings_hash:
        return ()
    there = dict(theirs.settings)
    return tuple(
        f"{key} is {there[key]} at {theirs.name} and {here} at {mine.name}" for key, here in mine.settings if there.get(key, here) != here
    )


def address_told(theirs: Hello) -> tuple[str, int] | None:
    """Where the other node is by its own settings, host and port; None where they do not tell."""
    try:
        nodes = msgspec.json.decode(dict(theirs.settings).get("cluster.nodes", "[]"), type=tuple[NodeAddress, ...])
    except msgspec.DecodeError:
        return None
    return next((split_address(node.peer) for node in nodes if node.id == theirs.name), None)


def proof_of(secret: bytes, *, caller: Hello, listener: Hello, by_caller: bool) -> bytes:
    """Shows that its maker knows the secret and saw both nonces; empty without a secret. Who calls and who listens is in it, so that
    one side's proof cannot be played back as the other's."""
    if not secret:
        return b""
    parts = [b"caller" if by_caller else b"listener", caller.nonce, listener.nonce]
    parts += [f"{hello.raft_id} {hello.name}".encode() for hello in (caller, listener)]
    return hmac.digest(secret, b"\0".join(parts), "sha256")


def is_proof(given: bytes, expected: bytes) -> bool:
    return hmac.compare_digest(given, expected)


def secret_refusal(theirs: Hello) -> Refusal:
    return Refusal("secret", f"{theirs.name} does not prove the secret of this cluster; give all nodes the same cluster.secret_file")


def certificate_refusal(theirs: Hello, certificate: Mapping[str, Any] | None) -> Refusal | None:
    """A certificate of the right authority must also be that of the node which shows it: as a DNS name or the common name."""
    names = {value for kind, value in (certificate or {}).get("subjectAltName", ()) if kind == "DNS"}
    names |= {value for part in (certificate or {}).get("subject", ()) for kind, value in part if kind == "commonName"}
    if theirs.name in names:
        return None
    shown = ", ".join(sorted(names)) or "nobody"
    return Refusal("certificate", f"{theirs.name} shows a certificate for {shown}; issue one with DNS:{theirs.name}")
