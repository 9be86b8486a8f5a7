"""What `docs/howto/deploy.md` puts on a host: units that systemd accepts, one user, and backups that work.

Method: systemd's own checker, from Debian's packages where this machine has none; the command of the backup
unit is run as it is written there, against a server.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import string
import subprocess
from configparser import RawConfigParser
from pathlib import Path

import pytest
import yaml

from streams.testing import running_server
from tests.support import debian
from tests.support.commands import in_process

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted([*DEPLOY.glob("*.service"), *DEPLOY.glob("*.timer")])


class _Values(dict[str, str]):
    """A setting that is given twice has both values, a line each, as it has for systemd."""

    def __setitem__(self, key: str, value: str) -> None:
        if isinstance(value, list) and key in self:
            value = [*self[key], *value]
        super().__setitem__(key, value)


def unit(name: str) -> RawConfigParser:
    parser = RawConfigParser(dict_type=_Values, strict=False, delimiters=("=",), comment_prefixes=("#",))  # type: ignore[arg-type]
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / name)
    return parser


def environment(name: str) -> dict[str, str]:
    lines = unit(name)["Service"]["Environment"].split("\n")
    return dict(word.split("=", 1) for line in lines for word in shlex.split(line))


@pytest.fixture(scope="module")
def analyze(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that checks units."""
    found = shutil.which("systemd-analyze")
    if found is not None:
        return [found]
    folder = tmp_path_factory.mktemp("systemd")
    debian.download("systemd", "libsystemd-shared", "libsystemd0", folder=folder)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package.name, "."], cwd=folder, check=True)
    libraries = {str(path.parent) for path in folder.rglob("libsystemd*.so*")}
    return ["env", f"LD_LIBRARY_PATH={':'.join(libraries)}", str(folder / "usr/bin/systemd-analyze")]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The units as they would be on a host, with a program at the place of ours."""
    folder = tmp_path_factory.mktemp("units")
    for path in UNITS:
        text = path.read_text().replace("/opt/streams/bin/streams", "/bin/true")
        (folder / path.name).write_text(text)
    return [str(folder / path.name) for path in UNITS]


def test_systemd_accepts_the_units(analyze: list[str], installed: list[str]) -> None:
    ran = subprocess.run([*analyze, "verify", "--man=no", *installed], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_the_units_have_few_rights(analyze: list[str], installed: list[str]) -> None:
    services = [path for path in installed if path.endswith(".service")]
    check = [*analyze, "security", "--no-pager", "--offline=true", "--threshold=20", *services]
    ran = subprocess.run(check, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout


def test_server_and_backups_run_as_one_user_that_lasts() -> None:
    """Keys and backups belong to it: a user of one start of the service could read neither."""
    [user] = re.findall(r"^u (\S+) ", (DEPLOY / "streams.sysusers").read_text(), re.MULTILINE)
    for name in ("streams.service", "streams-backup.service"):
        service = unit(name)["Service"]
        assert (service["User"], service["Group"], service.get("DynamicUser")) == (user, user, None)
    assert f"-o {user} -g {user}" in (ROOT / "docs/howto/deploy.md").read_text()


def test_a_shard_that_the_kernel_ends_for_its_memory_does_not_end_the_server() -> None:
    service = unit("streams.service")["Service"]
    assert service["OOMPolicy"] == "continue" and service["MemoryMax"] and service["MemoryHigh"]


def test_the_command_of_the_backup_unit_takes_a_backup_of_a_running_server(tmp_path: Path) -> None:
    server, backup = environment("streams.service"), environment("streams-backup.service")
    assert server["STREAMS_DATA_DIR"] == backup["STREAMS_DATA_DIR"]
    target = tmp_path / "backups"
    target.mkdir()
    places = {"STREAMS_DATA_DIR": str(tmp_path / "data"), "BACKUP_TARGET": str(target)}
    command = string.Template(unit("streams-backup.service")["Service"]["ExecStart"])
    program, *words = shlex.split(command.substitute(backup | places))
    assert program == shlex.split(unit("streams.service")["Service"]["ExecStart"])[0]
    environ = {**os.environ, **backup, **places}
    with running_server(tmp_path / "data", shards=1):
        for _ in range(2):
            ran = in_process(words, environ, tmp_path)
            assert ran.returncode == 0, ran.stderr
    listed = in_process(["backup", str(target), "--list"], environ, tmp_path)
    assert len(listed.stdout.splitlines()) == 2


def test_the_timer_starts_the_backup_unit_and_makes_up_for_a_missed_night() -> None:
    timer = unit("streams-backup.timer")
    assert timer["Timer"]["Persistent"] == "yes" and "Unit" not in timer["Timer"]
    assert timer["Install"]["WantedBy"] == "timers.target"


def test_the_page_names_files_that_there_are() -> None:
    text = (ROOT / "docs/howto/deploy.md").read_text()
    named = set(re.findall(r"\bdeploy/[\w./-]*\w", text))
    assert {path for path in named if not (ROOT / path).exists()} == set()
    assert {f"deploy/{path.name}" for path in UNITS} <= named


def test_containers_keep_a_bounded_log() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        options = service["logging"]["options"]
        assert re.fullmatch(r"[0-9]+m", options["max-size"]) and int(options["max-file"]) > 1, name
