"""The connections of a node to all others: one listening socket, one connection of our own to each peer, one more for each snapshot.

Raft messages and requests go out on our own connection only and their answers come back on it; so a cut in one direction is seen, where
a shared connection would look healthy to one side. Snapshots have connections of their own: behind a megabyte of state no heartbeat
waits. Every wait has a bound, and all bounds are looked at in one place, `_sweep`, by the injected clock.
"""

from __future__ import annotations

import asyncio
import heapq
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec
import structlog

from wheelsched.cluster.calls import Calls, problem_of
from wheelsched.cluster.errors import Busy, NotConnected
from wheelsched.cluster.frames import (
    BODY_BYTES_MAX,
    Cancel,
    ChunkAck,
    Confirm,
    FrameError,
    Hello,
    Kind,
    Ping,
    Pong,
    Refusal,
    Request,
    Response,
    Status,
    decode_body,
    decode_raft_batch,
    encode_body,
)
from wheelsched.cluster.handshake import (
    NONCE_BYTES,
    Identity,
    address_told,
    agreed_version,
    certificate_refusal,
    differing_settings,
    find_refusal,
    is_proof,
    make_hello,
    proof_of,
    secret_refusal,
)
from wheelsched.cluster.offsets import ClockOffsets
from wheelsched.cluster.peer import Call, Peer, PeerAddress
from wheelsched.cluster.snapshots import IncomingSnapshots, OutgoingSnapshot, Throttle
from wheelsched.cluster.wire import ConnectionEnded, Wire
from wheelsched.core.clock import Clock, Rng
from wheelsched.core.errors import OutcomeUnknown, PayloadTooLarge
from wheelsched.raft import AnyMessage, Append, is_sound
from wheelsched.runtime.clock import machine_wall_ms

log = structlog.get_logger(__name__)

# Method, number and the like, beside the body of a request or answer.
_ENVELOPE_BYTES: Final = 1024
REQUEST_BODY_BYTES_MAX: Final = BODY_BYTES_MAX - _ENVELOPE_BYTES
_PINGS_KEPT: Final = 16
_REFUSED_KEPT: Final = 100

OnRaft = Callable[[int, Sequence[tuple[int, AnyMessage]]], None]
OnRequest = Callable[[int, str, bytes], Awaitable[bytes]]
OnChunk = Callable[[int, int, int, int, bytes, bool], Awaitable[bool]]


async def _admit_all(_hello: Hello) -> str | None:
    return None


