"""A snapshot that takes long: what is written meanwhile has to be there when it has arrived, else the next one is needed, and the next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from test_raft_replicas import SMALL, Cluster, jobs_of

from wheelsched.raft import PeerState
from wheelsched.testing.simulate_node import quiet_logs


async def test_the_log_written_during_a_transfer_is_kept_until_the_node_has_it() -> None:
    """More than the log keeps for a peer that lags is written while the snapshot is on its way, and some more right after."""
    quiet_logs()
    async with Cluster(3, settings=SMALL) as cluster:
        away = cluster.others(cluster.leader)[0]
        await away.crash(0.0)
        for number in range(60):
            await cluster.create(number)
        may_go = asyncio.Event()
        sent: list[asyncio.Future[bool]] = []
        send_snapshot = cluster.network.send_snapshot

        def stall(_sent: asyncio.Future[bool]) -> None:
            away.stalled_ms = 1_500  # what it is sent next it acknowledges late

        def send_slowly(sender: int, to: int, group: int, snapshot_id: int, chunks: AsyncIterator[bytes]) -> asyncio.Future[bool]:
            async def held() -> AsyncIterator[bytes]:
                async for chunk in chunks:
                    await may_go.wait()
                    yield chunk

            sent.append(send_snapshot(sender, to, group, snapshot_id, held()))
            sent[-1].add_done_callback(stall)
            return sent[-1]

        cluster.network.send_snapshot = send_slowly  # type: ignore[method-assign]
        cluster._restart(away)
        await cluster.until(lambda: sent)
        for number in range(60, 160):
            await cluster.create(number)
        may_go.set()
        await cluster.until(sent[0].done)
        for number in range(160, 180):
            await cluster.create(number)
        status = cluster.replicas.status(0)
        assert status.last_index - status.first_index > SMALL.keep_entries
        await cluster.until(lambda: jobs_of(away) == set(range(180)))
        assert len(sent) == 1
        for number in range(180, 190):
            await cluster.create(number)
        await cluster.advance(2_000)
        status = cluster.replicas.status(0)
        assert status.peers[away.node_id].state is PeerState.REPLICATE
        assert status.last_index - status.first_index <= SMALL.keep_entries, "nobody needs it any more"
