"""What a handler gets: the job it works on, and the signs that it should stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from wheelsched.client import ClaimedJob, DataInterval
from wheelsched.client.encoding import encode_json
from wheelsched.core.limits import PROGRESS_BYTES_MAX
from wheelsched.worker.outcomes import Stopped

# Counts suspend, where the system can say so: a lease does not wait for a laptop lid.
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def mono_ms() -> int:
    """Milliseconds since an arbitrary start; the same for all processes of a machine."""
    return time.clock_gettime_ns(_CLOCK) // 1_000_000


class Signs:
    """What the worker tells a handler. Written from the loop and the heartbeat thread, read anywhere; each turns true once."""

    __slots__ = ("cancel_requested", "deadline_ms", "lease_lost", "on_progress", "shutting_down")

    def __init__(self, deadline_ms: int | None = None, on_progress: Callable[[bytes], None] | None = None) -> None:
        self.cancel_requested = False
        self.lease_lost = False
        self.shutting_down = False
        self.deadline_ms = deadline_ms
        self.on_progress = on_progress


class _Told:
    """The answer of `Job.progress`: nothing to wait for, whether awaited or not."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


class Job:
    """One attempt of a job, as its handler sees it.

    In a `processes=True` handler it is a copy: `cancel_requested` and `lease_lost` stay False (the process is killed instead) and
    `progress` raises.
    """

    __slots__ = ("_claimed", "_payload", "_signs")

    def __init__(self, claimed: ClaimedJob, signs: Signs) -> None:
        self._claimed = claimed
        self._signs = signs
        self._payload: list[Any] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return (_copy, (self._claimed, self._signs.deadline_ms))

    def __repr__(self) -> str:
        return f"<Job {self.job_id} of {self.queue}, attempt {self.attempt}>"

    @property
    def payload(self) -> Any:
        """The payload, decoded on first use: integers of any size are exact."""
        if not self._payload:
            self._payload.append(self._claimed.payload)
        return self._payload[0]

    @property
    def payload_raw(self) -> bytes:
        """The payload as it was sent, byte for byte."""
        return bytes(self._claimed.payload_raw)

    @property
    def payload_ref(self) -> str | None:
        return self._claimed.payload_ref

    @property
    def job_id(self) -> str:
        return self._claimed.job_id

    @property
    def queue(self) -> str:
        return self._claimed.queue

    @property
    def attempt(self) -> int:
        """1 for the first."""
        return self._claimed.attempt

    @property
    def max_attempts(self) -> int | None:
        return self._claimed.max_attempts

    @property
    def idempotency_key(self) -> str:
        """The same for every attempt of one run: hand it to what must not happen twice."""
        return self._claimed.idempotency_key

    @property
    def fencing_token(self) -> int:
        """Grows with every claim: hand it to a store that refuses lower ones than it has seen."""
        return self._claimed.fencing_token

    @property
    def lease_token(self) -> str:
        return self._claimed.lease_token

    @property
    def labels(self) -> Mapping[str, str]:
        return self._claimed.labels

    @property
    def run_at(self) -> datetime | None:
        return self._claimed.run_at

    @property
    def fire_at(self) -> datetime | None:
        return self._claimed.fire_at

    @property
    def schedule(self) -> str | None:
        return self._claimed.schedule

    @property
    def scheduled_for(self) -> datetime | None:
        """The occurrence of the schedule that this run is for; None for a plain job and a run by hand."""
        return self._claimed.scheduled_for

    @property
    def data_interval(self) -> DataInterval | None:
        """What this run covers: from its predecessor's instant up to its own. None where no predecessor is known."""
        return self._claimed.data_interval

    @property
    def trigger(self) -> str | None:
        """Why there is this run: `on_time`, `catch_up`, `manual` or `backfill`; None for a plain job."""
        return self._claimed.trigger

    @property
    def scheduled_local(self) -> str | None:
        """What the zone's clock was to show, where it jumped over that: `2026-03-08T02:30`. None for every other run."""
        return self._claimed.scheduled_local

    @property
    def traceparent(self) -> str | None:
        return self._claimed.traceparent

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the attempt times out, not below 0; None without a timeout."""
        if self._signs.deadline_ms is None:
            return None
        return max(0, self._signs.deadline_ms - mono_ms()) / 1000

    @property
    def deadline(self) -> datetime | None:
        """When the attempt times out, by this machine's clock; None without a timeout."""
        remaining_s = self.remaining_s
        return None if remaining_s is None else datetime.fromtimestamp(time.time() + remaining_s, UTC)

    @property
    def cancel_requested(self) -> bool:
        """Somebody cancelled the job: what was done may be kept (return) or undone (raise); a coroutine is cancelled as well."""
        return self._signs.cancel_requested

    @property
    def lease_lost(self) -> bool:
        """The job is no longer ours, another worker may have it: stop, nothing of this attempt will be reported."""
        return self._signs.lease_lost

    @property
    def timed_out(self) -> bool:
        return self.remaining_s == 0

    @property
    def should_stop(self) -> bool:
        """A reason to end now: cancelled, lease lost, timed out, or the worker's grace period is over."""
        return self.cancel_requested or self.lease_lost or self._signs.shutting_down or self.timed_out

    def raise_if_stopped(self) -> None:
        """Raise `Stopped` if there is a reason to end; for threads, which nobody can stop from outside."""
        if self.should_stop:
            raise Stopped

    def progress(self, value: Any) -> _Told:
        """Show `value`, any JSON of at most 4 KiB, while the attempt runs. Never waits, and may be awaited or not.

        It travels with the next heartbeat, which comes within half a second; of several values the last counts. Raises ValueError
        or TypeError for what is not JSON, RuntimeError in a process handler.
        """
        raw = encode_json(value)
        if len(raw) > PROGRESS_BYTES_MAX:
            raise ValueError(f"progress has {len(raw)} bytes; {PROGRESS_BYTES_MAX} are allowed")
        if self._signs.on_progress is None:
            raise RuntimeError("a handler in a process of its own cannot report progress; use a thread (processes=False)")
        self._signs.on_progress(raw)
        return _Told()


def _copy(claimed: ClaimedJob, deadline_ms: int | None) -> Job:
    return Job(claimed, Signs(deadline_ms))
