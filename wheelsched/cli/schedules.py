"""`wheelsched schedules …`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import IO, Any, Final

import click

from wheelsched.cli.errors import FAILURE, OK, USAGE, CommandFailed
from wheelsched.cli.jobs import COLUMNS as JOB_COLUMNS
from wheelsched.cli.jobs import PRIORITIES, job_cells, lines_of, whole
from wheelsched.cli.options import DURATION, JSON, Session, labels_of, remote_options
from wheelsched.cli.remote import segment
from wheelsched.core.limits import NEXT_RUNS, PREVIEW_MAX

_BATCH_SCHEDULES: Final = 500
POLICIES: Final = ("run_latest", "run_all", "skip")
OVERLAPS: Final = ("allow", "forbid", "replace", "buffer_one")
COLUMNS: Final = ("SCHEDULE", "WHEN", "ZONE", "QUEUE", "NEXT RUN", "LAST RUN", "STATE")
# What `patch --unset` returns to its default.
UNSETTABLE: Final = (
    "cron", "time_zone", "every_s", "anchor_at", "jitter_s", "missed_runs", "overlap", "max_concurrency", "start_at", "end_at", "shadow",
)  # fmt: skip


def when(schedule: Mapping[str, Any]) -> str:
    """`0 9 * * *`, `every 90 s` or `by hand`."""
    if schedule.get("cron"):
        return str(schedule["cron"])
    return f"every {schedule['every_s']:g} s" if schedule.get("every_s") else "by hand"


def schedule_cells(schedule: dict[str, Any]) -> tuple[object, ...]:
    last = schedule.get("last_run")
    told = None if last is None else f"{last['status']} {last.get('scheduled_for') or last['fire_at']}"
    state = "paused" if schedule.get("paused") else "shadow" if schedule.get("shadow") else None
    following = schedule.get("next_runs") or [None]
    return (
        schedule["name"], when(schedule), schedule.get("time_zone"), schedule["job_template"]["queue"], following[0], told, state,
    )  # fmt: skip


@click.group()
def schedules() -> None:
    """Recurring jobs: create, look at, pause, run, backfill.

    \b
    Example:
      wheelsched schedules preview "0 9 * * *" --zone Europe/Berlin
      wheelsched schedules put report --cron "0 9 * * MON-FRI" --zone Europe/Berlin --queue reports
      wheelsched schedules list
    """


# --- what a schedule is ---------------------------------------------------------------------------------------------------------


def _timing_options(command: Any) -> Any:
    for option in reversed((
        click.option("--cron", metavar="EXPR", help='When: "0 9 * * *", @daily, H for a minute of its own.'),
        click.option("--zone", "time_zone", metavar="ZONE", help="Whose clock cron reads, as Europe/Berlin; UTC by default."),
        click.option("--every", "every_s", type=DURATION, help="Elapsed time between runs instead of cron: 90, 15m, 1h."),
        click.option("--anchor", "anchor_at", metavar="INSTANT", help="The instant --every counts from; now by default."),
        click.option("--start", "start_at", metavar="INSTANT", help="No run before."),
        click.option("--end", "end_at", metavar="INSTANT", help="No run from then on."),
    )):  # fmt: skip
        command = option(command)
    return command


def _spec_options(command: Any) -> Any:
    """What `create`, `put` and `patch` have in common."""
    for option in reversed((
        click.option("--queue", help="Where its runs go."),
        click.option("--payload", type=JSON, metavar="JSON", help="JSON for the handler; @FILE or @- reads it."),
        click.option("--jitter", "jitter_s", type=DURATION, help="Start by a stable offset below this after the instant."),
        click.option("--missed", "policy", type=click.Choice(POLICIES), help="Runs that were due while nothing could fire."),
        click.option("--starting-deadline", "starting_deadline_s", type=DURATION, help="Skip a run that could only start this late."),
        click.option("--overlap", type=click.Choice(OVERLAPS), help="When an earlier run is still going."),
        click.option("--max-concurrency", type=click.IntRange(min=1), help="Runs at once; further ones wait."),
        click.option("--paused/--not-paused", default=None, help="Fire nothing until resumed."),
        click.option("--shadow/--no-shadow", default=None, help="Record what would have fired, run nothing."),
        click.option("--priority", type=click.Choice(PRIORITIES), help="Order of claims within the queue."),
        click.option("--window", "window_s", type=DURATION, help="Flexible: any time within this after the instant."),
        click.option("--max-attempts", type=click.IntRange(1, 100), help="Attempts before a run is DEAD."),
        click.option("--backoff", "initial_backoff_s", type=DURATION, help="Bound of the first backoff; it doubles."),
        click.option("--max-backoff", "max_backoff_s", type=DURATION, help="Bound of all backoffs."),
        click.option("--timeout", "timeout_s", type=DURATION, help="How long one attempt may run."),
        click.option("--start-deadline", "start_deadline_s", type=DURATION, help="Skip a run whose first attempt has not started by then."),
        click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", callback=labels_of, help="May be repeated."),
    )):  # fmt: skip
        command = option(command)
    return _timing_options(command)


_PLAIN: Final = (
    "cron", "time_zone", "every_s", "anchor_at", "start_at", "end_at", "jitter_s", "overlap", "max_concurrency", "paused", "shadow",
)  # fmt: skip


def _spec(options: Mapping[str, Any]) -> dict[str, Any]:
    """The contract's fields of the options that were given, without the template."""
    spec = {name: options[name] for name in _PLAIN if options.get(name) is not None}
    missed = {name: options[name] for name in ("policy", "starting_deadline_s") if options.get(name) is not None}
    return spec | {"missed_runs": missed} if missed else spec


