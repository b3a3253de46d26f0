"""Nodes that talk over real sockets of the loopback: who is let in, what gets through, what is lost and how that is told."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from wheelsched.cluster import Busy, Handlers, Identity, NotConnected, PeerAddress, Tls, Transport, TransportOptions
from wheelsched.cluster import peer as peer_module
from wheelsched.cluster.frames import (
    BODY_BYTES_MAX,
    Abandon,
    Confirm,
    FrameReader,
    Hello,
    Kind,
    Refusal,
    Request,
    decode_body,
    encode_body,
    encode_frame,
    encode_raft_batch,
)
from wheelsched.cluster.handshake import find_refusal, make_hello, proof_of
from wheelsched.cluster.peer import Call, Peer, message_bytes
from wheelsched.cluster.setup import make_transport, read_secret, read_tls
from wheelsched.cluster.snapshots import RECEIVER_PATIENCE_MS, SENDER_PATIENCE_MS, WINDOW, Throttle
from wheelsched.cluster.transport import REQUEST_BODY_BYTES_MAX
from wheelsched.core.clock import Clock
from wheelsched.core.errors import NotFound, OutcomeUnknown, PayloadTooLarge, Unavailable, WheelschedError
from wheelsched.core.invariants import InvariantBroken, invariant
from wheelsched.core.settings import NodeAddress, Settings, TlsSettings, raft_id_of
from wheelsched.raft import AnyMessage, Append, Entry, EntryKind, Heartbeat, make_entry
from wheelsched.replica.peers import Peers
from wheelsched.runtime.clock import RealClock, VirtualClock

START_MS = 1_767_413_106_007
CLUSTER_ID = b"c" * 16
QUICK = TransportOptions(backoff_ms_min=1, backoff_ms_max=4, sweep_ms=5, ping_ms=20)


class Node:
    """A transport, and everything that came in, each in a queue of its own to wait for."""

    def __init__(
        self, number: int, *, clock: Clock | None = None, options: TransportOptions = QUICK, tls: Tls | None = None, **identity: Any
    ) -> None:
        self.number = number
        self.name = f"n{number}"
        self.batches: asyncio.Queue[tuple[int, list[tuple[int, AnyMessage]]]] = asyncio.Queue()
        self.unreachable: asyncio.Queue[int] = asyncio.Queue()
        self.failures: asyncio.Queue[str] = asyncio.Queue()
        self.pieces: asyncio.Queue[tuple[int, int, int, int, bytes, bool]] = asyncio.Queue()
        self.lost: asyncio.Queue[tuple[int, int, int]] = asyncio.Queue()
        self.hellos: list[Hello] = []
        self.answer: Callable[[int, str, bytes], Awaitable[bytes]] = self._echo
        self.write_piece: Callable[[int, bytes, bool], Awaitable[bool]] = self._good
        self.refuse_hello: str | None = None
        fields = {
            "cluster_name": "test", "name": self.name, "raft_id": number, "incarnation": bytes([number]) * 16, "group_count": 32,
            "partition_count": 1024, "cluster_id": CLUSTER_ID, "release": "0.1",
        }  # fmt: skip
        handlers = Handlers(
            on_raft=lambda sender, batch: self.batches.put_nowait((sender, list(batch))),
            on_request=lambda *arguments: self.answer(*arguments), on_snapshot_chunk=self._on_piece,
            on_snapshot_lost=lambda *arguments: self.lost.put_nowait(arguments),
            on_unreachable=self.unreachable.put_nowait,
            on_not_connected=lambda _, reason: self.failures.put_nowait(reason), admit=self._admit,
        )  # fmt: skip
        self.transport = Transport(
            Identity(**{**fields, **identity}), ("127.0.0.1", 0), {}, handlers,
            clock=clock or RealClock(), rng=random.Random(number), tls=tls, options=options,
        )  # fmt: skip
        self.peers: dict[int, PeerAddress] = {}

    async def _echo(self, _sender: int, _method: str, body: bytes) -> bytes:
        return body

    async def _good(self, _sequence: int, _data: bytes, _last: bool) -> bool:
        return True

    async def _on_piece(self, sender: int, group: int, snapshot_id: int, sequence: int, data: bytes, last: bool) -> bool:
        self.pieces.put_nowait((sender, group, snapshot_id, sequence, data, last))
        return await self.write_piece(sequence, data, last)

    async def _admit(self, hello: Hello) -> str | None:
        self.hellos.append(hello)
        return self.refuse_hello

    def knows(self, other: Node, *, port: int | None = None) -> None:
        self.peers[other.number] = PeerAddress(other.name, "127.0.0.1", port or other.transport.port)
        self.transport.set_peers(self.peers)

    def statistics_of(self, other: Node) -> Any:
        return next(peer for peer in self.transport.statistics().peers if peer.node == other.number)


@contextlib.asynccontextmanager
async def running(*nodes: Node, meet: bool = True) -> AsyncIterator[None]:
    """Run the nodes; with `meet`, each knows and has connected to each."""
    async with asyncio.timeout(30):
        tasks = []
        try:
            for node in nodes:
                await node.transport.listen()
            for node in nodes:
                tasks.append(asyncio.create_task(node.transport.run()))
            await asyncio.sleep(0)
            if meet:
                for node in nodes:
                    for other in nodes:
                        if other is not node:
                            node.knows(other)
                for node in nodes:
                    for other in nodes:
                        if other is not node:
                            await node.transport.wait_connected(other.number)
            yield
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with contextlib.suppress(asyncio.CancelledError):
                    await task


class Proxy:
    """Between one node and another, one way of connecting: it can be cut, held and made to garble."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.port = 0
        self.is_cut = False
        self.garble: Callable[[bytes], bytes] = lambda data: data
        self.count_bytes = 0
        self.cut_after_bytes: int | None = None
        self.flows = asyncio.Event()
        self.flows.set()
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        self.is_cut = True
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def mend(self) -> None:
        self.is_cut, self.cut_after_bytes = False, None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_cut:
            writer.transport.abort()
            return
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, there_writer]
        await asyncio.gather(self._pump(reader, there_writer, forth=True), self._pump(there_reader, writer, forth=False))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, forth: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                await self.flows.wait()
                if forth:
                    data = self.garble(data)
                    self.count_bytes += len(data)
                    if self.cut_after_bytes is not None and self.count_bytes > self.cut_after_bytes:
                        self.cut()
                        return
                writer.write(data)
                await writer.drain()
            writer.close()


def beats(sender: int, to: int, *groups: int) -> list[tuple[int, AnyMessage]]:
    return [(group, Heartbeat(group, sender, to, 1)) for group in groups]


def an_append(sender: int, to: int, *, group: int = 0, index: int = 1, payload: bytes = b"x") -> tuple[int, AnyMessage]:
    return group, Append(group, sender, to, 1, index - 1, 1, (make_entry(group, index, 1, EntryKind.COMMANDS, payload),), 0)


# ---- messages


