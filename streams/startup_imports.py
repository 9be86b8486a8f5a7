"""Keeps packages that a server never uses out of its processes, so that they start sooner."""

from __future__ import annotations

import sys


def load_structlog() -> None:
    """Import structlog without rich.

    structlog imports rich to show tracebacks in colour, which `logs.py` never asks for. Each process of a
    server would take a tenth longer to start. Code that imports rich later gets it as usual.
    """
    if "structlog" in sys.modules or "rich" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # Makes `import rich` fail.
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]
