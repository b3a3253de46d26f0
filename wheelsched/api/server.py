"""The listening socket: how many connections, how long each, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Final

import structlog

from wheelsched.api.app import Api
from wheelsched.api.connection import REFUSED_S, Connection, http_date
from wheelsched.api.counters import Statistics
from wheelsched.node.face import ClaimedJob, NodeFace

log = structlog.get_logger(__name__)

_SWEEP_S: Final = 1.0
_BACKLOG: Final = 4_096
# Connections beyond the bound that wait for their 503; past these they are dropped unanswered.
_REFUSED_MAX: Final = 512
_CLOSE_S: Final = 5.0
# A call may be on its way on a connection that looks idle. Closed under it, its client could not tell whether it was done.
_LAST_CALLS_S: Final = 0.25


async def serve(node: NodeFace, *, host: str, port: int) -> Server:
    """Listen; `port` 0 picks a free one. The caller ends it: `drain`, then `close`."""
    server = Server(node)
    await server._listen(host, port)
    return server


class Server:
    """Serves one node's API on one socket. `host`, `port`: where it listens."""

    def __init__(self, node: NodeFace) -> None:
        self.node = node
        self.api = Api(node)
        self.connections_max = node.settings.http.connections_max
        self.draining = False
        self.host, self.port = "", 0
        self._loop = asyncio.get_running_loop()
        self._listener: asyncio.Server | None = None
        self._connections: set[Connection] = set()
        self._without = asyncio.Event()
        self._without.set()
        self._sweep_handle: asyncio.TimerHandle | None = None
        self._date_s = -1
        self._date_line = b""

    async def _listen(self, host: str, port: int) -> None:
        self._listener = await self._loop.create_server(lambda: Connection(self, self._loop), host, port, backlog=_BACKLOG)
        address = self._listener.sockets[0].getsockname()
        self.host, self.port = address[0], address[1]
        self._sweep_handle = self._loop.call_later(_SWEEP_S, self._sweep)
        log.info("http_listening", host=self.host, port=self.port)

    def statistics(self) -> Statistics:
        return self.api.counters.statistics()

    async def drain(self, timeout_s: float) -> None:
        """Take no new connection, let waiting claims answer empty-handed and calls under way end, for at most `timeout_s`. Whoever calls
        on an open connection within a quarter of a second is still answered, and told that it was the last time."""
        self.draining = True
        if self._listener is not None:
            self._listener.close()
        self.api.end_polls()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(_LAST_CALLS_S, timeout_s)):
                await self.wait_without_connections()
        for connection in tuple(self._connections):
            if connection.is_idle:
                connection.close_now()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s - min(_LAST_CALLS_S, timeout_s)):
                await self.wait_without_connections()

    async def wait_without_connections(self) -> None:
        """Return when no connection is open."""
        await self._without.wait()

    async def close(self) -> None:
        """End everything now. Calls under way are cancelled."""
        self.draining = True
        if self._sweep_handle is not None:
            self._sweep_handle.cancel()
        if self._listener is not None:
            self._listener.close()
        tasks = [connection.task for connection in self._connections if connection.task is not None]
        for connection in tuple(self._connections):
            connection.close_now()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_S)

    # --- called by connections --------------------------------------------------------------------------------------------------

    def on_made(self, connection: Connection) -> bool:
        """Whether it is served at all."""
        open_count = len(self._connections)
        counters = self.api.counters
        if open_count >= self.connections_max:
            counters.refused_connections += 1
            if open_count >= self.connections_max + _REFUSED_MAX:
                assert connection.transport is not None
                connection.transport.abort()
                return False
            connection.is_refused = True
            connection.deadline_s = self._loop.time() + REFUSED_S
        self._connections.add(connection)
        counters.connections = open_count + 1
        self._without.clear()
        return True

    def give_back(self, jobs: Sequence[ClaimedJob]) -> None:
        """The answer with these jobs did not arrive."""
        self.api.counters.given_back += len(jobs)
        log.info("claim_given_back", job_count=len(jobs))
        self.node.give_back(jobs)

    def on_lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self.api.counters.connections = len(self._connections)
        if not self._connections:
            self._without.set()

    def date_line(self) -> bytes:
        """Written anew once a second."""
        now_s = self.node.clock.wall_ms() // 1000
        if now_s != self._date_s:
            self._date_s, self._date_line = now_s, http_date(now_s)
        return self._date_line

    def _sweep(self) -> None:
        # Once a second over all: cheaper than a timer handle a request, and no deadline here needs to be kept closer.
        now_s = self._loop.time()
        for connection in [item for item in self._connections if 0 < item.deadline_s < now_s]:
            connection.expire()
        self._sweep_handle = self._loop.call_later(_SWEEP_S, self._sweep)
