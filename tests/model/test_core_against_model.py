"""Goal: the core answers exactly what the contract says, for any commands in any order.

Method: one random history is given to the machine and to the naive model of `tests/support/model.py`; replies
are compared as bytes and numbers. `logged` and `durable` arrive late and at random, so that most of the
history runs with writes on their way to the disk. What may be told before it is safe is checked for every
reply, from the log alone: a reply rests on the changes that it shows.
"""

from __future__ import annotations

import json
import random
from typing import Any
from unittest.mock import patch as replaced

import msgspec
import pytest
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shard.core import changes
from shard.core.machine import Outcome
from streams.protocol import wire
from streams.protocol.errors import StreamsError
from streams.protocol.messages import commands
from streams.protocol.messages.requests import decode_command, encode_reply
from streams.protocol.payloads.appends import RecordLimits
from tests.support.machines import Driver, patch, sampled
from tests.support.model import Model, ModelBox, Refusal, size_of, text_of

NAMES = ["a", "b", "b.c"]
DATAS = ["1.0", "null", '"é"', '{"k": [1,2]}', "12345678901234567890", "1e400", '"' + "x" * 60 + '"']
TAGS = ["", "u", "u-1", "u-2", "v", "é"]
NODES = ["", "n1", "n2", "ñ"]
MATCHES = [("u", False), ("u", True), ("u-", True), ("", True), ("é", False), ("none", False)]
FENCES = ["", "t1", "t2"]

names = st.sampled_from(NAMES)
drafts = st.lists(
    st.fixed_dictionaries(
        {
            "data": st.sampled_from(DATAS),
            "tag": st.sampled_from([None, *TAGS]),
            "node": st.sampled_from([None, *NODES]),
            "meta": st.sampled_from([None, None, "{}", '{"m":1.50}']),
            "ts": st.one_of(st.none(), st.integers(0, 3_000)),
        }
    ),
    min_size=1,
    max_size=6,
)
#: Writes whose records are all alike take another road through the renderer.
plain_drafts = st.lists(
    st.fixed_dictionaries(
        {
            "data": st.sampled_from(DATAS),
            "tag": st.sampled_from([None, *TAGS]),
            "node": st.none(),
            "meta": st.none(),
            "ts": st.none(),
        }
    ),
    min_size=1,
    max_size=12,
)
configs = st.fixed_dictionaries(
    {},
    optional={
        "ttl_ms": st.sampled_from([0, 1, 40, 300]),
        "cap_records": st.sampled_from([0, 1, 3, 8]),
        "cap_bytes": st.sampled_from([0, 70, 200, 600]),
        "discard": st.sampled_from(["old", "reject"]),
        "durability": st.sampled_from(["memory", "disk", "fsync"]),
        "auto_create": st.booleans(),
        "idempotency_window_ms": st.sampled_from([0, 50, 120_000]),
        "dedupe_node": st.booleans(),
        "mode": st.sampled_from(["arrival", "client-prefer", "client-require"]),
        "uncapped": st.booleans(),
    },
)


def request_config(config: dict[str, Any]) -> dict[str, Any]:
    """The model's flat config as a request says it."""
    fields = {name: value for name, value in config.items() if name not in ("mode", "uncapped")}
    timestamping = {name: config[name] for name in ("mode", "uncapped") if name in config}
    return {**fields, "timestamping": timestamping} if timestamping else fields


def append_body(records: list[dict[str, Any]], options: dict[str, Any]) -> bytes:
    """The body as a client would write it; `data` and `meta` go in as the text they are."""
    texts = []
    for record in records:
        fields = [f'"data":{record["data"]}']
        for name in ("tag", "node", "ts"):
            if record[name] is not None:
                fields.append(f'"{name}":{json.dumps(record[name])}')
        if record["meta"] is not None:
            fields.append(f'"meta":{record["meta"]}')
        texts.append("{" + ",".join(fields) + "}")
    rest = "".join(f',"{name}":{json.dumps(value)}' for name, value in options.items())
    return f'{{"records":[{",".join(texts)}]{rest}}}'.encode()


