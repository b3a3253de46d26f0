"""Starting and stopping handlers: coroutines on the loop, functions in threads, functions in processes."""

from __future__ import annotations

import asyncio
import contextvars
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, cast

from wheelsched.worker.job import Job
from wheelsched.worker.outcomes import WorkerProcessDied

Handler = Callable[[Job], Any]


@dataclass(frozen=True, slots=True)
class Running:
    """A handler at work. `future` has its end; `stop` asks for it, and does nothing for a thread, which looks for itself."""

    future: asyncio.Future[Any]
    stop: Callable[[], object]


class Starter(Protocol):
    def start(self, handler: Handler, job: Job) -> Running: ...

    def close(self) -> None:
        """Let go of idle threads and processes; those at work are the caller's to have ended."""
        ...


class Coroutines:
    """`async def` handlers, on the worker's loop."""

    def start(self, handler: Handler, job: Job) -> Running:
        task = asyncio.get_running_loop().create_task(_contained(handler, job), name=f"handler {job.job_id}")
        return Running(task, task.cancel)

    def close(self) -> None:
        pass


async def _contained(handler: Handler, job: Job) -> Any:
    try:
        return await cast(Coroutine[Any, Any, Any], handler(job))
    except (SystemExit, KeyboardInterrupt) as error:
        # asyncio would take either for the end of the loop; sys.exit() in a handler is a failure of that handler.
        raise RuntimeError(f"the handler raised {type(error).__name__}({error})") from error


class Threads:
    """Plain functions, in threads that do not keep the process alive.

    `concurrent.futures` joins its threads at exit, so one handler that hangs would hold up a shutdown for ever. Threads are
    reused, what a handler keeps in `threading.local` is there for the next; there are never more than handlers at work at once.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._count = 0

    def start(self, handler: Handler, job: Job) -> Running:
        future: Future[Any] = Future()
        context = contextvars.copy_context()
        if not self._idle.acquire(blocking=False):
            self._count += 1
            threading.Thread(target=self._work, name=f"wheelsched handler {self._count}", daemon=True).start()
        self._calls.put(lambda: self._call(future, context, handler, job))
        return Running(asyncio.wrap_future(future), lambda: None)

    def close(self) -> None:
        for _ in range(self._count):
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _call(self, future: Future[Any], context: contextvars.Context, handler: Handler, job: Job) -> None:
        future.set_running_or_notify_cancel()
        result: Any = None
        error: BaseException | None = None
        try:
            result = context.run(handler, job)
        except (StopIteration, SystemExit, KeyboardInterrupt) as raised:
            # No future can carry a StopIteration, and the others would end the loop that takes it out.
            error = RuntimeError(f"the handler raised {type(raised).__name__}({raised})")
            error.__cause__ = raised
        except BaseException as raised:  # it is handed on
            error = raised
        # Idle before the news are out: who hears them may start the next handler at once.
        self._idle.release()
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


class Processes:
    """Functions for CPU-bound work, each in a process that has no other work meanwhile.

    One process a handler, and not one pool of them: a pool that loses a process fails everything in it (`BrokenProcessPool`), and
    the work of one process could not be stopped. Processes are spawned, so the handler is imported by name, and are reused.
    """

    def __init__(self) -> None:
        self._idle: list[_Process] = []

    def start(self, handler: Handler, job: Job) -> Running:
        run = _ProcessRun(self._idle)
        task = asyncio.get_running_loop().create_task(run.run(handler, job), name=f"handler {job.job_id}")
        return Running(task, run.stop)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


class _Process:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.executor = ProcessPoolExecutor(1, mp_context=context, initializer=_prepare)
        try:
            self._pid = self.executor.submit(os.getpid).result()
        except BaseException:
            self.close()
            raise

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        self.executor.shutdown(wait=False, cancel_futures=True)


class _ProcessRun:
    def __init__(self, idle: list[_Process]) -> None:
        self._idle = idle
        self._process: _Process | None = None
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True
        if self._process is not None:
            self._process.kill()

    async def run(self, handler: Handler, job: Job) -> Any:
        process, future = await self._submit(handler, job)
        try:
            result = await asyncio.wrap_future(future)
        except BrokenExecutor as error:
            process.close()
            raise WorkerProcessDied("the process of the handler ended without a result") from error
        except asyncio.CancelledError:
            process.kill()
            process.close()
            raise
        except BaseException:
            self._put_back(process)
            raise
        self._put_back(process)
        return result

    async def _submit(self, handler: Handler, job: Job) -> tuple[_Process, Future[Any]]:
        while True:
            was_idle = bool(self._idle)
            # Starting one takes a tenth of a second: not on the loop.
            process = self._idle.pop() if was_idle else await asyncio.to_thread(_started)
            if self._stopped:
                self._idle.append(process)
                raise WorkerProcessDied("stopped before it started")
            try:
                future = process.executor.submit(handler, job)
            except BrokenExecutor as error:
                # Killed while it had nothing to do: no fault of this job.
                process.close()
                if was_idle:
                    continue
                raise WorkerProcessDied("the process of the handler ended before it began") from error
            self._process = process
            return process, future

    def _put_back(self, process: _Process) -> None:
        self._process = None
        if self._stopped:
            # The kill may still be on its way: what it hits is not to be the next handler.
            process.close()
        else:
            self._idle.append(process)


def _started() -> _Process:
    try:
        return _Process()
    except BrokenExecutor as error:
        raise WorkerProcessDied("the process of the handler ended before it began; can its module be imported?") from error


def _prepare() -> None:
    """In the new process: Ctrl-C and SIGTERM are the worker's to handle; and it does not outlive the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="wheelsched parent watch", daemon=True).start()


def _end_with_parent() -> None:
    # A worker that was killed does not come back for the result, and its lease runs out: end, whatever is being computed.
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
    os._exit(1)
