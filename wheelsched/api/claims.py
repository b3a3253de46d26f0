"""Claims: what a worker calls to get work."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import UnsetType

from wheelsched.api import bodies, render, schemas
from wheelsched.api.problem import Fault, refuse
from wheelsched.api.request import Request, Response

if TYPE_CHECKING:
    from wheelsched.api.app import Api
    from wheelsched.node.face import ClaimedJob

_decode_claim = msgspec.json.Decoder(schemas.ClaimRequest)
_decode_many = msgspec.json.Decoder(schemas.ClaimMany)
_NO_JOBS: Final = b'{"jobs":[]}'


async def claim_queue(api: Api, request: Request) -> Response:
    schemas.check_name(request.name, "", "queue")
    model = bodies.decode(_decode_claim, request.body or b"{}")
    return await _claim(api, request, (request.name,), model)


async def claim_queues(api: Api, request: Request) -> Response:
    model = bodies.decode(_decode_many, request.body)
    for index, queue in enumerate(model.queues):
        schemas.check_name(queue, f"/queues/{index}", "queue")
    # Named twice is preferred where it stands first.
    return await _claim(api, request, tuple(dict.fromkeys(model.queues)), model)


async def _claim(api: Api, request: Request, queues: Sequence[str], model: schemas.ClaimRequest) -> Response:
    faults: list[Fault] = []
    lease_ms = None if isinstance(model.lease_s, UnsetType) else schemas.ms_of(model.lease_s, "lease_s", faults)
    wait_ms = 0 if isinstance(model.wait_s, UnsetType) else schemas.ms_of(model.wait_s, "wait_s", faults)
    jobs_max = 1 if isinstance(model.max, UnsetType) else model.max
    if faults:
        raise refuse(faults)
    worker = ""
    if not isinstance(model.worker, UnsetType):
        worker = model.worker
        schemas.check_name(worker, "/worker", "worker")
    api.node.check_admission(new_jobs=False)
    if wait_ms == 0:
        jobs = await api.node.claim(request.tenant, queues, jobs_max=jobs_max, lease_ms=lease_ms, wait_ms=0, worker=worker)
    else:
        jobs = await _poll(api, request, queues, jobs_max, lease_ms, wait_ms, worker)
    if not jobs:
        return Response(200, _NO_JOBS)
    return Response(200, render.claimed(jobs), hand_out=jobs)


async def _poll(
    api: Api, request: Request, queues: Sequence[str], jobs_max: int, lease_ms: int | None, wait_ms: int, worker: str
) -> list[ClaimedJob]:
    """Wait for work, but not past the end of this node: `api.end_polls` lets every waiting call answer empty-handed at once."""
    try:
        async with asyncio.timeout(None) as scope:
            api.polls.add(scope)
            if api.draining:
                # Began after the others were ended.
                wait_ms = 0
            return await api.node.claim(request.tenant, queues, jobs_max=jobs_max, lease_ms=lease_ms, wait_ms=wait_ms, worker=worker)
    except TimeoutError:
        if not scope.expired():
            raise
        return []
    finally:
        api.polls.discard(scope)
