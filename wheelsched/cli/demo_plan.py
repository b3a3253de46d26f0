"""What the demo schedules: a few hundred jobs of several kinds, the same ones every time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

QUEUE: Final = "demo"
# Longer than the outage: a worker's word given while the node was dead still counts when it is back.
LEASE_S: Final = 10
# A run with no attempt left would be DEAD because the node was killed and not because the handler failed: one to spare.
_HOPELESS_ATTEMPTS: Final = 3


@dataclass(frozen=True, slots=True)
class Kind:
    """A row of the demo's table. `from_s` and `to_s`: between which seconds of the run its jobs are due; 0 and 0: at once.
    `fail_times`: how many attempts the handler fails, -1 all of them. `run_s`: how long it works."""

    name: str
    count: int
    from_s: float
    to_s: float
    fields: dict[str, Any]
    fail_times: int = 0
    run_s: float = 0.03
    ends: str = "SUCCEEDED"


KINDS: Final = (
    Kind("at once", 60, 0, 0, {}),
    Kind("delayed", 160, 3, 40, {}),
    Kind("flexible", 60, 3, 28, {"timing": {"class": "flexible", "window_s": 12}}),
    Kind("critical", 40, 5, 38, {"priority": "critical"}),
    Kind("bulk", 40, 5, 38, {"priority": "bulk"}),
    # Under a lease when the node dies: either the worker's word still counts afterwards, or the lease ends and they run again.
    Kind("at work at the kill", 20, 13.2, 14.8, {"retry": {"initial_backoff_s": 1, "max_backoff_s": 2}}, run_s=2.0),
    Kind("fails twice", 24, 3, 34, {"retry": {"max_attempts": 8, "initial_backoff_s": 1, "max_backoff_s": 2}}, fail_times=2),
    Kind(
        "fails for ever", 8, 3, 30,
        {"retry": {"max_attempts": _HOPELESS_ATTEMPTS, "initial_backoff_s": 1, "max_backoff_s": 2}}, fail_times=-1, ends="DEAD",
    ),
)  # fmt: skip
# Created one by one while the node dies and comes back, each sent again with its key until it is answered.
STEADY: Final = Kind("through the kill", 60, 0, 0, {})

KIND_BY_NAME: Final = {kind.name: kind for kind in (*KINDS, STEADY)}


@dataclass(frozen=True, slots=True)
class PlannedJob:
    key: str
    kind: Kind
    body: dict[str, Any]


def planned_jobs(start_s: float) -> Iterator[PlannedJob]:
    """All jobs of `KINDS`, in mixed order. `start_s`: Unix seconds of the run's start."""
    rng = random.Random(20_260_101)
    planned = [_planned(kind, number, start_s, rng) for kind in KINDS for number in range(kind.count)]
    rng.shuffle(planned)
    yield from planned


def steady_job(number: int) -> PlannedJob:
    return PlannedJob(f"steady-{number}", STEADY, {"queue": QUEUE, "payload": _payload(STEADY)})


def _payload(kind: Kind) -> dict[str, Any]:
    return {"kind": kind.name, "fail_times": kind.fail_times, "run_s": kind.run_s}


def _planned(kind: Kind, number: int, start_s: float, rng: random.Random) -> PlannedJob:
    body: dict[str, Any] = {"queue": QUEUE, "payload": _payload(kind), **kind.fields}
    if kind.to_s:
        due = datetime.fromtimestamp(start_s + rng.uniform(kind.from_s, kind.to_s), UTC)
        body["run_at"] = due.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return PlannedJob(f"{kind.name.replace(' ', '-')}-{number}", kind, body)
