"""MoE built from a Hugging Face block's parts gives the block's outputs, whichever version's layout it has."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import isoload
from isoload.experts.compute import run_experts
from isoload.experts.weights import ClampedGLU, ExpertWeights, SwiGLU
from isoload.layer.modules import block_experts, block_gate
from isoload.layer.moe import MoE
from isoload.layer.routers import Gate, Router
from isoload.transport import LocalTransport

E, K, H, I = 8, 3, 16, 24  # noqa: E741
TOKENS = [7, 0, 19, 6]  # per rank
# model, prefix of its classes, the block's class, names of E and I, further options
BLOCKS = {
    "qwen3": ("qwen3_moe", "Qwen3Moe", "SparseMoeBlock", "num_experts", "moe_intermediate_size", {}),
    "olmoe": ("olmoe", "Olmoe", "SparseMoeBlock", "num_experts", "intermediate_size", {}),
    "mixtral": ("mixtral", "Mixtral", "SparseMoeBlock", "num_local_experts", "intermediate_size", {}),
    "deepseek_v3": (
        "deepseek_v3",
        "DeepseekV3",
        "MoE",
        "n_routed_experts",
        "moe_intermediate_size",
        {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 2.5},
    ),
    "gpt_oss": ("gpt_oss", "GptOss", "MLP", "num_local_experts", "intermediate_size", {}),
    "qwen2": (
        "qwen2_moe",
        "Qwen2Moe",
        "SparseMoeBlock",
        "num_experts",
        "moe_intermediate_size",
        {"shared_expert_intermediate_size": 2 * I},
    ),
}
CASES = [
    ("qwen3", {"norm_topk_prob": True}),
    ("qwen3", {"norm_topk_prob": False}),
    ("olmoe", {"norm_topk_prob": True}),
    ("olmoe", {"norm_topk_prob": False}),
    ("mixtral", {}),
    ("deepseek_v3", {"norm_topk_prob": True}),
    ("deepseek_v3", {"norm_topk_prob": False}),
    ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
    ("gpt_oss", {}),
]


def make_block(name, dtype=torch.float32, **options):
    """A tiny block of the installed transformers with random weights, biases and score correction."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    model, prefix, suffix, experts, width, more = BLOCKS[name]
    modeling = import_module(f"transformers.models.{model}.modeling_{model}")
    config = getattr(modeling, f"{prefix}Config")
    sizes = {experts: E, "num_experts_per_tok": K, "hidden_size": H, width: I}
    built = config(**sizes, **{**more, **options})
    # the block's own loop; transformers 5.0 has no default outside a model
    built._experts_implementation = "eager"
    block = getattr(modeling, prefix + suffix)(built)
    print("seed 31")
    torch.manual_seed(31)
    for tensor in block.state_dict().values():
        tensor.normal_(std=0.5)
    return block.to(dtype)


def make_layer(parts, policy):
    """Four virtual ranks; every expert is placed, half of the slots are replicas."""
    topology = isoload.Topology(4, 2)
    placement = isoload.place(torch.arange(E)[None] ** 2 + 1, topology, slots_per_rank=4)
    return MoE(
        parts.gate,
        parts.dense,
        LocalTransport(topology),
        placement,
        policy=policy,
        activation=parts.activation,
        shared=parts.shared,
    )


def parts_of(block):
    gate, (dense, activation) = block_gate(block), block_experts(block)
    shared = getattr(block, "shared_experts", None)
    return SimpleNamespace(gate=gate, dense=dense, activation=activation, shared=shared)


def block_output(block, rows):
    result = block(rows[None])
    return (result[0] if isinstance(result, tuple) else result)[0]


def assert_close(got, wanted, tolerance):
    torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance * float(wanted.detach().abs().max()))


def case_id(case):
    return " ".join([case[0], *(f"{key}={value}" for key, value in case[1].items())])


