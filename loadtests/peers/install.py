"""`make peers`: fetches the servers for the comparison into build/peers.

It needs no root and installs nothing: apt downloads Debian packages, which dpkg unpacks; Go builds the newest
NATS from its module proxy, Maven fetches the jars of Kafka, and pip the Python client of Kafka. What cannot
be had is skipped with a line that says so.

    .venv/bin/python -m loadtests.peers.install

Installed servers are used as they are. On other systems, install Redis, Valkey, NATS, RabbitMQ and PostgreSQL
with your package manager; `make compare` finds them on the path, and skips the others.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).resolve().parents[2] / "build" / "peers"
TIMEOUT_S: Final = 300
#: Building NATS takes two minutes of one core.
BUILD_TIMEOUT_S: Final = 900

#: The keys by which apt trusts Debian; without them those in apt's own folder count.
DEBIAN_KEYS: Final = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
KAFKA_VERSION: Final = "4.3.1"
NATS_MODULE: Final = "github.com/nats-io/nats-server/v2@latest"

#: Erlang packages that RabbitMQ's package depends on.
ERLANG: Final = (
    *("base", "asn1", "crypto", "eldap", "ftp", "tftp", "inets", "mnesia", "os-mon", "parsetools"),
    *("public-key", "runtime-tools", "snmp", "ssl", "syntax-tools", "tools", "xmerl"),
)

#: Packages of each program, without those that every machine has.
PACKAGES: Final[dict[str, tuple[str, ...]]] = {
    "redis-server": ("redis-server", "redis-tools", "libjemalloc2", "liblzf1"),
    "rabbitmq-server": (
        "rabbitmq-server",
        "libsctp1",
        *(f"erlang-{part}" for part in ERLANG),
    ),
    "postgres": ("postgresql-15", "postgresql-client-15"),
}


def environment() -> dict[str, str]:
    """Return an environment in which unpacked libraries and programs precede those of the system."""
    usr = FOLDER / "usr"
    libraries = [str(path) for path in usr.glob("lib/*-linux-gnu*")]
    programs = [str(path) for path in (FOLDER / "go", usr / "lib/erlang/bin", usr / "bin", usr / "sbin")]
    return os.environ | {
        "LD_LIBRARY_PATH": ":".join(filter(None, [*libraries, os.environ.get("LD_LIBRARY_PATH", "")])),
        "PATH": ":".join([*programs, os.environ.get("PATH", "")]),
    }


def find(program: str) -> str | None:
    """Return the path of a program: unpacked, on the path, or in Debian's folders for PostgreSQL."""
    own_usr = FOLDER / "usr"
    other_folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    other_folders += sorted((own_usr / "lib/postgresql").glob("*/bin"), reverse=True)
    other_folders += sorted((own_usr / "lib/rabbitmq/lib").glob("*/sbin"))
    other_folders += sorted(Path("/usr/lib/rabbitmq/lib").glob("*/sbin"))
    folders = [*map(str, other_folders), environment()["PATH"], "/usr/sbin"]
    return shutil.which(program, path=":".join(folders))


def unpack(names: tuple[str, ...], settings: Sequence[str] = ()) -> str:
    """Download and unpack packages. Return an error message, or an empty text."""
    debs = FOLDER / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    download = subprocess.run(
        ["apt-get", *settings, "download", *names],
        cwd=debs,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if download.returncode != 0:
        return (
            download.stderr.strip().splitlines()[-1] if download.stderr.strip() else "apt-get download failed"
        )
    for path in sorted(debs.glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(path), str(FOLDER)], check=True, timeout=TIMEOUT_S)
        path.unlink()
    _move_erlang()
    return ""


def _move_erlang() -> None:
    """Set the root folder in Erlang's start script, which names the folder of an installation."""
    script = FOLDER / "usr/lib/erlang/bin/erl"
    if script.exists():
        here = f"ROOTDIR={FOLDER}/usr/lib/erlang"
        script.write_text(script.read_text().replace("ROOTDIR=/usr/lib/erlang\n", f"{here}\n"))


def _run(words: list[str], timeout_s: float, **more: str) -> str:
    """Run a program. Return the last line of its error, or an empty text."""
    try:
        ran = subprocess.run(
            words, capture_output=True, text=True, timeout=timeout_s, env=os.environ | more, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error).splitlines()[0]
    lines = (ran.stderr.strip() or ran.stdout.strip()).splitlines()
    return "" if ran.returncode == 0 else lines[-1] if lines else f"{words[0]} ended with {ran.returncode}"


