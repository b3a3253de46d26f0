"""`wheelsched.testing`, which users' tests rest on: the example of its page, its fixtures, its clock."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

import wheelsched.testing
from wheelsched.client import AsyncClient
from wheelsched.core.errors import NotFound, StaleLease
from wheelsched.testing import START_MS, SteppedClock, TestNode, open_test_node
from wheelsched.testing.plugin import wheelsched_client, wheelsched_node

__all__ = ["wheelsched_client", "wheelsched_node"]  # fixtures, by the names the plugin gives them

RUN = [sys.executable, "-c"]


def example() -> str:
    """The first indented block of the package's page."""
    page = wheelsched.testing.__doc__ or ""
    block = page[page.index("    import asyncio") : page.index("With pytest")]
    return textwrap.dedent(block)


def test_the_example_of_the_page_runs_where_pytest_is_not_installed() -> None:
    without = "import sys; sys.modules['pytest'] = sys.modules['pytest_asyncio'] = None\n"
    done = subprocess.run([*RUN, without + example()], env={"PYTHONPATH": "."}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


async def test_the_fixtures_are_a_node_and_a_client_of_it(wheelsched_node: TestNode, wheelsched_client: AsyncClient) -> None:
    job = await wheelsched_client.create("mail", {"to": "ada"}, delay_s=3_600)
    assert not await wheelsched_client.claim("mail")
    await wheelsched_node.advance(s=3_600)
    (claimed,) = await wheelsched_client.claim("mail")
    assert claimed.job_id == job.job_id and claimed.payload == {"to": "ada"}
    await wheelsched_node.crash_and_restart()
    await wheelsched_client.complete(claimed.lease_token)
    assert (await wheelsched_client.get(job.job_id)).status == "SUCCEEDED"


async def test_the_same_seed_makes_the_same_ids_and_retries() -> None:
    async def one_run(seed: int) -> list[object]:
        async with open_test_node(seed=seed) as node:
            job = await node.create()
            state = await node.complete((await node.claim())[0], "retryable_failure")
            return [job.job_id, state.next_attempt_at_ms]

    assert await one_run(1) == await one_run(1) != await one_run(2)


async def test_refusals_are_raised_as_the_errors_a_client_would_see() -> None:
    async with open_test_node() as node:
        job = await node.create()
        (claimed,) = await node.claim()
        await node.complete(claimed)
        with pytest.raises(StaleLease):
            await node.release(claimed)
        with pytest.raises(NotFound):
            await node.get(bytes(16))
        await node.advance(s=31 * 86_400)
        with pytest.raises(NotFound):
            await node.get(job)


async def test_calls_to_a_node_that_has_gone_are_refused_and_do_not_hang() -> None:
    async with open_test_node() as node:
        node.node.stop()
        with pytest.raises(Exception, match=r"shutting down|stopped"):
            await node.create()
        await node.graceful_restart()
        await node.create()


def test_a_stepped_clock_keeps_monotonic_time() -> None:
    clock = SteppedClock(START_MS)
    clock.advance(ms=1_000)
    clock.step_wall(ms=-3_600_000)
    assert (clock.wall_ms(), clock.mono_ms()) == (START_MS - 3_599_000, 1_000)
    clock.advance(ms=500)
    assert (clock.wall_ms(), clock.mono_ms()) == (START_MS - 3_598_500, 1_500)
    clock.advance_to(START_MS - 3_598_000)
    assert clock.mono_ms() == 2_000
    clock.advance_to(0)
    assert clock.mono_ms() == 2_000, "it never goes back by itself"


async def test_a_stepped_clock_wakes_sleepers_by_monotonic_time() -> None:
    import asyncio

    clock = SteppedClock(START_MS)
    sleeper = asyncio.ensure_future(clock.sleep_until(1_000))
    await asyncio.sleep(0)
    clock.step_wall(ms=3_600_000)
    assert clock.next_wake_ms() == START_MS + 3_601_000
    await asyncio.sleep(0)
    assert not sleeper.done()
    clock.advance(ms=1_000)
    await sleeper
