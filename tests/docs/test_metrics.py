"""The page of metrics is what the table of metrics says."""

from __future__ import annotations

from pathlib import Path

from gateway.telemetry.metrics import METRICS
from tests.support.metrics_page import page

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def test_the_metrics_page_is_not_stale() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"


def test_every_name_is_there_once_and_begins_alike() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(name.startswith(("streams_", "s2_", "process_")) for name in names)
