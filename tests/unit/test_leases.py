"""Lease lengths: the claim's, a heartbeat's, and what is on record."""

from __future__ import annotations

import pytest

from wheelsched.core.errors import StaleLease
from wheelsched.testing import open_test_node


async def test_a_heartbeat_that_names_no_length_gets_the_claims() -> None:
    async with open_test_node() as node:
        await node.create(initial_backoff_s=0)
        (claimed,) = await node.claim(lease_s=30)
        await node.heartbeat(claimed, lease_s=600)
        beat = await node.heartbeat(claimed)
        assert beat.lease_expires_at_ms == node.now_ms + 30_000
        await node.advance(s=30)
        with pytest.raises(StaleLease):
            await node.heartbeat(claimed)


async def test_only_a_length_beyond_the_one_on_record_goes_through_the_log() -> None:
    async with open_test_node() as node:
        await node.create()
        (claimed,) = await node.claim(lease_s=30)
        entries = node.node.status()["log"]["entries"]
        for lease_s in (None, 10, 30, 29):
            await node.heartbeat(claimed, lease_s=lease_s)
        assert node.node.status()["log"]["entries"] == entries
        await node.heartbeat(claimed, lease_s=31)
        assert node.node.status()["log"]["entries"] == entries + 1
