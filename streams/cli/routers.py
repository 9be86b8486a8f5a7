"""`streams router`: copies from box to box."""

from __future__ import annotations

import click

from streams.cli import output
from streams.cli.records import match_of
from streams.cli.verbs import Target, connected, example, yes_option


@click.group("router")
def command() -> None:
    """Copy what is appended to one box into another, in order, each record once."""


@example(
    "streams router add orders-audit orders audit",
    "streams router add kitchen orders kitchen --match 'kitchen*' --from 0",
)
@command.command("add")
@click.argument("router")
@click.argument("source")
@click.argument("dest")
@click.option("--match", metavar="TAG", help="Only records with this tag; `user-*` for all that begin so.")
@click.option("--from", "from_seq", type=int, help="After this seq of the source; without it, from now on.")
@click.option("--no-node", is_flag=True, help="Copies have no node.")
@click.option("--no-tag", is_flag=True, help="Copies have no tag.")
@click.option("--no-create", is_flag=True, help="Refuse when the destination is not there.")
@click.option("--allow-cycle", is_flag=True, help="A record may come round; it stops after 16 copies.")
@connected
def add(
    target: Target,
    router: str,
    source: str,
    dest: str,
    match: str | None,
    from_seq: int | None,
    no_node: bool,
    no_tag: bool,
    no_create: bool,
    allow_cycle: bool,
) -> None:
    """Make ROUTER from SOURCE to DEST, or change it."""
    with target.client() as client:
        found = client.put_router(
            router,
            source,
            dest,
            match=match_of(match),
            from_seq=from_seq,
            preserve_node=not no_node,
            preserve_tag=not no_tag,
            create_dest=not no_create,
            allow_cycle=allow_cycle,
        )
    facts = {"router": found.router, "source": found.source, "dest": found.dest, "created": found.created}
    output.show_facts(facts, as_json=target.as_json)


@example("streams router ls --source orders")
@command.command("ls")
@click.argument("prefix", default="")
@click.option("--source", default="", help="Only those that copy from this box.")
@click.option("--dest", default="", help="Only those that copy into this box.")
@connected
def ls(target: Target, prefix: str, source: str, dest: str) -> None:
    """List routers. Exit code 5 when there is none."""
    columns = ("router", "source", "dest", "filter")
    with target.client() as client:
        routers = client.routers(prefix, source=source, dest=dest)
        rows = ({column: getattr(router, column) for column in columns} for router in routers)
        if not output.show_rows(columns, rows, as_json=target.as_json):
            raise output.Nothing("there is no such router")


@example("streams router show orders-audit")
@command.command("show")
@click.argument("router")
@connected
def show(target: Target, router: str) -> None:
    """Show what ROUTER does and how far it is."""
    import msgspec

    with target.client() as client:
        fields = msgspec.structs.asdict(client.router(router))
    output.show_facts(fields, as_json=target.as_json)


@example("streams router rm orders-audit --yes")
@command.command("rm")
@click.argument("router")
@yes_option
@connected
def rm(target: Target, router: str, yes: bool) -> None:
    """End ROUTER. Copies that were made stay. Exit code 5 when it was not there."""
    with target.client() as client:
        output.confirm(f"End the router {router}?", yes=yes)
        if not client.drop_router(router):
            raise output.Nothing(f"there is no router {router}")
    output.show_facts({"router": router, "deleted": True}, as_json=target.as_json)
