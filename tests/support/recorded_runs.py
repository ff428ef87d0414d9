"""Folders as an engine in shadow mode leaves them, of known copies."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import isoload
from isoload.analysis.rank_loads import RankLoads
from isoload.traces.record import Ints


def by_turns(placement: isoload.Placement, ids: Ints) -> Ints:
    """[L, P] copies of each slot where tokens [T, L, K] go to the replicas of an expert by row, as engines choose."""
    found = np.zeros((placement.num_layers, placement.num_slots), dtype=np.int64)
    for layer, table in enumerate(placement.arrays[0]):
        held = [np.flatnonzero(table == expert) for expert in range(placement.num_experts)]
        for row, chosen in enumerate(ids[:, layer]):
            for expert in chosen[chosen >= 0]:
                found[layer, held[expert][row % len(held[expert])]] += 1
    return found


def save_run(
    folder: Path, placement: isoload.Placement, passes: list[list[Ints]], phases: tuple[str, ...], top_k: int
) -> None:
    """passes: for each of every source rank the tokens [T, L, K]; of one source where all ranks hold the same."""
    sources = len(passes[0])
    for rank in range(sources):
        copies = np.stack([by_turns(placement, of[rank]) for of in passes])
        RankLoads(
            copies, placement.arrays[0], tuple(range(1, len(passes) + 1)), phases, placement.num_experts, top_k, rank,
            placement.topology, "own" if sources > 1 else "same", 1000, "a model",
        ).save(folder)  # fmt: skip
