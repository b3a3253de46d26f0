"""Jobs: create, batch, read, change, cancel, list, run, redrive, discard."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from wheelsched.api import batches, bodies, cursors, problem, render, schemas, times
from wheelsched.api.batches_pure import Spec
from wheelsched.api.problem import Fault, invalid, refusal, refuse
from wheelsched.api.request import Request, Response, ok
from wheelsched.api.schemas import Flexible, JobCreate
from wheelsched.core import ids, limits
from wheelsched.core.errors import (
    IdempotencyKeyReused,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    RunAtTooFar,
    VersionMismatch,
    WheelschedError,
)
from wheelsched.model.commands import Cancel, Create, Discard, Redrive, Reply, RunNow, Update
from wheelsched.model.rows import AttemptRow, JobSpec, encode_spec
from wheelsched.model.states import Status
from wheelsched.node.face import JobFilter, JobRecord

if TYPE_CHECKING:
    from wheelsched.api.app import Api

_PRIORITIES: Final = {"critical": 0, "default": 1, "bulk": 2}
_KEY: Final = re.compile(r"[!-~]{1,255}\Z")
_DAYS_MS: Final = limits.DELAY_S_MAX * 1000
# So many items are decoded before other connections get their turn: about a millisecond.
_ITEMS_AT_ONCE: Final = 100
_IF_MATCH: Final = re.compile(r'(W/)?"([^"]*)"')

_decode_create = msgspec.json.Decoder(schemas.JobCreate)
_decode_batch = msgspec.json.Decoder(schemas.JobBatch)
_decode_item = msgspec.json.Decoder(schemas.BatchJob)
_decode_patch = msgspec.json.Decoder(schemas.JobPatch)
_decode_nothing = msgspec.json.Decoder(schemas.Nothing)
_BATCH_OPAQUE: Final = frozenset({"jobs"})


# A longer one is decoded item by item, other connections in between; a scan of this is about a millisecond.
_SCAN_BYTES_MAX: Final = 1024 * 1024
# Specs of jobs seen in batches, by the bytes of the members they come from, so that each is decoded and encoded once.
_specs: dict[bytes, Spec] = {}
_SPECS_MAX: Final = 4_096


class Draft(msgspec.Struct, gc=False):
    """A create on its way to the log, and what its answer needs."""

    command: Create
    spec: Spec


# --- create ---------------------------------------------------------------------------------------------------------------------


async def create(api: Api, request: Request) -> Response:
    api.node.check_admission()
    model = bodies.decode(_decode_create, request.body)
    key = header_key(request)
    draft = _draft(api, request, model, request.body, key, spread_ms=0)
    reply = await api.node.propose(draft.command)
    status, body, version = await _created(api, request, draft, reply)
    location = b"Location: /v1/jobs/%b\r\n" % ids.format_job_id(draft.command.job_id).encode()
    if status == 200:
        return Response(200, body, headers=(location, render.etag(version), b"Idempotent-Replayed: true\r\n"))
    return Response(201, body, headers=(location, render.etag(version)))


async def create_batch(api: Api, request: Request) -> Response:
    api.node.check_admission()
    if "Idempotency-Key" in request.headers:
        raise InvalidRequest("the header Idempotency-Key does not apply to a batch; give each job its own idempotency_key")
    bodies.check_utf8(request.body)
    drafts = await _scanned(api, request) or await _decoded(api, request)
    good = [draft.command for draft in drafts if type(draft) is Draft]
    answers = await api.node.propose_many(good) if good else []
    if len(answers) == len(drafts) and (body := batches.created_json(drafts, answers, None)) is not None:
        return ok(body)
    given = iter(answers)
    replies: list[Reply | None] = []
    others: list[bytes | None] = []
    for index, draft in enumerate(drafts):
        reply = next(given) if type(draft) is Draft else None
        replies.append(reply)
        if reply is not None and not reply.refusal and not reply.replayed:
            others.append(None)
            continue
        if index % _ITEMS_AT_ONCE == _ITEMS_AT_ONCE - 1:
            await asyncio.sleep(0)
        others.append(await _other_result(api, request, draft, reply))
    body = batches.created_json(drafts, replies, others)
    assert body is not None
    return ok(body)


async def _scanned(api: Api, request: Request) -> list[Draft | WheelschedError] | None:
    """The items of a body in which nothing is unusual but single items; None for another body."""
    if len(request.body) > _SCAN_BYTES_MAX:
        return None
    now_ms = api.node.clock.wall_ms()
    scanned = batches.scan_jobs(request.body, api.node.settings.limits.payload_bytes, now_ms + _DAYS_MS, _specs)
    if scanned is None:
        return None
    items, spread_ms = scanned
    if request.traceparent:
        _trace(items, request.traceparent)
    odd = [(place, item) for place, item in enumerate(items) if len(item) == 2]
    for count, (place, (body, key)) in enumerate(odd):
        if count % _ITEMS_AT_ONCE == _ITEMS_AT_ONCE - 1:
            await asyncio.sleep(0)
        draft = items[place] = _item_draft(api, request, body, spread_ms)
        if key and isinstance(draft, Draft) and not request.traceparent:
            if len(_specs) >= _SPECS_MAX:
                _specs.clear()
                _specs[b""] = _PLAIN
            _specs[key] = draft.spec
    ids_needed = len(items) - len(odd)
    batches.draft_jobs(items, ids.new_job_ids(ids_needed, now_ms, api.node.rng), request.tenant, spread_ms, Create, Draft)
    return items


def _trace(items: list[Any], traceparent: str) -> None:
    """Give every job that was read its request's trace."""
    traced: dict[bytes, Spec] = {}
    for place, item in enumerate(items):
        if len(item) != 2:
            spec = item[5]
            if spec.row not in traced:
                traced[spec.row] = _shown(msgspec.structs.replace(spec.spec, traceparent=traceparent))
            items[place] = (*item[:5], traced[spec.row])


