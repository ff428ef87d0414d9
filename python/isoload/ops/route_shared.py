"""route_shared: the rank of every shared copy on this rank; wrapper and fake."""

from __future__ import annotations

from torch import Tensor

from isoload.ops.library import call, ints, op

_route_shared = op("route_shared", lambda a: ints(a.slots, a.slots.shape[0], a.num_shared))


def route_shared(
    slots: Tensor,
    source_quota: Tensor,
    slots_per_rank: int,
    rank: int,
    num_shared: int = 1,
    *,
    strict: bool = False,
) -> Tensor:
    """The rank of every shared copy on this rank, exactly as often as the rank's share says.

    Ranks choose among the tokens that visit them: first the rank with fewest visitors to spare, and of those
    first the tokens that fewest other ranks can take. Tokens left over stay home, then go where copies are missing.
    Every shared expert takes its part of every rank's copies.

    Args:
        slots: [T, K] int32 or int64 routed slots of this rank's tokens; -1 = absent.
        source_quota: [R] int32, this rank's row of :func:`plan_waterfill`; sums to num_shared times the tokens that
            have a slot.
        slots_per_rank: S; slot p is on rank p // S.
        rank: this rank, the home of its tokens.
        num_shared: shared experts, 1..1024.
        strict: a token never goes to a rank it does not visit, but stays home; the other ranks' copies are then
            upper limits.

    Returns:
        [T, num_shared] int32 ranks; -1 for a token without a slot.
    """
    return call(_route_shared, slots, source_quota, slots_per_rank, rank, num_shared, strict)
