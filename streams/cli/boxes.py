"""`streams ls` and `streams box`: boxes and their settings. `SETTINGS` defines the options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from streams.cli import output
from streams.cli.records import match_of
from streams.cli.suggestions import BOX_NAME, VerbGroup
from streams.cli.verbs import BYTES, MILLIS, ServerTarget, example, server_options, yes_option

if TYPE_CHECKING:
    from streams.client._sync.box import Box
    from streams.protocol.messages.replies import BoxState

#: Box setting -> (type of its option, help). Flags have no type.
SETTINGS: Final[dict[str, tuple[Any, str]]] = {
    "type": (click.Choice(("log", "queue")), "Kind of box; cannot change later."),
    "durability": (
        click.Choice(("memory", "disk", "fsync", "object")),
        "Failures that an acknowledged append survives: memory < disk < fsync < object.",
    ),
    "ttl_ms": (MILLIS, "Delete records older than this; 0 = never."),
    "cap_records": (int, "Maximum number of records; 0 = no limit."),
    "cap_bytes": (BYTES, "Maximum size of all records; 0 = no limit."),
    "discard": (
        click.Choice(("old", "reject")),
        "At a cap: delete the oldest records, or reject the append.",
    ),
    "compact": (click.Choice(("none", "tag")), "`tag` keeps only the newest record of each tag."),
    "delete_on_empty_ms": (MILLIS, "Delete the box after it was empty for this long; 0 = never."),
    "idempotency_window_ms": (MILLIS, "How long the box remembers idempotency keys."),
    "priority": (int, "Delivery priority, -1000 to 1000."),
    "auto_priority": (None, "Derive the priority from the time of the last read."),
    "auto_create": (None, "An append may recreate the box after it was deleted."),
    "dedupe_node": (None, "Readers can skip records that their own node wrote."),
    "lease_ms": (MILLIS, "Queue: how long a worker holds a claimed job."),
    "claim_jitter_ms": (MILLIS, "Queue: share jobs evenly among the claims that arrive within this time."),
    "max_deliveries": (int, "Queue: deliveries after which a job becomes a dead letter; 0 = no limit."),
    "dead_letter": (str, "Queue: box that receives dead letters."),
    "leases_durable": (None, "Queue: leases survive a restart."),
    "paused": (None, "Queue: claims get no jobs."),
    "key_concurrency": (int, "Queue: jobs of one ordering key that are leased at a time; 0 = no limit."),
    "fair": (None, "Queue: claims rotate over the ordering keys."),
    "rate_per_s": (float, "Queue: largest number of deliveries per second; 0 = no limit."),
}


def box_options(function: Any) -> Any:
    """Add one option per box setting to a verb."""
    function = click.option("--uncapped/--capped", default=None, help="Accept client times in the future.")(
        function
    )
    modes = click.Choice(("arrival", "client-prefer", "client-require"))
    function = click.option("--timestamping", type=modes, help="Source of record times.")(function)
    for name, (kind, text) in reversed(SETTINGS.items()):
        flag = "--" + name.replace("_", "-")
        short = flag.removesuffix("-ms")
        if kind is None:
            function = click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=text)(function)
        else:
            names = (flag,) if short == flag else (short, flag)
            function = click.option(*names, name, type=kind, default=None, help=text)(function)
    return function


def config_of(options: dict[str, Any]) -> dict[str, Any]:
    """Convert the command's options into the box config that the API accepts."""
    mode, is_uncapped = options.pop("timestamping"), options.pop("uncapped")
    config = {name: value for name, value in options.items() if value is not None}
    times = {name: value for name, value in (("mode", mode), ("uncapped", is_uncapped)) if value is not None}
    return config | ({"timestamping": times} if times else {})


