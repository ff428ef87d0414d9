"""The permutation to slot order: stable, sized by what the host knows, and undone by the weighted sum."""

from __future__ import annotations

import pytest
import torch

from isoload.ops import group_copies
from isoload.ops.counting import gather_copies, weighted_sum


def slots_of(seed: int) -> torch.Tensor:
    """[29, 5] of seven slots, about half absent."""
    slots = torch.randint(-7, 7, (29, 5), generator=torch.Generator().manual_seed(seed))
    return slots.clamp(min=-1)


def test_num_copies_sizes_the_buffers():
    slots = slots_of(4)
    counted = int(((slots >= 0) & (slots < 5)).sum())
    assert 0 < counted < slots.numel()
    assert len(group_copies(slots, 0, 5, counted).copy) == counted
    assert len(group_copies(slots, 0, 5).copy) == slots.numel()


def test_grouping_is_a_stable_permutation():
    slots = torch.tensor([[2, -1, 0], [0, 2, 4], [-1, 3, 2]])
    grouping = group_copies(slots, 2, 2)
    assert grouping.ends.tolist() == [3, 4] and grouping.ends.dtype == torch.int32
    assert grouping.copy[:4].tolist() == [0, 4, 8, 7]  # slot 2 in row order, then slot 3
    assert grouping.slot[:4].tolist() == [0, 0, 0, 1]
    assert grouping.position.tolist() == [[0, 9, 9], [9, 1, 9], [9, 3, 2]]  # 9 places: those at 9 are absent


def test_gather_and_sum_are_inverse():
    torch.manual_seed(8)
    slots, rows = slots_of(8), torch.randn(29, 16)
    grouping = group_copies(slots, 0, 7)
    summed = weighted_sum([(gather_copies(rows, grouping), grouping)], torch.ones(slots.shape))
    torch.testing.assert_close(summed, rows * (slots >= 0).sum(1, keepdim=True))


def test_copies_lie_in_three_parts_at_most():
    grouping = group_copies(slots_of(8), 0, 7)
    parts = [(gather_copies(torch.zeros(29, 4), grouping), grouping)] * 4
    with pytest.raises(ValueError, match="more must hold at most 2 parts, got 3"):
        weighted_sum(parts, torch.ones(slots_of(8).shape))


def test_gradients_of_rows_add_up_in_fp32():
    """256 + 1 is 256 in bf16: the eight small gradients after the large one would vanish."""
    rows = torch.zeros(1, 4, dtype=torch.bfloat16, requires_grad=True)
    copies = gather_copies(rows, group_copies(torch.arange(9)[None], 0, 9))
    copies.backward(torch.tensor([256.0, *[1.0] * 8]).bfloat16()[:, None].expand(9, 4))
    assert rows.grad is not None and rows.grad.tolist() == [[264.0] * 4]


def test_groups_share_the_copies():
    """Every present copy is in exactly one group, at a place that leads back to it."""
    slots = slots_of(9)
    groupings = [group_copies(slots, 0, 4), group_copies(slots, 4, 3)]
    present = [g.position < len(g.copy) for g in groupings]
    assert torch.equal(sum(p.int() for p in present), (slots >= 0).int())
    for g, p, first in zip(groupings, present, (0, 4), strict=True):
        copies = p.flatten().nonzero().flatten()
        assert torch.equal(g.copy[g.position.flatten()[copies]], copies)
        held = int(g.ends[-1])
        assert torch.equal(g.slot[:held] + first, slots.flatten()[g.copy[:held]])


def test_nothing_present_leaves_a_tail():
    grouping = group_copies(torch.full((4, 3), -1), 0, 2, 1)
    assert len(grouping.copy) == 1 and grouping.ends.tolist() == [0, 0]
    assert grouping.position.tolist() == [[1] * 3] * 4


def test_out_of_range_slots_are_absent():
    """What a device does with them, where values are not checked."""
    assert group_copies(torch.tensor([[5, -3, 1]]), 0, 4).position.tolist() == [[3, 3, 0]]
