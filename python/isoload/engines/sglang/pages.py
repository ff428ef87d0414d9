"""Absent slots inside of SGLang (ISOLOAD_RAGGED=pages): replicas only where they pay.

SGLang's tensors stay rectangular. Slots with -1 in its map come last on their rank, no copy is sent there, and their
memory is given back before the KV cache is sized. At a rebalance layers that shrink give pages back before layers that
grow take them. SGLang's functions that read the map are wrapped here, because they do not support -1.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from isoload.engines.settings import CHUNKS, PLACER, RAGGED
from isoload.engines.sglang.layers import FOREIGN, LAYERS, check_foreign, moe
from isoload.placers import make_placer, parse_placer
from isoload.weights.pages import PagePool, resident_slots

log = logging.getLogger("isoload")
Original = Callable[..., Any]
CANARY = "SGLANG_EXPERT_LOCATION_UPDATER_CANARY"
# Options of FOREIGN that know nothing of absent slots and need not.
FREE = ("enable_two_batch_overlap", "enable_waterfill", "enable_deepep_waterfill")


def check_start(runner: Any) -> None:
    if not LAYERS.settings.ragged:
        return
    options, placer = moe(), LAYERS.settings.placer
    feature = f"{RAGGED.name}={LAYERS.settings.ragged}"
    device = str(getattr(runner, "device", "cpu")).partition(":")[0]
    foreign = [name for name in FOREIGN if name not in FREE]
    check_foreign(feature, foreign, getattr(runner, "server_args", None))
    algorithm, chunks = (
        options.ep_dispatch_algorithm,
        getattr(options, "eplb_rebalance_layers_per_chunk", None),
    )
    without, shadow = f"must be left out with {feature}", LAYERS.settings.mode == "shadow"
    refused = (
        (
            device not in ("cpu", "cuda") or (device == "cuda" and torch.version.hip),
            f"{feature} gives back memory on CPUs and NVIDIA GPUs only, the model is on {device}: use a file without "
            "absent slots (isoload place --rectangle)",
        ),
        (
            algorithm == "fake" or (algorithm == "lp" and "lp" in LAYERS.lost),
            f"SGLang's own --ep-dispatch-algorithm {algorithm} {without}: it sends copies to absent slots",
        ),
        (
            options.enable_eplb and shadow,
            f"--enable-eplb {without} in shadow mode: SGLang's own algorithms fill every slot",
        ),
        (
            options.enable_eplb and not LAYERS.places(),
            f"--eplb-algorithm must be isoload with {feature}, because SGLang's own fill every slot, got "
            f"{options.eplb_algorithm!r}",
        ),
        (
            options.enable_eplb and chunks is not None and make_placer(*parse_placer(placer)).has_budget,
            f"{CHUNKS} {without} and {PLACER.name}={placer}, which moves memory between layers, got {chunks}",
        ),
        (
            os.environ.get(CANARY, "").lower() in ("1", "true", "yes", "y"),
            f"{CANARY} must be unset with {feature}: it compares the map of absent slots with weights",
        ),
    )
    for wrong, rule in refused:
        if wrong:
            raise ValueError(rule)


def by_mapping(
    original: Original, model_config: Any, physical_to_logical_map: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wrap ExpertLocationMetadata.init_by_mapping, which gets all keys of the file: drop that of absent slots."""
    kwargs.pop("isoload_ragged", None)
    return original(model_config, physical_to_logical_map, *args, **kwargs)


def lists_without_holes(
    original: Original, physical_to_logical_map: Tensor, num_logical_experts: int, *args: Any, **kwargs: Any
) -> Tensor:
    """Wrap _compute_logical_to_all_physical_map, which takes -1 for the last expert. Absent slots become replicas of
    one expert more, whose list is left out."""
    absent = physical_to_logical_map < 0
    if not bool(absent.any()):
        return torch.as_tensor(original(physical_to_logical_map, num_logical_experts, *args, **kwargs))
    table = torch.where(absent, num_logical_experts, physical_to_logical_map)
    lists: Tensor = original(table, num_logical_experts + 1, *args, **kwargs)[:, :num_logical_experts]
    return lists[:, :, : int((lists >= 0).sum(2).max())]