def _template(options: Mapping[str, Any]) -> dict[str, Any]:
    plain = ("queue", "payload", "priority", "timeout_s", "start_deadline_s")
    template = {name: options[name] for name in plain if options.get(name) is not None}
    if options.get("window_s") is not None:
        template["timing"] = {"class": "flexible", "window_s": whole(options["window_s"])}
    retry = {name: options[name] for name in ("max_attempts", "initial_backoff_s", "max_backoff_s") if options.get(name) is not None}
    if retry:
        template["retry"] = retry
    if options.get("labels"):
        template["labels"] = options["labels"]
    return template


def _whole_spec(options: Mapping[str, Any]) -> dict[str, Any]:
    template = _template(options)
    if "queue" not in template:
        raise click.UsageError("--queue is missing: it says where the runs go")
    return {**_spec(options), "job_template": template}


# --- create, put, patch ---------------------------------------------------------------------------------------------------------


@schedules.command()
@click.argument("name")
@_spec_options
@click.option("--key", help="Idempotency-Key: the same key and schedule may be sent twice.")
@remote_options
def create(session: Session, name: str, key: str | None, **options: Any) -> None:
    """Create a schedule; refused where the name is taken.

    \b
    Example:
      wheelsched schedules create report --cron "0 9 * * MON-FRI" --zone Europe/Berlin --queue reports
      wheelsched schedules create poll --every 15m --queue feeds --overlap forbid
    """
    body = {"name": name, **_whole_spec(options)}
    _tell(session, session.remote.post("/v1/schedules", body, headers={"Idempotency-Key": key} if key else {}))


@schedules.command()
@click.argument("name", required=False)
@_spec_options
@click.option(
    "--from", "source", type=click.File("r"), metavar="FILE", help="Many: one schedule as JSON a line, as in the API; - is stdin."
)
@remote_options
def put(session: Session, name: str | None, source: IO[str] | None, **options: Any) -> int:
    """Create a schedule or replace it; the same again changes nothing.

    \b
    Example:
      wheelsched schedules put report --cron "0 9 * * MON-FRI" --zone Europe/Berlin --queue reports
      wheelsched schedules put --from schedules.jsonl
    """
    if source is not None:
        if name or _spec(options) or _template(options):
            raise click.UsageError("--from takes everything from the file; leave the other options out")
        return _put_many(session, source)
    if name is None:
        raise click.UsageError("NAME is missing: wheelsched schedules put NAME")
    _tell(session, session.remote.call("PUT", f"/v1/schedules/{segment(name)}", body=_whole_spec(options)))
    return OK


def _put_many(session: Session, source: IO[str]) -> int:
    stored, refused = 0, []
    lines = lines_of(source, "a name and a job_template")
    with session.output.progress() as bar:
        task = bar.add_task("storing schedules", total=None) if bar else None
        while batch := list(islice(lines, _BATCH_SCHEDULES)):
            results = session.remote.post("/v1/schedules:batch", {"schedules": [item for _, item in batch]})["results"]
            for (line, _), result in zip(batch, results, strict=True):
                if result["status"] < 300:
                    stored += 1
                else:
                    refused.append({"line": line, "problem": result["problem"]})
            if bar is not None and task is not None:
                bar.update(task, advance=len(batch))
    session.output.say(f"{stored} schedules stored, {len(refused)} refused")
    for fault in refused[:20]:
        session.output.say(f"  line {fault['line']}: {fault['problem'].get('detail')}")
    if session.output.as_json:
        session.output.document({"stored": stored, "refused": refused})
    return FAILURE if refused else OK


