"""plan_waterfill: shared copies poured over the ranks' routed loads; wrapper and fake."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from isoload.ops.library import call, like, longs, op
from isoload.ops.results import WaterfillSplit

Candidates = Literal["all", "node", "visited"]
CANDIDATES: tuple[Candidates, ...] = ("all", "node", "visited")  # in the order of csrc's enum


def _fake(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch = a.copies.shape[:-2]
    return like(a.copies), longs(a.copies, *batch), longs(a.copies, *batch)


_plan_waterfill = op("plan_waterfill", _fake)


def plan_waterfill(
    copies: Tensor,
    tokens: Tensor,
    per_token: int = 1,
    ranks_per_node: int | None = None,
    candidates: Candidates = "all",
    *,
    ticks: Tensor | None = None,
    limits: Tensor | None = None,
) -> WaterfillSplit:
    """Pours the copies of the shared experts over the ranks' routed loads, up to the lowest level that holds them.

    No integer share has a lower peak ("all" and "node" end with ``peak == bound``). Every rank keeps what fits
    under the level, so no fewer copies could move. Of those that move as many as possible go where their source
    sends routed copies anyway, at most as many, and where it can choose within 3/4 of them (so many tokens there are
    about); then inside the node; then anywhere.
    Generalises Waterfill (papers/001) to integers and to whole batches without sampling.

    Args:
        copies: [R, R] or [L, R, R] int32 routed copies that source s sends to rank d, R in 1..1024.
        tokens: [R] or [L, R] int32 tokens of each source that need the shared experts.
        per_token: shared experts, 1..1024: every token has so many shared copies.
        ranks_per_node: divides R; None = all ranks are one node.
        candidates: where a copy may go besides home: "all" ranks; its "node"; "visited" ranks only, as counted
            above: what does not fit there stays home and may pass the bound, which is that of "all".
        ticks: [R] int32 cost of one copy per rank, 1..2^20 (1024 = nominal); None = 1 each.
        limits: [R] int32 most shared copies of a rank (0 = it holds no shared slot); None = no limit. They must
            hold all shared copies ("node": those of each node, "visited": those of each rank).
    """
    if candidates not in CANDIDATES:
        raise ValueError(f"candidates must be all, node or visited, got {candidates!r}")
    if ranks_per_node is None:
        ranks_per_node = copies.shape[-1] if copies.dim() else 1
    allowed = CANDIDATES.index(candidates)
    return WaterfillSplit(
        *call(_plan_waterfill, copies, tokens, per_token, ranks_per_node, allowed, ticks, limits)
    )