async def _decoded(api: Api, request: Request) -> list[Draft | WheelschedError]:
    """The items of any body, decoded one by one."""
    batch = bodies.decode_part(_decode_batch, request.body, _BATCH_OPAQUE)
    schemas.check_item_count(batch.jobs, "jobs")
    faults: list[Fault] = []
    spread_ms = 0 if isinstance(batch.spread_s, UnsetType) else schemas.ms_of(batch.spread_s, "spread_s", faults)
    if faults:
        raise refuse(faults)
    drafts: list[Draft | WheelschedError] = []
    for index, raw in enumerate(batch.jobs):
        if index % _ITEMS_AT_ONCE == _ITEMS_AT_ONCE - 1:
            await asyncio.sleep(0)
        drafts.append(_item_draft(api, request, bytes(raw), spread_ms))
    return drafts


def _item_draft(api: Api, request: Request, body: bytes, spread_ms: int) -> Draft | WheelschedError:
    # Too deep is a fault of the request, as it is with a body that the parser gave up on; all else is the item's own.
    bodies.check_depth(body, around=2)
    try:
        model = bodies.decode_part(_decode_item, body)
        key = (
            ""
            if isinstance(model.idempotency_key, UnsetType)
            else _checked_key(model.idempotency_key, "/idempotency_key", "idempotency_key")
        )
        return _draft(api, request, model, body, key, spread_ms=spread_ms)
    except WheelschedError as error:
        return error


async def _other_result(api: Api, request: Request, draft: Draft | WheelschedError, reply: Reply | None) -> bytes:
    """What is not a job just made: an error, or the job that a key made before."""
    if isinstance(draft, WheelschedError):
        return _bad(draft, request)
    assert reply is not None
    try:
        status, body, _version = await _created(api, request, draft, reply)
    except WheelschedError as error:
        return _bad(error, request)
    return b'{"status":%d,"job":%b}' % (status, body)


