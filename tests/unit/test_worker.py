"""The worker against a fake server. Worker, server and test each have a thread: a test may block any of the others."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import worker_tasks
from fake_server import FakeServer, Fault

from wheelsched.core.limits import ERROR_BYTES_MAX
from wheelsched.worker import App, Fatal, Job, Retry, Snooze, load_app
from wheelsched.worker import runner as runner_module
from wheelsched.worker.outcomes import describe
from wheelsched.worker.runner import Kind, Task, lanes_of

pytestmark = pytest.mark.blocking_allowed

WAIT_S = 20.0
# Short enough to see a lease end, long enough for a machine that has other things to do.
SHORT_LEASE_S = 1.2


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


class Run:
    """An app at work on a thread."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="worker under test", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            asyncio.run(self.app.serve())
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        """Begin the shutdown, from outside as a signal would."""
        while self.app._runner is None and self._thread.is_alive():
            self._thread.join(0.001)
        self.app.stop()

    def join(self) -> None:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the worker has not ended"
        if self.error is not None:
            raise self.error


@contextmanager
def running(app: App) -> Iterator[Run]:
    run = Run(app)
    try:
        yield run
    finally:
        run.stop()
        run.join()


def app_of(server: FakeServer, **options: Any) -> App:
    return App(server.url, **{"worker": "w-1", "grace_s": 10.0, **options})


def wait(event: threading.Event) -> None:
    assert event.wait(WAIT_S), "the handler did not get there"


# --- outcomes -------------------------------------------------------------------------------------------------------------------


def test_coroutines_and_functions_run_and_their_values_are_results(server: FakeServer) -> None:
    app = app_of(server)
    threads: list[str] = []

    @app.task("async")
    async def double(job: Job) -> Any:
        await asyncio.sleep(0)
        return {"twice": job.payload * 2, "key": job.idempotency_key, "fencing": job.fencing_token, "labels": dict(job.labels)}

    @app.task("plain")
    def note(job: Job) -> None:
        threads.append(threading.current_thread().name)

    big, plain = server.add("async", 2**70), server.add("plain", b' {"a" :1.0}')
    with running(app):
        report = server.wait_report(big)
        assert report["outcome"] == "succeeded"
        assert report["result"]["twice"] == 2**71
        assert report["result"]["key"].startswith(big.job_id) and report["result"]["fencing"] > 2**60
        assert server.wait_report(plain) == {"token": "att_job_000001_1", "outcome": "succeeded"}
    assert threads[0].startswith("wheelsched handler")
    statistics = app.statistics()
    assert (statistics.claimed, statistics.succeeded, statistics.running, statistics.reporting) == (2, 2, 0, 0)