async def test_messages_of_all_groups_of_one_turn_arrive_together_and_in_order() -> None:
    one, two = Node(1), Node(2)
    async with running(one, two):
        peers: Peers = one.transport  # it is what replica/ asks for
        peers.send(2, beats(1, 2, 0, 1, 2))
        peers.send(2, [an_append(1, 2, group=5)])
        peers.send(2, beats(1, 2, 3))
        sender, batch = await two.batches.get()
        assert sender == 1
        assert batch == [*beats(1, 2, 0, 1, 2), an_append(1, 2, group=5), *beats(1, 2, 3)]
        two.transport.send(1, beats(2, 1, 7))
        assert await one.batches.get() == (2, beats(2, 1, 7))
        assert (one.statistics_of(two).sent_messages, two.statistics_of(one).received_messages) == (5, 5)


async def test_more_than_a_frame_holds_arrives_whole_and_in_order() -> None:
    one, two = Node(1), Node(2)
    async with running(one, two):
        sent = [an_append(1, 2, index=number, payload=bytes(300_000)) for number in range(1, 40)]
        one.transport.send(2, sent)
        found: list[tuple[int, AnyMessage]] = []
        frames = 0
        while len(found) < len(sent):
            found += (await two.batches.get())[1]
            frames += 1
        assert found == sent
        assert frames >= 12, "frames are cut near a mebibyte, so that others get their turn"
        assert one.statistics_of(two).dropped_messages == 0


async def test_messages_without_a_connection_are_dropped_and_counted() -> None:
    one, two = Node(1), Node(2)
    async with running(one, two, meet=False):
        one.knows(two)
        one.transport.send(2, beats(1, 2, 0, 1))
        one.transport.send(99, beats(1, 99, 0))
        assert one.statistics_of(two).dropped_messages == 2


def test_a_full_queue_drops_the_oldest_appends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer(2, PeerAddress("n2", "127.0.0.1", 1))
    appends = [an_append(1, 2, index=number, payload=bytes(1_000)) for number in range(1, 21)]
    monkeypatch.setattr(peer_module, "RAFT_BYTES_MAX", sum(message_bytes(message) for _, message in appends))
    assert peer.add_messages(appends[:10]) == 0
    assert peer.add_messages(beats(1, 2, 0, 1)) == 0
    assert peer.add_messages(appends[10:19]) == 0
    dropped = peer.add_messages(appends[19:])
    assert 5 <= dropped < 10
    assert list(peer._raft) == [*appends[dropped:10], *beats(1, 2, 0, 1), *appends[10:]]
    assert peer.queued_bytes == sum(message_bytes(message) for _, message in peer._raft)


def test_a_flood_of_small_messages_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "RAFT_MESSAGES_MAX", 100)
    peer = Peer(2, PeerAddress("n2", "127.0.0.1", 1))
    assert peer.add_messages([*beats(1, 2, *range(99)), an_append(1, 2)]) == 0
    assert peer.add_messages(beats(1, 2, 99)) == 26, "the append, and the oldest of the rest, down to three quarters"
    assert [group for group, _ in peer._raft] == list(range(25, 100))


async def test_what_does_not_fit_while_the_peer_does_not_read_is_dropped_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "RAFT_BYTES_MAX", 4 * 1024 * 1024)
    one, two = Node(1), Node(2)
    async with running(one, two, meet=False), Proxy(two.transport.port) as proxy:
        two.knows(one)
        one.knows(two, port=proxy.port)
        await one.transport.wait_connected(2)
        proxy.flows.clear()
        sent = 0
        while one.statistics_of(two).dropped_messages == 0:
            sent += 1
            one.transport.send(2, [an_append(1, 2, index=sent, payload=bytes(500_000))])
            await asyncio.sleep(0)
        assert await one.unreachable.get() == 2
        assert one.statistics_of(two).queued_bytes <= 4 * 1024 * 1024
        assert one.statistics_of(two).connected


async def test_an_entry_that_its_proposer_did_not_make_goes_nowhere() -> None:
    one, two = Node(1), Node(2)
    async with running(one, two):
        good = make_entry(3, 7, 1, EntryKind.COMMANDS, b"good")
        bad = Entry(8, 1, EntryKind.COMMANDS, b"bad", good.crc)
        with structlog.testing.capture_logs() as logs:
            one.transport.send(2, [(3, Append(3, 1, 2, 1, 6, 1, (good, bad))), *beats(1, 2, 3)])
            assert await two.batches.get() == (1, beats(1, 2, 3))
        assert ("entry_unsound", 8) in {(line["event"], line.get("index")) for line in logs}
        assert two.transport.statistics().messages_unsound == 1


@pytest.mark.parametrize("message", [(4, Heartbeat(5, 1, 2, 1)), (5, Heartbeat(5, 3, 2, 1)), (5, Heartbeat(5, 1, 3, 1))])
async def test_a_message_in_the_wrong_envelope_ends_the_connection(message: tuple[int, AnyMessage]) -> None:
    one, two = Node(1), Node(2)
    async with running(one, two):
        one.transport.send(2, [message])
        assert await one.unreachable.get() == 2
        assert two.transport.statistics().frames_refused == 1
        assert two.batches.empty()


# ---- connections


async def test_a_lost_connection_is_made_again() -> None:
    one, two = Node(1), Node(2)
    async with running(one, two, meet=False), Proxy(two.transport.port) as proxy:
        two.knows(one)
        one.knows(two, port=proxy.port)
        await one.transport.wait_connected(2)
        proxy.cut()
        assert await one.unreachable.get() == 2
        assert not one.transport.is_connected(2)
        assert await one.failures.get()
        proxy.mend()
        await one.transport.wait_connected(2)
        one.transport.send(2, beats(1, 2, 4))
        assert await two.batches.get() == (1, beats(1, 2, 4))
        assert one.statistics_of(two).connects == 2


async def test_a_cut_in_one_direction_is_seen_and_the_other_direction_goes_on() -> None:
    one, two = Node(1), Node(2)
    async with running(one, two, meet=False), Proxy(two.transport.port) as proxy:
        one.knows(two, port=proxy.port)
        two.knows(one)
        await one.transport.wait_connected(2)
        await two.transport.wait_connected(1)
        proxy.cut()
        await one.unreachable.get()
        two.transport.send(1, beats(2, 1, 0))
        assert await one.batches.get() == (2, beats(2, 1, 0))
        seen = one.statistics_of(two)
        assert (seen.connected, seen.accepted) == (False, True)


async def test_a_peer_that_falls_silent_is_given_up() -> None:
    """A cut wire sends no end of the connection; nor does a stopped process."""
    options = replace(QUICK, silence_ms=150)
    one, two = Node(1, options=options), Node(2)
    async with running(one, two, meet=False), Proxy(two.transport.port) as proxy:
        one.knows(two, port=proxy.port)
        two.knows(one)
        await one.transport.wait_connected(2)
        with structlog.testing.capture_logs() as logs:
            proxy.flows.clear()
            assert await one.unreachable.get() == 2
        assert any(line["event"] == "peer_lost" and "silent for" in line["reason"] for line in logs)


async def test_a_node_that_was_itself_stopped_gives_nobody_up() -> None:
    """What the peers sent meanwhile waits in its sockets, and it looks at its clock first."""
    clock = VirtualClock(START_MS)
    one, two = Node(1, clock=clock, options=TransportOptions()), Node(2)
    async with running(one, two):
        clock.advance(ms=60_000)
        assert await one.transport.request(2, "echo", b"still here", 5_000) == b"still here"
        assert one.statistics_of(two).connects == 1


