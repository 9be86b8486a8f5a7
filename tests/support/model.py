"""What a shard promises, said as plainly as possible: boxes are lists of dicts, and every question is a loop.

Written from v0 §1-§5, not from the code. Nothing is ever thrown away: a record that is lost or deleted
keeps its place and says why it is gone, so floors, gaps and reasons are looked up, not kept.

Readers see records up to `visible_seq`; whatever else is in a box is on its way to the disk. Floors move at
once (replies that tell of them wait), so they are cut off at what is visible.
"""

from __future__ import annotations

import json
from typing import Any

DEFAULTS: dict[str, Any] = {
    "ttl_ms": 0,
    "cap_records": 0,
    "cap_bytes": 0,
    "discard": "old",
    "durability": "disk",
    "auto_create": True,
    "idempotency_window_ms": 120_000,
    "dedupe_node": True,
    "mode": "arrival",
    "uncapped": False,
}


class Refusal(Exception):
    """Carries the error code that the answer must have."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


def text_of(record: dict[str, Any], *, tags: bool = False, meta: bool = True, data: bool = True) -> str:
    """A record as a reader gets it, field by field."""
    parts = [f'"$seq":{record["seq"]}', f'"$ts":{record["ts"]}']
    if record["node"]:
        parts.append(f'"$node":{json.dumps(record["node"], ensure_ascii=False)}')
    if tags and record["tag"]:
        parts.append(f'"$tag":{json.dumps(record["tag"], ensure_ascii=False)}')
    if meta and record["meta"] is not None:
        parts.append(f'"meta":{record["meta"]}')
    if data:
        parts.append(f'"data":{record["data"]}')
    return "{" + ",".join(parts) + "}"


def size_of(record: dict[str, Any]) -> int:
    return len(text_of(record).encode())


def matches(tag: str | None, match: tuple[str, bool] | None) -> bool:
    if match is None:
        return True
    text, is_prefix = match
    return bool(tag) and (tag.startswith(text) if is_prefix else tag == text)  # type: ignore[union-attr]


class ModelBox:
    def __init__(self, name: str, generation: int, config: dict[str, Any]) -> None:
        self.name = name
        self.generation = generation
        self.config = config
        self.records: list[dict[str, Any]] = []
        self.visible_seq = 0
        self.visible_ts = 0
        self.keys: dict[str, tuple[int, int, int]] = {}
        self.fence = ""
        self.last_read: int | None = None

    # -- looking

    @property
    def head_seq(self) -> int:
        return self.records[-1]["seq"] if self.records else 0

    @property
    def last_ts(self) -> int:
        return self.records[-1]["ts"] if self.records else 0

    def live(self) -> list[dict[str, Any]]:
        return [record for record in self.records if record["gone"] is None]

    def shown(self) -> list[dict[str, Any]]:
        return [record for record in self.live() if record["seq"] <= self.visible_seq]

    def evicted(self) -> list[dict[str, Any]]:
        return [record for record in self.records if record["gone"] in ("cap", "ttl")]

    def earliest_seq(self) -> int:
        shown = self.shown()
        return shown[0]["seq"] if shown else self.visible_seq + 1

    def floor(self) -> int:
        evicted = self.evicted()
        return min(evicted[-1]["seq"] + 1, self.visible_seq + 1) if evicted else 0

    def reason(self, gap_from: int) -> str:
        why = {record["gone"] for record in self.evicted() if record["seq"] >= gap_from}
        return "mixed" if len(why) == 2 else why.pop()

    def totals(self) -> tuple[int, int]:
        shown = self.shown()
        return len(shown), sum(map(size_of, shown))

    # -- what time and caps do

    def expire(self, now_ms: int) -> None:
        ttl_ms = self.config["ttl_ms"]
        if ttl_ms:
            for record in self.live():
                if record["ts"] < now_ms - ttl_ms:
                    record["gone"] = "ttl"

    def fits(self, records: list[dict[str, Any]]) -> bool:
        cap_records, cap_bytes = self.config["cap_records"], self.config["cap_bytes"]
        return not (
            (cap_records and len(records) > cap_records)
            or (cap_bytes and sum(map(size_of, records)) > cap_bytes)
        )

    def evict_to_fit(self) -> None:
        while not self.fits(self.live()):
            self.live()[0]["gone"] = "cap"

    # -- writing

    def known_key(self, key: str, now_ms: int) -> tuple[int, int, int] | None:
        known = self.keys.get(key)
        if known is not None and known[2] + self.config["idempotency_window_ms"] >= now_ms:
            return known
        return None

    def timed(self, wanted: list[int | None], now_ms: int) -> list[int]:
        mode, uncapped = self.config["mode"], self.config["uncapped"]
        if mode == "client-require" and None in wanted:
            raise Refusal("invalid_request")
        times: list[int] = []
        latest = self.last_ts
        for ts in wanted:
            if mode == "arrival" or ts is None:
                ts = now_ms
            elif not uncapped:
                ts = min(ts, now_ms)
            latest = max(latest, ts)
            times.append(latest)
        return times

    def append(self, drafts: list[dict[str, Any]], now_ms: int, **options: Any) -> tuple[int, int]:
        """Appends or raises `Refusal`; nothing happens then."""
        next_seq = self.head_seq + 1
        if self.fence and options.get("fencing_token") != self.fence:
            raise Refusal("fencing_token_mismatch")
        if options.get("match_seq") is not None and options["match_seq"] != next_seq:
            raise Refusal("seq_mismatch")
        trim = options.get("trim_before_seq") or 0
        if trim > next_seq:
            raise Refusal("invalid_request")
        times = self.timed([draft["ts"] for draft in drafts], now_ms)
        fresh = [
            {**draft, "seq": seq, "ts": ts, "gone": None, "write": next_seq}
            for seq, (draft, ts) in enumerate(zip(drafts, times, strict=True), next_seq)
        ]
        if not self.fits(fresh):
            raise Refusal("record_too_large")
        kept = [record for record in self.live() if record["seq"] >= trim]
        if self.config["discard"] == "reject" and not self.fits(kept + fresh):
            raise Refusal("box_full")
        for record in self.live():
            if record["seq"] < trim:
                record["gone"] = "deleted"
        self.records += fresh
        self.evict_to_fit()
        key = options.get("idempotency_key")
        if key is not None and self.config["idempotency_window_ms"]:
            self.keys.pop(key, None)
            self.keys[key] = (next_seq, self.head_seq, now_ms)
        self.forget_keys(now_ms)
        return next_seq, self.head_seq

    def forget_keys(self, now_ms: int) -> None:
        """That a key lasts as long as its window is promised; that it is gone afterwards is not."""
        for key, (_, _, at_ms) in list(self.keys.items()):
            if at_ms >= now_ms - self.config["idempotency_window_ms"]:
                return
            del self.keys[key]

    # -- deleting

    def delete(self, before_seq: int | None, match: tuple[str, bool] | None) -> int:
        gone = 0
        for record in self.live():
            if (before_seq is None or record["seq"] < before_seq) and matches(record["tag"], match):
                record["gone"] = "deleted"
                gone += 1
        return gone

    # -- reading

    def diff(
        self,
        *,
        from_seq: int = 0,
        from_ts: int | None = None,
        generation: int | None = None,
        nodes: frozenset[str] = frozenset(),
        match: tuple[str, bool] | None = None,
        told_from: int | None = None,
    ) -> tuple[dict[str, Any] | None, list[dict[str, Any]], int]:
        """The tombstone, every record that could be delivered, and the cursor that the read starts from.

        `told_from` is where the answer to a read by time says that the gap begins.
        """
        head_seq, earliest_seq, floor = self.visible_seq, self.earliest_seq(), self.floor()
        if from_ts is not None:
            visible = self.records[: self.visible_seq]
            from_seq = next((r["seq"] - 1 for r in visible if r["ts"] >= from_ts), head_seq)
            if any(record["ts"] >= from_ts for record in self.evicted()):
                from_seq = max(0, min(from_seq, floor - 2))
                if told_from is not None:
                    # Where the gap begins may have been forgotten with the records; that there is one, never.
                    assert from_seq + 1 <= told_from < floor
                    from_seq = told_from - 1
            elif from_seq + 1 < earliest_seq:
                from_seq = earliest_seq - 1  # only deleted records lie between: nothing to tell
        tombstone = None
        if from_seq > head_seq or (generation is not None and generation != self.generation):
            tombstone = self._gap(1, head_seq, "recreated", head_seq)
            from_seq = earliest_seq - 1
        elif from_seq + 1 < floor:
            reason = self.reason(from_seq + 1)
            tombstone = self._gap(from_seq + 1, earliest_seq - 1, reason, floor - 1 - from_seq)
            from_seq = earliest_seq - 1
        own = nodes if self.config["dedupe_node"] else frozenset()
        deliverable = [
            record
            for record in self.shown()
            if record["seq"] > from_seq and record["node"] not in own and matches(record["tag"], match)
        ]
        return tombstone, deliverable, from_seq

    def _gap(self, gap_from: int, gap_to: int, reason: str, missed: int) -> dict[str, Any]:
        return {
            "gap_from": gap_from,
            "gap_to": gap_to,
            "reason": reason,
            "missed_estimate": missed,
            "earliest_seq": self.earliest_seq(),
            "head_seq": self.visible_seq,
        }


class Model:
    """All boxes of a shard, and the names that must not come back by themselves."""

    def __init__(self) -> None:
        self.boxes: dict[str, ModelBox] = {}
        self.barred: set[str] = set()
        self.last_generation = 0

    def find(self, name: str) -> ModelBox:
        if name not in self.boxes:
            raise Refusal("box_not_found")
        return self.boxes[name]

    def plan(self, name: str, config: dict[str, Any], now_ms: int) -> ModelBox:
        """A box that is not there yet; `keep` makes it so."""
        return ModelBox(name, max(now_ms * 1024, self.last_generation + 1024), {**DEFAULTS, **config})

    def keep(self, box: ModelBox) -> ModelBox:
        self.last_generation = box.generation
        self.barred.discard(box.name)
        self.boxes[box.name] = box
        return box

    def put(self, name: str, config: dict[str, Any], now_ms: int) -> bool:
        """Whether it was created."""
        box = self.boxes.get(name)
        if box is None:
            self.keep(self.plan(name, config, now_ms))
            return True
        box.expire(now_ms)
        box.config = {**box.config, **config}
        if box.config["durability"] == "memory":
            box.visible_seq, box.visible_ts = box.head_seq, box.last_ts
        box.evict_to_fit()
        box.expire(now_ms)
        return False

    def delete_box(self, name: str, *, if_empty: bool, now_ms: int) -> bool:
        box = self.boxes.get(name)
        if box is None:
            return False
        box.expire(now_ms)
        if if_empty and box.live():
            raise Refusal("box_not_empty")
        del self.boxes[name]
        if not box.config["auto_create"]:
            self.barred.add(name)
        return True

    def box_for_append(
        self, name: str, *, create: bool | None, config: dict[str, Any], now_ms: int
    ) -> tuple[ModelBox, bool]:
        """The box, and whether this write would make it (then it is not kept yet)."""
        if name in self.boxes:
            return self.boxes[name], False
        if not (name not in self.barred if create is None else create):
            raise Refusal("box_not_found")
        return self.plan(name, config, now_ms), True
