"""Checks of a layer at construction and in every batch, and the texts by which ranks compare their arguments."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from isoload.placement.placement import Placement
from isoload.transport import DTYPES, CollectiveGroup, Group
from isoload.weights.checkpoints import Checkpoint
from isoload.weights.checksums import slot_checksums
from isoload.weights.experts import Activation, ClampedGLU, ExpertWeights, SwiGLU, describe
from isoload.weights.quantised import check_no_gradients, check_stay
from isoload.weights.shard import Shard, check_shard
from isoload.weights.storage import RankWeights

Experts = Sequence[ExpertWeights | Checkpoint | Shard]  # one per owned rank: all experts, or the rank's own


def experts_by_rank(experts: ExpertWeights | Checkpoint | Shard | Sequence[Shard], num_ranks: int) -> Experts:
    if isinstance(experts, ExpertWeights | Checkpoint):
        return [experts] * num_ranks
    return [experts] if isinstance(experts, Shard) else list(experts)


def check_parts(experts: Experts, group: Group, placement: Placement, layer: int) -> str:
    """Check the experts of the owned ranks, and return a description that all ranks compare."""
    if placement.topology.num_ranks != group.topology.num_ranks:
        raise ValueError(
            f"placement must be for the transport's {group.topology.num_ranks} ranks, "
            f"got {placement.topology.num_ranks}"
        )
    if len(experts) != len(group.ranks):
        raise ValueError(
            f"experts must be a Shard for each of the {len(group.ranks)} ranks of this process, got {len(experts)}"
        )
    kinds: dict[str, None] = {}
    for rank, part in zip(group.ranks, experts, strict=True):
        weights = read_weights(part)
        if weights.quantised:
            check_stay(weights.stacks(), {})
        if isinstance(part, Shard):
            shard = check_shard(part, placement.home_experts(layer, rank), rank)
            kinds[f"shards with rows of {describe(shard, 1)}"] = None
        elif part.num_slots != placement.num_experts:
            raise ValueError(
                f"experts must hold num_experts={placement.num_experts} experts, got {part.num_slots}"
            )
        elif isinstance(part, Checkpoint):
            source = f"{part.prefix} of a checkpoint whose expert 0 has the checksum {part.checksum}"
            kinds[f"{source}, {describe(weights)}"] = None
        else:
            kinds[describe(part)] = None
    if len(kinds) > 1:
        raise ValueError(f"experts must be equal on all ranks of this process, got {' and '.join(kinds)}")
    return next(iter(kinds))


def read_weights(part: ExpertWeights | Checkpoint | Shard) -> ExpertWeights:
    """Return the weights of one rank's part; for a checkpoint zero rows, with shapes and dtypes."""
    if isinstance(part, Checkpoint):
        return part.read(())
    return part.read() if isinstance(part, Shard) else part


def check_halves(experts: Experts, activation: Activation) -> None:
    """Raise ValueError if gate and up alternate in the rows but have different global scales, which apply to halves."""
    for part in experts if isinstance(activation, ClampedGLU) else ():
        scales = read_weights(part).gate_up_scale_2
        if scales is not None and bool((scales[:, 0] != scales[:, 1]).any()):
            raise ValueError(
                "gate_up_scale_2 must be the same for both halves of the rows with ClampedGLU, whose gate and up "
                f"alternate, got {scales[scales[:, 0] != scales[:, 1]][0].tolist()}"
            )


def check_compute_dtype(computes: torch.dtype | None, experts: Experts) -> None:
    if computes is None:
        return
    if computes not in DTYPES:
        raise ValueError(
            f"compute_dtype must be one of {', '.join(map(str, DTYPES))} or None, got {computes}"
        )
    if any(read_weights(part).quantised for part in experts):
        raise ValueError(
            f"compute_dtype must be None for quantised experts, which compute in the rows' dtype, got {computes}"
        )


def device_of(experts: Experts) -> torch.device:
    first = experts[0]
    if isinstance(first, Checkpoint):
        return torch.device(first.device)
    return (first.read() if isinstance(first, Shard) else first).down.device


def name_of(activation: Activation) -> str:
    """Return a text that is equal on all ranks for equal activations; a caller's function is compared by name."""
    if isinstance(activation, SwiGLU | ClampedGLU):
        return repr(activation)
    return str(getattr(activation, "__qualname__", type(activation).__qualname__))


def check_wrappers(group: Group, ranks: Sequence[RankWeights]) -> None:
    """Raise ValueError if a data-parallel wrapper reduces experts over ranks, see docs/training.md."""
    if not isinstance(group, CollectiveGroup):
        return
    if others := [name for weights in ranks for name in weights.replaced()]:
        raise ValueError(
            "expert Parameters must not be sharded by fully_shard, over the layer's ranks, each of which has its own, "
            "or over ranks with copies: pass ignored_params=set(layer.expert_parameters()) to fully_shard, as "
            "isoload.parallelize(model, mesh, shard=modules) does, got other Parameters in place of the layer's "
            f"{', '.join(others)}"
        )
    _check_ddp(group, ranks)
    _check_fsdp(group, ranks)


