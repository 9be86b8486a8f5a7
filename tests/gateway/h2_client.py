"""HTTP/2 by hand: one connection of a client, frame by frame."""

from __future__ import annotations

import h2.config
import h2.connection
import h2.events
import trio

from tests.gateway.edge_harness import PATIENCE_S


class H2Wire:
    """Reads what a server sends. It acknowledges nothing by itself."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
        self.events: list[h2.events.Event] = []

    async def flush(self) -> None:
        await self.stream.send_all(self.connection.data_to_send())

    async def receive(self) -> bool:
        """False when the server has closed the connection."""
        with trio.fail_after(PATIENCE_S):
            try:
                data = await self.stream.receive_some(65536)
            except trio.BrokenResourceError:
                return False
        if data:
            self.events += self.connection.receive_data(data)
        return bool(data)

    async def status_of(self, stream_id: int) -> bytes:
        while True:
            for event in self.events:
                if isinstance(event, h2.events.ResponseReceived) and event.stream_id == stream_id:
                    return dict(event.headers)[b":status"]
            assert await self.receive(), f"closed without an answer, after {self.events}"

    async def ended(self, stream_id: int) -> None:
        while not any(
            isinstance(event, h2.events.StreamEnded) and event.stream_id == stream_id for event in self.events
        ):
            assert await self.receive()
