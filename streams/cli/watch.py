"""`streams watch`: print new records of many boxes as the server pushes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from streams.cli import output
from streams.cli.records import present_fields
from streams.cli.starts import seq_before, start_ts, time_options
from streams.cli.suggestions import BOX_NAME
from streams.cli.verbs import ServerTarget, example, server_options

if TYPE_CHECKING:
    from streams.client.answers import Record


@example(
    "streams watch orders --from 0 -n 2",
    "streams watch orders notes --from 0 -n 3 --data",
    "streams watch orders --since 1h --match 'kit*' -n 1",
)
@click.command("watch")
@click.argument("boxes", nargs=-1, required=True, type=BOX_NAME)
@click.option("--from", "from_seq", type=int, help="Start after this seq (default: only new records).")
@time_options
@click.option("-n", "--limit", type=click.IntRange(1), help="Exit after this many records.")
@click.option("--match", metavar="TAG", help="Print only records with this tag; `user-*` matches a prefix.")
@click.option("--node", help="Skip records that this node wrote.")
@click.option("--data", "data_only", is_flag=True, help="Print only the data of each record.")
@server_options
def watch(
    target: ServerTarget,
    boxes: tuple[str, ...],
    from_seq: int | None,
    since: int | None,
    at: int | None,
    limit: int | None,
    match: str | None,
    node: str | None,
    data_only: bool,
) -> None:
    """Print new records of BOXES until Ctrl-C. The server pushes them over one connection.

    Each line is a record with the name of its `box`. Warnings on standard error report lost records and
    deleted boxes. The server sends all records of the boxes; --match selects here.
    """
    from streams.client.answers import BoxDeleted, Record, Tombstone

    from_ts = start_ts(since, at, **{"from": from_seq})

    printer = output.RecordPrinter(as_json=target.as_json, data_only=data_only, with_box=True)
    with target.client(is_patient=True) as client:
        count = 0
        starts: dict[str, int | None] = dict.fromkeys(boxes, from_seq)
        if from_ts is not None:
            starts = {box: seq_before(client.box(box), from_ts) for box in boxes}
        for box, item in client.watch(starts, node=node, raw_data=True):
            if isinstance(item, Record):
                if match is not None and not _has_tag(item, match):
                    continue
                printer([_encode_record(item)], box)
                count += 1
                if count == limit:
                    return
            elif isinstance(item, Tombstone):
                output.warn(f"{box}: records {item.gap_from} to {item.gap_to} are gone ({item.reason})")
            elif isinstance(item, BoxDeleted):
                output.warn(f"{box} was deleted")


def _has_tag(record: Record, match: str) -> bool:
    tag = record.tag or ""
    return tag.startswith(match[:-1]) if match.endswith("*") else tag == match


def _encode_record(record: Record) -> bytes:
    import msgspec

    return msgspec.json.encode(present_fields(record))
