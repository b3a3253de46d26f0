"""Backups over HTTP, and the end of the hold after a restore."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from wheelsched.api import bodies, schemas, times
from wheelsched.api.request import Request, Response, ok
from wheelsched.node.backup import BackupRecord

if TYPE_CHECKING:
    from wheelsched.api.app import Api

_PATH_LENGTH_MAX = 4_096


class BackupRequest(schemas.Model, kw_only=True):
    path: Annotated[
        str,
        Meta(
            min_length=1, max_length=_PATH_LENGTH_MAX,
            description="Absolute, on the node that takes the call; a directory that is not there yet, or empty.",
        ),
    ]  # fmt: skip


class BackupInfo(msgspec.Struct, kw_only=True):
    """`groups` counts the meta group. `error`: why it failed. `id` is in the backup's manifest and names what is restored from it."""

    id: str
    path: str
    state: Literal["running", "done", "failed"]
    groups: int
    groups_done: int
    rows: int
    bytes: int
    began_at: schemas.Instant
    ended_at: schemas.Instant | None
    error: str | None


class BackupList(msgspec.Struct, kw_only=True):
    backups: list[BackupInfo]


class HoldReleased(msgspec.Struct, kw_only=True):
    """`was_held` False: there was nothing to release."""

    was_held: bool


_decode_request = msgspec.json.Decoder(BackupRequest)
_decode_nothing = msgspec.json.Decoder(schemas.Nothing)


async def take(api: Api, request: Request) -> Response:
    model = bodies.decode(_decode_request, request.body)
    record = await api.node.backups.take(model.path)
    return Response(201, msgspec.json.encode(_info(record)))


async def list_backups(api: Api, request: Request) -> Response:
    return ok(msgspec.json.encode(BackupList(backups=[_info(record) for record in api.node.backups.recent()])))


async def release_hold(api: Api, request: Request) -> Response:
    if request.body:
        bodies.decode(_decode_nothing, request.body)
    return ok(msgspec.json.encode(HoldReleased(was_held=await api.node.release_hold(actor=request.actor))))


def _info(record: BackupRecord) -> BackupInfo:
    progress = record.progress
    return BackupInfo(
        id=record.id, path=record.path, state=record.state, groups=progress.groups, groups_done=progress.groups_done,
        rows=progress.rows, bytes=progress.bytes, began_at=times.format_instant(record.began_at_ms),
        ended_at=times.format_instant(record.ended_at_ms) if record.ended_at_ms else None, error=record.error or None,
    )  # fmt: skip
