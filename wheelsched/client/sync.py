"""`Client`: the same calls, blocking, from any thread."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from wheelsched.client.aio import AsyncClient
from wheelsched.client.transport import Backoff
from wheelsched.client.types import Job
from wheelsched.core.limits import PAGE_MAX

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._wait(lambda client: method(client, *args, **kwargs))

    return call


class Client:
    """`AsyncClient` for code without an event loop: the same arguments, methods and errors; see there.

    Its loop runs on a thread of its own, which ends with `close` or the `with` block, and never keeps the process alive. Threads
    share one client and its connections. Not for use after a fork: make one in each process.
    """

    def __init__(
        self,
        base_url: str | Sequence[str] = "http://127.0.0.1:8080",
        *,
        timeout_s: float = 30.0,
        retries: int = 4,
        backoff: Backoff | None = None,
        auto_idempotency: bool = True,
        token: str | None = None,
        connections_max: int = 100,
    ) -> None:
        self._client = AsyncClient(
            base_url, timeout_s=timeout_s, retries=retries, backoff=backoff, auto_idempotency=auto_idempotency, token=token,
            connections_max=connections_max,
        )  # fmt: skip
        self._loop = asyncio.new_event_loop()
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run_loop, name="wheelsched client", daemon=True)
        self._thread.start()

    def _run_loop(self) -> None:
        # The thread closes its loop itself: nobody else may, while it runs.
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread; calls under way in other threads raise `CancelledError`. Again: nothing."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    async def _end(self) -> None:
        under_way = asyncio.all_tasks() - {asyncio.current_task()}
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await self._client.close()

    def _wait(self, call: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
        if self._closed:
            raise RuntimeError("the client is closed")
        future = asyncio.run_coroutine_threadsafe(call(self._client), self._loop)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C while waiting: the call is not to go on behind the caller's back.
            future.cancel()
            raise

    create = _blocking(AsyncClient.create)
    create_many = _blocking(AsyncClient.create_many)
    get = _blocking(AsyncClient.get)
    update = _blocking(AsyncClient.update)
    cancel = _blocking(AsyncClient.cancel)
    run = _blocking(AsyncClient.run)
    redrive = _blocking(AsyncClient.redrive)
    discard = _blocking(AsyncClient.discard)
    attempts = _blocking(AsyncClient.attempts)
    events = _blocking(AsyncClient.events)
    list = _blocking(AsyncClient.list)
    queues = _blocking(AsyncClient.queues)
    queue = _blocking(AsyncClient.queue)
    put_queue = _blocking(AsyncClient.put_queue)
    pause = _blocking(AsyncClient.pause)
    resume = _blocking(AsyncClient.resume)
    dead_letters = _blocking(AsyncClient.dead_letters)
    redrive_all = _blocking(AsyncClient.redrive_all)
    discard_all = _blocking(AsyncClient.discard_all)
    create_schedule = _blocking(AsyncClient.create_schedule)
    put_schedule = _blocking(AsyncClient.put_schedule)
    put_schedules = _blocking(AsyncClient.put_schedules)
    patch_schedule = _blocking(AsyncClient.patch_schedule)
    get_schedule = _blocking(AsyncClient.get_schedule)
    list_schedules = _blocking(AsyncClient.list_schedules)
    delete_schedule = _blocking(AsyncClient.delete_schedule)
    pause_schedule = _blocking(AsyncClient.pause_schedule)
    resume_schedule = _blocking(AsyncClient.resume_schedule)
    preview_schedule = _blocking(AsyncClient.preview_schedule)
    run_schedule = _blocking(AsyncClient.run_schedule)
    backfill_schedule = _blocking(AsyncClient.backfill_schedule)
    schedule_runs = _blocking(AsyncClient.schedule_runs)
    reload_zones = _blocking(AsyncClient.reload_zones)
    forecast = _blocking(AsyncClient.forecast)
    claim = _blocking(AsyncClient.claim)
    heartbeat = _blocking(AsyncClient.heartbeat)
    heartbeat_many = _blocking(AsyncClient.heartbeat_many)
    complete = _blocking(AsyncClient.complete)
    complete_many = _blocking(AsyncClient.complete_many)
    release = _blocking(AsyncClient.release)
    clock = _blocking(AsyncClient.clock)
    advance_clock = _blocking(AsyncClient.advance_clock)
    status = _blocking(AsyncClient.status)
    ready = _blocking(AsyncClient.ready)

    def iterate(
        self,
        *,
        queue: str | None = None,
        status: str | Sequence[str] | None = None,
        labels: Mapping[str, str] | None = None,
        schedule: str | None = None,
        from_at: datetime | str | None = None,
        to_at: datetime | str | None = None,
        page_size: int = PAGE_MAX,
    ) -> Iterator[Job]:
        """All jobs `list` would give, page by page as they are asked for."""
        cursor: str | None = None
        while True:
            page = self.list(
                queue=queue, status=status, labels=labels, schedule=schedule, from_at=from_at, to_at=to_at, limit=page_size,
                cursor=cursor,
            )  # fmt: skip
            yield from page.items
            if (cursor := page.next_cursor) is None:
                return
