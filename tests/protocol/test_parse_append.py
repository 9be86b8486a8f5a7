"""Goal: a write is understood exactly, or refused with an error that names the field; payloads stay.

Method: bodies as clients write them, legal and not; generated JSON, valid or damaged, judged by `json` too.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.protocol.errors import BatchTooLarge, InvalidRequest, RecordTooLarge, StreamsError
from streams.protocol.model.boxes import BoxPatch
from streams.protocol.model.records import render
from streams.protocol.payloads.appends import ParsedAppend, RecordLimits, parse_append, parse_append_lines
from tests.support.machines import sampled

LIMITS = RecordLimits()
SMALL = RecordLimits(
    batch_records_max=2,
    record_bytes_max=40,
    meta_bytes_max=20,
    meta_keys_max=2,
    tag_bytes_max=4,
    node_bytes_max=3,
)


def parsed(body: bytes | str, limits: RecordLimits = LIMITS) -> ParsedAppend:
    return parse_append(body.encode() if isinstance(body, str) else body, limits)


def one(fields: str, limits: RecordLimits = LIMITS) -> ParsedAppend:
    return parsed(f'{{"records":[{{{fields}}}]}}', limits)


def refused(body: bytes | str, limits: RecordLimits = LIMITS) -> StreamsError:
    with pytest.raises(StreamsError) as caught:
        parsed(body, limits)
    return caught.value


def test_every_option_is_understood() -> None:
    columns, request = parsed(
        '{"records":[{"data":1}],"node":"n","idempotency_key":"k","create":false,"config":{"ttl_ms":5},'
        '"disable_backpressure":true,"match_seq":3,"fencing_token":"t","trim_before_seq":2}'
    )
    assert columns.nodes == ["n"]
    assert (request.idempotency_key, request.create, request.config) == ("k", False, BoxPatch(ttl_ms=5))
    assert request.disable_backpressure
    assert (request.match_seq, request.fencing_token, request.trim_before_seq) == (3, "t", 2)


def test_options_that_are_absent_say_nothing() -> None:
    request = one('"data":1').options
    assert (request.idempotency_key, request.create, request.config, request.match_seq) == (None,) * 4
    assert (request.fencing_token, request.trim_before_seq, request.disable_backpressure) == (
        None,
        None,
        False,
    )


def test_columns_that_no_record_uses_are_absent() -> None:
    columns = parsed('{"records":[{"data":1,"tag":"","node":null,"meta":null},{"data":2,"ts":null}]}').columns
    assert columns.count == 2
    assert (columns.tags, columns.nodes, columns.metas, columns.times) == (None,) * 4


def test_columns_keep_a_place_for_every_record() -> None:
    columns = parsed(
        '{"records":[{"data":1,"tag":"t"},{"data":2,"node":"n"},{"data":3,"meta":{"a":1}},{"data":4,"ts":9}]}'
    ).columns
    assert columns.tags == b"t\0\0\0"
    assert columns.nodes == [None, "n", None, None]
    assert columns.metas is not None and [meta and bytes(meta) for meta in columns.metas] == [
        None,
        None,
        b'{"a":1}',
        None,
    ]
    assert columns.times == [None, None, None, 9]


def test_the_node_of_the_write_fills_in_for_records_without_one() -> None:
    nodes = parsed('{"node":"w","records":[{"data":1},{"data":2,"node":"own"},{"data":3,"node":""}]}').columns
    assert nodes.nodes == ["w", "own", "w"]


@pytest.mark.parametrize(
    "data",
    [
        "1.0",
        "1e400",
        "-0",
        "0.10",
        "12345678901234567890123",
        '"\\u0041"',
        '"é"',
        "{ }",
        '{"b":1, "a":1}',
        "null",
    ],
)
def test_payloads_keep_their_very_bytes(data: str) -> None:
    columns = one(f'"data": {data} ,"meta":{{"x": {data}}}').columns
    assert bytes(columns.datas[0]).decode() == data
    assert columns.metas is not None and columns.metas[0] is not None
    assert bytes(columns.metas[0]).decode() == f'{{"x": {data}}}'
    batch = render(columns, first_seq=1, times=1)
    assert f'"data":{data}}}'.encode() in batch.blob


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@sampled(200)
@given(json_values.map(json.dumps), st.data())
def test_nothing_that_is_not_json_is_ever_stored(text: str, data: st.DataObject) -> None:
    """One damaged payload would damage every answer that it is part of."""
    at = data.draw(st.integers(0, len(text)))
    cut = data.draw(st.integers(0, 2))
    damaged = (
        text[:at] + data.draw(st.text('{}[]",:\\/0159eE.+-tfnu \n\t\x01é', max_size=2)) + text[at + cut :]
    )
    body = f'{{"records":[{{"data":{damaged}}}]}}'
    try:
        found = parsed(body)
    except InvalidRequest:
        return
    # It was taken, so it is JSON, and what is stored of it is JSON too.
    json.loads(body)
    for payload in found.columns.datas:
        json.loads(bytes(payload))
    json.loads(b"[" + render(found.columns, first_seq=1, times=1).blob + b"]")


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ("", "records"),
        ("{", "body: not valid JSON"),
        ("[]", "body:"),
        ("7", "body:"),
        ("{}", "records"),
        ('{"records":[]}', "records: must hold at least one"),
        ('{"records":{}}', "records:"),
        ('{"records":[1]}', "records[0]:"),
        ('{"records":[{}]}', "records[0]:"),
        ('{"records":[{"data":1},{"tag":"x"}]}', "records[1]:"),
        ('{"records":[{"data":1,"tag":7}]}', "records[0].tag:"),
        ('{"records":[{"data":1,"node":[]}]}', "records[0].node:"),
        ('{"records":[{"data":1,"meta":[1]}]}', "records[0].meta: must be a JSON object"),
        ('{"records":[{"data":1,"meta":"x"}]}', "records[0].meta:"),
        ('{"records":[{"data":1,"ts":-1}]}', "records[0].ts:"),
        ('{"records":[{"data":1,"ts":1.5}]}', "records[0].ts:"),
        ('{"records":[{"data":1,"ts":9007199254740992}]}', "records[0].ts:"),
        ('{"records":[{"data":1,"tga":"x"}]}', "tga"),
        ('{"records":[{"data":1}],"recods":1}', "recods"),
        ('{"records":[{"data":1}],"match_seq":-1}', "match_seq:"),
        ('{"records":[{"data":1}],"match_seq":18446744073709551616}', "match_seq:"),
        ('{"records":[{"data":1}],"trim_before_seq":18446744073709551616}', "trim_before_seq:"),
        ('{"records":[{"data":1}],"create":"yes"}', "create:"),
        ('{"records":[{"data":1}],"config":{"ttl":1}}', "ttl"),
        ('{"records":[{"data":1}],"config":{"ttl_ms":-1}}', "config.ttl_ms:"),
        ('{"records":[{"data":1}],"idempotency_key":""}', "idempotency_key: must have 1 to 256"),
        (f'{{"records":[{{"data":1}}],"idempotency_key":"{"k" * 257}"}}', "idempotency_key:"),
        ('{"records":[{"data":1,"tag":"a\\u0000b"}]}', "records[0].tag: 'a\\x00b' contains a NUL"),
        ('{"records":[{"data":1}],"node":"a\\u0000b"}', "node:"),
        ('{"records":[{"data":1,"tag":"\\ud800"}]}', "body: not valid JSON"),
        ('{"records":[{"data":' + "[" * 5000 + "]" * 5000 + "}]}", "nested too deeply"),
        ('{"records":5,"deep":' + "[" * 5000 + "]" * 5000 + "}", "records:"),
    ],
)
def test_a_refusal_names_the_place(body: str, place: str) -> None:
    error = refused(body)
    assert isinstance(error, InvalidRequest)
    assert place in error.message


@pytest.mark.parametrize(
    "body",
    [
        b'{"records":[{"data":"\xff"}]}',
        b'{"records":[{"data":"\xed\xa0\x80"}]}',
        b'{"records":[{"data":"\xc3',
    ],
)
def test_bytes_that_are_not_utf8_are_refused_where_they_stand(body: bytes) -> None:
    assert "body: not valid UTF-8 at byte 21" in refused(body).message


def test_a_write_may_have_as_many_records_as_allowed_and_no_more() -> None:
    assert parsed('{"records":[{"data":1},{"data":2}]}', SMALL).columns.count == 2
    error = refused('{"records":[{"data":1},{"data":2},{"data":3}]}', SMALL)
    assert isinstance(error, BatchTooLarge) and error.detail == {"limit": 2}


def test_data_and_meta_together_may_be_as_large_as_allowed_and_no_more() -> None:
    data = json.dumps("x" * 20)
    meta = '{"m":' + "1" * 12 + "}"
    assert len(data) + len(meta) == 40
    assert one(f'"data":{data},"meta":{meta}', SMALL).columns.count == 1
    for larger in (f'"data":{json.dumps("x" * 21)},"meta":{meta}', f'"data":{json.dumps("x" * 39)}'):
        with pytest.raises(RecordTooLarge) as caught:
            parsed(f'{{"records":[{{"data":1}},{{{larger}}}]}}', SMALL)
        assert caught.value.detail == {"index": 1, "limit": 40}


def test_meta_has_its_own_limits() -> None:
    assert one('"data":1,"meta":{"a":1,"b":2}', SMALL).columns.metas is not None
    with pytest.raises(RecordTooLarge, match=r"records\[0\]\.meta: has 21 bytes"):
        one('"data":1,"meta":{"a":"' + "x" * 13 + '"}', SMALL)
    with pytest.raises(InvalidRequest, match=r"records\[0\]\.meta: has 3 keys"):
        one('"data":1,"meta":{"a":1,"b":2,"c":3}', SMALL)


@pytest.mark.parametrize(("field", "limit"), [("tag", 4), ("node", 3)])
def test_tags_and_nodes_are_measured_in_bytes(field: str, limit: int) -> None:
    assert one(f'"data":1,"{field}":"{"x" * limit}"', SMALL).columns.count == 1
    for text in ("x" * (limit + 1), "é" * (limit // 2 + 1)):
        with pytest.raises(InvalidRequest, match=rf"records\[0\]\.{field}: .* is longer than {limit} bytes"):
            one(f'"data":1,"{field}":"{text}"', SMALL)
    assert one(f'"data":1,"{field}":"é"', SMALL).columns.count == 1


def test_the_node_of_the_write_is_limited_too() -> None:
    with pytest.raises(InvalidRequest, match=r"node: .* is longer than 3 bytes"):
        parsed('{"records":[{"data":1}],"node":"four"}', SMALL)


# -- NDJSON


def lines(body: bytes, node: str | None = None, limits: RecordLimits = LIMITS) -> Any:
    return parse_append_lines(body, node, limits)


def test_lines_are_records_and_blank_ones_are_passed_over() -> None:
    columns = lines(b'{"data":1.0}\r\n\n  \n{"data":"\xc3\xa9","tag":"t"}\n', "n")
    assert [bytes(data) for data in columns.datas] == [b"1.0", '"é"'.encode()]
    assert (columns.tags, columns.nodes) == (b"\0t", ["n", "n"])


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (b"", "records: must hold at least one"),
        (b"\n\n", "records: must hold at least one"),
        (b'{"data":1}\n{"data":}', "body: not valid JSON"),
        (b'{"data":1}\n{"data":1,"tag":7}', "records[1].tag:"),
        (b'{"data":1}\n{"tag":"x"}', "records[1]:"),
        (b'{"data":1} {"data":2}', "1 lines hold 2 records"),
        (b'{"data":1},{"data":2}', "every line must hold one JSON object"),
        (b'{"data":1}],"records":[{"data":2}', "every line must hold one JSON object"),
        (b'{"data":[1\n2]},{"data":3}', "every line must hold one JSON object"),
        (b'{"data":"\xff"}', "body: not valid UTF-8"),
        (b'{"data":1,"tag":"a\\u0000"}', "records[0].tag:"),
    ],
)
def test_lines_that_are_not_one_record_each_are_refused(body: bytes, place: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        lines(body)
    assert place in caught.value.message


def test_lines_keep_to_the_limits() -> None:
    with pytest.raises(BatchTooLarge):
        lines(b'{"data":1}\n' * 3, limits=SMALL)
