"""`streams append | read | tail | delete`: append, print and delete records, in constant memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, Final

import click

from streams.cli import output
from streams.cli.starts import seq_before, start_ts, time_options
from streams.cli.suggestions import BOX_NAME
from streams.cli.verbs import BYTES, MILLIS, ServerTarget, example, parse_json, server_options, yes_option

if TYPE_CHECKING:
    from streams.client._sync.box import Box
    from streams.client._sync.producer import Producer, Ticket

#: Longer than any record can be: such input is not NDJSON.
LINE_BYTES_MAX: Final = 64 << 20
_PAGE_RECORDS: Final = 1000
_PAGE_BYTES: Final = 1 << 20
_WAIT_MS: Final = 25_000


# -- append


@example(
    'streams append orders \'{"item": "tea"}\' --tag kitchen',
    'printf \'{"n": 1}\\n{"n": 2}\\n\' | streams append orders -',
    "printf 'plain text\\n' | streams append notes - --text",
)
@click.command("append")
@click.argument("box", type=BOX_NAME)
@click.argument("data", nargs=-1, required=True)
@click.option("--tag", help="Tag of each record.")
@click.option("--node", help="Node that writes the records.")
@click.option("--meta", metavar="JSON", help="Metadata of each record, a JSON object.")
@click.option("--text", is_flag=True, help="Arguments and lines are text, not JSON.")
@click.option("--records", is_flag=True, help='Each line is a record: {"data": …, "tag": …}.')
@click.option("--idempotency-key", metavar="KEY", help="A repeated command with this key appends nothing.")
@click.option("--match-seq", type=int, help="Append only if the first record gets this seq.")
@click.option("--fencing-token", help="Token of a fenced box.")
@click.option(
    "--batch-records",
    type=click.IntRange(1),
    default=5000,
    show_default=True,
    help="With -: records per append.",
)
@click.option("--batch-bytes", type=BYTES, default=1 << 20, help="With -: bytes per append (default 1MiB).")
@click.option("--linger", type=MILLIS, default=5, help="With -: longest delay of a record (default 5ms).")
@server_options
def append(
    target: ServerTarget,
    box: str,
    data: tuple[str, ...],
    tag: str | None,
    node: str | None,
    meta: str | None,
    text: bool,
    records: bool,
    idempotency_key: str | None,
    match_seq: int | None,
    fencing_token: str | None,
    batch_records: int,
    batch_bytes: int,
    linger: int,
) -> None:
    """Append the JSON values DATA to BOX in one atomic append. Creates BOX if it does not exist.

    With `-` as DATA, each line of standard input becomes a record, in order and exactly once, in as many
    appends as needed. Memory use does not depend on the length of the input.
    """
    facts: dict[str, Any] = {
        "tag": tag,
        "node": node,
        "meta": None if meta is None else parse_json(meta, "--meta"),
    }
    if data == ("-",):
        if idempotency_key or match_seq is not None or fencing_token:
            raise output.Refusal(
                "--idempotency-key, --match-seq and --fencing-token cannot be used with standard input (-)"
            )
        lines = encode_lines(sys.stdin.buffer, text=text, records=records, facts=facts)
        if sys.stdin.isatty():
            output.note(f"type one {'line' if text else 'JSON value'} per record; Ctrl-D ends the input")
        with target.client(is_patient=True) as client:
            bounds = {"batch_records": batch_records, "batch_bytes": batch_bytes, "linger_ms": linger}
            _append_lines(client.box(box), lines, target.as_json, bounds)
        return
    import msgspec

    from streams.client.answers import Entry

    if text:
        for value in data:
            decode_text(os.fsencode(value), "DATA")
    values = data if text else tuple(msgspec.Raw(_parse_argument(value)) for value in data)
    entries = [Entry(value, tag, node, facts["meta"]) for value in values]
    with target.client() as client:
        reply = client.box(box).append_batch(
            entries, idempotency_key=idempotency_key, match_seq=match_seq, fencing_token=fencing_token
        )
    output.show_facts(msgspec.to_builtins(reply), as_json=target.as_json)


def _parse_argument(text: str) -> bytes:
    return parse_json_raw(os.fsencode(text), "DATA")


def decode_text(line: bytes, where: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise output.Refusal(
            f"{where}: byte {error.start + 1} is not UTF-8; convert the input first, for example with "
            "`iconv -t utf-8`"
        ) from None


def parse_json_raw(line: bytes, where: str) -> bytes:
    """Return the line if it is one JSON value. Numbers keep their digits."""
    import msgspec

    decode_text(line, where)
    try:
        return bytes(msgspec.json.decode(line, type=msgspec.Raw))
    except msgspec.DecodeError as error:
        excerpt = line[:60].decode(errors="replace")
        raise output.Refusal(
            f"{where}: {excerpt!r} is not valid JSON ({error}); put text in quotes, or add --text"
        ) from None


def encode_lines(stream: IO[bytes], *, text: bool, records: bool, facts: dict[str, Any]) -> Iterator[bytes]:
    """Encode each line as a record to append. Blank lines of JSON input are skipped."""
    import msgspec

    from streams.client.answers import Entry

    number = 0
    while line := stream.readline(LINE_BYTES_MAX):
        number += 1
        if len(line) == LINE_BYTES_MAX:
            raise output.Refusal(
                f"line {number} is longer than {LINE_BYTES_MAX:,} bytes; the input must be NDJSON"
            )
        line = line.strip(b"\r\n") if text else line.strip()
        if not line and not text:
            continue
        if records:
            yield parse_json_raw(line, f"line {number}")
            continue
        value: Any = (
            decode_text(line, f"line {number}")
            if text
            else msgspec.Raw(parse_json_raw(line, f"line {number}"))
        )
        yield msgspec.json.encode(Entry(value, **facts))


def _append_lines(box: Box, lines: Iterator[bytes], as_json: bool, bounds: dict[str, Any]) -> None:
    from streams.protocol.errors import StreamsError, Uncertain

    producer = box.producer(settle_s=60.0, held_bytes=16 << 20, stop_at_failure=True, **bounds)
    try:
        first, last = _submit_lines(box, producer, lines)
    except output.Refusal as refusal:
        # All submitted records are settled, so this is the exact line at which to continue.
        raise output.Refusal(
            f"{refusal.message}\n{_so_far(producer)}; correct the input, then continue from there"
        ) from None
    except StreamsError as error:
        at_least = "at least " if isinstance(error, Uncertain) else ""
        message = f"{error.message}; {at_least}{_so_far(producer)}"
        raise type(error)(message, **error.detail) from error
    except KeyboardInterrupt:
        output.inform(f"interrupted; {_so_far(producer)}")
        raise
    if first is None or last is None:
        raise output.Nothing("standard input was empty; no record was appended")
    facts = {
        "box": box.name,
        "count": producer.statistics().acked,
        "first_seq": first.wait(),
        "last_seq": last.wait(),
    }
    output.show_facts(facts, as_json=as_json)


def _submit_lines(
    box: Box, producer: Producer, lines: Iterator[bytes]
) -> tuple[Ticket | None, Ticket | None]:
    """Submit all lines and return the first and the last ticket. On return every record is settled."""
    from streams.client.errors import Closed

    first = last = None
    with producer, output.progress(f"appending to {box.name}", None, beside=sys.stdin) as step:
        try:
            for number, line in enumerate(lines, 1):
                last = producer.submit_encoded(line)
                first = first or last
                if number % 1000 == 0:
                    step(producer.statistics().acked)
        except Closed:
            pass  # the producer stopped at a failure; flush() raises it
        producer.flush()
    return first, last


def _so_far(producer: Producer) -> str:
    count = producer.statistics().acked
    return (
        f"the first {count} records were appended, and none after them" if count else "no record was appended"
    )


# -- read


_filters = (
    click.option("--match", metavar="TAG", help="Only records with this tag; `user-*` matches a prefix."),
    click.option("--node", help="Skip records that this node wrote."),
    click.option("--data", "data_only", is_flag=True, help="Print only the data of each record."),
)


def filter_options(function: Any) -> Any:
    for option in reversed(_filters):
        function = option(function)
    return function


def match_of(text: str | None) -> str | list[str] | None:
    return ["tag", "Glob", text] if text is not None and text.endswith("*") else text


@example(
    "streams read orders",
    "streams read orders --from 1 -n 1 --data",
    "streams read orders | head -1",
)
@click.command("read")
@click.argument("box", type=BOX_NAME)
@click.option(
    "--from", "from_seq", type=int, default=None, help="Start after this seq (default 0: all records)."
)
@time_options
@click.option("--group", help="Start after the cursor of this group.")
@click.option("--commit", is_flag=True, help="Move the group's cursor after the records are printed.")
@click.option("-n", "--limit", type=click.IntRange(0), help="Maximum number of records.")
@filter_options
@server_options
def read(
    target: ServerTarget,
    box: str,
    from_seq: int | None,
    since: int | None,
    at: int | None,
    group: str | None,
    commit: bool,
    limit: int | None,
    match: str | None,
    node: str | None,
    data_only: bool,
) -> None:
    """Print the records of BOX, oldest first, up to its current end, one JSON object per line.

    A warning on standard error reports records that are gone (cap, TTL or crash). Exit code 5 if no record
    matches.
    """
    from_ts = start_ts(since, at, group=group, **{"from": from_seq})
    if commit and group is None:
        raise output.Refusal("--commit needs a group; add --group NAME")
    options: dict[str, Any] = {"match": match_of(match), "node": node}
    with target.client(is_patient=True) as client:
        handle = client.box(box)
        if from_ts is not None:
            options["from_ts"] = from_ts
        elif group is not None:
            options["group"] = group
        else:
            options["from_seq"] = from_seq or 0
        printer = output.RecordPrinter(as_json=target.as_json, data_only=data_only)
        count, cursor = print_pages(handle, options, printer, limit=limit)
        if commit and group is not None:
            handle.group(group).commit(cursor)
    if count == 0:
        raise output.Nothing(f"{box} has no matching record")


def print_pages(
    box: Box,
    options: dict[str, Any],
    printer: output.RecordPrinter,
    *,
    limit: int | None,
    follow: bool = False,
) -> tuple[int, int]:
    """Print records page by page, and return their count and the seq of the last one read.

    Stops at the head of the first page, unless `follow` is set.
    """
    from streams.client.retry import FOREVER

    query = {name: value for name, value in options.items() if value is not None}
    query |= {"include_tags": True, "max_bytes": _PAGE_BYTES}
    count, until, cursor = 0, None, 0
    while limit is None or count < limit:
        query["limit"] = _PAGE_RECORDS if limit is None else min(limit - count, _PAGE_RECORDS)
        page = box.raw_page(retry=FOREVER if follow else None, **query)
        if "generation" not in query and query.get("from_seq", 0) > page.head_seq:
            # The server treats this as a recreated box. The user named no earlier box, so that would mislead.
            raise output.Nothing(
                f"{box.name} ends at seq {page.head_seq}: no record is after {query['from_seq']}"
            )
        warn_about_gap(box.name, page.tombstone)
        printer(page.records, box.name)
        count += len(page.records)
        cursor = page.next_from_seq
        until = page.head_seq if until is None else until
        if not follow and (page.caught_up or cursor >= until):
            break
        query |= {"from_seq": cursor, "generation": page.generation}
        query.pop("from_ts", None)
        query.pop("group", None)
        if follow:
            query["wait_ms"] = _WAIT_MS
    return count, cursor


def warn_about_gap(box: str, tombstone: Any) -> None:
    import msgspec

    if bytes(tombstone) == b"null":
        return
    gap = msgspec.json.decode(tombstone)
    output.warn(
        f"{box}: records {gap['gap_from']} to {gap['gap_to']} are gone ({gap['reason']})"
        if gap["reason"] != "recreated"
        else f"{box} was deleted and recreated; these records are from the new box"
    )


@example(
    "streams tail orders",
    "streams tail orders -n 2 --data",
    "streams tail orders --since 1h",
    "streams tail orders -n 1 -f --limit 1",
)
@click.command("tail")
@click.argument("box", type=BOX_NAME)
@click.option(
    "-n", "--last", type=click.IntRange(0), default=10, show_default=True, help="Number of last records."
)
@time_options
@click.option("-f", "--follow", is_flag=True, help="Then wait for new records, also across server restarts.")
@click.option("--limit", type=click.IntRange(1), help="Exit after this many records.")
@filter_options
@server_options
def tail(
    target: ServerTarget,
    box: str,
    last: int,
    since: int | None,
    at: int | None,
    follow: bool,
    limit: int | None,
    match: str | None,
    node: str | None,
    data_only: bool,
) -> None:
    """Print the last records of BOX; with -f also new records until Ctrl-C.

    With --since or --at: all records from that time on, instead of the last ones.
    """
    from streams.client.answers import Record

    from_ts = start_ts(since, at)
    with target.client(is_patient=True) as client:
        handle = client.box(box)
        if from_ts is not None:
            start = seq_before(handle, from_ts)
        else:
            items = [
                item
                for item in handle.tail(last, match=match_of(match), node=node)
                if isinstance(item, Record)
            ]
            start = items[0].seq - 1 if items else handle.position().head_seq
        options = {"from_seq": start, "match": match_of(match), "node": node}
        printer = output.RecordPrinter(as_json=target.as_json, data_only=data_only)
        count, _ = print_pages(handle, options, printer, limit=limit, follow=follow)
    if count == 0:
        raise output.Nothing(f"{box} has no matching record")


def present_fields(item: Any) -> dict[str, Any]:
    """Return the fields of a record or job as the API shows them, without absent fields."""
    import msgspec

    fields = {field.encode_name: getattr(item, field.name) for field in msgspec.structs.fields(type(item))}
    return {name: value for name, value in fields.items() if name == "data" or value not in (None, {})}


# -- delete


@example(
    "streams delete orders --match kitchen --dry-run",
    "streams delete orders --match kitchen --yes",
    "streams delete orders --before 2 --yes",
)
@click.command("delete")
@click.argument("box", type=BOX_NAME)
@click.option("--match", metavar="TAG", help="Records with this tag; `user-*` matches a prefix.")
@click.option("--before", "before_seq", type=int, help="Records before this seq.")
@click.option("--dry-run", is_flag=True, help="Count the records; delete none.")
@yes_option
@server_options
def delete(
    target: ServerTarget, box: str, match: str | None, before_seq: int | None, dry_run: bool, yes: bool
) -> None:
    """Delete records of BOX, permanently. With both options, only records that match both."""
    import msgspec

    if match is None and before_seq is None:
        raise output.Refusal(
            "name the records with --match TAG, --before SEQ, or both; `streams box rm` deletes a whole box"
        )
    condition = " and ".join(
        text
        for text, value in ((f"with tag {match}", match), (f"before seq {before_seq}", before_seq))
        if value is not None
    )
    with target.client() as client:
        output.confirm(f"Delete the records of {box} {condition}?", yes=yes or dry_run)
        reply = client.box(box).delete(match_of(match), before_seq=before_seq, dry_run=dry_run)
    output.show_facts(msgspec.to_builtins(reply), as_json=target.as_json)
