"""`data` comes back as the JSON it was (§0.3), and what is not JSON never gets in.

Method: bodies are written as text and answers compared as text: parsing would hide exactly the damage these
tests are for. Where only equivalence as JSON is promised (whitespace, the spelling of escapes), both sides go
through a parser that keeps number literals, key order and duplicate keys.
"""

import json

import pytest


def as_json(text):
    """What JSON says, with nothing rounded and nothing merged."""
    number = "number {}".format
    return json.loads(
        text, parse_int=number, parse_float=number, object_pairs_hook=lambda pairs: ("object", pairs)
    )


def write_raw(api, box, *datas):
    body = '{"records":[' + ",".join(f'{{"data":{data}}}' for data in datas) + "]}"
    return api.ok(api.post(box, body), 200, 201)


NUMBERS = [
    "0", "-0", "1", "-1", "1.0", "-1.0", "0.0", "-0.0", "1.10", "1e5", "1E5", "1e+5", "1e-5", "1E-05",
    "1e400", "-1e400",
    "1e-400", "1.5e+300", "0.1", "0.30000000000000004",
    "0.1000000000000000055511151231257827021181583404541015625",
    "9007199254740993", "9223372036854775807", "9223372036854775808", "18446744073709551615",
    "18446744073709551616",
    "-9223372036854775809", "12345678901234567890", "123456789012345678901234567890", "1" + "0" * 400,
    "3.14159265358979323846264338327950288419716939937510",
]  # fmt: skip


@pytest.mark.parametrize("wrapped", ["{}", "[{}]", '{{"n":{}}}', '[[{{"a":[{},null]}}]]'])
def test_numbers_keep_their_digits(api, box, wrapped):
    """§0.3"""
    datas = [wrapped.format(number) for number in NUMBERS]
    write_raw(api, box, *datas)
    assert api.raw_data(box) == datas


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", NUMBERS)
def test_each_number_survives_alone(api, box, number):
    """§0.3: by diff and by the single record."""
    write_raw(api, box, number)
    assert api.raw_data(box) == [number]
    assert f'"data":{number}' in api.get_record(box, 1).text.replace(": ", ":")


COMPACT = [
    "null", "true", "false", '""', '"a"', "[]", "{}", "[[]]", "[{}]", '{"":""}', '{"a":null}',
    "[null,true,false]",
    '{"b":1,"a":2,"c":{"z":1,"y":2}}', '{"a":1,"a":2}', '[{"k":1,"k":{"k":2,"k":2}}]',
    '{"$seq":1,"$ts":"x","$node":[]}',
    '"é"', '"😀"', '"日本語"', '"\u2028\u2029"', '"\ufeff"', '"\uffff"', '"\x7f"', '"\U0010ffff"',
    '{"é😀":"ключ"}',
    '"</script>"', '"a&b<c>d"', "\"it's\"", '"/"', '"data: x"', '"{\\"data\\":1}"',
]  # fmt: skip


def test_every_kind_of_value_comes_back_as_it_was(api, box):
    """§0.3: key order and duplicate keys are part of the value."""
    write_raw(api, box, *COMPACT)
    assert api.raw_data(box) == COMPACT


@pytest.mark.exhaustive
@pytest.mark.parametrize("data", COMPACT)
def test_each_value_survives_alone(api, box, data):
    """§0.3"""
    write_raw(api, box, data)
    assert api.raw_data(box) == [data]


EQUIVALENT = [
    r'"\n\r\t\b\f\"\\\/"', r'"\u0041"', r'"\u00e9"', r'"\u00E9"', r'"\ud83d\ude00"',
    r'"\uD83D\uDE00 x \ud83d\ude00"',
    r'"\u0000"', r'"a\u0000b"', r'"\u001f"', r'"\u007f"', r'"\u2028"', r'"\\ud800"', r'"\\u0000"',
    r'{"\u0061":1,"a":2}',
    r'{"\n":"\t"}', '[ 1 ,\t2 , { "a" : 1.0 } ]', '{ }', '[\n]', '{\r\n  "a": [\n    1\n  ]\n}',
    '"  spaces  kept  "',
]  # fmt: skip


def test_escapes_and_whitespace_come_back_equivalent(api, box):
    """§0.3: byte-for-byte equivalent as JSON."""
    write_raw(api, box, *EQUIVALENT)
    assert [as_json(raw) for raw in api.raw_data(box)] == [as_json(data) for data in EQUIVALENT]


