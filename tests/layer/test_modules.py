"""MoE from a Hugging Face block's parts gives the block's outputs, by the block's own router and by isoload's."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import isoload
from isoload.layer.blocks import BlockGate, block_experts
from isoload.layer.moe import MoE
from isoload.layer.routers import Gate, Router
from isoload.transport import LocalTransport
from isoload.weights.compute import run_experts
from isoload.weights.experts import ClampedGLU, ExpertWeights, SwiGLU

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
    dense, activation = block_experts(block)
    shared = getattr(block, "shared_experts", None)
    return SimpleNamespace(gate=gate_of(block), dense=dense, activation=activation, shared=shared)


def gate_of(block):
    """A block's router in isoload's words."""
    own = block.router if hasattr(block, "router") else block.gate
    kind = type(own).__name__
    if kind == "GptOssTopKRouter":
        return Gate(Router(E, own.top_k, "topk_softmax"), own.weight, own.bias)
    if kind == "DeepseekV3TopkRouter":
        router = Router(
            E,
            own.top_k,
            "sigmoid",
            renormalise=own.norm_topk_prob,
            routed_scaling_factor=own.routed_scaling_factor,
            num_groups=own.num_group,
            top_groups=own.topk_group,
        )
        return Gate(router, own.weight, score_bias=own.e_score_correction_bias, project_in_fp32=True)
    renormalise = kind == "MixtralTopKRouter" or own.norm_topk_prob
    return Gate(Router(E, own.top_k, renormalise=renormalise), own.weight)


def block_output(block, rows):
    result = block(rows[None])
    return (result[0] if isinstance(result, tuple) else result)[0]


def assert_close(got, wanted, tolerance):
    torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance * float(wanted.detach().abs().max()))


def case_id(case):
    return " ".join([case[0], *(f"{key}={value}" for key, value in case[1].items())])


@pytest.mark.parametrize("read", [gate_of, BlockGate])
@pytest.mark.parametrize("policy", ["none", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_same_outputs_and_gradients(case, dtype, policy, read):
    name, options = case
    block = make_block(name, dtype, **options)
    parts = parts_of(block)
    parts.gate = read(block)
    layer = make_layer(parts, policy)
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


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-6), (torch.float32, 1e-5)], ids=str)
def test_qwen2_by_hand_with_a_scaled_shared_expert(dtype, tolerance):
    """A Gate and run_experts, put together without ranks."""
    block = make_block("qwen2", dtype)
    gate, (stacks, _) = Gate(Router(E, K), block.gate.weight.data), block_experts(block)
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


def refused(block, read, message):
    with pytest.raises(ValueError, match=message):
        read(block)


def test_refuses_what_has_no_experts_or_router():
    refused(nn.Linear(2, 2), block_experts, "block must have experts, got a Linear without")
    refused(nn.Linear(2, 2), BlockGate, "block must have a gate or router to read, got a Linear without")


def test_refuses_a_router_that_reads_more():
    block = make_block("qwen3")
    block.gate.forward = lambda rows, input_ids=None: None
    refused(
        block,
        BlockGate,
        "router must need only rows and a bias of the block, got a Qwen3MoeTopKRouter in "
        "Qwen3MoeSparseMoeBlock, which needs input_ids",
    )


IDS, WEIGHTS = torch.zeros(5, K, dtype=torch.int64), torch.zeros(5, K)
ANSWERS = {
    "logits": torch.zeros(5, E),
    "no logits": (WEIGHTS, IDS),
    "another order": (torch.zeros(5, E), IDS, WEIGHTS),
    "of other tokens": (torch.zeros(5, E), WEIGHTS[1:], IDS[1:]),
    "chosen or not": (torch.zeros(5, E), WEIGHTS, IDS.bool()),
    "weights of all experts": (torch.zeros(5, E), torch.zeros(5, E), IDS),
    "a mask": (torch.zeros(5, E), WEIGHTS[:, None], torch.zeros(5, 1, E, dtype=torch.int64)),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=list(ANSWERS))
def test_refuses_a_router_that_answers_otherwise(answer):
    block = make_block("qwen3")
    block.gate.forward = lambda rows: answer
    message = (
        r"router must return logits, weights \[T, K\] and ids \[T, K\], got something else from Qwen3MoeTopK"
    )
    refused(torch.zeros(5, H), BlockGate(block), message)


@pytest.mark.parametrize("of", ["block", "router"])
def test_refuses_noise_in_training(of):
    block = make_block("mixtral")
    (block if of == "block" else block.gate).router_jitter_noise = 0.1
    gate, rows = BlockGate(block), torch.randn(5, H)
    message = "block must be in eval mode, because training adds noise to its rows, got {'router_jitter_noise': 0.1}"
    refused(rows, gate, message)
    block.eval()
    assert torch.equal(gate(rows)[0], block.gate(rows)[2])


def test_a_gate_reads_the_bias_that_its_block_has_now():
    """Whether it is loaded, or replaced, after the gate was read."""
    pytest.importorskip("transformers")
    modeling = import_module("transformers.models.minimax_m2.modeling_minimax_m2")
    sizes = {"num_local_experts": E, "num_experts_per_tok": K, "hidden_size": H, "intermediate_size": I}
    block = modeling.MiniMaxM2SparseMoeBlock(modeling.MiniMaxM2Config(**sizes)).eval()
    torch.nn.init.normal_(block.gate.weight)
    gate, rows = BlockGate(block), torch.randn(5, H)
    for best in ([6, 1, 3], [0, 2, 7]):
        block.e_score_correction_bias = torch.zeros(E).index_fill(0, torch.tensor(best), 2.0)
        assert (gate(rows)[0].sort().values == torch.tensor(sorted(best))).all()


def test_a_gate_runs_no_hook_of_the_router():
    """transformers keeps router logits by them, for the auxiliary loss."""
    block, calls = make_block("qwen3"), []
    block.gate.register_forward_hook(lambda *_: calls.append(1))
    BlockGate(block)(torch.randn(5, H))
    assert not calls


def test_refuses_experts_with_more_parameters():
    block = make_block("qwen3")
    block.experts.scale = nn.Parameter(torch.ones(E))
    refused(
        block,
        block_experts,
        "experts must have no Parameters but gate_up_proj, down_proj, got scale in Qwen3MoeExperts",
    )