@pytest.mark.parametrize("policy", ["none", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_same_outputs_and_gradients(case, dtype, policy):
    name, options = case
    block = make_block(name, dtype, **options)
    if name == "deepseek_v3" and dtype == torch.float64 and isinstance(block.experts, nn.ModuleList):
        pytest.skip("transformers 4's DeepSeek-V3 block does not run in float64")
    layer = make_layer(parts_of(block), policy)
    rows = (torch.randn(sum(TOKENS), H) * 2).to(dtype).requires_grad_()
    # in float64 only gpt-oss's block computes its scores in float64; the others do so in float32 always
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12 if name == "gpt_oss" else 1e-6

    wanted = block_output(block, rows)
    got = layer(list(rows.split(TOKENS)))
    assert [len(y) for y in got] == TOKENS
    assert layer.has_replicas
    assert_close(torch.cat(got), wanted, tolerance)

    grad = torch.randn_like(wanted)
    (wanted_grad,) = torch.autograd.grad(wanted, rows, grad)
    (got_grad,) = torch.autograd.grad(torch.cat(got), rows, grad)
    assert_close(got_grad, wanted_grad, 4 * tolerance)


def test_score_correction_groups_and_scaling_decide():
    parts = parts_of(make_block("deepseek_v3"))
    rows = torch.randn(40, H)
    chosen, weights = parts.gate(rows)
    groups = chosen // (E // 4)
    assert all(len(row.unique()) <= 2 for row in groups)
    ungrouped = parts_of(make_block("deepseek_v3", n_group=1, topk_group=1))
    assert not torch.equal(ungrouped.gate(rows)[0].sort().values, chosen.sort().values)
    parts.gate.score_bias = None
    assert not torch.equal(parts.gate(rows)[0].sort().values, chosen.sort().values)
    torch.testing.assert_close(weights.sum(1), torch.full([40], 2.5))


def test_gpt_oss_clamps_on_both_sides():
    parts = parts_of(make_block("gpt_oss"))
    rows = torch.randn(sum(TOKENS), H) * 2
    gate_up = torch.einsum("th,eih->tei", rows, parts.dense.gate_up) + parts.dense.gate_up_bias
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    limit = parts.activation.limit
    assert (gate > limit).any() and (up > limit).any() and (up < -limit).any()
    assert parts.activation == ClampedGLU(1.702, 7.0)
    assert parts.dense.gate_up_bias.any() and parts.dense.down_bias.any() and parts.gate.bias.any()


def test_mixtral_is_also_a_softmax_over_the_chosen():
    """The same choice and weights, computed the other way round."""
    block = make_block("mixtral")
    parts = parts_of(block)
    parts.gate.router = Router(E, K, "topk_softmax")
    rows = torch.randn(sum(TOKENS), H) * 2
    got = make_layer(parts, "exact")(list(rows.split(TOKENS)))
    assert_close(torch.cat(got), block_output(block, rows), 1e-5)


def shared_output(mlp, rows, gate=None):
    """A shared expert is a slot that every row chooses; its gate, if it has one, is the weight."""
    gate_up = torch.cat([mlp.gate_proj.weight.data, mlp.up_proj.weight.data])
    stack = ExpertWeights(gate_up[None], mlp.down_proj.weight.data[None])
    once = torch.zeros(len(rows), 1, dtype=torch.int64)
    weights = torch.ones(len(rows), 1, dtype=rows.dtype) if gate is None else torch.sigmoid(gate(rows))
    return run_experts(rows, once, weights, [stack], SwiGLU())


def stacks_of(experts):
    if not isinstance(experts, nn.ModuleList):
        return ExpertWeights(experts.gate_up_proj.data, experts.down_proj.data)
    gate_up = [torch.cat([e.gate_proj.weight.data, e.up_proj.weight.data]) for e in experts]
    return ExpertWeights(torch.stack(gate_up), torch.stack([e.down_proj.weight.data for e in experts]))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-6), (torch.float32, 1e-5)], ids=str)
def test_qwen2_by_hand_with_a_scaled_shared_expert(dtype, tolerance):
    """A block that isoload does not know: a Gate and run_experts, put together without ranks."""
    block = make_block("qwen2", dtype)
    gate, stacks = Gate(Router(E, K), block.gate.weight.data), stacks_of(block.experts)
    rows = (torch.randn(37, H) * 2).to(dtype).requires_grad_()
    ids, weights = gate(rows)
    assert len(ids.unique()) > K and not torch.equal(ids[0], ids[1])

    got = run_experts(rows, ids, weights, [stacks], SwiGLU())
    got = got + shared_output(block.shared_expert, rows, block.shared_expert_gate)
    wanted = block_output(block, rows)
    assert_close(got, wanted, tolerance)
    grad = torch.randn_like(wanted)
    (wanted_grad,) = torch.autograd.grad(wanted, rows, grad)
    (got_grad,) = torch.autograd.grad(got, rows, grad)
    assert_close(got_grad, wanted_grad, 4 * tolerance)


def test_shared_experts_are_those_of_deepseek_v3():
    mlp = make_block("deepseek_v3").shared_experts
    rows = torch.randn(11, H)
    assert_close(shared_output(mlp, rows), mlp(rows), 1e-5)


class Module(nn.Module):
    """A module that is nothing but its attributes."""

    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def linear(weight):
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer.weight = nn.Parameter(weight.detach().clone())
    return layer


def old_layout(class_name, gate, dense, names=("gate_proj", "up_proj", "down_proj"), **settings):
    """A block as transformers 4 has it: a list of experts, and the router's settings on the block."""
    experts = []
    for gate_up, down in zip(dense.gate_up, dense.down, strict=True):
        layers = dict(zip(names, map(linear, [*gate_up.chunk(2), down]), strict=True))
        experts.append(Module(**layers, act_fn=nn.SiLU()))
    return type(class_name, (Module,), {})(gate=gate, experts=nn.ModuleList(experts), **settings)


