"""The demo's application: a handler that notes each of its runs before it does anything else, and fails where it is told to."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

from wheelsched.cli.demo_plan import LEASE_S, QUEUE
from wheelsched.worker import App, Job

# More slots than jobs come due at once: lateness is then the scheduler's and not that of workers who are busy.
# Several nodes of a cluster by comma: the first is asked, and the next one where it does not answer.
app = App(os.environ["WHEELSCHED_URL"].split(","), slots=50, lease_s=LEASE_S, wait_s=5, grace_s=5)

_folder = os.environ.get("WHEELSCHED_DEMO_RUNS", ".")
# One small append is one write: notes of concurrent handlers cannot mix, and what was noted survives this process.
_notes = os.open(Path(_folder) / f"runs-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


class AsPlanned(Exception):
    """The failure that the plan asked for."""


@app.task(QUEUE)
async def handle(job: Job) -> str:
    os.write(_notes, (json.dumps({"job_id": job.job_id, "attempt": job.attempt, "at_s": time.time()}) + "\n").encode())
    await asyncio.sleep(job.payload["run_s"])
    fail_times = job.payload["fail_times"]
    if fail_times < 0 or job.attempt <= fail_times:
        raise AsPlanned(f"attempt {job.attempt} fails, as planned")
    return str(job.payload["kind"])
