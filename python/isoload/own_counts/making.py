"""make_own_counts: what a Balancer keeps, by the word for its loads."""

from __future__ import annotations

from typing import get_args

from isoload.own_counts.counts import Loads, OwnCounts
from isoload.own_counts.last import LastCounts
from isoload.placement import Placement
from isoload.transport import Group


def make_own_counts(
    loads: str, tokens: str, placement: Placement, group: Group | None, price: bool
) -> OwnCounts | None:
    """What a Balancer with these loads keeps; None where all ranks' loads are gathered.

    Raises:
        ValueError: loads that are no word, or do not fit the tokens or the topology; a price without targets.
    """
    per_node, ranks = placement.topology.ranks_per_node, placement.topology.num_ranks
    if loads not in get_args(Loads) or (loads != "gathered" and tokens == "same"):
        raise ValueError(
            f"loads must be gathered or, where tokens are own, node, own or last, got {loads!r} for {tokens!r} "
            "tokens"
        )
    if loads == "node" and per_node in (1, ranks):
        choice, why = (
            ("own", "a node has one rank") if per_node == 1 else ("gathered", "one node has all ranks")
        )
        raise ValueError(f"loads must be {choice} where {why}, got 'node' for ranks_per_node={per_node}")
    if price and loads in ("gathered", "last"):
        raise ValueError(f"price must be False where loads are {loads}: there are no targets, got True")
    if loads == "gathered":
        return None
    assert group is not None, "where tokens are own"
    if loads == "node" and group.topology.ranks_per_node != per_node:
        raise ValueError(
            f"placement must have the group's ranks_per_node={group.topology.ranks_per_node} for loads='node', got "
            f"{per_node}"
        )
    if loads == "last":
        return LastCounts(placement, group)
    return OwnCounts(placement, group, loads == "node", price)
