"""Handlers for `processes=True` and for a worker of its own process: they are imported by name."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from wheelsched.worker import App, Fatal, Job

app = App()


def square(job: Job) -> dict[str, Any]:
    return {"square": job.payload**2, "pid": os.getpid(), "attempt": job.attempt, "remaining": job.remaining_s is not None}


def die(job: Job) -> None:
    os._exit(9)


def refuse(job: Job) -> None:
    raise Fatal("not this one")


def hang(job: Job) -> None:
    Path(job.payload).write_text(str(os.getpid()))
    time.sleep(600)


@app.task("quick")
async def quick(job: Job) -> Any:
    return job.payload


@app.task("slow")
def slow(job: Job) -> str:
    Path(job.payload).with_suffix(".started").touch()
    while not Path(job.payload).exists() and not job.should_stop:
        time.sleep(0.01)
    return "done"
