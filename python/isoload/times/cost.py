"""Cost model: what a layer takes on every rank, in seconds and bytes (papers/003, Eq. 3 and 4), and break-even.

Predictions from constants, no measurement: they rank plans, they do not replace a bench.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import ceil, inf
from numbers import Real
from pathlib import Path
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from isoload.files import MAX_NOTES, parse_json, read_text
from isoload.topology import Topology, as_topology

DEFAULT_BANDWIDTHS = (400.0, 50.0)  # GB/s of a rank, inside a node and between: NVLink 4, one 400 Gb/s NIC
MOST = 2**53  # of any constant: products of a few stay finite
DEEPSEEK_V3_FP8 = 3 * 7168 * 2048  # bytes of an expert


@dataclass(frozen=True)
class CostModel:
    """Constants of one kind of expert on one kind of rank.

    The default is arithmetic for DeepSeek-V3's experts in FP8 on an H100: 600 TFLOP/s from 128 tokens on, below that
    the time to read the weights at 3.35 TB/s. Replace it by what bench/bench_cost.py measures, see :func:`read_cost`.
    """

    hidden: int = 7168  # D of an expert, in elements
    intermediate: int = 2048  # H
    matrices: int = 3  # of weights per expert, each D x H: 3 with a gate
    weight_bytes: float = 1.0  # of a weight element
    token_bytes: float = 2.0  # of an activation element
    overhead_us: float = 5.0  # of every expert that has tokens (kernel launches)
    # Per-token time by tokens of the GEMM, ascending; between two sizes linear in log(tokens), outside the nearest.
    token_us: tuple[tuple[int, float], ...] = ((1, 13.1), (8, 1.64), (64, 0.205), (128, 0.147))
    bandwidths: tuple[float, float] = DEFAULT_BANDWIDTHS  # of one rank, where the topology has none
    source: str = "arithmetic for DeepSeek-V3's experts in FP8 on an H100"  # of the constants, in words

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "matrices", "weight_bytes", "token_bytes", "overhead_us"):
            value, free = getattr(self, name), name == "overhead_us"
            if not _is_positive(value) and not (free and value == 0):
                rule = f"{'0 or ' * free}a positive number below 2^53"
                raise ValueError(f"{name} must be {rule}, got {value!r:.60}")
        if not isinstance(self.source, str):
            raise ValueError(f"source must be text, got {self.source!r}")
        if not _are_numbers(self.bandwidths) or len(self.bandwidths) != 2:
            raise ValueError(f"bandwidths must be two positive numbers, got {self.bandwidths!r}")
        object.__setattr__(self, "bandwidths", (float(self.bandwidths[0]), float(self.bandwidths[1])))
        object.__setattr__(self, "token_us", _points(self.token_us))

    @property
    def expert_bytes(self) -> float:
        return self.matrices * self.hidden * self.intermediate * self.weight_bytes

    @property
    def large_token_us(self) -> float:
        """Microseconds per token in the largest GEMM of token_us."""
        return self.token_us[-1][1]

    @property
    def break_even(self) -> tuple[int, int]:
        """Tokens from which borrowing an expert pays, inside a node and between nodes: :func:`break_even`."""
        near, far = self.bandwidths
        size, us = self.expert_bytes, self.large_token_us
        return break_even(size, near, us), break_even(size, far, us)


def _is_positive(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < value < MOST  # type: ignore[operator]


def _are_numbers(values: object) -> TypeGuard[Sequence[float]]:
    return isinstance(values, (list, tuple)) and all(map(_is_positive, values))


def _points(given: object) -> tuple[tuple[int, float], ...]:
    """token_us as checked pairs."""
    pairs = list(given) if isinstance(given, (list, tuple)) else []
    points = [(pair[0], float(pair[1])) for pair in pairs if _are_numbers(pair) and len(pair) == 2]
    sizes = [size for size, _ in points]
    whole = all(isinstance(size, int) for size in sizes)
    if not points or len(points) < len(pairs) or not whole or sizes != sorted(set(sizes)):
        raise ValueError(f"token_us must be pairs of ascending sizes and positive times, got {given!r}")
    return tuple((int(size), us) for size, us in points)


def read_cost(path: str | Path) -> CostModel:
    """A cost model from a JSON object with fields of :class:`CostModel`; missing fields keep their defaults.

    bench/bench_cost.py measures such a file.

    Raises:
        ValueError: no such file, no JSON object, an unknown field, or a value out of range.
    """
    try:
        given = parse_json(read_text(Path(path), MAX_NOTES))
    except (OSError, ValueError) as error:
        raise ValueError(f"cost file must be a JSON object, got {path}: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"cost file must be a JSON object, got {type(given).__name__} in {path}")
    known = [field.name for field in fields(CostModel)]
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"cost file must have fields of {', '.join(known)}, got {unknown[0]!r}")
    return CostModel(**{"source": Path(path).name, **given})


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


def lent(slot_to_expert: Tensor, home_slot: Tensor, spare_slots: int, topology: Topology | int) -> Tensor:
    """[..., R, R] int64 experts that each rank sends to each rank's spare slots.

    slot_to_expert: [..., P] of a plan; home_slot: [..., E] of its placement.
    """
    ranks = as_topology(topology).num_ranks
    size = slot_to_expert.shape[-1] // ranks
    borrowed = slot_to_expert.reshape(*slot_to_expert.shape[:-1], ranks, size)[..., size - spare_slots :]
    homes = home_slot.gather(-1, borrowed.clamp(min=0).flatten(-2).long()).view(borrowed.shape) // size
    lenders = torch.arange(ranks, device=homes.device).view(ranks, 1, 1)
    return ((homes.unsqueeze(-3) == lenders) & (borrowed >= 0).unsqueeze(-3)).sum(-1)


def import_seconds(lent: Tensor, topology: Topology | int, model: CostModel) -> Tensor:
    """[..., R] float64 time of borrowed weights, if nothing hides it: the larger of what a rank receives and sends.

    lent: [..., R, R] experts whose weights one rank (row) sends to another (column).
    """
    return _busy(lent, topology, model) * model.expert_bytes


def slots_in_time(copies: int, experts: int, topology: Topology | int, model: CostModel) -> int:
    """Experts whose weights can come to a rank while it computes (papers/004, section 3.2): window x bandwidth / bytes.

    Args:
        copies: that a rank computes in a layer.
        experts: over which they are spread evenly.
        topology: of one node, or the bandwidth is that between nodes.
    """
    for name, value in (("copies", copies), ("experts", experts)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a number of at least 1, got {value!r}")
    quota = torch.full((experts,), copies // experts)
    quota[: copies % experts] += 1
    window = float(rank_seconds(quota, 1, model))
    topology = as_topology(topology)
    near, far = topology.bandwidths or model.bandwidths
    bandwidth = near if topology.num_nodes == 1 else far
    return int(window * bandwidth * 1e9 / model.expert_bytes)


def exchange_seconds(rows: Tensor, topology: Topology | int, model: CostModel) -> Tensor:
    """[..., R] float64 time of dispatch and combine: the larger of what a rank sends and receives, both ways.

    rows: [..., R, R] that source sends to rank; those to itself are free.
    """
    return 2 * _busy(rows, topology, model) * model.hidden * model.token_bytes


def _busy(sent: Tensor, topology: Topology | int, model: CostModel) -> Tensor:
    """[..., R] float64 seconds per byte of what rank sends to rank: the larger of a rank's sum and its column's."""
    topology = as_topology(topology)
    index = torch.arange(topology.num_ranks)
    node = index // topology.ranks_per_node
    near, far = topology.bandwidths or model.bandwidths
    inside = (node.unsqueeze(0) == node.unsqueeze(1)).double()
    per_link = 1e-9 / near * inside + 1e-9 / far * (1 - inside)
    busy = sent.double() * per_link * (index.unsqueeze(0) != index.unsqueeze(1))
    return torch.maximum(busy.sum(-1), busy.sum(-2))


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
