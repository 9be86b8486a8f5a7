"""Reads the reports of children to the supervisor: lines of text through a pipe."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import trio

#: A longer line is cut. Lines are short, except for some disk errors.
LINE_BYTES_MAX: Final = 65536


async def lines(stream: trio.lowlevel.FdStream) -> AsyncIterator[str]:
    rest = b""
    async for piece in stream:
        *whole, rest = (rest + piece).split(b"\n")
        rest = rest[-LINE_BYTES_MAX:]
        for line in whole:
            yield line.decode(errors="replace").strip()
