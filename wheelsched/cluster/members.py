"""The members of the cluster as this node has them: rows of the meta group, read again whenever their version moved.

Every node has the rows, so it finds its peers and who was removed without asking anybody; a change goes through the log and names the
version it was decided on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from wheelsched.cluster.peer import PeerAddress
from wheelsched.core.clock import Clock
from wheelsched.core.errors import BY_CODE, InvalidRequest, NameTaken, NotFound, Unavailable, WheelschedError
from wheelsched.core.settings import raft_id_of, split_address
from wheelsched.model import members
from wheelsched.model.commands import ChangeMembers, Reply
from wheelsched.model.keys import META, META_GROUP
from wheelsched.model.members import ClusterRow, GroupRow, MemberRow, MemberState
from wheelsched.store import Store

Propose = Callable[[ChangeMembers], Awaitable[Reply]]

_ROWS_MAX: Final = 100_000
# Two operators at once, or an operator and the driver: each looks again at what the other did.
AGAIN_MS, PATIENCE_MS = 50, 5_000


class MemberTable:
    """The rows, decoded. `refresh` before looking; what it gives does not change under the caller."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._data: bytes | None = None
        self.cluster: ClusterRow | None = None
        self.members: Mapping[int, MemberRow] = {}
        self.groups: Mapping[int, GroupRow] = {}
        self.refresh()

    def refresh(self) -> bool:
        """Read the rows again if they changed; whether they did. A get, some microseconds, where they did not."""
        data = self._store.get(META, members.CLUSTER_KEY)
        if data == self._data:
            return False
        self._data = data
        self.cluster = None if data is None else members.decode_cluster(data)
        rows = self._store.scan(META, members.MEMBERS_PREFIX, members.MEMBERS_END, _ROWS_MAX)
        found = sorted((members.decode_member(row) for _, row in rows), key=lambda row: (row.name, row.generation))
        self.members = {row.raft_id: row for row in found}
        groups = self._store.scan(META, members.GROUPS_PREFIX, members.GROUPS_END, _ROWS_MAX)
        self.groups = {row.group: row for row in (members.decode_group_row(row) for _, row in groups)}
        return True

    @property
    def version(self) -> int:
        return 0 if self.cluster is None else self.cluster.version

    @property
    def replication_factor(self) -> int:
        return 0 if self.cluster is None else self.cluster.replication_factor

    def live(self) -> Iterator[MemberRow]:
        """Those that are there or are to come, by name."""
        return (row for row in self.members.values() if row.state != MemberState.REMOVED and not row.is_gone)

    def named(self, name: str) -> MemberRow:
        """The member of that name: the one that is there, else the last that was not removed. Raises `NotFound`."""
        rows = [row for row in self.members.values() if row.name == name and row.state != MemberState.REMOVED]
        if not rows:
            raise NotFound(f"the cluster has no node {name}; it has {', '.join(sorted({row.name for row in self.live()})) or 'none yet'}")
        return next((row for row in rows if not row.is_gone), rows[-1])

    def name_of(self, raft_id: int) -> str:
        row = self.members.get(raft_id)
        return row.name if row is not None else f"raft id {raft_id}"

    def peers(self, own_id: int, listed: Mapping[str, str] = MappingProxyType({})) -> dict[int, PeerAddress]:
        """For `Transport.set_peers`. `listed`: the addresses in this node's settings, by name. Where they differ from the rows one of the
        two is out of date: nodes may have moved while there was no majority to write that down."""
        return {row.raft_id: _address_of(row, listed.get(row.name, row.peer)) for row in self.live() if row.raft_id != own_id}

    def removed(self) -> dict[int, str]:
        """Raft ids that will never be let in again, with the names they had."""
        return {row.raft_id: row.name for row in self.members.values() if row.state == MemberState.REMOVED}

    def held(self, raft_id: int) -> list[int]:
        """Groups that the node is a member of, or is becoming one."""
        return [
            row.group for row in self.groups.values()
            if raft_id in row.voters or raft_id in row.learners or (row.change is not None and row.change.enter == raft_id)
        ]  # fmt: skip


