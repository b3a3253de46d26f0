"""What commands print: a table or lines for people, one JSON document for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

# Where nobody watches a terminal's edge, ids and times must not be cut.
_WIDTH_PIPED = 240

STATUS_STYLE = {
    "SCHEDULED": "cyan", "QUEUED": "blue", "RUNNING": "yellow", "RETRYING": "magenta", "CANCEL_REQUESTED": "yellow",
    "SUCCEEDED": "green", "DEAD": "red", "CANCELLED": "dim", "SKIPPED": "dim",
}  # fmt: skip


def console(*, stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else _WIDTH_PIPED, highlight=False, soft_wrap=False)


@dataclass(frozen=True, slots=True)
class Output:
    """`as_json`: documents on stdout, no words."""

    as_json: bool

    def document(self, value: Any) -> None:
        """A JSON answer, shown whole in both forms."""
        click.echo(json.dumps(value, ensure_ascii=False, indent=None if self.as_json else 2))

    def say(self, text: str) -> None:
        """A sentence for people; nothing for programs."""
        if not self.as_json:
            click.echo(text)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> None:
        if not self.as_json:
            console().print(make_table(columns, rows, title=title))

    def progress(self) -> AbstractContextManager[Progress | None]:
        """A progress bar on stderr while something long runs, where somebody watches."""
        if self.as_json or not sys.stderr.isatty():
            return nullcontext(None)
        return Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=console(stderr=True), transient=True,
        )  # fmt: skip


def make_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> Table:
    """Columns whose name begins with `>` are set to the right."""
    table = Table(title=title, box=None, pad_edge=False, header_style="bold", title_justify="left")
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def _cell(value: object) -> str:
    if value is None:
        return "-"
    text = str(value)
    style = STATUS_STYLE.get(text)
    return f"[{style}]{text}[/{style}]" if style else text.replace("[", r"\[")
