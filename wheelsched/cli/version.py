"""`wheelsched version`."""

from __future__ import annotations

import platform

import click

import wheelsched
from wheelsched.cli.options import json_option
from wheelsched.cli.output import Output
from wheelsched.wheel import NATIVE


@click.command()
@json_option
def version(output: Output) -> None:
    """Print the version of wheelsched, of Python, and whether the native parts are in use.

    \b
    Example:
      wheelsched version --json
    """
    if output.as_json:
        output.document({"version": wheelsched.__version__, "python": platform.python_version(), "native": NATIVE})
    parts = "native wheel" if NATIVE else "pure Python wheel"
    output.say(f"wheelsched {wheelsched.__version__} (Python {platform.python_version()}, {parts})")
