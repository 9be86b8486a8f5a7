"""`streams txn`: open transactions and committed epochs of writers such as Spark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from streams.cli import output
from streams.cli.suggestions import VerbGroup
from streams.cli.verbs import ServerTarget, example, server_options, yes_option

if TYPE_CHECKING:
    from streams.direct import Shards


@click.group("txn", cls=VerbGroup)
def command() -> None:
    """Show and clean up transactions of writers such as Spark. Shards store their rows until the commit.

    Connects to the shards directly: by Unix socket on the server's machine, else by TCP (STREAMS_SHARD_HOST).
    """


@contextmanager
def _shards(target: ServerTarget) -> Iterator[Shards]:
    from streams.client.retry import Retry
    from streams.direct import Shards

    context = target.resolve()
    retry = Retry(total_s=10.0, unreachable_s=0)
    with Shards(context.url, key=context.key or None, retry=retry) as shards:
        yield shards


@example("streams txn ls")
@command.command("ls")
@click.argument("prefix", default="")
@server_options
def ls(target: ServerTarget, prefix: str) -> None:
    """List the transactions of writers whose names begin with PREFIX.

    Shows open transactions, commits whose rows are still being rendered, and the last committed epoch of
    each writer. Exit code 5 if there are none.
    """
    columns = ("writer", "state", "epoch", "query", "records", "bytes", "expires_ts", "committed_ts")
    with _shards(target) as shards:
        rows = _rows(shards, prefix)
    if not output.show_rows(columns, rows, as_json=target.as_json):
        raise output.Nothing("no matching writer has an open or committed transaction")


def _rows(shards: Shards, prefix: str) -> list[dict[str, Any]]:
    """Return one row per writer, epoch and state, summed over all shards."""
    rows: dict[tuple[str, int, str], dict[str, Any]] = {}
    for shard in range(shards.count):
        state = shards.txn_list(shard, prefix=prefix)
        for open_txn in state.pending:
            fresh = {
                "writer": open_txn.writer,
                "state": "open",
                "epoch": open_txn.epoch,
                "query": open_txn.query,
            }
            fresh |= {"records": 0, "bytes": 0, "expires_ts": 0}
            row = rows.setdefault((open_txn.writer, open_txn.epoch, "open"), fresh)
            row["records"] += open_txn.records
            row["bytes"] += open_txn.bytes
            row["expires_ts"] = max(row["expires_ts"], open_txn.expires_ms)
        for commit in state.rendering:
            fresh = {"writer": commit.writer, "state": "rendering", "epoch": commit.epoch, "records": 0}
            row = rows.setdefault((commit.writer, commit.epoch, "rendering"), fresh)
            row["records"] += commit.records
        for mark in state.marks:
            fresh = {"writer": mark.writer, "state": "committed", "epoch": mark.epoch, "query": mark.query}
            row = rows.setdefault((mark.writer, mark.epoch, "committed"), fresh | {"committed_ts": 0})
            row["committed_ts"] = max(row["committed_ts"], mark.at_ms)
    return [rows[key] for key in sorted(rows)]


@example("streams txn abort nightly 7 --yes")
@command.command("abort")
@click.argument("writer")
@click.argument("epoch", type=int)
@yes_option
@server_options
def abort(target: ServerTarget, writer: str, epoch: int, yes: bool) -> None:
    """Delete the uncommitted rows of EPOCH of WRITER. The job must write them again. Exit code 5 if there are
    none."""
    from streams.direct import Txn

    with _shards(target) as shards:
        output.confirm(f"Delete the uncommitted rows of epoch {epoch} of {writer}?", yes=yes)
        replies = [shards.txn_abort(shard, Txn(writer, epoch)) for shard in range(shards.count)]
    freed_bytes = sum(reply.bytes for reply in replies)
    if not freed_bytes:
        raise output.Nothing(
            f"epoch {epoch} of {writer} has no uncommitted rows; `streams txn ls` lists them"
        )
    output.show_facts(
        {"writer": writer, "epoch": epoch, "aborted": True, "bytes": freed_bytes}, as_json=target.as_json
    )


@example("streams txn forget weekly --yes")
@command.command("forget")
@click.argument("writer")
@yes_option
@server_options
def forget(target: ServerTarget, writer: str, yes: bool) -> None:
    """Forget WRITER: delete its uncommitted rows and the record of its last committed epoch.

    Only for a writer that will not return: if its job repeats a committed epoch, the rows are written a
    second time. Exit code 5 if no shard knows the writer.
    """
    from streams.direct import Txn

    with _shards(target) as shards:
        output.confirm(
            f"Forget {writer}? If its job repeats a committed epoch, the rows are duplicated.", yes=yes
        )
        txn = Txn(writer, 0)
        replies = [shards.txn_abort(shard, txn, forgets=True) for shard in range(shards.count)]
    if not any(reply.is_forgotten or reply.parcels for reply in replies):
        raise output.Nothing(f"no shard knows the writer {writer}; `streams txn ls` lists the writers")
    output.show_facts({"writer": writer, "forgotten": True}, as_json=target.as_json)
