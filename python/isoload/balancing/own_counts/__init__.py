"""Own counts: what a Balancer plans by with loads="own", "node" or "last", where ranks do not all meet in the forward.

Every source, a rank or a node, splits its own copies by :func:`isoload.ops.plan_own`, towards targets. It keeps its
counts, decayed; now and then, outside of any graph, all ranks exchange them (one gather for all layers), split the sums
exactly, and take from that split which part of each rank's load a source is to cause. A source that alone levelled its
own copies would undo what sources of other domains make up for. Between exchanges no source waits for another, nor can
it change their plans. The ranks of a node gather their counts in each batch and share its split, to the copy.

With "last" a source cuts its copies as the sums of the exchange before are split: :class:`LastCounts`.

Shared experts stay home: their copies are there before a source splits the others.
"""

from typing import get_args

from isoload.balancing.own_counts.counts import LastCounts, Loads, OwnCounts
from isoload.balancing.own_counts.targets import offsets
from isoload.balancing.targets import Exchanged, exchange
from isoload.placement.placement import Placement
from isoload.transport import Group

__all__ = ["Exchanged", "Loads", "OwnCounts", "exchange", "make_own_counts", "offsets"]


def make_own_counts(
    loads: Loads, tokens: str, placement: Placement, group: Group, price: bool
) -> OwnCounts | None:
    """What a Balancer with these loads keeps; None where all ranks' loads are gathered."""
    per_node, ranks = placement.topology.ranks_per_node, placement.topology.num_ranks
    if loads not in get_args(Loads) or (loads != "gathered" and tokens == "same"):
        raise ValueError(
            f"loads must be gathered or, where tokens are own, node, own or last, got {loads!r} for {tokens!r} "
            "tokens"
        )
    if loads == "node" and per_node in (1, ranks):
        rule = "own where a node has one rank" if per_node == 1 else "gathered where one node has all ranks"
        raise ValueError(f"loads must be {rule}, got 'node' for ranks_per_node={per_node}")
    if price and loads in ("gathered", "last"):
        raise ValueError(f"price must be False where loads are {loads}: there are no targets, got True")
    if loads == "gathered":
        return None
    if loads == "node" and group.topology.ranks_per_node != per_node:
        raise ValueError(
            f"placement must have the group's ranks_per_node={group.topology.ranks_per_node} for loads='node', got "
            f"{per_node}"
        )
    return LastCounts(placement, group) if loads == "last" else OwnCounts(placement, group, loads, price)
