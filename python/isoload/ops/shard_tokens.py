"""shard_tokens: where copies are computed that cannot stay on their own rank; wrapper and fake."""

from __future__ import annotations

from torch import Tensor

from isoload.ops.library import call, ints, op
from isoload.replica_tables import ReplicaTables

MILLION = 1_000_000
_shard_tokens = op("shard_tokens", lambda a: ints(a.loads, *a.tables.shape[:-1], a.num_slots))


def shard_tokens(
    loads: Tensor,
    tables: ReplicaTables,
    home_slot: Tensor,
    fixed: Tensor | None = None,
    *,
    alive: Tensor | None = None,
    tolerance: float = 0.0,
    printed: bool = False,
) -> Tensor:
    """Libra's token sharding (papers/004, Algorithm 2): local copies stay, remote ones level the ranks.

    Copies whose expert has a slot on their own rank stay there; all others start at their expert's home. While a rank
    is above the mean load (rounded up, and the tolerance), the busiest such rank gives copies of the expert with most
    that may move to the least loaded other rank that holds it and is below the mean: as many as there are, as the
    taker has room for and as the giver has too many. At most E + 2R transfers.

    Args:
        loads: [R, E] or [L, R, E] int32 copies per source rank.
        tables: of the same layers, spare slots filled.
        home_slot: [E] int32 (leading L as above) slot that owns each expert's weights, on a rank that holds it.
        fixed: [R] int32 copies that ranks carry besides (leading L as above).
        alive: [R] bool: the mean is of these. None = all.
        tolerance: part of the mean by which ranks may stay above it, 0..1000.
        printed: as the algorithm is printed, a rank may give more than it has too many.

    Returns:
        [P] int32 quota (with a leading L if the tables have one).
    """
    if not 0 <= tolerance <= 1000:
        raise ValueError(f"tolerance must be in 0..1000, got {tolerance}")
    where = (tables.data, home_slot, tables.num_ranks, tables.num_slots)
    return call(_shard_tokens, loads, *where, fixed, alive, round(tolerance * MILLION), printed)
