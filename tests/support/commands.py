"""The `streams` command run inside a test's own process: the same code, without the start of an
interpreter."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from streams.cli import run


class Ran(NamedTuple):
    returncode: int
    stdout: bytes
    stderr: bytes


def in_process(words: Sequence[str], environ: Mapping[str, str], folder: Path, given: bytes = b"") -> Ran:
    """Exit code and output of `streams` with these words, this environment, folder and standard input."""
    out, talk = io.TextIOWrapper(io.BytesIO()), io.TextIOWrapper(io.BytesIO())
    with _surroundings(environ, folder, io.TextIOWrapper(io.BytesIO(given)), out, talk):
        code = run(words)
        out.flush()
        talk.flush()
    return Ran(code, out.buffer.getvalue(), talk.buffer.getvalue())  # type: ignore[attr-defined]


@contextlib.contextmanager
def _surroundings(environ: Mapping[str, str], folder: Path, *streams: io.TextIOWrapper) -> Iterator[None]:
    were = dict(os.environ), os.getcwd(), (sys.stdin, sys.stdout, sys.stderr)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.stdin, sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(were[0])
        os.chdir(were[1])
        sys.stdin, sys.stdout, sys.stderr = were[2]
