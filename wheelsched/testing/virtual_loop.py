"""`VirtualLoop`: an asyncio event loop whose time is virtual. Where nobody can run it jumps to the next timer instead of waiting for it.

So `asyncio.sleep`, `wait_for`, `timeout` and `call_later` of the product are simulated too, without a change to it, and a run depends on
nothing but its seed. There are no sockets and no threads: what would run on one runs at once.

Several nodes share a loop. What a node starts carries its number in `OWNER`, a context variable, and so does all that follows from it;
`pause` keeps the callbacks and timers of one node back, as SIGSTOP does to a process, and `resume` lets all of them go at once.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import random
from collections import deque
from collections.abc import Callable
from typing import Any, Final

# Whose callback this is; 0: nobody's.
OWNER: Final[contextvars.ContextVar[int]] = contextvars.ContextVar("owner", default=0)

_US: Final = 1_000_000


class NothingLeft(AssertionError):
    """Everybody waits for something that nobody will do."""


class VirtualLoop(asyncio.BaseEventLoop):
    """`turn_us`: what a turn of the loop takes at most, in virtual microseconds, drawn from `rng`. 0: nothing; then whoever spins does so
    for ever."""

    def __init__(self, rng: random.Random | None = None, *, turn_us: int = 0) -> None:
        super().__init__()
        self._now_us = 0
        self._rng = rng or random.Random(0)
        self._turn_us = turn_us
        self._clock_resolution = 0.5 / _US
        self._ready = self._all_ready = _Ready(self)
        self._selector = _Jumper(self)
        self._held: dict[int, list[asyncio.Handle]] = {}
        self.turn_count = 0
        self.failures: list[BaseException] = []  # what was raised where nobody could hear it
        self.set_exception_handler(_keep)

    def time(self) -> float:
        return self._now_us / _US

    def time_us(self) -> int:
        """The same, exactly."""
        return self._now_us

    # What stands still.

    def pause(self, owner: int) -> None:
        self._held.setdefault(owner, [])

    def resume(self, owner: int) -> None:
        self._all_ready.extend(self._held.pop(owner, ()))

    def is_paused(self, owner: int) -> bool:
        return owner in self._held

    # What the base class asks of an event loop.

    def jump(self, timeout: float | None) -> None:
        """Called once a turn: `timeout` 0 where somebody can run now, else how long it is to the next timer; None where there is none."""
        self.turn_count += 1
        if timeout is None:
            raise NothingLeft("nobody can run and no timer is set")
        if timeout > 0:
            # Rounded up: a timer that is not quite due would be jumped to for ever.
            next_s = self._scheduled[0].when()  # type: ignore[attr-defined]  # its timers, which no public method tells
            self._now_us = max(self._now_us, math.ceil(next_s * _US - 1e-3))
        elif self._turn_us:
            self._now_us += self._rng.randint(0, self._turn_us)

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass  # no other thread

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """At once, on this thread: a simulation has no other."""
        if executor is not None:
            raise RuntimeError("a simulated node has no threads of its own")
        future: asyncio.Future[Any] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class _Ready(deque[asyncio.Handle]):
    """The callbacks that can run, but for those of nodes that stand still."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop
        self._nothing = asyncio.Handle(_nothing, (), loop)

    def popleft(self) -> asyncio.Handle:
        handle = super().popleft()
        held = self._loop._held
        if held:
            owner = handle._context.get(OWNER, 0)  # type: ignore[attr-defined]  # a handle has no other mark of where it came from
            if owner in held:
                held[owner].append(handle)
                return self._nothing
        return handle


class _Jumper:
    """In the place of a selector: no descriptors, and waiting is jumping."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        self._loop.jump(timeout)
        return []


def _nothing() -> None:
    pass


def _keep(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    assert isinstance(loop, VirtualLoop)
    loop.failures.append(error if isinstance(error, BaseException) else RuntimeError(context.get("message", "?")))