@schedules.command()
@click.argument("name")
@_spec_options
@click.option("--unset", multiple=True, type=click.Choice(UNSETTABLE), help="Back to its default; may be repeated.")
@click.option("--if-version", type=click.IntRange(min=1), help="Only if the schedule still has this version.")
@remote_options
def patch(session: Session, name: str, unset: tuple[str, ...], if_version: int | None, **options: Any) -> None:
    """Change a schedule; what is not named stays.

    \b
    Example:
      wheelsched schedules patch report --cron "30 9 * * MON-FRI"
      wheelsched schedules patch poll --timeout 10m --unset end_at
    """
    body: dict[str, Any] = {**_spec(options), **dict.fromkeys(unset)}
    template = _template(options)
    if not body and not template:
        raise click.UsageError('nothing to change; give at least one option, such as --cron "30 9 * * *"')
    path = f"/v1/schedules/{segment(name)}"
    if template or "missed_runs" in body:
        # The API replaces these whole; a person names the part that is to be another.
        current = session.remote.get(path)
        if template:
            retry = {"retry": {**current["job_template"]["retry"], **template["retry"]}} if "retry" in template else {}
            body["job_template"] = {**current["job_template"], **template, **retry}
        if body.get("missed_runs"):
            body["missed_runs"] = {**current["missed_runs"], **body["missed_runs"]}
        if_version = if_version or current["version"]
    headers = {} if if_version is None else {"If-Match": f'"v{if_version}"'}
    _tell(session, session.remote.call("PATCH", path, body=body, headers=headers))


def _tell(session: Session, schedule: dict[str, Any]) -> None:
    """A schedule that was just written: when it runs, and what may surprise."""
    output = session.output
    if output.as_json:
        output.document(schedule)
        return
    zone = f" {schedule['time_zone']}" if schedule.get("time_zone") else ""
    paused = ", paused" if schedule.get("paused") else ", in shadow" if schedule.get("shadow") else ""
    output.say(f"{schedule['name']} version {schedule['version']}: {when(schedule)}{zone}{paused}")
    if schedule.get("next_runs"):
        output.say(f"  next {_both(schedule, 0)}")
    for warning in schedule.get("warnings") or ():
        output.say(f"  note: {warning}")


def _both(found: Mapping[str, Any], index: int) -> str:
    """An instant in UTC and as the zone's clock shows it."""
    local = found.get("next_runs_local") or []
    at = str(found["next_runs"][index])
    return f"{at} ({local[index]})" if index < len(local) and not local[index].endswith("+00:00") else at


# --- look ------------------------------------------------------------------------------------------------------------------------


@schedules.command("list")
@click.option("--queue", help="Only those whose runs go to this queue.")
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True, help="At most so many.")
@click.option("--all", "everything", is_flag=True, help="No limit.")
@remote_options
def list_(session: Session, queue: str | None, limit: int, everything: bool) -> None:
    """List schedules by name.

    \b
    Example:
      wheelsched schedules list --queue reports
    """
    found = list(session.remote.pages("/v1/schedules", {"queue": queue}, key="schedules", limit=None if everything else limit))
    if session.output.as_json:
        session.output.document({"schedules": found})
        return
    session.output.table(COLUMNS, map(schedule_cells, found))
    if len(found) == limit and not everything:
        session.output.say(f"the first {limit}; --all shows the rest")


@schedules.command()
@click.argument("name")
@remote_options
def show(session: Session, name: str) -> None:
    """Show a schedule, whole.

    \b
    Example:
      wheelsched schedules show report
    """
    session.output.document(session.remote.get(f"/v1/schedules/{segment(name)}"))


