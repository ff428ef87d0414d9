"""Megatron-Core's MoE layer with isoload's dispatcher: outputs, gradients and steps of its own dispatchers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from megatron_on_cpu import EXPERTS, HIDDEN, join, make_layer

import isoload
from isoload.engines import megatron
from isoload.engines.megatron import chosen_experts
from support.processes import rank_outcomes, run_ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "llep": {"min_chunk": 1, "threshold": 1.0},
    "spill_cost": {"expert_bytes": 10.0, "min_chunk": 1},
    "hedge": {},
    "exact": {},
    "dynamic": {},
    "none": {},
}


def replicas(ranks: int) -> isoload.Placement:
    """Megatron's homes, and two more slots on every rank for the next rank's first experts."""
    own = EXPERTS // ranks
    slots = [
        expert
        for rank in range(ranks)
        for expert in (
            *range(rank * own, (rank + 1) * own),
            *(((rank + 1) % ranks) * own + i for i in (0, 1)),
        )
    ]
    homes = torch.tensor([[e // own * (own + 2) + e % own for e in range(EXPERTS)]], dtype=torch.int32)
    return isoload.Placement(
        torch.tensor([slots], dtype=torch.int32), isoload.Topology(ranks), EXPERTS, home_slot=homes
    )


def train(layer: Any, rows: torch.Tensor, steps: int) -> dict[str, Any]:
    """Outputs and gradients of the first step, the weights after the last; two micro-batches are in flight at once."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    found: dict[str, Any] = {}
    for step in range(steps):
        x = rows.clone().requires_grad_()
        optimizer.zero_grad()
        output, bias = layer(x)
        other, _ = layer(0.5 * x.flip(-1))
        assert bias is None
        (torch.cat([output, other]) * torch.linspace(0.5, 1, HIDDEN)).square().mean().backward()
        if step == 0:
            found |= {"output": output.detach(), "x.grad": x.grad}
            found |= {f"{name}.grad": p.grad.clone() for name, p in layer.named_parameters()}
        dist.all_reduce(layer.router.weight.grad)  # as Megatron's data parallelism does
        optimizer.step()
    return found | {name: p.detach().clone() for name, p in layer.named_parameters()}


def body(rank: int, ranks: int, policy: str, stock: str, tokens: int, options: dict[str, Any]) -> Any:
    join(ranks)
    rows = torch.randn(tokens, 2, HIDDEN, generator=torch.Generator().manual_seed(rank))
    expected = train(make_layer(stock, ranks, **options), rows, 3)
    layer = make_layer(stock, ranks, **options)
    keys = list(layer.state_dict())
    placement = replicas(ranks) if not isoload.POLICIES[policy]().borrows else None
    (dispatcher,) = megatron.balance(layer, policy, placement=placement, **OPTIONS[policy])
    got = train(layer, rows, 3)
    assert list(layer.state_dict()) == keys
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    plan, loads = dispatcher.balancer.last_plan, dispatcher.balancer.last_loads
    bytes_ = dispatcher.group.traffic.bytes
    stock_peak = int(loads.sum(0).view(ranks, -1).sum(1).max())
    return (
        None if plan.peak is None else int(plan.peak),
        stock_peak,
        bytes_["borrow"],
        bytes_["borrowed gradients"],
    )