def _bad(error: WheelschedError, request: Request) -> bytes:
    return b'{"status":%d,"problem":%b}' % (error.status, problem.problem(error, request.request_id))


def header_key(request: Request) -> str:
    """The Idempotency-Key, empty: none."""
    key = request.headers.get("Idempotency-Key")
    return "" if key is None else _checked_key(key, "", "Idempotency-Key")


def _checked_key(key: str, pointer: str, what: str) -> str:
    if _KEY.match(key) is None:
        bad = next((letter for letter in key if not "!" <= letter <= "~"), None)
        fault = f"holds {bad!a} (U+{ord(bad):04X})" if bad else f"has {len(key)} characters"
        raise invalid(pointer, f"{what} {fault}; use 1 to {limits.IDEMPOTENCY_KEY_LENGTH_MAX} visible ASCII characters")
    return key


def _draft(api: Api, request: Request, model: JobCreate, body: bytes, key: str, *, spread_ms: int) -> Draft:
    """The command of one job, everything checked that can be without its group."""
    faults: list[Fault] = []
    priority, payload, spec = content_of(api, model, request.traceparent, faults)
    run_at_ms, delay_ms = time_of(api, model.run_at, model.delay_s, faults)
    if faults:
        raise refuse(faults)
    tenant = request.tenant
    job_id = ids.keyed_job_id(tenant, key) if key else api.node.new_job_id()
    return Draft(
        Create(
            job_id, tenant, model.queue, priority, run_at_ms, delay_ms, spec.window_ms, spread_ms, spec.row, payload,
            bodies.fingerprint(body) if key else b"",
        ),
        spec,
    )  # fmt: skip


def content_of(api: Api, model: schemas.JobTemplate, traceparent: str, faults: list[Fault]) -> tuple[int, bytes, Spec]:
    """(priority, payload, spec): what a job is, apart from its time."""
    schemas.check_name(model.queue, "/queue", "queue")
    if not isinstance(model.payload_ref, UnsetType):
        raise invalid("/payload_ref", "payload_ref needs a blob store, and none is configured (blobs.url); send the value as payload")
    window_ms = schemas.ms_of(model.timing.window_s, "timing.window_s", faults) if isinstance(model.timing, Flexible) else 0
    payload = b"null" if isinstance(model.payload, UnsetType) else payload_of(api, model.payload)
    priority = 1 if isinstance(model.priority, UnsetType) else _PRIORITIES[model.priority]
    return priority, payload, _spec(model, window_ms, traceparent, faults)


def time_of(api: Api, run_at: str | UnsetType, delay_s: float | UnsetType, faults: list[Fault]) -> tuple[int, int]:
    """(run_at ms or -1, delay ms or 0)."""
    if isinstance(run_at, UnsetType):
        if isinstance(delay_s, UnsetType):
            return -1, 0
        if delay_s > limits.DELAY_S_MAX:
            raise _too_far(
                "/delay_s", f"delay_s {delay_s!r} is above {limits.DELAY_S_MAX} (366 days); use a schedule, or create the job later"
            )
        return -1, schemas.ms_of(delay_s, "delay_s", faults)
    if not isinstance(delay_s, UnsetType):
        detail = "run_at and delay_s are both given; send one of them"
        faults += ({"pointer": "/run_at", "detail": detail}, {"pointer": "/delay_s", "detail": detail})
        return -1, 0
    try:
        run_at_ms = times.parse_instant(run_at)
    except ValueError as error:
        faults.append({"pointer": "/run_at", "detail": f"run_at {bodies.shown(run_at)} {error}"})
        return -1, 0
    if run_at_ms > api.node.clock.wall_ms() + _DAYS_MS:
        raise _too_far("/run_at", f"run_at {run_at} is more than 366 days ahead; use a schedule, or create the job later")
    return run_at_ms, 0


def _too_far(pointer: str, detail: str) -> RunAtTooFar:
    return RunAtTooFar(detail, errors=({"pointer": pointer, "detail": detail},))


