"""The one taxonomy of errors a caller can meet (API.md, "Errors").

A subclass names a `code`, an HTTP `status` and a `title`. `api/problem.py` alone renders it as problem+json and `client/`
parses it back with `from_problem`; nothing else knows both sides. A message names the thing, its value, the bound and the way out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar


class WheelschedError(Exception):
    """Base of everything the caller caused or has to handle.

    `errors` lists faults by JSON pointer ({"pointer": "/retry/max_attempts", "detail": "..."}); `retry_after_s` becomes the
    Retry-After header.
    """

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    title: ClassVar[str] = "Internal error"

    def __init__(self, detail: str, *, errors: Sequence[Mapping[str, str]] = (), retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.errors = tuple(errors)
        self.retry_after_s = retry_after_s


class InvalidRequest(WheelschedError):
    code, status, title = "invalid-request", 400, "Invalid request"


class InvalidSchedule(WheelschedError):
    code, status, title = "invalid-schedule", 400, "Invalid schedule"


class RunAtTooFar(WheelschedError):
    code, status, title = "run-at-too-far", 400, "Run time too far ahead"


class Unauthenticated(WheelschedError):
    code, status, title = "unauthenticated", 401, "Unauthenticated"


class Forbidden(WheelschedError):
    code, status, title = "forbidden", 403, "Forbidden"


class NotFound(WheelschedError):
    code, status, title = "not-found", 404, "Not found"


class MethodNotAllowed(WheelschedError):
    code, status, title = "method-not-allowed", 405, "Method not allowed"

    def __init__(self, detail: str, *, allowed: Sequence[str] = ()) -> None:
        super().__init__(detail)
        self.allowed = tuple(allowed)


class NotAcceptable(WheelschedError):
    code, status, title = "not-acceptable", 406, "Not acceptable"


class JobNotScheduled(WheelschedError):
    code, status, title = "job-not-scheduled", 409, "Job is past SCHEDULED"


class JobFinished(WheelschedError):
    code, status, title = "job-finished", 409, "Job finished"


class NameTaken(WheelschedError):
    code, status, title = "name-taken", 409, "Name taken"


class StaleLease(WheelschedError):
    code, status, title = "stale-lease", 409, "Stale lease"


class ConcurrencyLimit(WheelschedError):
    code, status, title = "concurrency-limit", 409, "Concurrency limit"


class VersionMismatch(WheelschedError):
    code, status, title = "version-mismatch", 412, "Version mismatch"


class PayloadTooLarge(WheelschedError):
    code, status, title = "payload-too-large", 413, "Payload too large"


class UnsupportedMediaType(WheelschedError):
    code, status, title = "unsupported-media-type", 415, "Unsupported media type"


class IdempotencyKeyReused(WheelschedError):
    code, status, title = "idempotency-key-reused", 422, "Idempotency key reused"


class QuotaExceeded(WheelschedError):
    code, status, title = "quota-exceeded", 429, "Quota exceeded"


class Unavailable(WheelschedError):
    """Nothing was accepted; repeating after `retry_after_s` is safe."""

    code, status, title = "unavailable", 503, "Unavailable"


class NotLeader(Unavailable):
    """This node does not lead the group; nothing was proposed, or what was proposed lost for certain. `leader`: the id of the node
    that leads it, None where that is not known."""

    def __init__(self, detail: str, *, leader: int | None = None, retry_after_s: float | None = 1) -> None:
        super().__init__(detail, retry_after_s=retry_after_s)
        self.leader = leader


class OutcomeUnknown(WheelschedError):
    """The command may or may not be in the log: repeat it with the same key."""

    code, status, title = "timeout", 504, "Outcome unknown"


BY_CODE: dict[str, type[WheelschedError]] = {
    cls.code: cls
    for cls in (
        InvalidRequest, InvalidSchedule, RunAtTooFar, Unauthenticated, Forbidden, NotFound, MethodNotAllowed, NotAcceptable,
        JobNotScheduled, JobFinished, NameTaken, StaleLease, ConcurrencyLimit, VersionMismatch, PayloadTooLarge,
        UnsupportedMediaType, IdempotencyKeyReused, QuotaExceeded, Unavailable, OutcomeUnknown,
    )
}  # fmt: skip


def from_problem(problem: Mapping[str, Any], *, retry_after_s: float | None = None) -> WheelschedError:
    """The error that a problem+json document stands for; an unknown code gives a plain `WheelschedError`."""
    cls = BY_CODE.get(str(problem.get("code")), WheelschedError)
    error = cls.__new__(cls)
    WheelschedError.__init__(
        error, str(problem.get("detail") or problem.get("title") or "unknown error"),
        errors=problem.get("errors") or (), retry_after_s=retry_after_s,
    )  # fmt: skip
    return error
