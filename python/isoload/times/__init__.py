"""The only model of time: grouped GEMMs by slot, all-to-alls, and an MoE layer of both.

Constants of your own machine come from a file of ``isoload measure`` (:func:`load`). Shipped constants of GPUs are
fitted by ``bench/fit_times.py`` to the tables of the wheel ``aiconfigurator-core`` (see NOTICE), and checked against
skewed rows that were not fitted. The interface uses seconds in float64; names that end in ``_us`` are microseconds.
"""

from isoload.times.exchanges import AllToAllTime, LayerTime
from isoload.times.experts import ExpertTime, available, local_bytes
from isoload.times.file import Times, load

__all__ = ["AllToAllTime", "ExpertTime", "LayerTime", "Times", "available", "load", "local_bytes"]
