"""`make peers`: unpacks the servers for the comparison into build/peers, on Debian or Ubuntu.

It needs no root and installs nothing: apt downloads the packages, and dpkg unpacks them.

    .venv/bin/python -m loadtests.peers.install

Installed servers are used as they are. On other systems, install Redis, NATS, RabbitMQ and PostgreSQL with
your package manager; `make compare` finds them on the path, and skips the others.
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

#: Erlang packages that RabbitMQ's package depends on.
ERLANG: Final = (
    *("base", "asn1", "crypto", "eldap", "ftp", "tftp", "inets", "mnesia", "os-mon", "parsetools"),
    *("public-key", "runtime-tools", "snmp", "ssl", "syntax-tools", "tools", "xmerl"),
)

#: Packages of each program, without those that every machine has.
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
    """Return an environment in which unpacked libraries and programs precede those of the system."""
    usr = FOLDER / "usr"
    libraries = [str(path) for path in usr.glob("lib/*-linux-gnu*")]
    programs = [str(path) for path in (usr / "lib/erlang/bin", usr / "bin", usr / "sbin")]
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


def unpack(names: tuple[str, ...]) -> str:
    """Download and unpack packages. Return an error message, or an empty text."""
    debs = FOLDER / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    download = subprocess.run(
        ["apt-get", "download", *names], cwd=debs, capture_output=True, text=True, timeout=TIMEOUT_S
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


def main() -> int:
    missing = 0
    for program, names in PACKAGES.items():
        path = find(program)
        if not path and shutil.which("apt-get") and shutil.which("dpkg"):
            problem = unpack(names)
            path = find(program)
            if problem and not path:
                print(f"{program}: {problem}")
        if path:
            print(f"{program}: {path}")
        else:
            missing += 1
            print(f"{program}: not found; as root: apt-get update && apt-get install {' '.join(names[:2])}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
