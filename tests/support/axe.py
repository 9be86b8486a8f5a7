"""axe-core: checks a page for accessibility. Fetched from the npm registry once, into `build/`."""

from __future__ import annotations

import json
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import Page

_PACKAGE = "axe-core@4.14.0"
_KEPT = Path(__file__).parents[2] / "build" / "axe-core-4.14.0.js"


def source() -> str:
    if not _KEPT.exists():
        with tempfile.TemporaryDirectory() as folder:
            ran = subprocess.run(["npm", "pack", _PACKAGE], cwd=folder, capture_output=True, text=True)
            if ran.returncode:
                pytest.fail(f"npm pack {_PACKAGE} failed: {ran.stderr[-500:]}")
            (packed,) = Path(folder).glob("*.tgz")
            with tarfile.open(packed) as archive:
                member = archive.extractfile("package/axe.min.js")
                assert member is not None
                _KEPT.parent.mkdir(exist_ok=True)
                _KEPT.write_bytes(member.read())
    return _KEPT.read_text()


def findings(page: Page, *rules: str) -> list[str]:
    """What axe finds wrong with the page as it is: the rule and the elements. All rules, or these."""
    if not page.run("Boolean(window.axe)"):
        page.run(f"{source()}; null")
    only: dict[str, Any] = {"runOnly": {"type": "rule", "values": list(rules)}} if rules else {}
    options = {"resultTypes": ["violations"], **only}
    found = page.run(
        f"axe.run(document, {json.dumps(options)}).then((each) => each.violations.map("
        "(one) => `${one.id}: ${one.nodes.slice(0, 3).map((node) => node.html.slice(0, 160)).join(' | ')}`))"
    )
    return list(found)