class Numbered(torch.nn.Module):
    """A stand-in with TEGroupedMLP's Parameters: linear_fc1.weight{i} [F, H], linear_fc2.weight{i} [H, I]."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.tp_group, self.num_local_experts = experts.tp_group, len(experts.local_experts)
        self.linear_fc1, self.linear_fc2 = torch.nn.Module(), torch.nn.Module()
        for i, expert in enumerate(experts.local_experts):
            for name in ("linear_fc1", "linear_fc2"):
                weight = torch.nn.Parameter(getattr(expert, name).weight.detach().clone())
                getattr(self, name).register_parameter(f"weight{i}", weight)

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """[H, F] and [I, H] of every expert."""
        numbers = range(self.num_local_experts)
        return [
            (getattr(self.linear_fc1, f"weight{i}").T, getattr(self.linear_fc2, f"weight{i}").T)
            for i in numbers
        ]

    def forward(self, rows: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor) -> Any:
        assert counts.device.type == "cpu" and int(counts.sum()) == len(rows) == len(probs)
        outputs = []
        for part, (first, second) in zip(rows.split(counts.tolist()), self.pairs(), strict=True):
            gate, up = (part @ first).chunk(2, dim=-1)
            outputs.append(torch.nn.functional.silu(gate) * up @ second)
        return torch.cat(outputs) * probs.unsqueeze(-1), None


class Stacked(Numbered):
    """A stand-in with GroupedMLP's Parameters: weight1 [H, experts * F] and weight2 [experts * I, H]."""

    def __init__(self, experts: Any) -> None:
        super().__init__(experts)
        stacks = [torch.stack(weights) for weights in zip(*self.pairs(), strict=True)]
        self.weight1 = torch.nn.Parameter(stacks[0].detach().contiguous().view(HIDDEN, -1))
        self.weight2 = torch.nn.Parameter(stacks[1].detach().contiguous().view(-1, HIDDEN))
        del self.linear_fc1, self.linear_fc2

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if not hasattr(self, "weight2"):
            return super().pairs()
        count = self.num_local_experts
        stacks = self.weight1.view(count, HIDDEN, -1), self.weight2.view(count, -1, HIDDEN)
        return list(zip(*stacks, strict=True))


