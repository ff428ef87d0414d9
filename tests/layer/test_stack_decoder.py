"""A decoder by a stack is the decoder: logits, auxiliary loss, saved keys; closed, it keeps no hook."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import isoload
from isoload.predict import Lookahead
from isoload.transport import LocalTransport
from support.hugging_face import EXPERTS, MODELS, TOP_K, blocks, make_model

TOPOLOGY = isoload.Topology(4)
IDS = [torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(5 + i)) for i in range(3)]


def outputs(model: Any, name: str) -> list[tuple[torch.Tensor, ...]]:
    """Logits and, where there is one, the auxiliary loss of three batches."""
    asked = {} if name == "deepseek_v3" else {"output_router_logits": True}
    found = []
    with torch.no_grad():
        for ids in IDS:
            result = model(ids, labels=ids, **asked)
            aux = getattr(result, "aux_loss", None)
            found.append((result.logits, result.loss) if aux is None else (result.logits, result.loss, aux))
    return found


def is_filled(layer: isoload.MoE) -> bool:
    spare = layer.placement.spare_slots
    assert layer.last_plan is not None
    return bool((layer.last_plan.slot_to_expert.view(4, -1)[:, -spare:] >= 0).any())


@pytest.mark.parametrize("local", ["planned", "held"])
@pytest.mark.parametrize("name", MODELS)
def test_the_model_stays_what_it_is(name: str, local: str) -> None:
    torch.set_num_threads(1)
    stock, model = make_model(name, num_hidden_layers=3), make_model(name, num_hidden_layers=3)
    transport = LocalTransport(TOPOLOGY, 6 if local == "held" else None)
    stack = isoload.LibraStack.from_decoder(model.model.layers, TOPOLOGY, transport=transport, local=local)
    assert len(stack.layers) == len(blocks(stock)) == (2 if name == "deepseek_v3" else 3)
    for batch, (got, want) in enumerate(zip(outputs(model, name), outputs(stock, name), strict=True)):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=f"batch {batch}")
    assert all(map(is_filled, stack.layers))
    assert local == "held" or all(la.last_plan.peak == la.last_plan.bound for la in stack.layers)
    assert model.state_dict().keys() == stock.state_dict().keys()
    hooked = [m for m in model.modules() if m._forward_pre_hooks]
    assert len(hooked) == len(stack.layers)
    stack.close()
    assert not any(m._forward_pre_hooks for m in model.modules())
    for a, b in zip(outputs(model, name)[0], outputs(stock, name)[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_lookahead_reads_the_next_norm_of_the_residual() -> None:
    """Its predicted loads are those of the next gate on the next norm of what went into this one."""
    model = make_model("qwen3", num_hidden_layers=3)
    norms, gates = [], []
    for layer in model.model.layers:
        norms.append(layer.post_attention_layernorm)
        gates.append(layer.mlp.gate)
    given: list[torch.Tensor] = []
    for norm in norms:
        norm.register_forward_pre_hook(lambda _norm, args: given.append(args[0]))
    stack = isoload.LibraStack.from_decoder(model.model.layers, TOPOLOGY)
    predicted: list[torch.Tensor | None] = []
    predict = stack.feed.predict
    stack.feed.predict = lambda *args: predicted.append(predict(*args)) or predicted[-1]  # type: ignore[func-returns-value]
    with torch.no_grad():
        model(IDS[0])
        first, second = (given[i].flatten(0, 1) for i in (0, len(given) // 3))
        assert predicted[0] is not None
        wanted = gates[1](norms[1].forward(first))[2]
        sizes = [len(part) for part in wanted.tensor_split(4)]
        counts = torch.stack([isoload.count(part, EXPERTS) for part in wanted.split(sizes)])
        assert torch.equal(predicted[0], counts) and int(counts.sum()) == first.shape[0] * TOP_K
    assert isinstance(stack.feed.predictor, Lookahead)
