"""Goal: sessions that move much keep every byte and the order, whatever the sizes and however slowly the
client takes them, with and without a cipher (s2 §13). Method: HTTP/2 frame by frame to a real server; the
reader has a small window, so that pages are fetched ahead and wait."""

from __future__ import annotations

from base64 import b64encode

import pytest

from streams.protocol.model import binary_records
from streams.testing import Server
from tests.s2.conftest import Client
from tests.support.h2c import H2c
from tests.support.s2_frames import Frames, given

SIZES = [100_000, 1, 16_384, 70_000, 250_000, 3]


def bodies() -> list[list[bytes]]:
    """Batches of nearly 7 MiB: more than what waits to be sent, and several pages ahead of that."""
    return [[b"%d/%d/" % (batch, at) + b"x" * size for at, size in enumerate(SIZES)] for batch in range(16)]


@pytest.mark.parametrize(("cipher", "bound"), [(None, "count=96"), ("aegis-256", "wait=0")])
def test_every_byte_of_a_long_session_comes_back_in_its_order(
    server: Server, basin: Client, cipher: str | None, bound: str
) -> None:
    headers = {"content-type": "s2s/proto", "s2-basin": basin.basin}
    if cipher is not None:
        basin.call("PATCH", f"/basins/{basin.basin}", {"stream_cipher": cipher})
        headers["s2-encryption-key"] = b64encode(bytes(32)).decode()
    basin.stream()
    batches = bodies()
    with H2c(server.port) as connection:
        session = connection.request("POST", "/v1/streams/s/records", headers, ends=False)
        connection.until(lambda: session in connection.status)
        for batch in batches:
            data = given(*batch)
            while data:
                connection.until(lambda: connection.connection.local_flow_control_window(session) > 0)
                size = connection.connection.local_flow_control_window(session)
                connection.send(session, data[:size])
                data = data[size:]
        connection.send(session, b"", ends=True)
        acked = Frames(connection.answered(session))
        assert acked.terminal is None and len(acked.regular) == len(batches)
    with H2c(server.port) as connection:
        session = connection.request("GET", f"/v1/streams/s/records?seq_num=0&{bound}", headers, ends=True)
        found = Frames(connection.answered(session))
    records = [
        record
        for frame in found.regular
        for tag, _, start, end in binary_records.fields(frame, 0, len(frame))
        if tag == 0x0A
        for record in [binary_records._record(frame, start, end)]
    ]
    is_same = [record.body for record in records] == [body for batch in batches for body in batch]
    assert is_same, [record.body[:10] for record in records]  # the whole is megabytes
    assert [record.seq_num for record in records] == list(range(len(records)))
