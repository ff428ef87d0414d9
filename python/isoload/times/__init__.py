"""What MoE layers take on GPUs that others measured: grouped GEMMs by slot, all-to-alls, and a layer of both.

The constants are shipped as JSON beside this file. ``bench/fit_times.py`` fits them to the tables of the wheel
``aiconfigurator-core`` (see NOTICE) and checks them against skewed rows that no fit has seen; no GPU is asked here.
Seconds in the interface, float64; microseconds in names that end in ``_us``.
"""

from isoload.times.exchanges import AllToAllTime
from isoload.times.experts import ExpertTime
from isoload.times.layer import LayerTime
from isoload.times.shipped import available

__all__ = ["AllToAllTime", "ExpertTime", "LayerTime", "available"]
