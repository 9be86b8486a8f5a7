"""The job fields of a batch, as columns: `ordering_key`, `job_priority`, `deliver_at` (v0 §21, §23).

A batch has them beside tags and nodes. A column is None when no record uses it. A batch in which no record
has a job field has none of this (`Batch.job_fields` is None).

On disk: u32 bytes of keys · u32 of priorities · u32 of times · the three columns. Keys are joined with
NUL, "" where a record has none; priorities are a byte each; times are i64, 0 where a record has none.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from streams.protocol.errors import InvalidRequest

_HEAD = struct.Struct("<III")


class JobFields(NamedTuple):
    keys: bytes | None
    priorities: bytes | None
    times: array[int] | None

    def to_bytes(self) -> bytes:
        keys, priorities = self.keys or b"", self.priorities or b""
        times = self.times.tobytes() if self.times is not None else b""
        return _HEAD.pack(len(keys), len(priorities), len(times)) + keys + priorities + times

    @classmethod
    def from_bytes(cls, content: bytes | memoryview) -> tuple[JobFields, int]:
        """Read the fields at the front of `content`. Returns them and their length."""
        keys_n, priorities_n, times_n = _HEAD.unpack_from(content)
        at = _HEAD.size
        keys = bytes(content[at : at + keys_n]) if keys_n else None
        at += keys_n
        priorities = bytes(content[at : at + priorities_n]) if priorities_n else None
        at += priorities_n
        times: array[int] | None = None
        if times_n:
            times = array("q")
            times.frombytes(content[at : at + times_n])
        return cls(keys, priorities, times), at + times_n

    def part(self, first: int, last: int) -> JobFields | None:
        """The fields of records first..last (indexes, both included); None if none of them has one."""
        keys = b"\0".join(self.keys.split(b"\0")[first : last + 1]) if self.keys is not None else None
        priorities = self.priorities[first : last + 1] if self.priorities is not None else None
        times = self.times[first : last + 1] if self.times is not None else None
        return fields_of(keys, priorities, times)

    @property
    def without_times(self) -> JobFields | None:
        return fields_of(self.keys, self.priorities, None)

    def rows(self, count: int) -> Iterator[tuple[int, str, int, int]]:
        """(index, key, priority, time) of each of `count` records that has a field."""
        keys = str(self.keys, "utf-8").split("\0") if self.keys is not None else [""] * count
        priorities: Sequence[int] = self.priorities or bytes(count)
        times: Sequence[int] = self.times or [0] * count
        for index, row in enumerate(zip(keys, priorities, times, strict=True)):
            if any(row):
                yield index, *row

    def texts(self, index: int) -> bytes:
        """The fields of one record as JSON members, each after a comma."""
        from msgspec.json import encode

        text = b""
        if self.keys is not None and (key := self.keys.split(b"\0")[index]):
            text += b',"$ordering_key":%b' % encode(str(key, "utf-8"))
        if self.priorities is not None and self.priorities[index]:
            text += b',"$job_priority":%d' % self.priorities[index]
        if self.times is not None and self.times[index]:
            text += b',"$deliver_at":%d' % self.times[index]
        return text


def fields_of(keys: bytes | None, priorities: bytes | None, times: array[int] | None) -> JobFields | None:
    """Drop columns that no record uses."""
    keys = keys if keys and keys.strip(b"\0") else None
    priorities = priorities if priorities and priorities.strip(b"\0") else None
    times = times if times is not None and any(times) else None
    return (
        None if keys is None and priorities is None and times is None else JobFields(keys, priorities, times)
    )


def resolve_times(
    fields: JobFields | None,
    delays_ms: Sequence[int | None] | None,
    count: int,
    *,
    wall_ms: int,
    ahead_ms_max: int,
) -> JobFields | None:
    """The fields of a write at `wall_ms`, with delays as times. A time that has come is none."""
    times = array("q", [0]) * count if fields is None or fields.times is None else array("q", fields.times)
    for index, delay_ms in enumerate(delays_ms or ()):
        if delay_ms:
            times[index] = wall_ms + delay_ms
    for index, time in enumerate(times):
        if time > wall_ms + ahead_ms_max:
            raise InvalidRequest(
                f"records[{index}].deliver_at: {time} is more than ten years ahead", field="deliver_at"
            )
        if time <= wall_ms:
            times[index] = 0
    return fields_of(fields and fields.keys, fields and fields.priorities, times)


def join(parts: Sequence[tuple[JobFields | None, int]]) -> JobFields | None:
    """Join the fields of several runs of records, each with its count."""
    if all(fields is None for fields, _ in parts):
        return None
    keys: list[bytes] = []
    priorities: list[bytes] = []
    times = array("q")
    for fields, count in parts:
        keys.append((fields and fields.keys) or b"\0" * (count - 1))
        priorities.append((fields and fields.priorities) or bytes(count))
        times.extend((fields and fields.times) or [0] * count)
    return fields_of(b"\0".join(keys), b"".join(priorities), times)