def payload_of(api: Api, raw: msgspec.Raw) -> bytes:
    payload = bytes(raw)
    most = api.node.settings.limits.payload_bytes
    if len(payload) > most:
        raise too_large("payload", len(payload), most)
    return payload


def too_large(field: str, size: int, most: int) -> PayloadTooLarge:
    detail = f"{field} has {size} bytes, above {most}; store it elsewhere and send a reference"
    return PayloadTooLarge(detail, errors=({"pointer": "/" + field, "detail": detail},))


def _shown(spec: JobSpec) -> Spec:
    """A spec with its row and its words in an answer."""
    return Spec(spec.window_ms, encode_spec(spec), spec, *render.spec_json(spec))


_DEFAULTS: Final = JobSpec()
_PLAIN: Final = _specs.setdefault(b"", _shown(_DEFAULTS))


def _spec(model: schemas.JobTemplate, window_ms: int, traceparent: str, faults: list[Fault]) -> Spec:
    if (
        model.retry is UNSET and model.timeout_s is UNSET and model.start_deadline_s is UNSET and model.labels is UNSET
        and not window_ms and not traceparent
    ):  # fmt: skip
        return _PLAIN
    max_attempts, initial_ms, max_ms = _DEFAULTS.max_attempts, _DEFAULTS.initial_backoff_ms, _DEFAULTS.max_backoff_ms
    if not isinstance(model.retry, UnsetType):
        changes = _retry_changes(model.retry, faults)
        max_attempts = changes.get("max_attempts", max_attempts)
        initial_ms = changes.get("initial_backoff_ms", initial_ms)
        max_ms = changes.get("max_backoff_ms", max_ms)
    timeout_ms = _DEFAULTS.timeout_ms if isinstance(model.timeout_s, UnsetType) else schemas.ms_of(model.timeout_s, "timeout_s", faults)
    deadline_ms = -1 if isinstance(model.start_deadline_s, UnsetType) else schemas.ms_of(model.start_deadline_s, "start_deadline_s", faults)
    labels: dict[str, str] = {}
    if not isinstance(model.labels, UnsetType):
        labels = model.labels
        schemas.check_labels(labels, faults)
    return _shown(JobSpec(window_ms, max_attempts, initial_ms, max_ms, timeout_ms, deadline_ms, labels, "", traceparent))


def _retry_changes(retry: schemas.Retry, faults: list[Fault]) -> dict[str, int]:
    changes: dict[str, int] = {}
    if not isinstance(retry.max_attempts, UnsetType):
        changes["max_attempts"] = retry.max_attempts
    if not isinstance(retry.initial_backoff_s, UnsetType):
        changes["initial_backoff_ms"] = schemas.ms_of(retry.initial_backoff_s, "retry.initial_backoff_s", faults)
    if not isinstance(retry.max_backoff_s, UnsetType):
        changes["max_backoff_ms"] = schemas.ms_of(retry.max_backoff_s, "retry.max_backoff_s", faults)
    return changes


async def _created(api: Api, request: Request, draft: Draft, reply: Reply) -> tuple[int, bytes, int]:
    """(201 or 200, the job, its version). Raises what refused it."""
    if reply.refusal:
        raise refusal(reply)
    state = reply.state
    assert state is not None
    if reply.replayed:
        record = await api.node.read_job(request.tenant, state.job_id)
        if record is None:
            # It was purged or discarded between the reply and the read; its key is free or refused from now on.
            raise IdempotencyKeyReused(f"{ids.format_job_id(state.job_id)}, made with this Idempotency-Key, is gone; use another key")
        return 200, render.job(record), record.state.version
    command = draft.command
    # Due at its acceptance: the Fire that follows in the same entry makes it QUEUED before this answer leaves.
    is_due = state.fire_at_ms <= state.created_at_ms and not state.held
    body = render.job_json(state, "QUEUED" if is_due else "SCHEDULED", draft.spec.spec, command.payload)
    return 201, body, state.version


