"""The requests of one peer that are under way here, each in a task of its own, and how a refusal travels back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

import structlog

from wheelsched.cluster.errors import Busy
from wheelsched.cluster.frames import (
    BODY_BYTES_MAX,
    FrameError,
    Kind,
    Problem,
    Request,
    Response,
    Status,
    decode_problem,
    encode_body,
)
from wheelsched.cluster.wire import Wire
from wheelsched.core.errors import WheelschedError, from_problem
from wheelsched.core.invariants import InvariantBroken

log = structlog.get_logger(__name__)

_ANSWER_BYTES_MAX: Final = BODY_BYTES_MAX - 1024
# How long an answer can be waited for, whatever the caller says: the longest wait of a claim is a minute.
_TIMEOUT_MS_MAX: Final = 10 * 60_000


class Calls:
    """Ends with its connection: who asked is then no more, and what it asked for is cancelled."""

    def __init__(
        self, node: int, wire: Wire, handler: Callable[[int, str, bytes], Awaitable[bytes]],
        start: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]], mono_ms: Callable[[], int], *, count_max: int,
    ) -> None:  # fmt: skip
        self._node = node
        self._wire = wire
        self._handler = handler
        self._start = start
        self._mono_ms = mono_ms
        self._count_max = count_max
        self._swept_mono_ms = 0
        self._tasks: dict[int, tuple[asyncio.Task[None], int]] = {}  # number -> (task, deadline, monotonic)

    def on_request(self, request: Request) -> None:
        if request.number in self._tasks:
            raise FrameError(f"request {request.number} came twice")
        if len(self._tasks) >= self._count_max:
            problem = Problem("unavailable", f"{self._count_max:,} requests of one node are under way; repeat in a second", 1.0)
            self._answer(request.number, Status.REFUSED, encode_body(problem))
            return
        deadline = self._mono_ms() + min(request.timeout_ms, _TIMEOUT_MS_MAX)
        self._tasks[request.number] = self._start(self._serve(request), f"request {request.method}"), deadline

    def cancel(self, number: int) -> None:
        if found := self._tasks.get(number):
            found[0].cancel()

    def sweep(self, now_mono_ms: int) -> None:
        """Cancel what nobody waits for any more, a second late at most; its caller said so already, if it lives. O(under way)."""
        if now_mono_ms < self._swept_mono_ms + 1_000:
            return
        self._swept_mono_ms = now_mono_ms
        for task, deadline in list(self._tasks.values()):
            if deadline <= now_mono_ms:
                task.cancel()

    def end(self) -> None:
        for task, _ in list(self._tasks.values()):
            task.cancel()

    async def _serve(self, request: Request) -> None:
        try:
            status, body = await self._answer_to(request)
            self._answer(request.number, status, body)
        finally:
            self._tasks.pop(request.number, None)

    async def _answer_to(self, request: Request) -> tuple[Status, bytes]:
        try:
            body = await self._handler(self._node, request.method, request.body)
        except WheelschedError as error:
            errors = tuple(dict(fault) for fault in error.errors)
            return Status.ERROR, encode_body(Problem(error.code, error.detail, error.retry_after_s, errors))
        except InvariantBroken:
            raise
        except Exception:
            # As at the edge of the API: one request failed, and the log says why.
            log.exception("peer_request_failed", method=request.method)
            return Status.ERROR, encode_body(Problem(WheelschedError.code, f"{request.method} failed; the log of that node says why"))
        if len(body) > _ANSWER_BYTES_MAX:
            problem = Problem("payload-too-large", f"the answer to {request.method} has {len(body):,} bytes, above {_ANSWER_BYTES_MAX:,}")
            return Status.ERROR, encode_body(problem)
        return Status.OK, body

    def _answer(self, number: int, status: Status, body: bytes) -> None:
        self._wire.write(Kind.RESPONSE, encode_body(Response(number, status, body)))


def problem_of(response: Response, name: str) -> WheelschedError:
    """The error that the other side answered with. Raises `FrameError`."""
    problem = decode_problem(response.body)
    if response.status is Status.REFUSED:
        return Busy(f"{name}: {problem.detail}", retry_after_s=problem.retry_after_s)
    fields = {"code": problem.code, "detail": problem.detail, "errors": problem.errors}
    return from_problem(fields, retry_after_s=problem.retry_after_s)
