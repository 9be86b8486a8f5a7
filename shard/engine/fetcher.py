"""Brings in what the machine needs and does not have in memory: payloads and tags of segments.

    engine --fetch(missing)--> backlog --> [segment-read threads] SegmentStore.read / find_tags
    engine <--done(error?)---- post        loaded into the segment, counted by the cache

Whoever needs a payload that somebody else is fetching waits for that one. Neighbours are read together, as
many as the reader is likely to want next.

What was brought in for a command may have been forgotten again when it needs one thing more: a cache can be
smaller than what one command looks at. So a waiting command is handed the payloads, and keeps them until it
is answered (`PayloadCache.add_all` puts them back).

Bounds: requests that wait are at most as many as are in flight, which the links bound; one read brings in at
most `bytes_max` (or one batch), and a command holds on to no more than it looks at: a reader to about twice
what it asked for (8 MiB at most), a writer to three reads. Reads from the cold store have threads of their
own, so that a slow store does not hold up reads from this disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue

import structlog

from shard.core.boxes.sealed import NotLoaded, Segment, Unfinished
from shard.core.changes import TxnHeld
from shard.core.machine import Machine, Missing
from shard.core.transactions.chunks import Chunk, ChunksNotLoaded
from shard.core.transactions.unrendered import NotRendered
from shard.engine.cache import PayloadCache
from shard.engine.committer import Post
from shard.storage.faults import Faults
from shard.storage.files import Corrupt
from shard.storage.segments.store import Name, SegmentStore, Unreachable
from streams.protocol.errors import ColdStoreUnavailable, DataDamaged, StreamsError
from streams.protocol.messages.commands import Match
from streams.protocol.model.records import Batch

log = structlog.get_logger()

#: One waits for the disk while the other decodes; more would only share the interpreter.
_HOT_THREADS = 2
#: They mostly wait for the network.
_COLD_THREADS = 4

#: What is fetched for a command that needs one batch and says no more.
READ_BYTES = 256 * 1024

#: Payloads and their places.
FetchedPayloads = list[tuple[Segment, int, Batch]]

OnFetched = Callable[[StreamsError | None, FetchedPayloads], None]


def is_in_cold_store(missing: Missing) -> bool:
    """True if the cold store has to be asked for it."""
    if isinstance(missing, Unfinished):
        return False
    if isinstance(missing, ChunksNotLoaded | NotRendered):
        return False
    segments = (missing.segment,) if isinstance(missing, NotLoaded) else missing.segments
    return any(segment.is_cold for segment in segments)


class Fetcher:
    def __init__(
        self,
        machine: Machine,
        store: SegmentStore,
        cache: PayloadCache,
        *,
        read_chunk: Callable[[int], TxnHeld],
        post: Post,
        on_failed: Callable[[BaseException], None],
        faults: Faults | None = None,
    ) -> None:
        """`on_failed` gets errors that can only be bugs: commands would wait for that thread for ever."""
        self._machine = machine
        self._store = store
        self._cache = cache
        self._read_chunk = read_chunk
        self._post = post
        self._on_failed = on_failed
        self._faults = faults or Faults()
        self._waiting: dict[tuple[Name, int], list[OnFetched]] = {}
        #: By generation: those that wait for rows of a commit to be rendered.
        self._waiting_for_rows: dict[int, list[OnFetched]] = {}
        self._hot: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._cold: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.reads = 0

    def __repr__(self) -> str:
        return f"<Fetcher {len(self._waiting)} under way, {self.reads} done>"

    def start(self) -> None:
        for number in range(_HOT_THREADS + _COLD_THREADS):
            backlog = self._hot if number < _HOT_THREADS else self._cold
            thread = threading.Thread(
                target=self._run, args=(backlog,), name=f"segment-read-{number}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Ends the threads when they have done what they are at."""
        for number in range(len(self._threads)):
            (self._hot if number < _HOT_THREADS else self._cold).put(None)

    def fetch(self, missing: Missing, bytes_max: int, on_fetched: OnFetched) -> None:
        """Calls `done` in this thread when it is there, or with the error that says why it is not. For what
        is only unfinished that is when others have had their turn."""
        if isinstance(missing, Unfinished):
            self._post(on_fetched, None, [])
            return
        if isinstance(missing, NotRendered):
            self._waiting_for_rows.setdefault(missing.generation, []).append(on_fetched)
            return
        if isinstance(missing, ChunksNotLoaded):
            self._submit(False, lambda: self._read_chunks(missing.chunks, on_fetched))
            return
        if isinstance(missing, NotLoaded):
            key = (Name.of(missing.segment), missing.at)
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.append(on_fetched)
                return
            self._waiting[key] = [on_fetched]
            self._submit(
                is_in_cold_store(missing), lambda: self._read(missing.segment, missing.at, bytes_max)
            )
        else:
            self._submit(
                is_in_cold_store(missing),
                lambda: self._find_tags(missing.segments, missing.match, on_fetched),
            )

    def _submit(self, is_cold: bool, work: Callable[[], None]) -> None:
        (self._cold if is_cold else self._hot).put(work)

    def on_rendered(self, generations: Iterable[int], error: StreamsError | None = None) -> None:
        """More rows of commits are rendered in these boxes, or will not be soon: `error` says why."""
        if self._waiting_for_rows:
            for generation in generations:
                for on_fetched in self._waiting_for_rows.pop(generation, ()):
                    on_fetched(error, [])

    def generations_waiting(self) -> list[int]:
        """Boxes with rows that somebody waits for."""
        return list(self._waiting_for_rows)

    # -- in a thread

    def _read_chunks(self, chunks: Sequence[Chunk], on_fetched: OnFetched) -> None:
        try:
            changes = [self._read_chunk(chunk.lsn) for chunk in chunks]
        except Corrupt as damage:
            self._post(on_fetched, DataDamaged(str(damage)), [])
            return
        self._post(self._on_chunks_read, chunks, changes, on_fetched)

    def _run(self, backlog: SimpleQueue[Callable[[], None] | None]) -> None:
        while (work := backlog.get()) is not None:
            try:
                work()
            except BaseException as error:
                log.error("a thread that reads segments failed", exc_info=error)
                self._post(self._on_failed, error)
                return

    def _read(self, segment: Segment, at: int, bytes_max: int) -> None:
        try:
            batches = self._store.read(Name.of(segment), at, bytes_max=bytes_max)
        except (Corrupt, Unreachable) as error:
            self._post(self._on_read_error, segment, at, error)
            return
        self._post(self._on_read, segment, at, batches)

    def _find_tags(self, segments: Sequence[Segment], match: Match, on_fetched: OnFetched) -> None:
        matches: list[tuple[Segment, tuple[Sequence[int], Sequence[int]]]] = []
        try:
            for segment in segments:
                matches.append((segment, self._store.find_tags(Name.of(segment), match)))
        except (Corrupt, Unreachable) as error:
            self._post(self._on_tags_error, segments, error, on_fetched)
            return
        self._post(self._on_tags_found, matches, match, on_fetched)

    # -- in the engine's thread again

    def _on_chunks_read(
        self, chunks: Sequence[Chunk], changes: Sequence[TxnHeld], on_fetched: OnFetched
    ) -> None:
        for chunk, change in zip(chunks, changes, strict=True):
            chunk.load(change.packed, change.body)
        on_fetched(None, [])

    def _on_read(self, segment: Segment, at: int, batches: Sequence[Batch]) -> None:
        self.reads += 1
        payloads = [(segment, at + offset, batch) for offset, batch in enumerate(batches)]
        self._cache.add_all(payloads)
        self._notify(Name.of(segment), at, None, payloads)
        self._cache.shrink()  # after those who wait have had what they wanted

    def _on_read_error(self, segment: Segment, at: int, error: Exception) -> None:
        self._notify(Name.of(segment), at, self._to_client_error([segment], error), [])

    def _notify(self, name: Name, at: int, error: StreamsError | None, payloads: FetchedPayloads) -> None:
        for on_fetched in self._waiting.pop((name, at)):
            on_fetched(error, payloads)

    def _on_tags_found(
        self,
        matches: list[tuple[Segment, tuple[Sequence[int], Sequence[int]]]],
        match: Match,
        on_fetched: OnFetched,
    ) -> None:
        self.reads += 1
        for segment, seqs in matches:
            box = self._machine.generations.get(segment.generation)
            if box is not None:
                box.found_tags[segment.serial, match] = seqs
        on_fetched(None, [])
        self._cache.shrink()

    def _on_tags_error(self, segments: Sequence[Segment], error: Exception, on_fetched: OnFetched) -> None:
        on_fetched(self._to_client_error(segments, error), [])

    def _to_client_error(self, segments: Sequence[Segment], error: Exception) -> StreamsError | None:
        """None when there is no trouble after all: a segment has made place for another one meanwhile, or is
        gone with its box, and the command sees that when it is handled again."""
        for segment in segments:
            box = self._machine.generations.get(segment.generation)
            if box is None or segment not in box.log.segments:
                return None
        box = self._machine.generations[segments[0].generation]
        if isinstance(error, Unreachable):
            log.warning("the cold store could not be read", reason=str(error))
            return ColdStoreUnavailable(
                f"records of box {box.name!r} are in the cold store, which does not answer; nothing is lost, "
                "try again later. Operator: `streams doctor` shows the error"
            )
        assert isinstance(error, Corrupt)
        log.error("a segment could not be read", box=box.name, path=error.path, reason=str(error))
        self._faults.note_damage("segment", error.path, error.reason, box.name)
        return DataDamaged(
            f"a file that holds records of box {box.name!r} is damaged. Operator: `streams doctor` and the "
            "server's log name the file; stop the server, run `streams verify`, then `streams repair`",
            box=box.name,
        )
