"""How a node speaks to the others of its groups: what the driver asks of the transport, which sits above it in `cluster/`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from wheelsched.raft import AnyMessage


class Peers(Protocol):
    """Node ids are raft ids. What arrives from others is handed to `RaftReplicas.on_messages` and `RaftReplicas.take_snapshot`."""

    def send(self, node: int, messages: Sequence[tuple[int, AnyMessage]]) -> None:
        """Send (group, message) pairs, in this order if they arrive at all. Never waits; drops what cannot leave soon."""
        ...

    def send_snapshot(self, node: int, group: int, snapshot_id: int, chunks: AsyncIterator[bytes]) -> asyncio.Future[bool]:
        """Move a group's state beside the messages. The future always ends: whether the peer has it installed."""
        ...
