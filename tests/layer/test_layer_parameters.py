"""The layer computes from its Parameters, wherever their memory is, or raises: never from older weights."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrize, vector_to_parameters

import isoload
from isoload.layer.moe import MoE
from isoload.transport import CollectiveTransport, LocalTransport
from support.processes import rank_outcomes, run_ranks
from support.small_layer import EXPERTS, close, make_setup

REFRESH = r"call refresh_replicas\(\) on all ranks"
MOVES = "expert Parameters must be in the layer's storage to move"


class Scaled(nn.Module):
    def forward(self, weight):
        return 1.5 * weight


def by_data(layer):
    for p in layer.expert_parameters():
        p.data = 1.5 * p.detach()


def by_flat_buffer(layer):
    """As ZeRO and FSDP do: all Parameters are views of one buffer, which is what the optimizer changes."""
    flat = parameters_to_vector(layer.expert_parameters()).detach().clone()
    first = 0
    for p in layer.expert_parameters():
        p.data = flat[first : first + p.numel()].view_as(p)
        first += p.numel()
    flat.mul_(1.5)


def by_vector(layer):
    vector_to_parameters(1.5 * parameters_to_vector(layer.expert_parameters()), layer.expert_parameters())


def by_parametrization(layer):
    for weights in layer.weights:
        for name in [name for name, _ in weights.named_parameters()]:
            parametrize.register_parametrization(weights, name, Scaled())


def in_place(layer):
    with torch.no_grad():
        for p in layer.expert_parameters():
            p.mul_(1.5)


SWAPS = {f.__name__: f for f in (by_data, by_flat_buffer, by_vector, by_parametrization)}


def without_replicas(topology, spare):
    size = -(-EXPERTS // topology.num_ranks)
    held = torch.arange(topology.num_ranks * size).view(-1, size)
    held = torch.cat([torch.where(held < EXPERTS, held, -1), held.new_full((len(held), spare), -1)], dim=1)
    return isoload.Placement(held.view(1, -1), topology, EXPERTS, spare_slots=spare)


def make_layer(replicas, spare=0, policy="exact", setup=None, transport=None, **how):
    setup = setup or make_setup(4, bias=True)
    placement = setup.placement
    if not replicas:
        placement = without_replicas(setup.topology, spare)
    transport = transport or LocalTransport(setup.topology)
    return MoE(setup.gate, setup.dense, transport, placement, policy=policy, **how), setup


def outcome(layer, rows):
    rows = [r.clone().requires_grad_() for r in rows]
    ys = layer(rows)
    sum((y**2).sum() for y in ys).backward()
    own = layer.expert_parameters() if isinstance(layer, MoE) else []
    return [y.detach() for y in ys], [r.grad for r in rows], [p.grad for p in own]


def assert_close(got, wanted):
    for ours, theirs in zip(got, wanted, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert close(a, b, 1e-12)


@pytest.mark.parametrize("swap", SWAPS.values(), ids=SWAPS)
@pytest.mark.parametrize("policy", ["exact", "llep"])
def test_a_swapped_parameter_is_followed(swap, policy):
    layer, setup = make_layer(False, spare=2, policy=policy, **{"min_chunk": 1} if policy == "llep" else {})
    wanted_layer = copy.deepcopy(layer)
    in_place(wanted_layer)
    wanted = outcome(wanted_layer, setup.rows)
    swap(layer)
    got = outcome(layer, setup.rows)
    if swap is by_parametrization:  # d(1.5 w) / dw
        wanted = (*wanted[:2], [1.5 * g for g in wanted[2]])
        order = dict(layer.named_parameters())
        names = [n for w in range(4) for n in ("gate_up", "down", "gate_up_bias", "down_bias")]
        got = (
            *got[:2],
            [order[f"weights.{i // 4}.parametrizations.{n}.original"].grad for i, n in enumerate(names)],
        )
    assert_close(got, wanted)
    if policy == "llep":
        plan = layer.last_plan
        assert (plan.quota[plan.slot_to_expert != plan.placed.resident.slot_to_expert] > 0).any(), (
            "experts were borrowed"
        )


@pytest.mark.parametrize("swap", [by_data, by_flat_buffer, by_vector, in_place])
def test_replicas_must_be_refreshed_and_then_follow(swap):
    layer, setup = make_layer(True)
    swap(layer)
    with pytest.raises(ValueError, match=REFRESH):
        layer(setup.rows)
    with pytest.raises(ValueError, match=REFRESH if swap is in_place else MOVES):
        layer.load_placement(layer.placement)
    layer.refresh_replicas()
    wanted, _ = make_layer(True)
    in_place(wanted)
    wanted.refresh_replicas()
    assert_close(outcome(layer, setup.rows), outcome(wanted, setup.rows))
    if swap is not in_place:
        layer.zero_grad()
        with pytest.raises(ValueError, match=MOVES):
            layer.load_placement(layer.placement)


@pytest.mark.parametrize("how", [{}, {"foreach": True}])
def test_training_goes_on_after_a_refresh_and_only_then(how):
    layer, setup = make_layer(True)
    optimizer = torch.optim.AdamW(layer.parameters(), **how)
    for _ in range(2):
        sum((y**2).sum() for y in layer(setup.rows)).backward()
        optimizer.step()
        with pytest.raises(ValueError, match=REFRESH):
            layer(setup.rows)
        layer.refresh_replicas()
    layer(setup.rows)


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}])
def test_a_hook_of_the_user_s_refreshes_after_every_step(how):
    """As docs/training.md says: fused steps, of which torch counts no version, too."""
    outcomes = []
    for hooked in (False, True):
        layer, setup = make_layer(True)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, **how)
        if hooked:
            optimizer.register_step_post_hook(lambda *_, layer=layer: layer.refresh_replicas())
        for _ in range(2):
            optimizer.zero_grad()
            sum((y**2).sum() for y in layer(setup.rows)).backward()
            optimizer.step()
            if not hooked:
                layer.refresh_replicas()
        outcomes.append([y.detach() for y in layer(setup.rows)])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def test_parametrized_homes_of_replicas_are_refused():
    layer, setup = make_layer(True)
    by_parametrization(layer)
    for _ in range(2):
        with pytest.raises(ValueError, match=REFRESH):
            layer(setup.rows)
        layer.refresh_replicas()


@pytest.mark.parametrize("policy", ["exact", "llep"])
def test_functional_call(policy):
    layer, setup = make_layer(False, spare=2, policy=policy, **{"min_chunk": 1} if policy == "llep" else {})
    wanted_layer = copy.deepcopy(layer)
    in_place(wanted_layer)
    wanted = outcome(wanted_layer, setup.rows)
    given = {n: (1.5 * p.detach()).requires_grad_() for n, p in layer.named_parameters()}
    rows = [r.clone().requires_grad_() for r in setup.rows]
    ys = torch.func.functional_call(layer, given, (rows,))
    sum((y**2).sum() for y in ys).backward()
    assert_close((ys, [r.grad for r in rows], [g.grad for g in given.values()]), wanted)
    replicated, setup = make_layer(True)
    same = dict(replicated.named_parameters())
    torch.func.functional_call(replicated, same, (setup.rows,))
    with pytest.raises(ValueError, match=REFRESH):
        torch.func.functional_call(replicated, {n: 1.5 * p for n, p in same.items()}, (setup.rows,))


def copied_by_pickle(module):
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("change", [lambda m: m.float().double(), copy.deepcopy, copied_by_pickle])
@pytest.mark.parametrize("swap", [None, by_data, in_place])
def test_copies_and_casts_keep_the_parameters_values(change, swap):
    layer, setup = make_layer(False)
    wanted, _ = make_layer(False)
    if swap:
        swap(layer)
        in_place(wanted)
    layer.weights = change(layer.weights)
    for a, b in zip(layer(setup.rows), wanted(setup.rows), strict=True):
        assert close(a, b, 1e-5)


def test_copies_of_stale_replicas_stay_stale():
    layer, setup = make_layer(True)
    layer.weights = copy.deepcopy(layer.weights)
    layer(setup.rows)
    in_place(layer)
    for change in (copy.deepcopy, lambda m: m.double()):
        layer.weights = change(layer.weights)
        with pytest.raises(ValueError, match=REFRESH):
            layer(setup.rows)
    layer.refresh_replicas()
    layer(setup.rows)


def test_a_parameter_of_another_shape_or_dtype_is_refused():
    layer, setup = make_layer(False)
    down = layer.weights[1].down
    for other, got in (
        (down.detach()[:0], r"got \[0, 8, 6\] torch.float64 cpu"),
        (down.detach().half(), "float16"),
    ):
        down.data = other
        with pytest.raises(ValueError, match=rf"down must be \[3, 8, 6\] torch.float64 cpu, .*{got}"):
            layer(setup.rows)
        down.data = other.double()


def stale_rank(rank):
    setup = make_setup(3, bias=True)
    layer = MoE(setup.gate, setup.dense, CollectiveTransport(setup.topology), setup.placement)
    if rank == 0:  # whose experts have replicas
        in_place(layer)
    layer(setup.rows[rank])


def test_one_ranks_stale_replicas_fail_all():
    errors = [outcome.error for outcome in rank_outcomes(stale_rank, 3, timeout=30, group_timeout=10)]
    assert "call refresh_replicas() on all ranks" in errors[0]
    for rank in (1, 2):
        assert "rank 0" in errors[rank] and "count" in errors[rank], errors[rank]


def swapped_rank(rank, policy, borrow):
    """One rank swaps its Parameters, the others change theirs in place."""
    setup = make_setup(3, bias=True)
    options = {"min_chunk": 1, "borrow": borrow} if policy == "llep" else {}
    layer, _ = make_layer(False, 2, policy, setup, CollectiveTransport(setup.topology), **options)
    (by_data if rank == 1 else in_place)(layer)
    return outcome(lambda rows: [layer(rows[0])], [setup.rows[rank]])[:2], [
        p.grad for p in layer.parameters()
    ]


@pytest.mark.parametrize(("policy", "borrow"), [("exact", None), ("llep", "all_to_all")])
def test_processes_follow_too(policy, borrow):
    setup = make_setup(3, bias=True)
    wanted, _ = make_layer(False, 2, policy, setup, **{"min_chunk": 1} if policy == "llep" else {})
    in_place(wanted)
    ys, grads, _ = outcome(wanted, setup.rows)
    for rank, ((y, grad), weights) in enumerate(run_ranks(swapped_rank, 3, policy, borrow)):
        wanted_weights = [p.grad for p in wanted.weights[rank].parameters()]
        assert_close((y, grad, weights), ([ys[rank]], [grads[rank]], wanted_weights))
