"""The published cron vectors through the HTTP API: `POST /v1/schedules:preview` with `after`, refusals included."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from wheelsched.client import AsyncClient
from wheelsched.core.errors import InvalidSchedule
from wheelsched.testing import open_test_node

VECTORS = [json.loads(line) for line in (Path(__file__).parents[1] / "vectors" / "cron.jsonl").read_text(encoding="ascii").splitlines()]
RUNS_MAX = 100  # of one preview


@pytest.fixture
async def client() -> AsyncIterator[AsyncClient]:
    async with open_test_node(serve=True) as node, AsyncClient(node.url) as client:
        yield client


async def _previewed(client: AsyncClient, vector: dict[str, Any]) -> list[str]:
    wanted = vector["expect"]
    runs: list[str] = []
    after = vector["after"]
    while len(runs) < len(wanted):
        answer = await client.preview_schedule(
            {"cron": vector["expr"], "time_zone": vector["tz"]}, after=after, count=min(RUNS_MAX, len(wanted) - len(runs))
        )
        runs += answer["next_runs"]
        after = runs[-1]
    return runs


async def test_previews_are_those_of_the_vectors(client: AsyncClient) -> None:
    differing = []
    for vector in VECTORS:
        if vector.get("error"):
            continue
        if await _previewed(client, vector) != vector["expect"]:
            differing.append(vector["id"])
    assert differing == []


async def test_what_the_vectors_refuse_is_refused(client: AsyncClient) -> None:
    refused = [vector for vector in VECTORS if vector.get("error")]
    assert len(refused) > 50
    for vector in refused:
        with pytest.raises(InvalidSchedule) as caught:
            await client.preview_schedule({"cron": vector["expr"], "time_zone": vector["tz"]}, count=1)
        assert caught.value.errors and caught.value.errors[0]["pointer"] in ("/cron", "/time_zone"), vector["id"]


async def test_a_preview_ends_where_instants_can_no_longer_be_written(client: AsyncClient) -> None:
    answer = await client.preview_schedule({"cron": "0 0 29 2 *", "time_zone": "Pacific/Apia"}, after="9890-01-01T00:00:00Z", count=100)
    assert 0 < len(answer["next_runs"]) < 100
