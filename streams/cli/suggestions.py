"""Names for mistyped verbs, and names of the server for shell completion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from streams.client._sync.client import Client

#: A shell waits for this: better no names than a slow prompt.
_ANSWER_S = 1.0
_NAMES_MAX = 100


class VerbGroup(click.Group):
    """A group of verbs that answers a mistyped one with those that are meant most likely."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name and not name.startswith("-") and self.get_command(ctx, name) is None:
            verbs = self.list_commands(ctx)
            near = _nearest(name, verbs)
            hint = f"did you mean {near}?" if near else f"one of {', '.join(sorted(verbs))}"
            ctx.fail(f"there is no command {name!r}; {hint}")
        return super().resolve_command(ctx, args)


def _nearest(name: str, verbs: Sequence[str]) -> str:
    from difflib import get_close_matches

    longer = [verb for verb in verbs if verb.startswith(name)]
    return " or ".join(repr(verb) for verb in (longer or get_close_matches(name, verbs, n=2)))


class _ServerName(click.ParamType[str]):
    """A name that a shell can complete with those that the server has."""

    name = "text"

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from itertools import islice

        from click.shell_completion import CompletionItem

        from streams.cli.verbs import ServerTarget
        from streams.client._sync.client import Client
        from streams.client.retry import Retry
        from streams.protocol.errors import StreamsError

        url, key, context_name = (ctx.params.get(name) for name in ("url", "key", "context"))
        try:
            context = ServerTarget(url, key, context_name, False).resolve()
            retry = Retry(total_s=0, unreachable_s=0)
            with Client(context.url, key=context.key or None, retry=retry, timeout=_ANSWER_S) as client:
                names = _names(client, self.kind, incomplete)
                return [CompletionItem(name) for name in islice(names, _NAMES_MAX)]
        except (StreamsError, click.ClickException):
            return []  # a shell shows no errors


BOX_NAME = _ServerName("box")
QUEUE_NAME = _ServerName("queue")
ROUTER_NAME = _ServerName("router")
SCHEDULE_NAME = _ServerName("schedule")


def _names(client: Client, kind: str, prefix: str) -> Iterator[str]:
    if kind == "router":
        return (router.router for router in client.routers(prefix))
    if kind == "schedule":
        return (schedule.schedule for schedule in client.schedules.list(prefix))
    boxes = client.boxes(prefix, kind="queue" if kind == "queue" else "", page_size=_NAMES_MAX)
    return (box.box for box in boxes)
