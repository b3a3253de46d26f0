"""Loaded by schemathesis: long polls are cut short, everything else is sent as it was made up."""

from __future__ import annotations

from typing import Any

import schemathesis

WAIT_S_MAX = 0.05


@schemathesis.hook
def before_call(context: Any, case: schemathesis.Case, **_: Any) -> None:
    body = case.body
    if isinstance(body, dict) and type(body.get("wait_s")) in (int, float) and body["wait_s"] <= 60:
        body["wait_s"] = min(body["wait_s"], WAIT_S_MAX)
