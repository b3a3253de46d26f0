"""How much of a group's log may go (RAFT.md 7)."""

from __future__ import annotations

from collections.abc import Sequence

from wheelsched.raft import PeerState
from wheelsched.replica.raft_member import RaftMember
from wheelsched.replica.raft_settings import ReplicaSettings


def compacted_to(member: RaftMember, settings: ReplicaSettings, *, start: int, held_bytes: int, sending: Sequence[int]) -> int:
    """The index up to which entries are to be dropped, `start` (where the log begins now) for none. `sending`: as of
    `Transfers.wanted_from`.

    The older half of what is applied goes once it is much; the other half serves peers that lag a little, now or under the next leader. A
    peer that answers and lags further is waited for up to a bound; one that is sent a snapshot always, for the log has to meet it where
    the snapshot ends, else transfer and compaction chase each other for ever (hashicorp/raft #212)."""
    applied = member.state.applied_index
    count = applied - start
    if count <= settings.compact_entries and (held_bytes <= settings.compact_bytes or count < 2):
        return start
    up_to = min(applied - count // 2, member.raft.log.durable)
    leadership = member.raft.leadership
    if leadership is not None:
        others = [peer for node, peer in leadership.peers.items() if node != member.raft.node_id]
        if count <= settings.keep_entries and held_bytes <= settings.keep_bytes:
            up_to = min([up_to, *(peer.match for peer in others if peer.recent_active and peer.state is not PeerState.SNAPSHOT)])
        up_to = min([up_to, *(peer.snapshot_index for peer in others if peer.state is PeerState.SNAPSHOT)])
    return max(start, min([up_to, *sending]))