@example("streams ls", "streams ls ord")
@click.command("ls")
@click.argument("prefix", default="")
@server_options
def ls(target: ServerTarget, prefix: str) -> None:
    """List the boxes whose names begin with PREFIX. Exit code 5 if there are none."""
    import msgspec

    columns = ("box", "type", "durability", "count", "bytes", "earliest_seq", "head_seq")
    with target.client() as client:
        rows = (msgspec.structs.asdict(box) for box in client.boxes(prefix))
        if not output.show_rows(columns, rows, as_json=target.as_json):
            raise output.Nothing(
                f"no box has a name that begins with {prefix!r}; `streams ls` lists all boxes"
                if prefix
                else "the server has no boxes yet; create one with `streams append` or `streams box create`"
            )


@click.group("box", cls=VerbGroup)
def command() -> None:
    """Create, show, change and delete a box."""


@example(
    "streams box create invoices --durability fsync --ttl 7d",
    "streams box create jobs --type queue --lease 30s --max-deliveries 5 --dead-letter jobs.dead",
)
@command.command("create")
@click.argument("box", type=BOX_NAME)
@box_options
@yes_option
@server_options
def create(target: ServerTarget, box: str, yes: bool, **options: Any) -> None:
    """Create BOX. If it exists already, change the given settings."""
    _put(target, box, config_of(options), yes=yes, must_exist=False)


@example("streams box edit orders --cap-records 1000000 --ttl 0")
@command.command("edit")
@click.argument("box", type=BOX_NAME)
@box_options
@yes_option
@server_options
def edit(target: ServerTarget, box: str, yes: bool, **options: Any) -> None:
    """Change settings of BOX, which must exist. A tighter cap or TTL deletes stored records: the command asks
    first."""
    config = config_of(options)
    if not config:
        raise output.Refusal("nothing to change; name at least one setting, for example --ttl 7d")
    _put(target, box, config, yes=yes, must_exist=True)


#: Settings that can delete stored records.
_DELETING_SETTINGS: Final = ("ttl_ms", "cap_records", "cap_bytes", "compact")


def _put(target: ServerTarget, box: str, config: dict[str, Any], *, yes: bool, must_exist: bool) -> None:
    with target.client() as client:
        handle = client.box(box)
        if must_exist or any(name in config for name in _DELETING_SETTINGS):
            state = handle.state() if must_exist or handle.exists() else None  # a PUT would make one
            if state is not None and (tighter := _tighter_limits(config, state)):
                limits = ", ".join(tighter)
                output.confirm(
                    f"{box} has {state.count:,} records. Delete those that exceed {limits}?", yes=yes
                )
        put = handle.create(**config)
    facts = {"box": put.box, "created": put.created, "config": put.config.to_fields()}
    output.show_facts(facts, as_json=target.as_json)


def _tighter_limits(config: dict[str, Any], state: BoxState) -> list[str]:
    """Return the new limits that could delete stored records."""
    if not state.count:
        return []
    age_ms = config.get("ttl_ms") or 0
    caps = (("cap_records", state.count), ("cap_bytes", state.bytes))
    limits = [f"{name} {config[name]}" for name, current in caps if 0 < (config.get(name) or 0) < current]
    if age_ms and not 0 < state.config.ttl_ms <= age_ms:
        limits.append(f"ttl_ms {age_ms}")
    if config.get("compact", "none") != "none" and state.config.compact == "none":
        limits.append(f"compact {config['compact']}")
    return limits


@example("streams box show orders")
@command.command("show")
@click.argument("box", type=BOX_NAME)
@server_options
def show(target: ServerTarget, box: str) -> None:
    """Show the position, size and settings of BOX."""
    import msgspec

    with target.client() as client:
        state = client.box(box).state()
    facts = {**msgspec.to_builtins(state), "config": state.config.to_fields()}
    output.show_facts(
        {name: value for name, value in facts.items() if value is not None}, as_json=target.as_json
    )


@example("streams box rm notes --yes")
@command.command("rm")
@click.argument("box", type=BOX_NAME)
@click.option("--if-empty", is_flag=True, help="Only if the box has no records.")
@yes_option
@server_options
def rm(target: ServerTarget, box: str, if_empty: bool, yes: bool) -> None:
    """Delete BOX with its records, groups and routers, permanently. Exit code 5 if it does not exist."""
    with target.client() as client:
        if not yes and (count := _count(client.box(box).state)) is not None:
            output.confirm(f"Delete {box} with {count:,} records, its groups and its routers?", yes=yes)
        reply = client.box(box).drop(if_empty=if_empty)
    if not reply.deleted:
        raise output.Nothing(f"box {box!r} does not exist; `streams ls` lists the boxes")
    facts = {"box": box, "deleted": True, "routers_removed": reply.routers_removed}
    output.show_facts(facts, as_json=target.as_json)


