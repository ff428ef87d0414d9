"""The grid that advise searches: a placement with so many more slots, and who chooses the replica of a copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isoload import ops
from isoload.analysis.loads import Judged
from isoload.balancing.own_counts import offsets
from isoload.balancing.own_counts.targets import exact_quota, scaled
from isoload.balancing.planning import plan_layers, share_routed
from isoload.placement.placement import Placement
from isoload.placers import place
from isoload.topology import Topology

MORE_SLOTS = (0, 1, 2, 4)  # of a rank, beyond one for each expert


class Candidate(NamedTuple):
    """One way to run.

    placer: "trivial" lays experts in order, as engines do by default; "eplb" packs them by their loads.
    more: slots of a rank beyond those that hold each expert once.
    split: who chooses replicas: "static" and "dynamic" (a random one) are engines' own; isoload's "exact" is planned by
        all ranks' loads, "node" by those of a node, "own" by each rank's own, "last" by those of batches before.
        "none" where there are no replicas.
    """

    placer: str
    more: int
    split: str

    @property
    def ours(self) -> bool:
        """Whether isoload chooses the replicas."""
        return self.split in ISOLOADS

    @property
    def label(self) -> str:
        placed = "in order, no replicas" if self.placer == "trivial" else f"{self.placer}, +{self.more} slots"
        return placed if self.split == "none" else f"{placed}, {self.split}"


NOW = Candidate("trivial", 0, "none")
ISOLOADS = ("exact", "node", "own", "last")


def grid(most: int, gathers: bool = True, nodes: int = 1) -> list[Candidate]:
    """All candidates with at most so many more slots: experts in order first.

    gathers: whether the engine gathers loads, of all ranks for "exact", inside of each of several nodes for "node".
    """
    ours = [split for split in ISOLOADS if gathers or split in ("own", "last")]
    splits = ("static", "dynamic", *(split for split in ours if nodes > 1 or split != "node"))
    replicated = (
        Candidate("eplb", more, split) for more in MORE_SLOTS[1:] if more <= most for split in splits
    )
    return [NOW, Candidate("eplb", 0, "none"), *replicated]


def placed(candidate: Candidate, judged: Judged, topology: Topology) -> Placement:
    slots = -(-judged.seen.shape[-1] // topology.num_ranks) + candidate.more
    return place(judged.seen, topology, slots, candidate.placer)


def sent(
    candidate: Candidate, loads: Tensor, placement: Placement, renewed: list[Tensor], seed: int
) -> Tensor:
    """[L, R, P] copies that each rank sends to each slot in a batch of loads [L, R, E]; renewed: of :func:`targets`."""
    split = candidate.split
    if split == "dynamic":
        return _dynamic(loads, placement, seed)
    if split == "node":
        return _node(loads, placement, renewed)
    if split in ("own", "last"):
        tables, of_ranks = placement.layers("cpu").tables, [of.contiguous() for of in loads.unbind(1)]
        if split == "own":
            rows = [ops.plan_own(own, tables, renewed[s], s) for s, own in enumerate(of_ranks)]
        else:
            rows = [ops.share_alone(own, renewed[0], tables, s, past=True) for s, own in enumerate(of_ranks)]
        return torch.stack(rows, 1)
    policy = {"none": "static", "static": "static", "exact": "exact"}[split]
    return share_routed(loads, plan_layers(loads, placement, policy), None)


def sent_batches(candidate: Candidate, placement: Placement, judged: Judged) -> Iterator[NDArray[np.integer]]:
    """[L, R, P] copies that each rank sends to each slot, batch by batch."""
    renewed = targets(candidate.split, torch.from_numpy(judged.seen), placement)
    for seed, loads in enumerate(judged.loads):
        yield sent(candidate, loads, placement, renewed, seed).numpy()


def targets(split: str, seen: Tensor, placement: Placement) -> list[Tensor]:
    """What an exchange tells ranks that have all had tokens alike, counts seen [L, E].

    Of every rank ("own") or node ("node") its offset [L, R]; the quotas [L, P] of "last"; for other splits nothing.
    """
    layers, topology = placement.layers("cpu"), placement.topology
    if split == "last":
        no_shared = seen.new_zeros(len(seen), 1, topology.num_ranks)
        return [exact_quota(*scaled(seen.unsqueeze(1), no_shared), layers.tables, topology).int()]
    sources = {"own": topology.num_ranks, "node": topology.num_nodes}.get(split, 0)
    recent = seen.unsqueeze(1).expand(-1, sources, -1)
    if not sources:
        return []
    # Sources that have had the same counts have the same offset.
    return [offsets(recent, recent.sum(2), 0, layers.tables, layers.slot_to_expert, topology)] * sources


def _node(loads: Tensor, placement: Placement, renewed: list[Tensor]) -> Tensor:
    tables, size = placement.layers("cpu").tables, placement.topology.ranks_per_node
    found = []
    for node, offset in enumerate(renewed):
        inside, here = torch.zeros_like(loads), slice(node * size, (node + 1) * size)
        inside[:, here] = loads[:, here]
        wanted = ops.plan_own(inside.sum(1, dtype=torch.int32), tables, offset, node)
        found.append(ops.share(inside, wanted, tables, size)[:, here])
    return torch.cat(found, 1)


def _dynamic(loads: Tensor, placement: Placement, seed: int) -> Tensor:
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
            more = np.flatnonzero(copies > turn)
            took = draw.binomial(left[:, more], 1 / (copies[more] - turn))
            found[layer][:, order[first[more] + turn]] = took
            left[:, more] -= took
    return torch.from_numpy(found)
