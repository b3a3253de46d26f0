"""Schedules: create, replace, change, preview, pause, run by hand, backfill; their runs; and the time-zone data they run by."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import orjson
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from wheelsched.api import bodies, cursors, jobs, problem, render, schemas, times
from wheelsched.api.problem import Fault, inside, invalid, refusal, refuse
from wheelsched.api.request import Request, Response, ok
from wheelsched.core import ids, limits
from wheelsched.core.errors import (
    IdempotencyKeyReused,
    InvalidRequest,
    InvalidSchedule,
    NameTaken,
    NotFound,
    Unavailable,
    VersionMismatch,
    WheelschedError,
)
from wheelsched.cron import jitter_of, parse
from wheelsched.model.schedules import Definition, Missed, Overlap
from wheelsched.node.face import Preview, ScheduleRecord

if TYPE_CHECKING:
    from wheelsched.api.app import Api

_decode_create = msgspec.json.Decoder(schemas.ScheduleCreate)
_decode_put = msgspec.json.Decoder(schemas.SchedulePut)
_decode_patch = msgspec.json.Decoder(schemas.SchedulePatch)
_decode_preview = msgspec.json.Decoder(schemas.SchedulePreview)
_decode_batch = msgspec.json.Decoder(schemas.ScheduleBatch)
_decode_run = msgspec.json.Decoder(schemas.RunCreate)
_decode_backfill = msgspec.json.Decoder(schemas.BackfillRequest)
_decode_nothing = msgspec.json.Decoder(schemas.Nothing)
_BATCH_OPAQUE: Final = frozenset({"schedules"})

_OVERLAPS: Final = {overlap.name.lower(): int(overlap) for overlap in Overlap}
_POLICIES: Final = {missed.name.lower(): int(missed) for missed in Missed}
# The year 9899 ends here. A search for the next run looks decades ahead, and what it finds has to be written with four digits.
_RUN_MS_MAX: Final = 250_246_627_199_999
# A schedule that somebody else changes as often between our read and our write is not for this call to win.
_TRIES: Final = 5
# So many items of a batch are decoded, or checked for their next runs, before other connections get their turn: a millisecond or two.
_DECODED_AT_ONCE, _CHECKED_AT_ONCE = 100, 10

Model = schemas.ScheduleCreate | schemas.SchedulePut | schemas.SchedulePatch | schemas.SchedulePreview


# --- create, replace, change ----------------------------------------------------------------------------------------------------


async def create(api: Api, request: Request) -> Response:
    api.node.check_admission()
    model = bodies.decode(_decode_create, request.body)
    schemas.check_name(model.name, "/name", "schedule")
    definition = _definition(api, model, _empty(request.tenant, model.name))
    if key := jobs.header_key(request):
        definition = replace(definition, key_digest=_digest(key), fingerprint=bodies.fingerprint(request.body))
    definition = _anchored(definition, api.node.clock.wall_ms())
    _check(api, definition)
    record, is_new = await api.node.put_schedule(definition, create=True, paused=_paused(model), actor=request.actor)
    location = b"Location: /v1/schedules/%b\r\n" % record.definition.name.encode()
    if is_new:
        return _answer(201, record, location)
    return _answer(200, record, location, b"Idempotent-Replayed: true\r\n")


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=16, person=b"ws-idem-key").digest()


async def put(api: Api, request: Request) -> Response:
    api.node.check_admission()
    name = _name(request)
    model = bodies.decode(_decode_put, request.body)
    _check_same_name(model.name, name)
    record, is_new = await _put(api, request, name, model, jobs.if_match(request))
    return _answer(201 if is_new else 200, record, *((b"Location: /v1/schedules/%b\r\n" % name.encode(),) if is_new else ()))


async def _put(
    api: Api, request: Request, name: str, model: schemas.SchedulePut | schemas.ScheduleCreate, versions: list[int] | None
) -> tuple[ScheduleRecord, bool]:
    """Create or replace; True where it was created."""
    wanted = _definition(api, model, _empty(request.tenant, name))
    if versions is None and not _lacks_anchor(wanted):
        # Whatever there is, this takes its place: nothing to read first.
        _check(api, wanted)
        return await api.node.put_schedule(wanted, paused=_paused(model), actor=request.actor)

    def change(existing: Definition | None) -> Definition:
        return wanted if existing is None else _keep_anchor(wanted, existing)

    return await _change(api, request, name, change, versions, paused=_paused(model))


async def patch(api: Api, request: Request) -> Response:
    name = _name(request)
    model = bodies.decode(_decode_patch, request.body)
    _check_same_name(model.name, name)

    def change(existing: Definition | None) -> Definition:
        if existing is None:
            raise _missing(name)
        return _definition(api, model, existing)

    record, _ = await _change(api, request, name, change, jobs.if_match(request), paused=_paused(model))
    return _answer(200, record)


async def _change(
    api: Api, request: Request, name: str, change: Callable[[Definition | None], Definition], versions: list[int] | None,
    *, paused: bool | None,
) -> tuple[ScheduleRecord, bool]:  # fmt: skip
    """Read, change, write what was read; again where another write came between."""
    for _ in range(_TRIES):
        found = await api.node.read_schedule(request.tenant, name)
        existing = None if found is None else found.definition
        if versions is not None and (existing is None or existing.version not in versions):
            has = f"no schedule {name}" if existing is None else f"schedule {name} is at version {existing.version}"
            raise VersionMismatch(f"{has}, not {request.headers['If-Match']}; read it again")
        definition = _anchored(change(existing), api.node.clock.wall_ms())
        _check(api, definition)
        try:
            return await api.node.put_schedule(
                definition, create=existing is None, if_version=0 if existing is None else existing.version, paused=paused,
                actor=request.actor,
            )  # fmt: skip
        except (NameTaken, NotFound, VersionMismatch):
            continue
    raise Unavailable(f"schedule {name} is being changed by others all the time; nothing of this change was made", retry_after_s=1)


async def put_batch(api: Api, request: Request) -> Response:
    api.node.check_admission()
    if "Idempotency-Key" in request.headers:
        raise InvalidRequest("the header Idempotency-Key does not apply to a batch; a batch that is repeated changes nothing")
    bodies.check_utf8(request.body)
    batch = bodies.decode_part(_decode_batch, request.body, _BATCH_OPAQUE)
    schemas.check_item_count(batch.schedules, "schedules")
    items: list[schemas.ScheduleCreate | WheelschedError] = []
    for index, raw in enumerate(batch.schedules):
        if index % _DECODED_AT_ONCE == _DECODED_AT_ONCE - 1:
            await asyncio.sleep(0)
        items.append(_item(bytes(raw)))
    return ok(b'{"results":[' + b",".join(await _put_all(api, request, items)) + b"]}")


def _item(body: bytes) -> schemas.ScheduleCreate | WheelschedError:
    # Too deep is a fault of the request, as it is with a body that the parser gave up on; all else is the item's own.
    bodies.check_depth(body, around=2)
    try:
        model = bodies.decode_part(_decode_create, body)
        schemas.check_name(model.name, "/name", "schedule")
    except WheelschedError as error:
        return error
    return model


async def _put_all(api: Api, request: Request, items: Sequence[schemas.ScheduleCreate | WheelschedError]) -> list[bytes]:
    """All at once, so that they share the waits for the disk; the items of one name one after the other."""
    tasks: list[asyncio.Task[bytes]] = []
    last: dict[str, asyncio.Task[bytes]] = {}
    async with asyncio.TaskGroup() as group:
        for index, item in enumerate(items):
            if index % _CHECKED_AT_ONCE == _CHECKED_AT_ONCE - 1:
                await asyncio.sleep(0)
            name = "" if isinstance(item, WheelschedError) else item.name
            last[name] = group.create_task(_put_item(api, request, item, last.get(name)), name="schedule")
            tasks.append(last[name])
    return [task.result() for task in tasks]


async def _put_item(
    api: Api, request: Request, item: schemas.ScheduleCreate | WheelschedError, before: asyncio.Task[bytes] | None
) -> bytes:
    if isinstance(item, WheelschedError):
        return _bad(item, request)
    if before is not None:
        await asyncio.wait((before,))
    try:
        record, is_new = await _put(api, request, item.name, item, None)
    except WheelschedError as error:
        return _bad(error, request)
    return b'{"status":%d,"schedule":%b}' % (201 if is_new else 200, render.schedule(record))


def _bad(error: WheelschedError, request: Request) -> bytes:
    return b'{"status":%d,"problem":%b}' % (error.status, problem.problem(error, request.request_id))


# --- a definition from a body ---------------------------------------------------------------------------------------------------


def _empty(tenant: str, name: str) -> Definition:
    """All defaults."""
    return Definition(b"", tenant, name, "")


def _definition(api: Api, model: Model, base: Definition) -> Definition:
    """`base` with what the body gives; null is the default. The anchor of a new interval is left out: see `_anchored`."""
    faults: list[Fault] = []
    changes = _timing(model, base, faults)
    changes |= _bounds(model, base, faults)
    changes |= _policies(model, base, faults)
    if not isinstance(model.job_template, UnsetType):
        template_faults: list[Fault] = []
        with inside("/job_template"):
            # No trace: a request's would differ each time and make every replacement a new version.
            priority, payload, spec = jobs.content_of(api, model.job_template, "", template_faults)
        faults += [fault | {"pointer": "/job_template" + fault["pointer"]} for fault in template_faults]
        changes |= {
            "queue": model.job_template.queue, "priority": priority, "window_ms": spec.window_ms, "spec": spec.row, "payload": payload,
        }  # fmt: skip
    if faults:
        raise refuse(faults)
    return replace(base, **changes)


def _timing(model: Model, base: Definition, faults: list[Fault]) -> dict[str, object]:
    """Cron in a zone, or elapsed time from an anchor, or neither: one of them given takes the other's place."""
    gives_cron, gives_every = _is_given(model.cron), _is_given(model.every_s)
    if model.cron == "":
        detail = "cron is empty; write five fields: minute hour day-of-month month day-of-week, or leave it out"
        raise InvalidSchedule(detail, errors=({"pointer": "/cron", "detail": detail},))
    if gives_cron and gives_every:
        _contradict("cron", "every_s", faults)
    cron = base.cron
    if gives_cron or gives_every or model.cron is None:
        cron = model.cron if isinstance(model.cron, str) else ""
    every_ms = base.every_ms
    if isinstance(model.every_s, float):
        every_ms = schemas.ms_of(model.every_s, "every_s", faults)
    elif gives_cron or model.every_s is None:
        every_ms = 0
    if _is_given(model.time_zone) and not cron:
        _misplaced("time_zone", "cron", "every_s" if every_ms else "", faults)
    if _is_given(model.anchor_at) and not every_ms:
        _misplaced("anchor_at", "every_s", "cron" if cron else "", faults)
    zone = base.zone if model.time_zone is UNSET and cron and base.cron else "UTC"
    if cron and isinstance(model.time_zone, str):
        zone = model.time_zone
    anchor_ms = base.anchor_ms if model.anchor_at is UNSET and every_ms and every_ms == base.every_ms else -1
    if every_ms and isinstance(model.anchor_at, str):
        anchor_ms = _instant(model.anchor_at, "anchor_at", faults, latest_ms=_RUN_MS_MAX)
    return {"cron": cron, "zone": zone, "every_ms": every_ms, "anchor_ms": anchor_ms}


