"""Which Java is found, and that a trimmed one starts as Spark starts it. Needs no Spark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from streams.spark import java
from streams.spark.java import JavaNotFound, java_home, java_version, wheel_java_home, with_required_module


def make_java(
    folder: Path, version: str, *, modules: str = "java.base jdk.incubator.vector", release: bool = True
) -> Path:
    """A folder that looks like a Java and says its version as one."""
    (folder / "bin").mkdir(parents=True)
    script = folder / "bin" / "java"
    script.write_text(
        f"#!/bin/sh\nfor each do [ $each = --list-modules ] && echo {modules.split()[-1]}@1 && exit; done\n"
        f"echo 'openjdk version \"{version}\"' >&2\n"
    )
    script.chmod(0o755)
    if release:
        (folder / "release").write_text(f'JAVA_VERSION="{version}"\nMODULES="{modules}"\n')
    return folder


def test_java_home_comes_first_then_path_then_the_wheel(tmp_path: Path) -> None:
    first, second = make_java(tmp_path / "a", "17.0.1"), make_java(tmp_path / "b", "21")
    path = str(second / "bin")
    assert java_home({"JAVA_HOME": str(first), "PATH": path}) == first
    assert java_home({"PATH": path}) == second
    bundled = wheel_java_home()
    assert bundled is not None, "the wheel is a part of the extra"
    assert java_home({"PATH": str(tmp_path)}) == with_required_module(bundled)


def test_a_java_on_the_path_that_is_too_old_is_passed_over(tmp_path: Path) -> None:
    old = make_java(tmp_path / "old", "1.8.0_292")
    assert java_version(old) == 8
    assert java_home({"PATH": str(old / "bin")}) != old


@pytest.mark.parametrize(
    ("version", "said"), [("11.0.2", "Java 11; Spark needs 17"), (None, "no bin/java in it")]
)
def test_a_java_home_that_cannot_do_is_an_error_and_not_passed_over(
    tmp_path: Path, version: str | None, said: str
) -> None:
    home = make_java(tmp_path / "it", version) if version else tmp_path
    with pytest.raises(JavaNotFound, match=said):
        java_home({"JAVA_HOME": str(home), "PATH": "/usr/bin"})


def test_without_any_java_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(java, "wheel_java_home", lambda: None)
    with pytest.raises(JavaNotFound, match=r"streams-server\[spark\]"):
        java_home({"PATH": str(tmp_path)})


def test_a_plain_session_finds_the_bundled_java_once_our_package_is_imported(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    asked = "import os, streams.spark; print(os.environ.get('JAVA_HOME'))"

    def found(environ: dict[str, str]) -> str:
        ran = subprocess.run(
            [sys.executable, "-c", asked], env=environ, capture_output=True, text=True, check=True
        )
        return ran.stdout.strip()

    assert (Path(found(environ)) / "bin" / "java").exists()
    own = make_java(tmp_path / "own", "21")
    assert found({**environ, "JAVA_HOME": str(own)}) == str(own)
    assert found({**environ, "PATH": str(own / "bin")}) == "None", "Spark finds it by itself"


def test_a_java_that_does_not_say_what_it_is_is_asked(tmp_path: Path) -> None:
    home = make_java(tmp_path / "it", "21.0.3", release=False)
    assert java_version(home) == 21 and with_required_module(home) == home
    assert java_version(make_java(tmp_path / "odd", "none", release=False)) is None


def test_the_trimmed_runtime_starts_with_the_argument_that_it_would_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    bundled = wheel_java_home()
    assert bundled is not None
    asked = ["--add-modules=jdk.incubator.vector", "-version"]
    plain = subprocess.run([bundled / "bin" / "java", *asked], capture_output=True, text=True, timeout=60)
    assert plain.returncode != 0, "the wheel has the module now: the shim can go"
    home = with_required_module(bundled)
    shimmed = subprocess.run([home / "bin" / "java", *asked], capture_output=True, text=True, timeout=60)
    assert shimmed.returncode == 0 and "version" in shimmed.stderr
    before = (home / "bin" / "java").stat().st_ino
    assert with_required_module(bundled) == home and (home / "bin" / "java").stat().st_ino == before
