"""States of layers with quantised experts, and what such layers refuse: casts, gradients, another format."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torch import Tensor

import isoload
from isoload.transport import CollectiveTransport
from isoload.weights.experts import ClampedGLU, ExpertWeights
from isoload.weights.shard import Shard
from support.processes import rank_outcomes, run_ranks
from support.quantised_experts import FP8, NAMES, open_quantised, random_quantised
from support.quantised_layer import (
    EVERY_FORMAT,
    EXPERTS,
    HIDDEN,
    assert_bytes,
    assert_same,
    draw_rows,
    experts,
    gate,
    place,
    same_bytes,
    virtual,
)


@EVERY_FORMAT
def test_states(name: str) -> None:
    weights, rows = experts(name), draw_rows(4)
    layer, wanted = virtual(weights, place(4, 1)), virtual(weights, place(4, 2))
    state = layer.state_dict()
    again = virtual(experts(name, 4), place(4, 1))
    again.load_state_dict(state)
    again.refresh_replicas()
    assert_bytes(again, weights)
    assert_same(again, layer, rows)
    full = layer.full_state_dict()
    stacks = {key.removeprefix("experts."): stack for key, stack in full.items()}
    assert stacks.keys() == weights.stacks().keys()
    assert all(same_bytes(stacks[key], stack) for key, stack in weights.stacks().items())
    other = virtual(experts(name, 5), place(4, 2))
    other.load_full_state_dict(full)
    assert_bytes(other, weights)
    assert_same(other, wanted, rows)
    layer.load_placement(place(4, 2))  # rows in another order
    again.load_state_dict(merge_to_rows(layer, again))
    again.refresh_replicas()
    assert_bytes(again, weights)
    assert_same(again, virtual(weights, place(4, 1)), rows)
    assert_same(layer, wanted, rows)


def merge_to_rows(layer: isoload.MoE, again: isoload.MoE) -> dict[str, Tensor]:
    """A state of the layer's experts for each rank of another, every rank with all experts."""
    full = layer.full_state_dict()
    state = {f"weights.{i}.{n.removeprefix('experts.')}": s for i in range(4) for n, s in full.items()}
    return state | {f"weights.{i}.home_experts": torch.arange(EXPERTS) for i in range(4)}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name, into", list(permutations(NAMES, 2)))
