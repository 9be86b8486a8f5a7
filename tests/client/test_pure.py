"""What the client decides without waiting: whether to repeat, when a batch goes, what an event is, what an
error is."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import inspect
import json
import re
import uuid
from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streams
from streams.client import answers
from streams.client.answers import Record, decode
from streams.client.batching import Backlog, Bounds, PendingBatch
from streams.client.errors import AnswerLost, NotAnAnswer, NotJson, Unreachable, WriteOverCap, error_of
from streams.client.events import EventReader
from streams.client.options import BoxSettings, ProducerBounds, Times, WriteFields, WriteOptions
from streams.client.retry import FOREVER, NEVER, Retry
from streams.client.working import DELAY_MS_MAX, delay_ms
from streams.protocol.errors import (
    BY_CODE,
    BoxFull,
    BoxNotFound,
    Busy,
    DataDamaged,
    InvalidRequest,
    OutcomeUnknown,
    Refused,
    ShardUnavailable,
    StreamsError,
    Throttled,
    Uncertain,
)
from streams.protocol.model.boxes import BoxPatch, TimestampingPatch
from tests.support import twin


def test_the_twin_for_threads_is_not_stale() -> None:
    assert twin.stale() == [], "run `make twin`"


# -- repeating


def pause(error: StreamsError, policy: Retry = FOREVER, **how: object) -> float | None:
    asked = {"attempt": 0, "spent_s": 0.0, "is_repeatable": True, "luck": 0.0, **how}
    return policy.pause_s(error, **asked)  # type: ignore[arg-type]


def test_options_have_the_names_that_are_taken() -> None:
    """A checker believes these types; so they must not fall behind."""
    assert BoxSettings.__annotations__.keys() == set(BoxPatch.__struct_fields__)
    assert Times.__annotations__.keys() == set(TimestampingPatch.__struct_fields__)
    taken = inspect.signature(streams.Client().box("b").append_batch).parameters.keys()
    assert {*WriteFields.__annotations__, *WriteOptions.__annotations__} == taken - {"entries"}
    assert ProducerBounds.__annotations__.keys() == {each.name for each in dataclasses.fields(Bounds)}


def test_what_was_refused_is_never_repeated() -> None:
    for leaf in BY_CODE.values():
        if issubclass(leaf, Refused):
            assert pause(leaf()) is None
    assert pause(StreamsError("a bug of the server")) is None


def test_what_was_busy_is_repeated_whatever_the_request() -> None:
    for error in (Throttled(), ShardUnavailable(), Unreachable()):
        assert pause(error, is_repeatable=False) is not None


def test_what_is_uncertain_is_repeated_only_where_that_does_no_harm() -> None:
    for error in (OutcomeUnknown(), AnswerLost()):
        assert pause(error, is_repeatable=True) is not None
        assert pause(error, is_repeatable=False) is None


def test_a_limit_that_waiting_does_not_lift_is_told_at_once() -> None:
    assert pause(Throttled(limit="boxes")) is None
    assert pause(Throttled(limit="in_flight")) is not None


def test_the_server_is_not_asked_again_before_it_said_so() -> None:
    assert pause(Throttled(retry_after_ms=750)) == 0.75
    assert pause(DataDamaged(retry_after_ms=60_000), Retry(total_s=30)) is None


@given(st.integers(0, 10_000), st.floats(0, 1), st.floats(0, 100))
def test_pauses_grow_to_a_bound_and_end_with_the_time_there_is(
    attempt: int, luck: float, spent_s: float
) -> None:
    policy = Retry(total_s=30, pause_s_first=0.05, pause_s_max=2)
    found = pause(Throttled(), policy, attempt=attempt, luck=luck, spent_s=spent_s)
    if found is None:
        assert spent_s + 2 > 30
    else:
        assert 0.025 <= found <= 2 and spent_s + found <= 30
    assert pause(Throttled(), NEVER, attempt=attempt) is None


def test_a_place_where_nobody_listens_can_have_a_time_of_its_own() -> None:
    policy = Retry(total_s=30, unreachable_s=0)
    assert pause(Unreachable(), policy) is None
    assert pause(ShardUnavailable(), policy) is not None


def test_the_more_often_a_job_failed_the_longer_it_waits() -> None:
    waits = [delay_ms(deliveries) for deliveries in range(1, 40)]
    assert waits[:4] == [1000, 2000, 4000, 8000]
    assert waits == sorted(waits) and waits[-1] == DELAY_MS_MAX


# -- errors


def test_an_error_keeps_its_family_and_its_detail() -> None:
    for code, leaf in BY_CODE.items():
        body = json.dumps({"error": {"code": code, "message": "m", "detail": {"a": 1}}}).encode()
        found = error_of(400, body)
        assert type(found) is leaf and found.message == "m" and found.detail == {"a": 1}


def test_a_shard_that_went_away_is_uncertain_when_it_may_have_done_it() -> None:
    error = {"code": "shard_unavailable", "message": "m"}
    assert isinstance(error_of(503, json.dumps({"error": error}).encode()), Busy)
    unknown = {"error": {**error, "detail": {"outcome": "unknown"}}}
    assert isinstance(error_of(503, json.dumps(unknown).encode()), Uncertain)


def test_the_header_says_how_long_to_wait_unless_the_answer_says_it_better() -> None:
    body = {"error": {"code": "throttled", "message": "m"}}
    assert error_of(429, json.dumps(body).encode(), retry_after="3").detail == {"retry_after_ms": 3000}
    body["error"]["detail"] = {"retry_after_ms": 20}  # type: ignore[assignment]
    assert error_of(429, json.dumps(body).encode(), retry_after="1").detail == {"retry_after_ms": 20}


def test_what_is_not_a_server_of_ours_is_told_so() -> None:
    assert isinstance(error_of(200, b"<html>", url="http://x"), NotAnAnswer)
    assert isinstance(error_of(404, b"<html>nginx", url="http://x"), NotAnAnswer)
    assert isinstance(error_of(502, b"bad gateway"), Uncertain)
    assert isinstance(error_of(503, b"down for maintenance"), Busy)
    assert "http://x" in error_of(404, b"", url="http://x").message


# -- answers


def test_numbers_that_no_float_holds_do_not_hide_a_record() -> None:
    body = b'{"$seq":1,"$ts":2,"data":[1e400,123456789012345678901234567890]}'
    assert decode(body, Record).data == [inf, 123456789012345678901234567890]


# -- events


@given(st.lists(st.integers(1, 30), max_size=40))
def test_events_are_the_same_however_the_bytes_are_cut(cuts: list[int]) -> None:
    text = b'retry: 2000\n\n: hb 17\n\nevent: record\r\nid: abc\r\ndata: {"a":1}\r\n\r\n'
    text += b"event: x\ndata: 1\ndata: 2\n\n"
    reader, found, at = EventReader(), [], 0
    for cut in [*cuts, len(text)]:
        found += reader.feed(text[at : at + cut])
        at += cut
    assert found == [("record", b'{"a":1}', "abc"), ("x", b"1\n2", "abc")]


# -- batches


def filled(bounds: Bounds, sizes: list[int]) -> tuple[Backlog[None], list[PendingBatch[None]]]:
    backlog: Backlog[None] = Backlog(bounds)
    batches: list[PendingBatch[None]] = []
    for number, size in enumerate(sizes):
        batch = backlog.batch_for(size)
        if batch is None:
            batch = backlog.start(PendingBatch(str(len(batches)), None, float(number)))
            batches.append(batch)
        backlog.add(batch, bytes(size))
    return backlog, batches


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 10), st.integers(1, 100))
def test_batches_hold_everything_in_order_and_no_more_than_they_may(
    sizes: list[int], records_max: int, bytes_max: int
) -> None:
    backlog, batches = filled(Bounds(batch_records=records_max, batch_bytes=bytes_max), sizes)
    assert [len(record) for batch in batches for record in batch.records] == sizes
    assert backlog.held_records == len(sizes)
    for batch in batches:
        assert batch.count <= records_max
        assert batch.count == 1 or batch.bytes <= bytes_max + batch.count
    while backlog.due_in_s(inf) is not None:
        batch = backlog.take()
        batch.settle(batch.count, 7)
        backlog.release(batch)
    assert backlog.is_idle and backlog.held_bytes == 0


def test_a_batch_goes_when_it_is_full_or_old_or_somebody_waits() -> None:
    bounds = Bounds(batch_records=2, linger_ms=5)
    assert filled(bounds, [])[0].due_in_s(0) is None
    alone, _ = filled(bounds, [1])
    assert alone.due_in_s(0.001) == pytest.approx(0.004)
    assert alone.due_in_s(0.005) == 0
    assert filled(bounds, [1, 1])[0].due_in_s(0) == 0
    alone.is_flushing = True
    assert alone.due_in_s(0) == 0


def test_what_is_held_has_a_bound_and_one_large_record_passes_alone() -> None:
    backlog, (batch,) = filled(Bounds(held_bytes=10, held_records=100), [20])
    assert not backlog.has_room(1)
    backlog.take().settle(1, 1)
    backlog.release(batch)
    assert backlog.has_room(1_000)


def test_each_record_of_a_batch_has_the_outcome_of_its_run() -> None:
    _, (batch,) = filled(Bounds(), [1, 1, 1, 1])
    refusal = BoxFull()
    batch.settle(2, 10)
    with pytest.raises(LookupError):
        batch.outcome(2)
    batch.settle(1, refusal)
    batch.settle(1, 12)
    assert [batch.outcome(index) for index in range(4)] == [10, 11, refusal, 12]
    with pytest.raises(AssertionError):
        batch.settle(1, 13)


@pytest.mark.parametrize("bad", [{"batch_records": 0}, {"held_bytes": 0}, {"linger_ms": -1}])
def test_bounds_that_make_no_sense_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Bounds(**bad)


def test_a_code_of_a_newer_server_is_still_an_error() -> None:
    body = b'{"error": {"code": "something_new", "message": "m"}}'
    assert type(error_of(418, body)) is StreamsError
    assert isinstance(error_of(404, b'{"error": {"code": "box_not_found", "message": "m"}}'), BoxNotFound)


class Point(msgspec.Struct):
    x: float
    raw: bytes | None = None


@dataclasses.dataclass
class Pair:
    left: object
    right: object


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (float("nan"), "data"),
        ({"a": [1, {"b": float("inf")}]}, "data.a[1].b"),
        ([None, float("-inf")], "data[1]"),
        (b"raw", "data"),
        ({"a": bytearray(b"x")}, "data.a"),
        ({"a": {1, 2}}, "data.a"),
        ((1, frozenset()), "data[1]"),
        (Point(float("nan")), "data.x"),
        ([Point(1.0, b"x")], "data[0].raw"),
        (Pair(1, {"n": float("nan")}), "data.right.n"),
        ({1: float("nan")}, "data.1"),
    ],
)
def test_a_value_that_json_cannot_hold_is_refused_with_its_place(value: object, place: str) -> None:
    with pytest.raises(NotJson) as refused:
        answers.encode_entry(value)
    assert isinstance(refused.value, ValueError) and isinstance(refused.value, Refused)
    assert refused.value.detail == {"place": place} and refused.value.message.startswith(f"{place}: ")
    with pytest.raises(NotJson, match=re.escape(f"records[2].{place}: ")):
        answers.encode_entries([1, 2, value])
    with pytest.raises(NotJson, match=r"meta\.m"):
        answers.encode_entry(answers.Entry(1, meta={"m": value}))


def test_other_values_are_written_as_before() -> None:
    for value in (
        None,
        {"a": None, "b": [1.5, True, "é"], "c": 2**63},
        {1: 2},
        datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC),
        uuid.UUID(int=7),
        decimal.Decimal("1.10"),
        Pair(1, None),
        [Point(1.0)],
    ):
        assert answers.encode_entry(value) == b'{"data":%b}' % msgspec.json.encode(value)
    entry = answers.Entry(msgspec.Raw(b"[1e400]"), tag="t", node="n", meta={"m": None}, ts=5)
    record = b'{"data":[1e400],"meta":{"m":null},"tag":"t","node":"n","ts":5}'
    assert answers.encode_entry(entry) == record


def test_every_field_of_an_entry_is_sent() -> None:
    entry = answers.Entry(
        1, "t", "n", {"m": 2}, 3, ordering_key="k", job_priority=4, delay_ms=0, deliver_at=5
    )
    sent = msgspec.json.decode(answers.encode_entry(entry))
    assert sent == msgspec.structs.asdict(entry)


def test_a_write_over_the_cap_of_its_box_is_not_called_a_record_that_is_too_large() -> None:
    fault = {"code": "record_too_large", "message": "m", "detail": {"cap_records": 3, "cap_bytes": 0}}
    error = error_of(400, json.dumps({"error": fault}).encode())
    assert type(error) is WriteOverCap and isinstance(error, BY_CODE["record_too_large"])
    fault["detail"] = {"index": 0}
    assert type(error_of(400, json.dumps({"error": fault}).encode())) is BY_CODE["record_too_large"]


# -- the public names


def test_every_public_name_can_be_imported_and_is_listed() -> None:
    for name in streams.__all__:
        assert getattr(streams, name) is not None
    assert set(streams.__all__) <= set(dir(streams))
    errors = {name for name in streams.__all__ if name in {kind.__name__ for kind in BY_CODE.values()}}
    assert errors == {kind.__name__ for kind in BY_CODE.values()}, "every error has a public name"


def test_a_timeout_is_a_positive_number_of_seconds() -> None:
    with pytest.raises(InvalidRequest, match="timeout"):
        streams.Client(timeout=0)
