"""Our processes start without what they never use."""

from __future__ import annotations

import sys


def load_structlog() -> None:
    """Without rich, which it would load to show tracebacks in colour. `logs.py` never asks for that, and each
    process of a server would need a tenth longer to start. Whoever wants rich gets it as ever."""
    if "structlog" in sys.modules or "rich" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # To import it fails.
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]
