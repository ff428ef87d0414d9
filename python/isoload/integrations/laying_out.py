"""What ISOLOAD_PLACER lays out when an engine rebalances, and whether it can."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from isoload.integrations.engine_tables import replica_lists
from isoload.integrations.settings import PLACER
from isoload.placement import Placement
from isoload.placers import PLACERS, parse_placer, place
from isoload.topology import Topology

Before = Callable[[], Placement | None]


def lay_out(
    counts: Tensor, topology: Topology, slots_per_rank: int, placer: str, before: Before
) -> Placement:
    """By a placer of the registry; one that can starts from where the experts lie, so that fewer move.

    Args:
        counts: [L, E] or [batches, L, E] copies per routed expert.
        topology: R ranks.
        slots_per_rank: S.
        placer: name and options, as the variable has them.
        before: where the experts lie now; None = nowhere, or on other ranks. Called only for placers that start there.
    """
    name, options = parse_placer(placer)
    start = before() if PLACERS[name].takes_before else None
    return place(counts, topology, slots_per_rank, name, before=start, **options)


def check_placer(
    option: str,
    placer: str,
    shape: tuple[int, int],
    topology: Topology,
    slots_per_rank: int,
    before: Before,
) -> None:
    """A layout as an engine's rebalance will want one, so that none fails while tokens are served.

    Args:
        option: the engine's, in whose name the placer is refused.
        placer: name and options, as the variable has them.
        shape: (L, E) of the model.
        topology: R ranks.
        slots_per_rank: S.
        before: see :func:`lay_out`.

    Raises:
        ValueError: naming the rule of the placer that this layout breaks.
    """
    try:
        replica_lists(lay_out(torch.ones(shape), topology, slots_per_rank, placer, before))
    except ValueError as error:
        raise ValueError(f"{option} with {PLACER.name}={placer}: {error}") from None
