"""The end of a node whose disk cannot be trusted, and where tests put in the faults that lead there.

No second attempt is made: after a failed fsync the kernel marks the pages clean, and the next fsync succeeds without the data
(PostgreSQL "fsyncgate" 2018; Rebello et al., USENIX ATC 2020). Only a restart reads what is really there.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, Protocol

import structlog

from wheelsched.store.errors import StoreFailed

log = structlog.get_logger()
EXIT_STORAGE_FAILED = 70  # EX_SOFTWARE of sysexits.h


class Faults(Protocol):
    """Injected by tests: each is called before the real thing and may raise in its place."""

    def on_write(self) -> None: ...

    def on_sync(self) -> None: ...


class NoFaults:
    def on_write(self) -> None:
        pass

    def on_sync(self) -> None:
        pass


def exit_now(message: str) -> NoReturn:
    """Print `message` to stderr and end the process at once, from whichever thread: no cleanup may write or answer anything."""
    print(message, file=sys.stderr, flush=True)
    os._exit(EXIT_STORAGE_FAILED)


class Failure:
    """The latch: the first failure is reported and calls `fatal`, once; everything after it is refused."""

    def __init__(self, fatal: Callable[[str], NoReturn]) -> None:
        self.fatal = fatal
        self._lock = threading.Lock()
        self.message = ""  # of the first failure; empty: none

    def check(self) -> None:
        """Raise `StoreFailed` if there was a failure."""
        if self.message:
            raise StoreFailed(self.message)

    def fail(self, what: str, error: BaseException) -> StoreFailed:
        """Latch and call `fatal`. Comes back only where a test's `fatal` does; the caller then raises what it returns."""
        with self._lock:
            first = not self.message
            if first:
                self.message = f"wheelsched: {what}: {error}; the node stops because what the disk holds is unknown"
        if first:
            log.error("store_failed", what=what, error=str(error))
            self.fatal(self.message)
        return StoreFailed(self.message)
