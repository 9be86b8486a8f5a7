"""`make peers`: what the comparison compares with, unpacked into build/peers. Not as root, and nothing is
installed: the packages of a Debian or Ubuntu machine are fetched by apt and unpacked there.

    .venv/bin/python -m loadtests.peers.install

What is on the machine already is used as it is. Elsewhere, install Redis, NATS, RabbitMQ and PostgreSQL as
your system does it; `make compare` finds them on the path, and leaves out what it does not find.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).resolve().parents[2] / "build" / "peers"
TIMEOUT_S: Final = 300

#: What RabbitMQ's own package asks for.
ERLANG: Final = (
    *("base", "asn1", "crypto", "eldap", "ftp", "tftp", "inets", "mnesia", "os-mon", "parsetools"),
    *("public-key", "runtime-tools", "snmp", "ssl", "syntax-tools", "tools", "xmerl"),
)

#: What each needs beside what every machine has.
PACKAGES: Final[dict[str, tuple[str, ...]]] = {
    "redis-server": ("redis-server", "redis-tools", "libjemalloc2", "liblzf1"),
    "nats-server": ("nats-server",),
    "rabbitmq-server": (
        "rabbitmq-server",
        "libsctp1",
        *(f"erlang-{part}" for part in ERLANG),
    ),
    "postgres": ("postgresql-15", "postgresql-client-15"),
}


def environment() -> dict[str, str]:
    """For what was unpacked: its libraries and programs before those of the system."""
    usr = FOLDER / "usr"
    libraries = [str(path) for path in usr.glob("lib/*-linux-gnu*")]
    programs = [str(path) for path in (usr / "lib/erlang/bin", usr / "bin", usr / "sbin")]
    return os.environ | {
        "LD_LIBRARY_PATH": ":".join(filter(None, [*libraries, os.environ.get("LD_LIBRARY_PATH", "")])),
        "PATH": ":".join([*programs, os.environ.get("PATH", "")]),
    }


def find(program: str) -> str | None:
    """Where a program is: unpacked, on the path, or where Debian hides PostgreSQL's."""
    unpacked = FOLDER / "usr"
    hidden = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    hidden += sorted((unpacked / "lib/postgresql").glob("*/bin"), reverse=True)
    hidden += sorted((unpacked / "lib/rabbitmq/lib").glob("*/sbin"))
    hidden += sorted(Path("/usr/lib/rabbitmq/lib").glob("*/sbin"))
    places = [*map(str, hidden), environment()["PATH"], "/usr/sbin"]
    return shutil.which(program, path=":".join(places))


def unpack(names: tuple[str, ...]) -> str:
    """Fetches and unpacks packages; what went wrong, or nothing."""
    debs = FOLDER / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    fetched = subprocess.run(
        ["apt-get", "download", *names], cwd=debs, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if fetched.returncode != 0:
        return (
            fetched.stderr.strip().splitlines()[-1] if fetched.stderr.strip() else "apt-get download failed"
        )
    for path in sorted(debs.glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(path), str(FOLDER)], check=True, timeout=TIMEOUT_S)
        path.unlink()
    _move_erlang()
    return ""


def _move_erlang() -> None:
    """Its start script names the folder that it was built for."""
    script = FOLDER / "usr/lib/erlang/bin/erl"
    if script.exists():
        here = f"ROOTDIR={FOLDER}/usr/lib/erlang"
        script.write_text(script.read_text().replace("ROOTDIR=/usr/lib/erlang\n", f"{here}\n"))


def main() -> int:
    missing = 0
    for program, names in PACKAGES.items():
        found = find(program)
        if not found and shutil.which("apt-get") and shutil.which("dpkg"):
            problem = unpack(names)
            found = find(program)
            if problem and not found:
                print(f"{program}: {problem}")
        if found:
            print(f"{program}: {found}")
        else:
            missing += 1
            print(f"{program}: not found; as root: apt-get update && apt-get install {' '.join(names[:2])}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
