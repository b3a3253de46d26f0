"""Who this node is, and whom it has met: one row of its store, durable before anybody relies on it.

A node that lost its data must not come back as the one it was: it would vote a second time in a term it voted in (thesis 3.8; RethinkDB
2.2.3, Jepsen 2016). So every data directory has an incarnation, 16 bytes drawn when it was made, and each node keeps the first that it
met under a raft id. Raft ids are never used again, so nothing ever has to be forgotten here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from wheelsched.cluster.frames import Hello
from wheelsched.cluster.placement import Founding
from wheelsched.core.clock import Rng
from wheelsched.core.settings import Settings, raft_ids
from wheelsched.model.keys import RAFT_META
from wheelsched.raft import Configuration
from wheelsched.store import Store, StoreCorrupt, StoreRefused
from wheelsched.store.directory import FORMAT_VERSION, IDENTITY_KEY, Identity

INCARNATION_BYTES: Final = 16


class IdentityRow(Identity, array_like=True, frozen=True):
    """The identity row with what a node of several adds to it.

    `cluster_id`: empty while the node belongs to none. `founding`: of a node that was there when the cluster was made; none: it joined
    later. `known`: the first incarnation met, by raft id, its own not among them. `restored`: what the cluster is to be made from that its
    rows were restored for; the rows are those of the groups that this node holds by it."""

    cluster_id: bytes = b""
    raft_id: int = 0
    founding: Founding | None = None
    known: dict[int, bytes] = msgspec.field(default_factory=dict)
    restored: Founding | None = None


class LocalIdentity:
    """The identity of this node, in memory and in `store`."""

    def __init__(self, store: Store, row: IdentityRow) -> None:
        self._store = store
        self._row = row
        self._durable: set[int] = set(row.known)

    @classmethod
    def load(cls, store: Store) -> LocalIdentity | None:
        """What is on record; None for a store that has no identity yet. Raises `StoreCorrupt`, `StoreRefused` for what cannot be used."""
        data = store.get(RAFT_META, IDENTITY_KEY)
        if data is None:
            return None
        try:
            row = msgspec.msgpack.decode(data, type=IdentityRow)
        except msgspec.DecodeError as error:
            raise StoreCorrupt(f"the identity row cannot be read: {error}; restore a backup, or replace this node") from error
        if row.format_version != FORMAT_VERSION:
            raise StoreRefused(f"the identity row has format {row.format_version}, this release reads format {FORMAT_VERSION}")
        return cls(store, row)

    @classmethod
    def create(cls, store: Store, *, cluster_name: str, group_count: int, node_id: str, rng: Rng) -> LocalIdentity:
        """A blank one, in the store but not yet durable."""
        incarnation = rng.getrandbits(8 * INCARNATION_BYTES).to_bytes(INCARNATION_BYTES, "big")
        identity = cls(store, IdentityRow(FORMAT_VERSION, cluster_name, group_count, node_id, incarnation))
        identity._write()
        return identity

    @classmethod
    def open(cls, store: Store, settings: Settings, rng: Rng) -> LocalIdentity:
        """The identity of a node of `cluster.nodes`, made where there is none. Raises `StoreRefused` for the data of a node that was
        alone: as one of several it would take part with what the others never agreed to."""
        cluster, name = settings.cluster, settings.node.id
        identity = cls.load(store) or cls.create(store, cluster_name=cluster.name, group_count=cluster.group_count, node_id=name, rng=rng)
        if identity.is_blank:
            if identity.restored is not None:
                identity._check_restored(settings)
            elif store.scan(RAFT_META, b"H", b"I", 1):
                raise StoreRefused(
                    f"the data of {name} was made by a node that is alone, and cluster.nodes names several; give this node an empty "
                    "node.data_dir, or leave cluster.nodes empty"
                )
            identity.take_raft_id(raft_ids(node.id for node in cluster.nodes)[name])
        return identity

    # ---- who

    @property
    def name(self) -> str:
        return self._row.node_id

    @property
    def raft_id(self) -> int:
        return self._row.raft_id

    @property
    def cluster_id(self) -> bytes:
        return self._row.cluster_id

    @property
    def incarnation(self) -> bytes:
        return self._row.incarnation

    @property
    def founding(self) -> Founding | None:
        return self._row.founding

    @property
    def restored(self) -> Founding | None:
        """What its rows were restored for; None of a node that was not."""
        return self._row.restored

    def wanted_founding(self, settings: Settings) -> Founding:
        """What this node would make a cluster from."""
        return Founding.of(settings, origin=self.restored.origin if self.restored is not None else "")

    def _check_restored(self, settings: Settings) -> None:
        # By another list of nodes this one would hold other groups than were written here, and begin those it lacks as empty ones.
        assert self.restored is not None
        if differences := self.restored.differences(self.wanted_founding(settings)):
            raise StoreRefused(
                f"{self.name} was restored for other settings than it has now: {'; '.join(differences)}. Start it with the settings it was "
                "restored with, or remove the data directories of all nodes and restore again"
            )

    @property
    def is_blank(self) -> bool:
        """Whether it belongs to no cluster: nothing was ever voted, promised or stored."""
        return not self._row.cluster_id

    def take_raft_id(self, raft_id: int) -> None:
        """The id that stands for this node from now on. Only while it is blank: one that has voted keeps its id for ever."""
        assert self.is_blank
        self._row = msgspec.structs.replace(self._row, raft_id=raft_id)

    # ---- groups

    def first_configuration(self, group: int) -> Configuration:
        """For `RaftReplicas`: a group's members when the cluster was made; nobody where this node was none of them, so that it waits for a
        snapshot and neither votes nor stands until it has one."""
        founding = self._row.founding
        configuration = founding.configuration(group) if founding is not None else Configuration()
        return configuration if self.raft_id in configuration.members() else Configuration()

    def joining(self, groups: Iterable[int]) -> list[int]:
        """For `RaftLog`: those of the groups that exist elsewhere and were never held here from their beginning."""
        return [group for group in groups if not self.first_configuration(group).members()]

    # ---- whom

    def known(self, raft_id: int) -> bytes:
        """The incarnation first met under a raft id; empty for none."""
        return self.incarnation if raft_id == self.raft_id else self._row.known.get(raft_id, b"")

    async def admit(self, hello: Hello) -> str | None:
        """For `Handlers`: why a node that greets is not let in, or None once it is on record.

        One that belongs to no cluster may ask whatever it is: it has no part in consensus, and so it hears from `bootstrap` in full why
        it cannot start."""
        reason = await self.note_peer(hello.raft_id, hello.name, hello.incarnation)
        return None if not hello.cluster_id else reason

    async def note_peer(self, raft_id: int, name: str, incarnation: bytes) -> str | None:
        """Put the first incarnation met under a raft id on record, durably; why another one is refused."""
        assert raft_id != self.raft_id
        first = self._row.known.get(raft_id)
        if first is None:
            self._row = msgspec.structs.replace(self._row, known={**self._row.known, raft_id: incarnation})
            self._write()
        elif first != incarnation:
            return lost_data(name, recorder=self.name, recorder_is_blank=self.is_blank)
        if raft_id not in self._durable:
            # Also where another greeting wrote it a moment ago: nobody may rely on it before it is on disk.
            await self._store.sync()
            self._durable.add(raft_id)
        return None

    # ---- belonging

    def restore(self, founding: Founding) -> None:
        """This node has the rows of its groups for a cluster that is made of them; in the store but not yet durable."""
        assert self.is_blank
        self._row = msgspec.structs.replace(self._row, restored=founding)
        self._write()

    async def found(self, founding: Founding) -> None:
        """This node is one of those that the cluster is made of; durable on return."""
        assert self.is_blank and self.raft_id in {node.raft_id for node in founding.nodes}
        self._row = msgspec.structs.replace(self._row, cluster_id=founding.cluster_id, founding=founding)
        self._write()
        await self._store.sync()

    async def join(self, cluster_id: bytes) -> None:
        """This node came later, under a raft id that is its own alone; durable on return."""
        assert self.is_blank and cluster_id
        self._row = msgspec.structs.replace(self._row, cluster_id=cluster_id, founding=None)
        self._write()
        await self._store.sync()

    def _write(self) -> None:
        self._store.write({RAFT_META: {IDENTITY_KEY: msgspec.msgpack.encode(self._row)}})


def check_alone(store: Store) -> None:
    """Raise `StoreRefused` where the data is that of a node of several: alone it would change what the others go on to change."""
    identity = LocalIdentity.load(store)
    if identity is not None and not identity.is_blank:
        raise StoreRefused(
            f"the data of {identity.name} belongs to cluster {identity.cluster_id.hex()}, and cluster.nodes is empty; name its nodes "
            "there, or give this node an empty node.data_dir"
        )


def lost_data(name: str, *, recorder: str, recorder_is_blank: bool) -> str:
    """Why a node that comes back with another data directory is refused, and what helps."""
    if recorder_is_blank:
        remedy = f"{recorder} has stored nothing yet: stop it, remove its data directory as well, and start both"
    else:
        remedy = f"bring the old directory back, or give {name} a new place with `wheelsched cluster replace {name}`"
    return (
        f"{recorder} has met {name} with another data directory; under its old id {name} could vote twice and lose what was acknowledged. "
        f"{remedy[0].upper()}{remedy[1:]}"
    )
