"""What is read and what is written, out of the options that Spark hands over. Pure; needs no pyspark.

Spark hands options over as strings with lower-case keys. An option that is not in the table
(`option_table.py`) is refused and the nearest name suggested: elsewhere a misspelt option is quietly
without effect.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from streams.protocol.errors import InvalidRequest, Refused
from streams.protocol.model.matches import Match
from streams.spark.option_table import (
    BATCH,
    EARLIEST,
    EARLIEST_NUMBER,
    EMIT,
    FAIL,
    LATEST,
    OPTIONS,
    SKIP,
    STREAM,
    STREAM_WRITE,
    WRITE,
    Option,
)

__all__ = [
    "BATCH",
    "EARLIEST",
    "EMIT",
    "FAIL",
    "LATEST",
    "NO_TABLE",
    "SKIP",
    "STREAM",
    "STREAM_WRITE",
    "WRITE",
    "BadOption",
    "Reading",
    "Server",
    "Writing",
    "reading",
    "writing",
]

#: What Spark itself puts among our options.
_OF_SPARK: Final = frozenset({"checkpointlocation", "queryname"})
_BEGINS: Final = ("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp")


#: Spark does not pass the options of a table to a source written in Python. With defaults in their place, a
#: table would read and write boxes of another server.
NO_TABLE: Final = (
    "Spark loses the options of a table; use CREATE TEMPORARY VIEW … USING streams OPTIONS (url '…', …), or "
    "spark.read and write with options"
)


class BadOption(InvalidRequest):
    """An option of the data source is not valid."""


# -- parsing


@dataclass(frozen=True, slots=True)
class Server:
    """How a task reaches the shards. The key is looked up where it is used."""

    url: str
    token_env: str | None = None
    token_file: str | None = None
    token: str | None = field(default=None, repr=False)
    retry_s: float = 60.0
    transport: str = "auto"

    @property
    def over_tcp(self) -> bool | None:
        """None: by their Unix sockets where a task can see them."""
        return None if self.transport == "auto" else self.transport == "tcp"

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
    #: None: by how much there is to read.
    min_partitions: int | None
    partition_records: int
    partition_bytes: int
    max_boxes: int
    missing: str
    on_gap: str
    gap_box: str | None
    include_meta: bool
    node: str | None
    match: Match | None
    pushdown: bool
    scan_bytes: int
    group: str | None
    #: The option that says where to begin, if one was given: a checkpoint makes it void.
    starting_option: str | None

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
    if_done: str
    node: str
    create: bool
    durability: str | None
    commit_s: float
    #: Of a streaming query, where its options say it.
    checkpoint: str | None = None


def reading(given: Mapping[str, str], place: str) -> Reading:
    if not given:
        raise BadOption(f"no option is given: {NO_TABLE}")
    found = _parsed(given, place)
    selectors = [name for name in ("subscribe", "subscribePattern", "subscribePrefix") if found[name]]
    if len(selectors) != 1:
        named = " and ".join(selectors) or "none of them"
        raise BadOption(
            f"exactly one of subscribe (the argument of load), subscribePattern and subscribePrefix is "
            f"needed; "
            f"given: {named}"
        )
    _at_most_one(given, _BEGINS)
    _at_most_one(given, ("endingOffsets", "endingTimestamp"))
    if found["endingOffsets"] == EARLIEST:
        raise BadOption("endingOffsets: must be latest, or JSON")
    if isinstance(found["endingOffsets"], dict):
        for box, seq in found["endingOffsets"].items():
            if seq == EARLIEST_NUMBER:
                raise BadOption(
                    f"endingOffsets: {box}: -2 is earliest, and nothing is before it; -1 is latest"
                )
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
        max_bytes=found["maxBytesPerTrigger"] or None,
        min_records=found["minOffsetsPerTrigger"],
        max_delay_ms=found["maxTriggerDelay"] or 0,
        min_partitions=found["minPartitions"],
        partition_records=found["maxRecordsPerPartition"],
        partition_bytes=found["maxBytesPerPartition"],
        max_boxes=found["maxBoxes"],
        missing=found["missingBoxes"],
        on_gap=on_gap,
        gap_box=found["gapBox"],
        include_meta=found["includeMeta"],
        node=found["node"],
        match=found["match"],
        pushdown=bool(found["pushdown"]),
        scan_bytes=found["scanBytes"],
        group=found["group"],
        starting_option=next((name for name in _BEGINS if found[name] is not None), None),
    )


def writing(given: Mapping[str, str], place: str) -> Writing:
    if "url" not in _lowered(given):
        raise BadOption(f"url: is not given, and rows are written only where it says. In SQL: {NO_TABLE}")
    found = _parsed(given, place)
    if (found["txnVersion"] is None) != (found["txnAppId"] is None) and place == WRITE:
        raise BadOption("txnAppId and txnVersion go together: who writes, and which version of its data")
    if found["delivery"] == "append" and found["txnAppId"] is not None:
        raise BadOption("txnAppId: has no meaning with delivery=append")
    return Writing(
        server=_server(found),
        box=found["box"],
        delivery=found["delivery"],
        app_id=found["txnAppId"],
        version=found["txnVersion"],
        reset=found["txnReset"],
        if_done=found["txnIfDone"],
        node=found["node"] if found["node"] is not None else "spark",
        create=found["create"],
        durability=found["durability"],
        commit_s=found["commitTimeoutMs"] / 1000,
        checkpoint=_lowered(given).get("checkpointlocation"),
    )


def _server(found: Mapping[str, Any]) -> Server:
    return Server(
        url=found["url"],
        token_env=found["tokenEnv"],
        token_file=found["tokenFile"],
        token=found["token"],
        retry_s=found["retryTimeoutMs"] / 1000,
        transport=found["transport"],
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
