"""group_copies: where the copies of a group of slots lie once they are sorted by slot; wrapper and fake."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from isoload.ops.library import call, ints, longs, op
from isoload.ops.results import Grouping


def _fake(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    copy, slot = longs(a.slots, a.num_places), longs(a.slots, a.num_places)
    return copy, slot, ints(a.slots, a.num_slots), longs(a.slots, *a.slots.shape)


_group_copies = op("group_copies", _fake)


def group_copies(slots: Tensor, first: int, num_slots: int, num_places: int | None = None) -> Grouping:
    """Sorts the copies of local slots ``first .. first + num_slots - 1``; others count as absent.

    Stable: by slot, then row, then k.

    Args:
        slots: [N, K] int32 or int64 local slots; -1 = absent.
        first: the group's first local slot.
        num_slots: S.
        num_places: C, most copies of the group. None: N*K. Copies beyond them are a ValueError on CPU; on CUDA they
            count as absent and set the device's error word.
    """
    places = slots.numel() if num_places is None else num_places
    return Grouping(*call(_group_copies, slots, first, num_slots, places))
