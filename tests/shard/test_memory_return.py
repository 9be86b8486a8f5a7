"""Memory that a burst has left free goes back to the system, where the C library can do that."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest

from streams.process import MemoryReturn

_BURST = """
from streams.process import MemoryReturn, report
memory = MemoryReturn()
pieces = [b"x" * (40_000 + 7 * number) for number in range(4_000)]
assert memory.is_worth_it
kept = pieces[::100]
del pieces
grown = report().resident_bytes
returned = memory.run()
assert report().resident_bytes < grown - (100 << 20)
assert not memory.is_worth_it
print(returned)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps free memory")
def test_memory_between_pieces_that_are_in_use_is_given_back() -> None:
    ran = subprocess.run([sys.executable, "-c", _BURST], capture_output=True, text=True, check=True)
    assert int(ran.stdout) > 100 << 20


def test_a_c_library_without_it_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def __init__(self, name: None) -> None: ...

    monkeypatch.setattr(ctypes, "CDLL", Library)
    memory = MemoryReturn()
    assert memory.run() == 0
    assert not memory.is_worth_it
