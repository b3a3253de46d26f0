"""How a handler ends, and what of it the server is told."""

from __future__ import annotations

import traceback
from asyncio import CancelledError, Future
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any, Final

from wheelsched.client import Completion
from wheelsched.client.encoding import encode_json
from wheelsched.core.limits import BACKOFF_S_MAX, ERROR_BYTES_MAX

# Of the 4 KiB the server keeps of an error; the traceback gets what is left.
_MESSAGE_LENGTH_MAX: Final = 1_000
_TRACEBACK_FRAMES_MAX: Final = 20


class Retry(Exception):
    """Try again after `after_s` seconds, by the job's backoff if None. `error` is text or an object for the history."""

    def __init__(self, after_s: float | None = None, error: str | Mapping[str, Any] | None = None) -> None:
        super().__init__(after_s, error)
        if after_s is not None:
            _check_after_s(after_s)
        self.after_s = after_s
        self.error = error


class Fatal(Exception):
    """Do not try again: the job is DEAD, with this error."""

    def __init__(self, error: str | Mapping[str, Any] = "") -> None:
        super().__init__(error)
        self.error = error


class Snooze(Exception):
    """Not now: again in `after_s` seconds. It counts as an attempt, so give a job that snoozes often a large `max_attempts`."""

    def __init__(self, after_s: float) -> None:
        super().__init__(after_s)
        _check_after_s(after_s)
        self.after_s = after_s


def _check_after_s(after_s: float) -> None:
    if not 0 <= after_s <= BACKOFF_S_MAX:  # NaN is not either
        raise ValueError(f"after_s {after_s!r} is not between 0 and {BACKOFF_S_MAX}")


class Stopped(Exception):
    """Raised by `Job.raise_if_stopped`: the handler was asked to end and does. What is reported follows from why it was asked."""


class WorkerProcessDied(Exception):
    """The process a handler ran in ended without a result."""


class StopReason(Enum):
    """Why a handler is asked to end before it has done its work."""

    CANCEL = "cancel"
    TIMEOUT = "timeout"
    SHUTDOWN = "shutdown"
    LOST = "lost"


class Release(Enum):
    """The other way to end an attempt: give the job back."""

    RELEASE = "release"


def end_of(token: str, future: Future[Any], reason: StopReason | None, *, timeout_s: float | None) -> Completion | Release | None:
    """What to report of a handler that has ended; None: nothing, the job is no longer ours.

    What a handler returned counts even if it had been asked to stop: the work is done, and after a cancel request `succeeded` is
    the one outcome the server still takes.
    """
    assert future.done()
    if reason is StopReason.LOST:
        return None
    error = CancelledError() if future.cancelled() else future.exception()
    if error is None:
        return _succeeded(token, future.result())
    stopped = isinstance(error, CancelledError | Stopped | WorkerProcessDied)
    if reason is StopReason.CANCEL:
        return Completion(token, "cancelled", error=None if stopped else describe(error))
    if stopped and reason is StopReason.SHUTDOWN:
        return Release.RELEASE
    if stopped and reason is StopReason.TIMEOUT:
        message = f"the handler was stopped after its timeout_s of {timeout_s:g}"
        return Completion(token, "retryable_failure", error={"type": "TimedOut", "message": message})
    return _failed(token, error)


def _succeeded(token: str, result: Any) -> Completion:
    try:
        return Completion(token, "succeeded", result=None if result is None else encode_json(result))
    except (ValueError, TypeError) as error:
        # The work is done and would give the same result again: repeating it repeats its effects alone.
        return unreportable(token, f"the handler's result is not JSON: {error}")


def unreportable(token: str, message: str) -> Completion:
    """The end of an attempt whose result cannot be handed over."""
    return Completion(token, "fatal_failure", error={"type": "ResultRefused", "message": message[:_MESSAGE_LENGTH_MAX]})


def reduced(completion: Completion, message: str) -> Completion:
    """The same end without what the server refused of it; a success without its result is a failure that says so."""
    if completion.outcome == "succeeded":
        return unreportable(completion.token, message)
    return replace(completion, error={"type": "ErrorRefused", "message": message[:_MESSAGE_LENGTH_MAX]}, retry_after_s=None)


def _failed(token: str, error: BaseException) -> Completion:
    match error:
        case Snooze(after_s=after_s):
            return Completion(token, "retryable_failure", error={"type": "Snooze"}, retry_after_s=after_s)
        case Retry(after_s=after_s):
            return Completion(token, "retryable_failure", error=_given(error.error, error), retry_after_s=after_s)
        case Fatal():
            return Completion(token, "fatal_failure", error=_given(error.error, error))
        case _:
            return Completion(token, "retryable_failure", error=describe(error))


def _given(given: str | Mapping[str, Any] | None, error: BaseException) -> str | Mapping[str, Any]:
    """The error the handler gave, if the server will take it."""
    if not given:
        return describe(error)
    try:
        if len(encode_json(given)) <= ERROR_BYTES_MAX:
            return given
    except (ValueError, TypeError):
        pass
    return _clean(given if isinstance(given, str) else repr(given), _MESSAGE_LENGTH_MAX)


def describe(error: BaseException) -> dict[str, str]:
    """{"type", "message", "traceback"} in at most 4 KiB of JSON; of a long traceback the end stays, where the fault is."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        message = str(error)
    except Exception:  # a broken __str__ is not to hide the error it belongs to
        message = "<no message: its __str__ raises>"
    described = {"type": name[:200], "message": _clean(message, _MESSAGE_LENGTH_MAX), "traceback": ""}
    lines = traceback.format_exception(error, limit=-_TRACEBACK_FRAMES_MAX)
    trace = _clean("".join(lines)[-ERROR_BYTES_MAX:], ERROR_BYTES_MAX)
    while trace and len(encode_json(described | {"traceback": trace})) > ERROR_BYTES_MAX:
        trace = trace[len(trace) // 8 + 1 :]
    return described | {"traceback": trace}


def _clean(text: str, length_max: int) -> str:
    """`text` cut and without lone surrogates, which are no UTF-8: file names and bytes end up in messages."""
    return text[:length_max].encode("utf-8", "backslashreplace").decode()
