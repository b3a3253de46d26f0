"""Attempts: heartbeat, complete and release, one by one and in batches."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final

import msgspec
import orjson
from msgspec import UnsetType

from wheelsched.api import batches, bodies, problem, render, schemas
from wheelsched.api.jobs import too_large
from wheelsched.api.problem import Fault, error_of, invalid, refusal, refuse
from wheelsched.api.request import Request, Response, ok
from wheelsched.api.times import format_instant
from wheelsched.core import ids, limits
from wheelsched.core.errors import StaleLease, WheelschedError
from wheelsched.model.commands import Release, Reply
from wheelsched.model.states import Outcome, Status
from wheelsched.node.face import HeartbeatReply

if TYPE_CHECKING:
    from wheelsched.api.app import Api

Token = tuple[bytes, int, int]
CompletionArgs = tuple[bytes, int, int, int, bytes, bytes, int]

_OUTCOMES: Final = {
    "succeeded": int(Outcome.SUCCEEDED),
    "retryable_failure": int(Outcome.RETRYABLE_FAILURE),
    "fatal_failure": int(Outcome.FATAL_FAILURE),
    "cancelled": int(Outcome.CANCELLED),
}
_OUTCOME_NUMBERS: Final = (_OUTCOMES["succeeded"], _OUTCOMES["retryable_failure"], _OUTCOMES["fatal_failure"], _OUTCOMES["cancelled"])
_RETRYING: Final = int(Status.RETRYING)
_ITEMS_AT_ONCE: Final = 100
# A longer body is decoded item by item, other connections in between; a scan of this is about a millisecond.
_SCAN_BYTES_MAX: Final = 1024 * 1024
_BATCH_OPAQUE: Final = frozenset({"heartbeats", "completions"})

_decode_heartbeat = msgspec.json.Decoder(schemas.Heartbeat)
_decode_completion = msgspec.json.Decoder(schemas.Completion)
_decode_heartbeats = msgspec.json.Decoder(schemas.HeartbeatBatch)
_decode_completions = msgspec.json.Decoder(schemas.CompletionBatch)
_decode_batch_heartbeat = msgspec.json.Decoder(schemas.BatchHeartbeat)
_decode_batch_completion = msgspec.json.Decoder(schemas.BatchCompletion)
_decode_nothing = msgspec.json.Decoder(schemas.Nothing)


def _token(text: str) -> Token:
    token = ids.parse_token(text)
    if token is None:
        raise StaleLease(f"{bodies.shown(text)} is no lease token of this cluster; claim again")
    return token


# --- heartbeat ------------------------------------------------------------------------------------------------------------------


async def heartbeat(api: Api, request: Request) -> Response:
    model = bodies.decode(_decode_heartbeat, request.body or b"{}")
    lease_ms, progress = _heartbeat(model)
    job_id, attempt, fencing = _token(request.name)
    reply = await api.node.heartbeat(job_id, attempt, fencing, lease_ms=lease_ms, progress=progress)
    if reply.refusal:
        raise error_of(reply.refusal, reply.detail)
    return ok(_extended(reply) + b"}")


def _heartbeat(model: schemas.Heartbeat) -> tuple[int | None, bytes | None]:
    """(lease ms, progress)."""
    faults: list[Fault] = []
    lease_ms = None if isinstance(model.lease_s, UnsetType) else schemas.ms_of(model.lease_s, "lease_s", faults)
    if faults:
        raise refuse(faults)
    if isinstance(model.progress, UnsetType):
        return lease_ms, None
    progress = bytes(model.progress)
    if len(progress) > limits.PROGRESS_BYTES_MAX:
        raise too_large("progress", len(progress), limits.PROGRESS_BYTES_MAX)
    return lease_ms, progress


def _extended(reply: HeartbeatReply) -> bytes:
    asked = "true" if reply.cancel_requested else "false"
    return f'{{"lease_expires_at":"{format_instant(reply.lease_expires_at_ms)}","cancel_requested":{asked}'.encode()


async def heartbeat_batch(api: Api, request: Request) -> Response:
    bodies.check_utf8(request.body)
    batch = bodies.decode_part(_decode_heartbeats, request.body, _BATCH_OPAQUE)
    schemas.check_item_count(batch.heartbeats, "heartbeats")
    results: list[bytes] = [b""] * len(batch.heartbeats)
    longer: list[tuple[int, Token, int, bytes | None]] = []
    for index, raw in enumerate(batch.heartbeats):
        if index % _ITEMS_AT_ONCE == _ITEMS_AT_ONCE - 1:
            await asyncio.sleep(0)
        body = bytes(raw)
        bodies.check_depth(body, around=2)
        try:
            model = bodies.decode_part(_decode_batch_heartbeat, body)
            token = _token(model.token)
            lease_ms, progress = _heartbeat(model)
            if lease_ms is not None:
                # Another length than the one on record goes through the log: those wait together, below.
                longer.append((index, token, lease_ms, progress))
                continue
            results[index] = await _beat(api, request, token, None, progress)
        except WheelschedError as error:
            results[index] = _bad(error, request)

    async def one(index: int, token: Token, lease_ms: int, progress: bytes | None) -> None:
        results[index] = await _beat(api, request, token, lease_ms, progress)

    if longer:
        async with asyncio.TaskGroup() as tasks:
            for arguments in longer:
                tasks.create_task(one(*arguments), name="heartbeat")
    return ok(b'{"results":[' + b",".join(results) + b"]}")


async def _beat(api: Api, request: Request, token: Token, lease_ms: int | None, progress: bytes | None) -> bytes:
    try:
        reply = await api.node.heartbeat(*token, lease_ms=lease_ms, progress=progress)
    except WheelschedError as error:
        return _bad(error, request)
    if reply.refusal:
        return _bad(error_of(reply.refusal, reply.detail), request)
    return b'{"status":200,' + _extended(reply)[1:] + b"}"


def _bad(error: WheelschedError, request: Request) -> bytes:
    return b'{"status":%d,"problem":%b}' % (error.status, problem.problem(error, request.request_id))


# --- complete -------------------------------------------------------------------------------------------------------------------


async def complete(api: Api, request: Request) -> Response:
    model = bodies.decode(_decode_completion, request.body)
    outcome, error, result, retry_after_ms = _completion(api, model)
    job_id, attempt, fencing = _token(request.name)
    reply = await api.node.complete(job_id, attempt, fencing, outcome=outcome, error=error, result=result, retry_after_ms=retry_after_ms)
    if reply.refusal:
        raise refusal(reply)
    return ok(b"{" + _ended(reply, "status") + b"}")


def _completion(api: Api, model: schemas.Completion) -> tuple[int, bytes, bytes, int]:
    """(outcome, error, result, retry_after ms)."""
    error = result = b""
    retry_after_ms = -1
    if not isinstance(model.error, UnsetType):
        error = _cut_error(bytes(model.error))
    if not isinstance(model.result, UnsetType):
        result = bytes(model.result)
        most = api.node.settings.limits.payload_bytes
        if len(result) > most:
            raise too_large("result", len(result), most)
    if not isinstance(model.retry_after_s, UnsetType):
        faults: list[Fault] = []
        retry_after_ms = schemas.ms_of(model.retry_after_s, "retry_after_s", faults)
        if faults:
            raise refuse(faults)
    return _OUTCOMES[model.outcome], error, result, retry_after_ms


def _ended(reply: Reply, status_field: str) -> bytes:
    state = reply.state
    assert state is not None
    # Redriven since: what is repeated is the answer of then.
    status = Status.DEAD if reply.replayed and state.status == Status.SCHEDULED else state.status
    text = f'"job_id":"{ids.format_job_id(state.job_id)}","{status_field}":"{render.STATUS_NAMES[status]}"'
    if state.status == _RETRYING:
        text += f',"next_attempt_at":"{format_instant(state.next_attempt_at_ms)}"'
    return text.encode()


async def complete_batch(api: Api, request: Request) -> Response:
    bodies.check_utf8(request.body)
    parsed = await _scanned(api, request) or await _decoded(api, request)
    good = [arguments for arguments in parsed if not isinstance(arguments, WheelschedError)]
    given = iter(await api.node.complete_many(good) if good else ())
    replies: list[Reply | None] = []
    others: list[bytes | None] = []
    for arguments in parsed:
        if isinstance(arguments, WheelschedError):
            replies.append(None)
            others.append(_bad(arguments, request))
            continue
        reply = next(given)
        replies.append(reply)
        if reply.refusal:
            others.append(_bad(refusal(reply), request))
        else:
            others.append(b'{"status":200,' + _ended(reply, "job_status") + b"}" if reply.replayed else None)
    return ok(batches.ended_json(replies, others, render.STATUS_NAMES, _RETRYING))


async def _scanned(api: Api, request: Request) -> list[CompletionArgs | WheelschedError] | None:
    """The items of a body in which nothing is unusual but single items; None for another body."""
    if len(request.body) > _SCAN_BYTES_MAX:
        return None
    most = api.node.settings.limits.payload_bytes
    items = batches.scan_completions(request.body, most, limits.ERROR_BYTES_MAX, _OUTCOME_NUMBERS)
    if items is None:
        return None
    odd = [place for place, item in enumerate(items) if type(item) is not tuple]
    for count, place in enumerate(odd):
        if count % _ITEMS_AT_ONCE == _ITEMS_AT_ONCE - 1:
            await asyncio.sleep(0)
        items[place] = _item(api, items[place])
    return items


async def _decoded(api: Api, request: Request) -> list[CompletionArgs | WheelschedError]:
    """The items of any body, decoded one by one."""
    batch = bodies.decode_part(_decode_completions, request.body, _BATCH_OPAQUE)
    schemas.check_item_count(batch.completions, "completions")
    parsed: list[CompletionArgs | WheelschedError] = []
    for index, raw in enumerate(batch.completions):
        if index % _ITEMS_AT_ONCE == _ITEMS_AT_ONCE - 1:
            await asyncio.sleep(0)
        parsed.append(_item(api, bytes(raw)))
    return parsed


def _item(api: Api, body: bytes) -> CompletionArgs | WheelschedError:
    bodies.check_depth(body, around=2)
    try:
        model = bodies.decode_part(_decode_batch_completion, body)
        return (*_token(model.token), *_completion(api, model))
    except WheelschedError as error:
        return error


def _cut_error(raw: bytes) -> bytes:
    """Text or an object as it came, or cut to 4 KiB: text at its end, an object at its longest texts, so that it stays JSON."""
    first = raw[:1]
    if first not in (b'"', b"{"):
        raise invalid("/error", f"error {bodies.shown(json.loads(raw))} is neither text nor an object; send one of them")
    most = limits.ERROR_BYTES_MAX
    if len(raw) <= most:
        return raw
    value: Any = json.loads(raw)
    if isinstance(value, dict):
        for name in sorted((key for key, item in value.items() if isinstance(item, str)), key=lambda key: -len(value[key])):
            over = len(_dumped(value)) - most
            if over <= 0:
                break
            value[name] = _cut_text(value[name], len(_dumped(value[name])) - over)
        cut = _dumped(value)
        if len(cut) <= most:
            return cut
        value = raw.decode("utf-8", "replace")
    return _dumped(_cut_text(value, most))


def _dumped(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except (TypeError, orjson.JSONEncodeError):
        return json.dumps(value).encode()


def _cut_text(text: str, bytes_max: int) -> str:
    """The longest beginning of `text` whose JSON has at most `bytes_max` bytes; empty where not even that fits."""
    low, high = 0, min(len(text), max(0, bytes_max))
    while low < high:
        middle = (low + high + 1) // 2
        if len(_dumped(text[:middle])) <= bytes_max:
            low = middle
        else:
            high = middle - 1
    return text[:low]


# --- release --------------------------------------------------------------------------------------------------------------------


async def release(api: Api, request: Request) -> Response:
    if request.body:
        bodies.decode(_decode_nothing, request.body)
    job_id, attempt, fencing = _token(request.name)
    reply = await api.node.propose(Release(job_id, attempt, fencing))
    if reply.refusal:
        raise refusal(reply)
    state = reply.state
    assert state is not None
    # A released job was due when it was claimed, so it is due.
    status = "CANCELLED" if state.status == Status.CANCELLED else "QUEUED"
    return ok(f'{{"job_id":"{ids.format_job_id(job_id)}","status":"{status}"}}'.encode())
