"""Logs: an event name and fields, to stderr, as text for people or JSON lines for collectors."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import orjson
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def setup_logs(*, level: str = "info", format: str = "text", stream: TextIO | None = None) -> None:
    """Configure structlog, and the standard library's loggers with it (aiohttp and asyncio write there). Once, at start.

    `level` and `format` are as in `settings.logging`. Afterwards `structlog.get_logger().info("event_name", field=...)` anywhere.
    """
    stream = stream or sys.stderr
    common: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer = _renderer(format, colors=stream.isatty())
    structlog.configure(
        processors=[*common, structlog.processors.format_exc_info, renderer] if format == "json" else [*common, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=False,
    )
    _setup_standard_library(LEVELS[level], format, stream)


def _renderer(format: str, *, colors: bool) -> Processor:
    if format == "json":
        return _render_json
    # Plain tracebacks: the default of structlog prints local variables, and with them payloads, into the log.
    return structlog.dev.ConsoleRenderer(colors=colors, pad_event_to=28, exception_formatter=structlog.dev.plain_traceback)


def _render_json(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    # `default=repr`: a log line never fails for want of a serialiser, least of all the one that tells of a failure.
    return orjson.dumps(event, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()


def _setup_standard_library(level: int, format: str, stream: TextIO) -> None:
    handler = logging.StreamHandler(stream)
    processors: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if format == "json":
        processors.append(structlog.processors.format_exc_info)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                structlog.processors.add_log_level,
                structlog.stdlib.add_logger_name,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
            ],
            processors=[*processors, _renderer(format, colors=stream.isatty())],
        )
    )
    # Other people's libraries are heard from WARNING on, unless somebody debugs.
    logging.basicConfig(level=level if level == logging.DEBUG else max(level, logging.WARNING), handlers=[handler], force=True)
