"""Plan: a policy's decision for a batch of one layer or of all layers, its shared copies, and the batch number.

Shared experts are the last logical experts, in the last resident slots of every rank (SGLang's layout). Every token
needs them and every live rank holds them, so only the rank is decided, after the routed experts are split. The number
of a batch selects the random stream of a sampled plan; a captured graph reads it on the device.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from isoload.checks import may_be_kept, values_readable
from isoload.ops.tables import ReplicaTables
from isoload.placement.placed_layers import PlacedLayers, pick_layer
from isoload.topology import Topology
from isoload.wording import amount, span, text_table

if TYPE_CHECKING:
    from isoload.policies.base import Policy


MOST_DRAWN = 2**14  # numbers kept for the recompute of a checkpoint: batches in flight times layers

_drawn = OrderedDict[int, Tensor]()  # numbers of batches; key: the draw of torch's generator


def first_step(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


def next_step(step: Tensor) -> Tensor:
    """Advance the batch number [] int64 and return a copy, which a batch in flight keeps.

    A checkpoint's recompute gets the number of its original batch: every checkpoint restores the state of torch's
    generator, and a batch that may be recomputed identifies itself by one draw from it. (With preserve_rng_state=False
    the recompute gets the number of the last batch.) In compiled code an op decides at run time. Eager calls do not use
    that op, because the first op defined in Python imports torch's compiler, which takes a second or more.
    """
    if torch.compiler.is_compiling():
        traced: Tensor = _traced_next_step(step)
        return traced
    if torch.is_inference_mode_enabled() or not may_be_kept(step):
        return step.add_(1).clone()  # no backward follows, so the generator is not used
    drawn = int(torch.randint(2**63 - 1, (), device="cpu"))
    if in_backward():
        return _drawn.get(drawn, step).clone()
    _drawn[drawn] = step.add_(1).clone()
    if len(_drawn) > MOST_DRAWN:
        _drawn.popitem(last=False)
    return _drawn[drawn].clone()


_traced_next_step = torch.library.custom_op("isoload::next_step", next_step, mutates_args=("step",))
_traced_next_step.register_fake(torch.empty_like)


def in_backward() -> bool:
    """Return whether a backward pass runs, for example when a checkpoint recomputes; traced code cannot test this."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


TOO_MANY = 2**31  # copies of a batch

Rule = Literal["home", "by_rank", "sample"]


@dataclass(frozen=True, eq=False)
class SharedPlan:
    """Where the shared copies of one batch go. Fields may have a leading L."""

    rule: Rule  # "home": to the source's rank; "by_rank"; "sample": every token draws a rank
    tokens: Tensor  # [R] int32 tokens of each source that need the shared experts: n copies each
    by_rank: Tensor | None = None  # [R, R] int32 shared copies from source s to rank d, for rule by_rank
    copies: Tensor | None = None  # [R, R] int32 routed copies from s to d, if the rule uses them
    in_quota: bool = False  # whether the quota of the policy's plan includes the shared copies

    @property
    def is_met(self) -> bool:
        """Whether routed slots receive exactly their quotas; otherwise their copies are counted after routing."""
        return self.rule in ("home", "by_rank")

    def __getitem__(self, layer: int) -> SharedPlan:
        by_rank, copies = pick_layer(self.by_rank, layer), pick_layer(self.copies, layer)
        return SharedPlan(self.rule, self.tokens.select(0, layer), by_rank, copies, self.in_quota)


def keep_home(copies: Tensor, home: Tensor) -> Tensor:
    """Return [..., R, R] with all shared copies [..., R] of source s on rank home[s]."""
    nothing = copies.new_zeros((*copies.shape, copies.shape[-1]))
    index = home.expand(copies.shape).unsqueeze(-1)
    return nothing.scatter_(-1, index, copies.unsqueeze(-1))


def without_shared_slots(slots: Tensor, slots_per_rank: int, num_shared: int) -> Tensor:
    """Renumber slots of routed experts as SGLang does, as if every rank had num_shared slots fewer; -1 stays -1."""
    return slots - slots.div(slots_per_rank, rounding_mode="floor").clamp(min=0) * num_shared


def check_tokens(tokens: Tensor, first: int, num_shared: int) -> None:
    """Raise ValueError for numbers of tokens [..., R] that are negative, or whose shared copies are too many."""
    if tokens.numel() and (least := int(tokens.min())) < 0:
        raise ValueError(f"loads must not be negative, got {least} for expert {first}")
    copies = tokens.sum(-1, dtype=torch.int64) * num_shared
    if copies.numel() and (largest := int(copies.max())) >= TOO_MANY:
        raise ValueError(f"loads must sum to less than 2^31 copies, got {largest} of shared experts")


def widened(tokens: Tensor) -> Tensor:
    """Return numbers of tokens as int64, to be added up; a negative number becomes one that is too large."""
    return tokens.long() & (2 * TOO_MANY - 1)