def _is_given(value: object) -> bool:
    return value is not UNSET and value is not None


def _contradict(one: str, other: str, faults: list[Fault]) -> None:
    detail = f"{one} and {other} exclude each other: send cron with time_zone, or every_s with anchor_at, or neither"
    faults += ({"pointer": f"/{one}", "detail": detail}, {"pointer": f"/{other}", "detail": detail})


def _misplaced(field: str, belongs_to: str, there_is: str, faults: list[Fault]) -> None:
    if there_is:
        _contradict(field, there_is, faults)
    else:
        detail = f"{field} belongs to {belongs_to}, and there is none; send both or neither"
        faults.append({"pointer": f"/{field}", "detail": detail})


def _bounds(model: Model, base: Definition, faults: list[Fault]) -> dict[str, object]:
    start_ms, end_ms = base.start_ms, base.end_ms
    if not isinstance(model.start_at, UnsetType):
        start_ms = -1 if model.start_at is None else _instant(model.start_at, "start_at", faults, latest_ms=_RUN_MS_MAX)
    if not isinstance(model.end_at, UnsetType):
        end_ms = -1 if model.end_at is None else _instant(model.end_at, "end_at", faults)
    if 0 <= end_ms <= start_ms:
        start, end = times.format_instant(start_ms), times.format_instant(end_ms)
        detail = f"start_at {start} is not before end_at {end}; no run would lie between them"
        faults += ({"pointer": "/start_at", "detail": detail}, {"pointer": "/end_at", "detail": detail})
    return {"start_ms": start_ms, "end_ms": end_ms}


