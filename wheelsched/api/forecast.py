"""What will be due when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import orjson

from wheelsched.api import jobs, times
from wheelsched.api.problem import invalid
from wheelsched.api.request import Request, Response, ok
from wheelsched.core import limits

if TYPE_CHECKING:
    from wheelsched.api.app import Api

_MINUTE_MS: Final = 60_000
_HOURS_DEFAULT: Final = 24


async def forecast(api: Api, request: Request) -> Response:
    """Whole minutes of [from, to): from now on for a day, unless asked for otherwise."""
    now_ms = api.node.clock.wall_ms()
    from_ms = jobs.bound_of(request.query, "from", now_ms)
    to_ms = jobs.bound_of(request.query, "to", from_ms + _HOURS_DEFAULT * 3_600_000)
    from_ms -= from_ms % _MINUTE_MS
    to_ms = -(-to_ms // _MINUTE_MS) * _MINUTE_MS
    if to_ms <= from_ms:
        raise invalid("?to", "to is not after from")
    if to_ms - from_ms > limits.FORECAST_S_MAX * 1000:
        raise invalid("?to", f"to is more than {limits.FORECAST_S_MAX // 86_400} days after from; ask for a shorter stretch")
    minutes = await api.node.forecast(request.tenant, from_ms=from_ms, to_ms=to_ms)
    return ok(
        orjson.dumps(
            {
                "from": times.format_instant(from_ms),
                "to": times.format_instant(to_ms),
                "minutes": [
                    {
                        "at": times.format_instant(minute.at_ms),
                        "jobs": sum(count for _, count in minute.queues),
                        "queues": [{"queue": queue, "jobs": count} for queue, count in minute.queues],
                    }
                    for minute in minutes
                ],
            }
        )
    )
