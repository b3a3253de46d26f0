"""HTTP itself: paths, methods, headers, sizes, and what comes down a raw socket."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from fake_node import NOW_MS, FakeNode, serving
from prometheus_client.parser import text_string_to_metric_families

from wheelsched.api import connection
from wheelsched.core.limits import REQUEST_BYTES_MAX
from wheelsched.core.settings import HttpSettings, Settings


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/nope",
        "/v1",
        "/v1/",
        "/v1/job",
        "/v1/jobs/a/b",
        "/v1/jobs/a:nope",
        "/v1/jobs/a/b/c",
        "//v1/jobs",
        "/V1/jobs",
        "/v1/queues/a/b",
    ],
)
async def test_an_unknown_path_is_a_404(path: str) -> None:
    async with serving() as api:
        answer = await api.call("GET", path)
        assert (answer.status, answer.json["code"]) == (404, "not-found")


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("PUT", "/v1/jobs", "GET, HEAD, POST"), ("POST", "/v1/jobs/x", "DELETE, GET, HEAD, PATCH"), ("GET", "/v1/jobs/x:run", "POST"),
        ("DELETE", "/v1/queues/x", "GET, HEAD, PUT"), ("GET", "/v1/queues/x:claim", "POST"), ("OPTIONS", "/v1/claims", "POST"),
        ("POST", "/livez", "GET, HEAD"), ("TRACE", "/v1/jobs:batch", "POST"),
    ],
)  # fmt: skip
async def test_a_wrong_method_is_a_405_with_allow(method: str, path: str, allow: str) -> None:
    async with serving() as api:
        answer = await api.call(method, path)
        assert (answer.status, answer.json["code"], answer.headers["allow"]) == (405, "method-not-allowed", allow)


async def test_head_is_get_without_a_body() -> None:
    async with serving() as api:
        wire = await api.wire()
        wire.request("HEAD", "/v1/jobs")
        head = await wire.answer(is_head=True)
        wire.request("GET", "/v1/jobs")
        got = await wire.answer()
        assert head.status == 200 and head.headers["content-length"] == str(len(got.body))


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 201), ("application/json; charset=utf-8", 201), ('Application/JSON;charset="UTF-8"', 201),
        ("application/json; charset=latin-1", 415), ("text/plain", 415), ("application/x-www-form-urlencoded", 415), ("", 415),
        ("application/merge-patch+json", 415),
    ],
)  # fmt: skip
async def test_media_types(content_type: str, status: int) -> None:
    async with serving() as api:
        answer = await api.call("POST", "/v1/jobs", {"queue": "mail"}, Content_Type=content_type)
        assert answer.status == status
        if status == 415:
            assert answer.json["code"] == "unsupported-media-type"


async def test_a_body_without_a_media_type_is_json_and_none_is_compressed() -> None:
    async with serving() as api:
        wire = await api.wire()
        wire.request("POST", "/v1/jobs", b'{"queue":"mail"}')
        assert (await wire.answer()).status == 201
        assert (await api.call("POST", "/v1/jobs", b"\x1f\x8b", Content_Encoding="gzip")).status == 415


@pytest.mark.parametrize(
    ("accept", "status"),
    [
        ("*/*", 200),
        ("application/json", 200),
        ("application/*", 200),
        ("text/html, */*;q=0.1", 200),
        ("text/html", 406),
        ("application/xml", 406),
        ("application/json;q=0", 406),
        ("*/*, application/json;q=0", 406),
        ("*/*;q=0, application/json", 200),
        ("", 200),
        ("APPLICATION/JSON;v=1", 200),
        ("text/html;q=x,*/*;q=0.0", 406),
    ],
)
async def test_accept(accept: str, status: int) -> None:
    async with serving() as api:
        answer = await api.call("GET", "/v1/jobs", Accept=accept)
        assert answer.status == status
        if status == 406:
            assert answer.json["code"] == "not-acceptable"
        assert (await api.call("GET", "/livez", Accept=accept)).status == 200


async def test_request_ids_are_echoed_or_made() -> None:
    async with serving() as api:
        assert (await api.call("GET", "/livez", X_Request_Id="abc-1")).headers["x-request-id"] == "abc-1"
        made = set()
        for bad in ("", "a b", "x" * 129, "\u00fc"):
            made.add((await api.call("GET", "/livez", X_Request_Id=bad)).headers["x-request-id"])
        assert len(made) == 4 and all(re.fullmatch(r"req_[0-9a-f]{16}", text) for text in made)
        missing = await api.call("GET", "/nope", X_Request_Id="abc-2")
        assert missing.json["request_id"] == missing.headers["x-request-id"] == "abc-2"
        answer = await api.call("GET", "/livez")
        assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["date"] == "Fri, 15 Jan 2027 08:00:00 GMT"


async def test_unknown_query_parameters_are_named() -> None:
    async with serving() as api:
        for method, path in (("POST", "/v1/jobs?dry_run=1"), ("GET", "/v1/queues/a?x="), ("GET", "/status?x=1"), ("GET", "/v1/clock?x")):
            answer = await api.call(method, path, {"queue": "a"} if method == "POST" else None)
            assert answer.status == 400 and answer.pointers[0] == "?" + re.split("[=?]", path)[1]
        assert (await api.call("GET", "/livez?probe=1")).status == 200


async def test_request_sizes_are_bounded_inclusively() -> None:
    async with serving() as api:
        body = b'{"queue":"mail"}'
        for size, status in ((REQUEST_BYTES_MAX, 201), (REQUEST_BYTES_MAX + 1, 413)):
            answer = await api.call("POST", "/v1/jobs", body + b" " * (size - len(body)))
            assert answer.status == status
        assert answer.json["code"] == "payload-too-large"
        wire = await api.wire()
        wire.send(b"POST /v1/jobs HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(17):
            wire.send(b"10000\r\n" + b" " * 65_536 + b"\r\n")
        assert (await wire.answer()).status == 413


async def test_headers_are_bounded_inclusively() -> None:
    async with serving() as api:
        for over, status in ((0, 200), (1, 413), (5_000, 413), (100_000, 413)):
            wire = await api.wire()
            lines = b"Host: test\r\nX-Pad: \r\nX-More: 1\r\n"
            pad = b"x" * (16_384 - len(lines) + over)
            wire.send(b"GET /livez HTTP/1.1\r\nHost: test\r\nX-Pad: " + pad + b"\r\nX-More: 1\r\n\r\n")
            answer = await wire.answer()
            assert answer.status == status, (over, answer.body)
            if status == 413:
                assert answer.json["code"] == "payload-too-large" and await wire.end() == b""


@pytest.mark.parametrize(
    "lines",
    [
        b"nonsense\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost : a\r\n\r\n",
        b"GET /livez HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /livez HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET /li vez HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a\r\nX: a\x00b\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: a\r\n folded: 1\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
async def test_lines_that_are_no_request_are_a_400_and_a_close(lines: bytes) -> None:
    async with serving() as api:
        wire = await api.wire()
        wire.send(lines)
        answer = await wire.answer()
        assert (answer.status, answer.headers["connection"]) == (400, "close"), answer.body
        assert answer.json["code"] == "invalid-request"
        rest = await wire.end()
        assert rest == b"" or rest.startswith(b"HTTP/1.1 400"), rest
        assert (await api.call("GET", "/livez")).status == 200


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving() as api:
        wire = await api.wire()
        for n in range(100):
            wire.request("POST", "/v1/jobs", b'{"queue":"mail","payload":%d}' % n)
        wire.request("GET", "/nope")
        for n in range(100):
            assert (await wire.answer()).json["payload"] == n
        assert (await wire.answer()).status == 404
        wire.send(b"garbage\r\n\r\n")
        assert (await wire.answer()).status == 400
        assert await wire.end() == b""


async def test_a_half_closed_connection_is_answered() -> None:
    async with serving() as api:
        wire = await api.wire()
        wire.request("POST", "/v1/jobs", b'{"queue":"mail"}')
        wire.request("GET", "/v1/jobs")
        wire.writer.write_eof()
        assert (await wire.answer()).status == 201
        assert len((await wire.answer()).json["jobs"]) == 1
        assert await wire.end() == b""


@pytest.mark.parametrize("tail", [b"Content-Length: 100\r\n\r\n{}", b"Transfer-Encoding: chunked\r\n\r\n5\r\n{}"])
async def test_a_body_that_ends_early_creates_nothing(tail: bytes) -> None:
    async with serving() as api:
        wire = await api.wire()
        wire.send(b"POST /v1/jobs HTTP/1.1\r\nHost: a\r\n" + tail)
        wire.writer.write_eof()
        answer = await wire.answer()
        assert answer.status == 400 and await wire.end() == b""
        assert api.node.proposals == 0


async def test_a_body_in_pieces_and_chunks_is_put_together() -> None:
    async with serving() as api:
        wire = await api.wire()
        wire.send(b"POST /v1/jobs HTTP/1.1\r\nHost: a\r\nContent-Length: 16\r\nExpect: 100-continue\r\n\r\n")
        assert (await wire.answer()).status == 100
        for byte in b'{"queue":"mail"}':
            wire.send(bytes((byte,)))
            await wire.writer.drain()
        assert (await wire.answer()).status == 201
        wire.send(b'POST /v1/jobs HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{"q\r\nd\r\nueue":"mail"}\r\n0\r\n\r\n')
        assert (await wire.answer()).status == 201


async def test_connections_are_kept_or_closed_as_asked() -> None:
    async with serving() as api:
        wire = await api.wire()
        wire.request("GET", "/livez", Connection="close")
        assert (await wire.answer()).headers["connection"] == "close"
        assert await wire.end() == b""
        old = await api.wire()
        old.send(b"GET /livez HTTP/1.0\r\n\r\n")
        assert (await old.answer()).headers["connection"] == "close" and await old.end() == b""
        kept = await api.wire()
        for _ in range(2):
            kept.send(b"GET /livez HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            assert (await kept.answer()).headers["connection"] == "keep-alive"
        absolute = await api.wire()
        absolute.send(b"GET http://a/livez HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        assert (await absolute.answer()).status == 200


async def test_a_request_that_does_not_arrive_and_an_idle_connection_are_ended() -> None:
    """By the server's sweep, its deadlines moved into the past."""
    async with serving() as api:
        slow, idle, busy = await api.wire(), await api.wire(), await api.wire()
        slow.send(b"GET /livez HTTP/1.1\r\nHost:")
        idle.request("GET", "/livez")
        await idle.answer()
        busy.request("POST", "/v1/queues/mail:claim", b'{"wait_s":60}')
        await api.node.waiting.wait()
        now_s = asyncio.get_running_loop().time()
        for item in api.server._connections:
            if item.deadline_s:
                left_s = item.deadline_s - now_s
                assert left_s <= connection.IDLE_S
                item.deadline_s = 1e-9
        api.server._sweep()
        assert await slow.end() == b"" and await idle.end() == b""
        await api.create()
        assert len((await busy.answer()).json["jobs"]) == 1


