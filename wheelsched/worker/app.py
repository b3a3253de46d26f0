"""`App`: handlers by queue, and the signals that end a run."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any, TypeVar

import structlog

from wheelsched.core.limits import LEASE_S_MAX, NAME_LENGTH_MAX, TIMEOUT_S_MAX, TIMEOUT_S_MIN, WAIT_S_MAX
from wheelsched.worker.handlers import Handler
from wheelsched.worker.runner import Kind, Runner, Task, WorkerSettings, WorkerStatistics

log = structlog.get_logger("wheelsched.worker")

H = TypeVar("H", bound=Callable[..., Any])


class App:
    """A worker: which queues it serves and with what.

    `base_url` is a node, or several to turn to when one fails. `slots` is how many jobs run at once; queues are asked in the
    order of their registration, and a queue's `reserved_slots` are kept free for it. `lease_s` is how soon a crashed worker's
    jobs return, not how long a handler may take: it is extended each third. `wait_s` is the length of a long poll, `grace_s` what
    a shutdown leaves to handlers at work. `worker` names this process in the history (host and process id by default).
    """

    def __init__(
        self,
        base_url: str | Sequence[str] = "http://127.0.0.1:8080",
        *,
        slots: int = 10,
        lease_s: float = 45.0,
        wait_s: float = 20.0,
        grace_s: float = 30.0,
        worker: str | None = None,
        token: str | None = None,
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots {slots} is below 1")
        if not 0 < lease_s <= LEASE_S_MAX:
            raise ValueError(f"lease_s {lease_s:g} is not between 1 and {LEASE_S_MAX}; heartbeats extend it")
        if not 0 <= wait_s <= WAIT_S_MAX:
            raise ValueError(f"wait_s {wait_s:g} is not between 0 and {WAIT_S_MAX}")
        if grace_s < 0:
            raise ValueError(f"grace_s {grace_s:g} is below 0")
        self._settings = WorkerSettings(
            base_urls=(base_url,) if isinstance(base_url, str) else tuple(base_url),
            worker=worker or _default_worker(),
            slots=slots,
            lease_s=lease_s,
            wait_s=wait_s,
            grace_s=grace_s,
            # A call that takes longer than a third of the lease has to be given up while there is time for another.
            timeout_s=max(1.0, min(30.0, lease_s / 3)),
            token=token,
        )
        self._tasks: dict[str, Task] = {}
        self._runner: Runner | None = None
        self._signalled = False

    def task(self, queue: str, *, timeout_s: float | None = None, processes: bool = False, reserved_slots: int = 0) -> Callable[[H], H]:
        """Register the decorated function for the jobs of `queue`; it is returned unchanged and takes a `Job`.

        `async def` runs on the loop, a plain function in a thread, with `processes` in a process of its own (then it has to be
        importable by name). `timeout_s` bounds a run below the job's own timeout. Raises ValueError for a queue that has a
        handler.
        """
        if queue in self._tasks:
            raise ValueError(f"queue {queue!r} has a handler already: {self._tasks[queue].handler!r}")
        if timeout_s is not None and not TIMEOUT_S_MIN <= timeout_s <= TIMEOUT_S_MAX:
            raise ValueError(f"timeout_s {timeout_s:g} is not between {TIMEOUT_S_MIN} and {TIMEOUT_S_MAX}")
        if reserved_slots < 0:
            raise ValueError(f"reserved_slots {reserved_slots} is below 0")

        def register(handler: H) -> H:
            kind = _kind_of(handler, processes)
            self._tasks[queue] = Task(queue, handler, kind, timeout_s=timeout_s, reserved_slots=reserved_slots)
            return handler

        return register

    @property
    def queues(self) -> tuple[str, ...]:
        """The queues that have a handler, in the order in which they are asked."""
        return tuple(self._tasks)

    def statistics(self) -> WorkerStatistics:
        """What the current or last run has done."""
        return WorkerStatistics() if self._runner is None else self._runner.statistics()

    def stop(self) -> None:
        """Begin the shutdown that SIGTERM begins; from any thread. Without a run: nothing."""
        if self._runner is not None:
            self._runner.stop()

    async def serve(self, *, url: str | None = None, concurrency: int | None = None, name: str | None = None) -> None:
        """Work until `stop` is called, then drain; installs no signal handlers. Cancelled, it leaves its jobs to their leases.

        `url`, `concurrency` and `name` stand in for the app's own `base_url`, `slots` and `worker`, as the command line gives
        them.
        """
        if not self._tasks:
            raise ValueError("the app has no handlers; register one with @app.task(queue)")
        settings = replace(
            self._settings,
            base_urls=self._settings.base_urls if url is None else (url,),
            slots=self._settings.slots if concurrency is None else concurrency,
            worker=self._settings.worker if name is None else name,
        )
        self._runner = Runner(settings, dict(self._tasks))
        await self._runner.run()

    def run(self, *, url: str | None = None, concurrency: int | None = None, name: str | None = None) -> None:
        """Work until SIGTERM or SIGINT, then drain; see `serve`. A second signal ends the process at once.

        A coroutine that swallows its cancellation and goes on holds this up after the drain, as it would `asyncio.run`.
        """
        with self._signals():
            asyncio.run(self.serve(url=url, concurrency=concurrency, name=name))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # Not the loop's own signal handlers: those wait for a loop that a handler may be blocking.
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        self._runner, self._signalled = None, False
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._signalled or self._runner is None:
            sys.stderr.write(f"wheelsched worker: {signal.Signals(number).name}, ending at once\n")
            sys.stderr.flush()
            os._exit(128 + number)
        self._signalled = True
        self._runner.stop()


def _kind_of(handler: Handler, processes: bool) -> Kind:
    is_coroutine = inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004
    if is_coroutine and processes:
        raise ValueError(f"{handler!r} is a coroutine function; processes=True takes a plain function")
    if processes:
        return Kind.PROCESS
    return Kind.COROUTINE if is_coroutine else Kind.THREAD


def _default_worker() -> str:
    # A name: letters, digits, dot, underscore, hyphen, starting with a letter or digit.
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-") or "worker"
    suffix = f"-{os.getpid()}"
    return host[: NAME_LENGTH_MAX - len(suffix)] + suffix


def load_app(spec: str) -> App:
    """The app that `module:name` names; `name` may be dotted, and is `app` where it is left out.

    Raises ImportError where the module cannot be imported (or what it raises itself), ValueError where it holds no such app.
    """
    module_name, _, attribute = spec.partition(":")
    if not module_name:
        raise ValueError(f"{spec!r} names no module; write it as module:app")
    found: Any = importlib.import_module(module_name)
    for name in (attribute or "app").split("."):
        if not hasattr(found, name):
            raise ValueError(f"{spec!r}: {found!r} has no {name!r}")
        found = getattr(found, name)
    if not isinstance(found, App):
        raise ValueError(f"{spec!r} is a {type(found).__name__}, not an App")
    return found