def _policies(model: Model, base: Definition, faults: list[Fault]) -> dict[str, object]:
    changes: dict[str, object] = {}
    if not isinstance(model.jitter_s, UnsetType):
        jitter_ms = 0 if model.jitter_s is None else schemas.ms_of(model.jitter_s, "jitter_s", faults)
        changes |= {"jitter_ms": jitter_ms, "offset_ms": jitter_of(base.name, jitter_ms)}
    if not isinstance(model.missed_runs, UnsetType):
        missed = model.missed_runs or schemas.MissedRuns()
        deadline_s = missed.starting_deadline_s
        changes |= {
            "missed": int(Missed.RUN_LATEST) if isinstance(missed.policy, UnsetType) else _POLICIES[missed.policy],
            "starting_deadline_ms": -1
            if isinstance(deadline_s, UnsetType) or deadline_s is None
            else schemas.ms_of(deadline_s, "missed_runs.starting_deadline_s", faults),
        }
    if not isinstance(model.overlap, UnsetType):
        changes["overlap"] = _OVERLAPS[model.overlap or "allow"]
    if not isinstance(model.max_concurrency, UnsetType):
        changes["max_concurrency"] = -1 if model.max_concurrency is None else model.max_concurrency
    if not isinstance(model.shadow, UnsetType):
        changes["shadow"] = bool(model.shadow)
    return changes


