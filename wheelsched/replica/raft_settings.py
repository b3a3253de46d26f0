"""How the driver of Raft groups is set up, and what it shows of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from wheelsched.raft import Configuration, PeerState, RaftConfig
from wheelsched.replica.digests import DIGEST_WINDOW
from wheelsched.replica.snapshots import CHUNK_ROWS, SMALL_ROWS_MAX


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """`lease_reads`: a read barrier trusts the lease instead of asking a majority; off, for a lease makes nothing true. `voters_min`: fewer
    than these are left only where an operator forces it.

    `compact_*`: past these the older half of the applied log goes; `keep_*`: how much stays for a peer that answers and lags.
    `small_snapshot_rows`: up to these a snapshot is installed in one batch; a larger one is copied `copy_rows` a turn.
    `leave_ms`: how long a replica that left its group is kept; one that is taken back meanwhile goes on from its log.
    `digest_window`: entries between comparisons of the replicas' rows, the same on all nodes."""

    tick_ms: int = 50
    raft: RaftConfig = field(default_factory=RaftConfig)
    lease_reads: bool = False
    voters_min: int = 3
    compact_entries: int = 20_000
    compact_bytes: int = 64 * 1024 * 1024
    keep_entries: int = 100_000
    keep_bytes: int = 128 * 1024 * 1024
    small_snapshot_rows: int = SMALL_ROWS_MAX
    copy_rows: int = CHUNK_ROWS
    leave_ms: int = 60_000
    digest_window: int = DIGEST_WINDOW

    @property
    def election_ms(self) -> int:
        """The shortest election timeout."""
        return self.raft.election_tick * self.tick_ms

    @property
    def lease_ms(self) -> int:
        """How long after it asked a leader may trust that nobody else was elected: clocks may part by 10 %, and a voter counts ticks, so
        its timeout may be one short."""
        return self.election_ms - self.election_ms // 10 - self.tick_ms


@dataclass(frozen=True, slots=True)
class PeerProgress:
    """What a leader knows of a member. `match`: the last entry it is known to hold; `is_heard`: lately."""

    state: PeerState
    match: int
    is_heard: bool


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """A frozen look at one group. `leader`: None where nobody is known; `leads`: this node may act for it; `peers`: of a leader only."""

    group: int
    role: str
    term: int
    leader: int | None
    leads: bool
    commit: int
    applied: int
    first_index: int
    last_index: int
    log_bytes: int
    configuration: Configuration
    transferee: int
    is_installing: bool
    peers: dict[int, PeerProgress]
