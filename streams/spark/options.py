"""Parses the options of a read or a write. Pure; needs no pyspark.

Spark passes options as strings with lower-case keys. An option that is not in the table (`option_table.py`)
is an error that suggests the nearest name; other sources silently ignore misspelt options.
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
    "ConnectionOptions",
    "SparkReadOptions",
    "SparkWriteOptions",
    "parse_read_options",
    "parse_write_options",
]

#: Options that Spark adds by itself.
_SPARK_OPTIONS: Final = frozenset({"checkpointlocation", "queryname"})
_START_OPTIONS: Final = ("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp")


#: Spark does not pass the options of a table to a source written in Python. With default options, a table
#: would read and write boxes of another server.
NO_TABLE: Final = (
    "Spark loses the options of a table; use CREATE TEMPORARY VIEW … USING streams OPTIONS (url '…', …), or "
    "spark.read and df.write with options"
)


class BadOption(InvalidRequest):
    """An option of the data source is not valid."""


# -- parsing


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Connection options of a task. A task reads the key where it runs."""

    url: str
    token_env: str | None = None
    token_file: str | None = None
    token: str | None = field(default=None, repr=False)
    retry_s: float = 60.0
    transport: str = "auto"

    @property
    def over_tcp(self) -> bool | None:
        """Return True for TCP, False for Unix sockets, None to use Unix sockets if the task can open them."""
        return None if self.transport == "auto" else self.transport == "tcp"

    def key(self) -> str | None:
        if self.token_env is not None:
            if self.token_env not in os.environ:
                raise BadOption(
                    f"tokenEnv: there is no variable {self.token_env} here; set it where tasks run"
                )
            return os.environ[self.token_env]
        if self.token_file is not None:
            try:
                return Path(self.token_file).read_text().strip()
            except OSError as error:
                raise BadOption(f"tokenFile: {self.token_file}: {error.strerror}") from None
        return self.token


@dataclass(frozen=True, slots=True)
class SparkReadOptions:
    """Options of a read, parsed and checked."""

    server: ConnectionOptions
    boxes: tuple[str, ...]
    pattern: str | None
    prefix: str | None
    starting: str | dict[str, int]
    ending: str | dict[str, int]
    starting_ms: int | dict[str, int] | None
    ending_ms: int | None
    no_newer_record: str
    max_records: int | None
    max_bytes: int | None
    min_records: int | None
    max_delay_ms: int
    #: None: chosen from the number of records.
    min_partitions: int | None
    partition_records: int
    partition_bytes: int
    max_boxes: int
    missing_boxes: str
    on_gap: str
    gap_box: str | None
    include_meta: bool
    node: str | None
    match: Match | None
    pushdown: bool
    scan_bytes: int
    group: str | None
    #: Name of the start option that the user set, if any. A query with a checkpoint ignores it.
    starting_option: str | None

    def wants(self, box: str) -> bool:
        if self.pattern is not None:
            return re.fullmatch(self.pattern, box) is not None
        if self.prefix is not None:
            return box.startswith(self.prefix)
        return box in self.boxes


@dataclass(frozen=True, slots=True)
class SparkWriteOptions:
    """Options of a write, parsed and checked."""

    server: ConnectionOptions
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
    #: The box for rows that cannot be written; None: such a row fails the job.
    dead_letter_box: str | None = None
    #: Checkpoint location of a streaming query, if its options name it.
    checkpoint: str | None = None


def parse_read_options(raw_options: Mapping[str, str], scope: str) -> SparkReadOptions:
    if not raw_options:
        raise BadOption(f"no options: {NO_TABLE}")
    values = _parse(raw_options, scope)
    selectors = [name for name in ("subscribe", "subscribePattern", "subscribePrefix") if values[name]]
    if len(selectors) != 1:
        names = " and ".join(selectors) or "none of them"
        raise BadOption(
            f"set exactly one of subscribe (the argument of load), subscribePattern and subscribePrefix; "
            f"set now: {names}"
        )
    _at_most_one(raw_options, _START_OPTIONS)
    _at_most_one(raw_options, ("endingOffsets", "endingTimestamp"))
    if values["endingOffsets"] == EARLIEST:
        raise BadOption("endingOffsets: must be latest, or JSON")
    if isinstance(values["endingOffsets"], dict):
        for box, seq in values["endingOffsets"].items():
            if seq == EARLIEST_NUMBER:
                raise BadOption(f"endingOffsets: {box}: -2 (earliest) leaves nothing to read; -1 is latest")
    on_gap = values["onGap"] or (FAIL if values["failOnDataLoss"] else SKIP)
    if (
        values["onGap"] not in (None, FAIL)
        and "failondataloss" in _lower_names(raw_options)
        and values["failOnDataLoss"]
    ):
        raise BadOption(f"onGap: {values['onGap']} and failOnDataLoss=true contradict each other")
    starting = values["startingOffsets"] or (EARLIEST if scope == BATCH else LATEST)
    by_time = values["startingOffsetsByTimestamp"]
    return SparkReadOptions(
        server=_server(values),
        boxes=values["subscribe"],
        pattern=values["subscribePattern"],
        prefix=values["subscribePrefix"],
        starting=starting,
        ending=values["endingOffsets"] or LATEST,
        starting_ms=by_time if by_time is not None else values["startingTimestamp"],
        ending_ms=values["endingTimestamp"],
        no_newer_record=values["startingOffsetsByTimestampStrategy"],
        max_records=values["maxRecordsPerTrigger"],
        max_bytes=values["maxBytesPerTrigger"] or None,
        min_records=values["minOffsetsPerTrigger"],
        max_delay_ms=values["maxTriggerDelay"] or 0,
        min_partitions=values["minPartitions"],
        partition_records=values["maxRecordsPerPartition"],
        partition_bytes=values["maxBytesPerPartition"],
        max_boxes=values["maxBoxes"],
        missing_boxes=values["missingBoxes"],
        on_gap=on_gap,
        gap_box=values["gapBox"],
        include_meta=values["includeMeta"],
        node=values["node"],
        match=values["match"],
        pushdown=bool(values["pushdown"]),
        scan_bytes=values["scanBytes"],
        group=values["group"],
        starting_option=next((name for name in _START_OPTIONS if values[name] is not None), None),
    )


