"""Hooks of SGLang's dispatch: logical to physical ids, and the shared experts of --enable-waterfill.

With --ep-dispatch-algorithm dynamic and an all-to-all backend each rank plans alone: SGLang calls nothing on a rank
without tokens, so no pass may contain an exchange. With lp SGLang calls the layer's solver, a Layer, before it maps
ids, in the DeepSeek family also on ranks without tokens; its result is the physical ids already.
BaseDispatcher.register_pre_dispatch_hook cannot replace these hooks: SGLang has mapped, masked and recorded the ids by
then, and passes neither the number of padding rows nor a call where a kernel routes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from isoload.balancing.balancer import Balancer
from isoload.engines.layers import JOINED_BY_ALL
from isoload.engines.settings import CHECK, REBALANCE, SPARE, SWITCH, Variable
from isoload.engines.sglang import borrowing
from isoload.engines.sglang.layers import LAYERS, Layer, model_name, moe, phase_of
from isoload.engines.sglang.pages import check_start
from isoload.engines.sglang.placement import check_at_start, check_file
from isoload.placement.placement import Placement
from isoload.policies.shared import WaterfillPolicy
from isoload.topology import Topology

Original = Callable[..., Any]
MOVED = "routed_experts_weights_of_layer"  # a model's weights that SGLang moves when experts move


def set_metadata(original: Original, value: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap set_global_expert_location_metadata: make the Balancers, or in shadow mode the record, before any batch."""
    original(value, *args, **kwargs)
    if value is None:
        return
    if LAYERS.settings.mode == "shadow":
        if LAYERS.settings.spare_slots:
            borrowing.check_redundant(moe().ep_num_redundant_experts, value.ep_size)
        LAYERS.count(value)
        return
    algorithm = moe().ep_dispatch_algorithm
    borrowing.check_start(value, algorithm)
    check_at_start(value)
    if algorithm == "dynamic" and "dynamic" not in LAYERS.lost:
        LAYERS.follow(value, "dynamic")
        borrowing.begin()
    elif LAYERS.settings.switch is not None:
        raise ValueError(
            f"{SWITCH.name} must come with --ep-dispatch-algorithm dynamic that isoload attached to, got {algorithm!r}"
        )


def init_lplb_solvers(*, model_config: Any) -> None:
    """Replace SGLang's function: pass Layers for solvers; after a rebalance they exist already and are refreshed."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
    from sglang.srt.eplb.lplb_solver import assert_lplb_supported_model, set_global_lplb_solver

    architectures = getattr(model_config.hf_config, "architectures", None)
    if architectures and LAYERS.loads_of("lp") in JOINED_BY_ALL:
        # In other models ranks without tokens do not join a gather.
        assert_lplb_supported_model(architectures[0])
    metadata = get_global_expert_location_metadata()
    if metadata is None:
        return
    LAYERS.follow(metadata, "lp")
    borrowing.begin()
    for layer_id, layer in LAYERS.by_id.items():
        set_global_lplb_solver(layer_id, layer)


def resolve_routing_inputs(original: Original, *, layer_id: int, **kwargs: Any) -> tuple[Tensor | None, Any]:
    """Wrap SGLang's function, which has a layer's batch, its padding and its number."""
    num_valid, info = original(layer_id=layer_id, **kwargs)
    layer = LAYERS.layer(layer_id)
    if info is not None and layer is not None:
        if info.ep_dispatch_algorithm == "dynamic":
            layer.turn(LAYERS.phase_now)
            info.isoload_layer, info.isoload_num_valid = layer, num_valid
        else:
            layer.num_valid = num_valid
    return num_valid, info


def map_dynamic(original: Original, topk_ids: Tensor, info: Any, *args: Any, **kwargs: Any) -> Tensor:
    layer: Layer | None = getattr(info, "isoload_layer", None)
    if layer is None or info.ep_dispatch_algorithm != "dynamic":
        return cast(Tensor, original(topk_ids, info, *args, **kwargs))
    num_valid = info.isoload_num_valid
    rows = topk_ids if topk_ids.dim() == 2 else topk_ids.view(-1, 1)
    slots = layer.slots(rows, num_valid).view(topk_ids.shape)
    if num_valid is None and layer.switch is None:
        return slots
    theirs = original(topk_ids, info, *args, **kwargs).to(slots.dtype)
    chosen = slots if layer.switch is None else layer.switch.choose(slots, theirs)
    # Rows of padding keep SGLang's own replica: some of its kernels do not accept -1.
    return chosen if num_valid is None else torch.where(slots < 0, theirs, chosen)


def map_solved(topk_ids: Tensor, info: Any, log2phy_prob: Tensor) -> Tensor:
    """Replace _topk_ids_logical_to_physical_probability: the Layer's solve() has mapped these ids already."""
    if log2phy_prob.shape != topk_ids.shape:
        raise RuntimeError(
            f"solved ids must be those of topk_ids {list(topk_ids.shape)}, got {list(log2phy_prob.shape)}"
        )
    return log2phy_prob


