"""Placements while a model runs: what is recorded of its routing, and when experts move."""

from isoload.online.recorder import Recorder

__all__ = ["Recorder"]