def grouped(rank: int, ranks: int, kind: type[Numbered]) -> tuple[int, int]:
    """Megatron's dispatcher and isoload's over the same grouped experts; the last layer replays routes by plans."""
    join(ranks)
    rows = torch.randn(12, 2, HIDDEN, generator=torch.Generator().manual_seed(rank))
    made = []
    for replays in (False, False, True):
        layer = make_layer("alltoall", ranks, moe_enable_routing_replay=replays)
        layer.experts = kind(layer.experts)
        made.append(layer)
    expected, ids = train(made[0], rows, 1), []
    (dispatcher,) = megatron.balance(made[1], "llep", spare_slots=6, **OPTIONS["llep"])
    preprocess = dispatcher.dispatch_preprocess

    def noted(*args: Any) -> Any:
        found = preprocess(*args)
        ids.append(dispatcher._ids.unsqueeze(1))
        return found

    dispatcher.dispatch_preprocess = noted
    got = [train(made[1], rows, 1)]
    (known,) = megatron.balance(made[2], "llep", spare_slots=6, **OPTIONS["llep"])
    routes = isoload.KnownRoutes([[ids[0]], [ids[1]]], known.balancer.placement, group=known.group)
    plans, gathered = routes.plans("llep", **OPTIONS["llep"]), known.group.traffic.bytes["gather"]
    forward, batches, replay = made[2].forward, iter(range(2)), made[2].router.router_replay
    replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def planned(*args: Any, **kwargs: Any) -> Any:
        batch = next(batches)
        replay.set_target_indices(ids[batch].squeeze(1))
        known.plan = plans[batch, 0]
        return forward(*args, **kwargs)

    made[2].forward = planned
    got.append(train(made[2], rows, 1))
    assert known.group.traffic.bytes["gather"] == gathered
    for result in got:
        for name, value in expected.items():
            torch.testing.assert_close(
                result[name], value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
    return dispatcher.group.traffic.bytes["borrow"], known.group.traffic.bytes["borrow"]


def recomputed(rank: int) -> None:
    join(2)
    layer, rows = make_layer("alltoall", 2), torch.randn(12, 2, HIDDEN)
    (dispatcher,) = megatron.balance(layer, "llep", **OPTIONS["llep"])
    layer(rows)
    routes, placement = [[dispatcher._ids.unsqueeze(1)]], dispatcher.balancer.placement
    dispatcher.plan = isoload.KnownRoutes(routes, placement, group=dispatcher.group).plans()[0, 0]
    with patch("isoload.engines.lending.in_backward", lambda: rank == 1):
        layer(rows)


def test_recomputation_by_a_plan_is_refused_on_all_ranks() -> None:
    first, second = rank_outcomes(recomputed, 2, group_timeout=20.0)
    assert first.error is not None and "rank 1 failed" in first.error
    assert (
        second.error is not None
        and "plan must be None for layers that a checkpoint recomputes" in second.error
    )


@pytest.mark.parametrize(("ranks", "kind"), [(2, Numbered), (2, Stacked), (4, Numbered), (4, Stacked)])
def test_grouped_experts_and_plans_made_ahead(ranks: int, kind: type[Numbered]) -> None:
    found = run_ranks(grouped, ranks, ranks, kind)
    gathered, known = (sum(sent[i] for sent in found) for i in (0, 1))
    assert gathered == known > 0


@pytest.mark.parametrize("stock", ["alltoall", "allgather"])
@pytest.mark.parametrize("policy", OPTIONS)
def test_outputs_gradients_and_steps_are_megatrons(policy: str, stock: str) -> None:
    found = run_ranks(body, 2, 2, policy, stock, 12, {})
    for peak, stock_peak, *_ in found:
        if policy in ("llep", "hedge", "exact"):
            assert peak < stock_peak
    lent, returned = (sum(sent[i] for sent in found) for i in (2, 3))
    assert lent == returned and (lent > 0) == (policy != "none")


def test_experts_with_biases_and_four_ranks() -> None:
    found = run_ranks(body, 4, 4, "llep", "alltoall", 12, {"add_bias_linear": True})
    assert sum(lent for *_, lent, _ in found) > 0


def uneven(rank: int) -> tuple[float, int]:
    """One token against nine, all to experts of rank 0."""
    join(2)
    rows = torch.randn((1, 9)[rank], 1, HIDDEN, generator=torch.Generator().manual_seed(5)).abs()
    made = []
    for balanced in (False, True):
        layer = make_layer("alltoall", 2)
        with torch.no_grad():
            layer.router.weight.copy_(-torch.linspace(0.1, 1, EXPERTS).unsqueeze(1).expand(-1, HIDDEN))
        dispatchers = megatron.balance(layer, "llep") if balanced else []
        made.append(train(layer, rows, 2))
    (dispatcher,) = dispatchers
    differences = [float((made[1][name] - value).abs().max()) for name, value in made[0].items()]
    return max(differences), int(dispatcher.balancer.last_plan.quota.view(2, -1).sum(1)[1])


def test_unequal_tokens_and_a_rank_without_copies() -> None:
    for difference, of_rank_1 in run_ranks(uneven, 2):
        assert difference < 1e-5 and of_rank_1 == 0


def refusals(rank: int) -> list[str]:
    join(2)
    found = []

    def refused(layer: Any, **how: Any) -> None:
        with pytest.raises(ValueError) as error:
            megatron.balance(layer, **how)
        found.append(str(error.value))

    refused(torch.nn.Linear(2, 2))
    for name, value in {
        "moe_expert_capacity_factor": 1.0,
        "gradient_accumulation_fusion": True,
        "moe_apply_probs_on_input": True,
        "fp8": "e4m3",
        "transformer_impl": "inference_optimized",
    }.items():
        layer = make_layer("alltoall", 2)
        setattr(layer.config, name, value)
        refused(layer)
    layer = make_layer("alltoall", 2)
    layer.experts = torch.nn.Identity()
    refused(layer)
    other = isoload.place(torch.arange(EXPERTS)[None] + 1, isoload.Topology(2), EXPERTS // 2 + 1)
    refused(make_layer("alltoall", 2), placement=other)
    refused(make_layer("alltoall", 2), placement=isoload.place(torch.ones(1, 4), isoload.Topology(2)))
    refused(make_layer("alltoall", 2), policy="llep" if rank else "spill_cost")
    return found


def test_what_is_refused() -> None:
    first, second = run_ranks(refusals, 2)
    assert (
        first[:7]
        == second[:7]
        == [
            "model must have a MoELayer, got a Linear without",
            "moe_expert_capacity_factor must be None, got 1.0",
            "gradient_accumulation_fusion must be False, got True",
            "moe_apply_probs_on_input must be False, got True",
            "fp8 must be None, got 'e4m3'",
            "transformer_impl must not replace token dispatchers as its inference runs, got 'inference_optimized'",
            "experts must be a SequentialMLP, TEGroupedMLP or GroupedMLP, got a Identity",
        ]
    )
    assert "as home experts of rank 0, got" in first[7]
    assert "placement must be of the layer's 8 experts and no shared experts, got 4 and 0" in first[8]
    assert "policy" in first[9] and "policy" in second[9]


def test_more_choices_than_top_k_are_refused() -> None:
    chosen = torch.tensor([[True, False, True], [False, False, True]])
    assert chosen_experts(chosen, 2).tolist() == [[0, 2], [2, -1]]
    with pytest.raises(
        ValueError, match="routing_map must choose at most moe_router_topk=1 experts per token"
    ):
        chosen_experts(chosen, 1)


def one_rank_chooses_too_many(rank: int) -> str:
    join(2)
    (dispatcher,) = megatron.balance(make_layer("alltoall", 2), **OPTIONS["llep"])
    chosen = torch.zeros(3, EXPERTS, dtype=torch.bool)
    chosen[:, : 2 + rank] = True
    rows, weights = dispatcher.dispatch_preprocess(torch.zeros(3, 1, HIDDEN), chosen, chosen.float())
    with pytest.raises(ValueError) as error:
        dispatcher.token_dispatch(rows, weights)
    return str(error.value)


def test_a_rank_that_fails_tells_the_others() -> None:
    other, own = run_ranks(one_rank_chooses_too_many, 2)
    assert own == "routing_map must choose at most moe_router_topk=2 experts per token"
    assert "rank 1" in other


def lose_a_loan(rank: int) -> str:
    """A plan whose weights do not travel: the copies must not vanish."""
    join(2)
    layer = make_layer("alltoall", 2)
    (dispatcher,) = megatron.balance(layer, "exact", placement=replicas(2))
    dispatcher._slots = lambda: [-1] * dispatcher.balancer.placement.num_slots
    with pytest.raises(RuntimeError) as error:
        layer(torch.randn(8, 1, HIDDEN, generator=torch.Generator().manual_seed(rank)))
    return str(error.value)


def test_copies_without_weights_raise() -> None:
    for said in run_ranks(lose_a_loan, 2):
        assert "copies must be for experts of this rank" in said


def test_an_option_is_read_by_its_name_before_0_16() -> None:
    """0.15 has no moe_latent_size, and moe_router_padding_for_quantization under another name."""
    options = dict(megatron.REFUSED)
    del options["moe_router_padding_for_quantization"], options["moe_latent_size"]
    one = SimpleNamespace(size=lambda: 1)
    experts = SimpleNamespace(local_experts=[torch.nn.Linear(1, 1)])
    stock = SimpleNamespace(tp_group=one)

    def check(**older: Any) -> None:
        config = SimpleNamespace(**options, **older)
        megatron.check_layer(SimpleNamespace(experts=experts, config=config, token_dispatcher=stock))

    check(moe_router_padding_for_fp8=False)
    with pytest.raises(ValueError, match="moe_router_padding_for_quantization must be False, got True"):
        check(moe_router_padding_for_fp8=True)
    with pytest.raises(ValueError, match="got 'no such option'"):
        check()