def random_dense():
    print("seed 32")
    return ExpertWeights.random(E, H, I, generator=torch.Generator().manual_seed(32), dtype=torch.float64)


@pytest.mark.parametrize(
    "class_name, names, settings, renormalise",
    [
        ("Qwen3MoeSparseMoeBlock", ("gate_proj", "up_proj", "down_proj"), {"norm_topk_prob": True}, True),
        ("OlmoeSparseMoeBlock", ("gate_proj", "up_proj", "down_proj"), {"norm_topk_prob": False}, False),
        ("MixtralSparseMoeBlock", ("w1", "w3", "w2"), {"jitter_noise": 0.0}, True),
    ],
)
@pytest.mark.parametrize("policy", ["none", "exact"])
def test_list_of_experts_with_a_softmax(class_name, names, settings, renormalise, policy):
    torch.manual_seed(32)
    dense, rows = random_dense(), torch.randn(sum(TOKENS), H, dtype=torch.float64)
    gate = linear(torch.randn(E, H, dtype=torch.float64))
    block = old_layout(class_name, gate, dense, names, top_k=K, **settings)

    weights, ids = (rows @ gate.weight.T).softmax(1).topk(K)
    if renormalise:
        weights = weights / weights.sum(1, keepdim=True)
    layers = [[getattr(expert, name) for name in names] for expert in block.experts]
    every = torch.stack([down(F.silu(g(rows)) * up(rows)) for g, up, down in layers], dim=1)  # [T, E, H]
    wanted = (every.gather(1, ids[..., None].expand(-1, -1, H)) * weights[..., None]).sum(1)

    got = make_layer(parts_of(block), policy)(list(rows.split(TOKENS)))
    assert_close(torch.cat(got), wanted, 1e-12)


@pytest.mark.parametrize("settings_on", ["gate", "block"])
def test_list_of_experts_of_deepseek_v3(settings_on):
    """The same parts as from the installed version's block."""
    fused = make_block("deepseek_v3")
    wanted = parts_of(fused)
    settings = {
        "top_k": K,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    }
    tensors = {
        "weight": fused.gate.weight,
        "e_score_correction_bias": fused.gate.e_score_correction_bias,
    }
    on_gate, on_block = (settings, {}) if settings_on == "gate" else ({}, settings)
    gate = Module(**tensors, **on_gate)
    block = old_layout("DeepseekV3MoE", gate, wanted.dense, shared_experts=fused.shared_experts, **on_block)

    got = parts_of(block)
    assert got.gate.router == wanted.gate.router and got.shared is wanted.shared
    for name in ("weight", "score_bias"):
        assert torch.equal(getattr(got.gate, name), getattr(wanted.gate, name))
    for name in ("gate_up", "down"):
        assert torch.equal(getattr(got.dense, name), getattr(wanted.dense, name))
    assert got.activation == SwiGLU() and got.gate.project_in_fp32


def test_without_shared_experts():
    """DeepSeek's own file leaves the attribute out."""
    settings = {
        "top_k": K,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    }
    gate = Module(weight=torch.randn(E, H), e_score_correction_bias=torch.randn(E), **settings)
    assert parts_of(old_layout("DeepseekV3MoE", gate, random_dense())).shared is None


def qwen3_by_hand(**settings):
    gate = linear(torch.randn(E, H))
    return old_layout("Qwen3MoeSparseMoeBlock", gate, random_dense(), norm_topk_prob=True, **settings)


def test_refuses_an_unknown_block():
    with pytest.raises(
        ValueError, match=r"block must be one of Qwen3MoeSparseMoeBlock, .*GptOssMLP, got Linear"
    ):
        parts_of(nn.Linear(2, 2))


def test_refuses_a_block_without_a_value():
    with pytest.raises(ValueError, match=r"block must have gate.top_k or top_k, got a Qwen3Moe\w+ without"):
        parts_of(qwen3_by_hand())


def test_refuses_another_activation():
    block = qwen3_by_hand(top_k=K)
    block.experts[5].act_fn = nn.GELU()
    with pytest.raises(ValueError, match="act_fn must be SiLU, got GELU"):
        parts_of(block)


def test_refuses_experts_with_biases():
    block = qwen3_by_hand(top_k=K)
    block.experts[1].up_proj = nn.Linear(H, I, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"block.experts.1 must have no biases, got Module"):
        parts_of(block)


def test_refuses_noise():
    dense = random_dense()
    block = old_layout("MixtralSparseMoeBlock", linear(torch.randn(E, H)), dense, top_k=K, jitter_noise=0.1)
    with pytest.raises(ValueError, match=r"block.jitter_noise must be 0, got 0.1"):
        parts_of(block)


def test_refuses_experts_of_which_some_train():
    block = qwen3_by_hand(top_k=K)
    block.experts[2].up_proj.requires_grad_(False)
    with pytest.raises(
        ValueError, match="experts must all require gradients or none of them, .* got 15 of 16"
    ):
        parts_of(block)
