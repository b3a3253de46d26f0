"""What all benchmarks share: rows of results, the line that says where they were taken, and a node as a process of its own."""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

Row = dict[str, Any]

ROOT: Final = Path(__file__).resolve().parent.parent
START_S_MAX: Final = 120.0
STOP_S_MAX: Final = 30.0
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_WIDTH_PIPED: Final = 140


class BenchmarkFailed(RuntimeError):
    """The work was not done, or not all of it: its time means nothing."""


# --- rows -----------------------------------------------------------------------------------------------------------------------


def row(
    name: str, n: int, value: float, unit: str, baseline: str = "", baseline_value: float | None = None, *,
    higher_is_better: bool | None = None, checksum: int | None = None,
) -> Row:  # fmt: skip
    """One figure. `ratio` is above 1 where ours is better than the baseline; by default a unit that ends in `/s` is a rate.
    `checksum` sums up the work that was checked: it depends on `n` and the inputs alone."""
    higher = unit.endswith("/s") if higher_is_better is None else higher_is_better
    ratio = None
    if baseline_value and value:
        ratio = round(value / baseline_value if higher else baseline_value / value, 2)
    return {
        "name": name,
        "n": n,
        "value": _rounded(value),
        "unit": unit,
        "baseline": baseline,
        "baseline_value": None if baseline_value is None else _rounded(baseline_value),
        "ratio": ratio,
        "checksum": None if checksum is None else f"{checksum:x}",
    }


def _rounded(value: float) -> float:
    """Three digits are more than any of these figures is worth; rates are whole numbers."""
    return round(value) if abs(value) >= 1_000 else round(value, 2)


def percentile(values: Sequence[float], q: float) -> float:
    """The value that a share `q` (0 to 1) of the values is at or under; ValueError of none."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[max(math.ceil(round(q * len(ordered), 6)) - 1, 0)]


def machine() -> dict[str, Any]:
    """Where figures come from, without a host's name."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 2),
        "commit": commit(),
    }


def machine_line() -> str:
    """The same for people; the load says how far the figures can be believed."""
    facts = machine()
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, Python {facts['python']}, "
        f"commit {facts['commit']}, load {facts['load_1min']}"
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """Short hash of the tree, with `+` where it has changes; `unknown` outside a checkout."""
    try:
        found = _git("rev-parse", "--short", "HEAD")
        return found + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip()


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _WIDTH_PIPED, highlight=False)


def print_rows(title: str, rows: Sequence[Row]) -> None:
    """The short table of one benchmark."""
    cells = [
        (
            line["name"], f"{line['n']:,}", _shown(line["value"]), line["unit"], line["baseline"] or "-",
            _shown(line["baseline_value"]), _shown(line["ratio"]), line.get("checksum") or "-",
        )
        for line in rows
    ]  # fmt: skip
    columns = ("figure", "n", "value", "unit", "baseline", "its value", "ratio", "checksum")
    print_table(title, columns, cells, right=(1, 2, 5, 6))


def print_table(title: str, columns: Sequence[str], cells: Sequence[Sequence[object]], *, right: Sequence[int] = ()) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place in right else "left", overflow="fold")
    for line in cells:
        table.add_row(*(str(cell) for cell in line))
    console().print(table)


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:g}"


def main_of(name: str, run: Callable[[str], list[Row]]) -> None:
    """`python -m benchmarks.bench_<name> [small|large|scaling]`."""
    size = sys.argv[1] if len(sys.argv) > 1 else "small"
    print(machine_line())
    print_rows(f"{name}, {size}", run(size))


# --- bounds of the load scripts -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figure:
    """A line of a load script; `bound` None: only told. `value` must not be above `bound`."""

    name: str
    value: float
    unit: str
    bound: float | None = None
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.bound is None or self.value <= self.bound


def report(title: str, figures: Sequence[Figure], *, check: bool) -> int:
    """Print the figures; the exit code: 1 where `check` is asked for and a bound is broken."""
    print(machine_line())
    cells = [
        (
            figure.name, _shown(_rounded(figure.value)), figure.unit, "-" if figure.bound is None else f"<= {_shown(figure.bound)}",
            "-" if figure.bound is None else "ok" if figure.holds else "BROKEN", figure.note,
        )
        for figure in figures
    ]  # fmt: skip
    print_table(title, ("figure", "value", "unit", "bound", "", "note"), cells, right=(1, 3))
    broken = [figure for figure in figures if not figure.holds]
    for figure in broken:
        print(f"broken: {figure.name} is {figure.value:g} {figure.unit}, the bound is {figure.bound:g}")
    return 1 if check and broken else 0


