"""The document: valid, complete, and true of what the server says."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from fake_node import serving

from wheelsched.api import openapi
from wheelsched.api.routes import ROUTES

DOCUMENT = openapi.as_dict()
HTTP_METHODS = {"get", "put", "post", "patch", "delete"}


def test_the_document_is_valid_openapi_3_1() -> None:
    validator = pytest.importorskip("openapi_spec_validator")
    validator.validate(json.loads(openapi.document()))


def test_every_route_is_in_it_and_nothing_else() -> None:
    described = {(method, path) for path, item in DOCUMENT["paths"].items() for method in item if method in HTTP_METHODS}
    assert described == {(route.method.lower(), route.path) for route in ROUTES}
    ids = [item[method]["operationId"] for item in DOCUMENT["paths"].values() for method in item]
    assert len(ids) == len(set(ids))


def validator_of(schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    text = json.dumps({"schema": schema, "$defs": DOCUMENT["components"]["schemas"]}).replace("#/components/schemas/", "#/$defs/")
    whole = json.loads(text)
    return jsonschema.Draft202012Validator({"$defs": whole["$defs"], **whole["schema"]})


@pytest.mark.parametrize("name", sorted(openapi._EXAMPLES))
def test_examples_fit_their_schemas(name: str) -> None:
    validator_of({"$ref": f"#/components/schemas/{name}"}).validate(openapi._EXAMPLES[name])


async def test_answers_fit_their_schemas() -> None:
    async with serving() as api:
        job = await api.create(labels={"a": "b"}, timing={"class": "flexible", "window_s": 0.001 + 1}, payload={"x": [1]})
        await api.create()
        (claimed,) = await api.claim()
        token, job_id = claimed["lease_token"], job["job_id"]
        await api.call("POST", f"/v1/attempts/{token}:heartbeat", {"progress": 1})
        calls: list[tuple[str, str, str, Any]] = [
            ("POST", "/v1/jobs", "/v1/jobs", {"queue": "mail"}),
            ("POST", "/v1/jobs", "/v1/jobs", {}),
            ("GET", "/v1/jobs", "/v1/jobs", None),
            ("POST", "/v1/jobs:batch", "/v1/jobs:batch", {"jobs": [{"queue": "mail"}, {}]}),
            ("GET", "/v1/jobs/{job_id}", f"/v1/jobs/{job_id}", None),
            ("GET", "/v1/jobs/{job_id}", f"/v1/jobs/{claimed['job_id']}", None),
            ("GET", "/v1/jobs/{job_id}/events", f"/v1/jobs/{claimed['job_id']}/events", None),
            ("GET", "/v1/jobs/{job_id}/attempts", f"/v1/jobs/{claimed['job_id']}/attempts", None),
            ("GET", "/v1/jobs/{job_id}", "/v1/jobs/x", None),
            ("GET", "/v1/queues", "/v1/queues", None),
            ("GET", "/v1/queues/{queue}", "/v1/queues/mail", None),
            ("PUT", "/v1/queues/{queue}", "/v1/queues/mail", {}),
            ("POST", "/v1/queues/{queue}:claim", "/v1/queues/mail:claim", {"max": 1}),
            ("POST", "/v1/claims", "/v1/claims", {"queues": ["mail"]}),
            ("POST", "/v1/attempts/{lease_token}:heartbeat", f"/v1/attempts/{token}:heartbeat", {}),
            ("POST", "/v1/attempts:heartbeat", "/v1/attempts:heartbeat", {"heartbeats": [{"token": token}, {"token": "x"}]}),
            ("POST", "/v1/attempts/{lease_token}:complete", f"/v1/attempts/{token}:complete", {"outcome": "retryable_failure"}),
            ("POST", "/v1/attempts/{lease_token}:release", f"/v1/attempts/{token}:release", None),
            (
                "POST",
                "/v1/attempts:complete",
                "/v1/attempts:complete",
                {"completions": [{"token": token, "outcome": "retryable_failure"}, {"token": "x"}]},
            ),
            ("DELETE", "/v1/jobs/{job_id}", f"/v1/jobs/{job_id}", None),
            ("GET", "/v1/queues/{queue}/dead-letters", "/v1/queues/mail/dead-letters", None),
            ("POST", "/v1/queues/{queue}/dead-letters:redrive", "/v1/queues/mail/dead-letters:redrive", {"all": True}),
            ("GET", "/v1/clock", "/v1/clock", None),
            ("POST", "/v1/clock:advance", "/v1/clock:advance", {"by_s": 1}),
            ("GET", "/livez", "/livez", None),
            ("GET", "/readyz", "/readyz", None),
            ("GET", "/status", "/status", None),
        ]
        for method, template, path, body in calls:
            answer = await api.call(method, path, body)
            response = DOCUMENT["paths"][template][method.lower()]["responses"][str(answer.status)]
            if "$ref" in response:
                response = DOCUMENT["components"]["responses"][response["$ref"].rpartition("/")[2]]
            ((content_type, media),) = response["content"].items()
            assert answer.headers["content-type"] == content_type, (method, path)
            validator_of(media["schema"]).validate(answer.json)
        served = await api.call("GET", "/openapi.json")
        assert served.json == json.loads(openapi.document())
