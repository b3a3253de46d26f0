"""Real nodes as processes, asked over HTTP. Sizes of the long tests come from the environment, so that one can run them larger:

E2E_CRASH_ROUNDS=200 E2E_HANGUP_ROUNDS=1000 E2E_WAITERS=1000 pytest tests/e2e
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from http_calls import Http

from wheelsched.testing.process import NodeProcess

MakeNode = Callable[..., NodeProcess]


def size(name: str, default: int) -> int:
    """How often or how many, as the environment says."""
    return int(os.environ.get(name) or default)


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[MakeNode]:
    """Makes nodes that are not started yet, each in a directory of its own; none outlives the test, none may log an error."""
    nodes: list[NodeProcess] = []

    def make(name: str = "n1", **options: Any) -> NodeProcess:
        node = NodeProcess(options.pop("data_dir", tmp_path / name), **options)
        nodes.append(node)
        return node

    yield make
    for node in nodes:
        node.kill()
    assert [fault for node in nodes for fault in node.log_faults()] == []


@pytest.fixture
def node(make_node: MakeNode) -> NodeProcess:
    """A node that answers."""
    node = make_node()
    node.start()
    return node


@pytest.fixture
def http(node: NodeProcess) -> Iterator[Http]:
    """Calls to `node`."""
    with Http(node.url) as http:
        yield http
