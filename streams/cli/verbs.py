"""Parts that all verbs share: decorators, examples, number options, and the connection to a server.

The server is taken from the first of these that is set: `--url`, `--context`, STREAMS_URL, STREAMS_CONTEXT,
the current context (`streams context use`), the server on this machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from streams.cli import output
from streams.cli.contexts_file import ServerContext, find

if TYPE_CHECKING:
    from streams.client._sync.client import Client

C = TypeVar("C", bound=click.Command)
F = TypeVar("F", bound=Callable[..., Any])


def example(*lines: str) -> Callable[[C], C]:
    """Add example command lines to the end of a command's help. A test runs each of them."""

    def add(command: C) -> C:
        command.examples = lines  # type: ignore[attr-defined]
        command.epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
        return command

    return add


def examples_of(command: click.Command) -> tuple[str, ...]:
    lines: tuple[str, ...] = getattr(command, "examples", ())
    return lines


class ServerTarget:
    """The server that a command talks to, and the output format (`as_json`)."""

    def __init__(self, url: str | None, key: str | None, context: str | None, as_json: bool) -> None:
        self._url = url
        self._key = key
        self._context = context
        self.as_json = as_json

    def resolve(self) -> ServerContext:
        if self._url:
            return ServerContext(self._url, self._key or os.environ.get("STREAMS_KEY") or "")
        if self._context is None and os.environ.get("STREAMS_URL"):
            return ServerContext(os.environ["STREAMS_URL"], self._key or os.environ.get("STREAMS_KEY") or "")
        context = find(self._context or os.environ.get("STREAMS_CONTEXT") or None)
        return ServerContext(context.url, self._key or os.environ.get("STREAMS_KEY") or context.key)

    @contextmanager
    def client(self, *, is_patient: bool = False, retry_s: float = 10.0) -> Iterator[Client]:
        """Open a client that reports an unreachable server at once.

        A failed request is retried for `retry_s`. With `is_patient`, for commands that run long, every
        request after the first answer is retried for 60 s, also while the server is unreachable.
        """
        from streams.client._sync.client import Client
        from streams.client.retry import Retry

        context = self.resolve()
        retry = Retry(total_s=retry_s, unreachable_s=0)
        with Client(context.url, key=context.key or None, retry=retry) as client:
            if is_patient:
                client.health()
                client.retry = Retry(total_s=60)
            yield client


def server_options(function: F) -> F:
    """Add the server options to a verb, and pass a `Target` as its first argument."""

    def call_with_target(
        url: str | None, key: str | None, context: str | None, as_json: bool, /, *args: Any, **more: Any
    ) -> Any:
        return function(ServerTarget(url, key, context, as_json), *args, **more)

    def callback(**params: Any) -> Any:
        return call_with_target(
            params.pop("url"), params.pop("key"), params.pop("context"), params.pop("as_json"), **params
        )

    callback.__name__, callback.__doc__ = function.__name__, function.__doc__
    callback.__click_params__ = getattr(function, "__click_params__", [])  # type: ignore[attr-defined]
    options = (
        click.option("--url", metavar="URL", help="URL of the server."),
        click.option("--key", "--token", "key", metavar="KEY", help="API key."),
        click.option("--context", metavar="NAME", help="Name of the server in `streams context ls`."),
        click.option("--json", "as_json", is_flag=True, help="Print JSON lines, also on a terminal."),
    )
    command: Any = callback
    for option in reversed(options):
        command = option(command)
    return command  # type: ignore[no-any-return]


yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")


class _Number(click.ParamType[int]):
    """A number, with or without a unit, converted to an integer in the smallest unit."""

    def __init__(self, name: str, units: dict[str, int]) -> None:
        self.name = name
        self._units = units

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(value).lower())
        if match is None or match[2] not in self._units:
            units = ", ".join(unit for unit in self._units if unit)
            self.fail(f"{value!r} is not a number, optionally followed by one of {units}", param, ctx)
        return round(float(match[1]) * self._units[match[2]])


#: Milliseconds: `1500`, `30s`, `7d`.
MILLIS = _Number(
    "time", {"": 1, "ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
)
#: Bytes: `4096`, `64KiB`, `1.5GB`.
BYTES = _Number(
    "size",
    {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30},
)


def parse_json(text: str, what: str) -> Any:
    import msgspec

    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise output.Refusal(
            f"{what}: {text!r} is not valid JSON ({error}); quote text: '\"like this\"'"
        ) from None
