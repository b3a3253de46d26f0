"""A node as a process of its own, to be killed, and told about from outside; and what of its WAL may be cut off after a kill.

Nodes are forked from a process that has imported everything (`forkserver`), so that a start takes a fifth of a second.

**What may be cut.** A killed process loses nothing that it had handed to the kernel; a power cut loses what no fsync covered.
The sizes of the WAL files when an answer arrives say too little about that, for by then others have written on. So the node
itself can be made to note (`notes`), at each sync, how long its WAL files are before the fsync begins (`Faults.on_sync`), and
to append those lengths to a file of ours after the fsync has returned and before anybody is told: before the store's own mark
of it is written, and so before any answer leaves. After a kill every byte beyond the last noted length of a WAL file is one
that no acknowledgement rests on, and `cut_wal` cuts off the end of the file at a random one of them. Everything before has to
be there, else the answers were lies. The store's mark (store/mark.py) neither helps nor hinders: it tells of less than was
noted, never of more.
"""

from __future__ import annotations

import ctypes
import functools
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from wheelsched.core.settings import StoreSettings
from wheelsched.store.directory import DB_NAME
from wheelsched.store.mark import SyncedMark
from wheelsched.store.rocks import RocksStore

START_S_MAX: Final = 60.0
_PR_SET_PDEATHSIG: Final = 1

_processes = multiprocessing.get_context("forkserver")


class NodeFailed(RuntimeError):
    """A node ended, or did not answer, when it should have."""


class NodeProcess:
    """`wheelsched dev` as a process. One directory, any number of lives; `log_path` collects what they write to stderr."""

    def __init__(
        self,
        data_dir: Path,
        *,
        settings: Mapping[str, object] | None = None,
        arguments: Sequence[str] = (),
        command: Sequence[str] = (),
        notes: Path | None = None,
        sync_delay_s: float = 0.0,
        slow_disk: Path | None = None,
    ) -> None:
        """`settings`: dotted keys, as in the reference file; `command`: instead of `dev` on a free port; `notes`: where the lengths
        of synced WAL files are noted; `sync_delay_s`: how much longer each fsync takes then, so that more is under way at a kill.
        `slow_disk`: without notes; a file that says by how many milliseconds each fsync takes longer at present."""
        self.data_dir = data_dir
        self.settings = dict(settings or {})
        self.command = tuple(command) or ("dev", "--data-dir", str(data_dir), "--port", "0")
        self.arguments = tuple(arguments)
        self.notes = notes
        self.sync_delay_s = sync_delay_s
        self.slow_disk = slow_disk
        self.log_path = data_dir.with_name(data_dir.name + ".log")
        self.out_path = data_dir.with_name(data_dir.name + ".out")
        self._process: Any = None
        self.url = ""

    def spawn(self) -> None:
        """Begin to start; `wait_ready` tells when it answers."""
        assert self._process is None, "it runs"
        # Most of a start is importing, which the fork server does once.
        _processes.set_forkserver_preload(["wheelsched.testing.process", "wheelsched.cli.serve", "wheelsched.api", "wheelsched.node"])
        self.out_path.write_bytes(b"")
        settings = {"logging.format": "json", **self.settings}
        environment = {"WHEELSCHED_" + name.upper().replace(".", "__"): str(value) for name, value in settings.items()}
        arguments = [*self.command, "--json", *self.arguments]
        files = (str(self.out_path), str(self.log_path))
        watched = None if self.notes is None else (self.notes, self.sync_delay_s)
        self._process = _processes.Process(target=_be_node, args=(arguments, environment, files, watched, self.slow_disk), daemon=True)
        with _without_main():
            self._process.start()

    def wait_ready(self, timeout_s: float = START_S_MAX) -> str:
        """Block until it listens; its URL."""
        give_up = time.monotonic() + timeout_s
        while not (out := self.out_path.read_text()).endswith("\n"):
            if not self._process.is_alive():
                raise NodeFailed(f"the node ended with code {self.exit_code()} while it started:\n{self.log_tail()}")
            if time.monotonic() > give_up:
                raise NodeFailed(f"the node did not listen within {timeout_s:g} s:\n{self.log_tail()}")
            time.sleep(0.005)
        self.url = json.loads(out)["url"]
        return self.url

    def start(self, timeout_s: float = START_S_MAX) -> str:
        """Start; return its URL when it listens."""
        self.spawn()
        return self.wait_ready(timeout_s)

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    @property
    def has_ended(self) -> bool:
        """By itself: it was started, and nobody asked for its end."""
        return self._process is not None and not self._process.is_alive()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Nothing happens where it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    def terminate(self, timeout_s: float = 20.0) -> tuple[int, float]:
        """SIGTERM; (exit code, seconds it took)."""
        began = time.monotonic()
        self._process.terminate()
        self._process.join(timeout_s)
        took_s = time.monotonic() - began
        if self._process.is_alive():
            self.kill()
            raise NodeFailed(f"the node did not end within {timeout_s:g} s of SIGTERM:\n{self.log_tail()}")
        return self.exit_code(), took_s

    def exit_code(self, timeout_s: float = 20.0) -> int:
        """Wait for its end; negative: the signal."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        if code is None:
            raise NodeFailed(f"the node has not ended within {timeout_s:g} s")
        self._process = None
        return int(code)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_tail(self, lines: int = 20) -> str:
        return "\n".join(self.log().splitlines()[-lines:])

    def log_faults(self) -> list[str]:
        """Lines that no node should ever write: tracebacks, errors, repairs."""
        return [line for line in self.log().splitlines() if "Traceback" in line or '"level":"error"' in line or "audit_repair" in line]


@contextmanager
def _without_main() -> Iterator[None]:
    """The forked process would import the main module anew, be it pytest."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _be_node(
    arguments: list[str], environment: dict[str, str], files: tuple[str, str], watched: tuple[Path, float] | None, slow_disk: Path | None
) -> None:
    """The forked process, from here on the node."""
    # Whoever started us may be killed as well, with no chance to clean up.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    for descriptor, path in zip((1, 2), files, strict=True):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.update(environment)
    from wheelsched.node import build

    if watched is not None:
        vars(build)["RocksStore"] = functools.partial(NotedStore, notes=watched[0], sync_delay_s=watched[1])
    elif slow_disk is not None:
        vars(build)["RocksStore"] = functools.partial(RocksStore, faults=_SlowDisk(slow_disk))
    from wheelsched.cli import main

    sys.argv = ["wheelsched", *arguments]
    main()


