"""Every call: one row each, for the dispatcher and for the document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, get_args

from wheelsched.api import admin, attempts, backups, claims, cluster, forecast, jobs, queues, schedules, schemas
from wheelsched.api.request import Request, Response
from wheelsched.core import limits

if TYPE_CHECKING:
    from wheelsched.api.app import Api

Handler = Callable[["Api", Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Param:
    """A query parameter. `repeats`: may be given more than once."""

    name: str
    schema: dict[str, Any]
    doc: str
    repeats: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """`answers` maps statuses to models, `errors` are the statuses of problems beyond those any call may have.

    `strict` False: a probe, which answers whatever it is asked with, query and Accept unread.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    tag: str
    body: type | None = None
    body_optional: bool = False
    answers: dict[int, type | None]
    errors: tuple[int, ...] = ()
    query: tuple[Param, ...] = ()
    headers: tuple[Param, ...] = ()
    body_bytes_max: int = limits.REQUEST_BYTES_MAX
    strict: bool = True
    # End of file while it is answered means that the client hung up, and cancels it.
    is_poll: bool = False
    plain: bool = False

    @property
    def operation_id(self) -> str:
        return f"{self.tag}_{self.handler.__name__}"


_STRING: Final = {"type": "string"}
_NAME: Final = {"type": "string", "pattern": schemas.NAME_PATTERN}
_INSTANT: Final = {"type": "string", "format": "date-time"}
_PAGING: Final = (
    Param("limit", {"type": "integer", "minimum": 1, "maximum": limits.PAGE_MAX, "default": limits.PAGE_DEFAULT}, "Items a page."),
    Param("cursor", _STRING, "Where to go on: `next_cursor` of the page before."),
)
_JOB_FILTER: Final = (
    Param("queue", _NAME, "Jobs of this queue."),
    Param("status", {"type": "array", "items": {"enum": list(get_args(schemas.StatusName))}}, "Jobs seen in one of these.", True),
    Param("label", {"type": "array", "items": {"type": "string", "pattern": "^[^:]+:"}}, "Jobs with all of these, each name:value.", True),
    Param("schedule", _NAME, "Runs of this schedule."),
    Param("from", _INSTANT, "`fire_at` at or after this instant."),
    Param("to", _INSTANT, "`fire_at` before this instant."),
)
_FORECAST: Final = (
    Param("from", _INSTANT, "The minute to begin with; now by default."),
    Param("to", _INSTANT, "The minute to end before, at most seven days later; a day by default."),
)
_QUEUE: Final = Param("queue", _NAME, "Schedules whose runs go to this queue.")
_FORCE: Final = Param(
    "force", {"type": "boolean", "default": False}, "The node never comes back, and its groups may be left with fewer replicas."
)
_KEY: Final = Param(
    "Idempotency-Key", {"type": "string", "pattern": "^[!-~]{1,255}$"}, "The same key and body answer with what they made the first time."
)
_IF_MATCH: Final = Param("If-Match", _STRING, 'Change only the version that this `ETag` names: `"v3"`.')

