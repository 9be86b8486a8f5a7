"""Options of the data source: values, errors and their messages. Needs no Spark."""

from __future__ import annotations

from pathlib import Path

import pytest

from streams.protocol.model.matches import Match
from streams.spark.option_table import OPTIONS, markdown
from streams.spark.options import (
    BATCH,
    STREAM,
    STREAM_WRITE,
    WRITE,
    BadOption,
    parse_read_options,
    parse_write_options,
)

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "spark.md"


def test_a_read_needs_nothing_but_its_boxes() -> None:
    found = parse_read_options({"path": "orders, refunds,orders"}, BATCH)
    assert found.boxes == ("orders", "refunds")
    assert found.starting == "earliest" and found.ending == "latest" and found.on_gap == "fail"
    assert parse_read_options({"path": "orders"}, STREAM).starting == "latest"


def test_names_that_other_connectors_have_are_understood_in_any_case() -> None:
    given = {"SUBSCRIBE": "a", "maxoffsetspertrigger": "5", "IncludeHeaders": "false"}
    found = parse_read_options(given, STREAM)
    assert (found.boxes, found.max_records, found.include_meta) == (("a",), 5, False)


def test_which_boxes_are_wanted() -> None:
    assert [box for box in ("a", "b", "ab") if parse_read_options({"path": "a,b"}, BATCH).wants(box)] == [
        "a",
        "b",
    ]
    pattern = parse_read_options({"subscribePattern": "a.?"}, BATCH)
    assert [box for box in ("a", "ab", "abc", "ba") if pattern.wants(box)] == ["a", "ab"]
    prefix = parse_read_options({"subscribePrefix": "a"}, BATCH)
    assert [box for box in ("a", "ab", "ba") if prefix.wants(box)] == ["a", "ab"]


