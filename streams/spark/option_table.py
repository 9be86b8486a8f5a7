"""The table of options of the data source `streams`: source of parsing, messages and the reference page.

Pure; needs no pyspark. `options.py` checks how options combine.
"""

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
#: Special seqs in the JSON of `startingOffsets`, with the values that Kafka uses.
EARLIEST_NUMBER: Final = -2
_LATEST_NUMBER: Final = -1

FAIL, EMIT, SKIP = "fail", "emit", "skip"

#: Scopes of an option: the operations that accept it.
BATCH, STREAM, WRITE, STREAM_WRITE = "batch read", "stream read", "batch write", "stream write"
_READS = (BATCH, STREAM)
_WRITES = (WRITE, STREAM_WRITE)
_ALL = (*_READS, *_WRITES)


@dataclass(frozen=True, slots=True)
class Option:
    name: str
    scopes: tuple[str, ...]
    parse: Callable[[str], Any]
    default: Any
    help: str
    #: Text for the default in the reference, where the value alone is not clear.
    default_text: str = ""
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


def _whole_number(least: int) -> Callable[[str], int]:
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
    match = re.fullmatch(r"(\d+)\s*(ms|s|m|h)?", text.strip())
    if match is None:
        raise ValueError("must be a time such as 500ms, 30s or 15m")
    return int(match[1]) * _UNITS_MS[match[2] or "ms"]


def parse_time_ms(text: str) -> int:
    """Parse milliseconds since 1970, or an ISO time, to milliseconds since 1970."""
    if re.fullmatch(r"\d+", text):
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("must be milliseconds since 1970 or an ISO time") from None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def _offsets(text: str) -> str | dict[str, int]:
    """Parse `earliest`, `latest`, or JSON: box -> the last seq before the read."""
    if text.lower() in (EARLIEST, LATEST):
        return text.lower()
    try:
        seqs = msgspec.json.decode(text, type=dict[str, int])
    except msgspec.DecodeError as error:
        raise ValueError(f'must be earliest, latest, or JSON such as {{"orders": 41}} ({error})') from None
    for box, seq in seqs.items():
        check_readable_name(box)
        if seq < EARLIEST_NUMBER:
            raise ValueError(f"{box}: a seq is at least 0; -2 is earliest, -1 is latest")
    return seqs


def _moments(text: str) -> dict[str, int]:
    try:
        return msgspec.json.decode(text, type=dict[str, int])
    except msgspec.DecodeError as error:
        raise ValueError(f'must be JSON such as {{"orders": 1700000000000}} ({error})') from None


def _match(text: str) -> Match:
    if "*" in text[:-1] or not text:
        raise ValueError("must be a tag, or a tag prefix with a star at the end")
    return Match(text.removesuffix("*"), is_prefix=text.endswith("*"))


# -- the table


