"""A client that costs little: HTTP/1.1 over bare sockets, requests built beforehand, answers cut by Content-Length.

The machine measured is also the one that measures, so every microsecond spent here is missing there: about 8 us a request in
`pump`, which has no coroutine a request, some 25 us in `Connection.call`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import msgspec
import uvloop

from benchmarks.common import BenchmarkFailed

T = TypeVar("T")

PAYLOAD_BYTES: Final = 500
CALL_S_MAX: Final = 90.0  # longer than the longest poll
RETRY_S: Final = 0.05
PROGRESS_S: Final = 5.0


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run a benchmark's coroutine on uvloop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


# --- bytes ----------------------------------------------------------------------------------------------------------------------


def post(path: str, body: bytes) -> bytes:
    """A whole request."""
    return b"POST %b HTTP/1.1\r\nHost: node\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        path.encode(), len(body), body,
    )  # fmt: skip


def get(path: str) -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: node\r\n\r\n" % path.encode()


def instant(at_ms: float) -> str:
    """RFC 3339 with milliseconds."""
    return datetime.fromtimestamp(round(at_ms) / 1000, UTC).isoformat(timespec="milliseconds")


def instant_ms(text: str) -> float:
    return datetime.fromisoformat(text).timestamp() * 1000


def now_ms() -> float:
    return time.time() * 1000


def a_job(
    queue: str, number: int, *, run_at_ms: float | None = None, delay_s: float | None = None, window_s: int = 0, kind: str = "",
) -> bytes:  # fmt: skip
    """One job as JSON; its payload is `PAYLOAD_BYTES` long and carries `number` and `kind`."""
    payload = {"number": number, "kind": kind, "text": ""}
    payload["text"] = "x" * (PAYLOAD_BYTES - len(json.dumps(payload, separators=(",", ":"))))
    job: dict[str, Any] = {"queue": queue, "payload": payload}
    if run_at_ms is not None:
        job["run_at"] = instant(run_at_ms)
    if delay_s is not None:
        job["delay_s"] = delay_s
    if window_s:
        job["timing"] = {"class": "flexible", "window_s": window_s}
    return json.dumps(job, separators=(",", ":")).encode()


def batch_request(jobs: Iterable[bytes]) -> bytes:
    return post("/v1/jobs:batch", b'{"jobs":[' + b",".join(jobs) + b"]}")


def claim_request(queue: str, *, jobs_max: int, wait_s: float = 0.0, lease_s: float = 120.0) -> bytes:
    body = {"max": jobs_max, "wait_s": wait_s, "lease_s": lease_s, "worker": "bench"}
    return post(f"/v1/queues/{queue}:claim", json.dumps(body).encode())


class Payload(msgspec.Struct):
    number: int = 0
    kind: str = ""


class Claimed(msgspec.Struct):
    """What a worker here needs of a claimed job."""

    lease_token: str
    fire_at: str
    attempt: int
    payload: Payload


class _Claims(msgspec.Struct):
    jobs: list[Claimed]


_decode_claims = msgspec.json.Decoder(_Claims).decode


def decode_claims(body: bytes) -> list[Claimed]:
    return _decode_claims(body).jobs


def completion_request(jobs: Sequence[Claimed]) -> bytes:
    ends = ",".join([f'{{"token":"{job.lease_token}","outcome":"succeeded"}}' for job in jobs])
    return post("/v1/attempts:complete", f'{{"completions":[{ends}]}}'.encode())


# --- connections ----------------------------------------------------------------------------------------------------------------


class Connection(asyncio.Protocol):
    """Keep-alive, one request at a time. `on_answer(status, body)` is called for each answer, `on_lost()` where there comes none."""

    __slots__ = ("_buffer", "_needed", "_transport", "on_answer", "on_lost")

    def __init__(self) -> None:
        self._buffer = b""
        self._needed = 0
        self._transport: asyncio.Transport | None = None
        self.on_answer: Callable[[int, bytes], None] = _ignore
        self.on_lost: Callable[[], None] = _nothing

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's is none by name

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.on_lost()

    def send(self, request: bytes) -> None:
        if self._transport is None:
            raise BenchmarkFailed("the node has closed the connection")
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        if self._buffer:
            data = self._buffer + data
        if len(data) < self._needed:
            self._buffer = data
            return
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self._buffer = data
            return
        self._needed = end + 4 + _content_length(data[:end])
        if len(data) < self._needed:
            self._buffer = data
            return
        body = data[end + 4 : self._needed]
        # One request at a time: nothing of another answer can follow.
        self._buffer, self._needed = b"", 0
        self.on_answer(int(data[9:12]), body)

    async def call(self, request: bytes) -> tuple[int, bytes]:
        """Send and wait: (status, body)."""
        answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

        def on_answer(status: int, body: bytes) -> None:
            if not answer.done():
                answer.set_result((status, body))

        def on_lost() -> None:
            if not answer.done():
                answer.set_exception(BenchmarkFailed("the node closed the connection without an answer"))

        self.on_answer, self.on_lost = on_answer, on_lost
        self.send(request)
        async with asyncio.timeout(CALL_S_MAX):
            return await answer

    async def ask(self, request: bytes) -> bytes:
        """Send until it is neither 429 nor 503; the body of a 2xx. Raises BenchmarkFailed for anything else."""
        while True:
            status, body = await self.call(request)
            if status in (200, 201):
                return body
            if status not in (429, 503):
                raise BenchmarkFailed(f"status {status}: {body[:500]!r}")
            await asyncio.sleep(RETRY_S)

    def close(self) -> None:
        self.on_lost = _nothing
        if self._transport is not None:
            self._transport.close()


def _ignore(_status: int, _body: bytes) -> None:
    pass


def _nothing() -> None:
    pass


def _content_length(head: bytes) -> int:
    start = head.find(b"Content-Length: ")
    if start < 0:
        return 0
    end = head.find(b"\r\n", start)
    return int(head[start + 16 :] if end < 0 else head[start + 16 : end])


@asynccontextmanager
async def connections(port: int, count: int) -> AsyncIterator[list[Connection]]:
    """Open connections to a node of this machine; closed at the end."""
    loop = asyncio.get_running_loop()
    opened: list[Connection] = []
    try:
        for _ in range(count):
            _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
            opened.append(connection)
        yield opened
    finally:
        for connection in opened:
            connection.close()


# --- loads ----------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Pumped:
    """How a pump ran. `refused`: answers 429 and 503, after which the request was sent again."""

    seconds: float = 0.0
    answers: int = 0
    refused: int = 0
    latencies_ms: list[float] = field(default_factory=list)


async def pump(lines: Sequence[Connection], requests: Iterable[bytes], *, seconds_max: float, progress: str = "") -> Pumped:
    """Send all requests, each connection its next one as soon as it has its answer. Raises BenchmarkFailed for a status beside
    2xx, 429 and 503, TimeoutError beyond `seconds_max`. `progress`: name of a line on stderr every few seconds."""
    pumped = Pumped()
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    left = iter(requests)
    busy = len(lines)
    clock = time.perf_counter

    def fail(text: str) -> None:
        if not done.done():
            done.set_exception(BenchmarkFailed(text))

    def drive(line: Connection) -> None:
        request = b""
        sent_at = 0.0

        def send_next() -> None:
            nonlocal request, sent_at, busy
            found = next(left, None)
            if found is None:
                busy -= 1
                if not busy and not done.done():
                    done.set_result(None)
                return
            request, sent_at = found, clock()
            line.send(request)

        def on_answer(status: int, body: bytes) -> None:
            if status in (200, 201):
                pumped.answers += 1
                pumped.latencies_ms.append((clock() - sent_at) * 1000)
                send_next()
            elif status in (429, 503):
                pumped.refused += 1
                loop.call_later(RETRY_S, line.send, request)
            else:
                fail(f"status {status}: {body[:500]!r}")

        line.on_answer = on_answer
        line.on_lost = lambda: fail("the node closed a connection")
        send_next()

    began = clock()
    async with asyncio.timeout(seconds_max):
        watch = asyncio.create_task(_tell(progress, pumped)) if progress else None
        try:
            for line in lines:
                drive(line)
            await done
        finally:
            if watch is not None:
                watch.cancel()
            for line in lines:
                line.on_lost, line.on_answer = _nothing, _ignore
    pumped.seconds = clock() - began
    return pumped


async def _tell(name: str, pumped: Pumped) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        print(f"{name}: {pumped.answers:,} answers, {pumped.refused:,} refused", file=sys.stderr)


def repeated(requests: Sequence[bytes], count: int) -> Iterator[bytes]:
    """`count` requests, the given ones over and over."""
    return itertools.islice(itertools.cycle(requests), count)


def spread_batches(
    queue: str, *, start_ms: float, spread_ms: float, size: int, distinct: int = 20, window_s: int = 0, kind: str = "", seed: int = 1,
) -> list[bytes]:  # fmt: skip
    """Requests of `size` jobs each, due at random milliseconds of [start, start + spread); to be sent over and over."""
    rng = random.Random(seed)
    return [
        batch_request(
            a_job(queue, number, run_at_ms=start_ms + rng.random() * spread_ms, window_s=window_s, kind=kind) for number in range(size)
        )
        for _ in range(distinct)
    ]


def same_batch(queue: str, *, size: int, delay_s: float, kind: str = "") -> bytes:
    """A request of `size` jobs, all `delay_s` from its arrival."""
    return batch_request(a_job(queue, number, delay_s=delay_s, kind=kind) for number in range(size))


@dataclass(slots=True)
class Worked:
    """What a worker got. `numbers` sums up the payloads' numbers: a checksum of the jobs."""

    jobs: int = 0
    numbers: int = 0
    first_at: float = 0.0  # time.perf_counter of the first and the last answer with jobs
    last_at: float = 0.0


