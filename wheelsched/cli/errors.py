"""Exit codes, and how a failure is told.

| code | meaning |
| --- | --- |
| 0 | done |
| 1 | failed: the node said no for a reason not below, a check did not pass, something is lost |
| 2 | usage: wrong options, arguments or settings |
| 3 | not found: no such job or queue |
| 4 | conflict: the state of the thing rules the call out |
| 5 | unreachable or unavailable: nothing was done, or (`timeout`) it is not known; repeat |
| 70 | `dev`, `serve`: a write or an fsync failed; what the disk holds is unknown until the next start reads it |
| 130 | interrupted |
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import click

from wheelsched.core.errors import WheelschedError
from wheelsched.runtime.config import SettingsError

OK: Final = 0
FAILURE: Final = 1
USAGE: Final = 2
NOT_FOUND: Final = 3
CONFLICT: Final = 4
UNREACHABLE: Final = 5
INTERRUPTED: Final = 130

_BY_STATUS: Final = {400: USAGE, 404: NOT_FOUND, 409: CONFLICT, 412: CONFLICT, 422: CONFLICT, 503: UNREACHABLE, 504: UNREACHABLE}


class CommandFailed(Exception):
    """What a command could not do: one sentence that ends with the way out, and the exit code."""

    def __init__(self, message: str, *, exit_code: int = FAILURE, code: str = "failed") -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code
        self.code = code


def failure_of(error: Exception) -> CommandFailed | None:
    """An error in a user's words; None for what only a bug can raise."""
    match error:
        case CommandFailed():
            return error
        case SettingsError():
            return CommandFailed(str(error), exit_code=USAGE, code="settings")
        case WheelschedError():
            lines = [f"{error.title}: {error.detail}"]
            lines += [f"  {fault.get('pointer', '')}: {fault.get('detail', '')}" for fault in error.errors]
            if error.retry_after_s is not None:
                lines.append(f"  try again in {error.retry_after_s:g} s")
            return CommandFailed("\n".join(lines), exit_code=_BY_STATUS.get(error.status, FAILURE), code=error.code)
    return None


def run_and_report(invoke: Callable[[], Any], *, as_json: bool) -> int:
    """Run a command; return its exit code after telling on stderr what went wrong. A bug keeps its traceback."""
    try:
        result = invoke()
        return result if isinstance(result, int) else OK
    except click.ClickException as error:
        if as_json:
            _tell(CommandFailed(error.format_message(), exit_code=error.exit_code, code="usage"), as_json=True)
        else:
            error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has enough; that is not a failure.
        return OK
    except Exception as error:
        failure = failure_of(error)
        if failure is None:
            raise
        _tell(failure, as_json=as_json)
        return failure.exit_code


def _tell(failure: CommandFailed, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"error": {"code": failure.code, "detail": failure.message}}), err=True)
    else:
        click.secho("error: ", fg="red", bold=True, nl=False, err=True)
        click.echo(failure.message, err=True)