def _count(state: Callable[[], Any]) -> int | None:
    from streams.protocol.errors import BoxNotFound

    try:
        return int(state().count)
    except BoxNotFound:
        return None


@example("streams box trim orders --keep 2 --yes")
@command.command("trim")
@click.argument("box", type=BOX_NAME)
@click.option("--before", "before_seq", type=int, help="Delete the records before this seq.")
@click.option("--keep", type=click.IntRange(0), metavar="COUNT", help="Delete all but the last COUNT seqs.")
@yes_option
@server_options
def trim(target: ServerTarget, box: str, before_seq: int | None, keep: int | None, yes: bool) -> None:
    """Delete the oldest records of BOX, permanently."""
    import msgspec

    if (before_seq is None) == (keep is None):
        raise output.Refusal("name the records to delete with either --before SEQ or --keep COUNT")
    with target.client() as client:
        handle = client.box(box)
        if before_seq is None:
            before_seq = max(handle.state().head_seq + 1 - (keep or 0), 1)
        output.confirm(f"Delete the records of {box} before seq {before_seq}?", yes=yes)
        reply = handle.delete(before_seq=before_seq)
    output.show_facts(msgspec.to_builtins(reply), as_json=target.as_json)


@example("streams box gaps orders")
@command.command("gaps")
@click.argument("box", type=BOX_NAME)
@click.option("--match", metavar="TAG", help="Count records without this tag as missing.")
@server_options
def gaps(target: ServerTarget, box: str, match: str | None) -> None:
    """List the seqs of BOX that no longer have a record, with the reason: deleted, or the cause of a loss."""
    with target.client(is_patient=True) as client:
        rows = _merge_neighbours(_gaps(client.box(box), match))
        if not output.show_rows(("from", "to", "reason"), rows, as_json=target.as_json):
            output.note(f"{box} has no gaps")


def _gaps(box: Box, match: str | None) -> Iterator[dict[str, Any]]:
    at = 0
    options: dict[str, Any] = {"include_data": False, "include_meta": False, "limit": 1000}
    options["match"] = match_of(match)
    query = {name: value for name, value in options.items() if value is not None}
    while True:
        page = box.page(at, **query)
        next_seq = at + 1
        if (tombstone := page.tombstone) is not None:
            yield {"from": tombstone.gap_from, "to": tombstone.gap_to, "reason": tombstone.reason}
            next_seq = tombstone.gap_to + 1
        for seq in (*(record.seq for record in page.records), page.next_from_seq + 1):
            if seq > next_seq:
                yield {"from": next_seq, "to": seq - 1, "reason": "deleted"}
            next_seq = seq + 1
        at = page.next_from_seq
        if page.caught_up:
            return


def _merge_neighbours(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Merge adjacent gaps with the same reason. Keeps one gap in memory."""
    last: dict[str, Any] | None = None
    for row in rows:
        if last is not None and last["reason"] == row["reason"] and last["to"] + 1 == row["from"]:
            last["to"] = row["to"]
            continue
        if last is not None:
            yield last
        last = row
    if last is not None:
        yield last


@example("streams box fence orders writer-2", "streams box fence orders ''")
@command.command("fence")
@click.argument("box", type=BOX_NAME)
@click.argument("token")
@click.option("--if-token", help="Only if this is the current token.")
@server_options
def fence(target: ServerTarget, box: str, token: str, if_token: str | None) -> None:
    """Fence BOX: from now on each append needs TOKEN. An empty TOKEN removes the fence."""
    with target.client() as client:
        client.box(box).fence(token, if_token=if_token)
    output.show_facts({"box": box, "fencing_token": token}, as_json=target.as_json)
