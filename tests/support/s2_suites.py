"""Runs the tests of the official S2 SDKs against servers of this tree. `make suites` calls it.

The sources of the SDKs are not part of this project. Provide them, and say where they are:

    git clone https://github.com/s2-streamstore/s2-sdk-python
    git clone https://github.com/s2-streamstore/s2-sdk-typescript
    make suites ARGS="--python s2-sdk-python --typescript s2-sdk-typescript"

Either may be left out. Everything is done in build/s2-suites: copies of the sources, and the *released*
packages that are tested (from PyPI and npm). Needs Python 3.11 and, for TypeScript, Node 20.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

from streams.testing import running_server

WORK = Path(__file__).parents[2] / "build" / "s2-suites"
PYTHON_PACKAGE, TYPESCRIPT_PACKAGE = "s2-sdk==0.13.0", "@s2-dev/streamstore@0.27.0"

#: The newest public tests import a name that later versions of the package have given up.
SHIM = """
import enum, s2_sdk
if not hasattr(s2_sdk, "StorageClass"):
    class StorageClass(str, enum.Enum):
        STANDARD = "standard"; EXPRESS = "express"
    s2_sdk.StorageClass = StorageClass
"""
#: Has the tests of the sources use the released package.
VITEST = """
import { defineConfig } from 'vitest/config'
import { resolve } from 'node:path'
import { existsSync } from 'node:fs'
const dist = resolve(process.cwd(), 'released/node_modules/@s2-dev/streamstore/dist/esm')
export default defineConfig({
  plugins: [{ name: 'use-released', enforce: 'pre', resolveId(id, from) {
    if (from && /streamstore\\/src\\/tests\\//.test(from) && id.startsWith('../')) {
      const p = resolve(dist, id.slice(3)); if (existsSync(p)) return p }
    if (id === '@s2-dev/streamstore') return resolve(dist, 'index.js') } }],
  test: { exclude: ['**/deno.e2e.test.ts', '**/node_modules/**'], pool: 'forks', maxWorkers: 1 },
})
"""
_FILES = ("account_ops", "basin_ops", "stream_ops", "correctness", "metrics_ops")
_MARKS = "account or basin or stream or correctness or metrics"
#: It wants a storage class to be filled in and makes 5000 streams.
_EXCLUDED = "**/account-basin*"


def run(command: list[str], folder: Path, environ: dict[str, str] | None = None) -> int:
    print("$", *command, flush=True)
    return subprocess.run(command, cwd=folder, env={**os.environ, **(environ or {})}).returncode


def prepare_python(source: Path) -> Path:
    folder = WORK / "python"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source / "tests", folder / "tests")
    shutil.copy(source / "pytest.ini", folder)
    (folder / "s2_shim.py").write_text(SHIM)
    run([sys.executable, "-m", "venv", "venv"], folder)
    packages = [PYTHON_PACKAGE, "pytest", "pytest-asyncio", "pytest-timeout"]
    if run(["venv/bin/pip", "install", "--quiet", *packages], folder):
        sys.exit("the packages of the Python suite cannot be installed")
    return folder


def prepare_typescript(source: Path) -> Path:
    folder = WORK / "typescript"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("node_modules", ".git"))
    (folder / "released").mkdir()
    (folder / "released" / "package.json").write_text("{}")
    (folder / "vitest.released.config.ts").write_text(VITEST)
    if run(["npm", "install", "--ignore-scripts"], folder) or run(
        ["npm", "install", "--ignore-scripts", TYPESCRIPT_PACKAGE], folder / "released"
    ):
        sys.exit("the packages of the TypeScript suite cannot be installed")
    return folder


def environ_for(url: str) -> dict[str, str]:
    return {"S2_ACCESS_TOKEN": "ignored", "S2_ACCOUNT_ENDPOINT": url, "S2_BASIN_ENDPOINT": url}


def python_suite(folder: Path, url: str, compression: str) -> int:
    files = [f"tests/test_{name}.py" for name in _FILES]
    command = ["venv/bin/python", "-m", "pytest", "-q", "-p", "s2_shim", "--timeout", "60", *files]
    environ = {**environ_for(url), "PYTHONPATH": "."}
    return run([*command, "-m", _MARKS, "--compression", compression], folder, environ)


def typescript_suite(folder: Path, url: str) -> int:
    basin = "ts-e2e-basin"
    request = urllib.request.Request(f"{url}/v1/basins/{basin}", method="PUT")
    urllib.request.urlopen(request).close()
    command = ["npx", "vitest", "--run", "--config", "vitest.released.config.ts", "--exclude", _EXCLUDED]
    return run([*command, "e2e"], folder, {**environ_for(url), "S2_LITE": "1", "S2_BASIN": basin})


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make suites", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", type=Path, help="sources of s2-sdk-python")
    parser.add_argument("--typescript", type=Path, help="sources of s2-sdk-typescript")
    parser.add_argument("--shards", type=int, nargs="*", default=[1, 4])
    asked = parser.parse_args()
    if asked.python is None and asked.typescript is None:
        parser.print_help()
        return 2
    python = prepare_python(asked.python) if asked.python else None
    typescript = prepare_typescript(asked.typescript) if asked.typescript else None
    failed: list[str] = []
    for shards in asked.shards:
        with running_server(shards=shards) as server:
            for compression in ("none", "gzip", "zstd") if python else ():
                if python is not None and python_suite(python, server.url, compression):
                    failed.append(f"Python, {compression}, {shards} shards")
            if typescript is not None and typescript_suite(typescript, server.url):
                failed.append(f"TypeScript, {shards} shards")
    for each in failed:
        print("FAILED:", each)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
