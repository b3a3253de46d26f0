"""Group commit: one thread, one fsync at a time, shared by everybody who came while the one before it ran."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable

from wheelsched.store.errors import StoreFailed
from wheelsched.store.failure import Failure

SYNCS_REMEMBERED = 256

_Waiters = list[asyncio.Future[None]]


class Syncer:
    """Calls `flush` (blocking; an fsync) for those who await `sync`. A failure is latched and never turned into an answer."""

    def __init__(self, flush: Callable[[], None], failure: Failure, on_sync_s: Callable[[float], None] | None = None) -> None:
        """`on_sync_s` is told how long each flush took, on the syncer's thread."""
        self._flush, self._failure = flush, failure
        self._on_sync_s = on_sync_s
        self._wake = threading.Condition()
        self._waiting: _Waiters = []
        self._stopping = False
        self._started_at = 0.0  # of the flush under way; 0: none
        self.count = 0
        self.recent_ms: deque[float] = deque(maxlen=SYNCS_REMEMBERED)
        # A daemon, so that a process which dies of an error before `close` does die.
        self._thread = threading.Thread(target=self._run, name="store sync", daemon=True)
        self._thread.start()

    async def sync(self) -> None:
        """Return when a flush that began after this call has ended. Raises `StoreFailed`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._wake:
            if self._stopping:
                raise StoreFailed("the store is closed")
            self._waiting.append(waiter)
            self._wake.notify()
        await waiter

    def pending_ms(self) -> float:
        """How long the flush under way has been running; 0 if there is none."""
        started_at = self._started_at
        return (time.monotonic() - started_at) * 1_000 if started_at else 0.0

    def stop(self) -> None:
        """Serve who waits, then end the thread and return."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while waiters := self._take_waiters():
            error = self._flush_once()
            for loop in {waiter.get_loop() for waiter in waiters}:
                mine = [waiter for waiter in waiters if waiter.get_loop() is loop]
                try:
                    loop.call_soon_threadsafe(_settle, mine, error)
                except RuntimeError:  # that loop is closed: nobody waits any more
                    continue

    def _take_waiters(self) -> _Waiters:
        """Block until somebody waits; empty: the end."""
        with self._wake:
            while not self._waiting and not self._stopping:
                self._wake.wait()
            waiters, self._waiting = self._waiting, []
            return waiters

    def _flush_once(self) -> BaseException | None:
        """One fsync; what went wrong, if anything did."""
        try:
            self._failure.check()
            self._started_at = time.monotonic()
            self._flush()
        except StoreFailed as error:
            return error
        except BaseException as error:
            try:
                return self._failure.fail("sync of the store failed", error)
            except BaseException:  # a test's `fatal` that raises; the real one does not come back
                return StoreFailed(self._failure.message)
        else:
            took_s = time.monotonic() - self._started_at
            self.recent_ms.append(took_s * 1_000)
            self.count += 1
            if self._on_sync_s is not None:
                self._on_sync_s(took_s)
            return None
        finally:
            self._started_at = 0.0


def _settle(waiters: _Waiters, error: BaseException | None) -> None:
    for waiter in waiters:
        if waiter.done():  # cancelled meanwhile
            continue
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)
