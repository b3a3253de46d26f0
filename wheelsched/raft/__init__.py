"""Consensus: one replica of one group as a plain state machine that never waits.

A `Raft` takes ticks, messages and requests, and gives back `Ready` batches: what to write, to send before and after that is durable,
to apply and to answer. It knows no clock, disk, network or job; entries are bytes. The same inputs and the same source of chance give
the same outputs, byte for byte.

Promises. `one_leader_per_term`. `committed_is_never_cut`: an entry that was handed out to be applied stays, on every replica, for ever.
`acknowledged_is_durable`: votes, acknowledgements and requests for votes leave in `Ready.after` only. `applied_agrees`: every replica is
handed the same entries in the same order. A broken one raises `RaftFault`, and the node must stop.

Decided: pre-vote and check-quorum, joint consensus with learners, ReadIndex (Ongaro's thesis, chapters 3, 4, 6, 9 and 10). A
configuration takes effect when it is applied, so that cutting off an uncommitted change needs no undoing. Vote requests wait for the
disk as votes do. A group's log starts behind a snapshot that holds its configuration: a blank node that collected it from single
entries could elect itself on the way. Nothing is forwarded: who does not lead says so.

Read `raft.py` first, then `leadership.py`; `log.py`, `quorum.py`, `configuration.py` and `progress.py` stand alone.
"""

from wheelsched.raft.config import RaftConfig, ReadMode, TimeoutSource
from wheelsched.raft.configuration import (
    Change,
    ChangeKind,
    ConfChange,
    Configuration,
    Mode,
    decode_change,
    decode_configuration,
    encode_change,
    make_configuration,
)
from wheelsched.raft.faults import RaftFault
from wheelsched.raft.log import LogReader
from wheelsched.raft.messages import (
    AnyMessage,
    Append,
    AppendResponse,
    Entry,
    EntryKind,
    Heartbeat,
    HeartbeatResponse,
    InstallSnapshot,
    PreVoteRequest,
    PreVoteResponse,
    TimeoutNow,
    VoteRequest,
    VoteResponse,
    decode_message,
    encode_message,
    entry_crc,
    is_sound,
    make_entry,
)
from wheelsched.raft.progress import PeerState
from wheelsched.raft.raft import Raft
from wheelsched.raft.reads import ReadResult
from wheelsched.raft.ready import Answer, HardState, PeerStatus, Ready, RestoredState, Role, Status

__all__ = [
    "Answer",
    "AnyMessage",
    "Append",
    "AppendResponse",
    "Change",
    "ChangeKind",
    "ConfChange",
    "Configuration",
    "Entry",
    "EntryKind",
    "HardState",
    "Heartbeat",
    "HeartbeatResponse",
    "InstallSnapshot",
    "LogReader",
    "Mode",
    "PeerState",
    "PeerStatus",
    "PreVoteRequest",
    "PreVoteResponse",
    "Raft",
    "RaftConfig",
    "RaftFault",
    "ReadMode",
    "ReadResult",
    "Ready",
    "RestoredState",
    "Role",
    "Status",
    "TimeoutNow",
    "TimeoutSource",
    "VoteRequest",
    "VoteResponse",
    "decode_change",
    "decode_configuration",
    "decode_message",
    "encode_change",
    "encode_message",
    "entry_crc",
    "is_sound",
    "make_configuration",
    "make_entry",
]
