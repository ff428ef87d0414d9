"""A layer with quantised experts is, to the bit, the layer with what they stand for: placed, moved, borrowed, saved.

Their bytes, scales included, stay as they are on every way.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor

import isoload
from isoload.experts.weights import ExpertWeights
from isoload.transport import CollectiveTransport
from isoload.transport.deep_ep.wires import from_fp8, to_fp8
from isoload.weights.state import merge_states
from support.borrowed_layer import LLEP, Setup
from support.borrowed_layer import make_setup as make_borrowed
from support.deep_ep_double import EPBuffer
from support.processes import rank_outcomes, run_ranks
from support.quantised_experts import FP8, NAMES, open_quantised, random_quantised
from support.small_layer import TOKENS, make_gate
from support.stacks import Model
from support.stacks import run as run_layers

EXPERTS, HIDDEN, INNER = 11, 200, 136  # no block divides these sizes
DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.float16]
EVERY_FORMAT = pytest.mark.parametrize("name", NAMES)


def experts(name: str = "fp8", seed: int = 3, num: int = EXPERTS, **sizes: int) -> ExpertWeights:
    sizes = {"hidden": HIDDEN, "intermediate": INNER, **sizes}
    return random_quantised(name, num, **sizes, seed=seed)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    kinds = (a.dtype, a.shape) == (b.dtype, b.shape)
    return kinds and torch.equal(*(s.contiguous().view(-1).view(torch.uint8) for s in (a, b)))


def assert_bytes(layer: isoload.MoE, weights: ExpertWeights) -> None:
    """Every row of every rank is its expert's, to the byte."""
    for own in layer.weights:
        assert own.stored().keys() == weights.stacks().keys()
        for stack, stored in own.stored().items():
            for row, expert in zip(stored, own.layout.experts, strict=False):
                assert same_bytes(row, getattr(weights, stack)[expert]), stack


def assert_borrowed(layer: isoload.MoE, weights: ExpertWeights) -> int:
    """Every filled spare slot of the owned ranks held its expert's bytes in the last batch; how many are filled."""
    plan, pool = layer.last_plan, layer.borrowing.pool
    spare = plan.slot_to_expert.view(layer.group.topology.num_ranks, -1)[:, -layer.borrowing.spare_slots :]
    for rank, stacks in zip(layer.group.ranks, pool.buffers[pool._next], strict=True):
        for name, stack in layer.weights[0].by_name(stacks).items():
            for row, expert in zip(stack, spare[rank].tolist(), strict=True):
                assert expert < 0 or same_bytes(row, getattr(weights, name)[expert]), name
    return int((spare >= 0).sum())


