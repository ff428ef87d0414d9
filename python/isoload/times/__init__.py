"""The only model of time: grouped GEMMs by slot, all-to-alls, and an MoE layer of both.

Constants of your own machine come from a file of ``isoload measure`` (:func:`load`). Constants of GPUs that others
measured are shipped as JSON with this package. ``bench/fit_times.py`` fits them to the tables of the wheel
``aiconfigurator-core`` (see NOTICE) and checks them against skewed rows that were not fitted; it needs no GPU. The
interface uses seconds in float64; names that end in ``_us`` are microseconds.
"""

from isoload.times.exchanges import AllToAllTime, LayerTime
from isoload.times.experts import ExpertTime, available, local_bytes
from isoload.times.file import Times, load

__all__ = ["AllToAllTime", "ExpertTime", "LayerTime", "Times", "available", "load", "local_bytes"]