@pytest.mark.exhaustive
@pytest.mark.parametrize("data", EQUIVALENT)
def test_each_escape_survives_alone(api, box, data):
    """§0.3"""
    write_raw(api, box, f" {data}\n")
    assert [as_json(raw) for raw in api.raw_data(box)] == [as_json(data)]


@pytest.mark.parametrize("depth", [10, 100])
def test_nesting_survives(api, box, depth):
    """§0.3"""
    datas = [
        "[" * depth + "]" * depth,
        '{"a":' * depth + "1.0" + "}" * depth,
        '[{"a":' * depth + "-0" + "}]" * depth,
    ]
    write_raw(api, box, *datas)
    assert api.raw_data(box) == datas


@pytest.mark.parametrize("depth", [2_000, 200_000])
def test_absurd_nesting_is_taken_or_refused_and_hurts_nobody(api, box, depth):
    """§0.6: never a 500. (How deep is too deep is not said.)"""
    body = '{"records":[{"data":' + "[" * depth + "]" * depth + "}]}"
    response = api.post(box, body)
    assert response.status_code in (201, 400), response.text[:500]
    if response.status_code == 400:
        assert json.loads(response.text)["error"]["code"] in ("invalid_request", "record_too_large")
    assert api.append(f"{box}.next", 1)["seqs"] == [1]