@schedules.command()
@click.argument("expression", required=False, metavar="[EXPR]")
@_timing_options
@click.option("--name", help="The schedule's name, from which H is hashed.")
@click.option("--after", metavar="INSTANT", help="Runs later than this; now by default.")
@click.option("--count", type=click.IntRange(1, PREVIEW_MAX), default=NEXT_RUNS, show_default=True, help="How many.")
@click.option("--local", is_flag=True, help="Compute here, without a node.")
@remote_options
def preview(session: Session, expression: str | None, local: bool, count: int, name: str | None, after: str | None, **options: Any) -> None:
    """Show when a schedule would run, and what may surprise; nothing is stored.

    \b
    Example:
      wheelsched schedules preview "0 9 * * *" --zone Europe/Berlin
      wheelsched schedules preview "30 2 * * *" --zone America/New_York --after 2026-03-01T00:00:00Z --local
      wheelsched schedules preview --every 15m --count 10
    """
    if expression is not None and options["cron"] is not None:
        raise click.UsageError("the expression is given twice; leave --cron out")
    spec = {**_spec(options)} | ({"cron": expression} if expression is not None else {})
    if "cron" not in spec and "every_s" not in spec:
        raise click.UsageError('EXPR is missing: wheelsched schedules preview "0 9 * * *"')
    if local:
        found = preview_here(spec, name=name, after=after, count=count)
    else:
        chosen = {key: value for key, value in (("name", name), ("after", after)) if value is not None}
        found = session.remote.post("/v1/schedules:preview", {**spec, **chosen, "count": count})
    if session.output.as_json:
        session.output.document(found)
        return
    for index in range(len(found["next_runs"])):
        session.output.say(_both(found, index))
    if not found["next_runs"]:
        session.output.say("no run")
    for warning in found["warnings"]:
        session.output.say(f"note: {warning}")


def preview_here(spec: Mapping[str, Any], *, name: str | None, after: str | None, count: int) -> dict[str, Any]:
    """What `POST /v1/schedules:preview` answers, by the time-zone data installed here. Raises as the node would."""
    from wheelsched.api import times
    from wheelsched.cron import Timing, ZoneData, parse, warnings

    if spec.get("cron") is not None and spec.get("every_s") is not None:
        raise click.UsageError("--every and a cron expression exclude each other; give one")
    instants = {}
    for field in ("anchor_at", "start_at", "end_at"):
        instants[field] = _instant(spec[field], field) if spec.get(field) is not None else -1
    now_ms = time.time_ns() // 1_000_000
    after_ms = now_ms if after is None else _instant(after, "after")
    bounds = instants["start_at"], instants["end_at"]
    if spec.get("cron") is None:
        anchor_ms = instants["anchor_at"] if instants["anchor_at"] >= 0 else now_ms
        timing = Timing.of_interval(round(spec["every_s"] * 1000), anchor_ms, *bounds)
        runs = timing.upcoming(after_ms, count)
        return {"next_runs": [times.format_instant(at_ms) for at_ms in runs], "next_runs_local": [], "warnings": []}
    expression = parse(spec["cron"], name=name)
    zone = ZoneData.of_package().zone(spec.get("time_zone") or "UTC")
    runs = Timing.of_cron(expression, zone, *bounds).upcoming(after_ms, count)
    return {
        "next_runs": [times.format_instant(at_ms) for at_ms in runs],
        "next_runs_local": [zone.local_text(at_ms) for at_ms in runs],
        "warnings": list(warnings(expression, zone, now_ms)),
    }


def _instant(text: str, field: str) -> int:
    from wheelsched.api import times

    try:
        return times.parse_instant(text)
    except ValueError as error:
        raise CommandFailed(f"{field} {text} {error}", exit_code=USAGE, code="usage") from None


@schedules.command()
@click.argument("name")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="At most so many runs.")
@remote_options
def runs(session: Session, name: str, limit: int) -> None:
    """List a schedule's runs, newest first, and what was left out.

    \b
    Example:
      wheelsched schedules runs report --limit 10
    """
    found, skipped = [], []
    for page in _run_pages(session, f"/v1/schedules/{segment(name)}/runs", limit):
        found += page["jobs"]
        skipped += page["skipped"]
    if session.output.as_json:
        session.output.document({"jobs": found, "skipped": skipped})
        return
    columns = ("SCHEDULED FOR", "TRIGGER", *JOB_COLUMNS)
    session.output.table(columns, ((job.get("scheduled_for"), job.get("trigger"), *job_cells(job)) for job in found))
    if skipped:
        rows = ((row["from"], row["to"], row["count"], row["reason"]) for row in skipped)
        session.output.table(("FROM", "TO", ">COUNT", "REASON"), rows, title="left out")


