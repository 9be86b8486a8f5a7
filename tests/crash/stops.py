"""One run, looked at wherever it could have been stopped.

To stop a life at its operation 700 takes 700 operations, and most of them only read: the disk and the
promises are what they were a moment before. So a life is led once, and each state that it would leave behind,
at any moment of any operation, is handed over as a copy; one that was there already is not handed over again.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Collection

from tests.crash.life import World
from tests.support.faultdisk import MOMENTS, Crashed, FaultDisk

#: (operation, moment)
Stop = tuple[int, str]


class States:
    """All that a next life depends on: the disk, and what was promised. Knows which of them were there."""

    def __init__(self) -> None:
        self._known: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._known)

    def new(self, disk: FaultDisk, world: World) -> Callable[[], tuple[FaultDisk, World]] | None:
        """What makes copies of both, or None if they were there before."""
        image, promised = disk.image(), pickle.dumps(world)
        digest = hashlib.blake2b(image, digest_size=16)
        digest.update(promised)
        if digest.digest() in self._known:
            return None
        self._known.add(digest.digest())
        return lambda: (FaultDisk.from_image(image), pickle.loads(promised))


def stops_of(history: list[str]) -> list[Stop]:
    """Every one that may leave something else than those beside it."""
    return [
        (at, moment)
        for at, name in enumerate(history)
        for moment in MOMENTS
        if moment != "midway" or name == "pwritev"
    ]


def stop_everywhere(
    run: Callable[[], object],
    disk: FaultDisk,
    world: World,
    check: Callable[[FaultDisk, World, Stop], None],
    *,
    only: Collection[Stop] | None = None,
    states: States | None = None,
) -> int:
    """Runs it, and has checked what each stop would leave. Returns how many states those were."""
    states = states if states is not None else States()
    known = len(states)
    wanted = None if only is None else set(only)
    failed: BaseException | None = None

    def look(at: int, moment: str) -> None:
        nonlocal failed
        if wanted is not None and (at, moment) not in wanted:
            return
        copies = states.new(disk, world)
        if copies is None:
            return
        try:
            check(*copies(), (at, moment))
        except BaseException as error:
            # What runs may handle an error, and must not handle this one.
            error.add_note(f"after a stop {moment} operation {at}")
            failed = error
            raise Crashed from error

    disk.watch(look)
    try:
        run()
    except Crashed:
        if failed is None:
            raise
        raise failed from None
    return len(states) - known
