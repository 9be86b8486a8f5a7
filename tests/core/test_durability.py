"""Goal: a reply goes, and a record shows, at exactly the stage that the tables of `durability.py` name.

Method: one change at lsn 20 passes from applied to logged, durable and stored. Each cell is tried at each
moment. The tables are written down here again, and the head of the module must say the same.
"""

from __future__ import annotations

import re

import pytest

from shard.core import durability
from shard.core.boxes.box import Box
from shard.core.changes import BatchAppended
from shard.core.durability import NOTHING, Durability, ReplyKind, Stage, Wait
from streams.protocol.model.boxes import BoxConfig
from streams.protocol.model.records import Columns, render

CLASSES = ("memory", "disk", "fsync", "object")
#: A memory box has no change in the log but its own creation, which is what `box` means.
REPLIES = {
    ReplyKind.RECORDS: ("box", "logged", "durable", "stored"),
    ReplyKind.STRONG_READ: ("durable", "durable", "durable", "stored"),
    ReplyKind.COPY: ("box", "durable", "durable", "stored"),
    ReplyKind.MOVE: ("box", "durable", "durable", "stored"),
    ReplyKind.LIST: ("box", "logged", "durable", "durable"),
    ReplyKind.BOX: ("durable", "durable", "durable", "stored"),
}
SHOWN = {
    "appended": ("at once", "logged", "durable", "stored"),
    "committed": ("at once", "durable", "durable", "stored"),
}
BEFORE, LSN = 10, 20
MOMENTS = ("applied", "logged", "durable", "stored")
WAITS = {"logged": Wait(LSN), "durable": Wait(LSN, True), "stored": Wait(LSN, True, True)}


class Store:
    def __init__(self, durable: Durability, *, is_on: bool = True, registers: bool = False) -> None:
        self._durability = durable
        self.pending_lsn = LSN
        self.is_on, self.registers = is_on, registers
        self.deleted: dict[str, int] = {}

    @property
    def position(self) -> int:
        return min(self._durability.durable_lsn, self.pending_lsn - 1)

    def deletion_of(self, name: str) -> int:
        lsn = self.deleted.get(name, 0)
        return lsn if lsn > self.position else 0


class Stages:
    """The shard's log: everything up to `BEFORE` is durable, and one change at `LSN` was just applied."""

    def __init__(self, *, is_on: bool = True, registers: bool = False) -> None:
        self.durability = Durability(on_shown=lambda box: False)
        self.store = Store(self.durability, is_on=is_on, registers=registers)
        self.durability.use_store(self.store)
        self.durability.on_durable(BEFORE)

    def reach(self, moment: str) -> list[str]:
        """Brings the change to a stage, by way of those before it."""
        shown: list[str] = []
        for each in MOMENTS[1 : MOMENTS.index(moment) + 1]:
            if each == "logged":
                shown += self.durability.on_logged(LSN)
            elif each == "durable":
                shown += self.durability.on_durable(LSN)
            else:
                self.store.pending_lsn = 1 << 60
                shown += self.durability.on_stored(LSN)
        self.durability.check()
        return shown


def box_of(durability: str) -> Box:
    box = Box(
        name="b", generation=1, config=BoxConfig(durability=durability), created_ms=0, reserved_seq=1000
    )
    box.volatile.reserved_durable_seq = 1000
    box.config_lsn = box.last_lsn = box.floor_lsn = BEFORE
    return box


def append_to(box: Box) -> None:
    batch = render(Columns([b"1"], None, None, None), first_seq=1, times=1)
    box.apply_append(BatchAppended(1, batch, 1, None), 0 if box.is_memory else LSN)


CELLS = pytest.mark.parametrize(
    ("answer", "name", "cell"),
    [(row, name, cell) for row, cells in REPLIES.items() for name, cell in zip(CLASSES, cells, strict=True)],
    ids=lambda each: getattr(each, "name", each),
)


@pytest.mark.parametrize("moment", MOMENTS)
@CELLS
def test_a_reply_goes_at_its_stage(answer: ReplyKind, name: str, cell: str, moment: str) -> None:
    stages, box = Stages(), box_of(name)
    if cell == "box":
        box.config_lsn, cell = LSN, "durable"
    stages.reach(moment)
    is_due = MOMENTS.index(moment) >= MOMENTS.index(cell)
    assert stages.durability.wait_for(answer, box, LSN) == (NOTHING if is_due else WAITS[cell])
    if box.config_lsn == BEFORE:
        assert stages.durability.wait_for(answer, box, BEFORE) == NOTHING


@CELLS
def test_a_reply_waits_behind_a_write_that_waits_for_the_disk(
    answer: ReplyKind, name: str, cell: str
) -> None:
    stages, box = Stages(), box_of(name)
    box.volatile.staged_durable_lsn = LSN
    stages.reach("logged")
    wait = stages.durability.wait_for(answer, box, LSN)
    assert wait == (NOTHING if cell == "box" else WAITS["durable" if cell == "logged" else cell])


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("kind", SHOWN)
@pytest.mark.parametrize("moment", MOMENTS)
def test_records_show_at_their_stage(kind: str, name: str, moment: str) -> None:
    stages, box = Stages(), box_of(name)
    append_to(box)
    cell = SHOWN[kind][CLASSES.index(name)]
    if kind == "appended":
        stage = stages.durability.show_append(box, LSN, 1, 1)
        assert stage.name == cell.upper().replace(" ", "_"), "the reply to the append waits for the same"
    else:
        stages.durability.show_commit(box, LSN)
    if name == "object":  # queued when the append is applied, in recovery too
        stages.durability.show_when_stored(box, LSN, 1, 1)
    assert stages.durability.shows_when_logged == (cell == "logged")
    shown = stages.reach(moment)
    if cell == "at once":
        assert shown == [], "a memory box shows its records when they are applied"
        return
    is_due = MOMENTS.index(moment) >= MOMENTS.index(cell)
    assert (shown, box.log.visible_seq) == ((["b"], 1) if is_due else ([], 0))