async def work(
    line: Connection, queue: str, worked: Worked, *, jobs_max: int, wait_s: float, on_jobs: Callable[[list[Claimed]], None] | None = None,
    until: Callable[[], bool] = lambda: False,
) -> None:  # fmt: skip
    """Claim and complete until `until()`, for ever by default. Raises BenchmarkFailed where a completion is refused."""
    claim = claim_request(queue, jobs_max=jobs_max, wait_s=wait_s)
    while not until():
        jobs = decode_claims(await line.ask(claim))
        if not jobs:
            continue
        if on_jobs is not None:
            on_jobs(jobs)
        results = await line.ask(completion_request(jobs))
        if results.count(b'{"status":200,') != len(jobs):
            raise BenchmarkFailed(f"a completion was refused: {results[:500]!r}")
        worked.last_at = time.perf_counter()
        worked.first_at = worked.first_at or worked.last_at
        worked.jobs += len(jobs)
        worked.numbers += sum(job.payload.number for job in jobs)


async def stop_when(tasks: Sequence[asyncio.Task[None]], done: Callable[[], bool]) -> None:
    """Wait until `done()`, then end workers that only wait for more."""

    async def is_done() -> bool:
        return done()

    await until(is_done, every_s=0.02)
    for task in tasks:
        task.cancel()


