"""`/openapi.json`: OpenAPI 3.1, from the same rows that route and the same models that validate."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import msgspec
import orjson

from wheelsched.api import schemas
from wheelsched.api.routes import ROUTES, Param, Route
from wheelsched.core.errors import BY_CODE

_REF: Final = "#/components/schemas/{name}"
_JOB_ID: Final = "job_01h455vb4pex5vsknk084sn02q"
_TOKEN: Final = "att_" + "0" * 20 + "1h455vb4pex5vsknk084sn02qv"
# What any call may answer: malformed, unacceptable; a bug; not now; unknown.
_ANY_ERRORS: Final = (400, 406, 500, 503, 504)

_EXAMPLES: Final[dict[str, Any]] = {
    "JobCreate": {"queue": "mail", "delay_s": 600, "payload": {"to": "ada@example.org"}},
    "JobBatch": {"jobs": [{"queue": "mail", "payload": 1, "idempotency_key": "invoice-1"}], "spread_s": 600},
    "BatchJob": {"queue": "mail", "idempotency_key": "invoice-1"},
    "JobPatch": {"run_at": "2026-11-05T03:34:12Z"},
    "Nothing": {},
    "ClaimRequest": {"max": 10, "lease_s": 45, "wait_s": 20, "worker": "host-7"},
    "ClaimMany": {"queues": ["mail", "reports"], "max": 10, "wait_s": 20},
    "Heartbeat": {"lease_s": 45, "progress": {"done": 3, "of": 10}},
    "Completion": {"outcome": "succeeded", "result": {"sent": True}},
    "HeartbeatBatch": {"heartbeats": [{"token": _TOKEN}]},
    "CompletionBatch": {"completions": [{"token": _TOKEN, "outcome": "succeeded"}]},
    "QueuePut": {"max_concurrency": 50, "rate_per_s": 100, "lease_s": 60},
    "DeadSelection": {"job_ids": [_JOB_ID]},
    "DeadRedrive": {"all": True, "error_contains": "timeout", "spread_s": 600},
    "ScheduleCreate": {
        "name": "invoices", "cron": "0 9 1 * *", "time_zone": "Europe/Berlin",
        "job_template": {"queue": "billing", "payload": {"kind": "invoice"}}, "overlap": "forbid",
    },
    "SchedulePut": {"every_s": 900, "job_template": {"queue": "feeds"}, "missed_runs": {"policy": "skip"}},
    "SchedulePatch": {"cron": "0 10 1 * *", "end_at": None},
    "SchedulePreview": {"cron": "30 2 * * *", "time_zone": "America/New_York", "after": "2026-03-01T00:00:00Z", "count": 10},
    "ScheduleBatch": {"schedules": [{"name": "feeds", "every_s": 900, "job_template": {"queue": "feeds"}}]},
    "JobTemplate": {"queue": "billing", "payload": {"kind": "invoice"}},
    "RunCreate": {"payload": {"kind": "invoice", "month": "2026-01"}},
    "BackfillRequest": {"from": "2026-01-01T00:00:00Z", "to": "2026-02-01T00:00:00Z"},
    "NodeAdd": {"id": "n4", "http": "10.0.0.4:8080", "peer": "10.0.0.4:7080"},
    "GroupTransfer": {"to": "n2"},
    "BackupRequest": {"path": "/var/backups/wheelsched/2026-11-05"},
    "ClockAdvance": {"by_s": 3600},
    "Problem": {
        "type": "urn:wheelsched:problem:invalid-request", "title": "Invalid request", "status": 400,
        "detail": "max 500 is out of its bounds: at most 100; claim again for more", "code": "invalid-request",
        "errors": [{"pointer": "/max", "detail": "max 500 is out of its bounds: at most 100; claim again for more"}],
        "request_id": "req_3f9a1c77e2000001",
    },
}  # fmt: skip
_PATH_NAMES: Final[dict[str, dict[str, Any]]] = {
    "job_id": {"schema": {"type": "string", "maxLength": 64}, "example": _JOB_ID, "description": "A job's id."},
    "queue": {"schema": {"type": "string", "pattern": schemas.NAME_PATTERN}, "example": "mail", "description": "A queue's name."},
    "schedule": {"schema": {"type": "string", "pattern": schemas.NAME_PATTERN}, "example": "invoices", "description": "A schedule's name."},
    "node": {"schema": {"type": "string", "pattern": schemas.NAME_PATTERN}, "example": "n4", "description": "A node's id."},
    "group": {"schema": {"type": "string", "maxLength": 16}, "example": "7", "description": "A group's number, or meta."},
    "lease_token": {
        "schema": {"type": "string", "maxLength": 64},
        "example": _TOKEN,
        "description": "A lease token, as the claim gave it.",
    },
}


def document() -> bytes:
    return orjson.dumps(as_dict(), option=orjson.OPT_INDENT_2)


def as_dict() -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "wheelsched", "version": _version(),
            "description": "A durable job scheduler. Errors are problem details (RFC 9457); `code` tells them apart.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": tag} for tag in dict.fromkeys(route.tag for route in ROUTES)],
        "paths": paths,
        "components": {"schemas": _schemas(), "responses": _responses()},
    }  # fmt: skip


def _version() -> str:
    try:
        return version("wheelsched")
    except PackageNotFoundError:
        return "0"


def _models() -> list[type]:
    models: dict[type, None] = {
        schemas.BatchJob: None, schemas.BatchHeartbeat: None, schemas.BatchCompletion: None, schemas.Problem: None,
    }  # fmt: skip
    for route in ROUTES:
        for model in (route.body, *route.answers.values()):
            if model is not None:
                models[model] = None
    return list(models)


def _schemas() -> dict[str, Any]:
    _, components = msgspec.json.schema_components(_models(), ref_template=_REF)
    for name, schema in components.items():
        _plain(schema)
        if name in _EXAMPLES:
            schema["examples"] = [_EXAMPLES[name]]
    return components


def _plain(schema: Any) -> None:
    """A union told apart by a member is `oneOf`, as OpenAPI's discriminator wants it."""
    if isinstance(schema, dict):
        if "discriminator" in schema and "anyOf" in schema:
            schema["oneOf"] = schema.pop("anyOf")
        for item in schema.values():
            _plain(item)
    elif isinstance(schema, list):
        for item in schema:
            _plain(item)


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.operation_id,
        "summary": route.summary,
        "tags": [route.tag],
        "parameters": list(_parameters(route)),
        "responses": {str(status): _answer(route, status, model) for status, model in route.answers.items()},
    }
    if not operation["parameters"]:
        del operation["parameters"]
    errors = set(route.errors)
    if route.strict:
        errors.update(_ANY_ERRORS)
    for status in sorted(errors - set(route.answers)):
        operation["responses"][str(status)] = {"$ref": f"#/components/responses/Problem{status}"}
    if route.body is not None:
        operation["requestBody"] = {
            "required": not route.body_optional,
            "content": {"application/json": {"schema": _ref(route.body)}},
        }
    return operation


