"""BlockExperts replaces the ``experts`` of a Hugging Face MoE block; the router and the saved keys do not change.

Works without importing transformers. Shapes: T tokens, K experts per token, E experts, H and I widths.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from isoload.layer.moe import MoE
from isoload.layer.pretrained import save_pretrained
from isoload.layer.replay import ModelReplay, Replay
from isoload.layer.stored import StoredExperts
from isoload.placement.placement import Placement
from isoload.placers import place
from isoload.policies import POLICIES, Policy, make_policy
from isoload.topology import Topology
from isoload.transport import LocalTransport, Transport
from isoload.weights.experts import DTYPES, Activation, ClampedGLU, ExpertWeights, SwiGLU
from isoload.weights.storage import HOMES, PART, no_distributed_checkpoint, without_part

STACKS = {"gate_up": "gate_up_proj", "down": "down_proj"}
BIASES = {"gate_up_bias": "gate_up_proj_bias", "down_bias": "down_proj_bias"}
ROUTERS = ("gate", "router")  # attributes of a block that may be its router
SCORE_BIASES = ("e_score_correction_bias", "expert_bias")  # further arguments of routers
BY_SEQUENCE = ("AfmoeTokenChoiceRouter",)  # need rows [1, T, H]; others would mix its axes
NOISE = ("jitter_noise", "input_jitter_noise", "router_jitter_noise")


class BlockGate:
    """Gate that calls a block's own router, without its hooks: transformers would record router logits twice."""

    def __init__(self, block: nn.Module) -> None:
        name = type(block).__name__
        routers = [r for r in (getattr(block, n, None) for n in ROUTERS) if isinstance(r, nn.Module)]
        if not routers:
            raise ValueError(f"block must have a {' or '.join(ROUTERS)} to read, got a {name} without")
        self.block, self.router = block, routers[0]
        _, *self.takes = inspect.signature(self.router.forward).parameters
        if others := [argument for argument in self.takes if argument not in SCORE_BIASES]:
            raise ValueError(
                f"router must need only rows and a bias of the block, got a {type(self.router).__name__} in {name}, "
                f"which needs {', '.join(others)}"
            )

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        noise = {n: getattr(m, n) for m in (self.block, self.router) for n in NOISE if getattr(m, n, 0)}
        if noise and self.block.training:
            raise ValueError(
                f"block must be in eval mode, because training adds noise to its rows, got {noise} in "
                f"{type(self.block).__name__}"
            )
        inputs = rows[None] if type(self.router).__name__ in BY_SEQUENCE else rows
        answer = self.router.forward(
            inputs, *(getattr(self.block, argument, None) for argument in self.takes)
        )
        weights, ids = answer[1:3] if isinstance(answer, tuple) and len(answer) > 2 else (rows, rows)
        of_each = ids.dim() == 2 and len(ids) == len(rows) and ids.shape == weights.shape
        if ids.dtype not in (torch.int32, torch.int64) or not of_each:
            raise ValueError(
                "router must return logits, weights [T, K] and ids [T, K], got something else from "
                f"{type(self.router).__name__} in {type(self.block).__name__}"
            )
        return ids, weights


def block_experts(block: nn.Module) -> tuple[ExpertWeights, Activation]:
    """Return the stacks [E, ...] of a block's fused experts, as views of its memory, and their activation."""
    check_unwatched(block)
    experts = own_experts(block)
    check_fused(experts)
    parameters = dict(experts.named_parameters(recurse=False))
    names, stacks = saved_names(experts), fused_stacks(experts, parameters).stacks()
    dense = {
        name: nn.Parameter(stack.detach(), parameters[names[name]].requires_grad)
        for name, stack in stacks.items()
    }
    return ExpertWeights(**dense), fused_activation(experts)


def own_experts(block: nn.Module) -> nn.Module:
    experts = getattr(block, "experts", None)
    if not isinstance(experts, nn.Module):
        raise ValueError(f"block must have experts, got a {type(block).__name__} without")
    for name, module in experts.named_modules(prefix="experts"):
        if isinstance(module, StoredExperts):
            raise ValueError(
                f"this block is already balanced (its experts are an isoload {type(experts).__name__})"
            )
        # peft's attribute for the module that an adapter wraps
        if hasattr(module, "base_layer") or is_parametrized(module):
            raise ValueError(
                f"experts must have no adapters (LoRA): merge them first (merge_and_unload() of peft), or adapt other "
                f"modules, got {name} in a {type(module).__name__}"
            )
    return experts


def is_fused(experts: nn.Module) -> bool:
    return hasattr(experts, "is_transposed") and hasattr(experts, "has_bias")


def check_unwatched(block: nn.Module) -> None:
    experts = getattr(block, "experts", None)
    hooks = experts._forward_pre_hooks.values() if isinstance(experts, nn.Module) else ()
    if watched := [hook.watches for hook in hooks if hasattr(hook, "watches")]:
        raise ValueError(
            "experts must not be watched by a Recorder, which records nothing once isoload replaces them: set the "
            f"layer's balancer.recorder, got a watch of layer {watched[0]}"
        )


