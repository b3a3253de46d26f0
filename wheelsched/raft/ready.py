"""What a core hands to its driver, and what the driver hands back at a start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from wheelsched.raft.configuration import Configuration
from wheelsched.raft.messages import AnyMessage, Entry, InstallSnapshot
from wheelsched.raft.progress import PeerState
from wheelsched.raft.reads import ReadResult


class Role(StrEnum):
    FOLLOWER = "follower"
    PRECANDIDATE = "precandidate"
    CANDIDATE = "candidate"
    LEADER = "leader"


class Answer(StrEnum):
    """What became of a request; only `accepted` had any effect."""

    ACCEPTED = "accepted"
    DROPPED = "dropped"  # for now: a transfer is pending, a limit is reached, or the leader is no member
    REFUSED = "refused"  # as it stands: it does not fit
    NOT_LEADER = "not_leader"


class HardState(NamedTuple):
    """What a replica promised (thesis 3.8) and how far it knows the log to be committed. `vote`: node id, 0 for none."""

    term: int
    vote: int
    commit: int


@dataclass(frozen=True, slots=True)
class RestoredState:
    """A replica as its disk has it; all of `entries` are durable, those after `applied` will be handed out again.

    `entries` follow the log start (`snapshot_index`, `snapshot_term`), or begin later but not behind `applied` + 1, with `older_terms`
    naming the runs (first index, term) of those before them; see `Log`.
    """

    configuration: Configuration
    snapshot_index: int = 0
    snapshot_term: int = 0
    entries: Sequence[Entry] = ()
    older_terms: Sequence[tuple[int, int]] = ()
    term: int = 0
    vote: int = 0
    commit: int = 0
    applied: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """One batch of work; several may be in flight, `persisted` comes in order.

    One atomic write: `snapshot` (replaces everything), `entries` (an existing tail from the first one's index on is replaced) and
    `hard_state`. `now` may leave before it is durable, `after` only then. `committed` are durable here and to be applied in order.
    A snapshot may overtake `committed` entries of earlier Readies: those at or below what the state holds are skipped, changes too.
    `must_sync` False: nothing here was promised to anybody, a later sync may cover it.
    """

    number: int
    hard_state: HardState | None
    entries: tuple[Entry, ...]
    snapshot: InstallSnapshot | None
    now: tuple[AnyMessage, ...]
    after: tuple[AnyMessage, ...]
    committed: tuple[Entry, ...]
    reads: tuple[ReadResult, ...]
    must_sync: bool


@dataclass(frozen=True, slots=True)
class PeerStatus:
    state: PeerState
    match: int
    next: int
    paused: bool
    inflight: int
    pending_snapshot: int
    recent_active: bool


@dataclass(frozen=True, slots=True)
class Status:
    """A frozen look at a core. `leader`, `vote`, `transferee`: 0 for none. `progress`: by peer id, of a leader only.
    `lease_void`: the leader told somebody to campaign in this term, so no lease of this term may be trusted (thesis 6.4.1)."""

    node_id: int
    role: Role
    term: int
    vote: int
    leader: int
    commit: int
    applied: int
    durable: int
    first_index: int
    last_index: int
    last_term: int
    configuration: Configuration
    progress: dict[int, PeerStatus]
    transferee: int
    waiting_reads: int
    uncommitted_bytes: int
    lease_void: bool
    is_installing: bool