class Broken(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize(
    ("raised", "outcome", "error", "retry_after_s"),
    [
        (ValueError("bad \udce9 user"), "retryable_failure", ("ValueError", "bad \\udce9 user"), None),
        (Broken(), "retryable_failure", ("test_worker.Broken", "<no message: its __str__ raises>"), None),
        (Retry(), "retryable_failure", ("wheelsched.worker.outcomes.Retry", "(None, None)"), None),
        (Retry(7, "busy"), "retryable_failure", "busy", 7),
        (Retry(error={"code": 5}), "retryable_failure", {"code": 5}, None),
        (Fatal("no such user"), "fatal_failure", "no such user", None),
        (Fatal({"unsayable": object}), "fatal_failure", "{'unsayable': <class 'object'>}", None),
        (Snooze(3.5), "retryable_failure", {"type": "Snooze"}, 3.5),
        (SystemExit(3), "retryable_failure", ("RuntimeError", "the handler raised SystemExit(3)"), None),
        (StopIteration(), "retryable_failure", ("RuntimeError", None), None),
        (asyncio.CancelledError(), "retryable_failure", ("asyncio.exceptions.CancelledError", ""), None),
    ],
)
def test_what_a_handler_raises_becomes_its_outcome(
    server: FakeServer, raised: BaseException, outcome: str, error: Any, retry_after_s: float | None, is_async: bool
) -> None:
    app = app_of(server)

    async def fail_async(job: Job) -> None:
        raise raised

    def fail(job: Job) -> None:
        raise raised

    app.task("mail")(fail_async if is_async else fail)
    job = server.add("mail")
    with running(app):
        report = server.wait_report(job)
    assert report["outcome"] == outcome
    assert report.get("retry_after_s") == retry_after_s
    if isinstance(error, tuple):
        assert report["error"]["type"] == error[0]
        assert error[1] is None or report["error"]["message"] == error[1]
        assert report["error"]["traceback"] or isinstance(raised, asyncio.CancelledError)
    else:
        assert report["error"] == error


@pytest.mark.parametrize("after_s", [-1, float("nan"), float("inf")])
def test_a_wait_the_server_would_refuse_is_refused_where_it_is_raised(after_s: float) -> None:
    for kind in (Retry, Snooze):
        with pytest.raises(ValueError):
            kind(after_s)


def test_an_error_is_described_in_4_kib_with_the_end_of_its_traceback() -> None:
    def deep(depth: int) -> None:
        if depth:
            deep(depth - 1)
        raise ValueError("x" * 10_000 + "\0" * 10_000)

    try:
        deep(200)
    except ValueError as error:
        described = describe(error)
    assert len(json.dumps(described).encode()) <= ERROR_BYTES_MAX
    assert described["message"] == "x" * 1_000


def test_a_result_that_cannot_be_handed_over_ends_the_job_and_says_so(server: FakeServer) -> None:
    """Repeating it would repeat the work and not the outcome: NaN here, 413 from the server there."""
    app = app_of(server)
    server.payload_bytes_max = 1_000

    @app.task("mail")
    async def answer(job: Job) -> Any:
        return float("nan") if job.payload == "nan" else "x" * job.payload

    nan, large, small = server.add("mail", "nan"), server.add("mail", 2_000), server.add("mail", 10)
    with running(app):
        for job in (nan, large):
            report = server.wait_report(job)
            assert (report["outcome"], report["error"]["type"]) == ("fatal_failure", "ResultRefused")
        assert server.wait_report(small)["outcome"] == "succeeded"


def test_each_job_of_a_batch_has_its_own_outcome(server: FakeServer) -> None:
    """One that fails does not take nine others with it (B-145), and one request spoilt by one is sent again one by one."""
    app = app_of(server, slots=10)
    gate = threading.Event()
    jobs = [server.add("mail", number) for number in range(10)]

    @app.task("mail")
    async def work(job: Job) -> Any:
        while not gate.is_set():  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.005)
        if job.payload == 3:
            raise ValueError("the fourth")
        return job.payload

    server.script(":complete", Fault(400, code="invalid-request"))
    with running(app):
        server.wait(lambda: all(job.status == "RUNNING" for job in jobs), "the claim")
        gate.set()
        reports = [server.wait_report(job) for job in jobs]
    assert server.bodies("/v1/claims")[0]["max"] == 10
    assert [report["outcome"] for report in reports] == ["succeeded"] * 3 + ["retryable_failure"] + ["succeeded"] * 6
    assert all(len(job.reports) == 1 for job in jobs)


def test_a_report_is_repeated_until_the_server_answers(server: FakeServer) -> None:
    app = app_of(server)
    server.script(":complete", Fault(503, code="unavailable"), Fault(0), Fault(504, then=True))

    @app.task("mail")
    async def work(job: Job) -> str:
        return "done"

    job = server.add("mail")
    with running(app):
        server.wait(lambda: server.count(":complete") >= 4, "four reports")
    assert job.status == "SUCCEEDED" and app.statistics().succeeded == 1


# --- leases ---------------------------------------------------------------------------------------------------------------------


def test_a_handler_that_blocks_the_loop_keeps_its_lease(server: FakeServer) -> None:
    """B-082: the loop stands still for three leases, the heartbeats come from a thread."""
    app = app_of(server, lease_s=SHORT_LEASE_S)

    @app.task("mail")
    async def block(job: Job) -> str:
        time.sleep(SHORT_LEASE_S * 2.5)  # noqa: ASYNC251 - it is what the test is about
        return "still mine"

    job = server.add("mail")
    with running(app):
        assert server.wait_report(job)["result"] == "still mine"
    assert job.heartbeats >= 4
    assert (job.expired, job.attempt) == (0, 1)


