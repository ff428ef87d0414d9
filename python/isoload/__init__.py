"""isoload: equal load for the ranks of expert-parallel Mixture-of-Experts layers.

What most programs need, in the order in which one learns it; all else by module (isoload.layer.BlockExperts).
"""

from isoload.balancing.balancer import Balancer
from isoload.balancing.captured import CapturedBalancer
from isoload.balancing.counting import count
from isoload.balancing.planning import plan, share
from isoload.balancing.routing import route
from isoload.experts.weights import ExpertWeights
from isoload.formats import read_placement, write_placement
from isoload.layer import LibraStack, MoE, balance, load, save
from isoload.online import Rebalancer, Recorder
from isoload.placers import PLACERS, place
from isoload.policies import POLICIES
from isoload.records.placement import Placement
from isoload.topology import Topology
from isoload.trace import read_trace
from isoload.transport import CollectiveGroup, CollectiveTransport, LocalGroup, LocalTransport

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022
    "Topology",
    "Placement",
    "place",
    "PLACERS",
    "read_trace",
    "read_placement",
    "write_placement",
    "Balancer",
    "POLICIES",
    "LocalGroup",
    "CollectiveGroup",
    "CapturedBalancer",
    "count",
    "plan",
    "share",
    "route",
    "MoE",
    "ExpertWeights",
    "LocalTransport",
    "CollectiveTransport",
    "balance",
    "LibraStack",
    "save",
    "load",
    "Recorder",
    "Rebalancer",
]