# --- read -----------------------------------------------------------------------------------------------------------------------


def job_id_of(request: Request) -> bytes:
    job_id = ids.parse_job_id(request.name)
    if job_id is None:
        raise NotFound(f"no job {bodies.shown(request.name)[1:-1]}")
    return job_id


async def record_of(api: Api, request: Request, job_id: bytes) -> JobRecord:
    record = await api.node.read_job(request.tenant, job_id)
    if record is None:
        raise NotFound(f"no job {ids.format_job_id(job_id)}")
    return record


async def get(api: Api, request: Request) -> Response:
    return _answer(200, await record_of(api, request, job_id_of(request)))


def _answer(status: int, record: JobRecord) -> Response:
    return Response(status, render.job(record), headers=(render.etag(record.state.version),))


async def attempts(api: Api, request: Request) -> Response:
    return ok(render.attempts(*await _history(api, request)))


async def events(api: Api, request: Request) -> Response:
    return ok(render.events(*await _history(api, request)))


async def _history(api: Api, request: Request) -> tuple[JobRecord, list[tuple[int, AttemptRow]]]:
    job_id = job_id_of(request)
    found = await api.node.read_attempts(request.tenant, job_id)
    if found is None:
        raise NotFound(f"no job {ids.format_job_id(job_id)}")
    return found


async def list_jobs(api: Api, request: Request) -> Response:
    query = request.query
    wanted = _filter(request)
    limit = cursors.limit_of(query)
    seal = cursors.Seal(api.node.settings.cluster.name, "jobs", wanted)
    position = cursors.position_of(query, seal)
    found = await api.node.list_jobs(wanted, cursor=position, limit=limit)
    return ok(render.page(b"jobs", [render.job(record) for record in found.jobs], seal.cursor(found.cursor)))


def _filter(request: Request) -> JobFilter:
    query = request.query
    queue = query["queue"][0] if "queue" in query else ""
    if "queue" in query:
        schemas.check_name(queue, "?queue", "queue")
    statuses = []
    for text in query.get("status", ()):
        status = Status.__members__.get(text)
        if status is None or status is Status.DISCARDED:
            names = ", ".join(name for name in render.STATUS_NAMES if name != "DISCARDED")
            raise invalid("?status", f"status {bodies.shown(text)} is none; it is one of {names}")
        statuses.append(status)
    labels = []
    for text in query.get("label", ()):
        key, colon, value = text.partition(":")
        if not colon or not key:
            raise invalid("?label", f"label {bodies.shown(text)} is no pair; write it name:value")
        labels.append((key, value))
    schedule = query["schedule"][0] if "schedule" in query else ""
    if "schedule" in query:
        schemas.check_name(schedule, "?schedule", "schedule")
    return JobFilter(
        request.tenant, queue, frozenset(statuses), tuple(labels),
        bound_of(query, "from", 0), bound_of(query, "to", 2**62), schedule,
    )  # fmt: skip


def bound_of(query: dict[str, list[str]], name: str, default: int) -> int:
    if name not in query:
        return default
    text = query[name][0]
    try:
        return times.parse_instant(text)
    except ValueError as error:
        hint = " (a + in a query is written %2B)" if " " in text else ""
        raise invalid(f"?{name}", f"{name} {bodies.shown(text)} {error}{hint}") from None


# --- change ---------------------------------------------------------------------------------------------------------------------


async def patch(api: Api, request: Request) -> Response:
    job_id = job_id_of(request)
    model = bodies.decode(_decode_patch, request.body)
    command = _update(api, request, job_id, model)
    versions = if_match(request)
    if versions is not None:
        command = msgspec.structs.replace(command, if_version=await _matching(api, request, job_id, versions))
    reply = await api.node.propose(command)
    if reply.refusal:
        raise refusal(reply)
    return _answer(200, await record_of(api, request, job_id))