def gate(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Of small_layer's, which has rows of its own width."""
    return make_gate(3, masked=True, dtype=torch.float32)(rows[:, :8])


def place(ranks: int, seed: int, spare: int = 0) -> isoload.Placement:
    counts = torch.rand(1, EXPERTS, generator=torch.Generator().manual_seed(seed)) ** 3
    size = min(-(-EXPERTS // ranks) + 1, EXPERTS) + spare
    return isoload.place(counts, isoload.Topology(ranks), slots_per_rank=size, spare_slots=spare)


def draw_rows(ranks: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    draw = torch.Generator().manual_seed(8)
    return [torch.randn(n, HIDDEN, generator=draw).to(dtype) for n in TOKENS[:ranks]]


def virtual(weights: ExpertWeights, placement: isoload.Placement, **how: Any) -> isoload.MoE:
    return isoload.MoE(gate, weights, isoload.LocalTransport(placement.topology), placement, **how)


@torch.no_grad()
def assert_same(layer: isoload.MoE, other: isoload.MoE, rows: list[Tensor]) -> None:
    got, want = layer(rows), other(rows)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, want, strict=True))
    assert any(y.any() for y in got)


@EVERY_FORMAT
@pytest.mark.parametrize("ranks, dtype", [*((4, dtype) for dtype in DTYPES), (1, torch.bfloat16)], ids=str)
def test_replicas_and_moves(ranks: int, dtype: torch.dtype, name: str) -> None:
    weights, rows = experts(name), draw_rows(ranks, dtype)
    layers = [virtual(w, place(ranks, 1)) for w in (weights, open_quantised(name, weights, dtype))]
    assert layers[0].has_replicas == (ranks > 1)
    assert_same(*layers, rows)
    for seed in (2, 4, 1):
        for layer in layers:
            layer.load_placement(place(ranks, seed), rows_per_chunk=2)
        assert_bytes(layers[0], weights)
        assert_same(*layers, rows)
    assert not any(p.requires_grad for p in layers[0].parameters())


@torch.no_grad()
@EVERY_FORMAT
def test_biases_and_empty_batches(name: str) -> None:
    """Biases in a dtype of their own; all copies masked; no rows at all."""
    weights = random_quantised(name, EXPERTS, 40, 24, 3, torch.float32)
    layers = [virtual(w, place(4, 1)) for w in (weights, open_quantised(name, weights, torch.bfloat16))]
    rows = [row[:, :40] for row in draw_rows(4)]
    assert_same(*layers, rows)
    assert_bytes(layers[0], weights)
    ids, gates = [torch.full((len(row), 2), -1) for row in rows], [torch.ones(len(row), 2) for row in rows]
    assert not any(y.any() for y in layers[0].compute(rows, ids, gates))
    assert all(len(y) == 0 for y in layers[0]([row[:0] for row in rows]))


@EVERY_FORMAT
def test_experts_of_a_shard(name: str) -> None:
    weights, placement, rows = experts(name), place(4, 1), draw_rows(4)
    homes = [placement.home_experts(0, rank) for rank in range(4)]
    own = [ExpertWeights(**{name: s[list(h)] for name, s in weights.stacks().items()}) for h in homes]
    shards = [isoload.weights.shard.Shard(h, w) for h, w in zip(homes, own, strict=True)]
    layer = isoload.MoE(gate, shards, isoload.LocalTransport(placement.topology), placement)
    dense = [
        isoload.weights.shard.Shard(h, open_quantised(name, w, torch.bfloat16))
        for h, w in zip(homes, own, strict=True)
    ]
    other = isoload.MoE(gate, dense, isoload.LocalTransport(placement.topology), placement)
    assert_same(layer, other, rows)


@EVERY_FORMAT
def test_changed_experts_are_refreshed(name: str) -> None:
    """In place, as an engine that loads weights does it."""
    layer, new, rows = virtual(experts(name), place(4, 1)), experts(name, 4), draw_rows(4)
    for held in layer.weights:
        for stack, home in held.homes().items():
            home.copy_(getattr(new, stack)[list(held.layout.homes)])
    with torch.no_grad(), pytest.raises(ValueError, match="replicas must be refreshed"):
        layer(rows)
    layer.refresh_replicas()
    assert_bytes(layer, new)
    assert_same(layer, virtual(new, place(4, 1)), rows)


@EVERY_FORMAT
@pytest.mark.parametrize("borrow", ["pull", "copy", "all_to_all"])
@torch.no_grad()
def test_borrowed_on_virtual_ranks(borrow: str, name: str) -> None:
    """Batch after batch, so that a buffer has held other experts before."""
    setups = borrowed_setups(name, 4, torch.bfloat16)
    layers = [setup.layer(**LLEP, borrow=borrow) for setup in setups]
    borrowed, gates = [], list(map(setups[0].weights, setups[0].rows))
    for shift in range(4):
        ids = [(own + 3 * shift) % 16 for own in setups[0].ids]
        got, want = (layer.compute(setups[0].rows, ids, gates) for layer in layers)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert assert_borrowed(layers[0], setups[0].dense) > 0
        borrowed.append(layers[0].last_plan.slot_to_expert)
    assert len({tuple(slots.tolist()) for slots in borrowed}) == 4


@torch.no_grad()
@EVERY_FORMAT
@pytest.mark.parametrize("local", ["planned", "held"])
def test_borrowed_ahead_in_a_stack(local: str, name: str) -> None:
    model = Model(4, dtype=torch.bfloat16)
    sizes = {"hidden": model.dense[0].down.shape[1], "intermediate": model.dense[0].down.shape[2]}
    weights = [experts(name, i, model.dense[0].num_slots, **sizes) for i in range(len(model.dense))]
    found = []
    for kinds in (weights, [open_quantised(name, w, torch.bfloat16) for w in weights]):
        model.dense = kinds
        layers = model.layers(isoload.LocalTransport(model.topology, 16))
        isoload.LibraStack(layers, "last", local=local)
        found.append([y for batch in range(3) for y in run_layers(layers, model.rows(batch))])
    assert any(layer.last_plan.slot_to_expert.view(4, -1)[:, -2:].max() >= 0 for layer in layers)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def borrowed_setups(name: str, ranks: int, dtype: torch.dtype, **sizes: int) -> list[Setup]:
    """The same batch over quantised experts, and over what they stand for."""
    setup = make_borrowed(ranks, hidden=sizes.get("hidden", HIDDEN), dtype=dtype)
    weights = experts(name, num=16, **sizes)
    return [
        Setup(setup.ids, setup.rows, setup.placement, w)
        for w in (weights, open_quantised(name, weights, dtype))
    ]


def over_processes(rank: int, ranks: int, borrow: str) -> int:
    found = []
    for name in NAMES:
        setups = borrowed_setups(name, ranks, torch.bfloat16)
        transport = CollectiveTransport(setups[0].placement.topology)
        layers = [setup.layer(transport, **LLEP, borrow=borrow) for setup in setups]
        with torch.no_grad():
            got, want = (layer(setups[0].rows[rank]) for layer in layers)
            found.append(assert_borrowed_after(layers[0], setups[0], rank))
        assert torch.equal(got, want)
    return min(found)


def assert_borrowed_after(layer: isoload.MoE, setup: Setup, rank: int) -> int:
    """The batch once more, so that the pool's last is this layer's; see :func:`assert_borrowed`."""
    layer(setup.rows[rank])
    return assert_borrowed(layer, setup.dense)


@pytest.mark.parametrize("borrow", ["all_to_all", "p2p"])
def test_borrowed_over_processes(borrow: str) -> None:
    assert min(run_ranks(over_processes, 3, 3, borrow)) > 0


def over_deep_ep(rank: int, ranks: int, name: str, inner: int, fp8_rows: bool, expert_major: bool) -> int:
    """Weights travel by DeepEP's double; rows in fp8 give what rounded rows give."""
    from isoload.transport.deep_ep import DeepEPTransport

    setups = borrowed_setups(name, ranks, torch.bfloat16, hidden=512, intermediate=inner)
    placement, rows = setups[0].placement, setups[0].rows[rank]

    def transport(fp8: bool) -> DeepEPTransport:
        group = isoload.CollectiveGroup(placement.topology).process_group
        shape = {"hidden": 512, "top_k": 3, "max_tokens_per_rank": 16}
        buffer = EPBuffer(group, num_max_tokens_per_rank=16, lb_allocation_plan_or_num_bytes=2**23)
        return DeepEPTransport(
            placement.topology,
            slots_per_rank=placement.slots_per_rank,
            buffer=buffer,
            fp8=fp8,
            expert_major=expert_major,
            **shape,
        )

    layer = setups[0].layer(transport(fp8_rows), **LLEP, borrow="deep_ep")
    other = setups[1].layer(transport(False), **LLEP, borrow="all_to_all")
    gates = setups[0].weights(rows)
    with torch.no_grad():
        got = layer.compute(rows, setups[0].ids[rank], gates)
        sent = from_fp8(*to_fp8(rows)) if fp8_rows else rows
        want = other.compute(sent, setups[0].ids[rank], gates)
    assert torch.equal(got, want) and got.any() == (len(rows) > 0)
    return assert_borrowed(layer, setups[0].dense)


@pytest.mark.parametrize("expert_major", [False, True])
@pytest.mark.parametrize("fp8_rows", [False, True])
def test_borrowed_by_deep_ep(fp8_rows: bool, expert_major: bool) -> None:
    assert min(run_ranks(over_deep_ep, 2, 2, "fp8", 256, fp8_rows, expert_major, timeout=150)) > 0


@EVERY_FORMAT
def test_deep_ep_borrows_rows_of_any_size(name: str) -> None:
    """Scales of 4 bytes and more: DeepEP moves multiples of 32."""
    assert min(run_ranks(over_deep_ep, 2, 2, name, 40, False, False, timeout=150)) > 0


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
    for full in (layer.full_state_dict(), merge_states([state])):
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
@pytest.mark.parametrize("into", NAMES)
@EVERY_FORMAT
def test_a_state_of_another_format_is_refused(name: str, into: str, strict: bool) -> None:
    """Where sizes are alike, too: the blocks of 16 and of 32 in 16 columns."""
    if name == into:
        return
    sizes = {"hidden": 16, "intermediate": 16}
    layer, other = (virtual(experts(n, **sizes), place(2, 1)) for n in (name, into))
    state, full = layer.state_dict(), layer.full_state_dict()
    held = {key: value.clone() for key, value in other.state_dict().items()}
    with pytest.raises(ValueError, match="must be torch|must hold"):
        other.load_state_dict(state, strict=strict)
    with pytest.raises(ValueError, match="must be"):
        other.load_full_state_dict(full)
    assert all(same_bytes(held[key], value) for key, value in other.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, FP8], ids=str)
@EVERY_FORMAT
def test_a_cast_raises_or_leaves_all_as_it_is(name: str, dtype: torch.dtype) -> None:
    weights, rows = experts(name), draw_rows(2)
    layer = virtual(weights, place(2, 1))
    if dtype == FP8 and name in ("fp8", "MXFP8"):
        return  # the first has a float32 scale to lose, the second nothing
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


@torch.no_grad()
@EVERY_FORMAT
def test_a_rank_without_experts_and_copies_of_a_layer(name: str) -> None:
    """Rank 1 has none, slot 3 of rank 0 none; rank 2 has replicas alone."""
    weights, rows = experts(name, num=3, hidden=16, intermediate=16), draw_rows(3)
    slots = torch.tensor([[0, 1, 2, -1, -1, -1, -1, -1, 2, 0, -1, -1]])
    placement = isoload.Placement(slots, isoload.Topology(3), 3)
    layers = [virtual(w, placement) for w in (weights, open_quantised(name, weights, torch.bfloat16))]
    ids, rows = [torch.arange(2 * len(row)).view(-1, 2) % 3 for row in rows], [row[:, :16] for row in rows]
    gates = [torch.ones(len(row), 2) for row in rows]
    want = layers[1].compute(rows, ids, gates)
    torch.save(layers[0], file := io.BytesIO())
    file.seek(0)
    for layer in (layers[0], copy.deepcopy(layers[0]), torch.load(file, weights_only=False)):
        assert_bytes(layer, weights)
        assert all(torch.equal(a, b) for a, b in zip(layer.compute(rows, ids, gates), want, strict=True))
        layer.half()
        if name != "MXFP4":
            with pytest.raises(ValueError, match="quantised experts cannot be cast"):
                layer.compute([row.half() for row in rows], ids, gates)


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