# --- a node as a process --------------------------------------------------------------------------------------------------------


class Node:
    """`wheelsched dev` in a process of its own, durable, on a free port of the loopback. One directory, any number of lives."""

    def __init__(self, data_dir: Path, settings: Mapping[str, object] | None = None) -> None:
        """`settings`: dotted names, as in conf/reference.yaml."""
        self.data_dir = data_dir
        self.log_path = data_dir.with_name(data_dir.name + ".log")
        self._environment = {f"WHEELSCHED_{name.upper().replace('.', '__')}": str(value) for name, value in (settings or {}).items()}
        self._process: subprocess.Popen[str] | None = None
        self.url = ""
        self.port = 0

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def spawn(self) -> None:
        """Begin to start."""
        assert self._process is None, "it runs"
        command = [
            sys.executable, "-m", "wheelsched.cli", "dev", "--data-dir", str(self.data_dir), "--port", "0", "--json",
            "--log-format", "json", "--log-level", "warning",
        ]  # fmt: skip
        environment = {**os.environ, **self._environment}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else each start compiles every module anew, about a second
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)

    def wait_listening(self) -> None:
        """Block until it says where it listens."""
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchmarkFailed(f"the node ended with code {self._process.wait(STOP_S_MAX)} while it started:\n{self.log_tail()}")
        self.url = json.loads(line)["url"]
        self.port = int(self.url.rpartition(":")[2])

    def wait_ready(self) -> None:
        """Block until /readyz is green."""
        give_up = time.monotonic() + START_S_MAX
        while True:
            try:
                self.get("/readyz")
                return
            except OSError as error:
                if time.monotonic() > give_up:
                    raise BenchmarkFailed(f"the node is not ready after {START_S_MAX:g} s: {error}\n{self.log_tail()}") from error
            time.sleep(0.005)

    def start(self) -> float:
        """Start; seconds until /readyz was green."""
        began = time.monotonic()
        self.spawn()
        self.wait_listening()
        self.wait_ready()
        return time.monotonic() - began

    def terminate(self) -> tuple[int, float]:
        """SIGTERM: (exit code, seconds it took)."""
        assert self._process is not None
        began = time.monotonic()
        self._process.terminate()
        try:
            code = self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self.kill()
            raise BenchmarkFailed(f"the node did not end within {STOP_S_MAX:g} s of SIGTERM:\n{self.log_tail()}") from None
        took_s = time.monotonic() - began
        self._forget()
        return code, took_s

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone; nothing where it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._forget()

    def _forget(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        self._process.stdout.close()
        self._process = None

    def log_tail(self, lines: int = 20) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:]) if self.log_path.exists() else ""

    # What it looks like from outside. These block: not for a loop that measures.

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            body: bytes = answer.read()
            return body

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.get("/status"))
        return found

    def rss_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE_BYTES

    def rss_peak_bytes(self) -> int:
        """Since the process began, or since `reset_peak`."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

    def reset_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def cpu_s(self) -> float:
        return process_cpu_s(self.pid)

    def disk_bytes(self) -> int:
        return directory_bytes(self.data_dir / "db")


@contextmanager
def running_node(settings: Mapping[str, object] | None = None, *, start: bool = True) -> Iterator[Node]:
    """A node on a directory that goes away with it."""
    # A thousand long polls, and RocksDB's files beside them, are more than the usual soft limit.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < min(hard, 65_536):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))
    with temporary_directory() as directory:
        node = Node(directory / "data", settings)
        try:
            if start:
                node.start()
            yield node
        except BaseException:
            print(f"log of the node:\n{node.log_tail(60)}", file=sys.stderr)
            raise
        finally:
            node.kill()


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """Under $BENCH_DIR or the system's temporary directory, which should lie on the disk to be measured (not tmpfs)."""
    path = Path(tempfile.mkdtemp(prefix="wheelsched-bench-", dir=os.environ.get("BENCH_DIR")))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def process_cpu_s(pid: int) -> float:
    """User and system time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def directory_bytes(path: Path) -> int:
    """What its files hold; space that RocksDB has only reserved for a log does not count."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.path.getsize(os.path.join(folder, name))
            except FileNotFoundError:
                continue  # compacted away meanwhile
    return total


def end_group(process: subprocess.Popen[Any]) -> None:
    """End a process that we started in a session of its own, and its children."""
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(10)
    except ProcessLookupError:
        return
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
