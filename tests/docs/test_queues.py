"""The bounds on the page about queues are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from shard.core.boxes.groups import GROUPS_MAX
from shard.core.queues.jobs import CLAIM_BYTES_MAX, PASS_BYTES_MAX, PASS_JOBS_MAX
from shard.core.queues.queue import ADVANCE_MAX
from shard.engine.waiting_claims import COHORT_MAX

PAGE = (Path(__file__).parents[2] / "docs" / "explanation" / "queues.md").read_text()
ROWS = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \| [^|]+ \|$", PAGE, re.MULTILINE))


def test_the_table_of_bounds_shows_the_constants_of_the_code() -> None:
    assert ROWS["jobs and bytes delivered in one pass"] == f"{PASS_JOBS_MAX:,}, {PASS_BYTES_MAX >> 20} MiB"
    assert ROWS["claims per window"].startswith(f"{COHORT_MAX},")
    assert ROWS["expired leases processed at once"] == f"{ADVANCE_MAX:,}"
    assert ROWS["groups per box"].startswith(f"{GROUPS_MAX:,},")


def test_the_text_names_the_same_numbers() -> None:
    assert f"When more than {ADVANCE_MAX:,} leases end in one moment" in PAGE
    assert f"One answer holds at most {CLAIM_BYTES_MAX >> 20} MiB" in PAGE
