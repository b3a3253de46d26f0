"""The pytest plugin, named by the entry point `pytest11`: fixtures for tests of code that uses wheelsched.

They are plain asynchronous generators driven by hand, so that they work with pytest-asyncio in any mode and with any loop scope.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from wheelsched.client import AsyncClient
from wheelsched.testing.node import TestNode, open_test_node


@pytest_asyncio.fixture
async def wheelsched_node() -> AsyncIterator[TestNode]:
    """A node in memory on a virtual clock that answers HTTP at `wheelsched_node.url`."""
    async with open_test_node(serve=True) as node:
        yield node


@pytest_asyncio.fixture
async def wheelsched_client(wheelsched_node: TestNode) -> AsyncIterator[AsyncClient]:
    """An asynchronous client of `wheelsched_node`."""
    async with AsyncClient(wheelsched_node.url) as client:
        yield client
