"""Bringing the ends of attempts home: in batches, repeated until the server has answered or the lease is surely over."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Protocol

from wheelsched.client import Backoff, Completed, Completion
from wheelsched.client.transport import Repeat, is_repeatable
from wheelsched.core.errors import NotFound, StaleLease, WheelschedError
from wheelsched.worker.outcomes import reduced

BATCH_MAX: Final = 100
LINGER_S: Final = 0.005
# A batch answers with its slowest group; others are not to wait for one without a leader.
BATCHES_IN_FLIGHT_MAX: Final = 4

Answer = Completed | WheelschedError
Send = Callable[[Sequence[Completion]], Awaitable[Sequence[Answer]]]


class ReportOwner(Protocol):
    def is_held(self, token: str) -> bool:
        """Whether the lease may still be ours."""
        ...

    def on_reported(self, completion: Completion, answer: Answer | None) -> None:
        """The last word on a report; None: the lease was over before the server had answered."""
        ...


@dataclass(slots=True)
class _Report:
    completion: Completion
    tries: int = 0
    alone: bool = False
    reduced: bool = False


class Reporter:
    """`submit` never waits; `pending` says how many reports have had no last word yet, which bounds what the worker claims."""

    def __init__(self, send: Send, owner: ReportOwner, *, backoff: Backoff | None = None) -> None:
        self._send_batch = send
        self._owner = owner
        self._backoff = backoff or Backoff(initial_s=0.05, cap_s=2.0)
        self._rng = Random()
        self._ready: deque[_Report] = deque()
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self._room = asyncio.Semaphore(BATCHES_IN_FLIGHT_MAX)
        self.pending = 0

    def submit(self, completion: Completion) -> None:
        self.pending += 1
        self._settled.clear()
        self._put(_Report(completion))

    async def wait_settled(self) -> None:
        """Return when every report has had its last word; bounded by the leases, of which each report has one."""
        await self._settled.wait()

    async def run(self) -> None:
        """Send until cancelled."""
        async with asyncio.TaskGroup() as sending:
            while True:
                await self._wake.wait()
                if len(self._ready) < BATCH_MAX:
                    await asyncio.sleep(LINGER_S)
                await self._room.acquire()
                sending.create_task(self._send(self._take()), name="report")

    def _put(self, report: _Report) -> None:
        self._ready.append(report)
        self._wake.set()

    def _take(self) -> list[_Report]:
        """The next batch; a report that spoilt one before goes alone."""
        batch = [self._ready.popleft()]
        while not batch[0].alone and self._ready and len(batch) < BATCH_MAX and not self._ready[0].alone:
            batch.append(self._ready.popleft())
        if not self._ready:
            self._wake.clear()
        return batch

    async def _send(self, batch: list[_Report]) -> None:
        try:
            held = []
            for report in batch:
                if self._owner.is_held(report.completion.token):
                    held.append(report)
                else:
                    self._end(report, None)
            if held:
                answers = await self._send_batch([report.completion for report in held])
                for report, answer in zip(held, answers, strict=True):
                    self._on_answer(report, answer, of_batch=len(held) > 1 and all(other is answer for other in answers))
        finally:
            self._room.release()

    def _on_answer(self, report: _Report, answer: Answer, *, of_batch: bool) -> None:
        report.tries += 1
        if not isinstance(answer, WheelschedError) or isinstance(answer, StaleLease | NotFound):
            self._end(report, answer)
        elif is_repeatable(answer, Repeat.ALWAYS) or answer.status >= 500:
            wait_s = self._backoff.wait_s(report.tries, self._rng, retry_after_s=answer.retry_after_s)
            asyncio.get_running_loop().call_later(wait_s, self._put, report)
        elif of_batch:
            # One of them made the whole request unacceptable; alone they show which.
            report.alone = True
            self._put(report)
        elif not report.reduced:
            # 413 and the like: what the server will never take. The attempt is to end, and to say why.
            report.completion = reduced(report.completion, f"the server refused the outcome: {answer.detail}")
            report.alone = report.reduced = True
            self._put(report)
        else:
            self._end(report, answer)

    def _end(self, report: _Report, answer: Answer | None) -> None:
        self.pending -= 1
        assert self.pending >= 0
        if not self.pending:
            self._settled.set()
        self._owner.on_reported(report.completion, answer)
