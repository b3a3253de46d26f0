"""The tree of commands and the one way out of all of them.

A command's module is imported when the command is called or its help is asked for: `wheelsched jobs get` does not
pay for RocksDB.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

import click

from wheelsched.cli.errors import run_and_report

# name -> (module, attribute, one line of help)
COMMANDS: Final = {
    "dev": ("serve", "dev", "Run one node for development, here and now."),
    "serve": ("serve", "serve", "Run a node from a settings file."),
    "demo": ("demo", "demo", "See it work: jobs, workers, a kill -9, and nothing lost."),
    "jobs": ("jobs", "jobs", "Create, look at and change jobs."),
    "schedules": ("schedules", "schedules", "Recurring jobs: create, look at, pause, run, backfill."),
    "forecast": ("forecast", "forecast", "Which minutes will be busy."),
    "queues": ("queues", "queues", "Look at, tune, pause and resume queues."),
    "dlq": ("dlq", "dlq", "Dead letters: list, redrive, discard."),
    "cluster": ("cluster", "cluster", "Nodes and groups: look, add, drain, remove, replace, transfer."),
    "backup": ("backup", "backup", "Back up a running node or cluster."),
    "verify": ("backup", "verify", "Check a backup, offline."),
    "restore": ("backup", "restore", "Make data directories of a new cluster from a backup."),
    "import": ("imports", "imports", "Take schedules over from cron, Kubernetes, Celery or AWS."),
    "worker": ("worker", "worker", "Run the handlers of an application."),
    "bench": ("bench", "bench", "Run the benchmarks."),
    "config": ("config", "config", "Check settings, print the reference."),
    "doctor": ("doctor", "doctor", "Check this machine and say what to do."),
    "version": ("version", "version", "Print the version."),
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(f"wheelsched.cli.{module}"), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Exit codes: 0 done, 1 failed, 2 usage, 3 not found, 4 conflict, 5 unreachable or unavailable, 130 interrupted.",
)
def cli() -> None:
    """wheelsched: a durable job scheduler.

    \b
    Example:
      wheelsched dev                                     start a node
      wheelsched jobs create mail --delay 10m --payload '{"to": "ada"}'
      wheelsched worker shop.tasks:app                   run the handlers
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script. Exits with one of the codes of `errors.py`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    code = run_and_report(lambda: _invoke(given), as_json="--json" in given)
    # A reader that went away (`| head`) would make the interpreter complain while it flushes.
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _invoke(arguments: list[str]) -> Any:
    return cli.main(arguments, prog_name="wheelsched", standalone_mode=False)
