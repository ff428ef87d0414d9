"""Replacing ``block.experts`` alone leaves the model as it is: logits, auxiliary loss, router gradients."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import isoload
from isoload.layer.blocks import BlockExperts, fused_activation
from isoload.weights.experts import ClampedGLU, SwiGLU
from support.hugging_face import EXPERTS, MODELS, balanced, blocks, make_model
from support.processes import run_ranks


@pytest.mark.parametrize("name", MODELS)
def test_the_model_stays_what_it_is(name: str) -> None:
    torch.set_num_threads(1)
    ids = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(5))
    outcomes = []
    for replaced in (False, True):
        model = make_model(name)
        found = blocks(model)
        assert found, "a model with experts"
        topology = isoload.Topology(4)
        placement = isoload.place(torch.arange(EXPERTS)[None] ** 2 + 1, topology, slots_per_rank=3)
        for block in found if replaced else []:
            isoload.balance(block, topology, placement=placement, policy="exact")
        asked = {"output_router_logits": True} if name not in ("deepseek_v3",) else {}
        result = model(ids, labels=ids, **asked)
        result.loss.backward()
        router = {n: p.grad for n, p in model.named_parameters() if "gate.weight" in n or "router" in n}
        embedded = model.get_input_embeddings().weight.grad
        outcomes.append((result.logits, result.loss, getattr(result, "aux_loss", None), router, embedded))
        if replaced:
            for block in found:
                plan = block.experts.layer.last_plan
                assert plan is not None and plan.peak == plan.bound
    (logits, loss, aux, router, embedded), (logits_, loss_, aux_, router_, embedded_) = outcomes
    torch.testing.assert_close(logits_, logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(loss_, loss, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(embedded_, embedded, rtol=1e-3, atol=1e-4)
    assert (aux is None) == (aux_ is None)
    if aux is not None:
        torch.testing.assert_close(aux_, aux, rtol=1e-5, atol=1e-5)
    assert router.keys() == router_.keys()
    for key, grad in router.items():
        if grad is not None:
            torch.testing.assert_close(router_[key], grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_states_are_the_model_s_own(name: str) -> None:
    torch.set_num_threads(1)
    stock, (model, layers) = make_model(name), balanced(name)
    state, own = stock.state_dict(), model.state_dict()
    assert list(own) and list(own) == list(state)
    assert all(torch.equal(own[key], value) for key, value in state.items())
    changed = {key: value * 1.25 for key, value in state.items()}
    stock.load_state_dict(changed)
    model.load_state_dict(changed)
    ids = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(5))
    with pytest.raises(ValueError, match="replicas must be refreshed"):
        model(ids)
    for layer in layers:
        layer.refresh_replicas()
    torch.testing.assert_close(model(ids).logits, stock(ids).logits, rtol=1e-4, atol=1e-4)
    again, _ = balanced(name)
    again.load_state_dict(model.state_dict())
    assert all(torch.equal(value, changed[key]) for key, value in again.state_dict().items())


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_is_a_checkpoint_of_the_plain_one(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model, _ = balanced(name)
    model.save_pretrained(tmp_path)
    loaded = type(make_model(name)).from_pretrained(tmp_path)
    state = make_model(name).state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in loaded.state_dict().items())


def state_of_rank(rank: int) -> tuple[dict[str, torch.Tensor], list[int], torch.Tensor]:
    torch.set_num_threads(1)
    model, topology = make_model("gpt_oss"), isoload.Topology(2)
    placement = isoload.place(torch.arange(EXPERTS).flip(0).repeat(2, 1), topology)
    [first, *_] = isoload.balance(
        model, topology, transport=isoload.CollectiveTransport(topology), placement=placement
    )
    state = model.state_dict()
    states: list[Any] = [None, None]
    dist.all_gather_object(states, state)
    with pytest.raises(ValueError, match="home_experts must hold experts .*, whose home is this rank, got"):
        model.load_state_dict(states[1 - rank])  # the other rank's file
    other = make_model("gpt_oss")
    for parameter in other.parameters():
        parameter.data.zero_()
    isoload.balance(other, topology, transport=isoload.CollectiveTransport(topology), placement=placement)
    other.load_state_dict(state)
    assert all(torch.equal(value, state[key]) for key, value in other.state_dict().items())
    other.load_state_dict(
        make_model("gpt_oss").state_dict()
    )  # a checkpoint of the model: each rank takes its own
    ids = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(5 + rank))
    torch.testing.assert_close(other(ids).logits, make_model("gpt_oss")(ids).logits, rtol=1e-4, atol=1e-4)
    return state, first.placement.home_experts(0, rank), other(ids).logits


def test_a_process_saves_its_own_experts() -> None:
    whole = make_model("gpt_oss").state_dict()
    for rank, (state, homes, _) in enumerate(run_ranks(state_of_rank, 2)):
        prefix, part = "model.layers.0.mlp.experts.", f"rank_{rank}_of_2."
        stacks = {"gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"}
        assert {key.removeprefix(prefix) for key in state if key.startswith(prefix)} == {
            part + name for name in (*stacks, "home_experts")
        }
        experts = state[prefix + part + "home_experts"].tolist()
        assert sorted(experts) == homes and len(homes) < EXPERTS
        for name in stacks:
            assert torch.equal(state[prefix + part + name], whole[prefix + name][experts])


def test_an_activation_of_the_model_s_own() -> None:
    """GELU between the projections: no kernel of isoload's, the model's function instead."""
    MODELS["gelu"] = (*MODELS["qwen3"][:2], {**MODELS["qwen3"][2], "hidden_act": "gelu"})
    ids = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(5))
    model, layers = balanced("gelu")
    assert not isinstance(layers[0].activation, SwiGLU | ClampedGLU)
    torch.testing.assert_close(model(ids).logits, make_model("gelu")(ids).logits, rtol=1e-4, atol=1e-4)
    del MODELS["gelu"]


@pytest.mark.parametrize("name", ["deepseek_v4", "gpt_oss"])
@pytest.mark.parametrize("limit", [0.05, 10.0, 3e4])
def test_a_clamp_is_found_wherever_it_begins(name: str, limit: float) -> None:
    """One that begins beyond the values tried would be left out, and only large values would tell."""
    modeling = import_module(f"transformers.models.{name}.modeling_{name}")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 8, "num_local_experts": 2}
    if name == "deepseek_v4":
        experts = modeling.DeepseekV4Experts(modeling.DeepseekV4Config(**sizes, swiglu_limit=limit))
    else:
        experts = modeling.GptOssExperts(modeling.GptOssConfig(**sizes, swiglu_limit=limit))
    gate_up = torch.randn(50, 16, generator=torch.Generator().manual_seed(6)) * 3 * limit
    assert (gate_up > limit).any() and (gate_up < -limit).any()
    torch.testing.assert_close(fused_activation(experts)(gate_up), experts._apply_gate(gate_up))


def test_refused_models() -> None:
    topology = isoload.Topology(2)
    with pytest.raises(
        ValueError, match="model must have MoE blocks with experts that transformers fuses, got Linear"
    ):
        isoload.balance(torch.nn.Linear(2, 2), topology)
    model = make_model("qwen3")
    placement = isoload.place(torch.ones(3, EXPERTS), topology)
    with pytest.raises(ValueError, match="placement must have a layer for each of the 2 MoE blocks, got 3"):
        isoload.balance(model, topology, placement=placement)
    experts = blocks(model)[1].experts
    for flag, value, message in (
        ("has_gate", False, "experts.has_gate must be True, got False in Qwen3MoeExperts"),
        ("has_post_expert_norm", True, "experts.has_post_expert_norm must be False, got True"),
    ):
        before = getattr(experts, flag)
        setattr(experts, flag, value)
        with pytest.raises(ValueError, match=message):
            isoload.balance(model, topology)
        setattr(experts, flag, before)
        assert not any(isinstance(block.experts, BlockExperts) for block in blocks(model))
    experts.down_proj.data = experts.down_proj.data.to(torch.float8_e4m3fn)
    with pytest.raises(
        ValueError, match="experts.down_proj must be a Parameter of float64, float32, bfloat16 or float16"
    ):
        isoload.balance(model, topology)


def test_a_model_is_balanced_once() -> None:
    model, _ = balanced("qwen3")
    message = r"this block is already balanced \(its experts are an isoload BlockExperts\)"
    for call in (isoload.balance, lambda m, t: isoload.LibraStack.from_decoder(m.model.layers, t)):
        with pytest.raises(ValueError, match=message):
            call(model, isoload.Topology(4))


class Adapter(torch.nn.Module):
    """As peft wraps a module, or the Parameters of one: it keeps what it wraps as ``base_layer``."""

    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


def by_parametrization(block: torch.nn.Module) -> None:
    torch.nn.utils.parametrize.register_parametrization(block.experts, "down_proj", torch.nn.Identity())


def by_wrapper(block: torch.nn.Module) -> None:
    block.experts = Adapter(block.experts)


@pytest.mark.parametrize("adapt", [by_wrapper, by_parametrization])
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_experts_with_adapters_are_refused(name: str, adapt: Any) -> None:
    model = make_model(name)
    adapt(blocks(model)[1])
    with pytest.raises(ValueError, match=r"experts must have no adapters \(LoRA\): merge them first"):
        isoload.balance(model, isoload.Topology(4))
    assert not any(isinstance(module, BlockExperts) for module in model.modules())


def test_refuses_shared_experts_in_the_placement() -> None:
    block = blocks(make_model("qwen3"))[0]
    topology = isoload.Topology(2)
    placement = isoload.place(torch.ones(1, EXPERTS), topology, slots_per_rank=5, num_shared=1)
    with pytest.raises(
        ValueError, match="placement must have no shared experts, which the block computes, got 1"
    ):
        isoload.balance(block, topology, placement=placement)
    [layer] = isoload.balance(block, topology)
    with pytest.raises(RuntimeError, match="experts must be called with the block's choices"):
        layer(torch.ones(3, 32))


def test_spare_slots_where_there_is_no_placement() -> None:
    """The argument of isoload.engines.megatron.balance and huggingface.register."""
    name = next(iter(MODELS))
    first, *_ = isoload.balance(make_model(name), 2, policy="llep", spare_slots=3)
    assert first.placement.spare_slots == 3
    with pytest.raises(ValueError, match="^spare_slots must be the placement's 3, got 2$"):
        isoload.balance(make_model(name), 2, placement=first.placement, policy="llep", spare_slots=2)