def test_a_run_much_longer_than_its_lease_is_one_attempt(server: FakeServer) -> None:
    """B-092, with many jobs in one heartbeat."""
    app = app_of(server, lease_s=SHORT_LEASE_S, slots=5)
    jobs = [server.add("mail") for _ in range(5)]

    @app.task("mail")
    async def work(job: Job) -> None:
        await asyncio.sleep(SHORT_LEASE_S * 2)

    with running(app):
        for job in jobs:
            assert server.wait_report(job)["outcome"] == "succeeded"
    assert all((job.expired, job.attempt) == (0, 1) for job in jobs)
    assert max(len(body["heartbeats"]) for body in server.bodies("/v1/attempts:heartbeat")) == 5
    # Three a lease: those of two leases and a little.
    assert server.count("/v1/attempts:heartbeat") <= 10


def test_after_three_missed_heartbeats_the_attempt_is_lost_and_not_reported(server: FakeServer) -> None:
    app = app_of(server, lease_s=SHORT_LEASE_S)
    server.always("/v1/attempts:heartbeat", Fault(503, code="unavailable"))
    ends: list[str] = []
    ended = threading.Event()

    @app.task("mail")
    async def work(job: Job) -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ends.append("told" if job.lease_lost else "cancelled")
            ended.set()
        return "too late"

    job = server.add("mail")
    with running(app):
        wait(ended)
    assert ends == ["told"]
    assert job.reports == []
    statistics = app.statistics()
    assert (statistics.lost, statistics.succeeded) == (1, 0)
    assert statistics.heartbeats_missed in (2, 3), "the lease's end may come before the third miss is known"


def test_a_thread_is_told_that_another_has_its_job(server: FakeServer) -> None:
    app = app_of(server, lease_s=SHORT_LEASE_S)
    started, told = threading.Event(), threading.Event()

    @app.task("mail")
    def work(job: Job) -> str:
        started.set()
        while not job.lease_lost:
            time.sleep(0.005)
        assert job.should_stop
        told.set()
        return "too late"

    job = server.add("mail")
    with running(app):
        wait(started)
        server.take_away(job)
        wait(told)
    assert job.reports == []
    assert app.statistics().lost == 1


def test_a_blocked_loop_does_not_report_what_it_no_longer_owns(server: FakeServer) -> None:
    """B-082, second half: the handler sees the sign while it blocks the loop, and its result does not count."""
    app = app_of(server, lease_s=SHORT_LEASE_S)
    started = threading.Event()
    seen: list[bool] = []

    @app.task("mail")
    async def block(job: Job) -> str:
        started.set()
        until_s = time.monotonic() + WAIT_S
        while not job.lease_lost and time.monotonic() < until_s:
            time.sleep(0.005)  # noqa: ASYNC251 - it is what the test is about
        seen.append(job.lease_lost)
        return "too late"

    job = server.add("mail")
    with running(app):
        wait(started)
        server.take_away(job)
        server.wait(lambda: server.count("/v1/claims") >= 2, "the next claim")
    assert seen == [True]
    assert job.reports == []


def test_a_cancel_request_stops_a_coroutine_and_is_reported(server: FakeServer) -> None:
    app = app_of(server, lease_s=SHORT_LEASE_S)
    started = threading.Event()

    @app.task("mail")
    async def work(job: Job) -> None:
        started.set()
        await asyncio.sleep(60)

    job = server.add("mail")
    with running(app):
        wait(started)
        server.request_cancel(job)
        report = server.wait_report(job)
    assert report == {"token": "att_job_000000_1", "outcome": "cancelled"}
    assert app.statistics().cancelled == 1


@pytest.mark.parametrize("finishes", [True, False])
def test_a_thread_sees_the_cancel_request_and_success_still_counts(server: FakeServer, finishes: bool) -> None:
    """B-051: after a cancel request only `succeeded` counts; a handler that had done its work says so."""
    app = app_of(server, lease_s=SHORT_LEASE_S)
    started = threading.Event()

    @app.task("mail")
    def work(job: Job) -> str:
        started.set()
        while not job.cancel_requested:
            time.sleep(0.005)
        if not finishes:
            job.raise_if_stopped()
        return "done before it was asked"

    job = server.add("mail")
    with running(app):
        wait(started)
        server.request_cancel(job)
        assert server.wait_report(job)["outcome"] == ("succeeded" if finishes else "cancelled")


