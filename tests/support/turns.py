"""In which order the workers of a parallel run take the tests, and how long what a folder shares is kept.

A file is one turn, so that its tests share what they set up; a folder with a server for all of its tests is
one turn as a whole, and its servers end with it: one that nobody uses still costs a little all the time. What
takes long begins first. Left to itself, a run would end with the files of the fewest tests, which are the
longest ones, and a worker would wait for another.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

#: Folders that are one turn.
TOGETHER = ("tests/brokers", "tests/client", "tests/contract", "tests/s2", "tests/spark")
#: The longest first. Whatever is not here comes after it, the files with the most tests first.
LONG = (
    "tests/spark",
    "tests/contract",
    "tests/s2",
    "tests/client",
    "tests/brokers",
    "tests/gateway/test_edge_fuzz.py",
    "tests/cluster/test_backup.py",
    "tests/cluster/test_restore_truth.py",
    "tests/docs/test_bench.py",
    "tests/deploy/test_image.py",
    "tests/cluster/test_router_torture.py",
    "tests/cluster/test_watch.py",
    "tests/cluster/test_segments.py",
    "tests/cluster/test_damage.py",
    "tests/cluster/test_kill.py",
    "tests/cluster/test_objects.py",
    "tests/model/test_watch_against_model.py",
    "tests/crash/test_sweep.py",
    "tests/cluster/test_router_crashes.py",
    "tests/cluster/test_reshard.py",
    "tests/model/test_forwarding_exactly_once.py",
    "tests/crash/test_reshard_sweep.py",
    "tests/cluster/test_repair.py",
    "tests/cluster/test_queue_kill.py",
    "tests/cluster/test_supervisor.py",
    "tests/docs/test_tutorial.py",
    "tests/model/test_recovery_against_live.py",
    "tests/cluster/test_scale.py",
    "tests/deploy/test_proxies.py",
    "tests/cli/test_verbs.py",
    "tests/cluster/test_console.py",
    "tests/model/test_core_against_model.py",
    "tests/loadtests/test_load.py",
    "tests/cluster/test_restart.py",
    "tests/cluster/test_logs.py",
    "tests/docs/test_readme.py",
    "tests/crash/test_object_sweep.py",
)


def turn_of(nodeid: str) -> str:
    file = nodeid.split("::", 1)[0]
    return next((folder for folder in TOGETHER if file.startswith(f"{folder}/")), file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts alike in all workers, which must agree on the list of tests."""
    counts: dict[str, int] = {}
    for item in items:
        turn = turn_of(item.nodeid)
        counts[turn] = counts.get(turn, 0) + 1
    ranks = {turn: rank for rank, turn in enumerate(LONG)}
    order = sorted(counts, key=lambda turn: (ranks.get(turn, len(ranks)), -counts[turn]))
    places = {turn: place for place, turn in enumerate(order)}
    items.sort(key=lambda item: places[turn_of(item.nodeid)])


class Turns(LoadScopeScheduling):
    """`--dist loadfile` with our turns, in the order of the list."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return turn_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Turns | None:
    return Turns(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """A fixture for the session that stands in the conftest of a folder has no user after its last test."""
    found = yield
    if fixturedef.scope == "session" and fixturedef.baseid in TOGETHER:
        for node in request._pyfuncitem.iter_parents():
            if node.nodeid == fixturedef.baseid:
                node.addfinalizer(partial(fixturedef.finish, request=request))
    return found
