"""`wheelsched forecast`."""

from __future__ import annotations

from typing import Any, Final

import click

from wheelsched.cli.options import Session, remote_options

_BAR_WIDTH: Final = 40


@click.command()
@click.option("--from", "from_", metavar="INSTANT", help="The minute to begin with.  [default: now]")
@click.option("--to", metavar="INSTANT", help="The minute to end before, at most seven days later.  [default: a day later]")
@click.option("--top", type=click.IntRange(min=1), default=20, show_default=True, help="So many of the busiest minutes.")
@remote_options
def forecast(session: Session, from_: str | None, to: str | None, top: int) -> None:
    """Show the minutes in which most jobs will be due, so that a spike is seen before it comes.

    \b
    Counted are waiting jobs and the runs of schedules; retries, and jobs that are yet to be created, are not known.

    \b
    Example:
      wheelsched forecast
      wheelsched forecast --from 2026-11-27T00:00:00Z --to 2026-11-28T00:00:00Z --top 5
    """
    found = session.remote.get("/v1/forecast", {"from": from_, "to": to})
    minutes: list[dict[str, Any]] = found["minutes"]
    if session.output.as_json:
        session.output.document(found)
        return
    busiest = sorted(minutes, key=lambda minute: (-minute["jobs"], minute["at"]))[:top]
    most = max((minute["jobs"] for minute in busiest), default=0)
    session.output.table(
        ("MINUTE", ">JOBS", "", "MOST OF THEM IN"), [_cells(minute, most) for minute in sorted(busiest, key=lambda minute: minute["at"])]
    )
    total = sum(minute["jobs"] for minute in minutes)
    session.output.say(f"{total:,} jobs in {len(minutes):,} minutes of {found['from']} to {found['to']}")


def _cells(minute: dict[str, Any], most: int) -> tuple[object, ...]:
    first = minute["queues"][0]
    share = f"{first['queue']} ({first['jobs']:,})" if len(minute["queues"]) > 1 else first["queue"]
    return minute["at"], f"{minute['jobs']:,}", "█" * max(1, round(_BAR_WIDTH * minute["jobs"] / most)), share