async def test_a_node_that_starts_later_is_found() -> None:
    one, two = Node(1), Node(2)
    port = await two.transport.listen()
    assert two.transport._server is not None
    two.transport._server.close()
    two.transport._server = None
    async with running(one, meet=False):
        one.knows(two, port=port)
        assert "onnect" in await one.failures.get()
        two.transport._listen = ("127.0.0.1", port)
        async with running(two, meet=False):
            two.knows(one)
            await one.transport.wait_connected(2)


async def test_an_address_in_use_is_named() -> None:
    one, two = Node(1), Node(2)
    async with running(one, meet=False):
        two.transport._listen = ("127.0.0.1", one.transport.port)
        with pytest.raises(OSError, match=f"cannot listen for peers on 127.0.0.1:{one.transport.port}"):
            await two.transport.listen()


async def test_a_garbled_frame_ends_the_connection_and_nothing_of_it_is_handed_on() -> None:
    one, two = Node(1), Node(2)
    async with running(one, two, meet=False), Proxy(two.transport.port) as proxy:
        one.knows(two, port=proxy.port)
        two.knows(one)
        await one.transport.wait_connected(2)
        with structlog.testing.capture_logs() as logs:
            proxy.garble = lambda data: data.replace(b"marker", b"mArker")
            one.transport.send(2, [an_append(1, 2, payload=b"marker")])
            assert await one.unreachable.get() == 2
        assert two.transport.statistics().frames_refused == 1
        assert [line["peer"] for line in logs if line["event"] == "peer_frame_refused"] == ["n1"]
        proxy.garble = lambda data: data
        await one.transport.wait_connected(2)
        one.transport.send(2, beats(1, 2, 0))
        assert await two.batches.get() == (1, beats(1, 2, 0))


async def test_peers_that_left_are_let_go_and_new_ones_found() -> None:
    one, two, three = Node(1), Node(2), Node(3)
    async with running(one, two, three):
        del one.peers[2]
        one.transport.set_peers(one.peers)
        assert await two.unreachable.get() == 1
        with pytest.raises(NotConnected, match="no node of raft id 2"):
            await one.transport.request(2, "echo", b"", 1_000)
        assert "n2 (raft id 2) is not known to n1" in await two.failures.get()
        one.knows(two)
        await two.transport.wait_connected(1)
        await one.transport.wait_connected(2)
        assert one.statistics_of(three).connects == 1


# ---- who may talk


def hello_of(number: int = 1, *, expects: int = 2, **identity: Any) -> Hello:
    return make_hello(replace(Node(number).transport.identity, **identity), expects=expects, nonce=b"n" * 16, bulk=False)


@pytest.mark.parametrize(
    ("identity", "told"),
    [
        ({"cluster_name": "prod"}, "n1 is of cluster prod, n2 of cluster test; correct cluster.name"),
        ({"cluster_id": b"d" * 16}, "two clusters of the name test were created apart"),
        ({"group_count": 64}, "cluster.group_count is 64 at n1 and 32 at n2; it is fixed at creation"),
        ({"partition_count": 512}, "partition count is 512 at n1 and 1024 at n2"),
        ({"versions": (3, 4)}, r"n1 speaks protocol 3 to 4 \(release 0.1\), n2 1 to 1 \(release 0.1\); upgrade one release at a time"),
        ({"name": "n2"}, "n2 and n2 are the same node to others"),
        ({"raft_id": 2}, "n1 and n2 are the same node to others"),
    ],
)  # fmt: skip
async def test_a_node_that_does_not_belong_here_is_refused_with_what_differs(identity: dict[str, Any], told: str) -> None:
    one, two = Node(1, **identity), Node(2)
    async with running(one, two, meet=False):
        two.knows(one)
        one.transport._peers = {2: Peer(2, PeerAddress("n2", "127.0.0.1", two.transport.port))}
        one.transport._dial_new_peers()
        reason = await one.failures.get()
        assert reason.startswith("refused by the other side: ")
        assert re.search(told, reason), reason
        assert one.statistics_of(two).last_refusal == reason
        assert two.transport.statistics().greetings_refused >= 1
        assert not two.hellos, "nothing is made durable for a stranger"


async def test_the_wrong_node_at_an_address_is_refused() -> None:
    one, two, three = Node(1), Node(2), Node(3)
    async with running(one, two, three, meet=False):
        three.knows(one)
        one.knows(two, port=three.transport.port)
        assert "n1 looked for the node of raft id 2 and found n3; correct its address in cluster.nodes" in await one.failures.get()


async def test_a_stranger_is_refused() -> None:
    one, two = Node(1), Node(2)
    async with running(one, two, meet=False):
        one.knows(two)
        assert "n1 (raft id 1) is not known to n2; add it to cluster.nodes" in await one.failures.get()


async def test_a_refusal_is_logged_once_and_not_with_every_attempt() -> None:
    one, two = Node(1, cluster_name="other"), Node(2)
    with structlog.testing.capture_logs() as logs:
        async with running(one, two, meet=False):
            one.knows(two)
            two.knows(one)
            for _ in range(5):
                await one.failures.get()
    assert [line["event"] for line in logs if line.get("peer") == "n1"].count("peer_refused") == 1
    assert [line["event"] for line in logs if line.get("peer") == "n2"].count("peer_not_connected") == 1


async def test_the_node_may_refuse_a_peer_of_another_incarnation() -> None:
    one, two = Node(1), Node(2)
    two.refuse_hello = "n1 lost its data"
    async with running(one, two, meet=False):
        one.knows(two)
        two.knows(one)
        assert await one.failures.get() == "refused by the other side: n1 lost its data"
        assert {hello.incarnation for hello in two.hellos} == {bytes([1]) * 16}
        two.refuse_hello = None
        await one.transport.wait_connected(2)


async def test_the_highest_common_version_is_spoken() -> None:
    one, two = Node(1, versions=(1, 3)), Node(2, versions=(2, 4))
    async with running(one, two):
        assert {wire.version for wire in one.transport._links} == {3}
        one.transport.send(2, beats(1, 2, 0))
        assert await two.batches.get() == (1, beats(1, 2, 0))


async def test_shared_settings_that_differ_are_told_and_do_not_separate() -> None:
    """Else no setting could be changed node by node."""
    one = Node(1, settings={"limits.payload_bytes": "1", "scheduler.horizon_s": "300.0"})
    two = Node(2, settings={"limits.payload_bytes": "2", "scheduler.horizon_s": "300.0", "scheduler.new": "1"})
    with structlog.testing.capture_logs() as logs:
        async with running(one, two):
            assert one.statistics_of(two).settings_differ == ("limits.payload_bytes is 2 at n2 and 1 at n1",)
            assert two.statistics_of(one).settings_differ == ("limits.payload_bytes is 1 at n1 and 2 at n2",)
    assert sum(line["event"] == "peer_settings_differ" for line in logs) == 2


