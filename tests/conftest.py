"""Seeds are chosen here, before any worker starts, and told at the end of every run."""

from __future__ import annotations

import os
import random

import pytest

_FUZZ_SEED = "STREAMS_FUZZ_SEED"


def pytest_configure(config: pytest.Config) -> None:
    # Workers of a parallel run inherit the environment, so all of them agree with what is printed.
    os.environ.setdefault(_FUZZ_SEED, str(random.SystemRandom().randrange(2**32)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"repeat the fuzzing of this run with {_FUZZ_SEED}={os.environ[_FUZZ_SEED]}")
