"""`wheelsched worker`: the SDK's worker loop as a command."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from wheelsched.cli.errors import OK, USAGE, CommandFailed
from wheelsched.cli.options import json_option
from wheelsched.cli.output import Output
from wheelsched.runtime.logs import setup_logs

if TYPE_CHECKING:
    from wheelsched.worker import App


@click.command()
@click.argument("application", metavar="MODULE:APP")
@click.option(
    "--url",
    help="The node to work for: put into WHEELSCHED_URL before the application is loaded, for applications that ask for it.",
)
@click.option(
    "--log-level", type=click.Choice(("debug", "info", "warning", "error")), default="info", show_default=True,
    help="Least severe level logged.",
)  # fmt: skip
@click.option("--log-format", type=click.Choice(("text", "json")), default="text", show_default=True, help="How it is logged, to stderr.")
@json_option
def worker(output: Output, application: str, url: str | None, log_level: str, log_format: str) -> int:
    """Run the handlers of an application until SIGTERM or Ctrl-C; handlers at work may end first.

    The application is a `wheelsched.worker.App`; it says which node it works for and how many jobs it runs at once.

    \b
    Example:
      wheelsched worker shop.tasks:app
      wheelsched worker shop.tasks:app --url http://127.0.0.1:9000 --log-format json
    """
    if application.count(":") != 1 or not all(application.split(":")):
        raise click.UsageError(f"{application!r} is not MODULE:APP, like shop.tasks:app")
    setup_logs(level=log_level, format=log_format)
    if url is not None:
        os.environ["WHEELSCHED_URL"] = url
    app = _load(application)
    if not app.queues:
        raise CommandFailed(f"{application} has no handlers; register one with @app.task(queue)", exit_code=USAGE, code="usage")
    output.say(f"working on {', '.join(app.queues)}; Ctrl-C or SIGTERM stops, once more leaves at once")
    app.run()
    if output.as_json:
        output.document({"application": application, "queues": list(app.queues)})
    return OK


def _load(application: str) -> App:
    from wheelsched.worker import load_app

    try:
        return load_app(application)
    except ValueError as error:
        raise CommandFailed(str(error), exit_code=USAGE, code="usage") from error
