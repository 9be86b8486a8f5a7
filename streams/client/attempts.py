"""The attempts at one request, from the first to the answer or to the error that is raised."""

from __future__ import annotations

import random
import time

from streams.client.errors import AnswerLost
from streams.client.retry import Retry
from streams.protocol.errors import Busy, StreamsError, Uncertain


class Attempts:
    def __init__(self, retry: Retry, *, is_repeatable: bool = True) -> None:
        self._retry = retry
        self._is_repeatable = is_repeatable
        self._began_s = time.monotonic()
        self._failed_count = 0
        self._was_uncertain = False

    def __repr__(self) -> str:
        return f"<Attempts, {self._failed_count} failed>"

    def pause_s(self, error: StreamsError) -> float | None:
        """How long to wait after an attempt that failed with this. Without a further attempt it is None, and
        the caller raises the error again; or it is `check_last` that raises."""
        self._was_uncertain = self._was_uncertain or isinstance(error, Uncertain)
        pause_s = self._retry.pause_s(
            error,
            attempt=self._failed_count,
            spent_s=time.monotonic() - self._began_s,
            is_repeatable=self._is_repeatable,
            luck=random.random(),
        )
        if pause_s is None:
            self.check_last(error)
        self._failed_count += 1
        return pause_s

    def check_last(self, error: StreamsError) -> None:
        """`AnswerLost` when the last error says that nothing happened, and an earlier attempt was uncertain:
        what is raised must be true of all attempts."""
        if self._was_uncertain and isinstance(error, Busy):
            message = f"an attempt got no answer, and then: {error.message}"
            raise AnswerLost(message, **error.detail) from error
