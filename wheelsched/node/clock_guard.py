"""Whether this node's clock may be trusted, by what the clocks of the others say (DESIGN 7)."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from wheelsched.cluster import ClockOffsets
from wheelsched.runtime.clock import GuardedClock

log = structlog.get_logger()


@dataclass(slots=True)
class ClockGuard:
    """`is_off`: this clock is more than 250 ms from more than half of the cluster's; then others should lead."""

    clock: GuardedClock
    offsets: ClockOffsets
    is_off: bool = False

    def look(self) -> None:
        """To be called about twice a second."""
        clock = self.clock
        mono_ms = clock.mono_ms()
        if doubted_ms := clock.doubted_ms:
            offset_ms = self.offsets.majority_offset_ms(wall_ms=clock.wall_ms() + doubted_ms, mono_ms=mono_ms)
            if offset_ms is not None and abs(offset_ms) <= clock.LEAP_MS:
                log.info("clock_leap_confirmed", ms=doubted_ms)
                clock.believe()
        is_off = self.offsets.is_off(wall_ms=clock.wall_ms(), mono_ms=mono_ms)
        if is_off != self.is_off:
            self.is_off = is_off
            offset_ms = self.offsets.majority_offset_ms(wall_ms=clock.wall_ms(), mono_ms=mono_ms)
            event = "clock_off" if is_off else "clock_agrees"
            log.warning(event, majority_is_ahead_ms=offset_ms, remedy="let NTP set this machine's clock")

    def reasons(self) -> tuple[str, ...]:
        """For `/readyz`."""
        if not self.is_off:
            return ()
        return ("the clock of this machine is more than 250 ms from those of most nodes; let NTP set it",)
