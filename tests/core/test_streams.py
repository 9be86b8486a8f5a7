"""Goal: a stream keeps what S2 promises (s2 §9, §11, §14, §15): numbers from 0 without a gap, conditions,
the fence, trims that lag, retention by time of writing, exact limits; all of it through restarts and seals.

Method: commands to the pure machine, with the clock as an argument.
"""

from __future__ import annotations

from typing import Any

import pytest

from shard.core.boxes import offline_edits as surgery
from shard.core.s2 import stream as stream_module
from shard.core.s2 import streams as streams_module
from shard.core.s2.stream import TRIM_LAG_MS
from streams.protocol.errors import (
    CipherMismatch,
    FencingTokenMismatch,
    Forbidden,
    InvalidRequest,
    PositionUnwritten,
    ResourceAlreadyExists,
    SeqMismatch,
    StreamDeletionPending,
    StreamNotFound,
    Throttled,
)
from streams.protocol.messages import commands, s2
from streams.protocol.messages.commands import ReadStream
from streams.protocol.messages.s2 import Spec, SpecPatch
from streams.protocol.model import binary_records
from tests.support.machines import Driver

BOX = "the-basin/a/stream"
NOW = 1_700_000_000_000


def put(driver: Driver, box: str = BOX, **options: Any) -> s2.PutStreamReply:
    fields: dict[str, Any] = {"basin_number": 1, "asked": Spec(), "defaults": Spec(), **options}
    reply = driver.ask(s2.PutStream(box=box, **fields))
    assert isinstance(reply, s2.PutStreamReply)
    return reply


def write(*bodies: bytes, box: str = BOX, **options: Any) -> s2.AppendStream:
    return s2.AppendStream(box=box, tails=[binary_records.tail_of([], body) for body in bodies], **options)


def append(driver: Driver, *bodies: bytes, **options: Any) -> s2.AppendStreamReply:
    reply = driver.ask(write(*bodies, **options))
    assert isinstance(reply, s2.AppendStreamReply)
    return reply


def read(driver: Driver, from_seq: int = 0, **options: Any) -> s2.StreamRecords:
    fields: dict[str, Any] = {"limit": 1000, "may_follow": True, **options}
    reply = driver.ask(ReadStream(box=BOX, from_seq=from_seq, **fields))
    assert isinstance(reply, s2.StreamRecords)
    return reply


def numbers(driver: Driver, from_seq: int = 0, **options: Any) -> list[int]:
    return [record.seq_num for record in binary_records.records_of(read(driver, from_seq, **options).records)]


def tail(driver: Driver) -> tuple[int, int]:
    found = driver.ask(s2.GetStreamTail(BOX))
    return found.seq_num, found.timestamp


@pytest.fixture
def driver() -> Driver:
    driver = Driver(now_ms=NOW)
    driver.start("boot")
    put(driver)
    return driver


def restarted(driver: Driver) -> list[Driver]:
    survivors = [driver.reborn(), driver.reborn(state=driver.machine.snapshot())]
    for survivor in survivors:
        survivor.start("boot")
    return survivors


# -- records


def test_numbers_begin_at_0_and_the_tail_is_the_next_one(driver: Driver) -> None:
    assert tail(driver) == (0, 0)
    ack = append(driver, b"a", b"b")
    assert ack == s2.AppendStreamReply(0, NOW, 2, NOW)
    driver.now_ms += 5
    assert append(driver, b"c") == s2.AppendStreamReply(2, NOW + 5, 3, NOW + 5)
    assert tail(driver) == (3, NOW + 5)
    found = list(binary_records.records_of(read(driver).records))
    assert [(record.seq_num, record.timestamp, record.body) for record in found] == [
        (0, NOW, b"a"),
        (1, NOW, b"b"),
        (2, NOW + 5, b"c"),
    ]


def test_an_ack_and_what_is_read_wait_for_the_disk(driver: Driver) -> None:
    outcome = driver.do(write(b"a"))
    assert outcome.until_durable and outcome.waits_for_lsn == driver.machine.lsn
    assert read_nothing(driver)
    driver.sync()
    assert numbers(driver) == [0]


def read_nothing(driver: Driver) -> bool:
    outcome = driver.do(ReadStream(box=BOX, may_follow=True))
    assert isinstance(outcome.reply, s2.StreamRecords)
    return not outcome.reply.records and outcome.reply.tail_seq_num == 0


