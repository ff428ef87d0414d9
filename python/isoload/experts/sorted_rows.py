"""The experts of one rank on rows that came by slot, one copy each: nothing is sorted or gathered, nothing added up.

Shapes: as in isoload.experts.compute, with K = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from isoload.experts.compute import activate
from isoload.experts.grouped_linear import projections
from isoload.experts.quantised import check_no_gradients
from isoload.experts.weights import Activation, ExpertWeights
from isoload.permutation import sum_dtype
from isoload.results import Grouping
from isoload.value_checks import put_on


def run_sorted(
    rows: Tensor,
    weights: Tensor,
    ends: Sequence[int],
    groups: Sequence[ExpertWeights],
    activation: Activation,
) -> Tensor:
    """For each row ``weight * expert(row)``.

    Args:
        rows: [N, H] in the groups' dtype, by slot; beside quantised groups in any dtype, without gradients.
        weights: [N, 1] float32 gate weights.
        ends: slot s's rows end before ends[s]; slots count through the groups.
        groups: stacks of weights: the resident rows, then the spare pool. More ends than slots have no rows.
        activation: between the two projections.

    Returns:
        [N, H] in rows' dtype. Autocast changes nothing inside.
    """
    slots = sum(group.num_slots for group in groups)
    bounds = [0, *ends[:slots]]
    if len(ends) < slots or bounds != sorted(bounds) or bounds[-1] != len(rows):
        raise ValueError(f"ends must ascend to the {len(rows)} rows over {slots} slots, got {list(ends)}")
    if weights.shape != (len(rows), 1) or weights.dtype not in (torch.float32, sum_dtype(rows.dtype)):
        raise ValueError(
            f"weights must be {[len(rows), 1]} torch.float32, got {list(weights.shape)} {weights.dtype}"
        )
    if groups[0].quantised:
        check_no_gradients()
    parts, first = [], 0
    with torch.autocast(rows.device.type, enabled=False):
        for group in groups:
            start, end = bounds[first], bounds[first + group.num_slots]
            if end > start:
                grouping = as_they_lie(bounds[first : first + group.num_slots + 1], rows.device)
                to_inner, to_hidden = projections(group, rows.dtype)
                inner = activate(activation, to_inner(rows[start:end], grouping), grouping)
                parts.append((to_hidden(inner, grouping) * weights[start:end]).to(rows.dtype))
            first += group.num_slots
        return torch.cat(parts) if parts else rows * weights.to(rows.dtype)


def as_they_lie(bounds: Sequence[int], device: torch.device) -> Grouping:
    """The grouping of rows that lie by slot already: slot s's from bounds[s] to bounds[s + 1], [S + 1]."""
    place = torch.arange(bounds[-1] - bounds[0], device=device)
    counts = [end - start for start, end in pairwise(bounds)]
    slot = torch.arange(len(counts), device=device)
    slot = slot.repeat_interleave(put_on(device, counts), output_size=len(place))
    ends = put_on(device, [end - bounds[0] for end in bounds[1:]]).to(torch.int32)
    return Grouping(place, slot, ends, place.unsqueeze(1))