def some_config(rng: random.Random) -> dict[str, Any]:
    """A few fields, mild ones mostly, so that most writes go through."""
    choices: dict[str, list[Any]] = {
        "ttl_ms": [0, 40, 300],
        "cap_records": [0, 6, 8, 15],
        "cap_bytes": [0, 300, 600, 1500],
        "discard": ["old", "old", "reject"],
        "durability": ["memory", "disk", "disk", "fsync", "fsync"],
        "auto_create": [True, False],
        "idempotency_window_ms": [0, 50, 120_000],
        "dedupe_node": [True, False],
        "mode": ["arrival", "client-prefer"],
        "uncapped": [True, False],
    }
    return {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.2}


class CoreAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver()
        self.machine = self.driver.machine
        self.model = Model()
        self.keys_used: list[str] = []
        #: (lsn, until durable, box, seq, ts): what is not visible yet.
        self.pending: list[tuple[int, bool, ModelBox, int, int]] = []
        # By generation: the last change at all, the last one that every read shows, the classes it had.
        self.last_lsn: dict[int, int] = {}
        self.told_lsn: dict[int, int] = {}
        self.ceilings: dict[int, list[tuple[int, str, int]]] = {}
        self.deleted_lsn = 0

    @initialize(name=names, config=configs)
    def begin(self, name: str, config: dict[str, Any]) -> None:
        self.put(name, config)

    @property
    def now_ms(self) -> int:
        return self.driver.now_ms

    def do(self, command: Any) -> Outcome:
        outcome = self.driver.do(command)
        for lsn, change in outcome.changes:
            self.note_change(lsn, change)
        return outcome

    def note_change(self, lsn: int, change: Any) -> None:
        generation = change.generation
        if not isinstance(change, changes.SeqsReserved):  # which nobody is ever told of
            self.last_lsn[generation] = lsn
        if isinstance(change, changes.BoxDeleted):
            self.deleted_lsn = lsn
        moves_floor = isinstance(change, changes.BatchAppended) and (
            change.trim_before_seq or change.evict_before_seq
        )
        if moves_floor or not isinstance(change, (changes.BatchAppended, changes.SeqsReserved)):
            self.told_lsn[generation] = lsn
        history = self.ceilings.setdefault(generation, [])
        if isinstance(change, (changes.BoxCreated, changes.BoxConfigured)):
            reserved = change.reserved_seq or (history[-1][2] if history else 0)
            history.append((lsn, change.config.durability, reserved))
        elif isinstance(change, changes.SeqsReserved):
            history.append((lsn, history[-1][1], change.reserved_seq))

    # -- what a reply may rest on

    def waits_at_least(self, outcome: Outcome, lsn: int, *, durable: bool) -> None:
        """The reply does not go before `lsn` is where its class wants it."""
        done = self.machine.durable_lsn if durable else self.machine.logged_lsn
        if lsn > done:
            assert outcome.waits_for_lsn >= lsn, (outcome, lsn)
            assert outcome.until_durable or not durable, (outcome, lsn)

    def rests_on(self, outcome: Outcome, box: ModelBox | None, lsns: dict[int, int]) -> None:
        if box is None:
            self.waits_at_least(outcome, self.deleted_lsn, durable=True)
        elif box.config["durability"] == "memory":  # nothing but the box itself is on the disk
            self.waits_at_least(outcome, self.ceilings[box.generation][-1][0], durable=True)
        else:
            lsn = lsns.get(box.generation, 0)
            self.waits_at_least(outcome, lsn, durable=box.config["durability"] == "fsync")
        if self.machine.durable_lsn == self.machine.lsn:
            assert outcome.waits_for_lsn == 0, "everything is durable, so nothing is to be waited for"

    def refused(self, outcome: Outcome, name: str, refusal: Refusal) -> None:
        assert isinstance(outcome.reply, StreamsError), outcome.reply
        assert outcome.reply.code == refusal.code, outcome.reply
        self.rests_on(outcome, self.model.boxes.get(name), self.last_lsn)

    # -- rules that change

    @rule(name=names, config=configs)
    def put(self, name: str, config: dict[str, Any]) -> None:
        outcome = self.do(commands.PutBox(name, patch(**request_config(config))))
        try:
            created = self.model.put(name, config, self.now_ms)
        except Refusal as refusal:
            self.refused(outcome, name, refusal)
            return
        reply, box = outcome.reply, self.model.boxes[name]
        assert isinstance(reply, commands.PutBoxReply), reply
        assert reply.created == created
        shown = reply.config.to_fields()
        flat = {**shown, **shown["timestamping"]}
        assert {field: flat[field] for field in box.config} == box.config
        assert self.machine.boxes[name].generation == box.generation
        if any(
            isinstance(change, (changes.BoxCreated, changes.BoxConfigured)) for _, change in outcome.changes
        ):
            assert outcome.waits_for_lsn == self.machine.lsn and outcome.until_durable

    @rule(
        name=names,
        records=st.one_of(drafts, plain_drafts),
        node=st.sampled_from([None, None, *NODES]),
        key=st.sampled_from([None, None, "k1", "k2", "k3"]),
        create=st.sampled_from([None, None, None, True, False]),
        config=st.one_of(st.none(), configs),
        match_offset=st.sampled_from([None, None, None, 0, 0, 1, -1]),
        token=st.sampled_from([None, None, *FENCES]),
        trim=st.sampled_from([None, None, None, 0, 1, 2, 3, 4]),
        return_seqs=st.booleans(),
    )
    def append(
        self,
        name: str,
        records: list[dict[str, Any]],
        node: str | None,
        key: str | None,
        create: bool | None,
        config: dict[str, Any] | None,
        match_offset: int | None,
        token: str | None,
        trim: int | None,
        return_seqs: bool,
    ) -> None:
        box = self.model.boxes.get(name)
        next_seq = box.head_seq + 1 if box is not None else 1
        options: dict[str, Any] = {}
        if match_offset is not None:
            options["match_seq"] = max(0, next_seq + match_offset)
        if token is not None:
            options["fencing_token"] = token
        elif box is not None and box.fence and match_offset is None:
            options["fencing_token"] = box.fence  # or a fenced box would hardly ever be written to
        if trim is not None:
            options["trim_before_seq"] = max(0, next_seq + 1 - trim)
        if key is not None:
            options["idempotency_key"] = key
        extra: dict[str, Any] = {}
        if node is not None:
            extra["node"] = node
        if create is not None:
            extra["create"] = create
        if config is not None:
            extra["config"] = request_config(config)
        head = wire.head_encoder.encode(
            wire.RequestHead(name, "" if return_seqs else "return_seqs=false", wire.FORM_JSON, "")
        )
        body = append_body(records, {**options, **extra})
        note(body.decode())
        before_durable = self.machine.durable_lsn
        outcome = self.do(decode_command(wire.OP_APPEND, head, body, RecordLimits()))
        filled = [{**record, "node": record["node"] or node or ""} for record in records]
        self.check_append(outcome, name, filled, create, config or {}, options, return_seqs)
        assert self.machine.durable_lsn == before_durable

    def check_append(
        self,
        outcome: Outcome,
        name: str,
        records: list[dict[str, Any]],
        create: bool | None,
        config: dict[str, Any],
        options: dict[str, Any],
        return_seqs: bool,
    ) -> None:
        try:
            box, creates = self.model.box_for_append(name, create=create, config=config, now_ms=self.now_ms)
            key = options.get("idempotency_key")
            known = box.known_key(key, self.now_ms) if key is not None else None
            if known is not None:
                first, last, _ = known
                expected = (first, last, max(last, box.visible_seq), False, True)
                self.compare_append(outcome, name, expected, return_seqs)
                if last > box.visible_seq:
                    assert outcome.waits_for_lsn, "the first answer has not gone out yet, nor may this one"
                return
            box.expire(self.now_ms)
            first, last = box.append(records, self.now_ms, **options)
        except Refusal as refusal:
            self.refused(outcome, name, refusal)
            return
        if creates:
            self.model.keep(box)
        self.compare_append(outcome, name, (first, last, last, creates, False), return_seqs)
        self.stage(outcome, box)

    def stage(self, outcome: Outcome, box: ModelBox) -> None:
        """Whether a new write is visible now, later, or later still."""
        durability = box.config["durability"]
        if durability == "memory":
            box.visible_seq, box.visible_ts = box.head_seq, box.last_ts
            assert outcome.wakes == (box.name,)
            config_lsn = self.ceilings[box.generation][-1][0]
            assert outcome.waits_for_lsn == (config_lsn if config_lsn > self.machine.durable_lsn else 0)
            return
        assert outcome.waits_for_lsn == self.machine.lsn and not outcome.wakes
        if durability == "fsync":
            assert outcome.until_durable
        elif not outcome.until_durable:
            self.seq_is_safe(box, outcome.waits_for_lsn)
        self.pending.append((self.machine.lsn, outcome.until_durable, box, box.head_seq, box.last_ts))

    def seq_is_safe(self, box: ModelBox, lsn: int) -> None:
        """A disk write may be acked once it is logged only if its seq is set aside wherever the log ends."""
        history = self.ceilings[box.generation]
        for end in range(self.machine.durable_lsn, lsn):
            at_end = [entry for entry in history if entry[0] <= end]
            assert at_end, "the box itself could vanish"
            assert at_end[-1][1] == "disk" and at_end[-1][2] >= box.head_seq, "CEILING"

    def compare_append(
        self, outcome: Outcome, name: str, expected: tuple[int, int, int, bool, bool], return_seqs: bool
    ) -> None:
        reply = outcome.reply
        assert isinstance(reply, commands.AppendResult), reply
        first, last, head, created, deduped = expected
        answer = json.loads(encode_reply(reply))
        wanted = {
            "box": name,
            "first_seq": first,
            "last_seq": last,
            "seqs": list(range(first, last + 1)),
            "head_seq": head,
            "count": last - first + 1,
            "created": created,
            "deduped": deduped,
        }
        if not return_seqs:
            del wanted["seqs"]
        assert answer == wanted

    @rule(
        name=names,
        offset=st.one_of(st.none(), st.integers(-3, 8)),
        match=st.one_of(st.none(), st.sampled_from(MATCHES)),
    )
    def delete_records(self, name: str, offset: int | None, match: tuple[str, bool] | None) -> None:
        box = self.model.boxes.get(name)
        earliest_seq = box.live()[0]["seq"] if box is not None and box.live() else 1
        before_seq = None if offset is None else max(0, earliest_seq + offset)
        if before_seq is None and match is None:
            match = MATCHES[0]
        found = commands.Match(*match) if match is not None else None
        outcome = self.do(commands.DeleteRecords(name, before_seq, found))
        if box is None:
            self.refused(outcome, name, Refusal("box_not_found"))
            return
        box.expire(self.now_ms)
        deleted = box.delete(before_seq, match)
        count, size = box.totals()
        assert outcome.reply == commands.DeleteRecordsReply(
            name, deleted, box.earliest_seq(), box.visible_seq, count, size
        )
        self.rests_on(outcome, box, self.told_lsn)

    @rule(name=names, if_empty=st.booleans(), twice=st.booleans())
    def delete_box(self, name: str, if_empty: bool, twice: bool) -> None:
        if not if_empty and not twice:
            return  # deletions come half as often as the rest, or histories stay short
        outcome = self.do(commands.DeleteBox(name, if_empty))
        try:
            deleted = self.model.delete_box(name, if_empty=if_empty, now_ms=self.now_ms)
        except Refusal as refusal:
            self.refused(outcome, name, refusal)
            return
        assert outcome.reply == commands.DeleteBoxReply(name, deleted, [], [])
        self.waits_at_least(outcome, self.deleted_lsn, durable=True)

    @rule(name=names, token=st.sampled_from(FENCES), if_token=st.sampled_from([None, *FENCES]))
    def fence(self, name: str, token: str, if_token: str | None) -> None:
        outcome = self.do(commands.SetFence(name, token, if_token))
        box = self.model.boxes.get(name)
        if box is None:
            self.refused(outcome, name, Refusal("box_not_found"))
        elif if_token is not None and if_token != box.fence:
            self.refused(outcome, name, Refusal("fencing_token_mismatch"))
        else:
            box.fence = token
            assert outcome.reply == commands.SetFenceReply(name, token)
            self.rests_on(outcome, box, self.last_lsn)

    # -- rules that only look

    @rule(
        name=names,
        offset=st.integers(-12, 2),
        from_ts=st.one_of(st.none(), st.none(), st.integers(0, 3_000)),
        limit=st.sampled_from([1, 2, 5, 256]),
        max_bytes=st.sampled_from([1, 60, 150, 400, 1_000_000]),
        nodes=st.sampled_from([(), ("n1",), ("n1", "ñ"), ("n1", "n2", "ñ")]),
        include=st.tuples(st.booleans(), st.booleans(), st.booleans()),
        match=st.one_of(st.none(), st.sampled_from(MATCHES)),
        stale=st.sampled_from([None, 0, 0, 1]),
    )
    def diff(
        self,
        name: str,
        offset: int,
        from_ts: int | None,
        limit: int,
        max_bytes: int,
        nodes: tuple[str, ...],
        include: tuple[bool, bool, bool],
        match: tuple[str, bool] | None,
        stale: int | None,
    ) -> None:
        box = self.model.boxes.get(name)
        from_seq = 0 if from_ts is not None or box is None else max(0, box.visible_seq + offset)
        generation = None if stale is None or box is None else box.generation - stale
        tags, meta, data = include
        outcome = self.do(
            commands.ReadBox(
                box=name,
                from_seq=from_seq,
                from_ts=from_ts,
                limit=limit,
                max_bytes=max_bytes,
                nodes=frozenset(nodes),
                include_tags=tags,
                include_meta=meta,
                include_data=data,
                match=commands.Match(*match) if match is not None else None,
                generation=generation,
            )
        )
        if box is None:
            self.refused(outcome, name, Refusal("box_not_found"))
            return
        box.last_read = self.now_ms
        box.expire(self.now_ms)
        reply = outcome.reply
        assert isinstance(reply, commands.DiffResult), reply
        by_gap = from_ts is not None and reply.tombstone is not None and reply.tombstone.reason != "recreated"
        tombstone, deliverable, start = box.diff(
            from_seq=from_seq,
            from_ts=from_ts,
            generation=generation,
            nodes=frozenset(nodes),
            match=match,
            told_from=reply.tombstone.gap_from if by_gap and reply.tombstone is not None else None,
        )
        answer = msgspec.json.decode(encode_reply(reply).replace(b"1e400", b"0"))
        assert answer["tombstone"] == tombstone
        assert (answer["head_seq"], answer["earliest_seq"]) == (box.visible_seq, box.earliest_seq())
        assert answer["generation"] == box.generation
        count = len(answer["records"])
        shown = [text_of(record, tags=tags, meta=meta, data=data) for record in deliverable[:count]]
        assert reply.records.decode() == ",".join(shown)
        self.page_is_full(deliverable, count, limit, max_bytes)
        self.cursor_is_right(answer["next_from_seq"], deliverable, count, start, box)
        assert answer["caught_up"] == (answer["next_from_seq"] == box.visible_seq)
        assert answer["lag"] == box.visible_seq - answer["next_from_seq"]
        self.rests_on(outcome, box, self.told_lsn)

    @staticmethod
    def page_is_full(deliverable: list[dict[str, Any]], count: int, limit: int, max_bytes: int) -> None:
        """As many records as the limits allow: at least one, and no more than fit (commas may or may not)."""
        sizes = [size_of(record) for record in deliverable]
        assert count <= limit
        assert count <= 1 or sum(sizes[:count]) <= max_bytes
        if count < min(limit, len(sizes)):
            assert count >= 1
            assert sum(sizes[: count + 1]) + count > max_bytes

    @staticmethod
    def cursor_is_right(
        next_from_seq: int, deliverable: list[dict[str, Any]], count: int, start: int, box: ModelBox
    ) -> None:
        """The cursor passes what was shown or skipped, never what is still to come."""
        if count == len(deliverable) and count == 0:
            assert next_from_seq == box.visible_seq
        elif count == len(deliverable):
            assert deliverable[-1]["seq"] <= next_from_seq <= box.visible_seq
        else:
            assert deliverable[count - 1]["seq"] <= next_from_seq < deliverable[count]["seq"]
        assert next_from_seq >= start

    @rule(name=names, offset=st.integers(-8, 2))
    def get_record(self, name: str, offset: int) -> None:
        box = self.model.boxes.get(name)
        seq = max(0, (box.visible_seq if box is not None else 1) + offset)
        outcome = self.do(commands.GetRecord(name, seq))
        if box is None:
            self.refused(outcome, name, Refusal("box_not_found"))
            return
        box.expire(self.now_ms)
        found = [record for record in box.shown() if record["seq"] == seq]
        if not found:
            self.refused(outcome, name, Refusal("not_found"))
            return
        assert outcome.reply == commands.GetRecordResult(name, text_of(found[0], tags=True).encode())
        self.rests_on(outcome, box, self.told_lsn)

    @rule(name=names, touch=st.booleans())
    def state(self, name: str, touch: bool) -> None:
        outcome = self.do(commands.GetState(name, touch))
        box = self.model.boxes.get(name)
        if box is None:
            self.refused(outcome, name, Refusal("box_not_found"))
            return
        box.expire(self.now_ms)
        if touch:
            box.last_read = self.now_ms
        reply = outcome.reply
        assert isinstance(reply, commands.BoxState), reply
        answer = json.loads(encode_reply(reply))
        count, size = box.totals()
        expected = {
            "head_seq": box.visible_seq,
            "earliest_seq": box.earliest_seq(),
            "next_seq": box.visible_seq + 1,
            "generation": box.generation,
            "count": count,
            "bytes": size,
            "last_write_ts": box.visible_ts or None,
            "last_read_ts": box.last_read,
        }
        assert {field: answer[field] for field in expected} == expected
        assert answer.get("fencing_token", "") == box.fence
        self.rests_on(outcome, box, self.told_lsn)

    @rule(name=names)
    def tail(self, name: str) -> None:
        outcome = self.do(commands.GetTail(name))
        box = self.model.boxes.get(name)
        if box is None:
            self.refused(outcome, name, Refusal("box_not_found"))
            return
        box.expire(self.now_ms)
        assert outcome.reply == commands.Tail(
            name, box.visible_seq, box.visible_seq + 1, box.visible_ts or None
        )
        self.rests_on(outcome, box, self.told_lsn)

    @rule(
        prefix=st.sampled_from(["", "b", "x"]), after=st.sampled_from(["", "a", "b"]), limit=st.integers(1, 3)
    )
    def list_boxes(self, prefix: str, after: str, limit: int) -> None:
        outcome = self.do(commands.ListBoxes(prefix, after, limit))
        found = sorted(name for name in self.model.boxes if name.startswith(prefix) and name > after)
        page = outcome.reply
        assert isinstance(page, commands.ListBoxesResult), page
        assert page.more == (len(found) > limit)
        assert [entry.box for entry in page.boxes] == found[:limit]
        self.waits_at_least(outcome, self.deleted_lsn, durable=True)
        for entry in page.boxes:
            box = self.model.boxes[entry.box]
            box.expire(self.now_ms)
            count, size = box.totals()
            assert (entry.head_seq, entry.earliest_seq) == (box.visible_seq, box.earliest_seq())
            assert (entry.count, entry.bytes) == (count, size)
            assert entry.durability == box.config["durability"]
            assert entry.durable == (box.config["durability"] == "fsync")
            self.rests_on(outcome, box, self.told_lsn)

    # -- many of the above

    def one_of_many(self, rng: random.Random) -> None:
        name = rng.choice(NAMES)
        match = rng.choice(MATCHES) if rng.random() < 0.3 else None
        chance = rng.random()
        if chance < 0.40:
            self.some_append(rng, name)
        elif chance < 0.60:
            self.diff(
                name,
                rng.randint(-15, 1),
                rng.randrange(self.now_ms) if rng.random() < 0.2 else None,
                rng.choice([1, 2, 5, 256]),
                rng.choice([1, 60, 150, 400, 10**6]),
                rng.choice([(), ("n1",), ("n1", "n2")]),
                (rng.random() < 0.3, rng.random() < 0.8, rng.random() < 0.8),
                match,
                rng.choice([None, None, 0, 1]),
            )
        elif chance < 0.68:
            self.delete_records(name, rng.choice([None, 0, 1, 2, 3, 5]), match)
        elif chance < 0.72:
            self.put(name, some_config(rng))
        elif chance < 0.80:
            rng.choice(
                (self.tail, lambda name: self.state(name, True), lambda name: self.get_record(name, -1))
            )(name)
        elif chance < 0.82:
            self.list_boxes("", "", 3)
        elif chance < 0.83:
            self.delete_box(name, rng.random() < 0.5, True)
        elif chance < 0.84:
            self.fence(name, rng.choice(FENCES), None)
        elif chance < 0.90:
            self.wait(rng.choice([1, 1, 5, 20, 41]))
        elif chance < 0.92:
            self.tick()
        elif chance < 0.94:
            self.logged(rng.random())
        elif chance < 0.96:
            self.durable(rng.random())
        else:
            self.upkeep(rng.getrandbits(32))

    def some_append(self, rng: random.Random, name: str) -> None:
        plain = rng.random() < 0.5
        records = [
            {
                "data": rng.choice(DATAS),
                "tag": rng.choice(TAGS),
                "node": None if plain else rng.choice(NODES),
                "meta": None if plain else rng.choice([None, '{"m":1.50}']),
                "ts": None if plain or rng.random() < 0.5 else rng.randrange(3_000),
            }
            for _ in range(rng.choice([1, 1, 2, 3, 6]))
        ]
        self.append(
            name,
            records,
            rng.choice([None, None, "n1"]),
            rng.choice([None, None, None, "k1", "k2"]),
            None if rng.random() < 0.8 else True,
            some_config(rng) if rng.random() < 0.5 else None,
            rng.choice([None, None, None, None, 0, 1]),
            None,
            rng.choice([None, None, None, None, None, 1, 2, 4]),
            True,
        )

    # -- time and the disk

    @rule(ms=st.sampled_from([1, 1, 10, 41, 60, 301]))
    def wait(self, ms: int) -> None:
        self.driver.now_ms += ms

    @rule()
    def tick(self) -> None:
        outcome = self.driver.tick()
        for lsn, change in outcome.changes:
            self.note_change(lsn, change)
        for box in self.model.boxes.values():
            box.expire(self.now_ms)
        deadline = self.machine.next_deadline_ms()
        assert deadline is None or deadline > self.now_ms

    @precondition(lambda self: self.machine.logged_lsn < self.machine.lsn)
    @rule(share=st.floats(0, 1))
    def logged(self, share: float) -> None:
        done = self.machine.logged_lsn
        lsn = done + round((self.machine.lsn - done) * share)
        self.show(self.driver.logged(lsn), lsn, durable=False)

    @precondition(lambda self: self.machine.durable_lsn < self.machine.lsn)
    @rule(share=st.floats(0, 1))
    def durable(self, share: float) -> None:
        done = self.machine.durable_lsn
        lsn = done + round((self.machine.lsn - done) * share)
        self.show(self.driver.sync(lsn), lsn, durable=True)

    @rule(seed=st.integers(0, 2**32))
    def upkeep(self, seed: int) -> None:
        """Sealing, forgetting and rewriting: nobody can tell."""
        self.driver.some_upkeep(random.Random(seed))

    @rule()
    def settle(self) -> None:
        self.show(self.driver.sync(), self.machine.lsn, durable=True)

    def show(self, woken: list[str], lsn: int, *, durable: bool) -> None:
        expected = set()
        for entry in list(self.pending):
            at, until_durable, box, seq, ts = entry
            if at <= lsn and (durable or not until_durable):
                self.pending.remove(entry)
                if seq > box.visible_seq:  # else the box has been in memory since, where all is visible
                    box.visible_seq, box.visible_ts = seq, ts
                    expected.add(box.name)
        assert set(woken) == expected

    @invariant()
    def totals_agree(self) -> None:
        self.machine.check()
        assert set(self.machine.boxes) == set(self.model.boxes)
        for name, box in self.model.boxes.items():
            assert self.machine.boxes[name].log.visible_seq == box.visible_seq
            assert self.machine.boxes[name].log.head_seq == box.head_seq


