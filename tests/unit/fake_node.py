"""A small `NodeFace` in memory: one group, the real state machine, time that moves when told to; and a client for its server.

No wheel, no ready queues, no disk: a claim looks at every job. `before_propose` is awaited before each proposal and may fail or wait,
so that a test can hold up the log; `admission` is raised by `check_admission` while it is set.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from wheelsched.api import Server, serve
from wheelsched.core.errors import WheelschedError
from wheelsched.core.ids import new_job_id
from wheelsched.core.settings import Settings
from wheelsched.engine import GroupMachine, Transaction
from wheelsched.model import keys
from wheelsched.model.commands import (
    COMMAND_VERSION,
    AnyCommand,
    Claim,
    Complete,
    Entry,
    Expire,
    Extend,
    Fire,
    PauseQueue,
    PutQueue,
    Release,
    Reply,
)
from wheelsched.model.rows import (
    AttemptRow,
    GroupState,
    JobState,
    QueueSettings,
    decode_attempt,
    decode_done,
    decode_queue,
    decode_spec,
    decode_state,
    encode_row,
    is_final,
    split_job,
)
from wheelsched.model.states import LEASED, Outcome, Status, due_at_ms, status_of
from wheelsched.node.face import (
    ClaimedJob,
    HeartbeatReply,
    JobFilter,
    JobPage,
    JobRecord,
    QueueView,
    Readiness,
)
from wheelsched.runtime.clock import VirtualClock
from wheelsched.store.memory import MemoryStore

NOW_MS = 1_800_000_000_000


class FakeNode:
    def __init__(self, settings: Settings | None = None, *, virtual: bool = True) -> None:
        self.settings = settings or Settings()
        self.clock = VirtualClock(NOW_MS)
        self.rng = random.Random(7)
        self.clock_is_virtual = virtual
        self.admission: WheelschedError | None = None
        self.cluster: Any = None
        self.before_propose: Callable[[Sequence[AnyCommand]], Awaitable[None]] | None = None
        self.reasons: tuple[str, ...] = ()
        self.given_back: list[ClaimedJob] = []
        self.given_back_event = asyncio.Event()
        self.waiting = asyncio.Event()  # a claim began to wait
        self.cancelled_claims = 0
        self.proposals = 0
        self._store = MemoryStore()
        self._machine = GroupMachine(0)
        self._group_state = GroupState()
        self._leases: dict[bytes, tuple[int, bytes]] = {}  # job id -> (expires at ms, progress)
        self._waiters: list[asyncio.Future[None]] = []

    # --- the log ----------------------------------------------------------------------------------------------------------------

    def apply(self, commands: Sequence[AnyCommand]) -> list[Reply]:
        """One entry: the commands, and the Fire that follows them in a group that dispatches."""
        now_ms = self.clock.wall_ms()
        txn = Transaction(0, self._store)
        entry = Entry(COMMAND_VERSION, now_ms, [*commands, Fire(now_ms)])
        replies, _ = self._machine.apply(self._group_state, txn, entry)
        txn.finish()
        self._store.write(txn.writes, txn.ranges)
        self._fire_held(now_ms)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
        return replies[: len(commands)]

    def _fire_held(self, now_ms: int) -> None:
        held = [(state.job_id, state.version) for state in self._states() if state.held and due_at_ms(state) <= now_ms]
        if held:
            self.apply_quietly(Fire(now_ms, held))

    def apply_quietly(self, command: AnyCommand) -> None:
        txn = Transaction(0, self._store)
        self._machine.apply(self._group_state, txn, Entry(COMMAND_VERSION, self.clock.wall_ms(), [command]))
        txn.finish()
        self._store.write(txn.writes, txn.ranges)

    async def propose(self, command: AnyCommand) -> Reply:
        return (await self.propose_many([command]))[0]

    async def propose_many(self, commands: Sequence[AnyCommand]) -> list[Reply]:
        self.proposals += 1
        if self.before_propose is not None:
            await self.before_propose(commands)
        for command in commands:
            queue, tenant = getattr(command, "queue", ""), getattr(command, "tenant", "")
            if queue and self._queue_settings(tenant, queue) is None:
                self.apply_quietly(PutQueue(tenant, queue))
        return self.apply(commands)

    # --- reads ------------------------------------------------------------------------------------------------------------------

    def _states(self) -> list[JobState]:
        prefix = keys.group_prefix(0)
        rows = self._store.scan(keys.STATE, prefix, keys.prefix_end(prefix), 1_000_000)
        return [decode_state(row) for _, row in rows]

    def _state(self, job_id: bytes) -> JobState | None:
        row = self._store.get(keys.STATE, keys.state_key(0, job_id))
        return None if row is None else decode_state(row)

    def _record(self, state: JobState) -> JobRecord | None:
        if state.status == Status.DISCARDED:
            return None
        if is_final(state):
            row = self._store.get(keys.DONE, keys.done_key(0, state.tenant, state.queue, state.status, state.fire_at_ms, state.job_id))
            assert row is not None
            done = decode_done(row)
            spec, payload = split_job(done.job)
            return JobRecord(done.state, Status(state.status), decode_spec(spec), payload, done.error, done.result)
        row = self._store.get(keys.JOBS, keys.job_key(0, state.lane, state.fire_at_ms, state.job_id))
        assert row is not None
        spec, payload = split_job(row)
        error = next((row.error for _, row in reversed(self.rows(state.job_id)) if row.error), b"")
        progress = self._leases.get(state.job_id, (0, b""))[1] if state.status in LEASED else b""
        status = status_of(state, self._group_state.watermark_ms)
        return JobRecord(state, status, decode_spec(spec), payload, error, b"", progress)

    def rows(self, job_id: bytes) -> list[tuple[int, AttemptRow]]:
        prefix = keys.state_key(0, job_id)
        rows = self._store.scan(keys.ATTEMPTS, prefix, keys.prefix_end(prefix), 10_000)
        return [(keys.attempt_version(key), decode_attempt(row)) for key, row in rows]

    async def read_job(self, tenant: str, job_id: bytes) -> JobRecord | None:
        state = self._state(job_id)
        return None if state is None or state.tenant != tenant else self._record(state)

    async def read_attempts(self, tenant: str, job_id: bytes) -> tuple[JobRecord, list[tuple[int, AttemptRow]]] | None:
        record = await self.read_job(tenant, job_id)
        return None if record is None else (record, self.rows(job_id))

    async def list_jobs(self, wanted: JobFilter, *, cursor: bytes | None, limit: int) -> JobPage:
        found = []
        for state in self._states():
            record = self._record(state)
            if record is None or state.tenant != wanted.tenant or (wanted.queue and state.queue != wanted.queue):
                continue
            if wanted.statuses and record.status not in wanted.statuses:
                continue
            if wanted.schedule and (state.run is None or state.run.schedule != wanted.schedule):
                continue
            if any(record.spec.labels.get(key) != value for key, value in wanted.labels):
                continue
            if wanted.from_ms <= state.fire_at_ms < wanted.to_ms:
                found.append((keys.time_id(state.fire_at_ms, state.job_id), record))
        found.sort(key=lambda item: item[0])
        left = [item for item in found if cursor is None or item[0] > cursor]
        page = left[:limit]
        return JobPage([record for _, record in page], page[-1][0] if len(left) > limit else None)

    # --- claims and attempts ----------------------------------------------------------------------------------------------------

    def new_job_id(self) -> bytes:
        return new_job_id(self.clock.wall_ms(), self.rng)

    def check_admission(self, *, new_jobs: bool = True) -> None:
        if self.admission is not None:
            raise self.admission

    async def claim(
        self, tenant: str, queues: Sequence[str], *, jobs_max: int, lease_ms: int | None, wait_ms: int, worker: str
    ) -> list[ClaimedJob]:
        """`wait_ms` above 0 waits until something changes, however long: tests end it by a change or by hanging up."""
        while True:
            jobs = self._claim_now(tenant, queues, jobs_max, lease_ms, worker)
            if jobs or wait_ms == 0:
                return jobs
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            self.waiting.set()
            try:
                await waiter
            except asyncio.CancelledError:
                self.cancelled_claims += 1
                self.given_back_event.set()
                raise

    def _claim_now(self, tenant: str, queues: Sequence[str], jobs_max: int, lease_ms: int | None, worker: str) -> list[ClaimedJob]:
        ready = []
        for queue in queues:
            settings = self._queue_settings(tenant, queue) or QueueSettings()
            if settings.paused:
                continue
            found = [
                state for state in self._states()
                if state.queue == queue and state.tenant == tenant
                and status_of(state, self._group_state.watermark_ms) is Status.QUEUED
            ]  # fmt: skip
            ready += sorted(found, key=lambda state: (state.lane, state.priority, state.fire_at_ms))
        chosen = [(state.job_id, state.version) for state in ready[:jobs_max]]
        if not chosen:
            return []
        lease = lease_ms or (self._queue_settings(tenant, queues[0]) or QueueSettings()).lease_ms
        reply = self.apply([Claim(chosen, lease, worker)])[0]
        jobs = []
        for state in reply.states:
            if state is not None:
                self._leases[state.job_id] = (state.lease_expires_at_ms, b"")
                record = self._record(state)
                assert record is not None
                jobs.append(ClaimedJob(state, record.spec, record.payload))
        return jobs

    def give_back(self, jobs: Sequence[ClaimedJob]) -> None:
        self.given_back += jobs
        self.apply([Release(job.state.job_id, job.state.attempt, job.state.fencing) for job in jobs])
        self.given_back_event.set()

    async def heartbeat(self, job_id: bytes, attempt: int, fencing: int, *, lease_ms: int | None, progress: bytes | None) -> HeartbeatReply:
        state = self._state(job_id)
        if state is None or state.status not in LEASED or (state.attempt, state.fencing) != (attempt, fencing):
            return HeartbeatReply("stale-lease", f"attempt {attempt} is no longer the current one; claim again")
        length_ms = lease_ms or state.lease_ms
        if length_ms != state.lease_ms:
            await self.propose(Extend(job_id, attempt, fencing, length_ms))
        expires_ms = self.clock.wall_ms() + length_ms
        old = self._leases.get(job_id, (0, b""))[1]
        self._leases[job_id] = (expires_ms, old if progress is None else progress)
        return HeartbeatReply("", "", expires_ms, state.status == Status.CANCEL_REQUESTED)

    async def complete(
        self, job_id: bytes, attempt: int, fencing: int, *, outcome: int, error: bytes, result: bytes, retry_after_ms: int
    ) -> Reply:
        return (await self.complete_many([(job_id, attempt, fencing, outcome, error, result, retry_after_ms)]))[0]

    async def complete_many(self, completions: Sequence[tuple[bytes, int, int, int, bytes, bytes, int]]) -> list[Reply]:
        return await self.propose_many([
            Complete(job_id, attempt, fencing, outcome, self.rng.getrandbits(32), error, result, retry_after_ms)
            for job_id, attempt, fencing, outcome, error, result, retry_after_ms in completions
        ])  # fmt: skip

    # --- queues -----------------------------------------------------------------------------------------------------------------

    def _queue_settings(self, tenant: str, queue: str) -> QueueSettings | None:
        row = self._store.get(keys.META, keys.queue_row_key(tenant, queue))
        return None if row is None else decode_queue(row)

    async def queue_view(self, tenant: str, queue: str) -> QueueView | None:
        settings = self._queue_settings(tenant, queue)
        if settings is None:
            return None
        depth: dict[Status, list[int]] = {}
        for state in self._states():
            if state.tenant == tenant and state.queue == queue and state.status != Status.DISCARDED:
                depth.setdefault(status_of(state, self._group_state.watermark_ms), [0, 0, 0])[state.priority] += 1
        running = sum(depth.get(Status.RUNNING, ())) + sum(depth.get(Status.CANCEL_REQUESTED, ()))
        seen = {status: (counts[0], counts[1], counts[2]) for status, counts in depth.items()}
        return QueueView(tenant, queue, settings, seen, running, None, None, None)

    async def list_queues(self, tenant: str, *, after: str, limit: int) -> tuple[list[QueueView], str | None]:
        start = keys.queue_row_key(tenant, after)
        rows = self._store.scan(keys.META, start, b"", 10_000)
        names = [key.split(b"\0")[-1].decode() for key, _ in rows if key > start]
        views = [await self.queue_view(tenant, name) for name in names[:limit]]
        return [view for view in views if view is not None], names[limit - 1] if len(names) > limit else None

    async def put_queue(self, tenant: str, queue: str, settings: QueueSettings, *, actor: str) -> QueueView:
        self.apply_quietly(PutQueue(tenant, queue, encode_row(settings), actor))
        view = await self.queue_view(tenant, queue)
        assert view is not None
        return view

    async def pause_queue(self, tenant: str, queue: str, paused: bool, *, actor: str) -> QueueView:
        self.apply_quietly(PauseQueue(tenant, queue, paused, actor))
        view = await self.queue_view(tenant, queue)
        assert view is not None
        return view

    # --- time and operation -----------------------------------------------------------------------------------------------------

    async def advance_clock(self, to_ms: int) -> int:
        while True:
            wakes = [due_at_ms(state) for state in self._states() if state.status in (Status.SCHEDULED, Status.RETRYING)]
            wakes += [at_ms for job_id, (at_ms, _) in self._leases.items() if self._is_leased(job_id)]
            due = [at_ms for at_ms in wakes if self.clock.wall_ms() < at_ms <= to_ms]
            if not due:
                break
            self.clock.advance_to(min(due))
            self._expire()
        self.clock.advance_to(to_ms)
        self._expire()
        return self.clock.wall_ms()

    def _is_leased(self, job_id: bytes) -> bool:
        state = self._state(job_id)
        return state is not None and state.status in LEASED

    def _expire(self) -> None:
        commands: list[AnyCommand] = []
        for job_id, (expires_ms, _) in self._leases.items():
            state = self._state(job_id)
            if state is not None and state.status in LEASED and expires_ms <= self.clock.wall_ms():
                commands.append(Expire(job_id, state.attempt, state.fencing, Outcome.LEASE_EXPIRED, 0))
        self.apply(commands)

    def readiness(self) -> Readiness:
        return Readiness(not self.reasons, self.reasons)

    def status(self) -> dict[str, Any]:
        return {"node": self.settings.node.id}

    def render_metrics(self) -> tuple[bytes, str]:
        return b"# TYPE fake gauge\nfake 1\n", "text/plain; version=0.0.4; charset=utf-8"


# --- a client that hides nothing ------------------------------------------------------------------------------------------------


class Answer:
    """A response as it came: `headers` by lower-case name."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def pointers(self) -> list[str]:
        return [fault["pointer"] for fault in self.json["errors"]]


