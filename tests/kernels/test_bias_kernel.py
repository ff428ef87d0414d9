"""The bias kernel gives the bits of the torch that it stands for, and touches nothing behind the copies."""

from __future__ import annotations

import pytest
import torch

from isoload.kernels import activation as kernel

CASES = {  # places, width, ends
    "one element": (1, 1, (1,)),
    "odd": (13, 7, (0, 4, 9)),
    "no tail": (12, 16, (5, 5, 12)),
    "one more than a tile": (3, 1025, (2,)),
    "several tiles": (3, 2880, (1, 3)),
    "many narrow rows": (700, 3, (600,)),
    "nothing present": (8, 16, (0, 0, 0)),
    "no places": (0, 16, (0, 0)),
    "no slots": (4, 16, ()),
    "no columns": (4, 0, (3,)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", list(CASES))
def test_bits(name: str, dtype: torch.dtype) -> None:
    places, width, ends = CASES[name]
    draw = torch.Generator().manual_seed(places)
    y, bias = (torch.randn(rows, width, generator=draw).to(dtype) for rows in (places, len(ends)))
    held = ends[-1] if ends else 0
    y[held:] = torch.nan
    counts = torch.tensor(ends).diff(prepend=torch.zeros(1)).long() if ends else torch.zeros(0).long()
    slot = torch.arange(len(ends)).repeat_interleave(counts)
    slot = torch.nn.functional.pad(slot, (0, places - held), value=1 << 40)  # must not be read
    expected = y[:held] + bias[slot[:held]]
    kernel.add_bias(y, bias, slot, torch.tensor(ends, dtype=torch.int32))
    torch.testing.assert_close(y[:held], expected, rtol=0, atol=0)
    assert y[held:].isnan().all()
