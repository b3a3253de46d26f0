"""`wheelsched queues …`."""

from __future__ import annotations

from typing import Any, Final

import click

from wheelsched.cli.errors import OK
from wheelsched.cli.options import DURATION, Session, remote_options
from wheelsched.cli.remote import segment
from wheelsched.core.errors import NotFound

_SHOWN: Final = ("SCHEDULED", "QUEUED", "RUNNING", "RETRYING", "DEAD")


@click.group()
def queues() -> None:
    """Look at, tune, pause and resume queues.

    \b
    Example:
      wheelsched queues list
      wheelsched queues set mail --max-concurrency 20 --lease 30s
    """


@queues.command("list")
@click.option("--limit", type=click.IntRange(min=1), default=1_000, show_default=True, help="At most so many.")
@remote_options
def list_(session: Session, limit: int) -> None:
    """List queues with their depth and lateness.

    \b
    Example:
      wheelsched queues list
    """
    found = list(session.remote.pages("/v1/queues", {}, key="queues", limit=limit))
    if session.output.as_json:
        session.output.document({"queues": found})
    columns = ("QUEUE", *(f">{status}" for status in _SHOWN), ">OLDEST READY", ">LATE P50", ">LATE P99", "PAUSED")
    session.output.table(columns, map(_cells, found))


def _cells(queue: dict[str, Any]) -> tuple[object, ...]:
    depth = queue.get("depth") or {}
    lateness = queue.get("lateness") or {}
    return (
        queue["name"], *(sum((depth.get(status) or {}).values()) for status in _SHOWN),
        seconds(queue.get("oldest_ready_age_s")), seconds(lateness.get("p50_s")), seconds(lateness.get("p99_s")),
        "paused" if queue.get("paused") else None,
    )  # fmt: skip


def seconds(value: float | None) -> str | None:
    """A duration for people: `3.2 ms`, `1.25 s`, `2 h 5 min`."""
    if value is None:
        return None
    if value < 1:
        return f"{value * 1_000:.1f} ms"
    if value < 120:
        return f"{value:.2f} s"
    minutes = round(value / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


@queues.command()
@click.argument("queue")
@remote_options
def get(session: Session, queue: str) -> None:
    """Show a queue, whole.

    \b
    Example:
      wheelsched queues get mail
    """
    session.output.document(session.remote.get(f"/v1/queues/{segment(queue)}"))


class _Cap(click.ParamType[Any]):
    name = "number|none"

    def __init__(self, kind: type[int] | type[float]) -> None:
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "none" or not isinstance(value, str):
            return value
        try:
            number = self._kind(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor `none`", param, ctx)
        return number


def _weights(_ctx: click.Context, _param: click.Parameter, value: str | None) -> dict[str, int] | None:
    if value is None:
        return None
    parts = value.split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() for part in parts):
        raise click.BadParameter(f"{value!r} is not three whole numbers, critical,default,bulk, like 70,25,5")
    return dict(zip(("critical", "default", "bulk"), map(int, parts), strict=True))


@queues.command("set")
@click.argument("queue")
@click.option("--max-concurrency", type=_Cap(int), help="Attempts at once; none: no cap.")
@click.option("--rate", "rate_per_s", type=_Cap(float), help="Starts a second; none: no cap.")
@click.option("--lease", "lease_s", type=DURATION, help="Lease of a claim that names none.")
@click.option("--retention", "retention_s", type=DURATION, help="How long finished jobs are kept.")
@click.option("--weights", callback=_weights, metavar="C,D,B", help="Shares of critical,default,bulk.")
@click.option("--reset", is_flag=True, help="What is not given returns to its default instead of staying.")
@remote_options
def set_(session: Session, queue: str, reset: bool, **given: Any) -> int:
    """Change a queue's settings; what is not named stays.

    \b
    Example:
      wheelsched queues set mail --max-concurrency 20 --lease 30s
      wheelsched queues set mail --rate none
      wheelsched queues set mail --reset
    """
    changes = {name: value for name, value in given.items() if value is not None}
    if not changes and not reset:
        raise click.UsageError("nothing to change; give at least one option, or --reset for the defaults")
    settings = {} if reset else _current(session, queue)
    for name, value in changes.items():
        if value == "none":
            settings.pop(name, None)
        else:
            settings[name] = value
    settings = {name: value for name, value in settings.items() if value is not None}
    answer = session.remote.call("PUT", f"/v1/queues/{segment(queue)}", body=settings)
    if session.output.as_json:
        session.output.document(answer)
    session.output.say(f"{queue}: " + ", ".join(f"{name} {_told(value)}" for name, value in answer.get("settings", {}).items()))
    return OK


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return "/".join(map(str, value.values()))
    return "none" if value is None else str(value)


def _current(session: Session, queue: str) -> dict[str, Any]:
    try:
        return dict(session.remote.get(f"/v1/queues/{segment(queue)}").get("settings") or {})
    except NotFound:
        return {}


@queues.command()
@click.argument("queue")
@remote_options
def pause(session: Session, queue: str) -> None:
    """Stop claims of a queue; its jobs still become due.

    \b
    Example:
      wheelsched queues pause mail
    """
    _switch(session, queue, "pause", "paused")


@queues.command()
@click.argument("queue")
@remote_options
def resume(session: Session, queue: str) -> None:
    """Let claims of a queue go on.

    \b
    Example:
      wheelsched queues resume mail
    """
    _switch(session, queue, "resume", "goes on")


def _switch(session: Session, queue: str, verb: str, told: str) -> None:
    answer = session.remote.post(f"/v1/queues/{segment(queue)}:{verb}")
    if session.output.as_json:
        session.output.document(answer)
    session.output.say(f"{queue}: {told}")
