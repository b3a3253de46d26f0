"""What the nodes of a cluster ask of each other, and how it is written: msgpack of the very types that the node's face has.

A call goes to the node that leads a group, or to each node for the groups it leads. `Service` answers; `cluster.ClusterNode` asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import msgspec

from wheelsched.backup import Slice
from wheelsched.cluster.frames import BODY_BYTES_MAX
from wheelsched.core.errors import BY_CODE, InvalidRequest, NotLeader, WheelschedError
from wheelsched.core.ids import group_of
from wheelsched.core.limits import CLAIM_JOBS_MAX, PAYLOAD_BYTES_DEFAULT
from wheelsched.model.commands import AnyCommand, Cancel, ChangeMembers, Create, PutSchedule, ReleaseHold, Reply, RunNow, Update
from wheelsched.model.keys import META_GROUP
from wheelsched.model.rows import AttemptRow, QueueSettings
from wheelsched.model.schedules import Definition
from wheelsched.node.face import (
    BackfillCounts,
    ClaimedJob,
    HeartbeatReply,
    JobFilter,
    JobPage,
    JobRecord,
    QueueView,
    RunPage,
    ScheduleRecord,
    ZonesReloaded,
)
from wheelsched.node.node import Node
from wheelsched.replica import propose_each

Result = TypeVar("Result")


class Answer(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What became of one command: its reply, or the error in its place."""

    reply: Reply | None
    code: str = ""
    detail: str = ""


class Call(Generic[Result]):
    """One kind of call. `is_safe`: repeating it does no harm, so that an unknown outcome is asked for again."""

    def __init__(self, name: str, arguments: Any, result: Any, *, is_safe: bool = False) -> None:
        self.name = name
        self.is_safe = is_safe
        self._arguments = msgspec.msgpack.Decoder(arguments)
        self._result: msgspec.msgpack.Decoder[Result] = msgspec.msgpack.Decoder(result)
        CALLS[name] = self

    def encode(self, arguments: tuple[Any, ...]) -> bytes:
        return _encode(arguments)

    def decode(self, body: bytes) -> Any:
        try:
            return self._arguments.decode(body)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"{self.name}: {error}") from None

    def decode_result(self, body: bytes) -> Result:
        return self._result.decode(body)


_encode = msgspec.msgpack.Encoder().encode
CALLS: Final[dict[str, Call[Any]]] = {}

PROPOSE: Call[list[Answer]] = Call("propose", tuple[list[tuple[int, AnyCommand]]], list[Answer])
CHANGE_JOB: Call[Reply] = Call("change_job", tuple[Cancel | RunNow | Update], Reply, is_safe=True)
READ_JOB: Call[JobRecord | None] = Call("read_job", tuple[str, bytes], JobRecord | None, is_safe=True)
READ_ATTEMPTS: Call[tuple[JobRecord, list[tuple[int, AttemptRow]]] | None] = Call(
    "read_attempts", tuple[str, bytes], tuple[JobRecord, list[tuple[int, AttemptRow]]] | None, is_safe=True
)
LIST_JOBS: Call[JobPage] = Call("list_jobs", tuple[JobFilter, list[int], bytes | None, int], JobPage, is_safe=True)
HEARTBEAT: Call[HeartbeatReply] = Call("heartbeat", tuple[bytes, int, int, int | None, bytes | None], HeartbeatReply, is_safe=True)
CLAIM_NOW: Call[list[ClaimedJob]] = Call("claim_now", tuple[str, list[str], int, int | None, str], list[ClaimedJob])
QUEUE_VIEWS: Call[list[QueueView]] = Call("queue_views", tuple[str, list[str]], list[QueueView], is_safe=True)
QUEUE_NAMES: Call[list[str]] = Call("queue_names", tuple[str, str, int], list[str], is_safe=True)
QUEUE_SETTINGS: Call[QueueSettings | None] = Call("queue_settings", tuple[str, str], QueueSettings | None, is_safe=True)
PUT_SCHEDULE: Call[tuple[ScheduleRecord, bool]] = Call(
    "put_schedule", tuple[Definition, bool, int, bool | None, str], tuple[ScheduleRecord, bool]
)
READ_SCHEDULE: Call[ScheduleRecord | None] = Call("read_schedule", tuple[str, str], ScheduleRecord | None, is_safe=True)
DROP_SCHEDULE: Call[None] = Call("drop_schedule", tuple[str, str, str], None)
PAUSE_SCHEDULE: Call[ScheduleRecord] = Call("pause_schedule", tuple[str, str, bool, str], ScheduleRecord, is_safe=True)
LIST_SCHEDULES: Call[list[ScheduleRecord]] = Call(
    "list_schedules", tuple[str, list[int], str, str, int], list[ScheduleRecord], is_safe=True
)
START_RUN: Call[Reply] = Call("start_run", tuple[str, str, int, int, bytes | None, str, bytes, str], Reply)
BACKFILL: Call[BackfillCounts] = Call("backfill", tuple[str, str, int, int, str], BackfillCounts, is_safe=True)
LIST_RUNS: Call[RunPage | None] = Call("list_runs", tuple[str, str, bytes | None, int], RunPage | None, is_safe=True)
FORECAST: Call[list[tuple[int, str, int]]] = Call("forecast", tuple[list[int], str, int, int], list[tuple[int, str, int]], is_safe=True)
READ_BACKUP: Call[Slice] = Call("read_backup", tuple[int, bytes, int], Slice)
RELOAD_ZONES: Call[ZonesReloaded] = Call("reload_zones", tuple[()], ZonesReloaded, is_safe=True)


