"""Routers equal loops written from their formulas, ties go to the lowest expert, and bad choices are refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from isoload.layer.routers import Gate, Router, given_choices

ROUTERS = {
    "softmax": Router(16, 4),
    "softmax renormalised": Router(12, 2, renormalise=True),
    "softmax scaled": Router(9, 3, routed_scaling_factor=2.5),
    "topk first": Router(32, 4, "topk_softmax"),
    "topk first, scaled": Router(8, 8, "topk_softmax", routed_scaling_factor=0.5),
    "sigmoid": Router(8, 2, "sigmoid"),
    "sigmoid, one": Router(16, 1, "sigmoid"),
    "deepseek": Router(32, 8, "sigmoid", True, 2.5, num_groups=8, top_groups=4),
    "groups of one": Router(6, 3, "sigmoid", True, num_groups=6, top_groups=4),
    "one group of two": Router(10, 5, "sigmoid", num_groups=2, top_groups=1),
    "all groups": Router(12, 5, "sigmoid", num_groups=3, top_groups=3),
    "everyone": Router(5, 5),
    "one expert": Router(1, 1),
}


def best(values: list[float], k: int) -> list[int]:
    """The k largest, largest first, the lowest index first among equals."""
    return sorted(range(len(values)), key=lambda e: (-values[e], e))[:k]


def route_token(
    router: Router, logits: list[float], bias: list[float] | None
) -> tuple[list[int], list[float]]:
    """One token, from the formulas."""
    if router.style == "topk_softmax":
        chosen = best(logits, router.top_k)
        powers = [math.exp(logits[e] - logits[chosen[0]]) for e in chosen]
        weights = [p / sum(powers) for p in powers]
    else:
        if router.style == "sigmoid":
            scores = [1 / (1 + math.exp(-x)) for x in logits]
        else:
            total = sum(math.exp(x - max(logits)) for x in logits)
            scores = [math.exp(x - max(logits)) / total for x in logits]
        biased = [s + b for s, b in zip(scores, bias or [0.0] * len(scores), strict=True)]
        size = len(scores) // router.num_groups
        groups = [biased[g * size : (g + 1) * size] for g in range(router.num_groups)]
        allowed = best([sum(sorted(group)[-2:]) for group in groups], router.top_groups)
        inside = [b if e // size in allowed else -math.inf for e, b in enumerate(biased)]
        chosen = best(inside, router.top_k)
        weights = [scores[e] for e in chosen]
    if router.renormalise:
        weights = [w / sum(weights) for w in weights]
    return chosen, [w * router.routed_scaling_factor for w in weights]


def biases(router: Router) -> list[Tensor | None]:
    """None, and where allowed a bias that changes choices and makes some biased scores negative."""
    return [None, torch.randn(router.num_experts).double()] if router.style == "sigmoid" else [None]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=str)
@pytest.mark.parametrize("name", list(ROUTERS))
def test_equals_the_formulas(name, dtype, tolerance):
    router = ROUTERS[name]
    print("seed 11")
    torch.manual_seed(11)
    logits = (torch.randn(41, router.num_experts) * 2).to(dtype)
    for bias in biases(router):
        topk_ids, weights = router(logits, bias)
        assert topk_ids.dtype == torch.int64 and weights.dtype == dtype
        tokens = logits.double().tolist()
        expected = [route_token(router, token, None if bias is None else bias.tolist()) for token in tokens]
        assert topk_ids.tolist() == [ids for ids, _ in expected]
        torch.testing.assert_close(
            weights.double(),
            torch.tensor([w for _, w in expected], dtype=torch.float64),
            rtol=tolerance,
            atol=tolerance,
        )


@pytest.mark.parametrize("name", list(ROUTERS))
def test_ties_go_to_the_lowest_expert(name):
    """Few different logits: nearly every choice is a tie, among experts and among groups."""
    router = ROUTERS[name]
    torch.manual_seed(5)
    for levels in (1, 2, 3):
        logits = torch.randint(levels, (23, router.num_experts)).float()
        expected = [route_token(router, token, None)[0] for token in logits.tolist()]
        assert router(logits).topk_ids.tolist() == expected


@pytest.mark.parametrize("name", list(ROUTERS))
def test_no_tokens(name):
    router = ROUTERS[name]
    topk_ids, weights = router(torch.zeros(0, router.num_experts))
    assert topk_ids.shape == weights.shape == (0, router.top_k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fp32_inside(dtype):
    """Half-precision logits are taken as they are; scores never are half precision."""
    torch.manual_seed(2)
    for router in ROUTERS.values():
        logits = torch.randn(17, router.num_experts).to(dtype)
        for half, full in zip(router(logits), router(logits.float()), strict=True):
            assert torch.equal(half, full)


def test_the_bias_only_chooses():
    router = Router(4, 2, "sigmoid")
    topk_ids, weights = router(torch.zeros(1, 4), torch.tensor([0.0, 0.0, 3.0, 1.0]))
    assert topk_ids.tolist() == [[2, 3]] and weights.tolist() == [[0.5, 0.5]]


def test_groups_are_judged_by_their_best_two():
    """Group 1 holds the single best expert; group 0's best two add up higher."""
    router = Router(6, 2, "sigmoid", num_groups=2, top_groups=1)
    scores = torch.tensor([[0.7, 0.7, 0.1, 0.9, 0.2, 0.2]])
    assert router(scores.logit()).topk_ids.tolist() == [[0, 1]]


