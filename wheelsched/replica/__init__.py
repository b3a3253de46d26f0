"""Drives the groups of this node: commands become log entries, entries become durable, and only then are applied.

The only place where log, disk and state meet. `replica.py` holds the loop; `proposals.py` the bounded way in; `applying.py` what follows
once entries are durable. Today a group has one
member, so an entry is committed as soon as it is durable here; consensus among peers slips in between `append` and `apply` and
nothing above needs to know.

Promises: nothing is applied, and so answered, before its entry is durable (`never_lost`); state and applied index are one batch, so
that after a crash entries are applied again from where the state stands, each exactly once in the result (`applied_agrees`).
"""

from wheelsched.replica.applying import EffectSink
from wheelsched.replica.proposals import Batch, Proposer, ReplicaSet, propose_each
from wheelsched.replica.replica import Replica, Replicas

__all__ = ["Batch", "EffectSink", "Proposer", "Replica", "ReplicaSet", "Replicas", "propose_each"]
