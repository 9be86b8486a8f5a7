"""Tagged records, as every version of the tag index stores and finds them. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from streams.protocol.messages.commands import Match
from streams.protocol.model.records import Batch

#: A batch is searched tag by tag if more than one in so many matches; otherwise from match to match, where a
#: match costs about as much as this many tags.
_DENSE = 8


class TaggedRecords(NamedTuple):
    """Records that have a tag: two columns of equal length."""

    #: u64, ascending.
    seqs: array[int]
    #: u32: the bytes of each record, without commas.
    sizes: array[int]


def no_records() -> TaggedRecords:
    return TaggedRecords(array("Q"), array("I"))


class TagDirectory(NamedTuple):
    """Position and size of the tag directory."""

    offset: int
    length: int
    checksum: int
    blocks: int
    #: Number of tags. In version 2 a tag counts once in each block.
    tags: int


class HasTags(Protocol):
    """The part of a segment index that reading its tags needs."""

    @property
    def generation(self) -> int: ...

    @property
    def directory(self) -> TagDirectory: ...

    @property
    def first_seqs(self) -> array[int]: ...

    @property
    def sizes(self) -> array[int]: ...


class TaggedBatch(NamedTuple):
    """The columns of a batch that tags need: no record is among them."""

    #: The position of the batch in its segment.
    at: int
    first_seq: int
    #: Joined with NUL, as in the batch.
    tags: bytes
    #: As in the batch; empty for one record.
    ends: array[int]
    stride: int
    #: Bytes of all records without commas.
    size: int

    @classmethod
    def of(cls, at: int, batch: Batch) -> TaggedBatch:
        assert batch.tags is not None
        size = batch.size(0, batch.count - 1)
        return cls(at, batch.first_seq, batch.tags, batch.ends or array("I"), batch.stride, size)

    def names(self) -> list[bytes]:
        """Return the tag of each record; empty for a record without one."""
        return self.tags.split(b"\0")

    def size_of(self, index: int) -> int:
        if not self.ends:
            return self.size
        return self.ends[index] - (self.ends[index - 1] if index else 0) + self.stride - 1

    def find(self, text: bytes, *, is_prefix: bool, matches: TaggedRecords) -> None:
        """Add the records whose tag matches."""
        needle = b"\0" + text if is_prefix else b"\0" + text + b"\0"
        tags = b"\0" + self.tags + b"\0"
        if not text or tags.count(needle) * _DENSE > len(self.ends):
            length = len(text) if is_prefix else None
            indexes = [at for at, name in enumerate(self.names()) if name and name[:length] == text]
        else:
            indexes = []
            index = last = at = 0
            while (at := tags.find(needle, at)) >= 0:
                index += tags.count(b"\0", last, at)
                indexes.append(index)
                last = at
                at += 1
        first_seq, ends, constant_bytes = self.first_seq, self.ends, self.stride - 1
        matches.seqs.extend([first_seq + index for index in indexes])
        if not ends:
            matches.sizes.extend([self.size] * len(indexes))
            return
        matches.sizes.extend(
            [ends[index] - (ends[index - 1] if index else 0) + constant_bytes for index in indexes]
        )


def group_by_tag(batches: Iterable[TaggedBatch]) -> dict[str, TaggedRecords]:
    """Return all records by tag, in the order of the first record of each."""
    records_of: dict[bytes, TaggedRecords] = {}
    for batch in batches:
        for index, name in enumerate(batch.names()):
            if name:
                records = records_of.get(name)
                if records is None:
                    records = records_of[name] = no_records()
                records.seqs.append(batch.first_seq + index)
                records.sizes.append(batch.size_of(index))
    return {str(name, "utf-8"): records for name, records in records_of.items()}


def text_of(match: Match) -> bytes:
    """Return the text of a match as tags are stored. A text that is not UTF-8 equals no tag."""
    return match.text.encode("utf-8", "surrogatepass")
