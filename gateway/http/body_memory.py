"""The memory of one request body that comes in several reads.

It doubles when it is full, and is charged before that. So it is at most twice the bytes received, and a body
that is announced and never sent takes no memory. A large body is in memory that the kernel maps: growing
moves it instead of copying it. Doubling 30 MiB by copying would stop the event loop for ten milliseconds.

Bounds: the length of the body, which the caller has checked; `PIECE_BYTES` for each read.
"""

from __future__ import annotations

import mmap
from typing import Final

from gateway.admission.memory import Charge
from gateway.admission.request_scheduler import PIECE_BYTES
from gateway.requests.request import Buffer

#: The first step of a body is between half of this and all of it; each further step doubles the body.
FIRST_STEP_BYTES: Final = 32 * 1024
#: Longer bodies are in mapped memory. For shorter ones, memory that was used before is cheaper than new
#: pages.
MAPPED_BYTES_MIN: Final = 4 * 1024 * 1024


class BodyMemory:
    __slots__ = ("_charge", "_first", "_length", "_memory", "_size", "have")

    def __init__(self, charge: Charge, length: int, first: bytes) -> None:
        """`first` is the part of the body that came with the head; it is not the whole body."""
        self._charge = charge
        self._length = length
        self._first = first
        self._memory: bytearray | mmap.mmap | None = None
        self._size = -(-length >> (length // FIRST_STEP_BYTES).bit_length())
        while self._size < len(first):
            self._size *= 2
        #: How many bytes have come.
        self.have = len(first)

    def __repr__(self) -> str:
        return f"<BodyMemory {self.have} of {self._length} B>"

    def space(self) -> memoryview:
        """Return the buffer for the next bytes. Grows if necessary, and then raises the errors of the charge.
        Release the result before the next call."""
        memory = self._memory
        if memory is None:
            self._charge.grow(self._size)
            if self._length > MAPPED_BYTES_MIN:
                memory = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            else:
                memory = bytearray(self._size)
            memory[: self.have] = self._first
            self._memory, self._first = memory, b""
        elif self.have >= len(memory):
            self._charge.grow(len(memory))
            if isinstance(memory, mmap.mmap):
                memory.resize(2 * len(memory))
            else:
                memory *= 2  # In place, and without a buffer of zeros beside it.
        return memoryview(memory)[self.have : min(self._length, self.have + PIECE_BYTES)]

    def take_whole(self) -> Buffer:
        """Return the body. It must be complete, and must not have come with the head alone."""
        memory = self._memory
        assert memory is not None and self.have == self._length, "the body has not come whole"
        self._memory = None
        self._charge.shrink_to(self._length)
        if isinstance(memory, mmap.mmap):
            memory.resize(self._length)
            return memoryview(memory)
        del memory[self._length :]
        return memory
