"""CRAFT's placement as an engine can load it: python rectangle.py COUNTS.pt --ranks 8 --replicas 8 -o FILE.json

CRAFT gives replicas to a part of the layers and ranks, engines the same number of slots to all. The slots that CRAFT
leaves out hold a second copy of an expert whose other copy is on the same rank and whose only one it is: then every
rank has the load that CRAFT gave it, however an engine splits replicas. Memory is that of the whole rectangle.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

import isoload


def rectangle(ragged: isoload.Placement) -> isoload.Placement:
    """The same placement without absent slots; ValueError where a rank has no expert with one copy alone."""
    ranks, size = ragged.topology.num_ranks, ragged.slots_per_rank
    slots = ragged.arrays[0].copy()
    for row, layer in zip(slots, ragged.layer_ids, strict=True):
        copies = np.bincount(row[row >= 0], minlength=ragged.num_experts)
        for rank, held in enumerate(row.reshape(ranks, size)):
            single = held[held >= 0][copies[held[held >= 0]] == 1]
            absent = np.flatnonzero(held < 0)
            if len(absent) > len(single):
                raise ValueError(
                    f"replicas must leave {len(absent)} experts with one copy on rank {rank} of layer {layer}, "
                    f"got {len(single)}"
                )
            held[absent] = single[: len(absent)]
    return isoload.Placement(
        torch.from_numpy(slots), ragged.topology, ragged.num_experts, layer_ids=ragged.layer_ids
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("counts", type=Path, help="what SGLang's recorder wrote, mode stat")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--replicas", type=int, required=True, help="of a rank over all layers: CRAFT's R")
    parser.add_argument("--output", "-o", type=Path, required=True)
    asked = parser.parse_args()
    trace = isoload.read_trace(asked.counts)
    size = -(-trace.num_experts // asked.ranks) + 1  # as EPLB with a redundant expert on every rank
    topology = isoload.Topology(asked.ranks)
    craft = isoload.place(trace, topology, size, placer="craft", replicas=asked.replicas)
    isoload.write_placement(rectangle(craft), asked.output, format="sglang")


if __name__ == "__main__":
    main()
