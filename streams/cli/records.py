"""`streams append | read | tail | watch | delete`: records in and out of a box, in constant memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, Final

import click

from streams.cli import output
from streams.cli.verbs import BYTES, MILLIS, Target, connected, example, parse_json, yes_option

if TYPE_CHECKING:
    from streams.client._sync.box import Box
    from streams.client._sync.producer import Producer, Ticket
    from streams.client.answers import Record

#: A line longer than any record can be is not NDJSON; nothing of it is kept.
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
@click.argument("box")
@click.argument("data", nargs=-1, required=True)
@click.option("--tag", help="Tag of each record.")
@click.option("--node", help="Node that writes them.")
@click.option("--meta", metavar="JSON", help="An object beside the data of each.")
@click.option("--text", is_flag=True, help="Arguments and lines are text, not JSON.")
@click.option("--records", is_flag=True, help='Lines are whole records: {"data": …, "tag": …}.')
@click.option(
    "--idempotency-key", metavar="KEY", help="Repeating the command with the same key appends nothing."
)
@click.option("--match-seq", type=int, help="Only if the first record gets this seq.")
@click.option("--fencing-token", help="The token of a fenced box.")
@click.option(
    "--batch-records", type=click.IntRange(1), default=5000, show_default=True, help="With -: at once."
)
@click.option("--batch-bytes", type=BYTES, default=1 << 20, help="With -: at once (default 1MiB).")
@click.option("--linger", type=MILLIS, default=5, help="With -: longest wait of a record (default 5ms).")
@connected
def append(
    target: Target,
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
    """Append DATA, JSON values, to BOX in one atomic write; the box is made if it is not there.

    With `-` as DATA, standard input is appended line by line, in order, each line once, in as many writes as
    it takes. It needs no more memory for a longer input.
    """
    facts: dict[str, Any] = {
        "tag": tag,
        "node": node,
        "meta": None if meta is None else parse_json(meta, "--meta"),
    }
    if data == ("-",):
        if idempotency_key or match_seq is not None or fencing_token:
            raise output.Refusal(
                "--idempotency-key, --match-seq and --fencing-token are for one write, not for -"
            )
        lines = encoded_lines(sys.stdin.buffer, text=text, records=records, facts=facts)
        if sys.stdin.isatty():
            output.note(f"type one {'line' if text else 'JSON value'} a record; Ctrl-D ends")
        with target.client(is_patient=True) as client:
            bounds = {"batch_records": batch_records, "batch_bytes": batch_bytes, "linger_ms": linger}
            _append_lines(client.box(box), lines, target.as_json, bounds)
        return
    import msgspec

    from streams.client.answers import Entry

    if text:
        for value in data:
            checked_text(os.fsencode(value), "DATA")
    values = data if text else tuple(msgspec.Raw(_checked(value)) for value in data)
    entries = [Entry(value, tag, node, facts["meta"]) for value in values]
    with target.client() as client:
        appended = client.box(box).append_batch(
            entries, idempotency_key=idempotency_key, match_seq=match_seq, fencing_token=fencing_token
        )
    output.show_facts(msgspec.to_builtins(appended), as_json=target.as_json)


def _checked(text: str) -> bytes:
    return parse_json_raw(os.fsencode(text), "DATA")


def checked_text(line: bytes, where: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise output.Refusal(
            f"{where}: byte {error.start + 1} is not UTF-8; convert it (`iconv -t utf-8`), nothing is guessed"
        ) from None


def parse_json_raw(line: bytes, where: str) -> bytes:
    """The line, which must be one JSON value; its digits stay as they are."""
    import msgspec

    checked_text(line, where)
    try:
        return bytes(msgspec.json.decode(line, type=msgspec.Raw))
    except msgspec.DecodeError as error:
        shown = line[:60].decode(errors="replace")
        raise output.Refusal(
            f"{where}: {shown!r} is not JSON ({error}); text needs quotes, or --text"
        ) from None


def encoded_lines(stream: IO[bytes], *, text: bool, records: bool, facts: dict[str, Any]) -> Iterator[bytes]:
    """Each line as a record of a write; blank ones are passed over."""
    import msgspec

    from streams.client.answers import Entry

    number = 0
    while line := stream.readline(LINE_BYTES_MAX):
        number += 1
        if len(line) == LINE_BYTES_MAX:
            raise output.Refusal(f"line {number}: longer than {LINE_BYTES_MAX} bytes; this is not NDJSON")
        line = line.strip(b"\r\n") if text else line.strip()
        if not line and not text:
            continue
        if records:
            yield parse_json_raw(line, f"line {number}")
            continue
        value: Any = (
            checked_text(line, f"line {number}")
            if text
            else msgspec.Raw(parse_json_raw(line, f"line {number}"))
        )
        yield msgspec.json.encode(Entry(value, **facts))


def _append_lines(box: Box, lines: Iterator[bytes], as_json: bool, bounds: dict[str, Any]) -> None:
    from streams.protocol.errors import StreamsError, Uncertain

    producer = box.producer(settle_s=60.0, held_bytes=16 << 20, stop_at_failure=True, **bounds)
    try:
        first, last = _submitted(box, producer, lines)
    except output.Refusal as refusal:
        # All that was submitted has been settled, so this is where whoever repeats it goes on.
        raise output.Refusal(f"{refusal.message}\n{_so_far(producer)}; mend it and go on there") from None
    except StreamsError as error:
        at_least = "at least " if isinstance(error, Uncertain) else ""
        message = f"{error.message}; {at_least}{_so_far(producer)}"
        raise type(error)(message, **error.detail) from error
    except KeyboardInterrupt:
        output.tell(f"interrupted; {_so_far(producer)}")
        raise
    if first is None or last is None:
        raise output.Nothing("standard input was empty; nothing was appended")
    facts = {
        "box": box.name,
        "count": producer.statistics().acked,
        "first_seq": first.wait(),
        "last_seq": last.wait(),
    }
    output.show_facts(facts, as_json=as_json)


def _submitted(box: Box, producer: Producer, lines: Iterator[bytes]) -> tuple[Ticket | None, Ticket | None]:
    """The first and the last of what was submitted. All is settled in the end, whatever happens."""
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
            pass  # it has stopped at a failure, and says at which
        producer.flush()
    return first, last


def _so_far(producer: Producer) -> str:
    count = producer.statistics().acked
    return f"the first {count} records were appended, none after them" if count else "nothing was appended"


# -- read


_filters = (
    click.option(
        "--match", metavar="TAG", help="Only records with this tag; `user-*` for all that begin so."
    ),
    click.option("--node", help="Leave out what this node wrote."),
    click.option("--data", "data_only", is_flag=True, help="Only the data of each record."),
)


def filtered(function: Any) -> Any:
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
@click.argument("box")
@click.option("--from", "from_seq", type=int, default=None, help="After this seq (default 0: all).")
@click.option("--since", type=MILLIS, help="Not older than this: 90s, 2h, 7d.")
@click.option("--group", help="After the cursor of this group; with --commit it moves.")
@click.option("--commit", is_flag=True, help="Commit the group's cursor when all is printed.")
@click.option("-n", "--limit", type=click.IntRange(0), help="At most so many.")
@filtered
@connected
def read(
    target: Target,
    box: str,
    from_seq: int | None,
    since: int | None,
    group: str | None,
    commit: bool,
    limit: int | None,
    match: str | None,
    node: str | None,
    data_only: bool,
) -> None:
    """Print the records of BOX, oldest first, up to its end; one JSON object a line.

    Records that were lost to a cap or an age are told on standard error. Exit code 5 when there is none.
    """
    if sum(start is not None for start in (from_seq, since, group)) > 1:
        raise output.Refusal("--from, --since and --group say the same thing; give one")
    if commit and group is None:
        raise output.Refusal("--commit needs --group")
    options: dict[str, Any] = {"match": match_of(match), "node": node}
    with target.client(is_patient=True) as client:
        found = client.box(box)
        if since is not None:
            import time

            options["from_ts"] = max(0, int(time.time() * 1000) - since)
        elif group is not None:
            options["group"] = group
        else:
            options["from_seq"] = from_seq or 0
        printer = output.RecordPrinter(as_json=target.as_json, data_only=data_only)
        count, cursor = print_pages(found, options, printer, limit=limit)
        if commit and group is not None:
            found.group(group).commit(cursor)
    if count == 0:
        raise output.Nothing(f"{box} has no such record")


def print_pages(
    box: Box,
    options: dict[str, Any],
    printer: output.RecordPrinter,
    *,
    limit: int | None,
    follow: bool = False,
) -> tuple[int, int]:
    """Prints what follows, a page at a time; (how many, the seq up to which). Ends at what is the head at
    first, unless it is to follow."""
    from streams.client.retry import FOREVER

    asked = {name: value for name, value in options.items() if value is not None}
    asked |= {"include_tags": True, "max_bytes": _PAGE_BYTES}
    count, until, cursor = 0, None, 0
    while limit is None or count < limit:
        asked["limit"] = _PAGE_RECORDS if limit is None else min(limit - count, _PAGE_RECORDS)
        page = box.raw_page(retry=FOREVER if follow else None, **asked)
        if "generation" not in asked and asked.get("from_seq", 0) > page.head_seq:
            # To the server this is a box that was made anew; who asks knows of no other one.
            raise output.Nothing(f"{box.name} ends at {page.head_seq}; nothing is after {asked['from_seq']}")
        tell_loss(box.name, page.tombstone)
        printer(page.records)
        count += len(page.records)
        cursor = page.next_from_seq
        until = page.head_seq if until is None else until
        if not follow and (page.caught_up or cursor >= until):
            break
        asked |= {"from_seq": cursor, "generation": page.generation}
        asked.pop("from_ts", None)
        asked.pop("group", None)
        if follow:
            asked["wait_ms"] = _WAIT_MS
    return count, cursor


def tell_loss(box: str, tombstone: Any) -> None:
    import msgspec

    if bytes(tombstone) == b"null":
        return
    gap = msgspec.json.decode(tombstone)
    output.warn(
        f"{box}: records {gap['gap_from']} to {gap['gap_to']} are gone ({gap['reason']})"
        if gap["reason"] != "recreated"
        else f"{box} was deleted and made again; this is the new one"
    )


@example("streams tail orders", "streams tail orders -n 2 --data", "streams tail orders -n 1 -f --limit 1")
@click.command("tail")
@click.argument("box")
@click.option(
    "-n", "--last", type=click.IntRange(0), default=10, show_default=True, help="So many of the last."
)
@click.option("-f", "--follow", is_flag=True, help="Then wait for more, through restarts of the server.")
@click.option("--limit", type=click.IntRange(1), help="End after so many.")
@filtered
@connected
def tail(
    target: Target,
    box: str,
    last: int,
    follow: bool,
    limit: int | None,
    match: str | None,
    node: str | None,
    data_only: bool,
) -> None:
    """Print the last records of BOX; with -f go on with what comes until Ctrl-C."""
    from streams.client.answers import Record

    with target.client(is_patient=True) as client:
        found = client.box(box)
        items = [
            item for item in found.tail(last, match=match_of(match), node=node) if isinstance(item, Record)
        ]
        start = items[0].seq - 1 if items else found.position().head_seq
        options = {"from_seq": start, "match": match_of(match), "node": node}
        printer = output.RecordPrinter(as_json=target.as_json, data_only=data_only)
        count, _ = print_pages(found, options, printer, limit=limit, follow=follow)
    if count == 0:
        raise output.Nothing(f"{box} has no such record")


# -- watch


@example("streams watch orders --from 0 -n 2", "streams watch orders notes --from 0 -n 3 --data")
@click.command("watch")
@click.argument("boxes", nargs=-1, required=True)
@click.option("--from", "from_seq", type=int, help="After this seq; without it, what comes from now on.")
@click.option("-n", "--limit", type=click.IntRange(1), help="End after so many.")
@click.option("--node", help="Leave out what this node wrote.")
@click.option("--data", "data_only", is_flag=True, help="Only the data of each record.")
@connected
def watch(
    target: Target,
    boxes: tuple[str, ...],
    from_seq: int | None,
    limit: int | None,
    node: str | None,
    data_only: bool,
) -> None:
    """Print what comes to BOXES, pushed by the server over one connection, until Ctrl-C.

    Each line is a record with the name of its `box`. What was lost, and boxes that are deleted, are told on
    standard error.
    """
    from streams.client.answers import BoxDeleted, Record, Tombstone

    printer = output.RecordPrinter(as_json=target.as_json, data_only=data_only, with_box=True)
    with target.client(is_patient=True) as client:
        count = 0
        for box, item in client.watch(dict.fromkeys(boxes, from_seq), node=node, raw_data=True):
            if isinstance(item, Record):
                printer([_encoded(item)], box)
                count += 1
                if count == limit:
                    return
            elif isinstance(item, Tombstone):
                output.warn(f"{box}: records {item.gap_from} to {item.gap_to} are gone ({item.reason})")
            elif isinstance(item, BoxDeleted):
                output.warn(f"{box} was deleted")


def _encoded(record: Record) -> bytes:
    import msgspec

    return msgspec.json.encode(present_fields(record))


def present_fields(found: Any) -> dict[str, Any]:
    """A record or a job as the server shows it: what is absent is left out."""
    import msgspec

    fields = {field.encode_name: getattr(found, field.name) for field in msgspec.structs.fields(type(found))}
    return {name: value for name, value in fields.items() if name == "data" or value not in (None, {})}


# -- delete


@example("streams delete orders --match kitchen --yes", "streams delete orders --before 2 --yes")
@click.command("delete")
@click.argument("box")
@click.option("--match", metavar="TAG", help="Records with this tag; `user-*` for all that begin so.")
@click.option("--before", "before_seq", type=int, help="Records before this seq.")
@yes_option
@connected
def delete(target: Target, box: str, match: str | None, before_seq: int | None, yes: bool) -> None:
    """Delete records of BOX, for ever. With both options, those that meet both."""
    import msgspec

    if match is None and before_seq is None:
        raise output.Refusal(
            "say which: --match TAG, --before SEQ, or both; `streams box rm` deletes a whole box"
        )
    what = " and ".join(
        text
        for text, given in ((f"tagged {match}", match), (f"before {before_seq}", before_seq))
        if given is not None
    )
    with target.client() as client:
        output.confirm(f"Delete records of {box} {what}?", yes=yes)
        deleted = client.box(box).delete(match_of(match), before_seq=before_seq)
    output.show_facts(msgspec.structs.asdict(deleted), as_json=target.as_json)
