"""A Spark home whose Python workers start three times as fast, and that logs errors only.

Workers import pyspark from an archive inside Spark's home, `python/lib/pyspark.zip`, which holds no compiled
code: each worker compiles it again, which takes most of a second. Every query needs several workers, and
Spark gives a new worker only ten seconds to report. This module builds a home of symbolic links to the
installed Spark, in which that archive is a folder: there Python finds the code that pip has compiled.

It serves sessions on this machine only. On a cluster, the workers' home is configured elsewhere.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

from streams.spark.java import cache_folder

_ARCHIVE = "pyspark.zip"

#: Spark logs with this configuration until it has read its settings. It sets only level and pattern.
_LOG4J_PROPERTIES = """\
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
    """Return the home made of links. None if pip did not install pyspark, or if links cannot be created."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    if not (package / "bin").is_dir() or not (package / "python" / "lib" / _ARCHIVE).is_file():
        return None
    # The targets of the links: each environment, and each Spark version in it, has its own home.
    identity = "\n".join(
        [
            _LOG4J_PROPERTIES,
            str(package),
            *sorted(path.name for path in (package / "python" / "lib").iterdir()),
        ]
    )
    name = hashlib.sha256(identity.encode()).hexdigest()[:16]
    home = cache_folder() / f"home-{name}-py{sys.version_info.major}{sys.version_info.minor}"
    if not home.is_dir():
        try:
            _build_home(home, package)
        except OSError:
            return None  # without it, workers only start slower
    return home


def _build_home(home: Path, package: Path) -> None:
    home.parent.mkdir(parents=True, exist_ok=True)
    new_home = Path(tempfile.mkdtemp(dir=home.parent))
    try:
        for path in package.iterdir():
            if path.name not in ("python", "conf"):
                (new_home / path.name).symlink_to(path)
        (new_home / "conf").mkdir()
        (new_home / "conf" / "log4j2.properties").write_text(_LOG4J_PROPERTIES)
        lib = new_home / "python" / "lib"
        (lib / _ARCHIVE).mkdir(parents=True)
        (lib / _ARCHIVE / "pyspark").symlink_to(package)
        for path in (package / "python" / "lib").iterdir():
            if path.name != _ARCHIVE:
                (lib / path.name).symlink_to(path)
        os.rename(new_home, home)  # atomic: another process may be starting from it
    except OSError:
        shutil.rmtree(new_home, ignore_errors=True)
        if not home.is_dir():  # no other process has built it in the meantime
            raise
