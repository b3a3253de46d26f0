"""Whether the answer to a claim reached its worker: the rule of API.md, "Hung up", in terms of TCP.

Jobs that were claimed for a client belong to it unless it closed before the answer was sent, or reset before it read it. What a
server sees of that:

1. While the claim waits: end of file or a reset. The connection cancels the handler, and `NodeFace.claim` gives back.
2. When the answer is written: a transport that is closing or gone, or that loses the connection while the answer still waits to be
   sent. Given back by the connection.
3. After the write, a reset: `connection_lost` with an exception. The kernel of a client that died or closed with the answer unread
   sends one (RFC 1122, 4.2.2.13), and so does SO_LINGER 0.
4. After the write, end of file. Either the client read the answer and closed, and has its jobs; or it had closed already when the
   answer arrived, and its kernel answers that with a reset a moment later. So the end of file is not believed at once: the connection
   stays open for `JUDGE_AFTER_S`, and then the state of the socket tells the two apart: CLOSE_WAIT, or CLOSE after a reset.

A reset long after the write says nothing about the answer (a gateway that forgot an idle connection, a worker that died at work):
within `READ_WITHIN_S` it does. Giving back a job that somebody works on is safe, for its token is fenced off, but wasteful; keeping
one that nobody has costs a lease. The next request on the connection ends the watch.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Final, Protocol

from wheelsched.node.face import ClaimedJob

READ_WITHIN_S: Final = 5.0
# A reset answers within a round trip; this is one to the other side of the world.
JUDGE_AFTER_S: Final = 0.25

# State of a TCP connection after a reset, the first byte of `struct tcp_info` (Linux, include/net/tcp_states.h).
_TCP_CLOSE: Final = 7
_TCP_INFO: Final[int | None] = getattr(socket, "TCP_INFO", None)


class GivesBack(Protocol):
    def give_back(self, jobs: Sequence[ClaimedJob]) -> None: ...


class HandedOut:
    """The jobs of the last answer on one connection, until it is known that they arrived. Give back at most once."""

    __slots__ = ("_at_s", "_jobs", "_node")

    def __init__(self, node: GivesBack) -> None:
        self._node = node
        self._jobs: Sequence[ClaimedJob] = ()
        self._at_s = 0.0

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def written(self, jobs: Sequence[ClaimedJob], now_s: float) -> None:
        """Their answer was handed to the transport at `now_s` (the loop's time)."""
        self._jobs, self._at_s = jobs, now_s

    def arrived(self) -> None:
        """The client went on: it has them."""
        self._jobs = ()

    def lost(self) -> None:
        """The answer was not sent or not read."""
        jobs, self._jobs = self._jobs, ()
        if jobs:
            self._node.give_back(jobs)

    def on_reset(self, now_s: float) -> None:
        """The connection was reset."""
        if now_s - self._at_s <= READ_WITHIN_S:
            self.lost()
        self._jobs = ()


def was_reset(transport: asyncio.Transport | None) -> bool:
    """Whether a reset came in after the end of file, where nobody reads any more. False where the system does not tell."""
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is None or _TCP_INFO is None:
        return False
    try:
        return bytes(sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1))[0] == _TCP_CLOSE
    except (OSError, IndexError):
        return False
