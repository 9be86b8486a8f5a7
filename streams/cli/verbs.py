"""What all verbs share: how a command is made, its examples, and how it reaches a server.

Which server: `--url`, else `--context`, else STREAMS_URL, else STREAMS_CONTEXT, else the context in use
(`streams context use`), else this machine's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from streams.cli import output
from streams.cli.contexts_file import Context, find

if TYPE_CHECKING:
    from streams.client._sync.client import Client

C = TypeVar("C", bound=click.Command)
F = TypeVar("F", bound=Callable[..., Any])


def example(*lines: str) -> Callable[[C], C]:
    """Lines that a person could type, shown at the end of the help. A test runs each of them."""

    def add(command: C) -> C:
        command.examples = lines  # type: ignore[attr-defined]
        command.epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
        return command

    return add


def examples_of(command: click.Command) -> tuple[str, ...]:
    found: tuple[str, ...] = getattr(command, "examples", ())
    return found


class Target:
    """The server a command talks to, and whether it wants JSON."""

    def __init__(self, url: str | None, key: str | None, context: str | None, as_json: bool) -> None:
        self._url = url
        self._key = key
        self._context = context
        self.as_json = as_json

    def resolved(self) -> Context:
        if self._url:
            return Context(self._url, self._key or os.environ.get("STREAMS_KEY") or "")
        if self._context is None and os.environ.get("STREAMS_URL"):
            return Context(os.environ["STREAMS_URL"], self._key or os.environ.get("STREAMS_KEY") or "")
        found = find(self._context or os.environ.get("STREAMS_CONTEXT") or None)
        return Context(found.url, self._key or os.environ.get("STREAMS_KEY") or found.key)

    @contextmanager
    def client(self, *, is_patient: bool = False, retry_s: float = 10.0) -> Iterator[Client]:
        """Someone at a terminal wants to hear at once that nobody is there. A command that runs for long is
        patient once it has been answered. `retry_s`: how long a request that fails is repeated."""
        from streams.client._sync.client import Client
        from streams.client.retry import Retry

        context = self.resolved()
        retry = Retry(total_s=retry_s, unreachable_s=0)
        with Client(context.url, key=context.key or None, retry=retry) as client:
            if is_patient:
                client.health()
                client.retry = Retry(total_s=60)
            yield client


def connected(function: F) -> F:
    """Gives a verb the options of a server, and a `Target` as its first argument."""

    def wrapped(
        url: str | None, key: str | None, context: str | None, as_json: bool, /, *args: Any, **more: Any
    ) -> Any:
        return function(Target(url, key, context, as_json), *args, **more)

    def called(**given: Any) -> Any:
        return wrapped(
            given.pop("url"), given.pop("key"), given.pop("context"), given.pop("as_json"), **given
        )

    called.__name__, called.__doc__ = function.__name__, function.__doc__
    called.__click_params__ = getattr(function, "__click_params__", [])  # type: ignore[attr-defined]
    options = (
        click.option("--url", metavar="URL", help="Server to talk to."),
        click.option("--key", "--token", "key", metavar="KEY", help="API key."),
        click.option("--context", metavar="NAME", help="Server by the name given to `streams context add`."),
        click.option("--json", "as_json", is_flag=True, help="JSON lines, also on a terminal."),
    )
    found: Any = called
    for option in reversed(options):
        found = option(found)
    return found  # type: ignore[no-any-return]


yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask.")


class _Number(click.ParamType[int]):
    """A whole number, or one with a unit."""

    def __init__(self, name: str, units: dict[str, int]) -> None:
        self.name = name
        self._units = units

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(value).lower())
        if found is None or found[2] not in self._units:
            units = ", ".join(unit for unit in self._units if unit)
            self.fail(f"{value!r} is not a number, alone or with one of {units}", param, ctx)
        return round(float(found[1]) * self._units[found[2]])


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
            f"{what}: {text!r} is not JSON ({error}); text needs quotes: '\"like this\"'"
        ) from None
