"""A decoder by a stack is the decoder: logits, auxiliary loss, saved keys; closed, it keeps no hook."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch

import isoload
from isoload.transport import LocalTransport
from support.hugging_face import EXPERTS, MODELS, TOP_K, blocks, make_model
from support.processes import run_ranks
from support.sweeps import slow

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


PAIRS = [*zip(MODELS, cycle(("planned", "held")))]


def is_filled(layer: isoload.MoE) -> bool:
    spare = layer.placement.spare_slots
    assert layer.last_plan is not None
    return bool((layer.last_plan.slot_to_expert.view(4, -1)[:, -spare:] >= 0).any())


@pytest.mark.parametrize(
    ("name", "local"),
    [
        *PAIRS[:2],
        *slow(*PAIRS[2:], *zip(MODELS, cycle(("held", "planned")))),
    ],
)
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
    """Its counts are those of the next block's own router on the next norm of what went into this block's norm."""
    model = make_model("qwen3", num_hidden_layers=3)
    norms = [layer.post_attention_layernorm for layer in model.model.layers]
    routers = [layer.mlp.gate for layer in model.model.layers]
    residuals: dict[int, torch.Tensor] = {}
    for i, norm in enumerate(norms):
        norm.register_forward_pre_hook(lambda _norm, args, i=i: residuals.update({i: args[0].flatten(0, -2)}))
    stack = isoload.LibraStack.from_decoder(model.model.layers, TOPOLOGY)
    counted: list[torch.Tensor] = []
    predict = stack.predictor_inputs.predict
    stack.predictor_inputs.predict = lambda *args: counted.append(args[1].more) or predict(*args)
    with torch.no_grad():
        model(IDS[0])
        for i in (0, 1):
            ids = routers[i + 1](norms[i + 1].forward(residuals[i]))[2]
            wanted = torch.stack([isoload.count(part, EXPERTS) for part in ids.tensor_split(4)])
            assert torch.equal(counted[i], wanted) and int(wanted.sum()) == len(residuals[i]) * TOP_K
    assert counted[2] is None, "the first layer is predicted by its last loads"


def on_rank(rank: int, local: str) -> tuple[list[torch.Tensor], int]:
    """Logits of this rank's own batches, and how many experts it borrowed."""
    torch.set_num_threads(1)
    model, topology = make_model("qwen3", num_hidden_layers=3), isoload.Topology(2)
    transport = isoload.CollectiveTransport(topology, None, 20 if local == "held" else None)
    stack = isoload.LibraStack.from_decoder(model.model.layers, topology, transport=transport, local=local)
    with torch.no_grad():
        logits = [model(ids[:, : 9 - rank]).logits for ids in IDS]
    assert stack.predictor_inputs is not None
    return logits, transport.group.traffic.bytes["borrow"]


@pytest.mark.parametrize("local", ["planned", "held"])
def test_a_decoder_over_processes(local: str) -> None:
    stock = make_model("qwen3", num_hidden_layers=3)
    for rank, (logits, borrowed) in enumerate(run_ranks(on_rank, 2, local)):
        assert borrowed > 0
        for got, ids in zip(logits, IDS, strict=True):
            with torch.no_grad():
                torch.testing.assert_close(got, stock(ids[:, : 9 - rank]).logits, rtol=1e-4, atol=1e-4)
