"""The command ``isoload``."""

from isoload.cli.app import main

__all__ = ["main"]
