"""Routers: from logits to each token's experts and gate weights. Ties go to the lowest expert on every device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isoload.checks import values_readable
from isoload.layer.checks import infers_shapes
from isoload.wording import not_one_of

Style = Literal["softmax_topk", "topk_softmax", "sigmoid"]
TINY = 1e-20  # avoids 0 / 0 when a token whose scores are all 0 is renormalised


class Routing(NamedTuple):
    """Choices of a router: ``topk_ids`` [T, K] int64, distinct within a token; ``weights`` [T, K] float32."""

    topk_ids: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Router:
    """Rule by which experts are chosen and weighted.

    Args:
        num_experts: number E of logical experts.
        top_k: number K of experts per token.
        style: "softmax_topk": the K largest of softmax(logits) (Qwen3-MoE, OLMoE; Mixtral renormalises).
            "topk_softmax": softmax over the K largest logits (gpt-oss). "sigmoid": the K largest of sigmoid(logits) +
            score_bias in the best groups; weights are the unbiased scores (DeepSeek-V3).
        renormalise: whether to divide a token's weights by their sum.
        routed_scaling_factor: factor of all weights, applied last.
        num_groups, top_groups: for "sigmoid": a token uses the top_groups groups of neighbouring experts with the
            largest sum of the two best biased scores.
    """

    num_experts: int
    top_k: int
    style: Style = "softmax_topk"
    renormalise: bool = False
    routed_scaling_factor: float = 1.0
    num_groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        if self.style not in get_args(Style):
            raise ValueError(not_one_of("style", get_args(Style), self.style))
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k must be in 1..num_experts={self.num_experts}, got {self.top_k}")
        if self.renormalise and self.style == "topk_softmax":
            raise ValueError(
                "renormalise must be False for topk_softmax, whose weights add up to 1, got True"
            )
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ValueError(f"num_groups must divide num_experts={self.num_experts}, got {self.num_groups}")
        if self.num_groups > 1 and self.style != "sigmoid":
            raise ValueError(f"num_groups must be 1 for style {self.style}, got {self.num_groups}")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(f"top_groups must be in 1..num_groups={self.num_groups}, got {self.top_groups}")
        if (allowed := self.top_groups * self.num_experts // self.num_groups) < self.top_k:
            raise ValueError(
                f"top_groups must leave top_k={self.top_k} experts to choose from, got {allowed}"
            )

    def __call__(self, logits: Tensor, score_bias: Tensor | None = None) -> Routing:
        """Return choices and weights [T, K] in max(float32, dtype) for logits [T, E] and score_bias [E] ("sigmoid")."""
        self._check(logits, score_bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.style == "topk_softmax":
            topk_ids = lowest_first_topk(logits, self.top_k)
            weights = logits.gather(1, topk_ids).softmax(dim=1)
        else:
            scores = logits.sigmoid() if self.style == "sigmoid" else logits.softmax(dim=1)
            topk_ids = lowest_first_topk(self._choosable(scores, score_bias), self.top_k)
            weights = scores.gather(1, topk_ids)
        if self.renormalise:
            weights = weights / (weights.sum(dim=1, keepdim=True) + TINY)
        return Routing(topk_ids, weights * self.routed_scaling_factor)

    def _choosable(self, scores: Tensor, score_bias: Tensor | None) -> Tensor:
        """Return the scores [T, E] that determine the choice: biased, and -inf outside the best groups."""
        scores = scores.detach() if score_bias is None else scores.detach() + score_bias.detach()
        if self.top_groups == self.num_groups:
            return scores
        members = scores.view(len(scores), self.num_groups, self.num_experts // self.num_groups)
        pairs = members.topk(min(2, members.shape[2]), dim=2).values.sum(dim=2)  # [T, groups]
        best = lowest_first_topk(pairs, self.top_groups)
        allowed = torch.zeros_like(pairs, dtype=torch.bool).scatter_(1, best, True)
        return members.masked_fill(~allowed[:, :, None], -torch.inf).view_as(scores)

    def _check(self, logits: Tensor, score_bias: Tensor | None) -> None:
        if logits.dim() != 2 or logits.shape[1] != self.num_experts or not logits.is_floating_point():
            raise ValueError(
                f"logits must be [T, {self.num_experts}] floating point, got {list(logits.shape)} {logits.dtype}"
            )
        if score_bias is not None and self.style != "sigmoid":
            raise ValueError(f"score_bias must be None for style {self.style}, got a tensor")
        if score_bias is not None and list(score_bias.shape) != [self.num_experts]:
            raise ValueError(f"score_bias must be [{self.num_experts}], got {list(score_bias.shape)}")
        if values_readable(logits):
            bad = logits[logits.isnan() | (logits == torch.inf)]
            if len(bad) and not infers_shapes():
                raise ValueError(f"logits must not be nan or inf, got {float(bad[0].detach())}")


class Gate(nn.Module):
    """Projection to logits, followed by a router.

    Args:
        router: rule by which experts are chosen.
        weight: [E, H]. A Parameter keeps its requires_grad, as does the bias.
        bias: [E] added to the logits (gpt-oss), or None.
        score_bias: [E] for style "sigmoid", or None. A buffer, which is set by loading and not by gradients.
        project_in_fp32: whether the projection is computed in float32 (DeepSeek-V3) or in the weight's dtype.
    """

    bias: nn.Parameter | None
    score_bias: Tensor | None

    def __init__(
        self,
        router: Router,
        weight: Tensor,
        bias: Tensor | None = None,
        score_bias: Tensor | None = None,
        project_in_fp32: bool = False,
    ) -> None:
        super().__init__()
        if weight.dim() != 2 or len(weight) != router.num_experts:
            raise ValueError(f"weight must be [{router.num_experts}, H], got {list(weight.shape)}")
        if bias is not None and list(bias.shape) != [router.num_experts]:
            raise ValueError(f"bias must be [{router.num_experts}], got {list(bias.shape)}")
        self.router, self.project_in_fp32 = router, project_in_fp32
        self.weight = _as_parameter(weight)
        self.register_parameter("bias", None if bias is None else _as_parameter(bias))
        self.register_buffer("score_bias", score_bias)

    def forward(self, rows: Tensor) -> Routing:
        """Return the choices and gate weights [T, K] of every token, for rows [T, H]."""
        dtype = self.weight.dtype
        if self.project_in_fp32:
            dtype = torch.promote_types(dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        return self.router(F.linear(rows.to(dtype), self.weight.to(dtype), bias), self.score_bias)


def _as_parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, tensor.requires_grad if isinstance(tensor, nn.Parameter) else True)


def given_choices(topk_ids: Tensor, weights: Tensor, num_experts: int, repeats: bool = False) -> Routing:
    """Check choices that were made elsewhere, ids and weights [T, K]; return them as int64 and max(float32, dtype)."""
    if topk_ids.dim() != 2 or topk_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"topk_ids must be [T, K] int32 or int64, got {list(topk_ids.shape)} {topk_ids.dtype}"
        )
    if weights.shape != topk_ids.shape or not weights.is_floating_point():
        raise ValueError(
            f"weights must be {list(topk_ids.shape)} floating point, got {list(weights.shape)} {weights.dtype}"
        )
    topk_ids = topk_ids.to(torch.int64)
    if values_readable(topk_ids):
        outside = topk_ids[(topk_ids < -1) | (topk_ids >= num_experts)]
        if len(outside):
            raise ValueError(f"topk_ids must be in -1..{num_experts - 1}, got {int(outside[0])}")
    if values_readable(topk_ids) and not repeats:
        ordered = topk_ids.sort(dim=1).values
        repeated = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).nonzero()
        if len(repeated):
            token, k = repeated[0].tolist()
            raise ValueError(
                f"topk_ids must not repeat an expert within a token, got expert {int(ordered[token, k])} "
                f"twice in token {token}"
            )
    return Routing(topk_ids, weights.to(torch.promote_types(weights.dtype, torch.float32)))


def lowest_first_topk(scores: Tensor, k: int) -> Tensor:
    """Return the columns [T, k] of the k largest scores, ties to the lowest column, which torch.topk does not do."""
    return torch.sort(scores.detach(), dim=1, descending=True, stable=True).indices[:, :k]