def saved_names(experts: nn.Module) -> dict[str, str]:
    return {**STACKS, **(BIASES if experts.has_bias else {})}


def check_fused(experts: nn.Module) -> None:
    name = type(experts).__name__
    flags = {"has_gate": True, "has_post_expert_norm": False}
    missing = [flag for flag in (*flags, "is_transposed", "has_bias") if not hasattr(experts, flag)]
    if missing:
        raise ValueError(f"experts must be a fused module of transformers, got {name} without {missing[0]}")
    for flag, expected in flags.items():
        if getattr(experts, flag) != expected:
            raise ValueError(f"experts.{flag} must be {expected}, got {getattr(experts, flag)} in {name}")
    stacks = list(saved_names(experts).values())
    if strays := [
        parameter_name for parameter_name, _ in experts.named_parameters() if parameter_name not in stacks
    ]:
        raise ValueError(
            f"experts must have no Parameters but {', '.join(stacks)}, got {strays[0]} in {name}"
        )
    for stack in stacks:
        weight = getattr(experts, stack, None)
        if not isinstance(weight, Tensor) or weight.dtype not in DTYPES:
            kind = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
            raise ValueError(
                f"experts.{stack} must be a Parameter of float64, float32, bfloat16 or float16, got {kind} in {name}"
            )


def fused_stacks(experts: nn.Module, parameters: Mapping[str, Tensor]) -> ExpertWeights:
    """Return views [E, out, in] of a module's Parameters, transposed if needed; biases are [E, out]."""

    def view(stack: Tensor) -> Tensor:
        return stack.transpose(1, 2) if experts.is_transposed and stack.dim() == 3 else stack

    return ExpertWeights(**{name: view(parameters[saved]) for name, saved in saved_names(experts).items()})


def fused_activation(experts: Any) -> Activation:
    """Return isoload's activation with the same values if there is one, else the module's own function."""
    # The bound function keeps its module alive, so it is bound to a copy without the weights that isoload replaces.
    # FSDP's classes have no copy.copy.
    bare = object.__new__(type(experts))
    bare.__dict__ = {**vars(experts), "_parameters": dict.fromkeys(experts._parameters)}
    module_activation: Activation = bare._apply_gate
    activations: list[Activation] = [SwiGLU()]
    if hasattr(experts, "alpha") and hasattr(experts, "limit"):
        activations.append(ClampedGLU(float(experts.alpha), float(experts.limit)))
    # Gates and ups of every sign, also beyond any clamping limit, in both arrangements; products of two stay finite.
    size = torch.logspace(-2, 15, 52, dtype=torch.float32, device="cpu")
    values = torch.cat([-size.flip(0), size.new_zeros(1), size])
    gate, up = torch.meshgrid(values, values, indexing="ij")
    probe = torch.cat([torch.cat([gate, up], dim=1), torch.stack([gate, up], dim=2).flatten(1)])
    with torch.no_grad():
        expected = module_activation(probe)
        for activation in activations:
            if torch.allclose(activation(probe), expected, rtol=1e-5, atol=1e-6):
                return activation
    return module_activation


SPARE_SLOTS = 2  # per rank, if a policy that borrows is given without a placement


