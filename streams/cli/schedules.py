"""`streams schedule`: records that the server appends by itself when they are due."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from streams.cli import output
from streams.cli.suggestions import BOX_NAME, SCHEDULE_NAME, VerbGroup
from streams.cli.verbs import ServerTarget, example, server_options, yes_option

if TYPE_CHECKING:
    from streams.protocol.messages.replies import ScheduleState


@click.group("schedule", cls=VerbGroup)
def command() -> None:
    """Append a record to a box by a cron expression or at an interval, exactly once for each due time."""


@example(
    """streams schedule create report jobs '{"kind": "report"}' --cron '0 9 * * mon-fri' --time-zone UTC""",
    "streams schedule create tick orders 1 --every-ms 60000 --catch-up none",
)
@command.command("create")
@click.argument("schedule", type=SCHEDULE_NAME)
@click.argument("box", type=BOX_NAME)
@click.argument("data")
@click.option("--cron", help="Five fields, or @hourly, @daily, @weekly, @monthly.")
@click.option("--every-ms", type=int, help="An interval, at least 100.")
@click.option("--time-zone", default="UTC", show_default=True, help="IANA name, for --cron.")
@click.option(
    "--catch-up",
    type=click.Choice(["one", "all", "none"]),
    default="one",
    show_default=True,
    help="Which due times missed during downtime still count.",
)
@click.option("--end-ts", type=int, help="The last instant that can be due, in epoch milliseconds.")
@click.option("--tag", help="The tag of the records.")
@click.option("--node", help="The node of the records.")
@click.option("--paused", is_flag=True, help="Create it paused.")
@server_options
def create(target: ServerTarget, schedule: str, box: str, data: str, **options: Any) -> None:
    """Create or change SCHEDULE, which appends DATA, as JSON, to BOX."""
    import msgspec

    try:
        value = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise click.BadParameter(
            f"{data!r} is not JSON ({error}); quote a text twice, as in '\"text\"'"
        ) from None
    with target.client() as client:
        reply = client.schedules.put(schedule, box, value, **options)
    _show(target, reply)


@example("streams schedule ls --box jobs")
@command.command("ls")
@click.argument("prefix", default="")
@click.option("--box", default="", help="Only schedules of this box.")
@server_options
def ls(target: ServerTarget, prefix: str, box: str) -> None:
    """List the schedules whose names begin with PREFIX. Exit code 5 if there are none."""
    columns = ("schedule", "box", "cron", "every_ms", "state", "next_due", "fired_total")
    with target.client() as client:
        schedules = client.schedules.list(prefix, box=box)
        rows = ({column: getattr(each, column) for column in columns} for each in schedules)
        if not output.show_rows(columns, rows, as_json=target.as_json):
            raise output.Nothing("no schedule matches; `streams schedule ls` lists all schedules")


@example("streams schedule show report")
@command.command("show")
@click.argument("schedule", type=SCHEDULE_NAME)
@server_options
def show(target: ServerTarget, schedule: str) -> None:
    """Show the definition and the progress of SCHEDULE."""
    with target.client() as client:
        _show(target, client.schedules.get(schedule))


@example("streams schedule run report")
@command.command("run")
@click.argument("schedule", type=SCHEDULE_NAME)
@server_options
def run(target: ServerTarget, schedule: str) -> None:
    """Append the record of SCHEDULE now."""
    with target.client() as client:
        reply = client.schedules.run(schedule)
    output.show_facts(
        {"schedule": reply.schedule, "box": reply.box, "seq": reply.seq}, as_json=target.as_json
    )


@example("streams schedule pause report")
@command.command("pause")
@click.argument("schedule", type=SCHEDULE_NAME)
@server_options
def pause(target: ServerTarget, schedule: str) -> None:
    """Pause SCHEDULE: due times do not count until it is resumed."""
    with target.client() as client:
        _show(target, client.schedules.pause(schedule))


@example("streams schedule resume report")
@command.command("resume")
@click.argument("schedule", type=SCHEDULE_NAME)
@server_options
def resume(target: ServerTarget, schedule: str) -> None:
    """Resume SCHEDULE from the next due time on."""
    with target.client() as client:
        _show(target, client.schedules.resume(schedule))


@example("streams schedule rm report --yes")
@command.command("rm")
@click.argument("schedule", type=SCHEDULE_NAME)
@yes_option
@server_options
def rm(target: ServerTarget, schedule: str, yes: bool) -> None:
    """Delete SCHEDULE. Its records stay. Exit code 5 if it does not exist."""
    with target.client() as client:
        output.confirm(f"Delete the schedule {schedule}?", yes=yes)
        if not client.schedules.delete(schedule):
            raise output.Nothing(
                f"schedule {schedule!r} does not exist; `streams schedule ls` lists the schedules"
            )
    output.show_facts({"schedule": schedule, "deleted": True}, as_json=target.as_json)


def _show(target: ServerTarget, state: ScheduleState) -> None:
    import msgspec

    output.show_facts(msgspec.structs.asdict(state), as_json=target.as_json)
