"""A clock of a cluster's node: a leap ahead is not believed before others confirm it, a step back is followed at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

from wheelsched.cluster import ClockOffsets
from wheelsched.node.clock_guard import ClockGuard
from wheelsched.runtime.clock import GuardedClock, OffsetClock, VirtualClock
from wheelsched.testing.clock import SteppedClock

START_MS = 1_800_000_000_000
HOUR_MS = 3_600_000


def _told(offsets: ClockOffsets, clock: SteppedClock, peer: int, *, ahead_ms: int) -> None:
    """One quick round with a peer whose wall clock is ahead of this machine's before any step."""
    wall_ms = START_MS + clock.mono_ms() + ahead_ms
    offsets.add(peer, sent_mono_ms=clock.mono_ms(), received_at_ms=wall_ms, answered_at_ms=wall_ms, back_mono_ms=clock.mono_ms())


def test_a_leap_is_not_believed_and_time_goes_on() -> None:
    machine = SteppedClock(START_MS)
    clock = GuardedClock(machine)
    machine.step_wall(ms=HOUR_MS)
    assert clock.wall_ms() == START_MS
    assert clock.doubted_ms == HOUR_MS
    machine.advance(ms=5_000)
    assert clock.wall_ms() == START_MS + 5_000


def test_small_corrections_and_steps_back_are_followed() -> None:
    machine = SteppedClock(START_MS)
    clock = GuardedClock(machine)
    machine.step_wall(ms=200)
    assert clock.wall_ms() == START_MS + 200
    machine.step_wall(ms=-HOUR_MS)
    assert clock.wall_ms() == START_MS + 200 - HOUR_MS
    assert clock.doubted_ms == 0


def test_a_leap_counts_once_most_clocks_confirm_it() -> None:
    machine = SteppedClock(START_MS)
    guard = ClockGuard(GuardedClock(machine), ClockOffsets(3))
    machine.step_wall(ms=HOUR_MS)
    for peer in (2, 3):
        _told(guard.offsets, machine, peer, ahead_ms=0)
    guard.look()
    assert guard.clock.wall_ms() == START_MS, "the others have the old time"
    assert not guard.is_off
    machine.advance(ms=61_000)
    for peer in (2, 3):
        _told(guard.offsets, machine, peer, ahead_ms=HOUR_MS)
    guard.look()
    assert guard.clock.wall_ms() == START_MS + 61_000 + HOUR_MS
    assert not guard.is_off


def test_a_clock_that_most_others_contradict_is_off() -> None:
    machine = SteppedClock(START_MS)
    guard = ClockGuard(GuardedClock(machine), ClockOffsets(3))
    for peer in (2, 3):
        _told(guard.offsets, machine, peer, ahead_ms=0)
    guard.look()
    assert not guard.is_off and guard.reasons() == ()
    machine.step_wall(ms=-2_000)
    guard.look()
    assert guard.is_off and "clock" in guard.reasons()[0]
    machine.step_wall(ms=2_000)
    guard.clock.believe()
    guard.look()
    assert not guard.is_off


def test_the_offset_of_a_file_is_added_to_the_wall_clock_alone(tmp_path: Path) -> None:
    file = tmp_path / "offset"
    clock = OffsetClock(file)
    before_ms = clock.wall_ms()
    file.write_text(str(HOUR_MS))
    clock._look_at_ms = 0
    assert 0 <= clock.wall_ms() - before_ms - HOUR_MS < 10_000
    file.write_text("nonsense")
    clock._look_at_ms = 0
    assert clock.wall_ms() - before_ms >= HOUR_MS


def test_a_virtual_clock_can_be_guarded_too() -> None:
    assert GuardedClock(VirtualClock(START_MS)).wall_ms() == START_MS


async def test_a_node_that_starts_with_its_clock_ahead_takes_the_time_of_the_others() -> None:
    machine = SteppedClock(START_MS + HOUR_MS)
    guard = ClockGuard(GuardedClock(machine), ClockOffsets(3))
    for peer in (2, 3):
        _told(guard.offsets, machine, peer, ahead_ms=0)
    await guard.settle()
    assert guard.clock.wall_ms() == START_MS
    guard.look()
    assert not guard.is_off
    assert guard.clock.wall_ms() == START_MS, "its own is still not believed"


async def test_a_node_that_starts_alone_does_not_wait_for_ever() -> None:
    machine = SteppedClock(START_MS)
    guard = ClockGuard(GuardedClock(machine), ClockOffsets(3))
    waiting = asyncio.ensure_future(guard.settle())
    while not waiting.done():
        await asyncio.sleep(0)
        machine.advance(ms=500)
    assert START_MS < guard.clock.wall_ms() < START_MS + 60_000


async def test_with_one_other_the_earlier_clock_counts() -> None:
    machine = SteppedClock(START_MS + HOUR_MS)
    guard = ClockGuard(GuardedClock(machine), ClockOffsets(3))
    _told(guard.offsets, machine, 2, ahead_ms=0)
    waiting = asyncio.ensure_future(guard.settle())
    while not waiting.done():
        await asyncio.sleep(0)
        machine.advance(ms=100)
    assert guard.clock.wall_ms() < START_MS + 60_000
