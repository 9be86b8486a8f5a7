"""The `streams` command: a group of verbs, each in its own file and imported only when it is used.

serve, config, completion             run a server; show its settings; shell completion
boxes, records, watch, queues, groups, routers, schedules, txns     the contents of a server
status, top, doctor, bench            the state and the speed of a server
ndjson_files, pipeline                export and import of one box; Spark jobs
backup, restore, verify, repair, inspect, takeover      data directories
contexts, contexts_file               names for servers

starts, suggestions                   --since and --at; mistyped verbs and names for the shell
verbs, output                         decorators that all verbs share; the only printer
shardlinks, shardfolders, pacing      shard sockets, shard folders, and the rate at which they are read
signing                               keys that sign backups
pipeline_options, pipeline_session    options of the Spark jobs, and the session that runs them
pipeline_run, pipeline_tables         several Spark jobs in order; rollups of tables

Exit codes: 0 success, 1 a bug in streams, 2 refused, 3 busy, 4 uncertain, 5 nothing to show, 6 damaged data.
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
from streams.cli.suggestions import VerbGroup

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

#: verb -> (module with its `command`, or module:name; one line of help). `streams --help` prints this table
#: and loads no verb. Each module imports the rest inside the command.
COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "serve": ("streams.cli.serve", "Run a server in the foreground."),
    "append": ("streams.cli.records:append", "Append records, from arguments or standard input."),
    "read": ("streams.cli.records:read", "Read records."),
    "tail": ("streams.cli.records:tail", "Print the last records, and follow new ones."),
    "watch": ("streams.cli.watch:watch", "Print new records of many boxes as they arrive."),
    "delete": ("streams.cli.records:delete", "Delete records by tag or position."),
    "ls": ("streams.cli.boxes:ls", "List boxes."),
    "box": ("streams.cli.boxes", "Create, show, change and delete a box."),
    "queue": ("streams.cli.queues", "Claim, ack and run jobs."),
    "group": ("streams.cli.groups", "Show and move the cursors of reader groups."),
    "router": ("streams.cli.routers", "Copy records from box to box, continuously."),
    "schedule": ("streams.cli.schedules", "Append records by cron or at an interval."),
    "txn": ("streams.cli.txns", "Show and clean up transactions."),
    "export": ("streams.cli.ndjson_files:export", "Write the records of a box to an NDJSON file."),
    "import": ("streams.cli.ndjson_files:import_", "Append the records of an NDJSON file to a box."),
    "pipeline": ("streams.cli.pipeline", "Run Spark jobs over boxes: archive, backfill, replay, …"),
    "backup": ("streams.cli.backup", "Back up a server's data."),
    "restore": ("streams.cli.restore", "Restore a backup into an empty data directory."),
    "takeover": ("streams.cli.takeover", "Make a server the owner of its cold store."),
    "verify": ("streams.cli.verify", "Check every byte of a server's data."),
    "repair": ("streams.cli.repair", "Repair damaged data and report the losses."),
    "inspect": ("streams.cli.inspect", "Show the contents of data files."),
    "status": ("streams.cli.status:status", "Show the state of the server and its processes."),
    "whoami": ("streams.cli.status:whoami", "Show your key: its scopes, limits and usage."),
    "top": ("streams.cli.top", "Show the busiest boxes, live."),
    "doctor": ("streams.cli.doctor:doctor", "Find problems and print the next steps."),
    "bench": ("streams.cli.bench", "Measure the server's speed from here."),
    "config": ("streams.cli.config", "Show and check a server's settings."),
    "context": ("streams.cli.contexts", "Give servers names and choose one."),
    "completion": ("streams.cli.completion", "Print a completion script for your shell."),
}


#: Verbs that read all data, mostly beside a running server, which has priority.
_LOW_PRIORITY_VERBS: Final = frozenset(("backup", "verify"))
_NICENESS: Final = 10

#: If one of these modules is loaded, the process exits without interpreter teardown. Threads of obstore
#: outlive a failed call and abort an interpreter during teardown: one exit in four on a busy machine. A
#: supervisor exits sooner without teardown.
_EXIT_WITHOUT_TEARDOWN: Final = frozenset(("obstore", "gateway.supervise.supervisor"))


class _Interruption(Exception):
    """Ctrl-C, or the reader of the output is gone. Keeps click from handling either in its own way."""


class _Verbs(VerbGroup):
    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, BrokenPipeError) as error:
            raise _Interruption from error

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

        matches = [(name, text) for name, (_, text) in COMMANDS.items() if name.startswith(incomplete)]
        verbs = [CompletionItem(name, help=text) for name, text in matches]
        return verbs + click.Command.shell_complete(self, ctx, incomplete)


def _show_version(ctx: click.Context, _: click.Parameter, is_requested: bool) -> None:
    if is_requested:
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

    Data goes to standard output, messages to standard error. Exit codes: 0 success, 1 a bug, 2 refused,
    3 busy (retry later), 4 uncertain (it may have happened), 5 nothing to show, 6 damaged data.
    """


def run(argv: Sequence[str]) -> int:
    """Run one command and return its exit code. Every error becomes a message here."""
    try:
        result = cli.main(list(argv), prog_name="streams", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except _Interruption as interruption:
        is_unread = isinstance(interruption.__cause__, BrokenPipeError)
        return output.discard_output() if is_unread else output.EXIT_INTERRUPTED
    except (click.Abort, KeyboardInterrupt):
        return output.EXIT_INTERRUPTED
    except Exception as error:
        return output.report(error)
    return result if isinstance(result, int) else output.EXIT_DONE


def main() -> None:
    if _LOW_PRIORITY_VERBS.intersection(sys.argv[1:2]):
        os.nice(_NICENESS)
    code = run(sys.argv[1:])
    if not _EXIT_WITHOUT_TEARDOWN.isdisjoint(sys.modules):
        from streams.process import leave

        leave(code)
    sys.exit(code)
