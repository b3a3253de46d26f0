"""What happens to any request, whatever carried it: routing, checks of headers and query, the handler, errors, counting."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from itertools import count
from typing import Final, Protocol
from urllib.parse import unquote, unquote_plus

import structlog

from wheelsched.api import openapi, problem
from wheelsched.api.bodies import shown
from wheelsched.api.counters import Counters
from wheelsched.api.problem import invalid
from wheelsched.api.request import PROBLEM, Request, Response
from wheelsched.api.routes import ROUTES, Route, find
from wheelsched.core.errors import (
    InvalidRequest,
    MethodNotAllowed,
    NotAcceptable,
    NotFound,
    UnsupportedMediaType,
    WheelschedError,
)
from wheelsched.node.face import NodeFace

log = structlog.get_logger(__name__)

_REQUEST_ID_LENGTH_MAX: Final = 128
_ACCEPTS_KEPT_MAX: Final = 1_000
# W3C Trace Context, 3.2: version, trace, parent, flags. Later versions may append fields after a dash.
_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}\Z")
_ID: Final = re.compile(r"[!-~]{1,128}\Z")


class Body(Protocol):
    """A request's body, wherever it comes from."""

    async def read(self, bytes_max: int) -> bytes:
        """All of it; raises `PayloadTooLarge` above `bytes_max`, `InvalidRequest` where it does not arrive whole."""
        ...

    def on_route(self, route: Route) -> None:
        """The route is known, before anything is read."""
        ...


class Api:
    """The calls of API.md over one node. One loop."""

    def __init__(self, node: NodeFace) -> None:
        self.node = node
        self.draining = False
        self.polls: set[asyncio.Timeout] = set()
        self.counters = Counters(ROUTES)
        self._accepts: dict[str, bool] = {}
        self._request_ids = map(f"req_{node.rng.getrandbits(40):010x}{{:06x}}".format, count())
        self._document: bytes | None = None

    def document(self) -> bytes:
        """`/openapi.json`, made once."""
        if self._document is None:
            self._document = openapi.document()
        return self._document

    def end_polls(self) -> None:
        """Let every claim that waits answer empty-handed now, and none wait from now on."""
        self.draining = True
        now_s = asyncio.get_running_loop().time()
        for scope in tuple(self.polls):
            scope.reschedule(now_s)

    async def handle(self, method: str, target: str, headers: Mapping[str, str], body: Body) -> tuple[Response, str]:
        """(the answer, its request id). Never raises but to be cancelled."""
        began_s = time.perf_counter()
        request_id = self._request_id(headers)
        route_index = -1
        try:
            path, _, query = target.partition("?")
            route_index, route, name = _route(method, path)
            body.on_route(route)
            request = self._request(method, path, query, name, headers, request_id, route)
            if route.body is not None:
                request.body = await body.read(route.body_bytes_max)
                if request.body:
                    _check_media_type(headers)
            response = await route.handler(self, request)
        except WheelschedError as error:
            response = self.refusal(error, request_id)
        except Exception:
            log.exception("request_failed", request_id=request_id, method=method, path=target.partition("?")[0])
            response = self.refusal(_internal(request_id), request_id)
        self.counters.of(route_index).add(response.status, time.perf_counter() - began_s)
        return response, request_id

    def unreadable(self, error: WheelschedError) -> tuple[Response, str]:
        """The answer to lines that are no request."""
        request_id = next(self._request_ids)
        response = self.refusal(error, request_id)
        self.counters.unrouted.add(response.status, 0.0)
        return response, request_id

    def refusal(self, error: WheelschedError, request_id: str) -> Response:
        return Response(error.status, problem.problem(error, request_id), PROBLEM, problem.headers(error))

    def _request_id(self, headers: Mapping[str, str]) -> str:
        given = headers.get("X-Request-Id")
        return given if given is not None and _ID.match(given) is not None else next(self._request_ids)

    def _request(self, method: str, path: str, query: str, name: str, headers: Mapping[str, str], request_id: str, route: Route) -> Request:
        request = Request(method, path, headers, b"", request_id, _decoded(name) if "%" in name else name)
        if route.strict:
            accept = headers.get("Accept")
            if accept is not None and accept != "*/*" and accept != "application/json":
                self._check_accept(accept)
            if query:
                request.query = _query(query, route)
        traceparent = headers.get("traceparent")
        if traceparent is not None and _TRACEPARENT.match(traceparent) is not None:
            # Anything else is ignored, neither stored nor echoed (W3C Trace Context, 4.3).
            request.traceparent = traceparent
        return request

    def _check_accept(self, accept: str) -> None:
        allows = self._accepts.get(accept)
        if allows is None:
            if len(self._accepts) >= _ACCEPTS_KEPT_MAX:
                self._accepts.clear()
            allows = self._accepts[accept] = _allows_json(accept)
        if not allows:
            raise NotAcceptable(f"Accept {shown(accept)} excludes application/json, which is what there is")


