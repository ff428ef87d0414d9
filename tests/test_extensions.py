"""What others add takes one short file over public names: an engine's plug-in or hook, a policy. (A dispatcher:
tests/transport/test_toy_dispatcher.py.)"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor

import isoload
from isoload.engines.settings import Settings
from isoload.policies import POLICIES, Demand, PlacedLayers, chosen_plan
from support.small_batches import EXPERTS, RANKS, K, draw_ids, make_placement, make_topology

# --- An engine with a table of replicas and a random choice among them, as engines have it.


class Engine:
    """Tensor-parallel ranks hold the same tokens; the rule may be replaced, the map changes while it runs."""

    def __init__(self, physical_to_logical: Tensor) -> None:
        self.physical_to_logical = physical_to_logical
        self.to_physical = self.draw_replica

    def draw_replica(self, layer: int, topk_ids: Tensor) -> Tensor:
        replicas = [(self.physical_to_logical[layer] == e).nonzero().flatten() for e in range(EXPERTS)]
        return torch.tensor(
            [[int(replicas[e][0]) if e >= 0 else -1 for e in row] for row in topk_ids.tolist()]
        )

    def rebalance(self, physical_to_logical: Tensor) -> None:
        self.physical_to_logical = physical_to_logical


# --- Its plug-in.


class PlugIn:
    """Balances every layer of an engine; follows its rebalancing in place."""

    def __init__(self, engine: Engine, topology: isoload.Topology, policy: str) -> None:
        self.topology, rebalance = topology, engine.rebalance
        placement = self.placement_of(engine.physical_to_logical)
        self.balancers = [
            isoload.Balancer(placement, layer, policy, tokens="same") for layer in range(placement.num_layers)
        ]
        engine.to_physical = lambda layer, topk_ids: self.balancers[layer](topk_ids)

        def follow(physical_to_logical: Tensor) -> None:
            rebalance(physical_to_logical)
            placement = self.placement_of(physical_to_logical)
            for balancer in self.balancers:
                balancer.load(placement)

        engine.rebalance = follow  # type: ignore[method-assign]

    def placement_of(self, physical_to_logical: Tensor) -> isoload.Placement:
        return isoload.Placement(physical_to_logical, self.topology, int(physical_to_logical.max()) + 1)


def peak(slots: Tensor, num_slots: int) -> int:
    return int(isoload.count(slots, num_slots).view(RANKS, -1).sum(1).max())


def test_an_engines_plug_in() -> None:
    placement = make_placement()
    engine = Engine(placement.slot_to_expert.long())
    stock = [engine.to_physical(layer, draw_ids(layer)[0]) for layer in range(placement.num_layers)]
    plug_in = PlugIn(engine, make_topology(), "exact")
    for layer, drawn in enumerate(stock):
        slots = engine.to_physical(layer, draw_ids(layer)[0])
        plan = plug_in.balancers[layer].last_plan
        assert plan is not None and plan.peak == plan.bound == peak(slots, placement.num_slots)
        assert peak(slots, placement.num_slots) <= peak(drawn, placement.num_slots)
    new = isoload.place(torch.rand(placement.num_layers, EXPERTS), make_topology(), slots_per_rank=6)
    engine.rebalance(new.slot_to_expert.long())
    rows = draw_ids(7)[0]
    slots = engine.to_physical(2, rows)
    held = new.slot_to_expert[2][slots.clamp(min=0)]
    assert torch.equal(torch.where(slots < 0, -1, held), rows.int()) and slots.shape == (len(rows), K)


# --- A policy: one file, the registry, and a row in docs/policies.md.


@dataclass(frozen=True)
class Highest(isoload.policies.Policy):
    """All copies of an expert go to its highest slot."""

    name = "highest"

    def split(self, demand: Demand, placed: PlacedLayers) -> isoload.policies.plan.Plan:
        loads = demand.loads if demand.loads.dim() == 1 else demand.loads.sum(0, dtype=torch.int32)
        last = (placed.tables.field("offsets")[1:] - 1).long()
        quota = torch.zeros_like(placed.slot_to_expert)
        quota[placed.tables.field("slots")[last].long()] = loads
        return chosen_plan(self, quota, demand, placed)


@pytest.fixture
def highest() -> str:
    isoload.policies.register_policy(Highest)
    yield "highest"
    del POLICIES["highest"]


def test_a_policy_in_one_file(highest: str) -> None:
    placement = make_placement()
    balancer = isoload.Balancer(placement, 0, highest, isoload.LocalGroup(make_topology()))
    ids = draw_ids(3)
    slots = balancer(ids)
    plan = balancer.last_plan
    assert plan is not None
    assert (
        isoload.policies.plan.plan_errors(plan, torch.stack([isoload.count(rows, EXPERTS) for rows in ids]))
        == []
    )
    assert torch.equal(isoload.count(torch.cat(slots), placement.num_slots), plan.quota)
    exact = isoload.Balancer(placement, 0, "exact", isoload.LocalGroup(make_topology()))
    exact(ids)
    assert exact.last_plan is not None and exact.last_plan.peak <= plan.peak


def test_a_registered_policy_composes(highest: str) -> None:
    placement = isoload.place(torch.ones(1, EXPERTS), make_topology(), slots_per_rank=6, num_shared=1)
    balancer = isoload.Balancer(
        placement, 0, "waterfill", isoload.LocalGroup(make_topology()), shared_columns=False, routed=highest
    )
    slots = balancer(draw_ids(4))
    assert balancer.last_plan is not None
    assert torch.equal(isoload.count(torch.cat(slots), placement.num_slots), balancer.last_plan.quota)


# --- An engine's hook, as those of SGLang and vLLM: one file.

ENGINE = """
import torch

