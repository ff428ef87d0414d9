"""count: copies per expert, masked entries left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from isoload import ops, reference


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("experts", [1, 3, 64, 257, 1030])
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (33, 8), (4001, 6), (4097, 8), (17,), (3, 5, 2), ()])
def test_equals_bincount_and_reference(shape: tuple[int, ...], experts: int, dtype: torch.dtype) -> None:
    ids = np.random.default_rng([experts, *shape]).integers(-1, experts, shape)
    topk_ids = torch.from_numpy(np.asarray(ids)).to(dtype)
    counts = ops.count(topk_ids, experts)
    assert counts.dtype == torch.int32 and counts.shape == (experts,)
    assert counts.tolist() == np.bincount(ids[ids >= 0].ravel(), minlength=experts).tolist()
    assert torch.equal(counts, reference.count(topk_ids, experts))


def test_only_masked_entries() -> None:
    assert ops.count(torch.full((7, 2), -1), 5).tolist() == [0] * 5


def test_input_need_not_be_contiguous() -> None:
    ids = torch.arange(60).view(6, 10) % 7
    assert torch.equal(ops.count(ids[:, ::3], 7), ops.count(ids[:, ::3].contiguous(), 7))
    assert torch.equal(ops.count(ids.t(), 7), ops.count(ids, 7))


REFUSED: dict[str, tuple[Any, int, str]] = {
    "dtype": (torch.ones(2, 2), 4, "topk_ids must be int32 or int64, got float32"),
    "another dtype": (
        torch.ones(2, 2, dtype=torch.int16),
        4,
        "topk_ids must be int32 or int64, got another dtype",
    ),
    "no experts": (torch.ones(2, 2, dtype=torch.int64), 0, "num_experts must be at least 1, got 0"),
    "high": (torch.tensor([[0, 4]]), 4, "topk_ids must be in -1..3, got 4"),
    "low": (torch.tensor([[0, -2]]), 4, "topk_ids must be in -1..3, got -2"),
    "high int32": (torch.tensor([[0, 4]], dtype=torch.int32), 4, "topk_ids must be in -1..3, got 4"),
    "of 64 bits": (torch.tensor([[2**32 + 1]]), 4, "topk_ids must be in -1..3, got 4294967297"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    ids, experts, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        ops.count(ids, experts)


def test_opcheck() -> None:
    op = torch.ops.isoload.count.default
    torch.library.opcheck(op, (torch.tensor([[0, 2], [-1, 1]]), 3))
    torch.library.opcheck(op, (torch.zeros(0, 4, dtype=torch.int32), 3))
