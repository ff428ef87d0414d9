"""What a LibraStack refuses when it is made: layers that cannot follow one another, predictors of other layers."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from torch import nn

from isoload.layer.blocks import no_gate
from isoload.layer.moe import MoE
from isoload.layer.routers import Gate
from isoload.layer.two_stage import runs_apart
from isoload.policies.keeping import may_keep_local
from isoload.predict import Last, Linear, Lookahead, Predictor
from isoload.times.cost import CostModel, slots_in_time
from isoload.transport.row_dispatcher import RowDispatcher
from isoload.weights.quantised import per_element
from isoload.wording import not_one_of

LOCALS = ("planned", "held")


def check_layers(layers: Sequence[MoE]) -> None:
    """Raises ValueError unless layers can share a stack."""
    wanted, seen = facts_of(layers[0]), set[int]()
    for i, layer in enumerate(layers):
        if layer.run_by is not None or id(layer) in seen:
            raise ValueError(f"layers must be in one stack at a time, and once, got layer {i} again")
        seen.add(id(layer))
        if (own := layer.balancer.own_counts) is not None:
            raise ValueError(
                f"layers must have loads='gathered' in a stack, which plans by all ranks' loads, got {own.word!r} in "
                f"layer {i}"
            )
        for name, value in facts_of(layer).items():
            if value != wanted[name]:
                raise ValueError(
                    f"layers must have the same {name}, got {wanted[name]} in layer 0 and {value} in layer {i}"
                )
        if layer.transport is not layers[0].transport:
            raise ValueError(f"layers must share one transport, got another in layer {i}")


def facts_of(layer: MoE) -> dict[str, object]:
    """What must be the same in all layers, by name."""
    placement, stored = layer.placement, layer._ranks()[0].stored()
    shapes = ", ".join(f"{name} {list(stack.shape[1:])}" for name, stack in stored.items())
    return {
        "num_ranks": placement.topology.num_ranks,
        "num_experts": placement.num_routed,
        "num_shared": placement.num_shared,
        "spare_slots": placement.spare_slots,
        "experts": f"{shapes} {stored['down'].dtype} on {stored['down'].device.type}",
        "borrow": None if layer.borrowing is None else layer.borrowing.backend.name,
    }


def check_local(local: str, layers: Sequence[MoE], predicts: bool) -> None:
    """Raises ValueError unless the layers can run in this order of the two stages."""
    if local not in LOCALS:
        raise ValueError(not_one_of("local", LOCALS, local))
    if local == "planned":
        return
    dispatcher = layers[0].dispatcher
    by_rank = isinstance(dispatcher, RowDispatcher) and not dispatcher.adds_in_nodes
    if not by_rank or dispatcher.max_tokens_per_rank is None:
        raise ValueError(
            "local must not be held without a LocalTransport or CollectiveTransport with max_tokens_per_rank and "
            f"dispatch='rank', got a {type(dispatcher).__name__} with "
            f"max_tokens_per_rank={dispatcher.max_tokens_per_rank}"
        )
    for policy in (layer.policy for layer in layers):
        if policy.borrows and not (policy.ahead and predicts):
            raise ValueError(
                f"local must not be held where policy {policy.name} fills spare slots from the batch's own loads"
            )
        if not may_keep_local(policy):
            raise ValueError(
                f"local must not be held with policy {policy.name}, which draws or fixes the share"
            )


def check_host_plans(local: str, layers: Sequence[MoE], predicts: bool) -> None:
    """Raises ValueError unless the host's waits of a policy that plans on the CPU fall beside local compute."""
    for policy in (layer.policy for layer in layers):
        if not policy.plans_on_host or not runs_apart(layers[0]._ranks()[0].row_of_slot.device):
            continue
        borrowing = layers[0].borrowing
        early = local == "planned" and borrowing is not None and borrowing.waits_for_plan
        if not (policy.ahead and predicts and (policy.keeps_local or local == "held")) or early:
            raise ValueError(
                f"policy {policy.name} must plan beside local compute, because the host waits for the loads: it needs "
                "predict, slots filled ahead, copies that stay local and borrow='pull' or local='held', got "
                f"ahead={policy.ahead}, keeps_local={policy.keeps_local}, local={local!r} and predict="
                f"{'given' if predicts else 'None'}: use libra, hedge or llep"
            )