def _parameters(route: Route) -> Iterable[dict[str, Any]]:
    for name in re.findall(r"\{(\w+)\}", route.path):
        yield {"name": name, "in": "path", "required": True, **_PATH_NAMES[name]}
    for param in route.query:
        yield _parameter(param, "query")
    for param in route.headers:
        yield _parameter(param, "header")


def _parameter(param: Param, place: str) -> dict[str, Any]:
    parameter: dict[str, Any] = {"name": param.name, "in": place, "required": False, "schema": param.schema, "description": param.doc}
    if param.repeats:
        parameter |= {"style": "form", "explode": True}
    return parameter


_TITLES: Final = {200: "Done.", 201: "Created.", 202: "Accepted: it will happen.", 204: "Done; there is no body.", 503: "Not now."}
_HEADERS: Final[dict[str, Any]] = {
    "ETag": {"schema": {"type": "string"}, "description": "The version, for If-Match."},
    "Location": {"schema": {"type": "string"}, "description": "Where it is."},
    "Idempotent-Replayed": {"schema": {"type": "string"}, "description": "`true`: the key was seen before; this is what it made."},
}


def _answer(route: Route, status: int, model: type | None) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": _TITLES[status]}
    if route.plain:
        return answer | {"content": {"text/plain": {"schema": {"type": "string"}}}}
    if status == 204:
        return answer
    schema = {"type": "object"} if model is None else _ref(model)
    headers = []
    if model in (schemas.Job, schemas.Schedule):
        headers.append("ETag")
        if status == 201:
            headers.append("Location")
        elif 201 in route.answers and route.method == "POST":
            headers += ["Location", "Idempotent-Replayed"]
    if headers:
        answer["headers"] = {name: _HEADERS[name] for name in headers}
    return answer | {"content": {"application/json": {"schema": schema}}}


def _ref(model: type) -> dict[str, str]:
    return {"$ref": _REF.format(name=model.__name__)}


def _responses() -> dict[str, Any]:
    """One response for each status that problems have, with the codes it may carry."""
    codes: dict[int, list[str]] = {500: ["internal"]}
    for code, error in BY_CODE.items():
        codes.setdefault(error.status, []).append(code)
    return {
        f"Problem{status}": {
            "description": "Problem: " + ", ".join(sorted(names)) + ".",
            "content": {"application/problem+json": {"schema": {"$ref": _REF.format(name="Problem")}}},
        }
        for status, names in sorted(codes.items())
    }
