"""The other nodes: connections to them, what is said on them, and whether their clocks agree with ours.

`Transport` carries Raft messages, forwarded calls and snapshots between nodes, by raft id. It implements `replica/peers.py` and knows
neither groups nor jobs: who wants what comes in is given to it as `Handlers`.

Promises. Nothing is accepted before both sides know each other: same cluster, same counts, common protocol, and where so configured a
certificate or a shared secret. A frame is handed on only if its checksum holds and every field has its type; the first that fails ends
the connection. A request ends in an answer, in `NotConnected` or `Busy` (nothing was done), or in `OutcomeUnknown`, never later than
its deadline by more than a sweep. A piece of a snapshot is handed on once, in order, and acknowledged after it was taken. Whatever
waits is bounded: Raft messages beyond the bound are dropped and counted, requests refused, snapshots held back.

Decided: one connection of our own to each peer, because a cut in one direction is invisible on a shared one; answers come back on the
connection of the question. A connection of its own for each snapshot, so that heartbeats do not queue behind state. msgpack arrays of
fixed shape, fields added at the end only: a node reads the release before its own and the one after.

Read `transport.py` first; `frames.py` is the format, `handshake.py` who may talk, `peer.py` what waits for one node, `snapshots.py` both
ends of a snapshot, `offsets.py` the clocks. `setup.py` makes a transport from settings.

Members: `identity.py` is who this node is and whom it met, `bootstrap.py` how nodes become a cluster and join one, `members.py` the table
of members, `membership.py` the driver that brings the groups to it (`planning.py` decides, purely; `reports.py` is what nodes tell each
other for that), `admin.py` the operator's side, `parts.py` puts them together. Promises: a raft id is one data directory for ever; a node
takes part only once its directory is on record; a change under way is in the log of the meta group, and whoever leads that goes on with it.
"""

from wheelsched.cluster.errors import Busy, NotConnected
from wheelsched.cluster.handshake import Identity
from wheelsched.cluster.offsets import ClockOffsets
from wheelsched.cluster.peer import PeerAddress
from wheelsched.cluster.setup import make_transport
from wheelsched.cluster.transport import Handlers, PeerStatistics, Tls, Transport, TransportOptions, TransportStatistics

__all__ = [
    "Busy", "ClockOffsets", "Handlers", "Identity", "NotConnected", "PeerAddress", "PeerStatistics", "Tls", "Transport",
    "TransportOptions", "TransportStatistics", "make_transport",
]  # fmt: skip
