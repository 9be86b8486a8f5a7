"""Goal: the parts of watching keep their own promises: cursors, turns, slow readers, one feed for many.

Method: pure parts as they are; streams over machines without processes, with a peer that reads when told to.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.watch import WatchApi
from gateway.api.websockets import WebSocketConnection
from gateway.requests.request import ClientStalled, Request
from gateway.shards.links import Link
from gateway.watch import cursors, feeds
from gateway.watch.merge import Merge, Track
from gateway.watch.page import OTHER_GENERATION, EncodedPage, Encoding, Place
from gateway.watch.plan import plan_of_body
from gateway.watch.service import PlainBody, SessionBody, Watch
from streams.protocol import wire
from streams.protocol.errors import InvalidRequest, ShardUnavailable
from streams.protocol.messages import commands
from tests.support.machines import columns, patch
from tests.support.memory_shards import MemoryShard, dispatch_to
from tests.support.sse import Event, Parser

# -- cursors

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,30}", fullmatch=True)


@given(st.dictionaries(NAMES, st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**53)), max_size=5))
def test_a_cursor_reads_back_and_is_a_plain_map_to_others(places: dict[str, tuple[int, int]]) -> None:
    text = cursors.encode((box, Place(seq, life)) for box, (seq, life) in places.items()).decode()
    raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    assert json.loads(raw) == {box: seq for box, (seq, _) in places.items()}
    told = cursors.decode_untrusted(text, "id")
    for box, (seq, life) in places.items():
        assert told[box].seq == seq and told[box].is_of(life)
        assert not told[box].is_of(life + 1)


def test_a_cursor_without_marks_is_taken_at_its_word() -> None:
    text = base64.urlsafe_b64encode(b'{"a":1, "b" : 2}').decode()
    assert all(told.is_of(7) for told in cursors.decode_untrusted(text, "id").values())


@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda raw: base64.urlsafe_b64encode(raw).decode()))
def test_what_is_not_a_cursor_is_refused_and_nothing_else_happens(text: str) -> None:
    try:
        found = cursors.decode_untrusted(text, "id")
    except InvalidRequest as refused:
        assert refused.detail == {"field": "id"}
    else:
        assert all(0 <= told.seq < 2**64 for told in found.values())


# -- merge


def page(was: Place, upto: int, head: int, *, gap: tuple[int, int, str] | None = None) -> EncodedPage:
    return EncodedPage("b", was, wire.PageHead(upto, 9, head, 1, gap), b'{"$seq":%d}' % upto)


def test_turns_go_round_so_that_no_box_starves_another() -> None:
    merge = Merge([Track(box, Place(0, 9)) for box in "abc"])
    order = []
    for _ in range(7):
        track = merge.next_turn(0.0)
        assert track is not None
        order.append(track.box)
        merge.wait_turn(track)
    assert "".join(order) == "abcabca"


def test_a_box_that_must_wait_does_not_hold_up_the_others() -> None:
    merge = Merge([Track(box, Place(0, 9)) for box in "ab"])
    first = merge.next_turn(0.0)
    assert first is not None
    merge.wait_turn(first, 5.0)
    assert [merge.next_turn(1.0).box for _ in range(1)] == ["b"]  # type: ignore[union-attr]
    assert merge.next_turn(1.0) is None and merge.next_due_s() == 5.0
    assert merge.next_turn(5.0) is first


def test_a_track_moves_only_by_pages_that_begin_where_it_is() -> None:
    merge = Merge([Track("b", Place(3, 9))])
    track = merge.tracks["b"]
    with pytest.raises(AssertionError, match="EXACT"):
        merge.take(track, page(Place(2, 9), 4, 4))
    assert track.has_passed(page(Place(1, 9), 3, 3)) and not track.has_passed(page(Place(1, 9), 4, 4))
    merge.take(track, page(Place(3, 9), 4, 4))
    assert track.place == Place(4, 9)


def test_last_event_id_rewinds_and_advances_only_what_was_cut_off() -> None:
    def place_after(seq: int, *, life: int = 9, cut_off: bool = False, now: int = 9) -> Place:
        merge = Merge([Track("b", Place(5, 9))])
        told = cursors.decode_untrusted(cursors.encode([("b", Place(seq, life))]).decode(), "id")
        assert merge.boxes_of_other_generations(told) == ([] if life == 9 else ["b"])
        merge.resume({**told, "unknown": cursors.CursorEntry(1)}, may_advance=cut_off, generations={"b": now})
        return merge.tracks["b"].place

    assert place_after(3) == Place(3, 9)
    assert place_after(7) == Place(5, 9)
    assert place_after(7, cut_off=True) == Place(7, 9)
    assert place_after(2, life=8) == Place(2, OTHER_GENERATION)
    assert place_after(2, life=10, cut_off=True, now=10) == Place(2, 10)


def test_only_loss_by_caps_and_time_is_renamed_at_connect() -> None:
    for reason, shown in (("cap", "from_seq_too_old"), ("recreated", "recreated"), ("crash", "crash")):
        merge = Merge([Track("b", Place(0, 9))])
        events = merge.take(merge.tracks["b"], page(Place(0, 9), 4, 4, gap=(1, 2, reason)))
        assert json.loads(events[0].data)["reason"] == shown
        assert [event.name for event in events] == [b"tombstone", b"record"]


# -- streams


class Peer:
    """A peer of which the kernel takes `room` bytes, and no more until it reads."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.room = room
        self.taken = b""
        self.waiting = b""
        self._moved = trio.Event()
        self._parser = Parser()

    @property
    def unsent_bytes(self) -> int:
        return len(self.waiting)

    def put(self, data: bytes) -> None:
        self.waiting += data
        self._move()

    def _move(self) -> None:
        room = self.room - len(self.taken)
        self.taken += self.waiting[:room]
        self.waiting = self.waiting[room:]

    def read(self) -> list[Event]:
        data, self.taken = self.taken, b""
        self._move()
        self._moved.set()
        self._moved = trio.Event()
        return self._parser.feed(data)

    async def wait_sent(self, stall_s: float) -> None:
        await trio.lowlevel.checkpoint()
        while self.waiting:
            with trio.move_on_after(stall_s) as scope:
                await self._moved.wait()
            if scope.cancelled_caught:
                raise ClientStalled


