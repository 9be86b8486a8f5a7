"""Repairs the segments of a damaged shard: verifies every byte, and rewrites segments with damage.

Rules of the file
- The damaged folder is only read. A rewritten segment goes into the new folder, under a new serial.
- If the cold store does not answer, its segments may still be intact: the repair is refused.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

import msgspec

from shard.core.boxes import offline_edits
from shard.core.boxes.box import Box
from shard.core.boxes.sealed import Segment
from shard.core.machine import Machine
from shard.core.snapshot_facts import BoxFacts, SegmentFacts
from shard.offline.repair_findings import CannotRepair, Findings, Loss
from shard.offline.verify import name_of
from shard.storage import segments
from shard.storage.files import Corrupt, DiskLike
from shard.storage.segments.index import SegmentIndex
from shard.storage.segments.store import ColdStoreUnreachable, Name, SegmentStore, segment_of
from shard.storage.sources import FileSource, Source
from streams.protocol.model.records import Batch


class SegmentRepair:
    """The segments of the damaged folder and of its cold store."""

    def __init__(
        self, disk: DiskLike, source: str, store: SegmentStore, findings: Findings, *, verifies_cold: bool
    ) -> None:
        self._disk = disk
        self._segments = f"{source}/segments"
        self._store = store
        self._findings = findings
        self._verifies_cold = verifies_cold
        #: Unreadable batches (positions) by generation and serial of their segment.
        self._damaged_batches: dict[int, dict[int, set[int]]] = {}
        self._indexes: dict[Name, SegmentIndex | None] = {}
        #: Segments that were rewritten into the new folder.
        self._rewritten_segments: set[Name] = set()
        #: Indexes of segments in the cold store whose stub must be rewritten.
        self.stubs_to_write: dict[Name, SegmentIndex] = {}
        #: Stubs of segments that no box has any more. The server deletes them with their copies in the cold
        #: store.
        self.stubs_to_drop: list[str] = []

    def __repr__(self) -> str:
        return f"<SegmentRepair {self._segments}: {len(self._damaged_batches)} boxes with damage>"

    # -- indexes and stubs

    def index(self, name: Name) -> SegmentIndex | None:
        """Return the index of a segment; None if no intact copy of it exists."""
        if name not in self._indexes:
            self._indexes[name] = self._read_index(name)
        return self._indexes[name]

    def _read_index(self, name: Name) -> SegmentIndex | None:
        """Read the index from the file, or else from the stub or the cold store.

        A file with a damaged index must be rewritten.
        """
        path = f"{self._segments}/{name.file}"
        try:
            return segments.open_segment(FileSource(self._disk, path))
        except FileNotFoundError:
            reason = "the segment is missing"
        except Corrupt as damage:
            reason = damage.reason
        index_origin = "the index of its stub was used"
        try:
            index = segments.open_stub(FileSource(self._disk, f"{self._segments}/{name.stub}"))
        except FileNotFoundError:
            self._findings.notes.append(f"{path}: {reason}")
            return None
        except Corrupt as damage:
            reason = f"{reason}; its stub: {damage.reason}"
            cold_index = self._index_in_cold(name, reason)
            if cold_index is None:
                return None
            index, index_origin = cold_index, "the index of its copy in the cold store was used"
            if not self._disk.exists(path):
                self.stubs_to_write[name] = index
                self._findings.notes.append(f"{damage.path}: {damage.reason}; rewritten from the cold store")
        if self._disk.exists(path):
            self._damaged_batches.setdefault(name.generation, {}).setdefault(name.serial, set())
            self._findings.notes.append(f"{path}: {reason}; {index_origin}")
        return index

    def _index_in_cold(self, name: Name, reason: str) -> SegmentIndex | None:
        """Return the index of the copy in the cold store; None if the store has no intact one."""
        try:
            return segments.open_segment(self._store.source_in_cold(name))
        except ColdStoreUnreachable as trouble:
            raise CannotRepair(
                f"{self._segments}/{name.file}: {reason}. Its copy in the cold store may be intact, "
                f"but cannot be read ({trouble}). Repeat the repair when the store answers, and name it with "
                "--cold-dir. If the store is lost, name an empty folder instead"
            ) from trouble
        except Corrupt as damage:
            self._findings.notes.append(
                f"{self._segments}/{name.file}: {reason}; in the cold store: {damage.reason}"
            )
            return None

    def attach(self, segment_facts: list[tuple[Box, SegmentFacts]]) -> Iterator[tuple[int, int]]:
        """Attach the segments that can be opened. Yields (generation, serial) of the others."""
        for box, facts in segment_facts:
            name = Name(box.generation, facts.first_seq, facts.serial)
            index = self.index(name)
            if index is None:
                self._give_up(name)
                yield box.generation, facts.serial
                continue
            segment = segment_of(index)
            segment.is_cold = not self._disk.exists(f"{self._segments}/{name.file}")
            box.log.attach(segment, facts.dead)

    def newest_segment_with(
        self, generation: int, sealed_seq: int, seq: int, before_seq: int
    ) -> Segment | None:
        """Return the newest segment file of a box that holds `seq`, and nothing up to `sealed_seq` or from
        `before_seq` on."""
        newest: Segment | None = None
        for file in segments.list_segments(self._disk, self._segments):
            name = name_of(file)
            if name.generation == generation and sealed_seq < name.first_seq <= seq:
                index = self.index(name)
                if index is not None and seq <= index.last_seq < before_seq:
                    candidate = segment_of(index)
                    newest = candidate if newest is None or candidate.serial > newest.serial else newest
        return newest

    def collect_unnamed_stubs(self, machine: Machine, missing_segments: set[tuple[int, int]]) -> None:
        """Collect the stubs of copies that were waiting to be dropped.

        Their serials are not assigned again: a rewritten segment must not get the name of such a stub.
        """
        segment_names = {Name.of(segment) for segment in machine.segments()}
        for stub in segments.list_stubs(self._disk, self._segments):
            name = name_of(stub)
            if (
                name in segment_names
                or name in self.stubs_to_write
                or (name.generation, name.serial) in missing_segments
            ):
                continue
            self.stubs_to_drop.append(stub)
            box = machine.generations.get(name.generation)
            if box is not None:
                box.last_serial = max(box.last_serial, name.serial)

    # -- damage

    def rewrite_damaged(
        self, boxes: Iterable[Box], suspect_boxes: Container[int], target: SegmentStore
    ) -> None:
        """Verify every byte of every segment, and rewrite the damaged ones."""
        for box in boxes:
            for segment in list(box.log.segments):
                self._examine(box, segment)
            damaged_batches = self._damaged_batches.get(box.generation, {})
            if damaged_batches or box.generation in suspect_boxes:
                why = "a batch of a segment is damaged"
                before = {segment.serial: Name.of(segment) for segment in box.log.segments}
                holes = offline_edits.remeasure(box.log, self._read, damaged_batches)
                self._findings.losses += [
                    Loss(box.name, box.generation, first, last, why) for first, last in holes
                ]
                for serial in before.keys() - {segment.serial for segment in box.log.segments}:
                    self._give_up(before[serial])  # it has no intact live record
                for segment in [each for each in box.log.segments if each.serial in damaged_batches]:
                    self._rewrite(box, segment, target)
                box.log.show(box.log.head_seq, box.log.last_ts)
                if box.is_disk:  # CEILING: the frame that reserved the seqs may be damaged
                    box.reserved_seq = max(box.reserved_seq, box.log.head_seq)

    def _examine(self, box: Box, segment: Segment) -> None:
        name = Name.of(segment)
        path = f"{self._segments}/{name.file}"
        if not self._disk.exists(path):
            if not self._disk.exists(f"{self._segments}/{name.stub}"):
                self._findings.notes.append(f"{path}: the segment is missing")
                self._note_damage(segment, set(range(len(segment))))
                return
            if not self._verifies_cold:
                return
        index = self.index(name)
        if index is None:
            self._note_damage(segment, set(range(len(segment))))
            return
        try:
            source = self._source_of(name, index)
            if next(segments.verify_segment(source), None) is None:
                return
            bad = set(self._bad_batches(source, index))
        except ColdStoreUnreachable as trouble:
            raise CannotRepair(f"{trouble}; repeat the repair when the cold store answers") from trouble
        if not bad:
            self._findings.notes.append(f"{path}: only index or tags were damaged; the segment was rewritten")
        self._note_damage(segment, bad)

    def _bad_batches(self, source: Source, index: SegmentIndex) -> Iterator[int]:
        """Yield the positions of unreadable batches. Consecutive ones with the same reason get one note."""
        last_reason = ""
        for at in range(len(index)):
            try:
                segments.read_batches(source, index, at, at)
            except Corrupt as damage:
                if damage.reason != last_reason:
                    self._findings.notes.append(f"{source.name} at byte {damage.offset}: {damage.reason}")
                last_reason = damage.reason
                yield at

    def _source_of(self, name: Name, index: SegmentIndex) -> Source:
        """Return a source for the file, or for the copy in the cold store."""
        path = f"{self._segments}/{name.file}"
        if self._disk.exists(path):
            return FileSource(self._disk, path)
        return self._store.source_in_cold(name, index.file_bytes)

    def _note_damage(self, segment: Segment, positions: set[int]) -> None:
        self._damaged_batches.setdefault(segment.generation, {})[segment.serial] = positions

    def _read(self, segment: Segment, at: int) -> Batch:
        name = Name.of(segment)
        index = self.index(name)
        assert index is not None, "a segment that cannot be opened is lost as a whole"
        try:
            return segments.read_batches(self._source_of(name, index), index, at, at)[0]
        except ColdStoreUnreachable as trouble:
            raise CannotRepair(f"{trouble}; it is needed to find the live records") from trouble

    def _give_up(self, name: Name) -> None:
        """Make the server drop the copy of a lost segment, if the cold store has one."""
        file, stub = f"{self._segments}/{name.file}", f"{self._segments}/{name.stub}"
        if name in self.stubs_to_write or self._disk.exists(file) or not self._disk.exists(stub):
            return  # the stub is rewritten, or the copy was not examined, or there is none
        try:
            self._store.source_in_cold(name)
        except (ColdStoreUnreachable, Corrupt):
            return
        self.stubs_to_drop.append(name.stub)

    def _rewrite(self, box: Box, segment: Segment, target: SegmentStore) -> None:
        def live() -> Iterator[Batch]:
            for at, runs in offline_edits.live_runs(box.log, segment).items():
                batch = self._read(segment, at)
                for first, last in runs:
                    yield batch.part(first, last)

        box.last_serial += 1
        replacement = target.write(box.generation, box.last_serial, live())
        self._rewritten_segments.add(Name.of(replacement))
        offline_edits.replace_segment(box.log, segment, replacement)
        name = Name.of(segment)
        if name not in self.stubs_to_write and self._disk.exists(f"{self._segments}/{name.stub}"):
            self.stubs_to_drop.append(name.stub)

    def keep_intact_segments(self, facts: BoxFacts) -> BoxFacts:
        """Return the facts with only the segments whose files, or stubs, are intact in the damaged folder."""
        old = [
            each
            for each in facts.segments
            if (name := Name(facts.generation, each.first_seq, each.serial)) not in self._rewritten_segments
            and name not in self.stubs_to_write
        ]
        return msgspec.structs.replace(facts, segments=old)
