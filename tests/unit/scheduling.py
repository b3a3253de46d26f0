"""Calls of the schedule API on a real node in memory, on a virtual clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fake_node import Answer, Serving, serving

from wheelsched.api.times import format_instant, parse_instant
from wheelsched.testing import TestNode, open_test_node

START = "2026-01-05T10:00:00Z"
TEMPLATE = {"queue": "reports"}


class Scheduling:
    """`node` is the node, `http` its front; instants are RFC 3339."""

    def __init__(self, node: TestNode, http: Serving) -> None:
        self.node, self.http = node, http

    @property
    def now(self) -> str:
        return format_instant(self.node.now_ms)

    async def to(self, instant: str) -> None:
        """Let time pass up to an instant."""
        await self.node.advance(to=parse_instant(instant))

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        return await self.http.call(method, path, body, **headers)

    async def good(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """The document of a 2xx answer; None where it has no body."""
        answer = await self.call(method, path, body, **headers)
        assert 200 <= answer.status < 300, (answer.status, answer.body)
        return answer.json if answer.body else None

    async def refused(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, str, list[str]]:
        """(status, code, pointers) of a refusal."""
        answer = await self.call(method, path, body, **headers)
        assert answer.status >= 400, answer.body
        assert answer.headers["content-type"] == "application/problem+json"
        return answer.status, answer.json["code"], [fault["pointer"] for fault in answer.json.get("errors", ())]

    async def create(self, name: str, /, **fields: Any) -> Any:
        return await self.good("POST", "/v1/schedules", {"name": name, "job_template": TEMPLATE} | fields)

    async def put(self, name: str, /, **fields: Any) -> Any:
        return await self.good("PUT", f"/v1/schedules/{name}", {"job_template": TEMPLATE} | fields)

    async def patch(self, name: str, /, **fields: Any) -> Any:
        return await self.good("PATCH", f"/v1/schedules/{name}", fields)

    async def get(self, name: str) -> Any:
        return await self.good("GET", f"/v1/schedules/{name}")

    async def preview(self, after: str, count: int = 5, **spec: Any) -> list[str]:
        found = await self.good("POST", "/v1/schedules:preview", {**spec, "after": after, "count": count})
        return list(found["next_runs"])

    async def runs(self, name: str) -> list[Any]:
        """All runs, oldest first, what waits included."""
        page = await self.good("GET", f"/v1/schedules/{name}/runs?limit=1000")
        assert page["next_cursor"] is None
        return list(reversed(page["jobs"]))

    async def fired(self, name: str) -> list[str]:
        """The instants at which runs became due, oldest first."""
        return [job["fire_at"] for job in await self.runs(name) if job["status"] not in ("SCHEDULED", "SKIPPED")]

    async def work(self, queue: str = "reports") -> list[Any]:
        """Claim what is ready, and succeed."""
        jobs = list(await self.http.claim(queue, max=100))
        for job in jobs:
            await self.good("POST", f"/v1/attempts/{job['lease_token']}:complete", {"outcome": "succeeded"})
        return jobs


@asynccontextmanager
async def scheduling(start: str = START, **options: Any) -> AsyncIterator[Scheduling]:
    async with open_test_node(start_ms=parse_instant(start), **options) as node, serving(node.node) as http:
        yield Scheduling(node, http)
