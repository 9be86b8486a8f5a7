"""The table of limits is true: what it names exists, and no error names a limit that it lacks."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest

from gateway.admission.limit_table import REQUEST_LIMITS, RequestLimit
from gateway.requests.errors import STATUS_OF
from gateway.telemetry.metrics import METRICS
from streams.config import SETTINGS
from streams.protocol.access.key_limits import NAMES
from tests.support.limits_page import PAGE, page

ROOT = Path(__file__).parents[2]
_named_limit = re.compile(r'\blimit="(\w+)"')

rows = pytest.mark.parametrize("limit", REQUEST_LIMITS, ids=lambda limit: limit.bounds)


def test_the_table_of_limits_on_the_page_is_not_stale() -> None:
    text = PAGE.read_text()
    assert text == page(text), "run `make docs`"


@rows
def test_the_code_that_enforces_a_limit_exists(limit: RequestLimit) -> None:
    for place in limit.enforced_by:
        module, _, name = place.partition(":")
        assert callable(attrgetter(name)(import_module(module)))


@rows
def test_the_settings_metrics_and_errors_of_a_limit_exist(limit: RequestLimit) -> None:
    assert set(limit.settings) <= {setting.variable for setting in SETTINGS}
    assert set(limit.metrics) <= {metric.name for metric in METRICS}
    assert set(limit.errors) <= set(STATUS_OF)


@rows
def test_a_limit_that_refuses_says_with_which_error(limit: RequestLimit) -> None:
    assert limit.effects and bool(limit.errors) == ("refuses" in limit.effects)


def test_every_limit_that_an_error_names_has_a_row() -> None:
    files = [path for folder in ("gateway", "shard", "streams") for path in (ROOT / folder).rglob("*.py")]
    named = {name for path in files for name in _named_limit.findall(path.read_text())}
    named |= {f"{name}_per_key" for name in NAMES}
    assert named == {name for limit in REQUEST_LIMITS for name in limit.names}


#: Answers to the commands of an operator: one export of a shard at a time.
NOT_REQUESTS = {"shard.transfer.exports"}
REFUSALS = {"Throttled", "BoxFull", "BatchTooLarge", "RecordTooLarge", "DiskFull", "PayloadTooLarge"}


def refuses(path: Path) -> bool:
    """Return True if the code of a file makes an error that says that something is full or too large."""
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return any(ast.unparse(call.func).rpartition(".")[2] in REFUSALS for call in calls)


def test_every_module_that_refuses_for_a_limit_has_a_row() -> None:
    files = [
        path for folder in ("gateway", "shard", "streams/protocol") for path in (ROOT / folder).rglob("*.py")
    ]
    refusing = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files if refuses(path)}
    enforcing = {place.partition(":")[0] for limit in REQUEST_LIMITS for place in limit.enforced_by}
    assert refusing - enforcing == NOT_REQUESTS


def test_every_setting_of_a_limit_has_a_row() -> None:
    variables = {setting.variable for setting in SETTINGS}
    limiting = {name for name in variables if name.startswith(("STREAMS_MAX_", "STREAMS_THROTTLE_"))}
    assert limiting <= {name for limit in REQUEST_LIMITS for name in limit.settings}
