"""Placement files of SGLang, vLLM and vllm-ascend, and the options that start an engine from one.

Facts come from the engines' sources, 2026-08 to 2026-11. A file has no number of ranks, so reading needs a topology;
the largest expert counts as the last. Shared experts and the weights of replicas belong to the engine and are not
written.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

import numpy as np
import torch

from isoload.files import MAX_LAYERS, check_keys, integer_rows
from isoload.placement.placement import Placement
from isoload.topology import Topology
from isoload.traces.identity import HOW, Identity, Numbering
from isoload.wording import shown

Rows = np.ndarray[Any, np.dtype[np.int64]]

SGLANG = "physical_to_logical_map"
RAGGED = "isoload_ragged"  # a second key if slots are absent, so that SGLang without isoload does not start
PAGES = "pages"  # its value: how the slots are absent in memory
VLLM = "eplb_initial_mapping"  # its record_type
ASSIGNMENTS = "initial_global_assignments"


class UnknownRanks(ValueError):
    """A file without a number of ranks, read without a topology."""


def engine_slots(placement: Placement, holes: bool = False) -> Rows:
    """Return [L, P] routed experts of all slots but shared ones; holes: absent slots (-1) may end a rank's slots."""
    if placement.spare_slots:
        raise ValueError(
            f"placement must have no spare slots for an engine's file, got {placement.spare_slots}"
        )
    dead = placement.topology.num_ranks - len(placement.topology.live_ranks)
    if dead:
        raise ValueError(f"placement must have all ranks alive for an engine's file, got {dead} dead")
    rows = placement.arrays[0].reshape(placement.num_layers, placement.topology.num_ranks, -1)
    routed = rows[:, :, : placement.slots_per_rank - placement.num_shared]
    absent = (routed < 0).any((1, 2))
    if absent.any() and not holes:
        layer = placement.layer_ids[int(absent.argmax())]
        raise ValueError(
            f"placement must have no absent slots for an engine's file, layer {layer} is ragged: isoload place "
            "--holes writes it for SGLang with ISOLOAD_RAGGED=pages, --rectangle fills the slots with replicas"
        )
    early = ((routed[:, :, :-1] < 0) & (routed[:, :, 1:] >= 0)).any(2)
    if early.any():
        layer, rank = np.argwhere(early)[0].tolist()
        raise ValueError(
            f"absent slots must be the last of their rank for an engine's file, not so in layer "
            f"{placement.layer_ids[layer]}, rank {rank}"
        )
    return routed.reshape(placement.num_layers, -1).astype(np.int64)


def made(
    rows: Rows,
    layer_ids: tuple[int, ...],
    numbering: Numbering,
    topology: Topology | None,
    key: str,
    kind: str,
) -> Placement:
    if topology is None:
        raise UnknownRanks(f"topology must be given: {kind} does not state the number of ranks")
    if rows.shape[1] % topology.num_ranks:
        raise ValueError(
            f"{key} must have a multiple of {topology.num_ranks} (ranks) slots, got {rows.shape[1]}"
        )
    return Placement(
        torch.from_numpy(rows),
        topology,
        int(rows.max()) + 1,
        layer_ids=layer_ids,
        provenance={"format": kind},
        identity=Identity(numbering),
    )


def by_moe_layers(placement: Placement, numbering: Numbering) -> Placement:
    """Return the placement in an engine's numbering of layers, if every known MoE layer is there."""
    if numbering == placement.identity.numbering == "hidden":
        return placement
    wanted: Numbering = "moe" if numbering == "moe" else "model"
    engine = placement.moe_layers_by(wanted)
    known = engine.identity.moe_layers
    layers = range(len(known) or max(engine.layer_ids) + 1) if wanted == "moe" else known
    if missing := sorted(set(layers) - set(engine.layer_ids)):
        number = known[missing[0]] if wanted == "moe" and known else missing[0]
        raise ValueError(
            f"placement must have every MoE layer of the model for an engine's file, it lacks layer {number}: "
            f"--extra-layers {number} adds it with experts in order; if the layer is dense, pass --model config.json"
        )
    return engine


