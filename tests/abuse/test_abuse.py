"""All attacks of the review at once, against real processes, beside clients that behave.

Counts only: no process restarts, memory stays under a stated bound, every request of a well-behaved client is
answered 2xx or 429. `make abuse` runs the same for longer and measures throughput and latency too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtests.abuse.__main__ import GATEWAY_BYTES_MAX, SHARD_BYTES_MAX
from loadtests.abuse.attacks import ATTACKS
from loadtests.abuse.run import AttackResult, attacked_server, run_attacks

SECONDS = 5.0
#: Of the connections of the review: enough to crash, starve or fill the server that the review attacked.
SCALE = 0.5


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackResult]:
    folder: Path = tmp_path_factory.mktemp("abuse") / "data"
    with attacked_server(folder) as server:
        yield run_attacks(server, list(ATTACKS), SECONDS, scale=SCALE)


def test_no_process_ends_under_all_attacks_at_once(attacked: AttackResult) -> None:
    assert attacked.restarted_processes == []


def test_every_request_of_a_well_behaved_client_is_answered_2xx_or_429(attacked: AttackResult) -> None:
    clients = attacked.clients
    assert clients.failures == 0, clients.first_failures
    assert sum(count for status, count in clients.statuses.items() if 200 <= status < 300) > 0
    assert all(200 <= status < 300 or status == 429 for status in clients.statuses)


def test_memory_stays_under_its_bound_under_all_attacks_at_once(attacked: AttackResult) -> None:
    bounds = {"gateway": GATEWAY_BYTES_MAX, "shard": SHARD_BYTES_MAX}
    assert attacked.peak_bytes
    for name, peak in attacked.peak_bytes.items():
        assert peak <= bounds[name.partition("-")[0]], (name, peak)


def test_every_attack_did_what_it_is_meant_to_do(attacked: AttackResult) -> None:
    """An attack that cannot reach the server would prove nothing."""
    for name, result in attacked.attacks.items():
        assert result["counts"].get("connected", 0) > 0, (name, result)
