"""Time and chance as protocols: whoever needs them gets them through its constructor, from `node/`."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Wall time decides what is due and enters commands; monotonic time measures leases and waits."""

    def wall_ms(self) -> int:
        """UTC Unix milliseconds; may step in either direction."""
        ...

    def mono_ms(self) -> int:
        """Milliseconds since an arbitrary start; never goes back, counts suspend where the system can."""
        ...

    async def sleep_until(self, mono_ms: int) -> None:
        """Return when `mono_ms()` has reached the given instant; at once if it has."""
        ...


class Rng(Protocol):
    """Chance. `random.Random` fits."""

    def getrandbits(self, k: int, /) -> int: ...

    def random(self) -> float: ...
