"""The `streams` command: a group of verbs, each in its own file and imported only when it is used or listed.

Exit codes: 0 done, 1 a bug of ours, 2 refused, 3 busy, 4 uncertain, 5 nothing to show, 6 data is damaged.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Final

import click

from streams import __version__
from streams.cli import output

#: verb -> the module with its `command`, or module:name. Modules import what they need inside the command.
COMMANDS: Final[dict[str, str]] = {
    "serve": "streams.cli.serve",
    "append": "streams.cli.records:append",
    "read": "streams.cli.records:read",
    "tail": "streams.cli.records:tail",
    "watch": "streams.cli.records:watch",
    "delete": "streams.cli.records:delete",
    "ls": "streams.cli.boxes:ls",
    "box": "streams.cli.boxes",
    "queue": "streams.cli.queues",
    "group": "streams.cli.groups",
    "router": "streams.cli.routers",
    "export": "streams.cli.archive:export",
    "import": "streams.cli.archive:import_",
    "pipeline": "streams.cli.pipeline",
    "backup": "streams.cli.backup",
    "restore": "streams.cli.restore",
    "verify": "streams.cli.verify",
    "repair": "streams.cli.repair",
    "inspect": "streams.cli.inspect",
    "status": "streams.cli.status:status",
    "top": "streams.cli.top",
    "doctor": "streams.cli.status:doctor",
    "bench": "streams.cli.bench",
    "config": "streams.cli.config",
    "context": "streams.cli.contexts",
    "completion": "streams.cli.completion",
}


class _Ended(Exception):
    """Ended from outside: Ctrl-C, or nobody reads what is printed. click would have its own say on either."""


class _Verbs(click.Group):
    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, BrokenPipeError) as error:
            raise _Ended from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name or "command")
        return command


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"streams {__version__}")
        ctx.exit()


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_show_version,
    help="Show the version.",
)
def cli() -> None:
    """A persistent event engine: named append-only logs behind a clean JSON HTTP API.

    Data goes to standard output, talk to standard error. Exit codes: 0 done, 1 a bug, 2 refused, 3 busy,
    4 uncertain, 5 nothing to show, 6 damaged data.
    """


def run(argv: Sequence[str]) -> int:
    """The exit code. The one place where an error becomes a message."""
    try:
        result = cli.main(list(argv), prog_name="streams", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except _Ended as ended:
        is_unread = isinstance(ended.__cause__, BrokenPipeError)
        return output.give_up_quietly() if is_unread else output.EXIT_INTERRUPTED
    except (click.Abort, KeyboardInterrupt):
        return output.EXIT_INTERRUPTED
    except Exception as error:
        return output.report(error)
    return result if isinstance(result, int) else output.EXIT_DONE


def main() -> None:
    code = run(sys.argv[1:])
    if "obstore" in sys.modules:
        # Its threads outlive a call that failed, and abort an interpreter that is being taken down around
        # them: on a busy machine one exit in four. Nothing of ours is left to be done.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
