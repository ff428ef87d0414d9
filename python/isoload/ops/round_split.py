"""round_split: whole copies from a real-valued split; wrapper and fake."""

from __future__ import annotations

from torch import Tensor

from isoload.ops.library import call, ints, op
from isoload.ops.tables import ReplicaTables

_round_split = op("round_split", lambda a: ints(a.split, *a.split.shape))


def round_split(split: Tensor, loads: Tensor, tables: ReplicaTables) -> Tensor:
    """Whole copies from a real-valued split, every expert's adding up to its load exactly.

    Largest remainder: the whole parts, then one copy each to the largest fractions, ties to the lowest slot. Every
    quota is less than one copy from its split, as far as the split itself adds up to the load.

    Args:
        split: [P] float32 or float64 copies per slot (leading L as the tables), as :func:`plan_lp` returns; for
            every expert its sum is the load, up to one copy and a thousandth.
        loads: [E] or [R, E] int32 copies, of which the split was made.
        tables: of the same layers.

    Returns:
        [P] int32 quota.
    """
    return call(_round_split, split, loads, tables.data, tables.num_ranks, tables.num_slots)
