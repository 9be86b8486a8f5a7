"""`streams router`: continuous copies from box to box."""

from __future__ import annotations

import click

from streams.cli import output
from streams.cli.records import match_of
from streams.cli.suggestions import BOX_NAME, ROUTER_NAME, VerbGroup
from streams.cli.verbs import ServerTarget, example, server_options, yes_option


@click.group("router", cls=VerbGroup)
def command() -> None:
    """Copy each record that is appended to one box into another, in order, exactly once."""


@example(
    "streams router add orders-audit orders audit",
    "streams router add kitchen orders kitchen --match 'kitchen*' --from 0",
)
@command.command("add")
@click.argument("router", type=ROUTER_NAME)
@click.argument("source", type=BOX_NAME)
@click.argument("dest", type=BOX_NAME)
@click.option("--match", metavar="TAG", help="Only records with this tag; `user-*` matches a prefix.")
@click.option(
    "--from", "from_seq", type=int, help="Start after this seq of the source (default: new records only)."
)
@click.option("--no-node", is_flag=True, help="Do not copy the node.")
@click.option("--no-tag", is_flag=True, help="Do not copy the tag.")
@click.option("--no-create", is_flag=True, help="Fail if the destination does not exist.")
@click.option("--allow-cycle", is_flag=True, help="Allow a cycle; a record is copied at most 16 times.")
@server_options
def add(
    target: ServerTarget,
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
    """Create or change ROUTER, which copies from SOURCE to DEST."""
    with target.client() as client:
        reply = client.put_router(
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
    facts = {"router": reply.router, "source": reply.source, "dest": reply.dest, "created": reply.created}
    output.show_facts(facts, as_json=target.as_json)


@example("streams router ls --source orders")
@command.command("ls")
@click.argument("prefix", default="")
@click.option("--source", default="", help="Only routers from this box.")
@click.option("--dest", default="", help="Only routers into this box.")
@server_options
def ls(target: ServerTarget, prefix: str, source: str, dest: str) -> None:
    """List the routers whose names begin with PREFIX. Exit code 5 if there are none."""
    columns = ("router", "source", "dest", "filter")
    with target.client() as client:
        routers = client.routers(prefix, source=source, dest=dest)
        rows = ({column: getattr(router, column) for column in columns} for router in routers)
        if not output.show_rows(columns, rows, as_json=target.as_json):
            raise output.Nothing("no router matches; `streams router ls` lists all routers")


@example("streams router show orders-audit")
@command.command("show")
@click.argument("router", type=ROUTER_NAME)
@server_options
def show(target: ServerTarget, router: str) -> None:
    """Show the settings and the progress of ROUTER."""
    import msgspec

    with target.client() as client:
        fields = msgspec.structs.asdict(client.router(router))
    output.show_facts(fields, as_json=target.as_json)


@example("streams router rm orders-audit --yes")
@command.command("rm")
@click.argument("router", type=ROUTER_NAME)
@yes_option
@server_options
def rm(target: ServerTarget, router: str, yes: bool) -> None:
    """Delete ROUTER. Existing copies stay. Exit code 5 if it does not exist."""
    with target.client() as client:
        output.confirm(f"Delete the router {router}?", yes=yes)
        if not client.drop_router(router):
            raise output.Nothing(f"router {router!r} does not exist; `streams router ls` lists the routers")
    output.show_facts({"router": router, "deleted": True}, as_json=target.as_json)