class Wire:
    """One connection, bytes in and out."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def request(self, method: str, path: str, body: bytes = b"", **headers: str) -> None:
        lines = [f"{method} {path} HTTP/1.1", "Host: test"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        if body:
            lines.append(f"Content-Length: {len(body)}")
        self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    async def answer(self, *, is_head: bool = False) -> Answer:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status_line, *lines = head.rstrip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        status = int(status_line.split()[1])
        if status == 100:
            return Answer(status, headers, b"")
        size = 0 if is_head or status == 204 else int(headers["content-length"])
        return Answer(status, headers, await self.reader.readexactly(size))

    async def end(self) -> bytes:
        """What comes until the server closes."""
        return await self.reader.read()

    def reset(self) -> None:
        """Close so that the other side sees a reset, not an end of file."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def close(self) -> None:
        self.writer.close()


class Serving:
    """A server over a node, and calls to it."""

    def __init__(self, node: Any, server: Server) -> None:
        self.node, self.server = node, server
        self._wires: list[Wire] = []

    async def wire(self) -> Wire:
        wire = Wire(*await asyncio.open_connection("127.0.0.1", self.server.port, limit=64 * 1024 * 1024))
        self._wires.append(wire)
        return wire

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """`body`: bytes go as they are, anything else as JSON."""
        wire = await self.wire()
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        wire.request(method, path, data, **({"Content_Type": "application/json"} | headers))
        answer = await wire.answer(is_head=method == "HEAD")
        wire.close()
        return answer

    async def create(self, **fields: Any) -> Any:
        answer = await self.call("POST", "/v1/jobs", {"queue": "mail"} | fields)
        assert answer.status == 201, answer.body
        return answer.json

    async def claim(self, queue: str = "mail", **fields: Any) -> Any:
        answer = await self.call("POST", f"/v1/queues/{queue}:claim", fields)
        assert answer.status == 200, answer.body
        return answer.json["jobs"]

    async def end(self) -> None:
        for wire in self._wires:
            wire.close()
        await self.server.close()


@asynccontextmanager
async def serving(node: Any | None = None) -> AsyncIterator[Serving]:
    node = node or FakeNode()
    served = Serving(node, await serve(node, host="127.0.0.1", port=0))
    try:
        async with asyncio.timeout(30):
            yield served
    finally:
        await served.end()