def test_a_reader_that_waits_gets_an_answer_only_when_there_is_one(driver: Driver) -> None:
    assert driver.do(ReadStream(box=BOX, wait_ms=1000, may_follow=True)).reply is None
    assert driver.do(ReadStream(box=BOX, wait_ms=1000, may_follow=True, limit=0)).reply is not None
    append(driver, b"a")
    assert numbers(driver, wait_ms=1000) == [0]


def test_times_follow_the_mode_and_never_go_back(driver: Driver) -> None:
    assert append(driver, b"a", b"b", times=[5, None]).end_ts == NOW
    assert append(driver, b"c", times=[7]).end_ts == NOW
    assert append(driver, b"d", times=[NOW + 99]).end_ts == NOW
    driver.ask(s2.PatchStream(BOX, SpecPatch(uncapped=True), Spec()))
    assert append(driver, b"e", times=[NOW + 99]).end_ts == NOW + 99
    driver.ask(s2.PatchStream(BOX, SpecPatch(mode="client-require"), Spec()))
    with pytest.raises(InvalidRequest, match="timestamp"):
        append(driver, b"f")
    driver.ask(s2.PatchStream(BOX, SpecPatch(mode="arrival"), Spec()))
    assert append(driver, b"g", times=[1]).end_ts == NOW + 99


def test_conditions_hold_or_nothing_is_written(driver: Driver) -> None:
    append(driver, b"a", match_seq_num=0, fencing_token="")
    with pytest.raises(SeqMismatch) as mismatch:
        append(driver, b"b", match_seq_num=0)
    assert mismatch.value.detail["next_seq"] == 1
    with pytest.raises(FencingTokenMismatch) as fenced:  # the fence is looked at first
        append(driver, b"b", match_seq_num=0, fencing_token="x")
    assert fenced.value.detail["token"] == ""
    assert tail(driver)[0] == 1


def test_a_fence_counts_from_the_next_write_on(driver: Driver) -> None:
    append(driver, b"f", fence="mine", fencing_token="")
    append(driver, b"a", fencing_token="mine")
    append(driver, b"b")  # who does not ask is not held to it
    for survivor in restarted(driver):
        with pytest.raises(FencingTokenMismatch) as refused:
            append(survivor, b"c", fencing_token="")
        assert refused.value.detail["token"] == "mine"
        append(survivor, b"c", fence="", fencing_token="mine")
        append(survivor, b"d", fencing_token="")


def test_a_refusal_waits_for_what_it_tells_of(driver: Driver) -> None:
    written = driver.do(write(b"a", fence="mine"))
    refused = driver.do(write(b"b", fencing_token=""))
    assert isinstance(refused.reply, FencingTokenMismatch)
    assert refused.waits_for_lsn == written.waits_for_lsn


def test_inputs_of_a_session_behind_a_failed_one_fail_too(driver: Driver) -> None:
    append(driver, b"a", chain="s")
    with pytest.raises(SeqMismatch):
        append(driver, b"b", chain="s", match_seq_num=7)
    with pytest.raises(InvalidRequest, match="earlier input"):
        append(driver, b"c", chain="s")
    append(driver, b"d", chain="other")
    assert tail(driver)[0] == 2


def test_failed_sessions_are_forgotten_at_last(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "_FAILED_SESSIONS_MAX", 1)
    for chain in ("one", "two"):
        with pytest.raises(SeqMismatch):
            append(driver, b"b", chain=chain, match_seq_num=7)
    append(driver, b"a", chain="one")
    with pytest.raises(InvalidRequest):
        append(driver, b"a", chain="two")


def test_what_is_closed_in_another_way_than_the_stream_says_is_refused(driver: Driver) -> None:
    with pytest.raises(CipherMismatch) as mismatch:
        append(driver, b"a", cipher="aes-256-gcm")
    assert mismatch.value.detail["cipher"] is None
    assert tail(driver)[0] == 0


