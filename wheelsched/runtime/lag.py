"""How late the event loop is: the one number that says whether a node can keep its times."""

from __future__ import annotations

import asyncio
from collections import deque

INTERVAL_S = 0.05
# 20 samples of 50 ms: "recent" is the last second, as long as admission should remember a hiccup.
_SAMPLES = 20


class LoopLag:
    """Measures by asking to be woken every 50 ms and looking how late that was. Its owner runs `run()` as a task."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque([0.0] * _SAMPLES, maxlen=_SAMPLES)
        self._due_s: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self) -> None:
        """Measure until cancelled."""
        self._loop = loop = asyncio.get_running_loop()
        try:
            while True:
                self._due_s = loop.time() + INTERVAL_S
                await asyncio.sleep(INTERVAL_S)
                self._recent.append(max(0.0, loop.time() - self._due_s))
        finally:
            self._due_s = None

    @property
    def lag_ms(self) -> float:
        """The largest lag of the last second, counting a sample that is overdue right now: whoever asks first after a long block
        must not be told that all is well."""
        overdue_s = 0.0
        if self._due_s is not None and self._loop is not None:
            overdue_s = self._loop.time() - self._due_s
        return max(overdue_s, *self._recent) * 1_000
