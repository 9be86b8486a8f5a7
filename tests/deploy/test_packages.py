"""What is built from the tree installs and works outside of it, and what is installed is locked.

Method: hatchling builds the sdist, the main wheel out of it, and the client's wheel. Each is unpacked into an
empty environment with the packages that it declares, copied from here, and is tried from another folder.
"""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy import client_wheel, sbom

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MEGABYTES_MAX, PACKAGES_MAX = 20, 15


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The main wheel, made of the sdist, and the wheel of the client."""
    folder = tmp_path_factory.mktemp("dist")
    build = "import sys; from hatchling import build; print(build.{0}(sys.argv[1]))"

    def run(what: str, tree: Path) -> Path:
        command = [sys.executable, "-c", build.format(what), str(folder)]
        return (
            folder
            / subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True).stdout.strip()
        )

    sdist = run("build_sdist", ROOT)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "tree", filter="data")
    [tree] = (folder / "tree").iterdir()
    return {"sdist": sdist, "main": run("build_wheel", tree), "client": client_wheel.build(ROOT, folder)}


def requirements_of(distribution: str, extra: str = "") -> list[Requirement]:
    found = map(Requirement, metadata.requires(distribution) or ())
    return [each for each in found if each.marker is None or each.marker.evaluate({"extra": extra})]


def closure(requirements: list[Requirement]) -> set[str]:
    """The distributions that these requirements install here."""
    found: set[str] = set()
    pending = list(requirements)
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        if name not in found:
            found.add(name)
            pending += requirements_of(name)
        for extra in requirement.extras:
            pending += requirements_of(name, extra)
    return found


def environment(wheel: Path, folder: Path) -> tuple[Path, set[str]]:
    """An empty environment with this wheel and what it declares: its Python, and what was installed."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        declared = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    needed = [
        each
        for each in map(Requirement, declared)
        if each.marker is None or each.marker.evaluate({"extra": ""})
    ]
    names = closure(needed)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    for name in names:
        for file in metadata.files(name) or ():
            if ".." not in file.parts and "__pycache__" not in file.parts:
                target = packages / file
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(Path(str(file.locate())))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    return python, names


def test_the_client_alone_is_small_and_works(built: dict[str, Path], tmp_path: Path) -> None:
    python, names = environment(built["client"], tmp_path / "venv")
    size = sum(
        Path(str(file.locate())).stat().st_size
        for name in names
        for file in metadata.files(name) or ()
        if Path(str(file.locate())).is_file() and "__pycache__" not in file.parts
    )
    size += sum(each.file_size for each in zipfile.ZipFile(built["client"]).infolist())
    assert len(names) + 1 <= PACKAGES_MAX and size <= MEGABYTES_MAX * 1_000_000, (sorted(names), size)
    script = """if True:
        import streams, streams.direct, sys
        for name in streams.__all__:
            getattr(streams, name)
        try:
            streams.Client("http://127.0.0.1:1", retry=streams.Retry(total_s=0)).health()
        except streams.Unreachable:
            print("nobody is there")
        assert "site-packages" in streams.__file__
        import importlib.util
        assert importlib.util.find_spec("shard") is importlib.util.find_spec("gateway") is None
    """
    ran = subprocess.run([python, "-P", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("nobody is there\n", "")


def test_the_main_wheel_serves_from_an_empty_environment(built: dict[str, Path], tmp_path: Path) -> None:
    python, _ = environment(built["main"], tmp_path / "venv")
    script = """if True:
        from streams.testing import running_server
        import streams
        with running_server(shards=1) as server, streams.Client(server.url) as client:
            client.box("orders").append({"item": "tea"})
            print([record.data for record in client.box("orders").read()])
    """
    ran = subprocess.run(
        [python, "-P", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (ran.stdout, ran.returncode) == ("[{'item': 'tea'}]\n", 0), ran.stderr
    with zipfile.ZipFile(built["main"]) as archive:
        names = archive.namelist()
        [scripts] = [archive.read(name).decode() for name in names if name.endswith("entry_points.txt")]
    assert "streams = streams.cli:main" in scripts and "streams/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "loadtests/", "docs/"))]


# -- locks


def locked(name: str) -> dict[str, str]:
    text = (ROOT / "deploy" / name).read_text()
    return {canonicalize_name(each["name"]): each["version"] for each in sbom.components(text)}


@pytest.mark.parametrize(("lock", "extra"), [("server.lock", ""), ("dev.lock", "dev")])
def test_a_lock_has_every_requirement_with_its_hashes(lock: str, extra: str) -> None:
    versions = locked(lock)
    pending = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"].get(extra, ())]
    while pending:
        requirement = Requirement(pending.pop())
        if canonicalize_name(requirement.name) == PROJECT["name"]:
            for each in requirement.extras:
                pending += PROJECT["optional-dependencies"][each]
            continue
        version = versions.get(canonicalize_name(requirement.name))
        assert version and requirement.specifier.contains(version), f"{requirement}: run `make lock`"
    text = (ROOT / "deploy" / lock).read_text()
    assert all(component["externalReferences"][0]["hashes"] for component in sbom.components(text))
    assert not re.search(r"https?:|--(extra-)?index-url|--find-links", text), "no lock names a registry"


def test_the_bill_of_materials_lists_what_the_image_installs() -> None:
    document = sbom.document()
    assert document["bomFormat"] == "CycloneDX" and document["specVersion"] == "1.6"
    assert {each["name"]: each["version"] for each in document["components"]} == locked("server.lock")
    assert sbom.document() == document
    [root] = document["dependencies"]
    assert root["dependsOn"] == [each["bom-ref"] for each in document["components"]]
