"""The ops of isoload.ops in plain Python: what each one does, bit for bit, written to be read.

Same names, signatures and results on valid input; slow, and checked by their own assertions only.
"""

from isoload.reference.count import count
from isoload.reference.plan_exact import ExactSplit, plan_exact
from isoload.reference.plan_lp import LpSplit, plan_lp
from isoload.reference.replica_tables import replica_tables
from isoload.reference.round_split import round_split
from isoload.reference.route import route, route_sampled
from isoload.reference.share import share

__all__ = [
    "ExactSplit",
    "LpSplit",
    "count",
    "plan_exact",
    "plan_lp",
    "replica_tables",
    "round_split",
    "route",
    "route_sampled",
    "share",
]
