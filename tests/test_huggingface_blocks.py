"""Gate, experts and shared experts, put together, give the outputs of Hugging Face's blocks (random weights)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from isoload.expert_weights import Activation, ClampedGLU, ExpertWeights, SwiGLU
from isoload.experts import Experts, SharedExperts
from isoload.routers import Gate, Router

pytest.importorskip("transformers", reason="transformers is not installed")

E, K, H, I = 8, 3, 16, 24  # noqa: E741
Parts = tuple[Gate, Experts, SharedExperts | None]


def stack_of(experts: nn.Module) -> ExpertWeights:
    return ExpertWeights(experts.gate_up_proj.data, experts.down_proj.data)


def dense_of(mlp: nn.Module, gate: nn.Linear | None = None) -> SharedExperts:
    gate_up = torch.cat([mlp.gate_proj.weight.data, mlp.up_proj.weight.data])
    return SharedExperts(gate_up, mlp.down_proj.weight.data, None if gate is None else gate.weight.data)


def parts_of(block: nn.Module, router: Router, **gate: Any) -> Parts:
    return Gate(router, block.gate.weight.data, **gate), Experts(stack_of(block.experts)), None


def qwen3(normalise: bool) -> tuple[nn.Module, Callable[[], Parts]]:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as model

    block = model.Qwen3MoeSparseMoeBlock(
        model.Qwen3MoeConfig(
            num_experts=E,
            num_experts_per_tok=K,
            hidden_size=H,
            moe_intermediate_size=I,
            norm_topk_prob=normalise,
        )
    )
    return block, lambda: parts_of(block, Router(E, K, renormalise=normalise))


def olmoe() -> tuple[nn.Module, Callable[[], Parts]]:
    from transformers.models.olmoe import modeling_olmoe as model

    block = model.OlmoeSparseMoeBlock(
        model.OlmoeConfig(num_experts=E, num_experts_per_tok=K, hidden_size=H, intermediate_size=I)
    )
    return block, lambda: parts_of(block, Router(E, K))


def mixtral() -> tuple[nn.Module, Callable[[], Parts]]:
    from transformers.models.mixtral import modeling_mixtral as model

    block = model.MixtralSparseMoeBlock(
        model.MixtralConfig(num_local_experts=E, num_experts_per_tok=K, hidden_size=H, intermediate_size=I)
    )
    return block, lambda: parts_of(block, Router(E, K, renormalise=True))


def mixtral_as_topk_softmax() -> tuple[nn.Module, Callable[[], Parts]]:
    """The same choice and weights, computed the other way round."""
    block, _ = mixtral()
    return block, lambda: parts_of(block, Router(E, K, "topk_softmax"))


def qwen2() -> tuple[nn.Module, Callable[[], Parts]]:
    from transformers.models.qwen2_moe import modeling_qwen2_moe as model

    block = model.Qwen2MoeSparseMoeBlock(
        model.Qwen2MoeConfig(
            num_experts=E,
            num_experts_per_tok=K,
            hidden_size=H,
            moe_intermediate_size=I,
            shared_expert_intermediate_size=2 * I,
        )
    )

    def parts() -> Parts:
        gate, experts, _ = parts_of(block, Router(E, K))
        return gate, experts, dense_of(block.shared_expert, block.shared_expert_gate)

    return block, parts


def deepseek_v3() -> tuple[nn.Module, Callable[[], Parts]]:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as model

    block = model.DeepseekV3MoE(
        model.DeepseekV3Config(
            n_routed_experts=E,
            num_experts_per_tok=K,
            hidden_size=H,
            moe_intermediate_size=I,
            n_shared_experts=2,
            n_group=4,
            topk_group=2,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
        )
    )
    block.gate.e_score_correction_bias.normal_(std=0.5)

    def parts() -> Parts:
        router = Router(E, K, "sigmoid", True, 2.5, num_groups=4, top_groups=2)
        bias = block.gate.e_score_correction_bias
        gate, experts, _ = parts_of(block, router, score_bias=bias, project_in_fp32=True)
        return gate, experts, dense_of(block.shared_experts)

    return block, parts


def gpt_oss() -> tuple[nn.Module, Callable[[], Parts]]:
    from transformers.models.gpt_oss import modeling_gpt_oss as model

    block = model.GptOssMLP(
        model.GptOssConfig(num_local_experts=E, num_experts_per_tok=K, hidden_size=H, intermediate_size=I)
    )

    def parts() -> Parts:
        source = block.experts
        stack = ExpertWeights(
            source.gate_up_proj.data.mT,
            source.down_proj.data.mT,
            source.gate_up_proj_bias.data,
            source.down_proj_bias.data,
        )
        activation: Activation = ClampedGLU(source.alpha, source.limit)
        gate = Gate(Router(E, K, "topk_softmax"), block.router.weight.data, block.router.bias.data)
        return gate, Experts(stack, activation), None

    return block, parts


BLOCKS = {
    "qwen3": lambda: qwen3(True),
    "qwen3, not renormalised": lambda: qwen3(False),
    "olmoe": olmoe,
    "mixtral": mixtral,
    "mixtral as topk_softmax": mixtral_as_topk_softmax,
    "qwen2": qwen2,
    "deepseek_v3": deepseek_v3,
    "gpt_oss": gpt_oss,
}


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-6), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("name", list(BLOCKS))
def test_same_outputs_and_gradients(name, dtype, tolerance):
    """float64 is held to float32's accuracy: the blocks compute some scores in float32 always."""
    print("seed 21")
    torch.manual_seed(21)
    block, parts = BLOCKS[name]()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    block.to(dtype)
    gate, experts, shared = parts()
    rows = (torch.randn(37, H) * 2).to(dtype).requires_grad_()

    routing = gate(rows)
    y = experts(rows, routing.topk_ids, routing.weights)
    if shared is not None:
        y = y + shared(rows)
    original = block(rows[None])
    original = (original[0] if isinstance(original, tuple) else original)[0]

    assert len(routing.topk_ids.unique()) > K and not torch.equal(routing.topk_ids[0], routing.topk_ids[1])
    scale = float(original.detach().abs().max())
    torch.testing.assert_close(y, original, rtol=0, atol=tolerance * scale)
    grad = torch.randn_like(y)
    (got,), (expected,) = (torch.autograd.grad(result, rows, grad) for result in (y, original))
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def test_activations_are_the_originals():
    from transformers.models.gpt_oss import modeling_gpt_oss as model

    experts = model.GptOssExperts(model.GptOssConfig(num_local_experts=1, hidden_size=4, intermediate_size=4))
    gate_up = torch.randn(50, 8) * 8
    assert (gate_up.abs() > 7).any()
    torch.testing.assert_close(ClampedGLU()(gate_up), experts._apply_gate(gate_up))
    gate, up = gate_up.chunk(2, dim=1)
    torch.testing.assert_close(SwiGLU()(gate_up), nn.functional.silu(gate) * up)
