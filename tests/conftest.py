"""Seeds are chosen here, before any worker starts, and told at the end of every run.

Property tests try the same cases every time, so that a change is judged by what it changes. New cases are
looked for with STREAMS_SWEEP=full (`make sweep`).
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import settings

from tests.support import turns

_FUZZ_SEED = "STREAMS_FUZZ_SEED"


settings.register_profile("same cases", derandomize=True)
if os.environ.get("STREAMS_SWEEP") != "full":
    settings.load_profile("same cases")


def pytest_configure(config: pytest.Config) -> None:
    # Workers of a parallel run inherit the environment, so all of them agree with what is printed.
    os.environ.setdefault(_FUZZ_SEED, str(random.SystemRandom().randrange(2**32)))
    config.pluginmanager.register(turns)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"repeat the fuzzing of this run with {_FUZZ_SEED}={os.environ[_FUZZ_SEED]}")
