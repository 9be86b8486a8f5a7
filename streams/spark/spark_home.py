"""A Spark home whose Python workers start three times as quickly, and that says nothing but errors.

Workers import pyspark from an archive inside Spark's home, `python/lib/pyspark.zip`, which holds no compiled
code: each of them compiles it anew, most of a second. Every query needs several workers, and Spark gives a
new one only ten seconds to report. So a home is made of links to the installed one, in which that name is a
folder: there Python finds what pip has compiled.

It is for sessions on this machine. On a cluster the workers' home is not ours to choose.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

from streams.spark.java import cache

_ARCHIVE = "pyspark.zip"

#: What Spark tells before it has read its settings, it tells as this file says. Level and pattern alone.
_LOGGING = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
logger.shell.name = org.apache.spark.api.python.PythonGatewayServer
logger.shell.level = error
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{yy/MM/dd HH:mm:ss} %p %c{1}: %m%n%ex
"""


def spark_home() -> Path | None:
    """The home made of links; None where pyspark is not installed as pip does it, or links cannot be made."""
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        return None
    package = Path(found.origin).parent
    if not (package / "bin").is_dir() or not (package / "python" / "lib" / _ARCHIVE).is_file():
        return None
    # What is linked to: another environment, or another version in the same one, has a home of its own.
    linked = "\n".join(
        [_LOGGING, str(package), *sorted(path.name for path in (package / "python" / "lib").iterdir())]
    )
    name = hashlib.sha256(linked.encode()).hexdigest()[:16]
    home = cache() / f"home-{name}-py{sys.version_info.major}{sys.version_info.minor}"
    if not home.is_dir():
        try:
            _make(home, package)
        except OSError:
            return None  # it would only have been quicker
    return home


def _make(home: Path, package: Path) -> None:
    home.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=home.parent))
    try:
        for path in package.iterdir():
            if path.name not in ("python", "conf"):
                (fresh / path.name).symlink_to(path)
        (fresh / "conf").mkdir()
        (fresh / "conf" / "log4j2.properties").write_text(_LOGGING)
        lib = fresh / "python" / "lib"
        (lib / _ARCHIVE).mkdir(parents=True)
        (lib / _ARCHIVE / "pyspark").symlink_to(package)
        for path in (package / "python" / "lib").iterdir():
            if path.name != _ARCHIVE:
                (lib / path.name).symlink_to(path)
        os.rename(fresh, home)  # in one step: another process may be starting from it
    except OSError:
        shutil.rmtree(fresh, ignore_errors=True)
        if not home.is_dir():  # nobody else has made it meanwhile
            raise