# -- reading


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"from_seq": 1}, [1, 2, 3]),
        ({"tail_offset": 1}, [3]),
        ({"tail_offset": 9}, [0, 1, 2, 3]),
        ({"from_ts": NOW + 10}, [2, 3]),
        ({"from_ts": 0}, [0, 1, 2, 3]),
        ({"until": NOW + 10}, [0, 1]),
        ({"until": NOW}, []),
        ({"limit": 3}, [0, 1, 2]),
        ({"limit": 0}, []),
        ({"max_bytes": 0}, []),
        ({"max_bytes": 108}, [0]),
        ({"max_bytes": 107}, []),
        ({"max_bytes": 3 * 108}, [0, 1, 2]),
        ({"from_seq": 9, "clamp": True}, []),
        ({"from_ts": NOW + 99, "clamp": True}, []),
    ],
)
def test_a_read_begins_and_ends_where_it_is_told(
    driver: Driver, asked: dict[str, Any], expected: list[int]
) -> None:
    append(driver, b"x" * 100, b"x" * 100)
    driver.now_ms += 10
    append(driver, b"x" * 100)
    append(driver, b"x" * 100)
    for _ in range(2):
        from_seq = asked.get("from_seq", 0)
        rest = {name: value for name, value in asked.items() if name != "from_seq"}
        assert numbers(driver, from_seq, **rest) == expected
        driver.seal(BOX)
        driver.forget()


def test_limits_are_exact_in_metered_bytes_over_many_batches(driver: Driver) -> None:
    for _ in range(20):
        append(driver, b"x" * 42)  # 50 metered bytes, and more as it is kept
    assert numbers(driver, max_bytes=1000) == list(range(20))
    assert numbers(driver, max_bytes=999) == list(range(19))
    found = read(driver, max_bytes=999)
    assert found.is_full and found.next_seq_num == 19


def test_limits_are_exact_where_times_are_small(driver: Driver) -> None:
    driver.ask(s2.PatchStream(BOX, SpecPatch(mode="client-require"), Spec()))
    append(driver, b"", b"", b"", times=[0, 0, 1])
    assert numbers(driver, max_bytes=16) == [0, 1]


@pytest.mark.parametrize(
    "asked", [{"from_seq": 2}, {"from_seq": 2, "clamp": True}, {"from_ts": NOW + 1}, {"tail_offset": 0}]
)
def test_the_end_of_a_stream_is_no_place_for_those_who_would_not_wait(
    driver: Driver, asked: dict[str, Any]
) -> None:
    append(driver, b"a", b"b")
    with pytest.raises(PositionUnwritten) as refused:
        read(driver, **{"may_follow": False, **asked})
    assert (refused.value.detail["seq_num"], refused.value.detail["timestamp"]) == (2, NOW)


def test_a_start_beyond_the_end_is_refused_even_to_those_who_would_wait(driver: Driver) -> None:
    for asked in ({"from_seq": 1}, {"from_ts": 1}):
        with pytest.raises(PositionUnwritten):
            read(driver, **asked)
    assert numbers(driver, from_ts=0) == []


def test_a_later_page_goes_on_where_the_first_one_ended(driver: Driver) -> None:
    append(driver, b"a", b"b", b"c")
    first = read(driver, limit=2)
    assert (first.next_seq_num, first.is_full, first.tail_seq_num) == (2, True, 3)
    rest = read(driver, 2, begins=False, generation=first.generation)
    assert [record.seq_num for record in binary_records.records_of(rest.records)] == [2]
    with pytest.raises(StreamNotFound, match="created again"):
        read(driver, 2, begins=False, generation=first.generation + 1)


# -- trimming and retention


def test_a_trim_is_visible_at_once_except_to_followers_and_never_goes_beyond_itself(driver: Driver) -> None:
    append(driver, b"a", b"b", b"c")
    append(driver, b"t", trims=((0, 2),))
    assert numbers(driver) == numbers(driver, 1) == numbers(driver, tail_offset=4) == [2, 3]
    assert numbers(driver, from_ts=0) == [2, 3]
    assert numbers(driver, 3) == [3]
    assert numbers(driver, begins=False) == [0, 1, 2, 3], "a follower gets what the very batch trims"
    driver.now_ms += TRIM_LAG_MS
    driver.tick()
    assert numbers(driver) == numbers(driver, begins=False) == [2, 3]
    append(driver, b"t", trims=((0, 99),))
    assert numbers(driver) == [] and numbers(driver, begins=False) == [2, 3, 4]
    driver.now_ms += TRIM_LAG_MS
    assert numbers(driver, begins=False) == []  # due, whether or not a tick has come
    assert tail(driver) == (5, NOW + TRIM_LAG_MS)
    append(driver, b"t", trims=((0, 3),))  # back: nothing
    driver.now_ms += TRIM_LAG_MS
    driver.tick()
    assert numbers(driver, 5) == [5]


