"""The options of the data source `streams`: the table from which parsing, messages and the reference page
come. Pure; needs no pyspark. What they mean together is in `options.py`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from streams.protocol.model.matches import Match
from streams.protocol.model.names import check_box_name, check_readable_name

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
#: In `startingOffsets` as JSON, as Kafka's users write them.
EARLIEST_NUMBER: Final = -2
_LATEST_NUMBER: Final = -1

FAIL, EMIT, SKIP = "fail", "emit", "skip"

#: Where an option has its place.
BATCH, STREAM, WRITE, STREAM_WRITE = "batch read", "stream read", "batch write", "stream write"
_READS = (BATCH, STREAM)
_WRITES = (WRITE, STREAM_WRITE)
_ALL = (*_READS, *_WRITES)


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
    return tuple(dict.fromkeys(check_readable_name(name) for name in names if name))


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


def moment_ms(text: str) -> int:
    """Milliseconds since 1970, or an ISO time."""
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
        check_readable_name(box)
        if seq < EARLIEST_NUMBER:
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
        "transport",
        _ALL,
        _one_of("auto", "unix", "tcp"),
        "auto",
        "How tasks reach the shards: `unix` on the server's machine, `tcp` from elsewhere (the server needs "
        "`STREAMS_SHARD_HOST`), `auto` by what a task can see.",
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
        "`latest`, or JSON: box → last seq that is wanted (−1 latest).",
    ),
    Option(
        "startingTimestamp",
        _READS,
        moment_ms,
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
        moment_ms,
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
        _whole(0),
        64 << 20,
        "About how many bytes a micro-batch takes; at least one record. 0: no limit.",
        shown="64 MiB",
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
        shown="the driver's cores, of 20,000 records or more each",
    ),
    Option(
        "maxRecordsPerPartition",
        _READS,
        _whole(1),
        250000,
        "Records of one partition at most.",
    ),
    Option(
        "maxBytesPerPartition",
        _READS,
        _whole(1),
        16 << 20,
        "About how many bytes a partition has at most, by the mean size of each box's records.",
        shown="16 MiB",
    ),
    Option(
        "maxBoxes",
        _READS,
        _whole(1),
        100_000,
        "Boxes a read may have. A stream writes the offsets of all of them with every micro-batch, about "
        "50 bytes "
        "each.",
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
        "Filters on box, seq, ts and tag are done before rows reach Spark. Needs "
        "`spark.sql.python.filterPushdown.enabled`.",
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
        "Group under which `follow_lag` tells how far the query is, unless it is given one itself.",
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
        _one_of("txn", "keyed", "append"),
        "txn",
        "`txn`: each row once, visible at the commit. `keyed`: visible at once, and each row once while a "
        "rerun cuts rows as before, within the box's `idempotency_window_ms`. `append`: at least once, "
        "visible at once.",
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
        "txnIfDone",
        _WRITES,
        _one_of("skip", "fail"),
        "skip",
        "A version that was committed before: `skip` writes nothing and succeeds, `fail` is an error.",
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
        _one_of("memory", "disk", "fsync", "object"),
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
