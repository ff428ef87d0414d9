"""The check of ISOLOAD_CHECK_WEIGHTS: whether every slot holds the weights of its expert in the engine's map."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from isoload.online.metrics import Metrics
from isoload.weights.checksums import WrongSlot, expert_checksums, slot_checksums, wrong_slots
from isoload.weights.pages import resident_slots

log = logging.getLogger("isoload")
NAMED = 8  # limit of wrong slots named in one line


@dataclass
class WeightCheck:
    """Check of one model's weights over the ranks of a group, which call it together and log the same lines."""

    engine: str
    weights: Mapping[int, Sequence[Tensor]]  # by layer: this rank's slots, [P/R, ...] each
    group: dist.ProcessGroup  # the expert-parallel ranks
    strict: bool  # a wrong slot ends the process; otherwise detach() is called
    detach: Callable[[], str]  # returns a sentence about what it did
    expected: dict[int, Tensor] = field(default_factory=dict)  # by layer [E] checksums, as loaded
    wrong: dict[int, int] = field(default_factory=dict)  # slots of each layer in its last check
    metrics: Metrics = field(default_factory=Metrics)

    def loaded(self, slot_to_expert: Tensor, num_experts: int) -> None:
        """Store every expert's checksum from its lowest slot of [L, P], on the host; replicas must have the same."""
        if not (layers := sorted(self.weights)):
            return
        tables = slot_to_expert[layers]
        sums = self._sums(layers, tables)
        self.expected = dict(zip(layers, expert_checksums(sums, tables, num_experts), strict=True))
        self._judge(layers, tables, sums, "at load")

    def moved(self, slot_to_expert: Tensor, layers: Sequence[int] | None = None) -> None:
        """Check some layers, or all, after a rebalance, with the engine's present map [L, P] on the host."""
        layers = sorted(self.weights if layers is None else self.weights.keys() & set(layers))
        if layers:
            tables = slot_to_expert[layers]
            self._judge(layers, tables, self._sums(layers, tables), "after a rebalance")

    def _sums(self, layers: Sequence[int], tables: Tensor) -> Tensor:
        """Return checksums [L, P] of all ranks' slots, on the host; 0 for absent slots, whose memory is not read."""
        num_ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        slots = resident_slots(tables, num_ranks)[:, rank].tolist()
        width = tables.shape[1] // num_ranks
        parts = ([t[:n] for t in self.weights[layer]] for layer, n in zip(layers, slots, strict=True))
        local = torch.stack([pad(slot_checksums(part), (0, width - len(part[0]))) for part in parts])
        ranks = local.new_empty(num_ranks * local.numel())
        dist.all_gather_into_tensor(ranks, local.flatten(), self.group)
        return ranks.cpu().view(num_ranks, *local.shape).transpose(0, 1).flatten(1)

    def _judge(self, layers: Sequence[int], tables: Tensor, sums: Tensor, when: str) -> None:
        expected = torch.stack([self.expected[layer] for layer in layers])
        wrong = wrong_slots(sums, tables, expected, layers, dist.get_world_size(self.group))
        for layer in layers:
            self.wrong[layer] = sum(slot.layer == layer for slot in wrong)
        self.metrics.set("wrong_slots", sum(self.wrong.values()))
        if not wrong:
            if dist.get_rank(self.group) == 0:
                log.info(
                    f"isoload {self.engine}: {int((tables >= 0).sum())} slots have their experts' weights {when}"
                )
            return
        line = f"isoload {self.engine}: weights are not those of their experts {when}: {named(wrong)}"
        if self.strict:
            # An engine may log an Exception and continue, and may exit without a line.
            log.critical(f"{line}. ISOLOAD_STRICT=1 ends the process")
            raise SystemExit(line)
        log.error(f"{line}. {self.detach()}")


def named(wrong: Sequence[WrongSlot]) -> str:
    """Return the first wrong slots in words, and the number of the remaining ones."""
    texts = [
        f"layer {entry.layer}, rank {entry.rank}, slot {entry.slot} should hold expert {entry.expert} and holds "
        f"{'no known expert' if entry.holds is None else f'expert {entry.holds}'}"
        for entry in wrong[:NAMED]
    ]
    num_more = len(wrong) - NAMED
    return "; ".join(texts) + (f"; and {num_more} more" if num_more > 0 else "")
