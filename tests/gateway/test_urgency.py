"""A request says in its head that it is urgent (v0 §9). Its body is never searched for it."""

from __future__ import annotations

import pytest

from gateway.requests.request import Request
from gateway.requests.urgency import head_is_urgent, is_urgent
from streams.protocol.errors import InvalidRequest

URGENT_HEADS = [
    b"POST /v0/boxes/b?urgent=true HTTP/1.1\r\nhost: x\r\n",
    b"POST /v0/boxes/b?return_seqs=false&urgent=1 HTTP/1.1\r\nhost: x\r\n",
    b"POST /v0/boxes/b?urgent=true&node=n HTTP/1.1\r\nhost: x\r\n",
    b"POST /v0/boxes/b HTTP/1.1\r\nhost: x\r\nX-Streams-Urgent: 1\r\nx: y\r\n",
    b"POST /v0/boxes/b HTTP/1.1\r\nhost: x\r\nx-streams-urgent:true\r\n",
    b"POST /v0/boxes/b HTTP/1.1\r\nhost: x\r\nX-STREAMS-URGENT: 1 \r\n",
]
OTHER_HEADS = [
    b"POST /v0/boxes/b HTTP/1.1\r\nhost: x\r\n",
    b"POST /v0/boxes/urgent=true HTTP/1.1\r\nhost: x\r\n",
    b"POST /v0/boxes/b?urgent=false HTTP/1.1\r\nhost: x\r\n",
    b"POST /v0/boxes/b?not_urgent=true HTTP/1.1\r\nhost: x\r\n",
    b"POST /v0/boxes/b?urgent=truely HTTP/1.1\r\nhost: x\r\n",
    b"POST /v0/boxes/b HTTP/1.1\r\nhost: x\r\nX-Streams-Urgent: 0\r\n",
    b"POST /v0/boxes/b HTTP/1.1\r\nhost: x\r\nreferer: /?urgent=true \r\n",
    b"POST /v0/boxes/b HTTP/1.1\r\nhost: x\r\nx-streams-urgently: 1\r\n",
]


@pytest.mark.parametrize("head", URGENT_HEADS)
@pytest.mark.parametrize("rest", [b"\r\n", b"\r\n" + b"x" * 1000, b""])
def test_a_head_with_the_flag_is_urgent_however_much_of_it_has_come(head: bytes, rest: bytes) -> None:
    assert head_is_urgent(memoryview(head + rest))


@pytest.mark.parametrize("head", OTHER_HEADS)
def test_a_head_without_the_flag_is_not_urgent(head: bytes) -> None:
    assert not head_is_urgent(memoryview(head + b"\r\n"))


def test_nothing_in_a_body_makes_a_request_urgent() -> None:
    body = b'{"disable_backpressure":true}\r\nX-Streams-Urgent: 1\r\n?urgent=true '
    assert not head_is_urgent(memoryview(OTHER_HEADS[0] + b"\r\n" + body))


@pytest.mark.parametrize(
    ("query", "headers", "urgent"),
    [
        ("", {}, False),
        ("urgent=true", {}, True),
        ("node=n&urgent=1", {}, True),
        ("urgent=false", {}, False),
        ("urgently=true", {}, False),
        ("", {"x-streams-urgent": "1"}, True),
        ("", {"x-streams-urgent": "true"}, True),
        ("", {"x-streams-urgent": "0"}, False),
        ("urgent=true", {"x-streams-urgent": "0"}, True),
    ],
)
def test_the_header_or_the_query_makes_a_request_urgent(
    query: str, headers: dict[str, str], urgent: bool
) -> None:
    assert is_urgent(Request("POST", "/v0/boxes/b", query, headers)) is urgent


def test_a_header_that_is_no_flag_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="X-Streams-Urgent"):
        is_urgent(Request("POST", "/v0/boxes/b", "", {"x-streams-urgent": "yes"}))
