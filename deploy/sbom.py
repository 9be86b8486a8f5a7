"""Writes a software bill of materials in CycloneDX 1.6 from the lock file of the image: `make sbom`.

One component for each package, with its version, the hashes of its files and, where this environment has it
installed, its license.
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "deploy" / "server.lock"
_PACKAGE = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def components(lock: str) -> list[dict[str, Any]]:
    """Return the packages of a lock file, in its order."""
    starts = list(_PACKAGE.finditer(lock))
    ends = [start.start() for start in starts[1:]] + [len(lock)]
    found = []
    for start, end in zip(starts, ends, strict=True):
        name, version = start.groups()
        purl = f"pkg:pypi/{name}@{version}"
        hashes = [{"alg": "SHA-256", "content": each} for each in _HASH.findall(lock, start.end(), end)]
        found.append(
            {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
            | ({"licenses": licenses} if (licenses := _licenses(name)) else {})
            | {"externalReferences": [_distribution(name, hashes)]}
        )
    return found


def _licenses(name: str) -> list[dict[str, Any]]:
    """The license of an installed package, if it names one as an SPDX expression."""
    try:
        text = metadata.metadata(name).get("License-Expression")
    except metadata.PackageNotFoundError:
        return []
    if not text:
        return []
    return [{"expression": text}] if " " in text else [{"license": {"id": text}}]


def _distribution(name: str, hashes: list[dict[str, str]]) -> dict[str, Any]:
    """The files that the lock file allows. Which one is installed depends on the machine."""
    return {"type": "distribution", "url": f"pkg:pypi/{name}", "hashes": hashes}


def document(root: Path = ROOT, lock: Path = LOCK) -> dict[str, Any]:
    """Return the bill of materials."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    found = components(lock.read_text())
    purl = f"pkg:pypi/{project['name']}@{project['version']}"
    serial = uuid.uuid5(uuid.NAMESPACE_URL, purl + lock.read_text())
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": purl,
                "name": project["name"],
                "version": project["version"],
                "purl": purl,
                "licenses": [{"license": {"id": project["license"]}}],
            }
        },
        "components": found,
        "dependencies": [{"ref": purl, "dependsOn": [component["bom-ref"] for component in found]}],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a bill of materials in CycloneDX.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "streams.cdx.json")
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document(), indent=2) + "\n")
    print(out)


if __name__ == "__main__":
    main()
