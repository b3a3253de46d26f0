"""The Python worker: handlers for queues, with leases kept, outcomes reported and a shutdown that loses nothing.

    app = App("http://127.0.0.1:8080")

    @app.task("mail", timeout_s=30)
    async def send(job: Job) -> None: ...

    app.run()

What it promises:

- `one_live_lease`, from the worker's side: leases are extended by a thread with a connection of its own, so neither a handler
  that blocks the event loop nor a shutdown stops them before the last handler has ended. Three heartbeats missed in a row, a 409
  or a lease past its end on the monotonic clock mark the attempt as lost: the handler is told, and what it returns is not
  reported.
- Each job has its own outcome. Completions travel in batches, are answered one by one and repeated until the lease is surely
  over.
- A handler that cannot be stopped (a thread) is never given back while it runs: it is told, and left to its lease.
- A job of a queue the app has no handler for is not claimed, and given back should one arrive.

How a handler ends: it returns (succeeded, the value is the `result`), raises `Retry` or any exception (retryable_failure),
`Fatal` (fatal_failure) or `Snooze` (again later; the attempt counts), or is stopped. A handler stopped by a cancel request is
reported as cancelled, by its timeout as a retryable failure, by the end of the grace period as released, which counts no attempt.

Decided: a sub-process for each `processes=True` slot instead of one pool of them, because a pool that loses one process fails the
jobs of all; a thread pool of our own, because those of `concurrent.futures` keep a process alive until the last one ends.

Read `app.py` first, then `runner.py` (one run of an app: claim, start, settle, drain); `leases.py` decides what a heartbeat means
and `heartbeats.py` sends it; `handlers.py` starts coroutines, threads and processes; `reporter.py` brings the ends home.
"""

from wheelsched.worker.app import App, load_app
from wheelsched.worker.job import Job
from wheelsched.worker.outcomes import Fatal, Retry, Snooze, Stopped
from wheelsched.worker.runner import WorkerStatistics

__all__ = ["App", "Fatal", "Job", "Retry", "Snooze", "Stopped", "WorkerStatistics", "load_app"]
