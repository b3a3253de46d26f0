"""`wheelsched import …`: schedules of other schedulers, looked at, compared and created."""

from __future__ import annotations

import asyncio
import functools
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import click

from wheelsched.cli.errors import FAILURE, OK, UNREACHABLE, USAGE, CommandFailed
from wheelsched.cli.options import DURATION, Session, remote_options
from wheelsched.cli.output import Output
from wheelsched.core.errors import InvalidRequest, OutcomeUnknown, Unavailable, WheelschedError
from wheelsched.core.limits import PAGE_MAX

if TYPE_CHECKING:
    from datetime import datetime

    from wheelsched.client.types import Runs
    from wheelsched.imports import Comparison, ImportSettings, LogFormat, Plan, PlannedSchedule, Stretch

F = TypeVar("F", bound=Callable[..., Any])

# Requests under way at once: enough to hide the round trips, too few for a node to notice.
_CONCURRENCY: Final = 16
_NAMES_SHOWN: Final = 5
_PREFIX_LENGTH_MAX: Final = 64
_MINUTE_MS: Final = 60_000


class ScheduleClient(Protocol):
    """What these commands need of `AsyncClient`."""

    async def put_schedule(self, name: str, spec: Mapping[str, Any], /) -> Any: ...

    async def schedule_runs(self, name: str, /, *, limit: int | None = None, cursor: str | None = None) -> Runs: ...


def make_client(url: str) -> AbstractAsyncContextManager[ScheduleClient]:
    from wheelsched.client import AsyncClient

    return AsyncClient(url)