def parse_write_options(raw_options: Mapping[str, str], scope: str) -> SparkWriteOptions:
    if "url" not in _lower_names(raw_options):
        raise BadOption(f"url: is required for a write; set it to the server's URL. In SQL: {NO_TABLE}")
    values = _parse(raw_options, scope)
    if (values["txnVersion"] is None) != (values["txnAppId"] is None) and scope == WRITE:
        raise BadOption("txnAppId and txnVersion go together: set both, or neither")
    if values["delivery"] == "append" and values["txnAppId"] is not None:
        raise BadOption("txnAppId: has no effect with delivery=append; remove it, or use delivery=txn")
    if (values["onBadRow"] == "deadletter") != (values["deadLetterBox"] is not None):
        raise BadOption("onBadRow=deadletter and deadLetterBox go together: set both, or neither")
    return SparkWriteOptions(
        server=_server(values),
        box=values["box"],
        delivery=values["delivery"],
        app_id=values["txnAppId"],
        version=values["txnVersion"],
        reset=values["txnReset"],
        if_done=values["txnIfDone"],
        node=values["node"] if values["node"] is not None else "spark",
        create=values["create"],
        durability=values["durability"],
        commit_s=values["commitTimeoutMs"] / 1000,
        dead_letter_box=values["deadLetterBox"],
        checkpoint=_lower_names(raw_options).get("checkpointlocation"),
    )


def _server(values: Mapping[str, Any]) -> ConnectionOptions:
    return ConnectionOptions(
        url=values["url"],
        token_env=values["tokenEnv"],
        token_file=values["tokenFile"],
        token=values["token"],
        retry_s=values["retryTimeoutMs"] / 1000,
        transport=values["transport"],
    )


def _lower_names(raw_options: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in raw_options.items()}


def _parse(raw_options: Mapping[str, str], scope: str) -> dict[str, Any]:
    """Return the value of every option in the table, by name. Options that are not set have their default."""
    allowed_options: dict[str, Option] = {}
    other_options: dict[str, Option] = {}
    for option in OPTIONS:
        table = allowed_options if scope in option.scopes else other_options
        table[option.name.lower()] = option
        if option.alias:
            table[option.alias.lower()] = option
    values: dict[str, Any] = {option.name: None for option in OPTIONS}
    values |= {option.name: option.default for option in allowed_options.values()}
    names_used: dict[str, str] = {}
    for name, text in _lower_names(raw_options).items():
        if name in _SPARK_OPTIONS:
            continue
        if name not in allowed_options:
            raise BadOption(_unknown_option_message(name, scope, allowed_options, other_options))
        option = allowed_options[name]
        if option.name in names_used:
            raise BadOption(
                f"{option.name}: is set twice, as {names_used[option.name]} and as {name}; remove one"
            )
        names_used[option.name] = name
        try:
            values[option.name] = option.parse(str(text))
        except (ValueError, Refused) as error:
            raise BadOption(f"{option.name}: {text!r} {error}") from None
    return values


def _unknown_option_message(
    name: str, scope: str, allowed_options: Mapping[str, Option], other_options: Mapping[str, Option]
) -> str:
    if name in other_options:
        option = other_options[name]
        return f"{option.name}: is an option of a {' and a '.join(option.scopes)}, not of a {scope}"
    similar_names = difflib.get_close_matches(name, allowed_options, n=1)
    hint = f"; did you mean {allowed_options[similar_names[0]].name}?" if similar_names else ""
    return f"{name}: there is no such option of a {scope}{hint}"


def _at_most_one(raw_options: Mapping[str, str], names: tuple[str, ...]) -> None:
    names_used = [name for name in names if name.lower() in _lower_names(raw_options)]
    if len(names_used) > 1:
        raise BadOption(f"{' and '.join(names_used)} contradict each other: set only one of them")
