"""What no HTTP client would send: broken lines and bodies, too much, too slow, cut off. Nothing of it is a 500, and nothing stays."""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import pytest
from conftest import size
from http_calls import Http, wait_until

from wheelsched.core import limits
from wheelsched.testing.process import NodeProcess

FUZZ_ROUNDS = size("E2E_SOCKET_ROUNDS", 600)
SLOW_CLIENTS: Final = 20
# A node that has seen a thousand fuzzed requests has caches filled; a thousand more may not add much.
GROWTH_BYTES_MAX: Final = 48 * 1024 * 1024
# A request has to arrive within 30 s (api/connection.py); the sweep looks once a second.
ARRIVE_S_MAX: Final = 45.0


def post(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: node", *headers]
    if length is not None or not any(line.lower().startswith(("transfer-encoding", "content-length")) for line in headers):
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def talk(url: str, data: bytes, *, half_close: bool = True, timeout_s: float = 20.0) -> bytes:
    """Send all of it as far as it is taken, end our half, and return everything that comes back until the other half ends."""
    address = urlsplit(url)
    received = b""
    with socket.create_connection((address.hostname, address.port), timeout=timeout_s) as sock:
        with suppress(ConnectionError):  # an answer, and the end, before all was sent
            sock.sendall(data)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            while chunk := sock.recv(65_536):
                received += chunk
    return received


def statuses(received: bytes) -> list[int]:
    """Of the answers in what came back, each of which has to be whole."""
    found = []
    while received:
        head, end, rest = received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 "), received[:200]
        assert end, received[:200]
        length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
        status = int(head[9:12])
        assert len(rest) >= length, received[:500]
        if status != 100 and status >= 400:
            problem = json.loads(rest[:length])
            assert problem["status"] == status
            assert problem["detail"]
        found.append(status)
        received = rest[length:]
    return found


def deep(opening: bytes, closing: bytes, depth: int) -> bytes:
    return opening * depth + b"1" + closing * depth


JOB: Final = b'{"queue":"mail"}'
# (what is sent, the answers). What comes in one segment with garbage behind it may be refused with it, answered 400 and not done.
CASES: Final[dict[str, tuple[bytes, list[int]]]] = {
    "garbage": (bytes(range(256)) * 4, [400]),
    "TLS hello": (bytes.fromhex("1603010200010001fc0303") + bytes(500), [400]),
    "empty lines": (b"\r\n\r\n\r\n", []),
    "no version": (b"GET /livez\r\n\r\n", [200]),
    "HTTP/9.9": (b"GET /livez HTTP/9.9\r\nHost: node\r\n\r\n", [400]),
    "method of garbage": (b"G\x00T /livez HTTP/1.1\r\nHost: node\r\n\r\n", [400]),
    "header without colon": (b"GET /livez HTTP/1.1\r\nHost node\r\n\r\n", [400]),
    "header with NUL": (b"GET /livez HTTP/1.1\r\nHost: no\x00de\r\n\r\n", [400]),
    "folded header": (b"GET /livez HTTP/1.1\r\nHost: node\r\nX: a\r\n b\r\n\r\n", [400]),
    "header of 20 KiB": (b"GET /livez HTTP/1.1\r\nX: " + b"a" * 20_480 + b"\r\n\r\n", [413]),
    "headers of 40 KiB": (b"GET /livez HTTP/1.1\r\nHost: node\r\n" + (b"X: " + b"a" * 1_000 + b"\r\n") * 40 + b"\r\n", [413]),
    "1,000 headers": (b"GET /livez HTTP/1.1\r\n" + b"X: a\r\n" * 1_000 + b"\r\n", [400]),
    "path of 20 KiB": (b"GET /" + b"a" * 20_480 + b" HTTP/1.1\r\nHost: node\r\n\r\n", [413]),
    "path not UTF-8": (b"GET /v1/queues/%ff HTTP/1.1\r\nHost: node\r\n\r\n", [400]),
    "path with NUL": (b"GET /v1/queues/a%00b HTTP/1.1\r\nHost: node\r\n\r\n", [400]),
    "two lengths": (post("/v1/jobs", JOB, "Content-Length: 16", "Content-Length: 17"), [400]),
    "negative length": (post("/v1/jobs", JOB, "Content-Length: -1"), [400]),
    "length of words": (post("/v1/jobs", JOB, "Content-Length: many"), [400]),
    "length and chunks": (post("/v1/jobs", JOB, "Content-Length: 16", "Transfer-Encoding: chunked"), [400]),
    "length too long": (post("/v1/jobs", JOB, length=100), [400]),
    "length too short": (post("/v1/jobs", JOB + b"rest", length=len(JOB)), [400]),
    "length of 10 GB": (post("/v1/jobs", JOB, length=10 * 1024**3), [413]),
    "chunk size of garbage": (post("/v1/jobs", b"zz\r\n" + JOB, "Transfer-Encoding: chunked"), [400]),
    "chunk longer than told": (post("/v1/jobs", b"2\r\n" + JOB + b"\r\n0\r\n\r\n", "Transfer-Encoding: chunked"), [400]),
    "chunks that end early": (post("/v1/jobs", b"ff\r\n" + JOB, "Transfer-Encoding: chunked"), [400]),
    "chunk size of 2^70": (post("/v1/jobs", b"f" * 18 + b"\r\n" + JOB, "Transfer-Encoding: chunked"), [400]),
    "chunks, good": (post("/v1/jobs", b"4\r\n" + JOB[:4] + b"\r\nc\r\n" + JOB[4:] + b"\r\n0\r\n\r\n", "Transfer-Encoding: chunked"), [201]),
    "unknown coding": (post("/v1/jobs", JOB, "Transfer-Encoding: gzip"), [400]),
    "no JSON": (post("/v1/jobs", b'{"queue":'), [400]),
    "not UTF-8": (post("/v1/jobs", b'{"queue":"\xff\xfe"}'), [400]),
    "UTF-16": (post("/v1/jobs", JOB.decode().encode("utf-16")), [400]),
    "NaN": (post("/v1/jobs", b'{"queue":"mail","payload":NaN}'), [400]),
    "NUL in a name": (post("/v1/jobs", b'{"queue":"a\\u0000b"}'), [400]),
    "NUL in a payload": (post("/v1/jobs", b'{"queue":"mail","payload":"a\\u0000b"}'), [201]),
    "duplicate member": (post("/v1/jobs", b'{"queue":"mail","queue":"mail"}'), [400]),
    "key not ASCII": (post("/v1/jobs", JOB, "Idempotency-Key: \xe9"), [400]),
    "key of 256": (post("/v1/jobs", JOB, "Idempotency-Key: " + "k" * 256), [400]),
    "form": (post("/v1/jobs", b"queue=mail", "Content-Type: application/x-www-form-urlencoded"), [415]),
    "gzip": (post("/v1/jobs", b"\x1f\x8b\x08", "Content-Encoding: gzip"), [415]),
    "20,000 brackets": (post("/v1/jobs", b'{"queue":"mail","payload":' + deep(b"[", b"]", 20_000) + b"}"), [400]),
    "5,000 objects": (post("/v1/jobs", b'{"queue":"mail","payload":' + deep(b'{"a":', b"}", 5_000) + b"}"), [400]),
    "20,000 open brackets": (post("/v1/jobs", b"[" * 20_000), [400]),
    "payload over its limit": (post("/v1/jobs", b'{"queue":"mail","payload":"' + b"a" * limits.PAYLOAD_BYTES_DEFAULT + b'"}'), [413]),
    "body over its limit": (post("/v1/jobs", b" " * (limits.REQUEST_BYTES_MAX + 1)), [413]),
    "batch over its limit": (post("/v1/jobs:batch", b" " * (limits.BATCH_BYTES_MAX + 1)), [413]),
    "1e400": (post("/v1/jobs", b'{"queue":"mail","delay_s":1e400}'), [400]),
    "a million digits": (post("/v1/jobs", b'{"queue":"mail","delay_s":' + b"9" * 1_000_000 + b"}"), [400]),
    "asterisk": (b"OPTIONS * HTTP/1.1\r\nHost: node\r\n\r\n", [404]),
    "CONNECT": (b"CONNECT node:80 HTTP/1.1\r\nHost: node\r\n\r\n", [404]),
    "Upgrade": (b"GET /livez HTTP/1.1\r\nHost: node\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", [200]),
    "Expect": (post("/v1/jobs", JOB, "Expect: 100-continue"), [201]),
    "half closed": (post("/v1/jobs", JOB), [201]),
    "pipelined": ((post("/v1/jobs", JOB) + b"GET /livez HTTP/1.1\r\nHost: node\r\n\r\n") * 20, [201, 200] * 20),
    "pipelined, then garbage": (post("/v1/jobs", JOB) * 2 + b"\x00\x01\x02\r\n\r\n", [400]),
}  # fmt: skip


def test_each_kind_of_nonsense_has_its_answer(node: NodeProcess, http: Http) -> None:
    """One connection each; the answers are whole problems with words, and the connection ends."""
    wrong = {}
    for name, (data, expected) in CASES.items():
        found = [status for status in statuses(talk(node.url, data)) if status != 100]
        # An answer sent while we were still sending may be lost in the reset that follows.
        is_lost = not found and len(data) > limits.REQUEST_BYTES_MAX
        if not is_lost and (found != expected if len(expected) != 1 else found[-1:] != expected):
            wrong[name] = (expected, found)
    assert not wrong, wrong
    assert http.get("/readyz")["ready"]


def mutations(rng: random.Random, seeds: list[bytes]) -> Iterator[bytes]:
    """Requests, good ones at first, with things done to their bytes."""
    words = [b"\r\n", b"\r\n\r\n", b"\x00", b"\xff" * 10, b"{", b"[" * 200, b"}" * 50, b'"', b"Content-Length: 5\r\n", b"0\r\n\r\n", b":"]
    while True:
        data = bytearray(b"".join(rng.choices(seeds, k=rng.choice((1, 1, 2, 5)))))
        for _ in range(rng.choice((0, 1, 2, 8))):
            at = rng.randrange(len(data) + 1)
            match rng.randrange(5):
                case 0:
                    data[at:at] = rng.choice(words)
                case 1:
                    del data[at : at + rng.randrange(20)]
                case 2 if at < len(data):
                    data[at] = rng.randrange(256)
                case 3:
                    data[at:at] = rng.randbytes(rng.randrange(50))
                case _:
                    del data[at:]
            if not data:
                break
        yield bytes(data)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.slow
@pytest.mark.timeout(60 + FUZZ_ROUNDS)
def test_mutated_requests_leave_nothing_behind(node: NodeProcess, http: Http) -> None:
    """No 500, no connection that stays, no memory that grows with what was refused."""
    seed = random.SystemRandom().randrange(10**6)
    rng = random.Random(seed)
    (job,) = (http.create(), http.claim(lease_s=600))[1]
    token = job["lease_token"]
    seeds = [
        post("/v1/jobs", b'{"queue":"mail","payload":{"a":[1,2,{"b":null}]},"delay_s":1000,"labels":{"k":"v"}}'),
        post("/v1/jobs", b'{"queue":"mail","run_at":"2030-01-01T00:00:00Z"}', "Idempotency-Key: key-1"),
        post("/v1/jobs:batch", b'{"jobs":[{"queue":"mail"},{"queue":"m\\u00e9l"},{"delay_s":-1,"queue":"b"}],"spread_s":60}'),
        post("/v1/queues/none:claim", b'{"max":3,"lease_s":2,"wait_s":0.01,"worker":"w"}'),
        post("/v1/claims", b'{"queues":["none","no"],"wait_s":0}'),
        post(f"/v1/attempts/{token}:heartbeat", b'{"progress":[1]}'),
        post("/v1/attempts:complete", b'{"completions":[{"token":"' + token[:-1].encode() + b'0","outcome":"succeeded"}]}'),
        b"GET /v1/jobs?queue=mail&status=QUEUED&limit=5&cursor=AAAA&label=k:v HTTP/1.1\r\nHost: node\r\n\r\n",
        f"GET /v1/jobs/{job['job_id']}/events HTTP/1.1\r\nHost: node\r\nAccept: */*\r\n\r\n".encode(),
        b'PUT /v1/queues/other HTTP/1.1\r\nHost: node\r\nContent-Length: 14\r\n\r\n{"lease_s":20}',
        post("/v1/jobs", b"10\r\n" + JOB + b"\r\n0\r\n\r\n", "Transfer-Encoding: chunked"),
    ]
    files = open_files(node.pid)
    sizes = []
    stream = mutations(rng, seeds)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(2):
            half = [next(stream) for _ in range(FUZZ_ROUNDS // 2)]
            for data, received in zip(half, pool.map(lambda data: talk(node.url, data), half), strict=True):
                assert not [status for status in statuses(received) if status >= 500], (seed, data, received)
            sizes.append(resident_bytes(node.pid))
    assert sizes[1] - sizes[0] < GROWTH_BYTES_MAX, sizes
    wait_until(lambda: open_files(node.pid) <= files + 20)  # the store's own files come and go
    assert http.get("/readyz")["ready"]
    assert http.post(f"/v1/attempts/{token}:heartbeat")["cancel_requested"] is False
    print(f"seed {seed}: {FUZZ_ROUNDS} mutated connections, resident {sizes[0] // 1024**2} then {sizes[1] // 1024**2} MiB")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_clients_that_send_too_slowly_are_cut_off_and_hold_nobody_up(node: NodeProcess, http: Http) -> None:
    """Slow-loris: headers and bodies a byte at a time, and connections that say nothing. Others are served meanwhile; in the end each
    slow one is closed, with an answer where there was a request to answer."""
    address = urlsplit(node.url)
    kinds = [b"GET /livez HTTP/1.1\r\nX: " + b"a" * 1_000, post("/v1/jobs", b"", length=1_000) + b" " * 1_000, b""]
    slow = [(socket.create_connection((address.hostname, address.port)), kinds[n % 3]) for n in range(SLOW_CLIENTS)]
    for sock, data in slow:
        sock.setblocking(False)
        sock.send(data[:80])
    ended: dict[int, bytes] = {}
    give_up = time.monotonic() + ARRIVE_S_MAX
    second = 0
    while len(ended) < len(slow) and time.monotonic() < give_up:
        assert http.create(delay_s=1000)["status"] == "SCHEDULED"
        for number, (sock, data) in enumerate(slow):
            if number in ended:
                continue
            with suppress(BlockingIOError):
                try:
                    ended[number] = sock.recv(65_536)
                except ConnectionError:
                    ended[number] = b""
                continue
            with suppress(ConnectionError, BlockingIOError):
                sock.send(data[80 + second : 81 + second])
        second += 1
        time.sleep(0.5)
    for sock, _ in slow:
        sock.close()
    assert len(ended) == len(slow), f"{len(slow) - len(ended)} are still there after {ARRIVE_S_MAX:g} s"
    for number, received in ended.items():
        assert statuses(received) in ([], [400]), (number, received)
    assert http.get("/readyz")["ready"]