def to_physical(topk_ids):
    return topk_ids * 0
"""
HOOK = """
import torch
import toy_engine

from isoload import Balancer, Placement, Topology
from isoload.engines.seams import PlugIn, Seam
from isoload.engines.settings import Variable

SLOTS = torch.tensor([[0, 1, 2, 3, 0, 1, 4, 5]])
SEAM = Seam("toy_engine.to_physical", "replace", ("(topk_ids)",), "1.0", "balances")

def to_physical(topk_ids):
    return LAYER(topk_ids)

def start(settings):
    global LAYER
    LAYER = Balancer(Placement(SLOTS, Topology(2), 6), 0, settings.policies_for(shared=False)["decode"], tokens="same")

def check():
    slots = to_physical(torch.zeros(8, 1, dtype=torch.int64))
    return torch.bincount(slots.flatten() // 4).tolist() == [4, 4]

def hook(seams, settings):
    for seam in seams:
        setattr(toy_engine, seam.name, globals()[seam.name])

SWITCH = Variable("TOY_BALANCED", "0")
PLUG_IN = PlugIn("Toy", SWITCH, start, {"to_physical": check}, hook, [SEAM])
"""


def test_an_engine_hook_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("toy_engine", ENGINE), ("toy_hook", HOOK)):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    engine, hook = import_module("toy_engine"), import_module("toy_hook")
    ids = torch.tensor([[0], [0], [2], [4]])
    hook.PLUG_IN.attach_or_leave()  # switched off
    assert engine.to_physical(ids).tolist() == [[0]] * 4
    monkeypatch.setenv("TOY_BALANCED", "1")
    hook.PLUG_IN.attach_or_leave()
    slots = engine.to_physical(ids)
    assert torch.equal(hook.SLOTS[0][slots], ids) and (slots // 4).flatten().bincount().tolist() == [2, 2]
    monkeypatch.setattr(engine, "to_physical", lambda topk_ids, layer: topk_ids)
    (fault,) = hook.PLUG_IN.attach(Settings.read({}))
    assert fault == "toy_engine.to_physical must take (topk_ids) (as in 1.0), got (topk_ids, layer)"
