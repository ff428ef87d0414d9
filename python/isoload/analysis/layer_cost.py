"""What the layers of a replay would take by the cost model: a row per policy, from plans and routed slots."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from isoload.analysis.metrics import RoutedBatch
from isoload.placement.placement import Placement
from isoload.policies.plan import Plan
from isoload.times.cost import CostModel, exchange_seconds, import_seconds, lent, rank_bytes, rank_seconds
from isoload.topology import NOMINAL_TICKS

Floats = npt.NDArray[np.float64]


@dataclass
class CostTally:
    """Collects a policy's batches; :meth:`figures` sums them up."""

    model: CostModel
    seconds: list[Floats] = field(default_factory=list)  # [L, 3] compute, exchange, import
    memory: list[Floats] = field(default_factory=list)  # [L] bytes
    borrowed: list[Floats] = field(default_factory=list)  # [L, 2] experts, copies that they compute
    copies: list[Floats] = field(default_factory=list)  # [L] of all ranks

    def add(self, plans: list[Plan], routed: RoutedBatch, placement: Placement) -> None:
        """Adds one batch: every layer's plan, and the figures of its routed slots."""
        topology, ranks = placement.topology, placement.topology.num_ranks
        copies = torch.from_numpy(routed.slot_copies)
        slots = torch.stack([plan.slot_to_expert for plan in plans])
        slowness = 1 if topology.ticks is None else topology.ticks / NOMINAL_TICKS
        lending = lent(slots, placement.home_slot, placement.spare_slots, topology)
        parts = (
            rank_seconds(copies, ranks, self.model) * slowness,
            exchange_seconds(torch.from_numpy(routed.rank_rows), topology, self.model),
            import_seconds(lending, topology, self.model),
        )
        self.seconds.append(torch.stack([part.amax(-1) for part in parts], -1).numpy())
        self.memory.append(rank_bytes(copies, slots, ranks, self.model).amax(-1).numpy())
        spare = copies.view(len(plans), ranks, -1)[..., placement.slots_per_rank - placement.spare_slots :]
        self.borrowed.append(torch.stack([lending.sum((-1, -2)), spare.sum((-1, -2))], -1).double().numpy())
        self.copies.append(copies.sum(-1).double().numpy() / ranks)

    def figures(self) -> dict[str, Any]:
        """Means over all (batch, layer) pairs that have copies; times in microseconds."""
        seconds, memory, borrowed, copies = map(
            np.concatenate, (self.seconds, self.memory, self.borrowed, self.copies)
        )
        used = copies > 0
        parts, layer = seconds[used].mean(0) * 1e6, seconds[used].sum(-1) * 1e6
        experts, moved = borrowed[used].sum(0)
        return {
            "compute_us": float(parts[0]),  # experts of the busiest rank (Eq. 3)
            "exchange_us": float(parts[1]),  # dispatch and combine, the rank that sends or receives longest
            "import_us": float(parts[2]),  # borrowed weights, likewise, if nothing hides it
            "layer_us_mean": float(layer.mean()),  # the three after one another
            "layer_us_max": float(layer.max()),
            # Of the rank with most: inputs, outputs, weights (Eq. 4).
            "bytes_mean": float(memory[used].mean()),
            "bytes_max": float(memory[used].max()),
            "borrowed": float(experts / used.sum()),  # experts, of all ranks
            "copies_per_borrowed": float(moved / experts) if experts else None,  # that each computes
            "mean_copies": float(copies[used].mean()),  # of a rank
        }
