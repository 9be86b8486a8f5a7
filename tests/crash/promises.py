"""The replies that clients of one shard got, and what a later run must therefore show them.

A naive second bookkeeping, kept from commands and replies. From the machine it takes two things only: the lsn
of each change, which tells which commands a crash left in the log, and the generation of a box. It never asks
the machine what is true.

    issued   the machine has handled it; its changes have lsns and may be lost
    told     its reply has left the shard; from here on it is a promise, as strong as the box's class makes it

What happens to a box in memory has no lsn and is gone with the life (`IN_MEMORY`), unless the box becomes a
stored one: then all of it stands or falls with the frame that says so.

After a life ended and the log was found to end at lsn L, `survived(L)` holds every promise against L, forgets
what was lost in good order, and `compare` holds the rest against what readers get.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from shard.core import changes
from shard.core.machine import Outcome
from streams.protocol.errors import BoxNotFound, StreamsError
from streams.protocol.messages import commands
from streams.protocol.model.boxes import BoxConfig


class Level(IntEnum):
    """What a promise outlives."""

    NOTHING = 0
    KILL = 1
    POWER_CUT = 2


#: Behind every lsn.
IN_MEMORY = 1 << 62

LEVEL_OF = {"memory": Level.NOTHING, "disk": Level.KILL, "fsync": Level.POWER_CUT}


@dataclass
class Record:
    seq: int
    ts: int
    data: object
    tag: str | None
    node: str | None
    lsn: int

    def shown(self) -> dict[str, object]:
        found: dict[str, object] = {"$seq": self.seq, "$ts": self.ts}
        if self.node is not None:
            found["$node"] = self.node
        if self.tag is not None:
            found["$tag"] = self.tag
        return {**found, "data": self.data}


@dataclass
class Told:
    """Positions that a reader was shown when the machine stood at `lsn`."""

    lsn: int
    level: Level
    earliest_seq: int
    head_seq: int
    #: Seqs that were read across and not shown: those records are gone, and stay it.
    gone: frozenset[int] = frozenset()


@dataclass
class BoxBook:
    """One generation of a box."""

    name: str
    generation: int
    created_lsn: int
    configs: list[tuple[int, BoxConfig]]
    deleted_lsn: int = 0
    records: dict[int, Record] = field(default_factory=dict)
    deletes: list[tuple[int, set[int]]] = field(default_factory=list)
    fences: list[tuple[int, str]] = field(default_factory=list)
    memory_token: str = ""
    keys: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    holes: list[tuple[int, int]] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    #: What anyone was ever shown or acked under a seq. Never forgotten: a seq is not given twice.
    known: dict[int, object] = field(default_factory=dict)

    @property
    def config(self) -> BoxConfig:
        return self.configs[-1][1]

    @property
    def is_memory(self) -> bool:
        return self.config.durability == "memory"

    @property
    def deleted(self) -> set[int]:
        return set().union(*(seqs for _, seqs in self.deletes))

    @property
    def token(self) -> str:
        if self.is_memory:
            return self.memory_token
        return self.fences[-1][1] if self.fences else ""

    @property
    def last_ts(self) -> int:
        return max((record.ts for record in self.records.values()), default=0)

    @property
    def head_seq(self) -> int:
        return max([0, *self.records, *(last for _, last in self.holes)])

    def remembers(self, key: str, now_ms: int) -> bool:
        """Whether the key is surely in its window. A window that was shorter once may have ended it."""
        *_, at_ms, lsn = self.keys[key]
        later = [config for at, config in self.configs if at > lsn]
        before = [config for at, config in self.configs if at <= lsn][-1:]
        return at_ms + min(config.idempotency_window_ms for config in before + later) >= now_ms

    def configured(self, lsn: int, config: BoxConfig) -> None:
        token, was_memory = self.token, self.is_memory
        self.configs.append((lsn, config))
        if self.is_memory:
            self.memory_token = token
        elif was_memory:
            self._stored_by(lsn)
            self.fences.append((lsn, token))

    def _stored_by(self, lsn: int) -> None:
        """What was in memory is in the log now, and this is the frame that makes it count."""
        for record in self.records.values():
            record.lsn = min(record.lsn, lsn)
        self.deletes = [(min(at, lsn), seqs) for at, seqs in self.deletes]
        self.keys = {
            key: (first, last, at_ms, min(at, lsn)) for key, (first, last, at_ms, at) in self.keys.items()
        }

    def began_anew(self, generation: int) -> None:
        """A memory box after a restart: the name and the config of the old one, and nothing else."""
        self.generation = generation
        for kept in (self.records, self.deletes, self.fences, self.keys, self.holes, self.told, self.known):
            kept.clear()

    def compacted(self, seq: int) -> bool:
        """Whether a newer record with the same tag may have superseded this one."""
        tag = self.records[seq].tag
        newer = (record for record in self.records.values() if record.seq > seq)
        return self.config.compact == "tag" and tag is not None and any(record.tag == tag for record in newer)

    def forget_after(self, lsn: int) -> None:
        self.memory_token = ""
        self.configs = [entry for entry in self.configs if entry[0] <= lsn]
        self.deletes = [entry for entry in self.deletes if entry[0] <= lsn]
        self.fences = [entry for entry in self.fences if entry[0] <= lsn]
        self.records = {seq: record for seq, record in self.records.items() if record.lsn <= lsn}
        self.keys = {key: entry for key, entry in self.keys.items() if entry[3] <= lsn}
        self.told = [told for told in self.told if told.level is Level.POWER_CUT or told.lsn <= lsn]
        if self.deleted_lsn > lsn:
            self.deleted_lsn = 0


class Promises:
    def __init__(self) -> None:
        self.books: dict[int, BoxBook] = {}
        #: Whatever has this lsn must still be in the log after an end that the level outlives -> what it is.
        self.kept: dict[tuple[int, Level], str] = {}
        #: Where the log ended when the last life began: recovery has made all of it durable.
        self.settled_lsn = 0
        #: name -> (lsn, what): somebody was told that the box is not there, on the strength of this deletion.
        self.deletions: dict[str, int] = {}

    def current(self, name: str) -> BoxBook | None:
        for book in self.books.values():
            if book.name == name and not book.deleted_lsn:
                return book
        return None

    # -- noting

    def issued(self, command: commands.Command, outcome: Outcome, now_ms: int) -> BoxBook | None:
        """Notes what the command did. Returns the box it was about, for `told`."""
        name = getattr(command, "box", "")
        before = self.current(name)
        for lsn, change in outcome.changes:
            if isinstance(change, changes.BoxCreated):
                assert change.generation not in self.books, "a generation was given twice"
                self.books[change.generation] = BoxBook(
                    change.name, change.generation, lsn, [(lsn, change.config)]
                )
            elif isinstance(change, changes.BoxConfigured):
                self.books[change.generation].configured(lsn, change.config)
            elif isinstance(change, changes.BoxDeleted):
                self.books[change.generation].deleted_lsn = lsn
                self.deletions[name] = lsn
            elif isinstance(change, changes.TokenFenced):
                assert isinstance(command, commands.SetFence)
                self.books[change.generation].fences.append((lsn, command.token))
            elif isinstance(change, changes.RecordsDeleted):
                assert isinstance(command, commands.DeleteRecords) and before is not None
                before.deletes.append((lsn, _asked_for(before, command)))
        book = self.current(name) or before
        if isinstance(outcome.reply, commands.SetFenceReply):
            assert book is not None
            book.memory_token = outcome.reply.token if book.is_memory else ""
        if isinstance(command, commands.Append) and isinstance(outcome.reply, commands.AppendResult):
            assert book is not None
            if not outcome.reply.deduped:
                lsn = IN_MEMORY if book.is_memory else outcome.changes[-1][0]
                self._appended(book, command, outcome.reply, lsn, now_ms)
        if isinstance(outcome.reply, commands.DeleteRecordsReply) and book is not None and book.is_memory:
            assert isinstance(command, commands.DeleteRecords)
            book.deletes.append((IN_MEMORY, _asked_for(book, command)))
        return book

    def _appended(
        self, book: BoxBook, command: commands.Append, reply: commands.AppendResult, lsn: int, now_ms: int
    ) -> None:
        columns = command.columns
        ts = max(now_ms, book.last_ts)
        assert reply.last_seq - reply.first_seq + 1 == columns.count
        assert reply.first_seq > book.head_seq, "a seq was given again"
        for seq, raw in enumerate(columns.datas, reply.first_seq):
            data = json.loads(bytes(raw))
            book.records[seq] = Record(seq, ts, data, data["tag"], data["node"], lsn)
        if command.trim_before_seq:
            gone = {seq for seq in book.records if seq < command.trim_before_seq}
            book.deletes.append((lsn, gone))
        if command.idempotency_key is not None:
            book.keys[command.idempotency_key] = (reply.first_seq, reply.last_seq, now_ms, lsn)

    def told(
        self,
        command: commands.Command,
        reply: commands.Reply | StreamsError,
        book: BoxBook | None,
        level: Level,
        lsns: Iterable[int],
        lsn: int,
        config_lsn: int = 0,
    ) -> None:
        """The reply has left. `level` is the class of the box when the command was handled, `lsns` are those
        of its own changes, `lsn` is where the machine stood, `config_lsn` what gave the box its class."""
        what = f"{type(command).__name__} of {getattr(command, 'box', '')}"
        if isinstance(reply, BoxNotFound) or (
            isinstance(reply, commands.DeleteBoxReply) and not reply.deleted
        ):
            name = getattr(command, "box", "")
            # What was lost with a crash since is nobody's promise any more: `survived` takes it out.
            if name in self.deletions and self.deletions[name] <= lsn and self.current(name) is None:
                self._promise(self.deletions[name], Level.POWER_CUT, f"{what} that found it gone")
            return
        if book is None:
            return
        if isinstance(reply, commands.PutBoxReply | commands.DeleteBoxReply):
            level = Level.POWER_CUT
        self._promise(book.created_lsn, level, f"the existence of {book.name}, by {what}")
        if isinstance(reply, commands.AppendResult) and reply.created:
            self._promise(book.created_lsn, Level.POWER_CUT, f"the creation of {book.name}")
        for own in lsns:
            self._promise(own, level, what)
        if level is Level.NOTHING:
            # Nothing is promised of its records, but that they are no more than that: a power cut must not
            # bring back a box that is stored, and of which somebody saw what it was in memory.
            self._promise(config_lsn, Level.POWER_CUT, f"the class of {book.name}, by {what}")
        if isinstance(reply, commands.AppendResult):
            for seq in range(reply.first_seq, reply.last_seq + 1):
                self._shown(book, seq, book.records[seq].data, level, what)
        elif isinstance(reply, commands.DiffResult):
            assert isinstance(command, commands.ReadBox)
            shown = set()
            for record in json.loads(b"[" + reply.records + b"]"):
                shown.add(record["$seq"])
                self._shown(book, record["$seq"], record["data"], level, what)
            crossed = {seq for seq in book.records if command.from_seq < seq <= reply.next_from_seq}
            gone = frozenset(crossed - shown)
            book.told.append(Told(lsn, level, reply.earliest_seq, reply.head_seq, gone))
        elif isinstance(reply, commands.BoxState | commands.DeleteRecordsReply):
            book.told.append(Told(lsn, level, reply.earliest_seq, reply.head_seq))

    def _shown(self, book: BoxBook, seq: int, data: object, level: Level, what: str) -> None:
        assert book.known.setdefault(seq, data) == data, f"{book.name}: seq {seq} was given to two records"
        if seq in book.records:
            self._promise(book.records[seq].lsn, level, f"seq {seq} of {book.name}, by {what}")

    def _promise(self, lsn: int, level: Level, what: str) -> None:
        if level is not Level.NOTHING:
            self.kept.setdefault((lsn, level), what)

    # -- after the end of a life

    def survived(self, lsn: int, end: Level) -> None:
        """The log was found to end at `lsn` after an end of this kind."""
        for (kept_lsn, level), what in self.kept.items():
            assert level < end or kept_lsn <= lsn, f"lost: {what} (lsn {kept_lsn}, the log ends at {lsn})"
        assert lsn >= self.settled_lsn, f"the log was settled at {self.settled_lsn} and ends at {lsn} now"
        self.settled_lsn = lsn
        self.kept = {}
        self.deletions = {name: at for name, at in self.deletions.items() if at <= lsn}
        self.books = {generation: book for generation, book in self.books.items() if book.created_lsn <= lsn}
        for book in self.books.values():
            book.forget_after(lsn)

    def alive(self) -> dict[str, BoxBook]:
        return {book.name: book for book in self.books.values() if not book.deleted_lsn}

    def renewed(self, name: str, generation: int) -> None:
        """A memory box has begun anew."""
        book = self.alive()[name]
        assert generation > book.generation, f"{name} came back as the same box"
        del self.books[book.generation]
        book.began_anew(generation)
        self.books[generation] = book


def _asked_for(book: BoxBook, command: commands.DeleteRecords) -> set[int]:
    match, before = command.match, command.before_seq
    found = set()
    for record in book.records.values():
        tag = record.tag or ""
        wanted = match is None or (
            bool(tag) and (tag.startswith(match.text) if match.is_prefix else tag == match.text)
        )
        if wanted and (before is None or record.seq < before):
            found.add(record.seq)
    return found
