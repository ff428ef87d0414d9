"""Placement of SGLang's experts: its rebalances, --eplb-algorithm isoload, and the file from which it starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isoload.engines.settings import RAGGED
from isoload.engines.sglang import borrowing
from isoload.engines.sglang.layers import EPLB, LAYERS, elastic_backend, moe, parallel, topology_of
from isoload.engines.tables import EngineSizes, check_placer, engine_topology, lay_out, running
from isoload.files import open_regular, read_text
from isoload.weights.pages import resident_slots

Original = Callable[..., Any]
NAME = "isoload"
CHOSEN = object()  # result of compute_algorithm for this name, in place of a member of SGLang's Enum


def compute_algorithm(original: Original, raw_algorithm: str, *args: Any, **kwargs: Any) -> Any:
    return CHOSEN if raw_algorithm == NAME else original(raw_algorithm, *args, **kwargs)


def check_elastic(original: Original, server_args: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap SGLang's check of elastic expert parallelism, whose assertion does not name isoload's algorithm. Ranks that
    joined or left are in no placement, so the two options are rejected together."""
    backend, algorithm = server_args.elastic_ep_backend, server_args.eplb_algorithm
    if backend is not None and server_args.enable_eplb and algorithm == NAME:
        raise ValueError(
            f"--eplb-algorithm {NAME} must come without --elastic-ep-backend {backend}, whose ranks join and leave: "
            "pass --eplb-algorithm auto, with which isoload still chooses replicas by --ep-dispatch-algorithm dynamic"
        )
    return original(server_args, *args, **kwargs)


