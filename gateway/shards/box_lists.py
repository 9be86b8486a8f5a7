"""Lists the boxes of all shards: by name, or sorted by a number of theirs (v0 §2.3, §26).

A listing by name has no state: its cursor is the last name. A sorted one rests on an ordering that each
shard takes with the first page and keeps for a while (`shard/core/boxes/box_ordering.py`). Its cursor is the
name of these orderings and the position in each. If a shard has dropped its ordering, the listing starts
again and says so.
"""

from __future__ import annotations

import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Final, NamedTuple, get_args
from urllib.parse import urlencode

import msgspec
import orjson
import trio

from gateway.shards.dispatch import Dispatch, cursor_of, name_of
from streams.protocol import wire
from streams.protocol.access.grants import Grant
from streams.protocol.errors import InvalidRequest, StreamsError
from streams.protocol.messages import commands
from streams.protocol.messages.list_requests import PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX
from streams.protocol.messages.query import Query
from streams.protocol.messages.replies import BoxPage, ListedBox
from streams.protocol.model.boxes import Durability, Kind
from streams.protocol.model.names import quote

KINDS: Final = get_args(Kind)
SORTS: Final = ("name", "count", "bytes", "last_write", "ready", "lag", "rate")
ORDERS: Final = ("asc", "desc")
DURABILITIES: Final = get_args(Durability)
Q_CHARS_MAX: Final = 256

_decode_page = msgspec.json.Decoder(commands.ListBoxesResult).decode
_encode_head = wire.head_encoder.encode


class _Position(NamedTuple):
    listing: str
    offsets: list[int]


async def list_boxes(dispatch: Dispatch, query: str, grant: Grant | None = None) -> BoxPage:
    """Return one page of the boxes that the grant covers, over all shards.

    It fails if a shard does not answer: a list without the names of that shard would be a silent loss."""
    params = Query(query)
    prefix = params.text("prefix") or ""
    size = params.number("page_size", low=1, high=PAGE_SIZE_MAX) or PAGE_SIZE_DEFAULT
    cursor = params.text("cursor")
    kind, durability = _choice(params, "kind", KINDS), _choice(params, "durability", DURABILITIES)
    text = params.text("q") or ""
    sort = _choice(params, "sort", SORTS) or "name"
    order = _choice(params, "order", ORDERS) or ("asc" if sort == "name" else "desc")
    params.reject_unknown()
    if len(text) > Q_CHARS_MAX:
        raise InvalidRequest(f"q: has {len(text)} characters, at most {Q_CHARS_MAX} are allowed", field="q")
    prefixes = (prefix,) if grant is None else grant.within(prefix)
    if not prefixes:
        return BoxPage([], 0)
    if sort == "name" and order == "asc" and not (kind or durability or text):
        return await _list_by_name(dispatch, prefixes, size, name_of(cursor))
    fields = {"kind": kind, "durability": durability, "q": text, "sort": sort, "order": order}
    fields = {name: value for name, value in fields.items() if value}
    fields["prefixes"] = orjson.dumps(prefixes).decode()
    fields["page_size"] = str(size)
    return await _list_sorted(dispatch, fields, size, cursor)


def _choice(params: Query, name: str, choices: tuple[str, ...]) -> str:
    value = params.text(name)
    if value is not None and value not in choices:
        raise InvalidRequest(f"{name}: {quote(value)} is not one of {', '.join(choices)}", field=name)
    return value or ""


async def _list_by_name(dispatch: Dispatch, prefixes: tuple[str, ...], size: int, after: str) -> BoxPage:
    boxes: list[ListedBox] = []
    more = False
    total = 0
    for visible in prefixes:
        each = urlencode({"prefix": visible, "after": after, "page_size": size})
        for answer in await dispatch.to_all(wire.OP_LIST_BOXES, wire.RequestHead(query=each)):
            if isinstance(answer, StreamsError):
                raise answer
            page = _decode_page(answer.body)
            boxes += page.boxes
            more = more or page.more
            total += page.total
    boxes.sort(key=lambda box: box.box)
    more = more or len(boxes) > size
    boxes = boxes[:size]
    return BoxPage(boxes, total, cursor_of(boxes[-1].box) if more else None)


async def _list_sorted(dispatch: Dispatch, fields: dict[str, str], size: int, cursor: str | None) -> BoxPage:
    shards = len(dispatch.links)
    position = _position_of(cursor)
    is_restart = position is not None and len(position.offsets) != shards
    if position is None or is_restart:
        position = _Position(secrets.token_hex(8), [0] * shards)
    pages = await _pages(dispatch, fields, position)
    if any(page.is_unknown for page in pages):
        is_restart = True
        position = _Position(secrets.token_hex(8), [0] * shards)
        pages = await _pages(dispatch, fields, position)
    rows = [
        (key, box.box, shard, offset, box)
        for shard, page in enumerate(pages)
        for key, offset, box in zip(page.keys, page.offsets, page.boxes, strict=True)
    ]
    is_reversed = fields["sort"] == "name" and fields["order"] == "desc"
    rows.sort(key=lambda row: row[1], reverse=is_reversed)
    rows.sort(key=lambda row: row[0])  # equal numbers stay in the order of the names
    offsets = list(position.offsets)
    for _, _, shard, offset, _ in rows[:size]:
        offsets[shard] = offset
    more = len(rows) > size or any(page.more for page in pages)
    next_cursor = _cursor_at(_Position(position.listing, offsets)) if more else None
    total = sum(page.total for page in pages)
    return BoxPage([row[4] for row in rows[:size]], total, next_cursor, is_restart)


async def _pages(
    dispatch: Dispatch, fields: dict[str, str], position: _Position
) -> list[commands.ListBoxesResult]:
    """Ask every shard for its page, at the same time."""
    answers: list[wire.Message | StreamsError | None] = [None] * len(dispatch.links)

    async def ask(shard: int) -> None:
        query = urlencode({**fields, "listing": position.listing, "offset": position.offsets[shard]})
        try:
            head = _encode_head(wire.RequestHead(query=query))
            answers[shard] = await dispatch.links[shard].call(wire.OP_LIST_BOXES, head, b"")
        except StreamsError as error:
            answers[shard] = error

    async with trio.open_nursery() as nursery:
        for shard in range(len(answers)):
            nursery.start_soon(ask, shard)
    pages: list[commands.ListBoxesResult] = []
    for answer in answers:
        assert answer is not None
        if isinstance(answer, StreamsError):
            raise answer
        pages.append(_decode_page(answer.body))
    return pages


def _cursor_at(position: _Position) -> str:
    return urlsafe_b64encode(orjson.dumps([position.listing, position.offsets])).decode().rstrip("=")


def _position_of(cursor: str | None) -> _Position | None:
    if cursor is None:
        return None
    try:
        value = orjson.loads(urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        position = msgspec.convert(value, tuple[str, list[int]])
        if len(position[0]) <= 64 and all(0 <= offset < 2**53 for offset in position[1]):
            return _Position(*position)
    except ValueError:
        pass
    raise InvalidRequest(f"cursor: {quote(cursor)} is not a cursor of a sorted listing", field="cursor")
