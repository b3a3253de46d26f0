"""`wheelsched bench`: the modules `benchmarks/bench_*.py` of a source tree, one after the other."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import click

import wheelsched
from wheelsched.cli.errors import FAILURE, OK, USAGE, CommandFailed
from wheelsched.cli.options import json_option
from wheelsched.cli.output import Output


@click.command()
@click.option("--only", "names", multiple=True, metavar="NAME", help="Run this one; may be repeated.")
@click.option(
    "--size", type=click.Choice(("small", "large", "scaling")), default="small", show_default=True, help="How much work."
)
@click.option("--list", "list_only", is_flag=True, help="Name the benchmarks and run none.")
@json_option
def bench(output: Output, names: tuple[str, ...], size: str, list_only: bool) -> int:
    """Run the benchmarks of the source tree.

    \b
    Example:
      wheelsched bench --only wheel
      wheelsched bench --size large
    """
    folder = _folder()
    found = {path.stem.removeprefix("bench_"): path.stem for path in sorted(folder.glob("bench_*.py"))}
    if list_only:
        if output.as_json:
            output.document({"benchmarks": list(found)})
        output.say("\n".join(found))
        return OK
    unknown = [name for name in names if name not in found]
    if unknown:
        raise CommandFailed(
            f"no benchmark is called {', '.join(unknown)}; there are: {', '.join(found)}", exit_code=USAGE, code="usage"
        )
    results = []
    with output.progress() as bar:
        task = bar.add_task("benchmarks", total=len(names or found)) if bar else None
        for name in names or tuple(found):
            results.append(_run(name, found[name], folder, size, output))
            if bar is not None and task is not None:
                bar.update(task, advance=1)
    if output.as_json:
        output.document({"size": size, "benchmarks": results})
    failed = [result["name"] for result in results if result["exit_code"]]
    if failed:
        raise CommandFailed(f"failed: {', '.join(map(str, failed))}", exit_code=FAILURE)
    return OK


def _folder() -> Path:
    for root in (Path.cwd(), Path(wheelsched.__file__).resolve().parent.parent):
        folder = root / "benchmarks"
        if any(folder.glob("bench_*.py")):
            return folder
    raise CommandFailed("there is no benchmarks/ here; run it in a source tree of wheelsched")


def _run(name: str, module: str, folder: Path, size: str, output: Output) -> dict[str, object]:
    # A process each: what one leaves in memory must not slow the next. What it prints for people goes through as it comes.
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", size],
        cwd=folder.parent, env={**os.environ, "PYTHONPATH": str(folder.parent)},
        stdout=subprocess.PIPE if output.as_json else None, text=True, check=False,
    )  # fmt: skip
    return {"name": name, "exit_code": done.returncode, "seconds": round(time.monotonic() - begun, 3), "output": done.stdout}
