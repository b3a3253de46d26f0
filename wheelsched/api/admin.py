"""Probes, status, metrics, the document, and time travel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import orjson
from msgspec import UnsetType

from wheelsched.api import bodies, schemas, times
from wheelsched.api.problem import Fault, invalid, refuse
from wheelsched.api.request import Request, Response, ok
from wheelsched.core.errors import NotFound

if TYPE_CHECKING:
    from wheelsched.api.app import Api

_decode_advance = msgspec.json.Decoder(schemas.ClockAdvance)


async def livez(api: Api, request: Request) -> Response:
    return ok(b'{"status":"ok"}')


async def readyz(api: Api, request: Request) -> Response:
    found = api.node.readiness()
    reasons = list(found.reasons)
    is_ready = found.ready
    if api.draining:
        is_ready = False
        reasons.append("draining: the node is shutting down")
    return Response(200 if is_ready else 503, orjson.dumps({"ready": is_ready, "reasons": reasons}))


async def status(api: Api, request: Request) -> Response:
    return ok(orjson.dumps(api.node.status(), default=str, option=orjson.OPT_NON_STR_KEYS))


async def metrics(api: Api, request: Request) -> Response:
    body, content_type = api.node.render_metrics()
    own = api.counters.render()
    # OpenMetrics ends in a mark of its own; what is added goes before it.
    end = b"# EOF\n"
    body = body.removesuffix(end) + own + end if body.endswith(end) else body + own
    return Response(200, body, content_type.encode())


async def openapi(api: Api, request: Request) -> Response:
    return ok(api.document())


async def clock(api: Api, request: Request) -> Response:
    _demand_virtual(api)
    return _now(api.node.clock.wall_ms())


async def advance(api: Api, request: Request) -> Response:
    _demand_virtual(api)
    model = bodies.decode(_decode_advance, request.body)
    return _now(await api.node.advance_clock(_advance_to_ms(api, model)))


def _demand_virtual(api: Api) -> None:
    if not api.node.clock_is_virtual:
        raise NotFound("this node has a real clock; start it with `wheelsched dev --clock virtual` to travel in time")


def _advance_to_ms(api: Api, model: schemas.ClockAdvance) -> int:
    now_ms = api.node.clock.wall_ms()
    if isinstance(model.by_s, UnsetType) == isinstance(model.to, UnsetType):
        raise invalid("/by_s", "give either by_s or to")
    faults: list[Fault] = []
    to_ms = now_ms
    if not isinstance(model.to, UnsetType):
        try:
            to_ms = times.parse_instant(model.to)
        except ValueError as error:
            faults.append({"pointer": "/to", "detail": f"to {bodies.shown(model.to)} {error}"})
        else:
            if to_ms < now_ms:
                detail = f"to {model.to} lies before the clock's now, {times.format_instant(now_ms)}; it only goes forward"
                faults.append({"pointer": "/to", "detail": detail})
    elif not isinstance(model.by_s, UnsetType):
        to_ms = now_ms + schemas.ms_of(model.by_s, "by_s", faults)
        if to_ms > times.INSTANT_MS_MAX:
            faults.append({"pointer": "/by_s", "detail": f"by_s {model.by_s!r} leads past the year 9999"})
    if faults:
        raise refuse(faults)
    return to_ms


def _now(ms: int) -> Response:
    return ok(b'{"now":"%b"}' % times.format_instant(ms).encode())