async def test_a_slow_body_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ARRIVE_S", 0.0)
    async with serving() as api:
        wire = await api.wire()
        wire.send(b"POST /v1/jobs HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n{")
        answer = await wire.answer()
        assert answer.status == 400 and "did not arrive" in answer.json["detail"] and await wire.end() == b""


async def test_connections_beyond_the_bound_are_answered_503() -> None:
    node = FakeNode(Settings(http=HttpSettings(connections_max=2)))
    async with serving(node) as api:
        first, second, third = await api.wire(), await api.wire(), await api.wire()
        for wire in (first, second):
            wire.request("GET", "/livez")
            assert (await wire.answer()).status == 200
        third.request("GET", "/livez")
        answer = await third.answer()
        assert (answer.status, answer.json["code"], answer.headers["retry-after"]) == (503, "unavailable", "1")
        assert await third.end() == b""
        first.close()
        while api.server.statistics().connections > 1:
            second.request("GET", "/livez")
            await second.answer()
        assert (await api.call("GET", "/livez")).status == 200
        assert api.server.statistics().refused_connections == 1


async def test_draining_lets_calls_under_way_end() -> None:
    node = FakeNode()
    go_on, arrived = asyncio.Event(), asyncio.Event()

    async def hold(commands: object) -> None:
        arrived.set()
        await go_on.wait()

    node.before_propose = hold
    async with serving(node) as api:
        idle, last, busy = await api.wire(), await api.wire(), await api.wire()
        for wire in (idle, last):
            wire.request("GET", "/readyz")
            assert (await wire.answer()).status == 200
        busy.request("POST", "/v1/jobs", b'{"queue":"mail"}')
        await arrived.wait()
        draining = asyncio.get_running_loop().create_task(api.server.drain(10))
        await asyncio.sleep(0)
        last.request("GET", "/livez")  # on its way when the drain began
        answer = await last.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await idle.end() == b""
        assert not draining.done()
        go_on.set()
        answer = await busy.answer()
        assert (answer.status, answer.headers["connection"]) == (201, "close")
        await draining


