"""Board and alerts ask for metrics that there are, with labels that they have; what is deployed fits."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.telemetry.metrics import METRICS
from streams.config import SETTINGS
from tests.support import imagefile

DEPLOY = Path(__file__).parents[2] / "deploy"
BOARD = json.loads((DEPLOY / "grafana" / "boards" / "streams.json").read_text())
ALERTS = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())

#: What Prometheus adds.
_TARGET = {"job", "instance"}
LABELS = {metric.name: {*metric.labels, *_TARGET} for metric in METRICS} | {"up": _TARGET}
for _metric in METRICS:
    if _metric.kind == "histogram":
        LABELS[f"{_metric.name}_bucket"] = {*_metric.labels, *_TARGET, "le"}

RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
EXPRESSIONS = [(rule["alert"], rule["expr"]) for rule in RULES] + [
    (panel["title"], target["expr"]) for panel in BOARD["panels"] for target in panel["targets"]
]


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:streams_\w+|up)\b", expression))


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS, ids=[title for title, _ in EXPRESSIONS])
def test_each_expression_names_metrics_and_labels_that_there_are(title: str, expression: str) -> None:
    names = names_in(expression)
    assert names and names <= LABELS.keys(), names - LABELS.keys()
    known = set.union(*(LABELS[name] for name in names))
    grouped = re.findall(r"\bby \(([^)]*)\)", expression)
    used = {label.strip() for group in grouped for label in group.split(",")}
    used |= set(re.findall(r"(\w+)=~?\"", expression))
    assert used <= known, used - known
    counters = {metric.name for metric in METRICS if metric.kind == "counter"}
    for name in names & counters:
        assert re.search(rf"(?:rate|increase|resets)\({name}", expression), f"{name} only ever grows"
    assert expression.count("(") == expression.count(")")


def test_the_board_is_for_the_servers_that_are_chosen_and_shows_truncation() -> None:
    variables = {variable["name"]: variable for variable in BOARD["templating"]["list"]}
    assert variables.keys() == {"datasource", "instance", "shard", "box"}
    for name in ("instance", "shard"):
        assert variables[name]["multi"] and variables[name]["includeAll"]
    expressions = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    for expression in expressions:
        assert expression.count('{instance=~"$instance"') == len(re.findall(r"\bstreams_\w+", expression))
        for name in re.findall(r"\b(streams_\w+)\{", expression):
            for label in {"shard", "box"} & LABELS[name]:
                assert f'{label}=~"${label}"' in expression, f"{name} is not narrowed by {label}"
    assert any("streams_box_series_truncated" in expression for expression in expressions)


@pytest.mark.parametrize("panel", BOARD["panels"], ids=lambda panel: panel["title"])
def test_each_panel_says_what_its_lines_are(panel: dict[str, Any]) -> None:
    assert panel["datasource"]["uid"] == "${datasource}"
    for target in panel["targets"]:
        labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert labels <= set.union(*(LABELS[name] for name in names_in(target["expr"])))


def test_no_two_panels_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_each_alert_says_whom_to_tell_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"]["summary"].endswith(".")
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    sections = re.split(r"^## ", (DEPLOY.parent / page).read_text(), flags=re.MULTILINE)[1:]
    (section,) = [each for each in sections if each.partition("\n")[0].lower() == anchor]
    assert section.startswith(f"{rule['alert']}\n") and "```sh\n" in section, (
        "what it means, how to confirm it"
    )


def test_compose_mounts_what_there_is_and_sets_what_can_be_set() -> None:
    services = COMPOSE["services"]
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (DEPLOY / source).exists(), volume
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:"), "for this machine alone"
    known = {setting.variable for setting in SETTINGS}
    assert set(services["streams"]["environment"]) <= known
    assert services["streams"]["read_only"] is True and services["streams"]["cap_drop"] == ["ALL"]
    assert (DEPLOY / services["streams"]["build"]["context"] / "pyproject.toml").exists()
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    assert scraped["rule_files"] == ["alerts.yaml"]
    [job] = scraped["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["streams:4000"] and job["metrics_path"] == "/v0/metrics"
    boards = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/boards.yaml").read_text())
    assert (
        f"./grafana/boards:{boards['providers'][0]['options']['path']}:ro" in services["grafana"]["volumes"]
    )


def test_images_are_named_by_a_full_version_and_can_be_named_by_digest() -> None:
    steps = imagefile.resolved(imagefile.instructions((DEPLOY / "Dockerfile").read_text()))
    bases = {rest.partition(" AS ")[0] for word, rest in steps if word == "FROM"}
    services = COMPOSE["services"].values()
    named = [service["image"] for service in services if "image" in service]
    named += [service["build"]["args"]["BASE_IMAGE"] for service in services if "build" in service]
    defaults = [re.fullmatch(r"\$\{[A-Z_]+_IMAGE:-(.*)\}", name) for name in named]
    assert all(defaults), "an operator can set each of them"
    for image in (*bases, *(default[1] for default in defaults if default)):
        assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+(-[a-z-]+)?", image), image


def test_the_unit_and_every_container_have_a_memory_limit() -> None:
    unit = (DEPLOY / "streams.service").read_text()
    assert re.search(r"^MemoryMax=\d+%$", unit, re.M) and "\nOOMPolicy=continue\n" in unit
    assert all(service["mem_limit"] for service in COMPOSE["services"].values())


def test_the_image_and_the_unit_set_what_can_be_set() -> None:
    known = {setting.variable for setting in SETTINGS}
    steps = imagefile.instructions((DEPLOY / "Dockerfile").read_text())
    given = {rest.partition("=")[0] for word, rest in steps if word == "ENV"}
    unit = (DEPLOY / "streams.service").read_text()
    given |= set(re.findall(r"(STREAMS_\w+)=", unit))
    assert {name for name in given if name.startswith("STREAMS_")} <= known


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    verify = shutil.which("systemd-analyze")
    text = (DEPLOY / "streams.service").read_text()
    if verify is None:  # then at least: sections, and one value a line
        assert re.findall(r"^\[(\w+)\]$", text, re.M) == ["Unit", "Service", "Install"]
        return
    unit = tmp_path / "streams.service"
    unit.write_text(text.replace("/opt/streams/bin/streams", shutil.which("true") or "/bin/true"))
    done = subprocess.run([verify, "verify", "--man=no", str(unit)], capture_output=True, text=True)
    complaints = [line for line in done.stderr.splitlines() if "streams.service" in line]
    assert not complaints
    rated = subprocess.run(
        [verify, "security", "--offline=true", "--threshold=30", str(unit)], capture_output=True, text=True
    )
    assert rated.returncode == 0, rated.stdout[-400:]
