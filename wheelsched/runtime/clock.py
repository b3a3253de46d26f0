"""Clocks: the machine's; one that does not believe a leap until others confirm it; and one that stands still until it is moved."""

from __future__ import annotations

import asyncio
import heapq
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

from wheelsched.core.clock import Clock

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


class OffsetClock(RealClock):
    """The machine's clock with its wall time moved by what a file says (whole milliseconds), looked at ten times a second: for tests of
    what a node does when its clock is stepped, without stepping that of the machine."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset_ms = 0
        self._look_at_ms = 0

    def wall_ms(self) -> int:
        mono_ms = self.mono_ms()
        if mono_ms >= self._look_at_ms:
            self._look_at_ms = mono_ms + 100
            with suppress(OSError, ValueError):  # no file, or one that is being written: as before
                self._offset_ms = int(self._file.read_text())
        return super().wall_ms() + self._offset_ms


class GuardedClock:
    """Wall time that leaps ahead of monotonic time is not believed: it goes on by the monotonic clock until `believe` is called.

    For a node of several: a job fired an hour early cannot be taken back, and the other nodes know better. A step back is followed at
    once, since nothing fires early by it; so is what NTP slews.
    """

    LEAP_MS = 250

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ahead_ms = clock.wall_ms() - clock.mono_ms()

    def wall_ms(self) -> int:
        mono_ms = self._clock.mono_ms()
        ahead_ms = self._clock.wall_ms() - mono_ms
        if ahead_ms - self._ahead_ms <= self.LEAP_MS:
            self._ahead_ms = ahead_ms
        return mono_ms + self._ahead_ms

    def mono_ms(self) -> int:
        return self._clock.mono_ms()

    async def sleep_until(self, mono_ms: int) -> None:
        await self._clock.sleep_until(mono_ms)

    @property
    def doubted_ms(self) -> int:
        """How far the machine's wall time is ahead of what is believed; 0 while it is believed."""
        doubted_ms = self._clock.wall_ms() - self.wall_ms()
        return doubted_ms if doubted_ms > self.LEAP_MS else 0

    def machine_wall_ms(self) -> int:
        """What the machine's wall clock shows, believed or not."""
        return self._clock.wall_ms()

    def believe(self) -> None:
        """The others confirm it: the machine's wall time counts from now on."""
        self._ahead_ms = self._clock.wall_ms() - self._clock.mono_ms()

    def follow(self, ahead_ms: int) -> None:
        """Before anything was fired by this clock: take the time from others, who say that theirs is `ahead_ms` (below 0) of it."""
        assert ahead_ms < 0
        self._ahead_ms += ahead_ms


def machine_wall_ms(clock: Clock) -> int:
    """What to tell other nodes of the time: the machine's, before any doubt. Told what each believes, nodes whose machines were all set
    forward, as NTP does after a start with a wrong clock, would wait for each other to believe it first."""
    return clock.machine_wall_ms() if isinstance(clock, GuardedClock) else clock.wall_ms()


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
