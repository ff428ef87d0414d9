"""Records of one drawn run as each engine writes them: the same copies in every format that isoload reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import isoload
from isoload.analysis.rank_loads import RankLoads
from isoload.traces import Identity, Trace, write_trace

Ints = np.ndarray[Any, np.dtype[np.int64]]
RANKS, BATCHES, LAYERS, EXPERTS = 3, 4, 3, 6
SLOTS = torch.arange(EXPERTS).repeat(LAYERS + 2, 1)  # SGLang has rows for two dense layers, too


def drawn(seed: int) -> Ints:
    """[R, B, L, E] copies that each rank counted."""
    return np.random.default_rng(seed).integers(1, 50, (RANKS, BATCHES, LAYERS, EXPERTS))


def write_sglang(
    folder: Path, counts: Ints, first_pass: int = 0, layers: Sequence[int] = (2, 3, 4)
) -> list[Path]:
    paths = []
    for rank, own in enumerate(counts):
        records = []
        for number, batch in enumerate(own, first_pass):
            whole = np.zeros((LAYERS + 2, EXPERTS), np.int64)
            whole[list(layers)] = batch[: len(layers)]
            copies = torch.from_numpy(whole)
            records.append({"forward_pass_id": number, "rank": rank, "global_physical_count": copies})
        paths.append(folder / f"recorder_{first_pass}_{rank}.pt")
        torch.save({"records": records, "last_physical_to_logical_map": SLOTS}, paths[-1])
    return paths


def write_shadow(
    folder: Path,
    counts: Ints,
    first_pass: int = 0,
    layers: Sequence[int] = (2, 3, 4),
    identity: Identity | None = None,
) -> list[Path]:
    paths, rows = [], LAYERS + 2 if identity is None else len(layers)
    for rank, own in enumerate(counts):
        whole = np.zeros((BATCHES, rows, EXPERTS), np.int64)
        whole[:, list(layers)] = own[:, : len(layers)]
        passes, phases = tuple(range(first_pass, first_pass + BATCHES)), ("decode",) * BATCHES
        about = (EXPERTS, 2, rank, isoload.Topology(RANKS), "own", 1000 + first_pass)
        made = RankLoads(
            whole, SLOTS[:rows].numpy(), passes, phases, *about, identity=identity or Identity("hidden")
        )
        paths.append(made.save(folder))
    return paths


def write_tensorrt(
    folder: Path, counts: Ints, first_pass: int = 0, layers: Sequence[int] = (2, 3, 4)
) -> list[Path]:
    save_file = pytest.importorskip("safetensors.numpy").save_file
    (folder / "meta_info.json").write_text(json.dumps({"num_experts": EXPERTS, "num_experts_per_token": 2}))
    paths = []
    for rank, own in enumerate(counts):
        rows = {f"{i}_{layer}": batch[k] for i, batch in enumerate(own) for k, layer in enumerate(layers)}
        paths.append(folder / f"rank{rank}.safetensors")
        save_file(rows, paths[-1])
    return paths


def write_vllm(
    folder: Path, counts: Ints, first_pass: int = 0, layers: Sequence[int] = (0, 1, 2)
) -> list[Path]:
    held = [list(range(EXPERTS))] * len(layers)
    lines: list[dict[str, Any]] = [
        {"record_type": "eplb_load_meta", "version": 1, "num_redundant_experts": 0}
    ]
    for step, batch in enumerate(counts.sum(0)[:, : len(layers)]):
        stats = {"record_type": "eplb_load_stats", "version": 1, "step": step}
        lines.append({**stats, "expert_load": batch.tolist(), "p2l_map": held})
    path = folder / f"load_{first_pass}.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return [path]


def write_ascend(
    folder: Path, counts: Ints, first_pass: int = 0, layers: Sequence[int] = (0, 1, 2)
) -> list[Path]:
    path = folder / f"loads_{first_pass}.pt"
    torch.save(torch.from_numpy(counts.sum((0, 1))[: len(layers)]), path)
    return [path]


def write_npz(
    folder: Path, counts: Ints, first_pass: int = 0, layers: Sequence[int] = (2, 3, 4)
) -> list[Path]:
    path = folder / f"trace_{first_pass}.npz"
    write_trace(Trace("t", EXPERTS, counts=counts.sum(0)[:, : len(layers)], layer_ids=tuple(layers)), path)
    return [path]


class Reader(NamedTuple):
    write: Callable[..., list[Path]]
    by_rank: bool  # whether a recording has a file for each rank
    numbered: bool  # whether layers have the model's own numbers


READERS = {
    "sglang": Reader(write_sglang, True, True),
    "shadow": Reader(write_shadow, True, True),
    "tensorrt-llm": Reader(write_tensorrt, True, True),
    "vllm": Reader(write_vllm, False, False),
    "vllm-ascend": Reader(write_ascend, False, False),
    "npz": Reader(write_npz, False, True),
}


def wanted(name: str, counts: Ints) -> Ints:
    """[B, L, E] of one recording."""
    whole: Ints = counts.sum(0)
    return whole.sum(0)[None] if name == "vllm-ascend" else whole