class Service:
    """Answers for the groups that this node leads; for any other with `NotLeader`, and nothing has happened."""

    def __init__(self, node: Node, leader_of: Callable[[int], int | None]) -> None:
        self._node = node
        self._leader_of = leader_of
        self._group_count = node.settings.cluster.group_count

    async def answer(self, method: str, body: bytes) -> bytes:
        """Raises `WheelschedError`, for a method that is none too."""
        call = CALLS.get(method)
        if call is None:
            raise InvalidRequest(f"no call {method}: the nodes run different releases")
        return _encode(await getattr(self, method)(*call.decode(body)))

    def require(self, group: int) -> None:
        """Raise `NotLeader` unless this node may act for the group at this instant."""
        if not self._node.replicas.leads(group):
            raise NotLeader(f"group {group} is led by another node", leader=self._leader_of(group))

    async def propose(self, pairs: list[tuple[int, AnyCommand]]) -> list[Answer]:
        urgent = not any(isinstance(command, (Create, PutSchedule)) for _, command in pairs)
        answers = await propose_each(self._node.replicas, pairs, urgent=urgent, own=False)
        return [answer_of(answer) for answer in answers]

    async def change_job(self, command: Cancel | RunNow | Update) -> Reply:
        self.require(group_of(command.job_id, self._group_count))
        return await self._node.propose(command)

    async def read_job(self, tenant: str, job_id: bytes) -> JobRecord | None:
        return await self._node.read_job(tenant, job_id)

    async def read_attempts(self, tenant: str, job_id: bytes) -> tuple[JobRecord, list[tuple[int, AttemptRow]]] | None:
        return await self._node.read_attempts(tenant, job_id)

    async def list_jobs(self, wanted: JobFilter, groups: list[int], cursor: bytes | None, limit: int) -> JobPage:
        for group in groups:
            self.require(group)
        return await self._node.list_jobs_of(groups, wanted, cursor=cursor, limit=limit)

    async def heartbeat(self, job_id: bytes, attempt: int, fencing: int, lease_ms: int | None, progress: bytes | None) -> HeartbeatReply:
        self.require(group_of(job_id, self._group_count))
        return await self._node.heartbeat(job_id, attempt, fencing, lease_ms=lease_ms, progress=progress)

    async def claim_now(self, tenant: str, queues: list[str], jobs_max: int, lease_ms: int | None, worker: str) -> list[ClaimedJob]:
        jobs = await self._node.claim(tenant, queues, jobs_max=jobs_max, lease_ms=lease_ms, wait_ms=0, worker=worker)
        fitting, rest = split_to_fit(jobs)
        if rest:
            self._node.give_back(rest)
        return fitting

    async def queue_views(self, tenant: str, names: list[str]) -> list[QueueView]:
        views = [await self._node.queue_view(tenant, name) for name in names]
        return [view for view in views if view is not None]

    async def queue_names(self, tenant: str, after: str, limit: int) -> list[str]:
        return self._node.queue_names(tenant, after=after)[:limit]

    async def queue_settings(self, tenant: str, queue: str) -> QueueSettings | None:
        await self._node.replicas.read_barrier(META_GROUP)
        return self._node.queue_settings(tenant, queue)

    async def put_schedule(
        self, definition: Definition, create: bool, if_version: int, paused: bool | None, actor: str
    ) -> tuple[ScheduleRecord, bool]:
        self._require_schedule(definition.tenant, definition.name)
        return await self._node.put_schedule(definition, create=create, if_version=if_version, paused=paused, actor=actor)

    async def read_schedule(self, tenant: str, name: str) -> ScheduleRecord | None:
        await self._node.replicas.read_barrier(self._node.dispatcher.group_of_schedule(tenant, name))
        return await self._node.read_schedule(tenant, name)

    async def drop_schedule(self, tenant: str, name: str, actor: str) -> None:
        self._require_schedule(tenant, name)
        await self._node.drop_schedule(tenant, name, actor=actor)

    async def pause_schedule(self, tenant: str, name: str, paused: bool, actor: str) -> ScheduleRecord:
        self._require_schedule(tenant, name)
        return await self._node.pause_schedule(tenant, name, paused, actor=actor)

    async def list_schedules(self, tenant: str, groups: list[int], queue: str, after: str, limit: int) -> list[ScheduleRecord]:
        for group in groups:
            self.require(group)
        return await self._node.list_schedules_of(groups, tenant, queue=queue, after=after, limit=limit)

    async def start_run(
        self, tenant: str, name: str, run_at_ms: int, delay_ms: int, payload: bytes | None, key: str, fingerprint: bytes, actor: str
    ) -> Reply:
        self._require_schedule(tenant, name)
        return await self._node.start_run(
            tenant, name, run_at_ms=run_at_ms, delay_ms=delay_ms, payload=payload, key=key, fingerprint=fingerprint, actor=actor
        )

    async def backfill(self, tenant: str, name: str, from_ms: int, to_ms: int, actor: str) -> BackfillCounts:
        self._require_schedule(tenant, name)
        return await self._node.backfill(tenant, name, from_ms=from_ms, to_ms=to_ms, actor=actor)

    async def list_runs(self, tenant: str, name: str, cursor: bytes | None, limit: int) -> RunPage | None:
        self._require_schedule(tenant, name)
        return await self._node.list_runs(tenant, name, cursor=cursor, limit=limit)

    async def forecast(self, groups: list[int], tenant: str, from_ms: int, to_ms: int) -> list[tuple[int, str, int]]:
        for group in groups:
            self.require(group)
        return await self._node.forecast_of(groups, tenant, from_ms=from_ms, to_ms=to_ms)

    async def read_backup(self, group: int, reader: bytes, sequence: int) -> Slice:
        self.require(group)
        return await self._node.views.read(group, reader, sequence)

    async def reload_zones(self) -> ZonesReloaded:
        return await self._node.reload_zones()

    def _require_schedule(self, tenant: str, name: str) -> None:
        self.require(self._node.dispatcher.group_of_schedule(tenant, name))


