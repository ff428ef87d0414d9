"""BlockExperts: the ``experts`` of a Hugging Face block, balanced; router, outputs and saved keys stay the model's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from isoload.layer.modules import block_experts, is_fused, saved_names
from isoload.layer.moe import MoE
from isoload.layer.pretrained import save_pretrained
from isoload.placement.placement import Placement
from isoload.placers import place
from isoload.policies import POLICIES, Policy, make_policy
from isoload.topology import Topology
from isoload.transport import LocalTransport, Transport
from isoload.weights.state import HOMES, PART, no_distributed_checkpoint, without_part

SPARE_SLOTS = 2  # of every rank, where a borrowing policy comes without a placement


class BlockExperts(nn.Module):
    """Takes the place of ``block.experts``: the same call, the same sum.

    The process's tokens are dealt evenly over the ranks it owns: one with torch.distributed, all virtual ones of a
    LocalTransport. state_dict() has the keys of the fused module that it replaces, with all experts, by number, where
    the process owns all ranks. Over processes its keys contain ``rank_1_of_4``, for example, and hold that rank's
    experts, listed in ``home_experts``. Either loads, and so does a checkpoint of the model; refresh replicas then.

    Args:
        block: with ``experts`` that transformers fuses. The weights of all experts are copied to their ranks' rows.
        **options: what :class:`MoE` takes beside gate and experts.

    Raises:
        ValueError: as MoE, or for experts that are not fused or that it cannot compute.
    """

    def __init__(self, block: nn.Module, transport: Transport, placement: Placement, **options: Any) -> None:
        super().__init__()
        if placement.num_shared:
            raise ValueError(
                f"placement must have no shared experts, which the block computes, got {placement.num_shared}"
            )
        dense, activation = block_experts(block)
        self.layer = MoE(no_gate, dense, transport, placement, **{"activation": activation, **options})
        replaced: Any = block.experts
        names = saved_names(replaced)
        order = [name for name, _ in replaced.named_parameters(recurse=False)]  # of the model's states
        self._names = dict(sorted(names.items(), key=lambda own: order.index(own[1])))
        self._transposed = bool(replaced.is_transposed)
        self.register_state_dict_post_hook(_rename_saved)
        self.register_load_state_dict_pre_hook(_rename_loaded)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, H], [T, K] and [T, K] -> [T, H]: every token's experts, weighted and summed."""
        parts = len(self.layer.group.ranks)
        given = hidden_states, top_k_index, top_k_weights
        rows, ids, weights = (list(v.tensor_split(parts)) for v in given)
        return torch.cat(list(self.layer.compute(rows, ids, weights)))

    def __getattr__(self, name: str) -> Any:
        # torch.distributed.checkpoint looks up every key of a state among the modules
        if PART.match(f"{name}."):
            raise AttributeError(no_distributed_checkpoint(name))
        return super().__getattr__(name)

    @property
    def part_keys(self) -> str:
        """How the keys of this module's state begin that are a part of the experts."""
        return ""

    def whole_experts(self) -> dict[str, Tensor]:
        """Return the stacks of all experts on the writer, by the names of the model's state: all ranks together."""
        stacks = self.layer.full_experts(self.layer.writer)
        return {saved: self.turn(stacks[name]) for name, saved in self._names.items()}

    def turn(self, stack: Tensor) -> Tensor:
        """[E, out, in] as the replaced module has it, and back."""
        return stack.transpose(1, 2) if self._transposed and stack.dim() == 3 else stack


def balance(
    model: nn.Module,
    topology: Topology | int,
    *,
    transport: Transport | None = None,
    placement: Placement | None = None,
    spare_slots: int | None = None,
    **options: Any,
) -> list[MoE]:
    """Puts BlockExperts into every MoE block of a Hugging Face model, before an optimizer takes its Parameters.

    Args:
        model: with the weights of all experts in every process; or one of its blocks.
        topology: R ranks, or the number R.
        transport: one for all blocks; None = all ranks in this process.
        placement: of the routed experts, with the model's MoE layers by their numbers, or one layer for each MoE block
            in order where it does not state which layers they are; None = experts in order (placer ``trivial``).
        spare_slots: experts that a rank can borrow at a time, where there is no placement. None: SPARE_SLOTS if the
            policy borrows, else 0.
        **options: policy, its options, and what else :class:`MoE` takes.

    Over processes ``model.save_pretrained`` must be called on all ranks: it gathers all experts, and rank 0 writes.

    Returns:
        the layers, in the model's order: call their refresh_replicas() after every optimizer step.

    Raises:
        ValueError: before any block has changed.
    """
    blocks = [block for _, block in find_blocks([model], "model")]
    if placement is not None and (numbers := layer_numbers(model, blocks)) is not None:
        placement = placement.for_model(numbers)
    made = take_over(blocks, topology, transport, placement, spare_slots, **options)
    if hasattr(model, "save_pretrained") and not made[0].layer.group.owns_all:
        model.save_pretrained = MethodType(save_pretrained, model)  # type: ignore[assignment]
    return put_in(blocks, made)


