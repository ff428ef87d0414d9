"""Placer ``graph``: replicas along the edges of a fixed graph of ranks, as DeepSeek's LPLB lays them.

For comparison (github.com/deepseek-ai/LPLB). The graph fixes which ranks may relieve each other, whatever the
load; the load selects only which experts. Every expert has at most two replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from isoload.placers.base import Loads, Placed, Placer, Room, Scenarios, slots_of
from isoload.placers.eplb import pack_once
from isoload.wording import not_one_of

Owners = list[list[int]]  # of every rank: the ranks whose experts it replicates


@dataclass(frozen=True)
class GraphPlacer(Placer):
    """Every expert once; a rank's further slots hold replicas of its neighbours' heaviest experts.

    The i-th further slot of rank r belongs to the i-th (mod their number) of its edges in the graph, and takes
    the heaviest expert (ties: lowest) of that neighbour that has no replica yet; lower i first, then lower r.

    Options:
        graph: "ring" (from the rank before), "cube" (8 ranks: 12 edges and the 4 diagonals), "hypercube" (16
            ranks), "torus" (from the rank before on the node, and from the same rank of the node before). Every
            edge is served in one direction; a rank takes from two neighbours and gives to two (ring: one).
        ranks_per_node: of the torus.
        packed: experts are packed onto ranks by load, the heaviest first, as LPLB packs them by EPLB; else in order.

    Raises:
        ValueError: if the graph does not fit the number of ranks, or a rank would have to give more replicas
            than it has experts.
    """

    name = "graph"
    graph: str = "ring"
    ranks_per_node: int = 8
    packed: bool = False

    def place(self, scenarios: Scenarios, room: Room) -> Placed:
        if self.graph not in GRAPHS:
            raise ValueError(not_one_of("graph", GRAPHS, self.graph))
        owners = owners_of(self.graph, room.num_ranks, self.ranks_per_node)
        weight = scenarios.total()
        homes = self._homes(weight, room.num_ranks)
        layers = [
            replicate(home, load, owners, slots_of(room)) for home, load in zip(homes, weight, strict=True)
        ]
        return Placed(np.array(layers, dtype=np.int32).reshape(len(layers), room.num_ranks, -1))

    def _homes(self, weight: Loads, num_ranks: int) -> list[Owners]:
        """[L][R] the experts of every rank, as even in number as possible."""
        layers, experts = weight.shape
        in_order = [part.tolist() for part in np.array_split(np.arange(experts), num_ranks)]
        if not self.packed:
            return [in_order] * layers
        fillers = -experts % num_ranks  # ids from E on, without load: pack fills all ranks alike
        part = np.pad(weight, ((0, 0), (0, fillers))).astype(np.float32)
        packed = pack_once(part, num_ranks).tolist()
        return [[[e for e in held if e < experts] for held in ranks] for ranks in packed]


def replicate(homes: Owners, load: Loads, owners: Owners, slots_per_rank: int) -> list[int]:
    """[P] expert in each slot of one layer: every rank's own experts, then its neighbours'."""
    waiting = [sorted(held, key=lambda e: (-load[e], e)) for held in homes]
    slots = [list(held) for held in homes]
    for turn in range(slots_per_rank):
        for rank, held in enumerate(homes):
            if turn >= slots_per_rank - len(held):
                continue
            owner = owners[rank][turn % len(owners[rank])]
            if not waiting[owner]:
                raise ValueError(
                    f"slots_per_rank without spare slots must leave no rank more replicas to give than experts, "
                    f"got {slots_per_rank}: rank {owner} has {len(homes[owner])}"
                )
            slots[rank].append(waiting[owner].pop(0))
    return [e for held in slots for e in held]


def owners_of(graph: str, num_ranks: int, ranks_per_node: int) -> Owners:
    """[R] the ranks that every rank takes from."""
    ranks, size = range(num_ranks), ranks_per_node
    if graph == "ring":
        if num_ranks < 2:
            raise ValueError(f"num_ranks must be at least 2 for graph ring, got {num_ranks}")
        return [[(r - 1) % num_ranks] for r in ranks]
    if graph == "torus":
        if size < 2 or num_ranks % size or num_ranks < 2 * size:
            raise ValueError(
                f"num_ranks must be 2 or more nodes of ranks_per_node={size} (2 or more) for graph torus, "
                f"got {num_ranks}"
            )
        return [[r // size * size + (r % size - 1) % size, (r - size) % num_ranks] for r in ranks]
    wanted, flips = FLIPS[graph]
    if num_ranks != wanted:
        raise ValueError(f"num_ranks must be {wanted} for graph {graph}, got {num_ranks}")
    return [[r ^ flip for flip in (flips[2:] if r.bit_count() % 2 else flips[:2])] for r in ranks]


# Rank r's neighbours are r ^ flip. All flips change the parity of r's bits, so if even ranks take along the first two
# flips and odd ones along the last two, every edge is used once and every rank gives to two.
FLIPS = {"cube": (8, (1, 2, 4, 7)), "hypercube": (16, (1, 2, 4, 8))}
GRAPHS = ("ring", *FLIPS, "torus")
