"""Rows in fp8 over DeepEP's doubles: what arrives is the token rounded to e4m3 by blocks of 128; gradients are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from isoload import Topology
from isoload.transport import CollectiveGroup
from isoload.transport.deep_ep.wires import from_fp8, to_fp8
from support.batches import MAX_TOKENS, draw
from support.deep_ep_transports import BUFFERS, make_dispatcher
from support.processes import run_ranks

E4M3 = np.array([i.item() for i in torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()])


def rounded(x: Tensor) -> np.ndarray:
    """Block by block: the nearest multiple of the scale that e4m3 has a number for, in plain loops."""
    values = x.float().numpy()
    found = np.zeros_like(values)
    for t, row in enumerate(values):
        for start in range(0, len(row), 128):
            block = row[start : start + 128]
            scale = np.float32(max(np.abs(block).max(), np.float32(1e-4))) / np.float32(448)
            for i, value in enumerate(block):
                distance = np.abs(np.abs(value / scale) - E4M3)
                nearest = E4M3[int(distance.argmin())]
                found[t, start + i] = np.sign(value) * np.float32(nearest) * scale
    return found


def test_blocks_are_rounded_to_their_own_scale() -> None:
    draw_ = torch.Generator().manual_seed(3)
    x = torch.randn(5, 384, generator=draw_)
    x[0] = 0
    x[1, :128] *= 1e4
    x[2, 128:256] *= 1e-8
    x = x.bfloat16()
    rows, scales = to_fp8(x)
    assert rows.dtype == torch.float8_e4m3fn and scales.shape == (5, 3) and scales.dtype == torch.float32
    back = from_fp8(rows, scales)
    np.testing.assert_allclose(back.float().numpy(), rounded(x), rtol=2**-8, atol=1e-12)
    big = x.float().abs() > scales.repeat_interleave(128, 1)  # above what e4m3 rounds coarsely
    assert ((back.float() - x.float()).abs()[big] <= x.float().abs()[big] * (1 / 16 + 2**-8)).all()
    assert back.isfinite().all() and not back[0].any()


def forward_and_back(rank: int, kind: str, waits: bool) -> None:
    batch = draw("fp8", 2, dtype=torch.bfloat16, width=256)
    group = CollectiveGroup(Topology(2))
    shape = batch.x[0].shape[1], batch.slots[0].shape[1], batch.slots_per_rank
    grads = []
    for fp8 in (True, False):
        made = make_dispatcher(group, BUFFERS[kind], *shape, waits, fp8=fp8)
        x, weights = batch.x[rank].clone().requires_grad_(), batch.weights[rank].clone().requires_grad_()
        (got,) = made.dispatch([x], [batch.slots[rank]], [weights], batch.slots_per_rank)
        (out,) = made.combine([got.rows * 2 + got.weights.sum(1, keepdim=True).bfloat16()], [got])
        out.float().sum().backward()
        grads.append((x.grad, weights.grad))
        real = (got.slots >= 0).any(1)
        assert got.rows.dtype == torch.bfloat16 and not got.rows[~real].any()
        expected = [batch.x[source][token] for source, token, *_ in batch.received_by(rank)]
        wanted = torch.stack(expected)
        assert torch.equal(got.rows[real], from_fp8(*to_fp8(wanted)) if fp8 else wanted)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("kind", BUFFERS)
def test_rows_arrive_rounded_and_gradients_are_not(kind: str, waits: bool) -> None:
    run_ranks(forward_and_back, 2, kind, waits)


def low_latency(rank: int) -> None:
    made: Any = make_dispatcher(
        CollectiveGroup(Topology(2)), BUFFERS["Buffer"], 2048, 2, 2, False, low_latency=True, fp8=True,
        max_tokens_per_rank=MAX_TOKENS + 1,
    )  # fmt: skip
    x = torch.randn(3, 2048).bfloat16()
    slots = torch.tensor([[0, 3], [1, -1], [2, 0]])
    (got,) = made.dispatch([x], [slots], [torch.ones(3, 2)], 2)
    assert made.weights_at_source and got.rows.dtype == torch.bfloat16
    (out,) = made.combine([got.rows], [got])
    wanted = from_fp8(*to_fp8(x)).float() * torch.tensor([[2.0], [1.0], [2.0]])
    assert torch.equal(out, wanted.bfloat16())


def test_low_latency() -> None:
    run_ranks(low_latency, 2)


def differing(rank: int) -> None:
    with pytest.raises(
        ValueError, match="fp8 must be the same on all ranks, got False on rank 0 and True on rank 1"
    ):
        make_dispatcher(CollectiveGroup(Topology(2)), BUFFERS["EPBuffer"], 256, 2, 2, fp8=bool(rank))


def test_ranks_agree_on_fp8() -> None:
    run_ranks(differing, 2)
