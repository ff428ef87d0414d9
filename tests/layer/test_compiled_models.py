"""Whole balanced models of Hugging Face, compiled into one graph: the bits of eager code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import isoload
from isoload.transport import CollectiveTransport
from support.compiled import assert_equal, compile_whole
from support.hugging_face import EXPERTS, MODELS, balanced, make_model
from support.processes import run_ranks
from support.sweeps import slow


def token_ids(seed: int, length: int = 9) -> Tensor:
    return torch.randint(1, 64, (2, length), generator=torch.Generator().manual_seed(seed))


# Plain; with biases; with shared experts. The others' blocks are like qwen3's.
NAMES = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "gpt_oss", "deepseek_v3")]
NAMES += slow(*(name for name in MODELS if name not in ("qwen3", "gpt_oss", "deepseek_v3")))


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_model_is_one_graph(name: str) -> None:
    """Lengths differ, so that shapes become symbols."""
    torch.set_num_threads(1)
    model, layers = balanced(name)
    run = compile_whole(model)
    with torch.no_grad():
        for length in (9, 5):
            ids = token_ids(length, length)
            got = run(ids).logits
            plans = [layer.last_plan for layer in layers]
            assert torch.equal(got, model(ids).logits)
            assert all(plan is not None and plan.peak == plan.bound for plan in plans)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_a_whole_model_is_trained_as_one_graph(name: str) -> None:
    torch.set_num_threads(1)
    found = []
    for compiles in (False, True):
        model, layers = balanced(name)
        run = compile_whole(model) if compiles else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            loss = run(token_ids(step), labels=token_ids(step)).loss
            loss.backward()
            seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            optimizer.step()
            for layer in layers:
                layer.refresh_replicas()
        found.append(seen)
    assert len(found[0]) > 3 * 10
    assert_equal(found[1], found[0])


@pytest.mark.slow
def test_a_whole_model_under_inductor() -> None:
    torch.set_num_threads(1)
    model, _ = balanced("qwen3")
    with torch.no_grad():
        got = compile_whole(model, "inductor")(token_ids(3)).logits
    torch.testing.assert_close(got, model(token_ids(3)).logits, rtol=1e-4, atol=1e-4)


def model_over_processes(rank: int) -> None:
    torch.set_num_threads(1)
    model, topology = make_model("qwen3"), isoload.Topology(2)
    placement = isoload.place(torch.arange(EXPERTS).repeat(2, 1) ** 2, topology, slots_per_rank=6)
    isoload.balance(model, topology, transport=CollectiveTransport(topology), placement=placement)
    with torch.no_grad():
        got = compile_whole(model)(token_ids(rank)).logits
        assert torch.equal(got, model(token_ids(rank)).logits)
        plain = make_model("qwen3")(token_ids(rank)).logits
    torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_model_over_processes() -> None:
    run_ranks(model_over_processes, 2, timeout=200)
