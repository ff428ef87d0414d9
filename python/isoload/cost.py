"""Cost model: what a layer takes on every rank, in seconds and bytes (papers/003, Eq. 3 and 4), and break-even.

Predictions from constants, no measurement: they rank plans, they do not replace a bench.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from math import ceil, inf
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from isoload.topology import Topology

DEFAULT_BANDWIDTHS = (
    400.0,
    50.0,
)  # GB/s of one rank, inside a node and between nodes: NVLink 4, one 400 Gb/s NIC
DEEPSEEK_V3_FP8 = 3 * 7168 * 2048  # bytes of an expert


@dataclass(frozen=True)
class CostModel:
    """Constants of one kind of expert on one kind of rank.

    The default is arithmetic for DeepSeek-V3's experts in FP8 on an H100: 600 TFLOP/s from 128 tokens on, below that
    the time to read the weights at 3.35 TB/s. Replace it by numbers of a bench, see :func:`read_cost`.

    hidden, intermediate  D and H of an expert, in elements
    matrices              weights per expert, each D x H: 3 with a gate
    weight_bytes          bytes of a weight element; expert_bytes = matrices * D * H * weight_bytes
    token_bytes           bytes of an activation element
    overhead_us           of every expert that has tokens (kernel launches), in microseconds
    token_us              ((tokens, microseconds per token), ...): per-token time by size of the GEMM, ascending sizes;
                          between two sizes linear in log(tokens), outside the nearest
    """

    hidden: int = 7168
    intermediate: int = 2048
    matrices: int = 3
    weight_bytes: float = 1.0
    token_bytes: float = 2.0
    overhead_us: float = 5.0
    token_us: tuple[tuple[int, float], ...] = ((1, 13.1), (8, 1.64), (64, 0.205), (128, 0.147))

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "matrices", "weight_bytes", "token_bytes"):
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name} must be a positive number, got {getattr(self, name)}")
        if not 0 <= self.overhead_us < inf:
            raise ValueError(f"overhead_us must not be negative, got {self.overhead_us}")
        points = tuple((int(size), float(us)) for size, us in self.token_us)
        object.__setattr__(self, "token_us", points)
        sizes = [size for size, _ in points]
        if not points or sizes != sorted(set(sizes)) or sizes[0] < 1 or min(us for _, us in points) <= 0:
            raise ValueError(f"token_us must be pairs of ascending sizes and positive times, got {points}")

    @property
    def expert_bytes(self) -> float:
        return self.matrices * self.hidden * self.intermediate * self.weight_bytes


def read_cost(path: str | Path) -> CostModel:
    """A cost model from a JSON object with fields of :class:`CostModel`; what it lacks keeps its default.

    Raises:
        ValueError: no such file, no JSON object, an unknown field, or a value out of range.
    """
    try:
        given = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"cost file must be a JSON object, got {path}: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"cost file must be a JSON object, got {type(given).__name__} in {path}")
    known = [field.name for field in fields(CostModel)]
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"cost file must have fields of {', '.join(known)}, got {unknown[0]!r}")
    return CostModel(**given)


def rank_seconds(quota: Tensor, num_ranks: int, model: CostModel) -> Tensor:
    """[..., R] float64 compute time of every rank: overhead + tokens x time per token, over its slots (Eq. 3)."""
    copies = quota.reshape(*quota.shape[:-1], num_ranks, -1).numpy().astype(np.float64)
    sizes, times = np.array(model.token_us).T
    per_token = np.interp(np.log(np.maximum(copies, 1)), np.log(sizes), times)
    return torch.from_numpy(((copies > 0) * model.overhead_us + copies * per_token).sum(-1) * 1e-6)


def rank_bytes(quota: Tensor, slot_to_expert: Tensor, num_ranks: int, model: CostModel) -> Tensor:
    """[..., R] float64 memory of every rank: inputs, weights and outputs of the experts it holds (Eq. 4).

    Weights count for every filled slot, borrowed experts included.
    """
    shape = (*quota.shape[:-1], num_ranks, -1)
    copies, held = quota.reshape(shape).sum(-1).double(), (slot_to_expert >= 0).reshape(shape).sum(-1)
    per_copy = (model.hidden + model.intermediate) * model.token_bytes
    return copies * per_copy + held.double() * model.expert_bytes


def imports(slot_to_expert: Tensor, home_slot: Tensor, spare_slots: int, topology: Topology) -> Tensor:
    """[..., R, 2] int64 experts in every rank's spare slots: borrowed inside its node, and from other nodes.

    Args:
        slot_to_expert: [..., P] of a plan; home_slot: [..., E] of its placement.
    """
    ranks, size = topology.num_ranks, slot_to_expert.shape[-1] // topology.num_ranks
    borrowed = slot_to_expert.reshape(*slot_to_expert.shape[:-1], ranks, size)[..., size - spare_slots :]
    homes = home_slot.gather(-1, borrowed.clamp(min=0).flatten(-2).long()).view(borrowed.shape)
    node = torch.arange(ranks, device=homes.device).unsqueeze(-1) // topology.ranks_per_node
    far = homes // size // topology.ranks_per_node != node
    filled = borrowed >= 0
    return torch.stack([(filled & ~far).sum(-1), (filled & far).sum(-1)], -1)


def import_seconds(imported: Tensor, topology: Topology, model: CostModel) -> Tensor:
    """[..., R] float64 time in which every rank receives its borrowed weights, if nothing hides it."""
    return imported.double() @ (model.expert_bytes / _bytes_per_second(topology))


def exchange_seconds(rows: Tensor, topology: Topology, model: CostModel) -> Tensor:
    """[..., R] float64 time of dispatch and combine: the larger of what a rank sends and receives, both ways.

    Args:
        rows: [..., R, R] rows that source sends to rank; those to itself are free.
    """
    index = torch.arange(topology.num_ranks)
    node = index // topology.ranks_per_node
    same = node.unsqueeze(0) == node.unsqueeze(1)
    sent = rows.double() * (index.unsqueeze(0) != index.unsqueeze(1))
    inside, outside = (1 / _bytes_per_second(topology)).unbind()
    per_link = torch.where(same, inside, outside)
    busy = torch.maximum((sent * per_link).sum(-1), (sent * per_link).sum(-2))
    return 2 * busy * model.hidden * model.token_bytes


def _bytes_per_second(topology: Topology) -> Tensor:
    """[2] float64, inside a node and between nodes; DEFAULT_BANDWIDTHS where the topology has none."""
    return torch.tensor(topology.bandwidths or DEFAULT_BANDWIDTHS, dtype=torch.float64) * 1e9


def break_even(expert_bytes: float, bandwidth: float, token_us: float) -> int:
    """Tokens from which borrowing an expert pays: its transfer takes as long as computing so many of them.

    Args:
        expert_bytes: bytes of one expert's weights.
        bandwidth: GB/s of the link it travels.
        token_us: microseconds in which a rank computes one token of an expert, in a large GEMM.

    Returns:
        expert_bytes / bandwidth / token_us, rounded up. A transfer that is hidden behind compute pays earlier.

    Raises:
        ValueError: naming the argument, the rule and the value.
    """
    for name, value in (("expert_bytes", expert_bytes), ("bandwidth", bandwidth), ("token_us", token_us)):
        if not 0 < value < inf:
            raise ValueError(f"{name} must be a positive number, got {value}")
    return ceil(expert_bytes / (bandwidth * 1e3) / token_us)