def counts_without_holes(
    original: Original,
    global_physical_count: Tensor,
    num_layers: int,
    num_logical_experts: int,
    physical_to_logical_map: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wrap _convert_global_physical_count_to_logical_count, whose scatter fails on -1. Nothing is counted in an absent
    slot, so any expert will do for it."""
    table = physical_to_logical_map.clamp(min=0)
    return original(global_physical_count, num_layers, num_logical_experts, table, *args, **kwargs)


def update_layer(
    original: Original,
    *args: Any,
    old_physical_to_logical_map: list[int],
    new_physical_to_logical_map: list[int],
    **kwargs: Any,
) -> Any:
    """Wrap update_expert_weights_single_layer, which would fetch expert -1 for a slot that becomes absent."""
    pairs = zip(old_physical_to_logical_map, new_physical_to_logical_map, strict=True)
    new = [before if after < 0 else after for before, after in pairs]
    maps = {"old_physical_to_logical_map": old_physical_to_logical_map, "new_physical_to_logical_map": new}
    return original(*args, **maps, **kwargs)


def update_weights(original: Original, **kwargs: Any) -> dict[int, list[int]]:
    """Wrap _update_expert_weights: first the layers in which no rank gains a slot, then the remaining layers. Every
    rank checks the slots of all ranks before a weight moves, so all of them raise or none does."""
    old, new = (kwargs[f"{name}_expert_location_metadata"] for name in ("old", "new"))
    layers: list[int] = list(kwargs["update_layer_ids"])
    before, after = (resident_slots(m.physical_to_logical_map_cpu, m.ep_size) for m in (old, new))
    pool, rank, missing = LAYERS.pages, LAYERS.engine_rank(), dict[int, list[int]]()
    assert pool is not None
    check_in_place()
    grows = (after > before).any(1)
    check_moves(before, after, layers, pool)
    for part in ([i for i in layers if not grows[i]], [i for i in layers if grows[i]]):
        if part:
            pool.resize({i: int(torch.maximum(before, after)[i, rank]) for i in part})
            missing |= original(**(kwargs | {"update_layer_ids": part}))
            pool.resize({i: int(after[i, rank]) for i in part})
    return missing


def check_in_place() -> None:
    """Raise RuntimeError if a weight update has replaced the memory of experts, which rebalances would not move. The
    result is the same on all ranks, since all load the same weights."""
    for layer, parameter, address in LAYERS.paged:
        if parameter.data_ptr() != address:
            raise RuntimeError(
                f"a weight update has replaced the memory of experts in layer {layer}, whose absent slots then take "
                f"memory ({RAGGED.name}={LAYERS.settings.ragged}): restart with the new weights"
            )


def check_moves(before: Tensor, after: Tensor, layers: Sequence[int], pool: PagePool) -> None:
    """Raise ValueError on all ranks if one of them would need more memory than at the start while experts move.
    `before`, after: [L, R] slots with memory; `layers`: those that change now."""
    peak = before.clone()
    grows = (after > before).any(1)
    for i in layers:
        peak[i] = torch.maximum(before[i], after[i]) if grows[i] else after[i]
    paged = sorted(pool.layers)
    assert LAYERS.page_limits is not None
    if ((total := peak[paged].sum(0)) > LAYERS.page_limits).any():
        rank = int((total > LAYERS.page_limits).int().argmax())
        raise ValueError(
            f"a rebalance must leave rank {rank} at most {int(LAYERS.page_limits[rank])} slots with memory over all "
            f"layers, as at the start, got {int(total[rank])}: {PLACER.name} must keep to the capacity of every rank"
        )


def load_model(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ModelRunner.load_model: give back the pages of absent slots, before the KV cache is sized."""
    result = original(self, *args, **kwargs)
    if not self.is_draft_worker:
        into_pages(self)
    return result


def into_pages(runner: Any) -> None:
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    from isoload.engines.sglang.dispatch import weights_of

    if getattr(runner, "token_to_kv_pool", None) is not None:
        raise ValueError(
            f"{RAGGED.name} must give pages back before the KV cache is sized, but this SGLang sizes it before "
            "the model is loaded: use a file without absent slots (isoload place --rectangle)"
        )
    metadata = get_global_expert_location_metadata()
    weights = weights_of(runner.model, RAGGED)
    slots = resident_slots(metadata.physical_to_logical_map_cpu, metadata.ep_size)
    stride = metadata.physical_to_logical_map_cpu.shape[1] // metadata.ep_size
    rank, pool, LAYERS.paged = LAYERS.engine_rank(), PagePool(), []
    parameters = {p.data_ptr(): p for p in runner.model.parameters() if p.numel()}
    for layer, tensors in sorted(weights.items()):
        wrong = [
            t.shape
            for t in tensors
            if len(t) != stride or not t.is_contiguous() or t.data_ptr() not in parameters
        ]
        if wrong:
            raise ValueError(
                f"{RAGGED.name} needs weights that are parameters of one row for each of a rank's {stride} slots, got "
                f"{list(wrong[0])} in layer {layer} of {type(runner.model).__name__}"
            )
        replace(tensors, pool.add(layer, tensors, int(slots[layer, rank])), parameters, layer)
    LAYERS.pages, LAYERS.page_limits = pool, slots[sorted(weights)].sum(0)
    freed = sum(size * (stride - pool.slots[layer]) for layer, size in pool.slot_bytes().items())
    if rank == 0:
        if pool.on_gpu:
            log.warning(
                "isoload SGLang: absent slots on GPUs have been tested with a stand-in of the driver only"
            )
        log.info(
            f"isoload SGLang: {pool.limit} of {stride * len(weights)} expert slots of a rank have memory, "
            f"{freed / 2**30:.2f} GiB of weights were given back"
        )


def replace(
    tensors: Any, paged: Sequence[Tensor], parameters: dict[int, torch.nn.Parameter], layer: int
) -> None:
    """Put the paged copies of one layer's weights into the model and free the old weights. Raises RuntimeError if
    something else still refers to the old weights, whose memory would stay and may be read."""
    old = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
    for i, new in enumerate(paged):
        (parameter := parameters.pop(tensors[i].data_ptr())).data = new
        LAYERS.paged.append((layer, parameter, new.data_ptr()))
        tensors[i] = new  # the engine moves experts between these
    if not all(storage.expired() for storage in old):
        gc.collect()
    if not all(storage.expired() for storage in old):
        raise RuntimeError(
            f"the weights of layer {layer} are referenced a second time, so {RAGGED.name} cannot give their memory "
            "back: use a file without absent slots (isoload place --rectangle)"
        )
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # torch keeps freed memory, and the next layer's pages need it