def test_a_group_left_out_stays_out_when_scores_are_negative():
    router = Router(4, 2, "sigmoid", num_groups=2, top_groups=1)
    topk_ids, _ = router(torch.zeros(1, 4), torch.tensor([-2.0, -2.0, -3.0, -3.0]))
    assert topk_ids.tolist() == [[0, 1]]


def test_scores_of_zero_renormalise_to_zero():
    weights = Router(3, 2, "sigmoid", renormalise=True)(torch.full((1, 3), -torch.inf)).weights
    assert weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("name", list(ROUTERS))
def test_gradcheck(name):
    router = ROUTERS[name]
    torch.manual_seed(3)
    logits = torch.randn(3, router.num_experts, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: router(x).weights, logits)


@pytest.mark.parametrize("name", list(ROUTERS))
def test_no_value_is_read(name):
    """Under FakeTensorMode reading a value raises; so no device would make the host wait."""
    router = ROUTERS[name]
    with FakeTensorMode():
        topk_ids, weights = router(torch.zeros(7, router.num_experts))
        checked = given_choices(topk_ids, weights, router.num_experts)
        assert checked.topk_ids.shape == (7, router.top_k)


@pytest.mark.parametrize("in_fp32", [False, True])
def test_gate_projects_then_routes(in_fp32):
    torch.manual_seed(4)
    router = Router(8, 2, "sigmoid", renormalise=True)
    rows, weight, bias = torch.randn(9, 6).bfloat16(), torch.randn(8, 6).bfloat16(), torch.randn(8).bfloat16()
    gate = Gate(router, weight, bias, score_bias=torch.arange(8.0), project_in_fp32=in_fp32)
    logits = rows.float() @ weight.float().T + bias.float()
    expected = router(
        logits if in_fp32 else torch.nn.functional.linear(rows, weight, bias), torch.arange(8.0)
    )
    topk_ids, weights = gate(rows)
    assert torch.equal(topk_ids, expected.topk_ids)
    torch.testing.assert_close(weights, expected.weights)
    assert [name for name, _ in gate.named_parameters()] == ["weight", "bias"]
    assert [name for name, _ in gate.named_buffers()] == ["score_bias"]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_given_choices_pass_unchanged(dtype):
    ids = torch.tensor([[3, 0, -1], [-1, -1, -1], [2, 1, 0]], dtype=dtype)
    weights = torch.rand(3, 3).bfloat16().requires_grad_()
    routing = given_choices(ids, weights, 4)
    assert torch.equal(routing.topk_ids, ids.long()) and routing.topk_ids.dtype == torch.int64
    assert routing.weights.dtype == torch.float32 and routing.weights.requires_grad
    assert given_choices(ids[:0], weights[:0], 4).topk_ids.shape == (0, 3)
    assert given_choices(ids[:, :0], weights[:, :0], 4).topk_ids.shape == (3, 0)


