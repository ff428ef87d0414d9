"""The layer is the dense layer: forward, all gradients, training with replicas, over one process and several."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import isoload
from isoload.layer.moe import MoE
from isoload.transport import CollectiveTransport, LocalTransport
from isoload.weights.experts import ClampedGLU, ExpertWeights
from support.processes import rank_outcomes, run_ranks
from support.small_layer import (
    EXPERTS,
    HIDDEN,
    INNER,
    STACKS,
    TOKENS,
    close,
    dense_layer,
    dense_stacks,
    make_setup,
    train,
)

ROUTED_POLICIES = ["none", "static", "even", "dynamic", "exact"]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def check_against_dense(setup, activation=None, dtype=torch.float64, **how):
    """Forward and all gradients of one layer against the dense layer in float64."""
    layer = MoE(
        setup.gate, setup.dense, LocalTransport(setup.topology), setup.placement, activation=activation, **how
    )
    rows = [r.clone().requires_grad_() for r in setup.rows]
    wanted_rows = [r.double().requires_grad_() for r in setup.rows]
    stacks = dense_stacks(setup.dense, torch.float64)
    got = layer(rows)
    wanted = [dense_layer(setup, r, stacks, activation) for r in wanted_rows]
    bound = TOLERANCE[dtype]
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == dtype and close(a, b, bound)
    # the sum of squares in float64, so that both sides get the same gradient up to the forward's own rounding
    sum((y.double() ** 2).sum() for y in got).backward()
    if sum(map(len, wanted_rows)):
        sum((y**2).sum() for y in wanted).backward()
    for a, b in zip(rows, wanted_rows, strict=True):
        assert close(a.grad, b.grad, 4 * bound)
    for weights in layer.weights:
        homes = list(weights.layout.homes)
        for name, stack in zip(STACKS, stacks, strict=True):
            if stack is not None and homes:
                wanted_grad = None if stack.grad is None else stack.grad[homes]
                assert close(getattr(weights, name).grad, wanted_grad, 4 * bound), name
    return layer


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("policy", ROUTED_POLICIES)
def test_equals_the_dense_layer(policy, ranks):
    layer = check_against_dense(make_setup(ranks), policy=policy)
    assert layer.has_replicas == (ranks > 1)


@pytest.mark.parametrize("top_k", range(1, 9))
def test_every_top_k_with_masked_copies(top_k):
    check_against_dense(make_setup(4, top_k, masked=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    check_against_dense(make_setup(4, dtype=dtype), dtype=dtype)


def test_biases_and_the_clamped_activation():
    check_against_dense(make_setup(4, bias=True), activation=ClampedGLU())


@pytest.mark.parametrize("tokens", [[0, 0, 0, 0], [0, 0, 29, 0]], ids=["no tokens", "one rank has all"])
def test_lopsided_batches(tokens):
    check_against_dense(make_setup(4, tokens=tokens))


def test_shared_expert_is_added():
    setup = make_setup(4)
    shared = torch.nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
    layer = MoE(setup.gate, setup.dense, LocalTransport(setup.topology), setup.placement)
    with_shared = MoE(setup.gate, setup.dense, LocalTransport(setup.topology), setup.placement, shared=shared)
    for rows, a, b in zip(setup.rows, layer(setup.rows), with_shared(setup.rows), strict=True):
        assert torch.equal(a + shared(rows), b)


def test_training_with_replicas_is_dense_training():
    setup = make_setup(4)
    layer = MoE(setup.gate, setup.dense, LocalTransport(setup.topology), setup.placement)
    losses = train(layer, layer.parameters(), layer.refresh_replicas, setup)
    stacks = dense_stacks(setup.dense, torch.float64)[:2]
    wanted = train(lambda rows: [dense_layer(setup, r, stacks) for r in rows], stacks, lambda: None, setup)
    assert losses == pytest.approx(wanted, rel=1e-9)
    assert losses[-1] < losses[0] / 2
    home = {e: (w, i) for w in layer.weights for i, e in enumerate(w.layout.homes)}
    replicas = 0
    for weights in layer.weights:
        for i, expert in enumerate(weights.layout.replicas):
            owner, row = home[expert]
            gate_up, down = (stored[len(weights.layout.homes) :] for stored in weights.stored_rows())
            assert torch.equal(gate_up[i], owner.gate_up[row])
            assert torch.equal(down[i], owner.down[row])
            replicas += 1
    assert replicas > 0
    names = {name for name, _ in layer.named_parameters()}
    assert names == {f"weights.{r}.{n}" for r in range(4) for n in ("gate_up", "down")}


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_makes_the_same_plan(reentrant, monkeypatch):
    setup = make_setup(4)
    layer = MoE(setup.gate, setup.dense, LocalTransport(setup.topology), setup.placement)
    quotas = []

    plan = isoload.policies.Policy.plan

    def noted(*args, **how):
        made = plan(*args, **how)
        quotas.append(made.quota)
        return made

    def run(*rows):
        return tuple(layer(list(rows)))

    monkeypatch.setattr(isoload.policies.Policy, "plan", noted)

    grads = []
    for call in (run, lambda *rows: checkpoint(run, *rows, use_reentrant=reentrant)):
        layer.zero_grad()
        rows = [r.clone().requires_grad_() for r in setup.rows]
        sum((y**2).sum() for y in call(*rows)).backward()
        grads.append([r.grad for r in rows] + [p.grad for p in layer.parameters()])
    assert len(quotas) == 3 and all(torch.equal(q, quotas[0]) for q in quotas)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "nested", "reentrant in another"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_batches_in_flight_are_recomputed_with_their_own_draws(how, order):
    """Of the same rows: two draws, each the same again, whichever goes backward first."""
    setup, drawn, grads = make_setup(4), {}, []

    def recomputed(run, rows):
        if how in ("nested", "reentrant in another"):
            inner = how == "reentrant in another"
            return checkpoint(lambda *r: checkpoint(run, *r, use_reentrant=inner), *rows, use_reentrant=False)
        return checkpoint(run, *rows, use_reentrant=how == "reentrant")

    for call in (lambda run, rows: run(*rows), recomputed):
        layer = MoE(
            setup.gate, setup.dense, LocalTransport(setup.topology), setup.placement, policy="dynamic"
        )
        route, all_rows, losses = layer.balancer.route, [], []
        for batch in (0, 1):

            def run(*rows, batch=batch, layer=layer, route=route):
                slots = drawn.setdefault(batch, [])
                layer.balancer.route = lambda made: slots.append(route(made)) or slots[-1]
                return tuple(layer(list(rows)))

            all_rows.append([r.clone().requires_grad_() for r in setup.rows])
            losses.append(sum((y**2).sum() for y in call(run, all_rows[-1])))
        for batch in order:
            losses[batch].backward()
        grads.append([r.grad for rows in all_rows for r in rows] + [p.grad for p in layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    first, second = ([torch.cat(slots) for slots in drawn[batch]] for batch in (0, 1))
    assert len(first) == len(second) >= 3, "in a plain run, and at least twice under a checkpoint"
    assert all(torch.equal(slots, first[0]) for slots in first) and not torch.equal(first[0], second[0])
    assert all(torch.equal(slots, second[0]) for slots in second)


def test_a_recompute_that_chooses_otherwise_raises():
    setup = make_setup(1, dtype=torch.float32)
    dense = ExpertWeights.random(EXPERTS, HIDDEN, 8)  # one kernel for all experts: shapes do not tell
    calls = []

    def gate(rows):
        ids, weights = setup.gate(rows)
        calls.append(0)
        return (ids + len(calls) - 1) % EXPERTS, weights

    layer = MoE(gate, dense, LocalTransport(setup.topology), setup.placement)
    rows = setup.rows[0].requires_grad_()
    layer(rows).sum().backward()  # nothing is recomputed
    y = checkpoint(layer, rows, use_reentrant=False)
    with pytest.raises(RuntimeError, match="loads must be the same when a checkpoint recomputes the layer"):
        y.sum().backward()


def test_buffers_hold_only_the_copies_present(monkeypatch):
    """Where counting is free; elsewhere they hold N*K."""
    setup = make_setup(4)
    layer = MoE(setup.gate, setup.dense, LocalTransport(setup.topology), setup.placement)
    held = []

    def noted(rows, slots, weights, groups, activation, max_copies):
        held.append((max_copies, [int((slots >= 0).sum())], slots.numel()))
        return run(rows, slots, weights, groups, activation, max_copies)

    run = isoload.weights.compute.run_experts
    monkeypatch.setattr("isoload.layer.moe.run_experts", noted)
    layer(setup.rows)
    assert all(claimed == present for claimed, present, _ in held)
    assert (
        sum(present[0] for _, present, _ in held) == 3 * sum(map(len, setup.rows)) < sum(h[2] for h in held)
    )


def on_rank(rank, ranks, policy):
    """One process's part: its output, gradients, plan and traffic."""
    setup = make_setup(ranks)
    transport = CollectiveTransport(setup.topology)
    layer = MoE(setup.gate, setup.dense, transport, setup.placement, policy=policy)
    rows = setup.rows[rank].clone().requires_grad_()
    y = layer(rows)
    syncs = transport.group.traffic.host_syncs
    (y**2).sum().backward()
    layer.refresh_replicas()
    quota = layer.last_plan.quota if layer.last_plan.quota is not None else layer.last_plan.weights
    return (
        [y.detach(), rows.grad, *(p.grad for p in layer.parameters())],
        quota,
        transport.group.traffic.rows,
        syncs,
    )


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("policy", ["none", "exact"])
def test_processes_equal_virtual_ranks(policy, ranks):
    results = run_ranks(on_rank, ranks, ranks, policy)
    setup = make_setup(ranks)
    transport = LocalTransport(setup.topology)
    layer = MoE(setup.gate, setup.dense, transport, setup.placement, policy=policy)
    rows = [r.clone().requires_grad_() for r in setup.rows]
    ys = layer(rows)
    sum((y**2).sum() for y in ys).backward()
    for rank, (tensors, quota, sent, syncs) in enumerate(results):
        wanted = [ys[rank], rows[rank].grad, *(p.grad for p in layer.weights[rank].parameters())]
        for a, b in zip(tensors, wanted, strict=True):
            assert torch.equal(a, b)
        assert torch.equal(quota, layer.last_plan.quota), "the same plan on every rank"
        assert torch.equal(sent[rank], transport.group.traffic.rows[rank])
        assert syncs == 1, "one wait for the host per forward"


