"""Sleep until an instant or a wake-up, whichever is first: the wait of every loop here."""

from __future__ import annotations

import asyncio

from wheelsched.core.clock import Clock

# Bounds a wait on a clock that may be stepped or stand still: whoever waits looks again this often.
_LOOK_AGAIN_S = 1.0


class Waking:
    """One waiter. A wake-up before the wait is kept, so none is lost."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._event = asyncio.Event()

    def wake(self) -> None:
        self._event.set()

    async def wait_until(self, mono_ms: int) -> None:
        """Return at `mono_ms`, at a wake-up, or after a second at most."""
        if not self._event.is_set():
            delay_s = min((mono_ms - self._clock.mono_ms()) / 1000, _LOOK_AGAIN_S)
            if delay_s > 0:
                # A bare call_later is a third of the cost of wait_for, and these loops turn hundreds of times a second.
                handle = asyncio.get_running_loop().call_later(delay_s, self._event.set)
                try:
                    await self._event.wait()
                finally:
                    handle.cancel()
            else:
                await asyncio.sleep(0)
        self._event.clear()

    async def breathe(self) -> None:
        """Let sockets that filled up while the process stood still be read first."""
        await asyncio.sleep(_LOOK_AGAIN_S / 4)