ROUTES: Final = (
    Route(method="POST", path="/v1/jobs", handler=jobs.create, tag="jobs", summary="Create a job.",
          body=schemas.JobCreate, answers={201: schemas.Job, 200: schemas.Job}, errors=(409, 413, 415, 422, 429),
          headers=(_KEY,)),
    Route(method="GET", path="/v1/jobs", handler=jobs.list_jobs, tag="jobs", summary="List jobs, newest fire_at last.",
          answers={200: schemas.JobPage}, query=_JOB_FILTER + _PAGING),
    Route(method="POST", path="/v1/jobs:batch", handler=jobs.create_batch, tag="jobs",
          summary="Create up to 1,000 jobs; each has its own result.", body=schemas.JobBatch, answers={200: schemas.JobResults},
          errors=(413, 415, 429), body_bytes_max=limits.BATCH_BYTES_MAX),
    Route(method="GET", path="/v1/jobs/{job_id}", handler=jobs.get, tag="jobs", summary="Read a job.",
          answers={200: schemas.Job}, errors=(404,)),
    Route(method="PATCH", path="/v1/jobs/{job_id}", handler=jobs.patch, tag="jobs", summary="Change a job that is SCHEDULED.",
          body=schemas.JobPatch, answers={200: schemas.Job}, errors=(404, 409, 412, 413, 415), headers=(_IF_MATCH,)),
    Route(method="DELETE", path="/v1/jobs/{job_id}", handler=jobs.delete, tag="jobs", summary="Cancel a job.",
          answers={200: schemas.Job, 202: schemas.Job}, errors=(404, 409)),
    Route(method="GET", path="/v1/jobs/{job_id}/attempts", handler=jobs.attempts, tag="jobs", summary="Attempts of a job.",
          answers={200: schemas.Attempts}, errors=(404,)),
    Route(method="GET", path="/v1/jobs/{job_id}/events", handler=jobs.events, tag="jobs", summary="Every transition of a job.",
          answers={200: schemas.Events}, errors=(404,)),
    Route(method="POST", path="/v1/jobs/{job_id}:run", handler=jobs.run, tag="jobs", summary="Fire a waiting job now.",
          body=schemas.Nothing, body_optional=True, answers={200: schemas.Job}, errors=(404, 409, 415)),
    Route(method="POST", path="/v1/jobs/{job_id}:redrive", handler=jobs.redrive, tag="jobs", summary="Run a DEAD job again.",
          body=schemas.Nothing, body_optional=True, answers={200: schemas.Job}, errors=(404, 409, 415)),
    Route(method="POST", path="/v1/jobs/{job_id}:discard", handler=jobs.discard, tag="jobs", summary="Forget a DEAD job.",
          body=schemas.Nothing, body_optional=True, answers={200: schemas.Discarded}, errors=(404, 409, 415)),
    Route(method="GET", path="/v1/queues", handler=queues.list_queues, tag="queues", summary="List queues by name.",
          answers={200: schemas.QueuePage}, query=_PAGING),
    Route(method="GET", path="/v1/queues/{queue}", handler=queues.get, tag="queues", summary="Depth, lateness and settings of a queue.",
          answers={200: schemas.Queue}, errors=(404,)),
    Route(method="PUT", path="/v1/queues/{queue}", handler=queues.put, tag="queues", summary="Replace a queue's settings.",
          body=schemas.QueuePut, answers={200: schemas.Queue}, errors=(413, 415, 429)),
    Route(method="POST", path="/v1/queues/{queue}:pause", handler=queues.pause, tag="queues", summary="Stop claims of a queue.",
          body=schemas.Nothing, body_optional=True, answers={200: schemas.Queue}, errors=(415, 429)),
    Route(method="POST", path="/v1/queues/{queue}:resume", handler=queues.resume, tag="queues", summary="Let claims go on.",
          body=schemas.Nothing, body_optional=True, answers={200: schemas.Queue}, errors=(415, 429)),
    Route(method="GET", path="/v1/queues/{queue}/dead-letters", handler=queues.dead_letters, tag="queues",
          summary="DEAD jobs of a queue with their last error.", answers={200: schemas.JobPage}, errors=(404,), query=_PAGING),
    Route(method="POST", path="/v1/queues/{queue}/dead-letters:redrive", handler=queues.redrive, tag="queues",
          summary="Run dead letters again.", body=schemas.DeadRedrive, answers={200: schemas.Redriven}, errors=(413, 415)),
    Route(method="POST", path="/v1/queues/{queue}/dead-letters:discard", handler=queues.discard, tag="queues",
          summary="Forget dead letters.", body=schemas.DeadSelection, answers={200: schemas.Discarded}, errors=(413, 415)),
    Route(method="POST", path="/v1/queues/{queue}:claim", handler=claims.claim_queue, tag="claims", summary="Claim jobs of a queue.",
          body=schemas.ClaimRequest, body_optional=True, answers={200: schemas.Claimed}, errors=(413, 415, 429), is_poll=True),
    Route(method="POST", path="/v1/claims", handler=claims.claim_queues, tag="claims",
          summary="Claim jobs of several queues, in the order of preference.",
          body=schemas.ClaimMany, answers={200: schemas.Claimed}, errors=(413, 415, 429), is_poll=True),
    Route(method="POST", path="/v1/attempts/{lease_token}:heartbeat", handler=attempts.heartbeat, tag="attempts",
          summary="Extend a lease.", body=schemas.Heartbeat, body_optional=True, answers={200: schemas.HeartbeatInfo},
          errors=(409, 413, 415)),
    Route(method="POST", path="/v1/attempts/{lease_token}:complete", handler=attempts.complete, tag="attempts",
          summary="End an attempt.", body=schemas.Completion, answers={200: schemas.CompletionInfo}, errors=(409, 413, 415)),
    Route(method="POST", path="/v1/attempts/{lease_token}:release", handler=attempts.release, tag="attempts",
          summary="Give a job back, the attempt not counted.", body=schemas.Nothing, body_optional=True,
          answers={200: schemas.ReleaseInfo}, errors=(409, 415)),
    Route(method="POST", path="/v1/attempts:heartbeat", handler=attempts.heartbeat_batch, tag="attempts",
          summary="Extend up to 1,000 leases.", body=schemas.HeartbeatBatch, answers={200: schemas.HeartbeatResults},
          errors=(413, 415), body_bytes_max=limits.BATCH_BYTES_MAX),
    Route(method="POST", path="/v1/attempts:complete", handler=attempts.complete_batch, tag="attempts",
          summary="End up to 1,000 attempts.", body=schemas.CompletionBatch, answers={200: schemas.CompletionResults},
          errors=(413, 415), body_bytes_max=limits.BATCH_BYTES_MAX),
    Route(method="POST", path="/v1/schedules", handler=schedules.create, tag="schedules", summary="Create a schedule.",
          body=schemas.ScheduleCreate, answers={201: schemas.Schedule, 200: schemas.Schedule}, errors=(409, 413, 415, 422, 429),
          headers=(_KEY,)),
    Route(method="GET", path="/v1/schedules", handler=schedules.list_schedules, tag="schedules", summary="List schedules by name.",
          answers={200: schemas.SchedulePage}, query=(_QUEUE, *_PAGING)),
    Route(method="POST", path="/v1/schedules:batch", handler=schedules.put_batch, tag="schedules",
          summary="Create or replace up to 1,000 schedules; each has its own result.", body=schemas.ScheduleBatch,
          answers={200: schemas.ScheduleResults}, errors=(413, 415, 429), body_bytes_max=limits.BATCH_BYTES_MAX),
    Route(method="POST", path="/v1/schedules:preview", handler=schedules.preview, tag="schedules",
          summary="The next runs of a schedule that need not exist.", body=schemas.SchedulePreview,
          answers={200: schemas.PreviewInfo}, errors=(413, 415)),
    Route(method="GET", path="/v1/schedules/{schedule}", handler=schedules.get, tag="schedules", summary="Read a schedule.",
          answers={200: schemas.Schedule}, errors=(404,)),
    Route(method="PUT", path="/v1/schedules/{schedule}", handler=schedules.put, tag="schedules",
          summary="Create or replace a schedule; the same again changes nothing.", body=schemas.SchedulePut,
          answers={200: schemas.Schedule, 201: schemas.Schedule}, errors=(412, 413, 415, 429), headers=(_IF_MATCH,)),
    Route(method="PATCH", path="/v1/schedules/{schedule}", handler=schedules.patch, tag="schedules", summary="Change a schedule.",
          body=schemas.SchedulePatch, answers={200: schemas.Schedule}, errors=(404, 412, 413, 415, 429), headers=(_IF_MATCH,)),
    Route(method="DELETE", path="/v1/schedules/{schedule}", handler=schedules.delete, tag="schedules",
          summary="Delete a schedule and withdraw its waiting run; its history stays.", answers={204: None}, errors=(404,)),
    Route(method="POST", path="/v1/schedules/{schedule}:pause", handler=schedules.pause, tag="schedules", summary="Fire no more runs.",
          body=schemas.Nothing, body_optional=True, answers={200: schemas.Schedule}, errors=(404, 415)),
    Route(method="POST", path="/v1/schedules/{schedule}:resume", handler=schedules.resume, tag="schedules",
          summary="Go on from now; what was missed while paused does not run.", body=schemas.Nothing, body_optional=True,
          answers={200: schemas.Schedule}, errors=(404, 415)),
    Route(method="POST", path="/v1/schedules/{schedule}:backfill", handler=schedules.backfill, tag="schedules",
          summary="A run for each occurrence of a range that has none.", body=schemas.BackfillRequest,
          answers={200: schemas.BackfillInfo}, errors=(404, 413, 415, 429)),
    Route(method="POST", path="/v1/schedules/{schedule}/runs", handler=schedules.start_run, tag="schedules", summary="A run by hand.",
          body=schemas.RunCreate, body_optional=True, answers={201: schemas.Job, 200: schemas.Job},
          errors=(404, 409, 413, 415, 422, 429), headers=(_KEY,)),
    Route(method="GET", path="/v1/schedules/{schedule}/runs", handler=schedules.list_runs, tag="schedules",
          summary="Runs of a schedule, newest first, and what was left out.", answers={200: schemas.RunPage}, errors=(404,),
          query=_PAGING),
    Route(method="GET", path="/v1/forecast", handler=forecast.forecast, tag="schedules",
          summary="Jobs that will be due, by minute and queue.", answers={200: schemas.Forecast}, query=_FORECAST),
    Route(method="POST", path="/v1/time-zones:reload", handler=schedules.reload_zones, tag="schedules",
          summary="Read the time-zone data again; waiting runs of zones that changed move.", body=schemas.Nothing, body_optional=True,
          answers={200: schemas.ZonesInfo}, errors=(415,)),
    Route(method="GET", path="/v1/cluster", handler=cluster.get, tag="cluster",
          summary="Nodes and groups: who leads, who lags, whose clock is off.", answers={200: cluster.ClusterInfo}, errors=(404,)),
    Route(method="POST", path="/v1/cluster/nodes", handler=cluster.add_node, tag="cluster",
          summary="Make a place for a node that is to join, or for one that replaces another.", body=cluster.NodeAdd,
          answers={202: cluster.ClusterMember}, errors=(404, 409, 413, 415)),
    Route(method="DELETE", path="/v1/cluster/nodes/{node}", handler=cluster.remove_node, tag="cluster",
          summary="Let a node leave for ever, once others hold what it holds.", answers={202: cluster.ClusterMember}, errors=(404,),
          query=(_FORCE,)),
    Route(method="POST", path="/v1/cluster/nodes/{node}:drain", handler=cluster.drain_node, tag="cluster",
          summary="Let a node give up what it leads, and what it holds where others can; adding it again takes it back.",
          body=schemas.Nothing, body_optional=True, answers={202: cluster.ClusterMember}, errors=(404, 413, 415)),
    Route(method="POST", path="/v1/cluster/groups/{group}:transfer", handler=cluster.transfer, tag="cluster",
          summary="Hand the leadership of a group to another of its voters.", body=cluster.GroupTransfer,
          answers={202: cluster.Transferring}, errors=(404, 413, 415)),
    Route(method="GET", path="/v1/clock", handler=admin.clock, tag="clock", summary="The virtual clock's now.",
          answers={200: schemas.ClockInfo}, errors=(404,)),
    Route(method="POST", path="/v1/clock:advance", handler=admin.advance, tag="clock", summary="Let virtual time pass.",
          body=schemas.ClockAdvance, answers={200: schemas.ClockInfo}, errors=(404, 413, 415)),
    Route(method="POST", path="/v1/backups", handler=backups.take, tag="backups",
          summary="Write a backup of all groups into a directory of the node that is asked; answered when it is done.",
          body=backups.BackupRequest, answers={201: backups.BackupInfo}, errors=(413, 415)),
    Route(method="GET", path="/v1/backups", handler=backups.list_backups, tag="backups",
          summary="The backups that this node writes or wrote since it started, newest first.", answers={200: backups.BackupList}),
    Route(method="POST", path="/v1/hold:release", handler=backups.release_hold, tag="backups",
          summary="Let a cluster that was restored held dispatch.", body=schemas.Nothing, body_optional=True,
          answers={200: backups.HoldReleased}, errors=(415,)),
    Route(method="GET", path="/livez", handler=admin.livez, tag="node", summary="The loop turns.",
          answers={200: schemas.Alive}, strict=False),
    Route(method="GET", path="/readyz", handler=admin.readyz, tag="node", summary="Ready to serve, or why not.",
          answers={200: schemas.Ready, 503: schemas.Ready}, strict=False),
    Route(method="GET", path="/status", handler=admin.status, tag="node", summary="All of it as JSON.", answers={200: None}),
    Route(method="GET", path="/metrics", handler=admin.metrics, tag="node", summary="Metrics for Prometheus.",
          answers={200: None}, strict=False, plain=True),
    Route(method="GET", path="/openapi.json", handler=admin.openapi, tag="node", summary="This document.", answers={200: None}),
)  # fmt: skip


