"""The seed of property tests and fuzzing is chosen here, before any worker starts, and printed at the end.

It follows from the contents of the source tree (`tests/support/seeds.py`): every commit tries new cases, and
the same commit repeats its own. `STREAMS_FUZZ_SEED` sets it; with STREAMS_SWEEP=full (`make sweep`) it is
random.
"""

from __future__ import annotations

import os
import random

import hypothesis.core
import pytest
from hypothesis import HealthCheck, settings

from tests.support import turns
from tests.support.seeds import seed_of_tree

_SEED = "STREAMS_FUZZ_SEED"

if not os.environ.get(_SEED):
    is_sweep = os.environ.get("STREAMS_SWEEP") == "full"
    # Workers of a parallel run inherit the environment, so all of them agree with what is printed.
    os.environ[_SEED] = str(random.SystemRandom().randrange(2**32) if is_sweep else seed_of_tree())

# Examples of earlier runs on this machine are left out: a run is to be repeatable anywhere. How long a case
# takes depends on the machine alone. Hypothesis ignores seeds where CI is
# set, unless `derandomize` says otherwise.
settings.register_profile(
    "seeded",
    derandomize=False,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("seeded")
hypothesis.core.global_force_seed = int(os.environ[_SEED])  # as --hypothesis-seed does, which goes before it


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(turns)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(
        f"repeat the property tests and fuzzing of this run with {_SEED}={os.environ[_SEED]}"
    )