def test_progress_is_shown_while_the_attempt_runs(server: FakeServer) -> None:
    app = app_of(server)
    shown = threading.Event()

    @app.task("async")
    async def work(job: Job) -> None:
        await job.progress({"done": 2**64})
        while not shown.is_set():  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.005)
        with pytest.raises(ValueError):
            job.progress("x" * 5_000)
        with pytest.raises(ValueError):
            job.progress(float("nan"))

    job = server.add("async")
    with running(app):
        server.wait(lambda: bool(job.progress), "the progress")
        shown.set()
        assert server.wait_report(job)["outcome"] == "succeeded"
    assert job.progress[0] == {"done": 2**64}


def test_a_timeout_stops_a_coroutine_and_tells_a_thread(server: FakeServer) -> None:
    app = app_of(server)

    @app.task("async", timeout_s=0.1)
    async def sleep(job: Job) -> None:
        await asyncio.sleep(60)

    @app.task("plain")
    def spin(job: Job) -> None:
        assert job.deadline is not None
        while not job.timed_out:
            time.sleep(0.005)
        job.raise_if_stopped()

    jobs = [server.add("async"), server.add("plain", timeout_s=0.2)]
    with running(app):
        reports = [server.wait_report(job) for job in jobs]
    for report in reports:
        assert (report["outcome"], report["error"]["type"]) == ("retryable_failure", "TimedOut")


# --- slots ----------------------------------------------------------------------------------------------------------------------


def test_no_more_jobs_are_claimed_than_there_are_free_slots(server: FakeServer) -> None:
    app = app_of(server, slots=3)
    gate, arrived = threading.Semaphore(0), threading.Semaphore(0)
    lock = threading.Lock()
    at_once: list[int] = [0, 0]

    @app.task("mail")
    def work(job: Job) -> None:
        with lock:
            at_once[0] += 1
            at_once[1] = max(at_once)
        arrived.release()
        assert gate.acquire(timeout=WAIT_S)
        with lock:
            at_once[0] -= 1

    jobs = [server.add("mail") for _ in range(9)]
    with running(app):
        assert all(arrived.acquire(timeout=WAIT_S) for _ in range(3))
        gate.release(9)
        for job in jobs:
            server.wait_report(job)
    assert at_once == [0, 3]
    assert all(1 <= body["max"] <= 3 for body in server.bodies("/v1/claims"))


def test_reserved_slots_start_critical_work_beside_long_jobs(server: FakeServer) -> None:
    """B-137: the ordinary queue has all it may have, and the critical one still starts."""
    app = app_of(server, slots=3)
    gate = threading.Event()

    @app.task("long")
    def long(job: Job) -> None:
        wait(gate)

    @app.task("critical", reserved_slots=1)
    def critical(job: Job) -> None:
        pass

    longs = [server.add("long") for _ in range(5)]
    with running(app):
        server.wait(lambda: sum(job.status == "RUNNING" for job in longs) == 2, "two long ones at work")
        urgent = server.add("critical")
        assert server.wait_report(urgent)["outcome"] == "succeeded"
        assert sum(job.status == "RUNNING" for job in longs) == 2
        gate.set()
        for job in longs:
            server.wait_report(job)


def test_lanes_share_what_is_not_reserved() -> None:
    def tasks(*reserved: int) -> list[Task]:
        return [Task(f"q{index}", print, Kind.THREAD, reserved_slots=slots) for index, slots in enumerate(reserved)]

    assert [(lane.queues, lane.slots) for lane in lanes_of(tasks(0, 2, 0), 5)] == [(("q1",), 2), (("q0", "q1", "q2"), 3)]
    assert [(lane.queues, lane.slots) for lane in lanes_of(tasks(2, 3), 5)] == [(("q0",), 2), (("q1",), 3)]
    for reserved, slots in (((3, 3), 5), ((5, 0), 5)):
        with pytest.raises(ValueError, match="slots"):
            lanes_of(tasks(*reserved), slots)


