"""A carrier without sockets: parcels between two machines, each of which may lose its answers or its life."""

from __future__ import annotations

from typing import NamedTuple

from streams.protocol.errors import StreamsError
from streams.protocol.messages import forwards
from streams.protocol.messages.forwards import (
    Collect,
    CollectReply,
    CopyBatch,
    Forward,
    ForwardReply,
    ReportDelivery,
)
from streams.protocol.messages.routers import Route
from tests.support.machines import Driver, records_of

ORIGIN = "copy#1"

_decode_head = forwards.DECODERS[forwards.wire.OP_FORWARD]


def tie(at: Driver, to: Driver, *, origin: str = ORIGIN, from_seq: int = 0, **route: object) -> Route:
    """Ties both ends, the destination first, as it is done over the wire."""
    made = Route(**{"source": "from", "dest": "to", **route})  # type: ignore[arg-type]
    life = at.state(made.source).generation
    to.ask(forwards.AttachEndpoint(box=made.dest, origin=origin, life=life, position=from_seq))
    at.ask(forwards.AttachEndpoint(box=made.source, origin=origin, life=life, position=from_seq, route=made))
    return made


class Given(NamedTuple):
    """A parcel, and which life of its shard gave it out."""

    shard_life: int
    parcel: CopyBatch

    @property
    def number(self) -> int:
        return self.parcel.number

    def refused(self, code: str, message: str = "") -> ReportDelivery:
        return ReportDelivery(self.shard_life, self.number, None, code, message)


def collect(source: Driver, carrier: int = 1) -> list[Given]:
    reply = source.do(Collect(carrier)).reply
    assert isinstance(reply, CollectReply)
    return [Given(reply.shard_life, parcel) for parcel in reply.parcels]


def forward_of(given: Given) -> Forward:
    command = _decode_head(given.parcel.head, given.parcel.text)
    assert isinstance(command, Forward)
    return command


def bring(dest: Driver, given: Given, *, sync: bool = True) -> ReportDelivery:
    """Delivers a parcel and returns what the carrier would tell its source."""
    outcome = dest.do(forward_of(given))
    if sync or outcome.until_durable:
        dest.sync()
    else:
        dest.logged()
    if isinstance(outcome.reply, StreamsError):
        return given.refused(outcome.reply.code, outcome.reply.message)
    assert isinstance(outcome.reply, ForwardReply)
    return ReportDelivery(given.shard_life, given.number, outcome.reply)


def carry_all(source: Driver, dest: Driver, carrier: int = 1) -> int:
    """Carries until nothing is left; pauses are waited out. Returns how many parcels that took."""
    carried = 0
    for _ in range(10_000):
        parcels = collect(source, carrier)
        for parcel in parcels:
            source.do(bring(dest, parcel))
            carried += 1
        if not parcels:
            due = source.machine.forwarding.outboxes.next_retry_ms()
            if due is None:
                return carried
            source.now_ms = max(source.now_ms, due)
            source.tick()
    raise AssertionError("it never ends")


def copies(dest: Driver, box: str = "to") -> list[object]:
    """All data of a box, in order."""
    found: list[object] = []
    cursor = 0
    while True:
        page = dest.read(cursor, box=box, limit=1000)
        found += [record["data"] for record in records_of(page)]
        if page.next_from_seq == page.head_seq:
            return found
        cursor = page.next_from_seq