# A message holds 8 MiB: a hundred jobs with the largest payload there is by default, and far fewer with the largest one allowed.
JOBS_BYTES_MAX: Final = 7 * 1024 * 1024 + 512 * 1024
# What a job adds to its payload: its state, labels and options.
JOB_BYTES: Final = 8 * 1024

assert JOBS_BYTES_MAX < BODY_BYTES_MAX
assert CLAIM_JOBS_MAX * (PAYLOAD_BYTES_DEFAULT + JOB_BYTES) <= JOBS_BYTES_MAX


def split_to_fit(jobs: list[ClaimedJob]) -> tuple[list[ClaimedJob], list[ClaimedJob]]:
    """The first jobs, as many as one message holds, and the rest."""
    size = 0
    for position, job in enumerate(jobs):
        size += JOB_BYTES + len(job.payload)
        if size > JOBS_BYTES_MAX and position:
            return jobs[:position], jobs[position:]
    return jobs, []


def answer_of(result: Reply | Exception) -> Answer:
    if isinstance(result, Reply):
        return Answer(result)
    if isinstance(result, NotLeader):
        return Answer(None, NOT_LEADER, result.detail)
    if isinstance(result, WheelschedError):
        return Answer(None, result.code, result.detail)
    raise result


# Beside the codes of core/errors.py: the command is to be sent to another node.
NOT_LEADER: Final = "not-leader"


def error_of(answer: Answer) -> WheelschedError:
    return BY_CODE.get(answer.code, WheelschedError)(answer.detail)


def group_of_command(command: AnyCommand, group_count: int) -> int:
    """Of a command on one job, or on the cluster as a whole."""
    if isinstance(command, (ChangeMembers, ReleaseHold)):
        return META_GROUP
    return group_of(command.job_id, group_count)  # type: ignore[union-attr]
