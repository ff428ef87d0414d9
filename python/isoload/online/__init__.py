"""Placements while a model runs: what is recorded of its routing, and when experts move."""

from isoload.online.balance_log import BalanceLog
from isoload.online.rebalancer import Rebalanced, Rebalancer
from isoload.online.recorder import Recorder

__all__ = ["BalanceLog", "Rebalanced", "Rebalancer", "Recorder"]