REFUSED = {
    "style": ((8, 2, "argmax"), "style must be one of softmax_topk, topk_softmax, sigmoid, got 'argmax'"),
    "top_k": ((8, 9), "top_k must be in 1..num_experts=8, got 9"),
    "no top_k": ((8, 0), "top_k must be in 1..num_experts=8, got 0"),
    "renormalise": (
        (8, 2, "topk_softmax", True),
        "renormalise must be False for topk_softmax, whose weights add up to 1, got True",
    ),
    "num_groups": ((8, 2, "sigmoid", False, 1.0, 3), "num_groups must divide num_experts=8, got 3"),
    "no groups": ((8, 2, "sigmoid", False, 1.0, 0), "num_groups must divide num_experts=8, got 0"),
    "groups of softmax": (
        (8, 2, "softmax_topk", False, 1.0, 2),
        "num_groups must be 1 for style softmax_topk, got 2",
    ),
    "top_groups": ((8, 2, "sigmoid", False, 1.0, 2, 3), "top_groups must be in 1..num_groups=2, got 3"),
    "too few left": (
        (8, 3, "sigmoid", False, 1.0, 4, 1),
        "top_groups must leave top_k=3 experts to choose from, got 2",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused_router(name):
    arguments, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        Router(*arguments)


REFUSED_LOGITS = {
    "width": (Router(8, 2), torch.zeros(3, 7), None, r"logits must be \[T, 8\] .* got \[3, 7\]"),
    "dims": (Router(8, 2), torch.zeros(8), None, r"logits must be \[T, 8\] .* got \[8\]"),
    "dtype": (Router(8, 2), torch.zeros(3, 8).int(), None, r"floating point, got \[3, 8\] torch.int32"),
    "nan": (Router(8, 2), torch.full((3, 8), torch.nan), None, "logits must not be nan or inf, got nan"),
    "inf": (Router(8, 2), torch.full((3, 8), torch.inf), None, "logits must not be nan or inf, got inf"),
    "bias of softmax": (
        Router(8, 2),
        torch.zeros(3, 8),
        torch.zeros(8),
        "score_bias must be None for style softmax_topk, got a tensor",
    ),
    "bias width": (
        Router(8, 2, "sigmoid"),
        torch.zeros(3, 8),
        torch.zeros(7),
        r"score_bias must be \[8\], got \[7\]",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED_LOGITS))
def test_refused_logits(name):
    router, logits, bias, message = REFUSED_LOGITS[name]
    with pytest.raises(ValueError, match=message):
        router(logits, bias)


REFUSED_CHOICES = {
    "repeated": (
        torch.tensor([[0, 1, 2], [3, 1, 3]]),
        torch.zeros(2, 3),
        "topk_ids must not repeat an expert within a token, got expert 3 twice in token 1",
    ),
    "too high": (torch.tensor([[0, 4]]), torch.zeros(1, 2), r"topk_ids must be in -1..3, got 4"),
    "too low": (torch.tensor([[0, -2]]), torch.zeros(1, 2), r"topk_ids must be in -1..3, got -2"),
    "dims": (torch.tensor([0, 1]), torch.zeros(2), r"topk_ids must be \[T, K\] int32 or int64, got \[2\]"),
    "dtype": (torch.zeros(1, 2), torch.zeros(1, 2), r"topk_ids must be .* got \[1, 2\] torch.float32"),
    "weights": (
        torch.tensor([[0, 1]]),
        torch.zeros(2, 1),
        r"weights must be \[1, 2\] floating point, got \[2, 1\] torch.float32",
    ),
    "weights dtype": (
        torch.tensor([[0, 1]]),
        torch.zeros(1, 2).int(),
        r"weights must be .* got \[1, 2\] torch.int32",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED_CHOICES))
def test_refused_choices(name):
    topk_ids, weights, message = REFUSED_CHOICES[name]
    with pytest.raises(ValueError, match=message):
        given_choices(topk_ids, weights, 4)


def test_refused_gate():
    with pytest.raises(ValueError, match=r"weight must be \[8, H\], got \[7, 6\]"):
        Gate(Router(8, 2), torch.zeros(7, 6))
    with pytest.raises(ValueError, match=r"bias must be \[8\], got \[7\]"):
        Gate(Router(8, 2), torch.zeros(8, 6), torch.zeros(7))