def sglang_write(placement: Placement) -> Any:
    """Return a row for every layer up to the last; dense layers have experts in order."""
    slots = engine_slots(placement, holes=True)
    if max(placement.layer_ids) >= MAX_LAYERS:
        raise ValueError(
            f"layer_ids must be below {MAX_LAYERS} for SGLang's file, got {max(placement.layer_ids)}"
        )
    rows = np.tile(np.arange(slots.shape[1]) % placement.num_routed, (max(placement.layer_ids) + 1, 1))
    ragged = bool((slots < 0).any())
    if ragged:
        ranks = placement.topology.num_ranks
        parts = np.array_split(np.arange(placement.num_routed), ranks)
        size = slots.shape[1] // ranks
        rows[:] = np.concatenate([np.pad(part, (0, size - len(part)), constant_values=-1) for part in parts])
    rows[list(placement.layer_ids)] = slots
    # SGLang passes other keys on as arguments, and fails.
    return {SGLANG: rows.tolist()} | ({RAGGED: PAGES} if ragged else {})


def sglang_read(content: Any, topology: Topology | None) -> Placement:
    """Read all rows, including those of dense layers: the file does not state which layers are dense."""
    check_keys(content, {SGLANG, RAGGED} if RAGGED in content else {SGLANG})
    if content.get(RAGGED, PAGES) != PAGES:
        raise ValueError(f"{RAGGED} must be {PAGES}, got {shown(content[RAGGED])}")
    rows = integer_rows(SGLANG, content[SGLANG])
    return made(rows, tuple(range(len(rows))), "hidden", topology, SGLANG, "SGLang's file")


def vllm_write(placement: Placement) -> Any:
    """Return the record of vLLM's pull request 41141; layers by their position among the MoE layers."""
    slots = engine_slots(placement)
    return {
        "record_type": VLLM,
        "version": 1,
        "num_redundant_experts": slots.shape[1] - placement.num_routed,
        "num_slots": slots.shape[1],
        ASSIGNMENTS: {str(layer): row for layer, row in enumerate(slots.tolist())},
    }


def vllm_read(content: Any, topology: Topology | None) -> Placement:
    check_keys(content, {"record_type", "version", "num_redundant_experts", "num_slots", ASSIGNMENTS})
    if content["version"] != 1:
        raise ValueError(f"version must be 1, got {shown(content['version'])}")
    rows, layers = assignments(content)
    if layers != tuple(range(len(layers))):
        raise ValueError(f"{ASSIGNMENTS} must have layers 0, 1, ..., got {shown(list(layers))}")
    redundant = content["num_redundant_experts"]
    if redundant != rows.shape[1] - int(rows.max()) - 1:
        raise ValueError(
            f"num_redundant_experts must be {rows.shape[1] - int(rows.max()) - 1}, got {shown(redundant)}"
        )
    return made(rows, layers, "moe", topology, ASSIGNMENTS, "vLLM's file")


def assignments(content: dict[str, Any]) -> tuple[Rows, tuple[int, ...]]:
    """Return rows and layer numbers of {layer: slots}, whose number of slots must be num_slots."""
    by_layer = content[ASSIGNMENTS]
    if not isinstance(by_layer, dict) or not by_layer:
        raise ValueError(f"{ASSIGNMENTS} must be an object of layers, got {shown(by_layer)}")
    names = [str(name) for name in by_layer]
    for name in names:
        if not name.isdecimal() or len(name) > 9:
            raise ValueError(f"{ASSIGNMENTS} must have layer numbers as keys, got {shown(name)}")
    rows = integer_rows(ASSIGNMENTS, list(by_layer.values()), list(names))
    if content["num_slots"] != rows.shape[1]:
        raise ValueError(f"num_slots must be {rows.shape[1]}, got {shown(content['num_slots'])}")
    return rows, tuple(map(int, names))


def vllm_list_write(placement: Placement) -> Any:
    """Return the lists of vLLM's pull request 49572; layers by their position among the MoE layers."""
    return engine_slots(placement).tolist()


def vllm_list_read(content: Any, topology: Topology | None) -> Placement:
    rows = integer_rows("the list", content)
    return made(rows, tuple(range(len(rows))), "moe", topology, "the list", "vLLM's list")


def ascend_write(placement: Placement) -> Any:
    """Return vllm-ascend's expert_map_path; layers by their position among the MoE layers."""
    slots = engine_slots(placement)
    rows = slots.reshape(placement.num_layers, placement.topology.num_ranks, -1)
    layers = []
    for layer, ranks in enumerate(rows.tolist()):
        for rank, row in enumerate(ranks):
            if len(set(row)) < len(row):
                name = placement.layer_ids[layer]
                raise ValueError(
                    f"an expert must be once on a rank for vllm-ascend, which layer {name}, rank {rank} violates"
                )
        devices = [{"device_id": rank, "device_expert": row} for rank, row in enumerate(ranks)]
        layers.append({"layer_id": layer, "device_count": len(ranks), "device_list": devices})
    return {"moe_layer_count": len(rows), "layer_list": layers}


