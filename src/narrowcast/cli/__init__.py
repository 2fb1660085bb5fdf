"""The ``narrowcast`` command: one module a verb."""

from narrowcast.cli.main import main

__all__ = ["main"]