@pytest.mark.parametrize("cause", ["ceiling", "earlier write"])
def test_a_disk_write_waits_for_the_disk_above_its_ceiling_and_behind_an_earlier_one(cause: str) -> None:
    stages, box = Stages(), box_of("disk")
    append_to(box)
    if cause == "ceiling":
        box.volatile.reserved_durable_seq = 0
    else:
        box.volatile.staged_durable_lsn = BEFORE + 1
    assert stages.durability.show_append(box, LSN, 1, 1) is Stage.DURABLE
    assert box.volatile.staged_durable_lsn == LSN and stages.reach("logged") == []
    assert stages.durability.on_durable(LSN) == ["b"]


def test_reserved_seqs_are_usable_when_their_reservation_is_durable() -> None:
    stages, box = Stages(), box_of("disk")
    box.volatile.reserved_durable_seq = 0
    stages.durability.note_reservation(box, LSN)
    stages.reach("logged")
    assert box.volatile.reserved_durable_seq == 0
    stages.reach("durable")
    assert box.volatile.reserved_durable_seq == box.reserved_seq


@pytest.mark.parametrize("is_on", [False, True])
@pytest.mark.parametrize("registers", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
def test_replies_about_no_box_go_at_their_stage(moment: str, is_on: bool, registers: bool) -> None:
    stages = Stages(is_on=is_on, registers=registers)
    stages.durability.note_deletion(LSN)
    stages.reach(moment)
    waits = {
        "register": (stages.durability.wait_for_register(LSN), "stored" if registers else "durable"),
        "endpoint": (stages.durability.wait_for_endpoint(LSN), "durable"),
        "transaction": (stages.durability.wait_for_transaction(LSN), "stored" if is_on else "durable"),
        "held rows": (stages.durability.wait_for_held_rows(LSN), "logged"),
        "absence": (stages.durability.wait_for_absence("b"), "durable"),
    }
    for name, (wait, cell) in waits.items():
        is_due = MOMENTS.index(moment) >= MOMENTS.index(cell)
        assert wait == (NOTHING if is_due else WAITS[cell]), name


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_box_whose_deletion_is_on_its_way_to_the_store_is_absent_when_it_is_there(moment: str) -> None:
    stages = Stages()
    stages.durability.note_deletion(LSN)
    stages.store.deleted["b"] = LSN
    stages.reach(moment)
    assert stages.durability.wait_for_absence("b") == (NOTHING if moment == "stored" else WAITS["stored"])
    other = stages.durability.wait_for_absence("c")
    assert other == (WAITS["durable"] if moment in ("applied", "logged") else NOTHING)


@pytest.mark.parametrize("old", CLASSES)
@pytest.mark.parametrize("new", CLASSES)
def test_a_box_that_changes_its_class_waits_for_the_stricter_one(old: str, new: str) -> None:
    stages = Stages()
    cell = "stored" if "object" in (old, new) else "durable"
    assert stages.durability.wait_for_config(LSN, old, new) == WAITS[cell]


@pytest.mark.parametrize(
    ("names", "cell"), [((), "durable"), (("disk", "fsync"), "durable"), (("disk", "object"), "stored")]
)
def test_a_commit_waits_for_the_strictest_of_its_boxes(names: tuple[str, ...], cell: str) -> None:
    assert Stages().durability.wait_for_commit(LSN, map(box_of, names)) == WAITS[cell]


def test_a_list_waits_for_the_latest_of_what_it_shows_and_of_deletions() -> None:
    stages = Stages()
    disk, stored = box_of("disk"), box_of("object")
    assert stages.durability.wait_for_list([]) == NOTHING
    assert stages.durability.wait_for_list([(disk, BEFORE), (stored, BEFORE)]) == NOTHING
    assert stages.durability.wait_for_list([(disk, LSN), (stored, BEFORE)]) == WAITS["durable"]
    stages.durability.note_deletion(LSN)
    assert stages.durability.wait_for_list([(disk, BEFORE)]) == WAITS["durable"]


def test_the_head_of_the_module_shows_the_tables() -> None:
    """A row of the drawing: its title, then one cell for each class."""
    rows = {
        title.strip(): tuple(re.sub(r"[*()]", "", cell).strip() for cell in (memory, disk, fsync, stored))
        for title, memory, disk, fsync, stored in re.findall(
            r"^    (\S.{21,26}?) {2,}(\S.*?) {2,}(\S.*?) {2,}(\S.*?) {2,}(\S.*?)$",
            durability.__doc__ or "",
            re.MULTILINE,
        )
    }
    drawn = {**{answer.title: answer.by_class for answer in ReplyKind}}
    drawn |= {
        "appended records": durability.APPENDED_RECORDS,
        "committed records": durability.COMMITTED_RECORDS,
    }
    for title, row in drawn.items():
        stages = tuple(stage.name.lower().replace("_", " ") for stage in row.values())
        if title == ReplyKind.STRONG_READ.title:  # a memory box refuses it before it asks for a stage
            stages = ("refused", *stages[1:])
        assert rows[title] == stages, title
