"""`wheelsched bench`: the modules `benchmarks/bench_*.py` of a source tree, one after the other, by `benchmarks/run.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click

import wheelsched
from wheelsched.cli.errors import FAILURE, OK, USAGE, CommandFailed
from wheelsched.cli.options import json_option
from wheelsched.cli.output import Output


@click.command()
@click.option("--only", "names", multiple=True, metavar="NAME", help="Run this one; may be repeated.")
@click.option("--size", type=click.Choice(("small", "large", "scaling")), default="small", show_default=True, help="How much work.")
@click.option("--list", "list_only", is_flag=True, help="Name the benchmarks and run none.")
@json_option
def bench(output: Output, names: tuple[str, ...], size: str, list_only: bool) -> int:
    """Run the benchmarks of the source tree; the figures go to benchmarks/results.json as well.

    \b
    Example:
      wheelsched bench --only wheel
      wheelsched bench --size large
    """
    folder = _folder()
    found = [path.stem.removeprefix("bench_") for path in sorted(folder.glob("bench_*.py"))]
    if list_only:
        if output.as_json:
            output.document({"benchmarks": found})
        output.say("\n".join(found))
        return OK
    unknown = [name for name in names if name not in found]
    if unknown:
        raise CommandFailed(f"no benchmark is called {', '.join(unknown)}; there are: {', '.join(found)}", exit_code=USAGE, code="usage")
    # A process of its own, and in it one a benchmark: it prints, and writes benchmarks/results.json.
    command = [sys.executable, "-m", "benchmarks.run", "--size", size, *(["--json"] if output.as_json else [])]
    for name in names:
        command += ["--only", name]
    done = subprocess.run(command, cwd=folder.parent, env={**os.environ, "PYTHONPATH": str(folder.parent)}, check=False)
    if done.returncode:
        raise CommandFailed("a benchmark failed; what it wrote stands above", exit_code=FAILURE)
    return OK


def _folder() -> Path:
    for root in (Path.cwd(), Path(wheelsched.__file__).resolve().parent.parent):
        folder = root / "benchmarks"
        if any(folder.glob("bench_*.py")):
            return folder
    raise CommandFailed("there is no benchmarks/ here; run it in a source tree of wheelsched")