def test_trims_are_not_put_off_for_ever_by_later_ones(driver: Driver) -> None:
    for index in range(40):
        append(driver, b"t", trims=((0, index),))
        driver.now_ms += 100
        driver.tick()
    assert numbers(driver)[0] == 39
    assert numbers(driver, begins=False)[0] >= 15
    box = driver.machine.boxes[BOX]
    assert box.stream is not None and len(box.stream.trims) <= 9


def test_a_trim_that_waits_survives_a_restart(driver: Driver) -> None:
    append(driver, b"a", b"t", trims=((1, 1),))
    for survivor in restarted(driver):
        assert numbers(survivor, begins=False) == [0, 1]
        assert numbers(survivor) == [1]
        survivor.now_ms += TRIM_LAG_MS
        survivor.tick()
        assert numbers(survivor, begins=False) == [1]


def test_a_reader_learns_of_a_trim_when_it_is_durable_and_not_before(driver: Driver) -> None:
    append(driver, b"a", b"b")
    driver.machine.handle(write(b"t", trims=((0, 2),)), driver.now_ms)
    outcome = driver.machine.handle(ReadStream(box=BOX, limit=10, may_follow=True), driver.now_ms)
    assert isinstance(outcome.reply, s2.StreamRecords) and not outcome.reply.records
    assert outcome.waits_for_lsn > driver.machine.durable_lsn, "a power cut now would bring the records back"
    driver.sync()
    outcome = driver.machine.handle(ReadStream(box=BOX, limit=10, may_follow=True), driver.now_ms)
    assert outcome.waits_for_lsn <= driver.machine.durable_lsn


def test_records_expire_by_when_they_were_written(driver: Driver) -> None:
    driver.ask(s2.PatchStream(BOX, SpecPatch(age_secs=10, uncapped=True), Spec()))
    append(driver, b"a", times=[5])  # old by its own word, and new
    driver.now_ms += 6_000
    append(driver, b"b", times=[NOW + 10**9])
    assert numbers(driver) == [0, 1]
    driver.now_ms += 4_001
    driver.tick()
    assert numbers(driver) == [1]
    for survivor in restarted(driver):
        assert numbers(survivor) == [1]
        survivor.now_ms += 6_000
        assert numbers(survivor) == []
        assert tail(survivor)[0] == 2


def test_records_that_are_sealed_expire_too(driver: Driver) -> None:
    driver.ask(s2.PatchStream(BOX, SpecPatch(age_secs=10), Spec()))
    append(driver, b"a", b"b")
    driver.seal(BOX)
    driver.forget()
    driver.now_ms += 10_001
    driver.tick()
    assert driver.machine.boxes[BOX].log.count == 0


def test_records_are_kept_for_ever_where_the_config_says_so(driver: Driver) -> None:
    driver.ask(s2.PatchStream(BOX, SpecPatch(age_secs=0), Spec()))
    append(driver, b"a")
    driver.now_ms += 10**12
    driver.tick()
    assert numbers(driver) == [0]


def test_marks_of_time_stay_few(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "_PERIODS_MAX", 8)
    driver.ask(s2.PatchStream(BOX, SpecPatch(age_secs=0), Spec()))
    for index in range(40):
        append(driver, b"a")
        driver.now_ms += 30_000 if index != 20 else -90_000  # a clock that is set back does no harm
    box = driver.machine.boxes[BOX]
    assert box.stream is not None and 2 <= len(box.stream.last_seqs) <= 8
    driver.now_ms = NOW + 10**7
    driver.ask(s2.PatchStream(BOX, SpecPatch(age_secs=1), Spec()))
    driver.tick()
    assert numbers(driver) == []


def test_an_empty_stream_is_deleted_when_its_config_says_so(driver: Driver) -> None:
    driver.ask(s2.PatchStream(BOX, SpecPatch(age_secs=10, min_age_secs=5), Spec()))
    append(driver, b"a")
    driver.now_ms += 10_001
    driver.tick()
    assert tail(driver)[0] == 1
    driver.now_ms += 5_000
    driver.tick()
    with pytest.raises(StreamNotFound):
        tail(driver)


def test_a_stream_that_is_cut_off_goes_on_from_there(driver: Driver) -> None:
    driver.ask(s2.PatchStream(BOX, SpecPatch(age_secs=1000), Spec()))
    for _ in range(4):
        append(driver, b"a", b"b")
        driver.now_ms += 10_000
    append(driver, b"t", trims=((0, 99),))
    box = driver.machine.boxes[BOX]
    assert box.stream is not None and len(box.stream.last_seqs) > 2
    box.stream.cut_after(100)  # where there is nothing to cut
    for seq in (9, 7, 5):
        surgery.cut_after(box, seq, last_ts=NOW)
        box.stream.check(box.log.earliest_seq)
        assert max([*box.stream.last_seqs, 0]) <= seq
        assert all(trim.seq <= seq + 1 for trim in box.stream.trims)
    reply = driver.machine.handle(write(b"c"), driver.now_ms).reply
    assert isinstance(reply, s2.AppendStreamReply) and reply.start_seq_num == 5
    box.stream.check(box.log.earliest_seq)