OPTIONS: Final[tuple[Option, ...]] = (
    Option(
        "url",
        _ALL,
        _text,
        "http://127.0.0.1:4000",
        "The server. It supplies the map of shards; records travel to and from the shards directly.",
    ),
    Option(
        "transport",
        _ALL,
        _one_of("auto", "unix", "tcp"),
        "auto",
        "How tasks reach the shards: `unix` on the server's machine, `tcp` from elsewhere (the server needs "
        "`STREAMS_SHARD_HOST`), `auto` chooses `unix` if a task can open the sockets.",
    ),
    Option(
        "tokenEnv",
        _ALL,
        _text,
        None,
        "Environment variable with the key, read where a task runs.",
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
        "The key itself. It becomes part of the query plan: prefer `tokenEnv` or `tokenFile`.",
    ),
    Option(
        "subscribe",
        _READS,
        _names,
        (),
        "Names of boxes, comma-separated; also the argument of `load`.",
        alias="path",
    ),
    Option(
        "subscribePattern",
        _READS,
        _pattern,
        None,
        "Boxes whose whole name matches this regular expression, including boxes created later.",
    ),
    Option(
        "subscribePrefix",
        _READS,
        _text,
        None,
        "Boxes whose name starts with this prefix, including boxes created later.",
    ),
    Option(
        "startingOffsets",
        _READS,
        _offsets,
        None,
        "`earliest`, `latest`, or JSON: box → the last seq before the read (−2 earliest, −1 latest). A "
        "stream that resumes from its checkpoint ignores it.",
        default_text="batch `earliest`, stream `latest`",
    ),
    Option(
        "endingOffsets",
        (BATCH,),
        _offsets,
        LATEST,
        "`latest`, or JSON: box → the last seq of the read (−1 latest).",
    ),
    Option(
        "startingTimestamp",
        _READS,
        parse_time_ms,
        None,
        "Start at the first record with this time or a later one: milliseconds since 1970, or an ISO time "
        "(UTC unless it has a zone).",
    ),
    Option(
        "startingOffsetsByTimestamp",
        _READS,
        _moments,
        None,
        "A `startingTimestamp` for each box, as JSON: box → milliseconds since 1970.",
    ),
    Option(
        "endingTimestamp",
        (BATCH,),
        parse_time_ms,
        None,
        "End at the last record before this time.",
    ),
    Option(
        "startingOffsetsByTimestampStrategy",
        _READS,
        _one_of("error", LATEST),
        "error",
        "If a box has no record at or after the time: `error`, or start at its end (`latest`).",
    ),
    Option(
        "maxRecordsPerTrigger",
        (STREAM,),
        _whole_number(1),
        None,
        "Most records of a micro-batch. Boxes share them in proportion to their backlog.",
        alias="maxOffsetsPerTrigger",
    ),
    Option(
        "maxBytesPerTrigger",
        (STREAM,),
        _whole_number(0),
        64 << 20,
        "Approximate bytes of a micro-batch; at least one record. 0: no limit.",
        default_text="64 MiB",
    ),
    Option(
        "minOffsetsPerTrigger",
        (STREAM,),
        _whole_number(1),
        None,
        "Wait until there are this many new records, or until `maxTriggerDelay` has passed. No effect with "
        "the trigger AvailableNow.",
    ),
    Option(
        "maxTriggerDelay",
        (STREAM,),
        _duration_ms,
        900000,
        "The longest wait for `minOffsetsPerTrigger`.",
        default_text="`15m`",
    ),
    Option(
        "minPartitions",
        _READS,
        _whole_number(1),
        None,
        "Fewest partitions of a read, if it has as many records.",
        default_text="the driver's cores, with 20,000 records or more each",
    ),
    Option(
        "maxRecordsPerPartition",
        _READS,
        _whole_number(1),
        250000,
        "Most records of one partition.",
    ),
    Option(
        "maxBytesPerPartition",
        _READS,
        _whole_number(1),
        16 << 20,
        "Approximate bytes of one partition, from the mean record size of each box.",
        default_text="16 MiB",
    ),
    Option(
        "maxBoxes",
        _READS,
        _whole_number(1),
        100_000,
        "Most boxes of a read. A stream writes the offsets of all its boxes with every micro-batch, about "
        "50 bytes each.",
    ),
    Option(
        "missingBoxes",
        _READS,
        _one_of("fail", "wait", "ignore"),
        "fail",
        "A box in `subscribe` does not exist: `fail`; `wait` until it is created (streams); `ignore` it.",
    ),
    Option(
        "failOnDataLoss",
        _READS,
        _flag,
        True,
        "Fail the query if records of its range are lost. `false` is `onGap=skip`.",
    ),
    Option(
        "onGap",
        _READS,
        _one_of(FAIL, EMIT, SKIP),
        None,
        "If records are lost: `fail` the query with the exact range, `emit` a row with the range, or `skip` "
        "it with a warning in the log.",
        default_text="by `failOnDataLoss`",
    ),
    Option("gapBox", _READS, _name, None, "With `emit` and `skip`: append each gap to this box too."),
    Option(
        "includeMeta",
        _READS,
        _flag,
        True,
        "`false` leaves `meta` null and does not transfer it.",
        alias="includeHeaders",
    ),
    Option(
        "node",
        _ALL,
        _text,
        None,
        "Read: skip records of this node. Write: the node of records without one.",
        default_text="write: `spark`",
    ),
    Option(
        "match",
        _READS,
        _match,
        None,
        "Only records with this tag, or, with a star at the end, with this tag prefix.",
    ),
    Option(
        "pushdown",
        (BATCH,),
        _flag,
        False,
        "Apply filters on box, seq, ts and tag before rows reach Spark. Needs "
        "`spark.sql.python.filterPushdown.enabled`.",
    ),
    Option(
        "scanBytes",
        _READS,
        _whole_number(65536),
        8 << 20,
        "Most bytes of one response of a shard.",
        default_text="8 MiB",
    ),
    Option(
        "group",
        (STREAM,),
        _text,
        None,
        "Group to which `follow_lag` commits the cursors of the query, unless its argument `group` is set.",
    ),
    Option(
        "box",
        _WRITES,
        _name,
        None,
        "The box for all rows. Without it, the column `box` has the box of each row.",
        alias="path",
    ),
    Option(
        "delivery",
        _WRITES,
        _one_of("txn", "keyed", "append"),
        "txn",
        "`txn`: each row once, visible at the commit. `keyed`: visible at once, and each row once if a rerun "
        "partitions its rows identically within the box's `idempotency_window_ms`. `append`: at least once, "
        "visible at once.",
    ),
    Option(
        "txnAppId",
        _WRITES,
        _text,
        None,
        "Name of the writer. With `txnVersion`, a second run of the same version changes nothing.",
        default_text="the query's id; batch: a new name",
    ),
    Option(
        "txnVersion",
        (WRITE,),
        _whole_number(0),
        None,
        "Version of the writer's data; each version is written once.",
    ),
    Option(
        "txnIfDone",
        _WRITES,
        _one_of("skip", "fail"),
        "skip",
        "If the version is committed already: `skip` writes nothing and succeeds, `fail` is an error.",
    ),
    Option("txnReset", _WRITES, _flag, False, "Take over the writer from another query or checkpoint."),
    Option(
        "onBadRow",
        _WRITES,
        _one_of("fail", "deadletter"),
        "fail",
        "If a row cannot be written (not JSON or UTF-8, null, bad name or tag, too large): `fail` the job, "
        "or write a dead letter with the reason to `deadLetterBox`, in the same transaction.",
    ),
    Option(
        "deadLetterBox",
        _WRITES,
        _name,
        None,
        "With `deadletter`: the box for dead letters. A column `source` with JSON becomes part of them.",
    ),
    Option("create", _WRITES, _flag, True, "Create boxes that do not exist."),
    Option(
        "durability",
        _WRITES,
        _one_of("memory", "disk", "fsync", "object"),
        None,
        "Durability class of boxes that the write creates.",
        default_text="the server's",
    ),
    Option(
        "retryTimeoutMs",
        _ALL,
        _whole_number(0),
        60000,
        "How long to retry a call while a shard is busy or unreachable.",
    ),
    Option(
        "commitTimeoutMs",
        _WRITES,
        _whole_number(0),
        300000,
        "How long to retry a commit while a shard is busy or unreachable.",
    ),
)


# -- the reference page


def markdown() -> str:
    """Return the table of options for `docs/reference/spark.md`."""
    lines = ["| option | default | for | meaning |", "|---|---|---|---|"]
    for option in OPTIONS:
        default = option.default_text or _format_default(option.default)
        alias = f", or `{option.alias}`" if option.alias else ""
        lines.append(
            f"| `{option.name}`{alias} | {default} | {_format_scopes(option.scopes)} | {option.help} |"
        )
    return "\n".join(lines) + "\n"


def _format_default(default: Any) -> str:
    if default is None or default == ():
        return "–"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _format_scopes(scopes: tuple[str, ...]) -> str:
    for text, group in (("all", _ALL), ("read", _READS), ("write", _WRITES)):
        if scopes == group:
            return text
    return ", ".join(scopes)
