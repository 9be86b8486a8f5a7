"""`streams group`: cursors that a box stores for its readers."""

from __future__ import annotations

import click

from streams.cli import output
from streams.cli.suggestions import BOX_NAME, VerbGroup
from streams.cli.verbs import ServerTarget, example, server_options, yes_option


@click.group("group", cls=VerbGroup)
def command() -> None:
    """Show and move the cursors that a box stores for reader groups.

    `streams read BOX --group NAME --commit` reads from the cursor and moves it.
    """


@example("streams group ls orders")
@command.command("ls")
@click.argument("box", type=BOX_NAME)
@click.argument("prefix", default="")
@server_options
def ls(target: ServerTarget, box: str, prefix: str) -> None:
    """List the groups of BOX. Exit code 5 if there are none."""
    import msgspec

    with target.client() as client:
        rows = (msgspec.structs.asdict(group) for group in client.box(box).groups(prefix))
        if not output.show_rows(("group", "cursor", "lag", "updated_ts"), rows, as_json=target.as_json):
            raise output.Nothing(f"{box} has no group whose name begins with {prefix!r}")


@example("streams group show orders billing")
@command.command("show")
@click.argument("box", type=BOX_NAME)
@click.argument("group")
@server_options
def show(target: ServerTarget, box: str, group: str) -> None:
    """Show the cursor of GROUP and its lag."""
    import msgspec

    with target.client() as client:
        state = client.box(box).group(group).state()
    output.show_facts(msgspec.structs.asdict(state), as_json=target.as_json)


@example("streams group commit orders billing 2")
@command.command("commit")
@click.argument("box", type=BOX_NAME)
@click.argument("group")
@click.argument("cursor", type=int)
@click.option("--if-cursor", type=int, help="Only if this is the current cursor.")
@server_options
def commit(target: ServerTarget, box: str, group: str, cursor: int, if_cursor: int | None) -> None:
    """Set the cursor of GROUP, and create GROUP if needed. `streams read --group` starts after the cursor."""
    with target.client() as client:
        client.box(box).group(group).commit(cursor, if_cursor=if_cursor)
    output.show_facts({"box": box, "group": group, "cursor": cursor}, as_json=target.as_json)


@example("streams group rm orders billing --yes")
@command.command("rm")
@click.argument("box", type=BOX_NAME)
@click.argument("group")
@yes_option
@server_options
def rm(target: ServerTarget, box: str, group: str, yes: bool) -> None:
    """Delete GROUP and its cursor. Exit code 5 if it does not exist."""
    with target.client() as client:
        output.confirm(f"Delete the group {group} of {box} and its cursor?", yes=yes)
        if not client.box(box).group(group).drop():
            raise output.Nothing(f"{box} has no group {group!r}; `streams group ls {box}` lists its groups")
    output.show_facts({"box": box, "group": group, "deleted": True}, as_json=target.as_json)