async def test_a_blank_node_may_ask_but_has_no_part_in_consensus() -> None:
    one, two = Node(1, cluster_id=b""), Node(2)
    async with running(one, two):
        assert await one.transport.request(2, "who are you", b"?", 5_000) == b"?"
        one.transport.send(2, beats(1, 2, 0))
        two.transport.send(1, beats(2, 1, 0))
        assert one.statistics_of(two).dropped_messages == two.statistics_of(one).dropped_messages == 1
        one.transport.adopt(CLUSTER_ID)
        assert {await one.unreachable.get(), await two.unreachable.get()} == {1, 2}
        await one.transport.wait_connected(2)
        one.transport.send(2, beats(1, 2, 0))
        assert await two.batches.get() == (1, beats(1, 2, 0))


async def test_both_sides_prove_the_secret() -> None:
    one, two = Node(1, secret=b"s" * 16), Node(2, secret=b"s" * 16)
    async with running(one, two):
        assert await one.transport.request(2, "echo", b"x", 5_000) == b"x"


@pytest.mark.parametrize(("here", "there"), [(b"a" * 16, b"b" * 16), (b"", b"b" * 16), (b"a" * 16, b"")])
async def test_who_does_not_prove_the_secret_is_refused(here: bytes, there: bytes) -> None:
    one, two = Node(1, secret=here), Node(2, secret=there)
    async with running(one, two, meet=False):
        two.knows(one)
        one.knows(two)
        assert "does not prove the secret of this cluster" in await one.failures.get()


async def test_a_caller_that_asks_for_no_proof_must_give_one_all_the_same() -> None:
    two = Node(2, secret=b"s" * 16)
    async with running(two, meet=False):
        two.peers[1] = PeerAddress("n1", "127.0.0.1", 1)
        two.transport.set_peers(two.peers)
        reader, writer = await asyncio.open_connection("127.0.0.1", two.transport.port)
        frames = FrameReader()
        writer.write(encode_frame(Kind.HELLO, encode_body(hello_of(1)), 1))
        kind, welcome = await read_frame(reader, frames)
        assert kind == Kind.WELCOME
        # What the listener itself gave as proof does not serve the caller.
        theirs = decode_body(Kind.WELCOME, welcome, Hello)
        writer.write(encode_frame(Kind.CONFIRM, encode_body(Confirm(theirs.proof)), 1))
        kind, refusal = await read_frame(reader, frames)
        assert (kind, decode_body(Kind.REFUSAL, refusal, Refusal).code) == (Kind.REFUSAL, "secret")
        assert not two.hellos
        writer.close()


def test_a_proof_holds_for_one_direction_of_one_connection() -> None:
    caller, listener = hello_of(1), hello_of(2, expects=1)
    proofs = {
        proof_of(b"s", caller=caller, listener=listener, by_caller=True),
        proof_of(b"s", caller=caller, listener=listener, by_caller=False),
        proof_of(b"s", caller=listener, listener=caller, by_caller=True),
        proof_of(b"t", caller=caller, listener=listener, by_caller=True),
        proof_of(b"s", caller=replace_nonce(caller), listener=listener, by_caller=True),
    }
    assert len(proofs) == 5


def replace_nonce(hello: Hello) -> Hello:
    return decode_body(Kind.HELLO, encode_body(hello).replace(b"n" * 16, b"o" * 16), Hello)


async def test_a_listener_that_cannot_prove_the_secret_gets_no_proof_to_play_back() -> None:
    """Somebody else sits at the address of n2 and sends its hello back."""
    one, two = Node(1, secret=b"s" * 16), Node(2)
    kinds: list[int] = []

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameReader()
        while data := await reader.read(65_536):
            for kind, _, _body in frames.feed(data):
                kinds.append(kind)
                if kind == Kind.HELLO:
                    writer.write(encode_frame(Kind.WELCOME, encode_body(hello_of(2, expects=1)), 1))
        writer.close()

    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    async with running(one, meet=False):
        one.knows(two, port=server.sockets[0].getsockname()[1])
        assert "n2 does not prove the secret" in await one.failures.get()
    server.close()
    assert set(kinds) <= {Kind.HELLO, Kind.REFUSAL}


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4,
        bytes(64),
        encode_frame(Kind.RAFT, encode_raft_batch(beats(1, 2, 0)), 1),
        encode_frame(Kind.HELLO, b"\x90", 1),
        encode_frame(Kind.HELLO, bytes(300_000), 1),
        encode_frame(Kind.CONFIRM, encode_body(Confirm()), 1),
    ],
)
async def test_who_does_not_greet_is_sent_away(data: bytes) -> None:
    two = Node(2)
    async with running(two, meet=False):
        reader, writer = await asyncio.open_connection("127.0.0.1", two.transport.port)
        writer.write(data)
        with contextlib.suppress(OSError):
            assert await reader.read() == b""
        writer.close()
        assert two.transport.statistics().greetings_refused == 1
        assert two.batches.empty()


async def test_a_greeting_is_not_kept_beyond_its_length() -> None:
    """Who has not shown who it is fills no memory."""
    two = Node(2)
    with structlog.testing.capture_logs() as logs:
        async with running(two, meet=False):
            reader, writer = await asyncio.open_connection("127.0.0.1", two.transport.port)
            writer.write(encode_frame(Kind.HELLO, encode_body(hello_of(1)), 1) * 10)
            with contextlib.suppress(OSError):
                assert await reader.read() == b""
            writer.close()
    assert "too many frames in the greeting" in {line.get("reason") for line in logs}


async def test_who_says_nothing_is_sent_away_and_not_too_many_are_waited_for() -> None:
    clock = VirtualClock(START_MS)
    two = Node(2, clock=clock, options=TransportOptions(greetings_max=1))
    async with running(two, meet=False):
        first, first_writer = await asyncio.open_connection("127.0.0.1", two.transport.port)
        second, second_writer = await asyncio.open_connection("127.0.0.1", two.transport.port)
        with contextlib.suppress(OSError):
            assert await second.read() == b""
        for _ in range(6):
            clock.advance(ms=999)
            await asyncio.sleep(0)
        with contextlib.suppress(OSError):
            assert await first.read() == b""
        first_writer.close()
        second_writer.close()


async def greet_by_hand(two: Node, number: int = 1, **identity: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, FrameReader]:
    """A connection to a node, past the greeting, as another release would make it: from the format alone."""
    reader, writer = await asyncio.open_connection("127.0.0.1", two.transport.port)
    frames = FrameReader()
    writer.write(encode_frame(Kind.HELLO, encode_body(hello_of(number, expects=two.number, **identity)), 1))
    assert (await read_frame(reader, frames))[0] == Kind.WELCOME
    writer.write(encode_frame(Kind.CONFIRM, encode_body(Confirm()), 1))
    assert (await read_frame(reader, frames))[0] == Kind.CONFIRM
    return reader, writer, frames


async def read_frame(reader: asyncio.StreamReader, frames: FrameReader) -> tuple[int, bytes]:
    """For a side that sends one frame at a time."""
    while data := await reader.read(65_536):
        for kind, _, body in frames.feed(data):
            return kind, bytes(body)
    raise EOFError