def make_predictor(
    predict: str | Predictor | None, layers: Sequence[MoE], norms: Sequence[nn.Module] | None
) -> Predictor | None:
    """The predictor of a stack, on its device."""
    if norms is not None and predict != "lookahead":
        raise ValueError(f"norms must be None unless predict is 'lookahead', got {len(norms)}")
    if predict is None:
        return None
    if predict == "lookahead":
        if any(layer.gate is no_gate for layer in layers):
            raise ValueError("predict must not be 'lookahead' for layers without gates: see from_decoder")
        predict = Lookahead([layer.gate for layer in layers], norms)
    elif predict == "last":
        predict = Last(len(layers))
    if not isinstance(predict, Predictor):
        raise ValueError(f"predict must be lookahead, last or a Predictor, got {predict!r}")
    if not any(layer.policy.ahead for layer in layers):
        raise ValueError(
            f"predict must be None where no policy fills ahead, got {predict.describe()} for {layers[0].policy.name}"
        )
    num_experts = layers[0].placement.num_routed
    if predict.num_layers != len(layers) or predict.num_experts not in (None, num_experts):
        raise ValueError(
            f"predict must be of {len(layers)} layers and {num_experts} experts as the stack, "
            f"got {predict.num_layers} and {predict.num_experts}"
        )
    if isinstance(predict, Lookahead):
        check_lookahead(predict, layers)
    return predict.to(layers[0]._ranks()[0].row_of_slot.device) if isinstance(predict, Linear) else predict


def check_lookahead(predict: Lookahead, layers: Sequence[MoE]) -> None:
    num_experts, hidden = layers[0].placement.num_routed, layers[0]._ranks()[0].stored_down.shape[1]
    for i, gate in enumerate(predict.gates):
        if isinstance(gate, Gate) and gate.weight.shape != (num_experts, hidden):
            raise ValueError(
                f"gates must be [{num_experts}, {hidden}] as the layers, got {list(gate.weight.shape)} for layer {i}"
            )
    for i, norm in enumerate(predict.norms or ()):
        if not isinstance(norm, nn.Module):
            raise ValueError(f"norms must be modules, whose input is kept, got {norm!r:.60} for layer {i}")


def count_slots(
    slots: int | str | None,
    layers: Sequence[MoE],
    cost: CostModel | None,
    copies_per_rank: int | None,
    memory: float | None,
) -> tuple[int | None, str | None]:
    """Most spare slots of a rank that a stack fills, and what bounds them; see :class:`isoload.LibraStack`."""
    placement, down = layers[0].placement, layers[0]._ranks()[0].stored_down
    if slots == "auto":
        if cost is None or copies_per_rank is None:
            raise ValueError(
                f"slots must come with cost and copies_per_rank if 'auto', got {cost}, {copies_per_rank}"
            )
        sizes = down.shape[1], down.shape[2] * per_element(down.dtype)
        if (cost.hidden, cost.intermediate) != sizes:
            raise ValueError(
                f"cost must be of the layers' experts, {sizes[0]} x {sizes[1]}, "
                f"got {cost.hidden} x {cost.intermediate}"
            )
        if memory is not None and not 0 <= memory < inf:
            raise ValueError(f"memory must be a number of bytes from 0 on, or None, got {memory!r}")
        resident = placement.slots_per_rank - placement.spare_slots
        bounds = {
            "time": slots_in_time(copies_per_rank, resident, placement.topology, cost),
            "spare slots": placement.spare_slots,
        }
        if memory is not None:  # one layer's are fetched while those of the one before are in use
            bounds["memory"] = int(memory // (2 * cost.expert_bytes))
        least = min(bounds, key=bounds.__getitem__)
        return bounds[least], least
    if (cost, copies_per_rank, memory) != (None, None, None):
        raise ValueError(
            f"cost, copies_per_rank and memory must be None unless slots is 'auto', got slots={slots!r}"
        )
    if slots is None:
        return None, None
    if not isinstance(slots, int) or not 1 <= slots <= placement.spare_slots:
        raise ValueError(
            f"slots must be None, 'auto' or in 1..spare_slots={placement.spare_slots}, got {slots!r}"
        )
    return slots, None
