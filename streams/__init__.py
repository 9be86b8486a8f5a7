"""streams: a persistent event engine that a Python team can own."""

__version__ = "0.1.0"
