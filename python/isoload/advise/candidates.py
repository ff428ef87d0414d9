"""The grid that advise searches: a placement with so many more slots, and who chooses the replica of a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isoload import ops
from isoload.advise.loads import Judged
from isoload.own_counts import offsets
from isoload.placement import Placement
from isoload.placers import place
from isoload.planning import plan_layers, share_routed
from isoload.topology import Topology

MORE_SLOTS = (0, 1, 2, 4)  # of a rank, beyond one for each expert


class Candidate(NamedTuple):
    """One way to run.

    placer: "trivial" lays experts in order, as engines do by default; "eplb" packs them by their loads.
    more: slots of a rank beyond those that hold each expert once.
    split: who chooses replicas: "static" and "dynamic" (a random one) are engines' own; isoload's "exact" is planned by
        all ranks' loads, "own" by each rank's own. "none" where there are no replicas.
    """

    placer: str
    more: int
    split: str

    @property
    def ours(self) -> bool:
        """Whether isoload chooses the replicas."""
        return self.split in ("exact", "own")

    @property
    def label(self) -> str:
        placed = "experts in order" if self.placer == "trivial" else f"{self.placer}, +{self.more} slots"
        return placed if self.split == "none" else f"{placed}, {self.split}"


NOW = Candidate("trivial", 0, "none")


def grid(most: int, gathers: bool = True) -> list[Candidate]:
    """All candidates with at most so many more slots: experts in order first. gathers: "exact", too."""
    found = [NOW, Candidate("eplb", 0, "none")]
    return found + [
        Candidate("eplb", more, split)
        for more in MORE_SLOTS[1:]
        if more <= most
        for split in ("static", "dynamic", "own", *(["exact"] if gathers else []))
    ]


def placed(candidate: Candidate, judged: Judged, topology: Topology) -> Placement:
    slots = -(-judged.seen.shape[-1] // topology.num_ranks) + candidate.more
    return place(judged.seen, topology, slots, candidate.placer)


def sent(
    candidate: Candidate, loads: Tensor, placement: Placement, offset: list[Tensor], seed: int
) -> Tensor:
    """[L, R, P] copies that each rank sends to each slot in a batch of loads [L, R, E]."""
    return SPLITS[candidate.split](loads, placement, offset, seed)


def sent_batches(candidate: Candidate, placement: Placement, judged: Judged) -> Iterator[NDArray[np.integer]]:
    """[L, R, P] copies that each rank sends to each slot, batch by batch."""
    offset = targets(torch.from_numpy(judged.seen), placement) if candidate.split == "own" else []
    for seed, loads in enumerate(judged.loads):
        yield sent(candidate, loads, placement, offset, seed).numpy()


def targets(seen: Tensor, placement: Placement) -> list[Tensor]:
    """Of every rank, its offset [L, R] where all ranks have had tokens alike: counts seen [L, E], R times."""
    layers, ranks = placement.layers("cpu"), placement.topology.num_ranks
    recent = seen.unsqueeze(1).expand(-1, ranks, -1)
    at = layers.tables, layers.slot_to_expert, placement.topology
    return [offsets(recent, source, *at) for source in range(ranks)]


def _by_policy(policy: str) -> Callable[[Tensor, Placement, list[Tensor], int], Tensor]:
    def split(loads: Tensor, placement: Placement, offset: list[Tensor], seed: int) -> Tensor:
        return share_routed(loads, plan_layers(loads, placement, policy), None)

    return split


def _own(loads: Tensor, placement: Placement, offset: list[Tensor], seed: int) -> Tensor:
    tables = placement.layers("cpu").tables
    rows = [ops.plan_own(loads[:, s].contiguous(), tables, offset[s], s) for s in range(loads.shape[1])]
    return torch.stack(rows, 1)


def _dynamic(loads: Tensor, placement: Placement, offset: list[Tensor], seed: int) -> Tensor:
    """Every copy draws a replica, all alike."""
    draw, slots = np.random.default_rng(seed), placement.arrays[0]
    found = np.zeros((*loads.shape[:2], slots.shape[1]), dtype=np.int32)
    for layer, row in enumerate(slots):
        order = np.argsort(row, kind="stable")  # of an expert its slots, one after the other
        order = order[row[order] >= 0]
        copies = np.bincount(row[order], minlength=loads.shape[2])
        first = np.cumsum(copies) - copies
        left = loads[layer].numpy().copy()  # [R, E]
        for turn in range(int(copies.max())):  # of those that are left, a binomial part to the next replica
            has = copies > turn
            part = np.where(has, 1 / np.maximum(copies - turn, 1), 0)
            took = draw.binomial(left, part)
            found[layer][:, order[first[has] + turn]] = took[:, has]
            left -= took
    return torch.from_numpy(found)


SPLITS: dict[str, Callable[[Tensor, Placement, list[Tensor], int], Tensor]] = {
    "none": _by_policy("static"),
    "static": _by_policy("static"),
    "dynamic": _dynamic,
    "own": _own,
    "exact": _by_policy("exact"),
}
