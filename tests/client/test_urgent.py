"""The client says in the head of an append that it is urgent: the gateway never looks into a body for it."""

from __future__ import annotations

import socket
import threading

import pytest

import streams

_ANSWER = (
    b'{"box":"b","first_seq":1,"last_seq":1,"head_seq":1,"count":1,"created":false,"deduped":false,'
    b'"performance":{"server_total_ms":0.1}}'
)


@pytest.mark.parametrize("is_urgent", [False, True])
def test_an_append_that_skips_backpressure_has_the_urgent_header(is_urgent: bool) -> None:
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                data = b""
                while not data.endswith(b"}"):
                    data += sock.recv(65536)
                received.append(data)
                sock.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(_ANSWER), _ANSWER))

        thread = threading.Thread(target=serve)
        thread.start()
        with streams.Client(f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
            client.box("b").append(1, disable_backpressure=is_urgent)
        thread.join()
    head, _, body = received[0].partition(b"\r\n\r\n")
    assert (b"x-streams-urgent: 1" in head.lower()) is is_urgent
    assert (b'"disable_backpressure":true' in body) is is_urgent
