"""The forecast: what will be due in each minute to come, from waiting jobs and from schedules."""

from __future__ import annotations

from datetime import UTC, datetime

from wheelsched.client import AsyncClient
from wheelsched.testing import open_test_node

START_MS = int(datetime(2026, 3, 1, 8, 0, tzinfo=UTC).timestamp() * 1000)


async def test_waiting_jobs_and_runs_of_schedules_are_counted_by_minute_and_queue() -> None:
    async with open_test_node(start_ms=START_MS, serve=True) as node, AsyncClient(node.url) as client:
        for _ in range(3):
            await node.create("mail", delay_s=90)
        await client.put_schedule("every-five", {"cron": "*/5 * * * *", "job_template": {"queue": "reports"}})
        await client.put_schedule("each-second", {"every_s": 1, "job_template": {"queue": "beats"}})
        found = await client.forecast(from_at=datetime(2026, 3, 1, 8, 0, tzinfo=UTC), to_at=datetime(2026, 3, 1, 9, 0, tzinfo=UTC))
        minutes = {minute.at.minute: {queue.queue: queue.jobs for queue in minute.queues} for minute in found.minutes}
        assert minutes[0] == {"beats": 59}
        assert minutes[1] == {"beats": 60, "mail": 3}
        assert minutes[5] == {"beats": 60, "reports": 1}
        assert sum(minute.jobs for minute in found.minutes) == 3_599 + 3 + 11


async def test_the_forecast_is_what_then_comes_due() -> None:
    async with open_test_node(start_ms=START_MS, serve=True) as node, AsyncClient(node.url) as client:
        for number in range(20):
            await client.put_schedule(
                f"s{number}", {"cron": f"{number % 7} 9-11 * * *", "time_zone": "Europe/Berlin", "job_template": {"queue": "q"}}
            )
        found = await client.forecast()
        await node.advance(s=86_399)
        view = await client.queue("q")
        due = sum(view.depth["QUEUED"].values())
        assert due == sum(minute.jobs for minute in found.minutes) == 57


async def test_a_crowd_is_told_to_who_joins_it() -> None:
    few_groups = {"cluster": {"group_count": 1}}
    async with open_test_node(start_ms=START_MS, serve=True, settings=few_groups) as node, AsyncClient(node.url) as client:
        for part in range(3):
            await node.create_many([{"queue": "q", "run_at_ms": START_MS + 3_600_000 + part * 5_000 + number} for number in range(3_500)])
        calm = await client.put_schedule("calm", {"cron": "30 9 * * *", "job_template": {"queue": "q"}})
        crowded = await client.put_schedule("crowded", {"cron": "0 9 * * *", "job_template": {"queue": "q"}})
        assert not any("jobs are due" in warning for warning in calm["warnings"])
        assert any("jobs are due" in warning for warning in crowded["warnings"])
