"""SGLang's own classes on one rank of a gloo group: its plug-in loader, expert locations, TopK, HashTopK and Waterfill.

Its CUDA branch runs on CPU tensors, which `lp` needs; the dispatchers behind it (DeepEP and the like) need a GPU, so
what they would be given is what is returned.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo
from torch import Tensor

EXPERTS, K, LAYERS, LAYER = 16, 4, 3, 1
CASES = ("full", "padded", "one rank empty", "all empty", "few")


def start(
    rank: int,
    ranks: int,
    algorithm: str,
    waterfill: bool,
    config: Path,
    elastic: bool = False,
    **variables: str,
) -> Any:
    """A published configuration, groups, and expert locations laid out by --eplb-algorithm isoload; SGLang's own where
    ranks may go."""
    os.environ.update(ISOLOAD_SGLANG="1", ISOLOAD_STRICT="1", **variables)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.eplb import expert_location
    from sglang.srt.layers.moe import topk
    from sglang.srt.model_executor.model_runner_components import moe_ep_setup
    from sglang.srt.runtime_context import get_context, get_parallel

    get_context().override_server_args(
        ep_dispatch_algorithm=algorithm, ep_num_redundant_experts=2 * ranks, moe_a2a_backend="deepep",
        tp_size=ranks, ep_size=ranks, device="cpu", enable_waterfill=waterfill,
        eplb_algorithm="elasticity_aware" if elastic else "isoload", enable_eplb=True,
        elastic_ep_backend="mooncake" if elastic else None,
    ).install()  # fmt: skip
    parallel_state.init_distributed_environment(world_size=ranks, rank=rank, local_rank=rank, backend="gloo")
    get_parallel().override_permanently(tp_rank=rank, moe_ep_rank=rank)
    parallel_state.initialize_model_parallel(backend="gloo")
    model = ModelConfig(str(config))
    if elastic:
        from sglang.srt.elastic_ep.elastic_ep import ElasticEPStateManager

        state = ElasticEPStateManager._build_state(ep_size=ranks, device=torch.device("cpu"))
        ElasticEPStateManager._instance = state
    locations = expert_location.ExpertLocationMetadata.init_by_eplb(model, skewed_counts())
    expert_location.set_global_expert_location_metadata(locations)
    if algorithm == "lp":
        moe_ep_setup.init_lplb_solvers(model_config=model)
    topk._is_cuda = True
    torch._dynamo.config.disable = True  # SGLang compiles the static map, for half a minute
    return model


def skewed_counts() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    skew = torch.rand(1, LAYERS, EXPERTS, generator=generator).pow(4)
    return (1000 * skew).long() + 1


def draw(case: str, rank: int) -> tuple[Tensor, Tensor, int]:
    """(logical ids [T, K], weights [T, K], rows that are no padding) of a rank."""
    tokens = {"full": 200, "padded": 128, "one rank empty": 90 * (rank != 0), "all empty": 0, "few": 3}[case]
    generator = torch.Generator().manual_seed(100 * CASES.index(case) + rank)
    popularity = torch.rand(EXPERTS, generator=torch.Generator().manual_seed(7)).pow(6)
    ids = torch.empty(0, K, dtype=torch.int32)
    if tokens:
        ids = torch.multinomial(popularity.expand(tokens, -1), K, generator=generator).int()
    weights = torch.rand(tokens, K, generator=generator)
    return ids, weights, tokens // 2 + rank if case == "padded" else tokens


def make_topk(model: Any, waterfill: bool) -> Any:
    """A TopK as a model makes it, with Waterfill's balancer where it is wanted."""
    from sglang.srt.configs.shared_experts import SharedExpertsConfig
    from sglang.srt.layers.moe.topk import TopK
    from sglang.srt.model_executor.model_runner_components.moe_ep_setup import prepare_moe_topk
    from sglang.srt.runtime_context import get_model

    shared = SharedExpertsConfig(
        fusion_disabled=False, num_fused_shared_experts=int(waterfill), use_waterfill=waterfill
    )
    with get_model().override(shared_experts=shared):
        made = TopK(K, layer_id=LAYER, routed_scaling_factor=2.5)
    prepare_moe_topk(model=torch.nn.ModuleList([made]), model_config=model)
    return made


