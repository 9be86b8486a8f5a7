"""Goal: promises that are broken only by an end in one narrow window, each with the window named.

Method: the shard of `life.py`, driven by hand to the window; then the power fails, or the disk does.
"""

from __future__ import annotations

import errno
import random

import pytest

from shard.storage.segments.store import Name
from streams.protocol.messages import commands
from streams.protocol.model.boxes import BoxPatch
from tests.crash.life import Life, World, columns, fingerprint, new_disk, read_all, recovered
from tests.crash.promises import Level


@pytest.fixture
def life() -> Life:
    begun = Life(new_disk(), World())
    begun.begin()
    return begun


def append(life: Life, box: str, text: str, **more: object) -> commands.AppendResult:
    data: dict[str, object] = {"text": text, "tag": None, "node": None}
    command = commands.Append(box=box, columns=columns([data]), **more)  # type: ignore[arg-type]
    reply = life.submit(command)
    assert isinstance(reply, commands.AppendResult), reply
    return reply


def put(life: Life, box: str, **config: object) -> None:
    life.submit(commands.PutBox(box, BoxPatch(**config)))  # type: ignore[arg-type]


def commit(life: Life) -> None:
    life.commit()
    life.sync()


def powered_off(life: Life) -> Life:
    """The next life after the power failed and took everything that was not synced."""
    life.world.ended(Level.POWER_CUT)
    after = Life(life.disk.crash(_Worst()), life.world)
    after.begin()
    return after


class _Worst(random.Random):
    """Chance that is never kind: of what was not synced, nothing stays."""

    def random(self) -> float:
        return 0.99

    def choice(self, options):  # type: ignore[no-untyped-def]
        return "lost" if "lost" in options else options[0]

    def randrange(self, *_: object) -> int:  # type: ignore[override]
        return 0


def texts(life: Life, box: str) -> dict[int, object]:
    return {seq: record["data"]["text"] for seq, record in read_all(life, box, limit=100).records.items()}


def test_what_a_failed_sync_left_in_memory_is_not_taken_for_durable_by_the_next_life(life: Life) -> None:
    """The kernel keeps pages that it could not write and calls them clean: a restarted shard reads them, its
    own sync of them succeeds, and the disk has none of them."""
    put(life, "box", durability="fsync")
    commit(life)
    append(life, "box", "staged")
    life.disk.fail_next("fdatasync", OSError(errno.EIO, "failed"))
    with pytest.raises(OSError):
        commit(life)
    life.world.ended(Level.KILL)
    restarted = Life(life.disk.kill(), life.world)
    restarted.begin()
    append(restarted, "box", "acked after the restart")
    commit(restarted)
    shown = texts(restarted, "box")
    after = powered_off(restarted)
    assert texts(after, "box") == shown


def test_a_memory_box_that_someone_was_told_of_is_there_after_a_power_cut(life: Life) -> None:
    """Its creation waits for the disk; who writes to it or reads it meanwhile must wait too."""
    put(life, "box", durability="memory", cap_records=7)
    before = life.answers
    append(life, "box", "one")
    was_told = life.answers > before
    after = powered_off(life)
    assert not was_told or "box" in after.machine.boxes


def test_a_repeated_key_is_not_acked_before_the_write_it_repeats(life: Life) -> None:
    """A disk box whose reservation is used up: the write waits for the disk, and so must its repetition."""
    put(life, "box", durability="disk")
    append(life, "box", "first")
    commit(life)
    life.world.clock.now_ms += 6_000
    life.tick()
    commit(life)
    first = append(life, "box", "second", idempotency_key="key")
    again = append(life, "box", "second", idempotency_key="key")
    assert (again.deduped, again.first_seq) == (True, first.first_seq)
    told = life.answers
    commit_without_sync(life)
    was_told = life.answers > told
    after = powered_off(life)
    third = append(after, "box", "third")
    assert not was_told or third.first_seq > again.last_seq


