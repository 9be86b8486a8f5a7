"""Messages that copy records between boxes: of the shards, and of the relay between them.

    source's shard ── Collect ──► batches ── Forward ──► destination's shard
           ▲                                                     │
           └───── ReportDelivery ◄───── ForwardReply ◄───────────┘

An **origin** is one ordered sequence of copies into a box: a router's, or the dead letters of a queue. Its
**positions** count the records that the source has sent (a router's are the source's seqs). A Forward says
which of them its records cover, `after` (exclusive) to `upto`, and the destination stores the last `upto` in
the same change that appends the records. So a repeated Forward changes nothing.

Records travel as they are stored: comma-joined text and a column of tags. The relay does not decode them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from streams.protocol import wire
from streams.protocol.errors import InvalidRequest
from streams.protocol.messages import routers
from streams.protocol.messages.routers import Route
from streams.protocol.model.boxes import BoxPatch

_T = TypeVar("_T")

#: A record that was copied this many times is not copied again (v0 §6.1).
HOPS_MAX = 16

#: A name that no box can have. Reads wait by the name of their box; the relay's `Collect` waits under this.
RELAY = ""


class ForwardHead(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The head of a copy batch. `life` is the generation of the source: positions of two generations do not
    compare."""

    box: str
    origin: str
    life: int
    after: int
    upto: int
    count: int
    #: Records that the source lost before they could be copied, somewhere between `after` and `upto`.
    lost: int = 0
    #: Steps that these copies have made, this one included.
    hops: int = 1
    keep_nodes: bool = True
    #: `create` creates a missing box; None: unless it was deleted with `auto_create: false`. `bind` starts an
    #: unknown origin at the first position of this batch. Routers set neither: their endpoints are attached
    #: before the first batch leaves.
    create: bool | None = False
    bind: bool = False
    config: BoxPatch | None = None
    tags: bytes | None = None
    #: False while the source has room for more batches in flight: the reply may wait for a sync that comes
    #: anyway, so that readers need not wait for one.
    is_urgent: bool = True
    #: `JobFields` of the records, without times.
    job_fields: bytes | None = None


class Forward(msgspec.Struct, frozen=True, gc=False):
    """Appends these copies, if the origin's position is where the batch begins."""

    head: ForwardHead
    #: The records as a batch keeps them, joined with commas.
    text: bytes

    @property
    def box(self) -> str:
        return self.head.box

    @property
    def return_seqs(self) -> bool:
        return False


class ForwardReply(msgspec.Struct, array_like=True, frozen=True):
    """The origin's position in its source's `life`, and the number of records copied from it into this
    `generation` of the destination."""

    life: int
    position: int
    total: int
    generation: int


class Collect(msgspec.Struct, array_like=True, frozen=True):
    """Asks for outgoing batches. `carrier` is the id of the relay: batches of an earlier relay are resent."""

    carrier: int
    wait_ms: int = 0
    box: str = RELAY


class CopyBatch(msgspec.Struct, array_like=True, frozen=True):
    """One outgoing Forward: source box, destination box, encoded head and records."""

    number: int
    source: str
    origin: str
    dest: str
    head: bytes
    text: bytes


class CollectReply(msgspec.Struct, array_like=True, frozen=True):
    #: The run of the shard that numbered them: numbers start again with each run.
    shard_life: int
    parcels: list[CopyBatch]


class ReportDelivery(msgspec.Struct, array_like=True, frozen=True):
    """Reports the result of a batch: the destination's reply, or code and message of an error."""

    shard_life: int
    number: int
    answer: ForwardReply | None = None
    code: str = ""
    message: str = ""


class ReportDeliveryReply(msgspec.Struct, array_like=True, frozen=True):
    is_known: bool


class AttachEndpoint(msgspec.Struct, frozen=True, tag="Tie", kw_only=True):
    """Attaches one endpoint of a router to a box: with a route its source, without one its destination.

    Positions count from `position` in that life of the source. A repeat changes nothing but the route.
    """

    box: str
    origin: str
    life: int
    position: int
    route: Route | None = None


class DetachEndpoint(msgspec.Struct, frozen=True, tag="Untie"):
    """Detaches both endpoints of this origin from a box, if they exist."""

    box: str
    origin: str


class GetOutbox(msgspec.Struct, frozen=True, tag=True):
    box: str
    origin: str


class ListEndpoints(msgspec.Struct, frozen=True, tag="ListTies"):
    #: The version that the caller has; the reply is short when nothing has changed since.
    version: int = -1


class AttachEndpointReply(msgspec.Struct, array_like=True, frozen=True):
    life: int
    position: int


class DetachEndpointReply(msgspec.Struct, array_like=True, frozen=True):
    was_tied: bool


class OutboxState(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    is_tied: bool
    forwarded_total: int = 0
    position: int = 0
    lag: int = 0
    is_blocked: bool = False
    last_error: str = ""


class EndpointList(msgspec.Struct, array_like=True, frozen=True):
    """(box, origin) of every endpoint at a source and at a destination."""

    version: int
    is_same: bool
    sources: list[tuple[str, str]]
    dests: list[tuple[str, str]]


_MsgpackCommand = AttachEndpoint | DetachEndpoint | GetOutbox | ListEndpoints | routers.Command
Command = Forward | Collect | ReportDelivery | _MsgpackCommand
Reply = (
    ForwardReply
    | CollectReply
    | ReportDeliveryReply
    | AttachEndpointReply
    | DetachEndpointReply
    | OutboxState
    | EndpointList
    | routers.Reply
)
REPLIES: tuple[type[msgspec.Struct], ...] = (
    ForwardReply,
    CollectReply,
    ReportDeliveryReply,
    AttachEndpointReply,
    DetachEndpointReply,
    OutboxState,
    EndpointList,
    *routers.REPLIES,
)

encode = msgspec.msgpack.Encoder().encode
decode_collect_reply = msgspec.msgpack.Decoder(CollectReply).decode
decode_forward_reply = msgspec.msgpack.Decoder(ForwardReply).decode
_decode_head = msgspec.msgpack.Decoder(ForwardHead).decode
_decode_collect = msgspec.msgpack.Decoder(Collect).decode
_decode_report = msgspec.msgpack.Decoder(ReportDelivery).decode
_decode_msgpack_command = msgspec.msgpack.Decoder(_MsgpackCommand).decode


def _decode(decode: Callable[[bytes], _T], head: bytes) -> _T:
    try:
        return decode(head)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"head: {error}") from None


#: op -> (head, body) -> the command. Between processes of one server: nothing here comes from a client.
DECODERS: dict[int, Callable[[bytes, bytes], Command]] = {
    wire.OP_COLLECT: lambda head, body: _decode(_decode_collect, head),
    wire.OP_REPORT_DELIVERY: lambda head, body: _decode(_decode_report, head),
    wire.OP_FORWARD: lambda head, body: Forward(_decode(_decode_head, head), body),
    wire.OP_FORWARDING: lambda head, body: _decode(_decode_msgpack_command, head),
}