def rebalance_experts(
    original: Original,
    tokens_per_expert: Tensor,
    num_physical_experts: int,
    num_local_physical_experts: int,
    num_groups: int | None,
    num_nodes: int,
    algorithm: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wrap SGLang's function: return its three tables, on the device of the counts [batches, L, E]."""
    if algorithm is not CHOSEN:
        sizes = num_physical_experts, num_local_physical_experts, num_groups, num_nodes
        return original(tokens_per_expert, *sizes, algorithm, *args, **kwargs)
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    device, metadata = tokens_per_expert.device, get_global_expert_location_metadata()
    topology = engine_topology(
        num_physical_experts // num_local_physical_experts, num_nodes, LAYERS.settings.times
    )
    holes = bool(LAYERS.settings.ragged)
    table = None if metadata is None else metadata.physical_to_logical_map_cpu
    before = running(table, num_physical_experts, holes)
    passes = int(tokens_per_expert.flatten(1).any(1).sum()) if tokens_per_expert.dim() == 3 else 1
    placed = lay_out(
        tokens_per_expert, topology, num_local_physical_experts, LAYERS.settings.placer, before,
        LAYERS.new_maps, passes, LAYERS.settings.spare_slots, holes,
    )  # fmt: skip
    return tuple(table.to(device) for table in placed)


def update_metadata(
    original: Original, self: Any, other: Any, update_layer_ids: list[int], *args: Any, **kwargs: Any
) -> None:
    """Wrap ExpertLocationMetadata.update, SGLang's rebalance after a pass: refresh the Balancers in place."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    original(self, other, update_layer_ids, *args, **kwargs)
    if self is get_global_expert_location_metadata():
        if LAYERS.by_id:
            LAYERS.follow(self, moe().ep_dispatch_algorithm)
            borrowing.moved(self, update_layer_ids)
            LAYERS.check_moved(update_layer_ids)
        elif LAYERS.record is not None:  # in shadow mode
            LAYERS.record.moved(self.physical_to_logical_map_cpu)
    LAYERS.watch.progressed()


def rebalance(original: Original, self: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Wrap EPLBManager.rebalance, a generator that yields between two chunks of layers, once in a pass."""
    LAYERS.watch.enter()
    try:
        for _ in original(self, *args, **kwargs):
            LAYERS.watch.leave(pending=True)
            yield
            LAYERS.watch.enter()
    finally:
        LAYERS.watch.leave(pending=False)


def check_at_start(metadata: Any) -> None:
    """Raise ValueError if --eplb-algorithm isoload is passed and the placer cannot place this model of SGLang's."""
    if moe().eplb_algorithm == NAME and EPLB not in LAYERS.lost:
        tables, experts = metadata.physical_to_logical_map_cpu, metadata.num_logical_experts
        placer = LAYERS.settings.placer
        sizes = topology_of(metadata), LAYERS.settings.spare_slots, bool(LAYERS.settings.ragged)
        check_placer(f"--eplb-algorithm {NAME}", placer, tables, experts, *sizes)


def check_file(model_config: Any) -> None:
    """Compare the --init-expert-location file with SGLang's ModelConfig and options, before SGLang reads it. SGLang
    compares neither slots nor layers: a file of other sizes ends in an IndexError of the first forward pass."""
    if (
        not {"dynamic", "lp", EPLB} - LAYERS.lost and not LAYERS.settings.ragged
    ):  # an older SGLang may have no get_exec
        return
    path = moe().init_expert_location
    # While ranks may join, SGLang adds their slots to those of the file, and checks the sum.
    if path == "trivial" and LAYERS.settings.ragged:
        raise ValueError(
            f"{RAGGED.name}={LAYERS.settings.ragged} needs a file with absent slots: pass --init-expert-location "
            f"FILE.json, made by isoload place --holes, or unset {RAGGED.name}"
        )
    if path == "trivial" or elastic_backend() is not None:
        return
    from sglang.srt.eplb.expert_location import ModelConfigForExpertLocation

    model = ModelConfigForExpertLocation.from_model_config(model_config)
    if model is None:
        return
    redundant, option = moe().ep_num_redundant_experts, "--ep-num-redundant-experts {}"
    experts = model.num_logical_experts
    sizes = EngineSizes(model.num_layers, experts, redundant, parallel().ep_size, option, True)
    source = f"--init-expert-location {path:.200}"
    content = read_location(path)
    if (counts := content.get("logical_count")) is not None:
        *_, layers, counted = torch.as_tensor(counts).shape
        if counted != experts:
            raise ValueError(
                f"{source} has counts of {counted} experts but the model has {experts}: pass a file of this model"
            )
        sizes.check(source, layers, experts + redundant)
    elif (rows := content.get("physical_to_logical_map")) is not None:
        table = torch.as_tensor(rows)
        sizes.check(source, *table.shape)
        check_absent(source, table, experts, sizes.num_ranks)
        table = torch.where(table < 0, 0, table) if LAYERS.settings.ragged else table
        if int(table.min()) < 0 or int(table.max()) >= experts:
            raise ValueError(
                f"{source} has experts {int(table.min())} to {int(table.max())} but the model has {experts}, from 0: "
                "pass a file of this model"
            )


def check_absent(source: str, table: Tensor, experts: int, num_ranks: int) -> None:
    """Raise ValueError unless a map [L, P] has absent slots exactly if ISOLOAD_RAGGED is set, each last on its rank."""
    ragged = LAYERS.settings.ragged
    if (table < -1).any():  # not absent, but wrong
        return
    if bool((table < 0).any()) != bool(ragged):
        if ragged:
            raise ValueError(
                f"{source} has no absent slots, so {RAGGED.name}={ragged} has no effect: unset it"
            )
        raise ValueError(
            f"{source} has absent slots: set {RAGGED.name}=pages, or make a file without them by isoload place "
            "--rectangle"
        )
    if not ragged:
        return
    try:
        resident_slots(table, num_ranks)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    for layer, row in enumerate(table.tolist()):
        if missing := sorted(set(range(experts)) - set(row)):
            raise ValueError(
                f"{source} must have a slot for each of the {experts} experts, expert {missing[0]} has none in layer "
                f"{layer}"
            )


def read_location(path: str) -> dict[str, Any]:
    if path.endswith(".pt"):
        with open_regular(Path(path)) as file:
            content: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu")
        return content
    text = read_text(Path(path)) if path.endswith(".json") else path
    return dict(json.loads(text))
