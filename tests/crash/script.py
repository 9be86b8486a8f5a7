"""What clients, time and the threads of a shard do, chosen by one random generator: same seed, same run."""

from __future__ import annotations

import random
from collections.abc import Callable

from streams.protocol.errors import StreamsError
from streams.protocol.messages import commands
from streams.protocol.model.boxes import BoxPatch
from streams.protocol.model.records import Columns
from tests.crash.life import Life, columns

#: name -> what it is created with. `shifty` changes its class.
BOXES: dict[str, BoxPatch] = {
    "fsync": BoxPatch(durability="fsync"),
    "fsync-cap": BoxPatch(durability="fsync", cap_records=6),
    "fsync-reject": BoxPatch(durability="fsync", cap_records=9, discard="reject"),
    "fsync-ttl": BoxPatch(durability="fsync", ttl_ms=60),
    "disk": BoxPatch(durability="disk"),
    "disk-cap": BoxPatch(durability="disk", cap_bytes=900),
    "disk-ttl": BoxPatch(durability="disk", ttl_ms=60),
    "memory": BoxPatch(durability="memory"),
    "memory-keyed": BoxPatch(durability="memory", compact="tag"),
    "fsync-keyed": BoxPatch(durability="fsync", compact="tag"),
    "shifty": BoxPatch(durability="disk", auto_create=False),
}
#: Those that get most of what is done, so that they have segments.
BUSY = ("fsync", "disk", "shifty")
TAGS = ("red", "reddish", "blue", None)
NODES = ("n1", "n2", None)


class Script:
    def __init__(self, life: Life, rng: random.Random) -> None:
        self.life = life
        self.rng = rng
        #: What a client does, and how often relative to the others.
        self._actions: list[tuple[int, Callable[[str], None]]] = [
            (40, self.append),
            (10, self.append_with_key),
            (8, self.repeat_key),
            (8, self.read),
            (9, self.delete_records),
            (4, self.fence),
            (6, self.configure),
            (2, self.delete_box),
            (3, self.put),
            (3, self.look),
        ]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        """Some clients at once, then some of the work that their commands left."""
        rng, life = self.rng, self.life
        for _ in range(rng.choice((1, 1, 2, 4))):
            weights = [weight for weight, _ in self._actions]
            (_, act) = rng.choices(self._actions, weights)[0]
            act(rng.choice(BUSY if rng.random() < 0.5 else list(BOXES)))
        life.world.clock.now_ms += rng.choice((0, 0, 1, 3, 20))
        if rng.random() < 0.7:
            life.commit(rng.choice((1, 2, 100)))
        if rng.random() < 0.2:
            life.sync()
        if rng.random() < 0.15:
            life.tick()
        if rng.random() < 0.06:
            self.quiet_time()
        if rng.random() < 0.5:
            life.do_file_work()
        for _ in range(rng.choice((0, 1, 4, 12))):
            life.do_upkeep()
        if rng.random() < 0.02:
            self.clear()
        if rng.random() < 0.25 and not life.is_taking_snapshot:
            life.begin_snapshot()
        elif rng.random() < 0.4 and life.is_taking_snapshot:
            life.finish_snapshot()
        elif life.is_taking_snapshot:
            life.advance_snapshot()

    def quiet_time(self) -> None:
        """Nobody writes for so long that disk boxes give back what they reserved."""
        life = self.life
        life.commit()
        life.pause()
        life.pause()
        life.world.clock.now_ms += 6_000
        life.tick()
        if self.rng.random() < 0.5:
            life.commit()
            life.pause()

    def clear(self) -> None:
        """Deletes nearly everything, so that old files are needed no more."""
        for box in BOXES:
            self.life.submit(commands.DeleteRecords(box, before_seq=1 << 60))

    # -- clients

    def append(self, box: str, key: str | None = None) -> None:
        rng = self.rng
        book = self.life.world.promises.current(box)
        next_seq = book.head_seq + 1 if book is not None else 1
        token = book.token if book is not None else ""
        self.life.submit(
            commands.Append(
                box=box,
                columns=self.columns(rng.choice((1, 1, 2, 5))),
                idempotency_key=key,
                config=BOXES[box],
                create=True if rng.random() < 0.7 else None,
                match_seq=next_seq + rng.choice((0, 0, 1)) if rng.random() < 0.15 else None,
                fencing_token=token if rng.random() < 0.9 else "stale",
                trim_before_seq=rng.randrange(1, next_seq + 1) if rng.random() < 0.08 else None,
            )
        )

    def columns(self, count: int) -> Columns:
        rng, number = self.rng, self.life.world.number
        pad = "x" * rng.choice((0, 0, 10, 60, 300))
        tagged, named = rng.random() < 0.7, rng.random() < 0.3
        return columns(
            {
                "number": number(),
                "pad": pad,
                "tag": rng.choice(TAGS) if tagged else None,
                "node": rng.choice(NODES) if named else None,
            }
            for _ in range(count)
        )

    def append_with_key(self, box: str) -> None:
        self.append(box, f"key-{self.life.world.number()}")

    def repeat_key(self, box: str) -> None:
        """A client that does not know what became of its write asks again, as soon as it can."""
        book = self.life.world.promises.current(box)
        if book is not None and book.keys:
            key = list(book.keys)[-1] if self.rng.random() < 0.7 else self.rng.choice(list(book.keys))
            self.append(box, key)
        else:
            self.append_with_key(box)

    def again(self, box: str, key: str) -> commands.Reply | StreamsError:
        """Repeats a key with another body: only the key identifies a request."""
        return self.life.submit(commands.Append(box=box, columns=self.columns(1), idempotency_key=key))

    def read(self, box: str) -> None:
        rng = self.rng
        book = self.life.world.promises.current(box)
        head = book.head_seq if book is not None else 0
        self.life.submit(
            commands.ReadBox(box=box, from_seq=rng.randrange(head + 1), limit=rng.choice((2, 50)))
        )

    def look(self, box: str) -> None:
        look = self.rng.choice((commands.GetState, commands.GetTail))
        self.life.submit(look(box))
        self.life.submit(commands.GetRecord(box, self.rng.randrange(1, 20)))
        self.life.submit(commands.ListBoxes())

    def delete_records(self, box: str) -> None:
        rng = self.rng
        book = self.life.world.promises.current(box)
        before = rng.randrange(1, book.head_seq + 2) if book is not None else 1
        match = rng.choice((commands.Match("red"), commands.Match("red", True), commands.Match("b", True)))
        match_only, before_only = rng.choice(((True, False), (False, True), (False, False)))
        self.life.submit(
            commands.DeleteRecords(box, None if match_only else before, None if before_only else match)
        )

    def fence(self, box: str) -> None:
        token = f"writer-{self.life.world.number()}" if self.rng.random() < 0.6 else ""
        self.life.submit(commands.SetFence(box, token, None if self.rng.random() < 0.8 else "another"))

    def put(self, box: str) -> None:
        self.life.submit(commands.PutBox(box, BOXES[box]))

    def configure(self, box: str) -> None:
        rng = self.rng
        if rng.random() < 0.4:
            box = "shifty"
        if box == "shifty":
            patch = BoxPatch(durability=rng.choice(("disk", "fsync", "memory")))
        elif box.endswith("cap"):
            patch = BoxPatch(cap_records=rng.choice((3, 6, 0)))
        else:
            patch = BoxPatch(idempotency_window_ms=rng.choice((1_000, 120_000)))
        self.life.submit(commands.PutBox(box, patch))

    def delete_box(self, box: str) -> None:
        self.life.submit(commands.DeleteBox(box, if_empty=self.rng.random() < 0.3))