# -- being there


def test_a_stream_is_made_once_and_a_repeat_is_recognised(driver: Driver) -> None:
    box = "the-basin/other"
    asked = Spec(age_secs=60)
    made = put(driver, box, asked=asked, defaults=Spec(mode="arrival"), token="t", cipher="aegis-256")
    assert made.result == "created"
    assert made.stream.spec == Spec(
        storage_class="express", age_secs=60, mode="arrival", uncapped=False, min_age_secs=0
    )
    for survivor in (driver, *restarted(driver)):
        assert put(survivor, box, asked=asked, token="t").result == "noop"
        for other in ({"asked": asked, "token": "u"}, {"asked": Spec(), "token": "t"}, {"asked": asked}):
            with pytest.raises(ResourceAlreadyExists):
                put(survivor, box, **other)


def test_ensuring_compares_what_the_config_comes_to(driver: Driver) -> None:
    assert put(driver, ensures=True).result == "noop"
    assert put(driver, ensures=True, defaults=Spec(age_secs=5)).result == "updated"
    assert put(driver, ensures=True, asked=Spec(age_secs=5)).result == "noop"
    assert put(driver, ensures=True, asked=Spec(age_secs=5), may_update=False).result == "noop"
    with pytest.raises(Forbidden):
        put(driver, ensures=True, asked=Spec(age_secs=6), may_update=False)
    assert driver.ask(s2.GetStream(BOX)).stream.spec.age_secs == 5


def test_what_a_patch_takes_back_is_the_default_again(driver: Driver) -> None:
    defaults = Spec(age_secs=99)
    changed = driver.ask(s2.PatchStream(BOX, SpecPatch(age_secs=5, uncapped=True), defaults))
    assert (changed.stream.spec.age_secs, changed.stream.spec.uncapped) == (5, True)
    back = driver.ask(s2.PatchStream(BOX, SpecPatch(age_secs=None), defaults))
    assert (back.stream.spec.age_secs, back.stream.spec.uncapped) == (99, True)
    assert driver.do(s2.PatchStream(BOX, SpecPatch(), defaults)).changes == []


def test_a_stream_is_seen_as_deleted_before_it_is_gone(driver: Driver) -> None:
    append(driver, b"a", fence="x")
    outcome = driver.do(s2.DeleteStream(BOX))
    assert outcome.wakes == (BOX,)
    driver.sync()
    again = driver.ask(s2.DeleteStream(BOX))
    assert again.stream.deleted_ms == NOW
    asked: list[s2.StreamCommand | s2.AppendStream | ReadStream] = [
        s2.GetStream(BOX),
        s2.GetStreamTail(BOX),
        s2.PatchStream(BOX, SpecPatch(), Spec()),
        s2.PutStream(box=BOX, basin_number=1, asked=Spec(), defaults=Spec(), ensures=True),
        write(b"b"),
        ReadStream(box=BOX),
    ]
    for command in asked:
        with pytest.raises(StreamDeletionPending):
            driver.ask(command)
    assert [name for name, _ in driver.ask(s2.ListStreams("the-basin/")).streams] == [BOX]
    for survivor in restarted(driver):
        survivor.now_ms += 99  # it is gone within 100 ms
        survivor.tick()
        for command in (*asked[:3], *asked[4:], s2.DeleteStream(BOX)):
            with pytest.raises(StreamNotFound):
                survivor.ask(command)
        put(survivor)
        append(survivor, b"b", fencing_token="", match_seq_num=0)


def test_a_remnant_of_another_basin_is_not_taken_for_a_stream_of_this_one(driver: Driver) -> None:
    with pytest.raises(StreamDeletionPending):
        put(driver, basin_number=2, ensures=True)
    driver.ask(s2.DeleteStream(BOX, 2))
    assert driver.ask(s2.GetStream(BOX)).stream.deleted_ms == 0
    driver.ask(s2.DeleteStream(BOX, 1))
    with pytest.raises(StreamDeletionPending):
        driver.ask(s2.GetStream(BOX))


