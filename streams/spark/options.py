"""The options of the data source `streams`: one table, from which parsing, messages and the reference page
come. Pure; needs no pyspark.

Spark hands options over as strings with lower-case keys. An option that is not in the table is refused and
the nearest name suggested: elsewhere a misspelt option is quietly without effect.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from streams.protocol.errors import InvalidRequest, Refused
from streams.protocol.matches import Match
from streams.protocol.names import check_box_name

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
#: In `startingOffsets` as JSON, as Kafka's users write them.
_EARLIEST_NUMBER: Final = -2
_LATEST_NUMBER: Final = -1

FAIL, EMIT, SKIP = "fail", "emit", "skip"

#: Where an option has its place.
BATCH, STREAM, WRITE, STREAM_WRITE = "batch read", "stream read", "batch write", "stream write"
_READS = (BATCH, STREAM)
_WRITES = (WRITE, STREAM_WRITE)
_ALL = (*_READS, *_WRITES)


class BadOption(InvalidRequest):
    """An option of the data source is not valid."""


@dataclass(frozen=True, slots=True)
class Option:
    name: str
    places: tuple[str, ...]
    parse: Callable[[str], Any]
    default: Any
    help: str
    #: How the default is shown, where its value does not say enough.
    shown: str = ""
    alias: str = ""


# -- values


def _text(text: str) -> str:
    return text


def _names(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",")]
    return tuple(dict.fromkeys(check_box_name(name) for name in names if name))


def _name(text: str) -> str:
    return check_box_name(text)


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    return text


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("must be true or false")
    return text.lower() == "true"


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("must be a whole number") from None
        if value < least:
            raise ValueError(f"must be at least {least}")
        return value

    return parse


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return text.lower()

    return parse


_UNITS_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}


def _duration_ms(text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*(ms|s|m|h)?", text.strip())
    if found is None:
        raise ValueError("must be a time such as 500ms, 30s or 15m")
    return int(found[1]) * _UNITS_MS[found[2] or "ms"]


def _moment_ms(text: str) -> int:
    if re.fullmatch(r"\d+", text):
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("must be milliseconds since 1970 or an ISO time") from None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def _offsets(text: str) -> str | dict[str, int]:
    """`earliest`, `latest`, or box -> the last seq that is not wanted any more."""
    if text.lower() in (EARLIEST, LATEST):
        return text.lower()
    try:
        found = msgspec.json.decode(text, type=dict[str, int])
    except msgspec.DecodeError as error:
        raise ValueError(f'must be earliest, latest, or JSON such as {{"orders": 41}} ({error})') from None
    for box, seq in found.items():
        check_box_name(box)
        if seq < _EARLIEST_NUMBER:
            raise ValueError(f"{box}: a seq is at least 0; -2 is earliest, -1 is latest")
    return found


def _moments(text: str) -> dict[str, int]:
    try:
        return msgspec.json.decode(text, type=dict[str, int])
    except msgspec.DecodeError as error:
        raise ValueError(f'must be JSON such as {{"orders": 1700000000000}} ({error})') from None


def _match(text: str) -> Match:
    if "*" in text[:-1] or not text:
        raise ValueError("must be a tag, or the beginning of one with a star after it")
    return Match(text.removesuffix("*"), is_prefix=text.endswith("*"))


# -- the table


OPTIONS: Final[tuple[Option, ...]] = (
    Option(
        "url",
        _ALL,
        _text,
        "http://127.0.0.1:4000",
        "The server. Its map of shards is asked there; records go to and come from the shards themselves.",
    ),
    Option(
        "tokenEnv",
        _ALL,
        _text,
        None,
        "Variable with the key, read where a task runs.",
    ),
    Option(
        "tokenFile",
        _ALL,
        _text,
        None,
        "File with the key, read where a task runs.",
    ),
    Option(
        "token",
        _ALL,
        _text,
        None,
        "The key itself. It becomes part of the plan: prefer the two above.",
    ),
    Option(
        "subscribe",
        _READS,
        _names,
        (),
        "Boxes, comma-separated; the same as the argument of `load`.",
        alias="path",
    ),
    Option(
        "subscribePattern",
        _READS,
        _pattern,
        None,
        "Boxes whose whole name matches this regular expression, also those that come later.",
    ),
    Option(
        "subscribePrefix",
        _READS,
        _text,
        None,
        "Boxes whose name begins so, also those that come later.",
    ),
    Option(
        "startingOffsets",
        _READS,
        _offsets,
        None,
        "`earliest`, `latest`, or JSON: box → last seq that is not wanted (−2 earliest, −1 latest). A "
        "stream that goes on from its checkpoint does not look at it.",
        shown="batch `earliest`, stream `latest`",
    ),
    Option(
        "endingOffsets",
        (BATCH,),
        _offsets,
        LATEST,
        "`latest`, or JSON: box → last seq that is wanted.",
    ),
    Option(
        "startingTimestamp",
        _READS,
        _moment_ms,
        None,
        "From the first record that is not older: milliseconds since 1970, or an ISO time (UTC unless it "
        "says otherwise).",
    ),
    Option(
        "startingOffsetsByTimestamp",
        _READS,
        _moments,
        None,
        "The same for each box, as JSON.",
    ),
    Option(
        "endingTimestamp",
        (BATCH,),
        _moment_ms,
        None,
        "Up to the last record before this time.",
    ),
    Option(
        "startingOffsetsByTimestampStrategy",
        _READS,
        _one_of("error", LATEST),
        "error",
        "When a box has no record so new: `error`, or begin at its end (`latest`).",
    ),
    Option(
        "maxRecordsPerTrigger",
        (STREAM,),
        _whole(1),
        None,
        "Records a micro-batch takes at most, shared by how far each box is behind.",
        alias="maxOffsetsPerTrigger",
    ),
    Option(
        "maxBytesPerTrigger",
        (STREAM,),
        _whole(1),
        None,
        "About so many bytes a micro-batch; at least one record.",
    ),
    Option(
        "minOffsetsPerTrigger",
        (STREAM,),
        _whole(1),
        None,
        "Wait until there are so many new records, or `maxTriggerDelay` has passed. Without effect under "
        "AvailableNow.",
    ),
    Option(
        "maxTriggerDelay",
        (STREAM,),
        _duration_ms,
        900000,
        "How long `minOffsetsPerTrigger` may wait.",
        shown="`15m`",
    ),
    Option(
        "minPartitions",
        _READS,
        _whole(1),
        None,
        "Cut into at least so many partitions, if there are as many records.",
    ),
    Option(
        "maxRecordsPerPartition",
        _READS,
        _whole(1),
        250000,
        "Cut a box's range at so many records.",
    ),
    Option(
        "maxBoxes",
        _READS,
        _whole(1),
        1000,
        "Boxes a read may have. Offsets of all are written with every micro-batch, so more is a slow query.",
    ),
    Option(
        "missingBoxes",
        _READS,
        _one_of("fail", "wait", "ignore"),
        "fail",
        "A box in `subscribe` that is not there: `fail`; `wait`, a stream takes it when it comes; `ignore`.",
    ),
    Option(
        "failOnDataLoss",
        _READS,
        _flag,
        True,
        "Whether the query fails when wanted records are lost. `false` is `onGap=skip`.",
    ),
    Option(
        "onGap",
        _READS,
        _one_of(FAIL, EMIT, SKIP),
        None,
        "What lost records do: `fail` the query with the exact range, `emit` a row that says which, or "
        "`skip` with a warning in the log.",
        shown="by `failOnDataLoss`",
    ),
    Option(
        "gapBox",
        _READS,
        _name,
        None,
        "With `emit` and `skip`: each gap is also appended to this box.",
    ),
    Option(
        "includeMeta",
        _READS,
        _flag,
        True,
        "`false` leaves `meta` null and off the wire.",
        alias="includeHeaders",
    ),
    Option(
        "node",
        _ALL,
        _text,
        None,
        "Read: leave out what this node wrote. Write: the node of records without one.",
        shown="write: `spark`",
    ),
    Option(
        "match",
        _READS,
        _match,
        None,
        "Only records with this tag; with a star at its end, tags that begin so.",
    ),
    Option(
        "pushdown",
        (BATCH,),
        _flag,
        False,
        "Filters on box, seq and ts are done by the shards. Needs `spark.sql.python.filterPushdown.enabled`.",
    ),
    Option(
        "scanBytes",
        _READS,
        _whole(65536),
        8 << 20,
        "Bytes one answer of a shard has at most.",
        shown="8 MiB",
    ),
    Option(
        "group",
        (STREAM,),
        _text,
        None,
        "Group under which `follow_lag` tells how far the query is.",
    ),
    Option(
        "box",
        _WRITES,
        _name,
        None,
        "The box for all rows; without it the column `box` says.",
        alias="path",
    ),
    Option(
        "delivery",
        _WRITES,
        _one_of("txn", "append"),
        "txn",
        "`txn`: each row once, visible at the commit. `append`: at least once, visible at once.",
    ),
    Option(
        "txnAppId",
        _WRITES,
        _text,
        None,
        "Who writes. With `txnVersion`, a second run of the same version changes nothing.",
        shown="the query's id; batch: one of its own",
    ),
    Option(
        "txnVersion",
        (WRITE,),
        _whole(0),
        None,
        "Which version of its data; each is written once.",
    ),
    Option(
        "txnReset",
        _WRITES,
        _flag,
        False,
        "Take the writer over from another query or checkpoint.",
    ),
    Option(
        "create",
        _WRITES,
        _flag,
        True,
        "Whether boxes that are not there are made.",
    ),
    Option(
        "durability",
        _WRITES,
        _one_of("memory", "disk", "fsync"),
        None,
        "Class of boxes that the write makes.",
        shown="the server's",
    ),
    Option(
        "retryTimeoutMs",
        _ALL,
        _whole(0),
        60000,
        "How long a call is repeated while a shard is busy or away.",
    ),
    Option(
        "commitTimeoutMs",
        _WRITES,
        _whole(0),
        300000,
        "The same for a commit.",
    ),
)

#: What Spark itself puts among our options.
_OF_SPARK: Final = frozenset({"checkpointlocation", "queryname"})


# -- parsing


@dataclass(frozen=True, slots=True)
class Server:
    """How a task reaches the shards. The key is looked up where it is used."""

    url: str
    token_env: str | None = None
    token_file: str | None = None
    token: str | None = field(default=None, repr=False)
    retry_s: float = 60.0

    def key(self) -> str | None:
        if self.token_env is not None:
            if self.token_env not in os.environ:
                raise BadOption(f"tokenEnv: there is no variable {self.token_env} here")
            return os.environ[self.token_env]
        if self.token_file is not None:
            try:
                return Path(self.token_file).read_text().strip()
            except OSError as error:
                raise BadOption(f"tokenFile: {self.token_file}: {error.strerror}") from None
        return self.token


@dataclass(frozen=True, slots=True)
class Reading:
    """What is read, from where and how."""

    server: Server
    boxes: tuple[str, ...]
    pattern: str | None
    prefix: str | None
    starting: str | dict[str, int]
    ending: str | dict[str, int]
    starting_ms: int | dict[str, int] | None
    ending_ms: int | None
    when_none_so_new: str
    max_records: int | None
    max_bytes: int | None
    min_records: int | None
    max_delay_ms: int
    min_partitions: int
    partition_records: int
    max_boxes: int
    missing: str
    on_gap: str
    gap_box: str | None
    include_meta: bool
    node: str | None
    match: Match | None
    pushdown: bool
    scan_bytes: int

    def wants(self, box: str) -> bool:
        if self.pattern is not None:
            return re.fullmatch(self.pattern, box) is not None
        if self.prefix is not None:
            return box.startswith(self.prefix)
        return box in self.boxes


@dataclass(frozen=True, slots=True)
class Writing:
    """What becomes of rows."""

    server: Server
    box: str | None
    delivery: str
    app_id: str | None
    version: int | None
    reset: bool
    node: str
    create: bool
    durability: str | None
    commit_s: float


def reading(given: Mapping[str, str], place: str) -> Reading:
    found = _parsed(given, place)
    selectors = [name for name in ("subscribe", "subscribePattern", "subscribePrefix") if found[name]]
    if len(selectors) != 1:
        named = " and ".join(selectors) or "none of them"
        raise BadOption(
            f"exactly one of subscribe (the argument of load), subscribePattern and subscribePrefix is "
            f"needed; "
            f"given: {named}"
        )
    _at_most_one(given, ("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp"))
    _at_most_one(given, ("endingOffsets", "endingTimestamp"))
    if found["endingOffsets"] == EARLIEST:
        raise BadOption("endingOffsets: must be latest, or JSON")
    on_gap = found["onGap"] or (FAIL if found["failOnDataLoss"] else SKIP)
    if found["onGap"] not in (None, FAIL) and "failondataloss" in _lowered(given) and found["failOnDataLoss"]:
        raise BadOption(f"onGap: {found['onGap']} and failOnDataLoss=true contradict each other")
    starting = found["startingOffsets"] or (EARLIEST if place == BATCH else LATEST)
    by_time = found["startingOffsetsByTimestamp"]
    return Reading(
        server=_server(found),
        boxes=found["subscribe"],
        pattern=found["subscribePattern"],
        prefix=found["subscribePrefix"],
        starting=starting,
        ending=found["endingOffsets"] or LATEST,
        starting_ms=by_time if by_time is not None else found["startingTimestamp"],
        ending_ms=found["endingTimestamp"],
        when_none_so_new=found["startingOffsetsByTimestampStrategy"],
        max_records=found["maxRecordsPerTrigger"],
        max_bytes=found["maxBytesPerTrigger"],
        min_records=found["minOffsetsPerTrigger"],
        max_delay_ms=found["maxTriggerDelay"] or 0,
        min_partitions=found["minPartitions"] or 1,
        partition_records=found["maxRecordsPerPartition"],
        max_boxes=found["maxBoxes"],
        missing=found["missingBoxes"],
        on_gap=on_gap,
        gap_box=found["gapBox"],
        include_meta=found["includeMeta"],
        node=found["node"],
        match=found["match"],
        pushdown=bool(found["pushdown"]),
        scan_bytes=found["scanBytes"],
    )


def writing(given: Mapping[str, str], place: str) -> Writing:
    found = _parsed(given, place)
    if (found["txnVersion"] is None) != (found["txnAppId"] is None) and place == WRITE:
        raise BadOption("txnAppId and txnVersion go together: who writes, and which version of its data")
    if found["delivery"] != "txn" and found["txnAppId"] is not None:
        raise BadOption(f"txnAppId: has no meaning with delivery={found['delivery']}")
    return Writing(
        server=_server(found),
        box=found["box"],
        delivery=found["delivery"],
        app_id=found["txnAppId"],
        version=found["txnVersion"],
        reset=found["txnReset"],
        node=found["node"] if found["node"] is not None else "spark",
        create=found["create"],
        durability=found["durability"],
        commit_s=found["commitTimeoutMs"] / 1000,
    )


def _server(found: Mapping[str, Any]) -> Server:
    return Server(
        url=found["url"],
        token_env=found["tokenEnv"],
        token_file=found["tokenFile"],
        token=found["token"],
        retry_s=found["retryTimeoutMs"] / 1000,
    )


def _lowered(given: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in given.items()}


def _parsed(given: Mapping[str, str], place: str) -> dict[str, Any]:
    """Every option of the table by its name; None or its default where it was not given."""
    known: dict[str, Option] = {}
    elsewhere: dict[str, Option] = {}
    for option in OPTIONS:
        table = known if place in option.places else elsewhere
        table[option.name.lower()] = option
        if option.alias:
            table[option.alias.lower()] = option
    found: dict[str, Any] = {option.name: None for option in OPTIONS}
    found |= {option.name: option.default for option in known.values()}
    named: dict[str, str] = {}
    for name, text in _lowered(given).items():
        if name in _OF_SPARK:
            continue
        if name not in known:
            raise BadOption(_unknown(name, place, known, elsewhere))
        option = known[name]
        if option.name in named:
            raise BadOption(f"{option.name}: given twice, as {named[option.name]} and as {name}")
        named[option.name] = name
        try:
            found[option.name] = option.parse(str(text))
        except (ValueError, Refused) as error:
            raise BadOption(f"{option.name}: {text!r} {error}") from None
    return found


def _unknown(name: str, place: str, known: Mapping[str, Option], elsewhere: Mapping[str, Option]) -> str:
    if name in elsewhere:
        option = elsewhere[name]
        return f"{option.name}: is an option of a {' and a '.join(option.places)}, not of a {place}"
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {known[near[0]].name}?" if near else ""
    return f"{name}: there is no such option of a {place}{hint}"


def _at_most_one(given: Mapping[str, str], names: tuple[str, ...]) -> None:
    named = [name for name in names if name.lower() in _lowered(given)]
    if len(named) > 1:
        raise BadOption(f"{' and '.join(named)} contradict each other: give one of them")


# -- the reference page


def markdown() -> str:
    """The table for `docs/reference/spark.md`."""
    lines = ["| option | default | for | meaning |", "|---|---|---|---|"]
    for option in OPTIONS:
        default = option.shown or _shown(option.default)
        alias = f", or `{option.alias}`" if option.alias else ""
        lines.append(f"| `{option.name}`{alias} | {default} | {_places(option.places)} | {option.help} |")
    return "\n".join(lines) + "\n"


def _shown(default: Any) -> str:
    if default is None or default == ():
        return "–"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _places(places: tuple[str, ...]) -> str:
    for shown, group in (("all", _ALL), ("read", _READS), ("write", _WRITES)):
        if places == group:
            return shown
    return ", ".join(places)