def _paused(model: Model) -> bool | None:
    """None: as it is."""
    return None if isinstance(model.paused, UnsetType) else bool(model.paused)


def _instant(text: str, field: str, faults: list[Fault], *, latest_ms: int = times.INSTANT_MS_MAX) -> int:
    try:
        at_ms = times.parse_instant(text)
        if at_ms > latest_ms:
            raise ValueError(f"is later than {times.format_instant(latest_ms)}, and no run can be; leave it out or choose an earlier one")
    except ValueError as error:
        faults.append({"pointer": f"/{field}", "detail": f"{field} {bodies.shown(text)} {error}"})
        return -1
    return at_ms


def _lacks_anchor(definition: Definition) -> bool:
    return definition.every_ms > 0 and definition.anchor_ms < 0


def _keep_anchor(wanted: Definition, existing: Definition) -> Definition:
    """Replaced by the same interval it runs on at its instants, so that an identical PUT changes nothing."""
    if _lacks_anchor(wanted) and wanted.every_ms == existing.every_ms:
        return replace(wanted, anchor_ms=existing.anchor_ms)
    return wanted


def _anchored(definition: Definition, now_ms: int) -> Definition:
    """An interval counts from when it was set, unless the client says from when."""
    return replace(definition, anchor_ms=now_ms) if _lacks_anchor(definition) else definition


def _check(api: Api, definition: Definition) -> Preview:
    """Raise what is wrong with its times."""
    return api.node.preview(definition, after_ms=api.node.clock.wall_ms(), count=1)


# --- read, delete, pause --------------------------------------------------------------------------------------------------------


def _name(request: Request) -> str:
    schemas.check_name(request.name, "", "schedule")
    return request.name


def _check_same_name(given: str | UnsetType, name: str) -> None:
    if not isinstance(given, UnsetType) and given != name:
        raise invalid("/name", f"name {bodies.shown(given)} is not {name}, which the path names; leave it out, a schedule keeps its name")


def _missing(name: str) -> NotFound:
    return NotFound(f"no schedule {name}")


def _answer(status: int, record: ScheduleRecord, *headers: bytes) -> Response:
    return Response(status, render.schedule(record), headers=(*headers, render.etag(record.definition.version)))


async def get(api: Api, request: Request) -> Response:
    name = _name(request)
    record = await api.node.read_schedule(request.tenant, name)
    if record is None:
        raise _missing(name)
    return _answer(200, record)


async def list_schedules(api: Api, request: Request) -> Response:
    queue = request.query["queue"][0] if "queue" in request.query else ""
    if "queue" in request.query:
        schemas.check_name(queue, "?queue", "queue")
    limit = cursors.limit_of(request.query)
    # Neither a tenant's name nor a queue's holds a blank.
    seal = cursors.Seal(api.node.settings.cluster.name, "schedules", f"{request.tenant} {queue}")
    position = cursors.position_of(request.query, seal)
    records, after = await api.node.list_schedules(request.tenant, queue=queue, after=position.decode() if position else "", limit=limit)
    next_cursor = seal.cursor(after.encode() if after is not None else None)
    return ok(render.page(b"schedules", [render.schedule(record) for record in records], next_cursor))


async def delete(api: Api, request: Request) -> Response:
    await api.node.drop_schedule(request.tenant, _name(request), actor=request.actor)
    return Response(204, b"")


async def pause(api: Api, request: Request) -> Response:
    return await _pause(api, request, True)