def _key(path: str) -> str:
    """The path with `*` for what varies."""
    start = path.find("{")
    return path if start < 0 else path[:start] + "*" + path[path.index("}") + 1 :]


_BY_PATH: Final[dict[str, dict[str, tuple[int, Route]]]] = {}
for _index, _route in enumerate(ROUTES):
    _BY_PATH.setdefault(_key(_route.path), {})[_route.method] = (_index, _route)
_FIXED: Final = {path: methods for path, methods in _BY_PATH.items() if "*" not in path}


def find(path: str) -> tuple[dict[str, tuple[int, Route]] | None, str]:
    """(routes of the path by method, the still encoded name in it). A verb follows the last colon, so a name may hold none."""
    methods = _FIXED.get(path)
    if methods is not None:
        return methods, ""
    parts = path.split("/")
    if len(parts) == 4:
        name, colon, verb = parts[3].rpartition(":")
        if colon:
            return _BY_PATH.get(f"/{parts[1]}/{parts[2]}/*:{verb}"), name
        return _BY_PATH.get(f"/{parts[1]}/{parts[2]}/*"), parts[3]
    if len(parts) == 5 and parts[2] == "cluster":
        name, colon, verb = parts[4].rpartition(":")
        path = f"/{parts[1]}/cluster/{parts[3]}/*"
        return (_BY_PATH.get(f"{path}:{verb}"), name) if colon else (_BY_PATH.get(path), parts[4])
    if len(parts) == 5:
        return _BY_PATH.get(f"/{parts[1]}/{parts[2]}/*/{parts[4]}"), parts[3]
    return None, ""
