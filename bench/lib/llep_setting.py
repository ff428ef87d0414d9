"""The settings of LLEP's experiments (papers/003, section 4): layer shapes, concentrations, options, and a scale."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import isoload
from isoload.policies import Policy, make_policy
from isoload.times.exchanges import DEEPSEEK_V3_FP8
from isoload.weights.experts import ExpertWeights
from workloads import Workload, make_workload

SHARES, NUM_HOT = (0.3, 0.5, 0.8, 0.95), (1, 4, 16)
# A row's name, whose plan it is.
POLICIES = {"EP": "none", "LLEP": "llep", "LLEP by experts": "llep", "spill_cost": "spill_cost"}
TIMED = ("EP", "LLEP")
SWEPT = (*TIMED, "LLEP by experts")  # over lambda, which is what the two differ in


@dataclass(frozen=True)
class Shape:
    """A layer at full size: E experts of width H and intermediate width I, top-K, tokens per rank."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    tokens: int


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("gpt-oss-120b", 2880, 2880, 128, 4, 32768),
        Shape("DeepSeek-V3", 7168, 2048, 256, 8, 16384),
        Shape("Kimi-K2", 7168, 2048, 384, 8, 16384),
        Shape("Figure 1", 2048, 2048, 128, 4, 32768),  # tokens and intermediate width are not in print
    )
}


@dataclass(frozen=True)
class Scale:
    """By what a machine divides tokens (and with them chunks) and widths; experts, ranks and top-K stay."""

    tokens: int = 64
    width: int = 16
    dtype: torch.dtype = torch.float32


FULL = Scale(1, 1, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One experiment: a share of the tokens goes to num_hot experts. Sizes are those of the paper, before scaling.

    repeat: a hot token names the hot experts with all its K copies, as the published benchmark does; else its experts
    are distinct. share None is balanced routing: every expert has the same load, to one copy.
    """

    shape: Shape
    scale: Scale
    share: float | None = 0.8
    num_hot: int = 4
    repeat: bool = False
    ranks: int = 8
    spare_slots: int = 2
    capacity: float = 1.0
    threshold: float = 1.3
    min_chunk: int = 1024

    @property
    def tokens(self) -> int:
        """Of a rank, scaled."""
        return self.shape.tokens // self.scale.tokens

    @property
    def hidden(self) -> int:
        return self.shape.hidden // self.scale.width

    @property
    def intermediate(self) -> int:
        return self.shape.intermediate // self.scale.width

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.intermediate * self.scale.dtype.itemsize

    @property
    def workload(self) -> Workload:
        how: dict[str, Any] = {"share": self.share, "num_hot": self.num_hot, "repeat": self.repeat}
        return make_workload(
            "balanced" if self.share is None else "concentrated",
            num_ranks=self.ranks,
            num_experts=self.shape.experts,
            top_k=self.shape.top_k,
            tokens_per_rank=self.tokens,
            **({} if self.share is None else how),
        )

    def topk_ids(self, device: torch.device) -> list[Tensor]:
        """[R][T, K] int64."""
        return [ids.to(device) for ids in self.workload.topk_ids(0)]

    @cached_property
    def placement(self) -> isoload.Placement:
        """The experts in order, one slot each, then the spare slots; all ranks in one node."""
        size = self.shape.experts // self.ranks + self.spare_slots
        topology = isoload.Topology(self.ranks, self.ranks)
        experts = torch.ones(1, self.shape.experts)
        return isoload.place(experts, topology, size, placer="trivial", spare_slots=self.spare_slots)

    def policy(self, name: str) -> Policy:
        """With chunks, and what an import costs in copies, scaled like the tokens."""
        llep = {
            "capacity": self.capacity,
            "threshold": self.threshold,
            "min_chunk": max(1, self.min_chunk // self.scale.tokens),
        }
        options: dict[str, dict[str, Any]] = {
            "LLEP": llep,
            "LLEP by experts": {**llep, "measure": "expert"},
            "spill_cost": {
                "expert_bytes": DEEPSEEK_V3_FP8 // self.scale.tokens,
                "min_chunk": max(1, 256 // self.scale.tokens),
            },
        }
        return make_policy(POLICIES[name], options.get(name, {}))

    def weights(self, num_slots: int, device: torch.device) -> ExpertWeights:
        """Random stacks of num_slots experts."""
        draw = torch.Generator(device).manual_seed(0)
        sizes = num_slots, self.hidden, self.intermediate
        return ExpertWeights.random(*sizes, generator=draw, dtype=self.scale.dtype, device=device)

    def rows(self, num_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Random rows [N, H] and gate weights [N, K]."""
        draw = torch.Generator(device).manual_seed(1)
        rows = torch.randn(num_rows, self.hidden, generator=draw, device=device).to(self.scale.dtype)
        weights = torch.rand(num_rows, self.shape.top_k, generator=draw, device=device).softmax(-1)
        return rows, weights

    def facts(self) -> dict[str, Any]:
        """What every row of the results says of its setting."""
        return {
            "shape": self.shape.name,
            "form": "balanced" if self.share is None else "repeated" if self.repeat else "distinct",
            "share": self.share,
            "num_hot": self.num_hot,
            "ranks": self.ranks,
            "experts": self.shape.experts,
            "tokens_per_rank": self.tokens,
            "hidden": self.hidden,
            "intermediate": self.intermediate,
            "tokens_scale": self.scale.tokens,
            "width_scale": self.scale.width,
            "capacity": self.capacity,
            "threshold": self.threshold,
            "spare_slots": self.spare_slots,
        }
