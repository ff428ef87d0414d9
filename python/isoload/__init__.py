"""isoload: equal load for the ranks of expert-parallel Mixture-of-Experts layers. Names in pipeline order."""

from isoload.balancer import Balancer
from isoload.captured import CapturedBalancer
from isoload.checkpoints import Checkpoint
from isoload.cost import break_even
from isoload.counting import count
from isoload.experts.weights import ExpertWeights
from isoload.formats import FORMATS, read_placement, write_placement
from isoload.layer import (
    BlockExperts,
    LibraStack,
    MoE,
    balance,
    full_optimizer_state,
    ignore_in_ddp,
    load_full_optimizer_state,
)
from isoload.online import Rebalancer, Recorder
from isoload.ops import append_shared_expert, check_device
from isoload.placement import Placement, placement_errors
from isoload.placers import PLACERS, place
from isoload.planning import plan, plan_layers, share
from isoload.policies import POLICIES, Policy, register_policy
from isoload.records import Plan, plan_errors
from isoload.replica_tables import ReplicaTables
from isoload.routing import route
from isoload.topology import Topology, topology_errors
from isoload.trace import Trace, read_trace, trace_errors, write_trace
from isoload.transport import CollectiveGroup, CollectiveTransport, LocalGroup, LocalTransport
from isoload.weights.shard import Shard

__version__ = "0.1.0"

__all__ = [
    "FORMATS",
    "PLACERS",
    "POLICIES",
    "Balancer",
    "BlockExperts",
    "CapturedBalancer",
    "Checkpoint",
    "CollectiveGroup",
    "CollectiveTransport",
    "ExpertWeights",
    "LibraStack",
    "LocalGroup",
    "LocalTransport",
    "MoE",
    "Placement",
    "Plan",
    "Policy",
    "Rebalancer",
    "Recorder",
    "ReplicaTables",
    "Shard",
    "Topology",
    "Trace",
    "__version__",
    "append_shared_expert",
    "balance",
    "break_even",
    "check_device",
    "count",
    "full_optimizer_state",
    "ignore_in_ddp",
    "load_full_optimizer_state",
    "place",
    "placement_errors",
    "plan",
    "plan_errors",
    "plan_layers",
    "read_placement",
    "read_trace",
    "register_policy",
    "route",
    "share",
    "topology_errors",
    "trace_errors",
    "write_placement",
    "write_trace",
]
