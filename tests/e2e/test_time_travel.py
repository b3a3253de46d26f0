"""A user's test of a year in seconds: a node on a virtual clock, another process, plain HTTP, nothing but the standard library."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from conftest import MakeNode, size
from http_calls import Http

from wheelsched.testing.process import NodeProcess

START: Final = datetime(2026, 1, 1, tzinfo=UTC)
YEAR: Final = timedelta(days=365)
MS: Final = timedelta(milliseconds=1)
JOBS = size("E2E_YEAR_JOBS", 2_000)
VIRTUAL: Final = ("--clock", "virtual", "--clock-start", "2026-01-01T00:00:00Z")


@pytest.fixture
def node(make_node: MakeNode) -> NodeProcess:
    node = make_node(arguments=VIRTUAL)
    node.start()
    return node


@pytest.fixture
def http(node: NodeProcess) -> Iterator[Http]:
    with Http(node.url) as http:
        yield http


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


def now(http: Http) -> datetime:
    return at(http.get("/v1/clock")["now"])


def advance_to(http: Http, instant: datetime) -> None:
    assert at(http.post("/v1/clock:advance", {"to": instant.isoformat()})["now"]) == instant


def advance(http: Http, **step: float) -> None:
    advance_to(http, now(http) + timedelta(**step))


def statuses(http: Http, queue: str) -> dict[str, int]:
    depth = http.get(f"/v1/queues/{queue}")["depth"]
    return {status: sum(row.values()) for status, row in depth.items() if any(row.values())}


def create_over_a_year(http: Http, rng: random.Random, count: int, queue: str) -> list[Any]:
    """Jobs at random milliseconds of the year, a fifth of them flexible; as created."""
    made: list[Any] = []
    while len(made) < count:
        jobs: list[dict[str, Any]] = []
        for number in range(len(made), min(len(made) + 500, count)):
            run_at = START + timedelta(milliseconds=rng.randrange(1, int(YEAR.total_seconds()) * 1000))
            job: dict[str, Any] = {"queue": queue, "run_at": run_at.isoformat(), "payload": number}
            if rng.random() < 0.2:
                job["timing"] = {"class": "flexible", "window_s": 3600}
            jobs.append(job)
        made += [result["job"] for result in http.post("/v1/jobs:batch", {"jobs": jobs})["results"]]
    return made


@pytest.mark.timeout(300)
def test_every_job_of_a_year_fires_at_its_own_instant(http: Http) -> None:
    """In steps of random length: after each, exactly the jobs due by then are there to claim; those whose instant a step ends on
    start at that instant, and were not there one millisecond before."""
    rng = random.Random(3)
    http.call("PUT", "/v1/queues/year", {"retention_s": YEAR.total_seconds() * 2})
    jobs = create_over_a_year(http, rng, 300, "year")
    assert now(http) == START
    waiting = {job["job_id"]: at(job["fire_at"]) for job in jobs}
    while waiting:
        due = sorted(waiting.values())[: rng.choice((1, 1, 1, 40))][-1]
        advance_to(http, due - MS)
        before = {job["job_id"]: job for job in claim_all(http, "year")}
        assert before.keys() == {job_id for job_id, fire_at in waiting.items() if fire_at < due}
        advance_to(http, due)
        exact = {job["job_id"]: job for job in claim_all(http, "year")}
        assert exact.keys() == {job_id for job_id, fire_at in waiting.items() if fire_at == due}
        for job_id, job in exact.items():
            (attempt,) = http.get(f"/v1/jobs/{job_id}/attempts")["attempts"]
            assert at(attempt["started_at"]) == at(job["fire_at"]) == due
        for job_id, job in (before | exact).items():
            http.complete(job)
            del waiting[job_id]
    assert statuses(http, "year") == {"SUCCEEDED": 300}


def claim_all(http: Http, queue: str) -> list[Any]:
    claimed: list[Any] = []
    while jobs := http.claim(queue, max=100, lease_s=43_200):
        claimed += jobs
    return claimed


@pytest.mark.timeout(300)
def test_a_year_in_one_go(http: Http) -> None:
    """All of it in one call: everything became due, each at its own instant by its own account, and is handed out in that order."""
    jobs = create_over_a_year(http, random.Random(4), JOBS, "year")
    began = time.monotonic()
    advance_to(http, START + YEAR + timedelta(hours=1))
    took_s = time.monotonic() - began
    print(f"a year with {JOBS:,} jobs: {took_s:.2f} s")
    assert statuses(http, "year") == {"QUEUED": JOBS}
    precise = sorted((job["fire_at"] for job in jobs if job["timing"]["class"] == "precise"), key=at)
    assert [job["fire_at"] for job in claim_all(http, "year")[: len(precise)]] == precise
    for job in jobs[:20]:
        (created, fired, *_) = http.get(f"/v1/jobs/{job['job_id']}/events")["events"]
        assert (created["to"], fired["to"], at(fired["at"])) == ("SCHEDULED", "QUEUED", at(job["fire_at"]))
    assert took_s < 120


def test_leases_timeouts_and_backoff_end_at_their_instants_within_one_advance(http: Http) -> None:
    """One call moves the clock by a day over the end of a lease, the end of an attempt that takes too long, and two backoffs."""
    retry = {"max_attempts": 5, "initial_backoff_s": 30, "max_backoff_s": 40}
    lost = http.create(queue="lost", retry=retry)["job_id"]
    slow = http.create(queue="slow", retry=retry, timeout_s=5)["job_id"]
    failed = http.create(queue="failed", retry=retry)["job_id"]
    http.claim("lost", lease_s=60)
    http.claim("slow", lease_s=60)
    (job,) = http.claim("failed")
    answer = http.complete(job, "retryable_failure", error="no")
    assert timedelta(0) <= at(answer["next_attempt_at"]) - START <= timedelta(seconds=30)
    advance(http, seconds=4.999)
    assert [http.get(f"/v1/jobs/{job_id}")["status"] for job_id in (lost, slow)] == ["RUNNING", "RUNNING"]
    advance(http, days=1)
    for job_id, outcome, ends_s in ((lost, "lease_expired", 60), (slow, "timed_out", 5)):
        (attempt,) = http.get(f"/v1/jobs/{job_id}/attempts")["attempts"]
        ended_at = START + timedelta(seconds=ends_s)
        assert (attempt["outcome"], at(attempt["ended_at"])) == (outcome, ended_at)
        # Not recorded when it became due, but bounded: the job is there, and its backoff has been over for long.
        assert http.get(f"/v1/jobs/{job_id}")["status"] == "QUEUED"
    assert http.get(f"/v1/jobs/{failed}")["status"] == "QUEUED"


def test_a_retry_is_due_at_the_millisecond_it_says(http: Http) -> None:
    """Each backoff within min(max, initial x 2^(n-1)); RETRYING until one millisecond before `next_attempt_at`, claimable at it."""
    job_id = http.create(retry={"max_attempts": 6, "initial_backoff_s": 10, "max_backoff_s": 60})["job_id"]
    for attempt, bound_s in enumerate((10, 20, 40, 60, 60), start=1):
        (job,) = http.claim()
        assert job["attempt"] == attempt
        failed_at = now(http)
        due = at(http.complete(job, "retryable_failure")["next_attempt_at"])
        assert timedelta(0) <= due - failed_at <= timedelta(seconds=bound_s)
        if due > failed_at:
            advance_to(http, due - MS)
            assert http.claim() == []
            assert http.get(f"/v1/jobs/{job_id}")["status"] == "RETRYING"
            advance_to(http, due)
    (job,) = http.claim()
    assert http.complete(job, "retryable_failure")["status"] == "DEAD"


def test_heartbeats_move_the_end_of_a_lease(http: Http) -> None:
    job_id = http.create()["job_id"]
    (job,) = http.claim(lease_s=30)
    for _ in range(10):
        advance(http, seconds=29)
        http.post(f"/v1/attempts/{job['lease_token']}:heartbeat")
    advance(http, seconds=29.999)
    assert http.get(f"/v1/jobs/{job_id}")["status"] == "RUNNING"
    advance(http, seconds=0.001)
    assert http.get(f"/v1/jobs/{job_id}")["status"] == "RETRYING"
    (attempt,) = http.get(f"/v1/jobs/{job_id}/attempts")["attempts"]
    assert at(attempt["ended_at"]) == START + timedelta(seconds=320)


def test_deadlines_and_retention_follow_the_clock(http: Http) -> None:
    """A job not started in time is SKIPPED at that time; finished ones go when their retention is over, and no others."""
    http.call("PUT", "/v1/queues/short", {"retention_s": 3600})
    skipped = http.create(queue="short", delay_s=100, start_deadline_s=10)["job_id"]
    done = http.create(queue="short")["job_id"]
    kept = http.create(queue="short", delay_s=1_000_000)["job_id"]
    (job,) = http.claim("short")
    http.complete(job)
    advance(http, seconds=200)
    record = http.get(f"/v1/jobs/{skipped}")
    assert record["status"] == "SKIPPED"
    assert at(record["finished_at"]) - START <= timedelta(seconds=110, milliseconds=2)
    advance(http, seconds=3_300)
    assert http.get(f"/v1/jobs/{done}")["status"] == "SUCCEEDED"
    advance(http, seconds=300)
    assert [http.call("GET", f"/v1/jobs/{job_id}").status for job_id in (done, skipped, kept)] == [404, 404, 200]
    assert statuses(http, "short") == {"SCHEDULED": 1}


@pytest.mark.parametrize("end", ["SIGTERM", "SIGKILL"])
def test_the_clock_goes_on_after_a_restart(end: str, node: NodeProcess) -> None:
    """From its last instant, with what waits; and stands still meanwhile."""
    with Http(node.url) as http:
        job_id = http.create(delay_s=86_400 * 200)["job_id"]
        (fire_at,) = {http.get(f"/v1/jobs/{job_id}")["fire_at"]}
        advance(http, days=199)
    if end == "SIGTERM":
        assert node.terminate()[0] == 0
    else:
        node.kill()
    node.start()
    with Http(node.url) as http:
        assert now(http) == START + timedelta(days=199)
        assert http.claim() == []
        advance_to(http, at(fire_at) - MS)
        assert http.claim() == []
        advance_to(http, at(fire_at))
        assert [job["job_id"] for job in http.claim()] == [job_id]


def test_going_back_is_refused(http: Http) -> None:
    advance(http, days=1)
    answer = http.call("POST", "/v1/clock:advance", {"to": "2026-01-01T12:00:00Z"})
    assert (answer.status, answer.body["code"]) == (400, "invalid-request")
    assert now(http) == START + timedelta(days=1)