async def until(found: Callable[[], Awaitable[bool]], *, every_s: float) -> None:
    """Ask again and again: what another process does sets no event of ours."""
    while not await found():  # noqa: ASYNC110
        await asyncio.sleep(every_s)


async def drain(
    lines: Sequence[Connection], queue: str, count: int, *, seconds_max: float, jobs_max: int = 100,
    on_jobs: Callable[[list[Claimed]], None] | None = None,
) -> Worked:  # fmt: skip
    """Claim and complete `count` jobs with all connections. TimeoutError beyond `seconds_max`."""
    worked = Worked()
    async with asyncio.timeout(seconds_max), asyncio.TaskGroup() as tasks:
        for line in lines:
            tasks.create_task(work(line, queue, worked, jobs_max=jobs_max, wait_s=0.2, on_jobs=on_jobs, until=lambda: worked.jobs >= count))
    if worked.jobs != count:
        raise BenchmarkFailed(f"{worked.jobs} of {count} jobs were completed")
    return worked


def numbers_sum(count: int, size: int) -> int:
    """The sum of the payload numbers of `count` jobs sent in batches of `size`."""
    whole, rest = divmod(count, size)
    return whole * (size * (size - 1) // 2) + rest * (rest - 1) // 2


# --- seen from outside ----------------------------------------------------------------------------------------------------------


async def metric(line: Connection, name: str) -> float:
    """A sample without labels of /metrics, by its whole name."""
    return _sample(await line.ask(get("/metrics")), name)


def _sample(body: bytes, name: str) -> float:
    wanted = name.encode() + b" "
    start = 0 if body.startswith(wanted) else body.find(b"\n" + wanted) + 1
    if not body.startswith(wanted, start):
        raise BenchmarkFailed(f"/metrics has no {name}")
    return float(body[start + len(wanted) : body.find(b"\n", start)])


async def status_of(line: Connection) -> dict[str, Any]:
    """The JSON of /status."""
    found: dict[str, Any] = json.loads(await line.ask(get("/status")))
    return found


async def histogram(line: Connection, name: str, labels: str) -> dict[float, float]:
    """Upper bound -> cumulative count of one histogram of /metrics, `labels` as written there (`class="precise"`)."""
    found = {}
    prefix = f"{name}_bucket{{{labels},le=".encode()
    for text in (await line.ask(get("/metrics"))).splitlines():
        if text.startswith(prefix):
            bound, _, count = text[len(prefix) :].decode().partition("} ")
            found[float(bound.strip('"'))] = float(count)
    return found


def histogram_quantile(before: dict[float, float], after: dict[float, float], q: float) -> float | None:
    """The bucket bound that holds a quantile of what was observed in between; None of nothing."""
    counts = {bound: count - before.get(bound, 0) for bound, count in sorted(after.items())}
    total = max(counts.values(), default=0)
    return next((bound for bound, count in counts.items() if total and count >= q * total), None)


@dataclass(slots=True)
class Watch:
    """What a sampler saw of a node while something ran."""

    rss_bytes_max: int = 0
    loop_lag_ms_max: float = 0.0
    ready_max: int = 0
    samples: int = 0


async def sample(port: int, rss_bytes: Callable[[], int], watch: Watch, *, interval_s: float = 0.25) -> None:
    """Look at a node until cancelled. /status tells the largest lag of the last second, so nothing falls between two looks."""
    async with connections(port, 1) as (line,):
        while True:
            status = await status_of(line)
            watch.samples += 1
            watch.rss_bytes_max = max(watch.rss_bytes_max, rss_bytes())
            watch.loop_lag_ms_max = max(watch.loop_lag_ms_max, status["loop_lag_ms"])
            watch.ready_max = max(watch.ready_max, status["ready_jobs"]["count"])
            await asyncio.sleep(interval_s)


@asynccontextmanager
async def watched(port: int, rss_bytes: Callable[[], int], *, interval_s: float = 0.25) -> AsyncIterator[Watch]:
    """`sample` beside the body of a `with`."""
    watch = Watch()
    task = asyncio.create_task(sample(port, rss_bytes, watch, interval_s=interval_s))
    try:
        yield watch
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