async def test_unknown_kinds_are_passed_over_and_counted() -> None:
    one, two = Node(1), Node(2)
    async with running(two, meet=False):
        two.peers[1] = PeerAddress("n1", "127.0.0.1", 1)
        two.transport.set_peers(two.peers)
        _, writer, _ = await greet_by_hand(two)
        writer.write(encode_frame(200, b"from the next release", 1))
        writer.write(encode_frame(Kind.RAFT, encode_raft_batch(beats(1, 2, 0)), 1))
        assert await two.batches.get() == (1, beats(1, 2, 0))
        assert two.transport.statistics().frames_unknown == 1
        writer.close()
    assert one.batches.empty()


async def test_another_version_than_agreed_ends_the_connection() -> None:
    two = Node(2)
    async with running(two, meet=False):
        two.peers[1] = PeerAddress("n1", "127.0.0.1", 1)
        two.transport.set_peers(two.peers)
        reader, writer, _ = await greet_by_hand(two)
        writer.write(encode_frame(Kind.RAFT, encode_raft_batch(beats(1, 2, 0)), 2))
        with contextlib.suppress(OSError):
            assert await reader.read() == b""
        writer.close()
        assert two.batches.empty() and two.transport.statistics().frames_refused == 1


@pytest.mark.parametrize("kind", [Kind.RAFT, Kind.ABANDON])
async def test_state_from_a_node_that_is_no_member_yet_is_not_taken(kind: Kind) -> None:
    two = Node(2)
    async with running(two, meet=False):
        two.peers[1] = PeerAddress("n1", "127.0.0.1", 1)
        two.transport.set_peers(two.peers)
        reader, writer, _ = await greet_by_hand(two, cluster_id=b"")
        writer.write(encode_frame(kind, encode_raft_batch(beats(1, 2, 0)) if kind is Kind.RAFT else encode_body(Abandon(1, 1)), 1))
        with contextlib.suppress(OSError):
            assert await reader.read() == b""
        writer.close()
        assert two.batches.empty() and two.transport.statistics().frames_refused == 1


async def test_a_connection_made_anew_takes_the_place_of_its_predecessor() -> None:
    """The network may keep the end of the old one from us for long."""
    two = Node(2)
    async with running(two, meet=False):
        two.peers[1] = PeerAddress("n1", "127.0.0.1", 1)
        two.transport.set_peers(two.peers)
        first, first_writer, _ = await greet_by_hand(two)
        _, second_writer, _ = await greet_by_hand(two)
        with contextlib.suppress(OSError):
            assert await first.read() == b""
        second_writer.write(encode_frame(Kind.RAFT, encode_raft_batch(beats(1, 2, 0)), 1))
        assert await two.batches.get() == (1, beats(1, 2, 0))
        first_writer.close()
        second_writer.close()


def test_every_pair_of_hellos_that_agree_has_no_refusal() -> None:
    assert find_refusal(hello_of(2, expects=1), hello_of(1)) is None
    assert find_refusal(hello_of(2, expects=1), hello_of(1, cluster_id=b"")) is None


# ---- requests


async def test_an_answer_comes_back_for_each_request_whatever_the_order() -> None:
    one, two = Node(1), Node(2)
    gates = {number: asyncio.Event() for number in range(3)}

    async def answer(sender: int, method: str, body: bytes) -> bytes:
        await gates[body[0]].wait()
        return f"{sender} {method} ".encode() + body

    two.answer = answer
    async with running(one, two):
        asked = [asyncio.create_task(one.transport.request(2, "get", bytes([number]), 5_000)) for number in range(3)]
        for number in (2, 0, 1):
            gates[number].set()
            assert await asked[number] == b"1 get " + bytes([number])


async def test_refusals_reach_the_caller_as_they_are() -> None:
    one, two = Node(1), Node(2)

    async def answer(_sender: int, method: str, _body: bytes) -> bytes:
        match method:
            case "missing":
                raise NotFound("no job j")
            case "later":
                raise Unavailable("later", retry_after_s=7, errors=[{"pointer": "/x", "detail": "y"}])
            case "huge":
                return bytes(BODY_BYTES_MAX)
        raise ZeroDivisionError

    two.answer = answer
    async with running(one, two):
        with pytest.raises(NotFound, match="no job j"):
            await one.transport.request(2, "missing", b"", 5_000)
        with pytest.raises(Unavailable) as caught:
            await one.transport.request(2, "later", b"", 5_000)
        assert (caught.value.retry_after_s, caught.value.errors) == (7, ({"pointer": "/x", "detail": "y"},))
        with pytest.raises(PayloadTooLarge, match="the answer to huge has 8,388,608 bytes"):
            await one.transport.request(2, "huge", b"", 5_000)
        with structlog.testing.capture_logs() as logs, pytest.raises(WheelschedError, match="crash failed; the log of that node"):
            await one.transport.request(2, "crash", b"", 5_000)
        assert any(line["event"] == "peer_request_failed" and line["method"] == "crash" for line in logs)
        assert one.transport.is_connected(2)


async def test_a_request_without_a_connection_was_not_sent_and_says_why_there_is_none() -> None:
    one, two = Node(1, cluster_name="other"), Node(2)
    async with running(one, two, meet=False):
        two.knows(one)
        one.knows(two)
        await one.failures.get()
        with pytest.raises(NotConnected, match=r"n2 is not connected \(refused by the other side: n1 is of cluster other"):
            await one.transport.request(2, "echo", b"", 5_000)


async def test_a_request_whose_connection_ends_has_an_unknown_outcome_once_it_was_sent() -> None:
    one, two = Node(1), Node(2)
    arrived, cancelled = asyncio.Event(), asyncio.Event()

    async def answer(_sender: int, _method: str, _body: bytes) -> bytes:
        arrived.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    two.answer = answer
    async with running(one, two, meet=False), Proxy(two.transport.port) as proxy:
        one.knows(two, port=proxy.port)
        two.knows(one)
        await one.transport.wait_connected(2)
        asked = asyncio.create_task(one.transport.request(2, "create", b"", 60_000))
        await arrived.wait()
        # Not sent yet: it only just came to the queue when the connection ends.
        proxy.cut()
        with pytest.raises(OutcomeUnknown, match="n2 did not answer create"):
            await asked
        await cancelled.wait()


async def test_a_request_that_was_still_queued_was_not_sent() -> None:
    one, two = Node(1), Node(2)
    async with running(one, two):
        wire = one.transport._peers[2].wire
        assert wire is not None
        asked = asyncio.create_task(one.transport.request(2, "create", b"", 60_000))
        await asyncio.sleep(0)  # it is queued; the turn's write is still to come
        wire.connection_lost(None)
        with pytest.raises(NotConnected, match="n2 is not connected"):
            await asked


async def test_no_answer_in_time_is_an_unknown_outcome_and_ends_the_work() -> None:
    clock = VirtualClock(START_MS)
    one, two = Node(1, clock=clock, options=TransportOptions()), Node(2, clock=VirtualClock(START_MS), options=TransportOptions())
    arrived, cancelled = asyncio.Event(), asyncio.Event()

    async def answer(_sender: int, method: str, body: bytes) -> bytes:
        if method == "echo":
            return body
        arrived.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    two.answer = answer
    async with running(one, two):
        asked = asyncio.create_task(one.transport.request(2, "claim", b"", 900))
        await arrived.wait()
        clock.advance(ms=899)
        assert await one.transport.request(2, "echo", b"x", 5_000) == b"x"
        assert not asked.done()
        clock.advance(ms=100)
        with pytest.raises(OutcomeUnknown, match="n2 did not answer claim in time"):
            await asked
        await cancelled.wait()