class MemberChanges:
    """Changes that operators ask for, on whatever node they ask. Each looks at the table, decides, and proposes; where somebody else was
    first it looks again."""

    def __init__(self, table: MemberTable, propose: Propose, clock: Clock, *, is_connected: Callable[[int], bool]) -> None:
        """`propose`: through the log of the meta group, wherever that is led."""
        self._table = table
        self._propose = propose
        self._clock = clock
        self._is_connected = is_connected

    # ---- what operators ask for

    async def add(self, name: str, http: str, peer: str, *, actor: str = "") -> MemberRow:
        """Make a place for a node that is to join; one that drains comes back. Raises `NameTaken`, `InvalidRequest`."""

        def decide(table: MemberTable) -> list[MemberRow]:
            for row in table.live():
                if row.name == name:
                    if (row.http, row.peer) != (http, peer) or row.leaves:
                        raise NameTaken(
                            f"{name} is a member at {row.peer} (http {row.http}), state {state_name(row)}; "
                            "remove it first, or replace it if its data is lost"
                        )
                    return [msgspec.structs.replace(row, state=MemberState.ACTIVE)] if row.state == MemberState.DRAINING else [row]
            return [self._new_row(table, name, http, peer)]

        return (await self._change(decide, actor))[-1]

    async def drain(self, name: str, *, actor: str = "") -> MemberRow:
        """Let a node give up its leaderships, and its replicas where there is room for them elsewhere. `add` takes it back."""

        def decide(table: MemberTable) -> list[MemberRow]:
            row = table.named(name)
            if row.state == MemberState.JOINING:
                raise InvalidRequest(f"{name} has not joined yet; remove it instead")
            return [msgspec.structs.replace(row, state=MemberState.DRAINING)]

        return (await self._change(decide, actor))[-1]

    async def remove(self, name: str, *, force: bool = False, actor: str = "") -> MemberRow:
        """Let a node leave for ever once it holds nothing. `force`: it never comes back, so nobody waits for it, and its groups may be left
        with fewer replicas than the replication factor. Raises `InvalidRequest` where too few nodes would be left."""

        def decide(table: MemberTable) -> list[MemberRow]:
            row = table.named(name)
            left = [other for other in table.live() if other.raft_id != row.raft_id and not other.leaves]
            if not left:
                raise InvalidRequest(f"{name} is the last node of the cluster")
            if (
                len(left) < table.replication_factor
                and not force
                and row.raft_id in {held for g in table.groups.values() for held in g.voters}
            ):
                raise InvalidRequest(
                    f"{len(left)} nodes would be left and cluster.replication_factor is {table.replication_factor}; "
                    "add a node first, or accept fewer replicas with force"
                )
            if force:
                _check_majorities(table, row)
            return [msgspec.structs.replace(row, state=MemberState.DRAINING, leaves=True, is_gone=row.is_gone or force)]

        return (await self._change(decide, actor))[-1]

    async def replace(self, name: str, http: str = "", peer: str = "", *, actor: str = "") -> MemberRow:
        """Give up a node whose data is lost and make a place for another of the same name; its raft id is new. Addresses left out stay."""

        def decide(table: MemberTable) -> list[MemberRow]:
            row = table.named(name)
            if self._is_connected(row.raft_id):
                raise InvalidRequest(f"{name} is up and has its data; stop it first, or drain and remove it")
            if row.state == MemberState.JOINING and not row.incarnation:
                if row.generation > 1 and (http or row.http, peer or row.peer) == (row.http, row.peer):
                    return [row]  # said twice
                raise InvalidRequest(f"{name} has not joined yet, so its place is free: start it with an empty node.data_dir")
            _check_majorities(table, row)
            gone = msgspec.structs.replace(row, state=MemberState.DRAINING, leaves=True, is_gone=True)
            return [gone, self._new_row(table, name, http or row.http, peer or row.peer, instead=row.raft_id)]

        return (await self._change(decide, actor))[-1]

    def _new_row(self, table: MemberTable, name: str, http: str, peer: str, *, instead: int = 0) -> MemberRow:
        for row in table.live():
            if row.raft_id != instead and (row.peer == peer or row.http == http):
                raise InvalidRequest(f"{row.name} is at {row.peer} (http {row.http}); give {name} an address of its own")
        for field, address in (("http", http), ("peer", peer)):
            if not 0 < split_address(address)[1] < 65_536:
                raise InvalidRequest(f"{field} {address} has a port that is none; ports are 1 to 65,535")
        generation = 1 + max((row.generation for row in table.members.values() if row.name == name), default=0)
        raft_id = raft_id_of_generation(name, generation)
        if raft_id in table.members:
            raise InvalidRequest(f"{name} and {table.name_of(raft_id)} have the same raft id {raft_id}; choose another name")
        return MemberRow(raft_id, name, http, peer, generation=generation)

    # ---- what joining nodes ask for; `bootstrap.Table`

    def awaits(self, name: str, raft_id: int, incarnation: bytes) -> bool:
        self._table.refresh()
        row = self._table.members.get(raft_id)
        return row is not None and row.name == name and not row.leaves and _may_join(row, incarnation)

    async def bind(self, name: str, raft_id: int, incarnation: bytes) -> str:
        def decide(table: MemberTable) -> list[MemberRow]:
            row = table.members.get(raft_id)
            if row is None or row.name != name or row.leaves:
                raise InvalidRequest(f"the cluster has no place for {name}; make one with `wheelsched cluster add {name}`")
            if not _may_join(row, incarnation):
                raise InvalidRequest(
                    f"{name} has joined with another data directory; bring that back, or give {name} a new place with "
                    f"`wheelsched cluster replace {name}`"
                )
            return [msgspec.structs.replace(row, incarnation=incarnation)]

        try:
            await self._change(decide, actor=name)
        except InvalidRequest as error:
            return error.detail
        return ""

    def rows(self) -> Sequence[MemberRow]:
        return tuple(self._table.live())

    # ---- through the log

    async def _change(self, decide: Callable[[MemberTable], list[MemberRow]], actor: str) -> list[MemberRow]:
        until_ms = self._clock.mono_ms() + PATIENCE_MS
        table = self._table
        while True:
            table.refresh()
            if table.cluster is None:
                raise Unavailable("the cluster is being made; try again in a second", retry_after_s=1)
            wanted = decide(table)
            if all(table.members.get(row.raft_id) == row for row in wanted):
                return wanted
            reply = await self._propose(ChangeMembers(table.version, wanted, actor=actor))
            if not reply.refusal:
                return wanted
            if reply.refusal != "version-mismatch" or self._clock.mono_ms() >= until_ms:
                raise BY_CODE.get(reply.refusal, WheelschedError)(reply.detail)
            await self._clock.sleep_until(self._clock.mono_ms() + AGAIN_MS)