def test_streams_count_as_boxes_where_there_is_a_limit() -> None:
    driver = Driver(now_ms=NOW)
    driver.start("boot")
    driver.machine.boxes_max = 1
    put(driver)
    with pytest.raises(Throttled):
        put(driver, "the-basin/more")


def test_a_list_has_streams_alone_in_order_and_says_how_far_it_looked(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams_module, "_LISTED_MAX", 4)
    names = [f"the-basin/{name}" for name in ("b", "c", "d")]
    for name in reversed(names):
        put(driver, name)
    for number in range(5):
        driver.append(1, box=f"the-box-{number}")
    put(driver, "zzz-basin/a")
    found: list[str] = []
    after = ""
    for _ in range(10):
        page = driver.ask(s2.ListStreams("", after, 2))
        found += [name for name, _ in page.streams]
        after = page.after
        if not after:
            break
    assert found == [BOX, *names, "zzz-basin/a"]
    inside = driver.ask(s2.ListStreams("the-basin/", "the-basin/b"))
    assert ([name for name, _ in inside.streams], inside.after) == (names[1:], "")
    with pytest.raises(StreamNotFound):
        driver.ask(s2.GetStream("the-box-1"))
    with pytest.raises(StreamNotFound):
        driver.ask(s2.DeleteStream("the-box-1"))


def test_usage_is_that_of_what_can_be_read(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "_LISTED_MAX", 2)
    others = [f"{BOX}-and-more", "the-basin/b", "the-basin-2/c"]
    for name in others:
        put(driver, name)
    append(driver, b"a", b"b")
    append(driver, b"c", box=others[0])
    driver.append(1, box="the-basin")
    sizes = [driver.state(name).bytes for name in (BOX, others[0])]
    driver.do(write(b"not synced yet"))

    def usage(prefix: str) -> tuple[int, int, int]:
        after, total = "", (0, 0, 0)
        while True:
            outcome = driver.do(s2.GetUsage(prefix, after))
            assert isinstance(outcome.reply, s2.StreamUsage) and outcome.waits_for_lsn == 0
            found = outcome.reply
            total = (total[0] + found.streams, total[1] + found.records, total[2] + found.bytes)
            after = found.after
            if not after:
                return total

    assert usage("the-basin/") == (3, 3, sum(sizes))
    assert usage("") == (4, 3, sum(sizes))
    assert usage("nobody/") == (0, 0, 0)
    assert driver.do(s2.GetUsage(BOX, "", True)).reply == s2.StreamUsage(1, 2, sizes[0])


# -- the view of /v0


def test_a_stream_reads_as_a_box_with_base64_in_it(driver: Driver) -> None:
    tails = [binary_records.tail_of([(b"k", b"\xff")], b"hi"), binary_records.sealed_tail(b"???", size=12)]
    driver.ask(s2.AppendStream(box=BOX, tails=tails))
    found = driver.read(box=BOX)
    assert found.records == (
        b'{"$seq":1,"$ts":%d,"meta":{"headers":[["aw==","/w=="]]},"data":"aGk="},'
        b'{"$seq":2,"$ts":%d,"meta":{"sealed":true},"data":"Pz8/"}'
    ) % (NOW, NOW)
    bare = driver.read(box=BOX, include_meta=False, include_data=False)
    assert bare.records == b'{"$seq":1,"$ts":%d},{"$seq":2,"$ts":%d}' % (NOW, NOW)
    one = driver.ask(commands.GetRecord(BOX, 1))
    assert one.record.startswith(b'{"$seq":1')
    assert driver.state(BOX).config.type == "stream"


def test_trims_ages_and_deletions_are_in_time_after_a_restart_with_a_clock_that_was_set_back() -> None:
    driver = Driver(now_ms=NOW)
    driver.start("boot")
    put(driver, asked=Spec(age_secs=60))
    append(driver, b"a", b"b")
    append(driver, b"c", trims=((0, 1),))
    put(driver, "the-basin/gone")
    driver.ask(s2.DeleteStream("the-basin/gone"))
    for again in (driver.reborn(), driver.reborn(state=driver.machine.snapshot())):
        again.now_ms -= 3_600_000
        again.start("boot")
        again.now_ms += TRIM_LAG_MS
        again.tick()
        assert "the-basin/gone" not in again.machine.boxes
        assert numbers(again) == [1, 2]
        again.now_ms += 60_001
        again.tick()
        assert again.machine.boxes[BOX].log.count == 0