async def test_a_caller_that_goes_away_takes_its_request_along() -> None:
    """A claim must not be made for a worker that hung up."""
    one, two = Node(1), Node(2)
    arrived, cancelled = asyncio.Event(), asyncio.Event()

    async def answer(_sender: int, _method: str, _body: bytes) -> bytes:
        arrived.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    two.answer = answer
    async with running(one, two):
        asked = asyncio.create_task(one.transport.request(2, "claim", b"", 60_000))
        await arrived.wait()
        asked.cancel()
        await cancelled.wait()
        assert one.statistics_of(two).requests_waiting == 0
        assert one.transport.is_connected(2)


async def test_a_handler_is_cancelled_when_its_time_is_over_even_if_the_caller_says_nothing() -> None:
    clock = VirtualClock(START_MS)
    two = Node(2, clock=clock, options=TransportOptions())
    arrived, cancelled = asyncio.Event(), asyncio.Event()

    async def answer(_sender: int, _method: str, _body: bytes) -> bytes:
        arrived.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    two.answer = answer
    async with running(two, meet=False):
        two.peers[1] = PeerAddress("n1", "127.0.0.1", 1)
        two.transport.set_peers(two.peers)
        _, writer, _ = await greet_by_hand(two)
        writer.write(encode_frame(Kind.REQUEST, encode_body(Request(1, "claim", 900, b"")), 1))
        await arrived.wait()
        clock.advance(ms=1_100)
        await cancelled.wait()
        writer.close()


async def test_too_many_and_too_large_requests_are_refused_and_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Node(1), Node(2, options=replace(QUICK, calls_max=1))
    arrived, go = asyncio.Event(), asyncio.Event()

    async def answer(_sender: int, _method: str, body: bytes) -> bytes:
        arrived.set()
        await go.wait()
        return body

    two.answer = answer
    async with running(one, two):
        first = asyncio.create_task(one.transport.request(2, "create", b"a", 5_000))
        await arrived.wait()
        with pytest.raises(Busy, match="n2: 1 requests of one node are under way"):
            await one.transport.request(2, "create", b"b", 5_000)
        monkeypatch.setattr(peer_module, "CALLS_MAX", 1)
        with pytest.raises(Busy, match="too much waits to be sent to n2"):
            await one.transport.request(2, "create", b"c", 5_000)
        with pytest.raises(PayloadTooLarge, match="split it"):
            await one.transport.request(2, "create", bytes(REQUEST_BODY_BYTES_MAX), 5_000)
        go.set()
        assert await first == b"a"
        assert await one.transport.request(2, "create", bytes(REQUEST_BODY_BYTES_MAX - 6), 5_000) == bytes(REQUEST_BODY_BYTES_MAX - 6)


async def test_the_queue_of_requests_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "REQUESTS_BYTES_MAX", 100)
    peer = Peer(2, PeerAddress("n2", "127.0.0.1", 1))
    loop = asyncio.get_running_loop()
    assert peer.add_request(Call(1, "m", 0, loop.create_future(), bytes(90)))
    assert not peer.add_request(Call(2, "m", 0, loop.create_future(), bytes(90)))
    assert set(peer.calls) == {1}


# ---- what breaks stops the node


async def test_a_handler_of_messages_that_raises_stops_the_node() -> None:
    one, three = Node(1), Node(3)
    async with running(one, meet=False):
        run = asyncio.create_task(three.transport.run())
        await three.transport.listen()
        object.__setattr__(three.transport._handlers, "on_raft", lambda *_: invariant(False, "committed_is_never_cut", index=7))
        one.knows(three)
        three.knows(one)
        await one.transport.wait_connected(3)
        one.transport.send(3, beats(1, 3, 0))
        with pytest.raises(InvariantBroken, match="committed_is_never_cut: index=7"):
            await run


async def test_a_broken_invariant_in_a_request_stops_the_node() -> None:
    one, three = Node(1), Node(3)

    async def answer(_sender: int, _method: str, _body: bytes) -> bytes:
        invariant(False, "token_grows")
        return b""

    three.answer = answer
    async with running(one, meet=False):
        run = asyncio.create_task(three.transport.run())
        await three.transport.listen()
        one.knows(three)
        three.knows(one)
        await one.transport.wait_connected(3)
        with pytest.raises(OutcomeUnknown):
            await one.transport.request(3, "create", b"", 5_000)
        with pytest.raises(InvariantBroken, match="token_grows"):
            await run


# ---- clocks


async def test_offset_and_round_trip_are_measured() -> None:
    """Node 2's clock is a second ahead; the ping leaves before the request, so its answer is back before the request's."""
    clock, ahead = VirtualClock(START_MS), VirtualClock(START_MS + 1_000)
    one, two = Node(1, clock=clock, options=TransportOptions()), Node(2, clock=ahead, options=TransportOptions())
    async with running(one, two):
        clock.advance(ms=50)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await one.transport.request(2, "echo", b"", 5_000)
        seen = one.statistics_of(two)
        assert seen.clock_offset_ms == 950  # one's clock went on by 50
        assert seen.round_trip_ms == 0
        assert one.transport.statistics().majority_offset_ms == 0, "of two, ours is as good as the other"
        assert not one.transport.statistics().is_clock_off


# ---- snapshots


async def pieces_of(*pieces: bytes, closed: asyncio.Event | None = None) -> AsyncIterator[bytes]:
    try:
        for piece in pieces:
            yield piece
    finally:
        if closed is not None:
            closed.set()


async def test_a_snapshot_arrives_piece_by_piece_and_its_end_is_confirmed() -> None:
    one, two = Node(1), Node(2)
    closed = asyncio.Event()
    async with running(one, two):
        pieces = [bytes([number]) * (1024 * 1024) for number in range(10)]
        peers: Peers = one.transport
        assert await peers.send_snapshot(2, 5, 77, pieces_of(*pieces, closed=closed))
        found = [two.pieces.get_nowait() for _ in range(11)]
        assert found == [*((1, 5, 77, number, piece, False) for number, piece in enumerate(pieces)), (1, 5, 77, 10, b"", True)]
        assert closed.is_set()
        assert one.transport.statistics().snapshots_sending == 0


async def test_no_more_pieces_are_under_way_than_the_window() -> None:
    one, two = Node(1), Node(2)
    taken: list[int] = []
    go = asyncio.Event()
    full = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        for number in range(20):
            taken.append(number)
            if len(taken) == WINDOW:
                full.set()
            yield b"x"

    async def write(_sequence: int, _data: bytes, _last: bool) -> bool:
        await go.wait()
        return True

    two.write_piece = write
    async with running(one, two):
        result = one.transport.send_snapshot(2, 0, 1, pieces())
        await full.wait()
        assert await one.transport.request(2, "echo", b"", 5_000) == b""
        assert len(taken) == WINDOW
        go.set()
        assert await result
        assert len(taken) == 20


