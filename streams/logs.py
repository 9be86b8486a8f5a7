"""Configures the log of a process: one line per event on standard error, as JSON or as text for people.

A log line that cannot be written is dropped: a closed terminal must not stop a server.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import orjson
import structlog


class _ErrorFreeStream:
    """Writes to standard error and ignores failures. Each line is one `write`, so that lines of several
    processes do not mix."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            pass


def resolve_format(log_format: str) -> str:
    """Replace `auto` by `human` on a terminal and by `json` elsewhere. The supervisor does this once and
    passes the result to its child processes."""
    if log_format == "auto":
        return "human" if sys.stderr.isatty() else "json"
    return log_format


def _json(event: dict[str, object], **_: object) -> str:
    return orjson.dumps(event, default=str).decode()


def setup(level: str, log_format: str, *, process: str) -> None:
    """Configure the log. Each process calls this once, at its start. Every line has the name of the process
    (`process`): supervisor, gateway-0, shard-03."""
    structlog.contextvars.bind_contextvars(process=process)
    human = resolve_format(log_format) == "human"
    renderers: list[structlog.typing.Processor]
    if human:
        renderers = [
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            # The default formatter of structlog shows local variables, which may contain payloads and keys.
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                pad_event_to=0,
                exception_formatter=structlog.dev.plain_traceback,
            ),
        ]
    else:
        renderers = [
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=_json),
        ]
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, structlog.processors.add_log_level, *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=_ErrorFreeStream(sys.stderr)),  # type: ignore[arg-type]
        cache_logger_on_first_use=True,
    )
