"""Fetches data that a command needs and that is not in memory: payloads and tags of segments, held rows.

    engine --fetch(missing)-----> backlog --> [segment-read threads] SegmentStore.read / find_tags, Wal.read
    engine <--on_fetched(error?)-- post       loaded into the segment, counted by the cache

A command that needs rows of a commit waits here until they are rendered (`on_rendered`): nothing is fetched.

If two commands need the same payload, it is read once for both. Neighbouring batches are read together, as
many as the reader is likely to need next.

A cache can be smaller than the payloads that one command needs, so it may evict one payload before the
command has the next one. So a waiting command gets the payloads themselves, and keeps them until it is
answered (`PayloadCache.add_all` puts them back).

Bounds: waiting requests are requests in flight, which the links bound. One read loads at most `bytes_max` (or
one batch). A command keeps only the payloads that it needs: a reader about twice its page (8 MiB at most), a
writer those of three reads. The cold store has threads of its own, so that a slow store does not delay reads
from this disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue

import structlog

from shard.core.boxes.sealed import NeedsAnotherStep, NotLoaded, Segment
from shard.core.changes import TxnHeld
from shard.core.machine import Machine, Missing
from shard.core.transactions.chunks import Chunk, ChunksNotLoaded
from shard.core.transactions.unrendered import NotRendered
from shard.engine.cache import PayloadCache
from shard.engine.committer import Post
from shard.storage.faults import Faults
from shard.storage.files import Corrupt
from shard.storage.segments.store import ColdStoreUnreachable, Name, SegmentStore
from streams.protocol.errors import ColdStoreUnavailable, DataDamaged, StreamsError
from streams.protocol.messages.commands import Match
from streams.protocol.model.records import Batch

log = structlog.get_logger()

#: One thread waits for the disk while the other decodes; more would only compete for the interpreter.
_HOT_THREADS = 2
#: They mostly wait for the network.
_COLD_THREADS = 4

#: Bytes to read for a command that needs one batch and requests no page size.
READ_BYTES = 256 * 1024

#: Payloads, each with its segment and its index there.
FetchedPayloads = list[tuple[Segment, int, Batch]]

OnFetched = Callable[[StreamsError | None, FetchedPayloads], None]


def is_in_cold_store(missing: Missing) -> bool:
    """Return True if the data must be read from the cold store."""
    if isinstance(missing, NeedsAnotherStep):
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
        """`on_failed` gets errors that can only be bugs: commands would wait for that thread forever."""
        self._machine = machine
        self._store = store
        self._cache = cache
        self._read_chunk = read_chunk
        self._post = post
        self._on_failed = on_failed
        self._faults = faults or Faults()
        self._waiting: dict[tuple[Name, int], list[OnFetched]] = {}
        #: By generation: callbacks of commands that wait until rows of a commit are rendered.
        self._waiting_for_rows: dict[int, list[OnFetched]] = {}
        self._hot: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._cold: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.reads = 0

    def __repr__(self) -> str:
        return f"<Fetcher {len(self._waiting)} in flight, {self.reads} done>"

    def start(self) -> None:
        for number in range(_HOT_THREADS + _COLD_THREADS):
            backlog = self._hot if number < _HOT_THREADS else self._cold
            thread = threading.Thread(
                target=self._run, args=(backlog,), name=f"segment-read-{number}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """End the threads when they have finished their current reads."""
        for number in range(len(self._threads)):
            (self._hot if number < _HOT_THREADS else self._cold).put(None)

    def fetch(self, missing: Missing, bytes_max: int, on_fetched: OnFetched) -> None:
        """Fetch missing data, and call `on_fetched` in this thread with the payloads or the error. For work
        that is merely unfinished it is called after the other tasks of the event loop."""
        if isinstance(missing, NeedsAnotherStep):
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
        """Resume commands that wait for rows of these boxes: more are rendered. With `error` they fail."""
        if self._waiting_for_rows:
            for generation in generations:
                for on_fetched in self._waiting_for_rows.pop(generation, ()):
                    on_fetched(error, [])

    def generations_waiting(self) -> list[int]:
        """Return the generations of boxes for whose rows commands wait."""
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
                log.error("a segment-read thread failed because of a bug; the shard ends", exc_info=error)
                self._post(self._on_failed, error)
                return

    def _read(self, segment: Segment, at: int, bytes_max: int) -> None:
        try:
            batches = self._store.read(Name.of(segment), at, bytes_max=bytes_max)
        except (Corrupt, ColdStoreUnreachable) as error:
            self._post(self._on_read_error, segment, at, error)
            return
        self._post(self._on_read, segment, at, batches)

    def _find_tags(self, segments: Sequence[Segment], match: Match, on_fetched: OnFetched) -> None:
        matches: list[tuple[Segment, tuple[Sequence[int], Sequence[int]]]] = []
        try:
            for segment in segments:
                matches.append((segment, self._store.find_tags(Name.of(segment), match)))
        except (Corrupt, ColdStoreUnreachable) as error:
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
        self._cache.shrink()  # after the waiting commands have used the payloads

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
                box.volatile.tag_lookups[segment.serial, match] = seqs
        on_fetched(None, [])
        self._cache.shrink()

    def _on_tags_error(self, segments: Sequence[Segment], error: Exception, on_fetched: OnFetched) -> None:
        on_fetched(self._to_client_error(segments, error), [])

    def _to_client_error(self, segments: Sequence[Segment], error: Exception) -> StreamsError | None:
        """Return the error for the client. None if a segment was replaced or deleted meanwhile: then the
        command does not need it any more, and is handled again."""
        for segment in segments:
            box = self._machine.generations.get(segment.generation)
            if box is None or segment not in box.log.segments:
                return None
        box = self._machine.generations[segments[0].generation]
        if isinstance(error, ColdStoreUnreachable):
            log.warning(
                "cannot read from the cold store; check STREAMS_COLD_DIR and its network",
                box=box.name,
                reason=str(error),
            )
            return ColdStoreUnavailable(
                f"records of box {box.name!r} are in the cold store, which does not answer; nothing is lost, "
                "try again later. Operator: `streams doctor` shows the error"
            )
        assert isinstance(error, Corrupt)
        log.error(
            "a segment is damaged and cannot be read; run `streams doctor`",
            box=box.name,
            path=error.path,
            reason=str(error),
        )
        self._faults.note_damage("segment", error.path, error.reason, box.name)
        return DataDamaged(
            f"a file that holds records of box {box.name!r} is damaged. Operator: `streams doctor` and the "
            "server's log name the file; stop the server, run `streams verify`, then `streams repair`",
            box=box.name,
        )