def test_a_megabyte_of_text_survives(api, box):
    """§0.3, §3: up to the limit of one record."""
    datas = ['"' + filler * ((1_048_576 - 2) // len(filler.encode())) + '"' for filler in ("x", "é", "😀")]
    for data in datas:
        write_raw(api, box, data)
    for seq, data in enumerate(datas):
        assert api.raw_data(box, from_seq=seq, limit=1) == [data]


def test_meta_is_as_faithful_as_data(api, box):
    """§0.3"""
    meta = '{"n":1.0,"big":123456789012345678901234567890,"z":-0,"a":[1e400],"é":"😀"}'
    api.ok(api.post(box, '{"records":[{"data":1,"meta":' + meta + "}]}"), 201)
    (raw,) = api.raw_records(box)
    assert meta in raw


def test_ndjson_is_as_faithful_as_json(api, box):
    """§0.3, §3"""
    datas = NUMBERS + COMPACT
    lines = "\n".join(f'{{"data":{data}}}' for data in datas)
    api.ok(api.post(box, lines, content_type="application/x-ndjson"), 201)
    assert api.raw_data(box) == datas


def test_tags_and_nodes_are_text_and_come_back_as_text(api, box):
    """§0.5"""
    names = ["a b", "é😀", 'q"uote', "back\\slash", "new\nline", "\x7f", "\u2028", "a/b", "*", "tab\t"]
    api.append(box, records=[{"data": name, "tag": name, "node": name} for name in names])
    records = api.diff(box, include_tags=True)["records"]
    assert [(record["$tag"], record["$node"]) for record in records] == [(name, name) for name in names]
    for name in names:
        assert api.data(box, match=["tag", "Eq", name]) == [name]
        assert name not in api.data(box, node=name)


def test_members_of_a_record_may_stand_in_any_order(api, box):
    """§3"""
    body = '{"node":"d","records":[{"tag":"t","meta":{"k":1},"data":1.0,"node":"n"},{"meta":{},"data":2.0}]}'
    api.ok(api.post(box, body), 201)
    assert api.raw_data(box) == ["1.0", "2.0"]


def test_an_answer_is_compact_utf8_json_that_any_parser_reads(api, box):
    """§0.1"""
    api.append(box, "é😀")
    response = api.post_diff(box, {})
    assert json.loads(response.content.decode("utf-8"))["records"][0]["data"] == "é😀"


# -- what is not JSON -----------------------------------------------------------------------------------

NOT_JSON = [
    b"", b" ", b"01", b"-", b"+1", b".5", b"1.", b"1e", b"1e+", b"0x10", b"1_000", b"- 1", b"--1", b"00",
    b"-01", b"1.e5",
    b"NaN", b"nan", b"Infinity", b"-Infinity", b"inf", b"undefined", b"tru", b"True", b"nul", b"None",
    b"nulll", b"TRUE",
    b"'a'", b'"a', b'a"', b"a", b'"a\nb"', b'"a\tb"', b'"\x00"', b'"\x1f"', b'"\\x41"', b'"\\a"',
    b'"\\u12"', b'"\\u12g4"',
    b'"\\u+123"', b'"\\"', b"[", b"]", b"[1,]", b"[,1]", b"[1 2]", b"[1,,2]", b"[1}", b"{", b'{"a"}',
    b'{"a":}', b'{"a":1,}',
    b"{a:1}", b"{'a':1}", b'{"a" 1}', b'{"a":1 "b":2}', b'{1:1}', b'{null:1}', b"1 // one",
    b"/* one */ 1", b"1 1", b"#1",
    b'"\xff"', b'"\xc0\x80"', b'"\xc3"', b'"\xed\xa0\x80"', b'"\xf4\x90\x80\x80"', b'"\xe2\x82"', b'"\x80"',
    b"\xef\xbb\xbf1", b"\xc2\xa01", b"\x0c1", b"\x0b1",
    b'"\\ud800"', b'"\\udc00"', b'"\\ud800\\ud800"', b'"\\udc00\\ud800"', b'"\\ud800x"',
    b'"\\ud800\\u0041"',
    b'"\\ud800\\n"', b'{"\\ud800":1}', b'["ok",{"a":"\\uDFFF"}]', b'"\\ud83d"', b'"\\ud83d \\ude00"',
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("data", NOT_JSON, ids=repr)
def test_what_is_not_json_is_refused_as_data_and_as_meta_and_changes_nothing(api, box, data):
    """§0.3, §0.6. A lone surrogate is refused too: no UTF-8 answer could carry it."""
    api.append(box, "before")
    with api.unchanged(box):
        body = b'{"records":[{"data":"good"},{"data":' + data + b"}]}"
        api.refused(api.post(box, body), 400, "invalid_request")
        body = b'{"records":[{"data":"good"},{"data":1,"meta":{"k":' + data + b"}}]}"
        api.refused(api.post(box, body), 400, "invalid_request")


@pytest.mark.parametrize("data", [b"NaN", b"01", b"[1,]", b'"\xff"', b'"\\ud800"', b'"a\nb"', b"{"], ids=repr)
def test_bad_json_is_refused_through_every_front(api, box, data):
    """§0.6"""
    api.refused(api.post(box, b'{"records":[{"data":' + data + b"}]}"), 400, "invalid_request")
    assert not api.exists(box)


@pytest.mark.exhaustive
@pytest.mark.parametrize("text", ['"\\ud800"', '"a\\udc00"', '"\\u0000"', '"a\\u0000b"', '"a\nb"'])
@pytest.mark.parametrize("member", ["tag", "node"])
def test_a_name_that_is_no_text_is_refused(api, box, member, text):
    """§0.5: no NUL, no lone surrogate, no raw control character."""
    api.refused(api.post(box, f'{{"records":[{{"data":1,"{member}":{text}}}]}}'), 400, "invalid_request")
    assert not api.exists(box)


WHOLE_BODIES = [
    b"{", b"}", b"[]", b"1", b'"x"', b"null", b"true", b"{}{}", b"{} x", b"{},", b"\x00",
    b"\xff\xfe{\x00}\x00", b"nonsense",
    b"{\"limit\":1", b"{limit:1}", b"{'limit':1}", b'{"limit":1,}', b"\xef\xbb\xbf[]", b"a=1&b=2",
    b"<x/>", b'{"limit":NaN}',
    b'{"limit":01}', b'{"li\xffmit":1}', b'{"\\ud800":1}',
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("body", WHOLE_BODIES, ids=repr)
def test_a_body_that_is_no_json_object_is_refused_everywhere(api, box, body):
    """§0.1, §0.6"""
    api.append(box, 1)
    with api.unchanged(box):
        for method, tail in [
            ("PUT", ""),
            ("POST", ""),
            ("POST", "/diff"),
            ("POST", "/delete"),
            ("PUT", "/fence"),
        ]:
            api.refused(api.send(method, f"/v0/boxes/{box}{tail}", body), 400, "invalid_request")


@pytest.mark.parametrize("cut", [1, 10, 20, 30])
def test_a_body_cut_short_is_refused(api, box, cut):
    """§0.6"""
    body = json.dumps({"records": [{"data": "something"}, {"data": 2}]})
    api.refused(api.post(box, body[:-cut]), 400, "invalid_request")
    assert not api.exists(box)


def test_a_field_given_twice_is_refused_or_the_last_one_counts(api, box):
    """§0.9: not both, and never the first one silently. (Which of the two is not said.)"""
    response = api.post(box, '{"records":[{"data":1}],"records":[{"data":2},{"data":3}]}')
    if response.status_code == 400:
        api.refused(response, 400, "invalid_request")
        assert not api.exists(box)
    else:
        assert api.ok(response, 201)["count"] == 2
        assert api.data(box) == [2, 3]