def layer_numbers(model: nn.Module, blocks: Sequence[nn.Module]) -> list[int] | None:
    """Return the model's own numbers of the decoder layers that contain the blocks; None where names have none."""
    names = {id(module): name for name, module in model.named_modules()}
    matches = [re.search(r"(?:^|\.)layers\.(\d+)\.", f"{names[id(block)]}.") for block in blocks]
    numbers = [int(match[1]) for match in matches if match]
    return numbers if len(numbers) == len(blocks) == len(set(numbers)) else None


def spare_count(policy: str | Policy, spare_slots: int | None) -> int:
    """Return the spare slots of a rank where there is no placement; None: SPARE_SLOTS if the policy borrows, else 0."""
    if spare_slots is not None:
        return spare_slots
    known = isinstance(policy, Policy) or policy in POLICIES  # else the layer refuses it
    return SPARE_SLOTS if known and make_policy(policy).borrows else 0


def check_spare(placement: Placement, spare_slots: int | None) -> None:
    """Raise ValueError for a number of spare slots that is not the placement's."""
    if spare_slots not in (None, placement.spare_slots):
        raise ValueError(f"spare_slots must be the placement's {placement.spare_slots}, got {spare_slots}")


def take_over(
    blocks: Sequence[nn.Module],
    topology: Topology | int,
    transport: Transport | None,
    placement: Placement | None,
    spare_slots: int | None = None,
    **options: Any,
) -> list[BlockExperts]:
    """For each block its experts, not put in their place yet; arguments as of :func:`balance`."""
    transport = LocalTransport(topology) if transport is None else transport
    if placement is None:
        spare = spare_count(options.get("policy", "exact"), spare_slots)
        counts = torch.ones(len(blocks), block_experts(blocks[0])[0].num_slots)
        placement = place(counts, topology, spare_slots=spare, placer="trivial")
    else:
        check_spare(placement, spare_slots)
    if placement.num_layers != len(blocks):
        raise ValueError(
            f"placement must have a layer for each of the {len(blocks)} MoE blocks, got {placement.num_layers}"
        )
    return [BlockExperts(block, transport, placement, layer=i, **options) for i, block in enumerate(blocks)]


def put_in(blocks: Sequence[nn.Module], made: Sequence[BlockExperts]) -> list[MoE]:
    """Puts experts into their blocks; returns their layers."""
    for block, experts in zip(blocks, made, strict=True):
        block.experts = experts
    return [experts.layer for experts in made]


def find_blocks(parts: Iterable[nn.Module], given: str) -> list[tuple[nn.Module, nn.Module]]:
    """The MoE blocks inside of each part, in order, after the part: what every door takes.

    Raises:
        ValueError: there is none in `given`.
    """
    parts = list(parts)
    found = [(part, block) for part in parts for block in part.modules() if is_known(block)]
    if not found:
        inside = [module for part in parts for module in part.modules() if hasattr(module, "experts")]
        kinds = sorted({f"{type(m.experts).__name__} in a {type(m).__name__}" for m in inside})
        kinds = kinds or sorted({type(part).__name__ for part in parts})
        raise ValueError(
            f"{given} must have MoE blocks with experts that transformers fuses, got {', '.join(kinds) or 'nothing'}"
        )
    return found


def is_known(block: nn.Module) -> bool:
    """Whether a module has experts that transformers fuses, or BlockExperts in their place."""
    experts = getattr(block, "experts", None)
    if not isinstance(experts, nn.Module):
        return False
    return any(isinstance(module, BlockExperts) or is_fused(module) for module in experts.modules())


def _rename_saved(experts: BlockExperts, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """The state of a BlockExperts under the names, and in the orientation, of the module that it replaced."""
    layer, own = experts.layer, f"{prefix}layer.weights."
    kept = {key.removeprefix(own): state.pop(key) for key in list(state) if key.startswith(own)}
    if part := layer.part_name:
        state[prefix + part + HOMES] = kept[part + HOMES]
    stacks = layer._ranks()[0].homes() if part else layer.full_experts()
    for name, saved in experts._names.items():
        state[prefix + part + saved] = experts.turn(stacks[name].detach())


def _rename_loaded(experts: BlockExperts, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """The inverse, for every owned rank; rows_for then takes a rank's own experts."""
    for key in [key for key in state if key.startswith(prefix) and PART.match(key, len(prefix))]:
        state[prefix + without_part(key.removeprefix(prefix))] = state.pop(key)
    homes = state.pop(prefix + HOMES, None)
    for name, saved in experts._names.items():
        if (stack := state.pop(prefix + saved, None)) is None:
            continue
        homes = torch.arange(len(stack)) if homes is None else homes
        for i in range(len(experts.layer.weights)):
            state[f"{prefix}layer.weights.{i}.{name}"] = experts.turn(stack)
            state[f"{prefix}layer.weights.{i}.{HOMES}"] = homes


def no_gate(rows: Tensor) -> tuple[Tensor, Tensor]:
    """In place of a gate, which the block keeps."""
    raise RuntimeError("experts must be called with the block's choices, see BlockExperts.forward")
