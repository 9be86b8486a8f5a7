"""Servers made of stand-ins: the supervisor is real, its children only keep its contract."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from streams.testing import Server, running_server

STAND_IN = (sys.executable, str(Path(__file__).with_name("stand_in.py")), "serve")


class Events:
    """What stand-ins tell, in order. Opened for both directions, so that it never ends."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._lines = open(os.open(path, os.O_RDWR), buffering=1)  # noqa: SIM115 (closed by the fixture)

    def next(self) -> str:
        return self._lines.readline().strip()

    def take(self, count: int) -> list[str]:
        return [self.next() for _ in range(count)]

    def until(self, wanted: str) -> list[str]:
        seen = [self.next()]
        while seen[-1] != wanted:
            seen.append(self.next())
        return seen

    def close(self) -> None:
        self._lines.close()


@pytest.fixture
def events(tmp_path: Path) -> Iterator[Events]:
    found = Events(tmp_path / "events")
    yield found
    found.close()


@pytest.fixture
def stand_in_environ(events: Events, tmp_path: Path) -> Callable[..., dict[str, str]]:
    def environ(plan: dict[str, list[str]] | None = None) -> dict[str, str]:
        return {
            "STAND_IN_EVENTS": str(events.path),
            "STAND_IN_RELEASE": str(tmp_path / "release"),
            "STAND_IN_PLAN": json.dumps(plan or {}),
        }

    return environ


@pytest.fixture
def stand_ins(
    tmp_path: Path, stand_in_environ: Callable[..., dict[str, str]]
) -> Callable[..., AbstractContextManager[Server]]:
    """`stand_ins(plan, **settings)` is `running_server` over stand-ins."""

    def start(plan: dict[str, list[str]] | None = None, **settings: object) -> AbstractContextManager[Server]:
        run = partial(running_server, tmp_path / "data", command=STAND_IN, environ=stand_in_environ(plan))
        return run(**{"shards": 2, **settings})

    return start
