"""Loaded by schemathesis: long polls and backfills are cut short, everything else is sent as it was made up."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

import schemathesis

WAIT_S_MAX = 0.05
BACKFILL_MAX = timedelta(minutes=1)


@schemathesis.hook
def before_call(context: Any, case: schemathesis.Case, **_: Any) -> None:
    body = case.body
    if not isinstance(body, dict):
        return
    if type(body.get("wait_s")) in (int, float) and body["wait_s"] <= 60:
        body["wait_s"] = min(body["wait_s"], WAIT_S_MAX)
    if case.path.endswith(":backfill"):
        # Made-up instants lie decades apart: a schedule of every second would have more runs than the test has time for.
        with suppress(KeyError, TypeError, ValueError, OverflowError):
            start, end = datetime.fromisoformat(body["from"]), datetime.fromisoformat(body["to"])
            if end - start > BACKFILL_MAX:
                body["to"] = (start + BACKFILL_MAX).isoformat()
