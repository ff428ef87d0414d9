"""Own counts: what a Balancer plans by with loads="own", "node" or "last", where ranks do not all meet in the forward.

Every source, a rank or a node, splits its own copies by :func:`isoload.ops.plan_own`, towards targets. It keeps its
counts, decayed; now and then, outside of any graph, all ranks exchange them (one gather for all layers), split the sums
exactly, and take from that split which part of each rank's load a source is to cause. A source that alone levelled its
own copies would undo what sources of other domains make up for. Between exchanges no source waits for another, nor can
it change their plans. The ranks of a node gather their counts in each batch and share its split, to the copy.

With "last" a source cuts its copies as the sums of the exchange before are split: :mod:`isoload.own_counts.last`.

Shared experts stay home: their copies are there before a source splits the others.
"""

from isoload.own_counts.counts import Loads, OwnCounts, OwnSplit, share_in_node
from isoload.own_counts.making import make_own_counts
from isoload.own_counts.renewal import Exchanged, exchange
from isoload.own_counts.targets import offsets

__all__ = [
    "Exchanged",
    "Loads",
    "OwnCounts",
    "OwnSplit",
    "exchange",
    "make_own_counts",
    "offsets",
    "share_in_node",
]
