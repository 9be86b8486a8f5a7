"""Snapshot and follow: a client that restores has the state that all records make, however saving and reading
interleave."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import streams
from streams import Record, Restored, Tombstone
from streams.client import framing
from streams.client.framing import Assembler, entries_of, part_of, writes_of
from streams.client.stores import open_store
from streams.protocol.errors import SeqMismatch
from tests.support.objectstore import Bucket, bucket, object_server

__all__ = ["bucket", "object_server"]  # fixtures


def parts(id: str, covers: int, content: bytes) -> list[tuple[framing.SnapshotPart, Any]]:
    found = []
    for entry in entries_of(id, covers, content):
        record = Record(1, 1, entry.data, entry.tag, None, entry.meta or {})
        part = part_of(record)
        assert part is not None
        found.append((part, entry.data))
    return found


def followed(snapshots: Any, until: int) -> tuple[Any, list[Any]]:
    """(the state as a reader makes it that adds up numbers, all that it was shown), up to the number
    `until`."""
    state, shown = 0, []
    for item in snapshots.restore_and_follow():
        shown.append(item)
        if isinstance(item, Restored):
            state = item.state or 0
        elif isinstance(item, Record):
            state += item.data
            if item.data == until:
                break
    return state, shown


# -- parts


@given(st.binary(max_size=5000), st.integers(1, 700))
def test_a_state_of_any_size_is_whole_again(content: bytes, part_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(framing, "PART_BYTES", part_bytes)
        made = parts("a", 7, content)
    assembler = Assembler()
    results = [assembler.add(part, data) for part, data in made]
    assert results[-1] == content and not any(result is not None for result in results[:-1])


def test_parts_of_a_writer_that_died_mean_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "PART_BYTES", 2)
    dead, whole = parts("dead", 1, b"abcdef"), parts("whole", 2, b"uvwxyz")
    assembler = Assembler()
    found = [assembler.add(part, data) for part, data in [*dead[:2], *whole, dead[2]]]
    assert [content for content in found if content is not None] == [b"uvwxyz"]
    assert [assembler.add(part, data) for part, data in dead[1:]] == [None, None]


def test_a_record_that_only_looks_like_a_part_is_none() -> None:
    for meta in (
        {},
        {"snapshot": 1},
        {"snapshot": {"id": "x"}},
        {"snapshot": {**dict.fromkeys(("id", "part", "parts", "covers"), "x")}},
    ):
        assert part_of(Record(1, 1, "", "snapshot", None, meta)) is None
    assert part_of(Record(1, 1, "", "other", None, {"snapshot": {}})) is None


def test_only_the_first_write_depends_on_the_place_and_only_the_last_trims(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(framing, "PART_BYTES", 1)
    monkeypatch.setattr(framing, "PARTS_PER_WRITE", 2)
    shape = [(len(part), first, last) for part, first, last in writes_of(entries_of("a", 1, b"12345"))]
    assert shape == [(2, True, False), (2, False, False), (1, False, True)]


# -- in the box


def test_a_state_in_the_box_takes_the_place_of_what_it_covers(client: streams.Client, name: str) -> None:
    box = client.box(name)
    snapshots = box.snapshots()
    assert snapshots.load() == Restored(None, 0)
    box.append_batch([1, 2, 4])
    snapshots.save(7, 3)
    assert box.state().count == 1, "one record is all that is left"
    box.append(8)
    state, shown = followed(snapshots, until=8)
    assert state == 15 and shown[0] == Restored(7, 3) and [type(item) for item in shown[1:]] == [Record]


def test_saving_is_refused_when_something_came_since(client: streams.Client, name: str) -> None:
    box = client.box(name)
    box.append_batch([1, 2])
    with pytest.raises(SeqMismatch):
        box.snapshots().save(1, 1)
    assert [item.data for item in box.read()] == [1, 2]  # type: ignore[union-attr]


def test_a_big_state_is_framed_and_others_may_write_in_between(
    client: streams.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framing, "PART_BYTES", 10)
    monkeypatch.setattr(framing, "PARTS_PER_WRITE", 1)
    box = client.box(name)
    box.append_batch([1, 2])
    snapshots = box.snapshots(dump=lambda state: b"%035d" % state, load=int)
    appended = itertools.count(4)
    real = box.append_batch

    def between(entries: Any, **options: Any) -> Any:
        found = real(entries, **options)
        if not options.get("trim_before_seq"):
            real([next(appended)])  # another writer is faster
        return found

    monkeypatch.setattr(box, "append_batch", between)
    snapshots.save(3, 2)
    monkeypatch.undo()
    numbers = [item.data for item in box.read() if isinstance(item, Record) and item.tag is None]
    assert numbers == [4, 5, 6], "what came in between is there, what is covered is not"
    state, shown = followed(snapshots, until=6)
    assert (state, shown[0]) == (3 + 4 + 5 + 6, Restored(3, 2))
    # What a state of a writer that died half way leaves behind is passed over.
    seq = box.position().head_seq
    first = entries_of("dead", seq, b"x" * (framing.PART_BYTES + 1))[:1]
    box.append_batch(first, match_seq=seq + 1)
    box.append(7)
    assert followed(snapshots, until=7)[0] == 3 + 4 + 5 + 6 + 7


def test_a_reader_that_was_overtaken_is_given_the_newer_state(client: streams.Client, name: str) -> None:
    box = client.box(name)
    snapshots = box.snapshots()
    box.append_batch([1, 2])
    items = snapshots.restore_and_follow()
    assert next(items) == Restored(None, 0)
    box.append_batch([4, 8])
    snapshots.save(15, 4)  # now 1, 2, 4 and 8 are gone, and this reader has seen none of them
    box.append(16)
    assert next(items) == Restored(15, 4)
    last = next(items)
    assert isinstance(last, Record) and last.data == 16


# -- outside


def test_states_outside_are_kept_by_the_seq_they_cover(
    client: streams.Client, name: str, tmp_path: Path
) -> None:
    box = client.box(name)
    snapshots = box.stored_snapshots(tmp_path / "states")
    assert snapshots.load() == Restored(None, 0)
    for _ in range(5):
        seq = box.append(1).last_seq
        snapshots.save(seq, seq)
    names = sorted(path.name for path in (tmp_path / "states").iterdir())
    assert [int(each.partition("-")[0]) for each in names] == [3, 4, 5], "the newest three"
    box.append(100)
    state, shown = followed(snapshots, until=100)
    assert state == 105 and shown[0] == Restored(5, 5)
    box.drop()
    box.append(1)
    assert snapshots.load() == Restored(None, 0), "those of another life of the box are not its own"


def test_a_reader_that_was_overtaken_by_a_trim_is_given_the_newer_state_from_outside(
    client: streams.Client, name: str, tmp_path: Path
) -> None:
    box = client.box(name)
    snapshots = box.stored_snapshots(str(tmp_path / "states"))
    box.append_batch([1, 2, 4])
    items = snapshots.restore_and_follow()
    assert next(items) == Restored(None, 0)
    snapshots.save(7, 3, trim=True)
    box.append(8)
    assert next(items) == Restored(7, 3)
    last = next(items)
    assert isinstance(last, Record) and last.data == 8


def test_a_box_made_anew_is_told(client: streams.Client, name: str, tmp_path: Path) -> None:
    for snapshots in (client.box(name).snapshots(), client.box(name).stored_snapshots(tmp_path / "states")):
        box = client.box(name)
        box.append_batch([1, 2])
        items = snapshots.restore_and_follow()
        assert [type(next(items)) for _ in range(3)] == [Restored, Record, Record]
        box.drop()
        box.append(5)
        gap, first = next(items), next(items)
        assert isinstance(gap, Tombstone) and gap.reason == "recreated"
        assert isinstance(first, Record) and first.data == 5
        box.drop()


def test_an_object_store_keeps_them_as_well(bucket: Bucket) -> None:
    store = open_store(f"{bucket.url}/states")
    store.put("a", b"1")
    store.put("b", b"2")
    assert store.names() == ["a", "b"] and store.get("a") == b"1" and store.get("c") is None
    store.drop("a")
    assert store.names() == ["b"]


@pytest.mark.parametrize("is_outside", [True, False])
def test_a_reader_learns_that_it_is_current_and_one_that_is_bounded_ends(
    client: streams.Client, name: str, tmp_path: Path, is_outside: bool
) -> None:
    box = client.box(name)
    snapshots: Any = box.stored_snapshots(tmp_path) if is_outside else box.snapshots()
    assert list(snapshots.restore_and_read()) == [Restored(None, 0)], "there is no box yet"
    box.append_batch([1, 2])
    snapshots.save(3, 2)
    box.append_batch([4, 8])
    restored, *records = snapshots.restore_and_read()
    assert restored == Restored(3, 2) and [record.data for record in records] == [4, 8]
    shown = snapshots.restore_and_follow(marks_caught_up=True)
    kinds = [type(next(shown)) for _ in range(4)]
    assert kinds == [Restored, Record, Record, streams.CaughtUp]
    box.append(16)
    assert next(shown).data == 16


def test_a_reader_learns_at_once_of_a_trim_that_left_nothing(
    client: streams.Client, name: str, tmp_path: Path
) -> None:
    box = client.box(name)
    box.append_batch([1, 2])
    snapshots = box.stored_snapshots(tmp_path)
    items = snapshots.restore_and_follow()
    assert [type(next(items)) for _ in range(3)] == [Restored, Record, Record]
    box.append_batch([4, 8])
    snapshots.save(15, 4, trim=True)
    assert next(items) == Restored(15, 4), "no further append is needed"


def test_a_plain_reader_can_tell_snapshots_from_data(client: streams.Client, name: str) -> None:
    box = client.box(name)
    box.append_batch([1, 2])
    box.snapshots().save(3, 2)
    box.append(4, tag="snapshot")
    found = [item for item in box.read() if isinstance(item, Record)]
    assert [streams.is_snapshot(item) for item in found] == [True, False]


# -- against a model


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(["append", "save", "restore", "step"]), max_size=25), st.booleans(), st.uuids()
)
def test_every_reader_ends_with_the_sum_of_all(
    client: streams.Client, tmp_path: Path, steps: list[str], outside: bool, unique: Any
) -> None:
    """Readers that start at any moment and stop anywhere, one of which saves now and then: all end at the
    sum."""
    box = client.box(f"sums.{unique}")
    box.create()
    place = tmp_path / str(unique)
    snapshots: Any = box.stored_snapshots(place) if outside else box.snapshots()
    total, head = 0, 0
    readers: list[Any] = []
    for number, step in enumerate(steps, 1):
        if step == "append":
            box.append(number)
            total += number
        elif step == "save":
            head = box.position().head_seq
            if outside:
                snapshots.save(total, head, trim=True)
            else:
                snapshots.save(total, head)
        elif step == "restore":
            readers.append([snapshots.restore_and_follow(), None])
        elif readers and _has_more(readers[number % len(readers)], total):
            _advance(readers[number % len(readers)])
    box.append(1_000_000)
    for reader in readers:
        while reader[1] is None or reader[1] < 1_000_000:
            _advance(reader)
        assert reader[1] == total + 1_000_000
    box.drop()


def _has_more(reader: list[Any], total: int) -> bool:
    """False if the reader has everything, and would wait for the next append."""
    return reader[1] != total


def _advance(reader: list[Any]) -> None:
    """One more item into the sum."""
    item = next(reader[0])
    if isinstance(item, Restored):
        reader[1] = item.state or 0
    elif isinstance(item, Record):
        reader[1] = (reader[1] or 0) + item.data
