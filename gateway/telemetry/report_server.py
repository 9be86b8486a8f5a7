"""Serves the report of this gateway to the other gateways of the server.

With more than one gateway, a request for metrics reaches only one of them. So each gateway listens on its own
socket in the server's run directory (mode 0700), speaks the shard wire protocol there, and answers every
message with its report, or with a part of its history (`history.py`).

Bounds: one link from each other gateway; a message is at most `_MESSAGE_BYTES_MAX`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog
import trio

from gateway.shards.unix_sockets import listen_unix
from gateway.telemetry.history import HISTORY, Ring, encode_slice
from streams.protocol import wire
from streams.protocol.telemetry.reports import GatewayReport

log = structlog.get_logger()

_MESSAGE_BYTES_MAX = 64 * 1024
_HEAD = wire.head_encoder.encode(wire.ReplyHead())


def socket_of(run_dir: Path, gateway: int) -> Path:
    return run_dir / f"gateway-{gateway}.sock"


async def serve(path: Path, report: Callable[[], GatewayReport], ring: Ring) -> None:
    with listen_unix(path) as listener:
        listener.setblocking(False)
        accepting = trio.socket.from_stdlib_socket(listener)
        async with trio.open_nursery() as nursery:
            while True:
                sock, _ = await accepting.accept()
                nursery.start_soon(_answer, trio.SocketStream(sock), report, ring)


async def _answer(stream: trio.SocketStream, report: Callable[[], GatewayReport], ring: Ring) -> None:
    receiver = wire.Receiver(_MESSAGE_BYTES_MAX)
    async with stream:
        try:
            async for data in stream:
                receiver.space()[: len(data)] = data
                for message in receiver.parse(len(data)):
                    body = _history(message, ring) or msgspec.json.encode(report())
                    frame = wire.frame(wire.REPLY, 0, message.op, message.id, _HEAD, len(body))
                    await stream.send_all(frame + body)
        except (trio.BrokenResourceError, wire.WireError) as error:
            log.debug("another gateway has disconnected", error=str(error))


def _history(message: wire.Message, ring: Ring) -> bytes:
    """Return the part of the history that a message asks for; b"" if it asks for a report."""
    if not message.body.startswith(HISTORY):
        return b""
    _, end_s, seconds = message.body.split(b" ")
    return encode_slice(ring.cut(int(end_s), int(seconds)))