async def test_a_broken_connection_is_taken_up_where_it_ended_and_no_piece_comes_twice() -> None:
    one, two = Node(1), Node(2)
    async with running(one, two, meet=False), Proxy(two.transport.port) as proxy:
        one.knows(two, port=proxy.port)
        two.knows(one)
        await one.transport.wait_connected(2)
        pieces = [bytes([number]) * 400_000 for number in range(30)]
        proxy.cut_after_bytes = proxy.count_bytes + 3_000_000
        result = one.transport.send_snapshot(2, 5, 77, pieces_of(*pieces))
        await one.unreachable.get()
        assert not result.done()
        proxy.mend()
        assert await result
        found = [two.pieces.get_nowait() for _ in range(31)]
        assert [piece[3] for piece in found] == list(range(31))
        assert [piece[4] for piece in found[:-1]] == pieces
        assert two.pieces.empty()


async def test_pieces_that_were_taken_but_not_acknowledged_are_not_taken_again() -> None:
    """They are sent again after the reconnect, for the sender cannot know; one of them is being written meanwhile."""
    one, two = Node(1), Node(2)
    go = asyncio.Event()

    async def write(sequence: int, _data: bytes, _last: bool) -> bool:
        if sequence == 2:
            await go.wait()
        return True

    two.write_piece = write
    async with running(one, two, meet=False), Proxy(two.transport.port) as proxy:
        one.knows(two, port=proxy.port)
        two.knows(one)
        await one.transport.wait_connected(2)
        result = one.transport.send_snapshot(2, 5, 77, pieces_of(*[bytes([number]) for number in range(9)]))
        while (await two.pieces.get())[3] != 2:
            pass
        transfer = two.transport._incoming._transfers[1, 5]
        while transfer.expected < 2 + WINDOW:  # noqa: ASYNC110 - the sockets carry what the window holds, nobody signals it
            await asyncio.sleep(0)
        proxy.cut()
        await one.unreachable.get()
        proxy.mend()
        await one.transport.wait_connected(2)
        before = transfer.wire
        while transfer.wire is before:  # noqa: ASYNC110 - until the first piece comes again
            await asyncio.sleep(0)
        go.set()
        assert await result
        assert [two.pieces.get_nowait()[3] for _ in range(7)] == [3, 4, 5, 6, 7, 8, 9]
        assert two.pieces.empty()


async def test_a_receiver_that_lost_its_memory_gets_it_anew_by_the_senders_decision() -> None:
    one, two = Node(1), Node(2)
    started = asyncio.Event()
    go = asyncio.Event()

    async def write(_sequence: int, _data: bytes, _last: bool) -> bool:
        started.set()
        await go.wait()
        return True

    two.write_piece = write
    async with running(one, two, meet=False), Proxy(two.transport.port) as proxy:
        one.knows(two, port=proxy.port)
        two.knows(one)
        await one.transport.wait_connected(2)
        result = one.transport.send_snapshot(2, 5, 77, pieces_of(*[b"x"] * 9))
        await started.wait()
        go.set()
        assert await result
        # The same snapshot, sent again by a sender that was restarted: the number is used again, and it is another stream.
        started.clear()
        assert await one.transport.send_snapshot(2, 5, 77, pieces_of(b"y"))
        assert started.is_set()


async def test_pieces_whose_beginning_is_unknown_are_refused() -> None:
    one, two = Node(1), Node(2)
    first = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"0"
        await first.wait()
        yield b"1"

    async with running(one, two):
        result = one.transport.send_snapshot(2, 5, 77, pieces())
        await two.pieces.get()
        two.transport._incoming._transfers.clear()
        first.set()
        with structlog.testing.capture_logs() as logs:
            assert await result is False
        assert any(line["event"] == "snapshot_refused" and "start anew" in line["reason"] for line in logs)


@pytest.mark.parametrize("bad", [0, 2, 3])
async def test_a_piece_that_cannot_be_taken_ends_the_snapshot(bad: int) -> None:
    """The last one is the installation itself."""
    one, two = Node(1), Node(2)

    async def write(sequence: int, _data: bytes, last: bool) -> bool:
        assert last is (sequence == 3)
        return sequence != bad

    two.write_piece = write
    closed = asyncio.Event()
    async with running(one, two):
        assert await one.transport.send_snapshot(2, 5, 77, pieces_of(b"a", b"b", b"c", closed=closed)) is False
        await closed.wait()


