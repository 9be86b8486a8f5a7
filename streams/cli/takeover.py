"""`streams takeover`: make a data directory the owner of its cold store, in place of another one."""

from __future__ import annotations

import sys
from contextlib import closing

import click

from streams.cli import output
from streams.cli.backup import configured
from streams.cli.verbs import example


@example("streams takeover --data-dir restored --cold-dir cold --yes")
@click.command("takeover")
@click.option("--data-dir", metavar="DIR", help="Data directory of the new owner. [STREAMS_DATA_DIR]")
@click.option("--cold-dir", metavar="PLACE", help="The cold store. [STREAMS_COLD_DIR]")
@click.option("--yes", is_flag=True, help="Do not ask before another server loses the store.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(data_dir: str | None, cold_dir: str | None, yes: bool, as_json: bool) -> int:
    """Make a data directory the owner of its cold store.

    A server refuses to start on a cold store (STREAMS_COLD_DIR) that belongs to another server. Take it over
    when that server is gone for good, or when this data directory was restored in its place. Stop the other
    server first: it notices the new owner only after a few seconds, and what its boxes of class object
    acknowledge until then is lost. Nothing in the store is removed, so the old owner can take it back.
    """
    from shard.offline.claim_cold import owner_of
    from shard.storage.cold import ColdDamaged, ColdUnavailable, ownership
    from streams.cli.shardfolders import cold_store, open_directory, read_manifest

    config = configured(data_dir=data_dir, cold_dir=cold_dir)
    store = cold_store(config.cold_dir)
    if store is None:
        raise output.Refusal("no cold store is named; name one with --cold-dir or STREAMS_COLD_DIR")
    with closing(open_directory(config.data_dir.absolute())) as directory:
        owner = owner_of(read_manifest(directory).server, str(directory.path))
    before = ""
    try:
        try:
            found = ownership.read_owner(store)
        except ColdDamaged as damage:
            before = f"an owner that cannot be told ({damage.reason})"
        else:
            before = "" if found is None or found.server == owner.server else str(found)
        if before and not yes:
            _ask(config.cold_dir, before)
        ownership.take_over(store, owner)
    except ColdUnavailable as error:
        raise output.Occupied(
            f"{config.cold_dir} cannot be used now ({error.reason}). Check its address and, of an object "
            "store, the keys in the environment; then repeat this"
        ) from error
    text = f"{config.cold_dir} belongs to {owner} now" + (f"; before, to {before}" if before else "")
    facts = {
        "cold_dir": config.cold_dir,
        "server": owner.server,
        "data_dir": owner.data_dir,
        "before": before,
    }
    output.show_result(text, facts, as_json=as_json)
    return output.EXIT_DONE


def _ask(location: str, before: str) -> None:
    try:
        if click.confirm(f"{location} belongs to {before}. Is that server stopped?", err=True):
            return
    except click.Abort:
        if sys.stdin.isatty():
            raise
        raise output.Refusal(
            f"nothing was changed: {location} belongs to {before}. Stop that server, then add --yes"
        ) from None
    raise output.Refusal("nothing was changed")
