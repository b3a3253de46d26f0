"""Long polls: a job goes to exactly one of many waiters, and to another one when its waiter hangs up."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import statistics
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
from conftest import size
from http_calls import Http, wait_until

from wheelsched.testing.process import NodeProcess

WAITERS = size("E2E_WAITERS", 100)
HANGUP_ROUNDS = size("E2E_HANGUP_ROUNDS", 60)
JOBS: Final = 20
# Far beyond what any machine needs to hand a job on, and far below the lease that a lost one would wait for.
HANDED_ON_S_MAX: Final = 15.0
LEASE_S: Final = 120
HANGUP_MS: Final = 5.0


class Wire:
    """A connection that says what it is told and shows its socket: one request at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._loop = asyncio.get_running_loop()

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str) -> AsyncIterator[Wire]:
        wire = await cls.connect(url)
        try:
            yield wire
        finally:
            wire.sock.close()

    @classmethod
    async def connect(cls, url: str) -> Wire:
        address = urlsplit(url)
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, (address.hostname, address.port))
        return cls(sock)

    async def send(self, path: str, body: Any) -> None:
        raw = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: node\r\nContent-Length: {len(raw)}\r\n\r\n"
        await self._loop.sock_sendall(self.sock, head.encode() + raw)

    async def receive(self) -> tuple[int, Any]:
        """(status, JSON) of the answer."""
        data = b""
        while (end := data.find(b"\r\n\r\n")) < 0:
            data += await self._more()
        head = data[:end].decode()
        length = next(int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length:"))
        while len(data) < end + 4 + length:
            data += await self._more()
        return int(head.split(" ", 2)[1]), json.loads(data[end + 4 :])

    async def _more(self) -> bytes:
        chunk = await self._loop.sock_recv(self.sock, 65_536)
        assert chunk, "the node closed the connection"
        return chunk

    async def call(self, path: str, body: Any) -> Any:
        await self.send(path, body)
        status, answer = await self.receive()
        assert status in (200, 201), answer
        return answer

    def reset(self) -> None:
        """Close with a reset, whatever there is to read or write."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


@pytest.mark.timeout(180)
async def test_a_due_job_goes_to_exactly_one_of_many_waiters(node: NodeProcess, http: Http) -> None:
    """All wait on one queue; jobs become due one by one. Each is answered to one of them, and nobody else stirs."""
    wires = [await Wire.connect(node.url) for _ in range(WAITERS)]
    for wire in wires:
        await wire.send("/v1/queues/mail:claim", {"wait_s": 60, "lease_s": LEASE_S})
    await asyncio.to_thread(wait_until, lambda: http.get("/status")["waiters"] == WAITERS, timeout_s=60)
    answers = {asyncio.create_task(wire.receive()): wire for wire in wires}
    took_ms, handed = [], []
    for number in range(JOBS):
        job = await asyncio.to_thread(http.create, payload=number, delay_s=0.05)
        done, _ = await asyncio.wait(answers, timeout=HANDED_ON_S_MAX, return_when=asyncio.FIRST_COMPLETED)
        took_ms.append((time.time() - datetime.fromisoformat(job["fire_at"]).timestamp()) * 1000)
        assert len(done) == 1, f"{len(done)} waiters were answered for one job"
        (answer,) = done
        status, body = answer.result()
        assert (status, [found["payload"] for found in body["jobs"]]) == (200, [number])
        handed.append(body["jobs"][0])
        del answers[answer]
    assert Counter(job["attempt"] for job in handed) == {1: JOBS}
    assert http.get("/status")["waiters"] == WAITERS - JOBS
    assert not any(answer.done() for answer in answers)
    print(f"{WAITERS} waiters: due to answer {statistics.median(took_ms):.1f} ms at the median, {max(took_ms):.1f} ms at most")
    for answer in answers:
        answer.cancel()
    for wire in wires:
        wire.sock.close()


@dataclass(frozen=True, slots=True)
class Hangup:
    """One round: how the client goes, when (ms from the job becoming ready), and whether the next one waits already."""

    way: str
    at_ms: float
    timed: bool
    next_waits: bool


def a_hangup(rng: random.Random) -> Hangup:
    ways = ("close", "reset", "reset unread")
    return Hangup(rng.choice(ways), rng.uniform(-HANGUP_MS, HANGUP_MS), rng.random() < 0.5, rng.random() < 0.5)


async def make_ready(producer: Wire, queue: str, ready_at: float, *, timed: bool) -> None:
    """Have a job become ready about `ready_at`: by its own time, or because it is created then."""
    if timed:
        await producer.call("/v1/jobs", {"queue": queue, "run_at": datetime.fromtimestamp(ready_at, UTC).isoformat()})
    else:
        await asyncio.sleep(max(ready_at - time.time(), 0))
        await producer.call("/v1/jobs", {"queue": queue})


async def leave(leaver: Wire, way: str, leaving_at: float) -> float:
    """Hang up at an instant; the monotonic time of it. `reset unread` waits a little longer for the answer, and does not read it."""
    await asyncio.sleep(max(leaving_at - time.time(), 0))
    if way == "reset unread":
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(leaver.sock, readable.set)
        with suppress(TimeoutError):
            await asyncio.wait_for(readable.wait(), 0.02)
        loop.remove_reader(leaver.sock)
    if way == "close":
        leaver.sock.close()
    else:
        leaver.reset()
    return time.monotonic()


async def hang_up_once(url: str, queue: str, hangup: Hangup) -> float:
    """Claim, hang up around the instant at which a job becomes ready, claim again from elsewhere; seconds until that one has it."""
    claim, take = f"/v1/queues/{queue}:claim", {"wait_s": 60, "lease_s": LEASE_S}
    async with Wire.open(url) as producer, Wire.open(url) as other:
        leaver = await Wire.connect(url)
        await leaver.send(claim, {**take, "worker": "leaver"})
        await asyncio.sleep(0.03)  # its claim waits now, or on a slow machine comes later: both are fair
        if hangup.next_waits:
            await other.send(claim, {**take, "worker": "other"})
            await asyncio.sleep(0.01)
        ready_at = time.time() + 0.05
        _, left_at = await asyncio.gather(
            make_ready(producer, queue, ready_at, timed=hangup.timed), leave(leaver, hangup.way, ready_at + hangup.at_ms / 1000)
        )
        if not hangup.next_waits:
            await other.send(claim, {**take, "worker": "other"})
        async with asyncio.timeout(HANDED_ON_S_MAX):
            status, answer = await other.receive()
        took_s = time.monotonic() - left_at
        assert status == 200
        (job,) = answer["jobs"]
        assert job["attempt"] == 1, "an attempt that nobody saw was counted"
        await other.call(f"/v1/attempts/{job['lease_token']}:complete", {"outcome": "succeeded"})
        return took_s


@pytest.mark.slow
@pytest.mark.timeout(120 + HANGUP_ROUNDS)
async def test_hanging_up_while_a_job_becomes_ready_loses_nothing(node: NodeProcess, http: Http) -> None:
    """B-085: clients leave within 5 ms of a job becoming ready, by a close or by a reset with the answer unread. The job is with the next
    client long before a lease could end, as attempt 1, and the story of each job has one counted attempt."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    rounds = [(f"q{number}", a_hangup(rng)) for number in range(HANGUP_ROUNDS)]
    took_s: list[float] = []
    pending = iter(rounds)

    async def play() -> None:
        for queue, hangup in pending:
            try:
                took_s.append(await hang_up_once(node.url, queue, hangup))
            except TimeoutError:
                told = await asyncio.to_thread(story, http, queue)
                raise AssertionError(f"{queue}: {hangup}: the job is with nobody; {told}") from None

    async with asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(play())
    released = 0
    for queue, hangup in rounds:
        (job,) = (await asyncio.to_thread(http.get, f"/v1/jobs?queue={queue}"))["jobs"]
        assert (job["status"], job["attempt"]) == ("SUCCEEDED", 1), (queue, hangup, job)
        attempts = (await asyncio.to_thread(http.get, f"/v1/jobs/{job['job_id']}/attempts"))["attempts"]
        outcomes = [row["outcome"] for row in attempts]
        assert outcomes in (["succeeded"], ["released", "succeeded"]), (queue, hangup, outcomes)
        released += len(outcomes) - 1
    took_s.sort()
    print(
        f"{HANGUP_ROUNDS} rounds, {released} given back after the claim; to the next client"
        f" {took_s[len(took_s) // 2] * 1000:.0f} ms at the median, {took_s[-1] * 1000:.0f} ms at most;"
        " 0 lost, 0 waited for a lease, 0 attempts counted"
    )
    assert released > 0, "no round hit the window between claim and answer: the test shows nothing"


def story(http: Http, queue: str) -> Any:
    return [http.get(f"/v1/jobs/{job['job_id']}/events") for job in http.get(f"/v1/jobs?queue={queue}")["jobs"]]