def test_a_key_that_was_used_in_memory_is_not_acked_before_the_box_is_stored(life: Life) -> None:
    put(life, "box", durability="memory")
    commit(life)
    append(life, "box", "one", idempotency_key="key")
    put(life, "box", durability="fsync")
    told = life.answers
    assert append(life, "box", "one", idempotency_key="key").deduped
    was_told = life.answers > told
    after = powered_off(life)
    assert not was_told or texts(after, "box") == {1: "one"}


def commit_without_sync(life: Life) -> None:
    """As far as the commit thread gets before the sync that someone waits for."""
    taken, life._backlog = life._backlog, []
    life.wal.append([frame for group, _, _ in taken for frame in group])
    life.machine.on_logged(life.wal.logged_lsn)
    life._release(life._until_logged, life.wal.logged_lsn)


def test_a_box_that_becomes_a_disk_box_again_is_protected_by_its_new_reservation_alone(life: Life) -> None:
    put(life, "box", durability="disk")
    commit(life)
    put(life, "box", durability="fsync")
    commit(life)
    put(life, "box", durability="disk")
    told = life.answers
    acked = append(life, "box", "acked")
    commit_without_sync(life)
    was_told = life.answers > told
    after = powered_off(life)
    assert not was_told or append(after, "box", "another").first_seq > acked.last_seq


def test_a_fence_of_a_memory_box_stays_when_the_box_becomes_a_stored_one(life: Life) -> None:
    put(life, "box", durability="memory")
    life.submit(commands.SetFence("box", "writer-1"))
    put(life, "box", durability="fsync")
    commit(life)
    after = powered_off(life)
    state = after.submit(commands.GetState("box"))
    assert isinstance(state, commands.BoxState) and state.fencing_token == "writer-1"


def test_a_cap_that_was_tightened_when_the_power_failed_holds_once_it_is_acked(life: Life) -> None:
    """The config and what it evicts are two frames. Only the first was written; the client, who has no
    answer, asks again."""
    put(life, "box", durability="fsync")
    for text in "abcdef":
        append(life, "box", text)
    commit(life)
    put(life, "box", cap_records=2)
    ((group, *_),) = life._backlog
    assert len(group) == 2
    life.wal.append(group[:1])
    life.wal.sync()
    after = powered_off(life)
    put(after, "box", cap_records=2)
    commit(after)
    assert list(texts(after, "box").values()) == ["e", "f"]


def test_nobody_is_told_of_a_deletion_that_a_power_cut_undoes(life: Life) -> None:
    put(life, "box", durability="fsync")
    commit(life)
    life.submit(commands.DeleteBox("box"))
    told = life.answers
    life.submit(commands.DeleteBox("box"))
    life.submit(commands.GetState("box"))
    assert life.answers == told, "told that the box is gone, before that is sure"


def test_recovery_that_was_killed_after_it_told_the_log_of_lost_seqs_tells_it_once(life: Life) -> None:
    put(life, "box", durability="disk")
    append(life, "box", "one")
    commit(life)
    append(life, "box", "two")
    commit_without_sync(life)
    after = powered_off(life)
    machine, _, _, store, _ = recovered(after.disk.kill())
    first = fingerprint(machine, store)
    again = Life(after.disk.kill(), after.world)
    again.begin()
    holes = [(hole.first_seq, hole.last_seq) for hole in again.machine.boxes["box"].log.holes]
    assert len(holes) == 1 and holes[0][0] == 2
    assert first["box"] == fingerprint(again.machine, again.store)["box"]


def upkept(life: Life) -> None:
    """Background work until there is none."""
    while life.do_upkeep():
        pass


def sealed(life: Life, box: str, texts: str, **config: object) -> None:
    """A box of which all is in a segment, durably."""
    put(life, box, durability="fsync", **config)
    for text in texts:
        append(life, box, text)
    commit(life)
    upkept(life)
    assert not life.machine.boxes[box].log.tail.records and life.machine.boxes[box].log.segments
    commit(life)


