"""Placements while a model runs: what is recorded of its routing, and when experts move."""

from isoload.online.rebalancer import Rebalanced, Rebalancer
from isoload.online.recorder import Recorder

__all__ = ["Rebalanced", "Rebalancer", "Recorder"]
