"""`wheelsched config …`."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from wheelsched.cli.options import json_option
from wheelsched.cli.output import Output
from wheelsched.runtime.config import KEYS, load_settings, reference_yaml


@click.group()
def config() -> None:
    """Check settings, print the reference.

    \b
    Example:
      wheelsched config check conf/production.yaml
    """


@config.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@json_option
def check(output: Output, file: Path) -> None:
    """Check a settings file together with the environment; tell every fault with its line.

    \b
    Example:
      wheelsched config check conf/production.yaml
    """
    settings = load_settings(file)
    if output.as_json:
        output.document(msgspec.to_builtins(settings))
    output.say(f"{file}: good; node {settings.node.id} would listen on {settings.http.host}:{settings.http.port}")


@config.command()
@json_option
def reference(output: Output) -> None:
    """Print every setting with its default, meaning and bounds.

    \b
    Example:
      wheelsched config reference > conf/reference.yaml
    """
    if output.as_json:
        output.document({key.name: {"default": key.default, "description": key.description, "bounds": key.bounds} for key in KEYS.values()})
    else:
        click.echo(reference_yaml(), nl=False)
