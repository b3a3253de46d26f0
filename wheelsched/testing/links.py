"""Links between nodes that are processes: a proxy in front of each, so that what goes from one to another can be cut or slowed.

All nodes read one settings file, in which the address of each is that of its proxy; where the node itself listens is its own
`node.peer_listen`. Who calls is read from the first frame, so each direction between two nodes has a gate of its own: bytes that a
closed one holds up are delivered when it opens, as those are that TCP sends again, unless an end has given the connection up.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from wheelsched.cluster.frames import FrameError, FrameReader, Hello, Kind, decode_body

READ_BYTES: Final = 256 * 1024
HELLO_BYTES_MAX: Final = 64 * 1024
PORTS: Final = (12_000, 32_000)


@dataclass(slots=True)
class Gate:
    """One direction between two nodes. `delay_s`: how much later what passes arrives, piece after piece."""

    opened: asyncio.Event
    delay_s: float = 0.0

    async def wait_passed(self) -> None:
        await self.opened.wait()
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
            await self.opened.wait()


@dataclass(slots=True)
class Links:
    """The proxies of a cluster; see `run_links`. `ports`: where the others reach a node; `targets`: where it listens."""

    ports: dict[str, int]
    targets: dict[str, int]
    _gates: dict[tuple[str, str], Gate] = field(default_factory=dict)
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

    def cut(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Nothing arrives any more of what the first of a pair sends to the second."""
        for pair in pairs:
            self._gate(*pair).opened.clear()

    def slow(self, pairs: Iterable[tuple[str, str]], delay_s: float) -> None:
        for pair in pairs:
            self._gate(*pair).delay_s = delay_s

    def heal(self) -> None:
        """All links are as they were."""
        for gate in self._gates.values():
            gate.delay_s = 0.0
            gate.opened.set()

    def _gate(self, source: str, target: str) -> Gate:
        gate = self._gates.get((source, target))
        if gate is None:
            gate = self._gates[source, target] = Gate(asyncio.Event())
            gate.opened.set()
        return gate

    async def _carry(self, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A call to `target`, from its first byte to its end."""
        try:
            first, source = await _hello(reader)
            there, back = self._gate(source, target), self._gate(target, source)
            # Making a connection takes packets in both directions.
            await there.wait_passed()
            await back.wait_passed()
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.targets[target], limit=READ_BYTES)
        except (OSError, FrameError, EOFError):
            writer.transport.abort()
            return
        try:
            far_writer.write(first)
            await asyncio.gather(_pump(reader, far_writer, there), _pump(far_reader, writer, back))
        finally:
            writer.transport.abort()
            far_writer.transport.abort()

    def _on_call(self, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._carry(target, reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)


@asynccontextmanager
async def run_links(ports: Mapping[str, int], targets: Mapping[str, int]) -> AsyncIterator[Links]:
    """Proxies of all nodes, for as long as the `with` lasts."""
    links = Links(dict(ports), dict(targets))
    servers = []
    try:
        for name, port in ports.items():

            def on_call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str = name) -> None:
                links._on_call(name, reader, writer)

            servers.append(await asyncio.start_server(on_call, "127.0.0.1", port, limit=READ_BYTES))
        yield links
    finally:
        for server in servers:
            server.close()
        for task in links._connections:
            task.cancel()
        await asyncio.gather(*links._connections, return_exceptions=True)


async def _hello(reader: asyncio.StreamReader) -> tuple[bytes, str]:
    """(all bytes read so far, who calls)."""
    frames, read = FrameReader(HELLO_BYTES_MAX), b""
    while data := await reader.read(READ_BYTES):
        read += data
        for kind, _, body in frames.feed(data):
            if kind != Kind.HELLO:
                raise FrameError(f"the first frame is of kind {kind}")
            return read, decode_body(Kind.HELLO, body, Hello).name
    raise EOFError


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: Gate) -> None:
    with suppress(OSError):
        while data := await reader.read(READ_BYTES):
            await gate.wait_passed()
            writer.write(data)
            await writer.drain()
    # The end of a connection travels on the link, too.
    await gate.wait_passed()
    with suppress(OSError):
        writer.close()


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody listens on, below those that the kernel hands to callers: a node that is down keeps its own."""
    found: list[int] = []
    rng = random.SystemRandom()
    while len(found) < count:
        port = rng.randrange(*PORTS)
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found
