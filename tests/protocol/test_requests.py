"""Goal: every op is understood and every complaint names its field; replies have the fields of the contract.

Method: messages as a gateway sends them go through `decode_command`; replies through `encode_reply`.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from streams.protocol import wire
from streams.protocol.errors import BoxFull, InvalidRequest, StreamsError
from streams.protocol.messages import commands
from streams.protocol.messages.commands import Match
from streams.protocol.messages.requests import (
    decode_command,
    encode_failure,
    encode_reply,
    failure_decoder,
    parse_match,
    status_of,
)
from streams.protocol.model.boxes import BoxConfig, BoxPatch, Timestamping
from streams.protocol.payloads.appends import RecordLimits

ONE = b'{"records":[{"data":1}]}'


def command(
    op: int, body: bytes = b"", *, box: str = "b", query: str = "", form: int = wire.FORM_JSON, key: str = ""
) -> Any:
    head = wire.head_encoder.encode(wire.RequestHead(box, query, form, key))
    return decode_command(op, head, body, RecordLimits())


def refusal(op: int, body: bytes = b"", **options: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        command(op, body, **options)
    return caught.value.message


BOX_OPS = [
    wire.OP_APPEND,
    wire.OP_DIFF,
    wire.OP_PUT_BOX,
    wire.OP_GET_STATE,
    wire.OP_DELETE_BOX,
    wire.OP_GET_RECORD,
    wire.OP_GET_TAIL,
    wire.OP_DELETE_RECORDS,
    wire.OP_SET_FENCE,
]


@pytest.mark.parametrize("op", BOX_OPS)
@pytest.mark.parametrize("box", ["", "-b", "a/b", "../x", "é", "a" * 256, "a b", "a\n"])
def test_a_name_that_is_no_box_name_is_refused_by_every_op(op: int, box: str) -> None:
    assert refusal(op, ONE, box=box, query="seq=1" if op == wire.OP_GET_RECORD else "").startswith("box: ")


@pytest.mark.parametrize("op", [*BOX_OPS, wire.OP_LIST_BOXES])
def test_an_unknown_parameter_is_refused_by_every_op(op: int) -> None:
    body = {wire.OP_DELETE_RECORDS: b'{"before_seq":1}', wire.OP_SET_FENCE: b'{"token":"t"}'}.get(op, ONE)
    assert "surprise" in refusal(op, body, query="surprise=1")


def test_an_op_or_head_that_is_not_known_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="op 99 is not known"):
        command(99)
    with pytest.raises(InvalidRequest, match="head:"):
        decode_command(wire.OP_APPEND, b"\xc1", ONE, RecordLimits())


@pytest.mark.parametrize("query", ["a", "a=1&a=2", "%ff=1", "&", "=".join(["x"] * 3) + "&y"])
def test_a_query_that_is_no_list_of_parameters_is_refused(query: str) -> None:
    assert refusal(wire.OP_GET_STATE, query=query)


def test_a_parameter_given_twice_is_refused() -> None:
    assert refusal(wire.OP_GET_STATE, query="touch=1&touch=0") == "touch: given twice in the query"


# -- append


def test_an_append_carries_all_its_options() -> None:
    body = (
        b'{"records":[{"data":1}],"idempotency_key":"k","create":true,"config":{"cap_records":1},'
        b'"disable_backpressure":true,"match_seq":1,"fencing_token":"t","trim_before_seq":1}'
    )
    found = command(wire.OP_APPEND, body, query="return_seqs=false", key="header")
    assert (found.box, found.columns.count, found.idempotency_key, found.create) == ("b", 1, "k", True)
    assert (found.config, found.disable_backpressure) == (BoxPatch(cap_records=1), True)
    assert (found.match_seq, found.fencing_token, found.trim_before_seq, found.return_seqs) == (
        1,
        "t",
        1,
        False,
    )


def test_the_idempotency_key_of_the_header_counts_when_the_body_has_none() -> None:
    assert command(wire.OP_APPEND, ONE, key="header").idempotency_key == "header"
    assert command(wire.OP_APPEND, ONE).idempotency_key is None
    assert "idempotency_key" in refusal(wire.OP_APPEND, ONE, key="k" * 257)


def test_lines_take_the_other_fields_from_the_query() -> None:
    query = (
        "return_seqs=0&create=1&disable_backpressure=true&match_seq=4&trim_before_seq=3&fencing_token=t&node=n"
        "&idempotency_key=k&config=%7B%22ttl_ms%22%3A5%7D"
    )
    found = command(
        wire.OP_APPEND, b'{"data":1}\n{"data":2}', query=query, form=wire.FORM_NDJSON, key="header"
    )
    assert (found.columns.count, found.columns.nodes) == (2, ["n", "n"])
    assert (found.match_seq, found.trim_before_seq, found.fencing_token) == (4, 3, "t")
    assert (found.return_seqs, found.create, found.disable_backpressure) == (False, True, True)
    assert (found.idempotency_key, found.config) == ("k", BoxPatch(ttl_ms=5))


def test_lines_need_no_query_and_take_the_key_of_the_header() -> None:
    found = command(wire.OP_APPEND, b'{"data":1}', form=wire.FORM_NDJSON, key="header")
    assert (found.idempotency_key, found.config, found.create, found.return_seqs) == (
        "header",
        None,
        None,
        True,
    )
    assert command(wire.OP_APPEND, b'{"data":1}', form=wire.FORM_NDJSON).idempotency_key is None


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("match_seq=x", "match_seq"),
        ("match_seq=-1", "match_seq"),
        ("match_seq=18446744073709551616", "match_seq"),
        ("match_seq=" + "1" * 21, "match_seq"),
        ("match_seq=%C2%B2", "match_seq"),
        ("create=maybe", "create"),
        ("return_seqs=2", "return_seqs"),
        ("config=%7B", "body"),
        ("records=1", "records"),
    ],
)
def test_parameters_of_lines_are_checked(query: str, field: str) -> None:
    assert refusal(wire.OP_APPEND, b'{"data":1}', query=query, form=wire.FORM_NDJSON).startswith(field)


def test_an_append_with_a_bad_flag_is_refused() -> None:
    assert "return_seqs" in refusal(wire.OP_APPEND, ONE, query="return_seqs=maybe")


# -- diff


def test_an_empty_diff_asks_for_the_defaults() -> None:
    assert command(wire.OP_DIFF) == commands.ReadBox(box="b", limit=256, max_bytes=1024 * 1024)
    assert command(wire.OP_DIFF, b"{}") == command(wire.OP_DIFF)
    assert command(wire.OP_DIFF, b'{"limit":0,"max_bytes":0}') == command(wire.OP_DIFF)


def test_a_diff_carries_all_its_options_and_clamps_them() -> None:
    body = (
        b'{"from_seq":5,"limit":5000,"max_bytes":99999999,"node":["a","","b"],"include_tags":true,'
        b'"include_meta":false,"include_data":false,"wait_ms":99999,"match":["tag","Glob","x*"],"generation":7}'
    )
    assert command(wire.OP_DIFF, body) == commands.ReadBox(
        box="b",
        from_seq=5,
        limit=1000,
        max_bytes=8 * 1024 * 1024,
        nodes=frozenset({"a", "b"}),
        include_tags=True,
        include_meta=False,
        include_data=False,
        wait_ms=30_000,
        match=Match("x", is_prefix=True),
        generation=7,
    )
    assert command(wire.OP_DIFF, b'{"from_ts":5,"node":"n"}') == commands.ReadBox(
        box="b", from_ts=5, nodes=frozenset({"n"})
    )


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"from_seq":1,"from_ts":1}', "from_ts"),
        (b'{"from_seq":-1}', "from_seq"),
        (b'{"from_seq":18446744073709551616}', "from_seq"),
        (b'{"limit":-1}', "limit"),
        (b'{"limit":"1"}', "limit"),
        (b'{"max_bytes":-1}', "max_bytes"),
        (b'{"wait_ms":-1}', "wait_ms"),
        (b'{"from_ts":-1}', "from_ts"),
        (b'{"node":7}', "node"),
        (b'{"node":"%b"}' % (b"n" * 129), "node"),
        (b'{"node":["a\\u0000"]}', "node"),
        (json.dumps({"node": [f"n{i}" for i in range(257)]}).encode(), "node: has 257"),
        (b'{"match":7}', "match"),
        (b'{"match":""}', "match"),
        (b'{"generation":-1}', "generation"),
        (b'{"from":1}', "from"),
        (b'{"include_tags":1}', "include_tags"),
        (b"[", "body"),
    ],
)
def test_a_diff_that_makes_no_sense_names_the_field(body: bytes, field: str) -> None:
    assert field in refusal(wire.OP_DIFF, body)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ("x", Match("x")),
        ("x*", Match("x*")),
        (["tag", "Eq", "x"], Match("x")),
        (["tag", "Eq", "x*"], Match("x*")),
        (["tag", "Glob", "x*"], Match("x", is_prefix=True)),
        (["tag", "Glob", "*"], Match("", is_prefix=True)),
    ],
)
def test_a_match_is_a_tag_or_a_prefix(value: Any, match: Match) -> None:
    assert parse_match(value) == match


@pytest.mark.parametrize(
    "value",
    [
        "",
        [],
        ["tag", "Eq"],
        ["tag", "Eq", "x", "y"],
        ["data", "Eq", "x"],
        ["tag", "eq", "x"],
        ["tag", "Eq", ""],
        ["tag", "Glob", "x"],
        ["tag", "Glob", "*x"],
        ["tag", "Glob", "x**"],
        ["tag", "Glob", ""],
    ],
)
def test_any_other_match_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="match:"):
        parse_match(value)


def test_a_match_never_accepts_an_untagged_record() -> None:
    assert not Match("", is_prefix=True).accepts("")
    assert Match("", is_prefix=True).accepts("x")
    assert Match("x").accepts("x") and not Match("x").accepts("xy")
    assert Match("x", is_prefix=True).accepts("xy") and not Match("x", is_prefix=True).accepts("y")


# -- the others


def test_the_other_ops_are_understood() -> None:
    assert command(wire.OP_PUT_BOX) == commands.PutBox("b", BoxPatch())
    assert command(wire.OP_PUT_BOX, b'{"ttl_ms":5}') == commands.PutBox("b", BoxPatch(ttl_ms=5))
    assert command(wire.OP_GET_STATE) == commands.GetState("b", True)
    assert command(wire.OP_GET_STATE, query="touch=false") == commands.GetState("b", False)
    assert command(wire.OP_LIST_BOXES, box="") == commands.ListBoxes("", "", 100)
    assert command(wire.OP_LIST_BOXES, query="prefix=p&after=pa&page_size=7") == commands.ListBoxes(
        "p", "pa", 7
    )
    assert command(wire.OP_DELETE_BOX) == commands.DeleteBox("b", False)
    assert command(wire.OP_DELETE_BOX, query="if_empty=1") == commands.DeleteBox("b", True)
    assert command(wire.OP_GET_RECORD, query="seq=7") == commands.GetRecord("b", 7)
    assert command(wire.OP_GET_TAIL) == commands.GetTail("b")
    assert command(wire.OP_DELETE_RECORDS, b'{"before_seq":7}') == commands.DeleteRecords("b", 7, None)
    assert command(wire.OP_DELETE_RECORDS, b'{"match":"x","before_seq":0}') == commands.DeleteRecords(
        "b", 0, Match("x")
    )
    assert command(wire.OP_SET_FENCE, b'{"token":"t","if_token":""}') == commands.SetFence("b", "t", "")
    assert command(wire.OP_SET_FENCE, b'{"token":""}') == commands.SetFence("b", "", None)


@pytest.mark.parametrize(
    ("op", "body", "query", "field"),
    [
        (wire.OP_PUT_BOX, b'{"ttl_ms":-1}', "", "ttl_ms"),
        (wire.OP_PUT_BOX, b'{"ttl":1}', "", "ttl"),
        (wire.OP_PUT_BOX, b'{"durability":"tape"}', "", "durability"),
        (wire.OP_PUT_BOX, b'{"timestamping":{"mode":"never"}}', "", "timestamping.mode"),
        (wire.OP_GET_STATE, b"", "touch=maybe", "touch"),
        (wire.OP_LIST_BOXES, b"", "page_size=0", "page_size"),
        (wire.OP_LIST_BOXES, b"", "page_size=1001", "page_size"),
        (wire.OP_DELETE_BOX, b"", "if_empty=maybe", "if_empty"),
        (wire.OP_GET_RECORD, b"", "", "seq"),
        (wire.OP_GET_RECORD, b"", "seq=x", "seq"),
        (wire.OP_DELETE_RECORDS, b"", "", "before_seq"),
        (wire.OP_DELETE_RECORDS, b'{"before_seq":18446744073709551616}', "", "before_seq"),
        (wire.OP_DELETE_RECORDS, b'{"match":["tag","Glob","x"]}', "", "match"),
        (wire.OP_SET_FENCE, b"", "", "token"),
        (wire.OP_SET_FENCE, b'{"token":"%b"}' % (b"t" * 49), "", "token"),
        (wire.OP_SET_FENCE, b'{"token":"t","if_token":"%b"}' % (b"t" * 49), "", "if_token"),
        (wire.OP_SET_FENCE, b'{"token":"a\\u0000"}', "", "token"),
    ],
)
def test_what_makes_no_sense_names_the_field(op: int, body: bytes, query: str, field: str) -> None:
    assert field in refusal(op, body, query=query)


# -- replies


def answer(reply: Any) -> Any:
    return json.loads(encode_reply(reply))


def test_an_append_is_answered_with_its_seqs_unless_told_not_to() -> None:
    reply = commands.AppendResult("b", 3, 5, 9, True, False, True)
    expected = {
        "box": "b",
        "first_seq": 3,
        "last_seq": 5,
        "seqs": [3, 4, 5],
        "head_seq": 9,
        "count": 3,
        "created": True,
        "deduped": False,
    }
    assert answer(reply) == expected and status_of(reply) == 201
    again = commands.AppendResult("b", 3, 5, 9, False, True, False)
    del expected["seqs"]
    assert answer(again) == {**expected, "created": False, "deduped": True} and status_of(again) == 200


def test_a_read_is_answered_with_lag_and_tombstone() -> None:
    reply = commands.DiffResult(
        box="b",
        records=b'{"$seq":4,"data":1e400}',
        next_from_seq=4,
        generation=8,
        head_seq=6,
        earliest_seq=4,
        tombstone=commands.Tombstone(1, 3, "cap", 3, 4, 6),
        records_scanned=1,
    )
    assert answer(reply) == {
        "box": "b",
        "records": [{"$seq": 4, "data": float("inf")}],
        "next_from_seq": 4,
        "generation": 8,
        "head_seq": 6,
        "earliest_seq": 4,
        "caught_up": False,
        "tombstone": {
            "gap_from": 1,
            "gap_to": 3,
            "reason": "cap",
            "missed_estimate": 3,
            "earliest_seq": 4,
            "head_seq": 6,
        },
        "lag": 2,
    }
    done = msgspec.structs.replace(reply, records=b"", next_from_seq=6, tombstone=None)
    assert answer(done)["caught_up"] and answer(done)["tombstone"] is None and answer(done)["lag"] == 0
    assert status_of(done) == 200


def test_a_state_shows_the_whole_config_and_hides_what_is_not_set() -> None:
    reply = commands.BoxState(
        box="b",
        type="log",
        head_seq=1,
        earliest_seq=1,
        next_seq=2,
        generation=3,
        count=1,
        bytes=9,
        config=BoxConfig(durability="fsync", timestamping=Timestamping("client-prefer", True)),
        effective_priority=0.0,
        last_write_ts=None,
        last_read_ts=5,
        fencing_token="",
        queue=None,
    )
    shown = answer(reply)
    assert shown["config"]["durable"] is True
    assert shown["config"]["timestamping"] == {"mode": "client-prefer", "uncapped": True}
    assert "fencing_token" not in shown and "queue" not in shown
    assert answer(msgspec.structs.replace(reply, fencing_token="t"))["fencing_token"] == "t"
    queue = {"ready": 1, "in_flight": 0, "dead_lettered": 0}
    assert answer(msgspec.structs.replace(reply, queue=queue))["queue"] == queue


def test_the_other_replies_are_worded_as_they_are() -> None:
    put = commands.PutBoxReply("b", True, BoxConfig())
    assert status_of(put) == 201 and answer(put)["config"]["durable"] is False
    assert answer(commands.GetRecordResult("b", b'{"$seq":1}')) == {"box": "b", "record": {"$seq": 1}}
    listed = answer(commands.ListBoxesResult([{"box": "b"}], True, 7))
    assert (listed["boxes"], listed["more"], listed["total"]) == ([{"box": "b"}], True, 7)
    assert answer(commands.DeleteBoxReply("b", True, [], [])) == {
        "box": "b",
        "deleted": True,
        "schedules_removed": [],
        "routers_removed": [],
    }
    assert answer(commands.Tail("b", 1, 2, None)) == {
        "box": "b",
        "head_seq": 1,
        "next_seq": 2,
        "last_ts": None,
    }
    assert answer(commands.DeleteRecordsReply("b", 1, 2, 3, 4, 5))["deleted"] == 1
    assert answer(commands.SetFenceReply("b", "t")) == {"box": "b", "token": "t"}


def test_a_failure_keeps_its_code_and_detail_across_the_wire() -> None:
    failure = failure_decoder.decode(encode_failure(BoxFull("full", count=3)))
    assert (failure.code, failure.message, failure.detail) == ("box_full", "full", {"count": 3})
    assert failure_decoder.decode(encode_failure(StreamsError())).message
