"""Drives the groups of this node: commands become log entries, entries become durable, and only then are applied.

The only place where log, disk and state meet. Two drivers with one face (`ReplicaSet`): `replica.py` for groups that have one member for
good, `raft_replicas.py` for groups replicated by Raft. What they share: `proposals.py`, the way in, and `applying.py`, what follows once
entries are durable. Around the second: `raft_member.py` is what is kept for each group, `offices.py` who leads and reads, `inboxes.py`
what waits for the log, `transfers.py` and `snapshots.py` whole states on their way, `compaction.py` how much log stays,
`membership.py` which changes are let in, `leaving.py` what becomes of a replica whose group went on without it, `digests.py` the check
that replicas hold the same rows, `loading.py` the start, `peers.py` what is asked of the transport.

Promises: nothing is applied, and so answered, before its entry is durable (`never_lost`); state and applied index are one batch, so
that after a crash entries are applied again from where the state stands, each exactly once in the result (`applied_agrees`); no vote and
no acknowledgement leaves before what it tells of is durable (`acknowledged_is_durable`); at most one node acts for a group at a time, as
far as clocks keep within their bounds (`one_live_lease`). `testing/cluster_sim.py` checks them under faults.

Read `raft_replicas.py` first: the order of one turn is there.
"""

from wheelsched.replica.applying import EffectSink
from wheelsched.replica.proposals import Batch, Proposer, ReplicaSet, propose_each
from wheelsched.replica.replica import Replica, Replicas

__all__ = ["Batch", "EffectSink", "Proposer", "Replica", "ReplicaSet", "Replicas", "propose_each"]
