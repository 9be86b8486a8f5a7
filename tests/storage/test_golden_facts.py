"""Goal: every fact that any version of us has written, to the log or into a snapshot, is read as it was
meant.

Method: `golden/frames-v1.jsonl` has a frame of every kind of change, `golden/states-v1.jsonl` a snapshot, as
bytes and in words. The bytes are decoded and held against the words. Each kind, and each field of each struct
in them, must be in one of the lines. After a change to a format `python -m tests.storage.test_golden_facts`
adds lines for what is new; a line that exists is what others have on their disks, and is never written again.
"""

from __future__ import annotations

import enum
import json
import types
import typing
from array import array
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyroaring import BitMap64

from shard.core.changes import BatchForwarded, Change, StreamAppended
from shard.core.snapshot_facts import ShardState
from shard.storage import frames
from streams.protocol.model import binary_records
from streams.protocol.model.records import Batch, render_binary
from tests.support.segments import a_batch

GOLDEN = Path(__file__).parent / "golden"
FRAMES, STATES = GOLDEN / "frames-v1.jsonl", GOLDEN / "states-v1.jsonl"


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# ---------------------------------------------------------------------------------------------------
# In words


#: Structs that have got another name since the first lines were written; the bytes have no names of structs.
_RENAMED = {"RegisteredRouter": "Router"}


def in_words(value: object) -> Any:
    """Field by field, so that a field that came later can be told from one that is not as it was."""
    if isinstance(value, msgspec.Struct):
        fields = {name: in_words(getattr(value, name)) for name in value.__struct_fields__}
        name = type(value).__name__
        return {"struct": _RENAMED.get(name, name), **fields}
    if isinstance(value, Batch):
        return {"batch": [bytes(part).hex() for part in value.to_parts()]}
    if isinstance(value, bytes | memoryview):
        return bytes(value).hex()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, list | tuple | array | BitMap64):
        return [in_words(each) for each in value]
    if isinstance(value, dict):
        return {str(key): in_words(each) for key, each in value.items()}
    return value


def is_as_said(found: Any, said: Any) -> bool:
    """Whether everything that is said is so. Structs may have got fields since."""
    if isinstance(said, dict):
        return isinstance(found, dict) and all(is_as_said(found.get(name), said[name]) for name in said)
    if isinstance(said, list):
        return len(found) == len(said) and all(map(is_as_said, found, said))
    return bool(found == said)


def fields_in(said: Any) -> Iterator[tuple[str, str]]:
    """(struct, field) of all structs in it."""
    if isinstance(said, dict):
        for name, value in said.items():
            if "struct" in said and name != "struct":
                yield said["struct"], name
            yield from fields_in(value)
    elif isinstance(said, list):
        for each in said:
            yield from fields_in(each)


# ---------------------------------------------------------------------------------------------------
# One of each


def one_of(kind: Any, numbers: Iterator[int], where: str = "") -> Any:
    """A value of a type in which every field is something, and no two are alike."""
    if kind is Batch:
        return a_batch(
            next(numbers), 2, ts=[1000, 1001], tags=["ü", None], nodes=["n", "m"], metas=[b"{}", None]
        )
    if kind is BitMap64:
        return BitMap64([next(numbers), 100 + next(numbers)])
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = msgspec.structs.fields(kind)
        return kind(**{field.name: one_of(field.type, numbers, field.name) for field in fields})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return list(kind)[-1]
    makes: dict[Any, Callable[[], Any]] = {
        int: lambda: next(numbers),
        float: lambda: next(numbers) + 0.5,
        bool: lambda: True,
        str: lambda: f"{where} ü {next(numbers)}",
        bytes: lambda: b"\x00\xff%d" % next(numbers),
    }
    if kind in makes:
        return makes[kind]()
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return inner[-1]
    if origin is typing.Annotated:
        return one_of(inner[0], numbers, where)
    if origin in (typing.Union, types.UnionType):
        return one_of(next(each for each in inner if each is not type(None)), numbers, where)
    if origin is tuple:
        return tuple(one_of(each, numbers, where) for each in inner if each is not Ellipsis)
    if origin is dict:
        return {one_of(inner[0], numbers, where): one_of(inner[1], numbers, where)}
    return [one_of(inner[0], numbers, where), one_of(inner[0], numbers, where)]


def one_change(kind: type[Change]) -> Change:
    change: Any = one_of(kind, count(3))
    if isinstance(change, BatchForwarded | StreamAppended):  # these have none
        change = msgspec.structs.replace(change, idempotency_key=None)
    if isinstance(change, StreamAppended):
        tails = [
            binary_records.tail_of([(b"name", b"value")], b"body"),
            binary_records.tail_of([], b"\x00\xff"),
        ]
        change = msgspec.structs.replace(change, batch=render_binary(tails, first_seq=9, times=1000))
    return change  # type: ignore[no-any-return]


def frame_line(kind: type[Change]) -> dict[str, Any]:
    change = one_change(kind)
    number, version, _, parts = frames.encode(1, change)
    content = b"".join(map(bytes, parts)).hex()
    return {"kind": number, "version": version, "content": content, "says": in_words(change)}


def state_line() -> dict[str, Any]:
    state = one_of(ShardState, count(3))
    return {"content": b"".join(frames.encode_state(state)).hex(), "says": in_words(state)}


# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", lines_of(FRAMES), ids=lambda line: str(line["says"]["struct"]))
def test_a_golden_frame_says_what_it_said(line: dict[str, Any]) -> None:
    found = frames.decode(line["kind"], line["version"], memoryview(bytes.fromhex(line["content"])))
    assert is_as_said(in_words(found), line["says"]), (in_words(found), line["says"])


@pytest.mark.parametrize("line", lines_of(STATES))
def test_a_golden_snapshot_says_what_it_said(line: dict[str, Any]) -> None:
    found = frames.decode_state(memoryview(bytes.fromhex(line["content"])))
    assert is_as_said(in_words(found), line["says"])


def missing_frames() -> Iterator[type[Change]]:
    """Kinds of which there is no line, or none that has all fields."""
    lines = lines_of(FRAMES)
    for kind in frames._KINDS:
        there = {
            found for line in lines if line["says"]["struct"] == kind.__name__ for found in fields_in(line)
        }
        if not there or not there >= set(fields_in(in_words(one_change(kind)))):
            yield kind


def is_state_missing() -> bool:
    there = {found for line in lines_of(STATES) for found in fields_in(line)}
    return not there >= set(fields_in(state_line()))


def test_there_is_a_golden_line_for_every_kind_of_change_and_every_field() -> None:
    how = "run `python -m tests.storage.test_golden_facts`, and see that lines are only added"
    assert [kind.__name__ for kind in missing_frames()] == [], how
    assert not is_state_missing(), how


def test_what_is_not_as_it_was_is_seen() -> None:
    said = in_words(one_of(ShardState, count(3)))
    other = in_words(one_of(ShardState, count(4)))
    assert is_as_said(said, said) and not is_as_said(other, said)
    assert is_as_said({**said, "came_later": 0}, said) and not is_as_said(said, {**said, "was_there": 0})


def add(path: Path, lines: list[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


if __name__ == "__main__":
    add(FRAMES, [frame_line(kind) for kind in missing_frames()])
    add(STATES, [state_line()] if is_state_missing() else [])
