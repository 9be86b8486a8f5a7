"""Rows to write, each with its number, from a source that misbehaves when it is told to. A source of our own,
because what is to fail must fail in the task that writes, after its rows have been handed on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

#: Boxes that the rows are for: enough that every shard of four has some.
BOXES = 16
_BATCH_ROWS = 8_000

_NAMES = ("box", "data", "tag", "node", "meta")


class Numbered(DataSource):
    """Options: `prefix` of the boxes, `count`, `first`, `cut` into partitions, `doing` and `argument`."""

    @classmethod
    def name(cls) -> str:
        return "numbered"

    def schema(self) -> str:
        return "box string, data string, tag string, node string, meta string"

    def reader(self, schema: Any) -> DataSourceReader:
        return _Reader(dict(self.options))


class _Reader(DataSourceReader):
    def __init__(self, options: dict[str, str]) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        first, count = int(self._options.get("first", "0")), int(self._options["count"])
        cut = int(self._options.get("cut", "3"))
        edges = [first + count * at // cut for at in range(cut + 1)]
        return [InputPartition((at, edges[at], edges[at + 1])) for at in range(cut)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        number, first, last = partition.value
        misdeed = Misdeed(self._options.get("doing", ""), int(self._options.get("argument", "0")))
        for start in range(first, last, _BATCH_ROWS):
            yield _batch(self._options["prefix"], range(start, min(last, start + _BATCH_ROWS)))
            misdeed.after_a_batch(number)
        misdeed.at_the_end(number)


class Misdeed:
    """What partition 1 does, at its first attempt, when rows of it have been handed on."""

    def __init__(self, doing: str, argument: int) -> None:
        self._doing = doing
        self._argument = argument
        context = TaskContext.get()
        assert context is not None
        self._is_first = context.attemptNumber() == 0

    def after_a_batch(self, partition: int) -> None:
        if self._doing == "kill a shard" and partition == 1 and self._is_first:
            self._is_first = False
            os.kill(self._argument, signal.SIGKILL)

    def at_the_end(self, partition: int) -> None:
        if partition == 1 and (self._doing == "always raise" or (self._doing == "raise" and self._is_first)):
            raise RuntimeError("injected")


def _batch(prefix: str, numbers: range) -> pa.RecordBatch:
    """Every column is in use somewhere."""
    columns = [
        [f"{prefix}.{n % BOXES}" for n in numbers],
        [f'{{"n": {n}, "text": "é{n}"}}' for n in numbers],
        [f"t{n % 7}" if n % 3 == 0 else None for n in numbers],
        ["n1" if n % 5 == 0 else "n2" for n in numbers],
        [f'{{"k":{n}}}' if n % 4 == 0 else None for n in numbers],
    ]
    return pa.RecordBatch.from_arrays([pa.array(column, pa.utf8()) for column in columns], names=_NAMES)