def _update(api: Api, request: Request, job_id: bytes, model: schemas.JobPatch) -> Update:
    faults: list[Fault] = []
    run_at, delay_ms = time_of(api, model.run_at, model.delay_s, faults)
    window_ms = -1
    if not isinstance(model.timing, UnsetType):
        window_ms = schemas.ms_of(model.timing.window_s, "timing.window_s", faults) if isinstance(model.timing, Flexible) else 0
    changes: dict[str, int | dict[str, str]] = {}
    if not isinstance(model.retry, UnsetType):
        changes.update(_retry_changes(model.retry, faults))
    if not isinstance(model.timeout_s, UnsetType):
        changes["timeout_ms"] = schemas.ms_of(model.timeout_s, "timeout_s", faults)
    if not isinstance(model.labels, UnsetType):
        schemas.check_labels(model.labels, faults)
        changes["labels"] = model.labels
    payload = None if isinstance(model.payload, UnsetType) else payload_of(api, model.payload)
    if faults:
        raise refuse(faults)
    return Update(
        job_id, request.tenant, run_at, -1 if isinstance(model.delay_s, UnsetType) else delay_ms,
        -1 if isinstance(model.priority, UnsetType) else _PRIORITIES[model.priority],
        window_ms, changes, payload, 0, request.actor,
    )  # fmt: skip


def if_match(request: Request) -> list[int] | None:
    """Versions that `If-Match` allows (RFC 9110, 13.1.1); None: any. A weak tag never matches, nor does one that is not ours."""
    text = request.headers.get("If-Match")
    if text is None or text.strip() == "*":
        return None
    rest = _IF_MATCH.sub("", text).replace(",", "").strip()
    tags = _IF_MATCH.findall(text)
    if rest or not tags:
        raise InvalidRequest(f'If-Match {bodies.shown(text)} is no list of entity tags; write it "v3", as ETag gave it')
    return [int(tag[1:]) for weak, tag in tags if not weak and tag[:1] == "v" and tag[1:].isascii() and tag[1:].isdigit() and len(tag) < 12]


async def _matching(api: Api, request: Request, job_id: bytes, versions: list[int]) -> int:
    """The version to demand of the job. One alone is left to the log to compare; of several, the one the job has now."""
    if len(versions) == 1 and versions[0] > 0:
        return versions[0]
    record = await record_of(api, request, job_id)
    if record.state.version in versions:
        return record.state.version
    raise VersionMismatch(
        f"{ids.format_job_id(job_id)} is at version {record.state.version}, not {request.headers['If-Match']}; read it again"
    )


async def delete(api: Api, request: Request) -> Response:
    job_id = job_id_of(request)
    reply = await api.node.propose(Cancel(job_id, request.tenant, request.actor))
    if reply.refusal:
        raise refusal(reply)
    record = await record_of(api, request, job_id)
    assert reply.state is not None
    return _answer(202 if reply.state.status == Status.CANCEL_REQUESTED else 200, record)


async def run(api: Api, request: Request) -> Response:
    job_id = job_id_of(request)
    _decode_empty(request)
    return await _proposed(api, request, RunNow(job_id, request.tenant, request.actor))


async def redrive(api: Api, request: Request) -> Response:
    job_id = job_id_of(request)
    _decode_empty(request)
    return await _proposed(api, request, Redrive(job_id, request.tenant, 0, request.actor))


async def _proposed(api: Api, request: Request, command: RunNow | Redrive) -> Response:
    reply = await api.node.propose(command)
    if reply.refusal:
        raise refusal(reply)
    return _answer(200, await record_of(api, request, command.job_id))


async def discard(api: Api, request: Request) -> Response:
    job_id = job_id_of(request)
    _decode_empty(request)
    reply = await api.node.propose(Discard(job_id, request.tenant, request.actor))
    if reply.refusal:
        raise refusal(reply)
    return ok(b'{"discarded":1}')


def _decode_empty(request: Request) -> None:
    if request.body:
        bodies.decode(_decode_nothing, request.body)