# --- probes, metrics, time ------------------------------------------------------------------------------------------------------


async def test_probes_and_status() -> None:
    async with serving() as api:
        assert (await api.call("GET", "/livez")).json == {"status": "ok"}
        assert (await api.call("GET", "/readyz")).json == {"ready": True, "reasons": []}
        api.node.reasons = ("store not writable",)
        answer = await api.call("GET", "/readyz")
        assert (answer.status, answer.json) == (503, {"ready": False, "reasons": ["store not writable"]})
        assert (await api.call("GET", "/status")).json == {"node": "n1"}


async def test_metrics_tell_calls_by_route_and_status() -> None:
    async with serving() as api:
        await api.create()
        await api.call("POST", "/v1/jobs", {})
        await api.call("GET", "/nope")
        answer = await api.call("GET", "/metrics")
        text = answer.body.decode()
        assert answer.headers["content-type"].startswith("text/plain") and text.startswith("# TYPE fake gauge\nfake 1\n")
        assert 'wheelsched_http_requests_total{method="POST",path="/v1/jobs",status="201"} 1\n' in text
        assert 'wheelsched_http_requests_total{method="POST",path="/v1/jobs",status="400"} 1\n' in text
        assert 'wheelsched_http_requests_total{method="",path="",status="404"} 1\n' in text
        names = {family.name for family in text_string_to_metric_families(text)}
        assert {"wheelsched_http_requests", "wheelsched_http_request_seconds", "wheelsched_http_connections"} <= names


