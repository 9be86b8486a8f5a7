"""`streams ls` and `streams box`: boxes and their settings. The options are made from the table of
settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from streams.cli import output
from streams.cli.records import match_of
from streams.cli.verbs import BYTES, MILLIS, Target, connected, example, yes_option

if TYPE_CHECKING:
    from streams.client._sync.box import Box
    from streams.protocol.messages.replies import BoxState

#: Setting of a box -> (type of its option, help). Flags have no type.
SETTINGS: Final[dict[str, tuple[Any, str]]] = {
    "type": (click.Choice(("log", "queue")), "What it is; cannot change later."),
    "durability": (
        click.Choice(("memory", "disk", "fsync", "object")),
        "What an acknowledged write survives.",
    ),
    "ttl_ms": (MILLIS, "Records older than this are expired; 0 = never."),
    "cap_records": (int, "At most so many records; 0 = no limit."),
    "cap_bytes": (BYTES, "At most so many bytes; 0 = no limit."),
    "discard": (click.Choice(("old", "reject")), "At the cap: drop the oldest, or refuse the write."),
    "compact": (click.Choice(("none", "tag")), "`tag` keeps the newest record of each tag."),
    "delete_on_empty_ms": (MILLIS, "Delete the box when it was empty for so long; 0 = never."),
    "idempotency_window_ms": (MILLIS, "How long keys of writes are remembered."),
    "priority": (int, "Delivery priority, -1000 to 1000."),
    "auto_priority": (None, "Derive the priority from how recently it was read."),
    "auto_create": (None, "A write may make the box again after it was deleted."),
    "dedupe_node": (None, "Readers can leave out what their own node wrote."),
    "lease_ms": (MILLIS, "Queue: how long a claimed job is its worker's."),
    "claim_jitter_ms": (MILLIS, "Queue: divide jobs evenly among claims within this time."),
    "max_deliveries": (int, "Queue: then a job is a dead letter; 0 = no limit."),
    "dead_letter": (str, "Queue: box that takes dead letters."),
    "leases_durable": (None, "Queue: leases survive a restart."),
}


def settings(function: Any) -> Any:
    """Gives a verb an option for each setting of a box."""
    function = click.option("--uncapped/--capped", default=None, help="Client times may lie ahead.")(function)
    modes = click.Choice(("arrival", "client-prefer", "client-require"))
    function = click.option("--timestamping", type=modes, help="Whose time a record has.")(function)
    for name, (kind, text) in reversed(SETTINGS.items()):
        flag = "--" + name.replace("_", "-")
        short = flag.removesuffix("-ms")
        if kind is None:
            function = click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=text)(function)
        else:
            names = (flag,) if short == flag else (short, flag)
            function = click.option(*names, name, type=kind, default=None, help=text)(function)
    return function


def config_of(given: dict[str, Any]) -> dict[str, Any]:
    """What was given, as the server takes it."""
    mode, uncapped = given.pop("timestamping"), given.pop("uncapped")
    config = {name: value for name, value in given.items() if value is not None}
    times = {name: value for name, value in (("mode", mode), ("uncapped", uncapped)) if value is not None}
    return config | ({"timestamping": times} if times else {})


@example("streams ls", "streams ls ord")
@click.command("ls")
@click.argument("prefix", default="")
@connected
def ls(target: Target, prefix: str) -> None:
    """List the boxes whose names begin with PREFIX. Exit code 5 when there is none."""
    import msgspec

    columns = ("box", "type", "durability", "count", "bytes", "earliest_seq", "head_seq")
    with target.client() as client:
        rows = (msgspec.structs.asdict(box) for box in client.boxes(prefix))
        if not output.show_rows(columns, rows, as_json=target.as_json):
            raise output.Nothing(
                f"there is no box {prefix + '…' if prefix else 'yet'}; `streams append` makes one"
            )


@click.group("box")
def command() -> None:
    """Make, look at, change and delete a box."""


@example(
    "streams box create invoices --durability fsync --ttl 7d",
    "streams box create jobs --type queue --lease 30s --max-deliveries 5 --dead-letter jobs.dead",
)
@command.command("create")
@click.argument("box")
@settings
@yes_option
@connected
def create(target: Target, box: str, yes: bool, **given: Any) -> None:
    """Make BOX. If it is there already, the settings that are given are changed."""
    _put(target, box, config_of(given), yes=yes, must_exist=False)


@example("streams box edit orders --cap-records 1000000 --ttl 0")
@command.command("edit")
@click.argument("box")
@settings
@yes_option
@connected
def edit(target: Target, box: str, yes: bool, **given: Any) -> None:
    """Change settings of BOX, which must be there. A tighter cap or age applies to what is stored: it asks
    first."""
    config = config_of(given)
    if not config:
        raise output.Refusal("nothing to change; name a setting, as in --ttl 7d")
    _put(target, box, config, yes=yes, must_exist=True)


#: Settings by which records go that are stored already.
_LOSING: Final = ("ttl_ms", "cap_records", "cap_bytes", "compact")


def _put(target: Target, box: str, config: dict[str, Any], *, yes: bool, must_exist: bool) -> None:
    with target.client() as client:
        found = client.box(box)
        if must_exist or any(name in config for name in _LOSING):
            state = found.state() if must_exist or found.exists() else None  # a PUT would make one
            if state is not None and (tighter := _tighter(config, state)):
                what = ", ".join(tighter)
                output.confirm(
                    f"{box} has {state.count:,} records; delete those that {what} forbids?", yes=yes
                )
        put = found.create(**config)
    facts = {"box": put.box, "created": put.created, "config": put.config.shown()}
    output.show_facts(facts, as_json=target.as_json)


def _tighter(config: dict[str, Any], state: BoxState) -> list[str]:
    """What is given and could take records away that are there."""
    if not state.count:
        return []
    age_ms = config.get("ttl_ms") or 0
    caps = (("cap_records", state.count), ("cap_bytes", state.bytes))
    found = [f"{name} {config[name]}" for name, used in caps if 0 < (config.get(name) or 0) < used]
    if age_ms and not 0 < state.config.ttl_ms <= age_ms:
        found.append(f"ttl_ms {age_ms}")
    if config.get("compact", "none") != "none" and state.config.compact == "none":
        found.append(f"compact {config['compact']}")
    return found


@example("streams box show orders")
@command.command("show")
@click.argument("box")
@connected
def show(target: Target, box: str) -> None:
    """Show where BOX is, how much is in it, and its settings."""
    import msgspec

    with target.client() as client:
        state = client.box(box).state()
    facts = {**msgspec.to_builtins(state), "config": state.config.shown()}
    output.show_facts(
        {name: value for name, value in facts.items() if value is not None}, as_json=target.as_json
    )


@example("streams box rm notes --yes")
@command.command("rm")
@click.argument("box")
@click.option("--if-empty", is_flag=True, help="Only when it holds no record.")
@yes_option
@connected
def rm(target: Target, box: str, if_empty: bool, yes: bool) -> None:
    """Delete BOX with its records, groups and routers, for ever. Exit code 5 when it was not there."""
    with target.client() as client:
        if not yes and (found := _count(client.box(box).state)) is not None:
            output.confirm(f"Delete {box} with {found:,} records, its groups and its routers?", yes=yes)
        dropped = client.box(box).drop(if_empty=if_empty)
    if not dropped.deleted:
        raise output.Nothing(f"there is no box {box}")
    facts = {"box": box, "deleted": True, "routers_removed": dropped.routers_removed}
    output.show_facts(facts, as_json=target.as_json)


def _count(state: Callable[[], Any]) -> int | None:
    from streams.protocol.errors import BoxNotFound

    try:
        return int(state().count)
    except BoxNotFound:
        return None


@example("streams box trim orders --keep 2 --yes")
@command.command("trim")
@click.argument("box")
@click.option("--before", "before_seq", type=int, help="Delete what is before this seq.")
@click.option("--keep", type=click.IntRange(0), help="Delete all but the last so many seqs.")
@yes_option
@connected
def trim(target: Target, box: str, before_seq: int | None, keep: int | None, yes: bool) -> None:
    """Delete the oldest records of BOX, for ever."""
    import msgspec

    if (before_seq is None) == (keep is None):
        raise output.Refusal("give one of --before SEQ and --keep COUNT")
    with target.client() as client:
        found = client.box(box)
        if before_seq is None:
            before_seq = max(found.state().head_seq + 1 - (keep or 0), 1)
        output.confirm(f"Delete records of {box} before {before_seq}?", yes=yes)
        deleted = found.delete(before_seq=before_seq)
    output.show_facts(msgspec.structs.asdict(deleted), as_json=target.as_json)


@example("streams box gaps orders")
@command.command("gaps")
@click.argument("box")
@click.option("--match", metavar="TAG", help="Count records without this tag as missing.")
@connected
def gaps(target: Target, box: str, match: str | None) -> None:
    """List the seqs of BOX that hold no record any more, and why: lost (with its reason) or deleted."""
    with target.client(is_patient=True) as client:
        rows = _merged(_gaps(client.box(box), match))
        if not output.show_rows(("from", "to", "reason"), rows, as_json=target.as_json):
            output.note(f"{box} has no gap")


def _gaps(box: Box, match: str | None) -> Iterator[dict[str, Any]]:
    at = 0
    options: dict[str, Any] = {"include_data": False, "include_meta": False, "limit": 1000}
    options["match"] = match_of(match)
    asked = {name: value for name, value in options.items() if value is not None}
    while True:
        page = box.page(at, **asked)
        next_seq = at + 1
        if (lost := page.tombstone) is not None:
            yield {"from": lost.gap_from, "to": lost.gap_to, "reason": lost.reason}
            next_seq = lost.gap_to + 1
        for seq in (*(record.seq for record in page.records), page.next_from_seq + 1):
            if seq > next_seq:
                yield {"from": next_seq, "to": seq - 1, "reason": "deleted"}
            next_seq = seq + 1
        at = page.next_from_seq
        if page.caught_up:
            return


def _merged(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Neighbours of one reason as one; only the last is held."""
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
@click.argument("box")
@click.argument("token")
@click.option("--if-token", help="Only when this is the token now.")
@connected
def fence(target: Target, box: str, token: str, if_token: str | None) -> None:
    """From now on a write to BOX needs TOKEN; an empty one ends that."""
    with target.client() as client:
        client.box(box).fence(token, if_token=if_token)
    output.show_facts({"box": box, "fencing_token": token}, as_json=target.as_json)