@pytest.mark.parametrize(
    ("options", "scope", "message"),
    [
        ({"path": "a", "startingOfsets": "latest"}, BATCH, "did you mean startingOffsets?"),
        ({"path": "a", "zzzzzz": "1"}, BATCH, "zzzzzz: there is no such option of a batch read"),
        ({"path": "a", "txnAppId": "x"}, BATCH, "txnAppId: is an option of a batch write and a stream write"),
        ({"url": "http://a"}, BATCH, "set exactly one of subscribe"),
        ({}, BATCH, "no options: Spark loses the options of a table; use CREATE TEMPORARY VIEW"),
        ({"box": "a"}, WRITE, "url: is required for a write"),
        ({"path": "a", "subscribePrefix": "b"}, BATCH, "subscribe and subscribePrefix"),
        ({"path": "a", "subscribe": "b"}, BATCH, "subscribe: is set twice, as path and as subscribe"),
        ({"path": "a/b"}, BATCH, "subscribe: 'a/b'"),
        ({"subscribePattern": "("}, BATCH, "is not a regular expression"),
        ({"path": "a", "failOnDataLoss": "perhaps"}, BATCH, "'perhaps' must be true or false"),
        ({"path": "a", "minPartitions": "0"}, BATCH, "minPartitions: '0' must be at least 1"),
        ({"path": "a", "minPartitions": "many"}, BATCH, "must be a whole number"),
        ({"path": "a", "onGap": "hide"}, BATCH, "must be one of fail, emit, skip"),
        ({"path": "a", "onGap": "emit", "failOnDataLoss": "true"}, BATCH, "contradict each other"),
        ({"path": "a", "startingOffsets": "latest", "startingTimestamp": "1"}, BATCH, "set only one of them"),
        ({"path": "a", "startingOffsets": '{"a": -3}'}, BATCH, "a seq is at least 0"),
        ({"path": "a", "startingOffsets": '{"a": "x"}'}, BATCH, 'such as {"orders": 41}'),
        ({"path": "a", "startingOffsetsByTimestamp": "7"}, BATCH, 'such as {"orders": 1700000000000}'),
        ({"path": "a", "endingOffsets": "earliest"}, BATCH, "endingOffsets: must be latest, or JSON"),
        ({"path": "a", "endingOffsets": '{"a": -2}'}, BATCH, "endingOffsets: a: -2 (earliest)"),
        ({"path": "a", "startingTimestamp": "yesterday"}, BATCH, "an ISO time"),
        ({"path": "a", "maxTriggerDelay": "soon"}, STREAM, "must be a time such as 500ms"),
        ({"path": "a", "match": "a*b"}, BATCH, "match: 'a*b' must be a tag"),
        ({"url": "http://a", "txnAppId": "x"}, WRITE, "txnAppId and txnVersion go together"),
        ({"url": "a", "txnAppId": "x", "txnVersion": "1", "delivery": "append"}, WRITE, "delivery=append"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_name(options: dict[str, str], scope: str, message: str) -> None:
    with pytest.raises(BadOption) as error:
        (parse_read_options if scope in (BATCH, STREAM) else parse_write_options)(options, scope)
    assert message in error.value.message


def test_loss_fails_unless_the_user_says_otherwise() -> None:
    assert parse_read_options({"path": "a", "failOnDataLoss": "false"}, BATCH).on_gap == "skip"
    assert parse_read_options({"path": "a", "onGap": "EMIT"}, BATCH).on_gap == "emit"
    assert (
        parse_read_options({"path": "a", "onGap": "emit", "failOnDataLoss": "false"}, BATCH).on_gap == "emit"
    )


def test_times_are_milliseconds_or_iso_in_utc() -> None:
    def start(text: str) -> object:
        return parse_read_options({"path": "a", "startingTimestamp": text}, BATCH).starting_ms

    assert start("1700000000000") == start("2023-11-14T22:13:20") == start("2023-11-14T23:13:20+01:00")
    by_box = parse_read_options({"path": "a", "startingOffsetsByTimestamp": '{"a": 5}'}, BATCH)
    assert by_box.starting_ms == {"a": 5}
    assert parse_read_options({"path": "a", "maxTriggerDelay": "2m"}, STREAM).max_delay_ms == 120_000
    assert parse_read_options({"path": "a", "maxTriggerDelay": "7"}, STREAM).max_delay_ms == 7


def test_a_filter_by_tag_has_one_trailing_star() -> None:
    assert parse_read_options({"path": "a", "match": "user-*"}, BATCH).match == Match("user-", is_prefix=True)
    assert parse_read_options({"path": "a", "match": "user-1"}, BATCH).match == Match("user-1")


def test_how_shards_are_reached_is_seen_by_each_task_unless_it_is_said() -> None:
    found = [
        parse_read_options({"path": "a", "transport": way}, BATCH).server.over_tcp
        for way in ("auto", "unix", "TCP")
    ]
    assert found == [None, False, True]
    assert parse_read_options({"path": "a"}, BATCH).server.over_tcp is None
    with pytest.raises(BadOption, match="transport: 'http' must be one of auto, unix, tcp"):
        parse_read_options({"path": "a", "transport": "http"}, BATCH)


def test_a_write_has_defaults_for_all() -> None:
    found = parse_write_options(
        {"url": "http://a", "path": "orders", "checkpointLocation": "/where", "queryName": "copy"},
        STREAM_WRITE,
    )
    assert (found.box, found.delivery, found.node, found.app_id) == ("orders", "txn", "spark", None)
    assert (
        parse_write_options({"url": "http://a", "txnAppId": "nightly", "txnVersion": "7"}, WRITE).version == 7
    )
    assert parse_write_options({"url": "http://a", "node": ""}, WRITE).node == ""


def test_a_key_is_looked_up_where_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text("from-file\n")
    monkeypatch.setenv("THE_KEY", "from-env")
    assert parse_read_options({"path": "a"}, BATCH).server.key() is None
    assert parse_read_options({"path": "a", "token": "plain"}, BATCH).server.key() == "plain"
    assert "plain" not in repr(parse_read_options({"path": "a", "token": "plain"}, BATCH))
    assert parse_read_options({"path": "a", "tokenEnv": "THE_KEY"}, BATCH).server.key() == "from-env"
    assert parse_read_options({"path": "a", "tokenFile": str(file)}, BATCH).server.key() == "from-file"
    with pytest.raises(BadOption, match="there is no variable NO_KEY here"):
        parse_read_options({"path": "a", "tokenEnv": "NO_KEY"}, BATCH).server.key()
    with pytest.raises(BadOption, match="tokenFile: /no/where: No such file"):
        parse_read_options({"path": "a", "tokenFile": "/no/where"}, BATCH).server.key()


def test_the_reference_page_has_the_table_of_options() -> None:
    assert markdown() in PAGE.read_text(), "run `make docs`"


def test_every_option_has_a_place_and_a_meaning() -> None:
    for option in OPTIONS:
        assert option.scopes and option.help.endswith("."), option.name
