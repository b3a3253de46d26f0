"""What the API counts of its calls: plain additions on the way, text when somebody scrapes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from wheelsched.api.routes import Route

# From one call's share of a loop's turn to the longest poll.
_BOUNDS_S: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60)


class CallCounter:
    __slots__ = ("buckets", "seconds", "statuses")

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}
        self.buckets = [0] * (len(_BOUNDS_S) + 1)
        self.seconds = 0.0

    def add(self, status: int, seconds: float) -> None:
        statuses = self.statuses
        statuses[status] = statuses.get(status, 0) + 1
        self.buckets[bisect_left(_BOUNDS_S, seconds)] += 1
        self.seconds += seconds


@dataclass(frozen=True, slots=True)
class Statistics:
    """`connections` open now; the others since the start. `given_back`: jobs whose answer did not arrive."""

    connections: int
    requests: int
    refused_connections: int
    given_back: int


class Counters:
    """Calls by route, and what the server counts of connections."""

    __slots__ = ("_calls", "_routes", "connections", "given_back", "refused_connections", "unrouted")

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = routes
        self._calls = [CallCounter() for _ in routes]
        # Calls of no route: unknown paths, methods a path does not have, lines that could not be read.
        self.unrouted = CallCounter()
        self.connections = 0
        self.refused_connections = 0
        self.given_back = 0

    def of(self, route_index: int) -> CallCounter:
        return self._calls[route_index] if route_index >= 0 else self.unrouted

    def statistics(self) -> Statistics:
        requests = sum(sum(call.statuses.values()) for call in (*self._calls, self.unrouted))
        return Statistics(self.connections, requests, self.refused_connections, self.given_back)

    def render(self) -> bytes:
        """Prometheus' text format."""
        named = [(f'method="{route.method}",path="{route.path}"', call) for route, call in zip(self._routes, self._calls, strict=True)]
        named.append(('method="",path=""', self.unrouted))
        seen = [(labels, call) for labels, call in named if call.statuses]
        lines = [
            "# HELP wheelsched_http_requests_total Calls answered.",
            "# TYPE wheelsched_http_requests_total counter",
        ]
        for labels, call in seen:
            lines += (
                f'wheelsched_http_requests_total{{{labels},status="{status}"}} {count}' for status, count in sorted(call.statuses.items())
            )
        lines += (
            "# HELP wheelsched_http_request_seconds From the request's last header to its answer, waits of claims included.",
            "# TYPE wheelsched_http_request_seconds histogram",
        )
        for labels, call in seen:
            total = 0
            for bound, count in zip((*map(str, _BOUNDS_S), "+Inf"), call.buckets, strict=True):
                total += count
                lines.append(f'wheelsched_http_request_seconds_bucket{{{labels},le="{bound}"}} {total}')
            lines.append(f"wheelsched_http_request_seconds_sum{{{labels}}} {call.seconds!r}")
            lines.append(f"wheelsched_http_request_seconds_count{{{labels}}} {total}")
        lines += (
            "# HELP wheelsched_http_connections Open client connections.",
            "# TYPE wheelsched_http_connections gauge",
            f"wheelsched_http_connections {self.connections}",
            "# HELP wheelsched_http_connections_refused_total Connections beyond http.connections_max.",
            "# TYPE wheelsched_http_connections_refused_total counter",
            f"wheelsched_http_connections_refused_total {self.refused_connections}",
            "# HELP wheelsched_http_claims_given_back_total Jobs given back because the answer did not reach its worker.",
            "# TYPE wheelsched_http_claims_given_back_total counter",
            f"wheelsched_http_claims_given_back_total {self.given_back}",
        )
        return ("\n".join(lines) + "\n").encode()