@click.group("import")
def imports() -> None:
    """Take schedules over from cron, Kubernetes, Celery beat or EventBridge.

    A command prints the plan and what cannot be taken over; nothing is created without --apply.

    \b
    Example:
      wheelsched import crontab /etc/crontab
      wheelsched import crontab /etc/crontab --apply --shadow
      wheelsched import crontab /etc/crontab --json > plan.json
      wheelsched import diff --log /var/log/syslog plan.json
    """


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The options that all importers have."""

    queue: str | None
    prefix: str
    zone: str | None
    apply: bool
    shadow: bool
    strict: bool


def _name(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    from wheelsched.imports.plan import NAME

    if value and not NAME.fullmatch(value):
        raise click.BadParameter(f"{value!r} is not a name: 1 to 128 of A-Z a-z 0-9 . _ -, beginning with a letter or digit")
    return value


def _prefix(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if len(value) > _PREFIX_LENGTH_MAX:
        raise click.BadParameter(f"{len(value)} characters, {_PREFIX_LENGTH_MAX} are allowed")
    return _name(ctx, param, value) or ""


def _zone(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    from wheelsched.cron import ZoneData

    if value is not None:
        try:
            ZoneData.of_package().zone(value)
        except WheelschedError as error:
            raise click.BadParameter(error.detail) from error
    return value


def _plan_options(command: F) -> F:
    """FILE and the options of an importer, handed over as `text` and `wanted`."""

    @click.argument("file", type=click.Path(path_type=Path, dir_okay=False, allow_dash=True))
    @click.option("--queue", callback=_name, help="Queue of all jobs, instead of what the source says.")
    @click.option("--prefix", default="", callback=_prefix, help="Put before every name; one for each machine keeps equal commands apart.")
    @click.option("--zone", callback=_zone, help="Time zone where the source names none; UTC by default.")
    @click.option("--apply", is_flag=True, help="Create the schedules; what is there already stays as it is, or is changed.")
    @click.option("--shadow", is_flag=True, help="Shadow mode: the schedules record what would have fired and run nothing.")
    @click.option("--strict", is_flag=True, help="Exit with 1, and create nothing, if anything cannot be taken over.")
    @remote_options
    @functools.wraps(command)
    def wrapped(
        *args: Any, file: Path, queue: str | None, prefix: str, zone: str | None, apply: bool, shadow: bool, strict: bool, **options: Any
    ) -> Any:  # fmt: skip
        return command(*args, file=file, wanted=_Wanted(queue, prefix, zone, apply, shadow, strict), **options)

    return wrapped  # type: ignore[return-value]


@imports.command()
@click.option(
    "--system/--user-format", "system", default=None,
    help="Whether a user stands before each command, as in /etc/crontab; judged from path and text by default.",
)  # fmt: skip
@_plan_options
def crontab(session: Session, file: Path, wanted: _Wanted, system: bool | None) -> int:
    """Import a crontab: FILE, or - for stdin.

    The command becomes the payload; a worker of the queue runs it. Names come from the commands, so importing again after an edit
    changes what was edited. Failed commands are not repeated and missed runs not caught up, as with cron.

    \b
    Example:
      crontab -l | wheelsched import crontab - --zone Europe/Berlin
      wheelsched import crontab /etc/cron.d/backup --prefix web1- --apply --shadow
    """
    from wheelsched.imports import read_crontab

    if system is None and (file.parent.name == "cron.d" or (file.parent.name, file.name) == ("etc", "crontab")):
        system = True
    return _import(session, wanted, lambda settings: read_crontab(_read(file), settings, system=system))


@imports.command("k8s-cronjob")
@_plan_options
def k8s_cronjob(session: Session, file: Path, wanted: _Wanted) -> int:
    """Import Kubernetes CronJobs: YAML or JSON, one or many documents.

    \b
    Example:
      kubectl get cronjobs -A -o yaml | wheelsched import k8s-cronjob -
      wheelsched import k8s-cronjob cronjobs.yaml --queue k8s --apply --shadow
    """
    from wheelsched.imports import read_kubernetes

    return _import(session, wanted, lambda settings: read_kubernetes(_read(file), settings))


@imports.command("celery-beat")
@_plan_options
def celery_beat(session: Session, file: Path, wanted: _Wanted) -> int:
    """Import a Celery beat schedule: JSON, a dump of django-celery-beat, or a Python module.

    A Python module is parsed and never run: what only running it would show is told as a problem, with its line.

    \b
    Example:
      python manage.py dumpdata django_celery_beat | wheelsched import celery-beat -
      wheelsched import celery-beat shop/celery.py --apply --shadow
    """
    from wheelsched.imports import read_celery_beat

    return _import(session, wanted, lambda settings: read_celery_beat(_read(file), settings))


@imports.command()
@_plan_options
def eventbridge(session: Session, file: Path, wanted: _Wanted) -> int:
    """Import AWS EventBridge schedules and rules: JSON of the AWS CLI, one or many documents.

    \b
    Example:
      aws scheduler get-schedule --name nightly | wheelsched import eventbridge -
      aws events list-rules > rules.json
      wheelsched import eventbridge rules.json --prefix aws- --apply --shadow
    """
    from wheelsched.imports import read_eventbridge

    return _import(session, wanted, lambda settings: read_eventbridge(_read(file), settings))


def _read(file: Path) -> str:
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CommandFailed(
            f"{file}: byte {error.start} is not UTF-8; convert the file with iconv first", exit_code=USAGE, code="usage"
        ) from error
    except OSError as error:
        raise CommandFailed(f"{file} cannot be read: {error.strerror}", exit_code=USAGE, code="usage") from error


def _now_ms() -> int:
    return int(time.time() * 1000)


def _import(session: Session, wanted: _Wanted, read: Callable[[ImportSettings], Plan]) -> int:
    from wheelsched.cron import ZoneData
    from wheelsched.imports import ImportSettings

    plan = read(ImportSettings(ZoneData.of_package(), _now_ms(), wanted.queue, wanted.prefix, wanted.zone))
    _tell_plan(session.output, plan)
    document = plan.document(shadow=wanted.shadow)
    failed = wanted.strict and bool(plan.problems)
    if failed:
        session.output.say("nothing was created: --strict" if wanted.apply else "--strict: there are problems")
    elif wanted.apply:
        outcome = asyncio.run(_put_all(session, plan.schedules, shadow=wanted.shadow))
        document |= outcome.document()
        failed = bool(outcome.refused)
        _tell_outcome(session, outcome, shadow=wanted.shadow)
    elif plan.schedules:
        session.output.say("nothing was created; --apply creates them, --apply --shadow only to watch")
    if session.output.as_json:
        session.output.document(document)
    return FAILURE if failed else OK


# What is printed


def _tell_plan(output: Output, plan: Plan) -> None:
    if plan.schedules:
        output.table(
            ("NAME", "WHEN", "ZONE", "NEXT RUNS (UTC)", ">WARNINGS"),
            (
                (
                    schedule.name,
                    schedule.when + (" (paused)" if schedule.paused else ""),
                    schedule.time_zone if schedule.cron is not None else None,
                    next_runs_text(schedule.next_runs_ms),
                    len(schedule.warnings) or None,
                )
                for schedule in plan.schedules
            ),
        )
    for text, names in _warnings_of(plan.schedules):
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        output.say(f"warning: {', '.join(names[:_NAMES_SHOWN])}{more}: {text}")
    for note in plan.notes:
        output.say(f"note: {note}")
    for problem in plan.problems:
        output.say(f"problem: {problem}")
    output.say(f"{_counted(len(plan.schedules), 'schedule')}, {_counted(len(plan.problems), 'problem')}")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _warnings_of(schedules: Sequence[PlannedSchedule]) -> list[tuple[str, list[str]]]:
    """Equal warnings together, with the names of the schedules that have them."""
    names: dict[str, list[str]] = defaultdict(list)
    for schedule in schedules:
        for text in schedule.warnings:
            names[text].append(schedule.name)
    return list(names.items())


def next_runs_text(runs_ms: Sequence[int]) -> str:
    """`2026-11-05 03:30, 11-06 03:30, 11-07 03:30`: each without what it shares with the one before; seconds where they count."""
    from wheelsched.imports.times import instant_text

    texts = [instant_text(at_ms).rstrip("Z").replace("T", " ") for at_ms in runs_ms]
    if all(at_ms % _MINUTE_MS == 0 for at_ms in runs_ms):
        texts = [text[:16] for text in texts]
    parts = texts[:1]
    for before, text in pairwise(texts):
        parts.append(text[11:] if text[:10] == before[:10] else text[5:] if text[:4] == before[:4] else text)
    return ", ".join(parts)


# --apply


@dataclass
class _Outcome:
    applied: list[dict[str, Any]] = field(default_factory=list)
    refused: list[tuple[str, WheelschedError]] = field(default_factory=list)
    stopped_by: WheelschedError | None = None

    def document(self) -> dict[str, Any]:
        refused = [
            {"name": name, "problem": {"code": error.code, "detail": error.detail, "errors": [*error.errors]}}
            for name, error in self.refused
        ]
        return {"applied": sorted(self.applied, key=lambda schedule: str(schedule["name"])), "refused": refused}


async def _put_all(session: Session, schedules: Sequence[PlannedSchedule], *, shadow: bool) -> _Outcome:
    """Put each schedule; CommandFailed where the node is gone, for what is left would fare no better."""
    with session.output.progress() as bar:
        task = bar.add_task("creating schedules", total=len(schedules)) if bar else None

        def advance() -> None:
            if bar is not None and task is not None:
                bar.advance(task)

        async with make_client(session.remote.url) as client:
            outcome = await put_schedules(client, schedules, shadow=shadow, advance=advance)
    if outcome.stopped_by is not None:
        raise CommandFailed(
            f"{len(outcome.applied)} of {len(schedules)} schedules were put, then: {outcome.stopped_by.detail}; "
            "repeat the command: what is there already does not change",
            exit_code=UNREACHABLE, code=outcome.stopped_by.code,
        ) from outcome.stopped_by  # fmt: skip
    return outcome


async def put_schedules(
    client: ScheduleClient, schedules: Sequence[PlannedSchedule], *, shadow: bool, advance: Callable[[], None] = lambda: None
) -> _Outcome:
    """Put the schedules, some at a time. One that is refused leaves the others going; a node that is not there ends it."""
    outcome = _Outcome()
    waiting: Iterator[PlannedSchedule] = iter(schedules)

    async def put_some() -> None:
        for schedule in waiting:
            try:
                answer = await client.put_schedule(schedule.name, schedule.spec(shadow=shadow))
            except (Unavailable, OutcomeUnknown) as error:
                outcome.stopped_by = outcome.stopped_by or error
            except WheelschedError as error:
                outcome.refused.append((schedule.name, error))
            else:
                version = answer.get("version") if isinstance(answer, Mapping) else None
                outcome.applied.append({"name": schedule.name, "version": version})
            advance()
            if outcome.stopped_by is not None:
                return

    async with asyncio.TaskGroup() as tasks:
        for number in range(min(_CONCURRENCY, len(schedules))):
            tasks.create_task(put_some(), name=f"put schedules {number}")
    return outcome


def _tell_outcome(session: Session, outcome: _Outcome, *, shadow: bool) -> None:
    output = session.output
    for name, error in outcome.refused:
        output.say(f"refused: {name}: {error.detail}")
    mode = " in shadow mode: they record what would have fired, and run nothing" if shadow else ""
    output.say(f"{_counted(len(outcome.applied), 'schedule')} put at {session.remote.url}{mode}")
    if outcome.applied and not shadow:
        output.say("they run from now on: stop the old scheduler, or both will")


# diff


@imports.command()
@click.argument("plans", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False, allow_dash=True), metavar="PLANFILE...")
@click.option(
    "--log", "log", required=True, type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="What the old scheduler ran: CSV or JSON Lines with name and time, or syslog with cron's lines; - is stdin.",
)  # fmt: skip
@click.option("--format", "form", type=click.Choice(("csv", "jsonl", "syslog")), help="Form of the log; judged from its text by default.")
@click.option("--from", "from_text", metavar="INSTANT", help="From when to compare, RFC 3339; the log's first run by default.")
@click.option("--to", "to_text", metavar="INSTANT", help="Until when, exclusive; the log's last run by default.")
@click.option("--zone", callback=_zone, default="UTC", show_default=True, help="Zone of times in the log that have no offset.")
@click.option(
    "--tolerance", "tolerance_s", type=DURATION, default="60", show_default=True,
    help="A run counts as the planned one if it started less than this later.",
)  # fmt: skip
@click.option("--recorded", is_flag=True, help="Compare what the node recorded in shadow mode, instead of what the plan says.")
@remote_options
def diff(
    session: Session, plans: tuple[Path, ...], log: Path, form: LogFormat | None, from_text: str | None, to_text: str | None, zone: str,
    tolerance_s: float, recorded: bool,
) -> int:  # fmt: skip
    """Compare plans with a log of what the old scheduler ran; exit with 1 if they differ.

    PLANFILE is what an importer prints with --json. A node is asked only with --recorded.

    \b
    Example:
      wheelsched import crontab /etc/crontab --json > plan.json
      wheelsched import diff --log /var/log/syslog --zone Europe/Berlin plan.json
      wheelsched import diff --log runs.csv --from 2026-11-01T00:00:00Z --to 2026-11-08T00:00:00Z plan.json
      wheelsched import diff --log runs.csv --recorded plan.json
    """
    from wheelsched.cron import ZoneData
    from wheelsched.imports import LogEntry, compare, planned_runs, read_log, read_plan, recorded_runs

    zones = ZoneData.of_package()
    from_ms, to_ms = _instant("--from", from_text), _instant("--to", to_text)
    schedules = [schedule for plan in plans for schedule in read_plan(_read(plan), str(plan))]
    try:
        entries = read_log(_read(log), zone=zones.zone(zone), until_ms=_now_ms() if to_ms is None else to_ms, form=form)
    except InvalidRequest as error:
        raise InvalidRequest(f"{log}: {error.detail}") from error
    if not entries and (from_ms is None or to_ms is None):
        raise click.UsageError(f"{log} has no run; give --from and --to to compare with none")
    if from_ms is None:
        from_ms = entries[0].at_ms // _MINUTE_MS * _MINUTE_MS
    if to_ms is None:
        to_ms = entries[-1].at_ms + 1
    if from_ms >= to_ms:
        raise click.UsageError("--from is not before --to")
    tolerance_ms = round(tolerance_s * 1000)
    bounds = {"from_ms": from_ms, "to_ms": to_ms, "tolerance_ms": tolerance_ms}
    if recorded:
        stretches = asyncio.run(_stretches(session, schedules, from_ms - tolerance_ms))
        # An interval counts from where the node began to count it.
        phases = [LogEntry(name, stretch.from_ms) for name, found in stretches.items() for stretch in found]
        planned = [
            recorded_runs(runs, stretches[runs.name], from_ms=from_ms, to_ms=to_ms)
            for runs in planned_runs(schedules, phases, zones, **bounds)
        ]
    else:
        planned = planned_runs(schedules, entries, zones, **bounds)
    found = compare(planned, entries, **bounds)
    _tell_comparison(session.output, found)
    return OK if found.agrees else FAILURE


async def _stretches(session: Session, schedules: Sequence[PlannedSchedule], from_ms: int) -> dict[str, list[Stretch]]:
    """What the node recorded of each schedule since `from_ms`: shadow runs, and runs that have a job."""
    from wheelsched.imports import Stretch

    def ms(moment: datetime) -> int:
        return round(moment.timestamp() * 1000)

    found: dict[str, list[Stretch]] = {}
    async with make_client(session.remote.url) as client:
        for schedule in schedules:
            stretches = found[schedule.name] = []
            cursor: str | None = None
            while True:
                page = await client.schedule_runs(schedule.name, limit=PAGE_MAX, cursor=cursor)
                here = [Stretch(ms(row.from_at), ms(row.to_at), row.count) for row in page.skipped if row.reason == "shadow"]
                # The next run is in the list too, and has not come yet.
                fired = [ms(job.scheduled_for) for job in page.items if job.scheduled_for is not None and job.status != "SCHEDULED"]
                here += [Stretch(at_ms, at_ms, 1) for at_ms in fired]
                stretches += here
                cursor = page.next_cursor
                if cursor is None or any(stretch.from_ms < from_ms for stretch in here):
                    break
    return found


def _instant(option: str, text: str | None) -> int | None:
    from wheelsched.imports.times import parse_instant

    if text is None:
        return None
    try:
        return parse_instant(text)
    except (ValueError, OverflowError) as error:
        raise click.UsageError(f"{option} {text!r} is not an instant with an offset, like 2026-11-01T00:00:00Z") from error


def _tell_comparison(output: Output, found: Comparison) -> None:
    if output.as_json:
        output.document(found.document())
        return
    document = found.document()
    output.table(
        ("SCHEDULE", ">MATCHED", ">MISSING", ">EXTRA", ">LATEST", "FIRST MISSING", "FIRST EXTRA"),
        (
            (
                one["name"], one["matched"], len(one["missing"]), len(one["extra"]), f"{one['offset_s_max']:g} s",
                next(iter(one["missing"]), None), next(iter(one["extra"]), None),
            )
            for one in document["schedules"]
        ),
        title=f"{document['from']} to {document['to']}",
    )  # fmt: skip
    for name, count in found.unplanned.items():
        output.say(f"not in the plan: {name} ({_counted(count, 'run')})")
    missing = sum(len(difference.missing_ms) for difference in found.differences)
    extra = sum(len(difference.extra_ms) for difference in found.differences)
    if found.agrees:
        output.say("the plan would have run what the log says")
    else:
        output.say(f"{missing} planned runs are missing from the log, {extra} runs of the log were not planned")
