"""What a handler gets and what it gives: a request already routed, and a response as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from wheelsched.node.face import ClaimedJob

# Without authentication there is one tenant; with it, the token names one. Only `Request.tenant` is read elsewhere.
TENANT_DEFAULT: Final = "default"

JSON: Final = b"application/json"
PROBLEM: Final = b"application/problem+json"


class Request(msgspec.Struct, gc=False):
    """`name` is the decoded `{…}` of the path, "" where it has none; `query` maps each name to its values in order."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    request_id: str
    name: str = ""
    query: dict[str, list[str]] = {}
    tenant: str = TENANT_DEFAULT
    actor: str = ""
    traceparent: str = ""


class Response(msgspec.Struct, gc=False):
    """`headers` are whole lines, CRLF included. `hand_out`: jobs that go back if the answer does not arrive."""

    status: int
    body: bytes
    content_type: bytes = JSON
    headers: tuple[bytes, ...] = ()
    hand_out: list[ClaimedJob] | None = None


def ok(body: bytes) -> Response:
    return Response(200, body)
