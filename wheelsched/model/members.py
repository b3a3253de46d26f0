"""The members of a cluster and who holds which group, as rows of the meta group.

One version stands for all of it: whoever changes something names the version it looked at, so every change was decided on what it meets.
Rows are small and few; a change of them is rare.

    meta   v                   ClusterRow
    meta   m raft id           MemberRow, one for every raft id there ever was: they are never used again
    meta   g group             GroupRow
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

import msgspec

from wheelsched.core.invariants import invariant
from wheelsched.model.keys import META_GROUP, group_prefix, prefix_end

_FORMAT: Final = b"\x01"
_PREFIX: Final = group_prefix(META_GROUP)
CLUSTER_KEY: Final = _PREFIX + b"v"
MEMBERS_PREFIX: Final = _PREFIX + b"m"
GROUPS_PREFIX: Final = _PREFIX + b"g"
MEMBERS_END: Final = prefix_end(MEMBERS_PREFIX)
GROUPS_END: Final = prefix_end(GROUPS_PREFIX)
_ID = struct.Struct(">Q")
_GROUP = struct.Struct(">H")


class MemberState(IntEnum):
    JOINING = 0  # added; it has not come yet, or not caught up with the meta group
    ACTIVE = 1
    DRAINING = 2  # gives up what it leads and holds
    REMOVED = 3  # for ever


# Legal moves; a member may also stay what it is.
MOVES: Final = {
    MemberState.JOINING: (MemberState.ACTIVE, MemberState.REMOVED, MemberState.DRAINING),
    MemberState.ACTIVE: (MemberState.DRAINING,),
    MemberState.DRAINING: (MemberState.ACTIVE, MemberState.REMOVED),
    MemberState.REMOVED: (),
}


class MemberRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """`incarnation`: the data directory it is bound to; empty until it came. `generation`: how often the name was given before, and once.
    `leaves`: once it holds nothing it is removed. `is_gone`: an operator's word that it never comes back, so nobody waits for it."""

    raft_id: int
    name: str
    http: str
    peer: str
    state: int = MemberState.JOINING
    incarnation: bytes = b""
    generation: int = 1
    leaves: bool = False
    is_gone: bool = False


class GroupChange(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a group is on its way to: `enter` becomes a voter (with `as_learner` a learner), `leave` no member; 0: nobody.

    `force`: below the replication factor, by an operator's order."""

    enter: int = 0
    leave: int = 0
    as_learner: bool = False
    force: bool = False


class GroupRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Members of a group as of the last change that was completed; the group's own configuration decides. `preferred`: who should lead."""

    group: int
    voters: tuple[int, ...]
    learners: tuple[int, ...] = ()
    preferred: int = 0
    change: GroupChange | None = None


class ClusterRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """`version` counts the changes of members and groups."""

    version: int
    cluster_id: bytes
    replication_factor: int


def member_key(raft_id: int) -> bytes:
    return MEMBERS_PREFIX + _ID.pack(raft_id)


def group_key(group: int) -> bytes:
    return GROUPS_PREFIX + _GROUP.pack(group)


_encode = msgspec.msgpack.Encoder().encode
_decode_cluster = msgspec.msgpack.Decoder(ClusterRow).decode
_decode_member = msgspec.msgpack.Decoder(MemberRow).decode
_decode_group = msgspec.msgpack.Decoder(GroupRow).decode


def encode(row: ClusterRow | MemberRow | GroupRow) -> bytes:
    return _FORMAT + _encode(row)


def _body(row: bytes) -> memoryview:
    invariant(row[:1] == _FORMAT, "row_format_known", first_byte=row[:1])
    return memoryview(row)[1:]


def decode_cluster(row: bytes) -> ClusterRow:
    return _decode_cluster(_body(row))


def decode_member(row: bytes) -> MemberRow:
    return _decode_member(_body(row))


def decode_group_row(row: bytes) -> GroupRow:
    return _decode_group(_body(row))