def test_rows_sent_are_the_distinct_pairs_of_token_and_rank():
    setup = make_setup(4)
    transport = LocalTransport(setup.topology)
    layer = MoE(setup.gate, setup.dense, transport, setup.placement)
    layer(setup.rows)
    loads = torch.stack([isoload.count(setup.gate(rows)[0], EXPERTS) for rows in setup.rows])
    for rank, rows in enumerate(setup.rows):
        slots = isoload.route(setup.gate(rows)[0], loads, layer.last_plan, rank)
        pairs = {
            (t, int(p) // setup.placement.slots_per_rank) for t, row in enumerate(slots.tolist()) for p in row
        }
        for destination in range(4):
            assert int(transport.group.traffic.rows[rank, destination]) == sum(
                d == destination for _, d in pairs
            )


def failing_gate(rank):
    setup = make_setup(3)
    gate = setup.gate

    def broken(rows):
        if rank == 1:
            raise ValueError("rows of rank 1 are not to its liking")
        return gate(rows)

    MoE(broken, setup.dense, CollectiveTransport(setup.topology), setup.placement)(setup.rows[rank])


def test_one_rank_that_fails_fails_all():
    errors = [outcome.error for outcome in rank_outcomes(failing_gate, 3, timeout=30, group_timeout=10)]
    assert "rows of rank 1 are not to its liking" in errors[1]
    for rank in (0, 2):
        assert "rank 1" in errors[rank] and "count" in errors[rank], errors[rank]


@pytest.mark.parametrize("slots", [0, 4])
def test_a_balanced_block_is_the_block(slots):
    transformers = pytest.importorskip("transformers")
    config = transformers.OlmoeConfig(
        hidden_size=HIDDEN, intermediate_size=16, num_experts=EXPERTS, num_experts_per_tok=3
    )
    torch.manual_seed(5)
    block = transformers.models.olmoe.modeling_olmoe.OlmoeSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    topology = isoload.Topology(4)
    placement = isoload.place(torch.rand(1, EXPERTS), topology, slots_per_rank=slots) if slots else None
    rows = torch.randn(1, sum(TOKENS[:4]), HIDDEN)
    with torch.no_grad():
        wanted = block(rows)
        isoload.balance(block, topology, placement=placement, policy="exact")
        for got, want in zip(
            *((y if isinstance(y, tuple) else (y,)) for y in (block(rows), wanted)), strict=True
        ):
            assert close(got, want.double(), 1e-5)


def too_many_tokens(rank):
    setup = make_setup(3)
    transport = CollectiveTransport(setup.topology, max_tokens_per_rank=8)
    MoE(setup.gate, setup.dense, transport, setup.placement)(setup.rows[rank])


def test_too_many_tokens_on_one_rank_fail_all():
    errors = [outcome.error for outcome in rank_outcomes(too_many_tokens, 3, timeout=30, group_timeout=10)]
    assert "x must have at most max_tokens_per_rank=8 tokens, got 13" in errors[2]
    for rank in (0, 1):
        assert "rank 2" in errors[rank] and "count" in errors[rank], errors[rank]


def test_refuses_what_does_not_fit():
    setup = make_setup(4)
    few = ExpertWeights.random(EXPERTS - 1, HIDDEN, INNER, dtype=torch.float64)
    with pytest.raises(ValueError, match="experts must hold num_experts=11 experts, got 10"):
        MoE(setup.gate, few, LocalTransport(setup.topology), setup.placement)
    with pytest.raises(ValueError, match="placement must be for the transport's 2 ranks, got 4"):
        MoE(setup.gate, setup.dense, LocalTransport(isoload.Topology(2)), setup.placement)
    with pytest.raises(ValueError, match="spare_slots must be at least 1 for policy llep, got 0"):
        MoE(setup.gate, setup.dense, LocalTransport(setup.topology), setup.placement, policy="llep")
    layer = MoE(setup.gate, setup.dense, LocalTransport(setup.topology), setup.placement)
    with pytest.raises(ValueError, match="spare_slots must be at least 1 for policy llep, got 0"):
        layer.policy = isoload.POLICIES["llep"]()
    assert layer.policy.name == "exact"
    with pytest.raises(ValueError, match="policy must be one of"):
        MoE(setup.gate, setup.dense, LocalTransport(setup.topology), setup.placement, policy="best")
    with pytest.raises(ValueError, match=r"layer must be in 0\.\.1, got 2"):
        MoE(setup.gate, setup.dense, LocalTransport(setup.topology), setup.placement, layer=2)