def shared_copies(tokens: Tensor, num_shared: int) -> Tensor:
    """Return int32 copies of int64 tokens; numbers that are too large become negative, which planners reject."""
    return (tokens * num_shared).clamp(max=TOO_MANY).to(torch.int32)


def check_shared_columns(topk_ids: Tensor, num_routed: int, num_shared: int) -> None:
    """Raise ValueError unless the last columns of topk_ids [T, K + n] are the shared experts' ids. Every token with a
    routed choice needs all shared experts and no other token does, so their copies follow from counts."""
    if topk_ids.dim() != 2 or topk_ids.shape[1] <= num_shared:
        raise ValueError(
            f"topk_ids must be [T, K + {num_shared}] with the shared experts in the last columns, "
            f"got {list(topk_ids.shape)}"
        )
    if not values_readable(topk_ids):
        return
    routed, shared = topk_ids.tensor_split([topk_ids.shape[1] - num_shared], dim=1)
    wanted = torch.arange(num_routed, num_routed + num_shared, device=shared.device)
    wrong = (shared != torch.where((routed >= 0).any(1, keepdim=True), wanted, -1)).any(1).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"topk_ids must end in the shared experts {wanted.tolist()}, or in -1 where all routed choices are, "
            f"got {routed[row].tolist()} and {shared[row].tolist()} in row {row}"
        )