async def resume(api: Api, request: Request) -> Response:
    return await _pause(api, request, False)


async def _pause(api: Api, request: Request, paused: bool) -> Response:
    name = _name(request)
    _decode_empty(request)
    return _answer(200, await api.node.pause_schedule(request.tenant, name, paused, actor=request.actor))


def _decode_empty(request: Request) -> None:
    if request.body:
        bodies.decode(_decode_nothing, request.body)


async def preview(api: Api, request: Request) -> Response:
    model = bodies.decode(_decode_preview, request.body)
    name = ""
    if not isinstance(model.name, UnsetType):
        name = model.name
        schemas.check_name(name, "/name", "schedule")
    now_ms = api.node.clock.wall_ms()
    faults: list[Fault] = []
    after_ms = now_ms if isinstance(model.after, UnsetType) else _instant(model.after, "after", faults, latest_ms=_RUN_MS_MAX)
    if faults:
        raise refuse(faults)
    definition = _anchored(_definition(api, model, _empty(request.tenant, name)), now_ms)
    if not name and definition.cron:
        # What is hashed from a name is not to be shown as hashed from none.
        parse(definition.cron)
    count = limits.NEXT_RUNS if isinstance(model.count, UnsetType) else model.count
    return ok(render.preview(api.node.preview(definition, after_ms=after_ms, count=count)))


# --- runs -----------------------------------------------------------------------------------------------------------------------


async def start_run(api: Api, request: Request) -> Response:
    api.node.check_admission()
    name = _name(request)
    body = request.body or b"{}"
    model = bodies.decode(_decode_run, body)
    key = jobs.header_key(request)
    faults: list[Fault] = []
    run_at_ms, delay_ms = jobs.time_of(api, model.run_at, model.delay_s, faults)
    payload = None if isinstance(model.payload, UnsetType) else jobs.payload_of(api, model.payload)
    if faults:
        raise refuse(faults)
    reply = await api.node.start_run(
        request.tenant, name, run_at_ms=run_at_ms, delay_ms=delay_ms, payload=payload, key=key,
        fingerprint=bodies.fingerprint(body) if key else b"", actor=request.actor,
    )  # fmt: skip
    if reply.refusal:
        raise refusal(reply)
    assert reply.state is not None
    job_id = ids.format_job_id(reply.state.job_id)
    record = await api.node.read_job(request.tenant, reply.state.job_id)
    if record is None:
        # It was purged or discarded between the reply and the read; its key is free or refused from now on.
        raise IdempotencyKeyReused(f"{job_id}, made with this Idempotency-Key, is gone; use another key")
    headers = (b"Location: /v1/jobs/%b\r\n" % job_id.encode(), render.etag(record.state.version))
    if reply.replayed:
        return Response(200, render.job(record), headers=(*headers, b"Idempotent-Replayed: true\r\n"))
    return Response(201, render.job(record), headers=headers)


async def backfill(api: Api, request: Request) -> Response:
    api.node.check_admission()
    name = _name(request)
    model = bodies.decode(_decode_backfill, request.body)
    faults: list[Fault] = []
    from_ms, to_ms = _instant(model.from_, "from", faults), _instant(model.to, "to", faults)
    if not faults and from_ms >= to_ms:
        detail = f"from {model.from_} is not before to {model.to}; from is inclusive, to exclusive"
        faults += ({"pointer": "/from", "detail": detail}, {"pointer": "/to", "detail": detail})
    if faults:
        raise refuse(faults)
    counts = await api.node.backfill(request.tenant, name, from_ms=from_ms, to_ms=to_ms, actor=request.actor)
    return ok(b'{"created":%d,"skipped":%d,"existing":%d}' % (counts.created, counts.skipped, counts.existing))


async def list_runs(api: Api, request: Request) -> Response:
    name = _name(request)
    limit = cursors.limit_of(request.query)
    seal = cursors.Seal(api.node.settings.cluster.name, "runs", f"{request.tenant} {name}")
    position = cursors.position_of(request.query, seal)
    page = await api.node.list_runs(request.tenant, name, cursor=position, limit=limit)
    if page is None:
        raise _missing(name)
    return ok(render.runs(page.jobs, page.skipped, seal.cursor(page.cursor)))


# --- time zones -----------------------------------------------------------------------------------------------------------------


async def reload_zones(api: Api, request: Request) -> Response:
    _decode_empty(request)
    found = await api.node.reload_zones()
    return ok(orjson.dumps({"version": found.version, "zones": found.zones, "moved": found.moved}))
