"""Whether an engine's new map of experts pays: the time that it saves against the time of moving the experts.

The saving is modelled by the counts of the engine's last window, which is taken to be like the passes until the next
rebalance: the slowest rank's experts of every layer, under the present and under the new map.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from isoload.analysis.judge import ExpertSize, Worth, move_ms, pass_ms
from isoload.checks import parse_amount
from isoload.online.metrics import Metrics
from isoload.placement.placement import Placement
from isoload.times.exchanges import assumed_experts
from isoload.times.experts import ExpertTime

log = logging.getLogger("isoload")


@dataclass(frozen=True)
class RebalanceRule:
    """When a new map is applied, all in milliseconds."""

    gain_ms: float = 0.0  # least modelled saving per forward pass
    move_ms: float | None = None  # that a rebalance takes; None = modelled from the bytes that move

    @classmethod
    def parse(cls, text: str) -> RebalanceRule:
        values: dict[str, float | None] = {}
        for part in text.split(","):
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if key not in ("gain_ms", "move_ms") or not equals or key in values:
                raise ValueError(f"must be gain_ms=NUMBER,move_ms=NUMBER or move_ms=auto, got {text!r:.80}")
            values[key] = None if (key, value) == ("move_ms", "auto") else parse_amount(key, value)
        return cls(**values)  # type: ignore[arg-type]


class NewMaps:
    """Decides about one model's new maps of experts; the same on all ranks, because all have the same counts.

    `interval`: forward passes between two rebalances. `is_exact`: isoload splits an expert's copies over its replicas;
    the engine's split is even. `experts`: measured times; None = arithmetic from the expert's size for an H100.
    """

    def __init__(
        self, engine: str, rule: RebalanceRule, size: ExpertSize, interval: int, is_exact: bool,
        experts: ExpertTime | None, metrics: Metrics,
    ) -> None:  # fmt: skip
        self.engine, self.rule, self.size, self.interval = engine, rule, size, interval
        self.policy, self.metrics = "exact" if is_exact else "even", metrics
        self.experts = experts or assumed_experts(*size)
        self._logged = False

    def choose(self, before: Placement, after: Placement, counts: Tensor, passes: int) -> Placement:
        """Return the placement to apply: after, or before if the saving does not pay. `counts`: [L, E] copies of
        `passes` forward passes, over all ranks."""
        if not counts.any():
            return before
        worth = self.worth(before, after, counts, passes)
        saved = worth.gain_ms * self.interval
        if worth.gain_ms >= self.rule.gain_ms and saved > worth.move_ms:
            return after
        if torch.equal(before.slot_to_expert, after.slot_to_expert):
            return before
        self.metrics.add("rebalances_skipped_total")
        if not self._logged:
            log.info(
                f"isoload {self.engine}: a rebalance was skipped (ISOLOAD_REBALANCE): the new map would save "
                f"{worth.gain_ms:.3f} ms in a pass, {saved:.0f} ms in the {self.interval} passes until the next "
                f"rebalance, and moving the experts would take {worth.move_ms:.0f} ms. This line is logged once; "
                "isoload_rebalances_skipped_total counts all"
            )
            self._logged = True
        return before

    def worth(self, before: Placement, after: Placement, counts: Tensor, passes: int) -> Worth:
        old, new = (self._pass_ms(placement, counts, passes) for placement in (before, after))
        return Worth(old - new, self._move_ms(before, after))

    def _pass_ms(self, placement: Placement, counts: Tensor, passes: int) -> float:
        """Return the milliseconds of the slowest rank's experts in one pass, summed over the layers."""
        loads = (counts.double() / max(passes, 1)).round().long()  # [L, E]
        return pass_ms(loads, placement, self.policy, self.experts)

    def _move_ms(self, before: Placement, after: Placement) -> float:
        if self.rule.move_ms is not None:
            return self.rule.move_ms
        return move_ms(before, after, self.size.num_bytes)