class WithFewSeqsReserved(CoreAgainstModel):
    """Runs the model with so few reserved seqs that disk boxes keep running into their ceiling."""

    def __init__(self) -> None:
        super().__init__()
        self.replaced = [
            replaced("shard.core.context.RESERVE_SEQS", 8),
            replaced("shard.core.context.RESERVATION_IDLE_MS", 50),
            replaced("shard.core.boxes.tail._COMPACT_AT", 2),
            replaced("shard.core.boxes.tags._STALE_MIN", 2),
        ]
        for each in self.replaced:
            each.start()

    def teardown(self) -> None:
        for each in self.replaced:
            each.stop()


@pytest.mark.parametrize("history", [CoreAgainstModel, WithFewSeqsReserved])
@settings(sampled(40), phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(seed=st.integers(0, 2**64 - 1))
def test_long_histories_agree_with_the_model(history: type[CoreAgainstModel], seed: int) -> None:
    """Nothing to shrink here, but hundreds of steps: state that takes long to build up."""
    rng = random.Random(seed)
    run = history()
    try:
        for name in NAMES:
            run.put(name, some_config(rng))
        for _ in range(300):
            run.one_of_many(rng)
            run.totals_agree()
    finally:
        run.teardown()


TestCoreAgainstModel = CoreAgainstModel.TestCase
TestCoreAgainstModel.settings = sampled(30, steps=50)
TestWithFewSeqsReserved = WithFewSeqsReserved.TestCase
TestWithFewSeqsReserved.settings = sampled(30, steps=50)
