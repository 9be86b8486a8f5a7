"""`streams takeover`: make a data directory the owner of a cold store, in place of another one."""

from __future__ import annotations

import sys
from contextlib import closing

import click

from streams.cli import output
from streams.cli.backup import load_config
from streams.cli.verbs import example


@example("streams takeover --data-dir restored --cold-dir cold --yes")
@click.command("takeover")
@click.option("--data-dir", metavar="DIR", help="Data directory of the new owner. [STREAMS_DATA_DIR]")
@click.option("--cold-dir", metavar="LOCATION", help="The cold store. [STREAMS_COLD_DIR]")
@click.option("--yes", is_flag=True, help="Do not ask before the store is taken from another server.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(data_dir: str | None, cold_dir: str | None, yes: bool, as_json: bool) -> int:
    """Make a data directory the owner of its cold store.

    A server does not start on a cold store (STREAMS_COLD_DIR) that belongs to another server. Take the store
    over if that server is gone for good, or if this data directory was restored in its place. Stop the other
    server first: it detects the new owner only after a few seconds, and appends that its boxes of class
    object acknowledge until then are lost. Nothing in the store is deleted: the old owner can take it back.
    """
    from shard.offline.claim_cold import owner_of
    from shard.storage.cold import ColdDamaged, ColdUnavailable, ownership
    from streams.cli.shardfolders import cold_store, open_directory, read_manifest

    config = load_config(data_dir=data_dir, cold_dir=cold_dir)
    store = cold_store(config.cold_dir)
    if store is None:
        raise output.Refusal("no cold store is set; name it with --cold-dir or STREAMS_COLD_DIR")
    with closing(open_directory(config.data_dir.absolute())) as directory:
        owner = owner_of(read_manifest(directory).server, str(directory.path))
    previous_owner = ""
    try:
        try:
            current_owner = ownership.read_owner(store)
        except ColdDamaged as damage:
            previous_owner = f"an unknown owner ({damage.reason})"
        else:
            previous_owner = (
                "" if current_owner is None or current_owner.server == owner.server else str(current_owner)
            )
        if previous_owner and not yes:
            _ask(config.cold_dir, previous_owner)
        ownership.take_over(store, owner)
    except ColdUnavailable as error:
        raise output.BusyRefusal(
            f"{config.cold_dir} cannot be used now ({error.reason}). Check the address and, for an object "
            "store, the credentials in the environment; then repeat the command"
        ) from error
    text = f"{config.cold_dir} now belongs to {owner}" + (
        f"; the previous owner was {previous_owner}" if previous_owner else ""
    )
    facts = {
        "cold_dir": config.cold_dir,
        "server": owner.server,
        "data_dir": owner.data_dir,
        "before": previous_owner,
    }
    output.show_result(text, facts, as_json=as_json)
    return output.EXIT_DONE


def _ask(location: str, previous_owner: str) -> None:
    try:
        if click.confirm(f"{location} belongs to {previous_owner}. Is that server stopped?", err=True):
            return
    except click.Abort:
        if sys.stdin.isatty():
            raise
        raise output.Refusal(
            f"nothing was changed: {location} belongs to {previous_owner}. Stop that server, then add --yes"
        ) from None
    raise output.Refusal("cancelled; nothing was changed")