def _ignore(*_arguments: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Handlers:
    """Who takes what comes in. What they raise, refusals of `on_request` apart, stops the node: it is broken.

    `on_raft(sender, batch)`: (group, message) pairs of one frame, in the order sent; checked: each entry is what its proposer made.
    `on_request(sender, method, body)`: the answer's body; a `WheelschedError` reaches the caller as it is. Cancelled when the caller
    has gone or its time is over. `on_snapshot_chunk(sender, group, snapshot_id, sequence, data, last)`: see `IncomingSnapshots`.
    `on_snapshot_lost(sender, group, snapshot_id)`: no more of it will come. `on_unreachable(node)`: messages to it were lost.
    `on_not_connected(node, reason)`: an attempt to connect failed, each time; the bootstrap wants to know who refuses it and why.
    `admit(hello)`: called on both sides before anything else is exchanged; why not, or None. The place to make a peer's incarnation
    durable and to refuse another one.
    """

    on_raft: OnRaft
    on_request: OnRequest
    on_snapshot_chunk: OnChunk
    on_snapshot_lost: Callable[[int, int, int], None] = _ignore
    on_unreachable: Callable[[int], None] = _ignore
    on_not_connected: Callable[[int, str], None] = _ignore
    admit: Callable[[Hello], Awaitable[str | None]] = _admit_all


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """Times in milliseconds. A peer that is silent for `silence_ms` is taken for gone: ten pings, and longer than the slowest write of
    `HIGH_WATER_BYTES` on a link that is fit for this."""

    snapshot_bytes_per_s: int = 50 * 1024 * 1024
    snapshots_out_max: int = 2
    snapshots_in_max: int = 2
    ping_ms: int = 500
    silence_ms: int = 5_000
    connect_ms: int = 3_000
    greeting_ms: int = 5_000
    backoff_ms_min: int = 50
    backoff_ms_max: int = 2_000
    sweep_ms: int = 50
    greetings_max: int = 64
    calls_max: int = 10_000  # of one peer, under way here


@dataclass(frozen=True, slots=True)
class Tls:
    """Contexts for calling and for listening, both with our certificate and the cluster's authority."""

    caller: ssl.SSLContext
    listener: ssl.SSLContext


@dataclass(frozen=True, slots=True)
class PeerStatistics:
    """`connected`: ours to it; `accepted`: its to us. Bytes and messages count from the start of this process."""

    node: int
    name: str
    connected: bool
    accepted: bool
    connects: int
    queued_messages: int
    queued_bytes: int
    requests_waiting: int
    sent_bytes: int
    received_bytes: int
    sent_messages: int
    received_messages: int
    dropped_messages: int
    round_trip_ms: int | None
    clock_offset_ms: int | None
    last_refusal: str
    settings_differ: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TransportStatistics:
    port: int
    peers: tuple[PeerStatistics, ...]
    majority_offset_ms: int | None
    is_clock_off: bool
    frames_refused: int
    frames_unknown: int
    greetings_refused: int
    messages_unsound: int
    snapshots_sending: int
    snapshots_receiving: int


@dataclass(slots=True)
class _Link:
    """What the transport knows of a connection, beside the wire itself."""

    wire: Wire
    is_caller: bool
    peer: Peer | None = None
    hello: Hello | None = None  # the other side's
    bulk: OutgoingSnapshot | None = None
    calls: Calls | None = None  # the peer's requests that are under way here
    pings: dict[int, int] = field(default_factory=dict)  # number -> when sent, monotonic
    ping_due_mono_ms: int = 0
    address: str = ""  # of the other end


class Transport:
    """Implements `replica/peers.py`. Nodes are named by raft id.

    `run` owns everything; before it runs and after it ended nothing is connected, messages are dropped and requests refused."""

    def __init__(
        self, identity: Identity, listen: tuple[str, int], peers: Mapping[int, PeerAddress], handlers: Handlers,
        *, clock: Clock, rng: Rng, tls: Tls | None = None, options: TransportOptions = TransportOptions(),
    ) -> None:  # fmt: skip
        self.identity = identity
        self._listen = listen
        self._handlers = handlers
        self._clock = clock
        self._rng = rng
        self._tls = tls
        self._options = options
        self._peers: dict[int, Peer] = {}
        self._dialers: dict[int, asyncio.Task[None]] = {}
        self._links: dict[Wire, _Link] = {}
        self._deadlines: list[tuple[int, int, int]] = []  # (monotonic ms, node, number of the request)
        self._number = 0
        self._server: asyncio.Server | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._failure: asyncio.Future[None] | None = None
        self._outgoing: set[OutgoingSnapshot] = set()
        self._outgoing_slots = asyncio.Semaphore(options.snapshots_out_max)
        self._throttle = Throttle(options.snapshot_bytes_per_s, clock)
        self._incoming = IncomingSnapshots(
            handlers.on_snapshot_chunk, handlers.on_snapshot_lost,
            slots=options.snapshots_in_max, mono_ms=clock.mono_ms, start=self._start_task,
        )  # fmt: skip
        self.offsets = ClockOffsets(len(peers) + 1)
        self._counts = {"frames_refused": 0, "frames_unknown": 0, "greetings_refused": 0, "messages_unsound": 0}
        self._refused: dict[str, str] = {}  # who was refused last, and why
        # Nodes that were removed, by raft id: told so, that they stop calling.
        self.tombstones: Mapping[int, str] = {}
        self.removed_because = ""  # what a peer told this node, once it was removed
        self.offered_raft_id = 0  # what a blank node was told to call itself, by a cluster that has another id for its name
        self._set_peers(peers)

    # ---- life

    async def listen(self) -> int:
        """Bind the socket; its port. `run` does it if nobody did. Raises OSError, naming the address."""
        if self._server is None:
            host, port = self._listen
            loop = asyncio.get_running_loop()
            try:
                server = await loop.create_server(
                    self._accept, host, port, start_serving=False, ssl=self._tls.listener if self._tls else None,
                    ssl_handshake_timeout=self._options.greeting_ms / 1_000 if self._tls else None,
                )  # fmt: skip
            except OSError as error:
                raise OSError(error.errno, f"cannot listen for peers on {host}:{port}: {error.strerror}") from error
            if self.port:  # somebody else bound one meanwhile
                server.close()
            else:
                self._server = server
        return self.port

    @property
    def port(self) -> int:
        """Of the listening socket; 0 before `listen`."""
        return int(self._server.sockets[0].getsockname()[1]) if self._server is not None and self._server.sockets else 0

    async def run(self) -> None:
        """Connect and serve until cancelled; raises what a handler raised."""
        await self.listen()
        assert self._server is not None
        self._failure = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.TaskGroup() as self._tasks:
                try:
                    self._dial_new_peers()
                    self._start_task(self._sweep(), "peer sweep")
                    await self._server.start_serving()
                    if self._tls is None and not self.identity.secret:
                        log.info("peers_not_authenticated", port=self.port, advice="set cluster.tls, or cluster.secret_file")
                    await self._failure
                finally:
                    # In one go, and before the tasks are cancelled: nothing may start a task in a group that ends.
                    self._stop()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group
        finally:
            # An aborted connection ends in the next turn of the loop; its socket is not left to the garbage collector.
            for wire in list(self._links):
                await wire.wait_ended()

    def _stop(self) -> None:
        self._tasks = None
        self._dialers.clear()
        if self._server is not None:
            self._server.close()
            self._server = None
        for wire in list(self._links):
            wire.abort("this node stops")
        for peer in self._peers.values():
            self._end_calls(peer, "this node stops")

    def adopt(self, cluster_id: bytes) -> None:
        """This node belongs to a cluster from now on: every connection is made anew, and says so."""
        self.identity = replace(self.identity, cluster_id=cluster_id)
        for wire in list(self._links):
            wire.close("this node joined its cluster")

    def take_raft_id(self, raft_id: int) -> None:
        """A blank node calls itself so from now on."""
        assert not self.identity.cluster_id and raft_id not in self._peers
        self.identity = replace(self.identity, raft_id=raft_id)
        self.offered_raft_id = 0
        for wire in list(self._links):
            wire.close("this node has another raft id")

    def set_peers(self, peers: Mapping[int, PeerAddress]) -> None:
        """All other nodes, from now on; connections to those that left or moved end."""
        self._set_peers(peers)
        self._dial_new_peers()

    def _set_peers(self, peers: Mapping[int, PeerAddress]) -> None:
        assert self.identity.raft_id not in peers and 0 not in peers
        self.offsets.node_count = len(peers) + 1
        for node, peer in list(self._peers.items()):
            if peers.get(node) != peer.address:
                del self._peers[node]
                self._forget(peer)
        for node, address in sorted(peers.items()):
            if node not in self._peers:
                self._peers[node] = Peer(node, address)

    def _forget(self, peer: Peer) -> None:
        self.offsets.forget(peer.node)
        if dialer := self._dialers.pop(peer.node, None):
            dialer.cancel()
        for link in list(self._links.values()):
            if link.peer is peer:
                link.wire.abort("the node is no peer any more")
        for snapshot in list(self._outgoing):
            if snapshot.node == peer.node:
                snapshot.result.cancel()
        self._end_calls(peer, f"{peer.address.name} is no peer any more")

    def _dial_new_peers(self) -> None:
        if self._tasks is not None:
            for node, peer in self._peers.items():
                if node not in self._dialers:
                    self._dialers[node] = self._start_task(self._keep_connected(peer), f"peer {peer.address.name}")

    def _start_task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        assert self._tasks is not None
        task = self._tasks.create_task(work, name=name)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        # The group has taken note and ends; a task that is started from now on would be one that nobody cancels.
        if not task.cancelled() and task.exception() is not None:
            self._stop()

    def _fail(self, error: BaseException) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    # ---- what the node asks for

    def send(self, node: int, messages: Sequence[tuple[int, AnyMessage]]) -> None:
        """Queue (group, message) pairs; all of a turn leave in one write. Dropped, and counted, while there is no connection."""
        peer = self._peers.get(node)
        if peer is None:
            return
        if peer.wire is None or not peer.has_cluster:
            peer.dropped_messages += len(messages)
            return
        self._count_dropped(peer, peer.add_messages(messages))
        peer.wire.wake()

    def send_snapshot(self, node: int, group: int, snapshot_id: int, chunks: AsyncIterator[bytes]) -> asyncio.Future[bool]:
        """Send a snapshot in pieces of at most 1 MiB; True: the other side installed all of it. Cancel the result to give up.

        What `chunks` raises is raised by the result. `chunks` is closed in every case."""
        result: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        peer = self._peers.get(node)
        if peer is None or self._tasks is None:
            result.set_result(False)
            return result
        snapshot = OutgoingSnapshot(
            node, group, snapshot_id, chunks, stream=self._rng.getrandbits(63), dial=lambda attempt: self._dial_bulk(snapshot, attempt),
            throttle=self._throttle, slots=self._outgoing_slots, mono_ms=self._clock.mono_ms, result=result,
        )  # fmt: skip
        self._outgoing.add(snapshot)
        self._start_task(self._run_snapshot(snapshot), f"snapshot {snapshot_id} of group {group} to {peer.address.name}")
        return result

    async def _run_snapshot(self, snapshot: OutgoingSnapshot) -> None:
        try:
            await snapshot.run()
        finally:
            self._outgoing.discard(snapshot)

    async def request(self, node: int, method: str, body: bytes, timeout_ms: int) -> bytes:
        """Ask another node; its answer. Raises `NotConnected` or `Busy` where nothing was done, `OutcomeUnknown` where the question
        was sent and no answer came, and what the other side's handler raised. Cancelling it cancels the handler, too."""
        peer = self._peers.get(node)
        if peer is None:
            raise NotConnected(f"there is no node of raft id {node} in this cluster", retry_after_s=1)
        if peer.wire is None:
            why = f" ({peer.last_refusal})" if peer.last_refusal else ""
            raise NotConnected(f"{peer.address.name} is not connected{why}", retry_after_s=1)
        if len(body) + len(method) > REQUEST_BODY_BYTES_MAX:
            raise PayloadTooLarge(f"{method} to {peer.address.name} has {len(body):,} bytes, above {REQUEST_BODY_BYTES_MAX:,}; split it")
        self._number += 1
        number, deadline = self._number, self._clock.mono_ms() + timeout_ms
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        call = Call(number, method, deadline, answer, encode_body(Request(number, method, timeout_ms, body)))
        if not peer.add_request(call):
            raise Busy(f"too much waits to be sent to {peer.address.name}; repeat in a second", retry_after_s=1)
        heapq.heappush(self._deadlines, (deadline, node, number))
        peer.wire.wake()
        try:
            return await answer
        except asyncio.CancelledError:
            self._cancel(peer, call)
            raise
        finally:
            peer.calls.pop(number, None)

    async def wait_connected(self, node: int) -> None:
        """Return when our connection to the node stands. Raises `NotConnected` for a node that is no peer."""
        peer = self._peers.get(node)
        if peer is None:
            raise NotConnected(f"there is no node of raft id {node} in this cluster")
        await peer.connected.wait()

    def is_connected(self, node: int) -> bool:
        peer = self._peers.get(node)
        return peer is not None and peer.wire is not None

    def statistics(self) -> TransportStatistics:
        wall_ms, mono_ms = self._clock.wall_ms(), self._clock.mono_ms()
        return TransportStatistics(
            port=self.port,
            peers=tuple(self._statistics_of(peer, wall_ms, mono_ms) for _, peer in sorted(self._peers.items())),
            majority_offset_ms=self.offsets.majority_offset_ms(wall_ms=wall_ms, mono_ms=mono_ms),
            is_clock_off=self.offsets.is_off(wall_ms=wall_ms, mono_ms=mono_ms),
            snapshots_sending=len(self._outgoing),
            snapshots_receiving=self._incoming.active_count,
            **self._counts,
        )

    def _statistics_of(self, peer: Peer, wall_ms: int, mono_ms: int) -> PeerStatistics:
        wires = [link.wire for link in self._links.values() if link.peer is peer]
        return PeerStatistics(
            node=peer.node, name=peer.address.name, connected=peer.wire is not None, accepted=peer.accepted is not None,
            connects=peer.connects, queued_messages=peer.queued_messages, queued_bytes=peer.queued_bytes,
            requests_waiting=len(peer.calls),
            sent_bytes=peer.ended_sent_bytes + sum(wire.sent_bytes for wire in wires),
            received_bytes=peer.ended_received_bytes + sum(wire.received_bytes for wire in wires),
            sent_messages=peer.sent_messages, received_messages=peer.received_messages, dropped_messages=peer.dropped_messages,
            round_trip_ms=self.offsets.round_trip_ms(peer.node),
            clock_offset_ms=self.offsets.offset_ms(peer.node, wall_ms=wall_ms, mono_ms=mono_ms),
            last_refusal=peer.last_refusal, settings_differ=peer.settings_differ,
        )  # fmt: skip

    # ---- calling

    async def _keep_connected(self, peer: Peer) -> None:
        attempt = 0
        while True:
            wire = await self._dial(peer)
            if wire is not None:
                attempt = 0
                await wire.wait_ended()
            attempt += 1
            await self._back_off(attempt)

    async def _back_off(self, attempt: int) -> None:
        """Wait before the next attempt, twice as long each time, up to two seconds and half of that by chance: nodes that lost each
        other at the same moment do not come back at the same moment."""
        longest_ms = min(self._options.backoff_ms_max, self._options.backoff_ms_min << min(attempt - 1, 16))
        wait_ms = longest_ms // 2 + int(self._rng.random() * (longest_ms / 2))
        await self._clock.sleep_until(self._clock.mono_ms() + wait_ms)

    async def _dial_bulk(self, snapshot: OutgoingSnapshot, attempt: int) -> Wire | None:
        if attempt:
            await self._back_off(attempt)
        peer = self._peers.get(snapshot.node)
        return None if peer is None else await self._dial(peer, snapshot)

    async def _dial(self, peer: Peer, bulk: OutgoingSnapshot | None = None) -> Wire | None:
        """Connect and greet; None where that fails, said once for each reason."""
        host, port = peer.where()
        wire = self._make_wire()
        link = self._links[wire] = _Link(wire, is_caller=True, peer=peer, bulk=bulk)
        try:
            async with asyncio.timeout(self._options.connect_ms / 1_000):
                await asyncio.get_running_loop().create_connection(
                    lambda: wire, host, port,
                    ssl=self._tls.caller if self._tls else None, server_hostname="" if self._tls else None,
                )  # fmt: skip
            await self._greet_as_caller(link)
        except (OSError, ssl.SSLError, ConnectionEnded, FrameError, TimeoutError) as error:
            why = str(error) or f"no connection within {self._options.connect_ms:,} ms"
            self._end_dial(wire, why)
            peer.not_there()
            peer.last_refusal = why
            if why != peer.refusals.get((host, port)):
                peer.refusals[host, port] = why
                log.warning("peer_not_connected", peer=peer.address.name, host=host, port=port, reason=why)
            self._handlers.on_not_connected(peer.node, why)
            return None
        except asyncio.CancelledError:
            self._end_dial(wire, "this node stops")
            raise
        return wire

    def _end_dial(self, wire: Wire, why: str) -> None:
        wire.abort(why)
        if not wire.is_made:  # else `_on_end` hears of it
            self._links.pop(wire, None)

    async def _greet_as_caller(self, link: _Link) -> None:
        wire, peer = link.wire, link.peer
        assert peer is not None
        mine = self._hello(expects=peer.node, bulk=link.bulk is not None)
        wire.version = mine.protocol_max
        wire.write(Kind.HELLO, encode_body(mine))
        theirs = decode_body(Kind.WELCOME, await self._next(wire, Kind.WELCOME), Hello)
        refusal = find_refusal(mine, theirs) or self._stranger(theirs, peer)
        if refusal is None and not is_proof(theirs.proof, self._proof(mine, theirs, by_caller=False)):
            refusal = secret_refusal(theirs)
        await self._admit(link, theirs, refusal)
        wire.write(Kind.CONFIRM, encode_body(Confirm(self._proof(mine, theirs, by_caller=True))))
        await self._next(wire, Kind.CONFIRM)
        _check_open(wire)
        self._note_settings(peer, mine, theirs)
        version = agreed_version(mine, theirs)
        assert version is not None
        if link.bulk is None:
            peer.wire, peer.has_cluster = wire, bool(mine.cluster_id and theirs.cluster_id)
            peer.connects += 1
            peer.last_refusal = ""
            peer.refusals.clear()
            peer.connected.set()
            log.info("peer_connected", peer=theirs.name, release=theirs.release, protocol=version)
        wire.talk(version, BODY_BYTES_MAX, self._on_answer, self._fill)

    # ---- listening

    def _accept(self) -> Wire:
        return Wire(mono_ms=self._clock.mono_ms, on_fault=self._fail, on_end=self._on_end, on_made=self._on_made)

    def _on_made(self, wire: Wire) -> None:
        greeting = sum(not (link.is_caller or link.wire.is_talking) for link in self._links.values())
        if self._tasks is None or greeting >= self._options.greetings_max:
            self._counts["greetings_refused"] += 1
            wire.abort("too many connections that have not said who they are")
            return
        link = self._links[wire] = _Link(wire, is_caller=False, address=str((wire.extra("peername") or ("unknown",))[0]))
        self._start_task(self._greet_as_listener(link), "peer greeting")

    async def _greet_as_listener(self, link: _Link) -> None:
        wire = link.wire
        try:
            await self._exchange_as_listener(link)
        except (ConnectionEnded, FrameError) as error:
            wire.abort(str(error))
            self._counts["greetings_refused"] += 1
            who = link.hello.name if link.hello is not None else ""
            # A peer comes back every other second; each reason is said once. Who says nothing at all is a probe of the port.
            if wire.received_bytes and self._refused.get(who) != str(error):
                self._refused = {**(self._refused if len(self._refused) < _REFUSED_KEPT else {}), who: str(error)}
                log.warning("peer_refused", peer=who or "unknown", address=link.address, reason=str(error))

    async def _exchange_as_listener(self, link: _Link) -> None:
        wire = link.wire
        theirs = link.hello = decode_body(Kind.HELLO, await self._next(wire, Kind.HELLO), Hello)
        mine = self._hello(expects=theirs.raft_id, bulk=theirs.bulk)
        wire.version = mine.protocol_max
        peer = self._peers.get(theirs.raft_id)
        await self._reject(wire, find_refusal(mine, theirs) or self._stranger(theirs, peer))
        assert peer is not None
        mine = msgspec.structs.replace(mine, proof=self._proof(theirs, mine, by_caller=False))
        wire.write(Kind.WELCOME, encode_body(mine))
        confirm = decode_body(Kind.CONFIRM, await self._next(wire, Kind.CONFIRM), Confirm)
        proven = is_proof(confirm.proof, self._proof(theirs, mine, by_caller=True))
        await self._admit(link, theirs, None if proven else secret_refusal(theirs))
        _check_open(wire)
        self._refused.pop(theirs.name, None)
        wire.write(Kind.CONFIRM, encode_body(Confirm()))
        self._note_settings(peer, mine, theirs)
        link.peer = peer
        link.calls = Calls(
            peer.node, wire, self._handlers.on_request, self._start_task, self._clock.mono_ms, count_max=self._options.calls_max,
        )  # fmt: skip
        if not theirs.bulk:
            # One that is there already is its predecessor, whose end the network kept from us.
            if peer.accepted is not None:
                peer.accepted.abort("the node connected anew")
            peer.accepted = wire
            if theirs.cluster_id:
                peer.told = address_told(theirs)
        version = agreed_version(mine, theirs)
        assert version is not None
        wire.talk(version, BODY_BYTES_MAX, self._on_call, _ignore)

    # ---- greeting, both sides

    def _hello(self, *, expects: int, bulk: bool) -> Hello:
        nonce = self._rng.getrandbits(8 * NONCE_BYTES).to_bytes(NONCE_BYTES, "big")
        return make_hello(self.identity, expects=expects, nonce=nonce, bulk=bulk)

    def _proof(self, caller: Hello, listener: Hello, *, by_caller: bool) -> bytes:
        return proof_of(self.identity.secret, caller=caller, listener=listener, by_caller=by_caller)

    def _stranger(self, theirs: Hello, peer: Peer | None) -> Refusal | None:
        if peer is None or self._peers.get(theirs.raft_id) is not peer or peer.address.name != theirs.name:
            namesakes = [node for node, other in self._peers.items() if other.address.name == theirs.name]
            # A blank node knows no other id than that of its settings, be it the one that went with its data the time before.
            if theirs.raft_id in self.tombstones and (theirs.cluster_id or not namesakes):
                return Refusal(
                    "removed", f"{theirs.name} was removed from the cluster; stop it and delete its data directory, "
                    f"or add it anew with `wheelsched cluster add {theirs.name}` and an empty one",
                )  # fmt: skip
            for node in namesakes:
                return Refusal(
                    "other-raft-id",
                    f"{theirs.name} has raft id {node} in this cluster and not {theirs.raft_id}: its place was given anew", node,
                )  # fmt: skip
            return Refusal(
                "not-a-member", f"{theirs.name} (raft id {theirs.raft_id}) is not known to {self.identity.name}; "
                "add it to cluster.nodes on every node, or with `wheelsched cluster add`",
            )  # fmt: skip
        return None

    async def _admit(self, link: _Link, theirs: Hello, refusal: Refusal | None) -> None:
        """The last checks, the slow ones among them. Raises `ConnectionEnded` where one fails."""
        link.hello = theirs
        if refusal is None and self._tls is not None:
            refusal = certificate_refusal(theirs, link.wire.extra("peercert"))
        if refusal is None and (reason := await self._handlers.admit(theirs)) is not None:
            refusal = Refusal("not-admitted", reason)
        # Looked at again: the list of peers may have changed meanwhile.
        refusal = refusal or self._stranger(theirs, self._peers.get(theirs.raft_id))
        await self._reject(link.wire, refusal)

    async def _reject(self, wire: Wire, refusal: Refusal | None) -> None:
        if refusal is not None:
            wire.write(Kind.REFUSAL, encode_body(refusal))
            wire.close(refusal.reason)
            raise ConnectionEnded(refusal.reason)

    async def _next(self, wire: Wire, kind: Kind) -> bytes:
        found, body = await wire.next_frame()
        if found == Kind.REFUSAL:
            refusal = decode_body(Kind.REFUSAL, body, Refusal)
            if refusal.code == "removed" and self.identity.cluster_id:
                self.removed_because = refusal.reason
            elif refusal.code == "other-raft-id" and not self.identity.cluster_id and refusal.raft_id not in self._peers:
                self.offered_raft_id = refusal.raft_id
            raise ConnectionEnded(f"refused by the other side: {refusal.reason}")
        if found != kind:
            raise FrameError(f"a frame of kind {found} where a {kind.name.lower()} was due")
        return body

    def _note_settings(self, peer: Peer, mine: Hello, theirs: Hello) -> None:
        differing = differing_settings(mine, theirs)
        if differing and differing != peer.settings_differ:
            log.warning("peer_settings_differ", peer=theirs.name, differing=differing)
        peer.settings_differ = differing

    # ---- connections

    def _make_wire(self) -> Wire:
        return Wire(mono_ms=self._clock.mono_ms, on_fault=self._fail, on_end=self._on_end)

    def _on_end(self, wire: Wire) -> None:
        link = self._links.pop(wire, None)
        if wire.is_refused:
            self._counts["frames_refused"] += 1
            log.warning("peer_frame_refused", peer=_name_of(link), reason=wire.ended_because)
        if link is None or link.peer is None:
            return
        peer = link.peer
        peer.ended_sent_bytes += wire.sent_bytes
        peer.ended_received_bytes += wire.received_bytes
        if link.calls is not None:
            link.calls.end()
        if link.bulk is not None:
            link.bulk.on_end()
        if peer.accepted is wire:
            peer.accepted = None
        if peer.wire is wire:
            peer.wire, peer.has_cluster = None, False
            peer.connected.clear()
            log.info("peer_lost", peer=peer.address.name, reason=wire.ended_because)
            peer.dropped_messages += peer.drop_messages()
            self._end_calls(peer, wire.ended_because)
            self._tell_unreachable(peer)

    def _count_dropped(self, peer: Peer, count: int) -> None:
        if count:
            peer.dropped_messages += count
            self._tell_unreachable(peer)

    def _tell_unreachable(self, peer: Peer) -> None:
        if self._tasks is None:
            return
        try:
            self._handlers.on_unreachable(peer.node)
        except Exception as error:
            self._fail(error)

    def _end_calls(self, peer: Peer, because: str) -> None:
        for call in list(peer.calls.values()):
            if call.answer.done():
                continue
            if call.frame:
                call.answer.set_exception(NotConnected(f"{peer.address.name} is not connected: {because}", retry_after_s=1))
            else:
                call.answer.set_exception(
                    OutcomeUnknown(f"{peer.address.name} did not answer {call.method}: {because}; repeat it with the same key")
                )
        peer.drop_requests()

    def _fill(self, wire: Wire) -> None:
        link = self._links.get(wire)
        if link is not None and link.peer is not None and link.peer.wire is wire:
            self._count_dropped(link.peer, link.peer.fill(wire))

    # ---- frames

    def _on_answer(self, wire: Wire, kind: int, body: memoryview) -> None:
        """On a connection of ours."""
        link = self._links[wire]
        match kind:
            case Kind.RESPONSE:
                self._on_response(link, decode_body(Kind.RESPONSE, body, Response))
            case Kind.PONG:
                self._on_pong(link, decode_body(Kind.PONG, body, Pong))
            case Kind.CHUNK_ACK if link.bulk is not None:
                link.bulk.on_ack(decode_body(Kind.CHUNK_ACK, body, ChunkAck))
            case _:
                self._counts["frames_unknown"] += 1

    def _on_call(self, wire: Wire, kind: int, body: memoryview) -> None:
        """On a connection of a peer."""
        link = self._links[wire]
        assert link.peer is not None and link.hello is not None and link.calls is not None
        match kind:
            case Kind.RAFT:
                self._on_raft(link.peer, link.hello, body)
            case Kind.PING:
                ping = decode_body(Kind.PING, body, Ping)
                # Answered within the turn: receipt and answer are one instant.
                now_ms = machine_wall_ms(self._clock)
                wire.write(Kind.PONG, encode_body(Pong(ping.number, ping.sent_at_ms, now_ms, now_ms)))
            case Kind.REQUEST:
                link.calls.on_request(decode_body(Kind.REQUEST, body, Request))
            case Kind.CANCEL:
                link.calls.cancel(decode_body(Kind.CANCEL, body, Cancel).number)
            case Kind.CHUNK | Kind.ABANDON:
                self._check_member(link.hello)
                self._incoming.on_frame(wire, link.peer.node, kind, body)
            case _:
                self._counts["frames_unknown"] += 1

    def _check_member(self, hello: Hello) -> None:
        if not (hello.cluster_id and self.identity.cluster_id):
            raise FrameError(f"{hello.name} sends state before both belong to the cluster")

    def _on_raft(self, peer: Peer, hello: Hello, body: memoryview) -> None:
        self._check_member(hello)
        batch = decode_raft_batch(body)
        unsound = 0
        for group, message in batch:
            if message.group != group or message.sender != peer.node or message.to != self.identity.raft_id:
                raise FrameError(
                    f"a message of group {message.group} from {message.sender} to {message.to} came as group {group} from {peer.node}"
                )
            if isinstance(message, Append):
                for entry in message.entries:
                    if not is_sound(group, entry):
                        # The frame is whole, so it is the other side's memory or disk: not one entry of this goes into a log.
                        log.error("entry_unsound", peer=peer.address.name, group=group, index=entry.index, term=entry.term)
                        unsound += 1
                        break
        peer.received_messages += len(batch)
        if unsound:
            self._counts["messages_unsound"] += unsound
            batch = [pair for pair in batch if not _is_unsound(*pair)]
        if batch:
            self._handlers.on_raft(peer.node, batch)

    def _on_response(self, link: _Link, response: Response) -> None:
        assert link.peer is not None
        call = link.peer.calls.get(response.number)
        if call is None or call.answer.done():
            return  # it comes too late
        if response.status is Status.OK:
            call.answer.set_result(response.body)
        else:
            call.answer.set_exception(problem_of(response, link.peer.address.name))

    def _on_pong(self, link: _Link, pong: Pong) -> None:
        sent_mono_ms = link.pings.pop(pong.number, None)
        if sent_mono_ms is not None and link.bulk is None and link.peer is not None:
            self.offsets.add(
                link.peer.node, sent_mono_ms=sent_mono_ms, received_at_ms=pong.received_at_ms,
                answered_at_ms=pong.answered_at_ms, back_mono_ms=self._clock.mono_ms(),
            )  # fmt: skip

    def _cancel(self, peer: Peer, call: Call) -> None:
        """Nobody waits any more: a claim must not be made for a caller that has gone."""
        if not call.frame and peer.wire is not None:
            peer.wire.write(Kind.CANCEL, encode_body(Cancel(call.number)))

    # ---- time

    async def _sweep(self) -> None:
        """Pings, and everything whose time is over."""
        due_mono_ms = self._clock.mono_ms()
        while True:
            due_mono_ms += self._options.sweep_ms
            await self._clock.sleep_until(due_mono_ms)
            now_mono_ms = self._clock.mono_ms()
            if now_mono_ms - due_mono_ms > self._options.silence_ms // 5:
                # It was us who slept, a stopped process or a long turn; what the peers sent meanwhile is still to be read.
                for wire in self._links:
                    wire.heard_mono_ms = wire.made_mono_ms = now_mono_ms
            due_mono_ms = now_mono_ms
            for link in list(self._links.values()):
                self._sweep_link(link, now_mono_ms)
            self._sweep_calls(now_mono_ms)
            self._incoming.sweep(now_mono_ms)
            for snapshot in list(self._outgoing):
                snapshot.sweep(now_mono_ms)

    def _sweep_link(self, link: _Link, now_mono_ms: int) -> None:
        wire = link.wire
        if not wire.is_talking:
            if now_mono_ms - wire.made_mono_ms > self._options.greeting_ms:
                wire.abort(f"no greeting within {self._options.greeting_ms:,} ms")
            return
        if (silent_ms := now_mono_ms - wire.heard_mono_ms) > self._options.silence_ms:
            wire.abort(f"silent for {silent_ms:,} ms")
            return
        if link.calls is not None:
            link.calls.sweep(now_mono_ms)
        if link.is_caller and now_mono_ms >= link.ping_due_mono_ms:
            link.ping_due_mono_ms = now_mono_ms + self._options.ping_ms
            self._number += 1
            link.pings[self._number] = now_mono_ms
            if len(link.pings) > _PINGS_KEPT:
                del link.pings[next(iter(link.pings))]
            wire.write(Kind.PING, encode_body(Ping(self._number, machine_wall_ms(self._clock))))

    def _sweep_calls(self, now_mono_ms: int) -> None:
        while self._deadlines and self._deadlines[0][0] <= now_mono_ms:
            _, node, number = heapq.heappop(self._deadlines)
            peer = self._peers.get(node)
            call = peer.calls.get(number) if peer is not None else None
            if peer is None or call is None or call.answer.done():
                continue
            if call.frame:
                call.answer.set_exception(NotConnected(f"{call.method} could not be sent to {peer.address.name} in time", retry_after_s=1))
            else:
                self._cancel(peer, call)
                call.answer.set_exception(
                    OutcomeUnknown(f"{peer.address.name} did not answer {call.method} in time; repeat it with the same key")
                )


def _check_open(wire: Wire) -> None:
    """What ended while something was awaited must not be taken for connected: nobody would be told of its end again."""
    if not wire.is_open:
        raise ConnectionEnded(wire.ended_because)


def _is_unsound(group: int, message: AnyMessage) -> bool:
    return isinstance(message, Append) and not all(is_sound(group, entry) for entry in message.entries)


def _name_of(link: _Link | None) -> str:
    if link is None:
        return "unknown"
    if link.peer is not None:
        return link.peer.address.name
    return link.hello.name if link.hello is not None else "unknown"