# For each rank's weights the group of the ranks that hold the same experts, over which gradients are averaged.
COPIES: WeakKeyDictionary[RankWeights, dist.ProcessGroup] = WeakKeyDictionary()


def num_copies(weights: RankWeights) -> int:
    return COPIES[weights].size() if weights in COPIES else 1


@torch.no_grad()
def check_copies(name: str, ranks: Sequence[RankWeights]) -> None:
    """Raise ValueError if the copies of an expert differ. All ranks with copies call it together."""
    for weights in ranks:
        if (copies := COPIES.get(weights)) is None or not weights.layout.homes:
            continue
        sums = slot_checksums([home.detach() for home in weights.home_rows()])
        gathered = [torch.empty_like(sums) for _ in range(copies.size())]
        dist.all_gather(gathered, sums, group=copies)
        differ = torch.stack([other != gathered[0] for other in gathered])
        if bool(differ.any()):
            rank, row = differ.nonzero()[0].tolist()
            members = dist.get_process_group_ranks(copies)
            raise ValueError(
                f"copies of an expert must be equal, but expert {weights.layout.homes[row]} of {name} differs on ranks "
                f"{members[0]} and {members[rank]}: start all ranks from the same values, and change experts only by "
                "optimizers with the same state and gradients on all copies"
            )


NOT_IGNORED = (
    "expert Parameters must be ignored by DistributedDataParallel, which else gives every rank those of rank 0: call "
    "isoload.layer.ignore_in_ddp(model) before DistributedDataParallel(model) (transformers' Trainer: "
    "isoload.engines.huggingface.BalancedTraining), got experts it was not called for"
)


def check_traversal(group: Group, ranks: Sequence[RankWeights]) -> None:
    """Act on what traverses a layer's modules by the call stack: DistributedDataParallel's constructor, or clipping."""
    if group.owns_all:
        return
    accelerate = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
    clips = [inspect.unwrap(f) for f in (clip_grad_norm_, getattr(accelerate, "clip_grad_norm_", None)) if f]
    codes = [clip.__code__ for clip in clips]
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in codes:
        if frame.f_code is DistributedDataParallel.__init__.__code__:
            ignore_in_construction(frame, ranks)
            return
        frame = frame.f_back
    if frame is not None and frame.f_locals["max_norm"] != math.inf:
        raise ValueError(
            "gradients must be clipped by their norm over all ranks: call isoload.clip_grad_norm_(model, max_norm) "
            "(transformers' Trainer: isoload.engines.huggingface.BalancedTraining), got "
            f"{frame.f_globals['__name__']}.clip_grad_norm_, by which ranks would scale differently and copies diverge"
        )


def ignore_in_construction(frame: FrameType, ranks: Sequence[RankWeights]) -> None:
    """Exclude a layer's experts from the DistributedDataParallel whose constructor runs in `frame`, under their present
    names, which wrappers may have changed since ignore_in_ddp. torch reads the names before it broadcasts.
    """
    ddp, module = frame.f_locals["self"], frame.f_locals["module"]
    done = _PREPARED.setdefault(ddp, WeakSet())
    if all(weights in done for weights in ranks):
        return
    done.update(ranks)  # the names below come from another traversal
    owned = {id(p) for weights in ranks for p in weights.parameters()}
    names = {name for name, p in module.named_parameters(remove_duplicate=False) if id(p) in owned}
    missing = names - ddp.parameters_to_ignore
    # Another name of an expert may have been read before.
    if any(weights.gradient_divisor == 1 for weights in ranks) or (missing and len(names) > len(owned)):
        raise ValueError(NOT_IGNORED)
    ddp.parameters_to_ignore |= missing


# For each DistributedDataParallel the weights that its constructor has met.
_PREPARED: WeakKeyDictionary[DistributedDataParallel, WeakSet[RankWeights]] = WeakKeyDictionary()


def _check_ddp(group: Group, ranks: Sequence[RankWeights]) -> None:
    """Raise ValueError if an active DistributedDataParallel reduces experts, or runs over other ranks."""
    ddp = DistributedDataParallel._active_ddp_module
    if ddp is None or group.owns_all or all(weights in _CHECKED.get(ddp, ()) for weights in ranks):
        return
    reduced = set(map(id, ddp._module_parameters))
    ignored = all(weights.gradient_divisor != 1 for weights in ranks)
    if not ignored or any(id(p) in reduced for weights in ranks for p in weights.parameters()):
        raise ValueError(f"{NOT_IGNORED}; their weights are lost")
    copies = num_copies(ranks[0])
    if (size := ddp.process_group.size()) != group.topology.num_ranks * copies:
        raise ValueError(
            f"DistributedDataParallel must run over the layer's {group.topology.num_ranks} ranks and the ranks with "
            f"{copies - 1} copies of its experts, got {size}: isoload.parallelize(model, mesh) wraps a model over more "
            "ranks than the layer's, and averages its experts' gradients over the copies"
        )
    _CHECKED.setdefault(ddp, WeakSet()).update(ranks)


