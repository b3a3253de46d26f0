"""Whether this node's clock may be trusted, by what the clocks of the others say (DESIGN 7)."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from wheelsched.cluster import ClockOffsets
from wheelsched.runtime.clock import GuardedClock

# Pings go out as soon as a peer is connected; a node that is down is not waited for.
SETTLE_MS = 10_000
# Those that are up are heard of within a ping or two.
HEARD_MS = 2_000
LOOK_MS = 20

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

    async def settle(self) -> None:
        """At the start of a node, before it may lead: hear what time the others have. A machine that comes up with its clock ahead would
        fire what is not due the moment it is elected; where most others contradict it, theirs is the time. Without most of the others
        nobody is elected, so that not waiting for ever does no harm."""
        clock = self.clock
        started_ms = clock.mono_ms()
        while (waited_ms := clock.mono_ms() - started_ms) < SETTLE_MS:
            offsets = self.offsets.offsets_ms(wall_ms=clock.wall_ms(), mono_ms=clock.mono_ms())
            if len(offsets) == self.offsets.node_count - 1 or (offsets and waited_ms >= HEARD_MS):
                self._take_time_of(list(offsets.values()))
                return
            await clock.sleep_until(clock.mono_ms() + LOOK_MS)
        log.warning("clocks_unknown", waited_ms=SETTLE_MS, reason="no other node was reached")

    def _take_time_of(self, offsets: list[int]) -> None:
        # Of two clocks none can be told to be wrong: then the later start is the safer one, for nothing fires early by it.
        known = sorted([0, *offsets])
        offset_ms = known[0] if len(known) == 2 else known[(len(known) - 1) // 2]
        if offset_ms < -self.clock.LEAP_MS:
            log.warning("clock_ahead", by_ms=-offset_ms, remedy="let NTP set this machine's clock; the other nodes' time is used")
            self.clock.follow(offset_ms)

    def reasons(self) -> tuple[str, ...]:
        """For `/readyz`."""
        if not self.is_off:
            return ()
        return ("the clock of this machine is more than 250 ms from those of most nodes; let NTP set it",)
