"""`wheelsched jobs …`."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from itertools import islice
from typing import IO, Any, Final

import click

from wheelsched.cli.errors import CONFLICT, FAILURE, NOT_FOUND, OK, USAGE, CommandFailed
from wheelsched.cli.options import DURATION, JSON, Session, labels_of, remote_options
from wheelsched.cli.remote import segment
from wheelsched.core.errors import JobFinished, NotFound, WheelschedError

STATUSES: Final = ("SCHEDULED", "QUEUED", "RUNNING", "RETRYING", "CANCEL_REQUESTED", "SUCCEEDED", "DEAD", "CANCELLED", "SKIPPED")
PRIORITIES: Final = ("critical", "default", "bulk")
_BATCH_JOBS: Final = 500

COLUMNS: Final = ("JOB", "QUEUE", "STATUS", "FIRE AT", ">ATTEMPT", "PRIORITY", "LAST ERROR")


def job_cells(job: dict[str, Any]) -> tuple[object, ...]:
    error = job.get("last_error")
    told = error if isinstance(error, str) or error is None else json.dumps(error, ensure_ascii=False)
    short = None if told is None else (told if len(told) <= 60 else told[:59] + "…")
    return (job["job_id"], job["queue"], job["status"], job["fire_at"], job["attempt"], job["priority"], short)


@click.group()
def jobs() -> None:
    """Create, look at and change jobs.

    \b
    Example:
      wheelsched jobs create mail --delay 10m
      wheelsched jobs list --queue mail --status SCHEDULED
    """


def _shape_options(command: Any) -> Any:
    """What `create` and `update` have in common."""
    for option in reversed((
        click.option("--at", "run_at", metavar="INSTANT", help="When, RFC 3339 with an offset: 2026-11-01T07:00:00Z."),
        click.option("--delay", "delay_s", type=DURATION, help="How long from now: 90, 10m, 2h30m."),
        click.option("--window", "window_s", type=DURATION, help="Flexible: any time within this after the instant."),
        click.option("--payload", type=JSON, metavar="JSON", help="JSON for the handler; @FILE or @- reads it."),
        click.option("--priority", type=click.Choice(PRIORITIES), help="Order of claims within the queue."),
        click.option("--max-attempts", type=click.IntRange(1, 100), help="Attempts before the job is DEAD."),
        click.option("--backoff", "initial_backoff_s", type=DURATION, help="Bound of the first backoff; it doubles."),
        click.option("--max-backoff", "max_backoff_s", type=DURATION, help="Bound of all backoffs."),
        click.option("--timeout", "timeout_s", type=DURATION, help="How long one attempt may run."),
        click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", callback=labels_of, help="May be repeated."),
    )):  # fmt: skip
        command = option(command)
    return command


def _body(options: dict[str, Any]) -> dict[str, Any]:
    """The contract's fields of the options that were given."""
    if options.get("run_at") is not None and options.get("delay_s") is not None:
        raise click.UsageError("--at and --delay say the same thing twice; give one")
    plain = ("run_at", "delay_s", "payload", "priority", "timeout_s", "start_deadline_s")
    body = {name: options[name] for name in plain if options.get(name) is not None}
    if options.get("window_s") is not None:
        body["timing"] = {"class": "flexible", "window_s": whole(options["window_s"])}
    retry = {name: options[name] for name in ("max_attempts", "initial_backoff_s", "max_backoff_s") if options.get(name) is not None}
    if retry:
        body["retry"] = retry
    if options.get("labels"):
        body["labels"] = options["labels"]
    return body


def whole(number: float) -> int | float:
    return int(number) if number == int(number) else number


@jobs.command()
@click.argument("queue", required=False)
@_shape_options
@click.option("--start-deadline", "start_deadline_s", type=DURATION, help="Skip the job if it has not started this long after its time.")
@click.option("--key", help="Idempotency-Key: the same key and body give the same job.")
@click.option("--from", "source", type=click.File("r"), metavar="FILE", help="Many: one job as JSON a line, as in the API; - is stdin.")
@remote_options
def create(session: Session, queue: str | None, key: str | None, source: IO[str] | None, **options: Any) -> int:
    """Create a job, or many.

    \b
    Example:
      wheelsched jobs create mail --delay 10m --payload '{"to": "ada"}' --key welcome-ada
      wheelsched jobs create report --at 2026-11-01T07:00:00Z --window 1h
      wheelsched jobs create --from jobs.jsonl
    """
    body = _body(options)
    if source is not None:
        if body or key or queue:
            raise click.UsageError("--from takes everything from the file; leave the other options out")
        return _create_many(session, source)
    if queue is None:
        raise click.UsageError("QUEUE is missing: wheelsched jobs create QUEUE")
    # A key of our own makes the call safe to repeat by hand only if it is shown; a lost answer is told as such instead.
    headers = {"Idempotency-Key": key} if key else {}
    job = session.remote.post("/v1/jobs", {"queue": queue, **body}, headers=headers)
    if session.output.as_json:
        session.output.document(job)
    else:
        session.output.say(f"{job['job_id']} {job['status']} for {job['fire_at']} in queue {job['queue']}")
    return OK