def ascend_read(content: Any, topology: Topology | None) -> Placement:
    check_keys(content, {"moe_layer_count", "layer_list"})
    layers = content["layer_list"]
    if not isinstance(layers, list) or not layers or content["moe_layer_count"] != len(layers):
        raise ValueError(f"layer_list must have moe_layer_count={shown(content['moe_layer_count'])} layers")
    rows: list[list[Any]] = []
    for i, layer in enumerate(layers):
        devices = layer.get("device_list") if isinstance(layer, dict) else None
        if not isinstance(devices, list) or not devices or not all(isinstance(d, dict) for d in devices):
            raise ValueError(f"device_list must be a list of devices, not so in layer {i}")
        if layer.get("layer_id") != i or layer.get("device_count") != len(devices):
            raise ValueError(f"layer_id and device_count must be {i} and {len(devices)}, not so in layer {i}")
        if [d.get("device_id") for d in devices] != list(range(len(devices))):
            raise ValueError(f"device_id must be 0, 1, ... in layer {i}")
        experts = [d.get("device_expert") for d in devices]
        if not all(isinstance(h, list) and h for h in experts) or len({len(h) for h in experts}) > 1:
            raise ValueError(f"device_expert must be lists of one length, not so in layer {i}")
        if i and len(experts) != len(rows[0]) // len(experts[0]):
            raise ValueError(f"device_count must be the same in every layer, not so in layer {i}")
        rows.append([e for h in experts for e in h])
    slots, ranks = integer_rows("device_expert", rows), layers[0]["device_count"]
    if topology is not None and topology.num_ranks != ranks:
        raise ValueError(f"device_count must be {topology.num_ranks}, got {ranks}")
    ids = tuple(range(len(slots)))
    return made(slots, ids, "moe", topology or Topology(ranks), "device_expert", "vllm-ascend's file")


REDUNDANT = "--eplb-config '{\"num_redundant_experts\": {}}'"
"""vLLM's option; {} is the number of redundant experts of a layer."""
ENGINES = {
    "isoload": "vLLM",
    "vllm": "vLLM",
    "vllm-list": "vLLM",
    "vllm-ascend": "vllm-ascend",
    "sglang": "SGLang",
    "tensorrt-llm": "TensorRT-LLM",
}
"""The engine that starts from a file of each format."""


def launch_line(placement: Placement, format: str, path: str, ranks: int | None = None) -> str:
    """Return the command that starts an engine from a file; empty if no engine can start from the placement.

    It names one arrangement of the ranks, tensor parallel; others take the same file. ranks: None: not in the file.
    """
    try:
        table = placement.arrays[0]
        # Without the number of ranks it is unknown whether absent slots are the last of their rank; SGLang checks it.
        unknown = ranks is None and format == "sglang" and not placement.spare_slots
        absent = unknown and bool((table < 0).any())
        slots = table if absent else engine_slots(placement, holes=format == "sglang")
    except ValueError:  # spare, dead or absent slots
        return ""
    redundant, file = slots.shape[1] - placement.num_routed, shlex.quote(path)
    if format == "sglang":
        size = f"--tp {ranks} --ep-size {ranks} " if ranks else ""
        line = f"{size}--ep-num-redundant-experts {redundant} --init-expert-location {file}"
        ragged = f"ISOLOAD_SGLANG=1 ISOLOAD_RAGGED={PAGES} python -m sglang.launch_server --model-path MODEL "
        return ragged * bool((slots < 0).any()) + line
    if format == "tensorrt-llm":
        return f"moe_config: {{load_balancer: {path}}}"
    size = f"--tensor-parallel-size {ranks} " if ranks else ""
    if format == "vllm-ascend":
        config = json.dumps({"eplb_config": {"expert_map_path": path}})
        return f"{size}--enable-expert-parallel --additional-config {shlex.quote(config)}"
    if placement.identity.numbering == "order":
        return f"not before the file states which layers of the model its rows are: {HOW}"
    option = REDUNDANT.replace("{}", str(redundant))
    return f"ISOLOAD_PLACEMENT={file} vllm serve MODEL {size}--enable-expert-parallel --enable-eplb {option}"
