"""The `streams` command: a group of verbs, each in its own file and imported only when it is used.

serve, config, completion             run a server; its settings; completion of a shell
boxes, records, queues, groups, routers, txns     what is in a server
status, top, doctor, bench            how a server is
archive, pipeline                     a box as a file of lines; jobs of Spark
backup, restore, verify, repair, inspect, takeover      data directories
contexts, contexts_file               servers by name

verbs, output                         what all verbs share; the only printer
shardlinks, shardfolders, pacing      sockets and folders of shards, and how fast they are read
signing                               keys of backups
pipeline_options, pipeline_session    options of the jobs of Spark, and the session that runs them

Exit codes: 0 done, 1 a bug of ours, 2 refused, 3 busy, 4 uncertain, 5 nothing to show, 6 data is damaged.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click

from streams import __version__
from streams.cli import output

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

#: verb -> (the module with its `command`, or module:name; what it does). The list of verbs is shown from
#: here, so `streams --help` loads none of them. Modules import what they need inside the command.
COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "serve": ("streams.cli.serve", "Run a server in the foreground."),
    "append": ("streams.cli.records:append", "Append records, from arguments or standard input."),
    "read": ("streams.cli.records:read", "Read records."),
    "tail": ("streams.cli.records:tail", "The last records, and those that come."),
    "watch": ("streams.cli.records:watch", "Records of many boxes as they come."),
    "delete": ("streams.cli.records:delete", "Delete records by tag or position."),
    "ls": ("streams.cli.boxes:ls", "List boxes."),
    "box": ("streams.cli.boxes", "Make, look at, change and delete a box."),
    "queue": ("streams.cli.queues", "Claim, ack and work jobs."),
    "group": ("streams.cli.groups", "Cursors that a box keeps for its readers."),
    "router": ("streams.cli.routers", "Copy records from box to box."),
    "txn": ("streams.cli.txns", "Transactions: what is held, and what was committed."),
    "export": ("streams.cli.archive:export", "Write a box to a file of lines."),
    "import": ("streams.cli.archive:import_", "Append a file of lines to a box."),
    "pipeline": ("streams.cli.pipeline", "Jobs over boxes with Spark: archive, backfill, replay, …"),
    "backup": ("streams.cli.backup", "Copy a server's data elsewhere."),
    "restore": ("streams.cli.restore", "Put a backup into an empty data directory."),
    "takeover": ("streams.cli.takeover", "Make a server the owner of its cold store."),
    "verify": ("streams.cli.verify", "Look at every byte of a server's data."),
    "repair": ("streams.cli.repair", "Make damaged data whole again."),
    "inspect": ("streams.cli.inspect", "What stands in the files of a server."),
    "status": ("streams.cli.status:status", "How the server is."),
    "whoami": ("streams.cli.status:whoami", "What your key allows, its limits, and what it uses."),
    "top": ("streams.cli.top", "The busiest boxes, live."),
    "doctor": ("streams.cli.doctor:doctor", "Find out what is wrong."),
    "bench": ("streams.cli.bench", "Measure the server from here."),
    "config": ("streams.cli.config", "Settings of a server."),
    "context": ("streams.cli.contexts", "Servers by name."),
    "completion": ("streams.cli.completion", "Completion for your shell."),
}


#: They read all there is, mostly beside a server that runs and comes first.
_STEP_ASIDE: Final = frozenset(("backup", "verify"))
_NICENESS: Final = 10

#: With these the interpreter is not taken down at the end. Threads of obstore outlive a call that failed, and
#: abort an interpreter that is being taken down around them: on a busy machine one exit in four. A supervisor
#: is gone sooner without.
_LEFT_AT_ONCE: Final = frozenset(("obstore", "gateway.supervise.supervisor"))


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
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name or "command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        found = [(name, text) for name, (_, text) in COMMANDS.items() if name.startswith(incomplete)]
        verbs = [CompletionItem(name, help=text) for name, text in found]
        return verbs + click.Command.shell_complete(self, ctx, incomplete)


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
    if _STEP_ASIDE.intersection(sys.argv[1:2]):
        os.nice(_NICENESS)
    code = run(sys.argv[1:])
    if not _LEFT_AT_ONCE.isdisjoint(sys.modules):
        from streams.process import leave

        leave(code)
    sys.exit(code)