def snapshot(life: Life) -> None:
    life.begin_snapshot()
    life.finish_snapshot()


@pytest.mark.parametrize("how", ["box", "records"])
def test_the_file_of_a_segment_stays_until_its_end_is_durable(life: Life, how: str) -> None:
    """It was sealed after both snapshots, so only the log knows of it; what deletes it is staged; then there
    is a sweep, and the power fails before the log is synced."""
    snapshot(life)
    life.begin_snapshot()
    sealed(life, "box", "abcdefgh")
    if how == "box":
        life.submit(commands.DeleteBox("box"))
    else:
        life.submit(commands.DeleteRecords("box", before_seq=9))
    life.finish_snapshot()
    for _ in range(100):
        if life.disk.paths("/data/segments"):
            life.do_upkeep()
    assert life.disk.paths("/data/segments") == []
    after = powered_off(life)
    assert ("box" in after.machine.boxes) == (how == "records"), "the file was gone before the box was"
    assert how == "box" or texts(after, "box") == {}


def test_segments_of_a_box_in_memory_are_not_written_anew(life: Life) -> None:
    """What dies in it is not logged, so a segment without it could not take the place of the old one when the
    log is replayed."""
    sealed(life, "box", "abcdefgh")
    put(life, "box", durability="memory")
    life.submit(commands.DeleteRecords("box", before_seq=5))
    upkept(life)
    commit(life)
    after = powered_off(life)
    assert after.machine.boxes["box"].is_memory and texts(after, "box") == {}


def go_to_memory_while_sealed(life: Life) -> None:
    put(life, "box", durability="fsync")
    for text in "abcdefgh":
        append(life, "box", text)
    commit(life)
    assert life.do_upkeep(), "a segment is about to be written"
    put(life, "box", durability="memory")


def test_a_box_that_goes_to_memory_while_it_is_sealed_stays_out_of_the_log(life: Life) -> None:
    go_to_memory_while_sealed(life)
    life.submit(commands.DeleteRecords("box", before_seq=5))
    upkept(life)
    assert life.upkeep.segments_sealed == 0
    commit(life)
    after = powered_off(life)
    assert after.machine.boxes["box"].is_memory and texts(after, "box") == {}


def test_a_box_that_went_to_memory_and_back_while_it_was_sealed_loses_nothing(life: Life) -> None:
    go_to_memory_while_sealed(life)
    life.submit(commands.DeleteRecords("box", before_seq=3))
    append(life, "box", "i")
    put(life, "box", durability="fsync")
    commit(life)
    upkept(life)
    commit(life)
    expected = dict(zip(range(3, 10), "cdefghi", strict=True))
    assert texts(life, "box") == expected
    assert texts(powered_off(life), "box") == expected


def test_the_copy_here_of_a_segment_that_went_cold_is_dropped_by_the_next_life(life: Life) -> None:
    """The process died between the durable word of the move and the end of the file here."""
    for number in range(4):
        sealed(life, "box", "abcdefgh"[number:] + "x" * number)
    hot = {Name.of(segment).file for segment in life.machine.segments() if segment.is_cold}
    assert hot, "something went cold"
    after = Life(life.disk.kill(), life.world)
    for segment in after.machine.segments():  # the file is back, as if it had never been dropped
        if segment.is_cold:
            name = Name.of(segment)
            content = after.disk.peek(f"/cold/segments/{name.file}")
            handle = after.disk.create(f"/data/segments/{name.file}")
            after.disk.pwritev(handle, [content], 0)
            after.disk.fsync(handle)
    after.begin()
    for _ in range(2):
        snapshot(after)
    upkept(after)
    kept = {path.removeprefix("/data/segments/") for path in after.disk.paths("/data/segments")}
    assert not kept & hot
    assert len(texts(after, "box")) == 32