class BlockExperts(nn.Module):
    """Balanced experts that replace ``block.experts``, with the same arguments and the same result.

    Tokens are split evenly over the ranks that the process owns. If it owns all ranks, ``state_dict()`` has the keys
    and experts of the replaced module; else keys contain the rank (``rank_1_of_4``) and have its experts
    (``home_experts``). Both can be loaded, as can a checkpoint of the model; then refresh the replicas.

    Args:
        block: MoE block whose ``experts`` transformers fuses. The weights of all experts are copied to their ranks.
        transport: connects the ranks.
        placement: experts of every slot, without shared experts.
        **options: arguments of :class:`MoE` except gate and experts.
    """

    replay: Replay | None = None  # of the current call

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
        order = [name for name, _ in replaced.named_parameters(recurse=False)]  # as in the model's states
        self._names = dict(sorted(names.items(), key=lambda pair: order.index(pair[1])))
        self._transposed = bool(replaced.is_transposed)
        self.register_state_dict_post_hook(_rename_saved)
        self.register_load_state_dict_pre_hook(_rename_loaded)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum [T, H] of every token's experts, for rows [T, H], ids [T, K] and weights [T, K]."""
        parts, replay = len(self.layer.group.ranks), self.replay
        inputs = hidden_states, top_k_index, top_k_weights
        rows, ids, weights = (list(v.tensor_split(parts)) for v in inputs)
        if replay is None:
            return torch.cat(list(self.layer.compute(rows, ids, weights)))
        replay.leave()

        def choose() -> list[tuple[Tensor, Tensor]]:
            chosen = replay.choices(len(hidden_states), top_k_index)
            return list(zip(chosen.tensor_split(parts), weights, strict=True))

        return torch.cat(self.layer._run(rows, choose, None, replay.plan))

    def __getattr__(self, name: str) -> Any:
        # torch.distributed.checkpoint looks up every key of a state among the modules
        if PART.match(f"{name}."):
            raise AttributeError(no_distributed_checkpoint(name))
        return super().__getattr__(name)

    @property
    def part_keys(self) -> str:
        return ""

    def whole_experts(self) -> dict[str, Tensor]:
        stacks = self.layer.full_experts(self.layer.writer)
        return {saved: self.turn(stacks[name]) for name, saved in self._names.items()}

    def turn(self, stack: Tensor) -> Tensor:
        """Return a stack [E, out, in] in the replaced module's orientation, or back."""
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
    """Replace the experts of every MoE block of a Hugging Face model by balanced ones, and return the layers in order.

    Call it before creating an optimizer, ``refresh_replicas()`` of the layers after every optimizer step, and
    ``model.save_pretrained`` on all ranks. Calls of the model then take ``routes=``, the experts of every token ([T, L,
    K] or [B, S, L, K] for L MoE blocks, -1 = masked), for which the routers compute weights with gradients; and
    ``plans=`` (:meth:`isoload.balancing.known_routes.KnownPlans.layers`). After a ValueError no block has changed.

    Args:
        model: model or one of its blocks, with the weights of all experts in every process.
        topology: the ranks, or their number R.
        transport: one transport for all blocks. None: all ranks are virtual ranks of this process.
        placement: of the routed experts: the model's MoE layers by number, or one layer per MoE block in order without
            layer numbers. None: experts in order (placer ``trivial``).
        spare_slots: experts that a rank can borrow at a time, if no placement is given. None: 2 if the policy borrows.
        **options: policy, its options, and other arguments of :class:`MoE`.
    """
    blocks = [block for _, block in find_blocks([model], "model")]
    if (
        placement is not None
    ):  # the model's numbers of the decoder layers with blocks, if module names have them
        names = {id(module): name for name, module in model.named_modules()}
        matches = [re.search(r"(?:^|\.)layers\.(\d+)\.", f"{names[id(block)]}.") for block in blocks]
        numbers = [int(match[1]) for match in matches if match]
        if len(numbers) == len(blocks) == len(set(numbers)):
            placement = placement.for_model(numbers)
    balanced = take_over(blocks, topology, transport, placement, spare_slots, **options)
    if hasattr(model, "save_pretrained") and not balanced[0].layer.group.owns_all:
        model.save_pretrained = MethodType(save_pretrained, model)  # type: ignore[assignment]
    ModelReplay(model, blocks)
    return put_in(blocks, balanced)


def spare_count(policy: str | Policy, spare_slots: int | None) -> int:
    if spare_slots is not None:
        return spare_slots
    registered = isinstance(policy, Policy) or policy in POLICIES  # else the layer rejects it
    return SPARE_SLOTS if registered and make_policy(policy).borrows else 0


def check_spare(placement: Placement, spare_slots: int | None) -> None:
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
    """Return balanced experts for each block, without changing the blocks; arguments as of :func:`balance`."""
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


def put_in(blocks: Sequence[nn.Module], balanced: Sequence[BlockExperts]) -> list[MoE]:
    for block, experts in zip(blocks, balanced, strict=True):
        block.experts = experts
    return [experts.layer for experts in balanced]


def find_blocks(parts: Iterable[nn.Module], argument: str) -> list[tuple[nn.Module, nn.Module]]:
    """Return each part with its MoE blocks, in order. Raises ValueError, which names `argument`, if there are none."""
    parts = list(parts)
    pairs = [(part, block) for part in parts for block in part.modules() if is_known(block)]
    if not pairs:
        inside = [module for part in parts for module in part.modules() if hasattr(module, "experts")]
        kinds = sorted({f"{type(m.experts).__name__} in a {type(m).__name__}" for m in inside})
        kinds = kinds or sorted({type(part).__name__ for part in parts})
        raise ValueError(
            f"{argument} must have MoE blocks with experts that transformers fuses, got {', '.join(kinds) or 'nothing'}"
        )
    return pairs


def is_known(block: nn.Module) -> bool:
    experts = getattr(block, "experts", None)
    if not isinstance(experts, nn.Module):
        return False
    return any(isinstance(module, BlockExperts) or is_fused(module) for module in experts.modules())


def _rename_saved(experts: BlockExperts, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Give the state of a BlockExperts the names and the orientation of the replaced module."""
    layer, inner = experts.layer, f"{prefix}layer.weights."
    popped = {key.removeprefix(inner): state.pop(key) for key in list(state) if key.startswith(inner)}
    if part := layer.part_name:
        state[prefix + part + HOMES] = popped[part + HOMES]
    stacks = layer._ranks()[0].homes() if part else layer.full_experts()
    for name, saved in experts._names.items():
        state[prefix + part + saved] = experts.turn(stacks[name].detach())


def _rename_loaded(experts: BlockExperts, state: dict[str, Any], prefix: str, *unused: Any) -> None:
    """Undo :func:`_rename_saved` for every owned rank; ``rows_for`` then selects each rank's experts."""
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
    raise RuntimeError("experts must be called with the block's choices, see BlockExperts.forward")