# For each DistributedDataParallel the weights that passed the check, which is made once.
_CHECKED: WeakKeyDictionary[DistributedDataParallel, WeakSet[RankWeights]] = WeakKeyDictionary()


def _check_fsdp(group: Group, ranks: Sequence[RankWeights]) -> None:
    """Raise ValueError if fully_shard and isoload divide gradients by different numbers. A divide factor does not apply
    to modules inside, so every wrapped module is checked, once, in the first forward with gradients.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported if fully_shard is in use
    if fsdp is None or not torch.is_grad_enabled():
        return
    from torch.distributed._composable_state import _module_state_mapping as wrapped

    for weights in ranks:
        if _FACTORS_CHECKED.get(weights) == len(wrapped):
            continue
        copies, layer_ranks = num_copies(weights), group.topology.num_ranks
        divisor = weights.gradient_divisor * copies
        for name, factor, num_ranks in _divide_factors(fsdp.FSDPModule, list(wrapped), weights):
            if num_ranks > 1 and num_ranks > layer_ranks * copies:
                raise ValueError(
                    f"expert gradients must be averaged over all {num_ranks} ranks that fully_shard reduces over, but "
                    f"the layer has {layer_ranks} ranks and {copies - 1} copies: call isoload.parallelize(model, mesh, "
                    f"shard=modules) in place of fully_shard, got {name} without"
                )
            if (num_ranks if factor is None else factor) == divisor or num_ranks == 1:
                continue
            shown = f"the default, {num_ranks}" if factor is None else str(factor)
            raise ValueError(
                f"the gradient divide factor of every module that fully_shard wraps must be {divisor} "
                f"as that of the experts, got {shown} for {name}: call "
                f"module.set_gradient_divide_factor({float(divisor)}) on each module that was given "
                "to fully_shard, since the root's factor does not reach the modules inside"
            )
        _FACTORS_CHECKED[weights] = len(wrapped)


def _divide_factors(
    kind: Any, modules: Sequence[Any], weights: RankWeights
) -> Iterator[tuple[str, float | None, int]]:
    """Yield name, divide factor and number of ranks of the wrapped modules in the model with these weights."""
    outer = (m for m in modules if isinstance(m, kind) and any(inner is weights for inner in m.modules()))
    first = next(outer, None)
    for state in () if first is None else first._get_fsdp_state()._state_ctx.all_states:
        groups = getattr(state, "_fsdp_param_groups", None)  # several per module since torch 2.12
        for group in [state._fsdp_param_group] if groups is None else groups:
            if group is None or not any(param.sharded_param.requires_grad for param in group.fsdp_params):
                continue
            name = group._module_fqn or f"the root ({type(state._modules[0]).__name__})"
            yield name, group.gradient_divide_factor, group.mesh_info.mesh.size()


# For each rank's weights the number of wrapped modules at the last successful check.
_FACTORS_CHECKED: WeakKeyDictionary[RankWeights, int] = WeakKeyDictionary()


# Methods of torch's PipelineStage that run a forward for its shapes alone: since torch 2.13, and before.
SHAPE_PASSES = ("_forward_metadata_inference", "_shape_inference")


def infers_shapes() -> bool:
    """Return whether torch.distributed.pipelining runs this forward only to infer shapes, by the call stack."""
    stage = sys.modules.get("torch.distributed.pipelining.stage")  # imported if pipelining is in use
    if stage is None:
        return False
    methods = [getattr(stage.PipelineStage, name, None) for name in SHAPE_PASSES]
    passes = [method.__code__ for method in methods if method is not None]
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code not in passes:
        frame = frame.f_back
    return frame is not None


def check_overflow(group: Group, ranks: Sequence[RankWeights]) -> None:
    if group.owns_all or not torch.is_grad_enabled():
        return
    if any(not rank.layout.homes and home.requires_grad for rank in ranks for home in rank.home_rows()):
        raise ValueError(
            "each rank must be the home of an expert to train in float16, because loss scalers find an overflow of "
            "another rank in the gradients of experts, got a rank without experts"
        )


def check_rows(
    rows: list[Tensor], max_tokens: int | None, down: Tensor, computes: torch.dtype | None
) -> None:
    quantised = down.dtype not in DTYPES
    if quantised:
        check_no_gradients()
    for row in rows:
        if row.dim() != 2 or row.dtype not in DTYPES:
            names = ", ".join(map(str, DTYPES))
            raise ValueError(f"x must be [T, H] of {names}, got {list(row.shape)} {row.dtype}")
        allowed = (row.dtype,) if quantised else tuple(dict.fromkeys((down.dtype, computes)))
        if row.shape[1] != down.shape[1] or row.dtype not in allowed:
            advice = f": pass compute_dtype={row.dtype} to compute in it" if row.dtype not in allowed else ""
            raise ValueError(
                f"x must be [T, {down.shape[1]}] {' or '.join(map(str, allowed))} as the experts, got "
                f"{list(row.shape)} {row.dtype}{advice}"
            )
    if max_tokens is not None and max(map(len, rows)) > max_tokens:
        raise ValueError(
            f"x must have at most max_tokens_per_rank={max_tokens} tokens, got {max(map(len, rows))}"
        )