def build_nats() -> str:
    """Build the newest NATS with Go, or unpack the package if there is no Go."""
    go = shutil.which("go", path=f"{os.environ.get('PATH', '')}:/usr/local/go/bin")
    if go is None:
        return unpack(("nats-server",))
    folders = {"GOBIN": str(FOLDER / "go"), "GOPATH": str(FOLDER / "go-path")}
    return _run([go, "install", NATS_MODULE], BUILD_TIMEOUT_S, **folders)


def unpack_backports() -> str:
    """Unpack Valkey from the backports of the Debian release that apt uses, with lists of packages apart from
    those of the system."""
    targets = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME)"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    rows = [line.split() for line in targets.stdout.splitlines() if line.count(" ") >= 1]
    releases = [row for row in rows if "-" not in row[1]]
    if not releases:
        return "apt has no list of a Debian release; run apt-get update"
    uri, codename = releases[0]
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "backports.list"
        key = f"[signed-by={DEBIAN_KEYS}] " if DEBIAN_KEYS.exists() else ""
        source.write_text(f"deb {key}{uri} {codename}-backports main\n")
        options = [f"Dir::Etc::SourceList={source}", "Dir::Etc::SourceParts=-"]
        for name in ("State::Lists", "Cache"):
            (Path(scratch) / name / "partial").mkdir(parents=True)
            options.append(f"Dir::{name}={scratch}/{name}")
        settings = [word for option in options for word in ("-o", option)]
        return _run(["apt-get", *settings, "update"], TIMEOUT_S) or unpack(
            ("valkey-server", "valkey-tools"), settings
        )


def fetch_kafka() -> str:
    """Fetch the jars of Kafka with Maven, and its Python client with pip."""
    maven = shutil.which("mvn")
    if maven is None:
        return "Maven (mvn) is not installed"
    folder = FOLDER / "kafka"
    folder.mkdir(parents=True, exist_ok=True)
    dependencies = "".join(
        f"<dependency><groupId>org.apache.kafka</groupId><artifactId>{name}</artifactId>"
        f"<version>{KAFKA_VERSION}</version></dependency>"
        for name in ("kafka_2.13", "kafka-tools")
    )
    (folder / "pom.xml").write_text(
        "<project><modelVersion>4.0.0</modelVersion><groupId>local</groupId><artifactId>peers</artifactId>"
        f"<version>1</version><packaging>pom</packaging><dependencies>{dependencies}</dependencies></project>"
    )
    goal = "dependency:copy-dependencies"
    copy = [maven, "-q", "-B", "-f", str(folder / "pom.xml"), goal, "-DincludeScope=runtime"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(FOLDER / "python")]
    return _run([*copy, f"-DoutputDirectory={folder}"], BUILD_TIMEOUT_S) or _run(
        [*pip, "confluent-kafka"], TIMEOUT_S
    )


def find_kafka(program: str = "java") -> str | None:
    """Return the folder of Kafka's jars, if there is a Java to run them and the Python client."""
    jars = FOLDER / "kafka"
    has_all = any(jars.glob("kafka_2.13-*.jar")) and any((FOLDER / "python").glob("confluent_kafka"))
    return str(jars) if has_all and find(program) else None


#: How to get what is no package of the Debian release.
OTHERS: Final[dict[str, Callable[[], str]]] = {
    "nats-server": build_nats,
    "valkey-server": unpack_backports,
    "kafka": fetch_kafka,
}


def _found(program: str) -> str | None:
    return find_kafka() if program == "kafka" else find(program)


def main() -> int:
    missing = 0
    for program in (*PACKAGES, *OTHERS):
        names = PACKAGES.get(program, (program,))
        path = _found(program)
        problem = ""
        if not path and program in OTHERS:
            problem = OTHERS[program]()
        elif not path and shutil.which("apt-get") and shutil.which("dpkg"):
            problem = unpack(names)
        path = path or _found(program)
        if path:
            print(f"{program}: {path}")
            continue
        missing += 1
        if problem:
            print(f"{program}: {problem}")
        if program != "kafka":
            print(f"{program}: not found; as root: apt-get update && apt-get install {' '.join(names[:2])}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
