"""Two clocks: the machine's, and one that stands still until it is moved."""

from __future__ import annotations

import asyncio
import heapq
import time
from itertools import count

# CLOCK_BOOTTIME goes on while the machine sleeps, so a lease does not outlive a suspended laptop; where there is none (macOS,
# whose CLOCK_MONOTONIC counts suspend anyway) the monotonic clock serves.
_MONO_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_MS_NS = 1_000_000
# The event loop's timers follow CLOCK_MONOTONIC, which stands still in suspend. Sleeping in slices bounds how late a sleeper
# notices that the machine was away, at one wake-up a second.
_SLICE_NS = 1_000 * _MS_NS


class RealClock:
    """Wall time of the system, monotonic time that counts suspend."""

    def wall_ms(self) -> int:
        return time.time_ns() // _MS_NS

    def mono_ms(self) -> int:
        return time.clock_gettime_ns(_MONO_CLOCK) // _MS_NS

    async def sleep_until(self, mono_ms: int) -> None:
        """Return once `mono_ms()` has reached the instant, about a millisecond late at most on an idle loop; never before it.

        Only monotonic time is looked at: a stepped wall clock neither shortens nor stretches the sleep. Who sleeps towards a wall
        instant compares the two clocks when it wakes.
        """
        until_ns = mono_ms * _MS_NS
        # uvloop rounds a delay to whole milliseconds and may wake before it is over: look again, and sleep the rest.
        while (left_ns := until_ns - time.clock_gettime_ns(_MONO_CLOCK)) > 0:  # noqa: ASYNC110 - time passes, nobody signals it
            await asyncio.sleep(min(left_ns, _SLICE_NS) / 1e9)


class VirtualClock:
    """Stands still until `advance_to` moves it. Wall and monotonic time move together.

    For `wheelsched dev --clock virtual` and tests. One loop, one thread.
    """

    def __init__(self, start_ms: int) -> None:
        assert start_ms >= 0
        self._start_ms = start_ms
        self._now_ms = start_ms
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = count()

    def wall_ms(self) -> int:
        return self._now_ms

    def mono_ms(self) -> int:
        return self._now_ms - self._start_ms

    async def sleep_until(self, mono_ms: int) -> None:
        wall_ms = self._start_ms + mono_ms
        if wall_ms <= self._now_ms:
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (wall_ms, next(self._numbers), woken))
        # A cancelled sleeper's future is done, too: it stays in the heap and is passed over when its turn comes.
        await woken

    def advance_to(self, ms: int) -> None:
        """Move to a wall instant and wake whoever slept until then, by instant and then by who slept first.

        They run when the caller next waits, and all see `ms`; to let each see its own instant, step by `next_wake_ms`.
        An instant that has passed moves nothing: the clock never goes back. O(woken · log sleepers).
        """
        self._now_ms = max(self._now_ms, ms)
        while self._sleepers and self._sleepers[0][0] <= self._now_ms:
            woken = heapq.heappop(self._sleepers)[2]
            if not woken.done():
                woken.set_result(None)

    def advance(self, *, ms: int) -> None:
        """Move by `ms`."""
        self.advance_to(self._now_ms + ms)

    def next_wake_ms(self) -> int | None:
        """The wall instant of the first sleeper; None where nobody sleeps."""
        while self._sleepers and self._sleepers[0][2].done():
            heapq.heappop(self._sleepers)
        return self._sleepers[0][0] if self._sleepers else None

    @property
    def sleeper_count(self) -> int:
        return sum(not woken.done() for _, _, woken in self._sleepers)