def _run_pages(session: Session, path: str, limit: int) -> Iterator[dict[str, Any]]:
    cursor, left = None, limit
    while left > 0:
        page = session.remote.get(path, {"limit": min(left, 1_000), "cursor": cursor})
        yield page
        left -= len(page["jobs"])
        cursor = page["next_cursor"]
        if cursor is None:
            return


# --- do --------------------------------------------------------------------------------------------------------------------------


@schedules.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@remote_options
def delete(session: Session, names: tuple[str, ...]) -> None:
    """Delete schedules; what waits is withdrawn, what runs goes on, the history stays.

    \b
    Example:
      wheelsched schedules delete report
    """
    for name in names:
        session.remote.call("DELETE", f"/v1/schedules/{segment(name)}")
        session.output.say(f"{name}: deleted")
    if session.output.as_json:
        session.output.document({"deleted": list(names)})


@schedules.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@remote_options
def pause(session: Session, names: tuple[str, ...]) -> None:
    """Fire no more runs of these schedules.

    \b
    Example:
      wheelsched schedules pause report
    """
    _each(session, names, "pause")


@schedules.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@remote_options
def resume(session: Session, names: tuple[str, ...]) -> None:
    """Go on from now; what was missed while paused does not run.

    \b
    Example:
      wheelsched schedules resume report
    """
    _each(session, names, "resume")


def _each(session: Session, names: tuple[str, ...], verb: str) -> None:
    found = [session.remote.post(f"/v1/schedules/{segment(name)}:{verb}") for name in names]
    if session.output.as_json:
        session.output.document({"schedules": found})
    for schedule in found:
        following = f", next {_both(schedule, 0)}" if schedule["next_runs"] else ""
        session.output.say(f"{schedule['name']}: {'paused' if schedule['paused'] else 'going'}{following}")


@schedules.command()
@click.argument("name")
@click.option("--at", "run_at", metavar="INSTANT", help="When, RFC 3339 with an offset; now by default.")
@click.option("--delay", "delay_s", type=DURATION, help="How long from now: 90, 10m, 2h30m.")
@click.option("--payload", type=JSON, metavar="JSON", help="Instead of the schedule's; @FILE or @- reads it.")
@click.option("--key", help="Idempotency-Key: the same key and body give the same run.")
@remote_options
def run(session: Session, name: str, key: str | None, **options: Any) -> None:
    """A run by hand; the timetable stays as it is.

    \b
    Example:
      wheelsched schedules run report
      wheelsched schedules run report --payload '{"month": "2026-01"}'
    """
    if options["run_at"] is not None and options["delay_s"] is not None:
        raise click.UsageError("--at and --delay say the same thing twice; give one")
    body = {field: value for field, value in options.items() if value is not None}
    headers = {"Idempotency-Key": key} if key else {}
    job = session.remote.post(f"/v1/schedules/{segment(name)}/runs", body, headers=headers)
    if session.output.as_json:
        session.output.document(job)
    else:
        session.output.say(f"{job['job_id']} {job['status']} for {job['fire_at']} in queue {job['queue']}")


@schedules.command()
@click.argument("name")
@click.option("--from", "from_", metavar="INSTANT", required=True, help="Occurrences at or after this.")
@click.option("--to", metavar="INSTANT", default=None, help="Occurrences before this; now by default.")
@remote_options
def backfill(session: Session, name: str, from_: str, to: str | None) -> None:
    """A run for each occurrence of a stretch that has none yet.

    \b
    Example:
      wheelsched schedules backfill report --from 2026-01-01T00:00:00Z --to 2026-02-01T00:00:00Z
    """
    until = to or datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    counts = session.remote.post(f"/v1/schedules/{segment(name)}:backfill", {"from": from_, "to": until})
    if session.output.as_json:
        session.output.document(counts)
    else:
        session.output.say(f"{counts['created']} runs made, {counts['existing']} there already, {counts['skipped']} left out (overlap)")


@schedules.command("reload-zones")
@remote_options
def reload_zones(session: Session) -> None:
    """Let the node read its time-zone data again, after the tzdata package was updated.

    \b
    Example:
      wheelsched schedules reload-zones
    """
    found = session.remote.post("/v1/time-zones:reload")
    if session.output.as_json:
        session.output.document(found)
    else:
        changed = ", ".join(found["zones"]) or "none"
        session.output.say(f"time-zone data {found['version']}; zones that changed: {changed}; runs that moved: {found['moved']}")
