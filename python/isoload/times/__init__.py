"""The only model of time: grouped GEMMs by slot, all-to-alls, and an MoE layer of both.

Constants of one's own machine come from a file that ``isoload measure`` wrote (:func:`load`). Constants of GPUs that
others measured are shipped as JSON with this package. ``bench/fit_times.py`` fits them to the tables of the wheel
``aiconfigurator-core`` (see NOTICE) and checks them against skewed rows that no fit has seen; no GPU is asked here.
Seconds in the interface, float64; microseconds in names that end in ``_us``.
"""

from isoload.times.exchanges import AllToAllTime, LayerTime
from isoload.times.experts import ExpertTime, available
from isoload.times.file import Times, load

__all__ = ["AllToAllTime", "ExpertTime", "LayerTime", "Times", "available", "load"]
