"""Goal: what we call an event is one to every reader of the format. Method: read it back by its rules."""

from __future__ import annotations

import json

import pytest

from gateway.requests import sse
from gateway.requests.request import Request
from streams.protocol.errors import NotAcceptable
from tests.support.sse import Parser


def test_an_event_reads_back_with_its_name_id_and_data() -> None:
    [event] = Parser().feed(sse.event(b"record", b'{"a":1}', b"abc"))
    assert (event.name, event.id, event.json) == ("record", "abc", {"a": 1})
    [event] = Parser().feed(sse.event(b"error", b"{}"))
    assert (event.name, event.id) == ("error", None)


@pytest.mark.parametrize("text", ['{"a":\n[1,\n2]}', '{"a":\r\n[1,\r2]}', '{\n\n"a":[1,2]}\n'])
def test_line_breaks_in_json_do_not_end_the_event(text: str) -> None:
    [event] = Parser().feed(sse.event(b"record", sse.one_value(text.encode())))
    assert event.json == json.loads(text)


def test_a_heartbeat_is_no_event() -> None:
    parser = Parser()
    assert parser.feed(sse.heartbeat(12)) == []
    assert parser.comments == ["hb 12"]


def test_a_stream_opens_with_an_id_and_no_event() -> None:
    parser = Parser()
    assert parser.feed(sse.opening(b"abc")) == []
    assert (parser.retry_ms, parser.last_id) == (2000, "abc")
    assert sse.opening() == b"retry: 2000\n\n"


@pytest.mark.parametrize("accept", [None, "text/event-stream", "*/*", "text/html, TEXT/Event-Stream;q=0.5"])
def test_whoever_takes_events_gets_them(accept: str | None) -> None:
    sse.check_accepts(Request("GET", "/", "", {} if accept is None else {"accept": accept}))


@pytest.mark.parametrize("accept", ["application/json", "text/html", "text/event-stream;q=0"])
def test_whoever_does_not_is_refused(accept: str) -> None:
    with pytest.raises(NotAcceptable):
        sse.check_accepts(Request("GET", "/", "", {"accept": accept}))
