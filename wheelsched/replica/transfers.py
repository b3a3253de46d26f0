"""Snapshots on their way: out to peers that the log no longer reaches back for, and in, from arrival to being the state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Final

import msgspec
import structlog

from wheelsched.core.invariants import invariant
from wheelsched.raft import InstallSnapshot, Ready
from wheelsched.replica.peers import Peers
from wheelsched.replica.raft_member import Installation, RaftMember, matches
from wheelsched.replica.raft_settings import ReplicaSettings
from wheelsched.replica.snapshots import (
    Copying,
    IncomingSnapshot,
    SnapshotRefused,
    SnapshotView,
    merge,
    staged_range,
    state_ranges,
)
from wheelsched.store import Store
from wheelsched.store.raftlog import HardState, Puts, RaftLog, Ranges

log = structlog.get_logger()

TRANSFERS_MAX: Final = 2  # on their way, in each direction
# A log that waits for a member to catch up behind its snapshot may get so long (RAFT.md 7).
HELD_BYTES_MAX: Final = 4 * 1024**3


class Transfers:
    """`touch(member)`: its core may have work; `offer(member, message)`: a snapshot is at hand, its message is to be stepped."""

    def __init__(
        self, store: Store, raft_log: RaftLog, peers: Peers, settings: ReplicaSettings, touch: Callable[[RaftMember], None],
        offer: Callable[[RaftMember, InstallSnapshot], None],
    ) -> None:  # fmt: skip
        self._store = store
        self._log = raft_log
        self._peers = peers
        self._settings = settings
        self._touch = touch
        self._offer = offer
        self._sending: dict[tuple[int, int], int] = {}  # (group, node) -> index of the snapshot on its way
        self._behind: dict[tuple[int, int], tuple[int, int]] = {}  # the same, arrived: its index, and the log's last one then
        self._incoming_count = 0
        self.installing: dict[RaftMember, None] = {}
        self.is_closed = False

    # ---- out

    def send(self, member: RaftMember, message: InstallSnapshot) -> None:
        """Read the group as it is applied now, which may be further than when the core asked for it."""
        place = (member.group, message.to)
        if place in self._sending or len(self._sending) >= TRANSFERS_MAX or self.is_closed:
            # Reported, or the core would wait for it for ever; it asks again at the peer's next sign of life.
            member.raft.report_snapshot(message.to, False)
            self._touch(member)
            return
        state = member.state
        message = msgspec.structs.replace(message, index=state.applied_index, snap_term=state.applied_term, conf=member.raft.configuration)
        view = SnapshotView(self._store, message, state)
        log.info("snapshot_sent", group=member.group, to=message.to, index=message.index)
        self._sending[place] = message.index
        self._behind.pop(place, None)
        sent = self._peers.send_snapshot(message.to, member.group, message.snapshot_id, view.chunks())
        sent.add_done_callback(partial(self._on_sent, member, message.to))

    def _on_sent(self, member: RaftMember, node: int, sent: asyncio.Future[bool]) -> None:
        index = self._sending.pop((member.group, node), 0)
        ok = not sent.cancelled() and sent.exception() is None and sent.result()
        if ok:
            self._behind[member.group, node] = index, member.raft.log.last_index
        member.raft.report_snapshot(node, ok)
        self._touch(member)

    def sending_from(self, group: int) -> list[int]:
        """Indexes of the group's snapshots on their way: the log behind them is wanted when they have arrived."""
        return [index for (of_group, _), index in self._sending.items() if of_group == group]

    def wanted_from(self, member: RaftMember) -> list[int]:
        """Indexes behind which the group's log is wanted, however long it got: of snapshots on their way, and of members whose snapshot
        arrived and which do not hold yet what was written while it was on its way. Were that dropped, they would need the next snapshot,
        and after it the next, for ever."""
        found = self.sending_from(member.group)
        leadership = member.raft.leadership
        for place in [place for place in self._behind if place[0] == member.group]:
            index, level_index = self._behind[place]
            peer = None if leadership is None else leadership.peers.get(place[1])
            if peer is None or peer.match >= level_index or self._log.bytes_held(member.group) > HELD_BYTES_MAX:
                del self._behind[place]
            else:
                found.append(max(index, peer.match))
        return found

    # ---- in: arrival

    async def take(self, member: RaftMember, node: int, snapshot_id: int, chunks: AsyncIterator[bytes]) -> bool:
        """Receive one, offer it to the core, and return whether this replica holds it, durably."""
        if member.incoming is not None or self._incoming_count >= TRANSFERS_MAX or self.is_closed:
            return False
        self._incoming_count += 1
        incoming = member.incoming = IncomingSnapshot(
            self._store, member.raft.node_id, member.group, small_rows_max=self._settings.small_snapshot_rows
        )
        installed = member.installed = asyncio.get_running_loop().create_future()
        is_whole = False
        try:
            async for chunk in chunks:
                incoming.take(chunk)
                left = member.left
                if left is not None and incoming.message.index <= left.index:
                    raise SnapshotRefused(f"this node left the group at {left.index}, and it is of {incoming.message.index}")
            if not incoming.is_complete:
                raise SnapshotRefused("its end is missing")
            message = incoming.message
            if (message.sender, message.snapshot_id) != (node, snapshot_id):
                raise SnapshotRefused(f"it says it is number {message.snapshot_id} of node {message.sender}")
            is_whole = True
        except SnapshotRefused as refused:
            log.warning("snapshot_refused", group=member.group, sender=node, reason=str(refused))
        finally:
            if not is_whole:
                self.end(member, installed=False)
        if is_whole:
            self._offer(member, incoming.message)
        return await asyncio.shield(installed)

    def settle_offer(self, member: RaftMember) -> None:
        """The core has seen the snapshot: it wants it, or it holds as much already, or its sender is deposed."""
        incoming = member.incoming
        assert incoming is not None, "a snapshot is stepped once, with its rows at hand"
        if not member.raft.is_installing:
            self.end(member, installed=member.raft.commit >= incoming.message.index)

    def end(self, member: RaftMember, *, installed: bool) -> None:
        """It is the state now, or will not be."""
        incoming, future = member.incoming, member.installed
        member.incoming = member.installed = None
        if incoming is not None:
            self._incoming_count -= 1
            incoming.discard()
        if future is not None and not future.done():
            future.set_result(installed)

    # ---- in: installation

    def begin(self, member: RaftMember, ready: Ready, puts: Puts) -> bool:
        """A Ready brings a snapshot; whether its rows take more than this turn's batch. Then the batch names it (`P`), the Ready and those
        after it wait, and `copy` goes on."""
        incoming, message = member.incoming, ready.snapshot
        assert message is not None
        is_at_hand = incoming is not None and incoming.is_complete and matches(incoming.message, message)
        invariant(is_at_hand, "snapshot_is_at_hand", group=member.group, index=message.index)
        assert incoming is not None
        if not incoming.is_staged:
            return False
        assert ready.hard_state is not None, "a snapshot moves the commit index"
        self._log.add_installing(puts, member.group, incoming.description())
        # The promise counts from now on; the commit index only once there is something behind it.
        commit = self._log.hard_state(member.group).commit
        self._log.add_hard_state(puts, member.group, HardState(ready.hard_state.term, ready.hard_state.vote, commit))
        member.installation = Installation(ready, Copying(self._store, member.group))
        self.installing[member] = None
        return True

    def copy(self, member: RaftMember) -> list[Ready]:
        """Copy one slice; once all is in place, the Readies to be written now, of which the first makes it the state."""
        installation = member.installation
        assert installation is not None
        if not installation.copying.step(self._settings.copy_rows):
            return []
        member.installation = None
        del self.installing[member]
        return [installation.ready, *installation.held]

    def put(self, member: RaftMember, ready: Ready, puts: Puts, ranges: Ranges) -> None:
        """The rows that make a snapshot the group's state, its own included where they are not in place yet."""
        incoming = member.incoming
        assert incoming is not None and ready.snapshot is not None and ready.hard_state is not None
        if incoming.is_staged:
            ranges.append(staged_range(member.group))
            incoming.is_staged = False  # gone with this batch
        else:
            ranges += state_ranges(member.group)
            merge(puts, incoming.rows())
        state = incoming.state
        self._log.install(puts, ranges, member.group, state, HardState(*ready.hard_state), ready.snapshot.conf.encode())
        member.state = state
        member.left = None
        member.counts.clear()
        log.info("snapshot_installed", group=member.group, index=state.applied_index, sender=ready.snapshot.sender)
