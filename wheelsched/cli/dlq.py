"""`wheelsched dlq …`: the dead letters of a queue."""

from __future__ import annotations

from typing import Any

import click

from wheelsched.cli.jobs import COLUMNS, job_cells
from wheelsched.cli.options import DURATION, Session, remote_options
from wheelsched.cli.remote import segment


@click.group()
def dlq() -> None:
    """Dead letters: list, redrive, discard.

    \b
    Example:
      wheelsched dlq list mail
      wheelsched dlq redrive mail --all --error-contains timeout --spread 10m
    """


@dlq.command("list")
@click.argument("queue")
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True, help="At most so many.")
@remote_options
def list_(session: Session, queue: str, limit: int) -> None:
    """List DEAD jobs with their last error.

    \b
    Example:
      wheelsched dlq list mail
    """
    found = list(session.remote.pages(f"/v1/queues/{segment(queue)}/dead-letters", {}, key="jobs", limit=limit))
    if session.output.as_json:
        session.output.document({"jobs": found})
    session.output.table(COLUMNS, map(job_cells, found))


def _choice(job_ids: tuple[str, ...], everything: bool, error_contains: str | None, limit: int | None) -> dict[str, Any]:
    if job_ids and (everything or error_contains or limit):
        raise click.UsageError("name jobs or choose with --all, not both")
    if job_ids:
        return {"job_ids": list(job_ids)}
    if not everything:
        raise click.UsageError("name jobs, or give --all (with --error-contains and --limit to choose)")
    chosen: dict[str, Any] = {"all": True}
    if error_contains is not None:
        chosen["error_contains"] = error_contains
    if limit is not None:
        chosen["limit"] = limit
    return chosen


@dlq.command()
@click.argument("queue")
@click.argument("job_ids", nargs=-1, metavar="[JOB_ID]...")
@click.option("--all", "everything", is_flag=True, help="All that match.")
@click.option("--error-contains", help="Only where the last error contains this text.")
@click.option("--limit", type=click.IntRange(min=1), help="At most so many.")
@click.option("--spread", "spread_s", type=DURATION, help="Spread the runs over this long.")
@remote_options
def redrive(
    session: Session, queue: str, job_ids: tuple[str, ...], everything: bool, error_contains: str | None, limit: int | None,
    spread_s: float | None,
) -> None:  # fmt: skip
    """Let DEAD jobs run again.

    \b
    Example:
      wheelsched dlq redrive mail job_01j9x2m4r8t6v0c3e5g7k9n1p4
      wheelsched dlq redrive mail --all --error-contains timeout --spread 10m
    """
    body = _choice(job_ids, everything, error_contains, limit)
    if spread_s is not None:
        body["spread_s"] = spread_s
    answer = session.remote.post(f"/v1/queues/{segment(queue)}/dead-letters:redrive", body)
    if session.output.as_json:
        session.output.document(answer)
    session.output.say(f"{answer['redriven']} redriven")


@dlq.command()
@click.argument("queue")
@click.argument("job_ids", nargs=-1, metavar="[JOB_ID]...")
@click.option("--all", "everything", is_flag=True, help="All that match.")
@click.option("--error-contains", help="Only where the last error contains this text.")
@click.option("--limit", type=click.IntRange(min=1), help="At most so many.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@remote_options
def discard(
    session: Session, queue: str, job_ids: tuple[str, ...], everything: bool, error_contains: str | None, limit: int | None,
    yes: bool,
) -> None:  # fmt: skip
    """Remove DEAD jobs for good.

    \b
    Example:
      wheelsched dlq discard mail job_01j9x2m4r8t6v0c3e5g7k9n1p4
      wheelsched dlq discard mail --all --yes
    """
    body = _choice(job_ids, everything, error_contains, limit)
    if everything and not yes and not session.output.as_json:
        click.confirm(f"remove the dead letters of {queue} for good?", abort=True)
    answer = session.remote.post(f"/v1/queues/{segment(queue)}/dead-letters:discard", body)
    if session.output.as_json:
        session.output.document(answer)
    session.output.say(f"{answer['discarded']} discarded")