class Stage:
    """One shard, one gateway, any number of watchers of a box."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.shard = MemoryShard()
        self.watch = Watch(dispatch_to([self.shard]), connections_max=0, node_bytes_max=128, stall_s=30)

    def append(self, *data: object, box: str = "b") -> None:
        self.shard.do(commands.Append(box=box, columns=columns(*data)))
        self.shard.sync()

    async def open(self, peer: Peer, *boxes: str) -> PlainBody:
        named = ",".join(f'"{box}":{{}}' for box in boxes or ("b",))
        plan = plan_of_body(f'{{"boxes":{{{named}}},"limit":2}}'.encode(), 128)
        body = self.watch.open_stream(plan, await self.watch.view_boxes(plan, lenient=False))

        async def serve() -> None:
            await body.run(peer)
            body.close()

        self.nursery.start_soon(serve)
        await trio.testing.wait_all_tasks_blocked()
        return body


@asynccontextmanager
async def stage() -> AsyncIterator[Stage]:
    async with trio.open_nursery() as nursery:
        made = Stage(nursery)
        await nursery.start(made.watch.run, trio.Event())
        made.append(0)
        yield made
        nursery.cancel_scope.cancel()


def seqs(events: list[Event], box: str = "b") -> list[int]:
    found = [event.json for event in events if event.name == "record"]
    return [record["$seq"] for frame in found if frame["box"] == box for record in frame["records"]]


async def test_many_watchers_of_a_box_are_one_feed_and_one_serialisation() -> None:
    async with stage() as made:
        peers = [Peer() for _ in range(100)]
        for peer in peers:
            await made.open(peer)
        before = made.watch.feeds.statistics()
        made.append(1)
        await trio.testing.wait_all_tasks_blocked()
        after = made.watch.feeds.statistics()
        assert (after.feeds, after.pages_encoded - before.pages_encoded) == (1, 1)
        assert after.pages_delivered - before.pages_delivered == 100
        assert all(seqs(peer.read()) == [1, 2] for peer in peers)


async def test_a_reader_that_stops_costs_no_memory_and_misses_nothing(autojump_clock: object) -> None:
    """§7.3: bounded buffers, frames coalesce, and the log is the buffer."""
    async with stage() as made:
        slow, quick = Peer(room=400), Peer()
        await made.open(slow)
        await made.open(quick)
        for number in range(200):
            made.append(number)
            await trio.testing.wait_all_tasks_blocked()
        assert seqs(quick.read()) == list(range(1, 202))
        assert slow.unsent_bytes < 2_000, "one frame beyond what the kernel took"
        slow.room = 1 << 30
        found = slow.read()
        while seqs(found)[-1] < 201:
            await trio.testing.wait_all_tasks_blocked()
            found += slow.read()
        assert seqs(found) == list(range(1, 202))
        frames = [event for event in found if event.name == "record"]
        assert len(frames) < 120, "what it missed came two by two, as large as it asked for"


async def test_a_reader_that_never_reads_is_told_and_left(autojump_clock: object) -> None:
    """§7.3: after 30 s without progress, an error and the end."""
    async with stage() as made:
        peer = Peer(room=200)
        began = trio.current_time()
        await made.open(peer)
        for number in range(10):
            made.append(number)
        while made.watch.connections:  # noqa: ASYNC110 - there is no event for it
            await trio.sleep(1)
        assert 29 <= trio.current_time() - began <= 32
        peer.room = 1 << 30
        last = peer.read() + peer.read()
        assert (last[-1].name, last[-1].json["code"]) == ("error", 408)


async def test_who_watches_a_box_waits_for_a_shard_that_starts_again(autojump_clock: object) -> None:
    """§7.4: a browser that is answered 503 never comes back."""
    async with stage() as made:
        api = WatchApi(made.watch, 1 << 20)
        [link] = made.watch._dispatch.links
        link.is_up = False
        made.nursery.start_soon(come_back, link, 3.0)
        answer = await api.box(Request("GET", "", "", {}), "b", "")
        assert answer.status == 200 and answer.live is not None
        answer.live.close()
        link.is_up = False
        with pytest.raises(ShardUnavailable):
            await api.box(Request("GET", "", "", {}), "b", "")


async def come_back(link: Link, after_s: float) -> None:
    await trio.sleep(after_s)
    link.is_up = True


async def keep_time(made: Stage) -> None:
    """The clock of the shard goes with that of the test."""
    while True:
        await trio.sleep(0.5)
        made.shard.driver.now_ms += 500


async def test_a_session_outlives_its_shard_and_its_stream(autojump_clock: object) -> None:
    """§7.2: a shard that is killed forgets its sessions. A stream that ends meanwhile brings its own back."""
    async with stage() as made:
        plan = plan_of_body(b'{"boxes":{"b":{}}}', 128)
        wid = await made.watch.create_session(plan, await made.watch.view_boxes(plan, lenient=False))
        body, peer, scope = await made.watch.open_session(wid, None), Peer(), trio.CancelScope()

        async def serve() -> None:
            with scope:
                await body.run(peer)
            body.close()

        made.nursery.start_soon(serve)
        await trio.testing.wait_all_tasks_blocked()
        assert seqs(peer.read()) == [1]
        [link] = made.watch._dispatch.links
        link.is_up = False
        made.shard.machine.sessions.clear()
        scope.cancel()
        await trio.sleep(3)
        link.is_up = True
        made.nursery.start_soon(keep_time, made)
        again, peer = await made.watch.open_session(wid, None), Peer()
        made.nursery.start_soon(again.run, peer)
        made.append(2)
        await trio.testing.wait_all_tasks_blocked()
        assert seqs(peer.read()) == [2]


async def test_a_stale_stream_of_another_gateway_cannot_put_its_session_over_that_of_a_live_one(
    autojump_clock: object,
) -> None:
    """§7.2: the shard has forgotten which of two streams is the newer one. They know."""
    async with stage() as made:
        other = Watch(dispatch_to([made.shard]), connections_max=0, node_bytes_max=128)
        await made.nursery.start(other.run, trio.Event())
        plan = plan_of_body(b'{"boxes":{"b":{}}}', 128)
        wid = await made.watch.create_session(plan, await made.watch.view_boxes(plan, lenient=False))

        async def serve(watch: Watch, peer: Peer) -> SessionBody:
            body = await watch.open_session(wid, None)

            async def run() -> None:
                await body.run(peer)
                body.close()

            made.nursery.start_soon(run)
            await trio.testing.wait_all_tasks_blocked()
            return body

        stale, live = Peer(), Peer()
        await serve(other, stale)
        assert seqs(stale.read()) == [1]
        await trio.sleep(6)  # it has said where it is
        [link] = other._dispatch.links
        link.is_up = False  # its gateway is paused
        await serve(made.watch, live)
        for number in range(2, 6):
            made.append(number)
        await trio.testing.wait_all_tasks_blocked()
        assert seqs(live.read()) == [2, 3, 4, 5]
        made.shard.machine.sessions.clear()
        made.shard.driver.start("boot")  # it was killed
        # The paused one comes back first, with what it knew.
        session = next(iter(other._open.values())).session
        link.is_up = True
        assert await other.sessions.save(session, is_open=True)
        made.nursery.start_soon(keep_time, made)
        await trio.sleep(20)
        made.append(6)
        await trio.testing.wait_all_tasks_blocked()
        found = live.read()
        assert seqs(found) == [6] and "error" not in [event.name for event in found]
        assert [event.json["code"] for event in stale.read() if event.name == "error"] == [410]
        assert not await other.sessions.save(session, is_open=False), "not at its end either"
        again = Peer()
        await serve(made.watch, again)
        made.append(7)
        await trio.testing.wait_all_tasks_blocked()
        assert seqs(again.read()) == [7]


async def test_a_client_without_a_cursor_gets_no_repeats_after_a_stale_stream_has_put_its_session_back(
    autojump_clock: object,
) -> None:
    """It waits until the live stream has put the session back too, and goes on where that one is."""
    async with stage() as made:
        made.nursery.start_soon(keep_time, made)
        plan = plan_of_body(b'{"boxes":{"b":{}}}', 128)
        wid = await made.watch.create_session(plan, await made.watch.view_boxes(plan, lenient=False))
        stale = await made.watch.sessions.take(wid)
        live, peer = await made.watch.open_session(wid, None), Peer()

        async def serve() -> None:
            await live.run(peer)
            live.close()

        made.nursery.start_soon(serve)
        for number in range(2, 6):
            made.append(number)
        await trio.testing.wait_all_tasks_blocked()
        assert seqs(peer.read()) == [1, 2, 3, 4, 5]
        made.shard.machine.sessions.clear()
        made.shard.driver.start("boot")  # it was killed
        assert await made.watch.sessions.save(stale, is_open=True), "put back before the live one"
        other = Watch(dispatch_to([made.shard]), connections_max=0, node_bytes_max=128)
        await made.nursery.start(other.run, trio.Event())
        again, peer = await other.open_session(wid, None), Peer()
        made.nursery.start_soon(again.run, peer)
        made.append(6)
        await trio.testing.wait_all_tasks_blocked()
        assert seqs(peer.read()) == [6]


class UnreadSocket:
    """A WebSocket whose peer has sent this and reads nothing."""

    def __init__(self, *messages: object) -> None:
        self._messages = [json.dumps(message).encode() for message in messages]
        self.sent: list[bytes] = []
        self.reads = trio.Event()

    async def receive(self) -> bytes:
        if not self._messages:
            await trio.sleep_forever()
        return self._messages.pop(0)

    async def send(self, text: bytes) -> None:
        if b'"op":"record"' in text:
            await self.reads.wait()
        self.sent.append(text)


async def test_a_socket_of_many_boxes_that_is_not_read_costs_no_more_than_one(autojump_clock: object) -> None:
    """§7.3: bounded buffers, however many boxes one socket has subscribed to."""
    async with stage() as made:
        boxes = [f"many{number}" for number in range(50)]
        for box in boxes:
            made.append("x" * 1000, box=box)
        socket = UnreadSocket({"op": "subscribe", "boxes": {box: {} for box in boxes}})
        connection = WebSocketConnection(made.watch, made.watch._dispatch, socket)
        made.nursery.start_soon(connection.run)
        await trio.testing.wait_all_tasks_blocked()
        assert 1000 < connection._sink.unsent_bytes < 3000, "one page"
        socket.reads.set()
        await trio.testing.wait_all_tasks_blocked()
        found = [json.loads(text) for text in socket.sent]
        assert sorted(said["box"] for said in found if said["op"] == "record") == sorted(boxes)


async def test_a_flood_in_one_box_does_not_starve_another(autojump_clock: object) -> None:
    async with stage() as made:
        made.append("quiet", box="calm")
        for number in range(400):
            made.append(number)
        peer = Peer(room=600)
        await made.open(peer, "b", "calm")
        found = peer.read()
        while not seqs(found, "calm"):
            await trio.testing.wait_all_tasks_blocked()
            found += peer.read()
        assert len(seqs(found, "b")) < 12, "the other box has its turn after one page"


async def test_an_error_of_one_box_ends_that_box_alone() -> None:
    """A box that is made again as one that cannot be read as asked."""
    async with stage() as made:
        made.append(1, box="other")
        named = '{"boxes":{"b":{},"other":{}},"consistency":"strong"}'
        plan = plan_of_body(named.encode(), 128)
        peer = Peer()
        body = made.watch.open_stream(plan, await made.watch.view_boxes(plan, lenient=False))
        made.nursery.start_soon(body.run, peer)
        await trio.testing.wait_all_tasks_blocked()
        peer.read()
        made.shard.do(commands.DeleteBox("b"))
        made.shard.do(commands.PutBox("b", patch(durability="memory")))
        made.shard.sync()
        await trio.testing.wait_all_tasks_blocked()
        made.append("gone")
        made.append(2, box="other")
        await trio.testing.wait_all_tasks_blocked()
        found = peer.read()
        [error] = [event.json for event in found if event.name == "error"]
        assert (error["code"], error["boxes"]) == (400, ["b"])
        assert seqs(found, "other") == [2]


async def test_a_box_without_room_among_the_feeds_is_asked_for_instead(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    monkeypatch.setattr(feeds, "FEEDS_MAX", 0)
    async with stage() as made:
        peer = Peer()
        await made.open(peer)
        made.append(1)
        found = peer.read()
        while seqs(found)[-1] < 2:
            await trio.sleep(0.5)
            found += peer.read()
        assert seqs(found) == [1, 2] and made.watch.feeds.statistics().feeds == 0


async def test_a_feed_without_watchers_ends(autojump_clock: object) -> None:
    async with stage() as made:
        body = await made.open(Peer())
        assert made.watch.feeds.statistics().feeds == 1
        body.stream.end()
        await trio.testing.wait_all_tasks_blocked()
        made.append(1)  # its question is answered, and nobody wants to know
        await trio.testing.wait_all_tasks_blocked()
        assert made.watch.feeds.statistics().feeds == 0


def test_the_encoding_is_what_the_shard_is_asked() -> None:
    asked = Encoding(nodes=("n",), strong=True).request_head("b", Place(3, 4, True), 5)
    assert (asked.from_seq, asked.generation, asked.nodes, asked.wait_ms) == (3, 4, ("n",), 5)
    assert asked.strong and asked.awaits_box