class Endless:
    """Pieces without end from something that must be closed, such as an iterator of a store: nobody else closes it."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    def __aiter__(self) -> Endless:
        return self

    async def __anext__(self) -> bytes:
        return b"x"

    async def aclose(self) -> None:
        self.closed.set()


async def test_giving_up_tells_the_other_side_and_closes_the_source() -> None:
    one, two = Node(1), Node(2)
    go = asyncio.Event()

    async def write(_sequence: int, _data: bytes, _last: bool) -> bool:
        await go.wait()
        return True

    two.write_piece = write
    async with running(one, two):
        source = Endless()
        result = one.transport.send_snapshot(2, 5, 77, source)
        await two.pieces.get()
        result.cancel()
        assert await two.lost.get() == (1, 5, 77)
        await source.closed.wait()
        assert two.transport.statistics().snapshots_receiving == 0


async def test_a_failing_source_is_told_to_its_owner() -> None:
    one, two = Node(1), Node(2)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"a"
        raise LookupError("the disk")

    async with running(one, two):
        with pytest.raises(LookupError, match="the disk"):
            await one.transport.send_snapshot(2, 5, 77, pieces())
        with pytest.raises(ValueError, match="allowed: 1 to 1,048,576"):
            await one.transport.send_snapshot(2, 5, 78, pieces_of(bytes(1024 * 1024 + 1)))
        assert await one.transport.send_snapshot(9, 5, 78, pieces_of(b"a")) is False


async def test_more_transfers_than_slots_wait_for_each_other() -> None:
    one, two = Node(1, options=replace(QUICK, snapshots_out_max=4)), Node(2, options=replace(QUICK, snapshots_in_max=1))
    writing: set[int] = set()
    most = 0
    async with running(one, two):

        async def on_chunk(_s: int, group: int, _i: int, _n: int, _d: bytes, last: bool) -> bool:
            nonlocal most
            writing.add(group)
            most = max(most, len(writing))
            await asyncio.sleep(0)
            if last:
                writing.discard(group)
            return True

        two.transport._incoming._on_chunk = on_chunk
        results = [one.transport.send_snapshot(2, group, 1, pieces_of(*[b"x"] * 10)) for group in range(4)]
        assert await asyncio.gather(*results) == [True] * 4
        assert most == 1


async def test_a_sender_gives_up_where_nothing_is_acknowledged_and_a_receiver_where_nobody_comes_back() -> None:
    clock = VirtualClock(START_MS)
    one, two = Node(1, clock=clock, options=TransportOptions()), Node(2, clock=clock, options=TransportOptions())

    async def write(_sequence: int, _data: bytes, _last: bool) -> bool:
        await asyncio.Event().wait()
        return True

    two.write_piece = write
    async with running(one, two):
        result = one.transport.send_snapshot(2, 5, 77, pieces_of(b"a"))
        await two.pieces.get()
        clock.advance(ms=SENDER_PATIENCE_MS + 1_000)
        assert await result is False
        while two.lost.empty():
            clock.advance(ms=RECEIVER_PATIENCE_MS // 2)
            await asyncio.sleep(0)
        assert two.lost.get_nowait() == (1, 5, 77)


async def test_the_throttle_spreads_bytes_over_time(clock: VirtualClock) -> None:
    throttle = Throttle(1_000, clock)
    await throttle.take(500)
    second = asyncio.create_task(throttle.take(100))
    third = asyncio.create_task(throttle.take(100))
    await asyncio.sleep(0)
    assert clock.next_wake_ms() == START_MS + 500
    clock.advance(ms=500)
    await second
    assert not third.done()
    clock.advance(ms=99)
    await asyncio.sleep(0)
    assert not third.done()
    clock.advance(ms=1)
    await third


async def test_heartbeats_do_not_wait_behind_a_snapshot() -> None:
    """They have a connection of their own; this one does not even read."""
    one, two = Node(1), Node(2)
    go = asyncio.Event()

    async def write(_sequence: int, _data: bytes, _last: bool) -> bool:
        await go.wait()
        return True

    two.write_piece = write
    async with running(one, two):
        result = one.transport.send_snapshot(2, 5, 77, pieces_of(*[bytes(1024 * 1024)] * 8))
        await two.pieces.get()
        one.transport.send(2, beats(1, 2, 0))
        assert await two.batches.get() == (1, beats(1, 2, 0))
        go.set()
        assert await result


# ---- TLS, settings


def openssl(*arguments: str, folder: Path) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Authority `ca`, certificates of n1 and n2 by it; `other`, another authority, and its certificate of n1."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    folder = tmp_path_factory.mktemp("tls")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    for authority in ("ca", "other"):
        openssl("req", "-x509", *key, "-keyout", f"{authority}.key", "-out", f"{authority}.pem", "-subj", f"/CN={authority}", folder=folder)
    for name, file, authority in (("n1", "n1", "ca"), ("n2", "n2", "ca"), ("n1", "stranger", "other")):
        openssl(
            "req", "-x509", *key, "-keyout", f"{file}.key", "-out", f"{file}.pem", "-subj", "/O=test", "-CA", f"{authority}.pem",
            "-CAkey", f"{authority}.key", "-addext", f"subjectAltName=DNS:{name}", folder=folder,
        )  # fmt: skip
    return folder


def tls_of(folder: Path, file: str) -> Tls:
    paths = {"cert_file": folder / f"{file}.pem", "key_file": folder / f"{file}.key", "ca_file": folder / "ca.pem"}
    return read_tls(TlsSettings(**{name: str(path) for name, path in paths.items()}))


@pytest.mark.blocking_allowed
async def test_nodes_with_certificates_of_the_cluster_talk(certificates: Path) -> None:
    one, two = Node(1, tls=tls_of(certificates, "n1")), Node(2, tls=tls_of(certificates, "n2"))
    async with running(one, two):
        one.transport.send(2, beats(1, 2, 0))
        assert await two.batches.get() == (1, beats(1, 2, 0))
        assert await two.transport.request(1, "echo", bytes(3_000_000), 20_000) == bytes(3_000_000)
        assert await one.transport.send_snapshot(2, 1, 1, pieces_of(bytes(1024 * 1024)))


@pytest.mark.parametrize(
    ("file", "told"),
    [("n2", "n1 shows a certificate for n2; issue one with DNS:n1"), ("stranger", ""), (None, "")],
    ids=["certificate of another node", "of another authority", "no TLS at all"],
)
async def test_who_has_no_certificate_for_its_name_is_not_let_in(certificates: Path, file: str | None, told: str) -> None:
    one, two = Node(1, tls=tls_of(certificates, file) if file else None), Node(2, tls=tls_of(certificates, "n2"))
    async with running(one, two, meet=False):
        two.knows(one)
        one.knows(two)
        assert told in await one.failures.get()
        assert not one.transport.is_connected(2)
        assert not two.hellos


def test_files_that_cannot_be_used_are_named(certificates: Path, tmp_path: Path) -> None:
    paths = {name: str(certificates / file) for name, file in (("cert_file", "n1.pem"), ("key_file", "n1.key"), ("ca_file", "ca.pem"))}
    with pytest.raises(ValueError, match=r"cluster.tls.ca_file gone.pem cannot be used: No such file"):
        read_tls(TlsSettings(**{**paths, "ca_file": "gone.pem"}))
    with pytest.raises(ValueError, match=r"cluster.tls.cert_file .*n1.pem with cluster.tls.key_file .*n2.key cannot be used"):
        read_tls(TlsSettings(**{**paths, "key_file": str(certificates / "n2.key")}))
    with pytest.raises(ValueError, match=r"cluster\.secret_file gone cannot be read"):
        read_secret("gone")
    short = tmp_path / "secret"
    short.write_text(" short \n")
    with pytest.raises(ValueError, match="holds 5 bytes; take 16 random ones or more"):
        read_secret(str(short))


async def test_a_transport_is_made_from_settings(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"0123456789abcdef\n")
    nodes = tuple(NodeAddress(id=f"n{number}", http=f"127.0.0.1:{number}", peer=f"127.0.0.1:{number + 10}") for number in (1, 2, 3))
    settings = Settings()
    settings = replace_settings(settings, nodes=nodes, secret_file=str(secret), snapshot_mib_per_s=3)
    handlers = Node(1).transport._handlers
    transport = make_transport(settings, handlers, incarnation=b"i", cluster_id=b"c", clock=RealClock(), rng=random.Random(1))
    assert transport.identity.raft_id == raft_id_of("n1")
    assert transport.identity.secret == b"0123456789abcdef"
    assert {peer.address for peer in transport._peers.values()} == {PeerAddress("n2", "127.0.0.1", 12), PeerAddress("n3", "127.0.0.1", 13)}
    assert transport._options.snapshot_bytes_per_s == 3 * 1024 * 1024
    assert transport.identity.settings["cluster.replication_factor"] == "3"
    assert "0123456789abcdef" not in repr(transport.identity)


def replace_settings(settings: Settings, **cluster: Any) -> Settings:
    return msgspec.structs.replace(settings, cluster=msgspec.structs.replace(settings.cluster, **cluster))


def test_all_of_it_works_on_the_loop_of_production() -> None:
    """uvloop has its own flow control: a large exchange in both directions, with requests and a snapshot in between."""
    uvloop = pytest.importorskip("uvloop")

    async def main() -> None:
        one, two = Node(1), Node(2)
        async with running(one, two):
            sent = [an_append(1, 2, index=number, payload=bytes(400_000)) for number in range(1, 60)]
            result = one.transport.send_snapshot(2, 5, 77, pieces_of(*[bytes(1024 * 1024)] * 8))
            one.transport.send(2, sent)
            bodies = [one.transport.request(2, "echo", bytes([number]) * 2_000_000, 20_000) for number in range(5)]
            assert [body[0] for body in await asyncio.gather(*bodies)] == list(range(5))
            found: list[tuple[int, AnyMessage]] = []
            while len(found) < len(sent):
                found += (await two.batches.get())[1]
            assert found == sent
            assert await result

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_refusals_are_bodies_like_others() -> None:
    assert decode_body(Kind.REFUSAL, encode_body(Refusal("code", "reason")), Refusal) == Refusal("code", "reason")