def _create_many(session: Session, source: IO[str]) -> int:
    run = uuid.uuid4().hex
    created, refused = 0, []
    lines = lines_of(source, "a queue")
    with session.output.progress() as bar:
        task = bar.add_task("creating jobs", total=None) if bar else None
        while batch := list(islice(lines, _BATCH_JOBS)):
            # Keys of this run: a batch that is sent again after a lost connection creates nothing twice.
            items = [{"idempotency_key": f"{run}-{line}", **job} for line, job in batch]
            for (line, _), result in zip(batch, session.remote.post("/v1/jobs:batch", {"jobs": items})["results"], strict=True):
                if result["status"] < 300:
                    created += 1
                else:
                    refused.append({"line": line, "problem": result["problem"]})
            if bar is not None and task is not None:
                bar.update(task, advance=len(batch))
    session.output.say(f"{created} jobs created, {len(refused)} refused")
    for fault in refused[:20]:
        session.output.say(f"  line {fault['line']}: {fault['problem'].get('detail')}")
    if session.output.as_json:
        session.output.document({"created": created, "refused": refused})
    return FAILURE if refused else OK


def lines_of(source: IO[str], least: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, object) of each line that is not empty; `least` says what one has to have at least."""
    for line, text in enumerate(source, start=1):
        if not text.strip():
            continue
        try:
            job = json.loads(text)
        except ValueError as error:
            raise CommandFailed(f"{source.name}:{line}: not JSON ({error})", exit_code=USAGE, code="usage") from error
        if not isinstance(job, dict):
            raise CommandFailed(f"{source.name}:{line}: not an object with at least {least}", exit_code=USAGE, code="usage")
        yield line, job


@jobs.command()
@click.argument("job_id")
@remote_options
def get(session: Session, job_id: str) -> None:
    """Show a job, whole.

    \b
    Example:
      wheelsched jobs get job_01j9x2m4r8t6v0c3e5g7k9n1p4
    """
    session.output.document(session.remote.get(f"/v1/jobs/{segment(job_id)}"))


@jobs.command("list")
@click.option("--queue", help="Only this queue.")
@click.option("--status", type=click.Choice(STATUSES, case_sensitive=False), help="Only this status.")
@click.option("--label", metavar="KEY=VALUE", help="Only with this label.")
@click.option("--from", "from_", metavar="INSTANT", help="fire_at at or after.")
@click.option("--to", metavar="INSTANT", help="fire_at before.")
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True, help="At most so many.")
@click.option("--all", "everything", is_flag=True, help="No limit.")
@remote_options
def list_(
    session: Session, queue: str | None, status: str | None, label: str | None, from_: str | None, to: str | None,
    limit: int, everything: bool,
) -> None:  # fmt: skip
    """List jobs, newest fire_at last.

    \b
    Example:
      wheelsched jobs list --queue mail --status DEAD
      wheelsched jobs list --label order=4711 --all --json
    """
    if label is not None:
        label = ":".join(next(iter(labels_of(click.get_current_context(), click.Option(["--label"]), (label,)).items())))
    params = {"queue": queue, "status": status and status.upper(), "label": label, "from": from_, "to": to}
    found = list(session.remote.pages("/v1/jobs", params, key="jobs", limit=None if everything else limit))
    if session.output.as_json:
        session.output.document({"jobs": found})
        return
    session.output.table(COLUMNS, map(job_cells, found))
    if len(found) == limit and not everything:
        session.output.say(f"the first {limit}; --all shows the rest")


def _each(session: Session, job_ids: tuple[str, ...], method: str, suffix: str) -> int:
    """One call per job; goes on after a refusal and ends with the worst exit code."""
    results, code = [], OK
    for job_id in job_ids:
        try:
            answer = session.remote.call(method, f"/v1/jobs/{segment(job_id)}{suffix}", body={} if method == "POST" else None)
        except (NotFound, JobFinished, WheelschedError) as error:
            if error.status >= 500:
                raise
            code = max(code, NOT_FOUND if error.status == 404 else CONFLICT)
            results.append({"job_id": job_id, "code": error.code, "detail": error.detail})
            session.output.say(f"{job_id}: {error.detail}")
        else:
            results.append(answer or {"job_id": job_id})
            session.output.say(f"{job_id}: {(answer or {}).get('status', 'gone')}")
    if session.output.as_json:
        session.output.document({"jobs": results})
    return code


@jobs.command()
@click.argument("job_ids", nargs=-1, required=True, metavar="JOB_ID...")
@remote_options
def cancel(session: Session, job_ids: tuple[str, ...]) -> int:
    """Cancel jobs; a running one is told to stop.

    \b
    Example:
      wheelsched jobs cancel job_01j9x2m4r8t6v0c3e5g7k9n1p4
    """
    return _each(session, job_ids, "DELETE", "")


@jobs.command()
@click.argument("job_ids", nargs=-1, required=True, metavar="JOB_ID...")
@remote_options
def run(session: Session, job_ids: tuple[str, ...]) -> int:
    """Fire SCHEDULED or RETRYING jobs now.

    \b
    Example:
      wheelsched jobs run job_01j9x2m4r8t6v0c3e5g7k9n1p4
    """
    return _each(session, job_ids, "POST", ":run")


@jobs.command()
@click.argument("job_ids", nargs=-1, required=True, metavar="JOB_ID...")
@remote_options
def redrive(session: Session, job_ids: tuple[str, ...]) -> int:
    """Let DEAD jobs run again, with the same idempotency key.

    \b
    Example:
      wheelsched jobs redrive job_01j9x2m4r8t6v0c3e5g7k9n1p4
    """
    return _each(session, job_ids, "POST", ":redrive")


@jobs.command()
@click.argument("job_ids", nargs=-1, required=True, metavar="JOB_ID...")
@remote_options
def discard(session: Session, job_ids: tuple[str, ...]) -> int:
    """Remove DEAD jobs.

    \b
    Example:
      wheelsched jobs discard job_01j9x2m4r8t6v0c3e5g7k9n1p4
    """
    return _each(session, job_ids, "POST", ":discard")


@jobs.command()
@click.argument("job_id")
@_shape_options
@click.option("--if-version", type=click.IntRange(min=1), help="Only if the job still has this version.")
@remote_options
def update(session: Session, job_id: str, if_version: int | None, **options: Any) -> None:
    """Change a job that is still SCHEDULED.

    \b
    Example:
      wheelsched jobs update job_01j9x2m4r8t6v0c3e5g7k9n1p4 --delay 1h --priority critical
    """
    body = _body(options)
    if not body:
        raise click.UsageError("nothing to change; give at least one option, such as --delay 1h")
    headers = {} if if_version is None else {"If-Match": f'"v{if_version}"'}
    job = session.remote.call("PATCH", f"/v1/jobs/{segment(job_id)}", body=body, headers=headers)
    if session.output.as_json:
        session.output.document(job)
    else:
        session.output.say(f"{job['job_id']} {job['status']} for {job['fire_at']}, version {job['version']}")


@jobs.command()
@click.argument("job_id")
@remote_options
def events(session: Session, job_id: str) -> None:
    """Show every transition of a job.

    \b
    Example:
      wheelsched jobs events job_01j9x2m4r8t6v0c3e5g7k9n1p4
    """
    answer = session.remote.get(f"/v1/jobs/{segment(job_id)}/events")
    if session.output.as_json:
        session.output.document(answer)
    rows = [
        (e["at"], e.get("from"), e["to"], e.get("attempt"), e.get("version"), e.get("actor"), e.get("detail")) for e in answer["events"]
    ]
    session.output.table(("AT", "FROM", "TO", ">ATTEMPT", ">VERSION", "ACTOR", "DETAIL"), rows)


@jobs.command()
@click.argument("job_id")
@remote_options
def attempts(session: Session, job_id: str) -> None:
    """Show every attempt of a job.

    \b
    Example:
      wheelsched jobs attempts job_01j9x2m4r8t6v0c3e5g7k9n1p4
    """
    answer = session.remote.get(f"/v1/jobs/{segment(job_id)}/attempts")
    if session.output.as_json:
        session.output.document(answer)
    rows = [
        (a["attempt"], a.get("worker"), a.get("started_at"), a.get("ended_at"), a["outcome"], a.get("error")) for a in answer["attempts"]
    ]
    session.output.table((">ATTEMPT", "WORKER", "STARTED", "ENDED", "OUTCOME", "ERROR"), rows)