def _address_of(row: MemberRow, listed: str) -> PeerAddress:
    return PeerAddress(row.name, *split_address(row.peer), elsewhere=None if listed == row.peer else split_address(listed))


def _check_majorities(table: MemberTable, row: MemberRow) -> None:
    """Raise `InvalidRequest` where a group would have too few left to agree on anything: then nobody could take the place either."""
    for group in table.groups.values():
        if row.raft_id not in group.voters or row.is_gone:
            continue
        left = [node for node in group.voters if node != row.raft_id and node in table.members and not table.members[node].is_gone]
        if 2 * len(left) <= len(group.voters):
            given_up = [table.name_of(node) for node in group.voters if node not in left and node != row.raft_id]
            also = f"{' and '.join(given_up)} was given up as well and still has to be replaced in it" if given_up else "no copy would do"
            raise InvalidRequest(
                f"without {row.name} group {group_name(group.group)} would have no majority: {also}; "
                "wait for that, or bring the node back, or restore the last backup to a new cluster"
            )


def _may_join(row: MemberRow, incarnation: bytes) -> bool:
    return row.state == MemberState.JOINING and row.incarnation in (b"", incarnation)


def state_name(row: MemberRow) -> str:
    return MemberState(row.state).name.lower()


def group_name(group: int) -> str:
    return "meta" if group == META_GROUP else str(group)


def raft_id_of_generation(name: str, generation: int) -> int:
    """The raft id of a name that is given for the n-th time. The first is that of the settings; no name holds a slash."""
    return raft_id_of(name) if generation == 1 else raft_id_of(f"{name}/{generation}")
