"""`wheelsched doctor`: is this machine fit to run a node, and if not, what to do."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

import click

from wheelsched.cli.errors import FAILURE, OK
from wheelsched.cli.options import json_option
from wheelsched.cli.output import Output
from wheelsched.core.settings import Settings
from wheelsched.runtime.config import data_dir, load_settings
from wheelsched.wheel import NATIVE

_FSYNCS: Final = 30
# A create waits for one fsync and a claim for another: above 10 ms the 5 ms goal for precise jobs is out of reach, above 100 ms
# even the one-second promise suffers under load.
_FSYNC_GOOD_MS: Final = 10.0
_FSYNC_BAD_MS: Final = 100.0
_CLOCK_SOURCE: Final = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_FAST_CLOCKS: Final = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")
_COLOURS: Final = {"good": "green", "warning": "yellow", "bad": "red"}
_FILES_BESIDE_CONNECTIONS: Final = 2_000  # RocksDB's tables and logs


@dataclass(frozen=True, slots=True)
class Finding:
    """`bad` means a node will not run, or not keep its promises; `warning` that it will be slower than it could."""

    check: str
    verdict: Literal["good", "warning", "bad"]
    found: str
    advice: str = ""


@click.command()
@click.option("-c", "--config", "file", type=click.Path(path_type=Path, dir_okay=False), help="Settings (YAML); the defaults otherwise.")
@json_option
def doctor(output: Output, file: Path | None) -> int:
    """Check Python, native parts, disk, limits, clock, data directory and port; say what to do.

    \b
    Example:
      wheelsched doctor
      wheelsched doctor -c conf/production.yaml --json
    """
    settings = load_settings(file)
    findings = examine(settings)
    if output.as_json:
        output.document({"findings": [asdict(finding) for finding in findings]})
    for finding in findings:
        mark = click.style(f"{finding.verdict:<9}", fg=_COLOURS[finding.verdict])
        output.say(f"{mark}{finding.check:<16}{finding.found}" + (f"\n{'':25}-> {finding.advice}" if finding.advice else ""))
    return FAILURE if any(finding.verdict == "bad" for finding in findings) else OK


def examine(settings: Settings) -> list[Finding]:
    """Every check, in the order in which to mend things."""
    checks: tuple[Callable[[Settings], Finding], ...] = (
        _check_python, _check_native, _check_data_dir, _check_space, _check_fsync, _check_files, _check_clock, _check_port,
    )  # fmt: skip
    return [check(settings) for check in checks]


def _check_python(_settings: Settings) -> Finding:
    found = f"{platform.python_implementation()} {platform.python_version()}"
    if sys.implementation.name != "cpython":
        return Finding("python", "warning", found, "tested with CPython only; install CPython 3.11 or later")
    return Finding("python", "good", found)


def _check_native(_settings: Settings) -> Finding:
    if NATIVE:
        return Finding("native", "good", "compiled timing wheel in use")
    if os.environ.get("WHEELSCHED_PURE") == "1":
        return Finding("native", "warning", "WHEELSCHED_PURE=1: the Python twin is in use", "unset WHEELSCHED_PURE for full speed")
    return Finding("native", "warning", "not built: the Python twin is in use", "install a C compiler and run `make setup` again")


def _check_data_dir(settings: Settings) -> Finding:
    folder = data_dir(settings).absolute()
    existing = _existing(folder)
    if not os.access(existing, os.W_OK | os.X_OK):
        return Finding("data directory", "bad", f"{existing} is not writable", "change its owner, or set node.data_dir (dev: --data-dir)")
    state = "there" if folder == existing else "will be made"
    if _is_memory_disk(existing):
        return Finding("data directory", "warning", f"{folder} ({state}) lies in memory", "set node.data_dir to a directory on a disk")
    return Finding("data directory", "good", f"{folder} ({state})")


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def _is_memory_disk(folder: Path) -> bool:
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    kinds = {fields[1]: fields[2] for fields in map(str.split, mounts) if len(fields) > 2}
    for parent in (folder, *folder.parents):
        if str(parent) in kinds:
            return kinds[str(parent)] in ("tmpfs", "ramfs")
    return False


def _check_space(settings: Settings) -> Finding:
    usage = shutil.disk_usage(_existing(data_dir(settings).absolute()))
    # As the store does: the bound, or the share of a disk too small for it.
    refuse = min(settings.store.free_bytes_min, usage.total // 10)
    stop = min(settings.store.free_bytes_stop, usage.total // 40)
    found = f"{usage.free / 2**30:.1f} GiB free of {usage.total / 2**30:.1f}"
    if usage.free < stop:
        return Finding("disk space", "bad", found, f"a node stops below {stop / 2**30:.2f} GiB; free some, or lower store.free_bytes_stop")
    if usage.free < refuse:
        return Finding(
            "disk space",
            "bad",
            found,
            f"new jobs are refused below {refuse / 2**30:.2f} GiB; free some, or lower store.free_bytes_min",
        )
    return Finding("disk space", "good", found)


def _check_fsync(settings: Settings) -> Finding:
    folder = _existing(data_dir(settings).absolute())
    if not os.access(folder, os.W_OK):
        return Finding("disk fsync", "bad", f"not measured: {folder} is not writable", "see data directory")
    times_ms = measure_fsync_ms(folder)
    middle, worst = statistics.median(times_ms), max(times_ms)
    found = f"median {middle:.2f} ms, worst {worst:.1f} ms of {len(times_ms)}"
    if middle > _FSYNC_BAD_MS:
        return Finding("disk fsync", "bad", found, "each write waits for this; put the data on a local SSD")
    if middle > _FSYNC_GOOD_MS:
        return Finding("disk fsync", "warning", found, "jobs start later than they could; a local SSD takes 0.1 to 2 ms")
    return Finding("disk fsync", "good", found)


def measure_fsync_ms(folder: Path) -> list[float]:
    """Milliseconds of appends of 4 KiB, each made durable."""
    times = []
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".wheelsched-doctor-") as file:
        for _ in range(_FSYNCS):
            begun = time.perf_counter()
            file.write(b"\0" * 4096)
            file.flush()
            os.fdatasync(file.fileno()) if hasattr(os, "fdatasync") else os.fsync(file.fileno())
            times.append((time.perf_counter() - begun) * 1_000)
    return times


def _check_files(settings: Settings) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.http.connections_max + _FILES_BESIDE_CONNECTIONS
    found = f"{soft:,} open files (hard limit {hard:,})" if hard != resource.RLIM_INFINITY else f"{soft:,} open files"
    if soft != resource.RLIM_INFINITY and soft < _FILES_BESIDE_CONNECTIONS:
        return Finding("file limit", "bad", found, f"run `ulimit -n {wanted}` first, or LimitNOFILE={wanted} in the systemd unit")
    if soft != resource.RLIM_INFINITY and soft < wanted:
        return Finding("file limit", "warning", found, f"http.connections_max needs {wanted:,}: `ulimit -n {wanted}`, or lower it")
    return Finding("file limit", "good", found)


def _check_clock(_settings: Settings) -> Finding:
    reads = 20_000
    begun = time.perf_counter_ns()
    for _ in range(reads):
        time.time_ns()
    each_ns = (time.perf_counter_ns() - begun) / reads
    try:
        source = _CLOCK_SOURCE.read_text(encoding="ascii").strip()
    except OSError:
        source = "unknown source"
    monotonic = "CLOCK_BOOTTIME" if hasattr(time, "CLOCK_BOOTTIME") else "CLOCK_MONOTONIC"
    found = f"{source}, {each_ns:.0f} ns a reading, leases by {monotonic}"
    if each_ns > 1_000 and source not in _FAST_CLOCKS:
        return Finding("clock", "warning", found, "readings leave the fast path; prefer a host whose clock source is tsc or kvm-clock")
    return Finding("clock", "good", found)


def _check_port(settings: Settings) -> Finding:
    host, port = settings.http.host, settings.http.port
    if port == 0:
        return Finding("port", "good", "0: a free one is picked")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            advice = "stop what listens there, or set http.port (dev: --port); a node that already runs is fine"
            return Finding("port", "warning", f"{host}:{port} cannot be had: {error.strerror}", advice)
    return Finding("port", "good", f"{host}:{port} is free")
