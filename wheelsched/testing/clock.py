"""A virtual clock whose wall time can be set, as an operator or NTP sets it, while monotonic time goes on undisturbed."""

from __future__ import annotations

from wheelsched.runtime.clock import VirtualClock


class SteppedClock(VirtualClock):
    """Stands still until `advance_to` moves both times or `step_wall` sets the wall one."""

    def __init__(self, start_ms: int) -> None:
        super().__init__(start_ms)
        self._stepped_ms = 0  # wall time minus what it would be without steps

    def wall_ms(self) -> int:
        return super().wall_ms() + self._stepped_ms

    def step_wall(self, *, ms: int) -> None:
        """Set the wall clock forward or (below 0) back; monotonic time stands."""
        self._stepped_ms += ms

    def advance_to(self, ms: int) -> None:
        """Move to a wall instant as it reads now; an instant that has passed moves nothing."""
        super().advance_to(ms - self._stepped_ms)

    def advance(self, *, ms: int) -> None:
        self.advance_to(self.wall_ms() + ms)

    def next_wake_ms(self) -> int | None:
        wake_ms = super().next_wake_ms()
        return None if wake_ms is None else wake_ms + self._stepped_ms