def _internal(request_id: str) -> WheelschedError:
    return WheelschedError(f"an error of the server, recorded in its log under request_id {request_id}; please report it")


def _route(method: str, path: str) -> tuple[int, Route, str]:
    """(index, route, the encoded name in the path)."""
    if not path.startswith("/"):
        # The absolute form (RFC 9112, 3.2.2), which a server has to take.
        path = "/" + path.partition("://")[2].partition("/")[2]
    methods, name = find(path)
    if methods is None:
        raise NotFound(f"no such path: {shown(path)}; /openapi.json lists them")
    found = methods.get(method)
    if found is None and method == "HEAD":
        found = methods.get("GET")
    if found is None:
        allowed = sorted({*methods, *(("HEAD",) if "GET" in methods else ())})
        raise MethodNotAllowed(f"{method} is not a method of {path}; it has {', '.join(allowed)}", allowed=allowed)
    return (*found, name)


def _decoded(name: str) -> str:
    try:
        return unquote(name, errors="strict")
    except UnicodeDecodeError:
        raise InvalidRequest(f"{shown(name)} in the path is not UTF-8 in percent-encoding") from None


def _query(text: str, route: Route) -> dict[str, list[str]]:
    """Parameters by name; one that the call does not have, or has twice where it may not, is refused."""
    allowed = {param.name: param for param in route.query}
    query: dict[str, list[str]] = {}
    for pair in text.partition("#")[0].split("&"):
        if not pair:
            continue
        name, _, value = pair.partition("=")
        try:
            name, value = unquote_plus(name, errors="strict"), unquote_plus(value, errors="strict")
        except UnicodeDecodeError:
            raise InvalidRequest(f"the query holds {shown(pair)}, which is not UTF-8 in percent-encoding") from None
        param = allowed.get(name)
        if param is None:
            known = f"it has {', '.join(allowed)}" if allowed else "it has none"
            raise invalid(f"?{name}", f"{shown(name)} is not a query parameter of this call; {known}")
        if name in query and not param.repeats:
            raise invalid(f"?{name}", f"{name} is given more than once; give it once")
        query.setdefault(name, []).append(value)
    return query


def _check_media_type(headers: Mapping[str, str]) -> None:
    given = headers.get("Content-Type")
    if given is not None and given != "application/json":
        media_type, _, parameters = given.lower().partition(";")
        charset = re.search(r'charset\s*=\s*"?([^";\s]+)', parameters)
        if media_type.strip() != "application/json" or (charset is not None and charset[1] not in ("utf-8", "utf8")):
            raise UnsupportedMediaType(f"Content-Type {shown(given)} is not supported; send application/json in UTF-8")
    encoding = headers.get("Content-Encoding")
    if encoding is not None and encoding.lower() != "identity":
        raise UnsupportedMediaType(f"Content-Encoding {shown(encoding)} is not supported; send the body as it is")


def _allows_json(accept: str) -> bool:
    """Whether JSON is among what the client takes: the most specific range that covers it decides (RFC 9110, 12.5.1)."""
    best, allows = -1, False
    for text in accept.lower().split(","):
        media_range, *parameters = (part.strip() for part in text.split(";"))
        rank = {"*/*": 0, "application/*": 1, "application/json": 2}.get(media_range, -1)
        if rank < best or rank < 0:
            continue
        quality = next((part[2:].strip() for part in parameters if part.startswith("q=")), "1")
        try:
            is_wanted = float(quality) > 0
        except ValueError:
            is_wanted = True
        allows = is_wanted or (allows and rank == best)
        best = rank
    return allows or not accept.strip()
