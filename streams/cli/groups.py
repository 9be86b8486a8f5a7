"""`streams group`: cursors that a box keeps for its readers."""

from __future__ import annotations

import click

from streams.cli import output
from streams.cli.verbs import Target, connected, example, yes_option


@click.group("group")
def command() -> None:
    """Cursors that a box keeps for its readers: `streams read BOX --group NAME --commit` uses them."""


@example("streams group ls orders")
@command.command("ls")
@click.argument("box")
@click.argument("prefix", default="")
@connected
def ls(target: Target, box: str, prefix: str) -> None:
    """List the groups of BOX. Exit code 5 when there is none."""
    import msgspec

    with target.client() as client:
        rows = (msgspec.structs.asdict(group) for group in client.box(box).groups(prefix))
        if not output.show_rows(("group", "cursor", "lag", "updated_ts"), rows, as_json=target.as_json):
            raise output.Nothing(f"{box} has no such group")


@example("streams group show orders billing")
@command.command("show")
@click.argument("box")
@click.argument("group")
@connected
def show(target: Target, box: str, group: str) -> None:
    """Show the cursor of GROUP and how far it is behind."""
    import msgspec

    with target.client() as client:
        state = client.box(box).group(group).state()
    output.show_facts(msgspec.structs.asdict(state), as_json=target.as_json)


@example("streams group commit orders billing 2")
@command.command("commit")
@click.argument("box")
@click.argument("group")
@click.argument("cursor", type=int)
@click.option("--if-cursor", type=int, help="Only when the cursor is here now.")
@connected
def commit(target: Target, box: str, group: str, cursor: int, if_cursor: int | None) -> None:
    """Set the cursor of GROUP, which is made if it is not there. `streams read --group` goes on after it."""
    with target.client() as client:
        client.box(box).group(group).commit(cursor, if_cursor=if_cursor)
    output.show_facts({"box": box, "group": group, "cursor": cursor}, as_json=target.as_json)


@example("streams group rm orders billing --yes")
@command.command("rm")
@click.argument("box")
@click.argument("group")
@yes_option
@connected
def rm(target: Target, box: str, group: str, yes: bool) -> None:
    """Forget the cursor of GROUP. Exit code 5 when it was not there."""
    with target.client() as client:
        output.confirm(f"Forget the cursor of {group} of {box}?", yes=yes)
        if not client.box(box).group(group).drop():
            raise output.Nothing(f"{box} has no group {group}")
    output.show_facts({"box": box, "group": group, "deleted": True}, as_json=target.as_json)
