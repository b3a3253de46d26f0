"""The meta group: which queues are known, and their settings; whether the cluster is held."""

from __future__ import annotations

from msgspec.structs import replace

from wheelsched.engine.context import Context
from wheelsched.model import keys
from wheelsched.model.commands import PauseQueue, PutQueue, ReleaseHold, Reply
from wheelsched.model.effects import HoldReleased, QueueChanged
from wheelsched.model.rows import QueueSettings, decode_queue, encode_row


def put_queue(context: Context, command: PutQueue) -> Reply:
    """Replace a queue's settings, or make it known. Whether it is paused is not a setting: that stays."""
    existing = _read(context, command.tenant, command.queue)
    if not command.settings:
        wanted = existing or QueueSettings()
    else:
        wanted = replace(decode_queue(command.settings), paused=existing is not None and existing.paused)
    return _write(context, command, existing, wanted)


def pause_queue(context: Context, command: PauseQueue) -> Reply:
    """Stop or go on with claims. A queue may be paused before its first job: pausing makes it known."""
    existing = _read(context, command.tenant, command.queue)
    return _write(context, command, existing, replace(existing or QueueSettings(), paused=command.paused))


def release_hold(context: Context, command: ReleaseHold) -> Reply:
    """Let a cluster that was restored held dispatch; `replayed` where it is not held."""
    if context.txn.get(keys.META, keys.HOLD_KEY) is None:
        return Reply(replayed=True)
    context.txn.delete(keys.META, keys.HOLD_KEY)
    context.effects.append(HoldReleased())
    return Reply()


def _read(context: Context, tenant: str, queue: str) -> QueueSettings | None:
    row = context.txn.get(keys.META, keys.queue_row_key(tenant, queue))
    return None if row is None else decode_queue(row)


def _write(context: Context, command: PutQueue | PauseQueue, existing: QueueSettings | None, wanted: QueueSettings) -> Reply:
    if wanted == existing:
        return Reply(replayed=True)
    context.txn.put(keys.META, keys.queue_row_key(command.tenant, command.queue), encode_row(wanted))
    context.effects.append(QueueChanged(command.tenant, command.queue))
    return Reply()
