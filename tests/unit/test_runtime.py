"""Clocks, logs and the lag of the loop."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import time
from collections.abc import Iterator

import pytest
import structlog

from wheelsched.runtime.clock import RealClock, VirtualClock
from wheelsched.runtime.lag import LoopLag
from wheelsched.runtime.logs import setup_logs


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_real_clock_never_wakes_early_and_hardly_late() -> None:
    clock = RealClock()
    lateness = []
    for ms in (0, 1, 3, 20, 55):
        until_ms = clock.mono_ms() + ms
        await clock.sleep_until(until_ms)
        lateness.append(clock.mono_ms() - until_ms)
    assert min(lateness) >= 0
    # Generous: the machine is shared. A clock that polled every 100 ms would fail.
    assert sorted(lateness)[2] <= 20


async def test_real_clock_sleep_does_not_look_at_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = RealClock()
    until_ms = clock.mono_ms() + 30
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    await asyncio.wait_for(clock.sleep_until(until_ms), timeout=5)
    assert clock.mono_ms() >= until_ms


def test_real_clock_reads_unix_milliseconds() -> None:
    assert abs(RealClock().wall_ms() - time.time() * 1_000) < 1_000


async def test_virtual_clock_stands_still(clock: VirtualClock) -> None:
    before = clock.wall_ms(), clock.mono_ms()
    await asyncio.sleep(0.002)
    assert (clock.wall_ms(), clock.mono_ms()) == before


async def test_virtual_clock_wakes_sleepers_in_the_order_of_their_instants(clock: VirtualClock) -> None:
    woken: list[str] = []

    async def sleeper(name: str, ms: int) -> None:
        await clock.sleep_until(clock.mono_ms() + ms)
        woken.append(name)

    async with asyncio.TaskGroup() as tasks:
        for name, ms in (("late", 900), ("a", 100), ("b", 100), ("soon", 50), ("now", 0), ("past", -5)):
            tasks.create_task(sleeper(name, ms), name=name)
        await settle()
        assert woken == ["now", "past"]
        assert clock.sleeper_count == 4
        clock.advance(ms=99)
        await settle()
        assert woken[2:] == ["soon"]
        clock.advance(ms=10_000)
        await settle()
        assert woken[3:] == ["a", "b", "late"]


async def test_virtual_clock_can_be_stepped_so_that_each_sees_its_own_instant(clock: VirtualClock) -> None:
    start_ms, seen = clock.wall_ms(), []

    async def sleeper(ms: int) -> None:
        await clock.sleep_until(ms)
        seen.append(clock.wall_ms() - start_ms)

    async with asyncio.TaskGroup() as tasks:
        for ms in (30, 10, 20):
            tasks.create_task(sleeper(ms), name=str(ms))
        await settle()
        while (next_ms := clock.next_wake_ms()) is not None:
            clock.advance_to(next_ms)
            await settle()
    assert seen == [10, 20, 30]


async def test_virtual_clock_moves_wall_and_monotonic_time_together_and_never_back(clock: VirtualClock) -> None:
    wall_ms, mono_ms = clock.wall_ms(), clock.mono_ms()
    clock.advance(ms=1_500)
    clock.advance_to(wall_ms)
    assert (clock.wall_ms() - wall_ms, clock.mono_ms() - mono_ms) == (1_500, 1_500)


async def test_cancelled_sleeper_of_a_virtual_clock_is_forgotten(clock: VirtualClock) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await clock.sleep_until(clock.mono_ms() + 10)
    assert clock.next_wake_ms() is None
    clock.advance(ms=100)


@pytest.mark.blocking_allowed
async def test_loop_lag_sees_a_blocked_loop_at_once_and_later_forgets_it() -> None:
    lag = LoopLag()
    assert lag.lag_ms == 0
    task = asyncio.create_task(lag.run(), name="lag")
    try:
        await asyncio.sleep(0.01)
        time.sleep(0.15)  # noqa: ASYNC251 - the blocked loop is what this is about
        assert lag.lag_ms >= 80, "overdue already, though the monitor has not run yet"
        await asyncio.sleep(0.07)
        assert lag.lag_ms >= 80, "and remembered"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    handlers, level = logging.root.handlers[:], logging.root.level
    yield io.StringIO()
    structlog.reset_defaults()
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


def test_json_logs_are_one_object_a_line(stream: io.StringIO) -> None:
    setup_logs(level="info", format="json", stream=stream)
    log = structlog.get_logger()
    log.debug("not_shown")
    log.info("lease_expired", job_id="job_1", attempt=2, odd=object())
    try:
        raise ValueError("boom")
    except ValueError:
        log.exception("failed")
    logging.getLogger("aiohttp.server").error("from %s", "elsewhere")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["lease_expired", "failed", "from elsewhere"]
    assert (lines[0]["job_id"], lines[0]["attempt"], lines[0]["level"]) == ("job_1", 2, "info")
    assert "ValueError: boom" in lines[1]["exception"]
    assert lines[2]["logger"] == "aiohttp.server"
    assert all(line["timestamp"].endswith("Z") for line in lines)


def test_text_logs_have_event_and_fields_and_no_colour_where_nobody_looks(stream: io.StringIO) -> None:
    setup_logs(level="warning", format="text", stream=stream)
    structlog.get_logger().info("not_shown")
    structlog.get_logger().warning("disk_low", free_bytes=12)
    secret = "".join(("the ", "payload"))
    try:
        raise ValueError("boom")
    except ValueError:
        structlog.get_logger().exception("failed")
    logging.getLogger("asyncio").warning("slow callback")
    text = stream.getvalue()
    assert "disk_low" in text and "free_bytes=12" in text and "slow callback" in text
    assert "\x1b" not in text and "not_shown" not in text
    assert "ValueError: boom" in text
    assert secret not in text, "local variables hold what clients sent"