def test_a_state_of_another_format_is_refused(name: str, into: str, strict: bool) -> None:
    """Where sizes are alike, too: the blocks of 16 and of 32 in 16 columns."""
    sizes = {"hidden": 16, "intermediate": 16}
    layer, other = (virtual(experts(n, **sizes), place(2, 1)) for n in (name, into))
    state, full = layer.state_dict(), layer.full_state_dict()
    held = {key: value.clone() for key, value in other.state_dict().items()}
    with pytest.raises(ValueError, match="must be torch|must hold"):
        other.load_state_dict(state, strict=strict)
    with pytest.raises(ValueError, match="must be"):
        other.load_full_state_dict(full)
    assert all(same_bytes(held[key], value) for key, value in other.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@EVERY_FORMAT
def test_a_cast_raises_or_leaves_all_as_it_is(name: str, dtype: torch.dtype) -> None:
    weights, rows = experts(name), draw_rows(2)
    layer = virtual(weights, place(2, 1))
    layer.to(dtype)
    if name == "MXFP4":  # all is bytes
        assert_bytes(layer, weights)
        return assert_same(layer, virtual(weights, place(2, 1)), rows)
    with torch.no_grad(), pytest.raises(ValueError, match="cannot be cast .* got torch|as the experts"):
        layer(rows)


def test_states_of_another_kind_are_refused() -> None:
    weights = experts()
    layer, plain = (
        virtual(weights, place(4, 1)),
        virtual(open_quantised("fp8", weights, torch.float32), place(4, 1)),
    )
    cast = {k: v.float() if v.dtype == FP8 else v for k, v in layer.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"weights.0.gate_up must be torch.float8_e4m3fn .*, got torch.float32"
    ):
        layer.load_state_dict(cast)
    with pytest.raises(
        ValueError, match=r"weights.0.gate_up must be torch.float32 .*, got torch.float8_e4m3fn"
    ):
        plain.load_state_dict(layer.state_dict(), strict=False)
    full = layer.full_state_dict()
    with pytest.raises(ValueError, match=r"experts.down must be torch.float8_e4m3fn .*, got torch.float32"):
        layer.load_full_state_dict({**full, "experts.down": full["experts.down"].float()})
    with pytest.raises(
        ValueError, match=r"experts.gate_up must be torch.float32 .*, got torch.float8_e4m3fn"
    ):
        plain.load_full_state_dict(full)
    with pytest.raises(ValueError, match=r"experts.down_scale must be \[11, 2, 2\], got None"):
        layer.load_full_state_dict({k: v for k, v in full.items() if k != "experts.down_scale"})


def test_scales_are_never_cast() -> None:
    """Neither those of blocks nor those of matrices, and both ways round."""
    layer = virtual(experts("NVFP4"), place(4, 1))
    for stack in ("down_scale", "gate_up_scale_2"):
        for dtype in (torch.bfloat16, torch.float64):
            state, full = layer.state_dict(), layer.full_state_dict()
            state[f"weights.0.{stack}"], full[f"experts.{stack}"] = (
                s.float().to(dtype) for s in (state[f"weights.0.{stack}"], full[f"experts.{stack}"])
            )
            for load, given in ((layer.load_state_dict, state), (layer.load_full_state_dict, full)):
                with pytest.raises(ValueError, match=rf"{stack} must be torch.float.*, got {dtype}"):
                    load(given)


REFUSED_USES = {
    "gradients recorded": "quantised experts must run under torch.no_grad",
    "a Parameter trained": "down_scale must not require a gradient, which quantised experts do not have, got one",
    "cast": r"gate_up must stay torch.float8_e4m3fn, since quantised experts cannot be cast .*, got torch.bfloat16",
    "other width": rf"x must be \[T, {HIDDEN}\] torch.bfloat16 as the experts",
}


def use_wrongly(layer: isoload.MoE, use: str, rows: list[Tensor], rank: int = 0) -> None:
    """One rank's mistake."""
    held = layer.weights[0]
    if use == "a Parameter trained":
        held.down_scale.requires_grad_()
    if use == "cast":
        layer.to(torch.bfloat16)
    if use == "other width":
        rows[rank] = rows[rank][:, 1:]
    with torch.set_grad_enabled(use == "gradients recorded"):
        layer(rows if len(layer.weights) > 1 else rows[rank])


@pytest.mark.parametrize("use", REFUSED_USES)
def test_refused_uses(use: str) -> None:
    with pytest.raises(ValueError, match=REFUSED_USES[use]):
        use_wrongly(virtual(experts(), place(2, 1)), use, draw_rows(2, torch.bfloat16))


def one_rank_errs(rank: int, use: str) -> None:
    placement = place(2, 1)
    layer = isoload.MoE(gate, experts(), CollectiveTransport(placement.topology), placement)
    rows = draw_rows(2, torch.bfloat16)
    message = REFUSED_USES[use] if rank == 1 else "rank 1 failed in stage count"
    with pytest.raises(ValueError, match=message):
        use_wrongly(layer, use if rank == 1 else "", rows, rank)


@pytest.mark.parametrize("use", REFUSED_USES)
def test_all_ranks_raise(use: str) -> None:
    run_ranks(one_rank_errs, 2, use)


def trained_from_the_start(rank: int) -> None:
    weights, placement = experts(), place(2, 1)
    if rank == 1:
        weights.gate_up_scale.requires_grad_()
    isoload.MoE(gate, weights, CollectiveTransport(placement.topology), placement)


def test_all_ranks_refuse_experts_that_require_a_gradient() -> None:
    first, second = rank_outcomes(trained_from_the_start, 2)
    assert "rank 1 failed in stage construction" in first.error
    assert "gate_up_scale must not require a gradient" in second.error


def test_scales_of_halves_beside_rows_that_alternate_are_refused() -> None:
    weights = experts("NVFP4")
    for given in (weights, [Shard(place(1, 1).home_experts(0, 0), weights)]):
        with pytest.raises(
            ValueError, match=r"gate_up_scale_2 must be the same for both halves .* got \[0\.\d+"
        ):
            virtual(given, place(1, 1), activation=ClampedGLU())
    weights.gate_up_scale_2[:, 1] = weights.gate_up_scale_2[:, 0]
    layers = [virtual(w, place(4, 1), activation=ClampedGLU()) for w in (weights, opened(weights))]
    assert_same(*layers, draw_rows(4))


def opened(weights: ExpertWeights) -> ExpertWeights:
    return open_quantised("NVFP4", weights, torch.bfloat16)


def ranks_differ(rank: int, *kinds: ExpertWeights) -> None:
    placement = place(2, 1)
    isoload.MoE(gate, kinds[rank], CollectiveTransport(placement.topology), placement)


SMALL = {name: experts(name, hidden=16, intermediate=16) for name in NAMES}
UNLIKE = {
    "none is quantised": (SMALL["fp8"], open_quantised("fp8", SMALL["fp8"], torch.bfloat16)),
    "scales of the same shape": (SMALL["MXFP4"], SMALL["NVFP4"]),
    "scales of another": (SMALL["fp8"], SMALL["MXFP8"]),
    "dtypes of biases": [
        random_quantised("MXFP4", EXPERTS, 16, 16, 3, bias) for bias in (torch.bfloat16, torch.float32)
    ],
}


@pytest.mark.parametrize("case", UNLIKE)
def test_ranks_agree_on_the_format(case: str) -> None:
    for outcome in rank_outcomes(ranks_differ, 2, *UNLIKE[case]):
        assert "experts must be the same on all ranks, got gate_up" in outcome.error


@pytest.mark.parametrize("strict", [True, False])
@EVERY_FORMAT
def test_bytes_without_their_scales_are_refused(name: str, strict: bool) -> None:
    """strict=False would else leave the old scales beside new bytes, or new ones beside old."""
    layer = virtual(experts(name), place(2, 1))
    whole = layer.state_dict()
    for stack in layer.weights[0].stored():
        left = {key: value for key, value in whole.items() if not key.endswith(f".{stack}")}
        of = "gate_up" if stack.startswith("gate_up") else "down"
        with pytest.raises(
            ValueError, match=rf"must hold weights.0.{of} and weights.0.{of}_scale(_2)? together"
        ):
            layer.load_state_dict(left, strict=strict)
