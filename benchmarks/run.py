"""All benchmarks one after the other, into one file: `python -m benchmarks.run [--size small|large|scaling] [--only NAME] [--json]`.

Finds `bench_*.py` beside this file; each has `run(size) -> list[dict]` and runs in a process of its own, because what one leaves in
memory must not slow the next. `wheelsched bench` and `make bench` end here. What is written to `benchmarks/results.json`:

    {"machine": {...}, "size": "small", "started_at": "...", "checksum": "...", "benchmarks": [
      {"name": "wheel", "exit_code": 0, "seconds": 3.2, "sizes": [100000], "checksum": "...", "rows": [...]}]}

A row is `name, n, value, unit, baseline, baseline_value, ratio, checksum`; `ratio` is above 1 where ours is better. The checksum of a
benchmark is over names, sizes and the rows' checksums of work done: it is the same in every run of the same size unless what was
done differs, for the figures are not in it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from benchmarks.common import ROOT, Row, machine, machine_line, print_rows

FOLDER: Final = Path(__file__).resolve().parent
RESULTS: Final = FOLDER / "results.json"
SIZES: Final = ("small", "large", "scaling")
# These say what was found out, not how much was done.
_FOUND: Final = ("lifecycle_",)


def names() -> list[str]:
    return [path.stem.removeprefix("bench_") for path in sorted(FOLDER.glob("bench_*.py"))]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run the benchmarks and write benchmarks/results.json.")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--only", action="append", choices=names(), metavar="NAME", help="run this one; may be repeated")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to write (benchmarks/results.json)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # the process of one benchmark: where its rows go
    given = parser.parse_args(arguments)
    if given.rows is not None:
        return _run_here(given.only[0], given.size, given.rows, quiet=given.json)
    results = run_all(given.only or names(), given.size, quiet=given.json)
    given.results.write_text(json.dumps(results, indent=1) + "\n")
    if given.json:
        print(json.dumps(results))
    else:
        print(f"written to {given.results}, checksum of the work {results['checksum']}")
    return 1 if any(result["exit_code"] for result in results["benchmarks"]) else 0


def run_all(wanted: Sequence[str], size: str, *, quiet: bool) -> dict[str, Any]:
    """Run each in a process of its own; the document of results."""
    if not quiet:
        print(machine_line(), flush=True)
    document: dict[str, Any] = {"machine": machine(), "size": size, "started_at": datetime.now(UTC).isoformat(timespec="seconds")}
    done = [_run_apart(name, size, quiet=quiet) for name in wanted]
    checksum = zlib.crc32("".join(result["checksum"] for result in done).encode())
    return {**document, "checksum": f"{checksum:08x}", "benchmarks": done}


def _run_apart(name: str, size: str, *, quiet: bool) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "benchmarks.run", "--only", name, "--size", size, "--rows", file.name]
        exit_code = subprocess.run([*command, "--json"] if quiet else command, cwd=ROOT, check=False).returncode
        text = file.read()
    rows: list[Row] = json.loads(text) if text else []
    return {
        "name": name,
        "exit_code": exit_code,
        "seconds": round(time.monotonic() - began, 1),
        "sizes": sorted({line["n"] for line in rows}),
        "checksum": _checksum(rows),
        "rows": rows,
    }


def _run_here(name: str, size: str, file: Path, *, quiet: bool) -> int:
    rows: list[Row] = importlib.import_module(f"benchmarks.bench_{name}").run(size)
    file.write_text(json.dumps(rows))
    if not quiet:
        print_rows(f"{name}, {size}", rows)
    return 0


def _checksum(rows: Sequence[Row]) -> str:
    work = [(line["name"], line["n"], line.get("checksum")) for line in rows if not line["name"].startswith(_FOUND)]
    return f"{zlib.crc32(json.dumps(work).encode()):08x}"


if __name__ == "__main__":
    sys.exit(main())
