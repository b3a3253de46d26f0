"""The pytest plugin, named by the entry point `pytest11`: fixtures for tests of code that uses wheelsched.

It is loaded by every pytest of an environment that has wheelsched, so it imports next to nothing by itself, and offers nothing where
pytest-asyncio is missing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wheelsched.client import AsyncClient
    from wheelsched.testing.node import TestNode

try:
    import pytest_asyncio
except ImportError:
    pass
else:

    @pytest_asyncio.fixture
    async def wheelsched_node() -> AsyncIterator[TestNode]:
        """A node in memory on a virtual clock that answers HTTP at `wheelsched_node.url`."""
        from wheelsched.testing.node import open_test_node

        async with open_test_node(serve=True) as node:
            yield node

    @pytest_asyncio.fixture
    async def wheelsched_client(wheelsched_node: TestNode) -> AsyncIterator[AsyncClient]:
        """An asynchronous client of `wheelsched_node`."""
        from wheelsched.client import AsyncClient

        async with AsyncClient(wheelsched_node.url) as client:
            yield client
