"""isoload: equal load for the ranks of expert-parallel Mixture-of-Experts layers.

The public names are those that most programs need, in learning order; everything else is imported by module
(isoload.layer.BlockExperts).
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isoload.balancing.balancer import Balancer
    from isoload.balancing.captured import CapturedBalancer
    from isoload.balancing.counting import count
    from isoload.balancing.known_routes import KnownRoutes
    from isoload.balancing.micro_batches import choose_micro_batches
    from isoload.balancing.planning import plan, share
    from isoload.balancing.routing import route
    from isoload.layer import LibraStack, MoE, balance, clip_grad_norm_, load, parallelize, save
    from isoload.online import Rebalancer, Recorder
    from isoload.placement.files import read_placement, write_placement
    from isoload.placement.placement import Placement
    from isoload.placers import PLACERS, place
    from isoload.policies import POLICIES
    from isoload.topology import Topology
    from isoload.traces import read_trace
    from isoload.transport import CollectiveGroup, CollectiveTransport, LocalGroup, LocalTransport
    from isoload.weights.experts import ExpertWeights

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
    "parallelize",
    "clip_grad_norm_",
    "save",
    "load",
    "KnownRoutes",
    "choose_micro_batches",
    "Recorder",
    "Rebalancer",
]

_HOMES = {  # modules that define the names of __all__; the block above states the same for type checkers
    "balancing.balancer": ("Balancer",),
    "balancing.captured": ("CapturedBalancer",),
    "balancing.counting": ("count",),
    "balancing.known_routes": ("KnownRoutes",),
    "balancing.micro_batches": ("choose_micro_batches",),
    "balancing.planning": ("plan", "share"),
    "balancing.routing": ("route",),
    "weights.experts": ("ExpertWeights",),
    "placement.files": ("read_placement", "write_placement"),
    "layer": ("LibraStack", "MoE", "balance", "clip_grad_norm_", "load", "parallelize", "save"),
    "online": ("Rebalancer", "Recorder"),
    "placers": ("PLACERS", "place"),
    "policies": ("POLICIES",),
    "placement.placement": ("Placement",),
    "topology": ("Topology",),
    "traces": ("read_trace",),
    "transport": ("CollectiveGroup", "CollectiveTransport", "LocalGroup", "LocalTransport"),
}


# Modules of the first layout of 0.1 that documents named, and the modules that hold their names now. They are accepted
# for one version, also in pickles of their classes.
_MOVED = {
    "advise": "analysis.advice",
    "checkpoints": "weights.checkpoints",
    "experts.compute": "weights.compute",
    "experts.weights": "weights.experts",
    "formats": "placement.files",
    "integrations": "engines",
    "integrations.huggingface": "engines.huggingface",
    "permutation": "ops.counting",
    "predict": "balancing.prediction",
    "records.placement": "placement.placement",
    "records.plan": "policies.plan",
    "replay": "analysis",
    "replay.batches": "analysis.batches",
    "replay.inspection": "analysis.inspection",
    "replay.judge": "analysis.judge",
    "replay.simulate": "analysis.simulate",
    "replica_tables": "ops.tables",
    "results": "ops.results",
    "trace": "traces",
    "trace.npz": "traces.npz",
    "trace.record": "traces.record",
}


class _Moved(ModuleType):
    """A former module: its names come from the module that holds them now, with a DeprecationWarning."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        former = self.__name__.removeprefix("isoload.")
        new = f"isoload.{_MOVED[former]}"
        warnings.warn(f"{self.__name__} is now {new}", DeprecationWarning, stacklevel=2)
        module = import_module(new)
        if f"{former}.{name}" in _MOVED:
            return import_module(f"isoload.{_MOVED[f'{former}.{name}']}")
        return getattr(module, name)


sys.modules.update({f"isoload.{former}": _Moved(f"isoload.{former}") for former in _MOVED})


def __getattr__(name: str) -> Any:
    """Import a public name or a module when it is first used, so that ``isoload --help`` needs no torch. The first
    public name imports all of them, because a program that has used one may name a module without importing it, as
    ``isoload.policies.plan.Plan``."""
    if name in __all__:
        for module, names in _HOMES.items():
            imported = import_module(f"isoload.{module}")
            globals().update({public: getattr(imported, public) for public in names})
        return globals()[name]
    if name in _MOVED:
        return sys.modules[f"isoload.{name}"]
    if not name.startswith("_") and find_spec(f"isoload.{name}"):
        return import_module(f"isoload.{name}")
    raise AttributeError(f"module 'isoload' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
