"""Goal: a change that rests on a missing one is refused before anything is changed, and by nothing but
`DoesNotApply`.

Method: histories of all features are replayed with frames left out, as a damaged log has them.
"""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from shard.core.kernel import DoesNotApply
from shard.core.machine import Machine
from tests.support.machines import decoded, facts_of, random_history, sampled


@sampled(14)
@given(seed=st.integers(0, 2**32))
def test_a_change_whose_ground_is_missing_is_refused_as_a_whole(seed: int) -> None:
    rng = random.Random(seed)
    log = random_history(seed, 150).log
    missing = {rng.randrange(len(log)) for _ in range(rng.choice((1, 2, 10)))}
    machine = Machine()
    for at, frame in enumerate(log):
        machine.lsn = frame.lsn - 1
        if at in missing:
            continue
        before = facts_of(machine)
        try:
            machine.apply(decoded(frame), frame.lsn)
        except DoesNotApply:
            assert facts_of(machine) == before


def test_a_history_with_every_frame_applies() -> None:
    machine = Machine()
    for frame in random_history(7, 300).log:
        machine.apply(decoded(frame), frame.lsn)
    machine.check()
