"""Tools for a running model: recording of its routing, rebalancing, metrics and checks."""

from isoload.online.balance_log import BalanceLog
from isoload.online.rebalancer import Rebalanced, Rebalancer
from isoload.online.recorder import Recorder

__all__ = ["BalanceLog", "Rebalanced", "Rebalancer", "Recorder"]
