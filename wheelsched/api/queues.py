"""Queues: views, settings, pause and resume, dead letters."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final

import msgspec
import orjson
from msgspec import UnsetType

from wheelsched.api import bodies, cursors, render, schemas
from wheelsched.api.problem import Fault, invalid, refuse
from wheelsched.api.request import Request, Response, ok
from wheelsched.core import ids
from wheelsched.core.errors import NotFound
from wheelsched.model.commands import Discard, Redrive
from wheelsched.model.rows import QueueSettings
from wheelsched.model.states import Status
from wheelsched.node.face import JobFilter, JobRecord

if TYPE_CHECKING:
    from wheelsched.api.app import Api

_decode_put = msgspec.json.Decoder(schemas.QueuePut)
_decode_redrive = msgspec.json.Decoder(schemas.DeadRedrive)
_decode_discard = msgspec.json.Decoder(schemas.DeadSelection)
_decode_nothing = msgspec.json.Decoder(schemas.Nothing)
_DEAD: Final = frozenset({Status.DEAD})
# Dead letters are read and proposed in slices: one is one wait for the disk, and a client that hangs up stops after it.
_SLICE: Final = 500


def _queue(request: Request) -> str:
    schemas.check_name(request.name, "", "queue")
    return request.name


async def list_queues(api: Api, request: Request) -> Response:
    limit = cursors.limit_of(request.query)
    seal = cursors.Seal(api.node.settings.cluster.name, "queues", request.tenant)
    position = cursors.position_of(request.query, seal)
    views, after = await api.node.list_queues(request.tenant, after=position.decode() if position else "", limit=limit)
    next_cursor = seal.cursor(after.encode() if after is not None else None)
    return ok(render.page(b"queues", [render.queue(view) for view in views], next_cursor))


async def get(api: Api, request: Request) -> Response:
    queue = _queue(request)
    view = await api.node.queue_view(request.tenant, queue)
    if view is None:
        raise NotFound(f"no queue {queue}; it exists from its first job, claim or setting")
    return ok(render.queue(view))


async def put(api: Api, request: Request) -> Response:
    queue = _queue(request)
    model = bodies.decode(_decode_put, request.body)
    settings = _settings(model)
    return ok(render.queue(await api.node.put_queue(request.tenant, queue, settings, actor=request.actor)))


def _settings(model: schemas.QueuePut) -> QueueSettings:
    """What is left out has its default."""
    faults: list[Fault] = []
    default = QueueSettings()
    lease_ms, retention_ms, weights = default.lease_ms, default.retention_ms, default.weights
    concurrency, rate = default.max_concurrency, default.rate_per_s
    if not isinstance(model.max_concurrency, UnsetType) and model.max_concurrency is not None:
        concurrency = model.max_concurrency
    if not isinstance(model.rate_per_s, UnsetType) and model.rate_per_s is not None:
        rate = model.rate_per_s
    if not isinstance(model.lease_s, UnsetType):
        lease_ms = schemas.ms_of(model.lease_s, "lease_s", faults)
    if not isinstance(model.retention_s, UnsetType):
        retention_ms = schemas.ms_of(model.retention_s, "retention_s", faults)
    if not isinstance(model.weights, UnsetType):
        given = (model.weights.critical, model.weights.default, model.weights.bulk)
        critical, normal, bulk = (usual if isinstance(weight, UnsetType) else weight for weight, usual in zip(given, weights, strict=True))
        weights = (critical, normal, bulk)
    if faults:
        raise refuse(faults)
    return QueueSettings(concurrency, rate, lease_ms, retention_ms, weights)


async def pause(api: Api, request: Request) -> Response:
    return await _pause(api, request, True)


async def resume(api: Api, request: Request) -> Response:
    return await _pause(api, request, False)


async def _pause(api: Api, request: Request, paused: bool) -> Response:
    queue = _queue(request)
    if request.body:
        bodies.decode(_decode_nothing, request.body)
    return ok(render.queue(await api.node.pause_queue(request.tenant, queue, paused, actor=request.actor)))


# --- dead letters ---------------------------------------------------------------------------------------------------------------


async def dead_letters(api: Api, request: Request) -> Response:
    wanted = JobFilter(request.tenant, _queue(request), _DEAD)
    limit = cursors.limit_of(request.query)
    seal = cursors.Seal(api.node.settings.cluster.name, "dead-letters", wanted)
    position = cursors.position_of(request.query, seal)
    found = await api.node.list_jobs(wanted, cursor=position, limit=limit)
    if not found.jobs and position is None and await api.node.queue_view(request.tenant, wanted.queue) is None:
        raise NotFound(f"no queue {wanted.queue}; it exists from its first job, claim or setting")
    return ok(render.page(b"jobs", [render.job(record) for record in found.jobs], seal.cursor(found.cursor)))


async def redrive(api: Api, request: Request) -> Response:
    queue = _queue(request)
    model = bodies.decode(_decode_redrive, request.body)
    faults: list[Fault] = []
    spread_ms = 0 if isinstance(model.spread_s, UnsetType) else schemas.ms_of(model.spread_s, "spread_s", faults)
    if faults:
        raise refuse(faults)
    count = 0
    async for chosen in _chosen(api, request, queue, model):
        commands = [
            Redrive(job_id, request.tenant, ids.spread_hash(job_id) % spread_ms if spread_ms else 0, request.actor) for job_id in chosen
        ]
        count += sum(not reply.refusal for reply in await api.node.propose_many(commands))
    return ok(b'{"redriven":%d}' % count)


async def discard(api: Api, request: Request) -> Response:
    queue = _queue(request)
    model = bodies.decode(_decode_discard, request.body)
    count = 0
    async for chosen in _chosen(api, request, queue, model):
        commands = [Discard(job_id, request.tenant, request.actor) for job_id in chosen]
        count += sum(not reply.refusal for reply in await api.node.propose_many(commands))
    return ok(b'{"discarded":%d}' % count)


async def _chosen(api: Api, request: Request, queue: str, model: schemas.DeadSelection) -> AsyncIterator[list[bytes]]:
    """Ids of the dead letters that a selection names, in slices."""
    by_ids, by_all = not isinstance(model.job_ids, UnsetType), not isinstance(model.all, UnsetType)
    if by_ids == by_all:
        raise invalid("/job_ids", 'give either job_ids or "all": true')
    if not isinstance(model.job_ids, UnsetType):
        for name in ("error_contains", "limit"):
            if not isinstance(getattr(model, name), UnsetType):
                raise invalid(f"/{name}", f'{name} narrows "all": true; with job_ids, name the jobs')
        yield await _named(api, request, queue, model.job_ids)
        return
    left = 2**62 if isinstance(model.limit, UnsetType) else model.limit
    text = "" if isinstance(model.error_contains, UnsetType) else model.error_contains
    # Those that die while this goes on are not taken, or a job that dies at once would be redriven for ever.
    wanted = JobFilter(request.tenant, queue, _DEAD, to_ms=api.node.clock.wall_ms() + 1)
    position: bytes | None = None
    while left > 0:
        found = await api.node.list_jobs(wanted, cursor=position, limit=_SLICE)
        chosen = [record.state.job_id for record in found.jobs if not text or text in _error_text(record)][:left]
        left -= len(chosen)
        if chosen:
            yield chosen
        if found.cursor is None:
            return
        position = found.cursor


async def _named(api: Api, request: Request, queue: str, names: list[str]) -> list[bytes]:
    """Of the jobs named, those that are dead letters of this queue, each once."""
    chosen: dict[bytes, None] = {}
    for name in names:
        job_id = ids.parse_job_id(name)
        if job_id is None or job_id in chosen:
            continue
        record = await api.node.read_job(request.tenant, job_id)
        if record is not None and record.state.queue == queue and record.status is Status.DEAD:
            chosen[job_id] = None
    return list(chosen)


def _error_text(record: JobRecord) -> str:
    """What `error_contains` looks into: text itself, an object as its JSON."""
    if not record.error:
        return ""
    try:
        value = orjson.loads(record.error)
    except orjson.JSONDecodeError:
        value = None
    # An object's JSON may hide letters behind escapes: look at it plainly written.
    return value if isinstance(value, str) else record.error.decode() if value is None else orjson.dumps(value).decode()
