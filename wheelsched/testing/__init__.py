"""A node to test against: whole, in memory, on a clock that the test moves. For users' own tests and for ours.

`open_test_node()` gives a real node, the one that `wheelsched dev` runs, without sockets and disk: its store is `MemoryStore`, its time a
clock that stands still until it is moved, its chance a seeded `random.Random`. So a year of retries takes milliseconds, and the same
seed gives the same run. `crash_and_restart()` loses what was not synced, as a power cut does; `graceful_restart()` does not.

    import asyncio
    from wheelsched.testing import open_test_node

    async def main() -> None:
        async with open_test_node(seed=1) as node:
            mail = await node.create(queue="mail", delay_s=900, payload={"to": "ada"})
            assert await node.claim("mail") == []                   # not before its time
            await node.advance(s=900)
            (job,) = await node.claim("mail")
            assert job.state.job_id == mail.job_id and job.state.attempt == 1
            await node.crash_and_restart()                          # the lease is in the log: it is still ours
            await node.complete(job)
            assert await node.status(mail) == "SUCCEEDED"

    asyncio.run(main())

With pytest the fixtures come by themselves, through the `pytest11` entry point `wheelsched` (`plugin.py`): `wheelsched_node` is such a
node, `wheelsched_client` an `AsyncClient` of one that answers HTTP on a free loopback port, for code under test that takes a URL:

    async def test_a_reminder_goes_out_in_time(wheelsched_node, wheelsched_client):
        await remind(wheelsched_client, "ada", in_s=3600)           # your code
        await wheelsched_node.advance(s=3600)
        (job,) = await wheelsched_client.claim("mail")
        assert job.payload == {"to": "ada"}

Any client in any language can be used with `open_test_node(serve=True)` and its `url`; `POST /v1/clock:advance` moves the clock then.

`node.py` is the first file to read. `clock.py` steps the wall clock apart from the monotonic one; `checks.py` recounts what the rows say;
`simulate_node.py` runs random days from one seed against an obvious model (`python -m wheelsched.testing.simulate_node --seed 7`),
`simulate_schedules.py` does the same with recurring schedules; `schedule_scenarios.py` plays the vectors of missed occurrences, and
`cron_year.py` lives through a year in a dozen zones. `simulate.py` puts a whole cluster under faults, in the virtual time of
`virtual_loop.py`; `mutants.py` plants deliberate bugs and tells what catches them.
Nothing here needs pytest except the plugin, and nothing of the product imports this package.
"""

from wheelsched.testing.clock import SteppedClock
from wheelsched.testing.node import START_MS, TestNode, open_test_node

__all__ = ["START_MS", "SteppedClock", "TestNode", "open_test_node"]
