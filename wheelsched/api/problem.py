"""Errors as problem details (RFC 9457). Nothing else renders one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import orjson

from wheelsched.core.errors import BY_CODE, InvalidRequest, MethodNotAllowed, WheelschedError
from wheelsched.model.commands import Reply

Fault = dict[str, str]

_TYPE = "urn:wheelsched:problem:"
RETRY_AFTER_S_DEFAULT = 1


def problem(error: WheelschedError, request_id: str) -> bytes:
    """The JSON of an error; `errors` only where single faults are known."""
    document: dict[str, object] = {
        "type": _TYPE + error.code,
        "title": error.title,
        "status": error.status,
        "detail": error.detail,
        "code": error.code,
    }
    if error.errors:
        document["errors"] = error.errors
    document["request_id"] = request_id
    # A message may quote what a client sent; a lone surrogate in it must not turn a 400 into a 500.
    try:
        return orjson.dumps(document)
    except (TypeError, orjson.JSONEncodeError):
        return orjson.dumps(_printable(document))


def _printable(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {str(_printable(key)): _printable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_printable(item) for item in value]
    return value


def headers(error: WheelschedError) -> tuple[bytes, ...]:
    """Header lines that go with an error: Retry-After where waiting helps, Allow with a 405."""
    lines = []
    if error.retry_after_s is not None or error.status in (429, 503):
        wait_s = RETRY_AFTER_S_DEFAULT if error.retry_after_s is None else max(1, math.ceil(error.retry_after_s))
        lines.append(b"Retry-After: %d\r\n" % wait_s)
    if isinstance(error, MethodNotAllowed):
        lines.append(b"Allow: %b\r\n" % ", ".join(error.allowed).encode())
    return tuple(lines)


def invalid(pointer: str, detail: str) -> InvalidRequest:
    """One fault, at one place of the body (a JSON pointer) or of the query (`?name`)."""
    return InvalidRequest(detail, errors=({"pointer": pointer, "detail": detail},))


@contextmanager
def inside(pointer: str) -> Iterator[None]:
    """Faults raised in the block stand under this place of the body."""
    try:
        yield
    except WheelschedError as error:
        error.errors = tuple({**fault, "pointer": pointer + fault["pointer"]} for fault in error.errors)
        raise


def refuse(faults: Sequence[Fault]) -> InvalidRequest:
    """All faults of a request as one error."""
    assert faults
    more = len(faults) - 1
    tail = f" (and {more} more)" if more else ""
    return InvalidRequest(faults[0]["detail"] + tail, errors=faults)


def refusal(reply: Reply) -> WheelschedError:
    """The error that a reply of the state machine stands for."""
    return error_of(reply.refusal, reply.detail)


def error_of(code: str, detail: str) -> WheelschedError:
    return BY_CODE.get(code, WheelschedError)(detail or code)
