"""`streams txn`: what shards hold for transactions, and which epochs were committed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from streams.cli import output
from streams.cli.verbs import Target, connected, example, yes_option

if TYPE_CHECKING:
    from streams.direct import Shards


@click.group("txn")
def command() -> None:
    """Transactions of writers such as Spark: rows that shards hold until they are committed. Talks to the
    shards themselves: by their Unix sockets, or by TCP (STREAMS_SHARD_HOST)."""


@contextmanager
def _shards(target: Target) -> Iterator[Shards]:
    from streams.client.retry import Retry
    from streams.direct import Shards

    context = target.resolved()
    retry = Retry(total_s=10.0, unreachable_s=0)
    with Shards(context.url, key=context.key or None, retry=retry) as shards:
        yield shards


@example("streams txn ls")
@command.command("ls")
@click.argument("prefix", default="")
@connected
def ls(target: Target, prefix: str) -> None:
    """List open transactions of writers whose names begin with PREFIX, commits with rows that are yet to be
    rendered, and the last committed epoch of each writer. Exit code 5 when there is none."""
    columns = ("writer", "state", "epoch", "query", "records", "bytes", "expires_ts", "committed_ts")
    with _shards(target) as shards:
        rows = _rows(shards, prefix)
    if not output.show_rows(columns, rows, as_json=target.as_json):
        raise output.Nothing("no writer has a transaction, open or committed")


def _rows(shards: Shards, prefix: str) -> list[dict[str, Any]]:
    """One row for each epoch, over all shards."""
    rows: dict[tuple[str, int, str], dict[str, Any]] = {}
    for shard in range(shards.count):
        state = shards.txn_list(shard, prefix=prefix)
        for held in state.held:
            fresh = {"writer": held.writer, "state": "open", "epoch": held.epoch, "query": held.query}
            fresh |= {"records": 0, "bytes": 0, "expires_ts": 0}
            row = rows.setdefault((held.writer, held.epoch, "open"), fresh)
            row["records"] += held.records
            row["bytes"] += held.bytes
            row["expires_ts"] = max(row["expires_ts"], held.expires_ms)
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
@connected
def abort(target: Target, writer: str, epoch: int, yes: bool) -> None:
    """Drop the rows that are held for EPOCH of WRITER. Its job has to write them again. Exit code 5 when
    nothing was held."""
    from streams.direct import Txn

    with _shards(target) as shards:
        output.confirm(f"Drop what is held for epoch {epoch} of {writer}?", yes=yes)
        dropped = [shards.txn_abort(shard, Txn(writer, epoch)) for shard in range(shards.count)]
    freed = sum(each.bytes for each in dropped)
    if not freed:
        raise output.Nothing(f"nothing is held for epoch {epoch} of {writer}")
    output.show_facts(
        {"writer": writer, "epoch": epoch, "aborted": True, "bytes": freed}, as_json=target.as_json
    )


@example("streams txn forget weekly --yes")
@command.command("forget")
@click.argument("writer")
@yes_option
@connected
def forget(target: Target, writer: str, yes: bool) -> None:
    """Forget WRITER: what is held for it, and which epoch of it was committed last. Only for a writer that
    will not come back: a job that repeats a committed epoch writes its rows again. Exit code 5 when it was
    not known."""
    from streams.direct import Txn

    with _shards(target) as shards:
        output.confirm(f"Forget {writer}? If it repeats an epoch, its rows are written again.", yes=yes)
        txn = Txn(writer, 0)
        found = [shards.txn_abort(shard, txn, forgets=True) for shard in range(shards.count)]
    if not any(each.is_forgotten or each.parcels for each in found):
        raise output.Nothing(f"no shard knows the writer {writer}")
    output.show_facts({"writer": writer, "forgotten": True}, as_json=target.as_json)