def route(top: Any, ids: Tensor, weights: Tensor, valid: int) -> Any:
    """What TopK returns for these logical ids: (ids, weights, router_logits)."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput, _post_process_topk_ids, resolve_routing_inputs

    if not len(ids):
        return top.empty_topk_output(torch.device("cpu"), layer_id=LAYER)
    bound = None if valid == len(ids) else torch.tensor(valid)
    bound, info = resolve_routing_inputs(layer_id=LAYER, is_draft=False, num_token_non_padded=bound)
    logits = torch.zeros(len(ids), EXPERTS)
    slots, weights, _ = _post_process_topk_ids(
        ids.clone(), weights, top.topk_config, logits, LAYER, bound, info
    )
    return top._apply_waterfill(StandardTopKOutput(weights, slots, logits), len(ids))


def serve(
    rank: int, ranks: int, algorithm: str, waterfill: bool, variables: dict[str, str], config: Path
) -> dict[str, Any]:
    """All cases, then the passes up to an exchange and one case again, then a rebalance and that case again."""
    from isoload.engines.layers import EXCHANGE_EVERY
    from isoload.engines.sglang import LAYERS as ours
    from isoload.engines.sglang import dispatch

    model = start(rank, ranks, algorithm, waterfill, config, **variables)
    from sglang.srt.eplb import expert_location
    from sglang.srt.model_executor.model_runner_components import moe_ep_setup

    locations = expert_location.get_global_expert_location_metadata()
    top = make_topk(model, waterfill)
    layer = ours.by_id.get(LAYER)

    def batch(case: str) -> dict[str, Any]:
        ids, weights, valid = draw(case, rank)
        out = route(top, ids, weights, valid)
        plan = None if layer is None else layer.balancer.last_plan
        return {
            "ids": ids, "valid": valid, "slots": out.topk_ids, "weights": out.topk_weights, "given": weights,
            "table": locations.physical_to_logical_map_cpu[LAYER].clone(),
            "plan": None if plan is None else (plan.quota, int(plan.peak), int(plan.bound)),
        }  # fmt: skip

    found: dict[str, Any] = {case: batch(case) for case in CASES}
    exchanged = [dict(group.traffic.bytes) for group in ours._groups.values()]
    for _ in range(EXCHANGE_EVERY):
        dispatch.forward(lambda runner: None, SimpleNamespace(is_draft_worker=False))
    found["renewed"] = batch("full")
    before = [] if layer is None else addresses(layer)
    moved = expert_location.ExpertLocationMetadata.init_by_eplb(model, skewed_counts().flip(-1))
    locations.update(moved, [0, LAYER])
    if algorithm == "lp":
        moe_ep_setup.init_lplb_solvers(model_config=model)
    found["rebalanced"] = batch("full")
    found["exchanged"] = exchanged[0]
    found["pointers kept"] = before == ([] if layer is None else addresses(layer))
    return found


def serve_phases(rank: int, ranks: int, config: Path, agree: bool = True) -> list[dict[str, Any]]:
    """Passes in which the first rank has another phase than the others, as SGLang's schedulers tell each other; where
    they do not agree each takes its own."""
    text = "prefill=joint,decode=exact_active"
    model = start(rank, ranks, "lp", True, config, ISOLOAD_POLICY=text)
    from sglang.srt.managers.scheduler_components.dp_attn import MLPSyncBatchInfo
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from isoload.engines.sglang import LAYERS as ours
    from isoload.engines.sglang import dispatch

    top, found = make_topk(model, True), []
    for mode, case in (
        (ForwardMode.EXTEND, "full"),
        (ForwardMode.DECODE, "few"),
        (ForwardMode.EXTEND, "few"),
    ):
        own = (ForwardMode.IDLE if case == "full" else ForwardMode.DECODE) if rank else mode
        ids, weights, valid = draw("all empty" if own == ForwardMode.IDLE else case, rank)
        names = "can_run_decode_cuda_graph", "can_run_draft_cuda_graph", "can_run_prefill_cuda_graph"
        said = MLPSyncBatchInfo(
            ranks, 1, 1, len(ids), 0, is_extend_in_batch=own.is_extend(), local_can_run_tbo=False,
            local_forward_mode=own.value, **dict.fromkeys(names, False),
        )  # fmt: skip
        if agree:
            said.all_gather("cpu", torch.distributed.group.WORLD)
        batch = SimpleNamespace(forward_mode=own, is_extend_in_batch=said.is_extend_in_batch)
        runner = SimpleNamespace(is_draft_worker=False)
        routed = dispatch.forward(lambda *_: route(top, ids, weights, valid), runner, batch)  # noqa: B023
        of = ours.by_id[LAYER].balancer
        found.append(
            {"ids": ids, "slots": routed.topk_ids, "policy": of.policy.name, "plan": of.last_plan.quota}
        )
    return found


def serve_spare(rank: int, ranks: int, config: Path) -> list[dict[str, Any]]:
    """Batches of prefill and decode behind lp, each with other experts in the spare slots; rows of weights name their
    expert."""
    policy = "prefill=llep:within=node:threshold=1:min_chunk=1:refill_above=1,decode=exact"
    model = start(rank, ranks, "lp", False, config, ISOLOAD_SPARE_SLOTS="1", ISOLOAD_POLICY=policy)
    from sglang.srt.eplb import expert_location

    from isoload.engines.sglang import LAYERS as ours
    from isoload.engines.sglang import borrowing

    locations, top = expert_location.get_global_expert_location_metadata(), make_topk(model, False)
    layer, size = ours.by_id[LAYER], EXPERTS // ranks + 2
    experts = locations.physical_to_logical_map_cpu[LAYER][rank * size : (rank + 1) * size]
    stacks = [experts.float().view(-1, 1).repeat(1, 3), experts.clone()]
    parts = {"w13_weight": stacks[0], "w2_weight": stacks[1]}
    experts_module: Any = SimpleNamespace(named_parameters=parts.items)
    borrowing.bind(locations, {LAYER: stacks}, {LAYER: experts_module})
    found = []
    for number, case in enumerate(("full", "one rank empty", "few", "one rank empty", "full", "all empty")):
        ours.phase = "decode" if number == 2 else "prefill"
        ids, weights, valid = draw(case, rank)
        ids = (ids + 5 * number) % EXPERTS
        before = layer.spare.counts.tolist()
        slots = route(top, ids, weights, valid).topk_ids
        borrowing.wait_for_experts(lambda *_: None, SimpleNamespace(layer_id=LAYER))
        assert torch.equal(stacks[0][:, 0].long(), stacks[1])
        table = layer.spare.filled.slot_to_expert.clone()
        found.append({
            "ids": ids, "slots": slots, "table": table, "peak": int(layer.balancer.last_plan.peak),
            "prefill": ours.phase == "prefill", "moves": layer.spare.counts.tolist()[1] - before[1],
            "experts": table[rank * size : (rank + 1) * size].tolist(), "weights": stacks[1].tolist(),
        })  # fmt: skip
    return found


def lose_last_rank(rank: int, ranks: int, config: Path) -> dict[str, Any] | None:
    """A batch, then the last rank is gone: one within SGLang's rebalance, one behind it, and one when it is back. The
    process of that rank has ended, so that whoever waited for it would fail."""
    model = start(rank, ranks, "dynamic", False, config, elastic=True)
    from sglang.srt.elastic_ep.elastic_ep import ElasticEPStateManager
    from sglang.srt.eplb import expert_location

    from isoload.engines.layers import EXCHANGE_EVERY
    from isoload.engines.sglang import LAYERS as ours
    from isoload.engines.sglang import dispatch

    locations, top = expert_location.get_global_expert_location_metadata(), make_topk(model, False)
    state, said = ElasticEPStateManager.instance(), list[str]()
    handler = SimpleNamespace(level=0, handle=lambda record: said.append(record.getMessage()))
    logging.getLogger("isoload").addHandler(handler)  # type: ignore[arg-type]
    if rank == ranks - 1:
        return None

    def batch() -> tuple[Tensor, Tensor, Tensor]:
        ids, weights, valid = draw("full", rank)
        return (
            ids,
            route(top, ids, weights, valid).topk_ids,
            locations.physical_to_logical_map_cpu[LAYER].clone(),
        )

    def rebalance(layers: list[int]) -> None:
        moved = expert_location.ExpertLocationMetadata.init_by_eplb(model, skewed_counts())
        locations.update(moved, layers)

    found: dict[str, Any] = {"before": batch()}
    kept = addresses(ours.by_id[LAYER])
    for _ in range(EXCHANGE_EVERY):
        dispatch.forward(lambda runner: None, SimpleNamespace(is_draft_worker=False))
    state.active_ranks[-1] = 0
    state.sync_active_to_cpu()
    rebalance([0])
    found["half"] = batch()
    rebalance([LAYER, 2])
    found["gone"] = batch()
    state.active_ranks[-1] = 1
    state.sync_active_to_cpu()
    rebalance([0, LAYER, 2])
    found["back"] = batch()
    return found | {"kept": kept == addresses(ours.by_id[LAYER]), "said": said, "way": ours.exchanged()}


def addresses(layer: Any) -> list[int]:
    placed, own = layer.balancer.placed_on(torch.device("cpu")), layer.balancer.own_counts
    return [
        *([] if own is None else [own.recent.data_ptr(), own.offset.data_ptr()]),
        id(layer),
        placed.slot_to_expert.data_ptr(),
        placed.home_slot.data_ptr(),
        placed.tables.data.data_ptr(),
    ]
