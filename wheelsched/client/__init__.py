"""The Python client: typed calls of the HTTP API (`docs`: API.md), asynchronous (`AsyncClient`) and blocking (`Client`).

What it promises:

- Payloads are exact. Integers have any size, a number no float can hold comes back as `decimal.Decimal`, `payload_raw` is the
  bytes as they were sent. NaN and Infinity are a `ValueError` before anything leaves the process. `bytes` are taken as JSON text
  and sent as they are, once it is sure that they are one JSON value.
- A repeated call does no harm. Every call is repeated where the server said that nothing was accepted (429, 503) or could not be
  reached; where the outcome is unknown (504, a broken connection, a timeout) only calls are repeated that a repetition does not
  change. `create` and `create_many` make an idempotency key where they are given none, so they are among them; a claim is not.
- A claim that is cancelled resets its connection, so a server that had just answered gives the jobs back at once.
- One taxonomy: a refusal is the subclass of `WheelschedError` with its code; a server nobody could connect to is `Unavailable`
  (nothing was accepted), a connection lost under way is `OutcomeUnknown`.

A schedule is a dictionary in both directions, its fields those of API.md: what `schedule` gives back is what it was made from and what
became of it.

Read `aio.py` first: one method a call; `transport.py` below it decides about repetition; `sync.py` is the facade for threads.
"""

from wheelsched.client.aio import AsyncClient, BatchFailed, Completion, Heartbeat, NewJob, RetryPolicy
from wheelsched.client.sync import Client
from wheelsched.client.transport import Backoff
from wheelsched.client.types import (
    Attempt,
    Backfilled,
    ClaimedJob,
    Completed,
    DataInterval,
    Event,
    Forecast,
    Job,
    Lateness,
    Lease,
    MinuteForecast,
    Page,
    Queue,
    QueueForecast,
    QueueSettings,
    Runs,
    Skipped,
    ZonesReloaded,
)

__all__ = [
    "AsyncClient",
    "Attempt",
    "Backfilled",
    "Backoff",
    "BatchFailed",
    "ClaimedJob",
    "Client",
    "Completed",
    "Completion",
    "DataInterval",
    "Event",
    "Forecast",
    "Heartbeat",
    "Job",
    "Lateness",
    "Lease",
    "MinuteForecast",
    "NewJob",
    "Page",
    "Queue",
    "QueueForecast",
    "QueueSettings",
    "RetryPolicy",
    "Runs",
    "Skipped",
    "ZonesReloaded",
]