# --- what is synced -------------------------------------------------------------------------------------------------------------


class NotedStore(RocksStore):
    """A store that notes in a file how long its WAL files were when a sync that has succeeded began."""

    def __init__(self, data_dir: str | Path, settings: StoreSettings, *, notes: Path, sync_delay_s: float, **others: Any) -> None:
        note = _Notes(Path(data_dir) / DB_NAME, notes, sync_delay_s)
        super().__init__(data_dir, settings, faults=note, **others)
        # In front of the store's own mark: a kill between the two must find the note.
        self._mark = _NotedMark(self._mark, note)  # type: ignore[assignment]


class _Notes:
    """Lengths seen before an fsync, written down after it. Implements `Faults`."""

    def __init__(self, db_path: Path, notes: Path, sync_delay_s: float) -> None:
        self._db_path, self._sync_delay_s = db_path, sync_delay_s
        # A kill may have cut the last line short; what follows begins a line of its own.
        self._file = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(self._file, b"\n")
        self._seen: list[tuple[str, int]] = []

    def on_write(self) -> None:
        pass

    def on_sync(self) -> None:
        self._seen = wal_lengths(self._db_path)
        if self._sync_delay_s:
            time.sleep(self._sync_delay_s)

    def write_down(self) -> None:
        os.write(self._file, b"".join(b"%s %d\n" % (name.encode(), length) for name, length in self._seen))


class _SlowDisk:
    """A disk whose fsyncs take as much longer as a file says. Implements `Faults`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_write(self) -> None:
        pass

    def on_sync(self) -> None:
        with suppress(FileNotFoundError, ValueError):
            time.sleep(int(self._path.read_text()) / 1000)


class _NotedMark:
    def __init__(self, mark: SyncedMark, notes: _Notes) -> None:
        self._mark, self._notes = mark, notes

    def read(self) -> int:
        return self._mark.read()

    def write(self, sequence: int) -> None:
        self._notes.write_down()
        self._mark.write(sequence)

    def close(self) -> None:
        self._mark.close()


def wal_lengths(db_path: Path) -> list[tuple[str, int]]:
    """(name, bytes) of the WAL files, oldest first."""
    found = []
    for path in sorted(db_path.glob("*.log")):
        with suppress(FileNotFoundError):  # dropped meanwhile: its rows lie in a table now
            found.append((path.name, path.stat().st_size))
    return found


def synced_lengths(notes: Path) -> dict[str, int]:
    """The longest length noted of each WAL file. Names are never used twice."""
    lengths: dict[str, int] = {}
    for line in notes.read_text().splitlines():
        name, _, length = line.partition(" ")
        if length.isdigit():
            lengths[name] = max(lengths.get(name, 0), int(length))
    return lengths


def cut_wal(db_path: Path, notes: Path, rng: random.Random) -> tuple[int, int]:
    """Cut the end of each WAL file off at a random byte of what was not synced: (bytes that were not, bytes cut). There is more
    than one such file only where RocksDB began a new one during the last sync."""
    synced = synced_lengths(notes)
    unsynced = cut = 0
    for name, length in wal_lengths(db_path):
        kept = rng.randint(min(synced.get(name, 0), length), length)
        os.truncate(db_path / name, kept)
        unsynced += length - min(synced.get(name, 0), length)
        cut += length - kept
    return unsynced, cut
