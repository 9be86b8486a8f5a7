"""Encodes and decodes changes (frames of the log) and the state of a shard (snapshots). Pure.

The content of a frame (the log adds length, lsn and checksum, see `wal/format.py`):

    BatchAppended   u64 generation · i64 at_ms · u64 trim_before · u64 evict_before · u64 trim_cut_bytes ·
                    u64 evict_cut_bytes · i64 evicted_ts · u16 key length · key (UTF-8) · the batch as
                    `Batch.to_parts` lays it out
    BatchForwarded  u64 life · u64 position · u64 lost · u16 origin length · origin (UTF-8) · then as
                    BatchAppended, without a key
    RecordsDeleted  u64 generation · u64 before_seq · u64 cut_bytes · i64 at_ms · u32 batches ·
                    u64 bytes in each · 64-bit roaring bitmap, or nothing
      with groups   u64 generation · u64 before_seq · u64 cut_bytes · i64 at_ms · u32 batches · u32 segments ·
                    u64 batches of each segment · u64 bytes of each · u64 bytes in each batch · bitmap
    StreamAppended  u64 trim_seq · u8 whether there is a fence · u16 its length · fence (UTF-8) · then as
                    BatchAppended, without a key
    ScheduleFired   i64 due_ms · i64 next_due_ms · u16 length of the name · name (UTF-8) · then as
                    BatchAppended; a run has its key
    BatchKept       u64 generation · the batch likewise
    TxnHeld, TxnKept  u32 length of the head · head (msgpack map without the body) · packed columns
    all others      one msgpack map, field by field

Rules of the file
- The numbers of kinds and the layouts of versions are on disk and never change. A new layout gets a new
  version, and the decoder of the old one stays.

Invariants
- KINDS_UNIQUE: each kind of change has a number of its own.
- KIND_BYTE: a kind is one byte, and not 0, which is the kind of the log's markers.
- DECODABLE: every kind that is written has a decoder.
- KIND_IS_TYPE: the head of a frame belongs to its kind of change.
- NO_KEY: copies, and appends to streams, have no idempotency key.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from pyroaring import BitMap64

from shard.core import changes
from shard.core.changes import Change
from shard.core.snapshot_facts import BoxFacts, ShardState
from streams.protocol.model.records import Batch

VERSION = 1

_KINDS: dict[type[Any], int] = {
    changes.BoxCreated: 1,
    changes.BoxConfigured: 2,
    changes.BoxDeleted: 3,
    changes.BatchAppended: 4,
    changes.RecordsEvicted: 5,
    changes.RecordsDeleted: 6,
    changes.TokenFenced: 7,
    changes.SeqsReserved: 8,
    changes.SeqsLost: 9,
    changes.ShardStarted: 10,
    changes.ShardStopped: 11,
    changes.SegmentSealed: 12,
    changes.SegmentsReplaced: 13,
    changes.SegmentMoved: 14,
    changes.BatchKept: 15,
    changes.BoxRestated: 16,
    changes.ShardRested: 17,
    changes.BatchForwarded: 20,
    changes.OriginMoved: 21,
    changes.OriginDropped: 22,
    changes.OutboxTied: 23,
    changes.OutboxUntied: 24,
    changes.OutboxMoved: 25,
    changes.RouterRegistered: 26,
    changes.RouterDropped: 27,
    changes.JobsLeased: 30,
    changes.JobsExtended: 31,
    changes.JobsReturned: 32,
    changes.JobsCounted: 33,
    changes.JobsRestated: 34,
    changes.JobsRescheduled: 35,
    changes.JobsReprioritized: 40,
    changes.GroupCommitted: 36,
    changes.GroupDeleted: 37,
    changes.MovesPlanned: 38,
    changes.MovesDone: 39,
    changes.OutputsPlanned: 41,
    changes.OutputsDelivered: 42,
    changes.TxnHeld: 50,
    changes.TxnCommitted: 51,
    changes.TxnDropped: 52,
    changes.TxnKept: 53,
    changes.TxnForgotten: 54,
    changes.TxnRendered: 55,
    changes.StreamCreated: 60,
    changes.StreamStated: 61,
    changes.StreamAppended: 62,
    changes.BasinRegistered: 63,
    changes.BasinDropped: 64,
    changes.TokenIssued: 65,
    changes.TokenRevoked: 66,
    changes.UploadsMoved: 70,
    changes.ScheduleSet: 80,
    changes.ScheduleFired: 81,
    changes.ScheduleAdvanced: 82,
    changes.ScheduleDropped: 83,
}
APPENDED = _KINDS[changes.BatchAppended]
FORWARDED = _KINDS[changes.BatchForwarded]
_STREAM_APPENDED = _KINDS[changes.StreamAppended]
_SCHEDULE_FIRED = _KINDS[changes.ScheduleFired]
_DELETED = _KINDS[changes.RecordsDeleted]
#: A `RecordsDeleted` with groups. It has its own kind, not a version: salvage knows one version only.
_DELETED_IN_GROUPS = 18
_KEPT = _KINDS[changes.BatchKept]
_HELD = {_KINDS[change]: change for change in (changes.TxnHeld, changes.TxnKept)}

#: Kinds that assign seqs to records, or use up seqs without records.
ASSIGNS_SEQS = frozenset(
    _KINDS[change]
    for change in (
        changes.BatchAppended,
        changes.BatchForwarded,
        changes.StreamAppended,
        changes.ScheduleFired,
        changes.BatchKept,
        changes.TxnCommitted,
        changes.SeqsLost,
        changes.BoxRestated,
    )
)

_APPENDED_HEAD = struct.Struct("<QqQQQQqH")
_STREAM_HEAD = struct.Struct("<QBH")
_FORWARDED_HEAD = struct.Struct("<QQQH")
_FIRED_HEAD = struct.Struct("<qqH")
_DELETED_HEAD = struct.Struct("<QQQqI")
_GENERATION = struct.Struct("<Q")
_LENGTH = struct.Struct("<I")

_encode_plain = msgspec.msgpack.Encoder().encode
_PLAIN_DECODERS: dict[int, Any] = {
    kind: msgspec.msgpack.Decoder(change).decode
    for change, kind in _KINDS.items()
    if kind not in (APPENDED, FORWARDED, _STREAM_APPENDED, _SCHEDULE_FIRED, _DELETED, _KEPT, *_HELD)
}

assert len({*_KINDS.values(), _DELETED_IN_GROUPS}) == len(_KINDS) + 1, "KINDS_UNIQUE"
assert all(0 < kind < 256 for kind in (*_KINDS.values(), _DELETED_IN_GROUPS)), "KIND_BYTE"
assert len(_PLAIN_DECODERS) + 6 + len(_HELD) == len(_KINDS), "DECODABLE"


class UnknownFrame(ValueError):
    """A frame of an unknown kind or version: a newer server wrote it."""


def encode(lsn: int, change: Change) -> tuple[int, int, int, Sequence[bytes]]:
    """Return (kind, version, lsn, parts of the content) of a change."""
    kind = _KINDS[type(change)]
    if isinstance(change, changes.BatchAppended):
        key = (change.idempotency_key or "").encode()
        head = _APPENDED_HEAD.pack(
            change.generation,
            change.at_ms,
            change.trim_before_seq,
            change.evict_before_seq,
            change.trim_cut_bytes,
            change.evict_cut_bytes,
            change.evicted_ts,
            len(key),
        )
        if kind == FORWARDED:
            head = _forwarded_head(change) + head
        elif kind == _STREAM_APPENDED:
            head = _stream_head(change) + head
        elif kind == _SCHEDULE_FIRED:
            head = _fired_head(change) + head
        columns, blob = change.batch.to_parts()
        return kind, VERSION, lsn, (head + key + columns, blob)
    if isinstance(change, changes.BatchKept):
        columns, blob = change.batch.to_parts()
        return kind, VERSION, lsn, (_GENERATION.pack(change.generation) + columns, blob)
    if isinstance(change, changes.RecordsDeleted):
        seqs = change.seqs.serialize() if change.seqs is not None else b""
        head = _DELETED_HEAD.pack(
            change.generation, change.before_seq, change.cut_bytes, change.at_ms, len(change.sizes)
        )
        sizes = change.sizes if isinstance(change.sizes, array) else array("Q", change.sizes)
        if not change.groups:
            return kind, VERSION, lsn, (head + sizes.tobytes() + seqs,)
        groups = b"".join(array("Q", column) for column in zip(*change.groups, strict=True))
        return (
            _DELETED_IN_GROUPS,
            VERSION,
            lsn,
            (head, _LENGTH.pack(len(change.groups)), groups, sizes.tobytes(), seqs),
        )
    if isinstance(change, changes.TxnHeld):
        rest = _encode_plain(msgspec.structs.replace(change, body=b""))
        return kind, VERSION, lsn, (_LENGTH.pack(len(rest)) + rest, change.body)
    return kind, VERSION, lsn, (_encode_plain(change),)


def decode(kind: int, version: int, content: memoryview) -> Change:
    if version != VERSION:
        raise UnknownFrame(f"a frame of kind {kind} has version {version}, this server reads {VERSION}")
    if kind == FORWARDED:
        return _decode_forwarded(content)
    if kind == APPENDED:
        return changes.BatchAppended(*_decode_appended(content))
    if kind == _STREAM_APPENDED:
        return _decode_stream_appended(content)
    if kind == _SCHEDULE_FIRED:
        due_ms, next_due_ms, name_bytes = _FIRED_HEAD.unpack_from(content)
        at = _FIRED_HEAD.size + name_bytes
        return changes.ScheduleFired(
            *_decode_appended(content[at:]),
            schedule=str(content[_FIRED_HEAD.size : at], "utf-8"),
            due_ms=due_ms,
            next_due_ms=next_due_ms,
        )
    if kind in (_DELETED, _DELETED_IN_GROUPS):
        return _decode_deleted(kind, content)
    if kind == _KEPT:
        (generation,) = _GENERATION.unpack_from(content)
        return changes.BatchKept(generation, Batch.from_bytes(content[_GENERATION.size :]))
    if kind in _HELD:
        (length,) = _LENGTH.unpack_from(content)
        at = _LENGTH.size + length
        chunk = msgspec.msgpack.decode(content[_LENGTH.size : at], type=_HELD[kind])
        return msgspec.structs.replace(chunk, body=bytes(content[at:]))
    decoder = _PLAIN_DECODERS.get(kind)
    if decoder is None:
        raise UnknownFrame(f"a frame has kind {kind}, which this server does not know")
    change: Change = decoder(content)
    return change


def _decode_appended(content: memoryview) -> tuple[Any, ...]:
    """Return the fields of a `BatchAppended`, in their order."""
    generation, at_ms, *cuts, key_bytes = _APPENDED_HEAD.unpack_from(content)
    at = _APPENDED_HEAD.size + key_bytes
    key = str(content[_APPENDED_HEAD.size : at], "utf-8") if key_bytes else None
    return generation, Batch.from_bytes(content[at:]), at_ms, key, *cuts


def _decode_deleted(kind: int, content: memoryview) -> changes.RecordsDeleted:
    generation, before_seq, cut_bytes, at_ms, batches = _DELETED_HEAD.unpack_from(content)
    at = _DELETED_HEAD.size
    groups: list[tuple[int, int]] = []
    if kind == _DELETED_IN_GROUPS:
        (segments,) = _LENGTH.unpack_from(content, at)
        at += _LENGTH.size
        columns = array("Q", bytes(content[at : at + 16 * segments]))
        groups = list(zip(columns[:segments], columns[segments:], strict=True))
        at += 16 * segments
    sizes = array("Q", bytes(content[at : at + 8 * batches]))
    at += 8 * batches
    seqs = BitMap64.deserialize(bytes(content[at:])) if len(content) > at else None
    return changes.RecordsDeleted(generation, before_seq, cut_bytes, seqs, sizes, at_ms, groups)


class DamagedBatch(NamedTuple):
    """The batch that a damaged frame seems to hold. Any of its numbers may be the damaged one."""

    generation: int
    #: The first seq that it uses: one before its first record if a hole comes first.
    first_seq_taken: int
    records: int
    #: True if two parts of the batch agree on the number of records.
    is_count_sure: bool
    #: True if the generation is at the front of the frame.
    is_generation_sure: bool
    #: True if the batch was logged before, in another frame.
    is_kept: bool


def read_claim(kind: int, content: memoryview) -> DamagedBatch | None:
    """Read the batch claim of a damaged frame; None if its kind holds no batch, or it is too short."""
    at = behind_loss = 0
    try:
        if kind == FORWARDED:
            _, _, lost_count, origin_bytes = _FORWARDED_HEAD.unpack_from(content)
            at, behind_loss = _FORWARDED_HEAD.size + origin_bytes, int(lost_count > 0)
        elif kind == _STREAM_APPENDED:
            at = _STREAM_HEAD.size + int(_STREAM_HEAD.unpack_from(content)[-1])
        elif kind == _SCHEDULE_FIRED:
            at = _FIRED_HEAD.size + int(_FIRED_HEAD.unpack_from(content)[-1])
        elif kind not in (APPENDED, _KEPT):
            return None
        (generation,) = _GENERATION.unpack_from(content, at)
        if kind == _KEPT:
            at += _GENERATION.size
        else:
            at += _APPENDED_HEAD.size + int(_APPENDED_HEAD.unpack_from(content, at)[-1])
        first_seq, records, is_sure = Batch.peek(content[at:])
    except struct.error:
        return None
    return DamagedBatch(
        generation,
        first_seq_taken=first_seq - behind_loss,
        records=records,
        is_count_sure=is_sure,
        is_generation_sure=kind not in (FORWARDED, _SCHEDULE_FIRED),
        is_kept=kind == _KEPT,
    )


def _forwarded_head(change: changes.BatchAppended) -> bytes:
    assert isinstance(change, changes.BatchForwarded), "KIND_IS_TYPE"
    origin = change.origin.encode()
    return _FORWARDED_HEAD.pack(change.life, change.position, change.lost, len(origin)) + origin


def _decode_forwarded(content: memoryview) -> changes.BatchForwarded:
    life, position, lost_count, origin_bytes = _FORWARDED_HEAD.unpack_from(content)
    at = _FORWARDED_HEAD.size + origin_bytes
    origin = str(content[_FORWARDED_HEAD.size : at], "utf-8")
    generation, at_ms, *cuts, key_bytes = _APPENDED_HEAD.unpack_from(content, at)
    assert key_bytes == 0, "NO_KEY: copies have no idempotency key"
    batch = Batch.from_bytes(content[at + _APPENDED_HEAD.size :])
    return changes.BatchForwarded(
        generation, batch, at_ms, None, *cuts, origin=origin, life=life, position=position, lost=lost_count
    )


def _stream_head(change: changes.BatchAppended) -> bytes:
    assert isinstance(change, changes.StreamAppended), "KIND_IS_TYPE"
    fence = (change.fence or "").encode()
    return _STREAM_HEAD.pack(change.trim_seq, change.fence is not None, len(fence)) + fence


def _fired_head(change: changes.BatchAppended) -> bytes:
    assert isinstance(change, changes.ScheduleFired), "KIND_IS_TYPE"
    name = change.schedule.encode("utf-8")
    return _FIRED_HEAD.pack(change.due_ms, change.next_due_ms, len(name)) + name


def _decode_stream_appended(content: memoryview) -> changes.StreamAppended:
    trim_seq, is_fenced, fence_bytes = _STREAM_HEAD.unpack_from(content)
    at = _STREAM_HEAD.size + fence_bytes
    fence = str(content[_STREAM_HEAD.size : at], "utf-8") if is_fenced else None
    generation, at_ms, *cuts, key_bytes = _APPENDED_HEAD.unpack_from(content, at)
    assert key_bytes == 0, "NO_KEY: appends to streams have no idempotency key"
    batch = Batch.from_bytes(content[at + _APPENDED_HEAD.size :])
    return changes.StreamAppended(generation, batch, at_ms, None, *cuts, fence=fence, trim_seq=trim_seq)


# ---------------------------------------------------------------------------------------------------
# Snapshots

_STATE_VERSION = 1
#: About a hundred boxes: a fraction of a millisecond.
_PIECE_BYTES = 64 << 10
#: Idempotency keys, jobs or batches with dead records per encoder call: one millisecond.
_ITEMS_AT_ONCE = 2_000
#: Segments per encoder call: each may have ten thousand batches with dead records.
_SEGMENTS_AT_ONCE = 4
#: Headers of a msgpack map and a msgpack array.
_MAP_HEAD, _ARRAY_HEAD = struct.Struct(">BH"), struct.Struct(">BI")
_encode_into = msgspec.msgpack.Encoder().encode_into
_decode_state = msgspec.msgpack.Decoder(ShardState).decode


def encode_state(state: ShardState, pause: Callable[[], None] = lambda: None) -> list[bytes]:
    """Encode a state as a version byte and one msgpack map, in pieces.

    `pause` is called between the pieces, so that other threads can run: 100,000 boxes take 0.125 s.
    """
    plain = [name for name in state.__struct_fields__ if name != "boxes"]
    piece = bytearray([_STATE_VERSION]) + _MAP_HEAD.pack(0xDE, len(plain) + 1)
    for name in plain:
        piece += _encode_plain(name) + _encode_plain(getattr(state, name))
    piece += _encode_plain("boxes") + _ARRAY_HEAD.pack(0xDD, len(state.boxes))
    pieces: list[bytes] = []
    for facts in state.boxes:
        if _is_large(facts):
            parts: Iterable[bytes] = _encoded_in_parts(facts)
        else:
            _encode_into(facts, piece, len(piece))
            parts = (b"",)
        for part in parts:
            piece += part
            if len(piece) >= _PIECE_BYTES:
                pieces.append(bytes(piece))
                piece.clear()
                pause()
    return [*pieces, bytes(piece)]


def _is_large(facts: BoxFacts) -> bool:
    jobs = len(facts.queue.jobs) if facts.queue is not None else 0
    return len(facts.keys) + jobs + sum(len(segment.dead) for segment in facts.segments) > _ITEMS_AT_ONCE


def _encoded_in_parts(facts: BoxFacts) -> Iterator[bytes]:
    """Encode a box with many idempotency keys, jobs or batches with dead records, in parts.

    The encoder does not release the GIL, and takes 0.1 s for a million keys.
    """
    yield from _encoded_map(facts, {"keys": facts.keys, "segments": facts.segments, "queue": facts.queue})


def _encoded_map(struct: msgspec.Struct, large: dict[str, Any]) -> Iterator[bytes]:
    """Encode a struct field by field; the fields in `large` in parts."""
    names = struct.__struct_fields__
    yield _MAP_HEAD.pack(0xDE, len(names))
    for name in names:
        yield _encode_plain(name)
        items = large.get(name)
        if isinstance(items, changes.QueueFacts):
            yield from _encoded_map(items, {"jobs": items.jobs})
        elif items is None:
            yield _encode_plain(getattr(struct, name))
        else:
            yield _ARRAY_HEAD.pack(0xDD, len(items))
            step = _SEGMENTS_AT_ONCE if name == "segments" else _ITEMS_AT_ONCE
            for at in range(0, len(items), step):
                yield b"".join(map(_encode_plain, items[at : at + step]))


def decode_state(content: memoryview) -> ShardState:
    if content[0] != _STATE_VERSION:
        raise UnknownFrame(f"a snapshot has version {content[0]}; this server knows version {_STATE_VERSION}")
    return _decode_state(content[1:])
