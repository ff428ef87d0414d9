"""One random problem from one seed: ranks, a placement that no placer would make, a policy, and tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import isoload
from isoload import POLICIES

Rng = np.random.Generator

# Options beside the defaults; whatever a policy's own rules, small batches must come within its reach.
OPTIONS: dict[str, dict[str, list[Any]]] = {
    "static": {"seed": [0, 1, 9]},
    "dynamic": {"seed": [0, 1], "step": [0, 3]},
    "exact": {"tolerance": [0.0, 0.0, 0.1], "budget": [None, None, 0, 2], "objective": ["spread", "local"]},
    "joint": {"tolerance": [0.0, 0.1], "budget": [None, 0], "objective": ["spread", "local"]},
    "lp": {"precision": ["float32", "float64"]},
    "waterfill": {"routed": ["exact", "even", "none"]},
    "waterfill_sampled": {"rule": ["static", "dynamic", "blog"]},
    "llep": {
        "min_chunk": [1, 3], "threshold": [1.0, 1.3], "capacity": [1.0, 1.2], "split_by": ["exact", "lp"],
        "within": ["all", "node"],
    },
    "spill_cost": {
        "min_chunk": [1, 3], "expert_bytes": [1.0, 1e6], "split_by": ["exact", "lp"],
        "within": ["all", "node"],
    },
    "libra": {"alpha": [0.0, 0.5, 1.0], "tolerance": [0.0, 0.1], "slots": [None, 1]},
    "libra_published": {"alpha": [0.0, 0.5, 1.0], "tolerance": [0.0, 0.1], "slots": [None, 1]},
    "hedge": {"slots": [None, 1], "within": ["all", "node"]},
    "grace": {"locality": [True, False]},
}  # fmt: skip


NEED_SHARED = ("shared_local", "waterfill", "waterfill_sampled", "joint")
# It plans for experts in order without replicas alone, and has tests of its own.
NAMES = [name for name in POLICIES if name != "llep_published"]


@dataclass(frozen=True)
class FuzzCase:
    """ids [R][T, K] routed experts of every rank's tokens, -1 = absent; layer: position in both placements.

    after: a placement of the same shape, to which the layer moves.
    """

    seed: int
    placement: isoload.Placement
    after: isoload.Placement
    layer: int
    policy: str
    options: dict[str, Any]
    ids: list[Tensor]

    @property
    def topology(self) -> isoload.Topology:
        return self.placement.topology

    @property
    def num_ranks(self) -> int:
        return self.topology.num_ranks

    def full_ids(self) -> list[Tensor]:
        """[R][T, K + num_shared]: every token with a routed choice needs all shared experts."""
        routed, experts = self.placement.num_routed, self.placement.num_experts
        shared = torch.arange(routed, experts)
        return [torch.cat([i, torch.where((i >= 0).any(1, keepdim=True), shared, -1)], 1) for i in self.ids]

    def loads(self) -> np.ndarray:
        """[R, E] int32, counted here."""
        counts = np.zeros((self.num_ranks, self.placement.num_experts), dtype=np.int32)
        for rank, ids in enumerate(self.full_ids()):
            for expert in ids.flatten().tolist():
                counts[rank, expert] += expert >= 0
        return counts

    def __str__(self) -> str:
        p, t = self.placement, self.topology
        slots = p.slot_to_expert[self.layer].view(t.num_ranks, -1).tolist()
        return (
            f"policy {self.policy} {self.options}, {t.num_ranks} ranks ({t.ranks_per_node} per node), alive {t.alive}, "
            f"speeds {t.speeds}, {p.num_routed}+{p.num_shared} experts, {p.spare_slots} spare, slots {slots}, home "
            f"{p.home_slot[self.layer].tolist()}, tokens {[len(i) for i in self.ids]}"
        )


def draw_case(seed: int, min_ranks: int = 1, max_ranks: int = 6) -> FuzzCase:
    """The same case on every machine and in every process."""
    rng = np.random.default_rng(seed)
    policy = str(rng.choice(NAMES))
    borrows = POLICIES[policy].borrows
    topology = draw_topology(
        rng, (min_ranks, max_ranks), with_speeds=not borrows and not policy.startswith("lp")
    )
    experts = int(rng.integers(1, 13))
    shared = int(rng.choice([1, 1, 2] if policy in NEED_SHARED else [0, 0, 1, 2]))
    spare = int(rng.integers(1, 4)) if borrows else int(rng.choice([0, 0, 1]))
    spare = min(spare, experts)
    least = -(-experts // len(topology.live_ranks))
    sizes = int(rng.integers(least, least + 3)), shared, spare
    placement, after = (draw_placement(rng, topology, experts, *sizes) for _ in range(2))
    options = {name: values[rng.integers(len(values))] for name, values in OPTIONS.get(policy, {}).items()}
    return FuzzCase(
        seed,
        placement,
        after,
        int(rng.integers(placement.num_layers)),
        policy,
        {
            name: value
            for name, value in options.items()
            if rng.random() < 0.7 or name in ("min_chunk", "threshold")
        },
        draw_ids(rng, topology.num_ranks, experts),
    )


def draw_topology(rng: Rng, least_most: tuple[int, int], with_speeds: bool) -> isoload.Topology:
    ranks = int(rng.integers(least_most[0], least_most[1] + 1))
    per_node = int(rng.choice([n for n in range(1, ranks + 1) if ranks % n == 0]))
    alive = speeds = None
    if rng.random() < 0.3:
        alive = rng.random(ranks) < 0.7
        alive[rng.integers(ranks)] = True
    if with_speeds and rng.random() < 0.25:
        speeds = rng.choice([0.25, 0.5, 0.9, 1.0, 1.7, 3.0], ranks).tolist()
    return isoload.Topology(ranks, per_node, speeds=speeds, alive=None if alive is None else alive.tolist())


def draw_placement(
    rng: Rng, topology: isoload.Topology, experts: int, resident: int, shared: int, spare: int
) -> isoload.Placement:
    """Two layers: every expert somewhere, any of them again anywhere (twice on a rank, too), some slots absent; homes
    on any rank that holds the expert."""
    ranks, live = topology.num_ranks, topology.live_ranks
    size, total = resident + shared + spare, experts + shared
    slots = np.full((2, ranks, size), -1)
    home = np.zeros((2, total), dtype=np.int64)
    for layer in range(2):
        places = rng.permutation([(rank, j) for rank in live for j in range(resident)])
        held = np.concatenate([rng.permutation(experts), rng.integers(0, experts, len(places) - experts)])
        for n, ((rank, j), expert) in enumerate(zip(places, held, strict=True)):
            if n < experts or rng.random() < 0.6:
                slots[layer, rank, j] = expert
        slots[layer, live, resident : resident + shared] = np.arange(experts, total)
        for expert in range(total):
            firsts = [
                r * size + int((row == expert).argmax())
                for r, row in enumerate(slots[layer])
                if expert in row
            ]
            home[layer, expert] = firsts[0] if rng.random() < 0.5 else rng.choice(firsts)
    return isoload.Placement(
        torch.from_numpy(slots.reshape(2, -1)), topology, total, torch.from_numpy(home), spare, shared
    )


def draw_ids(rng: Rng, ranks: int, experts: int) -> list[Tensor]:
    """Skewed choices, distinct in a token; some absent, some ranks without tokens."""
    width = int(rng.integers(1, min(experts, 4) + 1))
    weights = 1.0 / np.arange(1, experts + 1) ** rng.choice([0.0, 1.0, 2.0])
    weights = rng.permutation(weights / weights.sum())
    absent = rng.choice([0.0, 0.1, 0.6])
    ids = []
    for _ in range(ranks):
        tokens = int(rng.choice([0, 1, 3, 8, 20]))
        rows = [rng.choice(experts, width, replace=False, p=weights) for _ in range(tokens)]
        drawn = np.array(rows, dtype=np.int64).reshape(tokens, width)
        ids.append(torch.from_numpy(np.where(rng.random(drawn.shape) < absent, -1, drawn)))
    return ids
