"""Files in deploy/spark: their commands exist, with the options that they use, and their pipelines are valid.

There may be no container engine and no Kubernetes, so the commands of the containers are run here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from streams.spark.jobs.pipeline import parse_plan
from tests.support import schedulers

FOLDER = Path(__file__).parents[2] / "deploy" / "spark"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
KUBERNETES: list[dict[str, Any]] = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))


def _pods() -> Iterator[dict[str, Any]]:
    for each in KUBERNETES:
        spec = each.get("spec", {})
        spec = spec.get("jobTemplate", {}).get("spec", spec)
        if "template" in spec:
            yield spec["template"]["spec"]


CONTAINERS = [container for pod in _pods() for container in pod["containers"]]
NODES = [
    *(COMPOSE["services"][name]["command"] for name in ("master", "worker")),
    *(each["args"] for each in CONTAINERS if "command" not in each),
]
PIPELINES = [
    COMPOSE["services"]["pipeline"]["command"],
    *(each["args"] for each in CONTAINERS if each.get("command") == ["streams"]),
]


@pytest.mark.parametrize("role", ["master", "worker"])
def test_a_node_starts_sparks_own_class_which_has_the_options_that_the_files_use(role: str) -> None:
    environ = {**os.environ, "PYTHON": sys.executable, "SPARK_NODE_HOST": "127.0.0.1"}
    arguments = ["spark://127.0.0.1:7077"] if role == "worker" else []
    ran = subprocess.run(
        [FOLDER / "node", role, *arguments, "--help"],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    usage = ran.stdout + ran.stderr
    assert f"Usage: {role.capitalize()}" in usage, usage
    commands = [each for each in NODES if each[0] == role]
    assert len(commands) == 2
    for option in [
        "--host",
        "--webui-port",
        *(word for each in commands for word in each if word[:2] == "--"),
    ]:
        assert option in usage, f"{option}\n{usage}"


def test_the_commands_of_the_pipelines_exist() -> None:
    assert len(PIPELINES) == 2
    for arguments in PIPELINES:
        assert arguments[:2] == ["pipeline", "run"]
        ran = subprocess.run(
            [sys.executable, "-m", "streams", *arguments[:2], "--help"],
            capture_output=True,
            text=True,
            check=True,
        )
        for option in (word for word in arguments if word.startswith("--")):
            assert option in ran.stdout, option


def test_the_pipelines_are_valid() -> None:
    texts = [(FOLDER / "pipeline.toml").read_text()]
    texts += [each["data"]["pipeline.toml"] for each in KUBERNETES if each["kind"] == "ConfigMap"]
    for text in texts:
        assert parse_plan(text).jobs


def test_the_blocks_of_the_page_about_schedulers_compile_and_its_cron_line_is_a_command() -> None:
    found = schedulers.blocks()
    assert set(found) == {"dags/streams_hourly.py", "streams_hourly.py"}
    for name, text in found.items():
        compile(text, name, "exec")
    assert " streams pipeline run /etc/streams/hourly.toml --json " in schedulers.PAGE.read_text()


def test_every_name_that_a_file_refers_to_exists() -> None:
    names = {(each["kind"], each["metadata"]["name"]) for each in KUBERNETES}
    assert {("Service", "spark-master"), ("ConfigMap", "streams-pipeline")} <= names
    for each in KUBERNETES:
        if each["kind"] == "Service":
            labels = [
                pod["spec"]["template"]["metadata"]["labels"]
                for pod in KUBERNETES
                if pod["kind"] == "Deployment"
            ]
            assert each["spec"]["selector"] in labels
    for service in COMPOSE["services"].values():
        assert set(service.get("depends_on", ())) <= set(COMPOSE["services"])
        build = service["build"]
        assert (FOLDER / build["context"] / build["dockerfile"]).is_file()
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert source in COMPOSE["volumes"] or (FOLDER / source).is_file()
