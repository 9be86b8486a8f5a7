"""Runs the tests of the official S2 SDKs against servers of this tree. `make suites` calls it.

The sources of the SDKs are not part of this project. Provide them, and say where they are:

    git clone https://github.com/s2-streamstore/s2-sdk-python
    git clone https://github.com/s2-streamstore/s2-sdk-typescript
    git clone https://github.com/s2-streamstore/s2-sdk-go
    make suites ARGS="--python s2-sdk-python --typescript s2-sdk-typescript --go s2-sdk-go --rust"

Any of them may be left out. `--go` also takes a version (`--go v0.20.0`): the module then comes from the Go
proxy. `--rust` needs no sources: the SDK and the `s2` command are published crates, tests included. They take
half an hour to build, once; `build/s2-suites/rust/bin/s2` stays for `tests/docs`.

Everything is done in build/s2-suites: copies of the sources, and the *released* packages that are tested.
Needs Python 3.11 and, for the others, Node 20, Go 1.23, Rust 1.90.

The Python SDK speaks HTTP/2 alone, the Rust SDK and `s2` HTTP/1.1 alone, TypeScript and Go both.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

from streams.testing import running_server

WORK = Path(__file__).parents[2] / "build" / "s2-suites"
PYTHON_PACKAGE, TYPESCRIPT_PACKAGE = "s2-sdk==0.13.0", "@s2-dev/streamstore@0.27.0"
GO_MODULE = "github.com/s2-streamstore/s2-sdk-go"
RUST_SDK, RUST_CLI = ("s2-sdk", "0.35.3"), ("s2-cli", "0.43.4")

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
#: It wants a token to be refused that nobody issued; a server without keys takes any.
_GO_SKIPPED = "Client_InvalidToken"
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


def prepare_go(source: str) -> Path:
    """`source` is a folder, or a version of the module."""
    folder = WORK / "go"
    _remove(folder)
    if not Path(source).is_dir():
        command = ["go", "mod", "download", "-json", f"{GO_MODULE}@{source}"]
        ran = subprocess.run(command, capture_output=True, text=True, cwd=WORK)
        found = json.loads(ran.stdout or "{}")
        if "Dir" not in found:
            sys.exit(f"the Go module cannot be had: {found.get('Error') or ran.stderr}")
        source = found["Dir"]
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(".git"))
    for each in [folder, *folder.rglob("*")]:  # The cache of Go is read-only.
        each.chmod(each.stat().st_mode | 0o200)
    return folder


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)


def prepare_rust() -> Path:
    """The crates as published, with their tests, and the `s2` command in `bin/`."""
    folder = WORK / "rust"
    folder.mkdir(parents=True, exist_ok=True)
    environ = rust_environ(folder)
    name, version = RUST_CLI
    install = ["cargo", "install", name, "--version", version, "--locked", "--root", str(folder)]
    if not (folder / "bin" / "s2").exists() and run(install, folder, environ):
        sys.exit("the s2 command cannot be built")
    (folder / "src").mkdir(exist_ok=True)
    (folder / "src" / "lib.rs").touch()
    dependency = f'{RUST_SDK[0]} = "={RUST_SDK[1]}"'
    package = '[package]\nname = "suites"\nversion = "0.0.0"\nedition = "2021"\n[workspace]\n'
    (folder / "Cargo.toml").write_text(f"{package}[dependencies]\n{dependency}\n")
    if run(["cargo", "fetch"], folder, environ):
        sys.exit("the crate of the Rust SDK cannot be had")
    for name, version in (RUST_SDK, RUST_CLI):
        [source] = (folder / "cargo" / "registry" / "src").glob(f"*/{name}-{version}")
        shutil.rmtree(folder / name, ignore_errors=True)
        shutil.copytree(source, folder / name)
    return folder


def s2_command() -> Path | None:
    """The `s2` command: the one on the path, or the one that this program has built; None without one."""
    built = WORK / "rust" / "bin" / "s2"
    found = shutil.which("s2")
    return Path(found) if found else built if built.exists() else None


def rust_environ(folder: Path) -> dict[str, str]:
    return {"CARGO_HOME": str(folder / "cargo"), "CARGO_TARGET_DIR": str(folder / "target")}


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


def go_suite(folder: Path, url: str) -> int:
    command = ["go", "test", "-timeout", "15m", "-count=1", "-skip", _GO_SKIPPED, "./s2/..."]
    return run(command, folder, {**environ_for(url), "S2_LITE_ENDPOINT": url})


def rust_suite(folder: Path, url: str) -> int:
    environ = {**rust_environ(folder), **environ_for(url)}
    sdk = ["cargo", "test", "--all-features", "--tests", "--", "--test-threads", "4"]
    cli = ["cargo", "test", "--test", "cli", "--test", "integration"]
    return run(sdk, folder / RUST_SDK[0], environ) | run(cli, folder / RUST_CLI[0], environ)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make suites", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", type=Path, help="sources of s2-sdk-python")
    parser.add_argument("--typescript", type=Path, help="sources of s2-sdk-typescript")
    parser.add_argument("--go", help="sources of s2-sdk-go, or a version of its module")
    parser.add_argument("--rust", action="store_true", help="build and run the published crates")
    parser.add_argument("--shards", type=int, nargs="*", default=[1, 4])
    asked = parser.parse_args()
    if not (asked.python or asked.typescript or asked.go or asked.rust):
        parser.print_help()
        return 2
    python = prepare_python(asked.python) if asked.python else None
    typescript = prepare_typescript(asked.typescript) if asked.typescript else None
    go = prepare_go(asked.go) if asked.go else None
    rust = prepare_rust() if asked.rust else None
    failed: list[str] = []
    for shards in asked.shards:
        with running_server(shards=shards) as server:
            for compression in ("none", "gzip", "zstd") if python else ():
                if python is not None and python_suite(python, server.url, compression):
                    failed.append(f"Python, {compression}, {shards} shards")
            if typescript is not None and typescript_suite(typescript, server.url):
                failed.append(f"TypeScript, {shards} shards")
            if go is not None and go_suite(go, server.url):
                failed.append(f"Go, {shards} shards")
            if rust is not None and rust_suite(rust, server.url):
                failed.append(f"Rust, {shards} shards")
    for each in failed:
        print("FAILED:", each)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
