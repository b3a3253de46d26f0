"""Just enough of the HTTP contract for the SDK's tests: jobs, claims, attempts, on loopback, in a thread of its own.

A test blocks its worker's loop and its worker's heartbeats at will, so the server shares neither with it. Every change notifies
one condition: tests wait for what they are about (`wait`), never for time. Faults are scripted by path (`script`).
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
from aiohttp import web

AT = "2026-01-03T04:05:06.250Z"
WAIT_S = 20.0


@dataclass
class FakeJob:
    job_id: str
    queue: str
    payload: bytes
    body: dict[str, Any] = field(default_factory=dict)
    status: str = "QUEUED"
    attempt: int = 0
    token: str = ""
    lease_s: float = 45.0
    lease_ends_s: float = 0.0
    cancel_requested: bool = False
    reports: list[dict[str, Any]] = field(default_factory=list)
    progress: list[Any] = field(default_factory=list)
    heartbeats: int = 0
    expired: int = 0
    timeout_s: float | None = None


class Fault:
    """What happens instead of an answer. `then`: first do what was asked."""

    def __init__(self, status: int = 0, *, code: str = "", headers: dict[str, str] | None = None, then: bool = False) -> None:
        self.status = status  # 0: the connection is cut
        self.code = code
        self.headers = headers or {}
        self.then = then


class FakeServer:
    """`with FakeServer() as server:` listens on `server.url`."""

    def __init__(self) -> None:
        self.jobs: dict[str, FakeJob] = {}
        self.keys: dict[str, str] = {}
        self.requests: list[tuple[str, str, bytes]] = []
        self.queries: list[list[tuple[str, str]]] = []
        self.headers: list[dict[str, str]] = []
        self.hung_up = 0
        self.polls = 0
        self.released: list[str] = []
        self.payload_bytes_max = 64 * 1024
        self._scripts: dict[str, deque[Fault]] = defaultdict(deque)
        self._always: dict[str, Fault] = {}
        self.changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._news: asyncio.Condition | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="fake server", daemon=True)
        self.url = ""

    # Life

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        runner = self._loop.run_until_complete(self._start())
        self._started.set()
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(runner.cleanup())
            self._loop.close()

    async def _start(self) -> web.AppRunner:
        self._news = asyncio.Condition()
        app = web.Application(middlewares=[self._faults], client_max_size=64 * 1024 * 1024)
        app.router.add_post("/v1/jobs", self._create)
        app.router.add_post("/v1/jobs:batch", self._create_batch)
        app.router.add_get("/v1/jobs", self._list)
        app.router.add_get("/v1/jobs/{job_id}", self._get)
        app.router.add_patch("/v1/jobs/{job_id}", self._echo_job)
        app.router.add_delete("/v1/jobs/{job_id}", self._cancel)
        app.router.add_post("/v1/queues/{queue}:claim", self._claim)
        app.router.add_post("/v1/claims", self._claim)
        app.router.add_post("/v1/queues/{queue}/dead-letters:redrive", self._redrive_all)
        app.router.add_get("/v1/queues/{queue}", self._queue)
        app.router.add_post("/v1/attempts:heartbeat", self._heartbeats)
        app.router.add_post("/v1/attempts:complete", self._completes)
        app.router.add_post("/v1/attempts/{token}:heartbeat", self._heartbeat)
        app.router.add_post("/v1/attempts/{token}:complete", self._complete)
        app.router.add_post("/v1/attempts/{token}:release", self._release)
        app.router.add_get("/v1/clock", self._clock)
        app.router.add_get("/readyz", self._ready)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    # For tests, from their thread

    def script(self, path: str, *faults: Fault) -> None:
        """The next calls whose path ends with `path` meet these faults, in order."""
        self._scripts[path].extend(faults)

    def always(self, path: str, fault: Fault | None) -> None:
        """Every call whose path ends with `path` meets this fault, until it is None."""
        if fault is None:
            self._always.pop(path, None)
        else:
            self._always[path] = fault

    def add(self, queue: str, payload: Any = None, *, timeout_s: float | None = None) -> FakeJob:
        """A job that is ready."""
        raw = payload if isinstance(payload, bytes) else json.dumps(payload).encode()

        async def add() -> FakeJob:
            job = self._new_job(queue, raw)
            job.timeout_s = timeout_s
            await self._changed()
            return job

        return asyncio.run_coroutine_threadsafe(add(), self._loop).result(WAIT_S)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Return when `condition` holds; it is looked at after every change."""
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S), f"waited {WAIT_S:g} s for: {what}"

    def wait_report(self, job: FakeJob) -> dict[str, Any]:
        """The first outcome reported for the job."""
        self.wait(lambda: bool(job.reports), f"a report for {job.job_id}")
        return job.reports[0]

    def take_away(self, job: FakeJob) -> None:
        """The lease is over and somebody else has the job."""
        job.token = f"att_other_{job.job_id}"
        job.lease_ends_s = time.monotonic() + 3_600
        job.attempt += 1

    def request_cancel(self, job: FakeJob) -> None:
        job.cancel_requested = True

    def count(self, path: str) -> int:
        return sum(1 for _method, seen, _body in self.requests if seen.endswith(path))

    def bodies(self, path: str) -> list[Any]:
        return [json.loads(body) for _method, seen, body in self.requests if seen.endswith(path)]

    # Inside

    async def _changed(self) -> None:
        assert self._news is not None
        async with self._news:
            self._news.notify_all()
        with self.changed:
            self.changed.notify_all()

    @web.middleware
    async def _faults(self, request: web.Request, handler: Any) -> web.StreamResponse:
        body = await request.read()
        self.requests.append((request.method, request.raw_path.partition("?")[0], body))
        self.queries.append(list(request.query.items()))
        self.headers.append(dict(request.headers))
        await self._changed()
        for path, faults in self._scripts.items():
            if request.path.endswith(path) and faults:
                return await self._fault(faults.popleft(), request, handler)
        for path, fault in self._always.items():
            if request.path.endswith(path):
                return await self._fault(fault, request, handler)
        response: web.StreamResponse = await handler(request)
        return response

    async def _fault(self, fault: Fault, request: web.Request, handler: Any) -> web.StreamResponse:
        if fault.then:
            await handler(request)
        if fault.status == 0:
            assert request.transport is not None
            request.transport.close()
            raise asyncio.CancelledError
        return problem(fault.status, fault.code, headers=fault.headers)

    def _new_job(self, queue: str, payload: bytes, body: dict[str, Any] | None = None) -> FakeJob:
        job = FakeJob(f"job_{len(self.jobs):06}", queue, payload, body or {})
        self.jobs[job.job_id] = job
        return job

    def _created(self, body: dict[str, Any], raw: dict[str, msgspec.Raw], key: str | None) -> tuple[int, FakeJob]:
        if key is not None and key in self.keys:
            return 200, self.jobs[self.keys[key]]
        job = self._new_job(body["queue"], bytes(raw.get("payload", b"null")), body)
        if key is not None:
            self.keys[key] = job.job_id
        return 201, job

    async def _create(self, request: web.Request) -> web.Response:
        raw = await request.read()
        status, job = self._created(json.loads(raw), _members(raw), request.headers.get("Idempotency-Key"))
        await self._changed()
        return answer(render(job), status=status)

    async def _create_batch(self, request: web.Request) -> web.Response:
        items = msgspec.json.decode(await request.read(), type=dict[str, msgspec.Raw])
        results = []
        for item in msgspec.json.decode(items["jobs"], type=list[msgspec.Raw]):
            body = json.loads(bytes(item))
            if (faults := self._scripts[f"item {body['queue']}"]) and (fault := faults.popleft()):
                results.append(b'{"status":%d,"problem":%b}' % (fault.status, json.dumps({"code": fault.code}).encode()))
                continue
            status, job = self._created(body, _members(bytes(item)), body.get("idempotency_key"))
            results.append(b'{"status":%d,"job":%b}' % (status, render(job)))
        await self._changed()
        return answer(b'{"results":[' + b",".join(results) + b"]}")

    async def _get(self, request: web.Request) -> web.Response:
        job = self.jobs.get(request.match_info["job_id"])
        return problem(404, "not-found") if job is None else answer(render(job))

    async def _echo_job(self, request: web.Request) -> web.Response:
        job = self.jobs[request.match_info["job_id"]]
        job.body = json.loads(await request.read())
        return answer(render(job))

    async def _cancel(self, request: web.Request) -> web.Response:
        job = self.jobs[request.match_info["job_id"]]
        job.status = "CANCELLED"
        return answer(render(job))

    async def _list(self, request: web.Request) -> web.Response:
        wanted = [job for job in self.jobs.values() if request.query.get("queue") in (None, job.queue)]
        start, limit = int(request.query.get("cursor", "0")), int(request.query.get("limit", "100"))
        cursor = f'"{start + limit}"' if start + limit < len(wanted) else "null"
        page = b",".join(render(job) for job in wanted[start : start + limit])
        return answer(b'{"jobs":[%b],"next_cursor":%b}' % (page, cursor.encode()))

    async def _queue(self, request: web.Request) -> web.Response:
        return answer(json.dumps({"name": request.match_info["queue"], "depth": {"QUEUED": {"default": 2}}}).encode())

    async def _redrive_all(self, request: web.Request) -> web.Response:
        return answer(b'{"redriven":3}')

    async def _clock(self, request: web.Request) -> web.Response:
        return answer(b'{"now":"%b"}' % AT.encode())

    async def _ready(self, request: web.Request) -> web.Response:
        return answer(b"{}")

    async def _claim(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        queues = body.get("queues") or [request.match_info["queue"]]
        deadline_s = time.monotonic() + body.get("wait_s", 0)
        assert self._news is not None
        try:
            while not (ready := self._ready_jobs(queues)) and (left_s := deadline_s - time.monotonic()) > 0:
                self.polls += 1
                await self._changed()
                async with self._news:
                    await asyncio.wait_for(self._news.wait(), left_s)
        except TimeoutError:
            ready = []
        except asyncio.CancelledError:
            self.hung_up += 1
            await asyncio.shield(self._changed())
            raise
        chosen = ready[: body["max"]]
        for job in chosen:
            job.status, job.attempt, job.lease_s = "RUNNING", job.attempt + 1, body.get("lease_s", 45.0)
            job.token, job.lease_ends_s = f"att_{job.job_id}_{job.attempt}", time.monotonic() + job.lease_s
        await self._changed()
        return answer(b'{"jobs":[' + b",".join(map(claimed, chosen)) + b"]}")

    def _ready_jobs(self, queues: list[str]) -> list[FakeJob]:
        for job in self.jobs.values():
            self._expire(job)
        return [job for queue in queues for job in self.jobs.values() if job.status == "QUEUED" and job.queue == queue]

    def _expire(self, job: FakeJob) -> None:
        if job.status == "RUNNING" and time.monotonic() > job.lease_ends_s:
            job.status, job.token = "QUEUED", ""
            job.expired += 1

    def _holder(self, token: str) -> FakeJob | None:
        for job in self.jobs.values():
            self._expire(job)
            if job.token == token:
                return job
        return None

    def _beat(self, token: str, body: dict[str, Any]) -> tuple[int, bytes]:
        job = self._holder(token)
        if job is None or job.status != "RUNNING":
            return 409, b""
        job.heartbeats += 1
        job.lease_ends_s = time.monotonic() + body.get("lease_s", job.lease_s)
        if "progress" in body:
            job.progress.append(body["progress"])
        asked = b"true" if job.cancel_requested else b"false"
        return 200, b'"lease_expires_at":"%b","cancel_requested":%b' % (AT.encode(), asked)

    def _end(self, token: str, body: dict[str, Any]) -> tuple[int, bytes]:
        job = self._holder(token)
        if job is None or job.status not in ("RUNNING", "SUCCEEDED", "RETRYING", "DEAD", "CANCELLED"):
            return 409, b""
        if len(json.dumps(body.get("result"))) > self.payload_bytes_max:
            return 413, b""
        job.reports.append(body)
        job.status = {"succeeded": "SUCCEEDED", "retryable_failure": "RETRYING", "fatal_failure": "DEAD"}.get(body["outcome"], "CANCELLED")
        return 200, b'"job_id":"%b","job_status":"%b","status":"%b"' % (
            job.job_id.encode(), job.status.encode(), job.status.encode(),
        )  # fmt: skip

    async def _batch(self, request: web.Request, member: str, act: Callable[..., tuple[int, bytes]]) -> web.Response:
        results = []
        for item in json.loads(await request.read())[member]:
            status, members = act(item["token"], item)
            if status == 200:
                results.append(b'{"status":200,' + members.partition(b',"status"')[0] + b"}")
            else:
                code = "stale-lease" if status == 409 else "payload-too-large"
                results.append(b'{"status":%d,"problem":{"code":"%b","status":%d}}' % (status, code.encode(), status))
        await self._changed()
        return answer(b'{"results":[' + b",".join(results) + b"]}")

    async def _heartbeats(self, request: web.Request) -> web.Response:
        return await self._batch(request, "heartbeats", self._beat)

    async def _completes(self, request: web.Request) -> web.Response:
        return await self._batch(request, "completions", self._end)

    async def _one(self, request: web.Request, act: Callable[..., tuple[int, bytes]]) -> web.Response:
        status, members = act(request.match_info["token"], json.loads(await request.read()))
        await self._changed()
        return answer(b"{" + members + b"}") if status == 200 else problem(status, "stale-lease")

    async def _heartbeat(self, request: web.Request) -> web.Response:
        return await self._one(request, self._beat)

    async def _complete(self, request: web.Request) -> web.Response:
        return await self._one(request, self._end)

    async def _release(self, request: web.Request) -> web.Response:
        job = self._holder(request.match_info["token"])
        if job is None or job.status != "RUNNING":
            return problem(409, "stale-lease")
        job.status, job.attempt, job.token = "QUEUED", job.attempt - 1, ""
        self.released.append(job.job_id)
        await self._changed()
        return answer(b'{"job_id":"%b","status":"QUEUED"}' % job.job_id.encode())


def _members(raw: bytes) -> dict[str, msgspec.Raw]:
    return msgspec.json.decode(raw, type=dict[str, msgspec.Raw])


def answer(body: bytes, *, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


def problem(status: int, code: str, *, headers: dict[str, str] | None = None) -> web.Response:
    body = json.dumps({"code": code, "status": status, "detail": f"scripted {status}"}).encode()
    return web.Response(body=body, status=status, content_type="application/problem+json", headers=headers)


def render(job: FakeJob) -> bytes:
    head = json.dumps({"job_id": job.job_id, "queue": job.queue, "status": job.status, "fire_at": AT, "later_field": 1})
    return head[:-1].encode() + b',"payload":' + job.payload + b"}"


def claimed(job: FakeJob) -> bytes:
    head = {
        "job_id": job.job_id, "queue": job.queue, "attempt": job.attempt, "lease_token": job.token, "lease_expires_at": AT,
        "idempotency_key": f"{job.job_id}@{AT}", "fencing_token": job.attempt + 2**60, "fire_at": AT, "max_attempts": 6,
        "labels": {"a": "b"}, "timeout_s": job.timeout_s if job.timeout_s is not None else 3600,
    }  # fmt: skip
    return json.dumps(head)[:-1].encode() + b',"payload":' + job.payload + b"}"