def test_only_known_queues_are_claimed_and_a_strange_job_is_given_back(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """B-081. The fake server is made to hand out what nobody asked for."""
    app = app_of(server)
    done = threading.Event()

    @app.task("mail")
    async def work(job: Job) -> None:
        done.set()

    ready = server._ready_jobs
    offered: list[str] = []

    def ready_jobs(queues: list[str]) -> list[Any]:
        strange = [job for job in server.jobs.values() if job.queue == "strange" and job.job_id not in offered]
        offered.extend(job.job_id for job in strange)
        return ready(queues) + strange

    monkeypatch.setattr(server, "_ready_jobs", ready_jobs)
    strange = server.add("strange")
    server.add("mail")
    with running(app):
        wait(done)
        server.wait(lambda: server.released == [strange.job_id], "the release")
    assert strange.reports == [] and strange.status == "QUEUED" and strange.attempt == 0
    assert server.bodies("/v1/claims")[0]["queues"] == ["mail"]


def test_a_server_that_fails_is_asked_again(server: FakeServer) -> None:
    app = app_of(server)
    server.script("/v1/claims", Fault(500), Fault(0), Fault(503, code="unavailable"))

    @app.task("mail")
    async def work(job: Job) -> None:
        pass

    with running(app):
        job = server.add("mail")
        assert server.wait_report(job)["outcome"] == "succeeded"
    assert app.statistics().claim_errors == 2, "the 503 was repeated by the client"


# --- shutdown -------------------------------------------------------------------------------------------------------------------


def test_a_shutdown_hangs_up_the_long_poll(server: FakeServer) -> None:
    app = app_of(server, wait_s=60)
    app.task("mail")(worker_tasks.quick)
    with running(app) as run:
        server.wait(lambda: server.polls == 1, "the poll")
        run.stop()
        server.wait(lambda: server.hung_up == 1, "the hang-up")
        run.join()
    assert app.statistics().claimed == 0


def test_a_shutdown_drains_with_heartbeats_to_the_end(server: FakeServer) -> None:
    """B-084: the handler needs three more leases after the stop; nobody else gets its job, and it is reported."""
    app = app_of(server, lease_s=SHORT_LEASE_S, slots=2)
    started, stopping = threading.Event(), threading.Event()

    @app.task("mail")
    def work(job: Job) -> str:
        started.set()
        wait(stopping)
        before = job_in_server.heartbeats
        while job_in_server.heartbeats < before + 4:
            time.sleep(0.01)
        return "drained"

    job_in_server = server.add("mail")
    with running(app) as run:
        wait(started)
        run.stop()
        stopping.set()
        assert server.wait_report(job_in_server)["result"] == "drained"
        run.join()
    assert (job_in_server.expired, job_in_server.attempt) == (0, 1)
    late = server.add("mail")
    assert late.status == "QUEUED"


def test_jobs_claimed_in_the_instant_of_the_stop_are_given_back(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_of(server)
    app.task("mail")(worker_tasks.quick)
    poll = runner_module.Runner._poll

    async def poll_and_stop(self: Any, lane: Any) -> Any:
        jobs = await poll(self, lane)
        self._begin_stop()
        return jobs

    monkeypatch.setattr(runner_module.Runner, "_poll", poll_and_stop)
    jobs = [server.add("mail") for _ in range(3)]
    with running(app) as run:
        run.join()
    assert sorted(server.released) == [job.job_id for job in jobs]
    assert all((job.status, job.attempt, job.reports) == ("QUEUED", 0, []) for job in jobs)


def test_after_the_grace_period_coroutines_are_released_and_threads_left_to_their_lease(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "STOP_S", 0.3)
    app = app_of(server, grace_s=0.1)
    started, end = threading.Barrier(4), threading.Event()
    told: list[bool] = []

    @app.task("async")
    async def sleep(job: Job) -> None:
        await asyncio.to_thread(started.wait, WAIT_S)
        await asyncio.sleep(60)

    @app.task("polite")
    def polite(job: Job) -> None:
        started.wait(WAIT_S)
        while not job.should_stop:
            time.sleep(0.005)
        job.raise_if_stopped()

    @app.task("stubborn")
    def stubborn(job: Job) -> None:
        started.wait(WAIT_S)
        wait(end)
        told.append(job.should_stop)

    coroutine, thread, left = server.add("async"), server.add("polite"), server.add("stubborn")
    with running(app) as run:
        started.wait(WAIT_S)
        run.stop()
        run.join()
    end.set()
    assert sorted(server.released) == [coroutine.job_id, thread.job_id]
    # Nobody may have it while it runs: it is neither released nor reported.
    assert (left.status, left.reports) == ("RUNNING", [])
    statistics = app.statistics()
    assert (statistics.released, statistics.abandoned, statistics.running) == (2, 1, 0)


def test_a_coroutine_may_finish_its_cleanup_when_it_is_stopped(server: FakeServer) -> None:
    """What it returns then counts: the work is done."""
    app = app_of(server, grace_s=0.0)
    started = threading.Event()

    @app.task("mail")
    async def work(job: Job) -> str:
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
        return "half of it"

    job = server.add("mail")
    with running(app) as run:
        wait(started)
        run.stop()
        run.join()
    assert job.reports[0]["result"] == "half of it"
    assert server.released == []


@contextmanager
def worker_process(server: FakeServer, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    code = f"from wheelsched.worker import load_app; load_app('worker_tasks:app').run(url={server.url!r}, name='w-2', concurrency=4)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=tmp_path, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_sigterm_drains_the_process_and_exits_cleanly(server: FakeServer, tmp_path: Path) -> None:
    go = tmp_path / "go"
    job = server.add("slow", str(go))
    with worker_process(server, tmp_path) as process:
        server.wait(lambda: server.polls == 1, "the poll for a second job")
        process.send_signal(signal.SIGTERM)
        server.wait(lambda: server.hung_up == 1, "the end of the long poll")
        go.touch()
        assert server.wait_report(job)["outcome"] == "succeeded"
        assert process.wait(WAIT_S) == 0
    assert server.bodies("/v1/claims")[0]["worker"] == "w-2"
    assert server.bodies("/v1/claims")[0]["max"] == 4


def test_a_second_signal_ends_the_process_at_once(server: FakeServer, tmp_path: Path) -> None:
    job = server.add("slow", str(tmp_path / "never"))
    with worker_process(server, tmp_path) as process:
        server.wait(lambda: server.polls == 1, "the poll for a second job")
        process.send_signal(signal.SIGINT)
        server.wait(lambda: server.hung_up == 1, "the end of the long poll")
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 128 + signal.SIGTERM
    assert job.reports == [] and server.released == []


# --- processes ------------------------------------------------------------------------------------------------------------------


def test_processes_compute_fail_die_and_are_replaced(server: FakeServer) -> None:
    app = app_of(server, slots=2)
    for queue, handler in (("square", worker_tasks.square), ("die", worker_tasks.die), ("refuse", worker_tasks.refuse)):
        app.task(queue, processes=True)(handler)
    first = server.add("square", 2**40)
    with running(app):
        result = server.wait_report(first)["result"]
        assert result["square"] == 2**80 and result["pid"] != os.getpid() and result["remaining"]
        dead, refused = server.wait_report(server.add("die")), server.wait_report(server.add("refuse"))
        again = server.wait_report(server.add("square", 3))["result"]
    assert (dead["outcome"], dead["error"]["type"]) == ("retryable_failure", "wheelsched.worker.outcomes.WorkerProcessDied")
    assert (refused["outcome"], refused["error"]) == ("fatal_failure", "not this one")
    assert again["square"] == 9


def test_a_process_over_its_timeout_is_killed(server: FakeServer, tmp_path: Path) -> None:
    app = app_of(server)
    app.task("hang", processes=True, timeout_s=3)(worker_tasks.hang)
    job = server.add("hang", str(tmp_path / "pid"))
    with running(app):
        report = server.wait_report(job)
    assert (report["outcome"], report["error"]["type"]) == ("retryable_failure", "TimedOut")
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# --- the app --------------------------------------------------------------------------------------------------------------------


def test_registration_refuses_what_cannot_work() -> None:
    app = App()
    app.task("mail")(worker_tasks.square)
    with pytest.raises(ValueError, match="has a handler already"):
        app.task("mail")
    with pytest.raises(ValueError, match="coroutine function"):
        app.task("other", processes=True)(worker_tasks.quick)
    with pytest.raises(ValueError, match="timeout_s"):
        app.task("other", timeout_s=0)
    for options in ({"slots": 0}, {"lease_s": 0}, {"wait_s": 61}, {"grace_s": -1}):
        with pytest.raises(ValueError):
            App(**options)  # type: ignore[arg-type]
    assert app.queues == ("mail",)
    with pytest.raises(ValueError, match="no handlers"):
        asyncio.run(App().serve())


def test_an_app_is_found_by_name() -> None:
    assert load_app("worker_tasks:app") is worker_tasks.app
    assert load_app("worker_tasks") is worker_tasks.app
    for spec in (":app", "worker_tasks:nothing", "worker_tasks:quick"):
        with pytest.raises(ValueError):
            load_app(spec)
    with pytest.raises(ModuleNotFoundError):
        load_app("no_such_module:app")