def per_expert(by_rank: Tensor, num_shared: int) -> Tensor:
    """Divide copies [..., R, R] among the shared experts, [..., R, R, n]; parts of a source differ by remainders only.

    Shared expert j takes ``(c + j) // n`` of a source's first c copies in rank order. Over all j these add up to c, and
    over a source's whole row, with n copies per token, every shared expert gets one copy per token.
    :func:`isoload.ops.route_shared` uses the same rule.
    """
    if num_shared == 1:
        return by_rank.unsqueeze(-1)
    upto = by_rank.cumsum(-1).unsqueeze(-1)
    turn = torch.arange(num_shared, device=by_rank.device)
    before = upto - by_rank.unsqueeze(-1)
    return ((upto + turn) // num_shared - (before + turn) // num_shared).to(torch.int32)


@dataclass(frozen=True, eq=False)
class Plan:
    """Two integer vectors over slots with a certificate of their quality. Fields may have a leading L.

    Attributes:
        placed: the placement's layers, with the slots of this batch.
        policy: the policy that made the plan.
        quota: [P] int32 copies each slot takes; for every expert they sum to its load. None if sampled. If only shared
            experts are sampled: of the routed slots, 0 in the shared ones.
        peak: [] int64 max over ranks of the rank's load: copies, or their cost in ticks if ranks have speeds. None if
            sampled.
        bound: [] int64 proved lower bound of the peak over all integer quotas of these slots, with shared copies on
            their token's rank unless the policy moves them.
        telemetry: [4] int32 of exact splits: sweeps, augmentations, Newton steps, cut by the budget; of policies that
            borrow: [5], see isoload.ops.SlotFill.
        weights: [P] float32 of sampled policies: intended fraction of each replica; see
            isoload.policies.Seeded.weights_of.
        shared: where shared copies go; None without shared experts.
        step: number of the batch, which selects the random stream of samples; an int, or [] int64 on the device, which
            a captured graph reads at every replay.
        send_counts: [P] int32 routed copies that the demand's rank sends to each slot, if the split computed them.
    """

    placed: PlacedLayers
    policy: Policy
    quota: Tensor | None
    peak: Tensor | None
    bound: Tensor
    telemetry: Tensor | None = None
    weights: Tensor | None = None
    shared: SharedPlan | None = None
    step: int | Tensor = 0
    send_counts: Tensor | None = None

    @property
    def slot_to_expert(self) -> Tensor:
        """[P] int32 expert of each slot, borrowed ones included; -1 = none."""
        return self.placed.slot_to_expert

    @property
    def tables(self) -> ReplicaTables:
        """Tables of the routed experts in these slots."""
        return self.placed.tables

    @property
    def topology(self) -> Topology:
        return self.placed.topology

    @property
    def layer(self) -> int | None:
        """Position of the planned layer; None for a plan of all layers."""
        return self.placed.layer

    @property
    def realisation(self) -> str:
        """ "quota": a route realises the plan exactly; "sample": copies per slot follow from routed slots only."""
        drawn = self.weights is not None or (self.shared is not None and not self.shared.is_met)
        return "sample" if drawn else "quota"

    def __repr__(self) -> str:
        """Return one line, with values only on the CPU: a GPU would wait and end the capture of a CUDA graph."""
        layers = [] if self.layer is not None else [amount(len(self.slot_to_expert), "layer")]
        parts = [self.policy.name, *layers, amount(self.topology.num_ranks, "rank"), self._summary()]
        return f"Plan({', '.join(parts)})"

    def _summary(self) -> str:
        if self.bound.device.type != "cpu" or not values_readable(self.bound):
            return f"on {self.bound.device}"
        unit = "" if self.topology.ticks is None else " ticks"
        if self.peak is None:
            return f"sampled, bound {span(self.bound.flatten().tolist())}{unit}"
        peak = f"peak {span(self.peak.flatten().tolist())}{unit}"
        if self.peak.equal(self.bound):
            return f"{peak} = bound"
        return f"{peak}, bound {span(self.bound.flatten().tolist())}{unit}"

    def describe(self) -> str:
        """Return the line of :func:`repr` and a table of the plan's tensors; on a GPU the host waits.

        A plan of one layer has a row for each rank (load, slots that take copies, experts in spare slots), a plan of
        all layers a row for each layer (peak, bound, imbalance as peak over mean load). A sampled plan has no loads.
        """
        if self.quota is None or self.peak is None:
            return repr(self)
        load = rank_cost(self.quota, self.topology).cpu()
        if self.layer is None:
            mean = self.quota.sum(-1).cpu() / self.topology.copies_per_cost
            imbalance = (self.peak.cpu() / mean).nan_to_num(1.0)
            values = (self.peak.tolist(), self.bound.tolist(), imbalance.tolist())
            layer_ids = map(str, self.placed.host.layer_ids)
            rows: list[tuple[object, ...]] = list(zip(layer_ids, *values, strict=True))
            return f"{self!r}\n{text_table(('layer', 'peak', 'bound', 'imbalance'), rows)}"
        shape = self.topology.num_ranks, -1
        used = (self.quota.view(shape) > 0).sum(-1).tolist()
        spare = self.slot_to_expert.view(shape)[
            :, self.placed.host.slots_per_rank - self.placed.spare_slots :
        ]
        borrowed = [" ".join(str(e) for e in row if e >= 0) or "-" for row in spare.tolist()]
        rows = list(zip(range(len(used)), load.tolist(), used, borrowed, strict=True))
        return f"{self!r}\n{text_table(('rank', 'load', 'slots in use', 'borrowed experts'), rows)}"

    def __getitem__(self, layer: int) -> Plan:
        """Return the plan of one layer of a batch."""
        if self.layer is not None:
            raise ValueError(f"layer must index a plan of all layers, this one is of layer {self.layer}")
        return self.pick(layer, self.placed[layer])

    def pick(self, index: int, placed: PlacedLayers) -> Plan:
        """Return the plan at one index of a batch, in these slots."""
        return Plan(
            placed,
            self.policy,
            pick_layer(self.quota, index),
            pick_layer(self.peak, index),
            self.bound.select(0, index),
            pick_layer(self.telemetry, index),
            pick_layer(self.weights, index),
            None if self.shared is None else self.shared[index],
            self.step,
            pick_layer(self.send_counts, index),
        )


def rank_cost(quota: Tensor, topology: Topology, besides: Tensor | None = None) -> Tensor:
    """Return the [..., R] int64 cost of every rank under a quota [..., P]: copies, or ticks if ranks differ in speed.
    `besides`: [..., R] copies that the ranks carry in addition to the quota."""
    copies = quota.view(*quota.shape[:-1], topology.num_ranks, -1).sum(-1)
    copies = copies if besides is None else copies + besides
    ticks = topology.ticks_on(quota.device)
    return copies if ticks is None else copies * ticks


def plan_errors(plan: Plan, loads: Tensor) -> list[str]:
    """Return the guarantees of a plan that do not hold for loads [E] or [R, E] (leading L as the plan)."""
    errors = []
    expert_loads = loads if loads.dim() == plan.slot_to_expert.dim() else loads.sum(-2)
    if plan.quota is None:
        return [] if plan.weights is not None else ["weights must be given where quota is not"]
    shared = torch.where(plan.slot_to_expert >= plan.tables.num_experts, plan.quota, 0)
    if (plan.quota < 0).any():
        errors.append("quota must not be negative")
    if ((plan.quota - shared)[~plan.tables.is_replica()] != 0).any():
        errors.append("quota must be 0 in empty slots and in second slots of one expert on one rank")
    if plan.realisation == "sample":  # only the routed experts have quotas
        expert_loads = expert_loads.narrow(-1, 0, plan.tables.num_experts)
    num_experts = expert_loads.shape[-1]
    planned = torch.zeros(*expert_loads.shape[:-1], num_experts + 1, dtype=torch.int64)
    outside = (plan.slot_to_expert < 0) | (plan.slot_to_expert >= num_experts)
    index = torch.where(outside, num_experts, plan.slot_to_expert).long()
    planned.scatter_add_(-1, index.cpu(), plan.quota.long().cpu())
    if not torch.equal(planned[..., :-1], expert_loads.long().cpu()):
        errors.append("quota must conserve tokens: an expert's quotas must sum to its load")
    if plan.peak is None:
        return errors
    if not torch.equal(rank_cost(plan.quota, plan.topology).amax(-1), plan.peak):
        errors.append("peak must be the largest rank load")
    if (plan.bound > plan.peak).any():
        errors.append("bound must not exceed peak")
    return errors