def post_process(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Wrap _post_process_topk_ids: count the slots of shadow mode, and pass home slots to SGLang's recorder. The third
    result has the slots of the routed copies, padding masked."""
    result = original(*args, **kwargs)
    arguments = dict(zip(NAMES, args, strict=False)) | kwargs
    info, slots = arguments.get("expert_location_dispatch_info"), result[2]
    if LAYERS.record is not None and info is not None and slots is not None:
        # On AMD rows of padding are those of expert 0, elsewhere they are -1.
        num_valid = arguments.get("num_token_non_padded") if torch.version.hip else None
        LAYERS.record.add(arguments["layer_id"], slots, num_valid)
    if LAYERS.settings.spare_slots and info is not None and slots is not None:
        return (*result[:2], borrowing.home_slots(arguments["layer_id"], slots))
    return result


NAMES = (  # of _post_process_topk_ids
    "topk_ids", "topk_weights", "topk_config", "router_logits", "layer_id", "num_token_non_padded",
    "expert_location_dispatch_info", "padded_rows_masked",
)  # fmt: skip


def initialize(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap ModelRunner.initialize, after which the algorithm of every layer is fixed."""
    if not self.is_draft_worker:
        check_start(self)
        check_file(getattr(self, "model_config", None))
    original(self, *args, **kwargs)
    if self.is_draft_worker:
        return
    if LAYERS.settings.mode == "shadow":
        LAYERS.announce_shadow(model_name(self), dict(getattr(self.model, MOVED, {})))
        return
    if LAYERS.by_id and moe().enable_eplb:
        borrowing.check_model(self.model)
    if LAYERS.settings.spare_slots:
        from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

        modules = borrowing.expert_modules(self.model)
        borrowing.bind(get_global_expert_location_metadata(), weights_of(self.model, SPARE), modules)
    LAYERS.announce()
    if LAYERS.settings.report_seconds:
        placer = LAYERS.settings.placer if LAYERS.places() else "engine"
        moved = dict(getattr(self.model, MOVED, {}))  # SGLang's LazyValue has only keys and items
        LAYERS.measure(model_name(self), placer, moved)
    if LAYERS.settings.rebalance is not None and LAYERS.places():
        LAYERS.decide(weights_of(self.model, REBALANCE), moe().eplb_rebalance_num_iterations)
    if LAYERS.settings.check_weights:
        LAYERS.check_loaded(weights_of(self.model, CHECK))


def weights_of(model: Any, variable: Variable) -> Mapping[int, Sequence[Tensor]]:
    weights = getattr(model, MOVED, None)
    if weights is None:
        raise ValueError(
            f"{variable.name} needs a model with {MOVED}, which {type(model).__name__} lacks: unset {variable.name}"
        )
    return dict(weights)  # SGLang's LazyValue has keys and items, and cannot be iterated


def forward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ModelRunner.forward, in which graphs are replayed and experts move; exchanges run after the pass. SGLang
    counts the same passes towards its own rebalances: with attention data parallelism, ranks without requests run idle
    passes. Reports wait for the device, once per interval."""
    if self.is_draft_worker:
        return original(self, *args, **kwargs)
    if LAYERS.record is not None or LAYERS.in_prefill_graph is not None:
        LAYERS.phase = phase_of(args[0] if args else kwargs["forward_batch"])
    if LAYERS.record is not None:
        LAYERS.record.begin()
        LAYERS.record.phase = LAYERS.phase
    try:
        result = original(self, *args, **kwargs)
    finally:
        LAYERS.phase = "decode"  # of graphs that are captured between passes
    LAYERS.step_ended()
    if LAYERS.meter is not None and LAYERS.meter.report_if_due():
        LAYERS.check_device()
        borrowing.report()
    return result


class WaterfillBalancer:
    """Replacement of SGLang's WaterfillBalancer, one for each TopK. All ranks make and call them together.

    With lp the layer's plan has already placed the shared copies (policy joint, unless ISOLOAD_POLICY names another).
    Otherwise, and in draft models, they fill the ranks above the routed copies (policy waterfill). `num_routed_experts`
    is P; `shared_weight`, of the shared expert's output, is in older versions the inverse of routed_scaling_factor (1
    if 0).
    """

    flag = "--enable-waterfill"

    def __init__(
        self,
        num_routed_experts: int,
        world_size: int,
        rank: int,
        layer_id: int,
        shared_weight: float | None = None,
        *,
        routed_scaling_factor: float | None = None,
    ) -> None:
        if (shared_weight is None) == (routed_scaling_factor is None):
            raise ValueError(
                "one of shared_weight and routed_scaling_factor must be given, "
                f"got {shared_weight} and {routed_scaling_factor}"
            )
        if num_routed_experts % world_size:
            raise ValueError(
                f"num_routed_experts must be a multiple of {world_size}, got {num_routed_experts}"
            )
        if shared_weight is None:
            shared_weight = 1 / routed_scaling_factor if routed_scaling_factor else 1.0
        self.slots_per_rank, self.shared_weight = num_routed_experts // world_size, shared_weight
        self.layer: Layer | None = None
        layer = LAYERS.by_id.get(layer_id)
        # The model's own layers come before those of draft models, whose numbers may be the same.
        if layer is not None and layer.plans_shared:
            LAYERS.add_shared(layer)
            self.layer = layer
        else:
            LAYERS.num_waterfill, LAYERS.waterfill_flag = LAYERS.num_waterfill + 1, self.flag
            self.balancer = fixed_routed(num_routed_experts, world_size)

    def expand_topk(self, topk_output: Any, num_tokens: int) -> Any:
        """Return topk_ids [T, K + 1] with the shared slots, from [T, K] routed slots, and their weights. Every rank's
        shared slot is its last, so routed slot p becomes ``p + p // S``. A row without a routed copy gets shared slot
        -1 and weight 0, as every id of -1 does."""
        ids, weights = topk_output.topk_ids, topk_output.topk_weights
        shared_rank = None if self.layer is None else self.layer.take_shared(num_tokens)
        if shared_rank is not None:
            # One shared slot follows the routed ones of each rank; -1 stays -1.
            size = self.slots_per_rank
            routed = ids + ids.div(size, rounding_mode="floor").clamp(min=0)
            live = (shared_rank >= 0) & (ids >= 0).any(1, keepdim=True)  # SGLang may have masked a row since
            shared_slot = torch.where(live, shared_rank * (size + 1) + size, -1).to(ids.dtype)
            slots = torch.cat([routed, shared_slot], dim=1)
        elif self.layer is None:
            slots = cast(Tensor, self.balancer(ids.contiguous()))
        else:
            raise RuntimeError(
                "Waterfill must come after the layer's plan, which was not made for this batch"
            )
        shared = torch.where(slots[:, -1:] >= 0, self.shared_weight, 0.0).to(weights.dtype)
        weights = torch.cat([weights.masked_fill(ids < 0, 0.0), shared], dim=1)
        return topk_output._replace(topk_ids=slots, topk_weights=weights)


class DeepEPWaterfillBalancer(WaterfillBalancer):
    """The class's name in SGLang up to 0.5.15."""

    flag = "--enable-deepep-waterfill"


def fixed_routed(num_slots: int, num_ranks: int) -> Balancer:
    """Return a Balancer in which every slot is an expert that cannot move, and every rank has a shared expert."""
    per_rank = torch.arange(num_slots, dtype=torch.int32).view(num_ranks, -1)
    shared = torch.full((num_ranks, 1), num_slots, dtype=torch.int32)
    slots, topology = torch.cat([per_rank, shared], dim=1).view(1, -1), Topology(num_ranks)
    placement = Placement(slots, topology, num_slots + 1, num_shared=1)
    group = LAYERS.group(topology) if num_ranks > 1 else None
    return Balancer(placement, policy=WaterfillPolicy(routed="none"), group=group, shared_columns=False)