async def test_time_travel() -> None:
    async with serving() as api:
        job = await api.create(delay_s=3600)
        assert (await api.call("GET", "/v1/clock")).json == {"now": "2027-01-15T08:00:00Z"}
        assert (await api.call("POST", "/v1/clock:advance", {"by_s": 3600})).json == {"now": "2027-01-15T09:00:00Z"}
        assert (await api.call("GET", f"/v1/jobs/{job['job_id']}")).json["status"] == "QUEUED"
        assert (await api.call("POST", "/v1/clock:advance", {"to": "2027-01-15T09:00:00.5Z"})).json == {"now": "2027-01-15T09:00:00.500Z"}
        bad: list[Any] = [
            {},
            {"by_s": 1, "to": "2028-01-15T08:00:00Z"},
            {"by_s": -1},
            {"to": "2027-01-15T08:00:00Z"},
            {"to": "soon"},
            {"by_s": 1e300},
            {"by_s": 0.0001},
        ]
        for body in bad:
            assert (await api.call("POST", "/v1/clock:advance", body)).status == 400, body
        assert api.node.clock.wall_ms() == NOW_MS + 3_600_500


async def test_a_real_clock_does_not_travel() -> None:
    async with serving(FakeNode(virtual=False)) as api:
        for method, path, body in (("GET", "/v1/clock", None), ("POST", "/v1/clock:advance", {"by_s": 1})):
            answer = await api.call(method, path, body)
            assert (answer.status, answer.json["code"]) == (404, "not-found")
