"""Options and types that commands share."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from wheelsched.cli.output import Output
from wheelsched.cli.remote import DEFAULT_URL, Remote

F = TypeVar("F", bound=Callable[..., Any])

_UNITS_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?")


class Duration(click.ParamType[float]):
    """Seconds from `90`, `1.5s`, `10m`, `2h30m`, `1d`."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        parts = _DURATION.findall(value)
        if not parts or "".join(number + unit for number, unit in parts) != value:
            self.fail(f"{value!r} is not a duration; write 90, 1.5s, 10m, 2h30m or 1d", param, ctx)
        return float(sum(float(number) * _UNITS_S[unit or "s"] for number, unit in parts))


class JsonValue(click.ParamType[Any]):
    """A JSON text; `@FILE` reads it from a file, `@-` from stdin."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        text = value
        if value.startswith("@"):
            try:
                text = sys.stdin.read() if value == "@-" else Path(value[1:]).read_text(encoding="utf-8")
            except OSError as error:
                self.fail(f"{value[1:]} cannot be read: {error.strerror}", param, ctx)
        try:
            return json.loads(text)
        except ValueError as error:
            self.fail(f'not JSON ({error}); quote it for the shell: \'{{"to": "ada"}}\'', param, ctx)


DURATION: Final = Duration()
JSON: Final = JsonValue()


@dataclass(frozen=True, slots=True)
class Session:
    """What a command that talks to a node needs."""

    remote: Remote
    output: Output


def json_option(command: F) -> F:
    """`--json`, handed over as `output`."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
    @functools.wraps(command)
    def wrapped(*args: Any, as_json: bool, **options: Any) -> Any:
        return command(*args, output=Output(as_json), **options)

    return wrapped  # type: ignore[return-value]


def remote_options(command: F) -> F:
    """`--url` and `--json`, handed over as `session`."""

    @click.option("--url", envvar="WHEELSCHED_URL", default=DEFAULT_URL, show_default=True, show_envvar=True, help="The node to ask.")
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
    @functools.wraps(command)
    def wrapped(*args: Any, url: str, as_json: bool, **options: Any) -> Any:
        return command(*args, session=Session(Remote(url), Output(as_json)), **options)

    return wrapped  # type: ignore[return-value]


def labels_of(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """A callback: `key=value` pairs as a mapping."""
    labels = {}
    for value in values:
        key, sign, text = value.partition("=")
        if not sign or not key:
            raise click.BadParameter(f"{value!r} is not KEY=VALUE")
        labels[key] = text
    return labels
